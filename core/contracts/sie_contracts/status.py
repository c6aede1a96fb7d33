"""Types in the frames of /ws/cluster-status. Gateways write the frames, and SIE's clients read them."""

from __future__ import annotations

import msgspec


class QueueInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Messages in the queue for a lane (pool, machine profile and bundle) and a priority, or only those for one
    `model`. Leased messages count too. `oldest_s`: age of the oldest message in seconds.
    """

    pool: str
    machine_profile: str
    bundle: str
    priority: str
    messages: int
    oldest_s: float
    model: str = ""
