"""The steps of a migration, and which of them are left. Nothing is stored on this machine: the cluster says it all.

check ──► quality ──► embed ──► shadow ──► flip
             │          │         │          └ the alias names the new model
             │          │         └ the alias has it as its shadow, for long enough
             │          └ the job over the corpus is completed
             └ that job exists: it is only submitted after the quality was accepted
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Step = Literal["check", "quality", "embed", "shadow", "flip"]
STEPS: tuple[Step, ...] = ("check", "quality", "embed", "shadow", "flip")
# the last step of a run, by the name that a user gives
UNTIL: dict[str, Step] = {"check": "quality", "embed": "embed", "shadow": "shadow", "flip": "flip"}


@dataclass(frozen=True)
class MigrationState:
    """State of a migration in the cluster. `target`, `shadow`: the models that the alias names now. `shadow_s`: since
    when the shadow is set, seconds. `is_submitted`, `is_embedded`: whether the job over the corpus exists, and has
    ended with an answer for each row.
    """

    target: str
    shadow: str = ""
    shadow_s: float = 0.0
    is_submitted: bool = False
    is_embedded: bool = False


def remaining_steps(state: MigrationState, model: str, until: Step, shadow_s: float) -> tuple[Step, ...]:
    """The steps to take, in their order. None where the alias names the model already. `check` is always taken: what
    it found before may have changed.
    """
    if state.target == model:
        return ()
    done: set[Step] = set()
    if state.is_submitted:
        done.add("quality")
    if state.is_embedded:
        done.add("embed")
    if shadow_s <= 0 or (state.is_embedded and state.shadow == model and state.shadow_s >= shadow_s):
        done.add("shadow")
    return tuple(step for step in STEPS[: STEPS.index(until) + 1] if step not in done)


def key_of(alias: str, model: str, digest: str, request: dict[str, Any]) -> str:
    """The name of a migration: of its alias, its model, its corpus, and all that makes its job another one."""
    parts = msgspec.json.encode([alias, model, digest, request], order="sorted")
    return hashlib.sha256(parts).hexdigest()[:32]
