"""A reverse proxy that serves a gateway below a prefix, and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


class PrefixProxy:
    """A proxy that forwards `PREFIX/path` to `upstream`, without the prefix if it `strips`. It answers other paths with
    404 and records them in `outside`.
    """

    def __init__(self, upstream: str, prefix: str, *, strips: bool) -> None:
        self.upstream, self.prefix, self.strips = upstream, prefix, strips
        self.outside: list[str] = []
        self.port = 0
        self.client = httpx.Client(trust_env=False, timeout=60)

    def path(self, target: str) -> str | None:
        """Return the path at the gateway, or None for a path outside the prefix."""
        if not (target + "/").startswith(f"{self.prefix}/"):
            self.outside.append(target)
            return None
        return target.removeprefix(self.prefix) or "/" if self.strips else target


@contextlib.contextmanager
def proxying(upstream: str, prefix: str, *, strips: bool) -> Iterator[PrefixProxy]:
    proxy = PrefixProxy(upstream, prefix, strips=strips)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are sent separately, and Nagle would delay the body up to 40 ms

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = proxy.path(self.path)
            if path is None:
                self.send_response(404)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            headers = [(name, value) for name, value in self.headers.items() if name.lower() not in _OF_A_HOP]
            with proxy.client.stream(self.command, f"{proxy.upstream}{path}", headers=headers, content=body) as answer:
                whole = b"".join(answer.iter_raw())
                self.send_response(answer.status_code)
                for name, value in answer.headers.multi_items():
                    if name not in (*_OF_A_HOP, "content-length"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(whole)))
                self.end_headers()
                self.wfile.write(whole)

        do_GET = do_POST = do_PUT = do_DELETE = forward

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with proxy.client, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield proxy
        server.shutdown()
