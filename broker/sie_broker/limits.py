"""What every implementation of the broker waits for, and holds, at most."""

from __future__ import annotations

from collections.abc import Mapping

from sie_broker import BrokerError
from sie_contracts.topology import StreamSpec

API_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
# For one subscription, whose handler may be slow. Inboxes of answers have no limit: they hold what was asked for and
# nothing else.
HELD_MESSAGES, HELD_BYTES = 1 << 18, 512 << 20


def check_room(spec: StreamSpec, found: int, counts: Mapping[str, int]) -> None:
    """Refuse a lower limit per subject than `found` (0: none) where it could cost messages: a broker drops what is
    above a new one.

    Half of the limit is left to publishers that go on meanwhile. Raises BrokerError.
    """
    limit = spec.max_per_subject
    if limit <= 0 or 0 < found <= limit:
        return
    subject, count = max(counts.items(), key=lambda each: each[1], default=("", 0))
    if count > limit // 2:
        raise BrokerError(
            f"{spec.name} is not updated yet: {subject} holds {count} messages, too many for its new limit of {limit}"
        )
