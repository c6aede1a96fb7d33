"""Document files for a model that parses documents, and the cost of a file. No function of this module opens a file.

item ──gateway──► DocumentFile ──sidecar: check size, set cost──► batch ──adapter: detect format──► process: parse file
"""

from __future__ import annotations

import msgspec

from sie_contracts.media.media import fault

MAX_BYTES = 64 << 20  # maximum size of one file, in bytes: half of `ipc.MAX_REQUEST_BYTES` for a message to an adapter
MIN_TOKENS = 256  # lowest cost of a file, in tokens
# number of bytes that cost as much as one token: a file of one megabyte takes about as long as a full batch of texts
BYTES_PER_TOKEN = 64


class DocumentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file as the client sent it. `format`: the format that the client named, used if `data` does not show one."""

    data: bytes
    format: str = ""


class DocumentLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    max_bytes: int = MAX_BYTES


def cost(size: int) -> int:
    """Return the cost of a file in tokens, by its bytes: the number of pages is unknown before the file is parsed."""
    return max(MIN_TOKENS, size // BYTES_PER_TOKEN)


def check(limits: DocumentLimits, size: int) -> None:
    """Raise InvalidInput if a file of `size` bytes is larger than the limit."""
    if size > limits.max_bytes:
        raise fault("too_large", f"the document has {size} bytes, at most {limits.max_bytes} are read")
