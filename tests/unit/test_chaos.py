"""Verdicts of a chaos run: lost, wrong and duplicate answers, and the processes that it may strike."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from chaos.clients import Attempt, Expected, Outcome
from chaos.faults import Fault, choose
from chaos.report import Report, availability, judged, plot, table

from sie_contracts import arrays

PARTS = [("broker 0", "broker"), ("broker 1", "broker"), ("gateway 0", "gateway"), ("gateway 1", "gateway")]


def outcome(*attempts: Attempt, verdict: str = "right") -> Outcome:
    return Outcome("toy/one", attempts[0].started_s, attempts[-1].ended_s, verdict, "", list(attempts))


def judge(*outcomes: Outcome, faults: list[Fault] | None = None, duplicates: int = 0) -> Report:
    return judged(0.0, 60.0, outcomes, faults or [], [(20.0, 25.0)], duplicates)


def test_a_run_without_a_fault_in_its_answers_holds() -> None:
    assert judge(outcome(Attempt(1, 2, 0, 200))).holds


def test_a_passed_deadline_is_a_loss_also_when_a_retry_was_right() -> None:
    report = judge(outcome(Attempt(1, 31, 0, 504, "GATEWAY_TIMEOUT"), Attempt(32, 33, 1, 200)))
    assert len(report.lost) == 1
    assert not report.holds


@pytest.mark.parametrize("failure", ["closed", "silent"])
def test_no_answer_is_a_loss_unless_that_gateway_was_struck(failure: str) -> None:
    request = outcome(Attempt(10, 12, 0, 0, failure), Attempt(13, 14, 1, 200))
    struck = Fault("gateway 0", "gateway", "kill", 11.5, recovered_s=14.0)
    assert judge(request).lost
    assert judge(request, faults=[Fault("gateway 1", "gateway", "kill", 11.5, recovered_s=14.0)]).lost
    assert judge(request, faults=[Fault("sidecar 0", "sidecar", "kill", 11.5, recovered_s=14.0)]).lost
    assert not judge(request, faults=[struck]).lost


def test_a_refusal_before_acceptance_is_no_loss_but_no_availability_either() -> None:
    report = judge(outcome(Attempt(1, 2, 0, 503, "QUEUE_FULL"), Attempt(3, 4, 0, 200)), outcome(Attempt(5, 6, 1, 200)))
    assert report.holds
    assert availability(report.outcomes) == 0.5


@pytest.mark.parametrize("verdict", ["wrong", "failed"])
def test_wrong_and_given_up_requests_break_the_promise(verdict: str) -> None:
    assert not judge(outcome(Attempt(1, 2, 0, 200), verdict=verdict)).holds


def test_bytes_that_nobody_asked_for_break_the_promise() -> None:
    assert not judge(outcome(Attempt(1, 2, 0, 200)), duplicates=1).holds


def test_requests_that_an_election_touched_stand_apart() -> None:
    calm, shaken = judge(
        outcome(Attempt(1, 2, 0, 200)), outcome(Attempt(19, 21, 0, 200)), outcome(Attempt(24, 26, 0, 200))
    ).split()
    assert (len(calm), len(shaken)) == (1, 2)


def answer(ids: list[str], vectors: list[np.ndarray]) -> bytes:
    slots = [{"id": id_, "dense": {"values": arrays.pack(vector)}} for id_, vector in zip(ids, vectors, strict=True)]
    return msgspec.msgpack.encode({"items": slots})


def test_an_answer_is_right_only_with_the_vector_of_its_own_text_under_its_own_id() -> None:
    expected = Expected.toy("toy/one", 4)
    first, second = expected.vectors[:2]
    assert expected.fault(answer(["a", "b"], [first, second]), ["a", "b"], [0, 1]) == ""
    assert "another text" in expected.fault(answer(["a", "b"], [second, first]), ["a", "b"], [0, 1])
    assert "other ids" in expected.fault(answer(["a", "c"], [first, second]), ["a", "b"], [0, 1])
    assert "other ids" in expected.fault(answer(["a", "b", "b"], [first, second, second]), ["a", "b"], [0, 1])


def test_only_one_broker_is_ever_down_and_nobody_is_struck_twice_at_once() -> None:
    rng = random.Random(3)
    struck = {choose(PARTS, {"broker 1", "gateway 0"}, rng)[0] for _ in range(200)}
    assert struck == {"gateway 1"}
    assert {choose(PARTS, set(), rng)[0] for _ in range(200)} == {name for name, _ in PARTS}


def test_the_table_names_each_fault_and_the_plot_is_xml() -> None:
    faults = [
        Fault("gateway 0", "gateway", "kill", 11.5, recovered_s=14.0),
        Fault("broker 1", "broker", "freeze", 30.0, 2.5, 33.0),
    ]
    report = judge(outcome(Attempt(1, 31, 0, 504, "GATEWAY_TIMEOUT")), faults=faults)
    text = table(report)
    assert "| 12 | gateway 0 | killed | 2.5 |" in text
    assert "| 30 | broker 1 | frozen for 2.5 s | 3.0 |" in text
    assert "lost at gateway 0: 1.0 to 31.0 s, 504 GATEWAY_TIMEOUT" in text
    assert ElementTree.fromstring(plot(report)).tag.endswith("svg")
