"""`Gateway` has the objects that handlers of routes use. `GatewayReadiness` has the readiness of the gateway. `process`
creates both objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from sie_broker import Connection
from sie_contracts.errors import NotReady
from sie_contracts.settings import Settings
from sie_gateway.admission.admission import Peers
from sie_gateway.admission.grant import Quotas
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.pools import PoolDirectory
from sie_gateway.fleet.residency import Residencies
from sie_gateway.fleet.scaling import Scaling
from sie_gateway.inference.call import RequestListeners
from sie_gateway.inference.handler import Inference
from sie_gateway.metrics import Metrics
from sie_gateway.operations.dead_letters import DeadLetterOperations
from sie_gateway.operations.status import ClusterStatus
from sie_gateway.plugin import Service
from sie_runtime.connection import because
from sie_runtime.feed import CatalogueFeed
from sie_runtime.keys import Keys

_Service = TypeVar("_Service", bound=Service)


@dataclass(eq=False)
class GatewayReadiness:
    """Readiness of this gateway, and the stage of its shutdown. `keys`: None if SIE_AUTH_MODE is not `token`."""

    broker: Connection
    feed: CatalogueFeed
    keys: Keys | None
    started: bool = False
    leaving: bool = False  # true from the start of the shutdown: each reply closes its connection
    draining: bool = False  # true after the lame-duck time: POST requests are refused

    def not_ready(self) -> str | None:
        """Return why this gateway is not ready, or None. A gateway without workers is ready, because workers may be
        scaled to zero.
        """
        if self.leaving:
            return "draining"
        if not self.feed.first.is_set():
            return "the catalogue is not loaded"
        if not self.broker.connected:
            return "no connection to the broker"
        if self.keys is not None and not self.keys.loaded:
            return because("the keys are not read", self.broker)
        return None if self.started else because("starting", self.broker)


@dataclass(frozen=True)
class Gateway:
    """Objects of a gateway that the handlers of its routes use. `services`: those of plug-ins."""

    settings: Settings
    metrics: Metrics
    listeners: RequestListeners
    dead_letters: DeadLetterOperations
    residencies: Residencies
    quotas: Quotas
    fleet: Fleet
    pools: PoolDirectory
    peers: Peers
    inference: Inference
    status: ClusterStatus
    scaling: Scaling
    services: tuple[Service, ...]

    def service(self, kind: type[_Service]) -> _Service:
        """Return the service of this class. Raises NotReady if its plug-in failed at the start."""
        for service in self.services:
            if isinstance(service, kind):
                return service
        raise NotReady("this part of the gateway did not start: its log and /readyz say why")
