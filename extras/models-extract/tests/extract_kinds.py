"""Small random models of this extra for `local_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _gliner(folder: Path) -> dict[str, Any]:
    from parity.gliner_checkpoints import gliner_folder  # it imports the package gliner

    gliner_folder(folder)
    return {"family": "gliner", "outputs": {"entities": 0}, "max_tokens": 512}


KINDS = {"gliner": _gliner}
PUBLISHED = {"gliner": "gliner-community/gliner_medium-v2.5"}
