"""Admission to the queue, holding, and the answers to refused clients: gateways over the broker in memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from fake_adapter import FakeAdapter, ids_of, texts_of, toy_entry, vector_of
from hypothesis import given
from hypothesis import strategies as st
from inprocess import GatewayProcess, InProcess, placing, settings_of, until, until_told
from msgspec.structs import replace

from sie_broker import BrokerError
from sie_broker.memory import MemoryServer
from sie_broker.nats.client import PING_S
from sie_contracts.errors import NotProvisioned, QueueFull
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import Settings
from sie_contracts.wire import heartbeats, ipc, messages, topology
from sie_contracts.wire.heartbeats import AnswerErasure, Heartbeat, ModelStatus
from sie_contracts.wire.messages import BatchNote, Ok, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import MAX_WAITING_BYTES, Admission, Peers, Permits, mean_cost
from sie_gateway.admission.grant import Grant
from sie_gateway.dialects.rows import NATIVE
from sie_gateway.fleet.demand import ColdStarts, DemandRecords
from sie_gateway.fleet.lanes import LOST_S, MAX_LANES, Fleet
from sie_gateway.fleet.scaling import wanted_replicas
from sie_gateway.inference.call import Call
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import ResultInbox
from sie_gateway.inference.runner import Runner
from sie_gateway.metrics import Metrics
from sie_gateway.streams.backlog import Backlog
from sie_gateway.streams.publish import WorkQueue
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Stop

STREAM = "WORK__default"
LANE = Lane("_default", "_default", "default")
SCALING = "/v1/scaling/_default._default.default"


def beat(worker: str = "ghost", *, model: str = "toy/one", state: Any = "loaded", **more: Any) -> Heartbeat:
    """Return the heartbeat of a worker of this lane. No such worker runs, and nothing takes its work."""
    status = ModelStatus(model, state, load_s=more.pop("load_s", 0.0))
    return Heartbeat(worker, "_default", "_default", "default", True, "0", models=(status,), **more)


async def tell(cluster: InProcess, heartbeat: Heartbeat) -> None:
    await cluster.send(topology.health_subject(heartbeat.worker), messages.encode(heartbeat))


# what gateways tell each other


async def test_gateways_share_windows_by_count_and_agree_on_what_a_message_costs() -> None:
    """Three gateways, then one says goodbye and one falls silent."""
    server, now_s = MemoryServer(), 0.0
    brokers = [server.connect(f"g{number}") for number in range(3)]
    peers = [Peers(broker, lambda: {(LANE, "bulk"): 500}, lambda: now_s) for broker in brokers]
    for peer in peers:
        await peer.start()
    assert [member.count() for member in peers] == [1, 1, 1]
    peers[0].sent(LANE, "bulk", 10, 1000)
    peers[1].sent(LANE, "bulk", 10, 3000)

    async def announce(*some: Peers) -> None:
        for announcer in some:
            await brokers[0].send(topology.gateway_subject(announcer.id), messages.encode(announcer.beat()))
        await brokers[0].flush()

    now_s = 1.0
    await announce(*peers)
    await until(lambda: [member.count() for member in peers] == [3, 3, 3], "three gateways")
    await until(lambda: {mean_cost(member.traffic(LANE, "bulk")) for member in peers} == {200.0}, "one mean at all")
    assert {sum(flow.waiting for flow in member.traffic(LANE, "bulk")) for member in peers} == {1500}
    assert mean_cost(peers[0].traffic(LANE, "interactive")) == 0.0
    peers[0].note(heartbeats.GatewayBeat(peers[2].id, leaving=True))
    assert peers[0].count() == 2
    now_s = 7.0
    await announce(peers[0])
    await until(lambda: peers[0].count() == 1, "the silent one is forgotten")
    for broker in brokers:
        await broker.close()


async def test_gateways_know_what_the_others_have_in_the_queue_and_whom_they_refused() -> None:
    """Steps: 1. One of two gateways has work in the queue and refuses a client. 2. Both announce their state. 3. The
    other gateway counts that work and expects the client. 4. A gateway that is alone announces no work.
    """
    server, now_s = MemoryServer(), 100.0
    brokers = [server.connect(f"g{number}") for number in range(2)]
    settings = settings_of()
    both = [
        Admission(settings, broker, Fleet(broker, settings), Backlog(broker, ()), Metrics(), clock=lambda: now_s)
        for broker in brokers
    ]
    for admission in both:
        await admission.peers.start()
        admission._fleet.note(beat())

    async def announce() -> None:
        for sender in both:
            await sender.peers._send(sender.peers.beat())

    await announce()
    await until(lambda: [member.peers.count() for member in both] == [2, 2], "two gateways")
    first, second = (member._queue(LANE, "bulk", "toy/one") for member in both)
    for admission, queue in zip(both, (first, second), strict=True):
        admission.admit("key", LANE, "bulk", "toy/one", [100], 100)
        for number in range(8):
            queue.throughput.left(now_s - 4 + 0.5 * number, str(number), 100, 0.0, is_crowded=True)
    both[0].admit("key", LANE, "bulk", "toy/one", [300], 100)
    assert first.turns.book(now_s, b"client", 50, 10.0) >= 10
    await announce()
    await until(lambda: second.turns.promised(now_s) == 50, "the turn is known")
    assert second.everywhere(now_s, 100) == (500, 0.5)
    assert first.everywhere(now_s, 400) == (500, 0.5)
    for admission in both:
        assert admission.peers.pause_s() < 1
    await both[1].peers._send(heartbeats.GatewayBeat(both[1].peers.id, leaving=True))
    await until(lambda: both[0].peers.count() == 1, "the other has left")
    assert both[0].peers.beat().queued == ()
    now_s += 5
    assert first.everywhere(now_s, 400) == (400, 1.0)
    for broker in brokers:
        await broker.close()


def test_a_queue_that_stood_still_when_its_requests_ended_stands_still_for_the_next() -> None:
    """One request is admitted as a probe. Others are refused until an adapter may be back. A result of the probe ends
    the refusals.
    """
    now_s = 100.0
    settings = settings_of()
    fleet = Fleet(Mock(), settings)
    admission = Admission(settings, Mock(), fleet, Backlog(Mock(), ()), Metrics(), clock=lambda: now_s)
    fleet.note(beat())
    queue = admission._queue(LANE, "bulk", "toy/one")
    for number in range(8):
        queue.throughput.left(now_s - 0.8 + 0.1 * number, str(number), 100, 0.0, is_crowded=True)
    stalled = admission.admit("key", LANE, "bulk", "toy/one", [100], 100)
    now_s += 3
    admission.end(stalled)
    admission.check("key", LANE, "bulk", "toy/one", 100, 2.0)
    probe = admission.admit("key", LANE, "bulk", "toy/one", [100], 100)
    with pytest.raises(QueueFull, match="stands still") as refused:
        admission.check("key", LANE, "bulk", "toy/one", 100, 2.0)
    assert refused.value.retry_after_s >= 10
    probe.result_arrived(WorkResult("r", 0, "ghost", (), batch=BatchNote("9", 1, 1, 100)))
    admission.admit("key", LANE, "bulk", "toy/one", [100], 100)
    admission.check("key", LANE, "bulk", "toy/one", 100, 2.0)


def test_a_queue_learns_the_ratio_of_actual_to_estimated_tokens_only_from_results_of_batches() -> None:
    settings = settings_of()
    admission = Admission(settings, Mock(), Fleet(Mock(), settings), Backlog(Mock(), ()), Metrics())
    ran = admission.admit("key", LANE, "bulk", "toy/one", [100], 100)
    ran.result_arrived(WorkResult("r", 0, "ghost", (Ok({}, 150),), batch=BatchNote("1", 1, 1, 150)))
    without_batch = admission.admit("key", LANE, "bulk", "toy/one", [1], 100)
    without_batch.result_arrived(WorkResult("r", 0, "ghost", (Ok({}, 40_000),)))
    assert admission._queue(LANE, "bulk", "toy/one").scale == 1.5


# permits


class Alone:
    """The gateway's request path without HTTP, over a broker in memory. No worker takes its messages."""

    def __init__(self, server: MemoryServer, settings: Settings) -> None:
        self.server = server
        self.broker = server.connect("gateway")
        self.metrics = Metrics()
        entry = toy_entry()
        self.feed = CatalogueFeed(
            self.broker,
            None,
            trusted=("x",),
            poll_s=1,
            full_export_s=1,
            initial=Catalogue({entry.id: entry}, {}, {}, "test:1"),
        )
        self.fleet = Fleet(self.broker, settings)
        self.queue = WorkQueue(self.broker, settings, self.metrics, lambda pool: None)
        self.admission = Admission(settings, self.broker, self.fleet, Backlog(self.broker, {"_default"}), self.metrics)
        self.inbox = ResultInbox(self.broker, self.metrics, on_late=self.admission.answered_late)
        demand = DemandRecords(self.broker, lambda: 0.0, storage="memory", replicas=1)
        cold = ColdStarts(self.fleet, demand, self.metrics, lambda pool: "")
        runner = Runner(self.feed, self.queue, self.inbox, self.metrics, self.admission, cold, settings.load_hold_s)
        self.inference = Inference(settings, self.feed, self.fleet, {"_default"}, self.metrics, self.admission, runner)

    async def ask(self, number: int, key: str, texts: int) -> None:
        async def read() -> bytes:
            await asyncio.sleep(0)
            return msgspec.json.encode({"items": ["x" * 400] * texts})

        call = Call(f"r{number}", asyncio.get_running_loop().time(), {}, grant=Grant(key), model="toy/one")
        reader = SimpleNamespace(read=read, is_whole=True)
        await self.inference.answer(call, NATIVE[0], reader, AsyncMock())  # type: ignore[arg-type]


def test_an_unused_queue_is_dropped_only_when_no_refused_client_may_come_back() -> None:
    now_s = 0.0
    settings = settings_of()
    admission = Admission(settings, Mock(), Fleet(Mock(), settings), Backlog(Mock(), ()), Metrics(), lambda: now_s)
    admission._queue(LANE, "bulk", "toy/one")
    admission._queue(LANE, "interactive", "toy/one").turns.book(now_s, b"client", 100.0, 110.0)
    now_s = 100.0
    admission.sweep()
    assert [name[1] for name in admission._queues] == ["interactive"]
    now_s = 150.0  # the turn has lapsed
    admission.sweep()
    assert not admission._queues


@pytest.mark.parametrize("rounds", [6, pytest.param(100, marks=pytest.mark.long)])
async def test_cancelled_requests_leave_every_permit_and_byte_free(rounds: int) -> None:
    """Each request is cancelled some steps of the event loop after it began, at whatever point it then is. A key may
    have few tokens in the queue.

    Steps: 1. A round has 100 requests of three keys, of one to six chunks. 2. All are cancelled, at random steps. 3. No
    permit is held, and nothing is left in the queue or in the inbox.
    """
    server = MemoryServer()
    gateway = Alone(
        server, settings_of(SIE_CHUNK_COST="104", SIE_KEY_WINDOW_TOKENS="800", SIE_MAX_CONCURRENT_REQUESTS="1000")
    )
    await gateway.queue.ensure_pool("_default")
    chance = random.Random(7)
    peak = 0
    for round_number in range(rounds):
        gateway.fleet.note(beat(credit_cost=2000, credit_items=20))  # a heartbeat expires before all rounds are over
        tasks = []
        for number in range(100):
            request = gateway.ask(round_number * 100 + number, "abc"[number % 3], chance.randint(1, 6))
            tasks.append(asyncio.create_task(request))
        due = sorted(tasks, key=lambda _: chance.random())
        while due:
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            peak = max(peak, gateway.admission.occupied()[0])
            for task in [due.pop() for _ in range(min(len(due), chance.randint(1, 20)))]:
                task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ended} <= {asyncio.CancelledError}
        assert gateway.admission.occupied() == (0, 0, 0)
    assert 0 < peak <= 3 * 800
    assert (gateway.inference.slots.used, len(gateway.inbox._open)) == (0, 0)
    await until(lambda: not server.streams[STREAM].messages, "every message withdrawn")
    await gateway.inbox.stop()
    await gateway.queue.consumers.close()
    await gateway.broker.close()


def test_a_key_whose_work_for_one_model_fills_its_window_gets_work_for_another_into_the_queue() -> None:
    settings = settings_of(SIE_CHUNK_COST="100", SIE_KEY_WINDOW_TOKENS="400")
    fleet = Fleet(Mock(), settings)
    admission = Admission(settings, Mock(), fleet, Backlog(Mock(), ()), Metrics(), clock=lambda: 100.0)
    models = tuple(ModelStatus(model, "loaded") for model in ("toy/one", "toy/two"))
    fleet.note(replace(beat(credit_cost=400, credit_items=20), models=models))
    permits = admission.admit("key", LANE, "bulk", "toy/one", [100] * 50, 100)
    other_permits = admission.admit("key", LANE, "bulk", "toy/two", [100] * 2, 100)
    turns = []
    for chunk in range(6):
        permits.result_arrived(WorkResult("r", chunk, "ghost", ()))
        turns.append((len(permits.pop()), len(other_permits.pop())))
    assert turns == [(4 + 1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (1, 0)]


def test_waiting_inputs_of_one_key_leave_memory_to_other_keys() -> None:
    """No worker has the model, so most chunks wait. Their bytes are free again when their requests end."""
    settings = settings_of(SIE_CHUNK_COST="100")
    admission = Admission(settings, Mock(), Fleet(Mock(), settings), Backlog(Mock(), ()), Metrics())

    def enter(key: str, sixteenths: int) -> Permits:
        return admission.admit(key, LANE, "bulk", "toy/one", [100] * 20, sixteenths * (MAX_WAITING_BYTES >> 4))

    waiting = [enter("bulk", 13)]
    with pytest.raises(QueueFull, match="256 MiB are allowed, shared by the active keys"):
        enter("other", 4)
    with pytest.raises(QueueFull, match="208 of them of this client's key"):
        enter("bulk", 2)
    waiting.append(enter("other", 3))
    for permits in waiting:
        admission.end(permits)
    assert admission.occupied() == (0, 0, 0)


async def test_a_request_whose_publishing_fails_ends_with_the_error_and_frees_its_permits(cluster: InProcess) -> None:
    """The stream has room for some of the chunks of the request. They are removed again."""
    gateway = await cluster.gateway(
        SIE_CHUNK_COST="8192", SIE_QUEUE_MAX_BYTES=str(1 << 20), SIE_KEY_WINDOW_TOKENS=str(1 << 20)
    )
    await tell(cluster, beat(credit_cost=20_000))
    answer = await gateway.encode(*["é" * 16_000] * 60, X_SIE_Timeout_Ms="2000")
    assert (answer.status_code, answer.json()["code"]) in ((503, "QUEUE_FULL"), (504, "GATEWAY_TIMEOUT"))
    assert [await gateway.metric(f"sie_gateway_permits_held_{unit}") for unit in ("tokens", "messages")] == [0, 0]
    assert not cluster.server.streams[STREAM].messages


async def test_a_large_request_goes_through_a_small_window_piece_by_piece(cluster: InProcess) -> None:
    """A request of 2,048 texts is answered in order, while its key may have three chunks in the queue."""
    await cluster.sidecar(ready=False)
    gateway = await cluster.gateway(SIE_CHUNK_COST="260", SIE_KEY_WINDOW_TOKENS="800")
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(cluster.server.streams[STREAM].messages))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    texts = [f"{number:098d}" for number in range(2048)]
    answer = await gateway.encode(*texts)
    watching.cancel()
    assert answer.status_code == 200
    values = [slot["dense"]["values"] for slot in answer.json()["items"]]
    assert all(values[number] == pytest.approx(vector_of(ids_of(texts[number]))) for number in (0, 1, 1000, 2047))
    assert 1 <= most <= 3 + 3  # three that hold permits, and those whose ack is on its way
    assert [await gateway.metric(f"sie_gateway_permits_held_{unit}") for unit in ("tokens", "messages")] == [0, 0]


# refusals


async def overloaded(
    cluster: InProcess, *, requests: int, **environ: str
) -> tuple[GatewayProcess, list[asyncio.Task[Any]]]:
    """Send `requests` requests of 100 tokens to a worker that runs one at a time, twenty a second. Return when eight
    are answered.
    """
    adapter = TimedAdapter(cluster.folder / "timed.sock", 5e-4)
    await adapter.start()
    cluster.adapters.append(adapter)
    gateway = await cluster.gateway(SIE_GATEWAY_REQUEST_TIMEOUT="60", **environ)
    await cluster.sidecar(adapter, SIE_BATCHER_MAX_BATCH_REQUESTS="1")
    assert (await gateway.encode("x" * 98)).status_code == 200
    await until(
        lambda: any(status.state == "loaded" for status in cluster.beats[-1].models), "a heartbeat that says loaded"
    )
    open_ones = [
        asyncio.create_task(gateway.encode(f"{number:098d}", X_SIE_Timeout_Ms="60000")) for number in range(requests)
    ]
    await until(lambda: sum(task.done() for task in open_ones) >= 8, "eight answers", 30)
    return gateway, open_ones


async def test_what_would_wait_past_its_budget_is_refused_at_once_and_told_when_to_come(cluster: InProcess) -> None:
    """About 2.5 s of work are ahead. A request with a budget of 1 s is refused, and one with 40 s is answered."""
    gateway, open_ones = await overloaded(cluster, requests=60)
    answer = await gateway.encode("y" * 98, X_SIE_Timeout_Ms="1000")
    assert (answer.status_code, answer.json()["code"]) == (503, "QUEUE_FULL")
    assert answer.json()["error"]["queue_depth"] >= 1  # the others wait in the gateway
    assert 1 <= int(answer.headers["retry-after"]) <= 20
    assert answer.headers["x-should-retry"] == "true"
    assert await gateway.metric("sie_gateway_rejected_requests_total", reason="wait", machine_profile="_default") == 1
    patient = await gateway.encode("z" * 98, X_SIE_Timeout_Ms="40000")
    assert {patient.status_code, *(answer.status_code for answer in await asyncio.gather(*open_ones))} == {200}
    # an idle lane refuses nobody; 504 is no refusal, but a machine that stood still for a second
    assert (await gateway.encode("y" * 98, X_SIE_Timeout_Ms="1000")).status_code in (200, 504)


async def test_nothing_is_refused_without_a_measured_wait(cluster: InProcess) -> None:
    """A worker reports a low rate, and ten requests wait. No result has arrived yet."""
    gateway = await cluster.gateway()
    await tell(cluster, beat(rate=1.0, batch_cost=4096, credit_cost=16_384, credit_items=256, pipeline=2))
    open_ones = [asyncio.create_task(gateway.encode("x" * 392)) for _ in range(10)]
    await until(lambda: len(cluster.server.streams[STREAM].messages) == 10, "ten messages")
    hurried = asyncio.create_task(gateway.encode("y", X_SIE_Timeout_Ms="9000"))
    await until(lambda: cluster.server.streams[STREAM].last_sequence == 11, "it is queued")
    await cluster.sidecar(SIE_WORKER_ID="ghost")
    assert {answer.status_code for answer in await asyncio.gather(hurried, *open_ones)} == {200}


async def test_who_waits_and_turns_out_to_be_late_is_refused_before_its_time_is_over(cluster: InProcess) -> None:
    """Sixty requests need 6 s together and have budgets of 3 s. The first are answered. Others are refused before their
    budgets end: at the end they would get 504.
    """
    adapter = TimedAdapter(cluster.folder / "timed.sock", 1e-3)
    await adapter.start()
    cluster.adapters.append(adapter)
    gateway = await cluster.gateway()
    await cluster.sidecar(adapter, SIE_BATCHER_MAX_BATCH_REQUESTS="1")
    assert (await gateway.encode("x" * 98)).status_code == 200
    await until(
        lambda: any(status.state == "loaded" for status in cluster.beats[-1].models), "a heartbeat that says loaded"
    )

    async def one(number: int) -> int:
        return (await gateway.encode(f"{number:098d}", X_SIE_Timeout_Ms="3000")).status_code

    statuses = await asyncio.gather(*map(one, range(60)))
    assert statuses.count(200) >= 5
    assert statuses.count(503) >= 10
    assert await gateway.metric("sie_gateway_rejected_requests_total", reason="late") == statuses.count(503)
    assert [await gateway.metric(f"sie_gateway_permits_held_{unit}") for unit in ("tokens", "messages")] == [0, 0]


async def test_the_concurrency_limit_tells_when_to_come_again(cluster: InProcess) -> None:
    """Twenty requests are in progress, and about twenty end in a second. `Retry-After` grows with the number of clients
    that were refused before.
    """
    gateway, open_ones = await overloaded(cluster, requests=20, SIE_MAX_CONCURRENT_REQUESTS="20")
    more = [asyncio.create_task(gateway.encode(f"{number:098d}", X_SIE_Timeout_Ms="60000")) for number in range(100)]
    refused = [answer for answer in await asyncio.gather(*more) if answer.status_code == 503]
    assert len(refused) >= 40
    assert {(answer.json()["code"], answer.json()["error"]["queue_depth"]) for answer in refused} == {
        ("QUEUE_FULL", 20)
    }
    delays_s = [int(answer.headers["retry-after"]) for answer in refused]
    assert min(delays_s) >= 1
    assert max(delays_s) >= min(delays_s) + 2
    assert {answer.status_code for answer in await asyncio.gather(*open_ones)} == {200}


# cold lanes and models


async def test_a_lane_without_a_worker_is_held_and_then_told_to_be_starting(cluster: InProcess) -> None:
    """An SDK whose version expects 202 gets it, and other clients get 503. The work is withdrawn. Every gateway reports
    the demand.
    """
    gateways = [await cluster.gateway(SIE_LOAD_HOLD_S="0.3") for _ in range(2)]
    plain, reply = await asyncio.gather(gateways[0].encode("x"), gateways[0].encode("x", X_SIE_SDK_Version="0.6.4"))
    error = plain.json()["error"]
    assert (plain.status_code, error["code"], error["retryable"]) == (503, "PROVISIONING", True)
    assert (plain.headers["retry-after"], plain.headers["x-should-retry"]) == ("5", "true")
    assert reply.status_code == 202
    assert set(reply.json()) == {"status", "gpu", "bundle", "estimated_wait_s", "message"}
    assert (reply.json()["status"], reply.json()["gpu"], reply.json()["bundle"]) == (
        "provisioning",
        "_default",
        "default",
    )
    assert reply.headers["retry-after"] == "5"
    assert {name: error[name] for name in ("status", "gpu", "bundle")} == {
        name: reply.json()[name] for name in ("status", "gpu", "bundle")
    }
    assert not cluster.server.streams[STREAM].messages
    assert await gateways[0].metric("sie_gateway_provisioning_responses_total") == 2
    assert await gateways[0].metric("sie_gateway_pending_demand", machine_profile="_default", bundle="default") == 1
    for gateway in gateways:
        figures = (await gateway.get(SCALING)).json()
        assert figures == {
            "lane": "_default._default.default",
            "backlog_items": 0,
            "backlog_cost": 0,
            "oldest_age_s": 0.0,
            "ready_workers": 0,
            "wanted_replicas": 1,
            "reserved": 0,
            "demand": 1,
        }


async def test_a_worker_that_starts_within_the_hold_finds_the_work_and_the_start_is_a_slow_200(
    cluster: InProcess,
) -> None:
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="20")
    request_task = asyncio.create_task(gateway.encode("x"))
    await until(lambda: STREAM in cluster.server.streams and cluster.server.streams[STREAM].messages, "queued work")
    await cluster.sidecar()
    assert (await request_task).status_code == 200
    assert cluster.server.streams[STREAM].last_sequence == 1


async def test_a_model_that_is_being_loaded_says_so_when_the_hold_ends_and_never_a_time_out(cluster: InProcess) -> None:
    """The estimate is at most 10 s, the default before a load was measured."""
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="1")
    await cluster.sidecar(adapter)
    for headers in ({}, {"X_SIE_SDK_Version": "0.6.4"}, {"X_SIE_Timeout_Ms": "500"}):
        answer = await gateway.encode("x", **headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "MODEL_LOADING")
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert 1 <= error["estimated_wait_s"] <= 10
    assert adapter.loads == ["toy/one"]
    adapter.let_go()
    assert (await gateway.encode("x")).status_code == 200


async def test_a_ready_worker_that_has_not_begun_to_load_is_waited_for_to_the_end_of_the_budget(
    cluster: InProcess,
) -> None:
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="0.1")
    await tell(cluster, beat(model="toy/other"))
    answer = await gateway.encode("x", X_SIE_Timeout_Ms="600")
    assert (answer.status_code, answer.json()["code"]) == (504, "GATEWAY_TIMEOUT")


def test_the_time_that_is_left_of_a_load_is_told_by_the_last_one() -> None:
    now_s = 100.0
    fleet = Fleet(MemoryServer().connect("x"), settings_of(), lambda: now_s)
    fleet.note(beat("w1", state="loading"))
    assert fleet.loading_left_s(LANE, "toy/one") == 10.0
    now_s = 104.0
    fleet.note(beat("w1", state="loading", load_s=60.0))
    assert fleet.loading_left_s(LANE, "toy/one") == 56.0
    now_s = 170.0
    fleet.note(beat("w1", state="loading", load_s=60.0))
    assert fleet.loading_left_s(LANE, "toy/one") == 1.0
    fleet.note(beat("w1", load_s=60.0))
    assert fleet.loading_left_s(LANE, "toy/one") is None
    fleet.note(beat("w1", model="toy/other", state="unloading"))
    assert fleet.loading_left_s(LANE, "toy/one") == 10.0


def test_the_estimate_of_a_start_is_the_last_start_that_was_seen() -> None:
    """The lane is requested at 0 s and has a worker at 40 s. It is requested again at 1,000 s."""
    now_s = 0.0
    settings, server = settings_of(), MemoryServer()
    fleet = Fleet(server.connect("x"), settings, lambda: now_s)
    demand = DemandRecords(server.connect("y"), lambda: now_s, storage="memory", replicas=1)
    cold = ColdStarts(fleet, demand, Metrics(), lambda pool: "", lambda: now_s)
    cold.requested(LANE)
    assert cold.start_left_s(LANE) == 60.0
    now_s = 20.0
    cold.requested(LANE)
    assert cold.start_left_s(LANE) == 40.0
    now_s = 40.0
    fleet.note(beat(state="loading"))
    cold.requested(LANE)
    fleet.note(replace(beat(), leaving=True))
    now_s = 1000.0
    cold.requested(LANE)
    assert cold.start_left_s(LANE) == 40.0


def test_work_at_a_worker_is_waited_for_until_no_worker_of_the_lane_is_left() -> None:
    now_s = 0.0
    server = MemoryServer()
    fleet = Fleet(server.connect("x"), settings_of(), lambda: now_s)
    demand = DemandRecords(server.connect("y"), lambda: now_s, storage="memory", replicas=1)
    cold = ColdStarts(fleet, demand, Metrics(), lambda pool: "", lambda: now_s)
    fleet.note(beat())
    assert cold.check(LANE, "toy/one")
    for again in (replace(beat(), ready=False), replace(beat(), leaving=True)):  # the worker restarts, or is replaced
        fleet.note(again)
        assert cold.check(LANE, "toy/one", was_hosted=True)
        with pytest.raises(NotProvisioned):
            cold.check(LANE, "toy/one")
    fleet.note(beat(state="loading"))  # the worker loads the model again
    assert cold.check(LANE, "toy/one", was_hosted=True)
    now_s = settings_of().heartbeat_timeout_ms / 1000 + LOST_S
    with pytest.raises(NotProvisioned):
        cold.check(LANE, "toy/one", was_hosted=True)


def test_work_at_a_worker_that_was_moved_is_waited_for_until_it_reports_no_work() -> None:
    now_s = 0.0
    fleet = Fleet(MemoryServer().connect("x"), settings_of(), lambda: now_s)
    silent_s = settings_of().heartbeat_timeout_ms / 1000 + LOST_S
    fleet.note(beat())
    reserved = Lane("team", LANE.machine_profile, LANE.bundle)
    for _ in range(9):  # the batch that it had before takes longer than any heartbeat may be late
        now_s += silent_s // 3
        fleet.note(replace(beat(), pool="team", queue_depth=1))
        assert fleet.is_lane_alive(LANE)
        assert fleet.is_lane_alive(reserved)
    for seconds, is_alive in ((0, True), (silent_s - 1, True), (1, False)):  # its results may be on their way
        now_s += seconds
        fleet.note(replace(beat(), pool="team"))
        assert fleet.is_lane_alive(LANE) is is_alive
        assert fleet.is_lane_alive(reserved)


async def test_work_at_a_worker_that_was_moved_within_the_hold_is_waited_for(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="0.5")
    await tell(cluster, beat())

    async def is_known() -> bool:
        return (await gateway.get(SCALING)).json()["ready_workers"] == 1

    await until_told(is_known, "the worker is known")
    request_task = asyncio.create_task(gateway.encode("x", X_SIE_Timeout_Ms="2000"))
    await until(lambda: STREAM in cluster.server.streams and cluster.server.streams[STREAM].messages, "queued work")
    await tell(cluster, replace(beat(), pool="team", queue_depth=1))
    answer = await request_task
    assert (answer.status_code, answer.json()["code"]) == (504, "GATEWAY_TIMEOUT")
    assert (await gateway.encode("x")).json()["error"]["code"] == "PROVISIONING", "of a request that arrives later"


def test_a_worker_that_never_stops_working_counts_for_a_limited_number_of_lanes() -> None:
    fleet = Fleet(MemoryServer().connect("x"), settings_of(), lambda: 0.0)
    for number in range(MAX_LANES + 1):
        fleet.note(replace(beat(), pool=f"team-{number}", queue_depth=1))
    lanes = [Lane(f"team-{number}", LANE.machine_profile, LANE.bundle) for number in range(MAX_LANES + 1)]
    alive = [fleet.is_lane_alive(lane) for lane in lanes]
    assert alive == [False, *[True] * MAX_LANES]


@pytest.mark.parametrize("beats", [{}, {"SIE_HEARTBEAT_TIMEOUT_MS": "2000", "SIE_HEALTH_PUBLISH_INTERVAL_MS": "1500"}])
def test_work_at_a_worker_whose_server_of_the_broker_froze_is_waited_for(beats: dict[str, str]) -> None:
    """The server freezes just before a heartbeat. The worker notices it after three pings, and connects to another."""
    now_s, settings = 0.0, settings_of(**beats)
    fleet = Fleet(MemoryServer().connect("x"), settings, lambda: now_s)
    fleet.note(beat())
    now_s = settings.health_publish_interval_ms / 1000 + 3 * PING_S + 2.0
    assert fleet.is_lane_alive(LANE)


def test_work_at_a_worker_is_waited_for_while_the_broker_is_away() -> None:
    now_s = 0.0
    broker = MemoryServer().connect("x")
    fleet = Fleet(broker, settings_of(), lambda: now_s)
    fleet.note(beat())
    now_s = silent_s = settings_of().heartbeat_timeout_ms / 1000 + LOST_S
    assert not fleet.is_lane_alive(LANE)
    broker.disconnect()
    assert fleet.is_lane_alive(LANE)
    broker.reconnect()
    now_s += silent_s - 1
    assert fleet.is_lane_alive(LANE), "its next heartbeat may still come"
    now_s += 1
    assert not fleet.is_lane_alive(LANE)


async def test_a_model_that_loads_for_long_delays_nobody_and_spends_no_delivery(tmp_path: Path) -> None:
    """200 requests wait for a model whose load is held. Meanwhile each of 40 requests for another model runs in the
    next batch. Then the 200 are answered by their first delivery.
    """
    async with InProcess(tmp_path, toy_entry(), toy_entry("toy/slow")) as cluster:
        adapter, gateway = await cluster.adapter(), await cluster.gateway()
        await cluster.sidecar(adapter)
        assert (await gateway.encode("warm")).status_code == 200
        await placing(cluster)
        adapter.hold_loads = True
        slow = [asyncio.create_task(gateway.encode(f"{number}", model="toy/slow")) for number in range(200)]
        await adapter.until(lambda adapter: "toy/slow" in adapter.loads, "the load")
        for number in range(40):
            begun = len(adapter.batches)
            assert (await gateway.encode(f"quick {number}")).status_code == 200
            assert len(adapter.batches) == begun + 1
        assert not any(task.done() for task in slow)
        adapter.let_go()
        assert {answer.status_code for answer in await asyncio.gather(*slow)} == {200}
        assert adapter.loads == ["toy/one", "toy/slow"]
        assert await gateway.metric("sie_gateway_chunk_deliveries_bucket", le="1.0") == 241


# scaling


@pytest.mark.parametrize(
    ("backlog", "arriving", "rate", "ready", "reserved", "demand", "expected"),
    [
        (0, 0, 0, 0, 0, False, 0),
        (0, 0, 1000, 3, 0, False, 0),  # nothing to do
        (1, 0, 0, 0, 0, False, 1),
        (0, 0, 0, 0, 0, True, 1),
        (1, 0, 0, 3, 0, False, 3),  # without a rate: one, or the ready workers
        (0, 0, 1000, 0, 2, False, 2),  # the reserved workers
        (0, 700, 1000, 1, 0, False, 1),
        (0, 710, 1000, 1, 0, False, 2),
        (0, 7000, 1000, 3, 0, False, 10),  # for the arriving tokens
        (21_000, 0, 1000, 0, 0, False, 1),
        (210_000, 0, 1000, 4, 0, False, 10),
        (210_000, 700, 1000, 4, 0, False, 11),  # for the arriving tokens and the backlog
        (0, 1, 1000, 1, 0, False, 0),  # below 0.01 worker
    ],
)
def test_wanted_replicas_follow_from_work_and_rate(
    backlog: float, arriving: float, rate: float, ready: int, reserved: int, demand: bool, expected: int
) -> None:
    replicas = wanted_replicas(
        backlog_cost=backlog, arriving=arriving, rate=rate, ready_workers=ready, reserved=reserved, demand=demand
    )
    assert replicas == expected


@given(
    st.floats(0, 1e7),
    st.floats(0, 1e6),
    st.just(0.0) | st.floats(1, 1e6),
    st.integers(0, 50),
    st.integers(0, 5),
    st.booleans(),
)
def test_more_work_never_wants_fewer_workers(
    backlog: float, arriving: float, rate: float, ready: int, reserved: int, demand: bool
) -> None:
    def wanted(backlog: float, arriving: float, demand: bool) -> int:
        return wanted_replicas(
            backlog_cost=backlog, arriving=arriving, rate=rate, ready_workers=ready, reserved=reserved, demand=demand
        )

    least = wanted(backlog, arriving, demand)
    assert least >= max(reserved, 1 if backlog or demand else 0)
    assert least <= wanted(backlog * 1.5, arriving, demand)
    assert least <= wanted(backlog, arriving * 1.5, demand)
    assert least <= wanted(backlog, arriving, True)


async def test_a_record_of_demand_counts_for_a_minute_at_every_gateway_and_is_written_again_when_it_ages() -> None:
    """The age of a record is that of the broker's clock. A broker that is away delays a record and does not lose it."""
    server, now_s = MemoryServer(), 1000.0
    brokers = [server.connect(f"g{number}") for number in range(2)]
    writer, reader = (DemandRecords(broker, lambda: now_s, storage="memory", replicas=1) for broker in brokers)
    stop = Stop()
    running = asyncio.create_task(writer.run(stop))
    assert not await reader.is_wanted(LANE)

    async def written(count: int) -> None:
        buckets = server.buckets
        await until(
            lambda: (bucket := buckets.get(topology.DEMAND_BUCKET)) and bucket.revision == count, f"{count} writes"
        )

    writer.note(LANE)
    await written(1)
    assert await reader.is_wanted(LANE)
    assert not await reader.is_wanted(Lane("_default", "l4", "default"))
    now_s += 4
    writer.note(LANE)  # the record is young enough
    now_s += 55
    assert await reader.is_wanted(LANE)
    now_s += 1.5
    assert not await reader.is_wanted(LANE)
    assert not writer.pending()
    server.disconnect()
    writer.note(LANE)
    assert writer.pending() == {LANE}
    server.reconnect()
    await written(2)
    assert await reader.is_wanted(LANE)
    stop.request()
    await running
    for broker in brokers:
        await broker.close()


async def test_the_backlog_is_unknown_and_not_zero_while_the_broker_is_away() -> None:
    """Messages are counted by lane and priority. Models that share a consumer are included."""
    server, now_s = MemoryServer(), 0.0
    broker = server.connect("g")
    backlog = Backlog(broker, {"_default"}, lambda: now_s)
    assert backlog.messages(LANE, "bulk") is None
    await broker.ensure_stream(topology.work_stream("_default", storage="memory", replicas=1, max_bytes=0, max_age_s=0))
    second_lane = Lane("_default", "_default", "default-2")
    work = [(LANE, "bulk", "a"), (LANE, "bulk", "b"), (LANE, "interactive", "a"), (second_lane, "bulk", "a")]
    for number, (lane, priority, model) in enumerate(work):
        for subject in (topology.work_subject(lane, priority, model), topology.slot_subject(lane, priority, model)):
            await broker.publish(subject, b"x", f"{number}.{subject}")
    await asyncio.gather(*(backlog.fresh("_default", 1.0) for _ in range(5)))
    assert (
        backlog.messages(LANE, "bulk"),
        backlog.messages(LANE, "interactive"),
        backlog.messages(second_lane, "bulk"),
    ) == (
        4,
        2,
        2,
    )
    assert backlog.by_subject("_default") == {
        of(*entry): 1 for entry in work for of in (topology.work_subject, topology.slot_subject)
    }
    server.disconnect()
    with pytest.raises(BrokerError):
        await backlog.fresh("_default", 0.0)
    assert backlog.messages(LANE, "bulk") == 4
    now_s = 6.0
    assert backlog.messages(LANE, "bulk") is None
    server.reconnect()
    await backlog.stop()
    await broker.close()


async def test_a_lane_with_work_and_no_worker_wants_one_at_every_gateway_alike(cluster: InProcess) -> None:
    """Leased messages count as waiting ones; the oldest has an age; three gateways have equal figures."""
    gateways = [await cluster.gateway() for _ in range(3)]
    assert (await gateways[2].get(SCALING)).json()["wanted_replicas"] == 0
    tasks = [asyncio.create_task(gateway.encode("x" * 392)) for gateway in gateways[:2]]
    await until(lambda: len(cluster.server.streams[STREAM].messages) == 2, "queued work")

    async def figures(gateway: GatewayProcess) -> dict[str, Any]:
        report: dict[str, Any] = (await gateway.get(SCALING)).json()
        return report

    async with asyncio.timeout(30):
        while True:  # until each gateway has counted what the others sent
            reports = [await figures(gateway) for gateway in gateways]
            ages = [report.pop("oldest_age_s") for report in reports]
            if all(report["backlog_cost"] == 200 for report in reports):
                break
    assert reports[0] == reports[1] == reports[2]
    assert (reports[0]["backlog_items"], reports[0]["wanted_replicas"], reports[0]["demand"]) == (
        2,
        1,
        1,
    )
    assert all(0 < age < 60 for age in ages)
    adapter = await cluster.adapter()
    adapter.hold_batches = True
    await cluster.sidecar(adapter)
    await adapter.until(lambda adapter: adapter.batches, "a batch")
    leased = await figures(gateways[0])
    assert (leased["backlog_items"], leased["ready_workers"], leased["wanted_replicas"]) == (2, 1, 1)
    adapter.let_go()
    assert {(await task).status_code for task in tasks} == {200}


async def test_scaling_answers_lanes_that_exist_and_never_zeros_for_what_it_cannot_know(cluster: InProcess) -> None:
    """404 for an unknown lane, zeros for one without traffic, 503 without the broker."""
    gateway = await cluster.gateway(SIE_GATEWAY_CONFIGURED_GPUS="L4, a100")
    for lane in ("_default.l4.default", "_default.a100.default", "_default._default.default"):
        answer = await gateway.client.get(f"/v1/scaling/{lane}")
        assert answer.status_code == 200
        assert [
            answer.json()[name]
            for name in ("backlog_items", "backlog_cost", "oldest_age_s", "wanted_replicas", "demand")
        ] == [0] * 5
    for lane in ("_default.h100.default", "other.l4.default", "_default.l4.nothing", "x"):
        answer = await gateway.client.get(f"/v1/scaling/{lane}")
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")
    cluster.server.disconnect()
    answer = await gateway.get("/v1/scaling/_default.l4.default")
    cluster.server.reconnect()
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "QUEUE_UNAVAILABLE", "2")


async def test_scaling_needs_a_token_on_the_main_port_and_none_on_that_of_metrics(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN="secret-good")
    assert (await gateway.client.get(SCALING)).status_code == 401
    assert (await gateway.client.get(SCALING, headers={"Authorization": "Bearer secret-good"})).status_code == 200
    assert (await gateway.get(SCALING)).status_code == 200


# fairness


class TimedAdapter(FakeAdapter):
    """Adapter whose device runs one batch at a time, for a time in proportion to its tokens."""

    def __init__(self, path: Path, token_s: float) -> None:
        super().__init__(path)
        self.token_s = token_s
        self._device = asyncio.Lock()

    async def _run(self, batch: ipc.RunBatch, writer: asyncio.StreamWriter) -> None:
        self.batches.append(batch)
        self._note()
        async with self._device:
            await asyncio.sleep(self.token_s * tokens_of(batch))
        self.batches.remove(batch)
        await super()._run(batch, writer)


def tokens_of(batch: ipc.RunBatch) -> int:
    return len(batch.ids) // 4


# long: 10 s of batches; the order is held by test_window.py and test_scheduler.py
@pytest.mark.long
async def test_the_backlog_of_one_key_lets_the_requests_of_another_into_the_next_batch(cluster: InProcess) -> None:
    """Key a sends six requests of 2,048 texts of 60 tokens. When the device is busy, key b sends 25 requests, one at a
    time. Half of them run after at most two full batches, of the 180 that the texts of a fill. A full batch takes 40
    ms, longer than the process may pause.
    """
    adapter = TimedAdapter(cluster.folder / "timed.sock", 1e-5)
    await adapter.start()
    cluster.adapters.append(adapter)
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKENS="key-a,key-b", SIE_CHUNK_COST="1024")
    await cluster.sidecar(adapter, SIE_MAX_BATCH_COST="4096", SIE_BATCHER_MAX_BATCH_REQUESTS="64")
    a, b = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    assert (
        await gateway.encode(*["x" * 58] * 40, **a)
    ).status_code == 200  # the gateway learns that a token of this tokenizer is a byte
    await until(
        lambda: any(status.state == "loaded" for status in cluster.beats[-1].models), "a heartbeat that says loaded"
    )
    assert (await gateway.encode("warm", **b)).status_code == 200
    backlog = [asyncio.create_task(gateway.encode(*[f"{number:058d}"] * 2048, **a)) for number in range(6)]
    await until(lambda: len(adapter.batches) > 5, "a busy device")
    ahead = []
    for number in range(25):
        text = f"b {number}"
        before = list(adapter.batches)
        assert (await gateway.encode(text, **b)).status_code == 200
        mine = next(batch for batch in reversed(adapter.batches) if text in texts_of(batch))
        passed = [batch for batch in adapter.batches[: adapter.batches.index(mine)] if batch not in before]
        ahead.append(sum(map(tokens_of, passed)))
    assert not all(task.done() for task in backlog)
    assert sorted(ahead)[12] <= 2 * 4096
    assert sorted(ahead)[-2] <= 4 * 4096
    for task in backlog:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*backlog)


async def test_later_announcements_have_the_number_of_erasures() -> None:
    server = MemoryServer()
    peers = Peers(server.connect("g"), dict)
    assert peers.beat().erasures == 0
    await peers.announce(AnswerErasure(model="a"))
    server.disconnect()
    with pytest.raises(BrokerError):
        await peers.announce(AnswerErasure(model="b"))
    assert peers.beat().erasures == 2
