"""`sie top`: workers, models and queues of a cluster in the terminal, from the frames of `/ws/cluster-status`.

    frames (SIEAsyncClient.watch) ──► View ──► picture of a width and height ──► terminal, in place; a pipe, one after the other
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import msgspec

from sie_cli.display import counted, size
from sie_cli.options import GATEWAY, gateway_token, loaded, refuse
from sie_contracts.settings import public_url

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

FIRST_S = 5.0  # of an attempt to connect, the first one too
STALE_S = 3.0  # frames come every second
REDRAW_S = 1.0
LEAST_WIDTH, PIPE_WIDTH, PIPE_HEIGHT = 30, 120, 60
_WIDE, _MIDDLE = 100, 70  # columns of a terminal, from which on more of a table is shown
_COLUMNS = {"WORKERS": 9, "STATE": 9, "QUEUED": 7, "LOADED": 7, "DEVICE": 7}  # least cells of columns that stand below each other
_NARROW_REST, _MIDDLE_REST, _WIDE_REST = 20, 37, 70  # cells of all columns but the first
_STATE_COLOURS = {"loaded": "green", "loading": "yellow", "failed": "red"}


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker of a frame: see `sie_gateway.status.WorkerInfo`."""

    name: str
    gpu: str
    pool: str
    bundle: str
    healthy: bool
    device: str = ""
    queue_depth: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    loaded_models: list[str] = []


class ModelRow(msgspec.Struct, frozen=True):
    """A model of a frame."""

    name: str
    state: str
    worker_count: int
    total_queue_depth: int
    gpu_types: list[str] = []


class Sums(msgspec.Struct, frozen=True):
    worker_count: int
    gpu_count: int
    models_loaded: int
    total_qps: float


class Frame(msgspec.Struct, frozen=True):
    """What a gateway tells each second."""

    timestamp: float
    version: str
    cluster: Sums
    workers: list[WorkerRow]
    models: list[ModelRow]


@dataclass
class View:
    """The last frame, when it came by our monotonic clock, and what is wrong with the connection since."""

    url: str
    frame: Frame | None = None
    came_s: float = 0.0
    trouble: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, frame: Frame, now_s: float) -> None:
        self.frame, self.came_s, self.trouble = frame, now_s, ""
        self.changed.set()

    def state(self, now_s: float) -> tuple[str, str]:
        """How current the picture is, in words and a colour."""
        if self.frame is None:
            return "connecting", "yellow"
        age_s = now_s - self.came_s
        if age_s > STALE_S or self.trouble:
            return f"no answer for {age_s:.0f} s, trying again", "red"
        return "live", "green"


@click.command()
@click.option("--gateway", metavar="URL", help=f"The gateway.  [default: SIE_GATEWAY_URL, else {GATEWAY}]")
@click.option("--once", is_flag=True, help="One picture, then end.")
def top(gateway: str | None, once: bool) -> None:
    """Show workers, models and queues of a cluster, live. Ctrl-C ends it.

    In a terminal the picture is drawn in place; in a pipe there is one after the other, a blank line between. Models that are neither
    loaded nor asked for are only counted. A gateway that restarts is waited for. Where it wants a token: SIE_AUTH_TOKEN, one with the
    scope `read`; without it SIE_ADMIN_TOKEN, but only for the gateway that SIE_GATEWAY_URL names.

    Status 0: ended by Ctrl-C, or --once. 2: no gateway answered, or it refused.
    """
    from rich.console import Console

    from sie_sdk.errors import SIEError

    found = loaded({"gateway_url": gateway})
    url = (found.settings.gateway_url or GATEWAY).partition(",")[0].rstrip("/")
    secret = gateway_token(found.settings, found.sources)
    token = secret.reveal() if secret else None
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=PIPE_WIDTH, height=PIPE_HEIGHT)
    try:
        asyncio.run(_shown(View(public_url(url)), url, token, console, once))
    except SIEError as error:
        refuse(error)
    except msgspec.ValidationError as error:
        refuse(ValueError(f"{public_url(url)} tells what this version cannot read ({error}): use the `sie` of its version"))
    except BrokenPipeError:
        # the reader of the pipe has seen enough; nothing more may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _shown(view: View, url: str, token: str | None, console: Console, once: bool) -> None:
    """Raises SIEError where no gateway answers at first, or one refuses."""
    frames = _frames(view, url, token)
    async with contextlib.aclosing(frames):
        if once:
            view.take(await anext(frames), time.monotonic())
            console.print(picture(view, console.width, PIPE_HEIGHT, view.came_s))
            return
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        ends = [asyncio.create_task(each, name=name) for name, each in (
            ("frames", _take(frames, view)), ("picture", _draw(view, console)), ("stop", stop.wait()),
        )]  # fmt: skip
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        for task in done:
            task.result()


async def _frames(view: View, url: str, token: str | None) -> AsyncGenerator[Frame, None]:
    """Frames for ever. Raises SIEError at a first connection that fails, and at any refusal."""
    from sie_sdk import SIEAsyncClient
    from sie_sdk.errors import RequestError, SIEConnectionError, SIEError

    async with SIEAsyncClient(url, api_key=token, connection_budget_s=FIRST_S) as client:
        while True:
            try:
                async for frame in client.watch():
                    yield msgspec.convert(frame, Frame)
            except (RequestError, msgspec.ValidationError):
                raise
            except SIEError as error:
                if view.frame is None:
                    raise
                view.trouble = str(error) if isinstance(error, SIEConnectionError) else type(error).__name__
            await asyncio.sleep(REDRAW_S)  # the pause before another attempt


async def _take(frames: AsyncIterator[Frame], view: View) -> None:
    async for frame in frames:
        view.take(frame, time.monotonic())


async def _draw(view: View, console: Console) -> None:
    """In place in a terminal, which is left as it was; else each frame once."""
    if not console.is_terminal:
        while True:
            await view.changed.wait()
            view.changed.clear()
            with console.capture() as captured:  # written here: Rich would end the process where the reader has gone
                console.print(picture(view, console.width, PIPE_HEIGHT, time.monotonic()))
            click.echo(captured.get())
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            live.update(picture(view, console.width, console.height, time.monotonic()), refresh=True)
            view.changed.clear()
            with contextlib.suppress(TimeoutError):  # also without a frame: the age of the last one, a new size of the terminal
                async with asyncio.timeout(REDRAW_S):
                    await view.changed.wait()


def picture(view: View, width: int, height: int, now_s: float) -> RenderableType:
    """The last frame as it fits into `width` columns and `height` lines; the tables share what the head leaves."""
    from rich.cells import cell_len
    from rich.console import Group
    from rich.text import Text

    width = max(width, LEAST_WIDTH)
    state, colour = view.state(now_s)
    head = Text.assemble(("sie top", "bold"), "  ", (state, colour), f"  {view.url}", no_wrap=True, overflow="ellipsis")
    frame = view.frame
    if frame is None:
        return Group(head)
    head.append(f"  version {frame.version}", "bright_black")
    sums = frame.cluster
    queued = sum(worker.queue_depth for worker in frame.workers)
    parts = [
        counted(sums.worker_count, "worker"), counted(sums.gpu_count, "GPU"), f"{sums.models_loaded} of {len(frame.models)} models loaded",
        f"{queued:,} queued", f"{sums.total_qps:.1f} req/s",
    ]  # fmt: skip
    figures = Text("  ".join(parts), no_wrap=width >= _MIDDLE, overflow="ellipsis")
    active = sorted(
        (model for model in frame.models if model.state != "available" or model.total_queue_depth),
        key=lambda model: (-model.total_queue_depth, model.state != "loaded", model.name),
    )  # fmt: skip
    lanes = lanes_of(frame.workers)
    room = max(6, height - 2 - (0 if width >= _MIDDLE else 2) - 9)  # 9: a blank line, a heading and a rest for each of three tables
    some_lanes = min(len(lanes), max(1, room // 5))
    some_workers = min(len(frame.workers), max(1, (room - some_lanes) // 2), room - some_lanes)
    some_models = min(len(active), max(1, room - some_lanes - some_workers))
    some_workers = min(len(frame.workers), room - some_lanes - some_models)
    names = [each.name for each in frame.workers] + [each.name for each in active[:some_models]] + [lane for lane, *_ in lanes[:some_lanes]]
    others = _WIDE_REST if width >= _WIDE else _MIDDLE_REST if width >= _MIDDLE else _NARROW_REST
    first = min(max(map(cell_len, names), default=0), width - others)
    return Group(
        head, figures, Text(""),
        *_with_rest(_lanes(lanes[:some_lanes], first), len(lanes) - some_lanes, "more"), Text(""),
        *_with_rest(_workers(frame.workers, some_workers, width, first), len(frame.workers) - some_workers, "more"), Text(""),
        *_with_rest(_models(active[:some_models], width, first), len(frame.models) - some_models, "other models"),
    )  # fmt: skip


def _with_rest(table: Table, rest: int, what: str) -> Iterable[RenderableType]:
    from rich.text import Text

    return (table, Text(f"  {rest:,} {what}", "bright_black")) if rest > 0 else (table,)


def lanes_of(workers: Iterable[WorkerRow]) -> list[tuple[str, int, int, int]]:
    """(pool.machine profile.bundle, healthy workers, all workers, queued work items) of each lane that has a worker, by its name."""
    found: dict[str, tuple[int, int, int]] = {}
    for worker in workers:
        lane = f"{worker.pool}.{worker.gpu}.{worker.bundle}" if worker.pool else "(not known)"
        well, every, queued = found.get(lane, (0, 0, 0))
        found[lane] = well + worker.healthy, every + 1, queued + worker.queue_depth
    return [(lane, *counts) for lane, counts in sorted(found.items())]


def _table(first: int, *columns: tuple[str, bool]) -> Table:
    """Columns by title, each with whether it is a number. The first has `first` cells, which aligns the tables."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for number, (title, is_number) in enumerate(columns):
        table.add_column(
            title, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis", width=None if number else first,
            min_width=_COLUMNS.get(title),
        )  # fmt: skip
    return table


def _lanes(lanes: list[tuple[str, int, int, int]], first: int) -> Table:
    table = _table(first, ("LANE", False), ("WORKERS", False), ("QUEUED", True))
    for lane, well, every, queued in lanes:
        table.add_row(lane, f"{well}" if well == every else f"[red]{well} of {every}[/red]", f"{queued:,}")
    return table


def _workers(workers: list[WorkerRow], most: int, width: int, first: int) -> Table:
    """Those that are not well first, then by queue."""
    shown = sorted(workers, key=lambda worker: (worker.healthy, -worker.queue_depth, _counting(worker.name)))[:most]
    columns = [("WORKER", False), ("STATE", False), ("QUEUED", True)]
    columns += [("LOADED", True)] if width >= _MIDDLE else []
    columns += [("DEVICE", False), ("MEMORY", False)] if width >= _WIDE else [("MEM", True)] if width >= _MIDDLE else []
    table = _table(first, *columns)
    for worker in shown:
        state = "[green]ready[/green]" if worker.healthy else "[red]not ready[/red]"
        row = [_plain(worker.name), state, f"{worker.queue_depth:,}"]
        row += [str(len(worker.loaded_models))] if width >= _MIDDLE else []
        share = worker.memory_used_bytes / worker.memory_total_bytes if worker.memory_total_bytes else None
        if width >= _WIDE:
            row += [_plain(worker.device or "-"), _memory(worker, share)]
        elif width >= _MIDDLE:
            row += ["-" if share is None else f"{share:.0%}"]
        table.add_row(*row)
    return table


def _memory(worker: WorkerRow, share: float | None) -> str:
    if share is None:
        return "-"
    cells = 10
    full = min(cells, round(share * cells))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    bar = f"[{colour}]{'█' * full}[/{colour}][bright_black]{'░' * (cells - full)}[/bright_black]"
    return f"{bar} {share:4.0%} of {size(worker.memory_total_bytes)}"


def _models(models: list[ModelRow], width: int, first: int) -> Table:
    columns = [("MODEL", False), ("STATE", False), ("QUEUED", True)]
    columns += [("WORKERS", True)] if width >= _MIDDLE else []
    columns += [("PROFILES", False)] if width >= _WIDE else []
    table = _table(first, *columns)
    for model in models:
        colour = _STATE_COLOURS.get(model.state, "bright_black")
        row = [_plain(model.name), f"[{colour}]{model.state}[/{colour}]", f"{model.total_queue_depth:,}"]
        row += [str(model.worker_count)] if width >= _MIDDLE else []
        row += [_plain(", ".join(model.gpu_types) or "-")] if width >= _WIDE else []
        table.add_row(*row)
    return table


def _counting(name: str) -> list[tuple[str, int]]:
    """The order of names that end in numbers: 2 before 10."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name)]


def _plain(text: str) -> str:
    """Without markup of a terminal: names come from outside."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
