"""Opens the vector database at a URL, as a sink or as a live collection:

qdrant://[api-key@]host:port     Qdrant over HTTP
qdrants://[api-key@]host:port    Qdrant over HTTPS
postgresql://user:password@host:port/database?sslmode=verify-full    PostgreSQL with pgvector
"""

from __future__ import annotations

import importlib.util
from urllib.parse import unquote, urlsplit

from sie_bulk_jobs.sinks.live import LiveCollection, LiveSource
from sie_bulk_jobs.sinks.sink import PATIENCE, ROW_ID, Output, Sink
from sie_contracts.settings import SettingError
from sie_store.object_stores import RetryPolicy

QDRANT_PORT = 6333

_OUTPUTS: dict[str, tuple[Output, ...]] = {
    "qdrant": ("dense", "sparse", "multivector"),
    "postgresql": ("dense", "sparse"),
}


def opened(url: str, setting: str, patience: RetryPolicy = PATIENCE) -> Sink:
    """Return the sink for the database at `url`, not connected yet. Raises SettingError, which names `setting` but not
    `url`, because the URL may contain a password.
    """
    scheme = _scheme(url, setting)
    if scheme == "postgresql":
        from sie_bulk_jobs.sinks.pgvector import PgvectorSink

        return PgvectorSink(url, patience)
    from sie_bulk_jobs.sinks.qdrant import QdrantSink

    return QdrantSink(*_address(url, setting), patience)


def opened_live(url: str, setting: str, source: LiveSource, patience: RetryPolicy = PATIENCE) -> LiveCollection:
    """Return the live collection of the database at `url`, not connected yet. Raises SettingError, which names
    `setting` but not `url`, because the URL may contain a password.
    """
    scheme = _scheme(url, setting)
    if scheme == "postgresql":
        from sie_bulk_jobs.sinks.pgvector import PostgresDatabase
        from sie_bulk_jobs.sinks.pgvector_live import PgvectorLive

        return PgvectorLive(PostgresDatabase(url, patience), source)
    from sie_bulk_jobs.sinks.qdrant import QdrantConnection
    from sie_bulk_jobs.sinks.qdrant_live import ANSWER_BYTES, QdrantLive

    return QdrantLive(QdrantConnection(*_address(url, setting), patience, ANSWER_BYTES), source)


def _scheme(url: str, setting: str) -> str:
    """Return the scheme of a database's URL. Raises SettingError if the URL is invalid or the needed package is
    missing.
    """
    try:
        pieces = urlsplit(url)
        _ = pieces.port
        # raises UnicodeError, which is a ValueError, for a host name that no resolver accepts
        (pieces.hostname or "").encode("idna")
    except ValueError:
        raise SettingError(setting, "the URL of a database has no valid host and port") from None
    if pieces.scheme in ("qdrant", "qdrants"):
        more = pieces.path.strip("/") or pieces.query or pieces.fragment
        if not pieces.hostname or pieces.password is not None or more:
            raise SettingError(setting, "the URL of Qdrant is qdrant://[api-key@]host:port, or qdrants:// for TLS")
    elif pieces.scheme == "postgresql":
        if not pieces.hostname or not pieces.path.strip("/"):
            raise SettingError(setting, "the URL of PostgreSQL is postgresql://user:password@host:port/database")
        if importlib.util.find_spec("asyncpg") is None:
            raise SettingError(setting, "PostgreSQL needs asyncpg: pip install 'sie-cluster[pgvector]'")
    else:
        raise SettingError(setting, "the URL of a database begins with qdrant://, qdrants:// or postgresql://")
    return pieces.scheme


def _address(url: str, setting: str) -> tuple[str, str]:
    """Return the HTTP URL of a Qdrant server, and its API key. Raises SettingError."""
    import httpx

    pieces = urlsplit(url)
    host = f"[{pieces.hostname}]" if ":" in (pieces.hostname or "") else pieces.hostname
    scheme = "https" if pieces.scheme == "qdrants" else "http"
    address, key = f"{scheme}://{host}:{pieces.port or QDRANT_PORT}", unquote(pieces.username or "")
    try:
        httpx.URL(address)
    except httpx.InvalidURL:
        raise SettingError(setting, "the URL of Qdrant has no valid host") from None
    if not (key.isascii() and key.isprintable()):
        raise SettingError(setting, "the API key of Qdrant must have only printable ASCII characters")
    return address, key


def outputs(url: str) -> tuple[Output, ...]:
    """Return the outputs of models that the database at `url` can store."""
    return _OUTPUTS[url.partition("://")[0].replace("qdrants", "qdrant")]


def reserved(url: str) -> frozenset[str]:
    """Return the payload fields that SIE itself uses in the database at `url`. Rows must not have these fields."""
    return frozenset({ROW_ID} if url.partition("://")[0] in ("qdrant", "qdrants") else ())
