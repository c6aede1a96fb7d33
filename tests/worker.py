"""A stand-in for the Python of a test process. It runs a fork of a process that has collected the tests, because a
second collection in such a fork is fast.

    python tests/worker.py -m pytest --tx "5*popen//python=python tests/worker.py" --dist loadgroup

The fork has the standard streams of this process, over which pytest-xdist talks to its processes. This process passes
SIGINT and SIGTERM on to the fork and ends with its status. If this process is killed, the fork ends too.
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
    """Import the modules of tests, and all that they import, in the process that is forked. The forks collect again and
    report errors.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork would have none of the threads
    arguments = shlex.split(os.environ.get("PYTEST_COLLECTED", ""))
    pytest.main(["-p", "no:cacheprovider", "--collect-only", "--quiet", *arguments])


def main() -> None:
    """Run in the fork what the arguments say: `-m pytest ARGUMENTS` or `-u -c CODE`."""
    status = 0
    if sys.argv[1:3] == ["-m", "pytest"]:
        status = int(pytest.main(sys.argv[3:]))
    else:
        exec(sys.argv[-1], {"__name__": "__main__"})
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # a normal exit would abort, because libraries would wait for threads from before the fork, which it does not have
    os._exit(status)


if __name__ == "__main__":
    forked = Forked.in_place("tests")

    def hand_on(number: int, _: FrameType | None) -> None:
        os.kill(forked.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    for stream in (0, 1):  # only the fork keeps them, because pytest-xdist sees its end when they are closed
        os.close(stream)
    status = forked.wait(None)
    os._exit(status if status >= 0 else 128 - status)
