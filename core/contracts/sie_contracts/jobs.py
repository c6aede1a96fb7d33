"""Jobs and files as gateways keep them in key-value buckets.

    sie_jobs     job.{job} ─► JobRecord      what is asked and how far it is; written by its leader and by its owner
                 file.{file} ─► FileRecord   what is known of an uploaded file, whose bytes lie in the payload store
    sie_shards   {job}.{number} ─► ShardRecord   a part of the input that was answered, or that cannot be read

The output of a shard is stored whole, and then its record is written. A leader that dies between the two leaves an
output without a record, which the next leader finds. A part that cannot be read has a record and no output. The rules
of evolution are those of `messages`.

Every gateway has all records of `sie_jobs` in memory, and reads them before it is ready. So a record is at most
MAX_RECORD_BYTES: what a client sends is bounded when it is submitted, and what grows while a job runs is cut by
`bounded`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import ENDED, MAX_REQUEST_BYTES, JobRequest, JobState
from sie_contracts.errors import ErrorInfo, InvalidInput

FileState = Literal["writing", "ready", "removing"]
MAX_CODES = 20  # of errors that are counted apart; the rest is counted as OTHER
MAX_BROKEN = 20  # parts of the input that are named
MAX_RECORD_BYTES = 64 << 10
MAX_MESSAGE_BYTES, MAX_BROKEN_BYTES = 2048, 512  # of an error, of the name of a broken part with its error
MAX_WORD_BYTES = 128  # of a code, a reason, a fingerprint
MAX_SOURCE_BYTES = 4096  # of the name of an object with its rows; S3 has at most 1024
_CUT = "…".encode()
T = TypeVar("T", bound="FileRecord | JobRecord | ShardRecord")


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


class RowSpan(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """Rows of a span that a job answers again: those that failed in each of these parts, one after the other. A part is
    the job and the name of its part, empty where it had none and all rows count. `rows`: how many are left.
    """

    parts: tuple[tuple[str, str], ...]
    rows: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan/1"):
    """All parts of the input, by number, and the objects that have none. Kept as one object in the payload store.
    `again`, of a job that retries another one: what of each span it answers. `repeated`, of a batch: lines with an id
    that a line before has.
    """

    spans: tuple[RowSpan, ...]
    unread: tuple[Unread, ...] = ()
    again: tuple[Again, ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows to answer, by number."""
        return tuple(span.rows for span in self.again or self.spans)


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

    `lost`: leaders that ended without leaving the job to others, one after the other, since it had `peak_done` rows
    done. `peak_done`: the largest value of `done` when a leader ended so.
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
    lost: tuple[str, ...] = ()
    peak_done: int = 0
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
        """Address of the output: that of a retry lies beside the parts that it answers again. Empty where the output is
        kept with the job.
        """
        url = self.request.output.url if self.request is not None else ""
        return f"{url.rstrip('/')}/retry-{self.id}/" if url and self.retry_of else url


decode_file = msgspec.msgpack.Decoder(FileRecord).decode
decode_job = msgspec.msgpack.Decoder(JobRecord).decode
decode_shard = msgspec.msgpack.Decoder(ShardRecord).decode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode = msgspec.msgpack.encode


def bounded(record: T) -> T:
    """The record with its texts as long as they may be: those that a job meets while it runs. Raises ValueError where
    it has more than MAX_RECORD_BYTES then.
    """
    cut = record
    if isinstance(record, JobRecord):
        cut = msgspec.structs.replace(
            record,
            owner_name=cut_text(record.owner_name, MAX_WORD_BYTES),
            codes=_cut_codes(record.codes),
            broken=tuple(cut_text(message, MAX_BROKEN_BYTES) for message in record.broken[:MAX_BROKEN]),
            error=_cut_error(record.error),
            trouble=_cut_error(record.trouble),
            fingerprint=cut_text(record.fingerprint, MAX_WORD_BYTES),
        )
    elif isinstance(record, ShardRecord):
        cut = msgspec.structs.replace(
            record,
            codes=_cut_codes(record.codes),
            error=_cut_error(record.error),
            fingerprint=cut_text(record.fingerprint, MAX_WORD_BYTES),
            source=cut_text(record.source, MAX_SOURCE_BYTES),
        )
    if (size := len(encode(cut))) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {size} bytes, expected at most {MAX_RECORD_BYTES}")
    return cut


def cut_text(text: str, most: int) -> str:
    """A text of at most so many bytes of UTF-8."""
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_CUT)].decode(errors="ignore") + _CUT.decode()


def _cut_error(info: ErrorInfo | None) -> ErrorInfo | None:
    """An error without its extras, which no answer about a job has."""
    if info is None:
        return None
    code, reason, param = (cut_text(word, MAX_WORD_BYTES) for word in (info.code, info.reason, info.param))
    return ErrorInfo(code, cut_text(info.message, MAX_MESSAGE_BYTES), reason, param, info.retry_after_s)


def _cut_codes(codes: dict[str, int]) -> dict[str, int]:
    """Keep at most MAX_CODES codes and add up the rest."""
    return {cut_text(code, MAX_WORD_BYTES): count for code, count in list(codes.items())[: MAX_CODES + 1]}


def check_request(request: JobRequest | BatchRequest) -> None:
    """Raises InvalidInput for a request that is larger than its record may hold, which names its largest field."""
    size = len(msgspec.msgpack.encode(request))
    if size <= MAX_REQUEST_BYTES:
        return
    sizes = {name: len(msgspec.msgpack.encode(getattr(request, name))) for name in request.__struct_fields__}
    param = max(sizes, key=sizes.__getitem__)
    message = f"{param}: it has {sizes[param]} bytes of {size} in all; a job or batch has at most {MAX_REQUEST_BYTES}"
    raise InvalidInput(message, reason="too_large", param=param)
