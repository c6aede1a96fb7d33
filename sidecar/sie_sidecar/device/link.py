"""The connection to the adapter: a pool for batches and loads, one more for short questions, and the ping that decides
readiness.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from sie_contracts.errors import PayloadTooLarge, SIEError
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import Fetched
from sie_runtime.process import START_S, Stop, Trouble

CONTROL_TIMEOUT_S = 5.0
CONNECT_PAUSE_S = 0.05
_logger = logging.getLogger("sie.sidecar.link")


class AdapterGone(Exception):
    """The adapter closed the connection or does not listen. What was sent may have run, and did not answer.

    `died`: it was the adapter that closed. False when we gave up on a frozen one, which proves nothing about the work
    it had.
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
        if self._writer.is_closing():  # it was reset: a write would be uvloop's RuntimeError
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
        self._writer.close()


@contextlib.asynccontextmanager
async def _cancelled_when(abandoned: asyncio.Event | None, connection: _AdapterConnection) -> AsyncIterator[None]:
    """Within: the batch on this connection is cancelled once `gone` is set. It is answered all the same."""
    if abandoned is None:
        yield
        return

    async def cancel() -> None:
        await abandoned.wait()
        with contextlib.suppress(AdapterGone):  # whoever waits for the answer learns of it
            await connection.send(ipc.frame(ipc.Cancel()))

    cancelling = asyncio.create_task(cancel())
    try:
        yield
    finally:
        cancelling.cancel()
        await asyncio.wait([cancelling])


async def _connect(path: str) -> _AdapterConnection:
    try:
        return _AdapterConnection(*await asyncio.open_unix_connection(path, limit=1 << 20))
    except OSError as error:
        raise AdapterGone(f"{path}: {error.strerror or error}") from error


class AdapterLink:
    """All connections to one adapter. A lost one loses all: residency is gone with the process, and `on_change(False)`
    says so once.
    """

    def __init__(
        self, path: str, *, size: int | Callable[[int], int], ping_s: float, stale_s: float, clock: Callable[[], float]
    ) -> None:
        """`size`: connections for batches, or how many by the lanes of the device."""
        self.path = path
        self.description: ipc.Description | None = None
        self.fetching: dict[str, Fetched] = {}  # how far weights are that come to this node, by the id of their entry
        self._size_of = size if callable(size) else lambda _: size
        self._ping_s = ping_s
        self._stale_s = stale_s
        self._clock = clock
        self._idle: asyncio.LifoQueue[_AdapterConnection] = asyncio.LifoQueue()
        self._more: asyncio.LifoQueue[_AdapterConnection] = asyncio.LifoQueue()  # for batches that hold no lane
        self._all: list[_AdapterConnection] = []
        self._control: _AdapterConnection | None = None
        self._control_lock = asyncio.Lock()  # one question at a time
        self._loads = asyncio.Semaphore(1)
        self._lost = asyncio.Event()
        self._given_up = False  # it was we who ended it: nothing is known of what it had
        self._last_pong_s = -1e9
        self._up = asyncio.Event()
        self.listeners: list[Callable[[bool], None]] = []
        self._may_drop: Callable[[], tuple[str, ...]] = tuple
        self._dropped: Callable[[tuple[str, ...]], None] = lambda names: None

    def attach(self, may_drop: Callable[[], tuple[str, ...]], dropped: Callable[[tuple[str, ...]], None]) -> None:
        """`may_drop` returns the models that a batch which is sent now may unload, the first one first; `dropped` is
        called with the models that a reply names as unloaded.
        """
        self._may_drop, self._dropped = may_drop, dropped

    @property
    def connected(self) -> bool:
        return self._control is not None

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def describe(self) -> ipc.Description | None:
        """Ask the adapter for its description and keep it in `description`; None if the reply is of another type.
        Raises AdapterGone, SIEError.
        """
        answer = await self.ask(ipc.Describe())
        if not isinstance(answer, ipc.Description):
            return None
        self.description = answer
        return answer

    def is_fresh(self) -> bool:
        """Whether the adapter has answered a ping in time."""
        return self._clock() - self._last_pong_s < self._stale_s

    async def run(self, stop: Stop) -> None:
        """Connect, ping, reconnect, until cancelled. The path is named once for each time the adapter is away."""
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
            self._tell(True)
            try:
                await self._ping_until_lost()
            finally:
                self._close()
            self._tell(False)
            _logger.warning("the adapter is gone")

    def _tell(self, connected: bool) -> None:
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
            if not isinstance(description, ipc.Description) or description.protocol != ipc.PROTOCOL:
                raise AdapterGone(f"{self.path}: another protocol, this sidecar speaks {ipc.PROTOCOL}")
            size = self._size_of(description.lanes)
            while len(opened) <= size:
                opened.append(await _connect(self.path))
        except BaseException as error:
            for connection in opened:
                connection.close()
            if isinstance(error, TimeoutError):
                raise AdapterGone(f"{self.path}: no answer in {CONTROL_TIMEOUT_S} s") from error
            raise
        connections = opened[1:]
        self._lost.clear()
        self._given_up = False
        self._control, self._all, self.description = control, connections, description
        self._idle, self._more = asyncio.LifoQueue(), asyncio.LifoQueue()
        self._loads = asyncio.Semaphore(max(1, size - 1))  # one connection is always left to batches
        for connection in connections:
            self._idle.put_nowait(connection)
        self._last_pong_s = self._clock()
        self._up.set()

    def _close(self) -> None:
        """Close all connections. Whoever noticed first that the adapter died, its batches died with it."""
        self._up.clear()
        for connection in [*self._all, *([self._control] if self._control else [])]:
            connection.close(given_up=self._given_up)
        self._control, self._all = None, []

    async def _ping_until_lost(self) -> None:
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ping_s):
                    await self._lost.wait()
                return
            try:
                pong = await self.ask(ipc.Ping())
            except AdapterGone:
                return
            if isinstance(pong, ipc.Pong):
                self._last_pong_s = self._clock()
                self.fetching = pong.fetching

    async def ask(self, question: ipc.Request) -> ipc.Reply:
        """A short question on the control connection. Raises AdapterGone, SIEError."""
        async with self._control_lock:
            control = self._control
            if control is None:
                raise AdapterGone(f"{self.path}: not connected")
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    answer = await self._exchange(control, question)
            except BaseException as error:
                self._given_up = self._given_up or not isinstance(error, AdapterGone)
                self._lost.set()  # given up in the middle of a frame, perhaps: what comes next could not be read
                if isinstance(error, TimeoutError):
                    raise AdapterGone(f"{self.path}: no answer in {CONTROL_TIMEOUT_S} s") from error
                raise
            return self._unwrapped(answer)

    @staticmethod
    async def _exchange(connection: _AdapterConnection, question: ipc.Request) -> ipc.Reply:
        await connection.send(ipc.frame(question))
        return await connection.receive()

    async def _next(self, pool: asyncio.LifoQueue[_AdapterConnection]) -> _AdapterConnection:
        """A connection that comes back, unless the adapter goes away first."""
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
            raise AdapterGone(f"{self.path}: lost", died=False)
        return getting.result()

    @contextlib.asynccontextmanager
    async def _borrowed(self, *, more: bool = False) -> AsyncIterator[_AdapterConnection]:
        """A connection that comes back. `more`: one beside those for batches, opened if need be; whoever asks bounds
        their number.
        """
        if not self.connected:
            raise AdapterGone(f"{self.path}: not connected")
        pool = self._more if more else self._idle
        if more and pool.empty():
            connection = await _connect(self.path)
            self._all.append(connection)
        else:
            connection = await self._next(pool) if pool.empty() else pool.get_nowait()
        try:
            yield connection
        except AdapterGone:
            self._lost.set()
            raise
        except BaseException:
            connection.close()  # an answer may still arrive on it
            self._given_up = True
            self._lost.set()
            raise
        pool.put_nowait(connection)

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        """Load a model, however long that takes. Raises AdapterGone, or the SIEError of a failed load."""
        async with self._loads, self._borrowed() as connection:
            answer = await self._exchange(connection, question)
        ready = self._unwrapped(answer)
        if not isinstance(ready, ipc.Ready):
            raise AdapterGone(f"{self.path}: answered EnsureReady with {type(ready).__name__}")
        return ready

    async def relieve(self, may_drop: tuple[str, ...]) -> None:
        """Let the adapter unload these models, the first one first, while memory is above its threshold. Raises
        AdapterGone, SIEError.

        Not on the control connection: giving much memory back takes longer than a short question may.
        """
        async with self._borrowed() as connection:
            self._unwrapped(await self._exchange(connection, ipc.Ping(may_drop)))

    async def ensure_lora(self, question: ipc.EnsureLora) -> str:
        """Load a LoRA; returns the digest of its files. Raises AdapterGone, or the SIEError of a failed load."""
        async with self._loads, self._borrowed() as connection:
            answer = await self._exchange(connection, question)
        done = self._unwrapped(answer)
        if not isinstance(done, ipc.Done):
            raise AdapterGone(f"{self.path}: answered EnsureLora with {type(done).__name__}")
        return done.digest

    async def run_batch(
        self, batch: ipc.RunBatch, on_started: Callable[[], None], abandoned: asyncio.Event | None = None
    ) -> ipc.BatchDone:
        """Run one batch; `on_started` is called when the device takes it. Raises AdapterGone, or the SIEError of a
        refused batch. Of a batch that is written `gone` is set when nobody waits for it any more.

        A batch that the adapter would not read is refused here: it would end the connection, and with it everybody's.
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
            async with _cancelled_when(abandoned, connection):
                answer = await connection.receive()
                if isinstance(answer, ipc.BatchStarted):
                    on_started()
                    answer = await connection.receive()
        done = self._unwrapped(answer)
        if not isinstance(done, ipc.BatchDone):
            raise AdapterGone(f"{self.path}: answered RunBatch with {type(done).__name__}")
        return done

    def _unwrapped(self, answer: ipc.Reply) -> ipc.Reply:
        """The answer, once the models that it names as unloaded are known. Raises the SIEError of a refusal."""
        if isinstance(answer, (ipc.Pong, ipc.Ready, ipc.BatchDone, ipc.Refused)) and answer.dropped:
            self._dropped(answer.dropped)
        if isinstance(answer, ipc.Refused):
            raise SIEError.from_info(answer.error)
        return answer
