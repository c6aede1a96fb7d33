"""What of a model's files can be proven without loading its weights: they are whole and those of its class, and its
tokenizer is theirs.

weight files ──► read once: whole, no NaN
class of the entry, on the device `meta` ──► names and shapes of tensors ──► its table of embeddings ──► its tokenizer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers.modeling_layers import GenericForSequenceClassification

from sie_adapter.checkpoint import empty_model, read_modules
from sie_adapter.failure import load_failed
from sie_adapter.tokenizer import Needs, bare_tokenizer, fault, fitted, load_tokenizer, read_tokenizer
from sie_adapter.weight_files import check_weights
from sie_contracts.catalogue import ModelEntry
from sie_contracts.options import PARAMETERS


def compare_files(folder: Path, entry: ModelEntry) -> list[str]:
    """Raises ModelLoadFailed for what a load of `entry` from `folder` would be refused for. Returns what could not be
    compared, and why.

    No code of the folder is run, whatever the entry allows.
    """
    if entry.family not in PARAMETERS:
        return [f"nothing of its files: the family {entry.family} is of another package"]
    check_weights(folder)
    if entry.load.trust_remote_code:
        return ["neither its tensors nor its tokenizer: load.trust_remote_code runs code that inspection does not"]
    try:
        with _quiet():
            cause = {"gliner": _gliner, "gliclass": _gliclass}.get(entry.family, _text_encoder)(folder, entry)
    except ImportError as error:
        return [f"neither its tensors nor its tokenizer: a package is not installed: {error}"]
    if cause:
        raise load_failed("CERTIFICATE", f"{entry.id}: {cause}")
    return []


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress and the advice of transformers, which are for whoever reads weights."""
    bars, level = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _text_encoder(folder: Path, entry: ModelEntry) -> str:
    from sie_adapter.families.text_encoder import class_of, consumed_by

    modules = read_modules(folder)
    tokenizer = load_tokenizer(modules.folder, entry.load)
    model: Any = empty_model(class_of(entry, folder), modules.folder, entry.load, consumed_by(entry))
    is_decoder = entry.family == "decoder-reranker" or isinstance(model, GenericForSequenceClassification)
    needs = Needs.of(entry.family, entry.run.pooling or modules.pooling, is_decoder=is_decoder)
    table = model.get_input_embeddings().num_embeddings
    return fault(fitted(tokenizer, table)[0], table, needs)


def _gliner(folder: Path, entry: ModelEntry) -> str:
    from sie_adapter.families.gliner_folder import empty_gliner

    model = empty_gliner(folder, entry, entry.load)
    layers = model.model.token_rep_layer
    cause = _fault_of(bare_tokenizer(model.data_processor.transformer_tokenizer), layers.bert_layer.model)
    if not cause and hasattr(layers, "labels_encoder"):
        cause = _fault_of(bare_tokenizer(model.data_processor.labels_tokenizer), layers.labels_encoder.model)
    return cause


def _gliclass(folder: Path, entry: ModelEntry) -> str:
    from sie_adapter.families.gliclass import empty_gliclass

    tokenizer = bare_tokenizer(read_tokenizer(folder))
    return _fault_of(tokenizer, empty_gliclass(folder, entry, entry.load).model.encoder_model)


def _fault_of(tokenizer: Tokenizer, encoder: Any) -> str:
    return fault(tokenizer, encoder.get_input_embeddings().num_embeddings)
