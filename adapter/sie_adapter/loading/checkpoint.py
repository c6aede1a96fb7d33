"""Load of a transformers model from its folder. Two other Python modules read the rest of the folder: `tokenizer`
reads the tokenizer, and `modules` reads the modules of sentence-transformers that follow the transformer.

The load refuses weights that are missing, unexpected or of another shape, since a model with a random part still
returns plausible answers. Weights that the model never uses may be missing or unexpected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from sie_adapter.engine.device import Compute
from sie_adapter.loading.weight_files import tensors_in
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_store.folder_files import read_json

# While transformers constructs a model, it changes torch for the whole process: the default dtype, and functions of
# torch. Models are constructed in float32, since another default dtype would change results of passes on other threads.
# They are constructed one at a time, since concurrent loads would restore the functions in the wrong order.
_CONSTRUCTION = threading.Lock()
_POOLER = "pooler."
_COUNTED = "position_ids"  # the class computes these tensors itself, so the files may have them or not
# first parts of the names of tensors of language-model heads, which files may have although the class has no head
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
T = TypeVar("T")
_PRETRAINED = ("ForMaskedLM", "ForCausalLM", "ForPreTraining")


# model type with encoder and decoder -> class that has only its encoder
ENCODERS: Mapping[str, str] = {"mt5": "MT5EncoderModel", "t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}


def class_of(folder: Path, entry: ModelEntry, classes: Mapping[str, T]) -> T:
    """Return the class for the `model_type` in config.json. Raises ModelLoadFailed INCOMPATIBLE for another type."""
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if model_type not in classes:
        listed = " or ".join(classes)
        raise incompatible(f"{entry.id}: model_type is {model_type}, family {entry.family} needs {listed}")
    return classes[model_type]


@contextmanager
def construction() -> Iterator[None]:
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
    """Return the model of `folder` as `auto_class`, on the device, for inference. `consumed`: names of weights that the
    caller reads itself. `changes`: replacements for settings in config.json. `decodes`: whether the caller runs the
    decoder of a model with encoder and decoder.

    With `float32_head`, the backbone is in the precision of `compute`, but its pooler and all layers after the backbone
    are in float32.

    Raises ModelLoadFailed INCOMPATIBLE for a decoder that the caller does not run, and for weights that do not fit
    config.json. The message names up to five of these weights.
    """
    options = {"attn_implementation": "eager"} if compute.backend == "eager" else {}
    model = _from_files(auto_class, folder, load, consumed, options, changes, decodes=decodes)
    model.config.use_cache = False
    return for_inference(model, compute, float32_head=float32_head)


def empty_model(
    auto_class: Any,
    folder: Path,
    load: LoadOptions,
    consumed: Iterable[str] = (),
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    decodes: bool = False,
) -> PreTrainedModel:
    """Return the model on the device `meta`, without weights. Raises the errors of `load_model`."""
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
    is_encoder = auto_class.__name__ == ENCODERS.get(config.model_type)
    if getattr(config, "is_encoder_decoder", False) and not decodes and not is_encoder:
        raise incompatible(f"{config.model_type} has an encoder and a decoder, and this family runs no decoder")
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
        # the files may lack a pooler that never runs, and may have a pooler that the class lacks
        if is_bare or fault == "unexpected_keys":
            names = [name for name in names if _POOLER not in name]
        if fault == "unexpected_keys":
            names = [
                name
                for name in names
                if name not in consumed and not (foreign_head and name.split(".")[0] in _LANGUAGE_HEADS)
            ]
        if names:
            raise incompatible(
                f"the weights do not fit config.json, they have {len(names)} {fault.replace('_', ' ')}: "
                f"{', '.join(names[:5])}",
            )
    loaded: PreTrainedModel = model
    return loaded


def filled(model_class: Any, config: Any, weights: Mapping[str, Tensor], message: str) -> PreTrainedModel:
    """Return a model with these tensors, for a checkpoint that transformers cannot read. Raises ModelLoadFailed
    INCOMPATIBLE, whose text begins with `message`, for missing tensors, additional tensors and wrong shapes.
    """
    with construction():
        model: PreTrainedModel = model_class(config)
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise incompatible(f"{message}: {error}") from error
    return model


def placed(model: PreTrainedModel, compute: Compute) -> PreTrainedModel:
    if compute.backend == "eager":
        model.set_attn_implementation("eager")
    return for_inference(model, compute)


def for_inference(model: Any, compute: Compute, *, float32_head: bool = False) -> Any:
    """Convert weights to the dtype of `compute`, except weights that the architecture keeps in float32, and move the
    model to the device. Buffers keep their dtype: a rotary base in 16 bit would change the results. The weights of a
    batch normalisation keep their dtype, because torch accepts 16-bit weights only with 16-bit statistics, and the
    statistics are buffers.
    """
    # each submodule that is a transformers model may have its own list of float32 modules
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    float32_names = {
        pattern for module in model.modules() for name in names for pattern in getattr(module, name, None) or ()
    }
    if float32_head:
        float32_names.add("pooler")
    cast = model.base_model if float32_head else model
    float32_names |= {
        name for name, module in cast.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    for name, parameter in cast.named_parameters():
        if float32_names.isdisjoint([*name.split("."), name.rpartition(".")[0]]):
            parameter.data = parameter.data.to(compute.dtype)
    return model.eval().requires_grad_(False).to(compute.device)


def tensor(folder: Path, name: str) -> Tensor | None:
    """Return one tensor of the safetensors in `folder`, float32; None if no file has the tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  no mapping
                return file.get_tensor(name).float()
    return None


def stored_rows(folder: Path, name: str) -> int:
    """Return the number of rows of the matrix `name`, from the headers of the safetensors; 0 if no file has it."""
    stored = (tensors_in(path).get(name) for path in sorted(folder.glob("*.safetensors")))
    return next((tensor.shape[0] for tensor in stored if tensor is not None), 0)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.float(), requires_grad=False)
    return layer
