"""Plans (see `core`) for jobs: submit, poll, pause or cancel, wait, and download the output.

file ──upload──► POST /v1/jobs ──► JobInfo ──polled until it has ended──► manifest ──► output files on the disk
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlencode

import msgspec

from sie_client import files
from sie_client.core import BlockingWork, Calls, D, Pause, Plan, Session, Together, delete_call, json_call
from sie_client.errors import (
    ContentConflictError,
    JobFailedError,
    JobTimeoutError,
    RequestError,
    ServerError,
    SIEError,
    invalid,
)
from sie_client.files import Arriving, Fetching, identifier
from sie_client.types import JobOptions, Progress
from sie_contracts.api import jobs as api
from sie_contracts.api.batches import FileObject
from sie_contracts.api.jobs import ENDED, JobDeleted, JobManifest, JobPart
from sie_contracts.errors import UNDECODABLE

# seconds between two polls of a job: at the start, and the largest value to which the pauses grow
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
PAGE = 100  # largest number of jobs in one page of the list of jobs
PARTS = 4  # largest number of output files that are downloaded at the same time
MANIFEST = "manifest.json"
# Seconds until the server deletes an input file that was uploaded for a job: the longest time that the server accepts,
# because a job may run for many days.
INPUT_LIFE_S = 30 * 86_400
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_PART_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_COLUMNS = ("text", "query", "document", "image", "id", "keep", "chunks", "context", "documents", "parser")
_OF_CLIENT = ("input_format", "output", "on_upload", "idempotency_key")
_logger = logging.getLogger("sie_client")


class JobInfo(api.JobInfo, kw_only=True, frozen=True):
    """A job as the server describes it. It may have unknown states and request fields, which newer servers send."""

    state: str  # type: ignore[assignment]
    request: dict[str, Any]  # type: ignore[assignment]

    def request_map(self, name: str) -> dict[str, Any]:
        """Return a field of the request that is a map, such as `output`; an empty map if the field is missing."""
        value = self.request.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def has_ended(self) -> bool:
        """Return True if the job has ended. Its state does not change any more."""
        return self.state in ENDED


class JobPage(msgspec.Struct, kw_only=True):
    """Page of the list of jobs, newest first. `next`: the value of `after` for the next page, None on the last page."""

    data: list[JobInfo]
    next: str | None = None


class _RowPage(msgspec.Struct):
    rows: list[dict[str, Any]]


class SeenJob(Calls[D]):
    """State of a job when the client last read it from the server. `info` has all fields."""

    def __init__(self, info: JobInfo, driver: D, session: Session) -> None:
        super().__init__(driver, session)
        self.info = info

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def state(self) -> str:
        """Return the state: queued, planning, running, paused or finalizing; at the end completed, failed, cancelled or
        expired.
        """
        return self.info.state

    @property
    def has_ended(self) -> bool:
        return self.info.has_ended

    @property
    def counts(self) -> api.JobCounts:
        return self.info.counts

    def __repr__(self) -> str:
        rows = "?" if self.counts.rows is None else self.counts.rows
        return f"<{type(self).__name__} {self.id} {self.state}, {self.counts.done} of {rows} rows>"


def submitted(model: str, source: Any, options: Mapping[str, Any], session: Session) -> Plan[JobInfo]:
    """Upload `source` if it is a local file, send `POST /v1/jobs` and return the job. Delete the uploaded file if the
    server refuses the job (RequestError), or returns an older job with the same idempotency key. Raises TypeError for
    an unknown option.
    """
    names = JobOptions.__annotations__
    for name in options:
        if name not in names:
            like = difflib.get_close_matches(name, names, 1)
            raise TypeError(f"unexpected option {name!r}" + (f"; did you mean {like[0]!r}?" if like else ""))
    chosen = {name: value for name, value in options.items() if value is not None}
    place = _place(source)
    is_sent = isinstance(place, Path)
    if isinstance(place, Path):
        sent = yield from files.uploaded(place, files.PURPOSE, chosen.get("on_upload"), session, INPUT_LIFE_S)
        place = {"file": sent.id}
    try:
        body = _body(model, place, chosen)
        key = chosen.get("idempotency_key") or uuid.uuid4().hex
        reply = yield from _post("/v1/jobs", session, body, key)
    except RequestError:
        if is_sent:
            yield from _abandoned(place["file"], session)
        raise
    if is_sent and reply.request_map("input").get("file") != place["file"]:
        yield from _abandoned(place["file"], session)
    return reply


def _place(source: Any) -> Path | dict[str, str]:
    """Interpret the input of a job: return the path of a local file, or the request field for a file id or a URL.
    Raises InvalidInputError.
    """
    if isinstance(source, FileObject):
        return {"file": source.id}
    if isinstance(source, os.PathLike):
        return Path(source)
    if not isinstance(source, str) or not source:
        raise invalid(f"input: expected a path, a URL or the id of a file, got {type(source).__name__}")
    if "://" in source:
        return {"url": source}
    return {"file": source} if _FILE_ID.fullmatch(source) else Path(source)


def _body(model: str, place: dict[str, str], chosen: Mapping[str, Any]) -> dict[str, Any]:
    columns = {name: chosen[name] for name in _COLUMNS if name in chosen}
    if "input_format" in chosen:
        columns["format"] = chosen["input_format"]
    own = {name: value for name, value in chosen.items() if name not in (*_COLUMNS, *_OF_CLIENT)}
    if isinstance(own.get("deadline"), datetime):
        own["deadline"] = own["deadline"].timestamp()
    if "output" in chosen:
        own["output"] = {"url": chosen["output"]} if isinstance(chosen["output"], str) else dict(chosen["output"])
    return {"model": model, "input": {**place, **columns}, **own}


def _post(path: str, session: Session, body: Any, key: str) -> Plan[JobInfo]:
    """Send a POST with an idempotency key, so that a retry after a broken connection creates no second job."""
    info: JobInfo = yield from json_call("POST", path, session, body, headers={"idempotency-key": key}, type=JobInfo)
    return info


def _abandoned(file: str, session: Session) -> Plan[None]:
    """Delete an uploaded file with one attempt. Log a failure, raise no error: the server deletes expired files."""
    session, _ = session.for_call({"wait_for_capacity": False})
    try:
        yield from files.deleted(file, session)
    except SIEError as error:
        _logger.warning(
            "the uploaded file %s, which no job uses, could not be deleted; it is deleted when it expires: %s",
            file,
            error,
        )


def _path(job: str) -> str:
    return f"/v1/jobs/{identifier(job, 'job')}"


def get(job: str, session: Session) -> Plan[JobInfo]:
    return cast(JobInfo, (yield from json_call("GET", _path(job), session, type=JobInfo)))


def page(state: str | None, limit: int, after: str | None, session: Session) -> Plan[JobPage]:
    parameters = {"limit": limit, "after": after, "state": state}
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    jobs_page: JobPage = yield from json_call("GET", f"/v1/jobs?{query}", session, type=JobPage)
    if after is not None and jobs_page.next == after:
        raise ServerError("the server's list of jobs repeats a page, so it never ends", status=200)
    return jobs_page


def steered(job: str, action: Literal["pause", "resume", "cancel"], session: Session) -> Plan[JobInfo]:
    """Send `POST /v1/jobs/{job}/{action}`. Return the job. Raises ContentConflictError if the job has ended, except if
    an earlier attempt to cancel the job got no response and the job is now cancelled.
    """
    try:
        return cast(JobInfo, (yield from json_call("POST", f"{_path(job)}/{action}", session, type=JobInfo)))
    except ContentConflictError as error:
        if action == "cancel" and error.may_have_run:
            info = yield from get(job, session)
            if info.state == "cancelled":
                return info
        raise


def retried(job: str, session: Session) -> Plan[JobInfo]:
    """Send `POST /v1/jobs/{job}/retry`. Return the new job, which processes the rows that failed."""
    return (yield from _post(f"{_path(job)}/retry", session, None, uuid.uuid4().hex))


def deleted(job: str, session: Session) -> Plan[None]:
    yield from delete_call(_path(job), session, type=JobDeleted)


def rows(job: str, limit: int, failed: bool | None, session: Session) -> Plan[list[dict[str, Any]]]:
    query = urlencode({"limit": limit, **({} if failed is None else {"failed": str(failed).lower()})})
    reply: _RowPage = yield from json_call("GET", f"{_path(job)}/rows?{query}", session, type=_RowPage)
    return reply.rows


def manifest(job: str, session: Session) -> Plan[JobManifest]:
    """Return the manifest of `GET /v1/jobs/{job}/manifest`, with the entries of all its pages."""
    parts: list[JobPart] = []
    after: int | None = None
    while True:
        query = "" if after is None else f"?{urlencode({'after': after})}"
        document: JobManifest = yield from json_call("GET", f"{_path(job)}/manifest{query}", session, type=JobManifest)
        parts += document.parts
        if document.next is None:
            return msgspec.structs.replace(document, parts=parts)
        if after is not None and document.next <= after:
            raise ServerError(f"the server's manifest of {job} repeats a page, so it never ends", status=200)
        after = document.next


def waited(
    job: str, timeout_s: float | None, on_progress: Callable[[JobInfo], None] | None, session: Session
) -> Plan[JobInfo]:
    """Poll the job until it has ended. Return the job, also if it failed or was cancelled. Call `on_progress` with the
    job after each poll. Raises JobTimeoutError after `timeout_s`.
    """
    started_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        info = yield from get(job, session)
        if on_progress is not None:
            on_progress(info)
        if info.has_ended:
            return info
        left_s = MAX_PAUSE_S if timeout_s is None else timeout_s - (time.monotonic() - started_s)
        if left_s <= 0:
            raise JobTimeoutError(
                f"{info.id} has not ended within {timeout_s:g} s: its state is {info.state}, and the job continues",
                retryable=True,
                details={"job": info.id, "state": info.state},
            )
        yield Pause(min(pause_s, left_s))
        pause_s = min(MAX_PAUSE_S, pause_s * 1.5)


def completed(info: JobInfo) -> None:
    """Raise JobFailedError if the job ended in another state than `completed`."""
    if info.state == "completed":
        return
    why = f": {info.error.code}: {info.error.message}" if info.error else ""
    raise JobFailedError(
        f"{info.id} ended in the state {info.state}{why}",
        code=info.error.code if info.error else "",
        details={"job": info.id, "state": info.state, "param": info.error.param if info.error else ""},
    )


def downloaded(
    info: JobInfo,
    folder: str | os.PathLike[str],
    on_progress: Callable[[Progress], None] | None,
    session: Session,
) -> Plan[list[Path]]:
    """Write the output files of a job to a folder, then its manifest. Return the paths of the output files. A file that
    the folder already has with the right digest is not downloaded. Raises InvalidInputError if the output is at a URL,
    or the folder has the output of another job, and ServerError for invalid file names.
    """
    into = Path(folder)
    if url := info.request_map("output").get("url"):
        raise invalid(f"{info.id}: the job wrote its output files to {url}: read them there")
    yield BlockingWork(lambda: _claimed(into, info.id))
    document = yield from manifest(info.id, session)
    names = [part.name for part in document.parts]
    if len({*names, MANIFEST}) != len(names) + 1 or not all(map(_PART_NAME.fullmatch, names)):
        raise ServerError(
            f"the server's manifest of {info.id} has file names that are invalid or occur twice", status=200
        )
    fetching = Fetching(sum(part.bytes for part in document.parts), on_progress)
    plans: Iterator[Plan[Path]] = (_part(info.id, part, into, fetching, session) for part in document.parts)
    paths: list[Path] = yield Together(plans, PARTS)
    yield BlockingWork(lambda: _write(into / MANIFEST, msgspec.json.format(msgspec.json.encode(document))))
    return paths


def _part(job: str, part: JobPart, folder: Path, fetching: Fetching, session: Session) -> Plan[Path]:
    path = folder / part.name
    if (yield BlockingWork(lambda: _is_there(path, part))):
        fetching.came(part.bytes)
        return path
    query = urlencode({"name": part.name})
    yield from files.fetched(
        f"{_path(job)}/part?{query}", Arriving(path, part.bytes, part.sha256, fetching.came), session
    )
    return path


def _is_there(path: Path, part: JobPart) -> bool:
    with files.on_disk(path):
        if not path.is_file() or path.stat().st_size != part.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256


def _claimed(folder: Path, job: str) -> None:
    """Create the folder. Raises InvalidInputError if the folder has a MANIFEST that is not the manifest of this job."""
    with files.on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        there = folder / MANIFEST
        if not there.exists():
            return
        try:
            owner = msgspec.json.decode(there.read_bytes(), type=JobManifest).job
        except UNDECODABLE as error:
            raise invalid(f"{there} is not the manifest of a job: name another folder") from error
    if owner != job:
        raise invalid(f"{folder} has the files of {owner}: name another folder")


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with files.on_disk(path):
        partial.write_bytes(data)
        partial.replace(path)
