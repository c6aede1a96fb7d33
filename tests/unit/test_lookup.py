"""Models that `sie serve MODEL`, `sie pull MODEL` and `sie run MODEL` name: found, added, or refused in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from fake_adapter import toy_entry
from hub_stub import COMMIT, HubStub
from inprocess import InProcess, until
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of

from sie_cli.main import main
from sie_cli.models.add import write_entry
from sie_cli.models.lookup import look_up
from sie_cli.refusal import CommandRefused
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings, load
from sie_runtime.feed import packaged_catalogue

MINI = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lookup") / "my-model"
    return add_modules(build(place, ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """Serve a hub with a model, one without weights and one with pickled weights, and make this process use it."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    stub = HubStub()
    stub.add("org/mini", folder)
    bare = {name: data for name, data in stub.repositories["org/mini"].items() if not name.endswith(".safetensors")}
    stub.repositories |= {"org/bare": bare, "org/pickled": {**bare, "pytorch_model.bin": b"x" * 5000}}
    with stub.serving():
        # the library sets these from HF_ENDPOINT at its import
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stub.url)
        template = f"{stub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", stub.url)
        yield stub


def settings_at(tmp_path: Path) -> Settings:
    return load(environ={"SIE_LOCAL_CACHE": str(tmp_path / "cache")}).settings


def test_a_model_of_the_catalogue_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = look_up(settings_at(tmp_path), MINI)
    assert (model.name, model.added, model.message) == (MINI, None, "")
    assert look_up(settings_at(tmp_path), MINI.lower()).name == MINI
    assert not (tmp_path / "models").exists()


def test_an_id_of_the_hub_is_added_with_its_present_commit_and_found_the_next_time(
    hub: HubStub, tmp_path: Path
) -> None:
    model = look_up(settings_at(tmp_path), "org/mini")
    file = Path("models/org/mini.yaml")
    assert model.message == f"added org/mini, org/mini@{COMMIT}: {file}"
    entry = parse_entry(yaml.safe_load(file.read_text()))
    assert (entry.id, entry.weights.hub, entry.weights.revision) == ("org/mini", "org/mini", COMMIT)
    assert entry.download_bytes == sum(hub.sent.values()) > 0
    hub.asked.clear()
    again = look_up(settings_at(tmp_path), "org/mini")
    assert (again.entry.weights.revision, again.added, hub.asked) == (COMMIT, None, [])


@pytest.mark.parametrize(
    "spec",
    ["org/nowhere", "BAAI/bge-m33", "all-MiniLM-L6-v22", "org/bare", "org/pickled", f"{MINI}:fast", "./nowhere"],
)
def test_what_cannot_be_served_is_refused_and_nothing_is_added(spec: str, hub: HubStub, tmp_path: Path) -> None:
    with pytest.raises(CommandRefused) as refusal:
        look_up(settings_at(tmp_path), spec)
    assert "\n" not in refusal.value.message
    assert not list(tmp_path.glob("models/**/*.yaml")), "nothing was added"


def sie(tmp_path: Path, *arguments: str) -> Result:
    environment = {"SIE_LOCAL_CACHE": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data")}
    return CliRunner().invoke(main, list(arguments), env=environment)


def test_pull_adds_a_model_and_its_weights(hub: HubStub, tmp_path: Path) -> None:
    done = sie(tmp_path, "pull", "org/mini", MINI)
    assert done.exit_code == 0, done.output
    added, mini, packaged = done.stdout.splitlines()
    assert done.stderr.count("no `sie serve` is running") == 1
    assert "another --data-dir" in done.stderr
    assert added.startswith("added org/mini, ")
    assert mini.startswith("org/mini is on this disk, ")
    assert (Path(mini.rpartition(": ")[2]) / "model.safetensors").is_file()
    assert packaged.startswith(f"{MINI} is on this disk, ")
    failed = sie(tmp_path, "pull", "org/nowhere")
    assert (failed.exit_code, failed.output.count("\n")) == (1, 1)


def test_two_commands_that_write_one_entry_at_once_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = os.replace

    def after_another(partial: Path, file: Path) -> None:
        monkeypatch.setattr(os, "replace", renamed)
        write_entry("id: of-another", "org/model", tmp_path)
        renamed(partial, file)

    monkeypatch.setattr(os, "replace", after_another)
    file = write_entry("id: ours", "org/model", tmp_path)
    assert file.read_text() == "id: ours"
    assert [path.name for path in file.parent.iterdir()] == ["model.yaml"]


async def test_a_model_of_a_company_is_no_misspelling_of_one_that_is_here(tmp_path: Path) -> None:
    async with InProcess(tmp_path, *packaged_catalogue().entries.values(), toy_entry("toy/one")) as cluster:
        gateway = await cluster.gateway()

        async def told(path: str, model: str) -> dict[str, Any]:
            answer = await gateway.client.post(
                path, json={"model": model, "input": "a", "query": "a", "documents": ["b"]}
            )
            assert answer.status_code == 404
            error: dict[str, Any] = answer.json()["error"]
            return error

        alias = "`sie models alias text-embedding-3-small MODEL` lets MODEL answer for it"
        cold = await told("/v1/embeddings", "text-embedding-3-small")
        assert cold["suggestions"] == []
        assert cold["message"].endswith(
            f"; that is a model of OpenAI: GET /v1/models lists the available ones, and {alias}"
        )
        await cluster.sidecar(await cluster.adapter())
        assert (await gateway.client.post("/v1/encode/toy/one", json={"items": ["a"]})).status_code == 200
        await until(lambda: (beat := cluster.last_beat("w0")) and beat.models[0].state == "loaded", "it is loaded")
        warm = await told("/v1/embeddings", "text-embedding-3-small")
        assert warm["suggestions"] == ["toy/one"]
        assert warm["message"].endswith(f"; that is a model of OpenAI: toy/one is loaded here, and {alias}")
        assert "a model of Cohere or Voyage: GET" in (await told("/v1/rerank", "rerank-2"))["message"], (
            "it does not rank"
        )
