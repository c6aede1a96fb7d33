"""Bodies and replies of the core's routes in other servers' formats: OpenAI, vLLM, and the ranks of several servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.inference import Truncation
from sie_contracts.api.shapes import (
    MINI,
    SHARED,
    Flag,
    ManyTexts,
    Map,
    Number,
    Reply,
    Text,
    TextFlag,
    Texts,
    TokenIds,
    Whole,
    needs_one_of,
    one_of,
)

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Priority = Annotated[int, Meta(ge=0, le=999, description="Below 500: interactive. From 500 on: bulk.")] | UnsetType
Truncate = Truncation | bool | UnsetType
Embeddings = list[list[float]]
LISTED = {"id": "embd-2b2c...", "object": "list", "created": 1780000000, "model": MINI}
RERANKER = "cross-encoder/ms-marco-MiniLM-L-6-v2"


class ImageAddress(Struct, kw_only=True):
    """An image or a sound: a data URI, or base64. An image may be a URL too, if SIE_IMAGE_URL_HOSTS allows its host."""

    url: str


class InputAudio(Struct, kw_only=True):
    """The bytes of a sound file, as base64."""

    data: str
    format: Text = UNSET


class Part(Struct, kw_only=True):
    """One part of an input: a text, an image or a sound."""

    type: Literal["text", "image_url", "input_audio", "audio_url"]
    text: Text = UNSET
    image_url: ImageAddress | str | UnsetType = UNSET
    input_audio: InputAudio | str | UnsetType = UNSET
    audio_url: ImageAddress | str | UnsetType = UNSET


Parts = Annotated[list[Part], Meta(min_length=1)]


class JinaInput(Struct, kw_only=True):
    """A text, an image (base64, a data URI or a URL), or a list of parts."""

    text: Text = UNSET
    image: Text = UNSET
    content: Parts | UnsetType = UNSET


_AnyJinaInput = Annotated[JinaInput, needs_one_of("text", "image", "content")]
Input = Annotated[
    Any,
    one_of(
        str,
        Annotated[list[str | _AnyJinaInput], Meta(min_length=1)],
        TokenIds,
        Annotated[list[TokenIds], Meta(min_length=1)],
        _AnyJinaInput,
    ),
]


class ChatMessage(Struct, kw_only=True):
    """A message of a chat: a text, or a list of parts. The text of the role `system` is the instruction of the model;
    all other messages together are one input.
    """

    role: Text = UNSET
    content: str | Parts


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, description="One input, as in vLLM.")]


class _EncoderInputs(Struct, kw_only=True):
    EXAMPLE: ClassVar[Any] = {"model": MINI, "input": ["Hello"]}

    model: Text = UNSET
    input: Input | UnsetType = UNSET
    messages: ChatMessages | UnsetType = UNSET
    encoding_format: Literal["float", "base64"] | UnsetType = UNSET
    dimensions: Whole = UNSET
    input_type: Text = UNSET
    is_query: Flag = UNSET
    prompt_name: Annotated[
        Text,
        Meta(
            description="Name of a prompt of the model. If this field, `input_type`, `task` and `is_query` are absent, "
            "the model's default prompt is used, if it has one."
        ),
    ] = UNSET
    instruction: Text = UNSET
    truncate: Truncate = UNSET
    normalize: Flag = UNSET
    options: Map = UNSET
    output_dimension: Whole = UNSET
    modality: Literal["text", "image", "audio"] | UnsetType = UNSET
    normalized: TextFlag = UNSET
    token_encoding: Annotated[
        Literal["model", "cl100k_base", "o200k_base"] | UnsetType,
        Meta(
            description="Vocabulary of token ids. Default: `openai_token_encoding` of the entry, else `cl100k_base`. "
            "At `/pooling`, and where the path names the model: `model`."
        ),
    ] = UNSET


class PoolingRequest(_EncoderInputs, kw_only=True):
    """Inputs of an encoder: texts, token ids, or the messages of one chat, in the format of vLLM."""

    task: Annotated[
        Literal["embed", "token_embed"] | UnsetType,
        Meta(description="A vector of each input, or of each token. Default: of each token, if the model has these."),
    ] = UNSET


class MultiVectorRequest(_EncoderInputs, kw_only=True):
    """Inputs whose tokens get a vector each, in the format of Jina."""

    task: Text = UNSET
    embedding_type: VectorType | UnsetType = UNSET
    output_dtype: VectorType | UnsetType = UNSET
    truncation: TextFlag = UNSET


class EmbeddingsRequest(MultiVectorRequest, kw_only=True):
    """Request for vectors of texts or token ids. It has the fields of OpenAI, Jina, Voyage and vLLM."""

    user: Annotated[Text, Meta(description="Ignored.")] = UNSET
    late_chunking: Annotated[
        TextFlag, Meta(description="The texts are chunks of one document; each is encoded within the whole document.")
    ] = UNSET
    return_multivector: Annotated[
        TextFlag, Meta(description="The reply has a vector for each token, as from `/v1/multi-vector`.")
    ] = UNSET


_needs_input = needs_one_of("input", "messages")
PoolingBody = Annotated[PoolingRequest, _needs_input]
MultiVectorBody = Annotated[MultiVectorRequest, _needs_input]
EmbeddingsBody = Annotated[EmbeddingsRequest, _needs_input]


class Embedding(Struct, kw_only=True):
    """A vector of one input: a list of numbers, or base64 of their bytes. `embeddings`: vectors of its tokens."""

    object: Text = UNSET
    index: Whole = UNSET
    embedding: list[float] | str | UnsetType = UNSET
    embeddings: Embeddings | UnsetType = UNSET
    scale: Number = UNSET
    offset: Number = UNSET


class EmbeddingsReply(Reply, kw_only=True):
    """Reply with the vectors of the inputs, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        **LISTED,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.02, -0.07]}],
        **SHARED,
    }

    id: Text = UNSET
    object: Text = UNSET
    created: Whole = UNSET
    data: list[Embedding] | UnsetType = UNSET


class MultiVectors(EmbeddingsReply, kw_only=True):
    """Reply with the vectors of the tokens of each input."""

    EXAMPLE: ClassVar[Any] = {
        **LISTED,
        "data": [{"object": "embeddings", "index": 0, "embeddings": [[0.1, 0.2], [0.3, 0.4]]}],
        **SHARED,
    }


class PooledInput(Struct, kw_only=True):
    """A vector of an input, or the vectors of its tokens, or base64 of their bytes."""

    object: Text = UNSET
    index: Whole = UNSET
    data: Annotated[Any, one_of(list[float], Embeddings, str)]


class Pooled(Reply, kw_only=True):
    """Reply with the vectors of the inputs, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {**LISTED, "data": [{"object": "pooling", "index": 0, "data": [0.02, -0.07]}], **SHARED}

    id: Text = UNSET
    object: Text = UNSET
    created: Whole = UNSET
    data: list[PooledInput]


class Passage(Struct, kw_only=True):
    """One passage to rank: a text, or an image (base64, a data URI or a URL)."""

    text: Text = UNSET
    image: Text = UNSET


class RankingQuery(Struct, kw_only=True):
    """The query, as an object with its text."""

    text: str


class Ranking(Struct, kw_only=True):
    """Request to rank passages by their relevance for a query."""

    EXAMPLE: ClassVar[Any] = {
        "model": RERANKER,
        "query": {"text": "What is deep learning?"},
        "passages": [{"text": "Deep learning is a part of machine learning."}],
    }

    model: Text = UNSET
    query: RankingQuery | str
    passages: Annotated[list[Annotated[Passage, needs_one_of("text", "image")] | str], Meta(min_length=1)]
    truncate: Literal["NONE", "END"] | UnsetType = UNSET


class PassageScore(Struct, kw_only=True):
    """Position of a passage in the request, and its score as a raw logit."""

    index: int
    logit: float


class Rankings(Reply, kw_only=True):
    """Scores of the passages, highest score first."""

    EXAMPLE: ClassVar[Any] = {"rankings": [{"index": 0, "logit": 7.2}], **SHARED}

    rankings: list[PassageScore]


class Document(Struct, kw_only=True):
    """A document as an object: a text, or an image (base64, a data URI or a URL). With `rank_fields`, the model reads
    the values of the named fields instead, one per line.
    """

    text: Text = UNSET
    image: Text = UNSET


class Rerank(Struct, kw_only=True):
    """Request to rank documents by their relevance for a query. It has the fields of Cohere, Jina and Voyage."""

    EXAMPLE: ClassVar[Any] = {"model": RERANKER, "query": "Who?", "documents": ["Ada", "Bob"], "top_n": 1}

    model: Text = UNSET
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, description="0: all documents.")] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=0, description="Voyage's name for `top_n`.")] | UnsetType = UNSET
    return_documents: TextFlag = UNSET
    rank_fields: Texts = UNSET
    max_tokens_per_doc: Whole = UNSET
    max_chunks_per_doc: Annotated[Whole, Meta(description="Ignored, with a warning.")] = UNSET
    raw_scores: TextFlag = UNSET
    instruction: Text = UNSET
    truncate: Truncate = UNSET
    truncation: TextFlag = UNSET
    options: Map = UNSET
    priority: Priority = UNSET


class Relevance(Struct, kw_only=True):
    """Position of a document in the request, and its score."""

    index: Whole = UNSET
    relevance_score: Number = UNSET


class RankedDocument(Relevance, kw_only=True):
    """Position and score of a document. `document` is set if the request asks for it."""

    document: dict[str, Any] | str | UnsetType = UNSET


class Ranked(Reply, kw_only=True):
    """Scores of the documents, highest score first."""

    EXAMPLE: ClassVar[Any] = {
        "id": "2b2c...",
        "object": "rerank",
        "model": RERANKER,
        "results": [{"index": 0, "relevance_score": 0.98, "document": {"text": "Ada"}}],
        "meta": {"api_version": {"version": "1"}},
        **SHARED,
    }

    id: Text = UNSET
    object: Text = UNSET
    meta: Map = UNSET
    results: list[RankedDocument] | UnsetType = UNSET
    data: list[Relevance] | UnsetType = UNSET


class MixedbreadRerank(Struct, kw_only=True):
    """Request to rank documents, in the format of Mixedbread."""

    EXAMPLE: ClassVar[Any] = {"model": RERANKER, "query": "Who?", "input": ["Ada", "Bob"], "top_k": 1}

    model: Text = UNSET
    query: str
    input: Annotated[list[str | Document], Meta(min_length=1)]
    top_k: Annotated[int, Meta(ge=0, description="0: all documents.")] | UnsetType = UNSET
    rank_fields: Texts = UNSET
    return_input: TextFlag = UNSET


class RankResult(Struct, kw_only=True):
    """Position of a document in the request, and its score. `input` is set if the request asks for it."""

    object: Literal["rank_result"]
    index: int
    score: float
    input: str | None


class MixedbreadRanked(Reply, kw_only=True):
    """Scores of the documents, highest score first, in the format of Mixedbread."""

    EXAMPLE: ClassVar[Any] = {
        "object": "list",
        "model": RERANKER,
        "data": [{"object": "rank_result", "index": 0, "score": 0.98, "input": None}],
        "top_k": 1,
        "return_input": False,
        **SHARED,
    }

    object: Literal["list"]
    data: list[RankResult]
    top_k: int
    return_input: bool


class PairScores(Struct, kw_only=True):
    """Request for the scores of documents against one query, in the format of vLLM."""

    EXAMPLE: ClassVar[Any] = {"model": RERANKER, "text_1": "Who?", "text_2": ["Ada", "Bob"]}

    model: Text = UNSET
    text_1: str | ManyTexts | UnsetType = UNSET
    text_2: str | ManyTexts | UnsetType = UNSET
    queries: Annotated[str | ManyTexts | UnsetType, Meta(description="Newer name of `text_1`.")] = UNSET
    documents: Annotated[str | ManyTexts | UnsetType, Meta(description="Newer name of `text_2`.")] = UNSET
    use_activation: Annotated[TextFlag, Meta(description="False: scores are raw logits.")] = UNSET
    instruction: Text = UNSET
    truncate: Truncate = UNSET
    options: Map = UNSET


class PairScore(Struct, kw_only=True):
    """Position of a document in the request, and its score."""

    object: Literal["score"]
    index: int
    score: float


class PairScored(Reply, kw_only=True):
    """Scores of the documents, in the order of the documents."""

    EXAMPLE: ClassVar[Any] = {
        **LISTED,
        "model": RERANKER,
        "data": [{"object": "score", "index": 0, "score": 0.98}],
        **SHARED,
    }

    id: str
    object: Literal["list"]
    created: int
    data: list[PairScore]
