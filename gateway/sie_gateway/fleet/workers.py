"""Status of workers from their status websockets. The status is for diagnostics only, not for the routing of requests.

    SIE_GATEWAY_WORKERS ───────────────────────┐
    SIE_GATEWAY_KUBERNETES ──► EndpointSlices ─┴──► URLs ──► ws://worker/ws/status ──► last frame of each worker

With SIE_GATEWAY_HEALTH_MODE=ws, every websocket is always open. In other modes, the websocket of a worker is open only
while a client views the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.version import version

from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import Secret, SettingError, Settings, public_url
from sie_runtime.process import Stop, Trouble, cancel_all

RETRY_S = 1.0
OPEN_S = 2.0
MAX_FRAME_BYTES = 8 << 20
WATCH_S = 60  # seconds for which the API server keeps a watch open
WATCH_LATE_S = 10.0  # seconds after WATCH_S in which the API server must have ended the watch
LIST_S = 30.0  # seconds for a list of the endpoints
MIN_PAUSE_S = 1.0  # shortest time in seconds between two requests that list the endpoints
# workers are reached without a proxy; the package websockets has the parameter `proxy` since version 15
_DIRECT: dict[str, Any] = {} if version.startswith("14.") else {"proxy": None}
API = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # folder with the credentials of a pod
_logger = logging.getLogger("sie.gateway.workers")


class DeviceStatus(msgspec.Struct, frozen=True):
    device: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0


class ServedModel(msgspec.Struct, frozen=True):
    name: str
    state: str
    queue_depth: int = 0


class WorkerFrame(msgspec.Struct, frozen=True):
    """Fields of a frame of `/ws/status` that the gateway reads."""

    name: str
    ready: bool = False
    machine_profile: str = ""
    pool_name: str = ""
    gpu_count: int = 0
    bundle: str = ""
    bundle_config_hash: str = ""
    loaded_models: list[str] = []
    gpus: list[DeviceStatus] = []
    models: list[ServedModel] = []


_status = msgspec.json.Decoder(WorkerFrame)


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # no redirect is followed, because another server must not receive the token


class WorkerSocket:
    """Status websocket of one worker. `frame`: last frame; None if there is no connection, or if no frame has come for
    `stale_s` seconds.
    """

    def __init__(
        self, url: str, token: Secret | None, stale_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self._token = token
        self._stale_s = stale_s
        self._clock = clock
        self._frame: str | None = None
        self._heard_s = 0.0
        self._first = asyncio.Event()
        self._trouble = Trouble(_logger, f"cannot read the status of the worker at {public_url(url)}")
        self.watchers = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def frame(self) -> str | None:
        return self._frame if self._clock() - self._heard_s < self._stale_s else None

    @property
    def status(self) -> WorkerFrame | None:
        """Return the status in the last frame; None if there is no recent frame, or if the frame cannot be decoded."""
        frame = self.frame
        if frame is None:
            return None
        try:
            return _status.decode(frame)
        except UNDECODABLE as error:
            self._trouble.met(error)
            return None

    async def wait_for_frame(self, timeout_s: float) -> bool:
        """Wait for the first frame of the connection. Return False if no frame has come after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        return self._first.is_set()

    async def run(self) -> None:
        """Read frames until cancelled. Reconnect whenever the connection ends."""
        headers = {"Authorization": f"Bearer {self._token.reveal()}"} if self._token is not None else {}
        while True:
            try:
                async with _Connect(
                    _socket_url(self.url),
                    additional_headers=headers,
                    open_timeout=OPEN_S,
                    close_timeout=OPEN_S,
                    max_size=MAX_FRAME_BYTES,
                    max_queue=2,
                    compression=None,
                    **_DIRECT,
                ) as socket:
                    async for frame in socket:
                        if isinstance(frame, str):
                            self._frame, self._heard_s = frame, self._clock()
                            self._first.set()
                            self._trouble.passed()
            except (OSError, WebSocketException) as error:  # OSError includes TimeoutError
                self._trouble.met(error)
            self._frame = None
            self._first.clear()
            await asyncio.sleep(RETRY_S)


def _socket_url(url: str) -> str:
    """Return the address of the status websocket of a worker at `url`, such as `http://host:port/prefix`."""
    pieces = urlsplit(url if "//" in url else f"//{url}")
    scheme = "wss" if pieces.scheme in ("https", "wss") else "ws"
    return urlunsplit((scheme, pieces.netloc.rpartition("@")[2], f"{pieces.path.rstrip('/')}/ws/status", "", ""))


class WorkerSockets:
    """Status websockets of this gateway's workers. Raises SettingError if SIE_GATEWAY_KUBERNETES is set, but the
    gateway does not run in a pod.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._static = tuple(settings.gateway_workers or ())
        self._found: tuple[str, ...] = ()
        self._endpoints = Endpoints(settings) if settings.gateway_kubernetes else None
        self._sockets: dict[str, WorkerSocket] = {}
        # URL -> context that holds the worker's websocket open in health mode `ws`, even if no client views the worker
        self._kept: dict[str, contextlib.AsyncExitStack] = {}
        self._changed = asyncio.Event()

    def urls(self) -> list[str]:
        """Return the URLs of the workers that may be viewed, in a stable order."""
        return list(dict.fromkeys((*self._static, *self._found)))

    def statuses(self) -> list[tuple[str, WorkerFrame | None]]:
        """Return the status of each worker; None if there is no recent status."""
        return [(url, socket.status if (socket := self._sockets.get(url)) else None) for url in self.urls()]

    @contextlib.asynccontextmanager
    async def watched(self, url: str) -> AsyncIterator[WorkerSocket]:
        """Yield the websocket of a worker. The websocket stays open while at least one watcher uses it."""
        socket = self._sockets.get(url)
        if socket is None:
            token = self._settings.config_read_token
            socket = self._sockets[url] = WorkerSocket(url, token, self._settings.heartbeat_timeout_ms / 1000)
            socket.task = asyncio.create_task(socket.run(), name=f"watch:{public_url(url)}")
        socket.watchers += 1
        try:
            yield socket
        finally:
            socket.watchers -= 1
            if not socket.watchers and socket.task is not None:
                del self._sockets[url]
                await cancel_all([socket.task])

    async def run(self, stop: Stop) -> None:
        """Watch the EndpointSlices, if configured, until `stop`. With SIE_GATEWAY_HEALTH_MODE=ws, also hold the
        websocket of every worker open.
        """
        following = (
            asyncio.create_task(self._endpoints.run(self._on_found), name="endpoints") if self._endpoints else None
        )
        try:
            while not stop.requested:
                if self._settings.gateway_health_mode == "ws":
                    await self._keep(self.urls())
                await stop.wait_woken(self._changed)
        finally:
            if following is not None:
                await cancel_all([following])
            await self._keep(())

    def _on_found(self, urls: tuple[str, ...]) -> None:
        self._found = urls
        self._changed.set()

    async def _keep(self, urls: Iterable[str]) -> None:
        for url in set(urls) - self._kept.keys():
            self._kept[url] = contextlib.AsyncExitStack()
            await self._kept[url].enter_async_context(self.watched(url))
        removed = self._kept.keys() - set(urls)
        await asyncio.gather(*(self._kept.pop(url).aclose() for url in removed))


class _Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class _PodReference(msgspec.Struct, frozen=True):
    uid: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] | None = None
    conditions: _Conditions = _Conditions()
    target_ref: _PodReference | None = None


class _Slice(msgspec.Struct, frozen=True, rename="camel"):
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _SliceList(msgspec.Struct, frozen=True):
    items: list[_Slice]
    metadata: _Metadata = _Metadata()


_slices = msgspec.json.Decoder(_SliceList)


class Endpoints:
    """Pods of a service, ready or not, from the API server's EndpointSlices (discovery.k8s.io/v1).

    The service account of the gateway's pod needs `list` and `watch` on endpointslices. Raises SettingError if the pod
    has no service account.
    """

    def __init__(self, settings: Settings, *, api: str = API, account: Path = ACCOUNT) -> None:
        self._namespace, self._service = settings.gateway_k8s_namespace, settings.gateway_k8s_service
        self._port = settings.gateway_k8s_port
        self._api = api
        self._account = account
        if not (account / "token").is_file():
            raise SettingError(
                "SIE_GATEWAY_KUBERNETES", f"no service account at {account}: run the gateway in a pod that has one"
            )

    async def run(self, on_found: Callable[[tuple[str, ...]], None]) -> None:
        """Call `on_found` with the workers' URLs at the start and after each change, until cancelled. After an error,
        the gateway uses the last URLs until it can list the endpoints again.
        """
        trouble = Trouble(_logger, f"cannot read the endpoints of {self._namespace}/{self._service}")
        is_https, authorities = self._api.startswith("https:"), str(self._account / "ca.crt")
        while True:
            try:
                # read `ca.crt` before each request for the EndpointSlices, because the kubelet replaces this file
                verify = ssl.create_default_context(cafile=authorities) if is_https else False
                async with httpx.AsyncClient(base_url=self._api, verify=verify, trust_env=False, timeout=5.0) as client:
                    async with asyncio.timeout(LIST_S):  # for the whole list; httpx bounds only each read
                        addresses, version = await self._list(client)
                    on_found(addresses)
                    trouble.passed()
                    async with asyncio.timeout(WATCH_S + WATCH_LATE_S):
                        await self._change(client, version)
            except (httpx.HTTPError, *UNDECODABLE, OSError) as error:
                trouble.met(error)
            await asyncio.sleep(MIN_PAUSE_S)  # limits the rate of requests while pods change often

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"

    @property
    def _selected(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service}"}

    def _headers(self) -> dict[str, str]:
        # read the token for each request, because the kubelet renews it
        return {
            "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
            "Accept": "application/json",
        }

    async def _list(self, client: httpx.AsyncClient) -> tuple[tuple[str, ...], str]:
        """Return the workers' URLs and the list's version. Raises httpx.HTTPError, OSError, an error of UNDECODABLE."""
        answer = await client.get(self._path, params=self._selected, headers=self._headers())
        answer.raise_for_status()
        slices = _slices.decode(answer.content)
        addresses: dict[str, str] = {}  # pod -> address; a dual-stack service lists a pod once for each address family
        for piece in sorted(slices.items, key=lambda piece: piece.address_type):
            for endpoint in piece.endpoints or ():
                if endpoint.addresses and not endpoint.conditions.terminating:
                    first = endpoint.addresses[0]
                    pod = endpoint.target_ref.uid if endpoint.target_ref is not None else ""
                    addresses.setdefault(pod or first, f"[{first}]" if piece.address_type == "IPv6" else first)
        return tuple(
            f"http://{address}:{self._port}" for address in sorted(set(addresses.values()))
        ), slices.metadata.resource_version

    async def _change(self, client: httpx.AsyncClient, version: str) -> None:
        """Wait until an endpoint has changed since `version`, or until the API server ends the watch."""
        params = {**self._selected, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        timeout = httpx.Timeout(5.0, read=WATCH_S + WATCH_LATE_S)
        async with client.stream("GET", self._path, params=params, headers=self._headers(), timeout=timeout) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                return
