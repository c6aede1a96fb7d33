"""The ids that stand for images in rows, and rows of texts with images in their prompt. Pure: called in the tokenising
threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import ImageTokens, Size, cost, grid_of, has_one_size
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Truncate
from sie_sidecar.prepare.media_frames import Prepared
from sie_sidecar.prepare.rows import OF_QUERY, Made, Row, Seen, Work, is_cut
from sie_sidecar.prepare.tokens import Ids, ModelTokenizer, Tokens, cut

_NONE = np.zeros(0, np.int32)


class Beside(NamedTuple):
    """A text with images before it, `ids` and `cost` theirs, and its prompt around both."""

    before: str
    images: Seen
    ids: Ids
    cost: int
    after: str


def alone(images: Seen, layout: Rows) -> Row:
    """The row of images: a text beside them is not read."""
    assert layout.images is not None
    ids, pixels = ids_of(images, layout), cost_of(images, layout)
    uncounted = pixels - len(images) if has_one_size(layout.images) else 0
    return Row(ids, len(ids), expanded=len(ids) + pixels, images=images, uncounted=uncounted)


def beside(tokenizer: ModelTokenizer, content: Beside, around: tuple[Ids, Ids], most: int, truncate: Truncate) -> Row:
    """The row of a text with images, between the tokens `around` each. The text is cut, never its images."""
    first, last = around
    before = tokenizer.contents([content.before], most, "END")[0].ids
    fixed = len(first) + len(before) + len(content.ids) + len(last)
    text = tokenizer.contents([content.after], max(0, most - fixed), truncate)[0]
    ids = np.concatenate((first, before, content.ids, text.ids, last))
    return Row(ids, fixed + text.full, expanded=len(ids) + content.cost, images=content.images)


def of_pieces(
    tokenizer: ModelTokenizer,
    layout: Rows,
    item: Work,
    index: int,
    texts: tuple[str, str],
    truncate: Truncate,
    limit: int,
) -> Row:
    """The row of one input in the pieces of a template, each field with its images before its text. `texts`: those of
    the query and of the input. What is behind the input's images in its piece loses its end.
    """
    said = dict(zip(("query", "document"), texts, strict=True))
    shown = {"query": item.images.get(OF_QUERY, ()), "document": item.images.get(index, ())}
    parts: list[str | Seen] = []
    shortened = 0
    for piece in item.options.pieces:
        parts.append(piece[0])
        for field, literal in zip(piece[1::2], piece[2::2], strict=True):
            images = shown[field]
            assert not isinstance(images, InvalidInput)
            parts += [images, ""] if images else []
            parts[-1] = f"{parts[-1]}{said[field]}{literal}"
        if is_cut(piece):
            shortened = len(parts) - 1
    seen = [part for part in parts if not isinstance(part, str)]
    read = iter(
        tokenizer.contents(
            [part for part in parts if isinstance(part, str)], limit, "NONE" if truncate == "NONE" else "END"
        )
    )
    made = [next(read) if isinstance(part, str) else _whole(ids_of(part, layout)) for part in parts]
    others = sum(len(each.ids) for number, each in enumerate(made) if number != shortened)
    ids = np.concatenate(
        [cut(each.ids, limit - others, "END") if number == shortened else each.ids for number, each in enumerate(made)]
    )
    images = tuple(image for part in seen for image in part)
    full = sum(each.full for each in made)
    return Row(ids, full, expanded=len(ids) + cost_of(images, layout), images=images)


def _whole(ids: Ids) -> Tokens:
    return Tokens(ids, len(ids))


def ids_of(images: Seen, layout: Rows) -> Ids:
    """The ids of images one after the other; none for a model whose images have none."""
    tokens = layout.image_tokens
    if tokens is None:
        return _NONE
    parts = [(*tokens.before, *(tokens.token,) * _count(image, layout, tokens), *tokens.after) for image in images]
    return np.array([number for part in parts for number in part], np.int32)


def cost_of(images: Seen, layout: Rows) -> int:
    """What preparing and reading their pixels costs the device, in tokens."""
    assert layout.images is not None
    return sum(cost(layout.images, Size(image.height, image.width)) for image in images)


def _count(image: Prepared, layout: Rows, tokens: ImageTokens) -> int:
    """How many tokens stand for its pixels."""
    if tokens.count:
        return tokens.count
    assert layout.images is not None
    rows, columns = grid_of(layout.images, Size(image.height, image.width))
    return rows * columns


def unreserved(made: Made, layout: Rows) -> Made:
    """With the inputs refused whose text holds the token that stands for a part of an image."""
    tokens = layout.image_tokens
    if tokens is None:
        return made
    error = InvalidInput("text: it holds a token that the model reserves for images", reason="reserved_token")
    bad = [
        number
        for number, row in enumerate(made.rows)
        if np.count_nonzero(row.ids == tokens.token) != sum(_count(image, layout, tokens) for image in row.images)
    ]
    if any(number < made.shared for number in bad):
        return Made([], error=error)
    return replace(made, unfit={**made.unfit, **{number - made.shared: error for number in bad}}) if bad else made
