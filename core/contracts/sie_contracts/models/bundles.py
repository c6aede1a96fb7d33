"""Bundles: sets of Python dependencies, each with its own worker image. The family of a model decides which bundles can
serve the model.

    family of a model, bundle that the model names ──► serving ──► bundles, the preferred one first
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from sie_contracts.errors import BundleConflict, faulty
from sie_contracts.models import families
from sie_contracts.names import located
from sie_contracts.plain import struct_of

DEFAULT = "default"
BUILT_IN = "built-in"  # value in `families` that means all families without extra dependencies
# allowed form of a bundle's id, in the catalogue and in SIE_BUNDLE
BUNDLE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_REQUIREMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\s*(\[[^\]]*\])?\s*([<>=!~(;].*)?$")


class BundleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A bundle: the packages of one worker image, and the families of models that its workers can serve.

    `requires`: packages in the form of PEP 508; an adapter process that lacks one of these packages does not start.
    `families`: families that the bundle serves; empty means all, including families that other packages define. If
    several bundles can serve a model, the bundle with the lowest `priority` is preferred.
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
    """Check a document from YAML or JSON and return the bundle. The names of the built-in families replace `built-in`
    in `families`. Raises ValidationFailed for the first faulty field; its `errors` have the path of this field.
    """
    try:
        bundle = struct_of(raw, BundleEntry)
    except msgspec.ValidationError as error:
        raise faulty(*located(str(error))) from error
    if not BUNDLE_ID.fullmatch(bundle.id):
        raise faulty("$.id", f"expected 1 to 63 characters a-z, 0-9, `.`, `_` and `-`, got {bundle.id[:100]!r}")
    for number, requirement in enumerate(bundle.requires):
        if not _REQUIREMENT.match(requirement):
            raise faulty(
                f"$.requires[{number}]", f"expected a requirement such as `torch>=2.13`, got {requirement[:100]!r}"
            )
    built_in = [name for name, row in families.rows().items() if not row.extra]
    names = [name for family in bundle.families for name in (built_in if family == BUILT_IN else [family])]
    return msgspec.structs.replace(bundle, families=tuple(dict.fromkeys(names)))


def ordered(bundles: Mapping[str, BundleEntry]) -> list[BundleEntry]:
    """Return all bundles, the preferred one first."""
    return sorted(bundles.values(), key=lambda bundle: (bundle.priority, bundle.id))


def serving(bundles: Mapping[str, BundleEntry], family: str, named: str = "") -> tuple[str, ...]:
    """Return the bundles that can serve `family`, the preferred bundle first. If `named` is not empty, return only the
    bundle of this name, or nothing if this bundle cannot serve `family`.
    """
    if not bundles:  # the catalogue of a process that serves one model has no bundles
        return (named or DEFAULT,)
    return tuple(bundle.id for bundle in ordered(bundles) if bundle.serves(family) and named in ("", bundle.id))


def lacking(bundles: Mapping[str, BundleEntry], family: str, named: str = "") -> tuple[str, str]:
    """Return (path of the wrong field, error message with the possible names) for a model that no bundle can serve."""
    able = [bundle.id for bundle in ordered(bundles) if bundle.serves(family)]
    families_of_bundles = "; ".join(
        f"{bundle.id} has {', '.join(bundle.families) or 'every family'}" for bundle in ordered(bundles)
    )
    if able and named:
        fault = f"there is no bundle {named[:100]!r}"
        if named in bundles:
            fault = f"bundle {named[:100]!r} has no family {family[:100]!r}"
        return "$.bundle", f"{fault}; name {' or '.join(able)}, or none"
    return "$.family", f"no bundle can serve the family {family[:100]!r}: {families_of_bundles}"


def conflict(model: str, able: tuple[str, ...], requested: str, why: str) -> BundleConflict:
    """Return the error for a model that the `requested` bundle does not serve, or that no bundle serves."""
    if able:
        message = (
            f"bundle {requested[:100]!r} does not serve {model}: name the bundle {' or '.join(able)}, or no bundle"
        )
    else:
        message = f"{model} cannot be served: {why}"
    return BundleConflict(message, param="model", extras={"compatible_bundles": list(able)})
