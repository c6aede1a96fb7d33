"""The sources that a command names, opened.

sie, sie:URL, st, openai:URL, infinity:URL, tei:URL ──► Source
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from sie_cli.cluster import GATEWAY_URL, Cluster
from sie_cli.evals.load import PATIENCE_S
from sie_cli.evals.own_cluster import START_S, own_cluster
from sie_cli.evals.servers import DIALECTS, ServerSource
from sie_cli.evals.sources import EvalSource, SentenceTransformers, Sie
from sie_cli.refusal import CommandRefused
from sie_contracts.loopback import direct
from sie_contracts.settings import Secret, public_url

CONNECT_S = 10.0  # to a gateway that somebody named, and again to one that went away
LOAD_S = 900.0  # for a model that no worker has yet
PLAIN = ("sie", "st", "targets")


def names(sources: str) -> list[str]:
    """The sources of -s. Raises CommandRefused."""
    requested = [name.strip() for name in sources.split(",") if name.strip()]
    for source in requested:
        kind, _, url = source.partition(":")
        if source not in PLAIN and not (kind in (*DIALECTS, "sie") and url.startswith(("http://", "https://"))):
            kinds = ", ".join([*PLAIN, "sie:URL", *(f"{kind}:URL" for kind in DIALECTS)])
            raise CommandRefused(f"-s: there is no source {source[:200]}: expected some of {kinds}")
    if len(set(requested)) != len(requested):
        raise CommandRefused("-s: a source is named twice")
    if not [name for name in requested if name != "targets"]:
        raise CommandRefused("-s: name a source that is measured, such as sie,targets")
    return requested


class OpenSources:
    """Sources of one model, opened as they are asked for and closed with `held`."""

    def __init__(self, cluster: Cluster, model: str, held: contextlib.ExitStack) -> None:
        self._cluster, self._model, self._held = cluster, model, held
        self._own: tuple[str, Secret | None] | None = None
        self.sources: list[EvalSource] = []

    def open(self, name: str) -> EvalSource:
        """Raises CommandRefused."""
        kind, _, url = name.partition(":")
        if kind == "sie":
            source: EvalSource = self.of_cluster(name, url, self._model)
        elif name == "st":
            source = SentenceTransformers(self._model, scores_pairs=self._scores_pairs())
        else:
            import httpx

            transport = direct(url, httpx.HTTPTransport)
            client = self._held.enter_context(
                httpx.Client(base_url=url.rstrip("/"), timeout=PATIENCE_S, transport=transport)
            )
            source = ServerSource(name, client, DIALECTS[kind], self._model, scores_pairs=self._scores_pairs())
        self.sources.append(source)
        return source

    def of_cluster(self, name: str, url: str, model: str) -> Sie:
        """A model of the cluster at `url`, or of the one that the command asks, loaded. Raises CommandRefused."""
        from sie_client import SIEClient
        from sie_client.errors import SIEConnectionError, SIEError

        # the token of this cluster is no business of another one
        where, token = (url, None) if url else self._address()
        patience_s = START_S if self._own and not url else CONNECT_S
        key = token.reveal() if token else None
        try:
            client = self._held.enter_context(SIEClient(where, api_key=key, connection_budget_s=patience_s))
            info = client.wait_for_capacity(model, capacity_budget_s=LOAD_S)
            source = Sie(name, client, model, where, token, info)
        except SIEConnectionError as error:
            settings = self._cluster.without_gateway()
            raise CommandRefused(f"{error}\nno gateway answers at {public_url(where)}: {settings}") from error
        except SIEError as error:
            settings = "`sie models list` shows what there is"
            raise CommandRefused(f"{error}\nasked the gateway at {public_url(where)}: {settings}") from error
        return source

    def _address(self) -> tuple[str, Secret | None]:
        cluster = self._cluster
        if self._own is None and not (
            cluster.is_named or cluster.is_given(GATEWAY_URL) or _answers(cluster.gateway_urls[0])
        ):
            started = self._held.enter_context(own_cluster())
            self._own = started.gateway_url, Secret(started.admin_token) if started.admin_token else None
        return self._own or (cluster.gateway_urls[0], cluster.gateway_token)

    def _scores_pairs(self) -> bool:
        """Decide whether it scores pairs, by the source before, or by the catalogue of this installation; a model that
        the catalogue does not have gives vectors.
        """
        if self.sources:
            return self.sources[0].scores_pairs
        from sie_config_service.overlay import Overlay
        from sie_contracts.models.entries import ModelEntry
        from sie_contracts.settings import Settings

        entry: Any = Overlay(Settings()).folders().models.get(self._model.partition(":")[0], (None, ""))[0]
        return isinstance(entry, ModelEntry) and "dense" not in entry.outputs


def first_cluster(sources: Sequence[EvalSource]) -> Sie | None:
    return next((source for source in sources if isinstance(source, Sie)), None)


def _answers(url: str) -> bool:
    """Whether anybody listens there. A `sie serve` that was killed has left its address behind."""
    import httpx

    try:
        with httpx.Client(transport=direct(url, httpx.HTTPTransport), timeout=CONNECT_S) as client:
            client.get(f"{url}/healthz")
    except httpx.TransportError:
        return False
    return True
