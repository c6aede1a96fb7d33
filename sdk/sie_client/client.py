"""The blocking client, its `jobs` and `files`. Its methods are plans, driven in the calling thread and, where they ask
several things at once, in threads of their own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from numpy.typing import NDArray

from sie_client import cluster, files, jobs, transport, verbs, watching
from sie_client.core import Session, call
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
    ModelFilters,
    Params,
    Pool,
    PoolOptions,
    Progress,
    Ranked,
    Results,
    ScoreResult,
)
from sie_contracts.api.batches import FileObject
from sie_contracts.api.jobs import JobManifest

if TYPE_CHECKING:
    from typing import Unpack


class Job(SeenJob):
    """A job, and what can be done with it. `info` is as it was last seen."""

    def __init__(self, info: JobInfo, driver: ThreadDriver, session: Session) -> None:
        super().__init__(info)
        self._driver = driver
        self._session = session

    def refresh(self) -> Job:
        """Look at it again."""
        self.info = self._driver.run(jobs.get(self.id, self._session))
        return self

    def wait(self, timeout_s: float | None = None, on_progress: Callable[[JobInfo], None] | None = None) -> Job:
        """Until it is completed. `on_progress` gets it after each look, one each few seconds.

        Raises JobFailedError if it fails, expires or is cancelled, and JobTimeoutError after `timeout_s`; the job goes
        on then.
        """
        self.info = self._driver.run(jobs.waited(self.id, timeout_s, on_progress, self._session))
        jobs.completed(self.info)
        return self

    def pause(self) -> Job:
        """Pause the job: parts that run are finished, and none begins."""
        self.info = self._driver.run(jobs.steered(self.id, "pause", self._session))
        return self

    def resume(self) -> Job:
        """Go on after a pause."""
        self.info = self._driver.run(jobs.steered(self.id, "resume", self._session))
        return self

    def cancel(self) -> Job:
        """End it for ever. What it has written stays."""
        self.info = self._driver.run(jobs.steered(self.id, "cancel", self._session))
        return self

    def retry(self) -> Job:
        """Another job, over the rows that failed."""
        return Job(self._driver.run(jobs.retried(self.id, self._session)), self._driver, self._session)

    def manifest(self) -> JobManifest:
        """The files of its output, all of them."""
        return self._driver.run(jobs.manifest(self.id, self._session))

    def rows(self, limit: int = 20, failed: bool | None = None) -> list[dict[str, Any]]:
        """A sample of the rows that were answered, without vectors. `failed`: only those with an error."""
        return self._driver.run(jobs.rows(self.id, limit, failed, self._session))

    def download(
        self, folder: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> list[Path]:
        """The files of its output in a folder, and `manifest.json` last. Each is checked by its digest and appears once
        it is whole; one that is there already is not fetched again.
        """
        return self._driver.run(jobs.downloaded(self.info, folder, on_progress, self._session))

    def delete(self) -> None:
        """Forget it with its output. It must have ended."""
        self._driver.run(jobs.deleted(self.id, self._session))


class Jobs:
    """Work on whole files. Its methods raise SIEError."""

    def __init__(self, driver: ThreadDriver, session: Session) -> None:
        self._driver = driver
        self._session = session

    def submit(self, model: str, input: str | os.PathLike[str] | FileObject, **options: Unpack[JobOptions]) -> Job:
        """A job over `input`: a local file, which is sent first, the id of one that was sent, or an address (`s3://`,
        `gs://`, `file:///`) that the server allows.
        """
        return self._job(self._driver.run(jobs.submitted(model, input, options, self._session)))

    def get(self, job: str) -> Job:
        return self._job(self._driver.run(jobs.get(job, self._session)))

    def list(self, state: str | None = None, page: int = jobs.PAGE) -> Iterator[Job]:
        """All jobs, the newest first, or those in a state. Asks for `page` of them at a time."""
        after: str | None = None
        while True:
            jobs_page = self._driver.run(jobs.page(state, page, after, self._session))
            yield from map(self._job, jobs_page.data)
            after = jobs_page.next
            if after is None:
                return

    def delete(self, job: str) -> None:
        """Forget a job that has ended, with its output."""
        self._driver.run(jobs.deleted(job, self._session))

    def _job(self, info: JobInfo) -> Job:
        return Job(info, self._driver, self._session)


class Files:
    """Files at the server. Its methods raise SIEError."""

    def __init__(self, driver: ThreadDriver, session: Session) -> None:
        self._driver = driver
        self._session = session

    def upload(
        self,
        path: str | os.PathLike[str],
        purpose: str = files.PURPOSE,
        on_progress: Callable[[Progress], None] | None = None,
        expires_after_s: int | None = None,
    ) -> FileObject:
        """Send a file, read from the disk as it goes. `on_progress` gets its bytes. It is removed after
        `expires_after_s`, and kept without that.
        """
        return self._driver.run(files.uploaded(path, purpose, on_progress, self._session, expires_after_s))

    def get(self, file: str) -> FileObject:
        return self._driver.run(files.get(file, self._session))

    def content(self, file: str) -> bytes:
        """All of it, in memory. `save` is for large ones."""
        return self._driver.run(files.content(file, self._session))

    def save(
        self, file: str, path: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> Path:
        """Write it to `path`, where it appears once it is whole."""
        return self._driver.run(files.saved(file, path, on_progress, self._session))

    def delete(self, file: str) -> None:
        self._driver.run(files.deleted(file, self._session))


class SIEClient:
    """Blocking client of one server. `options` hold for all of its calls: see `types.ClientOptions`. `jobs`: work on
    whole files; `files`: those that were sent.

    Waits for capacity (a full queue, a loading model) up to 15 minutes unless `wait_for_capacity` is False. Safe to
    share between threads. Close it, or use it as a context manager. All methods raise `SIEError`.
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
        """Vectors of one item (a result) or of a list (a list of results, in order). An item that failed carries
        `error`.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.encode(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def embed(
        self, model: str, texts: Item | str | Iterable[Item | str], **params: Unpack[EncodeParams]
    ) -> NDArray[Any]:
        """Dense vectors as one array [texts, width], of one text [width]. `texts` may be a list, an array, a Series of
        pandas or polars, or an iterator, which is read as its parts are sent. Raises for a text that failed.
        """
        listed, count = transport.as_iterable(texts)
        rows = self._driver.run(verbs.embed(model, listed, count, params, self._session), params, count)
        return cast("NDArray[Any]", rows[0]) if transport.is_single(texts) else rows

    def score(
        self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]
    ) -> ScoreResult:
        """Scores of items against a query. Raises for the query; an item that failed carries `error`."""
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
        """The best `top_n` documents (all), best first, with their positions. Raises for a document that failed."""
        listed = transport.as_list(documents)
        return self._driver.run(verbs.rerank(model, query, listed, top_n, params, self._session), params, len(listed))

    @overload
    def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    def extract(
        self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]
    ) -> Results[ExtractResult]: ...
    def extract(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[ExtractParams]) -> Any:
        """Extract from one item (returns a result) or from a list (returns a list of results, in order). An item that
        failed carries `error`.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.extract(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def list_models(self, **filters: Unpack[ModelFilters]) -> list[dict[str, Any]]:
        """The catalogue, or what of it fits."""
        return self._driver.run(cluster.list_models(filters, self._session))

    def get_model(self, model: str) -> dict[str, Any]:
        """One model or variant of the catalogue. Never loads it."""
        return self._driver.run(cluster.get_model(model, self._session))

    def health(self) -> dict[str, Any]:
        """Report the health of the cluster."""
        return self._driver.run(cluster.health(self._session))

    def get_capacity(self, gpu: str | None = None) -> Capacity:
        """The healthy workers of a machine profile, or all."""
        return self._driver.run(cluster.capacity(gpu, self._session))

    def get_scaling(self, lane: str) -> dict[str, Any]:
        """Report the load of a lane, `pool.machine_profile.bundle`, and how many workers it needs."""
        return self._driver.run(cluster.scaling(lane, self._session))

    def wait_for_capacity(self, model: str, **options: Unpack[CallOptions]) -> dict[str, Any]:
        """Make a worker start and load the model, and return its catalogue entry once it answers; waits up to
        `capacity_budget_s`.
        """
        return self._driver.run(cluster.warmed(model, options, self._session), options)

    def create_pool(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Pool:
        """Reserve workers, as many of each machine profile as `gpus` says. The same again renews the lease."""
        return self._driver.run(cluster.create_pool(name, gpus, options, self._session))

    def list_pools(self) -> list[Pool]:
        """All pools, `default` among them."""
        return self._driver.run(cluster.list_pools(self._session))

    def get_pool(self, name: str) -> Pool:
        """One pool. Raises PoolNotFoundError also when its lease has lapsed."""
        return self._driver.run(cluster.get_pool(name, self._session))

    def renew_pool(self, name: str) -> float:
        """Renew a lease; when it ends now, in seconds since 1970."""
        return self._driver.run(cluster.renew_pool(name, self._session))

    def delete_pool(self, name: str) -> None:
        """Give the workers of a reservation back."""
        self._driver.run(cluster.delete_pool(name, self._session))

    @contextlib.contextmanager
    def reserve(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Iterator[Pool]:
        """A pool for the length of a `with` block: created, renewed in the background, deleted at the end. Use it as
        `pool=name`.
        """
        created = self.create_pool(name, gpus, **options)
        end = self._driver.start(cluster.renewed(name, gpus, options, self._session))
        try:
            yield created
        finally:
            end(transport.CLOSE_S)
            self._driver.run(cluster.released(name, self._session))

    def watch(self, path: str = watching.CLUSTER_STATUS) -> Iterator[dict[str, Any]]:
        """Status frames, one each second, for as long as they are asked for. Needs the package `websockets`."""
        socket, request = watching.StatusSocket(self._driver.url), watching.request(path, self._session)
        with contextlib.closing(socket):
            while True:
                frame: bytes | None = self._driver.run(call(request, self._session.policy), send=socket.open).body
                while frame is not None:
                    yield watching.decoded(frame)
                    frame = socket.next()
                time.sleep(watching.AGAIN_AFTER_S)
