"""Options of a request. Parameters of the request override options of the profile, which override those of the model.

    Resolved + parameters of the request ──► run_options ──► messages.RunOptions, which is part of the work message

Options are merged only here, so all routes have the same rules.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from sie_contracts import entry_points
from sie_contracts.api.inference import Dtype, Item
from sie_contracts.errors import InvalidInput, faulty
from sie_contracts.models import families, output_schemas
from sie_contracts.models.aliases import Alias
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import (
    ENGINE_POINTS,
    INPUTS,
    POOLING_OPTIONS,
    VECTORS,
    LoadOptions,
    ModelEntry,
    RunDefaults,
    needs_labels,
    parse_document,
    templates,
)
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.option_values import (
    CHECKS,
    SCORE_MODES,
    THRESHOLDS,
    any_value,
    bad,
    boolean,
    check_fraction,
    integer,
    muvera_parameters,
    one_of,
    text,
    truncate,
)
from sie_contracts.names import did_you_mean
from sie_contracts.wire.messages import Operation, RunOptions

MAX_LABELS = 1000
MAX_SIZE = 1 << 31  # largest width, length or number of pixels that an entry of the catalogue may state
_PIXELS = ("min_pixels", "max_pixels")
# A body may have a million unknown parameters. Only MAX_COMPARED of their names are compared with the names of options.
# The warning lists at most MAX_SHOWN of the names for which it has no suggestion.
MAX_COMPARED, MAX_SHOWN = 20, 3
# maximum number of characters of a prompt after its instruction is inserted; each input of the request gets the prompt
MAX_PROMPT = 1 << 20
MAX_LORA = 1000
Side = Literal["document", ""]
DTYPES: tuple[str, ...] = get_args(Dtype)
TOKEN_STATES = "tokens"  # noqa: S105 - internal output of a dense encoder (see `unpooled`), not for requests
_EVERYWHERE = frozenset(
    {
        "profile",
        "lora_id",
        "lora",
        "on_item_error",
        "timing",
        "truncate",
        "max_seq_length",
        "is_query",
        "input_type",
        "instruction",
        "default_instruction",
        "query_template",
        "doc_template",
    }
)
# parameters that do not change the fingerprint (digest of all settings that change a result's numbers), with reasons
NEUTRAL: Mapping[str, str] = {
    "profile": "the fingerprint covers the settings of the chosen profile",
    "lora_id": "the fingerprint covers the files of a LoRA, whatever name it has",
    "lora": "as lora_id",
    "on_item_error": "changes the form of the reply",
    "timing": "changes the form of the reply",
    "output_types": "chooses outputs and changes none",
    "is_query": "the fingerprint covers the prompts for queries and for documents, so it is the same for both",
    "input_type": "as is_query",
    "prompt_name": "as is_query",
    "labels": "are part of the input, like the text",
    "output_schema": "as labels",
    "label_groups": "as labels",
    "relation_labels": "as labels",
    "precompute_labels": "labels give the same numbers if they are computed before the texts or together with them",
    "ocr": "has only one allowed value",
    "tree": "changes the form of the reply",
    "word_times": "adds words to the reply and changes nothing else in it",
}
_USED: dict[str, frozenset[str]] = {
    "encode": _EVERYWHERE
    | {"output_types", "output_dtype", "dimensions", "normalize", "pooling", "muvera", "prompt_name"},
    "score": _EVERYWHERE,
    "extract": _EVERYWHERE | {"labels"},
}
_TOP_LEVEL = frozenset({"items", "inputs", "input", "params", "options", "model", "query"})
_KNOWN = _TOP_LEVEL.union(*_USED.values())
_FIELD = re.compile(r"\{(query|document)\}")
_QUERY_KINDS = {"query", "search_query"}


@functools.cache
def known_fields() -> frozenset[str]:
    """Return all fields of a body that a route or at least one family reads."""
    return _KNOWN.union(*(family.parameters for family in families.rows().values()))


class _Parameters:
    """Parameters of a request. A client may write them at four levels of the body. Null and [] leave a parameter unset.
    Exception: `prompt_name: null` means that no prompt is added.
    """

    def __init__(self, body: Mapping[str, Any], side: Side) -> None:
        params = _mapping(body, "params", "params")
        self._side = side
        # a parameter in several levels has the value of the first of these levels
        self.levels: list[tuple[str, Mapping[str, Any]]] = [
            ("params.", params),
            ("", body),
            ("params.options.", _mapping(params, "options", "params.options")),
            ("options.", _mapping(body, "options", "options")),
        ]
        self._found = {
            name: (f"{prefix}{name}", value)
            for prefix, level in reversed(self.levels)
            for name, value in level.items()
            if (value is not None and value != []) or name == "prompt_name"
        }

    def get(self, name: str) -> tuple[str, Any]:
        """Return the path of a parameter and its value. The value is None if the parameter is unset."""
        return self._found.get(name) or (name, None)

    def is_set(self, *names: str) -> bool:
        return any(name in self._found for name in names)

    def drop(self, *names: str) -> None:
        for name in names:
            self._found.pop(name, None)

    def side(self, defaults: RunDefaults) -> Side | None:
        """Return the side that the route implies: "document" if its texts are the documents of a search, otherwise "".
        Return None if the request names a prompt, or if the request or the profile says whether the texts are queries.
        """
        is_named = self.is_set("is_query", "input_type", "prompt_name") or defaults.is_query is not None
        return None if is_named else self._side

    def has_others(self, names: Collection[str]) -> bool:
        return not self._found.keys() <= _TOP_LEVEL.union(names)

    def only(self, names: Collection[str]) -> _Parameters:
        return _Parameters({name: value for name, (_, value) in self._found.items() if name in names}, self._side)

    def unused(self, used: frozenset[str], lacking: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
        """Yield (path, suggestion) for each parameter that has no effect for this model on this route. `suggestion`:
        end of the warning or error; empty for a known parameter without advice. None for an unknown name that is
        similar to no option, or that follows MAX_COMPARED unknown names. `lacking`: parameter without an effect -> the
        parameter that must be set with it.
        """
        compared = 0
        for prefix, level in self.levels:
            options = used if prefix.endswith("options.") else used | _TOP_LEVEL
            for name in level:
                if name in options and name in lacking:
                    yield prefix + name, f"; it needs {lacking[name]}"
                elif name not in options:
                    shown = str(name)[:64]
                    suggestion: str | None = None
                    if name in known_fields():
                        suggestion = ""
                    elif name in Item.__struct_fields__:
                        suggestion = "; it is a field of an item"
                    elif compared < MAX_COMPARED:
                        compared += 1
                        suggestion = did_you_mean(shown, options) or None
                    yield prefix + shown, suggestion

    def foreign(self) -> frozenset[str]:
        """Return the names that are not in _KNOWN. They may be options of a family from another package."""
        return frozenset(str(name) for _, level in self.levels for name in level) - _KNOWN


def _mapping(parent: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(path, value, "a map or null")
    return value


@dataclass(frozen=True)
class RequestOptions:
    """Result of merging the options: `run` for the model, the other fields for the form of the reply."""

    run: RunOptions
    on_item_error: str = "slot"
    item_timing: bool = False
    warnings: tuple[str, ...] = ()


def run_options(
    resolved: Resolved,
    body: Mapping[str, Any],
    operation: Operation = "encode",
    on_item_error: str = "slot",
    *,
    strict: bool = False,
    side: Side = "document",
) -> tuple[Resolved, RequestOptions]:
    """Merge the parameters of the request with those of the profile and the model, and check each one. `on_item_error`:
    value if no parameter sets it. `side`: "document" if the route implies that the texts are the documents of a search,
    otherwise "". `strict`: raise InvalidInput for parameters without an effect, instead of a warning.

    Return `resolved` with the profile that the parameter `profile` names, and the merged options. Raises InvalidInput
    with the path of the parameter.
    """
    request = _Parameters(body, side)
    resolved = _chosen_profile(resolved, *request.get("profile"))
    entry, defaults = resolved.entry, resolved.run
    if operation not in entry.tasks:
        does = ", ".join(entry.tasks)
        message = (
            f"{entry.id} does not {operation}, it does {does}; GET /v1/models?task={operation} lists the models that "
            f"{operation}"
        )
        raise InvalidInput(message, reason="unsupported_task", param="model")
    own = families.row(entry.family).parameters if entry.family in families.rows() else None
    names = request.foreign() - {output_schemas.PARTS} if own is None else own
    used = _USED[operation] | names
    if not _takes_instruction(entry, defaults, operation):
        used -= {"instruction", "default_instruction"}
        request.drop("instruction", "default_instruction")
    run = _merged(entry, defaults, request, operation, names)
    # if the family needs an instruction, the instruction is a part of the input, and does not change the fingerprint
    neutral = NEUTRAL.keys() | ({"instruction"} if families.row(entry.family).needs_instruction else set())
    if request.has_others(neutral):
        usual = _merged(entry, defaults, request.only(neutral - {"output_types"}), operation, names)
        usual = msgspec.structs.replace(usual, outputs=run.outputs)
        run = altered(usual, **{name: getattr(run, name) for name in RunOptions.__struct_fields__})
    on_error = one_of(*request.get("on_item_error"), choices=("slot", "fail"), default=on_item_error)
    timing = one_of(*request.get("timing"), choices=("request", "items"), default="request")
    lacking = {}
    if own is not None and request.is_set("relation_threshold") and not run.parameters.get("relation_labels"):
        lacking = {"relation_threshold": "relation_labels"}
    warnings: tuple[str, ...] = ()
    unknown: list[str] = []
    more = 0
    for path, suggestion in request.unused(used, lacking):
        if strict:
            message = f"no such option of {entry.id} on this route{suggestion or ''}"
            raise InvalidInput.at(path, message, reason="unknown_option")
        if suggestion is not None:
            warnings += (f"{path}: ignored, no such option of {entry.id} on this route{suggestion}",)
        elif len(unknown) < MAX_SHOWN:
            unknown.append(path)
        else:
            more += 1
    if unknown:
        paths = ", ".join(unknown) + (f" and {more} more" if more else "")
        warnings += (f"{paths}: ignored, no such option of {entry.id} on this route",)
    if operation == "encode" and _is_prompted_unasked(entry, defaults, request):
        warnings += (
            f"prompt_name: texts have the document prompt of {entry.id}, since the request names none; set is_query, "
            "input_type or prompt_name (null: no prompt)",
        )
    return resolved, RequestOptions(run, on_error, timing == "items", warnings)


def _merged(
    entry: ModelEntry, defaults: RunDefaults, request: _Parameters, operation: Operation, names: frozenset[str]
) -> RunOptions:
    parameters = _family_parameters(entry, defaults, request, names)
    common: dict[str, Any] = {
        "truncate": truncate(*request.get("truncate"), default=defaults.truncate or "END"),
        "max_tokens": _max_tokens(entry, *request.get("max_seq_length")),
        "lora": _lora(entry, defaults, request),
        "instruction": text(*request.get("instruction")) or defaults.instruction or "",
        "parameters": parameters,
    }
    merge = {"encode": _encode, "score": _score, "extract": _extract}[operation]
    return RunOptions(**common, **merge(entry, defaults, request, parameters))


def altered(usual: RunOptions, **changes: Any) -> RunOptions:
    """Return `usual` with the changes. If a changed value differs from that in `usual`, the result also has another
    `variant`, which changes the fingerprint of its answers.
    """
    differing = {name: value for name, value in changes.items() if value != getattr(usual, name)}
    if not differing:
        return usual
    identity = msgspec.json.encode([usual.variant, differing], order="sorted")
    return msgspec.structs.replace(usual, **differing, variant=hashlib.sha256(identity).hexdigest()[:16])


def prompt_template(entry: ModelEntry, path: str, name: Any) -> str:
    """Return the template of the prompt `name`. Raises InvalidInput for the field `path` if the name is unknown."""
    prompts = templates(entry)
    if not isinstance(name, str) or name not in prompts:
        expected = f"{entry.id} has no prompts"
        if prompts:
            expected = f"expected a prompt of {entry.id}: {', '.join(sorted(prompts))}"
        raise InvalidInput.at(path, expected)
    return prompts[name]


def unpooled(entry: ModelEntry, run: RunOptions) -> RunOptions:
    """Return `run` with the tokens' last hidden states as output. Raises InvalidInput unless `dense` is an output."""
    if not families.row(entry.family).gives_vectors or "dense" not in entry.outputs:
        message = f"{entry.id} gives no embeddings of tokens, only dense text encoders do"
        raise InvalidInput(message, reason="unsupported_output", param="model")
    return msgspec.structs.replace(
        run, outputs=(TOKEN_STATES,), normalize=False, dimensions=0, dtype="float32", pooling="", muvera=None
    )


def counting(run: RunOptions) -> RunOptions:
    """Return options for counting the tokens of a text before truncation, with the prompt of `run` around the text."""
    return RunOptions(outputs=(), prefix=run.prefix, suffix=run.suffix, parameters={"count": True})


def tokenizing(prefix: str = "", suffix: str = "", *, add_special_tokens: bool = True) -> RunOptions:
    """Return the options of a tokenize request that returns the tokens of prefix + text + suffix."""
    parameters: dict[str, Any] = {} if add_special_tokens else {"add_special_tokens": False}
    return RunOptions(outputs=(), prefix=prefix, suffix=suffix, parameters=parameters)


def decoding(*, skip_special_tokens: bool = True) -> RunOptions:
    return RunOptions(outputs=(), parameters={} if skip_special_tokens else {"skip_special_tokens": False})


def _encode(
    entry: ModelEntry, defaults: RunDefaults, request: _Parameters, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    muvera = _muvera(entry, defaults, *request.get("muvera"))
    outputs = _outputs(entry, defaults, *request.get("output_types"), muvera=muvera is not None)
    path, value = request.get("output_dtype")
    dtype = one_of(path, value, choices=DTYPES, default=defaults.output_dtype or "float32", reason="unsupported_dtype")
    is_query = _is_query(defaults, request)
    chosen = _template(entry, defaults, request, is_query=is_query)
    pooling = one_of(*request.get("pooling"), choices=POOLING_OPTIONS, default=defaults.pooling or "")
    is_instructed = request.is_set("instruction") or not request.is_set("prompt_name")
    prefix, suffix = _prompt(entry, defaults, request, chosen, is_query=is_query, instructed=is_instructed)
    return {
        "outputs": outputs,
        "prefix": prefix,
        "suffix": suffix,
        "dtype": dtype,
        "is_query": is_query,
        "muvera": muvera,
        "pooling": POOLING_OPTIONS.get(pooling, pooling),
        "normalize": boolean(
            *request.get("normalize"), default=defaults.normalize if defaults.normalize is not None else True
        ),
        "dimensions": _dimensions(entry, defaults, *request.get("dimensions")),
    }


def _takes_instruction(entry: ModelEntry, defaults: RunDefaults, operation: Operation) -> bool:
    if defaults.instruction == "":
        return False
    if operation != "score" or entry.family not in families.rows() or families.row(entry.family).gives_vectors:
        return True
    return any("{instruction}" in piece for piece in entry.pair)


def _score(
    entry: ModelEntry, defaults: RunDefaults, request: _Parameters, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    if entry.pair:
        instruction = _instruction(entry, defaults, request)
        # without an instruction, leave out pieces that have {instruction}, but neither {query} nor {document}
        pieces = [piece for piece in entry.pair if instruction or "{instruction}" not in piece or _FIELD.search(piece)]
        return {"outputs": (), "pieces": tuple(_cut(piece, instruction) for piece in pieces)}
    if not families.row(entry.family).gives_vectors:
        return {"outputs": ()}
    mode = parameters.get("score_mode") or ("dense" if "score" in entry.outputs else "colbert")
    outputs = SCORE_MODES[mode]
    if missing := [name for name in outputs if name not in entry.outputs]:
        raise InvalidInput.at("score_mode", f"{entry.id} has no output {missing[0]}", reason="unsupported_output")
    document, query = (entry.prompts.get(side, "{text}") for side in ("document", "query"))
    prefix, suffix = _prompt(entry, defaults, request, document, is_query=False, instructed=False)
    query_prefix, query_suffix = _prompt(entry, defaults, request, query, is_query=True)
    return {
        "outputs": outputs,
        "prefix": prefix,
        "suffix": suffix,
        "query_prefix": query_prefix,
        "query_suffix": query_suffix,
        "pooling": defaults.pooling or "",
    }


def _extract(
    entry: ModelEntry, defaults: RunDefaults, request: _Parameters, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    path, labels = request.get("labels")
    parts = output_schemas.parts_of(parameters)
    relations = parameters.get("relation_labels")
    if relations and entry.family in families.rows() and "relations" not in entry.outputs:
        message = f"{entry.id} does not have the output `relations`"
        raise InvalidInput.at(request.get("relation_labels")[0], message, reason="unsupported_output")
    is_enough = parts or (relations and families.row(entry.family).relates_alone)
    if labels is None and not is_enough and needs_labels(entry):
        schema = ", or an output_schema" if "output_schema" in families.row(entry.family).parameters else ""
        raise InvalidInput.at("labels", f"{entry.id} needs the labels to look for{schema}", reason="labels_required")
    if labels is not None and not (
        isinstance(labels, list) and all(isinstance(label, str) and label.strip() for label in labels)
    ):
        raise bad(path, labels, "a list of strings that are not empty")
    if labels is not None and len(labels) > MAX_LABELS:
        raise InvalidInput.at(path, f"got {len(labels)} labels, at most {MAX_LABELS} are allowed")
    if families.row(entry.family).needs_instruction and not (text(*request.get("instruction")) or defaults.instruction):
        message = f"{entry.id} needs an instruction: the query to which it compares the texts"
        raise InvalidInput.at("instruction", message, reason="instruction_required")
    decisions = output_schemas.decisions_of(parts) if families.row(entry.family).has_row_per_label else []
    rows = [label for decision in decisions for label in decision.labels]
    return {"outputs": (), "labels": (*(labels or ()), *rows), "threshold": parameters.get("threshold")}


def _family_parameters(
    entry: ModelEntry, defaults: RunDefaults, request: _Parameters, names: frozenset[str]
) -> dict[str, Any]:
    """Return the options that the entry's family reads (`names`). Options in CHECKS are checked here. The family itself
    checks the values of its other options.
    """
    parameters = dict(defaults.parameters or {})
    parameters.pop(output_schemas.PARTS, None)
    for name in names:
        path, value = request.get(name)
        if value is not None:
            parameters[name] = CHECKS[name](path, value) if name in CHECKS else any_value(path, value)
    if entry.family in families.rows() and not parameters.get("raw_scores"):
        for name in names & THRESHOLDS:
            path, value = request.get(name)
            if value is not None:
                check_fraction(path, value)
    if entry.family in families.rows() and (parts := _schema_parts(entry, request, parameters)):
        parameters[output_schemas.PARTS] = msgspec.to_builtins(parts)
    return parameters


def _schema_parts(
    entry: ModelEntry, request: _Parameters, parameters: dict[str, Any]
) -> tuple[output_schemas.SchemaPart, ...]:
    schema, groups = parameters.pop("output_schema", None), parameters.pop("label_groups", None)
    path, _ = request.get("label_groups")
    # if the request has only one of `output_schema` and `label_groups`, the profile's value of the other one is ignored
    if request.is_set("label_groups") != request.is_set("output_schema"):
        schema, groups = (schema, None) if request.is_set("output_schema") else (None, groups)
    if schema is not None and groups is not None:
        raise InvalidInput.at(path, "expected label_groups or output_schema, got both")
    if groups is not None:
        return output_schemas.parts_of_groups(path, groups, is_many=bool(parameters.get("multi_label")))
    if schema is None:
        return ()
    path, _ = request.get("output_schema")
    reads_scales = families.row(entry.family).reads_scales
    finds_spans = "entities" in entry.outputs
    return output_schemas.parts_of_schema(path, schema, entry.id, finds_spans=finds_spans, reads_scales=reads_scales)


def parse_written(raw: object) -> ModelEntry | Alias:
    """Check a document before it is written to the catalogue. For each document, check the form. For a model, also
    check the inputs, the bounds and the default options, by the rules for options of requests. Raises ValidationFailed;
    its `errors` have the path of the first fault.

    For stored documents, `parse_document` checks only the form: one faulty value must not make the catalogue invalid.
    """
    document = parse_document(raw)
    if not isinstance(document, ModelEntry):
        return document
    _check_encodable("$", document)
    for profile in ("default", *document.profiles):
        path = "$.run" if profile == "default" else f"$.profiles.{profile}.run"
        try:
            _check_bounds(document)
            _check_defaults(document, Catalogue.resolve_profile(document, profile, document.id).run, path)
        except InvalidInput as error:
            message, param = error.message.removeprefix(f"{error.param}: "), error.param or path
            loc = f"{path}.parameters.{param.removeprefix('params.')}" if param.startswith("params.") else param
            raise faulty(loc, message) from error
    return document


def _check_encodable(path: str, value: object) -> None:
    """Raise ValidationFailed for a value from YAML that JSON (in the store) or msgpack (in messages) cannot encode."""
    members: Mapping[Any, Any] = {}
    if isinstance(value, msgspec.Struct):
        members = msgspec.structs.asdict(value)
    elif isinstance(value, dict) and any(isinstance(member, msgspec.Struct) for member in value.values()):
        members = value
    for name, member in members.items():
        _check_encodable(f"{path}.{name}", member)
    try:
        msgspec.msgpack.encode(msgspec.json.decode(msgspec.json.encode(value)))
    except (OverflowError, TypeError, ValueError) as error:
        fault = "expected JSON values: numbers must fit in 64 bits, and keys of maps must be texts"
        raise faulty(path, fault) from error


def _check_bounds(entry: ModelEntry) -> None:
    """Raise InvalidInput if the entry has an unknown kind of input, or a width, length or pixel count out of range."""
    engines = (*entry_points.names(ENGINE_POINTS), "torch")
    for path, load in _loads(entry).items():
        if load.engine is not None:
            one_of(f"{path}.engine", load.engine, choices=engines, default="")
    for place, name in enumerate(entry.inputs or ("",)):
        if name not in INPUTS:
            raise InvalidInput.at(f"$.inputs[{place}]", f"expected one of {', '.join(INPUTS)}")
    numbers: dict[str, int | None] = {f"$.outputs.{name}": width for name, width in entry.outputs.items()}
    numbers |= {f"$.head.{name}": getattr(entry.head, name) for name in ("query_length", "document_length")}
    numbers |= {f"{path}.{name}": getattr(load, name) for path, load in _loads(entry).items() for name in _PIXELS}
    for path, value in numbers.items():
        if value is not None:
            integer(path, value, f"a whole number from 0 to {MAX_SIZE}", 0, MAX_SIZE)


def _loads(entry: ModelEntry) -> dict[str, LoadOptions]:
    """Return the load options of an entry and of its profiles, by their paths."""
    own = {f"$.profiles.{name}.load": profile.load for name, profile in entry.profiles.items() if profile.load}
    return {"$.load": entry.load} | own


def _check_defaults(entry: ModelEntry, run: RunDefaults, path: str) -> None:
    """Raise InvalidInput for a faulty default in `run`. For a parameter of the family, the path is `params.NAME`."""
    if entry.head.muvera:
        muvera_parameters("$.head.muvera", entry.head.muvera, Muvera())
    is_muvera = _muvera(entry, RunDefaults(), f"{path}.muvera", run.muvera) is not None
    _outputs(entry, RunDefaults(), f"{path}.output_types", list(run.output_types or ()), muvera=is_muvera)
    one_of(f"{path}.output_dtype", run.output_dtype, choices=DTYPES, default="", reason="unsupported_dtype")
    for width in run.dimensions or ():
        integer(f"{path}.dimensions", width, "whole numbers from 1 to 1048576", 1, 1 << 20)
    parameters = any_value(f"{path}.parameters", run.parameters or {})
    names = CHECKS.keys() | families.row(entry.family).parameters
    own = {name: value for name, value in parameters.items() if name in names}
    _family_parameters(entry, RunDefaults(), _Parameters({"params": own}, ""), frozenset(own))


def _cut(piece: str, instruction: str) -> tuple[str, ...]:
    """Split a piece of `pair` into literal text and field names, alternately. Braces in the instruction are text."""
    parts = _FIELD.split(piece)
    return tuple(part if index % 2 else part.replace("{instruction}", instruction) for index, part in enumerate(parts))


def _outputs(entry: ModelEntry, defaults: RunDefaults, path: str, value: Any, *, muvera: bool) -> tuple[str, ...]:
    vectors = [name for name in VECTORS if name in entry.outputs]
    allowed = ["dense", *(name for name in vectors if name != "dense")] if muvera else vectors
    if value is None and muvera:
        return ("dense",)
    if value is None:
        return tuple(defaults.output_types or (("dense",) if "dense" in vectors else vectors[:1]))
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise bad(path, value, "a list of output names")
    for name in value:
        if name not in allowed:
            raise InvalidInput.at(
                path, f"{entry.id} has no such output, it has {', '.join(allowed)}", reason="unsupported_output"
            )
    return tuple(dict.fromkeys(value))


def _muvera(entry: ModelEntry, defaults: RunDefaults, path: str, value: Any) -> Muvera | None:
    muvera_option = defaults.muvera if value is None else value
    if muvera_option is None or muvera_option is False:
        return None
    if "multivector" not in entry.outputs:
        raise InvalidInput.at(path, f"{entry.id} has no multivectors to encode", reason="muvera_unsupported")
    chosen = muvera_parameters("head.muvera", entry.head.muvera, Muvera())
    for where, layer in (("muvera", defaults.muvera), (path, value)):
        if isinstance(layer, dict):
            chosen = muvera_parameters(where, layer, chosen)
    if not isinstance(muvera_option, bool | dict):
        raise bad(path, muvera_option, "true, false or a map")
    chosen.width(entry.outputs["multivector"], path)
    return chosen


def _lora(entry: ModelEntry, defaults: RunDefaults, request: _Parameters) -> str:
    (path, first), (alias, second) = request.get("lora_id"), request.get("lora")
    if first is not None and second is not None and first != second:
        raise InvalidInput.at(alias, "differs from lora_id: name one LoRA", reason="lora_conflict")
    name = text(path, first) or text(alias, second) or defaults.lora or ""
    path = path if first or not second else alias
    if len(name) > MAX_LORA:
        raise InvalidInput.at(path, f"expected at most {MAX_LORA} characters, got {len(name)}")
    if name and not families.row(entry.family).takes_lora:
        raise InvalidInput.at(path, f"{entry.id} takes no LoRA", reason="lora_unsupported")
    return name


def _chosen_profile(resolved: Resolved, path: str, value: Any) -> Resolved:
    if value is None or value == resolved.profile:
        return resolved
    if not isinstance(value, str):
        raise bad(path, value, "the name of a profile")
    if value == "default":
        return resolved
    if resolved.profile != "default":
        raise InvalidInput.at(
            path, "differs from the profile in the model name: name one profile", reason="profile_conflict"
        )
    if value not in resolved.entry.profiles:
        names = ", ".join(["default", *resolved.entry.profiles])
        raise InvalidInput.at(path, f"unknown profile, {resolved.entry.id} has {names}", reason="unknown_profile")
    return msgspec.structs.replace(
        Catalogue.resolve_profile(resolved.entry, value, resolved.requested),
        alias=resolved.alias,
        bundles=resolved.bundles,
    )


def _dimensions(entry: ModelEntry, defaults: RunDefaults, path: str, value: Any) -> int:
    if value is None:
        return 0
    native = entry.outputs.get("dense", 0) or entry.outputs.get("multivector", 0)
    allowed = sorted({native, *(defaults.dimensions or ())} - {0})
    width = integer(path, value, "a whole number", 1, 1 << 20)
    if width not in allowed:
        remedy = ""
        if width < native:
            listed = sorted({*(defaults.dimensions or ()), width})
            remedy = f"; if it was trained for this width: sie models set {entry.id} 'run.dimensions={listed}'"
        raise InvalidInput.at(
            path, f"{entry.id} allows {', '.join(map(str, allowed))}, got {width}{remedy}", reason="bad_dimensions"
        )
    return 0 if width == native else width


def _max_tokens(entry: ModelEntry, path: str, value: Any) -> int:
    if value is None:
        return 0
    return integer(path, value, f"a whole number from 1 to {entry.max_tokens}", 1, entry.max_tokens)


def _is_query(defaults: RunDefaults, request: _Parameters) -> bool:
    kind = text(*request.get("input_type")) or text(*request.get("prompt_name"))
    return boolean(*request.get("is_query"), default=kind in _QUERY_KINDS if kind else bool(defaults.is_query))


def _instruction(entry: ModelEntry, defaults: RunDefaults, request: _Parameters) -> str:
    fallback = text(*request.get("default_instruction")) or entry.prompts.get("default_instruction", "")
    instruction = text(*request.get("instruction")) or defaults.instruction or fallback
    if not families.row(entry.family).ends_instruction:
        return instruction
    instruction = instruction.strip()
    return (
        instruction if not instruction or unicodedata.category(instruction[-1]).startswith("P") else f"{instruction}."
    )


def _template(entry: ModelEntry, defaults: RunDefaults, request: _Parameters, *, is_query: bool) -> str:
    if request.is_set("prompt_name"):
        path, name = request.get("prompt_name")
        return "{text}" if name is None else prompt_template(entry, path, name)
    prompts = templates(entry)
    if request.side(defaults) == "":
        return prompts.get(entry.default_prompt_name, "{text}")
    return prompts.get("query" if is_query else "document", "{text}")


def _is_prompted_unasked(entry: ModelEntry, defaults: RunDefaults, request: _Parameters) -> bool:
    """Return whether texts get the prompt `document` though it is neither the default nor named in the request."""
    if request.side(defaults) != "document" or request.is_set("doc_template"):
        return False
    prompts = templates(entry)
    return prompts.get("document", "{text}") != prompts.get(entry.default_prompt_name, "{text}")


def _prompt(
    entry: ModelEntry,
    defaults: RunDefaults,
    request: _Parameters,
    template: str,
    *,
    is_query: bool,
    instructed: bool = True,
) -> tuple[str, str]:
    """Return the prompt as (text before the input, text after it). A template in the request replaces `template`. If
    the template is only `{text}` and `instructed` is true, the instruction goes before the input.

    The template is split at `{text}` before anything is inserted, so that braces in a client's text have no meaning.
    """
    path, own = request.get("query_template" if is_query else "doc_template")
    template = text(path, own) or template
    before, field, after = template.partition("{text}")
    if not field:
        raise InvalidInput.at(path, "a template needs {text}")
    if "{instruction}" in template:
        filled = _instruction(entry, defaults, request)
        length = len(template) + template.count("{instruction}") * len(filled)
        if length > MAX_PROMPT:
            raise InvalidInput.at(path, f"expected a prompt of at most {MAX_PROMPT} characters, got {length}")
        return before.replace("{instruction}", filled), after.replace("{instruction}", filled)
    chosen = text(*request.get("instruction")) or defaults.instruction or text(*request.get("default_instruction"))
    return (f"{chosen} ", "") if template == "{text}" and chosen and instructed else (before, after)
