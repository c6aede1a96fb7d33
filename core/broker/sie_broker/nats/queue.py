"""Queue over the streams of JetStream, and the administration of these streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from sie_broker import (
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    CoreMessage,
    StreamMessage,
    StreamState,
    Subscription,
)
from sie_broker.limits import check_room
from sie_broker.nats.api import (
    CONSUMER_EXISTS,
    CONSUMER_GONE,
    NEVER_UPDATED,
    NO_MESSAGE,
    NO_STREAM,
    ApiReply,
    ConsumerInfo,
    ListPage,
    Refusal,
    Row,
    StoredAnswer,
    StreamInfo,
    consumer_config,
    consumer_state_of,
    difference,
    limits_of,
    mismatch,
    state_of,
    stream_config,
    update_of,
    version_of,
)
from sie_broker.nats.client import JetStream, parse_reply
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

_ENSURE_ATTEMPTS = 10  # largest number of attempts to create a consumer that other processes delete meanwhile


class NatsQueue(JetStream):
    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        while True:
            page = await self.api(
                f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": len(counts)}, StreamInfo
            )
            counts.update(page.state.subjects)
            if not page.state.subjects or len(counts) >= page.total:
                return counts

    async def delete(self, stream: str, sequence: int) -> bool:
        body = {"seq": sequence, "no_erase": True}
        return await self.find(f"STREAM.MSG.DELETE.{stream}", body, ApiReply, *NO_MESSAGE) is not None

    async def release(self, reply: str) -> None:
        parse_reply(reply)
        await self.post(reply, b"-NAK")

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> StreamMessage | None:
        query = {"seq": max(1, sequence), "next_by_subj": subject}
        answer = await self.find(f"STREAM.MSG.GET.{stream}", query, StoredAnswer, *NO_MESSAGE)
        if answer is None:
            return None
        stored = answer.message
        return StreamMessage(stored.seq, stored.subject, stored.data, stored.time.timestamp())

    async def server_time(self, stream: str) -> float:
        info = await self.api(f"STREAM.INFO.{stream}", {}, StreamInfo)
        if info.ts is None:
            raise BrokerError(f"{stream}: this broker does not report its time; upgrade nats-server")
        return info.ts.timestamp()

    async def consumers(self, stream: str) -> list[str]:
        return await self._listed(f"CONSUMER.NAMES.{stream}", ListPage[str])

    async def _listed(self, verb: str, kind: type[ListPage[Row]]) -> list[Row]:
        rows: list[Row] = []
        while True:
            page = await self.api(verb, {"offset": len(rows)}, kind)
            more = page.streams or page.consumers or []
            rows += more
            if not more or len(rows) >= page.total:
                return rows

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        prefix = "$JS.EVENT.ADVISORY.CONSUMER"

        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            if action in ("CREATED", "DELETED"):
                await handler(name, action == "CREATED")

        return await self.subscribe(f"{prefix}.*.{stream}.*", advised)


class NatsAdministration(NatsQueue):
    """Queue over JetStream that also creates, updates and deletes streams and consumers."""

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        desired = stream_config(spec)
        request = msgspec.convert(spec, StreamRequest, from_attributes=True)
        info = await self.create_stream(request, desired)
        if info is None:
            raise BrokerError(f"{spec.name} was deleted by another process while it was created")
        field = difference(info.config, desired)
        if version_of(info.config) < spec.version:
            counts = await self.subject_counts(spec.name, ">")
            check_room(spec, *limits_of(info.config), info.state.bytes, counts)
            if not await self.ask_owner(request):
                try:
                    config = update_of(info.config, desired)
                    return state_of(await self.api(f"STREAM.UPDATE.{spec.name}", config, StreamInfo))
                except Refusal as refusal:
                    if field is None:
                        raise
                    raise mismatch(spec.name, field, info.config, desired) from refusal
            info = await self.api(f"STREAM.INFO.{spec.name}", {}, StreamInfo)
            field = difference(info.config, desired)
        if field is not None:
            raise mismatch(spec.name, field, info.config, desired)
        return state_of(info)

    async def delete_stream(self, stream: str) -> bool:
        return await self.find(f"STREAM.DELETE.{stream}", {}, ApiReply, NO_STREAM) is not None

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        for _ in range(_ENSURE_ATTEMPTS):
            try:
                return await self._ensure_consumer(spec)
            except Refusal as refusal:
                if refusal.number not in CONSUMER_GONE:
                    raise
        raise BrokerUnavailable(
            f"consumer {spec.name} was not created: other processes deleted it in each of {_ENSURE_ATTEMPTS} attempts"
        )

    async def _ensure_consumer(self, spec: ConsumerSpec) -> None:
        desired = consumer_config(spec)
        verb = f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.subject}"
        create = {"stream_name": spec.stream, "action": "create", "config": desired}
        if await self.find(verb, create, ConsumerInfo, CONSUMER_EXISTS) is not None:
            return
        current = (await self.api(f"CONSUMER.INFO.{spec.stream}.{spec.name}", {}, ConsumerInfo)).config
        field = difference(current, desired)
        if version_of(current) < spec.version and field not in NEVER_UPDATED:
            try:
                await self.api(
                    verb, {**create, "action": "update", "config": update_of(current, desired)}, ConsumerInfo
                )
            except Refusal as refusal:
                if field is None or refusal.number in CONSUMER_GONE:
                    raise
                raise mismatch(spec.name, field, current, desired) from refusal
        elif field is not None:
            raise mismatch(spec.name, field, current, desired)

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        return [consumer_state_of(info) for info in await self.consumer_infos(stream)]

    async def consumer_infos(self, stream: str) -> list[ConsumerInfo]:
        return await self._listed(f"CONSUMER.LIST.{stream}", ListPage[ConsumerInfo])

    async def stream_infos(self) -> list[StreamInfo]:
        return await self._listed("STREAM.LIST", ListPage[StreamInfo])
