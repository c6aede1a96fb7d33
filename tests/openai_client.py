"""OpenAI's client of a gateway."""

from __future__ import annotations

import openai
from cluster import Cluster


def client_of(cluster: Cluster, token: str, gateway: int = 0) -> openai.OpenAI:
    """Return a client with the key `token` that retries nothing."""
    return openai.OpenAI(base_url=f"{cluster.urls[gateway]}/v1", api_key=token, timeout=60, max_retries=0)
