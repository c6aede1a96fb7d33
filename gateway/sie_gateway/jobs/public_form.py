"""Jobs in the form of the public SDKs of SIE: what they submit as a job of ours, and a job as they read it.

{src, operation, model, field_map, options} ──► requested ──► JobRequest
                           JobInfo ──► as_public ──► {state, total_items, completed_items, ...}

A field without a counterpart is refused by its name, with what to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sie_contracts.api import jobs as api
from sie_contracts.errors import InvalidInput

_UPLOADED = "upload://"
_REFUSED = {
    "items": "a job reads files: upload the rows as JSON Lines and name the file in source, as upload://FILE_ID",
    "output_field": "leave it out: columns of the output have the names of the outputs",
    "when": "leave it out: the fields windows and deadline of a native job say when it runs",
}
_STATES = {
    "planning": "running",
    "paused": "suspended",
    "finalizing": "running",
    "completed": "succeeded",
    "expired": "failed",
}
"""States that these clients have under another name. They wait until one that they know as the end."""


class _FieldMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_field: str = ""
    id_field: str = ""
    carry: tuple[str, ...] = ()
    input_type: str = "text"


class _Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What these clients send; `src` is `source` of their call."""

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


def is_public(body: Any) -> bool:
    """Whether a body is a job in the form of the public SDKs."""
    return isinstance(body, dict) and "input" not in body and not body.keys().isdisjoint(("src", "source", "items"))


def requested(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a job of ours. Raises InvalidInput, which names the field of the client."""
    for name, instead in _REFUSED.items():
        if name in body:
            raise _refused(name, instead)
    try:
        job = msgspec.convert(body, _Job)
    except msgspec.ValidationError as error:
        message, _, path = str(error).rpartition(" - at `$.")
        field = path.rstrip("`") if message else "body"
        raise _refused(field, message or str(error)) from error
    src = job.src or job.source
    if job.execution != "run":
        raise _refused("execution", "expected run: a job begins at once, and nothing is planned without it")
    for name, named, place in (("connection", job.connection, src), ("sink_connection", job.sink_connection, job.sink)):
        if named and named != _authority(place):
            raise _refused(name, "leave it out: SIE_JOBS_URLS and the gateway's own credentials allow places")
    params: dict[str, Any] = {"output_types": list(job.output_types)} if job.output_types else {}
    options = dict(job.options)
    found = _input(job, src, options)
    if options:
        params["options"] = options
    output = _output(job.sink)
    return {
        "model": job.model,
        "operation": job.operation,
        "input": found,
        **({"output": output} if output else {}),
        **({"params": params} if params else {}),
    }


def _input(job: _Job, src: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the job reads. Takes the query of a score out of `options`."""
    fields = job.field_map
    if fields.input_type != "text":
        raise _refused("field_map.input_type", "expected text: a job reads the column of a text")
    if not fields.input_field:
        raise _refused("field_map.input_field", "expected the column of the texts")
    if any(char in fields.input_field for char in "{}"):
        raise _refused("field_map.input_field", "expected a name without braces")
    found: dict[str, Any] = {"file": src.removeprefix(_UPLOADED)} if src.startswith(_UPLOADED) else {"url": src}
    column = f"{{{fields.input_field}}}"
    if job.operation == "score":
        query = options.pop("query", None)
        if not isinstance(query, str) or not query:
            raise _refused("options.query", "expected the query that the texts are scored for")
        found |= {"query": query.replace("{", "{{").replace("}", "}}"), "document": column}
    else:
        found["text"] = column
    if fields.id_field:
        found["id"] = fields.id_field
    if fields.carry:
        found["keep"] = list(fields.carry)
    return found


def _output(sink: str) -> dict[str, Any]:
    if not sink:
        return {}
    if sink.startswith(_UPLOADED) or "://" not in sink:
        raise _refused("sink", "leave it out: the output is then read from /v1/jobs/{job}/manifest; or name a folder")
    return {"url": sink}


def as_public(info: api.JobInfo) -> dict[str, Any]:
    """A job with the states and the counts that these clients read."""
    found: dict[str, Any] = msgspec.to_builtins(info)
    counts = info.counts
    return {
        **found,
        "state": _STATES.get(info.state, info.state),
        "total_items": counts.rows,
        "completed_items": counts.done,
        "finished_at": info.ended_at,
        "error_code": None if info.error is None else info.error.code,
        "outcome": info.state,
    }


def _authority(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0]


def _refused(field: str, message: str) -> InvalidInput:
    return InvalidInput(f"{field}: {message}", reason="schema", param=field)
