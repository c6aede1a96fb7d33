"""Both clients, driven by the same cases, over real sockets: concurrency, order, failures, hedges, reservations,
frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
import pytest
import websockets.sync.server as websocket_server
from websockets.exceptions import ConnectionClosed

import sie_client
from sie_client import SIEAsyncClient, SIEClient, cluster, core, threads, watching
from sie_client.threads import ThreadDriver
from sie_contracts import arrays

HANGING = 30.0  # seconds; only a step that hangs takes longer


class Server(ThreadingHTTPServer):
    """A server that answers encode with the number in each text, or as `special` says, and counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: list[tuple[str, str, Any]] = []
        self.running = self.most_running = 0
        self.changed = threading.Condition()
        self.connected = self.connections = 0  # all so far, and those open now
        self.keys: list[str | None] = []
        self.special: Callable[[str, str, Any, int], tuple[int, Any] | None] = lambda *_: None
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: clients that disconnect are part of these tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent apart: Nagle's algorithm would put up to 40 ms between them
    server: Server

    def setup(self) -> None:
        super().setup()
        self._count(1)

    def finish(self) -> None:
        super().finish()
        self._count(-1)

    def _count(self, change: int) -> None:
        server = self.server
        with server.changed:
            server.connections += change
            server.connected += max(change, 0)
            server.changed.notify_all()

    def answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        is_msgpack = "msgpack" in self.headers.get("content-type", "")
        body = (msgspec.msgpack.decode if is_msgpack else msgspec.json.decode)(raw) if raw else None
        server = self.server
        with server.lock:
            server.seen.append((self.command, self.path, body))
            server.keys.append(self.headers.get("authorization"))
            number = len(server.seen)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        try:
            status, reply = server.special(self.command, self.path, body, number) or (200, vectors(body["items"]))
        finally:
            with server.lock:
                server.running -= 1
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if status >= 400:
            self.send_header("x-should-retry", str(status >= 500).lower())
            self.send_header("retry-after", "1")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        """Write nothing to the test's output."""


def vectors(items: list[str]) -> bytes:
    slots = [
        {"dense": {"dims": 1, "dtype": "float32", "values": arrays.pack(np.array([float(item)], np.float32))}}
        for item in items
    ]
    usage = {"prompt_tokens": len(items), "total_tokens": len(items), "truncated_items": []}
    return msgspec.msgpack.encode({"model": "m", "timing": {}, "usage": usage, "fingerprint": "f", "items": slots})


def failure(code: str, message: str = "no") -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(params=["sync", "async"])
def using(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return `using(url, function, **options)`, which returns the result of `function(client)` of either client."""

    def sync(url: str | None, function: Callable[[Any], Any], **options: Any) -> Any:
        with SIEClient(url, **options) as client:
            return function(client)

    def asynchronous(url: str | None, function: Callable[[Any], Any], **options: Any) -> Any:
        async def run() -> Any:
            async with SIEAsyncClient(url, **options) as client:
                return await function(client)

        return asyncio.run(run())

    return sync if request.param == "sync" else asynchronous


TEXTS = [str(number) for number in range(100)]
TEN_A_PART = 20  # tokens: each of these texts counts as two


def test_parts_run_so_many_at_a_time_and_their_results_are_in_order(server: Server, using: Callable[..., Any]) -> None:
    """Ten parts run four at a time, some slower than others. The results are in the order of the texts."""
    together = threading.Barrier(4)

    def special(method: str, path: str, body: Any, number: int) -> None:
        if number <= 4:
            together.wait(HANGING)  # raises if four are never there at once
        time.sleep(0.02 if int(body["items"][0]) % 40 == 0 else 0.0)  # parts end in another order than they began

    server.special = special
    reports: list[sie_client.Progress] = []
    results = using(
        server.url,
        lambda client: client.encode("m", TEXTS, on_progress=reports.append),
        part_tokens=TEN_A_PART,
        concurrency=4,
    )
    assert [result["dense"].tolist() for result in results] == [[float(text)] for text in TEXTS]
    assert (server.most_running, len(server.seen)) == (4, 10)
    assert results.usage["total_tokens"] == 100
    assert [report.done for report in reports] == list(range(10, 101, 10))


def test_embed_reads_an_iterator_no_further_than_the_parts_under_way(server: Server, using: Callable[..., Any]) -> None:
    """The input has a million texts. When the first part is answered with an error, few have been read."""
    read = itertools.count()
    server.special = lambda *_: (400, failure("INVALID_INPUT"))
    texts = (str(next(read)) for _ in range(1_000_000))
    with pytest.raises(sie_client.InvalidInputError):
        using(server.url, lambda client: client.embed("m", texts), part_tokens=TEN_A_PART, concurrency=2)
    assert next(read) < 1000


@pytest.mark.parametrize("name", ["SIE_API_KEY", "SIE_AUTH_TOKEN"])
def test_a_client_without_an_address_or_a_key_takes_those_of_the_environment(
    name: str, server: Server, using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SIE_API_KEY", "SIE_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SIE_BASE_URL", server.url)
    monkeypatch.setenv(name, "key-of-the-environment")
    keys: list[str | None] = []
    server.keys = keys
    for options in ({}, {"api_key": "own"}, {"api_key": None}):
        using(None, lambda client: client.encode("m", ["1"]), **options)
    assert keys == ["Bearer key-of-the-environment", "Bearer own", None]


def test_the_first_part_that_fails_ends_the_call_and_nothing_more_is_sent(
    server: Server, using: Callable[..., Any]
) -> None:
    released = threading.Event()

    def special(method: str, path: str, body: Any, number: int) -> tuple[int, Any] | None:
        if "20" in body["items"]:
            return 400, failure("INVALID_INPUT", "items[0].text: no")
        released.wait(HANGING if number < 10 else 0)
        return None

    server.special = special
    started_s = time.monotonic()
    with pytest.raises(sie_client.InvalidInputError, match=r"items\[20\].text"):
        using(server.url, lambda client: client.encode("m", TEXTS), part_tokens=TEN_A_PART, concurrency=3)
    assert time.monotonic() - started_s < HANGING / 2, "what is still under way is not waited for"
    released.set()
    assert len(server.seen) <= 5, "one that was being taken at that moment may still go"


def test_a_part_that_is_not_answered_is_sent_again_and_the_first_answer_counts(
    server: Server, using: Callable[..., Any]
) -> None:
    released = threading.Event()

    def special(method: str, path: str, body: Any, number: int) -> None:
        if number == 1:
            released.wait(HANGING)

    server.special = special
    started_s = time.monotonic()
    result = using(server.url, lambda client: client.encode("m", "7", hedge_after_s=0.05))
    assert time.monotonic() - started_s < HANGING / 2
    released.set()
    assert result["dense"].tolist() == [7.0]
    assert [body for _, _, body in server.seen] == [{"items": ["7"], "params": {}}] * 2


POOL = {"name": "eval", "spec": {"gpus": {"l4": 1}}, "status": {"state": "active"}}


def pools(server: Server, lapsed: threading.Event | None = None) -> Callable[..., tuple[int, Any]]:
    def special(method: str, path: str, body: Any, number: int) -> tuple[int, Any]:
        if path.endswith("/renew"):
            if lapsed is not None and not lapsed.is_set():
                lapsed.set()
                return 404, failure("POOL_NOT_FOUND")
            return 200, {"message": "Pool renewed", "expires_at": None if "default" in path else 1.5}
        if method == "DELETE":
            return 200, {"message": "Pool deleted"}
        if method == "GET" and path == "/v1/pools":
            return 200, {"pools": [POOL]}
        return 201 if method == "POST" else 200, POOL

    return special


def test_pools_are_made_listed_renewed_and_deleted(server: Server, using: Callable[..., Any]) -> None:
    server.special = pools(server)
    assert using(server.url, lambda client: client.create_pool("eval", {"l4": 1}, ttl_seconds=60, bundle=None)) == POOL
    assert using(server.url, lambda client: client.list_pools()) == [POOL]
    assert using(server.url, lambda client: client.get_pool("eval")) == POOL
    assert using(server.url, lambda client: client.renew_pool("eval")) == 1.5
    assert using(server.url, lambda client: client.delete_pool("eval")) is None
    assert [(method, path) for method, path, _ in server.seen] == [
        ("POST", "/v1/pools"),
        ("GET", "/v1/pools"),
        ("GET", "/v1/pools/eval"),
        ("POST", "/v1/pools/eval/renew"),
        ("DELETE", "/v1/pools/eval"),
    ]
    assert server.seen[0][2] == {"name": "eval", "gpus": {"l4": 1}, "ttl_seconds": 60}
    assert using(server.url, lambda client: client.renew_pool("default")) == math.inf


def reserve(client: Any, enough: Callable[[], bool]) -> Any:
    """Hold a reservation until `enough()` is true."""

    def hold() -> Iterator[None]:
        end_s = time.monotonic() + HANGING
        while not enough():
            assert time.monotonic() < end_s
            yield

    if isinstance(client, SIEClient):
        with client.reserve("eval", {"l4": 1}, ttl_seconds=1):
            for _ in hold():
                time.sleep(0.005)
        return None

    async def held() -> None:
        async with client.reserve("eval", {"l4": 1}, ttl_seconds=1):
            for _ in hold():
                await asyncio.sleep(0.005)

    return held()


def test_a_reservation_is_renewed_while_it_is_held_and_deleted_at_the_end(
    server: Server, using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "RENEW_EVERY_S", 0.01)
    server.special = pools(server)
    using(server.url, lambda client: reserve(client, lambda: len(server.seen) >= 4))
    done = [(method, path) for method, path, _ in server.seen]
    assert done[0] == ("POST", "/v1/pools")
    assert done[1:4] == [("POST", "/v1/pools/eval/renew")] * 3
    assert done[-1] == ("DELETE", "/v1/pools/eval")


def test_a_reservation_whose_lease_lapsed_is_made_again(
    server: Server, using: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease lapses when a laptop sleeps, or when every gateway is away for longer than the lease."""
    monkeypatch.setattr(cluster, "RENEW_EVERY_S", 0.01)
    server.special = pools(server, lapsed := threading.Event())
    using(server.url, lambda client: reserve(client, lambda: lapsed.is_set() and len(server.seen) >= 4))
    bodies = [body for method, path, body in server.seen if (method, path) == ("POST", "/v1/pools")]
    assert bodies == [{"name": "eval", "gpus": {"l4": 1}, "ttl_seconds": 1}] * 2


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a websocket that breaks after two frames each time, and the tokens that it received."""
    monkeypatch.setattr(watching, "AGAIN_AFTER_S", 0.01)
    tokens: list[str] = []

    def guard(connection: Any, request: Any) -> Any:
        tokens.append(request.headers.get("Authorization", ""))
        if request.path != "/ws/cluster-status" or tokens[-1] != "Bearer good":
            return connection.respond(401, json.dumps(failure("UNAUTHENTICATED")))
        return None

    def handle(connection: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            for number in range(2):
                connection.send(json.dumps({"timestamp": number, "workers": []}))
        connection.close()

    with websocket_server.serve(handle, "127.0.0.1", 0, process_request=guard) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        host, port = running.socket.getsockname()
        yield f"http://{host}:{port}", tokens
        running.shutdown()
        thread.join()


def first(client: Any, count: int) -> Any:
    if isinstance(client, SIEClient):
        with contextlib.closing(client.watch()) as watched:  # type: ignore[type-var]
            return [next(watched) for _ in range(count)]

    async def found() -> list[Any]:
        async with contextlib.aclosing(client.watch()) as watched:
            return [await anext(watched) for _ in range(count)]

    return found()


def test_a_forked_process_has_connections_of_its_own(server: Server) -> None:
    with SIEClient(server.url) as client:
        client.encode("m", "1")
        child = os.fork()
        if not child:
            os._exit(client.encode("m", "2")["dense"].tolist() != [2.0])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.encode("m", "3")["dense"].tolist() == [3.0]
    assert server.connected == 2


def test_threads_of_a_forked_process_share_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, clients = ThreadDriver("http://127.0.0.1:9", core.Session()), []
    driver._process = -1  # as after a fork
    opens: list[None] = []

    def use() -> None:
        with driver._connections() as client:
            clients.append(client)

    def open_while_another_thread_begins() -> None:
        opens.append(None)
        if len(opens) == 1:
            second.start()
            second.join(0.2)  # the other thread ends here if it does not wait for this one
        ThreadDriver._open(driver)

    second = threading.Thread(target=use)
    monkeypatch.setattr(driver, "_open", open_while_another_thread_begins)
    use()
    second.join()
    driver.close()
    assert len(opens) == 1
    assert clients[0] is clients[1]
    assert clients[0].is_closed


def test_a_fork_waits_until_no_thread_has_the_lock_of_the_drivers() -> None:
    held, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)  # called before the hooks that were registered earlier

    def hold() -> None:
        with threads._lock:
            held.set()
            forking.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not threads._lock.acquire(timeout=0.1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holder.join()


def test_a_connection_that_is_made_while_the_client_is_closed_does_not_stay(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part fails while another one connects. The `with` block ends before that connection is made."""
    connect, numbers = socket.create_connection, itertools.count()
    connecting, closed = threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> socket.socket:
        if next(numbers):
            connecting.set()
            assert closed.wait(HANGING)
        return connect(*arguments, **named)

    def special(method: str, path: str, body: Any, number: int) -> tuple[int, Any] | None:
        assert connecting.wait(HANGING)
        return None if closed.is_set() else (400, failure("INVALID_INPUT"))

    monkeypatch.setattr(socket, "create_connection", slow)
    server.special = special
    with (
        pytest.raises(sie_client.InvalidInputError),
        SIEClient(server.url, part_tokens=TEN_A_PART, concurrency=2) as client,
    ):
        client.encode("m", TEXTS)
    closed.set()
    with server.changed:
        assert server.changed.wait_for(lambda: server.connected == 2 and not server.connections, HANGING)
    gc.collect()  # Python warns now of a connection that was not closed, and pytest makes that an error


def test_a_copy_that_fails_is_no_answer_while_the_other_is_under_way(server: Server, using: Callable[..., Any]) -> None:
    second = threading.Event()

    def special(method: str, path: str, body: Any, number: int) -> tuple[int, Any] | None:
        if number == 2:
            second.set()
            return 500, failure("INTERNAL_ERROR")
        second.wait(HANGING)
        time.sleep(0.05)
        return None

    server.special = special
    assert using(server.url, lambda client: client.encode("m", "7", hedge_after_s=0.02))["dense"].tolist() == [7.0]


def test_a_renewal_that_ends_after_its_reservation_does_not_create_it_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "RENEW_EVERY_S", 0.01)
    monkeypatch.setattr("sie_client.transport.CLOSE_S", 0.1)
    well, deleted = pools(server), threading.Event()

    def special(method: str, path: str, body: Any, number: int) -> tuple[int, Any]:
        if path.endswith("/renew"):
            assert deleted.wait(HANGING)
            return 404, failure("POOL_NOT_FOUND")
        if method == "DELETE":
            deleted.set()
        return well(method, path, body, number)

    server.special = special
    with SIEClient(server.url) as client:
        reserve(client, lambda: len(server.seen) >= 2)
        for thread in threading.enumerate():
            if thread.name == "sie-sdk":
                thread.join(HANGING)
    assert [path for method, path, _ in server.seen if method == "POST"].count("/v1/pools") == 1
