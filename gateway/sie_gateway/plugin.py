"""Packages that add routes and services to a gateway, by entry points of the group `sie.gateway`.

    entry point ──► Plugin ──► its rows in `http/routes.ROUTES`
                          └──► build(PluginContext) ──► Service: prepare() before the gateway is ready, start() then

`PluginContext` has all that a plug-in may use of a gateway. The packages' settings come by entry points of the group
`sie.settings`, their metrics by `sie.metrics`.

A package that cannot be loaded, or whose rows the table refuses, adds nothing and stops nothing. One whose dependencies
are not installed is logged once, at INFO, and paths with its name answer with the command that installs them. Any other
fault is named in the log, in the details of readiness, and in the findings that `sie doctor` shows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sie_contracts import entry_points
from sie_contracts.settings import SettingError, Settings
from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.inference.call import ErrorShape
from sie_runtime.http.routes import Table

if TYPE_CHECKING:
    from sie_broker import Broker
    from sie_gateway.admission.admission import Admission
    from sie_gateway.admission.grant import Grant, Quotas
    from sie_gateway.fleet.lag import Lag
    from sie_gateway.fleet.lanes import Fleet
    from sie_gateway.fleet.placement import Placer
    from sie_gateway.fleet.scaling import Scaling
    from sie_gateway.inference.call import RequestListeners
    from sie_gateway.inference.handler import Inference, InferenceRoute
    from sie_gateway.inference.runner import Runner
    from sie_gateway.metrics import Metrics
    from sie_gateway.operations.status import ClusterStatus
    from sie_runtime.process import Stop, Tasks

GROUP = "sie.gateway"
_logger = logging.getLogger("sie.gateway.plugins")


@dataclass(frozen=True, kw_only=True)
class PluginContext:
    """Objects of a gateway that plug-ins use. `now_s`: seconds since 1970 by the broker's clock. `inference_route`: the
    inference route that answers POST of a path. `port`: as in `process.serve`. `data_dir`: data folder if `sie serve`
    runs this gateway.
    """

    settings: Settings
    broker: Broker
    metrics: Metrics
    fleet: Fleet
    admission: Admission
    runner: Runner
    inference: Inference
    quotas: Quotas
    scaling: Scaling
    status: ClusterStatus
    lag: Lag
    placer: Placer
    listeners: RequestListeners
    now_s: Callable[[], float]
    grant_of_key: Callable[[str], Grant | None]
    inference_route: Callable[[str], InferenceRoute | None]
    host: str
    port: int
    data_dir: Path | None


class Service:
    """Objects of a plug-in in one gateway. The handlers of its routes get it by `Gateway.service`."""

    async def prepare(self) -> None:
        """Create what the service needs at the broker, before the gateway is ready. Raises BrokerError."""

    def start(self, tasks: Tasks, stop: Stop) -> None:
        """Start the background tasks. They end at `stop`, before the open requests are finished."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Object that an entry point names. `routes`: rows for the table of routes. The handler of an `InferenceRoute` is
    called with (inference, call, body), that of another `GatewayRoute` with (gateway, request). `shapes`: (prefix of a
    path, format of its errors) for paths without a route. `unserved`: (pattern of paths, error message) for paths that
    clients often try, but that no gateway serves. `build`: builds the service of one gateway. Raises SettingError.
    """

    routes: tuple[GatewayRoute, ...] = ()
    shapes: tuple[tuple[str, ErrorShape], ...] = ()
    unserved: tuple[tuple[re.Pattern[str], str], ...] = ()
    build: Callable[[PluginContext], Service] | None = None


@dataclass(frozen=True)
class Plugins:
    """`loaded`: by name, those that raised nothing. `missing` and `faults`: as in `entry_points.PackageObjects`."""

    loaded: Mapping[str, Plugin]
    missing: Mapping[str, str]
    faults: Mapping[str, str]

    @property
    def routes(self) -> tuple[GatewayRoute, ...]:
        return tuple(row for plugin in self.loaded.values() for row in plugin.routes)

    def build(self, context: PluginContext, faults: dict[str, str]) -> tuple[Service, ...]:
        """Return the services of one gateway. A plug-in that raises has none and gets its reason in `faults`. Raises
        SettingError, because a gateway with a wrong setting must not serve.
        """
        services = []
        for name, plugin in self.loaded.items():
            if plugin.build is None:
                continue
            try:
                services.append(plugin.build(context))
            except SettingError:
                raise
            except Exception as error:  # noqa: BLE001  code of another package may raise anything
                faults[name] = f"{type(error).__name__}: {error}"
                _logger.error("%s is off: %s", name, faults[name])
        return tuple(services)


def load(core: Sequence[GatewayRoute]) -> Plugins:
    """Return the plug-ins of all packages that do not repeat a row of `core` or of one another."""
    rows = [*core]

    def accept(plugin: Plugin) -> None:
        Table([*rows, *plugin.routes])
        rows.extend(plugin.routes)

    result = entry_points.load(GROUP, accept)
    return Plugins(result.objects, result.missing, result.faults)
