"""The family docling with a fake parser in its processes: answers, refusals, and a load without the package.
extras/models-readers/tests/system/test_parsing.py runs docling itself.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.loading.loading import Loader
from sie_contracts.errors import InternalFailure, InvalidInput, ModelLoadFailed, ResourceExhausted
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_models_readers.documents import docling
from sie_models_readers.documents.docling import DoclingModel
from sie_models_readers.documents.parsers import Parsers
from sie_store.weights.sources import WeightSources

ENTRY = ModelEntry("org/parser", Weights(package="docling-slim"), "docling", {"data": 0}, 512, inputs=("document",))
RESOLVED = Catalogue.resolve_profile(ENTRY, "default", ENTRY.id)
ASKED = ExtractOptions(())


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DoclingModel]:
    """Load the model of a package with one module, as the loader does."""
    fake = functools.partial(Parsers, deadline_s=60, memory_bytes=1 << 30, module="fake_parser")
    monkeypatch.setattr(docling, "Parsers", lambda most: fake(1))
    (tmp_path / "docling").mkdir()
    (tmp_path / "docling" / "__init__.py").touch()
    info = tmp_path / "docling_slim-2.143.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: docling-slim\nVersion: 2.143.0\n")
    (info / "RECORD").write_text("docling/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    docling_model = Loader(torch.device("cpu"), WeightSources(tmp_path, False), Settings()).load(RESOLVED)
    yield docling_model
    docling_model._parsers.close()


def test_each_input_is_answered_in_its_place_and_a_bad_one_fails_alone(model: DoclingModel) -> None:
    documents = [
        DocumentFile(b"first", "csv"),
        None,
        DocumentFile(b"refuse"),
        DocumentFile(b"second"),
        DocumentFile(b"third"),
    ]
    options = [
        ASKED,
        ASKED,
        ASKED,
        ExtractOptions((), parameters={"ocr": True}),
        ExtractOptions((), parameters={"ocr": False}),
    ]
    reading = model.reading(None, lambda: False)
    first, none, bad, ocr, third = reading.extract([""] * 5, options, documents)
    assert first == {
        "data": {
            "text": "first",
            "markdown": "first",
            "document": {"name": "fake"},
            "format": "csv",
            "pages": 1,
            "page_starts": ((0, 1),),
            "is_complete": True,
        }
    }
    assert isinstance(third, dict)
    assert third["data"]["text"] == "third"
    errors = [(outcome.reason, outcome.param) for outcome in (none, bad, ocr) if isinstance(outcome, InvalidInput)]
    assert errors == [("unsupported_modality", "document"), ("invalid_media", "document"), ("unknown_option", "ocr")]
    assert isinstance(bad, InvalidInput)
    assert bad.message == "document: undecodable: the document is damaged"


def test_extract_leaves_the_tree_out_without_the_parameter_tree(model: DoclingModel) -> None:
    options = [ExtractOptions((), parameters={"tree": has_tree}) for has_tree in (False, True)]
    bare, whole = model.reading(None, lambda: False).extract([""] * 2, options, [DocumentFile(b"a")] * 2)
    assert isinstance(bare, dict)
    assert isinstance(whole, dict)
    assert whole["data"].pop("document") == {"name": "fake"}
    assert bare == whole


def test_a_tree_that_does_not_fit_the_memory_of_the_machine_is_refused(
    model: DoclingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docling, "_OBJECT_BYTES", 1 << 60)
    options = [ExtractOptions((), parameters={"tree": has_tree}) for has_tree in (False, True)]
    bare, refused = model.reading(None, lambda: False).extract([""] * 2, options, [DocumentFile(b"a")] * 2)
    assert isinstance(bare, dict)
    assert isinstance(refused, ResourceExhausted)


def test_a_document_that_nobody_waits_for_is_parsed_no_further(model: DoclingModel) -> None:
    (pid,) = model.pids
    reading = model.reading(None, lambda: True)
    with pytest.raises(InternalFailure) as raised:
        reading.extract([""] * 2, [ASKED] * 2, [DocumentFile(b"sleep 60"), DocumentFile(b"never")])
    assert raised.value.reason == "cancelled"
    (answer,) = model.reading(None, lambda: False).extract([""], [ASKED], [DocumentFile(b"next")])
    assert isinstance(answer, dict)
    assert not Path(f"/proc/{pid}").exists()


def test_the_processes_of_a_model_that_is_unloaded_end(model: DoclingModel) -> None:
    compute: Any = None  # the family does not read it
    own = DoclingModel(Path(), ENTRY, ENTRY.load, compute)
    (pid,) = own.pids
    assert Path(f"/proc/{pid}").exists()
    del own
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_load_without_the_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    loader = Loader(torch.device("cpu"), WeightSources(tmp_path, True), Settings())
    for step in (loader.needed_bytes, loader.load):
        with pytest.raises(ModelLoadFailed) as refused:
            step(RESOLVED)
        assert refused.value.extras["error_class"] == "DEPENDENCY"
        assert "pip install 'sie-cluster[documents]'" in refused.value.message
