"""Load a GLiNER folder as a model of the package, without network access, and with exactly the weights in the folder.
The configuration of a backbone may also be in a subfolder or in the hub cache.

    gliner_config.json (+ config.json and tokenizer of the backbones) ──► package class ──► strict weights ──►
    precision, device

The package itself would download the description of a backbone that the folder lacks, leave missing weights random, and
import code that the configuration of a backbone names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import construction, for_inference
from sie_adapter.loading.tokenizer import read_tokenizer, take_file
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_extract.extraction import check_encoder, compare, describe_backbone, fill, read_weights


def load_gliner(folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> Any:
    """Load a `gliner.model.BaseEncoderGLiNER` for inference. `max_len` of the entry's parameters, in words, replaces
    the value of the folder. Raises ModelLoadFailed: INCOMPATIBLE for weights that do not fit or an unsupported kind of
    GLiNER, NOT_FOUND for a backbone that is not on this machine.
    """
    model = _built(folder, entry, load, eager=compute.backend == "eager")
    fill(model.model, read_weights(folder, entry), entry)
    for_inference(model, compute)
    for module in model.modules():
        if isinstance(module, torch.nn.LSTM):
            module.flatten_parameters()
    return model


def empty_gliner(folder: Path, entry: ModelEntry, load: LoadOptions) -> Any:
    """Build the model on the device `meta`, and compare its weights with the file. Raises ModelLoadFailed."""
    with torch.device("meta"):
        model = _built(folder, entry, load, eager=False)
    compare(model.model.state_dict(), read_weights(folder, entry), entry)
    return model


def _built(folder: Path, entry: ModelEntry, load: LoadOptions, *, eager: bool) -> Any:
    from gliner import GLiNER, GLiNERConfig
    from gliner.model import BaseBiEncoderGLiNER

    raw: dict[str, Any] = json.loads((folder / "gliner_config.json").read_text())
    raw.pop("model_type", None)
    _refuse_other_kinds(raw, entry)
    raw["max_len"] = (entry.run.parameters or {}).get("max_len") or raw.get("max_len", 384)
    raw["_attn_implementation"] = "eager" if eager else None
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    if raw.get("encoder_config") is None or not has_tokenizer:
        describe_backbone(raw, "model_name", "encoder_config", folder, entry)
    tokenizer = read_tokenizer(folder if has_tokenizer else Path(raw["model_name"]))
    raw["model_name"] = str(folder)  # the package looks for a PEFT adapter of the encoder in the folder of this name
    if raw.get("labels_encoder") is not None:
        describe_backbone(raw, "labels_encoder", "labels_encoder_config", folder, entry)
    for part in ("encoder_config", "labels_encoder_config"):
        check_encoder(raw.get(part), entry, load)
    with construction():
        kind = GLiNER._get_gliner_class(GLiNERConfig(**raw))
        model = kind(kind.config_class(**raw), tokenizer=tokenizer, backbone_from_pretrained=False)
        if (labels := getattr(model.data_processor, "labels_tokenizer", None)) is not None:
            take_file(labels, Path(raw["labels_encoder"]))
        if not issubclass(kind, BaseBiEncoderGLiNER):  # only a uni-encoder needs embeddings of label tokens
            kind._resize_token_embeddings(model, model.config, tokenizer)
    return model


def _refuse_other_kinds(raw: dict[str, Any], entry: ModelEntry) -> None:
    cause = ""
    if raw.get("labels_decoder") is not None:
        cause = "it generates labels (labels_decoder), which is not supported"
    elif (raw.get("relations_layer") is not None) != (entry.family == "gliner-relations"):
        cause = "a GLiNER has relations_layer in gliner_config.json if and only if its family is gliner-relations"
    elif raw.get("relations_layer") is not None and raw.get("span_mode") == "token_level":
        cause = "its relations are between tokens (span_mode token_level), which this version of gliner does not have"
    elif raw.get("triples_layer") is not None:
        cause = "it scores relations by triples: not supported, because memory would grow with pairs times labels"
    if cause:
        raise incompatible(f"{entry.id}: {cause}")
