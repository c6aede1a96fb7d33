"""Bodies become values, of large ones beside the event loop, and not before there is room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sie_contracts import plain
from sie_gateway.inference import body as bodies
from sie_gateway.inference.call import Call

T = TypeVar("T")
LARGE_BYTES = 256 << 10


async def beside(body: bytes, work: Callable[[], T]) -> T:
    """Run `work` on a body, in a thread if it is large."""
    return work() if len(body) <= LARGE_BYTES else await asyncio.to_thread(work)


async def decode(call: Call, body: bytes, *, msgpack: bool = False) -> Mapping[str, Any]:
    """The top-level map of a request body. Raises InvalidInput with reason malformed, too_many_values or schema, and
    QueueFull.
    """
    if len(body) <= plain.SMALL_BYTES:
        return bodies.decode(body, msgpack=msgpack)
    values = await beside(body, lambda: bodies.count(body, msgpack=msgpack))
    if call.reader is not None:
        call.reader.count_values(values)
    return await beside(body, lambda: bodies.decode(body, msgpack=msgpack))
