"""Read objects of a store. A read returns bytes of one version of an object, and fails if the object is replaced during
the read. `pieces` streams bytes, and requests missing bytes again after a failure. RangeFile reads at any position, for
libraries that need a file.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sie_bulk_jobs.datasets.places import Place
from sie_contracts.errors import InvalidInput
from sie_store.object_stores import ObjectMissing, StoreError, failure, within

if TYPE_CHECKING:
    from obstore import ObjectMeta

PIECE_BYTES = 4 << 20
READ_AHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class ObjectEntry:
    """An object in a store. `source`: its name in the Place (folder or object of a job), as in `RowSpan.source`.
    `size`: in bytes. `tag`: a text that differs for each version of the object.
    """

    source: str
    size: int
    tag: str


def tag_of(place: Place, meta: ObjectMeta) -> str:
    """Return a tag that only this version of the object has: `place.digest` if it is set, else the store's ETag, else
    size and time of the last change. The ETag of a file on a disk is not used, because obstore computes it from the
    inode, which changes if the folder is copied.
    """
    own = None if place.root is not None else meta.get("e_tag")
    return place.digest or own or f"{meta['size']}-{meta['last_modified'].timestamp():.6f}"


def missing(source: str) -> InvalidInput:
    return InvalidInput(f"{source}: there is no such object", reason="input_missing", param="input.url")


def changed(source: str) -> InvalidInput:
    return InvalidInput(
        f"{source}: the object has changed since the job was planned", reason="input_changed", param="input.url"
    )


async def find(place: Place, source: str) -> ObjectEntry:
    """Return the present size and tag of an object. Raises InvalidInput (reasons input_missing, not_allowed),
    StoreError.
    """
    import obstore

    key = place.key(source)
    await place.check(key)
    try:
        meta = await place.patience.call(lambda: obstore.head_async(place.store, key))
    except ObjectMissing as error:
        raise missing(source) from error
    return ObjectEntry(source, meta["size"], tag_of(place, meta))


async def pieces(place: Place, entry: ObjectEntry, start: int, end: int) -> AsyncIterator[bytes]:
    """Yield the bytes from `start` to before `end` of the version with the tag of `entry`. If `entry` has no tag, all
    bytes are of the version that the first response returns. After a failure, the missing bytes are requested again.
    Raises InvalidInput (reasons input_missing, input_changed, not_allowed), StoreError.
    """
    import obstore

    key, tag, tries = place.key(entry.source), entry.tag, 0
    await place.check(key)
    while start < end:
        try:
            answer = await within(
                place.patience.stall_s, obstore.get_async(place.store, key, options={"range": (start, end)})
            )
            tag = tag or tag_of(place, answer.meta)
            if (tag_of(place, answer.meta), answer.meta["size"]) != (tag, entry.size):
                raise changed(entry.source)
            stream = aiter(answer.stream(min_chunk_size=PIECE_BYTES))
            while (piece := await within(place.patience.stall_s, anext(stream, None))) is not None:
                start += len(piece)
                tries = 0
                yield bytes(piece)
            if start < end:
                raise StoreError("the store's response ended too early")
        except ObjectMissing as error:
            raise missing(entry.source) from error
        except StoreError as error:
            # Stores report different errors if the object has become shorter than the range, so only
            # the tags show that the object has changed.
            if (now := await find(place, entry.source)).tag != (tag or now.tag):
                raise changed(entry.source) from error
            tries += 1
            await place.patience.pause(error, tries, "an input", start)
    # A program can overwrite a file on a disk during the read, so the tags are compared again after the read.
    if place.root is not None and tag and (await find(place, entry.source)).tag != tag:
        raise changed(entry.source)


async def whole(place: Place, entry: ObjectEntry, start: int = 0, end: int | None = None) -> bytes:
    """Return the bytes from `start` to before `end` (by default all). Raises the errors that `pieces` raises."""
    return b"".join([piece async for piece in pieces(place, entry, start, entry.size if end is None else end)])


class RangeFile(io.RawIOBase):
    """File object for an object in a store. Its methods block. A request to the store reads at least READ_AHEAD_BYTES,
    so that later small reads need no request. Raises StoreError and InvalidInput (reason `input_changed`).
    """

    def __init__(self, place: Place, entry: ObjectEntry) -> None:
        super().__init__()
        self._place, self._entry = place, entry
        self._at = self._ahead_at = 0
        self._ahead = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._entry.size if size is None or size < 0 else min(self._entry.size, self._at + size)
        start, self._at = self._at, max(self._at, end)
        if start >= end:
            return b""
        if not self._ahead_at <= start <= end <= self._ahead_at + len(self._ahead):
            until = min(self._entry.size, max(end, start + READ_AHEAD_BYTES))
            self._ahead, self._ahead_at = self._fetched(start, until), start
        return self._ahead[start - self._ahead_at : end - self._ahead_at]

    def _fetched(self, start: int, end: int) -> bytes:
        import obstore
        from obstore.exceptions import BaseError

        try:
            answer = obstore.get(
                self._place.store, self._place.key(self._entry.source), options={"range": (start, end)}
            )
            if tag_of(self._place, answer.meta) != self._entry.tag:
                raise changed(self._entry.source)
            data = bytes(answer.bytes())
        except (BaseError, OSError) as error:
            raise failure(error) from error
        if len(data) != end - start:
            raise StoreError("the store's response ended too early")
        return data
