"""Object stores that the files of this folder share: each is started once, when the first test wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sample_families as samples
from inprocess import InProcess
from object_stores import S3, Faults, Google, Moto, Place, s3_server

from support.derived_folder import derived_folder, derived_folder_of_session  # noqa: F401  fixtures


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sample_families() -> Iterator[None]:
    """Register the families of tests/sample_families.py, in place of those of the extras, for the tests of a file."""
    with samples.registered():
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    server = Moto()
    yield server
    server.close()


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    server = Google(tmp_path_factory.mktemp("google"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["moto", "seaweed", "google"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a prefix of its own in a bucket. Each test runs once on each store."""
    return Place.at(request.getfixturevalue(request.param), monkeypatch)


@pytest.fixture
def faulty(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return a place on moto with faults that only this test sets."""
    moto.faults = Faults()
    yield Place.at(moto, monkeypatch)
    moto.faults = Faults()
