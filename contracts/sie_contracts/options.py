"""What a request asks of a model: its parameters merged over the profile's and the model's, once, here.

    Resolved + parameters of the request ──► run_options ──► messages.RunOptions, which travels with the work

No other code merges options, so every route and path executes the same set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sie_contracts.catalogue import Catalogue, ModelEntry, Resolved, RunDefaults
from sie_contracts.errors import InvalidInput
from sie_contracts.messages import RunOptions, Truncate

_QUERY_KINDS = {"query", "search_query"}
_POOLINGS = {"cls": "cls", "mean": "mean", "last": "last", "last_token": "last"}


class _Parameters:
    """The four levels at which a client may write a parameter, in order of precedence; null and [] mean unset."""

    KNOWN = frozenset({
        "output_types", "output_dtype", "is_query", "input_type", "instruction", "dimensions", "normalize", "truncate", "profile",
        "on_item_error", "pooling", "max_seq_length", "timing",
    })  # fmt: skip
    TOP_LEVEL = frozenset({"items", "inputs", "input", "params", "options", "model", "query"})

    def __init__(self, body: Mapping[str, Any]) -> None:
        params = _mapping(body, "params", "params")
        self.levels: list[tuple[str, Mapping[str, Any]]] = [
            ("params.", params),
            ("", body),
            ("params.options.", _mapping(params, "options", "params.options")),
            ("options.", _mapping(body, "options", "options")),
        ]

    def get(self, name: str) -> tuple[str, Any]:
        for prefix, level in self.levels:
            value = level.get(name)
            if value is not None and value != []:
                return prefix + name, value
        return name, None

    def unknown(self) -> list[str]:
        skipped = self.TOP_LEVEL
        return [
            prefix + str(name)[:64]
            for prefix, level in self.levels
            for name in level
            if name not in self.KNOWN and not (name in skipped and prefix in ("", "params."))
        ]


def _mapping(parent: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _bad(path, value, "a map or null")
    return value


def _bad(path: str, value: object, expected: str, reason: str = "schema") -> InvalidInput:
    return InvalidInput(f"{path}: expected {expected}, got {describe(value)}", reason=reason, param=path)


def describe(value: object) -> str:
    """A value in an error message: numbers and booleans as they are, anything that may hold a client's text by its type alone."""
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else repr(value)
    return {"dict": "a map", "list": "a list"}.get(type(value).__name__, type(value).__name__)


@dataclass(frozen=True)
class RequestOptions:
    """The outcome of merging: what the model runs, and how the reply is shaped."""

    run: RunOptions
    on_item_error: str = "slot"
    item_timing: bool = False
    warnings: tuple[str, ...] = ()


def run_options(resolved: Resolved, body: Mapping[str, Any], *, strict: bool = False) -> tuple[Resolved, RequestOptions]:
    """Merge the request's parameters over the profile's and the model's, and check each against the entry.

    Returns the resolution with the profile that `options.profile` may have chosen. Raises InvalidInput naming the path.
    """
    given = _Parameters(body)
    entry = resolved.entry
    resolved = _chosen_profile(resolved, *given.get("profile"))
    defaults = resolved.run

    path, value = given.get("output_types")
    outputs = tuple(defaults.output_types or (("dense",) if "dense" in entry.outputs else tuple(entry.outputs)[:1]))
    if value is not None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _bad(path, value, "a list of output names")
        outputs = tuple(dict.fromkeys(value))
    for name in outputs:
        if name not in entry.outputs:
            raise InvalidInput(
                f"{path}: {entry.id} has no such output, it has {', '.join(entry.outputs)}", reason="unsupported_output", param=path
            )

    path, value = given.get("output_dtype")
    if value is not None and value != "float32":
        raise InvalidInput(f"{path}: expected one of float32", reason="unsupported_dtype", param=path)

    normalize = _boolean(*given.get("normalize"), default=defaults.normalize if defaults.normalize is not None else True)
    prefix, suffix = _prompt(entry, defaults, given)
    run = RunOptions(
        outputs=outputs,
        prefix=prefix,
        suffix=suffix,
        truncate=_truncate(*given.get("truncate")),
        pooling=_one_of(*given.get("pooling"), choices=_POOLINGS, default=defaults.pooling or ""),
        normalize=normalize,
        dimensions=_dimensions(entry, defaults, *given.get("dimensions")),
        max_tokens=_max_tokens(entry, *given.get("max_seq_length")),
        lora=defaults.lora or "",
    )
    on_error = _one_of(*given.get("on_item_error"), choices={"slot": "slot", "fail": "fail"}, default="slot")
    timing = _one_of(*given.get("timing"), choices={"request": "request", "items": "items"}, default="request")
    unknown = given.unknown()
    if unknown and strict:
        raise InvalidInput(f"{unknown[0]}: no such option", reason="unknown_option", param=unknown[0])
    warnings = tuple(f"{name}: ignored, no such option" for name in unknown[:20])
    return resolved, RequestOptions(run, on_error, timing == "items", warnings)


def _chosen_profile(resolved: Resolved, path: str, value: Any) -> Resolved:
    if value is None or value == resolved.profile:
        return resolved
    if not isinstance(value, str):
        raise _bad(path, value, "the name of a profile")
    if value == "default":
        return resolved
    if resolved.profile != "default":
        raise InvalidInput(f"{path}: differs from the profile in the model name", reason="profile_conflict", param=path)
    if value not in resolved.entry.profiles:
        names = ", ".join(["default", *resolved.entry.profiles])
        raise InvalidInput(f"{path}: unknown profile, {resolved.entry.id} has {names}", reason="unknown_profile", param=path)
    return Catalogue.resolve_profile(resolved.entry, value, resolved.requested)


def _boolean(path: str, value: Any, *, default: bool) -> bool:
    if value is None:
        return default
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise _bad(path, value, "true or false")


def _one_of(path: str, value: Any, *, choices: Mapping[str, str], default: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        raise _bad(path, value, f"one of {', '.join(choices)}")
    return choices[value]


def _integer(path: str, value: Any, expected: str, low: int, high: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise _bad(path, value, expected)
    return int(value)


def _truncate(path: str, value: Any) -> Truncate:
    if value is None or value is True:
        return "END"
    if value is False:
        return "NONE"
    choices: tuple[Truncate, ...] = ("END", "START", "NONE")
    for choice in choices:
        if isinstance(value, str) and value.upper() == choice:
            return choice
    raise _bad(path, value, "one of END, START, NONE")


def _dimensions(entry: ModelEntry, defaults: RunDefaults, path: str, value: Any) -> int:
    if value is None:
        return 0
    native = entry.outputs.get("dense", 0)
    allowed = sorted({native, *(defaults.dimensions or ())} - {0})
    if isinstance(value, float) and (math.isnan(value) or math.isinf(value)):
        raise _bad(path, value, "a whole number")
    width = _integer(path, value, "a whole number", 1, 1 << 20)
    if width not in allowed:
        raise InvalidInput(
            f"{path}: {entry.id} allows {', '.join(map(str, allowed))}, got {width}", reason="bad_dimensions", param=path
        )
    return 0 if width == native else width


def _max_tokens(entry: ModelEntry, path: str, value: Any) -> int:
    return 0 if value is None else _integer(path, value, f"a whole number from 1 to {entry.max_tokens}", 1, entry.max_tokens)


def _prompt(entry: ModelEntry, defaults: RunDefaults, given: _Parameters) -> tuple[str, str]:
    """What stands before and after the text. The template is cut at its own `{text}` first, so braces of a client mean nothing."""
    path, kind = given.get("input_type")
    if kind is not None and not isinstance(kind, str):
        raise _bad(path, kind, "a string")
    is_query = _boolean(*given.get("is_query"), default=kind in _QUERY_KINDS if kind is not None else bool(defaults.is_query))
    path, instruction = given.get("instruction")
    if instruction is not None and not isinstance(instruction, str):
        raise _bad(path, instruction, "a string")
    template = entry.prompts.get("query" if is_query else "document", "{text}")
    before, _, after = template.partition("{text}")
    chosen = instruction or defaults.instruction
    if "{instruction}" in template:
        filled = chosen or entry.prompts.get("default_instruction", "")
        return before.replace("{instruction}", filled), after.replace("{instruction}", filled)
    if template == "{text}" and chosen:
        return f"{chosen} ", ""
    return before, after
