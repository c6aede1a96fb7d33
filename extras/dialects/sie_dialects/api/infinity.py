"""Bodies and replies of Infinity's routes for classes."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from sie_contracts.api.dialects import Truncate
from sie_contracts.api.shapes import SHARED, ManyTexts, Map, Number, Reply, Text, TextFlag, Whole


class Classify(Struct, kw_only=True):
    """Request to classify texts."""

    EXAMPLE: ClassVar[Any] = {"model": "org/classes", "input": ["a"]}

    model: Text = UNSET
    input: ManyTexts | str
    raw_scores: TextFlag = UNSET
    truncate: Truncate = UNSET
    options: Map = UNSET


class Label(Struct, kw_only=True):
    """A class, and its score for the text."""

    label: Text = UNSET
    score: Number = UNSET


CLASSES = [{"label": "joy", "score": 0.92}, {"label": "anger", "score": 0.08}]


class Classified(Reply, kw_only=True):
    """Reply with the classes of each text, highest score first."""

    EXAMPLE: ClassVar[Any] = {
        "object": "classify",
        "data": [CLASSES],
        "model": "org/classes",
        "id": "classify-2b2c...",
        "created": 1780000000,
        **SHARED,
    }

    object: Text = UNSET
    data: list[list[Label]] | UnsetType = UNSET
    id: Text = UNSET
    created: Whole = UNSET
