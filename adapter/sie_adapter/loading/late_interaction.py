"""Settings of a late-interaction model from its files: markers, lengths, query expansion, skipped words.

    artifact.metadata (Stanford) < config_sentence_transformers.json (PyLate) < modules (sentence-transformers) <
    catalogue entry (a source replaces the settings of the sources on its left)

Source: sentence_transformers.MultiVectorEncoder (6.2), including the defaults of that class for the two older formats.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sie_adapter.loading.modules import Modules
from sie_adapter.packed.packing import Items, expanded
from sie_contracts.models.entries import HeadOptions
from sie_contracts.models.load_errors import incompatible
from sie_store.folder_files import read_json

_EXPANDED = 32  # number of tokens to which queries are padded if the model's files do not set it
_PUNCTUATION = tuple(string.punctuation)
_PYLATE = (  # settings of PyLate in config_sentence_transformers.json
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)


@dataclass(frozen=True)
class LateInteraction:
    """Settings of late interaction. Markers are tokens; an empty marker means none. Lengths are the largest number of
    tokens of a query or document, special tokens included; 0 means the model's own limit.

    `expanded`: the number of tokens to which queries are padded, with the token `filler` (empty: the mask token); 0
    means no padding. `attends`: whether the query's tokens attend to the padding. In documents, tokens in `skipped` get
    no vector.
    """

    query_marker: str
    document_marker: str
    query_length: int
    document_length: int
    expanded: int
    filler: str
    attends: bool
    skipped: tuple[str, ...]


class Filling(NamedTuple):
    """Query expansion: queries are padded to `length` tokens with the id `filler`. `attended`: whether the query's
    tokens attend to the padding.
    """

    length: int
    filler: int
    attended: bool

    def expand(self, batch: Items, queries: np.ndarray) -> Items:
        if not queries.any():
            return batch
        return expanded(batch, np.where(queries, self.length, 0), self.filler, attended=self.attended)


def late_interaction(modules: Modules, head: HeadOptions, *, is_stanford: bool) -> LateInteraction:
    """Return the settings of a model. `is_stanford`: the files have Stanford's format, with the projection among the
    transformer's weights. Raises ModelLoadFailed INCOMPATIBLE for a scoring mask that this adapter does not compute.
    """
    settings = {
        **(_stanford(modules.root) if is_stanford else {}),
        **_pylate(read_json(modules.root / "config_sentence_transformers.json")),
        **_native(modules.transformer.raw, modules.settings.get("MultiVectorMask")),
    }
    names = ("query_marker", "document_marker", "query_length", "document_length")
    settings |= {name: getattr(head, name) for name in names if getattr(head, name) is not None}
    if head.skip_punctuation is not None:
        settings["skipped"] = _PUNCTUATION if head.skip_punctuation else ()
    expansion = _expansion(settings, head)
    limit = settings.get("query_length") or 0
    if expansion and expansion.get("strategy", "fixed") == "fixed":
        limit = expansion["length"]
    elif expansion and limit:
        limit = max(limit, expansion["length"])
    attends = expansion.get("attend", False) if head.attend_expansion is None else head.attend_expansion
    return LateInteraction(
        query_marker=settings.get("query_marker") or "",
        document_marker=settings.get("document_marker") or "",
        query_length=limit,
        document_length=settings.get("document_length") or 0,
        expanded=expansion.get("length", 0),
        filler=expansion.get("token") or "",
        attends=bool(attends),
        skipped=tuple(settings.get("skipped", ())),
    )


def _expansion(settings: dict[str, Any], head: HeadOptions) -> dict[str, Any]:
    """Return the fields of sentence-transformers' QueryExpansionConfig: length, and optionally strategy, attend, token.
    Return an empty map without query expansion.
    """
    expansion = dict(settings.get("expansion") or {})
    if head.query_expansion is False:
        return {}
    if head.query_expansion and not expansion:
        expansion["length"] = settings.get("query_length") or _EXPANDED
    if expansion and head.query_length:
        expansion["length"] = head.query_length
    return expansion


def _stanford(folder: Path) -> dict[str, Any]:
    metadata = read_json(folder / "artifact.metadata")
    return {
        "query_marker": metadata.get("query_token_id") or "[unused0]",
        "document_marker": metadata.get("doc_token_id") or "[unused1]",
        "document_length": metadata.get("doc_maxlen"),
        "expansion": {
            "length": metadata.get("query_maxlen") or _EXPANDED,
            "attend": bool(metadata.get("attend_to_mask_tokens")),
        },
        "skipped": _PUNCTUATION if metadata.get("mask_punctuation", True) else (),
    }


def _pylate(config: dict[str, Any]) -> dict[str, Any]:
    if not any(name in config for name in _PYLATE):
        return {}
    settings = {name: config[name] for name in ("query_length", "document_length") if config.get(name)}
    for side in ("query", "document"):
        if f"{side}_prefix" in config:
            settings[f"{side}_marker"] = config[f"{side}_prefix"]
    if "query_expansion" in config:
        settings["expansion"] = config["query_expansion"]
    elif config.get("do_query_expansion") is False:
        settings["expansion"] = None
    else:
        attends = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
        settings["expansion"] = {"length": config.get("query_length") or _EXPANDED, "attend": bool(attends)}
    if config.get("skiplist_words") is not None:
        settings["skipped"] = tuple(config["skiplist_words"])
    elif config.get("model_type") == "ColBERT":
        settings["skipped"] = _PUNCTUATION
    return settings


def _native(transformer: Mapping[str, Any], mask: dict[str, Any] | None) -> dict[str, Any]:
    settings = {name: transformer[name] for name in ("query_length", "document_length") if transformer.get(name)}
    if "query_expansion" in transformer:
        settings["expansion"] = transformer["query_expansion"]
    if mask is not None:
        is_of_documents = mask.get("skiplist_tasks", "document") in ("document", ["document"])
        if mask.get("keep_only_token_ids") or not is_of_documents:
            raise incompatible(
                "the MultiVectorMask masks more than the skiplist words of documents, which this adapter does not do"
            )
        settings["skipped"] = tuple(mask.get("skiplist_words") or ())
    return settings
