"""Records of passes that their process did not survive, and the limits that the next process learns from them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sie_adapter.memory.batch_limits import (
    DOUBTED_TOKENS,
    CrashRecord,
    DeviceLimits,
    PassRecord,
    PassRecords,
    limits_key,
)
from sie_contracts.settings import load
from sie_runtime import control_group

KEY = limits_key("f00d", "float32", "cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sie" / "passes"


def die_in(path: Path, tokens: int, fitted: int = 0) -> None:
    """Fork a process that is killed within a pass of `tokens` tokens."""
    child = os.fork()
    if not child:
        with PassRecords(path).during(KEY, tokens, fitted):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_only_a_pass_that_was_not_survived_is_left(path: Path) -> None:
    records = PassRecords(path)
    with records.during(KEY, 10, 0), records.during(KEY, 20, 5):
        pass
    with pytest.raises(MemoryError), records.during(KEY, 30, 0):
        raise MemoryError
    assert PassRecords(path).left() == []
    die_in(path, 4000, 3000)
    assert PassRecords(path).left() == [PassRecord(KEY, 4000, 3000)]
    assert PassRecords(path).left() == [], "each is told once"


@pytest.mark.parametrize(
    ("kills", "tokens", "fitted", "is_learnt"),
    [
        (1, 40, 4000, True),  # the kernel counted an OOM kill
        (0, 4000, 3000, True),  # larger than all passes that fitted
        (0, 4000, 4000, False),  # a pass of this size had fitted
        (0, DOUBTED_TOKENS - 1, 0, False),  # the first pass of a process that was killed for another reason
    ],
)
def test_what_is_learnt_of_a_death(
    path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, tokens: int, fitted: int, is_learnt: bool
) -> None:
    counter = 5
    monkeypatch.setattr(control_group, "oom_kills", lambda: counter)
    file = path.with_name("frontier.json")
    crash_record = CrashRecord(PassRecords(path), lambda: DeviceLimits(file))
    die_in(path, tokens, fitted)
    counter += kills
    crash_record.learn()
    assert DeviceLimits(file).limit(KEY) == (tokens // 4 if is_learnt else None)
    crash_record.learn()
    assert DeviceLimits(file).limit(KEY) == (tokens // 4 if is_learnt else None), "a death counts once"


def test_adapters_of_one_machine_share_the_frontier_and_keep_their_passes_apart(tmp_path: Path) -> None:
    settings_a, settings_b = (
        load(environ={"SIE_LOCAL_CACHE": str(tmp_path), "SIE_IPC_SOCKET_PATH": f"/run/{name}.sock"}).settings
        for name in "ab"
    )
    DeviceLimits.for_machine(settings_a).failed(KEY, 100)
    assert DeviceLimits.for_machine(settings_b).limit(KEY) == 50
    with PassRecords.for_socket(settings_a).during(KEY, 9, 0):
        assert PassRecords.for_socket(settings_b).left() == []
