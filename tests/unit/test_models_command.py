"""`sie models` against a config service over HTTP."""

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
from sie_cli.models import residency
from sie_cli.models import service as models_service
from sie_cli.models.catalogue import patch_of
from sie_cli.models.service import ConfigServiceClient, WriteOptions
from sie_cli.serve.ports import free_port
from sie_config_service.app import create_app
from sie_config_service.state import ConfigService
from sie_config_service.store import open_store
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import SettingError, load
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


def test_a_patch_is_made_of_fields() -> None:
    assert patch_of(["a.b=1", "a.c=null", 'x."y.z".w=[1, 2]', "t=text", "e=", "p=query: {text}", "m={c: 1}"]) == {
        "a": {"b": 1, "c": None},
        "x": {"y.z": {"w": [1, 2]}},
        "t": "text",
        "e": None,
        "p": "query: {text}",
        "m": {"c": 1},
    }


COMMANDS: list[tuple[tuple[str, ...], int, str]] = [  # arguments, exit status, what the refusal names
    (("show", "org/oen"), 1, "did you mean org/one"),
    (("rm", "zzz"), 1, "'zzz'"),
    (("set", "org/one", "max_token=8"), 1, "did you mean `max_tokens`?"),
    (("set", "org/one", "pooling=cls"), 1, "did you mean `run.pooling`"),
    (("set", "org/one", "max_tokens=many"), 1, "max_tokens:"),
    (("set", "org/one", "run.normalize=often"), 1, "run.normalize"),
    (("set", "org/one", 'profiles."v1.5".run.pooling=x'), 1, "profiles.v1.5.run.pooling:"),
    (("set", "org/one", "id=org/two"), 1, "id:"),
    (("set", "org/one", "bundle=ears"), 1, "bundle:"),
    (("set", "org/one", "bundle=eyes"), 1, "bundle:"),
    (("set", "org/one", "family=nose"), 1, "family:"),
    (("set", "org/one", "weights.hub=a/b", "weights.revision=main"), 1, "weights.revision:"),
    (("set", "org/one", "max_tokens=9", "--if-match", "{stale}"), 1, "--if-match {revision}"),
    (("add", "{file}"), 1, "--if-match {revision}"),
    (("rollback", "org/one", "9999"), 1, "the stored revisions are {revision}"),
    (("show", "org/gone"), 1, "org/gone was removed"),
    (("rollback", "org/gone", "{removal}"), 1, "revision:"),
    (("add", "{broken}"), 1, "$ (line 2)"),
    (("set", "org/one", "-f", "{twice}"), 1, "(line 2)"),
    (("set", "org/one", "-f", "{big}"), 1, "1048576"),
    (("set", "org/one", "-f", "{missing}"), 2, "No such file"),
    (("set", "org/one"), 2, "FIELD=VALUE"),
    (("set", "org/one", "max_tokens"), 2, "'max_tokens'"),
    (("set", "org/one", "family=[a"), 2, "family:"),
    (("set", "org/one", "family=!!bool q"), 2, "family:"),
    (("set", "org/one", f"family={'9' * 5000}"), 2, "family:"),
    (("set", "org/one", "a=1", "a=2"), 2, "a:"),
    (("add", "{file}", "--models-dir", "x"), 2, "--models-dir"),
    (("add", "./nowhere"), 1, "./nowhere"),
]


@pytest.mark.parametrize("row", COMMANDS, ids=range(len(COMMANDS)))
def test_each_refusal_names_what_is_wrong(
    row: tuple[tuple[str, ...], int, str], url_of_one: str, tmp_path: Path
) -> None:
    """Each command has a mistake that a new user makes."""
    arguments, status, says = row
    stale = revision_of(url_of_one)
    done("set", "org/one", "max_tokens=8", "--url", url_of_one)
    if "org/gone" in arguments:
        done("add", "-", "--force", "--url", url_of_one, stdin=ENTRY.replace("org/one", "org/gone"))
        removal = json.loads(done("rm", "org/gone", "-o", "json", "--url", url_of_one))["revision"]
    else:
        removal = 0
    texts = {"file": ENTRY, "broken": "id: [\n", "twice": "id: a\nid: b\n", "big": "x: " + "y" * (1 << 20)}
    places: dict[str, Any] = {key: tmp_path / f"{key}.yaml" for key in texts}
    for key, text in texts.items():
        places[key].write_text(text)
    places |= {"missing": tmp_path / "missing.yaml", "stale": stale, "revision": stale + 1, "removal": removal}
    refused = sie(*(argument.format(**places) for argument in arguments), "--url", url_of_one)
    assert refused.exit_code == status, refused.output
    assert says.format(**places) in refused.output, refused.output
    assert "Traceback" not in refused.output
    assert ADMIN not in refused.output


@pytest.mark.parametrize(
    ("token", "url", "arguments", "says"),
    [
        ("", None, ("rm", "org/one"), "SIE_ADMIN_TOKEN"),
        ("wrong", None, ("list",), "SIE_ADMIN_TOKEN"),
        (READER, None, ("rm", "org/one"), "SIE_ADMIN_TOKEN"),
        (ADMIN, "", ("list",), "SIE_CONFIG_SERVICE_URL"),
        (ADMIN, "config:80", ("list",), "SIE_CONFIG_SERVICE_URL"),
        (ADMIN, "{nobody}", ("list",), "{nobody}"),
        (ADMIN, "{other}/site", ("list",), "status 404"),
        (ADMIN, "{other}/text", ("list",), "{other}/text"),
        (ADMIN, "{other}", ("rm", "org/one"), "use --url http://config:81"),  # a gateway
    ],
    ids=range(9),
)
def test_who_is_not_let_in_or_finds_nobody_is_told_what_to_set(
    token: str,
    url: str | None,
    arguments: tuple[str, ...],
    says: str,
    served: Served,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models_service, "RETRY_S", 0.1)
    places = {"nobody": f"http://127.0.0.1:{free_port()}", "other": other}
    at = served.url if url is None else url.format(**places)
    refused = sie(*arguments, *(("--url", at) if at else ()), token=token)
    assert refused.exit_code in (1, 2)
    assert says.format(**places) in refused.output, refused.output
    assert "Traceback" not in refused.output


ONE = "/models/org/one"
RESERVED = json.dumps({**yaml.safe_load(ENTRY), "id": "org/status"}).encode()
CALLS: list[tuple[str, str, dict[str, str], bytes, int, str, str]] = [  # with status, code and what is named
    ("PATCH", ONE, {"Idempotency-Key": "k"}, b'{"max_tokens": 3}', 422, "IDEMPOTENCY_MISMATCH", "Idempotency-Key"),
    ("DELETE", ONE, {"Idempotency-Key": "k" * 256}, b"", 400, "INVALID_INPUT", "Idempotency-Key"),
    ("DELETE", ONE, {"If-Match": "*"}, b"", 400, "INVALID_INPUT", "If-Match"),
    ("DELETE", f"{ONE}?dry_run=1", {}, b"", 400, "INVALID_INPUT", "dry_run"),
    ("DELETE", f"{ONE}?dryrun=true", {}, b"", 400, "INVALID_INPUT", "did you mean `dry_run`?"),
    ("PATCH", ONE, {}, b"[]", 422, "VALIDATION_ERROR", "$:"),
    ("POST", f"{ONE}/rollback", {}, b"{}", 422, "VALIDATION_ERROR", "$.revision"),
    ("POST", "/models", {}, RESERVED, 422, "VALIDATION_ERROR", "$.id"),
    ("PUT", "/models", {}, b"{}", 405, "METHOD_NOT_ALLOWED", "GET, POST"),
    ("GET", "/none", {}, b"", 404, "NOT_FOUND", ""),
    ("GET", "/models/a/%2e%2e/b", {}, b"", 400, "INVALID_INPUT", "`..`"),
    ("GET", "/bundles/ears", {}, b"", 404, "NOT_FOUND", "'ears'"),
    ("POST", "/resolve", {}, b'{"model": "eyes:/org/one"}', 409, "BUNDLE_CONFLICT", "default"),
]


@pytest.mark.parametrize("row", CALLS, ids=range(len(CALLS)))
def test_each_error_of_the_api_has_its_code_in_both_envelopes(
    row: tuple[str, str, dict[str, str], bytes, int, str, str], url_of_one: str
) -> None:
    method, path, headers, body, status, code, says = row
    with httpx.Client(
        headers={"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json", "X-Request-ID": "mine"}
    ) as client:
        client.patch(
            f"{url_of_one}/v1/configs/models/org/one", content=b'{"max_tokens": 2}', headers={"Idempotency-Key": "k"}
        )
        answer = client.request(method, f"{url_of_one}/v1/configs{path}", content=body, headers=headers)
    report = answer.json()
    assert (answer.status_code, report["code"], answer.headers["x-sie-error-code"]) == (status, code, code), answer.text
    assert says in report["error"]["message"]
    assert report["error"] == {key: value for key, value in report["detail"].items() if key != "error"}
    assert report["detail"]["error"] == report["code"].lower()
    assert answer.headers["x-request-id"] == "mine" != answer.headers["x-sie-request-id"]


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
        (lambda: wanted_models(settings_of(SIE_MODELS_DIR="/is/not/there")), "SIE_MODELS_DIR: /is/not/there"),
        (lambda: wanted_models(settings_of(SIE_MODEL_FILTER="all-minilm-l6-v2")), "did you mean sentence-tr"),
        (lambda: preload("org/oen"), "SIE_PRELOAD_MODELS: no model named 'org/oen'; did you mean org/one?"),
        (lambda: preload("org/one", "eyes"), "SIE_PRELOAD_MODELS: org/one is served by bundle default"),
        (lambda: preload("eyes:/org/one"), "SIE_PRELOAD_MODELS: bundle 'eyes' does not serve org/one"),
        (
            lambda: dependencies.check(settings_of(SIE_BUNDLE="x", SIE_MODELS_DIR=str(tmp_path))),
            "SIE_BUNDLE: bundle x needs no-such-distribution, which is not installed; msgspec>=999, installed is",
        ),
    ]
    for refused, says in refusals:
        with pytest.raises(SettingError) as caught:
            refused()
        assert says in str(caught.value), str(caught.value)


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
