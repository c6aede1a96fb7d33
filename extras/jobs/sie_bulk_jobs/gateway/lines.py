"""Batches in OpenAI's form: each line of a file is a request, each line of the output an answer, and a group of lines
(shard) runs and is stored together.

    line ──► route of its url ──► Inference.answered with priority `bulk` ──► {"custom_id", "response", "error"}
    parts ──at the end──► a file of answers, a file of failures

`BatchJob.finish` writes the files, also for a batch that ends early. The format of the lines is in envelope.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from sie_bulk_jobs.datasets.answers import most_frequent
from sie_bulk_jobs.gateway import envelope
from sie_bulk_jobs.gateway.client import Halted, JobClient
from sie_bulk_jobs.gateway.envelope import BadLine, BatchCut, BatchRow, LineRequest
from sie_bulk_jobs.gateway.files import FileDescription
from sie_bulk_jobs.gateway.run import JobRun, ShardBroken, left_out
from sie_bulk_jobs.gateway.storage import JobStorage
from sie_bulk_jobs.records import FileRecord, JobRecord, Plan, RowSpan, ShardRecord
from sie_contracts.errors import ErrorInfo, NotFound, SIEError
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.results import FailedRequest
from sie_runtime.process import task_group

if TYPE_CHECKING:
    from sie_gateway.inference.handler import InferenceRoute


class BatchJob:
    """Run of one batch. `route_of` returns the POST route of a path, None if the path has no such route."""

    def __init__(
        self,
        workplace: JobStorage,
        job: JobRecord,
        client: JobClient,
        progress: JobRun,
        route_of: Callable[[str], InferenceRoute | None],
    ) -> None:
        assert job.batch is not None
        self._place = workplace
        self._job = job
        self._batch = job.batch
        self._client = client
        self._progress = progress
        self._route_of = route_of
        # numbers of the lines that repeat the custom_id of an earlier line
        self._repeated: frozenset[int] = frozenset()
        # shard number -> number of the input line -> output line, for shards that are not stored yet
        self._rows: dict[int, dict[int, BatchRow]] = {}

    async def plan(self) -> Plan:
        """Return the batch's plan (see `run.JobWork`). Raises InvalidInput for a file with no lines or too many."""
        plan = await self._place.plan() or await self._planned()
        self._repeated = frozenset(plan.repeated)
        return plan

    async def _planned(self) -> Plan:
        cut = BatchCut(self._batch.input_file_id)
        async for piece in await self._place.files.open(await self._input()):
            await asyncio.to_thread(cut.feed, piece)
        return await self._place.keep_plan(cut.plan())

    async def shard(self, number: int, span: RowSpan) -> ShardRecord:
        """Run the requests of one shard, store their output lines, and return the record of the shard."""
        data = await self._place.existing(_part(number))
        if data is not None:
            return await asyncio.to_thread(_record, number, span, data)
        requests = await asyncio.to_thread(envelope.requests_of, await self._text(span), span)
        record = await self._stored(number, span, await self._answers(number, requests))
        del self._rows[number]
        return record

    async def _answers(self, number: int, requests: Sequence[tuple[int, bytes]]) -> list[BatchRow]:
        """Run the requests that have no answer yet in `_rows`: an earlier attempt may have run some of them."""
        rows = self._rows.setdefault(number, {})
        there = [rows[place] for place, _ in requests if place in rows]
        self._progress.rows(number, len(there), sum(row.code is not None for row in there))
        async with task_group(SIEError, Halted) as tasks:
            for place, line in requests:
                if place not in rows:
                    tasks.create_task(self._line(number, place, line))
        return [rows[place] for place, _ in requests]

    async def piece(self, number: int, span: RowSpan, rows: range) -> None:
        """Run some requests of a shard, and store their output lines (see `run.JobWork`)."""
        requests = await asyncio.to_thread(envelope.requests_of, await self._text(span), span)
        answers = await self._answers(number, requests[rows.start : rows.stop])
        await self._place.keep_piece(number, rows, b"".join(row.text + b"\n" for row in answers))

    async def joined(self, number: int, span: RowSpan, rows_left_out: Collection[int]) -> ShardRecord:
        """Store the output lines of a shard whose pieces are stored (see `run.JobWork`)."""
        requests = await asyncio.to_thread(envelope.requests_of, await self._text(span), span)
        rows = self._rows.setdefault(number, {})
        for first, data in (await self._place.pieces(number)).items():
            for (place, _), row in zip(requests[first:], await asyncio.to_thread(envelope.written, data), strict=False):
                rows[place] = row
        for place, line in (requests[row] for row in rows_left_out):
            error = left_out()
            rows[place] = envelope.failure(envelope.custom_id_of(line), error.code, error.message)
        return await self.shard(number, span)

    async def _stored(self, number: int, span: RowSpan, rows: Sequence[BatchRow]) -> ShardRecord:
        data = await asyncio.to_thread(lambda: b"".join(row.text + b"\n" for row in rows))
        stored = await self._place.put_once(_part(number), data)
        return await asyncio.to_thread(_record, number, span, stored, rows if stored is data else None)

    async def finish(self, job: JobRecord, state: str, shards: dict[int, ShardRecord]) -> dict[str, Any]:
        """Store the answers of the shards that are not stored yet, then join all parts into a file of answers and a
        file of errors (see `run.JobWork`). A file without lines is not created. If the batch has expired, each
        unanswered request gets an error in the file of errors.
        """
        plan = await (self.plan() if state == "expired" else self._place.plan())
        spans = plan.spans if plan is not None else ()
        for number, span in enumerate(spans):
            if number not in shards and (shard := await self._left(number, span, state)) is not None:
                shards[number] = shard
        # without a plan (the batch ended before it was planned), the number of rows is unknown
        fields: dict[str, Any] = {} if plan is None else {"rows": sum(plan.rows)}
        if any(shard.rows > shard.failed for shard in shards.values() if shard.error is None):
            fields["output_file"] = await self._file(job, "output", self._lines(shards, failures=False))
        if any(shard.failed or shard.error is not None for shard in shards.values()):
            fields["error_file"] = await self._file(job, "errors", self._lines(shards, failures=True))
        return fields

    async def _left(self, number: int, span: RowSpan, state: str) -> ShardRecord | None:
        """Store the answers of a shard whose batch ends early. Return the shard's record; None if it has no answers."""
        data = await self._place.existing(_part(number))
        # an earlier leader stored the part, but died before it wrote the shard's record
        if data is not None:
            return await asyncio.to_thread(_record, number, span, data)
        answered = self._rows.get(number, {})
        if state != "expired":
            rows = [row for _, row in sorted(answered.items())]
            return await self._stored(number, span, rows) if rows else None
        try:
            requests = await asyncio.to_thread(envelope.requests_of, await self._text(span), span)
        except ShardBroken as error:
            return ShardRecord("", span.rows, error=error.info, source=_source(span))
        return await self._stored(number, span, [answered.get(place) or _expired(line) for place, line in requests])

    async def close(self) -> None:
        """Do nothing: a batch has no open connections (see `run.JobWork`)."""

    async def _lines(self, shards: dict[int, ShardRecord], *, failures: bool) -> AsyncIterator[bytes]:
        """Yield the lines with an answer, or with `failures` the lines with an error, in the order of the requests."""
        for _, shard in sorted(shards.items()):
            expected = shard.failed if failures else shard.rows - shard.failed
            if shard.error is not None:
                if failures:
                    message = f"{shard.source}, {shard.rows} requests: {shard.error.message}"
                    yield envelope.failure(None, shard.error.reason or shard.error.code, message).text + b"\n"
            elif expected:
                data = await self._place.existing(shard.name)
                if data is None:
                    raise NotFound(f"{shard.name}, a part of the output, no longer exists")
                if expected < shard.rows:
                    data = await asyncio.to_thread(_some, data, failures=failures)
                yield data

    async def _input(self) -> FileRecord:
        return await self._place.files.find(self._batch.input_file_id, lambda owner: True)

    async def _text(self, span: RowSpan) -> bytes:
        """Read the lines of a shard from the input file. Raises ShardBroken, StoreError."""
        try:
            return await self._place.files.range(await self._input(), span.start, span.end)
        except NotFound as error:
            raise ShardBroken(ErrorInfo(error.code, "the input file no longer exists", "input_missing")) from error

    async def _file(self, job: JobRecord, kind: str, data: AsyncIterator[bytes]) -> str:
        # The id depends only on the job, so that the next leader of the job stores the file under the same id. The id
        # begins with a time, because ids of files sort by time.
        rest = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._job.id} {kind}").hex[12:]
        file_id = f"file-{int(job.finalizing_s * 1000):012x}{rest}"
        expires_after = self._batch.output_expires_after
        expires_after_s = 0.0 if expires_after is None else expires_after.seconds
        about = FileDescription(f"{self._job.id}_{kind}.jsonl", "batch_output", expires_after_s)
        return (await self._place.files.create(self._job.owner, about, data, file_id)).id

    async def _line(self, shard: int, number: int, line: bytes) -> None:
        custom_id: str | None = None
        try:
            is_repeated = number in self._repeated
            request = await asyncio.to_thread(
                envelope.read, line, number, self._batch.endpoint, is_repeated=is_repeated
            )
            custom_id = request.custom_id
            route = self._route_of(request.path)
            if route is None:
                raise BadLine("invalid_url", f"line {number + 1}: url: this server has no such route for batches")
            row = await self._answered(request, route)
        except BadLine as error:
            row = envelope.failure(custom_id or envelope.custom_id_of(line), error.code, error.message)
        self._rows[shard][number] = row
        self._progress.rows(shard, 1, int(row.code is not None))

    async def _answered(self, request: LineRequest, route: InferenceRoute) -> BatchRow:
        calls: list[Call] = []

        async def attempt() -> EncodedReply:
            call = self._client.call()
            calls.append(call)
            call.path, call.model = request.path, route_model(route, request.path)
            call.labels["endpoint"] = route.endpoint
            try:
                return await self._client.inference.answered(call, route, request.body)
            finally:
                if call.charge is not None:
                    call.charge.refund()

        await self._client.room.enter(1)
        began_s = asyncio.get_running_loop().time()
        try:
            answer = await self._client.patiently(attempt)
        except (SIEError, FailedRequest) as error:
            call = calls[-1]
            cause, errors = (error.error, error.errors) if isinstance(error, FailedRequest) else (error, None)
            status, body = call.shape(cause, call.id, errors)
            return envelope.answer(request.custom_id, call.id, status, orjson.dumps(body))
        finally:
            self._client.room.leave(1, asyncio.get_running_loop().time() - began_s)
        call = calls[-1]
        text = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        tokens = call.finished.usage["total_tokens"] if call.finished is not None else 0
        return envelope.answer(request.custom_id, call.id, answer.status, text, tokens)


def _part(number: int) -> str:
    """Return the name of a shard's object. Sorted names are in the order of the shards."""
    return f"part-{number:06}.jsonl"


def _source(span: RowSpan) -> str:
    return f"{span.source}:{span.first + 1}"


def _some(data: bytes, *, failures: bool) -> bytes:
    """Return the lines of a part that have an error (with `failures`), or the lines without an error."""
    return b"".join(row.text + b"\n" for row in envelope.written(data) if (row.code is not None) == failures)


def _record(number: int, span: RowSpan, data: bytes, answered: Sequence[BatchRow] | None = None) -> ShardRecord:
    """Return the record of a stored shard. `answered`: the rows of `data`; if None, `data` is decoded to rows."""
    rows = envelope.written(data) if answered is None else answered
    codes = Counter(row.code for row in rows if row.code is not None)
    return ShardRecord(
        _part(number),
        len(rows),
        len(data),
        hashlib.sha256(data).hexdigest(),
        failed=codes.total(),
        codes=most_frequent(codes),
        tokens=sum(row.tokens for row in rows),
        source=_source(span),
    )


def _expired(line: bytes) -> BatchRow:
    return envelope.failure(
        envelope.custom_id_of(line), "batch_expired", "the batch expired before this request was answered"
    )


def route_model(route: InferenceRoute, path: str) -> str | None:
    """Return the model in the path of a request; None if the body names the model."""
    head, placeholder, _ = route.path.partition("{model:path}")
    return path[len(head) :] if placeholder else None
