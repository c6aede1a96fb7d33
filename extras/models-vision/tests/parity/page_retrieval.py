"""Checks that every model of page retrieval passes, and the entry and the LoRA of such a model.

Inputs are questions and pages of many sizes. An oracle returns the token vectors of one input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity.page_engine import Given, Served, Vectors
from parity.table import Agreement
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from sie_contracts.models.entries import ModelEntry, parse_entry

RANK = 4
PageOracle = Callable[[Given], Vectors]


def page_entry(folder: Path, name: str, *, width: int, max_tokens: int, question: str, **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": name,
            "weights": {"path": str(folder)},
            "family": "vision-language",
            "inputs": ["text", "image"],
            "outputs": {"multivector": width},
            "max_tokens": max_tokens,
            "prompts": {"query": question, "document": question},
            **changes,
        }
    )


def in_turns(texts: Sequence[str], pages: Sequence[Image.Image]) -> list[Given]:
    return [source for pair in zip(texts, pages, strict=True) for source in pair]


def save_lora(folder: Path, base: Path, is_adapted: Callable[[str], bool], targets: str) -> Path:
    """Save a LoRA of the layers of `base` whose path `is_adapted`, by the names that published files have."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(6)
    halves = {}
    for name, weight in load_file(base / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if not (path.endswith("_proj") and is_adapted(path)):
            continue
        outputs, inputs = weight.shape
        halves[f"base_model.model.{path}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * inputs**-0.5
        halves[f"base_model.model.{path}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.3
    save_file(halves, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, lora: Path | None) -> dict[str, Tensor]:
    """Return all weights, with those of the LoRA added."""
    weights = load_file(base / "model.safetensors")
    halves = load_file(lora / "adapter_model.safetensors") if lora is not None else {}
    for name in [name for name in halves if ".lora_A." in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{path}.weight"] += halves[name.replace("lora_A", "lora_B")] @ halves[name]
    return weights


def agreement_with(oracle: PageOracle, vectors: Sequence[Vectors], sources: Sequence[Given]) -> Agreement:
    """Compare the vectors of all inputs with the oracle's, one input at a time. The shapes must be equal."""
    expected = [oracle(source) for source in sources]
    assert [own.shape for own in vectors] == [own.shape for own in expected]
    return Agreement.of(np.concatenate(vectors), np.concatenate(expected))


def check_scores(served: Served, oracle: PageOracle, question: str, pages: Sequence[Image.Image]) -> None:
    """MaxSim between a question and pages equals that of the oracle's vectors."""
    expected = [(oracle(question) @ oracle(page).T).max(1).sum() for page in pages]
    assert np.abs(np.array(served.run("score", pages, question)) - expected).max() <= 1e-4


def check_alone(served: Served, sources: Sequence[Given]) -> None:
    """The vectors of an input alone are those beside the others."""
    for source, beside in zip(sources, served.run("encode", sources), strict=True):
        (alone,) = served.run("encode", [source])
        assert np.abs(alone - beside).max() <= 5e-6
