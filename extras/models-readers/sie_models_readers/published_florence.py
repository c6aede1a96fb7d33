"""Conversion of a Florence-2 folder from the format of the model's authors to the Florence-2 class of transformers.
Settings and tensors get other names, and one matrix is transposed. The code in the folder is not run.

    config.json ──► Florence2Config
    *.safetensors ──► renamed ──► Florence2ForConditionalGeneration; a tensor without a parameter in the class is
                          refused, and so is a parameter without a tensor
    tokenizer.json ──► with the tokens that the authors' processor adds to it

Sources: transformers, convert_florence2_original_to_hf; microsoft/Florence-2-base, processing_florence2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Florence2Config, Florence2ForConditionalGeneration, GenerationConfig, PreTrainedModel

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import filled, placed
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_store.folder_files import read_json

_TEXT_TYPE = "florence2_language"  # model_type of the text model, a BART, in the authors' format
_GENERATION = "generation_config.json"
_TOKENS = (
    *("<od>", "</od>", "<ocr>", "</ocr>"),
    *(f"<loc_{number}>" for number in range(1000)),
    *("<cap>", "</cap>", "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>"),
    *("<seg>", "</seg>", "<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>"),
    *("</region_to_desciption>", "<proposal>", "</proposal>", "<poly>", "</poly>", "<and>"),
)
_TEXT = (
    *("vocab_size", "d_model", "max_position_embeddings"),
    *("encoder_layers", "encoder_ffn_dim", "encoder_attention_heads"),
    *("decoder_layers", "decoder_ffn_dim", "decoder_attention_heads"),
)
# settings that have BART's default if config.json does not set them
_TEXT_IF_SAID = (
    *("activation_function", "scale_embedding"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
)
_VISION = (
    *("depths", "num_heads", "num_groups", "window_size", "projection_dim"),
    *("patch_size", "patch_stride", "patch_padding", "patch_prenorm"),
)
_VISION_IF_SAID = {"in_chans": "in_channels", "mlp_ratio": "mlp_ratio", "qkv_bias": "qkv_bias"}
# the only values that transformers' Florence-2 supports; the authors' code supports more values
_FIXED = {"image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"], "conv_at_attn": True, "conv_at_ffn": True}
_POSITIONS = {"image_pos_embed": "learned_abs_2d", "visual_temporal_embedding": "COSINE"}
_FIXED_TEXT = {"normalize_before": False, "add_final_layer_norm": False}
# pairs: prefix of tensor names in the authors' format, and the prefix in transformers that replaces it
_PARTS = (
    ("vision_tower.", "model.vision_tower."),
    ("image_pos_embed.", "model.multi_modal_projector.image_position_embed."),
    ("image_proj_norm.", "model.multi_modal_projector.image_proj_norm."),
    ("visual_temporal_embed.", "model.multi_modal_projector.visual_temporal_embed."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
)
_LAYERS = (
    (".window_attn.norm.", ".norm1."),
    (".channel_attn.norm.", ".norm1."),
    (".ffn.norm.", ".norm2."),
    (".fn.net.", "."),
    (".fn.dw.", "."),
    (".fn.", "."),
)
_TURNED = "image_projection"  # matrix that transformers stores transposed
_BIAS = "language_model.final_logits_bias"
# names of the table of embeddings, which the files contain once or several times
_TABLES = (
    "model.language_model.shared.weight",
    "model.language_model.encoder.embed_tokens.weight",
    "model.language_model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


def is_published(folder: Path) -> bool:
    """Return whether the folder has the format of the model's authors."""
    text = read_json(folder / "config.json").get("text_config")
    return isinstance(text, dict) and text.get("model_type") == _TEXT_TYPE


def load_published(folder: Path, entry: ModelEntry, compute: Compute) -> PreTrainedModel:
    """Return the model on the device, for inference. Raises ModelLoadFailed: INCOMPATIBLE for settings that the class
    of transformers does not support, for missing tensors, additional tensors and wrong shapes, for a bias of the logits
    that is not 0, and for tables of embeddings that differ; NOT_FOUND without *.safetensors or generation_config.json.
    """
    stored: dict[str, Tensor] = {}
    for path in _files(folder, entry):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  no mapping
    if bool(stored.get(_BIAS, torch.zeros(1)).any()):
        raise incompatible(f"{entry.id}: {_BIAS} is not 0, and transformers' Florence-2 has no such bias")
    weights = _renamed(stored)
    tables = [weights[name] for name in _TABLES if name in weights]
    if any(not torch.equal(tables[0], table) for table in tables[1:]):
        raise incompatible(f"{entry.id}: its tables of embeddings differ, but transformers' Florence-2 has only one")
    return placed(_filled(folder, entry, weights), compute)


def empty_published(folder: Path, entry: ModelEntry) -> PreTrainedModel:
    """Return the model without values, on the device `meta`. Raises the errors of `load_published` that do not depend
    on values of tensors.
    """
    stored: dict[str, Tensor] = {}
    with torch.device("meta"):
        for path in _files(folder, entry):
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                stored |= {name: torch.empty(file.get_slice(name).get_shape()) for name in names}
        return _filled(folder, entry, _renamed(stored))


def published_config(folder: Path, entry_id: str) -> Florence2Config:
    """Return the settings of config.json for transformers. Raises ModelLoadFailed INCOMPATIBLE for unsupported or
    missing settings.
    """
    raw = read_json(folder / "config.json")
    text, vision = raw.get("text_config") or {}, raw.get("vision_config") or {}
    positions = {name: (vision.get(name) or {}).get("type", kind) for name, kind in _POSITIONS.items()}
    for section, fixed in ((vision, _FIXED), (positions, _POSITIONS), (text, _FIXED_TEXT)):
        for name, value in fixed.items():
            if section.get(name, value) != value:
                raise incompatible(f"{entry_id}: {name} is {section[name]}, transformers' Florence-2 supports {value}")
    try:
        return Florence2Config(
            text_config={
                "model_type": "bart",
                **{name: text[name] for name in _TEXT},
                **{name: text[name] for name in _TEXT_IF_SAID if name in text},
            },
            vision_config={
                **{name: vision[name] for name in _VISION},
                **{own: vision[name] for name, own in _VISION_IF_SAID.items() if name in vision},
                "embed_dim": vision["dim_embed"],
                "max_position_embeddings": vision["image_pos_embed"]["max_pos_embeddings"],
                "max_temporal_embeddings": vision["visual_temporal_embedding"]["max_temporal_embeddings"],
            },
            is_encoder_decoder=True,
        )
    except KeyError as error:
        raise incompatible(f"{entry_id}: config.json has no {error.args[0]}") from error


def published_tokenizer(folder: Path, entry_id: str) -> Tokenizer:
    """Return the tokenizer of the folder with the special tokens that the authors' processor adds to it. Raises
    ModelLoadFailed NOT_FOUND without a tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise load_failed(
            "NOT_FOUND", f"{entry_id}: {folder} has no tokenizer.json: copy it from microsoft/Florence-2-base"
        )
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(list(_TOKENS))
    return tokenizer


def _files(folder: Path, entry: ModelEntry) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise load_failed("NOT_FOUND", f"{entry.id}: {folder} has no *.safetensors")
    return files


def _filled(folder: Path, entry: ModelEntry, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    if not (folder / _GENERATION).is_file():
        raise load_failed(
            "NOT_FOUND", f"{entry.id}: {folder} has no {_GENERATION}: copy it from microsoft/Florence-2-base"
        )
    tables = [weights[name] for name in _TABLES if name in weights]
    whole = {**weights, **(dict.fromkeys(_TABLES, tables[0]) if tables else {})}
    model: Any = filled(Florence2ForConditionalGeneration, published_config(folder, entry.id), whole, entry.id)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    loaded: PreTrainedModel = model
    return loaded


def _renamed(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name == _TURNED:
            renamed[f"model.multi_modal_projector.{name}.weight"] = tensor.T.contiguous()
        elif name != _BIAS:
            renamed[_name(name)] = tensor
    return renamed


def _name(name: str) -> str:
    """Return the name in transformers for a name in the authors' format. Example: `vision_tower.convs.0.proj.weight`
    becomes `model.vision_tower.convs.0.conv.weight`.
    """
    place = next((own + name.removeprefix(part) for part, own in _PARTS if name.startswith(part)), name)
    if ".vision_tower." not in place:
        return place
    for part, own in _LAYERS:
        place = place.replace(part, own)
    return place.replace(".proj.", ".conv.") if ".convs." in place else place
