"""Small random folders of models of typed decisions, each of the package's real class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from laya.common import DecisionModel
from parity.gliner_checkpoints import _shake, _wrapped
from safetensors.torch import save_file
from transformers import ModernBertConfig, ModernBertModel

_ENCODER = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}


def laya_folder(folder: Path, *, head_layers: int = 2, **settings: Any) -> Path:
    """A folder that the package loads too. `settings` are those of its configuration."""
    tokenizer = _wrapped("unigram")
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    encoder = ModernBertModel(ModernBertConfig(**_ENCODER, vocab_size=len(tokenizer)))
    model = DecisionModel(encoder, head_layers, n_act=3).eval()
    _shake(model, seed=1)
    config = {
        "encoder": "no/backbone",
        "head_layers": head_layers,
        "act_costs": {"ask": 0.1, "wait": 0.2},
        "max_len": 256,
        "head_max_len": 120,
        "temperature": [1.3, 0.7, 1.1],
        "temperature_by_options": {"choice:6-10": 0.1, "noul:2": 2.5},
        **settings,
    }
    (folder / "rl_agent_config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder.config.save_pretrained(folder / "encoder")
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder
