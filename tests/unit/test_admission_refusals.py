"""The table of refusals in the head of the room admission names every place that raises one."""

from __future__ import annotations

import ast
from pathlib import Path

import sie_gateway
from sie_gateway import admission

CODES = {"QueueFull": "QUEUE_FULL", "RateLimited": "RATE_LIMITED", "ResourceExhausted": "RESOURCE_EXHAUSTED"}


def test_the_table_of_refusals_names_each_class_that_refuses() -> None:
    root = Path(str(sie_gateway.__file__)).parent
    raised = {
        (f"{path.relative_to(root).with_suffix('').as_posix()}.{top.name}", CODES[call.func.id])
        for path in root.rglob("*.py")
        for top in ast.parse(path.read_text()).body
        if isinstance(top, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(top)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CODES
    }
    lines = [line.split() for line in (admission.__doc__ or "").splitlines()]
    assert {(words[0], words[1]) for words in lines if len(words) > 2 and words[1] in CODES.values()} == raised
