"""Results that are too large for one message: parts, their bounds, lost and damaged parts. ResultDelivery and
ResultInbox run over both brokers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_adapter import FakeAdapter, toy_entry
from inprocess import WAIT_S, InProcess, until
from nats_server import NatsServer

from sie_broker import Broker, CoreMessage
from sie_broker.memory import MemoryServer
from sie_broker.nats import connect
from sie_contracts import arrays
from sie_contracts.errors import InferenceFailed, InternalFailure, ResourceExhausted
from sie_contracts.wire import ipc, messages
from sie_contracts.wire.messages import (
    ArraySlice,
    Failed,
    Fragment,
    Input,
    Ok,
    RunOptions,
    WorkItem,
    WorkResult,
    WorkResults,
)
from sie_gateway.inference import results
from sie_gateway.inference.fragments import Fragments, InboxFull, put_together
from sie_gateway.inference.results import ResultInbox
from sie_gateway.metrics import Metrics as GatewayMetrics
from sie_runtime import failpoints
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.settle import Leases, ResultDelivery, failed, part_bytes

WIDTH = 1024


# the bounds, without a broker


def part(
    index: int, count: int = 3, *, request: str = "r", chunk: int = 0, digest: str = "d", size: int = 1000
) -> Fragment:
    return Fragment(request, chunk, 0, index, count, digest, bytes(size))


def test_parts_are_kept_once_and_in_any_order() -> None:
    fragments = Fragments()
    assert [fragments.add(part(index), 0.0).missing for index in (2, 0, 2, 0)] == [2, 1, 1, 1]
    held = fragments.held.used
    whole = fragments.add(part(1), 0.0)
    assert (whole.missing, len(fragments._all)) == (0, 1)
    assert [len(piece or b"") for piece in whole.parts] == [1000] * 3
    assert fragments.held.used > held
    fragments.drop(whole)
    assert (fragments.held.used, len(fragments._all)) == (0, 0)


def test_two_attempts_at_a_chunk_do_not_mix() -> None:
    fragments = Fragments()
    first, two = fragments.add(part(0, digest="one"), 0.0), fragments.add(part(1, digest="two"), 0.0)
    assert (first.missing, two.missing) == (2, 2)


def test_one_request_cannot_fill_the_gateway_and_all_of_them_neither() -> None:
    fragments = Fragments(max_bytes=11_000, max_request_bytes=5_000)
    for index in range(4):
        fragments.add(part(index, 9), 0.0)
    with pytest.raises(InboxFull, match="one request"):
        fragments.add(part(4, 9), 0.0)
    for index in range(4):
        fragments.add(part(index, 9, request="other"), 0.0)
    fragments.add(part(0, 9, request="third"), 0.0)
    with pytest.raises(InboxFull, match="this gateway"):
        fragments.add(part(1, 9, request="third"), 0.0)
    for request in ("r", "other", "third"):
        fragments.drop_request(request)
    assert (fragments.held.used, len(fragments._all)) == (0, 0)


def test_incomplete_results_of_one_key_leave_memory_to_other_keys() -> None:
    fragments = Fragments(max_bytes=16_000)
    for index in range(13):
        fragments.add(part(index, 20), 0.0, "bulk")
    with pytest.raises(InboxFull):
        fragments.add(part(0, 2, request="large", size=3_000), 0.0, "other")
    with pytest.raises(InboxFull, match="of them of this client's key"):
        fragments.add(part(13, 20), 0.0, "bulk")
    fragments.add(part(0, 2, request="other"), 0.0, "other")
    for request in ("r", "large", "other"):
        fragments.drop_request(request)
    assert (fragments.held.used, fragments.held.used_by) == (0, {})


def test_parts_that_are_announced_and_do_not_come_are_limited_too() -> None:
    """Each first part reserves slots for all parts that it announces."""
    fragments = Fragments(max_request_bytes=10 << 20)
    for digest in ("first", "second"):
        fragments.add(part(0, 1 << 16, digest=digest, size=1), 0.0)
    with pytest.raises(InboxFull, match="one request"):
        fragments.add(part(0, 1 << 16, digest="third", size=1), 0.0)
    fragments.drop_request("r")
    assert (fragments.held.used, len(fragments._all)) == (0, 0)


def test_what_had_no_part_for_long_gives_its_room_and_is_then_incomplete() -> None:
    fragments = Fragments(max_bytes=3_000, silence_s=30.0)
    fragments.add(part(0, 2, request="silent"), 0.0)
    busy = fragments.add(part(0, 2, request="busy"), 25.0)
    with pytest.raises(InboxFull):
        fragments.add(part(0, request="new"), 29.0)
    fragments.drop_request("new")
    assert fragments.add(part(0, request="new"), 31.0).missing == 2
    assert fragments.add(part(1, 2, request="silent", size=1), 31.0).missing == 1, (
        "the first part is gone: all are sent again"
    )
    assert busy.missing == 1


def test_what_is_being_checked_is_never_dropped_for_its_age() -> None:
    fragments = Fragments(silence_s=30.0)
    whole = fragments.add(part(0, 1), 0.0)
    whole.checking = True
    fragments.add(part(0, request="new"), 100.0)
    assert fragments.add(part(0, 1), 100.0) is whole


def test_parts_of_another_size_begin_anew() -> None:
    """The broker restarted with another limit of a message."""
    fragments = Fragments()
    fragments.add(part(0, 3), 0.0)
    again = fragments.add(part(1, 5), 0.0)
    assert (again.missing, fragments.held.used, len(fragments._all)) == (4, again.held_bytes, 1)


def test_the_end_of_a_check_drops_no_parts_of_another_split() -> None:
    fragments = Fragments()
    for index in range(2):
        checked = fragments.add(part(index, 2), 0.0)
    checked.checking = True
    fragments.add(part(0, 3), 0.1)
    fragments.drop(checked)
    assert len(fragments._all) == 1
    fragments.drop_request("r")
    assert (fragments.held.used, len(fragments._all)) == (0, 0)


@pytest.mark.parametrize(
    "bad",
    [part(3), part(-1), part(0, 0), part(0, 1 << 20), part(0, size=0)],
    ids=["behind", "negative", "none", "too many", "empty"],
)
def test_what_is_no_part_is_refused(bad: Fragment) -> None:
    fragments = Fragments()
    with pytest.raises(ValueError, match="part"):
        fragments.add(bad, 0.0)
    assert len(fragments._all) == 0


@pytest.mark.parametrize("limit", [1 << 10, 1 << 16, 1 << 20, 8 << 20])
def test_a_part_fits_its_message_to_the_last_byte(limit: int) -> None:
    work, digest = item("x" * 36, "inbox"), "f" * 64
    size = part_bytes(work, digest, 1 << 30, limit)
    encoded = messages.encode(Fragment(work.request, work.chunk, work.attempt, 1 << 20, 1 << 20, digest, bytes(size)))
    assert limit - 64 < len(encoded) <= limit


# over a broker


def item(request: str, reply: str, chunk: int = 0) -> WorkItem:
    return WorkItem(request, chunk, "m", "v", "encode", (Input("a"),), RunOptions(), reply, 60_000, together=True)


def result_of(request: str, rows: int, chunk: int = 0, *, seed: int = 0) -> WorkResult:
    values = np.random.default_rng(seed).random((rows, WIDTH), np.float32)
    outcome = Ok({"multivector": ArraySlice("<f4", values.shape, 0)}, rows)
    return WorkResult(request, chunk, "w", (outcome,), values.tobytes())


@dataclass
class Delivered:
    sequence: int
    data: bytes = b""
    delivered: int = 1
    acks: int = 0
    subject: str = "sie.work._default.l4.default.interactive.m"

    async def ack(self) -> None:
        self.acks += 1


CONFIRMED = messages.encode(messages.Confirmation("unknown"))


class Side:
    """A gateway's inbox and a worker's settlement, each on a connection of its own."""

    def __init__(self, gateway: Broker, worker: Broker, fragments: Fragments | None = None) -> None:
        self.metrics = GatewayMetrics()
        self.worker = worker
        self.inbox = ResultInbox(gateway, self.metrics, fragments)
        self.leases = Leases(10.0, lambda: True, time.monotonic)
        self.results = ResultDelivery(worker, self.leases, SidecarMetrics())
        self._sequence = 0

    async def answer(self, result: WorkResult, *, reply: str = "", budget_s: float = 60.0) -> Delivered:
        self._sequence += 1
        delivery = Delivered(self._sequence)
        lease = self.leases.hold(delivery)  # type: ignore[arg-type]
        work = item(result.request, reply or f"{self.inbox.subject}.{result.request}", result.chunk)
        await self.results.send(lease, work, result, time.monotonic() + budget_s)
        return delivery

    async def send(self, part: Fragment) -> str:
        answer = await self.worker.request(f"{self.inbox.subject}.{part.request}", messages.encode(part), WAIT_S)
        return messages.decode_confirmation(answer).verdict

    def outcomes(self, verdict: str) -> float:
        return self.metrics.registry.get_sample_value("sie_gateway_outcomes_total", {"verdict": verdict}) or 0.0


@contextlib.asynccontextmanager
async def sides(max_payload: int, fragments: Fragments | None = None) -> AsyncIterator[Side]:
    server = MemoryServer(max_payload=max_payload)
    side = Side(server.connect("gateway"), server.connect("worker"), fragments)
    await side.inbox.start()
    try:
        yield side
    finally:
        failpoints.arm("")
        await side.inbox.stop()


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    async with sides(1 << 16) as side:
        yield side


async def test_a_result_that_no_message_holds_arrives_whole_and_is_acked_once(side: Side) -> None:
    collector = side.inbox.open("r", 2)
    large, small = result_of("r", 100), result_of("r", 1, 1)
    deliveries = await asyncio.gather(side.answer(large), side.answer(small))
    await collector.wait(WAIT_S)
    assert collector.results == [large, small]
    assert [delivery.acks for delivery in deliveries] == [1, 1]
    assert (side.outcomes("taken"), side.inbox.unfinished_bytes) == (2, 0)


@contextlib.asynccontextmanager
async def counted(side: Side) -> AsyncIterator[list[CoreMessage]]:
    """Yield the messages that reach the inbox."""
    seen: list[CoreMessage] = []

    async def on_message(message: CoreMessage) -> None:
        seen.append(message)

    subscription = await side.worker.subscribe(f"{side.inbox.subject}.*", on_message)
    yield seen
    await subscription.stop()


async def test_results_that_are_ready_together_are_one_message_and_one_confirmation(side: Side) -> None:
    collectors = [side.inbox.open(f"r{number}", 1) for number in range(3)]
    async with counted(side) as seen:
        answers = (side.answer(result_of(f"r{number}", 1)) for number in range(4))
        deliveries = await asyncio.gather(*answers)
        assert [collector.results for collector in collectors] == [[result_of(f"r{number}", 1)] for number in range(3)]
    assert len(seen) == 1
    assert [delivery.acks for delivery in deliveries] == [1] * 4
    assert (side.outcomes("taken"), side.outcomes("unknown")) == (3, 1)


async def test_results_of_two_gateways_and_those_over_the_size_of_a_message_go_apart(side: Side) -> None:
    rows = side.worker.max_payload // (4 * WIDTH) // 2
    other = ResultInbox(side.worker, GatewayMetrics())
    await other.start()
    collectors = [side.inbox.open("a", 1), side.inbox.open("b", 1), other.open("c", 1), other.open("d", 1)]
    async with counted(side) as seen:
        await asyncio.gather(
            side.answer(result_of("a", rows)),
            side.answer(result_of("c", 1), reply=f"{other.subject}.c"),
            side.answer(result_of("b", rows)),
            side.answer(result_of("d", 1), reply=f"{other.subject}.d"),
        )
    assert [collector.missing for collector in collectors] == [0] * 4
    assert len(seen) == 2
    await other.stop()


async def test_a_lost_confirmation_of_several_results_has_each_sent_again(side: Side) -> None:
    for number in range(3):
        side.inbox.open(f"r{number}", 1)
    failpoints.arm("results.before_confirm=error")
    deliveries = await asyncio.gather(*(side.answer(result_of(f"r{number}", 1)) for number in range(3)))
    assert [delivery.acks for delivery in deliveries] == [1] * 3
    assert (side.outcomes("taken"), side.outcomes("duplicate")) == (3, 3)


async def test_a_failed_result_goes_alone_because_its_lease_bounds_its_wait(side: Side) -> None:
    error = WorkResult("failed", 0, "w", (Failed(InternalFailure("no").info()),))
    for request in ("failed", "r"):
        side.inbox.open(request, 1)
    async with counted(side) as seen:
        await asyncio.gather(side.answer(error), side.answer(result_of("r", 1)))
    assert len(seen) == 2


async def test_a_result_among_others_that_cannot_be_read_fails_its_request_alone(side: Side) -> None:
    broken, whole = side.inbox.open("broken", 1), side.inbox.open("whole", 1)
    together = WorkResults(("broken", "whole"), (b"\xc1", messages.encode(result_of("whole", 1))))
    answer = await side.worker.request(f"{side.inbox.subject}.broken", messages.encode(together), WAIT_S)
    assert messages.decode_confirmations(answer).verdicts == ("unknown", "taken")
    await whole.wait(WAIT_S)
    with pytest.raises(InternalFailure):
        await broken.wait(WAIT_S)


async def test_a_result_is_sent_after_the_task_of_an_earlier_one_was_cancelled(side: Side) -> None:
    for steps in range(12):  # in one of these iterations of the loop, the task waits for further results
        first = asyncio.create_task(side.answer(result_of("first", 1)))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        collector = side.inbox.open(f"r{steps}", 1)
        await asyncio.wait_for(side.answer(result_of(f"r{steps}", 1)), WAIT_S)
        assert collector.missing == 0
        await asyncio.gather(first, return_exceptions=True)


async def test_a_gateway_that_does_not_accept_results_together_gets_each_alone(side: Side) -> None:
    leases = [side.leases.hold(Delivered(number)) for number in range(100, 103)]  # type: ignore[arg-type]
    requests = [f"r{number}" for number in range(3)]
    collectors = [side.inbox.open(request, 1) for request in requests]
    async with counted(side) as seen:
        await asyncio.gather(
            *(
                side.results.send(
                    lease,
                    msgspec.structs.replace(item(request, f"{side.inbox.subject}.{request}"), together=False),
                    result_of(request, 1),
                    time.monotonic() + WAIT_S,
                )
                for lease, request in zip(leases, requests, strict=True)
            )
        )
    assert [collector.missing for collector in collectors] == [0] * 3
    assert len(seen) == 3


@pytest.mark.parametrize("data", [b"\xc1", messages.encode(Fragment("r", 0, 0, 2, 2, "", b"part"))])
async def test_a_result_that_cannot_be_read_fails_its_request_and_is_sent_once(side: Side, data: bytes) -> None:
    collector = side.inbox.open("r", 1)
    answer = await side.worker.request(f"{side.inbox.subject}.r", data, WAIT_S)
    assert messages.decode_confirmation(answer).verdict == "unknown"
    with pytest.raises(InternalFailure, match="could not read a result"):
        await collector.wait(WAIT_S)
    assert side.outcomes("undecodable") == 1


async def test_a_lost_confirmation_costs_its_part_again_and_nothing_else(side: Side) -> None:
    """The confirmation of the first part is lost."""
    collector = side.inbox.open("r", 1)
    failpoints.arm("results.before_confirm=error")
    delivery = await side.answer(result_of("r", 40))
    await collector.wait(WAIT_S)
    assert collector.results == [result_of("r", 40)]
    assert (delivery.acks, side.outcomes("taken"), side.outcomes("damaged")) == (1, 1, 0)


async def test_a_gateway_that_confirms_no_results_is_logged_once_until_it_confirms_one(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Results of a dead gateway and of a live one alternate."""

    def warnings() -> int:
        return sum("confirms no results" in record.message for record in caplog.records)

    dead = f"sie.result.{'d' * 32}"
    for number in range(20):
        side.inbox.open(f"r{number}", 1)
        await side.answer(result_of("gone", 1), reply=f"{dead}.gone{number}", budget_s=0.0)
        await side.answer(result_of(f"r{number}", 1))
    assert (warnings(), side.outcomes("taken")) == (1, 20)
    returned = await side.worker.subscribe(f"{dead}.*", lambda message: side.worker.send(message.reply, CONFIRMED))
    await side.answer(result_of("gone", 1), reply=f"{dead}.gone")
    await returned.stop()
    await side.answer(result_of("gone", 1), reply=f"{dead}.gone", budget_s=0.0)
    assert warnings() == 2


async def relayed(side: Side, harm: list[bytes]) -> str:
    """Return an address that relays messages to the inbox, and sets each sequence of bytes of `harm` to zero once."""

    async def pass_on(message: CoreMessage) -> None:
        data = message.data
        if harm and harm[0] in data:
            data = data.replace(harm.pop(0), bytes(8))
        await side.worker.send(f"{side.inbox.subject}.r", data, message.reply)

    await side.worker.subscribe("relay", pass_on)
    return "relay"


async def test_a_damaged_result_is_sent_again(side: Side) -> None:
    """Eight bytes of a vector change once in transit."""
    collector = side.inbox.open("r", 1)
    result = result_of("r", 100)
    relay = await relayed(side, [result.block[200_000:200_008]])
    delivery = await side.answer(result, reply=relay)
    await collector.wait(WAIT_S)
    assert collector.results == [result]
    assert (delivery.acks, side.outcomes("damaged"), side.inbox.unfinished_bytes) == (1, 1, 0)


async def test_a_result_that_is_damaged_every_time_ends_in_an_error(side: Side) -> None:
    collector = side.inbox.open("r", 1)
    result = result_of("r", 100)
    relay = await relayed(side, [result.block[200_000:200_008]] * 10)
    delivery = await side.answer(result, reply=relay)
    await collector.wait(WAIT_S)
    (got,) = collector.results
    assert got is not None
    assert [outcome.error.code for outcome in got.outcomes] == ["INTERNAL_ERROR"]  # type: ignore[union-attr]
    assert (delivery.acks, side.outcomes("damaged")) == (1, 3)


def parts_of(result: WorkResult, size: int = 50_000) -> list[Fragment]:
    data = messages.encode(result)
    digest, count = hashlib.sha256(data).hexdigest(), -(-len(data) // size)
    return [
        Fragment(result.request, result.chunk, 0, index, count, digest, data[index * size : (index + 1) * size])
        for index in range(count)
    ]


async def test_the_first_terminal_outcome_wins_between_the_parts_of_two_attempts(side: Side) -> None:
    """A stale worker has sent some parts when a second one finishes. The other parts are duplicates and not stored."""
    collector = side.inbox.open("r", 1)
    stale, fresh = parts_of(result_of("r", 100)), parts_of(result_of("r", 100, seed=1))
    assert [await side.send(piece) for piece in stale[:4]] == ["part"] * 4
    assert [await side.send(piece) for piece in fresh] == ["part"] * (len(fresh) - 1) + ["taken"]
    assert [await side.send(piece) for piece in stale[4:]] == ["duplicate"] * (len(stale) - 4)
    assert collector.results == [result_of("r", 100, seed=1)]
    side.inbox.close(collector)
    assert side.inbox.unfinished_bytes == 0
    assert await side.send(stale[0]) == "unknown"


async def test_an_error_that_comes_between_parts_is_the_outcome(side: Side) -> None:
    collector = side.inbox.open("r", 1)
    pieces = parts_of(result_of("r", 100))
    assert await side.send(pieces[0]) == "part"
    error = failed(result_of("r", 1), InferenceFailed("no"))
    await side.answer(error)
    assert [await side.send(piece) for piece in pieces[1:]] == ["duplicate"] * (len(pieces) - 1)
    assert collector.results == [error]


async def test_the_last_part_sent_twice_is_checked_once(side: Side) -> None:
    """The second copy arrives while the first is checked."""
    collector = side.inbox.open("r", 1)
    *before, last = parts_of(result_of("r", 2000), 60_000)
    for piece in before:
        await side.send(piece)
    await side.worker.send(f"{side.inbox.subject}.r", messages.encode(last))
    await side.worker.send(f"{side.inbox.subject}.r", messages.encode(last))
    await collector.wait(WAIT_S)
    assert await side.send(last) == "duplicate"
    assert (side.outcomes("taken"), side.outcomes("duplicate")) == (1, 0)


async def test_a_result_without_room_is_a_typed_error_at_once() -> None:
    """The request fails, its parts are dropped, and the worker acks its message."""
    async with sides(1 << 16, Fragments(max_request_bytes=200_000)) as side:
        collector = side.inbox.open("r", 1)
        delivery = await side.answer(result_of("r", 100))
        with pytest.raises(ResourceExhausted, match="no memory for the results"):
            await collector.wait(WAIT_S)
        assert (delivery.acks, side.inbox.unfinished_bytes, side.outcomes("no_room")) == (1, 0, 1)


async def test_parts_that_were_forgotten_are_sent_again(side: Side) -> None:
    """The inbox drops the parts half way, like parts that are too old."""
    collector = side.inbox.open("r", 1)
    harmless: list[bytes] = []
    relay = await relayed(side, harmless)
    count = 0

    async def drop_once(message: CoreMessage) -> None:
        nonlocal count
        count += 1
        if count == 4:
            side.inbox._fragments.drop_request("r")
        await side.worker.send(relay, message.data, message.reply)

    await side.worker.subscribe("lossy", drop_once)
    delivery = await side.answer(result_of("r", 100), reply="lossy")
    await collector.wait(WAIT_S)
    assert (delivery.acks, side.outcomes("damaged")) == (1, 0)
    assert count > len(parts_of(result_of("r", 100)))


async def test_others_are_confirmed_while_a_large_result_is_checked(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inbox computes the digest outside of its event loop."""
    begun, released = threading.Event(), threading.Event()

    def check(parts: Sequence[bytes], digest: str) -> WorkResult:
        begun.set()
        assert released.wait(WAIT_S)
        return put_together(parts, digest)

    monkeypatch.setattr(results, "put_together", check)
    large, small = side.inbox.open("large", 1), side.inbox.open("small", 1)
    pieces = parts_of(result_of("large", 100))
    for piece in pieces[:-1]:
        await side.send(piece)
    last = asyncio.create_task(side.send(pieces[-1]))
    await until(begun.is_set, "the check")
    await side.answer(result_of("small", 1))
    await small.wait(WAIT_S)
    assert not last.done()
    released.set()
    assert await last == "taken"
    await large.wait(WAIT_S)


async def test_a_dropped_result_fails_its_request_at_once_and_no_other() -> None:
    """A confirmation blocks the loop of the inbox while more results arrive than it may hold."""
    server = MemoryServer(max_payload=2 << 20)

    class Stuck:
        """A connection whose sends wait for `release`."""

        def __init__(self) -> None:
            self.inner = server.connect("gateway")
            self.release = asyncio.Event()
            self.subscribe = self.inner.subscribe

        async def send(self, subject: str, data: bytes, reply: str = "") -> None:
            await self.release.wait()
            await self.inner.send(subject, data, reply)

    stuck, worker = Stuck(), server.connect("worker")
    metrics = GatewayMetrics()
    inbox = ResultInbox(stuck, metrics)  # type: ignore[arg-type]
    await inbox.start()
    first, second = inbox.open("first", 400), inbox.open("second", 1)
    block = bytes(1 << 20)
    for chunk in range(300):
        await worker.send(
            f"{inbox.subject}.first", messages.encode(WorkResult("first", chunk, "w", (), block)), "nobody"
        )
    with pytest.raises(ResourceExhausted, match="in time"):
        await first.wait(WAIT_S)
    assert metrics.registry.get_sample_value("sie_gateway_inbox_dropped_total") >= 40  # type: ignore[operator]
    stuck.release.set()
    await until(lambda: first.missing < 300, "what had room was read")
    await worker.send(f"{inbox.subject}.second", messages.encode(WorkResult("second", 0, "w", ())), "nobody")
    await second.wait(WAIT_S)
    await inbox.stop()


async def test_two_million_floats_pass_a_broker_of_64_kib_on_the_same_connections(tmp_path: Path) -> None:
    """One result has 2,048 x 1,024 floats. No connection is opened again, as after a message above the limit of the
    broker.
    """
    with NatsServer(tmp_path / "nats", max_payload=1 << 16) as server:
        gateway, worker = await connect(server.url, name="gateway"), await connect(server.url, name="worker")
        side = Side(gateway, worker)
        await side.inbox.start()
        collector = side.inbox.open("r", 1)

        async def connections() -> int:
            async with httpx.AsyncClient(base_url=server.monitor_url, trust_env=False) as client:
                total: int = (await client.get("/varz")).json()["total_connections"]
                return total

        before = await connections()
        delivery = await side.answer(result_of("r", 2048))
        await collector.wait(WAIT_S)
        assert collector.results == [result_of("r", 2048)]
        assert (delivery.acks, side.inbox.unfinished_bytes) == (1, 0)
        assert await connections() == before
        assert gateway.connected
        assert worker.connected
        await side.inbox.stop()
        await gateway.close()
        await worker.close()


class WideAdapter(FakeAdapter):
    """An adapter that answers every text with token vectors of `rows` x 1,024 numbers: 8 MB for 2,048 rows."""

    rows = 2048

    @classmethod
    def values(cls, place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.random.default_rng(place).random((cls.rows, WIDTH), np.float32)

    async def _send(self, writer: asyncio.StreamWriter, reply: ipc.Reply) -> None:  # type: ignore[override]
        if isinstance(reply, ipc.BatchDone):
            size = 4 * self.rows * WIDTH
            outcomes = tuple(
                Ok({"multivector": ArraySlice("<f4", (self.rows, WIDTH), place * size)}, 4)
                for place in range(len(reply.outcomes))
            )
            block = b"".join(self.values(place).tobytes() for place in range(len(outcomes)))
            reply = ipc.BatchDone(reply.batch, outcomes, block, 1.0)
        await super()._send(writer, reply)


async def test_an_answer_of_which_no_vector_fits_a_message_reaches_the_client(tmp_path: Path) -> None:
    """The broker has a limit of 64 KiB. One chunk has three texts whose results have 8 MB each."""
    entry = toy_entry(outputs={"dense": 8, "multivector": WIDTH})
    async with InProcess(tmp_path, entry, max_payload=1 << 16) as cluster:
        gateway = await cluster.gateway()
        adapter = WideAdapter(tmp_path / "wide.sock")
        cluster.adapters.append(adapter)
        await adapter.start()
        await cluster.sidecar(adapter)
        body = {"items": ["a", "b", "c"], "params": {"output_types": ["multivector"]}}
        answer = await gateway.client.post("/v1/encode/toy/one", json=body, headers={"accept": "application/msgpack"})
        assert answer.status_code == 200, answer.text
        slots = arrays.unpack(msgspec.msgpack.decode(answer.content))["items"]
        assert len(slots) == 3
        for slot in slots:
            assert slot["multivector"]["values"].shape == (2048, WIDTH)
        assert np.array_equal(slots[0]["multivector"]["values"], adapter.values(0))
        assert await gateway.metric("sie_gateway_unfinished_result_bytes") == 0
        assert await gateway.metric("sie_gateway_outcomes_total", verdict="taken") == 1
