"""Schemas of results. `output_schema` or `label_groups` of an extraction is split into parts that the model fills.

    JSON Schema ──► references and null resolved ──► decisions: one choice, some choices, yes or no, a level of a scale
                                                 └─► records: values from the text, objects and lists of objects

A decision needs a model that scores labels. A record needs a model that finds spans of the text. A fault raises
InvalidInput with the path of the faulty part of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import any_value, bad, number
from sie_contracts.wire.messages import RunOptions

PARTS = "parts"  # key in `RunOptions.parameters` for the parts of a schema; requests and entries cannot set this key
# Maximum number of groups in `label_groups`, or of properties in an output schema. The properties of the schema's inner
# objects are counted too; a property that is itself an object is not counted.
MAX_FIELDS = 64
MAX_CHOICES = 1000  # maximum number of choices of a schema, over all properties
MAX_NAME = 100  # maximum number of characters of a property's name, or of a choice
MAX_DESCRIPTION = 1000
MAX_LEVELS = 10  # maximum number of integers of a scale, including its two bounds
MAX_REFERENCES = 8  # maximum length of the chain of references ($ref) that leads to one part
YES_NO = ("yes", "no")  # labels of the values true and false, for a boolean property of an object

Scalar = str | int | float | bool
FieldKind = Literal["string", "number", "integer", "choice"]

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"type"}),
    "number": frozenset({"type"}) | _BOUNDS,
    "integer": frozenset({"type"}) | _BOUNDS,
    "boolean": frozenset({"type"}),
    "choice": frozenset({"type", "enum", "const"}),
    "array": frozenset({"type", "items"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}) | _DEFINITIONS,
}


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, tag="decision"):
    """A choice among labels. `path`: names of the properties that lead to the result. `labels`: texts that the model
    scores. `values`: the value of each label. A boolean has one label: a statement, which is true or false. `is_many`:
    any number of labels may apply. `is_scale`: the labels are the levels of a scale, in ascending order. `question`:
    description of the property.
    """

    path: tuple[str, ...]
    labels: tuple[str, ...]
    values: tuple[Scalar, ...]
    question: str = ""
    is_many: bool = False
    is_scale: bool = False

    @property
    def is_boolean(self) -> bool:
        return len(self.labels) < len(self.values)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the labels in results: `path.choice`, or for a boolean `path.true` and `path.false`."""
        path = ".".join(self.path)
        return tuple(f"{path}.{name}" for name in (("true", "false") if self.is_boolean else self.labels))


class TextField(msgspec.Struct, frozen=True, omit_defaults=True):
    """A property of a `TextRecord`. Its value is a part of the text, or for the kind "choice" one of `values`. `labels`
    and `values` have the same meaning as in `Decision`. A number must be at least `minimum`, above `above`, at most
    `maximum` and below `below`.
    """

    name: str
    kind: FieldKind
    description: str = ""
    is_list: bool = False
    is_nullable: bool = False
    labels: tuple[str, ...] = ()
    values: tuple[Scalar, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None


class TextRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="record"):
    """Properties of one object, or of the top level, whose values the model reads together from the text. `path`: name
    of the property that has the object; empty for the top level. `is_many`: the property is a list of objects.
    """

    path: tuple[str, ...]
    name: str
    fields: tuple[TextField, ...]
    is_many: bool = False
    is_nullable: bool = False


SchemaPart = Decision | TextRecord


def parts_of(parameters: Mapping[str, Any]) -> tuple[SchemaPart, ...]:
    return msgspec.convert(parameters.get(PARTS, ()), tuple[SchemaPart, ...])


def decisions_of(parts: tuple[SchemaPart, ...]) -> list[Decision]:
    return [part for part in parts if isinstance(part, Decision)]


def parts_of_groups(path: str, groups: Any, *, is_many: bool) -> tuple[SchemaPart, ...]:
    if not isinstance(groups, dict) or not groups:
        raise bad(path, groups, "a map of groups, each a list of labels")
    any_value(path, groups)
    _check_count(path, len(groups))
    parts = []
    for name, labels in groups.items():
        place = f"{path}.{_shown(name)}"
        _check_name(place, name)
        parts.append(Decision((name,), *_choices(place, labels), is_many=is_many))
    _check_choices(path, parts)
    return tuple(parts)


def parts_of_schema(
    path: str, schema: Any, model: str, *, finds_spans: bool, reads_scales: bool = False
) -> tuple[SchemaPart, ...]:
    """Return the parts of a JSON Schema. `finds_spans`: the model can take values from the text; if false, a
    property whose value must come from the text raises InvalidInput. `model`: name of the model for error messages.
    `reads_scales`: the model can choose among the integers between two bounds.
    """
    if not isinstance(schema, dict):
        raise bad(path, schema, "a JSON Schema of an object")
    any_value(path, schema)
    parts = _SchemaReader(path, schema, model, finds_spans=finds_spans, reads_scales=reads_scales).parts()
    _check_choices(path, parts)
    return parts


class _SchemaNode(msgspec.Struct):
    """Schema of an object, of a property or of a list's items, with references resolved. `kind`: key of _KEYWORDS."""

    path: str
    schema: dict[str, Any]
    kind: str
    is_nullable: bool

    @property
    def description(self) -> str:
        return str(self.schema.get("description", ""))


class _SchemaReader:
    """Conversion of a JSON Schema to parts. The schema may have properties, and one level of objects below them."""

    def __init__(self, path: str, root: dict[str, Any], model: str, *, finds_spans: bool, reads_scales: bool) -> None:
        self._path, self._root, self._model, self._finds_spans = path, root, model, finds_spans
        self._decided = ("choice", "boolean", "integer") if reads_scales else ("choice", "boolean")
        self._count = 0

    def parts(self) -> tuple[SchemaPart, ...]:
        root = self._node(self._path, self._root)
        if root.kind != "object":
            raise InvalidInput.at(root.path, "expected the schema of an object")
        parts: list[SchemaPart] = []
        fields: list[TextField] = []
        for name, node in self._members(root):
            inner = self._items(node) if node.kind == "array" else node
            if inner.kind == "object":
                parts += self._object(name, node, inner)
            elif inner.kind in self._decided:
                parts.append(self._decision((name,), node, inner))
            else:
                fields.append(self._field(name, node, inner))
        if fields:
            parts.insert(0, TextRecord((), _title(root, "record"), tuple(fields)))
        return tuple(parts)

    def _object(self, name: str, node: _SchemaNode, inner: _SchemaNode) -> Iterator[SchemaPart]:
        is_many = node is not inner
        if is_many and not self._finds_spans:
            raise self._spanless(node, "a list of objects")
        members = []
        for key, member in self._members(inner):
            value = self._items(member) if member.kind == "array" else member
            if value.kind == "object":
                place = f"{inner.path}.properties.{_shown(key)}"
                raise InvalidInput.at(
                    place, "too deep: an object in the schema may have values and lists of values, but no objects"
                )
            members.append((key, member, value))
        if not members:
            raise InvalidInput.at(inner.path, "expected an object with properties")
        if self._finds_spans:
            fields = tuple(self._field(*member) for member in members)
            yield TextRecord((name,), name, fields, is_many=is_many, is_nullable=node.is_nullable)
            return
        for key, member, value in members:
            if value.kind not in self._decided:
                raise self._spanless(value)
            yield self._decision((name, key), member, value)

    def _decision(self, path: tuple[str, ...], node: _SchemaNode, inner: _SchemaNode) -> Decision:
        description = node.description or inner.description
        if inner.kind == "choice":
            labels, values = _choices(f"{inner.path}.enum", _enum(inner.schema))
            return Decision(path, labels, values, description, is_many=node is not inner)
        if node is not inner:
            raise InvalidInput.at(inner.path, f"expected one {inner.kind}, got a list of {inner.kind}s")
        if inner.kind == "integer":
            levels = _levels(inner)
            return Decision(path, tuple(map(str, levels)), tuple(levels), description, is_scale=True)
        return Decision(path, (description or path[-1].replace("_", " "),), (True, False))

    def _field(self, name: str, node: _SchemaNode, inner: _SchemaNode) -> TextField:
        if not self._finds_spans:
            raise self._spanless(inner)
        is_list = node is not inner
        common: dict[str, Any] = {
            "description": node.description or inner.description,
            "is_list": is_list,
            "is_nullable": node.is_nullable,
        }
        if inner.kind == "choice":
            labels, values = _choices(f"{inner.path}.enum", _enum(inner.schema))
            return TextField(name, "choice", labels=labels, values=values, **common)
        if inner.kind == "boolean":
            if is_list:
                raise InvalidInput.at(inner.path, "expected one boolean, got a list of booleans")
            return TextField(name, "choice", labels=YES_NO, values=(True, False), **common)
        limits: dict[str, Any] = {
            field: number(f"{inner.path}.{keyword}", inner.schema[keyword])
            for keyword, field in zip(sorted(_BOUNDS), ("below", "above", "maximum", "minimum"), strict=True)
            if keyword in inner.schema
        }
        kind: FieldKind = inner.kind  # type: ignore[assignment]  # the other kinds are handled above
        return TextField(name, kind, **common, **limits)

    def _members(self, node: _SchemaNode) -> Iterator[tuple[str, _SchemaNode]]:
        properties = node.schema.get("properties", {})
        if not isinstance(properties, dict):
            raise bad(f"{node.path}.properties", properties, "a map of schemas")
        for name, schema in properties.items():
            place = f"{node.path}.properties.{_shown(name)}"
            _check_name(place, name)
            if (member := self._node(place, schema)).kind != "object":
                self._count += 1
            _check_count(f"{self._path}.properties", self._count)
            yield name, member

    def _items(self, node: _SchemaNode) -> _SchemaNode:
        inner = self._node(f"{node.path}.items", node.schema.get("items"))
        if inner.kind == "array":
            raise InvalidInput.at(inner.path, "too deep: a list may contain values or objects, but no lists")
        return inner

    def _node(self, path: str, schema: Any) -> _SchemaNode:
        is_nullable = False
        description = ""
        for _ in range(MAX_REFERENCES + 1):
            if not isinstance(schema, dict):
                raise bad(path, schema, "a JSON Schema")
            description = description or schema.get("description", "")
            if "$ref" in schema:
                _check_keywords(path, schema, frozenset({"$ref"}) | (_DEFINITIONS if schema is self._root else set()))
                path, schema = self._definition(path, schema["$ref"])
            elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
                keyword = "anyOf" if "anyOf" in schema else "oneOf"
                _check_keywords(path, schema, frozenset({keyword}))
                place, schema = _alternative(f"{path}.{keyword}", alternatives)
                path, is_nullable = place, True
            else:
                break
        else:
            raise InvalidInput.at(path, f"expected at most {MAX_REFERENCES} references ($ref) in a chain, got more")
        kind, own_null = _kind(path, schema)
        _check_keywords(path, schema, _KEYWORDS[kind])
        if kind != "object" and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
            raise InvalidInput.at(f"{path}.description", f"expected a string of at most {MAX_DESCRIPTION} characters")
        if not isinstance(schema.get("additionalProperties", False), bool):
            raise InvalidInput.at(f"{path}.additionalProperties", "expected true or false, not a schema")
        return _SchemaNode(path, {**schema, "description": description}, kind, is_nullable or own_null)

    def _definition(self, path: str, reference: Any) -> tuple[str, Any]:
        _, group, name = [*str(reference).split("/"), "", "", ""][:3]
        definitions = self._root.get(group) if group in _DEFINITIONS else None
        if reference != f"#/{group}/{name}" or not isinstance(definitions, dict) or name not in definitions:
            raise InvalidInput.at(f"{path}.$ref", "expected #/$defs/NAME, where NAME is a definition in this schema")
        return f"{self._path}.{group}.{_shown(name)}", definitions[name]

    def _spanless(self, node: _SchemaNode, subject: str = "") -> InvalidInput:
        subject = subject or f"{'an' if node.kind == 'integer' else 'a'} {node.kind}"
        message = (
            f"{self._model} chooses among labels, so it supports enum and boolean, not {subject}. A model "
            "with the output entities takes values from the text"
        )
        return InvalidInput.at(node.path, message, reason="unsupported_output")


def _kind(path: str, schema: dict[str, Any]) -> tuple[str, bool]:
    types = schema.get("type")
    names = [name for name in types if name != "null"] if isinstance(types, list) else [types]
    is_nullable = isinstance(types, list) and len(names) < len(types)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", ())
        return "choice", is_nullable or (isinstance(values, list) and None in values)
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in _KEYWORDS or names[0] == "choice":
        listed = "enum, boolean, string, number, integer, array or object"
        raise InvalidInput.at(f"{path}.type" if "type" in schema else path, f"expected one of {listed}")
    return str(names[0]), is_nullable


def _alternative(path: str, alternatives: Any) -> tuple[str, Any]:
    rest = [
        (index, schema)
        for index, schema in enumerate(alternatives if isinstance(alternatives, list) else ())
        if schema != {"type": "null"}
    ]
    if len(rest) != 1 or len(alternatives) != 2:
        raise InvalidInput.at(path, 'expected one schema and {"type": "null"}: a value has only one type besides null')
    [(index, schema)] = rest
    return f"{path}[{index}]", schema


def _enum(schema: dict[str, Any]) -> Any:
    return [schema["const"]] if "const" in schema else schema["enum"]


def _choices(path: str, values: Any) -> tuple[tuple[str, ...], tuple[Scalar, ...]]:
    if not isinstance(values, list):
        raise bad(path, values, "a list of choices")
    chosen = [value for value in values if value is not None]
    labels = []
    for index, value in enumerate(chosen):
        if not isinstance(value, str | int | float):
            raise bad(f"{path}[{index}]", value, "a string, a number or a boolean")
        label = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if not label.strip() or len(label) > MAX_NAME:
            raise InvalidInput.at(f"{path}[{index}]", f"expected 1 to {MAX_NAME} characters, not only spaces")
        labels.append(label)
    if not labels or len(set(labels)) < len(labels):
        raise InvalidInput.at(path, "expected at least one choice, and no choice twice")
    return tuple(labels), tuple(chosen)


def _levels(node: _SchemaNode) -> range:
    """Return the integers of a scale. Raises InvalidInput if a bound is missing, or if there are too many integers."""
    least, most = node.schema.get("minimum"), node.schema.get("maximum")
    # not `isinstance`, because a boolean is an instance of int too
    if type(least) is not int or type(most) is not int or len(_BOUNDS & set(node.schema)) > 2:
        raise InvalidInput.at(node.path, "expected integers for minimum and maximum, and no other bounds")
    count = most - least + 1  # `len` of a range raises OverflowError above sys.maxsize
    if not 1 <= count <= MAX_LEVELS:
        raise InvalidInput.at(node.path, f"got {count} levels from minimum to maximum, expected 1 to {MAX_LEVELS}")
    return range(least, most + 1)


def _title(node: _SchemaNode, default: str) -> str:
    title = node.schema.get("title")
    return title if isinstance(title, str) and 0 < len(title.strip()) <= MAX_NAME else default


def _check_keywords(path: str, schema: dict[str, Any], allowed: frozenset[str]) -> None:
    for keyword in schema:
        if keyword not in allowed | _ANNOTATIONS:
            place = f"{path}.{_shown(keyword)}"
            fix = "a value is taken from the text as it is, so leave the keyword out and check the value yourself"
            raise InvalidInput.at(place, f"the keyword is not supported, only {', '.join(sorted(allowed))} are: {fix}")


def _check_name(path: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
        raise InvalidInput.at(path, f"expected a name of 1 to {MAX_NAME} characters")


def _check_count(path: str, count: int) -> None:
    if count > MAX_FIELDS:
        raise InvalidInput.at(path, f"expected at most {MAX_FIELDS} entries, got more")


def _check_choices(path: str, parts: tuple[SchemaPart, ...] | list[Decision]) -> None:
    count = sum(
        len(part.labels) if isinstance(part, Decision) else sum(len(field.labels) for field in part.fields)
        for part in parts
    )
    if count > MAX_CHOICES:
        raise InvalidInput.at(path, f"got {count} choices, at most {MAX_CHOICES} are allowed")


def _shown(name: Any) -> str:
    return str(name)[:64]


def questions_of(options: RunOptions) -> list[str]:
    """Return the questions of a request, for a model that reads a text once for each question. All labels together are
    one question; with `multi_label`, each label is a question. A decision of a schema is one question; with `is_many`,
    each of its labels is a question.
    """
    groups = [(options.labels, options.instruction, options.parameters.get("multi_label"))]
    groups += [
        (part.get("labels", ()), f"{options.instruction} {part.get('question', '')}", part.get("is_many"))
        for part in options.parameters.get(PARTS, ())
    ]
    return [
        f"{text} {label}"
        for labels, text, is_many in groups
        if labels
        for label in (labels if is_many else [" ".join(labels)])
    ]
