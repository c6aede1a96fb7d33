"""Torch copy of a model that runs on another engine. The copy is loaded before the first pass that
only torch can run (`engines.of_batch`), for example with a LoRA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sie_adapter.engine.device import Compute
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import PackedBatch


class TorchTwin:
    """Torch copy of a model that another engine runs. `build_model` reads the weights again. `add_bytes` gets the size
    of the copy, in bytes. Thread-safe.
    """

    def __init__(
        self,
        build_model: Callable[[], PreTrainedModel],
        compute: Compute,
        max_tokens: int,
        add_bytes: Callable[[int], None],
    ) -> None:
        self._build_model, self._add_bytes = build_model, add_bytes
        self._compute, self._max_tokens = compute, max_tokens
        self._lock = threading.Lock()
        self._loaded: tuple[PreTrainedModel, Backbone] | None = None

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
