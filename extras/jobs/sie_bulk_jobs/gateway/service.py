"""Operations of clients on jobs and batches: submit, list, show, pause, resume, cancel, retry, delete."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from sie_broker import BrokerError
from sie_broker.record import LeaderLease
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.pace import forecast
from sie_bulk_jobs.gateway.run import expires_s, window_s
from sie_bulk_jobs.records import JobRecord, check_request
from sie_contracts.api import batches as batches_api
from sie_contracts.api import jobs as api
from sie_contracts.errors import (
    ContentConflict,
    ErrorInfo,
    IdempotencyMismatch,
    InvalidInput,
    NotFound,
    QueueUnavailable,
    SIEError,
)
from sie_gateway.inference.call import Call
from sie_runtime.http.asgi import uuid7
from sie_runtime.process import Stop, Trouble
from sie_store.object_stores import StoreError

MAX_WINDOW_S = 30 * 86_400.0
_BATCH_STATES: dict[str, batches_api.BatchState] = {
    "queued": "validating",
    "planning": "validating",
    "running": "in_progress",
    "finalizing": "finalizing",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}


@dataclass(eq=False)
class JobService:
    """Operations on the jobs of all owners. `check` returns a job with its model resolved, or raises SIEError.
    `workers` returns the number of workers in the lane of a job. `forget` removes the objects of a job. `content`
    returns (name, digest) of an input file, or None if the file was removed.
    """

    ledger: JobLedger
    check: Callable[[Call, JobRecord], Awaitable[JobRecord]]
    workers: Callable[[JobRecord], int]
    forget: Callable[[JobRecord], Awaitable[None]]
    content: Callable[[str], tuple[str, str] | None]
    now_s: Callable[[], float]

    async def submit(self, call: Call, request: api.JobRequest, *, retry_of: str = "", **fields: str) -> api.JobInfo:
        """Store a new job; for a repeated Idempotency-Key, return the earlier job. `retry_of`: id of the job whose
        failed rows the new job retries. `fields`: further fields of the new record. Raises SIEError.
        """
        job_id = self._new_id(call, "job-")
        stored = self._existing(call, job_id)
        if stored is None:
            stored = await self._create(await self._new(call, job_id, request=request, retry_of=retry_of, **fields))
        if stored.request is None or stored.retry_of != retry_of or not self._is_same(stored.request, request):
            raise IdempotencyMismatch("Idempotency-Key: it was used for another job", param="Idempotency-Key")
        return self.as_info(stored)

    def _is_same(self, request: api.JobRequest, previous: api.JobRequest) -> bool:
        """Return True for equal requests. Files of equal name and bytes are equal: a client may upload a file twice."""
        if request != previous and request.input.file and previous.input.file:
            content = self.content(request.input.file)
            if content is not None and content == self.content(previous.input.file):
                previous = replace(previous, input=replace(previous.input, file=request.input.file))
        return request == previous

    def page(self, call: Call, limit: int, after: str, states: Collection[str]) -> api.JobPage:
        """Return up to `limit` of the caller's jobs in `states`, newest first. `after`: id of the last job of the
        previous page; empty for the first page. Raises NotFound if `after` is unknown.
        """
        jobs, more = self._page(call, limit, after, lambda job: job.request is not None and job.state in states)
        return api.JobPage(data=[self.as_info(job) for job in jobs], next=jobs[-1].id if more else None)

    def find(self, call: Call, job_id: str) -> JobRecord:
        """Return a job of the caller. Raises NotFound, also for a job of another key."""
        job = self.ledger.find(job_id)
        if not call.grant.owns(job.owner) or job.request is None:
            raise NotFound("there is no such job", param="job")
        return job

    async def set_command(self, call: Call, job_id: str, command: str) -> api.JobInfo:
        """Store a command of the owner in the record of a job: `run`, `pause` or `cancel`. Raises NotFound,
        QueueUnavailable, and ContentConflict if the job has ended.
        """
        self.find(call, job_id)

        def changed(job: JobRecord) -> JobRecord:
            if job.ended:
                raise ContentConflict(f"the job is {job.state} and cannot be changed any more", param="job")
            if command == "run" and job.state == "paused":
                job = replace(job, state="queued", error=None)
                # An administrator who resumes a job becomes its owner, because a job cannot run with a removed key, and
                # the key of the earlier owner may be removed.
                if "admin" in call.grant.scopes:
                    job = replace(job, owner=call.grant.key, owner_name=call.grant.name)
            cancelling_s = self.now_s() if command == "cancel" else job.cancelling_s
            return replace(job, command=command, cancelling_s=cancelling_s, updated_s=self.now_s())

        async with broker_errors_mapped():
            return self.as_info(await self.ledger.change(job_id, changed))

    async def retry(self, call: Call, job_id: str) -> api.JobInfo:
        """Create a job for the failed rows of an ended job. Raises NotFound, ContentConflict, errors of `submit`."""
        job = self.find(call, job_id)
        if job.request is None or not job.ended:
            raise ContentConflict(f"the job is {job.state}: only a job that has ended can be retried", param="job")
        if not job.failed:
            raise ContentConflict("no row of the job failed, so there is nothing to retry", param="job")
        # Use the model of the existing answers: the alias in the request may name another model now, and vectors of two
        # models cannot be compared.
        return await self.submit(call, job.request, retry_of=job.id, model=job.model, parser=job.parser)

    async def delete(self, call: Call, job_id: str) -> api.JobDeleted:
        """Delete an ended job and its output in the payload store, but no output at another URL. Raises NotFound,
        ContentConflict, QueueUnavailable.
        """
        job = self.find(call, job_id)
        if not job.ended:
            raise ContentConflict(f"the job is {job.state}: cancel it first", param="job")
        await self.remove(job)
        return api.JobDeleted(id=job_id)

    async def remove(self, job: JobRecord) -> None:
        """Remove the objects of a job, then its records, so that an error leaves no object without a record. Raises
        QueueUnavailable.
        """
        async with broker_errors_mapped():
            await self.forget(job)
            await self.ledger.remove(job.id)

    def as_info(self, job: JobRecord) -> api.JobInfo:
        """Return a job in the format of the API."""
        assert job.request is not None
        return api.JobInfo(
            id=job.id,
            state=job.state,
            name=job.request.name,
            created_at=job.created_s,
            updated_at=job.updated_s or job.created_s,
            started_at=job.started_s or None,
            ended_at=job.ended_s or None,
            model=job.model or job.request.model,
            operation=job.request.operation,
            counts=msgspec.convert(job, api.JobCounts, from_attributes=True),
            errors=job.codes,
            error=_error(job.error),
            trouble=_error(job.trouble),
            broken=list(job.broken),
            fingerprint=job.fingerprint,
            output_url=job.output_url,
            owner=job.owner_name,
            forecast=forecast(job, self.workers(job), self.now_s()) if job.state == "running" else None,
            request=job.request,
        )

    async def batch(self, call: Call, request: batches_api.BatchRequest) -> batches_api.BatchObject:
        """Store a new batch and return it; for a repeated Idempotency-Key, the earlier batch. Raises SIEError."""
        if request.endpoint not in batches_api.ENDPOINTS:
            endpoints = ", ".join(batches_api.ENDPOINTS)
            raise InvalidInput.at("endpoint", f"expected one of {endpoints}")
        if window_s(request.completion_window) > MAX_WINDOW_S:
            raise InvalidInput.at("completion_window", "expected at most 30d")
        job_id = self._new_id(call, "batch_")
        job = self._existing(call, job_id) or await self._create(await self._new(call, job_id, batch=request))
        if job.batch != request:
            raise IdempotencyMismatch("Idempotency-Key: it was used for another batch", param="Idempotency-Key")
        return self.batch_told(job)

    def batch_page(self, call: Call, limit: int, after: str) -> batches_api.BatchPage:
        """Return up to `limit` of the caller's batches, newest first. `after`: id of the last batch of the previous
        page; empty for the first page. Raises NotFound if `after` is unknown.
        """
        jobs, more = self._page(call, limit, after, lambda job: job.batch is not None)
        data = [self.batch_told(job) for job in jobs]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return batches_api.BatchPage(data=data, has_more=more, first_id=ends[0], last_id=ends[1])

    def find_batch(self, call: Call, batch_id: str) -> JobRecord:
        """Return a batch of the caller. Raises NotFound, also for a batch of another key."""
        job = self.ledger.find(batch_id)
        if not call.grant.owns(job.owner) or job.batch is None:
            raise NotFound("there is no such batch", param="batch")
        return job

    async def cancel_batch(self, call: Call, batch_id: str) -> batches_api.BatchObject:
        """Cancel a batch. Its output files have the answers of finished requests. Raises NotFound, ContentConflict,
        QueueUnavailable.
        """
        self.find_batch(call, batch_id)

        def changed(job: JobRecord) -> JobRecord:
            if job.ended:
                raise ContentConflict(f"the batch is {job.state} and cannot be cancelled any more", param="batch")
            return replace(job, command="cancel", cancelling_s=job.cancelling_s or self.now_s())

        async with broker_errors_mapped():
            return self.batch_told(await self.ledger.change(batch_id, changed))

    async def delete_batch(self, call: Call, batch_id: str) -> batches_api.BatchDeleted:
        """Delete an ended batch, but not its files. Raises NotFound, ContentConflict, QueueUnavailable."""
        job = self.find_batch(call, batch_id)
        if not job.ended:
            raise ContentConflict(f"the batch is {self.batch_told(job).status}: cancel it first", param="batch")
        await self.remove(job)
        return batches_api.BatchDeleted(id=batch_id)

    def batch_told(self, job: JobRecord) -> batches_api.BatchObject:
        """Return a batch in the format of OpenAI's API."""
        assert job.batch is not None
        state = _BATCH_STATES[job.state]
        if job.command == "cancel" and not job.ended:
            state = "cancelling"
        errors = None
        if job.state == "failed" and job.error is not None:
            error = batches_api.BatchError(
                code=job.error.reason or job.error.code, message=job.error.message, param=job.error.param or None
            )
            errors = batches_api.BatchErrors(data=[error])
        ended = int(job.ended_s) or None
        return batches_api.BatchObject(
            id=job.id,
            endpoint=job.batch.endpoint,
            errors=errors,
            input_file_id=job.batch.input_file_id,
            completion_window=job.batch.completion_window,
            status=state,
            output_file_id=job.output_file or None,
            error_file_id=job.error_file or None,
            created_at=int(job.created_s),
            in_progress_at=int(job.started_s) if job.is_planned else None,
            expires_at=int(expires_s(job)),
            finalizing_at=int(job.finalizing_s) or None,
            completed_at=ended if state == "completed" else None,
            failed_at=ended if state == "failed" else None,
            expired_at=ended if state == "expired" else None,
            cancelling_at=int(job.cancelling_s) or None,
            cancelled_at=ended if state == "cancelled" else None,
            request_counts=batches_api.BatchCounts(
                total=job.rows or 0, completed=job.done - job.failed, failed=job.failed
            ),
            usage=batches_api.BatchUsage(input_tokens=job.tokens, total_tokens=job.tokens),
            metadata=job.batch.metadata,
        )

    def _new_id(self, call: Call, prefix: str) -> str:
        idempotency_key = call.headers.get("idempotency-key", "")
        if not idempotency_key:
            return prefix + uuid7().replace("-", "")
        named = hashlib.sha256(f"{call.grant.key} {idempotency_key}".encode()).hexdigest()
        return prefix + uuid.uuid5(uuid.NAMESPACE_OID, named).hex

    def _existing(self, call: Call, job_id: str) -> JobRecord | None:
        """Return the job that an earlier call with this Idempotency-Key created, or None. Raises NotReady."""
        if not call.headers.get("idempotency-key"):
            return None
        self.ledger.require()
        return next((job for job in self.ledger if job.id == job_id), None)

    async def _new(self, call: Call, job_id: str, **fields: Any) -> JobRecord:
        now_s = self.now_s()
        check_request(fields.get("request") or fields["batch"])
        job = JobRecord(job_id, call.grant.key, call.grant.name, now_s, updated_s=now_s, **fields)
        return await self.check(call, job)

    async def _create(self, job: JobRecord) -> JobRecord:
        async with broker_errors_mapped():
            return await self.ledger.create(job)

    def _page(
        self, call: Call, limit: int, after: str, matches: Callable[[JobRecord], bool]
    ) -> tuple[list[JobRecord], bool]:
        self.ledger.require()
        jobs = [job for job in self.ledger if call.grant.owns(job.owner)]
        jobs.sort(key=lambda job: (job.created_s, job.id), reverse=True)
        start = 0
        if after:
            # search all jobs: the last job of the previous page may not match `matches` any more
            place = next((place for place, job in enumerate(jobs) if job.id == after), None)
            if place is None:
                raise NotFound("after: expected the id of a job or batch of this key", param="after")
            start = place + 1
        page = [job for job in jobs[start:] if matches(job)]
        return page[:limit], len(page) > limit


def _error(info: ErrorInfo | None) -> api.JobError | None:
    return None if info is None else api.JobError(code=info.code, message=info.message, param=info.param)


@contextlib.asynccontextmanager
async def broker_errors_mapped() -> AsyncIterator[None]:
    """Context manager that raises QueueUnavailable in place of a BrokerError or StoreError."""
    try:
        yield
    except BrokerError as error:
        raise QueueUnavailable(f"the broker failed, try again: {error}") from error
    except StoreError as error:
        raise QueueUnavailable(f"the payload store failed, try again: {error}") from error


EVERY_S = 60.0
_logger = logging.getLogger("sie.gateway.jobs")


@dataclass(eq=False)
class Sweeper:
    """Task that deletes jobs `keep_s` seconds after their end. Without a payload store, it deletes no job."""

    jobs: JobService
    lease: LeaderLease
    keep_s: float
    now_s: Callable[[], float]
    has_store: bool

    async def run(self, stop: Stop) -> None:
        """Call `sweep` at least every EVERY_S seconds until `stop`."""
        trouble = Trouble(_logger, "jobs that have ended are not deleted for now")
        while not await stop.wait_for(EVERY_S * random.uniform(0.5, 1.0)):  # noqa: S311  no secret
            with trouble.logged(BrokerError, SIEError):
                await self.sweep()

    async def sweep(self) -> int:
        """Delete the jobs that ended at least `keep_s` seconds ago, and return their number. A gateway that does not
        get the lease deletes no job. Raises BrokerError. If the deletion of a job raises SIEError, delete the other
        jobs, then raise the first SIEError.
        """
        if not self.has_store:
            return 0
        due = [job for job in self.jobs.ledger if job.ended and job.ended_s + self.keep_s <= self.now_s()]
        if not due or not await self.lease.acquire():
            return 0
        refused: list[SIEError] = []
        for job in due:
            try:
                await self.jobs.remove(job)
            except SIEError as error:
                refused.append(error)
        forgotten = len(due) - len(refused)
        if forgotten:
            _logger.info("deleted %d jobs that had ended", forgotten)
        if refused:
            raise refused[0]
        return forgotten
