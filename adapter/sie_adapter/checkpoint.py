"""A model folder becomes a transformers model, a tokenizer and the modules that sentence-transformers lists after them.

Nothing is forgiven: weights that are missing, unexpected, of another shape or newly made are a refusal, since a model with a random part
answers as politely as a right one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from sie_adapter.device import Compute
from sie_adapter.failure import load_failed
from sie_contracts.catalogue import LoadOptions

_logger = logging.getLogger("sie.adapter")

# While transformers constructs a model it changes torch for the whole process: its default precision, which would change what the lanes
# compute, unless it is float32 already, and functions of torch, which two loads would restore in the wrong order.
_CONSTRUCTION = threading.Lock()
_POOLER = "pooler."
_COUNTED = "position_ids"  # counted, not stored
# the top-level names of language-model heads: a checkpoint that was trained with one may be used without it
_LANGUAGE_HEADS = frozenset({
    "cls", "lm_head", "head", "decoder", "predictions", "vocab_transform", "vocab_layer_norm", "vocab_projector",
    "generator_predictions", "generator_lm_head", "discriminator_predictions",
})  # fmt: skip
_PRETRAINED = ("ForMaskedLM", "ForCausalLM", "ForPreTraining")
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weighted",
}  # fmt: skip
POOLINGS = ("cls", "mean", "last", "weighted")
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU, "Sigmoid": nn.Sigmoid}


@contextmanager
def construction() -> Iterator[None]:
    """One model at a time is built in this process."""
    with _CONSTRUCTION:
        yield


def load_model(auto_class: Any, folder: Path, load: LoadOptions, compute: Compute, consumed: Iterable[str] = ()) -> PreTrainedModel:
    """The model of `folder` as `auto_class`, on the device, for inference. `consumed` are weights that the caller reads by itself.

    Raises ModelLoadFailed INCOMPATIBLE that names up to five of the weights that do not fit.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=load.trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise load_failed("INCOMPATIBLE", f"{config.model_type} has a decoder beside its encoder, which this family does not run")
    if load.causal is not None:
        config.is_causal = load.causal
    options: dict[str, Any] = {"attn_implementation": "eager"} if compute.backend == "eager" else {}
    with construction():
        model, report = auto_class.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            trust_remote_code=load.trust_remote_code, ignore_mismatched_sizes=True, output_loading_info=True, **options,
        )  # fmt: skip
    is_bare = model.base_model is model
    foreign_head = is_bare and any(name.endswith(_PRETRAINED) for name in config.architectures or ())
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in report[fault] if _COUNTED not in str(name))
        if is_bare:  # its pooler is never run
            names = [name for name in names if _POOLER not in name]
        if fault == "unexpected_keys":
            names = [name for name in names if name not in consumed and not (foreign_head and name.split(".")[0] in _LANGUAGE_HEADS)]
        if names:
            raise load_failed("INCOMPATIBLE", f"the weights have {len(names)} {fault.replace('_', ' ')}: {', '.join(names[:5])}")
    _cast(model, compute.dtype)
    model.config.use_cache = False
    return model.eval().requires_grad_(False).to(compute.device)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Weights to `dtype`, other than those the architecture keeps in float32. Buffers stay: a rotary base in 16 bit is another model."""
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ()), *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def load_tokenizer(folder: Path, load: LoadOptions) -> Tokenizer:
    """The fast tokenizer of `folder`, without truncation and padding. Raises ModelLoadFailed INCOMPATIBLE if it has none."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=load.trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise load_failed("INCOMPATIBLE", f"{type(tokenizer).__name__} has no fast tokenizer")
    bare = Tokenizer.from_str(backend.to_str())
    bare.no_truncation()
    bare.no_padding()
    if load.append_eos and bare.encode("a").ids[-1] != tokenizer.eos_token_id:
        if tokenizer.eos_token_id is None:
            raise load_failed("INCOMPATIBLE", "load.append_eos is set and the tokenizer has no end token")
        token = str(tokenizer.eos_token)
        special = [(token, tokenizer.eos_token_id)]
        ends = processors.TemplateProcessing(single=f"$A {token}", pair=f"$A {token} $B {token}", special_tokens=special)
        bare.post_processor = ends if bare.post_processor is None else processors.Sequence([bare.post_processor, ends])
    return bare


def special_ids(folder: Path, load: LoadOptions) -> frozenset[int]:
    """The ids of all special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=load.trust_remote_code)
    return frozenset(tokenizer.all_special_ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON map of the folder; empty if there is no such file."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of the safetensors in `folder`, float32; None if no file has it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  not a mapping
                return file.get_tensor(name).float()
    return None


@dataclass(frozen=True)
class Modules:
    """What modules.json adds to a transformer. `layers` are applied in order to pooled vectors, or to the states of late interaction."""

    kinds: tuple[str, ...] = ()
    pooling: str = ""
    layers: tuple[nn.Module, ...] = ()
    normalizes: bool = False
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # config.json of each other module, by kind


_KNOWN = {"Transformer", "MLMTransformer", "Pooling", "Normalize", "Dense", "SpladePooling", "MultiVectorMask"}


def read_modules(folder: Path) -> Modules:
    """The modules that the folder lists; none without modules.json. Raises ModelLoadFailed INCOMPATIBLE for one that would be left out."""
    path = folder / "modules.json"
    if not path.is_file():
        return Modules()
    kinds: list[str] = []
    layers: list[nn.Module] = []
    settings: dict[str, dict[str, Any]] = {}
    pooling = ""
    for module in json.loads(path.read_text()):
        kind = module["type"].rpartition(".")[2]
        if kind not in _KNOWN:
            raise load_failed("INCOMPATIBLE", f"modules.json lists a {kind}, which this adapter would leave out")
        kinds.append(kind)
        config = settings[kind] = read_json(folder / module["path"] / "config.json")
        if kind == "Pooling":
            pooling = _pooling(config)
        elif kind == "Dense":
            layers.append(_dense(folder / module["path"], config))
    return Modules(tuple(kinds), pooling, tuple(layers), "Normalize" in kinds, settings)


def _pooling(config: dict[str, Any]) -> str:
    named = [_POOLING_KEYS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode") and on is True]
    pooling = config.get("pooling_mode") or "+".join(named)
    pooling = {"lasttoken": "last", "weightedmean": "weighted"}.get(pooling, pooling)
    if pooling and pooling not in POOLINGS:
        raise load_failed("INCOMPATIBLE", f"the pooling of the model is {pooling}, expected one of {', '.join(POOLINGS)}")
    if config.get("include_prompt") is False:
        raise load_failed("INCOMPATIBLE", "the pooling leaves the prompt out (include_prompt), which this adapter does not")
    return str(pooling)


class Projection(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """A Dense of modules.json: activation(W x + b), with a residual where the file has one. float32 [.., in] -> [.., out].

    Source: sentence-transformers' and PyLate's Dense.
    """

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Linear | None = None, *, adds_input: bool = False) -> None:
        super().__init__()
        self.linear, self.activation, self.residual, self.adds_input = linear, activation, residual, adds_input
        self.out_features = linear.out_features

    def forward(self, states: Tensor) -> Tensor:
        found = self.activation(self.linear(states))
        if self.residual is not None:
            return found + self.residual(states)
        return found + states if self.adds_input else found


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A float32 layer with these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    return layer


def _dense(folder: Path, config: dict[str, Any]) -> nn.Module:
    name = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise load_failed("INCOMPATIBLE", f"a Dense has the activation {name}, expected one of {', '.join(_ACTIVATIONS)}")
    weight, bias = tensor(folder, "linear.weight"), tensor(folder, "linear.bias")
    shape = (config.get("out_features"), config.get("in_features"))
    if weight is None or tuple(weight.shape) != shape or (bias is None) == bool(config.get("bias", True)):
        raise load_failed("INCOMPATIBLE", f"{folder.name}: its weights are missing or do not have the shape that its config.json says")
    residual = tensor(folder, "residual.weight") if config.get("use_residual") else None
    return Projection(
        linear(weight, bias), _ACTIVATIONS[name](), linear(residual) if residual is not None else None,
        adds_input=bool(config.get("use_residual")) and residual is None,
    )  # fmt: skip
