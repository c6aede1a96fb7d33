"""Request bodies: their size, the memory that a gateway holds for them, and routes that read bodies themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from inprocess import settings_of, until

from sie_contracts.body_values import VALUE_BYTES
from sie_contracts.errors import GatewayTimeout, PayloadTooLarge, QueueFull
from sie_gateway.inference import call as bodies_in_memory
from sie_gateway.inference.call import (
    COPIES,
    FREE_BYTES,
    MAX_HELD_BYTES,
    PACE_BYTES_S,
    BodyIntake,
    BodyReader,
    body_memory,
    bounded,
    check_length,
)
from sie_gateway.inference.reattach import ClientGone
from sie_runtime.http.asgi import Receive

MIB = 1 << 20


def sending(*pieces: bytes, then: Callable[[], Any] | None = None) -> Receive:
    """Return the pieces of a client; after the last piece `then` is awaited, or the body ends."""
    left = list(pieces)

    async def receive() -> MutableMapping[str, Any]:
        if left:
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left) or then is not None}
        assert then is not None
        await then()
        return {"type": "http.disconnect"}

    return receive


async def test_a_body_arrives_whole_and_is_held_until_it_is_closed() -> None:
    intake = BodyIntake(10 * MIB)
    reader = BodyReader(intake, "", sending(b"a" * MIB, b"b" * MIB), 5 * MIB)
    assert await reader.read() == b"a" * MIB + b"b" * MIB
    assert intake.memory.used == COPIES * 2 * MIB - FREE_BYTES
    reader.close()
    reader.close()
    assert intake.memory.used == 0


@pytest.mark.parametrize("declared", ["11", "9" * 18, "9" * 400])
async def test_what_is_announced_as_too_large_is_refused_before_it_is_read(declared: str) -> None:
    async def never() -> MutableMapping[str, Any]:
        raise AssertionError("read")

    with pytest.raises(PayloadTooLarge) as caught:
        await BodyReader(BodyIntake(), "", never, 10, announced=declared).read()
    assert caught.value.extras == {"limit": 10}


@pytest.mark.parametrize("declared", ["", "3", "-1", "³"])
async def test_what_turns_out_too_large_is_refused_as_soon_as_it_does(declared: str) -> None:
    with pytest.raises(PayloadTooLarge):
        await BodyReader(BodyIntake(), "", sending(b"x" * 10, b"x", b"never read"), 10, announced=declared).read()
    assert await BodyReader(BodyIntake(), "", sending(b"x" * 10), 10, announced=declared).read() == b"x" * 10


async def test_large_bodies_share_a_budget_and_small_ones_always_pass() -> None:
    """Three clients send 4 MiB and stop before the end of their bodies. The next large body gets a retryable refusal.
    Small bodies pass. When one of the three is closed, there is room again.
    """
    intake, ever = BodyIntake(COPIES * 12 * MIB), asyncio.Event()
    stuck = [
        BodyReader(intake, "", sending(b"x" * MIB, b"x" * MIB, b"x" * MIB, b"x" * MIB, then=ever.wait), 100 * MIB)
        for _ in range(3)
    ]
    reading = [asyncio.create_task(reader.read()) for reader in stuck]
    await until(lambda: intake.memory.used == 3 * (COPIES * 4 * MIB - FREE_BYTES), "three bodies in memory")
    late = BodyReader(intake, "", sending(b"x" * MIB, b"x" * MIB), 100 * MIB)
    with pytest.raises(QueueFull) as caught:
        await late.read()
    assert (caught.value.retryable, caught.value.param) == (True, "body")
    late.close()
    for _ in range(600):
        small = b"x" * (FREE_BYTES // COPIES)
        assert await BodyReader(intake, "", sending(small), MIB).read() == small
    stuck[0].close()
    again = BodyReader(intake, "", sending(b"x" * MIB, b"x" * MIB), 100 * MIB)
    assert len(await again.read()) == 2 * MIB
    ever.set()
    ended = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(error) for error in ended] == [ClientGone] * 3
    for reader in (*stuck, again):
        reader.close()
    assert intake.memory.used == 0


async def test_one_body_is_never_refused_for_the_room_it_takes_itself() -> None:
    assert (
        len(await BodyReader(BodyIntake(MIB), "", sending(b"x" * MIB, b"x" * MIB, b"x" * MIB), 10 * MIB).read())
        == 3 * MIB
    )


async def test_values_count_before_they_are_decoded() -> None:
    """A short body that becomes many objects takes the room of the objects, and a second such body is refused."""
    intake = BodyIntake(20 * MIB)
    body = b"[" * 1000
    first, second = (BodyReader(intake, "", sending(body), MIB) for _ in range(2))
    for reader in (first, second):
        assert await reader.read() == body
    assert intake.memory.used == 0
    values = 15 * MIB // VALUE_BYTES
    first.count_values(values)
    assert intake.memory.used == COPIES * len(body) + VALUE_BYTES * values - FREE_BYTES
    with pytest.raises(QueueFull, match="SIE_BODY_MEMORY_BYTES"):
        second.count_values(values)
    first.close()
    second.count_values(values)
    second.close()
    assert intake.memory.used == 0


@pytest.mark.parametrize(
    ("environ", "limit", "expected"),
    [
        ({}, None, MAX_HELD_BYTES),
        ({}, 2 << 30, 1 << 30),
        ({}, 512 * MIB, 256 * MIB),
        ({}, 64 << 30, MAX_HELD_BYTES),
        ({"SIE_BODY_MEMORY_BYTES": str(4 << 30)}, 512 * MIB, 4 << 30),
    ],
)
def test_the_memory_of_bodies_fits_that_of_the_container(
    environ: dict[str, str], limit: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_in_memory.control_group, "memory_limit", lambda: limit)
    assert body_memory(settings_of(**environ)) == expected


async def test_routes_that_read_bodies_themselves_have_bounds_too() -> None:
    receive = bounded(sending(b"x" * 5, b"x" * 5, b"x"), limit=10)
    assert [len((await receive())["body"]) for _ in range(2)] == [5, 5]
    with pytest.raises(PayloadTooLarge):
        await receive()
    with pytest.raises(PayloadTooLarge):
        check_length("11", 10)

    async def forever() -> None:
        await asyncio.Event().wait()

    slow = bounded(sending(b"x", then=forever), within_s=0.01)
    await slow()
    with pytest.raises(GatewayTimeout):
        await slow()


async def test_whoever_waits_for_the_client_to_leave_is_not_bounded() -> None:
    """The bound ends with the body. The next message is the disconnect, which may come at any time."""
    left = asyncio.Event()
    pieces = [{"type": "http.request", "body": b"x", "more_body": False}]

    async def whole_then_gone() -> MutableMapping[str, Any]:
        if pieces:
            return pieces.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    receive = bounded(whole_then_gone, within_s=0.01)
    await receive()
    waiting = asyncio.ensure_future(receive())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    left.set()
    assert (await waiting)["type"] == "http.disconnect"


async def test_large_bodies_keep_a_pace_while_small_requests_are_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two concurrent bodies share the pace, whatever their routes are. Without a small request no body waits."""
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    monkeypatch.setattr(bodies_in_memory.asyncio, "sleep", sleep)
    intake, pieces = BodyIntake(clock=lambda: 0.0), [b"x" * MIB] * 32

    async def read_two() -> None:
        inference, upload = BodyReader(intake, "", sending(*pieces), 64 * MIB), intake.paced(sending(*pieces))
        assert len(await inference.read()) == 32 * MIB
        while (await upload())["more_body"]:
            pass
        inference.close()

    await read_two()
    assert slept_s == []
    small = BodyReader(intake, "", sending(b"x"), MIB)
    assert await small.read() == b"x"
    await read_two()
    assert max(slept_s) == pytest.approx(
        63 * MIB / PACE_BYTES_S
    )  # the last piece of a body that is read whole does not wait
    slept_s.clear()
    small.close()
    small.close()
    assert not intake.small
    await read_two()
    assert slept_s == []


async def test_a_body_of_a_key_that_has_its_share_is_refused_beside_other_keys() -> None:
    intake, body = BodyIntake(COPIES * 8 * MIB), b"x" * (7 * MIB)
    first, late = (BodyReader(intake, key, sending(body), 10 * MIB) for key in ("a", "b"))
    await first.read()
    with pytest.raises(QueueFull):
        await late.read()
    first.close()
    late.close()
    await BodyReader(intake, "a", sending(b"x" * (5 * MIB)), 10 * MIB).read()
    more = [BodyReader(intake, key, sending(b"x" * (3 * MIB)), 10 * MIB) for key in ("a", "b")]
    with pytest.raises(QueueFull, match="14 of them of this client's key"):
        await more[0].read()
    assert len(await more[1].read()) == 3 * MIB
