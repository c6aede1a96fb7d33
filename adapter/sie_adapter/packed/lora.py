"""LoRAs of a loaded model: the layers that a LoRA names compute W x + s B A x. The scale s is alpha / r (arXiv
2106.09685), or alpha / sqrt(r) with use_rslora. The weights of the base model never change.

    PEFT folder ──► pairs of matrices per layer ──► a trial: does it change the output? ──► stored; above
    the limit of loaded LoRAs, the least recently used LoRA is dropped

A pass uses the LoRA that its thread has activated, so loading or dropping a LoRA does not affect a running pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sie_adapter.engine.device import Compute
from sie_contracts.errors import LoraLoading
from sie_contracts.models.load_errors import lora_rejected
from sie_store.folder_files import read_json

# path of a layer -> its matrices: A [r, in], and B [out, r], which is already multiplied by the scale
Pairs = Mapping[str, tuple[Tensor, Tensor]]
_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Supported fields of adapter_config.json, and fields that only describe the training. `load` refuses a LoRA with any
# other field, because that field may change the model in a way that two matrices cannot express.
_UNDERSTOOD = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
        "ensure_weight_tying",
    }
)
# values of init_lora_weights that do not change the weights of the base model
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
_ALPHA = 8  # alpha if a PEFT configuration does not set it


class _Active(threading.local):
    pairs: Pairs | None = None


_ACTIVE = _Active()


def lora_acts() -> bool:
    return _ACTIVE.pairs is not None


class LoraLinear(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Linear layer that adds B A x to the output of the base layer. A and B are the matrices of the active LoRA for
    `path`. Without an active LoRA, or without matrices for `path`, the layer returns the output of the base layer.
    """

    def __init__(self, base: nn.Module, path: str) -> None:
        super().__init__()
        self.base, self.path = base, path
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        """Weight of the base layer, for models that read the weight of a layer."""
        return self.base.weight

    def forward(self, states: Tensor) -> Tensor:
        output = self.base(states)
        pair = _ACTIVE.pairs.get(self.path) if _ACTIVE.pairs is not None else None
        return output if pair is None else output + F.linear(F.linear(states, pair[0]), pair[1])


class ModelLoras:
    """LoRAs of one model. Thread-safe. `model`: the model whose layers a LoRA must fit; it may have no weights.
    `adapted`: returns the module that LoRAs change, and loads its weights if necessary. `run`: returns the states of a
    short, constant sample. `load` refuses a LoRA that does not change these states.
    """

    def __init__(
        self, model: nn.Module, adapted: Callable[[], nn.Module], compute: Compute, run: Callable[[], Tensor]
    ) -> None:
        self._model, self._adapted, self._compute, self._run = model, adapted, compute, run
        self._lock = threading.Lock()
        # name of a LoRA -> its matrices, and the digest of its files
        self._kept: OrderedDict[str, tuple[Pairs, str]] = OrderedDict()
        self.leases: dict[str, Any] = {}  # locks on the files of loaded LoRAs, so that the files stay on the disk

    def load(self, name: str, folder: Path, most: int) -> str:
        """Load a LoRA if it is not loaded yet, and check that the LoRA changes the output. Return the SHA-256, in hex,
        of the digests of its two files. Raises LoraLoadFailed, which names the fault. `most`: the largest number of
        loaded LoRAs; beyond it, the least recently used are dropped.
        """
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name][1]
        pairs, digest = self._read(name, folder), _digest(folder)
        self._wrap(pairs)
        with torch.inference_mode():
            plain = self._run()
            with acting(pairs):
                changed = self._run()
        if not torch.isfinite(changed).all():
            raise lora_rejected(name, "with this LoRA, the output is not finite")
        if torch.equal(plain, changed):
            raise lora_rejected(name, "it does not change the output of the model")
        with self._lock:
            self._kept[name] = pairs, digest
            while len(self._kept) > most:
                self._kept.popitem(last=False)
        return digest

    @contextlib.contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Run the passes of this thread with the LoRA `name`. Raises LoraLoading if the LoRA is not loaded."""
        with self._lock:
            if name not in self._kept:
                shown = name[:200]
                raise LoraLoading(f"the LoRA {shown} is not loaded", extras={"lora_id": shown, "lora": shown})
            self._kept.move_to_end(name)
            pairs, _ = self._kept[name]
        with acting(pairs):
            yield

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaded LoRAs, least recently used first."""
        with self._lock:
            return tuple(self._kept)

    def _read(self, name: str, folder: Path) -> Pairs:
        config = read_json(folder / _CONFIG)
        file = folder / _WEIGHTS
        if config.get("peft_type") != "LORA" or not file.is_file():
            raise lora_rejected(
                name, "its folder needs adapter_model.safetensors, and adapter_config.json with peft_type LORA"
            )
        _check_config(name, config)
        layers = {path: module for path, module in self._model.named_modules() if hasattr(module, "in_features")}
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(file).items():
            path, _, half = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            path = self._resolved(path, layers)
            if half not in ("lora_A", "lora_B") or not path:
                raise lora_rejected(
                    name, f"{key} belongs to no linear layer of this model, or is neither lora_A nor lora_B"
                )
            halves.setdefault(path, {})[half] = tensor
        if not halves:
            raise lora_rejected(name, f"{_WEIGHTS} has no matrices")
        for path, matrices in halves.items():
            _check_matrices(name, path, layers[path], matrices, config)
        model = self._adapted()
        return {path: self._scaled(model.get_submodule(path), matrices, config) for path, matrices in halves.items()}

    def _resolved(self, path: str, layers: Mapping[str, Any]) -> str:
        """Return the path of a layer in this model, an empty string if the model lacks the layer. `path`: the path of
        the layer in the files of a LoRA. Its prefixes may be those of another model class.
        """
        prefix = f"{getattr(self._model, 'base_model_prefix', '')}."
        bare = path.removeprefix("model.")
        in_language = bare.removeprefix("language_model.").removeprefix("text_model.")
        for candidate in (path, path.removeprefix(prefix), bare, in_language):
            if candidate in layers:
                return candidate
        return ""

    def _scaled(self, layer: Any, halves: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        first, second = halves["lora_A"], halves["lora_B"]
        rank = len(first)
        scale = float(config.get("lora_alpha", _ALPHA)) / (rank**0.5 if config.get("use_rslora") else rank)
        device, weight = self._compute.device, getattr(layer, "weight", None)
        dtype = self._compute.dtype if weight is None else weight.dtype
        return first.to(device, dtype), (second.float() * scale).to(device, dtype)

    def _wrap(self, pairs: Pairs) -> None:
        with self._lock:
            for path in pairs:
                parent_path, _, child = path.rpartition(".")
                parent = self._adapted().get_submodule(parent_path)
                layer = getattr(parent, child)
                if not isinstance(layer, LoraLinear):
                    setattr(parent, child, LoraLinear(layer, path))


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in (_CONFIG, _WEIGHTS):
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _check_matrices(name: str, path: str, layer: Any, halves: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Raise LoraLoadFailed if a matrix is missing, does not fit the layer or the configuration, or is not finite."""
    if set(halves) != {"lora_A", "lora_B"}:
        raise lora_rejected(name, f"{path} has only one of its two matrices")
    first, second = halves["lora_A"], halves["lora_B"]
    rank = len(first)
    if first.shape != (rank, layer.in_features) or second.shape != (layer.out_features, rank):
        widths = f"{layer.in_features} to {layer.out_features}"
        raise lora_rejected(
            name, f"{path} maps {widths} numbers, its matrices are A {tuple(first.shape)} and B {tuple(second.shape)}"
        )
    ranks = {config.get("r", rank), *(config.get("rank_pattern") or {}).values()}
    if rank not in ranks:
        raise lora_rejected(
            name, f"{path} has the rank {rank}, adapter_config.json says {', '.join(map(str, sorted(ranks)))}"
        )
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise lora_rejected(name, f"the matrices of {path} are not finite")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise LoraLoadFailed for a configuration that changes the model by more than the two matrices of each layer."""
    unsupported = sorted(
        key for key, value in config.items() if value and key not in {*_UNDERSTOOD, "bias", "init_lora_weights"}
    )
    if unsupported:
        raise lora_rejected(name, f"adapter_config.json sets {', '.join(unsupported)}, which is not supported")
    if config.get("bias", "none") != "none":
        raise lora_rejected(name, "adapter_config.json sets bias, which is not supported")
    if (init := config.get("init_lora_weights")) not in _INITIALISATIONS:
        remedy = "PEFT can save it as a plain LoRA"
        raise lora_rejected(name, f"init_lora_weights is {init!r}, which changes the weights of the base: {remedy}")


@contextlib.contextmanager
def acting(pairs: Pairs) -> Iterator[None]:
    before, _ACTIVE.pairs = _ACTIVE.pairs, pairs
    try:
        yield
    finally:
        _ACTIVE.pairs = before
