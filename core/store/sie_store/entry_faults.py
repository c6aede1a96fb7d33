"""Contradictions between a catalogue entry and the files of its model. The same check runs when an entry is written and
when its model is loaded.

    folder + entry ──fault──► None, or the field with its fault and the fix

Only small JSON files are read, no weights. A load finds further faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sie_contracts.models import families
from sie_contracts.models.entries import LoadOptions, ModelEntry, Pooling
from sie_contracts.models.families import TEXT_ENCODER
from sie_store.folder_files import TRANSFORMER_FILES, read_json, read_value, reading

MODEL_FILE = "config_sentence_transformers.json"
# flag of a pooling in config.json of an older model -> value of `pooling_mode` in a newer model
POOLING_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# name of a pooling in sentence-transformers -> name in entries, if they differ
ENTRY_NAMES: Mapping[str, Pooling] = {"lasttoken": "last", "weightedmean": "weighted", "mean_sqrt_len_tokens": "sqrt"}
# model types that number the positions of a text from pad id + 1 on, so that a text cannot use the first positions
_NUMBERED_FROM_PAD = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_ACCEPT = "with load.accept_unproven: true the entry is served, although its vectors may be wrong"


class _StoredTruncation(msgspec.Struct):
    direction: str = ""


class _TokenizerFile(msgspec.Struct):
    truncation: _StoredTruncation | None = None


@dataclass(frozen=True)
class Fault:
    """Contradiction. `loc`: path of the field in the entry (`$.run.pooling`). `message`: the fault, and any fix."""

    loc: str
    message: str


def fault(folder: Path, entry: ModelEntry, load: LoadOptions) -> Fault | None:
    """Return a contradiction between `entry` and the files of `folder`, for which a load would be refused; None if
    there is none. Raises ModelLoadFailed for a file that cannot be read.

    With `load.accept_unproven`, pooling, prompts and side of truncation are not compared, although they may change the
    vectors. `max_tokens` of a text encoder is always compared, because the model cannot read a longer text.
    """
    overridden = None
    if not load.accept_unproven:
        overridden = _prompt_fault(folder, entry) or _pooling_fault(folder, entry) or _truncation_fault(folder, entry)
    return overridden or _length_fault(folder, entry)


def _prompt_fault(folder: Path, entry: ModelEntry) -> Fault | None:
    """Return the fault of the entry's prompts, if any. The files may have a prompt for queries, a prompt for documents
    and a default prompt. If they have a prompt for a purpose, the entry's prompt for it must have the same text, or
    contain {instruction}. The entry may add prompts that the files lack.
    """
    # Only families that compute vectors are checked: other families use a prompt only if a request names the prompt.
    is_encoder = families.row(entry.family).gives_vectors
    model = read_json(folder / MODEL_FILE) if is_encoder else {}
    stored = model.get("prompts") or {}
    sides = (("query", "query", "query_template"), ("document", "document", "doc_template"))
    for name, own, field in (*sides, (model.get("default_prompt_name"), entry.default_prompt_name, "prompt_name")):
        prompt = stored.get(name) or ""
        template = entry.prompts.get(own, "{text}")
        if prompt and "{instruction}" not in template and template != f"{prompt}{{text}}":
            key = f"prompts.{own}" if own else "the prompt without default_prompt_name"
            differs = f"{key} is {template!r}, the model's {MODEL_FILE} has the prompt {prompt!r}"
            loc = f"$.prompts.{own}" if own else "$.default_prompt_name"
            return Fault(loc, f"{differs}; a request can set another prompt by params.options.{field}, or {_ACCEPT}")
    return None


def _pooling_fault(folder: Path, entry: ModelEntry) -> Fault | None:
    stored = stored_pooling(folder)
    if not entry.run.pooling or not stored or entry.run.pooling == stored:
        return None
    differs = f"run.pooling is {entry.run.pooling}, the model's 1_Pooling says {stored}"
    beside = "a profile (profiles.NAME.run.pooling) can use another pooling"
    return Fault("$.run.pooling", f"{differs}; {beside}, or {_ACCEPT}")


def _truncation_fault(folder: Path, entry: ModelEntry) -> Fault | None:
    if entry.family not in families.rows() or families.row(entry.family).implementation != TEXT_ENCODER:
        return None
    if entry.run.truncate is not None or entry.pair or not truncates_start(transformer_folder(folder)):
        return None
    differs = (
        "the model's tokenizer removes the beginning of a long text (truncation_side left), the entry does not say it"
    )
    return Fault("$.run.truncate", f"{differs}: set run.truncate to START, or to END to remove the end")


def truncates_start(folder: Path) -> bool:
    """Return whether the tokenizer in the folder of a transformer removes the beginning of a text that is too long. The
    settings of sentence-transformers go before tokenizer_config.json, and that before the direction in tokenizer.json.
    """
    settings = next((raw for name in TRANSFORMER_FILES if (raw := read_json(folder / name))), {})
    options = {**(settings.get("tokenizer_args") or {}), **(settings.get("processor_kwargs") or {})}
    side = options.get("truncation_side") or read_json(folder / "tokenizer_config.json").get("truncation_side")
    if side is None and (file := folder / "tokenizer.json").is_file():
        with reading(file):
            stored = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).truncation
        side = stored.direction if stored else ""
    return str(side).lower() == "left"


def _length_fault(folder: Path, entry: ModelEntry) -> Fault | None:
    if entry.family not in families.rows() or families.row(entry.family).implementation != TEXT_ENCODER:
        return None  # other families cut texts to the model's length themselves
    limit = positions(read_json(transformer_folder(folder) / "config.json"))
    if not limit or entry.max_tokens <= limit:
        return None
    return Fault("$.max_tokens", f"max_tokens is {entry.max_tokens}, the model has {limit} positions")


def positions(config: Mapping[str, Any]) -> int:
    """Return the largest number of tokens, special tokens included, that a transformer with this config.json can read;
    0 if the file does not say it.
    """
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:  # XLNet has -1: no limit
        return 0
    is_rotary = config.get("position_embedding_type") == "rotary"  # such an ESM model numbers positions from 0
    if config.get("model_type") not in _NUMBERED_FROM_PAD or is_rotary:
        return limit
    pad = config.get("pad_token_id")
    return limit - 1 - (pad if isinstance(pad, int) else 1)


def transformer_folder(folder: Path) -> Path:
    modules = read_value(folder / "modules.json")
    return folder / modules[0]["path"] if modules else folder


def stored_pooling(folder: Path) -> str:
    """Return the pooling in a model's files, by the name that entries use; empty if there is no Pooling module."""
    for module in read_value(folder / "modules.json") or []:
        if module["type"].rpartition(".")[2] == "Pooling":
            return pooling_name(read_json(folder / module["path"] / "config.json"))
    return ""


def pooling_name(config: Mapping[str, Any]) -> str:
    """Return the pooling in config.json of a Pooling module, `mean` by default. Several poolings are joined by `+`."""
    modes = config.get("pooling_mode") or [mode for key, mode in POOLING_NAMES.items() if config.get(key)] or ["mean"]
    return "+".join(ENTRY_NAMES.get(mode, mode) for mode in ([modes] if isinstance(modes, str) else modes))
