"""Which engine computes the hidden states of a model. A rule decides when the model is loaded, never a race: the same
model on the same kind of machine gives the same bits tomorrow.

family, device, precision, LoRAs, what is installed ──► RULES, in order: the first that names no obstacle ──► Choice

engine      computes                                                        chosen for
openvino    the graph of the model, converted at load, compiled for the CPU  texts on a CPU
torch       the packed path of `backbone`                                    everything

What a rule is decided by is measured in bench/results/engine.md. An engine whose states are not those of the stock path
is not used, whatever the rules say (`backbone`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sie_contracts.entries import Engine, ModelEntry
from sie_contracts.families import FAMILIES, TEXT_ENCODER
from sie_contracts.load_errors import load_failed


@dataclass(frozen=True)
class Facts:
    """What the rules look at. `device`: the type. `reads_text`: the model reads ids of texts and nothing else. `lora`:
    the LoRA that its entry gives every request. `is_limited`: the data of this process is limited. `attention`: the
    backend in force. `hides_tokens`: some tokens of its queries are not attended to, and some layers attend to a window
    alone.
    """

    device: str
    reads_text: bool
    lora: str = ""
    is_limited: bool = False
    attention: str = "sdpa"
    hides_tokens: bool = False

    @classmethod
    def of(cls, entry: ModelEntry, device: str, attention: str, *, is_limited: bool) -> Facts:
        """All that is known before the files of the model are read."""
        family = FAMILIES.get(entry.family)
        reads_text = family is not None and family.implementation == TEXT_ENCODER
        return cls(device, reads_text, entry.run.lora or "", is_limited, attention)


NO_TEXTS = Facts("cpu", reads_text=False)


@dataclass(frozen=True)
class Choice:
    """`reason`: why this one, and what those before it in RULES lack. `demanded`: by the entry of the model."""

    engine: Engine
    reason: str
    demanded: bool = False


TORCH = Choice("torch", "the model reads more than texts")


@dataclass(frozen=True)
class Rule:
    """`why`: what the measurement says. `package`: that has to be installed, by the extra of the same name.
    `obstacle`: why the engine does not serve such a model, empty if it does. `copies` of the weights are held at most
    while a model is loaded.
    """

    why: str
    package: str
    obstacle: Callable[[Facts], str]
    copies: int = 1


def _openvino(facts: Facts) -> str:
    if facts.device != "cpu":
        return f"the device is {facts.device}, not cpu"
    if not facts.reads_text:
        return "the model reads more than texts"
    if facts.hides_tokens:
        return "tokens of its queries are not attended to, and its layers have windows"
    if facts.attention == "eager":
        return "SIE_ATTENTION_BACKEND asks for the attention that is written out"
    if facts.lora:
        return "its entry has a LoRA, which runs on torch"
    if facts.is_limited:
        return "the memory of this process is limited, and what OpenVINO keeps of shapes it met is not"
    return ""


RULES: Mapping[Engine, Rule] = {
    "openvino": Rule("on a CPU it is the fastest for one text", "openvino", _openvino, copies=2),
    "torch": Rule("it serves every model", "", lambda facts: ""),
}


def choose(asked: Engine | None, facts: Facts, missing: Callable[[str], bool] | None = None) -> Choice:
    """The engine for such a model. `asked`: by its entry (`load.engine`); an impossible one is refused with
    ModelLoadFailed INCOMPATIBLE or DEPENDENCY. `missing`: whether a package is not installed.
    """
    missing = missing or _is_missing
    if asked is not None:
        rule = RULES[asked]
        if lacks := rule.obstacle(facts):
            raise load_failed("INCOMPATIBLE", f"load.engine is {asked}: {lacks}")
        if rule.package and missing(rule.package):
            raise load_failed("DEPENDENCY", f"load.engine is {asked}: {_install(rule.package)}")
        return Choice(asked, "load.engine of its entry", demanded=True)
    lacking: list[str] = []
    for engine, rule in RULES.items():
        lacks = rule.obstacle(facts)
        if not lacks and rule.package and missing(rule.package):
            lacks = _install(rule.package)
        if not lacks:
            return Choice(engine, "; ".join([*lacking, rule.why]))
        lacking.append(f"not {engine}: {lacks}")
    raise AssertionError("the last rule has no obstacle")


def of_pass(choice: Choice, lora: str) -> Engine:
    """The engine of a pass: a LoRA that its requests name acts on torch alone."""
    return TORCH.engine if lora else choice.engine


def _install(package: str) -> str:
    return f"the package {package} is not installed (extra sie-cluster[{package}])"


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None
