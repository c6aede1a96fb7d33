"""Construction of the gateway's objects that serve jobs and files."""

from __future__ import annotations

from dataclasses import dataclass

from sie_broker.record import LeaderLease, leases_of
from sie_bulk_jobs.file_objects import open_files
from sie_bulk_jobs.gateway.client import JobIdentity
from sie_bulk_jobs.gateway.engine import JobEngine
from sie_bulk_jobs.gateway.files import FileStore
from sie_bulk_jobs.gateway.ledger import JobFigures, JobLedger
from sie_bulk_jobs.gateway.pace import workers_needed
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse, UseBound
from sie_bulk_jobs.gateway.results import JobResults
from sie_bulk_jobs.gateway.scheduler import JobScheduler
from sie_bulk_jobs.gateway.service import JobService, Sweeper
from sie_bulk_jobs.records import JobRecord
from sie_bulk_jobs.settings import JobsSettings
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.grant import Charge, Grant
from sie_gateway.inference.answers import CachePolicy
from sie_gateway.plugin import PluginContext, Service
from sie_runtime.http.asgi import uuid7
from sie_runtime.process import Stop, Tasks
from sie_store import object_stores


@dataclass(frozen=True)
class JobParts(Service):
    """Objects that serve jobs and files. The handlers of routes use `files`, `jobs` and `results`."""

    files: FileStore
    jobs: JobService
    results: JobResults
    bucket: JobsBucket
    keeper: JobScheduler
    sweeper: Sweeper

    async def prepare(self) -> None:
        await self.bucket.follow()

    def start(self, tasks: Tasks, stop: Stop) -> None:
        tasks.start(self.bucket.run(stop), "jobs and files")
        tasks.start(self.files.run(stop), "clean-up of files")
        tasks.start(self.keeper.run(stop), "jobs")
        tasks.start(self.sweeper.run(stop), "clean-up of jobs")

    def wanted_workers(self, lane: Lane, workers: int, now_s: float) -> int:
        """Return how many workers a lane (pool, machine profile and bundle) needs so that its jobs end before their
        deadlines. `workers`: number of workers that the lane has.
        """
        name = str(lane)
        needed = (workers_needed(job, workers, now_s) for job in self.jobs.ledger if job.lane == name)
        return sum(count for count in needed if count is not None)


def build(context: PluginContext) -> JobParts:
    """Build the objects from the settings. All times are those of the broker's clock, because a gateway whose own clock
    is ahead would remove the files and jobs of all keys too early. Raises SettingError.
    """
    settings, broker, fleet, now_s = context.settings, context.broker, context.fleet, context.now_s
    assert isinstance(settings, JobsSettings)
    url, replicas = settings.payload_store_url, settings.stream_replicas
    bucket = JobsBucket(broker, replicas)
    ledger = JobLedger(bucket, broker, replicas, _job_usage(settings))
    leases = leases_of(broker, storage=settings.stream_storage, replicas=replicas)
    files = FileStore(bucket, open_files(url), LeaderLease(leases, "files"), _file_usage(settings), now_s)
    store = None if url is None else object_stores.opened(url, "SIE_PAYLOAD_STORE_URL")

    def charge(grant: Grant) -> Charge | None:
        return context.quotas.charge(grant.key, grant.limits)

    def identity(owner: str) -> JobIdentity:
        return JobIdentity(owner, context.grant_of_key, charge)

    policy = CachePolicy.from_settings(settings)
    engine = JobEngine(settings, policy, context.inference, ledger, files, store, identity, context.inference_route)

    def workers(job: JobRecord) -> int:
        return sum(str(beat.lane) == job.lane for beat in fleet.healthy())

    jobs = JobService(ledger, engine.check, workers, engine.remove, files.content, now_s)
    keeper = JobScheduler(
        ledger,
        leases,
        uuid7(),
        engine.work,
        at_once=settings.jobs_at_once if url is not None else 0,
        now_s=now_s,
    )
    sweeper = Sweeper(jobs, LeaderLease(leases, "jobs"), settings.jobs_keep_s, now_s, has_store=url is not None)
    parts = JobParts(files, jobs, JobResults(ledger, engine), bucket, keeper, sweeper)
    context.scaling.further.append(lambda lane: parts.wanted_workers(lane, len(fleet.of_lane(lane)), now_s()))
    context.metrics.registry.register(JobFigures(ledger))
    return parts


def _job_usage(settings: JobsSettings) -> OwnerUsage:
    return OwnerUsage(
        UseBound(
            RecordUse(settings.jobs_per_key, settings.jobs_bytes_per_key),
            ("SIE_JOBS_PER_KEY", "SIE_JOBS_BYTES_PER_KEY"),
        ),
        UseBound(RecordUse(settings.max_jobs, settings.max_jobs_bytes), ("SIE_MAX_JOBS", "SIE_MAX_JOBS_BYTES")),
        kinds=("jobs and batches", "bytes of records of jobs and batches"),
        remedy="delete some that have ended",
        reason="jobs",
    )


def _file_usage(settings: JobsSettings) -> OwnerUsage:
    return OwnerUsage(
        UseBound(
            RecordUse(settings.files_per_key, settings.files_bytes_per_key),
            ("SIE_FILES_PER_KEY", "SIE_FILES_BYTES_PER_KEY"),
        ),
        UseBound(RecordUse(settings.max_files, settings.max_files_bytes), ("SIE_MAX_FILES", "SIE_MAX_FILES_BYTES")),
        kinds=("files", "bytes of files"),
        remedy="delete some, or let them expire",
        reason="files",
    )
