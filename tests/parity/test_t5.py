"""Encoders of T5 against sentence-transformers, which reads the encoder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from inspected_models import inspected, run
from oracle import ragged_texts
from parity import tokenizer_recipes as recipes
from parity.checkpoints import MAX_TOKENS, NORMALIZE, WIDTH, _disturb, add_modules, dense, pooling
from parity.device import new_engine
from parity.table import Agreement, ParityTable
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedModel

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed

KINDS: dict[str, dict[str, Any]] = {
    "T5EncoderModel": {"feed_forward_proj": "relu"},
    "MT5EncoderModel": {"feed_forward_proj": "gated-gelu"},
    "UMT5EncoderModel": {"feed_forward_proj": "gated-gelu"},
    "T5Model": {"feed_forward_proj": "gated-gelu"},  # with a decoder, which is not read
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine(default_compute_precision="float32")
    yield engine
    assert engine.stop(10)


def build(folder: Path, kind: str) -> PreTrainedModel:
    vocabulary = recipes.XLM_ROBERTA.save(folder, MAX_TOKENS)
    model_class = getattr(transformers, kind)
    torch.manual_seed(4)
    config = model_class.config_class(
        vocab_size=vocabulary,
        **recipes.XLM_ROBERTA.ids(),
        d_model=WIDTH,
        d_ff=96,
        d_kv=16,
        num_heads=4,
        num_layers=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        decoder_start_token_id=0,
        **KINDS[kind],
    )
    model: PreTrainedModel = model_class(config)
    _disturb(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_library(kind: str, tmp_path: Path, engine: AdapterEngine, table: ParityTable) -> None:
    """The texts are ragged, and longer than the largest distance that has a position of its own. They are compared
    alone and in a batch.
    """
    folder = tmp_path / "folder"
    build(folder, kind)
    add_modules(folder, [pooling("mean"), dense(WIDTH, 40), NORMALIZE])
    texts = ragged_texts(32, seed=9)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=1)
    entry = inspected(folder)
    assert entry.load.precision == "bfloat16"  # float16 overflows
    entry = msgspec.structs.replace(entry, load=msgspec.structs.replace(entry.load, precision="float32"))
    answers = np.stack([answer["dense"] for answer in run(engine, entry, "encode", texts)])
    agreement = Agreement.of(answers, expected)
    assert agreement.cosine >= 0.9999
    table.record(f"dense {kind}", "padded", "float32", agreement)
    for text, vector in list(zip(texts, expected, strict=True))[:4]:
        np.testing.assert_allclose(run(engine, entry, "encode", [text])[0]["dense"], vector, atol=2e-5)


def test_weights_that_the_encoder_lacks_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "folder"
    build(folder, "T5EncoderModel")
    add_modules(folder, [pooling("mean"), NORMALIZE])
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.block.1.layer.0.SelfAttention.q.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"SelfAttention\.q\.weight"):
        inspected(folder)
