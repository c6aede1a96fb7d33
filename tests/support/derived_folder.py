"""A folder of derived files of its own for each test, and for the fixtures of a session: a test that changes a check of
a load must not find the certificate of an earlier one.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator

import pytest

from sie_contracts.settings import Settings
from sie_store.weights import derived


@contextlib.contextmanager
def _new_folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(derived, "FOLDER", f"sie-derived-{uuid.uuid4().hex}")
        yield
        shutil.rmtree(Settings().cache_folder / derived.FOLDER, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def derived_folder_of_session() -> Iterator[None]:
    with _new_folder():
        yield


@pytest.fixture(autouse=True)
def derived_folder() -> Iterator[None]:
    with _new_folder():
        yield
