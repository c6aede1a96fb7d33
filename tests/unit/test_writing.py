"""Models that write token by token, in the sidecar: lanes, cancellation and budgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from direct import Direct
from fake_adapter import FakeAdapter, toy_entry
from inprocess import InProcess

from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests, Failed, Ok
from sie_sidecar.dispatch import WRITTEN_AT_ONCE, WRITTEN_READY

WRITER, OTHER = "toy/one", "toy/two"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry(WRITER), toy_entry(OTHER)) as cluster:
        yield cluster


@pytest.fixture
async def direct(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path, toy_entry(WRITER)) as cluster:
        yield cluster


async def written(cluster: InProcess, **environ: str) -> FakeAdapter:
    """Return an adapter of one lane with a sidecar. Its model `WRITER` writes until it is let go."""
    adapter = await cluster.adapter()
    adapter.writes.add(WRITER)
    await cluster.sidecar(adapter, **environ)
    adapter.hold_batches = True
    return adapter


async def test_what_is_written_holds_no_lane(cluster: InProcess) -> None:
    """More pages come than are written at once. Each place has one page. A text of another model waits for none of
    them. All pages are answered after they are let go.
    """
    gateway, adapter = await cluster.gateway(), await written(cluster)
    pages = WRITTEN_AT_ONCE + WRITTEN_READY + 5
    sent = [asyncio.create_task(gateway.encode(f"page {number}")) for number in range(pages)]
    await adapter.until(lambda state: state.running == WRITTEN_AT_ONCE, "all places taken")
    adapter.hold_batches = False  # batches that come from now on are not held
    assert (await asyncio.wait_for(gateway.encode("a text", model=OTHER), 30)).status_code == 200
    assert adapter.running == WRITTEN_AT_ONCE
    assert {len(batch.groups) for batch in adapter.batches if batch.model == WRITER} == {1}
    adapter.let_go()
    assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * pages
    assert adapter.peak_running <= WRITTEN_AT_ONCE + 1


async def test_a_client_that_is_gone_ends_what_is_written_for_it(direct: Direct) -> None:
    """Another text that is being written is answered."""
    adapter = await written(direct)
    leaves, stays = await direct.publish("leaves", request="gone"), await direct.publish("stays")
    await adapter.until(lambda state: state.running == 2, "both are written")
    await direct.send(topology.cancel_subject("_default"), messages.encode(CancelRequests(("gone",))))
    await adapter.until(lambda state: state.cancels and state.running == 1, "one is cancelled")
    await direct.left(1)
    adapter.let_go()
    assert isinstance((await direct.result(stays)).outcomes[0], Ok)
    await direct.left(0)
    assert (leaves.request, leaves.chunk) not in direct.results


async def test_a_connection_on_which_something_was_cancelled_is_used_again(direct: Direct) -> None:
    adapter = await written(direct)
    await direct.publish("leaves", request="gone")
    await adapter.until(lambda state: state.running == 1, "it is written")
    connections = adapter.connections
    await direct.send(topology.cancel_subject("_default"), messages.encode(CancelRequests(("gone",))))
    await adapter.until(lambda state: state.cancels and not state.running, "it is cancelled")
    adapter.let_go()
    for text in ("a", "b"):
        assert isinstance((await direct.result(await direct.publish(text))).outcomes[0], Ok)
    assert adapter.connections == connections


async def test_what_takes_longer_than_its_budget_is_cancelled(direct: Direct) -> None:
    adapter = await written(direct)
    item = await direct.publish("a page", budget_ms=1400)  # the writing begins before the budget is over
    await adapter.until(lambda state: state.cancels, "the budget is over", timeout_s=20)
    outcome = (await direct.result(item)).outcomes[0]
    assert isinstance(outcome, Failed)
    assert adapter.running == 0
