"""Requests to the JetStream API, and the pulls that its consumers fill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from sie_broker import BrokerError, BrokerUnavailable, NotPermitted, StreamState
from sie_broker.limits import API_TIMEOUT_S
from sie_broker.nats.api import (
    NO_CONSUMER,
    NO_STREAM,
    STREAM_EXISTS,
    ApiReply,
    Refusal,
    StreamInfo,
    error_of,
    is_no_responder,
    state_of,
)
from sie_broker.nats.bus import NatsBus
from sie_broker.nats.pulls import PULL_EXPIRES_S, NatsDelivery, NatsPulls
from sie_contracts.wire import messages
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import streams_subject

# Reads of buckets at the same time. Each has the bytes of one pull in flight. Together they stay far below the bytes
# that a server holds for one connection.
_READS_AT_ONCE = 2
_T = TypeVar("_T")


class JetStream(NatsBus):
    """Calls to JetStream that queue, administration and store share."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reading = asyncio.Semaphore(_READS_AT_ONCE)

    async def api(self, verb: str, body: object, kind: type[_T]) -> _T:
        """Send one request to the JetStream API. Raises BrokerUnavailable, or the BrokerError that belongs to the error
        code.
        """
        answer = await self.roundtrip(f"$JS.API.{verb}", msgspec.json.encode(body), API_TIMEOUT_S)
        if is_no_responder(answer):
            raise BrokerUnavailable(f"{verb}: the broker has no JetStream")
        try:
            error = msgspec.json.decode(answer.data, type=ApiReply).error
            if error is not None:
                raise error_of(verb, error)
            return msgspec.json.decode(answer.data, type=kind)
        except msgspec.DecodeError as error:
            raise BrokerError(f"{verb}: the broker's answer cannot be decoded: {error}") from error

    async def find(self, verb: str, body: object, kind: type[_T], *absent: int) -> _T | None:
        """Send a request as `api` does, but return None if the error code is one of `absent`."""
        try:
            return await self.api(verb, body, kind)
        except Refusal as refusal:
            if refusal.number in absent:
                return None
            raise

    async def stream_info(self, stream: str) -> StreamInfo | None:
        return await self.find(f"STREAM.INFO.{stream}", {}, StreamInfo, NO_STREAM)

    async def stream_state(self, stream: str) -> StreamState:
        info = await self.stream_info(stream)
        if info is None:
            raise BrokerError(f"there is no stream {stream}")
        return state_of(info)

    async def create_stream(self, request: StreamRequest, config: dict[str, Any]) -> StreamInfo | None:
        """Return the stream, created now if it did not exist. The owner of streams creates it from `request`. Without
        an owner this process creates it from `config`. Two concurrent callers get the same stream. Returns None if the
        stream was deleted meanwhile.
        """
        name = request.name
        info = await self.stream_info(name)
        if info is None and not await self.ask_owner(request):
            try:
                info = await self.find(f"STREAM.CREATE.{name}", config, StreamInfo, STREAM_EXISTS)
            except NotPermitted as error:
                raise BrokerUnavailable(
                    f"{name} does not exist, and the owner of streams, the config service, does not answer: {error}"
                ) from error
        return info or await self.stream_info(name)

    async def ask_owner(self, request: StreamRequest) -> bool:
        """Ask the owner of streams to create or update a stream. Returns False if this process is the owner, if there
        is no owner, or if this user may not ask: a broker without users, or with the users of an older version, lets
        each process create streams. Raises BrokerError.
        """
        if self.owns_streams:
            return False
        try:
            answer = await self.roundtrip(streams_subject(request.name), messages.encode(request), API_TIMEOUT_S)
        except NotPermitted:
            return False
        if is_no_responder(answer):
            return False
        if answer.data:
            raise BrokerError(f"the owner of streams does not create {request.name}: {answer.data.decode()}")
        return True

    async def delete_consumer(self, stream: str, name: str) -> bool:
        return await self.find(f"CONSUMER.DELETE.{stream}.{name}", {}, ApiReply, NO_CONSUMER, NO_STREAM) is not None

    def open_pulls(
        self,
        stream: str,
        handler: Callable[[NatsDelivery], None],
        on_break: Callable[[], None] | None = None,
        expires_s: float = PULL_EXPIRES_S,
    ) -> NatsPulls:
        """Open pulls; see `NatsPulls`."""
        pulls = NatsPulls(self, self._client, stream, handler, on_break, expires_s)
        self.attach(pulls)
        return pulls
