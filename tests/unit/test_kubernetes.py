"""Discovery of workers by the Kubernetes API, for which a small server stands."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, settings_of, until

from sie_contracts.settings import SettingError
from sie_gateway.fleet import workers
from sie_gateway.fleet.workers import Endpoints, WorkerFrame, WorkerSockets
from sie_runtime.http.asgi import Receive, Scope, Send
from sie_runtime.http.server import HttpServer
from sie_runtime.process import Stop


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry()) as cluster:
        yield cluster


class Api:
    """The part of the Kubernetes API that discovery uses: a list of EndpointSlices and a watch of their changes."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 1
        self.asked: list[tuple[str, str, str]] = []  # path, query, credentials
        self.status = 200
        self.changed = asyncio.Event()

    def change(self, *endpoints: dict[str, Any], kind: str = "IPv4") -> None:
        self.slices = [{"addressType": kind, "endpoints": list(endpoints), "ports": []}]
        self.version += 1
        self.changed.set()

    async def answer(self, scope: Scope, send: Send) -> None:
        headers = dict(scope["headers"])
        query = scope["query_string"].decode()
        self.asked.append((scope["path"], query, headers.get(b"authorization", b"").decode()))
        head = {
            "type": "http.response.start",
            "status": self.status,
            "headers": [(b"content-type", b"application/json")],
        }
        body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}, "items": self.slices}
        if "watch=1" in query and self.status == 200:
            await send(head)
            if f"resourceVersion={self.version}&" in query:
                self.changed.clear()
                await self.changed.wait()
            await send({"type": "http.response.body", "body": b'{"type":"MODIFIED"}\n'})
            return
        await send(head)
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def endpoint(*addresses: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": list(addresses), "conditions": conditions}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("pod-token\n")
    return folder


@contextlib.asynccontextmanager
async def kubernetes() -> AsyncIterator[tuple[Api, str]]:
    api = Api()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await api.answer(scope, send)

    server = HttpServer(app, "127.0.0.1", 0, setting="--port")
    await server.start()
    try:
        yield api, f"http://127.0.0.1:{server.port}"
    finally:
        api.changed.set()
        await server.stop()


@contextlib.asynccontextmanager
async def following(endpoints: Endpoints) -> AsyncIterator[Callable[[], tuple[str, ...]]]:
    updates: list[tuple[str, ...]] = [()]
    task = asyncio.create_task(endpoints.run(updates.append))
    try:
        yield lambda: updates[-1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_appear_and_disappear_with_the_events_of_the_api(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_GATEWAY_KUBERNETES: pods that are not ready are listed, terminating pods are not. The token is read again for
    each request.
    """
    monkeypatch.setattr(workers, "MIN_PAUSE_S", 0.01)
    async with kubernetes() as (api, url), following(Endpoints(settings_of(), api=url, account=account)) as addresses:
        await until(lambda: len(api.asked) >= 2, "the first list and a watch")
        api.change(
            endpoint("10.0.0.2", ready=True),
            endpoint("10.0.0.1", ready=False),
            endpoint("10.0.0.9", terminating=True),
            endpoint(),
        )
        await until(lambda: addresses() == ("http://10.0.0.1:8080", "http://10.0.0.2:8080"), "both pods")
        (account / "token").write_text("renewed")
        api.change(endpoint("fd00::1"), kind="IPv6")
        await until(lambda: addresses() == ("http://[fd00::1]:8080",), "the other pod")
        assert {request[2] for request in api.asked} == {"Bearer pod-token", "Bearer renewed"}
        pod = {"targetRef": {"kind": "Pod", "uid": "pod-1"}}
        api.change({**endpoint("fd00::1"), **pod}, kind="IPv6")
        api.slices.append({"addressType": "IPv4", "endpoints": [{**endpoint("10.0.0.1"), **pod}], "ports": []})
        await until(lambda: addresses() == ("http://10.0.0.1:8080",), "the pod once, at its address of IPv4")
        api.change(endpoint("fd00::1"), kind="IPv6")
        await until(lambda: addresses() == ("http://[fd00::1]:8080",), "the pod at its address of IPv6")
        api.status = 500
        api.changed.set()
        before = len(api.asked)
        await until(lambda: len(api.asked) > before + 2, "more attempts")
        assert addresses() == ("http://[fd00::1]:8080",), "what cannot be asked stays as it was"
        api.status = 200
        api.change()
        await until(lambda: addresses() == (), "no pod")


@pytest.mark.parametrize(
    ("variable", "path", "selector", "port"),
    [
        ({}, "/namespaces/default/", "service-name%3Dsie-worker", 8080),
        (
            {"SIE_GATEWAY_K8S_NAMESPACE": "search", "SIE_GATEWAY_K8S_SERVICE": "other", "SIE_GATEWAY_K8S_PORT": "9095"},
            "/namespaces/search/",
            "service-name%3Dother",
            9095,
        ),
    ],
)
async def test_namespace_service_and_port_say_where_workers_are_looked_for(
    account: Path, variable: dict[str, str], path: str, selector: str, port: int
) -> None:
    """SIE_GATEWAY_K8S_NAMESPACE, SIE_GATEWAY_K8S_SERVICE, SIE_GATEWAY_K8S_PORT."""
    async with kubernetes() as (api, url):
        api.change(endpoint("10.0.0.1"))
        async with following(Endpoints(settings_of(**variable), api=url, account=account)) as addresses:
            await until(lambda: addresses() == (f"http://10.0.0.1:{port}",), "the pod")
        assert path in api.asked[0][0]
        assert api.asked[0][0].endswith("/endpointslices")
        assert selector in api.asked[0][1]


async def test_kubernetes_is_asked_only_where_that_is_wanted_and_only_from_a_pod(
    cluster: InProcess, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without SIE_GATEWAY_KUBERNETES the API is never called. With it, outside of a pod, the start fails and names the
    setting.
    """
    monkeypatch.setattr(workers, "MIN_PAUSE_S", 0.01)
    with pytest.raises(SettingError, match=r"^SIE_GATEWAY_KUBERNETES: no service account"):
        await cluster.gateway(SIE_GATEWAY_KUBERNETES="true")
    async with kubernetes() as (api, url):
        sidecar = await cluster.sidecar(ready=False)
        own = {"SIE_GATEWAY_HEALTH_MODE": "ws", "SIE_GATEWAY_K8S_PORT": str(sidecar.settings.worker_metrics_port)}
        api.change(endpoint("127.0.0.1"))
        for setting in ("false", "true"):
            sockets = WorkerSockets(settings_of(SIE_GATEWAY_KUBERNETES="false", **own))
            if setting == "true":
                sockets._endpoints = Endpoints(settings_of(**own), api=url, account=account)
            stop = Stop()
            running = asyncio.create_task(sockets.run(stop))
            if setting == "true":
                await until(
                    lambda bound_sockets=sockets: [
                        status for _, status in bound_sockets.statuses() if status is not None
                    ],
                    "its status",
                )
                assert isinstance(sockets.statuses()[0][1], WorkerFrame)
                api.change()
                await until(lambda bound_sockets=sockets: not bound_sockets.statuses(), "no worker")
            else:
                await asyncio.sleep(0)
                assert api.asked == []
            stop.request()
            await asyncio.wait_for(running, 10)
        assert api.asked
