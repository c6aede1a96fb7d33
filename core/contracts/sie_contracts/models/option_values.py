"""Checks of the values of request parameters. Each check takes one value, returns the value in the form that the model
needs, and raises InvalidInput with `path`, the path of the parameter in the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from sie_contracts.errors import InvalidInput
from sie_contracts.models.muvera import MAX_WIDTH, Muvera
from sie_contracts.plain import whole_number
from sie_contracts.wire.messages import Truncate

# score mode -> outputs from which a model with vector outputs computes the score
SCORE_MODES = {
    "dense": ("dense",),
    "sparse": ("sparse",),
    "colbert": ("multivector",),
    "hybrid": ("dense", "sparse", "multivector"),
}
MAX_HYPOTHESIS = 1000  # maximum number of characters in `hypothesis_template`
MAX_EXAMPLES = 100
MAX_RELATION_LABELS = 100
MAX_TASK = 100  # maximum number of characters in `task` and in `language`
MAX_NEW_TOKENS = 1 << 20
# maximum number of bytes of an option that is a list, a map or a schema, or whose value only the model's family checks
MAX_OWN_BYTES = 64 << 10
# parameter of MUVERA that is a whole number -> its bounds
_MUVERA_NUMBERS = {
    "num_repetitions": (1, 128),
    "num_simhash_projections": (0, 10),
    # at most 1,024 values for each token in each repetition: more would need too much memory for long texts
    "projection_dim": (1, 1024),
    "final_projection_dim": (1, MAX_WIDTH),
    "seed": (0, (1 << 53) - 1),  # largest whole number that every JSON reader represents exactly
}
_MUVERA_NULLABLE = {"projection_dim", "final_projection_dim"}


def bad(path: str, value: object, expected: str, reason: str = "schema") -> InvalidInput:
    return InvalidInput.at(path, f"expected {expected}, got {describe(value)}", reason=reason)


def describe(value: object) -> str:
    """Describe a value for an error message. A value that may contain a client's text is described only by its type,
    and a string also by its length.
    """
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else repr(value)
    if isinstance(value, str):
        return f"a string of length {len(value)}"
    return {"dict": "a map", "list": "a list"}.get(type(value).__name__, type(value).__name__)


def text(path: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise bad(path, value, "a string")
    return value or ""


def boolean(path: str, value: Any, *, default: bool = False) -> bool:
    if value is None:
        return default
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise bad(path, value, "true or false")


def one_of(path: str, value: Any, *, choices: Collection[str], default: str, reason: str = "schema") -> str:
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        raise bad(path, value, f"one of {', '.join(choices)}", reason)
    return value


def integer(path: str, value: Any, expected: str, low: int, high: int) -> int:
    number = whole_number(value)
    if type(number) is not int or not low <= number <= high:
        raise bad(path, value, expected)
    return number


def number(path: str, value: Any) -> float:
    if isinstance(value, float) and math.isfinite(value):
        return value
    if type(value) is int and abs(value) < 1 << 63:
        return float(value)
    raise InvalidInput.at(path, f"expected a finite number of 64 bits, got {type(value).__name__}")


def check_fraction(path: str, value: Any) -> None:
    if not 0 <= number(path, value) <= 1:
        raise bad(path, value, "a number from 0 to 1")


def weights(path: str, value: Any) -> dict[str, float]:
    names = ("dense", "sparse", "colbert")
    if not isinstance(value, dict) or not set(value) <= set(names) or not any(value.values()):
        raise bad(path, value, f"a map with weights for {', '.join(names)}, at least one above 0")
    weights = {name: number(f"{path}.{name}", weight) for name, weight in value.items()}
    for name, weight in weights.items():
        if weight < 0:
            raise bad(f"{path}.{name}", weight, "at least 0")
    return weights


def hypothesis(path: str, value: Any) -> str:
    if not isinstance(value, str) or value.count("{}") != 1 or len(value) > MAX_HYPOTHESIS:
        raise bad(path, value, f"a string of at most {MAX_HYPOTHESIS} characters with {{}} in the place of the label")
    return value


def short_text(path: str, value: Any, expected: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TASK:
        raise bad(path, value, f"{expected}, at most {MAX_TASK} characters")
    return value


def examples(path: str, value: Any) -> list[dict[str, Any]]:
    """Return example texts with their labels, which a classifier reads before the text to classify. If the
    labels of an example are a map (group -> label or labels), they become a list of `group.label`.
    """
    if not isinstance(value, list) or len(value) > MAX_EXAMPLES:
        raise bad(path, value, f"a list of at most {MAX_EXAMPLES} maps with text and labels")
    any_value(path, value)
    read = []
    for number, example in enumerate(value):
        labels = example.get("labels") if isinstance(example, dict) else None
        if isinstance(labels, dict):
            labels = [
                f"{group}.{label}" if isinstance(label, str) else label
                for group, own in labels.items()
                for label in (own if isinstance(own, list) else [own])
            ]
        if not (
            isinstance(example, dict)
            and example.keys() == {"text", "labels"}
            and isinstance(example["text"], str)
            and isinstance(labels, list)
            and all(isinstance(label, str) for label in labels)
        ):
            raise bad(f"{path}[{number}]", example, "a map with `text`, a string, and `labels`, a list of strings")
        read.append({"text": example["text"], "labels": labels})
    return read


def relation_labels(path: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > MAX_RELATION_LABELS:
        raise bad(path, value, f"a list of at most {MAX_RELATION_LABELS} strings")
    if not all(isinstance(label, str) and label.strip() for label in value):
        raise bad(path, value, "a list of strings that are not empty")
    return value


def label_thresholds(path: str, value: Any) -> dict[str, float]:
    """Return label -> lowest score at which the label is reported. `threshold` applies to all other labels."""
    if not isinstance(value, dict):
        raise bad(path, value, "a map of labels, each with a number from 0 to 1")
    any_value(path, value)
    for label, least in value.items():
        check_fraction(f"{path}.{str(label)[:64]}", least)
    return value


def any_value(path: str, value: Any) -> Any:
    """Return the value of an option. Raises InvalidInput if the value cannot be encoded for the worker, or is too
    large. If the model's family checks the option itself, the gateway makes only this check.
    """
    try:
        size = len(msgspec.msgpack.encode(value))
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InvalidInput.at(path, "expected a JSON value whose numbers fit in 64 bits") from error
    if size > MAX_OWN_BYTES:
        raise InvalidInput.at(path, f"expected at most {MAX_OWN_BYTES} bytes, got {size}")
    return value


def muvera_parameters(path: str, value: Mapping[str, Any], defaults: Muvera) -> Muvera:
    """Return `defaults`, overridden by the keys of `value`. Null keeps the default; for the two projection sizes, null
    means no projection. Raises InvalidInput, also if the encoding would be too wide even for token vectors of width 1.
    """
    changes: dict[str, int | bool | None] = {}
    for name, own in value.items():
        if name not in Muvera.__struct_fields__:
            expected = f"expected one of {', '.join(Muvera.__struct_fields__)}"
            raise InvalidInput.at(f"{path}.{str(name)[:64]}", f"no such key, {expected}")
        where = f"{path}.{name}"
        if own is None:
            if name in _MUVERA_NULLABLE:
                changes[name] = None
        elif name in _MUVERA_NUMBERS:
            low, high = _MUVERA_NUMBERS[name]
            or_null = " or null" if name in _MUVERA_NULLABLE else ""
            changes[name] = integer(where, own, f"a whole number from {low} to {high}{or_null}", low, high)
        else:
            changes[name] = boolean(where, own)
    parsed: Muvera = msgspec.structs.replace(defaults, **changes)
    parsed.width(1, path)
    return parsed


def truncate(path: str, value: Any, *, default: Truncate) -> Truncate:
    if value is None or value is True:
        return default
    if value is False:
        return "NONE"
    choices: tuple[Truncate, ...] = ("END", "START", "NONE")
    for choice in choices:
        if isinstance(value, str) and value.upper() == choice:
            return choice
    raise bad(path, value, "one of END, START, NONE")


# options that set the lowest score of a reported result; scores are probabilities, so the module `options` requires
# values from 0 to 1, except if the option `raw_scores` is true
THRESHOLDS = frozenset(
    {
        "threshold",
        "box_threshold",
        "text_threshold",
        "score_threshold",
        "prune_threshold",
        "highlight_threshold",
        "relation_threshold",
    }
)
# option of a family -> function that checks its value
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(THRESHOLDS, number),
    "top_k": lambda path, value: integer(path, value, "a whole number from 1 to 1000", 1, 1000),
    "task": lambda path, value: short_text(path, value, "the name of a task"),
    "language": lambda path, value: short_text(path, value, "the name or the code of a language"),
    "examples": examples,
    "label_thresholds": label_thresholds,
    "relation_labels": relation_labels,
    "max_new_tokens": lambda path, value: integer(path, value, "a whole number from 1 to 1048576", 1, MAX_NEW_TOKENS),
    "flat_ner": boolean,
    "multi_label": boolean,
    "merge_adjacent_entities": boolean,
    "precompute_labels": boolean,
    "raw_scores": boolean,
    "ocr": boolean,
    "tree": boolean,
    "word_times": boolean,
    "hypothesis_template": hypothesis,
    "score_weights": weights,
    "score_mode": lambda path, value: one_of(path, value, choices=SCORE_MODES, default="dense"),
}
