"""The settings table against what is documented: defaults, bounds, precedence, warnings, secrets."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import of_extras
import pytest
from click.testing import CliRunner
from zygote import Forked

from sie_cli.main import main
from sie_contracts.settings import (
    BY_NAME,
    COMPONENTS,
    MACHINE_PROFILE_DEFAULTS,
    ROWS,
    Mode,
    Secret,
    SettingError,
    SettingRow,
    default_worker_id,
    load,
    public_url,
    shown,
)

SIE = str(Path(sys.executable).with_name("sie"))
UNSET = "(unset)"
CANARY = "canary-9f31"
MODES: tuple[Mode, ...] = ("queue", "standalone")


@dataclass(frozen=True)
class Documented:
    """One setting as documented. `default` is what `sie settings` shows, `good` is another legal value, `bad` are
    illegal values.
    """

    default: str
    good: str
    bad: tuple[str, ...] = ()


# Transcribed from the documented table. Where the documented default is derived from another setting, or detected, it
# is unset here.
_OF_THE_CORE: dict[str, tuple[str, str] | tuple[str, str, tuple[str, ...]]] = {
    "SIE_DEVICE": (
        "auto",
        "cuda:1",
        (
            "gpu",
            "cuda:",
            "cuda:x",
            "",
            "cpu,",
            "cpu,cuda:0",
            "cuda:0,cuda:0",
            "mps,mps",
            "auto,cpu",
            ",".join(17 * ["cpu"]),
        ),
    ),
    "SIE_MODELS_DIR": (UNSET, "s3://bucket/models", ("ftp://host/models", "s3://")),
    "SIE_ALLOW_REMOTE_CODE": ("false", "true", ("maybe", "")),
    "SIE_MODEL_PATHS": (UNSET, "/srv/models,~/models", (",", " , ")),
    "SIE_MODEL_FILTER": (UNSET, "a/one,b/two", (",", " , ")),
    "SIE_GPU_TYPE": (UNSET, "a100-80gb", ("two words", "-l4", "x" * 64)),
    "SIE_LOCAL_CACHE": (UNSET, "/cache"),
    "SIE_CLUSTER_CACHE": (UNSET, "gs://bucket/weights", ("/a/path", "https://host/x")),
    "SIE_HF_FALLBACK": ("true", "false", ("maybe", "2", "")),
    "HF_HOME": ("~/.cache/huggingface", "/hf", ("",)),
    "SIE_MAX_BATCH_REQUESTS": ("64", "8", ("0", "-1", "many", "1.5", "")),
    "SIE_MAX_BATCH_WAIT_MS": ("10", "0", ("-1", "soon", "")),
    "SIE_MAX_BATCH_COST": ("16384", "4096", ("0", "16k", "")),
    "SIE_MAX_CONCURRENT_REQUESTS": ("512", "20", ("0", "x", "")),
    "SIE_MAX_ITEMS_PER_REQUEST": ("2048", "100", ("0", "x", "")),
    "SIE_RUST_PIPELINE_DEPTH": ("2", "8", ("0", "9", "deep", "")),
    "SIE_BATCHER_COALESCE_MS": ("5", "0", ("-1", "5ms", "")),
    "SIE_BATCHER_MAX_BATCH_REQUESTS": ("12", "24", ("0", "x", "")),
    "SIE_ADAPTIVE_MIN_QUANTUM_MS": ("2", "0", ("-1", "x", "")),
    "SIE_ADAPTIVE_MAX_QUANTUM_MS": ("15", "40", ("-1", "x", "")),
    "SIE_ADAPTIVE_TARGET_P50_MS": ("50", "0.5", ("0", "-1", "nan", "inf", "")),
    "SIE_CHUNK_COST": ("4096", "16384", ("0", "x", "")),
    "SIE_BULK_MAX_OVERTAKES": ("4", "0", ("-1", "x", "")),
    "SIE_KEY_WINDOW_TOKENS": ("65536", "131072", ("0", "x", "")),
    "SIE_ADOPT_AFTER_MS": ("2000", "0", ("-1", "x", "")),
    "SIE_SWAP_AFTER_MS": ("1000", "5000", ("-1", "x", "")),
    "SIE_NATS_URL": (
        UNSET,
        "nats://one:4222,tls://two:4222",
        ("http://host", "host:4222", "nats://", "nats://host:99999"),
    ),
    "SIE_NATS_PASSWORD": (UNSET, f" {CANARY}@/:%# "),
    "SIE_NATS_STREAMS_PASSWORD": (UNSET, f" {CANARY}@/:%# "),
    "SIE_GATEWAY_HEALTH_MODE": ("ws", "nats", ("http", "")),
    "SIE_GATEWAY_CONFIGURED_GPUS": (UNSET, "l4,l4-spot", (",",)),
    "SIE_CONFIG_SERVICE_URL": (UNSET, "http://config:8081", ("config:8081", "nats://config", "http://")),
    "SIE_PAYLOAD_STORE_URL": (UNSET, "/mnt/payloads", ("ftp://host/x", "gs://")),
    "SIE_INLINE_PAYLOAD_BYTES": (UNSET, "4096", ("1023", "1k")),
    "SIE_PAYLOAD_TTL_S": (UNSET, "7200", ("0", "1h")),
    "SIE_ADMIN_TOKEN": (UNSET, CANARY),
    "SIE_CONFIG_READ_TOKEN": (UNSET, CANARY),
    "SIE_AUTH_MODE": ("none", "token", ("open", "tokens", "")),
    "SIE_AUTH_TOKEN": (UNSET, CANARY),
    "SIE_AUTH_TOKENS": (UNSET, f"{CANARY},{CANARY}-two", (",", " , ,")),
    "SIE_NATS_CONFIG_TRUSTED_PRODUCERS": ("sie-config", "a,b", (",", "")),
    "SIE_GATEWAY_WORKERS": (
        UNSET,
        "http://a,wss://[::1]:9095,b:9095",
        (",", "http://[::1:9095", "a:port", "http://a,ftp://b", "http://"),
    ),
    "SIE_GATEWAY_KUBERNETES": ("false", "true", ("k8s", "")),
    "SIE_GATEWAY_K8S_NAMESPACE": ("default", "search", ("two words", "")),
    "SIE_GATEWAY_K8S_SERVICE": ("sie-worker", "other", ("two words", "")),
    "SIE_GATEWAY_K8S_PORT": ("8080", "1", ("0", "65536", "http", "")),
    "SIE_GATEWAY_API_METRICS": ("false", "true", ("maybe", "")),
    "SIE_GATEWAY_METRICS_PORT": ("9090", "0", ("-1", "65536", "http", "")),
    "SIE_GATEWAY_REQUEST_TIMEOUT": ("120", "0.5", ("0", "600.1", "-1", "nan", "2m", "")),
    "SIE_LOAD_HOLD_S": ("20", "0", ("-0.1", "30", "x", "")),
    "SIE_MAX_BODY_BYTES": ("100663296", "1048576", ("0", "268435457", "1M", "")),
    "SIE_MIN_BODY_RATE": ("4096", "0", ("-1", "1K", "")),
    "SIE_BODY_MEMORY_BYTES": (UNSET, "268435456", ("0", "1G")),
    "SIE_ALLOWED_HOSTS": (UNSET, "sie.example.com,*.example.org", (",", "http://a", "a/b", "a:port")),
    "SIE_CORS_ORIGINS": (
        UNSET,
        "https://a.example.com,http://localhost:3000",
        (",", "*", "null", "a.example.com", "https://a/", "https://A"),
    ),
    "SIE_ROOT_PATH": (UNSET, "/sie", ("sie", "/sie/", "/", "//")),
    "SIE_DEFAULT_MODELS": (UNSET, "embed=a/b,rerank=c/d", ("embed", "chat=a/b", "embed=", ",")),
    "SIE_POOL_WRITE_ROLE": ("user", "admin", ("root", "")),
    "SIE_STREAM_STORAGE": ("file", "memory", ("disk", "")),
    "SIE_STREAM_REPLICAS": ("1", "3", ("0", "6", "x", "")),
    "SIE_QUEUE_MAX_BYTES": ("1073741824", "1048576", ("1048575", "1g", "")),
    "SIE_CACHE_SHARED": ("false", "true", ("maybe", "")),
    "SIE_CACHE_EXCLUDED_MODELS": (UNSET, "org/a,org/b", (",",)),
    "SIE_POOL": ("_default", "batch_2", ("a.b", "a b", "x" * 64, "")),
    "SIE_BUNDLE": ("default", "vision", ("two words", "")),
    "SIE_IPC_SOCKET_PATH": ("/tmp/sie-ipc.sock", "/run/sie.sock", ("sie.sock", "/" + "x" * 100, "")),
    "SIE_MAX_CONCURRENT_BATCHES": ("4", "64", ("0", "65", "x", "")),
    "SIE_IPC_POOL_SIZE": (UNSET, "6", ("0", "x")),
    "SIE_WORKER_METRICS_PORT": ("9095", "0", ("-1", "65536", "x", "")),
    "SIE_WORKER_ID": (UNSET, "w1", ("two words", "x" * 64)),
    "SIE_MACHINE_PROFILE": (UNSET, "l4-spot", ("two words", "x" * 64)),
    "SIE_GPU_COUNT": ("1", "0", ("-1", "two", "")),
    "SIE_GATEWAY_URL": (UNSET, "http://gateway:8080", ("gateway:8080", "ws://gateway")),
    "SIE_POOL_ADMISSION_ENABLED": ("true", "false", ("x", "")),
    "SIE_WORKER_PING_INTERVAL_MS": ("2000", "100", ("99", "x", "")),
    "SIE_WORKER_READYZ_STALE_MULT": ("3", "1.5", ("0.9", "x", "")),
    "SIE_WORKER_CONFIG_POLL_INTERVAL_MS": ("30000", "1000", ("999", "x", "")),
    "SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS": ("300000", "0", ("-1", "x", "")),
    "SIE_HEALTH_PUBLISH_INTERVAL_MS": ("5000", "100", ("99", "x", "")),
    "SIE_HEARTBEAT_TIMEOUT_MS": ("15000", "20000", ("0", "x", "")),
    "SIE_ACK_WAIT_S": ("10", "3", ("2", "x", "")),
    "SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": ("85", "90", ("-1", "101", "x", "")),
    "SIE_DISK_CACHE_ENABLED": ("true", "false", ("x", "")),
    "SIE_DISK_PRESSURE_THRESHOLD_PERCENT": ("85", "1", ("-1", "101", "x", "")),
    "SIE_DISK_CACHE_BYTES": (UNSET, "1048576", ("1048575", "1g")),
    "SIE_IDLE_EVICT_S": (UNSET, "300", ("0", "-1", "5m")),
    "SIE_PRELOAD_MODELS": (UNSET, "a/one,b/two", (",",)),
    "SIE_LOG_JSON": ("false", "true", ("json", "")),
    "SIE_TRACING_ENABLED": ("false", "true", ("otlp", "")),
    "OTEL_SDK_DISABLED": ("false", "true", ("perhaps",)),
    "OTEL_SERVICE_NAME": ("sie-server", "gateway"),
    "OTEL_TRACES_EXPORTER": ("otlp", "console", ("zipkin", "otlp,jaeger")),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("http://localhost:4317", "http://collector:4317", ("ftp://collector", "collector")),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": (UNSET, "collector:4317", ("ftp://collector", "collector")),
    "OTEL_EXPORTER_OTLP_PROTOCOL": ("grpc", "http/protobuf", ("http/json",)),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": (UNSET, "grpc", ("http/json",)),
    "OTEL_TRACES_SAMPLER": ("always_on", "parentbased_traceidratio", ("sometimes", "xray", "jaeger_remote")),
    "OTEL_TRACES_SAMPLER_ARG": ("1", "0.1", ("-0.1", "1.1", "x", "endpoint=http://localhost:14250")),
    "OTEL_PROPAGATORS": ("tracecontext,baggage", "none", ("b3", "tracecontext,b3multi", "jaeger")),
    "SIE_PREPROCESSOR_WORKERS": ("4", "1", ("0", "x", "")),
    "SIE_IMAGE_WORKERS": ("4", "1", ("0", "x", "")),
    "SIE_ATTENTION_BACKEND": ("auto", "eager", ("flash", "")),
    "SIE_DEFAULT_COMPUTE_PRECISION": ("float16", "bfloat16", ("fp16", "int8", "")),
    "SIE_INSTRUMENTATION": ("false", "true", ("x", "")),
    "SIE_MAX_LORAS_PER_MODEL": ("10", "2", ("0", "x", "")),
}
DOCUMENTED = {name: Documented(*row) for name, row in _OF_THE_CORE.items()} | {
    name: Documented(*row) for module in of_extras.modules("settings") for name, row in module.DOCUMENTED.items()
}


def test_the_table_holds_every_documented_setting_and_no_other() -> None:
    assert set(DOCUMENTED) == set(BY_NAME)
    assert len(BY_NAME) == len(ROWS) == len({row.field for row in ROWS}) == len({row.flag for row in ROWS})
    assert all(row.components and set(row.components) <= set(COMPONENTS) for row in ROWS)


def test_a_setting_has_its_documented_default_whatever_the_others_are() -> None:
    """Three of the others choose the machine profile, which has defaults of its own."""
    choosers = ("SIE_GPU_TYPE", "SIE_MACHINE_PROFILE", "SIE_GPU_COUNT")
    others = {name: documented.good for name, documented in DOCUMENTED.items() if name not in choosers}
    for row in ROWS:
        for environ in ({}, {name: raw for name, raw in others.items() if name != row.name}):
            configuration = load(environ=environ)
            assert shown(row, getattr(configuration.settings, row.field)) == DOCUMENTED[row.name].default
            assert configuration.sources[row.name] == "default"


def test_a_bad_or_out_of_range_value_ends_the_start_with_the_name_of_the_variable() -> None:
    """OpenTelemetry's variables are checked here as flags only. The next test has their environment."""
    cases = [(row, raw) for row in ROWS for raw in DOCUMENTED[row.name].bad]
    for row, raw in cases:
        for source in ({"environ": {row.name: raw}}, {"environ": {}, "flags": {row.name: raw}})[row.is_standard :]:
            with pytest.raises(SettingError) as caught:
                load(**source)
            assert caught.value.name == row.name
            assert str(caught.value).startswith(f"{row.name}: got ")
            assert row.secret or repr(raw.strip()[:100]) in str(caught.value)


def test_a_standard_value_that_means_nothing_here_is_ignored_with_one_warning() -> None:
    """A cluster may set OpenTelemetry's variables for all programs, without regard to this one. Without tracing there
    is no warning.
    """
    standard = [row for row in ROWS if row.is_standard]
    assert {row.name for row in standard} == {name for name in BY_NAME if name.startswith("OTEL_")}
    cases = [(row, raw) for row in standard for raw in DOCUMENTED[row.name].bad]
    for row, raw in cases:
        configuration = load(environ={"SIE_TRACING_ENABLED": "true", row.name: raw})
        assert (getattr(configuration.settings, row.field), configuration.sources[row.name]) == (row.default, "default")
        (warning,) = configuration.warnings
        assert warning.startswith(f"{row.name}: got '{raw}'")
        assert load(environ={row.name: raw}).warnings == ()


def test_an_empty_value_is_unset_where_unset_is_the_default_and_an_error_elsewhere() -> None:
    """An empty variable of OpenTelemetry is always unset."""
    for row in ROWS:
        if row.default is None or row.is_standard:
            configuration = load(environ={row.name: "  "})
            assert getattr(configuration.settings, row.field) == row.default
            assert configuration.sources[row.name] == "default"
        else:
            with pytest.raises(SettingError, match=f"^{row.name}: ") as caught:
                load(environ={row.name: "  "})
            assert "no such user" not in str(caught.value)


def test_a_flag_beats_the_environment_beats_the_default() -> None:
    for row in ROWS:
        good, default = DOCUMENTED[row.name].good, DOCUMENTED[row.name].default
        # a password gets no spaces around it: each of its characters counts
        configuration = load(environ={row.name: good if row.name.endswith("_PASSWORD") else f" {good} "})
        assert getattr(configuration.settings, row.field) == row.read(good) != row.default
        assert configuration.sources[row.name] == "environment"
        configuration = load(flags={row.name: "" if default == UNSET else default}, environ={row.name: good})
        assert getattr(configuration.settings, row.field) == row.default
        assert configuration.sources[row.name] == "flag"


def test_a_profile_of_the_operator_s_own_has_the_values_of_a_cpu_where_no_gpu_is_said() -> None:
    for name, measured in MACHINE_PROFILE_DEFAULTS["cpu"].items():
        row = BY_NAME[name]

        def value(row: SettingRow = row, **environ: str) -> object:
            return getattr(load(environ={"SIE_MACHINE_PROFILE": "c7i", **environ}).settings, row.field)

        assert value(SIE_GPU_COUNT="0") == row.read(measured)
        assert value(SIE_GPU_COUNT="1") == value() == row.default
        assert value(SIE_GPU_COUNT="0", **{name: str(row.default)}) == row.default


@pytest.mark.parametrize("profile", MACHINE_PROFILE_DEFAULTS)
def test_a_measured_default_stands_between_environment_and_documented_default(profile: str) -> None:
    for name, measured in MACHINE_PROFILE_DEFAULTS[profile].items():
        row = BY_NAME[name]
        where = f"machine profile {profile}"
        for chooser in ("SIE_MACHINE_PROFILE", "SIE_GPU_TYPE", "SIE_POOL"):
            configuration = load(environ={chooser: profile})
            assert (getattr(configuration.settings, row.field), configuration.sources[name]) == (
                row.read(measured),
                where,
            )
        configuration = load(environ={"SIE_MACHINE_PROFILE": profile, name: "3"})
        assert (getattr(configuration.settings, row.field), configuration.sources[name]) == (3, "environment")
        written = load(environ={"SIE_MACHINE_PROFILE": profile, name: str(row.default)})
        assert (getattr(written.settings, row.field), written.sources[name]) == (row.default, "environment"), (
            "what was written wins"
        )
        configuration = load(environ={"SIE_MACHINE_PROFILE": profile, name: "3"}, flags={name: "5"})
        assert (getattr(configuration.settings, row.field), configuration.sources[name]) == (5, "flag")
        assert shown(row, row.default) == DOCUMENTED[name].default, "the documented default itself stays"


def test_derived_defaults_follow_what_they_are_derived_from() -> None:
    assert str(load(environ={"HF_HOME": "/hf"}).settings.cache_folder) == "/hf"
    assert str(load(environ={"HF_HOME": "/hf", "SIE_LOCAL_CACHE": "/cache"}).settings.cache_folder) == "/cache"
    assert load(environ={}).settings.pool_size == 4
    assert load(environ={"SIE_MAX_CONCURRENT_BATCHES": "6"}).settings.pool_size == 6
    assert load(environ={"SIE_MAX_CONCURRENT_BATCHES": "6", "SIE_IPC_POOL_SIZE": "3"}).settings.pool_size == 3
    assert load(environ={"SIE_POOL": "batch"}).settings.profile == "batch"
    assert load(environ={"SIE_POOL": "batch", "SIE_GPU_TYPE": "L4"}).settings.profile == "l4"
    assert (
        load(environ={"SIE_POOL": "batch", "SIE_GPU_TYPE": "l4", "SIE_MACHINE_PROFILE": "l4-spot"}).settings.profile
        == "l4-spot"
    )
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", default_worker_id())
    assert load(environ={"SIE_POOL": "default"}).settings.pool == "_default"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SIE_ADAPTIVE_MIN_QUANTUM_MS": "16"}, "SIE_ADAPTIVE_MIN_QUANTUM_MS"),
        ({"SIE_HEALTH_PUBLISH_INTERVAL_MS": "15000"}, "SIE_HEALTH_PUBLISH_INTERVAL_MS"),
        ({"SIE_HEARTBEAT_TIMEOUT_MS": "5000"}, "SIE_HEALTH_PUBLISH_INTERVAL_MS"),
    ],
)
def test_values_that_contradict_each_other_end_the_start(environ: dict[str, str], name: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(environ=environ)
    assert caught.value.name == name


def test_an_unknown_variable_of_ours_is_warned_about_and_others_are_not() -> None:
    configuration = load(
        environ={"SIE_MAX_BATCH_COSTS": "1", "PATH": "/bin", "OTEL_PYTHON": "x", "SIE_CHUNK_COST": "10"}
    )
    assert configuration.warnings == ("SIE_MAX_BATCH_COSTS is set, but no such setting exists",)


def test_a_setting_of_the_other_mode_is_warned_about_once() -> None:
    """Other settings, and settings that are not set, cause no warning."""
    for row, mode in itertools.product(ROWS, MODES):
        good, expected = DOCUMENTED[row.name].good, int(row.mode not in (None, mode))
        assert len(load(environ={row.name: good}, mode=mode).warnings) == expected, row.name
        if not row.secret:
            assert len(load(environ={}, flags={row.name: good}, mode=mode).warnings) == expected, row.name
    assert {row.name: row.mode for row in ROWS if row.mode} == {
        "SIE_MAX_BATCH_REQUESTS": "standalone",
        "SIE_MAX_BATCH_WAIT_MS": "standalone",
        "SIE_BATCHER_COALESCE_MS": "queue",
        "SIE_BATCHER_MAX_BATCH_REQUESTS": "queue",
    }


# secrets

SECRETS = {
    "SIE_ADMIN_TOKEN",
    "SIE_CONFIG_READ_TOKEN",
    "SIE_AUTH_TOKEN",
    "SIE_AUTH_TOKENS",
    "SIE_NATS_PASSWORD",
    "SIE_NATS_STREAMS_PASSWORD",
    *(name for module in of_extras.modules("settings") for name in getattr(module, "SECRETS", ())),
}
WITH_CREDENTIALS = {
    "SIE_NATS_URL": f"nats://user:{CANARY}@host:4222,nats://{CANARY}@other:4222",
    "SIE_CONFIG_SERVICE_URL": f"http://u:{CANARY}@config",
    "SIE_GATEWAY_URL": f"http://u:{CANARY}@gateway",
    "SIE_GATEWAY_WORKERS": f"http://u:{CANARY}@worker,http://other",
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://u:{CANARY}@collector:4317",
}
SECRET_ENVIRON = {**{name: DOCUMENTED[name].good for name in SECRETS}, **WITH_CREDENTIALS, "SIE_AUTH_MODE": "static"}


def test_no_secret_has_a_flag_so_none_shows_in_a_process_list() -> None:
    assert {row.name for row in ROWS if row.secret} == SECRETS
    options = {
        option
        for command in main.commands.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    assert options.isdisjoint(BY_NAME[name].flag for name in SECRETS)
    assert {"--max-batch-cost", "--nats-url"} <= options


def test_secrets_and_credentials_of_urls_are_in_no_printed_form() -> None:
    """The forms are repr and str of the objects that hold them, the warnings, and the table."""
    configuration = load(environ=SECRET_ENVIRON)
    assert configuration.settings.auth_token == Secret(CANARY)
    assert configuration.settings.nats_url is not None
    assert CANARY in configuration.settings.nats_url, "it is there to be used"
    printed = [
        repr(configuration),
        str(configuration.settings),
        repr(configuration.settings.auth_tokens),
        f"{configuration.settings.admin_token}",
        *configuration.warnings,
    ]
    printed += [shown(row, getattr(configuration.settings, row.field)) for row in ROWS]
    assert all(CANARY not in text for text in printed)
    assert "host:4222,nats://other:4222" in repr(configuration)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("SIE_AUTH_TOKENS", " , "),
        ("SIE_NATS_URL", f"http://user:{CANARY}@host"),
        ("SIE_NATS_URL", f"nats://user:{CANARY}/x@host:4222"),
        ("SIE_CONFIG_SERVICE_URL", f"ftp://user:{CANARY}@host"),
    ],
)
def test_an_error_about_a_secret_does_not_repeat_it(name: str, raw: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(environ={name: raw})
    assert "got ***" in str(caught.value)
    assert CANARY not in str(caught.value)


def test_public_urls_keep_all_but_the_credentials() -> None:
    assert public_url("nats://u:p@a:4222, tls://b") == "nats://a:4222,tls://b"
    assert public_url("https://token@host/path?x=1") == "https://host/path?x=1"
    assert public_url("http://host/models/a@revision") == "http://host/models/a@revision"
    assert public_url("user:p@ss@host:80") == "host:80"


@pytest.mark.parametrize("host", ["[::1", "ho]st:1", "a\u2100b", "host:port", ""])
def test_the_credentials_of_a_url_that_is_not_valid_are_not_shown(host: str) -> None:
    assert public_url(f"http://user:secret@{host}/path") == f"http://{host}/path"


# the command line


def test_every_setting_has_its_flag_on_the_command_line_and_the_flag_wins() -> None:
    """All flags are set at once, each against another value in the environment."""
    flags: list[str] = []
    flagged = {row.name for row in ROWS if row.name.startswith("SIE_") and not row.secret}
    for name in sorted(flagged):
        row, good = BY_NAME[name], DOCUMENTED[name].good
        flags += (
            [row.flag if good == "true" else f"--no-{row.flag[2:]}"]
            if isinstance(row.default, bool)
            else [row.flag, good]
        )
    environ = {name: DOCUMENTED[name].default for name in flagged if DOCUMENTED[name].default != UNSET}
    before = dict(os.environ)
    answer = CliRunner().invoke(main, ["settings", "--json", *flags], env=environ)
    assert answer.exit_code == 0, answer.output
    rows_by_name = {row["name"]: row for row in msgspec.json.decode(answer.stdout)}
    assert list(rows_by_name) == [row.name for row in ROWS]
    for name in flagged:
        row = BY_NAME[name]
        assert rows_by_name[name]["source"] == "flag"
        assert rows_by_name[name]["value"] == shown(row, row.read(DOCUMENTED[name].good))
        assert rows_by_name[name]["default"] == DOCUMENTED[name].default
        assert rows_by_name[name]["flag"] == row.flag
    assert all(rows_by_name[name]["flag"] == "" for name in set(rows_by_name) - flagged)
    assert dict(os.environ) == before, "nothing is written back"


# real processes

COMMANDS = ("settings", "gateway", "config", "sidecar", "adapter", "serve", "standalone")


async def test_a_real_process_with_a_bad_value_exits_2_and_names_it(tmp_path: Path) -> None:
    name, raw = "SIE_CHUNK_COST", "x"

    async def check(command: str) -> str:
        more = ["--data-dir", str(tmp_path)] if command in ("serve", "standalone") else []
        process = Forked("sie", [SIE, command, *more], {"PATH": os.environ["PATH"], name: raw})
        with process.stdout as output:
            message = await asyncio.to_thread(output.read)
        status = process.wait(60)
        right = status == 2 and message.startswith(f"error: {name}: ") and message.count("\n") == 1
        return "" if right else f"{command} {name}={raw!r}: {status} {message}"

    wrong = await asyncio.gather(*map(check, COMMANDS))
    assert not any(wrong), "\n".join(wrong)
