"""Every setting of every process, once: name, type, bounds, default, meaning, readers. Nothing else in SIE reads the
environment.

    flag > environment > machine-profile default > documented default

`load` is called once per process. A bad value raises SettingError, which names the variable and ends the process with
status 2; nothing is ever written back to the environment. One setting is one field, one flag (`SIE_MAX_BATCH_COST` is
`--max-batch-cost`), one variable.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from sie_contracts.topology import pool_name

Mode = Literal["queue", "standalone"]
COMPONENTS = ("gateway", "config", "sidecar", "adapter")


class SettingError(Exception):
    """A variable holds what it must not. `name` is the variable; the message never repeats a secret."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Secret:
    """A string that does not print. Compare with `matches`, which takes the same time for every wrong value of a
    length.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def matches(self, candidate: str) -> bool:
        return hmac.compare_digest(self._value.encode(), candidate.encode())

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._value)

    def __hash__(self) -> int:
        return hash(self._value)


Parse = Callable[[str], Any]


@dataclass(frozen=True)
class Row:
    """What is known of one setting. `expected` completes "expected ..."; `waits_for` names the capability that will
    read it.
    """

    name: str
    field: str
    default: Any
    components: tuple[str, ...]
    expected: str
    parse: Parse
    meaning: str
    mode: Mode | None = None
    secret: bool = False
    waits_for: str = ""
    heading: str = ""  # under which documents and --help show it

    @property
    def is_standard(self) -> bool:
        """Whether OpenTelemetry defines the variable: a value of it that means nothing here is ignored with a warning,
        as its specification says, since what sets it for many programs does not know this one.
        """
        return self.name.startswith("OTEL_")

    @property
    def flag(self) -> str:
        return "--" + self.name.removeprefix("SIE_").lower().replace("_", "-")

    def read(self, raw: str) -> Any:
        """The value of a flag or variable. Empty means unset where unset is the default, and is an error elsewhere."""
        text = raw.strip()
        if not text and self.default is None:
            return None
        if self.parse is _password:
            text = raw
        try:
            return self.parse(text)
        except ValueError as error:
            hidden = self.secret or "@" in text  # a URL may hold a password, and the parser's own message a part of it
            got = "***" if hidden else repr(text[:100])
            detail = f" ({error})" if str(error) and not hidden else ""
            raise SettingError(self.name, f"got {got}, expected {self.expected}{detail}") from error


def _row(
    default: Any,
    name: str,
    components: str,
    kind: tuple[str, Parse],
    meaning: str,
    *,
    mode: Mode | None = None,
    waits_for: str = "",
    heading: str = "",
) -> Any:
    """A field of Settings. `heading` opens a group: the fields after it, up to the next heading, belong to it."""
    expected, parse = kind
    readers = COMPONENTS if components == "all" else tuple(components.split())
    is_secret = parse in (_secret, _secrets, _password)
    meta = Row(name, "", default, readers, expected, parse, meaning, mode, is_secret, waits_for, heading)
    return dataclasses.field(default=default, metadata={"row": meta})


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError


def _whole(low: int, high: int | None = None) -> tuple[str, Parse]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError
        value = int(text)
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    return (f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"), parse


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> tuple[str, Parse]:
    def parse(text: str) -> float:
        value = float(text)
        if math.isnan(value) or value < low or value > high or (open_low and value == low) or math.isinf(value):
            raise ValueError
        return value

    bound = f"{'above' if open_low else 'of at least'} {low:g}"
    return f"a number {bound}" + ("" if math.isinf(high) else f" and at most {high:g}"), parse


def _choice(*values: str) -> tuple[str, Parse]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    return "one of " + ", ".join(values), parse


def _choices(*values: str) -> tuple[str, Parse]:
    def parse(text: str) -> tuple[str, ...]:
        found = _list_of(text.lower())
        if not set(found) <= set(values):
            raise ValueError
        return found

    return "a comma-separated list of " + ", ".join(values), parse


def _pattern(expected: str, pattern: str, *, lower: bool = False) -> tuple[str, Parse]:
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        value = text.lower() if lower else text
        if not compiled.fullmatch(value):
            raise ValueError
        return value

    return expected, parse


def _list_of(text: str) -> tuple[str, ...]:
    values = tuple(part.strip() for part in text.split(",") if part.strip())
    if not values:
        raise ValueError
    return values


_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?", re.IGNORECASE)


def _hosts(text: str) -> tuple[str, ...]:
    found = _list_of(text)
    if not all(_HOST.fullmatch(host) for host in found):
        raise ValueError
    return found


def _secret(text: str) -> Secret:
    if not text:
        raise ValueError
    return Secret(text)


def _password(text: str) -> Secret:
    """As it is, with the spaces around it: who compares it does not know that they mean nothing."""
    return Secret(text)


def _secrets(text: str) -> tuple[Secret, ...]:
    return tuple(Secret(part) for part in _list_of(text))


def _url(*schemes: str) -> tuple[str, Parse]:
    def parse(text: str) -> str:
        for part in text.split(","):
            pieces = urlsplit(part.strip())
            if pieces.scheme not in schemes or not pieces.netloc:
                raise ValueError
            _ = pieces.port  # raises ValueError out of range
        return text

    return "a URL of the form " + " or ".join(f"{scheme}://..." for scheme in schemes), parse


@dataclass(frozen=True)
class StoreUrl:
    """Where objects are kept: `scheme` s3 or gs with bucket and prefix, or file with an absolute path and no bucket."""

    scheme: Literal["s3", "gs", "file"]
    bucket: str
    path: str


def store_url(text: str) -> StoreUrl:
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `file:///path` or a path. Raises ValueError."""
    pieces = urlsplit(text)
    if not pieces.scheme and text.strip():
        return StoreUrl("file", "", os.path.abspath(text))
    if pieces.query or pieces.fragment:
        raise ValueError("neither a query nor a fragment")
    if pieces.scheme == "file" and pieces.netloc in ("", "localhost") and pieces.path.strip("/"):
        return StoreUrl("file", "", os.path.abspath(unquote(pieces.path)))
    if pieces.scheme in ("s3", "gs") and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", pieces.netloc):
        return StoreUrl("s3" if pieces.scheme == "s3" else "gs", pieces.netloc, unquote(pieces.path).strip("/"))
    raise ValueError


def _store(*, file_urls: bool = True, paths: bool = True) -> Parse:
    def parse(text: str) -> str:
        if store_url(text).scheme == "file" and not (file_urls if text.startswith("file:") else paths):
            raise ValueError
        return text

    return parse


def _socket_path(text: str) -> str:
    if not text.startswith("/") or len(text.encode()) > 100:
        raise ValueError
    return text


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    allowed = ("embed", "embed_sparse", "embed_all", "rerank", "predict")
    pairs = []
    for part in _list_of(text):
        operation, equals, model = part.partition("=")
        if not equals or operation not in allowed or not model:
            raise ValueError
        pairs.append((operation, model))
    return tuple(pairs)


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _collector(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]+:\d{1,5}", text) else str(HTTP[1](text))


BOOL = ("true or false", _boolean)
TEXT = ("some text", _text)
LIST = ("a comma-separated list", _list_of)
SECRET = ("a secret", _secret)
SECRETS = ("a comma-separated list of secrets", _secrets)
PASSWORD = ("a password", _password)
PATH = ("a path", _text)
PORT = _whole(0, 65535)
HTTP = _url("http", "https")
COLLECTOR = "a URL of the form http://... or https://..., or host:port", _collector
PROTOCOL = _choice("grpc", "http/protobuf")
LABEL = _pattern("a label of letters, digits, ., _ and -", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|_default", lower=True)
DEVICE = _pattern("auto, cuda, cuda:N, mps or cpu", r"auto|cpu|mps|cuda(:\d+)?", lower=True)
STORE = "s3://bucket/prefix, gs://bucket/prefix or a path", _store(file_urls=False)
CLUSTER_STORE = "s3://bucket/prefix or gs://bucket/prefix", _store(file_urls=False, paths=False)
PAYLOAD_STORE = "s3://bucket/prefix, gs://bucket/prefix, file:///path or a path", _store()


def _pool(text: str) -> str:
    return pool_name(text)


@dataclass(frozen=True)
class Tracing:
    """What spans are made from, and where they go. `exporters` of otlp and console; `protocol` and `endpoint` are those
    of otlp; `rate` is that of the sampler traceidratio; `propagates`: whether a client's trace context is taken up.
    """

    enabled: bool
    service_name: str
    exporters: tuple[str, ...]
    protocol: str
    endpoint: str
    sampler: str
    rate: float
    propagates: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """The settings of one process, read once. Field order is the order in which they are shown. Neither `repr` nor
    `str` holds a secret.
    """

    device: str = _row(
        "auto",
        "SIE_DEVICE",
        "adapter",
        DEVICE,
        "Device of all forward passes; auto takes CUDA, then MPS, then CPU. A named device that is absent is a start error.",
        heading="Device and models",
    )
    models_dir: str | None = _row(
        None,
        "SIE_MODELS_DIR",
        "config adapter",
        STORE,
        "Folder or bucket of model files laid over the packaged catalogue; a folder also of LoRAs that requests may name by path; ./models is used when it exists. One that is named and missing is a start error.",
    )
    allow_remote_code: bool = _row(
        False,
        "SIE_ALLOW_REMOTE_CODE",
        "config adapter",
        BOOL,
        "Whether entries written over HTTP may make workers run code, or use what is installed: load.trust_remote_code, weights.package, families of other distributions. What SIE_MODELS_DIR and the package say may always.",
    )
    model_paths: tuple[str, ...] | None = _row(
        None,
        "SIE_MODEL_PATHS",
        "config adapter",
        LIST,
        "Folders, with commas between, that entries written over HTTP may name (weights.path, run.lora, golden), beside the models folder. A models folder of another user or open to all is accepted if it is named here.",
    )
    model_filter: tuple[str, ...] | None = _row(
        None, "SIE_MODEL_FILTER", "config", LIST, "Only these models are available. An unknown name is a start error."
    )
    gpu_type: str | None = _row(
        None,
        "SIE_GPU_TYPE",
        "sidecar gateway",
        LABEL,
        "Overrides the detected type of the GPU, by which requests may be routed; it is the machine profile where SIE_MACHINE_PROFILE is unset.",
    )
    local_cache: str | None = _row(
        None,
        "SIE_LOCAL_CACHE",
        "adapter",
        PATH,
        "First place looked up for weights, and where downloads land. Default: HF_HOME.",
        heading="Weights",
    )
    cluster_cache: str | None = _row(
        None,
        "SIE_CLUSTER_CACHE",
        "adapter",
        CLUSTER_STORE,
        "Shared weights, second in order after the local cache; `sie weights push` fills it. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables.",
    )
    hf_fallback: bool = _row(
        True, "SIE_HF_FALLBACK", "adapter", BOOL, "Whether a miss in the caches may download from the Hugging Face Hub."
    )
    hf_home: str = _row(
        "~/.cache/huggingface",
        "HF_HOME",
        "adapter",
        PATH,
        "Hugging Face's own variable, read only: default of SIE_LOCAL_CACHE.",
    )
    max_batch_requests: int = _row(
        64,
        "SIE_MAX_BATCH_REQUESTS",
        "sidecar",
        _whole(1),
        "Most requests per batch. In queue mode SIE_BATCHER_MAX_BATCH_REQUESTS applies.",
        mode="standalone",
        heading="Batching",
    )
    max_batch_wait_ms: int = _row(
        10,
        "SIE_MAX_BATCH_WAIT_MS",
        "sidecar",
        _whole(0),
        "Longest wait for a batch to fill, milliseconds. In queue mode SIE_BATCHER_COALESCE_MS applies.",
        mode="standalone",
    )
    max_batch_cost: int = _row(
        16384,
        "SIE_MAX_BATCH_COST",
        "sidecar",
        _whole(1),
        "Cost budget per batch; the cost of a text is its token count after truncation. One item over the budget runs alone.",
    )
    max_concurrent_requests: int = _row(
        512,
        "SIE_MAX_CONCURRENT_REQUESTS",
        "gateway",
        _whole(1),
        "Requests in progress per gateway process; beyond it 503 QUEUE_FULL.",
    )
    max_items_per_request: int = _row(
        2048, "SIE_MAX_ITEMS_PER_REQUEST", "gateway", _whole(1), "Inputs per request, on every API."
    )
    rust_pipeline_depth: int = _row(
        2,
        "SIE_RUST_PIPELINE_DEPTH",
        "sidecar",
        _whole(1, 8),
        "Batches sent ahead to the adapter, per inference lane: one runs, the rest are ready. The name is historical.",
    )
    batcher_coalesce_ms: int = _row(
        5,
        "SIE_BATCHER_COALESCE_MS",
        "sidecar",
        _whole(0),
        "How long a batch may wait for more of its kind, milliseconds.",
        mode="queue",
    )
    batcher_max_batch_requests: int = _row(
        12,
        "SIE_BATCHER_MAX_BATCH_REQUESTS",
        "sidecar",
        _whole(1),
        "Work items (queue messages) per batch; a chunk of many texts is one.",
        mode="queue",
    )
    adaptive_min_quantum_ms: int = _row(
        2,
        "SIE_ADAPTIVE_MIN_QUANTUM_MS",
        "sidecar",
        _whole(0),
        "Shortest gathering of deliveries before they are tokenised together, milliseconds.",
    )
    adaptive_max_quantum_ms: int = _row(
        15, "SIE_ADAPTIVE_MAX_QUANTUM_MS", "sidecar", _whole(0), "Longest gathering of deliveries, milliseconds."
    )
    adaptive_target_p50_ms: float = _row(
        50.0,
        "SIE_ADAPTIVE_TARGET_P50_MS",
        "sidecar",
        _number(0, open_low=True),
        "Median latency that the gathering steers toward, milliseconds.",
    )
    chunk_cost: int = _row(
        4096,
        "SIE_CHUNK_COST",
        "gateway",
        _whole(1),
        "Tokens per queue message: a request is split by cost into messages of about this size.",
    )
    bulk_max_overtakes: int = _row(
        4,
        "SIE_BULK_MAX_OVERTAKES",
        "sidecar",
        _whole(0),
        "How often interactive batches may overtake the oldest bulk batch.",
    )
    key_window_tokens: int = _row(
        65536, "SIE_KEY_WINDOW_TOKENS", "gateway", _whole(1), "Tokens in the queue per key, lane and priority."
    )
    adopt_after_ms: int = _row(
        2000,
        "SIE_ADOPT_AFTER_MS",
        "gateway",
        _whole(0),
        "Age of a model's oldest item past which it gets one more host.",
    )
    swap_after_ms: int = _row(
        1000,
        "SIE_SWAP_AFTER_MS",
        "sidecar",
        _whole(0),
        "Age of the oldest item of an absent model from which a worker swaps to it. The model that goes has been there for as long, and for as long as its load took, of which 5 s count.",
    )
    nats_url: str | None = _row(
        None,
        "SIE_NATS_URL",
        "gateway sidecar config",
        _url("nats", "tls"),
        "Broker, as USER@HOST:PORT where it wants SIE_NATS_PASSWORD. Credentials in it are never shown.",
        heading="Cluster",
    )
    nats_password: Secret | None = _row(
        None,
        "SIE_NATS_PASSWORD",
        "gateway sidecar config",
        PASSWORD,
        "Password of the user that SIE_NATS_URL names, character by character. One that stands in the URL itself, percent-encoded, comes first; without either, a lone name in the URL is a token.",
    )
    gateway_health_mode: str = _row(
        "ws",
        "SIE_GATEWAY_HEALTH_MODE",
        "gateway",
        _choice("ws", "nats"),
        "Where /health and /ws/cluster-status know workers from: nats, their heartbeats; ws, their own status sockets (SIE_GATEWAY_WORKERS, SIE_GATEWAY_KUBERNETES), a local diagnosis. Work is routed by heartbeats in both; `sie serve` and the chart say nats.",
    )
    gateway_configured_gpus: tuple[str, ...] | None = _row(
        None,
        "SIE_GATEWAY_CONFIGURED_GPUS",
        "gateway",
        LIST,
        "Machine profiles that may be routed to, also when no worker of them is up.",
    )
    config_service_url: str | None = _row(
        None,
        "SIE_CONFIG_SERVICE_URL",
        "gateway sidecar",
        HTTP,
        "Config service that gateway and sidecar read the catalogue from.",
    )
    payload_store_url: str | None = _row(
        None,
        "SIE_PAYLOAD_STORE_URL",
        "gateway sidecar",
        PAYLOAD_STORE,
        "Store for inputs over the inline limit, shared by gateways and workers. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables. Unset: such inputs are refused.",
    )
    inline_payload_bytes: int | None = _row(
        None,
        "SIE_INLINE_PAYLOAD_BYTES",
        "gateway",
        _whole(1024),
        "Largest payload inside a queue message. Default and upper limit: the broker's max_payload less headers.",
    )
    payload_ttl_s: int | None = _row(
        None,
        "SIE_PAYLOAD_TTL_S",
        "gateway",
        _whole(1),
        "Life of an object in the payload store, seconds, above the age limit of the work stream. Default: that and an hour.",
    )
    admin_token: Secret | None = _row(
        None,
        "SIE_ADMIN_TOKEN",
        "gateway config",
        SECRET,
        "Bearer token with every scope. Unset: admin operations are refused.",
    )
    config_read_token: Secret | None = _row(
        None,
        "SIE_CONFIG_READ_TOKEN",
        "gateway sidecar config",
        SECRET,
        "Bearer token that reads the config epoch and export, and a worker's /ws/status; it never writes.",
    )
    auth_mode: str = _row(
        "none",
        "SIE_AUTH_MODE",
        "gateway config",
        _choice("none", "static", "token"),
        "Authentication of the gateway: none, static tokens, or keys kept hashed in the broker; of the config service: with token, keys beside the admin token.",
    )
    auth_token: Secret | None = _row(
        None, "SIE_AUTH_TOKEN", "gateway", SECRET, "One accepted bearer token, with scopes infer, read and pools."
    )
    auth_tokens: tuple[Secret, ...] | None = _row(
        None, "SIE_AUTH_TOKENS", "gateway", SECRETS, "Several accepted bearer tokens, for rotation."
    )
    nats_config_trusted_producers: tuple[str, ...] = _row(
        ("sie-config",),
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS",
        "gateway sidecar",
        LIST,
        "Producers whose config deltas are applied.",
    )
    gateway_workers: tuple[str, ...] | None = _row(
        None,
        "SIE_GATEWAY_WORKERS",
        "gateway",
        LIST,
        "URLs of workers whose status sockets are watched with SIE_GATEWAY_HEALTH_MODE=ws; /ws/status shows the first, or ?worker=N. `sie serve` names its own. They are shown the SIE_CONFIG_READ_TOKEN.",
    )
    gateway_kubernetes: bool = _row(
        False,
        "SIE_GATEWAY_KUBERNETES",
        "gateway",
        BOOL,
        "Find further such workers by the EndpointSlices of a service. The pod's service account needs list and watch on them.",
    )
    gateway_k8s_namespace: str = _row(
        "default", "SIE_GATEWAY_K8S_NAMESPACE", "gateway", LABEL, "Namespace of endpoint discovery."
    )
    gateway_k8s_service: str = _row(
        "sie-worker", "SIE_GATEWAY_K8S_SERVICE", "gateway", LABEL, "Service of endpoint discovery."
    )
    gateway_k8s_port: int = _row(
        8080,
        "SIE_GATEWAY_K8S_PORT",
        "gateway",
        _whole(1, 65535),
        "Worker port of endpoint discovery: the workers' SIE_WORKER_METRICS_PORT.",
    )
    gateway_api_metrics: bool = _row(
        False,
        "SIE_GATEWAY_API_METRICS",
        "gateway",
        BOOL,
        "Whether /metrics is also on the API port, for tokens with the scope metrics. `sie serve` turns it on.",
    )
    gateway_metrics_port: int = _row(
        9090,
        "SIE_GATEWAY_METRICS_PORT",
        "gateway",
        PORT,
        "Port of /metrics and the probes, never behind a token. 0 picks a free one, as `sie serve` does unless it is told another.",
    )
    gateway_request_timeout: float = _row(
        120.0,
        "SIE_GATEWAY_REQUEST_TIMEOUT",
        "gateway",
        _number(0, 600, open_low=True),
        "Budget of a request, seconds; a smaller X-SIE-Timeout-Ms wins.",
    )
    load_hold_s: float = _row(
        20.0,
        "SIE_LOAD_HOLD_S",
        "gateway",
        _number(0, 29.999),
        "How long a request waits for a cold model or lane, seconds.",
    )
    allowed_hosts: tuple[str, ...] | None = _row(
        None,
        "SIE_ALLOWED_HOSTS",
        "gateway sidecar config",
        ("a comma-separated list of host names, *.suffixes or *", _hosts),
        "Names that a request may have in Host beside the addresses and local names of the server itself, and whose pages may call it from a browser. `*` is any. Unset: on loopback the names of loopback and of this machine, elsewhere any.",
    )
    root_path: str | None = _row(
        None,
        "SIE_ROOT_PATH",
        "gateway",
        _pattern("a path that starts with / and does not end with it", r"(/[A-Za-z0-9._~-]+)+"),
        "Prefix under which a reverse proxy serves the gateway.",
    )
    default_models: tuple[tuple[str, str], ...] | None = _row(
        None,
        "SIE_DEFAULT_MODELS",
        "gateway",
        ("a list of operation=model with operation embed, embed_sparse, embed_all, rerank or predict", _pairs),
        "Models of requests that name none, by what they ask for.",
    )
    pool_write_role: str = _row(
        "user",
        "SIE_POOL_WRITE_ROLE",
        "gateway",
        _choice("user", "admin"),
        "Who makes, renews and deletes reservations: user, whoever has the scope pools; admin, only who has the scope admin.",
    )
    stream_storage: str = _row(
        "file",
        "SIE_STREAM_STORAGE",
        "gateway config",
        _choice("memory", "file"),
        "Storage of the work streams, and of the catalogue. memory is lost with the broker; file survives its restart.",
    )
    stream_replicas: int = _row(
        1,
        "SIE_STREAM_REPLICAS",
        "gateway config",
        _whole(1, 5),
        "Copies of each work stream and of the catalogue, at most the number of brokers.",
    )
    queue_max_bytes: int = _row(
        1 << 30,
        "SIE_QUEUE_MAX_BYTES",
        "gateway",
        _whole(1 << 20),
        "Most bytes in one pool's work stream; beyond it the newest work is refused.",
    )
    pool: str = _row(
        "_default",
        "SIE_POOL",
        "sidecar gateway",
        ("1 to 63 letters, digits, _ or -", _pool),
        "Pool of the worker, part of stream and subject names.",
        heading="Worker",
    )
    bundle: str = _row(
        "default",
        "SIE_BUNDLE",
        "sidecar adapter",
        LABEL,
        "Bundle that this worker serves. An adapter that lacks what the bundle says is installed does not start.",
    )
    ipc_socket_path: str = _row(
        "/tmp/sie-ipc.sock",  # noqa: S108
        "SIE_IPC_SOCKET_PATH",
        "sidecar adapter",
        ("an absolute path of at most 100 bytes", _socket_path),
        "Socket between sidecar and adapter, mode 0600.",
    )
    max_concurrent_batches: int = _row(
        4,
        "SIE_MAX_CONCURRENT_BATCHES",
        "sidecar",
        _whole(1, 64),
        "Batches that the sidecar may have at the adapter, of all models together. Lanes of the device and SIE_RUST_PIPELINE_DEPTH may bound them further.",
    )
    ipc_pool_size: int | None = _row(
        None,
        "SIE_IPC_POOL_SIZE",
        "sidecar",
        _whole(1),
        "Connections to the adapter for batches; one more carries control. Default: SIE_MAX_CONCURRENT_BATCHES, where that is more than 6 at most what the lanes of the device need.",
    )
    worker_metrics_port: int = _row(
        9095,
        "SIE_WORKER_METRICS_PORT",
        "sidecar",
        PORT,
        "Port of the sidecar's /metrics, /healthz and /readyz. 0 picks a free one, as `sie serve` does unless it is told another.",
    )
    worker_id: str | None = _row(
        None,
        "SIE_WORKER_ID",
        "sidecar",
        LABEL,
        "Stable id in logs, results and health. Default: the pod's host name, else a UUID.",
    )
    machine_profile: str | None = _row(
        None,
        "SIE_MACHINE_PROFILE",
        "sidecar gateway",
        LABEL,
        "Kind of node, for routing, and the key of measured defaults. Default: SIE_GPU_TYPE, else SIE_POOL.",
    )
    gpu_count: int = _row(1, "SIE_GPU_COUNT", "sidecar", _whole(0), "GPUs advertised in health.")
    gateway_url: str | None = _row(
        None,
        "SIE_GATEWAY_URL",
        "sidecar",
        HTTP,
        "Gateway asked which pool to serve; several with commas between, each asked where the one before does not answer.",
    )
    pool_admission_enabled: bool = _row(
        True, "SIE_POOL_ADMISSION_ENABLED", "sidecar", BOOL, "Ask for pool assignments before pulling."
    )
    worker_ping_interval_ms: int = _row(
        2000, "SIE_WORKER_PING_INTERVAL_MS", "sidecar", _whole(100), "Cadence of the adapter ping, milliseconds."
    )
    worker_readyz_stale_mult: float = _row(
        3.0,
        "SIE_WORKER_READYZ_STALE_MULT",
        "sidecar",
        _number(1),
        "Ping intervals without success before /readyz fails.",
    )
    worker_config_poll_interval_ms: int = _row(
        30000, "SIE_WORKER_CONFIG_POLL_INTERVAL_MS", "sidecar", _whole(1000), "Poll of the config epoch, milliseconds."
    )
    worker_config_full_export_interval_ms: int = _row(
        300000,
        "SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS",
        "sidecar",
        _whole(0),
        "Reconciliation from a full export, milliseconds; 0 only at start.",
    )
    health_publish_interval_ms: int = _row(
        5000, "SIE_HEALTH_PUBLISH_INTERVAL_MS", "sidecar", _whole(100), "Interval of health messages, milliseconds."
    )
    heartbeat_timeout_ms: int = _row(
        15000,
        "SIE_HEARTBEAT_TIMEOUT_MS",
        "gateway sidecar",
        _whole(1),
        "Silence after which a worker no longer counts, milliseconds.",
    )
    ack_wait_s: int = _row(
        10,
        "SIE_ACK_WAIT_S",
        "gateway sidecar",
        _whole(3),
        "Time without a lease renewal after which work goes to another worker, seconds; renewed every third of it.",
    )
    memory_pressure_threshold_percent: float = _row(
        85.0,
        "SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT",
        "adapter",
        _number(1, 99),
        "Device memory use above which the least recently used idle model is unloaded.",
        heading="Memory and disk",
    )
    disk_cache_enabled: bool = _row(
        True,
        "SIE_DISK_CACHE_ENABLED",
        "adapter",
        BOOL,
        "Before a download and every 30 s, remove weights from a disk above the threshold by last use; only what SIE put there and nobody uses.",
    )
    disk_pressure_threshold_percent: float = _row(
        85.0,
        "SIE_DISK_PRESSURE_THRESHOLD_PERCENT",
        "adapter",
        _number(1, 99),
        "Disk use above which cached weights that nobody uses are removed.",
    )
    disk_cache_bytes: int | None = _row(
        None,
        "SIE_DISK_CACHE_BYTES",
        "adapter",
        _whole(1 << 20),
        "What all weights below SIE_LOCAL_CACHE may take, where the disk would let them take more: the size limit of a volume. Default: the disk.",
    )
    idle_evict_s: int | None = _row(
        None, "SIE_IDLE_EVICT_S", "sidecar", _whole(1), "Unload models idle for this long, seconds."
    )
    preload_models: tuple[str, ...] | None = _row(
        None,
        "SIE_PRELOAD_MODELS",
        "sidecar",
        LIST,
        "Models loaded before the worker is ready. An unknown name is a start error.",
    )
    log_json: bool = _row(
        False,
        "SIE_LOG_JSON",
        "all",
        BOOL,
        "One JSON object per log line.",
        heading="Logs and traces",
    )
    tracing_enabled: bool = _row(
        False, "SIE_TRACING_ENABLED", "all", BOOL, "OpenTelemetry tracing of requests, from HTTP to the forward pass."
    )
    otel_sdk_disabled: bool = _row(
        False, "OTEL_SDK_DISABLED", "all", BOOL, "Whether tracing is off, whatever SIE_TRACING_ENABLED says."
    )
    otel_service_name: str = _row(
        "sie-server",
        "OTEL_SERVICE_NAME",
        "all",
        TEXT,
        "Service name in traces; unset, a service.name in OTEL_RESOURCE_ATTRIBUTES comes before the default.",
    )
    otel_traces_exporter: tuple[str, ...] = _row(
        ("otlp",), "OTEL_TRACES_EXPORTER", "all", _choices("otlp", "console", "none"), "Span exporters."
    )
    otel_exporter_otlp_endpoint: str = _row(
        "http://localhost:4317",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "all",
        COLLECTOR,
        "Collector address; unset, http/protobuf takes port 4318. /v1/traces is put behind it for http/protobuf.",
    )
    otel_exporter_otlp_traces_endpoint: str | None = _row(
        None,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "all",
        COLLECTOR,
        "Collector address of traces, used as it is. Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    otel_exporter_otlp_protocol: str = _row(
        "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL", "all", PROTOCOL, "Protocol to the collector."
    )
    otel_exporter_otlp_traces_protocol: str | None = _row(
        None,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "all",
        PROTOCOL,
        "Protocol of traces. Default: OTEL_EXPORTER_OTLP_PROTOCOL.",
    )
    otel_traces_sampler: str = _row(
        "always_on",
        "OTEL_TRACES_SAMPLER",
        "all",
        _choice(
            "always_on",
            "always_off",
            "traceidratio",
            "parentbased_always_on",
            "parentbased_always_off",
            "parentbased_traceidratio",
        ),
        "Sampling strategy.",
    )
    otel_traces_sampler_arg: float = _row(
        1.0, "OTEL_TRACES_SAMPLER_ARG", "all", _number(0, 1), "Sampling rate of traceidratio."
    )
    otel_propagators: tuple[str, ...] = _row(
        ("tracecontext", "baggage"),
        "OTEL_PROPAGATORS",
        "all",
        _choices("tracecontext", "baggage", "none"),
        "Whether the W3C trace context of clients is taken up: tracecontext is in it. Baggage is not read.",
    )
    preprocessor_workers: int = _row(
        4,
        "SIE_PREPROCESSOR_WORKERS",
        "sidecar adapter",
        _whole(1),
        "Threads that tokenise, shared by all models; in the adapter for families that tokenise themselves.",
        heading="Engine",
    )
    image_workers: int = _row(
        4, "SIE_IMAGE_WORKERS", "adapter", _whole(1), "Threads that prepare images.", waits_for="image models"
    )
    attention_backend: str = _row(
        "auto",
        "SIE_ATTENTION_BACKEND",
        "adapter",
        _choice("auto", "flash_attention_2", "sdpa", "eager"),
        "Attention implementation; what the device cannot do falls back to sdpa with a warning.",
    )
    default_compute_precision: str = _row(
        "float16",
        "SIE_DEFAULT_COMPUTE_PRECISION",
        "adapter",
        _choice("float16", "bfloat16", "float32"),
        "Precision of models that do not set their own. A CPU runs 16-bit models in bfloat16 where it has the instructions, else in float32.",
    )
    instrumentation: bool = _row(
        False,
        "SIE_INSTRUMENTATION",
        "adapter",
        BOOL,
        "Sizes, padding, times and memory of the last 100 batches in /ws/status of the worker.",
    )
    max_loras_per_model: int = _row(10, "SIE_MAX_LORAS_PER_MODEL", "adapter", _whole(1), "LoRAs kept per model.")

    @property
    def profile(self) -> str:
        """The machine profile in force."""
        return self.machine_profile or self.gpu_type or self.pool

    @property
    def pool_size(self) -> int:
        """Connections to the adapter for batches."""
        return self.ipc_pool_size or self.max_concurrent_batches

    @property
    def cache_folder(self) -> Path:
        return Path(self.local_cache or self.hf_home).expanduser()

    @property
    def tracing(self) -> Tracing:
        """All that tracing reads."""
        protocol = self.otel_exporter_otlp_traces_protocol or self.otel_exporter_otlp_protocol
        endpoint = self.otel_exporter_otlp_traces_endpoint or self.otel_exporter_otlp_endpoint
        if protocol == "http/protobuf":
            endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
            if not self.otel_exporter_otlp_traces_endpoint:
                endpoint = endpoint.rstrip("/") + "/v1/traces"
        return Tracing(
            self.tracing_enabled and not self.otel_sdk_disabled,
            self.otel_service_name,
            tuple(name for name in dict.fromkeys(self.otel_traces_exporter) if name != "none"),
            protocol,
            endpoint,
            self.otel_traces_sampler,
            self.otel_traces_sampler_arg,
            "tracecontext" in self.otel_propagators,
        )

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{row.field}={shown(row, getattr(self, row.field))}' for row in ROWS)})"


def _rows() -> Iterator[Row]:
    heading = ""
    for field in dataclasses.fields(Settings):
        row: Row = field.metadata["row"]
        heading = row.heading or heading
        yield dataclasses.replace(row, field=field.name, heading=heading)


ROWS: tuple[Row, ...] = tuple(_rows())
BY_NAME = {row.name: row for row in ROWS}

# Measured values that beat a documented default on one kind of machine. The documented default itself stays. cpu: 4,096
# tokens keep a lane busy for some 0.2 s, and more would only lengthen the wait for it; 12 messages of one short text
# each leave a forward pass dominated by its fixed cost (bench/results/overhead.md). An adapter on a CPU has a lane for
# each core: as many batches as the lanes take, and SIE_RUST_PIPELINE_DEPTH, bound those there, where the documented 4
# would leave cores idle.
MACHINE_PROFILE_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "SIE_MAX_BATCH_COST": "4096",
        "SIE_BATCHER_MAX_BATCH_REQUESTS": "64",
        "SIE_BATCHER_COALESCE_MS": "2",
        "SIE_MAX_CONCURRENT_BATCHES": "64",
    },
}


@dataclass(frozen=True)
class Loaded:
    """Settings with where each value came from, and what the operator should be told at start."""

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def load(
    *, flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, mode: Mode = "queue"
) -> Loaded:
    """Read all settings. `flags` maps variable names to the raw text of their command-line flags. Raises
    SettingError.
    """
    environ = os.environ if environ is None else environ
    flags = flags or {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    ignored: list[str] = []
    for row in ROWS:
        values[row.field], sources[row.name] = row.default, "default"
        if row.name in flags:
            values[row.field], sources[row.name] = row.read(flags[row.name]), "flag"
        elif row.name in environ and not (row.is_standard and not environ[row.name].strip()):
            try:
                value = row.read(environ[row.name])
            except SettingError as error:
                if not row.is_standard:
                    raise
                ignored.append(f"{error}; it is ignored, {shown(row, row.default)} holds")
                continue
            values[row.field], sources[row.name] = value, "default" if value is None else "environment"
    _complete_tracing(values, sources, environ)
    profile = values["machine_profile"] or values["gpu_type"] or values["pool"]
    if profile not in MACHINE_PROFILE_DEFAULTS and sources["SIE_GPU_COUNT"] != "default" and values["gpu_count"] == 0:
        profile = "cpu"  # under a name of the operator's
    for name, raw in MACHINE_PROFILE_DEFAULTS.get(profile, {}).items():
        if sources[name] == "default":
            values[BY_NAME[name].field], sources[name] = BY_NAME[name].read(raw), f"machine profile {profile}"
    settings = Settings(**values)
    _cross_check(settings)
    return Loaded(
        settings, sources, (*_warnings(sources, environ, mode), *(ignored if settings.tracing.enabled else ()))
    )


def _complete_tracing(values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]) -> None:
    """What OpenTelemetry's variables say of each other where one is not set."""
    if sources["OTEL_SERVICE_NAME"] == "default":
        attributes = dict(
            part.strip().partition("=")[::2] for part in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
        )
        if name := unquote(attributes.get("service.name", "")).strip():
            values["otel_service_name"], sources["OTEL_SERVICE_NAME"] = name, "environment"
    protocol = values["otel_exporter_otlp_traces_protocol"] or values["otel_exporter_otlp_protocol"]
    if sources["OTEL_EXPORTER_OTLP_ENDPOINT"] == "default" and protocol == "http/protobuf":
        values["otel_exporter_otlp_endpoint"] = "http://localhost:4318"


def _cross_check(settings: Settings) -> None:
    if settings.adaptive_min_quantum_ms > settings.adaptive_max_quantum_ms:
        raise SettingError(
            "SIE_ADAPTIVE_MIN_QUANTUM_MS",
            f"{settings.adaptive_min_quantum_ms} is above SIE_ADAPTIVE_MAX_QUANTUM_MS {settings.adaptive_max_quantum_ms}",
        )
    if settings.health_publish_interval_ms >= settings.heartbeat_timeout_ms:
        raise SettingError(
            "SIE_HEALTH_PUBLISH_INTERVAL_MS",
            f"{settings.health_publish_interval_ms} is not below SIE_HEARTBEAT_TIMEOUT_MS {settings.heartbeat_timeout_ms}",
        )


def _warnings(sources: Mapping[str, str], environ: Mapping[str, str], mode: Mode) -> list[str]:
    told = [
        f"{name} is set, but no such setting exists"
        for name in sorted(environ)
        if name.startswith("SIE_") and name not in BY_NAME
    ]
    for row in ROWS:
        if sources[row.name] not in ("flag", "environment"):
            continue
        if row.mode is not None and row.mode != mode:
            told.append(
                f"{row.name} is set, but has no effect {'with --standalone' if mode == 'standalone' else 'in queue mode'}"
            )
        if row.waits_for:
            told.append(f"{row.name} is set, but this version has no {row.waits_for} yet")
    return told


def shown(row: Row, value: Any) -> str:
    """A value as operators may see it: secrets as stars, URLs without credentials."""
    if value is None:
        return "(unset)"
    if row.secret:
        return "***"
    if isinstance(value, tuple):
        return ",".join("=".join(part) if isinstance(part, tuple) else str(part) for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    if row.name.endswith(("_URL", "_ENDPOINT")):
        return public_url(str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def public_url(url: str) -> str:
    """The URLs of a comma-separated list without user names and passwords."""
    shown_urls = []
    for part in url.split(","):
        pieces = urlsplit(part.strip())
        host = pieces.netloc.rpartition("@")[2]
        shown_urls.append(urlunsplit(pieces._replace(netloc=host)))
    return ",".join(shown_urls)


def default_worker_id() -> str:
    """The host name, which is the pod's name in Kubernetes; a UUID where it says nothing."""
    name = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower()).strip("-._")[:63]
    return name if name and name != "localhost" else str(uuid.uuid4())
