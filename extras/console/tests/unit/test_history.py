"""Records of a gateway for the last hour: counts, errors, latency by stage, and the slowest requests."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest
from inprocess import InProcess

from sie_console.history import (
    BOUNDS_MS,
    FAILED,
    MAX_OWNERS,
    MINUTE_S,
    SLOWEST,
    STAGES_TOLD,
    STEP_S,
    STEPS,
    RequestHistory,
    quantile,
)
from sie_gateway.admission.grant import ANYBODY, Grant
from sie_gateway.inference.call import Call

START_S = 1_790_000_000  # a multiple of STEP_S


class Clock:
    def __init__(self) -> None:
        self.now_s = float(START_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def history(clock: Clock) -> RequestHistory:
    return RequestHistory(clock)


def end(history: RequestHistory, name: str = "r", ms: float = 5.0, code: str = "", status: int = 200) -> None:
    history.ended(Call(name, 0.0, {}, {"model": "toy/one"}, code=code), "encode", status, ms / 1000)


def test_steps_are_counted_with_their_errors_and_end_after_an_hour(history: RequestHistory, clock: Clock) -> None:
    end(history)
    end(history, code="INVALID_INPUT", status=400)
    end(history, code="PROVISIONING", status=202)  # PROVISIONING with 202 is no error
    clock.now_s += STEP_S
    end(history)
    report = history.since()
    assert [(step["at"], step["requests"], step["errors"]) for step in report["steps"]] == [
        (START_S, 3, {"INVALID_INPUT": 1}),
        (START_S + STEP_S, 1, {}),
    ]
    assert [step["at"] for step in history.since(START_S + STEP_S)["steps"]] == [START_S + STEP_S]
    (joined,) = history.since(step_s=60)["steps"]
    assert (joined["requests"], joined["errors"]) == (4, {"INVALID_INPUT": 1})
    clock.now_s = START_S + STEPS * STEP_S + STEP_S
    assert [step["at"] for step in history.since()["steps"]] == [START_S + STEP_S]
    clock.now_s += 3600
    assert history.since()["steps"] == []
    assert history.requests(1000, ANYBODY) == []


def test_what_is_kept_is_bounded(history: RequestHistory, clock: Clock) -> None:
    """The load is a day of requests, of which half fail, and one refusal a minute."""
    numbers = random.Random(0)
    for minute in range(24 * 60):
        clock.now_s = START_S + minute * MINUTE_S
        for _ in range(20):
            end(history, ms=numbers.expovariate(0.01), code=numbers.choice(["", "INFERENCE_ERROR"]), status=500)
        end(history, ms=1e6, code="QUEUE_FULL", status=503)
    assert len(history.since()["steps"]) <= STEPS
    requests = history.requests(10_000, ANYBODY)
    assert 60 * SLOWEST <= len(requests) <= 61 * (SLOWEST + FAILED)
    assert {request["code"] for request in requests} == {
        "",
        "INFERENCE_ERROR",
    }  # refusals are counted, and displace no other request


def test_the_slowest_of_each_minute_are_kept_in_order(history: RequestHistory, clock: Clock) -> None:
    took = [float(number) for number in range(1, 101)]
    random.Random(1).shuffle(took)
    for ms in took:
        end(history, f"r{ms:.0f}", ms)
    assert [request["id"] for request in history.requests(1000, ANYBODY)] == [
        f"r{100 - number}" for number in range(SLOWEST)
    ]
    assert history.requests(1, ANYBODY)[0]["total_ms"] == 100.0
    end(history, "bad", 0.1, "INFERENCE_ERROR", 500)
    record = history.find("bad", ANYBODY)
    assert record is not None
    assert (record["code"], record["status"]) == ("INFERENCE_ERROR", 500)
    assert history.find("r1", ANYBODY) is None
    clock.now_s += MINUTE_S
    end(history, "later", 2.0)
    assert [request["id"] for request in history.requests(1000, ANYBODY)][-2:] == ["later", "bad"]


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_quantile_is_at_most_a_fifth_too_high(share: float) -> None:
    numbers = random.Random(2)
    values = sorted(numbers.lognormvariate(3, 1.5) for _ in range(5000))
    counts = array("I", bytes(4 * (len(BOUNDS_MS) + 1)))
    for value in values:
        counts[next((place for place, bound in enumerate(BOUNDS_MS) if value <= bound), len(BOUNDS_MS))] += 1
    true = values[int(share * len(values)) - 1]
    assert true <= quantile(counts, share) <= 1.2 * true + 0.001


async def test_a_gateway_tells_of_its_requests_and_never_of_their_inputs(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        gateway = await cluster.gateway()
        await cluster.sidecar()

        async def get(path: str) -> Any:
            answer = await client.get(gateway.url + path)
            assert answer.status_code == 200, answer.text
            return answer.json()

        ran = await client.post(f"{gateway.url}/v1/encode/toy/one", json={"items": ["canary-41", "two words"]})
        assert ran.status_code == 200
        refused = await client.post(f"{gateway.url}/v1/encode/toy/none", json={"items": ["canary-42"]})
        assert refused.status_code == 404
        report = await get("/v1/history?step_s=60")
        assert report["stages"] == list(STAGES_TOLD)
        assert sum(step["requests"] for step in report["steps"]) == 2
        assert [step["errors"] for step in report["steps"] if step["errors"]] == [{"MODEL_NOT_FOUND": 1}]
        (timed,) = (step for step in report["steps"] if "p99_ms" in step)
        total_ms = ran.json()["timing"]["total_time"]
        assert 0.9 * total_ms <= timed["p99_ms"][-1] <= 1.3 * total_ms + 0.1
        listing = await get("/v1/requests")
        (failed,) = (request for request in listing["requests"] if request["status"] == 404)
        assert (failed["model"], failed["code"]) == ("toy/none", "MODEL_NOT_FOUND")
        assert failed["message"] == refused.json()["error"]["message"]
        (slow,) = (request for request in listing["requests"] if request["status"] == 200)
        assert "message" not in slow
        assert slow["id"] == ran.headers["x-sie-request-id"]
        assert (slow["model"], slow["items"], slow["endpoint"]) == ("toy/one", 2, "encode")
        assert sum(slow["timing"][name] for name in STAGES_TOLD[:-1]) == pytest.approx(
            slow["timing"]["total_time"], 0.01
        )
        assert slow["chunks"][0]["batch"]["items"] == 2
        assert await get(f"/v1/requests/{slow['id']}") == slow
        assert len((await get("/v1/requests?limit=1"))["requests"]) == 1
        assert "canary" not in str(listing)
        for path, param in (
            ("/v1/history?step_s=15", "step_s"),
            ("/v1/history?since=soon", "since"),
            ("/v1/requests?limit=0", "limit"),
            ("/v1/requests?limit=nan", "limit"),
        ):
            answer = await client.get(gateway.url + path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await client.get(f"{gateway.url}/v1/requests/unknown")).status_code == 404


def test_the_requests_of_one_key_do_not_push_out_those_of_another(history: RequestHistory) -> None:
    """Each of at most MAX_OWNERS keys has places of its own."""
    keys = [f"k{number}" for number in range(MAX_OWNERS + 20)]
    for number in range(20):
        for key in keys:
            call = Call(f"{key}-{number}", 0.0, {}, {"model": "toy/one"}, code="INTERNAL_ERROR", grant=Grant(key))
            history.ended(call, "encode", 500, 1 + number if key == "k1" else 0.001 * number)
    for key in keys[:MAX_OWNERS]:
        request_ids = [request["id"] for request in history.requests(1000, Grant(key))]
        assert request_ids == [f"{key}-{number}" for number in range(19, 19 - SLOWEST, -1)]
    everything = history.requests(10_000, Grant("admin", frozenset({"admin"})))
    assert len(everything) <= (MAX_OWNERS + 1) * (SLOWEST + FAILED)
