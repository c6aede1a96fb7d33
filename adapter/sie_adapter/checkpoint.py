"""A model folder becomes a transformers model and the modules that sentence-transformers lists after it. Its tokenizer:
`tokenizer`.

Nothing is forgiven: weights that are missing, unexpected, of another shape or newly made are a refusal, since a model
with a random part answers as politely as a right one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from sie_adapter.device import Compute
from sie_adapter.folder_files import read_json, read_value, reading
from sie_contracts.entries import LoadOptions
from sie_contracts.load_errors import load_failed

# While transformers constructs a model it changes torch for the whole process: its default precision, which would
# change what the lanes compute, unless it is float32 already, and functions of torch, which two loads would restore in
# the wrong order.
_CONSTRUCTION = threading.Lock()
_POOLER = "pooler."
_COUNTED = "position_ids"  # counted, not stored
# the top-level names of language-model heads: a checkpoint that was trained with one may be used without it
_LANGUAGE_HEADS = frozenset(
    {
        "cls",
        "lm_head",
        "head",
        "decoder",
        "predictions",
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "generator_predictions",
        "generator_lm_head",
        "discriminator_predictions",
    }
)
_PRETRAINED = ("ForMaskedLM", "ForCausalLM", "ForPreTraining")
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weighted",
}
POOLINGS = ("cls", "mean", "last", "weighted")
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU, "Sigmoid": nn.Sigmoid}


@contextmanager
def construction() -> Iterator[None]:
    """One model at a time is built in this process."""
    with _CONSTRUCTION:
        yield


def load_model(
    auto_class: Any,
    folder: Path,
    load: LoadOptions,
    compute: Compute,
    consumed: Iterable[str] = (),
    *,
    float32_head: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
    decodes: bool = False,
) -> PreTrainedModel:
    """The model of `folder` as `auto_class`, on the device, for inference. `consumed` are weights that the caller reads
    by itself, `changes` those of its configuration. `decodes`: the caller runs a decoder that it may have beside an
    encoder.

    With `float32_head` only its backbone is in the precision of `compute`; what follows that, the pooler included, is
    float32.

    Raises ModelLoadFailed INCOMPATIBLE that names up to five of the weights that do not fit.
    """
    options = {"attn_implementation": "eager"} if compute.backend == "eager" else {}
    model = _from_files(auto_class, folder, load, consumed, options, changes, decodes=decodes)
    _cast(model, compute.dtype, float32_head=float32_head)
    model.config.use_cache = False
    return model.eval().requires_grad_(False).to(compute.device)


def empty_model(
    auto_class: Any,
    folder: Path,
    load: LoadOptions,
    consumed: Iterable[str] = (),
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    decodes: bool = False,
) -> PreTrainedModel:
    """The same on the device `meta`, without the weights: their names and shapes are compared as a load compares them.
    Raises as that.
    """
    return _from_files(auto_class, folder, load, consumed, {"device_map": "meta"}, changes, decodes=decodes)


def _from_files(
    auto_class: Any,
    folder: Path,
    load: LoadOptions,
    consumed: Iterable[str],
    options: dict[str, Any],
    changes: Mapping[str, Any],
    *,
    decodes: bool,
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=load.trust_remote_code)
    for name, value in changes.items():
        setattr(config, name, value)
    if getattr(config, "is_encoder_decoder", False) and not decodes:
        raise load_failed(
            "INCOMPATIBLE", f"{config.model_type} has a decoder beside its encoder, which this family does not run"
        )
    if load.causal is not None:
        config.is_causal = load.causal
    with construction():
        model, report = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=load.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    is_bare = model.base_model is model
    foreign_head = is_bare and any(name.endswith(_PRETRAINED) for name in config.architectures or ())
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in report[fault] if _COUNTED not in str(name))
        if is_bare or fault == "unexpected_keys":  # a pooler that is never run, or that the class does not have
            names = [name for name in names if _POOLER not in name]
        if fault == "unexpected_keys":
            names = [
                name
                for name in names
                if name not in consumed and not (foreign_head and name.split(".")[0] in _LANGUAGE_HEADS)
            ]
        if names:
            raise load_failed(
                "INCOMPATIBLE",
                f"the weights do not fit config.json, they have {len(names)} {fault.replace('_', ' ')}: "
                f"{', '.join(names[:5])}",
            )
    found: PreTrainedModel = model
    return found


def filled(model_class: Any, config: Any, weights: Mapping[str, Tensor], said: str) -> PreTrainedModel:
    """A model with these tensors, which are all that it has: of a checkpoint that transformers does not read. Raises
    ModelLoadFailed INCOMPATIBLE that begins with `said` if some are too many, too few or of another shape.
    """
    with construction():
        model: PreTrainedModel = model_class(config)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise load_failed("INCOMPATIBLE", f"{said}: {error}") from error
    return model


def placed(model: PreTrainedModel, compute: Compute) -> PreTrainedModel:
    """It on the device, for inference."""
    if compute.backend == "eager":
        model.set_attn_implementation("eager")
    _cast(model, compute.dtype)
    return model.eval().requires_grad_(False).to(compute.device)


def _cast(model: PreTrainedModel, dtype: torch.dtype, *, float32_head: bool = False) -> None:
    """Weights to `dtype`, other than those the architecture keeps in float32. Buffers stay: a rotary base in 16 bit is
    another model. So do the weights of a batch normalisation, which torch takes in 16 bit only if its statistics, which
    are buffers, have 16 bit too.
    """
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # also of a model inside of this one
    kept = {each for module in model.modules() for name in names for each in getattr(module, name, None) or ()}
    if float32_head:
        kept.add("pooler")
    cast = model.base_model if float32_head else model
    kept |= {name for name, module in cast.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    for name, parameter in cast.named_parameters():
        if kept.isdisjoint([*name.split("."), name.rpartition(".")[0]]):
            parameter.data = parameter.data.to(dtype)


def tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of the safetensors in `folder`, float32; None if no file has it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  not a mapping
                return file.get_tensor(name).float()
    return None


def stored_rows(folder: Path, name: str) -> int:
    """The rows of one matrix, from the header of its file; 0 without it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  not a mapping
                return int(file.get_slice(name).get_shape()[0])
    return 0


@dataclass(frozen=True)
class Modules:
    """What modules.json adds to a transformer. `layers` are applied in order to pooled vectors, or to the states of
    late interaction.

    `root`: the folder of modules.json; `folder`: that of the transformer and its tokenizer. `query_weights`: of queries
    that need no pass, float32 [ids].
    """

    root: Path
    folder: Path
    query_weights: Tensor | None = None
    kinds: tuple[str, ...] = ()
    pooling: str = ""
    layers: tuple[nn.Module, ...] = ()
    normalizes: bool = False
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # config.json of each other module, by kind


_MASKED = ("MLMTransformer", "Transformer")
_KNOWN = {*_MASKED, "Pooling", "Normalize", "Dense", "SpladePooling", "MultiVectorMask"}


def read_modules(folder: Path) -> Modules:
    """The modules that the folder lists; none without modules.json. Raises ModelLoadFailed INCOMPATIBLE for one that
    would be left out.
    """
    found = read_value(folder / "modules.json")
    if found is None:
        return Modules(folder, folder)
    listed = [(_kind(module["type"]), folder / module["path"]) for module in found]
    query_weights = None
    if [kind for kind, _ in listed] == ["Router"]:
        listed, query_weights = _routes(listed[0][1])
    transformer = folder
    layers: list[nn.Module] = []
    settings: dict[str, dict[str, Any]] = {}
    pooling = ""
    for kind, place in listed:
        if kind not in _KNOWN:
            raise load_failed("INCOMPATIBLE", f"modules.json lists a {kind}, which this adapter would leave out")
        if kind in _MASKED:
            transformer = place
            continue
        config = settings[kind] = read_json(place / "config.json")
        if kind == "Pooling":
            with reading(place / "config.json"):
                pooling = _pooling(config)
        elif kind == "Dense":
            with reading(place / "config.json"):
                layers.append(_dense(place, config))
    kinds = tuple(kind for kind, _ in listed)
    return Modules(folder, transformer, query_weights, kinds, pooling, tuple(layers), "Normalize" in kinds, settings)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _routes(folder: Path) -> tuple[list[tuple[str, Path]], Tensor | None]:
    """The modules of documents and the weights of queries, of a Router whose queries are looked up. Any other Router is
    refused.
    """
    router = read_json(folder / "router_config.json")
    kinds = {module: _kind(name) for module, name in router.get("types", {}).items()}
    routes = router.get("structure", {})
    found = {route: [kinds[module] for module in modules] for route, modules in routes.items()}
    documents = found.get("document") or [""]
    expected = {"query": ["SparseStaticEmbedding"], "document": [documents[0], "SpladePooling"]}
    if found != expected or documents[0] not in _MASKED or router.get("parameters", {}).get("route_mappings"):
        said = "; ".join(f"{route}: {', '.join(names)}" for route, names in found.items())
        raise load_failed(
            "INCOMPATIBLE",
            f"modules.json lists a Router of {said}; expected query: SparseStaticEmbedding; document: a masked LM, "
            "SpladePooling",
        )
    weights = tensor(folder / routes["query"][0], "weight")
    return [(kinds[module], folder / module) for module in routes["document"]], weights


def _pooling(config: dict[str, Any]) -> str:
    named = [_POOLING_KEYS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode") and on is True]
    pooling = config.get("pooling_mode") or "+".join(named)
    pooling = {"lasttoken": "last", "weightedmean": "weighted"}.get(pooling, pooling)
    if pooling and pooling not in POOLINGS:
        raise load_failed(
            "INCOMPATIBLE", f"config.json: the pooling of the model is {pooling}, expected one of {', '.join(POOLINGS)}"
        )
    if config.get("include_prompt") is False:
        raise load_failed(
            "INCOMPATIBLE", "the pooling leaves the prompt out (include_prompt), which this adapter does not"
        )
    return str(pooling)


class Projection(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """A Dense of modules.json: activation(W x + b), with a residual where the file has one. float32 [.., in] -> [..,
    out].

    Source: sentence-transformers' and PyLate's Dense.
    """

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, residual: nn.Linear | None = None, *, adds_input: bool = False
    ) -> None:
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
    name = _kind(config.get("activation_function", "torch.nn.modules.activation.Tanh"))  # the module's own default
    if name not in _ACTIVATIONS:
        raise load_failed(
            "INCOMPATIBLE", f"a Dense has the activation {name}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    weight, bias = tensor(folder, "linear.weight"), tensor(folder, "linear.bias")
    shape = (config.get("out_features"), config.get("in_features"))
    if weight is None or tuple(weight.shape) != shape or (bias is None) == bool(config.get("bias", True)):
        raise load_failed(
            "INCOMPATIBLE", f"{folder.name}: its weights are missing or do not have the shape that its config.json says"
        )
    adds_input = bool(config.get("use_residual"))
    residual = tensor(folder, "residual.weight") if adds_input and shape[0] != shape[1] else None
    if adds_input and shape[0] != shape[1] and (residual is None or tuple(residual.shape) != shape):
        raise load_failed(
            "INCOMPATIBLE", f"{folder.name}: its residual weights are missing or do not have the shape of the others"
        )
    return Projection(
        linear(weight, bias),
        _ACTIVATIONS[name](),
        None if residual is None else linear(residual),
        adds_input=adds_input and residual is None,
    )
