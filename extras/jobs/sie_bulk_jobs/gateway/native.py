"""Native jobs: one model answers the rows of files in shards (groups of rows), and each shard becomes one output file
(part) in Parquet, JSON Lines or NumPy. A job with a sink (a vector database) also writes the vectors into this
database.

rows of input files ──► inputs (a document is first parsed to its text) ──► each distinct input once: answer from the
cache, or from the model (RowValues) ──► Shard ──► vectors are written to the sink ──► part, created once
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sie_bulk_jobs.datasets import manifests, parts, plans, shards, templates
from sie_bulk_jobs.datasets.answers import About, OutputLine, RowAnswer, lines_of, shard_of
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.rows import InputRow, read
from sie_bulk_jobs.datasets.sizes import SpanSize
from sie_bulk_jobs.gateway import segments
from sie_bulk_jobs.gateway.client import Halted, JobClient
from sie_bulk_jobs.gateway.run import JobRun, ShardBroken, broken_parts, left_out
from sie_bulk_jobs.gateway.segments import StoredAnswers
from sie_bulk_jobs.gateway.storage import JobStorage
from sie_bulk_jobs.gateway.values import (
    Bounds,
    DocumentTexts,
    ModelInput,
    RowValues,
    Unique,
    bounds,
    document_bounds,
    unique,
)
from sie_bulk_jobs.records import Again, JobRecord, Plan, RowSpan, ShardRecord, Unread
from sie_bulk_jobs.sinks.sink import (
    CollectionMismatch,
    CollectionMissing,
    CollectionRefused,
    Kind,
    Output,
    RowsRefused,
    Sink,
    SinkRows,
    SinkUnsuitable,
    SparseRow,
    Widths,
)
from sie_contracts.api import jobs as api
from sie_contracts.errors import ContentConflict, ErrorInfo, InvalidInput, NotFound
from sie_contracts.wire.messages import TextChunks
from sie_gateway.inference import chunk_fields
from sie_gateway.inference.answers import DIGEST_BYTES, CachePolicy, space_of
from sie_gateway.inference.body import RequestItem
from sie_store.object_stores import AccessRefused, StoreError

PARSED_BY = "+"  # separates the fingerprints of the model and of the parser
SPAN_TOKENS = 16  # tokens that `_bounds` assumes for a chunk if the chunks come from a column of the input
UNTRIMMED = 0.1  # a job removes old segments of the cache after it has written this share of the cache's size limit
REFUSALS = (AccessRefused, CollectionMismatch, CollectionMissing, CollectionRefused, RowsRefused, SinkUnsuitable)
_logger = logging.getLogger("sie.gateway.jobs")


class AnsweredShard(NamedTuple):
    """Computed but unwritten answers of a shard (rows of one output object). `data`: bytes of the object. `reused`:
    number of answers copied from an equal row or from the cache. `unsent`: rows that the database does not have yet, or
    None.
    """

    data: bytes
    reused: int
    unsent: SinkRows | None


class Before(NamedTuple):
    """Earlier job whose failed rows a new job retries."""

    job: JobRecord
    workplace: JobStorage
    output: Place
    shards: dict[int, ShardRecord]


class JobPlaces(NamedTuple):
    """Places where a job reads and writes. `before` returns an earlier job by its id, for retries."""

    source: Place
    output: Place
    sink: Sink | None
    before: Callable[[str], Awaitable[Before]]


class NativeJob:
    """Run of one native job. `cache_bytes`: limit of the cache of all jobs. `policy` selects the answers to cache."""

    def __init__(
        self,
        workplace: JobStorage,
        job: JobRecord,
        client: JobClient,
        progress: JobRun,
        places: JobPlaces,
        *,
        cache_bytes: int,
        policy: CachePolicy,
    ) -> None:
        assert job.request is not None
        self._workplace = workplace
        self._job = job
        self._request = job.request
        self._client = client
        self._progress = progress
        self._places = places
        self._cache_bytes = cache_bytes if job.request.cache else 0
        self._cache_policy = policy
        self._cache: StoredAnswers | None = None
        self._kept_bytes = 0  # bytes written to the cache since the last trim
        self._opening = asyncio.Lock()
        self._count = 0  # number of parts of the complete output
        self._planned_rows: tuple[int, ...] = ()  # planned number of rows of each part
        self._again: tuple[Again, ...] = ()
        # true after the sink has created the collection, or has checked that an existing collection fits the vectors
        self._is_prepared = False
        self._computed: dict[int, int] = {}  # shard number -> number of inputs that the model ran
        self._preparing = asyncio.Lock()
        # shard number -> computed answers, until the database and the store have them
        self._unwritten: dict[int, AnsweredShard] = {}
        model, _, parser = job.fingerprint.partition(PARSED_BY)
        self._values = RowValues(client, job.model, job.request.operation, job.request.params, model)
        # requests to the parser omit the machine profile of the job, because the parser may run on other machines than
        # the model
        self._documents = (
            DocumentTexts(client.sibling(without="x-sie-machine-profile"), job.parser, parser) if job.parser else None
        )

    async def plan(self) -> Plan:
        """Return the stored plan of the input; the first call creates and stores it (see `run.JobWork`)."""
        plan = await self._workplace.plan()
        if plan is None:
            await shards.claim(self._places.output, _owner(self._job))
            plan = await self._workplace.keep_plan(await (self._retried() if self._job.retry_of else self._planned()))
        self._count, self._again, self._planned_rows = len(plan.spans), plan.again, plan.rows
        return plan

    async def _planned(self) -> Plan:
        spans: list[RowSpan] = []
        unread: list[Unread] = []
        request = self._request
        rows, text_bytes = self._bounds()
        async for planned in plans.plan(self._places.source, request.input, rows, text_bytes=text_bytes):
            if isinstance(planned, plans.Broken):
                unread.append(Unread(planned.source, planned.error))
            else:
                spans.extend(planned)
        return Plan(tuple(spans), tuple(unread))

    def _bounds(self) -> Bounds:
        """Return the largest number of rows and of text bytes of a shard. Raises SIEError, Halted."""
        request = self._request
        # score and extract need no limit of bytes: their answers are at most as large as the texts
        if request.operation != "encode":
            return Bounds(request.shard_rows, None)
        reads_images = templates.reads_images(request.input)
        item = RequestItem(None, modalities=("image",), images=(b"",)) if reads_images else RequestItem("")
        _, understood = self._client.understood(self._job.model, request.operation, request.params, [item])
        chunks, chunk_tokens = request.input.chunks, 0
        if chunks is not None:
            chunk_tokens = SPAN_TOKENS if isinstance(chunks, str) else chunk_fields.step_of(chunks)
        has_images = reads_images or bool(request.input.image)
        if request.input.documents:
            fit = document_bounds(understood, chunk_tokens)
        else:
            fit = bounds(understood, has_images=has_images, chunk_tokens=chunk_tokens)
        return fit._replace(rows=min(fit.rows, request.shard_rows))

    async def _retried(self) -> Plan:
        """Return a plan of those shards of the earlier job that have failed rows. Raises NotFound, StoreError."""
        before = await self._before(self._job.retry_of)
        plan = await before.workplace.plan()
        if plan is None:
            raise NotFound("the plan of the job to retry was deleted: submit a new job", param="job")
        failed = [number for number, shard in sorted(before.shards.items()) if shard.failed or shard.error is not None]
        again = []
        for number in failed:
            shard = before.shards[number]
            earlier = plan.again[number].parts if plan.again else ()
            rows = shard.failed if shard.error is None else shard.rows
            again.append(Again((*earlier, (before.job.id, shard.name)), rows))
        # check now that the earlier jobs exist: `_rows` reads their parts, so the new job could not run if one of them
        # was deleted
        for job_id in sorted({job_id for rows_again in again for job_id, part in rows_again.parts if part}):
            await self._before(job_id)
        return Plan(tuple(plan.spans[number] for number in failed), again=tuple(again))

    async def _before(self, job_id: str) -> Before:
        """Return an earlier job of this retry. Raises NotFound if it was deleted."""
        try:
            return await self._places.before(job_id)
        except NotFound as error:
            message = f"{job_id}, an earlier job of this retry, was deleted: submit a new job for the rows that failed"
            raise NotFound(message, param="job") from error

    async def _rows(
        self, number: int, span: RowSpan, chosen: range | None = None, rows_left_out: Collection[int] = ()
    ) -> list[InputRow]:
        """Return the rows of a shard, or only the rows `chosen`; for a retry, rows are those that failed in each
        earlier job. `rows_left_out` are not read, and have an error. Raises InvalidInput, NotFound, ContentConflict,
        StoreError.
        """
        places = list(range(span.rows))
        for job_id, part in self._again[number].parts if self._again else ():
            if part:
                before = await self._before(job_id)
                assert before.job.request is not None
                data = await shards.bytes_of(before.output, part)
                outcomes = await outcomes_of(part, data, before.job.request.output.format)
                if len(outcomes) != len(places):
                    raise _damaged(part, f"it has {len(outcomes)} rows instead of {len(places)}")
                places = [place for place, outcome in zip(places, outcomes, strict=True) if outcome.error is not None]
        faults = {places[row]: left_out() for row in rows_left_out}
        if chosen is not None:
            places = places[chosen.start : chosen.stop]
        return await read(self._places.source, span, self._request.input, places, faults)

    async def piece(self, number: int, span: RowSpan, rows: range) -> None:
        """Compute and store the answers to some rows of a shard (see `run.JobWork`). Rows with an error are not stored,
        and answered again by `joined`.
        """
        read_rows = await self._read_rows(number, span, rows)
        answers, _ = await self._answers(number, read_rows, {})
        good = {
            place.to_bytes(DIGEST_BYTES, "big"): answer
            for place, answer in zip(rows, answers, strict=True)
            if answer.error is None
        }
        data = await asyncio.to_thread(segments.segment, good)
        await self._workplace.keep_piece(number, rows, self._fingerprint().encode() + b"\n" + data)

    async def _stored_answers(self, number: int) -> dict[int, RowAnswer]:
        """Return the answers that `piece` has stored for a shard, by row. Raises Halted, StoreError."""
        answers: dict[int, RowAnswer] = {}
        for first, data in (await self._workplace.pieces(number)).items():
            fingerprint, _, packed = data.partition(b"\n")
            self._check(fingerprint.decode())
            segment = segments.CacheSegment(packed)
            places = [(int.from_bytes(digest, "big"), at) for at, digest in enumerate(segment.digests)]
            name = f"rows of shard {number} from {first} on"
            answers |= await asyncio.to_thread(segments.values_in, segment, places, name)
        return answers

    async def shard(self, number: int, span: RowSpan) -> ShardRecord:
        """Compute the answers of one shard, write its part of the output, and return the record of the shard."""
        return await self._shard(number, span, None)

    async def joined(self, number: int, span: RowSpan, rows_left_out: Collection[int]) -> ShardRecord:
        """Write the part of a shard whose pieces are stored (see `run.JobWork`)."""
        return await self._shard(number, span, rows_left_out)

    async def _shard(self, number: int, span: RowSpan, rows_left_out: Collection[int] | None) -> ShardRecord:
        name = parts.part_name(number, self._count, self._request.output.format)
        record = await shards.existing(self._places.output, name, self._request.output.format)
        if record is not None:  # an earlier leader wrote the part, but died before it wrote the record of the shard
            self._check(record.fingerprint)
        if record is None or self._places.sink is not None:
            record = await self._answer_shard(number, name, span, rows_left_out)
        if record.rows != self._planned_rows[number]:
            raise shards.in_use(
                f"{name} exists with {record.rows} rows, but in this job it has {self._planned_rows[number]}"
            )
        return msgspec.structs.replace(record, source=_named(span))

    def _fingerprint(self) -> str:
        """Return the fingerprint of the model, or `MODEL+PARSER` for a job with documents; empty while unknown."""
        model = self._values.fingerprint
        return f"{model}{PARSED_BY}{self._documents.fingerprint}" if model and self._documents else model

    def _check(self, fingerprint: str) -> None:
        """Raise Halted if the fingerprint of a part differs from that of the job's earlier answers."""
        model, _, parser = fingerprint.partition(PARSED_BY)
        self._values.check(model)
        if self._documents is not None:
            self._documents.check(parser)

    async def _answer_shard(
        self, number: int, name: str, span: RowSpan, rows_left_out: Collection[int] | None
    ) -> ShardRecord:
        """Compute the answers of a shard, write the vectors into the database, then write the part. A call after a
        failed call for the same shard continues with the failed step.
        """
        answered = self._unwritten.get(number)
        if answered is None:
            answered = self._unwritten[number] = await self._answered(number, span, rows_left_out)
        else:
            about = await asyncio.to_thread(parts.inspect, answered.data, self._request.output.format)
            self._progress.rows(number, about.rows, about.failed)
        if answered.unsent is not None:
            await self._sent(answered.unsent)
            self._unwritten[number] = answered._replace(unsent=None)
        record = await shards.put_once(self._places.output, name, answered.data, self._request.output.format)
        del self._unwritten[number]
        # set `reused` here, because a part in JSON Lines does not store it
        return msgspec.structs.replace(record, reused=answered.reused)

    async def _read_rows(
        self, number: int, span: RowSpan, chosen: range | None = None, rows_left_out: Collection[int] = ()
    ) -> list[InputRow]:
        try:
            rows = await self._rows(number, span, chosen, rows_left_out)
        except (InvalidInput, NotFound, ContentConflict) as error:
            raise ShardBroken(error.info()) from error
        return rows if self._documents is None else await self._documents.parsed(rows)

    async def _answered(self, number: int, span: RowSpan, rows_left_out: Collection[int] | None) -> AnsweredShard:
        rows = await self._read_rows(number, span, rows_left_out=rows_left_out or ())
        piece_answers = {} if rows_left_out is None else await self._stored_answers(number)
        answers, reused = await self._answers(number, rows, piece_answers)
        unsent = None
        if self._places.sink is not None:
            unsent, reasons = await asyncio.to_thread(_for_sink, self._places.sink, rows, answers)
            for place, reason in reasons.items():
                answers[place] = RowAnswer(ErrorInfo("SINK_REFUSED", reason, param="output.sink"))
            self._progress.rows(number, 0, len(reasons))
        about = About(self._job.id, number, self._job.model, self._fingerprint(), reused=reused)
        shard = await asyncio.to_thread(shard_of, about, rows, answers, self._request.input.keep)
        try:
            SpanSize(span).add(0, parts.id_bytes(shard, self._request.output.format))
        except InvalidInput as error:
            raise ShardBroken(error.info()) from error
        data = await asyncio.to_thread(parts.encode, shard, self._request.output.format)
        return AnsweredShard(data, reused, unsent)

    async def _answers(
        self, number: int, rows: Sequence[InputRow], piece_answers: Mapping[int, RowAnswer]
    ) -> tuple[list[RowAnswer], int]:
        """Return the answer to each row, and how many answers were copied from an equal row or from the cache.
        `piece_answers`: answers that were computed before, by row.
        """
        answers, inputs = await asyncio.to_thread(self._inputs, rows)
        for place, answer in piece_answers.items():
            if inputs.pop(place, None) is not None:
                answers[place] = answer
        places = list(inputs)
        once = await asyncio.to_thread(unique, list(inputs.values()))
        results = await self._unique(number, once)
        for place, unique_place in zip(places, once.places, strict=True):
            answers[place] = results[unique_place]
        failed = sum(answer.error is not None for place, answer in enumerate(answers) if place not in inputs)
        self._progress.rows(number, len(rows) - len(places), failed)
        return answers, len(once.places) - self._computed.pop(number, len(once.inputs))

    def _inputs(self, rows: Sequence[InputRow]) -> tuple[list[RowAnswer], dict[int, ModelInput]]:
        """Return (answers, inputs). `answers` has one answer for each row: the error of a faulty row, or an empty
        answer. `inputs`: index of a row without a fault -> input.
        """
        answers: list[RowAnswer] = []
        inputs: dict[int, ModelInput] = {}
        for place, row in enumerate(rows):
            fault = row.fault
            if fault is None:
                try:
                    inputs[place] = _input(row, self._request)
                except InvalidInput as error:
                    fault = error.info()
            answers.append(RowAnswer(error=fault))
        return answers, inputs

    async def _unique(self, number: int, once: Unique) -> list[RowAnswer]:
        weights = np.bincount(once.places, minlength=len(once.inputs)).tolist() if once.places else []

        def done(places: Sequence[int], answers: Sequence[RowAnswer]) -> None:
            rows = sum(weights[place] for place in places)
            failed = sum(
                weights[place] for place, answer in zip(places, answers, strict=True) if answer.error is not None
            )
            self._progress.rows(number, rows, failed)

        cache = await self._opened(once)
        cached = await cache.find(once.digests) if cache is not None else {}
        if cached:
            done(list(cached), list(cached.values()))
        missing = [place for place in range(len(once.inputs)) if place not in cached]
        fresh = await self._values.answers_of(
            [once.inputs[place] for place in missing],
            lambda places, answers: done([missing[place] for place in places], answers),
        )
        computed = dict(zip(missing, fresh, strict=True))
        self._computed[number] = len(computed)
        if cache is not None:
            good = {once.digests[place]: answer for place, answer in computed.items() if answer.error is None}
            await self._keep(cache, number, good)
        every = {**cached, **computed}
        return [every[place] for place in range(len(once.inputs))]

    async def _keep(self, cache: StoredAnswers, number: int, good: dict[bytes, RowAnswer]) -> None:
        """Write answers to the cache for later jobs. Only log a failure: later jobs then compute the answers again."""
        try:
            self._kept_bytes += await cache.keep(f"{self._job.id}-{number:06}", good)
        except StoreError as error:
            _logger.warning("job %s cannot cache the answers of shard %s: %s", self._job.id, number, error)
        if self._kept_bytes > self._cache_bytes * UNTRIMMED:
            await self._trim()

    async def _opened(self, once: Unique) -> StoredAnswers | None:
        """Return the cache for the model's fingerprint. If the fingerprint is unknown, run the first input, whose
        answer reports the fingerprint. Return None if the job must not use a cache, or if the first input fails.
        """
        if not self._cache_bytes or not once.inputs:
            return None
        async with self._opening:
            if self._cache is None:
                if not self._values.fingerprint:
                    await self._values.answers_of(once.inputs[:1], lambda places, answers: None)
                if not self._values.fingerprint:  # the first input failed
                    return None
                request = self._request
                call, understood = self._client.understood(
                    self._job.model, request.operation, request.params, [once.inputs[0].item]
                )
                owner = self._cache_policy.owner(call.grant, understood.resolved.entry.id)
                if owner is None:
                    return None
                space = space_of(owner, self._values.fingerprint, request.operation, understood.options.run)
                cache = StoredAnswers(self._workplace.store, space)
                await cache.open()
                self._cache = cache
        return self._cache

    async def _sent(self, rows: SinkRows) -> None:
        """Write the vectors into the database. If the collection is missing, create it again and write the vectors once
        more. Raises Halted, StoreError.
        """
        try:
            try:
                await self._upserted(rows)
            except CollectionMissing as error:
                _logger.warning("job %s creates a missing collection again: %s", self._job.id, error)
                self._is_prepared = False
                await self._upserted(rows)
        except REFUSALS as error:
            message = f"{self._request.output.sink}: {error}"
            raise Halted(ErrorInfo("SINK_REFUSED", message, param="output.sink")) from error

    async def _upserted(self, rows: SinkRows) -> None:
        sink = self._places.sink
        assert sink is not None
        async with self._preparing:
            if not self._is_prepared:
                unfiltered = () if self._request.input.chunks is None else ("text", "start", "end")
                kinds = _kinds(rows.payloads, unfiltered)
                entry = self._client.inference.resolve(self._job.model, self._client.call()).entry
                await sink.prepare(self._request.output.collection, _widths(rows, entry.outputs), kinds)
                self._is_prepared = True
        await sink.upsert(rows)

    async def close(self) -> None:
        """Close the connection to the database (see `run.JobWork`)."""
        if self._places.sink is not None:
            await self._places.sink.close()

    async def finish(self, job: JobRecord, state: str, shards: dict[int, ShardRecord]) -> dict[str, Any]:
        """Write the manifest (see `run.JobWork`). Without shards, only a completed job gets a manifest."""
        if not shards and state != "completed":
            return {}
        plan = await self._workplace.plan()
        whole = await asyncio.to_thread(manifest, job, state, shards, plan.unread if plan else ())
        await manifests.write(self._places.output, whole)
        if self._cache_bytes:
            await self._trim()
        return {}

    async def _trim(self) -> None:
        """Remove old segments of the cache. If the store fails, a later trim removes them."""
        self._kept_bytes = 0
        try:
            await segments.trim(self._workplace.store, self._cache_bytes)
        except StoreError as error:
            _logger.warning("job %s cannot remove old cached answers: %s", self._job.id, error)


async def outcomes_of(name: str, data: bytes, format: api.OutputFormat) -> list[parts.Outcome]:
    """Return the result of each row of the part `name`. Raises ContentConflict if the part is damaged."""
    try:
        return await asyncio.to_thread(parts.outcomes, data, format)
    except parts.PartFault as error:
        raise _damaged(name, str(error)) from error


def _damaged(name: str, why: str) -> ContentConflict:
    return ContentConflict(f"{name}: {why}: restore the file, or submit a new job")


def _owner(job: JobRecord) -> str:
    """Return the text that marks an output folder as the folder of this job. The id alone is not unique: a new job with
    the Idempotency-Key of a deleted job gets the same id.
    """
    return f"{job.id} {job.created_s!r}"


def manifest(job: JobRecord, state: str, shards: dict[int, ShardRecord], unread: Sequence[Unread]) -> api.JobManifest:
    """Describe the output of a job: its files (`parts`), and the pieces of the input that could not be read
    (`broken`).
    """
    assert job.request is not None
    good = [shards[number] for number in sorted(shards) if shards[number].error is None]
    return api.JobManifest(
        job=job.id,
        state=state,
        url=job.output_url,
        format=job.request.output.format,
        model=job.model,
        fingerprint=next((shard.fingerprint for shard in good if shard.fingerprint), ""),
        rows=sum(shard.rows for shard in good),
        failed=sum(shard.failed for shard in good),
        parts=[msgspec.convert(shard, api.JobPart, from_attributes=True) for shard in good],
        broken=broken_parts(shards, unread),
    )


def _for_sink(
    sink: Sink, rows: Sequence[InputRow], answers: Sequence[RowAnswer]
) -> tuple[SinkRows | None, dict[int, str]]:
    """Return (unsent, reasons) for the rows whose answer is not an error. `unsent`: rows to write into the database, or
    None. `reasons`: index in `rows` -> reason why the database cannot store the row.
    """
    places: list[int] = []
    lines: list[OutputLine] = []
    for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if answer.error is None:
            row_lines = lines_of([row], [answer])
            lines += row_lines
            places += [place] * len(row_lines)
    if not lines:
        return None, {}
    unsent = _sink_rows(lines)
    reasons = {places[number]: reason for number, reason in sink.refusals(unsent).items()}
    if not reasons:
        return unsent, {}
    lines = [line for line, place in zip(lines, places, strict=True) if place not in reasons]
    return (_sink_rows(lines) if lines else None), reasons


def _sink_rows(lines: Sequence[OutputLine]) -> SinkRows:
    arrays = [line.answer.arrays for line in lines]
    dense = [row["dense"] for row in arrays] if "dense" in arrays[0] else [np.empty(0)] * len(arrays)
    return SinkRows(
        [line.unique_id for line in lines],
        np.stack(dense).astype(np.float32, copy=False),
        [_payload(line) for line in lines],
        [SparseRow.from_arrays(row["sparse.indices"], row["sparse.values"]) for row in arrays]
        if "sparse.indices" in arrays[0]
        else (),
        [row["multivector"].astype(np.float32, copy=False) for row in arrays] if "multivector" in arrays[0] else (),
    )


def _widths(rows: SinkRows, outputs: Mapping[str, int]) -> Widths:
    """Return the widths of the vectors in `rows`. `outputs`: kind of vector -> width, from the model's entry."""
    widths: dict[Output, int] = {}
    if rows.vectors.shape[1]:
        widths["dense"] = rows.vectors.shape[1]
    if rows.sparse:
        widths["sparse"] = outputs["sparse"]
    if rows.multivectors:
        widths["multivector"] = rows.multivectors[0].shape[1]
    return widths


def _payload(line: OutputLine) -> dict[str, Any]:
    if line.chunk is None:
        return line.row.copied
    of_chunk = {name: value for name, value in line.chunk.columns.items() if name != "row_tokens"}
    return {**line.row.copied, "id": line.row.id, **of_chunk}


def _kinds(rows: Sequence[Mapping[str, Any]], unfiltered: Collection[str]) -> dict[str, Kind]:
    """Return column -> type, for columns whose values all have one type (str, bool, int or float). Omit the columns in
    `unfiltered`, because searches do not filter by them.
    """
    kinds: dict[type, Kind] = {str: "keyword", bool: "bool", int: "integer", float: "float"}
    names = [name for name in rows[0] if name not in unfiltered]
    column_types = {name: {type(row.get(name)) for row in rows} - {type(None)} for name in names}
    return {
        name: kinds[next(iter(types))]
        for name, types in column_types.items()
        if len(types) == 1 and types <= kinds.keys()
    }


def _named(span: RowSpan) -> str:
    """Return the name of a shard's input in the manifest: the object, and the numbers of its rows, counted from 0."""
    return f"{span.source or span.after or 'images'}:{span.first}-{span.first + span.rows - 1}"


def _input(row: InputRow, request: api.JobRequest) -> ModelInput:
    """Return the input of a row. Raises InvalidInput if the chunks of the row are invalid for its text."""
    text, query = (row.document, row.query) if request.operation == "score" else (row.text, None)
    modalities = ("image",) if row.images else ()
    chunks = chunks_of(request.input, text, row.chunks)
    return ModelInput(RequestItem(text, modalities=modalities, images=row.images, chunks=chunks), query)


def chunks_of(source: api.JobInput, text: str | None, value: Any) -> TextChunks | None:
    """Return the chunks of a text: from the job's rule, or from `value`, which is the row's chunk column. Return None
    if there are no chunks. Raises InvalidInput.
    """
    if source.chunks is None:
        return None
    chunks = value if isinstance(source.chunks, str) else msgspec.structs.asdict(source.chunks)
    return chunk_fields.read({"chunks": chunks, "context": source.context}, text, "input")
