"""The broker over NATS JetStream.

Every answer (publish ack, reply of a request, JetStream API) comes back on one inbox of the connection and is matched by its token.
Deliveries come back on an inbox of their `Pulls`, made anew after each reconnect, so that a pull of the old connection, which the broker
may still hold, can never be filled beside the one that replaced it. Nothing waits in silence: what is in flight when the connection is
lost fails at once, what is asked for while there is none waits for the next one until its time-out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import BadSubjectError, SlowConsumerError
from nats.errors import Error as NatsError

from sie_contracts.broker import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    CoreMessage,
    Delivery,
    Entry,
    KeyValue,
    NoResponder,
    PayloadTooBig,
    Published,
    Pulls,
    StreamFull,
    StreamState,
    Subscription,
    TopologyMismatch,
    Write,
    WrongRevision,
)
from sie_contracts.topology import DUPLICATE_WINDOW_S, ConsumerSpec, StreamSpec

log = logging.getLogger("sie.broker")
_T = TypeVar("_T")

API_TIMEOUT_S = 5.0
PULL_EXPIRES_S = 5.0
PULL_LOST_S = PULL_EXPIRES_S + 1.0  # the broker answers an expired pull within milliseconds: a silent one is lost
STOP_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_HANG_UP_S = 1.0
_FIRST_RETRY_S, _MAX_RETRY_S = 0.1, 2.0
_SWEEP_S = 0.25  # how far apart late pulls are looked for under load, so that timers do not grow with the message rate

# A buffer above any burst between two turns of the loop; beyond it a publisher waits for the socket.
_SEND_BUFFER_BYTES = 64 << 20
# Subscriptions of handlers that may be slow. The inboxes have no limit: they hold what was asked for and nothing else.
_HELD_MESSAGES = 1 << 18
_HELD_BYTES = 512 << 20

# Top-ups are pulls of their own: a few dozen per busy worker and consumer. The broker's default of 512 refuses the rest of a large pool.
_MAX_WAITING_PULLS = 8192
_WATCH_CREDIT = 256
_WATCH_KEPT_S = 30.0

_VERSION_KEY = "sie.topology"
_FULL = {10076, 10077}
_NO_STREAM, _NO_CONSUMER, _NO_MESSAGE = 10059, 10014, (10037, 10043, 10057)
_STREAM_EXISTS, _CONSUMER_EXISTS = 10058, 10148
_WRONG_SEQUENCE, _BATCH_INCOMPLETE = {10071, 10164}, 10176
_SPEC_FIELDS = {
    "max_age": "max_age_s",
    "max_msgs_per_subject": "max_per_subject",
    "num_replicas": "replicas",
    "duplicate_window": "duplicate_window_s",
    "ack_wait": "ack_wait_s",
    "filter_subject": "subject",
}
_NEVER_UPDATED = {"filter_subject", "ack_policy"}  # a changed filter may overlap, which some server versions accept on update

_NAME = str.maketrans(dict.fromkeys(". */\\>\t", "-"))

_encode = msgspec.json.encode


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    error: _ApiError | None = None


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


class _State(msgspec.Struct):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    subjects: dict[str, int] = {}


class _StreamInfo(msgspec.Struct):
    created: str
    config: dict[str, Any]
    state: _State
    total: int = 0


class _ConsumerInfo(msgspec.Struct):
    config: dict[str, Any]
    num_pending: int = 0


class _Names(msgspec.Struct):
    total: int
    consumers: list[str] | None = None


class _Stored(msgspec.Struct):
    seq: int
    data: bytes = b""
    hdrs: bytes = b""


class _StoredAnswer(msgspec.Struct):
    message: _Stored


_decode_ack = msgspec.json.Decoder(_Ack).decode


class _Refusal(BrokerError):
    """The JetStream API said no."""

    def __init__(self, what: str, error: _ApiError) -> None:
        super().__init__(f"{what}: {error.description} ({error.err_code})")
        self.number = error.err_code


def _refusal(what: str, error: _ApiError) -> BrokerError:
    full = "maximum" in error.description and "exceeded" in error.description
    if error.err_code in _FULL or full:
        return StreamFull(f"{what}: {error.description}")
    if error.err_code in _WRONG_SEQUENCE:
        return WrongRevision(f"{what}: {error.description}")
    if error.code == 503 or error.err_code == _BATCH_INCOMPLETE:
        return BrokerUnavailable(f"{what}: {error.description}")
    return _Refusal(what, error)


async def connect(url: str, *, name: str, timeout_s: float = 10.0) -> Broker:
    """Connect to `url` (several servers of a cluster: joined by commas), under `name` in the server's list of connections.

    Raises BrokerUnavailable when no server accepts in time. Afterwards the connection is kept for ever: a lost one is noticed within 15 s
    at a silent peer, at once otherwise, and tried again every 0.1 to 1 s. The credentials of `url` appear in no log and no error.
    """
    broker = NatsBroker(name)
    await broker.open(url, timeout_s)
    return broker


class _Transport(TcpTransport):  # type: ignore[misc]
    """TCP that does not wait for a silent peer when it is closed: unsent bytes would hold the reconnect for minutes."""

    def __bool__(self) -> bool:
        # The client would replace a transport that is not connected yet by its own (nats-py 2.16).
        return True

    async def connect(self, *arguments: Any, **options: Any) -> None:
        self.abort()  # an attempt that failed half way is not closed by the client (nats-py 2.16)
        await super().connect(*arguments, **options)

    def abort(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        if self._io_writer is None:
            return
        # In a task of its own: a cancelled wait would cancel it for everybody else (Python 3.11).
        closed = asyncio.get_running_loop().create_task(super().wait_closed())
        await asyncio.wait({closed}, timeout=_HANG_UP_S)
        self.abort()
        await asyncio.wait({closed}, timeout=_HANG_UP_S)
        if closed.done() and not closed.cancelled() and closed.exception() is not None:
            log.debug("a connection ended with %r", closed.exception())


def _split(url: str) -> tuple[list[str], dict[str, str]]:
    """Server addresses without credentials, and the credentials for all of them (discovered servers are announced without)."""
    servers: list[str] = []
    credentials: dict[str, str] = {}
    for part in url.split(","):
        parsed = urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
        try:
            port = parsed.port or 4222
        except ValueError:
            raise ValueError("a broker URL has a port that is not a number") from None
        host = parsed.hostname
        if not host or parsed.scheme not in ("nats", "tls"):
            raise ValueError("a broker URL is nats://host:port or tls://host:port")
        servers.append(f"{parsed.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        if parsed.username and parsed.password is not None:
            credentials = {"user": unquote(parsed.username), "password": unquote(parsed.password)}
        elif parsed.username:
            credentials = {"token": unquote(parsed.username)}
    return servers, credentials


async def _guarded(what: str, work: Awaitable[None]) -> None:
    """Await what belongs to somebody else. Its errors are logged, and so is the cancellation of something that it awaited."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        log.exception("%s was cancelled from inside", what)
    except Exception:
        log.exception("%s failed", what)


class NatsBroker:
    """One connection to a NATS server or cluster. Made by `connect`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.max_payload = 0
        self._client: Any = Client()
        self._transport = _Transport()
        self._client._transport = self._transport
        self._live = False
        self._closed = False
        self._crashed = False
        self._up = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._failed_attempts = 0
        self._dropped = 0
        self._inbox = ""
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._token = 0
        self._pulls: set[NatsPulls] = set()
        self._handlers: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- connection

    async def open(self, url: str, timeout_s: float) -> None:
        servers, credentials = _split(url)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._attempt(servers, credentials)
                break
            except (TimeoutError, NatsError, OSError) as error:
                reason = self._client.last_error or error
                await self._hang_up()
                if loop.time() + _FIRST_RETRY_S >= deadline_s:
                    where = ", ".join(servers)
                    raise BrokerUnavailable(f"{self.name}: no broker at {where} within {timeout_s} s: {reason!r}") from None
            except asyncio.CancelledError:
                await self._hang_up()
                raise
            await asyncio.sleep(_FIRST_RETRY_S)
        self._failed_attempts = 0
        self.max_payload = self._client.max_payload
        self._live = True
        self._up.set()
        self.own(self._run_reconnect_handlers(), "reconnect handlers")

    async def _attempt(self, servers: list[str], credentials: dict[str, str]) -> None:
        """Try each server once or twice. The client's own loop would go on for ever, also after a cancellation (nats-py 2.16)."""
        self._client = Client()
        self._client._transport = self._transport = _Transport()
        await self._client.connect(
            servers=servers,
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_back,
            closed_cb=self._on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=_FIRST_RETRY_S,
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=_SEND_BUFFER_BYTES,
            flush_timeout=2.0,
            **credentials,
        )
        self._client.options |= {"allow_reconnect": True, "max_reconnect_attempts": -1}
        self._inbox = f"{self._client.new_inbox()}."
        await self._client.subscribe(f"{self._inbox}*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)

    async def _hang_up(self) -> None:
        """End the connection, by force if the peer does not take what is buffered."""
        closing = asyncio.get_running_loop().create_task(self._client.close())
        await asyncio.wait({closing}, timeout=_HANG_UP_S)
        self._transport.abort()
        await asyncio.wait({closing}, timeout=_HANG_UP_S)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await self._transport.wait_closed()

    @property
    def live(self) -> bool:
        """There is a connection. `connected` also says that all tasks of it are well."""
        return bool(self._live and self._client.is_connected)

    @property
    def connected(self) -> bool:
        return self.live and not self._crashed

    async def close(self) -> None:
        """Send what is buffered, then end the connection and every task of it. Open pulls and watches just end: `stop` them before."""
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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hang_up()
        self._fail_waiting("the connection was closed")

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._handlers.append(handler)

    async def _run_reconnect_handlers(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for handler in list(self._handlers):
                await _guarded("a reconnect handler", handler())

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error("%s: %d messages dropped, the last on %s: its handler is too slow", self.name, self._dropped, error.subject)
            return
        if self.live:
            log.warning("%s: %r", self.name, error)
            return
        self._failed_attempts += 1
        self._client.options["reconnect_time_wait"] = min(1.0, _FIRST_RETRY_S * 1.2 ** min(self._failed_attempts, 20))
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
        self._client.options["reconnect_time_wait"] = _FIRST_RETRY_S
        self.max_payload = self._client.max_payload
        self._live = True
        self._up.set()
        for pulls in self._pulls:
            pulls.wake()
        self._reconnected.set()

    async def _on_closed(self) -> None:
        if not self._closed:
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
        """Run `work` as a task of this connection: kept, cancelled at close. If it crashes, the connection counts as not connected."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed = True
            log.critical("%s crashed", task.get_name(), exc_info=error)

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

    async def subscribe(self, subject: str, handler: Callable[[CoreMessage], Awaitable[None]], queue: str = "") -> Subscription:
        what = f"{self.name}: the handler of {subject}"

        async def arrived(message: Any) -> None:
            await _guarded(what, handler(CoreMessage(message.subject, message.data, message.reply)))

        await self.reach(API_TIMEOUT_S)
        try:
            subscription = await self._client.subscribe(
                subject, queue, cb=arrived, pending_msgs_limit=_HELD_MESSAGES, pending_bytes_limit=_HELD_BYTES
            )
        except BadSubjectError:
            raise ValueError(f"{subject!r} is not a subject") from None
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error
        try:
            await self.flush()
        except BrokerError:
            await self.drain(subscription)
            raise
        return _NatsSubscription(self, subscription)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await self.roundtrip(subject, data, timeout_s)
        if _is_no_responder(answer):
            raise NoResponder(f"nobody listens on {subject}")
        return bytes(answer.data)

    async def roundtrip(self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None) -> Any:
        """Send with a reply address and return the first message that comes back, which may be a status. Raises BrokerUnavailable."""
        if not self._live:
            timeout_s = await self.reach(timeout_s)
        loop = asyncio.get_running_loop()
        self._token += 1
        token = str(self._token)
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting[token] = answer
        timer = loop.call_later(timeout_s, _expire, answer, subject, timeout_s)
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
        """End a subscription. What the broker sent before it heard of this is handled first, for at most STOP_TIMEOUT_S."""
        # The task is left alone at the time-out: the client does not survive a cancelled flush (nats-py 2.16).
        task = self.own(self._drained(subscription), "drain")
        await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
        if not task.done():
            log.warning("%s: a subscription was not drained within %s s", self.name, STOP_TIMEOUT_S)

    async def _drained(self, subscription: Any) -> None:
        # The client's own drain lets its PING overtake its UNSUB and drops what comes between, under load 4 messages of a credit of 16
        # (nats-py 2.16). So ours goes before: the echo comes back behind everything that was sent on the subscription.
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
        answer = await self.roundtrip(f"$JS.API.{verb}", _encode(body), API_TIMEOUT_S)
        if _is_no_responder(answer):
            raise BrokerUnavailable(f"{verb}: no JetStream at the broker")
        try:
            error = msgspec.json.decode(answer.data, type=_Answer).error
            if error is not None:
                raise _refusal(verb, error)
            return msgspec.json.decode(answer.data, type=kind)
        except msgspec.DecodeError as error:
            raise BrokerError(f"{verb}: the broker's answer cannot be read: {error}") from error

    async def find(self, verb: str, body: object, kind: type[_T], *absent: int) -> _T | None:
        """`api`, but None where the error code is one of `absent`."""
        try:
            return await self.api(verb, body, kind)
        except _Refusal as refusal:
            if refusal.number in absent:
                return None
            raise

    async def _stream(self, stream: str) -> _StreamInfo | None:
        return await self.find(f"STREAM.INFO.{stream}", {}, _StreamInfo, _NO_STREAM)

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        wanted = _stream_config(spec)
        info = await (self._made(spec.name, wanted) if owner else self._stream(spec.name))
        if info is None:
            raise BrokerError(f"there is no stream {spec.name}: its owner has not created it yet")
        field = _difference(info.config, wanted)
        if owner and _version(info.config) < spec.version:
            return _state(await self._update_stream(spec.name, info.config, wanted, field))
        if field is not None:
            raise _mismatch(spec.name, field, info.config, wanted)
        return _state(info)

    async def _made(self, name: str, config: dict[str, Any]) -> _StreamInfo | None:
        """The stream as it is, made now if it was not there. Two that make it at once get the same one."""
        info = await self._stream(name) or await self.find(f"STREAM.CREATE.{name}", config, _StreamInfo, _STREAM_EXISTS)
        return info or await self._stream(name)

    async def _update_stream(self, name: str, found: dict[str, Any], wanted: dict[str, Any], field: str | None) -> _StreamInfo:
        metadata = {**(found.get("metadata") or {}), **wanted["metadata"]}
        try:
            return await self.api(f"STREAM.UPDATE.{name}", {**found, **wanted, "metadata": metadata}, _StreamInfo)
        except _Refusal as refusal:
            if field is None:
                raise
            raise _mismatch(name, field, found, wanted) from refusal

    async def stream_state(self, stream: str) -> StreamState:
        info = await self._stream(stream)
        if info is None:
            raise BrokerError(f"there is no stream {stream}")
        return _state(info)

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        while True:
            page = await self.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": len(counts)}, _StreamInfo)
            counts.update(page.state.subjects)
            if not page.state.subjects or len(counts) >= page.total:
                return counts

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        wanted = _consumer_config(spec)
        verb = f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.subject}"
        create = {"stream_name": spec.stream, "action": "create", "config": wanted}
        if await self.find(verb, create, _ConsumerInfo, _CONSUMER_EXISTS) is not None:
            return
        found = (await self.api(f"CONSUMER.INFO.{spec.stream}.{spec.name}", {}, _ConsumerInfo)).config
        field = _difference(found, wanted)
        if _version(found) < spec.version and field not in _NEVER_UPDATED:
            try:
                await self.api(verb, {**create, "action": "update"}, _ConsumerInfo)
            except _Refusal as refusal:
                if field is None:
                    raise
                raise _mismatch(spec.name, field, found, wanted) from refusal
        elif field is not None:
            raise _mismatch(spec.name, field, found, wanted)

    async def delete_consumer(self, stream: str, name: str) -> bool:
        return await self.find(f"CONSUMER.DELETE.{stream}.{name}", {}, _Answer, _NO_CONSUMER, _NO_STREAM) is not None

    async def consumers(self, stream: str) -> list[str]:
        names: list[str] = []
        while True:
            page = await self.api(f"CONSUMER.NAMES.{stream}", {"offset": len(names)}, _Names)
            names += page.consumers or []
            if not page.consumers or len(names) >= page.total:
                return names

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        prefix = "$JS.EVENT.ADVISORY.CONSUMER"

        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            if action in ("CREATED", "DELETED"):
                await handler(name, action == "CREATED")

        return await self.subscribe(f"{prefix}.*.{stream}.*", advised)

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        answer = await self.roundtrip(subject, data, timeout_s, {"Nats-Msg-Id": message_id})
        ack = _publish_ack(subject, answer)
        return Published(ack.seq, ack.duplicate)

    async def delete(self, stream: str, sequence: int) -> bool:
        return await self.find(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True}, _Answer, *_NO_MESSAGE) is not None

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        return self.open_pulls(stream, handler)

    def open_pulls(self, stream: str, handler: Callable[[NatsDelivery], None], on_break: Callable[[], None] | None = None) -> NatsPulls:
        pulls = NatsPulls(self, self._client, stream, handler, on_break)
        self._pulls.add(pulls)
        return pulls

    def forget(self, pulls: NatsPulls) -> None:
        self._pulls.discard(pulls)

    async def key_value(self, bucket: str, *, storage: str = "file", replicas: int = 1) -> KeyValue:
        name = f"KV_{bucket}"
        wanted = {
            "name": name,
            "subjects": [f"$KV.{bucket}.>"],
            "retention": "limits",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_atomic": True,
        }
        chosen = {"storage": storage, "num_replicas": replicas, "duplicate_window": _ns(DUPLICATE_WINDOW_S)}
        info = await self._made(name, {**wanted, **chosen})
        if info is None:
            raise BrokerUnavailable(f"{name} was removed while it was opened")
        field = _difference(info.config, wanted)
        if field is not None:
            raise _mismatch(name, field, info.config, wanted)
        return NatsKeyValue(self, bucket)


def _expire(answer: asyncio.Future[Any], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(BrokerUnavailable(f"{subject}: no answer within {timeout_s:.3g} s"))


def _is_no_responder(answer: Any) -> bool:
    return answer.headers is not None and not answer.data and answer.headers.get("Status") == "503"


def _publish_ack(subject: str, answer: Any) -> _Ack:
    if _is_no_responder(answer):
        raise BrokerUnavailable(f"no stream takes {subject}")
    try:
        ack = _decode_ack(answer.data)
    except msgspec.DecodeError as error:
        raise BrokerError(f"{subject}: the answer is not that of a stream: {error}") from error
    if ack.error is not None:
        raise _refusal(subject, ack.error)
    return ack


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _stream_config(spec: StreamSpec) -> dict[str, Any]:
    # The broker refuses to remember ids for longer than it keeps messages.
    window_s = min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue",
        "discard": "new",
        "max_msgs_per_subject": spec.max_per_subject if spec.max_per_subject > 0 else -1,
        "discard_new_per_subject": spec.max_per_subject > 0,
        "max_bytes": spec.max_bytes if spec.max_bytes > 0 else -1,
        "max_age": _ns(spec.max_age_s),
        "duplicate_window": _ns(window_s),
        "storage": spec.storage,
        "num_replicas": spec.replicas,
        "allow_direct": True,
        "metadata": {_VERSION_KEY: str(spec.version)},
    }


def _consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "durable_name": spec.name,
        "filter_subject": spec.subject,
        "ack_policy": "explicit",
        "ack_wait": _ns(spec.ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "max_waiting": _MAX_WAITING_PULLS,
        "metadata": {_VERSION_KEY: str(spec.version)},
    }


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The first setting of `wanted` that the broker holds otherwise. The broker leaves out what is zero."""
    for field, value in wanted.items():
        if field != "metadata" and found.get(field, type(value)()) != value:
            return field
    return None


def _version(config: dict[str, Any]) -> int:
    """The topology version that made it; 0 if it was made by somebody else."""
    text = (config.get("metadata") or {}).get(_VERSION_KEY, "")
    return int(text) if text.isdigit() else 0


def _mismatch(name: str, field: str, found: dict[str, Any], wanted: dict[str, Any]) -> TopologyMismatch:
    return TopologyMismatch(name, _SPEC_FIELDS.get(field, field), found.get(field), wanted[field])


def _state(info: _StreamInfo) -> StreamState:
    state = info.state
    return StreamState(info.created, state.messages, state.bytes, state.first_seq, state.last_seq)


class _NatsSubscription:
    def __init__(self, broker: NatsBroker, subscription: Any) -> None:
        self._broker = broker
        self._subscription = subscription

    async def stop(self) -> None:
        await self._broker.drain(self._subscription)


class NatsDelivery:
    """A leased message. Its facts are read from the ack subject: `$JS.ACK[.domain.account].stream.consumer.…`, 9 or from 11 tokens."""

    __slots__ = (
        "_broker", "_reply", "consumer", "consumer_sequence", "data", "delivered", "headers", "pending", "sent_s", "sequence", "subject",
    )  # fmt: skip

    def __init__(self, broker: NatsBroker, message: Any) -> None:
        """Raises ValueError for a message that no consumer sent."""
        tokens = message.reply.split(".")
        at = 3 if len(tokens) == 9 else 5
        if len(tokens) < at + 6:
            raise ValueError(f"{message.reply!r} is not an ack subject")
        self._broker = broker
        self._reply: str = message.reply
        self.data: bytes = message.data
        self.subject: str = message.subject
        self.headers: dict[str, str] | None = message.headers
        self.consumer: str = tokens[at]
        self.delivered = int(tokens[at + 1])
        self.sequence = int(tokens[at + 2])
        self.consumer_sequence = int(tokens[at + 3])
        self.sent_s = int(tokens[at + 4]) / 1e9
        self.pending = int(tokens[at + 5])

    async def ack(self) -> None:
        await self._broker.acknowledge(self._reply)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._broker.post(self._reply, b'-NAK {"delay":%d}' % _ns(delay_s) if delay_s > 0 else b"-NAK")

    async def in_progress(self) -> None:
        await self._broker.post(self._reply, b"+WPI")

    async def term(self, reason: str) -> None:
        await self._broker.post(self._reply, b"+TERM " + reason.encode())


class _Credit:
    """What is open at one consumer.

    `issued` counts every delivery ever asked for, `settled` those that came or that the broker gave back; the difference may still come.
    Several pulls of a consumer are filled in turns, so a delivery cannot be told to belong to one of them; the sums can.
    """

    __slots__ = ("consumer", "index", "issued", "retry", "retry_s", "settled", "wanted", "written_off")

    def __init__(self, consumer: str, index: int) -> None:
        self.consumer = consumer
        self.index = index
        self.wanted = 0
        self.issued = 0
        self.settled = 0
        self.written_off = 0  # statuses of pulls up to here come too late to count
        self.retry: asyncio.TimerHandle | None = None
        self.retry_s = 0.0

    @property
    def open(self) -> int:
        return self.issued - self.settled

    def settle(self, count: int) -> None:
        self.settled = min(self.issued, self.settled + count)

    def write_off(self, issued: int) -> None:
        self.settled = max(self.settled, issued)
        self.written_off = issued


class NatsPulls:
    """Open pulls of one connection on the consumers of a stream. One task issues them, one timer looks for those without an end.

    `on_break` is called when deliveries may have been lost on the way or a consumer is gone; a queue does not care, a watch does.
    """

    def __init__(
        self,
        broker: NatsBroker,
        client: Any,
        stream: str,
        handler: Callable[[NatsDelivery], None],
        on_break: Callable[[], None] | None = None,
    ) -> None:
        self._broker = broker
        self._client = client
        self._stream = stream
        self._handler = handler
        self._on_break = on_break
        self._credits: dict[str, _Credit] = {}
        self._by_index: dict[int, _Credit] = {}
        self._next_index = 0
        self._dirty: dict[_Credit, None] = {}
        self._ages: deque[tuple[float, _Credit, int]] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._silent = 0
        self._inbox = ""
        self._subscription: Any = None
        self._stopping = False
        self._wake = asyncio.Event()
        self._task = broker.own(self._run(), f"pulls on {stream}")

    def want(self, consumer: str, credit: int) -> None:
        if self._stopping:
            return
        entry = self._credits.get(consumer)
        if entry is None:
            if credit <= 0:
                return
            entry = _Credit(consumer, self._next_index)
            self._next_index += 1
            self._credits[consumer] = self._by_index[entry.index] = entry
        entry.wanted = max(0, credit)
        self._consider(entry)

    def outstanding(self, consumer: str) -> int:
        entry = self._credits.get(consumer)
        return entry.open if entry is not None else 0

    async def stop(self) -> None:
        self._stopping = True
        subscription, self._subscription = self._subscription, None
        try:
            if subscription is not None:
                await self._broker.drain(subscription)
        finally:
            self.abandon()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def abandon(self) -> None:
        """Forget everything, without a word to the broker."""
        self._stopping = True
        for entry in self._credits.values():
            if entry.retry is not None:
                entry.retry.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._credits.clear()
        self._by_index.clear()
        self._broker.forget(self)

    async def retire(self) -> None:
        """Leave the inbox: nothing asked for on it may come any more. What has arrived on it is handled before this returns."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            for _ in range(10):
                if subscription.pending_msgs:
                    await asyncio.sleep(0)  # the handler does not block: one turn of the loop empties what is there
            try:
                await subscription.unsubscribe()
            except NatsError as error:
                log.info("an inbox of pulls ended with its connection: %s", error)
        for entry in list(self._credits.values()):
            entry.write_off(entry.issued)
            self._consider(entry)
        self._ages.clear()
        if self._on_break is not None:
            self._on_break()

    def wake(self) -> None:
        self._wake.set()

    # ---- asking

    def _consider(self, entry: _Credit) -> None:
        if entry.wanted > entry.open:
            self._dirty[entry] = None
            self._wake.set()
        elif not entry.wanted and not entry.open and entry.retry is None:
            self._credits.pop(entry.consumer, None)
            self._by_index.pop(entry.index, None)

    def _renew(self, entry: _Credit) -> None:
        # The many small pulls that top-ups leave become one again. Renewed each for itself, those of 200 consumers with a credit of 16 cost
        # 5 % of an idle core.
        if entry.open * 2 < entry.wanted or not entry.open:
            self._consider(entry)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            if self._silent >= 2:
                log.warning("pulls on %s get neither messages nor statuses: opening a new inbox", self._stream)
                self._silent = 0
                await self.retire()
            if not self._broker.live:
                continue  # the next connection wakes this task
            try:
                await self._issue()
            except (BrokerUnavailable, NatsError) as error:
                log.info("pulls on %s wait for a connection: %s", self._stream, error)
                self._dirty = dict.fromkeys(self._credits.values())

    async def _issue(self) -> None:
        if self._subscription is None:
            self._inbox = f"{self._client.new_inbox()}."
            self._subscription = await self._client.subscribe(
                f"{self._inbox}*", cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
            )
        subscription = self._subscription
        dirty, self._dirty = self._dirty, {}
        now_s = asyncio.get_running_loop().time()
        for entry in dirty:
            missing = entry.wanted - entry.open
            if missing <= 0 or entry.retry is not None:
                continue
            if self._stopping or self._subscription is not subscription:
                return  # retired while we waited: everything is asked for again on the next inbox
            entry.issued += missing
            self._expect(now_s + PULL_LOST_S, entry)
            body = b'{"batch":%d,"expires":%d}' % (missing, PULL_EXPIRES_S * 1e9)
            reply = f"{self._inbox}{entry.index}_{entry.issued}_{missing}"
            try:
                await self._broker.post(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{entry.consumer}", body, reply)
            except BrokerUnavailable:
                entry.settle(missing)
                raise

    def _expect(self, deadline_s: float, entry: _Credit) -> None:
        ages = self._ages
        while ages and ages[0][1].settled >= ages[0][2]:
            ages.popleft()
        ages.append((deadline_s, entry, entry.issued))
        if self._watchdog is None:
            self._watchdog = asyncio.get_running_loop().call_at(deadline_s, self._sweep)

    def _sweep(self) -> None:
        """Ask again for what a pull past its expiry neither brought nor gave back."""
        loop = asyncio.get_running_loop()
        self._watchdog = None
        ages = self._ages
        lost = False
        while ages and (ages[0][1].settled >= ages[0][2] or ages[0][0] <= loop.time()):
            _, entry, issued = ages.popleft()
            if entry.settled < issued:
                lost = True
                entry.write_off(issued)
                self._consider(entry)
        if ages:
            self._watchdog = loop.call_at(max(ages[0][0], loop.time() + _SWEEP_S), self._sweep)
        if lost:
            self._silent += 1
            self._wake.set()

    # ---- receiving

    async def _arrived(self, message: Any) -> None:
        self._silent = 0
        if not message.reply:
            self._ended(message.subject[len(self._inbox) :], message.headers or {})
            return
        try:
            delivery = NatsDelivery(self._broker, message)
        except ValueError as error:
            log.error("pulls on %s: %s", self._stream, error)
            return
        entry = self._credits.get(delivery.consumer)
        if entry is not None:
            entry.settle(1)
            entry.wanted = max(0, entry.wanted - 1)
            entry.retry_s = 0.0
            self._consider(entry)
        try:
            self._handler(delivery)
        except Exception:
            log.exception("pulls on %s: the handler failed", self._stream)

    def _ended(self, token: str, headers: dict[str, str]) -> None:
        """A pull ended: 408 expired, 404 nothing there, 409 the consumer is gone or moves, 503 nobody serves it. 100 is a heartbeat."""
        parts = token.split("_")
        status = headers.get("Status", "")
        if len(parts) != 3 or status == "100":
            return
        index, issued, asked = map(int, parts)
        entry = self._by_index.get(index)
        if entry is None or issued <= entry.written_off:
            return
        reason = headers.get("Description", "").strip()
        left = headers.get("Nats-Pending-Messages")
        if left is not None:
            entry.settle(int(left))
        elif status == "409" and ("Deleted" in reason or "Leadership" in reason):
            entry.write_off(issued)  # every pull of the consumer ended, and no status says with how much left
        else:
            entry.settle(asked)
        if status in ("404", "408") or "Leadership" in reason:
            entry.retry_s = 0.0
            self._renew(entry)
        else:
            self._retry_later(entry, f"{status} {reason if status != '503' else 'no such consumer'}")

    def _retry_later(self, entry: _Credit, reason: str) -> None:
        if not entry.retry_s:
            log.warning("pulls on %s: %s: %s; trying again until it is there", self._stream, entry.consumer, reason)
        entry.retry_s = min(_MAX_RETRY_S, max(_FIRST_RETRY_S, entry.retry_s * 2))
        if entry.retry is None:
            entry.retry = asyncio.get_running_loop().call_later(entry.retry_s, self._retry, entry)
        if self._on_break is not None:
            self._on_break()

    def _retry(self, entry: _Credit) -> None:
        entry.retry = None
        self._consider(entry)


class NatsKeyValue:
    """A bucket: the stream `KV_<bucket>` with one message per key. A removed key stays as a message that says so."""

    def __init__(self, broker: NatsBroker, bucket: str) -> None:
        self._broker = broker
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str) -> Entry | None:
        entry = await self._last(key)
        return entry if entry is not None and entry.value is not None else None

    async def _last(self, key: str) -> Entry | None:
        # Asked of the leader: a direct get may be answered by a replica that has not seen our own last write.
        query = {"last_by_subj": self._prefix + key}
        stored = await self._broker.find(f"STREAM.MSG.GET.{self._stream}", query, _StoredAnswer, *_NO_MESSAGE)
        if stored is None:
            return None
        removed = b"\r\nKV-Operation:" in stored.message.hdrs
        return Entry(key, None if removed else stored.message.data, stored.message.seq)

    async def entries(self) -> list[Entry]:
        found: dict[str, Entry] = {}
        complete: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def arrived(delivery: NatsDelivery) -> None:
            entry = self.entry(delivery)
            found[entry.key] = entry
            if not delivery.pending and not complete.done():
                complete.set_result(True)
            elif not pulls.outstanding(delivery.consumer):
                pulls.want(delivery.consumer, delivery.pending)

        def broken() -> None:
            if not complete.done():
                complete.set_result(False)

        reader, pending = await self.open_reader(1)
        pulls = self._broker.open_pulls(self._stream, arrived, broken)
        try:
            if pending:
                pulls.want(reader, pending)
                async with asyncio.timeout(API_TIMEOUT_S):
                    if not await complete:
                        raise BrokerUnavailable(f"{self._stream}: the connection was lost while its keys were read")
        except TimeoutError:
            raise BrokerUnavailable(f"{self._stream}: its keys were not read within {API_TIMEOUT_S} s") from None
        finally:
            await pulls.stop()
            await self.close_reader(reader)
        return sorted((entry for entry in found.values() if entry.value is not None), key=lambda entry: entry.key)

    async def write(self, writes: list[Write]) -> int:
        if not writes or len({write.key for write in writes}) != len(writes):
            raise ValueError("a batch writes at least one key and each key once")
        expected = [write.expected for write in writes]
        while True:
            try:
                return await self._commit(writes, expected)
            except WrongRevision:
                # "Must not exist" holds for a removed key too, whose mark has a revision.
                marks = [await self._mark(write) for write in writes]
                if marks == expected:
                    raise
                expected = marks

    async def _mark(self, write: Write) -> int | None:
        if write.expected != 0:
            return write.expected
        last = await self._last(write.key)
        return last.revision if last is not None and last.value is None else 0

    async def _commit(self, writes: list[Write], expected: list[int | None]) -> int:
        await self._broker.reach(API_TIMEOUT_S)
        batch = secrets.token_hex(16)
        for number, (write, revision) in enumerate(zip(writes, expected, strict=True), 1):
            headers = {} if revision is None else {"Nats-Expected-Last-Subject-Sequence": str(revision)}
            if write.value is None:
                headers["KV-Operation"] = "DEL"
            if len(writes) > 1:
                headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            subject = self._prefix + write.key
            if number < len(writes):
                await self._broker.post(subject, write.value or b"", headers=headers)
        if len(writes) > 1:
            headers["Nats-Batch-Commit"] = "1"
        answer = await self._broker.roundtrip(subject, writes[-1].value or b"", API_TIMEOUT_S, headers)
        return _publish_ack(subject, answer).seq

    async def epoch(self) -> str:
        state = await self._broker.stream_state(self._stream)
        return f"{state.created}:{state.last_sequence}"

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        watch = _Watch(self._broker, self, self._stream, handler, after)
        try:
            await watch.open()
        except BrokerError:
            await watch.stop()
            raise
        return watch

    async def open_reader(self, first: int) -> tuple[str, int]:
        """Make a consumer of its own that reads from revision `first`. Returns its name and how much it has to read."""
        name = f"{self._broker.name}-{secrets.token_hex(6)}".translate(_NAME)
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "ack_policy": "none",
            "filter_subject": f"{self._prefix}>",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _ns(_WATCH_KEPT_S),
        }
        verb = f"CONSUMER.CREATE.{self._stream}.{name}"
        info = await self._broker.api(verb, {"stream_name": self._stream, "action": "create", "config": config}, _ConsumerInfo)
        return name, info.num_pending

    async def close_reader(self, name: str) -> None:
        try:
            await self._broker.delete_consumer(self._stream, name)
        except BrokerError as error:
            log.info("%s: reader %s is left to the broker, which drops it after %s s: %s", self._stream, name, _WATCH_KEPT_S, error)

    def entry(self, delivery: NatsDelivery) -> Entry:
        removed = delivery.headers is not None and "KV-Operation" in delivery.headers
        return Entry(delivery.subject[len(self._prefix) :], None if removed else delivery.data, delivery.sequence)


class _Watch:
    """Reads a bucket in order. Whenever something may have been missed, a new reader starts after the last revision handled."""

    def __init__(
        self, broker: NatsBroker, bucket: NatsKeyValue, stream: str, handler: Callable[[Entry], Awaitable[None]], after: int
    ) -> None:
        self._broker = broker
        self._bucket = bucket
        self._stream = stream
        self._handler = handler
        self._last = after
        self._created = ""
        self._reader = ""
        self._read = 0
        self._held: deque[NatsDelivery] = deque()  # at most _WATCH_CREDIT
        self._retry_s = 0.0
        self._stopping = False
        self._wake = asyncio.Event()
        self._pulls = broker.open_pulls(stream, self._arrived, self._broken)
        self._task = broker.own(self._run(), f"watch of {stream}")

    async def open(self) -> None:
        created = (await self._broker.stream_state(self._stream)).created
        if self._created and self._created != created:
            self._last = 0  # the bucket was lost and made anew: all of it is news
        self._reader, _ = await self._bucket.open_reader(self._last + 1)
        self._created = created
        self._read = 0
        self._retry_s = 0.0
        self._pulls.want(self._reader, _WATCH_CREDIT)

    async def stop(self) -> None:
        self._stopping = True
        await self._pulls.stop()
        self._wake.set()
        await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        self._task.cancel()
        if self._reader:
            await self._bucket.close_reader(self._reader)

    def _arrived(self, delivery: NatsDelivery) -> None:
        if delivery.consumer != self._reader:
            return
        self._read += 1
        if delivery.consumer_sequence != self._read:
            self._broken()
            return
        self._held.append(delivery)
        self._wake.set()

    def _broken(self) -> None:
        if self._reader:
            self._pulls.want(self._reader, 0)
            self._reader = ""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._held:
                entry = self._bucket.entry(self._held.popleft())
                self._last = entry.revision
                await _guarded(f"a watch of {self._stream}", self._handler(entry))
                if self._reader and self._pulls.outstanding(self._reader) + len(self._held) <= _WATCH_CREDIT // 2:
                    self._pulls.want(self._reader, _WATCH_CREDIT - len(self._held))
            if self._stopping:
                return
            if self._created and not self._reader:
                await self._reopen()

    async def _reopen(self) -> None:
        try:
            await self.open()
        except BrokerError as error:
            if not self._retry_s:
                log.warning("a watch of %s cannot go on yet: %s", self._stream, error)
            self._retry_s = min(_MAX_RETRY_S, max(_FIRST_RETRY_S, self._retry_s * 2))
            spread = 0.5 + secrets.randbelow(1000) / 1000
            asyncio.get_running_loop().call_later(self._retry_s * spread, self._wake.set)
