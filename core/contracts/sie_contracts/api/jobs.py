"""Jobs over HTTP: work on whole files that runs beside the requests of clients and survives the end of any process.

A job reads rows (JSON Lines, CSV, Parquet, or the images of a folder), runs one model, and writes one answer for each
row. A manifest names the files of the answers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from sie_contracts.api.shapes import MINI
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire.messages import ChunkRule

JobOperation = Literal["encode", "score", "extract"]
InputFormat = Literal["jsonl", "csv", "parquet", "images"]
OutputFormat = Literal["parquet", "jsonl", "npy"]
JobState = Literal[
    "queued", "planning", "running", "paused", "finalizing", "completed", "failed", "cancelled", "expired"
]
ENDED: frozenset[JobState] = frozenset({"completed", "failed", "cancelled", "expired"})
SHARD_ROWS = 10_000
MAX_SHARD_ROWS = 100_000
MAX_METADATA = 16  # largest number of entries of `metadata`; OpenAI has the same limit
MAX_KEEP = 100  # columns of the input that the output may repeat
MAX_WINDOWS = 16
MAX_REQUEST_BYTES = 40 << 10  # bytes of a job or batch in its record; every gateway has all records in memory

_Column = Annotated[str, Meta(min_length=1, max_length=256)]
_Window = Annotated[str, Meta(max_length=16)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class JobChunkRule(ChunkRule, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rule by which every text of a job is cut into chunks."""


class JobInput(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Input of a job: exactly one of `file` and `url`.

    `file`: the id of a file that was uploaded (`/v1/files`). `url`: one object, or all objects below a path that ends
    in `/`, in a place that SIE_JOBS_URLS allows. `format` is known by the name of an object, if it is not given.

    `text`, `query`, `document`: templates over the columns of a row, such as `{title}\\n{body}`; the text to encode or
    to extract from, the query and the document of a score. `image`: a column of image files. `id`: the column of ids;
    by default a row is named by its object and its number there. `keep`: columns that the output repeats, at most 100.

    `chunks`: the text of a row is encoded in chunks, by a rule, or by the spans or the rule in the column that it
    names. The output has a line for each chunk. `context`: chunks are pooled from the whole text, not encoded alone.
    """

    file: Annotated[str, Meta(max_length=64)] = ""
    url: Annotated[str, Meta(max_length=1024)] = ""
    format: InputFormat | None = None
    id: Annotated[str, Meta(max_length=256)] = ""
    text: Annotated[str, Meta(max_length=4096)] = ""
    query: Annotated[str, Meta(max_length=4096)] = ""
    document: Annotated[str, Meta(max_length=4096)] = ""
    image: Annotated[str, Meta(max_length=256)] = ""
    keep: Annotated[tuple[_Column, ...], Meta(max_length=MAX_KEEP)] = ()
    chunks: _Column | JobChunkRule | None = None
    context: bool = True


class JobOutput(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Output of a job. `url`: the place of its files, below one that SIE_JOBS_URLS allows; by default they are kept
    with the job and read over HTTP.

    `sink`: the name of a database of SIE_JOBS_SINKS that gets the vectors as well, into the collection or table
    `collection`.
    """

    url: Annotated[str, Meta(max_length=1024)] = ""
    format: OutputFormat = "parquet"
    sink: Annotated[str, Meta(max_length=64)] = ""
    collection: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9_-]*(?!\n)$")] = ""


class JobRequest(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job, in at most 40 KiB. `params`: parameters of a request of the operation.

    `tokens_per_s` and `windows` limit the speed and the times of its work: `windows` are times of the day, such as
    `22:00-06:00`, in the time zone `time_zone`. `deadline`: seconds since 1970; the forecast is compared with it. Rows
    that have not run by then are dropped only if `expires` is true. `cache`: use answers of earlier jobs by the same
    model and parameters for equal inputs.
    """

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "input": {"file": "file-0192f0c17d3e70008000000000000000", "text": "{title}\n{body}", "id": "id"},
    }

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    input: JobInput
    output: JobOutput = JobOutput()
    operation: JobOperation = "encode"
    params: dict[str, Any] = {}
    name: Annotated[str, Meta(max_length=128)] = ""
    metadata: Metadata = {}
    pool: Annotated[str, Meta(max_length=63)] = ""
    machine_profile: Annotated[str, Meta(max_length=63)] = ""
    shard_rows: Annotated[int, Meta(ge=1, le=MAX_SHARD_ROWS)] = SHARD_ROWS
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    windows: Annotated[tuple[_Window, ...], Meta(max_length=MAX_WINDOWS)] = ()
    time_zone: Annotated[str, Meta(max_length=64)] = "UTC"
    deadline: Annotated[float, Meta(ge=0)] = 0.0
    expires: bool = False
    cache: bool = False


class JobCounts(Struct, kw_only=True, frozen=True, omit_defaults=False):
    """Numbers of rows: total (None until they are counted), answered, and answered with an error. `reused`: answers
    from the cache or from an equal row. `tokens`: tokens of all answers, including reused ones. Shards: parts of the
    input.
    """

    rows: int | None = None
    done: int = 0
    failed: int = 0
    reused: int = 0
    tokens: int = 0
    shards: int | None = None
    shards_done: int = 0
    shards_failed: int = 0


class Forecast(Struct, kw_only=True, frozen=True):
    """Forecast of the end of a job: at `done_at`, plus or minus `plus_minus_s`. It is computed from `rows_per_s`, the
    rate of the last minutes. `workers` serve the lane of the job now. With `workers_needed` workers the job would end
    by its deadline. `workers_needed` is null if there is no deadline, or if more workers would not help.
    """

    done_at: float
    plus_minus_s: float
    rows_per_s: float
    workers: int
    workers_needed: int | None = None


class JobError(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Reason why a job ended, is paused, or cannot continue now."""

    code: str
    message: str
    param: str = ""


class JobInfo(Struct, kw_only=True, frozen=True):
    """A job. Times are seconds since 1970.

    `trouble`: why the job waits and tries again by itself. `errors`: number of rows with an error, by its code.
    `broken`: parts of the input that could not be read, at most 20. `fingerprint`: fingerprint of the model that
    computed the vectors; a job never mixes two.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "job-0192f0c17d3e70008000000000000000",
        "object": "job",
        "state": "running",
        "created_at": 1790000000.0,
        "updated_at": 1790000060.0,
        "model": MINI,
        "operation": "encode",
        "counts": {
            "rows": 1000000,
            "done": 120000,
            "failed": 3,
            "reused": 0,
            "tokens": 900000,
            "shards": 100,
            "shards_done": 12,
            "shards_failed": 0,
        },
        "errors": {"INVALID_INPUT": 3},
        "request": JobRequest.EXAMPLE,
    }

    id: str
    object: Literal["job"] = "job"
    state: JobState
    name: str = ""
    created_at: float
    updated_at: float
    started_at: float | None = None
    ended_at: float | None = None
    model: str
    operation: str
    counts: JobCounts
    errors: dict[str, int] = {}
    error: JobError | None = None
    trouble: JobError | None = None
    broken: list[str] = []
    fingerprint: str = ""
    output_url: str = ""
    owner: str = ""
    forecast: Forecast | None = None
    request: JobRequest


class JobPage(Struct, kw_only=True):
    """Jobs, newest first. `next`: value of `after` for the next page; null on the last page."""

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [JobInfo.EXAMPLE], "next": None}

    object: Literal["list"] = "list"
    data: list[JobInfo]
    next: str | None = None


class JobPart(Struct, kw_only=True, frozen=True):
    """A file of a job's output. `source`: the part of the input whose rows it answers, in their order."""

    name: str
    rows: int
    failed: int
    bytes: int
    sha256: str
    source: str


class JobManifest(Struct, kw_only=True, frozen=True):
    """The output of a job. `manifest.json` beside its files has the same content once the job has ended."""

    EXAMPLE: ClassVar[Any] = {
        "job": JobInfo.EXAMPLE["id"],
        "state": "completed",
        "url": "",
        "format": "parquet",
        "model": MINI,
        "fingerprint": "b1946ac9",
        "rows": 10000,
        "failed": 3,
        "parts": [
            {
                "name": "part-00000.parquet",
                "rows": 10000,
                "failed": 3,
                "bytes": 15400000,
                "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                "source": "texts.jsonl:0-9999",
            }
        ],
        "next": None,
    }

    job: str
    state: str
    url: str
    format: str
    model: str
    fingerprint: str
    rows: int
    failed: int
    parts: list[JobPart]
    broken: list[str] = []
    next: int | None = None


class JobRow(Struct, kw_only=True, frozen=True):
    """State of a row, without its values."""

    id: str
    tokens: int
    error: JobError | None = None


class JobRows(Struct, kw_only=True, frozen=True):
    """Rows of a job that are answered, or some of them."""

    EXAMPLE: ClassVar[Any] = {"rows": [{"id": "a", "tokens": 12, "error": None}]}

    rows: list[JobRow]


class JobDeleted(Struct, kw_only=True):
    """Answer to the deletion of a job."""

    EXAMPLE: ClassVar[Any] = {"id": JobInfo.EXAMPLE["id"], "object": "job", "deleted": True}

    id: str
    object: Literal["job"] = "job"
    deleted: bool = True


def job_error(info: ErrorInfo) -> JobError:
    """Convert an error to the form of the API."""
    return JobError(code=info.code, message=info.message, param=info.param)
