"""Bodies and replies of the routes for jobs. A job runs one model on all rows of whole files, in the background. It
continues if a process ends or restarts.

A row is a line of JSON Lines or CSV, a row of Parquet, or an image of a folder. The job writes an answer for each row.
A manifest lists the files with the answers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from sie_contracts.api.shapes import MINI
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
MAX_METADATA = 16  # maximum number of entries of `metadata`; OpenAI has the same limit
MAX_KEEP = 100  # maximum number of input columns that are copied to the output
MAX_WINDOWS = 16
# latest deadline, in seconds since 1970: the end of the year 9999. A later value is probably in milliseconds
LATEST_S = 253_402_300_799
# maximum size of a job or batch request, in bytes: every gateway has the records of all requests in memory
MAX_REQUEST_BYTES = 40 << 10

_Column = Annotated[str, Meta(min_length=1, max_length=256)]
_Window = Annotated[str, Meta(max_length=16)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class JobChunkRule(ChunkRule, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rule by which every text of a job is cut into chunks."""


class JobInput(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Input of a job: exactly one of `file` and `url`.

    `file`: the id of an uploaded file (`/v1/files`). `url`: one object, or all objects below a path that ends in `/`.
    SIE_JOBS_URLS must allow the URL. `format`: by default it follows from the suffix of the object's name.

    `text`, `query`, `document`: templates over the columns of a row, such as `{title}\\n{body}`. `text` is the input of
    encode and extract, `query` and `document` are the inputs of score. `image`: a column of image files. `id`: the
    column with the id of each row; by default the id is the object's name and the row's number. `keep`: columns that
    are copied to the output, at most 100.

    `chunks`: a rule that cuts each text into chunks, or the name of a column. In each row, this column has the spans of
    the row's chunks, or a rule. Each chunk has an output line. `context`: encode chunks within the text, not alone.

    `documents`: a column of document files, such as PDF, in the forms that `/v1/extract` reads. `parser`: a model of
    the family `docling`, by default the model `docling`. It converts each document to Markdown, which is the text that
    is cut by `chunks`.
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
    documents: Annotated[str, Meta(max_length=256)] = ""
    parser: Annotated[str, Meta(max_length=512)] = ""


class JobOutput(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Output of a job. `url`: the folder of the output files, which SIE_JOBS_URLS must allow. Without it, SIE stores
    the files, and clients read them over HTTP.

    `sink`: name of a database in SIE_JOBS_SINKS, to which the vectors are also written. `collection`: its collection or
    table.
    """

    url: Annotated[str, Meta(max_length=1024)] = ""
    format: OutputFormat = "parquet"
    sink: Annotated[str, Meta(max_length=64)] = ""
    collection: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9_-]*(?!\n)$")] = ""


class JobRequest(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job, in at most 40 KiB. `params`: parameters of the operation, as in a single request.

    `tokens_per_s` limits the speed of the job. `windows`: the times of day at which it may run, such as `22:00-06:00`,
    in the time zone `time_zone`. `deadline`: seconds since 1970. The forecast compares the expected end with it. If
    `expires` is true, rows that have not run at the deadline are dropped. `cache`: for an input that an earlier job
    answered with the same model and parameters, use that answer.
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
    deadline: Annotated[float, Meta(ge=0, le=LATEST_S)] = 0.0
    expires: bool = False
    cache: bool = False


class JobCounts(Struct, kw_only=True, frozen=True, omit_defaults=False):
    """Numbers of rows: `rows` in total (null until they are counted), `done` answered, and `failed` answered with an
    error. `reused`: answers that were copied from the cache or from an equal row. `tokens`: tokens of all answers,
    including the copied ones. `shards`: number of parts into which the input is split.
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
    """Forecast of the end of a job: the time `done_at`, plus or minus `plus_minus_s` seconds. It is computed from
    `rows_per_s`, the rate of the last minutes. `workers`: workers that serve the job's lane (pool, machine profile and
    bundle) now. `workers_needed`: workers with which the job would end by its deadline; null if it has no deadline, or
    if more workers would not help.
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

    `trouble`: the present problem; the job tries again by itself. `errors`: number of failed rows by error code.
    `broken`: parts of the input that could not be read, at most 20. `fingerprint`: fingerprint of the model that
    computes the vectors; in a job with documents, the fingerprints of model and parser as `MODEL+PARSER`. All vectors
    of a job have the same fingerprint.
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
    """A file of a job's output. `source`: the part of the input whose rows the file answers, in the rows' order."""

    name: str
    rows: int
    failed: int
    bytes: int
    sha256: str
    source: str


class JobManifest(Struct, kw_only=True, frozen=True):
    """The output of a job. When the job has ended, `manifest.json` in the output folder has the same content."""

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
    """Result of one row: its number of tokens, and its error if it failed. The values are not included."""

    id: str
    tokens: int
    error: JobError | None = None


class JobRows(Struct, kw_only=True, frozen=True):
    """Results of some rows of a job, as many as the request allows."""

    EXAMPLE: ClassVar[Any] = {"rows": [{"id": "a", "tokens": 12, "error": None}]}

    rows: list[JobRow]


class JobDeleted(Struct, kw_only=True):
    """Answer to the deletion of a job."""

    EXAMPLE: ClassVar[Any] = {"id": JobInfo.EXAMPLE["id"], "object": "job", "deleted": True}

    id: str
    object: Literal["job"] = "job"
    deleted: bool = True
