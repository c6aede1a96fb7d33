"""Files that a broker could not read are set aside while it does not run; and what it printed says whose they are."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from diagnosis import Examined, commands

from sie_cli import access
from sie_cli.access import Access
from sie_cli.main import main
from sie_cli.serve.readiness import unread_stream

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
