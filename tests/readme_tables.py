"""Write the tables of README.md: models by task from the packaged catalogue, and texts per second from bench/results.

python tests/readme_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sie_contracts.models.entries import ModelEntry
from sie_runtime.feed import packaged_catalogue

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
CLIENTS = (1, 4, 16, 64)


class Task(NamedTuple):
    """A row of the table of models: the task, a condition for its entries, and an example."""

    name: str
    does: Callable[[ModelEntry], bool]
    example: str


def _is_text(entry: ModelEntry) -> bool:
    return entry.inputs == ("text",)


TASKS = (
    Task("Dense vectors", lambda entry: _is_text(entry) and "dense" in entry.outputs, "BAAI/bge-m3"),
    Task("Sparse vectors", lambda entry: "sparse" in entry.outputs, "naver/splade-v3"),
    Task(
        "Late interaction",
        lambda entry: _is_text(entry) and "multivector" in entry.outputs,
        "answerdotai/answerai-colbert-small-v1",
    ),
    Task("Reranking", lambda entry: _is_text(entry) and "score" in entry.outputs, "BAAI/bge-reranker-v2-m3"),
    Task(
        "Images and pages",
        lambda entry: "image" in entry.inputs and "encode" in entry.tasks,
        "google/siglip-so400m-patch14-384",
    ),
    Task(
        "Entities, classes, relations",
        lambda entry: _is_text(entry) and entry.tasks == ("extract",),
        "gliner-community/gliner_medium-v2.5",
    ),
    Task(
        "Objects, documents, speech",
        lambda entry: not _is_text(entry) and entry.tasks == ("extract",),
        "PaddlePaddle/PaddleOCR-VL-1.5",
    ),
)


def models() -> str:
    """Return the table of the number of models for each task, without unproven models."""
    entries = {model: entry for model, entry in packaged_catalogue().entries.items() if not entry.unproven}
    rows = ["| task | models | such as |", "|---|---|---|"]
    for task in TASKS:
        assert task.does(entries[task.example]), task
        rows.append(f"| {task.name} | {sum(map(task.does, entries.values()))} | `{task.example}` |")
    rows.append(f"| [All](docs/models.md#the-models) | {len(entries)} | some count twice |")
    return "\n".join(rows)


def speed() -> str:
    """Return the table of texts per second beside other servers, by the number of concurrent clients."""
    rates = {
        (source, int(clients)): float(rate)
        for source, clients, rate in re.findall(
            r"^\| (\w+)(?::\S+)? \| clients=(\d+) \| ([\d.]+) \|",
            (RESULTS / "evals.md").read_text("utf-8"),
            re.MULTILINE,
        )
    }
    rows = ["| clients | SIE | Infinity | sentence-transformers |", "|---|---|---|---|"]
    for clients in CLIENTS:
        own, rival_rates = rates["sie", clients], [rates[source, clients] for source in ("infinity", "st")]
        cells = [f"{rate:.0f} ({own / rate:.1f}x)" for rate in rival_rates]
        rows.append(f"| {clients} | {own:.0f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def page(old: str) -> str:
    """Return the page with tables from the present catalogue and results."""
    for name, table in (("models", models()), ("speed", speed())):
        marked = rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- /{name} -->)"
        old = re.sub(marked, lambda _, table=table: table, old, flags=re.DOTALL)
    return old


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
