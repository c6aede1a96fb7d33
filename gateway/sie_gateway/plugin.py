"""Routes that packages add to a gateway, by entry points of the group `sie.gateway`.

    entry point ──► Plugin ──► its rows in `http/routes.ROUTES`

A package that cannot be loaded, or whose rows the table refuses, adds nothing and stops nothing. One whose dependencies
are not installed is logged once, at INFO. Any other fault is named in `faults`: in the log, in the details of
readiness, and in the findings that `sie doctor` shows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from sie_gateway.http.route_kinds import GatewayRoute
from sie_runtime.http.routes import Table

GROUP = "sie.gateway"
_logger = logging.getLogger("sie.gateway.plugins")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Object that an entry point names. `routes`: rows for the table of routes. The handler of an `InferenceRoute` is
    called with (inference, call, body), that of another `GatewayRoute` with (gateway, request).
    """

    routes: tuple[GatewayRoute, ...] = ()


@dataclass(frozen=True)
class Plugins:
    """Rows of all packages. `faults`: reason by name, for packages that raised."""

    routes: tuple[GatewayRoute, ...]
    faults: Mapping[str, str]


def load(core: Sequence[GatewayRoute]) -> Plugins:
    """Return the rows of all packages that do not repeat a row of `core` or of one another."""
    rows: list[GatewayRoute] = []
    faults: dict[str, str] = {}
    for entry in _entries():
        try:
            plugin: Plugin = entry.load()
            Table([*core, *rows, *plugin.routes])
        except ModuleNotFoundError as error:
            _logger.info("%s is off: the package %s is not installed%s", entry.name, error.name, _remedy(entry))
        except Exception as error:  # noqa: BLE001  code of another package may raise anything; the gateway still serves
            faults[entry.name] = f"{type(error).__name__}: {error}"
            _logger.error("%s is off: %s cannot be loaded: %s", entry.name, entry.value, faults[entry.name])
        else:
            rows += plugin.routes
    return Plugins(tuple(rows), faults)


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _remedy(entry: EntryPoint) -> str:
    if entry.dist is None or not entry.extras:
        return ""
    return f": pip install '{entry.dist.name}[{','.join(entry.extras)}]'"
