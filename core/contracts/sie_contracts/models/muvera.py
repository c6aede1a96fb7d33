"""Parameters of MUVERA, which turns a multivector into one vector (a fixed dimensional encoding), and their check.
Encodings can be compared only if their parameters are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sie_contracts.errors import InvalidInput

MAX_WIDTH = 1 << 20  # maximum number of values of one encoding: 4 MiB of float32
# maximum number of values before the final projection; it limits the memory of the projection: an index for each value
MAX_CELLS = 1 << 23

_WHOLE = {
    "num_repetitions": (1, 128),
    "num_simhash_projections": (0, 10),
    # at most 1,024 values per token and repetition: more would need too much memory for long texts
    "projection_dim": (1, 1024),
    "final_projection_dim": (1, MAX_WIDTH),
    "seed": (0, (1 << 53) - 1),  # largest whole number that every JSON reader represents exactly
}
_NULLABLE = {"projection_dim", "final_projection_dim"}


class Muvera(msgspec.Struct, frozen=True):
    """Parameters of a fixed dimensional encoding. Source: "MUVERA: Multi-Vector Retrieval via Fixed Dimensional
    Encodings", section 2.

    Each of the `num_repetitions` repetitions divides the space of token vectors into 2 ** `num_simhash_projections`
    partitions. If `projection_dim` is None, token vectors keep their width. If `final_projection_dim` is None, the
    encoding has all values, without a final projection.
    """

    num_repetitions: int = 40
    num_simhash_projections: int = 6
    projection_dim: int | None = None
    final_projection_dim: int | None = 10240
    seed: int = 42
    normalize: bool = False
    fill_empty_partitions: bool = False

    @property
    def partitions(self) -> int:
        """Return the number of partitions in one repetition."""
        return 1 << self.num_simhash_projections

    def cells(self, dim: int) -> int:
        """Return the number of values of an encoding before the final projection, for token vectors of width `dim`."""
        return self.num_repetitions * self.partitions * (self.projection_dim or dim)

    def width(self, dim: int, path: str = "muvera") -> int:
        """Return the number of values of an encoding, for token vectors of width `dim`. Raises InvalidInput if it is
        above MAX_WIDTH, or if the encoding has more than MAX_CELLS values before the final projection.
        """
        cells = self.cells(dim)
        if cells > MAX_CELLS:
            raise _bad(path, f"at most {MAX_CELLS} repetitions x partitions x token width", str(cells))
        width = self.final_projection_dim or cells
        if width > MAX_WIDTH:
            raise _bad(path, f"a result of at most {MAX_WIDTH} values (final_projection_dim shortens it)", str(width))
        return width


def parse(raw: Mapping[str, Any] | Literal[True], defaults: Muvera | None, path: str) -> Muvera:
    """Return the parameters `defaults` (`Muvera()` if None), overridden by the keys in `raw`.

    A null value keeps the default; for the two projection sizes, null means no projection. Raises InvalidInput with the
    path of a key that is unknown or has a wrong value. If the encoding would be too wide even for token vectors of
    width 1, the error has the path of `raw`.
    """
    if raw is not True and not isinstance(raw, Mapping):
        raise _bad(path, "true, false, null or a map", _got(raw))
    fields = Muvera.__struct_fields__
    changes: dict[str, int | bool | None] = {}
    for name, value in () if raw is True else raw.items():
        if name not in fields:
            where = f"{path}.{str(name)[:64]}"
            raise InvalidInput.at(where, f"no such key, expected one of {', '.join(fields)}")
        if value is not None:
            changes[name] = (
                _whole(f"{path}.{name}", value, name) if name in _WHOLE else _boolean(f"{path}.{name}", value)
            )
        elif name in _NULLABLE:
            changes[name] = None
    parsed: Muvera = msgspec.structs.replace(defaults or Muvera(), **changes)
    parsed.width(1, path)
    return parsed


def _whole(path: str, value: object, name: str) -> int:
    low, high = _WHOLE[name]
    if isinstance(value, float) and value.is_integer():  # some clients write whole numbers as floats
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise _bad(path, f"a whole number from {low} to {high}{' or null' if name in _NULLABLE else ''}", _got(value))
    return value


def _boolean(path: str, value: object) -> bool:
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise _bad(path, "true or false", _got(value))


def _got(value: object) -> str:
    """Describe a value for an error message. Only numbers and booleans are shown: others may be a client's text."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else repr(value)
    return {"dict": "a map", "list": "a list"}.get(type(value).__name__, type(value).__name__)


def _bad(path: str, expected: str, got: str) -> InvalidInput:
    return InvalidInput.at(path, f"expected {expected}, got {got}")
