"""A GLiNER folder as the package's model: built offline, from configurations of the folder alone, with exactly its
weights.

    gliner_config.json (+ config.json and tokenizer of the backbones) ──► package class ──► strict weights ──►
    precision, device

The package would ask the hub for each backbone that the folder does not describe, leave missing weights random, and
import code that a backbone's configuration names.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.checkpoint import _cast, construction
from sie_adapter.device import Compute
from sie_adapter.families.extraction import refuse_misfits, without_remote_code
from sie_adapter.tokenizer import read_tokenizer
from sie_contracts.entries import LoadOptions, ModelEntry
from sie_contracts.load_errors import load_failed


def load_gliner(folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> Any:
    """A `gliner.model.BaseEncoderGLiNER`, evaluating. `max_len` of the entry's parameters, in words, replaces that of
    the folder.

    Raises ModelLoadFailed: INCOMPATIBLE for weights or kinds of model that do not fit, NOT_FOUND for a backbone that is
    not at hand.
    """
    model = _built(folder, entry, load, eager=compute.backend == "eager")
    _fill(model.model, _weights(folder, entry), entry)
    _cast(model.model, compute.dtype)
    model.eval().requires_grad_(False).to(compute.device)
    for module in model.modules():
        if isinstance(module, torch.nn.LSTM):
            module.flatten_parameters()
    return model


def empty_gliner(folder: Path, entry: ModelEntry, load: LoadOptions) -> Any:
    """The same on the device `meta`, without the weights: their names and shapes are compared as a load compares them.
    Raises as that.
    """
    with torch.device("meta"):
        model = _built(folder, entry, load, eager=False)
    _compare(model.model.state_dict(), _weights(folder, entry), entry)
    return model


def _built(folder: Path, entry: ModelEntry, load: LoadOptions, *, eager: bool) -> Any:
    """The model as its configurations say, with random weights."""
    from gliner import GLiNER, GLiNERConfig
    from gliner.model import BaseBiEncoderGLiNER

    raw: dict[str, Any] = json.loads((folder / "gliner_config.json").read_text())
    raw.pop("model_type", None)
    if raw.get("relations_layer") is not None or raw.get("labels_decoder") is not None:
        raise load_failed(
            "INCOMPATIBLE", f"{entry.id} gives relations or generated labels, which the family gliner does not run"
        )
    raw["max_len"] = (entry.run.parameters or {}).get("max_len") or raw.get("max_len", 384)
    raw["_attn_implementation"] = "eager" if eager else None
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    if raw.get("encoder_config") is None or not has_tokenizer:
        _describe(raw, "model_name", "encoder_config", folder, entry)
    tokenizer = read_tokenizer(folder if has_tokenizer else Path(raw["model_name"]))
    raw["model_name"] = str(folder)  # where the package looks for an adapter of the encoder
    if raw.get("labels_encoder") is not None:
        _describe(raw, "labels_encoder", "labels_encoder_config", folder, entry)
    for part in ("encoder_config", "labels_encoder_config"):
        _check_encoder(raw.get(part), entry, load)
    with construction():
        kind = GLiNER._get_gliner_class(GLiNERConfig(**raw))
        model = kind(kind.config_class(**raw), tokenizer=tokenizer, backbone_from_pretrained=False)
        if not issubclass(kind, BaseBiEncoderGLiNER):  # those have no label tokens among the words
            kind._resize_token_embeddings(model, model.config, tokenizer)
    return model


def _describe(raw: dict[str, Any], name: str, part: str, folder: Path, entry: ModelEntry) -> None:
    """Replace the backbone `name` by its local folder: inside of the model's own, else of the hub cache. Fill in its
    configuration.
    """
    backbone = folder / raw[name]
    if not backbone.is_dir():
        # the cache that the model itself came from, where it came from one
        cache = folder.parents[2] if folder.parent.name == "snapshots" else None
        try:
            backbone = Path(snapshot_download(raw[name], cache_dir=cache, local_files_only=True))
        except (OSError, ValueError) as error:
            cause = f"its backbone {raw[name]} is neither in the hub cache nor below the model's folder"
            fix = f"`hf download {raw[name]} --include '*.json' '*.model'` fetches its configuration and tokenizer"
            raise load_failed("NOT_FOUND", f"{entry.id}: {cause}; {fix}") from error
    raw[name] = str(backbone)
    if raw.get(part) is None:
        raw[part] = json.loads((backbone / "config.json").read_text())
        if part == "encoder_config" and raw.get("vocab_size", -1) != -1:
            raw[part]["vocab_size"] = raw["vocab_size"]


def _check_encoder(config: dict[str, Any] | None, entry: ModelEntry, load: LoadOptions) -> None:
    if config is None:
        return
    without_remote_code(config, trusted=load.trust_remote_code)
    if (kind := config.get("model_type", "deberta-v2")) not in CONFIG_MAPPING:
        raise load_failed("INCOMPATIBLE", f"{entry.id}: transformers knows no encoder {kind}")


def _weights(folder: Path, entry: ModelEntry) -> dict[str, Tensor]:
    if (file := folder / "model.safetensors").is_file():
        weights: dict[str, Tensor] = load_file(file)
        return weights
    if (file := folder / "pytorch_model.bin").is_file():
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise load_failed("INCOMPATIBLE", f"{entry.id}: pytorch_model.bin holds more than tensors") from error
        return weights
    raise load_failed("INCOMPATIBLE", f"{entry.id}: its folder has neither model.safetensors nor pytorch_model.bin")


def _fill(model: torch.nn.Module, weights: dict[str, Tensor], entry: ModelEntry) -> None:
    """Copy the weights in. Raises as `_compare`."""
    own = model.state_dict()
    _compare(own, weights, entry)
    model.load_state_dict({name: weights[name] for name in own.keys() & weights.keys()}, strict=False)


def _compare(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], entry: ModelEntry) -> None:
    """Raises ModelLoadFailed INCOMPATIBLE unless the names and shapes of the weights are those of the model."""
    faults = {
        "missing": own.keys() - weights.keys(),
        "unexpected": weights.keys() - own.keys(),
        "mismatched": {name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape},
    }
    for fault, found in faults.items():
        refuse_misfits(entry, fault, found)
