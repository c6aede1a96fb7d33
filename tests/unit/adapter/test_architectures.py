"""Any transformers encoder through the packed path equals the stock model, one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from selection import long_but
from transformers import AutoModel
from unit.adapter import toys
from unit.adapter.states import LENGTHS, states_one_by_one, states_packed

from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.packed.packing import Items, expanded
from sie_contracts.errors import ModelLoadFailed

USUAL = (*("bert", "modernbert", "mpnet", "nomic_bert", "jina_embeddings_v3", "convbert"), "gemma3_text bidirectional")


@pytest.mark.parametrize("kind", long_but(toys.CONFIGS, USUAL))
def test_packed_states_equal_stock_states_one_by_one(kind: str, tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", kind)
    encoder = toys.load(folder)
    assert encoder.attention in (("eager padded", "sdpa padded") if kind in toys.PADDED else ("sdpa",))
    sequences = toys.random_ids(LENGTHS)
    for got, expected in zip(states_packed(encoder, sequences), states_one_by_one(folder, sequences), strict=True):
        assert (got - expected).abs().max() <= 2e-5


def run(encoder: TextEncoder, batch: Items) -> list[torch.Tensor]:
    """The states of each item, in order."""
    packed = encoder.pack(batch, np.arange(len(batch.lengths)))
    with torch.inference_mode():
        parts = torch.split(encoder.forward(packed), packed.lengths.tolist())
    return [parts[row] for row in np.argsort(packed.order)]


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "mpnet"])
def test_filling_that_is_not_attended_to_is_a_masked_part_of_the_stock_model(kind: str, tmp_path: Path) -> None:
    """Query expansion of late interaction masks its filling. A packed pass that attends to the filling has a cosine of
    0.8.
    """
    folder = toys.save(tmp_path / "toy", kind)
    encoder = toys.load(folder)
    stock = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    sequences = toys.random_ids([3, 9, 9, 12, 30])
    batch = Items(np.array([len(ids) for ids in sequences]), np.concatenate(sequences))
    lengths = np.array([12, 12, 0, 12, 12])
    for got, ids, length in zip(
        run(encoder, expanded(batch, lengths, 9, attended=False)), sequences, lengths, strict=True
    ):
        filled = torch.tensor([[*ids, *[9] * (length - len(ids))]])
        mask = (torch.arange(filled.shape[1]) < len(ids)).long()[None]
        with torch.inference_mode():
            expected = stock(input_ids=filled, attention_mask=mask)[0][0]
        assert (got - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("kind", ["bert", "electra", "deberta-v2"])
def test_token_types_reach_the_model_packed_and_padded(kind: str, tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", kind, type_vocab_size=2)
    encoder = toys.load(folder)
    stock = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    sequences = toys.random_ids([5, 17, 17])
    types = [np.arange(len(ids)) >= 3 for ids in sequences]
    batch = Items(np.array([5, 17, 17]), np.concatenate(sequences), np.concatenate(types).astype(np.uint8))
    for ids, kinds, got in zip(sequences, types, run(encoder, batch), strict=True):
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)[None].long()
            expected = stock(input_ids=input_ids, token_type_ids=torch.from_numpy(kinds)[None].long())[0][0]
            assert (stock(input_ids=input_ids)[0][0] - expected).abs().max() > 0.01
        assert (got - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_loads_give_the_same_bits_whatever_takes_how_long(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No choice that changes bits depends on a measured time, because times on a busy machine vary."""
    folder, generator = toys.save(tmp_path / "toy", "bert"), np.random.default_rng(0)
    for clock in ("perf_counter", "thread_time", "monotonic"):
        monkeypatch.setattr(f"time.{clock}", generator.random)
    encoders = [toys.load(folder, dtype=dtype) for _ in range(3)]
    monkeypatch.undo()
    sequences = toys.random_ids(LENGTHS)
    first, *repeats = [torch.cat(states_packed(encoder, sequences)) for encoder in encoders]
    assert all(torch.equal(first, repeat) for repeat in repeats)


def test_a_text_for_which_bigbird_has_sparse_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="sparse past 210 tokens: max_tokens may be 210 at most"):
        toys.load(toys.save(tmp_path / "toy", "big_bird", block_size=30))
