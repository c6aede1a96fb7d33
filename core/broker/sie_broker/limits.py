"""Time-outs and limits that all implementations of the broker share."""

from __future__ import annotations

from collections.abc import Mapping

from sie_broker import UnsafeUpdate
from sie_contracts.wire.topology import StreamSpec

API_TIMEOUT_S = 5.0  # seconds within which the broker must reply to an operation without a time-out of its own
STOP_TIMEOUT_S = 5.0  # seconds that `stop` of a subscription waits for a running handler; then it returns
# Default limits of a subscription: number of messages that wait for its handler, and sum of their bytes. Inboxes for
# replies have no limit, because each request gets only one reply.
HELD_MESSAGES, HELD_BYTES = 1 << 18, 512 << 20


def check_room(spec: StreamSpec, per_subject: int, max_bytes: int, size_bytes: int, counts: Mapping[str, int]) -> None:
    """Raise UnsafeUpdate if an update to `spec` lowers a limit so far that the broker could drop stored messages.

    `per_subject`, `max_bytes`: present limits of the stream; 0 or less: no limit. `size_bytes`, `counts`: bytes of the
    stored messages, and their number by subject. If the limit of messages per subject becomes lower, no subject may
    have more messages than half of the new limit, because publishers continue during the update. A lower limit of bytes
    is checked only for dead letters. A work queue above its limit refuses new messages, but drops no stored messages.
    """
    if _is_lower(spec.max_per_subject, per_subject):
        subject, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
        if count > spec.max_per_subject // 2:
            raise UnsafeUpdate(
                f"{spec.name} is not updated yet: {subject} has {count} messages, more than half of the new limit "
                f"{spec.max_per_subject}: try again when fewer messages wait"
            )
    is_dropping = spec.retention == "limits" and _is_lower(spec.max_bytes, max_bytes)
    if is_dropping and size_bytes > spec.max_bytes:
        raise UnsafeUpdate(
            f"{spec.name} is not updated yet: its messages have {size_bytes} bytes, more than the new limit "
            f"{spec.max_bytes}, so the update would drop the oldest: replay or purge dead letters first (`sie dlq`)"
        )


def _is_lower(limit: int, present: int) -> bool:
    return limit > 0 and not 0 < present <= limit
