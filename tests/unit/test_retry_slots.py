"""Turns of refused clients: how many may be due at the same time."""

from __future__ import annotations

import math
import random

from sie_gateway.admission.retry_slots import SLOT_S, SLOTS, RetrySlots

ROOM = 100.0


def test_no_second_has_turns_of_more_cost_than_its_room() -> None:
    """Clients are refused within two seconds, so no turn lapses meanwhile."""
    rng = random.Random(1)
    for _ in range(20):
        turns, costs, now_s = RetrySlots(), dict[int, float](), 1000.0
        for number in range(200):
            now_s += rng.uniform(0, 0.01)
            cost = rng.uniform(5, 60)
            retry_s = turns.book(now_s, b"%d" % number, cost, rng.uniform(0, 20), ROOM)
            if turns.news(now_s, 1)[0]:
                slot = math.floor((now_s + retry_s) / SLOT_S)
                costs[slot] = costs.get(slot, 0.0) + cost
        assert len(costs) > SLOTS
        for first in range(min(costs), max(costs)):
            assert sum(costs.get(slot, 0.0) for slot in range(first, first + SLOTS)) <= ROOM + 1e-6
