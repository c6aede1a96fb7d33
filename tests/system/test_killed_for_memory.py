"""An adapter at the memory limit of its control group, which the kernel enforces: it kills the process, and nothing can
be caught.

loaded ──► the limit leaves less than a large batch takes ──► killed ──► the next process knows the batch ──► it answers
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_process import Adapter, batch, running
from cgroups import MemoryGroup

from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Ok

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a control group needs root"),
]
ROOM_BYTES = 120 << 20
LARGE = [[101, *[2003] * 254, 102]] * 32  # takes more than ROOM_BYTES in one pass, and each of its texts much less
MAX_KILLS = 3
SETTLED = 4  # batches until the allocator has settled


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with MemoryGroup("sie-killed") as group:
        yield group


def answered(adapter: Adapter, group: MemoryGroup) -> ipc.BatchDone:
    """Return the answer of a worker. Send the batch again when the process died."""
    first = group.kills()
    for survived in range(first, MAX_KILLS + 1):
        with contextlib.suppress(EOFError, ConnectionError), adapter.connect() as client:
            client.load()
            return client.run(batch(LARGE))
        assert group.kills() == survived + 1
        adapter.wait_for("adapter ready")
    raise AssertionError(f"killed {group.kills()} times")


def test_a_batch_that_the_kernel_killed_the_adapter_for_is_answered_by_the_next_one(
    tmp_path: Path, group: MemoryGroup
) -> None:
    """The learnt limit outlives a start of all processes too, as after a restart of the container."""
    with running(tmp_path / "a.sock", spare=True, group=group) as adapter:
        with adapter.connect() as client:
            client.load()
            client.run(batch([[101, 2003, 102]]))
        group.limit(group.held() + ROOM_BYTES)
        for _ in range(SETTLED):  # the allocator keeps what it freed: the second pass finds less than the first
            done = answered(adapter, group)
            assert all(isinstance(outcome, Ok) for outcome in done.outcomes)
        kills = group.kills()
        assert kills, "the limit was never met"
        for _ in range(SETTLED):
            answered(adapter, group)
        assert group.kills() == kills
    with running(tmp_path / "a.sock", spare=True, group=group) as adapter:
        answered(adapter, group)
        assert group.kills() == kills
