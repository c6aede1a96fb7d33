"""Headers of safetensors files. A safetensors file has an unsigned 64-bit little-endian length, a JSON object of that
many bytes with the dtype, shape and offsets of each tensor, then the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from sie_contracts.errors import UNDECODABLE

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # largest header that the safetensors format allows
_POINTER = b"version "  # first bytes of a pointer of Git LFS

Count = Annotated[int, msgspec.Meta(ge=0)]


class StoredTensor(msgspec.Struct):
    """A tensor of a safetensors file. `data_offsets`: positions of its first byte and of the byte after its last byte,
    counted from the end of the header.
    """

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class DamagedFile(Exception):
    """Error for a file that is no complete safetensors file. The message is a sentence that calls the file "it"."""


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, from its header. Raises OSError, and DamagedFile for a wrong
    header or if the file does not end where its last tensor ends.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(_LENGTH_BYTES)
        start = _LENGTH_BYTES + int.from_bytes(prefix, "little")
        if prefix == _POINTER:
            raise DamagedFile("it is a pointer of Git LFS")
        if start > size:
            raise DamagedFile(f"it has {size} bytes, but its header alone needs {start}")
        if start > _LENGTH_BYTES + _MAX_HEADER_BYTES:
            raise DamagedFile(f"its header has {start - _LENGTH_BYTES} bytes, at most {_MAX_HEADER_BYTES} are allowed")
        data = opened.read(start - _LENGTH_BYTES)
    try:
        header = msgspec.json.decode(data, type=dict[str, Any])
        header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, StoredTensor])
    except UNDECODABLE as error:
        raise DamagedFile(f"its header is not that of a safetensors file ({type(error).__name__})") from error
    whole = start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != whole:
        raise DamagedFile(f"it has {size} bytes, but its header describes {whole}")
    return tensors
