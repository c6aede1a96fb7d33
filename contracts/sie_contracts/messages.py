"""The messages of a request over NATS: work items, their results, and dead letters.

What processes announce about themselves is in `heartbeats`, values of key-value buckets are in `records`, the catalogue
is in `configs`. All of them follow the same rules of evolution: a new field has a default, no field changes its type or
meaning, no field is renamed, and readers ignore fields that they do not know. tests/contract/fixtures keeps one encoded
example of every message and version; tests decode old bytes with new types and new bytes with old types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.muvera import Muvera

if TYPE_CHECKING:  # most processes that read messages have no use for numpy
    from numpy.typing import NDArray

Priority = Literal["interactive", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
# tokenize and decode are answered by the sidecar, from the model's tokenizer
Operation = Literal["encode", "score", "extract", "tokenize", "decode"]
Truncate = Literal["END", "START", "NONE"]
TOKEN_ID_BYTES = 5  # of an id in a message, at most


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """A multivector: `rows` vectors of `width` numbers in `data`, little-endian float32, C order. None of them is NaN
    or infinite.
    """

    rows: int
    width: int
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> Vectors:
        """From an array [rows, width]."""
        rows, width = array.shape
        return cls(rows, width, array.astype("<f4", copy=False).tobytes())

    @property
    def fits(self) -> bool:
        """Whether the data is as long as the shape says."""
        return self.rows >= 0 and self.width > 0 and len(self.data) == 4 * self.rows * self.width


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of a request. Exactly the fields that the operation needs are set.

    `tokens`: ids of the model's own tokenizer in place of a text. `pair`: the second text of a pair that is classified.
    `vectors`: what the model would give for the text, from which a score or a MUVERA encoding is made; where it is set
    the text is not read. A worker that does not know them reads an empty text: workers are upgraded before gateways.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    pair: str | None = None
    vectors: Vectors | None = None

    @property
    def nbytes(self) -> int:
        """What it takes in a message, at most a few bytes less."""
        size = len(self.text.encode()) if self.text else 0
        if self.tokens is not None:
            size += TOKEN_ID_BYTES * len(self.tokens)
        if self.pair:
            size += len(self.pair.encode())
        return size if self.vectors is None else size + len(self.vectors.data)


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request asks of a model, after all precedence rules: the resolved set that every path executes
    identically.

    `prefix` and `suffix` are the prompt around a text, `query_prefix` and `query_suffix` that around the query it is
    scored against. `pieces` is the template of a pair for models that have one: each piece is literal text, then
    alternately `query` or `document` and literal text. `dimensions` and `max_tokens` 0 mean the model's own. Of a
    document that is scored at most `document_tokens` are read, 0: as many as there is room for. `parameters` are
    options of one family, JSON types intact.
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


class WorkItem(msgspec.Struct, frozen=True, omit_defaults=True, tag="work/1"):
    """A chunk of a request: consecutive inputs that one worker answers together.

    `first` is the position of `inputs[0]` in the request, `query` what they are scored against. `reply` is the
    gateway's inbox; a result is sent there as a request and counts as delivered only when confirmed. `budget_ms` counts
    from the broker's timestamp of the message. A chunk that no message can hold has its inputs and query in the payload
    store under `payload`, and `count` says how many there are. `endpoint` is the route's name in the worker's metrics;
    empty, that of the operation. `traceparent` and `tracestate`: of its request.
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


class Payload(msgspec.Struct, frozen=True, omit_defaults=True, tag="payload/1"):
    """What the payload store holds of a work item."""

    inputs: tuple[Input, ...]
    query: Input | None = None


class ArraySlice(msgspec.Struct, frozen=True, array_like=True):
    """Where an array lies in the block of bytes that travels beside it. `dtype` as numpy writes it, e.g. `<f4`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Ok(msgspec.Struct, frozen=True, omit_defaults=True, tag="ok"):
    """A value: arrays by name, a score, or the maps of an extraction.

    The names of arrays: `dense`, `multivector`, `tokens` (a state of the last layer for each token), `sparse.indices`,
    `sparse.values`; `<name>.scale` and `<name>.offset` of integer dtypes. `data` of tokenize has the lists `ids`,
    `texts`, `special`, `starts`, `stops` (places in the UTF-8 of the prompted text, None for special tokens), of decode
    `text`.
    `tokens` counts special tokens and is what was run, after truncation.
    """

    outputs: dict[str, ArraySlice]
    tokens: int = 0
    truncated: bool = False
    score: float | None = None
    data: dict[str, Any] | None = None


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """A typed error in place of a value."""

    error: ErrorInfo


Outcome = Ok | Failed


class Stages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Milliseconds of one chunk at the worker, contiguous marks on the worker's clock, from delivery to the sending of
    the result.
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

    `padding`: positions that were computed beside the tokens. `swapped`: a model was closed to new work so that this
    one could be loaded.
    """

    id: str = ""
    items: int = 0
    chunks: int = 0
    tokens: int = 0
    attention: int = 0  # sum of squared lengths
    deliveries: int = 1
    padding: int = 0
    swapped: bool = False


class WorkResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result/1"):
    """One outcome per input of a chunk, in order. `block` holds all arrays; slices point into it."""

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
    """Part `index` of `count` of an encoded WorkResult that no message can hold. `digest` is the SHA-256 of the whole,
    in hex.
    """

    request: str
    chunk: int
    attempt: int
    index: int
    count: int
    digest: str
    data: bytes


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True, tag="cancel/1"):
    """Nobody waits for these requests any more. A hint: whoever misses it runs work whose result is dropped."""

    requests: tuple[str, ...]


class Confirmation(msgspec.Struct, frozen=True, omit_defaults=True, tag="confirm/1"):
    """The gateway's answer to a result: taken, a duplicate of one already taken, or of a request that it no longer
    knows.

    `part`: a fragment was kept, the rest is awaited.
    """

    verdict: Literal["taken", "duplicate", "unknown", "part"]


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, tag="dead/1"):
    """Work that was given up, whole: `item` is the encoded WorkItem as it was delivered, so that it can be published
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
decode_work = msgspec.msgpack.Decoder(WorkItem).decode
decode_result = msgspec.msgpack.Decoder(WorkResult).decode
decode_result_or_fragment = msgspec.msgpack.Decoder(WorkResult | Fragment).decode
decode_payload = msgspec.msgpack.Decoder(Payload).decode
decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode
