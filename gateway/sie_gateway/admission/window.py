"""Fairness between keys: the order in which they put work into the queue. Pure: times and bounds come in, permits go
out.

    request ──► Ticket (its chunks) ──► Window of (lane, priority, model) ──grant──► into the queue ──give_back──► the
    next one

Two bounds hold for what is in the queue. A key has at most its window in a lane and priority (`Shares`). All keys
together have at most what the workers that host the model take in (`bound`): a queue is first in, first out, so
whatever stands in it is what the next request of another key waits for, and the window of one key alone is several
times what the adapters hold. What is over waits in the gateway, where keys take turns by cost: deficit round robin
(Shreedhar and Varghese, 1996).

Within a key the first chunks of its requests alternate with the further chunks of its oldest, so that a small request
never waits for the whole of a large one, while large ones are finished one after the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

REMEMBERED_S = 600.0  # a lane and priority is contested while it has seen two keys in this time
ALONE_S, CONTESTED_S = 0.03, 0.01  # work ahead for devices that are faster than messages


@dataclass(frozen=True, slots=True)
class Host:
    """Capacity of a worker that has the model, as it reports it: tokens and messages it takes in at most, tokens a
    second, tokens of a full batch, batches at its adapter at most. 0: not known.
    """

    credit_cost: int = 0
    credit_items: int = 0
    rate: float = 0.0
    batch_cost: int = 0
    pipeline: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """Most tokens and messages of one model in the queue. One chunk always may be, whatever its size."""

    tokens: float = math.inf
    items: float = math.inf


def bound(
    hosts: Iterable[Host],
    *,
    cold_tokens: int,
    contested: bool,
    mean_cost: float,
    fixed_tokens: float = 0.0,
    replicas: int = 1,
) -> Bound:
    """How much of a model this gateway, one of `replicas`, keeps in the queue.

    With one key it is all that the hosts take in, which fills their pipelines. With several keys it may be less. A
    request of another key waits for p batches of s tokens, those in the queue, and runs in the next. It may take as
    long as the p batches that can be at the adapter, full ones of S tokens, and twice its time alone: (p + 1)(a + b s)
    <= p (a + b S) + 2 a, where a batch takes a and a token b seconds. So what is in the queue, p s, is p / (p + 1)
    times p S + a / b (`fixed_tokens`), and p S at most: where time goes by tokens smaller batches lose little, and
    where each batch costs much they stay full. Messages are not cut: batches that their number bounds are those that
    cost by number.
    Devices that run two batches before a result and the next message have made their way get hundredths of a second of
    work ahead. With no host, or one that does not know its credit, it is `cold_tokens`, or no bound: work for a model
    that is not loaded must not fill the window of its key.
    """
    hosts = list(hosts)
    if not hosts:
        return Bound(cold_tokens)
    ahead = (CONTESTED_S if contested else ALONE_S) * sum(host.rate for host in hosts)
    tokens = math.inf
    if all(host.credit_cost for host in hosts):
        tokens = max(sum(_contested(host, fixed_tokens) if contested else host.credit_cost for host in hosts), ahead)
    items = math.inf
    if all(host.credit_items for host in hosts):
        items = max(sum(host.credit_items for host in hosts), ahead / mean_cost if mean_cost else 0.0)
    return Bound(tokens / replicas, max(1.0, items / replicas))


def _contested(host: Host, fixed_tokens: float) -> float:
    full = host.pipeline * host.batch_cost
    return min(full, host.pipeline / (host.pipeline + 1) * (full + fixed_tokens)) if full else host.credit_cost


class Shares:
    """Tokens in the queue by key, of one lane and priority, and when each key was last seen."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.total = 0
        self._seen_s: dict[str, float] = {}

    def saw(self, key: str, now_s: float) -> None:
        self._seen_s[key] = now_s

    def contested(self, now_s: float) -> bool:
        """Whether more than one key was seen lately. Forgets the others."""
        if len(self._seen_s) > 1:
            recent_s = now_s - REMEMBERED_S
            self._seen_s = {
                key: seen_s for key, seen_s in self._seen_s.items() if seen_s > recent_s or key in self.tokens
            }
        return len(self._seen_s) > 1

    def fits(self, key: str, cost: int, limit: float) -> bool:
        """A key with nothing in the queue may put one chunk there, whatever its size."""
        held = self.tokens.get(key, 0)
        return not held or held + cost <= limit

    def add(self, key: str, cost: int) -> None:
        self.total += cost
        left = self.tokens.get(key, 0) + cost
        if left:
            self.tokens[key] = left
        else:
            self.tokens.pop(key, None)


@dataclass(slots=True, eq=False)
class Ticket:
    """The chunks of one request. Those before `next` were granted, those in `held` are in the queue.

    `costs` is the time of each, in tokens of short texts (`models.costs` of the contracts): keys take turns by it, and
    waits come of it. `tokens` is what workers and the windows of keys count, and the same unless it is given.
    """

    key: str
    costs: Sequence[int]
    tokens: Sequence[int] = ()
    next: int = 0
    held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or self.costs

    @property
    def waiting(self) -> bool:
        return self.next < len(self.costs)

    def advance(self) -> int:
        """The next chunk, which is in the queue from now on."""
        chunk = self.next
        self.held.add(chunk)
        self.next += 1
        return chunk


class _Flow:
    """Waiting requests of a key: requests that have had nothing yet, and those that have begun, each in
    order of arrival.
    """

    __slots__ = ("begun", "cost", "deficit", "fresh", "key", "tokens", "turn")

    def __init__(self, key: str, quantum: int) -> None:
        self.key = key
        self.fresh: deque[Ticket] = deque()
        self.begun: deque[Ticket] = deque()
        self.deficit = quantum
        self.cost = 0
        self.tokens = 0
        self.turn = False  # of those that have begun

    def head(self) -> Ticket:
        first, second = (self.begun, self.fresh) if self.turn else (self.fresh, self.begun)
        return (first or second)[0]


class Window:
    """Work of one model at one priority of a lane. `shares` are those of its lane and priority."""

    def __init__(self, shares: Shares, quantum: int) -> None:
        """`quantum`: the cost of a turn, about that of a chunk."""
        self.shares = shares
        self.cost = 0  # of what is in the queue
        self.tokens = 0
        self.items = 0
        self._quantum = quantum
        self._passed = 0  # cost of what went by while the first of the ring waits for room
        self._flows: dict[str, _Flow] = {}
        self._ring: deque[_Flow] = deque()

    @property
    def idle(self) -> bool:
        return not self.items and not self._flows

    @property
    def is_waiting(self) -> bool:
        return bool(self._flows)

    def waiting_tokens(self) -> dict[str, int]:
        """Tokens that wait in this gateway, by key."""
        return {key: flow.tokens for key, flow in self._flows.items()}

    def waiting_costs(self) -> dict[str, int]:
        """The cost of what waits in this gateway, by key."""
        return {key: flow.cost for key, flow in self._flows.items()}

    def stretch(self) -> float:
        """The cost of a token of what is in the queue: 1 of short texts."""
        return self.cost / self.tokens if self.tokens else 1.0

    def ahead(self, key: str, cost: float) -> float:
        """The cost of what runs before the last of a new request of this cost may start. Keys take turns by cost, so of
        each other key no more than of one's own comes first.
        """
        if not self._flows:
            return self.cost
        mine = self._flows[key].cost if key in self._flows else 0
        ahead_of_key = sum(min(flow.cost, mine + cost) for name, flow in self._flows.items() if name != key)
        return self.cost + mine + ahead_of_key

    def join(self, ticket: Ticket) -> None:
        """Queue a request behind those of its key."""
        flow = self._flows.get(ticket.key)
        if flow is None:
            flow = self._flows[ticket.key] = _Flow(ticket.key, self._quantum)
            self._ring.append(flow)
        flow.fresh.append(ticket)
        flow.cost += sum(ticket.costs)
        flow.tokens += sum(ticket.tokens)

    def grant(self, most: Bound, key_limit: float) -> list[tuple[Ticket, int]]:
        """Permits for the next chunks, in their order. A chunk for which the queue has no room keeps its turn; while it
        waits, smaller ones of other keys may pass it, a turn's cost in all.
        """
        granted: list[tuple[Ticket, int]] = []
        ring, blocked = self._ring, 0
        while ring and blocked < len(ring):
            flow = ring[0]
            ticket = flow.head()
            cost, tokens = ticket.costs[ticket.next], ticket.tokens[ticket.next]
            if not self.shares.fits(flow.key, tokens, key_limit):
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

    def _has_room(self, tokens: int, most: Bound) -> bool:
        return not self.items or (self.tokens + tokens <= most.tokens and self.items < most.items)

    def _pass(self, first: _Flow, most: Bound, key_limit: float) -> list[tuple[Ticket, int]]:
        granted: list[tuple[Ticket, int]] = []
        for flow in [flow for flow in self._ring if flow is not first]:
            while flow.fresh or flow.begun:
                ticket = flow.head()
                cost, tokens = ticket.costs[ticket.next], ticket.tokens[ticket.next]
                least = min(flow.deficit, self._quantum - self._passed)
                if (
                    cost > least
                    or not self._has_room(tokens, most)
                    or not self.shares.fits(flow.key, tokens, key_limit)
                ):
                    break
                self._passed += cost
                granted.append((ticket, ticket.next))
                self._admit_next(flow, ticket, cost)
        return granted

    def _admit_next(self, flow: _Flow, ticket: Ticket, cost: int) -> None:
        self.admit(ticket)
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
        """Count the ticket's next chunk as in the queue."""
        chunk = ticket.advance()
        self.cost += ticket.costs[chunk]
        self.tokens += ticket.tokens[chunk]
        self.items += 1
        self.shares.add(ticket.key, ticket.tokens[chunk])

    def fits_now(self, ticket: Ticket, most: Bound, key_limit: float) -> bool:
        """Whether a request of one chunk may pass at once: nobody waits and there is room. It is not to `join` then."""
        tokens = ticket.tokens[0]
        if self._flows or not self._has_room(tokens, most):
            return False
        return self.shares.fits(ticket.key, tokens, key_limit)

    def give_back(self, ticket: Ticket, chunk: int) -> bool:
        """The chunk has left the queue. False if that was known, or it never was in it."""
        if chunk not in ticket.held:
            return False
        ticket.held.discard(chunk)
        tokens = ticket.tokens[chunk]
        self.cost -= ticket.costs[chunk]
        self.tokens -= tokens
        self.items -= 1
        self.shares.add(ticket.key, -tokens)
        return True

    def leave(self, ticket: Ticket) -> None:
        """The request has ended: nothing of it waits, and nothing of it is in the queue."""
        for chunk in list(ticket.held):
            self.give_back(ticket, chunk)
        if not ticket.waiting:
            return
        flow = self._flows[ticket.key]
        (flow.begun if ticket.next else flow.fresh).remove(ticket)
        flow.cost -= sum(ticket.costs[ticket.next :])
        flow.tokens -= sum(ticket.tokens[ticket.next :])
        ticket.next = len(ticket.costs)
        self._drop_if_empty(flow)

    def _drop_if_empty(self, flow: _Flow) -> None:
        if not flow.fresh and not flow.begun:
            del self._flows[flow.key]
            self._ring.remove(flow)
