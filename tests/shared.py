"""Clusters that several files of tests/system share. One process runs all files of a cluster, starts the cluster for
the first of them and ends it after the last.

    pytestmark = shared.OPEN ──► one group of `--dist loadgroup` ──► fixture `open_cluster` of tests/system/conftest.py

A test in such a file owns its models, aliases, keys and pools. A test that kills processes, fills queues or needs
another configuration has a cluster of its own.
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

from sie_gateway.http.routes import TABLE

OPEN: Final = pytest.mark.xdist_group("open-cluster")  # tests of the cluster without tokens
GUARDED: Final = pytest.mark.xdist_group("guarded-cluster")  # tests of the cluster with tokens
TOY: Final = pytest.mark.xdist_group("toy-stack")  # tests of the cluster with the fixed-cost adapter
# ADMIN is the admin token of the open cluster, USER and GUARDED_ADMIN are tokens of the guarded one
ADMIN, USER, GUARDED_ADMIN = (f"canary-token-{secrets.token_urlsafe(16)}" for _ in range(3))
# secrets in the environment of the guarded cluster, which must appear nowhere
CANARIES: Final = {"HF_TOKEN": "hf-canary-token", "AWS_SECRET_ACCESS_KEY": "aws-canary-key"}
PLACES: Final = 48  # concurrent requests that the guarded cluster takes
SERVED_S: Final = 90.0  # the longest time until every gateway knows a new model

T = TypeVar("T")


def needs(path: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if no installed package serves this path."""
    return pytest.mark.skipif(not TABLE.match(path).methods, reason=f"no installed package serves {path}")


class Shared:
    """Objects that the tests of the present group share."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._ends = contextlib.ExitStack()

    def get(self, name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
        """Return the object of this name, which `start` creates if it does not run yet."""
        if name not in self._running:
            self._running[name] = self._ends.enter_context(start())
        instance: T = self._running[name]
        return instance

    def end(self) -> None:
        """End all objects. Raise the errors of their ends."""
        self._running.clear()
        self._ends.close()


def wait_until_served(cluster: Cluster, *models: str) -> None:
    """Wait until every gateway knows the models."""

    def known() -> bool:
        return all(
            httpx.get(f"{url}/v1/models/{model}", timeout=30).status_code == 200
            for url in cluster.urls
            for model in models
        )

    until(known, SERVED_S, f"{models} to be served", cluster.log)
