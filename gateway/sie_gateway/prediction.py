"""How long a request would wait, from what is ahead of it and what the workers run. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sie_contracts.messages import Priority

MOST_RETRY_S = 5


def tokens_ahead(
    priority: Priority, *, queued: Mapping[Priority, float], waiting: Mapping[str, float], key: str, cost: float, overtakes: int
) -> float:
    """Tokens that run before the last of a request of `cost` tokens may start.

    `queued`: tokens in the queue by priority, `waiting`: tokens of this priority that wait in the gateway by key. Keys take turns by
    tokens, so of each other key no more than of one's own comes first. Interactive work overtakes the oldest bulk batch `overtakes` times,
    so one part in that many is bulk meanwhile; bulk work lets that many times its own amount pass. 0: first come, first served.
    """
    mine = waiting.get(key, 0.0)
    others = sum(min(tokens, mine + cost) for name, tokens in waiting.items() if name != key)
    ahead = queued[priority] + mine + others
    other: Priority = "bulk" if priority == "interactive" else "interactive"
    share = math.inf if not overtakes else ahead / overtakes if priority == "interactive" else overtakes * (ahead + cost)
    return ahead + min(queued[other], share)


def wait_s(ahead: float, rates: Sequence[float]) -> float | None:
    """Seconds until so many tokens were run by workers of these rates, in tokens a second. None while a rate (0) is not known."""
    return ahead / sum(rates) if rates and all(rates) else None


def retry_after_s(estimate_s: float | None, budget_s: float) -> int:
    """When to come again, 1 to 5 s: when what is ahead will have shrunk to what fits the budget."""
    return 1 if estimate_s is None else max(1, min(MOST_RETRY_S, math.ceil(estimate_s - budget_s)))
