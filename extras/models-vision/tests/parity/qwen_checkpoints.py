"""Small random models over Qwen2.5-VL and Qwen3-VL, laid out on disk as hub repositories are, and the inputs that the
library's processor makes.

Parameters that a default initialisation leaves neutral are random. The heads of the tower, its windows, its deeper
features and the three axes of positions are small, and none is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from parity.page_retrieval import save_lora
from parity.tokenizer_recipes import TokenizerRecipe
from parity.toys import randomised, with_processor
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKENIZER = TokenizerRecipe(
    "byte-level", SPECIALS, {"eos": "<|im_end|>", "pad": "<|endoftext|>"}, "$A", "$A $B", padding_side="left"
)
WIDTH = 24
BLOCK = 28  # pixels of a block of ColQwen2.5
LEAST, MOST = 4 * BLOCK**2, 16 * BLOCK**2
BLOCK_3 = 32  # pixels of a block of Qwen3-VL, whose entries bound images by MIN_3 and MAX_3
MIN_3, MAX_3 = 4 * BLOCK_3**2, 16 * BLOCK_3**2
_LANGUAGE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_IDS = {
    "image_token_id": SPECIALS.index("<|image_pad|>"),
    "video_token_id": SPECIALS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIALS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIALS.index("<|vision_end|>"),
}
_ENDS = {
    "bos_token_id": SPECIALS.index("<|im_start|>"),
    "eos_token_id": SPECIALS.index("<|im_end|>"),
    "pad_token_id": SPECIALS.index("<|endoftext|>"),
}


def colqwen(folder: Path) -> Path:
    """The base of ColQwen2.5: a Qwen2.5-VL with a projection, by the names that published files have."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLImageProcessorPil

    folder.mkdir(parents=True)
    words = TOKENIZER.save(folder, 4096)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**_LANGUAGE, **_ENDS, "vocab_size": words, "rope_parameters": rope},
        vision_config={
            **_TOWER,
            "depth": 2,
            "out_hidden_size": 48,
            "patch_size": BLOCK // 2,
            "window_size": 2 * BLOCK,
            "fullatt_block_indexes": [1],
        },
        **_IDS,
    )
    randomised(Qwen2_5_VLModel(config)).save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    projection = {
        "custom_text_proj.weight": torch.randn(WIDTH, 48, generator=generator) * 48**-0.5,
        "custom_text_proj.bias": torch.randn(WIDTH, generator=generator) * 0.3,
    }
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("language_model.", "model."): tensor for name, tensor in stored.items()}
    save_file({**renamed, **projection}, folder / "model.safetensors", {"format": "pt"})
    _name(folder, "ColQwen2_5")
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": LEAST, "longest_edge": 4 * MOST})
    return with_processor(folder, images, "Qwen2VLImageProcessor")


def colqwen3(folder: Path) -> Path:
    """ColQwen3: a Qwen3-VL with a projection, as colpali-engine saves it."""
    qwen3_vl(folder)
    stored = load_file(folder / "model.safetensors")
    backbone = {
        name.removeprefix("model."): tensor for name, tensor in stored.items() if not name.startswith("lm_head.")
    }
    generator = torch.Generator().manual_seed(5)
    projection = {
        "custom_text_proj.weight": torch.randn(WIDTH, 48, generator=generator) * 48**-0.5,
        "custom_text_proj.bias": torch.randn(WIDTH, generator=generator) * 0.3,
    }
    save_file({**backbone, **projection}, folder / "model.safetensors", {"format": "pt"})
    _name(folder, "ColQwen3")
    return folder


def colqwen_lora(folder: Path, base: Path) -> Path:
    """A LoRA of every layer of the language model and of the projection, by the names that published files have."""
    targets = r"(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(custom_text_proj).*$)"
    return save_lora(folder, base, lambda path: not path.startswith("visual."), targets)


def qwen3_vl(
    folder: Path,
    *,
    tied: bool = True,
    axes: Sequence[int] = (4, 2, 2),
    language: Mapping[str, Any] = MappingProxyType({}),
    tower: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Qwen3-VL, whose output layer is its table of embeddings unless `tied` is false. `language`, `tower`: other sizes.
    `axes`: the numbers of rotary pairs of a head for time, height and width.
    """
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True)
    words = TOKENIZER.save(folder, 4096)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(axes), "mrope_interleaved": True}
    text = {**_LANGUAGE, **_ENDS, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": words, "rope_parameters": rope}
    config = Qwen3VLConfig(
        text_config={**text, "tie_word_embeddings": tied, **language},
        vision_config={
            **_TOWER,
            "depth": 3,
            "out_hidden_size": 48,
            "patch_size": BLOCK_3 // 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            **tower,
        },
        tie_word_embeddings=tied,
        **_IDS,
    )
    randomised(Qwen3VLForConditionalGeneration(config)).save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64 * BLOCK_3**2, "longest_edge": 16384 * BLOCK_3**2},
        patch_size=BLOCK_3 // 2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return with_processor(folder, images, "Qwen2VLImageProcessor")


def _name(folder: Path, architecture: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))


class Inputs:
    """Inputs that the library's processor makes of a prompt and its images; the processor itself needs torchvision."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._images = AutoImageProcessor.from_pretrained(folder, backend="pil", **options)

    def __call__(self, prompt: str, images: Sequence[Image.Image] = ()) -> dict[str, Tensor]:
        """`prompt` has one `<|image_pad|>` for each image."""
        features = dict(self._images(images=list(images), return_tensors="pt")) if images else {}
        counts = [int(grid.prod()) // 4 for grid in features["image_grid_thw"]] if images else []
        first, *rest = prompt.split("<|image_pad|>")
        assert len(rest) == len(counts)
        text = first + "".join("<|image_pad|>" * count + segment for count, segment in zip(counts, rest, strict=True))
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        kinds = (ids == SPECIALS.index("<|image_pad|>")).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **features}
