"""Static embeddings against their definitions in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from inspected_models import inspected
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from unit.adapter.toys import compute

from sie_adapter.families.static_embedding import StaticEmbedding
from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_contracts.wire.messages import RunOptions

WORDS = ["[UNK]", "river", "north", "runs", "bread"]
TABLE = np.random.default_rng(1).standard_normal((len(WORDS), 6)).astype(np.float32)


def model2vec(folder: Path, config: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    folder.mkdir()
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True, **(config or {})}))
    save_file(tensors or {"embeddings": TABLE}, folder / "model.safetensors")
    return folder


def encoded(folder: Path, texts: list[str]) -> list[Any]:
    entry = inspected(folder)
    return StaticEmbedding(folder, entry, entry.load, compute()).encode(texts, RunOptions())


def test_a_vector_is_the_mean_of_the_known_tokens(tmp_path: Path) -> None:
    outputs = encoded(model2vec(tmp_path / "m"), ["river north", "river and north", "bread", "", "unheard"])
    np.testing.assert_allclose(outputs[0]["dense"], TABLE[[1, 2]].mean(0), atol=1e-6)
    np.testing.assert_allclose(outputs[1]["dense"], outputs[0]["dense"], atol=1e-6)  # unknown words do not count
    np.testing.assert_allclose(outputs[2]["dense"], TABLE[4], atol=1e-6)
    assert all(isinstance(answer, InvalidInput) and answer.reason == "no_tokens" for answer in outputs[3:])


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_normalised_as_the_configuration_says(normalize: bool, tmp_path: Path) -> None:
    assert inspected(model2vec(tmp_path / "m", {"normalize": normalize})).run.normalize is normalize


def test_tokens_share_vectors_and_have_weights(tmp_path: Path) -> None:
    mapping, weights = np.array([0, 1, 1, 0, 2]), np.array([1, 2, 3, 0.5, 1], np.float32)
    folder = model2vec(tmp_path / "m", embeddings=TABLE[:3].copy(), mapping=mapping, weights=weights)
    [answer] = encoded(folder, ["north bread"])
    np.testing.assert_allclose(answer["dense"], (3 * TABLE[1] + TABLE[2]) / 2, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_long_text_is_cut_to_the_tokens_of_its_configuration(limit: int, tmp_path: Path) -> None:
    folder = model2vec(tmp_path / "m", {"max_length": limit})
    assert inspected(folder).max_tokens == limit
    [answer] = encoded(folder, ["runs bread north"])
    median = int(np.median([len(word) for word in WORDS]))
    read = "runs bread north"[: limit * median].split()[:limit]  # model2vec cuts characters first
    np.testing.assert_allclose(answer["dense"], TABLE[[WORDS.index(word) for word in read if word in WORDS]].mean(0))


def test_a_mapping_beyond_the_table_is_refused(tmp_path: Path) -> None:
    folder = model2vec(tmp_path / "m", embeddings=TABLE, mapping=np.array([0, 1, 2, 3, 5]))
    with pytest.raises(ModelLoadFailed, match="names rows that its embeddings lack"):
        inspected(folder)


def test_a_table_with_fewer_rows_than_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="the largest id of its tokenizer is 4, its table has 4 rows"):
        inspected(model2vec(tmp_path / "m", embeddings=TABLE[:4].copy()))


def test_an_entry_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = model2vec(tmp_path / "m")
    entry = msgspec.structs.replace(inspected(folder), outputs={"dense": 7})
    with pytest.raises(ModelLoadFailed, match=r"outputs\.dense is 7, the vectors of the model are 6 wide"):
        StaticEmbedding(folder, entry, entry.load, compute())
