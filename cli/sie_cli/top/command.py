"""`sie top`: workers, models and queues of a cluster in the terminal, from the frames of `/ws/cluster-status`.

frames (SIEAsyncClient.watch) ──► View ──► picture of a width and height ──► terminal, in place; a pipe, one after the
other
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.options import refuse
from sie_cli.top.keyboard import single_keys, suspend, takes_keys
from sie_cli.top.picture import StatusFrame, View, picture
from sie_cli.top.trends import HistoryTrend
from sie_contracts.loopback import direct
from sie_contracts.settings import public_url

if TYPE_CHECKING:
    from rich.console import Console

PAST_EVERY_S = 10.0
PAST_S = 3.0  # of a reply
FIRST_S = 5.0  # of an attempt to connect, the first one too
REDRAW_S = 1.0
PIPE_WIDTH, PIPE_HEIGHT = 120, 60


@click.command()
@cluster_options(GATEWAY_URL)
@click.option("--once", is_flag=True, help="One picture, then end.")
def top(cluster: Cluster, once: bool) -> None:
    """Show workers, models and queues of a cluster, live. The key q ends it, or Ctrl-C.

    In a terminal the picture is drawn in place; in a pipe there is one after the other, a blank line between. Where
    the width allows it, a line shows the trend of the last 60 frames: requests per second, and queued work; another
    one the latency of the last hour at this gateway, and its errors. Models
    that are neither loaded nor asked for are only counted. A gateway that restarts is waited for. Where it wants a
    token: SIE_API_KEY, one with the scope `read`; without it SIE_ADMIN_TOKEN, but only for the gateway that
    SIE_GATEWAY_URL names.

    Status 0: ended by q or Ctrl-C, or --once. 2: no gateway answered, or it refused.
    """
    from rich.console import Console

    from sie_client.errors import AuthenticationError, SIEConnectionError, SIEError

    url, secret = cluster.gateway_urls[0], cluster.gateway_token
    token = secret.reveal() if secret else None
    console = Console(highlight=False)
    view = View(public_url(url), takes_keys=console.is_terminal and takes_keys() and not once)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=PIPE_WIDTH, height=PIPE_HEIGHT)
    try:
        with quiet_client():
            asyncio.run(_shown(view, url, token, console, once))
    except AuthenticationError as error:
        refuse(ValueError(f"{error}: set SIE_API_KEY to a token with the scope read"))
    except SIEConnectionError as error:
        refuse(ValueError(f"no gateway answers at {public_url(url)}: {error}; {cluster.without_gateway()}"))
    except SIEError as error:
        refuse(error)
    except msgspec.ValidationError as error:
        refuse(
            ValueError(f"{public_url(url)} tells what this version cannot read ({error}): use the `sie` of its version")
        )
    except BrokenPipeError:
        # the reader of the pipe has seen enough; nothing more may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
    """Silence the client's warnings of attempts: they would break a picture, and the error at the end says it all."""
    logger = logging.getLogger("sie_client")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _shown(view: View, url: str, token: str | None, console: Console, once: bool) -> None:
    """Raises SIEError where no gateway answers at first, or one refuses."""
    frames = _frames(view, url, token)
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


async def _frames(view: View, url: str, token: str | None) -> AsyncGenerator[StatusFrame, None]:
    """Frames for ever. Raises SIEError at a first connection that fails, and at any refusal."""
    from sie_client import SIEAsyncClient
    from sie_client.errors import RequestError, SIEConnectionError, SIEError

    async with SIEAsyncClient(url, api_key=token, connection_budget_s=FIRST_S) as client:
        while True:
            try:
                async for frame in client.watch():
                    yield msgspec.convert(frame, StatusFrame)
            except (RequestError, msgspec.ValidationError):
                raise
            except SIEError as error:
                if view.frame is None:
                    raise
                view.trouble = str(error) if isinstance(error, SIEConnectionError) else type(error).__name__
            await asyncio.sleep(REDRAW_S)  # the pause before another attempt


async def _follow_past(view: View, url: str, token: str | None) -> None:
    while True:
        await _ask_past(view, url, token)
        await asyncio.sleep(PAST_EVERY_S)


async def _ask_past(view: View, url: str, token: str | None) -> None:
    """Latency and errors; what was told last stays where the gateway does not tell, or is of another version."""
    import httpx

    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=PAST_S, transport=direct(url, httpx.AsyncHTTPTransport)) as client:
            answer = await client.get(f"{url}/v1/history?step_s=60", headers=headers)
        if answer.status_code == 200:
            view.past = msgspec.json.decode(answer.content, type=HistoryTrend)
            view.changed.set()
    except (httpx.HTTPError, msgspec.DecodeError):
        return  # the frames tell what is wrong with the connection


async def _add_frame(frames: AsyncIterator[StatusFrame], view: View) -> None:
    async for frame in frames:
        view.add_frame(frame, time.monotonic())


async def _draw(view: View, console: Console, stop: asyncio.Event) -> None:
    """Draw in place in a terminal, which is left as it was; else draw each frame once."""
    if console.is_terminal:
        await _draw_in_place(view, console, stop)
    while True:
        await view.changed.wait()
        view.changed.clear()
        with console.capture() as captured:  # written here: Rich would end the process where the reader has gone
            console.print(picture(view, console.width, PIPE_HEIGHT, time.monotonic()))
        click.echo(captured.get())


async def _draw_in_place(view: View, console: Console, stop: asyncio.Event) -> None:
    """Draw until it is cancelled. The key q sets `stop`. Ctrl-Z gives the terminal back until the shell lets it go
    on.
    """
    from rich.live import Live

    suspension = asyncio.Event()  # for the terminal, by Ctrl-Z

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
                # also without a frame: the age of the last one, a new size of the terminal
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REDRAW_S):
                        await view.changed.wait()
        suspension.clear()
        suspend()
