"""Faults of the cluster that a gateway finds, each with a remedy. The page at `/` and `sie doctor` show them.

    state of the workers          ──► check gateway, loads or clock
    lengths of the queues         ──► check queue
    history of refused requests   ──► check refusals

Left: the data in which a fault is found. Right: the check of `sie doctor` under which it is listed.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from sie_console.api import ClusterFinding
from sie_contracts.api.operations import WorkerInfo
from sie_contracts.errors import ErrorInfo
from sie_contracts.models.load_errors import LoadErrorClass
from sie_contracts.status import QueueInfo
from sie_gateway.fleet.pool_rules import HIDDEN

MAX_FINDINGS = 50
# largest difference in seconds between the clocks of a worker and the broker that is not reported; with a larger
# difference, times in the worker's log mislead
CLOCK_S = 2.0
WINDOW_S = 300.0  # refused requests are counted if they ended at most this number of seconds ago
REFUSED_SHARE = 0.01
# a queue whose oldest message is older than this number of seconds is reported; the alert SIEQueueStuck has the same
# limit
STUCK_S = 60.0
GROWTH_S = 60.0
# a queue is reported if its number of messages grows by more than this factor within GROWTH_S seconds
GROWTH = 1.5
GROWN_MESSAGES = 100  # the growth of a queue with fewer messages than this is not reported
_GPUS = re.compile(r"(?i)(^|[-_])(t4|v100|p100|a10g?|a30|a40|a100|l4|l40s?|h100|h200|b200|gb200|rtx\w*)([-_]|$)")

_CAPACITY = (
    "add workers (start `sie serve` with a higher `--workers`; in Kubernetes raise maxReplicas of the worker pool), or "
    "send less at once: `sie jobs submit` runs long work at the pace of the workers"
)
_START = (
    "start a worker: `sie sidecar` and `sie adapter` with the same SIE_IPC_SOCKET_PATH, or raise the replicas of a "
    "worker pool"
)
_BROKER = "`sie doctor` tests the broker, its streams and its disk"
# error code -> what an operator can do. Other codes are not reported, because they mean that the request is wrong, or
# that its model is still being loaded
_REFUSALS = {
    "QUEUE_FULL": _CAPACITY,
    "RATE_LIMITED": "`sie keys list` shows the limits of the keys; `sie keys create` makes a key with higher ones",
    "QUEUE_UNAVAILABLE": _BROKER,
    "NOT_READY": "GET /readyz on SIE_GATEWAY_METRICS_PORT of the gateway says why the gateway is not ready",
    "RESOURCE_EXHAUSTED": "release memory on the workers, or make room in the payload store; `sie doctor` on the "
    "machine of the store tests its disk",
    "GATEWAY_TIMEOUT": _CAPACITY,
    "MODEL_LOAD_FAILED": "no load fails now: the models are loaded, or the worker has left; see `sie models list`",
    "INFERENCE_ERROR": "the log of the adapter has the traceback",
    "INTERNAL_ERROR": "the log of the gateway has the traceback",
}


_ENTRY = (
    "change its entry (`sie models set {name}`), or roll it back to an earlier revision "
    "(`sie models history {name}`, `sie models rollback {name} REVISION`)"
)
# error class -> what an operator can do about a failed load; {name} is replaced by the name of the model
_LOADS: Mapping[LoadErrorClass, str] = {
    "OOM": "give the model a worker with more memory, or fewer models beside it (`sie models unload {name}`)",
    "NETWORK": "the reason names the source of the weights: let the worker reach this source and write to its "
    "disk, or put the model into SIE_LOCAL_CACHE; the worker tries again by itself, or at once after `sie models "
    "load {name}`",
    "GATED": "accept the licence at the hub, set HF_TOKEN of the workers to a token of the same account, restart them",
    "NOT_FOUND": "put its weights at a place that the reason names, then `sie models load {name}`; if "
    "they are elsewhere, name that place in its entry (`sie models set {name}`)",
    "DEPENDENCY": "install the package that the reason names into the adapter's environment, and restart the adapter",
    "INCOMPATIBLE": "the reason names the file or the field that does not fit: mend that file, then `sie models load "
    f"{{name}}`; or {_ENTRY}",
    "CERTIFICATE": "the files or vectors differ from those in the model's entry: fetch the weights anew; or " + _ENTRY,
    "UNKNOWN": "the log of the adapter has the traceback; `sie models load {name}` tries again",
}


def _of_load(error_class: str, model: str) -> str:
    remedy = next((text for name, text in _LOADS.items() if name == error_class), _LOADS["UNKNOWN"])
    return remedy.format(name=shlex.quote(model.partition(":")[0]))


# first words of the reason why a worker is not healthy -> what an operator can do
_UNHEALTHY = {
    "preloading": "it serves as soon as each model of its SIE_PRELOAD_MODELS is loaded or given up",
    "draining": "it was told to shut down, and gets no more work: start it again, or another worker",
    "its heartbeats have stopped": "see whether it runs: the log of `sie sidecar` says why it ended; `sie doctor` on "
    "its machine looks at its socket",
    "no connection to the broker": _BROKER,
}
_SOCKET = "the worker's /readyz (SIE_WORKER_METRICS_PORT) says why; `sie doctor` on its machine looks at its socket"


_ADAPTER = "the worker's other devices do the work; the adapter's log says why the process of this device ended"


def of_plugins(faults: Mapping[str, str]) -> list[ClusterFinding]:
    """List the packages that this gateway could not load."""
    fix = "install a version of the package that loads beside this gateway, or remove the package; the log has more"
    return [
        ClusterFinding(check="gateway", wrong=f"the plug-in {name} is off: {reason}", fix=fix)
        for name, reason in faults.items()
    ]


def of_workers(workers: Sequence[WorkerInfo]) -> list[ClusterFinding]:
    """List workers that are not healthy, workers on the CPU despite a GPU profile, and devices without an adapter
    process. Without any worker, return one finding that says so.
    """
    if not workers:
        return [ClusterFinding(check="gateway", wrong="no worker is there: requests wait or are refused", fix=_START)]
    on_cpu = (
        "`nvidia-smi` has to work where the worker runs, and `sie doctor` there compares driver and torch; with "
        "SIE_DEVICE=cuda the worker refuses to start without a GPU"
    )
    named = [(f"worker {info.name} ({info.pool}.{info.gpu}.{info.bundle})", info) for info in workers]
    return [
        *(
            ClusterFinding(
                check="gateway",
                wrong=f"{name} is not healthy" + (f": {info.reason}" if info.reason else ""),
                fix=next((fix for start, fix in _UNHEALTHY.items() if info.reason.startswith(start)), _SOCKET),
            )
            for name, info in named
            if not info.healthy
        ),
        *(
            ClusterFinding(check="gateway", wrong=f"{name} computes on the CPU, not on a GPU", fix=on_cpu)
            for name, info in named
            if info.healthy and info.device.startswith("cpu") and _GPUS.search(info.gpu)
        ),
        *(
            ClusterFinding(check="gateway", wrong=f"{name} has no adapter on a device: {device.device}", fix=_ADAPTER)
            for name, info in named
            for device in info.devices
            if info.healthy and not device.ready
        ),
    ]


def of_loads(errors: Iterable[tuple[str, Mapping[str, ErrorInfo]]]) -> list[ClusterFinding]:
    """List the failed loads, one finding for each worker and message. `errors`: pairs (worker, errors by model)."""
    # profiles of a model that share its weights have the same error: one finding lists all of them
    failed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for worker, by_model in errors:
        for model, error in by_model.items():
            failed[worker, str(error.extras.get("error_class")), error.message].append(model)
    return [
        ClusterFinding(
            check="loads",
            wrong=f"worker {worker} cannot load {', '.join(models)}: {message}",
            fix=_of_load(error_class, models[0]),
        )
        for (worker, error_class, message), models in failed.items()
    ]


def of_clocks(ahead_s: Mapping[str, float]) -> list[ClusterFinding]:
    """List the workers whose clock differs by more than CLOCK_S from the broker's. `ahead_s`: worker -> seconds."""
    return [
        ClusterFinding(
            check="clock",
            wrong=f"the clock of worker {worker} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the "
            "broker's",
            fix="synchronise the clock of its machine or node: `timedatectl set-ntp true`, then `chronyc makestep`",
        )
        for worker, seconds in ahead_s.items()
        if abs(seconds) > CLOCK_S
    ]


def of_refusals(requests: int, errors: Mapping[str, int], *, has_loads: bool = False) -> list[ClusterFinding]:
    """List each error code of _REFUSALS with which more than REFUSED_SHARE of the requests ended. `requests`: number
    of all requests. `errors`: code -> number of requests. If `has_loads`, `of_loads` lists failed loads, and
    this function leaves MODEL_LOAD_FAILED out.
    """
    return [
        ClusterFinding(
            check="refusals",
            wrong=f"{count} of {requests} requests of the last {WINDOW_S / 60:.0f} minutes were answered with {code}",
            fix=_REFUSALS[code],
        )
        for code, count in Counter(errors).most_common()
        if code in _REFUSALS and count > REFUSED_SHARE * requests and not (has_loads and code == "MODEL_LOAD_FAILED")
    ]


class QueueTrend:
    """Lengths of the queues, measured every `every_s` seconds during the last GROWTH_S."""

    def __init__(self, every_s: float) -> None:
        self._samples: deque[Counter[tuple[str, str, str]]] = deque(maxlen=int(GROWTH_S / every_s) + 1)

    def sample(self, queues: Iterable[QueueInfo] | None) -> None:
        """Add the present lengths of the queues. If they are unknown (None), discard all earlier lengths too, because
        only an unbroken series shows growth.
        """
        if queues is None:
            self._samples.clear()
        else:
            self._samples.append(_lengths(queues))

    def grown(self, lane: tuple[str, str, str]) -> tuple[int, int] | None:
        """Return the first and the last queue length of a lane (pool, machine profile and bundle) if the queue grew by
        more than the factor GROWTH, to more than GROWN_MESSAGES, and shrank in neither half of the period GROWTH_S.
        Return None for other queues.
        """
        if len(self._samples) < (self._samples.maxlen or 0):
            return None
        first, middle, last = (self._samples[place][lane] for place in (0, len(self._samples) // 2, -1))
        grows = first <= middle <= last and last > max(GROWN_MESSAGES, GROWTH * first)
        return (first, last) if grows else None


def of_queues(
    queues: Sequence[QueueInfo], workers: Iterable[WorkerInfo], trend: QueueTrend, visible: Callable[[str], bool]
) -> list[ClusterFinding]:
    """List the lanes (a queue for each pool, machine profile and bundle) whose oldest message has waited longer than
    STUCK_S, or whose queue grows. `visible` returns True if the name of a pool may be shown.
    """
    healthy = Counter((info.pool, info.gpu, info.bundle) for info in workers if info.healthy)
    oldest_s: dict[tuple[str, str, str], float] = defaultdict(float)
    for entry in queues:
        lane = (entry.pool, entry.machine_profile, entry.bundle)
        oldest_s[lane] = max(oldest_s[lane], entry.oldest_s)
    findings = []
    for lane, messages in _lengths(queues).items():
        grown = trend.grown(lane)
        if oldest_s[lane] > STUCK_S:
            state = f"has {messages} messages, the oldest is {oldest_s[lane]:.0f} s old"
        elif grown is not None:
            state = f"grew from {grown[0]} to {grown[1]} messages in {GROWTH_S:.0f} s"
        else:
            continue
        name = ".".join(lane if visible(lane[0]) else (HIDDEN, *lane[1:]))
        findings.append(
            ClusterFinding(
                check="queue",
                wrong=f"the queue of {name} {state}; its healthy workers: {healthy[lane]}",
                fix=_CAPACITY if healthy[lane] else _START,
            )
        )
    return findings


def _lengths(queues: Iterable[QueueInfo]) -> Counter[tuple[str, str, str]]:
    lengths: Counter[tuple[str, str, str]] = Counter()
    for entry in queues:
        lengths[entry.pool, entry.machine_profile, entry.bundle] += entry.messages
    return lengths
