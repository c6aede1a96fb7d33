"""Objects that packages name by entry points."""

import importlib.metadata
import logging
from typing import Any

_logger = logging.getLogger("sie.entry_points")


def names(group: str) -> list[str]:
    """Return the names of the entry points of this group, in their order. This imports no module of a package."""
    return sorted(importlib.metadata.entry_points(group=group).names)


def loaded(group: str) -> dict[str, Any]:
    """Return the objects that entry points of this group name, in the order of their names. An object that cannot be
    imported is left out and logged.
    """
    objects = {}
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):
        try:
            objects[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001  code of another package may raise anything; the others still work
            _logger.error("%s of %s cannot be imported: %s: %s", entry.value, group, type(error).__name__, error)
    return objects
