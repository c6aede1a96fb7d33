"""Faults of an entry against the files of its model: the check of a write, and the answers of the config service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import config_api
import msgspec
import pytest
from config_api import ADMIN
from inprocess import settings_of, until, until_told

from sie_broker.memory import MemoryServer
from sie_config_service import reload
from sie_config_service.model_files import ModelFiles
from sie_config_service.process import prepare
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire import topology
from sie_runtime.process import Stop
from sie_store.entry_faults import fault

PROMPTS = {"query": "query: ", "document": "passage: "}
MODEL = "/v1/configs/models/my/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the small files of an encoder as sentence-transformers saves them, with weights that cannot be loaded."""
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    rows = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    files: dict[str, Any] = {
        "modules.json": rows,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {"prompts": PROMPTS},
        "config.json": {"model_type": "bert", "max_position_embeddings": 64, "pad_token_id": 0},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "model.safetensors").write_bytes(b"\0")
    return folder


def raw(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "id": "my/model",
        "weights": {"path": str(folder)},
        "family": "text-encoder",
        "outputs": {"dense": 4},
        "max_tokens": 64,
        "prompts": {name: f"{prompt}{{text}}" for name, prompt in PROMPTS.items()},
        **changes,
    }


def entry(folder: Path, **changes: Any) -> ModelEntry:
    return parse_entry(raw(folder, **changes))


DIFFERING = {
    "$.run.pooling": {"run": {"pooling": "cls"}},
    "$.prompts.query": {"prompts": {"query": "ask: {text}", "document": "passage: {text}"}},
    "$.prompts.document": {"prompts": {"query": "query: {text}"}},
}


@pytest.mark.parametrize("loc", DIFFERING)
def test_what_the_files_say_otherwise_is_a_fault_unless_it_is_accepted_without_proof(loc: str, folder: Path) -> None:
    model_entry = entry(folder, **DIFFERING[loc])
    assert (wrong := fault(folder, model_entry, model_entry.load)) is not None
    assert (wrong.loc, "load.accept_unproven: true" in wrong.message) == (loc, True)
    assert fault(folder, model_entry, msgspec.structs.replace(model_entry.load, accept_unproven=True)) is None


def test_an_entry_that_says_what_the_files_say_has_no_fault(folder: Path) -> None:
    for changes in ({}, {"run": {"pooling": "mean"}}, {"profiles": {"first": {"run": {"pooling": "cls"}}}}):
        model_entry = entry(folder, **changes)
        assert fault(folder, model_entry, model_entry.load) is None


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "bert", "max_position_embeddings": 64, "pad_token_id": 0}, 64),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 66, "pad_token_id": 1}, 64),
        ({"model_type": "mpnet", "max_position_embeddings": 66}, 64),
        ({"model_type": "ibert", "max_position_embeddings": 66}, 64),
        ({"model_type": "esm", "max_position_embeddings": 66, "position_embedding_type": "rotary"}, 66),
    ],
)
def test_more_tokens_than_positions_are_a_fault_that_nothing_accepts(
    config: dict[str, Any], limit: int, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    for accept in (False, True):
        for tokens in (limit, limit + 1):
            model_entry = entry(folder, max_tokens=tokens, load={"accept_unproven": accept})
            wrong = fault(folder, model_entry, model_entry.load)
            assert (wrong.loc if wrong else "") == ("$.max_tokens" if tokens > limit else "")


SIDES: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"tokenizer.json": {"truncation": {"direction": "Left"}}}, True),
    ({"tokenizer.json": {"truncation": {"direction": "Right"}}}, False),
    ({"tokenizer.json": {"truncation": None}, "tokenizer_config.json": {"truncation_side": "left"}}, True),
    (
        {
            "tokenizer.json": {"truncation": {"direction": "Left"}},
            "tokenizer_config.json": {"truncation_side": "right"},
        },
        False,
    ),
    ({"sentence_bert_config.json": {"processor_kwargs": {"truncation_side": "left"}}}, True),
]


@pytest.mark.parametrize(("files", "cuts_start"), SIDES)
def test_fault_truncation_side_of_the_files_must_be_stated(
    files: dict[str, Any], cuts_start: bool, folder: Path
) -> None:
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    for run, load in (
        ({}, {}),
        ({"truncate": "START"}, {}),
        ({"truncate": "END"}, {}),
        ({}, {"accept_unproven": True}),
    ):
        model_entry = entry(folder, run=run, load=load)
        wrong = fault(folder, model_entry, model_entry.load)
        assert (wrong.loc if wrong else "") == ("$.run.truncate" if cuts_start and not run and not load else "")


# the config service


@pytest.fixture
async def api() -> AsyncIterator[config_api.Api]:
    bundles = {"default": BundleEntry("default", families=("text-encoder",))}
    tokens = {"SIE_ADMIN_TOKEN": ADMIN}
    api = await config_api.Api(MemoryServer(), bundles, topology.config_subject("default"), **tokens).start()
    yield api
    await api.client.aclose()


@pytest.mark.parametrize("dry_run", ["", "?dry_run=true"])
@pytest.mark.parametrize("loc", [*DIFFERING, "$.max_tokens"])
async def test_a_write_that_no_load_would_take_is_refused_and_changes_nothing(
    loc: str, dry_run: str, api: config_api.Api, folder: Path
) -> None:
    changes = DIFFERING.get(loc, {"max_tokens": 9999})
    created = await api.call("POST", f"/v1/configs/models{dry_run}", raw(folder, **changes), 422)
    assert created["errors"][0]["loc"] == loc
    await api.call("POST", "/v1/configs/models", raw(folder), 201)
    patch = changes | ({"prompts": {"document": None}} if loc == "$.prompts.document" else {})
    for method, body in (("PUT", raw(folder, **changes)), ("PATCH", patch)):
        refused = await api.call(method, f"{MODEL}{dry_run}", body, 422)
        assert [error["loc"] for error in refused["errors"]] == [loc]
    history = await api.call("GET", f"{MODEL}/history")
    assert [revision["revision"] for revision in history["revisions"]] == [1]


async def test_a_change_of_the_folder_of_models_that_no_load_would_take_leaves_the_models_as_they_were(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    models, stop = tmp_path / "models", Stop()
    models.mkdir()
    file = models / "m.yaml"
    file.write_text(json.dumps(raw(folder)))
    settings = settings_of(SIE_MODELS_DIR=str(models))
    prepared = await prepare(settings, MemoryServer().connect("sie-config"))
    follows = reload.Reload(prepared.store, prepared.overlay, prepared.signature, check=ModelFiles(settings).check)
    task = asyncio.create_task(follows.run(stop))
    file.write_text(json.dumps(raw(folder, run={"pooling": "cls"})))
    await until(lambda: "so the catalogue is not changed: m.yaml: " in caplog.text, "the log")
    assert "run.pooling is cls, the model's 1_Pooling says mean" in caplog.text
    assert (await prepared.store.held("my/model")).revision == 1
    file.write_text(json.dumps(raw(folder, profiles={"first": {"run": {"pooling": "cls"}}})))

    async def is_changed() -> bool:
        return (await prepared.store.held("my/model")).revision == 2

    await until_told(is_changed, "the revision with a profile")
    stop.request()
    await task
