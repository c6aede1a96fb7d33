"""Redaction of texts that a GLiNER reads in windows: nothing that crosses or touches a seam is left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from oracle import WORDS
from parity.device import on_device
from parity.gliner_checkpoints import entry_of, gliner_folder
from redaction_texts import VALUES, redacted_slot

from sie_adapter.families.extraction import ExtractOptions
from sie_client import restore
from sie_models_extract.gliner import GlinerModel
from sie_redact.redact import RedactionRules

WINDOW = 20  # words
LABELS = ("person", "river mountain")


@pytest.mark.parametrize("kind", ["span", "token"])
def test_values_and_entities_at_every_place_of_a_window_are_replaced(tmp_path: Path, kind: str) -> None:
    """Values begin at each word of three windows, so they begin, end and break at each seam."""
    folder = gliner_folder(tmp_path / kind, kind, max_len=WINDOW)  # type: ignore[arg-type]
    entry = entry_of(folder, "gliner")
    model = GlinerModel(folder, entry, entry.load, on_device())
    chance = random.Random(5)
    kinds = list(VALUES.values())
    texts, values = [], []
    for place in range(3 * WINDOW):
        for value in (kinds[place % len(kinds)], kinds[(place + 2) % len(kinds)]):
            words = chance.choices(WORDS, k=4 * WINDOW)
            texts.append(" ".join([*words[:place], value, *words[place:]]))
            values.append(value)
    replaced = crossing = 0
    for text, value, result in zip(
        texts, values, model.extract(texts, [ExtractOptions(LABELS, 0.2)] * len(texts)), strict=True
    ):
        assert isinstance(result, dict)
        entities = result["entities"]
        slot = redacted_slot(text, entities, RedactionRules((), "tag", b"", "", "code_points"))
        assert value not in slot["text"]
        for entity in entities:
            covering = [
                span for span in slot["spans"] if span["start"] <= entity["start"] and entity["end"] <= span["end"]
            ]
            assert len(covering) == 1
        start = text.index(value)
        crossing += any(entity["start"] < start + len(value) and start < entity["end"] for entity in entities)
        assert restore(slot["text"], slot["map"]) == text
        replaced += len(slot["spans"])
    assert replaced > 4 * len(texts)
    assert crossing > len(texts) // 4
