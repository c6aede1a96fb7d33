"""Records of jobs and files in the key-value buckets of gateways.

    sie_jobs     job.{job} ─► JobRecord      request and progress of a job, and the last command of its owner
                 file.{file} ─► FileRecord   facts of an uploaded file, whose bytes are in the payload store
    sie_shards   {job}.{number} ─► ShardRecord   answers to a part of the input, or the error of an unreadable part

The leader of a job is the gateway that runs the job. Only the leader writes the progress; any gateway may write a
command. The leader splits the input into parts; the answers to one part are a shard. The leader writes the output of a
shard to the store first, and then the record of the shard. If the leader dies between the two writes, the next leader
finds the output without a record. A part that cannot be read has a record and no output. The rules for changes to the
structs are in `wire.messages`.

Every gateway reads all records of `sie_jobs` into its memory before it is ready. So a record has at most
MAX_RECORD_BYTES: `check_request` limits the client's request when the job is submitted, and `bounded` shortens the
texts that are added while the job runs.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import ENDED, MAX_REQUEST_BYTES, JobRequest, JobState
from sie_contracts.errors import ErrorInfo, InvalidInput

FileState = Literal["writing", "ready", "removing"]
# maximum number of error codes that a record counts separately; all other codes are counted together under `OTHER`
MAX_CODES = 20
MAX_BROKEN = 20  # maximum number of entries of `broken`, the unreadable parts of a job's input
MAX_RECORD_BYTES = 64 << 10
# maximum number of bytes of an error message, and of an entry of `broken` (name of an unreadable part, and the error)
MAX_MESSAGE_BYTES, MAX_BROKEN_BYTES = 2048, 512
MAX_WORD_BYTES = 128  # maximum number of bytes of an error code, an error's reason, a fingerprint or an owner's name
# maximum number of bytes of a shard's `source` (an object's name and a range of rows); S3 allows names of 1024 bytes
MAX_SOURCE_BYTES = 4096
_CUT = "…".encode()
T = TypeVar("T", bound="FileRecord | JobRecord | ShardRecord")


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="file/1"):
    """A file in the payload store. `owner` is the key of the credential that created it. Times are seconds since 1970.
    With `expires_s` 0 the file does not expire.

    A gateway writes the record before the object and removes the record after the object, so that no object exists
    without a record. A file is `writing` until its object is stored, and `removing` from the start of its deletion.
    Only a `ready` file can be read.
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
    """A part of the input: the `rows` rows of the object `source` that begin with row `first`. `start` and `end` are
    byte offsets in a text format, or indexes of row groups in Parquet. For images, `source` is empty. The rows are then
    the next `rows` images of the folder after the name `after`, in the order of their names.

    `tag`: entity tag of the object when the job was planned, or for images a digest of names and tags. A later change
    of the tag makes the read of the rows fail. `header`: first row of a CSV object, with the names of its columns.
    """

    source: str
    format: str
    first: int
    rows: int
    start: int = 0
    end: int = 0
    after: str = ""
    tag: str = ""
    header: str = ""


class Unread(msgspec.Struct, frozen=True):
    """An object of the input that could not be read, with its error."""

    source: str
    error: ErrorInfo


class Again(msgspec.Struct, frozen=True):
    """Rows that the retry of a job runs again. `parts`: output files of the earlier jobs, oldest first, each as (job
    id, file name). Each file has only the rows that failed in the file before it. The `rows` rows that failed in the
    last file run again. If a file name is empty, the job with this id had no output for the rows, so all rows failed.
    """

    parts: tuple[tuple[str, str], ...]
    rows: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan/1"):
    """Plan of a job, stored as one object in the payload store: the numbered parts of the input (`spans`), and the
    objects that cannot be read. `again`: for a retry, one `Again` for each part, with the rows to run again.
    `repeated`: for a batch, the numbers of the input lines whose id is already the id of an earlier line.
    """

    spans: tuple[RowSpan, ...]
    unread: tuple[Unread, ...] = ()
    again: tuple[Again, ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the number of rows to run in each part of the input."""
        return tuple(span.rows for span in self.again or self.spans)


class ShardRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="shard/1"):
    """Record of a shard (the answers to one part of the input), with the `name` and SHA-256 of the output file. If
    `error` is set, the part could not be read, and no file exists.
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


class Suspect(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """Work of a job that may have ended a gateway, and therefore runs alone: `rows` rows of the shard `shard`, from its
    row `first` on. With 0 rows, the shard is put together from the answers to its pieces. A negative `shard` is other
    work, see `PLAN` and `OUTPUT`. `ended`: the ends of the names of
    gateways that ended while exactly this work ran alone.
    """

    shard: int
    first: int = 0
    rows: int = 0
    ended: tuple[str, ...] = ()


PLAN, OUTPUT = -1, -2  # in `Suspect.shard`: the plan of a job, and the completion of its output


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="job/1"):
    """A job. A job of SIE has a `request`; a batch of OpenAI has a `batch`.

    `owner`: key of the credential whose quota and permissions the job uses; `owner_name`: the credential's name in
    metrics. `command`: the last command of the owner (`run`, `pause` or `cancel`). `leader`: gateway that runs the job;
    empty if no gateway runs the job, or if the job has ended. Only the leader writes progress and end of the job.

    `done`, `failed`, `reused`, `tokens` and `codes` count the answered rows. `done` and `failed` include rows of
    unfinished shards (parts of the output). An unfinished shard has no record yet; if the leader dies, the next leader
    starts the shard again. `is_planned`: the numbers of rows and shards are known.

    `suspects`: work that may have ended a gateway, in the order in which it runs alone. `is_alone`: the first of them
    runs alone now. `left_out`: rows that ended gateways, each as (shard, row of the shard). `gateway.jobs.suspects` has
    the rules.
    """

    id: str
    owner: str
    owner_name: str
    created_s: float
    state: JobState = "queued"
    command: str = msgspec.field(default="run", name="wanted")
    request: JobRequest | None = None
    batch: BatchRequest | None = None
    model: str = ""  # resolved name of the model, with its profile
    lane: str = ""  # lane (pool, machine profile and bundle) whose workers run the job
    parser: str = ""  # resolved name of the model that parses the documents of the job
    fingerprint: str = ""
    leader: str = ""
    suspects: tuple[Suspect, ...] = ()
    is_alone: bool = False
    left_out: tuple[tuple[int, int], ...] = ()
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
    spread: float = 0.0  # relative standard error of rows_per_s
    updated_s: float = 0.0
    started_s: float = 0.0
    finalizing_s: float = 0.0
    ending: JobState | Literal[""] = ""  # state in which the job ends after `finalizing`
    cancelling_s: float = 0.0
    ended_s: float = 0.0
    output_file: str = ""
    error_file: str = ""
    retry_of: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def output_url(self) -> str:
        """Return the URL of the output folder; empty if SIE stores the output. A retry writes to a subfolder."""
        url = self.request.output.url if self.request is not None else ""
        return f"{url.rstrip('/')}/retry-{self.id}/" if url and self.retry_of else url


decode_shard = msgspec.msgpack.Decoder(ShardRecord).decode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode = msgspec.msgpack.encode


def bounded(record: T) -> T:
    """Return the record with its texts cut to their limits, except the client's texts, which `check_request` limits.
    Raises ValueError if the shortened record is larger than MAX_RECORD_BYTES.
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
        raise ValueError(f"the record has {size} bytes, expected at most {MAX_RECORD_BYTES}")
    return cut


def cut_text(text: str, most: int) -> str:
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_CUT)].decode(errors="ignore") + _CUT.decode()


def _cut_error(info: ErrorInfo | None) -> ErrorInfo | None:
    """Return the error with shortened texts. The extras are left out, because replies about jobs do not show them."""
    if info is None:
        return None
    code, reason, param = (cut_text(word, MAX_WORD_BYTES) for word in (info.code, info.reason, info.param))
    return ErrorInfo(code, cut_text(info.message, MAX_MESSAGE_BYTES), reason, param, info.retry_after_s)


def _cut_codes(codes: dict[str, int]) -> dict[str, int]:
    """Return the first MAX_CODES + 1 counts of error codes: MAX_CODES codes, and OTHER, the sum of all other codes."""
    return {cut_text(code, MAX_WORD_BYTES): count for code, count in list(codes.items())[: MAX_CODES + 1]}


def _record_bytes(name: str, value: object) -> int:
    try:
        return len(msgspec.msgpack.encode(value))
    except OverflowError:
        raise InvalidInput.at(name, "expected whole numbers of at most 64 bits") from None


def check_request(request: JobRequest | BatchRequest) -> None:
    """Raise InvalidInput for a request that is too large for a record, or that has a number which a record cannot hold.
    The error names the largest field, or the field with the number.
    """
    sizes = {name: _record_bytes(name, getattr(request, name)) for name in request.__struct_fields__}
    size = len(msgspec.msgpack.encode(request))
    if size <= MAX_REQUEST_BYTES:
        return
    param = max(sizes, key=sizes.__getitem__)
    message = f"has {sizes[param]} of the request's {size} bytes; a job or batch may have {MAX_REQUEST_BYTES} bytes"
    raise InvalidInput.at(param, message, reason="too_large")
