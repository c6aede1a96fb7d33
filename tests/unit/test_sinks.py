"""Which URLs name a vector database, and what is said of those that do not."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sie_contracts.settings import SettingError
from sie_store.sinks.opening import opened
from sie_store.sinks.pgvector import PgvectorSink
from sie_store.sinks.qdrant import QdrantSink
from sie_store.sinks.sink import RowsRefused, SinkRows

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("qdrant://localhost", QdrantSink),
        (f"qdrant://{SECRET}@qdrant.default.svc:6333/", QdrantSink),
        (f"qdrants://{SECRET}%2F@[::1]:443", QdrantSink),
        (f"postgresql://me:{SECRET}@db:5432/vectors?sslmode=verify-full", PgvectorSink),
        ("postgresql://db/vectors", PgvectorSink),
    ],
)
async def test_a_url_names_a_database(url: str, kind: type[object]) -> None:
    sink = opened(url, "SIE_JOBS_SINKS")
    assert isinstance(sink, kind)
    await sink.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        SECRET,
        f"http://{SECRET}@localhost:6333",
        f"qdrant://{SECRET}@",
        f"qdrant://{SECRET}:x@localhost",
        f"qdrant://{SECRET}@localhost/path",
        f"qdrant://{SECRET}@localhost?x=y",
        f"qdrant://{SECRET}@localhost:port",
        f"qdrant://{SECRET}@[localhost",
        f"postgresql://me:{SECRET}@db",
        f"postgresql:///{SECRET}",
        f"mysql://me:{SECRET}@db/vectors",
    ],
)
def test_what_names_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(SettingError, match=r"^SIE_JOBS_SINKS: ") as refused:
        opened(url, "SIE_JOBS_SINKS")
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


def test_no_library_of_a_database_is_imported_before_one_is_opened() -> None:
    code = "import sys, sie_store.sinks.opening; print(sorted({'httpx', 'asyncpg'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_last_row_of_each_id_is_written() -> None:
    rows = SinkRows(["a", "b", "a"], np.arange(6, dtype=np.float32).reshape(3, 2), [{"n": 0}, {"n": 1}, {"n": 2}])
    latest = rows.latest(2)
    assert (latest.ids, latest.payloads) == (["b", "a"], [{"n": 1}, {"n": 2}])
    assert latest.vectors.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    with pytest.raises(RowsRefused, match=r"\(3, 3\) is expected"):
        rows.latest(3)
