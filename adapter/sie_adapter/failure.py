"""Failures of a model load in the classes of the client contract, and what an exception of the device means."""

from __future__ import annotations

from typing import Literal

import torch

from sie_contracts.errors import ModelLoadFailed

LoadErrorClass = Literal["GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE", "UNKNOWN", "OOM", "NETWORK"]


def load_failed(error_class: LoadErrorClass, message: str) -> ModelLoadFailed:
    """A load failure that names its class, which decides when the cluster tries again."""
    return ModelLoadFailed(message, extras={"error_class": error_class})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. The CPU allocator raises a bare RuntimeError, so there the text is all there is."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (type(error) is RuntimeError and "DefaultCPUAllocator" in str(error))


def is_device_fatal(error: BaseException) -> bool:
    """Whether the device is lost with this error: asynchronous CUDA errors stay in the context for good."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
