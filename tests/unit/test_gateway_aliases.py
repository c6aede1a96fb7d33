"""Aliases at a gateway: the names in an answer, the choice of a target, and shadows, which change no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from fake_adapter import FakeAdapter, toy_entry
from inprocess import GatewayProcess, InProcess, Source, until

from sie_contracts.errors import ErrorInfo, InvalidInput, ModelLoadFailed, ModelLoading, SIEError
from sie_contracts.models.aliases import Alias, choose
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import parse_document
from sie_contracts.models.options import RequestOptions
from sie_contracts.wire import messages, topology
from sie_contracts.wire.configs import ConfigDelta, ConfigExport, ConfigModel
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import PRIORITIES, Failed, Ok, Priority, RunOptions, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.grant import Grant
from sie_gateway.inference import shadow
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EntryChanged
from sie_gateway.inference.results import Chunk, InferRequest, RequestResult
from sie_gateway.inference.shadow import Shadows, cosines, rank_agreement
from sie_gateway.metrics import Metrics
from sie_runtime.ranks import spearman

ONE, TWO = toy_entry("toy/one"), toy_entry("toy/two", prompts={"document": "passage: {text}"})


def alias(*targets: Any, name: str = "search", **more: Any) -> Alias:
    parsed_alias = parse_document({"id": name, "alias": list(targets), **more})
    assert isinstance(parsed_alias, Alias)
    return parsed_alias


class Aliased(Source):
    """A source with aliases beside its models."""

    def __init__(self, *entries: Any) -> None:
        super().__init__(*entries)
        self.aliases: dict[str, Alias] = {}

    async def export(self) -> ConfigExport:
        base_export = await super().export()
        more = tuple(
            ConfigModel(name, msgspec.to_builtins(alias_entry), self._revision)
            for name, alias_entry in self.aliases.items()
        )
        return msgspec.structs.replace(base_export, models=(*base_export.models, *more))


class Served(NamedTuple):
    cluster: InProcess
    gateway: GatewayProcess
    adapter: FakeAdapter
    source: Aliased

    async def write(self, alias_entry: Alias) -> None:
        """Write as the config service does: store, then announce."""
        self.source.aliases[alias_entry.id] = alias_entry
        await self._announce(alias_entry.id, msgspec.to_builtins(alias_entry))

    async def _announce(self, name: str, entry: dict[str, Any] | None) -> None:
        before = self.source.present_epoch
        self.source._revision += 1
        delta = ConfigDelta("sie-config", before, self.source.present_epoch, name, 1, entry)
        await self.cluster.send(topology.config_subject("default"), messages.encode(delta))

    async def shadows(self, result: str) -> float:
        return await self.gateway.metric("sie_gateway_shadows_total", alias="search", result=result)

    async def get(self, path: str) -> Any:
        return (await self.gateway.client.get(path)).json()

    async def targets(self, count: int) -> dict[str, Any]:
        """Return the alias as the models API shows it, once it has `count` targets."""
        async with asyncio.timeout(30):
            while True:
                info: dict[str, Any] = await self.get("/v1/models/search")
                if len(info["alias"]["targets"]) == count:
                    return info
                await asyncio.sleep(0.01)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with InProcess(tmp_path) as cluster:
        source = cluster.source = Aliased(ONE, TWO)
        source.aliases["search"] = alias("toy/one")
        gateway = await cluster.gateway()
        adapter = await cluster.adapter()
        await cluster.sidecar(adapter)
        yield Served(cluster, gateway, adapter, source)


async def test_an_answer_names_what_served_it_and_a_flip_is_one_write(served: Served) -> None:
    """The body names the requested model (contract 13.1), the headers the model that answered."""
    direct = await served.gateway.encode("a text", model="toy/one")
    first = await served.gateway.encode("a text", model="search")
    assert (first.json()["model"], first.json()["items"]) == ("search", direct.json()["items"])
    named = ("x-sie-model", "x-sie-model-revision", "x-sie-fingerprint")
    assert [first.headers[name] for name in named] == [direct.headers[name] for name in named]
    assert (first.headers["x-sie-alias"], "x-sie-alias" in direct.headers) == ("search", False)
    await served.write(alias("toy/two"))
    async with asyncio.timeout(30):
        while (second := await served.gateway.encode("a text", model="search")).headers["x-sie-model"] == "toy/one":
            assert second.headers["x-sie-fingerprint"] == first.headers["x-sie-fingerprint"]
    assert second.headers["x-sie-model"] == "toy/two"
    assert second.headers["x-sie-fingerprint"] != first.headers["x-sie-fingerprint"]
    body = {"model": "search", "input": ["a text"]}
    openai = await served.gateway.client.post("/v1/embeddings", json=body)
    assert (openai.json()["model"], openai.headers["x-sie-model"], openai.headers["x-sie-alias"]) == (
        "search",
        "toy/two",
        "search",
    )
    assert await served.gateway.metric("sie_gateway_alias_requests_total", alias="search", model="toy/two") >= 2


async def test_the_models_api_and_the_config_reads_show_aliases(served: Served) -> None:
    await served.write(alias({"model": "toy/one", "weight": 3}, "toy/two", shadow="toy/two", force=True))
    info = await served.targets(2)
    targets = [{"model": "toy/one", "weight": 3}, {"model": "toy/two", "weight": 1}]
    empty_figures = {"copies": {}, "cosine": None, "rank": None, "served_ms": None, "shadow_ms": None}
    assert info["alias"] == {"targets": targets, "shadow": {"model": "toy/two", "share": 1.0, "figures": empty_figures}}
    target_info = await served.get("/v1/models/toy/one")
    same = {name: value for name, value in info.items() if name not in ("id", "name", "owned_by", "alias")}
    assert same == {name: value for name, value in target_info.items() if name not in ("id", "name", "owned_by")}
    listed = (await served.get("/v1/models"))["data"]
    assert [model["id"] for model in listed] == ["toy/one", "toy/two", "search"]
    assert listed[-1] == info
    configs = (await served.get("/v1/configs/models"))["models"]
    written = [{"model": "toy/one", "weight": 3}, {"model": "toy/two"}]
    assert [config for config in configs if "alias" in config] == [
        {"model_id": "search", "profiles": ["default"], "source": "catalogue", "alias": written}
    ]
    assert (await served.get("/v1/configs/models/search"))["shadow"] == {"model": "toy/two"}
    assert (await served.get("/v1/configs/models/search/status"))["bundles"] == []
    resolved = (await served.gateway.client.post("/v1/configs/resolve", json={"model": "search"})).json()
    assert (resolved["model"], resolved["alias"]) == ("toy/one", "search")


async def test_a_route_key_keeps_its_target(served: Served) -> None:
    both = alias("toy/one", "toy/two", force=True)
    await served.write(both)
    await served.targets(2)
    keys = [f"index {number}" for number in range(12)]
    expected_models = {key: choose(both, f"named {key}").model for key in keys}
    assert set(expected_models.values()) == {"toy/one", "toy/two"}
    for _ in range(2):
        for key in keys:
            assert (await served.gateway.encode("x", model="search", X_SIE_Route_Key=key)).headers[
                "x-sie-model"
            ] == expected_models[key]
    body = {"model": "search", "input": "x"}
    for key in keys[:4]:
        answer = await served.gateway.client.post("/v1/embeddings", json=body, headers={"X-SIE-Route-Key": key})
        assert answer.headers["x-sie-model"] == expected_models[key]
    nobody = {(await served.gateway.encode("x", model="search")).headers["x-sie-model"] for _ in range(6)}
    assert nobody == {choose(both, "client 127.0.0.1").model}
    for model in ("search", "toy/one"):  # "toy/one" was named before, so the gateway need not resolve it
        await served.gateway.encode("x", model=model)
        wrong = await served.gateway.encode("x", model=model, X_SIE_Route_Key="k" * 129)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "X-SIE-Route-Key")


async def test_a_worker_preloads_each_target_of_an_alias(served: Served) -> None:
    served.source.aliases["search"] = alias("toy/two", {"model": "toy/one", "weight": 3}, force=True)
    adapter = await served.cluster.adapter("other.sock")
    await served.cluster.sidecar(adapter, SIE_PRELOAD_MODELS="search")
    assert adapter.loads == ["toy/one", "toy/two"]


# ---- shadows


async def test_a_shadow_is_measured_and_changes_no_answer(served: Served) -> None:
    plain = (await served.gateway.encode("a text", "another", model="search")).json()["items"]
    await served.write(alias("toy/one", shadow="toy/two"))
    requests = 3  # the one before the loop, and two after it
    async with asyncio.timeout(30):
        while not await served.shadows("done"):
            answer = await served.gateway.encode("a text", "another", model="search")
            requests += 1
            assert (answer.status_code, answer.json()["items"], answer.headers["x-sie-model"]) == (
                200,
                plain,
                "toy/one",
            )
    labels = {"alias": "search", "model": "toy/two"}
    answers = [(await served.gateway.encode("a text", model=model)).json() for model in ("toy/one", "toy/two")]
    cosine = float(np.dot(*(answer["items"][0]["dense"]["values"] for answer in answers)))
    done = await served.shadows("done")
    assert await served.gateway.metric("sie_gateway_shadow_cosine_count", **labels) == 2 * done
    assert cosine < 0.999  # the second model reads a prompt before each text
    assert await served.gateway.metric("sie_gateway_shadow_cosine_bucket", **labels, le="0.999") >= done
    assert await served.gateway.metric("sie_gateway_shadow_seconds_count", **labels, side="served") == done
    for info in (await served.get("/v1/models/search"), (await served.get("/v1/models?filter=search"))["models"][0]):
        figures = info["alias"]["shadow"]["figures"]
        assert figures["copies"]["done"] == done
        assert figures["cosine"] < 0.999
        assert figures["rank"] is None
        assert min(figures["served_ms"], figures["shadow_ms"]) > 0
    assert await served.gateway.metric("sie_gateway_requests_total", endpoint="encode", status="200") == requests


async def test_an_answer_waits_for_no_shadow_and_a_gateway_that_ends_withdraws_it(served: Served) -> None:
    """The second model never finishes loading: one copy waits for it, all others are dropped."""
    await served.gateway.encode("a text", model="search")
    served.adapter.hold_loads = True
    await served.write(alias("toy/one", shadow="toy/two"))
    async with asyncio.timeout(30):
        while not await served.shadows("cold"):
            assert (await served.gateway.encode("a text", model="search")).status_code == 200
    await until(lambda: len(served.adapter.loads) > 1, "the copy's load to begin")
    assert served.adapter.loads == ["toy/one", "toy/two"]
    assert await asyncio.wait_for(served.gateway.end(), 10) == 0


# ---- the choice of requests that are copied, without a cluster

CATALOGUE = Catalogue.from_documents(
    {"toy/one": ONE, "toy/two": TWO, "search": alias("toy/one", shadow="toy/two")}, {}, {}, "test:1"
)
LANE = Lane("_default", "cpu", "default")
VECTOR = np.arange(1, 9, dtype="<f4")


def finished(
    model: str = "search", *, values: Any = (VECTOR, VECTOR), scores: tuple[float, ...] = (), **run: Any
) -> RequestResult:
    """An answer of a request for `model`: dense vectors, or scores."""
    count = len(scores or values)
    items = tuple(RequestItem(text=f"text {number}") for number in range(count))
    options = RequestOptions(RunOptions(**run))
    request_result = RequestResult(
        InferRequest("encode", CATALOGUE.resolve(model), items, {}, options=options, lane=LANE), {}
    )
    outcomes: list[Any] = [Ok({}, score=score) for score in scores]
    block = b""
    for value in () if scores else values:
        if isinstance(value, ErrorInfo):
            outcomes.append(Failed(value))
            continue
        outcomes.append(Ok({"dense": messages.ArraySlice("<f4", value.shape, len(block))}))
        block += value.astype("<f4").tobytes()
    result = WorkResult("r", 0, "w", tuple(outcomes), block)
    request_result.add_results(list(range(count)), [Chunk(0, count, 1)], [result], [12.0])
    return request_result


class Harness:
    """The parts of a gateway that Shadows uses."""

    def __init__(self, **shadow_of: Any) -> None:
        self.catalogue = CATALOGUE.with_model(
            "search", alias("toy/one", shadow={"model": "toy/two", **shadow_of}), 2, "test:2"
        )
        self.hosted: list[Heartbeat] = [_beat(("toy/two", "loaded"))]
        self.workers = [_beat(("toy/one", "loaded"), slots=2)]
        self.wait_s: float | None = 0.0
        self.waits: Priority = "bulk"
        self.answer: SIEError | EntryChanged | RequestResult = finished("toy/two")
        self.ran: list[tuple[Call, InferRequest]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.now_s = 100.0
        self.metrics = Metrics()
        self.shadows = Shadows(lambda: self.catalogue, self, self, self.metrics, self.run, lambda: self.now_s)  # type: ignore[arg-type]

    def lane(self, resolved: Any, **_: Any) -> Lane:
        return LANE

    def hosts(self, lane: Lane, residency: str) -> list[Heartbeat]:
        return self.hosted

    def of_lane(self, lane: Lane) -> list[Heartbeat]:
        return self.workers

    def expected_s(self, lane: Lane, priority: Priority) -> float | None:
        return self.wait_s if priority == self.waits else 0.0

    async def run(self, call: Call, request: InferRequest) -> RequestResult:
        self.ran.append((call, request))
        await self.gate.wait()
        if isinstance(self.answer, SIEError | EntryChanged):
            raise self.answer
        return self.answer

    async def after(
        self, request_result: RequestResult | None = None, *, settle: bool = True, **call: Any
    ) -> dict[str, float]:
        """Return the counts of shadows by their result after one more request."""
        request_result = request_result or finished()
        self.shadows.after(Call("1", 0.0, {"authorization": "Bearer x", "x-sie-pool": "p"}, **call), request_result)
        if settle:
            await until(lambda: not self.shadows._tasks, "the copies to end")
        samples = [
            sample
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "sie_gateway_shadows_total"
        ]
        return {sample.labels["result"]: sample.value for sample in samples}


def _beat(*models: tuple[str, Any], slots: int = 0) -> Heartbeat:
    statuses = tuple(ModelStatus(name, state) for name, state in models)
    return Heartbeat("w", "_default", "cpu", "default", ready=True, version="", models=statuses, slots=slots)


async def test_a_copy_is_bulk_names_nobody_and_is_cut() -> None:
    harness = Harness()
    texts = tuple(np.ones(8, "<f4") for _ in range(shadow.MAX_ITEMS + 3))
    assert await harness.after(finished(values=texts)) == {"done": 1}
    ((call, request),) = harness.ran
    # the pool of the lane that was checked, which X-SIE-Machine-Profile may have named
    assert call.headers == {"x-sie-pool": LANE.pool, "x-sie-priority": "bulk", "x-sie-cache": "no-store"}
    assert (call.grant.key, call.grant.name) == (shadow.KEY, shadow.KEY)
    assert (request.priority, request.resolved.canonical, len(request.items)) == ("bulk", "toy/two", shadow.MAX_ITEMS)


async def test_the_share_is_exact() -> None:
    harness = Harness(share=0.3)
    for _ in range(20):
        counted = await harness.after()
    assert counted == {"done": 6}


async def test_at_most_so_many_are_in_flight_and_the_others_are_dropped() -> None:
    harness = Harness()
    harness.gate.clear()
    for _ in range(shadow.MAX_IN_FLIGHT + 3):
        counted = await harness.after(settle=False)
    assert counted == {"busy": 3}
    await harness.shadows.close()
    assert not harness.shadows._tasks


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize(("wait_s", "counted"), [(0.0, "done"), (0.2, "done"), (0.3, "loaded"), (None, "loaded")])
async def test_a_lane_in_which_work_waits_gets_no_copies(
    priority: Priority, wait_s: float | None, counted: str
) -> None:
    harness = Harness()
    harness.wait_s, harness.waits = wait_s, priority
    assert await harness.after() == {counted: 1}


@pytest.mark.parametrize(
    ("workers", "counted"),
    [
        ([_beat()], "done"),
        ([_beat(("toy/one", "loaded"), slots=2)], "done"),
        ([_beat(("toy/one", "loaded"), slots=1)], "cold"),
        ([_beat(("toy/one", "loaded"))], "cold"),
        ([_beat(("toy/one", "loaded"), ("toy/x", "loading"), slots=2)], "cold"),
        ([], "cold"),
    ],
)
async def test_a_shadow_takes_no_model_s_place(workers: list[Heartbeat], counted: str) -> None:
    """A copy loads a cold model only on a worker that has room beside its loaded models."""
    harness = Harness()
    harness.hosted, harness.workers = [], workers
    assert await harness.after() == {counted: 1}


async def test_one_copy_opens_a_cold_model() -> None:
    harness = Harness()
    harness.hosted = []
    harness.gate.clear()
    await harness.after(settle=False)
    assert await harness.after(settle=False) == {"cold": 1}
    harness.gate.set()
    assert await harness.after() == {"cold": 2, "done": 1}
    assert await harness.after() == {"cold": 2, "done": 2}


@pytest.mark.parametrize(
    ("answer", "counted", "pause_s"),
    [
        (ModelLoadFailed("x"), "failed", shadow.PAUSE_S),
        (ModelLoading("x"), "cold", shadow.SHORT_PAUSE_S),
        (EntryChanged(CATALOGUE.entries["toy/two"]), "failed", shadow.SHORT_PAUSE_S),
        (InvalidInput("x"), "unsuited", 0.0),
        (finished("toy/two", values=(ErrorInfo("INFERENCE_ERROR", "x"),) * 2), "failed", shadow.PAUSE_S),
        (finished("toy/two", values=(VECTOR, ErrorInfo("INFERENCE_ERROR", "x"))), "done", 0.0),
    ],
)
async def test_after_a_failure_there_is_a_pause(
    answer: SIEError | EntryChanged | RequestResult, counted: str, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness()
    harness.answer = answer
    assert await harness.after() == {counted: 1}
    assert ("paused" in await harness.after()) is bool(pause_s)
    harness.now_s += pause_s
    assert (await harness.after())[counted] == (2 if pause_s else 3)
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_is_not_copied() -> None:
    """The cases are an operation that the second model lacks, an answer that is too large, a request by the name of the
    model, and a copy.
    """
    harness = Harness()
    assert await harness.after(finished("toy/one")) == {}
    assert await harness.after(grant=Grant(shadow.KEY)) == {}
    for operation, counts in (("tokenize", {}), ("score", {"unsuited": 1})):
        other = finished()
        other.request = msgspec.structs.replace(other.request, operation=operation)
        assert await harness.after(other) == counts
    big = np.ones(shadow.MAX_VALUES // 2 + 8, "<f4")
    assert await harness.after(finished(values=(big, big))) == {"unsuited": 1, "large": 1}
    assert await harness.after(finished(values=(ErrorInfo("INFERENCE_ERROR", "x"),))) == {"unsuited": 1, "large": 1}
    harness.catalogue = CATALOGUE.with_model("search", alias("toy/one"), 3, "test:3")
    assert await harness.after() == {"unsuited": 1, "large": 1}


def test_only_single_vectors_of_one_width_in_floats_are_compared() -> None:
    turned = VECTOR[::-1].copy()
    cosine = float(VECTOR @ turned / (VECTOR @ VECTOR))
    assert cosines(finished(), finished(values=(VECTOR, turned))) == pytest.approx([1.0, cosine])
    assert cosines(finished(), finished(values=(VECTOR[:4], turned))) == pytest.approx([cosine])
    assert cosines(finished(values=(0 * VECTOR, VECTOR)), finished()) == pytest.approx([1.0])
    assert cosines(finished(), finished(values=(ErrorInfo("INFERENCE_ERROR", "x"), VECTOR))) == pytest.approx([1.0])
    of_chunks = finished(values=(np.stack([VECTOR, VECTOR]), VECTOR))
    assert cosines(of_chunks, of_chunks) == pytest.approx([1.0])
    assert cosines(finished(), finished(dtype="int8")) == cosines(finished(), finished(outputs=("sparse",))) == []


def test_ranks_are_compared_where_there_are_three() -> None:
    assert rank_agreement(finished(scores=(1.0, 2.0)), finished(scores=(1.0, 2.0))) is None
    assert rank_agreement(finished(scores=(1.0, 2.0, 9.0)), finished(scores=(0.1, 0.2, 0.3))) == pytest.approx(1.0)
    assert rank_agreement(finished(scores=(1.0, 2.0, 9.0)), finished(scores=(3.0, 2.0, 1.0))) == pytest.approx(-1.0)
    # scipy.stats.spearmanr([1, 2, 2, 4, 0], [1, 3, 2, 2, 0.5])
    assert spearman(np.array([1, 2, 2, 4, 0]), np.array([1, 3, 2, 2, 0.5])) == pytest.approx(0.763157894736842)
    assert spearman(np.array([1, 1, 1]), np.array([1, 2, 3])) is None


async def test_a_fault_of_the_shadow_s_own_reaches_nobody(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.lane = None  # type: ignore[method-assign,assignment]
    assert await harness.after() == {}
    assert "a request of alias search could not be copied" in caplog.text
