"""Checks that a model's files are complete and fit its class, and that the tokenizer fits the weights. No model is
loaded.

    weight files ──► read once: complete, no NaN, quantised only as config.json says
    class of the entry, on the device `meta` ──► tensors: the same names and shapes as in the files
                                             └─► table of embeddings: a row for each id of the tokenizer
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers

from sie_adapter.loading.loading import family_of
from sie_adapter.loading.weight_files import check_weights
from sie_contracts.models import families
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import load_failed


def compare_files(folder: Path, entry: ModelEntry) -> list[str]:
    """Raise ModelLoadFailed if the files in `folder` do not fit `entry`, so that a load would refuse them. Return the
    parts that could not be checked, each with the reason. No code in the folder is run.
    """
    if entry.family not in families.rows():
        return [f"its files: the family {entry.family} comes from another package"]
    check_weights(folder)
    if entry.load.trust_remote_code:
        return ["its tensors and its tokenizer: an inspection does not run the code of load.trust_remote_code"]
    try:
        with quiet():
            cause = family_of(entry.family).fault_of_files(folder, entry)
    except ImportError as error:
        return [f"its tensors and its tokenizer: a package is missing or cannot be imported: {error}"]
    if cause:
        raise load_failed("CERTIFICATE", f"{entry.id}: {cause}")
    return []


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and advice of transformers, and all warnings of Python, inside the context."""
    bars, level = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
