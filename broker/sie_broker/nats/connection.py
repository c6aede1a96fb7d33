"""One connection to a NATS server or cluster: how it is kept, what is asked over it and how an answer finds its
question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from nats.aio.client import Client
from nats.errors import BadSubjectError, SlowConsumerError
from nats.errors import Error as NatsError

from sie_broker import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    CoreMessage,
    Delivery,
    KeyValue,
    NoResponder,
    PayloadTooBig,
    Published,
    Pulls,
    Stored,
    StreamState,
    Subscription,
)
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S, check_room
from sie_broker.nats.api import (
    CONSUMER_EXISTS,
    CONSUMER_GONE,
    NEVER_UPDATED,
    NO_CONSUMER,
    NO_MESSAGE,
    NO_STREAM,
    STREAM_EXISTS,
    Answer,
    ConsumerInfo,
    Consumers,
    Names,
    Refusal,
    StoredAnswer,
    StreamInfo,
    Streams,
    bucket_config,
    consumer_config,
    consumer_state_of,
    difference,
    error_of,
    is_no_responder,
    mismatch,
    nanoseconds,
    publish_ack,
    state_of,
    stream_config,
    update_of,
    version_of,
)
from sie_broker.nats.keyvalue import NatsKeyValue
from sie_broker.nats.pulls import NatsDelivery, NatsPulls, parse_reply
from sie_broker.nats.transport import FIRST_RETRY_S, HANG_UP_S, Transport, inbox_prefix, split
from sie_broker.tasks import OwnedTasks, expire, guarded
from sie_contracts.topology import DUPLICATE_WINDOW_S, ConsumerSpec, StreamSpec

if TYPE_CHECKING:
    from sie_contracts.settings import Secret

log = logging.getLogger("sie.broker")
_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 2.0
_ENSURE_ATTEMPTS = 10  # at a consumer that others delete meanwhile

# A buffer above any burst between two turns of the loop; beyond it a publisher waits for the socket.
_SEND_BUFFER_BYTES = 64 << 20


async def connect(url: str, *, name: str, timeout_s: float = 10.0, password: Secret | None = None) -> Broker:
    """Connect to `url` (several servers of a cluster: joined by commas), under `name` in the server's list of
    connections.

    `password` is that of a user whom `url` names without one.

    Raises BrokerUnavailable when no server accepts in time. Afterwards the connection is kept for ever: a lost one is
    noticed within 15 s at a silent peer, at once otherwise, and tried again every 0.1 to 1 s. The credentials of `url`
    appear in no log and no error.
    """
    broker = NatsBroker(name)
    await broker.open(url, timeout_s, password)
    return broker


class NatsBroker:
    """One connection to a NATS server or cluster. Made by `connect`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.max_payload = 0
        self._client: Any = Client()
        self._transport = Transport()
        self._client._transport = self._transport
        self._opened = False  # ever
        self._live = False
        self._closed = False
        self._up = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._failed_attempts = 0
        self._dropped = 0
        self._droppers: dict[Any, Callable[[str], None]] = {}  # by subscription of the client
        self._inbox = ""
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._token = 0
        self._pulls: set[NatsPulls] = set()
        self._handlers: list[Callable[[], Awaitable[None]]] = []
        self._tasks = OwnedTasks(name)

    # ---- connection

    async def open(self, url: str, timeout_s: float, password: Secret | None = None) -> None:
        servers, credentials = split(url, password)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        reason: Exception | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._attempt(servers, credentials)
                break
            except (TimeoutError, NatsError, OSError) as error:
                told = self._client.last_error
                if reason is None or told or not isinstance(error, TimeoutError):
                    reason = told or error  # an attempt that the deadline cuts short says less than the one before
                await self._hang_up()
                if loop.time() + FIRST_RETRY_S >= deadline_s:
                    where = ", ".join(servers)
                    raise BrokerUnavailable(
                        f"{self.name}: no broker at {where} within {timeout_s} s: {reason!r}"
                    ) from None
            except asyncio.CancelledError:
                await self._hang_up()
                raise
            await asyncio.sleep(FIRST_RETRY_S)
        self._failed_attempts = 0
        self.max_payload = self._client.max_payload
        self._opened = self._live = True
        self._up.set()
        self.own(self._run_reconnect_handlers(), "reconnect handlers")

    async def _attempt(self, servers: list[str], credentials: dict[str, str]) -> None:
        """Try each server once or twice. The client's own loop would go on for ever, also after a cancellation (nats-py
        2.16).
        """
        self._client = Client()
        self._client._transport = self._transport = Transport()
        await self._client.connect(
            servers=servers,
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_back,
            closed_cb=self._on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=FIRST_RETRY_S,
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=_SEND_BUFFER_BYTES,
            flush_timeout=2.0,
            inbox_prefix=inbox_prefix(credentials),
            **credentials,
        )
        self._client.options |= {"allow_reconnect": True, "max_reconnect_attempts": -1}
        self._inbox = f"{self._client.new_inbox()}."
        await self._client.subscribe(f"{self._inbox}*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)

    async def _hang_up(self) -> None:
        """End the connection, by force if the peer does not take what is buffered."""
        closing = asyncio.get_running_loop().create_task(self._client.close())
        await asyncio.wait({closing}, timeout=HANG_UP_S)
        self._transport.abort()
        await asyncio.wait({closing}, timeout=HANG_UP_S)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await self._transport.wait_closed()

    @property
    def live(self) -> bool:
        """There is a connection. `connected` also says that all tasks of it are well."""
        return bool(self._live and self._client.is_connected)

    @property
    def connected(self) -> bool:
        return self.live and not self._tasks.crashed

    @property
    def server(self) -> tuple[str, bool]:
        """The version of the server, and whether it has JetStream, as it said when the connection was made."""
        info = self._client._server_info
        return str(info.get("version", "")), bool(info.get("jetstream"))

    async def close(self) -> None:
        """Send what is buffered, then end the connection and every task of it. Open pulls and watches just end: `stop`
        them before.
        """
        if self._live:
            try:
                await self.flush(_CLOSE_TIMEOUT_S)
            except BrokerError as error:
                log.warning("%s: closing without knowing whether all was sent: %s", self.name, error)
        self._closed = True
        self._live = False
        self._up.set()
        for pulls in list(self._pulls):
            pulls.abandon()
        await self._tasks.cancel()
        await self._hang_up()
        self._fail_waiting("the connection was closed")

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._handlers.append(handler)

    async def _run_reconnect_handlers(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for handler in list(self._handlers):
                await guarded("a reconnect handler", handler())

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error(
                    "%s: %d messages dropped, the last on %s: its handler is too slow",
                    self.name,
                    self._dropped,
                    error.subject,
                )
            dropper = self._droppers.get(error.sub)
            if dropper is not None:
                dropper(error.subject)
            return
        if self.live:
            log.warning("%s: %r", self.name, error)
            return
        self._failed_attempts += 1
        self._client.options["reconnect_time_wait"] = min(1.0, FIRST_RETRY_S * 1.2 ** min(self._failed_attempts, 20))
        if self._failed_attempts == 1 and not self._closed:
            log.warning("%s: connection error, trying again: %r", self.name, error)

    async def _on_lost(self) -> None:
        if not self._live:
            return
        self._live = False
        self._up.clear()
        log.warning("%s: connection lost", self.name)
        self._fail_waiting("the connection was lost before the answer came")
        for pulls in list(self._pulls):
            await pulls.retire()

    async def _on_back(self) -> None:
        log.warning("%s: connected again after %d failed attempts", self.name, self._failed_attempts)
        self._failed_attempts = 0
        self._client.options["reconnect_time_wait"] = FIRST_RETRY_S
        self.max_payload = self._client.max_payload
        self._live = True
        self._up.set()
        for pulls in self._pulls:
            pulls.wake()
        self._reconnected.set()

    async def _on_closed(self) -> None:
        if self._opened and not self._closed:  # else it is an attempt that failed, which `open` tells
            log.critical("%s: the connection is closed for good: %s", self.name, self._client.last_error)
            self._closed = True
            self._up.set()

    def _fail_waiting(self, reason: str) -> None:
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(BrokerUnavailable(f"{self.name}: {reason}"))

    async def reach(self, timeout_s: float) -> float:
        """Wait for a connection. Returns what is left of `timeout_s`; raises BrokerUnavailable when nothing is."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if not self._closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                raise BrokerUnavailable(f"{self.name}: no connection to the broker for {timeout_s} s") from None
        if self._closed:
            raise BrokerUnavailable(f"{self.name}: the connection to the broker is closed")
        return timeout_s - (loop.time() - start_s)

    def own(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` as a task of this connection: kept, cancelled at close. If it crashes, the connection counts as
        not connected.
        """
        return self._tasks.start(work, what)

    # ---- messages and answers

    async def flush(self, timeout_s: float = 2.0) -> None:
        # An echo instead of the client's own flush: one that times out there ends its reader (nats-py 2.16).
        await self.roundtrip(f"{self._inbox}echo", b"", timeout_s)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        await self.post(subject, data, reply)

    async def post(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Hand to the connection, which must be up: nothing is kept for a later one, when it may no longer be true."""
        if not self._live:
            raise BrokerUnavailable(f"{self.name}: no connection to the broker")
        self._check_size(data, headers)
        try:
            await self._client.publish(subject, data, reply, headers)
        except BadSubjectError:
            raise ValueError(f"{subject!r} is not a subject") from None
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error

    async def acknowledge(self, reply: str) -> None:
        """Unlike the rest, an ack is kept while there is no connection: it is right whenever it arrives."""
        if self._closed:
            raise BrokerUnavailable(f"{self.name}: the connection to the broker is closed")
        try:
            await self._client.publish(reply, b"+ACK")
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error

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
        what = f"{self.name}: the handler of {subject}"

        async def arrived(message: Any) -> None:
            await guarded(what, handler(CoreMessage(message.subject, message.data, message.reply)))

        await self.reach(API_TIMEOUT_S)
        try:
            subscription = await self._client.subscribe(
                subject,
                queue,
                cb=arrived,
                pending_msgs_limit=held_messages or HELD_MESSAGES,
                pending_bytes_limit=held_bytes or HELD_BYTES,
            )
        except BadSubjectError:
            raise ValueError(f"{subject!r} is not a subject") from None
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error
        if on_dropped is not None:
            self._droppers[subscription] = on_dropped
        try:
            await self.flush()
        except BrokerError:
            await self.drain(subscription)
            raise
        return _NatsSubscription(self, subscription)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await self.roundtrip(subject, data, timeout_s)
        if is_no_responder(answer):
            raise NoResponder(f"nobody listens on {subject}")
        return bytes(answer.data)

    async def roundtrip(
        self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Any:
        """Send with a reply address and return the first message that comes back, which may be a status. Raises
        BrokerUnavailable.
        """
        if not self._live:
            timeout_s = await self.reach(timeout_s)
        loop = asyncio.get_running_loop()
        self._token += 1
        token = str(self._token)
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting[token] = answer
        timer = loop.call_later(timeout_s, expire, answer, subject, timeout_s)
        try:
            await self.post(subject, data, self._inbox + token, headers)
            return await answer
        finally:
            timer.cancel()
            del self._waiting[token]

    async def _answered(self, message: Any) -> None:
        skip = len(self._inbox)
        answer = self._waiting.get(message.subject[skip:])
        if answer is None and message.reply:
            answer = self._waiting.get(message.reply[skip:])  # our own echo
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _check_size(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        # The server ends the connection of a client that sends more, so that this must never get there.
        size = len(data)
        if headers is not None:
            size += 12 + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())
        if size > self.max_payload:
            raise PayloadTooBig(f"a message of {size} bytes passes the broker's limit of {self.max_payload}")

    async def drain(self, subscription: Any) -> None:
        """End a subscription. What the broker sent before it heard of this is handled first, for at most
        STOP_TIMEOUT_S.
        """
        # The task is left alone at the time-out: the client does not survive a cancelled flush (nats-py 2.16).
        self._droppers.pop(subscription, None)
        task = self.own(self._drained(subscription), "drain")
        await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
        if not task.done():
            log.warning("%s: a subscription was not drained within %s s", self.name, STOP_TIMEOUT_S)

    async def _drained(self, subscription: Any) -> None:
        # The client's own drain lets its PING overtake its UNSUB and drops what comes between, under load 4 messages of
        # a credit of 16 (nats-py 2.16). So ours goes before: the echo comes back behind everything that was sent on the
        # subscription.
        try:
            await self._client._send_unsubscribe(subscription._id)
            await self.flush()
        except BrokerUnavailable as error:
            log.info("%s: a subscription ends without its connection: %s", self.name, error)
        try:
            await subscription.drain()
        except NatsError as error:
            log.info("%s: a subscription had ended before: %s", self.name, error)

    # ---- streams and consumers

    async def api(self, verb: str, body: object, kind: type[_T]) -> _T:
        """One request to the JetStream API. Raises BrokerUnavailable, or what the error code means."""
        answer = await self.roundtrip(f"$JS.API.{verb}", msgspec.json.encode(body), API_TIMEOUT_S)
        if is_no_responder(answer):
            raise BrokerUnavailable(f"{verb}: no JetStream at the broker")
        try:
            error = msgspec.json.decode(answer.data, type=Answer).error
            if error is not None:
                raise error_of(verb, error)
            return msgspec.json.decode(answer.data, type=kind)
        except msgspec.DecodeError as error:
            raise BrokerError(f"{verb}: the broker's answer cannot be read: {error}") from error

    async def find(self, verb: str, body: object, kind: type[_T], *absent: int) -> _T | None:
        """`api`, but None where the error code is one of `absent`."""
        try:
            return await self.api(verb, body, kind)
        except Refusal as refusal:
            if refusal.number in absent:
                return None
            raise

    async def _stream(self, stream: str) -> StreamInfo | None:
        return await self.find(f"STREAM.INFO.{stream}", {}, StreamInfo, NO_STREAM)

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        wanted = stream_config(spec)
        info = await (self._made(spec.name, wanted) if owner else self._stream(spec.name))
        if info is None:
            raise BrokerError(f"there is no stream {spec.name}: its owner has not created it yet")
        field = difference(info.config, wanted)
        if owner and version_of(info.config) < spec.version:
            if spec.max_per_subject > 0:
                check_room(
                    spec, max(0, info.config.get("max_msgs_per_subject", 0)), await self.subject_counts(spec.name, ">")
                )
            return state_of(await self._update_stream(spec.name, info.config, wanted, field))
        if field is not None:
            raise mismatch(spec.name, field, info.config, wanted)
        return state_of(info)

    async def _made(self, name: str, config: dict[str, Any]) -> StreamInfo | None:
        """The stream as it is, made now if it was not there. Two that make it at once get the same one."""
        info = await self._stream(name) or await self.find(f"STREAM.CREATE.{name}", config, StreamInfo, STREAM_EXISTS)
        return info or await self._stream(name)

    async def _update_stream(
        self, name: str, found: dict[str, Any], wanted: dict[str, Any], field: str | None
    ) -> StreamInfo:
        try:
            return await self.api(f"STREAM.UPDATE.{name}", update_of(found, wanted), StreamInfo)
        except Refusal as refusal:
            if field is None:
                raise
            raise mismatch(name, field, found, wanted) from refusal

    async def stream_state(self, stream: str) -> StreamState:
        info = await self._stream(stream)
        if info is None:
            raise BrokerError(f"there is no stream {stream}")
        return state_of(info)

    async def delete_stream(self, stream: str) -> bool:
        return await self.find(f"STREAM.DELETE.{stream}", {}, Answer, NO_STREAM) is not None

    async def server_time(self, stream: str) -> float:
        info = await self.api(f"STREAM.INFO.{stream}", {}, StreamInfo)
        if info.ts is None:
            raise BrokerError(f"{stream}: this broker does not tell its time")
        return info.ts.timestamp()

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        while True:
            page = await self.api(
                f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": len(counts)}, StreamInfo
            )
            counts.update(page.state.subjects)
            if not page.state.subjects or len(counts) >= page.total:
                return counts

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        for _ in range(_ENSURE_ATTEMPTS):
            try:
                return await self._ensure_consumer(spec)
            except Refusal as refusal:
                if refusal.number not in CONSUMER_GONE:
                    raise
        raise BrokerUnavailable(f"consumer {spec.name}: it was deleted {_ENSURE_ATTEMPTS} times while it was made")

    async def _ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Raises Refusal with one of CONSUMER_GONE if it is deleted meanwhile."""
        wanted = consumer_config(spec)
        verb = f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.subject}"
        create = {"stream_name": spec.stream, "action": "create", "config": wanted}
        if await self.find(verb, create, ConsumerInfo, CONSUMER_EXISTS) is not None:
            return
        found = (await self.api(f"CONSUMER.INFO.{spec.stream}.{spec.name}", {}, ConsumerInfo)).config
        field = difference(found, wanted)
        if version_of(found) < spec.version and field not in NEVER_UPDATED:
            try:
                await self.api(verb, {**create, "action": "update", "config": update_of(found, wanted)}, ConsumerInfo)
            except Refusal as refusal:
                if field is None or refusal.number in CONSUMER_GONE:
                    raise
                raise mismatch(spec.name, field, found, wanted) from refusal
        elif field is not None:
            raise mismatch(spec.name, field, found, wanted)

    async def delete_consumer(self, stream: str, name: str) -> bool:
        return await self.find(f"CONSUMER.DELETE.{stream}.{name}", {}, Answer, NO_CONSUMER, NO_STREAM) is not None

    async def consumers(self, stream: str) -> list[str]:
        names: list[str] = []
        while True:
            page = await self.api(f"CONSUMER.NAMES.{stream}", {"offset": len(names)}, Names)
            names += page.consumers or []
            if not page.consumers or len(names) >= page.total:
                return names

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        return [consumer_state_of(info) for info in await self.consumer_infos(stream)]

    async def consumer_infos(self, stream: str) -> list[ConsumerInfo]:
        found: list[ConsumerInfo] = []
        while True:
            page = await self.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)}, Consumers)
            found += page.consumers or ()
            if not page.consumers or len(found) >= page.total:
                return found

    async def stream_infos(self) -> list[StreamInfo]:
        found: list[StreamInfo] = []
        while True:
            page = await self.api("STREAM.LIST", {"offset": len(found)}, Streams)
            found += page.streams or ()
            if not page.streams or len(found) >= page.total:
                return found

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        prefix = "$JS.EVENT.ADVISORY.CONSUMER"

        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            if action in ("CREATED", "DELETED"):
                await handler(name, action == "CREATED")

        return await self.subscribe(f"{prefix}.*.{stream}.*", advised)

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        answer = await self.roundtrip(subject, data, timeout_s, {"Nats-Msg-Id": message_id})
        ack = publish_ack(subject, answer)
        return Published(ack.seq, ack.duplicate)

    async def delete(self, stream: str, sequence: int) -> bool:
        return (
            await self.find(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True}, Answer, *NO_MESSAGE)
            is not None
        )

    async def release(self, reply: str) -> None:
        parse_reply(reply)
        await self.post(reply, b"-NAK")

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> Stored | None:
        query = {"seq": max(1, sequence), "next_by_subj": subject}
        answer = await self.find(f"STREAM.MSG.GET.{stream}", query, StoredAnswer, *NO_MESSAGE)
        if answer is None:
            return None
        found = answer.message
        return Stored(found.seq, found.subject, found.data, found.time.timestamp())

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        return self.open_pulls(stream, handler)

    def open_pulls(
        self, stream: str, handler: Callable[[NatsDelivery], None], on_break: Callable[[], None] | None = None
    ) -> NatsPulls:
        pulls = NatsPulls(self, self._client, stream, handler, on_break)
        self._pulls.add(pulls)
        return pulls

    def forget(self, pulls: NatsPulls) -> None:
        self._pulls.discard(pulls)

    async def key_value(
        self, bucket: str, *, storage: str = "file", replicas: int = 1, max_age_s: float = 0.0
    ) -> KeyValue:
        name = f"KV_{bucket}"
        wanted = bucket_config(name, bucket)
        window_s = min(DUPLICATE_WINDOW_S, max_age_s or DUPLICATE_WINDOW_S)
        chosen = {
            "storage": storage,
            "num_replicas": replicas,
            "duplicate_window": nanoseconds(window_s),
            "max_age": nanoseconds(max_age_s),
        }
        info = await self._made(name, {**wanted, **chosen})
        if info is None:
            raise BrokerUnavailable(f"{name} was removed while it was opened")
        field = difference(info.config, wanted)
        if field is not None:
            raise mismatch(name, field, info.config, wanted)
        return NatsKeyValue(self, bucket)


class _NatsSubscription:
    def __init__(self, broker: NatsBroker, subscription: Any) -> None:
        self._broker = broker
        self._subscription = subscription

    async def stop(self) -> None:
        await self._broker.drain(self._subscription)
