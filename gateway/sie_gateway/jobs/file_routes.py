"""Routes of files. A form with one file (multipart/form-data, RFC 7578) is read in pieces while it arrives.

pieces of a body ──► Form.file() ──► pieces of the file      fields ──► Form.fields, complete when `file` has ended
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sie_contracts.api import batches as api
from sie_contracts.errors import InvalidInput
from sie_contracts.jobs import FileRecord
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.inference.call import Call, family
from sie_gateway.jobs.files import MAX_FILE_BYTES, FileDescription, sees_all
from sie_gateway.operations.handlers import json_response, number
from sie_runtime.http.routes import FORM, RAW, Content, Parameter

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_NAME_CHARS = 255
MAX_BOUNDARY_BYTES = 70  # RFC 2046, 5.1.1


class Form:
    """Reader of one form. Raises InvalidInput for a body that is no form, for a second file, and for a second value of
    a field. Errors of `body` are not caught.
    """

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
            raise InvalidInput(
                "Content-Type: expected multipart/form-data with a boundary", reason="malformed", param="Content-Type"
            )
        self.fields: dict[str, str] = {}
        self.file_name = ""
        self._body = body
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

    async def file(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file. When the iteration has ended, the whole form has been read."""
        async for chunk in self._body:
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed("expected multipart/form-data with the boundary of the Content-Type") from error
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
        if not self._is_complete:
            raise _malformed("it ends before its last boundary")
        if not self._has_file:
            raise InvalidInput("file: the form has no file of this name", reason="schema", param="file")

    def _on_part_begin(self) -> None:
        self._disposition, self._value = b"", bytearray()
        self._header = [b"", b""]

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
        if self._field in self.fields or (self._in_file and self._has_file) or len(self.fields) >= MAX_FIELDS:
            message = f"{self._field[:80]}: the form has this field twice, or more than {MAX_FIELDS} fields"
            raise InvalidInput(message, reason="schema", param=self._field[:80])
        if not self._in_file:
            return
        if self._field != "file":
            raise InvalidInput(
                f"{self._field[:80]}: expected a file only in the field `file`", reason="schema", param=self._field[:80]
            )
        name = _text(options[b"filename"], "the name of the file")
        check_name(name)
        self.file_name, self._has_file = name, True

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            message = f"{self._field[:80]}: expected at most {MAX_FIELD_BYTES} bytes"
            raise InvalidInput(message, reason="schema", param=self._field[:80])

    def _on_part_end(self) -> None:
        if not self._in_file:
            self.fields[self._field] = _text(bytes(self._value), self._field[:80])

    def _on_end(self) -> None:
        self._is_complete = True


def _text(data: bytes, field_name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"{field_name} is no UTF-8") from error


def _malformed(why: str) -> InvalidInput:
    return InvalidInput(f"body: {why}", reason="malformed", param="body")


def check_name(name: str) -> None:
    """Check the name of a file. Raises InvalidInput."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        message = f"file: expected a name of 1 to {MAX_NAME_CHARS} printable characters, got {len(name)} characters"
        raise InvalidInput(message, reason="schema", param="file")


PATH = "/v1/files"
UPLOADED = ("batch", "jobs", "user_data")
PURPOSES = (*UPLOADED, "batch_output")
MAX_EXPIRES_S = 30 * 86400
FORM_BYTES = 1 << 20  # bytes of a form without its file; larger than one read of a connection
UPLOAD_S = 1800.0
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


async def upload(gateway: Gateway, request: Request) -> Response:
    """Store a file. If the query has a purpose, the whole body is the file, else the body is a form that contains the
    file. Raises InvalidInput, PayloadTooLarge, ResourceExhausted, NotReady, QueueUnavailable.
    """
    if "purpose" in request.query_params:
        name, purpose = request.query_params.get("filename", ""), _purpose(request.query_params["purpose"])
        check_name(name)
        record = await gateway.files.receive(
            _call(request).key, request.stream(), lambda: FileDescription(name, purpose, 0)
        )
    else:
        form = Form(request.headers.get("content-type", ""), request.stream())
        record = await gateway.files.receive(_call(request).key, form.file(), functools.partial(_about, form))
    return json_response(_shown(record))


def _purpose(text: str) -> str:
    if text not in UPLOADED:
        raise InvalidInput(f"purpose: expected one of {', '.join(UPLOADED)}", reason="schema", param="purpose")
    return text


def _about(form: Form) -> FileDescription:
    for name in form.fields:
        if name not in _FIELDS:
            raise InvalidInput(
                f"{name[:80]}: no such field here, expected {', '.join(_FIELDS)}", reason="schema", param=name[:80]
            )
    return FileDescription(form.file_name, _purpose(form.fields.get("purpose", "")), _expires_after_s(form))


def _expires_after_s(form: Form) -> int:
    anchor, seconds = form.fields.get(_ANCHOR), form.fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise InvalidInput(f"{_ANCHOR}: expected created_at", reason="schema", param=_ANCHOR)
    if seconds is None or not (
        seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 and 1 <= int(seconds) <= MAX_EXPIRES_S
    ):
        raise InvalidInput(
            f"{_SECONDS}: expected a whole number from 1 to {MAX_EXPIRES_S}", reason="schema", param=_SECONDS
        )
    return int(seconds)


async def page(gateway: Gateway, request: Request) -> Response:
    """Return a page of the list of files. Raises InvalidInput, NotReady."""
    query, grant = request.query_params, _call(request).grant
    purpose, order = query.get("purpose", ""), query.get("order", "desc")
    if purpose and purpose not in PURPOSES:
        raise InvalidInput(f"purpose: expected one of {', '.join(PURPOSES)}", reason="schema", param="purpose")
    if order not in ("asc", "desc"):
        raise InvalidInput("order: expected asc or desc", reason="schema", param="order")
    listed = gateway.files.page(
        grant.key,
        sees_all=sees_all(grant),
        purpose=purpose,
        after=query.get("after", ""),
        limit=int(number(query, "limit", 10_000, 1, 10_000)),
        newest_first=order == "desc",
    )
    files = [_shown(record) for record in listed.files]
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return json_response(api.FilePage(data=files, has_more=listed.has_more, first_id=first, last_id=last))


async def show(gateway: Gateway, request: Request) -> Response:
    """Return the description of one file. Raises NotFound, NotReady, QueueUnavailable."""
    return json_response(_shown(await _file_of(gateway, request)))


async def content(gateway: Gateway, request: Request) -> Response:
    """Return the bytes of one file. Raises NotFound, NotReady, QueueUnavailable."""
    record = await _file_of(gateway, request)
    # a browser must not show an uploaded file as a page of this server
    headers = {
        "Content-Length": str(record.bytes),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type=RAW)
    return StreamingResponse(await gateway.files.open(record), headers=headers, media_type=RAW)


async def remove(gateway: Gateway, request: Request) -> Response:
    """Delete one file. Raises NotFound, NotReady, QueueUnavailable."""
    record = await _file_of(gateway, request)
    await gateway.files.remove(record)
    return json_response(api.FileDeleted(id=record.id))


def _call(request: Request) -> Call:
    call: Call = request.scope["sie.call"]
    return call


async def _file_of(gateway: Gateway, request: Request) -> FileRecord:
    grant = _call(request).grant
    return await gateway.files.find(request.path_params["file"], grant.key, sees_all=sees_all(grant))


def _shown(record: FileRecord) -> api.FileObject:
    return api.FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_s),
        filename=record.name,
        purpose=record.purpose,
        expires_at=int(record.expires_s) if record.expires_s else None,
    )


# rows

_ONE = Parameter("file", "path", str, "The id of the file.", api.FileObject.EXAMPLE["id"])


def _row(method: str, path: str, handler: Any, summary: str, reply: Any, **more: Any) -> GatewayRoute:
    names = ("Files and batches", summary)
    return control(method, PATH + path, "files", handler, names, reply, scope="infer", shape=family("openai"), **more)


FILES: tuple[GatewayRoute, ...] = (
    _row(
        "POST",
        "",
        upload,
        f"Upload a file, of {MAX_FILE_BYTES >> 20} MiB at most",
        api.FileObject,
        body=Content(api.FileUpload, (FORM,)),
        parameters=(
            Parameter("purpose", "query", Literal[UPLOADED], "The body is the file itself, and no form."),
            Parameter("filename", "query", str, "The name of a file that is sent as the body."),
        ),
        body_bytes=MAX_FILE_BYTES + FORM_BYTES,
        body_s=UPLOAD_S,
    ),
    _row(
        "GET",
        "",
        page,
        "Files of this key",
        api.FilePage,
        parameters=(
            Parameter("purpose", "query", Literal[PURPOSES], "Only files of this purpose."),
            Parameter("limit", "query", Annotated[int, Meta(ge=1, le=10_000)], "How many at most; 10,000 by default."),
            Parameter(
                "after",
                "query",
                Annotated[str, Meta(pattern="^file-[0-9a-f]{32}$")],
                "Only files behind this one in the list: the `last_id` of the page before.",
            ),
            Parameter("order", "query", Literal["asc", "desc"], "By the time of upload; desc, the newest first."),
        ),
    ),
    _row("GET", "/{file}", show, "One file", api.FileObject, parameters=(_ONE,)),
    _row("GET", "/{file}/content", content, "The bytes of a file", Content(media=(RAW,)), parameters=(_ONE,)),
    _row("DELETE", "/{file}", remove, "Delete a file", api.FileDeleted, parameters=(_ONE,)),
)
