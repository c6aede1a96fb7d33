"""What a model is expected to reach: a file of targets, by model, task and metric.

BAAI/bge-m3:
  stsb:
    spearman: {value: 0.83, tolerance: 0.005}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sie_cli.evals.quality import Found
from sie_cli.refusal import Refused
from sie_contracts.catalogue import packaged_folder

FILE = "targets.yaml"
DEFAULT_TOLERANCE = 0.005


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric is missed where it is below `value` by more than `tolerance`."""

    value: float
    tolerance: float = DEFAULT_TOLERANCE


Targets = dict[str, Target]  # by metric
File = dict[str, dict[str, Targets]]  # by model and task


def packaged() -> Path:
    """The file that comes with the catalogue."""
    return packaged_folder() / FILE


def read(file: Path) -> File:
    """Raises Refused, which names the field."""
    try:
        return msgspec.yaml.decode(file.read_bytes(), type=File) or {}
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}: expected a file of targets, which --save-targets writes") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Refused(f"{file}: {error}: expected MODEL: TASK: METRIC: {{value: NUMBER, tolerance: NUMBER}}") from error


def of(file: Path, model: str, task: str) -> Targets:
    """The targets of a model for a task. Raises Refused where there are none."""
    found = read(file).get(model, {}).get(task)
    if not found:
        raise Refused(f"{file} has no targets of {model} for {task}: --save-targets FILE writes what is measured")
    return found


def missed(targets: Mapping[str, Target], found: Found) -> list[str]:
    """What a source did not reach, a line each. A metric that the task does not have is missed."""
    scores = found.scores
    lines = []
    for metric, target in targets.items():
        least = target.value - target.tolerance
        value = scores.get(metric)
        if value is None:
            lines.append(f"{metric}: the task has {', '.join(scores)}")
        elif not value >= least:
            lines.append(f"{metric}: {value:.4f} is below {target.value:.4f} - {target.tolerance:g}")
    return lines


def save(file: Path, model: str, task: str, found: Found) -> None:
    """Write what was measured as the targets of this model and task; others in the file stay. Raises Refused."""
    known = read(file) if file.exists() else {}
    measured = {metric: Target(round(value, 4)) for metric, value in found.scores.items()}
    known.setdefault(model, {})[task] = measured
    try:
        file.write_bytes(msgspec.yaml.encode(known))
    except OSError as error:
        raise Refused(f"--save-targets {file}: {error.strerror}") from error
