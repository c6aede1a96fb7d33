"""Conversion of a reranker's chat template to the option `pair` of a catalogue entry: a text before, a text with the
fields {query} and {document}, and a text after. An empty text is left out.

    chat template, rendered with {query} and {document} ──► cut at added tokens ──► text before, middle, text after

A tokenizer first splits a text at its added tokens, so separately tokenised pieces have the ids of the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sie_contracts.models.load_errors import incompatible

_FIELDS = ("{query}", "{document}")
_ROLES = ("query", "document")


def pair_pieces(tokenizer: Any, options: Mapping[str, Any], *, instructed: bool) -> tuple[str, ...]:
    """Return the texts of the option `pair`. If `instructed`, these texts contain {instruction} where the template has
    the system message.

    `tokenizer`: a transformers tokenizer. `options`: arguments of apply_chat_template. Raises ModelLoadFailed
    INCOMPATIBLE for a template that fails, or that leaves out, repeats or changes one of the fields.
    """
    rendered = next(
        (text for structured in (False, True) if (text := _rendered(tokenizer, options, instructed, structured))), ""
    )
    if not rendered:
        raise incompatible(
            "its chat template fails, or it leaves out, repeats or changes the query, the document or the instruction; "
            "write an entry with `pair`, which has the texts around a query and a document",
        )
    fields = (*_FIELDS, "{instruction}") if instructed else _FIELDS
    start, end = min(map(rendered.index, fields)), max(map(rendered.index, fields))
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    first = max(
        (rendered.rindex(token, 0, start) + len(token) for token in added if token in rendered[:start]), default=0
    )
    last = min((rendered.index(token, end) for token in added if token in rendered[end:]), default=len(rendered))
    return tuple(piece for piece in (rendered[:first], rendered[first:last], rendered[last:]) if piece)


def _rendered(tokenizer: Any, options: Mapping[str, Any], instructed: bool, structured: bool) -> str:
    """Return the text of a pair. Return an empty string if the template fails, or if an inserted text is missing,
    repeated or changed in the result.
    """
    sides = {role: f" {field} " for role, field in zip(_ROLES, _FIELDS, strict=True)}
    try:
        spaced = _render(tokenizer, sides, options, instructed, structured)
        text = _render(tokenizer, {role: side.strip() for role, side in sides.items()}, options, instructed, structured)
    except Exception:  # noqa: BLE001  a template may raise any error; the caller then tries the other content format
        return ""
    # a template for plain strings renders structured content as a Python dict, which contains 'type'
    shown = all(text.count(field) == 1 and f" {field} " in spaced for field in _FIELDS) and "'type'" not in text
    return text if shown and text.count("{instruction}") == (1 if instructed else 0) else ""


def _render(
    tokenizer: Any, sides: Mapping[str, str], options: Mapping[str, Any], instructed: bool, structured: bool
) -> str:
    contents = {**({"system": "{instruction}"} if instructed else {}), **sides}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
        for role, text in contents.items()
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
