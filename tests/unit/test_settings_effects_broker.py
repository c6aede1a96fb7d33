"""Effects of the settings of broker and config service: every process of the cluster in this event loop, with a real
nats-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from fake_adapter import FakeAdapter, toy_entry
from inprocess import free_port, settings_of, until_told
from nats_server import NatsServer

import sie_config_service.process
import sie_gateway.process
import sie_sidecar.process
from sie_broker.nats import transport
from sie_cli.main import main
from sie_contracts.settings import Secret, SettingError
from sie_runtime.feed import packaged_models
from sie_runtime.process import Stop

READ_TOKEN = "reader"
READY_S = 40.0  # a group of brokers elects its leader first
STREAM = "WORK__default"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


class Processes:
    """Processes that run in tasks, as their commands run them, until the end of a test."""

    def __init__(self) -> None:
        self._stop = Stop()
        self._tasks: list[asyncio.Task[int]] = []

    def start(self, work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def config(self, **environ: str) -> str:
        """Start a config service. Return its URL when it has its catalogue."""
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settings = settings_of(SIE_CONFIG_READ_TOKEN=READ_TOKEN, **environ)
        self.start(
            sie_config_service.process.run(
                settings, self._stop, host="127.0.0.1", port=0, on_listening=listening.set_result
            )
        )
        url = f"http://127.0.0.1:{await listening}"
        await self._ready(url)
        return url

    async def gateway(self, **environ: str) -> str:
        """Start a gateway. Return its URL when it is ready. Raises the error that ends its start."""
        port = free_port()
        settings = settings_of(SIE_GATEWAY_METRICS_PORT="0", SIE_CONFIG_READ_TOKEN=READ_TOKEN, **environ)
        task = self.start(sie_gateway.process.run(settings, self._stop, host="127.0.0.1", port=port))
        await self._ready(f"http://127.0.0.1:{port}", task)
        return f"http://127.0.0.1:{port}"

    async def sidecar(self, adapter: FakeAdapter, **environ: str) -> None:
        port = free_port()
        own = {
            "SIE_WORKER_METRICS_PORT": str(port),
            "SIE_IPC_SOCKET_PATH": adapter.path,
            "SIE_CONFIG_READ_TOKEN": READ_TOKEN,
        }
        self.start(sie_sidecar.process.run(settings_of(**own, **environ), self._stop, host="127.0.0.1"))
        await self._ready(f"http://127.0.0.1:{port}")

    @staticmethod
    async def _ready(url: str, task: asyncio.Task[int] | None = None) -> None:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(READY_S):
            while True:
                if task is not None and task.done():
                    task.result()
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{url}/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        self._stop.request()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    processes = Processes()
    yield processes
    await processes.end()


@pytest.fixture
async def adapter(tmp_path: Path) -> AsyncIterator[FakeAdapter]:
    adapter = await FakeAdapter(tmp_path / "a.sock").start()
    yield adapter
    adapter.let_go()
    await adapter.stop()


@pytest.fixture
def models(tmp_path: Path) -> str:
    """A folder with one model that no packaged catalogue has, of a family that no packaged bundle has."""
    folder = tmp_path / "models"
    (folder / "bundles").mkdir(parents=True)
    (folder / "bundles" / "default.yaml").write_text("id: default\n")
    (folder / "one.yaml").write_bytes(msgspec.json.encode(msgspec.to_builtins(toy_entry())))
    return str(folder)


async def asked(url: str, path: str) -> Any:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}{path}")).json()


async def encode(url: str, text: str = "x", timeout_s: float = 20) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        headers = {"x-sie-timeout-ms": str(int(timeout_s * 1000))}
        return await client.post(f"{url}/v1/encode/toy/one", json={"items": [text]}, headers=headers)


async def stored(nats: NatsServer) -> dict[str, Any]:
    """Return configuration and state of the work stream from the broker's monitor; empty if there is no stream."""
    answer = await asked(nats.monitor_url, "/jsz?streams=true&config=true")
    streams = [stream for account in answer.get("account_details", []) for stream in account["stream_detail"]]
    return next(({**stream["config"], **stream["state"]} for stream in streams if stream["name"] == STREAM), {})


async def test_a_password_may_have_any_character_and_stands_in_no_url(
    adapter: FakeAdapter, models: str, processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIE_NATS_PASSWORD: all processes connect to a broker that asks for it. Another password is refused."""
    password = " p@ss/w:o%72d#?&\"\\'$(HOME) é "
    extra = f'authorization {{ user: "sie", password: {json.dumps(password, ensure_ascii=False)} }}'
    with NatsServer(tmp_path / "nats", extra=extra) as nats:
        url = nats.url.replace("//", "//sie@")
        broker = {"SIE_NATS_URL": url, "SIE_NATS_PASSWORD": password}
        config = {"SIE_CONFIG_SERVICE_URL": await processes.config(SIE_MODELS_DIR=models, **broker)}
        gateway = await processes.gateway(**broker, **config)
        await processes.sidecar(adapter, **broker, **config)
        assert (await encode(gateway)).status_code == 200
        command = ["keys", "list", "--nats-url", url]
        looked = await asyncio.to_thread(CliRunner().invoke, main, command, env={"SIE_NATS_PASSWORD": password})
        assert looked.exit_code == 0, looked.output
        refused = await asyncio.to_thread(
            CliRunner().invoke, main, command, env={"SIE_NATS_PASSWORD": password.strip()}
        )
        assert refused.exit_code == 2
        assert "uthorization" in refused.output
        within = transport.split(url.replace("sie@", f"sie:{quote('of the url', safe='')}@"), Secret(password))
        assert within[1] == {"user": "sie", "password": "of the url"}
    assert "p@ss" not in caplog.text + looked.output + refused.output


@pytest.mark.parametrize("process", ["gateway", "sidecar", "config"])
async def test_a_process_of_the_cluster_without_a_broker_refuses_to_start(process: str) -> None:
    """SIE_NATS_URL."""
    work = {
        "gateway": lambda: sie_gateway.process.run(settings_of(), Stop(), host="127.0.0.1", port=0),
        "sidecar": lambda: sie_sidecar.process.run(settings_of(), Stop(), host="127.0.0.1"),
        "config": lambda: sie_config_service.process.run(settings_of(), Stop(), host="127.0.0.1", port=0),
    }[process]
    with pytest.raises(SettingError, match=r"^SIE_NATS_URL: "):
        await work()


async def test_without_a_config_service_the_packaged_catalogue_serves_and_nothing_waits(
    nats: NatsServer, models: str, processes: Processes
) -> None:
    """SIE_CONFIG_SERVICE_URL: with it the catalogue of the config service serves."""
    config = await processes.config(SIE_NATS_URL=nats.url, SIE_MODELS_DIR=models)
    packaged = set(packaged_models())
    for url, expected in (("", packaged), (config, {*packaged, "toy/one"})):
        gateway = await processes.gateway(SIE_NATS_URL=nats.url, SIE_CONFIG_SERVICE_URL=url)
        listed = await asked(gateway, "/v1/models?variants=false")
        assert {model["id"] for model in listed["data"]} == expected


@pytest.mark.parametrize(("variable", "status"), [({}, 200), ({"SIE_STREAM_STORAGE": "memory"}, 503)])
async def test_queued_work_survives_the_broker_in_files_and_not_in_memory(
    nats: NatsServer, adapter: FakeAdapter, models: str, processes: Processes, variable: dict[str, str], status: int
) -> None:
    """SIE_STREAM_STORAGE.

    1. a request is queued, no worker is up; 2. the broker is killed with -9 and started again; 3. a worker starts;
    4. the request is answered from the file; a request that was in memory gets QUEUE_UNAVAILABLE.
    """
    broker = {"SIE_NATS_URL": nats.url}
    config = {"SIE_CONFIG_SERVICE_URL": await processes.config(SIE_MODELS_DIR=models, **broker)}
    url = await processes.gateway(**broker, **config, **variable)
    request = asyncio.create_task(encode(url))

    async def is_queued() -> bool:
        return (await stored(nats)).get("messages") == 1

    await until_told(is_queued, "queued work")
    assert (await stored(nats))["storage"] == variable.get("SIE_STREAM_STORAGE", "file")
    await asyncio.to_thread(nats.kill)
    await asyncio.to_thread(nats.start)
    await processes.sidecar(adapter, **broker, **config)
    answer = await request
    assert answer.status_code == status
    if status == 503:
        assert answer.json()["code"] == "QUEUE_UNAVAILABLE"
        assert int(answer.headers["retry-after"]) >= 1


async def test_more_replicas_than_brokers_are_a_named_refusal(nats: NatsServer, processes: Processes) -> None:
    """SIE_STREAM_REPLICAS."""
    with pytest.raises(SettingError, match=r"^SIE_STREAM_REPLICAS: got 3, but the broker is a single server"):
        await processes.gateway(SIE_NATS_URL=nats.url, SIE_STREAM_REPLICAS="3")
