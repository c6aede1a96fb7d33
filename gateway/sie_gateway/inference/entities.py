"""Entities that a client names in `metadata.entities` of an item. Models extract relations between them."""

from __future__ import annotations

from typing import Any

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import bad
from sie_contracts.wire.messages import Mention
from sie_gateway.inference.body import RequestItem

MAX_MENTIONS = 100  # largest number of entities of an item: the model scores each pair of entities for each label
MAX_LABEL = 1000  # largest number of characters of a label
_PATH = "metadata.entities"


def mentions(item: RequestItem) -> tuple[Mention, ...]:
    """Return the entities that the client names for a text, in the client's order. Raises InvalidInput."""
    entities = item.metadata.get("entities") if isinstance(item.metadata, dict) else None
    if entities is None:
        return ()
    if not isinstance(entities, list):
        raise bad(_PATH, entities, "a list of entities")
    if len(entities) > MAX_MENTIONS:
        message = f"got {len(entities)} entities, at most {MAX_MENTIONS} are allowed"
        raise InvalidInput.at(_PATH, message, extras={"limit": MAX_MENTIONS})
    return tuple(_mention(entity, f"{_PATH}[{index}]", len(item.text or "")) for index, entity in enumerate(entities))


def _mention(value: Any, path: str, length: int) -> Mention:
    if not isinstance(value, dict):
        raise bad(path, value, "a map of label, start and end")
    label, start, end = (value.get(name) for name in ("label", "start", "end"))
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL:
        raise bad(f"{path}.label", label, f"a string of 1 to {MAX_LABEL} characters")
    if type(start) is not int or not 0 <= start < length:
        raise bad(f"{path}.start", start, f"the index of a code point, from 0 to {length - 1}")
    if type(end) is not int or not start < end <= length:
        raise bad(f"{path}.end", end, f"an index of a code point, greater than start and at most {length}")
    return Mention(label, start, end)
