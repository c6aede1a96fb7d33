"""Error texts that say how to correct a field of a document. The permitted values and the similar names in a text come
from the type of the document.

error of msgspec, type of the document ──► path of the field, "missing", "expected one of …", "did you mean …"
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from typing import Any

from msgspec import ValidationError, inspect

from sie_contracts.errors import InvalidInput
from sie_contracts.names import located

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MAX_NAMES = 30  # maximum number of existing fields that the error text for an unknown field lists
_MAX_NAME = 64  # maximum number of characters of an unknown field's name in an error text


def invalid_input(kind: type, error: ValidationError) -> InvalidInput:
    """Return the error for a request body that msgspec cannot convert to the type `kind`. `param` of the error is the
    path of the field, or `body` for a fault of the whole body.
    """
    path, text = _field_fault(kind, error)
    return InvalidInput.at(path or "body", text)


def fault_line(kind: type, error: ValidationError) -> str:
    """Return "path: fault" for a document that msgspec cannot convert to `kind`; "fault" for a fault without a path."""
    return ": ".join(filter(None, _field_fault(kind, error)))


def _field_fault(kind: type, error: ValidationError) -> tuple[str, str]:
    loc, text = described(kind, *located(str(error)))
    return loc.removeprefix("$").removeprefix("."), text


def described(kind: type, loc: str, message: str) -> tuple[str, str]:
    """Return the path and the text of an error for a fault in a document of the type `kind`. `loc` and `message`: path
    and text of msgspec's error.

    For an unknown or missing field, the returned path ends with the name of this field. The text for an unknown field
    suggests a field of the type. For a value outside a list of permitted values, the text is this list.
    """
    node = _node(_type_of(kind), loc.removeprefix("$"))
    names = _names(node)
    if unknown := _UNKNOWN.fullmatch(message):
        return f"{loc}.{unknown[1][:_MAX_NAME]}", f"unknown field; {_instead(kind, unknown[1], names)}"
    if missing := _MISSING.fullmatch(message):
        return f"{loc}.{missing[1]}", "missing"
    choices = [str(value) for part in _parts(node) if isinstance(part, inspect.LiteralType) for value in part.values]
    if choices and message.startswith("Invalid enum value"):
        return loc, f"expected one of {', '.join(choices)}"
    return loc, message


def _instead(kind: type, name: str, names: list[str]) -> str:
    """Suggest a field in place of the unknown field `name`: a similar field in `names` or elsewhere in the document. If
    there is none, list the first _MAX_NAMES of `names`.
    """
    if like := difflib.get_close_matches(name[:_MAX_NAME], names, 1, 0.6):
        return f"did you mean `{like[0]}`?"
    lasts = {path.rpartition(".")[2] for path in _places(kind)}
    if like := difflib.get_close_matches(name[:_MAX_NAME], lasts, 1, 0.75):
        elsewhere = [path for path in _places(kind) if path.rpartition(".")[2] == like[0]]
        return f"did you mean `{'` or `'.join(elsewhere[:3])}`?"
    return f"expected some of {', '.join(names[:_MAX_NAMES])}"


@functools.cache
def _type_of(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


@functools.cache
def _places(kind: type) -> tuple[str, ...]:
    """Return the paths of the fields of a document, at most four levels deep and without fields inside lists. NAME is
    a placeholder for any key of a map.
    """
    return tuple(_walk(_type_of(kind), "", 4))


def _walk(node: inspect.Type, path: str, depth: int) -> Iterator[str]:
    for part in _parts(node) if depth else ():
        if isinstance(part, inspect.StructType):
            for field in part.fields:
                here = f"{path}.{field.encode_name}" if path else field.encode_name
                yield here
                yield from _walk(field.type, here, depth - 1)
        elif isinstance(part, inspect.DictType):
            yield from _walk(part.value_type, f"{path}.NAME", depth - 1)


def _parts(node: Any) -> tuple[Any, ...]:
    if isinstance(node, inspect.Metadata):  # Metadata wraps the type of a field with a description
        return _parts(node.type)
    return node.types if isinstance(node, inspect.UnionType) else () if node is None else (node,)


def _names(node: inspect.Type | None) -> list[str]:
    return [field.encode_name for part in _parts(node) if isinstance(part, inspect.StructType) for field in part.fields]


def _node(node: Any, path: str) -> inspect.Type | None:
    """Return the type of the field at a path; None if there is no such field. A key of a map may contain dots and
    brackets, so a dot or bracket is not always the end of the key. The search tries the end of the key at each of them.
    """
    if not path:
        current: inspect.Type | None = node
        return current
    for part in _parts(node):
        if isinstance(part, inspect.StructType):
            for field in part.fields:
                rest = path.removeprefix(f".{field.encode_name}")
                if rest != path and rest[:1] in ("", ".", "["):
                    return _node(field.type, rest)
        elif isinstance(part, inspect.DictType) and path[0] in ".[":
            if path.startswith("[...]"):
                return _node(part.value_type, path[5:])
            ends = [at for at in range(1, len(path) + 1) if at == len(path) or path[at] in ".["]
            return next((current for at in ends if (current := _node(part.value_type, path[at:])) is not None), None)
        elif isinstance(part, inspect.CollectionType | inspect.VarTupleType) and (index := re.match(r"\[\d+\]", path)):
            return _node(part.item_type, path[index.end() :])
    return None
