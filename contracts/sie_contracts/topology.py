"""Names and settings of every subject, stream, consumer and bucket. The gateway creates and updates; everybody else verifies.

One durable consumer per (machine profile, bundle, priority, model), on one work-queue stream per pool. Filters are disjoint by
construction because tokens are injective. A name is never parsed back: the model id is read from the payload.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

TOPOLOGY_VERSION = 1

CATALOGUE_BUCKET = "sie_catalogue"
HEALTH_SUBJECT = "sie.health"
CONFIG_SUBJECT = "sie.config.models"
DUPLICATE_WINDOW_S = 120.0

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_POOL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_MAX_NAME = 180  # a durable's name is a folder name at the broker: 255 bytes less its own prefixes
_MAX_LABEL = 48  # of a machine profile or bundle within it, so that the beginning of a name is always whole


@functools.lru_cache(4096)
def token(name: str) -> str:
    """An injective encoding of any non-empty string into letters, digits, `-` and `_xx` (the UTF-8 bytes in hex)."""
    if not name:
        raise ValueError("an empty name has no token")
    return "".join(char if char in _PLAIN else "".join(f"_{byte:02x}" for byte in char.encode()) for char in name)


def _bounded(name: str, most: int = _MAX_NAME) -> str:
    """At most this many characters: a longer token ends in a digest of the whole behind `_z`, which no other token holds."""
    return name if len(name) <= most else f"{name[: most - 34]}_z{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def pool_name(name: str) -> str:
    """The canonical name of a pool: lower case, `default` is an alias of `_default`. Raises ValueError where no subject can hold it."""
    if not _POOL.fullmatch(name):
        raise ValueError(f"pool {name[:70]!r}: expected 1 to 63 letters, digits, _ or -")
    lowered = name.lower()
    return "_default" if lowered == "default" else lowered


def stream_name(pool: str) -> str:
    return f"WORK_{pool}"


@dataclass(frozen=True)
class StreamSpec:
    """A work-queue stream: each message is removed when acknowledged; a full stream refuses the newest.

    `max_per_subject` bounds each model's backlog without touching the others (0: no bound).
    """

    name: str
    subjects: tuple[str, ...]
    storage: str = "file"
    replicas: int = 1
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_per_subject: int = 0
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    version: int = TOPOLOGY_VERSION


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acks, no delivery limit and no pending limit: pull credit is the bound."""

    stream: str
    name: str
    subject: str
    ack_wait_s: float = 10.0
    version: int = TOPOLOGY_VERSION


@dataclass(frozen=True, order=True)
class Lane:
    """What one worker can serve."""

    pool: str
    machine_profile: str
    bundle: str

    def __str__(self) -> str:
        return f"{self.pool}.{self.machine_profile}.{self.bundle}"

    def consumer_prefix(self) -> str:
        """The beginning of the names of all consumers of this lane, and of no other's."""
        return f"{_bounded(token(self.machine_profile), _MAX_LABEL)}__{_bounded(token(self.bundle), _MAX_LABEL)}__"


def work_stream(pool: str, *, storage: str, replicas: int, max_bytes: int, max_age_s: float, max_per_subject: int = 0) -> StreamSpec:
    return StreamSpec(stream_name(pool), (f"sie.work.{pool}.>",), storage, replicas, max_age_s, max_bytes, max_per_subject)


def work_subject(lane: Lane, priority: str, model: str) -> str:
    return f"sie.work.{lane.pool}.{token(lane.machine_profile)}.{token(lane.bundle)}.{priority}.{_bounded(token(model))}"


def work_consumer(lane: Lane, priority: str, model: str, ack_wait_s: float) -> ConsumerSpec:
    head = f"{lane.consumer_prefix()}{priority}__"
    name = head + _bounded(token(model), _MAX_NAME - len(head))
    return ConsumerSpec(stream_name(lane.pool), name, work_subject(lane, priority, model), ack_wait_s)


def config_subject(bundle: str) -> str:
    return f"{CONFIG_SUBJECT}.{token(bundle)}"


def health_subject(worker: str) -> str:
    return f"{HEALTH_SUBJECT}.{token(worker)}"
