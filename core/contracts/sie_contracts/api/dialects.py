"""Bodies and replies of the routes that copy other servers' APIs: OpenAI, Jina, Voyage, NVIDIA, Cohere, Infinity."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sie_contracts.api.inference import Truncation
from sie_contracts.api.shapes import (
    MINI,
    SHARED,
    TIMES,
    Flag,
    ManyTexts,
    Map,
    Number,
    Reply,
    Text,
    TextFlag,
    Texts,
    Timing,
    TokenIds,
    Usage,
    Whole,
    needs_one_of,
    one_of,
)

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Priority = Annotated[int, Meta(ge=0, le=999, description="Below 500: interactive. From 500 on: bulk.")] | UnsetType
Truncate = Truncation | bool | UnsetType
Embeddings = list[list[float]]
TokenEmbeddings = list[list[list[float]]]
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
            "At `/pooling` and below `/tei`: `model`."
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


class ContextualizedRequest(Struct, kw_only=True):
    """Documents as lists of their chunks, or with `enable_auto_chunking` as one text each. A query is one text."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "inputs": [["Berlin is the capital of Germany.", "The city has 3.7 million inhabitants."]],
        "input_type": "document",
    }

    model: Text = UNSET
    inputs: Annotated[
        list[Annotated[list[str], Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1000)
    ]
    input_type: Literal["query", "document"] | UnsetType = UNSET
    encoding_format: Literal["float", "base64"] | UnsetType = UNSET
    output_dtype: VectorType | UnsetType = UNSET
    output_dimension: Whole = UNSET
    enable_auto_chunking: TextFlag = UNSET
    chunk_size: Annotated[Whole, Meta(description="Maximum tokens of an automatic chunk; default 512.")] = UNSET
    chunk_overlap: Annotated[
        Whole, Meta(description="Tokens that the next chunk repeats, at most half of `chunk_size`; default 0.")
    ] = UNSET
    normalize: Flag = UNSET
    options: Map = UNSET


class ContextualizedChunk(Embedding, kw_only=True):
    """The vector of a chunk. `text` is set with `enable_auto_chunking`."""

    text: Text = UNSET


class ContextualizedDocument(Struct, kw_only=True):
    """The vectors of a document, in the order of its chunks."""

    object: Text = UNSET
    index: Whole = UNSET
    data: list[ContextualizedChunk] | UnsetType = UNSET


class ContextualizedReply(Reply, kw_only=True):
    """Documents, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        **LISTED,
        "data": [
            {
                "object": "list",
                "index": 0,
                "data": [
                    {"object": "embedding", "index": 0, "embedding": [0.02, -0.07]},
                    {"object": "embedding", "index": 1, "embedding": [0.01, -0.04]},
                ],
            }
        ],
        **SHARED,
    }

    id: Text = UNSET
    object: Text = UNSET
    created: Whole = UNSET
    data: list[ContextualizedDocument] | UnsetType = UNSET


class _RecordingForm(Struct, kw_only=True):
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    model: Text = UNSET
    prompt: Annotated[Text, Meta(description="Words of the recording in their right spelling, such as names.")] = UNSET
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | UnsetType = UNSET
    temperature: Annotated[Number, Meta(description="Only 0 is supported.")] = UNSET
    granularities: list[Literal["segment", "word"]] | UnsetType = field(name="timestamp_granularities[]", default=UNSET)


class TranslationForm(_RecordingForm, kw_only=True):
    """Form with a sound file. The reply has the spoken words, translated into English."""


class TranscriptionForm(_RecordingForm, kw_only=True):
    """Form with a sound file. The reply has the spoken words. With `verbose_json` it also has segments or words with
    their times.
    """

    language: Annotated[
        Text, Meta(description="Spoken language: code or English name. Unset: the model recognises it.")
    ] = UNSET
    stream: Annotated[Flag, Meta(description="Only false is supported.")] = UNSET


class SegmentInfo(Struct, kw_only=True):
    """Spoken words from `start` to `end`, in seconds. `avg_logprob` and `no_speech_prob` are 0, because clients require
    numbers: they are not computed.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordInfo(Struct, kw_only=True):
    """Word that was spoken from `start` to `end`, in seconds."""

    word: str
    start: float
    end: float


class Transcription(Struct, kw_only=True):
    """Spoken words of a sound file. Only `verbose_json` has more fields than `text`, `usage` and `warnings`."""

    EXAMPLE: ClassVar[Any] = {"text": "And what did you do then?", "usage": {"type": "duration", "seconds": 3}}

    text: str
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: Text = UNSET
    duration: Number = UNSET
    segments: list[SegmentInfo] | UnsetType = UNSET
    words: list[WordInfo] | UnsetType = UNSET
    usage: Map = UNSET
    warnings: Texts = UNSET


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


class CohereInput(Struct, kw_only=True):
    """An input of several parts: its texts, one per line, its images and its sound."""

    content: Parts


class EmbedV1(Struct, kw_only=True):
    """Texts, images or inputs of several parts, in the form of the first version of Cohere's API."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "input_type": "search_document",
        "texts": ["Hello"],
        "embedding_types": ["float"],
    }

    model: Text = UNSET
    texts: Texts = UNSET
    images: Annotated[list[str], Meta(description="Data URIs, base64 or URLs.")] | UnsetType = UNSET
    inputs: list[CohereInput] | UnsetType = UNSET
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | UnsetType = UNSET
    embedding_types: list[VectorType] | UnsetType = UNSET
    output_dimension: Whole = UNSET
    max_tokens: Whole = UNSET
    truncate: Truncation | UnsetType = UNSET
    normalize: Flag = UNSET
    options: Map = UNSET
    priority: Priority = UNSET


class EmbedV2(EmbedV1, kw_only=True):
    """Texts, images or inputs of several parts, in the form of the second version of Cohere's API."""

    model: str
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"]


_needs_inputs = needs_one_of("texts", "images", "inputs")
EmbedV1Body = Annotated[EmbedV1, _needs_inputs]
EmbedV2Body = Annotated[EmbedV2, _needs_inputs]


class ShownImage(Struct, kw_only=True):
    """Width, height, format and bit depth of an image, from the first bytes of its file."""

    width: Whole = UNSET
    height: Whole = UNSET
    format: Text = UNSET
    bit_depth: Whole = UNSET


class Embedded(Struct, kw_only=True):
    """Vectors by type (`float`, `int8` and so on). In version 1 of Cohere's API, a request that names no type gets a
    plain list of vectors.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "2b2c...",
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [[0.02, -0.07]]},
        "texts": ["Hello"],
        "meta": {"api_version": {"version": "2"}},
        "timing": TIMES,
        "fingerprint": "b1946ac9",
    }

    id: Text = UNSET
    response_type: Text = UNSET
    embeddings: dict[str, Any] | Embeddings | UnsetType = UNSET
    embeddings_scale: Map = UNSET
    texts: list[str | None] | UnsetType = UNSET
    images: list[ShownImage] | UnsetType = UNSET
    meta: Map = UNSET
    usage: Usage | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    fingerprint: Text = UNSET
    warnings: Texts = UNSET
    explain: list[dict[str, Any]] | UnsetType = UNSET


class Classify(Struct, kw_only=True):
    """Request to classify texts."""

    EXAMPLE: ClassVar[Any] = {"model": "org/classes", "input": ["a"]}

    model: Text = UNSET
    input: ManyTexts | str
    raw_scores: TextFlag = UNSET
    truncate: Truncate = UNSET
    options: Map = UNSET


class Label(Struct, kw_only=True):
    """A class, and its score for the text."""

    label: Text = UNSET
    score: Number = UNSET


CLASSES = [{"label": "joy", "score": 0.92}, {"label": "anger", "score": 0.08}]


class Classified(Reply, kw_only=True):
    """Reply with the classes of each text, highest score first."""

    EXAMPLE: ClassVar[Any] = {
        "object": "classify",
        "data": [CLASSES],
        "model": "org/classes",
        "id": "classify-2b2c...",
        "created": 1780000000,
        **SHARED,
    }

    object: Text = UNSET
    data: list[list[Label]] | UnsetType = UNSET
    id: Text = UNSET
    created: Whole = UNSET
