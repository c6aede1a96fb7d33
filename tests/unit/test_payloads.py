"""Inputs that no message holds: the URL of the store, writes, reads and removals of objects, and a store that does not
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from direct import Direct
from fake_adapter import ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, settings_of, until
from object_stores import S3, Place

from sie_contracts.errors import InternalFailure, ResourceExhausted
from sie_contracts.settings import SettingError, StoreUrl, store_url
from sie_contracts.stages import STAGES
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Input, Payload, RunOptions, WorkItem
from sie_gateway.metrics import Metrics
from sie_gateway.streams.offload import Offload, life_s
from sie_sidecar.in_flight import InFlight
from sie_sidecar.prepare.fetching import PayloadFetching
from sie_store import payloads
from sie_store.object_stores import StoreError
from sie_store.payloads import PayloadMissing, PayloadStore, open_store

STREAM = "WORK__default"
MAX_AGE_S = 720.0
WORDS = "hello world "


# the URL


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", StoreUrl("s3", "bucket", "")),
        ("s3://bucket/", StoreUrl("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b/", StoreUrl("s3", "my.bucket-1", "a/b")),
        ("s3://bucket/with%20space", StoreUrl("s3", "bucket", "with space")),
        ("gs://bucket/prefix", StoreUrl("gs", "bucket", "prefix")),
        ("GS://bucket/prefix", StoreUrl("gs", "bucket", "prefix")),
        ("/mnt/payloads", StoreUrl("file", "", "/mnt/payloads")),
        ("/mnt/pay loads/", StoreUrl("file", "", "/mnt/pay loads")),
        ("/mnt/100%25/x?y#z", StoreUrl("file", "", "/mnt/100%25/x?y#z")),
        ("payloads", StoreUrl("file", "", os.path.abspath("payloads"))),
        ("./a/../b", StoreUrl("file", "", os.path.abspath("b"))),
        ("file:///mnt/payloads", StoreUrl("file", "", "/mnt/payloads")),
        ("file://localhost/mnt/pay%20loads", StoreUrl("file", "", "/mnt/pay loads")),
    ],
)
def test_a_store_is_named_by_a_url_or_a_path(url: str, expected: StoreUrl) -> None:
    """This one parser serves the writer, the reader and the check of the setting."""
    assert store_url(url) == expected
    assert settings_of(SIE_PAYLOAD_STORE_URL=url).payload_store_url == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "gs://",
        "s3://user:secret@bucket",
        "s3://bucket?x=1",
        "gs://bucket#x",
        "s3://a,s3://b",
        "ftp://host/x",
        "https://bucket.s3.amazonaws.com/x",
        "file://",
        "file://host/x",
        "file:///",
    ],
)
def test_what_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(SettingError, match=r"^SIE_PAYLOAD_STORE_URL: got") as caught:
        settings_of(SIE_PAYLOAD_STORE_URL=url)
    assert "secret" not in str(caught.value)


# stores, the same cases on each


@pytest.fixture
def s3(seaweed: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    Place.at(seaweed, monkeypatch)
    return seaweed


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "payloads")
    request.getfixturevalue("s3")
    return f"s3://bucket/{tmp_path.name}"


def opened(url: str) -> PayloadStore:
    store = open_store(url)
    assert store is not None
    return store


async def test_what_is_not_there_is_missing_and_what_is_no_key_is_never_asked_for(url: str) -> None:
    store = opened(url)
    for key in ("0" * 64 + ".1", "../../etc/passwd", "", "x" * 64):
        with pytest.raises(PayloadMissing):
            await store.get(key, 10)
        with pytest.raises(PayloadMissing):
            await store.size(key, 10)


async def test_the_old_goes_and_nothing_else(url: str) -> None:
    """SIE_PAYLOAD_TTL_S: a redelivery at the age limit of the stream can still read its payload. An object that is no
    payload stays for ever.
    """
    store = opened(url)
    now_s = time.time()
    keys = [await store.put(bytes([number]), period=number, timeout_s=10) for number in range(3)]
    import obstore

    await obstore.put_async(store._store, "somebody-elses.txt", b"mine")
    assert await store.sweep(older_than_s=1000, now_s=now_s + 990, timeout_s=10) == 0
    assert await store.get(keys[0], 10) == b"\x00"
    assert await store.sweep(older_than_s=1000, now_s=now_s + 1100, timeout_s=10) == 3
    assert await store.sweep(older_than_s=1000, now_s=now_s + 1100, timeout_s=10) == 0
    with pytest.raises(PayloadMissing):
        await store.get(keys[0], 10)
    assert bytes(await (await obstore.get_async(store._store, "somebody-elses.txt")).bytes_async()) == b"mine"


async def test_an_object_that_was_changed_is_not_taken(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    key = await store.put(b"right", period=1, timeout_s=10)
    (tmp_path / key).write_bytes(b"wrong")
    with pytest.raises(PayloadMissing, match="damaged"):
        await store.get(key, 10)


def test_a_folder_is_private_and_one_that_cannot_be_is_a_start_error(tmp_path: Path) -> None:
    opened(str(tmp_path / "deep" / "payloads"))
    assert (tmp_path / "deep" / "payloads").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"^SIE_PAYLOAD_STORE_URL"):
        open_store(str(tmp_path / "file"))
    assert open_store(None) is None


async def test_a_store_that_does_not_answer_ends_at_the_time_out(s3: S3) -> None:
    store = opened("s3://bucket/stopped")
    s3.pause()
    try:
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="within"):
            await store.put(b"x", period=1, timeout_s=0.3)
        assert time.monotonic() - began_s < 20
    finally:
        s3.resume()
    await store.put(b"x", period=1, timeout_s=10)


# lifetimes


def test_the_life_of_an_object_is_longer_than_that_of_its_message() -> None:
    """Without SIE_PAYLOAD_TTL_S the life is the age limit of the stream and an hour. A value at or below that limit is
    a start error.
    """
    assert life_s(settings_of(), MAX_AGE_S) == 720 + 3600
    assert life_s(settings_of(SIE_PAYLOAD_TTL_S="721"), MAX_AGE_S) == 721
    with pytest.raises(SettingError, match=r"^SIE_PAYLOAD_TTL_S: got 720"):
        life_s(settings_of(SIE_PAYLOAD_TTL_S="720"), MAX_AGE_S)


@pytest.mark.parametrize("life", [721, 4320])
async def test_an_object_lives_as_long_as_it_should_also_when_it_is_written_again(tmp_path: Path, life: int) -> None:
    """SIE_PAYLOAD_TTL_S on a virtual clock: the test sets the times of files and the clock of the writer."""
    store, now_s = opened(str(tmp_path)), 1e9
    offload = Offload(store, life, Metrics(), lambda: now_s)

    def aged(path: Path, at_s: float) -> None:
        os.utime(path, (at_s, at_s))

    key = await store.put(b"x", period=int(now_s // life), timeout_s=10)
    aged(tmp_path / key, now_s)
    now_s += MAX_AGE_S
    assert await offload.sweep() == 0
    assert await store.get(key, 10) == b"x"
    now_s += life - MAX_AGE_S
    assert await offload.sweep() == 0
    now_s += 1
    assert await store.put(b"x", period=int(now_s // life), timeout_s=10) != key, (
        "nobody writes any more what is about to go"
    )
    assert await offload.sweep() == 1
    with pytest.raises(PayloadMissing):
        await store.get(key, 10)


# the reading side


async def test_fetched_inputs_are_bounded_in_bytes_and_what_fails_holds_nothing(tmp_path: Path) -> None:
    """The second fetch waits until the first input is let go. An input above the bound is fetched alone. A budget that
    ends during the wait is a typed error.
    """
    store, now_s = opened(str(tmp_path)), time.monotonic
    fetching = PayloadFetching(store, now_s, max_bytes=50_000)

    async def work(size: int, budget_s: float = 10.0, count: int = 1) -> InFlight:
        key = await store.put(messages.encode(Payload((Input("x" * size),))), period=1, timeout_s=10)
        item = WorkItem("r", 0, "m", "v", "encode", (), RunOptions(), "inbox", 1000, payload=key, count=count)
        return InFlight(None, item, now_s(), now_s() + budget_s)  # type: ignore[arg-type]

    first, second, large = await work(30_000), await work(30_001), await work(90_000)
    await fetching.fetch(first)
    assert first.item.inputs == (Input("x" * 30_000),)
    waiting = asyncio.create_task(fetching.fetch(second))
    hopeless = await work(30_002, budget_s=0.3)
    with pytest.raises(ResourceExhausted, match="memory for large inputs was in use"):
        await fetching.fetch(hopeless)
    assert not waiting.done()
    fetching.let_go(first)
    await waiting
    fetching.let_go(second)
    await fetching.fetch(large)
    fetching.let_go(large)
    with pytest.raises(InternalFailure, match="1 inputs are stored for a chunk of 2"):
        await fetching.fetch(await work(10, count=2))
    assert fetching.held_bytes == 0


async def test_cancelled_work_frees_the_memory_of_its_inputs_before_its_message_is_acknowledged(tmp_path: Path) -> None:
    async with Direct(tmp_path) as cluster:
        store = opened(str(tmp_path / "store"))
        key = await store.put(messages.encode(Payload((Input("x" * 400),))), period=1, timeout_s=10)
        adapter = await cluster.adapter()
        adapter.hold_loads = True
        await cluster.sidecar(adapter, SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"))
        (intake,) = (task for task in asyncio.all_tasks() if task.get_name() == "intake")
        worker = intake.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
        item = await cluster.publish(payload=key, count=1)
        await until(lambda: [flight.hosted is not None for flight in worker.inventory] == [True], "its model")
        (flight,) = worker.inventory
        worker.intake.cancel({item.request})
        assert list(worker.inventory) == [flight], "its message is not acknowledged"
        assert (flight.item.inputs, flight.payload_bytes, flight.hosted) == ((), 0, None)
        await cluster.left(0)


# end to end


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, url: str, *, max_payload: int = 1 << 16, **entry: object) -> AsyncIterator[InProcess]:
    async with InProcess(
        tmp_path, toy_entry(**entry), toy_entry("toy/two", **entry), max_payload=max_payload
    ) as cluster:
        yield cluster


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "payloads").iterdir())


async def test_a_text_that_no_message_holds_goes_through_the_store(tmp_path: Path) -> None:
    """SIE_PAYLOAD_STORE_URL: the text becomes an object, and the message stays small. Small texts stay in their
    message. Each text has an outcome of its own.
    """
    url = str(tmp_path / "payloads")
    text = WORDS * 25_000
    async with cluster(tmp_path, url) as running:
        adapter = await running.adapter()
        adapter.hold_loads = True
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        await running.sidecar(adapter, SIE_PAYLOAD_STORE_URL=url)
        task = asyncio.create_task(gateway.encode("hello", text, "world"))
        await adapter.until(lambda held_adapter: held_adapter.loads, "a load")
        await until(lambda: len(stored(tmp_path)) == 1, "an object")
        messages_in_stream = running.server.streams[STREAM].messages.values()
        assert max(len(message.data) for message in messages_in_stream) < 20_000
        adapter.let_go()
        answer = await task
        assert answer.status_code == 200, answer.text
        prefix = await gateway.encode(WORDS * 100, X_SIE_Explain="1")
        vectors = [slot["dense"]["values"] for slot in answer.json()["items"]]
        assert vectors[0] == pytest.approx(vector_of(ids_of("hello")))
        assert vectors[1] == prefix.json()["items"][0]["dense"]["values"]
        assert answer.headers["x-sie-truncated-items"] == "1"
        assert "x-payload-fetch-time" not in prefix.headers
        alone = await gateway.encode(text, X_SIE_Explain="1")
        assert float(alone.headers["x-payload-fetch-time"]) > 0
        timing = alone.json()["timing"]
        assert sum(timing[name] for name in STAGES) == pytest.approx(timing["total_time"], abs=1.1), (
            "this adapter always says 1 ms"
        )
        assert await gateway.metric("sie_gateway_queue_payload_offloads_total") == 2
        assert len(stored(tmp_path)) == 1, "the same bytes are one object"
        payload = messages.decode_payload(stored(tmp_path)[0].read_bytes())
        assert payload == Payload((Input(text),))


@pytest.mark.parametrize(("limit", "size"), [({}, 100_000), ({"SIE_INLINE_PAYLOAD_BYTES": "4096"}, 10_000)])
async def test_the_inline_limit_decides_what_goes_through_the_store(
    tmp_path: Path, limit: dict[str, str], size: int
) -> None:
    """Without SIE_INLINE_PAYLOAD_BYTES the limit is what a broker of 64 KiB takes. Inputs within the limit stay in the
    message.
    """
    url = str(tmp_path / "payloads")
    async with cluster(tmp_path, url) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url, **limit)
        await running.sidecar(SIE_PAYLOAD_STORE_URL=url)
        assert (await gateway.encode("x" * 4096, *["word"] * 500)).status_code == 200
        assert stored(tmp_path) == []
        assert (await gateway.encode("x" * size)).status_code == 200
        assert len(stored(tmp_path)) == 1


async def test_a_message_leaves_room_for_the_error_of_its_dead_letter(tmp_path: Path) -> None:
    url = str(tmp_path / "payloads")
    async with cluster(tmp_path, url) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        await running.sidecar(SIE_PAYLOAD_STORE_URL=url)
        body = {"items": ["x" * 48_000], "options": {"instruction": "i" * 7_750}}
        answer = await gateway.client.post("/v1/encode/toy/one", json=body)
        assert answer.status_code == 200, answer.text
        assert len(stored(tmp_path)) == 1


async def test_a_store_that_cannot_be_written_is_503_and_nothing_is_queued(tmp_path: Path) -> None:
    """The text is not sent inline instead, because it cannot fit."""
    url = tmp_path / "payloads"
    async with cluster(tmp_path, str(url)) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=str(url))
        url.rmdir()
        url.write_text("in its place")
        refused = await gateway.encode("hello", WORDS * 10_000)
        assert (refused.status_code, refused.json()["code"]) == (503, "QUEUE_UNAVAILABLE")
        await until(
            lambda: not running.server.streams[STREAM].state().messages, "what was queued beside it is withdrawn"
        )


async def test_an_object_that_is_gone_is_a_typed_error(tmp_path: Path) -> None:
    url = str(tmp_path / "payloads")
    async with cluster(tmp_path, url) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        task = asyncio.create_task(gateway.encode(WORDS * 10_000))
        await until(lambda: running.server.streams[STREAM].state().messages, "queued work")
        stored(tmp_path)[0].unlink()
        await running.sidecar(SIE_PAYLOAD_STORE_URL=url)
        answer = await task
        assert (answer.status_code, answer.json()["code"]) == (503, "QUEUE_UNAVAILABLE")
        assert running.server.streams[STREAM].state().messages == 0


async def test_a_worker_without_the_store_hands_the_work_back_and_says_why_in_the_end(tmp_path: Path) -> None:
    """Another worker may have the store. The worker hands the work back four times with a pause, then answers with a
    typed error that names the setting.
    """
    url = str(tmp_path / "payloads")
    async with cluster(tmp_path, url) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        without = await running.sidecar()
        answer = await gateway.encode(WORDS * 10_000)
        assert (answer.status_code, answer.json()["code"]) == (503, "NOT_READY")
        assert "SIE_PAYLOAD_STORE_URL" in answer.json()["error"]["message"]
        assert await without.metric("sie_settlements_total", outcome="handed_back") == 4


@pytest.mark.serial
async def test_a_blocked_store_delays_no_other_work(tmp_path: Path, s3: S3) -> None:
    """While the store does not answer, texts of the same model and of another one are answered as before. The large
    text is answered afterwards.
    """
    url = f"s3://bucket/{tmp_path.name}"
    async with cluster(tmp_path, url) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        first = asyncio.create_task(gateway.encode(WORDS * 10_000))
        await until(lambda: running.server.streams[STREAM].state().messages, "queued work")
        s3.pause()
        try:
            await running.sidecar(SIE_PAYLOAD_STORE_URL=url)
            assert (await gateway.encode("warm")).status_code == 200
            assert (await gateway.encode("warm", model="toy/two")).status_code == 200
            second = asyncio.create_task(gateway.encode(WORDS * 10_001))  # its put waits as well
            times = [await timed(gateway, model) for _ in range(25) for model in ("toy/one", "toy/two")]
            assert not first.done()
            assert not second.done()
        finally:
            s3.resume()
        assert sorted(times)[-4] < 0.5  # the machine may stand still now and then
        assert (await first).status_code == (await second).status_code == 200


async def timed(gateway: GatewayProcess, model: str) -> float:
    began_s = time.perf_counter()
    assert (await gateway.encode("quick", model=model)).status_code == 200
    return time.perf_counter() - began_s


async def test_a_query_that_no_message_holds_goes_with_its_items(tmp_path: Path) -> None:
    """The query of a score travels in the store as well; its items are cut into chunks as usual."""
    url = str(tmp_path / "payloads")
    async with cluster(tmp_path, url, outputs={"dense": 32, "score": 0}) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=url)
        request = gateway.client.post("/v1/score/toy/one", json={"query": WORDS * 10_000, "items": ["a"] * 5})
        answer = asyncio.create_task(request)  # no worker serves the request: the test reads what was queued
        await until(lambda: running.server.streams[STREAM].state().messages, "queued work")
        payloads = [messages.decode_payload(path.read_bytes()) for path in stored(tmp_path)]
        assert {payload.query for payload in payloads} == {Input(WORDS * 10_000)}
        assert sum(len(payload.inputs) for payload in payloads) == 5
        answer.cancel()


async def test_an_object_that_comes_back_within_the_budget_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[StoreError] = []
    genuine = PayloadStore.size

    async def size(store: PayloadStore, key: str, timeout_s: float) -> int:
        try:
            return await genuine(store, key, timeout_s)
        except StoreError as error:
            failures.append(error)
            raise

    monkeypatch.setattr(PayloadStore, "size", size)
    url = tmp_path / "payloads"
    async with cluster(tmp_path, str(url)) as running:
        gateway = await running.gateway(SIE_PAYLOAD_STORE_URL=str(url))
        task = asyncio.create_task(gateway.encode(WORDS * 10_000))
        await until(lambda: running.server.streams[STREAM].state().messages, "queued work")
        (file,) = stored(tmp_path)
        data = file.read_bytes()
        file.unlink()
        file.symlink_to(file)  # a read fails, and not because the object is absent
        await running.sidecar(SIE_PAYLOAD_STORE_URL=str(url))
        await until(lambda: len(failures) > 1, "failed attempts")
        file.unlink()
        file.write_bytes(data)
        assert (await task).status_code == 200
        assert not any(isinstance(error, PayloadMissing) for error in failures)


async def test_a_read_keeps_its_memory_until_it_ends_although_its_work_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Direct(tmp_path) as cluster:
        store = opened(str(tmp_path / "store"))
        key = await store.put(messages.encode(Payload((Input("x" * 400),))), period=1, timeout_s=10)
        release, get = asyncio.Event(), type(store).get

        async def held(self: Any, *arguments: Any) -> bytes:
            await release.wait()
            return await get(self, *arguments)

        monkeypatch.setattr(type(store), "get", held)
        await cluster.sidecar(await cluster.adapter(), SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"))
        (intake,) = (task for task in asyncio.all_tasks() if task.get_name() == "intake")
        worker = intake.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
        item = await cluster.publish(payload=key, count=1)
        await until(lambda: [flight.payload_bytes > 0 for flight in worker.inventory] == [True], "the read")
        (flight,) = worker.inventory
        worker.intake.cancel({item.request})
        assert flight.settled
        assert flight.payload_bytes > 0
        release.set()
        await until(lambda: not flight.payload_bytes, "the end of the read")
        assert flight.item.inputs == ()
        await cluster.left(0)


async def test_payloads_that_another_gateway_removes_meanwhile_end_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(str(tmp_path))
    keys = [await store.put(bytes([number]), period=number, timeout_s=10) for number in range(3)]
    monkeypatch.setattr(payloads, "failpoint", lambda _: (tmp_path / keys[0]).unlink(missing_ok=True))
    now_s = time.time() + 1000
    removed = [await store.sweep(older_than_s=1, now_s=now_s, timeout_s=10) for _ in range(2)]
    assert sum(removed) <= 2
    assert not os.listdir(tmp_path)


async def test_small_inputs_do_not_keep_a_large_one_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_s = opened(str(tmp_path)), time.monotonic
    fetching = PayloadFetching(store, now_s, max_bytes=50_000)
    waiting: list[str] = []
    fetched: list[str] = []
    reserve = fetching._reserve_memory

    async def recorded(flight: InFlight, size: int) -> None:
        waiting.append(flight.item.request)
        await reserve(flight, size)
        fetched.append(flight.item.request)

    monkeypatch.setattr(fetching, "_reserve_memory", recorded)

    async def fetch(name: str, size: int) -> InFlight:
        key = await store.put(messages.encode(Payload((Input("x" * size),))), period=1, timeout_s=10)
        item = WorkItem(name, 0, "m", "v", "encode", (), RunOptions(), "inbox", 1000, payload=key, count=1)
        flight = InFlight(None, item, now_s(), now_s() + 60)  # type: ignore[arg-type]
        await fetching.fetch(flight)
        return flight

    async def fetch_and_release(name: str, size: int) -> None:
        fetching.let_go(await fetch(name, size))

    held = [await fetch("first", 20_001), await fetch("second", 20_002)]
    large = asyncio.create_task(fetch_and_release("large", 45_000))
    await until(lambda: "large" in waiting, "the large input waits for memory")
    small = [asyncio.create_task(fetch_and_release(f"small {number}", 20_010 + number)) for number in range(4)]
    await until(lambda: len(waiting) == 7, "all inputs wait for memory")
    for flight in held:
        fetching.let_go(flight)
        await asyncio.sleep(0)
    await asyncio.gather(large, *small)
    assert fetched[:3] == ["first", "second", "large"]
    assert len(fetched) == 7
    assert fetching.held_bytes == 0


@pytest.mark.parametrize("text", ["a" * 600_000, "\u00e4" * 600_000, "a\U0001f600" * 300_000, "\u00e4" * 10, ""])
def test_a_payload_that_is_encoded_in_pieces_is_the_same(text: str) -> None:
    for payload in (Payload((Input(text),)), Payload((Input("a"), Input(text, pair=text)), Input(text))):
        assert messages.encode_in_pieces(payload) == messages.encode(payload)
    assert messages.utf8_bytes(text) == len(text.encode())
    assert Input(text, pair=text).least_bytes <= Input(text, pair=text).nbytes
