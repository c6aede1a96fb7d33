"""Reader of forms with one file (multipart/form-data, RFC 7578).

pieces of a body ──► Form.file() ──► pieces of the file      fields ──► Form.fields, complete after the end of `file`
a body in memory ──► Form.whole() ──► the file
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sie_contracts.errors import InvalidInput

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_NAME_CHARS = 255
MAX_BOUNDARY_BYTES = 70  # limit of RFC 2046, section 5.1.1
# Number of bytes that are parsed before other tasks may run. The parser takes at most 0.2 us for one byte; the slowest
# bytes look like the beginning of a boundary.
SLICE_BYTES = 32 << 10


class Form:
    """Reader of one form. Raises InvalidInput for a body that is not a form with exactly one file in the field `file`,
    for a second value of a field, and above the limits of this module. Fields named in `listed` may have several
    values: `lists` has them, and `fields` has the values of all other fields.
    """

    def __init__(self, content_type: str, listed: Collection[str] = ()) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
            raise InvalidInput.at("Content-Type", "expected multipart/form-data with a boundary", reason="malformed")
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {name: [] for name in listed}
        self.file_name = ""
        self._count = 0
        self._is_complete = False
        self._has_file = self._in_file = False
        self._header = [b"", b""]
        self._disposition = b""
        self._field = ""
        self._value = bytearray()
        self._pieces: list[bytes] = []  # pieces of the file that `file` has not yielded yet
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    async def file(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the bytes of the file in pieces. `fields` is complete when the iteration ends, because the iteration
        also reads the fields after the file. Raises the errors of `body`.
        """
        async for chunk in body:
            for start in range(0, len(chunk), SLICE_BYTES):
                for piece in self._read(chunk[start : start + SLICE_BYTES]):
                    yield piece
                await asyncio.sleep(0)
        self._check_end()

    def whole(self, body: bytes) -> bytes:
        """Return the bytes of the file in a form whose body is in memory."""
        pieces = self._read(body)
        self._check_end()
        return b"".join(pieces)

    def _read(self, chunk: bytes) -> list[bytes]:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(
                f"expected multipart/form-data with the boundary of the Content-Type; the parser reports: {error}"
            ) from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def _check_end(self) -> None:
        if not self._is_complete:
            raise _malformed("the form ends before its last boundary")
        if not self._has_file:
            raise InvalidInput.at("file", "the form has no file in this field")

    def _on_part_begin(self) -> None:
        self._disposition, self._value = b"", bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = _text(options.get(b"name", b""), "the name of a field")
        self._in_file = b"filename" in options
        if not self._field:
            raise _malformed("a part of the form has no name")
        self._count += not self._in_file
        is_second = self._field in self.fields or (self._in_file and self._has_file)
        if is_second or self._count > MAX_FIELDS:
            raise InvalidInput.at(self._field[:80], f"the form has this field twice, or more than {MAX_FIELDS} fields")
        if not self._in_file:
            return
        if self._field != "file":
            raise InvalidInput.at(self._field[:80], "expected a file only in the field `file`")
        name = _text(options[b"filename"], "the name of the file")
        check_name(name)
        self.file_name, self._has_file = name, True

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidInput.at(self._field[:80], f"expected at most {MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._in_file:
            return
        value = _text(bytes(self._value), self._field[:80])
        if self._field in self.lists:
            self.lists[self._field].append(value)
        else:
            self.fields[self._field] = value

    def _on_end(self) -> None:
        self._is_complete = True


def _text(data: bytes, field_name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"{field_name} is not valid UTF-8") from error


def _malformed(why: str) -> InvalidInput:
    return InvalidInput.at("body", why, reason="malformed")


def check_name(name: str) -> None:
    """Raise InvalidInput if the name of a file does not have 1 to MAX_NAME_CHARS characters, all of them printable."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        message = f"expected a name of 1 to {MAX_NAME_CHARS} printable characters, got {len(name)} characters"
        raise InvalidInput.at("file", message)
