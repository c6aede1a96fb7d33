"""A job's progress until it ends: drawn in place in a terminal, a line for each change in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from sie_cli import display
from sie_cli.jobs import told

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress as Bars

    from sie_client import Job
    from sie_client.jobs import JobInfo
    from sie_client.types import Progress

INTERRUPTED = 130  # as a shell tells of Ctrl-C
BAR = 40


class _Stuck(Exception):
    """A job does not go on by itself."""


def follow(job: Job, *, err: bool, as_json: bool = False, also: str = "") -> None:
    """Until it has ended, however that is, or is paused by an error, which only people mend. `err`: progress goes to
    standard error. Ctrl-C ends the process, and says that the job goes on, and `also` what goes on with it.
    """
    from sie_client.errors import JobFailedError

    try:
        with _view(err=err, as_json=as_json) as show:

            def update(info: JobInfo) -> None:
                job.info = info
                show(info)
                if info.state == "paused" and info.error is not None:
                    raise _Stuck

            job.wait(on_progress=update)
    except (JobFailedError, _Stuck):
        return  # the view has shown it, and the status tells
    except KeyboardInterrupt:
        click.echo(
            f"\n{job.id} goes on: `sie jobs watch {job.id}` shows it again, `sie jobs cancel {job.id}` ends it"
            + (f"; {also}" if also else ""),
            err=True,
        )
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def _view(*, err: bool, as_json: bool) -> Iterator[Callable[[JobInfo], None]]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=err, highlight=False)
    if as_json or not console.is_terminal:
        yield ProgressLines(err=err, as_json=as_json).show
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda info: live.update(picture(info, time.time()), refresh=True)


def picture(info: JobInfo, now_s: float) -> Group:
    """A bar, and what is to say."""
    from rich.console import Group
    from rich.text import Text

    first, *rest = told.progress(info, now_s)
    share = told.percent(info)
    filled = BAR * (share or 0) // 100
    bar = Text("━" * filled, "green").append("━" * (BAR - filled), "bright_black")
    bar.append(f"  {first}", {"completed": "green", "failed": "red", "expired": "red"}.get(info.state, ""))
    return Group(bar, *(Text(line, "yellow" if line.startswith("waits") else "") for line in rest))


class ProgressLines:
    """One line for each change: of the state, of the percentage, of the codes of errors, of what it waits for."""

    def __init__(self, *, err: bool, as_json: bool) -> None:
        self._err = err
        self._as_json = as_json
        self._last: object = None

    def show(self, info: JobInfo) -> None:
        trouble = info.trouble.code if info.trouble is not None else ""
        shown = (info.state, told.percent(info), sorted(info.errors), trouble)
        if shown == self._last:
            return
        self._last = shown
        if self._as_json:
            click.echo(msgspec.json.encode(info).decode(), err=self._err)
        else:
            click.echo("; ".join(told.progress(info, time.time())), err=self._err)


def sending(bars: Bars, name: str) -> Callable[[Progress], None]:
    """A bar of bytes, from the first of them on."""
    task = None

    def show(progress: Progress) -> None:
        nonlocal task
        if task is None:
            task = bars.add_task(display.printable(name), total=progress.total)
        bars.update(task, completed=progress.done)

    return show


def fetch(job: Job, folder: Path) -> None:
    """The files of its output, with a bar. Ctrl-C ends the process; the same again goes on."""
    try:
        with display.transfers() as bars:
            paths = job.download(folder, on_progress=sending(bars, str(folder)))
    except KeyboardInterrupt:
        click.echo(f"\n`sie jobs result {job.id} {folder}` fetches what is missing", err=True)
        sys.exit(INTERRUPTED)
    size = sum(path.stat().st_size for path in paths)
    click.echo(f"{display.counted(len(paths), 'file')}, {display.size(size)}, in {folder}", err=True)
