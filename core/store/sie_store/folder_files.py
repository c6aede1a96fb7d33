"""Reads the files in a model folder, which may be untrusted. All exceptions of libraries become a one-line error that
names the file. A configuration is refused if its structure, or a number in it, is impossible for a real model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sie_contracts import yaml_text
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.load_errors import load_failed

MAX_TEXT = 300  # largest number of characters of a library's message that an error quotes
# largest number of layers, experts or blocks; a higher number is refused, because a load would create all of them
MAX_COUNT = 1_000
MAX_SIZE = 1 << 24  # largest number of rows or columns of a weight matrix; a higher number is refused
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
MAX_FRONT_MATTER = 1 << 20  # the front matter of a model card is read only within this number of characters
_COUNTS, _SIZES = ("_layers", "_layer", "_experts", "_blocks"), ("_size", "_dim", "_embeddings", "_heads", "_labels")

TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]


class Config(msgspec.Struct):
    """Fields that SIE itself reads in `config.json` of a model, or of a sentence-transformers module such as
    `1_Pooling`. transformers reads all other fields.
    """

    architectures: list[str] | None = None
    model_type: str | None = None
    auto_map: dict[str, Any] | None = None
    id2label: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    encoder_config: dict[str, Any] | None = None
    pooling_mode: str | list[str] | None = None


class Module(msgspec.Struct):
    type: str
    path: str


class Sentences(msgspec.Struct):
    """Fields of `sentence_bert_config.json`, and of the files that replace it for other model types."""

    max_seq_length: Annotated[int, Meta(ge=1)] | None = None


class Prompts(msgspec.Struct):
    """Fields of `config_sentence_transformers.json`."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    truncate_dim: Size | None = None
    max_active_dims: Size | None = None


class TokenizerConfig(msgspec.Struct):
    """Fields of `tokenizer_config.json`. transformers writes `model_max_length` 10^30 if a tokenizer has no limit."""

    model_max_length: Annotated[float, Meta(ge=1)] | None = None


_FORMS: dict[str, Any] = {
    "config.json": Config,
    "modules.json": list[Module],
    **dict.fromkeys(TRANSFORMER_FILES, Sentences),
    "config_sentence_transformers.json": Prompts,
    "tokenizer_config.json": TokenizerConfig,
}


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Context manager that converts every Exception except ModelLoadFailed to ModelLoadFailed INCOMPATIBLE, because
    libraries may raise any type for an untrusted file. The message names `file`, or the file that an OSError names.
    """
    try:
        yield
    except ModelLoadFailed:
        raise
    except OSError as error:
        raise load_failed(
            "INCOMPATIBLE", f"{error.filename or file} cannot be read: {error.strerror or line_of(error)}"
        ) from error
    except Exception as error:
        message = f"{type(error).__name__}: {line_of(error)}"
        raise load_failed("INCOMPATIBLE", f"{file} does not describe a valid model: {message}") from error


def line_of(error: Exception) -> str:
    """Return the message of an error as one line of at most MAX_TEXT characters."""
    return " ".join(str(error).split())[:MAX_TEXT]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist. Raises ModelLoadFailed INCOMPATIBLE."""
    value = read_value(file)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise load_failed("INCOMPATIBLE", f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def read_value(file: Path) -> Any:
    """Return the JSON value in a file, checked against the type in _FORMS for the name of the file. Return None if the
    file does not exist. Raises ModelLoadFailed INCOMPATIBLE.
    """
    try:
        if not file.is_symlink() and not file.exists():
            return None
        value = json.loads(file.read_text("utf-8"))
        if value is None:
            raise ValueError("expected a JSON object, got null")
        msgspec.convert(value, _FORMS.get(file.name, Any))
        _check_sizes(value)
    except OSError as error:
        raise load_failed("INCOMPATIBLE", f"{file} cannot be read: {error.strerror or line_of(error)}") from error
    except RecursionError as error:
        raise load_failed("INCOMPATIBLE", f"{file} is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise load_failed("INCOMPATIBLE", f"{file} is not JSON: it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise load_failed("INCOMPATIBLE", f"{file} is not JSON: {line_of(error)}") from error
    except ValueError as error:
        raise load_failed("INCOMPATIBLE", f"{file}: {line_of(error)}") from error
    return value


def _check_sizes(value: Any, path: str = "$") -> None:
    """Raise ValueError for a number of layers or a table size that no real model has. Such a number would use up the
    memory, because a load creates the model before it compares the sizes with the weights.
    """
    if not isinstance(value, dict):
        return
    for name, entry in value.items():
        most = MAX_COUNT if name.endswith(_COUNTS) else MAX_SIZE if name.endswith(_SIZES) else None
        if most is not None and isinstance(entry, int | float) and not 0 <= entry <= most:
            raise ValueError(f"{path}.{name}: expected 0 to {most}, got {entry!r}"[:MAX_TEXT])
        _check_sizes(entry, f"{path}.{name}")


def stated_licence(folder: Path) -> str:
    """Return the licence from the front matter of the model card; empty if the card has none."""
    card = folder / "README.md"
    if not card.is_file():
        return ""
    with card.open(encoding="utf-8", errors="replace") as text:
        matter = _FRONT_MATTER.match(text.read(MAX_FRONT_MATTER))
    if matter is None:
        return ""
    try:
        front = yaml_text.load(matter[1])
    except yaml_text.NotYAML:
        return ""
    named = front.get("license_name") or front.get("license") if isinstance(front, dict) else None
    return str(named) if named else ""
