"""A proxy of the environment is used for every host except for the addresses of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from sie_cli.models.service import ConfigServiceClient
from sie_client import SIEAsyncClient, SIEClient
from sie_contracts.loopback import bypass_proxies, is_local

NOBODY = "http://127.0.0.1:9"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ws_proxy", "wss_proxy", "grpc_proxy")


class Handler(BaseHTTPRequestHandler):
    """A server that is a proxy too: a request with an absolute URL gets the same answer as any other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent apart: up to 40 ms between them

    def do_GET(self) -> None:
        self.server.targets.append(self.path)  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        data = json.dumps({"data": [{"name": path}], "models": [{"name": path}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write nothing to the test's output."""


@contextlib.contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """Start a server. Yield its address, and the targets of the requests that it has answered."""
    targets: list[str] = []
    with ThreadingHTTPServer((host, 0), Handler) as server:
        server.targets = targets  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}", targets
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets a proxy in the environment, without exceptions."""

    def name(url: str) -> None:
        for variable in NAMES:
            monkeypatch.delenv(variable, raising=False)
            monkeypatch.delenv(variable.upper(), raising=False)
        for variable in NAMES[:3]:
            monkeypatch.setenv(variable.upper(), url)

    return name


def listed(url: str) -> Any:
    with SIEClient(url, connection_budget_s=0.0) as client:
        return client.list_models()


def listed_async(url: str) -> Any:
    async def run() -> Any:
        async with SIEAsyncClient(url, connection_budget_s=0.0) as client:
            return await client.list_models()

    return asyncio.run(run())


def read_by_command(url: str) -> Any:
    with ConfigServiceClient(url, "") as service:
        return service.read("/v1/models", dict).body["models"]


CLIENTS = pytest.mark.parametrize("call", [listed, listed_async, read_by_command])


@CLIENTS
@pytest.mark.parametrize(("host", "proxy"), [("127.0.0.1", NOBODY), ("localhost", "socks5://127.0.0.1:9")])
def test_a_server_of_this_machine_is_reached_without_the_proxy(
    call: Callable[[str], Any], proxy: str, host: str, proxied: Callable[[str], None]
) -> None:
    with listening(host) as (url, targets):
        proxied(proxy)
        assert [model["name"] for model in call(url)] == ["/v1/models"]
        assert targets == ["/v1/models"]


@CLIENTS
def test_any_other_host_is_reached_by_the_proxy(call: Callable[[str], Any], proxied: Callable[[str], None]) -> None:
    with listening() as (url, targets):
        proxied(url)
        assert [model["name"] for model in call("http://sie.example:8080")] == ["/v1/models"]
        assert targets == ["http://sie.example:8080/v1/models"]


@pytest.mark.parametrize(
    ("before", "hosts"),
    [
        ({"HTTP_PROXY": "p"}, "localhost,127.0.0.1,::1"),
        ({"https_proxy": "p", "NO_PROXY": "corp,localhost"}, "corp,localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "p", "no_proxy": "corp"}, "corp,localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "p", "no_proxy": "*"}, None),
        ({"HTTP_PROXY": ""}, None),
        ({"NO_PROXY": "corp"}, None),  # with no proxy in the environment, that of the system is used
    ],
)
def test_exceptions_get_the_addresses_of_this_machine(before: dict[str, str], hosts: str | None) -> None:
    after = dict(before)
    bypass_proxies(after)
    if hosts is None:
        assert {name: value for name, value in after.items() if value != "*"} == {
            name: value for name, value in before.items() if value != "*"
        }
    else:
        assert (after["no_proxy"], after["NO_PROXY"]) == (hosts, hosts)


@pytest.mark.parametrize(
    ("url", "is_one"),
    [("http://localhost:1", True), ("http://[::1]:1", True), ("http://127.9.9.9", True), ("http://10.0.0.1", False)]
    + [(url, False) for url in ("http://localhost.example", "http://[::1", "x", "", "http://0.0.0.0:1")],
)
def test_addresses_of_this_machine_are_known(url: str, is_one: bool) -> None:
    assert is_local(url) == is_one
