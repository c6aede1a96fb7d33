"""The routes of docs/api.md, made from the OpenAPI document of a gateway.

python tests/api_page.py
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inprocess import InProcess

Schema = Mapping[str, Any]
PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WORDS = {"object": "map", "integer": "whole number"}


async def document() -> dict[str, Any]:
    """Return the answer of a gateway to GET /openapi.json."""
    with tempfile.TemporaryDirectory() as folder:
        async with InProcess(Path(folder)) as cluster:
            gateway = await cluster.gateway()
            openapi: dict[str, Any] = (await gateway.client.get("/openapi.json")).json()
            return openapi


def inlined(document: Schema) -> dict[str, Any]:
    """Return the paths of a document, with each reference replaced by its schema."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(element) for element in value]
        if not isinstance(value, dict):
            return value
        rest = {name: of(member) for name, member in value.items() if name != "$ref"}
        if "$ref" not in value:
            return rest
        return {**of(document["components"]["schemas"][value["$ref"].rpartition("/")[2]]), **rest}

    paths: dict[str, Any] = of(document["paths"])
    return paths


def kind(schema: Schema) -> str:
    """Return a short description of a schema."""
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(kind(option) for option in either))
    if schema.get("type") == "array":
        return f"[{kind(schema.get('items', {}))}]"
    if properties := schema.get("properties"):
        return "{" + ", ".join(properties) + "}"
    types = schema.get("type", "any")
    return " or ".join(WORDS.get(name, name) for name in ([types] if isinstance(types, str) else types))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _parameter(parameter: Schema) -> str:
    cells = _cell(kind(parameter.get("schema", {}))), _cell(parameter.get("description", ""))
    return f"| `{parameter['name']}` | {' | '.join(cells)} |"


def _fields(title: str, schema: Schema) -> Iterator[str]:
    """Yield a table of the fields of a map, and of the maps directly below it."""
    required = schema.get("required", ())
    yield f"| {title} | | |"
    yield "|---|---|---|"
    for name, field in schema.get("properties", {}).items():
        yield (
            f"| `{name}`{' (required)' if name in required else ''} | {_cell(kind(field))} | "
            f"{_cell(field.get('description', ''))} |"
        )
        if field.get("type") == "object":
            for inner, deeper in field.get("properties", {}).items():
                yield f"| `{name}.{inner}` | {_cell(kind(deeper))} | {_cell(deeper.get('description', ''))} |"
    yield ""


def _body(operation: Schema) -> Schema | None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return None if content is None else content["schema"]


def _answer(operation: Schema) -> tuple[Schema, list[str]]:
    """Return the schema of a success in JSON, and the media types of the answer."""
    response: Schema = next(
        (operation["responses"][status] for status in ("200", "201") if status in operation["responses"]), {}
    )
    content = response.get("content", {})
    return content.get("application/json", {}).get("schema", {}), list(content)


def _operation(paths: list[str], method: str, operation: Schema) -> Iterator[str]:
    yield f"### {method.upper()} {paths[0]}"
    yield ""
    yield f"{operation['summary']}." + (f" Also {', '.join(f'`{path}`' for path in paths[1:])}." if paths[1:] else "")
    yield ""
    queries = [parameter for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    if queries:
        yield "| query | | |"
        yield "|---|---|---|"
        yield from map(_parameter, queries)
        yield ""
    body = _body(operation)
    if body is not None:
        yield from _fields("body", body) if "properties" in body else iter((f"Body: {kind(body)}.", ""))
    answer, types = _answer(operation)
    if "properties" in answer:
        yield from _fields("answer", answer)
    elif answer.get("type") == "array":
        yield from (f"Answer: {kind(answer)}.", "")
    if media_types := [name for name in types if name != "application/json"]:
        yield from (f"Answers {'also ' if answer else ''}in {', '.join(f'`{name}`' for name in media_types)}.", "")


def _headers(paths: Schema) -> Iterator[str]:
    """Yield the headers that every inference route reads, each once."""
    operation = paths["/v1/encode/{model}"]["post"]
    yield "| header | | |"
    yield "|---|---|---|"
    for parameter in operation["parameters"]:
        if parameter["in"] == "header":
            yield _parameter(parameter)
    yield ""


def routes(schema: Schema) -> str:
    """Return all operations by tag. Operations that differ only in their path are listed together."""
    served = inlined(schema)
    summaries = {path: operation["summary"] for path, methods in served.items() for operation in methods.values()}
    tags: dict[str, dict[tuple[str, str], tuple[list[str], Schema]]] = {}
    for path, methods in served.items():
        for method, operation in methods.items():
            summary = summaries.get(operation["summary"].removeprefix("As "), operation["summary"])
            alike, _ = tags.setdefault(operation["tags"][0], {}).setdefault((method, summary), ([], operation))
            alike.append(path)
    lines = [*_headers(served)]
    for tag, operations in tags.items():
        lines += [f"## {tag}", ""]
        for (method, _), (paths, operation) in operations.items():
            lines += _operation(paths, method, operation)
    return "\n".join(lines).rstrip()


def page(old: str, schema: Schema) -> str:
    """Return the page with the routes of the document `schema`."""
    return re.sub(r"(?<=<!-- routes -->\n\n).*(?=\n\n<!-- /routes -->)", lambda _: routes(schema), old, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), asyncio.run(document())), "utf-8")
