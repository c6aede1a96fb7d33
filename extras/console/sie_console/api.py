"""Replies that the page shows: overview, placement of models, history and slow requests."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from sie_contracts import __version__
from sie_contracts.api.operations import ClusterInfo, ModelSummary, WorkerInfo
from sie_contracts.api.shapes import MINI, Text, Whole
from sie_contracts.status import QueueInfo
from sie_contracts.wire.messages import BatchNote, Stages


class ClusterCounts(Struct, kw_only=True):
    """Number of workers, of models, of messages that workers have (`in_flight`), and of all dead letters ever stored
    (also removed ones). The counts include workers and models that are not listed.
    """

    workers: int
    models: int
    in_flight: int
    dead_letters: int


class ClusterFinding(Struct, kw_only=True, frozen=True):
    """A fault that the gateway has detected without `sie doctor`, and its fix. `check`: the check of `sie doctor` that
    reports the same fault.
    """

    check: Literal["gateway", "loads", "refusals", "queue", "clock"]
    wrong: str
    fix: str


class ClusterView(Struct, kw_only=True):
    """Overview of the cluster. At most 50 workers and 50 models are listed: unhealthy workers and models in use come
    first. `queues`: null if the broker was not read. `failures`: by model, the reason why it could not be loaded.
    `findings`: at most 50 faults of workers, loads, queues and clocks, and requests refused in the last
    5 minutes; faults that stop work come first. `data_dir`: data directory of the `sie serve` that runs this gateway:
    the value that commands of `sie` need as `--data-dir` to use this cluster.
    """

    EXAMPLE: ClassVar[Any] = {
        "version": __version__,
        "cluster": {"worker_count": 1, "gpu_count": 1, "models_loaded": 1, "total_qps": 2.5},
        "counts": {"workers": 1, "models": 12, "in_flight": 0, "dead_letters": 0},
        "workers": [],
        "models": [],
        "queues": None,
        "failures": {},
        "findings": [],
        "data_dir": "/home/ada/.local/share/sie",
    }

    version: str
    cluster: ClusterInfo
    counts: ClusterCounts
    workers: list[WorkerInfo]
    models: list[ModelSummary]
    queues: list[QueueInfo] | None
    failures: dict[str, str]
    findings: list[ClusterFinding]
    data_dir: Text = UNSET


class PlacedModel(Struct, kw_only=True):
    """A model of a lane and its hosts, the workers that should load it. `hosts`: state of the model on each host, as
    the host reports it. `tokens_per_s`: tokens per second that the hosts receive for the model. `waiting`, `oldest_s`:
    number of its messages in the queue, leased ones included, and the age of the oldest one in seconds. `raised_s`:
    seconds since the number of its hosts was last raised.
    """

    model: str
    hosts: dict[str, str]
    memory_bytes: int
    tokens_per_s: float
    waiting: int
    oldest_s: float
    raised_s: float | None


class PlacedLane(Struct, kw_only=True):
    """Table of the models of one lane (pool, machine profile and bundle) and their hosts. `age_s`: seconds since the
    table was written. `workers`: number of healthy workers. `models`: number of models in the table. `shown`: at most
    50 of these models, those with work first.
    """

    lane: str
    age_s: float
    workers: int
    models: int
    shown: list[PlacedModel]


class PlacementView(Struct, kw_only=True):
    """Hosts of the models of each lane (pool, machine profile and bundle): the workers that should load a model."""

    EXAMPLE: ClassVar[Any] = {
        "lanes": [
            {
                "lane": "_default.l4.default",
                "age_s": 3.2,
                "workers": 1,
                "models": 1,
                "shown": [
                    {
                        "model": MINI,
                        "hosts": {"w0": "loaded"},
                        "memory_bytes": 91000000,
                        "tokens_per_s": 120.5,
                        "waiting": 0,
                        "oldest_s": 0.0,
                        "raised_s": 61.0,
                    }
                ],
            }
        ]
    }

    lanes: list[PlacedLane]


class HistoryStep(Struct, kw_only=True):
    """One time step of the history. It begins at `at`, in seconds since 1970. `p50_ms` and `p99_ms`: latencies in
    milliseconds, one for each stage in the `stages` of the history. They include only requests that ran, and may be up
    to 20 % too high.
    """

    at: int
    requests: int
    errors: dict[str, int]
    p50_ms: list[float] | UnsetType = UNSET
    p99_ms: list[float] | UnsetType = UNSET


class History(Struct, kw_only=True):
    """Answers of one gateway in the last hour, by time step. Steps without an answer are left out."""

    EXAMPLE: ClassVar[Any] = {
        "now": 1790000000.0,
        "step_s": 10,
        "stages": ["queue_time", "total_time"],
        "steps": [
            {"at": 1789999990, "requests": 3, "errors": {}, "p50_ms": [1.2, 9.3], "p99_ms": [2.1, 13.4]},
        ],
    }

    now: float
    step_s: int
    stages: list[str]
    steps: list[HistoryStep]


class RequestChunk(Struct, kw_only=True):
    """A message of a request: the worker and the batch that ran it, and its times at the worker."""

    worker: str
    chunk: int
    batch: BatchNote
    stages: Stages


class SlowRequest(Struct, kw_only=True):
    """A slow or failed request, without its inputs. Fields that only a worker can fill are absent if the request did
    not run. `message`: the error message, if it failed. `truncated`: number of inputs that were longer than the model
    reads.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "0192f0c1-7d3e-7000-8000-000000000000",
        "at": 1790000000.0,
        "endpoint": "encode",
        "status": 200,
        "code": "",
        "model": MINI,
        "total_ms": 812.4,
        "items": 3,
        "trace_id": "",
        "lane": "_default.l4.default",
        "priority": "interactive",
        "tokens": 24,
        "truncated": 0,
        "timing": {"queue_time": 800.1, "total_time": 812.4},
        "chunks": [{"worker": "w0", "chunk": 0, "batch": {"id": "b1", "items": 3}, "stages": {"inference_ms": 7.1}}],
    }

    id: str
    at: float
    endpoint: str
    status: int
    code: str
    model: str
    total_ms: float
    items: int
    trace_id: str
    message: Text = UNSET
    lane: Text = UNSET
    priority: Text = UNSET
    tokens: Whole = UNSET
    truncated: Whole = UNSET
    timing: dict[str, float] | UnsetType = UNSET
    chunks: list[RequestChunk] | UnsetType = UNSET


class SlowRequests(Struct, kw_only=True):
    """Slow and failed requests of the last hour, as far as the gateway still has them in memory."""

    EXAMPLE: ClassVar[Any] = {"requests": [SlowRequest.EXAMPLE]}

    requests: list[SlowRequest]


class LogLine(Struct, kw_only=True):
    """A line of a log. `at`: seconds since 1970."""

    at: float
    level: str
    logger: str
    message: str


class RequestLog(Struct, kw_only=True):
    """Log lines of one request. The gateway has the last 5,000 lines of all requests in memory."""

    EXAMPLE: ClassVar[Any] = {
        "lines": [
            {
                "at": 1790000000.123,
                "level": "INFO",
                "logger": "sie.gateway",
                "message": "encode 200 in 9.3 ms items=1 tokens=4",
            }
        ]
    }

    lines: list[LogLine]
