"""Gateway, catalogue and sidecars in one process with an in-process queue. Each adapter is a separate process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any

import click

from sie_broker.memory import MemoryServer
from sie_cli.data_dir import socket_path
from sie_cli.options import loaded, refuse, settings_options
from sie_config_service.process import prepare
from sie_config_service.reload import Reload
from sie_config_service.store import CatalogueStore
from sie_contracts.errors import SIEError
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire.configs import ConfigEpoch, ConfigExport
from sie_runtime.process import Stop, Tasks, own_stderr
from sie_runtime.process import run as run_process


class LocalSource:
    """Source of catalogue updates for gateway and sidecars: the store in this process, instead of a config service."""

    def __init__(self, store: CatalogueStore) -> None:
        self._store = store

    async def export(self) -> ConfigExport:
        return await self._store.export()

    async def epoch(self) -> ConfigEpoch:
        return await self._store.catalogue_epoch()

    async def close(self) -> None:
        """Do nothing: the source has no open resource."""


@click.command(hidden=True)
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=8080, type=int)
@click.option("--data-dir", type=click.Path(path_type=Path), required=True)
@click.option("--workers", default=1, type=int)
@click.option("--drain-s", default=None, type=float)
@settings_options("gateway", "config", "sidecar")
def standalone(host: str, port: int, data_dir: Path, workers: int, drain_s: float | None, **values: Any) -> None:
    """Run the in-process part of `sie serve --standalone`."""
    settings = loaded(values, "standalone").settings
    own_stderr(json=settings.log_json)
    try:
        if settings.auth_mode == "token":
            raise SettingError(
                "SIE_AUTH_MODE", 'the mode "token" stores keys in a broker, and --standalone has none: use "static"'
            )
        raise SystemExit(run_process(lambda stop: _run(settings, stop, host, port, data_dir, workers, drain_s)))
    except (SettingError, SIEError) as error:
        refuse(error)


async def _run(
    settings: Settings, stop: Stop, host: str, port: int, data_dir: Path, workers: int, drain_s: float | None
) -> int:
    from sie_gateway.process import serve as serve_gateway
    from sie_sidecar.process import serve as serve_sidecar

    server = MemoryServer()
    prepared = await prepare(settings, server.connect("sie-config"))
    store = prepared.store
    workers_stop = Stop()
    sidecars = [
        asyncio.create_task(
            serve_sidecar(
                worker,
                server.connect(f"sie-sidecar-{number}"),
                LocalSource(store),
                workers_stop,
                host=host,
                mode="standalone",
            ),
            name=f"sidecar:{number}",
        )
        for number, worker in enumerate(_workers(settings, data_dir, workers))
    ]
    for task in sidecars:
        task.add_done_callback(lambda _: stop.request())  # if a worker ends on its own, end the process
    tasks = Tasks(logging.getLogger("sie.config"), stop.request)
    tasks.start(Reload(store, prepared.overlay, prepared.signature).run(stop), "folder of models")
    try:
        broker, source = server.connect("sie-gateway"), LocalSource(store)
        status = await serve_gateway(settings, broker, source, stop, host=host, port=port, drain_s=drain_s)
    finally:
        await tasks.cancel()
        workers_stop.request()
        ended = await asyncio.gather(*sidecars, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome
        status = status or outcome
    return status or int(tasks.failed)


def _workers(settings: Settings, data_dir: Path, count: int) -> list[Settings]:
    workers = []
    for number in range(count):
        port = settings.worker_metrics_port
        own: dict[str, Any] = {
            "ipc_socket_path": str(socket_path(data_dir, number)),
            "worker_metrics_port": port + number if port else 0,
        }
        if count > 1:
            own["worker_id"] = f"{settings.worker_id or 'worker'}-{number}"
        workers.append(dataclasses.replace(settings, **own))
    return workers
