"""Rows for a model, built from the inputs of work items. There is one function for each layout of `ipc.Rows`. The
functions have no state: they run in a tokenising thread, or for short texts on the event loop.

    inputs, query, options ──► texts with prompts ──► ids without special tokens, truncated ──► rows with special tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

from sie_contracts.errors import InvalidInput
from sie_contracts.media import documents
from sie_contracts.models.output_schemas import questions_of
from sie_contracts.wire.ipc import ChunkedRows, Rows, Side
from sie_contracts.wire.messages import Input, RunOptions, Truncate, Vectors
from sie_sidecar.prepare import chunk_rows, image_rows
from sie_sidecar.prepare.chunk_rows import ChunkContents
from sie_sidecar.prepare.image_rows import Beside
from sie_sidecar.prepare.media_frames import SoundFeatures
from sie_sidecar.prepare.rows import (
    COST_CHARACTERS,
    HYPOTHESIS,
    VECTOR_BYTES,
    Ids,
    ModelTokenizer,
    PairTemplate,
    PreparedImages,
    TokenRow,
    Tokens,
    WorkItemInput,
    WorkRows,
    checked_work,
    cut,
    is_cut,
    query_of,
    texts_of,
    too_many,
)

# share of a pair's tokens that is reserved for the query; with a short document, the query may use more
QUERY_SHARE = 0.75
NOWHERE = -1  # offset of a special token, which is not in the text
# maximum number of tokens of a work item with labels or questions: each text counts once for each label or question
MAX_TOKENS = 8 << 20
_NONE = np.zeros(0, np.int32)


def make(tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput]) -> list[WorkRows]:
    """Return the rows of each work item. All work items have the same model and limit of tokens, so they are tokenised
    in one call.
    """
    options = items[0].options
    limit = min(options.max_tokens, tokenizer.max_tokens) if options.max_tokens else tokenizer.max_tokens
    faults: list[tuple[InvalidInput | None, dict[int, InvalidInput]]] = []
    fitting: list[WorkItemInput] = []
    for item in items:
        fit, error, unfit = checked_work(tokenizer, layout, item)
        faults.append((error, unfit))
        if error is None:
            fitting.append(fit)
    text_rows = iter(_LAYOUTS[layout.layout](tokenizer, layout, fitting, options.truncate, limit))
    results = []
    for error, unfit in faults:
        if error is not None:
            results.append(WorkRows([], error=error))
        else:
            result = next(text_rows)
            if unfit:
                result = msgspec.structs.replace(result, unfit={**result.unfit, **unfit})
            results.append(result)
    if layout.image_tokens is None:
        return results
    return [image_rows.unreserved(result, layout, layout.image_tokens) for result in results]


def _text(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    paired: list[Input] = []
    for item in items:
        for source in item.inputs:
            if source.chunks is not None and layout.chunks:
                return [_text_with_chunks(tokenizer, layout, item, truncate, limit) for item in items]
            if source.pair is not None and layout.pairs:
                paired.append(source)
    pairs = _pairs(tokenizer, paired, truncate, limit) if paired else iter(())
    contents: list[_Content] = []
    sides: list[Side] = []
    for item in items:
        contents += _contents(tokenizer, layout, item, pairs)
        sides += [layout.query if item.options.is_query else layout.document] * len(item.inputs)
    rows = iter(_sided(tokenizer, contents, sides, truncate, limit))
    return [WorkRows(list(islice(rows, len(item.inputs)))) for item in items]


def _text_with_chunks(
    tokenizer: ModelTokenizer, layout: Rows, item: WorkItemInput, truncate: Truncate, limit: int
) -> WorkRows:
    """Return the rows of a work item: one or more for a text with chunks, one for any other input."""
    side = layout.query if item.options.is_query else layout.document
    first, last, most = _row_frame(tokenizer, side, limit)
    contents: list[_Content] = []
    parts: list[ChunkContents | None] = []
    unfit: dict[int, InvalidInput] = {}
    for index, content in enumerate(_contents(tokenizer, layout, item, iter(()))):
        source, part = item.inputs[index], None
        if source.chunks is not None:
            try:
                part = chunk_rows.contents_of(tokenizer, source, item.options, (first, last), most)
            except InvalidInput as error:
                unfit[index] = error
                content = layout.empty
        parts.append(part)
        contents += [content] if part is None else part.contents
    rows = _sided(tokenizer, contents, [side] * len(contents), truncate, limit)
    around = len(first) + len(last) + sum(map(len, tokenizer.around(item.options.prefix, item.options.suffix)))
    chunked, ordered = [], iter(rows)
    for part in parts:
        own = list(islice(ordered, 1 if part is None else len(part.contents)))
        chunked.append(ChunkedRows() if part is None else part.chunked(own, around))
    return WorkRows(rows, unfit=unfit, chunked=tuple(chunked))


# text to tokenise, ids without special tokens, text with images, or a finished row
_Content = str | Ids | Beside | TokenRow


def _contents(
    tokenizer: ModelTokenizer, layout: Rows, item: WorkItemInput, pairs: Iterator[TokenRow]
) -> list[_Content]:
    """Return the content of each input: a text, token ids or images, each with the prompt (`prefix` and `suffix` of the
    options); or a finished row. `pairs`: finished rows of the inputs with a pair of texts, in the order of the inputs.
    """
    contents: list[_Content] = []
    prompt: tuple[Ids, Ids] | None = None
    for index, source in enumerate(item.inputs):
        if source.audio:
            contents.append(_sound_row(item.sounds[index], layout))
        elif source.images:
            contents.append(_image_content(source, item.images[index], layout, item.options))
        elif source.vectors is not None:
            contents.append(_vector_row(source.vectors))
        elif source.tokens is not None:
            prompt = prompt or tokenizer.around(item.options.prefix, item.options.suffix)
            contents.append(np.concatenate((prompt[0], tokenizer.content(source.tokens), prompt[1])))
        elif source.pair is not None:
            contents.append(next(pairs))
        else:
            contents.append(item.options.prefix + (source.text or layout.empty) + item.options.suffix)
    return contents


def _image_content(source: Input, images: PreparedImages | InvalidInput, layout: Rows, options: RunOptions) -> _Content:
    assert not isinstance(images, InvalidInput)
    if layout.image_tokens is None or not layout.image_tokens.beside_text:
        return image_rows.alone(images, layout)
    ids, costs = image_rows.ids_of(images, layout), image_rows.cost_of(images, layout)
    return Beside(options.prefix, images, ids, costs, (source.text or "") + options.suffix)


def _sound_row(sound: SoundFeatures | InvalidInput, layout: Rows) -> TokenRow:
    """Return the row of a sound. The text of an input with a sound is ignored."""
    assert layout.sounds is not None
    assert isinstance(sound, SoundFeatures)
    return TokenRow(_NONE, 0, expanded=layout.sounds.cost(sound.shape), sound=sound)


def _vector_row(vectors: Vectors) -> TokenRow:
    return TokenRow(_NONE, 0, expanded=max(1, len(vectors.data) // VECTOR_BYTES), vectors=vectors)


def _pairs(tokenizer: ModelTokenizer, inputs: Sequence[Input], truncate: Truncate, limit: int) -> Iterator[TokenRow]:
    """Return the rows of pairs of texts. In a pair that is too long, the second text is truncated first."""
    template = tokenizer.pair
    room = max(0, limit - template.special)
    lefts = tokenizer.tokenise([source.text or "" for source in inputs], room, truncate)
    rights = tokenizer.tokenise([source.pair or "" for source in inputs], room, truncate)
    return (
        _joined(template, left, right, room, truncate, cut_first=False)
        for left, right in zip(lefts, rights, strict=True)
    )


def _sides(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    contents: list[_Content] = []
    sides: list[Side] = []
    for item in items:
        options, query = item.options, item.query.vectors if item.query else None
        contents.append(
            options.query_prefix + query_of(item) + options.query_suffix if query is None else _vector_row(query)
        )
        contents += _contents(tokenizer, layout, item, iter(()))
        sides += [layout.query, *(_document_side(tokenizer, layout.document, options) for _ in item.inputs)]
    rows = iter(_sided(tokenizer, contents, sides, truncate, limit))
    return [WorkRows([next(rows) for _ in range(1 + len(item.inputs))], shared=1) for item in items]


def _document_side(tokenizer: ModelTokenizer, side: Side, options: RunOptions) -> Side:
    """Return the layout of a document's row, with at most `document_tokens` tokens of text if this option is set."""
    if not options.document_tokens:
        return side
    most = (
        options.document_tokens
        + (len(tokenizer.first) + len(tokenizer.last) if side.special else 0)
        + (side.marker >= 0)
    )
    return msgspec.structs.replace(side, limit=min(most, side.limit or most))


def _row_frame(tokenizer: ModelTokenizer, side: Side, limit: int) -> tuple[Ids, Ids, int]:
    """Return the special tokens before and after the text of a row, and the largest length of the row."""
    first, last = (tokenizer.first, tokenizer.last) if side.special else (_NONE, _NONE)
    if side.marker >= 0:
        first = np.concatenate([first[:1], np.array([side.marker], np.int32), first[1:]])
    return first, last, min(limit, side.limit) if side.limit else limit


def _sided(
    tokenizer: ModelTokenizer, contents: Sequence[_Content], sides: list[Side], truncate: Truncate, limit: int
) -> list[TokenRow]:
    """Return one row for each content. `sides`: layouts of the rows. Texts of one layout are tokenised together."""
    rows: dict[int, TokenRow] = {}
    groups: dict[Side, tuple[list[int], list[str]]] = {}  # by layout: indexes of its contents, and its texts
    for index, (content, side) in enumerate(zip(contents, sides, strict=True)):
        indexes, texts = groups.setdefault(side, ([], []))
        indexes.append(index)
        if isinstance(content, str):
            texts.append(content)
    for side, (indexes, texts) in groups.items():
        first, last, most = _row_frame(tokenizer, side, limit)
        special = len(first) + len(last)
        room = max(0, most - special)
        tokenised = iter(tokenizer.tokenise(texts, room, truncate))
        for index in indexes:
            content = contents[index]
            if isinstance(content, TokenRow):
                rows[index] = content
                continue
            if isinstance(content, Beside):
                rows[index] = image_rows.beside(tokenizer, content, (first, last), most, truncate)
                continue
            if isinstance(content, str):
                tokens = next(tokenised)
            else:
                own = content[1:] if len(content) and content[0] == side.marker else content
                tokens = Tokens(cut(own, room, truncate), len(own))
            rows[index] = TokenRow(
                np.concatenate((first, tokens.ids, last)), tokens.full + special, expanded=side.expanded
            )
    return [*map(rows.__getitem__, range(len(contents)))]


def _pair(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    queries = tokenizer.tokenise([query_of(item) for item in items], room, truncate)
    most = min(room, items[0].options.document_tokens or room) if items else room
    documents = iter(
        tokenizer.tokenise([source.text or "" for item in items for source in item.inputs], most, truncate)
    )
    return [
        WorkRows([_joined(template, query, next(documents), room, truncate, cut_first=False) for _ in item.inputs])
        for item, query in zip(items, queries, strict=True)
    ]


def _hypotheses(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    texts = iter(tokenizer.tokenise([source.text or "" for item in items for source in item.inputs], room, truncate))
    hypothesis_texts = list(dict.fromkeys(text for item in items for text in _hypothesis_texts(item.options)))
    hypotheses = dict(zip(hypothesis_texts, tokenizer.tokenise(hypothesis_texts, room, truncate), strict=True))
    results = []
    for item in items:
        rights = [hypotheses[text] for text in _hypothesis_texts(item.options)]
        lefts = [next(texts) for _ in item.inputs]
        beside = template.special + np.array([len(right.ids) for right in rights])
        tokens = sum(int(np.minimum(limit, len(left.ids) + beside).sum()) for left in lefts)
        if tokens > MAX_TOKENS:
            results.append(
                WorkRows([], error=too_many(f"the items have {tokens} tokens, counted once for each label", MAX_TOKENS))
            )
            continue
        rows = [_joined(template, left, right, room, truncate, cut_first=True) for left in lefts for right in rights]
        results.append(WorkRows(rows))
    return results


def _hypothesis_texts(options: RunOptions) -> list[str]:
    """Return for each label a sentence with the label, made from the hypothesis template."""
    before, _, after = str(options.parameters.get("hypothesis_template", HYPOTHESIS)).partition("{}")
    return [before + label + after for label in options.labels]


def _joined(
    template: PairTemplate, left: Tokens, right: Tokens, room: int, truncate: Truncate, *, cut_first: bool
) -> TokenRow:
    """Return the row of two texts with the special tokens of `template`. If the row is too long, truncate the right
    text (with `cut_first`, the left text). Truncate the other text only if it uses more than QUERY_SHARE of `room`.
    """
    whole, shortened = (right, left) if cut_first else (left, right)
    whole_ids = _share_ids(whole, shortened, room, truncate)
    shortened_ids = cut(shortened.ids, room - len(whole_ids), truncate)
    left_ids, right_ids = (shortened_ids, whole_ids) if cut_first else (whole_ids, shortened_ids)
    parts = (template.first, left_ids, template.middle, right_ids, template.last)
    ids = np.concatenate(parts)
    types = (
        np.repeat(np.array(template.types, np.uint8), [len(part) for part in parts]) if any(template.types) else None
    )
    return TokenRow(ids, left.full + right.full + template.special, types)


def _share_ids(whole: Tokens, shortened: Tokens, room: int, truncate: Truncate) -> Ids:
    """Return the ids of the text `whole`, at most QUERY_SHARE of `room`, or as many as the pair's other text
    (`shortened`) leaves free if that is more.
    """
    return cut(whole.ids, max(int(room * QUERY_SHARE), room - shortened.full), truncate)


def _pieces(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    items = [_with_texts(item, layout.empty) for item in items]
    text_rows = iter(_text_pieces(tokenizer, [item for item in items if not item.images], truncate, limit))
    return [
        _pieces_with_images(tokenizer, layout, item, truncate, limit) if item.images else next(text_rows)
        for item in items
    ]


def _with_texts(item: WorkItemInput, empty: str) -> WorkItemInput:
    """Return the work item. Inputs that have neither a text nor images get the text `empty`."""
    if not empty:
        return item

    def with_text(source: Input) -> Input:
        return source if source.text or source.images else Input(empty)

    return item._replace(
        query=item.query and with_text(item.query), inputs=[with_text(source) for source in item.inputs]
    )


def _pieces_with_images(
    tokenizer: ModelTokenizer, layout: Rows, item: WorkItemInput, truncate: Truncate, limit: int
) -> WorkRows:
    """Return one row for each input: the filled prompt template, with images. Only texts are truncated."""
    query = query_of(item)
    shown = query if truncate == "NONE" else tokenizer.prefix_of(query, int(limit * QUERY_SHARE))
    rows = []
    for index, source in enumerate(item.inputs):
        text = source.text or ""
        read = _document(tokenizer, text, item.options.document_tokens)
        row = image_rows.of_pieces(tokenizer, layout, item, index, (shown, read), truncate, limit)
        rows.append(msgspec.structs.replace(row, full=row.full + (shown != query) + (read != text)))
    return WorkRows(rows)


def _text_pieces(
    tokenizer: ModelTokenizer, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    """Return one row for each input: the prompt template with query and document, tokenised piece by piece. If a row
    is too long, truncate the piece with the document. QUERY_SHARE of `limit` is reserved for the query. The end of the
    template stays whole, because the model's output follows it. Source: README of Qwen3-Reranker and of mxbai-rerank.
    """
    share = int(limit * QUERY_SHARE)
    texts = dict.fromkeys(
        _filled(piece, query_of(item), "") for item in items for piece in item.options.pieces if not is_cut(piece)
    )
    contents = dict(zip(texts, tokenizer.tokenise(list(texts), tokenizer.max_tokens + 1, "END"), strict=True))
    filled: list[str] = []
    shortened: list[bool] = []
    beyond: list[bool] = []
    for item in items:
        place, query = _place(item.options), query_of(item)
        is_beside = "query" in item.options.pieces[place][1::2] and truncate != "NONE"
        # a character has at most four bytes and a token at least one byte, so a query of at most share / 4 characters
        # has at most `share` tokens and is not cut
        shown = tokenizer.prefix_of(query, share) if is_beside and 4 * len(query) > share else query
        shortened.append(shown != query)
        read = [_document(tokenizer, source.text or "", item.options.document_tokens) for source in item.inputs]
        beyond += [text != source.text for text, source in zip(read, item.inputs, strict=True)]
        filled += [_filled(item.options.pieces[place], shown, text) for text in read]
    documents = iter(tokenizer.tokenise(filled, limit, "NONE" if truncate == "NONE" else "END"))
    ended = iter(beyond)
    results = []
    for item, was_cut in zip(items, shortened, strict=True):
        place, pieces = _place(item.options), item.options.pieces
        around = [contents[_filled(piece, query_of(item), "")] for piece in pieces if not is_cut(piece)]
        ids = [
            cut(content.ids, share, "END") if "query" in piece[1::2] else content.ids
            for content, piece in zip(around, (*pieces[:place], *pieces[place + 1 :]), strict=True)
        ]
        before, after = np.concatenate([_NONE, *ids[:place]]), np.concatenate([_NONE, *ids[place:]])
        full = sum(content.full for content in around) + was_cut
        rows = []
        for _ in item.inputs:
            document = next(documents)
            document_ids = cut(document.ids, limit - len(before) - len(after), "END")
            rows.append(TokenRow(np.concatenate((before, document_ids, after)), full + document.full + next(ended)))
        results.append(WorkRows(rows))
    return results


def _document(tokenizer: ModelTokenizer, text: str, most: int) -> str:
    """Return the part of the text that its first `most` tokens cover; if `most` is 0, the whole text."""
    # an upper bound of the number of tokens, because each token has at least one byte
    max_bytes = len(text) if text.isascii() else 4 * len(text)
    if not 0 < most < max_bytes:
        return text
    read = tokenizer.prefix_of(text, most)
    # remove a space at the end: it may belong to the next token, which was cut off
    return text if read == text else read.rstrip()


def _place(options: RunOptions) -> int:
    """Return the index in `options.pieces` of the piece with the document."""
    return next(index for index, piece in enumerate(options.pieces) if is_cut(piece))


def _filled(piece: tuple[str, ...], query: str, document: str) -> str:
    fields = {"query": query, "document": document}
    return "".join(fields[part] if index % 2 else part for index, part in enumerate(piece))


def _spans(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    first, last = tokenizer.first, tokenizer.last
    special = len(first) + len(last)
    texts = [source.text or "" for item in items for source in item.inputs]
    rows = []
    for content, offsets in tokenizer.spans(texts, max(0, limit - special), truncate):
        places = np.concatenate(
            (np.full((len(first), 2), NOWHERE, np.int32), offsets, np.full((len(last), 2), NOWHERE, np.int32))
        )
        carried = int(offsets.max(initial=0)) // COST_CHARACTERS
        rows.append(
            TokenRow(
                np.concatenate((first, content.ids, last)), content.full + special, offsets=places, expanded=carried
            )
        )
    row_iterator = iter(rows)
    return [WorkRows([next(row_iterator) for _ in item.inputs]) for item in items]


def _passages(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    template = tokenizer.pair
    room = max(0, limit - template.special)
    instructions = tokenizer.tokenise([item.options.instruction for item in items], room, truncate)
    spans = iter(tokenizer.spans([source.text or "" for item in items for source in item.inputs], room, truncate))
    results = []
    for item, instruction in zip(items, instructions, strict=True):
        rows = []
        for _ in item.inputs:
            content, places = next(spans)
            row = _joined(template, instruction, content, room, truncate, cut_first=False)
            length = len(row.ids) - template.special - len(_share_ids(instruction, content, room, truncate))
            own = cut(places, length, truncate)
            offsets = np.full((len(row.ids), 2), NOWHERE, np.int32)
            last = len(row.ids) - len(template.last)
            offsets[last - len(own) : last] = own
            carried = int(own.max(initial=0)) // COST_CHARACTERS
            rows.append(TokenRow(row.ids, row.full, row.types, offsets=offsets, expanded=carried))
        results.append(WorkRows(rows))
    return results


def _raw(
    tokenizer: ModelTokenizer, layout: Rows, items: Sequence[WorkItemInput], truncate: Truncate, limit: int
) -> list[WorkRows]:
    """Return rows for a model that tokenises in the adapter. The ids are zeros: only their number is used, to estimate
    the cost. Texts and documents are sent unchanged. Refuse a work item with more than MAX_TOKENS tokens. A text
    counts once for each question, because the model reads it with each question.
    """
    results = []
    for item in items:
        texts = texts_of(item)
        contents = tokenizer.tokenise(texts, 0, "NONE")  # only counts the tokens, and reads a long text in pieces
        shared = int(item.query is not None)
        costs = _costs_with_questions(tokenizer, layout, item, contents)
        if sum(costs) > MAX_TOKENS:
            message = f"the items have {sum(costs)} tokens, counted once for each of their questions"
            results.append(WorkRows([], error=too_many(message, MAX_TOKENS)))
            continue
        rows = []
        # the query, if there is one, is the first text; its number is -1 (`rows.OF_QUERY`)
        for number, (content, text, cost) in enumerate(zip(contents, texts, costs, strict=True), -shared):
            tokens, beside = content.full, len(text) // COST_CHARACTERS
            row = TokenRow(np.zeros(tokens, np.int32), tokens, expanded=max(beside, cost))
            if number >= 0 and (document := item.inputs[number].document) is not None:
                row = msgspec.structs.replace(
                    row, document=document, expanded=documents.cost(len(document.data)) + beside + tokens
                )
            elif (sound := item.sounds.get(number)) is not None:
                sound_row = _sound_row(sound, layout)
                row = msgspec.structs.replace(row, sound=sound_row.sound, expanded=sound_row.expanded + beside)
            elif (images := item.images.get(number)) is not None:
                assert not isinstance(images, InvalidInput)
                row = msgspec.structs.replace(
                    row, images=images, expanded=image_rows.cost_of(images, layout) + beside + tokens
                )
            rows.append(row)
        results.append(WorkRows(rows, shared=shared))
    return results


def _costs_with_questions(
    tokenizer: ModelTokenizer, layout: Rows, item: WorkItemInput, contents: Sequence[Tokens]
) -> list[int]:
    """Return for each text its number of tokens, summed over the questions, because the model reads the text once with
    each question. Without questions, return 0 for each text.
    """
    questions = questions_of(item.options) if layout.questions else []
    most = tokenizer.max_tokens
    sizes = [len(tokens.ids) for tokens in tokenizer.tokenise(questions, most, "END")] if questions else []
    around = layout.questions + np.array(sizes, np.int64)
    return [int(np.minimum(most, content.full + around).sum()) for content in contents]


_LAYOUTS = {
    "text": _text,
    "sides": _sides,
    "pair": _pair,
    "hypotheses": _hypotheses,
    "pieces": _pieces,
    "spans": _spans,
    "passages": _passages,
    "raw": _raw,
}
