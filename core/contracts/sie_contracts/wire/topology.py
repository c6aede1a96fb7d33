"""Names and settings of every subject, stream, consumer and bucket. The gateway creates consumers,
and the owner of streams (`sie_broker.owner`) creates and updates streams for it. Other processes verify them.

Each (machine profile, bundle, priority, model) has one durable consumer, on one work-queue stream per pool. Once a
stream has its maximum of these consumers, further models share hashed slots:

    sie.work.{pool}.{machine profile}.{bundle}.{priority}.{model}
        a model's own subject, and its consumer's filter
    sie.work.{pool}.{machine profile}.{bundle}.{priority}._s{slot}.{model}  a model's subject in a slot
    sie.work.{pool}.{machine profile}.{bundle}.{priority}._s{slot}.*        the filter of the slot's consumer

Filters are disjoint by construction: tokens are injective, none begins with `_s`, and the two forms differ in length.
So messages of one model may be under both forms at the same time, each form with its own consumer. Every subject
determines the consumer that serves it (`consumer_of`). No name is ever decoded into a model: the id is read from the
payload.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

TOPOLOGY_VERSION = 3

CATALOGUE_BUCKET = "sie_catalogue"
# copy of the documents that were written over the API; no file has these documents
CATALOGUE_COPY_BUCKET = "sie_catalogue_copy"
PLACEMENT_BUCKET = "sie_placement"
POISON_BUCKET = "sie_poison"
DEMAND_BUCKET = "sie_demand"
LEASES_BUCKET = "sie_leases"
POOLS_BUCKET = "sie_pools"
KEYS_BUCKET = "sie_keys"
KEYS_COPY_BUCKET = "sie_keys_copy"
JOBS_BUCKET = "sie_jobs"
SHARDS_BUCKET = "sie_shards"
BUCKETS = frozenset(
    {
        CATALOGUE_BUCKET,
        CATALOGUE_COPY_BUCKET,
        PLACEMENT_BUCKET,
        POISON_BUCKET,
        DEMAND_BUCKET,
        LEASES_BUCKET,
        POOLS_BUCKET,
        KEYS_BUCKET,
        KEYS_COPY_BUCKET,
        JOBS_BUCKET,
        SHARDS_BUCKET,
    }
)
POISON_LIFETIME_S = 3600.0
DEAD_LETTER_BYTES = 256 << 20
DEAD_LETTER_AGE_S = 14 * 86400.0
HEALTH_SUBJECT = "sie.health"
GATEWAY_SUBJECT = "sie.gateway"
ASSIGNED_SUBJECT = "sie.assigned"
RESIDENCY_SUBJECT = "sie.residency"
STREAMS_SUBJECT = "sie.streams"  # `streams_subject` adds the last token
CONFIG_SUBJECT = "sie.config.models"
DEFAULT_POOL = "_default"
DUPLICATE_WINDOW_S = 120.0
# A shorter window is enough for work: a publisher keeps trying for 10 s. The broker keeps a quarter of a KiB for each
# message of the window.
WORK_DUPLICATE_WINDOW_S = 30.0

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_POOL = re.compile(r"[A-Za-z0-9_-]{1,63}")
# characters; the name of a durable is a folder name at the broker: at most 255 bytes, including the broker's own
# prefixes
_MAX_NAME = 180
_MAX_LABEL = 48  # characters of a machine profile or bundle in a name, so that the prefix of the name is never cut
_DIGEST = re.compile(r"_z[0-9a-f]{32}")

SLOTS = 16  # slots of each lane and priority
OWN_CONSUMERS = 4096
# a replicated consumer is a Raft group, which costs its brokers heartbeats and files also while it is idle
OWN_CONSUMERS_REPLICATED = 256
_USUAL_MESSAGE_BYTES = 16 << 10  # a chunk of SIE_CHUNK_COST tokens at four bytes each
_MIN_RESERVATION_BYTES = 1 << 20
_MIN_PER_SUBJECT = 4096  # more messages than one request can become


@functools.lru_cache(1 << 15)
def token(name: str) -> str:
    """Encode a non-empty string as letters, digits, `-` and `_xx` (the UTF-8 bytes in hex). Different strings have
    different tokens. Raises ValueError for an empty string.
    """
    if not name:
        raise ValueError("an empty name has no token")
    return "".join(char if char in _PLAIN else "".join(f"_{byte:02x}" for byte in char.encode()) for char in name)


def _bounded(name: str, most: int = _MAX_NAME) -> str:
    """Shorten a name to at most `most` characters. A shortened name ends in `_z` and a digest of the whole name, so
    that no other token equals it.

    Idempotent: if a shortened name is shortened again to fewer characters, it keeps the digest.
    """
    if len(name) <= most:
        return name
    digest = name[-34:] if _DIGEST.fullmatch(name[-34:]) else f"_z{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return name[: most - 34] + digest


def pool_name(name: str) -> str:
    """Return the canonical name of a pool: lower case; `default` is an alias of `_default`. Raises ValueError for a
    name that cannot be part of a subject.
    """
    if not _POOL.fullmatch(name):
        raise ValueError(f"pool {name[:70]!r}: expected 1 to 63 letters, digits, _ or -")
    lowered = name.lower()
    return DEFAULT_POOL if lowered == "default" else lowered


def stream_name(pool: str) -> str:
    return f"WORK_{pool}"


@dataclass(frozen=True)
class StreamSpec:
    """Settings of a stream. With retention `workqueue`, a message is removed when it is acknowledged, and a full stream
    refuses new messages. With retention `limits`, messages stay, and a full stream drops the oldest ones.

    `max_per_subject` bounds the backlog of each model separately (0: no bound). A broker drops messages above a new
    lower limit, so the limit is lowered only while there is room.
    """

    name: str
    subjects: tuple[str, ...]
    storage: str = "file"
    replicas: int = 1
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_per_subject: int = 0
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    retention: Literal["workqueue", "limits"] = "workqueue"
    version: int = TOPOLOGY_VERSION


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acks. It has no delivery or pending limit: pull credit is the bound."""

    stream: str
    name: str
    subject: str
    ack_wait_s: float = 10.0
    version: int = TOPOLOGY_VERSION


def _prefix(machine_profile: str, bundle: str) -> str:
    return f"{_bounded(machine_profile, _MAX_LABEL)}__{_bounded(bundle, _MAX_LABEL)}__"


@dataclass(frozen=True, order=True)
class Lane:
    """Work that one worker can serve: a pool, a machine profile and a bundle."""

    pool: str
    machine_profile: str
    bundle: str

    def __str__(self) -> str:
        return f"{self.pool}.{self.machine_profile}.{self.bundle}"

    def consumer_prefix(self) -> str:
        """Return the prefix of the names of all consumers of this lane. No consumer of another lane has it."""
        return _prefix(token(self.machine_profile), token(self.bundle))


def work_stream(
    pool: str, *, storage: str, replicas: int, max_bytes: int, max_age_s: float, max_per_subject: int = 0
) -> StreamSpec:
    return StreamSpec(
        stream_name(pool),
        (f"sie.work.{pool}.>",),
        storage,
        replicas,
        max_age_s,
        max_bytes,
        max_per_subject,
        duplicate_window_s=WORK_DUPLICATE_WINDOW_S,
    )


def reservation_bytes(queue_bytes: int) -> int:
    """Return the size in bytes of the stream of a reservation, if the stream of a pool has `queue_bytes`. A broker
    reserves the whole size at once, and there may be 64 reservations.
    """
    return max(_MIN_RESERVATION_BYTES, queue_bytes // 16)


def pool_of(subject: str) -> str:
    """Return the pool of a work subject. Raises ValueError for another subject."""
    tokens = subject.split(".", 3)
    if len(tokens) < 4 or tokens[:2] != ["sie", "work"]:
        raise ValueError(f"{subject!r} is no subject of work")
    return tokens[2]


def dead_letter_stream(
    pool: str, *, storage: str, replicas: int, queue_bytes: int = 4 * DEAD_LETTER_BYTES
) -> StreamSpec:
    """Return the stream of the dead letters of a pool. It keeps the last letters, for DEAD_LETTER_AGE_S seconds.

    Its size is a quarter of the work queue's size, at most DEAD_LETTER_BYTES: a broker reserves the whole size at once,
    and refuses a size that its disk does not have.
    """
    most = min(DEAD_LETTER_BYTES, queue_bytes // 4)
    return StreamSpec(
        f"DEAD_{pool}", (dead_letter_subject(pool),), storage, replicas, DEAD_LETTER_AGE_S, most, retention="limits"
    )


def dead_letter_subject(pool: str) -> str:
    return f"sie.dead.{pool}"


def cancel_subject(pool: str) -> str:
    """Return the subject on which a gateway announces requests that no client waits for any more."""
    return f"sie.cancel.{pool}"


def per_subject_limit(max_bytes: int) -> int:
    """Return the maximum number of messages of one model and priority. It is a quarter of the stream in messages of
    usual size, so that one model with a full backlog leaves room for other models.
    """
    return max(_MIN_PER_SUBJECT, max_bytes // 4 // _USUAL_MESSAGE_BYTES)


def own_consumers(replicas: int) -> int:
    """Return the maximum number of models of a stream that have a consumer of their own; the other models use the
    slots.
    """
    return OWN_CONSUMERS_REPLICATED if replicas > 1 else OWN_CONSUMERS


def work_subject(lane: Lane, priority: str, model: str) -> str:
    """Return the model's own subject."""
    return f"{_lane_subject(lane, priority)}.{model_token(model)}"


def model_token(model: str) -> str:
    """Return the last token of all subjects of a model. No other model has it."""
    return _bounded(token(model))


def slot_subject(lane: Lane, priority: str, model: str) -> str:
    """Return the subject of a model that uses the consumer of a slot. The slot depends only on the model, so every
    publisher uses the same slot.
    """
    name = model_token(model)
    slot = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % SLOTS
    return f"{_lane_subject(lane, priority)}._s{slot:x}.{name}"


def _lane_subject(lane: Lane, priority: str) -> str:
    return f"sie.work.{lane.pool}.{token(lane.machine_profile)}.{token(lane.bundle)}.{priority}"


def work_consumer(lane: Lane, priority: str, model: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the model's own consumer."""
    return consumer_of(work_subject(lane, priority, model), ack_wait_s)


def slot_consumer(lane: Lane, priority: str, model: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the consumer of the model's slot. All models of the slot use it."""
    return consumer_of(slot_subject(lane, priority, model), ack_wait_s)


def consumer_of(subject: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the consumer that serves a work subject. Raises ValueError for another subject."""
    tokens = subject.split(".")
    if len(tokens) not in (7, 8) or tokens[:2] != ["sie", "work"] or (len(tokens) == 8) != tokens[6].startswith("_s"):
        raise ValueError(f"{subject!r} is no subject of work")
    pool, machine_profile, bundle, priority, last = tokens[2:7]
    head = f"{_prefix(machine_profile, bundle)}{priority}__"
    name = head + _bounded(last, _MAX_NAME - len(head))
    return ConsumerSpec(
        stream_name(pool), name, subject if len(tokens) == 7 else f"{subject.rpartition('.')[0]}.*", ack_wait_s
    )


def is_slot(consumer: str) -> bool:
    """Return whether a consumer serves a slot. The token after its priority then begins with `_s`, which no model's
    token does.
    """
    return "___s" in consumer


def config_subject(bundle: str) -> str:
    return f"{CONFIG_SUBJECT}.{token(bundle)}"


def health_subject(worker: str) -> str:
    return f"{HEALTH_SUBJECT}.{token(worker)}"


def assigned_subject(worker: str) -> str:
    """Return the subject on which a worker learns that its pool may have changed. The message is a hint to read the
    assignment at once. A request on this subject checks whether the worker is connected. If it is not, the broker
    reports it at once; the worker itself never answers.
    """
    return f"{ASSIGNED_SUBJECT}.{token(worker)}"


def residency_subject(worker: str) -> str:
    """Return the subject on which a worker receives requests of operators to load or unload a model."""
    return f"{RESIDENCY_SUBJECT}.{token(worker)}"


def streams_subject(stream: str) -> str:
    """Return the subject of requests to the owner of streams. Workers may send requests only for buckets."""
    return f"{STREAMS_SUBJECT}.{'bucket' if stream.startswith('KV_') else 'queue'}"


def gateway_subject(gateway: str) -> str:
    return f"{GATEWAY_SUBJECT}.{token(gateway)}"


@functools.lru_cache(1024)
def lane_filter(lane: Lane, priority: str = "") -> str:
    """Return the subject filter of all work of a lane, or of one priority of it."""
    subject = f"sie.work.{lane.pool}.{token(lane.machine_profile)}.{token(lane.bundle)}"
    return f"{subject}.{priority}.>" if priority else f"{subject}.>"


@functools.lru_cache(1024)
def lane_key(lane: Lane) -> str:
    """Return the key of a lane in a bucket."""
    return f"{lane.pool}.{token(lane.machine_profile)}.{token(lane.bundle)}"


def part_key(lane_key: str, number: int) -> str:
    """Return the key of a part of the value of a lane's key."""
    return f"{lane_key}.p{number}"


def lane_key_of(key: str) -> str:
    """Return the lane's key for a key of its value or of a part of its value."""
    return ".".join(key.split(".", 3)[:3])


def part_number(lane_key: str, key: str) -> int | None:
    """Return the number of the part in this key; None if it is a key of another lane, or no part."""
    number = key.removeprefix(f"{lane_key}.p")
    return int(number) if number != key and number.isdecimal() else None
