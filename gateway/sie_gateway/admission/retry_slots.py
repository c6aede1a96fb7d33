"""Turns of refused clients. A turn is the time at which a refused client may try again. The queue reserves space for
the client's work at that time. This module does no I/O.

    refused ──book──► Retry-After: the time until all earlier work and turns are done
                       ├─ the client tries again ──claim──► admitted before others, if it would be in time
                       └─ the client does not try again: the turn lapses

A client is recognised by a digest of its address, key and request. If several clients have the same digest, the first
client that tries again after the due time gets the turn. Gateways announce booked and claimed turns (`news`,
`peer_announced`). So a client may try again at any gateway, and each gateway knows the work of all refused clients.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sie_contracts.wire.heartbeats import Turn

MAX_RETRY_S = 120  # longest Retry-After in seconds; OpenAI clients do not retry if it is longer
MAX_TURNS = 16_384  # largest number of turns of one model that are open (neither claimed nor lapsed)
# largest number of turns, and of claims, that wait for the next announcement to the other gateways; above it, the
# oldest are dropped
MAX_NEWS = 4_096
GRACE_S = 2.0  # a turn lapses at the earliest this many seconds after its due time
# A client may be early by this share of its Retry-After, and late by the longer of this share and GRACE_S.
GRACE_SHARE = 0.3
SLOT_S = 0.25  # seconds of a slot: the costs of all turns that are due in one slot are added
SLOTS = round(1 / SLOT_S)  # number of slots in a second
# number of past slots whose turns may be open: a client may use its turn until this many slots after the due time
OVERDUE_SLOTS = math.ceil(GRACE_SHARE * MAX_RETRY_S / SLOT_S)
CRUMB = 1e-6  # a sum of costs below this number of tokens is a rounding error
MEMORY = 0.02  # weight of the newest turn in the moving average of the share of clients that try again


def _uniform(low: float, high: float) -> float:
    return random.uniform(low, high)  # noqa: S311 the number is no secret: it spreads clients in time


@dataclass(slots=True, eq=False)
class _RetrySlot:
    due_s: float
    early_s: float
    cost: float
    is_own: bool
    is_open: bool = True


class _SlotCosts:
    """Sums of the costs of turns: one sum for each slot of SLOT_S seconds, and the total."""

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
        # exactly 0 if no slot has costs: otherwise `RetrySlots.promised` would keep a rounding error for ever
        self.total = max(0.0, self.total - cost) if self.costs else 0.0


class RetrySlots:
    """Turns (retry times) of the refused clients of one queue, that is, of one model and priority of a lane. Times are
    seconds of one clock; costs are tokens.
    """

    def __init__(self) -> None:
        # for each digest of a client, a heap of its turns, ordered by due time
        self._by_client: dict[bytes, list[tuple[float, int, _RetrySlot]]] = {}
        # heap of (time at which a turn lapses, number of the turn, client, turn)
        self._lapses: list[tuple[float, int, bytes, _RetrySlot]] = []
        self._open = _SlotCosts()  # costs of all gateways' turns, except claimed and lapsed turns
        self._own = _SlotCosts()  # costs of the turns in `_open` that this gateway booked
        self._count = 0
        self._shown = 1.0  # share of ended turns whose client tried again, a moving average
        # (client, due time, cost) of turns that this gateway booked and has not yet announced to the other gateways
        self._booked: deque[tuple[bytes, float, float]] = deque(maxlen=MAX_NEWS)
        self._claimed: deque[bytes] = deque(maxlen=MAX_NEWS)

    def promised(self, now_s: float) -> float:
        """Return the expected tokens of the requests that refused clients will repeat. First drop the turns (retry
        times) of clients that have not tried again within the grace period.
        """
        while self._lapses and (self._lapses[0][0] <= now_s or not self._lapses[0][3].is_open):
            _, _, client, turn = heapq.heappop(self._lapses)
            if turn.is_open:
                self._close(turn, came=False)
                self._next(client)
        return self._open.total * self._shown

    def due(self, now_s: float, within_s: float) -> float:
        """Return the part of `promised` that is due within `within_s` seconds. Costs are known only for whole slots. If
        the `within_s` seconds end inside a slot, this slot counts in proportion to its part before the end.
        """
        self.promised(now_s)
        part, last = math.modf((now_s + min(within_s, MAX_RETRY_S + 1)) / SLOT_S)
        before = sum(cost for slot, cost in self._open.costs.items() if slot < last)
        return self._shown * (before + part * self._open.costs.get(int(last), 0.0))

    def book(self, now_s: float, client: bytes, cost: float, wait_s: float, room: float = math.inf) -> int:
        """Book a turn (retry time) for a client and return its Retry-After in whole seconds. The turn is due after
        `wait_s` seconds, rounded up or down at random, or in the first later second with space. A second has space if
        the turns of this gateway that are due in it cost at most `room`. No turn is booked for an empty `client`, for a
        wait above MAX_RETRY_S, or while MAX_TURNS turns are open.
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
        """Return the smallest number of seconds, at least `retry_s`, after which a turn of this cost may be due. It is
        above MAX_RETRY_S if there is none. In each period of one second around the due time, the new turn and the
        booked turns of this gateway cost at most `room` together, unless no turn is booked. The booked turns that are
        due earlier also cost at most `room`; each further second that is tried subtracts `room` from their cost.
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
        """Return True if there is a period of one second around `due_s` in which the expected cost of this gateway's
        turns exceeds `room`.
        """
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
        """Return the news for this gateway's next announcement to the other gateways: booked turns (retry times), and
        clients that claimed their turn. Return at most `count` turns and clients in total, clients before turns, the
        oldest first. Each is returned only once.
        """
        claimed = tuple(self._claimed.popleft() for _ in range(min(count, len(self._claimed))))
        booked = [self._booked.popleft() for _ in range(min(count - len(claimed), len(self._booked)))]
        return tuple(
            Turn(client, round(due_s - now_s, 3), cost) for client, due_s, cost in booked if due_s > now_s
        ), claimed

    def peer_announced(self, now_s: float, turns: Sequence[Turn], claimed: Sequence[bytes]) -> None:
        """Record another gateway's booked turns (retry times), and end the turns that clients used at that gateway."""
        for turn in turns:
            if turn.client and 0 < turn.due_s <= MAX_RETRY_S + 1 and turn.cost > 0:
                self._add(now_s, turn.client, turn.due_s, turn.cost, is_own=False)
        for client in claimed:
            if slots := self._next(client):
                self._close(slots[0][2], came=True)
                self._next(client)

    def claim(self, now_s: float, client: bytes) -> bool:
        """Return True if a turn (retry time) of this client is due, and end the turn. If the client has only one turn,
        it may come early, by up to GRACE_SHARE of its Retry-After. If the client has several turns, it must not come
        before the first of them is due.
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
        """Remove ended turns from the top of a client's heap. Return the heap, whose first turn is then open."""
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
