"""Documents in an environment of their own: what the product answers is what docling itself makes of the same files.

The environment is made with pip, from the extra `documents`; DOCUMENTS_PYTHON names a Python that has it already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import extras
import measure
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000), pytest.mark.xdist_group("documents")]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("DOCUMENTS_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("documents")
    (folder / "constraints.txt").write_text(extras.constraints("documents"))
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    made = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", made, "install", "--quiet"]
    wanted = ["--constraint", str(folder / "constraints.txt"), f"{ROOT}[documents]"]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=2400)
    if done.returncode:
        pytest.skip(f"the extra `documents` could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    return made


@pytest.fixture(scope="module")
def found(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("oracle") / "found.json"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in measure.PACKAGES)}
    script = str(ROOT / "tests" / "documents_oracle.py")
    done = subprocess.run([python, script, str(out)], env=environ, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def test_text_markdown_and_tree_are_those_of_docling(found: dict[str, Any]) -> None:
    ours = dict(zip(found["names"], found["ours"], strict=False))
    for name, theirs in found["theirs"].items():
        data = ours[name]["data"]
        assert {key: data[key] for key in theirs} == theirs, name
        assert (data["format"], data["is_complete"]) == (name.partition(".")[2], True)
    assert ours["a.pdf"]["data"]["text"].split() == ["Invoice", "number", "17", "Total", "12.50", "Thank", "you"]
    assert ours["a.pdf"]["data"]["pages"] == 2
    assert "Zürich 東京" in ours["a.docx"]["data"]["markdown"]
    assert "| cat" in ours["a.xlsx"]["data"]["markdown"]


def test_a_file_that_cannot_be_parsed_fails_alone_and_in_our_words(found: dict[str, Any]) -> None:
    told = dict(zip([*found["names"], "ocr"], found["ours"], strict=True))
    assert told["broken.pdf"] == ["invalid_media", "document: undecodable: the pdf document is damaged or encrypted"]
    assert told["broken.docx"][1].startswith("document: undecodable: the document is damaged")
    assert told["secret.pdf"][1].startswith("document: undecodable: the document is said to be pdf, its content is not")
    assert told["ocr"][0] == "unknown_option"
    assert found["pids"] >= 1
