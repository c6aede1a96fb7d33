"""Failures to load a model or a LoRA, with the error classes of the client contract."""

from __future__ import annotations

from typing import Literal

from sie_contracts.errors import LoraLoadFailed, ModelLoadFailed

MAX_ATTEMPTS = 3  # tries of a load whose cause is unknown; a preload tries no more often either

LoadErrorClass = Literal["GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE", "UNKNOWN", "OOM", "NETWORK"]


def load_failed(error_class: LoadErrorClass, message: str) -> ModelLoadFailed:
    """Return a load failure with its error class, which decides when the cluster tries again."""
    return ModelLoadFailed(message, extras={"error_class": error_class})


def lora_failed(name: str, cause: str) -> LoraLoadFailed:
    """Return a failure to load a LoRA that is not the fault of the client. The name of the LoRA may be
    a text of a client.
    """
    return LoraLoadFailed(_lora_message(name, cause), extras={"lora_id": name[:200]})


def lora_rejected(name: str, cause: str) -> LoraLoadFailed:
    """Return the error for a LoRA that can never be used with this model."""
    return LoraLoadFailed(_lora_message(name, cause), reason="lora_rejected", extras={"lora_id": name[:200]})


def lora_not_found(name: str, cause: str) -> LoraLoadFailed:
    """Return the error for a LoRA that was found in none of the searched folders and repositories."""
    return LoraLoadFailed(_lora_message(name, cause), reason="lora_not_found", extras={"lora_id": name[:200]})


def lora_of_entry(error: LoraLoadFailed) -> LoraLoadFailed:
    """Return the failure of a LoRA in the model's entry. The failure is not the fault of the client."""
    return LoraLoadFailed(error.message, extras=error.extras)


def _lora_message(name: str, cause: str) -> str:
    return f"the LoRA {name[:200]} could not be loaded: {cause}"
