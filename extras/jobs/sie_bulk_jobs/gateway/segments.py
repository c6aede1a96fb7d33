"""Cached answers of earlier jobs, in the payload store. A second run over a corpus computes only changed rows.

    cache/{space}/{segment}    one object for each shard (part of a job) that computed answers

A segment is written in one step and never changed. Its bytes:

    number of values (8 bytes) | digests of inputs, sorted (16 each) | offsets of values, and the end (8 each) | values

Numbers are little-endian. A CRC-32 (4 bytes) follows each value, because a file may have its full length but zeros as
content after a power failure, and a vector of zeros is a valid value. When a job begins, it reads the digests of all
segments of its space, the newest segment first, at most MAX_ITEMS digests. To read a value, it reads the whole segment.
The SEGMENTS_KEPT segments that were used last stay in memory: consecutive rows of a corpus are mostly in one segment,
because they were in one shard of the earlier job. Long computations run in a thread, so that the event loop can renew
the leases of jobs.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_bulk_jobs.datasets.answers import RowAnswer
from sie_contracts.errors import UNDECODABLE
from sie_gateway.inference.answers import DIGEST_BYTES
from sie_store.object_stores import FILES, ObjectMissing, WrittenMeanwhile, objects_below, room, whole_object, within

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Largest number of digests of cached answers that a job has in memory, 24 bytes each. The job reads the newest segments
# (objects with answers) first, and ignores older segments after this number of digests.
MAX_ITEMS = 4_000_000
SEGMENTS_KEPT = 4  # largest number of segments (objects with answers) that a job has in memory
SHORT_S, LONG_S = 10.0, 120.0  # time limits in seconds of small and of large requests to the store
COUNT_BYTES = 8
CHECK_BYTES = 4
PREFIX = "cache/"
_logger = logging.getLogger("sie.gateway.jobs")


class PackedRow(msgspec.Struct, frozen=True, array_like=True):
    """Value of a segment, in msgpack: a RowAnswer without an error. `arrays`: dtype, shape and bytes by name of the
    output.
    """

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    score: float | None
    data: dict[str, Any] | None
    tokens: int
    truncated: bool


_decode = msgspec.msgpack.Decoder(PackedRow).decode


def pack_row(answer: RowAnswer) -> bytes:
    arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in answer.arrays.items()}
    return msgspec.msgpack.encode(PackedRow(arrays, answer.score, answer.data, answer.tokens, answer.truncated))


def unpack_row(packed: bytes) -> RowAnswer:
    """Decode the result of `pack_row`. Raises ValueError."""
    row = _decode(packed)
    arrays = {
        name: np.frombuffer(data, dtype=dtype).reshape(shape) for name, (dtype, shape, data) in row.arrays.items()
    }
    return RowAnswer(None, row.tokens, row.truncated, arrays, row.score, row.data)


class CacheSegment:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        count = int.from_bytes(data[:COUNT_BYTES], "little")
        self._values_at = _values_at(count)
        self._offsets = np.frombuffer(data, "<u8", count + 1, COUNT_BYTES + DIGEST_BYTES * count)

    @property
    def digests(self) -> list[bytes]:
        """Return the digest of each value."""
        keys = bytes(self._data[COUNT_BYTES : COUNT_BYTES + DIGEST_BYTES * (len(self._offsets) - 1)])
        return [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]

    def value(self, row: int) -> RowAnswer:
        """Return value number `row` of the segment. Raises ValueError if the value is damaged."""
        start, end = (self._values_at + int(offset) for offset in self._offsets[row : row + 2])
        packed = bytes(self._data[start:end])
        if checked(packed[:-CHECK_BYTES]) != packed:
            raise ValueError("the checksum of a cached answer is wrong")
        return unpack_row(packed[:-CHECK_BYTES])


def checked(packed: bytes) -> bytes:
    """Return a value with its checksum."""
    return packed + zlib.crc32(packed).to_bytes(CHECK_BYTES, "little")


def _values_at(count: int) -> int:
    """Return the offset of the first value in a segment with `count` values."""
    return COUNT_BYTES + DIGEST_BYTES * count + 8 * (count + 1)


def segment(values: Mapping[bytes, RowAnswer]) -> bytes:
    digests = sorted(values)
    packed = [checked(pack_row(values[digest])) for digest in digests]
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in packed])]).astype("<u8")
    return b"".join([len(digests).to_bytes(COUNT_BYTES, "little"), *digests, offsets.tobytes(), *packed])


class _KnownDigests(NamedTuple):
    """Digests of all segments, sorted. `high` and `low`: halves of each digest, as numbers in the machine's byte order,
    because numpy sorts and searches numbers much faster than bytes. `segments`: number of the segment of each digest.
    `rows`: number of the digest's value in this segment.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    rows: NDArray[np.uint32]

    @classmethod
    def from_digests(cls, digests: Sequence[bytes]) -> _KnownDigests:
        """Sort the digests of all segments. `digests` has one item for each segment: its digests, concatenated."""
        counts = [len(digest) // DIGEST_BYTES for digest in digests]
        high, low = _halves(b"".join(digests))
        segments = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        rows = np.concatenate([np.empty(0, np.uint32), *(np.arange(count, dtype=np.uint32) for count in counts)])
        order = np.lexsort((low, high))  # among equal digests, the digest of the newest segment comes first
        return cls(high[order], low[order], segments[order], rows[order])

    def places(self, digests: Sequence[bytes]) -> dict[int, list[tuple[int, int]]]:
        """Find digests. Return a map from the number of a segment to pairs (index in `digests`, row of the value in the
        segment).
        """
        rows_by_segment: dict[int, list[tuple[int, int]]] = {}
        highs, lows = _halves(b"".join(digests))
        at = np.searchsorted(self.high, highs)
        for place, (spot, high, low) in enumerate(zip(at.tolist(), highs.tolist(), lows.tolist(), strict=True)):
            while spot < len(self.high) and self.high[spot] == high:
                if self.low[spot] == low:
                    rows_by_segment.setdefault(int(self.segments[spot]), []).append((place, int(self.rows[spot])))
                    break
                spot += 1
        return rows_by_segment


def _halves(digests: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    numbers = np.frombuffer(digests, ">u8").reshape(-1, 2)
    return numbers[:, 0].astype(np.uint64), numbers[:, 1].astype(np.uint64)


def values_in(segment: CacheSegment, rows: Sequence[tuple[int, int]], name: str) -> dict[int, RowAnswer]:
    """Return the readable values of a segment, by index. `rows`: pairs (index, row of the value in the segment)."""
    answers: dict[int, RowAnswer] = {}
    fault: Exception | None = None
    for place, row in rows:
        try:
            answers[place] = segment.value(row)
        except UNDECODABLE as error:
            fault = error
    if fault is not None:
        count = len(rows) - len(answers)
        _logger.warning("%d cached answers in %s cannot be read, so they are computed again: %s", count, name, fault)
    return answers


class StoredAnswers:
    """Reads the cached answers of one space (`answers.space_of`) for one job, and stores the job's new answers. Call
    `open` first.
    """

    def __init__(self, store: ObjectStore, space: str) -> None:
        self._store = store
        self._folder = f"{PREFIX}{space}/"
        self._names: list[str] = []
        self._known = _KnownDigests.from_digests([])
        self._read: OrderedDict[int, CacheSegment] = OrderedDict()

    async def open(self) -> None:
        """Read the digests of all segments. Raises StoreError."""
        metas = await within(LONG_S, objects_below(self._store, self._folder))
        digests: list[bytes] = []
        total = 0
        for entry in sorted(metas, key=lambda entry: entry["last_modified"], reverse=True):
            rows = await self._rows(entry["path"], entry["size"])
            if total + len(rows) // DIGEST_BYTES > MAX_ITEMS:
                break
            total += len(rows) // DIGEST_BYTES
            self._names.append(entry["path"])
            digests.append(rows)
        self._known = await asyncio.to_thread(_KnownDigests.from_digests, digests)

    async def _rows(self, name: str, size: int) -> bytes:
        """Return the digests of a segment of `size` bytes, concatenated. Empty if the segment was removed meanwhile, or
        if it is incomplete, for example after a power failure. Raises StoreError.
        """
        import obstore

        count = 0
        try:
            if size >= COUNT_BYTES:
                head = await within(SHORT_S, obstore.get_range_async(self._store, name, start=0, length=COUNT_BYTES))
                count = int.from_bytes(bytes(head), "little")
            if not count or _values_at(count) > size:
                _logger.warning("cached answers in %s cannot be read, so they are computed again", name)
                return b""
            request = obstore.get_range_async(self._store, name, start=COUNT_BYTES, length=DIGEST_BYTES * count)
            return bytes(await within(LONG_S, request))
        except ObjectMissing:
            return b""

    def __len__(self) -> int:
        return len(self._known.high)

    async def find(self, digests: Sequence[bytes]) -> dict[int, RowAnswer]:
        """Return the readable cached values, by the index of their digest in `digests`. Raises StoreError."""
        if not len(self) or not digests:
            return {}
        answers: dict[int, RowAnswer] = {}
        for number, rows in (await asyncio.to_thread(self._known.places, digests)).items():
            segment = await self._segment(number)
            if segment is not None:
                answers |= await asyncio.to_thread(values_in, segment, rows, self._names[number])
        return answers

    async def _segment(self, number: int) -> CacheSegment | None:
        if number not in self._read:
            try:
                data = await within(LONG_S, whole_object(self._store, self._names[number]))
                self._read[number] = CacheSegment(data)
            except ObjectMissing:  # the segment was removed to free space
                return None
            if len(self._read) > SEGMENTS_KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(number)
        return self._read[number]

    async def keep(self, name: str, values: Mapping[bytes, RowAnswer]) -> int:
        """Store values as a segment, whose `name` differs for each shard of a job. Return the number of stored bytes, 0
        if there are no values or the segment exists already. Raises StoreError.
        """
        import obstore

        if not values:
            return 0
        data = await asyncio.to_thread(segment, values)
        try:
            with room(self._store, reserves=FILES) as claim:
                claim(len(data))
                await within(LONG_S, obstore.put_async(self._store, self._folder + name, data, mode="create"))
        except WrittenMeanwhile:
            return 0  # an earlier gateway of this job has stored the values of this shard
        return len(data)


async def trim(store: ObjectStore, max_bytes: int) -> int:
    """Remove the oldest segments until at most `max_bytes` remain. Return how many were removed. Raises StoreError."""
    import obstore

    metas = await within(LONG_S, objects_below(store, PREFIX))
    total, removed = sum(entry["size"] for entry in metas), 0
    for entry in sorted(metas, key=lambda entry: entry["last_modified"]):
        if total <= max_bytes:
            break
        total -= entry["size"]
        try:
            await within(SHORT_S, obstore.delete_async(store, entry["path"]))
        except ObjectMissing:  # another process removed the segment after the list was read
            continue
        removed += 1
    return removed
