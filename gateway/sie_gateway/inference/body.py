"""Decode request bodies to plain Python values, within limits, and read the items of a request.

    bytes ──decode──► map ──items──► tuple[RequestItem]

Errors name the path of the wrong field, and what was expected and received. No error repeats a text value of the
request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from sie_contracts import arrays, plain
from sie_contracts.errors import ErrorInfo, InvalidInput
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.option_values import bad, describe
from sie_contracts.models.options import known_fields
from sie_contracts.names import did_you_mean
from sie_contracts.plain import whole_number
from sie_contracts.wire.messages import MENTION_BYTES, Input, Mention, TextChunks, Vectors, utf8_bytes
from sie_gateway.inference import chunk_fields
from sie_gateway.inference.images import EXPECTED, Images, Link, read_document, read_sound
from sie_gateway.inference.images import read as read_images

MAX_BODY_BYTES = 256 << 20
# limits of warnings and errors about unknown keys: number of keys that are compared with those of the API, which takes
# 0.02 ms for each; number of warnings; number of characters of a key that a message shows
MAX_KEYS, MAX_WARNINGS, MAX_KEY = 200, 20, 64
BYTES_PER_CHARGED_TOKEN = 16  # a key pays at least a token for so many bytes of a text, which has usually four tokens
ID_BYTES = 4  # assumed bytes of a token id in a message: about the length of a token's text


class RequestItem(msgspec.Struct, frozen=True):
    """Input of a request in the form in which the client sent it: a text, token ids of the model, a multivector
    (float32 [tokens, width]), image files, a sound file or a document file.

    `pair`: second text of a pair. `instead`: hint for the error about an item without content; the hint names an
    unknown field that the client may have sent in place of `text`. `unfit`: reason why no model can run the item.
    `unknown`: names of fields that the API does not define. `mentions`: entities that the item's metadata lists, for a
    model that reads entities. `links`: images at URLs that are not fetched yet. `chunks`: parts of the text that get
    vectors of their own. `size`: approximate bytes of the item in a queue message. `is_plain`: the item has a text, and
    nothing else that a model reads or the gateway checks. The constructor computes both, because the items of a large
    body are constructed in a thread, not in the event loop.
    """

    text: str | None
    id: str | None = None
    metadata: Any = None
    modalities: tuple[str, ...] = ()
    tokens: tuple[int, ...] | None = None
    pair: str | None = None
    vectors: arrays.Array | None = None
    images: tuple[bytes, ...] = ()
    unfit: ErrorInfo | None = None
    instead: str = ""
    unknown: tuple[str, ...] = ()
    mentions: tuple[Mention, ...] = ()
    links: tuple[Link, ...] = ()
    audio: bytes = b""
    document: DocumentFile | None = None
    chunks: TextChunks | None = None
    size: int = 0
    is_plain: bool = False

    def __post_init__(self) -> None:
        text = self.text or ""
        size = len(text) if text.isascii() else utf8_bytes(text)
        is_plain = (
            self.text is not None
            and not (self.modalities or self.unknown or self.images or self.links or self.audio or self.mentions)
            and self.tokens is None
            and self.pair is None
            and self.vectors is None
            and self.unfit is None
            and self.document is None
            and self.chunks is None
        )
        msgspec.structs.force_setattr(self, "is_plain", is_plain)
        if is_plain:
            msgspec.structs.force_setattr(self, "size", size)
            return
        if self.pair is not None:
            size += utf8_bytes(self.pair)
        if self.images or self.audio or self.document is not None:
            size += self.file_bytes
        if self.tokens is not None:
            size += ID_BYTES * len(self.tokens)
        if self.mentions:
            size += sum(MENTION_BYTES + len(mention.label.encode()) for mention in self.mentions)
        if self.chunks is not None:
            size += len(self.chunks.spans)
        if self.vectors is not None:
            size += self.vectors.nbytes
        msgspec.structs.force_setattr(self, "size", size)

    @property
    def least_charge(self) -> int:
        """Return the smallest number of tokens that a key pays for the item. A text costs the sidecar time for each of
        its bytes, even if it is one word, or if the model reads only its beginning.
        """
        if self.vectors is not None:
            return 0
        return (self.size - self.file_bytes) // BYTES_PER_CHARGED_TOKEN

    @property
    def is_empty(self) -> bool:
        return self.text is None and self.tokens is None and self.vectors is None and not self.files

    @property
    def files(self) -> tuple[bytes, ...]:
        """Return the files of the item: its images, its sound and its document."""
        if not self.audio and self.document is None:
            return self.images
        other_files = (self.audio, self.document.data if self.document else b"")
        return (*self.images, *filter(None, other_files))

    @property
    def file_bytes(self) -> int:
        """Return the number of bytes of the item's files. `size` includes these bytes."""
        return sum(map(len, self.files)) if self.files else 0


def input_of(item: RequestItem) -> Input:
    """Return the input of a queue message: the fields of an item that a worker needs."""
    if item.is_plain:
        return Input(item.text)
    if item.tokens is None and item.pair is None and item.vectors is None and not item.files:
        return Input(item.text, mentions=item.mentions, chunks=item.chunks)
    return Input(
        item.text,
        tokens=item.tokens,
        pair=item.pair,
        vectors=None if item.vectors is None else Vectors.from_array(item.vectors),
        images=item.images,
        audio=item.audio,
        document=item.document,
    )


def count(body: bytes, *, msgpack: bool) -> int:
    """Return the number of values in a request body (maps, lists, texts, numbers). Raises InvalidInput."""
    try:
        return plain.count(body, msgpack=msgpack)
    except plain.Malformed as error:
        raise InvalidInput.at("body", str(error), reason=error.reason) from None


def decode(body: bytes, *, msgpack: bool) -> Mapping[str, Any]:
    """Return the top-level map of a request body. For a body above `plain.SMALL_BYTES`, the caller must first call
    `count`, which limits the number of values. Values have the types of JSON; msgpack also has bytes. Raises
    InvalidInput with the reason `malformed` or `schema`.
    """
    try:
        value = (plain.from_msgpack if msgpack else plain.from_json)(body, is_counted=True)
    except plain.Malformed as error:
        raise InvalidInput.at("body", str(error), reason=error.reason) from None
    if not isinstance(value, dict):
        raise bad("body", value, "a map")
    return value


def items(body: Mapping[str, Any], *, limit: int) -> tuple[RequestItem, ...]:
    """Return the inputs of a request body from its field `items`, `inputs` or `input`. Raises InvalidInput, for example
    with the reason `empty_items`, `too_many_items`, `too_many_chunks` or `schema`.
    """
    name = "items"
    if body.get(name) is None:
        name = next((alias for alias in ("inputs", "input") if body.get(alias) is not None), name)
    raw = body.get(name)
    if isinstance(raw, str | dict):
        raw = [raw]
    if raw is None or raw == []:
        instead = in_its_place(body, "items", known_fields()) if raw is None else ""
        raise InvalidInput.at(name, f"expected at least one item{instead}", reason="empty_items")
    if not isinstance(raw, list):
        raise bad(name, raw, "a list of items")
    if len(raw) > limit:
        raise InvalidInput.at(
            name, f"got {len(raw)} items, at most {limit} are allowed", reason="too_many_items", extras={"limit": limit}
        )
    inputs, spans = list[RequestItem](), 0
    for index, value in enumerate(raw):
        text = value.get("text") if isinstance(value, dict) and len(value) == 1 else value
        if isinstance(text, str) and text.isascii():  # the most common item
            inputs.append(RequestItem(text))
            continue
        item = _item(value, f"{name}[{index}]")
        inputs.append(item)
        spans += len(item.chunks.spans) // 8 if item.chunks is not None else 0
    if spans > chunk_fields.MAX_REQUEST_CHUNKS:
        limit = chunk_fields.MAX_REQUEST_CHUNKS
        message = f"they have {spans} chunks in all, at most {limit} are allowed: send fewer items"
        raise InvalidInput.at(name, message, reason="too_many_chunks", extras={"limit": limit})
    return tuple(inputs)


def query(body: Mapping[str, Any]) -> RequestItem:
    """Read the query to which the items are compared. Raises InvalidInput (reason `schema` if it is missing)."""
    raw = body.get("query")
    if raw is None:
        raise InvalidInput.at("query", f"missing{in_its_place(body, 'query', known_fields())}")
    return _item(raw, "query")


def in_its_place(body: Mapping[str, Any], name: str, fields: Collection[str]) -> str:
    """Return a hint for the error about the missing field `name`, for example "; unknown field `content`; did you mean
    `text`?". The hint shows an unknown field only if it is similar to `name`, or if another API uses this field for
    the same content. Any other unknown field may be the client's data.
    """
    unknown = (str(key)[:MAX_KEY] for key in itertools.islice((key for key in body if key not in fields), MAX_KEYS))
    elsewhere = _ELSEWHERE.get(name, {})
    hints = (
        (key, f"; did you mean `{elsewhere[key]}`?" if key in elsewhere else did_you_mean(key, (name,)))
        for key in unknown
    )
    return next((f"; unknown field `{key}`{hint}" for key, hint in hints if hint), "")


# missing field of this API -> name that other servers and libraries use -> field to use here
_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "items": dict.fromkeys(("text", "texts", "documents", "docs", "sentences", "passages"), "items"),
    "text": {
        **dict.fromkeys(
            ("content", "page_content", "input", "title", "body", "value", "string", "sentence", "passage"), "text"
        ),
        **dict.fromkeys(("doc", "chunk", "caption", "description", "data", "prompt", "query", "texts"), "text"),
        "image": "images",
        "image_url": "images",
        "documents": "document",
        "audios": "audio",
        "videos": "video",
    },
}
_ITEM = chunk_fields.FIELDS | {"id", "text", "metadata", "images", "document", "audio", "video", "multivector"}
_MODALITIES = {
    "images": "image",
    "document": "document",
    "audio": "audio",
    "video": "video",
    "multivector": "multivector",
}


def _item(value: Any, path: str) -> RequestItem:
    if isinstance(value, str):
        return RequestItem(utf8(value, path))
    if not isinstance(value, dict):
        raise bad(path, value, "a map or a string")
    # shortcut for the most common item, a map with only a text; the full check takes three times as long
    if len(value) == 1 and isinstance(text := value.get("text"), str):
        return RequestItem(utf8(text, path))
    text = _optional_text(value, "text", path)
    metadata = value.get("metadata")
    if metadata is not None and not _is_portable(metadata):
        where = f"{path}.metadata"
        message = "the reply cannot repeat integers above 64 bits, NaN, infinity, or keys that are no strings"
        raise InvalidInput.at(where, message)
    # `_is_unset` is needed because `entry != []` would compare each element if the multivector is an array
    used = tuple(
        modality
        for key, modality in _MODALITIES.items()
        if (entry := value.get(key)) is not None and not _is_unset(entry)
    )
    vectors = _vectors(value["multivector"], f"{path}.multivector") if "multivector" in used else None
    images, unfit, links = read_images(value["images"], f"{path}.images") if "image" in used else Images()
    audio, unheard = read_sound(value["audio"], f"{path}.audio") if "audio" in used else (b"", None)
    document, unparsed = read_document(value["document"], f"{path}.document") if "document" in used else (None, None)
    chunks = chunk_fields.read(value, text, path) if "chunks" in value else None
    if chunks is not None and used:
        raise InvalidInput.at(f"{path}.chunks", f"not allowed in an item with {used[0]}: send the text alone")
    instead = in_its_place(value, "text", _ITEM) if text is None and not used else ""
    unknown = () if value.keys() <= _ITEM else tuple(str(key)[:MAX_KEY] for key in value if key not in _ITEM)[:MAX_KEYS]
    return RequestItem(
        text,
        _optional_text(value, "id", path),
        metadata,
        used,
        vectors=vectors,
        images=images,
        unfit=unfit or unheard or unparsed,
        audio=audio,
        document=document,
        chunks=chunks,
        instead=instead,
        unknown=unknown,
        links=links,
    )


def all_plain(items: Sequence[RequestItem], query: RequestItem | None) -> bool:
    for item in items:
        if not item.is_plain:
            return False
    return query is None or query.is_plain


def has_images(items: Sequence[RequestItem], query: RequestItem | None) -> bool:
    for item in items:
        if item.images:
            return True
    return query is not None and bool(query.images)


def has_links(items: Sequence[RequestItem], query: RequestItem | None) -> bool:
    """Return True if any image of the items or of the query is at a URL."""
    for item in items:
        if item.links:
            return True
    return query is not None and bool(query.links)


def all_links(items: Sequence[RequestItem], query: RequestItem | None) -> list[Link]:
    """Return the URLs of images of the items, then those of the query."""
    return [link for item in (*items, *([query] if query is not None else ())) for link in item.links]


def refuse_links(items: Sequence[RequestItem], query: RequestItem | None) -> None:
    """Refuse the first image at a URL. Raises InvalidInput."""
    for link in all_links(items, query):
        message = f"got a URL, but this server fetches no URLs: send {EXPECTED}"
        raise InvalidInput.at(link.path, message, reason="invalid_media")


def ignored(items: Sequence[RequestItem], query: RequestItem | None) -> tuple[str, ...]:
    """Return a warning for each unknown field whose name is similar to a known name: one warning, even if several items
    have the field. At most MAX_KEYS names are compared. Other unknown fields cause no warning, because they may be the
    client's own data.
    """
    hints: dict[str, str] = {}  # unknown field -> warning; empty if no known field has a similar name
    for index, item in enumerate((*filter(None, (query,)), *items), -1 if query else 0):
        path = f"items[{index}]" if index >= 0 else "query"
        for name in item.unknown:
            if name not in hints and len(hints) < MAX_KEYS:
                hint = did_you_mean(name, _ITEM)
                hints[name] = f"{path}.{name}: ignored, an item has no such field{hint}" if hint else ""
    return tuple(filter(None, hints.values()))[:MAX_WARNINGS]


def unread_texts(items: Sequence[RequestItem], model: str) -> tuple[str, ...]:
    """Return a warning if inputs have a text and a file, because the model reads only the file. Return an empty tuple
    if no input has both.
    """
    texts = [item for item in items if item.text]
    counts = {
        "images": sum(bool(item.images) for item in texts),
        "sound": sum(bool(item.audio) for item in texts),
        "document": sum(item.document is not None for item in texts),
    }
    kind = next((name for name, count in counts.items() if count), "")
    if kind:
        message = f"{model} reads the {kind} of an input that also has a text"
        return (f"text: ignored in {counts[kind]} of {len(items)} inputs; {message}",)
    return ()


def _is_unset(value: Any) -> bool:
    return isinstance(value, list | dict) and not value


def _vectors(value: Any, path: str) -> arrays.Array:
    try:
        return arrays.multivector(value)
    except ValueError as error:
        raise InvalidInput.at(path, str(error)) from error


def _is_portable(value: Any) -> bool:
    """Return True if a reply in JSON or msgpack can repeat the value. The caller must have limited the value's nesting
    depth, because this function is recursive.
    """
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_portable(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_portable, value))
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bytes)


def _optional_text(value: Mapping[str, Any], name: str, path: str) -> str | None:
    text = value.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise bad(f"{path}.{name}", text, "a string or null")
    return utf8(text, f"{path}.{name}")


def utf8(text: str, path: str) -> str:
    """Return the text if it is valid Unicode. Raises InvalidInput with the reason `malformed`."""
    if not text.isascii():
        try:
            utf8_bytes(text)
        except UnicodeEncodeError as error:
            raise InvalidInput.at(
                path, "has a lone surrogate, which is not valid Unicode", reason="malformed"
            ) from error
    return text


def token_ids(value: Any, path: str) -> tuple[int, ...]:
    """Return ids of the model's own tokens. The worker checks whether the vocabulary has them. Raises InvalidInput with
    the reason `schema`, `empty_item` or `bad_token_id`.
    """
    if not isinstance(value, list):
        raise bad(path, value, "a list of token ids")
    if not value:
        raise InvalidInput.at(path, "expected at least one token id", reason="empty_item")
    if set(map(type, value)) != {int}:
        value = list(map(whole_number, value))
    if set(map(type, value)) != {int}:
        index, wrong = next((index, token) for index, token in enumerate(value) if type(token) is not int)
        raise InvalidInput(f"{path}[{index}]: expected a token id, got {describe(wrong)}", reason="schema", param=path)
    if min(value) < 0 or max(value) >= 1 << 31:
        index, wrong = next((index, token) for index, token in enumerate(value) if not 0 <= token < 1 << 31)
        raise InvalidInput(
            f"{path}[{index}]: expected a token id from 0 to 2147483647, got {wrong}", reason="bad_token_id", param=path
        )
    return tuple(value)
