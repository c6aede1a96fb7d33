"""Command `sie top`."""

from __future__ import annotations

import asyncio
import os
import sys

import click
import msgspec

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.gateway_client import gateway_errors, quiet_client
from sie_cli.options import refuse
from sie_cli.refusal import CommandRefused
from sie_contracts.settings import public_url


@click.command()
@cluster_options(GATEWAY_URL)
@click.option("--once", is_flag=True, help="One picture, then end.")
def top(cluster: Cluster, once: bool) -> None:
    """Show workers, models and queues of a cluster, live. The key q ends it, or Ctrl-C.

    In a terminal the picture is drawn in place; in a pipe there is one after the other, a blank line between. Where
    the width allows it, a line shows the trend of the last 60 frames: requests per second, and queued work; another
    one the latency of the last hour at this gateway, and its errors. Models
    that are neither loaded nor asked for are only counted. A gateway that restarts is waited for. Where it wants a
    token: SIE_API_KEY, one with the scope `read`; without it SIE_ADMIN_TOKEN, but only for the gateway that
    SIE_GATEWAY_URL names.

    Status 0: ended by q or Ctrl-C, or --once. 2: no gateway answered, or it refused.
    """
    from rich.console import Console

    from sie_cli.top.live import PIPE_HEIGHT, PIPE_WIDTH, show, takes_keys
    from sie_cli.top.picture import View

    secret = cluster.gateway_token
    url = cluster.gateway_urls[0]
    console = Console(highlight=False)
    view = View(public_url(url), takes_keys=console.is_terminal and takes_keys() and not once)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=PIPE_WIDTH, height=PIPE_HEIGHT)
    try:
        with gateway_errors(cluster, "the scope read"), quiet_client():
            asyncio.run(show(view, url, secret.reveal() if secret else None, console, once, cluster.first_patience_s))
    except CommandRefused as error:
        refuse(error)
    except msgspec.ValidationError as error:
        refuse(f"{public_url(url)} tells what this version cannot read ({error}): use the `sie` of its version")
    except BrokenPipeError:
        # the reader of the pipe has closed it: no bytes may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
