"""A few cells of the matrix of `bench/admission.py`: who is refused, who is late and what the device does, in virtual
time.
"""

from __future__ import annotations

import pytest
from admission_simulation import Case, Report, World
from selection import long_but

IDLE = (
    Case(0.03, 2e-5, 40, 10, "tiny", requests=400),
    Case(0.5, 2e-6, 200, 10, "tiny", requests=600, seconds=60),
    Case(0.01, 2e-3, 100, 10, "stall", requests=900, seconds=60),
    Case(0.1, 2e-4, 500, 10, "cold", requests=1200, seconds=60),
)
FULL = (
    Case(0.1, 2e-3, 0, 2, load="open", seconds=10, requests=4000, batch_items=8),
    Case(0.1, 2e-3, 0, 2, load="open", seconds=10, requests=4000, batch_items=4, workers=2, gateways=2),
    Case(0.01, 2e-3, 0, 1, load="open", seconds=6, requests=7000, batch_items=8, gateways=2),
    Case(0.5, 2e-3, 500, 10, requests=2500, seconds=200),
    Case(0.05, 2e-4, 500, 10, "slow", requests=2500, seconds=150),
)


def shares(report: Report) -> tuple[float, float, float]:
    """Return the shares of false refusals among all, and of late answers among the accepted, in steady state and at the
    onset.
    """
    (steady, of_steady), (onset, of_onset) = report.late(onset=False), report.late(onset=True)
    return report.false / len(report.tries), steady / max(1, of_steady), onset / max(1, of_onset)


@pytest.mark.parametrize("case", IDLE, ids=str)
def test_what_can_be_answered_is_not_refused(case: Case) -> None:
    """The cases start cold, after one tiny request, or after a stall."""
    false, steady, onset = shares(World(case).run())
    assert false <= 0.01
    assert steady <= 0.01
    assert onset <= 0.05


@pytest.mark.parametrize("case", long_but(FULL, FULL[:1]), ids=str)
def test_above_capacity_the_device_stays_busy_with_what_is_answered_in_time(case: Case) -> None:
    report = World(case).run()
    false, steady, onset = shares(report)
    assert false <= 0.01
    assert steady <= 0.01
    assert onset <= 0.05
    assert report.of("refused") or report.of("shed")
    if case.load == "open":
        assert report.goodput() >= 0.95
    served, came = report.returns()
    assert served >= 0.8 * came


BUNCHES = (
    Case(0.01, 2e-3, 500, 1, requests=2000),
    Case(0.04, 7e-4, 250, 1.5, "slow", tokens=24, batch_items=32, seconds=60, requests=2000, seed=77),
)


@pytest.mark.parametrize("case", BUNCHES, ids=str)
def test_hundreds_that_are_refused_at_once_are_served_when_they_were_told_to_come(case: Case) -> None:
    """The cases have a budget of 1 s, or a device that became ten times slower."""
    report = World(case).run()
    served, came = report.returns()
    assert came > 100
    assert served >= 0.8 * came


def test_a_run_is_the_same_each_time() -> None:
    case = Case(0.1, 2e-3, 300, 1, requests=600)
    first_run, second_run = (
        [(attempt.at_s, attempt.outcome, attempt.retry_s) for attempt in World(case).run().tries] for _ in range(2)
    )
    assert first_run == second_run
