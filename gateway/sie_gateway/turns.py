"""The turns of clients that were refused: when each is to come again, and a place for it when it does. Pure.

    refused ──book──► Retry-After: when all that is ahead of it, other turns included, is done ──► it comes again ──claim──► let in first
                                                                                              └─► it does not: the turn lapses

A client is known again by a digest of its address, key and request. Where many clients ask the same, a turn belongs to whoever comes first
after it is due.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

MAX_RETRY_S = 120  # the longest Retry-After; clients of OpenAI give up at more
MAX_TURNS = 16_384
GRACE_S, GRACE_SHARE = 2.0, 0.3  # how much later than told a client may come, and by which share of its wait earlier or later
RECENT_ANSWERS = 64
MEMORY = 0.02  # of the share of clients that come again


def _uniform(low: float, high: float) -> float:
    return random.uniform(low, high)  # noqa: S311  spreads clients


class _Turn:
    __slots__ = ("cost", "due_s", "early_s", "is_open")

    def __init__(self, due_s: float, early_s: float, cost: float) -> None:
        self.due_s = due_s
        self.early_s = early_s
        self.cost = cost
        self.is_open = True


class Turns:
    """Times are those of one clock, seconds; costs are tokens."""

    __slots__ = ("_by_client", "_count", "_lapses", "_open", "_shown")

    def __init__(self) -> None:
        self._by_client: dict[bytes, list[tuple[float, int, _Turn]]] = {}  # heaps, the next that is due first
        self._lapses: list[tuple[float, int, bytes, _Turn]] = []
        self._open = 0.0
        self._count = 0
        self._shown = 1.0  # share of those that were booked that came again

    def __len__(self) -> int:
        return len(self._lapses)

    def promised(self, now_s: float) -> float:
        """Tokens of clients that are expected to come again."""
        while self._lapses and (self._lapses[0][0] <= now_s or not self._lapses[0][3].is_open):
            _, _, client, turn = heapq.heappop(self._lapses)
            if turn.is_open:
                self._close(turn, came=False)
                self._next(client)
        return self._open * self._shown

    def book(self, now_s: float, client: bytes, cost: float, wait_s: float) -> int:
        """The Retry-After of a client whose turn comes in `wait_s`: whole seconds, rounded up or down at random so that clients of the
        same moment are spread. No turn is kept of one that would wait longer than MAX_RETRY_S."""
        jittered = int(wait_s + _uniform(0, 1))
        if wait_s > MAX_RETRY_S:
            return int(MAX_RETRY_S * _uniform(0.8, 1.0))
        retry_s = max(1, jittered)
        self.promised(now_s)
        if client and len(self._lapses) < MAX_TURNS:
            turn = _Turn(now_s + retry_s, GRACE_SHARE * retry_s, cost)
            self._count += 1
            heapq.heappush(self._lapses, (turn.due_s + max(GRACE_S, turn.early_s), self._count, client, turn))
            heapq.heappush(self._by_client.setdefault(client, []), (turn.due_s, self._count, turn))
            self._open += cost
        return retry_s

    def claim(self, now_s: float, client: bytes) -> bool:
        """Whether it is this client's turn, which is then over. A client that is the only one of its kind may come early."""
        self.promised(now_s)
        turns = self._next(client)
        if not turns:
            return False
        turn = turns[0][2]
        if now_s < turn.due_s - (turn.early_s if len(turns) == 1 else 0.0):
            return False
        self._close(turn, came=True)
        self._next(client)
        return True

    def _next(self, client: bytes) -> list[tuple[float, int, _Turn]]:
        """The turns of a client, without those at the front that are over."""
        turns = self._by_client.get(client, [])
        while turns and not turns[0][2].is_open:
            heapq.heappop(turns)
        if not turns:
            self._by_client.pop(client, None)
        return turns

    def _close(self, turn: _Turn, *, came: bool) -> None:
        turn.is_open = False
        self._open = max(0.0, self._open - turn.cost)
        self._shown += MEMORY * (came - self._shown)


class Pace:
    """How fast a gateway answers, for the turns of those whom it could not even hear."""

    __slots__ = ("_ended_s", "_next_s")

    def __init__(self) -> None:
        self._ended_s: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._next_s = 0.0  # until when turns are given

    def ended(self, now_s: float) -> None:
        """A request is over."""
        self._ended_s.append(now_s)

    def retry_s(self, now_s: float, running: int) -> int:
        """The Retry-After of one more client while `running` requests are in progress: when as many are over as came before it."""
        if len(self._ended_s) < 2:
            return 1
        each_s = (now_s - self._ended_s[0]) / (len(self._ended_s) - 1)  # grows while nothing ends
        least_s = now_s + running / 2 * each_s  # by then half of what runs is over
        self._next_s = max(self._next_s, least_s) + each_s
        wait_s = min(self._next_s - now_s, MAX_RETRY_S * _uniform(0.8, 1.0))
        return max(1, int(wait_s + _uniform(0, 1)))
