"""Functions for jobs: build the request that starts one, follow its progress, and describe its state in words."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sie_cli import display
from sie_cli.display import counted, printable, problem
from sie_cli.moments import Deadline, local, moment, span
from sie_cli.refusal import INTERRUPTED, CommandRefused, refusing
from sie_contracts.errors import UNDECODABLE

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress as Bars

    from sie_client import Job
    from sie_client.jobs import JobInfo
    from sie_client.types import JobOptions, Progress
    from sie_contracts.api.jobs import Forecast, JobError


COMPLETED, OTHERWISE, ROWS_FAILED = 0, 1, 3  # exit statuses; OTHERWISE: the job is not completed


def exit_status(info: JobInfo) -> int:
    if info.state != "completed":
        return OTHERWISE
    return ROWS_FAILED if info.counts.failed or info.broken else COMPLETED


def rows_text(info: JobInfo) -> str:
    counts = info.counts
    parts = [
        f"{counts.done:,} rows" if counts.rows is None else f"{counts.done:,} of {counts.rows:,} rows",
        f"{counts.failed:,} with an error" if counts.failed else "",
        f"{counts.reused:,} reused" if counts.reused else "",
    ]
    return ", ".join(filter(None, parts))


def percent_done(info: JobInfo) -> int | None:
    """Compute the percentage of completed rows. Return None if the number of rows is not yet known."""
    total = info.counts.rows
    return None if total is None else 100 if not total else 100 * info.counts.done // total


def forecast_text(estimate: Forecast, deadline_s: float, now_s: float) -> str:
    """Format the forecast of a job: its rate, its end, and whether the end is before its deadline."""
    workers = counted(estimate.workers, "worker")
    text = (
        f"{estimate.rows_per_s:,.0f} rows/s by {workers}, done at {local(estimate.done_at, now_s)} ± "
        f"{span(estimate.plus_minus_s)}"
    )
    if not deadline_s:
        return text
    if estimate.done_at + estimate.plus_minus_s <= deadline_s:
        return f"{text}, before its deadline {local(deadline_s, now_s)}"
    needed = estimate.workers_needed
    wants = "" if needed is None else f": {counted(needed, 'worker')} would meet it"
    return f"{text}, perhaps after its deadline {local(deadline_s, now_s)}{wants}"


def errors_text(info: JobInfo) -> str:
    counts = sorted(info.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{printable(code)} {count:,}" for code, count in counts)


def problem_text(error: JobError) -> str:
    return printable(
        f"{error.code}: {error.message}"
        + (f" ({error.param})" if error.param and error.param not in error.message else "")
    )


def progress_lines(info: JobInfo, now_s: float) -> list[str]:
    share = percent_done(info)
    first = f"{printable(info.id)} {printable(info.state)}"
    lines = [f"{first}, {rows_text(info)}" + ("" if share is None else f" ({share} %)")]
    if info.forecast is not None and not info.has_ended:
        lines.append(forecast_text(info.forecast, _deadline(info), now_s))
    if info.errors:
        lines.append(f"errors: {errors_text(info)}")
    if info.trouble is not None and not info.has_ended:
        lines.append(f"waits: {problem_text(info.trouble)}")
    if info.error is not None:
        lines.append(problem_text(info.error))
    return lines


def _deadline(info: JobInfo) -> float:
    deadline = info.request.get("deadline")
    return float(deadline) if isinstance(deadline, int | float) else 0.0


def jobs_table(infos: Iterable[JobInfo]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("ID", "CREATED (UTC)", "STATE", "ROWS", "DONE", "ERRORS", "MODEL", "NAME")]
    for info in infos:
        counts, share = info.counts, percent_done(info)
        total = "?" if counts.rows is None else f"{counts.rows:,}"
        done = f"{counts.done:,}" if share is None else f"{share} %"
        created, failed = moment(info.created_at), f"{counts.failed:,}"
        lines.append((info.id, created, info.state, total, done, failed, info.model, info.name))
    return lines


def job_facts(info: JobInfo, now_s: float) -> dict[str, str]:
    counts, request = info.counts, info.request
    shards = "?" if counts.shards is None else f"{counts.shards:,}"
    fields = {
        "id": info.id,
        "name": info.name,
        "state": info.state,
        "model": info.model,
        "operation": info.operation,
        "owner": info.owner,
        "created": f"{moment(info.created_at)} UTC",
        "started": "" if info.started_at is None else f"{moment(info.started_at)} UTC",
        "ended": "" if info.ended_at is None else f"{moment(info.ended_at)} UTC",
        "rows": rows_text(info),
        "shards": f"{counts.shards_done:,} of {shards}"
        + (f", {counts.shards_failed:,} failed" if counts.shards_failed else ""),
        "tokens": f"{counts.tokens:,}",
        "errors": errors_text(info),
        "error": "" if info.error is None else problem_text(info.error),
        "waits": "" if info.trouble is None or info.has_ended else problem_text(info.trouble),
        "forecast": ""
        if info.forecast is None or info.has_ended
        else forecast_text(info.forecast, _deadline(info), now_s),
        "output": info.output_url or f"kept with the job: sie jobs result {info.id} FOLDER",
        "fingerprint": info.fingerprint,
    }
    requested = {name: value for name, value in request.items() if name not in ("model", "operation", "name")}
    fields |= {name: _plain(value) for name, value in _flat(requested)}
    fields |= {f"broken {number}": line for number, line in enumerate(info.broken, 1)}
    return {name: printable(value) for name, value in fields.items() if value}


def _flat(request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a job's request, with those of `input` and `output` as `input.NAME` and `output.NAME`."""
    fields: list[tuple[str, Any]] = []
    for name, value in request.items():
        if name in ("input", "output") and isinstance(value, Mapping):
            fields += [(f"{name}.{inner}", inner_value) for inner, inner_value in value.items()]
        elif name == "deadline" and isinstance(value, int | float):
            fields.append((name, f"{moment(value)} UTC" if value else ""))
        else:
            fields.append((name, value))
    return fields


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\n", "\\n")
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_plain(inner)}" for name, inner in value.items())
    if isinstance(value, Sequence):
        return ", ".join(map(_plain, value))
    return str(value)


def failures_table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("ROW", "ERROR")]
    for row in rows:
        error = row.get("error")
        text = problem(error) if isinstance(error, Mapping) else str(error)
        lines.append((str(row.get("id", "?")), text))
    return lines


def hint_at_failures(job: JobInfo) -> None:
    if job.counts.failed:
        click.echo(f"`sie jobs show {printable(job.id)} --failed` says why rows have an error", err=True)


@dataclass(frozen=True)
class OutputPlace:
    """Destination of a job's output. `url`: where the server writes. `folder`: a local folder, filled after the job has
    ended. Without both, the server stores the output with the job. `is_made`: this command created the folder.
    """

    url: str = ""
    folder: Path | None = None
    is_made: bool = False

    @classmethod
    def from_option(cls, text: str | None, *, is_new: bool = True) -> OutputPlace:
        """Return the destination for the value of an option. Raises CommandRefused if the folder cannot be created, or
        if `is_new` and the folder has the files of a job.
        """
        if text is None:
            return cls()
        if "://" in text:
            return cls(url=text)
        folder = Path(os.path.expanduser(text))
        if is_new and (folder / "manifest.json").exists():
            raise CommandRefused(f"{folder} has the files of another job: name another folder")
        is_made = not folder.exists()
        with refusing():
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder=folder, is_made=is_made)

    def unmade(self) -> None:
        """Remove the folder if this command created it and it is empty."""
        if self.folder is not None and self.is_made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def parse_params(pairs: Iterable[str], option: str = "--param", example: str = "dimensions=256") -> dict[str, Any]:
    """Parse pairs `KEY=JSON`. A value that is not JSON is a text. Raises BadParameter, which shows `example`."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name.strip() and mark):
            raise click.BadParameter(f"{pair[:80]}: expected KEY=VALUE, such as {example}", param_hint=option)
        try:
            values[name.strip()] = msgspec.json.decode(value)
        except UnicodeEncodeError as error:
            raise click.BadParameter(f"{name[:80]}: expected a value in UTF-8", param_hint=option) from error
        except UNDECODABLE:
            values[name.strip()] = value
    return values


def parse_metadata(pairs: Iterable[str]) -> dict[str, str]:
    """Parse pairs `KEY=TEXT`. Raises BadParameter."""
    texts = dict[str, str]()
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name and mark):
            raise click.BadParameter(f"{pair[:80]}: expected KEY=TEXT", param_hint="--metadata")
        texts[name] = value
    return texts


def parse_chunks(text: str) -> dict[str, Any] | str:
    """Parse a rule such as `max_tokens=256,boundary=paragraph`. A text without `=` is the name of a column:
    return it unchanged. Raises BadParameter.
    """
    return parse_params(text.split(","), "--chunks", "max_tokens=256") if "=" in text else text


def submit_options(values: dict[str, Any], place: OutputPlace) -> JobOptions:
    """Convert command-line options to options of the client. Omit unset options, so that the server uses its defaults.
    Raises BadParameter.
    """
    if values["operation"] is None and (values["query"] or values["document"]):
        values["operation"] = "score"
    output = {"url": place.url, **{name: values.pop(name) for name in ("format", "sink", "collection")}}
    output = {name: value for name, value in output.items() if value}
    keep = [name.strip() for names in values.pop("keep") for name in names.split(",") if name.strip()]
    job_options: dict[str, Any] = {
        **values,
        "output": output or None,
        "keep": keep or None,
        "chunks": parse_chunks(values["chunks"]) if values["chunks"] else None,
        "params": parse_params(values["params"]) or None,
        "metadata": parse_metadata(values["metadata"]) or None,
        "deadline": Deadline.parse(values["deadline"]).after(time.time()) if values["deadline"] else None,
        "windows": list(values["windows"]) or None,
    }
    # a line break is hard to type in a shell, so users may type the two characters \n instead
    for name in ("text", "query", "document"):
        job_options[name] = job_options[name].replace("\\n", "\n") if job_options[name] else None
    context = {"context": False} if job_options.pop("no_context") else {}
    chosen = {name: value for name, value in job_options.items() if value not in (None, False, "")}
    return {**chosen, **context}  # type: ignore[typeddict-item]


BAR = 40
_CHECKED = ("text", "query", "document", "image", "documents", "id")  # options that name columns of the input


def check_columns(path: Path, job_options: JobOptions) -> None:
    """Raise CommandRefused before the upload if a local file lacks a column that the job reads. If the packages for
    jobs are not installed, only the server checks the columns.
    """
    from sie_contracts.api.jobs import JobInput
    from sie_contracts.errors import InvalidInput

    named: Mapping[str, Any] = job_options
    fields = {name: named[name] for name in _CHECKED if name in named}
    if isinstance(column := named.get("chunks"), str):
        fields["chunks"] = column
    source = JobInput(**fields, keep=tuple(named.get("keep", ())), format=named.get("input_format"))
    try:
        from sie_bulk_jobs.datasets.plans import check_file

        check_file(path, source)
    except InvalidInput as error:
        raise CommandRefused(error.message) from error
    except (ModuleNotFoundError, OSError):  # no check here: the server checks the columns, and the upload reports an
        # unreadable file
        return


class _Stuck(Exception):
    """Raised for a job that is paused by an error, so that a person must continue it."""


def follow(job: Job, *, err: bool, as_json: bool = False, also: str = "") -> None:
    """Follow a job until it has ended, or is paused by an error that only a person can fix. `err`: print the progress
    to standard error. Ctrl-C ends the process, and prints that the job continues. `also`: text to append to that
    message.
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
        return  # the error is already printed, and the caller's exit status reports it
    except KeyboardInterrupt:
        name = printable(job.id)
        click.echo(
            f"\n{name} goes on: `sie jobs watch {name}` shows it again, `sie jobs cancel {name}` ends it"
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
    from rich.console import Group
    from rich.text import Text

    first, *rest = progress_lines(info, now_s)
    share = percent_done(info)
    filled = BAR * (share or 0) // 100
    bar = Text("━" * filled, "green").append("━" * (BAR - filled), "bright_black")
    bar.append(f"  {first}", {"completed": "green", "failed": "red", "expired": "red"}.get(info.state, ""))
    return Group(bar, *(Text(line, "yellow" if line.startswith("waits") else "") for line in rest))


class ProgressLines:
    """Printer that prints a line when the state, the percentage, the error codes or the cause of a wait changes."""

    def __init__(self, *, err: bool, as_json: bool) -> None:
        self._err = err
        self._as_json = as_json
        self._last: object = None

    def show(self, info: JobInfo) -> None:
        trouble = info.trouble.code if info.trouble is not None else ""
        shown = (info.state, percent_done(info), sorted(info.errors), trouble)
        if shown == self._last:
            return
        self._last = shown
        if self._as_json:
            click.echo(display.document(info, indent=-1), err=self._err)
        else:
            click.echo("; ".join(progress_lines(info, time.time())), err=self._err)


def transfer_bar(bars: Bars, name: str) -> Callable[[Progress], None]:
    """Return a callback that shows how many bytes of a file were transferred. The bar appears with the first bytes."""
    task = None

    def show(progress: Progress) -> None:
        nonlocal task
        if task is None:
            task = bars.add_task(display.printable(name), total=progress.total)
        bars.update(task, completed=progress.done)

    return show


def fetch_output(job: Job, folder: Path) -> None:
    """Fetch the files of a job's output, with a progress bar. After Ctrl-C, the next call fetches missing files."""
    try:
        with display.transfers() as bars:
            paths = job.download(folder, on_progress=transfer_bar(bars, str(folder)))
    except KeyboardInterrupt:
        click.echo(f"\n`sie jobs result {job.id} {shlex.quote(str(folder))}` fetches what is missing", err=True)
        sys.exit(INTERRUPTED)
    size = sum(path.stat().st_size for path in paths)
    click.echo(f"{display.counted(len(paths), 'file')}, {display.size(size)}, in {folder}", err=True)
