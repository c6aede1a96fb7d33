"""Families of a package, one for each kind of row that no family of the core has. A test registers them as a package
does, by an entry point of the group `sie.families` (the fixture `sample_families`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sie_contracts import entry_points
from sie_contracts.models import families, options
from sie_contracts.models.families import ANSWERS, Family, PublicClass

_row = functools.partial(Family, implementation="", needs_labels=True)
_pictures = functools.partial(Family, implementation="", ignores_text_beside_images=True)
FAMILIES = {
    "sample-entities": _row(
        parameters=frozenset({"threshold", "flat_ner", "multi_label", "merge_adjacent_entities", "precompute_labels"}),
        public_classes={"SampleEntitiesAdapter": PublicClass(extracts=("entities",))},
    ),
    "sample-relations": _row(
        parameters=frozenset({"threshold", "relation_labels", "relation_threshold"}),
        public_classes={
            "SampleEntitiesAdapter": PublicClass(extracts=("entities", "relations"), option="relation_threshold")
        },
    ),
    "sample-mentions": _row(parameters=frozenset({"threshold", "top_k"}), reads_mentions=True),
    # it fills schemas, from the text if its output is entities
    "sample-schemas": _row(
        parameters=frozenset({"threshold", "multi_label", "relation_labels", "relation_threshold"}) | ANSWERS,
        relates_alone=True,
    ),
    "sample-classes": _row(
        parameters=frozenset({"threshold", "multi_label", "examples"}) | ANSWERS,
        public_classes={"SampleClassesAdapter": PublicClass(extracts=("classifications",))},
    ),
    "sample-scales": _row(
        parameters=frozenset({"threshold", "multi_label", "task"}) | ANSWERS,
        config_file="agent.json",
        files=("agent.json", "model.safetensors", "tokenizer/*", "encoder/*", "README.md"),
        reads_questions=True,
        reads_scales=True,
    ),
    "sample-towers": _pictures(gives_vectors=True),
    "sample-objects": _pictures(
        parameters=frozenset({"threshold", "box_threshold", "text_threshold", "score_threshold"}), needs_labels=True
    ),
    "sample-reader": _pictures(parameters=frozenset({"task", "max_new_tokens"})),
    "sample-listener": _pictures(parameters=frozenset({"task", "language", "max_new_tokens", "word_times"})),
    "sample-parser": _pictures(parameters=frozenset({"ocr", "tree"}), is_package=True, extra="samples"),
}


@contextmanager
def registered() -> Iterator[None]:
    """Register the families in place of those of the installed extras."""
    load = entry_points.load

    def of_samples(group: str, *accept: Any) -> entry_points.PackageObjects:
        return (
            entry_points.PackageObjects({"samples": FAMILIES})
            if group == families.ENTRY_POINTS
            else load(group, *accept)
        )

    caches = (families.rows, options.known_fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_points, "load", of_samples)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
