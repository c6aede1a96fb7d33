"""`jobs` and `files` of the blocking client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sie_client import files, jobs
from sie_client.core import Session
from sie_client.jobs import JobInfo, SeenJob
from sie_client.threads import ThreadDriver
from sie_client.types import JobOptions, Progress
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
