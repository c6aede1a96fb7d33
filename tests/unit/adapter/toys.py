"""Small random models of real architectures, saved as folders that the adapter loads. No bias is 0 and no norm weight
is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.engine.device import Compute
from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.packed.attention_backend import AttentionFacts, Backend
from sie_contracts.models.entries import LoadOptions, ModelEntry, Weights

VOCABULARY = 120
# a tokenizer that reads no plain sentence is refused
WORDS = ("the", "river", "runs", "past", "old", "town", "and", "into", "sea")
_NO_OPTIONS = LoadOptions(engine="torch")
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
    "initializer_range": 0.2,
}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_SMALL, "pad_token_id": 3},
    "roberta": {**_SMALL, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**_SMALL, "pad_token_id": 5, "type_vocab_size": 1},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 4,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 300,
        "initializer_range": 0.2,
        "pad_token_id": 3,
    },
    "electra": {**_SMALL, "embedding_size": 16, "pad_token_id": 3},
    "modernbert": {
        **_SMALL,
        "pad_token_id": 3,
        "local_attention": 32,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "attention_bias": True,
        "norm_bias": True,
        "mlp_bias": True,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "nomic_bert": {**_SMALL, "pad_token_id": 3},
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16, "attention_bias": True},
    "mistral": {**_DECODER, "sliding_window": 24},
    "llama": {**_DECODER, "attention_bias": True},
    "qwen2 bidirectional": {**_DECODER, "is_causal": False},
    "gemma3_text bidirectional": {
        **_DECODER,
        "head_dim": 8,
        "use_bidirectional_attention": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "gte": {**_SMALL, "pad_token_id": 3},
    "eurobert": {**_SMALL, "pad_token_id": 3, "num_key_value_heads": 2},
    "jina_embeddings_v3": {**_SMALL, "pad_token_id": 1, "type_vocab_size": 1},
    "mpnet": {**_SMALL, "pad_token_id": 1},
    "deberta-v2": {
        **_SMALL,
        "pad_token_id": 3,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "luke": {**_SMALL, "pad_token_id": 1, "type_vocab_size": 1, "entity_vocab_size": 8, "entity_emb_size": 8},
    "esm": {
        **_SMALL,
        "vocab_size": 4000,
        "pad_token_id": 1,
        "mask_token_id": 4,
        "token_dropout": True,
        "position_embedding_type": "rotary",
    },
    "convbert": {**_SMALL, "embedding_size": 32, "pad_token_id": 3},
    "big_bird": {
        **_SMALL,
        "pad_token_id": 3,
        "attention_type": "block_sparse",
        "block_size": 40,
        "num_random_blocks": 1,
    },
}
PADDED = ("mpnet", "deberta-v2", "convbert", "big_bird", "luke", "esm")


def save(
    folder: Path, kind: str, *, seed: int = 0, auto: Any = AutoModel, marked: bool = False, **changes: Any
) -> Path:
    """Save a random model of `kind` with its tokenizer. `auto`: the class that makes the model, with a head or
    without. `marked`: see `save_tokenizer`.
    """
    config = CONFIG_MAPPING[kind.split()[0]](**{**CONFIGS[kind], **changes})
    torch.manual_seed(seed)
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases and norms, which a default initialisation leaves neutral
                parameter.copy_(
                    torch.randn_like(parameter) * 0.2
                    + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
                )
    model.save_pretrained(folder)
    save_tokenizer(folder, marked=marked)
    return folder


def save_tokenizer(folder: Path, *, marked: bool = False) -> None:
    """Save a tokenizer. With `marked` it puts w1 before and w2 behind each text: models that pool the first token or
    score pairs need them.
    """
    words = [*(f"w{number}" for number in range(VOCABULARY - 1 - len(WORDS))), *WORDS, "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if marked:
        ends = [("w1", 1), ("w2", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=ends
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def entry(folder: Path, **changes: Any) -> ModelEntry:
    """The catalogue entry of a saved model."""
    fields: dict[str, Any] = {"outputs": {"dense": 32}, "max_tokens": 280, "family": "text-encoder", **changes}
    return ModelEntry(id=f"toy/{folder.name}", weights=Weights(path=str(folder)), **fields)


def compute(dtype: torch.dtype = torch.float32, backend: Backend = "sdpa") -> Compute:
    """The CPU, in `dtype`."""
    return Compute(torch.device("cpu"), dtype, backend, "test", AttentionFacts("cpu", is_16_bit=dtype.itemsize == 2))


def load(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    backend: Backend = "sdpa",
    options: LoadOptions = _NO_OPTIONS,
    **changes: Any,
) -> TextEncoder:
    return TextEncoder(folder, entry(folder, **changes), options, compute(dtype, backend))


def random_ids(lengths: list[int], *, seed: int = 0, low: int = 6) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(low, VOCABULARY, length, dtype=np.int32) for length in lengths]
