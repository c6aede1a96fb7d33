"""Messages of a request over NATS: work items, their results, and dead letters (work items that workers gave up).

Heartbeats are in `heartbeats`, values of key-value buckets in `records`, messages of the catalogue in `configs`. All of
them follow the same rules for changes, so that processes of different versions understand each other: a new field has a
default, no field changes its type or meaning, no field is renamed, and readers ignore unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.muvera import Muvera

if TYPE_CHECKING:  # only for type checkers: most processes that read messages do not need numpy
    from numpy.typing import NDArray

Priority = Literal["interactive", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
# the sidecar runs the operations "tokenize" and "decode" itself, with the model's tokenizer, without the adapter
Operation = Literal["encode", "score", "extract", "tokenize", "decode"]
Truncate = Literal["END", "START", "NONE"]
Boundary = Literal["sentence", "paragraph", "token"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
MAX_RULE_TOKENS = 1 << 16  # maximum value of `max_tokens` of a ChunkRule
TOKEN_ID_BYTES = 5  # upper bound of the size of one token id in a message, in bytes
# upper bound of the size of one mention (an entity that the client marked) in a message, in bytes, without its label
MENTION_BYTES = 16

# Number of characters that one step of `utf8_pieces` encodes, in less than 1 ms. Other threads can run between steps.
PIECE_CHARS = 256 << 10


def utf8_pieces(text: str) -> Iterator[bytes]:
    """Yield the UTF-8 bytes of a text, PIECE_CHARS characters at a time. Raises UnicodeEncodeError."""
    return (text[at : at + PIECE_CHARS].encode() for at in range(0, len(text), PIECE_CHARS))


def utf8_bytes(text: str) -> int:
    """Return the number of UTF-8 bytes of a text. Raises UnicodeEncodeError."""
    return len(text) if text.isascii() else sum(map(len, utf8_pieces(text)))


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """A multivector: `rows` vectors of `width` finite numbers in `data`, little-endian float32, C order."""

    rows: int
    width: int
    data: bytes

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Vectors:
        rows, width = array.shape
        return cls(rows, width, array.astype("<f4", copy=False).tobytes())

    @property
    def fits(self) -> bool:
        """Return whether `data` has the length that follows from `rows` and `width`."""
        return self.rows >= 0 and self.width > 0 and len(self.data) == 4 * self.rows * self.width


class Mention(msgspec.Struct, frozen=True, array_like=True):
    """A range of a text that the client labelled, from code point `start` to code point `end` - 1."""

    label: str
    start: int
    end: int


class ChunkRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rule for cutting a text into chunks of `min_tokens` to `max_tokens` tokens of the model. A chunk ends at a
    `boundary`, if there is one within these limits. A chunk may repeat the last tokens of the previous chunk, at most
    `overlap_tokens`.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_RULE_TOKENS)]
    overlap_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    boundary: Boundary = "sentence"
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class TextChunks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks of a text, each of which gets its own vectors. Either `rule` computes the chunks, or `spans` lists them
    as int32 [chunks, 2]: first and end code point of each chunk. With `context`, the worker encodes the whole text, and
    pools each vector from the tokens of one chunk; without `context`, it encodes each chunk alone.
    """

    rule: ChunkRule | None = None
    spans: bytes = b""
    context: bool = True


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input of a request. Only the fields that the operation needs are set.

    `tokens`: ids of the model's own tokenizer, instead of a text. `pair`: second text of a pair to classify. `vectors`:
    multivector of the text, for a score or a MUVERA encoding; if it is set, the text is not read. `images`: image files
    as the client sent them, after base64 is decoded. `mentions`: entities, for a model that finds relations between
    entities. `audio` and `document`: a sound or document file as the client sent it.

    Upgrade workers before gateways, because an older worker ignores fields that it does not know. If it ignores
    `vectors`, `images`, `audio` or `document`, it reads an empty text. If it ignores `chunks`, it encodes a whole text.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    pair: str | None = None
    vectors: Vectors | None = None
    images: tuple[bytes, ...] = ()
    mentions: tuple[Mention, ...] = ()
    audio: bytes = b""
    document: DocumentFile | None = None
    chunks: TextChunks | None = None

    @property
    def nbytes(self) -> int:
        """Return the approximate size of the input in a message, in bytes: texts and files exactly, token ids and
        mentions by upper bounds, without names of fields.
        """
        size = utf8_bytes(self.text) if self.text else 0
        if self.tokens is not None:
            size += TOKEN_ID_BYTES * len(self.tokens)
        if self.pair:
            size += utf8_bytes(self.pair)
        if self.images:
            size += sum(map(len, self.images))
        size += sum(MENTION_BYTES + len(mention.label.encode()) for mention in self.mentions)
        size += len(self.audio) + (len(self.document.data) if self.document else 0)
        size += len(self.chunks.spans) if self.chunks else 0
        return size if self.vectors is None else size + len(self.vectors.data)

    @property
    def least_bytes(self) -> int:
        """Return a lower bound of the input's size in a message, in bytes. No text is encoded, so this is fast."""
        size = len(self.text or "") + len(self.pair or "") + sum(map(len, self.images))
        size += len(self.chunks.spans) if self.chunks else 0
        return size + len(self.audio) + (len(self.document.data) if self.document else 0)


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """All options with which a model runs a request, after defaults and parameters are merged.

    `prefix` and `suffix`: prompt around a text. `query_prefix` and `query_suffix`: prompt around the query of a score.
    `pieces`: template of a pair, empty for models without such a template. The texts of a piece are, in turn, literal
    text and the name of a field (`query` or `document`). `dimensions` and `max_tokens`: 0 means the model's own value.
    `document_tokens`: largest number of tokens that the model reads of a document to score; 0: as many as fit.
    `parameters`: options that not every family or operation reads, with their JSON types. `variant`: digest of the
    options that differ from those of the profile; empty if none differs. The result's fingerprint includes this digest.
    `sound_from_s`: read only the part of a sound that begins at this second, at most MAX_SECONDS long; None: read the
    whole sound, and refuse one above MAX_SECONDS.
    """

    outputs: tuple[str, ...] = ("dense",)
    prefix: str = ""
    suffix: str = ""
    truncate: Truncate = "END"
    pooling: str = ""
    normalize: bool = True
    dimensions: int = 0
    max_tokens: int = 0
    lora: str = ""
    dtype: str = "float32"
    is_query: bool = False
    muvera: Muvera | None = None
    pieces: tuple[tuple[str, ...], ...] = ()
    query_prefix: str = ""
    query_suffix: str = ""
    instruction: str = ""
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    parameters: dict[str, Any] = {}
    document_tokens: int = 0
    variant: str = ""
    sound_from_s: float | None = None


class WorkItem(msgspec.Struct, frozen=True, omit_defaults=True, tag="work/1"):
    """A chunk of a request: consecutive inputs that one worker processes together.

    `first`: position of `inputs[0]` in the request. `query`: for score, the query to which the inputs are compared.
    `reply`: subject on which the gateway receives the result; the worker sends the result as a NATS request, and the
    gateway confirms it. `budget_ms`: time for the work, counted from the broker's timestamp of the message. `endpoint`:
    name of the route in the worker's metrics; empty: the operation's name. `traceparent` and `tracestate`: trace
    context of the request. `revision`: revision of the weights. `config_revision`: revision of the model's entry in
    the catalogue (0: not checked).

    If a chunk is too large for a message, its inputs and query are in the payload store, under the key `payload`;
    `count` is then the number of inputs. `asker`: name of the client's credential in metrics. A worker reuses computed
    data of an image only for requests with the same `asker`; if `asker` is empty, the worker reuses no data.
    `together`: the gateway also accepts the result in a `WorkResults`.
    """

    request: str
    chunk: int
    model: str
    revision: str
    operation: Operation
    inputs: tuple[Input, ...]
    options: RunOptions
    reply: str
    budget_ms: int
    first: int = 0
    attempt: int = 0
    profile: str = "default"
    config_revision: int = 0
    priority: Priority = "interactive"
    cost: int = 0
    traceparent: str = ""
    query: Input | None = None
    payload: str = ""
    count: int = 0
    endpoint: str = ""
    tracestate: str = ""
    asker: str = ""
    together: bool = False


class Payload(msgspec.Struct, frozen=True, omit_defaults=True, tag="payload/1"):
    """Inputs and query of a work item that are in the payload store, because they are too large for a message."""

    inputs: tuple[Input, ...]
    query: Input | None = None


class ArraySlice(msgspec.Struct, frozen=True, array_like=True):
    """Position of an array in the `block` of the same message. `dtype` is a numpy dtype, for example `<f4`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Ok(msgspec.Struct, frozen=True, omit_defaults=True, tag="ok"):
    """Result of an input: arrays by name, a score, or the maps of an extraction.

    Names of arrays: `dense`, `multivector`, `tokens` (the last hidden state of each token), `sparse.indices` and
    `sparse.values`; integer dtypes also have `<name>.scale` and `<name>.offset`. An input with chunks also has
    `chunks`, int32 [chunks, 5]: first code point, end code point, number of tokens, number of vectors in the
    multivector, number of entries in the sparse vector. The other arrays of this input have the values of all chunks,
    one after the other.

    `data` of tokenize: lists `ids`, `texts`, `special`, `starts` and `stops` (byte offsets in the UTF-8 of the text
    with its prompt, None for special tokens). `data` of decode: `text`. `tokens`: number of tokens that the model read,
    after truncation, including special tokens. `first_of_several`: a file had several images, and only the first was
    read. `sound_s`: seconds of the whole sound, even if only a part was read; 0 if there is no sound.
    """

    outputs: dict[str, ArraySlice]
    tokens: int = 0
    truncated: bool = False
    score: float | None = None
    data: dict[str, Any] | None = None
    first_of_several: bool = False
    sound_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """Result of an input that failed: the error."""

    error: ErrorInfo


Outcome = Ok | Failed


class Stages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of one chunk at the worker, in milliseconds. `worker_ms`: time from the delivery of the chunk until its
    result is sent. The other fields are consecutive stages of this time: first `fetch_ms`, in which a large input is
    read from the payload store, then the stages from `load_ms` to `postprocess_ms`, in the order of the fields.
    """

    load_ms: float = 0.0
    preprocess_ms: float = 0.0
    batch_wait_ms: float = 0.0
    device_wait_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    worker_ms: float = 0.0
    fetch_ms: float = 0.0


class BatchNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about the batch in which a chunk ran, for the parameter `explain` and for tests.

    `padding`: number of padding tokens that were computed. `swapped`: true if the worker closed another model to new
    work in order to load this model, because the two do not fit into memory together. `engine`: engine that computed
    the hidden states; empty if nothing ran.
    """

    id: str = ""
    items: int = 0  # number of inputs in the batch
    chunks: int = 0  # number of work items in the batch
    tokens: int = 0
    attention: int = 0  # sum of the squared lengths of all rows
    deliveries: int = 1  # number of deliveries of this chunk's message
    padding: int = 0
    swapped: bool = False
    engine: str = ""


class WorkResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result/1"):
    """Results of a work item, one for each input, in order. `block`: bytes of all arrays of these results."""

    request: str
    chunk: int
    worker: str
    outcomes: tuple[Outcome, ...]
    block: bytes = b""
    attempt: int = 0
    revision: str = ""
    fingerprint: str = ""
    stages: Stages = Stages()
    batch: BatchNote = BatchNote()


class WorkResults(msgspec.Struct, frozen=True, tag="results/1"):
    """Results of several requests of one gateway. `results[i]`: encoded WorkResult for `requests[i]`. The worker sends
    the message to the reply subject of the first request; the gateway replies with `Confirmations`.
    """

    requests: tuple[str, ...]
    results: tuple[bytes, ...]


class Fragment(msgspec.Struct, frozen=True, omit_defaults=True, tag="fragment/1"):
    """Part `index` of `count` of an encoded WorkResult that is too large for one message. `digest`: SHA-256 of the
    whole encoded WorkResult, in hex.
    """

    request: str
    chunk: int
    attempt: int
    index: int
    count: int
    digest: str
    data: bytes


class CancelRequests(msgspec.Struct, frozen=True, omit_defaults=True, tag="cancel/1"):
    """Message of a gateway to workers: no client waits for these requests any more. A worker that misses the message
    runs the work, and the gateway drops the result.
    """

    requests: tuple[str, ...]


ResidencyAction = Literal["load", "unload"]


class Residency(msgspec.Struct, frozen=True, omit_defaults=True, tag="residency/1"):
    """Request of an operator to one worker: load or unload a model with one set of load options. `model`: its name in
    heartbeats, an id or `id:profile`. If the message is lost, the heartbeats show that the state of the model has not
    changed.
    """

    action: ResidencyAction
    model: str


Verdict = Literal["taken", "duplicate", "unknown", "part"]


class Confirmation(msgspec.Struct, frozen=True, omit_defaults=True, tag="confirm/1"):
    """Reply of a gateway to a result.

    Values of `verdict`: `taken`: the result was accepted. `duplicate`: a result for the same work item was accepted
    before. `unknown`: the gateway does not have the request any more. `part`: the fragment was stored, and other
    fragments are missing.
    """

    verdict: Verdict


class Confirmations(msgspec.Struct, frozen=True, omit_defaults=True, tag="confirms/1"):
    """Reply of a gateway to `WorkResults`: the verdict on each result, in order."""

    verdicts: tuple[Verdict, ...]


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, tag="dead/1"):
    """A work item that workers gave up. `item`: the encoded WorkItem, which an operator can publish again."""

    id: str
    subject: str
    item: bytes
    error: ErrorInfo
    workers: tuple[str, ...]
    deliveries: int
    deaths: int  # number of adapter processes that one input of the work item crashed
    at_s: float


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def encode_in_pieces(payload: Payload) -> bytes:
    """Encode a payload like `encode`, but long texts in pieces, so that other threads can run between two pieces."""
    query = None if payload.query is None else _in_pieces(payload.query)
    return encode(Payload(tuple(map(_in_pieces, payload.inputs)), query))


def _in_pieces(part: Input) -> Input:
    texts = {name: text for name in ("text", "pair") if (text := getattr(part, name)) is not None}
    packed = {name: _packed(text) for name, text in texts.items() if len(text) > PIECE_CHARS and not text.isascii()}
    return msgspec.structs.replace(part, **packed) if packed else part


def _packed(text: str) -> msgspec.Raw:
    """Return a long text as an encoded msgpack string."""
    pieces = list(utf8_pieces(text))
    return msgspec.Raw(b"".join((b"\xdb", sum(map(len, pieces)).to_bytes(4, "big"), *pieces)))


# each of these functions raises an exception of `errors.UNDECODABLE` for bytes that it cannot decode
decode_work = msgspec.msgpack.Decoder(WorkItem).decode
decode_result = msgspec.msgpack.Decoder(WorkResult).decode
decode_results = msgspec.msgpack.Decoder(WorkResult | WorkResults | Fragment).decode
decode_payload = msgspec.msgpack.Decoder(Payload).decode
decode_cancel = msgspec.msgpack.Decoder(CancelRequests).decode
decode_residency = msgspec.msgpack.Decoder(Residency).decode
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode
decode_confirmations = msgspec.msgpack.Decoder(Confirmations).decode
