"""What travels over NATS: work, results, heartbeats and config deltas.

Evolution: a new field has a default, nothing changes type or meaning, nothing is renamed; readers ignore what they do not know.
One encoded example of every message and version is kept under tests/contract/fixtures and decoded in both directions.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.muvera import Muvera

Priority = Literal["interactive", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Operation = Literal["encode", "score", "extract"]
Truncate = Literal["END", "START", "NONE"]


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of a request. Exactly the fields that the operation needs are set."""

    text: str | None = None


class RunOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request asks of a model, after all precedence rules: the resolved set that every path executes identically.

    `prefix` and `suffix` are the prompt around a text, `query_prefix` and `query_suffix` that around the query it is scored against.
    `pieces` is the template of a pair for models that have one: each piece is literal text, then alternately `query` or `document` and
    literal text. `dimensions` and `max_tokens` 0 mean the model's own. `parameters` are options of one family, JSON types intact.
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


class WorkItem(msgspec.Struct, frozen=True, omit_defaults=True, tag="work/1"):
    """A chunk of a request: consecutive inputs that one worker answers together.

    `first` is the position of `inputs[0]` in the request, `query` what they are scored against. `reply` is the gateway's inbox; a result
    is sent there as a request and counts as delivered only when confirmed. `budget_ms` counts from the broker's timestamp of the message.
    A chunk that no message can hold has its inputs and query in the payload store under `payload`, and `count` says how many there are.
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

    The names of arrays: `dense`, `multivector`, `sparse.indices`, `sparse.values`; `<name>.scale` and `<name>.offset` of integer dtypes.
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
    """Milliseconds of one chunk at the worker, contiguous marks on the worker's clock, from delivery to the sending of the result."""

    load_ms: float = 0.0
    preprocess_ms: float = 0.0
    batch_wait_ms: float = 0.0
    device_wait_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    worker_ms: float = 0.0
    fetch_ms: float = 0.0


class BatchNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """The batch that a chunk ran in, for `explain` and for tests of batch independence."""

    id: str = ""
    items: int = 0
    chunks: int = 0
    tokens: int = 0
    attention: int = 0  # sum of squared lengths
    deliveries: int = 1


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
    """Part `index` of `count` of an encoded WorkResult that no message can hold. `digest` is the SHA-256 of the whole, in hex."""

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
    """The gateway's answer to a result: taken, a duplicate of one already taken, or of a request that it no longer knows.

    `part`: a fragment was kept, the rest is awaited.
    """

    verdict: Literal["taken", "duplicate", "unknown", "part"]


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model on one worker. `load_s` is what its last load took, `oldest_s` the age of the oldest work that is held for it, `cost_rate`
    the tokens a second that were taken in for it lately."""

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


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat/1"):
    """A worker's own account of itself. `ready` is false while its adapter does not answer; `leaving` says that it drains.

    `slots` is how many models of the usual size fit (0: not known), `rate` the tokens a second that its device runs while it is busy
    (0: not measured yet), `held_cost` the tokens that it has taken in and not answered, `credit_cost` and
    `credit_items` how many of them and how many messages it takes in at most (0: not told). A batch has `batch_cost` tokens at most, and
    at the adapter are `pipeline` batches at most.
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


class LaneTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway puts into the queue at one priority of a lane: messages and their tokens lately (halved each minute), tokens a second,
    and the tokens that wait in the gateway for their turn."""

    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class GatewayBeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="gateway/1"):
    """A gateway's account of itself, each second, to all gateways. `traffic` by lane and priority: `pool.machine profile.bundle.priority`.
    """

    gateway: str
    leaving: bool = False
    traffic: dict[str, LaneTraffic] = {}


class Demand(msgspec.Struct, frozen=True, omit_defaults=True, tag="demand/1"):
    """Somebody asked a lane for what no worker of it had ready. It counts until DEMAND_LIFE_S after `at_s`, the broker's time."""

    at_s: float


class Placement(msgspec.Struct, frozen=True, omit_defaults=True, tag="placement/1"):
    """Who hosts which model of a lane: model id to worker ids. `at_s` is the broker's time of the last look, `raised_s` of the last host
    that a model got."""

    at_s: float
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, tag="dead/1"):
    """Work that was given up, whole: `item` is the encoded WorkItem as it was delivered, so that it can be published again."""

    id: str
    subject: str
    item: bytes
    error: ErrorInfo
    workers: tuple[str, ...]
    deliveries: int
    deaths: int
    at_s: float


class ConfigDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag="delta/1"):
    """One committed write of the catalogue. `entry` is null for a removal. Applied only by a reader that stands at `previous`."""

    producer: str
    previous: str
    epoch: str
    model: str
    revision: int
    entry: dict[str, Any] | None = None


class ConfigModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of an export."""

    model_id: str
    model_config: dict[str, Any]
    revision: int = 0
    affected_bundles: tuple[str, ...] = ()
    raw_yaml: str = ""


class ConfigExport(msgspec.Struct, frozen=True, omit_defaults=False):
    """The whole catalogue at one epoch."""

    epoch: str
    models: tuple[ConfigModel, ...]
    bundles: tuple[dict[str, Any], ...] = ()
    snapshot_version: int = 1
    generated_at: str = ""


Message = (
    WorkItem | WorkResult | Confirmation | Heartbeat | ConfigDelta | Fragment | Cancel | Payload | Placement | DeadLetter
    | GatewayBeat | Demand
)  # fmt: skip

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
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
decode_confirmation = msgspec.msgpack.Decoder(Confirmation).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
decode_delta = msgspec.msgpack.Decoder(ConfigDelta).decode
decode_any = msgspec.msgpack.Decoder(Message).decode
