"""What was measured, for people and for programs.

quality.Found, perf.Point ──► Report ──► terminal, JSON, Markdown, HTML, a stored result
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sie_cli.evals import plots
from sie_cli.evals.perf import CLIENT_LIMIT, Point
from sie_cli.evals.quality import CONFIDENCE, Difference, Found, difference, has_interval
from sie_cli.evals.targets import Targets

Kind = Literal["quality", "perf"]
KINDS: Sequence[Kind] = ("quality", "perf")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .3rem .8rem; text-align: right } td:first-child, th:first-child { text-align: left }
tr + tr { border-top: 1px solid #ddd } .missed { color: #b3261e } svg { max-width: 100%; height: auto }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ about }}</p>
<table>
<tr>{% for cell in table[0] %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<ul>{% for line in missed %}<li class="missed">{{ line }}</li>{% endfor %}
{% for line in notes %}<li>{{ line }}</li>{% endfor %}</ul>
{% for picture in pictures %}<figure>{{ picture | safe }}</figure>
{% endfor %}</body>
</html>
"""


@dataclass(frozen=True)
class Report:
    """One model on one task. `about`: what was measured, in a line. `table`: its first row is the header; `rows`: the
    same for a program. `missed`: a line for each target that the first source missed. `pictures`: SVG.
    """

    model: str
    task: str
    kind: Kind
    about: str
    table: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    missed: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.model} on {self.task}, {self.kind}"

    def figures(self, *, with_values: bool = True) -> dict[str, Any]:
        """For a program. What is not a number is null. `with_values`: of each query or pair too."""
        told = {"model": self.model, "task": self.task, "kind": self.kind, "about": self.about}
        hidden = () if with_values else ("values", "gold")
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in self.rows]
        found: dict[str, Any] = _json({**told, "rows": rows, **self.more, "missed": self.missed, "notes": self.notes})
        return found

    def markdown(self) -> str:
        """A page of its own."""
        head, *rows = self.table
        lines = [f"# {self.title}", "", f"{self.about}.", ""]
        lines += [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows), ""]
        return "\n".join([*lines, *(f"* {note}" for note in [*self.missed, *self.notes])]).rstrip() + "\n"

    def html(self) -> str:
        """A page of its own that loads nothing from elsewhere."""
        import jinja2

        page = jinja2.Environment(autoescape=True).from_string(_PAGE)
        told = {"title": self.title, "about": self.about, "table": self.table, "pictures": self.pictures}
        return page.render(told, notes=self.notes, missed=self.missed)


def of_quality(
    model: str, task: str, about: str, found: Sequence[Found], targets: Targets, missed: Sequence[str]
) -> Report:
    """`found`: a row of each source and output, in the order in which they were asked for."""
    metrics = list(found[0].values)
    has_bytes = any(each.bytes_per_item for each in found)
    table = [["source", *metrics, *(["bytes"] if has_bytes else [])]]
    for each in found:
        sizes = [f"{each.bytes_per_item:,.0f}" if each.bytes_per_item else "-"] if has_bytes else []
        table.append([each.source, *(_shown(each.scores[metric]) for metric in metrics), *sizes])
    if targets:
        told = {metric: f"{target.value:.4f} - {target.tolerance:g}" for metric, target in targets.items()}
        table.append(["targets", *(told.get(metric, "") for metric in metrics), *([""] if has_bytes else [])])
    first, *others = found
    differences = [(other, metric, difference(first, other, metric)) for other in others for metric in metrics]
    notes = [
        f"{first.source} - {other.source}, {metric}: {each.value:+.4f}{_spread(each) if has_interval(first) else ''}"
        for other, metric, each in differences
        if metric == metrics[0]
    ]
    rows = [
        {
            "source": each.source,
            "scores": each.scores,
            "bytes_per_item": each.bytes_per_item,
            "values": each.values,
            "gold": each.gold,
        }
        for each in found
    ]
    more = {
        "differences": [_difference(first, *each) for each in differences],
        "targets": {metric: {"value": each.value, "tolerance": each.tolerance} for metric, each in targets.items()},
    }
    pictures = [plots.costs(found, metrics[0])] if has_bytes and len(found) > 1 else []
    return Report(model, task, "quality", about, table, rows, notes, missed, more, pictures)


def of_perf(
    model: str,
    task: str,
    about: str,
    points: Sequence[Point],
    targets: Mapping[str, Targets],
    missed: Sequence[str],
) -> Report:
    """`points` of each level, sources in turn. `targets`: by level."""
    metrics = list(dict.fromkeys(metric for each in points for metric in each.scores))
    told = ("requests", "errors", "device %", "device MB", "client %")
    table = [["source", "load", *metrics, *told]]
    for each in points:
        cells = [_rounded(each.scores.get(metric)) for metric in metrics]
        errors = " ".join(f"{count} {code}" for code, count in each.errors.items()) or "0"
        busy = _rounded(each.device.busy_percent)
        memory = "-" if each.device.memory_bytes is None else f"{each.device.memory_bytes / 1e6:,.0f}"
        own = "-" if each.client_cores is None else _rounded(100 * each.client_cores)
        table.append([each.source, str(each.level), *cells, str(len(each.latencies_ms)), errors, busy, memory, own])
    for level, expected in targets.items():
        cells = [
            f"{expected[metric].value:.4g} ± {expected[metric].tolerance:.2g}" if metric in expected else ""
            for metric in metrics
        ]
        table.append(["targets", level, *cells, *("" for _ in told)])
    rows = [
        {
            "source": each.source,
            "load": str(each.level),
            "scores": each.scores,
            "errors": each.errors,
            "stages_ms": each.stages_ms,
            "requests": len(each.latencies_ms),
            "client_cores": each.client_cores,
            "device": each.device.name,
            "device_percent": each.device.busy_percent,
            "device_memory_bytes": each.device.memory_bytes,
            "joules": each.device.joules,
        }
        for each in points
    ]
    pictures = [plots.latencies(points)]
    if len({each.level for each in points}) > 1:
        pictures.append(plots.levels(points))
    return Report(model, task, "perf", about, table, rows, _perf_notes(points), missed, pictures=pictures)


def _perf_notes(points: Sequence[Point]) -> list[str]:
    notes = []
    for each in points:
        if each.stages_ms:
            stages = ", ".join(f"{name} {_rounded(ms)}" for name, ms in each.stages_ms.items())
            notes.append(f"{each.source}, {each.level}: mean milliseconds of a request: {stages}")
        if each.device.joules:
            notes.append(f"{each.source}, {each.level}: {each.device.joules / max(1, each.items):.3g} joules an item")
        if each.is_limited_by_client:
            notes.append(
                f"{each.source}, {each.level}: this client used {each.client_cores:.0%} of a core, above"
                f" {CLIENT_LIMIT:.0%}: it may be what is measured; ask from another machine, or with more texts to a"
                " request"
            )
        if each.lost_its_server:
            notes.append(f"{each.source}, {each.level}: the server went away; what is above is what it did before")
    return notes


def _difference(first: Found, other: Found, metric: str, found: Difference) -> dict[str, Any]:
    sources = {"source": first.source, "reference": other.source, "metric": metric}
    return {**sources, "value": found.value, "low": found.low, "high": found.high}


def _spread(found: Difference) -> str:
    return f", between {found.low:+.4f} and {found.high:+.4f} in {CONFIDENCE:.0%} of resamples"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _rounded(value: float | None) -> str:
    """Three digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _json(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case Mapping():
            return {name: _json(each) for name, each in value.items()}
        case list() | tuple():
            return [_json(each) for each in value]
    return value
