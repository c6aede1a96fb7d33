"""Client for asyncio, with `jobs` and `files`. It has the methods of `SIEClient`, in asynchronous form."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast, overload

from numpy.typing import NDArray

from sie_client import cluster, files, jobs, transport, verbs, watching
from sie_client.core import Calls, Session, call
from sie_client.jobs import JobInfo, SeenJob
from sie_client.tasks import TaskDriver
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


class AsyncJob(SeenJob[TaskDriver]):
    """A job on the server, with the methods of `Job`, for asyncio."""

    async def refresh(self) -> AsyncJob:
        self.info = await self._driver.run(jobs.get(self.id, self._session))
        return self

    async def wait(
        self, timeout_s: float | None = None, on_progress: Callable[[JobInfo], None] | None = None
    ) -> AsyncJob:
        self.info = await self._driver.run(jobs.waited(self.id, timeout_s, on_progress, self._session))
        jobs.completed(self.info)
        return self

    async def pause(self) -> AsyncJob:
        self.info = await self._driver.run(jobs.steered(self.id, "pause", self._session))
        return self

    async def resume(self) -> AsyncJob:
        self.info = await self._driver.run(jobs.steered(self.id, "resume", self._session))
        return self

    async def cancel(self) -> AsyncJob:
        self.info = await self._driver.run(jobs.steered(self.id, "cancel", self._session))
        return self

    async def retry(self) -> AsyncJob:
        return AsyncJob(await self._driver.run(jobs.retried(self.id, self._session)), self._driver, self._session)

    async def manifest(self) -> JobManifest:
        return await self._driver.run(jobs.manifest(self.id, self._session))

    async def rows(self, limit: int = 20, failed: bool | None = None) -> list[dict[str, Any]]:
        return await self._driver.run(jobs.rows(self.id, limit, failed, self._session))

    async def download(
        self, folder: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> list[Path]:
        return await self._driver.run(jobs.downloaded(self.info, folder, on_progress, self._session))

    async def delete(self) -> None:
        await self._driver.run(jobs.deleted(self.id, self._session))


class AsyncJobs(Calls[TaskDriver]):
    """Jobs, which process whole files on the server. The methods are those of `Jobs`, for asyncio."""

    async def submit(
        self, model: str, input: str | os.PathLike[str] | FileObject, **options: Unpack[JobOptions]
    ) -> AsyncJob:
        return self._job(await self._driver.run(jobs.submitted(model, input, options, self._session)))

    async def get(self, job: str) -> AsyncJob:
        return self._job(await self._driver.run(jobs.get(job, self._session)))

    async def list(self, state: str | None = None, page: int = jobs.PAGE) -> AsyncGenerator[AsyncJob]:
        after: str | None = None
        while True:
            jobs_page = await self._driver.run(jobs.page(state, page, after, self._session))
            for info in jobs_page.data:
                yield self._job(info)
            after = jobs_page.next
            if after is None:
                return

    async def delete(self, job: str) -> None:
        await self._driver.run(jobs.deleted(job, self._session))

    def _job(self, info: JobInfo) -> AsyncJob:
        return AsyncJob(info, self._driver, self._session)


class AsyncFiles(Calls[TaskDriver]):
    """Files on the server, with the methods of `Files`, for asyncio."""

    async def upload(
        self,
        path: str | os.PathLike[str],
        purpose: str = files.PURPOSE,
        on_progress: Callable[[Progress], None] | None = None,
        expires_after_s: int | None = None,
    ) -> FileObject:
        return await self._driver.run(files.uploaded(path, purpose, on_progress, self._session, expires_after_s))

    async def get(self, file: str) -> FileObject:
        return await self._driver.run(files.get(file, self._session))

    async def content(self, file: str) -> bytes:
        return await self._driver.run(files.content(file, self._session))

    async def save(
        self, file: str, path: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> Path:
        return await self._driver.run(files.saved(file, path, on_progress, self._session))

    async def delete(self, file: str) -> None:
        await self._driver.run(files.deleted(file, self._session))


class SIEAsyncClient:
    """Client of one server for asyncio, with the methods of `SIEClient`. A client must be used in one event loop only.
    Use it as an async context manager, or call `await close()`.
    """

    def __init__(self, base_url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._session = Session.from_options(transport.with_key(options))
        self._driver = TaskDriver(transport.address(base_url), self._session)
        self.jobs = AsyncJobs(self._driver, self._session)
        self.files = AsyncFiles(self._driver, self._session)

    async def __aenter__(self) -> SIEAsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._driver.close()

    @overload
    async def encode(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[EncodeParams]
    ) -> EncodeResult: ...
    @overload
    async def encode(
        self, model: str, items: Sequence[Item | str], **params: Unpack[EncodeParams]
    ) -> Results[EncodeResult]: ...
    async def encode(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[EncodeParams]) -> Any:
        listed = transport.as_list(items)
        results = await self._driver.run(verbs.encode(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    async def embed(
        self, model: str, texts: Item | str | Iterable[Item | str], **params: Unpack[EncodeParams]
    ) -> NDArray[Any]:
        listed, count = transport.as_iterable(texts)
        rows = await self._driver.run(verbs.embed(model, listed, count, params, self._session), params, count)
        return cast("NDArray[Any]", rows[0]) if transport.is_single(texts) else rows

    async def score(
        self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]
    ) -> ScoreResult:
        listed = transport.as_list(items)
        return await self._driver.run(verbs.score(model, query, listed, params, self._session), params, len(listed))

    async def rerank(
        self,
        model: str,
        query: Item | str,
        documents: Sequence[Item | str],
        *,
        top_n: int | None = None,
        **params: Unpack[Params],
    ) -> list[Ranked]:
        listed = transport.as_list(documents)
        return await self._driver.run(
            verbs.rerank(model, query, listed, top_n, params, self._session), params, len(listed)
        )

    @overload
    async def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, *, schema: type[M], **params: Unpack[ExtractParams]
    ) -> SchemaResult[M]: ...
    @overload
    async def extract(
        self, model: str, items: Sequence[Item | str], *, schema: type[M], **params: Unpack[ExtractParams]
    ) -> Results[SchemaResult[M]]: ...
    @overload
    async def extract(  # type: ignore[overload-overlap]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    async def extract(
        self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]
    ) -> Results[ExtractResult]: ...
    async def extract(
        self,
        model: str,
        items: Item | str | Sequence[Item | str],
        *,
        schema: type[Any] | None = None,
        **params: Unpack[ExtractParams],
    ) -> Any:
        if transport.is_single(items) and schema is not None:
            params = {**params, "on_item_error": params.get("on_item_error") or "fail"}
        listed = transport.as_list(items)
        results = await self._driver.run(
            verbs.extract(model, listed, params, self._session, schema), params, len(listed)
        )
        return results[0] if transport.is_single(items) else results

    @overload
    async def redact(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, kinds: Sequence[str] | None = None, **params: Unpack[RedactOptions]
    ) -> RedactResult: ...
    @overload
    async def redact(
        self,
        model: str,
        items: Sequence[Item | str],
        kinds: Sequence[str] | None = None,
        **params: Unpack[RedactOptions],
    ) -> Results[RedactResult]: ...
    async def redact(
        self,
        model: str,
        items: Item | str | Sequence[Item | str],
        kinds: Sequence[str] | None = None,
        **params: Unpack[RedactOptions],
    ) -> Any:
        listed = transport.as_list(items)
        results = await self._driver.run(verbs.redact(model, listed, kinds, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    async def list_models(self, **filters: Unpack[ModelFilters]) -> list[dict[str, Any]]:
        return await self._driver.run(cluster.list_models(filters, self._session))

    async def get_model(self, model: str) -> dict[str, Any]:
        return await self._driver.run(cluster.get_model(model, self._session))

    async def health(self) -> dict[str, Any]:
        return await self._driver.run(cluster.health(self._session))

    async def whoami(self, **options: Unpack[CallOptions]) -> dict[str, Any]:
        return await self._driver.run(cluster.whoami(options, self._session))

    async def get_capacity(self, gpu: str | None = None) -> Capacity:
        return await self._driver.run(cluster.capacity(gpu, self._session))

    async def get_scaling(self, lane: str) -> dict[str, Any]:
        return await self._driver.run(cluster.scaling(lane, self._session))

    async def wait_for_capacity(self, model: str, **options: Unpack[CallOptions]) -> dict[str, Any]:
        return await self._driver.run(cluster.warmed(model, options, self._session), options)

    async def create_pool(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Pool:
        return await self._driver.run(cluster.create_pool(name, gpus, options, self._session))

    async def list_pools(self) -> list[Pool]:
        return await self._driver.run(cluster.list_pools(self._session))

    async def get_pool(self, name: str) -> Pool:
        return await self._driver.run(cluster.get_pool(name, self._session))

    async def renew_pool(self, name: str) -> float:
        return await self._driver.run(cluster.renew_pool(name, self._session))

    async def delete_pool(self, name: str) -> None:
        await self._driver.run(cluster.delete_pool(name, self._session))

    @contextlib.asynccontextmanager
    async def reserve(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> AsyncIterator[Pool]:
        created = await self.create_pool(name, gpus, **options)
        end = self._driver.start(cluster.renewed(name, gpus, options, self._session))
        try:
            yield created
        finally:
            await end(transport.CLOSE_S)
            await self._driver.run(cluster.released(name, self._session))

    async def watch(self, path: str = watching.CLUSTER_STATUS) -> AsyncGenerator[dict[str, Any]]:
        socket = watching.AsyncStatusSocket(self._driver.url, has_answered=self._driver.has_answered)
        request = watching.request(path, self._session)
        async with contextlib.aclosing(socket):
            while True:
                frame: bytes | None = (await self._driver.run(call(request, self._session), send=socket.open)).body
                while frame is not None:
                    yield watching.decoded(frame)
                    frame = await socket.next()
                await asyncio.sleep(watching.AGAIN_AFTER_S)
