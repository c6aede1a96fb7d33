"""Small random ColIdefics3 (ColSmol), laid out on disk as hub repositories are: a base with its projection, a LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from parity.page_retrieval import save_lora
from parity.tokenizer_recipes import TokenizerRecipe
from parity.toys import randomised, with_processor
from safetensors.torch import load_file, save_file

TILE, LONGEST, PATCH, SCALE = 64, 256, 16, 2
TOKENS = (TILE // PATCH // SCALE) ** 2  # the tokens of a tile
WIDTH = 24
END = "<end_of_utterance>"
_TILES = LONGEST // TILE
SPECIALS = (
    "<|im_end|>",
    "<|im_start|>",
    END,
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, _TILES + 1) for column in range(1, _TILES + 1)),
)
TOKENIZER = TokenizerRecipe("byte-level", SPECIALS, {"eos": END, "pad": "<|im_end|>"}, "$A", "$A $B")


def colidefics3(folder: Path, **image_settings: Any) -> Path:
    """The base: an Idefics3 with a projection, by the names that published files have."""
    from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Model

    folder.mkdir(parents=True)
    words = TOKENIZER.save(folder, 4096)
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": words,
            "bos_token_id": SPECIALS.index("<|im_start|>"),
            "eos_token_id": SPECIALS.index(END),
            "pad_token_id": SPECIALS.index("<|im_end|>"),
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        scale_factor=SCALE,
        image_token_id=SPECIALS.index("<image>"),
        pad_token_id=SPECIALS.index("<|im_end|>"),
    )
    randomised(Idefics3Model(config)).save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    projection = {
        "linear.weight": torch.randn(WIDTH, 48, generator=generator) * 48**-0.5,
        "linear.bias": torch.randn(WIDTH, generator=generator) * 0.3,
    }
    stored = load_file(folder / "model.safetensors")
    renamed = {f"model.{name}": tensor for name, tensor in stored.items()}
    save_file({**renamed, **projection}, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["ColIdefics3"]}))
    images = Idefics3ImageProcessorPil(
        **{"size": {"longest_edge": LONGEST}, "max_image_size": {"longest_edge": TILE}, **image_settings}
    )
    return with_processor(folder, images, "Idefics3ImageProcessor")


def lora(folder: Path, base: Path) -> Path:
    """A LoRA of every layer of the language model, by the names that published files have."""
    targets = r"(.*(model.text_model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(linear).*$)"
    return save_lora(folder, base, lambda path: path.startswith("model.text_model."), targets)
