"""The turns of clients that were refused: when each is to come again, and a place for it when it does. Pure.

    refused ──book──► Retry-After: when all that is ahead of it, other turns included, is done ──► it comes again
    ├──claim──► let in first
    └─► it does not come: the turn lapses

A client is known again by a digest of its address, key and request. Where many clients ask the same, a turn belongs to
whoever comes first after it is due. Gateways tell each other what they `book` and what is claimed (`news`,
`peer_announced`), so that a client may come again to any of them and all of them know how much is promised.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence

from sie_contracts.wire.heartbeats import Turn

MAX_RETRY_S = 120  # the longest Retry-After; clients of OpenAI give up at more
MAX_TURNS = 16_384
MAX_NEWS = 4_096  # turns, and claims, that were not told to the other gateways yet: the oldest are forgotten
GRACE_S = 2.0  # how much later than told a client may come
GRACE_SHARE = 0.3  # the same as a share of its wait, and how much earlier
SLOT_S = 0.25  # turns that are due are counted by slots
SLOTS = 4  # of a second
OVERDUE_SLOTS = math.ceil(GRACE_SHARE * MAX_RETRY_S / SLOT_S)  # in which turns may be that are past and have not lapsed
CRUMB = 1e-6  # of a cost: what is left of sums of others
MEMORY = 0.02  # of the share of clients that come again


def _uniform(low: float, high: float) -> float:
    return random.uniform(low, high)  # noqa: S311  spreads clients


class _RetrySlot:
    __slots__ = ("cost", "due_s", "early_s", "is_open", "is_own")

    def __init__(self, due_s: float, early_s: float, cost: float, is_own: bool) -> None:
        self.is_own = is_own
        self.due_s = due_s
        self.early_s = early_s
        self.cost = cost
        self.is_open = True


class _SlotCosts:
    """Costs by the slot of SLOT_S in which they are due, and their sum."""

    __slots__ = ("costs", "total")

    def __init__(self) -> None:
        self.costs: dict[int, float] = {}
        self.total = 0.0

    def add(self, due_s: float, cost: float) -> None:
        slot = math.floor(due_s / SLOT_S)
        self.costs[slot] = self.costs.get(slot, 0.0) + cost
        self.total += cost

    def remove(self, due_s: float, cost: float) -> None:
        slot = math.floor(due_s / SLOT_S)
        left = self.costs.pop(slot, 0.0) - cost
        if left > CRUMB:
            self.costs[slot] = left
        self.total = max(0.0, self.total - cost)


class RetrySlots:
    """Times are those of one clock, seconds; costs are tokens."""

    __slots__ = ("_booked", "_by_client", "_claimed", "_count", "_lapses", "_open", "_own", "_shown")

    def __init__(self) -> None:
        self._by_client: dict[bytes, list[tuple[float, int, _RetrySlot]]] = {}  # heaps, the next that is due first
        self._lapses: list[tuple[float, int, bytes, _RetrySlot]] = []
        self._open = _SlotCosts()  # of all gateways
        self._own = _SlotCosts()  # the part of it that this gateway gave
        self._count = 0
        self._shown = 1.0  # share of those that were booked that came again
        # of this gateway, not told yet: client, due, cost
        self._booked: deque[tuple[bytes, float, float]] = deque(maxlen=MAX_NEWS)
        self._claimed: deque[bytes] = deque(maxlen=MAX_NEWS)

    def __len__(self) -> int:
        return len(self._lapses)

    def promised(self, now_s: float) -> float:
        """Tokens of clients that are expected to come again."""
        while self._lapses and (self._lapses[0][0] <= now_s or not self._lapses[0][3].is_open):
            _, _, client, turn = heapq.heappop(self._lapses)
            if turn.is_open:
                self._close(turn, came=False)
                self._next(client)
        return self._open.total * self._shown

    def due(self, now_s: float, within_s: float) -> float:
        """Part of `promised` that is due by then; the slot in which this ends counts in part."""
        self.promised(now_s)
        part, last = math.modf((now_s + min(within_s, MAX_RETRY_S + 1)) / SLOT_S)
        before = sum(cost for slot, cost in self._open.costs.items() if slot < last)
        return self._shown * (before + part * self._open.costs.get(int(last), 0.0))

    def book(self, now_s: float, client: bytes, cost: float, wait_s: float, room: float = math.inf) -> int:
        """The Retry-After of a client whose turn comes in `wait_s` at the earliest: whole seconds, rounded up or down
        at random, or the first later one at which there is room. `room` is the cost of all turns that may be due within
        a second of those that this gateway gives. No turn is kept of one that would wait longer than MAX_RETRY_S.
        """
        if wait_s > MAX_RETRY_S:
            return int(MAX_RETRY_S * _uniform(0.8, 1.0))
        self.promised(now_s)
        retry_s = self._with_room(now_s, max(1, int(wait_s + _uniform(0, 1))), cost, room)
        if retry_s > MAX_RETRY_S:
            return int(MAX_RETRY_S * _uniform(0.8, 1.0))
        if client and self._add(now_s, client, retry_s, cost, is_own=True):
            self._booked.append((client, now_s + retry_s, cost))
        return retry_s

    def _with_room(self, now_s: float, retry_s: int, cost: float, room: float) -> int:
        """The first from `retry_s` on that has room for this cost beside the turns within a second of it, or that has
        no such turn. Turns that are due before `retry_s` count as well, in case they were given at a higher rate:
        `room` of them is done in each later second. More than MAX_RETRY_S if there is none.
        """
        if room == math.inf:
            return retry_s
        if self._own.total * self._shown > MAX_RETRY_S * room > 0:
            return MAX_RETRY_S + 1
        slot, get, shown = math.floor(now_s / SLOT_S), self._own.costs.get, self._shown
        behind = shown * sum(get(index, 0.0) for index in range(slot - OVERDUE_SLOTS, slot + retry_s * SLOTS))
        while retry_s <= MAX_RETRY_S and (behind > room or self._is_full(now_s + retry_s, max(0.0, room - cost))):
            first = slot + retry_s * SLOTS
            behind = max(0.0, behind + shown * sum(get(index, 0.0) for index in range(first, first + SLOTS)) - room)
            retry_s += 1
        return retry_s

    def _is_full(self, due_s: float, room: float) -> bool:
        """Whether more than `room` is due within any one second that has `due_s` in it."""
        slot, get = math.floor(due_s / SLOT_S), self._own.costs.get
        most = room / self._shown if self._shown else math.inf
        if get(slot, 0.0) > most:
            return True
        costs = [get(index, 0.0) for index in range(slot - SLOTS + 1, slot + SLOTS)]
        return any(sum(costs[first : first + SLOTS]) > most for first in range(SLOTS))

    def _add(self, now_s: float, client: bytes, retry_s: float, cost: float, *, is_own: bool) -> bool:
        self.promised(now_s)
        if len(self._lapses) >= MAX_TURNS:
            return False
        turn = _RetrySlot(now_s + retry_s, GRACE_SHARE * retry_s, cost, is_own)
        self._count += 1
        heapq.heappush(self._lapses, (turn.due_s + max(GRACE_S, turn.early_s), self._count, client, turn))
        heapq.heappush(self._by_client.setdefault(client, []), (turn.due_s, self._count, turn))
        for slots in (self._open, self._own) if is_own else (self._open,):
            slots.add(turn.due_s, cost)
        return True

    def news(self, now_s: float, count: int) -> tuple[tuple[Turn, ...], tuple[bytes, ...]]:
        """News for the other gateways, the oldest first, `count` at most: turns that were booked here,
        clients that came.
        """
        claimed = tuple(self._claimed.popleft() for _ in range(min(count, len(self._claimed))))
        booked = [self._booked.popleft() for _ in range(min(count - len(claimed), len(self._booked)))]
        return tuple(
            Turn(client, round(due_s - now_s, 3), cost) for client, due_s, cost in booked if due_s > now_s
        ), claimed

    def peer_announced(self, now_s: float, turns: Sequence[Turn], claimed: Sequence[bytes]) -> None:
        """`news` of another gateway."""
        for turn in turns:
            if turn.client and 0 < turn.due_s <= MAX_RETRY_S + 1 and turn.cost > 0:
                self._add(now_s, turn.client, turn.due_s, turn.cost, is_own=False)
        for client in claimed:
            if slots := self._next(client):
                self._close(slots[0][2], came=True)
                self._next(client)

    def claim(self, now_s: float, client: bytes) -> bool:
        """Whether it is this client's turn, which is then over. A client that is the only one of its kind may come
        early.
        """
        self.promised(now_s)
        turns = self._next(client)
        if not turns:
            return False
        turn = turns[0][2]
        if now_s < turn.due_s - (turn.early_s if len(turns) == 1 else 0.0):
            return False
        self._close(turn, came=True)
        self._claimed.append(client)
        self._next(client)
        return True

    def _next(self, client: bytes) -> list[tuple[float, int, _RetrySlot]]:
        """The turns of a client, without those at the front that are over."""
        turns = self._by_client.get(client, [])
        while turns and not turns[0][2].is_open:
            heapq.heappop(turns)
        if not turns:
            self._by_client.pop(client, None)
        return turns

    def _close(self, turn: _RetrySlot, *, came: bool) -> None:
        turn.is_open = False
        for slots in (self._open, self._own) if turn.is_own else (self._open,):
            slots.remove(turn.due_s, turn.cost)
        self._shown += MEMORY * (came - self._shown)
