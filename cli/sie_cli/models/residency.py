"""`sie models load` and `unload`: requests to a gateway, and the progress on its workers.

POST /v1/models/NAME/load ──► 200: done
                          └─► 202: with --wait, GET /v1/models/NAME each POLL_S until done, failed or out of time
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
import httpx
from msgspec import Struct

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import printable
from sie_cli.gateway_client import AdminClient, GatewayUnready, checked_headers
from sie_cli.models.service import quoted_model
from sie_cli.refusal import CommandRefused
from sie_contracts.api.models import Download, LoadError
from sie_contracts.api.residency import LaneResidency, ModelResidency
from sie_contracts.settings import public_url

F = TypeVar("F", bound=Callable[..., Any])
POLL_S = 0.5
# For this number of seconds after the request, the command ignores the state `failed` until it has seen the state
# `loading`, because `failed` may be the state after an earlier load.
STALE_S = 3.0


class _ResidencyFields(Struct, frozen=True):
    """Fields of a gateway's description of a model (`ModelInfo`) that show the progress of a load or unload."""

    state: str
    loaded: bool
    workers: list[str]
    last_error: LoadError | None = None
    downloads: tuple[Download, ...] = ()


def _states(gateway: AdminClient, name: str, began_s: float, wait_s: float) -> Iterator[tuple[float, _ResidencyFields]]:
    """Request the gateway's description of the model every POLL_S seconds until `wait_s` seconds after `began_s`, at
    least once. Yield (seconds since `began_s`, description). If the gateway does not answer or is not ready, print this
    and repeat the request, because the gateway may be restarting. Raises CommandRefused.
    """
    while True:
        since_s = time.monotonic() - began_s
        try:
            yield since_s, gateway.request("GET", _path(name), _ResidencyFields)
        except httpx.TransportError:
            click.echo(f"{public_url(gateway.url)} does not answer; the request is repeated", err=True)
        except GatewayUnready as error:
            click.echo(f"{error.format_message()}; the request is repeated", err=True)
        if since_s + POLL_S >= wait_s:
            return
        time.sleep(POLL_S)


def _path(name: str, action: str = "") -> str:
    return f"/v1/models/{quoted_model(name)}{action}"


def _options(command: F) -> F:
    for option in (
        click.option(
            "--pool",
            metavar="POOL",
            default="",
            help="Only on workers of this pool.  [default: the pool in which an inference request would run]",
        ),
        click.option(
            "--machine-profile", metavar="NAME", default="", help="Only on workers with this machine profile."
        ),
        click.option(
            "--wait", "waits", is_flag=True, help="Wait until the load or unload ends. Progress goes to standard error."
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(1, 86_400),
            default=600.0,
            show_default=True,
            help="Longest time in seconds that --wait waits.",
        ),
    ):
        command = option(command)
    return command


def _lane_headers(pool: str, machine_profile: str) -> dict[str, str]:
    headers = {"x-sie-pool": pool, "x-sie-machine-profile": machine_profile}
    return checked_headers({name: value for name, value in headers.items() if value})


@click.command()
@click.argument("name", metavar="NAME")
@_options
@cluster_options(GATEWAY_URL)
def load(cluster: Cluster, name: str, waits: bool, timeout_s: float, **target: str) -> None:
    """Load model NAME on a worker before its first request. NAME may be model:profile or an alias.

    If no worker serves this pool and machine profile, the gateway requests one, which loads the model when it starts.
    The gateway keeps this request for ten minutes. The command needs the scope admin.

    \b
    sie models load BAAI/bge-m3 --wait
    """
    headers, began_s = _lane_headers(**target), time.monotonic()
    with AdminClient(cluster) as gateway:
        reply = gateway.first("POST", _path(name, "/load"), ModelResidency, headers=headers)
        for lane in reply.lanes:
            _show_lane(lane)
        if reply.state == "loaded" or not waits:
            return
        for model in dict.fromkeys(lane.model for lane in reply.lanes if lane.state != "loaded"):
            _await_load(gateway, model, headers, began_s, timeout_s)


def _await_load(gateway: AdminClient, model: str, headers: dict[str, str], began_s: float, wait_s: float) -> None:
    has_begun, last = False, ""
    for since_s, info in _states(gateway, model, began_s, wait_s):
        has_begun = has_begun or info.state == "loading"
        # `info.loaded` is true if the model is loaded in any lane (pool, machine profile and bundle). Only the reply to
        # a load request says whether it is loaded in the requested lane.
        if info.loaded:
            with contextlib.suppress(httpx.TransportError, GatewayUnready):  # the loop sends the request again
                reply = gateway.request("POST", _path(model, "/load"), ModelResidency, headers=headers)
                if reply.state == "loaded":
                    click.echo(printable(f"{model}: loaded by {', '.join(info.workers)} after {since_s:.1f} s"))
                    return
        if info.state == "failed" and (has_begun or since_s > STALE_S):
            reason = info.last_error.message if info.last_error else "no reason"
            raise CommandRefused(f"{model} could not be loaded: {reason}")
        last = _progress(model, info, last)
    raise CommandRefused(f"{model} is not loaded after {wait_s:g} s; `sie models load {model}` requests the load again")


def _progress(model: str, info: _ResidencyFields, last: str) -> str:
    """Print a line with the progress of a load, unless it equals `last`. Return the line."""
    line = f"{model}: {info.state}"
    for download in info.downloads:
        total = download.total_bytes
        line += f", {download.worker} has {100 * download.done_bytes // total if total else 0} % of the weights"
    if line != last:
        click.echo(printable(line), err=True)
    return line


@click.command()
@click.argument("name", metavar="NAME")
@_options
@cluster_options(GATEWAY_URL)
def unload(cluster: Cluster, name: str, waits: bool, timeout_s: float, **target: str) -> None:
    """Unload model NAME on all workers. NAME may be model:profile or an alias.

    A worker first finishes the model's requests in flight. The next request loads the model again. The command needs
    the scope admin.
    """
    headers, began_s = _lane_headers(**target), time.monotonic()
    with AdminClient(cluster) as gateway:
        reply = gateway.first("POST", _path(name, "/unload"), ModelResidency, headers=headers)
        if not reply.lanes:
            click.echo(f"{name}: no worker has it loaded")
            return
        for lane in reply.lanes:
            _show_lane(lane)
        if not waits:
            return
        for lane in reply.lanes:
            _await_unload(gateway, lane, began_s, timeout_s)


def _await_unload(gateway: AdminClient, lane: LaneResidency, began_s: float, wait_s: float) -> None:
    model, having = lane.model, {worker.worker for worker in lane.workers}
    for since_s, info in _states(gateway, model, began_s, wait_s):
        if info.state not in ("loading", "unloading") and having.isdisjoint(info.workers):
            click.echo(printable(f"{model}: unloaded by {', '.join(sorted(having))} after {since_s:.1f} s"))
            return
    raise CommandRefused(
        f"{model} is still loaded after {wait_s:g} s: other requests still use it, or have loaded it again"
    )


def _show_lane(lane: LaneResidency) -> None:
    workers = ", ".join(
        f"{worker.worker}: {worker.state}" + (f", {worker.in_flight} in flight" if worker.in_flight else "")
        for worker in lane.workers
    )
    place = f"{lane.lane} ({workers})" if workers else lane.lane
    click.echo(printable(f"{lane.model}: {lane.state} in {place}"), err=True)


COMMANDS = (load, unload)
