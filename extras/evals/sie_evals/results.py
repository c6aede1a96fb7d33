"""Stored results, and the changes from one result to another.

EvalReport ──► DATA_DIR/evals/MODEL/TASK/KIND/TIME-COMMIT-MACHINE.json ──► StoredReport

KIND is `quality` or `perf`. The commands `list` and `compare` read these files. The source `targets` reads the newest
result of the same machine profile, but only if the user names no file of targets and the packaged file of targets lacks
the model or the task.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

import sie_contracts
from sie_cli.refusal import CommandRefused
from sie_contracts.errors import UNDECODABLE
from sie_evals.quality import Measurement, difference
from sie_evals.report import EvalReport
from sie_store import durable

GIT_S = 5.0
FIGURES = {"model", "task", "kind", "rows"}  # keys that `figures` of every stored result must have
TOLD_ITEMS = 3  # largest number of queries to list for a metric: those whose value decreased the most


class StoredReport(msgspec.Struct):
    """Stored result of an evaluation. `about`: the machine and the software of the measurement. `figures`: the result
    of `EvalReport.figures`.
    """

    time: str
    about: dict[str, Any]
    figures: dict[str, Any]


def about(cluster: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """Describe the machine and software of a measurement. `cluster`: facts about the cluster and the model."""
    return {
        "version": sie_contracts.__version__,
        "commit": _commit(),
        "machine": machine,
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        **cluster,
    }


def check(folder: Path) -> None:
    """Raise CommandRefused if the folder cannot store results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandRefused(f"{folder}: {error.strerror}: name a writable folder with --results") from error


def store(folder: Path, report: EvalReport, context: Mapping[str, Any]) -> Path:
    """Write a result and return its file. Raises CommandRefused."""
    now = datetime.datetime.now(datetime.UTC)
    name = f"{now:%Y%m%dT%H%M%S%f}-{context['commit'] or context['version']}-{context['machine']}"
    file = _place(folder, report.model, report.task, report.kind) / f"{_plain(name)}.json"
    stored = StoredReport(now.isoformat(timespec="seconds"), dict(context), report.figures())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.write(file, msgspec.json.encode(stored))
    except OSError as error:
        raise CommandRefused(
            f"{file}: {error.strerror}: the result was not stored; --results names another folder"
        ) from error
    return file


def read(file: Path) -> StoredReport:
    """Read a stored result from its file. Raises CommandRefused."""
    try:
        stored = msgspec.json.decode(file.read_bytes(), type=StoredReport)
    except OSError as error:
        raise CommandRefused(f"{file}: {error.strerror}: `sie eval list` shows the results that are stored") from error
    except UNDECODABLE as error:
        raise CommandRefused(f"{file} is no result of `sie eval`: {error}") from error
    if missing := FIGURES - stored.figures.keys():
        raise CommandRefused(f"{file} is no result of `sie eval`: its figures lack {', '.join(sorted(missing))}")
    return stored


def readable(files: Iterable[Path]) -> Iterator[tuple[Path, StoredReport]]:
    """Yield each file that is a result, with the result. Write the names of the other files to standard error."""
    for file in files:
        try:
            yield file, read(file)
        except CommandRefused as error:
            click.echo(f"skipped: {error.format_message()}", err=True)


def every(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*/*.json"), key=lambda file: file.name)


def last(folder: Path, model: str, task: str, kind: str, machine: str, batch: int = 1) -> StoredReport | None:
    """Return the newest result of a model, task and kind on this machine profile, or None. `batch`: texts per request,
    for the kind `perf`.
    """
    files = sorted(_place(folder, model, task, kind).glob("*.json"), reverse=True)
    for _, stored in readable(files):
        # Compare the stored names. `_plain` replaces characters, so several models or tasks may have the same folder.
        subject = [stored.figures["model"], stored.figures["task"]]
        if subject == [model, task] and [stored.about.get("machine"), stored.about.get("batch", 1)] == [machine, batch]:
            return stored
    return None


def compared(old: StoredReport, new: StoredReport) -> tuple[list[list[str]], list[str]]:
    """Return a table of the metrics that are in both results, and lines with the other differences. Raises
    CommandRefused.
    """
    for name in ("task", "kind"):
        if old.figures[name] != new.figures[name]:
            raise CommandRefused(
                f"the results have a different {name}, {old.figures[name]} and {new.figures[name]}: "
                "they cannot be compared"
            )
    notes = [
        f"{name}: {_about(old.about.get(name))} -> {_about(new.about.get(name))}"
        for name in dict.fromkeys([*old.about, *new.about])
        if old.about.get(name) != new.about.get(name)
    ]
    if old.figures["model"] != new.figures["model"]:
        notes.insert(0, f"model: {old.figures['model']} -> {new.figures['model']}")
    queries = new.figures.get("queries", [])
    is_same = old.figures.get("queries", []) == queries
    if not is_same:
        notes.append("the queries differ, so no change has a confidence interval")
    table = [["source", "metric", "old", "new", "change"]]
    before = {_key(row): row for row in old.figures["rows"]}
    after = {_key(row): row for row in new.figures["rows"]}
    for key in [key for key in before if key in after]:
        lines, fallen = _row_compared(key, before[key], after[key], queries, is_same=is_same)
        table += lines
        notes += fallen
    notes += [f"only the old result has {' '.join(key)}" for key in before if key not in after]
    notes += [f"only the new result has {' '.join(key)}" for key in after if key not in before]
    return table, notes


def _row_compared(
    key: Sequence[str],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    queries: Sequence[Sequence[str]],
    *,
    is_same: bool,
) -> tuple[list[list[str]], list[str]]:
    """Return the lines of the table for one source, and notes. `is_same`: both results measured the same `queries`."""
    lines, notes = [], []
    for metric in [name for name in old["scores"] if name in new["scores"]]:
        before, after = old["scores"][metric], new["scores"][metric]
        if before is None or after is None:
            change = "-"
        elif is_same and "values" in old and len(old["values"][metric]) == len(new["values"][metric]):
            was, now = (
                Measurement(key[0], row["values"], row["gold"], weights=row.get("weights", {})) for row in (old, new)
            )
            gap = difference(now, was, metric)
            change = f"{gap.value:+.4f}" + (f" ({gap.spread})" if gap.spread else "")
            notes += _fallen(key, metric, was, now, queries)
        elif before:
            change = f"{after / before - 1:+.1%}"
        else:
            change = f"{after - before:+.4g}"
        lines.append([" ".join(key), metric, _number(before), _number(after), change])
    for name in [name for name in old.get("stages_ms", {}) if name in new.get("stages_ms", {})]:
        before, after = old["stages_ms"][name], new["stages_ms"][name]
        lines.append([" ".join(key), name, f"{before:.3g} ms", f"{after:.3g} ms", f"{after - before:+.3g} ms"])
    return lines, notes


def _fallen(
    key: Sequence[str], metric: str, was: Measurement, now: Measurement, queries: Sequence[Sequence[str]]
) -> list[str]:
    """Name the queries whose value of the metric decreased the most, each with its id and text. The list is empty for a
    rank correlation, which has no value for a single query.
    """
    if was.gold or len(queries) != len(now.values[metric]):
        return []
    lost = sorted(
        (after - before, place)
        for place, (before, after) in enumerate(zip(was.values[metric], now.values[metric], strict=True))
    )
    items = [f'{queries[place][0]} "{queries[place][1]}" {by:+.4f}' for by, place in lost[:TOLD_ITEMS] if by < 0]
    return [f"{' '.join(key)}, {metric}, fell the most: {', '.join(items)}"] if items else []


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (row["source"], row["load"]) if "load" in row else (row["source"],)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _about(value: object) -> str:
    return "unknown" if value in (None, "") else str(value)


def _place(folder: Path, model: str, task: str, kind: str) -> Path:
    return folder / _plain(model) / _plain(task) / kind


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "_"


def _commit() -> str:
    """Return the commit of the folder in which this process runs; empty if the folder is no checkout."""
    try:
        ran = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
