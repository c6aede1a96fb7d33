"""Figures of a report, as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sie_cli.evals.perf import LoadPoint
    from sie_cli.evals.quality import Measurement

_PERCENTS = np.linspace(0, 99.9, 200)


def latencies(points: Sequence[LoadPoint]) -> str:
    """Latency by percentile, a line for each source and level."""
    figure, axes = _figure_text("percentile of requests", "latency, ms")
    for point in points:
        if point.latencies_ms:
            axes.plot(
                _PERCENTS, np.percentile(point.latencies_ms, _PERCENTS), label=_label(f"{point.source} {point.level}")
            )
    axes.set_ylim(bottom=0)
    return _drawn(figure, axes)


def levels(points: Sequence[LoadPoint]) -> str:
    """Throughput against latency, a line for each source with a point for each level; p99 dashed."""
    figure, axes = _figure_text("items a second", "latency, ms")
    for source in dict.fromkeys(point.source for point in points):
        own = [point.scores for point in points if point.source == source]
        across = [point["items_per_s"] for point in own]
        (line,) = axes.plot(across, [point["p50_ms"] for point in own], marker="o", label=_label(f"{source} p50"))
        dashed = [point["p99_ms"] for point in own]
        axes.plot(across, dashed, marker=".", linestyle="--", color=line.get_color(), label=_label(f"{source} p99"))
    axes.set(xlim=(0, None), ylim=(0, None))
    return _drawn(figure, axes)


def costs(scores: Sequence[Measurement], metric: str) -> str:
    """Quality against bytes of an item, a point for each output."""
    figure, axes = _figure_text("bytes of an item", metric)
    for score in scores:
        if score.bytes_per_item:
            axes.scatter(score.bytes_per_item, score.scores[metric], label=_label(score.source))
    axes.set_xscale("log")
    return _drawn(figure, axes)


def _label(name: str) -> str:
    """Escape a name for matplotlib, which takes text between dollars for a formula."""
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
