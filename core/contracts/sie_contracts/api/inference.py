"""Bodies and replies of `POST /v1/encode`, `/v1/score`, `/v1/extract` and `/v1/redact`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.shapes import MINI, SHARED, Flag, Map, Number, Reply, Text, Texts, Timing, Usage, Whole
from sie_contracts.models.entries import Pooling
from sie_contracts.wire.messages import ChunkRule

Dtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
Truncation = Literal["END", "START", "NONE"]
Vectors = list[Annotated[list[float], Meta(min_length=1)]]


class Media(Struct, kw_only=True):
    """A file in an input: an image, a document, audio or video."""

    data: str
    format: Text = UNSET


Medium = str | Media | UnsetType


Span = Annotated[list[int], Meta(min_length=2, max_length=2)]
Spans = Annotated[list[Span], Meta(min_length=1, max_length=4096)]


class Item(Struct, kw_only=True):
    """An input. The reply repeats `id` and `metadata`. Media are base64 or data URIs; in msgpack they may also be
    bytes. An image may be a URL too, if SIE_IMAGE_URL_HOSTS allows its host.
    """

    id: str | UnsetType | None = UNSET
    text: str | UnsetType | None = UNSET
    images: Annotated[list[str | Media], Meta(max_length=64)] | str | Media | UnsetType = UNSET
    document: Medium = UNSET
    audio: Medium = UNSET
    video: Medium = UNSET
    metadata: dict[str, Any] | UnsetType | None = UNSET
    multivector: Vectors | UnsetType = UNSET
    chunks: Annotated[
        Spans | ChunkRule | UnsetType | None,
        Meta(description="For encode: chunks that get vectors of their own, as spans in code points or as a rule."),
    ] = UNSET
    context: Annotated[
        Flag,
        Meta(description="True, the default: chunks are encoded within the whole text. False: each chunk alone."),
    ] = UNSET


Items = Annotated[list[str | Item], Meta(min_length=1)]


class _Params(Struct, kw_only=True):
    instruction: Text = UNSET
    default_instruction: Annotated[Text, Meta(description="The instruction, if no other field names one.")] = UNSET
    query_template: Annotated[
        Text, Meta(description="Template for queries, in place of the model's; has `{text}`.")
    ] = UNSET
    doc_template: Annotated[
        Text, Meta(description="Template for documents, in place of the model's; has `{text}`.")
    ] = UNSET
    is_query: Annotated[
        Flag, Meta(description="True: texts get the prompt for queries. False, the default: the prompt for documents.")
    ] = UNSET
    input_type: Annotated[Text, Meta(description="`query` and `search_query` set `is_query`.")] = UNSET
    truncate: Truncation | bool | UnsetType = UNSET
    max_seq_length: Whole = UNSET
    profile: Text = UNSET
    lora_id: Text = UNSET
    lora: Annotated[Text, Meta(description="Another name for `lora_id`.")] = UNSET
    on_item_error: Literal["slot", "fail"] | UnsetType = UNSET
    timing: Annotated[
        Literal["request", "items"] | UnsetType, Meta(description="`items`: each result has its own timing as well.")
    ] = UNSET
    options: Annotated[Map, Meta(description="Any of these parameters. Values beside the map take precedence.")] = UNSET


class EncodeParams(_Params, kw_only=True):
    """Parameters of an encode request, all optional."""

    prompt_name: Annotated[
        str | UnsetType | None,
        Meta(description="Name of a prompt of the model. Unset: the prompt for queries or documents. Null: no prompt."),
    ] = UNSET
    output_types: list[Literal["dense", "sparse", "multivector"]] | UnsetType = UNSET
    output_dtype: Dtype | UnsetType = UNSET
    dimensions: Whole = UNSET
    normalize: Flag = UNSET
    pooling: Literal[Pooling, "last_token"] | UnsetType = UNSET
    muvera: bool | dict[str, Any] | UnsetType = UNSET


class ScoreWeights(Struct, kw_only=True):
    """Weights of the dense, sparse and multivector scores in a hybrid score."""

    dense: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    sparse: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    colbert: Annotated[float, Meta(ge=0)] | UnsetType = UNSET


class ScoreParams(_Params, kw_only=True):
    """Parameters of a score request, all optional."""

    score_mode: Literal["dense", "sparse", "colbert", "hybrid"] | UnsetType = UNSET
    score_weights: ScoreWeights | UnsetType = UNSET


class ExtractExample(Struct, kw_only=True):
    """A text and the labels that it has. With `label_groups`, `labels` may map each group to its label or labels."""

    text: str
    labels: list[str] | dict[str, str | list[str]]


class ExtractParams(_Params, kw_only=True):
    """Parameters of an extract request. Some models require labels or an instruction."""

    labels: Texts = UNSET
    threshold: Annotated[
        Number,
        Meta(description="The least score, from 0 to 1. For a detector it replaces the other thresholds."),
    ] = UNSET
    box_threshold: Annotated[Number, Meta(description="Grounding DINO: the least score of a box.")] = UNSET
    text_threshold: Annotated[Number, Meta(description="Grounding DINO: the least score of a label.")] = UNSET
    score_threshold: Annotated[Number, Meta(description="OWLv2: the least score of a box.")] = UNSET
    multi_label: Flag = UNSET
    flat_ner: Flag = UNSET
    merge_adjacent_entities: Flag = UNSET
    precompute_labels: Flag = UNSET
    raw_scores: Flag = UNSET
    hypothesis_template: Annotated[
        Text,
        Meta(
            description="Sentence that the model checks for each label, with `{}` in place of the label. Default: that "
            "of the entry, else that of the pipeline of transformers, `This example is {}.`"
        ),
    ] = UNSET
    prune_threshold: Number = UNSET
    highlight_threshold: Number = UNSET
    top_k: Whole = UNSET
    relation_labels: Annotated[
        Texts, Meta(description="GLiNER with relations, GLiNER2: the relations to look for.")
    ] = UNSET
    relation_threshold: Annotated[
        Number, Meta(description="The least score of a relation, from 0 to 1. The default is `threshold`.")
    ] = UNSET
    examples: Annotated[
        list[ExtractExample] | UnsetType, Meta(description="GLiClass: example texts with labels, read before the text.")
    ] = UNSET
    task: Annotated[
        Text,
        Meta(
            description="Families `document-reader` and `sound-reader`: the task, such as `<s_docvqa>` or `translate`. "
            "GLiNER2: the name of a classification. Laya: `score` for labels that are the levels of a scale."
        ),
    ] = UNSET
    language: Annotated[Text, Meta(description="Family `sound-reader`: the spoken language, such as `en`.")] = UNSET
    max_new_tokens: Annotated[
        Whole, Meta(description="Maximum number of tokens that a model writes; for a sound, per 30 s.")
    ] = UNSET
    word_times: Annotated[
        Flag, Meta(description="Family `sound-reader`: true adds `words` with their times to `data`.")
    ] = UNSET
    ocr: Annotated[Flag, Meta(description="Docling: only false is supported; text in images is not read.")] = UNSET
    tree: Annotated[Flag, Meta(description="Docling: false leaves `document` out of `data`.")] = UNSET
    output_schema: Annotated[
        Map, Meta(description="JSON Schema of the answer in `data`; docs/schemas.md has the supported keywords.")
    ] = UNSET
    label_groups: Annotated[
        dict[str, list[str]] | UnsetType,
        Meta(
            description="Groups of labels: `data` has one label of each group, or with `multi_label` a list of labels."
        ),
    ] = UNSET
    label_thresholds: Annotated[
        dict[str, float] | UnsetType,
        Meta(description="Lowest score by label, or by path of a property, in place of `threshold`."),
    ] = UNSET


RedactionStyle = Literal["mask", "hash", "tag", "synthetic"]
Offsets = Literal["code_points", "utf16"]


class RedactParams(_Params, kw_only=True):
    """Parameters of a redaction. The parameters of extract are allowed too, except `labels`."""

    truncate: Annotated[
        Literal["NONE"] | UnsetType, Meta(description="Only `NONE`: a text that is too long is refused.")
    ] = UNSET
    kinds: Annotated[
        Texts,
        Meta(
            description="Kinds of values to replace. A model with fixed kinds always replaces all its kinds. The kinds "
            "`card_number`, `iban`, `email`, `ip_address` and `phone_number` are found by patterns; without `kinds`, "
            "all five patterns apply."
        ),
    ] = UNSET
    models: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=3)] | UnsetType,
        Meta(description="Further models that look at the texts: what any of them finds is replaced."),
    ] = UNSET
    style: Annotated[
        RedactionStyle | UnsetType,
        Meta(
            description="Replacement of a value. `mask`, the default: `*****`. `hash`: a keyed hash. `tag`: kind and "
            "number. `synthetic`: a made-up value."
        ),
    ] = UNSET
    key: Annotated[
        Annotated[str, Meta(min_length=16, max_length=1024)] | UnsetType,
        Meta(description="Key of the style `hash`. The default is a new key for each request."),
    ] = UNSET
    region: Annotated[
        Text,
        Meta(description="Country, such as `US`. Its national phone numbers (without country code) are replaced too."),
    ] = UNSET
    offsets: Annotated[Offsets | UnsetType, Meta(description="Unit of offsets; code points by default.")] = UNSET
    restorable: Annotated[Flag, Meta(description="False: the answer has no `map`, so the text cannot be restored.")] = (
        UNSET
    )
    threshold: Annotated[Number, Meta(description="The least score of an entity, from 0 to 1.")] = UNSET


class Encode(Struct, kw_only=True):
    """Request for the vectors of inputs."""

    EXAMPLE: ClassVar[Any] = {"items": [{"text": "Hello"}]}

    items: Items
    params: EncodeParams | UnsetType = UNSET


class Score(Struct, kw_only=True):
    """Request for the scores of inputs against a query."""

    EXAMPLE: ClassVar[Any] = {"query": {"text": "Who?"}, "items": [{"text": "Ada"}]}

    query: str | Item
    items: Items
    params: ScoreParams | UnsetType = UNSET


class Extract(Struct, kw_only=True):
    """Inputs from which to extract entities, relations, classes, objects or data."""

    EXAMPLE: ClassVar[Any] = {"items": [{"text": "Ada met Bob"}], "params": {"labels": ["person"]}}

    items: Items
    params: ExtractParams | UnsetType = UNSET


class TextItem(Struct, kw_only=True):
    """A text. `id` and `metadata` come back with the result."""

    text: str
    id: str | UnsetType | None = UNSET
    metadata: dict[str, Any] | UnsetType | None = UNSET


class Redact(Struct, kw_only=True):
    """Texts to redact."""

    EXAMPLE: ClassVar[Any] = {"items": [{"text": "Ada met Bob"}], "params": {"kinds": ["person"], "style": "tag"}}

    items: Annotated[list[str | TextItem], Meta(min_length=1)]
    params: RedactParams | UnsetType = UNSET


# value of `usage` for one input in the examples below
ITEM_USED = {"prompt_tokens": 3, "total_tokens": 3, "truncated": False}


class RequestUsage(Usage, kw_only=True):
    """Number of tokens that the model read, positions of the truncated inputs, and number of images (absent if there
    are none).
    """

    prompt_tokens: int
    total_tokens: int
    truncated_items: list[int]


class ItemUsage(Struct, kw_only=True):
    """Number of tokens that the model read of one input, and whether the input was truncated."""

    prompt_tokens: int
    total_tokens: int
    truncated: bool


class SlotError(Struct, kw_only=True):
    """Reason why an input has no result."""

    code: str
    message: str
    retryable: bool
    reason: Text = UNSET
    retry_after_s: Whole = UNSET


class _Slot(Struct, kw_only=True):
    id: Text = UNSET
    metadata: Map = UNSET
    usage: ItemUsage
    error: SlotError | UnsetType = UNSET


class Dense(Struct, kw_only=True):
    """A dense vector. An integer dtype stores codes; `scale` and `offset` convert a code to the real number."""

    dims: int
    dtype: str
    values: list[float]
    scale: Number = UNSET
    offset: Number = UNSET
    source: Text = UNSET


class Sparse(Struct, kw_only=True):
    """A sparse vector: ids of tokens in the vocabulary (`indices`), and their weights (`values`)."""

    dims: int
    dtype: str
    indices: list[int]
    values: list[float]


class Multivector(Struct, kw_only=True):
    """Vectors of the tokens, one per token. An integer dtype stores codes; `scale` and `offset` have one number per
    vector and convert its codes to real numbers.
    """

    token_dims: int
    num_tokens: int
    dtype: str
    values: list[list[float]]
    scale: list[float] | UnsetType = UNSET
    offset: list[float] | UnsetType = UNSET


class EncodedChunk(Struct, kw_only=True):
    """Vectors of one chunk of a text. `start` and `end`: positions in the text, in code points. `tokens`: number of
    tokens of the chunk.
    """

    start: int
    end: int
    tokens: int
    dense: Dense | UnsetType = UNSET
    sparse: Sparse | UnsetType = UNSET
    multivector: Multivector | UnsetType = UNSET


class EncodedItem(_Slot, kw_only=True):
    """Result of one input: its vectors, or those of its chunks, or its error."""

    dense: Dense | UnsetType = UNSET
    sparse: Sparse | UnsetType = UNSET
    multivector: Multivector | UnsetType = UNSET
    chunks: list[EncodedChunk] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class ScoredItem(Struct, kw_only=True):
    """Score of one input; `score` is null if the input failed."""

    item_id: str
    score: float | None
    rank: int
    metadata: Map = UNSET
    usage: ItemUsage
    error: SlotError | UnsetType = UNSET


class Entity(Struct, kw_only=True):
    """An entity: a range of a text, or a text in an image. `start` and `end`: positions in code points; null for a text
    in an image. `bbox`: left, top, width and height, in pixels of the upright image.
    """

    text: str
    label: str
    score: float
    start: int | None
    end: int | None
    bbox: list[float] | None


class Relation(Struct, kw_only=True):
    """A relation between two entities, which are named by their text."""

    head: str
    tail: str
    relation: str
    score: float


class Classification(Struct, kw_only=True):
    """A class of the whole input, and its score."""

    label: str
    score: float


class DetectedObject(Struct, kw_only=True):
    """An object in an image. `bbox`: left, top, width and height, in pixels of the upright image."""

    label: str
    score: float
    bbox: list[float]


class ExtractedItem(_Slot, kw_only=True):
    """Results of an extraction from one input. A list is empty if nothing was found."""

    entities: list[Entity]
    relations: list[Relation]
    classifications: list[Classification]
    objects: list[DetectedObject]
    data: dict[str, Any]


class _Native(Reply, kw_only=True):
    model: str
    usage: RequestUsage
    timing: Timing
    fingerprint: str


class Encoded(_Native, kw_only=True):
    """Reply of encode: the vectors of the inputs, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "items": [{"dense": {"dims": 384, "dtype": "float32", "values": [0.02, -0.07]}, "usage": ITEM_USED}],
        **SHARED,
    }

    muvera: Map = UNSET
    items: list[EncodedItem]


class Scored(_Native, kw_only=True):
    """Reply of score: the scores of the inputs, highest score first."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "scores": [{"item_id": "item-0", "score": 0.83, "rank": 0, "usage": ITEM_USED}],
        **SHARED,
    }

    query_id: str | UnsetType | None = UNSET
    scores: list[ScoredItem]


class Extracted(_Native, kw_only=True):
    """Reply of extract: the results of the inputs, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        "model": "urchade/gliner_small-v2.1",
        "items": [
            {
                "id": "item-0",
                "entities": [{"text": "Ada", "label": "person", "start": 0, "end": 3, "bbox": None, "score": 0.97}],
                "relations": [],
                "classifications": [],
                "objects": [],
                "data": {},
                "usage": ITEM_USED,
            }
        ],
        **SHARED,
    }

    items: list[ExtractedItem]


class RedactedSpan(Struct, kw_only=True):
    """A part of the text that was replaced. `start` and `end`: positions in the original text. `score` is null if a
    pattern found the part.
    """

    start: int
    end: int
    kind: str
    score: float | None
    source: Literal["model", "pattern"]


class RedactionPart(Struct, kw_only=True):
    """A value and its replacement. `start` and `end`: positions of the replacement in the redacted text."""

    start: int
    end: int
    replacement: str
    text: str


class RedactionMap(Struct, kw_only=True):
    """The replaced values of a text. The map and the redacted text together give the original text: store them apart.
    `length`: length of the redacted text.
    """

    offsets: Offsets
    length: int
    parts: list[RedactionPart]


class RedactedItem(_Slot, kw_only=True):
    """A text without its personal data. An input that failed has its error and no text."""

    text: Text = UNSET
    spans: list[RedactedSpan] | UnsetType = UNSET
    map: RedactionMap | UnsetType = UNSET


class Redacted(_Native, kw_only=True):
    """Redacted texts, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        "model": "urchade/gliner_small-v2.1",
        "items": [
            {
                "id": "item-0",
                "text": "[PERSON_1] met Bob",
                "spans": [{"start": 0, "end": 3, "kind": "person", "score": 0.97, "source": "model"}],
                "map": {
                    "offsets": "code_points",
                    "length": 18,
                    "parts": [{"start": 0, "end": 10, "replacement": "[PERSON_1]", "text": "Ada"}],
                },
                "usage": ITEM_USED,
            }
        ],
        **SHARED,
    }

    items: list[RedactedItem]
