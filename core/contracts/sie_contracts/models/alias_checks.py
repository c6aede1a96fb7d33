"""Checks of aliases against a catalogue: the targets exist, and the results of several targets can be mixed."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec

from sie_contracts.errors import ModelNotFound, SIEError, ValidationFailed, faulty
from sie_contracts.models.aliases import Alias, model_of
from sie_contracts.models.catalogue import Catalogue, Resolved

_FORCE = "`force: true` in the alias allows it"
_FIX = "name one target and give the other as `shadow`, or make a new index and then change the target"


def resolve_all(catalogue: Catalogue, spec: str) -> tuple[Resolved, ...]:
    """Return all models to which a name may resolve: one model, or for an alias all its targets, the target with the
    largest weight first. Targets that lack the revision or the profile in `spec` are left out. Raises ModelNotFound,
    BundleConflict.
    """
    resolved = catalogue.resolve(spec)
    if not resolved.alias:
        return (resolved,)
    alias = catalogue.aliases[resolved.alias]
    further = []
    for target in sorted(alias.alias, key=lambda target: -target.weight)[1:]:
        with contextlib.suppress(ModelNotFound):
            alone = {alias.id: msgspec.structs.replace(alias, alias=(target,))}
            further.append(dataclasses.replace(catalogue, aliases=alone).resolve(spec))
    return (resolved, *further)


def check(alias: Alias, catalogue: Catalogue) -> None:
    """Check an alias against a catalogue. Its id must not be the id of a model or of another alias. The targets and the
    shadow must exist, the shadow and the first target must have a task in common, and it must be possible to mix the
    results of the targets, for example in one index.

    Raises ValidationFailed with the field and the fix. Vectors of two encoders can be mixed only if the alias has
    `force: true`, or if the entries of the encoders prove that both compute the same numbers (`Resolved.numbers`).
    """
    folded = alias.id.casefold()
    if model_id := next((model for model in catalogue.entries if model.casefold() == folded), None):
        message = f"a model has the id {model_id!r}: give the alias another id, or remove the model first"
        raise faulty("$.id", message)
    if twin := next(
        (alias_id for alias_id in catalogue.aliases if alias_id.casefold() == folded and alias_id != alias.id), None
    ):
        raise faulty("$.id", f"the existing alias {twin!r} differs only in case: give the new alias another id")
    targets = [
        _target(catalogue, alias, target.model, f"$.alias[{number}].model") for number, target in enumerate(alias.alias)
    ]
    if alias.shadow is not None:
        shadow = _target(catalogue, alias, alias.shadow.model, "$.shadow.model")
        if not set(shadow.entry.tasks) & set(targets[0].entry.tasks):
            raise faulty(
                "$.shadow.model",
                f"{shadow.entry.id} does {_verbs(shadow)}, but {targets[0].entry.id} does {_verbs(targets[0])}: "
                "name another model",
            )
        if any(shadow.canonical == target.canonical for target in targets):
            raise faulty("$.shadow.model", f"{shadow.canonical} is a target of the alias already: name another model")
    if not alias.force:
        _check_alike(targets, catalogue)


def _target(catalogue: Catalogue, alias: Alias, model: str, loc: str) -> Resolved:
    """Return the model to which a target of the alias resolves. Raises ValidationFailed with the field and the fix."""
    if model_of(model) == alias.id.casefold():
        raise faulty(loc, f"{model[:200]!r} is this alias itself: name a model")
    try:
        resolved = catalogue.resolve(model)
    except SIEError as error:
        hints = error.extras.get("suggestions") or error.extras.get("revisions") or ()
        hint = f"; there is {', '.join(map(str, hints))}" if hints else "; `sie models list` shows all models"
        if error.extras.get("profiles"):  # the message already lists the profiles
            hint = ""
        raise faulty(loc, f"{error.message}{hint}") from error
    if resolved.alias:
        raise faulty(loc, f"{model[:200]!r} is an alias, but a target must be a model: name {resolved.canonical!r}")
    return resolved


def _check_alike(targets: list[Resolved], catalogue: Catalogue) -> None:
    first = targets[0]
    for number, target in enumerate(targets[1:], 1):
        loc = f"$.alias[{number}].model"
        if set(target.entry.tasks) != set(first.entry.tasks):
            message = (
                f"{target.entry.id} does {_verbs(target)}, but {first.entry.id} does {_verbs(first)}: some requests "
                "would get errors; "
            )
            raise faulty(loc, message + _FORCE)
        first_numbers, numbers = _numbers(first, catalogue), _numbers(target, catalogue)
        if "encode" not in first.entry.tasks or (first_numbers == numbers and all(first_numbers.values())):
            continue
        are_known = all((*first_numbers.values(), *numbers.values()))
        differ = "differ from those of" if are_known else "are not known to equal those of"
        message = (
            f"the vectors of {target.canonical} {differ} {first.canonical}, and an index must not mix vectors: {_FIX}; "
        )
        raise faulty(loc, message + _FORCE)


def _numbers(resolved: Resolved, catalogue: Catalogue) -> dict[str, str]:
    """Return profile -> `Resolved.numbers` for each profile that a request may name. Key "" means no profile named."""
    names = resolved.entry.profiles if resolved.profile == "default" else ()
    return {
        "": resolved.numbers,
        **{name: catalogue.resolve_profile(resolved.entry, name, name).numbers for name in names},
    }


def _verbs(resolved: Resolved) -> str:
    return ", ".join(resolved.entry.tasks) or "nothing"


def changes_vectors(before: Alias, after: Alias, catalogue: Catalogue) -> bool:
    """Return whether the targets of `after` may compute different vectors for a text than the targets of `before`."""
    try:
        former = {_target(catalogue, before, target.model, "$").numbers for target in before.alias}
        targets = [_target(catalogue, after, target.model, "$") for target in after.alias]
    except ValidationFailed:  # a target no longer exists, so its vectors cannot be compared
        return True
    return any(
        "encode" in target.entry.tasks and (not target.numbers or {target.numbers} != former) for target in targets
    )
