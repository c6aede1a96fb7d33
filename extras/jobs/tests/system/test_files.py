"""Files of the unmodified client of OpenAI at a real `sie serve`: two gateways, two keys, real bytes; a gateway that is
killed in the middle of an upload; memory that does not grow with a file.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
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


@pytest.mark.parametrize("size", [1, 20 << 20])
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


def peak_of(pid: int, done: threading.Event) -> int:
    """Return the largest resident size of a process until `done`."""
    process, peak = psutil.Process(pid), 0
    while not done.wait(0.05):
        peak = max(peak, process.memory_info().rss)
    return peak


@pytest.mark.timeout(300)
def test_the_memory_of_a_gateway_does_not_grow_with_a_file(cluster: Cluster) -> None:
    """A file of 400 MiB goes up and down."""
    pid = next(pid for pid in cluster.pids("gateway") if str(cluster.port) in psutil.Process(pid).cmdline())
    before, done, peaks = psutil.Process(pid).memory_info().rss, threading.Event(), list[int]()
    watching = threading.Thread(target=lambda: peaks.append(peak_of(pid, done)))
    watching.start()
    block = os.urandom(1 << 20)
    size, form = 400 << 20, itertools.chain([HEAD], itertools.repeat(block, 400), [b"\r\n--x--\r\n"])

    try:
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False, headers=by(ONE)) as client:
            answer = client.post("/v1/files", content=form, headers=FORM)
            assert (answer.status_code, answer.json().get("bytes")) == (200, size), answer.text
            read = 0
            with client.stream("GET", f"/v1/files/{answer.json()['id']}/content") as content:
                for piece in content.iter_bytes():
                    read += len(piece)
            assert read == size
            assert client.delete(f"/v1/files/{answer.json()['id']}").status_code == 200
    finally:
        done.set()
        watching.join()
    print("growth", (peaks[0] - before) >> 20, "MiB")
    assert peaks[0] - before < GROWTH_BYTES
    assert objects(cluster) == set()


def test_without_a_broker_it_works_too_and_a_restart_leaves_no_object_of_before(tmp_path: Path) -> None:
    for _ in range(2):
        with running(tmp_path, "--standalone", "--no-spare") as cluster, client_of(cluster, "any") as client:
            assert list(client.files.list()) == []
            paths = [path for path in (tmp_path / "payloads").rglob("file-*") if path.is_file()]
            assert paths == [], "what no record names any more"
            file = client.files.create(file=("a", b"abc"), purpose="batch")
            assert client.files.content(file.id).read() == b"abc"
            assert [entry.id for entry in client.files.list()] == [file.id]
