"""The document of SIE_REMOTES: remote servers, each with the model whose requests it may get."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import httpx
import msgspec

from sie_contracts.schema_faults import fault_line
from sie_contracts.settings import SettingError
from sie_contracts.url_names import quoted

SETTING = "SIE_REMOTES"
MAX_REMOTES = 8
MAX_FILE_BYTES = 1 << 20


class RemoteServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A remote server for a model. `served_model`: name of the model at the server. `token_env`: environment variable
    with the server's bearer token. `timeout_s`: longest time for one call.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    model: Annotated[str, msgspec.Meta(min_length=1)]
    kind: Literal["sie", "tei", "openai"]
    url: str
    monthly_tokens: Annotated[int, msgspec.Meta(ge=1)]
    served_model: str = ""
    token_env: str = ""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0


class _RemotesDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    remotes: Annotated[tuple[RemoteServer, ...], msgspec.Meta(max_length=MAX_REMOTES)]


def read_remotes(value: str) -> tuple[RemoteServer, ...]:
    """Return the remote servers. `value`: the path of a YAML file, or a JSON document. Raises SettingError."""
    from sie_contracts import yaml_text  # needs 2 MB, so only a gateway with remote servers imports it

    path, raw = "the document", value.encode()
    try:
        if not value.startswith("{"):
            path = value
            with Path(path).open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise SettingError(SETTING, f"{path}: more than {MAX_FILE_BYTES} bytes")
        servers = msgspec.convert(yaml_text.load(raw), _RemotesDocument).remotes
    except msgspec.ValidationError as error:
        raise SettingError(SETTING, f"{path}: {fault_line(_RemotesDocument, error)}") from error
    except (OSError, yaml_text.NotYAML) as error:
        raise SettingError(SETTING, f"{path}: {error}") from error
    names = [server.name for server in servers]
    for server in servers:
        if fault := _fault(server):
            raise SettingError(SETTING, f"{path}: remote {server.name}: {fault}")
        if names.count(server.name) > 1:
            raise SettingError(SETTING, f"{path}: two remotes are named {server.name}")
    return servers


def _fault(server: RemoteServer) -> str:
    """Return the error of a name or URL, or an empty text. The error does not quote the URL: it may have a password."""
    if server.name == "local":
        return "name: the name `local` means this cluster; choose another name"
    try:
        parsed = httpx.URL(server.url)
    except httpx.InvalidURL:
        return "url: not a URL"
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return "url: expected http://HOST or https://HOST"
    if parsed.userinfo or parsed.query or parsed.fragment:
        return "url: expected no credentials, query or fragment; token_env names the variable that holds the token"
    try:  # only servers of SIE get the model name in the path
        if server.kind == "sie":
            quoted(server.served_model or server.model, "served_model" if server.served_model else "model")
    except ValueError as error:
        return str(error)
    return ""
