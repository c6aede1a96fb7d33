"""Report of a measurement, for people and for programs.

quality.Measurement, perf.LoadPoint ──► EvalReport ──► terminal, JSON, Markdown, HTML, a stored result
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from sie_evals.perf import CLIENT_LIMIT, LoadPoint
from sie_evals.quality import Measurement, difference
from sie_evals.targets import Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Kind = Literal["quality", "perf"]
KINDS: Sequence[Kind] = ("quality", "perf")
QUERY_CHARS = 100  # limit for the characters of a query in a stored result
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
class EvalReport:
    """Report of one model on one task. `about`: one line that describes the measurement. `table`: rows of cells; the
    first row is the header. `rows`: the same data for programs. `missed`: a line for each target that the first source
    missed. `more`: other data for programs. `pictures`: SVG.
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
        """Return the report as a document for programs; NaN becomes null. `with_values`: include the values of single
        queries, pairs or texts, and the texts of queries.
        """
        head = {"model": self.model, "task": self.task, "kind": self.kind, "about": self.about}
        hidden = () if with_values else ("values", "gold", "weights", "queries")
        rows = [{name: value for name, value in row.items() if name not in hidden} for row in self.rows]
        more = {name: value for name, value in self.more.items() if name not in hidden}
        document: dict[str, Any] = _json({**head, "rows": rows, **more, "missed": self.missed, "notes": self.notes})
        return document

    def markdown(self) -> str:
        head, *rows = self.table
        lines = [f"# {self.title}", "", f"{self.about}.", ""]
        lines += [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows), ""]
        return "\n".join([*lines, *(f"* {note}" for note in [*self.missed, *self.notes])]).rstrip() + "\n"

    def html(self) -> str:
        """Return the report as an HTML page that loads nothing from other addresses."""
        import jinja2

        page = jinja2.Environment(autoescape=True).from_string(_PAGE)
        context = {"title": self.title, "about": self.about, "table": self.table, "pictures": self.pictures}
        return page.render(context, notes=self.notes, missed=self.missed)


def of_quality(
    model: str,
    task: str,
    about: str,
    scores: Sequence[Measurement],
    targets: Targets,
    missed: Sequence[str],
    queries: Mapping[str, str],
) -> EvalReport:
    """Build a report of quality. `scores`: one result for each source and output, in the order of the measurement.
    `queries`: query id -> text, in the order of `Measurement.values`; empty for tasks without queries.
    """
    metrics = list(scores[0].values)
    has_bytes = any(score.bytes_per_item for score in scores)
    costs = ["bytes", *(["tokens", "ms"] if any(score.cost for score in scores) else [])] if has_bytes else []
    table = [["source", *metrics, *costs]]
    listed = [row for score in scores for row in (score, *score.kinds)]
    for row in listed:
        size = f"{row.bytes_per_item:,.0f}" if row.bytes_per_item else "-"
        tokens, ms = (row.cost.tokens or None, row.cost.ms) if row.cost else (None, None)
        sizes = [size, _rounded(tokens), _rounded(ms)][: len(costs)]
        own = row.scores
        table.append([row.source, *(_shown(own[metric]) if metric in own else "-" for metric in metrics), *sizes])
    if targets:
        expected = {metric: f"{target.value:.4f} - {target.tolerance:g}" for metric, target in targets.items()}
        table.append(["targets", *(expected.get(metric, "") for metric in metrics), *("" for _ in costs)])
    first, *rest = scores
    differences = [
        (alternative, metric, difference(first, alternative, metric)) for alternative in rest for metric in metrics
    ]
    notes = [
        f"{first.source} - {alternative.source}, {metric}: {gap.value:+.4f}" + (f", {gap.spread}" if gap.spread else "")
        for alternative, metric, gap in differences
        if metric == metrics[0]
    ]
    rows = [
        {
            "source": score.source,
            "scores": score.scores,
            "bytes_per_item": score.bytes_per_item,
            "tokens_per_item": (score.cost.tokens or None) if score.cost else None,
            "ms_per_item": score.cost.ms if score.cost else None,
            "values": score.values,
            "gold": score.gold,
            "weights": score.weights,
        }
        for score in listed
    ]
    more = {
        "differences": [
            {
                "source": first.source,
                "reference": alternative.source,
                "metric": metric,
                "value": gap.value,
                "low": gap.interval and gap.interval[0],
                "high": gap.interval and gap.interval[1],
            }
            for alternative, metric, gap in differences
        ],
        "targets": msgspec.to_builtins(targets),
        "queries": [[name, text[:QUERY_CHARS]] for name, text in queries.items()],
    }
    pictures = [cost_plot(scores, metrics[0])] if has_bytes and len(scores) > 1 else []
    return EvalReport(model, task, "quality", about, table, rows, notes, missed, more, pictures)


def of_perf(
    model: str,
    task: str,
    about: str,
    points: Sequence[LoadPoint],
    targets: Mapping[str, Targets],
    missed: Sequence[str],
) -> EvalReport:
    """Build a report of speed. `points`: sorted by level, then by source. `targets`: targets by level."""
    metrics = list(dict.fromkeys(metric for point in points for metric in point.scores))
    headings = ("requests", "errors", "device %", "device MB", "client %")
    table = [["source", "load", *metrics, *headings]]
    for measured in points:
        cells = [_rounded(measured.scores.get(metric)) for metric in metrics]
        errors = " ".join(f"{count} {code}" for code, count in measured.errors.items()) or "0"
        busy = _rounded(measured.device.busy_percent)
        memory = "-" if measured.device.memory_bytes is None else f"{measured.device.memory_bytes / 1e6:,.0f}"
        own = "-" if measured.client_cores is None else _rounded(100 * measured.client_cores)
        table.append(
            [measured.source, str(measured.level), *cells, str(len(measured.latencies_ms)), errors, busy, memory, own]
        )
    for level, expected in targets.items():
        cells = [
            f"{expected[metric].value:.4g} ± {expected[metric].tolerance:.2g}" if metric in expected else ""
            for metric in metrics
        ]
        table.append(["targets", level, *cells, *("" for _ in headings)])
    rows = [
        {
            "source": point.source,
            "load": str(point.level),
            "scores": point.scores,
            "errors": point.errors,
            "stages_ms": point.stages_ms,
            "requests": len(point.latencies_ms),
            "client_cores": point.client_cores,
            "device": point.device.name,
            "device_percent": point.device.busy_percent,
            "device_memory_bytes": point.device.memory_bytes,
            "joules": point.device.joules,
        }
        for point in points
    ]
    pictures = [latency_plot(points)]
    if len({point.level for point in points}) > 1:
        pictures.append(level_plot(points))
    return EvalReport(model, task, "perf", about, table, rows, _perf_notes(points), missed, pictures=pictures)


def _perf_notes(points: Sequence[LoadPoint]) -> list[str]:
    notes = []
    for point in points:
        if point.stages_ms:
            stages = ", ".join(f"{name} {_rounded(ms)}" for name, ms in point.stages_ms.items())
            notes.append(f"{point.source}, {point.level}: mean milliseconds of a request: {stages}")
        if point.device.joules:
            notes.append(
                f"{point.source}, {point.level}: {point.device.joules / max(1, point.items):.3g} joules an item"
            )
        if point.is_limited_by_client:
            notes.append(
                f"{point.source}, {point.level}: this client used {point.client_cores:.0%} of a core, above"
                f" {CLIENT_LIMIT:.0%}, so the client may be the bottleneck: run it on another machine, or with more"
                " texts to a request"
            )
        if point.lost_its_server:
            notes.append(
                f"{point.source}, {point.level}: the server stopped answering; the row above has its results until then"
            )
    return notes


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _rounded(value: float | None) -> str:
    """Format a number: `-` for None and NaN, a whole number from 100 on, else three significant digits."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _json(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case Mapping():
            return {name: _json(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_json(inner) for inner in value]
    return value


_PERCENTS = np.linspace(0, 99.9, 200)


def latency_plot(points: Sequence[LoadPoint]) -> str:
    figure, axes = _figure_text("percentile of requests", "latency, ms")
    for point in points:
        if point.latencies_ms:
            axes.plot(
                _PERCENTS, np.percentile(point.latencies_ms, _PERCENTS), label=_label(f"{point.source} {point.level}")
            )
    axes.set_ylim(bottom=0)
    return _drawn(figure, axes)


def level_plot(points: Sequence[LoadPoint]) -> str:
    """Plot latency against throughput: a point for each level, a line for p50 and a dashed line for p99."""
    figure, axes = _figure_text("items a second", "latency, ms")
    for source in dict.fromkeys(point.source for point in points):
        own = [point.scores for point in points if point.source == source]
        across = [point["items_per_s"] for point in own]
        (line,) = axes.plot(across, [point["p50_ms"] for point in own], marker="o", label=_label(f"{source} p50"))
        dashed = [point["p99_ms"] for point in own]
        axes.plot(across, dashed, marker=".", linestyle="--", color=line.get_color(), label=_label(f"{source} p99"))
    axes.set(xlim=(0, None), ylim=(0, None))
    return _drawn(figure, axes)


def cost_plot(scores: Sequence[Measurement], metric: str) -> str:
    figure, axes = _figure_text("bytes of an item", metric)
    for score in scores:
        if score.bytes_per_item:
            axes.scatter(score.bytes_per_item, score.scores[metric], label=_label(score.source))
    axes.set_xscale("log")
    return _drawn(figure, axes)


def _label(name: str) -> str:
    """Escape a name for matplotlib, which reads text between dollar signs as a formula."""
    return name.replace("$", r"\$")


def _figure_text(across: str, up: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=across, ylabel=up)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _drawn(figure: Figure, axes: Axes) -> str:
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "<svg" + file.getvalue().partition("<svg")[2]
