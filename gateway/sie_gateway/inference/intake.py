"""Bodies of requests: how large one may be, and how much memory of this gateway all of them take at once.

Bytes count when they have arrived, not when they are announced, so announcing many costs a gateway nothing. Values
count before they are decoded. The first bytes of each body do not count: what is small is let in also while somebody's
large bodies take all the room. And what is small does not wait for them: while such requests are in progress, large
bodies are read at a pace that leaves the event loop to them.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from sie_contracts.body_values import VALUE_BYTES
from sie_contracts.errors import GatewayTimeout, PayloadTooLarge, QueueFull
from sie_contracts.settings import Settings
from sie_gateway.inference.reattach import ClientGone
from sie_runtime import control_group
from sie_runtime.http.server import Receive

MAX_HELD_BYTES = 1 << 30
COPIES = 3  # of a byte of a body while its request runs: as it came, decoded, and in a message of the queue
FREE_BYTES = COPIES * (256 << 10)  # of each body in memory; SIE_MAX_CONCURRENT_REQUESTS of them at most
PACE_BYTES_S = 128 << 20  # of large bodies in all while small ones are served: a third of what a core receives
PACE_STEP_S = 0.002  # that a body may be ahead of it
CONTROL_BYTES = 1 << 20  # of a body that is no inference
CONTROL_S = 30.0


def body_memory(settings: Settings) -> int:
    """SIE_BODY_MEMORY_BYTES. By default half of what the control group leaves this process, MAX_HELD_BYTES at most."""
    if settings.body_memory_bytes is not None:
        return settings.body_memory_bytes
    limit = control_group.memory_limit()
    return MAX_HELD_BYTES if limit is None else min(MAX_HELD_BYTES, limit // 2)


class Intake:
    """All bodies of a gateway, `max_bytes` of memory. One more always may be read if no other counts, so the budget is
    no limit on one body.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.held_bytes = 0
        self.max_bytes = max_bytes
        self.small = 0  # requests in progress whose bodies do not count
        self._paced_until_s = 0.0

    def count_small(self, more: int) -> None:
        """Count so many more requests whose bodies do not count, or fewer."""
        self.small += more

    def hold(self, more_bytes: int) -> None:
        """Count so many more, or fewer."""
        self.held_bytes += more_bytes

    def reader(self, headers: Mapping[str, str], receive: Receive, limit: int) -> Reader:
        """Reads one body of at most `limit` bytes. What it holds counts until `close`. PayloadTooLarge if it is
        announced as larger.
        """
        check_length(headers, limit)
        return Reader(self, receive, limit)

    def paced(self, receive: Receive) -> Receive:
        """`receive` of a body that has no reader, at the pace of all of them once it is large."""
        size = 0

        async def receive_paced() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            more = len(message.get("body", b""))
            size += more
            if COPIES * size > FREE_BYTES:
                await self.turn(more)
            return message

        return receive_paced

    async def turn(self, size: int) -> None:
        """So many bytes of a large body have come: wait until more may."""
        if not self.small:
            return
        now_s = self._clock()
        self._paced_until_s = max(self._paced_until_s, now_s) + size / PACE_BYTES_S
        if (ahead_s := self._paced_until_s - now_s) > PACE_STEP_S:
            await asyncio.sleep(ahead_s)


class Reader:
    """One body."""

    def __init__(self, intake: Intake, receive: Receive, limit: int) -> None:
        self._intake = intake
        self._receive = receive
        self._limit = limit
        self._size = self._values = 0
        self._counted = 0
        self._is_small = True
        intake.count_small(1)

    async def read(self) -> bytes:
        """The whole body. Raises PayloadTooLarge, QueueFull, ClientGone."""
        body = io.BytesIO()  # gives its own memory away in the end, where pieces that are joined exist twice
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self._limit:
                raise _too_large(f"more than {self._limit} bytes", self._limit)
            self._size = size
            self._count()
            if not (size > len(piece) or message.get("more_body")):
                return piece
            body.write(piece)
            if not message.get("more_body"):
                return body.getvalue()
            if self._counted:
                await self._intake.turn(len(piece))

    def count_values(self, values: int) -> None:
        """It is about to be decoded to so many. Raises QueueFull."""
        self._values = values
        self._count()

    def _count(self) -> None:
        more = max(0, COPIES * self._size + VALUE_BYTES * self._values - FREE_BYTES) - self._counted
        if more <= 0:
            return
        intake = self._intake
        held_elsewhere = intake.held_bytes - self._counted
        if held_elsewhere and intake.held_bytes + more > intake.max_bytes:
            held, most = intake.held_bytes >> 20, intake.max_bytes >> 20
            raise QueueFull(
                f"body: the bodies in this gateway take {held} MiB of memory, {most} are allowed "
                "(SIE_BODY_MEMORY_BYTES)",
                param="body",
                retry_after_s=2,
            )
        self._leave_small()
        intake.hold(more)
        self._counted += more

    def _leave_small(self) -> None:
        self._intake.count_small(-self._is_small)
        self._is_small = False

    def close(self) -> None:
        """The body is not held any more."""
        self._leave_small()
        self._intake.hold(-self._counted)
        self._counted = 0


def check_length(headers: Mapping[str, str], limit: int) -> None:
    """Raise PayloadTooLarge for a body that is announced as larger than `limit` bytes."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(f"{declared[:18]} bytes, at most {limit}", limit)


def bounded(receive: Receive, *, limit: int = CONTROL_BYTES, within_s: float = CONTROL_S) -> Receive:
    """`receive` for routes that read bodies themselves: PayloadTooLarge past `limit` bytes, GatewayTimeout for one that
    is not complete in `within_s` from its first look on.
    """
    size = 0
    until_s: float | None = None
    complete = False

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal size, until_s, complete
        if complete:
            return await receive()
        until_s = asyncio.get_running_loop().time() + within_s if until_s is None else until_s
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError as error:
            raise GatewayTimeout(f"the body was not complete within {within_s:g} s", param="body") from error
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        complete = not message.get("more_body", False)
        return message

    return receive_bounded


def _too_large(size: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"body: {size}", param="body", extras={"limit": limit})
