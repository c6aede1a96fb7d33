"""Protocols of the message broker for gateway, sidecar and config service.

    Bus              send, request, subscribe: messages that are delivered at most once
    Queue            publish, pulls, counts, delete: messages that are stored in streams
    Administration   a Queue that also creates, updates and deletes streams and consumers
    Store            buckets: replicated maps with revisions
    Broker           all four protocols, over one connection

A function that uses the broker declares the smallest protocol that it needs.

The protocols have two implementations: `nats` (NATS JetStream, for a cluster) and `memory` (inside one process, for
`sie serve --standalone` and for tests, with ack wait, delays, delivery counts, limits and lost connections).
`tests/contract/broker` runs the same tests against each implementation.

A delivery leases a message to a process for `ack_wait`. If the process neither acknowledges the message nor extends the
lease, the broker delivers the message again, perhaps to another process: delivery is at least once. If the first
process acknowledges the message after the end of its lease, the broker removes the message, although another process
may work on it. So a process must stop work on a message when its lease has ended.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


class BrokerError(Exception):
    """Error of a broker that refuses an operation or cannot be reached."""


class BrokerUnavailable(BrokerError):
    """Error for a missing or lost connection, a reply that does not arrive in time, or an operation that the broker
    cannot execute at present. The broker may have executed the operation, for example if only its reply was lost.
    """


class StreamFull(BrokerError):
    """Error for a message that a stream refuses, because the stream or the subject has reached its limit."""


class PayloadTooBig(BrokerError):
    """Error for a message that, with its headers, exceeds the broker's `max_payload`. The message is not sent."""


class NotPermitted(BrokerUnavailable):
    """Error for a publish to a subject for which the broker user of this process has no permission. A later attempt may
    succeed, because permissions may change at run time.
    """


class NoResponder(BrokerError):
    """Error for a request to a subject without a subscriber. The broker reports this at once, without a time-out."""


class TopologyMismatch(BrokerError):
    """Error for a stream or consumer that has other settings at the broker than expected. `field`: name of the first
    setting that differs.
    """

    def __init__(self, name: str, field: str, actual: object, expected: object) -> None:
        super().__init__(f"{name}: {field} is {actual!r} at the broker, this process needs {expected!r}")
        self.field = field


class UnsafeUpdate(BrokerError):
    """Error for a refused update of a stream: a lower limit would delete stored messages."""


class WrongRevision(BrokerError):
    """Error of `KeyValue.write`: a key has another revision than expected. No write of the batch was stored."""


@dataclass(frozen=True)
class CoreMessage:
    """Message that is delivered at most once. `reply`: subject for a reply; empty if the sender expects no reply."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(frozen=True)
class Published:
    """Reply to a publish. `sequence`: number of the message in its stream. `duplicate`: True if a message with the same
    id was already stored; `sequence` is then the number of that message.
    """

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True)
class StreamState:
    """State of a stream. `created`: creation time, which changes if the stream is deleted and created again. `messages`
    and `bytes` include leased messages (delivered, but not acknowledged).
    """

    created: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int


@dataclass(frozen=True)
class ConsumerState:
    """State of a durable consumer. `delivered`: number of deliveries since the consumer was created. `waiting`: number
    of messages that wait for their first delivery. `leased`: number of delivered messages without an ack. A message
    whose lease has ended counts as leased in NATS until its next delivery, and as waiting in the memory broker.
    """

    name: str
    subject: str
    ack_wait_s: float
    version: int
    delivered: int
    waiting: int
    leased: int


@dataclass(frozen=True)
class StreamMessage:
    """Stored message of a stream. `sent_s`: time when the broker stored the message, in seconds since 1970."""

    sequence: int
    subject: str
    data: bytes
    sent_s: float


@dataclass(frozen=True)
class Entry:
    """Value of a key at a revision. Each write to the bucket increases the revision. `value` is None for a removed key;
    only `since` and `watch` return removed keys.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Write:
    """One write of an atomic batch. A `value` of None removes the key. `expected`: revision that the key must have; 0
    for a key that must not exist, None if any revision is accepted.

    The constructor raises ValueError for a key that cannot be part of a subject, so that all implementations of the
    broker refuse the same keys.
    """

    key: str
    value: bytes | None
    expected: int | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"key {self.key[:70]!r}: expected tokens of letters, digits, -, _, = or /, joined by dots")


class Delivery(Protocol):
    """Leased message. `sent_s`: time at which the broker stored the message, in seconds since 1970. `pending`: number
    of messages that the consumer has not delivered yet. `delivered`: number of deliveries of this message so far.

    `reply` identifies this delivery for `Queue.release`, even after a restart of this process.
    """

    reply: str
    data: bytes
    subject: str
    consumer: str
    sequence: int
    delivered: int
    sent_s: float
    pending: int

    async def ack(self) -> None:
        """Remove the message, because its work is done."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """End the lease. The broker delivers the message again, to any process, after at least `delay_s` seconds."""

    async def in_progress(self) -> None:
        """Extend the lease: it then ends one ack wait after this call."""

    async def term(self, reason: str) -> None:
        """Remove the message, so that it is never delivered again."""


class Subscription(Protocol):
    async def stop(self) -> None:
        """End the subscription. Wait at most 5 s until messages that have already arrived are handled."""


class Pulls(Protocol):
    """Pull requests of one process to many consumers of a stream.

    Each delivery is passed once to the handler, which must not block. If a pull request expires, or is lost with its
    connection, the client sends a new pull request for the missing deliveries.
    """

    def want(self, consumer: str, credit: int) -> None:
        """Set the credit of a consumer: the number of deliveries that the broker may still send. Each delivery reduces
        the credit by one. A lower credit is in effect after at most 5 s.
        """

    def outstanding(self, consumer: str) -> int:
        """Return the number of deliveries that were requested from this consumer and have not arrived."""

    async def stop(self) -> None:
        """End all pull requests. Wait at most 5 s until deliveries that the broker has already sent are handled."""


class KeyValue(Protocol):
    """Bucket: a replicated map from keys to values, with revisions."""

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, within: str = "") -> list[Entry]:
        """Return the entries of all existing keys, sorted by key. With `within`, return only keys below this key:
        "model" selects "model.a", but not "models.a".
        """

    async def since(self, revision: int) -> list[Entry]:
        """Return the last entry of each key that was written or removed after a revision, in order of revisions. The
        latest writes may be missing, because the broker may read the entries from a replica that lacks these writes.
        """

    async def write(self, writes: list[Write]) -> int:
        """Write all keys in one atomic batch. Return the revision of the last write. Raises WrongRevision if a key has
        another revision than expected; the broker then stores no write. Raises PayloadTooBig, BrokerUnavailable, and
        ValueError for an empty list or a key that appears twice.
        """

    async def purge(self, within: str) -> None:
        """Remove the keys below `within`. No markers of removed keys are stored, so watches and `since` do not report
        the removal.
        """

    async def erase(self, entry: Entry) -> None:
        """Remove an entry without a marker, unless its key was written again."""

    async def epoch(self) -> str:
        """Return `created:last revision`, a text that changes with each write and if the bucket is created again."""

    async def reaches(self, revision: int) -> bool:
        """Return whether the broker still has an entry with the revision `revision` or a later one. Entries can expire
        or be lost.
        """

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        """Call `handler` once for each write after revision `after`, in order, also after reconnects. If a key was
        written several times, the earlier writes may be skipped, because a bucket keeps only the last write of a key.
        """


class Connection(Protocol):
    """Connection to the broker. An operation raises BrokerUnavailable if one of its requests has no reply within
    `timeout_s` seconds, or within `limits.API_TIMEOUT_S` if the operation has no argument `timeout_s`.
    """

    name: str
    max_payload: int
    # True: this process creates streams itself. False: it first asks the owner of streams (see `sie_broker.owner`).
    owns_streams: bool
    troubles: dict[str, str]  # unusable bucket or stream -> text of its last error, for /readyz

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None: ...

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until the broker has received all messages sent so far."""

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call `handler` after each reconnect."""


class Bus(Connection, Protocol):
    """Protocol for messages that are not stored: only the subscribers at the time of sending get one, at most once."""

    async def send(self, subject: str, data: bytes, reply: str = "") -> None: ...

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str = "",
        *,
        held_messages: int | None = None,
        held_bytes: int | None = None,
        on_dropped: Callable[[str], None] | None = None,
    ) -> Subscription:
        """Call `handler` for each message, one after the other. An exception in `handler` is logged, and the next
        message is handled. If several subscriptions have the same `queue`, each message goes to only one of them.

        `held_messages`, `held_bytes`: largest number of messages that wait for the handler, and largest sum of their
        bytes. The defaults are in `limits`. Only a handler that blocks for long reaches these limits. Then the
        client drops each new message and calls `on_dropped` with the subject of the message.
        """

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a request and return the first reply. Raises NoResponder at once if the subject has no subscriber.
        Raises PayloadTooBig, and BrokerUnavailable after `timeout_s` or when the connection is lost.
        """


class Queue(Connection, Protocol):
    """Protocol for messages that are stored in streams and delivered at least once, for publishers and consumers."""

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        """Store a message in the stream of `subject`. Within the duplicate window, the stream stores no second
        message with the same id. Raises StreamFull, PayloadTooBig, BrokerUnavailable.
        """

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls: ...

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        """Return the number of messages per subject, including leased messages and messages without a consumer."""

    async def stream_state(self, stream: str) -> StreamState: ...

    async def delete(self, stream: str, sequence: int) -> bool:
        """Delete a message, even if it is leased. Return False if the message does not exist any more."""

    async def release(self, reply: str) -> None:
        """End the lease of a delivery, like `nak`. The broker delivers the message again, without a delay.
        Nothing happens if the message is already acknowledged. `reply`: `Delivery.reply` of the delivery. Raises
        ValueError if `reply` identifies no delivery.

        Call this only for leases of an earlier run of this process. If another process has leased the message
        meanwhile, two processes would work on the message.
        """

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> StreamMessage | None:
        """Return the first message, leased or not, whose number is at least `sequence` and whose subject matches
        `subject`; None if no message matches.
        """

    async def server_time(self, stream: str) -> float:
        """Return the present time in seconds since 1970, by the server clock that sets `sent_s` of new messages."""

    async def consumers(self, stream: str) -> list[str]:
        """Return the names of all durable consumers of a stream."""

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        """Call `handler(name, exists)` when a consumer of the stream is created or deleted. The handler may miss a
        change, because the broker does not store its notices of changes.
        """


class Administration(Queue, Protocol):
    """Queue whose streams and consumers this process may create, update and delete."""

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        """Ensure that a stream exists with these settings: create it, or update it from an older topology version. If
        an owner of streams (see `sie_broker.owner`) is connected, the owner does this. Raises TopologyMismatch,
        UnsafeUpdate, and BrokerError if the stream does not exist afterwards.
        """

    async def delete_stream(self, stream: str) -> bool:
        """Delete a stream with its messages and consumers. Open pulls then deliver nothing, and acks have no effect.
        Return False if the stream does not exist.
        """

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create a consumer. If it exists with an older topology version, update its settings except the filter. If it
        exists with this topology version, only compare the settings. Raises TopologyMismatch, BrokerError.
        """

    async def delete_consumer(self, stream: str, name: str) -> bool:
        """Delete a durable consumer. Return False if it does not exist. The next consumer of the same subject delivers
        the leased messages of the deleted consumer again. Acks of the old leases have no effect.
        """

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        """Return the states of all durable consumers of a stream. The states may be from different moments."""


class Store(Connection, Protocol):
    async def key_value(
        self,
        bucket: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> KeyValue:
        """Open a bucket. Create it if it does not exist.

        `storage`, `replicas` and `max_age_s` apply only to a new bucket. If an existing bucket was created without
        `removed_age_s`, this argument has no effect. A key expires `max_age_s` seconds after its last write (0: never).
        The broker stores a marker for each removed key. The marker expires after `removed_age_s` seconds (0: after
        `max_age_s`). A watch does not report that a key expires.
        """


class Broker(Bus, Administration, Store, Protocol):
    """All operations of the broker, over one connection."""
