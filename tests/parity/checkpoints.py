"""Small random checkpoints of real architectures, laid out on disk as a hub repository is.

    Architecture ──► build ──► config.json, model.safetensors, tokenizer files [+ modules.json, 1_Pooling/, 2_Dense/,
    ..]

Parameters that a default initialisation leaves neutral are random here: biases are not 0, norm weights are not 1 (not 0
where a norm adds 1), the row of the pad token is not 0. A dropped bias, norm or mask therefore shows in the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from parity import tokenizer_recipes as recipes
from parity.tokenizer_recipes import TokenizerRecipe
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Pooling = Literal["cls", "mean", "last", "weighted"]

MAX_TOKENS = 560
ORIGINAL_TOKENS = 128  # the trained length of models whose rotary embedding was stretched after training
WIDTH = 64
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 600,
    "initializer_range": 0.15,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Module:
    """One line of modules.json: a module of sentence-transformers with the files of its subfolder."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


NORMALIZE = Module("Normalize")


def pooling(mode: Pooling, width: int = WIDTH) -> Module:
    """The pooling module in the form that published folders have."""
    flags = {
        "cls": "pooling_mode_cls_token",
        "mean": "pooling_mode_mean_tokens",
        "last": "pooling_mode_lasttoken",
        "weighted": "pooling_mode_weightedmean_tokens",
    }
    return Module(
        "Pooling", {"word_embedding_dimension": width, **{flag: mode == name for name, flag in flags.items()}}
    )


def dense(
    width: int, output: int, *, bias: bool = False, activation: type[nn.Module] = nn.Identity, seed: int = 0
) -> Module:
    """A random linear module, [.., width] -> [.., output]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(output, width, generator=generator) * width**-0.5}
    if bias:
        tensors["linear.bias"] = torch.randn(output, generator=generator)
    name = f"{activation.__module__}.{activation.__qualname__}"
    return Module(
        "Dense", {"in_features": width, "out_features": output, "bias": bias, "activation_function": name}, tensors
    )


@dataclass(frozen=True)
class Architecture:
    """A model kind and the configuration that makes it hard. `config` is completed with the sizes and ids of
    `tokenizer`.

    `poolings`: those of its published models; the folder stores the first. `causal`: a token attends to no later
    token. `attention`: what it must run; a silent fall-back from packed to padded fails a test.
    """

    model_type: str
    tokenizer: TokenizerRecipe
    config: dict[str, Any]
    poolings: tuple[Pooling, ...] = ("mean", "cls")
    causal: bool = False
    attention: Literal["sdpa", "eager padded"] = "sdpa"
    behind: tuple[Module, ...] = ()  # Dense modules that its published folders list after the pooling
    max_tokens: int = MAX_TOKENS

    @property
    def width(self) -> int:
        """Return the width of the vector that a client gets."""
        return int(self.behind[-1].config["out_features"]) if self.behind else WIDTH


def _decoder(model_type: str, tokenizer: TokenizerRecipe, **config: Any) -> Architecture:
    return Architecture(model_type, tokenizer, {**_GROUPED, **config}, ("last", "mean"), causal=True)


def _bidirectional(architecture: Architecture, **config: Any) -> Architecture:
    return replace(architecture, config={**architecture.config, **(config or {"is_causal": False})}, causal=False)


def _rotary(architecture: Architecture, *, max_tokens: int = MAX_TOKENS, **scaling: Any) -> Architecture:
    rope = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_TOKENS, **scaling}
    return replace(architecture, config={**architecture.config, "rope_parameters": rope}, max_tokens=max_tokens)


_QWEN2 = _decoder("qwen2", recipes.QWEN)
_QWEN3 = _decoder("qwen3", recipes.QWEN, head_dim=32, attention_bias=True)
_MISTRAL = _decoder("mistral", recipes.MISTRAL, sliding_window=64)
_LLAMA = replace(
    _decoder("llama", recipes.LLAMA, attention_bias=True, mlp_bias=True), poolings=("last", "mean", "weighted")
)
_GEMMA3 = _decoder(
    "gemma3_text",
    recipes.GEMMA,
    num_key_value_heads=1,
    head_dim=32,
    query_pre_attn_scalar=24,
    sliding_window=64,
    attention_bias=True,
    num_hidden_layers=4,
    layer_types=[_LOCAL, _LOCAL, _GLOBAL, _LOCAL],
)
_GEMMA3_BIDIRECTIONAL = replace(_bidirectional(_GEMMA3, use_bidirectional_attention=True), poolings=("mean", "last"))

ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("bert", recipes.BERT, _SIZES),
    "bert with dense": Architecture(
        "bert", recipes.BERT, _SIZES, ("cls",), behind=(dense(WIDTH, 40, bias=True, activation=nn.Tanh),)
    ),
    "roberta": Architecture("roberta", recipes.ROBERTA, {**_SIZES, "type_vocab_size": 1}),
    "xlm-roberta": Architecture("xlm-roberta", recipes.XLM_ROBERTA, {**_SIZES, "type_vocab_size": 1}, ("cls", "mean")),
    "distilbert": Architecture(
        "distilbert",
        recipes.DISTILBERT,
        {
            "dim": WIDTH,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 96,
            "max_position_embeddings": 600,
            "initializer_range": 0.15,
        },
    ),
    "electra": Architecture("electra", recipes.BERT, {**_SIZES, "embedding_size": 32}),
    # The layers are global, local, local, global. A token of a local layer attends to 64 tokens on either side.
    "modernbert": Architecture(
        "modernbert",
        recipes.MODERNBERT,
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
        },
        ("cls", "mean"),
    ),
    "modernbert narrow": Architecture(
        "modernbert",
        recipes.MODERNBERT,
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            "global_rope_theta": 80000.0,
            "local_rope_theta": 5000.0,
        },
    ),
    "nomic_bert": Architecture(
        "nomic_bert", recipes.BERT, {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    ),
    "gte": Architecture(
        "gte",
        recipes.XLM_ROBERTA,
        {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        ("cls", "mean"),
    ),
    "jina_embeddings_v3": Architecture("jina_embeddings_v3", recipes.XLM_ROBERTA, _SIZES),
    "eurobert": Architecture("eurobert", recipes.MODERNBERT, _GROUPED),
    "gemma3 bidirectional": _GEMMA3_BIDIRECTIONAL,
    "gemma3 causal": _GEMMA3,
    "embeddinggemma": replace(
        _GEMMA3_BIDIRECTIONAL, poolings=("mean",), behind=(dense(WIDTH, 96), dense(96, 48, seed=1))
    ),
    # its scores are capped, which neither the packed kernels nor sdpa do
    "gemma2": replace(
        _decoder(
            "gemma2",
            recipes.GEMMA,
            num_hidden_layers=4,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=64,
            attention_bias=True,
            attn_logit_softcapping=1.5,
            layer_types=[_LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
        ),
        attention="eager padded",
    ),
    "qwen2 causal": _QWEN2,
    "qwen2 bidirectional": _bidirectional(_QWEN2),
    "qwen2 sliding": replace(
        _QWEN2, config={**_QWEN2.config, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    ),
    "qwen3 causal": _QWEN3,
    "qwen3 bidirectional": _bidirectional(_QWEN3),
    "mistral causal": _MISTRAL,
    "mistral bidirectional": _bidirectional(_MISTRAL, is_causal=False, sliding_window=None),
    "mistral bidirectional sliding": _bidirectional(_MISTRAL),
    "llama causal": _LLAMA,
    "llama bidirectional": replace(_bidirectional(_LLAMA), poolings=("mean", "last")),
    "llama yarn": _rotary(_LLAMA, rope_type="yarn"),
    "llama llama3": _rotary(_LLAMA, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    # past the original length the factors depend on the longest text of a pass, which is refused
    "llama longrope": _rotary(
        _LLAMA, rope_type="longrope", short_factor=[1.5] * 8, long_factor=[3.0] * 8, max_tokens=ORIGINAL_TOKENS
    ),
    "llama dynamic": _rotary(
        replace(_LLAMA, config={**_LLAMA.config, "max_position_embeddings": ORIGINAL_TOKENS}),
        rope_type="dynamic",
        max_tokens=ORIGINAL_TOKENS,
    ),
    # position biases: the classes of mpnet and deberta-v2 have no sdpa
    "mpnet": Architecture("mpnet", recipes.MPNET, _SIZES, attention="eager padded"),
    "deberta-v2": Architecture(
        "deberta-v2",
        recipes.DEBERTA,
        {
            **_SIZES,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "type_vocab_size": 0,
            "position_biased_input": False,
        },
        ("cls", "mean"),
        attention="eager padded",
    ),
}


def modules_of(architecture: Architecture) -> list[Module]:
    """The modules that a published folder of this architecture lists after the transformer."""
    return [pooling(architecture.poolings[0]), *architecture.behind, NORMALIZE]


def build(folder: Path, architecture: Architecture, *, head: Any = AutoModel, seed: int = 0, **config: Any) -> Path:
    """Write a random model with its tokenizer to `folder`. `head`: the auto class that makes it; `config` overrides the
    architecture's.
    """
    vocabulary = architecture.tokenizer.save(folder, architecture.max_tokens)
    fields = {"vocab_size": vocabulary, **architecture.tokenizer.ids(), **architecture.config, **config}
    torch.manual_seed(seed)
    model = head.from_config(CONFIG_MAPPING[architecture.model_type](**fields))
    _disturb(model)
    model.save_pretrained(folder)
    return folder


def _disturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(std=float(module.weight.std()))


def add_modules(
    folder: Path, modules: Sequence[Module], prompts: dict[str, str] | None = None, max_tokens: int = MAX_TOKENS
) -> Path:
    """Make `folder` a sentence-transformers folder whose transformer is followed by `modules`."""
    rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, module in enumerate(modules, 1):
        path = f"{number}_{module.kind}"
        rows.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{module.kind}"}
        )
        (folder / path).mkdir()
        if module.config:
            _write_json(folder / path / "config.json", module.config)
        if module.tensors:
            save_file(module.tensors, folder / path / "model.safetensors", {"format": "pt"})
    _write_json(folder / "modules.json", rows)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    settings = {"prompts": prompts or {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2))
