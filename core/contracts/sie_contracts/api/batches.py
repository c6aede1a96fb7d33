"""Files and batches over HTTP, with the fields that OpenAI's clients read.

Source: the OpenAI API reference, sections Files and Batch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from sie_contracts.api.jobs import Metadata

ENDPOINTS = ("/v1/embeddings", "/v1/encode", "/v1/score", "/v1/extract", "/v1/redact", "/v1/rerank")
BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class FileUpload(Struct, kw_only=True, frozen=True):
    """Form fields of an upload. The file expires `seconds` after its creation; without `seconds` it does not expire."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch", "jobs", "user_data"]
    anchor: Literal["created_at"] | UnsetType = field(name="expires_after[anchor]", default=UNSET)
    seconds: Annotated[int, Meta(ge=1, le=2_592_000)] | UnsetType = field(name="expires_after[seconds]", default=UNSET)


class FileObject(Struct, kw_only=True, frozen=True):
    """A file that a client uploaded, or that a batch wrote."""

    EXAMPLE: ClassVar[Any] = {
        "id": "file-0192f0c17d3e70008000000000000000",
        "object": "file",
        "bytes": 140,
        "created_at": 1790000000,
        "filename": "requests.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": None,
    }

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FilePage(Struct, kw_only=True):
    """A page of files, newest first, or oldest first if the request asks for it."""

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [FileObject.EXAMPLE], "has_more": False}

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(Struct, kw_only=True):
    """Answer to the deletion of a file."""

    EXAMPLE: ClassVar[Any] = {"id": FileObject.EXAMPLE["id"], "object": "file", "deleted": True}

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(Struct, kw_only=True, frozen=True):
    """Rule for the expiry of a file: it expires `seconds` after it was created."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=1, le=2_592_000)]


class BatchRequest(Struct, kw_only=True, frozen=True):
    """A batch: each line of the file is one request to `endpoint`, with its `custom_id` and `body`. Its output files do
    not expire unless `output_expires_after` is set.
    """

    EXAMPLE: ClassVar[Any] = {
        "input_file_id": FileObject.EXAMPLE["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Annotated[str, Meta(max_length=64)]
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[smhd](?!\n)$")] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(Struct, kw_only=True, frozen=True):
    """An error that made the whole batch fail."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True, frozen=True):
    """The errors that made the whole batch fail."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchCounts(Struct, kw_only=True, frozen=True):
    """Number of requests of a batch: in total, answered with success, and answered with an error."""

    total: int
    completed: int
    failed: int


class CachedTokens(Struct, kw_only=True, frozen=True):
    """Number of prompt tokens that OpenAI read from a cache. Always 0 here."""

    cached_tokens: int = 0


class ReasoningTokens(Struct, kw_only=True, frozen=True):
    """Number of reasoning tokens of OpenAI's models. Always 0 here."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True, frozen=True):
    """Number of tokens of the requests that were answered so far."""

    input_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class BatchObject(Struct, kw_only=True, frozen=True):
    """A batch. Times are whole seconds since 1970."""

    EXAMPLE: ClassVar[Any] = {
        "id": "batch_0192f0c17d3e70008000000000000000",
        "object": "batch",
        "endpoint": "/v1/embeddings",
        "errors": None,
        "input_file_id": FileObject.EXAMPLE["id"],
        "completion_window": "24h",
        "status": "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1790000000,
        "request_counts": {"total": 100, "completed": 20, "failed": 0},
        "usage": {
            "input_tokens": 240,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 240,
        },
        "metadata": None,
    }

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None = None


class BatchPage(Struct, kw_only=True):
    """Batches, the newest first."""

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [BatchObject.EXAMPLE], "has_more": False}

    object: Literal["list"] = "list"
    data: list[BatchObject]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class BatchDeleted(Struct, kw_only=True):
    """Answer to the deletion of a batch."""

    EXAMPLE: ClassVar[Any] = {"id": BatchObject.EXAMPLE["id"], "object": "batch", "deleted": True}

    id: str
    object: Literal["batch"] = "batch"
    deleted: bool = True
