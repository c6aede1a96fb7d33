"""Catalogue of models, profiles and bundles, and the resolution of a model's name.

    "[bundle:/]model[@revision][:profile]" ──► Catalogue.resolve ──► Resolved (entry, profile, residency)
                                                   └ an alias: the API key, header or address of the client
                                                     chooses a target of the alias, which is resolved

The functions are pure and the data is immutable, so requests cannot affect each other. `options` interprets the
parameters of a request for a resolved model.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from sie_contracts.errors import BundleConflict, ModelNotFound
from sie_contracts.models import bundles as bundling
from sie_contracts.models.aliases import Alias, choose, model_of
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import HeadOptions, LoadOptions, ModelEntry, RunDefaults
from sie_contracts.names import NameIndex

_Value = TypeVar("_Value")


def packaged_folder() -> Path:
    """Return the folder of the packaged catalogue: inside the installed package, or at the root of a checkout."""
    installed = Path(__file__).parents[1] / "catalog"
    return installed if installed.is_dir() else Path(__file__).parents[4] / "catalog"


class Resolved(msgspec.Struct, frozen=True, dict=True):
    """Result of resolving the model name of a request. `run`, `load`: options of the model, changed by the profile.
    `residency`: name of the loaded copy of the model with these load options; profiles with equal load options share a
    copy.
    """

    entry: ModelEntry
    profile: str
    run: RunDefaults
    load: LoadOptions
    residency: str
    requested: str  # model name in the request without the bundle prefix; the reply repeats it
    alias: str = ""  # alias that the request named; empty if it named a model
    bundles: tuple[str, ...] = ()  # bundles that can serve the model, the preferred bundle first

    @functools.cached_property
    def bundle(self) -> str:
        return self.bundles[0] if self.bundles else self.entry.bundle or bundling.DEFAULT

    @functools.cached_property
    def revision(self) -> str:
        return self.entry.revision

    @functools.cached_property
    def canonical(self) -> str:
        return self.entry.id if self.profile == "default" else f"{self.entry.id}:{self.profile}"

    @property
    def numbers(self) -> str:
        """Return a digest of everything in the entry, except its id, that affects the numbers that the model computes.
        Two entries with the same digest compute the same numbers on the same device. The digest is empty if the entry
        does not identify its weights.
        """
        weights = self.entry.weights
        if weights.path:  # a path does not identify the files in the folder; only digests do
            weights = msgspec.structs.replace(weights, revision="", package="")
        if not (weights.revision or weights.package or weights.digests):
            return ""
        return fingerprint(msgspec.structs.replace(self.entry, id="", weights=weights, run=self.run), self.load, "")


@dataclass(frozen=True)
class Catalogue:
    """Immutable snapshot of the catalogue. A request uses one snapshot from start to end.

    `revisions`: current revision of each model and alias, by id. `epoch`: version of the catalogue as `created:number`,
    the creation time of the catalogue and the number of its last write.
    """

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    revisions: Mapping[str, int] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)
    epoch: str = ""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    # id -> number of the write that created the current revision; the epoch after this write ends with this number
    written: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_documents(
        cls,
        documents: Mapping[str, ModelEntry | Alias],
        revisions: Mapping[str, int],
        bundles: Mapping[str, BundleEntry],
        epoch: str,
        written: Mapping[str, int] | None = None,
    ) -> Catalogue:
        """Return a snapshot of these documents (id -> document)."""
        entries = {name: document for name, document in documents.items() if isinstance(document, ModelEntry)}
        aliases = {name: document for name, document in documents.items() if isinstance(document, Alias)}
        return cls(entries, revisions, bundles, epoch, aliases, written or {})

    def with_model(self, model: str, entry: ModelEntry | Alias | None, revision: int, epoch: str) -> Catalogue:
        """Return a snapshot in which one model or alias is written, or removed if `entry` is None."""
        number = epoch.rpartition(":")[2]
        new = Catalogue(
            _with(self.entries, model, entry if isinstance(entry, ModelEntry) else None),
            _with(self.revisions, model, None if entry is None else revision),
            self.bundles,
            epoch,
            _with(self.aliases, model, entry if isinstance(entry, Alias) else None),
            _with(self.written, model, int(number) if entry is not None and number.isdecimal() else None),
        )
        new.__dict__["_serving"] = self._serving
        if (model in self.entries or model in self.aliases) is (entry is not None):
            new.__dict__["_names"] = self._names
        return new

    def at(self, epoch: str) -> Catalogue:
        """Return a snapshot with the same documents and the version `epoch`."""
        new = replace(self, epoch=epoch)
        new.__dict__["_names"], new.__dict__["_serving"] = self._names, self._serving
        return new

    def since(self, model: str) -> str:
        """Return the epoch (version of the catalogue) that the write of a model's current revision created. If the
        number of this write is unknown, return the epoch of this snapshot.
        """
        number = self.written.get(model)
        return self.epoch if number is None else f"{self.epoch.rpartition(':')[0]}:{number}"

    @functools.cached_property
    def _names(self) -> NameIndex:
        return NameIndex((*self.entries, *self.aliases))

    def find(self, name: str) -> ModelEntry | None:
        """Return the entry with this id, or the only entry whose id differs only in case; None if there is none."""
        return self.entries.get(name) or self.entries.get(self._names.same(name) or "")

    def near(self, name: str, able: Callable[[ModelEntry], bool] = lambda _: True) -> list[str]:
        """Return the ids of models and aliases that are most similar to `name`, best first. `name` may lack the
        organisation, which is the part of an id before the slash. Only models for which `able` returns True, and
        aliases of such models, are returned.
        """

        def keep(name: str) -> bool:
            entry = self.entries.get(name) or self.find(model_of(self.aliases[name].heaviest.model))
            return entry is not None and able(entry)

        return self._names.near(name, keep=keep)

    def resolve(self, spec: str, key: str = "", *, follow: bool = True) -> Resolved:
        """Resolve a name of the form `[bundle:/]model[@revision][:profile]`. If `follow` is true, the name may also be
        an alias, and the request key `key` chooses its target. Raises ModelNotFound, BundleConflict.
        """
        bundle, separator, rest = spec.partition(":/")
        if not separator:
            bundle, rest = "", spec
        entry, profile = self._match(rest), "default"
        if entry is None and ":" in rest:
            name, _, profile = rest.rpartition(":")
            entry = self._match(name)
        if entry is None and follow and self.aliases and (target := self._through_alias(rest, key)) is not None:
            return self._in_bundle(target, bundle)
        if entry is None:
            raise self._unknown(rest)
        return self._in_bundle(self.resolve_profile(entry, profile, rest), bundle)

    def bundles_of(self, entry: ModelEntry) -> tuple[str, ...]:
        """Return the bundles that can serve a model, the preferred bundle first."""
        key = entry.family, entry.bundle
        if key not in self._serving:
            self._serving[key] = bundling.serving(self.bundles, *key)
        return self._serving[key]

    @functools.cached_property
    def _serving(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Cache for `bundles_of`, which every request calls: (family, bundle in the entry) -> bundles."""
        return {}

    def _in_bundle(self, resolved: Resolved, bundle: str) -> Resolved:
        """Return `resolved` with its `bundles` set: only `bundle`, or if `bundle` is empty, all bundles that can serve
        the model. Raises BundleConflict.
        """
        if resolved.bundles and not bundle:
            return resolved
        entry, able = resolved.entry, self.bundles_of(resolved.entry)
        if not able or (bundle and bundle not in able):
            why = "" if able else bundling.lacking(self.bundles, entry.family, entry.bundle)[1]
            raise bundling.conflict(entry.id, able, bundle, why)
        return msgspec.structs.replace(resolved, bundles=(bundle,) if bundle else able)

    def find_alias(self, name: str) -> Alias | None:
        """Return the alias with this id, or the only alias whose id differs only in case; None if there is none."""
        return self.aliases.get(name) or self.aliases.get(self._names.same(name) or "")

    def _through_alias(self, rest: str, key: str) -> Resolved | None:
        """Resolve `alias[@revision][:profile]`; None if the alias does not exist. Raises ModelNotFound, BundleConflict.

        A revision in the name must be the revision of the target's model. If the target names a profile, the name may
        contain only this profile, or `default`, which then means this profile. If the target names no profile, any
        profile of the model is allowed.
        """
        name, _, revision = rest.partition("@")
        profile = ""
        if not revision:
            name, _, profile = name.partition(":")
        alias = self.find_alias(name)
        if alias is None:
            return None
        target = choose(alias, key)
        try:
            resolved = self.resolve(target.model, follow=False)
        except (ModelNotFound, BundleConflict) as error:
            error.message = f"{alias.id} is an alias of {target.model}: {error.message}"
            raise
        if revision and revision != resolved.entry.revision:  # a revision may contain a colon, a profile never does
            stated, _, profile = revision.rpartition(":")
            if stated != resolved.entry.revision:
                raise _no_revision(resolved.entry, revision)
        if profile not in ("", "default", resolved.profile):
            if resolved.profile != "default":
                message = (
                    f"{alias.id} is an alias of {resolved.canonical}, which already names a profile: "
                    "to use another profile, name the model"
                )
                raise ModelNotFound(
                    message, reason="profile_not_found", param="model", extras={"profiles": [resolved.profile]}
                )
            resolved = msgspec.structs.replace(
                self.resolve_profile(resolved.entry, profile, rest), bundles=resolved.bundles
            )
        return msgspec.structs.replace(resolved, requested=rest, alias=alias.id)

    def _match(self, name: str) -> ModelEntry | None:
        """Return the entry for `model[@revision]`; None if there is no such model, or if it has another revision."""
        model, at, revision = name.partition("@")
        entry = self.find(model)
        return None if entry is not None and at and revision != entry.revision else entry

    def _unknown(self, rest: str) -> ModelNotFound:
        model, at, revision = rest.partition("@")
        entry = self.find(model)
        if entry is not None and at:
            return _no_revision(entry, revision)
        return ModelNotFound(
            f"no model named {rest[:200]!r}", param="model", extras={"suggestions": self.near(model.split(":")[0])}
        )

    @staticmethod
    def resolve_profile(entry: ModelEntry, profile: str, requested: str) -> Resolved:
        """Resolve a profile of a model. Raises ModelNotFound with the reason `profile_not_found`."""
        if profile != "default" and profile not in entry.profiles:
            raise ModelNotFound(
                f"{entry.id} has no profile {profile[:100]!r}, it has {', '.join(['default', *entry.profiles][:20])}",
                reason="profile_not_found",
                param="model",
                extras={"profiles": ["default", *entry.profiles]},
            )
        run, load = _layered(entry, profile)
        # Profiles with equal load options share one loaded copy, which has the name of the first of these profiles.
        owner = next(name for name in ("default", *entry.profiles) if _layered(entry, name)[1] == load)
        residency = entry.id if owner == "default" else f"{entry.id}:{owner}"
        return Resolved(entry, profile, run, load, residency, requested)


def _with(mapping: Mapping[str, _Value], key: str, value: _Value | None) -> Mapping[str, _Value]:
    if value is None and key not in mapping:
        return mapping
    new = dict(mapping)
    if value is None:
        del new[key]
    else:
        new[key] = value
    return new


def _no_revision(entry: ModelEntry, revision: str) -> ModelNotFound:
    message = f"{entry.id} has no revision {revision[:100]!r}"
    return ModelNotFound(message, reason="revision_not_found", param="model", extras={"revisions": [entry.revision]})


def _layered(entry: ModelEntry, profile: str) -> tuple[RunDefaults, LoadOptions]:
    run, load = entry.run, entry.load
    variant = entry.profiles.get(profile)
    if variant is None:
        return run, load
    for layer in (entry.profiles.get(variant.extends), variant):
        if layer is not None:
            run, load = _overlay(run, layer.run), _overlay_load(load, layer.load)
    return run, load


def _overlay(base: RunDefaults, layer: RunDefaults) -> RunDefaults:
    changes = {name: value for name in RunDefaults.__struct_fields__ if (value := getattr(layer, name)) is not None}
    if base.parameters and layer.parameters:
        changes["parameters"] = {**base.parameters, **layer.parameters}
    return msgspec.structs.replace(base, **changes)


def _overlay_load(base: LoadOptions, layer: LoadOptions | None) -> LoadOptions:
    """Return `base` overridden by the options that `layer` sets. False means unset, except as the value of `causal`."""
    if layer is None:
        return base
    layer_options = ((name, getattr(layer, name)) for name in LoadOptions.__struct_fields__)
    return msgspec.structs.replace(
        base, **{name: value for name, value in layer_options if value or (name == "causal" and value is not None)}
    )


def profile_fingerprint(loaded: str, entry: ModelEntry, profile: str) -> str:
    """Return the fingerprint of a profile. If its `run` is that of the model, this is `loaded`, the fingerprint of the
    loaded model. Otherwise it is a hash of `loaded` and the profile's `run`.
    """
    run = Catalogue.resolve_profile(entry, profile, entry.id).run
    if run == entry.run:
        return loaded
    return hashlib.sha256(loaded.encode() + msgspec.json.encode(run, order="sorted")).hexdigest()[:16]


def answer_fingerprint(profile: str, lora: str, variant: str) -> str:
    """Return the fingerprint of answers. `profile`: see `profile_fingerprint`. `lora`: digest of the files of the LoRA,
    because other files may get the same name; empty if there is no LoRA. `variant`: see `RunOptions.variant`.
    """
    for part in (lora, variant):
        if part:
            profile = hashlib.sha256(f"{profile} {part}".encode()).hexdigest()[:16]
    return profile


def fingerprint(entry: ModelEntry, load: LoadOptions, precision: str, engine: str = "torch") -> str:
    """Return a digest of all settings that change the numbers that a model computes: weights, pooling, prompts,
    precision, engine, normalisation and truncation.
    """
    facts: dict[str, object] = {
        "id": entry.id,
        "revision": entry.revision,
        "family": entry.family,
        "max_tokens": entry.max_tokens,
        "outputs": entry.outputs,
        "prompts": entry.prompts,
        "run": entry.run,
        # the requested engine is left out, because the engine that really runs is added below
        "load": msgspec.structs.replace(load, engine=None),
        "precision": precision,
    }
    # A setting below is left out if it has its default value (engine torch, no pair, ...), so that the fingerprints
    # that are stored in older indexes, computed without these settings, stay equal.
    if engine != "torch":
        facts["engine"] = engine
    if entry.default_prompt_name:
        facts["default_prompt_name"] = entry.default_prompt_name
    if entry.pair:
        facts["pair"] = entry.pair
    if entry.head != HeadOptions():
        facts["head"] = entry.head
    # with a revision, digests add nothing: the commit already identifies the files
    if entry.weights.digests and not entry.weights.revision:
        facts["digests"] = entry.weights.digests
    weights = entry.weights
    if weights.unpinned and not weights.digests and weights.hub != entry.id:
        # Without a commit and digests, only the repository's name identifies the weights. The path is left out, because
        # an entry also gets a path when its model is unpacked from an archive, which does not change the weights.
        facts["hub"] = weights.hub
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]
