"""The wall clocks of gateway and sidecar are half a minute off in opposite directions. Nothing changes, because ages
come from the broker.

    sitecustomize.py on a process's PYTHONPATH ──► its time.time and time.time_ns are off, before it imports anything of
    ours

The clocks of the broker and of this test are right. Budgets are shorter than the offset: an age by a wrong clock would
fail at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cluster import SIE, scraped, until
from fake_adapter import ids_of, toy_entry, vector_of
from stack import Device, Part, Plan, Stack

from sie_broker import CoreMessage
from sie_broker.nats import connect
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.messages import Confirmation, Failed, Input, Ok, RunOptions, WorkItem, WorkResult
from sie_contracts.wire.topology import Lane

OFFSET_S = 30
LANE = Lane("_default", "cpu", "default")
MODEL = "toy/one"
BUDGET_MS = 10_000
SHORT_MS = 1_000
DEVICE = Device(batch_ms=20.0, token_us=5_000.0)
LONG_TEXT = "x" * 358  # 360 tokens: keeps the device busy for BUSY_S
BUSY_S = 1.8
ENVIRON = {
    "SIE_LOG_JSON": "true",
    "SIE_RUST_PIPELINE_DEPTH": "1",  # work that waits for the device waits in the sidecar
    "SIE_MAX_BATCH_COST": "512",  # the gateway assumes a full batch, which must fit the budget on so slow a device
}
DAY_S = 86_400
LATE_S = 1.0  # by which an answer may be late on a busy machine
# datetime.now is left as it is: neither process reads it
SITE = """
import time

def _shift(offset_s, now_s=time.time, now_ns=time.time_ns):
    time.time = lambda: now_s() + offset_s
    time.time_ns = lambda: now_ns() + offset_s * 1_000_000_000

_shift({offset_s})
"""


def put_off(part: Part, offset_s: int, folder: Path) -> None:
    """Have the process start with a wall clock that is `offset_s` ahead."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(offset_s=offset_s))
    part.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), part.environ.get("PYTHONPATH"))))


def lines(part: Part) -> list[dict[str, Any]]:
    """Return the log records of a process. A line that is not JSON fails the test."""
    return [json.loads(line) for line in list(part.log)]


def clocks_offset_s(part: Part, begun_s: float) -> tuple[float, float]:
    """Return the bounds of the offset of a process's clock from ours, by the time stamp of its last line, which was
    written after `begun_s`.
    """
    stamp_s = datetime.fromisoformat(lines(part)[-1]["timestamp"]).timestamp()
    return stamp_s - time.time(), stamp_s - begun_s


@pytest.mark.parametrize("offset_s", [2 * DAY_S, -2 * DAY_S], ids=["ahead", "behind"])
def test_a_key_ends_by_the_clock_of_the_broker_at_gateway_and_config_service(tmp_path: Path, offset_s: int) -> None:
    """The clocks of a gateway, the config service and `sie keys` are two days off. A key of an hour is valid at both
    services. A key of some seconds is refused by both after its end.
    """
    stack = Stack(tmp_path / "stack", Plan(workers=(), environ={"SIE_AUTH_MODE": "token"}))
    for part in (stack.config, *stack.gateways):
        put_off(part, offset_s, tmp_path / part.name.replace(" ", "-"))
    urls = (f"{stack.urls[0]}/v1/models", f"{stack.config_url}/v1/configs/models")

    def made(name: str, until_when: str) -> str:
        environ = {**os.environ, "PYTHONPATH": stack.config.environ["PYTHONPATH"], "SIE_NATS_URL": stack.broker_urls}
        line = [SIE, "keys", "create", name, "--expires", until_when]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def statuses(token: str) -> list[int]:
        headers = {"authorization": f"Bearer {token}"}
        return [httpx.get(url, headers=headers, timeout=10, trust_env=False).status_code for url in urls]

    with stack:
        began_s = time.monotonic()
        lasting = made("lasting", "1h")
        command_s = time.monotonic() - began_s
        until(lambda: statuses(lasting) == [200, 200], 60, "both services have the key")
        brief_s = 4 * command_s + 3  # life of a key that ends while the test waits
        end = datetime.now(UTC) + timedelta(seconds=brief_s)
        ending = made("ending", end.isoformat())
        until(lambda: statuses(ending) == [401, 401], brief_s + 60, "it has ended at both")
        assert datetime.now(UTC) >= end
        assert statuses(lasting) == [200, 200]


@dataclass
class Answer:
    status: int
    body: dict[str, Any]
    headers: httpx.Headers
    sent_s: float  # by this test's wall clock
    took_s: float

    @property
    def named_s(self) -> float:
        """The gateway's wall clock when it named the request: a UUID of version 7 begins with its time."""
        return int(self.headers["x-sie-request-id"].replace("-", "")[:12], 16) / 1000

    def check(self, text: str) -> None:
        """Check the vector, and that the times fit what this client measured."""
        assert self.status == 200, self.body
        np.testing.assert_allclose(self.body["items"][0]["dense"]["values"], vector_of(ids_of(text)), atol=1e-6)
        timing = self.body["timing"]
        assert all(0.0 <= value <= self.took_s * 1000 + 1 for value in timing.values()), (timing, self.took_s)
        stages = sum(value for name, value in timing.items() if name.endswith("_time") and name != "total_time")
        assert stages == pytest.approx(timing["total_time"], abs=1.0)


async def ask(client: httpx.AsyncClient, text: str, budget_ms: int = BUDGET_MS) -> Answer:
    sent_s, began_s = time.time(), time.perf_counter()
    answer = await client.post(
        f"/v1/encode/{MODEL}", json={"items": [text]}, headers={"x-sie-timeout-ms": str(budget_ms)}
    )
    return Answer(answer.status_code, answer.json(), answer.headers, sent_s, time.perf_counter() - began_s)


class Inbox:
    """Collects results of work that is published without the gateway, which would give up late work before the sidecar
    has to.
    """

    subject = "sie.result.test"

    def __init__(self) -> None:
        self.came: dict[str, tuple[float, WorkResult]] = {}

    async def on_result(self, message: CoreMessage) -> None:
        result = messages.decode_result(message.data)
        assert result.request not in self.came
        self.came[result.request] = time.perf_counter(), result

    def item(self, request: str, text: str, budget_ms: int) -> tuple[str, bytes, str]:
        item = WorkItem(
            request,
            0,
            MODEL,
            toy_entry().revision,
            "encode",
            (Input(text),),
            RunOptions(),
            f"{self.subject}.{request}",
            budget_ms,
            cost=10,
        )
        return topology.work_subject(LANE, "interactive", MODEL), messages.encode(item), request


def _broker_state(stack: Stack) -> dict[str, Any]:
    """Return the state of the work stream, from the broker's monitor."""
    answer = httpx.get(f"{stack.monitor_urls[0]}/jsz?consumers=true", timeout=30, trust_env=False).json()
    streams = [stream for account in answer["account_details"] for stream in account["stream_detail"]]
    return next(stream for stream in streams if stream["name"] == topology.stream_name(LANE.pool))


@pytest.mark.serial
@pytest.mark.long
@pytest.mark.parametrize("gateway_s", [OFFSET_S, -OFFSET_S])
async def test_clocks_that_are_a_minute_apart_change_nothing(tmp_path: Path, gateway_s: int) -> None:
    """The two clocks are off in opposite directions, and the device is busy for 1.8 s. A request with a budget of a
    second is refused after that second. Work with such a budget that no gateway gives up is dropped by the sidecar when
    the device is free; work beside it that is in time is answered. Ordinary requests get the right vectors and true
    times. No message is left or redelivered, the table has the broker's time, and no process logs a warning.
    """
    stack = Stack(tmp_path / "stack", Plan([MODEL], workers=(DEVICE,), environ=ENVIRON))
    (gateway,), (worker,) = stack.gateways, stack.workers
    put_off(gateway, gateway_s, tmp_path / "ahead")
    put_off(worker.sidecar, -gateway_s, tmp_path / "behind")
    begun_s = time.time()
    with stack:
        for part, offset_s in ((gateway, gateway_s), (worker.sidecar, -gateway_s)):
            min_s, max_s = clocks_offset_s(part, begun_s)
            assert min_s - 0.01 <= offset_s <= max_s + 0.01, part.name
        async with httpx.AsyncClient(base_url=stack.urls[0], timeout=60, trust_env=False) as client:
            await behind_a_busy_device(stack, client)
            texts = [f"text {number}" for number in range(12)]
            for answer, text in zip(await asyncio.gather(*(ask(client, text) for text in texts)), texts, strict=True):
                answer.check(text)
                assert answer.named_s - answer.sent_s == pytest.approx(gateway_s, abs=LATE_S)
        left = await asyncio.to_thread(
            until, lambda: (state := _broker_state(stack))["state"]["messages"] == 0 and state, 5, "an empty queue"
        )
        assert [consumer["num_redelivered"] for consumer in left["consumer_detail"]] == [0]  # type: ignore[index]
        metrics = f"{worker.url}/metrics"
        assert scraped(metrics, "sie_deliveries_total", redelivered="true") == 0
        assert scraped(metrics, "sie_settlements_total", outcome="late") == 1
        assert scraped(metrics, "sie_settlements_total", outcome="cancelled") == 1
        log_lines = [
            line for part in (gateway, worker.sidecar) for line in lines(part) if line["level"] not in ("INFO", "DEBUG")
        ]
        assert [line for line in log_lines if line["logger"] != "sie.settings"] == []


async def behind_a_busy_device(stack: Stack, client: httpx.AsyncClient) -> None:
    """Send work behind a busy device. This must be the first work: a gateway that knows the speed of the worker would
    rightly refuse the short budget at once.
    """
    broker, inbox = await connect(stack.broker_urls, name="test"), Inbox()
    try:

        async def confirm(message: CoreMessage) -> None:
            await inbox.on_result(message)
            await broker.send(message.reply, messages.encode(Confirmation("taken")))

        await broker.subscribe(f"{inbox.subject}.*", confirm)
        busy = asyncio.create_task(ask(client, LONG_TEXT))
        async with asyncio.timeout(BUSY_S):
            while not await asyncio.to_thread(scraped, f"{stack.workers[0].url}/metrics", "sie_batches_in_progress"):
                pass  # the scrape awaits
        began_s = time.perf_counter()
        short = asyncio.create_task(ask(client, "short", SHORT_MS))
        for request, budget_ms in (("late", SHORT_MS), ("good", BUDGET_MS)):
            await broker.publish(*inbox.item(request, request, budget_ms))
        refused = await short
        assert (refused.status, refused.body["error"]["code"]) == (504, "GATEWAY_TIMEOUT"), refused.body
        assert SHORT_MS / 1000 <= refused.took_s < SHORT_MS / 1000 + LATE_S
        long = await busy
        long.check(LONG_TEXT)
        assert long.body["timing"]["inference_ms"] == pytest.approx(BUSY_S * 1000, abs=200)
        async with asyncio.timeout(5):
            while len(inbox.came) < 2:
                await broker.flush()
        for request, (came_s, result) in inbox.came.items():
            assert SHORT_MS / 1000 < came_s - began_s < BUSY_S + LATE_S, request
            (outcome,) = result.outcomes
            if request == "good":
                assert isinstance(outcome, Ok)
                values = np.frombuffer(result.block, "<f4")
                np.testing.assert_allclose(values, vector_of(ids_of(request)), atol=1e-6)
            else:
                assert isinstance(outcome, Failed)
                assert outcome.error.code == "GATEWAY_TIMEOUT"
        table = await (await broker.key_value(topology.PLACEMENT_BUCKET)).get(topology.lane_key(LANE))
        assert table is not None
        assert table.value is not None
        assert abs(records.decode_placement(table.value).at_s - time.time()) < OFFSET_S / 2
    finally:
        await broker.close()
