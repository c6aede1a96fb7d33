"""Settings of the cluster: broker, tokens, gateway, streams."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import (
    BOOL,
    DEFAULT_MODELS,
    HOSTS,
    HTTP,
    LABEL,
    LIST,
    NATS,
    ORIGINS,
    PASSWORD,
    PAYLOAD_STORE,
    PORT,
    SECRET,
    SECRETS,
    WORKERS,
    Secret,
    choice,
    number,
    pattern,
    whole,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterSettings:
    nats_url: str | None = row(
        None,
        "gateway sidecar config",
        NATS,
        "Address of the broker, with a user name (USER@HOST:PORT) if SIE_NATS_PASSWORD is set. Credentials in the address are never shown.",
    )
    nats_password: Secret | None = row(
        None,
        "gateway sidecar config",
        PASSWORD,
        "Password of the user that SIE_NATS_URL names, without any encoding. A percent-encoded password in the URL takes precedence. If there is no password at all, a name in the URL is used as a token.",
    )
    nats_streams_password: Secret | None = row(
        None,
        "config",
        PASSWORD,
        "Password of the broker's user `streams`, with which the config service creates the streams and buckets of all processes. Unset: each process creates those that it needs, which a broker with separate users refuses.",
    )
    gateway_health_mode: str = row(
        "ws",
        "gateway",
        choice("ws", "nats"),
        "Source of the workers in /health and /ws/cluster-status. nats: their heartbeats. ws: their status websockets (SIE_GATEWAY_WORKERS, SIE_GATEWAY_KUBERNETES), for local diagnosis. Work is routed by heartbeats in both cases. `sie serve` and the chart set nats.",
    )
    gateway_configured_gpus: tuple[str, ...] | None = row(
        None,
        "gateway",
        LIST,
        "Machine profiles that requests may be routed to, even while they have no workers. A request that names no profile goes to one where a worker has the model loaded, else to one with a worker of the bundle. Of several such profiles, the first in the list is used.",
    )
    config_service_url: str | None = row(
        None,
        "gateway sidecar",
        HTTP,
        "Address of the config service, from which gateway and sidecar read the catalogue.",
    )
    payload_store_url: str | None = row(
        None,
        "gateway sidecar",
        PAYLOAD_STORE,
        "Store that gateways and workers share, for files and for inputs that are too large for a queue message. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables. Unset: files and such inputs are refused.",
    )
    inline_payload_bytes: int | None = row(
        None,
        "gateway",
        whole(1024),
        "Maximum size of a payload in a queue message, bytes. Default and upper limit: the broker's max_payload less headers.",
    )
    payload_ttl_s: int | None = row(
        None,
        "gateway",
        whole(1),
        "Lifetime of an object in the payload store, seconds. It must be longer than the age limit of the work stream. Default: that limit plus an hour.",
    )
    admin_token: Secret | None = row(
        None, "gateway config", SECRET, "Bearer token with all scopes. Unset: operations of administrators are refused."
    )
    config_read_token: Secret | None = row(
        None,
        "gateway sidecar config",
        SECRET,
        "Bearer token that may only read: the catalogue at the config service, the pools to which workers are assigned and its own scopes at a gateway, and /ws/status of a worker.",
    )
    auth_mode: str = row(
        "none",
        "gateway config",
        choice("none", "static", "token"),
        "Authentication. none: a gateway requires no token. static: it accepts the tokens of SIE_AUTH_TOKEN and SIE_AUTH_TOKENS. token: it accepts API keys, which the broker stores hashed. The config service accepts the admin token, and in the mode token also API keys.",
    )
    auth_token: Secret | None = row(
        None, "gateway", SECRET, "An accepted bearer token, with the scopes infer, read and pools."
    )
    auth_tokens: tuple[Secret, ...] | None = row(
        None, "gateway", SECRETS, "Several accepted bearer tokens, for rotation."
    )
    nats_config_trusted_producers: tuple[str, ...] = row(
        ("sie-config",),
        "gateway sidecar",
        LIST,
        "Names of the senders whose messages about changes of the catalogue are applied.",
    )
    gateway_workers: tuple[str, ...] | None = row(
        None,
        "gateway",
        WORKERS,
        "URLs of workers. With SIE_GATEWAY_HEALTH_MODE=ws the gateway watches their status websockets, to which it sends the SIE_CONFIG_READ_TOKEN. /ws/status shows the first worker of the list; /ws/status?worker=N shows another one. `sie serve` sets its own workers.",
    )
    gateway_kubernetes: bool = row(
        False,
        "gateway",
        BOOL,
        "Whether the gateway finds further workers to watch in the EndpointSlices of a Kubernetes service. The pod's service account needs list and watch on EndpointSlices.",
    )
    gateway_k8s_namespace: str = row(
        "default", "gateway", LABEL, "Namespace of the service whose EndpointSlices are watched."
    )
    gateway_k8s_service: str = row(
        "sie-worker", "gateway", LABEL, "Name of the service whose EndpointSlices are watched."
    )
    gateway_k8s_port: int = row(
        8080,
        "gateway",
        whole(1, 65535),
        "Port of the workers that are found by EndpointSlices: their SIE_WORKER_METRICS_PORT.",
    )
    gateway_api_metrics: bool = row(
        False,
        "gateway",
        BOOL,
        "Whether /metrics is also on the API port, for tokens with the scope metrics. `sie serve` turns it on.",
    )
    gateway_metrics_port: int = row(
        9090,
        "gateway",
        PORT,
        "Port of /metrics and the probes, which need no token. 0 chooses a free port; so does `sie serve` if no port is given.",
    )
    gateway_request_timeout: float = row(
        120.0,
        "gateway",
        number(0, 600, open_low=True),
        "Time budget of a request, seconds. A smaller value in the header X-SIE-Timeout-Ms takes precedence.",
    )
    max_body_bytes: int = row(
        96 << 20,
        "gateway",
        whole(1 << 20, 256 << 20),
        "Maximum size of the body of an inference request, bytes. The default has room for a document of 64 MiB as base64. A smaller limit of an API key takes precedence.",
    )
    body_memory_bytes: int | None = row(
        None,
        "gateway",
        whole(1 << 20),
        "Memory that the bodies of all inference requests of a gateway may take, bytes. A body counts as three times its size, plus 80 bytes for each value in it. Beyond this limit, large bodies are refused with 503. Default: half of the container's memory limit, at most 1 GiB.",
    )
    min_body_rate: int = row(
        4096,
        "gateway config",
        whole(0),
        "Minimum rate, bytes per second, at which a client must send the body of a request (measured over 15 s) and read the response (over 60 s). A slower client is disconnected. 0: any rate.",
    )
    load_hold_s: float = row(
        20.0,
        "gateway",
        number(0, 29.999),
        "How long a request waits for a model that is not loaded, or for a lane without workers, seconds.",
    )
    allowed_hosts: tuple[str, ...] | None = row(
        None,
        "gateway sidecar config",
        HOSTS,
        "Names that a request may have in Host, in addition to the addresses and local names of the server itself. Web pages of these names may call the server from a browser. `*` allows any name. Unset: a server that listens on loopback accepts the names of loopback and of its machine; any other server accepts every name.",
    )
    cors_origins: tuple[str, ...] | None = row(
        None,
        "gateway",
        ORIGINS,
        "Origins whose web pages may call the API from a browser and read its answers (CORS), for example `https://search.example.com`. A page sends its key itself; cookies are not used. Unset: none but the pages of the gateway itself.",
    )
    root_path: str | None = row(
        None,
        "gateway",
        pattern("a path that starts with / and does not end with it", r"(/[A-Za-z0-9._~-]+)+"),
        "Prefix under which a reverse proxy serves the gateway.",
    )
    default_models: tuple[tuple[str, str], ...] | None = row(
        None, "gateway", DEFAULT_MODELS, "Models for requests that name no model, one for each operation."
    )
    pool_write_role: str = row(
        "user",
        "gateway",
        choice("user", "admin"),
        "Who may create, renew and delete reservations. user: callers with the scope pools. admin: only callers with the scope admin.",
    )
    stream_storage: str = row(
        "file",
        "gateway config",
        choice("memory", "file"),
        "Storage of the work streams, of the catalogue and of most other records at the broker. memory is lost when the broker ends. file survives a restart of the broker.",
    )
    stream_replicas: int = row(
        1,
        "gateway config",
        whole(1, 5),
        "Number of copies of each stream and bucket at the broker, at most the number of brokers.",
    )
    queue_max_bytes: int = row(
        1 << 30,
        "gateway",
        whole(1 << 20),
        "Maximum size of the work stream of a pool, bytes. When it is full, new work is refused.",
    )
    cache_shared: bool = row(
        False,
        "gateway",
        BOOL,
        "Whether all keys share cached answers. If true, a key can find out that another key sent the same input. If false, a key gets only answers to its own inputs.",
    )
    cache_excluded_models: tuple[str, ...] | None = row(
        None, "gateway", LIST, "Ids of models whose answers are never cached."
    )
