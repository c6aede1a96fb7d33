"""Reads messages by the types of another version. Its `sie_contracts` is the one on PYTHONPATH.

Standard input: msgpack {name: [bytes of a message, ...]}. Standard output: msgpack {name: Read}. A struct becomes
[its tag, {field: value}]; what cannot be read becomes the text of its error.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

import sie_contracts


class Read(msgspec.Struct):
    """`required`: field -> whether it has no default. `values`: each of the messages. Both are empty for a kind of
    message that this version does not have.
    """

    required: dict[str, bool] = {}
    values: list[Any] = []


def structs() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.iter_modules(sie_contracts.__path__, "sie_contracts."):
        if not module.ispkg:
            importlib.import_module(module.name)
    waiting = [msgspec.Struct]
    while waiting:
        found = waiting.pop().__subclasses__()
        yield from found
        waiting += found


def plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return [value.__struct_config__.tag, fields]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def read(codec: Any, message: bytes, kind: type[msgspec.Struct]) -> Any:
    try:
        return plain(codec.decode(message, type=kind))
    except msgspec.ValidationError as error:
        return str(error)


def main() -> None:
    kinds = {kind.__struct_config__.tag or kind.__name__: kind for kind in structs()}
    found = {}
    for name, messages in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=dict[str, list[bytes]]).items():
        codec: Any = msgspec.json if name.startswith("export") else msgspec.msgpack
        kind = kinds.get(codec.decode(messages[0]).get("type", "ConfigExport"))
        if kind is None:
            found[name] = Read()
        else:
            required = {field.name: field.required for field in msgspec.structs.fields(kind)}
            found[name] = Read(required, [read(codec, each, kind) for each in messages])
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
