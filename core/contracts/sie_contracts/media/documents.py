"""Files of documents on their way to a model that parses them, and what they cost. Pure: nothing here opens a file.

item ──gateway──► Document ──sidecar: size, cost──► batch ──adapter: format by content──► a process that parses it
"""

from __future__ import annotations

import msgspec

from sie_contracts.media.media import fault

MAX_BYTES = 64 << 20  # of one file: two fit into a frame to an adapter
MIN_TOKENS = 256
BYTES_PER_TOKEN = 64  # a megabyte takes about as long as a full batch of texts


class DocumentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file as the client sent it. `format`: what the client says that it is, read where its content does not say
    it.
    """

    data: bytes
    format: str = ""


class DocumentLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of a document for a model."""

    max_bytes: int = MAX_BYTES


def cost(size: int) -> int:
    """Compute the cost of a file of `size` bytes, in tokens. Its number of pages is known once it is parsed."""
    return max(MIN_TOKENS, size // BYTES_PER_TOKEN)


def check(limits: DocumentLimits, size: int) -> None:
    """Raises the fault of a file of so many bytes."""
    if size > limits.max_bytes:
        raise fault("too_large", f"the document has {size} bytes, at most {limits.max_bytes} are read")
