"""The start of a gateway, a config service and a sidecar with a broker that does not answer yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inprocess import InProcess, until

from sie_broker import BrokerUnavailable, Subscription
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_config_service.workers import CatalogueReaders
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_runtime.process import Stop


class Late(MemoryBroker):
    """A broker that times out at the first subscription to each subject, and accepts the second."""

    def __init__(self, server: MemoryServer, name: str) -> None:
        super().__init__(server, name)
        self.refused: set[str] = set()

    async def subscribe(self, subject: str, *arguments: Any, **options: Any) -> Subscription:
        if subject not in self.refused:
            self.refused.add(subject)
            raise BrokerUnavailable("no answer within 2 s")
        return await super().subscribe(subject, *arguments, **options)


class LateServer(MemoryServer):
    """A server that is late for the processes of one name."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self._late = late

    def connect(self, name: str) -> MemoryBroker:
        if name != self._late:
            return super().connect(name)
        broker = Late(self, name)
        self._connections.add(broker)
        return broker


async def test_a_gateway_waits_for_a_broker_that_answers_late(tmp_path: Path) -> None:
    """If the gateway ended instead, all requests that wait at its port would be refused."""
    async with InProcess(tmp_path, server=LateServer("gateway")) as cluster:
        gateway = await cluster.gateway()
        await cluster.sidecar()
        assert (await gateway.encode("one")).status_code == 200
        assert isinstance(gateway.broker, Late)
        assert len(gateway.broker.refused) >= 4


async def test_a_sidecar_waits_for_a_broker_that_answers_late(tmp_path: Path) -> None:
    """A restart of the pod would load all models again."""
    async with InProcess(tmp_path, server=LateServer("sidecar")) as cluster:
        gateway, sidecar = await cluster.gateway(), await cluster.sidecar()
        assert (await gateway.encode("one")).status_code == 200
        assert isinstance(sidecar.broker, Late)
        assert topology.cancel_subject("*") in sidecar.broker.refused


async def test_a_config_service_waits_for_a_broker_that_answers_late() -> None:
    server, workers = MemoryServer(), CatalogueReaders(15.0)
    await workers.follow(Late(server, "config"), Stop())
    beat = Heartbeat("w1", "_default", "cpu", "default", True, "1")
    await server.connect("worker").send(f"{topology.HEALTH_SUBJECT}.w1", messages.encode(beat))
    await until(lambda: "w1" in workers._seen, "the heartbeat")
