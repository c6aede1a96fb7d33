"""Messages of every released version: old bytes with new types, new bytes with old types.

`V1...` are the readers of version 1, declared here once and never changed: what they need must stay as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from make_fixtures import EXAMPLES, FIXTURES, encoded, path_of

from sie_contracts import ipc, messages
from sie_contracts.messages import ConfigExport


class V1Error(msgspec.Struct):
    code: str
    message: str
    reason: str = ""
    param: str = ""
    retry_after_s: int = 0
    extras: dict[str, Any] = {}


class V1Input(msgspec.Struct):
    text: str | None = None


class V1Options(msgspec.Struct):
    outputs: tuple[str, ...] = ("dense",)
    prefix: str = ""
    suffix: str = ""
    truncate: str = "END"
    pooling: str = ""
    normalize: bool = True
    dimensions: int = 0
    max_tokens: int = 0
    lora: str = ""


class V1Work(msgspec.Struct, tag="work/1"):
    request: str
    chunk: int
    model: str
    revision: str
    operation: str
    inputs: tuple[V1Input, ...]
    options: V1Options
    reply: str
    budget_ms: int
    first: int = 0
    attempt: int = 0
    profile: str = "default"
    config_revision: int = 0
    priority: str = "interactive"
    cost: int = 0
    traceparent: str = ""


class V1Slice(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class V1Ok(msgspec.Struct, tag="ok"):
    outputs: dict[str, V1Slice]
    tokens: int = 0
    truncated: bool = False


class V1Failed(msgspec.Struct, tag="failed"):
    error: V1Error


class V1Stages(msgspec.Struct):
    load_ms: float = 0.0
    preprocess_ms: float = 0.0
    batch_wait_ms: float = 0.0
    device_wait_ms: float = 0.0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    worker_ms: float = 0.0


class V1Note(msgspec.Struct):
    id: str = ""
    items: int = 0
    chunks: int = 0
    tokens: int = 0
    attention: int = 0
    deliveries: int = 1


class V1Result(msgspec.Struct, tag="result/1"):
    request: str
    chunk: int
    worker: str
    outcomes: tuple[V1Ok | V1Failed, ...]
    block: bytes = b""
    attempt: int = 0
    revision: str = ""
    fingerprint: str = ""
    stages: V1Stages = msgspec.field(default_factory=V1Stages)
    batch: V1Note = msgspec.field(default_factory=V1Note)


class V1Confirmation(msgspec.Struct, tag="confirm/1"):
    verdict: str


class V1Status(msgspec.Struct):
    model: str
    state: str
    memory_bytes: int = 0
    queued: int = 0
    fingerprint: str = ""
    error: V1Error | None = None


class V1Heartbeat(msgspec.Struct, tag="heartbeat/1"):
    worker: str
    pool: str
    machine_profile: str
    bundle: str
    ready: bool
    version: str
    leaving: bool = False
    gpu_count: int = 1
    gpu: str = ""
    device: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    queue_depth: int = 0
    config_epoch: str = ""
    models: tuple[V1Status, ...] = ()


class V1Delta(msgspec.Struct, tag="delta/1"):
    producer: str
    previous: str
    epoch: str
    model: str
    revision: int
    entry: dict[str, Any] | None = None


class V1Model(msgspec.Struct):
    model_id: str
    model_config: dict[str, Any]
    revision: int = 0
    affected_bundles: tuple[str, ...] = ()
    raw_yaml: str = ""


class V1Export(msgspec.Struct):
    epoch: str
    models: tuple[V1Model, ...]
    bundles: tuple[dict[str, Any], ...] = ()
    snapshot_version: int = 1
    generated_at: str = ""


class V1Group(msgspec.Struct):
    start: int
    stop: int
    outputs: tuple[str, ...] = ("dense",)
    normalize: bool = True
    dimensions: int = 0


class V1Loaded(msgspec.Struct):
    model: str
    revision: str
    fingerprint: str
    precision: str
    attention: str
    memory_bytes: int = 0
    idle_s: float = 0.0


class V1Ping(msgspec.Struct, tag="Ping"):
    pass


class V1Describe(msgspec.Struct, tag="Describe"):
    pass


class V1EnsureReady(msgspec.Struct, tag="EnsureReady"):
    model: str
    entry: dict[str, Any]
    profile: str = "default"
    evictable: tuple[str, ...] = ()


class V1Release(msgspec.Struct, tag="Release"):
    model: str


class V1RunBatch(msgspec.Struct, tag="RunBatch"):
    batch: str
    model: str
    operation: str
    lengths: bytes
    ids: bytes
    epilogues: tuple[V1Group, ...]
    pooling: str = ""
    lora: str = ""
    traceparent: str = ""


class V1ApplyConfig(msgspec.Struct, tag="ApplyConfig"):
    model: str
    entry: dict[str, Any] | None = None


class V1Drain(msgspec.Struct, tag="Drain"):
    pass


class V1Pong(msgspec.Struct, tag="Pong"):
    pid: int
    busy_s: float = 0.0
    batches: int = 0


class V1Description(msgspec.Struct, tag="Description"):
    protocol: int
    pid: int
    device: str
    version: str
    lanes: int = 1
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    models: tuple[V1Loaded, ...] = ()


class V1Ready(msgspec.Struct, tag="Ready"):
    loaded: V1Loaded
    tokenizer: bytes
    max_tokens: int
    load_s: float = 0.0
    evicted: tuple[str, ...] = ()


class V1BatchStarted(msgspec.Struct, tag="BatchStarted"):
    batch: str


class V1BatchDone(msgspec.Struct, tag="BatchDone"):
    batch: str
    outcomes: tuple[V1Ok | V1Failed, ...]
    block: bytes
    inference_ms: float
    postprocess_ms: float = 0.0


class V1Done(msgspec.Struct, tag="Done"):
    pass


class V1Refused(msgspec.Struct, tag="Refused"):
    error: V1Error
    batch: str = ""


OLD_READERS: dict[str, type[msgspec.Struct]] = {
    "work-1": V1Work, "result-1": V1Result, "confirm-1": V1Confirmation, "heartbeat-1": V1Heartbeat, "delta-1": V1Delta,
    "export-1": V1Export, "ipc1-Ping": V1Ping, "ipc1-Describe": V1Describe, "ipc1-EnsureReady": V1EnsureReady,
    "ipc1-Release": V1Release, "ipc1-RunBatch": V1RunBatch, "ipc1-ApplyConfig": V1ApplyConfig, "ipc1-Drain": V1Drain,
    "ipc1-Pong": V1Pong, "ipc1-Description": V1Description, "ipc1-Ready": V1Ready, "ipc1-BatchStarted": V1BatchStarted,
    "ipc1-BatchDone": V1BatchDone, "ipc1-Done": V1Done, "ipc1-Refused": V1Refused,
}  # fmt: skip

each_fixture = pytest.mark.parametrize("name", EXAMPLES)


def decode(name: str, data: bytes, kind: Any = None) -> Any:
    """With the types of today, as the receiving process does it, or with an old reader."""
    if kind is not None:
        return msgspec.json.decode(data, type=kind) if name.startswith("export") else msgspec.msgpack.decode(data, type=kind)
    if name.startswith("export"):
        return msgspec.json.decode(data, type=ConfigExport)
    if not name.startswith("ipc"):
        return messages.decode_any(data)
    asked = isinstance(EXAMPLES[name], get_args(ipc.Request))
    return ipc.request(data) if asked else ipc.reply(data)


def newer(value: Any) -> Any:
    """The same message from a sender that knows more: a further field in every map, a further element in every array slice."""
    if isinstance(value, dict):
        return {**{key: newer(item) for key, item in value.items()}, "field_of_the_future": {"nested": [1, "x"]}}
    if isinstance(value, list):
        return [newer(item) for item in value]
    return value


def newer_bytes(name: str) -> bytes:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    raw = codec.decode(path_of(name).read_bytes())
    for key in ("entry", "outputs"):  # maps whose keys are data: a further one would be another value
        if isinstance(raw.get(key), dict):
            raw[key] = _Kept(raw[key])
    for outcome in raw.get("outcomes", []):
        if "outputs" in outcome:
            outcome["outputs"] = _Kept({output: [*piece, "element of the future"] for output, piece in outcome["outputs"].items()})
        if "error" in outcome:
            outcome["error"]["extras"] = _Kept(outcome["error"]["extras"])
    for status in [raw, *raw.get("models", [])]:
        if isinstance(status.get("error"), dict) and "extras" in status["error"]:
            status["error"]["extras"] = _Kept(status["error"]["extras"])
        if "model_config" in status:
            status["model_config"] = _Kept(status["model_config"])
    if "bundles" in raw:
        raw["bundles"] = _Kept(raw["bundles"])
    return bytes(codec.Encoder(enc_hook=lambda kept: kept.value).encode(newer(raw)))


class _Kept:
    """Something that `newer` leaves as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_every_message_of_today_has_a_fixture_and_no_fixture_is_left_over() -> None:
    """P2: a message that is added needs its example before it is released."""
    kinds = {*get_args(messages.Message), *get_args(ipc.Request), *get_args(ipc.Reply), ConfigExport}
    assert {type(example) for example in EXAMPLES.values()} == kinds
    assert {path_of(name) for name in EXAMPLES} == set(FIXTURES.iterdir())
    assert set(OLD_READERS) == set(EXAMPLES)


@each_fixture
def test_old_bytes_mean_the_same_to_the_types_of_today(name: str) -> None:
    """P2."""
    assert decode(name, path_of(name).read_bytes()) == EXAMPLES[name]


@each_fixture
def test_an_example_sets_every_field_to_something_of_its_own(name: str) -> None:
    """A field that holds its default in the example would not be in the bytes, and nothing would be proven of it."""
    example, old = EXAMPLES[name], OLD_READERS[name]
    for field in msgspec.structs.fields(old):
        if not field.required:
            today = {each.name: each for each in msgspec.structs.fields(type(example))}[field.name]
            assert getattr(example, field.name) != today.default, field.name


@each_fixture
def test_fields_the_reader_does_not_know_are_ignored(name: str) -> None:
    """P2: at every level."""
    assert decode(name, newer_bytes(name)) == EXAMPLES[name]


@each_fixture
def test_an_old_reader_reads_what_is_written_today(name: str) -> None:
    """P2: with the same values, and also when the sender knows more than today."""
    for data in (path_of(name).read_bytes(), encoded(name), newer_bytes(name)):
        assert agrees(decode(name, data, OLD_READERS[name]), EXAMPLES[name])


def agrees(old: Any, today: Any) -> bool:
    """Whether all that the old reader knows is what was written."""
    if isinstance(old, msgspec.Struct):
        same_kind = old.__struct_config__.tag == today.__struct_config__.tag
        return same_kind and all(agrees(getattr(old, name), getattr(today, name)) for name in old.__struct_fields__)
    if isinstance(old, tuple):
        return len(old) == len(today) and all(map(agrees, old, today))
    if isinstance(old, dict):
        return old.keys() == today.keys() and all(agrees(value, today[key]) for key, value in old.items())
    return bool(old == today)


@each_fixture
def test_a_field_was_only_ever_added_and_has_a_default(name: str) -> None:
    """P2: nothing is renamed, nothing that was optional is demanded."""
    old = {field.name: field.required for field in msgspec.structs.fields(OLD_READERS[name])}
    today = {field.name: field.required for field in msgspec.structs.fields(type(EXAMPLES[name]))}
    assert old.keys() <= today.keys()
    assert not any(required and not old.get(field, False) for field, required in today.items())


@each_fixture
def test_a_message_of_the_required_fields_alone_is_read(name: str) -> None:
    codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
    raw = codec.decode(path_of(name).read_bytes())
    required = {field.encode_name for field in msgspec.structs.fields(type(EXAMPLES[name])) if field.required}
    found = decode(name, codec.encode({key: value for key, value in raw.items() if key in required | {"type"}}))
    for field in msgspec.structs.fields(type(EXAMPLES[name])):
        assert getattr(found, field.name) == (getattr(EXAMPLES[name], field.name) if field.required else field.default)


@pytest.mark.parametrize("tag", ["work/2", "Work", "", None])
def test_a_message_of_another_kind_or_version_is_refused_and_not_guessed(tag: str | None) -> None:
    raw = {**msgspec.msgpack.decode(path_of("work-1").read_bytes()), "type": tag}
    for decoder in (messages.decode_any, messages.decode_work):
        with pytest.raises(msgspec.ValidationError):
            decoder(msgspec.msgpack.encode(raw))
    with pytest.raises(ipc.FrameError):
        ipc.request(msgspec.msgpack.encode(raw))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ipc.FrameError):
        ipc.request(path_of("ipc1-Pong").read_bytes())
    with pytest.raises(ipc.FrameError):
        ipc.reply(path_of("ipc1-Ping").read_bytes())


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_bytes_that_are_no_message_are_an_error(cut: int) -> None:
    """X1."""
    data = path_of("result-1").read_bytes()[:cut]
    with pytest.raises(msgspec.DecodeError):
        messages.decode_result(data)
