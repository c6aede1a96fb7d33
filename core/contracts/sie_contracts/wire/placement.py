"""Number of hosts (workers that should load a model) that a model of a lane needs. It is a pure function of demand,
speed and waiting time.

    demand, rate, age ──replicas──► number of hosts per model ──► `layout`: choice of the workers

A model here is a residency: a copy of weights that a worker loads. The module uses no clock, no I/O and no randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USED = 0.7  # share of a worker's speed that the plan uses; the other 30 % are a reserve for bursts of requests
LOWER_AFTER_S = 60.0  # number of seconds for which fewer hosts must be enough before the count is lowered by one


@dataclass(frozen=True)
class Replicas:
    """Number of hosts of a model. `raised_s`: time when it was last raised. `below_s`: time since which fewer hosts
    would be enough; None if all are needed.
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
) -> Replicas:
    """Return the number of hosts that a model needs.

    `demand`: tokens per second that arrive for the model. `rate`: tokens per second of one busy worker, 0 while
    unknown. `age_s`: age of the model's oldest waiting work. `all_resident`: whether every host has the model loaded.
    `load_s`: duration of a load.

    The model needs `demand` / (0.7 `rate`) hosts, at least 1 and at most `most`. A smaller number is raised to this
    value at once. The number is raised by one more under two conditions: work waits longer than `adopt_after_s`
    although all hosts have the model loaded, and more than the time of a load has passed since the last raise. The
    number is lowered by one after each 60 s in which fewer hosts would be enough.
    """
    planned = USED * rate
    needed = 1
    if planned > 0:
        needed = most if demand >= most * planned else max(1, math.ceil(demand / planned))
    if prev is None or needed > prev.count:
        return Replicas(needed, now_s)
    count = max(1, min(prev.count, most))
    late = age_s > adopt_after_s
    if late and all_resident and count < most and now_s - prev.raised_s > load_s:
        return Replicas(count + 1, now_s)
    if needed >= count or late:
        return Replicas(count, prev.raised_s)
    below_s = now_s if prev.below_s is None else prev.below_s
    if now_s - below_s >= LOWER_AFTER_S:
        return Replicas(count - 1, prev.raised_s, now_s)
    return Replicas(count, prev.raised_s, below_s)
