"""Parts of catalogue entries for folders of models of pages and sounds: family, outputs and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sie_adapter.loading.described import Described, of_files
from sie_adapter.loading.tokenizer import UNLIMITED, read_tokenizer, tokenizer_limit
from sie_models_readers.published_florence import is_published, published_config

_TRANSCRIBED_TOKENS = 16384  # largest max_tokens of an entry for a model that transcribes pages
_PARAKEET_POSITIONS = 375  # largest max_tokens of an entry for Parakeet: a window of 30 s, at 80 ms per position


def described(folder: Path, raw: Mapping[str, Any]) -> Described | None:
    """Return the part of a catalogue entry for `folder`, whose config.json is `raw`; None if no reader runs it."""
    describe = _DESCRIBED.get(str(raw.get("model_type")))
    if describe is None:
        return None
    if is_published(folder):
        config: Any = published_config(folder, str(folder))
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return of_files(config.model_type, describe(config, folder))


def _sound_encoder(config: Any, folder: Path) -> dict[str, Any]:
    text = config.text_config
    limit = tokenizer_limit(folder) or UNLIMITED
    return {
        "description": f"Texts and sounds in one space, {config.model_type}.",
        "family": "sound-encoder",
        "inputs": ["text", "audio"],
        "outputs": {"dense": config.projection_dim},
        "max_tokens": min(limit, text.max_position_embeddings - text.pad_token_id - 1),
    }


def _writer(description: str, reads: str, max_tokens: int) -> dict[str, Any]:
    """Return an entry for a model that writes texts. `reads`: `image` or `audio`."""
    return {
        "description": description,
        "family": "sound-reader" if reads == "audio" else "document-reader",
        "inputs": [reads],
        "outputs": {"entities": 0, "data": 0},
        "max_tokens": max_tokens,
    }


def _sound_reader(config: Any, folder: Path) -> dict[str, Any]:
    return _writer("What is said in a recording, with its times, Whisper.", "audio", config.max_target_positions)


def _parakeet(config: Any, folder: Path) -> dict[str, Any]:
    positions = min(config.encoder_config.max_position_embeddings, _PARAKEET_POSITIONS)
    return _writer("What is said in a recording, with the times of its words, Parakeet TDT.", "audio", positions)


def _donut(config: Any, folder: Path) -> dict[str, Any]:
    positions = config.decoder.max_position_embeddings
    entry = _writer("Texts and fields on the picture of a page, Donut.", "image", positions)
    tasks = _tasks(folder)
    return {**entry, **({"run": {"parameters": {"task": tasks[0]}}} if tasks else {})}


def _florence(config: Any, folder: Path) -> dict[str, Any]:
    description = "Captions, objects and texts with their places in an image, Florence-2."
    return {
        **_writer(description, "image", config.text_config.max_position_embeddings),
        "outputs": {"entities": 0, "objects": 0, "data": 0},
        "run": {"parameters": {"task": "<OCR_WITH_REGION>"}},
    }


def _transcriber(config: Any, folder: Path) -> dict[str, Any]:
    positions = min(config.text_config.max_position_embeddings, _TRANSCRIBED_TOKENS)
    return _writer(f"A page as Markdown, {config.model_type}.", "image", positions)


def _tasks(folder: Path) -> list[str]:
    """Return Donut's task tokens, with which an output begins. The token of a field has a closing token, as <s_name>
    has </s_name>; a task token has none.
    """
    names = read_tokenizer(folder).get_added_vocab()
    opened = (name for name in names if name.startswith("<s_") and f"</{name[1:]}" not in names)
    return sorted(opened, key=names.__getitem__)


_DESCRIBED: Mapping[str, Callable[[Any, Path], dict[str, Any]]] = {
    "clap": _sound_encoder,
    "whisper": _sound_reader,
    "parakeet_tdt": _parakeet,
    "vision-encoder-decoder": _donut,
    "florence2": _florence,
    "lighton_ocr": _transcriber,
    "glm_ocr": _transcriber,
    "paddleocr_vl": _transcriber,
}
