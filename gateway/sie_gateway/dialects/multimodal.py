"""Inputs with images and sounds in the formats of other APIs. An input is one image, one sound, an object with a text,
images or both, or a list of parts: texts, images and at most one sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import fields
from sie_gateway.inference import images
from sie_gateway.inference.body import RequestItem


def pictured(text: str | None, entries: Sequence[tuple[str, Any]], path: str) -> RequestItem:
    """Build an input with images. `entries`: the path in the body and the value of each image. Raises InvalidInput."""
    files, fault, links = images.gather(entries, path)
    return RequestItem(text, modalities=("image",), images=files, unfit=fault, links=links)


def image(value: Any, path: str) -> RequestItem:
    """Build an input that consists of one image. Raises InvalidInput."""
    return pictured(None, [(path, value)], path)


def sound(value: Any, path: str) -> RequestItem:
    """Build an input that consists of one sound. Raises InvalidInput."""
    return _with_audio(RequestItem(None), value, path)


def _with_audio(item: RequestItem, value: Any, path: str) -> RequestItem:
    file, fault = images.read_sound(value, path)
    return msgspec.structs.replace(item, modalities=(*item.modalities, "audio"), audio=file, unfit=item.unfit or fault)


def parts(value: Any, path: str) -> RequestItem:
    """Build one input from a list of parts. The texts of the parts are joined by line breaks. Raises InvalidInput."""
    return _joined(_placed(value, path), path)


def conversation(value: Any, path: str, limit: int) -> tuple[tuple[RequestItem, ...], str]:
    """Return (a tuple of one input, made from the messages of a chat; its instruction). The instruction is the text of
    the messages with the role `system` or `developer`. Raises InvalidInput.
    """
    contents: list[tuple[str, Any]] = []
    instructions: list[tuple[str, Any]] = []
    for index, message in enumerate(fields.inputs(value, path, limit)):
        where = f"{path}[{index}]"
        if not isinstance(message, dict):
            raise bad(where, message, "a map with role and content")
        content = message.get("content")
        places = [(f"{where}.content", {"type": "text", "text": content})]
        entries = places if isinstance(content, str) else _placed(content, f"{where}.content")
        (instructions if message.get("role") in ("system", "developer") else contents).extend(entries)
    contents = [(where, part) for where, part in contents if part != {"type": "text", "text": ""}]
    if not contents:
        raise InvalidInput.at(path, "expected a message of a user with a text or an image", reason="empty_item")
    return (_joined(contents, path),), (_joined(instructions, path).text or "") if instructions else ""


def _placed(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return (path, part) of each part in a list."""
    if not isinstance(value, list) or not value:
        raise bad(path, value, "a list of parts")
    return [(f"{path}[{index}]", part) for index, part in enumerate(value)]


def _joined(entries: Sequence[tuple[str, Any]], path: str) -> RequestItem:
    texts: list[str] = []
    images: list[tuple[str, Any]] = []
    sounds: list[tuple[Any, str]] = []
    for where, part in entries:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(fields.string(part.get("text"), f"{where}.text"))
        elif kind == "image_url":
            images.append(address(part, where))
        elif kind in ("input_audio", "audio_url") and not sounds:
            sounds.append(_sound(part, kind, where))
        else:
            raise bad(f"{where}.type", kind, "text, image_url, or at most one input_audio or audio_url")
    text = "\n".join(texts) if texts else None
    item = pictured(text, images, path) if images else RequestItem(text)
    return _with_audio(item, *sounds[0]) if sounds else item


def _sound(part: fields.Body, kind: str, path: str) -> tuple[Any, str]:
    source, name = part.get(kind), "data" if kind == "input_audio" else "url"
    return (source.get(name), f"{path}.{kind}.{name}") if isinstance(source, dict) else (source, f"{path}.{kind}")


def address(part: fields.Body, path: str) -> tuple[str, Any]:
    """Return the path in the body, and the URL, of the image in a part of type `image_url`."""
    value = part.get("image_url")
    return (f"{path}.image_url.url", value.get("url")) if isinstance(value, dict) else (f"{path}.image_url", value)


def item(value: fields.Body, path: str, *names: str) -> RequestItem:
    """Build an input from a map with a text, with images in the fields `names`, or with both. Raises InvalidInput."""
    text = value.get("text")
    images = [(f"{path}.{name}", value[name]) for name in names if value.get(name) is not None]
    if text is not None or not images:
        fields.string(text, f"{path}.text")
    return pictured(text, images, path) if images else RequestItem(text)
