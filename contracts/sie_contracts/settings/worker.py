"""Settings of a worker: its place, its sockets, its cadences, its memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, HTTP, LABEL, LIST, POOL, PORT, SOCKET, number, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class WorkerSettings:
    pool: str = row(
        "_default",
        "SIE_POOL",
        "sidecar gateway",
        POOL,
        "Pool of the worker, part of stream and subject names.",
    )
    bundle: str = row(
        "default",
        "SIE_BUNDLE",
        "sidecar adapter",
        LABEL,
        "Bundle that this worker serves. An adapter that lacks what the bundle says is installed does not start.",
    )
    ipc_socket_path: str = row(
        "/tmp/sie-ipc.sock",  # noqa: S108
        "SIE_IPC_SOCKET_PATH",
        "sidecar adapter",
        SOCKET,
        "Socket between sidecar and adapter, mode 0600.",
    )
    max_concurrent_batches: int = row(
        4,
        "SIE_MAX_CONCURRENT_BATCHES",
        "sidecar",
        whole(1, 64),
        "Batches that the sidecar may have at the adapter, of all models together. Lanes of the device and SIE_RUST_PIPELINE_DEPTH may bound them further.",
    )
    ipc_pool_size: int | None = row(
        None,
        "SIE_IPC_POOL_SIZE",
        "sidecar",
        whole(1),
        "Connections to the adapter for batches; one more carries control. Default: SIE_MAX_CONCURRENT_BATCHES, where that is more than 6 at most what the lanes of the device need.",
    )
    worker_metrics_port: int = row(
        9095,
        "SIE_WORKER_METRICS_PORT",
        "sidecar",
        PORT,
        "Port of the sidecar's /metrics, /healthz and /readyz. 0 picks a free one, as `sie serve` does unless it is told another.",
    )
    worker_id: str | None = row(
        None,
        "SIE_WORKER_ID",
        "sidecar",
        LABEL,
        "Stable id in logs, results and health. Default: the pod's host name, else a UUID.",
    )
    machine_profile: str | None = row(
        None,
        "SIE_MACHINE_PROFILE",
        "sidecar gateway",
        LABEL,
        "Kind of node, for routing, and the key of measured defaults. Default: SIE_GPU_TYPE, else SIE_POOL.",
    )
    gpu_count: int = row(1, "SIE_GPU_COUNT", "sidecar", whole(0), "GPUs advertised in health.")
    gateway_url: str | None = row(
        None,
        "SIE_GATEWAY_URL",
        "sidecar",
        HTTP,
        "Gateway asked which pool to serve; several with commas between, each asked where the one before does not answer.",
    )
    pool_admission_enabled: bool = row(
        True, "SIE_POOL_ADMISSION_ENABLED", "sidecar", BOOL, "Ask for pool assignments before pulling."
    )
    worker_ping_interval_ms: int = row(
        2000, "SIE_WORKER_PING_INTERVAL_MS", "sidecar", whole(100), "Cadence of the adapter ping, milliseconds."
    )
    worker_readyz_stale_mult: float = row(
        3.0,
        "SIE_WORKER_READYZ_STALE_MULT",
        "sidecar",
        number(1),
        "Ping intervals without success before /readyz fails.",
    )
    worker_config_poll_interval_ms: int = row(
        30000, "SIE_WORKER_CONFIG_POLL_INTERVAL_MS", "sidecar", whole(1000), "Poll of the config epoch, milliseconds."
    )
    worker_config_full_export_interval_ms: int = row(
        300000,
        "SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS",
        "sidecar",
        whole(0),
        "Reconciliation from a full export, milliseconds; 0 only at start.",
    )
    health_publish_interval_ms: int = row(
        5000, "SIE_HEALTH_PUBLISH_INTERVAL_MS", "sidecar", whole(100), "Interval of health messages, milliseconds."
    )
    heartbeat_timeout_ms: int = row(
        15000,
        "SIE_HEARTBEAT_TIMEOUT_MS",
        "gateway sidecar",
        whole(1),
        "Silence after which a worker no longer counts, milliseconds.",
    )
    ack_wait_s: int = row(
        10,
        "SIE_ACK_WAIT_S",
        "gateway sidecar",
        whole(3),
        "Time without a lease renewal after which work goes to another worker, seconds; renewed every third of it.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class MemorySettings:
    memory_pressure_threshold_percent: float = row(
        85.0,
        "SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT",
        "adapter",
        number(1, 99),
        "Device memory use above which the least recently used idle model is unloaded.",
    )
    disk_cache_enabled: bool = row(
        True,
        "SIE_DISK_CACHE_ENABLED",
        "adapter",
        BOOL,
        "Before a download and every 30 s, remove weights from a disk above the threshold by last use; only what SIE put there and nobody uses.",
    )
    disk_pressure_threshold_percent: float = row(
        85.0,
        "SIE_DISK_PRESSURE_THRESHOLD_PERCENT",
        "adapter",
        number(1, 99),
        "Disk use above which cached weights that nobody uses are removed.",
    )
    disk_cache_bytes: int | None = row(
        None,
        "SIE_DISK_CACHE_BYTES",
        "adapter",
        whole(1 << 20),
        "What all weights below SIE_LOCAL_CACHE may take, where the disk would let them take more: the size limit of a volume. Default: the disk.",
    )
    idle_evict_s: int | None = row(
        None, "SIE_IDLE_EVICT_S", "sidecar", whole(1), "Unload models idle for this long, seconds."
    )
    preload_models: tuple[str, ...] | None = row(
        None,
        "SIE_PRELOAD_MODELS",
        "sidecar",
        LIST,
        "Models loaded before the worker is ready. An unknown name is a start error.",
    )
