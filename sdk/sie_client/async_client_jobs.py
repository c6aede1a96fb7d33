"""`jobs` and `files` of the client for asyncio."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sie_client import files, jobs
from sie_client.core import Session
from sie_client.jobs import JobInfo, SeenJob
from sie_client.tasks import TaskDriver
from sie_client.types import JobOptions, Progress
from sie_contracts.api.batches import FileObject
from sie_contracts.api.jobs import JobManifest

if TYPE_CHECKING:
    from typing import Unpack


class AsyncJob(SeenJob):
    """`Job` for asyncio."""

    def __init__(self, info: JobInfo, driver: TaskDriver, session: Session) -> None:
        super().__init__(info)
        self._driver = driver
        self._session = session

    async def refresh(self) -> AsyncJob:
        """Asynchronous Job.refresh."""
        self.info = await self._driver.run(jobs.get(self.id, self._session))
        return self

    async def wait(
        self, timeout_s: float | None = None, on_progress: Callable[[JobInfo], None] | None = None
    ) -> AsyncJob:
        """Asynchronous Job.wait."""
        self.info = await self._driver.run(jobs.waited(self.id, timeout_s, on_progress, self._session))
        jobs.completed(self.info)
        return self

    async def pause(self) -> AsyncJob:
        """Asynchronous Job.pause."""
        self.info = await self._driver.run(jobs.steered(self.id, "pause", self._session))
        return self

    async def resume(self) -> AsyncJob:
        """Asynchronous Job.resume."""
        self.info = await self._driver.run(jobs.steered(self.id, "resume", self._session))
        return self

    async def cancel(self) -> AsyncJob:
        """Asynchronous Job.cancel."""
        self.info = await self._driver.run(jobs.steered(self.id, "cancel", self._session))
        return self

    async def retry(self) -> AsyncJob:
        """Asynchronous Job.retry."""
        return AsyncJob(await self._driver.run(jobs.retried(self.id, self._session)), self._driver, self._session)

    async def manifest(self) -> JobManifest:
        """Asynchronous Job.manifest."""
        return await self._driver.run(jobs.manifest(self.id, self._session))

    async def rows(self, limit: int = 20, failed: bool | None = None) -> list[dict[str, Any]]:
        """Asynchronous Job.rows."""
        return await self._driver.run(jobs.rows(self.id, limit, failed, self._session))

    async def download(
        self, folder: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> list[Path]:
        """Asynchronous Job.download."""
        return await self._driver.run(jobs.downloaded(self.info, folder, on_progress, self._session))

    async def delete(self) -> None:
        """Asynchronous Job.delete."""
        await self._driver.run(jobs.deleted(self.id, self._session))


class AsyncJobs:
    """`SIEClient.jobs` for asyncio."""

    def __init__(self, driver: TaskDriver, session: Session) -> None:
        self._driver = driver
        self._session = session

    async def submit(
        self, model: str, input: str | os.PathLike[str] | FileObject, **options: Unpack[JobOptions]
    ) -> AsyncJob:
        """Asynchronous SIEClient.jobs.submit."""
        return self._job(await self._driver.run(jobs.submitted(model, input, options, self._session)))

    async def get(self, job: str) -> AsyncJob:
        return self._job(await self._driver.run(jobs.get(job, self._session)))

    async def list(self, state: str | None = None, page: int = jobs.PAGE) -> AsyncGenerator[AsyncJob]:
        """Asynchronous SIEClient.jobs.list."""
        after: str | None = None
        while True:
            jobs_page = await self._driver.run(jobs.page(state, page, after, self._session))
            for info in jobs_page.data:
                yield self._job(info)
            after = jobs_page.next
            if after is None:
                return

    async def delete(self, job: str) -> None:
        """Asynchronous SIEClient.jobs.delete."""
        await self._driver.run(jobs.deleted(job, self._session))

    def _job(self, info: JobInfo) -> AsyncJob:
        return AsyncJob(info, self._driver, self._session)


class AsyncFiles:
    """`SIEClient.files` for asyncio."""

    def __init__(self, driver: TaskDriver, session: Session) -> None:
        self._driver = driver
        self._session = session

    async def upload(
        self,
        path: str | os.PathLike[str],
        purpose: str = files.PURPOSE,
        on_progress: Callable[[Progress], None] | None = None,
        expires_after_s: int | None = None,
    ) -> FileObject:
        """Asynchronous SIEClient.files.upload."""
        return await self._driver.run(files.uploaded(path, purpose, on_progress, self._session, expires_after_s))

    async def get(self, file: str) -> FileObject:
        return await self._driver.run(files.get(file, self._session))

    async def content(self, file: str) -> bytes:
        """Asynchronous SIEClient.files.content."""
        return await self._driver.run(files.content(file, self._session))

    async def save(
        self, file: str, path: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None = None
    ) -> Path:
        """Asynchronous SIEClient.files.save."""
        return await self._driver.run(files.saved(file, path, on_progress, self._session))

    async def delete(self, file: str) -> None:
        await self._driver.run(files.deleted(file, self._session))
