"""Models, pools, health and scaling over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts import __version__
from sie_contracts.api.shapes import MINI, Text, Texts, Whole
from sie_contracts.load_errors import LoadErrorClass
from sie_contracts.messages import BatchNote, Stages
from sie_contracts.status import QueueInfo

# models

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]


class Download(Struct, kw_only=True):
    """Weights that a worker downloads. `total_bytes` is 0 until it is known."""

    worker: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float


class Precision(Struct, kw_only=True):
    """The requested precision, the precision that workers use, and the reason if they differ."""

    requested: str | None
    served: list[str]
    reason: str | None


class Engine(Struct, kw_only=True):
    """The engine that the entry asks for, the engine that workers use, and the reason for it."""

    requested: str | None
    served: list[str]
    reason: str | None


class LoadError(Struct, kw_only=True):
    """Why a worker could not load a model. `permanent`: the worker does not try again until the entry changes."""

    code: LoadErrorClass
    attempts: int
    permanent: bool
    message: str


class ModelHost(Struct, kw_only=True):
    """A model on one worker. `memory_bytes` is 0 where it is not loaded, `load_s` where it never was."""

    worker: str
    state: ModelState
    memory_bytes: int
    load_s: float
    queued: int
    error: LoadError | None


class ProfileInfo(Struct, kw_only=True):
    """A profile of a model. `changes`: each setting that differs from the default profile, with its value."""

    is_default: bool
    changes: dict[str, Any]
    output_types: Texts = UNSET
    lora_id: Text = UNSET


class Certificate(Struct, kw_only=True):
    """The checks that a loaded model passed. A load that fails one of them is refused.

    `digests`: the files whose SHA-256 is that of the entry. `packed`: for each output, the worst cosine of the packed
    path with the padded one. `golden`: the worst cosine with vectors of the public oracle; null where the entry has
    none.
    """

    digests: list[str]
    packed: dict[str, float]
    golden: float | None
    seconds: float


class AliasTarget(Struct, kw_only=True):
    """A model that serves an alias. Its share of the keys is its share of all weights."""

    model: str
    weight: int


class AliasShadow(Struct, kw_only=True):
    """A model that gets copies of a share of an alias' requests."""

    model: str
    share: float


class AliasInfo(Struct, kw_only=True):
    """The models of an alias."""

    targets: list[AliasTarget]
    shadow: AliasShadow | UnsetType = UNSET


class ModelStats(Struct, kw_only=True):
    """Work of a model at the workers that know it."""

    queue_absolute: int


class ModelInfo(Struct, kw_only=True):
    """One model, or one of its profiles, or an alias.

    `prompts` lists the prompts by name, and `prompt_texts` has the text of each. `hosts`: each worker that knows the
    model, with its state there.
    """

    EXAMPLE: ClassVar[Any] = {
        "name": MINI,
        "id": MINI,
        "object": "model",
        "created": 0,
        "owned_by": "sentence-transformers",
        "inputs": ["text"],
        "outputs": ["dense", "score"],
        "tasks": ["encode", "score"],
        "dims": {"dense": 384},
        "loaded": True,
        "state": "loaded",
        "last_error": None,
        "max_sequence_length": 256,
        "profiles": {"default": {"is_default": True, "changes": {}}},
        "bundles": ["default"],
        "worker_count": 1,
        "workers": ["w0"],
        "hosts": [
            {"worker": "w0", "state": "loaded", "memory_bytes": 91000000, "load_s": 1.4, "queued": 0, "error": None}
        ],
        "matryoshka_dims": None,
        "score_scale": "cosine",
        "supports_lora": False,
        "prompts": [],
        "prompt_texts": {},
        "revision": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        "license": "apache-2.0",
        "description": "",
        "certificate": {"digests": [], "packed": {"dense": 0.9999999}, "golden": 0.9999998, "seconds": 0.4},
        "fingerprint": "b1946ac9",
        "downloads": [],
        "precision": {"requested": None, "served": ["float32"], "reason": None},
        "engine": {"requested": None, "served": ["torch"], "reason": None},
        "backend": "torch",
        "capabilities": ["embed"],
        "stats": {"queue_absolute": 0},
    }

    name: str
    id: str
    object: str
    created: int
    owned_by: str
    inputs: list[str]
    outputs: list[str]
    tasks: list[Literal["encode", "score", "extract"]]
    dims: dict[str, int]
    loaded: bool
    state: ModelState
    last_error: LoadError | None
    max_sequence_length: int
    profiles: dict[str, ProfileInfo]
    bundles: list[str]
    worker_count: int
    workers: list[str]
    hosts: list[ModelHost]
    matryoshka_dims: list[int] | None
    score_scale: str | None
    supports_lora: bool
    prompts: list[str]
    prompt_texts: dict[str, str]
    revision: str
    license: str
    description: str
    certificate: Certificate | None
    fingerprint: str | None
    variant_of: Text = UNSET
    alias: Annotated[AliasInfo | UnsetType, Meta(description="Of an alias: its targets and its shadow.")] = UNSET
    downloads: list[Download]
    precision: Precision
    engine: Engine
    backend: str
    capabilities: list[Literal["embed", "rerank", "classify"]]
    stats: ModelStats


class Models(Struct, kw_only=True):
    """All models, twice: as clients of OpenAI and as our own read them. `total`, with a limit: how many there are."""

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [ModelInfo.EXAMPLE], "models": [ModelInfo.EXAMPLE]}

    object: str
    data: list[ModelInfo]
    models: list[ModelInfo]
    total: Whole = UNSET


# pools

TTL_S, MAX_TTL_S = 1200, 3600
MAX_MINIMUM_WORKERS = 4
MAX_GPUS = 4096  # of one machine profile: above any cluster
MAX_PINNED = 64
Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]


class PoolRequest(Struct, kw_only=True):
    """What a reservation asks for. `ttl_seconds`: how long it lives without being renewed."""

    EXAMPLE: ClassVar[Any] = {"name": "search", "gpus": {"l4": 1}, "ttl_seconds": TTL_S}

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,63}$")]
    gpus: Annotated[dict[str, Count], Meta(min_length=1, description="Workers by machine profile.")]
    gpu_caps: dict[str, Count] | UnsetType = UNSET
    bundle: str | UnsetType | None = UNSET
    minimum_worker_count: Annotated[int, Meta(ge=0, le=MAX_MINIMUM_WORKERS)] | UnsetType = UNSET
    ttl_seconds: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] = TTL_S
    pinned_models: Annotated[list[str], Meta(max_length=MAX_PINNED)] | UnsetType = UNSET


class PoolSpec(Struct, kw_only=True):
    """The specification of a pool. A pool that is not a reservation has no lease, and its workers are not counted."""

    name: str
    bundle: str | None = None
    gpus: dict[str, Annotated[int, Meta(ge=1)]]
    ttl_seconds: float | None = None
    minimum_worker_count: int = 0
    gpu_caps: dict[str, Annotated[int, Meta(ge=1)]] = {}
    pinned_models: list[str] = []


class PoolWorker(Struct, kw_only=True):
    """A worker of a pool. `gpu` is its machine profile."""

    name: str
    url: str | None = None
    gpu: str


class PoolStatus(Struct, kw_only=True):
    """Times are seconds since 1970; `reason` says why a pool is pending."""

    state: Literal["pending", "active"]
    assigned_workers: list[PoolWorker]
    created_at: float | None = None
    last_renewed: float | None = None
    expires_at: float | None = None
    reason: Text = UNSET


class Pool(Struct, kw_only=True):
    """A pool."""

    EXAMPLE: ClassVar[Any] = {
        "name": "search",
        "spec": {"name": "search", "bundle": None, "gpus": {"l4": 1}, "ttl_seconds": 1200, "minimum_worker_count": 0},
        "status": {
            "state": "active",
            "assigned_workers": [{"name": "w0", "url": None, "gpu": "l4"}],
            "created_at": 1780000000.0,
            "last_renewed": 1780000000.0,
            "expires_at": 1780001200.0,
        },
    }

    name: str
    spec: PoolSpec
    status: PoolStatus


class Pools(Struct, kw_only=True):
    """All pools."""

    EXAMPLE: ClassVar[Any] = {"pools": [Pool.EXAMPLE]}

    pools: list[Pool]


class PoolDeleted(Struct, kw_only=True):
    """A reservation has ended."""

    EXAMPLE: ClassVar[Any] = {"message": "Pool deleted"}

    message: str


class PoolRenewed(Struct, kw_only=True):
    """A lease was renewed. `expires_at` is null for a pool that has none."""

    EXAMPLE: ClassVar[Any] = {"message": "Pool renewed", "expires_at": 1780001200.0}

    message: str
    expires_at: float | None


class Assignment(Struct, kw_only=True):
    """The pool that a worker is to serve."""

    EXAMPLE: ClassVar[Any] = {"worker": "w0", "pools": ["_default"]}

    worker: str
    pools: list[str]
    pinned_models: Texts = UNSET


# health and scaling


class WorkerInfo(Struct, frozen=True):
    """One worker. `gpu` is its machine profile, `url` null where it is known by its heartbeats."""

    name: str
    url: str | None
    gpu: str
    gpu_count: int
    pool: str
    loaded_models: list[str]
    queue_depth: int
    memory_used_bytes: int
    memory_total_bytes: int
    healthy: bool
    bundle: str
    bundle_config_hash: str
    device: str


class ModelSummary(Struct, frozen=True):
    """One model of the catalogue, over all healthy workers and all its loaded copies. `gpu_types` of the workers that
    know it.
    """

    name: str
    state: str
    worker_count: int
    gpu_types: list[str]
    total_queue_depth: int


class ClusterInfo(Struct, frozen=True):
    """Sums over the healthy workers. `total_qps`: inference requests that all gateways answer per second, over the last
    ten seconds.
    """

    worker_count: int
    gpu_count: int
    models_loaded: int
    total_qps: float


class Health(Struct, kw_only=True):
    """What is in use, and who serves. `healthy` where a worker is."""

    EXAMPLE: ClassVar[Any] = {
        "status": "healthy",
        "type": "gateway",
        "version": __version__,
        "nats_url": "nats://broker:4222",
        "nats_monitor_url": None,
        "config_url": "http://config:8000",
        "configured_gpu_types": ["l4"],
        "live_gpu_types": ["l4"],
        "cluster": {"worker_count": 1, "gpu_count": 1, "models_loaded": 1, "total_qps": 12.5},
        "workers": [
            {
                "name": "w0",
                "url": None,
                "gpu": "l4",
                "gpu_count": 1,
                "pool": "_default",
                "loaded_models": [MINI],
                "queue_depth": 0,
                "memory_used_bytes": 1073741824,
                "memory_total_bytes": 24159191040,
                "healthy": True,
                "bundle": "default",
                "bundle_config_hash": "2026-01-01T00:00:00Z:42",
                "device": "NVIDIA L4",
            }
        ],
        "unhealthy_workers": [],
        "models": [{"name": MINI, "state": "loaded", "worker_count": 1, "gpu_types": ["l4"], "total_queue_depth": 0}],
    }

    status: Literal["healthy", "degraded"]
    type: str
    version: str
    nats_url: str | None
    nats_monitor_url: str | None
    config_url: str | None
    configured_gpu_types: list[str]
    live_gpu_types: list[str]
    cluster: ClusterInfo
    workers: list[WorkerInfo]
    unhealthy_workers: list[WorkerInfo]
    models: list[ModelSummary]


class LaneFigures(Struct, kw_only=True):
    """The load of a lane, and the number of workers that it needs."""

    EXAMPLE: ClassVar[Any] = {
        "lane": "_default.l4.default",
        "backlog_items": 3,
        "backlog_cost": 900,
        "oldest_age_s": 0.2,
        "ready_workers": 1,
        "wanted_replicas": 2,
        "reserved": 0,
        "demand": 1,
    }

    lane: str
    backlog_items: int
    backlog_cost: int
    oldest_age_s: float
    ready_workers: int
    wanted_replicas: int
    reserved: int
    demand: int


class ClusterCounts(Struct, kw_only=True):
    """How many there are of each, of which at most 50 workers and models are listed. `in_flight`: messages."""

    workers: int
    models: int
    in_flight: int
    dead_letters: int


class ClusterView(Struct, kw_only=True):
    """The state of the cluster in brief. Workers that are not healthy and models that are in use come first. `queues`
    is null where the broker was not read. `failures`: why a model that is listed could not be loaded.
    """

    EXAMPLE: ClassVar[Any] = {
        "version": __version__,
        "cluster": {"worker_count": 1, "gpu_count": 1, "models_loaded": 1, "total_qps": 2.5},
        "counts": {"workers": 1, "models": 12, "in_flight": 0, "dead_letters": 0},
        "workers": [],
        "models": [],
        "queues": None,
        "failures": {},
    }

    version: str
    cluster: ClusterInfo
    counts: ClusterCounts
    workers: list[WorkerInfo]
    models: list[ModelSummary]
    queues: list[QueueInfo] | None
    failures: dict[str, str]


class PlacedModel(Struct, kw_only=True):
    """A model of a lane and its hosts. `state`: of each host, as it reports. `tokens_per_s`: what they take in for it.
    `waiting`, `oldest_s`: messages in the queue, leased ones included. `raised_s`: seconds since it last got one more
    host.
    """

    model: str
    hosts: dict[str, str]
    memory_bytes: int
    tokens_per_s: float
    waiting: int
    oldest_s: float
    raised_s: float | None


class PlacedLane(Struct, kw_only=True):
    """The placement table of a lane. `age_s`: seconds since it was written. `workers`: healthy ones. `models`: how many
    the table has; at most 50 are `shown`, those with work first.
    """

    lane: str
    age_s: float
    workers: int
    models: int
    shown: list[PlacedModel]


class PlacementView(Struct, kw_only=True):
    """Which workers host which models."""

    EXAMPLE: ClassVar[Any] = {
        "lanes": [
            {
                "lane": "_default.l4.default",
                "age_s": 3.2,
                "workers": 1,
                "models": 1,
                "shown": [
                    {
                        "model": MINI,
                        "hosts": {"w0": "loaded"},
                        "memory_bytes": 91000000,
                        "tokens_per_s": 120.5,
                        "waiting": 0,
                        "oldest_s": 0.0,
                        "raised_s": 61.0,
                    }
                ],
            }
        ]
    }

    lanes: list[PlacedLane]


class DoctorFinding(Struct, kw_only=True):
    """What is wrong, and what mends it."""

    wrong: str
    fix: str


class DoctorCheck(Struct, kw_only=True):
    """One check. `absent`: there is nothing to look at. `blind`: it could not look, and `says` why."""

    check: str
    state: Literal["fine", "wrong", "absent", "blind"]
    says: str
    findings: list[DoctorFinding]


class DoctorReport(Struct, kw_only=True):
    """What `sie doctor` finds from the machine of this gateway, with its settings."""

    EXAMPLE: ClassVar[Any] = {
        "status": "fine",
        "checks": [{"check": "broker", "state": "fine", "says": "3 streams", "findings": []}],
    }

    status: Literal["fine", "wrong", "blind"]
    checks: list[DoctorCheck]


class HistoryStep(Struct, kw_only=True):
    """Some seconds from `at` on, seconds since the epoch. Latency is that of requests that ran, in the order of
    `stages`, at most a fifth too high.
    """

    at: int
    requests: int
    errors: dict[str, int]
    p50_ms: list[float] | UnsetType = UNSET
    p99_ms: list[float] | UnsetType = UNSET


class History(Struct, kw_only=True):
    """What a gateway answered over the last hour. Steps in which nothing was answered are left out."""

    EXAMPLE: ClassVar[Any] = {
        "now": 1790000000.0,
        "step_s": 10,
        "stages": ["queue_time", "total_time"],
        "steps": [
            {"at": 1789999990, "requests": 3, "errors": {}, "p50_ms": [1.2, 9.3], "p99_ms": [2.1, 13.4]},
        ],
    }

    now: float
    step_s: int
    stages: list[str]
    steps: list[HistoryStep]


class RequestChunk(Struct, kw_only=True):
    """One message of a request, and where its time went at the worker."""

    worker: str
    chunk: int
    batch: BatchNote
    stages: Stages


class SlowRequest(Struct, kw_only=True):
    """A request without its inputs. What only a request that ran has is missing from others."""

    EXAMPLE: ClassVar[Any] = {
        "id": "0192f0c1-7d3e-7000-8000-000000000000",
        "at": 1790000000.0,
        "endpoint": "encode",
        "status": 200,
        "code": "",
        "model": MINI,
        "total_ms": 812.4,
        "items": 3,
        "trace_id": "",
        "lane": "_default.l4.default",
        "priority": "interactive",
        "tokens": 24,
        "timing": {"queue_time": 800.1, "total_time": 812.4},
        "chunks": [{"worker": "w0", "chunk": 0, "batch": {"id": "b1", "items": 3}, "stages": {"inference_ms": 7.1}}],
    }

    id: str
    at: float
    endpoint: str
    status: int
    code: str
    model: str
    total_ms: float
    items: int
    trace_id: str
    lane: Text = UNSET
    priority: Text = UNSET
    tokens: Whole = UNSET
    timing: dict[str, float] | UnsetType = UNSET
    chunks: list[RequestChunk] | UnsetType = UNSET


class SlowRequests(Struct, kw_only=True):
    """The requests of the last hour that a gateway keeps."""

    EXAMPLE: ClassVar[Any] = {"requests": [SlowRequest.EXAMPLE]}

    requests: list[SlowRequest]


class LogLine(Struct, kw_only=True):
    """A line of a log. `at`: seconds since the epoch."""

    at: float
    level: str
    logger: str
    message: str


class RequestLog(Struct, kw_only=True):
    """The lines of a gateway's log that belong to a request, of its last 5,000 such lines."""

    EXAMPLE: ClassVar[Any] = {
        "lines": [
            {
                "at": 1790000000.123,
                "level": "INFO",
                "logger": "sie.gateway",
                "message": "encode 200 in 9.3 ms items=1 tokens=4",
            }
        ]
    }

    lines: list[LogLine]


class Readiness(Struct, kw_only=True):
    """Whether a process can serve. `healthy_workers` of a gateway."""

    EXAMPLE: ClassVar[Any] = {"status": "ready", "healthy_workers": 1}

    status: Literal["ready", "not ready"]
    reason: Text = UNSET
    healthy_workers: Whole = UNSET
