"""Driver that runs plans (see `core`) in asyncio tasks: executes HTTP requests, pauses and concurrent steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import httpx

from sie_client import transport
from sie_client.core import Answer, BlockingWork, BodySink, Pause, Plan, Send, Session, Together, UploadStream
from sie_client.progress import Meter

T = TypeVar("T")


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskDriver:
    """Driver of plans (generators of requests) for the server at `url`, used by one event loop."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url
        self._session = session
        self.has_answered = False
        self._http = httpx.AsyncClient(**transport.options(url, session, httpx.AsyncHTTPTransport))

    async def close(self) -> None:
        await self._http.aclose()

    async def run(
        self,
        plan: Plan[T],
        params: Mapping[str, Any] | None = None,
        total: int | None = 0,
        send: Callable[[Send], Awaitable[Answer]] | None = None,
    ) -> T:
        """Run a plan and return its result. `total`: number of items of the call. `send`: function that is called with
        each request in place of an HTTP exchange.
        """
        with Meter(self._session.for_call(params or {})[0], total, address=transport.public(self.url)) as meter:
            return await self._drive(plan, meter, send or self._send)

    def start(self, plan: Plan[Any]) -> Callable[[float], Awaitable[None]]:
        """Run a plan in the background. Return a function `end(timeout_s)`, which stops the plan and waits at most
        `timeout_s` seconds for its end.
        """
        meter = Meter(self._session, address=transport.public(self.url))
        running = asyncio.create_task(self._drive(plan, meter, self._send), name="sie-sdk")

        async def end(timeout_s: float) -> None:
            running.cancel()
            done, _ = await asyncio.wait([running], timeout=timeout_s)
            for ended in done:
                transport.log_of_background(None if ended.cancelled() else ended.exception())

        return end

    async def _drive(self, plan: Plan[T], meter: Meter, send: Callable[[Send], Awaitable[Answer]]) -> T:
        """Execute the steps of a plan and return its result. If a step fails, the plan is closed, so that the plan can
        remove incomplete files.
        """
        reply: Any = None
        with contextlib.closing(plan):
            while True:
                try:
                    step = plan.send(reply)
                except StopIteration as end:
                    return cast(T, end.value)
                reply = None
                if isinstance(step, Send):
                    reply = await send(step)
                elif isinstance(step, BlockingWork):
                    reply = await asyncio.to_thread(step.function)
                elif isinstance(step, Together):
                    reply = await self._together(step, meter, send)
                else:
                    meter.update(step)
                    if isinstance(step, Pause):
                        await asyncio.sleep(step.seconds)

    async def _together(self, step: Together, meter: Meter, send: Callable[[Send], Awaitable[Answer]]) -> list[Any]:
        numbered, lock = enumerate(step.plans), asyncio.Lock()
        results: dict[int, Any] = {}

        async def work() -> None:
            while True:
                async with lock:
                    entry = await asyncio.to_thread(next, numbered, None)
                if entry is None:
                    return
                results[entry[0]] = await self._drive(entry[1], meter, send)

        workers = [asyncio.create_task(work(), name="sie-sdk") for _ in range(step.concurrency)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            await _end(*workers)
        return [results[number] for number in range(len(results))]

    async def _send(self, request: Send) -> Answer:
        self._session.hedges.sent()
        if request.hedge_after_s is None:
            return await self._exchange(request)
        copies = [asyncio.create_task(self._exchange(request), name="sie-sdk")]
        try:
            done, running = await asyncio.wait(copies, timeout=request.hedge_after_s)
            if not done and self._session.hedges.acquire():
                copies.append(asyncio.create_task(self._exchange(request), name="sie-sdk"))
                running = set(copies)
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if transport.is_good(transport.best(copy.result() for copy in done)):
                    break
            return transport.best(copy.result() for copy in done)
        finally:
            await _end(*copies)

    async def _exchange(self, request: Send) -> Answer:
        started_s = time.monotonic()
        try:
            async with contextlib.AsyncExitStack() as stack:
                content: Any = request.body or None
                if isinstance(request.body, UploadStream):
                    content = await stack.enter_async_context(contextlib.aclosing(_in_threads(request.body.pieces())))
                response = await stack.enter_async_context(
                    self._http.stream(
                        request.method,
                        self.url + request.path,
                        headers=transport.sent_headers(request),
                        content=content,
                        timeout=transport.timeout(request),
                    )
                )
                sink = transport.sink_of(request, response)
                body = await response.aread() if sink is None else await _sunk(sink, response)
        except transport.BodyFailed as failure:
            raise failure.error from failure.error.__cause__
        except transport.FAILURES as error:
            return transport.failed(error, started_s, self.url, has_answered=self.has_answered)
        self.has_answered = True
        return transport.received(response, started_s, body)


async def _in_threads(pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the pieces of an iterator, each read in a thread, so that the event loop is not blocked. The iterator is
    not closed if this generator is cancelled, because a thread may still be reading from it.
    """
    while True:
        with transport.body_code():
            piece = await asyncio.to_thread(next, pieces, None)
        if piece is None:
            return
        yield piece


async def _sunk(sink: BodySink, response: httpx.Response) -> bytes:
    with transport.body_code():
        await asyncio.to_thread(sink.begin)
    async for piece in response.aiter_bytes(transport.PIECE_BYTES):
        with transport.body_code():
            await asyncio.to_thread(sink.write, piece)
    return b""
