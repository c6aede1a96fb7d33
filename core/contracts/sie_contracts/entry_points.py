"""Objects that packages name by entry points, and the reasons why some of them are not there.

A package that is not installed with its extra is told once, at INFO, with the command that installs it. An object that
cannot be imported for another reason is a fault of its package: it is logged, and `FAULTS` has it for the details of
readiness. Neither stops the process.
"""

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint
from typing import Any

FAULTS: dict[str, str] = {}
"""Reason by `group name`, for all objects of this process that cannot be imported."""
_logger = logging.getLogger("sie.entry_points")
_REQUIREMENT = re.compile(r"([\w.-]+).*;.*\bextra\s*==\s*[\"']([\w.-]+)[\"']")


@dataclass(frozen=True)
class PackageObjects:
    """`objects`, `missing` and `faults` by the names of entry points. `missing`: what is not installed, and the command
    that installs it.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of this group, in the order of their names."""
    return sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name)


def names(group: str) -> list[str]:
    """Return the names of the entry points of this group, in their order. Nothing is imported."""
    return [entry.name for entry in entries(group)]


def load(group: str, accept: Callable[[Any], None] = lambda _: None) -> PackageObjects:
    """Return the objects that entry points of this group name. `accept` raises an error for an object that cannot be
    used.
    """
    result = PackageObjects()
    for entry in entries(group):
        try:
            named = entry.load()
            accept(named)
        except ModuleNotFoundError as error:
            result.missing[entry.name] = remedy(entry, error)
            _logger.info("%s is off: %s", entry.name, result.missing[entry.name])
        except Exception as error:  # noqa: BLE001  code of another package may raise anything; the others still work
            result.faults[entry.name] = f"{type(error).__name__}: {error}"
            _logger.error("%s is off: %s cannot be loaded: %s", entry.name, entry.value, result.faults[entry.name])
            FAULTS[f"{group} {entry.name}"] = result.faults[entry.name]
        else:
            result.objects[entry.name] = named
    return result


def remedy(entry: EntryPoint, error: ModuleNotFoundError) -> str:
    """Return which package an object lacks, and the command that installs it."""
    package = (error.name or "").partition(".")[0]
    return f"the package {package} is not installed{_command(entry.dist, entry.extras)}"


def lacking(group: str) -> Iterator[tuple[str, str]]:
    """Return the name of each entry point whose extra is not installed whole, and the remedy. Nothing is imported."""
    for entry in entries(group):
        needed = {name for name, extra in _extras(entry.dist) if extra in entry.extras}
        absent = sorted(name for name in needed if not _is_installed(name))
        if absent:
            yield entry.name, f"{', '.join(absent)} not installed{_command(entry.dist, entry.extras)}"


def _command(dist: Distribution | None, extras: list[str]) -> str:
    return f": pip install '{dist.name}[{','.join(extras)}]'" if dist is not None and extras else ""


def _extras(dist: Distribution | None) -> Iterator[tuple[str, str]]:
    """Yield (required distribution, extra) for the requirements of all extras."""
    for text in (dist.requires if dist is not None else None) or ():
        if match := _REQUIREMENT.match(text):
            yield match[1], match[2]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
