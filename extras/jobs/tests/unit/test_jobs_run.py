"""The life of a job: one leader, one part for each shard whatever process dies, and the commands of its owner."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import until, until_told
from simulation.virtual import in_virtual_time

from sie_broker.memory import MemoryBroker, MemoryServer
from sie_broker.record import LeaderLease, leases_of
from sie_bulk_jobs.gateway import run as runs
from sie_bulk_jobs.gateway import scheduler as keepers
from sie_bulk_jobs.gateway import suspects
from sie_bulk_jobs.gateway.client import Halted
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse, UseBound
from sie_bulk_jobs.gateway.run import JobRun, ShardBroken
from sie_bulk_jobs.gateway.scheduler import JobScheduler
from sie_bulk_jobs.gateway.service import JobService, Sweeper
from sie_bulk_jobs.records import OUTPUT, PLAN, JobRecord, Plan, RowSpan, ShardRecord, Suspect
from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import JobInput, JobRequest
from sie_contracts.errors import ErrorInfo, InvalidInput, ModelNotFound, NotReady, QueueUnavailable, SIEError
from sie_runtime.process import Stop
from sie_store.object_stores import StoreError

BOUND = UseBound(RecordUse(1000, 1 << 20), ("SIE_MAX_JOBS", "SIE_MAX_JOBS_BYTES"))
JOB = JobRecord("job-1", "k", "key", 1.0, request=JobRequest(model="m", input=JobInput(file="f")))


async def _no_step(kind: str, number: int) -> None:
    """Let other tasks run."""
    await asyncio.sleep(0)


@dataclass
class Output:
    """Output that all leaders of a job write: each part is created once."""

    shards: int = 6
    plan: Plan | None = None
    parts: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)  # each shard waits for this event
    before: Callable[[int], None] = lambda number: None
    step: Callable[[str, int], Awaitable[None]] = _no_step  # called with plan, row, joined or finish, and a number
    pieces: dict[int, set[int]] = field(default_factory=dict)  # stored rows of each shard, and those left out
    refuses: str = ""  # the step that the store refuses: open, plan, shard, finish
    breaks: str = ""  # the step that has a bug
    refusals: int = 1 << 30  # how often it refuses
    made: int = 0
    unopened: int = 0  # attempts at `open` that were refused
    fingerprints: set[str] = field(default_factory=set)
    closed: int = 0
    unwinding: asyncio.Event | None = None  # a cancelled shard waits for this event
    unwinds: int = 0
    closing: asyncio.Event | None = None  # `close` waits for this event

    def work(self, leader: str) -> Callable[[JobRecord, JobRun], Writing]:
        def made(job: JobRecord, progress: JobRun) -> Writing:
            if self.refuses == "all":
                raise InvalidInput("output.url: this URL is not below one of SIE_JOBS_URLS")
            if self.refuses == "open":
                self.unopened += 1
                raise NotReady("output.url: the store of SIE_JOBS_URLS cannot be opened")
            self.made += 1
            self.fingerprints.add(job.fingerprint)
            return Writing(self, leader, progress)

        return made


@dataclass
class Writing:
    output: Output
    leader: str
    progress: JobRun

    def refuse(self, step: str) -> None:
        if self.output.breaks == step:
            raise ZeroDivisionError("a bug")
        if self.output.refuses == step and self.output.refusals:
            self.output.refusals -= 1
            raise StoreError("no space left on device")

    async def plan(self) -> Plan:
        self.refuse("plan")
        await self.output.step("plan", 0)
        self.output.plan = self.output.plan or Plan(
            tuple(RowSpan("a.jsonl", "jsonl", 10 * number, 10) for number in range(self.output.shards))
        )
        return self.output.plan

    async def shard(self, number: int, span: RowSpan) -> ShardRecord:
        self.output.before(number)
        self.output.computed.append(number)
        try:
            await self.output.held.wait()
        except asyncio.CancelledError:
            self.output.unwinds += 1
            if self.output.unwinding is not None:
                await self.output.unwinding.wait()
            raise
        for row in range(span.rows):
            await self.output.step("row", span.first + row)
        self.progress.rows(number, span.rows, 1)
        self.refuse("shard")
        self.output.parts.setdefault(f"part-{number}", self.leader)
        return ShardRecord(f"part-{number}", span.rows, failed=1, tokens=3, codes={"INVALID_INPUT": 1})

    async def piece(self, number: int, span: RowSpan, rows: range) -> None:
        await self.output.held.wait()
        for row in rows:
            await self.output.step("row", span.first + row)
        self.output.pieces.setdefault(number, set()).update(rows)

    async def joined(self, number: int, span: RowSpan, rows_left_out: Collection[int]) -> ShardRecord:
        assert self.output.pieces[number] == set(range(span.rows)).difference(rows_left_out)
        await self.output.step("joined", number)
        self.output.parts.setdefault(f"part-{number}", self.leader)
        failed = len(rows_left_out)
        self.progress.rows(number, span.rows, failed)
        codes = {runs.LEADERS_LOST: failed} if failed else {}
        return ShardRecord(f"part-{number}", span.rows, failed=failed, codes=codes)

    async def finish(self, job: JobRecord, state: str, shards: dict[int, ShardRecord]) -> dict[str, Any]:
        self.refuse("finish")
        await self.output.step("finish", 0)
        self.output.finished.append(state)
        return {"output_file": "there"}

    async def close(self) -> None:
        self.output.closed += 1
        if self.output.closing is not None:
            await self.output.closing.wait()


class World:
    def __init__(self) -> None:
        self.server = MemoryServer()
        self.output = Output()
        self.brokers: dict[str, MemoryBroker] = {}
        self.stops: dict[str, tuple[Stop, asyncio.Future[Any], JobScheduler]] = {}
        self.now_s: Callable[[], float] = time.time  # the clock of the broker
        self.removed: list[str] = []  # jobs whose objects a sweeper tried to remove

    def gateway(self, name: str, at_once: int = 2) -> JobLedger:
        broker = self.brokers[name] = self.server.connect(name)
        bucket, stop = JobsBucket(broker, 1), Stop()
        ledger = JobLedger(
            bucket, broker, 1, OwnerUsage(BOUND, BOUND, kinds=("jobs", "bytes"), remedy="", reason="jobs")
        )
        work = self.output.work(name)
        leases = leases_of(broker, storage="memory", replicas=1)
        keeper = JobScheduler(ledger, leases, name, work, at_once=at_once, now_s=lambda: self.now_s())
        self.stops[name] = stop, asyncio.gather(bucket.run(stop), keeper.run(stop)), keeper
        return ledger

    async def kill(self, name: str) -> None:
        """End a leader as kill -9 does: nothing is released."""
        _, task, keeper = self.stops.pop(name)
        ended = [running.task for running in keeper._running.values()]
        keeper._running.clear()
        for job_task in (task, *ended):
            job_task.cancel()
        await asyncio.gather(task, *ended, return_exceptions=True)

    async def leave(self, name: str) -> None:
        stop, task, _ = self.stops.pop(name)
        stop.request()
        await asyncio.wait_for(task, 10)

    async def job(self, ledger: JobLedger, job_id: str = JOB.id) -> JobRecord:
        job = await ledger._jobs.refresh(job_id)
        assert job is not None
        return job


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "EVERY_S", 0.02)
    monkeypatch.setattr(keepers, "LEASE_S", 0.6)
    monkeypatch.setattr(keepers, "RENEW_S", 0.1)
    monkeypatch.setattr(keepers, "FENCE_S", 0.45)
    monkeypatch.setattr(runs, "FLUSH_S", 0.05)
    monkeypatch.setattr(runs, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(runs, "MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(runs, "LAST_TRIES_S", 0.3)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with a World of its own in virtual time, in which no lease ends because the machine is slow."""
    signature = inspect.signature(test)
    (_, *parameters) = signature.parameters.values()

    @functools.wraps(test)
    async def whole(**fixtures: Any) -> None:
        world = World()
        await test(world, **fixtures)
        for name in list(world.stops):
            await world.leave(name)

    run = in_virtual_time(whole)
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # the fixtures that it asks for
    return run


async def state(world: World, ledger: JobLedger, expected: str, job_id: str = JOB.id) -> JobRecord:
    async def reached() -> JobRecord | None:
        job = await world.job(ledger, job_id)
        return job if job.state == expected else None

    record: JobRecord = await until_told(reached, f"the job is {expected}")
    return record


@virtual
async def test_a_job_runs_to_its_end_and_its_record_says_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.output.held.set()
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    job = await state(world, ledger, "completed")
    assert (job.rows, job.done, job.failed, job.tokens, job.shards, job.shards_done) == (60, 60, 6, 18, 6, 6)
    assert job.codes == {"INVALID_INPUT": 6}
    assert (job.output_file, job.leader, world.output.finished) == ("there", "", ["completed"])
    await until(lambda: world.output.closed == world.output.made > 0, "its work is closed")
    assert "is left" not in caplog.text
    assert len(await ledger.shards(JOB.id)) == 6
    await ledger.remove(JOB.id)
    assert await ledger.shards(JOB.id) == {}
    await until(lambda: not list(ledger), "it is forgotten")


@virtual
async def test_two_gateways_never_run_a_job_together_and_the_next_goes_on_where_it_was(world: World) -> None:
    """The leading gateway leaves before it has answered anything. The other gateway leads at once, and answers."""
    first, second = world.gateway("g1"), world.gateway("g2")
    await first.create(JOB)
    await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "a leader computes")
    leader = (await state(world, first, "running")).leader
    successor = "g2" if leader == "g1" else "g1"
    await asyncio.sleep(1.5 * keepers.LEASE_S)
    assert len(world.output.computed) == runs.SHARDS_AT_ONCE  # the other gateway has waited for longer than a lease
    await world.leave(leader)
    world.output.held.set()
    job = await state(world, second if successor == "g2" else first, "completed")
    assert job.done == 60
    assert set(world.output.parts.values()) == {successor}


@pytest.mark.parametrize("says", ["pause", "cancel"])
@virtual
async def test_the_owner_is_heard_in_the_middle(world: World, says: str) -> None:
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "it computes")
    await ledger.change(JOB.id, lambda job: job and runs.replace(job, command=says))
    await state(world, ledger, "paused" if says == "pause" else "cancelled")
    world.output.held.set()
    if says == "cancel":
        assert world.output.finished == ["cancelled"]
        return
    assert world.output.parts == {}
    await ledger.change(JOB.id, lambda job: job and runs.replace(job, command="run", state="queued"))
    assert (await state(world, ledger, "completed")).done == 60


@pytest.mark.parametrize(("says", "then"), [("cancel", "cancelled"), ("run", "completed")])
@virtual
async def test_what_the_owner_says_while_the_leader_pauses_counts(world: World, says: str, then: str) -> None:
    world.output.unwinding = asyncio.Event()
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "it computes")
    await ledger.change(JOB.id, lambda job: job and runs.replace(job, command="pause"))
    await until(lambda: world.output.unwinds, "it stops")
    await ledger.change(JOB.id, lambda job: job and runs.replace(job, command=says))
    world.output.held.set()
    world.output.unwinding.set()
    assert (await state(world, ledger, then)).command == says


@pytest.mark.parametrize(
    "stands",
    [
        runs.replace(JOB, state="cancelled", command="cancel", ended_s=5.0, done=7),
        runs.replace(JOB, state="paused", command="pause", error=ErrorInfo("MODEL_NOT_FOUND", "it is gone")),
    ],
)
@virtual
async def test_a_gateway_whose_copy_of_a_record_is_old_leaves_it_as_it_is(world: World, stands: JobRecord) -> None:
    world.output.held.set()
    ledger = world.gateway("g1")
    await ledger.create(stands)
    await until(lambda: ledger.is_read, "it knows all jobs")
    ledger._jobs._values[JOB.id] = runs.replace(JOB, state="running", is_planned=True)
    ledger.woken.set()
    await until(lambda: ledger.find(JOB.id) == stands, "it has read the record again")
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == f"job {JOB.id}"], "it left it")
    assert await world.job(ledger) == stands
    assert world.output.made == 0


@pytest.mark.parametrize(
    "stands",
    [
        runs.replace(JOB, state="completed", ended_s=5.0, done=60),
        runs.replace(JOB, state="running", leader="another", done=50),
    ],
)
@virtual
async def test_a_leader_that_was_replaced_stops_and_writes_nothing_more(world: World, stands: JobRecord) -> None:
    ledger = world.gateway("g1", at_once=0)
    await ledger.create(JOB)
    await until(lambda: ledger.is_read, "it knows all jobs")
    running = asyncio.create_task(JobRun(ledger, JOB, "g1", world.output.work("g1"), world.now_s, asyncio.Lock()).run())
    await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "it computes")
    await ledger.change(JOB.id, lambda job: stands)
    await asyncio.wait_for(running, 5)
    assert await world.job(ledger) == stands
    assert world.output.finished == []


class Killing:
    """Kill the gateway at each step that `is_deadly`, as kill -9 does, and start the next gateway."""

    def __init__(self, world: World, is_deadly: Callable[[str, int], bool], job: JobRecord = JOB) -> None:
        self.world, self.is_deadly, self.job = world, is_deadly, job
        self.deaths: list[tuple[str, int]] = []
        self.gateways = 0
        self.killed = asyncio.Event()
        world.output.step = self.step
        world.output.held.set()

    async def step(self, kind: str, number: int) -> None:
        await asyncio.sleep(0)
        if self.killed.is_set():
            await asyncio.Event().wait()
        if self.is_deadly(kind, number):
            self.deaths.append((kind, number))
            self.killed.set()
            await asyncio.Event().wait()

    async def run(self) -> JobRecord:
        """Run one gateway after the other until the job ends or pauses. Return its record."""
        while True:
            self.gateways += 1
            name = f"g{self.gateways}"
            ledger = self.world.gateway(name)
            await ledger.create(self.job)

            async def stopped() -> JobRecord | None:
                job = await self.world.job(ledger, self.job.id)  # noqa: B023  awaited at once
                return job if self.killed.is_set() or job.ended or job.state == "paused" else None

            job: JobRecord = await until_told(stopped, "the gateway is to be killed, or the job has stopped")
            if not self.killed.is_set():
                self.ledger = ledger
                return job
            await self.world.kill(name)
            self.killed.clear()

    async def resumed(self) -> JobRecord:
        """Resume the job as its owner does, and run it on as `run` does."""
        await self.ledger.change(self.job.id, lambda job: runs.replace(job, state="queued", command="run", error=None))
        await self.world.leave(f"g{self.gateways}")
        return await self.run()


BATCH = JobRecord("batch_1", "k", "key", time.time(), batch=BatchRequest(input_file_id="f", endpoint="/v1/embeddings"))


@virtual
async def test_a_row_that_ends_gateways_is_found_and_left_out_and_all_others_are_answered(world: World) -> None:
    """Row 47 ends each gateway that reads it. It ends the first one, one for its whole shard, and MAX_ENDED alone."""
    killing = Killing(world, lambda kind, number: (kind, number) == ("row", 47))
    job = await killing.run()
    assert (job.state, job.done, job.left_out, job.suspects) == ("completed", 60, ((4, 7),), ())
    assert job.codes == {"INVALID_INPUT": 5, "LEADERS_LOST": 1}
    assert len(killing.deaths) == 2 + suspects.MAX_ENDED
    assert world.output.pieces == {4: set(range(10)) - {7}}
    assert len(world.output.parts) == 6


@pytest.mark.parametrize("job", [pytest.param(JOB, id="job"), pytest.param(BATCH, id="batch")])
@pytest.mark.parametrize(
    ("deadly", "named"), [("plan", "its plan"), ("finish", "its output"), ("joined", "10 rows of a.jsonl from 0 on")]
)
@virtual
async def test_work_without_pieces_that_ends_gateways_stops_the_job_and_what_is_answered_stays(
    world: World, job: JobRecord, deadly: str, named: str
) -> None:
    """A first death is charged to nothing; MAX_ENDED ones of the work alone pause the job, and fail a batch. In the
    case `joined` one death more splits the shard.
    """
    stops = True
    met = {"row": 0}

    def is_deadly(kind: str, number: int) -> bool:
        if deadly == "joined" and (kind, number) == ("row", 0):
            met["row"] += 1
            return met["row"] <= 2
        return stops and kind == deadly

    killing = Killing(world, is_deadly, job)
    stopped = await killing.run()
    first = 2 if deadly == "joined" else 1
    assert len(killing.deaths) == suspects.MAX_ENDED + first
    assert stopped.error is not None
    assert stopped.error.code == "LEADERS_LOST"
    assert named in stopped.error.message
    assert stopped.state == ("paused" if job is JOB else "failed")
    assert len(await killing.ledger.shards(job.id)) == {"plan": 0, "finish": 6, "joined": 2}[deadly]
    if job is JOB:
        stops = False
        assert (await killing.resumed()).state == "completed"
        assert world.output.parts.keys() == {f"part-{number}" for number in range(6)}


@virtual
async def test_suspects_of_two_jobs_never_run_at_the_same_time_on_a_gateway(world: World) -> None:
    """Both jobs lose their leader. Until the suspects of one are answered, one shard of both is at work."""
    second_job = runs.replace(JOB, id="job-2", created_s=2.0)
    first = world.gateway("g1")
    for job in (JOB, second_job):
        await first.create(job)
    await until(lambda: len(world.output.computed) == 2 * runs.SHARDS_AT_ONCE, "it has three shards of each")
    await world.kill("g1")
    world.output.computed.clear()
    second = world.gateway("g2")
    for number in range(2 * runs.SHARDS_AT_ONCE - 1):
        await until(lambda: len(world.output.computed) == number + 1, "it begins the next one")  # noqa: B023
        await asyncio.sleep(1.0)
        assert len(world.output.computed) == number + 1
        held, world.output.held = world.output.held, asyncio.Event()
        held.set()
    await until(lambda: len(world.output.computed) == 3 * runs.SHARDS_AT_ONCE, "one job goes on with all others")
    world.output.held.set()
    for job in (JOB, second_job):
        assert (await state(world, second, "completed", job.id)).suspects == ()
    assert sorted(world.output.computed) == sorted([*range(6), *range(6)])


def suspected(*pieces: Suspect, is_alone: bool = True, **fields: Any) -> JobRecord:
    fields = {"leader": "g1", "is_planned": True, "state": "running", **fields}
    return runs.replace(JOB, suspects=pieces, is_alone=is_alone, **fields)


WAITS = ErrorInfo("QUEUE_FULL", "wait")
ROW = Suspect(0, 5, 1)
TWICE = Suspect(0, 5, 1, ("a", "b"))
OTHER = Suspect(1, 0, 40)
FULL = tuple(Suspect(2, row, 1) for row in range(suspects.MAX_SUSPECTS - suspects.PIECES))


@pytest.mark.parametrize(
    ("job", "then"),
    [
        pytest.param(suspected(is_alone=False), (), id="no suspect: the next leader reads the plan"),
        pytest.param(suspected(is_planned=False), (Suspect(PLAN),), id="it planned"),
        pytest.param(suspected(finalizing_s=1.0), (Suspect(OUTPUT),), id="it completed the output"),
        pytest.param(suspected(ROW, OTHER, is_alone=False), (ROW, OTHER), id="not alone"),
        pytest.param(suspected(ROW, OTHER, trouble=WAITS), (ROW, OTHER), id="alone, but it waited"),
        pytest.param(suspected(ROW, OTHER), (OTHER, Suspect(0, 5, 1, ("g1",))), id="a row alone"),
        pytest.param(suspected(TWICE, OTHER), (OTHER, Suspect(0)), id="a row for the last time"),
        pytest.param(suspected(TWICE, ROW), (ROW,), id="a row for the last time, pieces of its shard are left"),
        pytest.param(
            suspected(OTHER, ROW), (ROW, *(Suspect(1, row, min(3, 40 - row)) for row in range(0, 40, 3))), id="split"
        ),
        pytest.param(suspected(OTHER, *FULL), (*FULL, OTHER), id="no room for pieces"),
        pytest.param(suspected(Suspect(3), ROW), (ROW, Suspect(3, ended=("g1",))), id="a shard from its pieces"),
        pytest.param(
            suspected(TWICE, left_out=((9, 9),) * suspects.MAX_LEFT_OUT),
            (Suspect(0, 5, 1, ("a", "b", "g1")),),
            id="no further row is left out",
        ),
    ],
)
def test_the_end_of_a_leader_is_charged_to_the_suspect_that_ran_alone(
    job: JobRecord, then: tuple[Suspect, ...]
) -> None:
    claimed = suspects.claimed_by(job, "g2")
    assert (claimed.leader, claimed.suspects, claimed.is_alone) == ("g2", then, False)
    is_new = len(claimed.left_out) > len(job.left_out)
    assert is_new == (job.suspects[:1] == (TWICE,) and len(job.left_out) < suspects.MAX_LEFT_OUT)
    for leader in ("", "g2"):  # it was left, or is led already
        assert suspects.claimed_by(runs.replace(job, leader=leader), "g2").suspects == job.suspects
    assert [suspect.ended for suspect in suspects.left(claimed, "g1").suspects if "g1" in suspect.ended] == []


@given(
    shards=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    deadly=st.sets(st.integers(0, 599), max_size=3),
    external=st.sets(st.integers(0, 120), max_size=12),
)
def test_a_search_leaves_out_the_rows_that_end_gateways_and_answers_all_others(
    shards: list[int], deadly: set[int], external: set[int]
) -> None:
    """`deadly`: rows of the first shard that end gateways. `external`: numbers of runs during which gateways end of
    other causes. A row is left out only after it was in MAX_ENDED runs of its own; the search ends, and its record is
    small.
    """
    deadly = {row for row in deadly if row < shards[0]}
    job = suspected(*(Suspect(number, 0, rows) for number, rows in enumerate(shards)), is_alone=False)
    answered = {number: set[int]() for number in range(len(shards))}
    ends: Counter[tuple[int, int]] = Counter()
    joined, run = list[int](), 0
    while job.suspects and suspects.blamed(job) is None:
        suspect = job.suspects[0]
        rows = set(range(suspect.first, suspect.first + suspect.rows))
        is_end = run in external or (suspect.shard == 0 and bool(rows & deadly))
        run += 1
        assert run < 5000
        job = suspects.began(job)
        if is_end:
            if suspect.rows == 1:
                ends[suspect.shard, suspect.first] += 1
            job = suspects.claimed_by(job, f"h{run}")
            continue
        assert not rows & answered[suspect.shard], "no row is answered twice"
        answered[suspect.shard] |= rows
        if is_whole := not suspect.rows or suspect.rows == shards[suspect.shard]:
            joined.append(suspect.shard)
        job = suspects.answered(job, is_stored=is_whole)
        assert len(job.suspects) <= suspects.MAX_SUSPECTS
    left_out = set(job.left_out)
    assert left_out == {row for row, count in ends.items() if count == suspects.MAX_ENDED}
    if not job.suspects:
        assert left_out >= {(0, row) for row in deadly}
        assert sorted(joined) == list(range(len(shards)))
        for number, rows_of in enumerate(shards):
            assert answered[number] | {row for shard, row in left_out if shard == number} == set(range(rows_of))
    else:
        assert external, "a sound row or shard is blamed only by ends of other causes in its own runs"


REFUSED = ErrorInfo("STORE_UNAVAILABLE", "the store failed: no space left on device")


@pytest.mark.parametrize(("step", "state_then"), [("plan", "planning"), ("shard", "running"), ("finish", "finalizing")])
@virtual
async def test_what_passes_is_waited_for_and_told(world: World, step: str, state_then: str) -> None:
    """However often a step is tried, no row counts twice."""
    world.output.held.set()
    world.output.refuses = step
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    await until(lambda: [job for job in ledger if job.trouble], "it says what it waits for")
    assert (ledger.find(JOB.id).trouble, ledger.find(JOB.id).state) == (REFUSED, state_then)
    computed = len(world.output.computed)
    if step == "shard":
        await until(lambda: len(world.output.computed) > computed + 2 * runs.SHARDS_AT_ONCE, "it tries again and again")
        assert (await world.job(ledger)).done <= 10 * runs.SHARDS_AT_ONCE
    world.output.refuses = ""
    job = await state(world, ledger, "completed")
    assert (job.done, job.trouble) == (60, None)


@virtual
async def test_a_broken_part_is_named_and_the_others_are_answered(world: World) -> None:
    world.output.held.set()

    def before(number: int) -> None:
        if number == 2:
            raise ShardBroken(ErrorInfo("INVALID_INPUT", "the object is not there any more", "input_missing"))

    world.output.before = before
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    job = await state(world, ledger, "completed")
    assert (job.done, job.failed, job.shards_done, job.shards_failed) == (60, 15, 6, 1)
    assert job.broken == ("a.jsonl: the object is not there any more",)
    assert job.codes["INVALID_INPUT"] == 15


@pytest.mark.parametrize("job", [pytest.param(JOB, id="job"), pytest.param(BATCH, id="batch")])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("there is no such model"), "MODEL_NOT_FOUND"),
        (Halted(ErrorInfo("PERMISSION_DENIED", "the key has ended")), "PERMISSION_DENIED"),
        (ZeroDivisionError("a bug"), "INTERNAL_ERROR"),
        ("finish", "INTERNAL_ERROR"),
    ],
)
@virtual
async def test_what_only_people_can_change_pauses_a_job_and_ends_a_batch_which_nobody_can_resume(
    world: World, error: Exception | str, code: str, job: JobRecord
) -> None:
    """A shard has the error, or the step of this name has a bug."""
    world.output.held.set()

    def before(number: int) -> None:
        if number == 3 and isinstance(error, Exception):
            raise error

    world.output.before = before
    world.output.breaks = error if isinstance(error, str) else ""
    ledger = world.gateway("g1")
    await ledger.create(job)
    ended = await state(world, ledger, "paused" if job is JOB else "failed", job.id)
    assert (ended.error and ended.error.code, ended.leader) == (code, "")
    assert world.output.finished == (["failed"] if job is BATCH and isinstance(error, Exception) else [])


@pytest.mark.parametrize("is_batch", [False, True])
@virtual
async def test_an_end_that_a_leader_began_outlives_it(
    world: World, monkeypatch: pytest.MonkeyPatch, is_batch: bool
) -> None:
    """The job expires, or its batch fails, with three shards unanswered; the leader dies while it writes the output."""
    finishing, finish = asyncio.Event(), Writing.finish

    async def held(self: Writing, *args: Any) -> dict[str, Any]:
        finishing.set()
        await asyncio.Event().wait()
        raise AssertionError

    def before(number: int) -> None:
        if number == 3:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Writing, "finish", held)
    now_s = 1000.0
    world.now_s = lambda: now_s
    ledger = world.gateway("g1")
    if is_batch:
        world.output.before = before
        world.output.held.set()
        batch = BatchRequest(input_file_id="f", endpoint="/v1/embeddings")
        await ledger.create(runs.replace(JOB, created_s=now_s, request=None, batch=batch))
    else:
        expires = JobRequest(model="m", input=JobInput(file="f"), deadline=2000.0, expires=True)
        await ledger.create(runs.replace(JOB, request=expires))
        await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "it computes")
        now_s = 3000.0
        await ledger.change(JOB.id, lambda job: runs.replace(job, updated_s=now_s))
    await asyncio.wait_for(finishing.wait(), 10)
    await world.kill("g1")
    monkeypatch.setattr(Writing, "finish", finish)
    world.output.before = lambda number: None
    world.output.held.set()
    computed, end = len(world.output.computed), "failed" if is_batch else "expired"
    job = await state(world, world.gateway("g2"), end)
    assert (world.output.finished, len(world.output.computed)) == ([end], computed)
    assert (job.error and job.error.code) == ("INTERNAL_ERROR" if is_batch else None)


@pytest.mark.parametrize(("says", "ends"), [("", "completed"), ("pause", "paused"), ("cancel", "cancelled")])
@virtual
async def test_a_leader_waits_for_a_place_that_cannot_be_opened_and_hears_the_owner(
    world: World, says: str, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.output.held.set()
    world.output.refuses = "open"
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    await until(lambda: [job for job in ledger if job.trouble], "it says what it waits for")
    assert ledger.find(JOB.id).trouble == ErrorInfo(
        "NOT_READY", "output.url: the store of SIE_JOBS_URLS cannot be opened", retry_after_s=NotReady.retry_after_s
    )
    await until(lambda: world.output.unopened > 5, "it tries again and again")
    assert "the next leader continues it" not in caplog.text
    if says:
        await ledger.change(JOB.id, lambda job: job and runs.replace(job, command=says))
    else:
        world.output.refuses = ""
    job = await state(world, ledger, ends)
    assert (job.trouble, job.error and job.error.code) == (None, "NOT_READY" if says == "cancel" else None)


@virtual
async def test_jobs_expire_by_the_clock_of_the_broker(world: World) -> None:
    """The clock of this machine is years after the deadline of the first job, and before that of the second job."""
    world.now_s, machine_s = lambda: 1000.0, time.time()
    world.output.held.set()
    ahead = JobRequest(model="m", input=JobInput(file="f"), deadline=1500.0, expires=True)
    ledger = world.gateway("g1")
    await ledger.create(runs.replace(JOB, request=ahead))
    assert (await state(world, ledger, "completed")).ended_s == 1000.0
    world.now_s = lambda: machine_s + 1e9
    behind = JobRequest(model="m", input=JobInput(file="f"), deadline=machine_s + 1e6, expires=True)
    await ledger.create(runs.replace(JOB, id="job-2", request=behind))
    await state(world, ledger, "expired", "job-2")


@virtual
async def test_a_leader_without_a_broker_stops_before_another_begins(world: World) -> None:
    ledger = world.gateway("g1")
    await ledger.create(JOB)
    await until(lambda: len(world.output.computed) == runs.SHARDS_AT_ONCE, "it computes")
    running = [task for task in asyncio.all_tasks() if task.get_name() == f"job {JOB.id}"]
    world.brokers["g1"].disconnect()
    second = world.gateway("g2")
    _, pending = await asyncio.wait(running, timeout=3 * keepers.FENCE_S)
    assert not pending
    assert len(world.output.computed) == runs.SHARDS_AT_ONCE  # the other gateway has not begun
    world.output.held.set()
    assert (await state(world, second, "completed")).done == 60
    assert set(world.output.parts.values()) == {"g2"}
    world.brokers["g1"].reconnect()


def sweeper(world: World, ledger: JobLedger, refused: dict[str, SIEError], *, has_store: bool = True) -> Sweeper:
    """Return a sweeper for which the removal of the objects of some jobs raises the error in `refused`."""

    async def forget(job: JobRecord) -> None:
        world.removed.append(job.id)
        if job.id in refused:
            raise refused[job.id]

    async def check(call: object, job: JobRecord) -> JobRecord:
        return job

    jobs = JobService(ledger, check, lambda job: 0, forget, lambda file: None, time.time)
    lease = LeaderLease(leases_of(world.brokers["g1"], storage="memory", replicas=1), "jobs")
    return Sweeper(jobs, lease, 60.0, time.time, has_store=has_store)


@virtual
async def test_a_job_that_cannot_be_removed_does_not_hold_the_others(world: World) -> None:
    ledger = world.gateway("g1", at_once=0)
    for number in range(3):
        await ledger.create(runs.replace(JOB, id=f"job-{number}", state="completed", ended_s=1.0))
    await until(lambda: ledger.is_read, "it knows all jobs")
    with pytest.raises(QueueUnavailable):
        await sweeper(world, ledger, {"job-1": QueueUnavailable("the store is away")}).sweep()
    assert [job.id for job in ledger] == ["job-1"]


@virtual
async def test_a_leader_that_was_without_the_broker_says_that_it_lives(world: World) -> None:
    """A leader whose plan runs alone loses the broker. Its end is charged to the plan once another gateway leads, until
    its broker is back.
    """
    planning, goes_on = list[str](), asyncio.Event()

    async def step(kind: str, number: int) -> None:
        planning.append(kind)
        await goes_on.wait()

    world.output.step = step
    world.output.held.set()
    ledger = world.gateway("g0")
    await ledger.create(JOB)
    await until(lambda: planning, "it plans")
    await world.kill("g0")
    world.gateway("g1")
    await until(lambda: len(planning) == 2, "the next one plans alone")
    second = world.gateway("g2")
    world.brokers["g1"].disconnect()

    async def ended() -> bool:
        return (await world.job(second)).suspects == (Suspect(PLAN, ended=("g1",)),)

    await until_told(ended, "the other one leads")
    world.brokers["g1"].reconnect()

    async def lives() -> bool:
        return (await world.job(second)).suspects == (Suspect(PLAN),)

    await until_told(lives, "the first one lives")
    goes_on.set()
    await state(world, second, "completed")
