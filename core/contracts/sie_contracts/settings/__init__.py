"""Settings of all processes: name, type, bounds, default, meaning, and the processes that read them. Only this package
reads settings from the environment.

precedence: flag > environment > machine-profile default > documented default

The settings are in one class for each of the GROUPS; `Settings` inherits from all of them. A package adds a group by an
entry point of `sie.settings`: the heading, and `module:class` of a frozen dataclass of `row` fields, in a module that
imports nothing large, since all processes read it.

`load` is called once per process, and does not change the environment. An invalid value raises SettingError, which
names the variable and ends the process with status 2; only an invalid OTEL_ variable is ignored with a warning. Each
setting is one field, one variable and one flag: the field `max_batch_cost` is `SIE_MAX_BATCH_COST` and
`--max-batch-cost`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sie_contracts import client_environment, entry_points
from sie_contracts.settings.batching import BatchingSettings
from sie_contracts.settings.cluster import ClusterSettings
from sie_contracts.settings.models import EngineSettings, ModelSettings, WeightSettings
from sie_contracts.settings.rows import COMPONENTS, Mode, SettingError, SettingRow, public_url, shown
from sie_contracts.settings.telemetry import TelemetrySettings, Tracing
from sie_contracts.settings.values import MAX_DEVICES, Secret, StoreUrl, store_url
from sie_contracts.settings.worker import MemorySettings, WorkerSettings

__all__ = [
    "BY_NAME",
    "COMPONENTS",
    "GROUPS",
    "MACHINE_PROFILE_DEFAULTS",
    "MAX_DEVICES",
    "ROWS",
    "Loaded",
    "Mode",
    "Secret",
    "SettingError",
    "SettingRow",
    "Settings",
    "StoreUrl",
    "Tracing",
    "default_worker_id",
    "load",
    "public_url",
    "shown",
    "store_url",
]

ENTRY_POINTS = "sie.settings"
# heading of each group of settings, in the order in which they are shown
_CORE: Mapping[str, type] = {
    "Device and models": ModelSettings,
    "Weights": WeightSettings,
    "Batching": BatchingSettings,
    "Cluster": ClusterSettings,
    "Worker": WorkerSettings,
    "Memory and disk": MemorySettings,
    "Logs and traces": TelemetrySettings,
    "Engine": EngineSettings,
}
_OF_PACKAGES: Mapping[str, type] = entry_points.load(ENTRY_POINTS).objects
GROUPS: Mapping[str, type] = {**_CORE, **_OF_PACKAGES}


ROWS: tuple[SettingRow, ...] = tuple(
    dataclasses.replace(field.metadata["row"], field=field.name, heading=heading)
    for heading, group in GROUPS.items()
    for field in dataclasses.fields(group)
)
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True, kw_only=True, repr=False)
class CoreSettings(
    ModelSettings,
    WeightSettings,
    BatchingSettings,
    ClusterSettings,
    WorkerSettings,
    MemorySettings,
    TelemetrySettings,
    EngineSettings,
):
    """Settings of the core."""

    @property
    def profile(self) -> str:
        """Return the machine profile of this process."""
        return self.machine_profile or self.gpu_type or self.pool

    @property
    def pool_size(self) -> int:
        """Return the largest number of connections to the adapter of one device that carry batches."""
        return self.ipc_pool_size or self.max_concurrent_batches

    @property
    def cache_folder(self) -> Path:
        return Path(self.local_cache or self.hf_home).expanduser()

    @property
    def tracing(self) -> Tracing:
        """Return the settings of tracing, with the rules of OpenTelemetry applied."""
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


if TYPE_CHECKING:
    Settings = CoreSettings
else:

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Settings(CoreSettings, *_OF_PACKAGES.values()):
        """Settings of one process, read once: an instance of the class of each group. Neither `repr` nor `str` shows a
        secret.
        """


# Defaults for one machine profile, where measured values are better than the documented defaults. On a CPU, one thread
# per core runs batches. SIE_MAX_BATCH_COST: a batch of 4,096 tokens takes such a thread about 0.2 s, and a larger batch
# would only make other batches wait longer. SIE_BATCHER_MAX_BATCH_REQUESTS: with the default of 12 short texts, the
# fixed cost of a forward pass dominates. SIE_MAX_CONCURRENT_BATCHES: the default of 4 would leave cores idle; 64 is
# only an upper bound, because the number of threads and SIE_RUST_PIPELINE_DEPTH limit the number of batches too.
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
    """Settings of a process, the source of each value (such as flag or environment), and warnings to log at start."""

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def load(
    *, flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, mode: Mode = "queue"
) -> Loaded:
    """Read all settings. `flags`: variable name -> raw text of the command-line flag. `mode`: settings without effect
    in this mode cause a warning. Raises SettingError.
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
                ignored.append(f"{error}; it is ignored, and the default {shown(row, row.default)} is used")
                continue
            values[row.field], sources[row.name] = value, "default" if value is None else "environment"
    _complete_tracing(values, sources, environ)
    profile = values["machine_profile"] or values["gpu_type"] or values["pool"]
    if profile not in MACHINE_PROFILE_DEFAULTS and sources["SIE_GPU_COUNT"] != "default" and values["gpu_count"] == 0:
        profile = "cpu"  # a worker without GPUs gets the defaults of `cpu`, whatever the name of its profile
    for name, raw in MACHINE_PROFILE_DEFAULTS.get(profile, {}).items():
        if sources[name] == "default":
            values[BY_NAME[name].field], sources[name] = BY_NAME[name].read(raw), f"machine profile {profile}"
    settings = Settings(**values)
    _cross_check(settings)
    return Loaded(
        settings, sources, (*_warnings(sources, environ, mode), *(ignored if settings.tracing.enabled else ()))
    )


def _complete_tracing(values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]) -> None:
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
    warnings = [
        f"{name} is set, but no such setting exists"
        for name in sorted(environ)
        if name.startswith("SIE_") and name not in BY_NAME and name not in client_environment.NAMES
    ]
    here = "with --standalone" if mode == "standalone" else "in queue mode"
    warnings += [
        f"{row.name} is set, but has no effect {here}"
        for row in ROWS
        if row.mode not in (None, mode) and sources[row.name] in ("flag", "environment")
    ]
    return warnings


def default_worker_id() -> str:
    """Return the host name (in Kubernetes that of the pod), or a UUID if the host name is empty or `localhost`."""
    name = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower()).strip("-._")[:63]
    return name if name and name != "localhost" else str(uuid.uuid4())
