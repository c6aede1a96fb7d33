"""Half a minute of chaos with the fixed-cost adapter. `make chaos` is the real run."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import run
from chaos.report import table
from stack import Stack


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("devices", [1, 2])
async def test_nothing_is_lost_wrong_or_twice_while_parts_are_killed_and_frozen(devices: int, tmp_path: Path) -> None:
    """A cluster of 3 brokers, 2 gateways and 2 workers, or one worker with two devices, is under load. Every 5 s a
    random part is killed or frozen, and started again. Each accepted request gets one right answer by its deadline.
    """
    stack = Stack(tmp_path / "stack", run.plan(minilm=False, devices=devices))
    with stack:
        report = await run.chaos(stack, duration_s=30, every_s=5, seed=5, minilm=False)
        assert report.holds, f"{table(report)}\n{stack.log()}"
    assert len(report.outcomes) > 500
    assert {fault.action for fault in report.faults} == {"kill", "freeze"}
