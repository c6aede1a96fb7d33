"""Parts of the frames of /ws/cluster-status. Gateways write them, and clients of SIE read them."""

from __future__ import annotations

import msgspec


class QueueInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Messages of a lane and priority in the queue, or of one `model` there, with leased messages. `oldest_s` is the
    age of the oldest message.
    """

    pool: str
    machine_profile: str
    bundle: str
    priority: str
    messages: int
    oldest_s: float
    model: str = ""
