"""Names and settings of every subject, stream, consumer and bucket of the broker. Gateways create consumers. The owner
of streams (`sie_broker.owner`) creates and updates streams; if no owner is connected, gateways do. Other processes only
check streams.

A lane is a pool, a machine profile and a bundle. Each pool has one work-queue stream. In this stream, each model has a
durable consumer per machine profile, bundle and priority. When a stream has the maximum number of these consumers,
further models share consumers: a hash of the model's name chooses one of the SLOTS shared consumers (slots).

    sie.work.{pool}.{machine profile}.{bundle}.{priority}.{model}
        subject of a model, and filter of its own consumer
    sie.work.{pool}.{machine profile}.{bundle}.{priority}._s{slot}.{model}  subject of a model in a slot
    sie.work.{pool}.{machine profile}.{bundle}.{priority}._s{slot}.*        filter of the slot's consumer

No two filters match the same subject: different names have different tokens, no token begins with `_s`, and the two
forms of subjects differ in their number of tokens. So messages of one model may use both forms at the same time. The
subject alone determines the consumer (`consumer_of`). Processes read the id of a model from the message, not from the
subject.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

TOPOLOGY_VERSION = 3

CATALOGUE_BUCKET = "sie_catalogue"
# bucket with a second copy of the catalogue documents that clients wrote over the API, because no file has them
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
RESERVATIONS_KEY = "reservations"  # key of POOLS_BUCKET with all reservations
MAX_RESERVATIONS = 64  # largest number of reservations of all keys together
POISON_LIFETIME_S = 3600.0  # seconds after which the record of an input that crashed an adapter expires
DEAD_LETTER_BYTES = 256 << 20
DEAD_LETTER_AGE_S = 14 * 86400.0
HEALTH_SUBJECT = "sie.health"
GATEWAY_SUBJECT = "sie.gateway"
ASSIGNED_SUBJECT = "sie.assigned"
RESIDENCY_SUBJECT = "sie.residency"
STREAMS_SUBJECT = "sie.streams"  # prefix of the subjects that `streams_subject` returns
CONFIG_SUBJECT = "sie.config.models"
DEFAULT_POOL = "_default"
DUPLICATE_WINDOW_S = 120.0
# Seconds in which the broker drops a second message with the same id. Publishers retry for 10 s, so 30 s are enough. A
# longer window costs the broker about 256 bytes of memory per message.
WORK_DUPLICATE_WINDOW_S = 30.0

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_POOL = re.compile(r"[A-Za-z0-9_-]{1,63}")
# largest length of a consumer's name: the broker uses the name with a prefix as a folder name of at most 255 bytes
_MAX_NAME = 180
# largest length of a machine profile or bundle in a consumer's name, so that _MAX_NAME shortens only the model's part
_MAX_LABEL = 48
_DIGEST = re.compile(r"_z[0-9a-f]{32}")

SLOTS = 16  # number of shared consumers of each priority of a lane (pool, machine profile and bundle)
OWN_CONSUMERS = 4096  # largest number of consumers that serve one model each, in a stream without replicas
# The limit in place of OWN_CONSUMERS for a stream with replicas. It is lower, because each consumer of such a stream is
# a Raft group, which sends heartbeats and writes files even when it is idle.
OWN_CONSUMERS_REPLICATED = 256
# `per_subject_limit` assumes that a message has this number of bytes: its inputs have SIE_CHUNK_COST tokens in total,
# with four bytes per token
_USUAL_MESSAGE_BYTES = 16 << 10
MIN_QUEUE_BYTES = 1 << 20  # smallest size of a work stream
_MIN_PER_SUBJECT = 4096  # lowest limit on waiting messages per subject, so that the messages of one request fit
# largest length of a name whose token is cached: clients choose the names, and long names would fill the memory
_MAX_CACHED = 256


def token(name: str) -> str:
    """Encode a name for use in a subject: letters, digits and `-` stay, and each other UTF-8 byte becomes `_xx` (hex).
    Different names have different tokens. Raises ValueError for an empty name.
    """
    if not name:
        raise ValueError("a name in a subject must not be empty")
    return (_cached_token if len(name) <= _MAX_CACHED else _encoded)(name)


def _encoded(name: str) -> str:
    return "".join(char if char in _PLAIN else "".join(f"_{byte:02x}" for byte in char.encode()) for char in name)


_cached_token = functools.lru_cache(1 << 15)(_encoded)


def _bounded(name: str, most: int = _MAX_NAME) -> str:
    """Shorten a name to at most `most` characters. A shortened name ends in `_z` and a digest of the whole name, so
    that it is unique. A name that is shortened twice keeps its first digest.
    """
    if len(name) <= most:
        return name
    digest = name[-34:] if _DIGEST.fullmatch(name[-34:]) else f"_z{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return name[: most - 34] + digest


def pool_name(name: str) -> str:
    """Return the pool's name in lower case; `_default` for `default`. Raises ValueError for an invalid name."""
    if not _POOL.fullmatch(name):
        raise ValueError(f"pool {name[:70]!r}: expected 1 to 63 letters, digits, _ or -")
    lowered = name.lower()
    return DEFAULT_POOL if lowered == "default" else lowered


def stream_name(pool: str) -> str:
    return f"WORK_{pool}"


@dataclass(frozen=True)
class StreamSpec:
    """Settings of a stream. With retention `workqueue`, the broker removes an acknowledged message, and a full stream
    refuses new messages. With retention `limits`, messages stay, and a full stream drops the oldest ones.

    `max_per_subject`: largest number of waiting messages of one subject (0: no limit). A subject belongs to one model,
    lane and priority. The broker drops all messages above a new, lower limit. So SIE lowers the limit only while no
    subject has more than half of the new limit.
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
    """Durable pull consumer with explicit acks. The workers, not the consumer, limit how many messages are pending."""

    stream: str
    name: str
    subject: str
    ack_wait_s: float = 10.0
    version: int = TOPOLOGY_VERSION


def _prefix(machine_profile: str, bundle: str) -> str:
    return f"{_bounded(machine_profile, _MAX_LABEL)}__{_bounded(bundle, _MAX_LABEL)}__"


@dataclass(frozen=True, order=True)
class Lane:
    """Pool, machine profile and bundle of work. Every worker serves one lane."""

    pool: str
    machine_profile: str
    bundle: str

    def __str__(self) -> str:
        return f"{self.pool}.{self.machine_profile}.{self.bundle}"

    def consumer_prefix(self) -> str:
        """Return the prefix of the names of all consumers of this lane. No other consumer's name has this prefix."""
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
    """Return the size of a reservation's stream: a sixteenth of `queue_bytes`, the size of a pool's stream, but at
    least 1 MiB. This size is small because a broker reserves the whole size at once, and there may be 64 reservations.
    """
    return max(MIN_QUEUE_BYTES, queue_bytes // 16)


def pool_of(subject: str) -> str:
    """Return the pool in a subject of work messages. Raises ValueError for any other subject."""
    tokens = subject.split(".", 3)
    if len(tokens) < 4 or tokens[:2] != ["sie", "work"]:
        raise ValueError(f"{subject!r} is not a subject of work: it must begin with sie.work.POOL")
    return tokens[2]


def dead_letter_stream(pool: str, *, replicas: int, queue_bytes: int = 4 * DEAD_LETTER_BYTES) -> StreamSpec:
    """Return the settings of the stream for the dead letters of a pool: messages that workers gave up. The stream
    stores these messages in files for DEAD_LETTER_AGE_S seconds.

    The size of the stream is a quarter of the work queue's size, at most DEAD_LETTER_BYTES. The limit is low because a
    broker reserves the whole size at once and refuses a size for which it has no disk space.
    """
    return StreamSpec(
        f"DEAD_{pool}",
        (dead_letter_subject(pool),),
        replicas=replicas,
        max_age_s=DEAD_LETTER_AGE_S,
        max_bytes=min(DEAD_LETTER_BYTES, queue_bytes // 4),
        retention="limits",
    )


def dead_letter_subject(pool: str) -> str:
    return f"sie.dead.{pool}"


def cancel_subject(pool: str) -> str:
    """Return the subject on which gateways announce requests for which no client is waiting any more."""
    return f"sie.cancel.{pool}"


def per_subject_limit(max_bytes: int) -> int:
    """Return the largest number of waiting messages of one model, lane and priority: as many as fill a quarter of the
    stream, so that a model with a full backlog leaves space for other models.
    """
    return max(_MIN_PER_SUBJECT, max_bytes // 4 // _USUAL_MESSAGE_BYTES)


def own_consumers(replicas: int) -> int:
    """Return how many models of a stream may have a consumer of their own. Further models share consumers."""
    return OWN_CONSUMERS_REPLICATED if replicas > 1 else OWN_CONSUMERS


def work_subject(lane: Lane, priority: str, model: str) -> str:
    """Return the subject for work of a model that has its own consumer."""
    return f"{_lane_subject(lane, priority)}.{model_token(model)}"


def model_token(model: str) -> str:
    """Return the last token of all subjects of this model. No other model has the same token."""
    return _bounded(token(model))


def slot_subject(lane: Lane, priority: str, model: str) -> str:
    """Return the subject of a model that shares a consumer. A hash of the model's name chooses the consumer."""
    name = model_token(model)
    slot = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % SLOTS
    return f"{_lane_subject(lane, priority)}._s{slot:x}.{name}"


def _lane_subject(lane: Lane, priority: str) -> str:
    return f"sie.work.{lane_key(lane)}.{priority}"


def work_consumer(lane: Lane, priority: str, model: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the settings of the model's own consumer."""
    return consumer_of(work_subject(lane, priority, model), ack_wait_s)


def slot_consumer(lane: Lane, priority: str, model: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the settings of the consumer that the model shares with other models."""
    return consumer_of(slot_subject(lane, priority, model), ack_wait_s)


def consumer_of(subject: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the settings of the consumer that serves a subject of work. Raises ValueError for any other subject."""
    tokens = subject.split(".")
    if len(tokens) not in (7, 8) or tokens[:2] != ["sie", "work"] or (len(tokens) == 8) != tokens[6].startswith("_s"):
        raise ValueError(
            f"{subject!r} is not a subject of work: expected sie.work.POOL.PROFILE.BUNDLE.PRIORITY[._sN].MODEL"
        )
    pool, machine_profile, bundle, priority, last = tokens[2:7]
    head = f"{_prefix(machine_profile, bundle)}{priority}__"
    name = head + _bounded(last, _MAX_NAME - len(head))
    return ConsumerSpec(
        stream_name(pool), name, subject if len(tokens) == 7 else f"{subject.rpartition('.')[0]}.*", ack_wait_s
    )


def is_slot(consumer: str) -> bool:
    """Return whether models share this consumer. Only the name of a shared consumer has `___s` after the priority."""
    return "___s" in consumer


def config_subject(bundle: str) -> str:
    return f"{CONFIG_SUBJECT}.{token(bundle)}"


def health_subject(worker: str) -> str:
    return f"{HEALTH_SUBJECT}.{token(worker)}"


def assigned_subject(worker: str) -> str:
    """Return the subject on which gateways notify a worker that its assignment to a pool may have changed. Gateways
    also send requests to this subject to test whether the worker is connected: if the subject has no subscriber, the
    broker reports this at once.
    """
    return f"{ASSIGNED_SUBJECT}.{token(worker)}"


def residency_subject(worker: str) -> str:
    """Return the subject on which a worker receives requests of operators to load or unload a model."""
    return f"{RESIDENCY_SUBJECT}.{token(worker)}"


def streams_subject(stream: str) -> str:
    """Return the subject on which the owner of streams (the process that creates them) receives requests about
    `stream`. Workers may publish only to the subject for buckets.
    """
    return f"{STREAMS_SUBJECT}.{'bucket' if stream.startswith('KV_') else 'queue'}"


def gateway_subject(gateway: str) -> str:
    return f"{GATEWAY_SUBJECT}.{token(gateway)}"


@functools.lru_cache(1024)
def lane_filter(lane: Lane, priority: str = "") -> str:
    """Return the filter for the work subjects of a lane (pool, machine profile and bundle) or of one priority of it."""
    return f"{_lane_subject(lane, priority)}.>" if priority else f"sie.work.{lane_key(lane)}.>"


@functools.lru_cache(1024)
def lane_key(lane: Lane) -> str:
    """Return the key of a lane (pool, machine profile and bundle) in a key-value bucket."""
    return f"{lane.pool}.{token(lane.machine_profile)}.{token(lane.bundle)}"


def part_key(lane_key: str, number: int) -> str:
    """Return the key of part `number` of a lane's value. A value that is too large for one key is stored in parts."""
    return f"{lane_key}.p{number}"


def lane_key_of(key: str) -> str:
    """Return the key of a lane. `key`: key of the lane, or of a part of the lane's value."""
    return ".".join(key.split(".", 3)[:3])


def part_number(lane_key: str, key: str) -> int | None:
    """Return the number for which `part_key` returns `key`; None if `key` is not the key of a part of this lane."""
    number = key.removeprefix(f"{lane_key}.p")
    return int(number) if number != key and number.isdecimal() else None
