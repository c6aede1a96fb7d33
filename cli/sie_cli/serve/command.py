"""Command `sie serve`. The module `processes` starts and stops the processes."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from sie_cli import access
from sie_cli.data_dir import InUse, default_data_dir, locked_data_dir
from sie_cli.models.lookup import look_up
from sie_cli.options import SPARE, ManyOptions, flags_of, loaded, refuse, settings_options
from sie_cli.serve.preflight import MachineNeeds, PortListener, faults
from sie_cli.serve.processes import LocalCluster, ServePlan
from sie_contracts.settings import BY_NAME, Loaded, SettingError, Settings
from sie_runtime.process import EXIT_BAD_SETTING

FIRST = (
    "--host",
    "--port",
    "--data-dir",
    "--models-dir",
    "--preload-models",
    "--device",
    "--local-cache",
    "--auth-mode",
    "--workers",
    "--standalone",
)


@click.command(cls=ManyOptions, first=FIRST, short_help="Run a whole cluster on this machine.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the API. If other machines can reach it, set SIE_AUTH_MODE; without it, `sie serve` warns.",
)
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Port of the API. With several --gateways: the port of the first one.",
)
@click.option(
    "--data-dir",
    default=None,
    type=click.Path(path_type=Path),
    help="Folder for the server's data: queue, keys, records, addresses and passwords.  [default: ~/.local/share/sie]",
)
@click.option(
    "--standalone",
    is_flag=True,
    help="Run without a broker: an in-process queue, and the same gateway, scheduler and adapter.",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of workers, each a sidecar (takes work from the queue) and an adapter (runs models).",
)
@click.option(
    "--gateways",
    default=1,
    show_default=True,
    type=click.IntRange(1, 8),
    help="Number of gateways. They listen on --port and the ports that follow it.",
)
@click.option("--spare/--no-spare", default=True, show_default=True, help=SPARE)
@click.option(
    "--exit-with-parent",
    is_flag=True,
    help="When the process that started this one ends, finish the requests in progress and end too (Linux).",
)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@settings_options("gateway", "config", "sidecar", "adapter")
def serve(
    models: tuple[str, ...],
    host: str,
    port: int,
    data_dir: Path | None,
    standalone: bool,
    workers: int,
    gateways: int,
    spare: bool,
    exit_with_parent: bool,
    **values: Any,
) -> None:
    """Run a whole cluster on this machine: this command starts, watches and ends broker, config service, gateway (the
    HTTP API) and workers.

    Each MODEL is loaded before the server is ready. MODEL: a name in the catalogue, an id of the Hugging Face Hub, or a
    folder, with or without :PROFILE. A model that the catalogue lacks is added to the models folder, pinned to its
    commit in SIE_LOCAL_CACHE if there is only one, else to its current commit at the hub. If a MODEL cannot be loaded,
    the start fails.

    \b
    sie serve                                   API on http://127.0.0.1:8080
    sie serve BAAI/bge-small-en-v1.5 ./my-model
    sie serve --nats-url nats://broker:4222     use your own broker
    """
    if exit_with_parent and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    failpoints = values.pop("failpoints", None)  # faults that tests inject; only the child processes read them
    loaded_settings = loaded(values, "standalone" if standalone else "queue")
    plan = ServePlan(
        host,
        port,
        (data_dir or default_data_dir()).absolute(),
        standalone,
        workers,
        gateways,
        spare,
        _with_free_ports(loaded_settings),
        flags_of(values),
        os.environ,
        ("--failpoints", failpoints) if failpoints else (),
    )
    try:
        if standalone and gateways > 1:
            raise SettingError("--gateways", "--standalone is one process with one gateway")
        needs = _needs(plan)
        for listener in needs.listeners:
            if listener.port + listener.count - 1 > 65535:
                kind = "workers" if listener.flag == "--worker-metrics-port" else "gateways"
                message = f"{listener.count} {kind} with ports from {listener.port} need ports above 65535"
                raise SettingError(listener.flag, message)
        with locked_data_dir(plan.data_dir):
            if lacking := faults(needs):
                for fault in lacking:
                    click.echo(f"error: {fault}", err=True)
                sys.exit(EXIT_BAD_SETTING)
            sys.exit(asyncio.run(LocalCluster(_with_models(plan, models)).run()))
    except InUse as error:
        owner = access.read(error.data_dir)
        refuse(InUse(error.data_dir, owner.gateway_url if owner is not None else ""))
    except SettingError as error:
        refuse(error)


def _with_models(plan: ServePlan, models: tuple[str, ...]) -> ServePlan:
    served = []
    for spec in models:
        model = look_up(plan.settings, spec)
        if model.message:
            click.echo(model.message, err=True)
        served.append(model)
    if not served:
        return plan
    preloads = dict.fromkeys([*(plan.settings.preload_models or ()), *(model.name for model in served)])
    flags = {**plan.flags, "SIE_PRELOAD_MODELS": ",".join(preloads)}
    return dataclasses.replace(plan, flags=flags, models=tuple(served))


def _with_free_ports(loaded_settings: Loaded) -> Settings:
    """Return the settings with port 0 (any free port) for metrics, unless the operator set the port."""
    assigned = [
        name
        for name in ("SIE_GATEWAY_METRICS_PORT", "SIE_WORKER_METRICS_PORT")
        if loaded_settings.sources[name] == "default"
    ]
    return dataclasses.replace(loaded_settings.settings, **{BY_NAME[name].field: 0 for name in assigned})  # type: ignore[arg-type]


def _needs(plan: ServePlan) -> MachineNeeds:
    """Return the resources that this run needs. Metrics ports are left out if the operator did not set them."""
    settings = plan.settings
    listeners = [
        PortListener("--port", plan.host, plan.port, plan.gateways),
        PortListener("--gateway-metrics-port", plan.host, settings.gateway_metrics_port, plan.gateways),
        PortListener("--worker-metrics-port", plan.host, settings.worker_metrics_port, plan.workers),
    ]
    has_broker = not plan.standalone and settings.nats_url is None
    named = tuple(listener for listener in listeners if listener.port)
    return MachineNeeds(named, plan.data_dir, has_broker, plan.gateways, plan.workers, settings)
