"""Parser for model configurations in YAML or JSON. It also validates, merges and compares them.

bytes ──read──► ParsedDocument ──checked──► ModelEntry, Alias or BundleEntry
                                  └ ValidationFailed: the field, what is wrong with it, and for YAML the line
"""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from sie_contracts import plain, yaml_text
from sie_contracts.errors import ValidationFailed, faulty
from sie_contracts.models.aliases import Alias, is_alias
from sie_contracts.models.bundles import BundleEntry, parse_bundle
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import parse_written
from sie_contracts.schema_faults import described

T = TypeVar("T")
MAX_DIFFERENCES = 100
_COMMIT = re.compile(r"[0-9a-f]{40}")
_GOT = re.compile(r", got (a string|a whole number|a number)$")  # end of an error text about a wrong type
MAX_SHOWN = 60  # maximum number of characters of an invalid value in an error text
_ANY_KEY = "[...]"  # msgspec writes this text in the path of a fault in place of a map's key


@dataclass(frozen=True)
class ParsedDocument:
    """Decoded document. `node`: syntax tree of a YAML document, with the line of each field; None for JSON."""

    value: Any
    node: yaml.Node | None = None

    def line(self, loc: str) -> int | None:
        """Return the line of a field, counted from 1; for a missing field, the line where its nearest parent
        begins; None in JSON.
        """
        return None if self.node is None else _line(self.node, loc.removeprefix("$"))


def read(body: bytes, content_type: str) -> ParsedDocument:
    """Decode JSON if `content_type` is JSON, else YAML. Raises ValidationFailed.

    Refuse a YAML document with a repeated key or with an alias: a few lines with aliases can expand to gigabytes.
    """
    if content_type.partition(";")[0].strip().lower().endswith("json"):
        try:
            return ParsedDocument(plain.from_json(body))
        except plain.Malformed as error:
            raise faulty("$", str(error)) from None
    try:
        value, node = yaml_text.load_with_node(body)
    except yaml_text.NotYAML as error:
        raise faulty("$", error.message, error.line) from None
    if node is None:
        raise faulty("$", "expected a document, got nothing")
    return ParsedDocument(value, node)


def checked(raw: Any, document: ParsedDocument) -> ModelEntry | Alias:
    """Parse and return the entry `raw`. `document`: the document from which `raw` was made; only errors use it, to name
    the line of a field. Raises ValidationFailed.
    """
    entry = _parsed(raw, document, parse_written, Alias if is_alias(raw) else ModelEntry)
    revision = entry.weights.revision if isinstance(entry, ModelEntry) and entry.weights.hub else ""
    if revision and not _COMMIT.fullmatch(revision):
        loc = "$.weights.revision"
        fault = f"expected a commit of 40 hex digits, got {revision[:60]!r}: a branch or a tag may move"
        raise faulty(loc, f"{fault}; `sie models add` finds the commit, and the hub shows it", document.line(loc))
    return entry


def checked_bundle(document: ParsedDocument) -> BundleEntry:
    """Parse the bundle in a document. Raises ValidationFailed."""
    return _parsed(document.value, document, parse_bundle, BundleEntry)


def _parsed(raw: Any, document: ParsedDocument, parse: Callable[[Any], T], kind: type) -> T:
    try:
        return parse(raw)
    except ValidationFailed as error:
        (fault,) = error.extras["errors"]
        loc, message = described(kind, narrowed(raw, fault["loc"], parse), fault["message"])
        raise faulty(loc, message + _value_at(raw, loc.removeprefix("$"), message), document.line(loc)) from None


def _value_at(value: Any, path: str, message: str) -> str:
    """Return the text to append to the error text `message`: the value at `path`. Return an empty string if the
    message does not say that the value has a wrong type, or if the value is neither a string nor a number.
    """
    if not _GOT.search(message):
        return ""
    while path:
        index = re.match(r"\[(\d+)\]", path)
        if index and isinstance(value, list) and int(index[1]) < len(value):
            value, path = value[int(index[1])], path[index.end() :]
            continue
        step = next(_steps(value, path), None) if isinstance(value, dict) else None
        if step is None:
            return ""
        value, path = value[step[0]], step[1]
    if isinstance(value, str):
        return f": {value[:MAX_SHOWN]!r}"
    # an integer of more than 64 bits is not shown: it may have too many digits for Python's conversion to text
    is_short = isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)
    return f": {value!r}" if is_short else ""


def narrowed(raw: Any, message: str, parse: Callable[[Any], object]) -> str:
    """Return `message`, the path of a fault, after replacing each `[...]` (any key of a map) by the faulty key. `parse`
    reads keys in order and stops at the first fault. So a bisection finds the smallest n for which a map with only its
    first n keys has the fault: key number n is the faulty one.
    """
    loc = message

    def is_faulty(trial: Any) -> bool:
        try:
            parse(trial)
        except ValidationFailed as error:
            return error.param == message
        return False

    while _ANY_KEY in loc:
        head, _, tail = loc.partition(_ANY_KEY)
        for keys, beginning in _maps(raw, head.removeprefix("$")):
            count = bisect_left(range(len(keys) + 1), True, key=lambda count: is_faulty(beginning(count)))
            if 0 < count <= len(keys):
                loc = f"{head}.{keys[count - 1]}{tail}"
                break
        else:
            break
    return loc


def _maps(value: Any, path: str) -> Iterator[tuple[list[Any], Callable[[int], Any]]]:
    """Yield (keys, function) for each map that `path` may name. There may be several maps, because keys may contain
    dots. `keys`: all keys of the map. The function returns a copy of `value` with only the first n keys of this map.
    """
    if not isinstance(value, dict):
        return
    if not path:
        yield list(value), lambda count: dict(itertools.islice(value.items(), count))
    for key, rest in _steps(value, path):
        for keys, beginning in _maps(value[key], rest):
            yield keys, functools.partial(_within, value, key, beginning)


def _within(value: dict[Any, Any], key: str, beginning: Callable[[int], Any], count: int) -> dict[Any, Any]:
    return {**value, key: beginning(count)}


def _steps(keys: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield each key with which `path` can begin, longest first, and the path after it. Keys may contain dots."""
    for key in sorted((key for key in keys if isinstance(key, str)), key=len, reverse=True):
        rest = path.removeprefix(f".{key}")
        if rest != path and rest[:1] in ("", ".", "["):
            yield key, rest


def _line(node: yaml.Node, path: str) -> int:
    line: int = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        pairs = {key.value: (key, value) for key, value in node.value}
        for name, rest in _steps(pairs, path):
            key, value = pairs[name]
            return _line(value, rest) if rest else int(key.start_mark.line) + 1
    elif (
        isinstance(node, yaml.SequenceNode)
        and (index := re.match(r"\[(\d+)\]", path))
        and int(index[1]) < len(node.value)
    ):
        return _line(node.value[int(index[1])], path[index.end() :])
    return line


def merged(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): null removes a key, maps are merged, other values replace the old ones."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def difference(before: Any, after: Any) -> list[dict[str, Any]]:
    """Return the fields that differ, at most MAX_DIFFERENCES, as maps of `path`, `before` and `after`. `before` or
    `after` is absent if that document lacks the field.
    """
    changes: list[dict[str, Any]] = []
    for change in _differences(before, after, "$"):
        changes.append(change)
        if len(changes) == MAX_DIFFERENCES:
            break
    return changes


def _differences(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            here = f"{path}.{key}"
            if key not in after:
                yield {"path": here, "before": before[key]}
            elif key not in before:
                yield {"path": here, "after": after[key]}
            else:
                yield from _differences(before[key], after[key], here)
    elif before != after:
        yield {"path": path, "before": before, "after": after}
