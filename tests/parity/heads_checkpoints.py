"""Folders of models with heads of their own: SPLADE, inference-free retrievers, Stanford ColBERT, PyLate, BGE-M3.

An architecture of `checkpoints` ──► build ──► the files that published folders of that format have
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import WORDS
from parity.checkpoints import (
    ARCHITECTURES,
    MAX_TOKENS,
    NORMALIZE,
    WIDTH,
    Architecture,
    Module,
    add_modules,
    build,
    pooling,
)
from parity.tokenizer_recipes import TokenizerRecipe
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForMaskedLM, AutoTokenizer

MARKS = (".", ",", "(", ")", "'", "-")


def texts(count: int = 64, longest: int = 200, seed: int = 0) -> list[str]:
    """Return texts of log-normal length in mixed order, punctuated; the first are empty, odd, and far beyond any
    limit.
    """
    rng = random.Random(seed)
    samples = ["", "Zürich, 東京 and 😀", "it's (a) 3.14...", ".", "one " * (2 * MAX_TOKENS)]
    while len(samples) < count:
        words = rng.choices(WORDS, k=max(1, min(longest, int(rng.lognormvariate(3.0, 1.0)))))
        samples.append(" ".join(word + (rng.choice(MARKS) if rng.random() < 0.3 else "") for word in words))
    return samples


def masked(folder: Path, architecture: str) -> Path:
    """A masked LM. The bias of its decoder keeps most logits below 0, so that vectors are sparse and the relu shows."""
    build(folder, ARCHITECTURES[architecture], head=AutoModelForMaskedLM)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    bias = model.get_output_embeddings().bias
    with torch.no_grad():
        bias.sub_(1.5 * float(_logits(model).std()))
    model.save_pretrained(folder)
    return folder


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(6, 60)[None]).logits  # type: ignore[no-any-return]


def splade(folder: Path, source: Path, activation: str = "relu") -> Path:
    """Save `source`, a masked LM, with SparseEncoder."""
    transformer = Transformer(str(source), transformer_task="fill-mask", max_seq_length=MAX_TOKENS)
    modules = [transformer, SpladePooling(activation_function=activation)]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    return folder


def inference_free(folder: Path, source: Path, *, beside: bool) -> Path:
    """Save `source` for documents and a table of weights for queries. With `beside` the transformer lies in the root,
    as in published folders.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    weights = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(0)) + 0.1
    weights[::7] = 0
    transformer = Transformer(str(source), transformer_task="fill-mask", max_seq_length=MAX_TOKENS)
    router = Router.for_query_document([SparseStaticEmbedding(tokenizer, weights)], [transformer, SpladePooling()])
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder), create_model_card=False)
    if beside:
        config = folder / "router_config.json"
        config.write_text(config.read_text().replace('"document_0_Transformer"', '""'))
        for file in (folder / "document_0_Transformer").iterdir():
            file.rename(folder / file.name)
    return folder


def idf(folder: Path) -> Path:
    """Write OpenSearch's idf.json beside the masked LM of `folder`, without every seventh token."""
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    rng = random.Random(1)
    (folder / "idf.json").write_text(
        json.dumps({token: 0.1 + rng.random() for token, number in vocabulary.items() if number % 7})
    )
    return folder


def stanford(folder: Path, width: int, metadata: dict[str, Any] | None) -> Path:
    """A BERT with its projection beside its weights, as colbert-ir publishes it. `metadata` None: without
    artifact.metadata.
    """
    build(folder, ARCHITECTURES["bert"])
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    projection = torch.randn(width, WIDTH, generator=torch.Generator().manual_seed(3))
    save_file({**tensors, "linear.weight": projection}, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return folder


def with_markers(name: str, markers: Sequence[str] = ("[Q] ", "[D] ")) -> Architecture:
    """The architecture with a tokenizer that has these tokens, trailing spaces included."""
    architecture = ARCHITECTURES[name]
    recipe = replace(architecture.tokenizer, specials=(*architecture.tokenizer.specials, *markers))
    return replace(architecture, tokenizer=recipe)


def pylate(folder: Path, architecture: Architecture, projections: Sequence[Module], config: dict[str, Any]) -> Path:
    """A folder as PyLate saves it: Transformer and Dense modules, everything else in
    config_sentence_transformers.json.
    """
    build(folder, architecture)
    rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, module in enumerate(projections, 1):
        place = folder / f"{number}_Dense"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(module.config))
        save_file(module.tensors, place / "model.safetensors", {"format": "pt"})
        rows.append({"idx": number, "name": str(number), "path": place.name, "type": "pylate.models.Dense.Dense"})
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    )
    defaults = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**defaults, **config}))
    return folder


def residual(module: Module, seed: int = 9) -> Module:
    """`module` with a residual connection, through weights of its own where the widths differ."""
    width, output = module.config["in_features"], module.config["out_features"]
    tensors = dict(module.tensors)
    if width != output:
        tensors["residual.weight"] = (
            torch.randn(output, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
        )
    return replace(module, config={**module.config, "use_residual": True}, tensors=tensors)


class _FixedUnigram(TokenizerRecipe):
    """A unigram vocabulary that is written down: a trained one differs a little from one process to the next."""

    def train(self) -> Tokenizer:
        pieces = [(token, 0.0) for token in self.specials]
        pieces += [(f"▁{word}", -3.0 - number / 100) for number, word in enumerate(WORDS)]
        pieces += [(letter, -9.0 - number / 100) for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz.,()'-")]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=self.vocabulary["<unk>"]))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=self.single, pair=self.pair, special_tokens=list(self.vocabulary.items())
        )
        return tokenizer


M3_WIDTH = 32
M3_TOKENS = 64


def bge_m3(folder: Path, behind: Sequence[Module] = ()) -> Path:
    """Build a model like BAAI/bge-m3: an XLM-R with its two heads beside it. Every number is drawn by numpy, so it is
    the same in any environment.

    `behind`: modules between its pooling and its normalisation.
    """
    large = ARCHITECTURES["xlm-roberta"]
    recipe = _FixedUnigram(
        **{field.name: getattr(large.tokenizer, field.name) for field in fields(large.tokenizer) if field.init}
    )
    small = {"hidden_size": M3_WIDTH, "max_position_embeddings": M3_TOKENS + 2}
    build(folder, replace(large, tokenizer=recipe, config={**large.config, **small}))
    rng = np.random.default_rng(7)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: _drawn(rng, tensors[name]) for name in sorted(tensors)}, folder / "model.safetensors", {"format": "pt"}
    )
    for name, width in (("sparse", 1), ("colbert", M3_WIDTH)):
        layer = torch.nn.Linear(M3_WIDTH, width).state_dict()
        torch.save({key: _drawn(rng, layer[key]) for key in sorted(layer)}, folder / f"{name}_linear.pt")
    return add_modules(folder, [pooling("cls", M3_WIDTH), *behind, NORMALIZE])


def _drawn(rng: np.random.Generator, like: torch.Tensor) -> torch.Tensor:
    values = rng.standard_normal(tuple(like.shape)) * (0.3 if like.ndim > 1 else 0.2)
    return torch.from_numpy(values + (like.ndim == 1 and float(like.mean()) > 0.5)).float()
