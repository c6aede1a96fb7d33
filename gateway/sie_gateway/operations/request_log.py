"""Log of a gateway's inference requests, and the listeners that hear of its requests.

The log has one line for each request, but in INTERVAL_S seconds at most MAX_REFUSED_LINES lines for requests that the
gateway refused for overload or a rate limit. One more line counts the other refused requests:

 encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 load_time=0.0 ... unattributed_time=1.088
 512 more requests were refused in 10 s: encode 503 code=QUEUE_FULL 500, score 503 code=QUEUE_FULL 12
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from sie_contracts.stages import STAGES

if TYPE_CHECKING:
    from sie_gateway.inference.call import Call

REFUSED = frozenset({"QUEUE_FULL", "RATE_LIMITED"})  # codes of refusals for overload or a rate limit
INTERVAL_S = 10.0
MAX_REFUSED_LINES = 20  # largest number of log lines for refused requests in INTERVAL_S seconds
_of_logged = itemgetter(*STAGES)
_LOGGED = " ".join(f"{name}=%s" for name in STAGES)
_logger = logging.getLogger("sie.gateway")


@dataclass(frozen=True)
class RequestListeners:
    """Functions that the gateway's event loop calls. `admitted`: for each request with a valid credential, with its
    call. `ended`: for each inference request that has ended, with (call, endpoint, status, seconds from the arrival of
    the headers to the end of the reply).
    """

    admitted: list[Callable[[Call], None]] = field(default_factory=list)
    ended: list[Callable[[Call, str, int, float], None]] = field(default_factory=list)


class RequestLogger:
    """Writer of the log lines of requests. Only the gateway's event loop may call its methods."""

    def __init__(self) -> None:
        self._refused = 0  # number of refused requests in the running interval, logged or not
        # "endpoint status code" -> number of refused requests without a log line; the set of these keys is small
        self._left_out: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None  # ends an interval of INTERVAL_S; None between intervals

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Log a request. After MAX_REFUSED_LINES lines in an interval, only count refused requests."""
        if call.code in REFUSED:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._summarise)
            self._refused += 1
            if self._refused > MAX_REFUSED_LINES:
                self._left_out[f"{endpoint} {status} code={call.code}"] += 1
                return
        log_request(call, endpoint, status, seconds)

    def _summarise(self) -> None:
        left_out, self._left_out, self._refused, self._timer = self._left_out, Counter(), 0, None
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common())
            _logger.info("%d more requests were refused in %.0f s: %s", left_out.total(), INTERVAL_S, kinds)


def log_request(call: Call, endpoint: str, status: int, seconds: float) -> None:
    """Log a request. `seconds`: time from the request's headers to the reply. The line of a request that ran also has
    the latencies of its stages, its number of tokens, and its last worker.
    """
    if not _logger.isEnabledFor(logging.INFO):
        return
    words = [f"{endpoint} {status} in {seconds * 1000:.1f} ms"]
    if call.code:
        words.append(f"code={call.code}")
    if call.infer_request is not None:
        words.append(f"items={len(call.infer_request.items)}")
    if call.finished is not None:
        words.append(f"tokens={call.finished.usage['total_tokens']}")
        words.append(_LOGGED % _of_logged(call.finished.reported_times or call.finished.timing(call.received_s)))
    model = call.labels.get("model") or (call.resolved.canonical if call.resolved is not None else None)
    last = call.finished.last if call.finished is not None else None
    extra = {
        "request_id": call.id,
        "model": model,
        "latency_ms": round(seconds * 1000, 2),
        "worker": last.worker if last is not None else None,
        "key": call.grant.name if call.grant.key else None,
    }
    _logger.info(" ".join(words), extra=extra)
