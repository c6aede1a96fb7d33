"""Fetch of images at URLs, only from hosts that SIE_IMAGE_URL_HOSTS names and only from public addresses.

    URL ──► scheme, host, port ──► addresses of the host, all public ──► a connection to one of these ──► its response
               ▲                                                                                             │
               └───────────────── a redirect, at most MAX_REDIRECTS ◄────────────────────────────────────────┤
                                                                     at most MAX_BYTES, within MAX_S: a file ◄┘

A client chooses the URL. So a fetch must not reach a service that only this gateway can reach, for example a service of
the cluster or the metadata service of a cloud. The gateway resolves a host name once for each connection, and connects
to the address that it has checked, so a later change in the DNS has no effect. The gateway ignores the environment's
proxy settings, because a proxy would resolve the name again. The fetch sends no header of the client's request. No
error text repeats a URL, because a URL may contain a signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import httpcore
import httpx
import msgspec

import sie_contracts
from sie_contracts.errors import ErrorInfo, InvalidInput, PayloadTooLarge, QueueFull
from sie_gateway.admission.model_queue import SharedLimit
from sie_gateway.inference.body import RequestItem, all_links
from sie_gateway.inference.images import EXPECTED
from sie_runtime.http.protocol import matches, parts

MAX_BYTES = 32 << 20  # largest number of bytes of an image
# largest number of bytes of the fetched images of a request, equal to the largest value of SIE_MAX_BODY_BYTES
MAX_REQUEST_BYTES = 256 << 20
MAX_HELD_BYTES = 1 << 30  # largest number of bytes of the fetched images of all requests in this gateway
MAX_URLS = 256  # largest number of URLs of a request
MAX_URL = 8192  # largest number of characters of a URL
# largest number of bytes before the body of a response: interim responses (status 1xx) and headers
MAX_HEAD_BYTES = 64 << 10
# A response body may arrive in at most MAX_PIECES reads plus one read for each PIECE_BYTES bytes. A server that sends
# smaller pieces would take too much time of the event loop.
MAX_PIECES, PIECE_BYTES = 1000, 64
MAX_S = 10.0  # time limit in seconds for the fetch of an image, redirects included
MAX_REDIRECTS = 3
# largest number of images that are fetched at a time: for all API keys, for one key, for one request
AT_ONCE, AT_ONCE_OF_A_KEY, AT_ONCE_OF_A_REQUEST = 64, 48, 8
CONNECT_S = 3.0  # time limit in seconds for a connection to one address of a host
_ANY = "*"
_PORTS = {"http": 80, "https": 443}
RESULTS = ("fetched", "refused", "failed")  # of a URL, in the metric
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = (
    (b"accept", b"image/*,*/*;q=0.5"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", f"sie/{sie_contracts.__version__}".encode()),
)
# Addresses from which the gateway fetches nothing: all ranges of IANA's special-purpose registries, multicast, and host
# services of a cloud. `ipaddress.is_global` would not do, because its ranges differ between Python versions.
_INSIDE_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",  # host services for a virtual machine in Azure
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",  # includes the metadata service of Oracle's cloud
            "192.0.2.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # multicast, reserved, broadcast
        ),
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")  # the only public range of IPv6
_INSIDE_V6 = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"))
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # prefix by which an IPv6-only network reaches public IPv4 addresses


class _Unfetched(Exception):
    """Raised if the gateway refuses the URL of an image, or if the server of the URL failed. `extras`: values that the
    error reports in addition to its message, such as the limit.
    """

    def __init__(self, message: str, result: Literal["refused", "failed"] = "refused", **extras: float) -> None:
        super().__init__(message)
        self.result = result
        self.extras = extras


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once. Raises OSError, UnicodeError.

    A client chooses the host, and the host's name server may be slow. So each call starts its own thread, and cannot
    occupy the few threads of the event loop's executor, which resolve the broker's name, for example.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def settle(result: list[str] | Exception) -> None:
        if answer.done():  # the waiting task was cancelled, for example at the end of the process
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def resolve() -> None:
        result: list[str] | Exception
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result = list(dict.fromkeys(str(address[0]) for *_, address in addresses))
        except (OSError, UnicodeError) as error:
            result = error
        with contextlib.suppress(RuntimeError):  # raised if the event loop is already closed
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=resolve, name="resolve", daemon=True).start()
    return await answer


@dataclass(frozen=True)
class Network:
    """Access of a gateway to the network. `resolve` returns the addresses of a host, `connections` connects to an
    address, and `tls` builds the context that verifies certificates.
    """

    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = resolved
    connections: httpcore.AsyncNetworkBackend = field(default_factory=httpcore.AnyIOBackend)
    tls: Callable[[], ssl.SSLContext] = httpx.create_ssl_context


NETWORK = Network()


class ImageUrls:
    """Fetches images at URLs. Used only in the gateway's event loop. `hosts`: SIE_IMAGE_URL_HOSTS; without hosts, no
    URL is fetched. `count` is called with the result of each URL: `fetched`, `refused` or `failed`.
    """

    def __init__(
        self,
        hosts: Collection[str] | None,
        count: Callable[[str], None] = lambda result: None,
        network: Network = NETWORK,
    ) -> None:
        self._hosts = tuple(host.strip().lower() for host in hosts or ())
        self._count = count
        self._network = network
        # the TLS context is built at the first URL, because the build reads more than a hundred certificates
        self._make_tls = functools.cache(network.tls)
        self._slots = asyncio.Semaphore(AT_ONCE)
        # API key with a running request -> its slots; so a key whose image servers are slow cannot occupy all `_slots`
        self._key_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.held = SharedLimit(MAX_HELD_BYTES)  # bytes of the fetched images of running requests

    def check(self, items: Sequence[RequestItem], query: RequestItem | None) -> None:
        """Raise InvalidInput for URLs that may not be fetched, and for too many URLs."""
        urls = all_links(items, query)
        for link in urls:
            if not self._hosts:
                message = f"got a URL, but SIE_IMAGE_URL_HOSTS names no host to fetch from: send {EXPECTED}"
                raise InvalidInput.at(link.path, message, reason="invalid_media")
            try:
                self._target(link.url)
            except _Unfetched as error:
                self._count(error.result)
                raise InvalidInput.at(link.path, str(error), reason="invalid_media", extras=error.extras) from None
        if len(urls) > MAX_URLS:
            path = urls[MAX_URLS].path
            message = f"the request has {len(urls)} URLs of images, at most {MAX_URLS} are fetched"
            raise InvalidInput.at(path, message, reason="invalid_media", extras={"limit": MAX_URLS})

    @contextlib.asynccontextmanager
    async def fetched(
        self, items: Sequence[RequestItem], until_s: float, key: str = "", name: str = "items"
    ) -> AsyncIterator[list[RequestItem]]:
        """Yield the items with files in place of their URLs. If the fetch of a URL failed, the item's `unfit` has the
        reason. `until_s`: deadline on the event loop's clock. `key`: API key of the request. `name`: field with the
        inputs, for errors. The files count in `held` until the context ends. Raises PayloadTooLarge, QueueFull.
        """
        own_bytes = 0

        def count_bytes(more: int) -> None:
            nonlocal own_bytes
            _check_total(own_bytes + more, name)
            held = self.held
            if held.used > own_bytes and not held.accepts(key, more, asyncio.get_running_loop().time()):
                message = f"the images from URLs in this gateway have {held.usage(key)}: try again later"
                raise QueueFull(message, retry_after_s=2)
            own_bytes += more
            held.use(key, more)

        key_slots = self._key_slots.setdefault(key, asyncio.Semaphore(AT_ONCE_OF_A_KEY))
        turns = asyncio.Semaphore(AT_ONCE_OF_A_REQUEST), key_slots, self._slots
        urls = dict.fromkeys(link.url for item in items if item.unfit is None for link in item.links)
        tasks = {url: asyncio.create_task(self._turn(url, until_s, count_bytes, turns), name="image") for url in urls}
        try:
            files = dict(zip(urls, await asyncio.gather(*tasks.values()), strict=True))
            items_read = [_with(item, files) for item in items]
            # a file of two inputs is fetched once, but counts twice, because the queue messages contain it twice
            pairs = zip(items, items_read, strict=True)
            _check_total(sum(item_read.file_bytes for item, item_read in pairs if item.links), name)
            yield items_read
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            self.held.use(key, -own_bytes)

    async def _turn(
        self, url: str, until_s: float, take: Callable[[int], None], turns: tuple[asyncio.Semaphore, ...]
    ) -> bytes | _Unfetched:
        outcome: bytes | _Unfetched
        try:
            of_request, *shared = turns
            async with asyncio.timeout_at(until_s), of_request:
                with contextlib.ExitStack() as slots:
                    for turn in shared:
                        await turn.acquire()
                        slots.callback(turn.release)
                    outcome = await self._within(MAX_S, url, take, slots)
        except TimeoutError:
            outcome = _Unfetched("the image was not complete within the budget of the request", "failed")
        except _Unfetched as error:
            outcome = error
        except httpcore.ConnectError:
            outcome = _Unfetched("the server of the URL cannot be reached", "failed")
        # httpcore converts only the TLS errors of the handshake; a server that refuses the client after the handshake
        # causes an ssl.SSLError
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, ssl.SSLError):
            outcome = _Unfetched("the server of the URL sent no complete answer", "failed")
        self._count(outcome.result if isinstance(outcome, _Unfetched) else "fetched")
        return outcome

    async def _within(self, max_s: float, url: str, take: Callable[[int], None], slots: contextlib.ExitStack) -> bytes:
        try:
            async with asyncio.timeout(max_s):
                return await self._fetch(url, take, slots)
        except TimeoutError:
            raise _Unfetched(f"the image was not complete within {max_s:g} s", "failed", limit=max_s) from None

    async def _fetch(self, url: str, take: Callable[[int], None], slots: contextlib.ExitStack) -> bytes:
        target = self._target(url)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(target, slots) as answer:
                if answer.status not in _REDIRECTS:
                    return await _body(answer, take)
                target = self._target(_joined(target, answer))
        raise _Unfetched(f"the URL leads to more than {MAX_REDIRECTS} redirects", limit=MAX_REDIRECTS)

    @contextlib.asynccontextmanager
    async def _answer(self, target: httpx.URL, slots: contextlib.ExitStack) -> AsyncIterator[httpcore.Response]:
        """Send a GET over a new connection and yield the response. A new connection checks the host's address again."""
        url = httpcore.URL(scheme=target.raw_scheme, host=target.raw_host, port=target.port, target=target.raw_path)
        headers = [(b"host", target.netloc), *_HEADERS]
        public = _Public(self._network, slots)
        pool = httpcore.AsyncConnectionPool(self._make_tls(), network_backend=public)
        async with pool, pool.stream(b"GET", url, headers=headers) as answer:
            public.is_answered = True
            yield answer

    def _target(self, url: str) -> httpx.URL:
        if len(url) > MAX_URL:
            raise _Unfetched(f"the URL has {len(url)} characters, at most {MAX_URL} are allowed", limit=MAX_URL)
        try:
            target = httpx.URL(url.strip())
            host, port = target.raw_host.decode("ascii").lower(), target.port
        except (httpx.InvalidURL, ValueError):
            raise _Unfetched("the URL is not valid") from None
        if target.scheme not in _PORTS:
            raise _Unfetched("the URL has a scheme other than http and https")
        if not host:
            raise _Unfetched("the URL names no host")
        if target.userinfo:
            raise _Unfetched("the URL has a user name or password: remove it")
        if not self._is_listed(host.removesuffix("."), _PORTS[target.scheme] if port is None else port):
            raise _Unfetched("images are fetched only from hosts and ports that SIE_IMAGE_URL_HOSTS names")
        return target

    def _is_listed(self, host: str, port: int) -> bool:
        """Return True if SIE_IMAGE_URL_HOSTS lists the host and port. An entry without a port allows ports 80, 443."""
        for host_listed in self._hosts:
            name, own = parts(host_listed)
            if (own or port in _PORTS.values()) and (name == _ANY or matches(host_listed, host, str(port))):
                return True
        return False


def _check_total(nbytes: int, name: str) -> None:
    if nbytes > MAX_REQUEST_BYTES:
        message = f"{name}: the images at their URLs have more than {MAX_REQUEST_BYTES} bytes in all"
        raise PayloadTooLarge(message, param=name, extras={"limit": MAX_REQUEST_BYTES})


def _with(item: RequestItem, fetched: dict[str, bytes | _Unfetched]) -> RequestItem:
    """Return the item with its fetched files. If a URL failed, return the item with the first error in `unfit`."""
    if item.unfit is not None or not item.links:
        return item
    files = list(item.images)
    for link in item.links:
        file = fetched[link.url]
        if isinstance(file, _Unfetched):
            info = ErrorInfo("INVALID_INPUT", f"{link.path}: {file}", "invalid_media", link.path, extras=file.extras)
            return msgspec.structs.replace(item, unfit=info)
        files[link.place] = file
    return msgspec.structs.replace(item, images=tuple(files), links=())


def _joined(target: httpx.URL, answer: httpcore.Response) -> str:
    try:
        return str(target.join(_header(answer, b"location").decode("ascii")))
    except (httpx.InvalidURL, ValueError):
        raise _Unfetched("the URL leads to a redirect that is not valid") from None


def _header(answer: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in answer.headers if key.lower() == name), b"")


async def _body(answer: httpcore.Response, take: Callable[[int], None]) -> bytes:
    if answer.status != 200:
        raise _Unfetched(f"the server of the URL answered {answer.status}, expected 200", "failed")
    if _header(answer, b"content-encoding").lower() not in (b"", b"identity"):
        raise _Unfetched("the server of the URL sent a compressed answer, which was not asked for", "failed")
    length = _header(answer, b"content-length")
    if length.isdigit() and (len(length) > 18 or int(length) > MAX_BYTES):
        raise _too_large()
    body, pieces = bytearray(), 0
    async for piece in answer.aiter_stream():
        pieces += 1
        if pieces > MAX_PIECES + len(body) // PIECE_BYTES:
            raise _Unfetched(f"the server of the URL sent pieces of less than {PIECE_BYTES} bytes", "failed")
        if len(body) + len(piece) > MAX_BYTES:
            raise _too_large()
        take(len(piece))
        body += piece
    if not body:
        raise _Unfetched("the server of the URL sent nothing", "failed")
    return bytes(body)


def _too_large() -> _Unfetched:
    return _Unfetched(f"the image has more than {MAX_BYTES} bytes, the limit of a fetched image", limit=MAX_BYTES)


class _Public(httpcore.AsyncNetworkBackend):
    """Network backend for one response. It connects only to public addresses, and TLS verifies the host name as usual.
    `slots`: slots of `ImageUrls` that the fetch occupies. Nothing can stop the thread that resolves a host name. So if
    the fetch is cancelled during the resolution, its slots are released when the thread ends.
    """

    def __init__(self, network: Network, slots: contextlib.ExitStack) -> None:
        self._network = network
        self._slots = slots
        self._head_bytes = 0
        self.is_answered = False

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the host. Raises _Unfetched if the host has no address, or if one of its addresses is not public.
        Raises httpcore.ConnectError if no address can be reached.
        """
        resolution = asyncio.ensure_future(self._network.resolve(host, port))
        try:
            await asyncio.wait({resolution})
            addresses = resolution.result()
        except asyncio.CancelledError:
            resolution.add_done_callback(functools.partial(_release, self._slots.pop_all()))
            raise
        except (OSError, UnicodeError):
            raise _Unfetched("the host of the URL has no address", "failed") from None
        if not all(map(is_public, addresses)):
            raise _Unfetched("the host of the URL has an address that is not public")
        for address in addresses:
            try:
                stream = await self._network.connections.connect_tcp(address, port, timeout=CONNECT_S)
                return _Counted(stream, self._count)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        raise httpcore.ConnectError("no address of the host can be reached")

    def _count(self, nbytes: int) -> None:
        """Count bytes that arrive before the body of the response. Raises _Unfetched above MAX_HEAD_BYTES, because a
        server may send headers and interim responses without end.
        """
        self._head_bytes += 0 if self.is_answered else nbytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Unfetched(f"the head of the server's answer has more than {MAX_HEAD_BYTES} bytes", "failed")


def _release(slots: contextlib.ExitStack, resolution: asyncio.Future[Any]) -> None:
    slots.close()
    if not resolution.cancelled():
        resolution.exception()  # marks the exception as retrieved, so that asyncio does not report it


class _Counted(httpcore.AsyncNetworkStream):
    """Stream that calls `count` with the bytes of each read. Reads are small, so that other tasks run in between."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, count: Callable[[int], None]) -> None:
        self._stream = stream
        self._count = count

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(min(max_bytes, MAX_HEAD_BYTES // 8), timeout)
        self._count(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Counted(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._count)


def is_public(address: str) -> bool:
    """Return True if the address is public. A NAT64 or IPv4-mapped address is public if its IPv4 address is public."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF) if parsed in _NAT64 else parsed.ipv4_mapped
        if inner is None:
            return parsed in _UNICAST and not any(parsed in network for network in _INSIDE_V6)
        parsed = inner
    return not any(parsed in network for network in _INSIDE_V4)
