"""`sie models` against a config service over HTTP. Each error names the field and says what to do next."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result
from config_api import anything
from inprocess import settings_of
from overlays import wanted_models

from sie_adapter.loading import dependencies
from sie_broker.memory import MemoryServer
from sie_cli.cluster import Cluster
from sie_cli.main import main
from sie_cli.models import service as models_service
from sie_cli.models.catalogue import patch_of
from sie_cli.models.service import ConfigServiceClient, WriteOptions
from sie_cli.refusal import CommandRefused
from sie_cli.serve.ports import free_port
from sie_config_service.app import create_app
from sie_config_service.state import ConfigService
from sie_config_service.store import open_store
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import SettingError, load
from sie_runtime.feed import read_bundles
from sie_runtime.http.server import HttpServer
from sie_sidecar.process import _named

ADMIN, READER = "admin-token-of-a-test", "reader-token-of-a-test"
PLAIN = WriteOptions(Cluster(load(environ={}).settings, {}, Path()))
TOKENS = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_CONFIG_READ_TOKEN": READER}
BUNDLES = {
    "default": BundleEntry("default", families=("toy", "text-encoder")),
    "eyes": BundleEntry("eyes", families=("eye",)),
}
ENTRY = """\
id: org/one
weights: {package: x}
family: toy
outputs: {dense: 4}
max_tokens: 16
run: {pooling: mean}
profiles: {v1.5: {run: {normalize: false}}}
"""


class Served:
    """A config service that listens, in a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()

    async def _serve(self) -> None:
        service = ConfigService(settings_of(**TOKENS))
        store = await open_store(MemoryServer().connect("sie-config"), settings_of())
        await store.seed_bundles(BUNDLES)
        service.begin(store, anything())
        server = HttpServer(create_app(service), "127.0.0.1", 0, setting="--port")
        await server.start()
        self.url = f"http://127.0.0.1:{server.port}"
        self._ready.set()
        await self._stop.wait()
        await server.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


def sie(*arguments: str, stdin: str | None = None, token: str = ADMIN, **environ: str) -> Result:
    return CliRunner().invoke(
        main, ["models", *arguments], input=stdin, env={"SIE_ADMIN_TOKEN": token or None, **environ}
    )


def done(*arguments: str, stdin: str | None = None, **environ: str) -> str:
    """Return the output of a command that succeeds."""
    result = sie(*arguments, stdin=stdin, **environ)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def url_of_one(served: Served) -> Iterator[str]:
    """Return the URL of the service, which has org/one as in ENTRY."""
    done("add", "-", "--force", "--url", served.url, stdin=ENTRY)
    yield served.url
    sie("rm", "org/one", "--url", served.url)


def revision_of(url: str, model: str = "org/one") -> int:
    return int(
        httpx.get(f"{url}/v1/configs/models/{model}", headers={"Authorization": ADMIN}).headers["etag"].strip('"')
    )


PUBLIC = """\
sie_id: org/public
hf_id: org/public
hf_revision: abababababababababababababababababababab
tasks: {encode: {dense: {dim: 4}}}
max_sequence_length: 16
profiles:
  default:
    adapter_path: sie_server.adapters.bert_flash:BertFlashAdapter
    adapter_options: {loadtime: {compile: true}, runtime: {pooling: mean}}
"""


def test_a_folder_of_model_files_is_imported(served: Served, tmp_path: Path) -> None:
    at = ("--url", served.url)
    (tmp_path / "nested").mkdir()
    file = tmp_path / "nested" / "public.yaml"
    file.write_text(PUBLIC)
    (tmp_path / "own.yml").write_text(ENTRY.replace("org/one", "org/own"))
    (tmp_path / "other.yaml").write_text(PUBLIC.replace("BertFlash", "GLiFormer").replace("org/public", "org/other"))
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "notes.txt").write_text("no file of a model")
    checked = sie("import", str(tmp_path), "--dry-run", *at)
    assert checked.exit_code == 1
    assert checked.stdout.splitlines() == [
        f"{tmp_path / 'broken.yaml'}: rejected",
        "    $ (line 2): not YAML: did not find expected node content",
        "org/public: added",
        "    profiles.default.adapter_options.loadtime.compile: ignored, it has no counterpart",
        f"{tmp_path / 'other.yaml'}: rejected",
        "    profiles.default.adapter_path (line 8): no family here does what GLiFormerAdapter does; `sie models "
        "inspect` says which family fits a folder",
        "org/own: added",
        "dry run, nothing is stored: 2 rejected, 2 added",
    ]
    assert "2 of 4 files are rejected" in checked.output
    assert sie("show", "org/public", *at).exit_code == 1
    sie("import", str(tmp_path), *at)
    assert yaml.safe_load(done("show", "org/public", *at))["run"] == {"pooling": "mean"}
    (row,) = json.loads(done("import", str(file), "-o", "json", *at))
    assert (row["model_id"], row["state"]) == ("org/public", "unchanged")
    file.write_text(PUBLIC.replace("16", "8"))
    assert "max_tokens: 16 -> 8" in sie("import", str(file), *at).output
    assert "org/public: replaced" in done("import", str(file), "--force", *at)
    assert "sie_id (line 1)" in (refused := sie("add", str(file), *at).output)
    assert "`sie models import` translates them" in refused
    (tmp_path / "empty").mkdir()
    assert "has no file that ends in .yaml or .yml" in sie("import", str(tmp_path / "empty"), *at).output
    done("rm", "org/public", *at)
    done("rm", "org/own", *at)


def test_an_import_that_stops_in_the_middle_prints_the_stored_files(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ConfigServiceClient.add

    def add_first(service: ConfigServiceClient, model: str, *arguments: Any, **options: Any) -> Any:
        if model == "org/b":
            raise CommandRefused("the config service does not answer")
        return add(service, model, *arguments, **options)

    monkeypatch.setattr(ConfigServiceClient, "add", add_first)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text(ENTRY.replace("org/one", f"org/{name}"))
    result = sie("import", str(tmp_path), "--url", served.url)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["org/a: added", "1 added"]
    assert "does not answer" in result.stderr
    done("rm", "org/a", "--url", served.url)


def test_an_import_ends_at_once_where_the_service_takes_no_file(served: Served, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(PUBLIC)
    result = sie("import", str(tmp_path), "--url", served.url, token="wrong")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "rejected" not in result.output


def test_a_model_is_added_shown_changed_rolled_back_and_removed(served: Served, tmp_path: Path) -> None:
    at = ("--url", served.url)
    file = tmp_path / "two.yaml"
    file.write_text(ENTRY.replace("org/one", "org/two"))
    assert "dry run, nothing is stored: org/two would be at revision 1" in done("add", str(file), "--dry-run", *at)
    assert sie("show", "org/two", *at).exit_code == 1
    assert done("add", str(file), *at) == "org/two is at revision 1\nnew profiles: default, v1.5\n"
    assert done("add", str(file), *at) == "org/two is at revision 1\nunchanged profiles: default, v1.5\n"
    assert yaml.safe_load(done("show", "org/two", *at)) == yaml.safe_load(file.read_text())
    assert "run.pooling" in done("show", "org/two", "-o", "table", *at)
    done(
        "set",
        "org/two",
        "max_tokens=8",
        'profiles."v1.5".run.dimensions=[2]',
        "run.pooling=null",
        "--if-match",
        "1",
        *at,
    )
    shown = json.loads(done("show", "org/two", "-o", "json", *at))
    assert (shown["max_tokens"], shown["profiles"]["v1.5"]["run"]) == (8, {"normalize": False, "dimensions": [2]})
    assert "pooling" not in shown.get("run", {})
    assert done("set", "org/two", "-f", str(file), *at) == "org/two is at revision 3\n"
    assert done("rollback", "org/two", "2", *at).startswith("org/two is at revision 4")
    assert json.loads(done("rm", "org/two", "-o", "json", *at))["revision"] == 5
    history = yaml.safe_load(done("history", "org/two", "-o", "yaml", *at))
    assert [revision["operation"] for revision in history["revisions"]] == [
        "delete",
        "rollback",
        "put",
        "patch",
        "create",
    ]
    assert {revision["author"] for revision in history["revisions"]} == {"SIE_ADMIN_TOKEN"}
    patched = {
        change["path"]: (change.get("before"), change.get("after")) for change in history["revisions"][3]["changes"]
    }
    assert patched["$.max_tokens"][1] == 8
    (line,) = [line for line in done("history", "org/two", *at).splitlines() if " patch " in line]
    assert re.search(r"^2 +patch +\S+ +SIE_ADMIN_TOKEN +.*max_tokens: \S+ -> 8", line), line
    done("rollback", "org/two", "1", *at)
    done("set", "org/two", "download_bytes=91234567", *at)
    assert re.search(r"^org/two +encode +91 MB +default, v1.5 +api$", done("list", *at), re.MULTILINE)
    assert "revision 7 from api" in done("status", "org/two", *at)
    assert "org/two: revision" in done("status", "org/two", SIE_CONFIG_SERVICE_URL=served.url)
    done("rm", "org/two", *at)


def test_models_are_listed_by_task_and_by_language(url_of_one: str) -> None:
    file = '{"id": "org/%s", "weights": {"path": "/x"}, "family": "text-encoder", "outputs": {"%s": 4}, "max_tokens": 8'
    for name, output, languages in (
        ("german", "dense", '"languages": ["de", "en"]'),
        ("many", "multivector", '"languages": ["multilingual"]'),
    ):
        done("add", "-", "--url", url_of_one, stdin=f"{file % (name, output)}, {languages}}}")

    def ids(*options: str) -> list[str]:
        listed = json.loads(done("list", *options, "-o", "json", "--url", url_of_one))["models"]
        return [model["model_id"] for model in listed if model["model_id"] != "org/one"]

    assert ids() == ["org/german", "org/many"]
    assert ids("--task", "score") == ["org/many"]
    assert ids("--language", "de") == ["org/german", "org/many"]
    assert ids("--language", "fr") == ["org/many"]
    grouped = done("list", "--by", "language", "--url", url_of_one)
    assert [line for line in grouped.splitlines() if line.endswith(("model", "models"))] == [
        "de: 1 model",
        "en: 1 model",
        "multilingual: 1 model",
        "not stated: 1 model",
    ]
    done("set", "org/many", "download_bytes=2000000001", "--url", url_of_one)
    by_size = done("list", "--by", "size", "--url", url_of_one)
    assert [line for line in by_size.splitlines() if line.endswith(("model", "models"))] == [
        "up to 8 GB: 1 model",
        "not stated: 2 models",
    ]
    assert done("list", "--task", "extract", "--url", url_of_one).endswith("no models\n")
    done("rm", "org/german", "--url", url_of_one)
    done("rm", "org/many", "--url", url_of_one)


def test_what_show_prints_is_added_under_another_id(url_of_one: str) -> None:
    shown = done("show", "org/one", "-o", "json", "--url", url_of_one)
    done("add", "-", "--url", url_of_one, stdin=shown.replace("org/one", "org/copy"))
    assert done("show", "org/copy", "-o", "json", "--url", url_of_one) == shown.replace("org/one", "org/copy")
    done("rm", "org/copy", "--url", url_of_one)


def test_a_read_token_is_enough_to_look(url_of_one: str) -> None:
    assert "org/one" in done("list", "--url", url_of_one, token="", SIE_CONFIG_READ_TOKEN=READER)
    refused = sie("rm", "org/one", "--url", url_of_one, token=READER)
    assert refused.exit_code == 1
    assert "SIE_ADMIN_TOKEN" in refused.output


def test_add_writes_a_file_or_asks_a_service_and_says_which(served: Served, tmp_path: Path) -> None:
    folder, entry = tmp_path / "models", tmp_path / "entry.yaml"
    entry.write_text(ENTRY.replace("org/one", "org/file"))
    output = done("add", str(entry), "--models-dir", str(folder), "--dry-run")
    assert "nothing is written" in output
    assert not folder.exists()
    output = done("add", str(entry), "--models-dir", str(folder), SIE_CONFIG_SERVICE_URL=served.url)
    assert f"wrote {folder}/org/file.yaml\nonly a file was written: no `sie serve` runs with" in output
    assert [file.name for file in (folder / "org").iterdir()] == ["file.yaml"]
    assert "--force replaces it" in sie("add", str(entry), "--models-dir", str(folder)).output
    packaged = tmp_path / "packaged.yaml"
    packaged.write_text(ENTRY.replace("org/one", "sentence-transformers/all-MiniLM-L6-v2"))
    refused = sie("add", str(packaged), "--models-dir", str(folder))
    assert refused.exit_code != 0
    assert "is a model of the packaged catalogue: --force replaces it" in refused.output
    assert done("add", str(entry), SIE_CONFIG_SERVICE_URL=served.url).startswith("org/file is at revision")
    done("rm", "org/file", "--url", served.url)


@pytest.mark.parametrize(
    ("folder", "encoding", "message"),
    [
        ("entry.yaml", "utf-8", "entry.yaml/org"),  # a file
        ("/proc/absent", "utf-8", "/proc/absent"),
        ("models", "utf-16", "entry.yaml is not UTF-8"),
    ],
)
def test_an_entry_that_cannot_be_read_or_written_is_refused_in_one_line(
    tmp_path: Path, folder: str, encoding: str, message: str
) -> None:
    entry = tmp_path / "entry.yaml"
    entry.write_text(ENTRY, encoding)
    refused = sie("add", str(entry), "--models-dir", str(tmp_path / folder))
    assert (refused.exit_code, refused.output.splitlines()[-1].count(message)) == (1, 1), refused.output


class Others(BaseHTTPRequestHandler):
    """Servers that are no config service: a gateway, and web pages."""

    def _answer(self) -> None:
        refused = {"error": {"code": "METHOD_NOT_ALLOWED", "message": "this path takes GET here"}}
        replies: dict[str, tuple[int, bytes]] = {
            "/health": (200, b'{"config_url": "http://config:81"}'),
            "/v1/configs/models/org/one": (405, json.dumps(refused).encode()),
            "/text/v1/configs/models": (200, b"<html>"),
        }
        status, body = replies.get(self.path, (404, b"<html>"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Others) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Flaky(httpx.BaseTransport):
    """A transport that has these outcomes in turn and records the idempotency keys."""

    def __init__(self, outcomes: Sequence[httpx.Response | Exception]) -> None:
        self.outcomes = list(outcomes)
        self.keys: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["idempotency-key"])
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_write_keeps_its_key_over_retries_and_the_next_one_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_service, "FIRST_PAUSE_S", 0.001)
    busy = httpx.Response(
        503, headers={"x-should-retry": "true", "retry-after": "0"}, json={"error": {"code": "QUEUE_UNAVAILABLE"}}
    )
    flaky = Flaky([httpx.ReadTimeout("no answer"), busy, httpx.Response(200, json={}), httpx.Response(200, json={})])
    with ConfigServiceClient("http://config", ADMIN, flaky) as service:
        service.write("PATCH", "/v1/configs/models/a", b"{}", how=PLAIN, body_type=Any)
        service.write("PATCH", "/v1/configs/models/a", b"{}", how=PLAIN, body_type=Any)
    first, again, third, second_key = flaky.keys
    assert first == again == third != second_key


@pytest.mark.parametrize("after", ["Wed, 21 Oct 2026 07:28:00 GMT", "soon", "-1", "nan", ""])
def test_a_time_to_wait_that_is_no_number_of_seconds_is_waited_for_all_the_same(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy before the service may send such a time."""
    monkeypatch.setattr(models_service, "MAX_PAUSE_S", 0.001)
    busy = httpx.Response(503, headers={"x-should-retry": "true", "retry-after": after}, json={})
    flaky = Flaky([busy, httpx.Response(200, json={"is": "done"})])
    with ConfigServiceClient("http://config", ADMIN, flaky) as service:
        assert service.write("PATCH", "/v1/configs/models/a", b"{}", how=PLAIN, body_type=Any).body == {"is": "done"}


def test_a_patch_is_made_of_fields() -> None:
    assert patch_of(["a.b=1", "a.c=null", 'x."y.z".w=[1, 2]', "t=text", "e=", "p=query: {text}", "m={c: 1}"]) == {
        "a": {"b": 1, "c": None},
        "x": {"y.z": {"w": [1, 2]}},
        "t": "text",
        "e": None,
        "p": "query: {text}",
        "m": {"c": 1},
    }


BIG = "x: " + "y" * (1 << 20)
COMMANDS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "a wrong id": (("show", "org/oen"), 1, ("no model named 'org/oen'", "did you mean org/one")),
    "an id like no other": (("rm", "zzz"), 1, ("no model named 'zzz'", "GET /v1/configs/models lists all models")),
    "an unknown field": (("set", "org/one", "max_token=8"), 1, ("max_token:", "did you mean `max_tokens`?")),
    "a field of elsewhere": (("set", "org/one", "pooling=cls"), 1, ("pooling:", "did you mean `run.pooling`")),
    "a wrong type": (
        ("set", "org/one", "max_tokens=many"),
        1,
        ("max_tokens:", "expected a whole number, got a string"),
    ),
    "neither true nor false": (
        ("set", "org/one", "run.normalize=often"),
        1,
        ("Error: run.normalize", "expected true, false or null, got a string"),
    ),
    "a wrong value": (
        ("set", "org/one", "run.pooling=median"),
        1,
        ("run.pooling:", "expected one of cls, mean, last, weighted, max, sqrt", "got 'median'"),
    ),
    "a wrong value in a profile": (
        ("set", "org/one", 'profiles."v1.5".run.pooling=x'),
        1,
        ("profiles.v1.5.run.pooling:", "expected one of cls"),
    ),
    "another id than the path's": (("set", "org/one", "id=org/two"), 1, ("id:", "expected 'org/one'")),
    "an unknown bundle": (
        ("set", "org/one", "bundle=ears"),
        1,
        ("bundle:", "there is no bundle 'ears'; name default, or none"),
    ),
    "a bundle without the family": (
        ("set", "org/one", "bundle=eyes"),
        1,
        ("bundle:", "has no family 'toy'; name default, or none"),
    ),
    "a family of no bundle": (
        ("set", "org/one", "family=nose"),
        1,
        ("family:", "no bundle can serve", "default has toy, text-encoder; eyes has eye"),
    ),
    "a branch": (
        ("set", "org/one", "weights.hub=a/b", "weights.revision=main"),
        1,
        ("weights.revision:", "40 hex", "sie models add"),
    ),
    "a stale revision": (
        ("set", "org/one", "max_tokens=9", "--if-match", "{stale}"),
        1,
        ("max_tokens: 16 -> 8", "sie models show", "--if-match {revision}"),
    ),
    "a model that is there": (
        ("add", "{file}"),
        1,
        (
            "  max_tokens: 8 -> 16",
            "PUT replaces, PATCH changes",
            "replace it with --force; add --if-match {revision} to replace only this revision",
        ),
    ),
    "an unknown revision": (
        ("rollback", "org/one", "9999"),
        1,
        ("org/one has no revision 9999; the stored revisions are {revision}",),
    ),
    "a removed model": (
        ("show", "org/gone"),
        1,
        ("org/gone was removed", "roll back to an earlier revision", "POST the model again"),
    ),
    "a removal": (
        ("rollback", "org/gone", "{removal}"),
        1,
        ("revision:", "is a removal", "roll back to an earlier revision"),
    ),
    "broken YAML": (("add", "{broken}"), 1, ("$ (line 2)", "not YAML")),
    "a duplicate key": (("set", "org/one", "-f", "{twice}"), 1, ("(line 2)", "only once", "'id' twice")),
    "too much": (("set", "org/one", "-f", "{big}"), 1, ("body: expected at most 1048576 bytes",)),
    "no such file": (("set", "org/one", "-f", "{missing}"), 2, ("No such file",)),
    "neither field nor file": (("set", "org/one"), 2, ("FIELD=VALUE", "-f FILE")),
    "no value": (
        ("set", "org/one", "max_tokens"),
        2,
        ("'max_tokens'", "expected FIELD=VALUE such as run.pooling=mean"),
    ),
    "a value that is no YAML": (("set", "org/one", "family=[a"), 2, ("family: the value is not YAML", "quoted twice")),
    "a value that its tag does not have": (
        ("set", "org/one", "family=!!bool q"),
        2,
        ("family: the value is not YAML",),
    ),
    "a number with too many digits": (
        ("set", "org/one", f"family={'9' * 5000}"),
        2,
        ("family: the value is a whole number of more than 100 digits",),
    ),
    "a field twice": (("set", "org/one", "a=1", "a=2"), 2, ("a: occurs twice",)),
    "both ways": (
        ("add", "{file}", "--models-dir", "x"),
        2,
        ("--models-dir writes a file, --url sends the entry to a config service",),
    ),
    "no model there": (("add", "./nowhere"), 1, ("there is no folder ./nowhere", "organisation/name")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_refusal_names_the_field_and_says_what_to_do(name: str, url_of_one: str, tmp_path: Path) -> None:
    """Each command has a mistake that a new user makes."""
    arguments, status, says = COMMANDS[name]
    stale = revision_of(url_of_one)
    done("set", "org/one", "max_tokens=8", "--url", url_of_one)
    if "org/gone" in arguments:
        done("add", "-", "--force", "--url", url_of_one, stdin=ENTRY.replace("org/one", "org/gone"))
        removal = json.loads(done("rm", "org/gone", "-o", "json", "--url", url_of_one))["revision"]
    else:
        removal = 0
    texts = {"file": ENTRY, "broken": "id: [\n", "twice": "id: a\nid: b\n", "big": BIG}
    places: dict[str, Any] = {key: tmp_path / f"{key}.yaml" for key in texts}
    for key, text in texts.items():
        places[key].write_text(text)
    places |= {"missing": tmp_path / "missing.yaml", "stale": stale, "revision": stale + 1, "removal": removal}
    refused = sie(*(argument.format(**places) for argument in arguments), "--url", url_of_one)
    assert refused.exit_code == status, refused.output
    for text in says:
        assert text.format(**places) in refused.output, refused.output
    assert "Traceback" not in refused.output
    assert ADMIN not in refused.output


ACCESS: dict[str, tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]] = {
    "no token": ({"token": ""}, ("rm", "org/one"), ("a token is missing", "set SIE_ADMIN_TOKEN")),
    "a wrong token": (
        {"token": "wrong"},
        ("list",),
        ("this token is not known", "set SIE_ADMIN_TOKEN here to the token that the config service"),
    ),
    "the read token": ({"token": READER}, ("rm", "org/one"), ("the read token permits only reads", "SIE_ADMIN_TOKEN")),
    "no address": (
        {"url": ""},
        ("list",),
        (
            "no `sie serve` runs with",
            "start one with `sie serve`",
            "--url",
            "SIE_CONFIG_SERVICE_URL",
            "/health of a gateway",
        ),
    ),
    "no URL": ({"url": "config:80"}, ("list",), ("SIE_CONFIG_SERVICE_URL", "http://...")),
    "nobody there": (
        {"url": "{nobody}"},
        ("list",),
        ("no answer from {nobody}", "is it running", "config_url", "--url"),
    ),
    "somebody else": (
        {"url": "{other}/site"},
        ("list",),
        ("{other}/site replied with status 404, in another form than a config service", "--url"),
    ),
    "another answer": (
        {"url": "{other}/text"},
        ("list",),
        ("{other}/text replied in another form than a config service", "--url"),
    ),
    "a gateway": (
        {"url": "{other}"},
        ("rm", "org/one"),
        ("this path takes GET", "{other} is a gateway", "use --url http://config:81"),
    ),
}


@pytest.mark.parametrize("name", ACCESS)
def test_who_is_not_let_in_or_finds_nobody_is_told_what_to_do(
    name: str, served: Served, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_service, "RETRY_S", 0.1)
    token, arguments, says = ACCESS[name]
    places = {"nobody": f"http://127.0.0.1:{free_port()}", "other": other}
    url = token.get("url", served.url).format(**places)
    refused = sie(*arguments, *(("--url", url) if url else ()), token=token.get("token", ADMIN))
    assert refused.exit_code in (1, 2)
    for text in says:
        assert text.format(**places) in refused.output, refused.output
    assert "Traceback" not in refused.output


CALLS: dict[str, tuple[str, str, dict[str, str], bytes, int, tuple[str, ...]]] = {
    "a key of another write": (
        "PATCH",
        "/models/org/one",
        {"Idempotency-Key": "k"},
        b'{"max_tokens": 3}',
        422,
        ("another", "a new key"),
    ),
    "a long key": (
        "DELETE",
        "/models/org/one",
        {"Idempotency-Key": "k" * 256},
        b"",
        400,
        ("Idempotency-Key: expected at most 255",),
    ),
    "no revision": (
        "DELETE",
        "/models/org/one",
        {"If-Match": "*"},
        b"",
        400,
        ("If-Match: expected the number of a revision", "'*'"),
    ),
    "no flag": ("DELETE", "/models/org/one?dry_run=1", {}, b"", 400, ("dry_run: expected true or false, got '1'",)),
    "no such flag": (
        "DELETE",
        "/models/org/one?dryrun=true",
        {},
        b"",
        400,
        ("dryrun: no such parameter", "did you mean `dry_run`?"),
    ),
    "no map": ("PATCH", "/models/org/one", {}, b"[]", 422, ("$: expected a map, got list",)),
    "no revision to go to": (
        "POST",
        "/models/org/one/rollback",
        {},
        b"{}",
        422,
        ("$.revision: expected {revision: N}", "/history lists"),
    ),
    "a reserved id": (
        "POST",
        "/models",
        {},
        json.dumps({**yaml.safe_load(ENTRY), "id": "org/status"}).encode(),
        422,
        ("$.id: id 'org/status' is not of the form", "or ends with /status"),
    ),
    "another method": ("PUT", "/models", {}, b"{}", 405, ("this path takes GET, POST, HEAD, OPTIONS",)),
    "another path": ("GET", "/none", {}, b"", 404, ("no such path; see /docs",)),
    "steps up": ("GET", "/models/a/%2e%2e/b", {}, b"", 400, ("`..`",)),
    "another bundle": ("GET", "/bundles/ears", {}, b"", 404, ("no bundle named 'ears'; there are default, eyes",)),
    "a bundle that cannot": (
        "POST",
        "/resolve",
        {},
        b'{"model": "eyes:/org/one"}',
        409,
        ("'eyes' does not serve", "name the bundle default"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_error_of_the_api_says_what_is_expected(name: str, url_of_one: str) -> None:
    """The reply has the common envelope of errors, and `detail.error` beside it."""
    method, path, headers, body, status, says = CALLS[name]
    with httpx.Client(
        headers={"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json", "X-Request-ID": "mine"}
    ) as client:
        client.patch(
            f"{url_of_one}/v1/configs/models/org/one", content=b'{"max_tokens": 2}', headers={"Idempotency-Key": "k"}
        )
        answer = client.request(method, f"{url_of_one}/v1/configs{path}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    report = answer.json()
    for text in says:
        assert text in report["error"]["message"], report["error"]["message"]
    assert report["error"] == {key: value for key, value in report["detail"].items() if key != "error"}
    assert report["detail"]["error"] == report["code"].lower()
    assert answer.headers["x-sie-error-code"] == report["code"]
    assert answer.headers["x-request-id"] == "mine" != answer.headers["x-sie-request-id"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("add", "some/model"),
            "the commit of some/model could not be looked up: some/model could not be downloaded: ConnectError",
        ),
        (
            ("add", "some/model", "--revision", "a" * 40),
            "check the network and HF_ENDPOINT, or put the model into SIE_LOCAL_CACHE",
        ),
    ],
)
def test_a_hub_that_cannot_be_reached_is_told(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    refused = sie(*arguments, SIE_LOCAL_CACHE=str(tmp_path))
    assert refused.exit_code == 1
    assert says in refused.output


def preload(name: str, bundle: str = "default") -> object:
    entry = parse_entry(yaml.safe_load(ENTRY))
    return _named(Catalogue({"org/one": entry}, {}, BUNDLES), name, bundle)


def test_each_setting_of_the_models_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    """The settings are SIE_MODELS_DIR, SIE_MODEL_FILTER, SIE_PRELOAD_MODELS and SIE_BUNDLE."""
    own = tmp_path / "bundles"
    own.mkdir()
    (own / "x.yaml").write_text(
        "id: x\nrequires: [no-such-distribution, 'msgspec>=999', 'click>=1', \"y; python_version < '3'\"]\n"
    )
    refusals: list[tuple[Any, str]] = [
        (
            lambda: wanted_models(settings_of(SIE_MODELS_DIR="/is/not/there")),
            "SIE_MODELS_DIR: /is/not/there is not a folder: make it, or",
        ),
        (
            lambda: wanted_models(settings_of(SIE_MODEL_FILTER="all-minilm-l6-v2")),
            "did you mean sentence-transformers/all-MiniLM-L6-v2 or",
        ),
        (lambda: preload("org/oen"), "SIE_PRELOAD_MODELS: no model named 'org/oen'; did you mean org/one?"),
        (
            lambda: preload("org/one", "eyes"),
            "SIE_PRELOAD_MODELS: org/one is served by bundle default, but this worker serves bundle eyes (SIE",
        ),
        (
            lambda: preload("eyes:/org/one"),
            "SIE_PRELOAD_MODELS: bundle 'eyes' does not serve org/one: name the bundle default",
        ),
        (
            lambda: dependencies.check(settings_of(SIE_BUNDLE="x", SIE_MODELS_DIR=str(tmp_path))),
            "SIE_BUNDLE: bundle x needs no-such-distribution, which is not installed; msgspec>=999, installed is",
        ),
    ]
    started = CliRunner().invoke(main, ["adapter", "--bundle", "x", "--models-dir", str(tmp_path)])
    assert (started.exit_code, "error: SIE_BUNDLE: bundle x needs no-such-distribution" in started.output) == (
        2,
        True,
    ), started.output
    for refused, says in refusals:
        with pytest.raises(SettingError) as caught:
            refused()
        assert says in str(caught.value), str(caught.value)


def test_this_environment_is_that_of_the_packaged_bundle() -> None:
    assert dependencies.lacking(read_bundles(packaged_folder() / "bundles")["default"]) == []
