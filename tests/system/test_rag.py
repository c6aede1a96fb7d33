"""The programs of docs/rag.md, each as a file beside a cluster and the database that it names."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared
from cluster import Cluster
from databases import with_extension
from pages import ADDRESS, DOCS, blocks
from postgres_server import PostgresServer
from qdrant_server import QdrantServer

pytestmark = shared.OPEN
QDRANT, POSTGRES = "http://127.0.0.1:6333", "postgresql://127.0.0.1:5432/vectors"
HEAVY = Path(__file__).parents[2] / ".venv-clients/bin/python"  # see `make test-long`


def program(word: str) -> str:
    """Return the program that imports `word`."""
    (code,) = [
        block.code for block in blocks(DOCS / "rag.md", "python") if re.search(rf"\b(from|import) {word}", block.code)
    ]
    return code


def prompt(code: str, cluster: Cluster, folder: Path, python: Path = Path(sys.executable)) -> list[str]:
    """Return the lines that a program prints."""
    (folder / "rag.py").write_text(code.replace(ADDRESS, cluster.url))
    environ = {**os.environ, "SIE_BASE_URL": cluster.url, "NO_PROXY": "*", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [str(python), "rag.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(lines: list[str], code: str) -> None:
    """Check that two of the three nearest texts stand between the first and the last line, which all programs print."""
    first, *best, last = lines
    assert (first, last) == ("Answer from these texts alone:", "Question: Who wrote the first program?")
    texts = re.findall(r'^    "(.+\.)",$', code, re.MULTILINE)
    assert len(texts) == 4
    assert len(set(best)) == 2
    assert set(best) <= set(texts)
    assert set(best) & set(texts[:2]), "of the three nearest, two are about the question"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.begin()
        asyncio.run(with_extension(server))
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QdrantServer]:
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"))
    server.start()
    yield server
    server.kill()


def test_the_program_with_qdrant_writes_the_prompt(open_cluster: Cluster, qdrant: QdrantServer, tmp_path: Path) -> None:
    code = program("qdrant_client")
    assert QDRANT in code
    check(prompt(code.replace(QDRANT, f"http://127.0.0.1:{qdrant.port}"), open_cluster, tmp_path), code)


def test_the_program_with_postgresql_writes_the_prompt(
    open_cluster: Cluster, postgres: PostgresServer, tmp_path: Path
) -> None:
    code = program("asyncpg")
    assert POSTGRES in code
    check(prompt(code.replace(POSTGRES, postgres.url()), open_cluster, tmp_path), code)


def test_the_program_with_langchain_writes_the_prompt(open_cluster: Cluster, tmp_path: Path) -> None:
    code = program("langchain_openai")
    check(prompt(code, open_cluster, tmp_path), code)


@pytest.mark.long
def test_the_program_with_llamaindex_writes_the_prompt(open_cluster: Cluster, tmp_path: Path) -> None:
    code = program("llama_index")
    check(prompt(code, open_cluster, tmp_path, HEAVY), code)
