"""Small random detectors, laid out on disk as a hub repository is."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from parity.dual_checkpoints import clip_tokenizer
from parity.tokenizer_recipes import word_pieces
from parity.toys import edit_weights, randomised, with_processor
from torch import Tensor
from transformers import (
    BertConfig,
    BertTokenizer,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessorPil,
    SwinConfig,
)

SHORTER, LONGEST = 96, 160
QUERIES = 50
PROMPT_TOKENS, LABEL_TOKENS = 256, 16
SIDE = 96
# the ids of bert-base-uncased; the model compares ids with those of four of these tokens
_PLACES = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}


def grounding_dino(folder: Path, places: dict[str, int] | None = None) -> Path:
    """Grounding DINO with a Swin of four stages. `places`: ids of tokens, other than those of BERT."""
    tokenizer = _bert_tokenizer({**_PLACES, **(places or {})})
    swin = SwinConfig(
        embed_dim=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8], window_size=4, out_indices=[2, 3, 4], image_size=96
    )
    bert = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    config = GroundingDinoConfig(
        backbone_config=swin,
        text_config=bert,
        d_model=32,
        num_queries=QUERIES,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    )
    randomised(GroundingDinoForObjectDetection(config)).save_pretrained(folder)
    edit_weights(folder, _soften)
    tokenizer.save_pretrained(folder)
    processor = GroundingDinoImageProcessorPil(size={"shortest_edge": SHORTER, "longest_edge": LONGEST})
    return with_processor(folder, processor, "GroundingDinoImageProcessor")


def _soften(weights: dict[str, Tensor]) -> None:
    """Scale the last norm so that scores are neither 0 nor 1. A score is the product of a candidate with a token."""
    for name in ("model.decoder.layer_norm.weight", "model.decoder.layer_norm.bias"):
        weights[name] *= 0.2


def owlv2(folder: Path) -> Path:
    """OWLv2 with a patch of 16 pixels."""
    tokenizer = clip_tokenizer()
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **tower,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": LABEL_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
    }
    vision = {**tower, "image_size": SIDE, "patch_size": 16}
    config = Owlv2Config(text_config=text, vision_config=vision, projection_dim=32)
    randomised(Owlv2ForObjectDetection(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return with_processor(folder, Owlv2ImageProcessorPil(size={"height": SIDE, "width": SIDE}), "Owlv2ImageProcessor")


def red_patches(folder: Path) -> Path:
    """An OWLv2 whose answers are known. Each patch is a candidate. Its box is the square of two by two patches that
    begins at the patch. Its score is close to 1 if most of the patch is red, else close to 0, for every label.

    Two channels of a patch hold its redness and the negative of it. Layers add nothing, so after each norm one of the
    two has about 4 and the other -4.
    """
    owlv2(folder)
    edit_weights(folder, _see_red)
    return folder


def _see_red(weights: dict[str, Tensor]) -> None:
    tower, side = "owlv2.vision_model.", SIDE // 16
    for name, weight in weights.items():
        adds = name.startswith(tower) and any(part in name for part in ("out_proj.", "fc2.", "embedding"))
        if adds or name.startswith(("class_head.", "box_head.dense2.")):
            weight.zero_()
        elif "norm" in name and not name.startswith("owlv2.text_model."):
            weight.fill_(1.0 if name.endswith(".weight") else 0.0)
    patch = weights[tower + "embeddings.patch_embedding.weight"]
    redness = torch.tensor([1.0, -0.5, -0.5])[:, None, None] / patch[0, 0].numel()
    patch[0], patch[1] = redness, -redness  # red has 3.6, pink 1.2, white and black are below 0
    weights[tower + "embeddings.position_embedding.weight"][1:, :2] = torch.tensor([-2.4, 2.4])
    weights[tower + "embeddings.class_embedding"][:2] = 1.0
    weights["class_head.logit_shift.weight"][0, 0] = 2.0
    # the middle of a candidate is the last corner of its patch, its size that of a patch
    one_patch, two = (torch.logit(torch.tensor(patches / side)) for patches in (1, 2))
    weights["box_head.dense2.bias"][2:] = two - one_patch


def _bert_tokenizer(places: dict[str, int]) -> BertTokenizer:
    pieces = word_pieces()
    free = (number for number in itertools.count(104) if number not in places.values())
    vocabulary = dict(places)
    for piece in (*pieces, *(f"##{piece}" for piece in pieces)):
        if piece not in vocabulary:
            vocabulary[piece] = next(free)
    token_ids = set(vocabulary.values())
    vocabulary |= {f"[unused{number}]": number for number in range(max(token_ids)) if number not in token_ids}
    return BertTokenizer(vocab=vocabulary, model_max_length=512)
