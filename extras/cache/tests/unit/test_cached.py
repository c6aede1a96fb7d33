"""Requests with the cache of answers: what is computed once, what is never mixed, and what a key learns of others."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_adapter import FakeAdapter, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, until, until_told

from sie_cache import cached
from sie_cache.cached import CachedRuns
from sie_cache.memory import AnswerMemory
from sie_cli.main import main
from sie_contracts.errors import ErrorInfo, NotFound, QueueFull
from sie_contracts.models.aliases import Alias, Target
from sie_contracts.models.catalogue import Catalogue, answer_fingerprint, fingerprint, profile_fingerprint
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import RequestOptions
from sie_contracts.wire.heartbeats import AnswerErasure, ModelStatus, ServedEngine, ServedLora, ServedPrecision
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Priority, RunOptions, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference import reply
from sie_gateway.inference.answers import CachePolicy
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EntryChanged
from sie_gateway.inference.results import Chunk, InferRequest, RequestResult
from sie_gateway.inference.runner import OnChunk

LANE = Lane("_default", "cpu", "default")
MODEL = "toy/one"
CACHE = {"SIE_CACHE_BYTES": str(1 << 20)}
KEYS = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": "one-token-of-a-test,two-token-of-a-test"}


SEPARATE = CachePolicy(False, frozenset())  # keys do not share answers


# ---- one gateway, workers that a test drives


def vector(signed: str, text: str) -> bytes:
    return hashlib.sha256(f"{signed} {text}".encode()).digest()


class Worker:
    """All workers of a lane, with one entry, one precision and the digests of LoRAs. Heartbeats have these after
    `report`.
    """

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.precision = "float32"
        self.loras: dict[str, str] = {"org/x": "1"}
        self.reported: list[ModelStatus] = []
        self.report()

    def report(self) -> None:
        self.reported = [self._status()]

    def _status(self) -> ModelStatus:
        resolved = Catalogue.resolve_profile(self.entry, "default", self.entry.id)
        return ModelStatus(
            self.entry.id,
            "loaded",
            fingerprint=fingerprint(self.entry, resolved.load, self.precision),
            precision=ServedPrecision(self.precision),
            engine=ServedEngine("torch"),
            loras=tuple(ServedLora(name, digest) for name, digest in self.loras.items()),
        )

    def signed(self, run: RunOptions) -> str:
        """The fingerprint of an answer that is computed now."""
        own = profile_fingerprint(self._status().fingerprint, self.entry, "default")
        return answer_fingerprint(own, self.loras[run.lora] if run.lora else "", run.variant)


class Cluster:
    """`CachedRuns` before a worker. The inputs of a request wait at the worker until `go` is set. Each input is a
    chunk.
    """

    def __init__(self, entry: ModelEntry | None = None, policy: CachePolicy = SEPARATE) -> None:
        self.worker = Worker(entry or toy_entry())
        self.workers = {self.worker.entry.id: self.worker}
        self.memory = AnswerMemory(1 << 20, 60.0)
        fleet = cast("Fleet", SimpleNamespace(loaded=lambda lane, residency: self.workers[residency].reported))
        self.expected_s: float | None = None  # expected wait in the queue
        self.runs = CachedRuns(
            self.memory, policy, fleet, lambda result, number: None, lambda lane, priority: self.expected_s
        )
        self.go = asyncio.Event()
        self.go.set()
        self.held: dict[str, asyncio.Event] = {}  # texts whose chunk arrives only after the event
        self.computed: list[list[str]] = []
        self.failures: dict[str, ErrorInfo] = {}
        self.errors: list[Exception] = []

    async def compute(
        self,
        call: Call,
        positions: list[int],
        items: Sequence[RequestItem],
        finished: RequestResult,
        on_chunk: OnChunk | None,
    ) -> list[WorkResult]:
        texts = [item.text or "" for item in items]
        self.computed.append(texts)
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        run = finished.request.options.run
        signed = self.workers[finished.request.resolved.entry.id].signed(run)
        results = []
        for number, text in enumerate(texts):
            if text in self.held:
                await self.held[text].wait()
            failure = self.failures.get(text)
            outcome = Failed(failure) if failure else Ok({"dense": ArraySlice("|u1", (32,), 0)}, 3)
            block = vector(signed, run.prefix + text)
            results.append(WorkResult(call.work_id, number, "w", (outcome,), block, fingerprint=signed))
            if on_chunk is not None:
                on_chunk(number, results[-1])
        chunks = [Chunk(number, number + 1, 1) for number in range(len(items))]
        finished.add_results(positions, chunks, results, [1.0] * len(items))
        return results

    def request(
        self, *texts: str, lora: str = "", priority: Priority = "interactive", lane: Lane = LANE
    ) -> InferRequest:
        resolved = Catalogue.resolve_profile(self.worker.entry, "default", self.worker.entry.id)
        items = tuple(RequestItem(text) for text in texts)
        options = RequestOptions(RunOptions(lora=lora))
        return InferRequest("encode", resolved, items, {}, None, priority, options=options, lane=lane)

    async def run(
        self,
        *texts: str,
        key: str = "",
        budget_s: float = 5.0,
        request: InferRequest | None = None,
        cache: str = "",
        **more: Any,
    ) -> RequestResult:
        request = request or self.request(*texts, **more)
        headers = {"x-sie-cache": cache} if cache else {}
        call = Call("r", time.perf_counter(), headers, grant=Grant(key), budget_s=budget_s)
        return await self.runs.run(call, request, {}, list(range(len(request.items))), request.items, self.compute)

    def start(self, *texts: str, **more: Any) -> asyncio.Task[RequestResult]:
        return asyncio.create_task(self.run(*texts, **more))

    async def until_computed(self, count: int) -> None:
        await until(lambda: len(self.computed) >= count, f"{count} calls of compute")


def vectors(finished: RequestResult) -> list[bytes]:
    values = []
    for result, outcome in finished.outcomes:
        assert isinstance(outcome, Ok), outcome
        values.append(reply.array_of(result, outcome, "dense").tobytes())
    return values


async def test_inputs_that_are_cached_are_not_computed_and_answers_stay_in_order() -> None:
    cluster = Cluster()
    first = await cluster.run("a", "b")
    second = await cluster.run("c", "b", "d", "a")
    assert cluster.computed == [["a", "b"], ["c", "d"]]
    signed = first.fingerprint
    assert vectors(second) == [vector(signed, text) for text in ("c", "b", "d", "a")]
    assert (first.cache_status, second.cache_status) == ("miss", "partial")
    assert second.usage == {
        "prompt_tokens": 12,
        "total_tokens": 12,
        "truncated_items": [],
        "cached_items": 2,
        "cached_tokens": 6,
    }
    third = await cluster.run("a", "d")
    assert (third.cache_status, third.fingerprint, third.worker_results) == ("hit", signed, [])
    assert third.headers(0.0, timed=False)["X-SIE-Cache-Status"] == "hit"


async def test_equal_inputs_at_the_same_time_are_computed_once() -> None:
    cluster = Cluster()
    cluster.go.clear()
    runs = [cluster.start("a", str(number)) for number in range(5)]
    await cluster.until_computed(5)
    cluster.go.set()
    results = [await run for run in runs]
    assert sorted(text for texts in cluster.computed for text in texts) == ["0", "1", "2", "3", "4", "a"]
    assert {vectors(result)[0] for result in results} == {vector(results[0].fingerprint, "a")}
    assert [result.cache_status for result in results] == ["miss", *["partial"] * 4]
    assert not cluster.runs.flights


async def test_waiting_requests_go_on_when_the_first_one_is_cancelled() -> None:
    cluster = Cluster()
    cluster.go.clear()
    first = cluster.start("a")
    await cluster.until_computed(1)
    waiting = [cluster.start("a"), cluster.start("a")]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await cluster.until_computed(2)
    cluster.go.set()
    results = [await run for run in waiting]
    assert first.cancelled()
    assert {vectors(result)[0] for result in results} == {vector(results[0].fingerprint, "a")}
    assert not cluster.runs.flights


async def test_an_error_of_the_input_ends_all_requests_that_have_it() -> None:
    cluster = Cluster()
    cluster.go.clear()
    cluster.failures = {"bad": ErrorInfo("INVALID_INPUT", "text: too long", reason="too_long")}
    runs = [cluster.start("bad", "good") for _ in range(3)]
    await cluster.until_computed(1)
    await asyncio.sleep(0)
    cluster.go.set()
    for finished in [await run for run in runs]:
        assert [type(outcome) for _, outcome in finished.outcomes] == [Failed, Ok]
    assert cluster.computed == [["bad", "good"]]
    await cluster.run("bad")  # an error is not cached
    assert cluster.computed[-1] == ["bad"]


async def test_a_failure_of_a_worker_is_not_the_fault_of_the_input() -> None:
    cluster = Cluster()
    cluster.go.clear()
    cluster.failures = {"a": ErrorInfo("RESOURCE_EXHAUSTED", "no memory")}
    runs = [cluster.start("a") for _ in range(2)]
    await cluster.until_computed(1)
    await asyncio.sleep(0)
    cluster.go.set()
    await asyncio.gather(*runs)
    assert cluster.computed == [["a"], ["a"]]


async def test_a_request_waits_for_a_share_of_its_time_and_then_computes_its_input() -> None:
    cluster = Cluster()
    cluster.go.clear()
    first = cluster.start("a")
    await cluster.until_computed(1)
    hasty, patient = cluster.start("a", budget_s=0.02), cluster.start("a", budget_s=600)
    await cluster.until_computed(2)
    cluster.go.set()
    assert vectors(await first) == vectors(await patient) == vectors(await hasty)
    assert cluster.computed == [["a"], ["a"]]


async def test_a_request_waits_no_longer_than_its_own_computation_is_expected_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached, "SHORTEST_WAIT_S", 0.01)
    cluster = Cluster()
    cluster.go.clear()
    first = cluster.start("a", budget_s=600)
    await cluster.until_computed(1)
    cluster.expected_s = 300.0
    patient = cluster.start("a", budget_s=600)
    await asyncio.sleep(0)
    cluster.expected_s = 0.0
    hasty = cluster.start("a", budget_s=600)
    await cluster.until_computed(2)
    assert not patient.done()
    cluster.go.set()
    assert vectors(await first) == vectors(await patient) == vectors(await hasty)
    assert cluster.computed == [["a"], ["a"]]


async def test_an_answer_is_given_on_when_its_chunk_arrives() -> None:
    cluster = Cluster()
    cluster.held["b"] = asyncio.Event()
    large = cluster.start("a", "b")
    await cluster.until_computed(1)
    for _ in range(2):  # the second one comes after the answer to its input
        assert (await cluster.run("a", budget_s=600)).cache_status == "hit"
    assert not large.done()
    cluster.held["b"].set()
    await large
    assert cluster.computed == [["a", "b"]]
    assert (len(cluster.memory), len(cluster.runs.flights)) == (2, 0)


async def test_requests_do_not_wait_for_another_queue() -> None:
    cluster = Cluster()
    cluster.go.clear()
    first = cluster.start("a", budget_s=600)
    await cluster.until_computed(1)
    second = cluster.start("a", budget_s=600, lane=Lane("pool-b", "cpu", "default"))
    await cluster.until_computed(2)
    cluster.go.set()
    await asyncio.gather(first, second)


@pytest.mark.parametrize("failing", [1, 2])
async def test_one_of_the_waiting_requests_computes_an_input_whose_request_failed(failing: int) -> None:
    cluster = Cluster()
    cluster.go.clear()
    cluster.errors = [QueueFull("no room")] * failing
    first = cluster.start("a", budget_s=600)
    await cluster.until_computed(1)
    waiting = [cluster.start("a", budget_s=600) for _ in range(5)]
    await asyncio.sleep(0)
    cluster.go.set()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [isinstance(result, QueueFull) for result in results] == [True] * failing + [False] * (6 - failing)
    assert cluster.computed == [["a"]] * (failing + 1)


async def test_interactive_work_does_not_wait_for_bulk_work() -> None:
    cluster = Cluster()
    cluster.go.clear()
    bulk = cluster.start("a", priority="bulk")
    await cluster.until_computed(1)
    interactive, beside = cluster.start("a"), cluster.start("a", priority="bulk")
    await cluster.until_computed(2)
    cluster.go.set()
    await asyncio.gather(bulk, interactive, beside)
    assert cluster.computed == [["a"], ["a"]]


async def test_only_gives_cached_answers_and_computes_nothing() -> None:
    cluster = Cluster()
    with pytest.raises(NotFound) as caught:
        await cluster.run("a", "b", cache="only")
    assert (caught.value.reason, caught.value.status) == ("not_cached", 404)
    await cluster.run("a")
    with pytest.raises(NotFound, match="1 inputs"):
        await cluster.run("a", "b", cache="only")
    assert (await cluster.run("a", cache="only")).cache_status == "hit"
    assert cluster.computed == [["a"]]


async def test_no_store_reads_and_writes_nothing() -> None:
    cluster = Cluster()
    assert (await cluster.run("a", cache="no-store")).cache_status == "off"
    assert len(cluster.memory) == 0
    await cluster.run("a")
    await cluster.run("a", cache="no-store")
    assert cluster.computed == [["a"]] * 3


async def test_keys_do_not_share_answers_or_computations_unless_they_may() -> None:
    for is_shared, count in ((False, 2), (True, 1)):
        cluster = Cluster(policy=CachePolicy(is_shared, frozenset()))
        await cluster.run("a", key="one")
        assert (await cluster.run("a", key="two")).cache_status == ("hit" if is_shared else "miss")
        cluster.go.clear()
        cluster.computed.clear()
        runs = [cluster.start("b", key="one"), cluster.start("b", key="two")]
        await cluster.until_computed(count)
        cluster.go.set()
        await asyncio.gather(*runs)
        assert cluster.computed == [["b"]] * count


def test_answers_to_a_key_without_the_cache_are_not_cached() -> None:
    policy = SEPARATE
    assert policy.owner(Grant("k"), MODEL) == "k"
    assert policy.owner(Grant("k", caches=False), MODEL) is None


async def test_workers_that_differ_or_are_unknown_are_not_cached() -> None:
    cluster = Cluster()
    (float32,) = cluster.worker.reported
    cluster.worker.precision = "bfloat16"
    cluster.worker.report()
    (bfloat16,) = cluster.worker.reported
    unknown = msgspec.structs.replace(float32, fingerprint="0123456789abcdef")
    for reported in ([float32, bfloat16], [unknown], [float32, unknown], []):
        cluster.worker.reported = reported
        assert (await cluster.run("a")).cache_status == "off", reported
    cluster.worker.reported = [bfloat16, bfloat16]
    assert (await cluster.run("a")).cache_status == "miss"


async def test_cached_answers_do_not_stand_beside_those_of_a_worker_that_has_changed() -> None:
    """The worker restarts with another precision, and its heartbeat is late."""
    cluster = Cluster()
    await cluster.run("a")
    cluster.worker.precision = "bfloat16"
    finished = await cluster.run("a", "b")
    signed = cluster.worker.signed(RunOptions())
    assert vectors(finished) == [vector(signed, "a"), vector(signed, "b")]
    assert (finished.cache_status, finished.fingerprint) == ("miss", signed)
    assert cluster.computed == [["a"], ["b"], ["a", "b"]]
    assert len(cluster.memory) == 1, "an answer with an unexpected fingerprint is not cached"


PROMPTS = ("query: ", "passage: ", "")
PRECISIONS = ("float32", "bfloat16")
DIGESTS = "123"
ALIAS, OTHER = "search", "toy/two"


class ChangingCluster(Cluster):
    """Two models and an alias. The gateway's catalogue, the workers and their reports change one after the other, as
    they do in a real cluster.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workers = {MODEL: self.worker, OTHER: Worker(toy_entry(OTHER))}
        self.targets: list[str] = []
        # by time and model: fingerprints in use at workers, and those that the entry of the gateway can have
        self.in_use: list[dict[str, set[str]]] = []
        self.of_entry: list[dict[str, set[str]]] = []
        self.catalogue = Catalogue()
        self.fingerprints: dict[str, set[str]] = {}  # by model: those of the gateway's entry
        for worker in self.workers.values():
            self.write(worker.entry)
        self.write(Alias(ALIAS, (Target(MODEL),)))

    def write(self, document: ModelEntry | Alias) -> None:
        self.catalogue = self.catalogue.with_model(document.id, document, 1, "e:2")
        if isinstance(document, ModelEntry):
            self.fingerprints[document.id] = _fingerprints(document)

    def note(self) -> None:
        """Record the fingerprints of answers that workers compute now, and those that they have reported."""
        in_use, of_entry = {}, {}
        for model, worker in self.workers.items():
            (status,) = worker.reported
            reported = profile_fingerprint(status.fingerprint, worker.entry, "default")
            in_use[model] = {worker.signed(RunOptions(lora=lora)) for lora in ("", "org/x")}
            in_use[model] |= {reported, answer_fingerprint(reported, status.loras[0].digest, "")}
            of_entry[model] = self.fingerprints[model]
        self.in_use.append(in_use)
        self.of_entry.append(of_entry)
        self.targets.append(self.catalogue.resolve(ALIAS).entry.id)

    async def compute(
        self,
        call: Call,
        positions: list[int],
        items: Sequence[RequestItem],
        finished: RequestResult,
        on_chunk: OnChunk | None,
    ) -> list[WorkResult]:
        entry = finished.request.resolved.entry
        await self.go.wait()
        if entry != self.workers[entry.id].entry:  # the worker has the entry before or after that of the request
            raise EntryChanged(entry)
        return await super().compute(call, positions, items, finished, on_chunk)

    async def attempts(self, name: str, texts: Sequence[str], run: RunOptions, cache: str) -> RequestResult:
        """Plan and run a request, and plan it again if the entry of its model changes, as `Inference` does."""
        while True:
            resolved = self.catalogue.resolve(name)
            items = tuple(map(RequestItem, texts))
            request = InferRequest("encode", resolved, items, {}, options=RequestOptions(run), lane=LANE)
            try:
                return await self.run(request=request, cache=cache)
            except EntryChanged:
                await asyncio.sleep(0)


def _fingerprints(entry: ModelEntry) -> set[str]:
    """All fingerprints that answers with this entry can have."""
    load = Catalogue.resolve_profile(entry, "default", entry.id).load
    loaded = [fingerprint(entry, load, precision) for precision in PRECISIONS]
    profiles = [profile_fingerprint(base, entry, "default") for base in loaded]
    return {answer_fingerprint(profile, digest, "") for profile in profiles for digest in ("", *DIGESTS)}


class ChangedRun(NamedTuple):
    """A request and the time of its arrival, as an index of `ChangingCluster.in_use`."""

    began: int
    name: str
    texts: list[str]
    options: RunOptions
    task: asyncio.Task[RequestResult]


@pytest.mark.parametrize("seed", range(8))
async def test_no_answer_is_stale_or_mixed_in_any_interleaving(seed: int) -> None:
    """Aliases, entries of the gateway, entries of workers, precisions, LoRAs and reports change while requests are
    under way. Each reply has the vectors of one fingerprint and of the options of its request. Between the request and
    its reply, a worker used or reported this fingerprint, and the gateway had an entry to which it belongs; of an
    alias, the entry of a target that it had in this time.
    """
    draw = random.Random(seed)
    cluster = ChangingCluster()
    runs: list[ChangedRun] = []
    ends: dict[asyncio.Task[RequestResult], int] = {}
    changes = ("alias", "entry", "worker", "precision", "lora", "report", "report", "cancel", "erase")
    steps = (*changes, *("request",) * 12, *("go",) * 4)

    def started(name: str, texts: list[str], options: RunOptions) -> ChangedRun:
        cache = draw.choice(("", "", "", "no-store"))
        task = asyncio.create_task(cluster.attempts(name, texts, options, cache))
        task.add_done_callback(lambda task: ends.setdefault(task, len(cluster.in_use)))
        return ChangedRun(len(cluster.in_use) - 1, name, texts, options, task)

    cluster.note()
    for _ in range(250):
        model = draw.choice((MODEL, OTHER))
        worker = cluster.workers[model]
        match draw.choice(steps):
            case "request":
                texts = [draw.choice("abcd") for _ in range(draw.randint(1, 4))]
                options = RunOptions(lora=draw.choice(("", "org/x")), prefix=draw.choice(PROMPTS))
                runs.append(started(draw.choice((ALIAS, model)), texts, options))
            case "alias":
                cluster.write(Alias(ALIAS, (Target(model),)))
            case "entry":
                prompts = {"query": draw.choice(PROMPTS)}
                cluster.write(msgspec.structs.replace(worker.entry, prompts=prompts))
            case "worker":
                worker.entry = cluster.catalogue.entries[model]
                if draw.random() < 0.5:
                    worker.report()
            case "precision":
                worker.precision = draw.choice(PRECISIONS)
            case "lora":
                worker.loras["org/x"] = draw.choice(DIGESTS)
            case "report":
                worker.report()
            case "go":
                cluster.go.set()
                await turns(draw.randrange(8))
                cluster.go.clear()
            case "cancel" if runs:
                draw.choice(runs).task.cancel()
            case "erase":
                await cluster.memory.erase(AnswerErasure(model=model))
        cluster.note()
        await turns(draw.randrange(6))
    for model, worker in cluster.workers.items():
        worker.entry = cluster.catalogue.entries[model]
    cluster.note()
    cluster.go.set()
    await asyncio.gather(*(run.task for run in runs), return_exceptions=True)
    hits = 0
    for began, name, texts, options, task in runs:
        if task.cancelled():
            continue
        finished = task.result()
        hits += finished.cached_items
        signed, during = finished.fingerprint, slice(began, ends[task] + 1)
        assert vectors(finished) == [vector(signed, options.prefix + text) for text in texts], "mixed"
        targets = set(cluster.targets[during]) if name == ALIAS else {name}
        for history in (cluster.in_use, cluster.of_entry):
            assert any(signed in at[target] for at in history[during] for target in targets), "stale"
    assert hits
    assert not cluster.runs.flights


async def turns(count: int) -> None:
    """Let the event loop run some iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---- a whole cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    entries = (toy_entry(family="text-encoder"), toy_entry("toy/two", family="text-encoder"))
    async with InProcess(tmp_path, *entries) as cluster:
        yield cluster


async def started(cluster: InProcess, **environ: str) -> tuple[FakeAdapter, GatewayProcess]:
    """A gateway with a cache, and a worker whose heartbeats say that the model is loaded."""
    adapter, gateway = await cluster.adapter(), await cluster.gateway(**{**CACHE, **environ})
    await cluster.sidecar(adapter)
    if "SIE_AUTH_MODE" in environ:
        gateway.client.headers["authorization"] = "Bearer one-token-of-a-test"
    number = 0

    async def is_cached() -> bool:
        nonlocal number
        number += 1
        return (await gateway.encode(f"warm {number}")).headers.get("x-sie-cache-status") == "miss"

    await until_told(is_cached, "a heartbeat with the loaded model")
    return adapter, gateway


def rows(adapter: FakeAdapter) -> int:
    return sum(len(batch.lengths) // 4 for batch in adapter.batches)


def is_right(answer: httpx.Response, *texts: str) -> bool:
    slots = answer.json()["items"]
    return all(
        np.allclose(slot["dense"]["values"], vector_of(ids_of(text)), atol=1e-6)
        for slot, text in zip(slots, texts, strict=True)
    )


async def test_a_gateway_answers_repeated_inputs_without_a_worker(cluster: InProcess) -> None:
    """SIE_CACHE_BYTES switches the cache on."""
    adapter, gateway = await started(cluster)
    first = await gateway.encode("a", "b")
    before = rows(adapter)
    second, third = await gateway.encode("b", "a"), await gateway.encode("b", "c")
    assert rows(adapter) == before + 1
    assert is_right(second, "b", "a")
    assert is_right(third, "b", "c")
    assert (
        second.headers["x-sie-fingerprint"] == third.headers["x-sie-fingerprint"] == first.headers["x-sie-fingerprint"]
    )
    statuses = [answer.headers["x-sie-cache-status"] for answer in (first, second, third)]
    assert statuses == ["miss", "hit", "partial"]
    assert (second.json()["usage"]["cached_items"], third.json()["usage"]["cached_items"]) == (2, 1)
    assert first.json()["usage"]["total_tokens"] == second.json()["usage"]["total_tokens"]
    assert "cached_items" not in first.json()["usage"]
    hits = await gateway.metric("sie_gateway_cache_inputs_total", result="hit")
    assert hits == 3
    assert await gateway.metric("sie_gateway_cache_bytes") > 0


async def test_an_answer_is_computed_again_after_its_time(cluster: InProcess) -> None:
    """SIE_CACHE_TTL_S bounds the age of an answer."""
    _, gateway = await started(cluster, SIE_CACHE_TTL_S="1")
    await gateway.encode("a")

    async def is_computed() -> bool:
        answer = await gateway.encode("a", x_sie_cache="only")
        return answer.status_code == 404

    await until_told(is_computed, "the end of the answer")


async def test_answers_of_an_excluded_model_are_computed_each_time(cluster: InProcess) -> None:
    adapter, gateway = await started(cluster, SIE_CACHE_EXCLUDED_MODELS="toy/two")
    await gateway.encode("a", model="toy/two")
    before = rows(adapter)
    answer = await gateway.encode("a", model="toy/two")
    assert (rows(adapter), answer.headers["x-sie-cache-status"]) == (before + 1, "off")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_key_cannot_see_what_another_key_has_sent(cluster: InProcess, shared: bool) -> None:
    """Without SIE_CACHE_SHARED an input of another key is handled like an input that nobody has sent. The evidence is
    whether the input runs again, the headers and the body, but no time.
    """
    adapter, gateway = await started(cluster, SIE_CACHE_SHARED=str(shared).lower(), **KEYS)
    await gateway.encode("a secret")
    assert (await gateway.encode("a secret")).headers["x-sie-cache-status"] == "hit"
    gateway.client.headers["authorization"] = "Bearer two-token-of-a-test"
    before = rows(adapter)

    def evidence(answer: httpx.Response) -> tuple[Any, ...]:
        names = [name for name in answer.headers if "time" not in name and "id" not in name and name != "date"]
        headers = {name: answer.headers[name] for name in names if name != "content-length"}
        body = answer.json()
        return headers, sorted(body), body.get("usage"), body.get("error", {}).get("message")

    probe = await gateway.encode("a secret", x_sie_cache="only")
    assert probe.status_code == (200 if shared else 404)
    guess, new = await gateway.encode("a secret"), await gateway.encode("a secreT")
    only = [await gateway.encode(text, x_sie_cache="only") for text in ("a secret 2", "b secret 2")]
    assert rows(adapter) == before + (1 if shared else 2)
    assert (evidence(guess) == evidence(new)) is not shared
    assert evidence(only[0]) == evidence(only[1])


async def test_a_request_after_an_erasure_gets_no_answer_that_was_computed_before_it() -> None:
    """The first request has the answer of one input already, and waits for the other one."""
    cluster = Cluster()
    cluster.held["b"] = asyncio.Event()
    first = cluster.start("a", "b")
    await cluster.until_computed(1)
    joined = await cluster.run("a")
    assert (joined.cache_status, cluster.computed) == ("hit", [["a", "b"]])
    await cluster.memory.erase(AnswerErasure())
    later = await cluster.run("a")
    assert (later.cache_status, cluster.computed) == ("miss", [["a", "b"], ["a"]])
    cluster.held["b"].set()
    await first
    assert len(cluster.memory) == 1, "the answer of the later request alone"


async def test_an_administrator_sees_and_erases_answers_at_all_gateways(cluster: InProcess) -> None:
    tokens = {**KEYS, "SIE_ADMIN_TOKEN": "admin-token-of-a-test"}
    _, first = await started(cluster, **tokens)
    second = await cluster.gateway(**CACHE, **tokens)
    second.client.headers["authorization"] = first.client.headers["authorization"]
    admin = {"authorization": "Bearer admin-token-of-a-test"}

    async def state(gateway: GatewayProcess) -> dict[str, Any]:
        return dict((await gateway.client.get("/v1/cache", headers=admin)).json())

    async def erase(**selection: Any) -> httpx.Response:
        return await first.client.post("/v1/cache/erase", json=selection, headers=admin)

    async def is_known() -> bool:
        return (await state(first))["gateways"] == 2

    await until_told(is_known, "the second gateway")
    for gateway in (first, second):

        async def is_hit(gateway: GatewayProcess = gateway) -> bool:
            return (await gateway.encode("a", "b")).headers["x-sie-cache-status"] == "hit"

        await until_told(is_hit, "a hit")
    shown = (await state(second))["models"]
    assert shown == [{"model": MODEL, "key": "static-1", "answers": 2}]
    assert (await erase(text="b")).json() == {"answers": 1, "gateways": 2}

    async def is_erased(count: int) -> bool:
        return (await state(second))["answers"] == count

    await until_told(lambda: is_erased(1), "the erasure at the second gateway")
    assert (await second.encode("a", "b")).headers["x-sie-cache-status"] == "partial"
    assert (await erase(key="static-2")).json()["answers"] == 0
    assert (await erase(model=MODEL, key="static-1")).json()["answers"] > 0
    await until_told(lambda: is_erased(0), "the erasure at the second gateway")
    for wrong in ({}, {"all": True, "model": MODEL}, {"query": "q"}, {"text": 1}):
        refused = await erase(**wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "INVALID_INPUT"), wrong
    for body in (b'{"model":"\xff"}', b'{"model":' + b"[" * 3000 + b"]" * 3000 + b"}"):
        refused = await first.client.post("/v1/cache/erase", content=body, headers=admin)
        error = refused.json()["error"]
        assert (refused.status_code, error["reason"], error["param"]) == (400, "malformed", "body")
    assert (await first.client.get("/v1/cache")).status_code == 403
    assert (await first.client.post("/v1/cache/erase", json={"all": True})).status_code == 403


async def test_the_command_shows_and_erases_cached_answers(cluster: InProcess) -> None:
    _, gateway = await started(cluster, SIE_ADMIN_TOKEN="admin-token-of-a-test")
    await gateway.encode("a")
    environ = {"SIE_ADMIN_TOKEN": "admin-token-of-a-test"}

    async def sie(*words: str) -> Result:
        argv = ["cache", *words, "--url", gateway.url]
        return await asyncio.to_thread(CliRunner(env=environ).invoke, main, argv)

    shown = await sie("status")
    assert shown.exit_code == 0, shown.output
    assert MODEL in shown.output
    erased = await sie("erase", "--text", "a")
    assert erased.output.startswith("1 answer erased at "), erased.output
    assert (await sie("erase")).exit_code == 2
    assert (await sie("erase", "--all", "--model", MODEL)).exit_code == 2
    assert (await gateway.encode("a")).headers["x-sie-cache-status"] == "miss"
