"""Bodies and replies of the routes of Text Embeddings Inference."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts import __version__
from sie_contracts.api.shapes import MINI, ManyTexts, Number, Text, TextFlag, TokenIds, Whole, one_of

TokenEmbeddings = list[list[list[float]]]
PromptName = Annotated[
    Text, Meta(description="Name of a prompt of the model. Unset: the model's default prompt, if it has one.")
]


class _Truncated(Struct, kw_only=True):
    model: Text = UNSET
    truncate: TextFlag | None = UNSET
    truncation_direction: Literal["left", "right", "Left", "Right"] | UnsetType = UNSET


TeiInputs = Annotated[Any, one_of(str, TokenIds, Annotated[list[str | TokenIds], Meta(min_length=1)])]


class TeiEmbedAll(_Truncated, kw_only=True):
    """Request for the vectors of all tokens of some texts, given as texts or token ids."""

    EXAMPLE: ClassVar[Any] = {"inputs": "Hello"}

    inputs: TeiInputs
    prompt_name: PromptName = UNSET
    dimensions: Whole = UNSET


class TeiEmbed(TeiEmbedAll, kw_only=True):
    """Request for one vector per text, given as text or token ids. `normalize` is true by default."""

    normalize: TextFlag = UNSET


class TeiWeight(Struct, kw_only=True):
    """One entry of a sparse vector: the id of a token in the vocabulary, and its weight."""

    index: Whole = UNSET
    value: Number = UNSET


class TeiPredict(_Truncated, kw_only=True):
    """Request to classify texts, or pairs of texts."""

    EXAMPLE: ClassVar[Any] = {"inputs": "Hello"}

    inputs: Annotated[list[str | ManyTexts], Meta(min_length=1)] | str
    raw_scores: TextFlag = UNSET


class TeiSentences(Struct, kw_only=True):
    """One sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: ManyTexts


class TeiSimilarityParameters(_Truncated, kw_only=True):
    """Parameters for encoding the sentences before they are compared."""

    prompt_name: PromptName = UNSET
    dimensions: Whole = UNSET
    normalize: TextFlag = UNSET


class TeiSimilarity(Struct, kw_only=True):
    """Request to compare sentences."""

    EXAMPLE: ClassVar[Any] = {"inputs": {"source_sentence": "Hello", "sentences": ["Hi"]}}

    model: Text = UNSET
    inputs: TeiSentences
    parameters: TeiSimilarityParameters | UnsetType = UNSET


class TeiTokenize(Struct, kw_only=True):
    """Request for the tokens of some texts."""

    EXAMPLE: ClassVar[Any] = {"inputs": "Hello"}

    model: Text = UNSET
    prompt_name: Text = UNSET
    inputs: ManyTexts | str
    add_special_tokens: TextFlag = UNSET


class TeiToken(Struct, kw_only=True):
    """A token. `start` and `stop`: its position in the UTF-8 bytes of the text; null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizedPrompt(Struct, kw_only=True):
    """Request for the token ids of one text, in the format of vLLM."""

    EXAMPLE: ClassVar[Any] = {"prompt": "Hello"}

    model: Text = UNSET
    prompt: str
    prompt_name: Text = UNSET
    add_special_tokens: TextFlag = UNSET
    return_token_strs: TextFlag = UNSET


class TokenizedText(Struct, kw_only=True):
    """Ids of the tokens of a text, and with `return_token_strs` their texts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TeiDecode(Struct, kw_only=True):
    """Request to decode token ids to text."""

    EXAMPLE: ClassVar[Any] = {"ids": [101, 102]}

    model: Text = UNSET
    ids: Annotated[Any, one_of(TokenIds, Annotated[list[TokenIds], Meta(min_length=1)])]
    skip_special_tokens: TextFlag = UNSET


class TeiRerank(_Truncated, kw_only=True):
    """Request to rank texts by their relevance for a query."""

    EXAMPLE: ClassVar[Any] = {"query": "Who?", "texts": ["Ada", "Bob"]}

    query: str
    texts: ManyTexts
    raw_scores: TextFlag = UNSET
    return_text: TextFlag = UNSET


class TeiRank(Struct, kw_only=True):
    """Position of a text in the request, its score, and the text if the request asks for it."""

    index: Whole = UNSET
    score: Number = UNSET
    text: Text = UNSET


class TeiInfo(Struct, kw_only=True):
    """Facts about the served model and the server."""

    EXAMPLE: ClassVar[Any] = {
        "model_id": MINI,
        "model_sha": "8b3219a92973c328a8e22fadcfa821b5dc75636a",
        "model_dtype": "float32",
        "served_model_name": MINI,
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 512,
        "max_input_length": 256,
        "max_batch_tokens": 16384,
        "max_batch_requests": None,
        "max_client_batch_size": 2048,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }

    model_id: str
    model_sha: str
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
