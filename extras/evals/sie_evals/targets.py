"""Targets of models: a file with targets by model, task and metric. Speed differs between machines, so the names of
speed tasks contain the machine profile and the load.

  BAAI/bge-m3:
    stsb:
      spearman: {value: 0.83, tolerance: 0.005}
    stsb@l4 clients=16:
      items_per_s: {value: 900, tolerance: 90}
      items_per_s/st: {value: 2.5, tolerance: 0.2}    # ratio to the source st in the same run
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sie_cli.refusal import CommandRefused
from sie_contracts import yaml_text
from sie_contracts.models.catalogue import packaged_folder
from sie_evals.labelled import LEAK
from sie_store import durable

FILE = "targets.yaml"
DEFAULT_TOLERANCE = 0.005
SPEED_TOLERANCE = 0.1  # tolerance of a speed target, as a share of its value: 0.1 is 10 %


class ScoreTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Target of one metric. A target is missed if the metric is worse than `value` by more than `tolerance`. For
    milliseconds and leaks a lower value is better, for all other metrics a higher value.
    """

    value: float
    tolerance: float = DEFAULT_TOLERANCE

    def is_missed(self, metric: str, value: float) -> bool:
        """Return whether a value misses the target. NaN always misses the target."""
        name = metric.partition("/")[0]
        if name.endswith("_ms") or name == LEAK:
            return not value <= self.value + self.tolerance
        return not value >= self.value - self.tolerance


Targets = dict[str, ScoreTarget]  # targets by metric
File = dict[str, dict[str, Targets]]  # targets by model and task


def packaged() -> Path:
    return packaged_folder() / FILE


def read(file: Path) -> File:
    """Read a file of targets. Raises CommandRefused; the error names the wrong field."""
    try:
        return msgspec.convert(yaml_text.load(file.read_bytes()) or {}, File)
    except OSError as error:
        raise CommandRefused(
            f"{file}: {error.strerror}: expected a file of targets, which --save-targets writes"
        ) from error
    except (yaml_text.NotYAML, msgspec.ValidationError) as error:
        raise CommandRefused(
            f"{file}: {error}: expected MODEL: TASK: METRIC: {{value: NUMBER, tolerance: NUMBER}}"
        ) from error


def load(file: Path, model: str, task: str) -> Targets:
    """Return the targets of a model for a task, or {} if the file has no such targets. Raises CommandRefused."""
    return read(file).get(model, {}).get(task, {})


def missed(targets: Mapping[str, ScoreTarget], scores: Mapping[str, float], subject: str) -> list[str]:
    """Return the missed targets, one line each. A metric that was not measured counts as missed."""
    lines = []
    for metric, target in targets.items():
        value = scores.get(metric)
        if value is None:
            lines.append(f"target missed: {subject}, {metric}: not measured; the metrics are {', '.join(scores)}")
        elif target.is_missed(metric, value):
            lines.append(
                f"target missed: {subject}, {metric}: {value:.4g} is worse than {target.value:.4g}, with a tolerance of"
                f" {target.tolerance:.2g}"
            )
    return lines


def of_speed(scores: Mapping[str, Mapping[str, float]], first: str) -> dict[str, float]:
    """Return the metrics of the source `first`, and for each other source an entry METRIC/SOURCE: the metric of `first`
    divided by the metric of SOURCE. `scores`: source -> metric -> value.
    """
    speeds = dict(scores[first])
    for source, own in scores.items():
        if source != first:
            speeds |= {
                f"{name}/{source}": speeds[name] / value for name, value in own.items() if speeds.get(name) and value
            }
    return speeds


def speed_task(task: str, machine: str, level: str) -> str:
    return f"{task}@{machine} {level}"


def expected(values: Mapping[str, float], *, is_speed: bool) -> Targets:
    """Convert measured values to targets with the default tolerances. Leave out NaN, which is an undefined value."""
    values = {name: value for name, value in values.items() if not math.isnan(value)}
    if is_speed:
        return {name: ScoreTarget(_short(value), _short(SPEED_TOLERANCE * value)) for name, value in values.items()}
    return {name: ScoreTarget(round(value, 4)) for name, value in values.items()}


def check(file: Path) -> None:
    """Raise CommandRefused if a file has comments, which `save` would not keep, or if it is no file of targets."""
    if file.exists():
        read(file)
        if re.search(rb"(^|\s)#", file.read_bytes()):
            raise CommandRefused(
                f"--save-targets {file}: its comments would be lost: remove them, or name another file"
            )


def save(file: Path, model: str, measured: Mapping[str, Targets]) -> None:
    """Write a model's targets (scores that later evaluations must reach) to a file. `measured`: targets by task, made
    from measured scores. Targets of other models and tasks stay in the file. Raises CommandRefused.
    """
    saved = read(file) if file.exists() else {}
    saved.setdefault(model, {}).update(measured)
    try:
        durable.write(file.resolve(), msgspec.yaml.encode(saved))
    except OSError as error:
        raise CommandRefused(f"--save-targets {file}: the file cannot be written: {error.strerror}") from error


def _short(value: float) -> float:
    return float(f"{value:.3g}")
