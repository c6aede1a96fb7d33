"""From a resolved catalogue entry to a loaded family.

entry ──► folder of its weights ──► modules.json understood? ──► family ──► Loaded
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from sie_adapter import device as devices
from sie_adapter.device import Compute
from sie_adapter.failure import is_device_fatal, is_out_of_memory, load_failed
from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.heads.pooling import POOLINGS
from sie_adapter.weights import WeightSources
from sie_contracts.catalogue import Precision, Resolved
from sie_contracts.errors import SIEError
from sie_contracts.settings import Settings

_logger = logging.getLogger("sie.adapter")

FAMILIES = {"text-encoder": TextEncoder}
_MODULES = {"Transformer", "Pooling", "Normalize"}
_POOLING_KEYS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True)
class Loader:
    """Loads entries for one device, with the settings of this process."""

    device: torch.device
    sources: WeightSources
    settings: Settings

    def compute(self, precision: Precision | None) -> Compute:
        """Precision and attention of a model whose entry says `precision`, on this device."""
        has_bfloat16 = self.device.type == "cpu" and devices.cpu_has_bfloat16()
        default = cast(Precision, self.settings.default_compute_precision)
        dtype = devices.resolve_precision(precision, default, self.device.type, has_bfloat16=has_bfloat16)
        facts = devices.attention_facts(self.device, dtype)
        return Compute(self.device, dtype, *devices.resolve_attention(self.settings.attention_backend, facts), facts)

    def load(self, resolved: Resolved) -> TextEncoder:
        """Load the weights. Raises ModelLoadFailed with an error class for whatever goes wrong."""
        entry = resolved.entry
        family = FAMILIES.get(entry.family)
        if family is None:
            raise load_failed("INCOMPATIBLE", f"{entry.id}: this adapter has no family {entry.family}, it has {', '.join(FAMILIES)}")
        folder = self.sources.folder(entry)
        try:
            return family(folder, entry, resolved.load, self.compute(resolved.load.precision), stored_pooling(folder))
        except SIEError:
            raise
        except ImportError as error:
            raise load_failed("DEPENDENCY", f"{entry.id}: {error}") from error
        except Exception as error:
            if is_device_fatal(error):
                raise
            _logger.exception("loading %s failed", entry.id)
            if is_out_of_memory(error):
                raise load_failed("OOM", f"{entry.id}: the device has too little memory for its weights") from error
            raise load_failed("UNKNOWN", f"{entry.id}: {type(error).__name__}: {error}") from error


def stored_pooling(folder: Path) -> str:
    """The pooling that the model's own sentence-transformers files name; empty without them. Raises ModelLoadFailed for unknown modules."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return ""
    pooling = ""
    for module in json.loads(modules.read_text()):
        kind = module["type"].rpartition(".")[2]
        if kind not in _MODULES:
            raise load_failed("INCOMPATIBLE", f"modules.json lists a {kind}, which this adapter would leave out")
        if kind == "Pooling":
            config = json.loads((folder / module["path"] / "config.json").read_text())
            named = [_POOLING_KEYS.get(key, key) for key, on in config.items() if key.startswith("pooling_mode") and on is True]
            pooling = config.get("pooling_mode") or "+".join(named)
    if pooling and pooling not in POOLINGS:
        raise load_failed("INCOMPATIBLE", f"the pooling of the model is {pooling}, expected one of {', '.join(POOLINGS)}")
    return pooling
