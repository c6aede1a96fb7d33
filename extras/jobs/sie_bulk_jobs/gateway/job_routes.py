"""Routes of jobs and batches, and the conversion between the job format of the published SDKs of SIE and the format of
this API.

    body from an SDK: {src, operation, model, field_map, options} ──► requested() ──► JobRequest
    JobInfo ──► as_public() ──► reply to an SDK: {state, total_items, completed_items, ...}

The routes refuse each field of the SDKs that has no counterpart in this API. The error names the field and an
alternative.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sie_bulk_jobs.gateway.assembly import JobParts
from sie_contracts import sdk_versions
from sie_contracts.api import batches as batches_api
from sie_contracts.api import jobs as api
from sie_contracts.errors import FAMILIES, InvalidInput
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.handlers import PieceResponse, call_of, converted, flag, json_of, json_response, whole
from sie_runtime.http.routes import RAW, Content, Parameter

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

_UPLOADED = "upload://"
_REFUSED = {
    "items": "a job reads files: upload the rows as JSON Lines and name the file in source, as upload://FILE_ID",
    "output_field": "leave it out: the columns of the result have the names of the vectors, such as dense",
    "when": "leave it out: the fields windows and deadline of a native job say when it runs",
}
_STATES = {
    "planning": "running",
    "paused": "suspended",
    "finalizing": "running",
    "completed": "succeeded",
    "expired": "failed",
}
"""State of a job -> its name in the SDKs of the open-source SIE project, if the names differ. The SDKs poll a job until
its state has a name that they take for final."""


class _FieldMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_field: str = ""
    id_field: str = ""
    carry: tuple[str, ...] = ()
    input_type: str = "text"


class _SubmittedJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of a job that SIE's published SDKs send. They send their argument `source` as `src`."""

    model: str
    src: str = ""
    source: str = ""
    operation: api.JobOperation = "encode"
    connection: str = ""
    sink: str = ""
    sink_connection: str = ""
    execution: str = "run"
    field_map: _FieldMap = _FieldMap()
    output_types: tuple[str, ...] = ()
    options: dict[str, Any] = {}


def is_public(body: Mapping[str, Any]) -> bool:
    """Return True if a body is a job in the format of SIE's published SDKs."""
    return "input" not in body and not body.keys().isdisjoint(("src", "source", "items"))


def requested(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a job in the format of SIE's published SDKs to the body of a JobRequest. Raises InvalidInput, which names
    the client's field.
    """
    for name, instead in _REFUSED.items():
        if name in body:
            raise InvalidInput.at(name, instead)
    job = converted(body, _SubmittedJob)
    src = job.src or job.source
    if job.execution != "run":
        raise InvalidInput.at("execution", "expected run: a job cannot be planned without a run")
    for name, named, place in (("connection", job.connection, src), ("sink_connection", job.sink_connection, job.sink)):
        if named and named != _authority(place):
            raise InvalidInput.at(
                name, "leave it out: a job uses the gateway's credentials for the URLs that SIE_JOBS_URLS allows"
            )
    params: dict[str, Any] = {"output_types": list(job.output_types)} if job.output_types else {}
    options = dict(job.options)
    input_map = _input(job, src, options)
    if options:
        params["options"] = options
    if job.sink.startswith(_UPLOADED) or (job.sink and "://" not in job.sink):
        raise InvalidInput.at(
            "sink",
            "expected the URL of a folder, such as s3://bucket/folder; or leave it out, and read the output from "
            "/v1/jobs/{job}/manifest",
        )
    return {
        "model": job.model,
        "operation": job.operation,
        "input": input_map,
        **({"output": {"url": job.sink}} if job.sink else {}),
        **({"params": params} if params else {}),
    }


def _input(job: _SubmittedJob, src: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the field `input` of a JobRequest. Move the query of a score from `options` into this field."""
    fields = job.field_map
    if fields.input_type != "text":
        raise InvalidInput.at("field_map.input_type", "expected text: a job reads a column of texts")
    if not fields.input_field:
        raise InvalidInput.at("field_map.input_field", "expected the name of the column of texts")
    if any(char in fields.input_field for char in "{}"):
        raise InvalidInput.at("field_map.input_field", "expected a name without braces")
    input_map: dict[str, Any] = {"file": src.removeprefix(_UPLOADED)} if src.startswith(_UPLOADED) else {"url": src}
    column = f"{{{fields.input_field}}}"
    if job.operation == "score":
        query = options.pop("query", None)
        if not isinstance(query, str) or not query:
            raise InvalidInput.at("options.query", "expected the query that the texts are scored for")
        input_map |= {"query": query.replace("{", "{{").replace("}", "}}"), "document": column}
    else:
        input_map["text"] = column
    if fields.id_field:
        input_map["id"] = fields.id_field
    if fields.carry:
        input_map["keep"] = list(fields.carry)
    return input_map


def as_public(info: api.JobInfo) -> dict[str, Any]:
    """Return a job with the states and the counts that the public SDKs read."""
    fields: dict[str, Any] = msgspec.to_builtins(info)
    counts = info.counts
    return {
        **fields,
        "state": _STATES.get(info.state, info.state),
        "total_items": counts.rows,
        "completed_items": counts.done,
        "finished_at": info.ended_at,
        "error_code": None if info.error is None else info.error.code,
        "outcome": info.state,
    }


def _authority(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0]


PATH, BATCH_PATH = "/v1/jobs", "/v1/batches"


def _info_reply(request: Request, info: api.JobInfo, status: int = 200) -> Response:
    is_public = call_of(request).dialect is not sdk_versions.NATIVE
    return json_response(as_public(info) if is_public else info, status)


async def submit(gateway: Gateway, request: Request) -> Response:
    body = await json_of(request)
    job_request = converted(requested(body) if is_public(body) else body, api.JobRequest)
    return _info_reply(request, await gateway.service(JobParts).jobs.submit(call_of(request), job_request), 201)


def _states(state: str, names: Mapping[str, str]) -> frozenset[str]:
    """Return the states of jobs that a client selects by `state`; all states if `state` is empty. `names`: state ->
    further name of this state that clients may use. Raises InvalidInput.
    """
    every = get_args(api.JobState)
    states = frozenset(own for own in every if state in ("", own, names.get(own)))
    if not states:
        raise InvalidInput.at("state", f"expected one of {', '.join(dict.fromkeys((*every, *names.values())))}")
    return states


async def page(gateway: Gateway, request: Request) -> Response:
    query, call = request.query_params, call_of(request)
    is_native = call.dialect is sdk_versions.NATIVE
    states = _states(query.get("state", ""), {} if is_native else _STATES)
    jobs_page = gateway.service(JobParts).jobs.page(
        call, whole(query, "limit", 50, 1, 1000), query.get("after", ""), states
    )
    if is_native:
        return json_response(jobs_page)
    return json_response({"object": "list", "data": [as_public(info) for info in jobs_page.data]})


async def show(gateway: Gateway, request: Request) -> Response:
    jobs = gateway.service(JobParts).jobs
    return _info_reply(request, jobs.as_info(jobs.find(call_of(request), request.path_params["job"])))


async def pause(gateway: Gateway, request: Request) -> Response:
    """Stop a job until it is resumed; its answers stay stored. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(
        await gateway.service(JobParts).jobs.set_command(call_of(request), request.path_params["job"], "pause")
    )


async def resume(gateway: Gateway, request: Request) -> Response:
    """Continue a paused job with the rows that have no answer. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(
        await gateway.service(JobParts).jobs.set_command(call_of(request), request.path_params["job"], "run")
    )


async def cancel(gateway: Gateway, request: Request) -> Response:
    """Cancel a job; its output has the finished rows. Raises NotFound, ContentConflict, QueueUnavailable."""
    job = await gateway.service(JobParts).jobs.set_command(call_of(request), request.path_params["job"], "cancel")
    return _info_reply(request, job)


async def retry(gateway: Gateway, request: Request) -> Response:
    """Create a job for the failed rows of an earlier job. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(await gateway.service(JobParts).jobs.retry(call_of(request), request.path_params["job"]), 201)


async def delete(gateway: Gateway, request: Request) -> Response:
    """Delete an ended job: its records and its stored objects. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(await gateway.service(JobParts).jobs.delete(call_of(request), request.path_params["job"]))


async def manifest(gateway: Gateway, request: Request) -> Response:
    job = gateway.service(JobParts).jobs.find(call_of(request), request.path_params["job"])
    after = whole(request.query_params, "after", 0, 0, 1 << 31)
    limit = whole(request.query_params, "limit", 1000, 1, 10_000)
    return json_response(
        await gateway.service(JobParts).results.manifest(call_of(request).grant.key, job, after, limit)
    )


async def part(gateway: Gateway, request: Request) -> Response:
    job = gateway.service(JobParts).jobs.find(call_of(request), request.path_params["job"])
    size, pieces = await gateway.service(JobParts).results.part(job, request.query_params.get("name", ""))
    headers = {"Content-Length": str(size), "Content-Disposition": "attachment"}
    return PieceResponse(pieces, headers=headers, media_type=RAW)


async def rows(gateway: Gateway, request: Request) -> Response:
    job = gateway.service(JobParts).jobs.find(call_of(request), request.path_params["job"])
    only_failed = flag(request.query_params, "failed", default=False)
    limit = whole(request.query_params, "limit", 20, 1, 1000)
    return json_response(
        await gateway.service(JobParts).results.rows(call_of(request).grant.key, job, limit, only_failed=only_failed)
    )


async def submit_batch(gateway: Gateway, request: Request) -> Response:
    batch_request = converted(await json_of(request), batches_api.BatchRequest)
    return json_response(await gateway.service(JobParts).jobs.batch(call_of(request), batch_request))


async def batch_page(gateway: Gateway, request: Request) -> Response:
    limit, after = whole(request.query_params, "limit", 20, 1, 100), request.query_params.get("after", "")
    return json_response(gateway.service(JobParts).jobs.batch_page(call_of(request), limit, after))


async def show_batch(gateway: Gateway, request: Request) -> Response:
    jobs = gateway.service(JobParts).jobs
    return json_response(jobs.batch_told(jobs.find_batch(call_of(request), request.path_params["batch"])))


async def cancel_batch(gateway: Gateway, request: Request) -> Response:
    """Cancel a batch; its output has the finished answers. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(
        await gateway.service(JobParts).jobs.cancel_batch(call_of(request), request.path_params["batch"])
    )


async def delete_batch(gateway: Gateway, request: Request) -> Response:
    """Delete the records of a batch that has ended. Raises NotFound, ContentConflict, QueueUnavailable."""
    return json_response(
        await gateway.service(JobParts).jobs.delete_batch(call_of(request), request.path_params["batch"])
    )


_AFTER = Parameter("after", "query", str, "The id of the last entry of the previous page.")
_STATE = Parameter("state", "query", api.JobState, "Only jobs in this state.")
_BATCH = Parameter("batch", "path", str, "The id of the batch.", batches_api.BatchObject.EXAMPLE["id"])
_JOB = Parameter("job", "path", str, "The id of the job.", api.JobInfo.EXAMPLE["id"])
_KEY = Parameter(
    "Idempotency-Key", "header", Annotated[str, Meta(max_length=256)], "Requests with the same key create one job."
)


def _most(most: int, default: int) -> Parameter:
    kind = Annotated[int, Meta(ge=1, le=most)]
    return Parameter("limit", "query", kind, f"How many at most; {default} by default.")


def _row(
    method: str,
    path: str,
    handler: Any,
    summary: str,
    reply: Any = api.JobInfo,
    *,
    prefix: str = PATH,
    tag: str = "Jobs",
    parameters: tuple[Parameter, ...] = (),
    **more: Any,
) -> GatewayRoute:
    own = tuple(parameter for parameter in (_JOB, _BATCH) if f"{{{parameter.name}}}" in path)
    parameters = (*own, *parameters)
    names = (tag, summary)
    return control(method, prefix + path, "jobs", handler, names, reply, scope="infer", parameters=parameters, **more)


_batch_row = functools.partial(_row, prefix=BATCH_PATH, tag="OpenAI, batches", shape=FAMILIES["openai"])


JOBS: tuple[GatewayRoute, ...] = (
    _row(
        "POST",
        "",
        submit,
        "Submit a job, which runs a model on each row of its input files",
        status=201,
        body=api.JobRequest,
        parameters=(_KEY,),
    ),
    _row("GET", "", page, "Jobs, the newest first", api.JobPage, parameters=(_most(1000, 50), _AFTER, _STATE)),
    _row("GET", "/{job}", show, "One job: how far it is, and what it waits for"),
    _row("DELETE", "/{job}", delete, "Delete an ended job and its output in the payload store", api.JobDeleted),
    _row("POST", "/{job}/pause", pause, "Stop a job for now; what it has written stays"),
    _row("POST", "/{job}/resume", resume, "Go on with a job that is paused"),
    _row("POST", "/{job}/cancel", cancel, "End a job; what it has written stays"),
    _row("POST", "/{job}/retry", retry, "A new job over the rows that failed", status=201),
    _row(
        "GET",
        "/{job}/manifest",
        manifest,
        "The files of a job's output so far, in the order of its input",
        api.JobManifest,
        parameters=(
            _most(10_000, 1000),
            Parameter("after", "query", Annotated[int, Meta(ge=0)], "Parts to skip: `next` of the previous page."),
        ),
    ),
    _row(
        "GET",
        "/{job}/part",
        part,
        "The bytes of one output file that is in the payload store",
        Content(media=(RAW,)),
        parameters=(Parameter("name", "query", str, "Name in the manifest.", "part-00000.parquet", required=True),),
    ),
    _row(
        "GET",
        "/{job}/rows",
        rows,
        "A sample of answered rows, without their values",
        api.JobRows,
        parameters=(
            _most(1000, 20),
            Parameter("failed", "query", Literal["true", "false"], "true: only rows with an error."),
        ),
    ),
    _batch_row(
        "POST",
        "",
        submit_batch,
        "Submit a batch, which runs each line of an uploaded file as a request",
        batches_api.BatchObject,
        body=batches_api.BatchRequest,
    ),
    _batch_row(
        "GET", "", batch_page, "Batches, the newest first", batches_api.BatchPage, parameters=(_most(100, 20), _AFTER)
    ),
    _batch_row("GET", "/{batch}", show_batch, "One batch", batches_api.BatchObject),
    _batch_row(
        "DELETE", "/{batch}", delete_batch, "Forget a batch that has ended; its files stay", batches_api.BatchDeleted
    ),
    _batch_row(
        "POST", "/{batch}/cancel", cancel_batch, "End a batch; its answers so far stay", batches_api.BatchObject
    ),
)
