"""Lookup of the models that `sie serve MODEL`, `sie pull MODEL` and `sie run MODEL` name.

hub id, folder or catalogue name, with or without :profile
    ├ an alias ──► the target with the largest `weight`, which is looked up in the same way
    ├ a model of the catalogue with pinned weights ──► its entry
    └ any other model ──► inspected as in `sie models add` ──► ID.yaml in the models folder; the command prints the path
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from sie_cli.models.add import write_entry
from sie_cli.models.inspect import described, folder_name
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.trust import USUAL, is_bucket
from sie_contracts.settings import Settings


@dataclass(frozen=True)
class NamedModel:
    """Model of the catalogue. `name`: its name in requests. `added`: path of the entry that this command wrote."""

    name: str
    entry: ModelEntry
    added: Path | None = None

    @property
    def message(self) -> str:
        """Line for the user about the entry that this command added; empty if the command added no entry."""
        if self.added is None:
            return ""
        weights = self.entry.weights
        return f"added {self.entry.id}, {weights.path or f'{weights.hub}@{weights.revision}'}: {self.added}"


def look_up(settings: Settings, spec: str) -> NamedModel:
    """Find a model by the name that the user typed. If the catalogue lacks the model, or its weights are unpinned,
    write an entry to the models folder. For an alias, find its target with the largest `weight`. Raises CommandRefused.
    """
    models = settings.models_dir or USUAL
    if not is_bucket(models) and settings.models_dir:
        with refusing():
            Path(models).expanduser().mkdir(parents=True, exist_ok=True)
    catalogue = _catalogue(settings)
    source, profile = _split(catalogue, spec)
    entry = catalogue.find(source)
    if entry is None and (alias := catalogue.find_alias(source)) is not None:
        return dataclasses.replace(look_up(settings, alias.heaviest.model), name=spec)
    if entry is None and (folder := Path(os.path.expanduser(source))).is_dir():
        entry = _entry_of_folder(catalogue, folder)
    added = None
    if entry is None or entry.weights.unpinned:
        if is_bucket(models):
            raise CommandRefused(
                f"the catalogue has no pinned entry of {source}, and this command does not write to the bucket {models}"
                ": add the entry there"
            )
        text, entry = described(settings, source, "", None)
        with refusing():
            added = write_entry(text, entry.id, Path(models).expanduser())
    with refusing():
        resolved = Catalogue.resolve_profile(entry, profile or "default", entry.id)
    return NamedModel(resolved.canonical, entry, added)


def _catalogue(settings: Settings) -> Catalogue:
    from sie_config_service.overlay import Overlay

    documents = {name: document for name, (document, _) in Overlay(settings).folders().models.items()}
    return Catalogue.from_documents(documents, {}, {}, "")


def _split(catalogue: Catalogue, spec: str) -> tuple[str, str]:
    """Split `model[:profile]` into (model, profile or ""). The name of a known model or of a folder is not split."""
    if catalogue.find(spec) is not None or Path(os.path.expanduser(spec)).is_dir() or ":" not in spec:
        return spec, ""
    source, _, profile = spec.rpartition(":")
    return source, profile


def _entry_of_folder(catalogue: Catalogue, folder: Path) -> ModelEntry | None:
    """Return a model folder's entry, or None. Raises CommandRefused if another model has the folder's name as id."""
    entry = catalogue.find(folder_name(folder))
    if entry is None or (
        entry.weights.path and Path(os.path.expanduser(entry.weights.path)).resolve() == folder.resolve()
    ):
        return entry
    raise CommandRefused(
        f"the catalogue has another model {entry.id}: `sie models add {shlex.quote(str(folder))} --id NAME` "
        "adds this folder under another name"
    )
