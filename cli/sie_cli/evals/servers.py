"""A server of somebody else, asked in its own dialect.

openai:URL, infinity:URL ──► POST URL/embeddings, URL/rerank      tei:URL ──► POST URL/embed, URL/rerank
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sie_cli.evals.load import NOBODY, PATIENCE_S, LoadFailure, LoadReply, LoadRequest, Send
from sie_cli.evals.outputs import DENSE, Matrix, VectorOutput
from sie_cli.evals.sources import only_dense, only_texts
from sie_cli.refusal import CommandRefused
from sie_contracts.loopback import direct

if TYPE_CHECKING:
    import httpx

BATCH = 64  # texts of a request, of which a server may take no more
MAX_ANSWER_BYTES = 64 << 20  # 64 vectors of 32,768 numbers
_UNREADABLE = (ValueError, KeyError, TypeError, LookupError, AttributeError, RecursionError)


class _ReplyBody:
    """The body of an answer, which a server of somebody else may make as long as it likes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, piece: bytes) -> None:
        """Raises ValueError for more than MAX_ANSWER_BYTES."""
        if len(self._data) + len(piece) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        self._data += piece

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "replace")

    def json(self) -> Any:
        """Raises ValueError, also for NaN and Infinity, which are no JSON; RecursionError for deep nesting."""
        return msgspec.json.decode(self._data)


@dataclass(frozen=True)
class ServerDialect:
    """How a server is asked: paths and bodies, and where its answers have what is wanted. A list of results has the
    place of each in `index`.
    """

    encode_path: str
    encode_body: Callable[[str, Sequence[str]], Mapping[str, Any]]
    vectors: Callable[[Any], Sequence[Sequence[float]]]
    rerank_body: Callable[[str, str, Sequence[str]], Mapping[str, Any]]
    ranked: Callable[[Any], Sequence[Mapping[str, Any]]]
    score: str
    tokens: Callable[[Any], int | None] = lambda body: None


_OPENAI = ServerDialect(
    "/embeddings",
    # these servers refuse an empty text
    lambda model, texts: {"model": model, "input": [text or " " for text in texts], "encoding_format": "float"},
    lambda body: [item["embedding"] for item in sorted(body["data"], key=lambda item: item["index"])],
    lambda model, query, documents: {"model": model, "query": query, "documents": list(documents)},
    lambda body: body["results"],
    "relevance_score",
    lambda body: body.get("usage", {}).get("total_tokens"),
)
_TEI = ServerDialect(
    "/embed",
    lambda model, texts: {"inputs": list(texts), "truncate": True},
    lambda body: body,
    lambda model, query, documents: {"query": query, "texts": list(documents), "truncate": True},
    lambda body: body,
    "score",
)
DIALECTS: Mapping[str, ServerDialect] = {"openai": _OPENAI, "infinity": _OPENAI, "tei": _TEI}


class ServerSource:
    """A server of somebody else."""

    is_here = False
    main = DENSE

    def __init__(
        self, name: str, client: httpx.Client, dialect: ServerDialect, model: str, *, scores_pairs: bool
    ) -> None:
        self.name = name
        self.scores_pairs = scores_pairs
        self.identity: Sequence[str] = ()  # such a server may change its model without a word
        self._client, self._dialect, self._model = client, dialect, model

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = str(self._client.base_url)
        transport = direct(url, httpx.AsyncHTTPTransport, limits=limits)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, transport=transport) as client:

            async def send(request: LoadRequest) -> LoadReply:
                only_texts(self.name, request.texts)
                if self.scores_pairs:
                    path, body = "/rerank", self._dialect.rerank_body(self._model, request.query, request.texts)
                else:
                    path, body = self._dialect.encode_path, self._dialect.encode_body(self._model, request.texts)
                content = _ReplyBody()
                try:
                    async with client.stream("POST", path, json=body) as answer:
                        async for piece in answer.aiter_bytes():
                            content.add(piece)
                    if answer.status_code != 200:
                        raise LoadFailure(str(answer.status_code), content.text[:200])
                    return LoadReply(self._dialect.tokens(content.json()))
                except httpx.HTTPError as error:
                    raise LoadFailure(NOBODY, str(error) or type(error).__name__) from error
                except _UNREADABLE as error:
                    raise LoadFailure("NOT_UNDERSTOOD", str(error)[:200]) from error

            yield send

    def vectors(self, texts: Sequence[str], output: VectorOutput, *, is_query: bool) -> Sequence[Any]:
        only_dense(self.name, output)
        only_texts(self.name, texts)
        parts: list[Matrix] = []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            body = self._post(self._dialect.encode_path, self._dialect.encode_body(self._model, part))
            with self._understood():
                with np.errstate(over="ignore"):  # infinite then, and refused
                    rows = np.asarray(self._dialect.vectors(body), np.float32)
                if rows.ndim != 2 or len(rows) != len(part):
                    raise ValueError(f"{len(part)} texts were sent, vectors of the shape {rows.shape} came")
                if parts and rows.shape[1] != parts[0].shape[1]:
                    raise ValueError(f"vectors have {parts[0].shape[1]} numbers, then {rows.shape[1]}")
                _check_finite(rows)
            parts.append(rows)
        return list(np.concatenate(parts))

    def scores(self, query: str, documents: Sequence[str]) -> list[float]:
        only_texts(self.name, [query, *documents])
        values = [0.0] * len(documents)
        for start in range(0, len(documents), BATCH):
            part = documents[start : start + BATCH]
            body = self._post("/rerank", self._dialect.rerank_body(self._model, query, part))
            with self._understood():
                ranked = self._dialect.ranked(body)
                if sorted(row["index"] for row in ranked) != list(range(len(part))):
                    raise ValueError(f"{len(part)} documents were sent, {len(ranked)} scores came")
                for entry in ranked:
                    values[start + entry["index"]] = float(entry[self._dialect.score])
                _check_finite(values)
        return values

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        import httpx

        content = _ReplyBody()
        with self._understood():
            try:
                with self._client.stream("POST", path, json=body) as answer:
                    for piece in answer.iter_bytes():
                        content.add(piece)
            except httpx.HTTPError as error:
                raise CommandRefused(f"{self.name} does not answer: {error or type(error).__name__}") from error
            if answer.status_code != 200:
                raise CommandRefused(f"{self.name}: POST {path} answers {answer.status_code}: {content.text[:200]}")
            return content.json()

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise CommandRefused(f"{self.name} answers otherwise than such a server does: {error}") from error


def _check_finite(numbers: Any) -> None:
    """Raises ValueError."""
    if not np.isfinite(numbers).all():
        raise ValueError("numbers that are not finite came")
