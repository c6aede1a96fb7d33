"""A load generator that takes little processor time: requests are prebuilt, and bodies of replies are not parsed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection with one request in progress. `head`: status line and headers of the last
    response, in lower case. `unasked`: number of bytes that the server sent while no request was in progress.
    """

    def __init__(self) -> None:
        self.head = b""
        self.unasked = 0
        self._buffer = bytearray()
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.unasked += len(data)
            return
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._buffer[:head_end]).lower()
        start = head.index(b"content-length:") + 15
        length = int(head[start : head.find(b"\r\n", start) if b"\r\n" in head[start:] else len(head)])
        end = head_end + 4 + length
        if len(self._buffer) >= end:
            body = bytes(self._buffer[head_end + 4 : end])
            self.head, self.unasked = head, self.unasked + len(self._buffer) - end
            self._buffer.clear()
            self._done.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body. Raise ConnectionError if the server closes the connection."""
        if self._transport is None:
            raise ConnectionError("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def headers(self) -> dict[str, str]:
        pairs = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        return {name.decode(): value.strip().decode("latin-1") for name, _, value in pairs}

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(host: str, port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return protocol


def request(path: str, body: bytes, content_type: str = "application/msgpack", **headers: str) -> bytes:
    """Return the bytes of a request. Underscores in the names of headers become hyphens."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {content_type}", f"accept: {content_type}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def closed_loop(
    host: str, port: int, requests: Sequence[bytes], *, clients: int, seconds: float
) -> tuple[int, float, list[float]]:
    """Run clients, each of which sends its next request when its last one is answered. Return the number of answers,
    the seconds of the run, and the latencies in seconds. Raise RuntimeError if a status is not 200, ConnectionError if
    the server closes a connection.
    """
    latencies: list[float] = []
    end_s = time.perf_counter() + seconds
    turn = 0

    async def client() -> None:
        nonlocal turn
        connection = await connect(host, port)
        while time.perf_counter() < end_s:
            turn += 1
            started_s = time.perf_counter()
            status, body = await connection.send(requests[turn % len(requests)])
            latencies.append(time.perf_counter() - started_s)
            if status != 200:
                raise RuntimeError(f"a reply has status {status}, not 200: {body[:200]!r}")
        connection.close()

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(latencies), time.perf_counter() - started_s, latencies


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. Times are of `time.perf_counter`. Status 0: the connection failed."""

    started_s: float
    ended_s: float
    status: int
    body: bytes = b""

    @property
    def taken_s(self) -> float:
        return self.ended_s - self.started_s


def statuses(answers: Sequence[Answer]) -> str:
    """Return the number of answers with each status, such as `3 x 503, 1 x 0`."""
    counts = Counter(answer.status for answer in answers)
    return ", ".join(f"{count} x {status}" for status, count in counts.most_common())


class Clients:
    """Clients of one server. Until `stop`, each sends its next request when its last one is answered. `answers`
    includes failures.
    """

    def __init__(self, host: str, port: int, requests: Iterator[bytes], *, count: int) -> None:
        self.answers: list[Answer] = []
        self._requests = requests
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client(host, port)) for _ in range(count)]

    async def _client(self, host: str, port: int) -> None:
        connection = await connect(host, port)
        while not self._stopping.is_set():
            if not connection.is_open:
                connection = await connect(host, port)
            self.answers.append(await _timed(connection, next(self._requests)))
        connection.close()

    async def stop(self) -> list[Answer]:
        """Stop sending, wait for the answers to the requests in progress, and return all answers."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        return self.answers


async def open_loop(host: str, port: int, message: bytes, *, each_s: float, seconds: float) -> list[Answer]:
    """Send a request every `each_s` seconds on a new connection, without waiting for answers. Return all answers."""

    async def one(after_s: float) -> Answer:
        await asyncio.sleep(after_s)
        connection = await connect(host, port)
        answer = await _timed(connection, message)
        connection.close()
        return answer

    return await asyncio.gather(*(one(number * each_s) for number in range(int(seconds / each_s))))


async def _timed(connection: Connection, message: bytes) -> Answer:
    started_s = time.perf_counter()
    try:
        status, body = await connection.send(message)
    except ConnectionError as error:
        return Answer(started_s, time.perf_counter(), 0, str(error).encode())
    return Answer(started_s, time.perf_counter(), status, body)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies, or 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0
