"""Torch copy of a model that runs as an OpenVINO graph or on SGLang. It is loaded before the first pass that only torch
can run (`engines.of_batch`), for example with a LoRA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sie_adapter.engine.device import Compute
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import PackedBatch


@dataclass(eq=False)
class TorchTwin:
    """Torch copy of a model of another engine. `_build_model` reads the weights again. `_add_bytes` gets the size of
    the copy, in bytes. Thread-safe.
    """

    _build_model: Callable[[], PreTrainedModel]
    _compute: Compute
    _max_tokens: int
    _add_bytes: Callable[[int], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loaded: tuple[PreTrainedModel, Backbone] | None = None

    def model(self) -> PreTrainedModel:
        """Return the model that LoRAs change. Loads the copy if it is not loaded."""
        return self._both()[0]

    def forward(self, packed: PackedBatch) -> Tensor:
        return self._both()[1].forward(packed)

    def sampled(self) -> Tensor:
        return self._both()[1].sampled()

    def _both(self) -> tuple[PreTrainedModel, Backbone]:
        with self._lock:
            if self._loaded is None:
                with torch.inference_mode():
                    model = self._build_model()
                    self._loaded = model, Backbone(model, self._compute, self._max_tokens)
                self._add_bytes(self._loaded[1].memory_bytes)
            return self._loaded
