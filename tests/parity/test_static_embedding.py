"""Static embeddings against sentence-transformers, alone and in ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from inspected_models import inspected, run
from oracle import ragged_texts
from parity import tokenizer_recipes as recipes
from parity.device import new_engine
from parity.table import Agreement, ParityTable
from parity.tokenizer_recipes import TokenizerRecipe
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import nn

from sie_adapter.engine.engine import AdapterEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine(default_compute_precision="float32")
    yield engine
    assert engine.stop(10)


@pytest.mark.parametrize("recipe", [recipes.BERT, recipes.XLM_ROBERTA, recipes.MODERNBERT])
def test_vectors_are_those_of_the_library(
    recipe: TokenizerRecipe, tmp_path: Path, engine: AdapterEngine, table: ParityTable
) -> None:
    recipe.save(tmp_path / "words", 512)
    words = Tokenizer.from_file(str(tmp_path / "words/tokenizer.json"))
    torch.manual_seed(3)
    first = StaticEmbedding(words, embedding_weights=torch.randn(words.get_vocab_size(), 48))
    layers: list[nn.Module] = [first, Dense(48, 24, True, nn.Tanh()), Normalize()]
    SentenceTransformer(modules=layers, device="cpu").save_pretrained(str(tmp_path / "folder"), create_model_card=False)
    texts = ragged_texts(64, seed=5)
    expected = SentenceTransformer(str(tmp_path / "folder"), device="cpu").encode(texts)
    entry = inspected(tmp_path / "folder")
    answers = np.stack([answer["dense"] for answer in run(engine, entry, "encode", texts)])
    agreement = Agreement.of(answers, expected)
    assert agreement.cosine >= 0.99999
    assert agreement.difference <= 1e-5
    table.record("static-embedding with dense", "padded", "float32", agreement)
    for text, vector in list(zip(texts, expected, strict=True))[:8]:
        np.testing.assert_allclose(run(engine, entry, "encode", [text])[0]["dense"], vector, atol=1e-5)
