"""Choice of the engine that computes the hidden states of a model, when the model is loaded. The choice follows fixed
rules, not measured times, so a model returns the same bits on machines of one kind.

family, device, precision, LoRAs, installed packages ──► RULES, in order: the first without an obstacle ──► Choice

  engine      computes                                                        chosen for
  openvino    the graph of the model, converted at load, compiled for the CPU  texts on a CPU
  sglang      a server of that package, in a separate process                  decoders of dense vectors on a GPU, if
                                                                               SIE_SGLANG_PYTHON is set
  torch       the packed path of `backbone`                                    everything

The measurements behind the rules are in bench/results/engine.md. SGLang (enabled by SIE_SGLANG_PYTHON) was not
measured. `backbone` rejects a chosen engine whose hidden states differ from those of the unchanged transformers model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sie_contracts.models.entries import Engine
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.wire.ipc import RunBatch


@dataclass(frozen=True)
class EngineFacts:
    """Facts that the rules read. `device`: the type of the device. `reads_text`: the model reads only ids of texts, no
    images or sounds. `lora`: the LoRA that the model's entry sets for every request. `is_limited`: RLIMIT_DATA limits
    this process. `attention`: the attention backend in use. `sglang`: the Python of an environment with SGLang, empty
    if no setting names one. `int8`: the entry requests weights in 8 bits.

    From the model's files: `hides_tokens`: some tokens of queries are masked, and in some layers a token attends only
    to a window of near tokens; OpenVINO cannot run a model with both. `beyond_sglang`: the reason why SGLang cannot
    compute the vectors of this model, empty if it can.
    """

    device: str
    reads_text: bool
    lora: str = ""
    is_limited: bool = False
    attention: str = "sdpa"
    sglang: str = ""
    int8: bool = False
    hides_tokens: bool = False
    beyond_sglang: str = ""


# Bytes of float32 weights up to which a graph is compiled twice: once for batches that run at the same time, each on
# one core, and once for a batch that runs alone, on several cores. For a larger model, a faster answer to a single
# request does not justify the memory of the second copy.
TWICE_BYTES = 256 << 20
_INT8 = "load.precision is int8"
NO_TEXTS = EngineFacts("cpu", reads_text=False)


@dataclass(frozen=True)
class Choice:
    """Chosen engine. `reason`: why it was chosen, and why each engine before it in RULES was not chosen. `demand`: the
    field of the entry that demands this engine, with its value, else empty.
    """

    engine: Engine
    reason: str
    demand: str = ""


TORCH = Choice("torch", "the model reads more than texts")


class Unserved(Exception):
    """Raised if an engine cannot run a model whose torch weights are already freed: torch must load the model again."""


@dataclass(frozen=True)
class Rule:
    """Conditions of one engine. `why`: the reason to choose the engine. `package`: the package that must be installed;
    the pip extra that installs it has the same name. `obstacle`: returns the reason why the engine cannot run a model,
    empty if it can. `unasked`: returns the reason why the engine is not chosen for a model whose entry names no engine
    (load.engine), else empty. `held_bytes`: returns the peak bytes of a load, computed from the bytes of the weights.
    """

    why: str
    package: str
    obstacle: Callable[[EngineFacts], str]
    unasked: Callable[[EngineFacts], str] = lambda facts: ""
    held_bytes: Callable[[int], int] = lambda weight_bytes: weight_bytes


def _reads_more(facts: EngineFacts) -> str:
    return "" if facts.reads_text else "the model reads more than texts"


def is_compiled_twice(weight_bytes: int) -> bool:
    return weight_bytes <= TWICE_BYTES


def _bytes_of_graphs(weight_bytes: int) -> int:
    # copies of the weights: one in torch, and one for each compiled graph
    return (3 if is_compiled_twice(weight_bytes) else 2) * weight_bytes


def _openvino(facts: EngineFacts) -> str:
    if facts.device != "cpu":
        return f"the device is {facts.device}, not cpu"
    if more := _reads_more(facts):
        return more
    if facts.hides_tokens:
        return "some tokens of its queries are not attended to, and its layers attend to windows"
    if facts.attention == "eager":
        return "SIE_ATTENTION_BACKEND asks for eager attention"
    if facts.lora:
        return "its entry has a LoRA, which runs on torch"
    if facts.is_limited:
        return "RLIMIT_DATA limits this process, and OpenVINO's cache of shapes has no limit in bytes"
    return ""


def _in_int8(facts: EngineFacts) -> str:
    return "it does not support weights in 8 bits" if facts.int8 else ""


def _sglang(facts: EngineFacts) -> str:
    if not facts.sglang:
        return "SIE_SGLANG_PYTHON names no environment that has the package"
    if more := _reads_more(facts) or facts.beyond_sglang or _in_int8(facts):
        return more
    if facts.lora:
        return "its entry has a LoRA, which runs on torch"
    return "RLIMIT_DATA limits the memory of this process, but not of the SGLang process" if facts.is_limited else ""


RULES: Mapping[Engine, Rule] = {
    "openvino": Rule("on a CPU it is the fastest for one text", "openvino", _openvino, held_bytes=_bytes_of_graphs),
    "sglang": Rule(
        "SIE_SGLANG_PYTHON names an environment with SGLang, which is for decoder models",
        "",
        _sglang,
        lambda facts: "" if facts.device == "cuda" else f"the device is {facts.device}, not cuda",
        held_bytes=lambda weight_bytes: 2 * weight_bytes,
    ),
    "torch": Rule("it serves every model", "", _in_int8),
}


def choose(requested: Engine | None, facts: EngineFacts, missing: Callable[[str], bool] | None = None) -> Choice:
    """Return the engine for a model. `requested`: the engine that its entry names (`load.engine`). `missing`: returns
    whether a package is not installed. Raises ModelLoadFailed INCOMPATIBLE or DEPENDENCY.
    """
    missing = missing or _is_missing
    if requested is not None:
        rule = RULES[requested]
        if lacks := rule.obstacle(facts):
            raise incompatible(f"load.engine is {requested}: {lacks}")
        if rule.package and missing(rule.package):
            raise load_failed("DEPENDENCY", f"load.engine is {requested}: {_install(rule.package)}")
        return Choice(requested, "load.engine of its entry", f"load.engine is {requested}")
    lacking: list[str] = []
    for engine, rule in RULES.items():
        lacks = rule.unasked(facts) or rule.obstacle(facts)
        if not lacks and rule.package and missing(rule.package):
            lacks = _install(rule.package)
        if not lacks:
            return Choice(engine, "; ".join([*lacking, rule.why]), _INT8 if facts.int8 else "")
        lacking.append(f"not {engine}: {lacks}")
    raise incompatible(f"{_INT8}: {'; '.join(lacking)}")


def of_batch(choice: Choice, batch: RunBatch) -> Engine:
    """Return the engine that runs a batch. Torch runs the batch if its requests select a LoRA. If the model's engine is
    SGLang, torch also runs each batch with an output other than normalised vectors of the last token.
    """
    if batch.lora:
        return TORCH.engine
    if choice.engine == "sglang" and not _is_plain(batch):
        return TORCH.engine
    return choice.engine


def _is_plain(batch: RunBatch) -> bool:
    return batch.pooling in ("", "last") and all(
        group.options.outputs == ("dense",) and group.options.normalize and group.options.muvera is None
        for group in batch.groups
    )


def _install(package: str) -> str:
    return f"the package {package} is not installed (extra sie-cluster[{package}])"


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None
