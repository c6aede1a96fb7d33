"""One line of the log for each inference request, whatever became of it. None is sampled or left out.

    encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 preprocess_time=0.312 ... unattributed_time=1.088

Model, request and trace are fields of the record. Nothing of a line comes from a body or a credential: names of the catalogue, codes of
the contract, numbers, and ids that were made here or have the form of one.
"""

from __future__ import annotations

import logging
from operator import itemgetter

from sie_gateway.call import Call
from sie_gateway.reply import STAGES

_logger = logging.getLogger("sie.gateway")
_of_stages = itemgetter(*STAGES)
_STAGES = " ".join(f"{name}=%s" for name in STAGES)


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
