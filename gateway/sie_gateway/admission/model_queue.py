"""Queue of one model at one priority of a lane (pool, machine profile and bundle), as one gateway sees it: whose work
enters it next (`KeyWindow`), and whether a further request would be answered in time (`judge`). This module does no I/O
and reads no clock.

Fairness between API keys: the order in which the work of keys enters the queue. A permit lets one chunk of a request
into the queue.

    request ──► Ticket (its chunks) ──► KeyWindow of (lane, priority, model) ──grant──► into the queue ──give_back──►
    the next chunk

A lane is a pool, a machine profile and a bundle. The work in the queue has two bounds. A key may have at most its
window, a number of tokens, in the queue of a lane and priority (`Shares`). All keys together have at most the work that
the workers with the model accept (`bound`). The queue is first in, first out, so a new request of another key waits for
all work in the queue. The first bound alone does not limit this wait enough, because the window of one key is several
times the work at the adapters. Work above the bounds waits in the gateway, where keys alternate by cost: deficit round
robin (Shreedhar and Varghese, 1996).

Within a key, first chunks of new requests alternate with further chunks of the oldest request. So a small request need
not wait for the end of a large request, and large requests end one after the other.

A key has one window for all models of a lane and priority. While the window is full, the models for which the key has
waiting work alternate, one chunk each. Without this rule, a model with much work of the key would take all freed space,
and the key's work for other models would wait for ever.

`SharedLimit` does the same for memory and for requests in progress: one key cannot use all of a resource.

Rules of `judge`, in this order:

1. If this gateway has no work of this model, or no worker has loaded the model, the request is admitted.
2. A `Throughput` predicts the wait. The wait is multiplied by MARGIN (a safety factor) and by
n^2 / (n^2 + DOUBT), where n is the number of samples. Without samples, requests are refused only in a stalled queue.
3. If the queue has stalled, the wait grows by the time since the last result, because the stall may last for as long
as it has lasted already.
4. A refused client gets a turn (`turns`): a time to try again, for which the queue reserves space. A client without a
turn is admitted in two cases: (a) its response would be in time even after the work of all turns that are due before
its deadline, or (b) the workers would otherwise have too little work. If workers form each batch only when the device
is free, case (b) does not exist, and case (a) counts only the turns that are due before the request's batch is formed.

`Throughput` measures the speed at which work leaves the queue, and predicts the wait from this speed.

    results of batches ──► time between batches that had work waiting ──► wait = batches ahead x time of a batch

The time between two results is a sample if the later work was queued before the earlier result arrived, so that the
workers had no pause. After a pause, the sample is at most the time of the batch on the device. If the result lacks this
time, there is no sample. Without samples, no wait is predicted. A gateway measures only its own results: other
gateways, models and priorities make these results later, so the samples include their effects.

`AnswerPace` measures how fast the gateway ends requests, and sets the Retry-After of requests that are refused before
their bodies are read.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sie_contracts.models.costs import BatchTimes, text_cost
from sie_contracts.wire.heartbeats import Heartbeat, QueuedWork
from sie_contracts.wire.messages import Ok, Priority, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.retry_slots import MAX_RETRY_S, RetrySlots

REMEMBERED_S = 600.0  # seconds: a lane and priority is contested if two API keys had requests within this time
# Smallest limit on the work in the queue, in seconds of work: ALONE_S with one key, CONTESTED_S with several. With less
# work, a fast device would end a batch before the next message comes.
ALONE_S, CONTESTED_S = 0.03, 0.01
RESERVED = 8  # in a `SharedLimit`, only keys below their share may use the last 1/RESERVED of the resource
REFUSED_S = 10.0  # seconds for which a key counts as active in a `SharedLimit` after a refusal


@dataclass(frozen=True, slots=True)
class QueueBound:
    """Largest number of tokens and messages of one model in the queue. An empty queue accepts one chunk of any size."""

    tokens: float = math.inf
    items: float = math.inf


def bound(
    hosts: Sequence[Heartbeat],
    *,
    cold_tokens: int,
    contested: bool,
    mean_cost: float,
    fixed_tokens: float = 0.0,
    replicas: int = 1,
) -> QueueBound:
    """Return the bound of a model's work that this gateway, one of `replicas`, keeps in the queue. `hosts`: the last
    reports of the workers with the model.

    With one key, the bound is the amount that the hosts accept, which fills their pipelines. With several keys
    (`contested`), the bound may be less, so that a new request does not wait long for the work of another key. Let p be
    the number of batches at an adapter, and let a batch take f seconds, plus b seconds for each of its tokens. The new
    request waits for p batches of s tokens, and runs in the next batch. These p + 1 batches may together take at most
    the time of p full batches of S tokens plus 2 f: (p + 1)(f + b s) <= p (f + b S) + 2 f. So the work in the
    queue, p s, is at most p / (p + 1) times (p S + f / b), where f / b is `fixed_tokens`, and at most p S. If f is
    small, batches become smaller, which costs little throughput. If f is large, batches stay full. The limit of
    messages is not reduced: the time of a batch with the largest number of messages depends on this number, not on the
    tokens.

    A fast device may run two batches while a result travels to this gateway and the next message to the worker. So the
    bound is at least ALONE_S or CONTESTED_S seconds of work. Without a host, the bound is `cold_tokens`, so that work
    for a model that is not loaded does not use up its key's token limit. If a host reports no limit of tokens, the
    number of tokens has no bound; if a host reports no limit of messages, the number of messages has no bound.
    """
    if not hosts:
        return QueueBound(cold_tokens)
    ahead = (CONTESTED_S if contested else ALONE_S) * sum(host.rate for host in hosts)
    tokens = math.inf
    if all(host.credit_cost for host in hosts):
        tokens = max(sum(_contested(host, fixed_tokens) if contested else host.credit_cost for host in hosts), ahead)
    items = math.inf
    if all(host.credit_items for host in hosts):
        items = max(sum(host.credit_items for host in hosts), ahead / mean_cost if mean_cost else 0.0)
    return QueueBound(tokens / replicas, max(1.0, items / replicas))


def _contested(host: Heartbeat, fixed_tokens: float) -> float:
    full = host.pipeline * host.batch_cost
    return min(full, host.pipeline / (host.pipeline + 1) * (full + fixed_tokens)) if full else host.credit_cost


class Shares:
    """Tokens in the queue by key, for one lane and priority, and the time of each key's last request."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.total = 0
        # key -> the `KeyWindow` of each model for which the key has waiting work; the values are unused
        self.waiting: dict[str, dict[KeyWindow, None]] = {}
        self.grants = 0  # number of permits so far; `_KeyFlow.granted` records it at each permit of a key
        self.seen_s: dict[str, float] = {}

    def contested(self, now_s: float) -> bool:
        """Return True if more than one key is active. A key is active if it has work in the queue, or has had a request
        within REMEMBERED_S seconds. Forget inactive keys.
        """
        if len(self.seen_s) > 1:
            recent_s = now_s - REMEMBERED_S
            self.seen_s = {
                key: seen_s for key, seen_s in self.seen_s.items() if seen_s > recent_s or key in self.tokens
            }
        return len(self.seen_s) > 1

    def fits(self, key: str, cost: int, limit: float) -> bool:
        """Return True if a key has no tokens in the queue, or if its tokens plus `cost` are at most `limit`."""
        held = self.tokens.get(key, 0)
        return not held or held + cost <= limit


class Ticket(msgspec.Struct, eq=False):
    """Request from its admission to its end. Chunks with numbers below `next` have had a permit; chunks in `held` are
    in the queue.

    `costs`: time of each chunk, expressed as the number of tokens of short texts that take as long (`models.costs` of
    the contracts). The costs set the order of keys and the predicted waits. `tokens`: tokens of each chunk, which count
    towards the limits of workers and of keys; by default `costs`. `scale`: actual tokens per estimated token, as
    assumed for the costs. `request`: id of the request. `client` returns a digest that identifies the client's next
    attempt. `queued_s`: for each chunk in the queue, the time when the chunk was queued, and whether more work waited
    in this gateway at that time. A chunk stays in `queued_s` after the request has ended, until its result arrives.
    """

    key: str
    costs: Sequence[int]
    tokens: Sequence[int] = ()
    scale: float = 1.0
    request: str = ""
    client: Callable[[], bytes] = bytes
    budget_s: float = math.inf
    deadline_s: float = math.inf
    cost: int = 0
    next: int = 0
    is_decided: bool = False  # true after the request has a result, or was refused after its admission
    held: set[int] = set()
    queued_s: dict[int, tuple[float, bool]] = {}

    def __post_init__(self) -> None:
        costs = self.costs
        self.tokens = self.tokens or costs
        self.cost = costs[0] if len(costs) == 1 else sum(costs)

    @property
    def waiting(self) -> bool:
        return self.next < len(self.costs)


@dataclass(slots=True, eq=False)
class _KeyFlow:
    """Waiting requests of a key, in order of arrival. `begun`: requests that have a permit for at least one chunk.
    `fresh`: requests without a permit.
    """

    key: str
    deficit: int  # cost that the key may put into the queue before the turn of the next key
    granted: int  # value of `Shares.grants` at the last permit of this flow, or when the flow was created
    fresh: deque[Ticket] = field(default_factory=deque)
    begun: deque[Ticket] = field(default_factory=deque)
    cost: int = 0
    tokens: int = 0
    turn: bool = False  # true if the next chunk belongs to a request in `begun`, false for `fresh`
    # true if at the last check the queue had space for the next chunk, but the chunk exceeded the key's token limit
    is_limited: bool = False

    def head(self) -> Ticket:
        first, second = (self.begun, self.fresh) if self.turn else (self.fresh, self.begun)
        return (first or second)[0]


class KeyWindow:
    """Work of one model and priority of a lane. `shares`: queued tokens of each key, for all models of the lane."""

    def __init__(self, shares: Shares, quantum: int) -> None:
        """`quantum`: cost of the work that a key may put into the queue before the turn passes to the next key; about
        the cost of one chunk.
        """
        self.shares = shares
        self.cost = 0  # cost of the work in the queue
        self.tokens = 0
        self.items = 0
        self._quantum = quantum
        # summed cost of the chunks that overtook the next chunk in the order while it waited for space in the queue
        self._passed = 0
        self.flows: dict[str, _KeyFlow] = {}  # work that waits for permits, by key
        self._ring: deque[_KeyFlow] = deque()
        self._most = QueueBound()  # bound at the last call of `grant`

    @property
    def idle(self) -> bool:
        return not self.items and not self.flows

    def waiting_tokens(self) -> dict[str, int]:
        return {key: flow.tokens for key, flow in self.flows.items()}

    def waiting_costs(self) -> dict[str, int]:
        return {key: flow.cost for key, flow in self.flows.items()}

    def stretch(self) -> float:
        """Return the mean cost of a token in the queue. It is 1 for short texts."""
        return self.cost / self.tokens if self.tokens else 1.0

    def ahead(self, key: str, cost: float) -> float:
        """Return the cost of the work that runs before the last chunk of a new request of this cost. Keys take turns at
        equal cost. While all work of this key runs (its waiting work and the new request), at most the same cost of
        waiting work runs for each other key.
        """
        if not self.flows:
            return self.cost
        mine = self.flows[key].cost if key in self.flows else 0
        ahead_of_key = sum(min(flow.cost, mine + cost) for name, flow in self.flows.items() if name != key)
        return self.cost + mine + ahead_of_key

    def join(self, ticket: Ticket) -> None:
        flow = self.flows.get(ticket.key)
        if flow is None:
            flow = self.flows[ticket.key] = _KeyFlow(ticket.key, self._quantum, self.shares.grants)
            self._ring.append(flow)
            self.shares.waiting.setdefault(ticket.key, {})[self] = None
        flow.fresh.append(ticket)
        flow.cost += sum(ticket.costs)
        flow.tokens += sum(ticket.tokens)

    def grant(self, most: QueueBound, key_limit: float) -> list[tuple[Ticket, int]]:
        """Return permits for the next chunks, in order. If the queue has no space for the next chunk, smaller chunks of
        other keys may get permits first, up to a total cost of `quantum`.
        """
        granted: list[tuple[Ticket, int]] = []
        ring, blocked, self._most = self._ring, 0, most
        while ring and blocked < len(ring):
            flow = ring[0]
            ticket = flow.head()
            cost, tokens = ticket.costs[ticket.next], ticket.tokens[ticket.next]
            if not self._fits(flow.key, tokens, key_limit):
                flow.is_limited = self._has_room(tokens, most)
                blocked += 1
                ring.rotate(-1)
                continue
            if not self._has_room(tokens, most):
                granted += self._pass(flow, most, key_limit)
                break
            blocked = 0
            if flow.deficit < cost:
                flow.deficit += self._quantum
                ring.rotate(-1)
                continue
            self._passed = 0
            granted.append((ticket, ticket.next))
            self._admit_next(flow, ticket, cost)
        return granted

    def _has_room(self, tokens: int, most: QueueBound) -> bool:
        return not self.items or (self.tokens + tokens <= most.tokens and self.items < most.items)

    def _fits(self, key: str, tokens: int, key_limit: float) -> bool:
        """Return False if a chunk would exceed the key's token limit, or if the key's work for another model must get a
        permit first. If the key has no work in the queue, return True.
        """
        if not self.shares.fits(key, tokens, key_limit):
            return False
        if key not in self.shares.tokens:
            return True
        windows = self.shares.waiting.get(key, ())
        mine = self.flows[key].granted if key in self.flows else math.inf
        return not any(window is not self and window._has_turn_before(key, mine) for window in windows)

    def _has_turn_before(self, key: str, granted: float) -> bool:
        """Return True if two conditions hold. The key's next chunk for this model waits only because of the key's token
        limit. The key's last permit for this model is older than permit number `granted`.
        """
        flow = self.flows[key]
        if not flow.is_limited or flow.granted >= granted:
            return False
        heads = (flow.head(), self._ring[0].head())
        return all(self._has_room(ticket.tokens[ticket.next], self._most) for ticket in heads)

    def _pass(self, first: _KeyFlow, most: QueueBound, key_limit: float) -> list[tuple[Ticket, int]]:
        granted: list[tuple[Ticket, int]] = []
        for flow in [flow for flow in self._ring if flow is not first]:
            while flow.fresh or flow.begun:
                ticket = flow.head()
                cost, tokens = ticket.costs[ticket.next], ticket.tokens[ticket.next]
                least = min(flow.deficit, self._quantum - self._passed)
                if cost > least or not self._has_room(tokens, most) or not self._fits(flow.key, tokens, key_limit):
                    break
                self._passed += cost
                granted.append((ticket, ticket.next))
                self._admit_next(flow, ticket, cost)
        return granted

    def _admit_next(self, flow: _KeyFlow, ticket: Ticket, cost: int) -> None:
        self.admit(ticket)
        flow.granted, flow.is_limited = self.shares.grants, False
        flow.deficit -= cost
        flow.cost -= cost
        flow.tokens -= ticket.tokens[ticket.next - 1]
        if ticket.next == 1:
            flow.fresh.popleft()
            flow.turn = True
            if ticket.waiting:
                flow.begun.append(ticket)
        else:
            flow.turn = False
            if not ticket.waiting:
                flow.begun.popleft()
        self._drop_if_empty(flow)

    def admit(self, ticket: Ticket) -> None:
        """Put the next chunk of a request into the queue."""
        chunk, shares = ticket.next, self.shares
        tokens = ticket.tokens[chunk]
        ticket.held.add(chunk)
        ticket.next += 1
        self.cost += ticket.costs[chunk]
        self.tokens += tokens
        self.items += 1
        shares.grants += 1
        shares.total += tokens
        shares.tokens[ticket.key] = shares.tokens.get(ticket.key, 0) + tokens

    def fits_now(self, ticket: Ticket, most: QueueBound, key_limit: float) -> bool:
        """Return True if a request of one chunk may enter the queue immediately: no request waits for a permit, the
        queue has space, and the key stays within its token limit.
        """
        if self.flows:
            return False
        if not self.items and ticket.key not in self.shares.tokens:  # neither limit applies to the first chunk
            return True
        tokens = ticket.tokens[0]
        return self._has_room(tokens, most) and self._fits(ticket.key, tokens, key_limit)

    def give_back(self, ticket: Ticket, chunk: int) -> bool:
        """Record that a chunk has left the queue. Return False if the chunk was not in the queue."""
        if chunk not in ticket.held:
            return False
        ticket.held.discard(chunk)
        tokens, shares = ticket.tokens[chunk], self.shares
        self.cost -= ticket.costs[chunk]
        self.tokens -= tokens
        self.items -= 1
        shares.total -= tokens
        shares.tokens[ticket.key] -= tokens
        if not shares.tokens[ticket.key]:
            del shares.tokens[ticket.key]
        return True

    def leave(self, ticket: Ticket) -> None:
        """Remove an ended request: its waiting chunks, and its chunks in the queue."""
        for chunk in list(ticket.held):
            self.give_back(ticket, chunk)
        if not ticket.waiting:
            return
        flow = self.flows[ticket.key]
        (flow.begun if ticket.next else flow.fresh).remove(ticket)
        flow.cost -= sum(ticket.costs[ticket.next :])
        flow.tokens -= sum(ticket.tokens[ticket.next :])
        ticket.next = len(ticket.costs)
        self._drop_if_empty(flow)

    def _drop_if_empty(self, flow: _KeyFlow) -> None:
        if not flow.fresh and not flow.begun:
            del self.flows[flow.key]
            self._ring.remove(flow)
            windows = self.shares.waiting[flow.key]
            del windows[self]
            if not windows:
                del self.shares.waiting[flow.key]


class SharedLimit:
    """Amount of a resource that API keys use, at most `total` together. A key is active if it uses some of the resource
    or was refused in the last REFUSED_S seconds. The share of a key is `total` divided by the number of active keys.
    Only keys below their share may use the last 1/RESERVED of `total`, so one key cannot use the whole resource. A
    total below RESERVED has no such part. All clients without an API key have the same key.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.used_by: Counter[str] = Counter()
        self._refused_s: dict[str, float] = {}  # by key: time of its last refusal

    def accepts(self, key: str, more: int, now_s: float) -> bool:
        """Return True if a key may use the amount `more` in addition to what it uses already. Otherwise record the
        refusal, after which the key counts as active for REFUSED_S seconds.
        """
        left = self.total - self.used - more
        if left >= self.total // RESERVED:
            return True
        self._refused_s = {other: at_s for other, at_s in self._refused_s.items() if at_s > now_s - REFUSED_S}
        active = len({key, *self.used_by, *self._refused_s})
        if left >= 0 and self.used_by[key] * active < self.total:
            return True
        self._refused_s[key] = now_s
        return False

    def use(self, key: str, more: int) -> None:
        """Add `more` to the amount that a key uses. A negative `more` releases an amount."""
        self.used += more
        self.used_by[key] += more
        if not self.used_by[key]:
            del self.used_by[key]

    def usage(self, key: str) -> str:
        """Return a text for an error about bytes: the MiB that all keys use, that `key` uses, and that are allowed."""
        used, own, total = self.used >> 20, self.used_by[key] >> 20, self.total >> 20
        return f"{used} MiB, {own} of them of this client's key; {total} MiB are allowed, shared by the active keys"


# The expected time of a batch is the mean of the newest samples (measured times of batches). While n batches run at the
# same time, `_samples` takes samples until they cover MIN_SPAN_S seconds and there are at least MIN_SAMPLES x n.
MIN_SAMPLES, MIN_SPAN_S = 4, 1.0
MAX_SAMPLES = 64
# a sample is used for EXPIRY_S seconds plus EXPIRY_BATCHES times the seconds that its batch took
EXPIRY_S, EXPIRY_BATCHES = 10.0, 8
# factor: a batch this many times slower or faster than its size explains may show a change of the device's speed
CHANGED = 2.0
# If the newest CHANGED_SAMPLES x n samples are all beyond CHANGED (n batches run at the same time), the speed of the
# device has changed, and older samples are discarded.
CHANGED_SAMPLES = 2
# factor: a sample this many times longer than every other sample, and longer than half of MIN_SPAN_S, is a stall, and
# is not used for predictions
OUTLIER = 4.0
STALL_S = 0.25  # seconds without a result after which the queue may count as stalled, see STALL_BATCHES
UNKNOWN_STALL_S = 5.0  # seconds without a result after which a queue without a measured batch counts as stalled
STALL_BATCHES = 3.0  # the queue counts as stalled only after this many times the longest measured batch time
# seconds: lifetime of a computed `MeasuredBatch`, and shortest time between two checks for late requests
LOOK_S = 0.1
# factor: the time of a larger batch is extrapolated from the measured batches, but at most to this many times their
# tokens
MAX_GROWTH = 4.0
# After the first result of a batch, this gateway expects further results only for this share of the batch's time. The
# missing results may belong to requests of other gateways and never arrive here.
SETTLED = 0.25
RECENT_ANSWERS = 64  # number of the last ended requests from which `AnswerPace` computes the speed of the gateway
# if the predicted time of a batch is above this share of a request's time budget, the wait of the request is predicted
# in whole batches
WHOLE_BATCHES_SHARE = 0.25
# factor: batches count as growing while the last batch has more than GROWING times the tokens of each earlier batch
GROWING = 1.25


class ExpectedWait(NamedTuple):
    """Expected wait of a request, in seconds. `min_s`: wait if all earlier batches are full and take the usual time.
    `formed_s`: time until the request's batch is formed, or infinity if workers form batches before the device is free.
    `likely_s`: `min_s` with the number of batches rounded up; or, if `formed_s` is infinite, `min_s` plus the time of
    one batch, because a batch was formed before the request arrived. `stalled_s`: time since the last result if
    this time is unusually long, else 0. `evidence`: number of samples. `rate`: tokens per second, 0 while unknown.
    `batch_s`: time of one batch.
    """

    min_s: float = 0.0
    likely_s: float = 0.0
    stalled_s: float = 0.0
    evidence: int = 0
    rate: float = 0.0
    batch_s: float = 0.0
    formed_s: float = math.inf

    @property
    def belief(self) -> float:
        """Return the factor by which a refusal multiplies the expected wait. It is 0 without samples, and comes closer
        to 1 with each sample.
        """
        samples = self.evidence * self.evidence
        return samples / (samples + DOUBT)


@dataclass(slots=True, eq=False)
class _BatchResults:
    """Results of one batch that have arrived at this gateway. `at_s`: time of the first result. `before_s`: time of the
    first result of the previous batch. `queued_s`: earliest time at which work of this batch was queued.
    """

    name: str
    at_s: float
    before_s: float
    queued_s: float
    is_crowded: bool
    device_s: float
    formed_s: float  # estimated time when this batch was formed
    # number of chunks of this batch without a result; stays above 0 if the batch has chunks of other gateways, whose
    # results do not arrive here
    missing: int
    is_sample: bool
    left_work: bool = False  # true if work was left in the queue when this batch was formed
    is_counted: bool = False
    tokens: float = 0.0

    def seconds(self, lanes: int) -> float:
        """Return the seconds from the previous batch's first result to this batch's first result. If this batch's work
        was queued later than that result, the workers paused in between. Then return the seconds from the queueing to
        this batch's first result, at most `device_s` / `lanes`. `lanes`: number of batches that run at the same time.
        """
        if self.queued_s <= self.before_s:
            return self.at_s - self.before_s
        return min(self.at_s - self.queued_s, self.device_s / lanes)


def _is_changed(before: _BatchResults, newest: list[_BatchResults]) -> bool:
    """Return True if all of the newest batches took more than CHANGED times as long as the earlier batch `before`
    predicts for their sizes, or if all took less than 1 / CHANGED of that time.
    """
    odd = [_oddness(before, batch) for batch in newest]
    return min(odd) > CHANGED or max(odd) * CHANGED < 1


def _oddness(before: _BatchResults, batch: _BatchResults) -> float:
    """Return the factor by which a batch took longer (above 1) or shorter (below 1) than an earlier batch predicts. The
    prediction is a range: a batch with n times the tokens takes between 1 and n times as long.
    """
    if not math.inf > before.device_s > 0 or not math.inf > batch.device_s > 0:
        return 1.0
    size, times = batch.tokens / before.tokens, batch.device_s / before.device_s
    return max(1.0, times / max(1.0, size)) * min(1.0, times / min(1.0, size))


class _BatchSample(NamedTuple):
    tokens: float
    seconds: float
    is_crowded: bool
    left_work: bool


class MeasuredBatch(NamedTuple):
    """Mean tokens and seconds of the last batches. `longest_s`: seconds of the longest batch. `is_full`: batches cannot
    become larger. This is true if more work waited than the workers accept. It is also true if batches have stopped
    growing and at least half of the batches left work in the queue.
    """

    tokens: float
    seconds: float
    is_full: bool
    longest_s: float


class Throughput:
    """Measured throughput of one model at one priority. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._batches: deque[_BatchResults] = deque(maxlen=MAX_SAMPLES)
        self.last_s = -math.inf  # time of the first result of the last batch
        self._lanes = 1
        self._evidence = 0
        self._measured: MeasuredBatch | None = None
        self._measured_s = -math.inf  # time when `_measured` was computed

    def left(
        self,
        now_s: float,
        batch: str,
        tokens: float,
        queued_s: float,
        *,
        is_crowded: bool,
        device_s: float = math.inf,
        lanes: int = 1,
        pipeline: int = 1,
        chunks: int = 1,
    ) -> None:
        """Record the result of a chunk with `tokens` tokens, which was queued at `queued_s` and ran in `batch`.
        `is_crowded`: when the chunk was queued, more work waited than the workers accept, so no batch can be larger.
        `device_s`: time of the batch on the device. `chunks`: number of chunks in the batch. `lanes`: number of batches
        that run at the same time. `pipeline`: largest number of batches that a worker forms before its device is free.
        """
        entry = None
        for candidate in reversed(self._batches):
            if candidate.at_s < queued_s:
                break
            if candidate.name == batch:
                entry = candidate
                break
        if entry is None:
            formed_s = now_s - pipeline * device_s  # a worker may form `pipeline` batches before the device is free
            is_sample = device_s < math.inf
            entry = _BatchResults(
                batch, now_s, self.last_s, queued_s, is_crowded, device_s, formed_s, chunks, is_sample
            )
            self._lanes = lanes
            self._batches.append(entry)
            self.last_s = now_s
            is_earlier = True
        else:
            is_earlier = queued_s < entry.queued_s
        if is_earlier:
            entry.queued_s = queued_s
            # The queue is first in, first out, so an earlier batch that was formed after the work of this batch was
            # queued had no space for this work.
            for batch_before in reversed(self._batches):
                if batch_before.at_s < queued_s:
                    break
                if queued_s < batch_before.formed_s < entry.formed_s:
                    batch_before.left_work = True
        entry.is_crowded |= is_crowded
        entry.tokens += tokens
        entry.missing -= 1
        entry.is_sample |= entry.queued_s <= entry.before_s
        if entry.is_sample and not entry.is_counted:
            entry.is_counted = True
            self._evidence += 1

    def _samples(self, now_s: float) -> list[_BatchSample]:
        """Return the samples of the latest batches, the newest first. Leave out batches whose results still arrive,
        samples that have expired, and samples from before the last change of the device's speed.
        """
        samples: list[_BatchSample] = []
        newest: list[_BatchResults] = []
        span_s = 0.0
        for batch in reversed(self._batches):
            age_s, seconds = now_s - batch.at_s, batch.seconds(self._lanes)
            if age_s < SETTLED * (batch.device_s if batch.device_s < math.inf else seconds):
                continue
            if age_s > EXPIRY_S + EXPIRY_BATCHES * seconds:
                break
            if len(samples) >= MIN_SAMPLES * self._lanes and span_s >= MIN_SPAN_S:
                break
            if batch.is_sample:
                if len(newest) < CHANGED_SAMPLES * self._lanes:
                    newest.append(batch)
                elif _is_changed(batch, newest):
                    break
                samples.append(_BatchSample(batch.tokens, seconds, batch.is_crowded, batch.left_work))
                span_s += seconds
        return samples

    def batch(self, now_s: float) -> MeasuredBatch | None:
        """Return the mean size and time of the last batches, computed at most LOOK_S seconds ago; None without recent
        samples.
        """
        if now_s - self._measured_s > LOOK_S:
            self._measured, self._measured_s = self._batch(now_s), now_s
        return self._measured

    def _batch(self, now_s: float) -> MeasuredBatch | None:
        samples = self._samples(now_s)
        if not samples:
            if not self._batches or now_s - self._batches[-1].at_s > EXPIRY_S:
                self._evidence = 0
            return None
        newest, before = samples[0].tokens, max((sample.tokens for sample in samples[1:]), default=0.0)
        longest, *shorter = sorted(samples, key=lambda sample: sample.seconds, reverse=True)
        if shorter and longest.seconds > max(OUTLIER * shorter[0].seconds, MIN_SPAN_S / 2):
            samples.remove(longest)
            longest = shorter[0]
        full = [sample for sample in samples if sample.is_crowded]
        # Prefer full batches: when they were queued, more work waited than the workers accept. But if several batches
        # run at the same time, their results alternate, and only the mean over all batches is right, because the time
        # since the previous result is not the time of one batch.
        counted = full if self._lanes == 1 and full else samples
        tokens = sum(sample.tokens for sample in counted) / len(counted)
        seconds = sum(sample.seconds for sample in counted) / len(counted)
        is_steady = len(samples) >= MIN_SAMPLES - 1 and newest <= GROWING * before
        left_work = is_steady and 2 * sum(sample.left_work for sample in samples) >= len(samples)
        is_full = left_work or len(full) == len(counted)
        return MeasuredBatch(max(tokens, 1.0), max(seconds, 1e-6), is_full, longest.seconds)

    def is_settled(self, now_s: float, within_s: float) -> bool:
        """Return True if all results of the last batch have probably arrived, or if a batch takes at most `within_s`
        seconds, so that its missing results hardly change the predicted wait.
        """
        if self._batches and self._batches[-1].missing <= 0:
            return True
        measured = self.batch(now_s)
        return measured is None or measured.seconds <= within_s or now_s - self.last_s >= SETTLED * measured.seconds

    def rate(self, now_s: float) -> float:
        """Return the tokens of this gateway that leave the queue per second, 0 while unknown."""
        measured = self.batch(now_s)
        return measured.tokens / measured.seconds if measured is not None else 0.0

    def wait(
        self,
        now_s: float,
        ahead: float,
        cost: float,
        oldest_s: float,
        full_tokens: float,
        fixed_tokens: float,
        share: float = 1.0,
        budget_s: float = math.inf,
        running: float = 0.0,
    ) -> ExpectedWait:
        """Return the wait of a request of `cost` tokens behind `ahead` tokens of all gateways. `oldest_s`: time since
        which the queue has had work. `full_tokens`: cost of a full batch. `share`: this gateway's share of the
        throughput of all gateways. `fixed_tokens`: fixed time of a batch, as the number of tokens that take as long;
        infinite while unknown.

        A batch larger than the measured batches is assumed to take the measured time times (fixed + tokens) / (fixed +
        measured tokens), or just the measured time while the fixed time is unknown.

        `budget_s`: time in which the request must be answered. Workers form a batch when the device is nearly free. If
        a batch takes more than WHOLE_BATCHES_SHARE of `budget_s`, the wait is a number of whole batches: the running
        batches, which have `running` of the `ahead` tokens, and the batches that the remaining tokens fill. Workers
        form no batch that would take longer than its requests may wait. So batches that leave work in the queue cannot
        become larger (`MeasuredBatch.is_full`).
        """
        measured = self.batch(now_s)
        silent_s = now_s - max(oldest_s, self.last_s)
        if measured is None:
            return ExpectedWait(stalled_s=silent_s if silent_s > UNKNOWN_STALL_S else 0.0)
        tokens, seconds, is_full, longest_s = measured
        tokens /= share
        size = tokens if is_full else max(tokens, min(ahead + cost, full_tokens))
        if size > tokens and fixed_tokens < math.inf:
            seconds *= (fixed_tokens + min(size, MAX_GROWTH * tokens)) / (fixed_tokens + tokens)
        spent_s = min(max(0.0, silent_s), seconds)
        stalled_s = silent_s if silent_s > max(STALL_S, STALL_BATCHES * longest_s) else 0.0
        formed_s = math.inf
        if seconds * self._lanes > WHOLE_BATCHES_SHARE * budget_s:
            running = min(running, ahead, size * self._lanes)
            run = min(self._lanes, math.ceil(running / tokens))
            behind = (ahead - running + cost) / size
            least, likely = run + max(1.0, behind), float(run + math.ceil(behind))
            formed_s = max(0.0, (likely - self._lanes) * seconds - spent_s)
        else:
            least = (ahead + cost) / size
            likely = least + 1
        min_s = max(0.0, least * seconds - spent_s)
        likely_s = likely * seconds - spent_s
        return ExpectedWait(min_s, likely_s, stalled_s, self._evidence, size / seconds, seconds, formed_s)


class AnswerPace:
    """Speed at which a gateway ends requests. Computes the Retry-After of a request that is refused before it is read.

    The time of one request follows from Little's law: the request-seconds (number of requests in progress, summed over
    time) during the last answers, divided by the number of these answers. Time without requests adds no
    request-seconds.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._sum_s = 0.0  # requests in progress, summed over the seconds until `_since_s` (request-seconds)
        self._ended: deque[float] = deque(maxlen=RECENT_ANSWERS)  # `_sum_s` at the end of each of the last requests
        self._next_s = 0.0  # time at which the client that was refused last may try again

    def changed(self, now_s: float, running: int) -> None:
        """Record that the number of requests in progress rose or fell by one, to `running`."""
        self._sum_s += self._running * (now_s - self._since_s)
        self._since_s = now_s
        if running < self._running:
            self._ended.append(self._sum_s)
        self._running = running

    def retry_s(self, now_s: float) -> int:
        """Return the Retry-After of one more refused client, in whole seconds. The first client may return when half of
        the requests in progress have ended. Later clients follow at the rate at which requests end. The value is at
        most MAX_RETRY_S, so that clients refused now do not delay clients refused MAX_RETRY_S seconds later.
        """
        if len(self._ended) < 2 or not self._running:
            return 1
        sum_s = self._sum_s + self._running * (now_s - self._since_s)
        took_s = (sum_s - self._ended[0]) / (len(self._ended) - 1)  # time of one request; grows while no request ends
        min_s = now_s + took_s / 2  # earliest retry: by this time half of the requests in progress have ended
        each_s = took_s / self._running
        self._next_s = min(max(self._next_s, min_s) + each_s, now_s + MAX_RETRY_S)
        # a random part spreads the clients' retries; the generator need not be cryptographic
        wait_s = min(self._next_s - now_s, MAX_RETRY_S * random.uniform(0.8, 1.0))  # noqa: S311
        return max(1, int(wait_s + random.uniform(0, 1)))  # noqa: S311


MARGIN = 1.1  # factor on the expected wait, because the prediction may be too low
DOUBT = 1.0  # constant in the weight n^2 / (n^2 + DOUBT) of an expected wait that is based on n samples
# Number of batches that must wait in the queue beside the running batches, so that the workers have no pause. While
# turns (retry times of refused clients) are booked, a client without a turn need not wait for these turns if fewer than
# BUSY_BATCHES batches wait. The work of turns that are due within the time of a batch counts as waiting.
BUSY_BATCHES = 1.5
# Retry-After is in whole seconds, so refused clients with the same value return at the same time. `_bunch_s` limits the
# work of these clients to what the queue runs in TURN_PACE x t seconds, where t is the shorter of one second and the
# time that a request's budget leaves after a running batch.
TURN_PACE = 0.4
# The limit of `_bunch_s` is at least what the queue runs in this share of a request's budget.
MIN_BUNCH = 0.1
# factor: after a stall of t seconds, clients return STALL_TURN * t seconds later at the earliest, up to MAX_RETRY_S
STALL_TURN = 4.0
# shortest Retry-After in seconds after a stall: if the adapter has ended, it must start again and load its model
RESTART_S = 10.0


OTHER_S = 2.0  # seconds for which an announcement of another gateway's work is used


class _PeerQueue(NamedTuple):
    """Queue as another gateway announced it at `at_s`. `own`: cost of the work that the gateway of this process had in
    the queue at that time.
    """

    at_s: float
    tokens: int
    rate: float
    own: float


class WaitRefusal(NamedTuple):
    """Refusal of a request whose expected wait is longer than the time that the request has left.

    `wait_s`: the expected wait in seconds. For an admitted request, it is `ExpectedWait.likely_s` plus `stalled_s`. For
    a new request, `likely_s` is first multiplied by `belief` and by a safety margin. If only the work of clients that
    were refused earlier makes a new request late, `wait_s` includes this work, but not `stalled_s`. `turn_s`: seconds
    until the queue has space for the request. `room`: limit on the summed cost of all refused clients that may try
    again within the same second.
    """

    wait_s: float
    turn_s: float
    room: float
    is_stalled: bool


class ModelQueue:
    """Queue of one model at one priority. `hosts`: workers that have the model loaded; the admission looks them up
    again after a heartbeat, or after a second. `residency`: name of the model, or name of the profile if the profile
    has weights of its own.
    """

    def __init__(self, lane: Lane, priority: Priority, residency: str, window: KeyWindow) -> None:
        self.lane = lane
        self.priority = priority
        self.residency = residency
        self.window = window
        self.batches = BatchTimes()
        self.throughput = Throughput()
        self.turns = RetrySlots()
        self.entered: dict[Ticket, None] = {}  # requests in order of admission; the values are unused
        self.scale = 0.0  # actual tokens per estimated token, learned from results; 0 before the first result
        # length of a text in tokens at which attention takes as long as all other computation; 0 while unknown
        self.crossover_tokens = 0
        self.bound = QueueBound()  # largest amount of work in the queue
        self.key_limit = math.inf  # largest number of tokens of one key in the queue
        self.hosts: list[Heartbeat] = []  # heartbeats of the workers that have the model loaded
        self._lanes = 1  # number of batches that the hosts run at the same time
        self._pipeline = 1
        self.version = -1
        self.until_s = self.used_s = 0.0
        self.gateways = 1  # number of live gateways
        self._began_s = -math.inf  # time when a chunk was last put into an empty queue
        self.shed_s = 0.0
        # time since which the queue has had work; infinite if the queue is empty. But if all work of a stalled queue
        # was withdrawn, the time is unchanged, so that the queue still counts as stalled.
        self._busy_s = math.inf
        # upper bound of the cost that workers run now; set to the cost of the whole queue at each result, and when work
        # enters an empty queue
        self._running = 0.0
        self._gone = 0.0  # cost of chunks that may still run although their requests ended after the last result
        # chunks that were queued at this time or earlier may be running; None if the time is not computed yet
        self._taken_s: float | None = None
        # until this time, the queue counts as stalled for new work; set when all requests of a stalled queue have ended
        # without a result
        self._stalled_until_s = -math.inf
        self._others: dict[str, _PeerQueue] = {}  # queues of the other gateways, by id of the gateway

    # ---- changes: hosts, chunks that enter or leave the queue, results, announcements

    def hosted_by(self, hosts: list[Heartbeat]) -> None:
        self.hosts = hosts
        self._lanes = max(1, sum(map(_lanes, hosts)))
        self._pipeline = max((1, *(host.pipeline for host in hosts)))

    def weighed(self, estimates: Sequence[int], squares: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the cost of each chunk in tokens, and its tokens. Short texts with as many tokens as the cost take as
        long as the chunk. `estimates`: estimated tokens of each chunk. `squares`: for each chunk, the estimated sum
        over its rows of the squared number of tokens.
        """
        scale, crossover_tokens = self.scale or 1.0, self.crossover_tokens
        costs, tokens = [], []
        for estimate, square in zip(estimates, squares, strict=True):
            costs.append(max(1, round(text_cost(scale * estimate, scale * scale * square, crossover_tokens))))
            tokens.append(max(1, round(scale * estimate)))
        return costs, tokens

    def queued(self, ticket: Ticket, chunk: int, now_s: float) -> None:
        """Record that a chunk was admitted to the queue."""
        # true for the first chunk in an empty queue, and for chunks that were admitted at the same time as that chunk
        window = self.window
        if window.items <= 1 or self._busy_s in (math.inf, now_s):
            self._running = window.cost
            self._began_s = now_s
        if window.items <= 1 and now_s >= self._stalled_until_s:
            self._busy_s = now_s
        self._busy_s = min(self._busy_s, now_s)
        ticket.queued_s[chunk] = now_s, bool(window.flows)

    def answered(self, ticket: Ticket, result: WorkResult, estimate: int, now_s: float) -> None:
        """Update the measurements by a result: actual tokens per estimated token, batch time, and throughput."""
        ran = result.batch
        self.batches.note(
            text_cost(ran.tokens, ran.attention, self.crossover_tokens), result.stages.inference_ms / 1000
        )
        tokens = 0
        for outcome in result.outcomes:
            tokens += outcome.tokens if isinstance(outcome, Ok) else 0
        # tokenize and decode run without a batch; their estimate is 1 for any number of tokens, so the ratio is useless
        if tokens and ran.tokens:
            ratio = tokens / estimate
            self.scale = ratio if not self.scale else 0.95 * self.scale + 0.05 * ratio
        ticket.is_decided = True
        self.left(ticket, result, now_s)

    def left(self, ticket: Ticket, result: WorkResult, now_s: float) -> None:
        """Update the measured throughput by the result of a chunk. The request of the chunk may have ended."""
        if result.chunk not in ticket.queued_s:
            return
        queued_s, is_crowded = ticket.queued_s.pop(result.chunk)
        if not result.batch.id:  # a failed chunk, or a tokenize request, ran in no batch: no speed can be measured
            return
        self.throughput.left(
            now_s,
            f"{result.worker} {result.batch.id}",
            ticket.costs[result.chunk],
            queued_s,
            is_crowded=is_crowded,
            device_s=result.stages.inference_ms / 1000 if result.stages.inference_ms else math.inf,
            lanes=self._lanes,
            pipeline=self._pipeline,
            chunks=result.batch.chunks,
        )

    def freed(self, now_s: float, *, is_result: bool) -> None:
        """Record that work has left the queue: with a result (`is_result`), or because its request has ended. If all
        work was withdrawn from a stalled queue, the queue counts as stalled for new work, until a result arrives or
        EXPIRY_S seconds have passed.
        """
        if is_result:
            self._running, self._gone, self._taken_s = self.window.cost, 0.0, None
        if self.window.items:
            return
        if not is_result and self.wait(now_s, 0.0, 0.0).stalled_s:
            self._stalled_until_s = now_s + EXPIRY_S
        else:
            self._busy_s, self._stalled_until_s = math.inf, -math.inf

    def ended(self, ticket: Ticket) -> None:
        """Record that a request with chunks in the queue has ended, before it leaves `entered`. A chunk that may be in
        a running batch keeps the device busy, so `_gone` includes the chunk's cost until the next result.
        """
        if self._taken_s is None:
            self._taken_s = self._last_taken_s()
        queued = ticket.queued_s.items()
        self._gone += sum(ticket.costs[chunk] for chunk, (queued_s, _) in queued if queued_s <= self._taken_s)

    def _last_taken_s(self) -> float:
        """Return the time when the newest chunk of the running batches was queued, on the assumption that these batches
        are full. Return -inf if no chunk can be in a batch.
        """
        left, last_s = self._full_tokens(0.0) * self._lanes, -math.inf
        for ticket in self.entered:
            for chunk, (queued_s, _) in ticket.queued_s.items():
                if left <= 0 or queued_s > self.throughput.last_s:
                    return last_s
                left -= ticket.costs[chunk]
                last_s = queued_s
        return last_s

    def peer_announced(self, gateway: str, queued: QueuedWork, now_s: float) -> None:
        """Record what another gateway announced: its work in the queue, and its booked and its claimed retry times."""
        self._others = {name: peer for name, peer in self._others.items() if now_s - peer.at_s < OTHER_S}
        self._others[gateway] = _PeerQueue(now_s, queued.tokens, queued.rate, self.window.cost)
        self.turns.peer_announced(now_s, queued.turns, queued.claimed)

    def news(self, now_s: float, count: int) -> QueuedWork | None:
        """Return the announcement for other gateways, with at most `count` retry times; None if it would be empty."""
        turns, claimed = self.turns.news(now_s, count)
        if not self.window.cost and not turns and not claimed:
            return None
        lane, rate = self.lane, round(self.throughput.rate(now_s), 3)
        return QueuedWork(
            lane.pool,
            lane.machine_profile,
            lane.bundle,
            self.priority,
            self.residency,
            round(self.window.cost),
            rate,
            turns,
            claimed,
        )

    # ---- predictions and decisions

    def wait(
        self, now_s: float, ahead: float, cost: float, budget_s: float = math.inf, promised: float = 0.0
    ) -> ExpectedWait:
        """Return the expected wait of a request of `cost` tokens. Other work is served first: `ahead` tokens of this
        gateway, the work of the other gateways, and `promised` tokens that refused clients of all gateways are expected
        to send again.
        """
        line = self.batches.line()
        fixed = math.inf if line is None or not line[1] else line[0] / line[1]
        everything, share = self.everywhere(now_s, ahead)
        withdrawn = 0.0
        if self._gone and (batch := self.throughput.batch(now_s)) is not None:
            withdrawn = min(self._gone, self._at_workers(batch, share))
            everything += withdrawn / share
        return self.throughput.wait(
            now_s,
            everything + promised,
            cost,
            min(now_s, self._busy_s),
            self._full_tokens(cost),
            fixed,
            share,
            budget_s,
            max(self._running, withdrawn) / share,
        )

    def everywhere(self, now_s: float, ahead: float) -> tuple[float, float]:
        """Return the cost, in tokens, of the work from all gateways that runs before a new request, and this gateway's
        share of the throughput. `ahead` is the cost of the work from this gateway alone.

        The queue is first in, first out, and mixes the work of all gateways. Work that waits in this gateway enters the
        queue only as fast as this gateway's share of the throughput allows. The announcement of another gateway may be
        OTHER_S seconds old. This function assumes that the other gateway's work has changed since then by the change of
        this gateway's work, times the ratio of the other gateway's rate to this gateway's rate (at most 1). So a burst
        of work that arrives at all gateways counts before the next announcement.
        """
        rate = self.throughput.rate(now_s) if self._others else 0.0
        if not rate:
            return ahead, 1.0
        own, of_peers, sum_of_rates = self.window.cost, 0.0, rate
        for peer in self._others.values():
            if now_s - peer.at_s < OTHER_S:
                # a gateway with unknown rate is assumed to have a rate in proportion to its work in the queue
                other_rate = peer.rate or rate * min(1.0, peer.tokens / max(1.0, peer.own))
                of_peers += max(0.0, peer.tokens + min(1.0, other_rate / rate) * (own - peer.own))
                sum_of_rates += other_rate
        share = rate / sum_of_rates
        queued = min(ahead, own)
        in_queue = queued * (own + of_peers) / own if own else of_peers
        return in_queue + (ahead - queued) / share, share

    def _at_workers(self, batch: MeasuredBatch, share: float) -> float:
        """Return this gateway's tokens that may be in running batches: the tokens of a measured batch times the number
        of batches that run at the same time. While batches may still grow, the result may be as large as this gateway's
        share of full batches.
        """
        usual = batch.tokens * self._lanes
        if batch.is_full:
            return usual
        return max(usual, min(max(self._running, self._gone), share * self._full_tokens(0.0) * self._lanes))

    def _full_tokens(self, cost: float) -> float:
        """Return the cost of a full batch, as the mean over the hosts. A host (worker with the model) limits the tokens
        and the messages of a batch. The limit on messages is converted to tokens by the mean number of tokens in a
        queued message.
        """
        window = self.window
        message = window.tokens / window.items if window.items else cost
        limits = []
        for host in self.hosts:
            by_items = (
                host.credit_items * host.batch_cost / host.credit_cost * message if host.credit_cost else math.inf
            )
            limits.append(min(host.batch_cost or math.inf, by_items))
        return max(1.0, window.stretch() * sum(limits) / len(limits)) if limits else math.inf

    def judge(
        self, now_s: float, key: str, cost: float, budget_s: float, client: Callable[[], bytes]
    ) -> WaitRefusal | None:
        """Return the refusal of a request of `cost` tokens that has `budget_s` seconds left; None if the request can be
        admitted.
        """
        ahead = self.window.ahead(key, cost)
        if not ahead or not self.hosts:
            return None
        wait = self.wait(now_s, ahead, cost, budget_s)
        everything, share = self.everywhere(now_s, ahead)
        everything += cost
        promised = self.turns.promised(now_s)
        is_turn = promised > 0 and self.turns.claim(now_s, client())
        margin = 1.0 if is_turn else MARGIN
        believed = margin * wait.belief
        longest_s = wait.stalled_s + believed * wait.likely_s
        if longest_s <= budget_s:
            if not promised or is_turn:
                return None
            busy = (self._lanes + BUSY_BATCHES) * wait.rate * wait.batch_s if wait.formed_s == math.inf else 0.0
            if everything + self.turns.due(now_s, wait.batch_s) <= busy:
                return None
            due = self.turns.due(now_s, min(budget_s, wait.formed_s))
            longest_s = believed * self.wait(now_s, ahead, cost, budget_s, due).likely_s
            if longest_s <= budget_s:
                return None
        return self._refusal(now_s, wait, longest_s, everything, share, budget_s)

    def _refusal(
        self, now_s: float, wait: ExpectedWait, longest_s: float, ahead: float, share: float, budget_s: float
    ) -> WaitRefusal:
        turn_s = ahead / wait.rate if wait.rate else 0.0
        if wait.stalled_s:
            turn_s += max(RESTART_S, STALL_TURN * wait.stalled_s)
        if now_s - self._began_s < OTHER_S and not any(now_s - peer.at_s < OTHER_S for peer in self._others.values()):
            # the other gateways may have as much work as this gateway but have not announced it yet, so this gateway
            # assumes that all have equal shares of the throughput
            share = 1 / self.gateways
        room = share * wait.rate * _bunch_s(budget_s, wait.batch_s) if wait.rate else math.inf
        return WaitRefusal(longest_s, turn_s, room, bool(wait.stalled_s))

    def late(self, now_s: float) -> list[tuple[Ticket, ExpectedWait]]:
        """Return the requests that have no result yet and will miss their deadlines, each with its expected wait."""
        window = self.window
        everything = window.cost + sum(window.waiting_costs().values())
        batch = self.throughput.batch(now_s)
        evidence = self.wait(now_s, everything, 0.0).evidence
        if not self.entered or not self.hosts or not evidence or batch is None:
            return []
        usual = batch.tokens * self._lanes
        at_workers = self._at_workers(batch, self.everywhere(now_s, 0.0)[1])
        inside = 0.0
        late_candidates: list[tuple[Ticket, float]] = []
        # (request, cost of the queue up to and including the request). The request is in a running batch only if that
        # batch is larger than earlier batches.
        growing: list[tuple[Ticket, float]] = []
        waiting: dict[str, list[Ticket]] = {}
        for ticket in self.entered:
            if ticket.is_decided and not ticket.queued_s:
                continue
            held = sum(ticket.costs[chunk] for chunk in ticket.queued_s)
            if not ticket.next:
                if ticket.is_decided:
                    continue
                waiting.setdefault(ticket.key, []).append(ticket)
            elif inside >= at_workers and not ticket.is_decided:
                late_candidates.append((ticket, inside))
            elif inside >= usual and not ticket.is_decided and evidence < MIN_SAMPLES * self._lanes:
                growing.append((ticket, inside + held))
            inside += held
        late_candidates += self._behind(waiting)
        late = [
            (ticket, self.wait(now_s, at_workers, ticket.cost, ticket.budget_s))
            for ticket, tokens in growing
            if self._ends_s(tokens, ticket) > ticket.deadline_s
        ]
        for ticket, ahead in late_candidates:
            wait = self.wait(now_s, ahead, ticket.cost, ticket.budget_s)
            if wait.belief * wait.min_s > ticket.deadline_s - now_s:
                late.append((ticket, wait))
        return late

    def _ends_s(self, tokens: float, ticket: Ticket) -> float:
        """Return the time when the work up to and including `ticket` ends, if it runs in one batch on each device and
        these batches began at the last result. `tokens`: cost of this work, computed with `ticket.scale`. Until
        measurements show whether batches grow, return minus infinity, so that no request counts as late.
        """
        if not self.batches.is_growth_known:
            return -math.inf
        return self.throughput.last_s + self.batches.seconds(tokens / self._lanes * (self.scale or 1.0) / ticket.scale)

    def shed(self, now_s: float) -> Iterator[tuple[Ticket, WaitRefusal, float]]:
        """Yield each request that `late` returns, its refusal, and its cost at the present `scale`. The retry time in
        the refusal is the time that the queue needs for all work that stays, and for this request.
        """
        late = self.late(now_s)
        for ticket, _ in late:
            ticket.is_decided = True
        refused = sum(ticket.cost for ticket, _ in late)
        stays, share = self.everywhere(now_s, self.window.cost + sum(self.window.waiting_costs().values()) - refused)
        for ticket, wait in late:
            cost = ticket.cost * (self.scale or 1.0) / ticket.scale
            longest_s = wait.likely_s + wait.stalled_s
            yield ticket, self._refusal(now_s, wait, longest_s, stays + cost, share, ticket.budget_s), cost

    def _behind(self, waiting: dict[str, list[Ticket]]) -> Iterator[tuple[Ticket, float]]:
        """Yield each request that waits in this gateway, and the cost of the work that runs before it. For this cost,
        assume that the queue takes equal amounts of work from all keys that have work left.
        """
        costs = self.window.waiting_costs()
        sizes = sorted(costs.values())
        sums = [0.0, *itertools.accumulate(sizes)]
        for key, requests in waiting.items():
            own, mine = costs[key], 0.0
            for ticket in requests:
                most = mine + ticket.cost
                smaller = bisect.bisect_right(sizes, most)
                ahead_of_key = sums[smaller] + most * (len(sizes) - smaller) - min(own, most)
                yield ticket, self.window.cost + mine + ahead_of_key
                mine = most


def _bunch_s(budget_s: float, batch_s: float) -> float:
    """Return a limit in seconds for the work of all refused clients that return in the same second. The limit is
    TURN_PACE x the time that a running batch leaves of the budget, or TURN_PACE x 1 s if this is less. The limit is at
    least MIN_BUNCH x the budget.
    """
    return max(MIN_BUNCH * budget_s, TURN_PACE * min(1.0, budget_s - batch_s))


def _lanes(host: Heartbeat) -> int:
    """Return the number of batches that a worker runs at the same time, computed from its credit (`credit_cost`, the
    largest cost of the work on the worker). The credit is two full batches for each batch that runs at the same time,
    plus `pipeline` full batches.
    """
    return max(1, round((host.credit_cost / host.batch_cost - host.pipeline) / 2)) if host.batch_cost else 1
