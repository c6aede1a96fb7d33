"""Inputs that end adapters: the second death alone is the verdict, and then they are refused. All others are
answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from direct import ENTRY, Direct, is_right, reasons
from fake_adapter import texts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until

from sie_broker import Delivery, Write
from sie_broker.dead_letters import Letters
from sie_broker.memory import MemoryServer
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.media.contents import content_keys
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests, Input, RunOptions, WorkItem
from sie_contracts.wire.topology import POISON_BUCKET, POISON_LIFETIME_S
from sie_sidecar.poison import MAX_MARKS, Mark, PoisonMarks, after_death

POISON = "INFERENCE_ERROR poison"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path, ENTRY) as cluster:
        yield cluster


# ---- the whole worker


async def test_one_input_among_many_costs_three_deaths_and_its_own_answer(cluster: Direct) -> None:
    """Inputs in the same work item, in the same batch and in other batches get right answers."""
    adapter = await cluster.deadly("bad")
    adapter.hold_batches = True
    await cluster.sidecar(adapter)
    items = [await cluster.publish(f"first {number}") for number in range(2)]
    await adapter.until(lambda adapter: adapter.running, "a batch at the device")
    items += [await cluster.publish(*(f"text {number} {index}" for index in range(3))) for number in range(20)]
    items.insert(7, await cluster.publish("before", "bad", "after"))
    adapter.let_go()
    results = [await cluster.result(item) for item in items]
    expected = [[POISON if work_input.text == "bad" else "" for work_input in item.inputs] for item in items]
    assert [reasons(result) for result in results] == expected
    for item, result in zip(items, results, strict=True):
        assert all(
            is_right(result, item, index) for index, work_input in enumerate(item.inputs) if work_input.text != "bad"
        )
    assert len(adapter.deaths) == 3
    assert adapter.deaths[1:] == [["bad"], ["bad"]]
    await cluster.left(0)


async def test_a_known_poison_is_refused_before_it_runs(cluster: Direct) -> None:
    """This worker and one that starts later refuse the poison among other inputs."""
    adapter = await cluster.deadly("bad")
    sidecar = await cluster.sidecar(adapter)
    first = await cluster.publish("bad")
    assert reasons(await cluster.result(first)) == [POISON]
    assert adapter.deaths == [["bad"]] * 3
    again = await cluster.publish("bad", "good")
    assert reasons(await cluster.result(again)) == [POISON, ""]
    await sidecar.end()
    await cluster.sidecar(adapter)
    later = await cluster.publish("good", "bad")
    assert reasons(await cluster.result(later)) == ["", POISON]
    assert len(adapter.deaths) == 3


async def test_a_suspect_whose_model_does_not_fit_there_again_runs_on_another_device(cluster: Direct) -> None:
    first = await cluster.deadly("bad", devices=2)
    second = await cluster.adapter("deadly.sock.1", devices=2)
    await cluster.sidecar(first)
    assert reasons(await cluster.result(await cluster.publish("before"))) == [""]
    first.refusals[ENTRY.id] = ModelLoadFailed("too large", extras={"error_class": "OOM"})
    item = await cluster.publish("bad", "good")
    result = await cluster.result(item)
    assert (reasons(result), is_right(result, item, 0), is_right(result, item, 1)) == (["", ""], True, True)
    assert (first.deaths, [len(batch.groups) for batch in second.batches]) == ([["bad", "good"]], [1, 1])


async def test_equal_inputs_run_alone_once_and_then_in_batches_again(cluster: Direct) -> None:
    adapter = await cluster.deadly("bad")
    adapter.hold_batches = True
    await cluster.sidecar(adapter)
    await cluster.publish("hold")
    await adapter.until(lambda adapter: adapter.running, "a batch at the device")
    items = [await cluster.publish(text) for text in ("popular", "bad", *["popular"] * 4)]
    adapter.let_go()
    assert [reasons(await cluster.result(item)) for item in items] == [[""], [POISON], *[[""]] * 4]
    assert [len(batch.groups) for batch in adapter.batches] == [1, 6, 1, 1, 1, 4]


async def test_an_innocent_is_never_judged_by_the_deaths_it_was_near(cluster: Direct) -> None:
    """An input that often shares a batch with poison is cleared each time, because it is answered alone."""
    adapter = await cluster.deadly(*(f"bad {number}" for number in range(4)))
    await cluster.sidecar(adapter)
    for number in range(4):
        item = await cluster.publish("popular", f"bad {number}")
        assert reasons(await cluster.result(item)) == ["", POISON]
    bucket = await cluster.broker.key_value(POISON_BUCKET)
    held = cluster.server.buckets[POISON_BUCKET].entries
    await until(lambda: sum(entry.value is not None for entry in held.values()) == 4, "no mark but those of the four")
    assert all(msgspec.msgpack.decode(entry.value or b"", type=Mark).deaths == 3 for entry in await bucket.entries())


async def test_a_suspect_of_another_worker_runs_alone_and_one_death_more_is_enough(cluster: Direct) -> None:
    """The count outlives the worker that counted, such as a sidecar that was killed between the deaths."""
    item = WorkItem("r", 0, ENTRY.id, ENTRY.revision, "encode", (Input("bad"),), RunOptions(), "inbox", 60_000)
    bucket = await cluster.broker.key_value(POISON_BUCKET, max_age_s=POISON_LIFETIME_S)
    at_s = await cluster.broker.server_time(cluster.stream.name)
    await bucket.write([Write(content_keys(item)[0], msgspec.msgpack.encode(Mark(ENTRY.id, 2, at_s, ("other",))))])
    adapter = await cluster.deadly("bad")
    await cluster.sidecar(adapter)
    assert reasons(await cluster.result(await cluster.publish("good", "bad"))) == ["", POISON]
    assert adapter.deaths == [["bad"]]
    await until(lambda: cluster.server.streams["DEAD__default"].messages, "its dead letter")
    (letter,) = await cluster.letters()
    assert letter.workers == ("other", "w0")


async def test_no_further_input_of_a_suspect_runs_after_it_is_cancelled_while_one_runs(cluster: Direct) -> None:
    adapter = await cluster.deadly("bad")
    await cluster.sidecar(adapter)
    suspect = await cluster.publish("first", "second", "bad")
    await adapter.until(lambda adapter: adapter.deaths, "the death")
    adapter.hold_batches = True
    await adapter.until(lambda adapter: adapter.running, "the first input alone")
    await cluster.broker.send(topology.cancel_subject("_default"), messages.encode(CancelRequests((suspect.request,))))
    await cluster.left(0)
    adapter.let_go()
    assert reasons(await cluster.result(await cluster.publish("later"))) == [""]
    assert [texts_of(batch) for batch in adapter.batches] == [["first", "second", "bad"], ["first"], ["later"]]


async def test_a_poison_leaves_a_dead_letter_with_the_whole_item(cluster: Direct) -> None:
    adapter = await cluster.deadly("bad")
    await cluster.sidecar(adapter)
    item = await cluster.publish("good", "bad", "bad")
    await cluster.result(item)
    await cluster.left(0)
    (letter,) = await cluster.letters()
    assert msgspec.msgpack.decode(letter.item, type=WorkItem) == item
    assert (letter.error.code, letter.error.reason, letter.deaths, letter.deliveries) == (
        "INFERENCE_ERROR",
        "poison",
        3,
        1,
    )
    assert letter.workers == ("w0",)


@pytest.mark.parametrize("is_deep", [False, True])
async def test_what_cannot_be_read_is_a_dead_letter_and_leaves_the_queue(cluster: Direct, is_deep: bool) -> None:
    await cluster.sidecar()
    data = b"\xc1"
    if is_deep:  # a valid item but for a parameter: {"a": {"a": ...}}
        item = await cluster.publish("a")
        await cluster.result(item)
        marked = msgspec.structs.replace(item, options=RunOptions(parameters={"p": "DEEP"}))
        deep = b"\x81\xa1a" * 3000 + b"\xc0"
        data = messages.encode(marked).replace(msgspec.msgpack.encode("DEEP"), deep)
    await cluster.broker.publish(topology.work_subject(cluster.lane, "interactive", ENTRY.id), data, "x")
    await cluster.left(0)
    (letter,) = await cluster.letters()
    assert (letter.item, letter.error.reason) == (data, "undecodable")
    assert [entry.item async for entry in Letters(cluster.broker, "_default").all()] == [None]


async def delivered_in_vain(cluster: Direct, count: int, times: int) -> None:
    """Deliver the first `count` messages so many times to a process that stops."""
    stopped = cluster.server.connect("stopped")
    deliveries: list[Delivery] = []
    pulls = stopped.pulls(cluster.stream.name, deliveries.append)
    for _ in range(times):
        pulls.want(topology.work_consumer(cluster.lane, "interactive", ENTRY.id, 10.0).name, count)
        await until(lambda: len(deliveries) == count, "the deliveries")
        for delivery in deliveries:
            await delivery.nak()
        deliveries.clear()
    await pulls.stop()
    await stopped.close()


@pytest.mark.parametrize("in_vain", [0, 5])
async def test_work_that_nobody_knows_is_given_up_as_a_dead_letter(cluster: Direct, in_vain: int) -> None:
    """A worker hands it back four times, however often the work was delivered to workers that stopped."""
    item = await cluster.publish("a")
    unknown_item = msgspec.structs.replace(item, request="other", revision="another")
    await cluster.broker.publish(
        topology.work_subject(cluster.lane, "interactive", ENTRY.id), messages.encode(unknown_item), "other"
    )
    await delivered_in_vain(cluster, 2, in_vain)
    sidecar = await cluster.sidecar()
    assert reasons(await cluster.result(item)) == [""]
    assert reasons(await cluster.result(unknown_item)) == ["NOT_READY config_changed"]
    await cluster.left(0)
    (letter,) = await cluster.letters()
    assert (letter.error.code, letter.deliveries) == ("NOT_READY", in_vain + 5)
    assert await sidecar.metric("sie_settlements_total", outcome="handed_back") == 4


async def test_deliveries_to_a_worker_that_stopped_make_no_input_a_suspect(cluster: Direct) -> None:
    """A consumer gets the same work five times and gives it back. Then a worker answers it, without a death, a mark or
    a dead letter.
    """
    items = [await cluster.publish(f"text {number}") for number in range(3)]
    await delivered_in_vain(cluster, len(items), 5)
    adapter = await cluster.deadly()
    sidecar = await cluster.sidecar(adapter)
    results = [await cluster.result(item) for item in items]
    assert [reasons(result) for result in results] == [[""]] * 3
    assert {batch.deliveries for result in results if (batch := result.batch) is not None} == {6}
    await cluster.left(0)
    assert await cluster.letters() == []
    assert adapter.deaths == []
    assert await sidecar.metric("sie_poisoned_inputs_total") == 0
    bucket = await cluster.broker.key_value(POISON_BUCKET, max_age_s=POISON_LIFETIME_S)
    assert await bucket.entries() == []


# ---- marks


class Times:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def marks_of(server: MemoryServer, worker: str, now_s: Times) -> PoisonMarks:
    marks = PoisonMarks(server.connect(worker), worker, now_s)
    await marks.open()
    return marks


async def test_marks_pass_between_workers_and_end_with_their_life() -> None:
    server, now_s = MemoryServer(), Times()
    first_marks, two = await marks_of(server, "one", now_s), await marks_of(server, "two", now_s)
    await first_marks.suspected("m", ["k1", "k2"])
    await until(lambda: "m" in two.models, "the marks at the other worker")
    await two.died("m", ["k1"])
    await two.died("m", ["k1"])
    await until(lambda: (mark := first_marks.get("k1")) and mark.is_poison, "the verdict")
    assert first_marks.get("k1") == Mark("m", 3, 1000.0, ("one", "two", "two"))
    await first_marks.clear("k2")
    await until(lambda: two.get("k2") is None, "cleared there too")
    later = await marks_of(server, "later", now_s)
    assert later.get("k1") == first_marks.get("k1"), "read before anything runs"
    assert later.get("k2") is None
    now_s.now_s += POISON_LIFETIME_S
    assert "m" in two.models
    assert two.get("k1") is None
    assert "m" not in two.models
    for marks in (first_marks, two, later):
        await marks.close()


async def test_a_worker_without_its_broker_goes_by_its_own_marks() -> None:
    server, now_s = MemoryServer(), Times()
    marks = await marks_of(server, "one", now_s)
    server.disconnect()
    await marks.suspected("m", ["k"])
    await marks.died("m", ["k"])
    await marks.died("m", ["k"])
    mark = marks.get("k")
    assert mark is not None
    assert mark.is_poison


@given(st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, max_size=5))
def test_the_third_death_is_the_verdict(workers: list[str]) -> None:
    mark = None
    for worker in workers:
        mark = after_death(mark, "m", worker, 1.0)
    assert mark is not None
    assert mark.is_poison == (len(workers) > 2)
    assert mark.workers == tuple(workers[-3:])


@settings(max_examples=50)
@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_a_content_is_all_that_decides_what_runs(
    content: str, other_content: str, width: int, other_width: int
) -> None:
    def key(text: str, dimensions: int, **more: str) -> str:
        item = WorkItem("r", 0, "m", "v", "encode", (Input(text),), RunOptions(dimensions=dimensions), "inbox", 1)
        return content_keys(msgspec.structs.replace(item, **more))[0]

    assert (key(content, width) == key(other_content, other_width)) == (
        (content, width) == (other_content, other_width)
    )
    assert key(content, width) == key(content, width, request="another", reply="elsewhere")
    assert (
        len(
            {
                key(content, width),
                key(content, width, model="n"),
                key(content, width, revision="w"),
                key(content, width, operation="extract"),
            }
        )
        == 4
    )


async def test_marks_are_bounded() -> None:
    server, now_s = MemoryServer(), Times()
    marks = PoisonMarks(server.connect("one"), "one", now_s)
    await marks.suspected("m", [str(number) for number in range(MAX_MARKS + 10)])
    assert marks.get("0") is None
    assert marks.get(str(MAX_MARKS + 9)) is not None
    assert "m" in marks.models
