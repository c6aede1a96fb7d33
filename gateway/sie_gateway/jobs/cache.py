"""Answers of earlier jobs, in the payload store: a second run over a corpus computes only what changed.

    cache/{space}/{segment}    one object for each shard that computed something
    space: a digest of the model's fingerprint, the operation and the parameters

A segment is only ever created whole:

    number of values (8 bytes) | digests of inputs, sorted (16 each) | offsets of values (8 each, one more) | values

Numbers are little-endian. A job reads the digests of all segments of its space when it begins, the newest first, at
most MAX_ITEMS; values are read by whole segments, of which the last few stay in memory: rows of a corpus that changed
little come in the order in which they were kept.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_gateway.jobs.values import pack, unpack
from sie_store.datasets.answers import Answer
from sie_store.object_stores import ObjectMissing, WrittenMeanwhile, within

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

MAX_ITEMS = 4_000_000  # whose digests a job keeps in memory, 24 bytes each
SEGMENTS_KEPT = 4
SHORT_S, LONG_S = 10.0, 120.0
DIGEST_BYTES, COUNT_BYTES = 16, 8
PREFIX = "cache/"
_DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])  # as bytes compare
_logger = logging.getLogger("sie.gateway.jobs")


def space_of(fingerprint: str, operation: str, params: Mapping[str, Any]) -> str:
    """What must be equal for an answer to be that of another job."""
    asked = msgspec.json.encode([fingerprint, operation, params], order="sorted")
    return hashlib.sha256(asked).hexdigest()[:32]


class Segment:
    """The values of one object."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        count = int.from_bytes(data[:COUNT_BYTES], "little")
        self._values_at = COUNT_BYTES + DIGEST_BYTES * count + 8 * (count + 1)
        self._offsets = np.frombuffer(data, "<u8", count + 1, COUNT_BYTES + DIGEST_BYTES * count)

    def value(self, row: int) -> Answer:
        """Raises ValueError."""
        start, end = (self._values_at + int(offset) for offset in self._offsets[row : row + 2])
        return unpack(bytes(self._data[start:end]))


def segment(values: Mapping[bytes, Answer]) -> bytes:
    """The bytes of a segment."""
    digests = sorted(values)
    packed = [pack(values[digest]) for digest in digests]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in packed])]).astype("<u8")
    return b"".join([len(digests).to_bytes(COUNT_BYTES, "little"), *digests, offsets.tobytes(), *packed])


class Cache:
    """Of one job. `open` reads what there is."""

    def __init__(self, store: ObjectStore, space: str) -> None:
        self._store = store
        self._folder = f"{PREFIX}{space}/"
        self._names: list[str] = []
        self._digests = np.empty(0, _DIGEST)  # sorted
        self._places = np.empty((0, 2), np.uint32)  # segment and row of each
        self._read: OrderedDict[int, Segment] = OrderedDict()

    async def open(self) -> None:
        """Read the digests of all segments. Raises StoreError."""
        import obstore

        found: list[ObjectMeta] = []

        async def listed() -> None:
            async for page in obstore.list(self._store, prefix=self._folder):
                found.extend(page)

        await within(LONG_S, listed())
        digests: list[NDArray[Any]] = []
        places: list[NDArray[np.uint32]] = []
        total = 0
        for entry in sorted(found, key=lambda entry: entry["last_modified"], reverse=True):
            rows = await self._rows(entry["path"])
            if total + len(rows) > MAX_ITEMS:
                break
            total += len(rows)
            place = np.empty((len(rows), 2), np.uint32)
            place[:, 0], place[:, 1] = len(self._names), np.arange(len(rows))
            self._names.append(entry["path"])
            digests.append(rows)
            places.append(place)
        if digests:
            joined = np.concatenate(digests)
            order = np.argsort(joined, order=("high", "low"), kind="stable")
            self._digests, self._places = joined[order], np.concatenate(places)[order]

    async def _rows(self, name: str) -> NDArray[Any]:
        """The digests of a segment; none of one that was removed meanwhile."""
        import obstore

        try:
            head = await within(SHORT_S, obstore.get_range_async(self._store, name, start=0, length=COUNT_BYTES))
            count = int.from_bytes(bytes(head), "little")
            asked = obstore.get_range_async(self._store, name, start=COUNT_BYTES, length=DIGEST_BYTES * count)
            return np.frombuffer(bytes(await within(LONG_S, asked)), _DIGEST)
        except ObjectMissing:
            return np.empty(0, _DIGEST)

    def __len__(self) -> int:
        return len(self._digests)

    async def find(self, digests: Sequence[bytes]) -> dict[int, Answer]:
        """Values by the place of their digest. What cannot be read is missing. Raises StoreError."""
        if not len(self._digests) or not digests:
            return {}
        asked = np.frombuffer(b"".join(digests), _DIGEST)
        at = np.searchsorted(self._digests["high"], asked["high"])
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, (start, digest) in enumerate(zip(at.tolist(), asked, strict=True)):
            spot = start
            while spot < len(self._digests) and self._digests[spot]["high"] == digest["high"]:
                if self._digests[spot]["low"] == digest["low"]:
                    number, row = self._places[spot].tolist()
                    wanted.setdefault(number, []).append((place, row))
                    break
                spot += 1
        found: dict[int, Answer] = {}
        for number, rows in wanted.items():
            kept = await self._segment(number)
            for place, row in rows if kept is not None else ():
                try:
                    found[place] = kept.value(row)  # type: ignore[union-attr]  # mypy sees no link to the loop's condition
                except ValueError as error:
                    _logger.warning("a value of %s cannot be read, so it is computed: %s", self._names[number], error)
        return found

    async def _segment(self, number: int) -> Segment | None:
        import obstore

        if number not in self._read:
            try:
                asked = await within(LONG_S, obstore.get_async(self._store, self._names[number]))
                self._read[number] = Segment(bytes(await within(LONG_S, asked.bytes_async())))
            except ObjectMissing:  # removed to make room
                return None
            if len(self._read) > SEGMENTS_KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(number)
        return self._read[number]

    async def keep(self, name: str, values: Mapping[bytes, Answer]) -> int:
        """Keep values under a name that no other shard has. Returns how many bytes they take. Raises StoreError."""
        import obstore

        if not values:
            return 0
        data = segment(values)
        try:
            await within(LONG_S, obstore.put_async(self._store, self._folder + name, data, mode="create"))
        except WrittenMeanwhile:
            return 0  # by a leader before this one, of the same shard
        return len(data)


async def trim(store: ObjectStore, max_bytes: int) -> int:
    """Remove the oldest segments of all spaces until they have `max_bytes`. Returns how many. Raises StoreError."""
    import obstore

    found: list[ObjectMeta] = []

    async def listed() -> None:
        async for page in obstore.list(store, prefix=PREFIX):
            found.extend(page)

    await within(LONG_S, listed())
    total, removed = sum(entry["size"] for entry in found), 0
    for entry in sorted(found, key=lambda entry: entry["last_modified"]):
        if total <= max_bytes:
            break
        try:
            await within(SHORT_S, obstore.delete_async(store, entry["path"]))
        except ObjectMissing:
            continue
        total -= entry["size"]
        removed += 1
    return removed
