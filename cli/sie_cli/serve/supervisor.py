"""Supervisor of child processes: it starts them in order, restarts them with back-off, and stops them in order.

On Linux, the kernel kills a child when its parent ends for any reason; on other systems, the children of a killed
supervisor continue. Each child has its own session: Ctrl-C reaches only the supervisor, which decides the order of the
stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sie_cli.refusal import CommandRefused
from sie_runtime.process import EXIT_BAD_SETTING, Tasks

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# the supervisor gives up if one child fails this number of times in a row before all processes are ready
MAX_FIRST_FAILURES = 5
LAST_LINES_S = 2.0  # seconds to wait for output that an ended child has left in its pipe
MAX_LINE_BYTES = 1 << 20  # largest size of a line of a child's output, in bytes; a longer line is printed in parts
# A child that ran for more than this number of seconds is restarted after FIRST_PAUSE_S, and its failures are counted
# from 0 again.
STEADY_S = 30.0
_PR_SET_PDEATHSIG = 1


async def started(argv: Sequence[str], environ: Mapping[str, str]) -> Process:
    """Start a process in its own session. On Linux, the kernel kills it when this process ends. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *argv,
        env=dict(environ),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
        limit=MAX_LINE_BYTES,
    )


def _die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel kill the child when the thread that forked it ends. None if this is
    not Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    # look the function up before the fork: the child of a process with threads must not load a library
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return arrange


@dataclass
class Child:
    """Child process. `grace_s`: seconds between SIGTERM and SIGKILL. `once`: arguments for the first start only."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    grace_s: float = 5.0
    once: Sequence[str] = ()
    process: Process | None = None
    keeper: asyncio.Task[None] | None = None
    output: set[asyncio.Task[None]] = field(default_factory=set)
    ending: bool = False
    refusal: str = ""  # the last line of the child's output that begins with `error: `


class Supervisor:
    """Owner of the child processes. `say(child, lines, level)` gets the lines that a child has written together, and
    each report of the supervisor itself about the child.

    `fatal` gets the reason if a restart cannot help: a child refuses its settings, or it fails MAX_FIRST_FAILURES times
    in a row while `is_up` is False. The owner of this object sets `is_up` once all processes are ready.
    """

    def __init__(self, say: Callable[[str, Sequence[str], str], None]) -> None:
        self._say = say
        self._children: list[Child] = []
        self.is_up = False
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        failed = "a task that watches a process failed, see above"
        self._tasks = Tasks(logging.getLogger("sie.serve"), lambda: self._give_up(failed))

    async def start(self, child: Child) -> None:
        """Start a child, and restart it after each end until `stop`, or until a restart cannot help (see `fatal`).
        Raises CommandRefused if the first start fails.
        """
        self._children.append(child)
        try:
            await self._spawn(child)
        except OSError as error:
            raise CommandRefused(f"{child.name} cannot be started: {error}") from error
        child.keeper = self._tasks.start(self._keep(child), f"keep:{child.name}")

    async def _spawn(self, child: Child) -> None:
        argv, child.once = [*child.argv, *child.once], ()
        child.process = await started(argv, child.environ)
        assert child.process.stdout is not None
        reader = self._tasks.start(self._relay(child, child.process.stdout), f"output:{child.name}")
        child.output.add(reader)
        reader.add_done_callback(child.output.discard)

    async def _relay(self, child: Child, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            self._relayed(child, lines)
        self._relayed(child, [rest] if rest else [])

    def _relayed(self, child: Child, lines: Sequence[bytes]) -> None:
        texts = [line.decode("utf-8", "replace") for line in lines]
        child.refusal = next((text for text in reversed(texts) if text.startswith("error: ")), child.refusal)
        if texts:
            self._say(child.name, texts, "INFO")

    async def _keep(self, child: Child) -> None:
        pause_s, failures = FIRST_PAUSE_S, 0
        while not child.ending:
            assert child.process is not None
            started_s = time.monotonic()
            status = await child.process.wait()
            if child.ending:
                return
            if status == EXIT_BAD_SETTING:
                if child.output:
                    await asyncio.wait(child.output, timeout=LAST_LINES_S)
                self._give_up(f"{child.name} {child.refusal or 'refused its settings, see above'}")
                return
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            failures += 1
            if time.monotonic() - started_s > STEADY_S:
                pause_s, failures = FIRST_PAUSE_S, 0
            if not self.is_up and failures >= MAX_FIRST_FAILURES:
                self._give_up(
                    f"{child.name} {how}, {failures} times in a row before all processes were ready: "
                    "its last lines above say why"
                )
                return
            self._say(child.name, [f"{how}; starting again in {pause_s:g} s"], "WARNING")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            while not child.ending:
                try:
                    await self._spawn(child)
                    break
                except OSError as error:  # for example, too many processes or too little memory at the moment
                    self._say(child.name, [f"cannot be started: {error}"], "ERROR")
                    await asyncio.sleep(LONGEST_PAUSE_S)

    def _give_up(self, reason: str) -> None:
        if not self.fatal.done():
            self.fatal.set_result(reason)

    async def stop(self, children: Sequence[Child]) -> None:
        """Send SIGTERM to the children, and SIGKILL to each that still runs after its grace time. Wait for all."""
        await asyncio.gather(*(self._stop_one(child) for child in children))

    async def _stop_one(self, child: Child) -> None:
        child.ending = True
        _signal(child, signal.SIGTERM)
        process = child.process
        # a process that has ended needs no wait: since `ending` is set, `_keep` does not start it again
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), child.grace_s)
            except TimeoutError:
                self._say(child.name, [f"did not end within {child.grace_s:g} s and is killed"], "WARNING")
                _signal(child, signal.SIGKILL)
                await process.wait()
        if child.keeper is not None:
            child.keeper.cancel()
            await asyncio.gather(child.keeper, return_exceptions=True)
        if child.output:
            await asyncio.wait(child.output, timeout=1.0)

    def restart(self, child: Child) -> None:
        """Send SIGTERM to a child. Its `keeper` starts it again."""
        _signal(child, signal.SIGTERM)

    def kill_all(self) -> None:
        for child in self._children:
            child.ending = True
            _signal(child, signal.SIGKILL)


def _signal(child: Child, number: int) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
