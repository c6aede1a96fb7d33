"""Readiness of `sie serve`: the failed load of a model that the command line names, a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.serve.ports import free_port
from sie_cli.serve.processes import LocalCluster, ServePlan
from sie_cli.serve.readiness import FailedLoad, failed_load
from sie_cli.serve.supervisor import Child, Supervisor
from sie_contracts.settings import Secret, load


def host(state: str, attempts: int = 0, *, permanent: bool = False) -> dict[str, Any]:
    error = {"code": "NETWORK", "attempts": attempts, "permanent": permanent, "message": "no network"}
    return {"worker": "w0", "state": state, "error": error if attempts else None}


@pytest.mark.parametrize(
    ("state", "hosts", "expected"),
    [
        ("available", [], None),
        ("loading", [host("loading", 1)], None),
        ("loaded", [host("loaded"), host("failed", 3)], None),
        ("failed", [host("failed", 1)], FailedLoad("no network", 1, is_permanent=False)),
        ("failed", [host("failed", 3), host("failed", 2)], FailedLoad("no network", 2, is_permanent=False)),
        ("failed", [host("failed", 1, permanent=True)], FailedLoad("no network", 1, is_permanent=True)),
    ],
)
async def test_a_failed_load_is_that_of_all_workers(
    state: str, hosts: list[dict[str, Any]], expected: FailedLoad | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models/org/m"
        assert request.headers["Authorization"] == "Bearer admin"
        return httpx.Response(200, json={"state": state, "hosts": hosts})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        assert await failed_load(client, "http://gateway", Secret("admin"), "org/m") == expected


@pytest.mark.parametrize(
    "content",
    [b"<html>", b"", b"[]", b'{"hosts": 1}', b'{"hosts": [{}]}', b'{"state": "failed", "hosts": [{"error": 1}]}'],
)
async def test_an_answer_that_is_not_of_a_gateway_is_no_failed_load(content: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
    async with httpx.AsyncClient(transport=transport) as client:
        assert await failed_load(client, "http://gateway", Secret("admin"), "org/m") is None


def test_a_start_ends_after_the_last_try_of_a_load() -> None:
    tries = [FailedLoad("no network", attempts, is_permanent=False) for attempts in (1, 2, 3)]
    assert [failed.is_final for failed in tries] == [False, False, True]
    assert FailedLoad("no such file", 1, is_permanent=True).is_final
    assert str(tries[0]) == "attempt 1 of 3 to load it failed, the next follows within a minute: no network"


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_a_start_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the disk count what the streams hold already, so a disk that they fill passes."""
    monkeypatch.setattr("sie_cli.access.write_private", no_space)
    done = CliRunner().invoke(main, ["serve", "--standalone", "--port", str(free_port()), "--data-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"error: --data-dir: {tmp_path}: No space left on device"


async def test_a_disk_that_is_full_when_all_are_ready_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sie_cli.access.write_private", no_space)
    settings = load(environ={}).settings
    plan = ServePlan("127.0.0.1", 1, tmp_path, True, 1, 1, False, settings, flags={}, environ={})
    cluster, supervisor = LocalCluster(plan), Supervisor(lambda *_: None)
    cluster._printed("nats-server", ["Restored 1 messages for stream '$G > KV_sie_keys'"], "INFO")
    await cluster._until_ready(supervisor)
    assert supervisor.is_up
    assert "access.json was not written: No space left on device" in capsys.readouterr().err


async def test_a_task_that_fails_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(_: Supervisor) -> None:
        raise ValueError("a fault of this program")

    plan = ServePlan("127.0.0.1", 1, tmp_path, True, 1, 1, False, load(environ={}).settings, flags={}, environ={})
    cluster = LocalCluster(plan)
    monkeypatch.setattr(cluster, "_until_ready", failing)
    async with asyncio.timeout(30):
        assert await cluster._supervised(Supervisor(lambda *_: None), [], [], [], [], []) == 1
    assert "task readiness failed" in caplog.text


async def test_output_that_cannot_be_handled_ends_the_command(caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: str) -> None:
        raise ValueError("a fault of this program")

    supervisor, child = Supervisor(failing), Child("adapter", [sys.executable, "-c", "print(1); input()"], os.environ)
    await supervisor.start(child)
    async with asyncio.timeout(30):
        assert "failed, see above" in await supervisor.fatal
    await supervisor.stop([child])
    assert "task output:adapter failed" in caplog.text
