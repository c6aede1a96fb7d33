"""Time-outs and limits that all implementations of the broker share."""

from __future__ import annotations

from collections.abc import Mapping

from sie_broker import BrokerError
from sie_contracts.wire.topology import StreamSpec

API_TIMEOUT_S = 5.0  # seconds in which the broker must answer an operation without a time-out of its own
STOP_TIMEOUT_S = 5.0  # seconds for which `stop` of a subscription waits for its handler
# Default limits of a subscription: number and bytes of the messages that wait for its handler. Inboxes for answers have
# no limit, because each request gets only one answer.
HELD_MESSAGES, HELD_BYTES = 1 << 18, 512 << 20


def check_room(spec: StreamSpec, present_limit: int, counts: Mapping[str, int]) -> None:
    """Raise BrokerError if a lower limit of messages per subject could lose messages: the broker drops those above it.

    `present_limit`: the stream's limit until now (0: no limit). `counts`: number of messages by subject. A limit that
    is not lowered passes. For a lower limit, no subject may have more than half of it, because publishers continue
    during the update.
    """
    limit = spec.max_per_subject
    if limit <= 0 or 0 < present_limit <= limit:
        return
    subject, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
    if count > limit // 2:
        raise BrokerError(
            f"{spec.name} is not updated yet: {subject} has {count} messages, more than half of the new limit {limit}"
        )
