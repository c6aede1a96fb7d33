"""Small random readers of documents, laid out on disk as a hub repository is.

Each function imports the classes of transformers that it needs: at the top of the file they would cost each test
process seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from parity.tokenizer_recipes import corpus
from parity.toys import randomised, with_processor
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

_SPREAD = 0.2  # the spread of biases and norms
DONUT_SIZE = (160, 128)  # height and width
DONUT_TOKENS = 128
FLORENCE_SIDE, FLORENCE_TOKENS = 64, 256
FLORENCE_MARKS = ("<od>", "</od>", "<ocr>", "</ocr>", "<cap>", "</cap>", "<poly>", "</poly>", "<sep>", "<grounding>")
# the tokens that the code beside the published files adds to their tokenizer, in the same order
FLORENCE_ADDED = (
    *("<od>", "</od>", "<ocr>", "</ocr>"),
    *(f"<loc_{number}>" for number in range(1000)),
    *("<cap>", "</cap>", "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>", "<seg>", "</seg>"),
    *("<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>"),
    *("<proposal>", "</proposal>", "<poly>", "</poly>", "<and>"),
)
OCR_TOKENS = 4096
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
    both = VisionEncoderDecoderModel(encoder=DonutSwinModel(swin), decoder=MBartForCausalLM(mbart))
    model = randomised(both, _SPREAD)
    model.config.tie_word_embeddings = False
    _unsettled(model.decoder, 2)
    start = tokenizer.convert_tokens_to_ids("<s_cord-v2>")
    model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id = start, 1, 2
    model.generation_config.update(pad_token_id=1, eos_token_id=2, decoder_start_token_id=start)
    model.save_pretrained(folder)
    height, width = DONUT_SIZE
    processor = DonutImageProcessorPil(size={"height": height, "width": width}, do_align_long_axis=False)
    return with_processor(folder, processor, "DonutImageProcessor")


def florence2(folder: Path) -> Path:
    """Florence-2: a DaViT of four stages, two layers of BART on each side, and the rules of the published files."""
    tokens = [*(f"<loc_{number}>" for number in range(1000)), *FLORENCE_MARKS]
    return _florence2(folder, _florence_tokenizer([]), tokens)


def published_florence2(folder: Path) -> Path:
    """Florence-2 in the layout of its authors, with code beside it that must not run. Beside `folder` lies its copy in
    the layout of transformers: `converted`.
    """
    from transformers import Florence2Config

    whole = _florence2(converted(folder), _florence_tokenizer(FLORENCE_ADDED), FLORENCE_ADDED)
    folder.mkdir(parents=True)
    _florence_tokenizer(None).backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": FLORENCE_TOKENS}))
    for name in ("generation_config.json", "preprocessor_config.json"):
        (folder / name).write_bytes((whole / name).read_bytes())
    config = Florence2Config.from_pretrained(whole).to_dict()
    vision, text = config["vision_config"], config["text_config"]
    words = text["vocab_size"] - 1  # without the token that stands for an image
    stages = vision.pop("embed_dim")
    places = {
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": vision.pop("max_position_embeddings")},
        "visual_temporal_embedding": {
            "type": "COSINE",
            "max_temporal_embeddings": vision.pop("max_temporal_embeddings"),
        },
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    }
    published = {
        "architectures": ["Florence2ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_florence2.Florence2Config",
            "AutoModelForCausalLM": "modeling_florence2.Florence2ForConditionalGeneration",
        },
        "model_type": "florence2",
        "is_encoder_decoder": True,
        "projection_dim": vision["projection_dim"],
        "text_config": {**text, "model_type": "florence2_language", "vocab_size": words, "num_beams": 3},
        "vision_config": {**vision, **places, "model_type": "davit", "dim_embed": stages},
        "vocab_size": words,
    }
    (folder / "config.json").write_text(json.dumps(published))
    for name in ("configuration_florence2", "modeling_florence2", "processing_florence2"):
        (folder / f"{name}.py").write_text("raise AssertionError('the code of the folder was run')\n")
    weights = _published_weights(load_file(whole / "model.safetensors"), words)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def converted(folder: Path) -> Path:
    """Return the place of the copy that has the layout of transformers."""
    return folder.with_name(f"{folder.name}-converted")


def _published_weights(weights: dict[str, Tensor], words: int) -> dict[str, Tensor]:
    """Return the weights under the names of the authors' code."""
    state = {}
    for name, tensor in weights.items():
        if name in ("lm_head.weight", "model.language_model.shared.weight"):
            state["language_model.model.shared.weight"] = tensor[:words].clone()
        elif name.endswith("embed_tokens.weight"):
            continue
        elif name.startswith("model.language_model."):
            state[name.replace("model.language_model.", "language_model.model.")] = tensor
        elif name.endswith("image_projection.weight"):
            state["image_projection"] = tensor.T.contiguous()
        elif name.startswith("model.multi_modal_projector."):
            own = name.removeprefix("model.multi_modal_projector.")
            state[own.replace("image_position_embed.", "image_pos_embed.")] = tensor
        else:
            own = re.sub(r"(convs\.\d+)\.conv\.", r"\1.proj.", name.removeprefix("model."))
            own = re.sub(r"\.(conv[12])\.", r".\1.fn.dw.", own)
            own = re.sub(r"\.(window|channel)_attn\.", r".\1_attn.fn.", own)
            own = own.replace(".ffn.", ".ffn.fn.net.").replace(".norm2.", ".ffn.norm.")
            own = own.replace("spatial_block.norm1.", "spatial_block.window_attn.norm.")
            state[own.replace("channel_block.norm1.", "channel_block.channel_attn.norm.")] = tensor
    state["language_model.lm_head.weight"] = state["language_model.model.shared.weight"].clone()
    state["language_model.final_logits_bias"] = torch.zeros(1, words)
    return state


def _florence_tokenizer(extra_tokens: Sequence[str] | None) -> Any:
    """Return BART's tokenizer with `extra_tokens` before the image token. None: without all of these tokens."""
    from transformers import BartTokenizer

    vocabulary, merges = byte_pieces(["<s>", "<pad>", "</s>", "<unk>"])
    for token in ("<mask>", *(extra_tokens or ())):
        vocabulary[token] = len(vocabulary)
    more = {} if extra_tokens is None else {"extra_special_tokens": {"image_token": "<image>"}}
    return BartTokenizer(vocab=vocabulary, merges=merges, model_max_length=FLORENCE_TOKENS, **more)


def _florence2(folder: Path, tokenizer: Any, tokens: Sequence[str]) -> Path:
    from transformers import (
        BartConfig,
        CLIPImageProcessorPil,
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
        Florence2VisionConfig,
    )

    tokenizer.add_tokens(list(tokens))
    images = CLIPImageProcessorPil(
        size={"height": FLORENCE_SIDE, "width": FLORENCE_SIDE},
        do_center_crop=False,
        resample=3,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    images.image_seq_length = (FLORENCE_SIDE // 32) ** 2 + 1
    kinds = ("description_with_polygons", "polygons", "bboxes", "description_with_bboxes_or_polygons")
    rules = {
        "ocr": {"PATTERN": None, "AREA_THRESHOLD": 0.0},
        "phrase_grounding": {"FILTER_BY_BLACK_LIST": False, "banned_grounding_tokens": []},
        **{kind: {} for kind in ("pure_text", "description_with_bboxes", *kinds)},
    }
    Florence2Processor(images, tokenizer, num_additional_image_tokens=1, post_processor_config=rules).save_pretrained(
        folder
    )
    vision = Florence2VisionConfig(
        depths=[1, 1, 1, 1],
        embed_dim=[8, 16, 32, 64],
        num_heads=[1, 2, 4, 8],
        num_groups=[1, 2, 4, 8],
        window_size=4,
        projection_dim=48,
        drop_path_rate=0.0,
        max_position_embeddings=10,
        max_temporal_embeddings=4,
    )
    text = BartConfig(
        vocab_size=len(tokenizer),
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=FLORENCE_TOKENS,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        forced_bos_token_id=0,
        dropout=0.0,
    )
    config = Florence2Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        is_encoder_decoder=True,
    )
    model = randomised(Florence2ForConditionalGeneration(config), _SPREAD)
    with torch.no_grad():
        model.lm_head.weight[2] *= 3
        model.lm_head.weight[config.image_token_id] = 0  # else some text has the token that stands for an image
    model.generation_config.update(
        decoder_start_token_id=2,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        forced_eos_token_id=2,
        forced_bos_token_id=0,
        no_repeat_ngram_size=3,
        num_beams=3,
        early_stopping=True,
    )
    model.save_pretrained(folder)
    return with_processor(folder, images, "CLIPImageProcessor")


def byte_pieces(specials: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of GPT-2's kind, with `specials` as the first tokens."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    base.train_from_iterator(corpus(), trainer)
    model = json.loads(base.to_str())["model"]
    pieces = {token: number + len(specials) for token, number in model["vocab"].items()}
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    return {**{token: number for number, token in enumerate(specials)}, **pieces}, merges


_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}IMAGE"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LANGUAGE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": OCR_TOKENS,
}


def lighton(folder: Path) -> Path:
    """LightOnOCR: a tower of Pixtral and a language model of Qwen3."""
    from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration, PixtralImageProcessorPil

    tokenizer = _chatting(("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"), "<|image_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    config = LightOnOcrConfig(
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "image_size": 140,
            "patch_size": 14,
            "num_channels": 3,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": len(tokenizer),
            **_LANGUAGE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "pad_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
        },
        image_token_id=ids("<|image_pad|>"),
        spatial_merge_size=2,
    )
    # with a smaller spread a text has few different tokens
    _save(LightOnOcrForConditionalGeneration(config), tokenizer, folder, spread=0.3)
    images = PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size=14)
    return with_processor(folder, images, "PixtralImageProcessor")


def glm(folder: Path) -> Path:
    """GLM-OCR, with its two end tokens."""
    from transformers import Glm46VImageProcessorPil, GlmOcrConfig, GlmOcrForConditionalGeneration

    marks = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>")
    tokenizer = _chatting((*marks, "<|video|>", "<|user|>"), "<|begin_of_image|><|image|><|end_of_image|>")
    ids = tokenizer.convert_tokens_to_ids
    config = GlmOcrConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 48,
            "image_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        text_config={
            "vocab_size": len(tokenizer),
            **_LANGUAGE,
            "pad_token_id": ids("<|endoftext|>"),
            "eos_token_id": [ids("<|endoftext|>"), ids("<|user|>")],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000,
                "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 1.0,
            },
        },
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        image_start_token_id=ids("<|begin_of_image|>"),
        image_end_token_id=ids("<|end_of_image|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
    )
    _save(GlmOcrForConditionalGeneration(config), tokenizer, folder)
    images = Glm46VImageProcessorPil(size={"shortest_edge": 4 * 784, "longest_edge": 2 * 20 * 784})
    return with_processor(folder, images, "Glm46VImageProcessor")


def paddle(folder: Path) -> Path:
    """PaddleOCR-VL."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PaddleOCRVLImageProcessorPil

    marks = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video|>")
    tokenizer = _chatting(marks, "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    ids = tokenizer.convert_tokens_to_ids
    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        text_config={
            "vocab_size": len(tokenizer),
            **_LANGUAGE,
            "pad_token_id": ids("<|endoftext|>"),
            "bos_token_id": ids("<|im_start|>"),
            "eos_token_id": ids("<|im_end|>"),
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 3]},
        },
        image_token_id=ids("<|IMAGE_PLACEHOLDER|>"),
        video_token_id=ids("<|video|>"),
        vision_start_token_id=ids("<|IMAGE_START|>"),
        vision_end_token_id=ids("<|IMAGE_END|>"),
    )
    _save(PaddleOCRVLForConditionalGeneration(config), tokenizer, folder)
    images = PaddleOCRVLImageProcessorPil(size={"shortest_edge": 4 * 784, "longest_edge": 20 * 784})
    return with_processor(folder, images, "PaddleOCRVLImageProcessor")


def _chatting(marks: Sequence[str], shown: str) -> Any:
    """A tokenizer of Qwen's kind whose chat template writes `shown` for an image."""
    from transformers import Qwen2Tokenizer

    vocabulary, merges = byte_pieces([])
    own = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
    for token in own:
        vocabulary[token] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=OCR_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": own[1:]})
    tokenizer.chat_template = _CHAT.replace("IMAGE", shown)
    return tokenizer


def _save(model: Any, tokenizer: Any, folder: Path, spread: float = _SPREAD) -> None:
    randomised(model, spread)
    ends = model.generation_config.eos_token_id
    with torch.no_grad():
        model.get_output_embeddings().weight[ends] *= 3  # else no text ends
    model.generation_config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unsettled(decoder: Any, end: int) -> None:
    """Make a decoder write different tokens for different images, and end some rows. An unchanged random decoder
    repeats its last token.
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
