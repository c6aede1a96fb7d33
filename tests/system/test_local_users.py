"""Another user of the machine, with no rights, tries every port, socket, file and process of a `sie
serve` with tokens.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import local_user
import psutil
import pytest
import shared
from cluster import MODEL, SIE, Cluster
from zygote import environ_of

pytestmark = [
    shared.GUARDED,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
]

ATTACKER = Path(local_user.__file__)
MARK = f"canary{secrets.token_hex(8)}"
SECRETS = ("_PASSWORD", "_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
OPEN = {"/healthz", "/livez", "/readyz"}
SCALING = "/v1/scaling/_default.cpu.default"  # the route that KEDA asks at a gateway's port of probes


@pytest.fixture(scope="module")
def cluster(guarded_cluster: Cluster) -> Cluster:
    """A cluster with a data directory that everybody may enter, and a canary in the payload store and the queue."""
    answer = guarded_cluster.encode([MARK, f"{MARK} " * 400], authorization=f"Bearer {shared.USER}")
    assert answer.status_code == 200, answer.text
    return guarded_cluster


def processes(cluster: Cluster) -> list[psutil.Process]:
    assert cluster.process is not None
    leader = psutil.Process(cluster.process.pid)
    return [leader, *leader.children(recursive=True)]


def known_secrets(cluster: Cluster) -> set[str]:
    """Return every password and token of this start."""
    all_secrets = {shared.USER, *shared.CANARIES.values()}
    for process in processes(cluster):
        environ = environ_of(process.pid)
        all_secrets |= {value.strip('"') for name, value in environ.items() if name.endswith(SECRETS)}
    access = cluster.access()
    return all_secrets | {access.operator_password, access.admin_token, access.broker_monitor_url.rpartition("/")[2]}


@pytest.fixture(scope="module")
def attack(cluster: Cluster) -> dict[str, Any]:
    """Return the loot of another user of the machine."""
    running_now = processes(cluster)
    ports = {
        connection.laddr.port
        for process in running_now
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    paths = [str(path) for path in cluster.data_dir.rglob("*") if not path.is_dir()]
    assert len(ports) >= 6, "API, metrics, broker, its monitor, config service, worker"
    assert any(path.endswith("access.json") for path in paths)
    assert any("/payloads/" in path for path in paths)
    targets = {
        "ports": sorted(ports),
        "pids": [process.pid for process in running_now],
        "folders": [str(cluster.data_dir)],
        "paths": paths,
    }
    done = subprocess.run(
        [sys.executable, str(ATTACKER), json.dumps(targets)], capture_output=True, text=True, timeout=300, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["uid"] == local_user.NOBODY
    return report


def test_no_port_tells_or_takes_anything(cluster: Cluster, attack: dict[str, Any]) -> None:
    """The exceptions are probes and metrics, which never need a token, and the page of the console."""
    config = cluster.access().config_url.rpartition(":")[2]
    probes = {*OPEN, "/metrics"}
    allowed_at = {str(cluster.port): {*OPEN, "/"}, config: probes, str(cluster.worker_port): probes}
    for port, port_report in attack["ports"].items():
        if port_report["kind"] == "nats":
            assert set(port_report["answers"]) == {"refused"}
            continue
        let_in = {path for path, status in port_report["answers"].items() if 200 <= status < 400}
        allowed = allowed_at.get(port, {*probes, SCALING})
        assert let_in <= allowed, (port, let_in - allowed)
        assert all(status in (200, 401, 403, 404, 405, 426) for status in port_report["answers"].values()), (
            port,
            port_report["answers"],
        )
    monitor = cluster.access().broker_monitor_url.rpartition("/")[0].rpartition(":")[2]
    assert set(attack["ports"][monitor]["answers"].values()) == {404}


def test_no_file_no_socket_and_no_process_opens(attack: dict[str, Any]) -> None:
    assert attack["files"] == {"read": [], "written": [], "sockets": [], "placed": []}
    assert [attack[kind] for kind in ("named", "abstract", "processes")] == [[], [], []]


def test_what_it_got_holds_no_secret_and_no_input(cluster: Cluster, attack: dict[str, Any]) -> None:
    """Answers, command lines, files and the log hold none."""
    loot, log = attack["loot"], "\n".join(cluster.lines)
    assert "sie_gateway" in loot, "it got the metrics at least"
    for secret in known_secrets(cluster) | {MARK, base64.b64encode(MARK.encode()).decode()}:
        assert secret not in loot
        assert secret not in log


def test_nothing_was_written(cluster: Cluster, attack: dict[str, Any]) -> None:
    assert attack["ports"]
    argv = [SIE, "keys", "list", "--data-dir", str(cluster.data_dir)]
    keys = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert keys.stdout == "no keys\n"
    models = httpx.get(f"{cluster.url}/v1/models", headers={"authorization": shared.USER}, timeout=10).text
    assert "evil/code" not in models
    assert MODEL in models
