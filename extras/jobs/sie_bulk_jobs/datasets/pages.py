"""Limit the memory that the footer and the pages of a Parquet file need. A page of a few kilobytes may become gigabytes
when it is decompressed. Before the decompression, only the header of the page shows the decoded size.

    bytes that pyarrow reads ──► header of each page: its decoded and compressed bytes ──► sum for the pages of a batch

Large pages of images or of common texts are allowed, because only decoded bytes beyond the usual ratio count. The
footer has limits too: a column needs only three bytes in a footer, but more than a kilobyte when it is parsed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sie_bulk_jobs.datasets.sizes import MAX_DECODED_BYTES

RATIO = 8  # usual number of decoded bytes for each compressed byte; only decoded bytes above this ratio are limited
# largest number of decoded bytes, above RATIO times the compressed bytes, in the pages of one batch of rows
MAX_BATCH_BYTES = 2 * MAX_DECODED_BYTES
MAX_HEADER_BYTES = 1 << 20  # largest number of bytes of a page's header, which may contain statistics
MAX_EMPTY_PAGES = 1000  # largest number of pages without values in a column of a row group; more are a PageFault
MAX_DEPTH = 8  # largest depth of nested structs and lists in a header or a footer
MAX_FIELDS = 100  # largest number of fields in a struct; the largest struct of Parquet has about 20 fields
FIELDS_DEPTH = 2  # depth from which the fields of structs are skipped; a header and its structs have the depths 0 and 1
# Largest number of values in a footer. Each value in a list counts as one. A struct at a depth of at most LARGE_DEPTH,
# such as a row group, counts as LARGE further values, because it takes more memory.
MAX_FOOTER_VALUES, LARGE = 4_000_000, 20
LARGE_DEPTH = 4  # depth of the columns of a row group
_NUMBER, _STRUCT = 5, 12  # kinds of values in Thrift: a 32-bit number, a struct
# fields of a page header: (number of the field, kind of its value)
_TYPE, _DECODED, _COMPRESSED, _VALUES = (1, _NUMBER), (2, _NUMBER), (3, _NUMBER), (1, _NUMBER)
_DATA_PAGE, _DATA_PAGE_V2 = (5, _STRUCT), (8, _STRUCT)
_DICTIONARY = 2  # value of the field _TYPE in the header of a dictionary page
Fields = dict[tuple[int, int], Any]


class PageFault(ValueError):
    """Error for a malformed footer, or for the malformed header of a page."""


class FooterTooLarge(PageFault):
    """Error for a footer, or the header of a page, that has more than MAX_FOOTER_VALUES values."""


class ChunkPages:
    """Pages of one column in one row group. The pages are the bytes of a file from `start` to before `end`, and have
    `values` values. `window`: mean number of values of the column in a batch of rows. `bytes`: excess bytes of the
    latest pages that together have at least `window` values. The excess of a page is its decoded size minus RATIO times
    its compressed size, but at least 0.
    """

    def __init__(self, start: int, end: int, values: int, window: int) -> None:
        self._start, self._end, self._left, self._window = start, end, values, window
        self._next = start  # position of the next header
        # for each page in the sum `bytes`: (values, excess bytes)
        self._pages = deque[tuple[int, int]]()
        self._values = self._empty = self.bytes = 0

    def note(self, at: int, data: bytes, fetch: Callable[[int, int], bytes]) -> None:
        """Count the pages whose headers begin before the end of `data`, which was read at position `at`. `fetch`:
        function that returns the bytes between two positions, for a header that continues after `data`. Raises
        PageFault.
        """
        if not self._start <= at < self._end:
            return
        while self._left > 0 and self._next < min(at + len(data), self._end):
            try:
                header, size = _header(memoryview(data)[self._next - at :] if self._next >= at else b"")
            except IndexError:
                header, size = self._fetched(fetch)
            decoded, compressed = header.get(_DECODED, 0), header.get(_COMPRESSED, 0)
            values = (header.get(_DATA_PAGE) or header.get(_DATA_PAGE_V2) or {}).get(_VALUES, 0)
            if min(decoded, compressed, values) < 0:
                raise PageFault("the header of a page has a negative number")
            if header.get(_TYPE) == _DICTIONARY and self._next > self._start:
                raise PageFault("a dictionary is not the first page of its column")
            self._empty += not values
            if self._empty > MAX_EMPTY_PAGES:
                raise PageFault("a column has too many pages without values")
            self._next, self._left = self._next + size + compressed, self._left - values
            self._add(values, max(0, decoded - RATIO * compressed))

    def _fetched(self, fetch: Callable[[int, int], bytes]) -> tuple[Fields, int]:
        try:
            return _header(fetch(self._next, self._next + MAX_HEADER_BYTES))
        except IndexError:
            raise PageFault("the header of a page is not complete") from None

    def _add(self, values: int, size: int) -> None:
        self._pages.append((values, size))
        self._values, self.bytes = self._values + values, self.bytes + size
        while len(self._pages) > 1 and self._values - self._pages[0][0] >= self._window:
            values, size = self._pages.popleft()
            self._values, self.bytes = self._values - values, self.bytes - size


def dictionary_bytes(chunk: bytes) -> int:
    """Return the number of decoded bytes of the dictionary, which is the first page of a column; 0 if the column has no
    dictionary. `chunk`: first bytes of the column, at most MAX_HEADER_BYTES. Raises PageFault.
    """
    try:
        header, _ = _header(chunk)
    except IndexError:
        raise PageFault("the header of a page is not complete") from None
    return int(header.get(_DECODED, 0)) if header.get(_TYPE) == _DICTIONARY else 0


def check_footer(footer: bytes) -> None:
    """Raise FooterTooLarge for a footer that needs too much memory, and PageFault for a malformed footer."""
    try:
        _ThriftReader(footer).struct(0)
    except IndexError:
        raise PageFault("the footer is not complete") from None


def _header(data: bytes | memoryview) -> tuple[Fields, int]:
    """Return the fields of a header and its length. Raises PageFault, and IndexError if `data` ends too early."""
    reader = _ThriftReader(data)
    return reader.struct(0), reader.at


class _ThriftReader:
    """Reader of the compact protocol of Thrift."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._count = 0
        self.at = 0

    def struct(self, depth: int) -> Fields:
        """Return the 32-bit numbers and the structs in a struct, by (number of the field, kind of the value). Skip
        other values, and the fields of structs at FIELDS_DEPTH or deeper. The kind is a part of the key, because
        Parquet's readers ignore a field with a value of another kind.
        """
        if depth <= LARGE_DEPTH:
            self._counted(LARGE)
        fields: Fields = {}
        number = 0
        for _ in range(MAX_FIELDS + 1):
            if not (head := self._byte()):
                return fields
            kind = head & 15
            number = number + (head >> 4) if head >> 4 else self._number()
            value = None if kind in (1, 2) else self._value(kind, depth)
            if kind in (_NUMBER, _STRUCT) and depth < FIELDS_DEPTH:
                fields[number, kind] = value
        raise PageFault("a struct of a header or footer has too many fields")

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise PageFault("a header or footer is nested too deeply")
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (4, _NUMBER, 6):
            return self._number()
        if kind in (9, 10):
            head = self._byte()
            size = self._varint() if head >> 4 == 15 else head >> 4
            self._counted(size)
            for _ in range(size):
                self._value(head & 15, depth + 1)
        elif kind in (1, 2, 3, 7, 8):
            size = self._varint() if kind == 8 else 8 if kind == 7 else 1
            self.at += size
            if self.at > len(self._data):
                raise IndexError
        else:
            raise PageFault("a header or footer has a value of an unknown kind")
        return None

    def _counted(self, values: int) -> None:
        self._count += values
        if self._count > MAX_FOOTER_VALUES:
            raise FooterTooLarge

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128 and shift < 63:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        """Read a number, and return its low 32 bits, as Parquet's own reader does."""
        value = self._varint() & 0xFFFFFFFF
        return (value >> 1) ^ -(value & 1)
