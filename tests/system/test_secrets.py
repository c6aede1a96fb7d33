"""Tokens guard the API and are seen nowhere else."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import MODEL, Cluster, running

ADMIN, USER = secrets.token_urlsafe(16), secrets.token_urlsafe(16)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": USER, "SIE_ADMIN_TOKEN": ADMIN}
    with running(tmp_path_factory.mktemp("secrets"), "--no-spare", environ=environ) as cluster:
        yield cluster


def test_static_tokens_open_what_their_scopes_say(cluster: Cluster) -> None:
    """X2, X14"""

    def status(token: str | None) -> int:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return cluster.encode(["Hello"], **headers).status_code

    assert [status(token) for token in (None, "wrong", USER, ADMIN)] == [401, 401, 200, 200]
    refused = cluster.encode(["Hello"])
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{cluster.url}/health").status_code == 401
    assert httpx.get(f"{cluster.url}/readyz").status_code == 200
    assert httpx.get(f"{cluster.url}/metrics", headers={"authorization": USER}).status_code == 404


def test_the_export_wants_the_read_or_the_admin_token(cluster: Cluster) -> None:
    """X14: a user's token is not enough."""
    url = httpx.get(f"{cluster.url}/health", headers={"authorization": USER}).json()["config_url"] + "/v1/configs/export"
    statuses = [httpx.get(url, headers={"authorization": f"Bearer {token}"}).status_code for token in (USER, ADMIN)]
    assert statuses == [401, 200]


def test_no_process_but_those_that_need_it_has_the_admin_token(cluster: Cluster) -> None:
    """X11, X14: neither in an environment of a worker or the broker, nor in any command line, nor in the log."""
    for role in ("sidecar", "adapter", "nats-server"):
        for pid in cluster.pids(role):
            values = psutil.Process(pid).environ().values()
            assert ADMIN not in values, role
            assert USER not in values, role
    for role in ("gateway", "config", "sidecar", "adapter", "nats-server"):
        for pid in cluster.pids(role):
            line = " ".join(psutil.Process(pid).cmdline())
            assert ADMIN not in line
            assert USER not in line
    cluster.encode(["Hello"], authorization=f"Bearer {USER}", model=MODEL)
    assert not cluster.said(ADMIN)
    assert not cluster.said(USER)


def test_static_without_a_token_does_not_start(tmp_path: Path) -> None:
    """X2: fail closed."""
    cluster = Cluster(tmp_path, "--auth-mode", "static")
    with pytest.raises(AssertionError, match="SIE_AUTH_MODE: static needs SIE_AUTH_TOKEN"):
        cluster.start()
    assert cluster.process is not None
    assert cluster.process.wait(5) == 2
