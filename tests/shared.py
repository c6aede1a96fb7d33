"""The clusters that several files of tests/system ask: one process runs all of these files, starts the cluster for the
first of them and ends it after the last.

    pytestmark = shared.OPEN ──► one group of `--dist loadgroup` ──► fixture `open_cluster` of tests/system/conftest.py

A test there owns its models, aliases, keys and pools. What kills processes, fills queues or needs another configuration
has a cluster of its own.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import httpx
import pytest
from cluster import Cluster, until

OPEN: Final = pytest.mark.xdist_group("open-cluster")  # asks the one without tokens
GUARDED: Final = pytest.mark.xdist_group("guarded-cluster")  # asks the one with tokens
FIRST_GUARDED: Final = pytest.mark.xdist_group("guarded-cluster", first=True)  # before the series of metrics are taken
JOBS: Final = pytest.mark.xdist_group("jobs-stack")  # asks the one whose jobs are steered
TOY: Final = pytest.mark.xdist_group("toy-stack")  # asks the one with the fixed-cost adapter
# of the open one, whose API itself needs none; of the guarded one
ADMIN, USER, GUARDED_ADMIN = (f"canary-token-{secrets.token_urlsafe(16)}" for _ in range(3))
# in the environment of the guarded one, for nobody to see
CANARIES: Final = {"HF_TOKEN": "hf-canary-token", "AWS_SECRET_ACCESS_KEY": "aws-canary-key"}
PLACES: Final = 48  # requests at once that the guarded one takes
SERVED_S: Final = 90.0  # until every gateway knows a model that was added

T = TypeVar("T")


class Shared:
    """Objects that run for the group of the present test."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._ends = contextlib.ExitStack()

    def get(self, name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
        """The one of this name, which `start` makes if it does not run yet."""
        if name not in self._running:
            self._running[name] = self._ends.enter_context(start())
        instance: T = self._running[name]
        return instance

    def end(self) -> None:
        """End all. Raises what the ends raise."""
        self._running.clear()
        self._ends.close()


def wait_until_served(cluster: Cluster, *models: str) -> None:
    """Until every gateway knows the models."""

    def known() -> bool:
        return all(
            httpx.get(f"{url}/v1/models/{model}", timeout=30).status_code == 200
            for url in cluster.urls
            for model in models
        )

    until(known, SERVED_S, f"{models} to be served", cluster.log)
