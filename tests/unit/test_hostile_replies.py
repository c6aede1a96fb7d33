"""Commands at an address where another server answers, or one whose names have what a terminal would obey."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import of_extras
import pytest
from click.testing import CliRunner, Result

from sie_cli import bodies
from sie_cli.main import main
from sie_contracts.api.configs import ConfigModels, ModelHistory, ModelRevisions, Written
from sie_contracts.api.residency import ModelResidency

ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"
JSON = {"content-type": "application/json"}
# command -> the reply of each of its calls
COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "models list": (["models", "list", "--by", "language"], ConfigModels.EXAMPLE),
    "models history": (["models", "history", "m"], ModelHistory.EXAMPLE),
    "models status": (["models", "status", "m"], ModelRevisions.EXAMPLE),
    "models set": (["models", "set", "m", "max_tokens=5"], {**Written.EXAMPLE, "warnings": ["alias_broken"]}),
    "models alias": (["models", "alias", "a", "m"], {**Written.EXAMPLE, **ConfigModels.EXAMPLE}),
    "models rm": (["models", "rm", "m"], Written.EXAMPLE),
    "models rollback": (["models", "rollback", "m", "1"], Written.EXAMPLE),
    "models load": (["models", "load", "m"], ModelResidency.EXAMPLE),
    "models unload": (["models", "unload", "m"], ModelResidency.EXAMPLE),
}
for _of_extra in of_extras.modules("replies"):
    COMMANDS |= _of_extra.COMMANDS
OTHER_FORMS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "list": (200, JSON, b"[]"),
    "null": (200, JSON, b"null"),
    "number": (200, JSON, b"12"),
    "no fields": (200, JSON, b"{}"),
    "nested": (200, JSON, b'{"a":' * 100_000),
    "page": (200, {"content-type": "text/html"}, b"<html>"),
    "not compressed": (200, JSON | {"content-encoding": "gzip"}, b"{}"),
    "refusal, text": (500, JSON, json.dumps({"error": ESCAPE}).encode()),
    "refusal, number": (403, JSON, b'{"error": 5}'),
    "refusal, list": (400, JSON, b'{"error": [1], "errors": 3}'),
    "refusal, escapes": (400, JSON, json.dumps({"error": {"message": ESCAPE, "code": ESCAPE}}).encode()),
    "redirect": (308, {"location": "http://127.0.0.1:1/"}, b""),
}


class _Server(ThreadingHTTPServer):
    reply: tuple[int, dict[str, str], bytes]
    endless = b""  # a piece of the body, which is sent until the client disconnects


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, headers, body = self.server.reply
        self.send_response(status)
        piece = self.server.endless
        # without a length, the body ends with the connection
        length = {} if piece else {"content-length": str(len(body))}
        for name, value in {**headers, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        with contextlib.suppress(ConnectionError):
            while piece:
                self.wfile.write(piece)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def invoked(server: _Server, arguments: list[str]) -> Result:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    result = CliRunner().invoke(main, [*arguments, "--url", url], env={"SIE_ADMIN_TOKEN": "secret"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert all(letter.isprintable() or letter == "\n" for letter in result.output), result.output
    return result


def test_a_reply_of_another_form_is_refused_in_words(server: _Server) -> None:
    for name, (arguments, _) in COMMANDS.items():
        for form in OTHER_FORMS if name == "models list" else ("list", "no fields", "refusal, escapes"):
            server.reply = OTHER_FORMS[form]
            result = invoked(server, arguments)
            assert (result.exit_code, result.stderr[:7]) == (1, "Error: "), (name, form, result.output)


@pytest.mark.parametrize("piece", [bytes(1 << 20), b" "], ids=["huge", "slow"])
def test_a_reply_that_never_ends_is_refused_in_words(
    piece: bytes, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "COMPLETE_S", 60.0 if len(piece) > 1 else 0.2)
    server.reply, server.endless = (200, JSON, b""), piece
    result = invoked(server, COMMANDS["models list"][0])
    assert result.exit_code == 1, result.output
    assert ("more than 67108864 bytes" if len(piece) > 1 else "not complete within 0.2 s") in result.stderr


def escaped(value: Any, key: str = "") -> Any:
    """Return a reply with ESCAPE at the end of each text that is no state and no path of a field."""
    if isinstance(value, dict):
        return {name: escaped(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner, key) for inner in value]
    return value + ESCAPE if isinstance(value, str) and key not in ("state", "tasks", "object") else value


def test_names_in_a_reply_do_not_control_the_terminal(server: _Server) -> None:
    for name, (arguments, body) in COMMANDS.items():
        server.reply = (200, JSON, json.dumps(escaped(body)).encode())
        assert invoked(server, arguments).exit_code == 0, name


def test_an_address_that_is_no_url_is_refused_without_its_password() -> None:
    for url in ("http://u:secret@[::1", "http://a\nb", "http://a..b", "http://xn--/", "ftp://a", "x"):
        result = CliRunner().invoke(main, ["models", "list", "--url", url])
        assert isinstance(result.exception, SystemExit), result.exc_info
        assert "secret" not in result.output


@pytest.mark.parametrize("value", ["\u00e9", "a\nb", "\x1b"])
@pytest.mark.parametrize("name", ["models history", "models list", "models load"])
def test_a_token_or_a_pool_that_no_header_can_have_is_refused_in_words(name: str, value: str) -> None:
    arguments, environ = COMMANDS[name][0], {"SIE_API_KEY": value, "SIE_ADMIN_TOKEN": value}
    if name == "models load":
        arguments, environ = [*arguments, "--pool", value], {}
    result = CliRunner().invoke(main, [*arguments, "--url", "http://127.0.0.1:1"], env=environ)
    assert (result.exit_code, "expected printable ASCII" in result.stderr) == (1, True), result.output
    assert value not in result.stderr.removesuffix("\n")
