"""Bytes that were written once, and bytes from a sender that knows more, with the types of today. What the types of
the version before read is in test_old_version.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from message_examples import EXAMPLES, FIXTURES, newer_bytes, path_of

from sie_contracts.wire import configs, heartbeats, ipc, messages, records
from sie_contracts.wire.configs import ConfigExport

Message = (
    messages.WorkItem
    | messages.WorkResult
    | messages.Confirmation
    | heartbeats.Heartbeat
    | configs.ConfigDelta
    | messages.Fragment
    | messages.Cancel
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
each_fixture = pytest.mark.parametrize("name", EXAMPLES)


def decode(name: str, data: bytes) -> Any:
    """As the receiving process does it."""
    if name.startswith("export"):
        return msgspec.json.decode(data, type=ConfigExport)
    if not name.startswith("ipc"):
        return decode_any(data)
    asked = isinstance(EXAMPLES[name], get_args(ipc.Request))
    return ipc.request(data) if asked else ipc.reply(data)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    """All structs of a message, at any depth."""
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from structs_in(item)


def test_every_message_of_today_has_a_fixture_and_no_fixture_is_left_over() -> None:
    """P2: a message that is added needs its example before it is released."""
    kinds = {*get_args(Message), *get_args(ipc.Request), *get_args(ipc.Reply), ConfigExport}
    assert {type(example) for example in EXAMPLES.values()} == kinds
    assert {path_of(name) for name in EXAMPLES} == set(FIXTURES.iterdir())


@each_fixture
def test_old_bytes_mean_the_same_to_the_types_of_today(name: str) -> None:
    """P2."""
    assert decode(name, path_of(name).read_bytes()) == EXAMPLES[name]


def test_every_field_of_every_message_is_set_in_an_example() -> None:
    """A field that holds its default would not be in the bytes, and nothing would be proven of it."""
    given, unset = set(), set()
    for found in (found for example in EXAMPLES.values() for found in structs_in(example)):
        for field in msgspec.structs.fields(found):
            known = field.required or getattr(found, field.name) != default_of(field)
            (given if known else unset).add(f"{type(found).__name__}.{field.name}")
    assert unset - given == set()


@each_fixture
def test_fields_the_reader_does_not_know_are_ignored(name: str) -> None:
    """P2: at every level."""
    assert decode(name, newer_bytes(name)) == EXAMPLES[name]


@each_fixture
def test_a_message_of_the_required_fields_alone_is_read(name: str) -> None:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    raw = codec.decode(path_of(name).read_bytes())
    required = {field.encode_name for field in msgspec.structs.fields(type(EXAMPLES[name])) if field.required}
    found = decode(name, codec.encode({key: value for key, value in raw.items() if key in required | {"type"}}))
    for field in msgspec.structs.fields(type(EXAMPLES[name])):
        assert getattr(found, field.name) == (
            getattr(EXAMPLES[name], field.name) if field.required else default_of(field)
        )


@pytest.mark.parametrize("tag", ["work/2", "Work", "", None])
def test_a_message_of_another_kind_or_version_is_refused_and_not_guessed(tag: str | None) -> None:
    raw = {**msgspec.msgpack.decode(path_of("work-1").read_bytes()), "type": tag}
    for decoder in (decode_any, messages.decode_work):
        with pytest.raises(msgspec.ValidationError):
            decoder(msgspec.msgpack.encode(raw))
    with pytest.raises(ipc.FrameError):
        ipc.request(msgspec.msgpack.encode(raw))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ipc.FrameError):
        ipc.request(path_of("ipc3-Pong").read_bytes())
    with pytest.raises(ipc.FrameError):
        ipc.reply(path_of("ipc3-Ping").read_bytes())


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_bytes_that_are_no_message_are_an_error(cut: int) -> None:
    """X1."""
    data = path_of("result-1").read_bytes()[:cut]
    with pytest.raises(msgspec.DecodeError):
        messages.decode_result(data)
