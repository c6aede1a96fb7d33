"""Bundles: sets of dependencies, each with a worker image. The family of a model decides which bundles can serve it.

family of a model, the bundle that it names ──► serving ──► bundles, the preferred one first
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sie_contracts.errors import BundleConflict, ValidationFailed
from sie_contracts.models.families import FAMILIES
from sie_contracts.names import in_words

DEFAULT = "default"
BUILT_IN = "built-in"  # value in `families` for every row of FAMILIES that needs no separate environment
BUNDLE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")  # the form that SIE_BUNDLE accepts
_REQUIREMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\s*(\[[^\]]*\])?\s*([<>=!~(;].*)?$")


class BundleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Packages of one worker image, and the families that its workers can serve.

    `requires` are requirements in the form of PEP 508; an adapter that lacks one refuses to start. `families` are the
    families that the bundle serves; empty means all families, also those of other packages. If several bundles can
    serve a model, the one with the lowest `priority` is used.
    """

    id: str
    priority: int = 0
    description: str = ""
    image: str = ""
    requires: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def serves(self, family: str) -> bool:
        return not self.families or family in self.families


def parse_bundle(raw: object) -> BundleEntry:
    """Check decoded YAML or JSON and return the bundle; `built-in` is replaced by the names of the families. Raises
    ValidationFailed; its `errors` name the path.
    """
    try:
        bundle = msgspec.convert(raw, BundleEntry)
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
        if family == BUILT_IN:
            yield from (name for name, row in FAMILIES.items() if not row.extra)
        else:
            yield family


def _invalid(loc: str, message: str) -> ValidationFailed:
    return ValidationFailed(f"{loc}: {message}", param=loc, extras={"errors": [{"loc": loc, "message": message}]})


def ordered(bundles: Mapping[str, BundleEntry]) -> list[BundleEntry]:
    """Return all bundles, with the preferred bundle first."""
    return sorted(bundles.values(), key=lambda bundle: (bundle.priority, bundle.id))


def serving(bundles: Mapping[str, BundleEntry], family: str, named: str = "") -> tuple[str, ...]:
    """Return the bundles that can serve a model of `family`, the preferred bundle first. If the model names a bundle,
    only that bundle may serve it.
    """
    if not bundles:  # a catalogue without bundles, for example the catalogue of a single model
        return (named or DEFAULT,)
    return tuple(bundle.id for bundle in ordered(bundles) if bundle.serves(family) and named in ("", bundle.id))


def lacking(bundles: Mapping[str, BundleEntry], family: str, named: str = "") -> tuple[str, str]:
    """Return the reason why no bundle can serve a model, and the fix: the path of the wrong field, and a sentence."""
    able = [bundle.id for bundle in ordered(bundles) if bundle.serves(family)]
    families_of_bundles = "; ".join(
        f"{bundle.id} has {', '.join(bundle.families) or 'every family'}" for bundle in ordered(bundles)
    )
    if able and named:
        fault = (
            f"bundle {named[:100]!r} has no family {family[:100]!r}"
            if named in bundles
            else f"there is no bundle {named[:100]!r}"
        )
        return "$.bundle", f"{fault}; name {' or '.join(able)}, or none"
    return "$.family", f"no bundle can serve the family {family[:100]!r}: {families_of_bundles}"


def conflict(model: str, able: tuple[str, ...], requested: str, why: str) -> BundleConflict:
    """Return the error for a model that the `requested` bundle does not serve, or that no bundle serves."""
    if able:
        message = (
            f"bundle {requested[:100]!r} does not serve {model}; {' and '.join(able)} can: name one of these, or none"
        )
    else:
        message = f"{model} cannot be served: {why}"
    return BundleConflict(message, param="model", extras={"compatible_bundles": list(able)})
