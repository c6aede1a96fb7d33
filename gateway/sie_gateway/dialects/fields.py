"""Readers of the fields in bodies of other APIs. Each reader returns a value with its type, or raises InvalidInput with
the name of the field. Null means the same as a missing field. Fields that the API does not define are ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sie_contracts.errors import FAMILIES, InvalidInput
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.option_values import bad, one_of
from sie_contracts.plain import whole_number
from sie_contracts.wire.messages import Priority
from sie_gateway.inference import body as bodies
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, ErrorShape
from sie_gateway.inference.results import RequestResult

FIRST_BULK = 500  # lowest value of Cohere's `priority` that means `bulk`; 0 is the most urgent, 999 the least urgent
_FLAGS = {"true": True, "false": False}
_SIDES = {"query": True, "document": False, "passage": False}
Body = Mapping[str, Any]


def flag(body: Body, name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str):  # clients of Xinference send texts
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise bad(name, value, "true, false or null")
    return value


def whole(body: Body, name: str, low: int, high: int | None = None) -> int | None:
    """Return the whole number from `low` to `high` in a field; None if the field is missing. Raises InvalidInput."""
    value = body.get(name)
    if value is None:
        return None
    number = whole_number(value)
    if type(number) is not int or number < low or (high is not None and number > high):
        raise bad(
            name, value, f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        )
    return number


def text(body: Body, name: str) -> str:
    """Return the text in the required field `name`. Raises InvalidInput."""
    return string(body.get(name), name)


def string(value: Any, path: str) -> str:
    """Return the text at `path` of a body. Raises InvalidInput."""
    if not isinstance(value, str):
        raise bad(path, value, "a string")
    return bodies.utf8(value, path)


def choice(body: Body, name: str, choices: Sequence[str], default: str) -> str:
    return one_of(name, body.get(name), choices=choices, default=default)


def inputs(value: Any, name: str, limit: int) -> list[Any]:
    """Return `value`, a list of 1 to `limit` elements. Raises InvalidInput (schema, empty_items, too_many_items)."""
    if value == []:
        raise InvalidInput.at(name, "expected at least one input", reason="empty_items")
    if not isinstance(value, list):
        raise bad(name, value, "a list")
    if len(value) > limit:
        message = f"got {len(value)} inputs, at most {limit} are allowed"
        raise InvalidInput.at(name, message, reason="too_many_items", extras={"limit": limit})
    return value


def items(value: Any, name: str, limit: int) -> tuple[RequestItem, ...]:
    """Return the inputs of a request from a list of texts. Raises InvalidInput."""
    values = inputs(value, name, limit)
    return tuple(RequestItem(string(entry, f"{name}[{index}]")) for index, entry in enumerate(values))


def truncation(body: Body) -> dict[str, Any]:
    """Return SIE's parameter `truncate` for Voyage's field `truncation`. Return no parameter if the body also has
    `truncate`, which takes precedence. Raises InvalidInput.
    """
    if body.get("truncation") is None:
        return {}
    cuts = flag(body, "truncation")
    return {} if body.get("truncate") is not None else {"truncate": "END" if cuts else "NONE"}


def error_shape(body: Body) -> ErrorShape | None:
    """Return Voyage's format of errors for a body with `truncation`, because Voyage's client always sends this field;
    None for other bodies.
    """
    value = body.get("truncation")
    is_flag = isinstance(value, bool) or (isinstance(value, str) and value.lower() in _FLAGS)
    return FAMILIES["voyage"] if is_flag else None


def priority(body: Body) -> Priority:
    """Return the priority from Cohere's field `priority`, a number from 0 to 999."""
    value = whole(body, "priority", 0, 999)
    return "interactive" if value is None or value < FIRST_BULK else "bulk"


def side(use: str, entry: ModelEntry) -> dict[str, Any]:
    """Return SIE's parameters for `use`, the client's word for the use of its inputs, for example `search_query`. The
    parameter `is_query` is true for queries and false for documents. For other uses, it is missing. If the model has a
    prompt with exactly the name `use`, the template of this prompt is a further parameter.
    """
    prompt = entry.prompts.get(use)
    is_query = _SIDES.get(use.removeprefix("search_").rpartition(".")[2])
    return {
        **({} if is_query is None else {"is_query": is_query}),
        **({} if prompt is None else {"query_template" if is_query else "doc_template": prompt}),
    }


def shared(call: Call, finished: RequestResult) -> dict[str, Any]:
    """Return the fields of a reply beside its results. The usage has all three counts of OpenAI's chat completions:
    clients of Together and vLLM require each.
    """
    content = finished.shared(explain=call.explains)
    content["usage"]["completion_tokens"] = 0
    return content


@contextlib.contextmanager
def named(**names: str) -> Iterator[None]:
    """Rename the parameter in an InvalidInput of the `with` block. `names`: SIE's name -> the client's name."""
    try:
        yield
    except InvalidInput as error:
        if (name := names.get(error.param)) is None:
            raise
        message = error.message
        if message.startswith(error.param):  # an error about an unsuitable model does not begin with the parameter
            message = name + message.removeprefix(error.param)
        raise InvalidInput(message, reason=error.reason, param=name, extras=error.extras) from error


def parameters(body: Body, *names: str) -> dict[str, Any]:
    """Return the fields `names` of the body that are set and not null, as SIE's parameters of the same names."""
    return {name: body[name] for name in names if body.get(name) is not None}
