"""Routes of files. An upload is read in pieces while it arrives, also in a form (multipart/form-data) with one file."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sie_bulk_jobs.gateway.assembly import JobParts
from sie_bulk_jobs.gateway.files import MAX_FILE_BYTES, FileDescription
from sie_bulk_jobs.records import FileRecord
from sie_contracts.api import batches as api
from sie_contracts.errors import FAMILIES, InvalidInput
from sie_gateway.http.form import Form, check_name
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.handlers import PieceResponse, call_of, json_response, whole
from sie_runtime.http.routes import FORM, RAW, Content, Parameter

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

PATH = "/v1/files"
UPLOADED = ("batch", "jobs", "user_data")
PURPOSES = (*UPLOADED, "batch_output")
MAX_EXPIRES_S = 30 * 86400
FORM_BYTES = 1 << 20  # largest number of bytes of a form in addition to its file
UPLOAD_S = 1800.0
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)


async def upload(gateway: Gateway, request: Request) -> Response:
    """Store an upload: the whole body if the URL has the query parameter `purpose`, else the file in the form. Raises
    SIEError.
    """
    if "purpose" in request.query_params:
        name, purpose = request.query_params.get("filename", ""), _purpose(request.query_params["purpose"])
        check_name(name)
        about = FileDescription(name, purpose)
        record = await gateway.service(JobParts).files.receive(
            call_of(request).grant.key, request.stream(), lambda: about
        )
    else:
        form = Form(request.headers.get("content-type", ""))
        file = form.file(request.stream())
        record = await gateway.service(JobParts).files.receive(
            call_of(request).grant.key, file, functools.partial(_about, form)
        )
    return json_response(_shown(record))


def _purpose(text: str) -> str:
    if text not in UPLOADED:
        raise InvalidInput.at("purpose", f"expected one of {', '.join(UPLOADED)}")
    return text


def _about(form: Form) -> FileDescription:
    for name in form.fields:
        if name not in _FIELDS:
            raise InvalidInput.at(name[:80], f"no such field here, expected {', '.join(_FIELDS)}")
    return FileDescription(form.file_name, _purpose(form.fields.get("purpose", "")), _expires_after_s(form))


def _expires_after_s(form: Form) -> int:
    anchor, seconds = form.fields.get(_ANCHOR), form.fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise InvalidInput.at(_ANCHOR, "expected created_at")
    if seconds is None or not (
        seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 and 1 <= int(seconds) <= MAX_EXPIRES_S
    ):
        raise InvalidInput.at(_SECONDS, f"expected a whole number from 1 to {MAX_EXPIRES_S}")
    return int(seconds)


async def page(gateway: Gateway, request: Request) -> Response:
    query = request.query_params
    purpose, order = query.get("purpose", ""), query.get("order", "desc")
    if purpose and purpose not in PURPOSES:
        raise InvalidInput.at("purpose", f"expected one of {', '.join(PURPOSES)}")
    if order not in ("asc", "desc"):
        raise InvalidInput.at("order", "expected asc or desc")
    records, has_more = gateway.service(JobParts).files.page(
        call_of(request).grant.owns,
        purpose=purpose,
        after=query.get("after", ""),
        limit=whole(query, "limit", 10_000, 1, 10_000),
        newest_first=order == "desc",
    )
    files = [_shown(record) for record in records]
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return json_response(api.FilePage(data=files, has_more=has_more, first_id=first, last_id=last))


async def show(gateway: Gateway, request: Request) -> Response:
    return json_response(_shown(await _file_of(gateway, request)))


async def content(gateway: Gateway, request: Request) -> Response:
    record = await _file_of(gateway, request)
    # a browser must not show an uploaded file as a page of this server
    headers = {
        "Content-Length": str(record.bytes),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type=RAW)
    return PieceResponse(await gateway.service(JobParts).files.open(record), headers=headers, media_type=RAW)


async def remove(gateway: Gateway, request: Request) -> Response:
    record = await _file_of(gateway, request)
    await gateway.service(JobParts).files.remove(record)
    return json_response(api.FileDeleted(id=record.id))


async def _file_of(gateway: Gateway, request: Request) -> FileRecord:
    return await gateway.service(JobParts).files.find(request.path_params["file"], call_of(request).grant.owns)


def _shown(record: FileRecord) -> api.FileObject:
    return api.FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.created_s),
        filename=record.name,
        purpose=record.purpose,
        expires_at=int(record.expires_s) if record.expires_s else None,
    )


_ONE = Parameter("file", "path", str, "The id of the file.", api.FileObject.EXAMPLE["id"])


def _row(method: str, path: str, handler: Any, summary: str, reply: Any, **more: Any) -> GatewayRoute:
    names = ("Files and batches", summary)
    return control(method, PATH + path, "files", handler, names, reply, scope="infer", shape=FAMILIES["openai"], **more)


FILES: tuple[GatewayRoute, ...] = (
    _row(
        "POST",
        "",
        upload,
        f"Upload a file, of {MAX_FILE_BYTES >> 20} MiB at most",
        api.FileObject,
        body=Content(api.FileUpload, (FORM,)),
        parameters=(
            Parameter("purpose", "query", Literal[UPLOADED], "If set, the body is the file itself, not a form."),
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
                "The `last_id` of the previous page: only files after it in the list.",
            ),
            Parameter("order", "query", Literal["asc", "desc"], "By time of upload; desc (newest first) by default."),
        ),
    ),
    _row("GET", "/{file}", show, "One file", api.FileObject, parameters=(_ONE,)),
    _row("GET", "/{file}/content", content, "The bytes of a file", Content(media=(RAW,)), parameters=(_ONE,)),
    _row("DELETE", "/{file}", remove, "Delete a file", api.FileDeleted, parameters=(_ONE,)),
)
