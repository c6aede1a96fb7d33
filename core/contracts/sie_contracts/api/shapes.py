"""Types that several bodies and replies of the API share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, UnsetType

Text = str | UnsetType
Flag = bool | UnsetType
TextFlag = bool | Literal["true", "false"] | UnsetType  # clients of Xinference send texts
Whole = int | UnsetType
Number = float | UnsetType
Map = dict[str, Any] | UnsetType
Texts = list[str] | UnsetType

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
ManyTexts = Annotated[list[str], Meta(min_length=1)]
Timing = Annotated[
    dict[str, float],
    Meta(description="Milliseconds by stage of a request: all stages in `_time` keys, fewer stages in `_ms` keys."),
]

TIMES = {"queue_time": 0.6, "preprocess_time": 0.2, "inference_time": 4.1, "total_time": 5.3}
USED = {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []}
# fields that are the same in the example replies of several routes (for the OpenAPI document)
SHARED: dict[str, Any] = {"timing": TIMES, "usage": USED, "fingerprint": "b1946ac9"}
MINI = "sentence-transformers/all-MiniLM-L6-v2"


def one_of(*types: Any) -> Meta:
    """Return the schema of an `Annotated[Any, ...]` field that accepts values of these types. A union type is not
    possible, because msgspec allows only one list and one struct in a union.
    """
    schemas, components = msgspec.json.schema_components(types)
    return Meta(extra_json_schema={"anyOf": [_inlined(schema, components) for schema in schemas]})


def needs_one_of(*names: str) -> Meta:
    """Return the schema for `Annotated[STRUCT, ...]` that requires at least one of the fields `names`. A field with an
    empty list does not count.
    """
    schemas = [{"required": [name], "properties": {name: {"minItems": 1}}} for name in names]
    return Meta(extra_json_schema={"anyOf": schemas})


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(subschema, components) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    return {name: _inlined(subschema, components) for name, subschema in schema.items()}


class Usage(msgspec.Struct, kw_only=True):
    """Number of tokens that the model read, positions of the truncated inputs, and number of images (absent if there
    are none). `cached_items`: number of inputs with cached answers. `cached_tokens`: number of their tokens, which the
    other numbers of tokens include. Both are absent if there are no cached answers.
    """

    input_tokens: Whole = msgspec.UNSET
    prompt_tokens: Whole = msgspec.UNSET
    total_tokens: Whole = msgspec.UNSET
    completion_tokens: Annotated[Whole, Meta(description="Always 0; on routes of other APIs.")] = msgspec.UNSET
    truncated_items: list[int] | UnsetType = msgspec.UNSET
    images: int | UnsetType = msgspec.UNSET
    cached_items: int | UnsetType = msgspec.UNSET
    cached_tokens: int | UnsetType = msgspec.UNSET


class Reply(msgspec.Struct, kw_only=True):
    """Fields that each inference reply may have in addition to its result."""

    model: Text = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    timing: Timing | msgspec.UnsetType = msgspec.UNSET
    fingerprint: Text = msgspec.UNSET
    warnings: Texts = msgspec.UNSET
    explain: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
