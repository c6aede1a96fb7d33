"""Which workers live, by their own heartbeats, and where a request goes: the choice of a lane."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, CoreMessage
from sie_contracts.catalogue import Resolved
from sie_contracts.errors import InvalidInput, PoolNotFound
from sie_contracts.messages import Heartbeat, ModelStatus
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane

_STATES = ("loading", "unloading", "loaded", "failed", "available")  # the first that any worker reports is shown
_logger = logging.getLogger("sie.gateway.fleet")


class Fleet:
    """The last heartbeat of each worker. Silent past SIE_HEARTBEAT_TIMEOUT_MS it no longer counts; at ten times that it is forgotten."""

    def __init__(self, broker: Broker, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._settings = settings
        self._clock = clock
        self._timeout_s = settings.heartbeat_timeout_ms / 1000
        self._seen: dict[str, tuple[float, Heartbeat]] = {}

    async def start(self) -> None:
        await self._broker.subscribe(f"{topology.HEALTH_SUBJECT}.*", self._on_heartbeat)

    async def _on_heartbeat(self, message: CoreMessage) -> None:
        try:
            heartbeat = messages.decode_heartbeat(message.data)
        except msgspec.DecodeError as error:
            _logger.warning("a heartbeat could not be read: %s", error)
            return
        self.note(heartbeat)

    def note(self, heartbeat: Heartbeat) -> None:
        now_s = self._clock()
        self._seen = {name: entry for name, entry in self._seen.items() if now_s - entry[0] < 10 * self._timeout_s}
        self._seen[heartbeat.worker] = (now_s, heartbeat)

    def workers(self) -> list[tuple[Heartbeat, bool]]:
        """All known workers, by name, each with whether it is healthy: heard of in time, ready and not leaving."""
        now_s = self._clock()
        return [
            (beat, now_s - seen_s < self._timeout_s and beat.ready and not beat.leaving)
            for _, (seen_s, beat) in sorted(self._seen.items())
        ]

    def healthy(self) -> list[Heartbeat]:
        return [beat for beat, is_healthy in self.workers() if is_healthy]

    def lane(self, resolved: Resolved, *, pool: str, machine_profile: str, known_pools: Iterable[str]) -> Lane:
        """The lane of a request. A named machine profile is a constraint; without one a worker that has the model is preferred.

        With no worker of the bundle up, work waits in the lane of the first configured machine profile, or of this installation's own.
        Raises PoolNotFound, and InvalidInput with reason gpu_not_configured.
        """
        if pool not in known_pools:
            raise PoolNotFound(f"no pool named {pool!r}", param="X-SIE-Pool")
        bundle = resolved.entry.bundle
        serving = [beat for beat in self.healthy() if beat.pool == pool and beat.bundle == bundle]
        configured = self._settings.gateway_configured_gpus or ()
        if machine_profile:
            if configured:
                machine_profile = _configured(machine_profile, configured)
            elif machine_profile not in {beat.machine_profile for beat in serving}:
                machine_profile = ""  # a single kind of node, unnamed: any name means it
        if not machine_profile:
            loaded = [beat for beat in serving if any(m.model == resolved.residency and m.state == "loaded" for m in beat.models)]
            names = sorted(beat.machine_profile for beat in loaded or serving)
            machine_profile = names[0] if names else (configured[0].lower() if configured else self._settings.profile)
        return Lane(pool, machine_profile, bundle)

    def worker_infos(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Healthy and unhealthy workers, as `/health` shows them."""
        healthy: list[dict[str, Any]] = []
        unhealthy: list[dict[str, Any]] = []
        for beat, is_healthy in self.workers():
            info = {
                "name": beat.worker, "url": None, "gpu": beat.machine_profile, "gpu_count": beat.gpu_count, "pool": beat.pool,
                "loaded_models": [status.model for status in beat.models if status.state == "loaded"], "queue_depth": beat.queue_depth,
                "memory_used_bytes": beat.memory_used_bytes, "memory_total_bytes": beat.memory_total_bytes, "healthy": is_healthy,
                "bundle": beat.bundle, "bundle_config_hash": beat.config_epoch, "device": beat.device,
            }  # fmt: skip
            (healthy if is_healthy else unhealthy).append(info)
        return healthy, unhealthy

    def model(self, model: str) -> tuple[str, list[tuple[Heartbeat, ModelStatus]]]:
        """The state of a model over all healthy workers, and what each reports of it."""
        reports = [(beat, status) for beat in self.healthy() for status in beat.models if status.model == model]
        present = {status.state for _, status in reports}
        return next((state for state in _STATES if state in present), "available"), reports


def _configured(wanted: str, configured: tuple[str, ...]) -> str:
    names = {name.lower(): name.lower() for name in configured}
    key = wanted.strip().lower()
    found = names.get(key) or names.get(f"{key}-spot")
    if found is None:
        raise InvalidInput(
            f"X-SIE-MACHINE-PROFILE: {key[:60]!r} is not configured", reason="gpu_not_configured", param="X-SIE-MACHINE-PROFILE",
            extras={"status": "gpu_not_configured", "gpu": key[:60], "configured_gpu_types": list(configured)},
        )
    return found
