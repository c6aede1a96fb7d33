"""Rows of plain texts, by the code of the sidecar."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input, RunOptions, Truncate
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import ModelTokenizer, TokenRow, WorkItemInput


def text_rows(
    tokenizer: ModelTokenizer, texts: Sequence[str], truncate: Truncate = "END", limit: int = 0
) -> list[TokenRow]:
    """Return one row for each text, with its special tokens, truncated to `limit` tokens (0: the model's limit)."""
    options = RunOptions(max_tokens=limit, truncate=truncate)
    (work_rows,) = layouts.make(tokenizer, Rows(), [WorkItemInput([Input(text) for text in texts], None, options)])
    assert work_rows.error is None
    return work_rows.rows


def panicking() -> Tokenizer:
    """Return a tokenizer whose Rust code panics for a text outside of ASCII."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "▁": 1, **{letter: 2 + at for at, letter in enumerate(letters)}}, []))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_tokens(["\n"])
    return tokenizer
