"""Cut a text into chunks on the client, in the same way as the server. Needs the packages of the extra `chunker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import msgspec
from numpy.typing import NDArray

from sie_client.errors import invalid
from sie_client.types import Chunking
from sie_contracts.wire.messages import ChunkRule


def spans(text: str, ends: Sequence[int] | NDArray[Any], **rule: Unpack[Chunking]) -> list[tuple[int, int]]:
    """Return the start and the end of each chunk of `text`, in code points. `rule`: the fields of `Chunking`. `ends`:
    the end of each token in code points, ascending: the second number of each pair in `encode(text).offsets` of
    `tokenizers.Tokenizer.from_file("tokenizer.json")`, which reads texts like the server. Raises InvalidInputError
    for an invalid rule, and ModuleNotFoundError without the packages of the extra `chunker`.
    """
    try:
        from sie_contracts import chunker
        from sie_contracts.schema_faults import fault_line
    except ModuleNotFoundError as error:
        message = f"chunks need the package {error.name}: pip install 'sie-cluster[chunker]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    try:
        checked = msgspec.convert(rule, ChunkRule)
        if checked.overlap_tokens > checked.max_tokens // 2 or checked.min_tokens > checked.max_tokens:
            raise msgspec.ValidationError(
                "overlap_tokens must be at most half of max_tokens, and min_tokens at most max_tokens"
            )
    except msgspec.ValidationError as error:
        raise invalid(f"rule: {fault_line(ChunkRule, error)}", reason="schema") from error
    return list(chunker.spans(text, ends, checked))
