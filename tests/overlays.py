"""Catalogue that a config service would serve, without one."""

from __future__ import annotations

from sie_config_service.overlay import Overlay
from sie_contracts.models.aliases import Alias
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Settings


def wanted_models(settings: Settings) -> dict[str, tuple[ModelEntry | Alias, str]]:
    """The packaged catalogue with SIE_MODELS_DIR over it, less what SIE_MODEL_FILTER leaves out. Raises as
    `Overlay.folders`.
    """
    return dict(Overlay(settings).folders().models)
