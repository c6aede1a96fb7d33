"""Command `sie mcp`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.options import LAME_DUCK, port_option, refuse
from sie_contracts.settings import SettingError
from sie_runtime.process import Stop, own_stderr
from sie_runtime.process import run as run_process

if TYPE_CHECKING:
    from sie_mcp_server.server import AgentServer

STDIO_OWNER = "stdio"


@click.command(short_help="Tools for agents, by the Model Context Protocol.")
@click.option("--http", "is_http", is_flag=True, help="Serve over streamable HTTP at /mcp instead of stdio.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, with --http.")
@port_option(8085, "Port, with --http")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with default models, and the collections that agents may search.",
)
@click.option(
    "--documents",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder whose files the tool parse_document may read. Not with --http.",
)
@click.option(
    "--timeout-s",
    default=50.0,
    show_default=True,
    type=click.FloatRange(1, 600),
    help="Longest time in seconds that a call of a tool may take.",
)
@click.option("--lame-duck-s", default=0.0, show_default=True, type=click.FloatRange(0), help=LAME_DUCK)
@cluster_options(GATEWAY_URL, "SIE_ALLOWED_HOSTS", "SIE_LOG_JSON")
def mcp(
    cluster: Cluster,
    is_http: bool,
    host: str,
    port: int,
    config_file: Path | None,
    documents: Path | None,
    timeout_s: float,
    lame_duck_s: float,
) -> None:
    """Offer agents the tools of a gateway: encode, similarity, rerank, extract, redact, parse_document, search.

    \b
    sie mcp                                       over stdio, with the API key of SIE_API_KEY
    sie mcp --http --port 8085                    over HTTP; the bearer token of a request is its API key
    sie mcp --config mcp.yaml                     with default models, and collections to search
    sie mcp --documents ~/papers                  agents may parse the files in this folder

    The command is a client of the gateway: the scopes of the API key decide what an agent may do. SIE_JOBS_SINKS names
    the databases of the collections. Over HTTP the server has no key of its own.

    An agent starts the command itself: extras/mcp/mcp.md has the settings of known agents.

    Status 0: ended. 2: an option or a setting is wrong.
    """
    from sie_bulk_jobs.settings import JobsSettings
    from sie_mcp_server import config
    from sie_mcp_server.callers import AgentCaller, KeyNames
    from sie_mcp_server.http import caller_of, serve
    from sie_mcp_server.results import ResultStore
    from sie_mcp_server.server import AgentServer
    from sie_mcp_server.tools import AgentTools

    if is_http and documents is not None:
        raise click.UsageError("--documents gives every caller the files of this machine: it does not go with --http")
    settings = cluster.settings
    assert isinstance(settings, JobsSettings)
    own_stderr(json=settings.log_json)
    logging.getLogger("mcp").setLevel(logging.WARNING)  # the library logs ids of sessions at level info
    url = cluster.gateway_urls[0]
    folder = documents.resolve() if documents else None

    async def run(stop: Stop) -> int:
        tools = AgentTools(
            url,
            config.read(config_file),
            dict(settings.jobs_sinks or ()),
            ResultStore(),
            documents=folder,
            timeout_s=timeout_s,
        )
        keys = KeyNames(url)
        try:
            if is_http:
                return await serve(
                    AgentServer(tools, caller_of),
                    keys,
                    stop,
                    host=host,
                    port=port,
                    allowed_hosts=settings.allowed_hosts,
                    lame_duck_s=lame_duck_s,
                    drain_s=timeout_s,
                )
            secret = cluster.gateway_token
            user = AgentCaller(secret.reveal() if secret else None, STDIO_OWNER, "", None)
            return await _serve_stdio(AgentServer(tools, lambda _context: user), stop)
        finally:
            await keys.close()
            await tools.close()

    try:
        sys.exit(run_process(run))
    except SettingError as error:
        refuse(error)


async def _serve_stdio(server: AgentServer, stop: Stop) -> int:
    """Serve the protocol on standard input and output until the input ends or `stop` is requested."""
    from mcp.server.stdio import stdio_server

    protocol = server.protocol
    async with stdio_server() as (messages, answers):
        serving = asyncio.ensure_future(protocol.run(messages, answers, protocol.create_initialization_options()))
        ending = asyncio.ensure_future(stop.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not serving.done():
            # a thread waits for the next line of standard input, and only the end of the process ends this thread
            os._exit(0)
        serving.result()
    return 0
