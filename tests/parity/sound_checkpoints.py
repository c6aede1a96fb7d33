"""Small random models of sounds and texts, laid out on disk as a hub repository is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parity.tokenizer_recipes import ROBERTA
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

WIDTH = 24
RATE, SECONDS = 16_000, 1
TOKENS = 120
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 64,
    "spec_size": 128,
    "window_size": 8,
    "patch_embeds_hidden_size": 16,
    "depths": [1, 1, 2],
    "num_attention_heads": [2, 2, 4],
    "hidden_size": 64,
}


def clap(folder: Path, *, fused: bool = False) -> Path:
    """CLAP, as published folders have it (laion/clap-htsat-unfused), or with views that are fused
    (laion/clap-htsat-fused).
    """
    text = {
        "vocab_size": ROBERTA.save(folder, TOKENS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": TOKENS + ROBERTA.vocabulary["<pad>"] + 1,
        **ROBERTA.ids(),
    }
    fusion = {"enable_fusion": True, "fusion_type": "aff_2d"} if fused else {}
    config = ClapConfig(text_config=text, audio_config={**_AUDIO, **fusion}, projection_dim=WIDTH)
    _save(ClapModel(config), folder)
    extractor = ClapFeatureExtractor(
        sampling_rate=RATE,
        max_length_s=SECONDS,
        fft_window_size=512,
        hop_length=160,
        frequency_min=50,
        frequency_max=7000,
        truncation="fusion" if fused else "rand_trunc",
    )
    extractor.save_pretrained(folder)
    return folder


def _save(model: ClapModel, folder: Path) -> None:
    """What a default initialisation leaves neutral is random, and so is what the normalisation of bands has seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and not name.startswith("logit_scale"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif parameter.ndim >= 2:
                scale = max(1, parameter[0].numel()) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 5 - 40)
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 200 + 100)
    model.save_pretrained(folder)
