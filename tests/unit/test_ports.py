"""No port is given out twice, although the process that listens on it starts later."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sie_cli.serve import ports
from sie_contracts.settings import SettingError

FEW = range(31_000, 31_000 + ports._TRIED)
OTHER = f"""
from sie_cli.serve import ports
ports._BELOW_EPHEMERAL = range({FEW.start}, {FEW.stop})
print(*[ports.free_port() for _ in range(60)], flush=True)
input()
"""


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    descriptors: dict[int, int] = {}
    monkeypatch.setattr(ports, "_BELOW_EPHEMERAL", FEW)
    monkeypatch.setattr(ports, "_descriptors", descriptors)
    yield
    for descriptor in descriptors.values():
        os.close(descriptor)


def test_no_process_gets_a_port_that_another_was_given(few_ports: None) -> None:
    mine = [ports.free_port() for _ in range(60)]
    argv = [sys.executable, "-c", OTHER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = [int(port) for port in process.stdout.readline().split()]
        mine += [ports.free_port() for _ in range(20)]
        process.communicate("\n")
    assert len({*mine, *theirs}) == len(mine) + len(theirs) == 140


def test_neighbours_are_free_too(few_ports: None) -> None:
    port_numbers = [port + offset for port in (ports.free_port(3) for _ in range(20)) for offset in range(3)]
    assert len(set(port_numbers)) == 60


def test_it_says_when_there_is_none(few_ports: None) -> None:
    with contextlib.suppress(SettingError):
        for _ in FEW:
            ports.free_port()
    with pytest.raises(SettingError, match="no 1 consecutive free ports"):
        ports.free_port()
