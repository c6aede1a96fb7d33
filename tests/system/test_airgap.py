"""An air-gap archive is loaded and served without a network, while strace records every attempted connection."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import local_models
import pytest
from cluster import MODEL, SIE, free_ports, running, until
from oracle import model_folder

pytestmark = pytest.mark.debian

# in bfloat16 two loads differ in the last bits on some CPUs (seen: AMD with AVX512-BF16)
PRECISION = ("--default-compute-precision", "float32")
MODELS = (MODEL, "test/dense")
TEXTS = ["Hello", "A river runs north beside the old railway, and nobody knows its name."]
TRACE = ("strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=connect", "-e", "signal=none", "-o")
_CONNECT = re.compile(r'connect\(\d+, \{sa_family=AF_INET6?, sin6?_port=htons\((\d+)\).*?"([^"]+)"')
DNS = 53


def attempts(trace: Path) -> tuple[list[str], int]:
    """Return the attempted connections to other machines or to any name server, and the number of all attempts."""
    lines = [line for line in trace.read_text().splitlines() if "AF_INET" in line]
    strange = []
    for line in lines:
        match = _CONNECT.search(line)
        if match is None or int(match[1]) == DNS or not ipaddress.ip_address(match[2]).is_loopback:
            strange.append(line)
    return strange, len(lines)


def asked(url: str) -> dict[str, Any]:
    """Return fingerprints and vectors of TEXTS for each model, once it is loaded. Each text has a request of its own,
    because batch mates change the last bits.
    """

    def answered(model: str, text: str) -> httpx.Response | None:
        try:
            response = httpx.post(f"{url}/v1/encode/{model}", json={"items": [{"text": text}]}, timeout=120)
        except httpx.TransportError:
            return None
        return None if response.status_code == 503 else response

    answers: dict[str, Any] = {}
    for model in MODELS:
        pairs = []
        for text in TEXTS:
            answer = until(lambda model=model, text=text: answered(model, text), 120, f"an answer of {model}")
            assert isinstance(answer, httpx.Response)
            assert answer.status_code == 200, answer.text
            pairs.append([answer.headers["x-sie-fingerprint"], answer.json()["items"][0]["dense"]["values"]])
        answers[model] = pairs
    return answers


def without_network(
    *command: str, hidden: tuple[Path, ...] = (), timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a command in a network namespace that has only loopback, with the folders `hidden` empty."""
    steps = ["ip link set lo up", *(f"mount -t tmpfs none {folder}" for folder in hidden), 'exec "$@"']
    inside = ["unshare", "--net", "--mount", "sh", "-c", " && ".join(steps), "sh", *command]
    return subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.timeout(400)
def test_load_serve_and_encode_try_no_connection_where_there_is_no_network(tmp_path: Path) -> None:
    """MiniLM and a random model are served without the package and the folder that they came from.

    1. A machine with a network encodes the texts and makes the archive.
    2. In a namespace without a route, `sie airgap load` and `sie airgap serve` run under strace, and the same texts are
       encoded. Between the two commands the folder is mounted read-only.
    3. Vectors and fingerprints are equal to the last bit. No process tries a connection beyond loopback or a look-up of
       a name.
    """
    office, site = tmp_path / "office", tmp_path / "site"
    site.mkdir()
    models = local_models.under(office)
    models.build("dense")
    overlay = ["--models-dir", str(models.folder)]
    with running(tmp_path / "data", "--standalone", "--no-spare", *PRECISION, *overlay) as cluster:
        before = asked(cluster.url)
    archive = site / "models.tar"
    subprocess.run(
        [SIE, "airgap", "create", "--models", ",".join(MODELS), "-o", str(archive), *overlay], check=True, timeout=60
    )
    port, worker_port = free_ports(2)
    folder = str(site / "airgap")
    load = [*TRACE, str(site / "load.txt"), SIE, "airgap", "load", str(archive), "--folder", folder]
    serve = [
        *TRACE,
        str(site / "serve.txt"),
        SIE,
        "airgap",
        "serve",
        "--folder",
        folder,
        "--port",
        str(port),
        "--data-dir",
        str(site / "data"),
        "--gateway-metrics-port",
        "0",
        "--worker-metrics-port",
        str(worker_port),
        "--no-spare",
        "--exit-with-parent",
        *PRECISION,
    ]
    script = f"""
import json, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import psutil
from test_airgap import asked
subprocess.run({load!r}, check=True, stdout=sys.stderr)
for how in (["--bind", {folder!r}], ["-o", "remount,ro,bind"]):
    subprocess.run(["mount", *how, {folder!r}], check=True)
serve = subprocess.Popen({serve!r}, stdout=sys.stderr)
try:
    print(json.dumps(asked("http://127.0.0.1:{port}")))
finally:
    for child in psutil.Process(serve.pid).children():
        child.terminate()
    status = serve.wait(30)
sys.exit(status)
"""
    done = without_network(sys.executable, "-c", script, hidden=(office, model_folder()))
    assert done.returncode == 0, done.stderr[-5000:]
    after = json.loads(done.stdout)
    assert after.keys() == before.keys()
    for model in MODELS:
        assert after[model] == before[model], model
    for trace in ("load.txt", "serve.txt"):
        strange, _ = attempts(site / trace)
        assert strange == [], trace
    assert attempts(site / "serve.txt")[1] > 0  # the processes of `sie` connect to each other over loopback


def test_a_connection_that_is_tried_is_counted(tmp_path: Path) -> None:
    """`attempts` sees a look-up of a name, an IPv4 address and an IPv6 address, though none of them answers."""
    code = """
import socket
places = [("192.0.2.1", 443), ("2001:db8::1", 443), ("127.0.0.1", 9)]
connects = [lambda place=place: socket.create_connection(place, 2) for place in places]
for reach in (lambda: socket.getaddrinfo("huggingface.co", 443), *connects):
    try:
        reach()
    except OSError:
        pass
"""
    done = without_network(*TRACE, str(tmp_path / "trace.txt"), sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    strange, count = attempts(tmp_path / "trace.txt")
    text = "\n".join(strange)
    assert "htons(53)" in text
    assert "192.0.2.1" in text
    assert "2001:db8::1" in text
    assert count > len(strange)  # the connection to loopback is not strange
