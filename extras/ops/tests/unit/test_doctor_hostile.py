"""`sie doctor` at an address where another server answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from unit.test_hostile_replies import JSON, _Server, escaped, server  # noqa: F401  a fixture

from sie_cli.main import main
from sie_contracts.api.operations import Health


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
