"""Construction of a job from its record: where it reads and writes, its model, and its credential.

new JobRecord ──check()──► job is refused, or stored: a native job with the model to which its alias resolves now
stored JobRecord ──work()──► NativeJob or BatchJob, which the gateway that leads the job runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sie_bulk_jobs.datasets import templates
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.gateway import pace
from sie_bulk_jobs.gateway.client import JobClient, JobIdentity
from sie_bulk_jobs.gateway.files import FileStore
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.lines import BatchJob
from sie_bulk_jobs.gateway.native import Before, JobPlaces, NativeJob, chunks_of
from sie_bulk_jobs.gateway.run import JobRun, JobWork
from sie_bulk_jobs.gateway.storage import JobStorage
from sie_bulk_jobs.records import JobRecord
from sie_bulk_jobs.settings import JobsSettings
from sie_bulk_jobs.sinks import opening
from sie_bulk_jobs.sinks.sink import CollectionRefused, checked_name
from sie_contracts.api.jobs import JobRequest
from sie_contracts.errors import ErrorInfo, InvalidInput, NotReady, SIEError
from sie_contracts.settings import Secret
from sie_gateway.inference.answers import CachePolicy
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import InferRequest

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from sie_gateway.inference.handler import InferenceRoute

STORE = "SIE_PAYLOAD_STORE_URL"
PARSER_FAMILY = DEFAULT_PARSER = "docling"
# dtypes that a database (sink) can store; other dtypes are packed bits, or need a scale to be read
SINK_DTYPES = ("float32", "float16")


@dataclass(eq=False)
class JobEngine:
    """Checks new jobs, and builds the objects that run jobs. `identity` takes a job's owner (an API key) and returns
    the object with the owner's rights and quota. `route_of` takes a URL path and returns its POST route.
    """

    settings: JobsSettings
    policy: CachePolicy
    inference: Inference
    ledger: JobLedger
    files: FileStore
    store: ObjectStore | None
    identity: Callable[[str], JobIdentity]
    route_of: Callable[[str], InferenceRoute | None]

    async def check(self, call: Call, job: JobRecord) -> JobRecord:
        """Return a native job with its model's alias resolved, so that all rows get the same model. A retry keeps the
        model of the earlier job. Return a batch unchanged, because each line of a batch names a model. Raises SIEError
        if the job can never run.
        """
        self.require_store()
        if job.batch is not None:
            await self.files.find(job.batch.input_file_id, call.grant.owns)
            return job
        request = job.request
        assert request is not None
        templates.check(request.input, request.operation)
        pace.zone(request.time_zone)
        pace.check(request.windows)
        if request.output.url:
            Place.opened(request.output.url, self._urls, is_output=True)
        if request.input.url:
            Place.opened(request.input.url, self._urls)
        else:
            await self.files.find(request.input.file, call.grant.owns)
        understood = self._pinned(call, request, job.model or request.model)
        if request.output.sink:
            self._check_sink(request, understood)
        parser = self._pinned_parser(call, job.parser or request.input.parser) if request.input.documents else ""
        return replace(job, model=understood.resolved.canonical, lane=str(understood.lane), parser=parser)

    def _pinned_parser(self, call: Call, parser: str) -> str:
        """Return the resolved name of the model that parses the documents of a job. Raises SIEError."""
        resolved = self.inference.resolve(parser or DEFAULT_PARSER, call)
        entry = resolved.entry
        if entry.family != PARSER_FAMILY:
            message = f"expected a model of the family {PARSER_FAMILY}, {entry.id} is of {entry.family}"
            raise InvalidInput.at("input.parser", message)
        return resolved.canonical

    def _pinned(self, call: Call, request: JobRequest, model: str) -> InferRequest:
        """Resolve `model`, and plan a sample request, which checks the job before it is stored. Return the planned
        request. Raises SIEError if the model cannot serve the sample request.
        """
        resolved = self.inference.resolve(model, call)
        reads_images = templates.reads_images(request.input)
        item = RequestItem(None, modalities=("image",), images=(b"",)) if reads_images else RequestItem("")
        source = request.input
        if source.chunks is not None:
            item = RequestItem(" ", chunks=chunks_of(source, " ", [[0, 1]]))
        query = RequestItem("") if request.operation == "score" else None
        body = {"params": dict(request.params)} if request.params else {}
        infer_request = InferRequest(request.operation, resolved, (item,), body, query, "bulk")
        if request.operation not in resolved.entry.tasks:
            tasks = ", ".join(resolved.entry.tasks)
            message = f"{resolved.entry.id} does not support {request.operation}, it supports {tasks}"
            raise InvalidInput.at("operation", message, reason="unsupported_operation")
        if reads_images and "image" not in resolved.entry.inputs:
            message = f"expected a template, such as {{text}}; {resolved.entry.id} reads no images"
            raise InvalidInput.at("input.text", message)
        # x-sie-strict makes an unknown option an error here; the job itself would ignore the option in every row
        headers = {**headers_of(request), "x-sie-strict": "true"}
        probe = Call(call.id, call.received_s, headers, grant=call.grant)
        understood = self.inference.understand(probe, infer_request)
        if source.chunks is not None:
            if understood.options.run.is_query:
                raise InvalidInput.at("params.is_query", "a query cannot have chunks: leave out input.chunks")
            if (fault := self.inference.fault_of(understood)) is not None:
                raise InvalidInput(f"input.{fault.message}", reason=fault.reason, param=f"input.{fault.param}")
        return understood

    def _check_sink(self, request: JobRequest, understood: InferRequest) -> None:
        """Raise InvalidInput if the database cannot store the output of the job."""
        output, run = request.output, understood.options.run
        url = self._sinks.get(output.sink)
        if url is None:
            names = ", ".join(self._sinks) or "none"
            raise InvalidInput.at("output.sink", f"expected a name of SIE_JOBS_SINKS, which has {names}")
        if not output.collection:
            raise InvalidInput.at("output.collection", "expected the name of a collection")
        try:
            checked_name(output.collection)
        except CollectionRefused as error:
            raise InvalidInput.at("output.collection", str(error)) from error
        if request.operation != "encode":
            raise InvalidInput.at(
                "operation", f"a database stores vectors: encode returns them, {request.operation} does not"
            )
        stores = opening.outputs(url.reveal())
        if foreign := [name for name in run.outputs if name not in stores]:
            raise InvalidInput.at(
                "params.output_types",
                f"{output.sink} stores {', '.join(stores)} vectors, and this job has {foreign[0]}",
            )
        if run.dtype not in SINK_DTYPES:
            expected = " or ".join(SINK_DTYPES)
            raise InvalidInput.at("params.output_dtype", f"a database stores {expected}, and this job has {run.dtype}")
        if columns_taken := opening.reserved(url.reveal()).intersection(request.input.keep):
            raise InvalidInput.at(
                "input.keep", f"{min(columns_taken)!r} is the field in which the database stores the ids of rows"
            )

    def require_store(self) -> ObjectStore:
        if self.store is None:
            raise NotReady(f"jobs and files need a payload store: set {STORE}", reason="no_store", param=STORE)
        return self.store

    @property
    def _urls(self) -> tuple[str, ...]:
        return self.settings.jobs_urls or ()

    @property
    def _sinks(self) -> Mapping[str, Secret]:
        return dict(self.settings.jobs_sinks or ())

    def work(self, job: JobRecord, progress: JobRun) -> JobWork:
        """Build the JobWork of a job for the gateway that leads the job. Raises SIEError."""
        workplace = self.workplace(job)
        request = job.request

        def trouble(error: SIEError | None) -> None:
            progress.trouble(None if error is None else ErrorInfo(error.code, error.message))

        client = JobClient(
            self.inference,
            self.identity(job.owner),
            headers_of(request) if request is not None else {},
            trouble,
            progress.until_open,
            request.tokens_per_s if request is not None else 0.0,
        )
        if request is None:
            return BatchJob(workplace, job, client, progress, self.route_of)
        return NativeJob(
            workplace,
            job,
            client,
            progress,
            self._places(job, request),
            cache_bytes=self.settings.jobs_cache_bytes,
            policy=self.policy,
        )

    def _places(self, job: JobRecord, request: JobRequest) -> JobPlaces:
        store = self.require_store()
        if request.input.url:
            source = Place.opened(request.input.url, self._urls)
        else:
            # if the file was removed, the id of the file serves as its name, and the job fails when it reads the file
            name, digest = self.files.content(request.input.file) or (request.input.file, "")
            source = Place(store, "files/", request.input.file, name, digest)
        sink = None
        if request.output.sink:
            url = self._sinks.get(request.output.sink)
            if url is None:
                raise InvalidInput.at("output.sink", f"SIE_JOBS_SINKS no longer has {request.output.sink}")
            sink = opening.opened(url.reveal(), "SIE_JOBS_SINKS")
        return JobPlaces(source, self.output(job), sink, self._before)

    async def _before(self, job_id: str) -> Before:
        job = self.ledger.find(job_id)
        return Before(job, self.workplace(job), self.output(job), await self.ledger.shards(job.id))

    async def remove(self, job: JobRecord) -> None:
        await self.workplace(job).remove()

    def workplace(self, job: JobRecord) -> JobStorage:
        return JobStorage(self.require_store(), job.id, self.files)

    def output(self, job: JobRecord) -> Place:
        """Return the place where the job's output is written. Raises InvalidInput if the place is no longer allowed."""
        if job.output_url:
            return Place.opened(job.output_url, self._urls, is_output=True)
        return Place(self.require_store(), f"jobs/{job.id}/output/")


def headers_of(request: JobRequest) -> dict[str, str]:
    return {
        **({"x-sie-pool": request.pool} if request.pool else {}),
        **({"x-sie-machine-profile": request.machine_profile} if request.machine_profile else {}),
    }
