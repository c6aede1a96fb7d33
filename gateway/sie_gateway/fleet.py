"""Which workers live, by their own heartbeats, and where a request goes: the choice of a lane."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, CoreMessage
from sie_contracts.catalogue import Resolved
from sie_contracts.errors import BundleConflict, InvalidInput, PoolNotFound
from sie_contracts.messages import Fetched, Heartbeat, ModelStatus, PoolSpec
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane

STATES = ("loading", "unloading", "loaded", "failed", "available")  # the first that any worker reports is shown
USUAL_LOAD_S = 10.0  # of a model that no worker has loaded yet
_logger = logging.getLogger("sie.gateway.fleet")


def worker_rate(beats: Iterable[Heartbeat]) -> float:
    """Tokens a second that one worker of a lane runs while it is busy; 0 while none has measured it.

    Each measured rate counts by the share of its worker that the work of now takes: what an idle worker ran long ago, in larger or smaller
    batches, would make full workers look half empty or the reverse. Where nobody works it is their mean.
    """
    known = [(beat.rate, sum(status.cost_rate for status in beat.models)) for beat in beats if beat.rate > 0]
    busy = sum(arriving / rate for rate, arriving in known)
    if busy > 0:
        return sum(arriving for _, arriving in known) / busy
    return sum(rate for rate, _ in known) / len(known) if known else 0.0


class Fleet:
    """The last heartbeat of each worker. Silent past SIE_HEARTBEAT_TIMEOUT_MS it no longer counts; at ten times that it is forgotten."""

    def __init__(self, broker: Broker, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._settings = settings
        self._clock = clock
        self._timeout_s = settings.heartbeat_timeout_ms / 1000
        self._seen: dict[str, tuple[float, Heartbeat]] = {}
        self._loaded: dict[str, frozenset[str]] = {}
        self._loading_s: dict[str, dict[str, float]] = {}  # worker -> model -> when it was first heard to load it
        self.version = 0  # grows with every heartbeat
        self.listeners: list[Callable[[], None]] = []  # called at every heartbeat
        self.spec: Callable[[str], PoolSpec | None] = lambda pool: None  # of a pool that is a reservation

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
        self._loaded = {name: models for name, models in self._loaded.items() if name in self._seen}
        self._loaded[heartbeat.worker] = frozenset(status.model for status in heartbeat.models if status.state == "loaded")
        before = self._loading_s.get(heartbeat.worker, {})
        loading = {status.model: before.get(status.model, now_s) for status in heartbeat.models if status.state == "loading"}
        self._loading_s = {name: models for name, models in self._loading_s.items() if name in self._seen and name != heartbeat.worker}
        if loading:
            self._loading_s[heartbeat.worker] = loading
        self.version += 1
        for listener in self.listeners:
            listener()

    def workers(self) -> list[tuple[Heartbeat, bool]]:
        """All known workers, by name, each with whether it is healthy: heard of in time, ready and not leaving."""
        now_s = self._clock()
        return [
            (beat, now_s - seen_s < self._timeout_s and beat.ready and not beat.leaving)
            for _, (seen_s, beat) in sorted(self._seen.items())
        ]

    def is_heard(self, worker: str) -> bool:
        """Whether its last heartbeat is not overdue, whatever it says."""
        return worker in self._seen and self._clock() - self._seen[worker][0] < self._timeout_s

    def healthy(self) -> list[Heartbeat]:
        return [beat for beat, is_healthy in self.workers() if is_healthy]

    def of_lane(self, lane: Lane) -> list[Heartbeat]:
        """The healthy workers of a lane."""
        return [
            beat for beat in self.healthy()
            if beat.pool == lane.pool and beat.bundle == lane.bundle and beat.machine_profile == lane.machine_profile
        ]  # fmt: skip

    def hosts(self, lane: Lane, residency: str) -> list[Heartbeat]:
        """The healthy workers of a lane that have the model loaded."""
        return [beat for beat in self.of_lane(lane) if _state(beat, residency) == "loaded"]

    def loading_left_s(self, lane: Lane, residency: str) -> float | None:
        """How long a load of the model that is under way in the lane still takes, at least 1 s; None while nobody loads it.

        By what its last load took, on any worker. A worker that unloads something makes room for it, which counts as loading.
        """
        beats = self.of_lane(lane)
        since = [self._loading_s[beat.worker][residency] for beat in beats if residency in self._loading_s.get(beat.worker, {})]
        if not since and not any(status.state == "unloading" for beat in beats for status in beat.models):
            return None
        known = [status.load_s for _, beat in self._seen.values() for status in beat.models if status.model == residency and status.load_s]
        took_s = max(known, default=USUAL_LOAD_S)
        return max(1.0, took_s - (self._clock() - min(since)) if since else took_s)

    def lane(self, resolved: Resolved, *, pool: str, machine_profile: str, known_pools: Iterable[str]) -> Lane:
        """The lane of a request. A named machine profile is a constraint; without one a worker that has the model is preferred.

        With no worker of the bundle up, work waits in the lane of the first machine profile that a reservation asks for or that is
        configured, or of this installation's own. A reservation has what it asks for and nothing else.
        Raises PoolNotFound, BundleConflict, and InvalidInput with reason gpu_not_configured.
        """
        if pool not in known_pools:
            raise PoolNotFound(f"no pool named {pool!r}", param="X-SIE-Pool")
        bundle = resolved.bundle
        configured = self._settings.gateway_configured_gpus or ()
        if (spec := self.spec(pool)) is not None:
            if spec.bundle and spec.bundle not in (resolved.bundles or (bundle,)):
                raise BundleConflict(
                    f"the pool {pool!r} has workers of bundle {spec.bundle!r} alone", param="model",
                    extras={"compatible_bundles": list(resolved.bundles or (bundle,))},
                )  # fmt: skip
            bundle = spec.bundle or bundle
            configured = tuple(spec.gpus)
        serving = [beat for beat in self.healthy() if beat.pool == pool and beat.bundle == bundle]
        if machine_profile:
            if configured:
                machine_profile = _configured(machine_profile, configured)
            elif machine_profile not in {beat.machine_profile for beat in serving}:
                machine_profile = ""  # a single kind of node, unnamed: any name means it
        if not machine_profile:
            loaded = [beat for beat in serving if resolved.residency in self._loaded[beat.worker]]
            names = sorted(beat.machine_profile for beat in loaded or serving)
            machine_profile = names[0] if names else (configured[0].lower() if configured else self._settings.profile)
        return Lane(pool, machine_profile, bundle)

    def model(self, model: str) -> tuple[str, list[tuple[Heartbeat, ModelStatus]]]:
        """The state of a model over all healthy workers, and what each reports of it."""
        reports = [(beat, status) for beat in self.healthy() for status in beat.models if status.model == model]
        present = {status.state for _, status in reports}
        return next((state for state in STATES if state in present), "available"), reports

    def downloads(self, model: str) -> list[tuple[str, Fetched]]:
        """The workers to whose disk the weights of a model are on their way, ready or not, and how far they are."""
        heard = [beat for beat, _ in self.workers() if self.is_heard(beat.worker)]
        return [(beat.worker, each.fetched) for beat in heard for each in beat.models if each.model == model and each.fetched is not None]


def _state(beat: Heartbeat, model: str) -> str:
    return next((status.state for status in beat.models if status.model == model), "available")


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
