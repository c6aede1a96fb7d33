"""Ten thousand models: the processor time of a gateway's start, of a request and of a delta. The bounds are three times
the promised times.

tests/system/test_config_convergence.py checks the same over real processes, and bench/config.py measures it.
"""

from __future__ import annotations

import asyncio
import time

import large_catalogue
import msgspec
import pytest

from sie_contracts.models.catalogue import Catalogue
from sie_runtime import feed
from sie_runtime.feed import snapshot

COUNT = 10_000
MARGIN = 3


@pytest.fixture(scope="module")
def exported() -> bytes:
    return large_catalogue.export(COUNT)


@pytest.fixture(scope="module")
def large(exported: bytes) -> Catalogue:
    return asyncio.run(snapshot(feed.decode_export(exported)))


async def test_an_export_is_read_in_short_turns_and_little_time(exported: bytes) -> None:
    """Concurrent requests get a turn of the event loop after each slice of entries."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    begun_s = time.thread_time()
    read = feed.decode_export(exported)
    catalogue = await snapshot(read)
    took_s = time.thread_time() - begun_s
    counting.cancel()
    assert (len(catalogue.entries), catalogue.since(next(iter(catalogue.entries)))) == (COUNT, "large:9")
    assert turns >= COUNT // feed._SLICE - 1
    assert took_s < MARGIN * 1.0


def test_ids_that_differ_in_case_alone_are_ambiguous_and_a_delta_is_seen_by_every_way_of_writing(
    large: Catalogue,
) -> None:
    first = next(iter(large.entries.values()))
    new = large.with_model("New/Model", msgspec.structs.replace(first, id="New/Model"), 1, "large:12")
    assert new.resolve("new/model").entry.id == "New/Model"
    assert "New/Model" in new.near("new/modell")
    twins = new.with_model("NEW/model", msgspec.structs.replace(first, id="NEW/model"), 1, "large:14")
    assert twins.find("new/model") is None
    assert twins.find("New/Model") is not None
    assert twins.with_model("NEW/model", None, 2, "large:16").find("new/model") is not None
    assert large.find("new/model") is None
