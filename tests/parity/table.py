"""The worst value of each architecture, path and precision, as the page docs/parity.md."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
_COLUMNS = [(path, precision) for path in ("packed", "padded") for precision in _PRECISIONS] + [("stock", "bfloat16")]
_PACKAGES = ("torch", "transformers", "sentence-transformers")


@dataclass(frozen=True)
class Agreement:
    """How far vectors are from the reference: the lowest cosine, the largest difference of a component in units of the reference vector's
    norm, and the mean of 1 - cosine."""

    cosine: float
    difference: float
    mean_distance: float

    def worst(self, other: Agreement) -> Agreement:
        """The worse of each."""
        return Agreement(
            min(self.cosine, other.cosine), max(self.difference, other.difference), max(self.mean_distance, other.mean_distance)
        )

    def __str__(self) -> str:
        return f"{self.cosine:.7f}, {self.difference:.0e}"


@dataclass
class ParityTable:
    """Collects agreements, keeps the worst of each cell."""

    cells: dict[tuple[str, str, str], Agreement] = field(default_factory=dict)

    def record(self, architecture: str, path: str, precision: str, agreement: Agreement) -> None:
        """Add a measurement. `path`: packed, padded, or stock, which is the public library's own in that precision."""
        key = (architecture, path, precision)
        self.cells[key] = self.cells.get(key, agreement).worst(agreement)

    def markdown(self, architectures: Iterable[str]) -> str:
        """The page, one row for each of `architectures`; a cell that was not measured is a dash."""
        rows = ["| architecture | " + " | ".join(f"{path} {_PRECISIONS[precision]}" for path, precision in _COLUMNS) + " |"]
        rows.append("|---" * (len(_COLUMNS) + 1) + "|")
        for name in architectures:
            found = [self.cells.get((name, *column)) for column in _COLUMNS]
            rows.append(f"| {name} | " + " | ".join(str(cell or "-") for cell in found) + " |")
        return f"{_introduction()}\n" + "\n".join(rows) + "\n"


def _introduction() -> str:
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
    return f"""# Parity

Each cell is the worst of a ragged batch of 64 texts (up to 560 tokens, past every attention window), in all poolings that the
architecture's published models use: the lowest cosine, and the largest difference of one component in units of the vector's norm. The other
side is sentence-transformers on the same folder in float32, one text at a time; `stock bf16` is sentence-transformers itself in bfloat16.

The models are small, random and adversarial (`tests/parity/checkpoints.py`). The bounds are 0.9999 in float32 and 0.999 in bfloat16;
untrained weights lose more than that in bfloat16 by any implementation, so a row below 0.999 is held to stock bfloat16: at most 1.5 times
its mean distance and 3 times its worst. An architecture without a packed value runs padded; a row of dashes does not load.
What breaks its bound is marked as an expected failure, with the reason, in `tests/parity/test_dense.py`.

    python -m pytest tests/parity --parity-table docs/parity.md

{_processor()}; {versions}.
"""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
