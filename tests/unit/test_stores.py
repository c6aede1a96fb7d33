"""Object stores: retries, time limits, and the errors for their refusals."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import obstore
import pytest

from sie_store.object_stores import AccessRefused, ObjectMissing, RetryPolicy, StoreError, failure, opened, sync

QUICK = RetryPolicy(stall_s=0.05, tries=3, pause_s=0.001)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "Error performing PUT http://169.254.169.254/latest/api/token in 5s - timed out",
            AccessRefused,
            "no credentials are set",
        ),
        ("Error performing GET http://metadata.google.internal/x in 5s", AccessRefused, "no credentials are set"),
        (
            "GET http://me:secret@host/x in 31.5ms - HTTP error: error sending request\nmore",
            StoreError,
            "^GET http://host/x - HTTP error",
        ),
        ("status code: 503 Service Unavailable: <Code>SlowDown</Code>", StoreError, "^status 503 SlowDown$"),
    ],
)
def test_what_a_store_says_is_told_without_a_secret(text: str, kind: type[StoreError], message: str) -> None:
    error = failure(Exception(text))
    assert type(error) is kind
    assert re.search(message, str(error))


async def test_what_may_pass_is_asked_again_and_what_may_not_is_asked_once() -> None:
    count = 0

    async def fails(error: StoreError) -> None:
        nonlocal count
        count += 1
        raise error

    with pytest.raises(StoreError, match="later"):
        await QUICK.call(lambda: fails(StoreError("later")))
    assert count == 3
    with pytest.raises(ObjectMissing):
        await QUICK.call(lambda: fails(ObjectMissing("never")))
    assert count == 4


async def test_what_never_answers_ends_at_the_bound() -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=r"no answer within 0\.05 s"):
        await QUICK.call(lambda: asyncio.sleep(3600))
    assert time.monotonic() - began_s < 30


async def test_sync_and_opened_leave_each_name_on_the_way_to_an_object_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    store = opened(str(tmp_path / "new" / "store"), "SIE_PAYLOAD_STORE_URL")
    await obstore.put_async(store, "files/a", b"content")
    await sync(store, "files/a")
    path = tmp_path / "new" / "store" / "files" / "a"
    assert synced == {part.stat().st_ino for part in (path, *path.parents) if part.is_relative_to(tmp_path)}


async def test_a_store_is_asked_again_no_sooner_than_it_asked_for() -> None:
    tries = []

    async def refused_once() -> str:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise StoreError("status 429", after_s=0.4)
        return "it"

    assert await RetryPolicy(tries=2, pause_s=0.001).repeated(refused_once) == "it"
    assert tries[1] - tries[0] > 0.4 * 0.7  # the pause has jitter
