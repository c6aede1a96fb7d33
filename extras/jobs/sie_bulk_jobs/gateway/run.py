"""Run of one job by its leader (a gateway): plan the input, answer its shards (groups of rows), write the output.

    queued ─► planning ─► running ─► finalizing ─► completed, cancelled, expired, failed
                 │           └── paused (by its owner, or by an error that only a person can fix) ─► queued
                 └── failed (input that can never be read)

If the leader dies, the next leader reads the plan and the records of the answered shards, and continues. While the
store or the broker refuses an operation, the leader repeats this operation without a limit, and writes the error into
the field `trouble` of the job's record.

A row may itself end the leader, for example by an input that needs all memory. A leader works only on the first
SHARDS_AT_ONCE unanswered shards, so the next leader first runs these alone, and finds the row (`suspects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from sie_broker import BrokerError
from sie_bulk_jobs.datasets.answers import most_frequent
from sie_bulk_jobs.gateway import pace, suspects
from sie_bulk_jobs.gateway.client import Halted
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.pace import JobPace
from sie_bulk_jobs.records import MAX_BROKEN, OUTPUT, PLAN, JobRecord, Plan, RowSpan, ShardRecord, Suspect, Unread
from sie_contracts.api.jobs import JobState
from sie_contracts.errors import ErrorInfo, NotFound, SIEError
from sie_runtime.process import cancel_all, task_group
from sie_store.object_stores import AccessRefused, BucketMissing, StoreError

SHARDS_AT_ONCE = 3  # number of shards in progress: one shard can be read while a second is computed and a third written
FLUSH_S = 1.0  # seconds between two writes of the progress
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # seconds before the first retry; longest pause between retries
# seconds for which work of a job that must run alone waits for such work of other jobs on this gateway
TURN_S = 30.0
LEADERS_LOST = "LEADERS_LOST"
# seconds for which the leader retries to write the output of a failed, cancelled or expired job before it gives up
LAST_TRIES_S = 60.0
OUTSIDE_WINDOW = "OUTSIDE_WINDOW"
# reason why the leader stopped the work of a job -> final state of the job
ENDS: dict[str, JobState] = {"cancel": "cancelled", "expired": "expired"}
_INTERNAL = ErrorInfo("INTERNAL_ERROR", "the gateway failed; its log has the details under the id of this job")
_T = TypeVar("_T")
_logger = logging.getLogger("sie.gateway.jobs")


class ShardBroken(Exception):
    """Raised if a part of the input can never be read. The other parts are answered anyway."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class Blamed(Exception):
    """Raised if MAX_ENDED gateways ended while the same work of a job ran alone, and this work has no pieces."""

    def __init__(self, subject: str) -> None:
        message = (
            f"{suspects.MAX_ENDED} gateways ended while {subject} ran alone, without other shards of jobs. Resume the "
            "job to try again, give gateways more memory, or submit the job without this input or with fewer shard_rows"
        )
        super().__init__(message)
        self.info = ErrorInfo(LEADERS_LOST, message, reason="poison")


def left_out() -> ErrorInfo:
    """Return the error of a row that is left out because gateways ended while it ran alone."""
    message = f"{suspects.MAX_ENDED} gateways ended while this row ran alone, so it is left out"
    return ErrorInfo(LEADERS_LOST, message, reason="poison")


class Replaced(Exception):
    """Raised if this gateway no longer leads the job, or if the job has ended."""


class JobWork(Protocol):
    """Operations that differ between native jobs and batches."""

    async def plan(self) -> Plan:
        """Return the stored plan of the input, or create it. Raises SIEError for unreadable input, StoreError."""

    async def shard(self, number: int, span: RowSpan) -> ShardRecord:
        """Compute and store the answers of a shard, and return its record. Raises ShardBroken, SIEError, StoreError."""

    async def piece(self, number: int, span: RowSpan, rows: range) -> None:
        """Compute and store the answers to some rows of a shard, for `joined`. Raises ShardBroken, SIEError,
        StoreError.
        """

    async def joined(self, number: int, span: RowSpan, rows_left_out: Collection[int]) -> ShardRecord:
        """Store the answers of a shard whose pieces are stored, and return its record. `rows_left_out` are not read and
        get the error `left_out()`. Raises ShardBroken, SIEError, StoreError.
        """

    async def finish(self, job: JobRecord, state: str, shards: dict[int, ShardRecord]) -> dict[str, Any]:
        """Complete the output of a job that ends in `state`. Add to `shards` the shards that this call completes.
        Returns fields for the record of the job. Raises SIEError, StoreError.
        """

    async def close(self) -> None:
        """Close the connections that the work has opened."""


class _ShardSums:
    """Sums over shard records. `add` reads only new records, because it runs every second and a job may have 100,000
    records.
    """

    def __init__(self, shards: dict[int, ShardRecord]) -> None:
        self.shards = shards
        self.broken: dict[int, ShardRecord] = {}
        self.codes: Counter[str] = Counter()
        self.rows = self.failed = self.reused = self.tokens = 0
        self.fingerprint = ""
        self._seen = 0

    def add(self) -> None:
        """Add to the sums the records of the shards that were answered since the last call of `add`."""
        for number, shard in itertools.islice(self.shards.items(), self._seen, None):
            self.rows += shard.rows
            self.failed += shard.failed
            self.reused += shard.reused
            self.tokens += shard.tokens
            self.codes.update(shard.codes)
            self.fingerprint = self.fingerprint or shard.fingerprint
            if shard.error is not None:
                self.broken[number] = shard
                self.failed += shard.rows
                self.codes[shard.error.code] += shard.rows
        self._seen = len(self.shards)


class JobRun:
    """Run of one job. `work` builds the JobWork of a job. `now_s` returns seconds since 1970 by the broker's clock."""

    def __init__(
        self,
        ledger: JobLedger,
        job: JobRecord,
        leader: str,
        work: Callable[[JobRecord, JobRun], JobWork],
        now_s: Callable[[], float],
        turn: asyncio.Lock,
    ) -> None:
        """`turn`: held by the job of this gateway whose suspect runs alone."""
        self._ledger = ledger
        self._turn = turn
        self._has_ended_leader = False  # true if the leader before this one has ended
        self._id = job.id
        self._leader = leader
        self._now_s = now_s
        self._job = job
        self._make = work
        self._shards: dict[int, ShardRecord] | None = None  # answered shards; None until their records have been read
        self._sums = _ShardSums({})
        # shard in progress -> (number of finished rows, number of failed rows)
        self._live: dict[int, tuple[int, int]] = {}
        self._unread: tuple[Unread, ...] = ()
        self._trouble: ErrorInfo | None = None
        # true when this run writes the end of the job. This write removes the leader from the record, which
        # `_until_stopped` must not take for a loss of the lead.
        self._is_ending = False
        self._pace = JobPace()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Run the job until it ends or pauses, or until this task is cancelled. After a retryable error only this run
        ends, and the next leader continues the job.
        """
        self._ledger.listen(self._id, lambda job: self._changed.set())
        try:
            await self._claim()
            flushing = asyncio.create_task(self._flush(), name=f"progress of {self._id}")
            try:
                await self._until_end()
            finally:
                await cancel_all([flushing])
        except (BrokerError, NotFound, Replaced) as error:  # NotFound: a user deleted the job
            self._left(error)
        finally:
            self._ledger.listen(self._id, None)

    async def _until_end(self) -> None:
        try:
            await self._steps()
        except Halted as error:
            await self._pause(error.info)
        except SIEError as error:
            if error.retryable:
                self._left(error)
            else:
                await self._end("failed", error=error.info())
        except (BrokerError, Replaced):
            raise
        except Exception as error:  # noqa: BLE001  the root of a job: its record must get the error
            info = self._cause(error)
            await (self._pause(info) if self._job.batch is None else self._end("failed", error=info))

    def _cause(self, error: Exception) -> ErrorInfo:
        """Return the error for the job's record. Log an unexpected exception: only operators can fix its cause."""
        if isinstance(error, Halted):
            return error.info
        if isinstance(error, SIEError):
            return error.info()
        _logger.error("job %s failed with an unexpected error", self._id, exc_info=error)
        return _INTERNAL

    def _left(self, error: Exception) -> None:
        _logger.warning("this gateway stops its work on job %s, and the next leader continues it: %s", self._id, error)

    def rows(self, shard: int, done: int, failed: int) -> None:
        """Add `done` finished rows of a shard to the progress. `failed`: number of these rows that have an error."""
        before, failed_before = self._live.get(shard, (0, 0))
        self._live[shard] = before + done, failed_before + failed

    def trouble(self, error: ErrorInfo | None) -> None:
        """Set the error that makes the job wait; None means that the job continues."""
        self._trouble = error

    async def until_open(self) -> None:
        """Wait until the time of day is inside the windows of the job. Until then, its `trouble` is OUTSIDE_WINDOW."""
        request = self._job.request
        while request is not None and (wait_s := pace.opens_in_s(request.windows, request.time_zone, self._now_s())):
            message = f"the job works only in the window {' and '.join(request.windows)} {request.time_zone}"
            self.trouble(ErrorInfo(OUTSIDE_WINDOW, message))
            await asyncio.sleep(min(wait_s, MAX_PAUSE_S))
        if self._is_outside:
            self.trouble(None)

    @property
    def _is_outside(self) -> bool:
        return self._trouble is not None and self._trouble.code == OUTSIDE_WINDOW

    async def _steps(self) -> None:
        if self._job.command == "pause" and self._early_end is None:
            await self._pause(self._job.error, is_asked=True)
            return
        if suspects.blamed(self._job, PLAN) or suspects.blamed(self._job, OUTPUT):
            await self._stop_blamed(Blamed("the completion of its output" if self._job.finalizing_s else "its plan"))
            return
        done = await self._patiently(lambda: self._ledger.shards(self._id))
        # the previous leader may have died before it wrote the fingerprint to the record of the job
        fingerprint = next((shard.fingerprint for shard in done.values() if shard.fingerprint), self._job.fingerprint)
        work = await self._opened(fingerprint)
        if work is None:
            return
        self._job = replace(self._job, fingerprint=fingerprint)
        try:
            await self._led(work)
        finally:
            await work.close()

    async def _stop_blamed(self, blamed: Blamed) -> None:
        """End or pause a job whose plan or output is blamed. A batch cannot be resumed, so it fails."""
        state, cause = self._early_end or ("failed", None)
        if self._early_end is None and self._job.batch is None:
            await self._pause(blamed.info)
        else:
            await self._end(state, error=cause or blamed.info)

    async def _opened(self, fingerprint: str) -> JobWork | None:
        """Return the JobWork of the job. Wait while the store of the input or output is unavailable. If the job must
        end or pause during this wait, write the new state to the job's record and return None.
        """
        works: list[JobWork] = []

        async def attempt() -> None:
            works.append(self._make(replace(self._job, fingerprint=fingerprint), self))

        try:
            if self._early_end is None:
                ended = await self._until_stopped(self._patiently(attempt))
                if ended == "pause" and not works:
                    await self._pause(None, is_asked=True)
                    return None
            if not works:  # the job ends early: try once, without waiting
                await attempt()
        except SIEError as error:  # for example, an input or output folder is no longer allowed
            if (end := self._early_end) is None:
                if self._job.is_planned and self._job.batch is None and not error.retryable:
                    raise Halted(error.info()) from error
                raise
            state, cause = end
            await self._end(state, error=cause or error.info())
            return None
        return works[0]

    async def _led(self, work: JobWork) -> None:
        if (end := self._early_end) is not None:
            await self._finish(work, *end)
            return
        first: JobState = self._state if self._job.is_planned else "planning"
        started_s = self._job.started_s or self._now_s()
        await self._note(state=first, started_s=started_s, error=None, fingerprint=self._job.fingerprint)
        try:
            ended = await self._until_stopped(self._whole(work))
        except (BrokerError, Replaced):
            raise
        except Blamed as error:
            if self._job.batch is None:
                raise Halted(error.info) from error
            await self._finish(work, "failed", error.info)
            return
        except Exception as error:
            # A native job is paused and keeps its answers: its owner may resume it, for example when its model is
            # available again. A batch cannot be resumed, so it ends with the answers that are stored.
            if not self._job.is_planned or (isinstance(error, SIEError) and error.retryable):
                raise
            if self._job.batch is None:
                raise Halted(self._cause(error)) from error
            await self._finish(work, "failed", self._cause(error))
            return
        if ended == "pause":
            self._live.clear()
            await self._pause(None, is_asked=True)
        elif ended:
            await self._finish(work, ENDS[ended])

    async def _whole(self, work: JobWork) -> None:
        await self._worked(work)
        await self._finish(work, "completed")

    @property
    def _early_end(self) -> tuple[JobState, ErrorInfo | None] | None:
        """Return the final state and the error (or None) of a job that must end now; None if the job continues. If an
        earlier leader has chosen a final state other than `completed` (`JobRecord.ending`), return that state. A job in
        the state `finalizing` does not expire.
        """
        if self._job.ending and self._job.ending != "completed":
            return self._job.ending, self._job.error
        if self._job.command == "cancel":
            return "cancelled", None
        is_late = expires_s(self._job) <= self._now_s() and self._job.state != "finalizing"
        return ("expired", None) if is_late else None

    @property
    def _state(self) -> JobState:
        """Return `finalizing` if an earlier leader has begun to complete the output of the job, else `running`."""
        return "finalizing" if self._job.finalizing_s else "running"

    async def _worked(self, work: JobWork) -> None:
        async with self._alone(PLAN):
            plan, done = await self._read(work)
        if not plan.spans and plan.unread:
            raise SIEError.from_info(plan.unread[0].error)
        numbers = [number for number in range(len(plan.spans)) if number not in done]
        suspicions = tuple(suspect for suspect in self._job.suspects if suspect.shard != PLAN)
        if self._has_ended_leader and self._job.is_planned and not suspicions:
            suspicions = tuple(Suspect(number, 0, plan.rows[number]) for number in numbers[:SHARDS_AT_ONCE])
        await self._note(
            state=self._state,
            is_planned=True,
            rows=sum(plan.rows),
            shards=len(plan.spans) + len(plan.unread),
            suspects=suspicions,
            is_alone=False,
        )
        while self._job.suspects and self._job.suspects[0].shard >= 0:
            await self._isolated(work, plan, self._job.suspects[0], done)
        waiting = iter([number for number in numbers if number not in done])
        async with task_group(SIEError, Halted, BrokerError) as tasks:
            for _ in range(SHARDS_AT_ONCE):
                tasks.create_task(self._answer(work, plan, waiting, done))

    async def _isolated(self, work: JobWork, plan: Plan, suspect: Suspect, done: dict[int, ShardRecord]) -> None:
        """Run a suspect alone, and remove it from the suspects: it has not ended this gateway. Raises Blamed if it has
        ended other gateways too often.
        """
        number = suspect.shard
        span = plan.spans[number]
        if suspects.blamed(self._job):
            raise Blamed(_named(span, suspect))
        if number not in done:
            async with self._alone(number):
                if suspect.rows == plan.rows[number]:
                    await self._answer(work, plan, iter((number,)), done)
                elif suspect.rows:
                    with contextlib.suppress(ShardBroken):  # `joined` meets the same error
                        rows = range(suspect.first, suspect.first + suspect.rows)
                        await self._patiently(lambda: work.piece(number, span, rows))
                else:
                    rows_left_out = {row for shard, row in self._job.left_out if shard == number}
                    await self._answer(work, plan, iter((number,)), done, rows_left_out)
        await self._patiently(lambda: self._turned(lambda job: suspects.answered(job, is_stored=number in done)))

    @contextlib.asynccontextmanager
    async def _alone(self, shard: int) -> AsyncIterator[None]:
        """Context manager for work that runs alone if it is the first suspect: the record says so, and no suspect of
        another job runs on this gateway. A suspect that runs for long does not stop the others: they wait TURN_S.
        """
        if not self._job.suspects or self._job.suspects[0].shard != shard:
            yield
            return
        has_turn = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    has_turn = await self._turn.acquire()
            self._trouble = None
            await self._patiently(lambda: self._turned(suspects.began))
            yield
        finally:
            if has_turn:
                self._turn.release()

    async def _read(self, work: JobWork) -> tuple[Plan, dict[int, ShardRecord]]:
        plan = await self._patiently(work.plan)
        done = self._shards = await self._patiently(lambda: self._ledger.shards(self._id))
        self._unread = plan.unread
        return plan, done

    async def _answer(
        self,
        work: JobWork,
        plan: Plan,
        waiting: Iterator[int],
        done: dict[int, ShardRecord],
        rows_left_out: Collection[int] | None = None,
    ) -> None:
        """Answer the shards `waiting`, and write their records. `rows_left_out`: put them together from their pieces,
        without these rows.
        """
        for number in waiting:
            span = plan.spans[number]
            try:
                # the lambdas below are awaited before `number` and `span` change
                shard = await self._patiently(lambda: self._attempted(work, number, span, rows_left_out))  # noqa: B023
            except ShardBroken as error:
                shard = ShardRecord("", plan.rows[number], error=error.info, source=span.source)
                _logger.warning("job %s skips a part of %s that it cannot read: %s", self._id, span.source, error)
            await self._patiently(lambda: self._ledger.keep_shard(self._id, number, shard))  # noqa: B023
            self._live.pop(number, None)
            done[number] = shard

    async def _attempted(
        self, work: JobWork, number: int, span: RowSpan, rows_left_out: Collection[int] | None
    ) -> ShardRecord:
        self._live.pop(number, None)  # forget the progress of an earlier attempt at this shard, and of its pieces
        if rows_left_out is None:
            return await work.shard(number, span)
        return await work.joined(number, span, rows_left_out)

    async def _until_stopped(self, work: Awaitable[None]) -> str:
        """Await `work`, and cancel it if the job must stop. Return the reason for the stop: `pause`, `cancel` or
        `expired`. Return an empty string if the work is complete.
        """
        doing = asyncio.ensure_future(work)
        try:
            while not doing.done():
                if self._job.command in ("pause", "cancel"):
                    return self._job.command
                left_s = expires_s(self._job) - self._now_s()
                if left_s <= 0 and self._job.state != "finalizing":  # a finalizing job does not expire
                    return "expired"
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                wait_s = min(left_s, 3600.0) if left_s > 0 else 3600.0
                try:
                    await asyncio.wait({doing, changed}, timeout=wait_s, return_when="FIRST_COMPLETED")
                finally:
                    changed.cancel()
                self._job = self._ledger.find(self._id)
                if not self._is_ending:
                    self._require_lead(self._job)
            await doing
            return ""
        finally:
            await cancel_all([doing])

    async def _patiently(self, attempt: Callable[[], Awaitable[_T]], for_s: float = float("inf")) -> _T:
        """Return the result of `attempt`. After a retryable error, call `attempt` again, for at most `for_s` seconds.
        Raises the first error that is not retryable, or the last retryable error when the time is over.
        """
        pause_s, met = FIRST_PAUSE_S, False
        last_s = time.monotonic() + for_s
        while True:
            try:
                result = await attempt()
            except (StoreError, BrokerError, SIEError) as error:
                if isinstance(error, SIEError) and not error.retryable:
                    raise
                if time.monotonic() + pause_s > last_s:
                    raise
                if not met:
                    _logger.warning("job %s waits and tries again after an error: %s", self._id, error)
                met = True
                self.trouble(_public_error(error))
            else:
                if met:
                    self.trouble(None)
                return result
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _flush(self) -> None:
        before: object = None
        while True:
            await asyncio.sleep(FLUSH_S)
            fields = self._progress_fields()
            if self._is_outside:
                self._pace.rest()
            elif fields:
                self._pace.note(self._now_s(), fields["done"])
            rate = self._pace.rate  # without progress the rate falls, and the record must show the lower rate
            if (state := (fields, self._trouble, rate)) != before:
                try:
                    await self._note(rows_per_s=rate, spread=self._pace.spread)
                except BrokerError as error:
                    _logger.info("job %s retries to write its progress in a second: %s", self._id, error)
                    continue
                # `_until_stopped` raises the same error, which ends the run
                except (Replaced, NotFound) as error:
                    _logger.info("stopped writing the progress of job %s: %s", self._id, error)
                    return
                before = state

    def _progress_fields(self) -> dict[str, Any]:
        """Return the fields of the record that contain the progress; an empty map until the shards have been read."""
        if self._shards is None:
            return {}
        sums = self._sums = self._sums if self._sums.shards is self._shards else _ShardSums(self._shards)
        sums.add()
        broken = broken_parts(sums.broken, self._unread)
        # a shard that `finish` adds to `_shards` stays in `_live`: count its rows only once
        live = [rows for number, rows in self._live.items() if number not in self._shards]
        return {
            "done": sums.rows + sum(done for done, _ in live),
            "failed": sums.failed + sum(failed for _, failed in live),
            "reused": sums.reused,
            "tokens": sums.tokens,
            "shards_done": len(self._shards) + len(self._unread),
            "shards_failed": len(broken),
            "codes": most_frequent(sums.codes),
            "broken": tuple(broken[:MAX_BROKEN]),
            "fingerprint": sums.fingerprint or self._job.fingerprint,
        }

    async def _claim(self) -> None:
        """Write this gateway as the leader into the record of the job. Raises Replaced if the job needs no leader,
        BrokerError, and NotFound.
        """

        def claimed(job: JobRecord) -> JobRecord:
            if not is_due(job, self._now_s()):
                return job
            self._has_ended_leader = job.leader not in ("", self._leader)
            return suspects.claimed_by(job, self._leader)

        self._job = await self._ledger.change(self._id, claimed)
        self._require_lead(self._job)

    def _require_lead(self, job: JobRecord) -> None:
        if job.ended:
            raise Replaced(f"the job is {job.state}")
        if job.leader != self._leader:
            raise Replaced(f"another gateway leads the job: {job.leader}" if job.leader else "the job has no leader")

    async def _note(self, **fields: Any) -> None:
        """Write `fields` and the progress into the record of the job. Raises Replaced, BrokerError, NotFound."""
        await self._change(lambda job: fields)

    async def _turned(self, turn: Callable[[JobRecord], JobRecord]) -> None:
        """Write the next step of the search for the work that ends gateways. Raises the errors of `_note`."""

        def fields(job: JobRecord) -> dict[str, Any]:
            turned = turn(job)
            return {"suspects": turned.suspects, "is_alone": turned.is_alone}

        await self._change(fields)

    async def _change(self, fields: Callable[[JobRecord], dict[str, Any]]) -> None:
        """Write `fields(record)` and the progress into the record of the job. Raises the errors of `_note`."""
        progress = self._progress_fields()

        def noted(job: JobRecord) -> JobRecord:
            self._require_lead(job)
            return replace(job, **{**progress, "trouble": self._trouble, "updated_s": self._now_s(), **fields(job)})

        self._job = await self._ledger.change(self._id, noted)

    async def _pause(self, error: ErrorInfo | None, *, is_asked: bool = False) -> None:
        """Pause the job until its owner resumes it. `is_asked`: the owner requested the pause. If the owner has since
        cancelled or resumed the job, do not pause it: the next leader obeys the newer command.
        """
        self._trouble = None

        def paused(job: JobRecord) -> dict[str, Any]:
            if job.command == "cancel" or (is_asked and job.command == "run"):
                return {"leader": "", "is_alone": False}
            again = suspects.forgiven(job.suspects)
            pause = {"state": "paused", "command": "pause", "leader": "", "error": error, "ending": ""}
            return {**pause, "suspects": again, "is_alone": False}

        await self._change(paused)

    async def _finish(self, work: JobWork, state: JobState, error: ErrorInfo | None = None) -> None:
        """Write the final state to the record, then complete the output, then end the job. If this leader dies before
        the output is complete, the next leader reads the state and completes the output. After an error of the store,
        retry: without a limit if the final state is `completed`, otherwise for at most LAST_TRIES_S seconds.
        """
        done: dict[int, ShardRecord] = {}
        if self._job.is_planned:
            # read the records again: a shard may have written its record while this run cancelled the work
            done = await self._patiently(lambda: self._ledger.shards(self._id))
        broken = [shard.error for shard in done.values() if shard.error is not None]
        if state == "completed" and broken and len(broken) == len(done):
            state, error = "failed", broken[0]
        finalizing_s = self._job.finalizing_s or self._now_s()
        suspicions = tuple(suspect for suspect in self._job.suspects if suspect.shard == OUTPUT)
        await self._note(
            state="finalizing",
            finalizing_s=finalizing_s,
            ending=state,
            error=error,
            suspects=suspicions,
            is_alone=False,
        )
        fields: dict[str, Any] = {}
        async with self._alone(OUTPUT):
            if state == "completed":
                fields = await self._patiently(lambda: self._completed(work, state, done))
            else:
                try:
                    fields = await self._patiently(lambda: self._completed(work, state, done), LAST_TRIES_S)
                except (StoreError, SIEError) as refused:
                    error = error or _public_error(refused)
        self._live.clear()
        await self._end(state, error=error, suspects=(), is_alone=False, **fields)

    async def _completed(self, work: JobWork, state: str, done: dict[int, ShardRecord]) -> dict[str, Any]:
        if self._job.is_planned:
            self._unread = (await work.plan()).unread
        self._shards = done
        return await work.finish(self._job, state, done)

    async def _end(self, state: str, **fields: Any) -> None:
        self._trouble = None
        self._is_ending = True
        await self._note(state=state, leader="", ended_s=self._now_s(), **fields)
        _logger.info("job %s has ended: %s", self._id, state)


def _named(span: RowSpan, suspect: Suspect) -> str:
    first, rows = span.first + suspect.first, suspect.rows or span.rows
    return f"{rows} rows of {span.source or 'images'} from {first} on"


def broken_parts(shards: Mapping[int, ShardRecord], unread: Iterable[Unread]) -> list[str]:
    """Return a message for each part of the input that could not be read. A message has the part and the reason."""
    broken = [(shard.source, shard.error) for _, shard in sorted(shards.items()) if shard.error is not None]
    broken += [(part.source, part.error) for part in unread]
    return [error.message if source in error.message else f"{source}: {error.message}" for source, error in broken]


def expires_s(job: JobRecord) -> float:
    """Return the time at which a job expires, in seconds since 1970; infinite if it never expires."""
    if job.batch is not None:
        return job.created_s + window_s(job.batch.completion_window)
    request = job.request
    return request.deadline if request is not None and request.expires and request.deadline else float("inf")


def is_due(job: JobRecord, now_s: float) -> bool:
    """Return True if a job needs a leader. A paused job needs a leader only if it is resumed, cancelled or expired."""
    return not job.ended and (job.state != "paused" or job.command != "pause" or expires_s(job) <= now_s)


def window_s(text: str) -> float:
    """Return the seconds of a completion window such as 24h."""
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[text[-1]]


def _public_error(error: Exception) -> ErrorInfo:
    if isinstance(error, SIEError):
        return error.info()
    if isinstance(error, AccessRefused):
        return ErrorInfo("STORE_REFUSED", f"the store refused: {error}")
    if isinstance(error, BucketMissing):
        return ErrorInfo("STORE_MISSING", str(error))
    if isinstance(error, StoreError):
        return ErrorInfo("STORE_UNAVAILABLE", f"the store failed: {error}")
    return ErrorInfo("QUEUE_UNAVAILABLE", f"the broker failed: {error}")
