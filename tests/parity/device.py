"""The device and the 16-bit precision of the models in these tests: a CPU and bfloat16, or those that bench/gpu names
in the environment. The oracles compute on the CPU.
"""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch

from sie_adapter.engine.device import Compute, resolve_device
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.attention_backend import attention_facts, resolve_attention
from sie_contracts.models.entries import Precision
from sie_contracts.settings import Settings

DEVICE = os.environ.get("PARITY_DEVICE", "cpu")
ATTENTION = os.environ.get("PARITY_ATTENTION", "auto")
SIXTEEN = cast(Precision, os.environ.get("PARITY_PRECISION", "bfloat16"))
SIXTEEN_TYPE: torch.dtype = getattr(torch, SIXTEEN)


def new_engine(**settings: Any) -> AdapterEngine:
    """An engine on the device, with these settings."""
    return AdapterEngine(Settings(device=DEVICE, attention_backend=ATTENTION, **settings))


def require_precision(actual: str, precision: str) -> None:
    """Skip the test if a model runs in the precision `actual`, because this machine lacks `precision`."""
    if actual != precision:
        pytest.skip(f"this CPU does not compute in {precision}")


def on_device(dtype: torch.dtype = torch.float32) -> Compute:
    """The device of these tests, as a load computes it."""
    device = resolve_device(DEVICE)
    facts = attention_facts(device, dtype)
    return Compute(device, dtype, *resolve_attention(ATTENTION, facts), facts)
