"""Names that stand for models: what an alias says, which of its targets serves a key, and what it may not say.

    {id: search, alias: BAAI/bge-m3@<commit>}                           one target; another one is one write
    {id: search, alias: [{model: A, weight: 90}, {model: B, weight: 10}]}     each key keeps its target
    {id: search, alias: A, shadow: {model: B, share: 0.1}}              B is measured beside A and answers nobody

An alias is a document of the catalogue beside those of models: written, kept, rolled back, exported and broadcast like
one. Its id is no model's. Targets are models, by id with the revision and the profile that they must have where one is
named, never aliases.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from sie_contracts.errors import SIEError, ValidationFailed
from sie_contracts.names import in_words

if TYPE_CHECKING:
    from sie_contracts.catalogue import Catalogue, Resolved

MAX_TARGETS = 8
MAX_WEIGHT = 1_000_000
_HASH_BYTES = 8
_OF_MODELS = frozenset({"weights", "family", "outputs", "max_tokens"})  # what every model has


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that serves `weight` parts of the keys: `model[@revision][:profile]`."""

    model: str
    weight: int = 1


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that gets a copy of a share of the requests. Its results are measured and dropped."""

    model: str
    share: float = 1.0


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name for one or more models. `force` lets targets stand beside each other whose results are not alike."""

    id: str
    alias: tuple[Target, ...]
    shadow: Shadow | None = None
    force: bool = False
    description: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        """All that it names, the shadow included, as it names them."""
        return (*(target.model for target in self.alias), *(() if self.shadow is None else (self.shadow.model,)))

    @property
    def heaviest(self) -> Target:
        """The target of most keys, the first of equals: what stands for the alias where there is no key."""
        return max(self.alias, key=lambda target: target.weight)


def is_alias(raw: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a decoded document is meant as an alias."""
    return isinstance(raw, Mapping) and "alias" in raw


def parse_alias(raw: Mapping[str, Any]) -> Alias:
    """A checked alias from decoded YAML or JSON, the form of its id apart. Raises ValidationFailed with `errors` naming
    the path.

    A target without a weight, and a shadow of all requests, may be written as the name alone.
    """
    if both := sorted(raw.keys() & _OF_MODELS):
        message = (
            f"a document is a model or an alias, and this has {both[0]} too: an alias is a document of its own, under "
            "another id"
        )
        raise _invalid("$.alias", message)
    alias = raw["alias"]
    targets = [alias] if isinstance(alias, str | dict) else alias
    plain: dict[str, Any] = {
        **raw,
        "alias": [_named(each) for each in targets] if isinstance(targets, list | tuple) else targets,
    }
    if "shadow" in plain:
        plain["shadow"] = _named(plain["shadow"])
    try:
        found = msgspec.convert(plain, Alias)
    except msgspec.ValidationError as error:
        message = in_words(str(error))
        text, at, where = message.rpartition(" - at ")
        raise _invalid(where.strip("`") if at else "$", text if at else message) from error
    if not 1 <= len(found.alias) <= MAX_TARGETS:
        raise _invalid("$.alias", f"expected from 1 to {MAX_TARGETS} targets, got {len(found.alias)}")
    for number, target in enumerate(found.alias):
        if not 1 <= target.weight <= MAX_WEIGHT:
            message = (
                f"expected a weight from 1 to {MAX_WEIGHT}, got {target.weight}; a target that is to serve nobody is "
                "left out"
            )
            raise _invalid(f"$.alias[{number}].weight", message)
        if _key_name(target.model) in {_key_name(other.model) for other in found.alias[:number]}:
            raise _invalid(f"$.alias[{number}].model", f"{target.model[:200]!r} is named twice; give it one weight")
    if found.shadow is not None and not 0 < found.shadow.share <= 1:
        message = (
            f"expected a share above 0, at most 1, got {found.shadow.share:g}; without a shadow leave `shadow` out"
        )
        raise _invalid("$.shadow.share", message)
    return found


def _named(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


def _key_name(model: str) -> str:
    """A target by what keys go by: its revision apart, so that a new one moves nobody."""
    name, at, tail = model.partition("@")
    return name + (":" + tail.partition(":")[2] if at and ":" in tail else "")


def choose(alias: Alias, key: str) -> Target:
    """The target of a key: always the same one, on every gateway, in proportion to the weights over many keys.

    Weighted rendezvous hashing: a target whose weight rises wins keys and loses none; which keys those are differs from
    alias to alias.
    """
    if len(alias.alias) == 1:
        return alias.alias[0]
    if not key:
        return alias.heaviest
    return max(
        alias.alias, key=lambda target: -target.weight / math.log(_uniform(alias.id, _key_name(target.model), key))
    )


def _uniform(*parts: str) -> float:
    """A number above 0 and below 1, by a hash of texts, none of which can pass for two."""
    found = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        data = part.encode()
        found.update(len(data).to_bytes(4, "big") + data)
    # 53 bits, the precision of a float: with all 64 the largest values would round to 1, whose logarithm is 0
    return ((int.from_bytes(found.digest(), "big") >> 11) + 0.5) / (1 << 53)


def resolve_all(catalogue: Catalogue, spec: str) -> tuple[Resolved, ...]:
    """All models that a name may mean: of an alias each of its targets, the heaviest first. Raises ModelNotFound,
    BundleConflict.
    """
    found = catalogue.resolve(spec)
    targets = sorted(catalogue.aliases[found.alias].alias, key=lambda target: -target.weight) if found.alias else ()
    return (found, *(catalogue.resolve(target.model, follow=False) for target in targets[1:]))


def check(alias: Alias, catalogue: Catalogue) -> None:
    """Whether the alias holds in a catalogue: no model has its id, its targets are models that are there, and their
    results are alike.

    Raises ValidationFailed naming the field and the fix. Encoders are alike where what they make of a text is the same
    by their entries (`Resolved.numbers`); of what is not known, nothing is assumed. `force` waives likeness, nothing
    else.
    """
    folded = alias.id.casefold()
    if taken := next((model for model in catalogue.entries if model.casefold() == folded), None):
        message = f"a model has the id {taken!r}: give the alias another one, or remove the model first"
        raise _invalid("$.id", message)
    if twin := next((other for other in catalogue.aliases if other.casefold() == folded and other != alias.id), None):
        raise _invalid("$.id", f"the alias {twin!r} differs in case alone: give this one another id")
    targets = [
        _target(catalogue, alias, target.model, f"$.alias[{number}].model") for number, target in enumerate(alias.alias)
    ]
    if alias.shadow is not None:
        shadow = _target(catalogue, alias, alias.shadow.model, "$.shadow.model")
        if not set(shadow.entry.tasks) & set(targets[0].entry.tasks):
            raise _invalid(
                "$.shadow.model",
                f"{shadow.entry.id} does {_verbs(shadow)}, but {targets[0].entry.id} {_verbs(targets[0])}",
            )
        if any(shadow.canonical == target.canonical for target in targets):
            raise _invalid("$.shadow.model", f"{shadow.canonical} is a target of the alias already: name another model")
    if not alias.force:
        _check_alike(targets, catalogue)


def _target(catalogue: Catalogue, alias: Alias, model: str, loc: str) -> Resolved:
    """A target, resolved. Raises ValidationFailed."""
    if model_of(model) == alias.id.casefold():
        raise _invalid(loc, f"{model[:200]!r} is this alias itself: name a model")
    try:
        resolved = catalogue.resolve(model)
    except SIEError as error:
        hints = error.extras.get("suggestions") or error.extras.get("revisions") or ()
        hint = f"; there is {', '.join(map(str, hints))}" if hints else "; `sie models list` shows what is there"
        if error.extras.get("profiles"):  # the message names them
            hint = ""
        raise _invalid(loc, f"{error.message}{hint}") from error
    if resolved.alias:
        raise _invalid(loc, f"{model[:200]!r} is an alias, and an alias names models: name {resolved.canonical!r}")
    return resolved


def _check_alike(targets: list[Resolved], catalogue: Catalogue) -> None:
    """Raises ValidationFailed where answers of one target cannot stand beside those of another."""
    first = targets[0]
    for number, other in enumerate(targets[1:], 1):
        loc = f"$.alias[{number}].model"
        if set(other.entry.tasks) != set(first.entry.tasks):
            message = (
                f"{other.entry.id} does {_verbs(other)}, but {first.entry.id} {_verbs(first)}: some keys would get "
                "errors; "
            )
            raise _invalid(loc, message + _FORCE)
        one, two = _numbers(first, catalogue), _numbers(other, catalogue)
        if "encode" not in first.entry.tasks or (one == two and all(one.values())):
            continue
        differ = "differ from those of" if all((*one.values(), *two.values())) else "are not known to be those of"
        message = (
            f"the vectors of {other.canonical} {differ} {first.canonical}, and an index must not mix vectors: {_FIX}; "
        )
        raise _invalid(loc, message + _FORCE)


def _numbers(resolved: Resolved, catalogue: Catalogue) -> dict[str, str]:
    """`Resolved.numbers` by each profile that a request through an alias may name: all of them where its target names
    none.
    """
    names = resolved.entry.profiles if resolved.profile == "default" else ()
    return {
        "": resolved.numbers,
        **{name: catalogue.resolve_profile(resolved.entry, name, name).numbers for name in names},
    }


_FORCE = "`force: true` on the alias does it nevertheless"
_FIX = "name one target and give the other as `shadow`, or make a new index and flip"


def _verbs(resolved: Resolved) -> str:
    return ", ".join(resolved.entry.tasks) or "nothing"


def changes_vectors(before: Alias, after: Alias, catalogue: Catalogue) -> bool:
    """Whether an index that was made through `before` cannot be used through `after`, or is not known to be usable."""
    try:
        former = {_target(catalogue, before, each.model, "$").numbers for each in before.alias}
        found = [_target(catalogue, after, each.model, "$") for each in after.alias]
    except ValidationFailed:  # a former target that is gone: what its vectors were is not known
        return True
    return any("encode" in each.entry.tasks and (not each.numbers or {each.numbers} != former) for each in found)


def model_of(spec: str) -> str:
    """The id that a target names, folded: in whatever case, bundle, revision or profile. Ids hold
    neither `@` nor `:`.
    """
    name = spec.partition(":/")[2] or spec
    return name.partition("@")[0].partition(":")[0].casefold()


def _invalid(loc: str, message: str) -> ValidationFailed:
    return ValidationFailed(f"{loc}: {message}", param=loc, extras={"errors": [{"loc": loc, "message": message}]})
