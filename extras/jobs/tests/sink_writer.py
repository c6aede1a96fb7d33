"""A process that writes rows into a sink, for tests that kill it:

    python extras/jobs/tests/sink_writer.py URL COLLECTION CALLS ROWS_OF_A_CALL

It prints `prepared`, and then the number of each answered call.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

from sie_bulk_jobs.sinks.opening import opened
from sie_bulk_jobs.sinks.sink import SinkRows

DIMS = 16


def row_id(number: int) -> str:
    return f"s3://bucket/части/{number} 'Ω' 🦀"


def payload(number: int) -> dict[str, Any]:
    return {"number": number, "text": f"\"quoted\" 'text' \\ {number} — {{}}; DROP TABLE vectors; 日本語"}


def rows(first: int, count: int) -> SinkRows:
    """Return rows that are the same for the same numbers."""
    numbers = range(first, first + count)
    vectors = [np.random.default_rng(number).standard_normal(DIMS, dtype=np.float32) for number in numbers]
    return SinkRows([*map(row_id, numbers)], np.array(vectors, np.float32), [*map(payload, numbers)])


async def main(url: str, collection: str, calls: int, count: int) -> None:
    sink = opened(url, "SINK")
    await sink.prepare(collection, {"dense": DIMS}, {"number": "integer"})
    print("prepared", flush=True)
    for call in range(calls):
        await sink.upsert(rows(call * count, count))
        print(call, flush=True)
    await sink.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
