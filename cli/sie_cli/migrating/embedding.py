"""The job of a migration: found again by its key, or submitted; and what must not be written over.

key ──► jobs of the cluster with it ──► the newest one, unless that has ended without success ──► else another one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sie_cli.display import printable
from sie_cli.refusal import CommandRefused
from sie_contracts.api.jobs import JobManifest

if TYPE_CHECKING:
    from sie_client import Job, SIEClient
    from sie_client.jobs import JobInfo

KEY = "migration"  # in the metadata of a job
LOST = ("failed", "cancelled", "expired")


@dataclass(frozen=True)
class Earlier:
    """`jobs`: those of this migration, the newest first. `others`: all other jobs."""

    jobs: Sequence[Job]
    others: Sequence[JobInfo]

    @classmethod
    def load(cls, client: SIEClient, key: str) -> Earlier:
        """Raises what the client raises."""
        jobs = list(client.jobs.list())
        own = [job for job in jobs if job.info.request_map("metadata").get(KEY) == key]
        ids = {job.id for job in own}
        return cls(own, [job.info for job in jobs if job.id not in ids])

    @property
    def job(self) -> Job | None:
        """The one to go on with: the newest that is not lost, such as a retry."""
        return next((job for job in self.jobs if job.state not in LOST), None)

    def submitted(self, client: SIEClient, key: str, model: str, source: str, options: dict[str, Any]) -> Job:
        """A job under the key of the migration; one after a job that was lost has a key of its own."""
        before = self.jobs[0].id if self.jobs else ""
        return client.jobs.submit(
            model, source, **options, metadata={KEY: key}, idempotency_key=f"{KEY}-{key}-{before}".rstrip("-")
        )


def is_answered(info: JobInfo) -> bool:
    """Whether it has ended with an answer for each row."""
    return info.state == "completed" and not info.counts.failed and not info.broken


def has_files(folder: Path, job: str) -> bool:
    """Whether a folder has the output of a job: its manifest is written last. Raises CommandRefused for that of
    another.
    """
    try:
        job_id = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=JobManifest).job
    except FileNotFoundError:
        return False
    except (OSError, msgspec.DecodeError) as error:
        raise CommandRefused(f"--output {folder}: its manifest.json cannot be read: name another folder") from error
    if job_id != job:
        raise CommandRefused(f"--output {folder} has the files of {printable(job_id)}: name another folder")
    return True


def check_output(jobs: Iterable[JobInfo], output: dict[str, str], model: str, fingerprint: str) -> None:
    """Raises CommandRefused where a job of another model writes, or has written, to the same place: vectors of two
    models do not belong into one index.
    """
    for info in jobs:
        theirs = info.request_map("output")
        is_same = (info.fingerprint or fingerprint) == fingerprint and (bool(info.fingerprint) or info.model == model)
        if is_same or (info.state in ("failed", "cancelled", "expired") and not info.counts.done):
            continue
        where = ""
        if output.get("sink") and all(theirs.get(name) == output.get(name) for name in ("sink", "collection")):
            where = f"the collection {output['collection']} of {output['sink']}"
        elif output.get("url") and str(theirs.get("url", "")).rstrip("/") == output["url"].rstrip("/"):
            where = f"{output['url']}"
        if where:
            raise CommandRefused(
                f"{where} has vectors of {printable(info.model)}, from {info.id}: name another one, which the search "
                "uses from the flip on"
            )
