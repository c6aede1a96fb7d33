"""Small random models of images and texts, laid out on disk as a hub repository is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from parity.tokenizer_recipes import corpus
from parity.toys import randomised, with_processor
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColPaliProcessor,
    GemmaConfig,
    GemmaTokenizer,
    PaliGemmaConfig,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipTokenizer,
    SiglipVisionConfig,
)

SIZE, PATCH = 48, 16
PAGE = 64
WIDTH = 24
OPEN_CLIP_WIDTH = 128  # two heads: timm names their number nowhere
CLIP_TOKENS, SIGLIP_TOKENS, FIRST_SIGLIP_TOKENS = 77, 64, 16
_TOWER: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_END = "<|endoftext|>"
# the values of published folders; the defaults of transformers differ
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def clip(folder: Path, *, activation: str = "quick_gelu", eos: int | None = None) -> Path:
    """CLIP, as openai (quick_gelu) and laion (gelu) publish it. `eos` 2 is the id of the end token in old
    configurations.
    """
    tokenizer = clip_tokenizer()
    text = {
        **_TOWER,
        "hidden_size": 32,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CLIP_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id if eos is None else eos,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_act": activation,
    }
    vision = {**_TOWER, "hidden_size": 48, "image_size": SIZE, "patch_size": PATCH, "hidden_act": activation}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    randomised(CLIPModel(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_mean=_CLIP_MEAN,
        image_std=_CLIP_STD,
    )
    return with_processor(folder, processor, "CLIPImageProcessor")


def siglip(folder: Path, *, first: bool = False) -> Path:
    """SigLIP 2 of a fixed size, whose tokenizer is Gemma's: it does not change the case of a text. `first`: the first
    SigLIP, whose tokenizer is one of sentencepiece.
    """
    tokenizer = _sentencepiece_tokenizer(folder) if first else _gemma_tokenizer()
    text = {
        **_TOWER,
        "hidden_size": WIDTH,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": FIRST_SIGLIP_TOKENS if first else SIGLIP_TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
        "projection_size": WIDTH,
    }
    vision = {**_TOWER, "hidden_size": WIDTH, "image_size": SIZE, "patch_size": PATCH}
    randomised(SiglipModel(SiglipConfig(text_config=text, vision_config=vision))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return with_processor(folder, SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE}), "SiglipImageProcessor")


def marqo(folder: Path) -> Path:
    """A SigLIP as open_clip writes it, whose towers differ in width. Its config.json names remote code."""
    tokenizer = _sentencepiece_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, shape in _open_clip_shapes(len(tokenizer)).items():
        scale = max(1, torch.Size(shape[1:]).numel()) ** -0.5 if len(shape) > 1 else 0.3
        state[name] = torch.randn(shape, generator=generator) * scale
        if name.endswith("weight") and len(shape) == 1:  # the weight of a norm
            state[name] += 1
    save_file(state, folder / "open_clip_model.safetensors", {"format": "pt"})
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": _OPEN_CLIP, "preprocess_cfg": _SQUASHED}))
    (folder / "config.json").write_text(json.dumps({"model_type": "marqo", "auto_map": {"AutoModel": "marqo.Marqo"}}))
    return folder


_OPEN_CLIP = {
    "embed_dim": OPEN_CLIP_WIDTH,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": SIZE,
        "timm_model_name": "vit_base_patch16_siglip_224",
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": FIRST_SIGLIP_TOKENS,
        "heads": 4,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}
_SQUASHED = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}


def _open_clip_shapes(words: int) -> dict[str, tuple[int, ...]]:
    text, image, tokens = 48, OPEN_CLIP_WIDTH, FIRST_SIGLIP_TOKENS
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "logit_bias": (),
        "text.positional_embedding": (tokens, text),
        "text.token_embedding.weight": (words, text),
        "visual.trunk.pos_embed": (1, (SIZE // PATCH) ** 2, image),
        "visual.trunk.attn_pool.latent": (1, 1, image),
        "visual.trunk.patch_embed.proj.weight": (image, 3, PATCH, PATCH),
        "visual.trunk.patch_embed.proj.bias": (image,),
    }
    linears = {
        "text.text_projection": (image, text),
        "visual.trunk.attn_pool.q": (image, image),
        "visual.trunk.attn_pool.kv": (2 * image, image),
        "visual.trunk.attn_pool.proj": (image, image),
        "visual.trunk.attn_pool.mlp.fc1": (4 * image, image),
        "visual.trunk.attn_pool.mlp.fc2": (image, 4 * image),
    }
    norms = {"text.ln_final": text, "visual.trunk.norm": image, "visual.trunk.attn_pool.norm": image}
    for number in range(2):
        block = f"text.transformer.resblocks.{number}"
        shapes |= {f"{block}.attn.in_proj_weight": (3 * text, text), f"{block}.attn.in_proj_bias": (3 * text,)}
        linears |= {f"{block}.attn.out_proj": (text, text), f"{block}.mlp.c_fc": (4 * text, text)}
        linears |= {f"{block}.mlp.c_proj": (text, 4 * text)}
        norms |= {f"{block}.ln_1": text, f"{block}.ln_2": text}
        block = f"visual.trunk.blocks.{number}"
        linears |= {f"{block}.attn.qkv": (3 * image, image), f"{block}.attn.proj": (image, image)}
        linears |= {f"{block}.mlp.fc1": (4 * image, image), f"{block}.mlp.fc2": (image, 4 * image)}
        norms |= {f"{block}.norm1": image, f"{block}.norm2": image}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def colpali(folder: Path) -> Path:
    """ColPali over PaliGemma, whose language model is Gemma."""
    tokenizer = _gemma_tokenizer(bos=True)
    processor_images = SiglipImageProcessorPil(
        size={"height": PAGE, "width": PAGE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    patches = (PAGE // PATCH) ** 2
    processor_images.image_seq_length = patches
    processor = ColPaliProcessor(processor_images, tokenizer)
    text = GemmaConfig(
        **_TOWER,
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    vision = SiglipVisionConfig(**_TOWER, hidden_size=32, image_size=PAGE, patch_size=PATCH, vision_use_head=False)
    both = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        projection_dim=48,
        hidden_size=48,
        image_token_index=processor.image_token_id,
        vocab_size=len(tokenizer),
    )
    randomised(ColPaliForRetrieval(ColPaliConfig(vlm_config=both, embedding_dim=WIDTH))).save_pretrained(folder)
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    if not path.is_file():  # older published folders have this file
        processor_images.save_pretrained(folder)
    return folder


def clip_tokenizer() -> CLIPTokenizer:
    learnt = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learnt.normalizer = normalizers.Lowercase()
    learnt.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    learnt.train_from_iterator(corpus(), trainer)
    state = json.loads(learnt.to_str())["model"]
    symbols = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    pieces = [*symbols, *(piece for piece in sorted(state["vocab"], key=state["vocab"].get) if piece not in symbols)]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", _END])}
    return CLIPTokenizer(
        vocab=vocabulary, merges=[tuple(pair) for pair in state["merges"]], model_max_length=CLIP_TOKENS
    )


def _sentencepiece_tokenizer(folder: Path) -> SiglipTokenizer:
    """Train a tokenizer of sentencepiece. Its tokenizer.json, as in published folders, lacks the cleaning of texts that
    the class does.
    """
    folder.mkdir(parents=True)
    lines = folder / "corpus.txt"
    lines.write_text("\n".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(folder / "spiece"),
        vocab_size=500,
        pad_id=-1,
        bos_id=-1,
        eos_id=1,
        unk_id=2,
        hard_vocab_limit=False,
        minloglevel=2,
        character_coverage=1.0,
    )
    for path in (lines, folder / "spiece.vocab"):
        path.unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    scores = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(pieces.get_piece_size())]
    fast = Tokenizer(models.Unigram(scores, 2))
    fast.normalizer = normalizers.NFKC()
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    fast.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    fast.add_special_tokens(["</s>", "<unk>"])
    fast.save(str(folder / "tokenizer.json"))
    return SiglipTokenizer(vocab_file=str(folder / "spiece.model"), model_max_length=FIRST_SIGLIP_TOKENS)


def _gemma_tokenizer(*, bos: bool = False) -> GemmaTokenizer:
    """Train a tokenizer. With `bos` it puts <bos> before each text, as Gemma's does. Else it puts <eos> behind the
    text, as SigLIP 2's does.
    """
    learnt = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
    )
    state = json.loads(learnt.to_str())["model"]
    vocabulary = dict(state["vocab"])
    vocabulary.setdefault("\n", len(vocabulary))
    tokenizer = GemmaTokenizer(
        vocab=vocabulary,
        merges=[tuple(pair) for pair in state["merges"]],
        model_max_length=1024 if bos else SIGLIP_TOKENS,
        padding_side="right",
    )
    around = {"single": "<bos> $A", "pair": "<bos> $A $B"} if bos else {"single": "$A <eos>", "pair": "$A $B <eos>"}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        **around, special_tokens=[("<eos>", 1), ("<bos>", 2)]
    )
    return tokenizer
