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
@click.option("--once", is_flag=True, help="Print one picture, then end.")
def top(cluster: Cluster, once: bool) -> None:
    """Show workers, models and queues of a cluster, live. The key q or Ctrl-C ends the command.

    A terminal shows one picture that changes; a pipe gets one picture after the other, with a blank line between them.
    If the width is sufficient, one line shows the trend of requests per second and of queued work in the last 60
    frames, and a second line shows latency and errors of this gateway in the last hour.
    Models that are not loaded and have no requests are only counted. While the gateway restarts, the command waits.
    If the gateway requires a token: set SIE_API_KEY to a token with the scope `read`. Without it, SIE_ADMIN_TOKEN is
    sent, but only to the gateway that SIE_GATEWAY_URL names.

    Status 0: ended by q, Ctrl-C or --once. 2: no gateway answered, or the gateway refused the request.
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
        refuse(f"this `sie` cannot read frames of {public_url(url)} ({error}): use the `sie` of the gateway's version")
    except BrokenPipeError:
        # the reader has closed the pipe: write to /dev/null from now on, so that the flush at the exit does not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
