"""A whole cluster in the event loop of a test: the real `serve` of gateway and sidecar over the broker in memory, with
fake adapters.

    test ──HTTP──► gateway ──► MemoryServer ──► sidecar ──Unix socket──► FakeAdapter

Processes are configured by variables, as by an operator, and read no others. `InProcess.close` ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import httpx
import msgspec
from fake_adapter import FakeAdapter, toy_entry
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sie_broker import CoreMessage, Entry, Queue
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_cli.serve.ports import free_port
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Mode, Settings, load
from sie_contracts.wire import heartbeats, topology
from sie_contracts.wire.configs import ConfigEpoch, ConfigExport, ConfigModel
from sie_contracts.wire.heartbeats import Heartbeat
from sie_gateway.http.app import Edge
from sie_gateway.inference.handler import Inference
from sie_gateway.process import serve as serve_gateway
from sie_runtime.clock import BrokerClock
from sie_runtime.process import Stop
from sie_sidecar.process import serve as serve_sidecar

WAIT_S = 30.0  # far above the expected time, so that a busy machine does not fail a test
POLL_S = 0.002
WINDOW_S = 0.4  # the time that a client has to come back, see `inference_of`
OFTEN = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "500"}  # tests wait for the next heartbeat, which else comes after 5 s
HTTP_POLL_S = 0.02  # a request takes some milliseconds of the loop that it waits for


def settings_of(mode: Mode = "queue", **environ: str) -> Settings:
    """Return the settings of a process with exactly this environment."""
    return load(environ=environ, mode=mode).settings


def clock_at(now_s: Callable[[], float] = time.time) -> BrokerClock:
    """Return a broker's clock that a process has measured without an offset."""
    broker = cast("Queue", SimpleNamespace(on_reconnect=lambda handler: None))
    clock = BrokerClock(broker, "none", now_s)
    clock._offset_s = clock.margin_s = 0.0
    return clock


async def until(condition: Callable[[], Any], description: str, timeout_s: float = WAIT_S) -> Any:
    """Poll a condition of this process until it is true, and return its value. Raise AssertionError with the
    description at the time-out.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if value := condition():
                    return value
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {description}") from None


async def until_told(question: Callable[[], Awaitable[Any]], description: str, timeout_s: float = 30.0) -> Any:
    """Repeat a request to a process until its answer is true, with pauses so that requests do not fill a processor."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if value := await question():
                    return value
                await asyncio.sleep(HTTP_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {description}") from None


async def closing_code(socket: ClientConnection) -> int | None:
    """Wait until the server closes a websocket, and return its code, or None without a code."""
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


class Source:
    """A config service whose catalogue a test changes. A `silent` change keeps the epoch, like a corruption."""

    def __init__(self, *entries: ModelEntry) -> None:
        self.exports = 0
        self.polls = 0
        self._entries = {entry.id: entry for entry in entries}
        self._revisions = dict.fromkeys(self._entries, 1)
        self._revision = 1  # the revision of the catalogue

    def put(self, entry: ModelEntry, *, silent: bool = False) -> None:
        self._entries[entry.id] = entry
        self._revisions[entry.id] = max(1, self._revisions.get(entry.id, 0) + (not silent))
        self._revision += not silent

    def remove(self, model: str) -> None:
        del self._entries[model]
        self._revision += 1

    @property
    def present_epoch(self) -> str:
        return f"test:{self._revision}"

    async def export(self) -> ConfigExport:
        self.exports += 1
        models = tuple(
            ConfigModel(name, msgspec.to_builtins(entry), self._revisions[name])
            for name, entry in self._entries.items()
        )
        bundles = tuple({"id": bundle} for bundle in {entry.bundle or "default" for entry in self._entries.values()})
        return ConfigExport(self.present_epoch, models, bundles)

    async def epoch(self) -> ConfigEpoch:
        self.polls += 1
        return ConfigEpoch(self.present_epoch)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


@dataclass
class Process:
    """One running `serve`. `task` ends with its status, or raises the error of its start."""

    settings: Settings
    stop: Stop
    task: asyncio.Task[int]
    broker: MemoryBroker
    side_url: str  # metrics and probes

    async def end(self) -> int:
        self.stop.request()
        try:
            return await asyncio.wait_for(self.task, 60)
        finally:
            await self.broker.close()

    def side(self) -> httpx.AsyncClient:
        """Return a client of the port of metrics and probes."""
        return httpx.AsyncClient(base_url=self.side_url, trust_env=False, timeout=WAIT_S)

    async def get(self, path: str) -> httpx.Response:
        """Send a GET request to the port of metrics and probes."""
        async with self.side() as client:
            return await client.get(path)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )


@dataclass
class GatewayProcess(Process):
    url: str
    client: httpx.AsyncClient

    async def encode(self, *texts: str, model: str = "toy/one", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(f"/v1/encode/{model}", json={"items": list(texts)}, headers=named)

    async def end(self) -> int:
        await self.client.aclose()
        return await super().end()


@dataclass
class SidecarProcess(Process):
    worker: str


class InProcess:
    """The cluster of one test. `beats` has every heartbeat in order."""

    def __init__(
        self, folder: Path, *entries: ModelEntry, max_payload: int = 1 << 20, server: MemoryServer | None = None
    ) -> None:
        self.folder = folder
        self.source = Source(*(entries or (toy_entry(),)))
        self.server = server or MemoryServer(max_payload=max_payload)
        self.beats: list[Heartbeat] = []
        self.adapters: list[FakeAdapter] = []
        self._observer = self.server.connect("test")
        self._processes: list[Process] = []

    async def __aenter__(self) -> InProcess:
        await self._observer.subscribe(f"{topology.HEALTH_SUBJECT}.*", self._on_beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _on_beat(self, message: CoreMessage) -> None:
        self.beats.append(heartbeats.decode_heartbeat(message.data))

    async def send(self, subject: str, data: bytes) -> None:
        """Publish a message as another process on the broker."""
        await self._observer.send(subject, data)

    async def adapter(self, name: str = "a.sock", **options: Any) -> FakeAdapter:
        adapter = await FakeAdapter(self.folder / name, **options).start()
        self.adapters.append(adapter)
        return adapter

    async def gateway(self, source: Source | None = None, *, ready: bool = True, **environ: str) -> GatewayProcess:
        """Start a gateway, and wait until it listens and, unless `ready` is false, is ready. Raise its error if it does
        not start.
        """
        settings = settings_of(
            **{"SIE_GATEWAY_METRICS_PORT": str(free_port()), "SIE_GATEWAY_HEALTH_MODE": "nats", **environ}
        )
        stop, broker = Stop(), self.server.connect("gateway")
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = serve_gateway(
            settings,
            broker,
            source or self.source,
            stop,
            host="127.0.0.1",
            port=0,
            on_listening=listening.set_result,
        )
        task = asyncio.create_task(serving, name="gateway")
        await asyncio.wait([task, listening], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await broker.close()
            task.result()
        url = f"http://127.0.0.1:{listening.result()}"
        # a connection per request, because a kept one waits 40 ms for a delayed acknowledgement on this loop
        client = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0)
        )
        side_url = f"http://127.0.0.1:{settings.gateway_metrics_port}"
        gateway = GatewayProcess(settings, stop, task, broker, side_url, url, client)
        self._processes.append(gateway)
        if ready:
            await eventually_ready(gateway)
        return gateway

    async def sidecar(
        self,
        adapter: FakeAdapter | None = None,
        *,
        source: Source | None = None,
        ready: bool = True,
        mode: Mode = "queue",
        **environ: str,
    ) -> SidecarProcess:
        """Start a sidecar with `adapter`, by default a new one. Wait until it is ready unless `ready` is false."""
        number = sum(isinstance(process, SidecarProcess) for process in self._processes)
        if adapter is None and "SIE_IPC_SOCKET_PATH" not in environ:
            adapter = await self.adapter(f"{number}.sock")
        own = {"SIE_WORKER_METRICS_PORT": str(free_port()), "SIE_WORKER_ID": f"w{number}", **OFTEN}
        if adapter is not None:
            own["SIE_IPC_SOCKET_PATH"] = adapter.path
        settings = settings_of(mode, **{**own, **environ})
        stop, broker = Stop(), self.server.connect("sidecar")
        serving = serve_sidecar(settings, broker, source or self.source, stop, host="127.0.0.1", mode=mode)
        task = asyncio.create_task(serving, name="sidecar")
        side_url = f"http://127.0.0.1:{settings.worker_metrics_port}"
        sidecar = SidecarProcess(settings, stop, task, broker, side_url, settings.worker_id or "")
        self._processes.append(sidecar)
        if ready:
            await eventually_ready(sidecar)
            # gateways route by the first heartbeat after readiness
            await until(
                lambda: self.last_beat(sidecar.worker, ready=True), f"a heartbeat of {sidecar.worker} that says ready"
            )
        return sidecar

    def last_beat(self, worker: str, *, ready: bool | None = None) -> Heartbeat | None:
        """Return the last heartbeat of a worker if its readiness is `ready`, or of any worker if `worker` is empty."""
        beat = next((beat for beat in reversed(self.beats) if not worker or beat.worker == worker), None)
        return beat if beat is not None and ready in (None, beat.ready) else None

    async def close(self) -> None:
        for adapter in self.adapters:
            adapter.let_go()
        # a test checks a process that refused to start itself
        running = [process for process in self._processes if not process.task.done()]
        statuses = await asyncio.gather(*(process.end() for process in running))
        for process in self._processes:
            await process.broker.close()
        for adapter in self.adapters:
            await adapter.stop()
        await self._observer.close()
        assert not any(statuses), f"a process ended with a status other than 0: {statuses}"


async def eventually_ready(process: Process) -> None:
    """Wait until /readyz is 200. Raise the error of the process if it ends before."""
    reason = "no answer"
    try:
        async with asyncio.timeout(WAIT_S), process.side() as client:
            while True:
                if process.task.done():
                    process.task.result()
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.get("/readyz")
                    if answer.status_code == 200:
                        return
                    reason = answer.text
                await asyncio.sleep(HTTP_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not ready within {WAIT_S} s: {reason}") from None


def unchanged_inference_of(gateway: GatewayProcess) -> Inference:
    """Return the inference object of a gateway, with the times of the contract."""
    port = gateway.url.rpartition(":")[2]
    (server,) = (task for task in asyncio.all_tasks() if task.get_name() == f"http:{port}")
    edge = server.get_coro().cr_frame.f_locals["self"].config.app.app  # type: ignore[union-attr]
    assert isinstance(edge, Edge)
    return edge._gateway.inference


def inference_of(gateway: GatewayProcess, *, window_s: float = WINDOW_S) -> Inference:
    """Return the inference object of a gateway that watches clients at once and waits for lost ones only `window_s`."""
    inference = unchanged_inference_of(gateway)
    inference.away.window_s, inference.watch_after_s = window_s, 0.01
    return inference


async def placing(cluster: InProcess) -> None:
    """Wait until a gateway has written a placement table. Until then all sidecars pull all work."""
    bucket = await cluster.server.connect("reader").key_value(topology.PLACEMENT_BUCKET)
    written = asyncio.Event()

    async def on_entry(entry: Entry) -> None:
        written.set()

    watch = await bucket.watch(on_entry)
    await asyncio.wait_for(written.wait(), WAIT_S)
    await watch.stop()
