"""The client of OpenAI at a gateway of a cluster."""

from __future__ import annotations

import openai
from cluster import Cluster


def client_of(cluster: Cluster, token: str, gateway: int = 0) -> openai.OpenAI:
    """With the key `token`. What fails is not tried again."""
    return openai.OpenAI(base_url=f"{cluster.urls[gateway]}/v1", api_key=token, timeout=60, max_retries=0)
