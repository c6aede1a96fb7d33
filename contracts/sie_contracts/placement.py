"""How many workers host a model of a lane: a pure function of demand, rate and of how long work waits.

    demand, rate, age ──replicas──► hosts wanted per model ──► `layout`: which workers these are

A model is a residency: what a worker loads as one. No clock, no I/O, no randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USED = 0.7  # of a worker's rate is planned with: the rest absorbs bursts
LOWER_AFTER_S = 60.0  # demand that went away for less comes back


@dataclass(frozen=True)
class Replicas:
    """How many hosts a model is to have. `raised_s`: when it last got one more; `below_s`: since when fewer would do,
    or None.
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
    """How many hosts a model is to have.

    `demand`: tokens a second that come in for it. `rate`: tokens a second that one worker runs while it is busy, 0
    while nobody knows. `age_s`: how long its oldest work waits. `all_resident`: whether every host has it loaded.
    `load_s`: what a load takes.

    `demand` over 0.7 of `rate`, at least 1 and at most `most`, at once. One more when work waits longer than
    `adopt_after_s` although all hosts have the model and the last raise was longer ago than a load. One fewer for each
    60 s in which fewer would do.
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
