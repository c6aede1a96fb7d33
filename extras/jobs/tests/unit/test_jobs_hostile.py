"""`sie jobs` at an address where nothing listens, or another server answers, and bodies that come slowly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
from unit.test_hostile_replies import JSON, _Server, escaped, invoked, server  # noqa: F401  a fixture
from unit.test_settings_effects_gateway import must_come_at_the_least_rate
from unit.test_unreachable import ends_at_once, url  # noqa: F401  a fixture

from sie_contracts.api.jobs import JobInfo, JobPage

COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "list": (["jobs", "list"], {**JobPage.EXAMPLE, "has_more": False}),
    "show": (["jobs", "show", "j"], JobInfo.EXAMPLE),
    "submit": (["jobs", "submit", "m", "s3://a/b", "--text", "{c}"], JobInfo.EXAMPLE),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_names_in_a_reply_do_not_control_the_terminal(name: str, server: _Server) -> None:  # noqa: F811
    arguments, body = COMMANDS[name]
    server.reply = (200, JSON, json.dumps(escaped(body)).encode())
    assert invoked(server, arguments).exit_code == 0


def test_a_refused_connection_is_one_line_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ends_at_once(COMMANDS["list"][0], url, monkeypatch)


@pytest.mark.parametrize(
    ("path", "kind", "piece"),
    [("/v1/files", "multipart/form-data; boundary=x", b"\r\n"), ("/v1/jobs", "application/json", b"  ")],
)
@pytest.mark.parametrize(("rate", "status"), [("4096", 504), ("10", 0)])
async def test_a_body_must_come_at_the_least_rate(
    cluster: InProcess,
    path: str,
    kind: str,
    piece: bytes,
    rate: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await cluster.gateway(SIE_MIN_BODY_RATE=rate, SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"))
    await must_come_at_the_least_rate(gateway, path, kind, piece, status, monkeypatch)
