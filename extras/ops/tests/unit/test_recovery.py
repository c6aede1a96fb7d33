"""Files that a broker could not read are set aside while it does not run. The output of the broker names their stream.
Buckets of keys are repaired from each other.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from diagnosis import Examined, commands
from inprocess import settings_of
from nats_server import NatsServer

from sie_broker import BrokerUnavailable, Entry, Write
from sie_broker.memory import MemoryServer
from sie_broker.nats import NatsBroker, connect, operator
from sie_broker.nats.api import StreamInfo
from sie_cli import access
from sie_cli.access import Access
from sie_cli.main import main
from sie_cli.refusal import CommandRefused
from sie_cli.serve.readiness import unread_stream
from sie_config_service.mirror import HeldModel
from sie_config_service.store import CatalogueChange, open_store
from sie_contracts.wire import topology
from sie_ops.recovery import FORMAT, Backup, _write_backup, _write_missing, read_backup
from sie_runtime.keys import KeyBuckets, create, encode, readable

STARTS = "[1] [INF]   Starting restore for stream '$G > {}'"
ENDS = "[1] [INF]   Restored 2 messages for stream '$G > {}' in 0s"
NONE = {"SIE_NATS_URL": None, "SIE_GATEWAY_URL": None, "SIE_CONFIG_SERVICE_URL": None}


def test_the_stream_that_a_broker_does_not_end_reading_is_known_by_what_it_printed() -> None:
    lines = [STARTS.format("KV_a"), STARTS.format("KV_b"), STARTS.format("KV_c"), ENDS.format("KV_a")]
    assert unread_stream([*lines, ENDS.format("KV_c")]) == "KV_b"
    assert unread_stream([*lines, ENDS.format("KV_b"), ENDS.format("KV_c")]) == ""


@pytest.mark.parametrize(
    "content", [b"sie backup 0 ", FORMAT + hashlib.sha256(b"\x80").hexdigest().encode() + b"\n\x80"]
)
def test_restore_of_another_versions_backup_names_the_fix(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "backup"
    file.write_bytes(content)
    with pytest.raises(CommandRefused, match=r"restore (it|a backup) with the `sie` that wrote it"):
        read_backup(file)


def test_doctor_names_the_stream_and_its_command_sets_the_files_aside(tmp_path: Path) -> None:
    """`sie serve` has written down which stream its broker does not finish reading. The command runs while `sie serve`
    is stopped.
    """
    data_dir = tmp_path / "data"
    files = data_dir / "nats" / "jetstream" / "$G" / "streams" / "KV_sie_keys"
    (files / "msgs").mkdir(parents=True)
    access.publish(
        data_dir, Access(gateway_url="http://127.0.0.1:1", broker_url="nats://127.0.0.1:1", unread_stream=files.name)
    )
    fix = Examined(tmp_path, {}).told("broker", f"the files of its stream {files.name}", "start it again")
    (data_dir / access.FILE).unlink()
    (command,) = (line for line in commands(fix) if line.startswith("sie repair"))
    done = CliRunner().invoke(main, command.split()[1:], env=NONE)
    assert done.exit_code == 0, done.output
    assert "creates the stream again" in done.output
    assert not files.exists()
    (aside,) = (data_dir / "damaged").iterdir()
    assert (aside / "msgs").is_dir()
    again = CliRunner().invoke(main, command.split()[1:], env=NONE)
    assert again.exit_code == 1
    assert "there are no files of a stream KV_sie_keys" in again.output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def broker(server: NatsServer) -> AsyncIterator[NatsBroker]:
    broker = await connect(server.url, name="test")
    yield broker
    await broker.close()


async def ran(server: NatsServer, data: Path, *command: str, status: int = 0) -> str:
    """Return the output of a command. `data`: the parent of its data directory."""
    environ = {**NONE, "XDG_DATA_HOME": str(data)}
    done = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--url", server.url], env=environ)
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize("revoked", ["bucket", "copy"])
async def test_a_repair_keeps_the_revocation_that_one_bucket_of_keys_lost(
    server: NatsServer, broker: NatsBroker, tmp_path: Path, revoked: str
) -> None:
    buckets = await KeyBuckets.open(broker, 1)
    key, _ = create("one", ("read",), now_s=1.0)
    for name in ("bucket", "copy"):
        record = msgspec.structs.replace(key, revoked_s=2.0) if name == revoked else key
        await getattr(buckets, name).write([Write(key.id, encode(record), 0)])
    await ran(server, tmp_path, "repair", "KV_sie_keys")
    for bucket in (buckets.bucket, buckets.copy):
        ((record, _),) = readable(await bucket.entries())
        assert record.revoked_s == 2.0


@pytest.mark.parametrize("command", ["repair KV_sie_keys", "keys revoke one"])
async def test_a_key_of_which_one_bucket_has_an_unreadable_record_is_written_again(
    server: NatsServer, broker: NatsBroker, tmp_path: Path, command: str
) -> None:
    buckets = await KeyBuckets.open(broker, 1)
    key, _ = create("one", ("read",), now_s=1.0)
    await buckets.write(key, 0)
    await buckets.bucket.write([Write(key.id, b"{}")])
    await ran(server, tmp_path, *command.split())
    for bucket in (buckets.bucket, buckets.copy):
        ((record, _),) = readable(await bucket.entries())
        assert bool(record.revoked_s) is command.endswith("revoke one")


async def test_a_restore_does_not_write_a_key_that_was_forgotten_since_the_backup(
    server: NatsServer, broker: NatsBroker, tmp_path: Path
) -> None:
    await ran(server, tmp_path, "keys", "create", "one")
    await ran(server, tmp_path, "backup", str(tmp_path / "b.sie"))
    await ran(server, tmp_path, "keys", "revoke", "one", "--forget")
    assert "keys: 0 written" in await ran(server, tmp_path, "restore", str(tmp_path / "b.sie"))
    assert await (await KeyBuckets.open(broker, 1)).read() == []


async def test_a_bucket_that_can_be_read_is_not_created_again(
    server: NatsServer, broker: NatsBroker, tmp_path: Path
) -> None:
    jobs = await broker.key_value(topology.JOBS_BUCKET)
    await jobs.write([Write("job.1", b"one", 0)])
    before = await jobs.epoch()
    assert "can be read, so it stays as it is" in await ran(server, tmp_path, "repair", "KV_sie_jobs")
    assert await jobs.epoch() == before


async def test_a_catalogue_is_created_again_only_if_a_record_cannot_be_decoded(
    server: NatsServer, broker: NatsBroker, tmp_path: Path
) -> None:
    store = await open_store(broker, settings_of())
    entry = {"id": "m", "bundle": "default", "weights": {"path": "/m"}, "family": "toy", "outputs": {"dense": 8}}
    await store.write([CatalogueChange("m", HeldModel(), entry, "api", "put")])
    bucket = await broker.key_value(topology.CATALOGUE_BUCKET)
    records = await bucket.entries()
    created = (await bucket.epoch()).rpartition(":")[0]
    assert "can be read, so it stays as it is" in await ran(server, tmp_path, "repair", "KV_sie_catalogue")
    await bucket.write([Write(record.key, None) for record in records])
    assert "from its copy: 1 model" in await ran(server, tmp_path, "repair", "KV_sie_catalogue")
    assert (await bucket.epoch()).rpartition(":")[0] == created
    await bucket.write([Write("history.a.1", b"{}", 0)])
    assert "was created again" in await ran(server, tmp_path, "repair", "KV_sie_catalogue")
    assert [*(await (await open_store(broker, settings_of())).snapshot()).held] == ["m"]


@pytest.mark.parametrize("stream", ["", "a b", "a.b", "*", ">", "../a", "\udcff", "a" * 300])
def test_a_text_that_no_stream_can_have_as_its_name_is_refused(stream: str, tmp_path: Path) -> None:
    for url in ([], ["--url", "nats://127.0.0.1:1"]):
        environ = {**NONE, "XDG_DATA_HOME": str(tmp_path)}
        done = CliRunner().invoke(main, ["repair", stream, *url], env=environ)
        assert done.exit_code == 1
        assert "cannot be the name of a stream" in done.output


BUCKETS: dict[str, list[tuple[str, bytes]]] = {"sie_jobs": [], "sie_shards": []}


@pytest.mark.parametrize(
    ("saved", "refusal"),
    [
        ({"entries": {}}, ""),
        ({"version": "\x1b[2J", "made_s": 1e300}, ""),
        ({"entries": BUCKETS | {"sie_jobs": [("a b", b"")]}}, "key 'a b'"),
        ({"entries": BUCKETS | {"other": [("", b"")]}}, "key ''"),
        ({"keys": [create("one", ("read",), now_s=1.0)[0]]}, ""),
        ({"keys": [msgspec.structs.replace(create("one", ("read",), now_s=1.0)[0], id="*")]}, "key '*'"),
    ],
)
async def test_a_backup_is_checked_before_anything_is_written(
    server: NatsServer, tmp_path: Path, saved: dict[str, Any], refusal: str
) -> None:
    file = tmp_path / "b.sie"
    empty = Backup("0.1", 1.0, [], [], BUCKETS)
    _write_backup(file, msgspec.structs.replace(empty, **saved))
    output = await ran(server, tmp_path, "restore", str(file), status=1 if refusal else 0)
    assert output.count("Error: ") == bool(refusal)
    assert refusal in output
    assert "\x1b" not in output


async def test_entries_that_an_interrupted_repair_has_salvaged_are_restored_from_their_file(
    server: NatsServer, broker: NatsBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await broker.key_value(topology.JOBS_BUCKET)
    await jobs.write([Write("job.1", b"one", 0)])

    async def damage(*_: object) -> str:
        return "it is damaged"

    async def remake_in_part(repairing: NatsBroker, info: StreamInfo) -> None:
        await repairing.delete_stream(str(info.config["name"]))
        raise BrokerUnavailable("the connection is lost")

    with monkeypatch.context() as patched:
        patched.setattr(operator, "damage", damage)
        patched.setattr(operator, "remake", remake_in_part)
        printed = await ran(server, tmp_path, "repair", "KV_sie_jobs", status=2)
    (file,) = (tmp_path / "sie" / "damaged").iterdir()
    assert f"sie restore {file}" in printed
    assert file.stat().st_mode & 0o777 == 0o600
    await ran(server, tmp_path, "restore", str(file))
    assert [(entry.key, entry.value) for entry in await jobs.entries()] == [("job.1", b"one")]
    with monkeypatch.context() as patched:
        patched.setattr(operator, "damage", damage)
        assert "was created again, with 1 entry" in await ran(server, tmp_path, "repair", "KV_sie_jobs")
    assert [*(tmp_path / "sie" / "damaged").iterdir()] == [file]
    assert [(entry.key, entry.value) for entry in await jobs.entries()] == [("job.1", b"one")]


async def test_an_entry_that_another_process_writes_during_a_restore_stays_and_the_others_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = await MemoryServer().connect("test").key_value("jobs")
    await bucket.write([Write("b", b"newer", 0)])

    async def entries_before() -> list[Entry]:
        return []

    with monkeypatch.context() as patched:
        patched.setattr(bucket, "entries", entries_before)
        assert await _write_missing(bucket, [("a", b"old"), ("b", b"old"), ("c", b"old")]) == 2
    assert {entry.key: entry.value for entry in await bucket.entries()} == {"a": b"old", "b": b"newer", "c": b"old"}
