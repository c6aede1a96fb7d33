"""A bucket that a process cannot read is named, with the cause: by its readiness, by `sie doctor` and in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import until
from diagnosis import READ, TOKEN, Examined
from stack import Plan, Stack

from sie_broker import Write
from sie_broker.nats import connect
from sie_cli.serve.output import _matters
from sie_contracts.wire.topology import JOBS_BUCKET, KEYS_BUCKET

# less than one record needs, as 64 MiB are less than a bucket that is read without a bound
LIMITS = "max_payload: 1048576\nmax_pending: 1048576"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    plan = Plan(models=(), workers=(), environ={"SIE_AUTH_MODE": "token", "SIE_AUTH_TOKEN": TOKEN})
    with Stack(tmp_path / "stack", plan) as bucket_stack:
        yield bucket_stack


async def _write(url: str, bucket: str, value: bytes | None) -> None:
    broker = await connect(url, name="writer")
    try:
        await (await broker.key_value(bucket)).write([Write(f"large{number}", value) for number in range(3)])
    finally:
        await broker.close()


def test_the_bucket_that_cannot_be_read_is_named(stack: Stack, tmp_path: Path) -> None:
    gateway, broker = stack.gateways[0], stack.brokers[0]
    for bucket in (JOBS_BUCKET, KEYS_BUCKET):
        asyncio.run(_write(stack.broker_urls, bucket, bytes(2 << 20)))
    gateway.kill()
    broker.stop()
    file = Path(broker.argv[-1])
    file.write_text(file.read_text().replace("max_payload: 8388608", LIMITS))
    broker.start()
    broker.wait_ready()
    gateway.start()

    def reason() -> str:
        try:
            return httpx.get(f"{stack.urls[0]}/readyz", trust_env=False, timeout=60).text
        except httpx.TransportError:
            return ""

    for bucket in (JOBS_BUCKET, KEYS_BUCKET):
        until(lambda name=bucket: f"{name} cannot be used: " in reason(), 60.0, f"{bucket} in the readiness")  # type: ignore[misc]
    assert any(JOBS_BUCKET in line and "cannot be used" in line for line in gateway.log)
    assert any("the broker's log has the reason" in line for line in gateway.log)
    whys = [line for line in broker.log if "Slow Consumer" in line]
    assert whys
    assert all(map(_matters, whys)), "`sie serve` passes them on"
    environ = {"SIE_GATEWAY_URL": stack.urls[0], "SIE_NATS_URL": stack.broker_urls, "SIE_AUTH_TOKEN": TOKEN}
    examination = Examined(
        tmp_path, {**environ, "SIE_CONFIG_READ_TOKEN": READ, "SIE_CONFIG_SERVICE_URL": stack.config_url}
    )
    examination.named("gateway", f"{JOBS_BUCKET} cannot be used: ", "nats-server")

    for bucket in (JOBS_BUCKET, KEYS_BUCKET):
        asyncio.run(_write(stack.broker_urls, bucket, None))
    gateway.wait_ready()
