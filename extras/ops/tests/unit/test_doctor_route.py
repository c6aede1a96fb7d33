"""`sie doctor`: the report that a gateway answers, and replies, messages and files of others."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import undecodable
from click.testing import CliRunner
from inprocess import free_port, settings_of
from undecodable import FAULTS, MARK, check, damages_of, msgpack
from unit.test_hostile_replies import JSON, _Server, escaped, server  # noqa: F401  a fixture

from sie_broker import CoreMessage
from sie_cli.main import main
from sie_cli.refusal import CommandRefused
from sie_contracts.api.operations import Health
from sie_contracts.errors import Unauthenticated
from sie_gateway.http.app import Gate
from sie_ops import recovery
from sie_ops.doctor.probe import Heartbeats, ProbeResult
from sie_ops.doctor.runs import Doctor


async def test_the_doctor_reports_as_the_command_does() -> None:
    """Two concurrent requests share one examination, which looks at the gateway that runs it."""
    doctor = Doctor("0.0.0.0", free_port(), None)
    report, second_report = await asyncio.gather(doctor.report(), doctor.report())
    assert report is second_report
    checks = {check["check"]: check for check in report["checks"]}
    assert {"settings", "gateway", "broker", "streams", "config", "disk", "clock", "versions"} <= set(checks)
    (nobody,) = checks["gateway"]["findings"]
    assert doctor._environ["SIE_GATEWAY_URL"] in nobody["wrong"]
    assert nobody["fix"]


ADMIN = {"SIE_ADMIN_TOKEN": "admin-token-of-a-test"}
STATIC = {**ADMIN, "SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "user-token-of-a-test"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_doctor_needs_no_token_where_only_this_machine_reaches_a_gateway_without_tokens(host: str) -> None:
    Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/doctor", "")
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/dead-letters", "")
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**STATIC), None, host).check("GET", "/v1/doctor", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway", ""])
def test_the_doctor_needs_a_token_where_others_reach_the_gateway(host: str) -> None:
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/doctor", "")


# `sie doctor` at an address where another server answers


@pytest.mark.parametrize(
    "fields", [{"cluster": [None]}, {"workers": [5]}, {"nats_url": 5}, {"config_url": []}, {"models": [None]}], ids=str
)
def test_doctor_ends_whatever_a_gateway_says_about_itself(
    fields: dict[str, Any],
    server: _Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sie_cli.cluster.CONNECT_S", 0.2)  # no broker is there
    body = json.dumps({**escaped(Health.EXAMPLE), **fields}).encode()
    server.reply = (200, JSON | {"x-sie-version": "0.1", "x-sie-request-id": "a"}, body)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environ = {"SIE_GATEWAY_URL": url, "SIE_CONFIG_SERVICE_URL": url, "SIE_NATS_URL": "nats://127.0.0.1:1"}
    result = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path)], env=environ)
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert "findings" in result.output
    assert all(letter.isprintable() or letter == "\n" for letter in result.output)


# messages and files that no decoder accepts, at the commands of operators


READERS: dict[str, tuple[dict[str, Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "heartbeat": (
        {"type": "heartbeat/1", "worker": MARK},
        msgpack,
        lambda data: Heartbeats.on_worker(MagicMock(), CoreMessage("subject", data, "reply")),
    ),
    "gateway": (
        {"type": "gateway/1", "gateway": MARK},
        msgpack,
        lambda data: Heartbeats.on_gateway(MagicMock(), CoreMessage("subject", data, "reply")),
    ),
    "health": ({"name": MARK}, undecodable.json, lambda data: ProbeResult("u", 200, data).decoded(dict)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_doctor_ignores_a_message_that_cannot_be_decoded(reader: str, fault: str) -> None:
    sample, encode, read = READERS[reader]
    check(lambda: read(damages_of(sample, encode)[fault]), None)


@pytest.mark.parametrize("fault", FAULTS)
def test_read_backup_refuses_a_file_that_cannot_be_decoded(fault: str, tmp_path: Path) -> None:
    data = damages_of({"version": MARK}, msgpack)[fault]
    (tmp_path / "backup").write_bytes(recovery.FORMAT + hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    check(lambda: recovery.read_backup(tmp_path / "backup"), CommandRefused)
