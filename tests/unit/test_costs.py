"""Cost of a text in device time, and the waits that follow: attention takes the square of a length."""

from __future__ import annotations

import math

import pytest

from sie_broker.memory import MemoryServer
from sie_contracts.models.costs import CROSSOVER_WIDTHS, crossover_tokens, text_cost
from sie_contracts.settings import load
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import BatchNote, Ok, Stages, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.model_queue import KeyWindow, ModelQueue, QueueBound, Shares, Ticket
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.metrics import Metrics
from sie_gateway.streams.backlog import Backlog

LANE = Lane("_default", "_default", "default")
LANE_NAMES = LANE.pool, LANE.machine_profile, LANE.bundle
SHORT, LONG, WIDTH = 16, 8192, 768
CROSSOVER = crossover_tokens(WIDTH, 12, 12)
STATUS = ModelStatus("m", "loaded", crossover_tokens=CROSSOVER)
HOST = Heartbeat(
    "w", *LANE_NAMES, True, "0", models=(STATUS,), credit_cost=65_536, credit_items=64, batch_cost=16_384, pipeline=2
)


def test_a_text_of_the_crossover_length_takes_twice_the_time_of_its_tokens() -> None:
    assert CROSSOVER == CROSSOVER_WIDTHS * WIDTH
    assert text_cost(CROSSOVER, CROSSOVER**2, CROSSOVER) == 2 * CROSSOVER
    assert text_cost(3 * SHORT, 3 * SHORT**2, CROSSOVER) == pytest.approx(3 * SHORT, rel=0.01)
    assert text_cost(LONG, LONG**2, 0) == LONG, "nothing is known of the model"


def place(crossover: int) -> ModelQueue:
    queue = ModelQueue(LANE, "interactive", "m", KeyWindow(Shares(), 4096))
    queue.crossover_tokens = crossover
    queue.hosted_by([HOST])
    return queue


def result(number: int, tokens: int, length: int, seconds: float) -> WorkResult:
    note = BatchNote(id=str(number), tokens=tokens, attention=tokens * length)
    return WorkResult("r", 0, "w", (Ok({}, tokens),), stages=Stages(inference_ms=1000 * seconds), batch=note)


def expected_s(of: ModelQueue, tokens: int, length: int) -> float:
    """Return the wait behind `tokens` tokens in texts of `length`, after eight batches of short texts. Each batch has
    16,384 tokens and takes half a second.
    """
    for number in range(8):
        ticket = Ticket("k", of.weighed([16384], [16384 * SHORT])[0], [16384])
        of.entered[ticket] = None
        of.window.admit(ticket)
        of.queued(ticket, 0, -1.0)
        of.answered(ticket, result(number, 16384, SHORT, 0.5), 16384, 0.5 * (number + 1))
        of.window.give_back(ticket, 0)
    ahead = sum(of.weighed([length] * (tokens // length), [length**2] * (tokens // length))[0])
    return of.wait(4.5, ahead, 0.0).min_s + 0.5  # half a second of the wait has passed


def test_a_wait_behind_long_texts_is_that_of_their_squares() -> None:
    """By tokens alone, the wait behind long texts is predicted far too short."""
    times = 1 + LONG / CROSSOVER
    assert expected_s(place(CROSSOVER), 10 * LONG, LONG) == pytest.approx(times * 2.5, rel=0.05)
    assert expected_s(place(0), 10 * LONG, LONG) == pytest.approx(2.5, rel=0.05)
    short = (expected_s(place(crossover), 10 * LONG, SHORT) for crossover in (0, CROSSOVER))
    assert next(short) == pytest.approx(next(short), rel=0.01)


def test_costs_are_scaled_with_the_tokens_that_results_tell() -> None:
    """Texts with twice the estimated tokens have four times the squares."""
    of = place(CROSSOVER)
    of.scale = 2.0
    assert of.weighed([100], [100 * 100])[0] == [round(200 + 200**2 / CROSSOVER)]


def test_what_workers_and_keys_count_stays_in_tokens() -> None:
    """The bound of a window counts tokens: texts whose cost is a multiple of their tokens fill it like others. What is
    ahead of a key counts cost.
    """
    window = KeyWindow(Shares(), 4096)
    for key in ("a", "b"):
        ticket = Ticket(key, [5 * 4096] * 8, [4096] * 8)
        window.join(ticket)
    assert len(window.grant(QueueBound(tokens=8 * 4096), math.inf)) == 8
    assert (window.tokens, window.cost, window.stretch()) == (8 * 4096, 40 * 4096, 5.0)
    assert window.shares.tokens == {"a": 4 * 4096, "b": 4 * 4096}
    assert window.waiting_tokens() == {"a": 4 * 4096, "b": 4 * 4096}
    assert window.waiting_costs() == {"a": 20 * 4096, "b": 20 * 4096}
    assert window.ahead("c", 4096) == 42 * 4096, "of each other key no more than of one's own"


def test_keys_take_turns_by_cost() -> None:
    window = KeyWindow(Shares(), 4096)
    window.join(Ticket("long", [4 * 4096] * 4, [4096] * 4))
    window.join(Ticket("short", [4096] * 20))
    first = [ticket.key for ticket, _ in window.grant(QueueBound(tokens=10 * 4096), math.inf)]
    assert first.count("long") == 2
    assert first.count("short") == 8


def test_a_gateway_knows_the_crossover_length_by_a_heartbeat() -> None:
    broker, now_s, settings = MemoryServer().connect("g"), 0.0, load(environ={}).settings
    fleet = Fleet(broker, settings, lambda: now_s)
    admission = Admission(settings, broker, fleet, Backlog(broker, {"_default"}), Metrics(), lambda: now_s)
    fleet.note(HOST)
    permits = admission.admit("k", LANE, "interactive", "m", [LONG], 1, squares=[LONG**2])
    assert permits.tokens == [LONG]
    assert permits.queue.window.cost == round(text_cost(LONG, LONG**2, CROSSOVER))
