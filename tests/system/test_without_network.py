"""Pulled weights are served without a network, while strace records every attempted connection."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, SIE, free_ports, until
from hub_stub import HubStub
from oracle import model_folder

from sie_runtime.feed import packaged_catalogue

pytestmark = pytest.mark.debian

PULLED = "thenlper/gte-small"
TRACE = ("strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=connect", "-e", "signal=none", "-o")
_CONNECT = re.compile(r'connect\(\d+, \{sa_family=AF_INET6?, sin6?_port=htons\((\d+)\).*?"([^"]+)"')
DNS = 53


def attempts(trace: Path) -> tuple[list[str], int]:
    """Return the attempted connections to other machines or to any name server, and the number of all attempts."""
    lines = [line for line in trace.read_text().splitlines() if "AF_INET" in line]
    strange = []
    for line in lines:
        match = _CONNECT.search(line)
        if match is None or int(match[1]) == DNS or not ip_address(match[2]).is_loopback:
            strange.append(line)
    return strange, len(lines)


def encode(url: str, model: str) -> None:
    """Encode a text, once the server is up and the model is loaded."""

    def reply() -> httpx.Response | None:
        try:
            response = httpx.post(f"{url}/v1/encode/{model}", json={"items": [{"text": "Hello"}]}, timeout=120)
        except httpx.TransportError:
            return None
        return None if response.status_code == 503 else response

    response = until(reply, 120, f"a reply of {model}")
    assert isinstance(response, httpx.Response)
    assert response.status_code == 200, response.text


def without_network(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a network namespace that has only loopback."""
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    return subprocess.run(
        inside, env={**os.environ, **environ}, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.timeout(400)
def test_serve_without_network_attempts_no_connection_beyond_loopback(tmp_path: Path) -> None:
    """A model of a package and a model from the local cache are served in a namespace without a route."""
    site = {"SIE_LOCAL_CACHE": str(tmp_path / "cache"), "SIE_MODELS_DIR": str(tmp_path / "models")}
    (tmp_path / "models").mkdir()
    hub = HubStub(commit=packaged_catalogue().entries[PULLED].weights.revision)
    hub.add(PULLED, model_folder())
    with hub.serving():
        environ = {**os.environ, **site, "HF_ENDPOINT": hub.url}
        subprocess.run([SIE, "pull", PULLED], env=environ, check=True, timeout=60)
    port, worker_port = free_ports(2)
    trace = tmp_path / "trace.txt"
    own = ["--port", str(port), "--data-dir", str(tmp_path / "data"), "--worker-metrics-port", str(worker_port)]
    serve = [*TRACE, str(trace), SIE, "serve", "--gateway-metrics-port", "0", "--exit-with-parent", "--no-spare", *own]
    script = f"""
import subprocess, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import psutil
from test_without_network import encode
serve = subprocess.Popen({serve!r}, stdout=sys.stderr)
try:
    for model in {(MODEL, PULLED)!r}:
        encode("http://127.0.0.1:{port}", model)
finally:
    for child in psutil.Process(serve.pid).children():
        child.terminate()
    status = serve.wait(30)
sys.exit(status)
"""
    done = without_network(sys.executable, "-c", script, **site, SIE_HF_FALLBACK="false")
    assert done.returncode == 0, done.stderr[-5000:]
    strange, count = attempts(trace)
    assert strange == []
    assert count > 0  # the processes of `sie` connect to each other over loopback
