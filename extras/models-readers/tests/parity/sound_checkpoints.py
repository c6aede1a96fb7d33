"""Small random models of sounds and texts, laid out on disk as a hub repository is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity.reader_checkpoints import byte_pieces
from parity.tokenizer_recipes import ROBERTA, TokenizerRecipe
from parity.toys import randomised
from sound_files import tone
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

from sie_contracts.models.entries import ModelEntry, parse_entry

WIDTH = 24
RATE, SECONDS = 16_000, 1
TOKENS = 120
WHISPER_SECONDS, WHISPER_TOKENS, WHISPER_BINS = 2, 64, 20
PARAKEET_BINS = 16
PARAKEET_TOKENIZER = TokenizerRecipe("unigram", ("<unk>", "<pad>"), {"unk": "<unk>", "pad": "<pad>"}, "$A", "$A $B")
LANGUAGES = ("en", "de", "fr")
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
    """Save a model with random parameters and random statistics of its normalisation."""
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


def whisper(folder: Path, *, is_multilingual: bool = True, **rules: Any) -> Path:
    """Whisper with windows of two seconds and the rules of published files (openai/whisper-tiny, or tiny.en). `rules`
    override them.
    """
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

    vocabulary, merges = byte_pieces([])
    end = len(vocabulary)
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=merges, model_max_length=WHISPER_TOKENS)
    languages = [f"<|{code}|>" for code in LANGUAGES]
    names = ["<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>", "<|startoflm|>"]
    names += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(50 * WHISPER_SECONDS + 1)])
    tokenizer.set_prefix_tokens()
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    start, silent = ids("<|startoftranscript|>"), ids("<|notimestamps|>")
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=WHISPER_BINS,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50 * WHISPER_SECONDS,
        max_target_positions=WHISPER_TOKENS,
        decoder_start_token_id=start,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        begin_suppress_tokens=None,
    )
    model = randomised(WhisperForConditionalGeneration(config), 0.2)
    with torch.no_grad():
        table = model.proj_out.weight  # also the table of the embeddings
        table[:end] *= 1.7  # else a time stamp would follow each time stamp
        table[end] *= 3  # else no text ends
        model.model.decoder.embed_positions.weight.mul_(8)  # else the model repeats its last token
    generation: dict[str, Any] = {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
        "max_length": WHISPER_TOKENS,
        "suppress_tokens": [1, 2, 7, *(ids(name) for name in names if name not in ("<|notimestamps|>",))],
        "begin_suppress_tokens": [ids("Ġ"), end],
        "no_timestamps_token_id": silent,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "is_multilingual": is_multilingual,
    }
    if is_multilingual:
        generation["lang_to_id"] = {name: ids(name) for name in languages}
        generation["task_to_id"] = {task: ids(f"<|{task}|>") for task in ("translate", "transcribe")}
        generation["forced_decoder_ids"] = [[1, None], [2, ids("<|transcribe|>")]]
    else:
        generation["forced_decoder_ids"] = [[1, silent]]
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({**generation, **rules}))
    WhisperFeatureExtractor(feature_size=WHISPER_BINS, chunk_length=WHISPER_SECONDS).save_pretrained(folder)
    return folder


def parakeet(folder: Path, **rules: Any) -> Path:
    """Parakeet TDT, whose tokens and durations depend on the sound, with the rules of generation of published files.
    `rules` override them.
    """
    from transformers import ParakeetFeatureExtractor, ParakeetForTDT, ParakeetTDTConfig

    words = PARAKEET_TOKENIZER.save(folder, 4096)
    extractor = ParakeetFeatureExtractor(feature_size=PARAKEET_BINS)
    config = ParakeetTDTConfig(
        vocab_size=words + 1,
        blank_token_id=words,
        pad_token_id=PARAKEET_TOKENIZER.vocabulary["<pad>"],
        decoder_hidden_size=24,
        num_decoder_layers=2,
        encoder_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "subsampling_conv_channels": 8,
            "num_mel_bins": PARAKEET_BINS,
            "max_position_embeddings": 500,
        },
    )
    model = randomised(ParakeetForTDT(config).eval(), 0.2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        # else all positions of a sound have the same tokens, and few are blank
        model.decoder.decoder_projector.weight.mul_(0.4)
        model.decoder.decoder_projector.bias.mul_(0.4)
        sound = np.concatenate([tone(0.9, rate=RATE, seed=seed) for seed in range(6)])
        levels = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        states = model.get_audio_features(input_features=levels).pooler_output[0]
        model.encoder_projector.weight.mul_(2 / states.std())
        states = model.get_audio_features(input_features=levels).pooler_output[0]
        model.encoder_projector.bias.sub_(states.mean(0))
        states = model.get_audio_features(input_features=levels).pooler_output
        scores = model.joint(model.decoder(torch.tensor([[words]])), states)[0]
        model.joint.head.bias.sub_(scores.mean(0))
        deviations = scores[:, :words] - scores[:, :words].mean(0)
        blank = scores[:, words] - scores[:, words].mean()
        model.joint.head.bias[words + 1] -= 1.5 * scores[:, words + 1].std()  # else most sounds end at the limit
        model.joint.head.bias[words] += (deviations.max(1).values - blank).quantile(0.3)
    model.save_pretrained(folder)
    durations = list(range(config.vocab_size, config.vocab_size + len(config.durations)))
    generation = {
        "decoder_start_token_id": words,
        "pad_token_id": config.pad_token_id,
        "suppress_tokens": durations,  # `generate` compares the scores of tokens and durations
    }
    (folder / "generation_config.json").write_text(json.dumps({**generation, **rules}))
    extractor.save_pretrained(folder)
    return folder


def reader_entry(max_tokens: int, name: str, folder: Path, **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": f"hear/{name}",
            "weights": {"path": str(folder)},
            "family": "sound-reader",
            "inputs": ["audio"],
            "outputs": {"entities": 0, "data": 0},
            "max_tokens": max_tokens,
            "load": {"precision": "float32"},
            **changes,
        }
    )
