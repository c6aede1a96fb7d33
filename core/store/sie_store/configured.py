"""Sources of weights (folder, bucket, hub) that the settings of a process name."""

from __future__ import annotations

import functools

from sie_contracts.settings import Settings
from sie_store.weights.disk import limited, usage
from sie_store.weights.sources import WeightSources


def weight_sources(settings: Settings) -> WeightSources:
    """Return the sources of weights that the settings of this process name. Raises SettingError."""
    threshold_percent = settings.disk_pressure_threshold_percent if settings.disk_cache_enabled else None
    cache = limited(
        settings.cache_folder, threshold_percent, functools.partial(usage, limit_bytes=settings.disk_cache_bytes)
    )
    cluster = None
    if settings.cluster_cache:
        from sie_store.cluster import ClusterCache

        cluster = ClusterCache(settings.cluster_cache)
    return WeightSources(settings.cache_folder, settings.hf_fallback, cluster, cache)
