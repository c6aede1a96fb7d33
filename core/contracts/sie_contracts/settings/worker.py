"""Settings of a worker: pool and machine profile, sockets, intervals, memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, HTTP, LABEL, LIST, POOL, PORT, SOCKET, number, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class WorkerSettings:
    pool: str = row(
        "_default",
        "sidecar gateway config",
        POOL,
        "Pool of the worker. At a gateway: the pool of requests that name none. At the config service: the pool of the installation, whose streams it makes. It is a part of the names of streams and subjects.",
    )
    bundle: str = row(
        "default",
        "sidecar adapter",
        LABEL,
        "Bundle that this worker serves. An adapter without a package that the bundle requires does not start.",
    )
    ipc_socket_path: str = row(
        "/tmp/sie-ipc.sock",  # noqa: S108
        "sidecar adapter",
        SOCKET,
        "Path of the Unix socket between sidecar and adapter, mode 0600. With several devices it is the socket of the first device; the paths of the others have .1, .2 and so on appended.",
    )
    max_concurrent_batches: int = row(
        4,
        "sidecar",
        whole(1, 64),
        "Maximum number of batches that the sidecar has at the adapter of each device, of all models together. The number of device threads and SIE_RUST_PIPELINE_DEPTH may allow fewer.",
    )
    ipc_pool_size: int | None = row(
        None,
        "sidecar",
        whole(1),
        "Number of connections to the adapter of each device for batches; one more carries control messages. Default: the number of batches that can run or wait at the adapter, at least 6, but at most SIE_MAX_CONCURRENT_BATCHES.",
    )
    worker_metrics_port: int = row(
        9095,
        "sidecar",
        PORT,
        "Port of the sidecar's /metrics, /healthz and /readyz. 0 chooses a free port; so does `sie serve` if no port is given.",
    )
    worker_id: str | None = row(
        None,
        "sidecar adapter",
        LABEL,
        "Stable id of the worker in logs, results and health; it must be the same for its sidecar and its adapter. Default: the host name (in Kubernetes, the name of the pod), or a UUID if the host name is localhost.",
    )
    machine_profile: str | None = row(
        None,
        "sidecar gateway",
        LABEL,
        "Kind of machine on which the worker runs. Requests are routed by it. It selects defaults that were measured on such machines. Default: SIE_GPU_TYPE, else SIE_POOL. At a gateway: the profile of requests for the bundle `default` that name no profile, if SIE_GATEWAY_CONFIGURED_GPUS lists it and the model's entry has no list of profiles.",
    )
    gpu_count: int = row(
        1,
        "sidecar",
        whole(0),
        "Number of GPUs that the worker reports in its heartbeats. A worker on a CPU reports 0; a worker with several devices reports their number.",
    )
    gateway_url: str | None = row(
        None,
        "sidecar",
        HTTP,
        "Gateway that the worker asks which pool to serve. Several URLs are separated by commas: if a gateway does not answer, the worker asks the next one.",
    )
    pool_admission_enabled: bool = row(
        True, "sidecar", BOOL, "Whether the worker asks which pool to serve before it pulls work."
    )
    worker_ping_interval_ms: int = row(
        2000, "sidecar", whole(100), "Interval of the pings to the adapter, milliseconds."
    )
    worker_readyz_stale_mult: float = row(
        3.0, "sidecar", number(1), "Number of ping intervals without an answer after which /readyz fails."
    )
    worker_config_poll_interval_ms: int = row(
        30000,
        "sidecar",
        whole(1000),
        "Interval at which the worker asks whether the catalogue has changed, milliseconds.",
    )
    worker_config_full_export_interval_ms: int = row(
        300000,
        "sidecar",
        whole(0),
        "Interval at which the worker reads the whole catalogue, milliseconds. 0: only at start, and after it has missed changes.",
    )
    health_publish_interval_ms: int = row(5000, "sidecar", whole(100), "Interval of heartbeats, milliseconds.")
    heartbeat_timeout_ms: int = row(
        15000,
        "gateway sidecar",
        whole(1),
        "Time without a heartbeat after which a worker counts as gone, milliseconds.",
    )
    ack_wait_s: int = row(
        10,
        "gateway sidecar",
        whole(3),
        "Time after which work whose lease was not renewed is delivered to another worker, seconds. Workers renew their leases after every third of this time.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class MemorySettings:
    memory_pressure_threshold_percent: float = row(
        85.0, "adapter", number(0, 100), "Use of device memory, percent, above which idle models are evicted."
    )
    disk_cache_enabled: bool = row(
        True,
        "adapter",
        BOOL,
        "Whether weights are removed while the disk is above SIE_DISK_PRESSURE_THRESHOLD_PERCENT, the least recently used first. The disk is checked before a download and every 30 s. Only weights that SIE downloaded and that no process uses are removed, after the files that SIE computed from weights. If false, only these files are removed, for a download for which the disk has no room.",
    )
    disk_pressure_threshold_percent: float = row(
        85.0,
        "adapter",
        number(0, 100),
        "Fill level of the disk, percent. Above it, the adapter removes files that it computed from weights, then cached weights that no process uses.",
    )
    disk_cache_bytes: int | None = row(
        None,
        "adapter",
        whole(1 << 20),
        "Maximum size of all files below SIE_LOCAL_CACHE, bytes, for example the size limit of a volume. Default: the size of the disk.",
    )
    idle_evict_s: int | None = row(
        None,
        "sidecar",
        whole(1),
        "Time without work after which a model is evicted, seconds. Unset: never for this reason.",
    )
    preload_models: tuple[str, ...] | None = row(
        None, "sidecar", LIST, "Models that are loaded before the worker is ready. An unknown name is a start error."
    )
