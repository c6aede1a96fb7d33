"""Blocking client, with `jobs` and `files`. A method runs in the thread of its caller. Requests that a method sends at
the same time run in additional threads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast, overload

from numpy.typing import NDArray

from sie_client import cluster, files, jobs, transport, verbs, watching
from sie_client.core import Calls, Session, call
from sie_client.jobs import JobInfo, SeenJob
from sie_client.threads import ThreadDriver
from sie_client.types import (
    CallOptions,
    Capacity,
    ClientOptions,
    EncodeParams,
    EncodeResult,
    ExtractParams,
    ExtractResult,
    Item,
    JobOptions,
    M,
    ModelFilters,
    Params,
    Pool,
    PoolOptions,
    Progress,
    Ranked,
    RedactOptions,
    RedactResult,
    Results,
    SchemaResult,
    ScoreResult,
)
from sie_contracts.api.batches import FileObject
from sie_contracts.api.jobs import JobManifest


class Job(SeenJob[ThreadDriver]):
    """A job on the server, with methods to control it. `info`: the job as the client last read it from the server."""

    def refresh(self) -> Job:
        """Read the job from the server again. Return this object."""
        self.info = self._driver.run(jobs.get(self.id, self._session))
        return self

    def wait(self, timeout_s: float | None = None, on_progress: Callable[[JobInfo], None] | None = None) -> Job:
        """Wait until the job is completed. Return this object. `on_progress` is called with the job after each poll,
        that is every 0.5 to 5 seconds. Raises JobFailedError if the job fails, expires or is cancelled. Raises
        JobTimeoutError after `timeout_s` (seconds; None: never); the job continues.
        """
        self.info = self._driver.run(jobs.waited(self.id, timeout_s, on_progress, self._session))
        jobs.completed(self.info)
        return self

    def pause(self) -> Job:
        """Pause the job. Running parts of its input are stopped, and start again from their beginning after `resume`.
        The output of finished parts is not lost.
        """
        self.info = self._driver.run(jobs.steered(self.id, "pause", self._session))
        return self

    def resume(self) -> Job:
        """Continue the job after a pause."""
        self.info = self._driver.run(jobs.steered(self.id, "resume", self._session))
        return self

    def cancel(self) -> Job:
        """Stop the job. It cannot be resumed. Output that is already written remains."""
        self.info = self._driver.run(jobs.steered(self.id, "cancel", self._session))
        return self

    def retry(self) -> Job:
        """Create a new job for the rows of this job that failed. Return the new job."""
        return Job(self._driver.run(jobs.retried(self.id, self._session)), self._driver, self._session)

    def manifest(self) -> JobManifest:
        """Return the list of the job's output files."""
        return self._driver.run(jobs.manifest(self.id, self._session))

    def rows(self, limit: int = 20, failed: bool | None = None) -> list[dict[str, Any]]:
        """Return up to `limit` rows of the output, without vectors; if `failed` is True, only rows with an error."""
        return self._driver.run(jobs.rows(self.id, limit, failed, self._session))

    def download(
        self, folder: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> list[Path]:
        """Write the job's output files to a folder, then `manifest.json`. Return the paths of the output files. A file
        appears only when it is complete and has the right SHA-256 digest. A file with this digest that is already in
        the folder is not downloaded again.
        """
        return self._driver.run(jobs.downloaded(self.info, folder, on_progress, self._session))

    def delete(self) -> None:
        """Delete the job and its output. The job must have ended."""
        self._driver.run(jobs.deleted(self.id, self._session))


class Jobs(Calls[ThreadDriver]):
    """Jobs, which process whole files on the server. The methods raise SIEError, `submit` also TypeError."""

    def submit(self, model: str, input: str | os.PathLike[str] | FileObject, **options: Unpack[JobOptions]) -> Job:
        """Create a job that processes `input`: a local file (it is uploaded first), the id of an uploaded file, or a
        URL (`s3://`, `gs://`, `file:///`) that the server is allowed to read.
        """
        return self._job(self._driver.run(jobs.submitted(model, input, options, self._session)))

    def get(self, job: str) -> Job:
        return self._job(self._driver.run(jobs.get(job, self._session)))

    def list(self, state: str | None = None, page: int = jobs.PAGE) -> Iterator[Job]:
        """Yield all jobs, or only those in `state`, newest first. One request to the server reads up to `page` jobs."""
        after: str | None = None
        while True:
            jobs_page = self._driver.run(jobs.page(state, page, after, self._session))
            yield from map(self._job, jobs_page.data)
            after = jobs_page.next
            if after is None:
                return

    def delete(self, job: str) -> None:
        """Delete a job that has ended, and its output."""
        self._driver.run(jobs.deleted(job, self._session))

    def _job(self, info: JobInfo) -> Job:
        return Job(info, self._driver, self._session)


class Files(Calls[ThreadDriver]):
    """Files on the server. The methods raise SIEError."""

    def upload(
        self,
        path: str | os.PathLike[str],
        purpose: str = files.PURPOSE,
        on_progress: Callable[[Progress], None] | None = None,
        expires_after_s: int | None = None,
    ) -> FileObject:
        """Upload a file in pieces, so that it is never completely in memory. `on_progress` is called during the upload;
        `done` of its argument is the number of bytes sent so far. The server removes the file after `expires_after_s`
        seconds; None: never.
        """
        return self._driver.run(files.uploaded(path, purpose, on_progress, self._session, expires_after_s))

    def get(self, file: str) -> FileObject:
        return self._driver.run(files.get(file, self._session))

    def content(self, file: str) -> bytes:
        """Return the content of a file as bytes. For large files use `save`, which needs little memory."""
        return self._driver.run(files.content(file, self._session))

    def save(
        self, file: str, path: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> Path:
        """Download a file to `path`. The file appears there only when it is complete."""
        return self._driver.run(files.saved(file, path, on_progress, self._session))

    def delete(self, file: str) -> None:
        self._driver.run(files.deleted(file, self._session))


class SIEClient:
    """Blocking client of one server. `options` are the defaults for all of its calls, see `types.ClientOptions`. `jobs`
    processes whole files, `files` uploads and downloads them.

    If the server has no capacity (a full queue, a model that is loading), a call waits up to `capacity_budget_s`
    (default: 15 minutes), unless `wait_for_capacity` is False. Several threads may use the same client. Close the
    client, or use it as a context manager. All methods raise `SIEError`.
    """

    def __init__(self, base_url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._session = Session.from_options(transport.with_key(options))
        self._driver = ThreadDriver(transport.address(base_url), self._session)
        self.jobs = Jobs(self._driver, self._session)
        self.files = Files(self._driver, self._session)

    def __enter__(self) -> SIEClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._driver.close()

    @overload
    def encode(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[EncodeParams]
    ) -> EncodeResult: ...
    @overload
    def encode(
        self, model: str, items: Sequence[Item | str], **params: Unpack[EncodeParams]
    ) -> Results[EncodeResult]: ...
    def encode(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[EncodeParams]) -> Any:
        """Return the vectors of one item as one result, or the vectors of a list of items as a list of results, in the
        order of the items. The result of an item that failed has `error`. The call raises SIEError if all items of a
        request fail, for example its only item.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.encode(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def embed(
        self, model: str, texts: Item | str | Iterable[Item | str], **params: Unpack[EncodeParams]
    ) -> NDArray[Any]:
        """Return the dense vectors of texts as one array [texts, dimension], or [dimension] for a single text. `texts`
        may be a list, an array, a Series of pandas or polars, or an iterator, which is read while earlier texts are
        sent. Raises SIEError if any text fails.
        """
        listed, count = transport.as_iterable(texts)
        rows = self._driver.run(verbs.embed(model, listed, count, params, self._session), params, count)
        return cast("NDArray[Any]", rows[0]) if transport.is_single(texts) else rows

    def score(
        self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]
    ) -> ScoreResult:
        """Return the score of each item for a query. The entry of an item that failed has `error`. Raises SIEError if
        the query fails, or if all items of a request fail.
        """
        listed = transport.as_list(items)
        return self._driver.run(verbs.score(model, query, listed, params, self._session), params, len(listed))

    def rerank(
        self,
        model: str,
        query: Item | str,
        documents: Sequence[Item | str],
        *,
        top_n: int | None = None,
        **params: Unpack[Params],
    ) -> list[Ranked]:
        """Return the `top_n` documents with the highest scores (default: all), highest first, each with its position in
        `documents`. Raises SIEError if any document fails.
        """
        listed = transport.as_list(documents)
        return self._driver.run(verbs.rerank(model, query, listed, top_n, params, self._session), params, len(listed))

    @overload
    def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, *, schema: type[M], **params: Unpack[ExtractParams]
    ) -> SchemaResult[M]: ...
    @overload
    def extract(
        self, model: str, items: Sequence[Item | str], *, schema: type[M], **params: Unpack[ExtractParams]
    ) -> Results[SchemaResult[M]]: ...
    @overload
    def extract(  # type: ignore[overload-overlap]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    def extract(
        self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]
    ) -> Results[ExtractResult]: ...
    def extract(
        self,
        model: str,
        items: Item | str | Sequence[Item | str],
        *,
        schema: type[Any] | None = None,
        **params: Unpack[ExtractParams],
    ) -> Any:
        """Extract entities, classes or other data from one item (returns a result) or from a list (returns a list of
        results, in the order of the items). The result of an item that failed has `error`. The call raises SIEError if
        all items of a request fail, for example its only item.

        `schema`: a Struct of msgspec, a dataclass or a model of pydantic. The model fills in the JSON Schema of this
        class, and `data` of each result is an instance of the class. An item fails if the model does not find a
        required value. For a single item the call then raises SIEError, except with `on_item_error` "slot".
        """
        if transport.is_single(items) and schema is not None:
            params = {**params, "on_item_error": params.get("on_item_error") or "fail"}
        listed = transport.as_list(items)
        results = self._driver.run(verbs.extract(model, listed, params, self._session, schema), params, len(listed))
        return results[0] if transport.is_single(items) else results

    @overload
    def redact(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, kinds: Sequence[str] | None = None, **params: Unpack[RedactOptions]
    ) -> RedactResult: ...
    @overload
    def redact(
        self,
        model: str,
        items: Sequence[Item | str],
        kinds: Sequence[str] | None = None,
        **params: Unpack[RedactOptions],
    ) -> Results[RedactResult]: ...
    def redact(
        self,
        model: str,
        items: Item | str | Sequence[Item | str],
        kinds: Sequence[str] | None = None,
        **params: Unpack[RedactOptions],
    ) -> Any:
        """Replace personal data in one text (returns a result) or in a list (returns a list of results, in the order of
        the texts).

        `kinds`: names of the kinds of personal data to replace, such as `email`. A model that was trained for fixed
        kinds replaces all of its kinds. For such a model, `kinds` may be None or have the kinds that the server finds
        by patterns. `restore(result["text"], result["map"])` returns the original text. The result of an item that
        failed has `error`, and no `text`. The call raises SIEError if all items of a request fail, for example its only
        item.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.redact(model, listed, kinds, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def list_models(self, **filters: Unpack[ModelFilters]) -> list[dict[str, Any]]:
        """Return the models of the server's catalogue that match the filters, each as a dictionary."""
        return self._driver.run(cluster.list_models(filters, self._session))

    def get_model(self, model: str) -> dict[str, Any]:
        """Return the description of one model or `model:profile` of the catalogue, without loading the model."""
        return self._driver.run(cluster.get_model(model, self._session))

    def health(self) -> dict[str, Any]:
        """Return the health of the cluster: its workers and models."""
        return self._driver.run(cluster.health(self._session))

    def whoami(self, **options: Unpack[CallOptions]) -> dict[str, Any]:
        """Return the name and the scopes of the client's API key."""
        return self._driver.run(cluster.whoami(options, self._session))

    def get_capacity(self, gpu: str | None = None) -> Capacity:
        """Return the healthy workers of the machine profile `gpu`; for None, all healthy workers."""
        return self._driver.run(cluster.capacity(gpu, self._session))

    def get_scaling(self, lane: str) -> dict[str, Any]:
        """Return the load of a lane (the queue of one pool, machine profile and bundle, named
        `pool.machine_profile.bundle`), and the number of workers that the lane needs.
        """
        return self._driver.run(cluster.scaling(lane, self._session))

    def wait_for_capacity(self, model: str, **options: Unpack[CallOptions]) -> dict[str, Any]:
        """Send one small input, so that a worker starts and loads the model. When the result has arrived, return the
        model's description. Waits at most `capacity_budget_s` for capacity.
        """
        return self._driver.run(cluster.warmed(model, options, self._session), options)

    def create_pool(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Pool:
        """Reserve workers, and return the pool. `gpus`: number of GPUs for each machine profile. A second call with the
        same name changes the reservation and renews its lease.
        """
        return self._driver.run(cluster.create_pool(name, gpus, options, self._session))

    def list_pools(self) -> list[Pool]:
        """Return all pools that the client's API key may see, including `default`."""
        return self._driver.run(cluster.list_pools(self._session))

    def get_pool(self, name: str) -> Pool:
        """Return one pool. Raises PoolNotFoundError if the pool does not exist or its lease has ended."""
        return self._driver.run(cluster.get_pool(name, self._session))

    def renew_pool(self, name: str) -> float:
        """Renew the lease of a pool. Return the end of the lease in seconds since 1970; infinity for a pool without a
        lease.
        """
        return self._driver.run(cluster.renew_pool(name, self._session))

    def delete_pool(self, name: str) -> None:
        """Delete a reserved pool. Its workers serve other requests again."""
        self._driver.run(cluster.delete_pool(name, self._session))

    @contextlib.contextmanager
    def reserve(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Iterator[Pool]:
        """Reserve workers for a `with` block. Create a pool, renew its lease in the background, and delete the pool at
        the end of the block. A call uses the pool only if it has the option `pool=name`.
        """
        created = self.create_pool(name, gpus, **options)
        end = self._driver.start(cluster.renewed(name, gpus, options, self._session))
        try:
            yield created
        finally:
            end(transport.CLOSE_S)
            self._driver.run(cluster.released(name, self._session))

    def watch(self, path: str = watching.CLUSTER_STATUS) -> Iterator[dict[str, Any]]:
        """Yield the status of the cluster as dictionaries, about once per second. Needs the package `websockets`."""
        socket = watching.StatusSocket(self._driver.url, has_answered=self._driver.has_answered)
        request = watching.request(path, self._session)
        with contextlib.closing(socket):
            while True:
                frame: bytes | None = self._driver.run(call(request, self._session), send=socket.open).body
                while frame is not None:
                    yield watching.decoded(frame)
                    frame = socket.next()
                time.sleep(watching.AGAIN_AFTER_S)
