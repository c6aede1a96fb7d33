"""Driver that runs plans (see `core`) in threads: executes HTTP requests, pauses and concurrent steps."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, TypeAlias, TypeVar, cast

import httpx

from sie_client import transport
from sie_client.core import Answer, BlockingWork, BodySink, Pause, Plan, Send, Session, Together, UploadStream
from sie_client.progress import Meter

T = TypeVar("T")
Sender: TypeAlias = "Callable[[Send, threading.Event], Answer]"

# Guards the state of all drivers. No thread has the lock while it waits for a response. `os.fork` waits for the lock,
# because a child process that inherits a locked lock could never acquire it.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _spawn(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread, and return its future. An exit of the interpreter does not wait for the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  `Future.result` raises it again
            future.set_exception(error)

    threading.Thread(target=run, name="sie-sdk", daemon=True).start()
    return future


class ThreadDriver:
    """Driver of plans for the server at `url`. Thread-safe."""

    def __init__(self, url: str, session: Session) -> None:
        self.url = url
        self._session = session
        self.has_answered = False
        self._is_closed = False
        self._open()

    def _open(self) -> None:
        self._http = httpx.Client(**transport.options(self.url, self._session, httpx.HTTPTransport))
        self._in_flight = 0
        self._process = os.getpid()

    def close(self) -> None:
        """Refuse new requests and close the connections. If other threads have running requests, the last of these
        requests closes the connections: an earlier close would leak a connection that httpx is opening.
        """
        with _lock:
            self._is_closed = True
            is_unused = not self._in_flight
        if is_unused:
            self._http.close()

    @contextlib.contextmanager
    def _connections(self) -> Iterator[httpx.Client]:
        """Yield the HTTP client for one request. Raises RuntimeError if the driver is closed. A forked process opens
        new connections: on shared connections, parent and child could receive each other's responses.
        """
        with _lock:
            if self._process != os.getpid():
                self._open()
            if self._is_closed:
                raise RuntimeError("this client was closed: create a new one")
            self._in_flight += 1
        try:
            yield self._http
        finally:
            with _lock:
                self._in_flight -= 1
                is_last = self._is_closed and not self._in_flight
            if is_last:
                self._http.close()

    def run(
        self,
        plan: Plan[T],
        params: Mapping[str, Any] | None = None,
        total: int | None = 0,
        send: Callable[[Send], Answer] | None = None,
    ) -> T:
        """Run a plan and return its result. `total`: number of items of the call. `send`: function that is called with
        each request in place of an HTTP exchange.
        """
        with Meter(self._session.for_call(params or {})[0], total, address=transport.public(self.url)) as meter:
            own = (lambda request, _stop: send(request)) if send else self._send
            return self._drive(plan, meter, threading.Event(), own)

    def start(self, plan: Plan[Any]) -> Callable[[float], None]:
        """Run a plan in the background. Return a function `end(timeout_s)`, which stops the plan and waits at most
        `timeout_s` seconds for its end.
        """
        stop = threading.Event()
        running = _spawn(
            lambda: self._drive(plan, Meter(self._session, address=transport.public(self.url)), stop, self._send)
        )

        def end(timeout_s: float) -> None:
            stop.set()
            for ended in wait([running], timeout_s).done:
                transport.log_of_background(ended.exception())

        return end

    def _drive(self, plan: Plan[T], meter: Meter, stop: threading.Event, send: Sender) -> T:
        """Execute the steps of a plan and return its result. If `stop` is set, raises Ended before a step, at a pause
        or during a download. If a step fails, the plan is closed, so that the plan can remove incomplete files.
        """
        reply: Any = None
        with contextlib.closing(plan):
            while True:
                try:
                    step = plan.send(reply)
                except StopIteration as end:
                    return cast(T, end.value)
                reply = None
                if stop.is_set():
                    raise transport.Ended
                if isinstance(step, Send):
                    reply = send(step, stop)
                elif isinstance(step, BlockingWork):
                    reply = step.function()
                elif isinstance(step, Together):
                    reply = self._together(step, meter, send)
                else:
                    meter.update(step)
                    if isinstance(step, Pause) and stop.wait(step.seconds):
                        raise transport.Ended

    def _together(self, step: Together, meter: Meter, send: Sender) -> list[Any]:
        numbered, lock, stop = enumerate(step.plans), threading.Lock(), threading.Event()
        results: dict[int, Any] = {}

        def work() -> None:
            while not stop.is_set():
                with lock:
                    entry = next(numbered, None)
                if entry is None:
                    return
                results[entry[0]] = self._drive(entry[1], meter, stop, send)

        workers: list[Future[None]] = []
        try:
            workers.extend(_spawn(work) for _ in range(step.concurrency))
            for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
                worker.result()
        finally:
            stop.set()
        return [results[number] for number in range(len(results))]

    def _send(self, request: Send, stop: threading.Event) -> Answer:
        self._session.hedges.sent()
        if request.hedge_after_s is None:
            return self._exchange(request, stop)
        copies = {_spawn(lambda: self._exchange(request, stop))}
        if not wait(copies, request.hedge_after_s).done and self._session.hedges.acquire():
            copies.add(_spawn(lambda: self._exchange(request, stop)))
        while True:
            done, copies = wait(copies, return_when=FIRST_COMPLETED)
            answer = transport.best(copy.result() for copy in done)
            if not copies or transport.is_good(answer):
                return answer

    def _exchange(self, request: Send, stop: threading.Event) -> Answer:
        started_s = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                content: Any = request.body or None
                if isinstance(request.body, UploadStream):
                    content = stack.enter_context(contextlib.closing(_guarded(request.body.pieces())))
                response = stack.enter_context(
                    stack.enter_context(self._connections()).stream(
                        request.method,
                        self.url + request.path,
                        headers=transport.sent_headers(request),
                        content=content,
                        timeout=transport.timeout(request),
                    )
                )
                sink = transport.sink_of(request, response)
                body = response.read() if sink is None else _sunk(sink, response, stop)
        except transport.BodyFailed as failure:
            raise failure.error from failure.error.__cause__
        except transport.FAILURES as error:
            return transport.failed(error, started_s, self.url, has_answered=self.has_answered)
        self.has_answered = True
        return transport.received(response, started_s, body)


def _guarded(pieces: Generator[bytes]) -> Generator[bytes]:
    with transport.body_code():
        yield from pieces


def _sunk(sink: BodySink, response: httpx.Response, stop: threading.Event) -> bytes:
    with transport.body_code():
        sink.begin()
    for piece in response.iter_bytes(transport.PIECE_BYTES):
        if stop.is_set():
            raise transport.Ended
        with transport.body_code():
            sink.write(piece)
    return b""
