"""`sie keys`: the token that the console of a `sie serve` asks for, and keys that are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sie_broker import Broker
from sie_broker.memory import MemoryServer
from sie_cli.access import Access, published
from sie_cli.cluster import Cluster
from sie_cli.main import main
from sie_runtime import keys as records
from sie_runtime.keys import KeyBuckets


def asked(data_dir: Path) -> Result:
    return CliRunner().invoke(main, ["keys", "admin", "--data-dir", str(data_dir)])


def test_the_token_of_the_server_that_runs_is_printed_alone(tmp_path: Path) -> None:
    with published(tmp_path, Access(gateway_url="http://127.0.0.1:1", admin_token="of-this-start")):
        assert (asked(tmp_path).exit_code, asked(tmp_path).stdout) == (0, "of-this-start\n")


def test_a_name_that_two_keys_have_revokes_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored backup, or two commands at the same moment, can give a name to two keys."""
    server = MemoryServer()

    async def opened(broker: Broker, cluster: Cluster) -> tuple[KeyBuckets, float]:
        buckets = await KeyBuckets.open(broker, 1)
        if not await buckets.read():
            for key in twins:
                await buckets.write(key, 0)
        return buckets, 2.0  # the memory broker has no time of a bucket

    async def open_broker(cluster: Cluster, name: str, url: str = "") -> Broker:
        return server.connect(name)

    twins = [records.create("team", ("infer",), now_s=1.0)[0] for _ in range(2)]
    monkeypatch.setattr(Cluster, "open_broker", open_broker)
    monkeypatch.setattr("sie_cli.keys._opened", opened)

    def revoked(name: str) -> Result:
        return CliRunner().invoke(main, ["keys", "revoke", name, "--url", "nats://127.0.0.1:1"])

    refused = revoked("team")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert all(key.id in refused.stderr for key in twins)
    assert [revoked(name).stdout for name in (twins[1].id, "team")] == [
        f"key {key.id} team is revoked\n" for key in reversed(twins)
    ]
