"""Choice of the engine that computes the hidden states of a model, when the model is loaded. The choice follows fixed
rules, not measured times, so a model returns the same bits on machines of one kind.

family, device, precision, LoRAs, installed packages ──► `rules`, in order: the first without an obstacle ──► Choice

Packages bring engines by the entry points `sie.engines`: `module:attribute` of a Rule, named like the engine. The last
rule is that of torch, the packed path of `backbone`, which runs every model. `backbone` rejects a chosen engine whose
hidden states differ from those of the unchanged transformers model.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from sie_contracts import entry_points
from sie_contracts.models.entries import ENGINE_POINTS
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import RunBatch


@dataclass(frozen=True)
class EngineFacts:
    """Facts that the rules read. `device`: the type of the device. `reads_text`: the model reads only ids of texts, no
    images or sounds. `lora`: the LoRA that the model's entry sets for every request. `is_limited`: RLIMIT_DATA limits
    this process. `attention`: the attention backend in use. `int8`: the entry requests weights in 8 bits.

    From the model's files, once they are read: `config`: the configuration of transformers. `hides_tokens`: some tokens
    of queries are masked. `gives_last_states`: all outputs are normalised states of the last token of a text.
    """

    device: str
    reads_text: bool
    lora: str = ""
    is_limited: bool = False
    attention: str = "sdpa"
    settings: Settings = field(default_factory=Settings)
    int8: bool = False
    config: Any = None
    hides_tokens: bool = False
    gives_last_states: bool = True


_INT8 = "load.precision is int8"
GRAPH = "graph"  # derived file in which an engine keeps the model in a format of its own
NO_TEXTS = EngineFacts("cpu", reads_text=False)


@dataclass(frozen=True)
class Choice:
    """Chosen engine. `reason`: why it was chosen, and why each engine before it in `rules` was not. `demand`: the field
    of the entry that demands this engine, with its value, else empty.
    """

    engine: str
    reason: str
    demand: str = ""


TORCH = Choice("torch", "the model reads more than texts")


class NotServed(Exception):
    """Raised if an engine cannot load or run this model. The message has the reason."""


class Unserved(Exception):
    """Raised if an engine cannot run a model whose torch weights are already freed: torch must load the model again."""


class StateRunner(Protocol):
    """Engine other than torch that computes the hidden states of one model. Several threads may call `run` at once.
    `attention`: the name of the engine's attention, for reports. `memory_bytes`: bytes of device memory in use.
    """

    attention: str
    memory_bytes: int

    def run(self, packed: Any) -> Any:
        """Return the states of the last layer, [tokens, width], in packed order."""

    def trials(self, packed: Any) -> Iterator[tuple[Any, Any]]:
        """Run the batch in each way in which `run` may run it. Yield the states of each, and the indices of the tokens
        whose states count.
        """

    def close(self) -> None:
        """Free what the engine holds. Do not call this during a pass."""


@dataclass(frozen=True)
class EngineLoad:
    """Model that an engine loads. `model`: the transformers model, which is not changed, and whose weights are
    freed after the load; without its weights if the engine `frees_torch`. `compute`: device, dtype and facts.
    `folder`: the model's files. `filler`: the token id for padding. `max_tokens`: the number of tokens of the
    longest text. `lanes`: the number of device threads.
    """

    model: Any
    compute: Any
    folder: Path | None
    filler: int
    max_tokens: int
    lanes: int


@dataclass(frozen=True)
class Rule:
    """Conditions of one engine, and its load. `why`: the reason to choose the engine. `package`: the package that must
    be installed; the pip extra that installs it has the same name. `obstacle`: returns the reason why the engine cannot
    run a model, empty if it can. `unasked`: returns the reason why the engine is not chosen for a model whose entry
    names no engine (load.engine), else empty. `held_bytes`: returns the peak bytes of a load, computed from the bytes
    of the weights.

    `load`: returns the engine with the model, or raises NotServed; None for torch. `states`: what a message calls the
    states that the engine computes. `frees_torch`: torch's weights are freed before the load. `only_causal`: the engine
    computes causal attention only. `runs`: returns whether the engine can run a batch; None if it can run all.
    `has_own_threads`: passes run on threads of the engine, not on those of torch.
    """

    why: str
    package: str
    obstacle: Callable[[EngineFacts], str]
    unasked: Callable[[EngineFacts], str] = lambda facts: ""
    held_bytes: Callable[[int], int] = lambda weight_bytes: weight_bytes
    load: Callable[[EngineLoad], StateRunner] | None = None
    states: str = ""
    frees_torch: bool = False
    only_causal: bool = False
    runs: Callable[[RunBatch], bool] | None = None
    has_own_threads: bool = False


def reads_more(facts: EngineFacts) -> str:
    return "" if facts.reads_text else "the model reads more than texts"


def in_int8(facts: EngineFacts) -> str:
    return "it does not support weights in 8 bits" if facts.int8 else ""


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Return the rules of all engines, by the names of their entry points; torch is last."""
    of_packages: dict[str, Rule] = entry_points.load(ENGINE_POINTS).objects
    return MappingProxyType(of_packages | {"torch": Rule("it serves every model", "", in_int8)})


def choose(requested: str | None, facts: EngineFacts, missing: Callable[[str], bool] | None = None) -> Choice:
    """Return the engine for a model. `requested`: the engine that its entry names (`load.engine`). `missing`: returns
    whether a package is not installed. Raises ModelLoadFailed INCOMPATIBLE or DEPENDENCY.
    """
    missing = missing or _is_missing
    if requested is not None:
        if requested not in rules():
            raise incompatible(f"load.engine is {requested}: no installed package brings this engine")
        rule = rules()[requested]
        if lacks := rule.obstacle(facts):
            raise incompatible(f"load.engine is {requested}: {lacks}")
        if rule.package and missing(rule.package):
            raise load_failed("DEPENDENCY", f"load.engine is {requested}: {_install(rule.package)}")
        return Choice(requested, "load.engine of its entry", f"load.engine is {requested}")
    lacking: list[str] = []
    for engine, rule in rules().items():
        lacks = rule.unasked(facts) or rule.obstacle(facts)
        if not lacks and rule.package and missing(rule.package):
            lacks = _install(rule.package)
        if not lacks:
            return Choice(engine, "; ".join([*lacking, rule.why]), _INT8 if facts.int8 else "")
        lacking.append(f"not {engine}: {lacks}")
    raise incompatible(f"{_INT8}: {'; '.join(lacking)}")


def of_batch(choice: Choice, batch: RunBatch) -> str:
    """Return the engine that runs a batch. Torch runs the batch if its requests select a LoRA, or if the model's engine
    cannot run it.
    """
    runs = rules()[choice.engine].runs
    return TORCH.engine if batch.lora or (runs is not None and not runs(batch)) else choice.engine


def _install(package: str) -> str:
    return f"the package {package} is not installed: pip install 'sie-cluster[{package}]'"


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None
