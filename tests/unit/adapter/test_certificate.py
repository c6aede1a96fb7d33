"""Checks before a model serves: each fault in a copy of a good model refuses the load, and the error names the
fault.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel
from unit.adapter import toys

from sie_adapter.loading import certificate
from sie_adapter.loading.loading import Loader
from sie_adapter.packed import attention, backbone
from sie_adapter.packed.attention import Kernel, MaskPattern
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_runtime.feed import packaged_catalogue
from sie_store.weights.sources import WeightSources

TEXTS = [
    " ".join(f"w{(17 * start + step) % 100 + 6}" for step in range(length))
    for start, length in enumerate((1, 5, 5, 20, 64, 150))
]
PROMPT = "w9 w10 "
FILES = ("model.safetensors", "config.json", "1_Pooling/config.json", "config_sentence_transformers.json")
COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40


def loader(cache: Path = Path("/nowhere"), precision: str = "float32") -> Loader:
    return Loader(torch.device("cpu"), WeightSources(cache, False), Settings(default_compute_precision=precision))


def resolved(entry: ModelEntry) -> Resolved:
    """Resolve the entry on the engine torch, because tests replace kernels of torch by wrong ones."""
    entry = changed(entry, load=msgspec.structs.replace(entry.load, engine="torch"))
    return Catalogue.resolve_profile(entry, "default", "m")


def refusal(entry: ModelEntry, cache: Path = Path("/nowhere")) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as raised:
        loader(cache).load(resolved(entry))
    return raised.value


def changed(entry: ModelEntry, **changes: Any) -> ModelEntry:
    return msgspec.structs.replace(entry, **changes)


def without_digests(entry: ModelEntry) -> ModelEntry:
    return changed(entry, weights=Weights(path=entry.weights.path))


def oracle(folder: Path, ids: list[int]) -> list[float]:
    """The mean of the states of stock transformers."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]))[0][0].mean(0).tolist()  # type: ignore[no-any-return]


def made(folder: Path) -> ModelEntry:
    """Make a folder in the layout of sentence-transformers. Return its entry with prompts and golden vectors."""
    toys.save(folder, "bert", marked=True)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()])
    )
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": PROMPT, "document": ""}})
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cases: list[dict[str, Any]] = [{"text": text} for text in TEXTS] + [{"text": TEXTS[1], "is_query": True}]
    for case in cases:
        case["vector"] = oracle(folder, tokenizer.encode((PROMPT if "is_query" in case else "") + case["text"]).ids)
    (folder / "golden.json").write_text(json.dumps({"dense": cases}))
    return toys.entry(folder, golden=str(folder / "golden.json"), prompts={"query": f"{PROMPT}{{text}}"})


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> ModelEntry:
    return made(tmp_path_factory.mktemp("models") / "good")


@pytest.fixture
def copy(good: ModelEntry, tmp_path: Path) -> ModelEntry:
    """A copy of the good model for one test. Its entry has the digests of the copy and the golden vectors of the
    original.
    """
    folder = shutil.copytree(good.weights.path, tmp_path / "good")
    return changed(good, weights=Weights(path=str(folder), digests=digests(folder)))


def with_weights(folder: Path, change: Callable[[dict[str, Tensor]], None], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def test_a_good_model_says_what_held(copy: ModelEntry) -> None:
    checks = loader().load(resolved(copy)).certificate
    assert set(checks["digests"]) == set(FILES)
    assert checks["packed"]["dense"] >= 0.99999
    assert checks["golden"] >= 0.99999
    assert checks["seconds"] > 0


# the faults


def _layer_norm(tensors: dict[str, Tensor]) -> None:
    tensors["encoder.layer.2.output.LayerNorm.weight"][3] += 1.0


def test_a_corrupt_layer_norm_is_refused(copy: ModelEntry) -> None:
    """The digest refuses it, or the golden vectors if the entry has no digest."""
    with_weights(Path(copy.weights.path), _layer_norm)
    error = refusal(copy)
    assert error.extras["error_class"] == "CERTIFICATE"
    assert "model.safetensors has the SHA-256" in error.message
    error = refusal(without_digests(copy))
    assert error.extras["error_class"] == "CERTIFICATE"
    assert "golden vector" in error.message
    assert "0.9999" in error.message


def test_another_pooling_in_the_entry_is_refused(copy: ModelEntry) -> None:
    error = refusal(changed(copy, run=msgspec.structs.replace(copy.run, pooling="cls")))
    assert (error.extras["error_class"], "run.pooling is cls, the model's 1_Pooling says mean" in error.message) == (
        "CERTIFICATE",
        True,
    )


def test_files_of_another_revision_are_refused(good: ModelEntry, copy: ModelEntry, tmp_path: Path) -> None:
    """Neither a folder with other weights nor a cache with another commit is loaded."""
    folder = Path(copy.weights.path)
    with_weights(folder, lambda tensors: tensors.update({name: tensor * 1.01 for name, tensor in tensors.items()}))
    assert "of another revision" in refusal(copy).message
    snapshot = tmp_path / "hub" / "models--toy--good" / "snapshots" / OTHER_COMMIT
    shutil.copytree(good.weights.path, snapshot)
    error = refusal(changed(copy, weights=Weights(hub="toy/good", revision=COMMIT)), tmp_path)
    assert error.extras["error_class"] == "NOT_FOUND"
    assert f"toy/good@{COMMIT} is not in the local cache" in error.message
    assert f"which has other commits of this repository: {OTHER_COMMIT}" in error.message
    right = changed(copy, weights=Weights(hub="toy/good", revision=OTHER_COMMIT))
    assert loader(tmp_path).load(resolved(right)).certificate["golden"] >= 0.99999


@pytest.mark.parametrize(
    ("golden", "text"),
    [
        ({}, "missing, empty"),
        ({"dense": [{"text": "w7", "vector": [1.0, 2.0]}]}, "2 wide, the model's are 32"),
        (None, "are missing"),
    ],
)
def test_golden_vectors_that_do_not_fit_are_refused(
    golden: dict[str, Any] | None, text: str, copy: ModelEntry, tmp_path: Path
) -> None:
    file = tmp_path / "golden.json"
    if golden is not None:
        file.write_text(json.dumps(golden))
    error = refusal(changed(copy, golden=str(file)))
    assert error.extras["error_class"] == "CERTIFICATE"
    assert text in error.message


# the packed path


def _less_one_key(
    query: Tensor, key: Tensor, value: Tensor, scale: float, pattern: MaskPattern, output: Tensor
) -> None:
    visible_keys = max(1, key.shape[2] - 1)
    attention._attend_fused(query, key[:, :, :visible_keys], value[:, :, :visible_keys], scale, pattern, output)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_kernel_that_is_wrong_and_not_the_one_that_was_tried_is_refused(
    precision: str, copy: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial at load ran another kernel. Files and weights are right, so only the comparison of the packed path
    finds the fault.
    """
    monkeypatch.setitem(attention._GROUPED, Kernel.BLOCKS, _less_one_key)
    tried = backbone.Backbone._choose_kernel
    monkeypatch.setattr(backbone.Backbone, "_choose_kernel", lambda self: (tried(self), Kernel.BLOCKS)[1])
    entry = changed(copy, golden="", load=msgspec.structs.replace(copy.load, precision=precision))
    error = refusal(entry)
    assert error.extras["error_class"] == "CERTIFICATE"
    assert "the packed path of output dense has cosine" in error.message
    assert f"bound {0.9999 if precision == 'float32' else 0.999}" in error.message


def test_a_wrong_kernel_that_the_trial_meets_costs_speed_and_not_the_model(
    copy: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention._GROUPED, Kernel.SDPA, _less_one_key)
    model = loader().load(resolved(copy))
    assert model.attention == "sdpa padded"
    assert model.certificate["golden"] >= 0.99999


def _turned(rows: list[Tensor], cosine: float) -> list[Tensor]:
    """Turn each row until its cosine with the original is `cosine`."""
    turned_rows = []
    for row in rows:
        side = torch.randn(row.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        side -= row * (side @ row) / (row @ row)
        turned_rows.append(row * cosine + side / side.norm() * row.norm() * (1 - cosine**2) ** 0.5)
    return turned_rows


@pytest.mark.parametrize(
    ("dtype", "cosine", "holds"),
    [
        (torch.float32, 0.99991, True),
        (torch.float32, 0.99989, False),
        (torch.bfloat16, 0.9991, True),
        (torch.bfloat16, 0.9989, False),
        (torch.float16, 0.9989, False),
    ],
)
def test_the_bound_is_that_of_the_precision(dtype: torch.dtype, cosine: float, holds: bool, good: ModelEntry) -> None:
    rows = list(torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    turned_rows = [*rows[:4], *_turned(rows[4:], cosine)]
    if holds:
        assert certificate._agree(good, "it", rows, turned_rows, toys.compute(dtype)) == pytest.approx(cosine, abs=1e-6)
    else:
        with pytest.raises(ModelLoadFailed, match=f"has cosine {cosine}"):
            certificate._agree(good, "it", rows, turned_rows, toys.compute(dtype))


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_must_also_rank_as_the_reference(labels: int, good: ModelEntry) -> None:
    """Large scores that are nearly equal have a good cosine in any order. The bound of Kendall's tau is 0.98."""
    values = 10 + torch.arange(40) * 1e-3
    rows = [torch.tensor([value] if labels == 1 else [-value, value]) for value in values.tolist()]
    assert certificate._agree(good, "it", rows, rows, toys.compute(torch.float32)) == 1.0
    swapped = [*rows[:4], *rows[:3:-1]]
    with pytest.raises(ModelLoadFailed, match=r"ranks differently.*Kendall's tau"):
        certificate._agree(good, "it", rows, swapped, toys.compute(torch.float32))


# repeated loads


def test_a_swap_does_not_repeat_the_certificate_and_a_change_does(
    copy: ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = certificate.certify

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[2].entry.golden)
        return real(*arguments)

    monkeypatch.setattr(certificate, "certify", counted)
    model_loader = loader()
    first, second = (model_loader.load(resolved(copy)) for _ in range(2))
    assert len(calls) == 1
    assert first.certificate == second.certificate
    golden = shutil.copy(copy.golden, tmp_path / "mine.json")
    mine = changed(copy, golden=str(golden))
    model_loader.load(resolved(mine))
    assert len(calls) == 2
    (Path(copy.weights.path) / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    )
    with pytest.raises(ModelLoadFailed, match="1_Pooling"):
        model_loader.load(resolved(copy))
    Path(golden).write_text("{}")
    with pytest.raises(ModelLoadFailed, match="SHA-256"):
        model_loader.load(resolved(mine))
    assert len(calls) == 4


# the golden file that ships

# sentence-transformers 6.2, float32: the first three values of each vector
PUBLISHED = [
    (0.011573, 0.025136, -0.036702),
    (-0.077851, -0.033280, 0.019743),
    (-0.019065, -0.093105, 0.055280),
    (-0.118838, 0.048299, -0.002548),
    (-0.037936, 0.048721, -0.009999),
    (0.073833, 0.040385, 0.088571),
    (-0.032249, 0.003895, -0.011342),
]


def test_the_golden_vectors_of_minilm_are_the_published_ones_and_are_checked() -> None:
    entry = packaged_catalogue().entries["sentence-transformers/all-MiniLM-L6-v2"]
    cases = json.loads(certificate.golden_file(entry).read_text())["dense"]
    vectors = np.array([case["vector"] for case in cases])
    assert vectors.shape == (7, 384)
    assert np.abs(vectors[:, :3] - PUBLISHED).max() <= 1e-5
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    checks = loader().load(resolved(entry)).certificate
    assert checks["digests"] == ("model.safetensors",)
    assert checks["golden"] >= 0.999999
