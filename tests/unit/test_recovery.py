"""Files that a broker could not read are set aside while it does not run, and its output says whose they are. Buckets
of keys are repaired from each other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from diagnosis import Examined, commands
from nats_server import NatsServer

from sie_broker import Write
from sie_broker.nats import connect
from sie_cli import access
from sie_cli.access import Access
from sie_cli.main import main
from sie_cli.serve.readiness import unread_stream
from sie_runtime.keys import KeyBuckets, create, encode, readable

STARTS = "[1] [INF]   Starting restore for stream '$G > {}'"
ENDS = "[1] [INF]   Restored 2 messages for stream '$G > {}' in 0s"
NONE = {"SIE_NATS_URL": None, "SIE_GATEWAY_URL": None, "SIE_CONFIG_SERVICE_URL": None}


def test_the_stream_that_a_broker_does_not_end_reading_is_known_by_what_it_printed() -> None:
    lines = [STARTS.format("KV_a"), STARTS.format("KV_b"), STARTS.format("KV_c"), ENDS.format("KV_a")]
    assert unread_stream([*lines, ENDS.format("KV_c")]) == "KV_b"
    assert unread_stream([*lines, ENDS.format("KV_b"), ENDS.format("KV_c")]) == ""


def test_doctor_names_the_stream_and_its_command_sets_the_files_aside(tmp_path: Path) -> None:
    """`sie serve` wrote down which stream its broker does not end reading. It is stopped, the command is run."""
    data_dir = tmp_path / "data"
    files = data_dir / "nats" / "jetstream" / "$G" / "streams" / "KV_sie_keys"
    (files / "msgs").mkdir(parents=True)
    access.publish(
        data_dir, Access(gateway_url="http://127.0.0.1:1", broker_url="nats://127.0.0.1:1", unread_stream=files.name)
    )
    fix = Examined(tmp_path, {}).told("broker", f"the files of its stream {files.name}", "start it again")
    (data_dir / access.FILE).unlink()
    (command,) = (each for each in commands(fix) if each.startswith("sie repair"))
    done = CliRunner().invoke(main, command.split()[1:], env=NONE)
    assert done.exit_code == 0, done.output
    assert "makes the stream anew" in done.output
    assert not files.exists()
    (aside,) = (data_dir / "damaged").iterdir()
    assert (aside / "msgs").is_dir()
    again = CliRunner().invoke(main, command.split()[1:], env=NONE)
    assert again.exit_code == 1
    assert "there are no files of a stream KV_sie_keys" in again.output


@pytest.mark.parametrize("revoked", ["bucket", "copy"])
async def test_a_repair_keeps_the_revocation_that_one_bucket_of_keys_lost(tmp_path: Path, revoked: str) -> None:
    with NatsServer(tmp_path / "nats") as server:
        broker = await connect(server.url, name="test")
        try:
            buckets = await KeyBuckets.open(broker, 1)
            key, _ = create("one", ("read",), now_s=1.0)
            for name in ("bucket", "copy"):
                record = msgspec.structs.replace(key, revoked_s=2.0) if name == revoked else key
                await getattr(buckets, name).write([Write(key.id, encode(record), 0)])
            command = ["repair", "KV_sie_keys", "--url", server.url]
            done = await asyncio.to_thread(CliRunner().invoke, main, command, env=NONE)
            assert done.exit_code == 0, done.output
            for bucket in (buckets.bucket, buckets.copy):
                ((record, _),) = readable(await bucket.entries())
                assert record.revoked_s == 2.0
        finally:
            await broker.close()
