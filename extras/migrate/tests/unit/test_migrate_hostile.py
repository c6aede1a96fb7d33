"""`sie migrate` at a cluster that answers anything: each field of each reply in another form, text that a terminal
would obey, replies that stop in the middle, vectors without a meaning, and a corpus that changes.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from job_server import Handler, JobServer

from sie_cli.main import main

WIDTH = 4
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e\nError: forged"
CREATED = "2026-01-01T00:00:00+00:00"
CHECKED = ("alias", "history", "status", "write", "model", "aliased", "encode", "listing", "submitted", "job")


class MigrationServer(JobServer):
    """A gateway and a config service. `mutate` gets the kind and the value of a reply and returns the value to send."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = MigrationHandler
        self.mutate: Callable[[str, Any], Any] = lambda kind, value: value
        self.raw: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.vector: Callable[[int], Any] | None = None  # the new model's vector by the place of the item
        self.target, self.shadow, self.revision = "old/m", "", 1
        self.script = [
            {"state": "completed", "ended_at": 2.0, "counts": {"rows": 60, "done": 60}, "fingerprint": "f-new"}
        ]
        self.kinds: dict[str, Any] = {}

    def begin(self) -> None:
        """Restore the state before any migration."""
        self.jobs.clear()
        self.keys.clear()
        self.target, self.shadow, self.revision = "old/m", "", 1

    def history(self) -> list[dict[str, Any]]:
        first = {"revision": 1, "created_at": CREATED, "operation": "create", "changes": [{"path": "$.alias"}]}
        later = [
            {"revision": number, "created_at": CREATED, "operation": "update", "changes": [{"path": "$.shadow"}]}
            for number in range(self.revision, 1, -1)
        ]
        return [*later, first]


class MigrationHandler(Handler):
    server: MigrationServer

    def answer(self) -> None:
        server, path = self.server, self.path.split("?")[0].removeprefix("/v1/")
        if path.startswith("configs/models/search"):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            match self.command, path.removeprefix("configs/models/search"):
                case "GET", "":
                    shadow = {"model": server.shadow, "share": 0.1} if server.shadow else None
                    self.told("alias", {"id": "search", "alias": [server.target], "shadow": shadow})
                case "GET", "/history":
                    self.told("history", {"revisions": server.history()})
                case "GET", "/status":
                    self.told("status", {"gateways": [{"id": "g-1", "acked": True}]})
                case _:
                    if "dry_run" not in self.path:
                        change = msgspec.json.decode(body)
                        server.revision += 1
                        server.shadow = (change.get("shadow") or {}).get("model", "")
                        server.target = change["alias"][0]["model"] if "alias" in change else server.target
                    self.told("write", {"revision": server.revision})
        elif path == "models/search":
            self.rfile.read(int(self.headers.get("content-length", 0)))
            figures = {"copies": {"done": 3}, "cosine": 0.5, "rank": None, "served_ms": 1.0, "shadow_ms": 2.0}
            shadow = {"model": server.shadow, "share": 0.1, "figures": figures}
            self.told(
                "aliased", {"name": "search", "alias": {"targets": [], **({"shadow": shadow} if server.shadow else {})}}
            )
        elif path.startswith("models/"):
            name = path.removeprefix("models/")
            self.told("model", {"name": name, "dims": {"dense": WIDTH}, "inputs": ["text"], "outputs": ["dense"]})
        elif path.startswith("encode/"):
            items = msgspec.msgpack.decode(self.rfile.read(int(self.headers["content-length"])))["items"]
            draw = np.random.default_rng(len(path))
            vector_of = server.vector if path.endswith("new/m") else None
            values = [vector_of(place) if vector_of else draw.normal(size=WIDTH) for place in range(len(items))]
            vectors = [
                {"dense": {"dims": len(value), "dtype": "float32", "values": _packed(value)}} for value in values
            ]
            value = {
                "model": path.removeprefix("encode/"),
                "items": vectors,
                "timing": {},
                "usage": {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []},
                "fingerprint": "f-old" if path.endswith("old/m") else "f-new",
            }
            self.told("encode", value)
        else:
            super().answer()

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def told(self, kind: str, value: Any) -> None:
        if kind in self.server.raw:
            status, headers, data = self.server.raw[kind]
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            if "content-length" not in headers:
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.server.kinds[kind] = value
        value = self.server.mutate(kind, copy.deepcopy(value))
        self.send(200, msgspec.msgpack.encode(value) if kind == "encode" else msgspec.json.encode(value))

    def reply(self, value: Any, status: int = 200) -> None:
        kind = "job" if self.command == "GET" else "submitted"
        if isinstance(value, dict) and "data" in value:
            kind = "listing"
        self.told(kind, msgspec.to_builtins(value))


def _packed(vector: Any) -> Any:
    return {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [len(vector)], b"data": vector.astype("<f4").tobytes()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MigrationServer]:
    monkeypatch.setattr("sie_migrate.migration.FOLLOW_S", 0.0)
    monkeypatch.setattr("sie_migrate.migration.LOOK_S", 0.01)
    monkeypatch.setattr("sie_client.jobs.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("sie_cli.models.service.RETRY_S", 0.1)
    monkeypatch.setattr("sie_cli.gateway_client.TIMEOUT_S", 1.0)
    running = MigrationServer()
    yield running
    running.close()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(json.dumps({"t": f"text {number}"}) for number in range(60)))
    return path


def migrated(server: MigrationServer, corpus: Path, *more: str) -> Result:
    environ = {"SIE_CONFIG_SERVICE_URL": server.url, "SIE_GATEWAY_URL": server.url, "SIE_ADMIN_TOKEN": "t"}
    line = ["migrate", "search", "new/m", "--corpus", str(corpus), "--text", "{t}", "--shadow-s", "0.01", *more]
    return CliRunner().invoke(main, line, env=environ)


def check_end(done: Result, case: object, limit: int = 10_000) -> None:
    """Check that the command was done or refused, and that a terminal only shows its lines."""
    assert done.exception is None or isinstance(done.exception, SystemExit), (case, repr(done.exception))
    assert done.exit_code in (0, 1, 2), (case, done.output)
    assert all(letter.isprintable() or letter == "\n" for letter in done.output), (case, done.output[:2000])
    assert "\nError: forged" not in done.output, (case, done.output[:2000])
    assert len(done.output) < limit, (case, len(done.output))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the value and of all places in it. Of a list only the first element is entered."""
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    place = value
    try:
        for step in path[:-1]:
            place = place[step]
        if new is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = new
    except (KeyError, IndexError, TypeError):
        return value
    return value


@pytest.mark.parametrize("kind", CHECKED)
def test_a_reply_of_another_form_ends_in_lines(server: MigrationServer, corpus: Path, kind: str) -> None:
    """Each place of a reply of this kind gets one wrong value, or is left out."""
    assert migrated(server, corpus, "--sample", "0").exit_code == 0
    value, turn = copy.deepcopy(server.kinds[kind]), itertools.cycle((ESCAPE, None, -1, [], ...))
    cases = 0
    for path, new in zip(places(value), turn, strict=False):
        if (new is ... and not path) or (path == ("state",) and isinstance(new, str)):
            continue  # a job in a state of a newer server is followed until it has ended
        server.begin()
        server.mutate = lambda sent, value, path=path, new=new: put(value, path, new) if sent == kind else value  # type: ignore[misc]
        check_end(migrated(server, corpus, "--sample", "0"), (kind, path, new))
        cases += 1
    assert cases >= 2


ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "a redirect": (302, {"location": "http://127.0.0.1:9/"}, b""),
    "a redirect to itself": (307, {"location": "/v1/configs/models/search"}, b""),
    "HTML": (200, {"content-type": "text/html"}, b"<html>" + ESCAPE.encode()),
    "nothing": (200, {}, b""),
    "half": (200, {"content-length": "1000"}, b'{"alias":'),
    "deep": (200, {}, b"[" * 100_000),
    "not UTF-8": (200, {}, b'{"alias":["\xff"]}'),
    "a refusal with colours": (409, {}, json.dumps({"error": {"message": ESCAPE * 1000, "code": ESCAPE}}).encode()),
    "a refusal in another form": (400, {}, b'{"error":{"message":[1],"errors":{"a":1},"diff":7}}'),
    "a refusal of nothing": (404, {}, b"null"),
    "a tag in other digits": (200, {"etag": '"\u0663"'.encode().decode("latin-1")}, b'{"revision":1}'),
    "try again": (503, {"x-should-retry": "true", "retry-after": "99999999999999999999"}, b"{}"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_another_server_ends_in_lines(server: MigrationServer, corpus: Path, name: str) -> None:
    for kind in ("alias", "history", "write", "status"):
        server.begin()
        server.raw = {kind: ANSWERS[name]}
        check_end(migrated(server, corpus, "--sample", "0"), (kind, name), 20_000)
        is_written = kind == "status" or (kind == "write" and name == "a tag in other digits")
        assert server.target == ("new/m" if is_written else "old/m"), kind


VECTORS: dict[str, Callable[[int], Any]] = {
    "NaN": lambda place: np.full(WIDTH, np.nan),
    "some NaN": lambda place: np.full(WIDTH, np.nan if place == 7 else place),
    "infinite": lambda place: np.full(WIDTH, np.inf),
    "zero": lambda place: np.zeros(WIDTH),
    "equal": lambda place: np.ones(WIDTH),
    "huge": lambda place: np.full(WIDTH, 3e38),
    "empty": lambda place: np.zeros(0),
    "of different widths": lambda place: np.ones(WIDTH + place % 2),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_that_agree_with_nothing_flip_no_alias(server: MigrationServer, corpus: Path, name: str) -> None:
    server.vector = VECTORS[name]
    done = migrated(server, corpus)
    check_end(done, name)
    assert (done.exit_code, server.target) == (1, "old/m"), done.output


def test_a_corpus_that_changes_is_another_migration_and_one_that_shrinks_is_refused(
    server: MigrationServer, corpus: Path
) -> None:
    assert migrated(server, corpus, "--step", "embed").exit_code == 0
    corpus.write_text(corpus.read_text() + '\n{"t": "another"}')
    again = migrated(server, corpus, "--step", "embed")
    assert again.exit_code == 0, again.output
    assert len({body.metadata["migration"] for body in server.bodies.values()}) == 2
    corpus.write_bytes(b"")
    done = migrated(server, corpus)
    check_end(done, "empty")
    assert (done.exit_code, server.target) == (1, "old/m")


def test_a_migration_runs_to_its_end(server: MigrationServer, corpus: Path) -> None:
    done = migrated(server, corpus)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (server.target, server.shadow) == ("new/m", "")
    assert set(server.kinds) == set(CHECKED)
