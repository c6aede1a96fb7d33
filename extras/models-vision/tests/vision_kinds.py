"""Small random models of this extra for `local_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MUVERA = {"num_repetitions": 4, "num_simhash_projections": 3, "final_projection_dim": 96}


def _clip(folder: Path) -> dict[str, Any]:
    from parity import dual_checkpoints  # it imports classes of transformers

    dual_checkpoints.clip(folder)
    return {
        "family": "dual-encoder",
        "inputs": ["text", "image"],
        "outputs": {"dense": dual_checkpoints.WIDTH},
        "max_tokens": dual_checkpoints.CLIP_TOKENS,
    }


def _pages(folder: Path) -> dict[str, Any]:
    from parity import dual_checkpoints  # it imports classes of transformers

    dual_checkpoints.colpali(folder)
    question = "<bos>Question: {text}" + "<pad>" * 10 + "\n"
    return {
        "family": "vision-language",
        "inputs": ["text", "image"],
        "outputs": {"multivector": dual_checkpoints.WIDTH},
        "max_tokens": 512,
        "prompts": {"query": question, "document": question},
        "default_prompt_name": "document",
        "profiles": {"muvera": {"run": {"muvera": MUVERA}}},
    }


KINDS = {"clip": _clip, "pages": _pages}
PUBLISHED = {"clip": "openai/clip-vit-base-patch32", "pages": "vidore/colpali-v1.3-hf"}
