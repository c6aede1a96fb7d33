"""Parts of catalogue entries for model folders of the extraction packages: family, outputs and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sie_adapter.loading.described import Described
from sie_adapter.loading.tokenizer import UNLIMITED, tokenizer_limit
from sie_store.folder_files import read_json

LAYA = "rl_agent_config.json"  # name of the configuration file of a model of the family laya
_GLINER_WORDS = 384
# A window of GLiNER (section of a text that runs as one sequence) has at most this number of tokens per word, or fewer
# if the files have a lower limit. The package limits only words, and counts a whole Chinese clause as one word.
TOKENS_PER_WORD = 8
_WINDOW = 512  # max_tokens of an entry if the model's files have no limit; for GLiNER2 also its upper bound


def described_by_package(folder: Path, raw: dict[str, Any]) -> Described | None:
    """Return part of an entry for `folder` with config.json `raw`; None if no extraction package reads the folder."""
    if (folder / "gliner_config.json").is_file():
        return _gliner(folder)
    if (folder / LAYA).is_file():
        return _laya(read_json(folder / LAYA))
    if raw.get("model_type") == "extractor" or "GLiNER2" in (raw.get("architectures") or ()):
        return _gliner2(folder, raw)
    if raw.get("model_type") == "GLiClass" or "GLiClassModel" in (raw.get("architectures") or ()):
        return _gliclass(raw)
    return None


def _gliner(folder: Path) -> Described:
    raw = read_json(folder / "gliner_config.json")
    encoder = raw.get("encoder_config") or {}
    words = raw.get("max_len", _GLINER_WORDS)
    limits = [tokenizer_limit(folder), _table(encoder), TOKENS_PER_WORD * words]
    relates = raw.get("relations_layer") is not None
    family = "gliner-relations" if relates else "gliner"
    subject = "Entities, and relations between them," if relates else "Entities"
    entry = {
        "description": f"{subject} of types that a request names, {raw.get('span_mode', 'markerV0')}.",
        "family": family,
        "outputs": {"entities": 0, "relations": 0} if relates else {"entities": 0},
        "max_tokens": min(limit for limit in limits if limit),
    }
    findings = [f"family {family}: gliner_config.json, windows of {words} words"]
    if not encoder:
        findings.append(
            f"its backbone {raw.get('model_name')} is elsewhere: in the folder of that name, or in the hub cache"
        )
    return Described(entry, findings)


def _laya(raw: dict[str, Any]) -> Described:
    entry = {
        "description": "Typed decisions about a text: choices, scales and statements, by Laya.",
        "family": "laya",
        "outputs": {"classifications": 0},
        "max_tokens": int(raw.get("max_len", _WINDOW)),
    }
    return Described(entry, [f"family laya: {LAYA}"])


def _gliner2(folder: Path, raw: dict[str, Any]) -> Described:
    limits = [tokenizer_limit(folder), _table(read_json(folder / "encoder_config" / "config.json")), _WINDOW]
    entry = {
        "description": "Entities of types that a request names, by GLiNER2.",
        "family": "gliner2",
        "outputs": {"entities": 0},
        "max_tokens": min(limit for limit in limits if limit),
    }
    return Described(entry, [f"family gliner2: config.json, architecture {raw.get('architecture') or 'span'}"])


def _table(encoder: dict[str, Any]) -> int | None:
    """Return the number of positions of an encoder; None for DeBERTa-v2, which needs no table of positions, and for a
    configuration without max_position_embeddings.
    """
    kind = encoder.get("model_type", "deberta-v2")
    return None if kind == "deberta-v2" else encoder.get("max_position_embeddings")


def _gliclass(raw: dict[str, Any]) -> Described:
    encoder = raw.get("encoder_config") or {}
    entry = {
        "description": "Scores of classes that a request names.",
        "family": "gliclass",
        "outputs": {"classifications": 0},
        "max_tokens": min(encoder.get("max_position_embeddings") or _WINDOW, UNLIMITED),
    }
    return Described(entry, ["family gliclass: config.json"])
