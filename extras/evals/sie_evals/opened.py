"""Opening of the sources that the option -s names: clusters, servers and libraries that are measured.

sie, sie:URL, st, patterns, openai:URL, infinity:URL, tei:URL ──► EvalSource
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import httpx

from sie_cli import access
from sie_cli.access import Access
from sie_cli.cluster import GATEWAY_URL, Cluster
from sie_cli.refusal import CommandRefused
from sie_cli.serve.ports import free_port
from sie_client import SIEClient
from sie_client.errors import SIEConnectionError, SIEError
from sie_contracts.loopback import client_options
from sie_contracts.settings import Secret, public_url
from sie_evals.load import PATIENCE_S
from sie_evals.sources import (
    DIALECTS,
    EvalSource,
    Patterns,
    SentenceTransformers,
    ServerSource,
    Sie,
    catalogue_entry,
)

CONNECT_S = 10.0  # seconds to connect, or to connect again, to a gateway that this command has not started
LOAD_S = 900.0  # seconds to wait until a worker has loaded the model
PLAIN = ("sie", "st", "patterns", "targets")


def names(sources: str) -> list[str]:
    """Return the names of the sources in the value of -s. Raises CommandRefused if a name is unknown or repeated, or if
    there is no name except `targets`.
    """
    requested = [name.strip() for name in sources.split(",") if name.strip()]
    for source in requested:
        kind, _, url = source.partition(":")
        if source not in PLAIN and not (kind in (*DIALECTS, "sie") and url.startswith(("http://", "https://"))):
            kinds = ", ".join([*PLAIN, "sie:URL", *(f"{kind}:URL" for kind in DIALECTS)])
            raise CommandRefused(f"-s: there is no source {source[:200]}: expected some of {kinds}")
    if len(set(requested)) != len(requested):
        raise CommandRefused("-s: name each source only once")
    if not [name for name in requested if name != "targets"]:
        raise CommandRefused(
            "-s: name a source that is measured; `targets` alone measures nothing. An example: sie,targets"
        )
    return requested


class EvalGateway:
    """Gateway of the command's cluster. If the user names no cluster and no cluster runs, `address` starts a cluster.
    `held`: exit stack of the command; when it closes, it stops the cluster that `address` started. `patience_s`:
    seconds to wait for a connection to the gateway.
    """

    def __init__(self, cluster: Cluster, held: contextlib.ExitStack) -> None:
        self._cluster, self._held = cluster, held
        self._own: tuple[str, Secret | None] | None = None

    @property
    def patience_s(self) -> float:
        return START_S if self._own else CONNECT_S

    def address(self) -> tuple[str, Secret | None]:
        """Return the address of the gateway and the token for it. Raises CommandRefused."""
        cluster = self._cluster
        if self._own is None and not (
            cluster.is_named or cluster.is_given(GATEWAY_URL) or _answers(cluster.gateway_urls[0])
        ):
            started = self._held.enter_context(own_cluster())
            self._own = started.gateway_url, Secret(started.admin_token) if started.admin_token else None
        return self._own or (cluster.gateway_urls[0], cluster.gateway_token)

    def refusal(self, url: str, error: BaseException) -> str:
        """Return the error text for a gateway at `url` that did not answer. `error`: the client's error."""
        return self._cluster.without_gateway(url, error)


class OpenSources:
    """Sources of one model. `held`: exit stack of the evaluation; when it closes, it closes the sources' clients."""

    def __init__(self, gateway: EvalGateway, model: str, held: contextlib.ExitStack) -> None:
        self._gateway, self._model, self._held = gateway, model, held
        self.sources: list[EvalSource] = []

    def open(self, name: str) -> EvalSource:
        """Open a source by its name and add it to `sources`. Raises CommandRefused."""
        kind, _, url = name.partition(":")
        if kind == "sie":
            source: EvalSource = self.of_cluster(name, url, self._model)
        elif name == "patterns":
            source = Patterns()
        elif name == "st":
            source = SentenceTransformers(self._model, scores_pairs=self._scores_pairs())
        else:
            options = client_options(url, httpx.HTTPTransport)
            client = self._held.enter_context(httpx.Client(base_url=url.rstrip("/"), timeout=PATIENCE_S, **options))
            source = ServerSource(name, client, DIALECTS[kind], self._model, scores_pairs=self._scores_pairs())
        self.sources.append(source)
        return source

    def of_cluster(self, name: str, url: str, model: str) -> Sie:
        """Open a model of the cluster at `url`, or of the cluster of EvalGateway if `url` is empty, and wait until the
        model is loaded. Raises CommandRefused.
        """
        # the token belongs to the cluster of EvalGateway, so a cluster at another URL must not receive it
        where, token = (url, None) if url else self._gateway.address()
        patience_s = CONNECT_S if url else self._gateway.patience_s
        key = token.reveal() if token else None
        try:
            client = self._held.enter_context(SIEClient(where, api_key=key, connection_budget_s=patience_s))
            info = client.wait_for_capacity(model, capacity_budget_s=LOAD_S)
            source = Sie(name, client, model, where, token, info)
        except SIEConnectionError as error:
            raise CommandRefused(self._gateway.refusal(where, error)) from error
        except SIEError as error:
            hint = "`sie models list` shows its models"
            raise CommandRefused(f"{error}\nthe error is from the gateway at {public_url(where)}: {hint}") from error
        return source

    def _scores_pairs(self) -> bool:
        """Return whether the model scores pairs, according to the first open source. If no source is open, the entry in
        this installation's catalogue decides: a model whose entry lacks dense vectors scores pairs.
        """
        if self.sources:
            return self.sources[0].scores_pairs
        entry = catalogue_entry(self._model)
        return entry is not None and "dense" not in entry.outputs


def first_cluster(sources: Sequence[EvalSource]) -> Sie | None:
    return next((source for source in sources if isinstance(source, Sie)), None)


def _answers(url: str) -> bool:
    """Return whether a server at `url` answers a request. An answer with an HTTP error status counts."""
    try:
        with httpx.Client(**client_options(url, httpx.HTTPTransport), timeout=CONNECT_S) as client:
            client.get(f"{url}/healthz")
    except httpx.TransportError:
        return False
    return True


START_S = 120.0
END_S = 60.0  # seconds between SIGTERM and SIGKILL for `sie serve`, which finishes its work in less time
POLL_S = 0.1
LAST_LINES = 5


@contextlib.contextmanager
def own_cluster() -> Iterator[Access]:
    """Run a cluster on this machine while the context is open. Raises CommandRefused if the cluster does not start."""
    with tempfile.TemporaryDirectory(prefix="sie-eval-") as folder:
        data_dir, log = Path(folder) / "data", Path(folder) / "serve.log"
        argv = [sys.executable, "-m", "sie_cli", "serve", "--data-dir", str(data_dir)]
        argv += ["--port", str(free_port()), "--exit-with-parent"]
        click.echo("no cluster is named and none runs: starting one for this evaluation", err=True)
        with log.open("w") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            yield _access(process, data_dir, log)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _access(process: subprocess.Popen[bytes], data_dir: Path, log: Path) -> Access:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if (record := access.read(data_dir)) is not None:
            return record
        if process.poll() is not None:
            last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])
            raise CommandRefused(f"the cluster for this evaluation ended with status {process.returncode}:\n{last}")
        time.sleep(POLL_S)
    raise CommandRefused(
        f"the cluster for this evaluation has not started within {START_S:.0f} s: start a cluster with `sie serve`"
    )
