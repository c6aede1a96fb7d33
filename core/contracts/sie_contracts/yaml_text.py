"""Reader of YAML that people or other programs write, such as entries of models and values on a command line."""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 64
# largest length of a whole number, in characters: more than the 67 of a 64-bit number in binary (with sign and 0b), and
# less than 4,300, above which Python refuses to print a number
MAX_DIGITS = 100
# maximum number of events of the YAML parser for one text; the parser needs a third of a second for this number
MAX_EVENTS = 50_000
# largest length of a text whose events are not counted: its values cannot nest deep enough to overflow the C stack
SMALL_BYTES = 4096
# the C loader, which is ten times as fast as the Python loader, if this build of PyYAML has it
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = "tag:yaml.org,2002:int"


class NotYAML(ValueError):
    """Error for a text that is not accepted as YAML. `line`: the line of the fault, counted from 1, None if unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"{message} (line {line})")
        self.message = message
        self.line = line


def load(data: bytes | str) -> Any:
    """Return the value of a YAML document; None for an empty document. Raises NotYAML."""
    return load_with_node(data)[0]


def load_with_node(data: bytes | str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML document, and its root node, from which the line of each value can be read. For an
    empty document, return (None, None).

    Raises NotYAML, also for nesting deeper than MAX_DEPTH, too many events, a repeated key, a key that is a list or a
    map, an alias (a few lines with aliases can expand to gigabytes), a whole number of more than MAX_DIGITS digits, and
    a value that its type does not have, such as a date in month 13.
    """
    try:
        if len(data) > SMALL_BYTES:
            _check_events(data)
        loader = _LOADER(data)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _check_nodes(node)
            return loader.construct_document(node), node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise NotYAML(f"not YAML: {error.problem}", mark.line + 1 if mark else None) from None
    except NotYAML:
        raise
    except RecursionError:  # from PyYAML without libyaml
        raise _too_deep(None) from None
    # PyYAML does not catch errors of Python's constructors: KeyError for !!bool, AttributeError for !!timestamp
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise NotYAML(f"not YAML: {type(error).__name__}") from None


def _check_events(data: bytes | str) -> None:
    """Raise NotYAML for too many levels, because PyYAML builds the tree by unlimited recursion in C, and for too many
    events, because the parser is slow.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(data, _LOADER)):
        line = event.start_mark.line + 1 if event.start_mark else None
        if number > MAX_EVENTS:
            raise NotYAML(f"holds more than {MAX_EVENTS:,} values, the limit for YAML; JSON may have more", line)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(line)


def _check_nodes(root: yaml.Node) -> None:
    visited: set[int] = set()
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        line = node.start_mark.line + 1
        if id(node) in visited:
            raise NotYAML("a YAML alias: expected the value itself", line)
        visited.add(id(node))
        if isinstance(node, yaml.CollectionNode) and depth == MAX_DEPTH:
            raise _too_deep(line)
        if isinstance(node, yaml.ScalarNode) and node.tag == _INTEGER and len(node.value) > MAX_DIGITS:
            raise NotYAML(f"a whole number of more than {MAX_DIGITS} digits", line)
        if isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value in names:
                    got = f"{key.value[:60]!r} twice" if isinstance(key, yaml.ScalarNode) else "a list or a map"
                    raise NotYAML(f"keys: expected texts, each only once, got {got}", key.start_mark.line + 1)
                names.add(key.value)
                waiting += [(key, depth + 1), (value, depth + 1)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in node.value]


def _too_deep(line: int | None) -> NotYAML:
    return NotYAML(f"nested more than {MAX_DEPTH} deep", line)
