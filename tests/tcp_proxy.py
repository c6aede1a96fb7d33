"""A TCP proxy for tests that can delay, hold, swallow or refuse bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType


class TcpProxy:
    """A proxy from a free loopback port to the loopback port `port`.

    `port` may be a function that returns the port of each connection, as a balancer does. If one side closes its
    sending direction, only that direction is closed at the other side.

    `delay_s` delays later bytes in both directions. `hold` holds bytes back, as a network with packet loss does for a
    while, and `release` lets them go on. `swallow` drops them, so connections with dropped bytes never work again.
    `cut` ends all connections.
    """

    def __init__(self, port: int | Callable[[], int]) -> None:
        self.delay_s = 0.0
        self.port = 0
        self._to = port if callable(port) else lambda: port
        self._open = asyncio.Event()
        self._open.set()
        self._swallowing = False
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def swallow(self) -> None:
        self._swallowing = True

    def refuse(self) -> None:
        """End all connections, and every new one at once."""
        self._refusing = True
        self.cut()

    def heal(self) -> None:
        """Forward again. After `swallow`, end all connections, because they lost bytes."""
        self.delay_s = 0.0
        self._refusing = False
        if self._swallowing:
            self._swallowing = False
            self.cut()
        self.release()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self._refusing:
                with contextlib.suppress(OSError):
                    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to())
                    self._writers.add(far_writer)
                    ways = [self._own(self._forward(reader, far_writer)), self._own(self._forward(far_reader, writer))]
                    await asyncio.wait(ways)
                    far_writer.transport.abort()
                    self._writers.discard(far_writer)
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    def _own(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()

        async def read() -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    due.append((loop.time() + self.delay_s, data))
                    arrived.set()

        reading = self._own(read())
        reading.add_done_callback(lambda _: arrived.set())
        try:
            while due or not reading.done():
                if not due:
                    arrived.clear()
                    await arrived.wait()
                    continue
                at_s, data = due.popleft()
                await asyncio.sleep(max(0.0, at_s - loop.time()))
                await self._open.wait()
                if not self._swallowing:
                    writer.write(data)
                    await writer.drain()
            if self._swallowing:
                writer.transport.abort()
            else:
                writer.write_eof()
        except OSError:
            writer.transport.abort()
        finally:
            reading.cancel()
