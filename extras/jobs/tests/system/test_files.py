"""Files of the unmodified client of OpenAI at a real `sie serve`: two gateways, two keys, real bytes; a gateway that is
killed in the middle of an upload; memory that does not grow with a file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from cluster import Cluster, running, until
from openai_client import client_of

from sie_broker.nats import connect
from sie_broker.record import LeaderLease, RecordBucket
from sie_bulk_jobs.file_objects import open_files
from sie_bulk_jobs.gateway.files import ABANDONED_S, MAX_FILE_BYTES, UPLOADS_OF_A_KEY, FileStore
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse, UseBound
from sie_contracts.wire import topology

ADMIN, ONE, OTHER = (f"file-token-{secrets.token_urlsafe(12)}" for _ in range(3))
ENVIRON = {"SIE_AUTH_MODE": "static", "SIE_ADMIN_TOKEN": ADMIN, "SIE_AUTH_TOKENS": f"{ONE},{OTHER}"}
HEAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n\r\n'
)
FORM = {"content-type": "multipart/form-data; boundary=x"}
GROWTH_BYTES = 200 << 20  # what one upload may take, whatever its size; far below the size of the file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("files"), "--no-spare", environ=ENVIRON, gateways=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster, ONE) as client:
        yield client


def objects(cluster: Cluster) -> set[str]:
    folder = cluster.data_dir / "payloads" / "files"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def by(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("size", [1, 140, 20 << 20])
def test_what_was_uploaded_comes_back_at_every_gateway(cluster: Cluster, client: openai.OpenAI, size: int) -> None:
    data = random.Random(size).randbytes(size)
    file = client.files.create(file=('requêtes 東京 "1".jsonl', data), purpose="batch")
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", size, "batch", "processed")
    assert file.filename in ('requêtes 東京 "1".jsonl', "requêtes 東京 %221%22.jsonl"), "as httpx escapes a quote"
    assert abs(file.created_at - time.time()) < 30
    with client_of(cluster, ONE, gateway=1) as second_client:
        assert second_client.files.retrieve(file.id) == file
        assert second_client.files.content(file.id).read() == data
        assert file.id in {entry.id for entry in until(lambda: list(second_client.files.list()), 60, "a list")}
        assert second_client.files.delete(file.id).deleted
    for method in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            method(file.id)
    assert file.id not in objects(cluster)


def test_an_empty_file_and_an_unknown_purpose_are_refused(cluster: Cluster, client: openai.OpenAI) -> None:
    before = objects(cluster)
    with pytest.raises(openai.BadRequestError) as empty:
        client.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(openai.BadRequestError) as purpose:
        client.files.create(file=("a", b"a"), purpose="vision")
    assert (empty.value.param, purpose.value.param) == ("file", "purpose")
    assert empty.value.code == "invalid_input"
    assert objects(cluster) == before


def test_the_client_walks_through_all_pages_of_its_own_files(cluster: Cluster) -> None:
    with (
        client_of(cluster, OTHER) as owner,
        client_of(cluster, ONE) as stranger,
        client_of(cluster, ADMIN) as admin,
    ):
        file_ids = [owner.files.create(file=(str(number), b"a"), purpose="user_data").id for number in range(5)]
        assert [entry.id for entry in owner.files.list(limit=2)] == file_ids[::-1]
        assert [entry.id for entry in owner.files.list(limit=2, order="asc", purpose="user_data")] == file_ids
        assert not {entry.id for entry in stranger.files.list()} & set(file_ids)
        with pytest.raises(openai.NotFoundError):
            stranger.files.content(file_ids[0])
        assert set(file_ids) <= {entry.id for entry in admin.files.list()}
        for file_id in file_ids:
            assert admin.files.delete(file_id).deleted
        assert list(owner.files.list()) == []


def test_a_file_expires(cluster: Cluster, client: openai.OpenAI) -> None:
    """The file is not served after its expiry, and its object is removed soon."""
    file = client.files.create(file=("a", b"a"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3})
    assert file.expires_at == pytest.approx(file.created_at + 3, abs=1)
    assert client.files.content(file.id).read() == b"a"
    assert file.id in objects(cluster)

    def gone() -> bool:
        try:
            client.files.retrieve(file.id)
        except openai.NotFoundError:
            return True
        return False

    until(gone, 60, "the file has expired", cluster.log)
    assert time.time() >= file.created_at + 3
    assert list(client.files.list()) == []
    until(lambda: file.id not in objects(cluster), 60, "its object is removed", cluster.log)


def peak_of(pid: int, done: threading.Event) -> int:
    """Return the largest resident size of a process until `done`."""
    process, peak = psutil.Process(pid), 0
    while not done.wait(0.05):
        peak = max(peak, process.memory_info().rss)
    return peak


@pytest.mark.timeout(300)
def test_the_memory_of_a_gateway_does_not_grow_with_a_file(cluster: Cluster) -> None:
    """An upload and a download of 512 MiB pass. A chunked upload of 600 MiB is refused at the limit."""
    pid = next(pid for pid in cluster.pids("gateway") if str(cluster.port) in psutil.Process(pid).cmdline())
    before, done, peaks = psutil.Process(pid).memory_info().rss, threading.Event(), list[int]()
    watching = threading.Thread(target=lambda: peaks.append(peak_of(pid, done)))
    watching.start()
    block = os.urandom(1 << 20)
    count = MAX_FILE_BYTES // len(block)

    def form(blocks: int) -> Iterator[bytes]:
        return itertools.chain([HEAD], itertools.repeat(block, blocks), [b"\r\n--x--\r\n"])

    try:
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False, headers=by(ONE)) as client:
            answer = client.post("/v1/files", content=form(count), headers=FORM)
            assert (answer.status_code, answer.json().get("bytes")) == (200, MAX_FILE_BYTES), answer.text
            read = 0
            with client.stream("GET", f"/v1/files/{answer.json()['id']}/content") as content:
                for piece in content.iter_bytes():
                    read += len(piece)
            assert read == MAX_FILE_BYTES
            refused = client.post("/v1/files", content=form(600), headers=FORM)
            assert (refused.status_code, refused.json()["error"]["limit"]) == (413, MAX_FILE_BYTES)
            assert client.delete(f"/v1/files/{answer.json()['id']}").status_code == 200
    finally:
        done.set()
        watching.join()
    print("growth", (peaks[0] - before) >> 20, "MiB")
    assert peaks[0] - before < GROWTH_BYTES
    assert objects(cluster) == set()


def test_a_file_that_is_announced_as_too_large_is_refused_at_once(
    cluster: Cluster, client: openai.OpenAI, tmp_path: Path
) -> None:
    """OpenAI's client sends the length of a file on disk."""
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 600 << 20)
    begun_s = time.monotonic()
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=tmp_path / "large", purpose="batch")
    assert caught.value.status_code == 413
    assert time.monotonic() - begun_s < 30
    assert objects(cluster) == set()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.ConnectError:
        return False


def cleaned(cluster: Cluster, ahead_s: float) -> int:
    """Return how many files a gateway whose clock is ahead removes."""

    async def clean() -> int:
        broker = await connect(cluster.broker_url(), name="test")
        try:
            jobs = JobsBucket(broker, 1)
            await jobs.follow()
            lease = LeaderLease(RecordBucket(broker, topology.LEASES_BUCKET, storage="memory"), "files-of-a-test")
            objects = open_files(str(cluster.data_dir / "payloads"))
            unbounded = UseBound(RecordUse(1 << 30, 1 << 50), ("", ""))
            usage = OwnerUsage(unbounded, unbounded, kinds=("", ""), remedy="", reason="")
            return await FileStore(jobs, objects, lease, usage, lambda: time.time() + ahead_s).clean()
        finally:
            await broker.close()

    return asyncio.run(clean())


def test_a_gateway_that_is_killed_in_the_middle_of_an_upload_leaves_nothing_after_the_clean_up(
    cluster: Cluster,
) -> None:
    """Parts of the object are stored when the gateway is killed. No gateway serves the file. A later clean-up removes
    what is left.
    """
    pid = next(pid for pid in cluster.pids("gateway") if str(cluster.port) in psutil.Process(pid).cmdline())
    stored, killed = threading.Event(), threading.Event()

    def form() -> Iterator[bytes]:
        yield HEAD
        yield bytes(20 << 20)
        stored.set()
        killed.wait(60)
        yield b"\r\n--x--\r\n"

    failures = list[Exception]()

    def send() -> None:
        try:
            httpx.post(f"{cluster.url}/v1/files", content=form(), headers={**FORM, **by(ONE)}, timeout=60)
        except httpx.HTTPError as error:
            failures.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert stored.wait(60)
        until(lambda: objects(cluster), 60, "parts of an object")
        os.kill(pid, signal.SIGKILL)
    finally:
        killed.set()
        sending.join(60)
    assert len(failures) == 1
    with client_of(cluster, ADMIN, gateway=1) as admin:
        assert list(admin.files.list()) == []
    assert objects(cluster), "nobody has cleaned up yet"
    assert cleaned(cluster, 0) == 0, "it may still be written"
    assert cleaned(cluster, ABANDONED_S + 1) == 1
    assert objects(cluster) == set()
    until(lambda: is_ready(cluster.url), 60, "the gateway is back", cluster.log)
    with client_of(cluster, ONE) as client:
        file = client.files.create(file=("a", b"abc"), purpose="batch")
        assert client.files.content(file.id).read() == b"abc"
        client.files.delete(file.id)


def batch_s(client: openai.OpenAI) -> float:
    """Return the seconds that a file and its batch take this client."""
    started_s = time.monotonic()
    body = {"model": "sentence-transformers/all-MiniLM-L6-v2", "input": "a"}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body})
        for number in range(100)
    ]
    file = client.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the batch is completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert len(client.files.content(output).text.splitlines()) == len(lines)
    return time.monotonic() - started_s


def test_slow_uploads_of_one_key_stop_neither_uploads_nor_batches_of_another(cluster: Cluster) -> None:
    """32 uploads send a byte and then nothing. Those with a place complete later; the rest may retry."""
    go, statuses = threading.Event(), list[int]()

    def form() -> Iterator[bytes]:
        yield HEAD + b"a"
        go.wait(120)
        yield b"\r\n--x--\r\n"

    def send() -> None:
        try:
            answer = httpx.post(f"{cluster.url}/v1/files", content=form(), headers={**FORM, **by(ONE)}, timeout=120)
        except httpx.TransportError:  # refused, and the connection is closed
            return
        statuses.append(answer.status_code)

    def refused() -> bool:
        answer = httpx.post(
            f"{cluster.url}/v1/files", content=HEAD + b"a\r\n--x--\r\n", headers={**FORM, **by(ONE)}, timeout=60
        )
        return answer.status_code == 429 and "retry-after" in answer.headers

    with client_of(cluster, OTHER) as neighbour:
        batch_s(neighbour)  # this loads the model
        quiet_s = batch_s(neighbour)
        threads = [threading.Thread(target=send) for _ in range(32)]
        for thread in threads:
            thread.start()
        try:
            until(refused, 60, "the key has all of its places")
            attacked_s = batch_s(neighbour)
        finally:
            go.set()
            for thread in threads:
                thread.join(120)
    assert statuses.count(200) == UPLOADS_OF_A_KEY
    assert attacked_s <= 2 * quiet_s + 10, (attacked_s, quiet_s)  # far below the 120 s of the uploads


def test_without_a_broker_it_works_too_and_a_restart_leaves_no_object_of_before(tmp_path: Path) -> None:
    for _ in range(2):
        with running(tmp_path, "--standalone", "--no-spare") as cluster, client_of(cluster, "any") as client:
            assert list(client.files.list()) == []
            paths = [path for path in (tmp_path / "payloads").rglob("file-*") if path.is_file()]
            assert paths == [], "what no record names any more"
            file = client.files.create(file=("a", b"abc"), purpose="batch")
            assert client.files.content(file.id).read() == b"abc"
            assert [entry.id for entry in client.files.list()] == [file.id]
