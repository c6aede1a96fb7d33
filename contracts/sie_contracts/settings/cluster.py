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
    PASSWORD,
    PAYLOAD_STORE,
    PORT,
    SECRET,
    SECRETS,
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
        "SIE_NATS_URL",
        "gateway sidecar config",
        NATS,
        "Broker, as USER@HOST:PORT where it wants SIE_NATS_PASSWORD. Credentials in it are never shown.",
    )
    nats_password: Secret | None = row(
        None,
        "SIE_NATS_PASSWORD",
        "gateway sidecar config",
        PASSWORD,
        "Password of the user that SIE_NATS_URL names, character by character. One that stands in the URL itself, percent-encoded, comes first; without either, a lone name in the URL is a token.",
    )
    gateway_health_mode: str = row(
        "ws",
        "SIE_GATEWAY_HEALTH_MODE",
        "gateway",
        choice("ws", "nats"),
        "Where /health and /ws/cluster-status know workers from: nats, their heartbeats; ws, their own status sockets (SIE_GATEWAY_WORKERS, SIE_GATEWAY_KUBERNETES), a local diagnosis. Work is routed by heartbeats in both; `sie serve` and the chart say nats.",
    )
    gateway_configured_gpus: tuple[str, ...] | None = row(
        None,
        "SIE_GATEWAY_CONFIGURED_GPUS",
        "gateway",
        LIST,
        "Machine profiles that may be routed to, also when no worker of them is up.",
    )
    config_service_url: str | None = row(
        None,
        "SIE_CONFIG_SERVICE_URL",
        "gateway sidecar",
        HTTP,
        "Config service that gateway and sidecar read the catalogue from.",
    )
    payload_store_url: str | None = row(
        None,
        "SIE_PAYLOAD_STORE_URL",
        "gateway sidecar",
        PAYLOAD_STORE,
        "Store for inputs over the inline limit, shared by gateways and workers. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables. Unset: such inputs are refused.",
    )
    inline_payload_bytes: int | None = row(
        None,
        "SIE_INLINE_PAYLOAD_BYTES",
        "gateway",
        whole(1024),
        "Largest payload inside a queue message. Default and upper limit: the broker's max_payload less headers.",
    )
    payload_ttl_s: int | None = row(
        None,
        "SIE_PAYLOAD_TTL_S",
        "gateway",
        whole(1),
        "Life of an object in the payload store, seconds, above the age limit of the work stream. Default: that and an hour.",
    )
    admin_token: Secret | None = row(
        None,
        "SIE_ADMIN_TOKEN",
        "gateway config",
        SECRET,
        "Bearer token with every scope. Unset: admin operations are refused.",
    )
    config_read_token: Secret | None = row(
        None,
        "SIE_CONFIG_READ_TOKEN",
        "gateway sidecar config",
        SECRET,
        "Bearer token that reads the config epoch and export, and a worker's /ws/status; it never writes.",
    )
    auth_mode: str = row(
        "none",
        "SIE_AUTH_MODE",
        "gateway config",
        choice("none", "static", "token"),
        "Authentication of the gateway: none, static tokens, or keys kept hashed in the broker; of the config service: with token, keys beside the admin token.",
    )
    auth_token: Secret | None = row(
        None, "SIE_AUTH_TOKEN", "gateway", SECRET, "One accepted bearer token, with scopes infer, read and pools."
    )
    auth_tokens: tuple[Secret, ...] | None = row(
        None, "SIE_AUTH_TOKENS", "gateway", SECRETS, "Several accepted bearer tokens, for rotation."
    )
    nats_config_trusted_producers: tuple[str, ...] = row(
        ("sie-config",),
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS",
        "gateway sidecar",
        LIST,
        "Producers whose config deltas are applied.",
    )
    gateway_workers: tuple[str, ...] | None = row(
        None,
        "SIE_GATEWAY_WORKERS",
        "gateway",
        LIST,
        "URLs of workers whose status sockets are watched with SIE_GATEWAY_HEALTH_MODE=ws; /ws/status shows the first, or ?worker=N. `sie serve` names its own. They are shown the SIE_CONFIG_READ_TOKEN.",
    )
    gateway_kubernetes: bool = row(
        False,
        "SIE_GATEWAY_KUBERNETES",
        "gateway",
        BOOL,
        "Find further such workers by the EndpointSlices of a service. The pod's service account needs list and watch on them.",
    )
    gateway_k8s_namespace: str = row(
        "default", "SIE_GATEWAY_K8S_NAMESPACE", "gateway", LABEL, "Namespace of endpoint discovery."
    )
    gateway_k8s_service: str = row(
        "sie-worker", "SIE_GATEWAY_K8S_SERVICE", "gateway", LABEL, "Service of endpoint discovery."
    )
    gateway_k8s_port: int = row(
        8080,
        "SIE_GATEWAY_K8S_PORT",
        "gateway",
        whole(1, 65535),
        "Worker port of endpoint discovery: the workers' SIE_WORKER_METRICS_PORT.",
    )
    gateway_api_metrics: bool = row(
        False,
        "SIE_GATEWAY_API_METRICS",
        "gateway",
        BOOL,
        "Whether /metrics is also on the API port, for tokens with the scope metrics. `sie serve` turns it on.",
    )
    gateway_metrics_port: int = row(
        9090,
        "SIE_GATEWAY_METRICS_PORT",
        "gateway",
        PORT,
        "Port of /metrics and the probes, never behind a token. 0 picks a free one, as `sie serve` does unless it is told another.",
    )
    gateway_request_timeout: float = row(
        120.0,
        "SIE_GATEWAY_REQUEST_TIMEOUT",
        "gateway",
        number(0, 600, open_low=True),
        "Budget of a request, seconds; a smaller X-SIE-Timeout-Ms wins.",
    )
    load_hold_s: float = row(
        20.0,
        "SIE_LOAD_HOLD_S",
        "gateway",
        number(0, 29.999),
        "How long a request waits for a cold model or lane, seconds.",
    )
    allowed_hosts: tuple[str, ...] | None = row(
        None,
        "SIE_ALLOWED_HOSTS",
        "gateway sidecar config",
        HOSTS,
        "Names that a request may have in Host beside the addresses and local names of the server itself, and whose pages may call it from a browser. `*` is any. Unset: on loopback the names of loopback and of this machine, elsewhere any.",
    )
    root_path: str | None = row(
        None,
        "SIE_ROOT_PATH",
        "gateway",
        pattern("a path that starts with / and does not end with it", r"(/[A-Za-z0-9._~-]+)+"),
        "Prefix under which a reverse proxy serves the gateway.",
    )
    default_models: tuple[tuple[str, str], ...] | None = row(
        None,
        "SIE_DEFAULT_MODELS",
        "gateway",
        DEFAULT_MODELS,
        "Models of requests that name none, by what they ask for.",
    )
    pool_write_role: str = row(
        "user",
        "SIE_POOL_WRITE_ROLE",
        "gateway",
        choice("user", "admin"),
        "Who makes, renews and deletes reservations: user, whoever has the scope pools; admin, only who has the scope admin.",
    )
    stream_storage: str = row(
        "file",
        "SIE_STREAM_STORAGE",
        "gateway config",
        choice("memory", "file"),
        "Storage of the work streams, and of the catalogue. memory is lost with the broker; file survives its restart.",
    )
    stream_replicas: int = row(
        1,
        "SIE_STREAM_REPLICAS",
        "gateway config",
        whole(1, 5),
        "Copies of each work stream and of the catalogue, at most the number of brokers.",
    )
    queue_max_bytes: int = row(
        1 << 30,
        "SIE_QUEUE_MAX_BYTES",
        "gateway",
        whole(1 << 20),
        "Most bytes in one pool's work stream; beyond it the newest work is refused.",
    )
