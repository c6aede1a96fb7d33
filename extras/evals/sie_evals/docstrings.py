"""Texts for evaluation tasks: the docstrings of the library scipy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def scipy_docstrings() -> Iterator[tuple[str, str]]:
    """Yield `FILE:NAME` and the docstring of each public top-level function and class of scipy; the docstring is empty
    if it is missing. Skip files in folders `tests` and `_lib`.
    """
    import scipy

    root = Path(scipy.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if not {"tests", "_lib"}.isdisjoint(file.parts):
            continue
        # parse the file and do not import it, because an import has side effects
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{file.relative_to(root)}:{node.name}", ast.get_docstring(node) or ""
