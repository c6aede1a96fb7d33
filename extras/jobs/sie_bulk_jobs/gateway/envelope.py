"""Lines of batches in OpenAI's format: split a file into shards (groups of lines), read a line, write an answer. This
module does no I/O.

Source: the OpenAI API reference, section Batch: the objects "request input" and "request output".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import orjson

from sie_bulk_jobs.datasets.scan import BOM
from sie_bulk_jobs.datasets.sizes import count_outside
from sie_bulk_jobs.records import Plan, RowSpan
from sie_contracts.errors import UNDECODABLE, InvalidInput
from sie_runtime.http.asgi import uuid7

SHARD_LINES = 250
# a shard with this number of bytes or inputs gets no further line, because three shards and their answers are in memory
# at the same time
SHARD_BYTES, SHARD_INPUTS = 4 << 20, 4096
MAX_LINES = 50_000  # largest number of lines of a batch; OpenAI has the same limit
MAX_LINE_BYTES = 64 << 20
_NATIVE = ("/v1/encode", "/v1/score", "/v1/extract", "/v1/redact")  # endpoints with the model in the path


class LineRequest(NamedTuple):
    """Request of a line. `path`: path of the URL; for endpoints in _NATIVE it ends with the model. `body`: JSON."""

    custom_id: str
    path: str
    body: bytes


class BatchRow(NamedTuple):
    """Line of the output, without the newline. `code`: code of the error in the line, None if the request succeeded."""

    text: bytes
    code: str | None
    tokens: int = 0


class _BatchLine(msgspec.Struct):
    """Line of the input file, with values as raw JSON."""

    custom_id: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    url: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


class _BatchBody(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_BatchLine).decode
_decode_body = msgspec.json.Decoder(_BatchBody).decode


class BadLine(Exception):
    """Raised for a line that has no valid request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class BatchCut:
    """Splitter of a file into spans (ranges of lines), one for each shard, while the bytes of the file arrive. The
    splitter also finds lines that repeat the custom_id of an earlier line.

    A byte order mark at the start of the file is dropped. A line with only white space counts for the line number
    `RowSpan.first`, but not for the number of requests `RowSpan.rows`.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._spans: list[RowSpan] = []
        self._rest: list[bytes] = []  # parts of an incomplete line
        self._rest_bytes = 0
        self._lines = self._first = 0
        self._requests = self._rows = 0  # number of requests in the file, and in the current span
        self._inputs = 0  # upper bound of the number of inputs in the current span
        self._start = self._end = 0  # offsets in bytes: start of the span; end of the last complete line
        self._seen: set[str] = set()
        self._repeated: list[int] = []

    def feed(self, piece: bytes) -> None:
        """Read further bytes of the file, and store each span that is complete. Raises InvalidInput."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest, self._rest_bytes = [], 0
        self._rest.append(rest)
        self._rest_bytes += len(rest)
        for line in lines:
            self._line(line, 1)
        if self._rest_bytes > MAX_LINE_BYTES:
            message = f"line {self._lines + 1} has more than {MAX_LINE_BYTES} bytes"
            raise InvalidInput.at("input_file_id", message, reason="too_large")

    def _line(self, line: bytes, newline: int) -> None:
        self._lines += 1
        self._end += len(line) + newline
        if self._lines == 1 and line.startswith(BOM):
            line, self._start = line.removeprefix(BOM), len(BOM)
        if line.strip():
            self._request(line)
        if self._rows == SHARD_LINES or self._end - self._start >= SHARD_BYTES or self._inputs >= SHARD_INPUTS:
            self._cut()

    def _request(self, line: bytes) -> None:
        self._requests += 1
        self._rows += 1
        if self._requests > MAX_LINES:
            message = f"more than {MAX_LINES} lines, the limit of a batch; POST /v1/jobs takes any number"
            raise InvalidInput.at("input_file_id", message, reason="too_many_items")
        request = _lenient(line)
        # a body with n commas outside of strings has at most n + 1 inputs
        self._inputs += 1 + count_outside(bytes(request.body), b",", SHARD_INPUTS)
        custom_id = _text(request.custom_id)
        if custom_id is not None and custom_id in self._seen:
            self._repeated.append(self._lines - 1)
        elif custom_id is not None:
            self._seen.add(custom_id)

    def _cut(self) -> None:
        if self._rows:
            self._spans.append(RowSpan(self._file, "jsonl", self._first, self._rows, self._start, self._end))
        self._first, self._start, self._rows, self._inputs = self._lines, self._end, 0, 0

    def plan(self) -> Plan:
        """Return the plan of the whole file. Raises InvalidInput for a file without requests."""
        if rest := b"".join(self._rest):  # the last line of a file may have no newline
            self._line(rest, 0)
        self._cut()
        if not self._spans:
            raise InvalidInput.at("input_file_id", "the file has no lines", reason="empty_file")
        return Plan(tuple(self._spans), repeated=tuple(self._repeated))


def requests_of(text: bytes, span: RowSpan) -> list[tuple[int, bytes]]:
    """Return the requests of a span, each with its line number in the file, from 0."""
    lines = enumerate(text.split(b"\n"), span.first)
    return [(number, stripped) for number, line in lines if (stripped := line.strip())]


def read(line: bytes, number: int, endpoint: str, *, is_repeated: bool) -> LineRequest:
    """Decode a line of the input file and check it against the batch. `number`: line number, from 0. Raises BadLine."""
    where = f"line {number + 1}"
    try:
        request = _decode(line)
    except msgspec.ValidationError:
        raise BadLine("invalid_json_line", f"{where}: expected a map with custom_id, method, url and body") from None
    except UNDECODABLE:
        raise BadLine("invalid_json_line", f"{where}: no JSON") from None
    custom_id, url = _text(request.custom_id), _text(request.url)
    if not custom_id:
        raise BadLine("missing_required_parameter", f"{where}: custom_id: expected a string")
    if is_repeated:
        raise BadLine("duplicate_custom_id", f"{where}: custom_id: an earlier line has the same custom_id")
    if bytes(request.method) and _text(request.method) != "POST":
        raise BadLine("invalid_method", f"{where}: method: expected POST")
    if url is None or not (url == endpoint or url.startswith(f"{endpoint}/")):
        raise BadLine("mismatched_url", f"{where}: url: expected {endpoint}, the endpoint of the batch")
    body = bytes(request.body)
    if not body.startswith(b"{"):
        raise BadLine("missing_required_parameter", f"{where}: body: expected a map")
    if url in _NATIVE:
        model = _text(_decode_body(body).model)
        if not model:
            raise BadLine("missing_required_parameter", f"{where}: body.model: expected the name of a model")
        url = f"{url}/{model}"
    return LineRequest(custom_id, url, body)


def answer(custom_id: str, request_id: str, status: int, body: bytes, tokens: int = 0) -> BatchRow:
    """Return the output line of a request with a reply: its status and its JSON body, which may be an error."""
    head = orjson.dumps({"id": _new_id(), "custom_id": custom_id})
    response = orjson.dumps({"status_code": status, "request_id": request_id})
    text = head[:-1] + b',"response":' + response[:-1] + b',"body":' + body + b'},"error":null}'
    return BatchRow(text, None if status < 400 else _code_of(status, orjson.loads(body)), tokens)


def failure(custom_id: str | None, code: str, message: str) -> BatchRow:
    """Return the output line of a request without a reply: the code and the message of the error."""
    line = {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    return BatchRow(orjson.dumps({"id": _new_id(), **line}), code)


def written(text: bytes) -> list[BatchRow]:
    """Decode the rows of a stored part."""
    return [_row(line) for line in text.split(b"\n") if line]


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line; None if the line has none."""
    return _text(_lenient(line).custom_id)


def _lenient(line: bytes) -> _BatchLine:
    """Return the fields of a line; all are empty if the line is not a JSON object with the fields of a request."""
    try:
        return _decode(line)
    except UNDECODABLE:
        return _BatchLine()


def _text(value: msgspec.Raw) -> str | None:
    """Decode a string. Returns None for other values, without decoding them."""
    try:
        return msgspec.json.decode(value, type=str) if bytes(memoryview(value)[:1]) == b'"' else None
    except ValueError:
        return None


def _new_id() -> str:
    return f"batch_req_{uuid7().replace('-', '')}"


def _row(line: bytes) -> BatchRow:
    row = orjson.loads(line)
    if row["error"] is not None:
        return BatchRow(line, str(row["error"]["code"]))
    status, body = row["response"]["status_code"], row["response"]["body"]
    if status >= 400:
        return BatchRow(line, _code_of(status, body))
    usage = body.get("usage") if isinstance(body, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return BatchRow(line, None, tokens if isinstance(tokens, int) else 0)


def _code_of(status: int, body: Any) -> str:
    """Return the code in the body of an error reply, whose format depends on the route's API."""
    error = body.get("error") if isinstance(body, dict) else None
    facts = error if isinstance(error, dict) else body
    code = facts.get("code") if isinstance(facts, dict) else None
    return code if isinstance(code, str) and code else f"HTTP_{status}"
