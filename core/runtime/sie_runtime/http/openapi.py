"""The OpenAPI document of a process, generated from its routes.

routes ──► types of bodies and replies ──msgspec──► components
       └─► parameters, examples, replies, errors ──► paths
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sie_contracts.errors import SIEError, each_error
from sie_runtime.http.routes import ARROW, FORM, JSON, MSGPACK, OPEN, RAW, YAML, Content, Parameter, Route

Schema = dict[str, Any]
_REFERENCE = "#/components/schemas/{name}"
_BINARY: Schema = {"type": "string", "format": "binary"}
_MEDIA: dict[str, Schema] = {MSGPACK: _BINARY, RAW: _BINARY, ARROW: _BINARY, YAML: {}}
_ERROR_HEADERS: Schema = {
    "X-SIE-Error-Code": {"schema": {"type": "string"}},
    "x-should-retry": {"schema": {"type": "string", "enum": ["true", "false"]}},
    "Retry-After": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds to wait before a retry; only sent if the request may be retried",
    },
}
Statuses = Mapping[int, Sequence[str]]
"""HTTP statuses of errors, each with the codes of the errors that have it."""
Errors = Callable[[Route], Statuses]
Shape = Callable[[SIEError, str, None], tuple[int, dict[str, Any]]]
"""Function that returns the HTTP status and the body of an error, for example an ErrorShape of the gateway."""


class Schemas:
    """Builder of JSON schemas for types. It also collects the components to which the schemas refer."""

    def __init__(self, types: Sequence[Any]) -> None:
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        self._schemas = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}

    def schema_of(self, kind: Any) -> Schema:
        """Return the schema of a type. For a tuple of types, the schema accepts any of them."""
        if isinstance(kind, tuple):
            return {"anyOf": [self._schemas[repr(option)] for option in kind]}
        return self._schemas[repr(kind)]


def statuses(*shapes: Shape) -> Statuses:
    """Return the HTTP statuses that errors have in API formats such as OpenAI's, with the error codes of each status.
    `shapes`: one function for each API format.
    """
    codes_of_status: dict[int, dict[str, None]] = {}
    for error in each_error():
        for shape in shapes:
            codes_of_status.setdefault(shape(error, "", None)[0], {})[error.code] = None
    return {status: list(codes) for status, codes in codes_of_status.items()}


def _types(routes: Sequence[Route], placeholders: Mapping[str, Parameter]) -> list[Any]:
    types: dict[str, Any] = {}
    for route in routes:
        contents = [route.body, *route.replies.values()]
        kinds = [content.type for content in contents if content is not None and content.type is not None]
        kinds += [route.errors] if route.errors is not None else []
        kinds += [parameter.type for parameter in (*placeholders.values(), *route.parameters)]
        for kind in kinds:
            types |= {repr(option): option for option in (kind if isinstance(kind, tuple) else (kind,))}
    return list(types.values())


def document(
    routes: Sequence[Route], placeholders: Mapping[str, Parameter], errors: Errors, *, about: Mapping[str, Any]
) -> Schema:
    """Return the OpenAPI document of the served routes. `about`: other top-level members of the document, such as
    `openapi` and `info`. `placeholders`: description of each placeholder in paths.
    """
    served = [route for route in routes if route.served]
    schemas = Schemas(_types(served, placeholders))
    for shape in {route.errors for route in served if route.errors is not None}:
        schemas.components[shape.__name__]["example"] = _example(Content(shape))
    paths: dict[str, Schema] = {}
    for route in served:
        operation = _operation(route, placeholders, schemas, errors)
        paths.setdefault(route.path.replace(":path", ""), {})[route.method.lower()] = operation
    return {
        **about,
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route, placeholders: Mapping[str, Parameter], schemas: Schemas, errors: Errors) -> Schema:
    path = route.path.replace(":path", "")
    responses = {} if route.errors is None else dict(_refusals(errors(route), schemas.schema_of(route.errors)))
    for status, reply in route.replies.items():
        responses[str(status)] = _response(reply, schemas)
    operation: Schema = {
        "summary": route.summary,
        "tags": [route.tag],
        "operationId": re.sub(r"[^a-z0-9]+", "_", f"{route.method} {path}".lower()).strip("_"),
        "parameters": [_parameter(parameter, schemas) for parameter in _parameters(route, path, placeholders)],
        "responses": responses,
    }
    if route.scope == OPEN:
        operation["security"] = [{}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, schemas)}
    return operation


def _parameters(route: Route, path: str, placeholders: Mapping[str, Parameter]) -> Iterator[Parameter]:
    own = {parameter.name: parameter for parameter in route.parameters if parameter.where == "path"}
    yield from (own.get(name) or placeholders[name] for name in re.findall(r"\{(\w+)\}", path))
    yield from (parameter for parameter in route.parameters if parameter.where != "path")


def _parameter(parameter: Parameter, schemas: Schemas) -> Schema:
    schema: Schema = {"name": parameter.name, "in": parameter.where, "schema": schemas.schema_of(parameter.type)}
    if parameter.description:
        schema["description"] = parameter.description
    if parameter.required or parameter.where == "path":
        schema["required"] = True
    if parameter.example is not None:
        schema["example"] = parameter.example
    return schema


def _content(content: Content, schemas: Schemas) -> Schema:
    schemas_by_media: Schema = {}
    for media in content.media:
        is_typed = media in (FORM, JSON)
        schema = schemas.schema_of(content.type) if is_typed else _MEDIA.get(media, {"type": "string"})
        schemas_by_media[media] = {"schema": schema}
        if media == JSON and (example := _example(content)) is not None:
            schemas_by_media[media]["example"] = example
    return schemas_by_media


def _example(content: Content) -> Any:
    if content.example is not None:
        return content.example
    first = content.type[0] if isinstance(content.type, tuple) else content.type
    return getattr(getattr(first, "__origin__", first), "EXAMPLE", None)


def _response(reply: Content, schemas: Schemas) -> Schema:
    response: Schema = {"description": reply.description}
    if reply.media:
        response["content"] = _content(reply, schemas)
    return response


def _refusals(statuses: Statuses, schema: Schema) -> Iterator[tuple[str, Schema]]:
    for status, codes in sorted(statuses.items()):
        yield (
            str(status),
            {"description": ", ".join(codes), "headers": _ERROR_HEADERS, "content": {JSON: {"schema": schema}}},
        )
