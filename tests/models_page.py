"""Write the table of models in docs/models.md from the packaged catalogue.

python tests/models_page.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from sie_cli import display
from sie_contracts.models.entries import ModelEntry
from sie_runtime.feed import packaged_catalogue

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def _row(entry: ModelEntry) -> str:
    outputs = ", ".join(f"{name} {width}" if width else name for name, width in entry.outputs.items())
    name = f"`{entry.id}`" + (" (unproven)" if entry.unproven else "")
    size = display.rounded_size(entry.download_bytes)
    cells = (
        name,
        outputs,
        ", ".join(entry.inputs),
        ", ".join(entry.languages),
        str(entry.max_tokens),
        size,
        entry.license,
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return a table for each group of tasks, with the models in the order of their names."""
    entries = sorted(packaged_catalogue().entries.values(), key=lambda entry: (entry.tasks, entry.id.lower()))
    parts = []
    for tasks, group in itertools.groupby(entries, key=lambda entry: entry.tasks):
        rows = [_row(entry) for entry in group]
        head = "| model | outputs | inputs | languages | tokens | download | licence |\n|---|---|---|---|---|---|---|"
        parts.append("\n".join([f"### {' and '.join(tasks).capitalize()}: {len(rows)}", "", head, *rows]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with the present tables and the present number of models."""
    numbered = re.sub(r"(?<=The catalogue has )\d+(?= models)", str(len(packaged_catalogue().entries)), text)
    replaced = table()
    return re.sub(r"(?<=<!-- models -->\n\n).*?(?=\n\n<!-- /models -->)", lambda _: replaced, numbered, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
