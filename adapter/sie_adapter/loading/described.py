"""Parts of catalogue entries for model folders that families of packages describe (`Family.described_by`)."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sie_contracts.models import families


@dataclass(frozen=True)
class Described:
    """Part of a catalogue entry, built from the files of a model folder. `findings`: the facts in the files that led to
    the entry. `assumed`: values that are in no file.
    """

    entry: dict[str, Any]
    findings: list[str]
    assumed: list[str] = field(default_factory=list)


def described(folder: Path, raw: dict[str, Any]) -> Described | None:
    """Return part of an entry for `folder` with config.json `raw`; None if no family describes the folder."""
    for name in dict.fromkeys(row.described_by for row in families.rows().values() if row.described_by):
        module, _, attribute = name.partition(":")
        description: Described | None = getattr(importlib.import_module(module), attribute)(folder, raw)
        if description is not None:
            return description
    return None
