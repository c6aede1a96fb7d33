"""Live workers, by their heartbeats, and the way of a request: the choice of a lane."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_broker import Bus, CoreMessage
from sie_contracts.errors import BundleConflict, InvalidInput, NotFound, NotProvisioned, PoolNotFound
from sie_contracts.gpu_type import gpu_type
from sie_contracts.models import bundles as bundling
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.costs import ImageCost
from sie_contracts.settings import Settings
from sie_contracts.wire import heartbeats, topology
from sie_contracts.wire.heartbeats import Fetched, Heartbeat, ModelStatus
from sie_contracts.wire.records import ReservationSpec
from sie_contracts.wire.topology import Lane

STATES = ("loading", "unloading", "loaded", "failed", "available")  # the first that any worker reports is shown
USUAL_LOAD_S = 10.0  # of a model that no worker has loaded yet
_logger = logging.getLogger("sie.gateway.fleet")


def worker_rate(beats: Iterable[Heartbeat]) -> float:
    """Tokens a second that one worker of a lane runs while it is busy; 0 while none has measured it.

    Each measured rate counts by the share of its worker that the work of now takes: what an idle worker ran long ago,
    in larger or smaller batches, would make full workers look half empty or the reverse. Where nobody works it is their
    mean.
    """
    rates = [(beat.rate, sum(status.cost_rate for status in beat.models)) for beat in beats]
    return mean_rate(np.array([rate for rate, _ in rates]), np.array([arriving for _, arriving in rates]))


def mean_rate(rates: NDArray[np.float64], arriving: NDArray[np.float64]) -> float:
    """Compute `worker_rate` for arrays: each worker's rate and of what comes in there, tokens a second, shape
    (workers,) each.
    """
    is_measured = rates > 0
    rates, arriving = rates[is_measured], arriving[is_measured]
    busy = (arriving / rates).sum()
    if busy > 0:
        return float(arriving.sum() / busy)
    return float(rates.mean()) if len(rates) else 0.0


class _LaneWorkers:
    """The healthy workers of one lane, by their id, and which of them have a model loaded."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.loaded: dict[str, set[str]] = {}  # model -> workers
        self.unloading: set[str] = set()  # workers
        self.types: Counter[str] = Counter()  # workers by the type of their device
        self._all: list[Heartbeat] | None = None

    def put(self, beat: Heartbeat) -> None:
        """A worker that is not here."""
        self.beats[beat.worker] = beat
        self.types[_type(beat)] += 1
        self._all = None
        for status in beat.models:
            if status.state == "loaded":
                self.loaded.setdefault(status.model, set()).add(beat.worker)
            elif status.state == "unloading":
                self.unloading.add(beat.worker)

    def drop(self, beat: Heartbeat) -> None:
        del self.beats[beat.worker]
        self.types -= Counter([_type(beat)])  # a type without workers goes
        self._all = None
        self.unloading.discard(beat.worker)
        for status in beat.models:
            workers = self.loaded.get(status.model)
            if workers is not None:
                workers.discard(beat.worker)
                if not workers:
                    del self.loaded[status.model]

    def all(self) -> list[Heartbeat]:
        """By name. Not to be changed: it is the same for all who ask until the next heartbeat."""
        if self._all is None:
            self._all = [self.beats[name] for name in sorted(self.beats)]
        return self._all


class Fleet:
    """The last heartbeat of each worker. Silent past SIE_HEARTBEAT_TIMEOUT_MS it no longer counts; at ten times that it
    is forgotten.

    Indexed by lane and by model: what a request asks costs the same with one worker and with a thousand.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        *,
        spec: Callable[[str], ReservationSpec | None] = lambda pool: None,
    ) -> None:
        """`spec`: what the reservation of a name asks for; None for any other pool."""
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._timeout_s = settings.heartbeat_timeout_ms / 1000
        self._seen: dict[
            str, tuple[float, Heartbeat]
        ] = {}  # in the order of the heartbeats, the oldest first; so is _healthy
        self._healthy: dict[str, Heartbeat] = {}
        self._lanes: dict[Lane, _LaneWorkers] = {}
        self._served: dict[tuple[str, str], dict[str, _LaneWorkers]] = {}  # pool and bundle -> machine profile -> lane
        self._statuses: dict[str, dict[str, ModelStatus]] = {}  # model -> worker -> what it reports
        self._loading_s: dict[str, dict[str, float]] = {}  # worker -> model -> when it was first heard to load it
        self.version = 0  # grows with every heartbeat
        self.listeners: list[Callable[[], None]] = []  # called at every heartbeat
        self._own_pools = frozenset({topology.DEFAULT_POOL, settings.pool})
        self._spec = spec

    async def start(self) -> None:
        await self._bus.subscribe(f"{topology.HEALTH_SUBJECT}.*", self._on_heartbeat)

    async def _on_heartbeat(self, message: CoreMessage) -> None:
        try:
            heartbeat = heartbeats.decode_heartbeat(message.data)
        except msgspec.DecodeError as error:
            _logger.warning("a heartbeat could not be read: %s", error)
            return
        self.note(heartbeat)

    def note(self, heartbeat: Heartbeat) -> None:
        """A worker's heartbeat has come."""
        now_s, worker = self._clock(), heartbeat.worker
        while self._seen:
            name, (seen_s, _) = next(iter(self._seen.items()))
            if now_s - seen_s < 10 * self._timeout_s:
                break
            self._discard(name)
        before = self._loading_s.get(worker, {})
        loading = {
            status.model: before.get(status.model, now_s) for status in heartbeat.models if status.state == "loading"
        }
        self._discard(worker)
        self._seen[worker] = (now_s, heartbeat)
        if loading:
            self._loading_s[worker] = loading
        for status in heartbeat.models:
            self._statuses.setdefault(status.model, {})[worker] = status
        if heartbeat.ready and not heartbeat.leaving:
            self._join(heartbeat)
        self.version += 1
        for listener in self.listeners:
            listener()

    def _discard(self, worker: str) -> None:
        entry = self._seen.pop(worker, None)
        if entry is None:
            return
        self._leave(worker)
        self._loading_s.pop(worker, None)
        for status in entry[1].models:
            statuses = self._statuses.get(status.model)
            if statuses is not None:
                statuses.pop(worker, None)
                if not statuses:
                    del self._statuses[status.model]

    def _join(self, beat: Heartbeat) -> None:
        key = Lane(beat.pool, beat.machine_profile, beat.bundle)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _LaneWorkers()
            self._served.setdefault((beat.pool, beat.bundle), {})[beat.machine_profile] = lane
        self._healthy[beat.worker] = beat
        lane.put(beat)

    def _leave(self, worker: str) -> None:
        beat = self._healthy.pop(worker, None)
        if beat is None:
            return
        key = Lane(beat.pool, beat.machine_profile, beat.bundle)
        lane = self._lanes[key]
        lane.drop(beat)
        if not lane.beats:
            del self._lanes[key]
            del self._served[beat.pool, beat.bundle][beat.machine_profile]
            if not self._served[beat.pool, beat.bundle]:
                del self._served[beat.pool, beat.bundle]

    def _expire(self) -> None:
        """Mark workers with an overdue heartbeat as unhealthy."""
        now_s = self._clock()
        while self._healthy:
            worker = next(iter(self._healthy))
            if now_s - self._seen[worker][0] < self._timeout_s:
                return
            self._leave(worker)

    def workers(self) -> list[tuple[Heartbeat, bool]]:
        """All known workers, by name, each with whether it is healthy: heard of in time, ready and not leaving."""
        self._expire()
        return [(self._seen[name][1], name in self._healthy) for name in sorted(self._seen)]

    def is_heard(self, worker: str) -> bool:
        """Whether its last heartbeat is not overdue, whatever it says."""
        return worker in self._seen and self._clock() - self._seen[worker][0] < self._timeout_s

    def listens(self, worker: str) -> bool:
        """Whether it says that it hears its subject of assignments."""
        return worker in self._seen and self._seen[worker][1].listens

    def healthy(self) -> list[Heartbeat]:
        """By name."""
        self._expire()
        return [self._healthy[name] for name in sorted(self._healthy)]

    def lanes(self) -> dict[Lane, list[Heartbeat]]:
        """The healthy workers of each lane that has one."""
        self._expire()
        return {lane: entry.all() for lane, entry in self._lanes.items()}

    def silent(self) -> dict[Lane, list[Heartbeat]]:
        """The workers whose heartbeat is overdue and was the last of a healthy one, by lane."""
        self._expire()
        silent: dict[Lane, list[Heartbeat]] = {}
        for name, (_, beat) in self._seen.items():
            if name not in self._healthy and beat.ready and not beat.leaving:
                silent.setdefault(Lane(beat.pool, beat.machine_profile, beat.bundle), []).append(beat)
        return silent

    def worker_names(self) -> Collection[str]:
        """The ids of all known workers."""
        return self._seen.keys()

    def of_lane(self, lane: Lane) -> list[Heartbeat]:
        """The healthy workers of a lane, by name."""
        self._expire()
        entry = self._lanes.get(lane)
        return entry.all() if entry is not None else []

    def hosts(self, lane: Lane, residency: str) -> list[Heartbeat]:
        """The healthy workers of a lane that have the model loaded, by name."""
        self._expire()
        entry = self._lanes.get(lane)
        return [entry.beats[name] for name in sorted(entry.loaded.get(residency, ()))] if entry is not None else []

    def crossover_tokens(self, residency: str) -> int:
        """The crossover length of a model (`costs`), as a worker that has it loaded tells; 0 while none does."""
        return max((status.crossover_tokens for status in self._statuses.get(residency, {}).values()), default=0)

    def image_cost(self, residency: str) -> ImageCost:
        """Cost of an image for a model, as a worker that has it loaded tells."""
        statuses = self._statuses.get(residency, {}).values()
        tokens = max((status.image_tokens for status in statuses), default=0)
        vectors = max((status.image_vectors for status in statuses), default=0)
        return ImageCost(tokens, vectors or tokens) if tokens else ImageCost()

    def loading_left_s(self, lane: Lane, residency: str) -> float | None:
        """How long a load of the model that is under way in the lane still takes, at least 1 s; None while nobody loads
        it.

        By what its last load took, on any worker. A worker that unloads something makes room for it, which counts as
        loading.
        """
        self._expire()
        entry = self._lanes.get(lane)
        if entry is None:
            return None
        statuses = self._statuses.get(residency, {})
        since = [
            self._loading_s[name][residency]
            for name, status in statuses.items()
            if status.state == "loading" and name in entry.beats
        ]
        if not since and not entry.unloading:
            return None
        took_s = max((status.load_s for status in statuses.values() if status.load_s), default=USUAL_LOAD_S)
        return max(1.0, took_s - (self._clock() - min(since)) if since else took_s)

    def lane(self, resolved: Resolved, *, pool: str, machine_profile: str, known_pools: Iterable[str]) -> Lane:
        """The lane of a request.

        A machine profile, or type of GPU, that the request names is a constraint; so are those of the model's entry.
        Where the request names none, one with the model loaded comes before one that serves the bundle, and that
        before one without a worker, where the work waits; of several the first in the order of the entry, else of
        SIE_GATEWAY_CONFIGURED_GPUS. A reservation has what it asks for and nothing else.

        A default, SIE_MACHINE_PROFILE of this list, has all work of the bundle `default` that names nothing else, also
        while none of its workers is up.

        Raises PoolNotFound, BundleConflict, InvalidInput with reason gpu_not_configured or machine_profile_excluded,
        and, without a list of machine profiles, NotFound where no worker has the named profile, NotProvisioned while
        there is no worker at all.
        """
        bundle = resolved.bundle
        configured = tuple(name.strip() for name in self._settings.gateway_configured_gpus or ())
        default = self._settings.machine_profile or ""
        spec = None
        if pool not in self._own_pools:
            if pool not in known_pools:
                raise PoolNotFound(f"no pool named {pool!r}", param="X-SIE-Pool")
            spec = self._spec(pool)
        if spec is not None:
            if spec.bundle and spec.bundle not in (resolved.bundles or (bundle,)):
                raise BundleConflict(
                    f"the pool {pool!r} has workers of bundle {spec.bundle!r} alone",
                    param="model",
                    extras={"compatible_bundles": list(resolved.bundles or (bundle,))},
                )
            bundle = spec.bundle or bundle
            configured, default = tuple(spec.gpus), ""
        self._expire()
        serving = self._served.get((pool, bundle), {})
        if machine_profile:
            requested = _configured(machine_profile, configured) if configured else machine_profile
            types = {profile: of_lane.types for profile, of_lane in serving.items()}
            match = _named(requested, types, self._with(serving, resolved.residency))
            machine_profile = match or (requested if configured else self._awaited(requested, pool, bundle))
            if not _permits(resolved, machine_profile):
                raise _excluded(resolved, "X-SIE-MACHINE-PROFILE", f"not on {machine_profile}")
            return Lane(pool, machine_profile, bundle)
        order = [name.lower() for name in configured]
        if resolved.entry.machine_profiles:
            order = _in_order(resolved, order)
            if not order:
                there = f"this {'pool' if spec else 'gateway'} has {', '.join(configured)}"
                raise _excluded(resolved, "X-SIE-Pool" if spec else "model", there)
            serving = {name: workers for name, workers in serving.items() if _permits(resolved, name)}
        elif default in order and bundle == bundling.DEFAULT:
            return Lane(pool, default, bundle)
        ranks = {name: rank for rank, name in enumerate(order)}
        names = self._with(serving, resolved.residency) or serving
        if not names:
            return Lane(pool, order[0] if order else self._settings.profile, bundle)
        return Lane(pool, min(names, key=lambda name: (ranks.get(name, len(ranks)), name)), bundle)

    @staticmethod
    def _with(serving: Mapping[str, _LaneWorkers], residency: str) -> list[str]:
        """The machine profiles of which a worker has the model loaded."""
        return [name for name, of_lane in serving.items() if residency in of_lane.loaded]

    def _awaited(self, requested: str, pool: str, bundle: str) -> str:
        """The machine profile whose lane a request waits in, none of whose workers is ready: one that was heard of, or
        this installation's own. Raises NotFound, NotProvisioned.
        """
        types: dict[str, Counter[str]] = {self._settings.profile: Counter([gpu_type(self._settings.gpu_type or "")])}
        serving = self._served.get((pool, bundle), {})
        for _, beat in self._seen.values():
            if (beat.pool, beat.bundle) == (pool, bundle):
                types.setdefault(beat.machine_profile, Counter())[_type(beat)] += 1
        if (profile := _named(requested, types, ())) is not None and profile not in serving:
            return profile
        there = sorted({*serving, *(kind for of_lane in serving.values() for kind in of_lane.types if kind)})
        extras: dict[str, Any] = {"status": "gpu_not_configured", "gpu": requested[:60], "configured_gpu_types": there}
        if there:
            why = f"no worker is {requested[:60]!r}"
            if mixed := [name for name, of_lane in serving.items() if gpu_type(requested) in of_lane.types]:
                why = f"the workers of {mixed[0]} are of several types: give each type a SIE_MACHINE_PROFILE of its own"
            message = f"X-SIE-MACHINE-PROFILE: {why}; there are {', '.join(there)}"
            raise NotFound(message, reason="gpu_not_found", param="X-SIE-MACHINE-PROFILE", extras=extras)
        message = f"no worker is ready yet, so none is {requested[:60]!r}"
        waited = {"status": "provisioning", "bundle": bundle, "estimated_wait_s": USUAL_LOAD_S, "message": message}
        raise NotProvisioned(message, param="X-SIE-MACHINE-PROFILE", extras={**extras, **waited})

    def model(self, model: str) -> tuple[str, list[tuple[Heartbeat, ModelStatus]]]:
        """The state of a model over all healthy workers, and what each reports of it, by worker."""
        self._expire()
        reports = [
            (self._healthy[name], report) for name, report in sorted(self._reports(model)) if name in self._healthy
        ]
        present = {status.state for _, status in reports}
        return next((state for state in STATES if state in present), "available"), reports

    def _reports(self, model: str) -> Iterable[tuple[str, ModelStatus]]:
        return self._statuses.get(model, {}).items()

    def downloads(self, model: str) -> list[tuple[str, Fetched]]:
        """The workers to whose disk the weights of a model are on their way, ready or not, and how far they are."""
        return [
            (name, status.fetched)
            for name, status in sorted(self._reports(model))
            if status.fetched is not None and self.is_heard(name)
        ]


def _type(beat: Heartbeat) -> str:
    """Name of the worker's GPU, `cpu` without one."""
    return gpu_type(beat.gpu) or beat.device.partition(":")[0]


def _named(requested: str, profiles: Mapping[str, Mapping[str, int]], preferred: Iterable[str]) -> str | None:
    """The machine profile of `profiles` (with its workers by type) that a request means: by name, its spot kind, or the
    type that all of its workers have; of several the `preferred`. None where it means none of them.
    """
    for name in (requested, f"{requested}-spot"):
        if name in profiles:
            return name
    kind = gpu_type(requested)
    fitting = {name for name, types in profiles.items() if kind and set(types) == {kind}}
    return min(fitting.intersection(preferred) or fitting, default=None)


def _permits(resolved: Resolved, machine_profile: str) -> bool:
    """Whether the model's entry lets it run there: it names this machine profile, that of which this is the spot kind,
    or none at all.
    """
    allowed = resolved.entry.machine_profiles
    return not allowed or bool({machine_profile, machine_profile.removesuffix("-spot")}.intersection(allowed))


def _in_order(resolved: Resolved, configured: Sequence[str]) -> list[str]:
    """The machine profiles of the model's entry, the first one first: those that are configured, where a list is."""
    allowed = resolved.entry.machine_profiles
    if not configured:
        return list(allowed)
    return [name for profile in allowed for name in (profile, f"{profile}-spot") if name in configured]


def _excluded(resolved: Resolved, param: str, why: str) -> InvalidInput:
    allowed = resolved.entry.machine_profiles
    return InvalidInput(
        f"{param}: {resolved.entry.id} runs on {', '.join(allowed)} alone (machine_profiles of its entry), {why}",
        reason="machine_profile_excluded",
        param=param,
        extras={"machine_profiles": list(allowed)},
    )


def _configured(requested: str, configured: tuple[str, ...]) -> str:
    names = {name.lower(): name.lower() for name in configured}
    key = requested.strip().lower()
    profile = names.get(key) or names.get(f"{key}-spot")
    if profile is None:
        raise InvalidInput(
            f"X-SIE-MACHINE-PROFILE: {key[:60]!r} is not configured",
            reason="gpu_not_configured",
            param="X-SIE-MACHINE-PROFILE",
            extras={"status": "gpu_not_configured", "gpu": key[:60], "configured_gpu_types": list(configured)},
        )
    return profile
