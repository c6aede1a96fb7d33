"""Small parts of the sidecar: leases, the order of arrival, remembered failures of loads, work until a stop."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from unittest.mock import AsyncMock, Mock

import pytest
from inprocess import settings_of

from sie_broker import BrokerUnavailable
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.topology import Lane
from sie_runtime.process import Stop, cancel_all
from sie_sidecar.health import WorkerHealth
from sie_sidecar.link import AdapterLinks
from sie_sidecar.models import Hosting
from sie_sidecar.process import _unless_stopped
from sie_sidecar.settle import Leases


@dataclass
class Delivered:
    sequence: int
    data: bytes
    delivered: int = 1
    subject: str = "sie.work._default.l4.default.interactive.m"

    async def in_progress(self) -> None:
        pass


def test_work_of_a_new_stream_is_never_taken_for_work_in_hand() -> None:
    """After a stream is lost its sequences start again. The same number with other data is other work."""
    leases = Leases(10.0, lambda: True, lambda: 0.0)
    lease = leases.hold(Delivered(5, b"old"))  # type: ignore[arg-type]
    assert lease is not None
    assert leases.hold(Delivered(5, b"old", 2)) is None  # type: ignore[arg-type]
    assert lease.delivery.delivered == 2
    newer = leases.hold(Delivered(5, b"new"))  # type: ignore[arg-type]
    leases.drop(lease)
    assert leases.all() == [newer]


async def test_a_renewal_that_the_broker_did_not_hear_renews_nothing() -> None:
    """A dead connection accepts writes until it is noticed. A renewal counts once the broker has echoed."""
    now_s, hears = 0.0, True

    async def heard(timeout_s: float) -> None:
        if not hears:
            raise BrokerUnavailable("no echo")

    leases = Leases(10.0, lambda: True, lambda: now_s, flushed=heard)
    lease = leases.hold(Delivered(5, b"work"))  # type: ignore[arg-type]
    now_s = 7.0
    await leases.renew_all()
    now_s = 14.0
    assert leases.is_mine(lease)
    hears = False
    await leases.renew_all()
    now_s = 15.5
    assert not leases.is_mine(lease)
    hears = True
    await leases.renew_all()
    assert not leases.is_mine(lease), "another worker may have the message"


class _Refusing:
    """A link whose adapter refuses every load."""

    def __init__(self) -> None:
        self.listeners: list[object] = []
        self.description: ipc.Description | None = None
        self.loads = 0

    def attach(self, may_drop: object, dropped: object) -> None:
        """Do nothing: no model is dropped."""

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        self.loads += 1
        raise ModelLoadFailed("no such weights", extras={"error_class": "NOT_FOUND", "permanent": True})


async def test_a_remembered_failure_is_told_anew_each_time() -> None:
    """There is one load. The traceback of the exception does not grow with each caller."""
    link = _Refusing()
    hosting = Hosting(link, lambda: 0.0, lambda: None)  # type: ignore[arg-type]
    entry = ModelEntry(
        id="m", weights=Weights(path="/nowhere"), family="text-encoder", outputs={"dense": 2}, max_tokens=8
    )
    hosted = hosting.obtain(Catalogue.resolve_profile(entry, "default", "m"))
    depths = []
    for _ in range(5):
        with pytest.raises(ModelLoadFailed, match="no such weights") as caught:
            await hosting.ensure(hosted)
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert link.loads == 1
    assert depths[1:] == [depths[1]] * 4


@pytest.mark.parametrize("end", ["cancelled", "stopped", "done", "failed"])
async def test_work_until_a_stop_leaves_no_task(end: str) -> None:
    stop, begun, go_on = Stop(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go_on.wait()
        if end == "failed":
            raise ValueError

    waiting = asyncio.create_task(_unless_stopped(stop, work()))
    await begun.wait()
    if end == "cancelled":
        waiting.cancel()
    elif end == "stopped":
        stop.request()
    else:
        go_on.set()
    (result,) = await asyncio.gather(waiting, return_exceptions=True)
    assert type(result) is {"cancelled": asyncio.CancelledError, "failed": ValueError}.get(end, type(None))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_adapter_that_does_not_reply_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: asyncio.Queue[bytes] = asyncio.Queue()
    reads = asyncio.Event()
    bus = Mock(send=AsyncMock(side_effect=lambda _, data: sent.put_nowait(data)))
    health = _health(bus, monkeypatch)

    async def hang() -> None:
        reads.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(health, "refresh", hang)
    tasks = [asyncio.create_task(work) for work in (health.run(), health.observe())]
    async with asyncio.timeout(20):
        await sent.get()
        await reads.wait()
        health.changed()
        await sent.get()
    await cancel_all(tasks)


def _health(bus: Mock, monkeypatch: pytest.MonkeyPatch) -> WorkerHealth:
    """Return the health of a worker whose heartbeats are always the same. The interval of heartbeats is an hour."""
    links = AdapterLinks("socket", size=1, ping_s=1.0, stale_s=1.0)
    settings = settings_of(SIE_HEALTH_PUBLISH_INTERVAL_MS="3600000", SIE_HEARTBEAT_TIMEOUT_MS="7200000")
    health = WorkerHealth(settings, bus, Lane("_default", "l4", "default"), "w", links, Mock())
    beat = Heartbeat("w", "_default", "l4", "default", True, "0.2.0")
    monkeypatch.setattr(health, "heartbeat", lambda: beat)
    return health
