"""Settings of the cache of answers. `inference/answers` of the gateway has the rule who may use an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import whole


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheSettings:
    cache_bytes: int = row(
        0,
        "gateway",
        whole(0),
        "Memory of each gateway for its cache of answers, bytes. A later request with an equal input is answered from the cache, without a worker. 0: there is no cache.",
    )
    cache_ttl_s: int = row(3600, "gateway", whole(1), "How long a gateway uses an answer of its cache, seconds.")
