"""The blocking client: its methods are plans, driven in the calling thread and, where they have parts, in threads of
their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from sie_client import cluster, transport, verbs, watching
from sie_client.client_jobs import Files, Jobs
from sie_client.core import Session, call
from sie_client.threads import ThreadDriver
from sie_client.types import (
    CallOptions,
    Capacity,
    ClientOptions,
    EncodeParams,
    EncodeResult,
    ExtractParams,
    ExtractResult,
    Item,
    ModelFilters,
    Params,
    Pool,
    PoolOptions,
    Ranked,
    Results,
    ScoreResult,
)

if TYPE_CHECKING:
    from typing import Unpack


class SIEClient:
    """Blocking client of one server. `options` hold for all of its calls: see `types.ClientOptions`. `jobs`: work on
    whole files; `files`: those that were sent.

    Waits for capacity (a full queue, a loading model) up to 15 minutes unless `wait_for_capacity` is False. Safe to
    share between threads. Close it, or use it as a context manager. All methods raise `SIEError`.
    """

    def __init__(self, base_url: str, **options: Unpack[ClientOptions]) -> None:
        self._session = Session.from_options(options)
        self._driver = ThreadDriver(transport.address(base_url), self._session)
        self.jobs = Jobs(self._driver, self._session)
        self.files = Files(self._driver, self._session)

    def __enter__(self) -> SIEClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._driver.close()

    @overload
    def encode(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[EncodeParams]
    ) -> EncodeResult: ...
    @overload
    def encode(
        self, model: str, items: Sequence[Item | str], **params: Unpack[EncodeParams]
    ) -> Results[EncodeResult]: ...
    def encode(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[EncodeParams]) -> Any:
        """Vectors of one item (a result) or of a list (a list of results, in order). An item that failed carries
        `error`.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.encode(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def score(
        self, model: str, query: Item | str, items: Item | str | Sequence[Item | str], **params: Unpack[Params]
    ) -> ScoreResult:
        """Scores of items against a query. Raises for the query; an item that failed carries `error`."""
        listed = transport.as_list(items)
        return self._driver.run(verbs.score(model, query, listed, params, self._session), params, len(listed))

    def rerank(
        self,
        model: str,
        query: Item | str,
        documents: Sequence[Item | str],
        *,
        top_n: int | None = None,
        **params: Unpack[Params],
    ) -> list[Ranked]:
        """The best `top_n` documents (all), best first, with their positions. Raises for a document that failed."""
        listed = transport.as_list(documents)
        return self._driver.run(verbs.rerank(model, query, listed, top_n, params, self._session), params, len(listed))

    @overload
    def extract(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, model: str, items: Item | str, **params: Unpack[ExtractParams]
    ) -> ExtractResult: ...
    @overload
    def extract(
        self, model: str, items: Sequence[Item | str], **params: Unpack[ExtractParams]
    ) -> Results[ExtractResult]: ...
    def extract(self, model: str, items: Item | str | Sequence[Item | str], **params: Unpack[ExtractParams]) -> Any:
        """Extract from one item (returns a result) or from a list (returns a list of results, in order). An item that
        failed carries `error`.
        """
        listed = transport.as_list(items)
        results = self._driver.run(verbs.extract(model, listed, params, self._session), params, len(listed))
        return results[0] if transport.is_single(items) else results

    def list_models(self, **filters: Unpack[ModelFilters]) -> list[dict[str, Any]]:
        """The catalogue, or what of it fits."""
        return self._driver.run(cluster.list_models(filters, self._session))

    def get_model(self, model: str) -> dict[str, Any]:
        """One model or variant of the catalogue. Never loads it."""
        return self._driver.run(cluster.get_model(model, self._session))

    def health(self) -> dict[str, Any]:
        """Report the health of the cluster."""
        return self._driver.run(cluster.health(self._session))

    def get_capacity(self, gpu: str | None = None) -> Capacity:
        """The healthy workers of a machine profile, or all."""
        return self._driver.run(cluster.capacity(gpu, self._session))

    def get_scaling(self, lane: str) -> dict[str, Any]:
        """Report the load of a lane, `pool.machine_profile.bundle`, and how many workers it needs."""
        return self._driver.run(cluster.scaling(lane, self._session))

    def wait_for_capacity(self, model: str, **options: Unpack[CallOptions]) -> dict[str, Any]:
        """Make a worker start and load the model, and return its catalogue entry once it answers; waits up to
        `capacity_budget_s`.
        """
        return self._driver.run(cluster.warmed(model, options, self._session), options)

    def create_pool(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Pool:
        """Reserve workers, as many of each machine profile as `gpus` says. The same again renews the lease."""
        return self._driver.run(cluster.create_pool(name, gpus, options, self._session))

    def list_pools(self) -> list[Pool]:
        """All pools, `default` among them."""
        return self._driver.run(cluster.list_pools(self._session))

    def get_pool(self, name: str) -> Pool:
        """One pool. Raises PoolNotFoundError also when its lease has lapsed."""
        return self._driver.run(cluster.get_pool(name, self._session))

    def renew_pool(self, name: str) -> float:
        """Renew a lease; when it ends now, in seconds since 1970."""
        return self._driver.run(cluster.renew_pool(name, self._session))

    def delete_pool(self, name: str) -> None:
        """Give the workers of a reservation back."""
        self._driver.run(cluster.delete_pool(name, self._session))

    @contextlib.contextmanager
    def reserve(self, name: str, gpus: Mapping[str, int], **options: Unpack[PoolOptions]) -> Iterator[Pool]:
        """A pool for the length of a `with` block: created, renewed in the background, deleted at the end. Use it as
        `pool=name`.
        """
        created = self.create_pool(name, gpus, **options)
        end = self._driver.start(cluster.renewed(name, gpus, options, self._session))
        try:
            yield created
        finally:
            end(transport.CLOSE_S)
            self._driver.run(cluster.released(name, self._session))

    def watch(self, path: str = watching.CLUSTER_STATUS) -> Iterator[dict[str, Any]]:
        """Status frames, one each second, for as long as they are asked for. Needs the package `websockets`."""
        socket, request = watching.StatusSocket(self._driver.url), watching.request(path, self._session)
        with contextlib.closing(socket):
            while True:
                frame: bytes | None = self._driver.run(call(request, self._session.policy), send=socket.open).body
                while frame is not None:
                    yield watching.decoded(frame)
                    frame = socket.next()
                time.sleep(watching.AGAIN_AFTER_S)
