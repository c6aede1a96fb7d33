"""Jobs and files as gateways keep them in key-value buckets.

    sie_jobs     job.{job} ─► JobRecord      what is asked and how far it is; written by its leader and by its owner
                 file.{file} ─► FileRecord   what is known of an uploaded file, whose bytes lie in the payload store
    sie_shards   {job}.{number} ─► ShardRecord   a part of the input that was answered, or that cannot be read

The output of a shard is stored whole, and then its record is written. A leader that dies between the two leaves an
output without a record, which the next leader finds. A part that cannot be read has a record and no output. The rules
of evolution are those of `messages`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import ENDED, JobRequest, JobState
from sie_contracts.errors import ErrorInfo

FileState = Literal["writing", "ready", "removing"]
MAX_CODES = 20  # of errors that are counted apart; the rest is counted as OTHER
MAX_BROKEN = 20  # parts of the input that are named


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="file/1"):
    """A file in the payload store. `owner`: the key of the credential that made it. Times are seconds since 1970;
    `expires_s` 0: it is kept.

    The record is there before the object and after it, so that no object is without a record: a file is `writing` until
    its object is stored, and `removing` from then on until its object is gone. Neither is served.
    """

    id: str
    owner: str
    name: str
    purpose: str
    bytes: int
    sha256: str
    created_s: float
    expires_s: float = 0.0
    state: FileState = "ready"


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the input: rows `first` to `first + rows` of an object, which lie at `start` to `end`: bytes of a text
    format, row groups of Parquet. Of images, `source` is the folder and `after` the name before the first one.

    `tag` is the object's entity tag when the job was planned: an object that is another one now is refused.
    """

    source: str
    format: str
    first: int
    rows: int
    start: int = 0
    end: int = 0
    after: str = ""
    tag: str = ""
    header: str = ""  # of CSV: its first line


class Unread(msgspec.Struct, frozen=True):
    """An object of the input that cannot be read, and why."""

    source: str
    error: ErrorInfo


class Again(msgspec.Struct, frozen=True):
    """Which rows of a span a job answers again: those that failed in each of these parts, one after the other: the job,
    the name of its part, empty where it had none and all rows count. `rows`: how many are left.
    """

    parts: tuple[tuple[str, str], ...]
    rows: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan/1"):
    """All parts of the input, by number, and the objects that have none. Kept as one object in the payload store.
    `again`, of a job that retries another one: what of each span it answers. `repeated`, of a batch: lines with an id
    that a line before has.
    """

    spans: tuple[Span, ...]
    unread: tuple[Unread, ...] = ()
    again: tuple[Again, ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows to answer, by number."""
        return tuple(each.rows for each in self.again or self.spans)


class ShardRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="shard/1"):
    """A shard that was answered: its object `name`, and the digest of that. `error`: it cannot be read, and has no
    object.
    """

    name: str
    rows: int
    bytes: int = 0
    sha256: str = ""
    failed: int = 0
    reused: int = 0
    tokens: int = 0
    codes: dict[str, int] = {}
    fingerprint: str = ""
    error: ErrorInfo | None = None
    source: str = ""


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="job/1"):
    """A job. `request` of a job of ours, `batch` of one of OpenAI's.

    `owner`: the key of the credential whose turn, quota and permissions it has; `owner_name` as metrics name it.
    `wanted`: run, pause or cancel, as its owner said last. `leader`: the gateway that runs it; it alone
    writes progress and end. Empty: nobody runs it, or it has ended.

    `done`, `failed`, `reused`, `tokens`, `codes` are sums over shards with a record, and over what the leader has
    answered of others, which a new leader answers again. `is_planned`: rows and shards are known.
    """

    id: str
    owner: str
    owner_name: str
    created_s: float
    state: JobState = "queued"
    wanted: str = "run"
    request: JobRequest | None = None
    batch: BatchRequest | None = None
    model: str = ""  # as it resolved, with its profile
    lane: str = ""  # whose workers answer it
    fingerprint: str = ""
    leader: str = ""
    is_planned: bool = False
    rows: int | None = None
    shards: int | None = None
    done: int = 0
    failed: int = 0
    reused: int = 0
    tokens: int = 0
    shards_done: int = 0
    shards_failed: int = 0
    codes: dict[str, int] = {}
    broken: tuple[str, ...] = ()
    error: ErrorInfo | None = None
    trouble: ErrorInfo | None = None
    rows_per_s: float = 0.0
    spread: float = 0.0  # of rows_per_s, relative
    updated_s: float = 0.0
    started_s: float = 0.0
    finalizing_s: float = 0.0
    cancelling_s: float = 0.0
    ended_s: float = 0.0
    output_file: str = ""  # of a batch
    error_file: str = ""
    retry_of: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def output_url(self) -> str:
        """Where it writes: a retry beside the parts that it answers again. Empty where the output is kept with the
        job.
        """
        url = self.request.output.url if self.request is not None else ""
        return f"{url.rstrip('/')}/retry-{self.id}/" if url and self.retry_of else url


decode_file = msgspec.msgpack.Decoder(FileRecord).decode
decode_job = msgspec.msgpack.Decoder(JobRecord).decode
decode_shard = msgspec.msgpack.Decoder(ShardRecord).decode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode = msgspec.msgpack.encode
