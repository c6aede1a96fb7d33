"""The inputs of a work item become the rows that its model reads, as `ipc.Rows` describes. Pure: called in the tokenising threads.

    inputs, query, options ──► pieces of text ──► contents (ids without special tokens), cut to their room ──► rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie_contracts.ipc import Rows, Side
from sie_contracts.messages import Input, RunOptions, Truncate
from sie_sidecar.tokens import Ids, ModelTokenizer, PairTemplate, Tokens, cut

QUERY_SHARE = 0.75  # of a pair's room that its query may take at most, so that something of the document is read
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Row:
    """Ids of one row, int32 [length], special tokens included. `full` is its length before truncation.

    `types`: uint8 [length] where a pair has them. `offsets`: int32 [length, 2], code points, for `spans`. `expanded`: its length on the
    device, if that is more.
    """

    ids: Ids
    full: int
    types: NDArray[np.uint8] | None = None
    offsets: Ids | None = None
    expanded: int = 0

    @property
    def truncated(self) -> bool:
        return self.full > len(self.ids)

    @property
    def cost(self) -> int:
        """Tokens on the device."""
        return max(len(self.ids), self.expanded)


class Work(NamedTuple):
    """What the rows of one work item are made from."""

    inputs: Sequence[Input]
    query: Input | None
    options: RunOptions


@dataclass(frozen=True)
class Made:
    """The rows of one work item: `shared` ones first, then those of each input in turn."""

    rows: list[Row]
    shared: int = 0


def make(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work]) -> list[Made]:
    """The rows of work items of one model that agree in `truncate` and `max_tokens`; their texts are tokenised together."""
    options = items[0].options
    limit = min(options.max_tokens, tokenizer.max_tokens) if options.max_tokens else tokenizer.max_tokens
    return _LAYOUTS[layout.layout](tokenizer, layout, items, options.truncate, limit)


def _prompted(given: Input, options: RunOptions) -> str:
    return options.prefix + (given.text or "") + options.suffix


def texts_of(item: Work) -> list[str]:
    """What a model that reads texts is given, a text for each row."""
    query = [item.query.text or ""] if item.query else []
    return [*query, *(_prompted(given, item.options) for given in item.inputs)]


def types_of(rows: Sequence[Row]) -> bytes:
    """Token types of rows side by side, uint8; empty if no row has any."""
    if all(row.types is None for row in rows):
        return b""
    return np.concatenate([np.zeros(len(row.ids), np.uint8) if row.types is None else row.types for row in rows]).tobytes()


def offsets_of(rows: Sequence[Row]) -> bytes:
    """Places of the tokens of rows side by side, int32; empty if the rows have none."""
    found = [row.offsets for row in rows if row.offsets is not None]
    return np.concatenate(found).tobytes() if found else b""


def _text(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    sides = [layout.query if item.options.is_query else layout.document for item in items for _ in item.inputs]
    texts = [_prompted(given, item.options) for item in items for given in item.inputs]
    rows = iter(_sided(tokenizer, texts, sides, truncate, limit))
    return [Made([next(rows) for _ in item.inputs]) for item in items]


def _sides(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    texts: list[str] = []
    sides: list[Side] = []
    for item in items:
        options, query = item.options, item.query.text if item.query else None
        texts += [options.query_prefix + (query or "") + options.query_suffix, *(_prompted(given, options) for given in item.inputs)]
        sides += [layout.query, *(layout.document for _ in item.inputs)]
    rows = iter(_sided(tokenizer, texts, sides, truncate, limit))
    return [Made([next(rows) for _ in range(1 + len(item.inputs))], shared=1) for item in items]


def _sided(tokenizer: ModelTokenizer, texts: list[str], sides: list[Side], truncate: Truncate, limit: int) -> list[Row]:
    """One row per text, with what its side adds; texts of one side are tokenised together."""
    rows: dict[int, Row] = {}
    for side in dict.fromkeys(sides):
        chosen = [index for index, other in enumerate(sides) if other == side]
        first, last = (tokenizer.first, tokenizer.last) if side.special else (_NONE, _NONE)
        if side.marker >= 0:
            first = np.concatenate([first[:1], np.array([side.marker], np.int32), first[1:]])
        most = min(limit, side.limit) if side.limit else limit
        special = len(first) + len(last)
        contents = tokenizer.contents([texts[index] for index in chosen], max(0, most - special), truncate)
        for index, content in zip(chosen, contents, strict=True):
            ids = np.concatenate((first, content.ids, last))
            rows[index] = Row(ids, content.full + special, expanded=side.expanded)
    return [rows[index] for index in range(len(texts))]


def _pair(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    queries = tokenizer.contents([item.query.text or "" if item.query else "" for item in items], int(room * QUERY_SHARE), truncate)
    documents = iter(tokenizer.contents([given.text or "" for item in items for given in item.inputs], room, truncate))
    made = []
    for item, query in zip(items, queries, strict=True):
        made.append(Made([_joined(template, query, next(documents), room, truncate, cut_first=False) for _ in item.inputs]))
    return made


def _hypotheses(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    texts = iter(tokenizer.contents([given.text or "" for item in items for given in item.inputs], room, truncate))
    made = []
    for item in items:
        pattern = str(item.options.parameters.get("hypothesis_template", "This text is about {}."))
        before, _, after = pattern.partition("{}")
        said = tokenizer.contents([before + label + after for label in item.options.labels], int(room * QUERY_SHARE), "END")
        rows = []
        for _ in item.inputs:
            text = next(texts)
            rows += [_joined(template, text, hypothesis, room, truncate, cut_first=True) for hypothesis in said]
        made.append(Made(rows))
    return made


def _joined(template: PairTemplate, left: Tokens, right: Tokens, room: int, truncate: Truncate, *, cut_first: bool) -> Row:
    """A pair as the tokenizer's own template has it; the one that may be cut gets the room that the other leaves."""
    left_ids, right_ids = left.ids, right.ids
    if cut_first:
        left_ids = cut(left_ids, room - len(right_ids), truncate)
    else:
        right_ids = cut(right_ids, room - len(left_ids), truncate)
    parts = (template.first, left_ids, template.middle, right_ids, template.last)
    ids = np.concatenate(parts)
    types = np.repeat(np.array(template.types, np.uint8), [len(part) for part in parts]) if any(template.types) else None
    return Row(ids, left.full + right.full + template.special, types)


def _pieces(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    """Each piece by itself, then joined; the piece with the document gets what the others leave and loses its end."""
    made = []
    for item in items:
        whole = (item.query.text or "") if item.query else ""
        query = _shortened(tokenizer, whole, int(limit * QUERY_SHARE))
        ends = [_filled(piece, query, "") for piece in item.options.pieces]
        place = next(index for index, piece in enumerate(item.options.pieces) if "document" in piece[1::2])
        fixed = tokenizer.contents([text for index, text in enumerate(ends) if index != place], limit, "END")
        before = np.concatenate([_NONE, *(content.ids for content in fixed[:place])])
        after = np.concatenate([_NONE, *(content.ids for content in fixed[place:])])
        room = max(0, limit - len(before) - len(after))
        filled = [_filled(item.options.pieces[place], query, given.text or "") for given in item.inputs]
        cut: Truncate = "NONE" if truncate == "NONE" else "END"
        contents = tokenizer.contents(filled, room, cut)
        fixed_tokens = len(before) + len(after) + (query != whole)
        made.append(Made([Row(np.concatenate((before, content.ids, after)), content.full + fixed_tokens) for content in contents]))
    return made


def _shortened(tokenizer: ModelTokenizer, text: str, room: int) -> str:
    """The text itself, or as much of it as `room` tokens hold."""
    if 4 * len(text) <= room:  # a character has at most four bytes, and a token at least one
        return text
    return tokenizer.prefix_of(text, room)


def _filled(piece: tuple[str, ...], query: str, document: str) -> str:
    fields = {"query": query, "document": document}
    return "".join(fields[part] if index % 2 else part for index, part in enumerate(piece))


def _spans(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    room = max(0, limit - len(tokenizer.first) - len(tokenizer.last))
    texts = [given.text or "" for item in items for given in item.inputs]
    rows = iter(tokenizer.spans(texts, room, truncate))
    ends = np.zeros((1, 2), np.int32)
    special = len(tokenizer.first) + len(tokenizer.last)
    made = []
    for item in items:
        found = []
        for _ in item.inputs:
            content, offsets = next(rows)
            ids = np.concatenate((tokenizer.first, content.ids, tokenizer.last))
            padded = np.concatenate((np.repeat(ends, len(tokenizer.first), 0), offsets, np.repeat(ends, len(tokenizer.last), 0)))
            found.append(Row(ids, content.full + special, offsets=padded))
        made.append(Made(found))
    return made


def _raw(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    """The model reads the texts; the ids are only counted, so nothing is cut here."""
    made = []
    for item in items:
        contents = tokenizer.contents(texts_of(item), 1 << 30, "NONE")
        made.append(Made([Row(content.ids, len(content.ids)) for content in contents], shared=int(item.query is not None)))
    return made


_LAYOUTS = {
    "text": _text, "sides": _sides, "pair": _pair, "hypotheses": _hypotheses, "pieces": _pieces, "spans": _spans, "raw": _raw,
}  # fmt: skip
