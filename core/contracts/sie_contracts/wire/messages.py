"""Messages of a request over NATS: work items, their results, and dead letters.

Announcements of processes are in `heartbeats`, values of key-value buckets are in `records`, the catalogue is in
`configs`. All of them follow the same rules of evolution: a new field has a default, no field changes its type or
meaning, no field is renamed, and readers ignore fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.muvera import Muvera

if TYPE_CHECKING:  # the import is only for types: most processes that read messages need no numpy
    from numpy.typing import NDArray

Priority = Literal["interactive", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
# the sidecar answers the operations tokenize and decode, with the model's tokenizer
Operation = Literal["encode", "score", "extract", "tokenize", "decode"]
Truncate = Literal["END", "START", "NONE"]
Boundary = Literal["sentence", "paragraph", "token"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
MAX_RULE_TOKENS = 1 << 16  # most tokens that a rule may give a chunk
TOKEN_ID_BYTES = 5  # upper bound of the bytes of one token id in a message
MENTION_BYTES = 16  # upper bound of the bytes of one mention in a message, without its label

PIECE_CHARS = 256 << 10  # characters that are encoded before another thread may run; this takes less than 1 ms


def utf8_pieces(text: str) -> Iterator[bytes]:
    """Yield a text in UTF-8, in pieces. Raises UnicodeEncodeError."""
    return (text[at : at + PIECE_CHARS].encode() for at in range(0, len(text), PIECE_CHARS))


def utf8_bytes(text: str) -> int:
    """Count the bytes of a text in UTF-8, in pieces. Raises UnicodeEncodeError."""
    return len(text) if text.isascii() else sum(map(len, utf8_pieces(text)))


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """A multivector: `rows` vectors of `width` numbers in `data`, little-endian float32, C order. No number is NaN or
    infinite.
    """

    rows: int
    width: int
    data: bytes

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> Vectors:
        """Convert an array [rows, width]."""
        rows, width = array.shape
        return cls(rows, width, array.astype("<f4", copy=False).tobytes())

    @property
    def fits(self) -> bool:
        """Return whether `data` has the length that follows from `rows` and `width`."""
        return self.rows >= 0 and self.width > 0 and len(self.data) == 4 * self.rows * self.width


class Mention(msgspec.Struct, frozen=True, array_like=True):
    """A range of a text to which a client gave a label: code points `start` to `end`, both within the text."""

    label: str
    start: int
    end: int


class ChunkRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rule by which a text is cut into chunks of `min_tokens` to `max_tokens` tokens of the model. A chunk ends at a
    `boundary` if one leaves it these numbers of tokens. It repeats at most the last `overlap_tokens` tokens of the
    chunk before it.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_RULE_TOKENS)]
    overlap_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    boundary: Boundary = "sentence"
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class TextChunks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks of a text that get vectors of their own: those of `rule`, or `spans`, int32 [chunks, 2]: first and end
    code point. With `context` the vectors of a chunk are pooled from the states of its tokens in the whole text;
    without it each chunk is encoded alone.
    """

    rule: ChunkRule | None = None
    spans: bytes = b""
    context: bool = True


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input of a request. Only the fields that the operation needs are set.

    `tokens`: ids of the model's own tokenizer, instead of a text. `pair`: the second text of a pair that is classified.
    `vectors`: the multivector of the text, from which a score or a MUVERA encoding is computed; if it is set, the text
    is not read. `images`: image files as the client sent them; base64 is decoded, nothing else is changed. `mentions`:
    entities between which a relation model finds relations. `audio`: a sound file, and `document`: a document file, as
    the client sent them. A worker that does not know `vectors`, `images`, `audio` or `document` reads an empty text,
    and a worker that does not know `chunks` encodes the whole text, so workers are upgraded before gateways.
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
        """Return the bytes of the input in a message; the encoding adds a few more."""
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
        """Return a lower bound of the bytes of the input in a message, without reading its text."""
        size = len(self.text or "") + len(self.pair or "") + sum(map(len, self.images))
        size += len(self.chunks.spans) if self.chunks else 0
        return size + len(self.audio) + (len(self.document.data) if self.document else 0)


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options with which a model runs a request: the result of all precedence rules, which every path executes
    identically.

    `prefix` and `suffix` are the prompt around a text, `query_prefix` and `query_suffix` the prompt around the query to
    which the text is compared. `pieces` is the template of a pair, for models that have one: each piece is literal
    text, then alternately a field (`query` or `document`) and literal text. If `dimensions` or `max_tokens` is 0, the
    model's own value is used. `document_tokens`: the largest number of tokens that are read of a scored document; 0: as
    many tokens as fit. `parameters` are options of one family, with their JSON types. `variant`: digest of the options
    in which a request differs from its profile. The fingerprint of the answer covers it. It is empty if no option
    differs. `sound_from_s`: of a sound, only the part is read that begins after these seconds and has `MAX_SECONDS` at
    most; if it is None, the whole sound is read, and a longer one is refused.
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
    """A chunk of a request: consecutive inputs that one worker answers together.

    `first` is the position of `inputs[0]` in the request. The inputs of score are compared to `query`. `reply` is the
    inbox of the gateway: the worker sends the result there as a request, and the result is delivered once the gateway
    confirms it. `budget_ms` counts from the broker's timestamp of the message. `endpoint` is the route's name in the
    worker's metrics; if it is empty, the name of the operation is used. `traceparent` and `tracestate` are values of
    the request.

    If a chunk is too large for a message, its inputs and query are in the payload store, under the key `payload`;
    `count` is then the number of inputs. `asker`: name of the client's credential in metrics. A worker reuses cached
    data of an image only for the same asker. If `asker` is empty, no data is cached.
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


class Payload(msgspec.Struct, frozen=True, omit_defaults=True, tag="payload/1"):
    """Part of a work item that is stored in the payload store."""

    inputs: tuple[Input, ...]
    query: Input | None = None


class ArraySlice(msgspec.Struct, frozen=True, array_like=True):
    """Position of an array in the block of bytes that is sent with it. `dtype` has the form of numpy, e.g. `<f4`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Ok(msgspec.Struct, frozen=True, omit_defaults=True, tag="ok"):
    """A value: arrays by name, a score, or the maps of an extraction.

    Names of arrays: `dense`, `multivector`, `tokens` (the last hidden state of each token), `sparse.indices` and
    `sparse.values`; integer dtypes also have `<name>.scale` and `<name>.offset`. An input with chunks also has
    `chunks`, int32 [chunks, 5]: first and end code point, tokens, vectors of its multivector, entries of its sparse
    vector. Its arrays have the values of all chunks, one after the other. `data` of tokenize has the lists
    `ids`, `texts`, `special`, `starts` and `stops` (byte offsets in the UTF-8 of the prompted text, None for special
    tokens); `data` of decode has `text`. `tokens` counts the tokens that ran, after truncation, including special
    tokens. `sound_s`: length of the whole sound, of which a part may have been read; 0 for an input without a sound.
    """

    outputs: dict[str, ArraySlice]
    tokens: int = 0
    truncated: bool = False
    score: float | None = None
    data: dict[str, Any] | None = None
    first_of_several: bool = False
    sound_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """Error of an input, instead of a value."""

    error: ErrorInfo


Outcome = Ok | Failed


class Stages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Milliseconds of one chunk at the worker, from delivery until the result is sent. The stages are contiguous, on
    the worker's clock.
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
    """The batch that a chunk ran in, for `explain` and for tests of batch independence.

        `padding`: positions that were computed in addition to the tokens. `swapped`
    : another model was closed to new work so that
        this one could be loaded. `engine` computed the hidden states; empty if nothing ran.
    """

    id: str = ""
    items: int = 0
    chunks: int = 0
    tokens: int = 0
    attention: int = 0  # sum of the squared lengths of all rows
    deliveries: int = 1
    padding: int = 0
    swapped: bool = False
    engine: str = ""


class WorkResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result/1"):
    """Outcomes of a chunk, one for each input, in order. `block` has all arrays; slices point into it."""

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


class Fragment(msgspec.Struct, frozen=True, omit_defaults=True, tag="fragment/1"):
    """Part `index` of `count` of an encoded WorkResult that is too large for one message. `digest` is the SHA-256 of
    the whole WorkResult, in hex.
    """

    request: str
    chunk: int
    attempt: int
    index: int
    count: int
    digest: str
    data: bytes


class CancelRequests(msgspec.Struct, frozen=True, omit_defaults=True, tag="cancel/1"):
    """Notice that no client waits for these requests any more. The notice is a hint: a worker that misses it runs the
    work, and its result is dropped.
    """

    requests: tuple[str, ...]


ResidencyAction = Literal["load", "unload"]


class Residency(msgspec.Struct, frozen=True, omit_defaults=True, tag="residency/1"):
    """Request of an operator to load or unload a model on the worker that reads this. `model`: a model or
    model:profile, in the form of heartbeats. A lost message changes no state, and heartbeats report the state.
    """

    action: ResidencyAction
    model: str


class Confirmation(msgspec.Struct, frozen=True, omit_defaults=True, tag="confirm/1"):
    """The gateway's answer to a result.

    `taken`: the result was accepted. `duplicate`: a result of the same chunk was accepted before. `unknown`: the
    gateway no longer has the request. `part`: a fragment was stored, and other fragments are missing.
    """

    verdict: Literal["taken", "duplicate", "unknown", "part"]


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, tag="dead/1"):
    """A work item that was given up. `item` is the delivered WorkItem in its encoded form, so that it can be published
    again.
    """

    id: str
    subject: str
    item: bytes
    error: ErrorInfo
    workers: tuple[str, ...]
    deliveries: int
    deaths: int
    at_s: float


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def encode_in_pieces(payload: Payload) -> bytes:
    """Encode a payload like `encode`. Long texts are encoded in pieces, so that other threads can run between two
    pieces.
    """
    query = None if payload.query is None else _in_pieces(payload.query)
    return encode(Payload(tuple(map(_in_pieces, payload.inputs)), query))


def _in_pieces(part: Input) -> Input:
    texts = {name: text for name in ("text", "pair") if (text := getattr(part, name)) is not None}
    packed = {name: _packed(text) for name, text in texts.items() if len(text) > PIECE_CHARS and not text.isascii()}
    return msgspec.structs.replace(part, **packed) if packed else part


def _packed(text: str) -> msgspec.Raw:
    """Encode a long text."""
    pieces = list(utf8_pieces(text))
    return msgspec.Raw(b"".join((b"\xdb", sum(map(len, pieces)).to_bytes(4, "big"), *pieces)))


decode_work = msgspec.msgpack.Decoder(WorkItem).decode
decode_result = msgspec.msgpack.Decoder(WorkResult).decode
decode_result_or_fragment = msgspec.msgpack.Decoder(WorkResult | Fragment).decode
decode_payload = msgspec.msgpack.Decoder(Payload).decode
decode_cancel = msgspec.msgpack.Decoder(CancelRequests).decode
decode_residency = msgspec.msgpack.Decoder(Residency).decode
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode
