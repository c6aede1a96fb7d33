"""A foreign page in a browser attacks the listeners of a real `sie serve` without tokens, as it runs on a laptop.

Another local user is in test_local_users.py, tokens are in test_security.py, malformed bodies in test_fuzz.py.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx
import pytest
import shared
from cluster import MODEL, Cluster

pytestmark = shared.OPEN
ENCODE = f"/v1/encode/{MODEL}"
CALLS = (  # one of each kind
    *(("GET", path) for path in ("/", "/healthz", "/metrics", "/v1/models")),
    *(("POST", path) for path in (ENCODE, "/v1/embeddings", "/v1/pools", "/v1/configs/resolve", "/v1/configs/models")),
    ("DELETE", "/v1/pools/mine"),
    ("PATCH", "/v1/configs/models/a"),
)
# by attack: headers, and the reason of the refusal. A foreign page may send a form or a fetch without CORS, and DNS
# rebinding makes the page and this server one origin to the browser.
ATTACKS = [
    ({"origin": "https://evil.example"}, "origin"),
    ({"origin": "null"}, "origin"),
    ({"sec-fetch-site": "cross-site"}, "origin"),
    *(
        ({"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}, "host")
        for host in ("evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1")
    ),
]


def ports(cluster: Cluster) -> dict[str, int]:
    """Return the port of each HTTP listener."""
    metrics = [line.partition("metrics on ")[2] for line in cluster.lines if "gateway listening" in line]
    config = urlsplit(str(cluster.health()["config_url"])).port
    assert config is not None
    return {"api": cluster.port, "metrics": int(metrics[-1]), "worker": cluster.worker_port, "config": config}


@pytest.mark.parametrize(("headers", "reason"), ATTACKS, ids=lambda value: str(value)[:40])
def test_a_foreign_page_reads_changes_and_computes_nothing(
    open_cluster: Cluster, headers: dict[str, str], reason: str
) -> None:
    """Host and origin are checked before all else, on every listener. Ordinary requests are answered meanwhile."""
    body = '{"items": ["a"], "name": "mine", "gpus": {"cpu": 1}}'
    for listener, port in ports(open_cluster).items():
        for method, path in CALLS:
            if method == "GET" and reason == "origin":
                continue  # a browser keeps the answer from the page
            answer = httpx.request(
                method,
                f"http://127.0.0.1:{port}{path}",
                content=body,
                headers={**headers, "content-type": "text/plain"},
                timeout=60,
            )
            assert (answer.status_code, answer.json()["error"]["reason"]) == (403, reason), (listener, method, path)
            assert "access-control-allow-origin" not in answer.headers
        upgrade = {"host": f"127.0.0.1:{port}", "upgrade": "websocket", "connection": "upgrade"}
        upgrade |= {"sec-websocket-version": "13", "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", **headers}
        lines = ["GET /ws/status HTTP/1.1", *(f"{name}: {value}" for name, value in upgrade.items()), "", ""]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall("\r\n".join(lines).encode())
            assert listener in ("metrics", "config") or connection.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
    assert open_cluster.encode(["Hello"]).status_code == 200
