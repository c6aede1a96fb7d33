"""Shapes of the client are those of the HTTP API.

The API declares them as structs in `sie_contracts.api`. The client returns plain dicts and takes keyword arguments, and
type checkers read neither from a struct, so `sie_client.types` declares them as TypedDicts.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Union

import pytest
from msgspec import UnsetType

from sie_client import types as client
from sie_contracts.api import operations, shapes

POSITIONAL = {"name", "gpus"}  # of create_pool and reserve
OF_OTHERS = {"queue_pool", "input_tokens", "completion_tokens"}  # fields that only public clients send or read


def fields(shape: type) -> dict[str, Any]:
    """Return the types of a shape by field, without None and UnsetType."""
    return {name: bare(hint) for name, hint in typing.get_type_hints(shape).items() if name != "EXAMPLE"}


def bare(hint: Any) -> Any:
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member not in (type(None), UnsetType)]
        return Union[tuple(bare(member) for member in members)]  # noqa: UP007  made of a tuple
    return hint


def test_the_options_of_a_reservation_are_the_fields_of_its_request() -> None:
    request_fields = {
        name: hint for name, hint in fields(operations.PoolRequest).items() if name not in POSITIONAL | OF_OTHERS
    }
    assert fields(client.PoolOptions) == request_fields


@pytest.mark.parametrize(("reply", "shape"), [(client.Pool, operations.Pool), (client.Usage, shapes.Usage)])
def test_a_reply_has_the_fields_that_the_api_declares(reply: type, shape: type) -> None:
    declared = {name: hint for name, hint in fields(shape).items() if name not in OF_OTHERS}
    assert fields(reply).keys() == declared.keys()
    for name, hint in fields(reply).items():
        assert hint == declared[name] or hint == dict[str, Any], name
