"""File of `sie mcp --config`: default models, and the collections that agents may search."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sie_bulk_jobs.sinks.sink import checked_name
from sie_contracts import yaml_text
from sie_contracts.schema_faults import fault_line
from sie_contracts.settings import SettingError
from sie_store.object_stores import StoreError

EVERY_KEY = "*"


class DefaultModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models that the tools use if a call names no model. For an empty name, a tool uses the only suitable model."""

    encode: str = ""
    rerank: str = ""
    extract: str = ""
    redact: str = ""
    parse: str = ""


class SearchCollection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collection of a vector database. `store`: the database's name in SIE_JOBS_SINKS. `model`: the model that
    encoded the rows. `fields`: the fields of a row that agents may read; empty for all.

    `keys`: names of the API keys that may search the collection over HTTP; `*` for every key. `GET /v1/whoami` shows
    the name of a key.
    """

    store: str
    collection: str
    model: str
    description: str
    fields: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def is_open_to(self, key_name: str | None) -> bool:
        """Return whether a caller may search the collection. `key_name`: None for the user of this process."""
        return key_name is None or EVERY_KEY in self.keys or key_name in self.keys


class McpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file that `sie mcp --config` names. `collections`: name that agents use -> collection."""

    models: DefaultModels = DefaultModels()
    collections: dict[str, SearchCollection] = {}


def read(path: Path | None) -> McpConfig:
    """Return the content of the file, or defaults if `path` is None. Raises SettingError."""
    if path is None:
        return McpConfig()
    try:
        config = msgspec.convert(yaml_text.load(path.read_bytes()) or {}, McpConfig)
        for collection in config.collections.values():
            checked_name(collection.collection)
    except OSError as error:
        raise SettingError("--config", f"{path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise SettingError("--config", f"{path}: {fault_line(McpConfig, error)}") from error
    except (yaml_text.NotYAML, StoreError) as error:
        raise SettingError("--config", f"{path}: {error}") from error
    return config
