"""Errors for a model or a LoRA that cannot be loaded, with the error classes that clients see."""

from __future__ import annotations

from typing import Literal

from sie_contracts.errors import LoraLoadFailed, ModelLoadFailed

# maximum number of attempts at a load that fails for an unknown reason, and at a preload that fails for any reason
MAX_ATTEMPTS = 3

LoadErrorClass = Literal["GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE", "UNKNOWN", "OOM", "NETWORK"]


def load_failed(error_class: LoadErrorClass, message: str) -> ModelLoadFailed:
    """Return the error for a model that cannot be loaded. `error_class` determines when the cluster tries again."""
    return ModelLoadFailed(message, extras={"error_class": error_class})


def incompatible(message: str) -> ModelLoadFailed:
    """Return the error for a model that no family of this server can run, because of its files or its entry."""
    return load_failed("INCOMPATIBLE", message)


def lora_failed(name: str, cause: str) -> LoraLoadFailed:
    """Return the error for a LoRA that cannot be loaded, if the client is not at fault. Long names are shortened."""
    return LoraLoadFailed(_lora_message(name, cause), extras={"lora_id": name[:200]})


def lora_rejected(name: str, cause: str) -> LoraLoadFailed:
    """Return the error for a LoRA that can never be used with this model."""
    return LoraLoadFailed(_lora_message(name, cause), reason="lora_rejected", extras={"lora_id": name[:200]})


def lora_not_found(name: str, cause: str) -> LoraLoadFailed:
    """Return the error for a LoRA that does not exist in any of the searched folders and repositories."""
    return LoraLoadFailed(_lora_message(name, cause), reason="lora_not_found", extras={"lora_id": name[:200]})


def lora_of_entry(error: LoraLoadFailed) -> LoraLoadFailed:
    """Return the error for a LoRA that the model's entry names. The client did not choose it, so the status is 500."""
    return LoraLoadFailed(error.message, extras=error.extras)


def _lora_message(name: str, cause: str) -> str:
    return f"the LoRA {name[:200]} could not be loaded: {cause}"
