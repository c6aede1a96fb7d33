"""Data about a cluster for the checks. Each source (gateways, broker, heartbeats, config service, sockets) is read
once, and all checks share the result. A check that waits for a change reads a source again, with `ask_overviews` or
`ask_config`.

    check ──► ClusterProbe.gateways() ┐
    check ──► ClusterProbe.gateways() ┴──► one task; both checks get its result

If a check reaches its time limit, it stops waiting, but the task continues for the other checks. The probe sends a
token only to the address for which the token was configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import stat
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
import msgspec

from sie_broker import BrokerUnavailable, CoreMessage
from sie_cli.cluster import CONFIG_URL, SOURCE, Cluster
from sie_cli.data_dir import sockets_folder
from sie_contracts.errors import UNDECODABLE
from sie_contracts.loopback import client_options
from sie_contracts.settings import BY_NAME, MAX_DEVICES, Secret, public_url
from sie_contracts.status import QueueInfo
from sie_contracts.wire import heartbeats, ipc, topology
from sie_contracts.wire.heartbeats import GatewayBeat, Heartbeat
from sie_ops.doctor.report import DoctorFinding

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

CALL_S = 3.0  # seconds after which a request over HTTP or a socket counts as unanswered
BEAT_MARGIN_S = 1.0  # seconds that `ClusterProbe.heartbeats` waits for a late heartbeat
GATEWAYS_S = 1.5  # seconds in which each gateway sends at least one heartbeat
T = TypeVar("T")


class CheckSkipped(Exception):
    """Error of a check that cannot run. The message has the reason."""


class NotApplicable(Exception):
    """Error of a check that has nothing to examine in this cluster or machine. The message has the reason."""


@dataclass(frozen=True)
class ProbeResult:
    """Reply to an HTTP request. `trouble`: the reason if no reply came. `ahead_s`: the server's time, from the request
    id in the reply, minus this machine's time; None if the id has no time. `margin_s`: largest error of `ahead_s`. Both
    are in seconds.
    """

    url: str
    status: int = 0
    body: bytes = b""
    trouble: str = ""
    version: str = ""
    ahead_s: float | None = None
    margin_s: float = 0.0

    @property
    def is_sie(self) -> bool:
        return bool(self.version)

    def decoded(self, body_type: type[T]) -> T | None:
        """Decode the body of a reply. Return None if the status is not 200, or if the body is not a `body_type`."""
        try:
            return msgspec.json.decode(self.body, type=body_type) if self.status == 200 else None
        except UNDECODABLE:
            return None


class _WorkerName(msgspec.Struct, frozen=True):
    name: str


class _WorkerCounts(msgspec.Struct, frozen=True):
    worker_count: int = 0
    models_loaded: int = 0


class GatewayHealth(msgspec.Struct, frozen=True):
    """Fields of a gateway's reply to `/health` that the checks use."""

    nats_url: str | None
    config_url: str | None = None
    cluster: _WorkerCounts = _WorkerCounts()
    workers: tuple[_WorkerName, ...] = ()


class _Finding(msgspec.Struct, frozen=True):
    check: str
    wrong: str
    fix: str


class GatewayOverview(msgspec.Struct, frozen=True):
    """Fields of a gateway's reply to `/v1/cluster` that the checks use."""

    cluster: _WorkerCounts
    queues: tuple[QueueInfo, ...] | None
    findings: tuple[_Finding, ...]


@dataclass
class Heartbeats:
    """Workers and gateways by name, from the heartbeats received so far. The subscription stays open and adds more."""

    workers: dict[str, Heartbeat] = field(default_factory=dict)
    gateways: dict[str, GatewayBeat] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)  # subjects with messages that this version cannot decode
    arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_worker(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_heartbeat(message.data)
        except UNDECODABLE:
            self.unreadable.add(message.subject)
        else:
            self.workers[beat.worker] = beat
        self.arrival.set()

    async def on_gateway(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_gateway(message.data)
        except UNDECODABLE:
            self.unreadable.add(message.subject)
        else:
            if beat.leaving:
                self.gateways.pop(beat.gateway, None)
            else:
                self.gateways[beat.gateway] = beat
        self.arrival.set()


@dataclass(frozen=True)
class AdapterSocket:
    """Socket of an adapter. `wrong`, `fix`: fault and remedy, or empty. `description`: the adapter's reply, or None."""

    path: Path
    wrong: str = ""
    fix: str = ""
    description: ipc.Description | None = None
    is_unseen: bool = False  # the socket or its folder belongs to another user


def once(read: Callable[[ClusterProbe], Coroutine[Any, Any, T]]) -> Callable[[ClusterProbe], Coroutine[Any, Any, T]]:
    """Decorate a method of ClusterProbe so that it runs only once, in a task of its own. All callers get its result."""

    @functools.wraps(read)
    async def outcome(probe: ClusterProbe) -> T:
        if read not in probe.tasks:
            probe.tasks[read] = asyncio.create_task(read(probe))
        result: T = await asyncio.shield(probe.tasks[read])
        return result

    return outcome


class ClusterProbe:
    """Data about a cluster that one run of `sie doctor` reads. The context manager ends its tasks and connections."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.settings = cluster.settings
        self.data_dir = cluster.data_dir
        self.tasks: dict[Callable[..., Any], asyncio.Task[Any]] = {}
        self._open: NatsBroker | None = None

    @property
    def serve(self) -> str:
        return self.cluster.serve

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        if self._open is not None:
            await self._open.close()

    async def get(self, url: str, path: str, token: Secret | None = None) -> ProbeResult:
        """Send a GET request. If the request fails, return a result with the reason in `trouble`."""
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        try:
            async with (
                asyncio.timeout(CALL_S),
                httpx.AsyncClient(timeout=CALL_S, **client_options(url, httpx.AsyncHTTPTransport)) as client,
            ):
                sent_s = time.time()
                response = await client.get(url.rstrip("/") + path, headers=headers)
                received_s = time.time()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return ProbeResult(public_url(url), trouble=str(error)[:200] or type(error).__name__)
        server_s = _time_of_id(response.headers.get("x-sie-request-id", ""))
        ahead_s = None if server_s is None else server_s - (sent_s + received_s) / 2
        return ProbeResult(
            public_url(url),
            response.status_code,
            response.content,
            "",
            response.headers.get("x-sie-version", ""),
            ahead_s,
            (received_s - sent_s) / 2,
        )

    @once
    async def gateways(self) -> list[ProbeResult]:
        """Return the reply to `/health` of each gateway whose address is known."""
        cluster = self.cluster
        if cluster.is_named and self.settings.gateway_url is None and cluster.local() is None:
            # The default gateway address may belong to another cluster than the named data directory.
            return [ProbeResult(cluster.gateway_urls[0], trouble=f"nothing runs with {self.data_dir}")]
        requests = (self.get(url, "/health", cluster.gateway_token) for url in cluster.gateway_urls)
        return list(await asyncio.gather(*requests))

    async def health(self) -> GatewayHealth | None:
        """Return the health of the first gateway that answers; None if no gateway answers."""
        healths = (reply.decoded(GatewayHealth) for reply in await self.gateways() if reply.is_sie)
        return next((health for health in healths if health is not None), None)

    async def ask_overviews(self) -> dict[str, GatewayOverview]:
        """Request `/v1/cluster` from each gateway that answers; `overviews` caches the result. Return the overviews by
        URL. Raises CheckSkipped if no gateway returns one.
        """
        cluster = self.cluster
        up = {reply.url for reply in await self.gateways() if reply.status == 200 and reply.is_sie}
        urls = [url for url in cluster.gateway_urls if public_url(url) in up]
        replies = await asyncio.gather(*(self.get(url, "/v1/cluster", cluster.gateway_token) for url in urls))
        # leave out an overview in another format, because a gateway may have an older version
        overviews = {
            reply.url: overview for reply in replies if (overview := reply.decoded(GatewayOverview)) is not None
        }
        if not overviews:
            if replies and replies[0].status == 404:
                raise CheckSkipped(
                    f"{replies[0].url} has no /v1/cluster: the extra `console` is missing or off, see its /readyz"
                )
            raise CheckSkipped(
                f"{replies[0].url}/v1/cluster answers {replies[0].trouble or replies[0].status}"
                if replies
                else "no gateway answers with the state of the cluster"
            )
        return overviews

    overviews = once(ask_overviews)

    async def is_standalone(self) -> bool:
        health = await self.health()
        return health is not None and health.nats_url is None

    async def config_url(self) -> str:
        health = await self.health()
        return self.settings.config_service_url or (health.config_url if health else None) or ""

    async def ask_config(self) -> ProbeResult:
        """Get the config service's `/v1/configs/epoch`, which `config` caches. Raises NotApplicable, CheckSkipped."""
        if await self.is_standalone():
            raise NotApplicable("the catalogue is in the gateway's own process (--standalone)")
        url = await self.config_url()
        if not url:
            raise CheckSkipped("no address of a config service: give --config-service-url, or --url of a gateway")
        return await self.get(url, "/v1/configs/epoch", self.config_token)

    config = once(ask_config)

    @property
    def config_token(self) -> Secret | None:
        """Token for the config service; None if the service's address came from the command line or from a gateway,
        because the token belongs to the configured address only.
        """
        is_known = self.cluster.sources.get(CONFIG_URL) in ("environment", SOURCE)
        return self.cluster.config_token(writes=False) if is_known else None

    async def broker_url(self) -> str:
        """Return the broker's address. Raises NotApplicable, CheckSkipped."""
        if self.settings.nats_url:
            return self.settings.nats_url
        health = await self.health()
        if health is None:
            raise CheckSkipped("no address of a broker: give --nats-url, or --url of a gateway")
        if health.nats_url is None:
            raise NotApplicable("the queue is in the gateway's own process (--standalone)")
        return health.nats_url

    @once
    async def broker(self) -> NatsBroker:
        """Return a connection to the broker. Raises NotApplicable, CheckSkipped, BrokerUnavailable."""
        self._open = await self.cluster.open_broker("sie-doctor", await self.broker_url())
        return self._open

    async def connected_broker(self) -> NatsBroker:
        """Return the connection to the broker. Raises NotApplicable. Raises CheckSkipped if the connection fails,
        because only the check `broker` reports this fault.
        """
        try:
            return await self.broker()
        except BrokerUnavailable as error:
            raise CheckSkipped("there is no connection to the broker") from error

    async def stream_broker(self) -> NatsBroker:
        """Return the connection to a broker with JetStream. Raises NotApplicable, CheckSkipped."""
        broker = await self.connected_broker()
        if not broker.server[1]:
            raise CheckSkipped("the broker has no JetStream")
        return broker

    @once
    async def heartbeats(self) -> Heartbeats:
        """Collect heartbeats for GATEWAYS_S. Then wait until a gateway and all workers in `/health` have sent one. The
        wait ends at most one heartbeat interval plus BEAT_MARGIN_S after the start. Raises NotApplicable, CheckSkipped.
        """
        broker = await self.connected_broker()
        beats = Heartbeats()
        await broker.subscribe(f"{topology.HEALTH_SUBJECT}.*", beats.on_worker)
        await broker.subscribe(f"{topology.GATEWAY_SUBJECT}.*", beats.on_gateway)
        begun_s = time.monotonic()
        health = await self.health()
        expected = {worker.name for worker in health.workers} if health else set()
        await asyncio.sleep(GATEWAYS_S)  # wait the full time, because the number of gateways is unknown
        end_s = begun_s + self.settings.health_publish_interval_ms / 1000 + BEAT_MARGIN_S
        while not (expected and expected <= beats.workers.keys() and beats.gateways) and time.monotonic() < end_s:
            beats.arrival.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_s - time.monotonic()):
                    await beats.arrival.wait()
        if expected and not beats.workers:
            raise CheckSkipped(
                "no heartbeat arrives here, but the gateway receives heartbeats: the user of this connection to the "
                "broker has no right to subscribe to heartbeats"
            )
        return beats

    @once
    async def sockets(self) -> list[AdapterSocket]:
        """Return the sockets of the workers on this machine. Raises NotApplicable, CheckSkipped."""
        try:
            paths = self._socket_paths()
        except PermissionError as error:
            raise CheckSkipped(f"{error.filename} belongs to another user: run this as the worker's user") from error
        if not paths:
            raise NotApplicable(
                "no worker on this machine: SIE_IPC_SOCKET_PATH is not set, and `sie serve` has no socket here"
            )
        return list(await asyncio.gather(*map(probe_socket, paths)))

    def _socket_paths(self) -> list[Path]:
        run = sockets_folder(self.data_dir)
        if run.exists() and not os.access(run, os.R_OK | os.X_OK):
            raise CheckSkipped(f"{run} belongs to another user: run this as the user of `sie serve`")
        is_given = self.cluster.is_given("SIE_IPC_SOCKET_PATH")
        paths = [Path(self.settings.ipc_socket_path)] if is_given else default_sockets()
        return [path for first in (*paths, *sorted(run.glob("worker-*.sock"))) for path in _sockets_of_devices(first)]


def default_sockets() -> list[Path]:
    """Return a list with the default path of a worker's socket; empty if there is no socket at this path."""
    path = Path(BY_NAME["SIE_IPC_SOCKET_PATH"].default)
    return [path] if path.exists() else []


def _sockets_of_devices(first: Path) -> list[Path]:
    """Return the socket of a worker's first device, and the existing sockets of its other devices."""
    further = (Path(ipc.device_socket(str(first), number)) for number in range(1, MAX_DEVICES))
    return [first, *(path for path in further if path.exists())]


async def probe_socket(path: Path) -> AdapterSocket:
    """Check that an adapter replies at a socket, and that no other user may open the socket. Return the adapter's
    description, or a fault and its remedy.
    """
    restart = (
        f"start the adapter again with the sidecar's SIE_IPC_SOCKET_PATH={path}; the adapter's log says why it ended"
    )
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return AdapterSocket(path, f"{path}: there is no such socket, so no adapter listens", restart)
    except PermissionError:
        return AdapterSocket(path, is_unseen=True)
    if not stat.S_ISSOCK(status.st_mode):
        return AdapterSocket(
            path,
            f"{path} is no socket",
            "remove that file, or set SIE_IPC_SOCKET_PATH of sidecar and adapter to another one",
        )
    if status.st_mode & 0o077:
        wrong = f"{path} may be opened by other users (mode {stat.S_IMODE(status.st_mode):04o}, expected 0600)"
        return AdapterSocket(path, wrong, f"chmod 600 {path}, and find out who changed the mode: the adapter sets 0600")
    if status.st_uid != os.geteuid():
        return AdapterSocket(path, is_unseen=True)  # an adapter replies only to its own user and root
    try:
        async with asyncio.timeout(CALL_S):
            answer = await _describe(path)
    except TimeoutError:  # before OSError, because TimeoutError is a subclass of OSError
        return AdapterSocket(
            path,
            f"{path}: the adapter takes connections, but no answer comes within {CALL_S:g} s",
            f"kill it; {restart}",
        )
    except (OSError, EOFError) as error:
        return AdapterSocket(path, f"{path} refuses ({type(error).__name__}): no adapter answers on it", restart)
    except ipc.FrameError:
        answer = None
    if not isinstance(answer, ipc.Description) or answer.protocol != ipc.PROTOCOL:
        wrong = f"{path}: the program that listens there does not use protocol {ipc.PROTOCOL} of this version"
        return AdapterSocket(path, wrong, "install the same version of sidecar and adapter")
    return AdapterSocket(path, description=answer)


async def _describe(path: Path) -> ipc.Reply:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(ipc.frame(ipc.Describe()))
        await writer.drain()
        return ipc.reply(await ipc.read_frame(reader))
    finally:
        writer.close()


def _time_of_id(request_id: str) -> float | None:
    """Return the creation time in a UUID of version 7, in seconds since 1970; None for any other text."""
    try:
        parsed = uuid.UUID(request_id)
    except ValueError:
        return None
    return (parsed.int >> 80) / 1000 if parsed.version == 7 else None


CheckResult = tuple[str, list[DoctorFinding]]
Check = Callable[[ClusterProbe], Awaitable[CheckResult]]
