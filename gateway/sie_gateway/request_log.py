"""One line of the log for each inference request. Of those that were refused without having run only the first ones of
each interval have a line, and then one line tells how many more there were: overload must not become an overload of the
log.

    encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 preprocess_time=0.312 ... unattributed_time=1.088
    512 more requests were refused in 10 s: encode 503 code=QUEUE_FULL 500, score 503 code=QUEUE_FULL 12

Model, request and trace are fields of the record. Nothing of a line comes from a body or a credential: names of the
catalogue, codes of the contract, numbers, and ids that were made here or have the form of one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from operator import itemgetter

from sie_gateway.call import Call
from sie_gateway.reply import STAGES

REFUSED = frozenset({"QUEUE_FULL", "RATE_LIMITED"})  # before anything of the request ran
INTERVAL_S = 10.0
MAX_REFUSED_LINES = 20  # in an interval
_logger = logging.getLogger("sie.gateway")
_of_stages = itemgetter(*STAGES)
_STAGES = " ".join(f"{name}=%s" for name in STAGES)


class RequestLog:
    """Owned by the gateway's loop."""

    def __init__(self) -> None:
        self._told = 0  # lines of refused requests in this interval
        self._left_out: Counter[str] = Counter()  # by endpoint, status and code, which all come from fixed sets
        self._timer: asyncio.TimerHandle | None = None  # set while an interval runs

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Tell of a request whose answer has left, or count it."""
        if call.code in REFUSED:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._summarise)
            self._told += 1
            if self._told > MAX_REFUSED_LINES:
                self._left_out[f"{endpoint} {status} code={call.code}"] += 1
                return
        log_request(call, endpoint, status, seconds)

    def _summarise(self) -> None:
        left_out, self._left_out, self._told, self._timer = self._left_out, Counter(), 0, None
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common())
            _logger.info("%d more requests were refused in %.0f s: %s", left_out.total(), INTERVAL_S, kinds)


def log_request(call: Call, endpoint: str, status: int, seconds: float) -> None:
    """Tell of a request whose answer has left, `seconds` after its head came. Stages and tokens only where it ran."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    told = [f"{endpoint} {status} in {seconds * 1000:.1f} ms"]
    if call.code:
        told.append(f"code={call.code}")
    if call.asked is not None:
        told.append(f"items={len(call.asked.items)}")
    if call.finished is not None:
        told.append(f"tokens={call.finished.usage['total_tokens']}")
        told.append(_STAGES % _of_stages(call.finished.told or call.finished.timing(call)))
    model = call.labels.get("model") or (call.resolved.canonical if call.resolved is not None else None)
    extra = {"request_id": call.id, "model": model, "latency_ms": round(seconds * 1000, 2)}
    _logger.info(" ".join(told), extra=extra)
