"""Capabilities that routes require of a model: for each endpoint, a function that checks a catalogue entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sie_contracts.models import families
from sie_contracts.models.entries import ModelEntry, classifies

Able = Callable[[ModelEntry], bool]


def any_model(_: ModelEntry) -> bool:
    """Accept any model: for routes that every model may answer."""
    return True


def _embeds(entry: ModelEntry) -> bool:
    return "dense" in entry.outputs and "encode" in entry.tasks


def _gives_spans(entry: ModelEntry) -> bool:
    """Return True if a model finds entities in a text, with their offsets, and needs no instruction in the request."""
    is_extract = "extract" in entry.tasks and "entities" in entry.outputs and "text" in entry.inputs
    return is_extract and not families.row(entry.family).needs_instruction


def _task(name: str) -> Able:
    return lambda entry: name in entry.tasks


CAN: Mapping[str, Able] = {
    "encode": _task("encode"),
    "score": _task("score"),
    "extract": _task("extract"),
    "embed": _embeds,
    "similarity": _embeds,
    "embed_sparse": lambda entry: "sparse" in entry.outputs and "encode" in entry.tasks,
    "embed_all": lambda entry: "dense" in entry.outputs and families.row(entry.family).gives_vectors,
    "rerank": _task("score"),
    "predict": classifies,
    "redact": _gives_spans,
    "transcribe": lambda entry: "audio" in entry.inputs and "extract" in entry.tasks,
}
