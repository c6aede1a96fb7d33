"""Calls to a remote server: texts become dense vectors. No error message contains a text or a token."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import Secret
from sie_contracts.url_names import quoted
from sie_gateway.remotes.configuration import RemoteServer

MAX_TEXTS = 32  # largest number of texts of one call: the default limit of TEI
# largest number of bytes of a reply: VALUE_BYTES for each number (component) of its vectors, plus ENVELOPE_BYTES
VALUE_BYTES, ENVELOPE_BYTES = 32, 64 << 10
_UNFIT = frozenset({400, 413, 422})  # statuses that are caused by the request, and do not count as faults of the server

MAX_NAME = 200  # only this number of characters of a model name that a server reports is compared
Vectors = NDArray[np.float32]


class RemoteAnswer(NamedTuple):
    """Vectors of a remote server. `tokens`: number of tokens that the server reports, or None. `models`: the
    server's names for its model: the fingerprint from a server of SIE, the name from a server of the kind `openai`, the
    revision, precision and name from a TEI server. Several names if replicas behind one address have different models.
    """

    vectors: Vectors
    tokens: int | None
    models: frozenset[str]


class RemoteFailed(Exception):
    """Raised if a remote server sent no usable reply. `is_fault`: False if the request or the deadline is the cause."""

    def __init__(self, message: str, *, is_fault: bool = True) -> None:
        super().__init__(message)
        self.is_fault = is_fault


class _TokenCount(msgspec.Struct, frozen=True):
    total_tokens: int | None = None


class _RemoteEmbedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _OpenAIAnswer(msgspec.Struct):
    data: list[_RemoteEmbedding]
    usage: _TokenCount = _TokenCount()
    model: str | None = None

    @property
    def rows(self) -> list[list[float]]:
        return [item.embedding for item in sorted(self.data, key=lambda item: item.index)]


class _DenseValues(msgspec.Struct):
    values: list[float]


class _SIEItem(msgspec.Struct):
    dense: _DenseValues


class _SIEAnswer(msgspec.Struct):
    items: list[_SIEItem]
    usage: _TokenCount = _TokenCount()
    fingerprint: str = ""

    @property
    def rows(self) -> list[list[float]]:
        return [item.dense.values for item in self.items]


class _TEIInfo(msgspec.Struct):
    model_id: str
    model_sha: str | None = None
    model_dtype: str = ""


class RemoteClient:
    """HTTP client of one remote server. It follows no redirect, uses no proxy, and verifies TLS."""

    def __init__(self, server: RemoteServer, token: Secret | None) -> None:
        self._server = server
        self._model = server.served_model or server.model
        # with X-SIE-Remote: forbid, a remote cluster does not send the request back to this cluster
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "X-SIE-Remote": "forbid"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.reveal()}"
        verify: ssl.SSLContext | bool = ssl.create_default_context() if server.url.startswith("https:") else False
        self._http = httpx.AsyncClient(
            headers=headers, verify=verify, trust_env=False, follow_redirects=False, timeout=server.timeout_s
        )

    async def encode(
        self, texts: Sequence[str], width: int, timeout_s: float, *, normalize: bool = True
    ) -> RemoteAnswer:
        """Return the vectors of the texts. All HTTP requests together take at most `timeout_s`. Raises RemoteFailed."""
        answers: list[RemoteAnswer] = []
        until_s = time.monotonic() + timeout_s
        for start in range(0, len(texts), MAX_TEXTS):
            piece = texts[start : start + MAX_TEXTS]
            path, body = self._request(piece, normalize=normalize)
            raw = await self._send("POST", path, body, len(piece) * width, until_s)
            answers.append(self._read(raw, len(piece), width))
        vectors, tokens, models = zip(*answers, strict=True)
        reported = frozenset().union(*models)
        if self._server.kind == "tei":  # read /info last, so that a model that was replaced during this call is noticed
            reported = frozenset({_tei_model(await self._send("GET", "/info", None, 0, until_s))})
        return RemoteAnswer(np.concatenate(vectors), None if None in tokens else sum(tokens), reported)

    def _request(self, texts: Sequence[str], *, normalize: bool) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request that adds no prompt to the texts."""
        if self._server.kind == "tei":
            return "/embed", {"inputs": list(texts), "normalize": normalize, "truncate": True}
        if self._server.kind == "openai":
            return "/v1/embeddings", {"model": self._model, "input": list(texts), "encoding_format": "float"}
        options = {"output_types": ["dense"], "prompt_name": None, "on_item_error": "fail"}
        return f"/v1/encode/{quoted(self._model, 'served_model')}", {
            "items": [{"text": text} for text in texts],
            "params": options,
        }

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, values: int, until_s: float) -> bytes:
        """Send a request and return the body of the reply. `values`: largest number of vector components in the reply.
        Raises RemoteFailed, also if there is no reply by `until_s`.
        """
        left_s = until_s - time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, self._server.timeout_s)):
                return await self._answer(method, path, body, ENVELOPE_BYTES + VALUE_BYTES * values)
        except TimeoutError:
            raise RemoteFailed("no reply in time", is_fault=left_s > self._server.timeout_s) from None
        except httpx.HTTPError as error:
            raise RemoteFailed(f"the connection failed ({type(error).__name__})") from None

    async def _answer(self, method: str, path: str, body: dict[str, Any] | None, limit: int) -> bytes:
        async with self._http.stream(method, self._server.url.rstrip("/") + path, json=body) as answer:
            if answer.status_code != 200:
                raise RemoteFailed(f"it sent status {answer.status_code}", is_fault=answer.status_code not in _UNFIT)
            if answer.headers.get("content-encoding", "identity").lower() != "identity":
                raise RemoteFailed("it sent a compressed answer, which was not asked for")
            data = bytearray()
            async for part in answer.aiter_raw():
                if len(data) + len(part) > limit:
                    raise RemoteFailed(f"its answer has more than {limit} bytes")
                data += part
        return bytes(data)

    def _read(self, raw: bytes, count: int, width: int) -> RemoteAnswer:
        """Decode a reply. Raises RemoteFailed for a wrong count or width of vectors, or a number that is not finite."""
        used: int | None = None
        model: str | None = None
        try:
            if self._server.kind == "tei":
                rows = msgspec.json.decode(raw, type=list[list[float]])
            elif self._server.kind == "openai":
                embeddings = msgspec.json.decode(raw, type=_OpenAIAnswer)
                rows, used, model = embeddings.rows, embeddings.usage.total_tokens, embeddings.model
            else:
                encoded = msgspec.json.decode(raw, type=_SIEAnswer)
                rows, used, model = encoded.rows, encoded.usage.total_tokens, encoded.fingerprint
        except UNDECODABLE:
            raise RemoteFailed(f"its answer is not in the format of a server of kind {self._server.kind}") from None
        if len(rows) != count or any(len(row) != width for row in rows):
            widths = sorted({len(row) for row in rows})
            raise RemoteFailed(f"it sent {len(rows)} vectors of width {widths[:3]}, expected {count} of width {width}")
        with np.errstate(over="ignore"):  # a number too large for float32 becomes infinity, which is refused below
            vectors = np.array(rows, np.float64).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise RemoteFailed("its vectors have numbers that are not finite")
        # ignore a reported number of tokens below the number of texts: it is wrong, and the client would pay too little
        tokens = used if used is not None and used >= count else None
        return RemoteAnswer(vectors, tokens, frozenset({(model or "")[:MAX_NAME]}))

    async def close(self) -> None:
        await self._http.aclose()


def _tei_model(raw: bytes) -> str:
    """Return the model that a TEI server reports, with its revision and precision. Raises RemoteFailed."""
    try:
        info = msgspec.json.decode(raw, type=_TEIInfo)
    except UNDECODABLE:
        raise RemoteFailed("its reply to /info is not the reply of a server of kind tei") from None
    return f"{info.model_sha or ''} {info.model_dtype} {info.model_id}"[:MAX_NAME]
