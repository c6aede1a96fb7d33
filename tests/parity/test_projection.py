"""Dense vectors through the Dense modules of a folder equal SentenceTransformer's: folders like stella and
embeddinggemma, and less usual ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.checkpoints import (
    ARCHITECTURES,
    MAX_TOKENS,
    NORMALIZE,
    WIDTH,
    Module,
    Pooling,
    add_modules,
    build,
    dense,
    pooling,
)
from parity.heads_checkpoints import residual, texts
from parity.heads_engine import MAX_DIFFERENCE, HeadsEngine
from parity.table import Agreement, ParityTable
from safetensors.torch import save_file
from selection import long_but
from sentence_transformers import SentenceTransformer

from sie_contracts.errors import ModelLoadFailed


def _unnamed(module: Module) -> Module:
    """Return the module without an activation in its configuration, which then is the default of the library."""
    return Module(
        module.kind,
        {key: value for key, value in module.config.items() if key != "activation_function"},
        module.tensors,
    )


FOLDERS: dict[str, tuple[str, Pooling, Sequence[Module]]] = {
    "stella": ("gte", "mean", [dense(WIDTH, 96, bias=True)]),
    "stella 1.5B": ("qwen2 bidirectional", "mean", [dense(WIDTH, 48, bias=True)]),
    "embeddinggemma": ("gemma3 bidirectional", "mean", [dense(WIDTH, 96), dense(96, 40, seed=1)]),
    "tanh": ("bert", "cls", [_unnamed(dense(WIDTH, 32, bias=True))]),
    "residual": (
        "bert",
        "mean",
        [residual(dense(WIDTH, WIDTH, activation=torch.nn.GELU)), residual(dense(WIDTH, 32, bias=True))],
    ),
}


@pytest.mark.parametrize("name", long_but(FOLDERS, ["stella", "tanh"]))
def test_projected_vectors_equal_the_oracle(name: str, tmp_path: Path, table: ParityTable) -> None:
    """The 32 vectors are compared with and without normalisation. Like stella, the folder has a Dense that it does not
    list.
    """
    architecture, mode, layers = FOLDERS[name]
    folder = add_modules(build(tmp_path / "model", ARCHITECTURES[architecture]), [pooling(mode), layers[0], NORMALIZE])
    _list(folder, layers)
    engine = HeadsEngine()
    width = layers[-1].config["out_features"]
    model, sentences = engine.load(folder, {"dense": width}, max_tokens=MAX_TOKENS), texts(32)
    stock = SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"attn_implementation": "eager"}
    )
    bare = SentenceTransformer(modules=list(stock)[:-1], device="cpu")  # before Normalize
    for normalize, oracle in ((True, stock), (False, bare)):
        expected = oracle.encode(sentences, batch_size=1, show_progress_bar=False)
        vectors = np.stack([row["dense"] for row in model.encode(sentences, "dense", normalize=normalize)])
        assert vectors.shape == (32, width)
        agreement = Agreement.of(vectors, expected)
        table.record(f"projected {name}", model.path, model.encoder.precision, agreement)
        assert agreement.difference <= MAX_DIFFERENCE
    engine.stop()


def _list(folder: Path, layers: Sequence[Module]) -> None:
    """Lay the Dense modules out as stella does, in folders named by width, one of them not listed."""
    rows = [row for row in json.loads((folder / "modules.json").read_text()) if not row["type"].endswith("Dense")]
    (folder / "2_Dense").rename(folder / "2_Dense_8192")
    for number, layer in enumerate(layers, 2):
        place = folder / f"{number}_Dense_{layer.config['out_features']}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(layer.config))
        save_file(layer.tensors, place / "model.safetensors", {"format": "pt"})
        rows.insert(number, {"path": place.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(
        json.dumps([{**row, "idx": number, "name": str(number)} for number, row in enumerate(rows)])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_features": 33}, "weights are missing"),
        ({"bias": False}, "weights are missing"),
        ({"use_residual": True}, "residual weights are missing"),
        ({"activation_function": "torch.nn.modules.activation.Threshold"}, r"activation torch.*\.Threshold"),
    ],
)
def test_a_dense_module_that_does_not_fit_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    layer = dense(WIDTH, 32, bias=True)
    broken = Module(layer.kind, {**layer.config, **change}, layer.tensors)
    folder = add_modules(build(tmp_path / "model", ARCHITECTURES["bert"]), [pooling("mean"), broken])
    engine = HeadsEngine()
    with pytest.raises(ModelLoadFailed, match=message):
        engine.load(folder, {"dense": 32}, max_tokens=MAX_TOKENS)
    engine.stop()
