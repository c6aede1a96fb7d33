"""Bundles: dependency sets with a worker image of their own. Which of them can serve a model is said by its family.

family of a model, the bundle that it names ──► serving ──► bundles, the preferred one first
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sie_contracts.errors import BundleConflict, ValidationFailed
from sie_contracts.families import FAMILIES
from sie_contracts.names import in_words

DEFAULT = "default"
BUILT_IN = "built-in"  # in `families`: every row of `sie_contracts.families`
BUNDLE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")  # as SIE_BUNDLE takes it
_REQUIREMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\s*(\[[^\]]*\])?\s*([<>=!~(;].*)?$")


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the workers of one image have installed, and the models that this is enough for.

    `requires` are distributions as PEP 508 writes them: an adapter of the bundle that lacks one refuses to start.
    `families` are the families of models that it serves; none named is all of them, those of other packages too.
    Of several bundles that can serve a model the lowest `priority` is taken.
    """

    id: str
    priority: int = 0
    description: str = ""
    image: str = ""
    requires: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def serves(self, family: str) -> bool:
        return not self.families or family in self.families


def parse_bundle(raw: object) -> Bundle:
    """A checked bundle from decoded YAML or JSON, with the names of the families that `built-in` stands for. Raises
    ValidationFailed with `errors` naming the path.
    """
    try:
        bundle = msgspec.convert(raw, Bundle)
    except msgspec.ValidationError as error:
        message = in_words(str(error))
        text, at, loc = message.rpartition(" - at ")
        raise _invalid(loc.strip("`") if at else "$", text if at else message) from error
    if not BUNDLE_ID.fullmatch(bundle.id):
        raise _invalid("$.id", f"expected at most 63 small letters, digits, `.`, `_` and `-`, got {bundle.id[:100]!r}")
    for number, requirement in enumerate(bundle.requires):
        if not _REQUIREMENT.match(requirement):
            raise _invalid(
                f"$.requires[{number}]", f"expected a requirement such as `torch>=2.13`, got {requirement[:100]!r}"
            )
    return msgspec.structs.replace(bundle, families=tuple(dict.fromkeys(_named(bundle.families))))


def _named(families: Iterable[str]) -> Iterator[str]:
    for family in families:
        yield from FAMILIES if family == BUILT_IN else (family,)


def _invalid(loc: str, message: str) -> ValidationFailed:
    return ValidationFailed(f"{loc}: {message}", param=loc, extras={"errors": [{"loc": loc, "message": message}]})


def ordered(bundles: Mapping[str, Bundle]) -> list[Bundle]:
    """All of them, the preferred one first."""
    return sorted(bundles.values(), key=lambda bundle: (bundle.priority, bundle.id))


def serving(bundles: Mapping[str, Bundle], family: str, named: str = "") -> tuple[str, ...]:
    """The bundles that can serve a model of `family`, the preferred one first; of one that names a bundle no other."""
    if not bundles:  # of a catalogue without any, such as that of a single model
        return (named or DEFAULT,)
    return tuple(bundle.id for bundle in ordered(bundles) if bundle.serves(family) and named in ("", bundle.id))


def lacking(bundles: Mapping[str, Bundle], family: str, named: str = "") -> tuple[str, str]:
    """Why no bundle can serve a model, and what to do: the field that is at fault, and a sentence."""
    able = [bundle.id for bundle in ordered(bundles) if bundle.serves(family)]
    known = "; ".join(f"{bundle.id} has {', '.join(bundle.families) or 'every family'}" for bundle in ordered(bundles))
    if able and named:
        fault = (
            f"bundle {named[:100]!r} has no family {family[:100]!r}"
            if named in bundles
            else f"there is no bundle {named[:100]!r}"
        )
        return "$.bundle", f"{fault}; name {' or '.join(able)}, or none"
    return "$.family", f"no bundle can serve the family {family[:100]!r}: {known}"


def conflict(model: str, able: tuple[str, ...], wanted: str, why: str) -> BundleConflict:
    """A request for `model` that the `wanted` bundle does not serve, or that none does."""
    if able:
        message = (
            f"bundle {wanted[:100]!r} does not serve {model}; {' and '.join(able)} can: name one of these, or none"
        )
    else:
        message = f"{model} cannot be served: {why}"
    return BundleConflict(message, param="model", extras={"compatible_bundles": list(able)})
