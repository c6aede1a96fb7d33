"""Each failpoint armed once: a process dies, fails or stands still between two effects, and every request still ends as
promised.

A result is right, an error is one typed answer within its budget; the same request sent again gets its result; nothing
stays in the queue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from armed import (
    ACK_WAIT_S,
    BACK_S,
    BIG_ITEMS,
    COLD,
    DEADLY,
    INLINE_BYTES,
    LANE,
    PLACES,
    SHORT_S,
    WARM,
    Field,
    Place,
)
from cluster import MODEL, until
from stack import Part

from sie_broker import Broker, Write
from sie_contracts.wire import topology
from sie_runtime.failpoints import CRASHED

CHORE = Path(__file__).parents[1] / "chore.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with Field.running(tmp_path_factory.mktemp("field")) as field:
        yield field


@pytest.fixture
def field(shared: Field) -> Field:
    shared.restore()
    return shared


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """A cluster with the real adapter and a real model."""
    with Field.running(tmp_path_factory.mktemp("engine"), device=None) as field:
        yield field


def armed(field: Field, name: str, place: Place) -> Part:
    part = field.arm(name, place.action, place.role)
    part.wait_ready(BACK_S)
    return part


def one_request(field: Field, name: str, place: Place) -> None:
    part = armed(field, name, place)
    before, text = field.batches(), f"one text for {name}"
    is_lost = place.role == "gateway" and place.action == "crash"
    first = field.ask(text, **({"budget_s": SHORT_S} if is_lost else {}))
    field.reached(name, place.action, part)
    status = first.result().status
    assert status == (0 if is_lost else 500 if place.action == "error" else 200)
    if status != 200:
        field.right(text)
    field.settled()
    assert place.runs is not None
    assert 1 <= field.batches() - before <= place.runs


def big_result(field: Field, name: str, place: Place) -> None:
    """Check a result that one message cannot hold. Parts that come twice, or whose last one is not confirmed, change
    nothing.
    """
    part = armed(field, name, place)
    first = field.ask(*(str(number) for number in range(BIG_ITEMS)), budget_s=30.0)
    field.reached(name, place.action, part)
    assert first.result().status == 200


def given_up(field: Field, name: str, place: Place) -> None:
    """The budget ends before the device answers, and the gateway dies before it withdrew the work."""
    part = armed(field, name, place)
    field.worker.adapter.pause()
    first = field.ask(name, budget_s=1.4)  # the work is in the queue before that
    field.reached(name, place.action, part)
    assert first.result().status in (0, 503, 504)  # the answer may be on its way before the death
    field.right(name)


def client_leaves(field: Field, name: str, place: Place) -> None:
    part = armed(field, name, place)
    field.worker.adapter.pause()
    first = field.ask(name, leave_s=1.2)
    field.reached(name, place.action, part)
    field.worker.adapter.resume()
    assert first.result().status == 0
    field.right(name)


def cold_model(field: Field, name: str, place: Place) -> None:
    """Send work of a model that no worker has loaded, and that no placement names."""
    model = COLD[[key for key, candidate in PLACES.items() if candidate.scenario == place.scenario].index(name)]
    part = armed(field, name, place)
    first = field.ask(name, model=model, budget_s=SHORT_S)
    field.reached(name, place.action, part)
    assert first.result().status in (0, 200)
    field.right(name, model=model)


def leader(field: Field, name: str, place: Place) -> None:
    """The leader of the gateways dies before it sweeps; no request depends on when that is done."""

    async def lapse(broker: Broker) -> None:
        bucket = await broker.key_value(topology.LEASES_BUCKET)
        await bucket.write([Write("consumers", None)])

    field.parts["gateway"].stop()
    field.with_broker(lapse)
    field.reached(name, place.action, field.arm(name, place.action, place.role))
    field.right(name)


def chore(*arguments: str) -> int:
    done = subprocess.run([sys.executable, str(CHORE), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, CRASHED), done.stderr
    return done.returncode


def consumer_at_rest(field: Field, name: str, place: Place) -> None:
    """A process deletes a consumer and dies before it checks who needs it: the next publisher makes it again."""
    models = [WARM, COLD[0]]
    for model in models:
        field.right(name, model=model)
    field.settled()
    assert chore("consumers", field.stack.broker_urls, "--failpoints", f"{name}={place.action}") == CRASHED
    for model in models:
        field.right(f"{name} again", model=model)


def large_input(field: Field, name: str, place: Place) -> None:
    """Send an input that goes through the payload store."""
    part = armed(field, name, place)
    text = f"{name} " * (2 * INLINE_BYTES // len(name))
    first = field.ask(text)
    field.reached(name, place.action, part)
    assert first.result().status == (0 if place.role == "gateway" else 500)
    field.right(text)


def old_payload(field: Field, name: str, place: Place) -> None:
    """Old payloads are removed, by the next round if a round dies; young ones stay."""
    before = set(field.payloads.iterdir())
    text = f"{name} {uuid.uuid4()} " * (2 * INLINE_BYTES // len(name))  # equal inputs are one file
    field.right(f"young {text}")
    young = set(field.payloads.iterdir()) - before
    field.right(f"old {text}")
    old = set(field.payloads.iterdir()) - young
    assert old
    assert young
    for file in old:  # the last step: from now on a round of the gateway may remove them too
        os.utime(file, (time.time() - 7200,) * 2)
    assert chore("payloads", str(field.payloads), "--failpoints", f"{name}={place.action}") == CRASHED
    assert set(field.payloads.iterdir()) == old | young
    assert chore("payloads", str(field.payloads)) == 0
    assert set(field.payloads.iterdir()) == young


def work_left_over(field: Field, name: str, place: Place) -> None:
    """A sidecar is killed with work in hand, its successor dies while it hands that back: then the leases lapse."""
    sidecar, adapter = field.worker.sidecar, field.worker.adapter
    adapter.pause()
    first = field.ask(name)
    until(field.leased, BACK_S, "the work is in hand")
    sidecar.kill()
    adapter.resume()
    field.reached(name, place.action, field.arm(name, place.action, place.role))
    answer = first.result()
    assert answer.status == 200
    assert answer.taken_s < ACK_WAIT_S + BACK_S


def admission(field: Field, name: str, place: Place) -> None:
    """A worker dies while it asks for its pools; it asks again when it is started again."""
    options = ("--pool-admission-enabled", "--gateway-url", field.stack.urls[0])
    field.reached(name, place.action, field.arm(name, place.action, place.role, *options))
    field.right(name)


def reserve(field: Field, method: str, path: str = "") -> int:
    """Call `/v1/pools` and return the status, or 0 if the gateway died."""
    body = {"name": "team", "gpus": {"cpu": 1}} if not path else None
    try:
        return httpx.request(
            method, f"{field.stack.urls[0]}/v1/pools{path}", json=body, timeout=20, trust_env=False
        ).status_code
    except httpx.TransportError:
        return 0


def reservation(field: Field, name: str, place: Place) -> None:
    """A gateway dies while it makes a reservation; the same call again makes it, or finds it made, with its stream."""
    part = armed(field, name, place)
    assert reserve(field, "POST") == 0
    field.reached(name, place.action, part)
    assert reserve(field, "POST") == 201
    assert reserve(field, "DELETE", "/team") == 200
    no_reservation_is_left(field, name)


def reservation_ends(field: Field, name: str, place: Place) -> None:
    """A gateway dies after it ended a reservation and before the stream is removed: no gateway has the reservation any
    more, and later the stream is gone too.
    """
    assert reserve(field, "POST") == 201
    part = armed(field, name, place)
    assert reserve(field, "DELETE", "/team") == 0
    field.reached(name, place.action, part)
    assert reserve(field, "GET", "/team") == 404
    no_reservation_is_left(field, name)


def no_reservation_is_left(field: Field, name: str) -> None:
    until(lambda: "created" not in field.stream("WORK_team"), BACK_S, "the stream of the reservation is removed")
    assert reserve(field, "GET", "/team") == 404
    field.right(name)


def cancelled(field: Field, name: str, place: Place) -> None:
    """Two batches fill the device, and the rest waits. All budgets end, and the worker dies while it gives up the work
    that did not run.
    """
    part = armed(field, name, place)
    field.worker.adapter.pause()
    requests = []
    for number in range(4):
        requests.append(field.ask(f"{name} {number}", budget_s=SHORT_S))
        until(lambda: field.leased() > number, BACK_S, "the work is in hand")  # noqa: B023  used at once
    field.reached(name, place.action, part)
    for request in requests:  # at the end of a budget the gateway may know of no worker any more
        assert request.result().error[0] in ("GATEWAY_TIMEOUT", "PROVISIONING")
    field.right(name)


def unreadable_work(field: Field, name: str, place: Place) -> None:
    """A message that is no work item is kept as one dead letter, whenever its worker dies."""
    field.right(name)
    letters = field.letters()
    part = armed(field, name, place)
    subject = topology.work_subject(LANE, "interactive", WARM)
    field.with_broker(lambda broker: broker.publish(subject, b"\xc1", name, 5.0))
    field.reached(name, place.action, part)
    field.settled()
    assert field.letters() == letters + 1
    field.right(name)


def poison(field: Field, name: str, place: Place) -> None:
    """An input ends each adapter that runs it, and its sidecar dies on the way to the verdict: the verdict comes all
    the same.
    """
    letters, adapter = field.letters(), field.worker.adapter
    part = armed(field, name, place)

    def deaths() -> int:
        return sum("status 86" in line for line in adapter.log)

    # a death before its mark is written does not count for the verdict
    expected = deaths() + (4 if name == "poison.before_mark" else 3)
    first = field.ask(f"{name}: {DEADLY}", budget_s=30.0)
    neighbours = [field.ask(f"{name}: {number}", budget_s=30.0) for number in range(4)]
    # the verdict may come before the adapter's process has ended
    field.supervise(
        lambda: first.done() and all(neighbour.done() for neighbour in neighbours) and deaths() >= expected,
        40.0,
        "all are answered",
    )
    assert any(f"status {CRASHED}" in line for line in part.log), field.stack.log()
    assert first.result().error == ("INFERENCE_ERROR", "poison")
    assert {neighbour.result().status for neighbour in neighbours} == {200}
    field.settled()
    assert deaths() == expected
    assert field.letters() == letters + 1


def drain_in_vain(field: Field, name: str, place: Place) -> None:
    """The device stands still while the worker drains. The worker dies before it has handed back its work."""
    part = armed(field, name, place)
    field.worker.adapter.pause()
    first = field.ask(name, budget_s=30.0)
    until(field.leased, BACK_S, "the work is in hand")
    os.kill(part.pid, signal.SIGTERM)
    field.reached(name, place.action, part)
    assert first.result().status == 200


def new_model(field: Field, name: str, place: Place) -> None:
    """The config service dies while it adds a model: after the next change all processes know the model."""
    models = [f"toy/{name}-{number}" for number in range(2)]
    folder = field.stack.folder / "models"
    (entry,) = [
        json.loads(file.read_text()) for file in folder.glob("*.yaml") if json.loads(file.read_text())["id"] == WARM
    ]
    for model, armed in zip(models, (True, False), strict=True):
        (folder / f"{topology.token(model)}.yaml").write_text(json.dumps({**entry, "id": model}))
        if armed:
            field.reached(name, place.action, field.arm(name, place.action, place.role))
        else:
            field.parts["config"].stop()
            field.back()
    for model in models:
        until(lambda: field.ask(name, model=model).result().status == 200, 60.0, f"{model} is known")  # noqa: B023  used at once


def real_adapter(field: Field, name: str, place: Place) -> None:
    """The adapter dies or fails in a load or a batch, and the next process does it again."""
    text = f"the text of {name}"
    field.learn(MODEL, text)
    part = armed(field, name, place)
    first = field.ask(text, model=MODEL, budget_s=60.0)
    field.reached(name, place.action, part)
    answer = first.result()
    if place.action == "error":
        assert answer.error[0] == "INTERNAL_ERROR"
    else:  # on a busy machine imports and load take longer than the hold
        assert answer.status == 200 or answer.error[0] in ("MODEL_LOADING", "PROVISIONING")
    field.right(text, model=MODEL)


SCENARIOS: dict[str, Callable[[Field, str, Place], None]] = {
    scenario.__name__: scenario
    for scenario in (
        one_request,
        big_result,
        given_up,
        client_leaves,
        cold_model,
        leader,
        consumer_at_rest,
        large_input,
        old_payload,
        work_left_over,
        admission,
        reservation,
        reservation_ends,
        cancelled,
        unreadable_work,
        poison,
        drain_in_vain,
        new_model,
    )
}


def places(*, engine: bool) -> list[pytest.ParameterSet]:
    return [
        pytest.param(name, marks=[pytest.mark.long] if place.long else [])
        for name, place in PLACES.items()
        if (place.scenario == "real_adapter") == engine
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", places(engine=False))
def test_what_was_asked_for_is_answered_whatever_happens_at(name: str, field: Field) -> None:
    place = PLACES[name]
    SCENARIOS[place.scenario](field, name, place)
    field.settled()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", places(engine=True))
def test_a_load_or_a_batch_is_done_again_when_the_adapter_dies_at(name: str, engine: Field) -> None:
    engine.restore()
    real_adapter(engine, name, PLACES[name])
    engine.settled()
