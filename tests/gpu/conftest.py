"""Tests of the CUDA path, which are skipped without a CUDA device. `--cuda-table FILE` writes the worst cosines to a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

Record = Callable[[str, str, str, float], None]
_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-table", metavar="FILE", help="write the table of worst cosines on CUDA there")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Record cosines by label, attention and precision, and keep the worst of each."""
    worst: dict[tuple[str, str, str], float] = {}

    def note(label: str, attention: str, precision: str, cosine: float) -> None:
        worst[label, attention, precision] = min(cosine, worst.get((label, attention, precision), 1.0))

    yield note
    # the option is absent if pytest read this file after it parsed the command line
    if target := request.config.getoption("cuda_table", default=None):
        rows = [f"| {' | '.join(key)} | {cosine:.7f} |" for key, cosine in sorted(worst.items())]
        head = [
            (
                f"# Parity on CUDA\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}, against float32 on a "
                "CPU.\n"
            ),
            "| output | attention | precision | worst cosine |\n|---|---|---|---|",
        ]
        Path(target).write_text("\n".join([*head, *rows, ""]))
