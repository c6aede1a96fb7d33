"""SIE_BASE_URL and SIE_API_KEY: commands of `sie` and the settings read the variables of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_cli.cluster import GATEWAY_URL, Cluster
from sie_contracts.settings import load

CLIENT = {"SIE_BASE_URL": "http://gateway:1", "SIE_API_KEY": "own"}


def cluster(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    for name in ("SIE_BASE_URL", "SIE_API_KEY", "SIE_AUTH_TOKEN", "SIE_GATEWAY_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"XDG_DATA_HOME": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    return Cluster.locate(load(environ=environ))


def test_no_server_warns_of_the_variables_of_clients() -> None:
    assert load(environ=CLIENT).warnings == load(environ={}).warnings
    assert load(environ={"SIE_API_KEYS": "x"}).warnings == ("SIE_API_KEYS is set, but no such setting exists",)


@pytest.mark.parametrize(
    ("environ", "url", "token"),
    [
        (CLIENT, "http://gateway:1", "own"),
        ({**CLIENT, "SIE_GATEWAY_URL": "http://named:2"}, "http://named:2", "own"),
        ({"SIE_AUTH_TOKEN": "alias"}, "http://127.0.0.1:8080", "alias"),
        ({**CLIENT, "SIE_AUTH_TOKEN": "alias"}, "http://gateway:1", "own"),
        ({}, "http://127.0.0.1:8080", None),
    ],
)
def test_commands_ask_the_gateway_and_send_the_key_of_the_environment(
    environ: dict[str, str], url: str, token: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = cluster(environ, monkeypatch, tmp_path)
    secret = target.gateway_token
    assert (target.gateway_urls, secret.reveal() if secret else None) == ([url], token)
    assert target.is_given(GATEWAY_URL) == ("SIE_BASE_URL" in environ or "SIE_GATEWAY_URL" in environ)
