"""Protocols of the message broker for gateway, sidecar and config service.

    Bus              send, request, subscribe: messages that are delivered at most once
    Queue            publish, pulls, counts, delete: messages that are stored in streams
    Administration   a Queue that also creates, updates and deletes streams and consumers
    Store            buckets: replicated maps with revisions
    Broker           all four protocols, over one connection

Code that uses the broker declares the smallest protocol that it needs.

Implementations: `nats` (NATS JetStream, for a cluster) and `memory` (inside one process, for `sie serve --standalone`
and as a fake in tests that models ack wait, delays, delivery counts, limits and lost connections). One conformance
suite, `tests/contract/broker`, runs against both.

Delivery is at least once. After `ack_wait`, the broker delivers a message again, to another consumer process. An ack of
the first process still removes the message. So each process must stop work on a message whose lease has ended (see the
sidecar's leases).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


class BrokerError(Exception):
    """Error of a broker that refused an operation or could not be reached."""


class BrokerUnavailable(BrokerError):
    """Error of a connection that was lost, or of an answer that did not arrive in time. The operation may or may not
    have happened.
    """


class StreamFull(BrokerError):
    """Error of a stream that has reached its limit, in total or for this subject. The broker refuses the new message
    and keeps all stored ones.
    """


class PayloadTooBig(BrokerError):
    """Error of a message above the broker's `max_payload`, headers included. Nothing was sent."""


class NotPermitted(BrokerUnavailable):
    """Error of a publish to a subject for which this user has no permission. Permissions may change at run time."""


class NoResponder(BrokerError):
    """Error of a request on a subject that has no subscriber. The broker reports it at once; it is not a time-out."""


class TopologyMismatch(BrokerError):
    """Error of a stream or consumer that exists with other settings. `field` names the first setting that differs."""

    def __init__(self, name: str, field: str, actual: object, expected: object) -> None:
        super().__init__(f"{name}: {field} is {actual!r} at the broker, this process needs {expected!r}")
        self.field = field


class WrongRevision(BrokerError):
    """Error of a compare-and-set: a key has another revision than the write expected. Nothing of the batch was
    stored.
    """


@dataclass(frozen=True)
class CoreMessage:
    """A message that is delivered at most once. `reply` is empty unless the sender waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(frozen=True)
class Published:
    """Answer to a publish: the broker stores the message at `sequence`. `duplicate`: the broker had stored the message
    before, with the same message id.
    """

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True)
class StreamState:
    """State of a stream. `created` changes when the stream was lost and recreated. Counts include leased messages."""

    created: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int


@dataclass(frozen=True)
class ConsumerState:
    """State of a durable consumer. `delivered` counts deliveries since the consumer was created. `waiting` counts
    messages that are neither leased nor removed.
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
    """A message in a stream. `sent_s` is the broker's wall clock when the message was stored."""

    sequence: int
    subject: str
    data: bytes
    sent_s: float


@dataclass(frozen=True)
class Entry:
    """Value of a key at a revision. Revisions increase over the whole bucket. `value` is None for a removed key; only
    `since` and `watch` return removed keys.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Write:
    """A write of an atomic batch. A `value` of None removes the key. `expected` is the revision that the key must have:
    0 for a key that must not exist, None for any revision.

    Raises ValueError for a key that cannot be part of a subject, so that all implementations refuse the same keys.
    """

    key: str
    value: bytes | None
    expected: int | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"key {self.key[:70]!r}: expected tokens of letters, digits, -, _, = or /, joined by dots")


class Delivery(Protocol):
    """A leased message. `sent_s` is the broker's wall clock when the message was first stored. `pending` is the number
    of messages that the consumer has not delivered yet.

    `reply` identifies this delivery for `Queue.release`, also after a restart of this process.
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
        """Remove the message: its work is done."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Deliver the message again, to any holder, after `delay_s` at the earliest."""

    async def in_progress(self) -> None:
        """Restart the ack wait of the message."""

    async def term(self, reason: str) -> None:
        """Remove the message, so that it is never delivered again."""


class Subscription(Protocol):
    async def stop(self) -> None:
        """Stop receiving. Messages that have arrived are handled before this returns."""


class Pulls(Protocol):
    """The open pulls of one process on many consumers of a stream.

    Every delivery arrives once, through the handler that was passed at creation. The handler must not block. After its
    expiry, a reconnect or a lost status, an open pull is issued again, until it is filled or `want` lowers the credit.
    """

    def want(self, consumer: str, credit: int) -> None:
        """Keep `credit` deliveries outstanding for `consumer`. Each delivery reduces the number by one. A lower credit
        is effective within 5 s.
        """

    def outstanding(self, consumer: str) -> int:
        """Return the number of deliveries that the broker may still send for this consumer."""

    async def stop(self) -> None:
        """Withdraw all pulls. Deliveries already on the wire reach the handler before this returns."""


class KeyValue(Protocol):
    """A replicated map with revisions."""

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, within: str = "") -> list[Entry]:
        """Return all live keys, sorted. With `within`, return only the keys below it ("model" covers "model.a", not
        "models.a").
        """

    async def since(self, revision: int) -> list[Entry]:
        """Return the keys written after a revision, with removed keys, in order of their revisions. A key that was
        written twice appears once, with its last value.

        The answer may come from a replica of the broker that has not applied the last writes.
        """

    async def write(self, writes: list[Write]) -> int:
        """Write all keys or none; a key may appear once. Returns the bucket's last revision. Raises WrongRevision,
        BrokerUnavailable.
        """

    async def purge(self, within: str) -> None:
        """Remove the keys below `within` as if they had never existed: watches and `since` do not report this
        removal.
        """

    async def epoch(self) -> str:
        """Return `created:last revision`. Equal epochs mean equal contents, also if the bucket was lost and created
        again.
        """

    async def reaches(self, revision: int) -> bool:
        """Return whether the leader still has a write at `revision` or a later one. The last writes of a bucket can
        disappear: they expire, or a file of the broker is damaged.
        """

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        """Call `handler` for each write after revision `after`, once, in order, across reconnects.

        The watch may skip a write that a later write of the same key has replaced: a bucket keeps only the last one.
        """


class Connection(Protocol):
    """A connection to the broker. Operations wait at most their `timeout_s` and then raise BrokerUnavailable."""

    name: str
    max_payload: int
    owns_streams: bool  # true: this process creates streams itself, without an owner of streams
    troubles: dict[str, str]  # bucket or stream -> reason why it cannot be used at present; part of the readiness

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None: ...

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until the broker has received every message that was sent before."""

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call `handler` after each re-established connection."""


class Bus(Connection, Protocol):
    """Protocol for messages that are delivered at most once, to the present subscribers."""

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
        message is handled.

        While `held_messages` messages or `held_bytes` bytes wait for `handler`, a new message is dropped, and
        `on_dropped` is called with its subject. None is a default limit that only a handler that blocks for a long time
        can reach.
        """

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Return the first answer. Raises NoResponder at once, BrokerUnavailable at the time-out."""


class Queue(Connection, Protocol):
    """Protocol for messages that are stored in streams and delivered at least once, with the methods that publishers
    and consumers need.
    """

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        """Store a message in the stream of `subject`, once per message id within the duplicate window. Raises
        StreamFull, BrokerUnavailable.
        """

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls: ...

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        """Return the number of messages per subject. Waiting and leased messages count, with or without consumers."""

    async def stream_state(self, stream: str) -> StreamState: ...

    async def delete(self, stream: str, sequence: int) -> bool:
        """Remove a message, waiting or leased. Returns False if it does not exist any more."""

    async def release(self, reply: str) -> None:
        """Deliver a leased message again at once, with the same effect as `nak` of its delivery. A settled message does
        not change. Raises ValueError for a `reply` that identifies no delivery.

        Use it for leases that an earlier run of the same process left. If another process has the lease by now, the
        message is then leased twice.
        """

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> StreamMessage | None:
        """Return the first message at `sequence` or above whose subject matches `subject`, waiting or leased; None if
        there is none.
        """

    async def server_time(self, stream: str) -> float:
        """Return the wall clock, in seconds since 1970, of the server that stamps the messages of this stream. The
        server reads it during this call.
        """

    async def consumers(self, stream: str) -> list[str]:
        """Return the names of all durable consumers."""

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        """Call `handler(name, exists)` when a consumer of the stream is created or deleted from now on. The calls are
        hints: some may be lost.
        """


class Administration(Queue, Protocol):
    """Protocol of a Queue whose streams and consumers can be created, updated and deleted."""

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        """Ensure that a stream exists with these settings. The owner creates it, or updates it from an older topology
        version. Any other process only compares the settings. Raises TopologyMismatch.

        A lower limit per subject is refused while a subject has more than half of its messages: the update could drop
        messages.
        """

    async def delete_stream(self, stream: str) -> bool:
        """Delete a stream with its messages and consumers. Returns False if it does not exist. After that, open pulls
        deliver no messages, and acks have no effect.
        """

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create a consumer. If it exists, compare the settings, and update them only from an older topology version.
        Raises TopologyMismatch.
        """

    async def delete_consumer(self, stream: str, name: str) -> bool:
        """Delete a durable consumer. Returns False if it does not exist. Its leased messages wait for the next consumer
        of the same subject; acks of these leases have no effect.
        """

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        """Return the states of all durable consumers. Each state is read at its own moment."""


class Store(Connection, Protocol):
    """Access to buckets."""

    async def key_value(
        self,
        bucket: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> KeyValue:
        """Open a bucket; create it if it does not exist.

        `max_age_s` and `removed_age_s` apply to a new bucket. A key expires `max_age_s` after its last write (0:
        never). The mark of a removed key expires after `removed_age_s` (0: never). Watches report neither of these
        expiries.
        """


class Broker(Bus, Administration, Store, Protocol):
    """The operations of all protocols, over one connection."""
