"""Several devices of one worker: the choice of a device, and one sidecar before two adapters.

gateway ──► sidecar ──► a.sock (device 0)
                  └───► a.sock.1 (device 1)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_adapter import FakeAdapter, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, SidecarProcess, until, until_told

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import DeviceBeat
from sie_sidecar import link
from sie_sidecar.batch import BatchLimits
from sie_sidecar.devices import CHECKS_BEHIND, DeviceView, SecondCopies, choose
from sie_sidecar.intake import Prepare, batch_parts

GIB = 1 << 30
EMPTY = DeviceView(connected=True, free_bytes=8 * GIB, usable_bytes=10 * GIB)
LOADED = replace(EMPTY, loaded=True, models=1)
FULL = replace(EMPTY, free_bytes=0, models=3)


@pytest.mark.parametrize(
    ("views", "number"),
    [
        pytest.param([EMPTY, LOADED], 1, id="where the model is loaded"),
        pytest.param([replace(LOADED, held_cost=9), replace(LOADED, held_cost=8)], 1, id="the shortest queue"),
        pytest.param([LOADED, LOADED], 0, id="the first of equal ones"),
        pytest.param([EMPTY, replace(EMPTY, coming=True)], 1, id="where the model is being loaded"),
        pytest.param([replace(EMPTY, free_bytes=2 * GIB), EMPTY], 1, id="the most free memory"),
        pytest.param([replace(EMPTY, models=1), EMPTY], 1, id="the fewest models, if memory does not decide"),
        pytest.param([replace(EMPTY, held_cost=5), EMPTY], 1, id="the least work, if neither decides"),
        pytest.param([FULL, replace(EMPTY, free_bytes=GIB, models=9)], 1, id="where it fits"),
        pytest.param([replace(EMPTY, free_bytes=GIB, size_bytes=2 * GIB), FULL], 0, id="none fits, none may go"),
        pytest.param(
            [replace(FULL, idle_since_s=20.0), replace(FULL, idle_since_s=10.0)], 1, id="the least recently used model"
        ),
        pytest.param([replace(LOADED, connected=False), EMPTY], 1, id="no adapter on the device that had it"),
        pytest.param([replace(EMPTY, connected=False), replace(LOADED, connected=False)], 1, id="no adapter at all"),
        pytest.param([replace(EMPTY, refused=True), FULL], 1, id="a load that failed is tried elsewhere"),
        pytest.param([EMPTY, replace(EMPTY, refused=True, gives_up=True)], 1, id="a permanent failure is not"),
        pytest.param([replace(FULL, refused=True), replace(EMPTY, refused=True)], 1, id="all failed"),
    ],
)
def test_choice_of_a_device(views: list[DeviceView], number: int) -> None:
    assert choose(views) == number


def test_a_model_gets_a_copy_once_it_was_behind_for_some_checks_in_a_row() -> None:
    copies, behind = SecondCopies(), {"m": [LOADED, EMPTY]}
    for _ in range(CHECKS_BEHIND - 1):
        assert copies.check(behind) == {}
    assert copies.check({}) == {}
    for _ in range(CHECKS_BEHIND - 1):
        assert copies.check(behind) == {}
    assert copies.check(behind) == {"m": 1}


@pytest.mark.parametrize(
    "spare",
    [
        replace(EMPTY, held_cost=1),
        replace(EMPTY, free_bytes=GIB, size_bytes=2 * GIB),
        replace(EMPTY, connected=False),
        replace(EMPTY, coming=True),
        replace(EMPTY, refused=True),
        LOADED,
    ],
)
def test_a_copy_goes_to_no_device_with_work_or_without_room(spare: DeviceView) -> None:
    copies = SecondCopies()
    assert all(not copies.check({"m": [LOADED, spare]}) for _ in range(3 * CHECKS_BEHIND))


def test_a_group_is_cut_into_parts_of_a_batch() -> None:
    group: list[Any] = [SimpleNamespace(item=SimpleNamespace(cost=cost)) for cost in (6, 5, 1, 1, 1, 1, 50, 2)]
    parts = batch_parts(group, BatchLimits(cost=10, requests=4, wait_s=0.0))
    assert [[flight.item.cost for flight in part] for part in parts] == [[6], [5, 1, 1, 1], [1], [50], [2]]


# one sidecar before two adapters


@dataclass
class TwoDevices:
    cluster: InProcess
    gateway: GatewayProcess
    sidecar: SidecarProcess
    first: FakeAdapter
    second: FakeAdapter

    async def answered(self, *texts: str, model: str = "toy/one") -> None:
        """Send the texts in one request. Raises AssertionError if an answer is wrong."""
        check(await self.gateway.encode(*texts, model=model), *texts)

    def ask(self, *texts: str) -> list[asyncio.Task[httpx.Response]]:
        """Start a request for each text."""
        return [asyncio.create_task(self.gateway.encode(text)) for text in texts]


def check(answer: httpx.Response, *texts: str) -> None:
    assert answer.status_code == 200, answer.text
    for item, text in zip(answer.json()["items"], texts, strict=True):
        assert item["dense"]["values"] == pytest.approx(vector_of(ids_of(text)).tolist(), abs=1e-6)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoDevices]:
    async with InProcess(tmp_path, toy_entry(), toy_entry("toy/two")) as cluster:
        first = await cluster.adapter("a.sock", devices=2)
        second = await cluster.adapter("a.sock.1", devices=2)
        gateway = await cluster.gateway()
        sidecar = await cluster.sidecar(first)
        await until(lambda: [beat.ready for beat in cluster.beats[-1].devices] == [True, True], "both devices")
        yield TwoDevices(cluster, gateway, sidecar, first, second)


async def test_models_go_to_the_device_with_fewer_of_them(two: TwoDevices) -> None:
    await two.answered("a")
    await two.answered("b", model="toy/two")
    assert (two.first.loads, two.second.loads) == (["toy/one"], ["toy/two"])
    await two.answered("c")
    await two.answered("d", model="toy/two")
    assert {batch.model for batch in two.first.batches} == {"toy/one"}
    assert {batch.model for batch in two.second.batches} == {"toy/two"}


async def test_a_heartbeat_and_metrics_tell_each_device(two: TwoDevices) -> None:
    two.first.gpu = two.second.gpu = "NVIDIA L4"
    two.first.device, two.second.device = "cuda:0", "cuda:1"
    await two.answered("a")

    def told() -> Any:
        beat = two.cluster.last_beat(two.sidecar.worker, ready=True)
        return beat if beat and beat.device == "cuda:0,cuda:1" and beat.devices[0].models else None

    beat = await until(told, "a heartbeat with both devices")
    used, total = two.first.memory_bytes
    assert beat.devices == (
        DeviceBeat("cuda:0", True, "NVIDIA L4", used, total, 0, ("toy/one",)),
        DeviceBeat("cuda:1", True, "NVIDIA L4", used, total),
    )
    assert (beat.gpu_count, beat.memory_used_bytes, beat.memory_total_bytes) == (2, 2 * used, 2 * total)
    assert len(beat.models) == 1
    for device in ("cuda:0", "cuda:1"):
        assert await two.sidecar.metric("sie_device_lanes", device=device) == 1
        assert await two.sidecar.metric("sie_device_memory_total_bytes", device=device) == total
    assert await two.sidecar.metric("sie_model_loaded", model="toy/one", device="cuda:0") == 1
    assert await two.sidecar.metric("sie_model_loaded", model="toy/one") == 1


async def test_devices_of_one_name_get_a_number_and_cpus_share_their_memory(two: TwoDevices) -> None:
    two.first.device = two.second.device = "cpu"

    def told() -> Any:
        beat = two.cluster.last_beat(two.sidecar.worker)
        return beat if beat and beat.device == "cpu:0,cpu:1" else None

    await two.answered("a")
    beat = await until(told, "a heartbeat with both devices")
    assert (beat.gpu_count, beat.memory_total_bytes) == (0, two.first.memory_bytes[1])


async def dead_with_work(two: TwoDevices) -> tuple[list[asyncio.Task[httpx.Response]], ...]:
    """Stop the first adapter while it has work. Return the requests of `with_work`."""
    begun, waiting = await with_work(two)
    await two.first.stop()
    return begun, waiting


async def with_work(two: TwoDevices) -> tuple[list[asyncio.Task[httpx.Response]], ...]:
    """Let the first adapter hold its work. Return the requests whose batches it has, and the requests that wait for
    it.
    """
    await two.answered("a")
    two.first.hold_batches = True
    begun = []
    for running, text in enumerate("bc", 1):
        begun += two.ask(text)
        await two.first.until(lambda adapter, running=running: adapter.running == running, "a batch")
    waiting = two.ask(*"defgh")

    async def held() -> bool:
        return bool(await two.sidecar.metric("sie_queue_depth", model="toy/one") == 7)

    await until_told(held, "all work at the worker")
    return begun, waiting


async def test_what_waits_for_a_device_goes_to_another_when_its_adapter_dies(two: TwoDevices) -> None:
    begun, waiting = await dead_with_work(two)
    for text, answer in zip("defgh", waiting, strict=True):
        check(await answer, text)
    assert two.second.loads == ["toy/one"]
    assert not any(answer.done() for answer in begun), "an input may have ended the adapter: it must not end another"
    two.first.hold_batches = False
    await two.first.start()
    for text, answer in zip("bc", begun, strict=True):
        check(await answer, text)
    assert await two.sidecar.metric("sie_adapter_deaths_total") == 1
    assert await two.sidecar.metric("sie_poisoned_inputs_total") == 0


async def test_what_waits_for_a_device_goes_to_the_one_whose_adapter_comes_back_first(two: TwoDevices) -> None:
    await two.second.stop()
    begun, waiting = await dead_with_work(two)
    await two.second.start()
    for text, answer in zip("defgh", waiting, strict=True):
        check(await answer, text)
    two.first.hold_batches = False
    await two.first.start()
    for text, answer in zip("bc", begun, strict=True):
        check(await answer, text)


async def test_work_that_is_tokenised_while_its_adapter_dies_goes_to_another_device(
    two: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.answered("a")
    tokenising, goes_on = asyncio.Event(), asyncio.Event()
    build_rows = Prepare._build_rows

    async def held(self: Prepare, *arguments: Any) -> None:
        tokenising.set()
        await goes_on.wait()
        await build_rows(self, *arguments)

    monkeypatch.setattr(Prepare, "_build_rows", held)
    (answer,) = two.ask("b")
    await tokenising.wait()
    await two.first.stop()
    await until(lambda: [beat.ready for beat in two.cluster.beats[-1].devices] == [False, True], "one adapter less")
    goes_on.set()
    check(await answer, "b")
    assert two.second.loads == ["toy/one"]


async def test_suspects_run_alone_on_another_device_if_their_adapter_stays_away(
    two: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "AWAY_S", 0.3)
    begun, waiting = await dead_with_work(two)
    for text, answer in zip("bcdefgh", begun + waiting, strict=True):
        check(await answer, text)
    assert {len(batch.lengths) // 4 for batch in two.second.batches if batch.ids in suspect_ids()} == {1}


def suspect_ids() -> set[bytes]:
    return {ids_of(text).astype("<i4").tobytes() for text in "bc"}


async def test_the_death_of_one_adapter_unloads_no_model_of_another(two: TwoDevices) -> None:
    await two.answered("a")
    await two.answered("b", model="toy/two")
    await two.first.stop()
    for text in "cdef":
        await two.answered(text, model="toy/two")
    assert two.second.loads == ["toy/two"]
    assert await two.sidecar.metric("sie_ready") == 1
    states = await until(
        lambda: [beat.ready for beat in two.cluster.beats[-1].devices] == [False, True], "a device without its adapter"
    )
    assert states


async def test_a_worker_is_not_ready_without_any_adapter(two: TwoDevices) -> None:
    await two.first.stop()
    await two.second.stop()

    async def refused() -> bool:
        return bool((await two.sidecar.get("/readyz")).status_code == 503)

    await until_told(refused, "not ready")
    await two.second.start()

    async def ready() -> bool:
        return bool((await two.sidecar.get("/readyz")).status_code == 200)

    await until_told(ready, "ready with one device")
    await two.answered("a")
    assert two.second.loads == ["toy/one"]


async def test_a_load_that_fails_for_memory_is_tried_on_another_device(two: TwoDevices) -> None:
    two.first.refusals["toy/one"] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
    await two.answered("a")
    assert (two.first.loads, two.second.loads) == (["toy/one"], ["toy/one"])


async def test_all_work_that_waited_for_a_load_that_fails_for_memory_runs_on_another_device(two: TwoDevices) -> None:
    begun, waiting = await with_work(two)
    two.first.loaded.clear()
    two.first.refusals["toy/one"] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
    two.first.let_go()
    for text, answer in zip("bcdefgh", begun + waiting, strict=True):
        check(await answer, text)
    assert two.second.loads == ["toy/one"]


async def test_a_load_that_fails_for_memory_waits_for_a_device_whose_adapter_restarts(two: TwoDevices) -> None:
    two.first.refusals["toy/one"] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
    await two.second.stop()
    await until(lambda: not two.cluster.beats[-1].devices[1].ready, "the loss of the second adapter")
    (answer,) = two.ask("a")
    await two.first.until(lambda adapter: adapter.loads, "the load that fails")
    await two.second.start()
    check(await answer, "a")
    assert (two.first.loads, two.second.loads) == (["toy/one"], ["toy/one"])


async def test_a_device_whose_adapter_stays_away_delays_no_work_of_a_device_that_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "AWAY_S", 600.0)
    async with InProcess(tmp_path, toy_entry()) as cluster:
        first, second, third = [await cluster.adapter(f"a.sock{end}", devices=3) for end in ("", ".1", ".2")]
        gateway = await cluster.gateway()
        await cluster.sidecar(first)
        await until(lambda: [beat.ready for beat in cluster.beats[-1].devices] == [True] * 3, "all devices")
        first.refusals["toy/one"] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
        await second.stop()
        await third.stop()
        await until(
            lambda: [beat.ready for beat in cluster.beats[-1].devices] == [True, False, False], "the loss of two"
        )
        answer = asyncio.create_task(gateway.encode("a"))
        await first.until(lambda adapter: adapter.loads, "the load that fails")
        await third.start()
        check(await answer, "a")
        assert (first.loads, third.loads) == (["toy/one"], ["toy/one"])


async def test_a_load_that_fails_on_all_devices_is_tried_once_on_each(two: TwoDevices) -> None:
    for adapter in (two.first, two.second):
        adapter.refusals["toy/one"] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
    answer = await two.gateway.encode("a")
    assert (answer.status_code, answer.json()["code"]) == (500, "MODEL_LOAD_FAILED")
    assert (two.first.loads, two.second.loads) == (["toy/one"], ["toy/one"])


async def test_a_load_that_fails_for_good_is_not_tried_on_another_device(two: TwoDevices) -> None:
    two.first.refusals["toy/one"] = ModelLoadFailed("no such file", extras={"error_class": "NOT_FOUND"})
    answer = await two.gateway.encode("a")
    assert (answer.status_code, answer.json()["code"]) == (500, "MODEL_LOAD_FAILED")
    assert (two.first.loads, two.second.loads) == (["toy/one"], [])


async def test_an_eviction_on_one_device_leaves_the_copy_of_another(two: TwoDevices) -> None:
    await two.answered("a")
    await behind(two)
    two.first.loaded.clear()
    two.first.dropped = ("toy/one",)
    await two.answered("b")
    await until(lambda: [beat.models for beat in two.cluster.beats[-1].devices] == [(), ("toy/one",)], "one copy left")
    two.first.dropped = ()
    loads = len(two.first.loads)
    await two.answered("c")
    assert len(two.first.loads) == loads, "the other device has it"


async def behind(two: TwoDevices) -> None:
    """Let the first device fall behind until the second one has its model too."""
    two.first.hold_batches = True
    texts = [f"text {number}" for number in range(40)]
    answers = two.ask(*texts)
    await two.second.until(lambda adapter: adapter.loads == ["toy/one"], "a copy on the second device")
    await until(lambda: len(two.cluster.beats[-1].devices[1].models) == 1, "a heartbeat with the copy")
    await two.answered("runs on the second device")
    assert two.second.batches
    assert all(not answer.done() for answer in answers[:1])
    two.first.let_go()
    for text, answer in zip(texts, answers, strict=True):
        check(await answer, text)


async def test_a_model_that_one_device_cannot_keep_up_with_gets_a_copy(two: TwoDevices) -> None:
    await two.answered("a")
    await behind(two)
    beat = two.cluster.beats[-1]
    assert [status.model for status in beat.models] == ["toy/one"]
    assert beat.models[0].memory_bytes == 2 * 1024 * 1024


async def test_both_copies_run_a_request_of_several_messages(two: TwoDevices) -> None:
    await two.answered("a")
    await behind(two)
    two.first.hold_batches = two.second.hold_batches = True
    task = asyncio.create_task(two.answered(*(f"many {number} {150 * 'x '}" for number in range(600))))
    await two.first.until(lambda adapter: adapter.running, "a part of it at the first device")
    await two.second.until(lambda adapter: adapter.running, "a part of it at the second device")
    two.first.let_go()
    two.second.let_go()
    await task


async def test_a_frozen_adapter_loses_its_work_to_another_device(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster:
        first = await cluster.adapter("a.sock", devices=2)
        await cluster.adapter("a.sock.1", devices=2)
        gateway = await cluster.gateway()
        await cluster.sidecar(first, SIE_WORKER_PING_INTERVAL_MS="100")
        check(await gateway.encode("a"), "a")
        first.freeze()
        check(await gateway.encode("b"), "b")


async def test_a_preload_spreads_models_over_the_devices(tmp_path: Path) -> None:
    async with InProcess(tmp_path, toy_entry(), toy_entry("toy/two")) as cluster:
        first = await cluster.adapter("a.sock", devices=2)
        second = await cluster.adapter("a.sock.1", devices=2)
        await cluster.gateway()
        await cluster.sidecar(first, SIE_PRELOAD_MODELS="toy/one,toy/two")
        assert sorted([first.loads, second.loads]) == [["toy/one"], ["toy/two"]]


def test_sockets_of_devices_lie_beside_the_first_one() -> None:
    assert [ipc.device_socket("/run/w.sock", number) for number in range(3)] == [
        "/run/w.sock",
        "/run/w.sock.1",
        "/run/w.sock.2",
    ]
