"""The inputs of a work item become the rows that its model reads, as `ipc.Rows` describes. Pure: called in the
tokenising threads.

inputs, query, options ──► pieces of text ──► contents (ids without special tokens), cut to their room ──► rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import InvalidInput
from sie_contracts.ipc import Group, Layout, Rows, RunBatch, Side
from sie_contracts.messages import Input, Operation, RunOptions, Truncate, Vectors
from sie_contracts.trace_context import NONE, Context
from sie_sidecar import cost
from sie_sidecar.tokens import Ids, ModelTokenizer, PairTemplate, Tokens, cut

QUERY_SHARE = 0.75  # of a pair's room that its query may always take; more only where the document leaves it
HYPOTHESIS = "This text is about {}."
NOWHERE = -1  # the place of a special token
# Of one work item. A client chooses how often its prompts, its query and its labels are repeated, so their product is
# bounded before it is made.
MAX_CHARACTERS = 32 << 20
MAX_ROWS = 1 << 16
MAX_TOKENS = 8 << 20
MAX_VECTOR_BYTES = 64 << 20
ROW_CHARACTERS = 24  # making a row takes as long as reading so many
COST_CHARACTERS = 64  # text that travels beside few tokens counts as a token for so many
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Row:
    """Ids of one row, int32 [length], special tokens included. `full` is its length before truncation.

    `types`: uint8 [length] where a pair has them. `offsets`: int32 [length, 2], code points, for `spans`. `expanded`:
    its length on the device, or the cost of what goes beside its ids, if that is more. `vectors` stand in the place of
    ids.
    """

    ids: Ids
    full: int
    types: NDArray[np.uint8] | None = None
    offsets: Ids | None = None
    expanded: int = 0
    vectors: Vectors | None = None

    @property
    def truncated(self) -> bool:
        return self.full > len(self.ids)

    @property
    def cost(self) -> int:
        """Tokens on the device."""
        return cost.text(len(self.ids), self.expanded)


class Work(NamedTuple):
    """What the rows of one work item are made from."""

    inputs: Sequence[Input]
    query: Input | None
    options: RunOptions


@dataclass(frozen=True)
class Made:
    """The rows of one work item: `shared` ones first, then those of each input in turn; or why none were made.

    `unfit`: why an input must not run, whose rows are there all the same.
    """

    rows: list[Row]
    shared: int = 0
    error: InvalidInput | None = None
    unfit: Mapping[int, InvalidInput] = field(default_factory=dict)


def make(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work]) -> list[Made]:
    """The rows of work items of one model that agree in how texts are cut; their texts are tokenised together."""
    options = items[0].options
    limit = min(options.max_tokens, tokenizer.max_tokens) if options.max_tokens else tokenizer.max_tokens
    checked = [_checked(tokenizer, layout, item) for item in items]
    fitting = [item for item, error, _ in checked if error is None]
    made = iter(_LAYOUTS[layout.layout](tokenizer, layout, fitting, options.truncate, limit))
    found = []
    for _, error, unfit in checked:
        if error is not None:
            found.append(Made([], error=error))
        elif unfit:
            each = next(made)
            found.append(Made(each.rows, each.shared, each.error, unfit))
        else:
            found.append(next(made))
    return found


def _checked(
    tokenizer: ModelTokenizer, layout: Rows, item: Work
) -> tuple[Work, InvalidInput | None, dict[int, InvalidInput]]:
    """A work item as rows can be made of it, or why not of it, or of which of its inputs: in the place of these stands
    an empty text.
    """
    error = _excess(layout, item)
    unfit: dict[int, InvalidInput] = {}
    if error is not None or (all(map(_is_text, item.inputs)) and (item.query is None or _is_text(item.query))):
        return item, error, unfit
    if item.query is not None:
        error = _unfit(tokenizer, layout, item.query, item.options)
    for index, given in enumerate(item.inputs):
        if (why := _unfit(tokenizer, layout, given, item.options)) is not None:
            unfit[index] = why
    if unfit:
        item = item._replace(inputs=[Input("") if index in unfit else given for index, given in enumerate(item.inputs)])
    return item, error, unfit


def _is_text(given: Input) -> bool:
    return given.tokens is None and given.pair is None and given.vectors is None


def _unfit(tokenizer: ModelTokenizer, layout: Rows, given: Input, options: RunOptions) -> InvalidInput | None:
    """Why an input does not suit the model or what is asked of it."""
    if _is_text(given):
        return None
    if given.vectors is not None:
        return _unfit_vectors(layout, given.vectors, options)
    if given.pair is not None and not (layout.pairs and given.text is not None):
        return _unsupported(
            "pair", "takes no pairs of texts" if given.text is not None else "takes pairs of texts alone"
        )
    if given.tokens is None:
        return None
    if not layout.tokens:
        return _unsupported("tokens", "takes no token ids")
    return bad_token(tokenizer, given.tokens)


def _unsupported(what: str, why: str) -> InvalidInput:
    return InvalidInput(f"{what}: the model {why} here", reason="unsupported_modality", param=what)


def bad_token(tokenizer: ModelTokenizer, tokens: Sequence[int]) -> InvalidInput | None:
    """Why these are no ids of the tokenizer, if they are none."""
    place = tokenizer.first_unknown(tokens)
    if place is None:
        return None
    expected = f"expected an id from 0 to {tokenizer.vocabulary - 1}"
    return InvalidInput(
        f"tokens[{place}]: {expected}, got {tokens[place]}", reason="bad_token_id", param=f"tokens[{place}]"
    )


def _unfit_vectors(layout: Rows, vectors: Vectors, options: RunOptions) -> InvalidInput | None:
    if not layout.vectors:
        return _unsupported("multivector", "takes none")
    if layout.layout == "sides" and options.outputs != ("multivector",):
        return _unsupported(
            "multivector", f"scores by {' and '.join(options.outputs)}, and takes one with score_mode colbert alone,"
        )
    if layout.layout != "sides" and (options.muvera is None or "sparse" in options.outputs):
        return _unsupported("multivector", "takes one for muvera alone")
    if vectors.width != layout.vectors:
        message = f"multivector: expected vectors {layout.vectors} wide, got {vectors.width}"
        return InvalidInput(message, reason="bad_dimensions", param="multivector")
    if not vectors.fits:
        message = f"multivector: {len(vectors.data)} bytes are not {vectors.rows} float32 vectors {vectors.width} wide"
        return InvalidInput(message, reason="schema", param="multivector")
    return None


def _excess(layout: Rows, item: Work) -> InvalidInput | None:
    """Why no rows are made of a work item that memory could not hold, or that has none to make."""
    rows, characters = _row_count(layout, item), _characters(layout, item)
    if not rows and item.inputs:
        return InvalidInput("labels: the model needs the labels to look for", reason="labels_required", param="labels")
    if rows > MAX_ROWS:
        return _too_many(
            f"{len(item.inputs)} items with {len(item.options.labels)} labels each are {rows} pairs", MAX_ROWS
        )
    if characters > MAX_CHARACTERS:
        return _too_many(f"the items have {characters} characters with their prompts", MAX_CHARACTERS)
    if layout.vectors:
        given = item.inputs if item.query is None else [item.query, *item.inputs]
        size = sum(len(each.vectors.data) for each in given if each.vectors is not None)
        if size > MAX_VECTOR_BYTES:
            return _too_many(f"the items have {size} bytes of vectors", MAX_VECTOR_BYTES)
    return None


def _too_many(what: str, limit: int) -> InvalidInput:
    return InvalidInput(f"{what}, at most {limit} are run together", reason="too_many_tokens", extras={"limit": limit})


def _row_count(layout: Rows, item: Work) -> int:
    return len(item.inputs) * (len(item.options.labels) if layout.layout == "hypotheses" else 1)


def _characters(layout: Rows, item: Work) -> int:
    """Of all texts that are made of a work item: what is repeated counts each time."""
    options, query = item.options, len(_query(item))
    around = len(options.prefix) + len(options.suffix)
    once = query + len(options.query_prefix) + len(options.query_suffix)
    if layout.layout == "hypotheses":
        template = len(str(options.parameters.get("hypothesis_template", HYPOTHESIS)))
        once += sum(map(len, options.labels)) + template * len(options.labels)
    for piece in options.pieces:
        length = sum(map(len, piece[::2])) + query * piece[1::2].count("query")
        if _is_cut(piece):
            around += length
        else:
            once += length
    if layout.pairs:
        once += sum(len(given.pair or "") for given in item.inputs)
    # an id takes about as long as a character
    return once + sum(len(given.text or given.tokens or "") + around for given in item.inputs)


def effort_of(layout: Rows, item: Work) -> int:
    """What making the rows of a work item takes, as characters to read."""
    return _characters(layout, item) + ROW_CHARACTERS * _row_count(layout, item)


def _prompted(given: Input, options: RunOptions) -> str:
    return options.prefix + (given.text or "") + options.suffix


def texts_of(item: Work) -> list[str]:
    """What a model that reads texts is given, a text for each row."""
    query = [item.query.text or ""] if item.query else []
    return [*query, *(_prompted(given, item.options) for given in item.inputs)]


def reached(texts: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Each text as far as the tokens of its row reach, which is where its end was cut."""
    return [
        text if row.offsets is None or not row.truncated else text[: int(row.offsets.max(initial=0))]
        for text, row in zip(texts, rows, strict=True)
    ]


def types_of(rows: Sequence[Row]) -> bytes:
    """Token types of rows side by side, uint8; empty if no row has any."""
    if all(row.types is None for row in rows):
        return b""
    return np.concatenate(
        [np.zeros(len(row.ids), np.uint8) if row.types is None else row.types for row in rows]
    ).tobytes()


def offsets_of(rows: Sequence[Row]) -> bytes:
    """Places of the tokens of rows side by side, int32; empty if the rows have none."""
    found = [row.offsets for row in rows if row.offsets is not None]
    return np.concatenate(found).tobytes() if found else b""


class Part(NamedTuple):
    """The rows of one work item that run, and the work they were made from: its inputs are those that run. `context`:
    of its trace.
    """

    rows: Sequence[Row]
    work: Work
    context: Context = NONE


def to_batch(
    name: str,
    model: str,
    operation: Operation,
    layout: Layout,
    parts: Sequence[Part],
    *,
    pooling: str = "",
    lora: str = "",
    context: Context = NONE,
    fingerprint: str = "",
) -> RunBatch:
    """The frame of a batch of work items that share a forward pass, for the loaded copy of that fingerprint."""
    rows: list[Row] = []
    groups: list[Group] = []
    texts: list[str] = []
    for part in parts:
        options = _answered(part.work.options)
        groups.append(Group(len(rows), len(rows) + len(part.rows), options, len(part.work.inputs), *part.context))
        if layout in ("raw", "spans"):
            texts += reached(texts_of(part.work), part.rows)
        rows += part.rows
    lengths = np.array([len(row.ids) for row in rows], dtype=np.int32)
    ids = b"" if layout == "raw" else np.concatenate([row.ids for row in rows]).tobytes()
    given = [row.vectors for row in rows if row.vectors is not None]
    counts = (
        np.array([-1 if row.vectors is None else row.vectors.rows for row in rows], np.int32).tobytes()
        if given
        else b""
    )
    return RunBatch(
        name,
        model,
        operation,
        lengths.tobytes(),
        ids,
        tuple(groups),
        types_of(rows),
        tuple(texts),
        offsets_of(rows),
        pooling,
        lora,
        context.traceparent,
        counts,
        b"".join(vectors.data for vectors in given),
        fingerprint,
        context.tracestate,
    )


def _answered(options: RunOptions) -> RunOptions:
    """What the adapter needs of the options: the prompts are in the ids already."""
    if not (options.prefix or options.suffix or options.pieces or options.query_prefix or options.query_suffix):
        return options
    return msgspec.structs.replace(options, prefix="", suffix="", pieces=(), query_prefix="", query_suffix="")


def _text(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    sides = [layout.query if item.options.is_query else layout.document for item in items for _ in item.inputs]
    paired = [given for item in items for given in item.inputs if given.pair is not None] if layout.pairs else []
    pairs = _pairs(tokenizer, paired, truncate, limit)
    contents: list[_Content] = []
    for item in items:
        contents += _contents(tokenizer, item, pairs)
    rows = iter(_sided(tokenizer, contents, sides, truncate, limit))
    return [Made([next(rows) for _ in item.inputs]) for item in items]


# A text to tokenise, ids without special tokens to cut, or a row that is made.
_Content = str | Ids | Row


def _contents(tokenizer: ModelTokenizer, item: Work, pairs: Iterator[Row]) -> list[_Content]:
    """What each input is made from, its prompt around it."""
    found: list[_Content] = []
    prompt: tuple[Ids, Ids] | None = None
    for given in item.inputs:
        if given.vectors is not None:
            found.append(_given(given.vectors))
        elif given.tokens is not None:
            prompt = prompt or tokenizer.around(item.options.prefix, item.options.suffix)
            found.append(np.concatenate((prompt[0], tokenizer.content(given.tokens), prompt[1])))
        elif given.pair is not None:
            found.append(next(pairs))
        else:
            found.append(_prompted(given, item.options))
    return found


def _given(vectors: Vectors) -> Row:
    return Row(_NONE, 0, expanded=cost.vectors(len(vectors.data)), vectors=vectors)


def _pairs(tokenizer: ModelTokenizer, inputs: Sequence[Input], truncate: Truncate, limit: int) -> Iterator[Row]:
    """The row of each pair; its second text is cut."""
    if not inputs:
        return iter(())
    template = tokenizer.pair
    room = max(0, limit - template.special)
    lefts = tokenizer.contents([given.text or "" for given in inputs], room, truncate)
    rights = tokenizer.contents([given.pair or "" for given in inputs], room, truncate)
    return (
        _joined(template, left, right, room, truncate, cut_first=False)
        for left, right in zip(lefts, rights, strict=True)
    )


def _sides(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int
) -> list[Made]:
    contents: list[_Content] = []
    sides: list[Side] = []
    for item in items:
        options, query = item.options, item.query.vectors if item.query else None
        contents.append(options.query_prefix + _query(item) + options.query_suffix if query is None else _given(query))
        contents += _contents(tokenizer, item, iter(()))
        sides += [layout.query, *(_document_side(tokenizer, layout.document, options) for _ in item.inputs)]
    rows = iter(_sided(tokenizer, contents, sides, truncate, limit))
    return [Made([next(rows) for _ in range(1 + len(item.inputs))], shared=1) for item in items]


def _document_side(tokenizer: ModelTokenizer, side: Side, options: RunOptions) -> Side:
    """The side of documents of which no more than `document_tokens` are read."""
    if not options.document_tokens:
        return side
    most = (
        options.document_tokens
        + (len(tokenizer.first) + len(tokenizer.last) if side.special else 0)
        + (side.marker >= 0)
    )
    return msgspec.structs.replace(side, limit=min(most, side.limit or most))


def _sided(
    tokenizer: ModelTokenizer, contents: Sequence[_Content], sides: list[Side], truncate: Truncate, limit: int
) -> list[Row]:
    """One row per content, with what its side adds; texts of one side are tokenised together."""
    rows: dict[int, Row] = {}
    for side in dict.fromkeys(sides):
        chosen = [index for index, other in enumerate(sides) if other == side]
        first, last = (tokenizer.first, tokenizer.last) if side.special else (_NONE, _NONE)
        if side.marker >= 0:
            first = np.concatenate([first[:1], np.array([side.marker], np.int32), first[1:]])
        most = min(limit, side.limit) if side.limit else limit
        special = len(first) + len(last)
        room = max(0, most - special)
        texts = [content for index in chosen if isinstance(content := contents[index], str)]
        tokenised = iter(tokenizer.contents(texts, room, truncate))
        for index in chosen:
            content = contents[index]
            if isinstance(content, Row):
                rows[index] = content
                continue
            if isinstance(content, str):
                tokens = next(tokenised)
            else:
                own = content[1:] if len(content) and content[0] == side.marker else content
                tokens = Tokens(cut(own, room, truncate), len(own))
            rows[index] = Row(np.concatenate((first, tokens.ids, last)), tokens.full + special, expanded=side.expanded)
    return [rows[index] for index in range(len(contents))]


def _pair(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    queries = tokenizer.contents([_query(item) for item in items], room, truncate)
    most = min(room, items[0].options.document_tokens or room) if items else room
    documents = iter(tokenizer.contents([given.text or "" for item in items for given in item.inputs], most, truncate))
    made = []
    for item, query in zip(items, queries, strict=True):
        made.append(
            Made([_joined(template, query, next(documents), room, truncate, cut_first=False) for _ in item.inputs])
        )
    return made


def _hypotheses(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int
) -> list[Made]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    texts = iter(tokenizer.contents([given.text or "" for item in items for given in item.inputs], room, truncate))
    said = list(dict.fromkeys(text for item in items for text in _said(item.options)))
    hypotheses = dict(zip(said, tokenizer.contents(said, room, truncate), strict=True))
    made = []
    for item in items:
        rights = [hypotheses[text] for text in _said(item.options)]
        lefts = [next(texts) for _ in item.inputs]
        beside = template.special + np.array([len(right.ids) for right in rights])
        tokens = sum(int(np.minimum(limit, len(left.ids) + beside).sum()) for left in lefts)
        if tokens > MAX_TOKENS:
            made.append(
                Made([], error=_too_many(f"the items have {tokens} tokens with each of their labels", MAX_TOKENS))
            )
            continue
        rows = []
        for left in lefts:
            rows += [_joined(template, left, right, room, truncate, cut_first=True) for right in rights]
        made.append(Made(rows))
    return made


def _said(options: RunOptions) -> list[str]:
    """The hypothesis of each label."""
    before, _, after = str(options.parameters.get("hypothesis_template", HYPOTHESIS)).partition("{}")
    return [before + label + after for label in options.labels]


def _joined(
    template: PairTemplate, left: Tokens, right: Tokens, room: int, truncate: Truncate, *, cut_first: bool
) -> Row:
    """A pair as the tokenizer's own template has it: one is cut to the room that the other leaves, which keeps at least
    its share.
    """
    kept, given = (right, left) if cut_first else (left, right)
    kept_ids = cut(kept.ids, max(int(room * QUERY_SHARE), room - given.full), truncate)
    given_ids = cut(given.ids, room - len(kept_ids), truncate)
    left_ids, right_ids = (given_ids, kept_ids) if cut_first else (kept_ids, given_ids)
    parts = (template.first, left_ids, template.middle, right_ids, template.last)
    ids = np.concatenate(parts)
    types = (
        np.repeat(np.array(template.types, np.uint8), [len(part) for part in parts]) if any(template.types) else None
    )
    return Row(ids, left.full + right.full + template.special, types)


def _pieces(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int
) -> list[Made]:
    """Each piece by itself, then joined: the answer stands after the last, so no end of the template is ever cut.

    A query in a piece of its own keeps its share of the limit, as one beside the document does. The piece with the
    document loses its end to what the others leave. Source: README of Qwen3-Reranker, the library mxbai-rerank.
    """
    share = int(limit * QUERY_SHARE)
    others = dict.fromkeys(
        _filled(piece, _query(item), "") for item in items for piece in item.options.pieces if not _is_cut(piece)
    )
    contents = dict(zip(others, tokenizer.contents(list(others), tokenizer.max_tokens + 1, "END"), strict=True))
    filled: list[str] = []
    shortened: list[bool] = []
    beyond: list[bool] = []
    for item in items:
        place, query = _place(item.options), _query(item)
        is_beside = "query" in item.options.pieces[place][1::2] and truncate != "NONE"
        # a character has at most four bytes, and a token at least one
        shown = tokenizer.prefix_of(query, share) if is_beside and 4 * len(query) > share else query
        shortened.append(shown != query)
        read = [_document(tokenizer, given.text or "", item.options.document_tokens) for given in item.inputs]
        beyond += [text != given.text for text, given in zip(read, item.inputs, strict=True)]
        filled += [_filled(item.options.pieces[place], shown, text) for text in read]
    documents = iter(tokenizer.contents(filled, limit, "NONE" if truncate == "NONE" else "END"))
    ended = iter(beyond)
    made = []
    for item, was_cut in zip(items, shortened, strict=True):
        place, pieces = _place(item.options), item.options.pieces
        around = [contents[_filled(piece, _query(item), "")] for piece in pieces if not _is_cut(piece)]
        ids = [
            cut(content.ids, share, "END") if "query" in piece[1::2] else content.ids
            for content, piece in zip(around, (*pieces[:place], *pieces[place + 1 :]), strict=True)
        ]
        before, after = np.concatenate([_NONE, *ids[:place]]), np.concatenate([_NONE, *ids[place:]])
        full = sum(content.full for content in around) + was_cut
        rows = []
        for _ in item.inputs:
            document = next(documents)
            kept = cut(document.ids, limit - len(before) - len(after), "END")
            rows.append(Row(np.concatenate((before, kept, after)), full + document.full + next(ended)))
        made.append(Made(rows))
    return made


def _document(tokenizer: ModelTokenizer, text: str, most: int) -> str:
    """The text, as far as its first `most` tokens reach, 0: all of it."""
    most_bytes = len(text) if text.isascii() else 4 * len(text)  # and a token has at least one
    if not 0 < most < most_bytes:
        return text
    read = tokenizer.prefix_of(text, most)
    return text if read == text else read.rstrip()  # a space before the next token may be a part of that one


def _query(item: Work) -> str:
    return (item.query.text or "") if item.query else ""


def _is_cut(piece: tuple[str, ...]) -> bool:
    return "document" in piece[1::2]


def _place(options: RunOptions) -> int:
    """The piece that is cut."""
    return next(index for index, piece in enumerate(options.pieces) if _is_cut(piece))


def _filled(piece: tuple[str, ...], query: str, document: str) -> str:
    fields = {"query": query, "document": document}
    return "".join(fields[part] if index % 2 else part for index, part in enumerate(piece))


def _spans(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int
) -> list[Made]:
    first, last = tokenizer.first, tokenizer.last
    special = len(first) + len(last)
    texts = [given.text or "" for item in items for given in item.inputs]
    rows = []
    for content, offsets in tokenizer.spans(texts, max(0, limit - special), truncate):
        places = np.concatenate(
            (np.full((len(first), 2), NOWHERE, np.int32), offsets, np.full((len(last), 2), NOWHERE, np.int32))
        )
        carried = int(offsets.max(initial=0)) // COST_CHARACTERS
        rows.append(
            Row(np.concatenate((first, content.ids, last)), content.full + special, offsets=places, expanded=carried)
        )
    taken = iter(rows)
    return [Made([next(taken) for _ in item.inputs]) for item in items]


def _raw(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[Work], truncate: Truncate, limit: int) -> list[Made]:
    """The model reads the texts; the ids are only counted, so nothing is cut here."""
    made = []
    for item in items:
        texts = texts_of(item)
        contents = tokenizer.contents(texts, 1 << 30, "NONE")
        rows = [
            Row(each.ids, len(each.ids), expanded=len(text) // COST_CHARACTERS)
            for each, text in zip(contents, texts, strict=True)
        ]
        made.append(Made(rows, shared=int(item.query is not None)))
    return made


_LAYOUTS = {
    "text": _text,
    "sides": _sides,
    "pair": _pair,
    "hypotheses": _hypotheses,
    "pieces": _pieces,
    "spans": _spans,
    "raw": _raw,
}
