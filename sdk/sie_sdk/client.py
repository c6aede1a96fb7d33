"""The two shells: they do the HTTP and the waiting that the core asks for, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack, cast, overload

import httpx

from sie_sdk import core
from sie_sdk.core import Pause, Plan, Policy, Received, Send, Session, TransportFailed
from sie_sdk.types import EncodeParams, EncodeResult, ExtractParams, ExtractResult, Item, Params, ScoreResult

_logger = logging.getLogger("sie_sdk")
T = TypeVar("T")
TIMEOUT_S = 150.0  # above the server's own deadline, so that its answer wins


def _received(response: httpx.Response, started_s: float) -> Received:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Received(response.status_code, headers, response.content, time.monotonic() - started_s)


def _failed(error: Exception, started_s: float) -> TransportFailed:
    """A URL or header that cannot be sent at all will not get better by waiting."""
    permanent = isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL | UnicodeError)
    return TransportFailed(error, time.monotonic() - started_s, permanent)


def _listed(items: Item | str | Sequence[Item | str]) -> list[Item | str]:
    return [items] if isinstance(items, dict | str) else list(cast("Sequence[Item | str]", items))


class _Base(ABC):
    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None, wait_for_capacity: bool = True
    ) -> None:
        self._url = base_url.rstrip("/")
        self._session = Session(api_key, timeout_s, Policy(wait_for_capacity=wait_for_capacity))
        self._open()

    @abstractmethod
    def _open(self) -> None: ...


class SIEClient(_Base):
    """Blocking client. `api_key` is sent as a bearer token; `timeout_s` is the deadline of each request at the server.

    Waits for capacity (a full queue, a loading model) up to 15 minutes unless `wait_for_capacity` is False. Safe to share between
    threads. Close it, or use it as a context manager. All methods raise `SIEError`.
    """

    _http: httpx.Client

    def _open(self) -> None:
        self._http = httpx.Client(timeout=TIMEOUT_S)

    def __enter__(self) -> SIEClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @overload
    def encode(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[EncodeParams]
    ) -> EncodeResult: ...
    @overload
    def encode(self, model: str, items: Sequence[Item | str], **params: Unpack[EncodeParams]) -> list[EncodeResult]: ...
    def encode(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[EncodeParams]) -> Any:
        """Vectors of one item (a result) or of a list (a list of results, in order). An item that failed carries `error`."""
        results = self._drive(core.encode(model, _listed(items), params, self._session))
        return results[0] if isinstance(items, dict | str) else results

    def score(self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]) -> ScoreResult:
        """Scores of items against a query. Raises for the query; an item that failed carries `error`."""
        return self._drive(core.score(model, query, _listed(items), params, self._session))

    @overload
    def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    def extract(self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]) -> list[ExtractResult]: ...
    def extract(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[ExtractParams]) -> Any:
        """What is found in one item (a result) or in a list (a list of results, in order). An item that failed carries `error`."""
        results = self._drive(core.extract(model, _listed(items), params, self._session))
        return results[0] if isinstance(items, dict | str) else results

    def list_models(self) -> list[dict[str, Any]]:
        """The catalogue."""
        return list(self._drive(core.get_json("/v1/models", self._session))["data"])

    def health(self) -> dict[str, Any]:
        """What the cluster says of itself."""
        return dict(self._drive(core.get_json("/health", self._session)))

    def _drive(self, plan: Plan[T]) -> T:
        reply: Received | TransportFailed | None = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # the generator's own return type
            if isinstance(step, Pause):
                _logger.info("waiting %.1f s: %s", step.seconds, step.cause)
                time.sleep(step.seconds)
                reply = None
            else:
                reply = self._send(step)

    def _send(self, request: Send) -> Received | TransportFailed:
        started_s, url = time.monotonic(), self._url + request.path
        try:
            answer = self._http.request(request.method, url, headers=dict(request.headers), content=request.body or None)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return _failed(error, started_s)
        return _received(answer, started_s)


class SIEAsyncClient(_Base):
    """The same for asyncio. Use it as an async context manager, or `await close()`."""

    _http: httpx.AsyncClient

    def _open(self) -> None:
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S)

    async def __aenter__(self) -> SIEAsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @overload
    async def encode(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[EncodeParams]
    ) -> EncodeResult: ...
    @overload
    async def encode(self, model: str, items: Sequence[Item | str], **params: Unpack[EncodeParams]) -> list[EncodeResult]: ...
    async def encode(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[EncodeParams]) -> Any:
        """As SIEClient.encode."""
        results = await self._drive(core.encode(model, _listed(items), params, self._session))
        return results[0] if isinstance(items, dict | str) else results

    async def score(self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]) -> ScoreResult:
        """As SIEClient.score."""
        return await self._drive(core.score(model, query, _listed(items), params, self._session))

    @overload
    async def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    async def extract(self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]) -> list[ExtractResult]: ...
    async def extract(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[ExtractParams]) -> Any:
        """As SIEClient.extract."""
        results = await self._drive(core.extract(model, _listed(items), params, self._session))
        return results[0] if isinstance(items, dict | str) else results

    async def list_models(self) -> list[dict[str, Any]]:
        """The catalogue."""
        return list((await self._drive(core.get_json("/v1/models", self._session)))["data"])

    async def health(self) -> dict[str, Any]:
        """What the cluster says of itself."""
        return dict(await self._drive(core.get_json("/health", self._session)))

    async def _drive(self, plan: Plan[T]) -> T:
        reply: Received | TransportFailed | None = None
        while True:
            try:
                step = plan.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # the generator's own return type
            if isinstance(step, Pause):
                _logger.info("waiting %.1f s: %s", step.seconds, step.cause)
                await asyncio.sleep(step.seconds)
                reply = None
            else:
                reply = await self._send(step)

    async def _send(self, request: Send) -> Received | TransportFailed:
        started_s, url = time.monotonic(), self._url + request.path
        try:
            answer = await self._http.request(request.method, url, headers=dict(request.headers), content=request.body or None)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return _failed(error, started_s)
        return _received(answer, started_s)
