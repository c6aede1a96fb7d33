"""The fixtures of the conformance suite of the broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from broker_harness import STREAM, Harness, MemoryHarness, NatsHarness
from nats_server import NatsServer

from sie_broker import Broker


@pytest.fixture(params=["memory", "nats"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    backend: Harness
    if request.param == "memory":
        backend = MemoryHarness()
    else:
        backend = NatsHarness(NatsServer(tmp_path / "nats"))
        await backend.restore()
    yield backend
    await backend.close()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[NatsHarness]]]:
    """Start nats-servers with options of the test."""
    started: list[NatsHarness] = []

    async def start(**options: Any) -> NatsHarness:
        started.append(NatsHarness(NatsServer(tmp_path / "nats", **options)))
        await started[-1].restore()
        return started[-1]

    yield start
    for instance in started:
        await instance.close()


@pytest.fixture
async def broker(harness: Harness) -> Broker:
    """A connection to a broker that has the work stream."""
    connection = await harness.connect()
    await connection.ensure_stream(STREAM)
    return connection
