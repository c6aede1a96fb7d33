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


def of_files(model_type: str, entry: dict[str, Any], assumed: str = "") -> Described:
    """Return the description of a folder whose model reads images or sounds. `model_type`: that of its config.json."""
    input_name = "a sound" if "audio" in entry["inputs"] else "an image"
    findings = [
        f"family {entry['family']}: model_type {model_type} of config.json",
        f"how {input_name} is prepared: preprocessor_config.json or processor_config.json",
    ]
    return Described(entry, findings, [assumed] if assumed else [])
