"""Who is let into the queue, and when: refusal by predicted wait, and the windows of keys around `window`.

    chunks ──► would it wait past its budget? ──► room now: permits at once
                        │ yes                 └─► no room: its turn among the keys, as results come back
                        ▼
                   QUEUE_FULL with the estimate

Every permit is given back once: when its chunk's result is taken, or when its request ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sie_contracts.broker import Broker
from sie_contracts.errors import QueueFull
from sie_contracts.messages import PRIORITIES, Heartbeat, Ok, Priority, WorkResult
from sie_contracts.runtime.process import Stop
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_gateway.backlog import Backlog
from sie_gateway.fleet import Fleet
from sie_gateway.metrics import Metrics
from sie_gateway.peers import Peers, mean_cost
from sie_gateway.prediction import retry_after_s, tokens_ahead, wait_s
from sie_gateway.window import BatchTimes, Bound, Host, Shares, Ticket, Window, bound, capacity

MAX_WAITING_BYTES = 256 << 20  # of inputs that wait in this gateway for their turn; one request always may
COLD_CHUNKS = 2  # of a model that no worker has loaded, in the queue: what makes one load it, and its first batch
MARGIN = 1.2  # on the time that a request is expected to take
LOOK_S = 0.1  # how long figures that change with every message are used
SWEEP_S = 1.0
UNUSED_S = 60.0
_logger = logging.getLogger("sie.gateway.admission")


def key_of(authorization: str) -> str:
    """The name of a key in this process: a digest, so that no token is kept. For a bearer token that was let in."""
    token = authorization[7:] if authorization[:7].lower() == "bearer " else authorization
    return hashlib.blake2b(token.strip().encode(), digest_size=16).hexdigest()


def host_of(beat: Heartbeat) -> Host:
    return Host(beat.credit_cost, beat.credit_items, beat.rate, beat.batch_cost, beat.pipeline)


class _Load(NamedTuple):
    """What a lane had to do at `at_s`: tokens that the broker held and the mean tokens of a message, by priority, and who works on it."""

    at_s: float
    held: dict[Priority, float]
    mean: dict[Priority, float]
    workers: list[Host]


class _Place:
    """One model at one priority of a lane. What it knows of its hosts is looked up again when a heartbeat came, or after a second."""

    __slots__ = ("batches", "bound", "hosts", "lane", "priority", "residency", "scale", "until_s", "used_s", "version", "window")

    def __init__(self, lane: Lane, priority: Priority, residency: str, window: Window) -> None:
        self.lane = lane
        self.priority = priority
        self.residency = residency
        self.window = window
        self.batches = BatchTimes()
        self.scale = 0.0  # tokens for each that was estimated, as results tell; 0 before the first
        self.bound = Bound()
        self.hosts: list[Heartbeat] = []
        self.version = -1
        self.until_s = self.used_s = 0.0

    def note(self, result: WorkResult, cost: int) -> None:
        """Learn from a result what an estimated token really is, and what a batch takes. `cost` is what the chunk was estimated at."""
        self.batches.note(result.batch.tokens, result.stages.inference_ms / 1000)
        tokens = sum(outcome.tokens for outcome in result.outcomes if isinstance(outcome, Ok))
        if tokens:
            ratio = tokens / cost
            self.scale = ratio if not self.scale else 0.95 * self.scale + 0.05 * ratio

    def tokens(self, costs: Sequence[int]) -> list[int]:
        return [max(1, round(cost * (self.scale or 1.0))) for cost in costs]


class Permits:
    """What one request may publish. `is_cold`: no worker of its lane had the model loaded when it came."""

    def __init__(self, admission: Admission, place: _Place, ticket: Ticket, estimates: Sequence[int], size_bytes: int) -> None:
        self._estimates = estimates
        self._admission = admission
        self.place = place
        self._ticket = ticket
        self._granted: list[int] = []
        self._wake: asyncio.Event | None = None
        self.size_bytes = size_bytes  # counted while it waits
        self.is_cold = not place.hosts

    @property
    def complete(self) -> bool:
        """Whether every chunk has had its permit, and `take` has handed it out."""
        return not self._ticket.waiting and not self._granted

    def take(self) -> list[int]:
        """The chunks that may be published from now on, each once."""
        granted, self._granted = self._granted, []
        return granted

    async def more(self) -> list[int]:
        """`take`, as soon as there is one."""
        while not self._granted:
            self._wake = asyncio.Event()
            await self._wake.wait()
        return self.take()

    def grant(self, chunk: int) -> None:
        self._granted.append(chunk)
        if self._wake is not None:
            self._wake.set()

    def taken(self, result: WorkResult) -> None:
        """The chunk has left the queue: its result was taken."""
        self.place.note(result, self._estimates[result.chunk])
        if self.place.window.give_back(self._ticket, result.chunk):
            self._admission.freed(self.place)

    def tokens(self, chunks: Sequence[int]) -> int:
        """What these chunks count as."""
        return sum(self._ticket.costs[chunk] for chunk in chunks)

    def close(self) -> None:
        """The request has ended."""
        self._admission.ended(self, self._ticket)


class Admission:
    """Owned by the gateway's loop; every method but `run` returns at once."""

    def __init__(
        self, settings: Settings, broker: Broker, fleet: Fleet, backlog: Backlog, metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._fleet = fleet
        self._backlog = backlog
        self._metrics = metrics
        self._clock = clock
        self.peers = Peers(broker, self.waiting, clock)
        self._shares: dict[tuple[Lane, Priority], Shares] = {}  # lanes are those of the pools, the catalogue and the machine profiles
        self._places: dict[tuple[Lane, Priority, str], _Place] = {}
        self._queueing: dict[Ticket, Permits] = {}  # those that wait for a permit
        self._crowded: dict[_Place, None] = {}  # where they wait
        self._waiting_bytes = 0
        self._loads: dict[Lane, _Load] = {}
        fleet.listeners.append(self.pump)

    async def run(self, stop: Stop) -> None:
        """See to what changes with time alone, until `stop`."""
        while not await stop.wait_for(SWEEP_S):
            now_s = self._clock()
            self._places = {
                name: place for name, place in self._places.items() if not place.window.idle or now_s - place.used_s < UNUSED_S
            }
            self.pump()

    # ---- refusal

    def check(self, key: str, lane: Lane, priority: Priority, residency: str, cost: int, budget_s: float) -> None:
        """Raise QueueFull if a request of an estimated `cost` tokens would not be answered within its budget.

        An estimate that is right on average lets half of what it admits at the edge be late, and late work is lost work: MARGIN is on top.
        """
        estimate_s = self.estimate_s(key, lane, priority, residency, cost)
        if estimate_s is not None and MARGIN * estimate_s > budget_s:
            self._refuse(lane, "wait", f"about {estimate_s:.1f} s of work is ahead, {budget_s:.1f} s are left", estimate_s, budget_s)

    def estimate_s(self, key: str, lane: Lane, priority: Priority, residency: str, cost: int) -> float | None:
        """How long a request would take, in a full batch behind all that is ahead of it; 0 with nothing ahead, None while not known."""
        load = self._load(lane)
        if not load.workers:
            return None
        # what the broker holds, or more where this gateway has just put it there
        queued = {each: max(load.held[each], self._shares_of(lane, each).total) for each in PRIORITIES}
        ahead = tokens_ahead(
            priority, queued=queued, waiting=self._waiting_keys(lane, priority), key=key, cost=cost,
            overtakes=self._settings.bulk_max_overtakes,
        )  # fmt: skip
        if not ahead:
            return 0.0
        place = self._place(lane, priority, residency)
        message = load.mean[priority] or cost
        own = max(cost, sum(host.batch_cost for host in load.workers))
        return wait_s(ahead + own, [capacity(host, place.batches, message) for host in load.workers])

    def queue_depth(self, lane: Lane) -> int:
        """Messages of a lane in the queue, as far as this gateway knows."""
        own = {priority: sum(window.items for window in self._of(lane, priority)) for priority in PRIORITIES}
        return sum(max(self._backlog.messages(lane, priority) or 0, own[priority]) for priority in PRIORITIES)

    def _refuse(self, lane: Lane, reason: str, message: str, estimate_s: float | None, budget_s: float) -> None:
        self._metrics.rejected.labels(lane.machine_profile, lane.bundle, reason).inc()
        raise QueueFull(message, retry_after_s=retry_after_s(estimate_s, budget_s), extras={"queue_depth": self.queue_depth(lane)})

    def _load(self, lane: Lane) -> _Load:
        now_s = self._clock()
        known = self._loads.get(lane)
        if known is None or now_s - known.at_s > LOOK_S:
            mean = {priority: mean_cost(self.peers.traffic(lane, priority)) for priority in PRIORITIES}
            held = {priority: (self._backlog.messages(lane, priority) or 0) * mean[priority] for priority in PRIORITIES}
            known = self._loads[lane] = _Load(now_s, held, mean, [host_of(beat) for beat in self._fleet.of_lane(lane)])
        return known

    def _of(self, lane: Lane, priority: Priority) -> list[Window]:
        return [place.window for place in self._places.values() if place.lane == lane and place.priority == priority]

    def _waiting_keys(self, lane: Lane, priority: Priority) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._queueing:
            for window in self._of(lane, priority):
                for key, tokens in window.waiting_tokens().items():
                    found[key] = found.get(key, 0.0) + tokens
        return found

    def waiting(self) -> Mapping[tuple[Lane, Priority], int]:
        """Tokens that wait in this gateway, by lane and priority."""
        found: dict[tuple[Lane, Priority], int] = {}
        for place in self._places.values():
            if place.window.is_waiting:
                name = place.lane, place.priority
                found[name] = found.get(name, 0) + sum(place.window.waiting_tokens().values())
        return found

    def chunk_cost(self, lane: Lane, priority: Priority, residency: str) -> int:
        """SIE_CHUNK_COST in estimated tokens: fewer where a model's tokens turn out to be more than estimated."""
        place = self._places.get((lane, priority, residency))
        return max(1, int(self._settings.chunk_cost / max(1.0, place.scale if place is not None else 1.0)))

    # ---- permits

    def enter(self, key: str, lane: Lane, priority: Priority, residency: str, costs: Sequence[int], size_bytes: int) -> Permits:
        """Permits for chunks of these estimated costs, as many as may go now; the others follow.

        Raises QueueFull where too much waits already.
        """
        now_s = self._clock()
        place = self._place(lane, priority, residency)
        place.used_s = now_s
        window = place.window
        window.shares.saw(key, now_s)
        self._look(place, now_s)
        ticket = Ticket(key, place.tokens(costs))
        permits = Permits(self, place, ticket, costs, size_bytes)
        if len(costs) == 1 and window.fits_now(ticket, place.bound, self._key_limit()):
            window.admit(ticket)
            permits.grant(0)
            return permits
        if self._waiting_bytes and self._waiting_bytes + size_bytes > MAX_WAITING_BYTES:
            message = f"{self._waiting_bytes >> 20} MiB of inputs wait in this gateway, at most {MAX_WAITING_BYTES >> 20} are allowed"
            self._refuse(lane, "gateway_full", message, self.estimate_s(key, lane, priority, residency, sum(costs)), 0.0)
        window.join(ticket)
        self._queueing[ticket] = permits
        self._crowded[place] = None
        self._waiting_bytes += size_bytes
        self._pump(place)
        return permits

    def _place(self, lane: Lane, priority: Priority, residency: str) -> _Place:
        place = self._places.get((lane, priority, residency))
        if place is None:
            place = _Place(lane, priority, residency, Window(self._shares_of(lane, priority), self._settings.chunk_cost))
            self._places[lane, priority, residency] = place
        return place

    def _shares_of(self, lane: Lane, priority: Priority) -> Shares:
        shares = self._shares.get((lane, priority))
        if shares is None:
            shares = self._shares[lane, priority] = Shares()
        return shares

    def _key_limit(self) -> float:
        return self._settings.key_window_tokens / self.peers.count()

    def _look(self, place: _Place, now_s: float) -> None:
        """Bring what is known of the place's hosts, and its bound, up to date."""
        if place.version == self._fleet.version and now_s < place.until_s:
            return
        place.version, place.until_s = self._fleet.version, now_s + SWEEP_S
        place.hosts = self._fleet.hosts(place.lane, place.residency)
        place.bound = bound(
            [host_of(beat) for beat in place.hosts],
            cold_tokens=COLD_CHUNKS * self._settings.chunk_cost, contested=place.window.shares.contested(now_s),
            mean_cost=mean_cost(self.peers.traffic(place.lane, place.priority)), fixed_tokens=place.batches.fixed_tokens(),
            replicas=self.peers.count(),
        )  # fmt: skip

    def pump(self) -> None:
        """Hand out what may go by now, everywhere."""
        for place in list(self._crowded):
            self._pump(place)

    def _pump(self, place: _Place) -> None:
        self._look(place, self._clock())
        granted = place.window.grant(place.bound, self._key_limit())
        for ticket, chunk in granted:
            self._queueing[ticket].grant(chunk)
        for ticket in {ticket for ticket, _ in granted if not ticket.waiting}:
            self._waiting_bytes -= self._queueing.pop(ticket).size_bytes
        if not place.window.is_waiting:
            self._crowded.pop(place, None)

    def freed(self, place: _Place) -> None:
        """Something left the queue. It may have been the share of a key that waits elsewhere in the lane."""
        if place in self._crowded:
            self._pump(place)
        if len(self._crowded) > (place in self._crowded):
            for other in [other for other in self._crowded if other is not place and other.window.shares is place.window.shares]:
                self._pump(other)

    def ended(self, permits: Permits, ticket: Ticket) -> None:
        """A request has ended: its permits come back, nothing of it waits."""
        if self._queueing.pop(ticket, None) is not None:
            self._waiting_bytes -= permits.size_bytes
        if ticket.held or ticket.waiting:
            permits.place.window.leave(ticket)
            self.freed(permits.place)
        if not permits.place.window.is_waiting:
            self._crowded.pop(permits.place, None)

    def forget(self, pool: str) -> None:
        """The pool is there no more. What requests of it still hold they give back as they end."""
        for lane in [lane for lane in self._loads if lane.pool == pool]:
            del self._loads[lane]
        used = {place.window.shares for place in self._places.values() if not place.window.idle}
        self._shares = {name: shares for name, shares in self._shares.items() if name[0].pool != pool or shares in used}

    def occupied(self) -> tuple[int, int, int]:
        """Tokens and messages that hold permits, and bytes that wait. All zero when no request is open."""
        windows = [place.window for place in self._places.values()]
        return sum(window.tokens for window in windows), sum(window.items for window in windows), self._waiting_bytes
