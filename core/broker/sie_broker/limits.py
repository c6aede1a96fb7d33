"""Time-outs and limits of all implementations of the broker."""

from __future__ import annotations

from collections.abc import Mapping

from sie_broker import BrokerError
from sie_contracts.wire.topology import StreamSpec

API_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
# Messages and bytes that may wait for the handler of one subscription.
# Inboxes of answers have no limit: they receive one answer for each request.
HELD_MESSAGES, HELD_BYTES = 1 << 18, 512 << 20


def check_room(spec: StreamSpec, held_bytes: int, counts: Mapping[str, int]) -> None:
    """Refuse a new limit per subject that could drop messages: a broker drops the messages above a new limit.

    `held_bytes` is the present limit, in messages (0: no limit); a new limit that is not lower is accepted. Publishers
    continue during the update, so half of a lower limit must be free. Raises BrokerError.
    """
    limit = spec.max_per_subject
    if limit <= 0 or 0 < held_bytes <= limit:
        return
    subject, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
    if count > limit // 2:
        raise BrokerError(
            f"{spec.name} is not updated yet: {subject} has {count} messages, too many for its new limit of {limit}"
        )
