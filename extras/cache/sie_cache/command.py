"""`sie cache`: the cache of answers of a gateway, and its erasure."""

from __future__ import annotations

from typing import Any

import click

from sie_cache.api import CacheErased, CacheState
from sie_cli import display
from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.display import counted
from sie_cli.gateway_client import AdminClient
from sie_cli.options import AnyPosition
from sie_contracts.settings import public_url


@click.group(cls=AnyPosition, short_help="Cached answers: how many there are; erase them.")
def cache() -> None:
    """The cache of answers, which a gateway has if SIE_CACHE_BYTES is set. The commands need the scope admin.

    \b
    sie cache status                       show what the cache of a gateway has
    sie cache erase --model BAAI/bge-m3    erase the answers of a model, at all gateways
    sie cache erase --key ID               erase the answers to an API key (`sie keys list`)
    sie cache erase --text "a text"        erase the answers to an input
    sie cache erase --all                  erase all answers
    """


@cache.command()
@cluster_options(GATEWAY_URL)
def status(cluster: Cluster) -> None:
    """Show the memory, the answers and the models of the cache. Each gateway has its own cache. The command shows the
    cache of the gateway that replies.
    """
    with AdminClient(cluster) as gateway:
        state = gateway.first("GET", "/v1/cache", CacheState)
    if not state.max_bytes:
        click.echo(f"{public_url(cluster.gateway_urls[0])} has no cache: SIE_CACHE_BYTES is 0")
        return
    click.echo(
        f"{state.answers:,} answers in {state.bytes / 2**20:.1f} of {state.max_bytes / 2**20:.1f} MiB, "
        f"{state.evictions:,} removed for lack of room; {state.gateways} gateways"
    )
    if state.models:
        rows = [("MODEL", "KEY", "ANSWERS")]
        rows += [(row.model, row.key or "-", f"{row.answers:,}") for row in state.models]
        display.table(rows)


@cache.command()
@click.option("--model", metavar="MODEL", help="Erase answers of this model, named by its id in the catalogue.")
@click.option("--key", metavar="ID", help="Erase answers to requests with this API key, named by its id.")
@click.option("--text", help="Erase answers to inputs that are this text and nothing else.")
@click.option("--query", help="Erase scores with this query; --text is the document.")
@click.option("--all", "is_all", is_flag=True, help="Erase all answers.")
@cluster_options(GATEWAY_URL)
def erase(
    cluster: Cluster, model: str | None, key: str | None, text: str | None, query: str | None, is_all: bool
) -> None:
    """Erase answers at all gateways. With several options, answers that fit all of them are erased.

    --text erases answers to inputs that have this text and nothing else. It does not erase scores of the text (add
    --query), or answers to inputs with mentions, chunks, images or token ids (use --model, --key or --all). A gateway
    without a connection to the broker erases all its answers when it is connected again.
    """
    selection: dict[str, Any] = {"model": model, "key": key, "text": text, "query": query}
    body = {name: value for name, value in selection.items() if value is not None}
    if is_all == bool(body):
        raise click.UsageError("give --model, --key or --text, or else --all")
    with AdminClient(cluster) as gateway:
        erasure = {**body, **({"all": True} if is_all else {})}
        reply = gateway.first("POST", "/v1/cache/erase", CacheErased, json=erasure)
    click.echo(
        f"{counted(reply.answers, 'answer')} erased at {public_url(cluster.gateway_urls[0])}, "
        f"the erasure was sent to {counted(reply.gateways, 'gateway')}"
    )
