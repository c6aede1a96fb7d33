"""Models that `sie serve MODEL`, `sie pull MODEL` and `sie run MODEL` name: found, added, or refused in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hub_stub import COMMIT, HubStub
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of

from sie_cli.main import main
from sie_cli.models.add import write_entry
from sie_cli.models.lookup import NamedModel, look_up
from sie_cli.refusal import CommandRefused
from sie_cli.serve.processes import example_request
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings, load

TOKEN = "hf_token_of_a_test"
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


@pytest.mark.parametrize("place", ["file", "/proc/absent"])
def test_a_models_folder_that_cannot_be_created_is_refused_with_its_path(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    settings = replace(settings_at(tmp_path), models_dir=str(tmp_path / place))
    with pytest.raises(CommandRefused, match=place):
        look_up(settings, "org/mini")


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


def test_a_model_without_a_commit_is_pinned(hub: HubStub, folder: Path, tmp_path: Path) -> None:
    hub.add("answerdotai/ModernBERT-base", folder)
    model = look_up(settings_at(tmp_path), "answerdotai/ModernBERT-base:us-regulatory")
    assert model.name == "answerdotai/ModernBERT-base:us-regulatory"
    assert (model.entry.weights.revision, model.entry.weights.unpinned) == (COMMIT, False)


def test_a_folder_is_added_under_its_name_and_found_the_next_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = look_up(settings_at(tmp_path), str(folder))
    assert (model.name, model.entry.weights.path) == ("my-model", str(folder))
    assert look_up(settings_at(tmp_path), str(folder)).added is None
    (second_folder := tmp_path / "else where/my-model").mkdir(parents=True)
    with pytest.raises(
        CommandRefused, match=r"another model my-model: `sie models add '.*else where/my-model' --id NAME` adds"
    ):
        look_up(settings_at(tmp_path), str(second_folder))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("org/nowhere", "org/nowhere does not exist on the hub, or is private (set HF_TOKEN); is the name right?"),
        ("BAAI/bge-m33", "(set HF_TOKEN); did you mean BAAI/bge-m3"),
        ("all-MiniLM-L6-v22", f"has the form organisation/name; did you mean {MINI} or "),
        ("org/bare", "has no config.json and safetensors; weights in other formats are not read"),
        ("org/pickled", "name a repository with these files, or save the model again with save_pretrained"),
        (f"{MINI}:fast", f"{MINI} has no profile 'fast', it has default"),
        ("./nowhere", "there is no folder ./nowhere"),
    ],
)
def test_what_cannot_be_served_is_one_line_that_says_what_to_do(
    spec: str, says: str, hub: HubStub, tmp_path: Path
) -> None:
    with pytest.raises(CommandRefused) as refusal:
        look_up(settings_at(tmp_path), spec)
    assert says in refusal.value.message
    assert "\n" not in refusal.value.message
    assert not list(tmp_path.glob("models/**/*.yaml")), "nothing was added"


@pytest.mark.parametrize(("gated", "says"), [(True, "is gated: accept its licence"), (False, "or is private")])
def test_a_model_that_wants_a_token_says_so(gated: bool, says: str, hub: HubStub, tmp_path: Path) -> None:
    hub.token, hub.gated = TOKEN, gated
    with pytest.raises(CommandRefused, match=rf"{says}.*HF_TOKEN"):
        look_up(settings_at(tmp_path), "org/mini")


def test_a_bucket_of_models_is_not_written_to(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_cli.models.lookup._catalogue", lambda _: Catalogue())
    settings = load(environ={"SIE_MODELS_DIR": "s3://bucket/models"}).settings
    with pytest.raises(CommandRefused, match="does not write to the bucket s3://bucket/models"):
        look_up(settings, "org/mini")


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


@pytest.mark.parametrize(
    ("outputs", "inputs", "request_line"),
    [
        ({"dense": 4}, ["text"], 'curl http://a/v1/encode/org/x -d \'{"items"'),
        ({"score": 0}, ["text"], 'curl http://a/v1/score/org/x -d \'{"query"'),
        ({"entities": 0}, ["text"], 'curl http://a/v1/extract/org/x -d \'{"items": ["Ada met Charles in London."]'),
        ({"objects": 0}, ["image"], "sie try org/x @FILE"),
    ],
)
def test_the_request_of_a_model_is_one_of_its_task(
    outputs: dict[str, int], inputs: list[str], request_line: str
) -> None:
    raw: dict[str, Any] = {"id": "org/x", "weights": {"package": "x"}, "family": "toy", "max_tokens": 4}
    model = NamedModel("org/x", parse_entry({**raw, "outputs": outputs, "inputs": inputs}))
    assert example_request(model, "http://a", "").startswith(request_line)


@pytest.mark.parametrize("command", [["pull"], ["models", "inspect"], ["weights", "push", "--cluster-cache=s3://none"]])
def test_a_folder_of_a_user_that_this_machine_lacks_is_refused_in_one_line(command: list[str], tmp_path: Path) -> None:
    environ = {"SIE_MODELS_DIR": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = CliRunner().invoke(main, [*command, "~no-such-user/model"], env=environ)
    assert done.exit_code == 1
    assert "Error: there is no folder ~no-such-user/model" in done.stderr


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
