"""Small random models of this extra for `local_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _clap(folder: Path) -> dict[str, Any]:
    from parity import sound_checkpoints  # it imports classes of transformers

    sound_checkpoints.clap(folder)
    return {
        "family": "sound-encoder",
        "inputs": ["text", "audio"],
        "outputs": {"dense": sound_checkpoints.WIDTH},
        "max_tokens": sound_checkpoints.TOKENS,
    }


KINDS = {"clap": _clap}
PUBLISHED = {"clap": "me/clap"}
