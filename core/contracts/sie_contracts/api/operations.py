"""Bodies and replies of the routes for pools, health and scaling."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts import __version__
from sie_contracts.api.shapes import MINI, Text, Texts, Whole

TTL_S, MAX_TTL_S = 1200, 3600
MAX_MINIMUM_WORKERS = 4
MAX_GPUS = 4096  # maximum number of GPUs of one machine profile in a reservation; no cluster has more
MAX_PINNED = 64
Count = Annotated[int, Meta(ge=1, le=MAX_GPUS)]


class PoolRequest(Struct, kw_only=True):
    """Request for a reservation: a pool with workers for its owner alone. `ttl_seconds`: seconds until the reservation
    ends, unless it is renewed.
    """

    EXAMPLE: ClassVar[Any] = {"name": "search", "gpus": {"l4": 1}, "ttl_seconds": TTL_S}

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,63}$")]
    gpus: Annotated[
        dict[str, Count],
        Meta(min_length=1, description="GPUs of each machine profile. A worker without a GPU counts as one GPU."),
    ]
    gpu_caps: dict[str, Count] | UnsetType = UNSET
    queue_pool: (
        Annotated[
            Literal["default", "_default"] | None, Meta(description="Pool from which the reservation takes workers.")
        ]
        | UnsetType
    ) = UNSET
    bundle: str | UnsetType | None = UNSET
    minimum_worker_count: Annotated[int, Meta(ge=0, le=MAX_MINIMUM_WORKERS)] | UnsetType = UNSET
    ttl_seconds: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] = TTL_S
    pinned_models: Annotated[list[str], Meta(max_length=MAX_PINNED)] | UnsetType = UNSET


class PoolSpec(Struct, kw_only=True):
    """Specification of a pool. A pool that is not a reservation has no lease and no required number of workers."""

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
    """State of a pool. Times are seconds since 1970. `reason`: why the pool is pending."""

    state: Literal["pending", "active"]
    assigned_workers: list[PoolWorker]
    created_at: float | None = None
    last_renewed: float | None = None
    expires_at: float | None = None
    reason: Text = UNSET


class Pool(Struct, kw_only=True):
    """A pool: its specification and its state."""

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
    """Pools and reservations."""

    EXAMPLE: ClassVar[Any] = {"pools": [Pool.EXAMPLE]}

    pools: list[Pool]


class PoolDeleted(Struct, kw_only=True):
    """Answer to the deletion of a reservation."""

    EXAMPLE: ClassVar[Any] = {"message": "Pool deleted"}

    message: str


class PoolRenewed(Struct, kw_only=True):
    """Answer to the renewal of a lease. `expires_at` is null for a pool without a lease."""

    EXAMPLE: ClassVar[Any] = {"message": "Pool renewed", "expires_at": 1780001200.0}

    message: str
    expires_at: float | None


class Assignment(Struct, kw_only=True):
    """Pools that a worker should serve, and the pinned models of these pools."""

    EXAMPLE: ClassVar[Any] = {"worker": "w0", "pools": ["_default"]}

    worker: str
    pools: list[str]
    pinned_models: Texts = UNSET


class DeviceInfo(Struct, frozen=True):
    """A device of a worker that has several. `ready` is false while its adapter does not answer."""

    device: str
    ready: bool
    gpu: str
    memory_used_bytes: int
    memory_total_bytes: int
    queue_depth: int
    loaded_models: list[str]


class WorkerInfo(Struct, frozen=True):
    """A worker. `gpu` is its machine profile. `url` is null if the gateway knows the worker by its heartbeats.
    `reason`: why the worker is not healthy, if it is known. `devices`: the state of each device, if the worker has
    several; then `device` lists their names, and the memory figures are sums.
    """

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
    reason: str = ""
    devices: list[DeviceInfo] = []


class ModelSummary(Struct, frozen=True):
    """A model of the catalogue. `worker_count`: number of workers that have loaded it. `gpu_types`: machine profiles of
    the workers that report it. `total_queue_depth`: number of its work items on all workers.
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
    """Configuration and workers of a gateway. The status is `healthy` if at least one worker is healthy."""

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
                "device": "cuda:0",
                "devices": [],
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
    """Load of a lane (pool, machine profile and bundle), and the number of workers that it needs."""

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


class Readiness(Struct, kw_only=True):
    """Answer to a readiness probe. Only a gateway has `healthy_workers`, and `plugins`: the packages that it could not
    load, each with the reason.
    """

    EXAMPLE: ClassVar[Any] = {"status": "ready", "healthy_workers": 1}

    status: Literal["ready", "not ready"]
    reason: Text = UNSET
    healthy_workers: Whole = UNSET
    plugins: dict[str, str] | UnsetType = UNSET
