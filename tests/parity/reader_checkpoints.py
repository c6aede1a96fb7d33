"""Small random readers of documents, laid out on disk as a hub repository is.

The classes of transformers are imported where they are made: each test process would spend seconds on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from parity.dual_checkpoints import _with_processor
from parity.tokenizer_recipes import corpus
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

DONUT_SIZE = (160, 128)  # height and width
DONUT_TOKENS = 128
DONUT_TAGS = (
    *("<s_docvqa>", "<s_question>", "</s_question>", "<s_answer>", "</s_answer>"),
    *("<s_cord-v2>", "<s_menu>", "</s_menu>", "<s_nm>", "</s_nm>", "<s_price>", "</s_price>", "<sep/>"),
    *("<s_rvlcdip>", "<s_class>", "</s_class>", "<invoice/>", "<letter/>"),
)


def donut(folder: Path) -> Path:
    """Donut: a Swin of four stages and two layers of MBart's decoder."""
    from transformers import (
        DonutImageProcessorPil,
        DonutSwinConfig,
        DonutSwinModel,
        MBartConfig,
        MBartForCausalLM,
        VisionEncoderDecoderModel,
        XLMRobertaTokenizer,
    )

    tokenizer = XLMRobertaTokenizer(vocab=_unigrams(), model_max_length=DONUT_TOKENS)
    tokenizer.add_tokens(list(DONUT_TAGS))
    tokenizer.save_pretrained(folder)
    swin = DonutSwinConfig(
        image_size=list(DONUT_SIZE),
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=4,
    )
    mbart = MBartConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        max_position_embeddings=DONUT_TOKENS,
        is_decoder=True,
        add_cross_attention=True,
        scale_embedding=True,
        add_final_layer_norm=True,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = shaken(VisionEncoderDecoderModel(encoder=DonutSwinModel(swin), decoder=MBartForCausalLM(mbart)))
    model.config.tie_word_embeddings = False
    _unsettled(model.decoder, 2)
    start = tokenizer.convert_tokens_to_ids("<s_cord-v2>")
    model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id = start, 1, 2
    model.generation_config.update(pad_token_id=1, eos_token_id=2, decoder_start_token_id=start)
    model.save_pretrained(folder)
    height, width = DONUT_SIZE
    processor = DonutImageProcessorPil(size={"height": height, "width": width}, do_align_long_axis=False)
    return _with_processor(folder, processor, "DonutImageProcessor")


def shaken(model: Any, seed: int = 0) -> Any:
    """Weights in which a bias, a norm or a projection that is left out shows: none of them is neutral."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                base = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
                value.copy_(base + 0.2 * torch.randn(value.shape, generator=made))
            else:
                fan = value[0].numel() if value.dim() > 2 else value.shape[-1]
                value.copy_(torch.randn(value.shape, generator=made) * max(1, fan) ** -0.5)
    return model.eval()


def _unsettled(decoder: Any, end: int) -> None:
    """Have a decoder write other tokens for other images, and end some rows: by itself a random one repeats its last
    token.
    """
    with torch.no_grad():
        for name, value in decoder.named_parameters():
            if name.endswith("embed_positions.weight"):
                value *= 8
        decoder.get_output_embeddings().weight[end] *= 3


def _unigrams() -> list[tuple[str, float]]:
    base = Tokenizer(models.Unigram())
    base.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    base.train_from_iterator(corpus(), trainer)
    return [(piece, score) for piece, score in json.loads(base.to_str())["model"]["vocab"]]
