"""Effects of the settings of the broker, the catalogue, batching and the log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
from batch_entries import BatchEntry
from click.testing import CliRunner
from config_api import listened
from fake_adapter import FakeAdapter, toy_entry
from inprocess import InProcess, free_port, settings_of, until_told
from nats_server import NatsServer
from overlays import wanted_models

import sie_config_service.process
import sie_gateway.process
import sie_sidecar.process
from sie_adapter.engine.engine import AdapterEngine
from sie_broker.nats import transport
from sie_cli.main import main
from sie_config_service import access
from sie_config_service.app import create_app
from sie_config_service.routes import TABLE
from sie_config_service.state import ConfigService
from sie_contracts.errors import PermissionDenied, SIEError, Unauthenticated
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Mode, Secret, SettingError, load
from sie_contracts.wire.messages import Truncate
from sie_gateway.http.app import Gate
from sie_runtime.feed import packaged_models
from sie_runtime.process import Stop, configure_logging
from sie_sidecar.batch import (
    WINDOW,
    WINDOW_S,
    Batch,
    BatchKey,
    BatchLimits,
    DeviceLoad,
    Quantum,
    Waiting,
    WaitUntil,
    next_batch,
    quantum_of,
)
from sie_sidecar.prepare.rows import INLINE_CHARACTERS, TokenizerPool, Tokens
from sie_sidecar.process import limits_of

READ_TOKEN = "reader"
READY_S = 40.0  # a group of brokers elects its leader first


STREAM = "WORK__default"


async def stored(nats: NatsServer) -> dict[str, Any]:
    """Return configuration and state of the work stream from the broker's monitor; empty if there is no stream."""
    answer = await asked(nats.monitor_url, "/jsz?streams=true&config=true")
    streams = [stream for account in answer.get("account_details", []) for stream in account["stream_detail"]]
    return next(({**stream["config"], **stream["state"]} for stream in streams if stream["name"] == STREAM), {})


@contextlib.contextmanager
def engine_of(**environ: str) -> Iterator[AdapterEngine]:
    engine = AdapterEngine(settings_of(**{"SIE_DEVICE": "cpu", **environ}))
    try:
        yield engine
    finally:
        assert engine.stop(5)


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


async def test_a_password_may_have_any_character_and_stands_in_no_url(
    adapter: FakeAdapter, models: str, processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIE_NATS_PASSWORD: all processes connect to a broker that asks for it."""
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
        within = transport.split(url.replace("sie@", f"sie:{quote('of the url', safe='')}@"), Secret(password))
        assert within[1] == {"user": "sie", "password": "of the url"}
    assert "p@ss" not in caplog.text + looked.output


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


PACKAGED = set(packaged_models())


def toy(model: str = "toy/one") -> ModelEntry:
    """An entry of a family that the packaged bundle serves."""
    return toy_entry(model, family="text-encoder")


def put(folder: Path, *entries: ModelEntry) -> Path:
    folder.mkdir(exist_ok=True)
    for entry in entries:
        # JSON is YAML
        (folder / f"{entry.id.replace('/', '--')}.yaml").write_bytes(msgspec.json.encode(msgspec.to_builtins(entry)))
    return folder


def test_the_models_folder_is_laid_over_the_packaged_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIE_MODELS_DIR: the default is ./models, which need not exist."""
    monkeypatch.chdir(tmp_path)
    assert {name: source for name, (_, source) in wanted_models(settings_of()).items()} == dict.fromkeys(
        PACKAGED, "packaged"
    )
    named = put(tmp_path / "elsewhere", toy())
    models = wanted_models(settings_of(SIE_MODELS_DIR=str(named)))
    assert set(models) == {*PACKAGED, "toy/one"}
    assert models["toy/one"] == (toy(), "overlay")
    replaced = toy(min(PACKAGED))
    put(tmp_path / "models", replaced, toy("toy/two"))
    models = wanted_models(settings_of())
    assert set(models) == {*PACKAGED, "toy/two"}
    assert models[replaced.id] == (replaced, "overlay")


def test_the_filter_leaves_the_named_models_alone_and_an_unknown_name_ends_the_start(tmp_path: Path) -> None:
    """SIE_MODEL_FILTER."""
    folder = {"SIE_MODELS_DIR": str(put(tmp_path / "m", toy(), toy("toy/two")))}
    assert set(wanted_models(settings_of(**folder))) == {*PACKAGED, "toy/one", "toy/two"}
    assert set(wanted_models(settings_of(SIE_MODEL_FILTER=" toy/two , toy/one", **folder))) == {"toy/one", "toy/two"}
    assert set(wanted_models(settings_of(SIE_MODEL_FILTER="toy/two", **folder))) == {"toy/two"}
    with pytest.raises(SettingError, match=r"^SIE_MODEL_FILTER: .* has toy/none; did you mean toy/one or toy/two"):
        wanted_models(settings_of(SIE_MODEL_FILTER="toy/two,toy/none", **folder))


def reads(token: str, **environ: str) -> bool | type[SIEError]:
    """Return True if the config service lets this token read the export, else the class of the error."""
    try:
        access.ConfigGate(settings_of(**environ)).check(
            "GET", TABLE.match("/v1/configs/export"), f"Bearer {token}" if token else ""
        )
    except SIEError as error:
        return type(error)
    return True


def test_the_export_is_read_with_the_read_token_or_the_admin_token_and_nothing_else() -> None:
    """SIE_CONFIG_READ_TOKEN: if neither token is configured, reads are refused. The read token allows no write."""
    tokens = {"SIE_CONFIG_READ_TOKEN": "reader", "SIE_ADMIN_TOKEN": "root", "SIE_AUTH_TOKEN": "user"}
    assert [reads(token, **tokens) for token in ("reader", "root", "user", "")] == [
        True,
        True,
        Unauthenticated,
        Unauthenticated,
    ]
    assert reads("root", SIE_CONFIG_READ_TOKEN="reader") is Unauthenticated
    assert reads("", SIE_AUTH_TOKEN="user") is PermissionDenied
    gate = Gate(settings_of(**tokens))
    with pytest.raises(Unauthenticated):
        gate.check("POST", "/v1/configs/models", "Bearer reader")


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/docs/", "/docs/oauth2-redirect", "/v1/configs/models"])
async def test_the_pages_that_describe_the_service_need_what_its_other_pages_need(path: str) -> None:
    """The pages need the scope `read`, which the read token has."""
    service = ConfigService(settings_of(SIE_CONFIG_READ_TOKEN="reader", SIE_ADMIN_TOKEN="root"))
    transport = httpx.ASGITransport(listened(create_app(service)))
    async with httpx.AsyncClient(transport=transport, base_url="http://config") as client:
        for token, status in (("", 401), ("wrong", 401), ("reader", 503 if path.startswith("/v1/") else 200)):
            answer = await client.get(path, headers={"authorization": f"Bearer {token}"} if token else {})
            assert answer.status_code == status, (token, answer.text)
        assert (await client.post(path, headers={"authorization": "Bearer reader"})).status_code in (401, 403, 405)
        assert (await client.get("/healthz")).status_code == 200, "probes stay open"


KEY = BatchKey("toy/one", "local", "encode", "", "")
IDLE = DeviceLoad(sent=0, lanes=1, depth=2, more_expected=False)
EXPECTING = DeviceLoad(sent=0, lanes=1, depth=2, more_expected=True)


def limits(mode: Mode = "queue", **environ: str) -> BatchLimits:
    return limits_of(settings_of(mode, **environ), mode)


def jobs(count: int, cost: int = 1, *, every_s: float = 0.0, bulk: bool = False) -> list[BatchEntry[int]]:
    return [BatchEntry(KEY, cost, number * every_s, number, bulk) for number in range(count)]


def batches_of(
    waiting: Sequence[BatchEntry[int]], bounds: BatchLimits, now_s: float = 0.0
) -> list[Batch[BatchEntry[int]]]:
    """Return all batches that an idle device gets when these jobs wait."""
    queue: Waiting[BatchEntry[int]] = Waiting()
    for job in waiting:
        queue.add(job)
    formed = []
    while isinstance(batch := next_batch(queue, now_s, bounds, IDLE), Batch):
        formed.append(batch)
    assert not len(queue)
    return formed


def sizes(waiting: Sequence[BatchEntry[int]], bounds: BatchLimits) -> list[int]:
    return [len(batch.entries) for batch in batches_of(waiting, bounds)]


def sent_at(arrivals: Sequence[BatchEntry[int]], bounds: BatchLimits) -> list[tuple[float, int]]:
    """Return the time in seconds and the size of each batch for jobs that arrive at their own times, while more are
    always expected.
    """
    queue: Waiting[BatchEntry[int]] = Waiting()
    coming = list(arrivals)
    formed: list[tuple[float, int]] = []
    now_s = 0.0
    while coming or len(queue):
        while coming and coming[0].arrived_s <= now_s:
            queue.add(coming.pop(0))
        action = next_batch(queue, now_s, bounds, EXPECTING)
        if isinstance(action, Batch):
            formed.append((now_s, len(action.entries)))
            continue
        events = [job.arrived_s for job in coming[:1]] + ([action.until_s] if isinstance(action, WaitUntil) else [])
        now_s = min(events)
    return formed


@pytest.mark.parametrize("mode", ["queue", "standalone"])
def test_max_batch_cost_bounds_the_tokens_of_a_batch(mode: Mode) -> None:
    """SIE_MAX_BATCH_COST: 32 texts of 512 tokens are one batch, or four. An item over the budget runs alone."""
    roomy = {"SIE_MAX_BATCH_REQUESTS": "64", "SIE_BATCHER_MAX_BATCH_REQUESTS": "64"}
    assert sizes(jobs(32, 512), limits(mode, **roomy)) == [32]
    assert sizes(jobs(32, 512), limits(mode, SIE_MAX_BATCH_COST="4096", **roomy)) == [8, 8, 8, 8]
    oversize = [*jobs(1, 10), *jobs(1, 9000), *jobs(1, 10)]
    assert sizes(oversize, limits(mode, SIE_MAX_BATCH_COST="4096", **roomy)) == [1, 1, 1]


def test_max_batch_requests_bounds_the_items_of_a_batch_with_standalone_only() -> None:
    """SIE_MAX_BATCH_REQUESTS."""
    assert sizes(jobs(128), limits("standalone")) == [64, 64]
    assert sizes(jobs(128), limits("standalone", SIE_MAX_BATCH_REQUESTS="8")) == [8] * 16
    assert limits("queue", SIE_MAX_BATCH_REQUESTS="8") == limits("queue")
    assert len(load(environ={"SIE_MAX_BATCH_REQUESTS": "8"}, mode="queue").warnings) == 1


def test_max_batch_wait_is_how_long_a_lone_item_waits_for_an_expected_one_with_standalone_only() -> None:
    """SIE_MAX_BATCH_WAIT_MS: a batch that is full never waits."""
    lone = jobs(1)
    assert sent_at(lone, limits("standalone")) == [(0.01, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="5")) == [(0.005, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="200")) == [(0.2, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="0")) == [(0.0, 1)]
    assert sent_at(jobs(64), limits("standalone", SIE_MAX_BATCH_WAIT_MS="200")) == [(0.0, 64)]
    assert limits("queue", SIE_MAX_BATCH_WAIT_MS="200") == limits("queue")
    assert len(load(environ={"SIE_MAX_BATCH_WAIT_MS": "200"}, mode="queue").warnings) == 1


def test_coalescing_joins_what_arrives_within_the_window_in_queue_mode_only() -> None:
    """SIE_BATCHER_COALESCE_MS: items come every 3 ms. A window of 5 ms joins two, one of 1 ms none."""
    assert [size for _, size in sent_at(jobs(6, every_s=0.003), limits())] == [2, 2, 2]
    assert [size for _, size in sent_at(jobs(6, every_s=0.003), limits(SIE_BATCHER_COALESCE_MS="1"))] == [1] * 6
    assert limits("standalone", SIE_BATCHER_COALESCE_MS="1") == limits("standalone")
    assert len(load(environ={"SIE_BATCHER_COALESCE_MS": "1"}, mode="standalone").warnings) == 1


def test_batcher_max_requests_bounds_the_items_of_a_batch_in_queue_mode_only() -> None:
    """SIE_BATCHER_MAX_BATCH_REQUESTS."""
    assert sizes(jobs(24), limits()) == [12, 12]
    assert sizes(jobs(24), limits(SIE_BATCHER_MAX_BATCH_REQUESTS="6")) == [6] * 4
    assert limits("standalone", SIE_BATCHER_MAX_BATCH_REQUESTS="6") == limits("standalone")
    assert len(load(environ={"SIE_BATCHER_MAX_BATCH_REQUESTS": "6"}, mode="standalone").warnings) == 1


def order_of(waiting: Sequence[BatchEntry[int]], bounds: BatchLimits) -> str:
    return "".join("b" if batch.entries[0].bulk else "i" for batch in batches_of(waiting, bounds))


@pytest.mark.parametrize(("variable", "overtakes"), [({}, 4), ({"SIE_BULK_MAX_OVERTAKES": "2"}, 2)])
def test_bulk_work_is_overtaken_at_most_this_often(variable: dict[str, str], overtakes: int) -> None:
    """SIE_BULK_MAX_OVERTAKES: with a backlog of both priorities, a bulk batch runs after this many interactive ones."""
    bounds = limits(SIE_BATCHER_MAX_BATCH_REQUESTS="1", **variable)
    assert order_of([*jobs(4, bulk=True), *jobs(40)], bounds).startswith(("i" * overtakes + "b") * 4)


def quantum(p50_ms: float | None, **environ: str) -> Quantum:
    """Return the quantum after a second in which work was answered this long after its delivery."""
    batch_quantum = quantum_of(settings_of(**environ))
    for number in range(WINDOW if p50_ms is not None else 0):
        batch_quantum.answered((p50_ms or 0.0) / 1000, number / WINDOW)
    return batch_quantum


def gathered_ms(batch_quantum: Quantum, *, every_ms: float | None) -> float:
    """Return how long a gathering lasts while more is always expected. Deliveries come at this interval, or none after
    the first.
    """
    began_s = last_s = 1.0
    while every_ms is not None and last_s + every_ms / 1000 <= batch_quantum.until_s(began_s, last_s):
        last_s += every_ms / 1000
    return round((batch_quantum.until_s(began_s, last_s) - began_s) * 1000, 6)


def test_gathering_lasts_the_shortest_quantum_when_nothing_comes_or_answers_are_late() -> None:
    """SIE_ADAPTIVE_MIN_QUANTUM_MS: a gathering ends after this time without a delivery. It lasts no longer if the
    median of the answers is over its target, or if there are no answers.
    """
    for environ, shortest_ms in (
        ({}, 2),
        ({"SIE_ADAPTIVE_MIN_QUANTUM_MS": "7"}, 7),
        ({"SIE_ADAPTIVE_MIN_QUANTUM_MS": "0"}, 0),
    ):
        assert gathered_ms(quantum(1, **environ), every_ms=None) == shortest_ms
        assert gathered_ms(quantum(400, **environ), every_ms=0.5) == shortest_ms
        assert gathered_ms(quantum(None, **environ), every_ms=0.5) == shortest_ms


def test_gathering_lasts_up_to_the_longest_quantum_while_deliveries_keep_coming() -> None:
    """SIE_ADAPTIVE_MAX_QUANTUM_MS: the bound is reached while answers are immediate. Old answers do not count."""
    assert gathered_ms(quantum(0), every_ms=0.5) == 15
    assert gathered_ms(quantum(0, SIE_ADAPTIVE_MAX_QUANTUM_MS="40"), every_ms=0.5) == 40
    assert gathered_ms(quantum(0, SIE_ADAPTIVE_MAX_QUANTUM_MS="2"), every_ms=0.5) == 2
    assert quantum(0).seconds(1 + 2 * WINDOW_S) == 0.002


def test_gathering_is_the_longer_the_further_the_median_is_below_its_target() -> None:
    """SIE_ADAPTIVE_TARGET_P50_MS: at half the target it is half way between the bounds, from the target on the
    shortest.
    """
    assert gathered_ms(quantum(25), every_ms=0.5) == 8.5
    assert gathered_ms(quantum(25, SIE_ADAPTIVE_TARGET_P50_MS="25"), every_ms=0.5) == 2
    assert gathered_ms(quantum(25, SIE_ADAPTIVE_TARGET_P50_MS="100"), every_ms=0.5) == 11.75
    batch_quantum = quantum(400)
    for number in range(WINDOW):
        batch_quantum.answered(0.025, 1 + number / WINDOW)
    assert batch_quantum.seconds(2) == pytest.approx(0.0085)


class BarrierTokenizer:
    """A tokenizer whose calls wait until `count` of them run at once. `peak` is the most that ever ran at once."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._lock = threading.Lock()
        self._running = 0
        self.peak = 0

    def encode(self, texts: Sequence[str], truncate: Truncate, limit: int) -> list[Tokens]:
        with self._lock:
            self._running += 1
            self.peak = max(self.peak, self._running)
        self._barrier.wait(25)
        with self._lock:
            self._running -= 1
        return [Tokens(np.full(3, len(text), np.int32), 3) for text in texts]


@pytest.mark.parametrize(
    ("variable", "workers"), [({}, 4), ({"SIE_PREPROCESSOR_WORKERS": "1"}, 1), ({"SIE_PREPROCESSOR_WORKERS": "6"}, 6)]
)
async def test_as_many_texts_are_tokenised_at_once_as_there_are_preprocessor_workers(
    variable: dict[str, str], workers: int
) -> None:
    """SIE_PREPROCESSOR_WORKERS: a barrier inside the tokenizer opens only when this many threads are in it. There are
    never more.
    """
    pool = TokenizerPool(settings_of(**variable).preprocessor_workers)
    tokenizer = BarrierTokenizer(workers)
    texts = [["x" * (INLINE_CHARACTERS + 1 + number)] for number in range(3 * workers)]
    try:
        async with asyncio.timeout(30):
            works = [functools.partial(tokenizer.encode, group, "END", 0) for group in texts]
            encodings = await asyncio.gather(
                *(pool.run(len(group[0]), work) for group, work in zip(texts, works, strict=True))
            )
    finally:
        pool.close()
    assert tokenizer.peak == workers
    assert [tokens[0].ids.tolist() for tokens in encodings] == [[len(group[0])] * 3 for group in texts]


CANARY = "canary-5c1e"
KEYS = {"timestamp", "level", "logger", "message", "model", "request_id", "trace_id", "latency_ms", "worker", "key"}


async def test_what_python_itself_writes_is_a_line_too_and_quotes_nobody() -> None:
    """SIE_LOG_JSON: warnings, uncaught exceptions and names with lone surrogates are lines too."""
    code = f"""
import logging, threading, warnings
from sie_runtime.process import own_stderr
own_stderr(json=True)
warnings.warn("something is old")
logging.getLogger("sie.x").info("the file %s", "a" + chr(0xdc80))
thread = threading.Thread(target=int, args=("{CANARY}",), name="lane-0")
thread.start()
thread.join()
int("{CANARY}")
"""
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(done.communicate(), 60)
    entries = [msgspec.json.decode(line) for line in stderr.splitlines()]
    assert (done.returncode, [entry["level"] for entry in entries]) == (1, ["WARNING", "INFO", "CRITICAL", "CRITICAL"])
    assert all(set(entry) == KEYS for entry in entries)
    assert "something is old" in entries[0]["message"]
    assert entries[2]["message"].startswith("thread lane-0 ended because of an uncaught exception")
    assert CANARY.encode() not in stderr


@contextlib.contextmanager
def json_logs() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    configure_logging(json=True)
    try:
        yield
    finally:
        root.handlers[0].flush()
        root.handlers = before
        root.setLevel(level)


async def test_a_request_is_one_line_with_its_id_model_and_latency_and_no_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIE_LOG_JSON: successes and failures are logged. Inputs, ids, metadata, tokens and bad bodies have the canary."""
    with json_logs():
        async with InProcess(tmp_path) as cluster:
            gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN=f"{CANARY}-token")
            await cluster.sidecar()
            headers = {"authorization": f"Bearer {CANARY}-token"}
            item = {"id": CANARY, "text": CANARY, "metadata": {"note": CANARY}}
            odd = {"items": [item], "params": {"truncate": CANARY}}
            for body in ({"items": [item]}, odd, {"items": [{"text": [CANARY]}]}, {CANARY: CANARY}):
                answer = await gateway.client.post("/v1/encode/toy/one", json=body, headers=headers)
                assert answer.status_code in (200, 400)
            await gateway.client.post("/v1/encode/toy/one", content=f'{{"items": ["{CANARY}'.encode(), headers=headers)
            await gateway.encode("x", Authorization=f"Bearer {CANARY}")
            fourth = answer.headers["x-sie-request-id"]
    lines = capsys.readouterr().err.splitlines()
    entries = [msgspec.json.decode(line) for line in lines]
    requests = [
        entry for entry in entries if entry["logger"] == "sie.gateway" and entry["message"].startswith("encode ")
    ]
    assert len(requests) == 6
    assert requests[0]["model"] == "toy/one"
    assert requests[0]["latency_ms"] > 0
    assert requests[3]["request_id"] == fourth
    assert not [line for line in lines if CANARY in line]


async def test_more_replicas_than_brokers_are_a_named_refusal(nats: NatsServer, processes: Processes) -> None:
    """SIE_STREAM_REPLICAS."""
    with pytest.raises(SettingError, match=r"^SIE_STREAM_REPLICAS: got 3, but the broker is a single server"):
        await processes.gateway(SIE_NATS_URL=nats.url, SIE_STREAM_REPLICAS="3")


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
