"""Parts of catalogue entries for folders of models of images: family, widths and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sie_adapter.loading.checkpoint import stored_rows
from sie_adapter.loading.described import Described, of_files
from sie_adapter.loading.tokenizer import UNLIMITED, tokenizer_limit
from sie_models_vision.open_clip import CONFIG, is_open_clip

# prompt of every query and document for ColPali. Source: transformers, ColPaliProcessor
_QUESTION = "<bos>Question: {text}" + "<pad>" * 10 + "\n"
# prompt of every query and document for ColQwen. Source: colpali-engine 0.3.18, ColQwen2_5_Processor
_QWEN_QUESTION = "{text}" + "<|endoftext|>" * 10
# largest number of blocks (merged patches) of a page. Source: colpali-engine, ColQwen2.5 and training of ColQwen3
_QWEN_PAGE_BLOCKS = 768
# prompt of every query and document for ColIdefics3. Source: colpali-engine 0.3.18, ColIdefics3Processor
_IDEFICS_QUESTION = "{text}" + "<end_of_utterance>" * 10
_QWEN_TURNS = "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{text}"
# smallest and largest number of blocks (merged patches) of an image, from the vendor's code of Qwen3-VL-Embedding
_QWEN_BLOCKS = (4, 1800)
_PAGES_TOKENS = 2048  # largest max_tokens of an entry for late interaction with pages
_ASSUMED = {
    "multimodal-encoder": (
        "an encoder (a reranker needs the family multimodal-reranker, pair, head.yes_token and head.no_token)"
    ),
    "vision-language": "no LoRA (if the model was trained with a LoRA, name the LoRA in run.lora)",
}
_BOTH = ["text", "image"]


def described(folder: Path, raw: Mapping[str, Any]) -> Described | None:
    """Return the part of a catalogue entry for `folder`, whose config.json is `raw`; None if no family here runs it."""
    if is_open_clip(folder):
        return _open_clip(folder)
    describe = _DESCRIBED.get(str(raw.get("model_type")))
    if describe is None:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    entry = describe(config, folder)
    return of_files(config.model_type, entry, _ASSUMED.get(entry["family"], "")) if entry is not None else None


def _open_clip(folder: Path) -> Described:
    entry = {
        "description": "Texts and images in one space, a SigLIP of open_clip.",
        "family": "dual-encoder",
        "inputs": _BOTH,
        "outputs": {"dense": stored_rows(folder, "text.text_projection.weight")},
        "max_tokens": stored_rows(folder, "text.positional_embedding"),
    }
    return Described(entry, [f"family dual-encoder, and how an image is prepared: {CONFIG}"])


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
    return _projected_pages("pictures of pages, ColPali", config.embedding_dim, _QUESTION, folder)


def _qwen_pages(config: Any, folder: Path) -> dict[str, Any] | None:
    """Return part of an entry for ColQwen; None for a Qwen-VL without a projection to token vectors."""
    if not (width := stored_rows(folder, "custom_text_proj.weight")):
        return None
    name, vision = "ColQwen3" if config.model_type == "qwen3_vl" else "ColQwen2.5", config.vision_config
    return {
        **_projected_pages(f"pictures of pages of any size, {name}", width, _QWEN_QUESTION, folder),
        "load": {"max_pixels": _QWEN_PAGE_BLOCKS * (vision.patch_size * vision.spatial_merge_size) ** 2},
    }


def _tiled_pages(config: Any, folder: Path) -> dict[str, Any] | None:
    """Return part of an entry for ColIdefics3; None for an Idefics3 without a projection to token vectors."""
    if not (width := stored_rows(folder, "linear.weight")):
        return None
    return _projected_pages("pictures of pages, ColIdefics3", width, _IDEFICS_QUESTION, folder)


def _projected_pages(pages: str, width: int, question: str, folder: Path) -> dict[str, Any]:
    return {
        "description": f"Late interaction between questions and {pages}.",
        "family": "vision-language",
        "inputs": _BOTH,
        "outputs": {"multivector": width},
        "max_tokens": min(tokenizer_limit(folder) or UNLIMITED, _PAGES_TOKENS),
        "prompts": {"query": question, "document": question},
        "default_prompt_name": "document",
    }


def _qwen3(config: Any, folder: Path) -> dict[str, Any]:
    """Return an entry for ColQwen3 if the files have its projection, else for Qwen3-VL-Embedding. The files of a
    Qwen3-VL-Reranker have the same form, so a reranker also gets an entry for Qwen3-VL-Embedding.
    """
    return _qwen_pages(config, folder) or {
        "description": "Texts, images and both together, Qwen3-VL.",
        "family": "multimodal-encoder",
        "inputs": _BOTH,
        "outputs": {"dense": config.text_config.hidden_size},
        "max_tokens": min(tokenizer_limit(folder) or UNLIMITED, config.text_config.max_position_embeddings),
        "prompts": {
            "query": _QWEN_TURNS,
            "document": _QWEN_TURNS,
            "default_instruction": "Represent the user's input.",
        },
        "default_prompt_name": "document",
        "load": {"min_pixels": _QWEN_BLOCKS[0] * 32**2, "max_pixels": _QWEN_BLOCKS[1] * 32**2},
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


_DESCRIBED: Mapping[str, Callable[[Any, Path], dict[str, Any] | None]] = {
    "clip": _dual_encoder,
    "siglip": _dual_encoder,
    "colpali": _pages,
    "qwen2_5_vl": _qwen_pages,
    "qwen3_vl": _qwen3,
    "idefics3": _tiled_pages,
    "grounding-dino": _detector,
    "owlv2": _detector,
}
