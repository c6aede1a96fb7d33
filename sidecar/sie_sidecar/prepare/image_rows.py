"""Token ids of images, and rows of texts with images. The functions have no state: they run in tokenising threads."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import ImageTokens, Size, cost, has_one_size, image_ids, placeholders
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Truncate
from sie_sidecar.prepare.media_frames import PreparedImage
from sie_sidecar.prepare.rows import (
    OF_QUERY,
    Ids,
    ModelTokenizer,
    PreparedImages,
    TokenRow,
    Tokens,
    WorkItemInput,
    WorkRows,
    cut,
    is_cut,
)

_NONE = np.zeros(0, np.int32)


class Beside(NamedTuple):
    """Parts of a row of a text with images: the text `before` the images, the images, and the text `after` them.
    `ids`: token ids of the images. `cost`: cost of the images in tokens.
    """

    before: str
    images: PreparedImages
    ids: Ids
    cost: int
    after: str


def alone(images: PreparedImages, layout: Rows) -> TokenRow:
    """Return the row of images for a model that ignores the text of an input with images."""
    assert layout.images is not None
    ids, pixels = ids_of(images, layout), cost_of(images, layout)
    uncounted = pixels - len(images) if has_one_size(layout.images) else 0
    return TokenRow(ids, len(ids), expanded=len(ids) + pixels, images=images, uncounted=uncounted)


def beside(
    tokenizer: ModelTokenizer, content: Beside, around: tuple[Ids, Ids], most: int, truncate: Truncate
) -> TokenRow:
    """Return the row of a text with images. If it has more than `most` tokens, the text after the images is cut. The
    text before the images is cut only if it alone has more than `most` tokens, so the row may still be too long.
    """
    first, last = around
    before = tokenizer.tokenise([content.before], most, "END")[0].ids
    fixed = len(first) + len(before) + len(content.ids) + len(last)
    text = tokenizer.tokenise([content.after], max(0, most - fixed), truncate)[0]
    ids = np.concatenate((first, before, content.ids, text.ids, last))
    return TokenRow(ids, fixed + text.full, expanded=len(ids) + content.cost, images=content.images)


def of_pieces(
    tokenizer: ModelTokenizer,
    layout: Rows,
    item: WorkItemInput,
    index: int,
    texts: tuple[str, str],
    truncate: Truncate,
    limit: int,
) -> TokenRow:
    """Return the row of one input: `texts` (query, document) and images between the fixed parts of the model's prompt
    template.
    """
    text_of = dict(zip(("query", "document"), texts, strict=True))
    images_of = {"query": item.images.get(OF_QUERY, ()), "document": item.images.get(index, ())}
    parts: list[str | PreparedImages] = []
    shortened = 0
    for piece in item.options.pieces:
        parts.append(piece[0])
        for field, literal in zip(piece[1::2], piece[2::2], strict=True):
            images = images_of[field]
            assert not isinstance(images, InvalidInput)
            parts += [images, ""] if images else []
            parts[-1] = f"{parts[-1]}{text_of[field]}{literal}"
        if is_cut(piece):
            shortened = len(parts) - 1
    image_parts = [part for part in parts if not isinstance(part, str)]
    read = iter(
        tokenizer.tokenise(
            [part for part in parts if isinstance(part, str)], limit, "NONE" if truncate == "NONE" else "END"
        )
    )
    tokens_of_parts = [next(read) if isinstance(part, str) else _whole(ids_of(part, layout)) for part in parts]
    fixed = sum(len(tokens.ids) for number, tokens in enumerate(tokens_of_parts) if number != shortened)
    ids = np.concatenate(
        [
            cut(tokens.ids, limit - fixed, "END") if number == shortened else tokens.ids
            for number, tokens in enumerate(tokens_of_parts)
        ]
    )
    images = tuple(image for part in image_parts for image in part)
    full = sum(tokens.full for tokens in tokens_of_parts)
    return TokenRow(ids, full, expanded=len(ids) + cost_of(images, layout), images=images)


def _whole(ids: Ids) -> Tokens:
    return Tokens(ids, len(ids))


def ids_of(images: PreparedImages, layout: Rows) -> Ids:
    """Return the placeholder token ids of these images, concatenated. Empty if images of the model have no ids."""
    tokens = layout.image_tokens
    if tokens is None:
        return _NONE
    assert layout.images is not None
    parts = [image_ids(layout.images, tokens, _size(image), image.upright) for image in images]
    return np.array([number for part in parts for number in part], np.int32)


def cost_of(images: PreparedImages, layout: Rows) -> int:
    """Return the cost of computing these images on the device, as a number of tokens."""
    assert layout.images is not None
    return sum(cost(layout.images, _size(image)) for image in images)


def _size(image: PreparedImage) -> Size:
    return Size(image.height, image.width)


def unreserved(work_rows: WorkRows, layout: Rows, tokens: ImageTokens) -> WorkRows:
    """Return the rows, with an error for each input whose text contains the model's placeholder token for images: the
    model would read this token as an image. If the query contains it, the whole work item gets the error.
    """
    assert layout.images is not None
    error = InvalidInput("text: it contains a token that the model uses for images only", reason="reserved_token")
    bad = [
        number
        for number, row in enumerate(work_rows.rows)
        if np.count_nonzero(row.ids == tokens.token)
        != sum(placeholders(layout.images, tokens, _size(image)) for image in row.images)
    ]
    if any(number < work_rows.shared for number in bad):
        return WorkRows([], error=error)
    return (
        msgspec.structs.replace(
            work_rows, unfit={**work_rows.unfit, **{number - work_rows.shared: error for number in bad}}
        )
        if bad
        else work_rows
    )
