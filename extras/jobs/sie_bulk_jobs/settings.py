"""Settings of jobs and files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import LIST, STORES, Secret, whole


def _sinks(text: str) -> tuple[tuple[str, Secret], ...]:
    """Parse `name=URL,...`, the databases for vectors. The URLs may contain passwords. Raises ValueError."""
    sinks: dict[str, Secret] = {}
    for part in LIST[1](text):
        name, equals, url = part.partition("=")
        pieces = urlsplit(url)
        _ = pieces.port  # reading the port raises ValueError if it is out of range
        if not equals or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or name in sinks:
            raise ValueError
        if not pieces.scheme or not pieces.hostname:
            raise ValueError
        sinks[name] = Secret(url)
    return tuple(sinks.items())


SINKS = "a comma-separated list of NAME=URL", _sinks


@dataclass(frozen=True, kw_only=True, repr=False)
class JobsSettings:
    jobs_urls: tuple[str, ...] | None = row(
        None,
        "gateway",
        STORES,
        "Places that jobs may read from and write to: everything below one of these URLs, and nothing else. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables. Unset: jobs read only uploaded files, and their output is in the payload store.",
    )
    jobs_sinks: tuple[tuple[str, Secret], ...] | None = row(
        None,
        "gateway",
        SINKS,
        "Databases that jobs may write vectors to, each as NAME=URL, for example `main=qdrant://host:6333`. Jobs and `sie migrate` name a database by its NAME; `sie migrate` needs this setting too. A comma in a password is written as %2C. Unset: none.",
        secret=True,
    )
    jobs_at_once: int = row(
        4,
        "gateway",
        whole(0),
        "Jobs and batches that one gateway runs at a time; the oldest run first. 0: this gateway runs none.",
    )
    jobs_keep_s: int = row(
        2_592_000,
        "gateway",
        whole(60),
        "Time after which a job or batch that has ended is forgotten, seconds. A job's output in the payload store is deleted with it. Without SIE_PAYLOAD_STORE_URL, nothing is forgotten.",
    )
    jobs_per_key: int = row(
        1000,
        "gateway",
        whole(1),
        "Maximum number of jobs and batches of one key, including those that have ended and are not deleted. A further one is refused with 429.",
    )
    jobs_bytes_per_key: int = row(
        4 << 20,
        "gateway",
        whole(64 << 10),
        "Maximum size of the records of one key's jobs and batches, bytes. A record has the request, counts and errors, without files and output.",
    )
    max_jobs: int = row(
        10_000,
        "gateway",
        whole(1),
        "Maximum number of jobs and batches of all keys together. Every gateway has their records in memory.",
    )
    max_jobs_bytes: int = row(
        64 << 20, "gateway", whole(64 << 10), "Maximum size of the records of all jobs and batches, bytes."
    )
    files_per_key: int = row(
        10_000,
        "gateway",
        whole(1),
        "Maximum number of files of one key, including outputs of its batches. A further upload is refused with 429, but an output is stored even above the maximum.",
    )
    files_bytes_per_key: int = row(
        64 << 30,
        "gateway",
        whole(1 << 20),
        "Maximum size of all files of one key, including unfinished uploads, bytes.",
    )
    max_files: int = row(
        100_000,
        "gateway",
        whole(1),
        "Maximum number of files of all keys together. Every gateway has their records in memory.",
    )
    max_files_bytes: int = row(
        1 << 40, "gateway", whole(1 << 20), "Maximum size of the files of all keys together, bytes."
    )
    jobs_cache_bytes: int = row(
        4 << 30,
        "gateway",
        whole(0),
        "Space in the payload store for answers of jobs, bytes. Later jobs with `cache` reuse these answers. The oldest are removed first. 0: no answer is stored for reuse.",
    )
