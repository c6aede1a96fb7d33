"""Records of jobs and files in the key-value buckets of gateways.

    sie_jobs     job.{job} ─► JobRecord      request and progress of a job; written by its leader and by its owner
                 file.{file} ─► FileRecord   facts of an uploaded file, whose bytes are in the payload store
    sie_shards   {job}.{number} ─► ShardRecord   a part of the input that was answered, or that cannot be read

The output of a shard is stored in one write, and then its record is written. A leader that dies between the two writes
leaves an output without a record, which the next leader finds. A part that cannot be read has a record and no output.
The rules of evolution in `messages` apply.

Every gateway holds all records of `sie_jobs` in memory, and reads them before it is ready. So a record has at most
MAX_RECORD_BYTES. The request of a client is checked when it is submitted. Texts that a job collects while it runs are
cut by `bounded`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from sie_contracts.api.batches import BatchRequest
from sie_contracts.api.jobs import ENDED, MAX_REQUEST_BYTES, JobRequest, JobState
from sie_contracts.errors import ErrorInfo, InvalidInput

FileState = Literal["writing", "ready", "removing"]
MAX_CODES = 20  # error codes that are counted separately; all other codes are counted as OTHER
MAX_BROKEN = 20  # parts of the input that a record names as unreadable
MAX_RECORD_BYTES = 64 << 10
# bytes of an error message; bytes of the name of an unreadable part and its error
MAX_MESSAGE_BYTES, MAX_BROKEN_BYTES = 2048, 512
MAX_WORD_BYTES = 128  # bytes of a code, a reason or a fingerprint
# bytes of the name of an object with its rows; in S3, the name of an object has at most 1024 bytes
MAX_SOURCE_BYTES = 4096
_CUT = "…".encode()
T = TypeVar("T", bound="FileRecord | JobRecord | ShardRecord")


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="file/1"):
    """A file in the payload store. `owner` is the key of the credential that created it. Times are seconds since 1970.
    With `expires_s` 0 the file does not expire.

    The record is written before its object and removed after it, so that no object exists without a record. A file is
    `writing` until its object is stored, and `removing` until its object is deleted. In these two states, requests
    cannot read the file.
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
    """A part of the input: rows `first` to `first + rows` of an object. `start` and `end` are byte offsets of a text
    format, or row groups of Parquet. For images, `source` is the folder and `after` the name before the first image.

    `tag` is the entity tag that the object had when the job was planned. If the tag has changed, the object is refused.
    """

    source: str
    format: str
    first: int
    rows: int
    start: int = 0
    end: int = 0
    after: str = ""
    tag: str = ""
    header: str = ""  # first line of a CSV file


class Unread(msgspec.Struct, frozen=True):
    """An object of the input that could not be read, with its error."""

    source: str
    error: ErrorInfo


class Again(msgspec.Struct, frozen=True):
    """Rows of a span that a retry answers again: the rows that failed in each of `parts`, the outputs of earlier jobs
    in their order. A part is (id of the job, name of its part). The name is empty if the job had no part for the span;
    then all rows of the span count as failed. `rows`: number of rows that failed in the last part.
    """

    parts: tuple[tuple[str, str], ...]
    rows: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, tag="plan/1"):
    """Parts of the input, by number, and the objects that cannot be read. The payload store has the plan as one object.
    `again`: the rows of each span that a retry of another job answers. `repeated`: lines of a batch whose id equals the
    id of an earlier line.
    """

    spans: tuple[RowSpan, ...]
    unread: tuple[Unread, ...] = ()
    again: tuple[Again, ...] = ()
    repeated: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the number of rows to answer, for each part."""
        return tuple(span.rows for span in self.again or self.spans)


class ShardRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="shard/1"):
    """A shard that was answered, with the `name` and the digest of its object. A shard with an `error` cannot be read
    and has no object.
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
    """A job. A job of SIE has a `request`; a batch of OpenAI has a `batch`.

    `owner`: key of the credential whose turn, quota and permissions the job uses; `owner_name`: its name in metrics.
    `wanted`: the last command of the owner, run, pause or cancel. `leader`: the gateway that runs the job. Only the
    leader writes progress and end. If it is empty, no gateway runs the job, or the job has ended.

    `done`, `failed`, `reused`, `tokens`, `codes` are sums over the shards that have a record, and over the rows of
    other shards that the leader has answered. A new leader answers the rows of these other shards again. `is_planned`:
    rows and shards are known.

    `lost`: the leaders, in order, that ended without passing the job on, since `peak_done` rows were done. `peak_done`:
    the largest value of `done` when a leader ended in this way.
    """

    id: str
    owner: str
    owner_name: str
    created_s: float
    state: JobState = "queued"
    wanted: str = "run"
    request: JobRequest | None = None
    batch: BatchRequest | None = None
    model: str = ""  # resolved name of the model, with its profile
    lane: str = ""  # lane whose workers answer the job
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
    spread: float = 0.0  # relative spread of rows_per_s
    updated_s: float = 0.0
    started_s: float = 0.0
    finalizing_s: float = 0.0
    cancelling_s: float = 0.0
    ended_s: float = 0.0
    output_file: str = ""  # output file of a batch
    error_file: str = ""
    retry_of: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def output_url(self) -> str:
        """Return the address of the output; empty if the output is stored with the job. The output of a retry is in the
        same folder as the parts that it answers again.
        """
        url = self.request.output.url if self.request is not None else ""
        return f"{url.rstrip('/')}/retry-{self.id}/" if url and self.retry_of else url


decode_file = msgspec.msgpack.Decoder(FileRecord).decode
decode_job = msgspec.msgpack.Decoder(JobRecord).decode
decode_shard = msgspec.msgpack.Decoder(ShardRecord).decode
decode_plan = msgspec.msgpack.Decoder(Plan).decode
encode = msgspec.msgpack.encode


def bounded(record: T) -> T:
    """Return the record with its texts shortened to their limits. These are texts that a job collects while it runs.
    Raises ValueError if the record still has more than MAX_RECORD_BYTES.
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
    """Return the text, shortened to at most `most` bytes of UTF-8."""
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_CUT)].decode(errors="ignore") + _CUT.decode()


def _cut_error(info: ErrorInfo | None) -> ErrorInfo | None:
    """Return an error without its extras: replies about a job have no extras."""
    if info is None:
        return None
    code, reason, param = (cut_text(word, MAX_WORD_BYTES) for word in (info.code, info.reason, info.param))
    return ErrorInfo(code, cut_text(info.message, MAX_MESSAGE_BYTES), reason, param, info.retry_after_s)


def _cut_codes(codes: dict[str, int]) -> dict[str, int]:
    """Return the first MAX_CODES + 1 codes: the codes that are counted separately, and OTHER."""
    return {cut_text(code, MAX_WORD_BYTES): count for code, count in list(codes.items())[: MAX_CODES + 1]}


def check_request(request: JobRequest | BatchRequest) -> None:
    """Raise InvalidInput for a request that is too large for a record. The error names the largest field."""
    size = len(msgspec.msgpack.encode(request))
    if size <= MAX_REQUEST_BYTES:
        return
    sizes = {name: len(msgspec.msgpack.encode(getattr(request, name))) for name in request.__struct_fields__}
    param = max(sizes, key=sizes.__getitem__)
    message = f"{param}: it has {sizes[param]} bytes of {size} in all; a job or batch has at most {MAX_REQUEST_BYTES}"
    raise InvalidInput(message, reason="too_large", param=param)
