"""What folders of models that read images say of themselves: which family runs them, their width and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sie_adapter.extraction_folders import UNLIMITED, Described, tokenizer_limit

_QUESTION = "<bos>Question: {text}" + "<pad>" * 10 + "\n"  # transformers, ColPaliProcessor
_PAGES_TOKENS = 2048
_BOTH = ["text", "image"]


def described_by_image_model(folder: Path, raw: Mapping[str, Any]) -> Described | None:
    """What `folder`, whose config.json is `raw`, says if a family here runs its model of images; else None."""
    describe = _DESCRIBED.get(str(raw.get("model_type")))
    if describe is None:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    entry = describe(config, folder)
    found = f"family {entry['family']}: model_type {config.model_type} of config.json"
    return Described(entry, [found, "what is done to an image: preprocessor_config.json"])


def _dual_encoder(config: Any, folder: Path) -> dict[str, Any]:
    is_clip = config.model_type == "clip"
    return {
        "description": f"Texts and images in one space, {config.model_type}.",
        "family": "dual-encoder",
        "inputs": _BOTH,
        "outputs": {"dense": config.projection_dim if is_clip else config.text_config.projection_size},
        "max_tokens": config.text_config.max_position_embeddings,
    }


def _pages(config: Any, folder: Path) -> dict[str, Any]:
    limit = tokenizer_limit(folder) or UNLIMITED
    return {
        "description": "Late interaction between questions and pictures of pages, ColPali.",
        "family": "vision-language",
        "inputs": _BOTH,
        "outputs": {"multivector": config.embedding_dim},
        "max_tokens": min(limit, _PAGES_TOKENS),
        "prompts": {"query": _QUESTION, "document": _QUESTION},
    }


def _detector(config: Any, folder: Path) -> dict[str, Any]:
    is_owl = config.model_type == "owlv2"
    return {
        "description": f"Objects in an image by the names that a request gives them, {config.model_type}.",
        "family": "detector",
        "inputs": ["image"],
        "outputs": {"objects": 0},
        "max_tokens": config.text_config.max_position_embeddings if is_owl else config.max_text_len,
    }


_DESCRIBED: Mapping[str, Callable[[Any, Path], dict[str, Any]]] = {
    "clip": _dual_encoder,
    "siglip": _dual_encoder,
    "colpali": _pages,
    "grounding-dino": _detector,
    "owlv2": _detector,
}
