"""Fairness between API keys: the order in which the work of keys enters the queue. A permit lets one chunk of a request
into the queue. This module does no I/O and reads no clock.

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
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from sie_contracts.wire.heartbeats import Heartbeat

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
