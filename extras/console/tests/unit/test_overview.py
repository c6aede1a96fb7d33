"""Data of the page: size and cost in a large cluster, the placement table, the log of a request."""

from __future__ import annotations

import gzip
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, settings_of, until_told

from sie_broker.memory import MemoryServer
from sie_console.history import MAX_CHARS, MAX_LINES, STEP_S, STEPS, LogTail, RequestHistory
from sie_console.overview import Overview
from sie_console.summary import COST_SHARE, MAX_SHOWN, CachedSummary, LaneTable, Waitings
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.records import Placement
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.grant import ANYBODY
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.call import Call
from sie_gateway.operations.status import ClusterStatus

MODELS, WORKERS, LOADED = 10_000, 1_000, 12
MINUTE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def large() -> Overview:
    """Return the overview of 10,000 models and 1,000 workers, each of which has loaded 12 models."""
    names = [f"org/model-{number:05}" for number in range(MODELS)]
    fleet = Fleet(MemoryServer().connect("g"), settings_of(SIE_HEARTBEAT_TIMEOUT_MS="3600000"))
    for number in range(WORKERS):
        statuses = [
            ModelStatus(names[(number * 37 + place * 101) % MODELS], "loaded", 1 << 28, queued=place)
            for place in range(LOADED)
        ]
        worker = f"worker-of-a-large-cluster-{number:04}"
        fleet.note(Heartbeat(worker, "_default", "l4", "default", ready=True, version="1", models=tuple(statuses)))
    feed, lag, placer, peers = Mock(), Mock(is_known=False), Mock(fleet=fleet), Mock()
    feed.catalogue.entries = dict.fromkeys(names)
    peers.qps.return_value = 1234.5
    settings = settings_of(SIE_GATEWAY_HEALTH_MODE="nats")
    return Overview(ClusterStatus(settings, Mock(), feed, fleet, peers, (), lag, None), placer, lag, Mock())


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one")) as cluster:
        yield cluster


def compressed(body: Any) -> int:
    return len(gzip.compress(msgspec.json.encode(body), 1))


def test_a_page_reads_less_than_a_mebibyte_a_minute_of_a_large_cluster(large: Overview) -> None:
    """The page asks for the state each second, and for the history and the requests each ten seconds."""
    now_s = 1_790_000_000.0
    history = RequestHistory(lambda: now_s)
    for _ in range(STEPS):
        for number in range(20):
            history.ended(
                Call(f"r{now_s}{number}", 0.0, {}, {"model": "toy/one"}, code="QUEUE_FULL" if number % 7 == 0 else ""),
                "encode",
                200,
                now_s % 977 / 1000,
            )
        now_s += STEP_S
    shown = large.shown("", ANYBODY)
    assert (len(shown["workers"]), len(shown["models"])) == (MAX_SHOWN, MAX_SHOWN)
    assert (shown["counts"]["workers"], shown["counts"]["models"]) == (WORKERS, MODELS)
    each_second, each_ten = compressed(shown), compressed(history.since()) + compressed(history.requests(20, ANYBODY))
    assert 60 * each_second + 6 * each_ten < MINUTE_BYTES, (each_second, each_ten)


def test_what_is_dear_is_built_more_rarely() -> None:
    built: list[float] = []

    def build() -> int:
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass
        built.append(time.monotonic())
        return len(built)

    shared = CachedSummary(build)
    assert [shared() for _ in range(20)] == [1] * 20
    assert shared.until_s - built[0] >= 0.005 / COST_SHARE
    shared.until_s = 0.0
    assert shared() == 2, "after that time it is built anew"


def test_a_filter_finds_models_that_are_not_among_the_first(large: Overview) -> None:
    overview = large.shown("MODEL-0999", ANYBODY)
    assert [model.name for model in overview["models"]][-1].startswith("org/model-0999")
    assert overview["counts"]["models"] == 10


async def test_the_placement_table_says_which_worker_hosts_a_model(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    await cluster.sidecar()
    assert (await gateway.encode("x")).status_code == 200

    async def row() -> Any:
        (lane,) = (await gateway.client.get("/v1/placement")).json()["lanes"] or [None]
        return lane and lane["shown"] and lane["shown"][0]["hosts"] == {"w0": "loaded"} and lane

    lane = await until_told(row, "the model is loaded on the worker")
    assert (lane["lane"], lane["workers"], lane["models"]) == ("_default._default.default", 1, 1)
    assert lane["shown"][0]["model"] == "toy/one"
    assert (await gateway.client.get("/v1/placement?filter=other")).json()["lanes"][0]["shown"] == []


def test_the_placement_table_sums_up_the_profiles_of_a_model() -> None:
    lane = Lane("_default", "l4", "default")
    profiles = (ModelStatus("m:int8", "loaded", 5, cost_rate=7.0), ModelStatus("m", "available", cost_rate=1.0))
    beats = [Heartbeat("w", lane.pool, lane.machine_profile, lane.bundle, ready=True, version="", models=profiles)]
    table = LaneTable.from_table(Placement(0.0, {"m": ("w", "v")}), lane, beats, Waitings({}), 0.0)
    (row,) = table.rows
    assert (row["hosts"], row["memory_bytes"], row["tokens_per_s"]) == ({"w": "loaded", "v": "-"}, 5, 8.0)


async def test_the_log_of_a_request_is_told_without_its_inputs(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sie")
    gateway = await cluster.gateway()
    await cluster.sidecar()
    answer = await gateway.encode("a private text")

    async def lines() -> Any:
        path = f"/v1/requests/{answer.headers['x-sie-request-id']}/log"
        return (await gateway.client.get(path)).json()["lines"]

    (line,) = await until_told(lines, "the line of the request")
    assert line["message"].startswith("encode 200 in ")
    assert "private" not in str(line)
    assert (await gateway.client.get("/v1/requests/no-such/log")).json() == {"lines": []}


def test_the_tail_of_the_log_is_bounded() -> None:
    tail, logger = LogTail(), logging.getLogger("sie.test.tail")
    logger.setLevel(logging.INFO)
    with tail.listening():
        for number in range(MAX_LINES + 7):
            logger.info("%s", "x" * 10 * MAX_CHARS, extra={"request_id": f"r{number}"})
        logger.info("of no request")
    logger.info("not kept", extra={"request_id": "r9"})
    assert tail.lines_of("r6", ANYBODY) == []
    (line,) = tail.lines_of("r7", ANYBODY)
    assert len(line["message"]) == MAX_CHARS
    assert len(tail.lines_of(f"r{MAX_LINES + 6}", ANYBODY)) == 1


async def test_a_worker_that_ends_without_a_word_is_seen_while_somebody_looks(cluster: InProcess) -> None:
    """The page shows the end long before a heartbeat is overdue. The routing of work follows heartbeats alone."""
    gateway = await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_HEALTH_PUBLISH_INTERVAL_MS="60000", SIE_HEARTBEAT_TIMEOUT_MS="600000")

    async def healthy() -> list[bool]:
        return [worker["healthy"] for worker in (await gateway.client.get("/v1/cluster")).json()["workers"]]

    async def is_healthy() -> bool:
        return await healthy() == [True]

    async def is_silent() -> bool:
        return await healthy() == [False]

    await until_told(is_healthy, "the worker is there")
    await sidecar.broker.close()
    await until_told(is_silent, "its end is seen")
    reply = (await gateway.client.get("/v1/cluster")).json()
    assert reply["cluster"]["worker_count"] == 0
    assert (await gateway.client.get("/health")).json()["cluster"]["worker_count"] == 1, "work goes by heartbeats"
