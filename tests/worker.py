"""Stands for a Python of the tests: a fork of a process that has collected them, which takes most of the time of
collecting them again.

    python tests/worker.py -m pytest --tx "5*popen//python=python tests/worker.py" --dist loadgroup

The fork has this process's standard streams, over which pytest-xdist speaks with those that it starts. This one ends as
the fork does, hands it the signals that ask it to end, and takes it along when it is killed.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
from types import FrameType

import pytest
from zygote import Forked


def collect() -> None:
    """In the process that is forked: import the modules of tests, and all that they import. What is wrong with them is
    said by the forks, which collect once more.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has none of its threads, and its own environment
    arguments = shlex.split(os.environ.get("PYTEST_COLLECTED", ""))
    pytest.main(["-p", "no:cacheprovider", "--collect-only", "--quiet", *arguments])


def main() -> None:
    """In the fork: do what the arguments say, `-m pytest ARGUMENTS` or `-u -c CODE`."""
    status = 0
    if sys.argv[1:3] == ["-m", "pytest"]:
        status = int(pytest.main(sys.argv[3:]))
    else:
        exec(sys.argv[-1], {"__name__": "__main__"})
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # libraries would wait for threads that they started before the fork, and abort since there are none
    os._exit(status)


if __name__ == "__main__":
    forked = Forked.in_place("tests")

    def hand_on(number: int, _: FrameType | None) -> None:
        os.kill(forked.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    for stream in (0, 1):  # only the fork's: pytest-xdist sees by them that it has ended
        os.close(stream)
    status = forked.wait(None)
    os._exit(status if status >= 0 else 128 - status)
