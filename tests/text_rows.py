"""Rows of plain texts, made as the sidecar makes them."""

from __future__ import annotations

from collections.abc import Sequence

from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input, RunOptions, Truncate
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import TokenRow, WorkItemInput
from sie_sidecar.prepare.tokens import ModelTokenizer


def text_rows(
    tokenizer: ModelTokenizer, texts: Sequence[str], truncate: Truncate = "END", limit: int = 0
) -> list[TokenRow]:
    """Return one row for each text, with its special tokens, truncated to `limit` tokens (0: the model's limit)."""
    options = RunOptions(max_tokens=limit, truncate=truncate)
    (made,) = layouts.make(tokenizer, Rows(), [WorkItemInput([Input(text) for text in texts], None, options)])
    assert made.error is None
    return made.rows
