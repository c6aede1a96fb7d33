"""The package of docs/custom-adapters.md, installed as it stands there, serves its catalogue entry."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from unit.test_inspection import SETTINGS, run

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.models.entries import ModelEntry, parse_entry

DOCUMENT = Path(__file__).parents[2] / "docs" / "custom-adapters.md"
FILES = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE))
WORDS = ["[UNK]", "query", "river", "runs", "north", ":"]
TABLE = np.random.default_rng(0).standard_normal((len(WORDS), 16)).astype(np.float16)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the distribution as pip would lay it out."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    site, name = tmp_path / "site", project["name"].replace("-", "_")
    about = site / f"{name}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        line
        for group, named in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in named.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(points))
    (site / f"{name}.py").write_text(FILES["static_embeddings.py"])
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield
    sys.modules.pop(name, None)


@pytest.fixture
def entry(tmp_path: Path) -> ModelEntry:
    """Return the entry of the document, with a folder that exists."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"embeddings": TABLE}, folder / "model.safetensors")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.save(str(folder / "tokenizer.json"))
    model_entry = parse_entry(yaml.safe_load(FILES["models/me/static.yaml"]))
    assert model_entry.weights.path
    return msgspec.structs.replace(model_entry, weights=msgspec.structs.replace(model_entry.weights, path=str(folder)))


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(SETTINGS)
    yield engine
    assert engine.stop(10)


def expected(*words: str) -> Any:
    mean = TABLE[[WORDS.index(word) for word in words]].astype(np.float32).mean(0)
    return mean / np.linalg.norm(mean)


@pytest.mark.usefixtures("installed")
def test_the_example_of_the_document_serves(engine: AdapterEngine, entry: ModelEntry) -> None:
    texts = ["river runs", "north", "north river river"]
    outputs = run(engine, entry, "encode", texts)
    for output, text in zip(outputs, texts, strict=True):
        assert np.abs(output["dense"] - expected(*text.split())).max() <= 1e-6
    (query,) = run(engine, entry, "encode", ["river"], is_query=True)
    assert np.abs(query["dense"] - expected("query", ":", "river")).max() <= 1e-6
    (model,) = engine.describe().models
    assert (model.model, model.memory_bytes) == ("me/static", TABLE.size * 4)


@pytest.mark.usefixtures("installed")
def test_a_text_that_it_refuses_leaves_the_others_alone(engine: AdapterEngine, entry: ModelEntry) -> None:
    with pytest.raises(AssertionError, match="empty_text"):
        run(engine, entry, "encode", [""])
    assert len(run(engine, entry, "encode", ["river", "north"])) == 2
