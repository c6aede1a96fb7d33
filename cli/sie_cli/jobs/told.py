"""A job in words, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from sie_cli.display import counted, printable
from sie_cli.moments import local, moment, span

if TYPE_CHECKING:
    from sie_client.jobs import JobInfo
    from sie_contracts.api.jobs import Forecast, JobError

COMPLETED, OTHERWISE, ROWS_FAILED = 0, 1, 3  # statuses


def status(info: JobInfo) -> int:
    """Of a command that is about the outcome of a job."""
    if info.state != "completed":
        return OTHERWISE
    return ROWS_FAILED if info.counts.failed or info.broken else COMPLETED


def rows(info: JobInfo) -> str:
    """How many rows are answered, and how."""
    counts = info.counts
    parts = [
        f"{counts.done:,} rows" if counts.rows is None else f"{counts.done:,} of {counts.rows:,} rows",
        f"{counts.failed:,} with an error" if counts.failed else "",
        f"{counts.reused:,} reused" if counts.reused else "",
    ]
    return ", ".join(filter(None, parts))


def percent(info: JobInfo) -> int | None:
    """Of its rows; None before they are counted."""
    total = info.counts.rows
    return None if total is None else 100 if not total else 100 * info.counts.done // total


def forecast(estimate: Forecast, deadline_s: float, now_s: float) -> str:
    """When it will be done, at which rate, and whether that is in time."""
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
    wants = "" if needed is None else f": {counted(needed, 'worker')} would keep it"
    return f"{text}, perhaps after its deadline {local(deadline_s, now_s)}{wants}"


def errors(info: JobInfo) -> str:
    """Rows with an error by its code, the most frequent first."""
    counts = sorted(info.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{printable(code)} {count:,}" for code, count in counts)


def problem(error: JobError) -> str:
    """Its code, message and field."""
    return printable(
        f"{error.code}: {error.message}"
        + (f" ({error.param})" if error.param and error.param not in error.message else "")
    )


def progress(info: JobInfo, now_s: float) -> list[str]:
    """Some lines: what it does, and what is wrong."""
    share = percent(info)
    first = f"{printable(info.id)} {printable(info.state)}"
    lines = [f"{first}, {rows(info)}" + ("" if share is None else f" ({share} %)")]
    if info.forecast is not None and not info.has_ended:
        lines.append(forecast(info.forecast, _deadline(info), now_s))
    if info.errors:
        lines.append(f"errors: {errors(info)}")
    if info.trouble is not None and not info.has_ended:
        lines.append(f"waits: {problem(info.trouble)}")
    if info.error is not None:
        lines.append(problem(info.error))
    return lines


def _deadline(info: JobInfo) -> float:
    deadline = info.request.get("deadline")
    return float(deadline) if isinstance(deadline, int | float) else 0.0


def table(infos: Iterable[JobInfo]) -> list[tuple[str, ...]]:
    """A line for each job, and a header."""
    lines: list[tuple[str, ...]] = [("ID", "CREATED (UTC)", "STATE", "ROWS", "DONE", "ERRORS", "MODEL", "NAME")]
    for info in infos:
        counts, share = info.counts, percent(info)
        total = "?" if counts.rows is None else f"{counts.rows:,}"
        done = f"{counts.done:,}" if share is None else f"{share} %"
        words = (info.id, moment(info.created_at), info.state, total, done, f"{counts.failed:,}", info.model, info.name)
        lines.append(tuple(map(printable, words)))
    return lines


def facts(info: JobInfo, now_s: float) -> dict[str, str]:
    """Everything that is known of a job."""
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
        "rows": rows(info),
        "shards": f"{counts.shards_done:,} of {shards}"
        + (f", {counts.shards_failed:,} failed" if counts.shards_failed else ""),
        "tokens": f"{counts.tokens:,}",
        "errors": errors(info),
        "error": "" if info.error is None else problem(info.error),
        "waits": "" if info.trouble is None or info.has_ended else problem(info.trouble),
        "forecast": "" if info.forecast is None or info.has_ended else forecast(info.forecast, _deadline(info), now_s),
        "output": info.output_url or f"kept with the job: sie jobs result {info.id} FOLDER",
        "fingerprint": info.fingerprint,
    }
    requested = {name: value for name, value in request.items() if name not in ("model", "operation", "name")}
    fields |= {name: _plain(value) for name, value in _flat(requested)}
    fields |= {f"broken {number}": line for number, line in enumerate(info.broken, 1)}
    return {name: printable(value) for name, value in fields.items() if value}


def _flat(request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The fields of input and output beside the others."""
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


def failures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows that failed, as a table."""
    lines: list[tuple[str, ...]] = [("ROW", "ERROR")]
    for row in rows:
        error = row.get("error")
        text = f"{error.get('code', '')}: {error.get('message', '')}" if isinstance(error, Mapping) else str(error)
        lines.append((printable(str(row.get("id", "?"))), printable(text)))
    return lines


def hint(job: JobInfo) -> None:
    """Say how to learn why rows have an error."""
    if job.counts.failed:
        click.echo(f"`sie jobs show {job.id} --failed` says why rows have an error", err=True)
