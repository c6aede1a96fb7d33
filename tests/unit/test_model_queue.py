"""State of one gateway for a model at one priority: the wait before long batches, late refusals, turns."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest.mock import Mock

import pytest
from inprocess import settings_of

from sie_contracts.errors import QueueFull
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import BatchNote, Ok, Stages, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.retry_slots import SLOT_S, SLOTS, RetrySlots
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.metrics import Metrics
from sie_gateway.streams.backlog import Backlog

LANE = Lane("_default", "_default", "default")


class LoneGateway:
    """Admission of a gateway alone, at a device that takes half a second for 12 messages of 8 tokens, one batch after
    the other. The test sets the clock.
    """

    def __init__(self, batch_items: int = 12) -> None:
        self.now_s = 100.0
        settings = settings_of()
        fleet = Fleet(Mock(), settings)
        self.admission = Admission(settings, Mock(), fleet, Backlog(Mock(), ()), Metrics(), clock=lambda: self.now_s)
        fleet.note(
            Heartbeat(
                "ghost",
                "_default",
                "_default",
                "default",
                True,
                "0",
                models=(ModelStatus("toy/one", "loaded"),),
                credit_cost=3 * 16384,
                credit_items=3 * batch_items,
                batch_cost=16384,
                pipeline=1,
            )
        )
        self.queue = self.admission._queue(LANE, "interactive", "toy/one")
        for number in range(8):
            at_s = self.now_s - 4 + 0.5 * number
            is_crowded = batch_items == 12
            queued_s = 0.0 if is_crowded else at_s - 0.6
            self.queue.throughput.left(at_s, str(number), 96, queued_s, is_crowded=is_crowded, device_s=0.5)

    def enter(self, number: int, cost: int = 8) -> Any:
        return self.admission.admit(
            "key", LANE, "interactive", "toy/one", [cost], 100, 1.0, lambda: b"%d" % number, f"r{number}"
        )

    def result(self, number: int, chunks: int = 12, tokens: int = 8) -> WorkResult:
        note = BatchNote("last", chunks, chunks, chunks * tokens)
        outcome = Ok({}, tokens)
        return WorkResult(f"r{number}", 0, "ghost", (outcome,), stages=Stages(inference_ms=500.0), batch=note)


def test_what_ended_in_a_batch_that_runs_keeps_the_device_busy_until_the_next_result() -> None:
    """Twelve run and twelve wait. When those that run are given up, the wait stays the same: their batch runs on."""
    gateway = LoneGateway()
    permits = [gateway.enter(number) for number in range(24)]
    gateway.now_s += 0.01
    first = gateway.enter(24)
    gateway.queue.throughput.left(gateway.now_s, "new", 8, 0.0, is_crowded=True, device_s=0.5)
    gateway.queue.freed(gateway.now_s, is_result=True)
    before_s = gateway.queue.wait(gateway.now_s, 200, 8, 1.0).likely_s
    for permit in permits[:12]:
        gateway.admission.end(permit)
    assert gateway.queue.wait(gateway.now_s, 104, 8, 1.0).likely_s == before_s
    permits[12].result_arrived(gateway.result(12))
    assert gateway.queue.wait(gateway.now_s, 96, 8, 1.0).likely_s < before_s
    gateway.admission.end(first)


def test_what_was_given_up_and_has_its_late_result_keeps_no_device_busy() -> None:
    """The batch of the requests that timed out is over: a new request waits only for its own batch."""
    gateway = LoneGateway()
    permits = [gateway.enter(number) for number in range(12)]
    gateway.now_s += 0.01
    for permit in permits:
        gateway.admission.end(permit)
    gateway.now_s += 0.5
    for number in range(12):
        gateway.admission.answered_late(gateway.result(number))
    gateway.enter(12)
    assert gateway.queue.wait(gateway.now_s, 8, 8, 1.0).likely_s == pytest.approx(1.0)


def test_all_chunks_of_a_request_that_finds_an_empty_queue_run() -> None:
    gateway = LoneGateway()
    gateway.admission.admit("key", LANE, "interactive", "toy/one", [8, 8, 8], 100, 1.0)
    gateway.now_s += 0.1
    assert gateway.queue.wait(gateway.now_s, 24, 8, 1.0).likely_s == pytest.approx(0.9)


def test_no_request_is_refused_that_fits_into_the_batch_that_begins() -> None:
    """Batches had 12 messages, because no more were there, and may have 24: all 20 that wait are in the next batch."""
    gateway = LoneGateway(batch_items=24)
    refused: list[QueueFull] = []
    for number in range(20):
        gateway.enter(number).on_refused = refused.append
    gateway.now_s += 0.3
    last = gateway.enter(20)
    gateway.queue.throughput.left(gateway.now_s, "new", 8, gateway.now_s - 0.6, is_crowded=False, device_s=0.5)
    gateway.queue.freed(gateway.now_s, is_result=True)
    gateway.now_s += 0.2
    gateway.admission.refuse_late(gateway.queue)
    assert not refused
    gateway.admission.end(last)


def test_the_turn_of_one_that_is_refused_after_all_has_room_for_what_its_tokens_turned_out_to_be() -> None:
    """The first result shows that three estimated tokens are eight."""
    gateway = LoneGateway()
    refused: list[QueueFull] = []
    permits = [gateway.enter(number, cost=3) for number in range(100)]
    for permit in permits:
        permit.on_refused = refused.append
    gateway.now_s += 0.5
    permits[0].result_arrived(gateway.result(0, chunks=1))
    assert refused
    assert gateway.queue.turns.promised(gateway.now_s) == pytest.approx(8 * len(refused))


def test_whoever_is_refused_is_told_of_a_wait_that_is_longer_than_what_is_left() -> None:
    """Doubt about predictions makes the wait longer, and so does work that was promised to others."""
    for promises in (0, 40):
        gateway = LoneGateway()
        permits = [gateway.enter(number) for number in range(60)]
        for number in range(promises):
            gateway.queue.turns.book(gateway.now_s, b"p%d" % number, 96, 0.5, 1000)
        refused = 0
        for tenths in range(1, 200):
            refusal = gateway.queue.judge(gateway.now_s, "key", 8, tenths / 10, lambda: b"new")
            if refusal is not None:
                assert refusal.wait_s > tenths / 10, (promises, tenths)
                refused += 1
        assert refused
        for permit in permits:
            gateway.admission.end(permit)


ROOM = 100.0


def test_no_second_has_turns_of_more_cost_than_its_room() -> None:
    """Clients are refused within two seconds, so no turn lapses meanwhile."""
    rng = random.Random(1)
    for _ in range(20):
        turns, costs, now_s = RetrySlots(), dict[int, float](), 1000.0
        for number in range(200):
            now_s += rng.uniform(0, 0.01)
            cost = rng.uniform(5, 60)
            retry_s = turns.book(now_s, b"%d" % number, cost, rng.uniform(0, 20), ROOM)
            if turns.news(now_s, 1)[0]:
                slot = math.floor((now_s + retry_s) / SLOT_S)
                costs[slot] = costs.get(slot, 0.0) + cost
        assert len(costs) > SLOTS
        for first in range(min(costs), max(costs)):
            assert sum(costs.get(slot, 0.0) for slot in range(first, first + SLOTS)) <= ROOM + 1e-6
