"""What loads, what is refused, and what a loaded encoder is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from unit.adapter import toys
from unit.adapter.states import LENGTHS, states_one_by_one, states_packed

from sie_adapter.linear import BlockedLinear, block_linears
from sie_adapter.loading import Loader, stored_pooling
from sie_adapter.weights import WeightSources
from sie_contracts.catalogue import Catalogue, Resolved
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.settings import Settings


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save(tmp_path_factory.mktemp("models") / "toy", "bert")


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def resolved(folder: Path, **changes: Any) -> Resolved:
    return Catalogue.resolve_profile(toys.entry(folder, **changes), "default", "m")


def load_error(entry: Resolved) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as raised:
        Loader(torch.device("cpu"), WeightSources(Path("/nowhere"), False), Settings(default_compute_precision="float32")).load(entry)
    return raised.value


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_the_architecture_fail_the_load(change: str, bert: Path, tmp_path: Path) -> None:
    """W5: nothing is ever freshly initialised."""
    folder = copied(bert, tmp_path / "toy")
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.attention.self.query.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["head.weight"] = torch.zeros(2, 2)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = load_error(resolved(folder))
    assert error.extras["error_class"] == "INCOMPATIBLE"
    assert "query" in error.message or "head.weight" in error.message


def test_a_pooler_may_be_absent_because_it_is_never_run(bert: Path, tmp_path: Path) -> None:
    folder = copied(bert, tmp_path / "toy")
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if not name.startswith("pooler")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    toys.load(folder)


def test_pickled_weights_are_not_read(bert: Path, tmp_path: Path) -> None:
    """X6."""
    folder = copied(bert, tmp_path / "toy")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_error(resolved(folder)).extras["error_class"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"max_tokens": 301}, "300 positions"), ({"outputs": {"dense": 64}}, "32 wide"), ({"family": "ner"}, "no family ner")],
)
def test_an_entry_that_does_not_fit_the_model_fails_the_load(changes: dict[str, Any], text: str, bert: Path) -> None:
    error = load_error(resolved(bert, **changes))
    assert error.extras["error_class"] == "INCOMPATIBLE"
    assert text in error.message


def test_roberta_kinds_lose_the_positions_before_their_first(tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", "xlm-roberta")  # pad id 5: positions start at 6
    toys.load(folder, max_tokens=294)
    assert "294 positions" in load_error(resolved(folder, max_tokens=295)).message


def modules(folder: Path, *kinds: str, **pooling: Any) -> Path:
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    rows = [{"type": f"sentence_transformers.models.{kind}", "path": "pool" if kind == "Pooling" else ""} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "pool" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_of_a_model_is_read_from_its_own_files(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert stored_pooling(modules(tmp_path, "Transformer", "Pooling", "Normalize", **config)) == expected
    assert stored_pooling(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("kinds", "config", "text"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls"),
    ],
)
def test_a_module_that_would_be_left_out_fails_the_load(kinds: tuple[str, ...], config: dict[str, Any], text: str, tmp_path: Path) -> None:
    """W3."""
    with pytest.raises(ModelLoadFailed, match=text):
        stored_pooling(modules(tmp_path, *kinds, **config))


def test_the_tokenizer_goes_out_without_truncation_and_padding(bert: Path) -> None:
    tokenizer = Tokenizer.from_str(toys.load(bert).tokenizer.decode())
    assert tokenizer.truncation is None
    assert tokenizer.padding is None
    assert tokenizer.encode("w7 w8").ids == [7, 8]


def test_eager_is_the_same_model(bert: Path) -> None:
    encoder = toys.load(bert, backend="eager")
    assert encoder.attention == "eager"
    sequences = toys.random_ids(LENGTHS[:6])
    for got, expected in zip(states_packed(encoder, sequences), states_one_by_one(bert, sequences), strict=True):
        assert (got - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_bfloat16_is_near_float32_and_keeps_rotary_bases(kind: str, tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", kind)
    encoder = toys.load(folder, dtype=torch.bfloat16)
    assert encoder.precision == "bfloat16"
    assert {buffer.dtype for buffer in encoder._model.buffers() if buffer.is_floating_point()} <= {torch.float32}
    assert {parameter.dtype for parameter in encoder._model.parameters()} == {torch.bfloat16}
    sequences = toys.random_ids(LENGTHS)
    for got, expected in zip(states_packed(encoder, sequences), states_one_by_one(folder, sequences), strict=True):
        assert torch.nn.functional.cosine_similarity(got.float().mean(0), expected.mean(0), dim=0) > 0.998


def test_a_load_leaves_the_precision_of_the_process_alone(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that computes while another model loads must not see another default."""
    seen: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", seen.append)
    toys.load(bert, dtype=torch.bfloat16)
    assert set(seen) <= {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_linears_are_as_exact_as_the_stock_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)).to(dtype)
    states = torch.randn(3, 70, 384).to(dtype)
    with torch.inference_mode():
        expected = model(states)
        block_linears(model)
        error = (model(states) - expected).abs().max()
    assert error <= (1e-5 if dtype is torch.float32 else 2e-2)


def test_a_layer_that_is_tied_to_an_embedding_is_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(512, 64)
            self.head = nn.Linear(64, 512)
            self.head.weight = self.embedding.weight

    model = Tied()
    assert block_linears(model) == 0
    assert not isinstance(model.head, BlockedLinear)


def test_an_item_is_the_same_alone_and_with_mates(bert: Path) -> None:
    encoder = toys.load(bert)
    sequences = toys.random_ids(LENGTHS, seed=3)
    together = states_packed(encoder, sequences)
    for state, ids in zip(together, sequences, strict=True):
        np.testing.assert_allclose(states_packed(encoder, [ids])[0], state, atol=5e-6)
