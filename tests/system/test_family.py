"""The family of docs/families.md, added with the file and the row that stand on that page, is served over HTTP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from cluster import Cluster, running
from pages import DOCS, ROOT
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

PAGE = (DOCS / "families.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
CLASS = "adapter/sie_adapter/families/static.py"
TABLE = "core/contracts/sie_contracts/models/families.py"
ENTRY = "models/me/static.yaml"
BEFORE_ROWS = "FAMILIES: Mapping[str, Family] = MappingProxyType(\n    {\n"
WORDS = ["[UNK]", "river", "runs", "north"]
VECTORS = np.random.default_rng(0).standard_normal((len(WORDS), 16)).astype(np.float32)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the two packages that a family touches, with its file and its row."""
    folder = tmp_path_factory.mktemp("code")
    for package in (Path(CLASS).parents[1], Path(TABLE).parents[1]):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "catalog").symlink_to(ROOT / "catalog")
    (folder / CLASS).write_text(BLOCKS[CLASS])
    table = (folder / TABLE).read_text()
    assert BEFORE_ROWS in table
    assert BLOCKS[TABLE].count("Family(") == 1
    (folder / TABLE).write_text(table.replace(BEFORE_ROWS, BEFORE_ROWS + BLOCKS[TABLE]))
    return folder


def test_the_file_of_the_page_passes_lint(tmp_path: Path) -> None:
    file = tmp_path / "static.py"
    file.write_text(BLOCKS[CLASS])
    for command in (["format", "--check"], ["check"]):
        argv = [
            str(Path(sys.executable).with_name("ruff")),
            *command,
            "--config",
            str(ROOT / "pyproject.toml"),
            str(file),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_types_of_the_file_of_the_page_are_right(tmp_path: Path) -> None:
    file = tmp_path / "static.py"
    file.write_text(BLOCKS[CLASS])
    argv = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def cluster(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("family")
    weights = folder / "weights"
    weights.mkdir()
    save_file({"embeddings": VECTORS}, weights / "model.safetensors")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(weights / "tokenizer.json"))
    file = folder / ENTRY
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump({**yaml.safe_load(BLOCKS[ENTRY]), "weights": {"path": str(weights)}}))
    path = os.pathsep.join(str(code / folder) for folder in ("adapter", "core/contracts"))
    arguments = ["--models-dir", str(folder / "models"), "--no-spare", "--standalone"]
    with running(folder / "data", *arguments, environ={"PYTHONPATH": path}) as cluster:
        yield cluster


def expected(text: str) -> np.ndarray:
    mean = VECTORS[[WORDS.index(word) for word in text.split()]].mean(0)
    return mean / np.linalg.norm(mean)


def test_a_family_of_one_file_and_one_row_is_served_over_http(cluster: Cluster) -> None:
    texts = ["river runs", "north", "north river river"]
    answer = httpx.post(f"{cluster.url}/v1/encode/me/static", json={"items": texts}, timeout=60)
    assert answer.status_code == 200, answer.text + cluster.log()
    for text, item in zip(texts, answer.json()["items"], strict=True):
        assert np.abs(np.asarray(item["dense"]["values"]) - expected(text)).max() <= 1e-6


def test_its_row_gives_it_the_routes_of_vectors_and_its_bundle(cluster: Cluster) -> None:
    body = {"model": "me/static", "input": ["north"]}
    answer = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert np.abs(np.asarray(answer.json()["data"][0]["embedding"]) - expected("north")).max() <= 1e-6
    assert httpx.get(f"{cluster.url}/v1/models/me/static", timeout=60).json()["bundles"] == ["default"]
