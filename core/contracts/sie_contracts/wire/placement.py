"""Compute how many workers of a lane (pool, machine profile and bundle) should load a model. The inputs are the tokens
per second that arrive for the model (demand), the tokens per second that one worker computes (rate), and the age of the
oldest waiting message.

    demand, rate, age ──replicas──► number of hosts per model ──► `layout`: choice of the workers

A host is a worker that should load the model. The module uses no clock, no I/O and no randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USED = 0.7  # share of a worker's speed that the plan uses; the remaining 30 % are a reserve for bursts of requests
# the number of hosts is lowered by one after fewer hosts have been enough for this many seconds
LOWER_AFTER_S = 60.0


@dataclass(frozen=True)
class Replicas:
    """Number of hosts of a model (`count`). `raised_s`: time when `count` was last raised. `below_s`: start of the
    present period in which fewer hosts are enough; None while all hosts are needed.
    """

    count: int
    raised_s: float
    below_s: float | None = None


def replicas(
    prev: Replicas | None,
    demand: float,
    rate: float,
    age_s: float,
    all_resident: bool,
    now_s: float,
    *,
    most: int,
    adopt_after_s: float,
    load_s: float,
    has_room: bool,
    is_crowded: bool,
) -> Replicas:
    """Return the number of hosts that a model needs.

    `demand`: tokens per second that arrive for the model. `rate`: tokens per second of one busy worker, 0 while
    unknown. `age_s`: age of the model's oldest waiting work. `all_resident`: whether every host has loaded the model.
    `load_s`: duration of a load. `has_room`: another worker can load the model without unloading one that has work.
    `is_crowded`: a host of the model has more models with work than fit into its memory together.

    The model needs `demand` / (0.7 `rate`) hosts, at least 1 and at most `most`. If the model has fewer hosts, their
    number is raised to this value at once. The number is raised by one if work waits longer than `adopt_after_s`
    although all hosts have loaded the model, but only if another worker has room and the last raise was more than
    `load_s` ago. The number is lowered by one after each 60 s in which fewer hosts are enough and no work waits longer
    than `adopt_after_s`, and at once while fewer hosts are enough and one of them is crowded: models that take turns in
    a worker's memory wait for loads, and that wait would keep the number of their hosts high.
    """
    planned = USED * rate
    needed = 1
    if planned > 0:
        needed = most if demand >= most * planned else max(1, math.ceil(demand / planned))
    if prev is None or needed > prev.count:
        return Replicas(needed, now_s)
    count = max(1, min(prev.count, most))
    late = age_s > adopt_after_s
    if late and all_resident and has_room and count < most and now_s - prev.raised_s > load_s:
        return Replicas(count + 1, now_s)
    if is_crowded and needed < count:
        return Replicas(count - 1, prev.raised_s)
    if needed >= count or late:
        return Replicas(count, prev.raised_s)
    below_s = now_s if prev.below_s is None else prev.below_s
    if now_s - below_s >= LOWER_AFTER_S:
        return Replicas(count - 1, prev.raised_s, now_s)
    return Replicas(count, prev.raised_s, below_s)
