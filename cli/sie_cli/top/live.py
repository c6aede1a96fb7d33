"""Main loop of `sie top`. It receives a gateway's frames (measurements of one moment) and draws them: in place on a
terminal, one after the other into a pipe.

    frames (SIEAsyncClient.watch) ──► View ──► picture of a width and height ──► terminal or pipe
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

import click
import httpx
import msgspec
from rich.console import Console
from rich.live import Live

from sie_cli.cluster import FIRST_S
from sie_cli.top.picture import HistoryTrend, StatusFrame, View, picture
from sie_client import SIEAsyncClient
from sie_client.errors import RequestError, SIEError
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import client_options

PAST_EVERY_S = 10.0
PAST_S = 3.0  # seconds to wait for the reply of /v1/history
REDRAW_S = 1.0
PIPE_WIDTH, PIPE_HEIGHT = 120, 60


async def show(
    view: View, url: str, token: str | None, console: Console, once: bool, patience_s: float = FIRST_S
) -> None:
    """Draw a gateway's frames. Raises SIEError if the gateway refuses, or cannot be reached in the first `patience_s`
    seconds. Raises ValidationError for a frame of an unknown format.
    """
    frames = _frames(view, url, token, patience_s)
    async with contextlib.aclosing(frames):
        if once:
            view.add_frame(await anext(frames), time.monotonic())
            await _ask_past(view, url, token)
            console.print(picture(view, console.width, PIPE_HEIGHT, view.came_s))
            return
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        ends = [
            asyncio.create_task(section, name=name)
            for name, section in (
                ("frames", _add_frame(frames, view)),
                ("past", _follow_past(view, url, token)),
                ("picture", _draw(view, console, stop)),
                ("stop", stop.wait()),
            )
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        for task in done:
            task.result()


async def _frames(view: View, url: str, token: str | None, patience_s: float) -> AsyncGenerator[StatusFrame, None]:
    """Yield frames without end. Raises ValidationError, and SIEError for a refusal or for a failure before the first
    frame.
    """
    async with SIEAsyncClient(url, api_key=token, connection_budget_s=patience_s) as client:
        while True:
            try:
                async for frame in client.watch():
                    yield msgspec.convert(frame, StatusFrame)
            except (RequestError, msgspec.ValidationError):
                raise
            except SIEError:
                if view.frame is None:
                    raise
                view.is_broken = True
            await asyncio.sleep(REDRAW_S)


async def _follow_past(view: View, url: str, token: str | None) -> None:
    while True:
        await _ask_past(view, url, token)
        await asyncio.sleep(PAST_EVERY_S)


async def _ask_past(view: View, url: str, token: str | None) -> None:
    """Read the history of the last hour. If this fails, keep the history that was read before."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=PAST_S, **client_options(url, httpx.AsyncHTTPTransport)) as client:
            answer = await client.get(f"{url}/v1/history?step_s=60", headers=headers)
        if answer.status_code == 200:
            view.past = msgspec.json.decode(answer.content, type=HistoryTrend)
            view.changed.set()
    except (httpx.HTTPError, *UNDECODABLE):
        return  # not reported here: the stream of frames reports a lost connection


async def _add_frame(frames: AsyncIterator[StatusFrame], view: View) -> None:
    async for frame in frames:
        view.add_frame(frame, time.monotonic())


async def _draw(view: View, console: Console, stop: asyncio.Event) -> None:
    if console.is_terminal:
        await _draw_in_place(view, console, stop)
    while True:
        await view.changed.wait()
        view.changed.clear()
        # click prints the picture, because Rich would end the process if the reader closed the pipe
        with console.capture() as captured:
            console.print(picture(view, console.width, PIPE_HEIGHT, time.monotonic()))
        click.echo(captured.get())


async def _draw_in_place(view: View, console: Console, stop: asyncio.Event) -> None:
    """Draw in place until cancelled. The key q sets `stop`. Ctrl-Z suspends the process and its drawing."""
    suspension = asyncio.Event()

    def request_pause() -> None:
        suspension.set()
        view.changed.set()

    def on_key(key: str) -> None:
        if key in "qQ":
            stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, request_pause)
    while True:
        keys = single_keys(on_key) if view.takes_keys else contextlib.nullcontext()
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with keys, live:
            while not suspension.is_set():
                live.update(picture(view, console.width, console.height, time.monotonic()), refresh=True)
                view.changed.clear()
                # redraw after REDRAW_S even without a new frame, because the shown age and the terminal's size may
                # change
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REDRAW_S):
                        await view.changed.wait()
        suspension.clear()
        suspend()


def takes_keys() -> bool:
    """Return whether this process may read keys from the terminal. The kernel stops background processes that read."""
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # standard input is closed or is not a file
        return False
    if not os.isatty(descriptor):
        return False
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # this is not the controlling terminal of the process, so the kernel does not stop readers
        return True


@contextlib.contextmanager
def single_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each pressed key, in the running event loop. Ctrl-C and Ctrl-Z still send signals."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        try:
            data = os.read(descriptor, 1024)
        except BlockingIOError:
            return
        except OSError:  # the terminal was closed
            data = b""
        if not data:
            loop.remove_reader(descriptor)
        for key in data.decode(errors="replace"):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    # TCSANOW, because the default mode waits until the pending output is read, which may never happen
    tty.setcbreak(descriptor, termios.TCSANOW)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(termios.error):  # the terminal may have been closed
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def suspend() -> None:
    """Stop this process like Ctrl-Z, and return when a shell continues it. Without such a shell, the kernel ignores the
    stop, and this function returns at once.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, before)
