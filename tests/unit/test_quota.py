"""Tokens per minute of a key: what is admitted, when a client may retry, and the correction of wrong estimates."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sie_contracts.errors import PayloadTooLarge, RateLimited
from sie_gateway.admission.grant import Charge, Quotas
from sie_runtime.keys import KeyLimits


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def quotas_of(clock: Callable[[], float], gateways: int = 1) -> Quotas:
    return Quotas(lambda: gateways, clock)


def charge_of(quotas: Quotas, key: str, limits: KeyLimits) -> Charge:
    charge = quotas.charge(key, limits)
    assert charge is not None
    return charge


def test_a_key_may_use_its_tokens_at_once_and_then_as_they_come_back() -> None:
    clock = Clock()
    quotas = quotas_of(clock)
    for cost in (400, 600):
        charge_of(quotas, "a", KeyLimits(tokens_per_minute=1000)).spend(cost)
    with pytest.raises(RateLimited) as caught:
        charge_of(quotas, "a", KeyLimits(tokens_per_minute=1000)).spend(100)
    assert (caught.value.retry_after_s, caught.value.extras) == (6, {"limit": 1000})
    clock.now_s += 6
    charge_of(quotas, "a", KeyLimits(tokens_per_minute=1000)).spend(100)
    charge_of(quotas, "b", KeyLimits(tokens_per_minute=1000)).spend(1000)  # another key has its own quota


def test_a_time_to_retry_after_is_when_it_goes() -> None:
    """The time is exact to the second, for any sequence of requests."""
    chance, clock = random.Random(7), Clock()
    quotas, refused = quotas_of(clock), 0
    for _ in range(300):
        charge = charge_of(quotas, "a", KeyLimits(tokens_per_minute=600))
        cost = chance.randrange(1, 601)
        try:
            charge.spend(cost)
        except RateLimited as error:
            refused += 1
            clock.now_s += error.retry_after_s - 1.001
            with pytest.raises(RateLimited):
                charge.spend(cost)
            clock.now_s += 1.001
            charge.spend(cost)
        clock.now_s += chance.random() * 20
    assert refused > 100


def test_what_no_minute_allows_is_refused_for_good() -> None:
    """A retry could never help."""
    with pytest.raises(PayloadTooLarge) as caught:
        quotas_of(Clock()).charge("a", KeyLimits(tokens_per_minute=1000)).spend(1001)
    assert not caught.value.retryable
    assert caught.value.extras == {"limit": 1000}


@pytest.mark.parametrize("used", [0, 1, 250, 500, 900])
def test_an_estimate_is_settled_by_what_was_used(used: int) -> None:
    clock = Clock()
    quotas, limits = quotas_of(clock), KeyLimits(tokens_per_minute=1000)
    charge = charge_of(quotas, "a", limits)
    charge.spend(500)
    charge.settle(used)
    charge.settle(0)  # only the first settlement counts
    charge.refund()
    if used < 1000:
        charge_of(quotas, "a", limits).spend(1000 - used)
    with pytest.raises(RateLimited):
        charge_of(quotas, "a", limits).spend(1)


def test_what_ended_without_usage_is_given_back_and_never_more() -> None:
    clock = Clock()
    quotas, limits = quotas_of(clock), KeyLimits(tokens_per_minute=100)
    for _ in range(5):
        charge = charge_of(quotas, "a", limits)
        charge.spend(100)
        charge.refund()
        charge.refund()
    charge_of(quotas, "a", limits).spend(100)
    with pytest.raises(RateLimited):
        charge_of(quotas, "a", limits).spend(1)


def test_gateways_have_equal_parts_and_a_whole_quota_still_goes() -> None:
    """Over ten minutes four gateways together let through about what the quota says, however the
    requests fall on them.
    """
    clock, chance = Clock(), random.Random(3)
    gateways, limits = [quotas_of(clock, 4) for _ in range(4)], KeyLimits(tokens_per_minute=6000)
    used = 0
    for _ in range(6000):
        clock.now_s += 0.1
        cost = chance.choice((50, 400, 2000))
        try:
            charge_of(chance.choice(gateways), "a", limits).spend(cost)
        except RateLimited:
            continue
        used += cost
    assert 0.9 * 60_000 <= used <= 60_000 + 6000 + 4 * 2000
    charge_of(quotas_of(clock, 4), "b", limits).spend(6000)  # more than one part, and within the quota


def test_a_gateway_that_leaves_gives_its_part_to_the_others() -> None:
    clock, count = Clock(), 2
    quotas, limits = Quotas(lambda: count, clock), KeyLimits(tokens_per_minute=600)
    charge_of(quotas, "a", limits).spend(300)
    count = 1
    clock.now_s += 30
    charge_of(quotas, "a", limits).spend(300)
    with pytest.raises(RateLimited):
        charge_of(quotas, "a", limits).spend(10)


def test_without_a_limit_nothing_is_counted() -> None:
    quotas = quotas_of(Clock())
    assert quotas.charge("a", KeyLimits()) is None


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    clock = Clock()
    quotas = quotas_of(clock)
    for number in range(20_000):
        clock.now_s += 0.1
        charge_of(quotas, f"key {number}", KeyLimits(tokens_per_minute=10)).spend(1)
    assert len(quotas._levels) <= 4096 + 600
