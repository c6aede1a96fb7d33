"""What travels over NATS: work, results, heartbeats and config deltas.

Evolution: a new field has a default, nothing changes type or meaning, nothing is renamed; readers ignore what they do
not know. One encoded example of every message and version is kept under tests/contract/fixtures and decoded in both
directions.
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


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a fetch of weights is. `total_bytes` is 0 until it is known; `bytes_per_s` counts what arrived, not what
    was there before.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class ServedPrecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """In which precision a loaded model computes. `requested`: what its entry or profile asks for, else the worker's
    default. `reason`: why `served` is another one, empty if it is not.
    """

    served: str
    requested: str = ""
    reason: str = ""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model on one worker. `load_s` is what its last load took, `oldest_s` the age of the oldest work that is held
    for it, `cost_rate` the tokens a second that were taken in for it lately, `fetched` how far its weights are while
    they come to the worker's disk. `crossover_tokens`: the length of a text at which attention takes as long as
    everything else (`costs`; 0: not known).
    """

    model: str
    state: Literal["available", "loading", "loaded", "unloading", "failed"]
    memory_bytes: int = 0
    queued: int = 0
    fingerprint: str = ""
    error: ErrorInfo | None = None
    certificate: dict[str, Any] | None = None
    load_s: float = 0.0
    oldest_s: float = 0.0
    cost_rate: float = 0.0
    fetched: Fetched | None = None
    precision: ServedPrecision | None = None
    crossover_tokens: int = 0


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat/1"):
    """A worker's own account of itself. `ready` is false while its adapter does not answer; `leaving` says that it
    drains.

    `slots` is how many models of the usual size fit (0: not known), `rate` the tokens a second that its device runs
    while it is busy (0: not measured yet), `held_cost` the tokens that it has taken in and not answered, `credit_cost`
    and `credit_items` how many of them and how many messages it takes in at most (0: not told). A batch has
    `batch_cost` tokens at most, and at the adapter are `pipeline` batches at most. `pool` is the one that it pulls from
    now; `own_pool` its own, of a worker that asks which pool to serve (empty: it serves `pool` whatever is assigned).
    `clock_ahead_s`: its wall clock less the broker's, as it measured that (None: not yet, or not told). `reads_parts`:
    whether it reads a placement table that is in parts.
    """

    worker: str
    pool: str
    machine_profile: str
    bundle: str
    ready: bool
    version: str
    leaving: bool = False
    gpu_count: int = 1
    gpu: str = ""
    device: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    queue_depth: int = 0
    config_epoch: str = ""
    models: tuple[ModelStatus, ...] = ()
    slots: int = 0
    rate: float = 0.0
    held_cost: int = 0
    credit_cost: int = 0
    credit_items: int = 0
    batch_cost: int = 0
    pipeline: int = 0
    own_pool: str = ""
    clock_ahead_s: float | None = None
    reads_parts: bool = False


class LaneTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway puts into the queue at one priority of a lane: messages and their tokens lately (halved each
    minute), tokens a second, and the tokens that wait in the gateway for their turn.
    """

    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A client that was refused comes again in `due_s` seconds, with a request of `cost` tokens. `client`: a digest."""

    client: bytes
    due_s: float
    cost: float


class QueuedWork(msgspec.Struct, frozen=True, array_like=True):
    """One model (`residency`) at one priority of a lane, as a gateway sees it: the tokens that it has in the queue, the
    tokens of its own that leave the queue per second (0: not known), the turns that it promised since its last
    announcement, and the clients whose turn it was.
    """

    pool: str
    machine_profile: str
    bundle: str
    priority: Priority
    residency: str
    tokens: int
    rate: float = 0.0
    turns: tuple[Turn, ...] = ()
    claimed: tuple[bytes, ...] = ()


class GatewayBeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="gateway/1"):
    """A gateway's account of itself, each second, to all gateways. `traffic` by lane and priority: `pool.machine
    profile.bundle.priority`. `qps`: inference requests that it answered per second lately. `config_epoch`: of the
    catalogue that it serves by. `queued`: work in the queue, told only while there are other gateways, and then five
    times a second.
    """

    gateway: str
    leaving: bool = False
    traffic: dict[str, LaneTraffic] = {}
    qps: float = 0.0
    config_epoch: str = ""
    queued: tuple[QueuedWork, ...] = ()


class Demand(msgspec.Struct, frozen=True, omit_defaults=True, tag="demand/1"):
    """Somebody asked a lane for what no worker of it had ready. It counts until DEMAND_LIFE_S after `at_s`, the
    broker's time.
    """

    at_s: float


class Placement(msgspec.Struct, frozen=True, omit_defaults=True, tag="placement/1"):
    """Who hosts which model of a lane: model id to worker ids. `at_s` is the broker's time of the last look, `raised_s`
    of the last host that a model got.

    A large table is in parts: `parts` are their stamps, and `hosts` has the rows of those workers that read no parts.
    """

    at_s: float
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}
    parts: tuple[int, ...] = ()


class PlacementPart(msgspec.Struct, frozen=True, omit_defaults=True, tag="placement-part/1"):
    """Rows of a placement table. `stamp` is a digest of them."""

    stamp: int
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}


class PoolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a reservation asks for: at least so many GPUs of each machine profile, and `minimum_worker_count` workers in
    all, of `bundle` if it names one. Its lease lasts `ttl_seconds`.
    """

    name: str
    gpus: dict[str, int]
    bundle: str = ""
    minimum_worker_count: int = 0
    ttl_seconds: int = 1200
    gpu_caps: dict[str, int] = {}
    pinned_models: tuple[str, ...] = ()


class Reservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reservation with its lease. Times are the broker's. `takes_last`: it may take a worker of which no other of its
    bundle would serve the pool of everybody.
    """

    spec: PoolSpec
    created_s: float
    renewed_s: float
    takes_last: bool = False

    @property
    def expires_s(self) -> float:
        return self.renewed_s + self.spec.ttl_seconds


class Reservations(msgspec.Struct, frozen=True, omit_defaults=True, tag="reservations/1"):
    """All reservations by name, and those that have ended, and when, until their streams are removed."""

    pools: dict[str, Reservation] = {}
    ended: dict[str, float] = {}


class Assigned(msgspec.Struct, frozen=True, omit_defaults=True, tag="assigned/1"):
    """Which reservation has which worker: worker id to pool."""

    workers: dict[str, str] = {}


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


class ConfigDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag="delta/1"):
    """One committed write of the catalogue. `entry` is null for a removal.

    Applied only by a reader that stands at `previous`; one that follows the subject's bundle alone may stand anywhere
    from `since`, the epoch of the last write before that concerned the bundle (empty: `previous`), to `previous`.
    """

    producer: str
    previous: str
    epoch: str
    model: str
    revision: int
    entry: dict[str, Any] | None = None
    since: str = ""


class ConfigModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of an export. `written`: the number in the epoch of the write that made this revision (0: not told)."""

    model_id: str
    model_config: dict[str, Any]
    revision: int = 0
    affected_bundles: tuple[str, ...] = ()
    raw_yaml: str = ""
    written: int = 0


class ConfigEpoch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the catalogue stands. `bundles`: the epoch of the last write that concerned each bundle, as far as it is
    known.
    """

    epoch: str
    bundles: dict[str, str] = {}
    bundles_hash: str = ""
    bundle_config_hashes_hash: str = ""


class ConfigExport(msgspec.Struct, frozen=True, omit_defaults=False):
    """The whole catalogue at one epoch."""

    epoch: str
    models: tuple[ConfigModel, ...]
    bundles: tuple[dict[str, Any], ...] = ()
    snapshot_version: int = 1
    generated_at: str = ""


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_work = msgspec.msgpack.Decoder(WorkItem).decode
decode_result = msgspec.msgpack.Decoder(WorkResult).decode
decode_result_or_fragment = msgspec.msgpack.Decoder(WorkResult | Fragment).decode
decode_payload = msgspec.msgpack.Decoder(Payload).decode
decode_cancel = msgspec.msgpack.Decoder(Cancel).decode
decode_gateway = msgspec.msgpack.Decoder(GatewayBeat).decode
decode_demand = msgspec.msgpack.Decoder(Demand).decode
decode_placement = msgspec.msgpack.Decoder(Placement).decode
decode_placement_part = msgspec.msgpack.Decoder(PlacementPart).decode
decode_reservations = msgspec.msgpack.Decoder(Reservations).decode
decode_assigned = msgspec.msgpack.Decoder(Assigned).decode
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
decode_delta = msgspec.msgpack.Decoder(ConfigDelta).decode
