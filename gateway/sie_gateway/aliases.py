"""Aliases at the gateway: by which key a call keeps its target, and how they are listed."""

from __future__ import annotations

from typing import Any

from sie_contracts.aliases import Alias
from sie_contracts.catalogue import Catalogue
from sie_contracts.errors import BundleConflict, InvalidInput, ModelNotFound
from sie_gateway.call import Call
from sie_gateway.fleet import Fleet

ROUTE_KEY = "X-SIE-Route-Key"
MAX_KEY_CHARS = 128
_HEADER = ROUTE_KEY.lower()


def route_key(call: Call | None) -> str:
    """What of a call always gets the same target of an alias: its X-SIE-Route-Key, else its API key, else the address
    of its client.

    A named one counts whoever sends it, so the writer and the readers of an index can agree on one. Empty for nobody's
    call, which gets the heaviest target. Raises InvalidInput.
    """
    if call is None:
        return ""
    named = call.headers.get(_HEADER, "")
    if not named:
        return f"key {call.key}" if call.key else f"client {call.client}"
    if len(named) > MAX_KEY_CHARS or not (named.isascii() and named.isprintable()):
        message = (
            f"{ROUTE_KEY}: expected at most {MAX_KEY_CHARS} printable ASCII characters, got {len(named)} characters"
        )
        raise InvalidInput(message, reason="schema", param=ROUTE_KEY)
    return f"named {named}"


def alias_info(info: dict[str, Any], alias: Alias) -> dict[str, Any]:
    """A ModelInfo of the model that serves most keys of an alias, as that of the alias: under its name, with all that
    it names.
    """
    told: dict[str, Any] = {"targets": [{"model": target.model, "weight": target.weight} for target in alias.alias]}
    if alias.shadow is not None:
        told["shadow"] = {"model": alias.shadow.model, "share": alias.shadow.share}
    rest = {name: value for name, value in info.items() if name not in ("variant_of", "owned_by")}
    return {**rest, "name": alias.id, "id": alias.id, "owned_by": alias.id.partition("/")[0], "alias": told}


def alias_infos(catalogue: Catalogue, fleet: Fleet) -> list[dict[str, Any]]:
    """Those that can serve, in order of name: one whose model is gone is not listed."""
    from sie_gateway.models import model_info

    found = []
    for _, alias in sorted(catalogue.aliases.items()):
        try:
            resolved = catalogue.resolve(alias.heaviest.model, follow=False)
        except (ModelNotFound, BundleConflict):
            continue
        found.append(alias_info(model_info(catalogue, fleet, resolved.entry, resolved.profile), alias))
    return found
