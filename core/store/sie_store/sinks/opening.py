"""Opens the vector database at a URL, as a sink or as a live collection:

qdrant://[api-key@]host:port     Qdrant over HTTP
qdrants://[api-key@]host:port    Qdrant over HTTPS
postgresql://user:password@host:port/database?sslmode=verify-full    PostgreSQL with pgvector
"""

from __future__ import annotations

import importlib.util
from urllib.parse import unquote, urlsplit

from sie_contracts.settings import SettingError
from sie_store.object_stores import RetryPolicy
from sie_store.sinks.live import LiveCollection, LiveSource
from sie_store.sinks.sink import PATIENCE, ROW_ID, Sink

QDRANT_PORT = 6333


def opened(url: str, setting: str, patience: RetryPolicy = PATIENCE) -> Sink:
    """Return the sink for the database at `url`, not connected yet. Raises SettingError, which names `setting` but not
    `url`, because the URL may contain a password.
    """
    if _scheme(url, setting) == "postgresql":
        from sie_store.sinks.pgvector import PgvectorSink

        return PgvectorSink(url, patience)
    from sie_store.sinks.qdrant import QdrantSink

    return QdrantSink(*_address(url), patience)


def opened_live(url: str, setting: str, source: LiveSource, patience: RetryPolicy = PATIENCE) -> LiveCollection:
    """Return the live collection of the database at `url`; no connection is made yet. Raises SettingError, which names
    `setting`, and never `url`.
    """
    if _scheme(url, setting) == "postgresql":
        from sie_store.sinks.pgvector import PostgresDatabase
        from sie_store.sinks.pgvector_live import PgvectorLive

        return PgvectorLive(PostgresDatabase(url, patience), source)
    from sie_store.sinks.qdrant import QdrantConnection
    from sie_store.sinks.qdrant_live import ANSWER_BYTES, QdrantLive

    return QdrantLive(QdrantConnection(*_address(url), patience, ANSWER_BYTES), source)


def _scheme(url: str, setting: str) -> str:
    """Return the scheme of the URL of a database. Raises SettingError if the URL is not valid, or if its package is not
    installed.
    """
    try:
        pieces = urlsplit(url)
        _ = pieces.port
    except ValueError:
        raise SettingError(setting, "the URL of a database has no valid host and port") from None
    if pieces.scheme in ("qdrant", "qdrants"):
        if not pieces.hostname or pieces.password is not None or pieces.path.strip("/") or pieces.query:
            raise SettingError(setting, "Qdrant is qdrant://[api-key@]host:port, or qdrants:// for TLS")
    elif pieces.scheme == "postgresql":
        if not pieces.hostname or not pieces.path.strip("/"):
            raise SettingError(setting, "PostgreSQL is postgresql://user:password@host:port/database")
        if importlib.util.find_spec("asyncpg") is None:
            raise SettingError(setting, "PostgreSQL needs asyncpg: pip install 'sie-cluster[pgvector]'")
    else:
        raise SettingError(setting, "a database is qdrant://, qdrants:// or postgresql://")
    return pieces.scheme


def _address(url: str) -> tuple[str, str]:
    """Return the address of a Qdrant server as a URL of HTTP, and its API key."""
    pieces = urlsplit(url)
    host = f"[{pieces.hostname}]" if ":" in (pieces.hostname or "") else pieces.hostname
    scheme = "https" if pieces.scheme == "qdrants" else "http"
    return f"{scheme}://{host}:{pieces.port or QDRANT_PORT}", unquote(pieces.username or "")


def reserved(url: str) -> frozenset[str]:
    """Return the payload fields that SIE itself uses in the database at `url`; rows must not have them."""
    return frozenset({ROW_ID} if url.partition("://")[0] in ("qdrant", "qdrants") else ())
