"""What was measured, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sie_cli.evals.quality import CONFIDENCE, Difference, Found, difference
from sie_cli.evals.targets import Target


@dataclass(frozen=True)
class Report:
    """One model on one task. `found`: a row of each source that was measured, in the order in which they were asked
    for. `targets`: empty where nobody asked for them; `missed`: a line for each that the first source missed.
    """

    model: str
    task: str
    counts: str
    found: Sequence[Found]
    targets: Mapping[str, Target]
    missed: Sequence[str]

    def differences(self) -> list[tuple[Found, str, Difference]]:
        """Of the first source to each other one, by metric."""
        first, *others = self.found
        return [(other, metric, difference(first, other, metric)) for other in others for metric in first.values]

    def rows(self) -> list[list[str]]:
        """A table: sources and targets, by metric."""
        metrics = list(self.found[0].values)
        rows = [["source", *metrics]]
        rows += [[each.source, *(_shown(each.scores[metric]) for metric in metrics)] for each in self.found]
        if self.targets:
            told = {metric: f"{target.value:.4f} - {target.tolerance:g}" for metric, target in self.targets.items()}
            rows.append(["targets", *(told.get(metric, "") for metric in metrics)])
        return rows

    def notes(self) -> list[str]:
        """What stands below the table."""
        first = self.found[0]
        lines = [
            f"{first.source} less {other.source}, {metric}: {each.value:+.4f}, between {each.low:+.4f} and"
            f" {each.high:+.4f} in {CONFIDENCE:.0%} of resamples"
            for other, metric, each in self.differences()
        ]
        return [*lines, *(f"target missed: {first.source}, {line}" for line in self.missed)]

    def figures(self) -> dict[str, Any]:
        """For a program. What is not a number is null."""
        return {
            "model": self.model,
            "task": self.task,
            "sources": {
                each.source: {name: _json(value) for name, value in each.scores.items()} for each in self.found
            },
            "differences": [
                {
                    "source": self.found[0].source,
                    "reference": other.source,
                    "metric": metric,
                    "value": _json(each.value),
                    "low": _json(each.low),
                    "high": _json(each.high),
                }
                for other, metric, each in self.differences()
            ],
            "targets": {metric: {"value": t.value, "tolerance": t.tolerance} for metric, t in self.targets.items()},
            "missed": list(self.missed),
        }

    def markdown(self) -> str:
        """A page of its own."""
        head, *rows = self.rows()
        lines = [f"# {self.model} on {self.task}", "", f"{self.counts}.", ""]
        lines += [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows), ""]
        return "\n".join([*lines, *(f"* {note}" for note in self.notes())]).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
