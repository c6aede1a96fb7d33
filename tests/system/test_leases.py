"""Work of a worker that ends, by SIGKILL or by a drain: who answers it, and when, with real processes and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from cluster import until
from fake_adapter import ids_of, vector_of
from stack import Device, Plan, Stack

from sie_gateway.fleet.lanes import LOST_S
from sie_sidecar.process import DRAIN_S

ACK_WAIT_S = 30.0


async def send(stack: Stack, texts: list[str]) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=90, trust_env=False) as client:
        posts = (client.post(f"{stack.urls[0]}/v1/encode/toy/one", json={"items": [text]}) for text in texts)
        return list(await asyncio.gather(*posts))


def check(answers: list[httpx.Response], texts: list[str]) -> None:
    for answer, text in zip(answers, texts, strict=True):
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json()["items"][0]["dense"]["values"], vector_of(ids_of(text)), atol=1e-6)


@pytest.mark.long
async def test_a_killed_sidecar_costs_its_restart_and_not_its_leases(tmp_path: Path) -> None:
    """A slow device holds the work, and the sidecar gets kill -9. The next process of the sidecar has all of the work
    again long before the ack wait.
    """
    texts = [f"text {number}" for number in range(8)]
    plan = Plan(workers=(Device(batch_ms=1000.0),), environ={"SIE_ACK_WAIT_S": str(int(ACK_WAIT_S))})
    with Stack(tmp_path / "stack", plan) as stack:
        (worker,) = stack.workers
        sending = asyncio.create_task(send(stack, texts))
        await asyncio.to_thread(until, lambda: stack.held() == 8, 60, "eight deliveries in the ledger")
        worker.sidecar.kill()
        killed_s = time.monotonic()
        worker.sidecar.start()
        check(await sending, texts)
        took_s = time.monotonic() - killed_s
        assert took_s < ACK_WAIT_S * 0.8, f"{took_s:.1f} s: the leases lapsed"
        message = "an earlier process of this worker was killed: 8 deliveries returned to the queue"
        assert any(message in line for line in worker.sidecar.log), stack.log()


@pytest.mark.long
async def test_a_drain_in_the_middle_of_a_load_hands_its_work_back(tmp_path: Path) -> None:
    """A model takes longer to load than a drain may last. After SIGTERM the sidecar ends in time, with status 0 and an
    empty ledger. The next sidecar answers.
    """
    environ = {"SIE_ACK_WAIT_S": str(int(ACK_WAIT_S)), "SIE_LOAD_HOLD_S": "29"}
    plan = Plan(workers=(Device(load_s=DRAIN_S + 4),), preload=False, environ=environ)
    with Stack(tmp_path / "stack", plan) as stack:
        (worker,) = stack.workers
        sending = asyncio.create_task(send(stack, ["a text"]))
        await asyncio.to_thread(until, lambda: stack.held() == 1, 60, "a delivery in the ledger")
        os.kill(worker.sidecar.pid, signal.SIGTERM)
        asked_s = time.monotonic()
        await asyncio.to_thread(until, lambda: worker.sidecar.status is not None, 60, "the end of the drain")
        assert worker.sidecar.status == 0, stack.log()
        assert time.monotonic() - asked_s < DRAIN_S + 4
        assert stack.held() == 0
        worker.sidecar.start()
        check(await sending, ["a text"])


async def test_a_drain_finishes_what_the_device_has(tmp_path: Path) -> None:
    """SIGTERM comes in the middle of a batch. The worker answers the batch, and leaves no lease behind."""
    texts = [f"text {number}" for number in range(4)]
    with Stack(tmp_path / "stack", Plan(workers=(Device(batch_ms=1500.0),))) as stack:
        (worker,) = stack.workers
        sending = asyncio.create_task(send(stack, texts))
        await asyncio.to_thread(until, lambda: stack.held() == 4, 60, "four deliveries in the ledger")
        os.kill(worker.sidecar.pid, signal.SIGTERM)
        check(await sending, texts)
        await asyncio.to_thread(until, lambda: worker.sidecar.status is not None, 60, "the end of the drain")
        assert worker.sidecar.status == 0, stack.log()
        assert not list(stack.folder.glob("*.leases"))


HEARTBEATS_S = 2.0


@pytest.mark.parametrize(
    "holds",
    [
        pytest.param(False, id="the hold is over"),
        pytest.param(True, id="the hold ends later", marks=pytest.mark.long),
    ],
)
async def test_work_of_the_only_worker_is_refused_when_its_heartbeats_are_missed(tmp_path: Path, holds: bool) -> None:
    """Sidecar and adapter get kill -9 while the device has the work, and no other worker comes. The request does not
    wait for its deadline.
    """
    beats = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "500", "SIE_HEARTBEAT_TIMEOUT_MS": str(int(1000 * HEARTBEATS_S))}
    hold_s = 3.0 if holds else 0.0
    plan = Plan(workers=(Device(batch_ms=300_000.0),), environ={"SIE_LOAD_HOLD_S": str(hold_s), **beats})
    with Stack(tmp_path / "stack", plan) as stack:
        (worker,) = stack.workers
        sending = asyncio.create_task(send(stack, ["a text"]))
        await asyncio.to_thread(until, lambda: stack.held() == 1, 60, "a delivery in the ledger")
        for part in worker.parts:
            part.kill()
        killed_s = time.monotonic()
        (answer,) = await sending
        took_s = time.monotonic() - killed_s
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "PROVISIONING"), answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert took_s < HEARTBEATS_S + LOST_S + hold_s + 30.0, f"{took_s:.1f} s of the 120 s that it has"


async def test_work_of_a_killed_worker_goes_to_the_other_one_within_its_lease(tmp_path: Path) -> None:
    """Sidecar and adapter of one of two workers get kill -9, and are not started again."""
    lease_s = 3.0
    environ = {"SIE_ACK_WAIT_S": str(int(lease_s)), "SIE_HEARTBEAT_TIMEOUT_MS": "6000"}
    plan = Plan(workers=(Device(batch_ms=500.0), Device(batch_ms=500.0)), environ=environ)
    texts = [f"text {number}" for number in range(8)]
    with Stack(tmp_path / "stack", plan) as stack:
        sending = asyncio.create_task(send(stack, texts))
        await asyncio.to_thread(until, lambda: stack.held() == len(texts), 60, "all deliveries in the ledgers")
        ledgers = {file.name: file.read_bytes().count(b"$JS.ACK") for file in stack.folder.glob("*.leases")}
        number = next(number for number in range(2) if ledgers.get(f"w{number}.sock.w{number}.leases"))
        for part in stack.workers[number].parts:
            part.kill()
        killed_s = time.monotonic()
        check(await sending, texts)
        took_s = time.monotonic() - killed_s
    assert took_s < lease_s + 27.0, f"{took_s:.1f} s"
