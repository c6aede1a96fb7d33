"""A folder of derived files of its own for each test, and for the fixtures of a session: a test that changes a check of
a load must not find the certificate of an earlier one. It is not in the cache of the settings, which may be the user's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_store.weights import derived


@contextlib.contextmanager
def _new_folder() -> Iterator[None]:
    folder = Path(os.environ["HF_HOME"], uuid.uuid4().hex)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(derived, "FOLDER", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def derived_folder_of_session() -> Iterator[None]:
    with _new_folder():
        yield


@pytest.fixture(autouse=True)
def derived_folder() -> Iterator[None]:
    with _new_folder():
        yield
