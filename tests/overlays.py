"""The catalogue that a config service would serve, computed without one."""

from __future__ import annotations

from sie_config_service.overlay import Overlay
from sie_contracts.models.aliases import Alias
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Settings


def wanted_models(settings: Settings) -> dict[str, tuple[ModelEntry | Alias, str]]:
    """Return the packaged catalogue with SIE_MODELS_DIR over it, without models that SIE_MODEL_FILTER excludes. Raise
    the errors of `Overlay.folders`.
    """
    return dict(Overlay(settings).folders().models)
