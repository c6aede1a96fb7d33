"""Comparisons of the results of extraction models."""

from __future__ import annotations

from typing import Any

import pytest

from sie_contracts.errors import SIEError

Entities = list[dict[str, Any]]


def assert_equal(ours: Entities, theirs: Entities) -> None:
    assert [{**entity, "score": 0} for entity in ours] == [{**entity, "score": 0} for entity in theirs]
    assert [entity["score"] for entity in ours] == pytest.approx([entity["score"] for entity in theirs], abs=1e-5)


def failed(result: Any, kind: type[SIEError]) -> SIEError:
    assert isinstance(result, kind)
    return result
