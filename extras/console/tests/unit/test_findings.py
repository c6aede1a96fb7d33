"""Findings of a gateway about its cluster, with remedies whose commands exist."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, until_told

from sie_console.api import ClusterFinding
from sie_console.findings import GROWTH_S, QueueTrend, of_clocks, of_loads, of_queues, of_refusals, of_workers
from sie_contracts.api.operations import DeviceInfo, WorkerInfo
from sie_contracts.errors import ErrorInfo
from sie_contracts.models.load_errors import LoadErrorClass, load_failed
from sie_contracts.status import QueueInfo

WORKER = WorkerInfo("w0", None, "l4", 1, "_default", [], 0, 0, 0, True, "default", "", "cuda:0")
QUEUE = QueueInfo("_default", "l4", "default", "interactive", 10, 1.0)
EVERY_S = 5.0
CLASSES = get_args(LoadErrorClass)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one")) as cluster:
        yield cluster


def texts(cluster_findings: Iterable[ClusterFinding]) -> list[str]:
    return [finding.wrong for finding in cluster_findings]


def error(error_class: LoadErrorClass, message: str = "why") -> ErrorInfo:
    """Return the error of a failed load as a heartbeat reports it."""
    return load_failed(error_class, message).info()


def filled(*lengths: int) -> QueueTrend:
    """Return a trend in which equal numbers of samples have each of these lengths."""
    trend, samples = QueueTrend(EVERY_S), int(GROWTH_S / EVERY_S) + 1
    for place in range(samples):
        length = lengths[place * len(lengths) // samples]
        trend.sample([msgspec.structs.replace(QUEUE, messages=length)])
    return trend


def test_workers_that_are_absent_unhealthy_or_without_their_gpu_are_found() -> None:
    replaced = msgspec.structs.replace
    assert texts(of_workers([])) == ["no worker is there: requests wait or are refused"]
    assert of_workers([WORKER, replaced(WORKER, gpu="cpu", device="cpu")]) == []
    ill, on_cpu = replaced(WORKER, healthy=False), replaced(WORKER, name="w1", gpu="a100-80gb", device="cpu")
    assert texts(of_workers([ill, on_cpu])) == [
        "worker w0 (_default.l4.default) is not healthy",
        "worker w1 (_default.a100-80gb.default) computes on the CPU, not on a GPU",
    ]


def test_models_that_fail_for_one_cause_on_a_worker_are_one_finding() -> None:
    failed = {"bad": error("CERTIFICATE"), "bad:small": error("CERTIFICATE"), "large": error("OOM")}
    (entry, room) = of_loads([("w0", failed), ("w1", {})])
    assert entry.wrong == "worker w0 cannot load bad, bad:small: why"
    assert "`sie models rollback bad REVISION`" in entry.fix
    assert "`sie models unload large`" in room.fix


def test_a_clock_is_found_if_it_is_off_in_either_direction() -> None:
    assert texts(of_clocks({"w0": 1.9, "w1": 90.0, "w2": -3.0})) == [
        "the clock of worker w1 is 90.0 s ahead of the broker's",
        "the clock of worker w2 is 3.0 s behind the broker's",
    ]


@pytest.mark.parametrize(
    ("requests", "errors", "expected"),
    [
        (0, {}, []),
        (1000, {"QUEUE_FULL": 10}, []),
        (1000, {"RATE_LIMITED": 11, "QUEUE_FULL": 373, "INVALID_INPUT": 600}, ["373 of 1000", "11 of 1000"]),
    ],
)
def test_refusals_count_from_one_percent_on(requests: int, errors: dict[str, int], expected: list[str]) -> None:
    assert [text.partition(" requests")[0] for text in texts(of_refusals(requests, errors))] == expected


def test_a_queue_is_found_if_its_work_is_old_or_its_length_grows() -> None:
    def at(trend: QueueTrend, queue: QueueInfo = QUEUE, *workers: WorkerInfo) -> list[ClusterFinding]:
        return of_queues([queue], workers, trend, lambda pool: True)

    assert at(filled(10)) == []
    assert at(filled(500, 100, 500)) == [], "it shrank meanwhile"
    assert at(filled(10, 20, 90)) == [], "it is short"
    assert at(filled(400, 450, 500)) == [], "it grew by less than half"
    trend = filled(100, 200, 300)
    (finding,) = at(trend, QUEUE, WORKER)
    assert (
        finding.wrong
        == "the queue of _default.l4.default grew from 100 to 300 messages in 60 s; its healthy workers: 1"
    )
    assert "`--workers`" in finding.fix
    trend.sample(None)
    assert at(trend) == [], "the length was not known meanwhile"
    (finding,) = at(trend, msgspec.structs.replace(QUEUE, oldest_s=61.0))
    assert (
        finding.wrong
        == "the queue of _default.l4.default has 10 messages, the oldest is 61 s old; its healthy workers: 0"
    )
    assert finding.fix.startswith("start a worker: `sie sidecar`")


def test_the_pool_of_another_key_is_not_named() -> None:
    queue = msgspec.structs.replace(QUEUE, pool="secret", oldest_s=61.0)
    (finding,) = of_queues([queue], [], filled(10), lambda pool: False)
    assert "secret" not in finding.wrong


async def test_a_page_reads_the_findings_of_its_gateway(cluster: InProcess) -> None:
    gateway = await cluster.gateway()

    async def found() -> list[str]:
        return [finding["check"] for finding in (await gateway.client.get("/v1/cluster")).json()["findings"]]

    async def is_well() -> bool:
        return await found() == []

    assert await found() == ["gateway"], "there is no worker"
    await cluster.sidecar()
    await until_told(is_well, "the worker is heard")


def test_a_device_without_its_adapter_is_told() -> None:
    devices = [DeviceInfo("cuda:0", True, "", 0, 0, 0, []), DeviceInfo("cuda:1", False, "", 0, 0, 0, [])]
    (finding,) = of_workers([msgspec.structs.replace(WORKER, devices=devices)])
    assert finding.wrong == "worker w0 (_default.l4.default) has no adapter on a device: cuda:1"
    assert of_workers([msgspec.structs.replace(WORKER, devices=devices[:1])]) == []
