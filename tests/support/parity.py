"""Fixtures of the parity tests. A session builds, loads and encodes each checkpoint once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of
from parity.device import new_engine, require_precision
from parity.engine import ParityEngine, Served
from parity.reference import Reference
from parity.score_checkpoints import ScoringEngine, scoring_engine
from parity.table import ParityTable

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading import loading
from sie_contracts.models.entries import Precision
from sie_runtime.feed import packaged_catalogue
from support.derived_folder import derived_folder, derived_folder_of_session  # noqa: F401  fixtures

Folders = Callable[[str], Path]
Serve = Callable[..., Served]
References = Callable[[str, str], Reference]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that makes the sentence-transformers folder of an architecture."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def folder(name: str) -> Path:
        architecture = ARCHITECTURES[name]
        place = build(root / name.replace(" ", "-"), architecture)
        return add_modules(place, modules_of(architecture), max_tokens=architecture.max_tokens)

    return folder


@pytest.fixture(scope="session")
def serve(folders: Folders) -> Iterator[Serve]:
    """Return a function that loads an architecture in a precision through the adapter (`ParityEngine.load`). It skips
    the test where this machine does not compute in the precision.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a lane
    engine = ParityEngine()

    @functools.cache
    def served(name: str, precision: Precision, max_tokens: int = 0, **options: Any) -> Served:
        architecture = ARCHITECTURES[name]
        limit = max_tokens or architecture.max_tokens
        loaded = engine.load(folders(name), precision, width=architecture.width, max_tokens=limit, **options)
        require_precision(loaded.precision, precision)
        return loaded

    yield served
    engine.stop()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScoringEngine]:
    """The adapter's engine in this process, for heads that score, classify or extract."""
    with scoring_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def cpu_engine() -> Iterator[AdapterEngine]:
    """The adapter's engine in this process, for models that read images or sounds. It computes in float32 where an
    entry names no precision. It computes in bfloat16 on any CPU, so that code that mixes precisions fails everywhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "bfloat16_lacks", lambda: "")
        engine = new_engine(default_compute_precision="float32")
        yield engine
        assert engine.stop(10)


@pytest.fixture(scope="session")
def references(folders: Folders) -> References:
    """Return a function that loads the folder of an architecture with sentence-transformers in a precision."""

    @functools.cache
    def reference(name: str, precision: str) -> Reference:
        return Reference(folders(name), precision)

    return reference


# Each conftest.py that imports this module has a fixture `table` of its own; all fill this one.
_MEASURED = ParityTable()


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[ParityTable]:
    yield _MEASURED
    # The option is absent if pytest reads this file after it has parsed the command line.
    if target := request.config.getoption("parity_table", default=None):
        unproven = {model: entry.unproven for model, entry in packaged_catalogue().entries.items() if entry.unproven}
        Path(target).write_text(_MEASURED.markdown(unproven))
