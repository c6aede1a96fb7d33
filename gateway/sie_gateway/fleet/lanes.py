"""Live workers, known from their heartbeats, and the choice of a lane (pool, machine profile and bundle) for a request.
Each worker serves one lane.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_broker import Bus, CoreMessage
from sie_contracts.errors import UNDECODABLE, BundleConflict, InvalidInput, NotFound, NotProvisioned, PoolNotFound
from sie_contracts.gpu_type import gpu_type
from sie_contracts.models import bundles as bundling
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.costs import ImageCost
from sie_contracts.settings import Settings
from sie_contracts.wire import heartbeats, topology
from sie_contracts.wire.heartbeats import Fetched, Heartbeat, ModelStatus
from sie_contracts.wire.records import ReservationSpec
from sie_contracts.wire.topology import Lane

# states of a model: if workers report different states, the model has the first of these that a worker reports
STATES = ("loading", "unloading", "loaded", "failed", "available")
LOADS = ("loading", "failed")  # states of a model that are shown even if the worker that reports them is not ready
ON_DISK_S = 5.0  # seconds before the list of models on workers' disks is computed again
NO_DISK_S = 0.5  # replaces ON_DISK_S while the list is empty: models soon appear in it while a cluster starts
# Seconds by which the heartbeats of a live worker may be late if the NATS server of the worker or of this gateway
# freezes: up to 15 s until the connection counts as lost (three pings), and the time to open a new one.
LOST_S = 20.0
MAX_LANES = 16  # largest number of lanes stored for a worker that moves between lanes: only the newest are stored
USUAL_LOAD_S = 10.0  # seconds that a load is assumed to take, for a model that no worker has loaded yet
_logger = logging.getLogger("sie.gateway.fleet")


def worker_rate(beats: Iterable[Heartbeat]) -> float:
    """Return the weighted mean of the workers' rates (tokens per second that a busy worker computes); 0 if no worker
    has measured its rate.

    The weight of a worker is the share of time for which it is busy. An idle worker has the weight 0, because its last
    rate may be from batches of other sizes. If no worker is busy, all measured rates have the same weight.
    """
    rates = [(beat.rate, sum(status.cost_rate for status in beat.models)) for beat in beats]
    return mean_rate(np.array([rate for rate, _ in rates]), np.array([arriving for _, arriving in rates]))


def mean_rate(rates: NDArray[np.float64], arriving: NDArray[np.float64]) -> float:
    """Compute `worker_rate` from two arrays of shape [workers], both in tokens per second: the measured rates, and the
    arrival rates.
    """
    is_measured = rates > 0
    rates, arriving = rates[is_measured], arriving[is_measured]
    busy = (arriving / rates).sum()
    if busy > 0:
        return float(arriving.sum() / busy)
    return float(rates.mean()) if len(rates) else 0.0


class _LaneWorkers:
    """Healthy workers of one lane by their id, and for each model the workers that have it loaded."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.loaded: dict[str, set[str]] = {}  # model -> workers that have the model loaded
        self.unloading: set[str] = set()  # workers that unload a model
        self.types: Counter[str] = Counter()  # number of workers by the type of their device
        self._all: list[Heartbeat] | None = None

    def put(self, beat: Heartbeat) -> None:
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
        self.types -= Counter([_type(beat)])  # the operator -= also removes types whose count becomes 0
        self._all = None
        self.unloading.discard(beat.worker)
        for status in beat.models:
            workers = self.loaded.get(status.model)
            if workers is not None:
                workers.discard(beat.worker)
                if not workers:
                    del self.loaded[status.model]

    def all(self) -> list[Heartbeat]:
        """Return the heartbeats, sorted by worker name. Callers share this list and must not change it."""
        if self._all is None:
            self._all = [self.beats[name] for name in sorted(self.beats)]
        return self._all


_NO_WORKERS = _LaneWorkers()


class Fleet:
    """Last heartbeat of each worker. A worker without a heartbeat for SIE_HEARTBEAT_TIMEOUT_MS is not healthy. After
    ten times this limit, the fleet removes the worker. If all workers are silent for SIE_HEARTBEAT_TIMEOUT_MS, for
    example without the broker, the time to removal begins again at the next heartbeat of any worker. Because of indexes
    by lane and by model, the time of a look-up does not depend on the number of workers. The argument `residency` of
    methods names a model with one set of load options: `model` or `model:profile`.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        *,
        spec: Callable[[str], ReservationSpec | None] = lambda pool: None,
    ) -> None:
        """`spec` returns the spec of a reservation by its name; None for any other pool."""
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._timeout_s = settings.heartbeat_timeout_ms / 1000
        # worker -> (time of its last heartbeat, this heartbeat), oldest heartbeat first; `_healthy` has the same order
        self._seen: dict[str, tuple[float, Heartbeat]] = {}
        self._healthy: dict[str, Heartbeat] = {}
        # time of the first heartbeat after all workers were silent for SIE_HEARTBEAT_TIMEOUT_MS
        self._hearing_s = -math.inf
        self._lanes: dict[Lane, _LaneWorkers] = {}
        # (pool, bundle) -> machine profile -> workers of this lane
        self._served: dict[tuple[str, str], dict[str, _LaneWorkers]] = {}
        self._statuses: dict[str, dict[str, ModelStatus]] = {}  # model -> worker -> the status that the worker reports
        # worker -> model -> time when the worker first reported that it loads the model
        self._loading_s: dict[str, dict[str, float]] = {}
        # worker -> lane -> time of the last heartbeat at which the worker may have had work of this lane
        self._working_s: dict[str, dict[Lane, float]] = {}
        # (time of the last computation, ids of the models on the workers' disks)
        self._on_disk: tuple[float, frozenset[str]] = (-math.inf, frozenset())
        # last time at which `is_lane_alive` saw no connection to the broker
        self._disconnected_s = -math.inf
        self._configured = tuple(name.strip() for name in settings.gateway_configured_gpus or ())
        self.version = 0  # number of heartbeats; `Admission` looks up the workers again if this number has changed
        self.listeners: list[Callable[[], None]] = []  # functions to call at every heartbeat
        self.first_listeners: list[Callable[[], None]] = []  # to call when a lane gets its first healthy worker
        self._own_pools = frozenset({topology.DEFAULT_POOL, settings.pool})
        self._spec = spec

    async def start(self) -> None:
        await self._bus.subscribe(f"{topology.HEALTH_SUBJECT}.*", self._on_heartbeat)

    async def _on_heartbeat(self, message: CoreMessage) -> None:
        try:
            heartbeat = heartbeats.decode_heartbeat(message.data)
        except UNDECODABLE as error:
            _logger.warning("the gateway ignores a worker's heartbeat that it cannot decode: %s", error)
            return
        self.note(heartbeat)

    def note(self, heartbeat: Heartbeat) -> None:
        now_s, worker = self._clock(), heartbeat.worker
        if self._seen and now_s - next(reversed(self._seen.values()))[0] >= self._timeout_s:
            self._hearing_s = now_s
        while self._seen:
            name, (seen_s, _) = next(iter(self._seen.items()))
            if now_s - max(seen_s, self._hearing_s) < 10 * self._timeout_s:
                break
            self._discard(name)
        before = self._loading_s.get(worker, {})
        loading = {
            status.model: before.get(status.model, now_s) for status in heartbeat.models if status.state == "loading"
        }
        working = {
            lane: now_s if heartbeat.queue_depth else seen_s
            for lane, seen_s in self._working_s.get(worker, {}).items()
            if lane != heartbeat.lane and (heartbeat.queue_depth or seen_s > now_s - self._timeout_s - LOST_S)
        }
        had_workers = heartbeat.lane in self._lanes
        self._discard(worker)
        self._seen[worker] = (now_s, heartbeat)
        self._working_s[worker] = dict([*working.items(), (heartbeat.lane, now_s)][-MAX_LANES:])
        if loading:
            self._loading_s[worker] = loading
        for status in heartbeat.models:
            self._statuses.setdefault(status.model, {})[worker] = status
        if heartbeat.ready and not heartbeat.leaving:
            self._join(heartbeat)
            if not had_workers:
                for listener in self.first_listeners:
                    listener()
        self.version += 1
        for listener in self.listeners:
            listener()

    def _discard(self, worker: str) -> None:
        entry = self._seen.pop(worker, None)
        if entry is None:
            return
        self._leave(worker)
        self._loading_s.pop(worker, None)
        self._working_s.pop(worker, None)
        for status in entry[1].models:
            statuses = self._statuses.get(status.model)
            if statuses is not None:
                statuses.pop(worker, None)
                if not statuses:
                    del self._statuses[status.model]

    def _join(self, beat: Heartbeat) -> None:
        key = beat.lane
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
        key = beat.lane
        lane = self._lanes[key]
        lane.drop(beat)
        if not lane.beats:
            del self._lanes[key]
            del self._served[beat.pool, beat.bundle][beat.machine_profile]
            if not self._served[beat.pool, beat.bundle]:
                del self._served[beat.pool, beat.bundle]

    def _expire(self) -> None:
        now_s = self._clock()
        while self._healthy:
            worker = next(iter(self._healthy))
            if now_s - self._seen[worker][0] < self._timeout_s:
                return
            self._leave(worker)

    def workers(self) -> list[tuple[Heartbeat, bool]]:
        """Return pairs (last heartbeat of a worker, True if the worker is healthy) for all workers, sorted by name. A
        healthy worker is ready, does not leave, and sends its heartbeats in time.
        """
        self._expire()
        return [(self._seen[name][1], name in self._healthy) for name in sorted(self._seen)]

    def is_starting(self, worker: str) -> bool:
        """Return True if a worker sends its heartbeats in time, and is neither ready nor leaving."""
        return self.is_heard(worker) and not (self._seen[worker][1].ready or self._seen[worker][1].leaving)

    def is_heard(self, worker: str) -> bool:
        """Return True if the last heartbeat of a worker is not overdue, even if the worker is not ready."""
        return worker in self._seen and self._clock() - self._seen[worker][0] < self._timeout_s

    def is_lane_alive(self, lane: Lane) -> bool:
        """Return True if a live worker may have messages of this lane. A worker, ready or not, is live for
        SIE_HEARTBEAT_TIMEOUT_MS plus LOST_S after its last heartbeat. A worker that has moved to another pool first
        finishes the messages of its earlier lane: that lane stays alive for the same period after the last heartbeat
        that reported unfinished work. All lanes are alive during the same period after a loss of the connection to the
        broker, because the gateway may have missed heartbeats.
        """
        now_s = self._clock()
        since_s = now_s - self._timeout_s - LOST_S
        if not self._bus.connected:
            self._disconnected_s = now_s
        return self._disconnected_s > since_s or any(
            lanes.get(lane, -math.inf) > since_s for lanes in self._working_s.values()
        )

    def listens(self, worker: str) -> bool:
        """Return True if a worker reports that it subscribes to its assignment subject. Gateways publish to this
        subject if the pool of the worker may have changed, and to check the worker's connection.
        """
        return worker in self._seen and self._seen[worker][1].listens

    def healthy(self) -> list[Heartbeat]:
        """Return the healthy workers in the order of names."""
        self._expire()
        return [self._healthy[name] for name in sorted(self._healthy)]

    def lanes(self) -> dict[Lane, list[Heartbeat]]:
        """Return lane -> heartbeats of its healthy workers. Lanes without a healthy worker are omitted."""
        self._expire()
        return {lane: entry.all() for lane, entry in self._lanes.items()}

    def silent(self) -> dict[Lane, list[Heartbeat]]:
        """Return lane -> last heartbeats of workers that were ready and not leaving, but whose next heartbeat is
        overdue.
        """
        self._expire()
        silent: dict[Lane, list[Heartbeat]] = {}
        for name, (_, beat) in self._seen.items():
            if name not in self._healthy and beat.ready and not beat.leaving:
                silent.setdefault(beat.lane, []).append(beat)
        return silent

    def worker_names(self) -> Collection[str]:
        return self._seen.keys()

    def of_lane(self, lane: Lane) -> list[Heartbeat]:
        """Return the healthy workers of a lane in the order of names."""
        return self._workers_of(lane).all()

    def _workers_of(self, lane: Lane) -> _LaneWorkers:
        self._expire()
        return self._lanes.get(lane, _NO_WORKERS)

    def hosts(self, lane: Lane, residency: str) -> list[Heartbeat]:
        """Return the healthy workers of a lane that have the model loaded, in the order of names."""
        workers = self._workers_of(lane)
        return [workers.beats[name] for name in sorted(workers.loaded.get(residency, ()))]

    def loaded(self, lane: Lane, residency: str) -> list[ModelStatus]:
        """Return the reports of the healthy workers of a lane that have the model loaded."""
        return [self._statuses[residency][name] for name in self._workers_of(lane).loaded.get(residency, ())]

    def crossover_tokens(self, residency: str) -> int:
        """Return the length of a text, in tokens, at which attention takes as long as all other layers of the model; 0
        if no worker reports this length.
        """
        return max((status.crossover_tokens for status in self._statuses.get(residency, {}).values()), default=0)

    def image_cost(self, residency: str) -> ImageCost:
        """Return the cost of an image that workers report for a model; a default cost if no worker reports a cost."""
        statuses = self._statuses.get(residency, {}).values()
        tokens = max((status.image_tokens for status in statuses), default=0)
        vectors = max((status.image_vectors for status in statuses), default=0)
        return ImageCost(tokens, vectors or tokens) if tokens else ImageCost()

    def loading_left_s(self, lane: Lane, residency: str) -> float | None:
        """Return the expected seconds until a load of the model in the lane ends; None if no worker loads the model.
        Each worker reports how long its last load of the model took. The estimate is the longest of these times, minus
        the seconds since the earliest load in progress began, but at least 1. A worker that unloads any model counts as
        one that loads this model: workers unload a model to free memory for the next.
        """
        workers = self._workers_of(lane)
        statuses = self._statuses.get(residency, {})
        since = [
            self._loading_s[name][residency]
            for name, status in statuses.items()
            if status.state == "loading" and name in workers.beats
        ]
        if not since and not workers.unloading:
            return None
        took_s = max((status.load_s for status in statuses.values() if status.load_s), default=USUAL_LOAD_S)
        spent_s = self._clock() - min(since) if since else 0.0
        return max(1.0, took_s - spent_s)

    def lane(self, resolved: Resolved, *, pool: str, machine_profile: str, known_pools: Iterable[str]) -> Lane:
        """Return the lane of a request. `pool`: the pool that it names; empty for the pool of this installation.

        The request and the model's catalogue entry may restrict the machine profiles. Among the allowed profiles, the
        gateway prefers a profile with a worker that has the model loaded, then a profile with a worker of the bundle,
        then a profile without a worker, where the request waits. Between equally good profiles, the order of the list
        in the model's entry decides. If the entry has no list, the order of the configured profiles decides:
        SIE_GATEWAY_CONFIGURED_GPUS, or for a reservation the machine profiles of its spec.

        If SIE_MACHINE_PROFILE names a configured profile, an unrestricted request for the bundle `default` uses this
        profile, even without a live worker. Requests to reservations ignore SIE_MACHINE_PROFILE.

        Raises PoolNotFound, BundleConflict, InvalidInput with the reason `gpu_not_configured` or
        `machine_profile_excluded`. If no machine profiles are configured and no worker has the requested profile,
        raises NotFound, or NotProvisioned if the pool has no ready worker with the bundle.
        """
        pool, bundle, residency = pool or self._settings.pool, resolved.bundle, resolved.residency
        configured = self._configured
        default = self._settings.machine_profile or ""
        spec = None
        if pool not in self._own_pools:
            if pool not in known_pools:
                raise PoolNotFound(f"no pool named {pool!r}", param="X-SIE-Pool")
            spec = self._spec(pool)
        if spec is not None:
            if spec.bundle and spec.bundle not in (resolved.bundles or (bundle,)):
                raise BundleConflict(
                    f"the workers of pool {pool!r} have the bundle {spec.bundle!r}, which does not serve this model",
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
            match = _named(requested, types, [name for name, there in serving.items() if residency in there.loaded])
            machine_profile = match or (requested if configured else self._awaited(requested, pool, bundle))
            if not _permits(resolved, machine_profile):
                raise _excluded(resolved, "X-SIE-MACHINE-PROFILE", f"not on {machine_profile}")
            return Lane(pool, machine_profile, bundle)
        order = list(map(str.lower, configured))
        if resolved.entry.machine_profiles:
            order = _in_order(resolved, order)
            if not order:
                there = f"this {'pool' if spec else 'gateway'} has {', '.join(configured)}"
                raise _excluded(resolved, "X-SIE-Pool" if spec else "model", there)
            serving = {name: workers for name, workers in serving.items() if _permits(resolved, name)}
        elif default in order and bundle == bundling.DEFAULT:
            return Lane(pool, default, bundle)
        names = [name for name, there in serving.items() if residency in there.loaded] or serving
        if not names:
            return Lane(pool, order[0] if order else self._settings.profile, bundle)
        if len(names) == 1:
            return Lane(pool, next(iter(names)), bundle)
        ranks = {name: rank for rank, name in enumerate(order)}
        return Lane(pool, min(names, key=lambda name: (ranks.get(name, len(ranks)), name)), bundle)

    def _awaited(self, requested: str, pool: str, bundle: str) -> str:
        """Return the requested machine profile, which has no ready worker: the request waits in the lane of this
        profile. `requested` must be a machine profile or GPU type of the settings or of a worker that has sent a
        heartbeat. Raises NotFound, NotProvisioned.
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
            why = f"no worker matches {requested[:60]!r}"
            if mixed := [name for name, of_lane in serving.items() if gpu_type(requested) in of_lane.types]:
                why = f"the workers of {mixed[0]} have several GPU types: give each type a separate SIE_MACHINE_PROFILE"
            message = f"X-SIE-MACHINE-PROFILE: {why}; profiles and GPU types: {', '.join(there)}"
            raise NotFound(message, reason="gpu_not_found", param="X-SIE-MACHINE-PROFILE", extras=extras)
        message = f"no worker is ready yet, so none matches {requested[:60]!r}"
        waited = {"status": "provisioning", "bundle": bundle, "estimated_wait_s": USUAL_LOAD_S, "message": message}
        raise NotProvisioned(message, param="X-SIE-MACHINE-PROFILE", extras={**extras, **waited})

    def model(self, model: str) -> tuple[str, list[tuple[Heartbeat, ModelStatus]]]:
        """Return the state of a model over all healthy workers, and the report of each worker, sorted by worker name. A
        starting worker is included only if it loads the model or has failed to load it.
        """
        self._expire()
        reports = [
            (self._seen[name][1], report)
            for name, report in sorted(self._statuses.get(model, {}).items())
            if name in self._healthy or (report.state in LOADS and self.is_starting(name))
        ]
        present = {status.state for _, status in reports}
        return next((state for state in STATES if state in present), "available"), reports

    def on_disk(self) -> frozenset[str]:
        """Return the models on the disks of healthy or starting workers. The result may be up to ON_DISK_S old."""
        since_s, models = self._on_disk
        if (now_s := self._clock()) - since_s >= (ON_DISK_S if models else NO_DISK_S):
            models = frozenset(
                model
                for name, (_, beat) in self._seen.items()
                if self.is_heard(name) and not beat.leaving
                for model in beat.on_disk
            )
            self._on_disk = (now_s, models)
        return models

    def reported(self) -> frozenset[str]:
        """Return the ids of the models that workers report. A profile after the colon of an id is left out."""
        return frozenset(model.partition(":")[0] for model in self._statuses)

    def downloads(self, model: str) -> list[tuple[str, Fetched]]:
        """Return the workers, ready or not, that download the weights of a model, with their progress."""
        return [
            (name, status.fetched)
            for name, status in sorted(self._statuses.get(model, {}).items())
            if status.fetched is not None and self.is_heard(name)
        ]


def _type(beat: Heartbeat) -> str:
    """Return the type of the worker's GPU, or without a GPU the type of its device, such as `cpu`."""
    return gpu_type(beat.gpu) or beat.device.partition(":")[0]


def _named(requested: str, profiles: Mapping[str, Mapping[str, int]], preferred: Iterable[str]) -> str | None:
    """Return the machine profile that a request names; None if no machine profile matches. A request may use the name
    of a profile, the name without `-spot`, or a GPU type that all workers of the profile have. If several profiles have
    this GPU type, prefer a profile in `preferred`. `profiles`: machine profile -> GPU type -> number of workers.
    """
    for name in (requested, f"{requested}-spot"):
        if name in profiles:
            return name
    kind = gpu_type(requested)
    fitting = {name for name, types in profiles.items() if kind and set(types) == {kind}}
    return min(fitting.intersection(preferred) or fitting, default=None)


def _permits(resolved: Resolved, machine_profile: str) -> bool:
    """Return True if the model's entry allows a machine profile. An entry without a list allows all profiles. If the
    list has a profile, its spot variant (`-spot`) is allowed too.
    """
    allowed = resolved.entry.machine_profiles
    return not allowed or bool({machine_profile, machine_profile.removesuffix("-spot")}.intersection(allowed))


def _in_order(resolved: Resolved, configured: Sequence[str]) -> list[str]:
    """Return the configured machine profiles, spot variants included, that the model's entry allows, in the order of
    the entry. If no machine profile is configured, return all profiles in the entry.
    """
    allowed = resolved.entry.machine_profiles
    if not configured:
        return list(allowed)
    return [name for profile in allowed for name in (profile, f"{profile}-spot") if name in configured]


def _excluded(resolved: Resolved, param: str, why: str) -> InvalidInput:
    allowed = resolved.entry.machine_profiles
    return InvalidInput.at(
        param,
        f"{resolved.entry.id} runs only on {', '.join(allowed)} (machine_profiles of its entry), {why}",
        reason="machine_profile_excluded",
        extras={"machine_profiles": list(allowed)},
    )


def _configured(requested: str, configured: tuple[str, ...]) -> str:
    names = {name.lower() for name in configured}
    key = requested.strip().lower()
    profile = key if key in names else f"{key}-spot"
    if profile not in names:
        raise InvalidInput.at(
            "X-SIE-MACHINE-PROFILE",
            f"expected one of {', '.join(configured)}, got {key[:60]!r}",
            reason="gpu_not_configured",
            extras={"status": "gpu_not_configured", "gpu": key[:60], "configured_gpu_types": list(configured)},
        )
    return profile
