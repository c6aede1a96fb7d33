"""Routes that packages add to a gateway, by entry points of the group `sie.gateway`.

    entry point ──► Plugin ──► its rows in `http/routes.ROUTES`

A package that cannot be loaded, or whose rows the table refuses, adds nothing and stops nothing. One whose dependencies
are not installed is logged once, at INFO. Any other fault is named in `faults`: in the log, in the details of
readiness, and in the findings that `sie doctor` shows.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.inference.call import ErrorShape
from sie_runtime.http.routes import Table

GROUP = "sie.gateway"
_logger = logging.getLogger("sie.gateway.plugins")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Object that an entry point names. `routes`: rows for the table of routes. The handler of an `InferenceRoute` is
    called with (inference, call, body), that of another `GatewayRoute` with (gateway, request). `shapes`: (prefix of a
    path, format of its errors) for paths without a route. `unserved`: (pattern of paths, error message) for paths that
    clients often try, but that no gateway serves.
    """

    routes: tuple[GatewayRoute, ...] = ()
    shapes: tuple[tuple[str, ErrorShape], ...] = ()
    unserved: tuple[tuple[re.Pattern[str], str], ...] = ()


@dataclass(frozen=True)
class Plugins:
    """Plug-ins of all packages. `faults`: reason by name, for packages that raised."""

    loaded: tuple[Plugin, ...]
    faults: Mapping[str, str]

    @property
    def routes(self) -> tuple[GatewayRoute, ...]:
        return tuple(route for plugin in self.loaded for route in plugin.routes)


def load(core: Sequence[GatewayRoute]) -> Plugins:
    """Return the plug-ins of all packages whose rows do not repeat a row of `core` or of one another."""
    loaded: list[Plugin] = []
    rows = [*core]
    faults: dict[str, str] = {}
    for entry in _entries():
        try:
            plugin: Plugin = entry.load()
            Table([*rows, *plugin.routes])
        except ModuleNotFoundError as error:
            _logger.info("%s is off: the package %s is not installed%s", entry.name, error.name, _remedy(entry))
        except Exception as error:  # noqa: BLE001  code of another package may raise anything; the gateway still serves
            faults[entry.name] = f"{type(error).__name__}: {error}"
            _logger.error("%s is off: %s cannot be loaded: %s", entry.name, entry.value, faults[entry.name])
        else:
            loaded.append(plugin)
            rows += plugin.routes
    return Plugins(tuple(loaded), faults)


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _remedy(entry: EntryPoint) -> str:
    if entry.dist is None or not entry.extras:
        return ""
    return f": pip install '{entry.dist.name}[{','.join(entry.extras)}]'"
