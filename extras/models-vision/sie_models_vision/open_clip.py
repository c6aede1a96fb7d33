"""Conversion of a SigLIP model in the format of open_clip to a SiglipModel of transformers, without the package
open_clip: tensors get other names, and some are split or joined.

    open_clip_config.json ──► SiglipConfig, and the preparation of images
    open_clip_model.safetensors ──► renamed ──► SiglipModel; each tensor must fill a parameter, and no parameter may
                                                stay empty

Sources: open_clip 3.3, CustomTextCLIP and TimmModel; timm 1.0, VisionTransformer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, SiglipConfig, SiglipModel

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import filled, placed
from sie_contracts.media.images import Filter, Normalisation, Recipe, UnknownProcessor, channels
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_store.folder_files import read_json

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
# Supported image encoders. Their MLPs use an exact GELU, which `_config` writes as hidden_act "gelu".
_TOWER = re.compile(r"vit_(base|large)_patch\d+_siglip_\d+")
_HEAD_WIDTH = 64  # width of an attention head in these image encoders; the files do not contain this number
_EPS = 1e-6  # epsilon of the layer norms of these image encoders
_FILTERS: Mapping[str, Filter] = {"bicubic": "bicubic", "bilinear": "bilinear"}
_BLOCK = re.compile(r"(text\.transformer\.resblocks|visual\.trunk\.blocks)\.(\d+)\.(.+)[._](weight|bias)")
_JOINED = re.compile(r"visual\.trunk\.attn_pool\.(q|kv)\.(weight|bias)")
_LAYERS = {  # layer of a block in open_clip -> its name in transformers
    "attn.out_proj": "self_attn.out_proj",
    "attn.proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "norm1": "layer_norm1",
    "ln_2": "layer_norm2",
    "norm2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
}
_SPLIT = ("attn.in_proj", "attn.qkv")  # names of tensors in which query, key and value are joined
_PLACES = {  # layer outside of the blocks in open_clip -> its name in transformers
    "text.token_embedding": "text_model.embeddings.token_embedding",
    "text.ln_final": "text_model.final_layer_norm",
    "text.text_projection": "text_model.head",
    "visual.trunk.patch_embed.proj": "vision_model.embeddings.patch_embedding",
    "visual.trunk.norm": "vision_model.post_layernorm",
    "visual.trunk.attn_pool.proj": "vision_model.head.attention.out_proj",
    "visual.trunk.attn_pool.norm": "vision_model.head.layernorm",
    "visual.trunk.attn_pool.mlp.fc1": "vision_model.head.mlp.fc1",
    "visual.trunk.attn_pool.mlp.fc2": "vision_model.head.mlp.fc2",
}
_BARE = {  # tensor that belongs to no layer in open_clip -> its name in transformers
    "text.positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.trunk.pos_embed": "vision_model.embeddings.position_embedding.weight",
    "visual.trunk.attn_pool.latent": "vision_model.head.probe",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}


def is_open_clip(folder: Path) -> bool:
    """Return whether the folder has the files that open_clip reads. If so, a load reads no other weights."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def load_open_clip(folder: Path, entry: ModelEntry, compute: Compute, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return the model on the device, for inference. Raises ModelLoadFailed INCOMPATIBLE for another kind of model, for
    missing tensors, additional tensors and wrong shapes, and for a tokenizer without a pad token.
    """
    pad = _pad(folder, entry, tokenizer)
    with safe_open(folder / WEIGHTS, "pt") as file:
        stored = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  no mapping
    return placed(_filled(folder, entry, stored, pad), compute)


def empty_open_clip(folder: Path, entry: ModelEntry, tokenizer: Tokenizer) -> PreTrainedModel:
    """Return the model without values, on the device `meta`. Raises the errors of `load_open_clip`."""
    pad = _pad(folder, entry, tokenizer)
    with safe_open(folder / WEIGHTS, "pt") as file, torch.device("meta"):
        names = list(file.keys())
        return _filled(folder, entry, {name: torch.empty(file.get_slice(name).get_shape()) for name in names}, pad)


def processor_of_open_clip(folder: Path, entry: ModelEntry) -> tuple[Recipe, Normalisation]:
    """Return the recipe and the normalisation of images. Raises ModelLoadFailed INCOMPATIBLE for a resizing that this
    adapter cannot reproduce, and for a mean or a standard deviation that is missing or not three numbers.
    """
    preprocessing = read_json(folder / CONFIG).get("preprocess_cfg", {})
    size = _settings(folder)["vision_cfg"].get("image_size")
    resample = _FILTERS.get(preprocessing.get("interpolation", "bicubic"))
    if preprocessing.get("resize_mode") != "squash" or resample is None or not isinstance(size, int):
        raise incompatible(
            f"{entry.id}: preprocess_cfg of {CONFIG} is {preprocessing}, expected resize_mode squash, a bicubic or "
            "bilinear interpolation, and one number as image_size"
        )
    try:
        normalisation = Normalisation(channels(preprocessing, "mean"), channels(preprocessing, "std"))
    except UnknownProcessor as error:
        raise incompatible(f"{entry.id}: preprocess_cfg of {CONFIG}: {error}") from error
    return Recipe("squash", size, size, resample=resample), normalisation


def _pad(folder: Path, entry: ModelEntry, tokenizer: Tokenizer) -> int:
    pad_token = read_json(folder / "tokenizer_config.json").get("pad_token")
    number = tokenizer.token_to_id(pad_token["content"] if isinstance(pad_token, dict) else str(pad_token))
    if number is None:
        raise incompatible(f"{entry.id}: tokenizer_config.json has no pad_token, or the tokenizer lacks it")
    return int(number)


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = read_json(folder / CONFIG).get("model_cfg", {})
    return {"vision_cfg": {}, "text_cfg": {}, **settings}


def _filled(folder: Path, entry: ModelEntry, stored: Mapping[str, Tensor], pad: int) -> PreTrainedModel:
    try:
        config, weights = _config(_settings(folder), stored, entry, pad), _renamed(stored, entry)
    except KeyError as error:
        raise incompatible(f"{entry.id}: {CONFIG} or {WEIGHTS} has no {error.args[0]}") from error
    return filled(SiglipModel, config, weights, f"{entry.id}: {WEIGHTS}")


def _config(settings: Mapping[str, Any], stored: Mapping[str, Tensor], entry: ModelEntry, pad: int) -> SiglipConfig:
    vision, text = settings["vision_cfg"], settings["text_cfg"]
    expected = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}
    deviations = {name: text.get(name) for name, value in expected.items() if text.get(name) != value}
    tower = str(vision.get("timm_model_name"))
    if deviations or not _TOWER.fullmatch(tower) or vision.get("timm_pool") != "map" or settings.get("quick_gelu"):
        raise incompatible(
            f"{entry.id}: {CONFIG} describes {tower} with {deviations or text}, which is no supported SigLIP"
        )
    rows, columns = stored["text.token_embedding.weight"].shape
    patches = stored["visual.trunk.patch_embed.proj.weight"].shape
    shared = {"hidden_act": "gelu"}
    return SiglipConfig(
        text_config={
            **shared,
            "vocab_size": rows,
            "hidden_size": columns,
            "intermediate_size": len(stored["text.transformer.resblocks.0.mlp.c_fc.weight"]),
            "num_hidden_layers": _layers(stored, "text.transformer.resblocks."),
            "num_attention_heads": text["heads"],
            "max_position_embeddings": len(stored["text.positional_embedding"]),
            "projection_size": len(stored["text.text_projection.weight"]),
            "layer_norm_eps": (text.get("norm_kwargs") or {}).get("eps", 1e-5),
            "pad_token_id": pad,
        },
        vision_config={
            **shared,
            "hidden_size": patches[0],
            "intermediate_size": len(stored["visual.trunk.blocks.0.mlp.fc1.weight"]),
            "num_hidden_layers": _layers(stored, "visual.trunk.blocks."),
            "num_attention_heads": patches[0] // _HEAD_WIDTH,
            "image_size": vision["image_size"],
            "patch_size": patches[2],
            "layer_norm_eps": _EPS,
        },
    )


def _layers(stored: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).partition(".")[0] for name in stored if name.startswith(prefix)})


def _renamed(stored: Mapping[str, Tensor], entry: ModelEntry) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".")
        if block := _BLOCK.fullmatch(name):
            side, number, layer, part = block.groups()
            place = f"{'text' if side.startswith('text') else 'vision'}_model.encoder.layers.{number}."
            if layer in _SPLIT:
                for own, chunk in zip("qkv", tensor.chunk(3), strict=True):
                    renamed[f"{place}self_attn.{own}_proj.{part}"] = chunk.contiguous()
            elif layer in _LAYERS:
                renamed[f"{place}{_LAYERS[layer]}.{part}"] = tensor
            else:
                unknown.append(name)
        elif name in _BARE:
            renamed[_BARE[name]] = tensor[0] if name.endswith("pos_embed") else _at_least_one(tensor)
        elif layer in _PLACES:
            renamed[f"{_PLACES[layer]}.{part}"] = tensor
        elif not _JOINED.fullmatch(name):
            unknown.append(name)
    for part in ("weight", "bias"):
        halves = [stored[f"visual.trunk.attn_pool.{own}.{part}"] for own in ("q", "kv")]
        renamed[f"vision_model.head.attention.in_proj_{part}"] = torch.cat(halves)
    if unknown:
        raise incompatible(f"{entry.id}: {WEIGHTS} has {len(unknown)} unexpected keys: {', '.join(unknown[:5])}")
    return renamed


def _at_least_one(tensor: Tensor) -> Tensor:
    """Return a scalar as a tensor [1]: open_clip may store scale and bias as scalars, transformers has tensors [1]."""
    return tensor if tensor.ndim else tensor[None]
