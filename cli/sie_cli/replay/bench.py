"""`sie bench`: predict the effect of a change of settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from sie_cli.options import loaded
from sie_cli.refusal import CommandRefused
from sie_cli.replay import trace as traces
from sie_cli.replay.curve import percentile, svg
from sie_cli.replay.replay import Machine, Replay, ReplayPlan, ReplayReport, plan_of
from sie_cli.replay.trace import Trace, TraceError

PLAN = tuple(field.name for field in dataclasses.fields(ReplayPlan))
DEVICE = {"base_ms": 1e3, "token_us": 1e6, "square_ns": 1e9}  # parameter -> number of its units in a second
HOST = {"call_us": 1e6, "read_us": 1e6, "delivery_us": 1e6}
# durations of a host, in microseconds; docs/replay.md says how they were measured
HOST_DEFAULT = "call_us=55,read_us=1.8,delivery_us=25"


@click.group(short_help="Predict the effect of other settings on recorded traffic.")
def bench() -> None:
    """Predict latency from a recorded trace."""


@bench.command(name="replay")
@click.argument("files", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="NAME=NUMBER,...",
    help="Settings to try. Each --what-if adds a column to the table. May be repeated.",
)
@click.option(
    "--base",
    default="",
    metavar="NAME=NUMBER,...",
    help="Settings of the recorded cluster that the traces lack. Default: the defaults of SIE.",
)
@click.option(
    "--device",
    default="",
    metavar="NAME=NUMBER,...",
    help=f"Times of the simulated device: {', '.join(DEVICE)}. Default: fitted to the measured batches.",
)
@click.option(
    "--host",
    default="",
    metavar="NAME=NUMBER,...",
    help=f"A worker's time for a tokenise call, for each token in it, and for a delivery. [default: {HOST_DEFAULT}]",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a plot of the latency percentiles of all columns to this file, as SVG.",
)
@click.option(
    "--generate",
    metavar="SPEC",
    help=(
        "Create TRACE first. SPEC is poisson:name=number,... with the names rate (requests a second), seconds, burst "
        "(requests that arrive together), inputs (of a request), length (mean tokens of an input, log-normal), spread "
        "(sigma of the lengths), bulk (share of requests with this priority), models, seed."
    ),
)
def replay_command(
    files: tuple[Path, ...],
    what_ifs: tuple[str, ...],
    base: str,
    device: str,
    host: str,
    plot: Path | None,
    generate: str | None,
) -> None:
    """Predict the effect of other settings on TRACE. The result is latency and device time.

    The requests of the traces pass the cluster's scheduler (chunks, credit, quantum, batches) in virtual time. The
    simulated device needs base_ms + token_us * tokens + square_ns * sum of squared lengths for a batch.
    Without --device, these values are fitted to the batches of the traces. The first column is for the recorded
    settings, the others are for each --what-if.

    \b
    Parameters of --what-if (most have an SIE_ setting with a similar name):
      workers, lanes (batches that a device runs at once), max_wait_ms (SIE_BATCHER_COALESCE_MS), max_batch_cost,
      max_batch_requests (SIE_BATCHER_MAX_BATCH_REQUESTS), pipeline_depth, bulk_max_overtakes, chunk_cost,
      min_quantum_ms, max_quantum_ms, target_p50_ms

    \b
    A trace is JSON lines of lengths and times, without text. `sie sidecar --record-trace FILE` writes one; several are
    merged.
      {"at": 0.0184, "tokens": [12, 300], "model": "bge", "priority": "bulk", "lora": "org/x"}
                                   a request: its arrival in seconds, and the tokens of each input; the other fields
                                   are optional
      {"ran": {"tokens": 512, "attention": 40960, "seconds": 0.0123}}
                                   a measured batch; attention is the sum of its squared lengths
      {"settings": {"max_wait_ms": 5, "workers": 2}}
                                   the settings during the recording

    \b
    sie bench replay day.jsonl --what-if max_wait_ms=4,workers=3 --plot day.svg
    sie bench replay new.jsonl --generate poisson:rate=200,length=64,seconds=30 --device base_ms=2,token_us=20
    """
    try:
        if generate is not None:
            _write(files, generate)
        trace = _trace(files)
        was = dataclasses.replace(plan_of(loaded({}).settings), **_recorded(trace), **traces.numbers(base, PLAN))
        machine = _machine(trace, device, host)
        plans = {
            "as it was": was,
            **{text: dataclasses.replace(was, **traces.numbers(text, PLAN)) for text in what_ifs},
        }
        reports = {name: Replay(trace.requests, plan, machine).run() for name, plan in plans.items()}
        if plot is not None:
            plot.write_text(svg({name: report.latency_s for name, report in reports.items()}), "utf-8")
    except (TraceError, OSError) as error:
        raise CommandRefused(str(error)) from error
    except OverflowError as error:
        raise CommandRefused(f"a number is too large for a replay ({error})") from error
    click.echo(
        f"{len(trace.requests)} requests in {trace.requests[-1].at:.1f} s; a batch takes {machine.base_s * 1e3:.3g} ms "
        f"+ {machine.token_s * 1e6:.3g} us a token + {machine.square_s * 1e9:.3g} ns per squared length"
    )
    click.echo(table(reports, plans))


def _trace(files: Sequence[Path]) -> Trace:
    try:
        return traces.read(line for file in files for line in file.read_bytes().splitlines())
    except TraceError as error:
        raise TraceError(f"{', '.join(map(str, files))}: {error}") from error


def _write(files: Sequence[Path], spec: str) -> None:
    if len(files) != 1:
        raise TraceError("--generate writes one TRACE: name one file")
    requests = traces.generate(spec)
    try:
        with files[0].open("xb") as file:  # mode x fails for an existing file: never overwrite a recorded trace
            try:
                file.writelines(traces.write(requests))
                file.flush()
            except BaseException:
                files[0].unlink()  # a later replay could not tell a partial trace from a whole trace
                raise
    except OSError as error:
        raise TraceError(f"{files[0]}: {error.strerror}") from error


def _recorded(trace: Trace) -> dict[str, float]:
    unknown = trace.settings.keys() - set(PLAN)
    if unknown:
        raise TraceError(
            f"the trace was recorded with the settings {', '.join(sorted(unknown))}, which this version lacks: use the "
            "`sie` that recorded it"
        )
    return trace.settings


def _machine(trace: Trace, device: str, host: str) -> Machine:
    measured = traces.numbers(device, tuple(DEVICE))
    batch = (
        tuple(measured.get(name, 0.0) / unit for name, unit in DEVICE.items()) if measured else traces.fit(trace.ran)
    )
    hosted = {**traces.numbers(HOST_DEFAULT, tuple(HOST)), **traces.numbers(host, tuple(HOST))}
    times_s = (*batch, *(hosted[name] / unit for name, unit in HOST.items()))
    if min(times_s) < 0 or not any(batch):
        raise TraceError("--device, --host: times must not be negative, and the time of a batch must be above 0")
    return Machine(*times_s)


def table(reports: dict[str, ReplayReport], plans: dict[str, ReplayPlan]) -> str:
    columns = [["", *_CELLS]]
    for name, report in reports.items():
        columns.append([name, *(cell(report, plans[name]) for cell in _CELLS.values())])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        ).rstrip()
        for first, *rest in rows
    )


def _ms(values_s: Sequence[float], percent: float) -> str:
    return f"{percentile(sorted(values_s), percent) * 1e3:.2f}"


def _busy(report: ReplayReport, plan: ReplayPlan) -> float:
    return report.device_s / (report.end_s * int(plan.workers) * int(plan.lanes))


_CELLS: dict[str, Callable[[ReplayReport, ReplayPlan], str]] = {
    "latency p50, ms": lambda report, plan: _ms(report.latency_s, 50),
    "latency p90, ms": lambda report, plan: _ms(report.latency_s, 90),
    "latency p99, ms": lambda report, plan: _ms(report.latency_s, 99),
    "longest, ms": lambda report, plan: _ms(report.latency_s, 100),
    "wait for the device p50, ms": lambda report, plan: _ms(report.wait_s, 50),
    "wait for the device p99, ms": lambda report, plan: _ms(report.wait_s, 99),
    "device time, s": lambda report, plan: f"{report.device_s:.3f}",
    "device busy, %": lambda report, plan: f"{100 * _busy(report, plan):.1f}",
    "batches": lambda report, plan: f"{report.batches}",
    "messages a batch": lambda report, plan: f"{report.items / report.batches:.2f}",
    "tokens a batch": lambda report, plan: f"{report.tokens / report.batches:.1f}",
    "tokenise calls": lambda report, plan: f"{report.calls}",
    "tokenising, s": lambda report, plan: f"{report.host_s:.3f}",
}
