"""Load generator for a source. In a closed loop, each client waits for its answer before it sends again. In an open
loop, the generator sends requests at a fixed mean rate, and does not wait for answers.

    requests ──► closed: N clients, or open: arrivals of a Poisson process ──► send ──► SentRequest

A closed loop slows down with the source: clients that wait during a stall send nothing, so at most N requests measure
the stall. In an open loop, the latency of a request counts from its due time, so all requests that are due during a
stall measure the stall (Tene 2013, "How NOT to Measure Latency": coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sie_client import SIEAsyncClient
from sie_client.errors import SIEError
from sie_contracts.settings import Secret

PATIENCE_S = 60.0  # seconds to wait for an answer; then the request has the code NO_ANSWER
# limit for the requests in flight of an open loop; at this limit, a due request is not sent and gets the code NOT_SENT
MAX_IN_FLIGHT = 4096
AFTER_FAILURE_S = 0.05  # seconds that a client of a closed loop waits after a failure
NOBODY = "CONNECTION"  # code of a request whose connection failed
NO_ANSWER = "NO_ANSWER"
NOT_SENT = "NOT_SENT"


@dataclass(frozen=True)
class LoadRequest:
    """Request to a source. A source of vectors encodes `texts`; a source of scores scores `texts` for `query`."""

    texts: Sequence[str]
    query: str = ""


@dataclass(frozen=True)
class LoadReply:
    """Answer to a request. `tokens`: number of tokens of its texts; None if the answer does not contain this number.
    `stages`: milliseconds by stage.
    """

    tokens: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)


class LoadFailure(Exception):
    """Raised for a failed request. `code`: the server's code, an HTTP status, NOBODY if the connection failed, or
    NOT_UNDERSTOOD if the body of the response is invalid.
    """

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.code = code


Send = Callable[[LoadRequest], Awaitable[LoadReply]]


@dataclass(frozen=True)
class SentRequest:
    """Outcome of one request. Times are seconds of `time.perf_counter`. `code`: error code; empty after an answer."""

    due_s: float
    ended_s: float
    items: int
    code: str = ""
    answer: LoadReply = LoadReply()

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.due_s


@dataclass(frozen=True)
class LoadLevel:
    """Level of load: either a number of clients (closed loop) or a rate in requests per second (open loop)."""

    clients: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"clients={self.clients}" if self.clients else f"rate={self.rate:g}"

    async def run(self, send: Send, requests: Iterator[LoadRequest], end_s: float) -> list[SentRequest]:
        """Send requests in order until `end_s`, then wait for the requests in flight. With a rate, the random times
        between two requests are the same in each run.
        """
        if self.clients:
            return await _closed(send, requests, self.clients, end_s)
        return await _open(send, requests, self.rate, end_s)


async def _closed(send: Send, requests: Iterator[LoadRequest], clients: int, end_s: float) -> list[SentRequest]:
    calls: list[SentRequest] = []

    async def client() -> None:
        while (now_s := time.perf_counter()) < end_s:
            call = await _sent_once(send, next(requests), now_s)
            calls.append(call)
            if call.code:
                await asyncio.sleep(AFTER_FAILURE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return calls


async def _open(send: Send, requests: Iterator[LoadRequest], rate: float, end_s: float) -> list[SentRequest]:
    calls: list[SentRequest] = []
    under_way: set[asyncio.Task[None]] = set()
    rng = np.random.default_rng(0)
    due_s = time.perf_counter()

    async def send_at(request: LoadRequest, due_s: float) -> None:
        calls.append(await _sent_once(send, request, due_s))

    async with asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.exponential(1 / rate)) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            request = next(requests)
            if len(under_way) >= MAX_IN_FLIGHT:
                calls.append(SentRequest(due_s, time.perf_counter(), len(request.texts), NOT_SENT))
                continue
            task = group.create_task(send_at(request, due_s))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    return calls


async def _sent_once(send: Send, request: LoadRequest, due_s: float) -> SentRequest:
    code, answer = NO_ANSWER, LoadReply()
    with contextlib.suppress(TimeoutError):
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await send(request)
            code = ""
        except LoadFailure as error:
            code = error.code
    return SentRequest(due_s, time.perf_counter(), len(request.texts), code, answer)


EVERY_S = 1.0
FRAME_S = 5.0  # seconds to wait for a status frame of the gateway


@dataclass(frozen=True)
class DeviceUsage:
    """Mean values of the workers' devices in the measured time; None if unknown. `busy_percent`: utilisation, by all
    processes, of a GPU or of all CPU cores. `joules`: energy that all GPUs of this machine used together.
    """

    name: str = ""
    busy_percent: float | None = None
    memory_bytes: int | None = None
    joules: float | None = None


class WorkerWatch:
    """Sampler of the use of the workers' devices. It reads status frames from the WebSocket of the gateway at `url`."""

    def __init__(self, url: str, token: Secret | None, *, is_local: bool) -> None:
        self._url, self._token, self._is_local = url, token, is_local

    async def run(self, start_s: float, end_s: float) -> DeviceUsage:
        """Sample from `start_s` to `end_s`, which are times of `time.perf_counter`. Return the usage in this time."""
        frames: list[dict[str, Any]] = []
        energy = Energy() if self._is_local else None
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        before = energy.joules() if energy else None
        token = self._token.reveal() if self._token else None
        async with SIEAsyncClient(self._url, api_key=token, wait_for_capacity=False) as client:
            while (now_s := time.perf_counter()) < end_s:
                # Open a new connection for each frame. On an open connection the gateway sends five frames per second
                # with all models of the catalogue, and this traffic would disturb the measurement.
                # A busy gateway may refuse a connection. Then only one frame is missing.
                with contextlib.suppress(SIEError, TimeoutError):
                    async with asyncio.timeout(FRAME_S), contextlib.aclosing(client.watch("/ws/status")) as messages:
                        frames.append(await anext(messages))
                await asyncio.sleep(max(0.0, min(now_s + EVERY_S, end_s) - time.perf_counter()))
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
        after = energy.joules() if energy else None
        used = after - before if after is not None and before is not None else None
        return _mean([device for frame in frames for device in frame["gpus"]], used)


class Energy:
    """Counter of the energy that the GPUs of this machine have used, read from NVML."""

    def __init__(self) -> None:
        self._handles: Sequence[Any] = ()
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):  # without a loaded driver, there is no energy to read
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]

    def joules(self) -> float | None:
        """Return the energy in joules; None if there is no GPU, or if a GPU (before Volta) has no energy counter."""
        try:
            counted = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        return sum(counted) / 1e3 if counted else None


def _mean(devices: Sequence[dict[str, Any]], joules: float | None) -> DeviceUsage:
    busy = [device["utilization_pct"] for device in devices if device["utilization_pct"] is not None]
    memory = [device["memory_used_bytes"] for device in devices if device["memory_used_bytes"]]
    return DeviceUsage(
        " ".join(dict.fromkeys(device["gpu_type"] for device in devices)),
        sum(busy) / len(busy) if busy else None,
        round(sum(memory) / len(memory)) if memory else None,
        joules,
    )
