"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import job_stack
import pytest
from job_client import JobClient
from stack import Stack
from support.system import *  # noqa: F403
from support.system import CLUSTERS


@pytest.fixture(scope="module")
def job_cluster(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Start the stack that tests of jobs steer, see job_stack."""
    return CLUSTERS.get("jobs", lambda: job_stack.job_stack(tmp_path_factory.mktemp("jobs")))


@pytest.fixture(scope="module")
def jobs(job_cluster: Stack) -> Iterator[JobClient]:
    with JobClient(job_cluster.urls[0], job_stack.ADMIN) as jobs:
        yield jobs


@pytest.fixture
def job_folder(job_cluster: Stack, request: pytest.FixtureRequest) -> Path:
    """A folder of this test that jobs may read and write."""
    folder = job_cluster.folder / "data" / request.node.name
    folder.mkdir(parents=True)
    return folder
