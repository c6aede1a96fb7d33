"""Connections to the adapters of a worker; each device has one adapter. The sidecar has several connections to each
adapter for batches and loads, and a control connection for short requests and pings. Pings show if the adapter replies.

    AdapterLinks.run ──► link to the first adapter ──► its description: number of devices ──► links to the others
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import msgspec

from sie_contracts.errors import PayloadTooLarge, SIEError
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import Fetched
from sie_runtime.process import START_S, Stop, Trouble, wait_set

CONTROL_TIMEOUT_S = 5.0
CONNECT_PAUSE_S = 0.05
# seconds after the loss of an adapter for which work may wait for the next adapter of the same device; then the work
# moves to another device or fails
AWAY_S = 10.0
_R = TypeVar("_R", ipc.Ready, ipc.Done)
_logger = logging.getLogger("sie.sidecar.link")


class AdapterGone(Exception):
    """Raised if the adapter closes the connection, accepts no connection, does not reply to a short request in time, or
    sends an unexpected reply, and if a load failed on one device and another device must run the work. Work that was
    sent may have run, but its result is lost. `died` is False if this process closed the connection itself. Work is
    suspected of a crash only if the adapter has begun it and `died` is True.
    """

    def __init__(self, message: str, *, died: bool = True) -> None:
        super().__init__(message)
        self.died = died


class _AdapterConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._given_up = False

    async def send(self, frame: bytes) -> None:
        # checked first, because writing to a reset connection raises RuntimeError in uvloop
        if self._writer.is_closing():
            raise AdapterGone("sending failed: the connection was reset", died=not self._given_up)
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as error:
            raise AdapterGone(f"sending failed: {error}", died=not self._given_up) from error

    async def receive(self) -> ipc.Reply:
        try:
            return ipc.reply(await ipc.read_frame(self._reader))
        except (OSError, EOFError, ipc.FrameError) as error:
            raise AdapterGone(str(error), died=not self._given_up) from error

    def close(self, *, given_up: bool = True) -> None:
        self._given_up = given_up
        # `transport.close` would first send the rest of a frame, which an adapter that hangs never reads
        self._writer.transport.abort()


async def _cancel_when(abandoned: asyncio.Event, connection: _AdapterConnection) -> None:
    """When `abandoned` is set, send a Cancel for the batch on this connection. The adapter still sends a reply to the
    batch.
    """
    await abandoned.wait()
    with contextlib.suppress(AdapterGone):  # the caller waits for the reply and gets the same error
        await connection.send(ipc.frame(ipc.Cancel()))


async def _connect(path: str) -> _AdapterConnection:
    try:
        return _AdapterConnection(*await asyncio.open_unix_connection(path, limit=1 << 20))
    except OSError as error:
        raise AdapterGone(f"{path}: {error.strerror or error}") from error


class AdapterLink:
    """Connections to one adapter. If a connection is lost, the link closes all of them, and the adapter and its models
    count as lost. Each of `listeners` is called with True when the adapter is connected, with False when it is lost.
    """

    def __init__(
        self, path: str, *, size: int | Callable[[int], int], ping_s: float, stale_s: float, number: int = 0
    ) -> None:
        """Create the link; `run` connects it. `size`: number of connections for batches and loads, or a function that
        computes it from the number of batches that the device runs at the same time. `number`: number of the device in
        this worker.
        """
        self.path = path
        self.number = number
        self.description: ipc.Description | None = None
        self.lanes = 1  # number of batches that the device runs at the same time
        self.connected = False
        # by id of a catalogue entry: progress of the download of its weights
        self.fetching: dict[str, Fetched] = {}
        self._size_of = size if callable(size) else lambda _: size
        self._ping_s = ping_s
        self._stale_s = stale_s
        self._idle: asyncio.LifoQueue[_AdapterConnection] = asyncio.LifoQueue()
        # connections for batches that generate text, which do not count as running batches of the device
        self._more: asyncio.LifoQueue[_AdapterConnection] = asyncio.LifoQueue()
        self._all: list[_AdapterConnection] = []
        self._control: _AdapterConnection | None = None
        self._control_lock = asyncio.Lock()  # held by the request that uses the control connection
        self._loads = asyncio.Semaphore(1)
        self._lost = asyncio.Event()
        self._given_up = False  # true if this process closed the connections itself: the adapter may still run
        self._last_pong_s = -1e9
        self._lost_s = time.monotonic()  # time at which the adapter was lost
        self._up = asyncio.Event()
        self.listeners: list[Callable[[bool], None]] = []
        self._may_drop: Callable[[], tuple[str, ...]] = tuple
        self._dropped: Callable[[tuple[str, ...]], None] = lambda names: None

    def attach(self, may_drop: Callable[[], tuple[str, ...]], dropped: Callable[[tuple[str, ...]], None]) -> None:
        """Set two callbacks. `may_drop` returns the models that the adapter may evict, in the order of eviction.
        `dropped` is called with the models that the adapter reports as evicted.
        """
        self._may_drop, self._dropped = may_drop, dropped

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def is_back(self) -> bool:
        """Wait for the adapter, at most until AWAY_S seconds after its loss. Return True if it is connected."""
        await wait_set(self._up, max(0.0, self._lost_s + AWAY_S - time.monotonic()))
        return self.connected

    async def describe(self) -> ipc.Description | None:
        """Request, store and return the adapter's description; None for another reply. Raises AdapterGone, SIEError."""
        answer = await self.request(ipc.Describe())
        if not isinstance(answer, ipc.Description):
            return None
        self.description = answer
        return answer

    def is_fresh(self) -> bool:
        """Return True if the adapter has replied to a ping in the last `stale_s` seconds."""
        return time.monotonic() - self._last_pong_s < self._stale_s

    async def run(self, stop: Stop) -> None:
        """Connect, send pings, and connect again after a loss. After `stop`, return at the first failed attempt to
        connect.
        """
        trouble = Trouble(_logger, "waiting for the adapter", START_S)
        while True:
            try:
                await self._open()
            except AdapterGone as error:
                trouble.met(error)
                if await stop.wait_for(CONNECT_PAUSE_S):
                    return
                continue
            trouble.passed()
            _logger.info("adapter connected: %s", self.description and self.description.device)
            self._notify_listeners(True)
            try:
                await self._ping_until_lost()
            finally:
                self._close()
            self._notify_listeners(False)
            _logger.warning("the connection to the adapter at %s is lost; connecting again", self.path)

    def _notify_listeners(self, connected: bool) -> None:
        for listener in self.listeners:
            listener(connected)

    async def _open(self) -> None:
        opened: list[_AdapterConnection] = []
        try:
            control = await _connect(self.path)
            opened.append(control)
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await control.send(ipc.frame(ipc.Describe()))
                description = await control.receive()
            if isinstance(description, ipc.Refused):
                raise AdapterGone(f"{self.path}: the adapter cannot describe itself: {description.error.message}")
            if not isinstance(description, ipc.Description) or description.protocol != ipc.PROTOCOL:
                raise AdapterGone(f"{self.path}: the adapter does not speak version {ipc.PROTOCOL} of the protocol")
            size = self._size_of(description.lanes)
            while len(opened) <= size:
                opened.append(await _connect(self.path))
        except BaseException as error:
            for connection in opened:
                connection.close()
            if isinstance(error, TimeoutError):
                raise AdapterGone(f"{self.path}: no reply in {CONTROL_TIMEOUT_S} s") from error
            raise
        connections = opened[1:]
        self._lost.clear()
        self._given_up = False
        self._control, self._all, self.description = control, connections, description
        self.connected, self.lanes = True, description.lanes
        self._idle, self._more = asyncio.LifoQueue(), asyncio.LifoQueue()
        self._loads = asyncio.Semaphore(max(1, size - 1))  # loads must leave one connection free for batches
        for connection in connections:
            self._idle.put_nowait(connection)
        self._last_pong_s = time.monotonic()
        self._up.set()

    def _close(self) -> None:
        """Close all connections, because the adapter counts as lost."""
        self._up.clear()
        for connection in [*self._all, *([self._control] if self._control else [])]:
            connection.close(given_up=self._given_up)
        self._control, self._all, self.connected = None, [], False
        self._lost_s = time.monotonic()

    async def _ping_until_lost(self) -> None:
        while not await wait_set(self._lost, self._ping_s):
            try:
                pong = await self.request(ipc.Ping())
            except AdapterGone:
                return
            except SIEError as error:  # the adapter replies, so its batches go on, but no Pong renews `is_fresh`
                _logger.warning("the adapter refused a health check; its batches go on: %s", error)
                continue
            if isinstance(pong, ipc.Pong):
                self._last_pong_s = time.monotonic()
                self.fetching = pong.fetching

    async def request(self, question: ipc.Request) -> ipc.Reply:
        """Send a short request on the control connection and return the reply. Raises AdapterGone, SIEError."""
        async with self._control_lock:
            control = self._control
            if control is None:
                raise AdapterGone(f"{self.path}: the adapter is not connected")
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    answer = await self._exchange(control, question)
            except BaseException as error:
                self._given_up = self._given_up or not isinstance(error, AdapterGone)
                # a part of the reply may be unread, so the connection cannot be used again
                self._lost.set()
                if isinstance(error, TimeoutError):
                    raise AdapterGone(f"{self.path}: no reply in {CONTROL_TIMEOUT_S} s") from error
                raise
            return self._unwrapped(answer)

    @staticmethod
    async def _exchange(connection: _AdapterConnection, question: ipc.Request) -> ipc.Reply:
        await connection.send(ipc.frame(question))
        return await connection.receive()

    async def _next(self, pool: asyncio.LifoQueue[_AdapterConnection]) -> _AdapterConnection:
        """Wait for a free connection of the pool. Raises AdapterGone if the adapter is lost meanwhile."""
        getting = asyncio.ensure_future(pool.get())
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait([getting, lost], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if getting.done():
                pool.put_nowait(getting.result())
            raise
        finally:
            lost.cancel()
            getting.cancel()
        if not getting.done():
            raise AdapterGone(f"{self.path}: the adapter was lost")
        return getting.result()

    @contextlib.asynccontextmanager
    async def _borrowed(self, *, more: bool = False) -> AsyncIterator[_AdapterConnection]:
        """Context manager: yield a free connection; with `more`, a connection for text generation, which is opened if
        none is free. Raises AdapterGone.
        """
        if not self.connected:
            raise AdapterGone(f"{self.path}: the adapter is not connected")
        pool = self._more if more else self._idle
        if more and pool.empty():
            connection = await _connect(self.path)
            if pool is not self._more or not self.connected:
                connection.close()
                raise AdapterGone(f"{self.path}: the adapter was lost")
            self._all.append(connection)
        else:
            connection = await self._next(pool) if pool.empty() else pool.get_nowait()
        try:
            yield connection
        except AdapterGone:
            self._lost.set()
            raise
        except BaseException:
            # the request was interrupted, so its late reply would be taken for the reply to the next request
            connection.close()
            self._given_up = True
            self._lost.set()
            raise
        pool.put_nowait(connection)

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        """Load a model, without a time limit. Raises AdapterGone, or the SIEError of a failed load."""
        return await self._load(question, ipc.Ready)

    async def relieve(self, may_drop: tuple[str, ...]) -> None:
        """Let the adapter evict some of these models, in this order, until its memory is below the threshold. This may
        take longer than CONTROL_TIMEOUT_S, so it does not use the control connection. Raises AdapterGone, SIEError.
        """
        async with self._borrowed() as connection:
            self._unwrapped(await self._exchange(connection, ipc.Ping(may_drop)))

    async def ensure_lora(self, question: ipc.EnsureLora) -> str:
        """Load a LoRA and return the digest of its files. Raises AdapterGone, or the SIEError of a failed load."""
        return (await self._load(question, ipc.Done)).digest

    async def _load(self, question: ipc.EnsureReady | ipc.EnsureLora, kind: type[_R]) -> _R:
        async with self._loads, self._borrowed() as connection:
            answer = await self._exchange(connection, question)
        reply = self._unwrapped(answer)
        if not isinstance(reply, kind):
            raise AdapterGone(f"{self.path}: the reply to {type(question).__name__} is {type(reply).__name__}")
        return reply

    async def run_batch(
        self, batch: ipc.RunBatch, on_started: Callable[[], None], abandoned: asyncio.Event | None = None
    ) -> ipc.BatchDone:
        """Run one batch and return its result. `on_started` is called when the device begins the batch. `abandoned`:
        only for a batch that generates text; the event is set when no request waits for the text any more. Raises
        AdapterGone, SIEError. A batch of more than MAX_REQUEST_BYTES is refused before it is sent, because the adapter
        would close the connection, and all batches at the adapter would be lost.
        """
        if may_drop := self._may_drop():
            batch = msgspec.structs.replace(batch, may_drop=may_drop)
        try:
            frame = ipc.frame(batch, ipc.MAX_REQUEST_BYTES)
        except ipc.FrameError as error:
            raise PayloadTooLarge(
                f"the input is too large to run: {error}", extras={"limit": ipc.MAX_REQUEST_BYTES}
            ) from error
        async with self._borrowed(more=abandoned is not None) as connection:
            await connection.send(frame)
            cancelling = asyncio.create_task(_cancel_when(abandoned, connection)) if abandoned is not None else None
            try:
                answer = await connection.receive()
                if isinstance(answer, ipc.BatchStarted):
                    on_started()
                    answer = await connection.receive()
            finally:
                if cancelling is not None:
                    cancelling.cancel()
                    await asyncio.wait([cancelling])
        reply = self._unwrapped(answer)
        if not isinstance(reply, ipc.BatchDone):
            raise AdapterGone(f"{self.path}: the reply to a batch is {type(reply).__name__}")
        return reply

    def _unwrapped(self, answer: ipc.Reply) -> ipc.Reply:
        """Report the models that a reply names as evicted, and return the reply. Raises SIEError for a refusal."""
        if isinstance(answer, (ipc.Pong, ipc.Ready, ipc.BatchDone, ipc.Refused)) and answer.dropped:
            self._dropped(answer.dropped)
        if isinstance(answer, ipc.Refused):
            raise SIEError.from_info(answer.error)
        return answer


class AdapterLinks:
    """Links to the adapters of one worker; the index of a link is the number of its device. The first adapter reports
    the number of devices. Links are never removed: while an adapter is lost, its device is not used.
    """

    def __init__(self, path: str, *, size: int | Callable[[int], int], ping_s: float, stale_s: float) -> None:
        """Create the link to the first adapter at the socket `path`. The other arguments are used for every link."""
        self._path = path
        self._new_link = functools.partial(AdapterLink, size=size, ping_s=ping_s, stale_s=stale_s)
        self._on_new: list[Callable[[AdapterLink], object]] = []
        self._all: list[AdapterLink] = []
        self._add()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[AdapterLink]:
        return iter(self._all)

    def __getitem__(self, number: int) -> AdapterLink:
        return self._all[number]

    def for_every(self, use: Callable[[AdapterLink], object]) -> None:
        """Call `use` with each link: now with the existing links, and later with each new link before it connects."""
        self._on_new.append(use)
        for link in self._all:
            use(link)

    def _add(self) -> AdapterLink:
        number = len(self._all)
        link = self._new_link(ipc.device_socket(self._path, number), number=number)
        self._all.append(link)
        for use in self._on_new:
            use(link)
        return link

    @property
    def connected(self) -> bool:
        return any(link.connected for link in self._all)

    def is_fresh(self) -> bool:
        """Return True if an adapter has replied to a ping recently. One adapter is enough, because its device takes
        over the work of the other devices.
        """
        return any(link.is_fresh() for link in self._all)

    async def wait_connected(self) -> None:
        waits = [asyncio.create_task(link.wait_connected()) for link in self._all]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_all_connected(self, within_s: float) -> None:
        """Wait until all adapters are connected, but at most `within_s` seconds after the first adapter connected."""
        await self._all[0].wait_connected()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(link.wait_connected() for link in self._all))

    async def run(self, stop: Stop) -> None:
        """Keep all links connected until cancelled, or until `stop` is set while no adapter is connected."""
        async with asyncio.TaskGroup() as running:

            def grow(_connected: bool) -> None:
                description = self._all[0].description
                while description is not None and len(self._all) < description.devices:
                    link = self._add()
                    running.create_task(link.run(stop), name=f"adapter link {link.number}")

            self._all[0].listeners.append(grow)
            await self._all[0].run(stop)
