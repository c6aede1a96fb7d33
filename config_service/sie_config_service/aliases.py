"""Guard of aliases, the names that stand for one or several models. It refuses a write over the API that makes a valid
alias invalid, unless the request has `force=true`.

    a write of an alias ──► its targets exist and are compatible ──► stored together with its row of the index
    a write of a model  ──► is it a target of aliases in the index? ──► they stay valid: stored; else 409, unless forced

The index is one key of the bucket, with the targets of each alias. Every change over the API also writes the index, by
compare-and-set in the same batch. So if one replica adds an alias of a model while another replica changes the model,
one of these writes fails. A changed file of a model folder is applied even if the change makes an alias invalid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sie_broker import Write
from sie_contracts.errors import UNDECODABLE, ContentConflict, NotReady, ValidationFailed, faulty
from sie_contracts.models.alias_checks import changes_vectors, check
from sie_contracts.models.aliases import Alias, is_alias, model_of
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_document
from sie_contracts.wire import topology

if TYPE_CHECKING:
    from sie_config_service.mirror import CatalogueSnapshot, HeldModel

INDEX_KEY = "aliases"
# code of the warning that vectors of the alias's old target and of its new target cannot be compared
VECTORS_CHANGED = "alias_vectors_changed"
ALIAS_BROKEN = "alias_broken"  # code of the warning that a forced write made an alias invalid
_index = msgspec.json.Decoder(dict[str, tuple[str, ...]])


@dataclass(frozen=True)
class AliasIndex:
    """Index of aliases. `models`: alias -> targets. `sequence`: revision of the index's key, for compare-and-set."""

    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequence: int = 0

    @classmethod
    def read(cls, value: bytes | None, sequence: int) -> AliasIndex:
        """Decode the index. Raises NotReady for an invalid index, because the aliases of a model are then unknown."""
        try:
            return cls(_index.decode(value) if value else {}, sequence)
        except UNDECODABLE as error:
            raise NotReady(
                f"the catalogue's record {INDEX_KEY} cannot be read ({error}): run `sie repair "
                f"KV_{topology.CATALOGUE_BUCKET}`; until then, nothing can be changed"
            ) from error

    def naming(self, model: str) -> list[str]:
        """Return the aliases that have this model as a target."""
        folded = model.casefold()
        return sorted(alias for alias, models in self.models.items() if folded in map(model_of, models))

    def written(self, changes: Mapping[str, Alias | None] | None = None) -> Write:
        """Return the write that stores the index after `changes`: for each name the new alias, or None to remove it."""
        models = dict(self.models)
        for name, alias in (changes or {}).items():
            models.pop(name, None)
            if alias is not None:
                models[name] = alias.models
        return Write(INDEX_KEY, msgspec.json.encode(models, order="sorted"), self.sequence)


@dataclass(frozen=True)
class GuardedWrite:
    """Additions to a write that `guard` permits. `index`: write of the index in the same batch; None for a request that
    changes nothing. `reply_fields`: additional fields of the reply.
    """

    index: Write | None = None
    reply_fields: dict[str, Any] = field(default_factory=dict)


async def guard(
    index: AliasIndex,
    read: CatalogueSnapshot,
    catalogue: Callable[[], Awaitable[Catalogue]],
    model: str,
    held: HeldModel,
    entry: dict[str, Any] | None,
    *,
    force: bool,
) -> GuardedWrite:
    """Check a write of a model or alias before it is stored. `entry`: the new document, None for a removal. `held`: the
    stored model or alias before the write. `index`, `read`: the current index and models. `catalogue`: a slow function
    that parses the whole catalogue; it is called only to suggest names in an error.

    With `force`, the write of a model may make an alias invalid. Raises ValidationFailed for an invalid alias or an id
    that is in use; ContentConflict, with the names of the aliases, if aliases become invalid without `force`.
    """
    was_alias, after = is_alias(held.entry), None if entry is None else parse_document(entry)
    if held.entry is not None and after is not None and was_alias is not isinstance(after, Alias):
        raise faulty(
            "$.id", f"{model} is {'an alias' if was_alias else 'a model'}: take another id, or DELETE it first"
        )
    if isinstance(after, Alias):
        before = _entry_of(held.entry)
        concerned = _those(read, [model, *after.models, *(before.models if isinstance(before, Alias) else ())])
        try:
            check(after, concerned)
        except ValidationFailed:
            # check again with the whole catalogue: the error can then suggest similar names
            check(after, await catalogue())
            raise
        changed = was_alias and (not isinstance(before, Alias) or changes_vectors(before, after, concerned))
        bundles = {concerned.resolve(target.model).bundle for target in after.alias}
        routable = {"routable_bundles_by_profile": {"default": sorted(bundles)}}
        return GuardedWrite(
            index.written({model: after}), routable | ({"warnings": [VECTORS_CHANGED]} if changed else {})
        )
    if was_alias:
        return GuardedWrite(index.written({model: None}))
    if held.entry is None and (
        twin := next((alias for alias in index.models if alias.casefold() == model.casefold()), None)
    ):
        raise faulty("$.id", f"there is an alias {twin!r}: take another id, or DELETE the alias first")
    if not (named := index.naming(model)):
        return GuardedWrite(index.written())
    present = _those(read, [model, *named, *(model for alias in named for model in index.models[alias])])
    broken = _broken(present, named, model, after)
    if broken and not force:
        name, why = next(iter(broken.items()))
        needs = (
            f"the alias {name} names {model}"
            if after is None
            else f"the alias {name} needs {model} as it is; after this change {why}"
        )
        raise ContentConflict(
            f"{needs}: first point the alias elsewhere or remove it, or repeat with ?force=true (--force)",
            reason="aliased",
            param="id",
            extras={"aliases": sorted(broken), "revision": held.revision, "diff": []},
        )
    return GuardedWrite(index.written(), {"warnings": [ALIAS_BROKEN]} if broken else {})


def _those(read: CatalogueSnapshot, names: Iterable[str]) -> Catalogue:
    """Return a catalogue of only these models and aliases, because parsing all models is slow."""
    models = {model_of(name) for name in names}
    entries = {name: _entry_of(stored.entry) for name, stored in read.live.items() if name.casefold() in models}
    return Catalogue.from_documents(
        {name: entry for name, entry in entries.items() if entry is not None}, {}, read.bundles, read.epoch
    )


def _entry_of(entry: dict[str, Any] | None) -> ModelEntry | Alias | None:
    """Parse a stored document; None if an older schema permitted the document and the present schema does not."""
    try:
        return None if entry is None else parse_document(entry)
    except ValidationFailed:
        return None


def _broken(present: Catalogue, named: list[str], model: str, after: ModelEntry | None) -> dict[str, str]:
    """Return the aliases in `named` that are valid now and become invalid if `after` replaces the model: alias ->
    reason.
    """
    changed = present.with_model(model, after, 0, "")
    problems = {}
    for name in named:
        if (alias := present.aliases.get(name)) is not None and _fault(alias, present) is None:
            why = _fault(alias, changed)
            if why is not None:
                problems[name] = why
    return problems


def broken_by(read: CatalogueSnapshot, index: AliasIndex, models: Iterable[str]) -> dict[str, str]:
    """Return the invalid aliases whose name or target is in `models`: alias -> reason."""
    folded = {model.casefold() for model in models}
    named = sorted(
        alias
        for alias, targets in index.models.items()
        if not folded.isdisjoint({alias.casefold(), *map(model_of, targets)})
    )
    present = _those(read, [*named, *(name for alias in named for name in index.models[alias])])
    faults = {name: _fault(present.aliases[name], present) for name in named if name in present.aliases}
    return {name: why for name, why in faults.items() if why is not None}


def _fault(alias: Alias, catalogue: Catalogue) -> str | None:
    try:
        check(alias, catalogue)
    except ValidationFailed as error:
        return str(error.extras["errors"][0]["message"])
    return None


def seeded(documents: Mapping[str, ModelEntry | Alias]) -> None:
    """Check the aliases in the model folders. Raises ValidationFailed, which names the alias and the fault."""
    catalogue = Catalogue.from_documents(documents, {}, {}, "")
    for name, alias in sorted(catalogue.aliases.items()):
        if (why := _fault(alias, catalogue)) is not None:
            raise ValidationFailed(f"the alias {name}: {why}", param="alias")


def index_of(models: Mapping[str, dict[str, Any] | None]) -> dict[str, Alias | None]:
    """Return the aliases among these documents, by name. The value is None for a model and for a removed document."""
    aliases: dict[str, Alias | None] = {}
    for name, entry in models.items():
        document = parse_document(entry) if entry is not None and is_alias(entry) else None
        aliases[name] = document if isinstance(document, Alias) else None
    return aliases


def index_in(read: CatalogueSnapshot, index: AliasIndex) -> dict[str, tuple[str, ...]]:
    """Return the new content of the index: alias -> targets. An invalid alias keeps the targets that `index` has."""
    targets: dict[str, tuple[str, ...]] = {}
    for name, stored in read.live.items():
        if is_alias(stored.entry):
            alias = _entry_of(dict(stored.entry))
            targets[name] = alias.models if isinstance(alias, Alias) else index.models.get(name, ())
    return targets
