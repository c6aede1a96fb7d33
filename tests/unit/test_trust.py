"""Permissions of entries to run code and to read paths: at the config service, where entries are written, and at the
adapter, where they are used.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from config_api import ADMIN, Api
from inprocess import InProcess, until
from unit.adapter import toys

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.process import allowed
from sie_adapter.server import AdapterServer
from sie_broker import Write
from sie_broker.memory import MemoryServer
from sie_config_service.overlay import Overlay
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import LoadOptions, ModelEntry, Profile, parse_entry
from sie_contracts.models.trust import Allowed, Trust, claims
from sie_contracts.places import without_paths
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import ipc
from sie_gateway.http.routes import ROUTES
from sie_runtime import keys
from sie_runtime.feed import packaged_catalogue
from sie_store.models_folder import examined, own_entries, worker_trust

BUNDLES = packaged_catalogue().bundles
HUB = {"hub": "org/model", "revision": "0" * 40}
PLAIN: dict[str, Any] = {
    "id": "me/model",
    "weights": HUB,
    "family": "text-encoder",
    "outputs": {"dense": 8},
    "max_tokens": 32,
}
ASKS_FOR_CODE: dict[str, dict[str, Any]] = {
    "$.load.trust_remote_code": {"load": {"trust_remote_code": True}},
    "$.profiles.x.load.trust_remote_code": {"profiles": {"x": {"load": {"trust_remote_code": True}}}},
    "$.weights.package": {"weights": {"package": "some-distribution"}},
    "$.family": {"family": "of-a-plug-in"},
}
ASKS_FOR_A_PATH: dict[str, dict[str, Any]] = {
    "$.weights.path": {"weights": {"path": "/etc"}},
    "$.golden": {"golden": "/etc/passwd"},
    "$.run.lora": {"run": {"lora": "/etc"}},
    "$.profiles.x.run.lora": {"profiles": {"x": {"run": {"lora": "~/x"}}}},
}
ASKS = ASKS_FOR_CODE | ASKS_FOR_A_PATH


def entry_of(**changes: Any) -> ModelEntry:
    return parse_entry({**PLAIN, **changes})


def trust(*own: ModelEntry, **allowed: Any) -> Trust:
    return Trust(Allowed(**allowed), BUNDLES.values(), lambda: own)


# ---- what is asked for, and what is allowed


@pytest.mark.parametrize("loc", ASKS_FOR_CODE)
def test_code_that_nobody_allowed_is_refused_and_the_setting_named(loc: str) -> None:
    """SIE_ALLOW_REMOTE_CODE."""
    entry = entry_of(**ASKS_FOR_CODE[loc])
    for is_here in (False, True):
        refused = trust().refused(entry, is_here=is_here)
        assert refused is not None
        assert (refused.reason, refused.loc) == ("remote_code", loc)
        assert "SIE_ALLOW_REMOTE_CODE=true" in refused.message
        assert trust(code=True).refused(entry, is_here=is_here) is None


@pytest.mark.parametrize("loc", ASKS_FOR_A_PATH)
def test_code_that_is_allowed_opens_no_path(loc: str) -> None:
    refused = trust(code=True).refused(entry_of(**ASKS_FOR_A_PATH[loc]), is_here=True)
    assert refused is not None
    assert (refused.reason, refused.loc) == ("model_path", loc)
    assert "SIE_MODEL_PATHS" in refused.message


def test_what_asks_for_nothing_is_always_allowed() -> None:
    for own in packaged_catalogue().entries.values():
        if isinstance(own, ModelEntry) and not own.weights.package:
            assert claims(own, {family for bundle in BUNDLES.values() for family in bundle.families}) == [], own.id
    assert trust().refused(entry_of(run={"lora": "org/lora"}, golden="golden/x.json"), is_here=True) is None


@pytest.mark.parametrize("loc", ASKS)
def test_what_the_operator_s_own_files_say_is_trusted_and_no_more(loc: str) -> None:
    own = entry_of(**ASKS[loc])
    assert trust(own).refused(own, is_here=True) is None
    assert trust(own).refused(msgspec.structs.replace(own, id="other/name", max_tokens=7), is_here=True) is None
    if "trust_remote_code" in loc:  # only the code of that commit is trusted
        moved = msgspec.structs.replace(own, weights=msgspec.structs.replace(own.weights, revision="1" * 40))
        assert trust(own).refused(moved, is_here=True) is not None
    for other_loc in ASKS.keys() - {loc}:
        if {loc, other_loc} != {"$.load.trust_remote_code", "$.profiles.x.load.trust_remote_code"} and ASKS[
            other_loc
        ] != ASKS[loc]:
            refused = trust(own).refused(entry_of(**ASKS[other_loc]), is_here=True)
            assert (refused is None) == ({loc, other_loc} <= {"$.weights.path", "$.run.lora"}), "the same place"


@pytest.mark.parametrize("weights", [{"path": "/srv/model"}, {"package": "some-distribution"}])
@pytest.mark.parametrize("changes", [{"load": {"trust_remote_code": True}}, {"family": "of-a-plug-in"}])
def test_trust_in_the_code_of_a_source_does_not_extend_to_an_added_source(
    weights: dict[str, Any], changes: dict[str, Any]
) -> None:
    own = entry_of(weights=weights, **changes)
    assert trust(own).refused(own, is_here=True) is None
    refused = trust(own).refused(entry_of(weights={**weights, **HUB}, **changes), is_here=True)
    assert refused is not None
    assert refused.reason == "remote_code"


def test_paths_are_allowed_below_the_named_folders_and_the_models_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_MODEL_PATHS."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/a", "named/a", "named-not/a", "other/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "named/out").symlink_to(tmp_path / "other")
    (tmp_path / "link-to-named").symlink_to(tmp_path / "named")
    (tmp_path / "named/b").mkdir()
    (tmp_path / "named/b/model.safetensors").symlink_to(tmp_path / "other/secret")
    allowing = trust(paths=(str(tmp_path / "named"),))

    def is_refused(path: str, trusting: Trust = allowing, *, is_here: bool = True) -> bool:
        return trusting.refused(entry_of(weights={"path": path}), is_here=is_here) is not None

    assert not is_refused(f"{tmp_path}/named/a")
    assert not is_refused(f"{tmp_path}/named", is_here=False)
    assert is_refused(f"{tmp_path}/named"), "it has a link to elsewhere"
    assert not is_refused(f"{tmp_path}/models")
    assert not is_refused(f"{tmp_path}/models/a"), "./models, as nothing else is named"
    assert not is_refused(f"{tmp_path}/link-to-named/a")
    assert not is_refused(f"{tmp_path}/named/not-yet", is_here=False)
    for path in ("other/a", "named-not/a", "named/../other/a", "named/out/a", "named/out", "..", "named/../.."):
        for is_here in (False, True):
            assert is_refused(f"{tmp_path}/{path}", is_here=is_here), path
            assert is_refused(path, is_here=is_here), path
    assert is_refused(f"{tmp_path}/named/b"), "a file in it is a link to elsewhere"
    elsewhere = trust(models_dir=str(tmp_path / "other"))
    assert is_refused(f"{tmp_path}/models/a", elsewhere)
    assert not is_refused(f"{tmp_path}/other/a", elsewhere)
    assert is_refused(f"{tmp_path}/other/a", trust(models_dir="s3://bucket/models"))


# ---- where entries are written


@pytest.fixture
async def api() -> Api:
    bundles = {**BUNDLES, "all": BundleEntry("all")}
    return await Api(MemoryServer(), bundles, "sie.config.models.*", SIE_ADMIN_TOKEN=ADMIN).start()


@pytest.mark.parametrize("loc", ASKS)
async def test_no_write_over_http_gets_it_in(api: Api, loc: str) -> None:
    """POST, a dry run, PUT, PATCH and a rollback to an entry that was once allowed are refused. The 403 names the
    setting and the field.
    """
    setting = "SIE_ALLOW_REMOTE_CODE" if loc in ASKS_FOR_CODE else "SIE_MODEL_PATHS"
    asking = {**PLAIN, **ASKS[loc]}
    await api.call("POST", "/v1/configs/models", asking, 201)  # everything is allowed still
    await api.call("PUT", "/v1/configs/models/me/model", PLAIN)
    api.service.trust = trust()
    for method, path, body in (
        ("POST", "/v1/configs/models", {**asking, "id": "new/one"}),
        ("POST", "/v1/configs/models?dry_run=true", {**asking, "id": "new/one"}),
        ("PUT", "/v1/configs/models/me/model", asking),
        ("PATCH", "/v1/configs/models/me/model", ASKS[loc]),
        ("POST", "/v1/configs/models/me/model/rollback", {"revision": 1}),
    ):
        error = (await api.call(method, path, body, 403))["error"]
        assert (error["code"], error["reason"], error["param"]) == (
            "PERMISSION_DENIED",
            "remote_code" if loc in ASKS_FOR_CODE else "model_path",
            loc,
        ), method
        assert setting in error["message"]
    assert (await api.call("GET", "/v1/configs/models/me/model"))["weights"] == HUB
    await api.call("GET", "/v1/configs/models/new/one", status=404)
    await api.call("PATCH", "/v1/configs/models/me/model", {"max_tokens": 16})


# ---- where they are used


class Adapter:
    """A real adapter behind its socket, as in a process with these settings."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.engine = AdapterEngine(settings)
        self._wake, self._waker = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "a.sock")
        self._listener.bind(self.path)
        self._listener.listen()
        self._server = AdapterServer(self._listener, self.engine, lambda: None, worker_trust(allowed(settings)))
        self._thread = threading.Thread(target=self._server.serve, args=(self._wake,))
        self._thread.start()

    def ask(self, request: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(self.path)
            peer.sendall(ipc.frame(request))
            return ipc.reply(bytes(ipc.receive_frame(peer, ipc.MAX_FRAME_BYTES)))

    def load(self, entry: ModelEntry) -> Any:
        return self.ask(ipc.EnsureReady(entry.id, msgspec.to_builtins(entry)))

    def stop(self) -> None:
        self._waker.send(b"x")
        self._thread.join(10)
        assert self.engine.stop(10)
        self._server.close()
        for handle in (self._listener, self._wake, self._waker):
            handle.close()


SETTINGS = Settings(device="cpu", default_compute_precision="float32", hf_fallback=False)


@pytest.fixture
def toy(tmp_path: Path) -> ModelEntry:
    """Return the entry of a model that loads, in a folder that no setting allows."""
    folder = toys.save(tmp_path / "weights", "bert")
    return toys.entry(folder, load=LoadOptions(engine="torch"))  # torch loads without a conversion


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    running: list[Adapter] = []

    def started(**settings: Any) -> Adapter:
        place = tmp_path / f"run{len(running)}"
        place.mkdir()
        running.append(Adapter(place, replace(SETTINGS, local_cache=str(tmp_path / "cache"), **settings)))
        return running[-1]

    yield started
    for process in running:
        process.stop()


def refusal(answer: Any) -> Any:
    assert isinstance(answer, ipc.Refused), answer
    return answer.error


def test_an_adapter_trusts_neither_the_broker_nor_the_sidecar(adapter: Any, toy: ModelEntry) -> None:
    """The adapter refuses an entry that came into the catalogue without the check of the config service."""
    closed = adapter()
    error = refusal(closed.load(toy))
    assert (error.code, error.reason, error.extras["error_class"]) == (
        "MODEL_LOAD_FAILED",
        "model_path",
        "INCOMPATIBLE",
    )
    for loc, asks in ASKS.items():
        error = refusal(closed.load(entry_of(**asks)))
        assert (error.reason, error.param) == ("remote_code" if loc in ASKS_FOR_CODE else "model_path", loc)
    opened = adapter(model_paths=(toy.weights.path,))
    assert isinstance(opened.load(toy), ipc.Ready)
    assert isinstance(adapter(models_dir=str(Path(toy.weights.path).parent)).load(toy), ipc.Ready)


def test_an_adapter_reads_the_operator_s_folder_itself(adapter: Any, toy: ModelEntry, tmp_path: Path) -> None:
    """A file that is added while the adapter runs counts. A broken file beside it does no harm."""
    folder = tmp_path / "catalogue"
    folder.mkdir()
    running = adapter(models_dir=str(folder))
    assert refusal(running.load(toy)).reason == "model_path"
    (folder / "broken.yaml").write_text("id: [")
    (folder / "toy.yaml").write_text(json.dumps(msgspec.to_builtins(toy)))
    assert isinstance(running.load(toy), ipc.Ready)


def test_a_change_of_a_loaded_model_is_asked_about_too(adapter: Any, toy: ModelEntry) -> None:
    """Otherwise a delta could give an allowed model a LoRA, or its next load other code."""
    running = adapter(model_paths=(toy.weights.path,))
    running.load(toy)
    lora = msgspec.structs.replace(toy, run=msgspec.structs.replace(toy.run, lora="/etc"))
    assert refusal(running.load(lora)).param == "$.run.lora"


HOME = os.path.expanduser("~/")
EVERYTHING = {
    "items": ["a"],
    "query": "a",
    "input": ["a"],
    "inputs": "a",
    "texts": ["a"],
    "documents": ["a"],
    "input_type": "search_document",
    "labels": ["a"],
    "ids": [1],
}


async def test_no_route_tells_a_client_a_path_of_this_machine(adapter: Any, toy: ModelEntry, tmp_path: Path) -> None:
    """A key with the scope infer calls every route, for models that load and for models that cannot. The probes are
    those of workers with and without an adapter.
    """

    def placed(name: str, path: str, **more: Any) -> ModelEntry:
        weights = msgspec.structs.replace(toy.weights, path=path)
        return msgspec.structs.replace(toy, id=name, weights=weights, **more)

    (tmp_path / "torn").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "torn" / name).write_text("{")
    profiles = {"tuned": Profile(run=msgspec.structs.replace(toy.run, lora=f"{tmp_path}/lora"))}
    entries = [
        msgspec.structs.replace(toy, profiles=profiles),
        placed("me/gone", f"{tmp_path}/gone"),
        placed("me/torn", f"{tmp_path}/torn"),
        placed("me/golden", toy.weights.path, golden=f"{tmp_path}/none.json"),
        entry_of(id="me/hub"),
    ]
    running = adapter(model_paths=(str(tmp_path),))
    async with InProcess(tmp_path, *entries) as cluster:
        key, token = keys.create("infers", ("infer",), now_s=time.time())
        bucket = await keys.bucket_of(cluster.server.connect("operator"), 1).open()
        await bucket.write([Write(key.id, keys.encode(key))])
        gateway = await cluster.gateway(SIE_AUTH_MODE="token", SIE_LOAD_HOLD_S="20")
        replies: list[tuple[str, httpx.Response]] = []
        early = await cluster.sidecar(ready=False, SIE_IPC_SOCKET_PATH=f"{tmp_path}/nobody.sock", SIE_POOL="other")
        await until(lambda: early.task.done() or cluster.last_beat(early.worker), "a worker without an adapter")
        replies.append(("GET /readyz of a worker without an adapter", await early.get("/readyz")))
        worker = await cluster.sidecar(SIE_IPC_SOCKET_PATH=running.path)
        replies += [
            ("GET /readyz of a worker", await worker.get("/readyz")),
            ("GET /nope of a worker", await worker.get("/nope")),
        ]
        names = [*(entry.id for entry in entries), f"{toy.id}:tuned"]
        endpoints = [(row.method, row.path) for row in ROUTES]
        for (verb, path), model in itertools.product(endpoints, names):
            path = path.replace("{model:path}", model).replace("{id:path}", model).replace("{name}", "default")
            body = json.dumps({"model": model, **EVERYTHING}) if verb != "GET" else None
            answer = await gateway.client.request(
                verb, path, content=body, headers={"authorization": token}, timeout=30
            )
            replies.append((f"{verb} {path}", answer))
        statuses = {label: answer.status_code for label, answer in replies}
    assert {503, 200, 403} <= set(statuses.values())
    assert [statuses[f"POST /v1/encode/{name}"] for name in names] == [200, *[500] * 5], statuses
    for route, answer in replies:
        reply_text = f"{answer.text} {answer.headers}"
        assert str(tmp_path) not in reply_text, (route, reply_text)
        assert HOME not in reply_text, (route, reply_text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("weights.path /srv/a/model is missing", "weights.path …/model is missing"),
        ("[Errno 2] No such file: '/srv/a/config.json'", "[Errno 2] No such file: '…/config.json'"),
        ("the cache ~/x/y (SIE_LOCAL_CACHE)", "the cache …/y (SIE_LOCAL_CACHE)"),
        ("at file:///srv/x.", "at …/x."),
        ("org/model has no config.json and/or weights", "org/model has no config.json and/or weights"),
        ("s3://bucket/prefix and https://hub.co/org/model", "s3://bucket/prefix and https://hub.co/org/model"),
        ("/srv/a/: a folder", "…/a: a folder"),
        ("3 / 4", "3 / 4"),
        ("a path=/srv/x", "a path=…/x"),
        ("weights:/srv/a/x is missing", "weights:…/x is missing"),
        ("cache:~/a/x", "cache:…/x"),
        ("nats://host:4222/a", "nats://host:4222/a"),
    ],
)
def test_paths_in_messages(text: str, shown: str) -> None:
    assert without_paths(text) == shown


# ---- whose folder it is


def test_a_models_folder_where_everybody_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIE_MODELS_DIR: this holds for a named folder and for ./models, unless SIE_MODEL_PATHS names the folder. An
    adapter trusts no entry in a refused folder.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.yaml").write_text(json.dumps({**PLAIN, "weights": {"path": "/etc"}}))
    assert examined(Allowed()) == ""
    assert [entry.id for entry in own_entries(Allowed())] == ["me/model"]
    folder.chmod(0o777)
    for permissions in (Allowed(), Allowed(models_dir=str(folder))):
        with pytest.raises(
            SettingError, match=rf"^SIE_MODELS_DIR: {folder}.*every user .*chmod o-w.*SIE_MODEL_PATHS={folder}"
        ):
            examined(permissions)
        with pytest.raises(SettingError, match=r"^SIE_MODELS_DIR"):
            Overlay(Settings(models_dir=permissions.models_dir)).describe()
        assert list(own_entries(permissions)) == []
        accepted = replace(permissions, paths=(str(folder),))
        assert examined(accepted) == ""
        assert [entry.id for entry in own_entries(accepted)] == ["me/model"]


def test_a_file_that_cannot_be_read_leaves_the_other_entries_of_the_models_folder_trusted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("/proc/self/mem")  # reading it fails for every user
    (tmp_path / "b.yaml").write_text("x: !!bool q\n")
    (tmp_path / "c.yaml").write_text("[" * 200_000)
    (tmp_path / "mine.yaml").write_text(json.dumps(PLAIN))
    assert [entry.id for entry in own_entries(Allowed(models_dir=str(tmp_path)))] == ["me/model"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_models_folder_of_another_user_is_refused_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_MODELS_DIR: a named folder is used with a warning."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    with pytest.raises(
        SettingError, match=r"which is used because it exists: it belongs to another user \(uid 65534\)"
    ):
        examined(Allowed())
    assert "it belongs to another user (uid 65534)" in examined(Allowed(models_dir=str(folder)))
    assert examined(Allowed(models_dir=str(folder), paths=(str(folder),))) == ""
