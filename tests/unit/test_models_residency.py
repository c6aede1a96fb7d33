"""`sie models load` and `unload` with `--wait`, with a gateway of several lanes and a clock of the test, and with a
gateway that restarts.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import msgspec
import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.models import residency

T = TypeVar("T")


@pytest.mark.parametrize(("timeout_s", "last_s"), [(10, 8.0), (10, 11.0), (20, 15.0)])
def test_the_timeout_is_that_of_all_lanes_together(
    monkeypatch: pytest.MonkeyPatch, timeout_s: int, last_s: float
) -> None:
    """The worker of the first lane unloads the model after 7 s, that of the second after `last_s`."""
    ends_s, now_s = {"w1": 7.0, "w2": last_s}, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Gateway:
        url = "http://gateway"

        def __init__(self, cluster: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def first(self, method: str, path: str, body_type: type[T], **content: Any) -> T:
            lane = {"model": "m", "state": "loaded", "lane": "l"}
            lanes = [lane | {"workers": [{"worker": name, "state": "loaded", "in_flight": 0}]} for name in ends_s]
            return msgspec.convert({"name": "m", "lanes": lanes, "state": "loaded"}, body_type)

        def request(self, method: str, path: str, body_type: type[T]) -> T:
            workers = [name for name, end_s in ends_s.items() if now_s < end_s]
            return msgspec.convert({"state": "loaded", "loaded": True, "workers": workers}, body_type)

    monkeypatch.setattr(residency, "AdminClient", Gateway)
    monkeypatch.setattr(residency, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    ran = CliRunner().invoke(main, ["models", "unload", "m", "--wait", "--timeout", str(timeout_s)])
    assert ran.exit_code == (last_s > timeout_s), ran.output
    assert now_s <= timeout_s
    assert ("m: unloaded by w2" in ran.stdout) == (last_s <= timeout_s)


@pytest.mark.parametrize("outage", ["no answer", "not ready", "no answer of a proxy"])
@pytest.mark.parametrize("interrupted", [("GET", 2), ("POST", 3)])
def test_a_wait_for_a_load_survives_a_restart_of_the_gateway(
    monkeypatch: pytest.MonkeyPatch, interrupted: tuple[str, int], outage: str
) -> None:
    monkeypatch.setattr(residency, "POLL_S", 0.01)
    unready = {"error": {"code": "NOT_READY", "message": "the catalogue is not read yet", "retryable": True}}
    lost = {"no answer": None, "not ready": (503, json.dumps(unready)), "no answer of a proxy": (502, "<html>")}[outage]
    described = {"state": "loaded", "loaded": True, "workers": ["w0"]}
    lane = {"model": "m", "lane": "l", "workers": []}
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            requests.append(self.command)
            state = "loading" if len(requests) == 1 else "loaded"
            body = {"name": "m", "lanes": [lane | {"state": state}], "state": state}
            status, text = 200, json.dumps(described if self.command == "GET" else body)
            if (self.command, len(requests)) == interrupted:
                if lost is None:
                    return  # the connection is closed without an answer
                status, text = lost
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        ran = CliRunner().invoke(main, ["models", "load", "m", "--wait", "--timeout", "30", "--url", url])
        server.shutdown()
    assert (ran.exit_code, "m: loaded by w0" in ran.stdout) == (0, True), ran.output
    assert requests == ["POST", "GET", *(["GET"] if interrupted[0] == "GET" else ["POST", "GET"]), "POST"]
