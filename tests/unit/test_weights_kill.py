"""Processes that are killed while they fetch or remove a snapshot, and several at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import until
from fetching import END_S, REPOSITORY, fetcher, obtain
from hub_stub import COMMIT, Asked, HubStub

from sie_store.weights.cache import LocalCache
from sie_store.weights.manifest import verify

BIG = "model.safetensors"
BIG_BYTES = 640 << 10
FILES = {
    "config.json": b"{}",
    "tokenizer.json": bytes(20_000),
    "1_Pooling/config.json": b'{"pooling": 1}',
    BIG: os.urandom(BIG_BYTES),
}
POINTS = 20


@pytest.fixture
def hub() -> Iterator[HubStub]:
    with HubStub(repositories={REPOSITORY: FILES}).serving() as stub:
        yield stub


def is_right(cache: Path) -> bool:
    """Return True if the cache has the snapshot. Fail if the snapshot is damaged."""
    local = LocalCache(cache)
    folder, manifest = local.find(REPOSITORY, COMMIT), local.manifest(REPOSITORY, COMMIT)
    if folder is None:
        return False
    assert manifest is not None
    assert verify(folder, manifest) == []
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    return True


def on_disk(cache: Path) -> int:
    """Return the number of bytes of the largest file on the disk, under any name."""
    return max((path.stat().st_size for path in cache.rglob(f"{BIG}*")), default=0)


def asked_for(hub: HubStub) -> list[Asked]:
    """Return the requests for the bytes of the largest file."""
    return [request for request in hub.of("/cdn/") if request.path.endswith(BIG)]


def killed_at(hub: HubStub, cache: Path, offset: int) -> None:
    """Run a process that is killed once it has written `offset` bytes of the largest file, or a few more."""
    with fetcher(hub, cache) as victim:

        def kill(name: str, sent: int) -> None:
            if name == BIG and sent >= offset:
                until(lambda: on_disk(cache) >= sent, END_S, "what was sent is written")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)

        hub.before_piece = kill
        assert victim.end() == -signal.SIGKILL
    hub.before_piece = lambda name, sent: None


@pytest.mark.long
def test_what_was_killed_at_any_byte_goes_on_there(hub: HubStub, tmp_path: Path) -> None:
    """After a kill at each of 20 points of the download nothing counts as cached, and no byte on the disk is requested
    again.
    """
    resumed = set()
    for point in range(POINTS):
        cache = tmp_path / str(point)
        killed_at(hub, cache, BIG_BYTES * point // POINTS)
        assert not is_right(cache)
        there, before = on_disk(cache), len(asked_for(hub))
        assert obtain(hub, cache) == LocalCache(cache).place(REPOSITORY, COMMIT)
        assert is_right(cache)
        (request,) = asked_for(hub)[before:]
        assert request.start == there
        resumed.add(there)
    assert len(resumed) == POINTS


@pytest.mark.long
def test_killed_before_any_change_of_the_disk_the_next_start_completes(hub: HubStub, tmp_path: Path) -> None:
    """A snapshot that counts as complete after a kill is right. Any other is completed."""
    count = 0
    while True:
        count += 1
        cache = tmp_path / str(count)
        with fetcher(hub, cache, dies_at=count) as victim:
            if victim.end() == 0:
                break
        is_right(cache)  # fails if a damaged snapshot counts
        obtain(hub, cache)
        assert is_right(cache)
    assert count > POINTS


def test_a_removal_that_was_killed_leaves_no_half_of_a_snapshot(hub: HubStub, tmp_path: Path) -> None:
    obtain(hub, tmp_path)
    count = 0
    while True:
        count += 1
        with fetcher(hub, tmp_path, dies_at=count, removes=True) as victim:
            if victim.end() == 0:
                break
        is_right(tmp_path)
        obtain(hub, tmp_path)
        assert is_right(tmp_path)
    assert count > len(FILES)
    assert not is_right(tmp_path)
    assert LocalCache(tmp_path).candidates() == []


def test_of_several_processes_one_fetches(hub: HubStub, tmp_path: Path) -> None:
    """Four processes stand for any number: a process that waits holds nothing but a file."""
    begun, go = threading.Event(), threading.Event()

    def held(name: str, sent: int) -> None:
        begun.set()
        assert go.wait(END_S)

    hub.before_piece = held
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(fetcher(hub, tmp_path))
        assert begun.wait(END_S)
        waiters = [stack.enter_context(fetcher(hub, tmp_path)) for _ in range(3)]
        assert [waiter.hear() for waiter in waiters] == ["waiting"] * 3
        go.set()
        assert {process.hear() for process in (first, *waiters)} == {LocalCache(tmp_path).place(REPOSITORY, COMMIT)}
    assert is_right(tmp_path)
    assert len(hub.of("/api/models/")) == 1
    assert hub.sent == {name: len(data) for name, data in FILES.items()}


def test_when_the_one_that_fetches_is_killed_one_that_waits_goes_on(hub: HubStub, tmp_path: Path) -> None:
    half, go = threading.Event(), threading.Event()

    def held(name: str, sent: int) -> None:
        if name == BIG and sent >= BIG_BYTES // 2:
            half.set()
            assert go.wait(END_S)

    hub.before_piece = held
    with fetcher(hub, tmp_path) as first:
        assert half.wait(END_S)
        with fetcher(hub, tmp_path) as second:
            assert second.hear() == "waiting"
            os.kill(first.pid, signal.SIGKILL)
            first.end()
            there = on_disk(tmp_path)
            go.set()
            assert second.hear() == LocalCache(tmp_path).place(REPOSITORY, COMMIT)
    assert is_right(tmp_path)
    assert [request.start for request in asked_for(hub)] == [0, there]
