"""Templates from which jobs build the texts of a row, and the check whether a job's input fits its operation.

A template has the names of columns in braces, `{title}: {body}`; `{{` and `}}` are braces. `str.format` is not used,
because it would give a template access to attributes.
"""

from __future__ import annotations

import datetime
import decimal
import math
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sie_contracts.api.jobs import JobInput
from sie_contracts.errors import InvalidInput

TEXTS = ("text", "query", "document")
ANSWER_COLUMNS = frozenset(
    {"id", "error", "tokens", "truncated", "fingerprint", "row_tokens"}
    | {"dense", "dense_scale", "dense_offset", "sparse_indices", "sparse_values"}
    | {"multivector", "multivector_scale", "multivector_offset", "score"}
    | {"entities", "relations", "classifications", "objects", "data"}
)
# columns of the output if texts have chunks; a job must not copy input columns with these names
CHUNK_COLUMNS = frozenset({"chunk", "start", "end", "text"})
DOCUMENT_COLUMNS = frozenset({"page", "heading"})  # further columns of the output if rows have documents
# largest number of times that a template may name a column; without a limit, a short template could produce gigabytes
MAX_REPEATS = 4


class ColumnFault(ValueError):
    """Error for a value of a column that is no text, id or image. The message never contains the value."""


@dataclass(frozen=True)
class Template:
    """Parsed template. `pieces`: (literal text, name of the column whose value follows; None if no value follows)."""

    pieces: tuple[tuple[str, str | None], ...]

    @classmethod
    def parsed(cls, text: str, param: str) -> Template:
        """Parse a template. `param`: parameter that error messages name. Raises InvalidInput."""
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InvalidInput(f"{param}: the braces of the template do not match", param=param) from error
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if not name or spec or conversion or any(char in name for char in ".[]"):
                raise InvalidInput(
                    f"{param}: expected only the names of columns in braces, such as {{title}}", param=param
                )
        named = Counter(name for _, name, _, _ in parts if name is not None)
        for name, times in named.items():
            if times > MAX_REPEATS:
                raise InvalidInput(
                    f"{param}: the template names {name!r} {times} times, expected at most {MAX_REPEATS}", param=param
                )
        return cls(tuple((literal, name) for literal, name, _, _ in parts))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def text(self, row: Mapping[str, Any]) -> str:
        return "".join(literal if name is None else literal + plain(row, name) for literal, name in self.pieces)


def plain(row: Mapping[str, Any], column: str) -> str:
    """Return a column's value as text: a number or a boolean as in JSON, a time in ISO 8601. Raises ColumnFault."""
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise ColumnFault(f"column {column!r} is {'null' if column in row else 'missing'}")
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    kinds: dict[Any, str] = {dict: "a map", list: "a list", bytes: "bytes"}
    kind = kinds.get(type(value), "of another type")
    raise ColumnFault(f"column {column!r} is {kind}, expected text, a number, a boolean or a time")


def templates(source: JobInput) -> dict[str, Template]:
    """Return the non-empty templates of a job's input, parsed, by name. Raises InvalidInput."""
    texts = {"text": source.text, "query": source.query, "document": source.document}
    return {name: Template.parsed(text, f"input.{name}") for name, text in texts.items() if text}


def columns(source: JobInput) -> dict[str, str]:
    """Return the columns that a job reads: column -> first parameter that names the column. Raises InvalidInput."""
    params: dict[str, str] = {}
    for name, template in templates(source).items():
        for column in template.columns:
            params.setdefault(column, f"input.{name}")
    for name in ("image", "documents", "id"):
        if column := str(getattr(source, name)):
            params.setdefault(column, f"input.{name}")
    if isinstance(source.chunks, str):
        params.setdefault(source.chunks, "input.chunks")
    for column in source.keep:
        params.setdefault(column, "input.keep")
    return params


def reads_images(source: JobInput) -> bool:
    """Return whether the input is a set of image files. Each file is one row."""
    columns = (source.text, source.image, source.query, source.documents)
    return source.format == "images" or not (source.format or any(columns))


def check(source: JobInput, operation: str) -> None:
    """Raise InvalidInput for a missing field that the operation needs, and for a field that the operation ignores."""
    if bool(source.file) == bool(source.url):
        raise InvalidInput("input: expected exactly one of file and url", param="input")
    parsed = templates(source)
    reserved = ANSWER_COLUMNS.union(
        CHUNK_COLUMNS if source.chunks is not None else (), DOCUMENT_COLUMNS if source.documents else ()
    )
    for column in source.keep:
        if column in reserved:
            raise InvalidInput(f"input.keep: {column!r} is a column of the output", param="input.keep")
    if len(set(source.keep)) < len(source.keep):
        raise InvalidInput("input.keep: a column is named twice", param="input.keep")
    if operation == "score":
        _refuse(source, ("text", "image"), "score reads a query and a document")
        for name in ("query", "document"):
            if name not in parsed:
                raise InvalidInput(f"input.{name}: score needs a query and a document", param=f"input.{name}")
    else:
        _refuse(source, ("query", "document"), f"{operation} reads a text or an image")
    if reads_images(source):
        _refuse(source, (*TEXTS, "image", "documents", "id", "keep"), "image files have no columns")
        if operation == "score":
            raise InvalidInput("input.format: images cannot be scored", param="input.format")
    elif operation != "score" and "text" not in parsed and not source.image and not source.documents:
        raise InvalidInput(f"input.text: {operation} needs a text or an image", param="input.text")
    if source.chunks is None and not source.context:
        raise InvalidInput("input.context: only chunks have a context", param="input.context")
    if source.documents:
        _refuse(source, ("text", "image"), "with input.documents, the text of a row comes from its document")
        if source.chunks is None:
            raise InvalidInput("input.chunks: documents need chunks", param="input.chunks")
    else:
        _refuse(source, ("parser",), "only documents have a parser")
    has_text = "text" in parsed or bool(source.documents)
    if source.chunks is not None and (operation != "encode" or not has_text or source.image):
        raise InvalidInput("input.chunks: only encode supports chunks, and only of texts", param="input.chunks")
    for name in ("text", "document"):  # a query may name no column, because all rows may have the same query
        if name in parsed and not parsed[name].columns:
            raise InvalidInput(f"input.{name}: the template names no column, such as {{title}}", param=f"input.{name}")


def _refuse(source: JobInput, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(source, name):
            raise InvalidInput(f"input.{name}: {why}", param=f"input.{name}")
