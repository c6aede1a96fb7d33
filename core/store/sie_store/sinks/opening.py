"""Opens the sink (vector database) at a URL:

qdrant://[api-key@]host:port     Qdrant over HTTP
qdrants://[api-key@]host:port    Qdrant over HTTPS
postgresql://user:password@host:port/database?sslmode=verify-full    PostgreSQL with pgvector
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from sie_contracts.settings import SettingError
from sie_store.object_stores import RetryPolicy
from sie_store.sinks.sink import PATIENCE, ROW_ID, Sink

QDRANT_PORT = 6333


def opened(url: str, setting: str, patience: RetryPolicy = PATIENCE) -> Sink:
    """Return the sink for the database at `url`, not connected yet. Raises SettingError, which names `setting` but not
    `url`, because the URL may contain a password.
    """
    try:
        pieces = urlsplit(url)
        port = pieces.port
    except ValueError:
        raise SettingError(setting, "the URL of a database has no valid host and port") from None
    if pieces.scheme in ("qdrant", "qdrants"):
        if not pieces.hostname or pieces.password is not None or pieces.path.strip("/") or pieces.query:
            raise SettingError(setting, "Qdrant is qdrant://[api-key@]host:port, or qdrants:// for TLS")
        from sie_store.sinks.qdrant import QdrantSink

        host = f"[{pieces.hostname}]" if ":" in pieces.hostname else pieces.hostname
        scheme = "https" if pieces.scheme == "qdrants" else "http"
        return QdrantSink(f"{scheme}://{host}:{port or QDRANT_PORT}", unquote(pieces.username or ""), patience)
    if pieces.scheme == "postgresql":
        if not pieces.hostname or not pieces.path.strip("/"):
            raise SettingError(setting, "PostgreSQL is postgresql://user:password@host:port/database")
        try:
            from sie_store.sinks.pgvector import PgvectorSink
        except ImportError:
            raise SettingError(setting, "PostgreSQL needs asyncpg: pip install 'sie-cluster[pgvector]'") from None
        return PgvectorSink(url, patience)
    raise SettingError(setting, "a database is qdrant://, qdrants:// or postgresql://")


def reserved(url: str) -> frozenset[str]:
    """Return the payload fields that SIE itself uses in the database at `url`; rows must not have them."""
    return frozenset({ROW_ID} if url.partition("://")[0] in ("qdrant", "qdrants") else ())
