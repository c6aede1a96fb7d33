"""Small random folders of GLiNER, GLiNER2, GLiREL and GLiClass models, each of the package's real class, with small
tokenizers of their kinds.

Weights are scaled up from their initial values, so that scores differ from text to text and from label to label.
"""

from __future__ import annotations

import copy
import functools
import json
import string
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from oracle import WORDS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import DebertaV2Config, PreTrainedTokenizerFast

from sie_contracts.models.entries import ModelEntry, parse_entry

GlinerKind = Literal["span", "token", "bi", "bi-token", "relations"]

# seeds whose scores lie on both sides of 0.5 for each label
_SEEDS: dict[GlinerKind, int] = {"span": 16, "bi": 12, "token": 14, "bi-token": 12, "relations": 2}

_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MARKS = ("[FLERT]", "<<ENT>>", "<<SEP>>")
_CLASS_MARKS = ("<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>")
_BACKBONE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DEBERTA = {
    **_BACKBONE,
    "model_type": "deberta-v2",
    "relative_attention": True,
    "position_buckets": 16,
    "max_position_embeddings": 64,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
}
BERT = {**_BACKBONE, "model_type": "bert", "max_position_embeddings": 128}


def _tokenizer(algorithm: Literal["wordpiece", "unigram"]) -> Tokenizer:
    """Return a tokenizer: two in three words of the tests are one token, the others two, and everything else is
    characters.

    The trainers of the tokenizers library give another vocabulary in each process, so this vocabulary is fixed.
    """
    samples = ("שלום", "مدينة", "東京", "Zürich", "👍")
    characters = sorted({*string.printable.strip(), *"".join(samples)})
    whole = [word for index, word in enumerate(WORDS) if index % 3]
    halves = [(word[: len(word) // 2], word[len(word) // 2 :]) for word in WORDS[::3]]
    if algorithm == "wordpiece":
        pieces = [*_BERT_SPECIALS, *whole, *(first for first, _ in halves), *(f"##{second}" for _, second in halves)]
        pieces += [f"{mark}{character}" for character in characters for mark in ("", "##")]
        tokenizer = Tokenizer(
            models.WordPiece({piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]")
        )
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        scored = {**dict.fromkeys(_BERT_SPECIALS, 0.0), **{f"▁{word}": -3.0 for word in whole}}
        scored |= {f"▁{first}": -4.0 for first, _ in halves} | {second: -4.0 for _, second in halves}
        scored |= dict.fromkeys(("▁", *characters), -8.0)
        tokenizer = Tokenizer(models.Unigram(list(scored.items()), unk_id=1))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return tokenizer


@functools.cache
def _wrapped(
    algorithm: Literal["wordpiece", "unigram"], *marks: str, max_tokens: int = 100_000
) -> PreTrainedTokenizerFast:
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(algorithm), model_max_length=max_tokens, **names)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    return tokenizer


# layers whose outputs are multiplied with others; with larger weights all scores would be near 0 or 1
_LOUD = ("prompt_rep_layer.3", "pair_rep_layer.3", "relations_rep_layer")


def _shake(model: torch.nn.Module, seed: int) -> None:
    """Set all weights at random, biases and norms too. Their initial 0 and 1 would hide that one is left out."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))
        scale = 0.05 if any(part in name for part in _LOUD) else 0.1 if parameter.dim() < 2 else 0.25
        parameter.data = noise * scale + (
            1.0 if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight") else 0.0
        )


def gliner_folder(
    folder: Path,
    kind: GlinerKind = "span",
    *,
    max_len: int = 384,
    described: bool = True,
    pickled: bool = False,
    wordpiece: bool = False,
    relations_layer: str = "gcn",
    backbone: dict[str, Any] | None = None,
) -> Path:
    """A folder that the package loads too. With another `backbone` the weights keep their initial values, so that few
    scores are high.

    Without `described` the folder is like the first checkpoints: configuration and tokenizer of the backbone are in a
    subfolder of the backbone's name, and the tokenizer lacks the package's marks.
    """
    from gliner import GLiNER, GLiNERConfig

    is_bi = kind.startswith("bi")
    marks = () if is_bi else (*_MARKS, "<<REL>>") if kind == "relations" else _MARKS
    tokenizer = copy.deepcopy(_wrapped("wordpiece" if is_bi or wordpiece else "unigram", *marks))
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "model_name": "no/backbone",
        "hidden_size": 512 if backbone else 24,
        "max_width": 12 if backbone else 4,
        "max_len": max_len,
        "dropout": 0.1,
        "num_rnn_layers": 1,
        "span_mode": "token_level" if kind.endswith("token") else "markerV0",
        "vocab_size": len(tokenizer),
        "class_token_index": tokenizer.convert_tokens_to_ids("<<ENT>>") if not is_bi else -2,
        "encoder_config": {
            **(backbone or (BERT if is_bi else DEBERTA)),
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 1024,
        },
    }
    if is_bi:
        labels = folder / "labels"
        label_tokenizer = _wrapped("wordpiece", max_tokens=64)
        label_tokenizer.save_pretrained(labels)
        label_config = {**BERT, "vocab_size": len(label_tokenizer), "hidden_size": 16, "num_hidden_layers": 1}
        (labels / "config.json").write_text(json.dumps(label_config))
        config |= {"labels_encoder": str(labels), "labels_encoder_config": label_config}
    if kind == "relations":
        config |= {"relations_layer": relations_layer, "rel_token_index": tokenizer.convert_tokens_to_ids("<<REL>>")}
    torch.manual_seed(0)
    plain = GLiNERConfig(**copy.deepcopy(config))
    kind_class = GLiNER._get_gliner_class(plain)
    model = kind_class(
        kind_class.config_class(**copy.deepcopy(config)), tokenizer=tokenizer, backbone_from_pretrained=False
    )
    if backbone is None:
        _shake(model.model, _SEEDS[kind])
    model.save_pretrained(folder, safe_serialization=not pickled)
    if not described:
        bare = _wrapped("unigram")  # the package adds its marks
        backbone = folder / "no" / "backbone"
        bare.save_pretrained(backbone)
        (backbone / "config.json").write_text(json.dumps({**config.pop("encoder_config"), "vocab_size": len(bare)}))
        (folder / "gliner_config.json").write_text(json.dumps({**config, "vocab_size": -1, "class_token_index": -1}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).unlink()
    return folder


def gliclass_folder(folder: Path, *, prompt_first: bool = True, **settings: Any) -> Path:
    """A uni-encoder that the package loads too, with a DeBERTa backbone unless `settings` has another one."""
    from gliclass import GLiClassModel, GLiClassModelConfig

    tokenizer = _wrapped("unigram", *_CLASS_MARKS)
    marks = {
        name: tokenizer.convert_tokens_to_ids(mark)
        for name, mark in zip(("class", "text", "example"), _CLASS_MARKS, strict=True)
    }
    config = GLiClassModelConfig(
        encoder_config={**settings.pop("backbone", DEBERTA), "vocab_size": len(tokenizer)},
        encoder_model="no/backbone",
        hidden_size=settings.pop("hidden_size", 32),
        vocab_size=len(tokenizer),
        prompt_first=prompt_first,
        **settings,
        **{f"{name}_token_index": number for name, number in marks.items()},
    )
    torch.manual_seed(0)
    model = GLiClassModel(config)
    _shake(model, seed=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def gliner2_folder(
    folder: Path,
    *,
    counting: str = "count_lstm_v2",
    pooling: str = "first",
    spare_rows: int = 0,
    wordpiece: bool = False,
    seed: int = 2,
) -> Path:
    """A span model that the package loads too, whose count of entities is never 0. `spare_rows`: embeddings without a
    token.
    """
    from gliner2 import GLiNER2
    from gliner2.configuration import ExtractorConfig
    from gliner2.processor import SchemaTransformer

    tokenizer = _wrapped("wordpiece" if wordpiece else "unigram", *SchemaTransformer.SPECIAL_TOKENS)
    backbone = {name: value for name, value in DEBERTA.items() if name != "model_type"}
    encoder = DebertaV2Config(**{**backbone, "vocab_size": len(tokenizer), "max_position_embeddings": 512})
    torch.manual_seed(0)
    config = ExtractorConfig(model_name="no/backbone", max_width=4, counting_layer=counting, token_pooling=pooling)
    model = GLiNER2(config, encoder_config=encoder, tokenizer=copy.deepcopy(tokenizer))
    if spare_rows:
        model.encoder.resize_token_embeddings(len(tokenizer) + spare_rows)
    _shake(model, seed)
    model.count_pred[-1].bias.data[0] = -100.0
    for parameter in model.span_rep.span_rep_layer.out_project[3].parameters():
        parameter.data *= 0.02  # else all scores are 0 or 1
    model.save_pretrained(str(folder))
    return folder


def gliner2_boundary_folder(folder: Path, *, seed: int = 2, **settings: Any) -> Path:
    """A model of the boundary architecture that the package loads too. `settings` are those of its head."""
    from gliner2.configuration import ExtractorConfig
    from gliner2.inference.engine import BoundaryExtractor
    from gliner2.processor import SchemaTransformer

    tokenizer = _wrapped("unigram", *SchemaTransformer.SPECIAL_TOKENS)
    backbone = {name: value for name, value in DEBERTA.items() if name != "model_type"}
    encoder = DebertaV2Config(**{**backbone, "vocab_size": len(tokenizer), "max_position_embeddings": 512})
    torch.manual_seed(0)
    config = ExtractorConfig(
        model_name="no/backbone",
        architecture="boundary",
        boundary_head={"boundary_dim": 32, "pair_dim": 32, "record_dim": 32, **settings},
    )
    model = BoundaryExtractor(config, encoder_config=encoder, tokenizer=copy.deepcopy(tokenizer))
    _shake(model, seed)
    if model.boundary_head.null_projection is not None:
        model.boundary_head.null_projection.bias.data -= 1.9  # else no text has an entity of any label
    model.save_pretrained(str(folder))
    return folder


def entry_of(
    folder: Path, family: str, *, max_tokens: int = 512, parameters: dict[str, Any] | None = None, output: str = ""
) -> ModelEntry:
    """A catalogue entry for a folder. An empty `output` means that of the family."""
    output = output or {"gliclass": "classifications", "glirel": "relations"}.get(family, "entities")
    run = {"parameters": parameters} if parameters else {}
    raw = {
        "id": f"test/{folder.name}",
        "weights": {"path": str(folder)},
        "family": family,
        "outputs": {output: 0},
        "run": run,
    }
    return parse_entry({**raw, "max_tokens": max_tokens})
