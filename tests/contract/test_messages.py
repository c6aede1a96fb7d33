"""Messages of every released version: old bytes with new types, new bytes with old types.

`V1...` are the readers of version 1, declared here once and never changed: what they need must stay as it is.
`Verbs...` are those that know scores and extraction as well, `Queue...` those of placement, fragments and dead letters.
`P3...` read what sidecar and adapter of protocol 3 say to each other; a next protocol replaces them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from make_fixtures import EXAMPLES, FIXTURES, encoded, path_of

from sie_contracts import configs, heartbeats, ipc, messages, records
from sie_contracts.configs import ConfigExport
from sie_contracts.messages import Input, Ok, RunOptions


class V1Error(msgspec.Struct):
    code: str
    message: str
    reason: str = ""
    param: str = ""
    retry_after_s: int = 0
    extras: dict[str, Any] = {}


class V1Input(msgspec.Struct):
    text: str | None = None


class V1Options(msgspec.Struct):
    outputs: tuple[str, ...] = ("dense",)
    prefix: str = ""
    suffix: str = ""
    truncate: str = "END"
    pooling: str = ""
    normalize: bool = True
    dimensions: int = 0
    max_tokens: int = 0
    lora: str = ""


class V1Work(msgspec.Struct, tag="work/1"):
    request: str
    chunk: int
    model: str
    revision: str
    operation: str
    inputs: tuple[V1Input, ...]
    options: V1Options
    reply: str
    budget_ms: int
    first: int = 0
    attempt: int = 0
    profile: str = "default"
    config_revision: int = 0
    priority: str = "interactive"
    cost: int = 0
    traceparent: str = ""


class V1Slice(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class V1Ok(msgspec.Struct, tag="ok"):
    outputs: dict[str, V1Slice]
    tokens: int = 0
    truncated: bool = False


class V1Failed(msgspec.Struct, tag="failed"):
    error: V1Error


class V1Stages(msgspec.Struct):
    load_ms: float = 0.0
    preprocess_ms: float = 0.0
    batch_wait_ms: float = 0.0
    device_wait_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    worker_ms: float = 0.0


class V1Note(msgspec.Struct):
    id: str = ""
    items: int = 0
    chunks: int = 0
    tokens: int = 0
    attention: int = 0
    deliveries: int = 1


class V1Result(msgspec.Struct, tag="result/1"):
    request: str
    chunk: int
    worker: str
    outcomes: tuple[V1Ok | V1Failed, ...]
    block: bytes = b""
    attempt: int = 0
    revision: str = ""
    fingerprint: str = ""
    stages: V1Stages = msgspec.field(default_factory=V1Stages)
    batch: V1Note = msgspec.field(default_factory=V1Note)


class V1Confirmation(msgspec.Struct, tag="confirm/1"):
    verdict: str


class V1Status(msgspec.Struct):
    model: str
    state: str
    memory_bytes: int = 0
    queued: int = 0
    fingerprint: str = ""
    error: V1Error | None = None


class V1Heartbeat(msgspec.Struct, tag="heartbeat/1"):
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
    models: tuple[V1Status, ...] = ()


class V1Delta(msgspec.Struct, tag="delta/1"):
    producer: str
    previous: str
    epoch: str
    model: str
    revision: int
    entry: dict[str, Any] | None = None


class V1Model(msgspec.Struct):
    model_id: str
    model_config: dict[str, Any]
    revision: int = 0
    affected_bundles: tuple[str, ...] = ()
    raw_yaml: str = ""


class V1Export(msgspec.Struct):
    epoch: str
    models: tuple[V1Model, ...]
    bundles: tuple[dict[str, Any], ...] = ()
    snapshot_version: int = 1
    generated_at: str = ""


class VerbsMuvera(msgspec.Struct):
    num_repetitions: int = 40
    num_simhash_projections: int = 6
    projection_dim: int | None = None
    final_projection_dim: int | None = 10240
    seed: int = 42
    normalize: bool = False
    fill_empty_partitions: bool = False


class VerbsOptions(V1Options):
    dtype: str = "float32"
    is_query: bool = False
    muvera: VerbsMuvera | None = None
    pieces: tuple[tuple[str, ...], ...] = ()
    query_prefix: str = ""
    query_suffix: str = ""
    instruction: str = ""
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    parameters: dict[str, Any] = {}


class VerbsWork(msgspec.Struct, tag="work/1"):
    request: str
    chunk: int
    model: str
    revision: str
    operation: str
    inputs: tuple[V1Input, ...]
    options: VerbsOptions
    reply: str
    budget_ms: int
    query: V1Input | None = None


class VerbsOk(V1Ok, tag="ok"):
    score: float | None = None
    data: dict[str, Any] | None = None


class VerbsResult(msgspec.Struct, tag="result/1"):
    request: str
    chunk: int
    worker: str
    outcomes: tuple[VerbsOk | V1Failed, ...]


class PayloadStages(V1Stages):
    fetch_ms: float = 0.0


class PayloadResult(msgspec.Struct, tag="result/1"):
    request: str
    chunk: int
    worker: str
    outcomes: tuple[VerbsOk | V1Failed, ...]
    stages: PayloadStages = msgspec.field(default_factory=PayloadStages)


class CertificateStatus(V1Status):
    certificate: dict[str, Any] | None = None


class CertificateHeartbeat(msgspec.Struct, tag="heartbeat/1"):
    worker: str
    pool: str
    machine_profile: str
    bundle: str
    ready: bool
    version: str
    models: tuple[CertificateStatus, ...] = ()


class P3Group(msgspec.Struct):
    start: int
    stop: int
    options: VerbsOptions = msgspec.field(default_factory=VerbsOptions)
    inputs: int = -1


class P3Loaded(msgspec.Struct):
    model: str
    revision: str
    fingerprint: str
    precision: str
    attention: str
    memory_bytes: int = 0
    idle_s: float = 0.0
    peak_bytes: int = 0
    certificate: dict[str, Any] = {}


class P3Side(msgspec.Struct):
    marker: int = -1
    limit: int = 0
    expanded: int = 0
    special: bool = True


class P3Rows(msgspec.Struct):
    layout: str = "text"
    query: P3Side = msgspec.field(default_factory=P3Side)
    document: P3Side = msgspec.field(default_factory=P3Side)


class P3Ping(msgspec.Struct, tag="Ping"):
    may_drop: tuple[str, ...] = ()


class P3Describe(msgspec.Struct, tag="Describe"):
    pass


class P3EnsureReady(msgspec.Struct, tag="EnsureReady"):
    model: str
    entry: dict[str, Any]
    profile: str = "default"
    may_drop: tuple[str, ...] = ()


class P3EnsureLora(msgspec.Struct, tag="EnsureLora"):
    model: str
    lora: str


class P3Release(msgspec.Struct, tag="Release"):
    model: str


class P3RunBatch(msgspec.Struct, tag="RunBatch"):
    batch: str
    model: str
    operation: str
    lengths: bytes
    ids: bytes
    groups: tuple[P3Group, ...]
    types: bytes = b""
    texts: tuple[str, ...] = ()
    offsets: bytes = b""
    pooling: str = ""
    lora: str = ""
    traceparent: str = ""
    may_drop: tuple[str, ...] = ()


class P3ApplyConfig(msgspec.Struct, tag="ApplyConfig"):
    model: str
    entry: dict[str, Any] | None = None


class P3Drain(msgspec.Struct, tag="Drain"):
    pass


class P3Pong(msgspec.Struct, tag="Pong"):
    pid: int
    busy_s: float = 0.0
    batches: int = 0
    dropped: tuple[str, ...] = ()


class P3Description(msgspec.Struct, tag="Description"):
    protocol: int
    pid: int
    device: str
    version: str
    lanes: int = 1
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    models: tuple[P3Loaded, ...] = ()


class StatusShortages(msgspec.Struct):
    model: str
    recoveries_attempted: int = 0
    recoveries_succeeded: int = 0
    terminal_failures: int = 0
    cache_clears: int = 0
    evictions_triggered: int = 0
    batch_splits: int = 0


class StatusDescription(P3Description, tag="Description"):
    utilization_percent: float | None = None
    threshold_percent: float = 0.0
    shortages: tuple[StatusShortages, ...] = ()


class BatchesRan(msgspec.Struct):
    number: int
    ended: float
    model: str
    operation: str
    rows: int
    inputs: int
    items: int
    tokens: int
    longest: int
    attention: int
    wait_ms: float
    lora: bool = False
    failed: int = 0
    padding: int = 0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    memory_bytes: int = 0


class BatchesDescription(StatusDescription, tag="Description"):
    batches: tuple[BatchesRan, ...] | None = None


class P3Ready(msgspec.Struct, tag="Ready"):
    loaded: P3Loaded
    tokenizer: bytes
    max_tokens: int
    rows: dict[str, P3Rows] = {}
    load_s: float = 0.0
    dropped: tuple[str, ...] = ()


class P3BatchStarted(msgspec.Struct, tag="BatchStarted"):
    batch: str


class P3BatchDone(msgspec.Struct, tag="BatchDone"):
    batch: str
    outcomes: tuple[VerbsOk | V1Failed, ...]
    block: bytes
    inference_ms: float
    postprocess_ms: float = 0.0
    dropped: tuple[str, ...] = ()


class P3Done(msgspec.Struct, tag="Done"):
    pass


class P3LoraDone(msgspec.Struct, tag="Done"):
    digest: str = ""


class P3Refused(msgspec.Struct, tag="Refused"):
    error: V1Error
    batch: str = ""
    dropped: tuple[str, ...] = ()


class QueuePayloadWork(VerbsWork, tag="work/1"):
    payload: str = ""
    count: int = 0


class QueuePayload(msgspec.Struct, tag="payload/1"):
    inputs: tuple[V1Input, ...]
    query: V1Input | None = None


class RerankOptions(VerbsOptions):
    document_tokens: int = 0


class RerankWork(msgspec.Struct, tag="work/1"):
    request: str
    chunk: int
    model: str
    revision: str
    operation: str
    inputs: tuple[V1Input, ...]
    options: RerankOptions
    reply: str
    budget_ms: int
    query: V1Input | None = None


class StatusWork(V1Work, tag="work/1"):
    endpoint: str = ""


class TracedWork(V1Work, tag="work/1"):
    tracestate: str = ""


class KindsVectors(msgspec.Struct, array_like=True):
    rows: int
    width: int
    data: bytes


class KindsInput(V1Input):
    tokens: tuple[int, ...] | None = None
    pair: str | None = None
    vectors: KindsVectors | None = None


class KindsWork(msgspec.Struct, tag="work/1"):
    request: str
    chunk: int
    model: str
    revision: str
    operation: str
    inputs: tuple[KindsInput, ...]
    options: VerbsOptions
    reply: str
    budget_ms: int
    query: KindsInput | None = None


class KindsRows(P3Rows):
    tokens: bool = False
    pairs: bool = False
    vectors: int = 0


class KindsReady(msgspec.Struct, tag="Ready"):
    loaded: P3Loaded
    tokenizer: bytes
    max_tokens: int
    rows: dict[str, KindsRows] = {}


class KindsRunBatch(P3RunBatch, tag="RunBatch"):
    given: bytes = b""
    vectors: bytes = b""


class CopyRunBatch(KindsRunBatch, tag="RunBatch"):
    fingerprint: str = ""


class TracedGroup(P3Group):
    traceparent: str = ""
    tracestate: str = ""


class TracedRunBatch(CopyRunBatch, tag="RunBatch"):
    groups: tuple[TracedGroup, ...]
    tracestate: str = ""


class QueueFragment(msgspec.Struct, tag="fragment/1"):
    request: str
    chunk: int
    attempt: int
    index: int
    count: int
    digest: str
    data: bytes


class QueueCancel(msgspec.Struct, tag="cancel/1"):
    requests: tuple[str, ...]


class QueueStatus(V1Status):
    load_s: float = 0.0
    oldest_s: float = 0.0
    cost_rate: float = 0.0


class QueueHeartbeat(msgspec.Struct, tag="heartbeat/1"):
    worker: str
    pool: str
    machine_profile: str
    bundle: str
    ready: bool
    version: str
    models: tuple[QueueStatus, ...] = ()
    slots: int = 0
    rate: float = 0.0
    held_cost: int = 0
    credit_cost: int = 0


class ItemsHeartbeat(QueueHeartbeat, tag="heartbeat/1"):
    credit_items: int = 0
    batch_cost: int = 0
    pipeline: int = 0


class QueueTraffic(msgspec.Struct, array_like=True):
    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class QueueGateway(msgspec.Struct, tag="gateway/1"):
    gateway: str
    leaving: bool = False
    traffic: dict[str, QueueTraffic] = {}


class StatusGateway(QueueGateway, tag="gateway/1"):
    qps: float = 0.0


class EpochGateway(StatusGateway, tag="gateway/1"):
    config_epoch: str = ""


class V1Turn(msgspec.Struct, array_like=True):
    client: bytes
    due_s: float
    cost: float


class V1Queued(msgspec.Struct, array_like=True):
    pool: str
    machine_profile: str
    bundle: str
    priority: str
    residency: str
    tokens: int
    rate: float = 0.0
    turns: tuple[V1Turn, ...] = ()
    claimed: tuple[bytes, ...] = ()


class SharingGateway(EpochGateway, tag="gateway/1"):
    queued: tuple[V1Queued, ...] = ()


class SinceDelta(V1Delta, tag="delta/1"):
    since: str = ""


class WrittenModel(V1Model):
    written: int = 0


class WrittenExport(V1Export):
    models: tuple[WrittenModel, ...]


class QueueDemand(msgspec.Struct, tag="demand/1"):
    at_s: float


class PoolsHeartbeat(ItemsHeartbeat, tag="heartbeat/1"):
    own_pool: str = ""


class ClockHeartbeat(PoolsHeartbeat, tag="heartbeat/1"):
    clock_ahead_s: float | None = None


class PoolsSpec(msgspec.Struct):
    name: str
    gpus: dict[str, int]
    bundle: str = ""
    minimum_worker_count: int = 0
    ttl_seconds: int = 1200
    gpu_caps: dict[str, int] = {}
    pinned_models: tuple[str, ...] = ()


class PoolsReservation(msgspec.Struct):
    spec: PoolsSpec
    created_s: float
    renewed_s: float


class PoolsReservations(msgspec.Struct, tag="reservations/1"):
    pools: dict[str, PoolsReservation] = {}
    ended: dict[str, float] = {}


class PoolsAssigned(msgspec.Struct, tag="assigned/1"):
    workers: dict[str, str] = {}


class QueuePlacement(msgspec.Struct, tag="placement/1"):
    at_s: float
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}


class PartsPlacement(QueuePlacement, tag="placement/1"):
    parts: tuple[int, ...] = ()


class PartsPart(msgspec.Struct, tag="placement-part/1"):
    stamp: int
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}


class PartsHeartbeat(ClockHeartbeat, tag="heartbeat/1"):
    reads_parts: bool = False


class QueueDeadLetter(msgspec.Struct, tag="dead/1"):
    id: str
    subject: str
    item: bytes
    error: V1Error
    workers: tuple[str, ...]
    deliveries: int
    deaths: int
    at_s: float


class PaddedNote(V1Note):
    padding: int = 0
    swapped: bool = False


class PaddedResult(msgspec.Struct, tag="result/1"):
    request: str
    chunk: int
    worker: str
    outcomes: tuple[VerbsOk | V1Failed, ...]
    batch: PaddedNote = msgspec.field(default_factory=PaddedNote)


class OldFetched(msgspec.Struct):
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class FetchedStatus(V1Status):
    fetched: OldFetched | None = None


class FetchedHeartbeat(V1Heartbeat, tag="heartbeat/1"):
    models: tuple[FetchedStatus, ...] = ()


class OldPrecision(msgspec.Struct):
    served: str
    requested: str = ""
    reason: str = ""


class PrecisionStatus(V1Status):
    precision: OldPrecision | None = None


class CrossoverStatus(PrecisionStatus):
    crossover_tokens: int = 0


class CrossoverHeartbeat(V1Heartbeat, tag="heartbeat/1"):
    models: tuple[CrossoverStatus, ...] = ()


class PrecisionHeartbeat(V1Heartbeat, tag="heartbeat/1"):
    models: tuple[PrecisionStatus, ...] = ()


class PrecisionLoaded(P3Loaded):
    requested_precision: str = ""
    precision_reason: str = ""


class PrecisionReady(KindsReady, tag="Ready"):
    loaded: PrecisionLoaded


class CrossoverLoaded(PrecisionLoaded):
    crossover_tokens: int = 0


class CrossoverReady(KindsReady, tag="Ready"):
    loaded: CrossoverLoaded


class FetchingPong(P3Pong, tag="Pong"):
    fetching: dict[str, OldFetched] = {}


class PaddedBatchDone(P3BatchDone, tag="BatchDone"):
    padding: int = 0


class TokenisedBatchDone(PaddedBatchDone, tag="BatchDone"):
    preprocess_ms: float = 0.0


OLD_READERS: dict[str, type[msgspec.Struct]] = {
    "work-1": V1Work,
    "result-1": V1Result,
    "confirm-1": V1Confirmation,
    "heartbeat-1": V1Heartbeat,
    "delta-1": V1Delta,
    "export-1": V1Export,
    "work-1-verbs": VerbsWork,
    "result-1-verbs": VerbsResult,
    "heartbeat-1-certificate": CertificateHeartbeat,
    "work-1-payload": QueuePayloadWork,
    "payload-1": QueuePayload,
    "result-1-payload": PayloadResult,
    "fragment-1": QueueFragment,
    "cancel-1": QueueCancel,
    "work-1-kinds": KindsWork,
    "work-1-rerank": RerankWork,
    "ipc3-RunBatch-given": KindsRunBatch,
    "ipc3-Ready-kinds": KindsReady,
    "work-1-traced": TracedWork,
    "ipc3-RunBatch-traced": TracedRunBatch,
    "heartbeat-1-precision": PrecisionHeartbeat,
    "ipc3-Ready-precision": PrecisionReady,
    "heartbeat-1-crossover": CrossoverHeartbeat,
    "ipc3-Ready-crossover": CrossoverReady,
    "ipc3-RunBatch-copy": CopyRunBatch,
    "heartbeat-1-fetched": FetchedHeartbeat,
    "ipc3-Pong-fetching": FetchingPong,
    "heartbeat-1-capacity": QueueHeartbeat,
    "placement-1": QueuePlacement,
    "dead-1": QueueDeadLetter,
    "heartbeat-1-items": ItemsHeartbeat,
    "gateway-1": QueueGateway,
    "gateway-1-qps": StatusGateway,
    "work-1-endpoint": StatusWork,
    "ipc3-Description-device": StatusDescription,
    "ipc3-Description-batches": BatchesDescription,
    "demand-1": QueueDemand,
    "heartbeat-1-own-pool": PoolsHeartbeat,
    "reservations-1": PoolsReservations,
    "reservations-1-last": PoolsReservations,
    "assigned-1": PoolsAssigned,
    "heartbeat-1-clock": ClockHeartbeat,
    "placement-1-parts": PartsPlacement,
    "placement-part-1": PartsPart,
    "heartbeat-1-parts": PartsHeartbeat,
    "ipc3-Ping": P3Ping,
    "ipc3-Describe": P3Describe,
    "ipc3-EnsureReady": P3EnsureReady,
    "ipc3-EnsureLora": P3EnsureLora,
    "ipc3-Release": P3Release,
    "ipc3-RunBatch": P3RunBatch,
    "ipc3-ApplyConfig": P3ApplyConfig,
    "ipc3-Drain": P3Drain,
    "ipc3-Pong": P3Pong,
    "ipc3-Description": P3Description,
    "ipc3-Ready": P3Ready,
    "ipc3-BatchStarted": P3BatchStarted,
    "result-1-swapped": PaddedResult,
    "ipc3-BatchDone-padded": PaddedBatchDone,
    "ipc3-BatchDone-tokenised": TokenisedBatchDone,
    "gateway-1-epoch": EpochGateway,
    "gateway-1-queued": SharingGateway,
    "delta-1-since": SinceDelta,
    "export-1-written": WrittenExport,
    "ipc3-BatchDone": P3BatchDone,
    "ipc3-Done": P3Done,
    "ipc3-Done-lora": P3LoraDone,
    "ipc3-Refused": P3Refused,
}
# what is sent today is also sent to those who know less of it
OLDER_READERS = {
    "work-1-verbs": V1Work,
    "result-1-verbs": V1Result,
    "heartbeat-1-certificate": V1Heartbeat,
    "heartbeat-1-capacity": V1Heartbeat,
    "work-1-payload": VerbsWork,
    "work-1-kinds": VerbsWork,
    "work-1-rerank": VerbsWork,
    "work-1-traced": V1Work,
    "ipc3-RunBatch-traced": CopyRunBatch,
    "ipc3-RunBatch-copy": P3RunBatch,
    "heartbeat-1-fetched": V1Heartbeat,
    "ipc3-Pong-fetching": P3Pong,
    "heartbeat-1-precision": V1Heartbeat,
    "ipc3-Ready-precision": P3Ready,
    "heartbeat-1-crossover": PrecisionHeartbeat,
    "ipc3-Ready-crossover": PrecisionReady,
    "ipc3-RunBatch-given": P3RunBatch,
    "ipc3-Ready-kinds": P3Ready,
    "gateway-1-qps": QueueGateway,
    "work-1-endpoint": V1Work,
    "ipc3-Description-device": P3Description,
    "ipc3-Description-batches": StatusDescription,
    "result-1-payload": V1Result,
    "heartbeat-1-items": QueueHeartbeat,
    "result-1-swapped": V1Result,
    "ipc3-BatchDone-padded": P3BatchDone,
    "ipc3-BatchDone-tokenised": PaddedBatchDone,
    "placement-1-parts": QueuePlacement,
    "heartbeat-1-parts": ClockHeartbeat,
    "heartbeat-1-clock": PoolsHeartbeat,
    "gateway-1-epoch": StatusGateway,
    "delta-1-since": V1Delta,
    "export-1-written": V1Export,
}

Message = (
    messages.WorkItem
    | messages.WorkResult
    | messages.Confirmation
    | heartbeats.Heartbeat
    | configs.ConfigDelta
    | messages.Fragment
    | messages.Cancel
    | messages.Payload
    | records.Placement
    | messages.DeadLetter
    | heartbeats.GatewayBeat
    | records.Demand
    | records.Reservations
    | records.Assigned
    | records.PlacementPart
)
decode_any = msgspec.msgpack.Decoder(Message).decode
each_fixture = pytest.mark.parametrize("name", EXAMPLES)


def decode(name: str, data: bytes, kind: Any = None) -> Any:
    """With the types of today, as the receiving process does it, or with an old reader."""
    if kind is not None:
        return (
            msgspec.json.decode(data, type=kind)
            if name.startswith("export")
            else msgspec.msgpack.decode(data, type=kind)
        )
    if name.startswith("export"):
        return msgspec.json.decode(data, type=ConfigExport)
    if not name.startswith("ipc"):
        return decode_any(data)
    asked = isinstance(EXAMPLES[name], get_args(ipc.Request))
    return ipc.request(data) if asked else ipc.reply(data)


# maps of anything, where another key is another value
_DATA = {
    "entry",
    "parameters",
    "data",
    "extras",
    "model_config",
    "bundles",
    "certificate",
    "hosts",
    "raised_s",
    "gpus",
    "gpu_caps",
    "ended",
    "workers",
}
_NAMED = {"outputs", "rows", "traffic", "pools", "fetching"}  # maps from names that are data to structs


def newer(value: Any, key: str = "") -> Any:
    """The same message from a sender that knows more: a further field in every map, a further element in every array
    slice.
    """
    if key in _DATA:
        return value
    if isinstance(value, dict):
        if key in _NAMED:
            return {
                name: [*item, "element of the future"] if isinstance(item, list) else newer(item)
                for name, item in value.items()
            }
        return {
            **{name: newer(item, name) for name, item in value.items()},
            "field_of_the_future": {"nested": [1, "x"]},
        }
    if isinstance(value, list):
        return [newer(item) for item in value]
    return value


def newer_bytes(name: str) -> bytes:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    return bytes(codec.encode(newer(codec.decode(path_of(name).read_bytes()))))


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    """All structs of a message, at any depth."""
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from structs_in(item)


def test_every_message_of_today_has_a_fixture_and_no_fixture_is_left_over() -> None:
    """P2: a message that is added needs its example before it is released."""
    kinds = {*get_args(Message), *get_args(ipc.Request), *get_args(ipc.Reply), ConfigExport}
    assert {type(example) for example in EXAMPLES.values()} == kinds
    assert {path_of(name) for name in EXAMPLES} == set(FIXTURES.iterdir())
    assert set(OLD_READERS) == set(EXAMPLES)


@each_fixture
def test_old_bytes_mean_the_same_to_the_types_of_today(name: str) -> None:
    """P2."""
    assert decode(name, path_of(name).read_bytes()) == EXAMPLES[name]


def test_every_field_of_every_message_is_set_in_an_example() -> None:
    """A field that holds its default would not be in the bytes, and nothing would be proven of it."""
    given, unset = set(), set()
    for found in (found for example in EXAMPLES.values() for found in structs_in(example)):
        for field in msgspec.structs.fields(found):
            known = field.required or getattr(found, field.name) != default_of(field)
            (given if known else unset).add(f"{type(found).__name__}.{field.name}")
    assert unset - given == set()


@each_fixture
def test_fields_the_reader_does_not_know_are_ignored(name: str) -> None:
    """P2: at every level."""
    assert decode(name, newer_bytes(name)) == EXAMPLES[name]


@each_fixture
def test_an_old_reader_reads_what_is_written_today(name: str) -> None:
    """P2: with the same values, and also when the sender knows more than today."""
    for data in (path_of(name).read_bytes(), encoded(name), newer_bytes(name)):
        assert agrees(decode(name, data, OLD_READERS[name]), EXAMPLES[name])


def agrees(old: Any, today: Any) -> bool:
    """Whether all that the old reader knows is what was written."""
    if isinstance(old, msgspec.Struct):
        same_kind = old.__struct_config__.tag == today.__struct_config__.tag
        return same_kind and all(agrees(getattr(old, name), getattr(today, name)) for name in old.__struct_fields__)
    if isinstance(old, tuple):
        return len(old) == len(today) and all(map(agrees, old, today))
    if isinstance(old, dict):
        return old.keys() == today.keys() and all(agrees(value, today[key]) for key, value in old.items())
    return bool(old == today)


@pytest.mark.parametrize("name", OLDER_READERS)
def test_a_reader_of_the_first_release_reads_what_it_knows_of_a_later_message(name: str) -> None:
    """P2."""
    for data in (path_of(name).read_bytes(), encoded(name), newer_bytes(name)):
        assert agrees(decode(name, data, OLDER_READERS[name]), EXAMPLES[name])


def test_what_the_first_release_sent_asks_for_nothing_that_came_later() -> None:
    """P2: a chunk of an old gateway is run as the old worker ran it."""
    work = messages.decode_work(path_of("work-1").read_bytes())
    later = [field for field in msgspec.structs.fields(RunOptions) if field.name not in V1Options.__struct_fields__]
    assert later
    assert all(getattr(work.options, field.name) == default_of(field) for field in later)
    assert work.query is None
    assert all(given == Input(given.text) for given in work.inputs)
    outcomes = messages.decode_result(path_of("result-1").read_bytes()).outcomes
    assert all(outcome.score is None and outcome.data is None for outcome in outcomes if isinstance(outcome, Ok))


@each_fixture
def test_a_field_was_only_ever_added_and_has_a_default(name: str) -> None:
    """P2: nothing is renamed, nothing that was optional is demanded."""
    old = {field.name: field.required for field in msgspec.structs.fields(OLD_READERS[name])}
    today = {field.name: field.required for field in msgspec.structs.fields(type(EXAMPLES[name]))}
    assert old.keys() <= today.keys()
    assert not any(required and not old.get(field, False) for field, required in today.items())


@each_fixture
def test_a_message_of_the_required_fields_alone_is_read(name: str) -> None:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    raw = codec.decode(path_of(name).read_bytes())
    required = {field.encode_name for field in msgspec.structs.fields(type(EXAMPLES[name])) if field.required}
    found = decode(name, codec.encode({key: value for key, value in raw.items() if key in required | {"type"}}))
    for field in msgspec.structs.fields(type(EXAMPLES[name])):
        assert getattr(found, field.name) == (
            getattr(EXAMPLES[name], field.name) if field.required else default_of(field)
        )


@pytest.mark.parametrize("tag", ["work/2", "Work", "", None])
def test_a_message_of_another_kind_or_version_is_refused_and_not_guessed(tag: str | None) -> None:
    raw = {**msgspec.msgpack.decode(path_of("work-1").read_bytes()), "type": tag}
    for decoder in (decode_any, messages.decode_work):
        with pytest.raises(msgspec.ValidationError):
            decoder(msgspec.msgpack.encode(raw))
    with pytest.raises(ipc.FrameError):
        ipc.request(msgspec.msgpack.encode(raw))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ipc.FrameError):
        ipc.request(path_of("ipc3-Pong").read_bytes())
    with pytest.raises(ipc.FrameError):
        ipc.reply(path_of("ipc3-Ping").read_bytes())


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_bytes_that_are_no_message_are_an_error(cut: int) -> None:
    """X1."""
    data = path_of("result-1").read_bytes()[:cut]
    with pytest.raises(msgspec.DecodeError):
        messages.decode_result(data)
