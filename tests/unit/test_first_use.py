"""msgspec prepares types that several threads of an adapter decode at import, before the first thread decodes one.

msgspec resolves the types of a Struct's fields at its first decode, in Python code during which other threads can run.
A second thread that decodes the same Struct meanwhile finds incomplete data and follows a null pointer.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ENTRY = {"id": "toy/one", "weights": {"path": "/toy"}, "family": "toy", "outputs": {"dense": 8}, "max_tokens": 8}
MANIFEST = {"repository": "toy/one", "revision": "0" * 40, "files": {"config.json": {"bytes": 2, "sha256": "0" * 64}}}
LEARNT_WHILE = """
import json, sys
from sie_contracts.models import catalogue, entries
from sie_store.weights import manifest
names = []
sys.setprofile(lambda frame, event, argument: names.append(frame.f_code.co_name))
{use}
sys.setprofile(None)
print("get_class_annotations" in names)
"""


@pytest.mark.parametrize(
    "use", [f"entries.parse_entry({ENTRY!r})", f"manifest.decode(json.dumps({MANIFEST!r}).encode())"]
)
def test_a_type_that_threads_decode_is_learnt_at_import(use: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LEARNT_WHILE.format(use=use)], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.split() == ["False"]
