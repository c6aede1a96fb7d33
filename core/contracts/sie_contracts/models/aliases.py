"""Aliases: additional names of models. This module has the structs of an alias, the choice of a target by the key of a
request, and the check of a document.

    {id: search, alias: BAAI/bge-m3@<commit>}                           one target
    {id: search, alias: [{model: A, weight: 90}, {model: B, weight: 10}]}     each request key keeps its target
    {id: search, alias: A, shadow: {model: B, share: 0.1}}              B gets copies of 10 % of the requests; the
                                                                        answers of B are dropped

An alias is a document of the catalogue, like a model: it is written, stored, rolled back, exported and broadcast in the
same way. The id of an alias differs from all ids of models. A target names a model by id, and perhaps by revision and
profile. A target never names an alias.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from sie_contracts.errors import faulty
from sie_contracts.names import located
from sie_contracts.plain import struct_of

MAX_TARGETS = 8
MAX_WEIGHT = 1_000_000
_HASH_BYTES = 8
# top-level fields of a model, which an alias does not have
_OF_MODELS = frozenset({"weights", "family", "outputs", "max_tokens"})


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A target of an alias: a model with a `weight`. Of all request keys, a target gets the share `weight` / (sum of
    all weights). `model` has the form `id[@revision][:profile]`.
    """

    model: str
    weight: int = 1


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that gets copies of a share of the requests. Its answers are compared with the target's, then dropped."""

    model: str
    share: float = 1.0


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An additional name for one or more models. `force` allows targets whose results cannot be mixed."""

    id: str
    alias: tuple[Target, ...]
    shadow: Shadow | None = None
    force: bool = False
    description: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of all models in the alias, including the shadow, as they are written in the document."""
        return (*(target.model for target in self.alias), *(() if self.shadow is None else (self.shadow.model,)))

    @property
    def heaviest(self) -> Target:
        """Return the first target with the largest weight. Requests without a key use this target."""
        return max(self.alias, key=lambda target: target.weight)


def is_alias(raw: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(raw, Mapping) and "alias" in raw


def parse_alias(raw: Mapping[str, Any]) -> Alias:
    """Check a document from YAML or JSON and return the alias. Raises ValidationFailed for the first faulty field; its
    `errors` have the path of this field. The id is not checked here.

    A string in place of a target is a model with weight 1; a string in place of a shadow is a model with share 1.
    """
    if both := sorted(raw.keys() & _OF_MODELS):
        message = (
            f"a document is a model or an alias, but this document has {both[0]} too: give the alias its own document, "
            "with another id"
        )
        raise faulty("$.alias", message)
    alias = raw["alias"]
    targets = [alias] if isinstance(alias, str | dict) else alias
    plain: dict[str, Any] = {
        **raw,
        "alias": [_named(target) for target in targets] if isinstance(targets, list | tuple) else targets,
    }
    if "shadow" in plain:
        plain["shadow"] = _named(plain["shadow"])
    try:
        parsed = struct_of(plain, Alias)
    except msgspec.ValidationError as error:
        raise faulty(*located(str(error))) from error
    if not 1 <= len(parsed.alias) <= MAX_TARGETS:
        raise faulty("$.alias", f"expected from 1 to {MAX_TARGETS} targets, got {len(parsed.alias)}")
    for number, target in enumerate(parsed.alias):
        if not 1 <= target.weight <= MAX_WEIGHT:
            message = (
                f"expected a weight from 1 to {MAX_WEIGHT}, got {target.weight}; a target without requests must be "
                "left out"
            )
            raise faulty(f"$.alias[{number}].weight", message)
        if _key_name(target.model) in {_key_name(earlier_target.model) for earlier_target in parsed.alias[:number]}:
            raise faulty(
                f"$.alias[{number}].model",
                f"{target.model[:200]!r} is named twice: name it once, with one weight",
            )
    if parsed.shadow is not None and not 0 < parsed.shadow.share <= 1:
        message = (
            f"expected a share above 0, at most 1, got {parsed.shadow.share:g}; to have no shadow, leave `shadow` out"
        )
        raise faulty("$.shadow.share", message)
    return parsed


def _named(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


def _key_name(model: str) -> str:
    """Return the target's name without its revision. `choose` hashes this name, so that a new revision of a target does
    not change the target of any request key.
    """
    name, at, tail = model.partition("@")
    return name + (":" + tail.partition(":")[2] if at and ":" in tail else "")


def choose(alias: Alias, key: str) -> Target:
    """Return the target of an alias for `key`, the request key: the header X-SIE-Route-Key, otherwise the API key or
    the address of the client. All gateways choose the same target for a key. Over many keys, the share of a target is
    proportional to its weight.

    The method is weighted rendezvous hashing: if the weight of a target rises, keys move only to this target. The hash
    includes the id of the alias, so that the targets of a key in two aliases are independent.
    """
    if len(alias.alias) == 1:
        return alias.alias[0]
    if not key:
        return alias.heaviest
    return max(
        alias.alias, key=lambda target: -target.weight / math.log(_uniform(alias.id, _key_name(target.model), key))
    )


def _uniform(*parts: str) -> float:
    """Return a number above 0 and below 1: a hash of the parts and their lengths. The lengths make ("ab", "c") and
    ("a", "bc") different.
    """
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    # A float has 53 bits of precision. With 64 bits, the largest values would be rounded to 1. Then `choose` would
    # divide by log(1), which is 0.
    return ((int.from_bytes(digest.digest(), "big") >> 11) + 0.5) / (1 << 53)


def model_of(spec: str) -> str:
    """Return the case-folded id in a target's name, without bundle, revision and profile. No id contains `@` or `:`."""
    name = spec.partition(":/")[2] or spec
    return name.partition("@")[0].partition(":")[0].casefold()
