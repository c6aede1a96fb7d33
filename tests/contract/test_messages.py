"""Messages are read with every field, with fields that the reader does not know, and with the required ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from message_examples import EXAMPLES, encoded, newer_bytes

from sie_contracts.wire import configs, heartbeats, ipc, messages, records
from sie_contracts.wire.configs import ConfigExport

Message = (
    messages.WorkItem
    | messages.WorkResult
    | messages.WorkResults
    | messages.Confirmation
    | messages.Confirmations
    | heartbeats.Heartbeat
    | configs.ConfigDelta
    | messages.Fragment
    | messages.CancelRequests
    | messages.Residency
    | messages.Payload
    | records.Placement
    | messages.DeadLetter
    | heartbeats.GatewayBeat
    | records.Demand
    | records.Reservations
    | records.Assigned
    | records.PlacementPart
    | records.StreamRequest
)
decode_any = msgspec.msgpack.Decoder(Message).decode
each_example = pytest.mark.parametrize("name", EXAMPLES)


def decode(name: str, data: bytes) -> Any:
    """Decode a message as the receiving process does it."""
    if name.startswith("export"):
        return msgspec.json.decode(data, type=ConfigExport)
    if not name.startswith("ipc"):
        return decode_any(data)
    is_request = isinstance(EXAMPLES[name], get_args(ipc.Request))
    return ipc.request(data) if is_request else ipc.reply(data)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    """Yield all structs of a message, at any depth."""
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from structs_in(item)


def test_every_message_has_an_example() -> None:
    kinds = {*get_args(Message), *get_args(ipc.Request), *get_args(ipc.Reply), ConfigExport}
    assert {type(example) for example in EXAMPLES.values()} == kinds


@each_example
def test_a_message_is_read_as_it_was_written(name: str) -> None:
    assert decode(name, encoded(name)) == EXAMPLES[name]


def test_every_field_of_every_message_is_set_in_an_example() -> None:
    """A field with its default value is not in the bytes, so an example with it tests nothing."""
    set_fields, unset = set(), set()
    for struct in (part for example in EXAMPLES.values() for part in structs_in(example)):
        for field in msgspec.structs.fields(struct):
            is_set = field.required or getattr(struct, field.name) != default_of(field)
            (set_fields if is_set else unset).add(f"{type(struct).__name__}.{field.name}")
    assert unset - set_fields == set()


@each_example
def test_fields_the_reader_does_not_know_are_ignored(name: str) -> None:
    assert decode(name, newer_bytes(name)) == EXAMPLES[name]


@each_example
def test_a_message_of_the_required_fields_alone_is_read(name: str) -> None:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    raw = codec.decode(encoded(name))
    required = {field.encode_name for field in msgspec.structs.fields(type(EXAMPLES[name])) if field.required}
    message = decode(name, codec.encode({key: value for key, value in raw.items() if key in required | {"type"}}))
    for field in msgspec.structs.fields(type(EXAMPLES[name])):
        assert getattr(message, field.name) == (
            getattr(EXAMPLES[name], field.name) if field.required else default_of(field)
        )


@pytest.mark.parametrize("tag", ["work/2", "Work", "", None])
def test_a_message_of_another_kind_or_version_is_refused_and_not_guessed(tag: str | None) -> None:
    raw = {**msgspec.msgpack.decode(encoded("work-1")), "type": tag}
    for decoder in (decode_any, messages.decode_work):
        with pytest.raises(msgspec.ValidationError):
            decoder(msgspec.msgpack.encode(raw))
    with pytest.raises(ipc.FrameError):
        ipc.request(msgspec.msgpack.encode(raw))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ipc.FrameError):
        ipc.request(encoded("ipc3-Pong"))
    with pytest.raises(ipc.FrameError):
        ipc.reply(encoded("ipc3-Ping"))


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_bytes_that_are_no_message_are_an_error(cut: int) -> None:
    data = encoded("result-1")[:cut]
    with pytest.raises(msgspec.DecodeError):
        messages.decode_result(data)
