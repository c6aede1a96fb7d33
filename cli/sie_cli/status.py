"""Command `sie status`: workers, models and queues of a cluster, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import click
import msgspec

from sie_cli import display
from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.gateway_client import described, gateway_client, quiet_client
from sie_cli.moments import span
from sie_contracts.api.operations import ClusterInfo, ModelSummary, WorkerInfo
from sie_contracts.settings import public_url
from sie_contracts.status import QueueInfo


class StatusFrame(msgspec.Struct, frozen=True):
    """Fields of a frame of `/ws/cluster-status` that this command shows. `queues` is None while the gateway has no data
    about the queues. `failures`: model -> reason of its failed load.
    """

    version: str
    cluster: ClusterInfo
    workers: list[WorkerInfo]
    models: list[ModelSummary]
    queues: list[QueueInfo] | None = None
    model_queues: list[QueueInfo] | None = None
    failures: dict[str, str] = {}


@click.command()
@cluster_options(GATEWAY_URL)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def status(cluster: Cluster, as_json: bool) -> None:
    """Show workers, models and queues of a cluster, once.

    Models that are not loaded and have no work are only counted. If the gateway requires a token: set SIE_API_KEY to a
    token with the scope `read`. Without it, SIE_ADMIN_TOKEN is sent, but only to the gateway that SIE_GATEWAY_URL
    names.

    Status 2: no gateway answered, or the gateway refused the request.
    """
    with gateway_client(cluster, "the scope read") as client, quiet_client():
        document = next(client.watch())
        frame = described(document, StatusFrame)
    if as_json:
        click.echo(display.document(document))
        return
    info = frame.cluster
    click.echo(
        f"{display.printable(public_url(cluster.gateway_urls[0]))}, sie {display.printable(frame.version)}: "
        f"{display.counted(info.worker_count, 'healthy worker')}, "
        f"{display.counted(info.models_loaded, 'model')} loaded, {info.total_qps:,.1f} requests a second"
    )
    _show_workers(frame.workers)
    _show_models(frame)
    _show_queues(frame.queues)


def _show_workers(workers: Iterable[WorkerInfo]) -> None:
    rows = [("WORKER", "LANE", "STATE", "IN FLIGHT", "LOADED", "DEVICE", "MEMORY")]
    for worker in sorted(workers, key=lambda worker: (worker.healthy, -worker.queue_depth, worker.name)):
        used, total = worker.memory_used_bytes, worker.memory_total_bytes
        rows.append(
            (
                worker.name,
                f"{worker.pool}.{worker.gpu}.{worker.bundle}",
                "ready" if worker.healthy else f"not ready {worker.reason}".rstrip(),
                f"{worker.queue_depth:,}",
                str(len(worker.loaded_models)),
                worker.device or "-",
                f"{display.size(used)} of {display.size(total)}" if total else "-",
            )
        )
    _show(rows)


def _show_models(frame: StatusFrame) -> None:
    queued: defaultdict[str, list[QueueInfo]] = defaultdict(list)
    for queue in frame.model_queues or ():
        queued[queue.model].append(queue)
    rows = [("MODEL", "STATE", "QUEUED", "OLDEST", "WORKERS")]
    for model in frame.models:
        queues = queued[model.name]
        if model.state == "available" and not queues and not model.total_queue_depth:
            continue
        counts = f"{sum(queue.messages for queue in queues):,}", _age(queues), str(model.worker_count)
        rows.append((model.name, model.state, *counts))
    _show(rows)
    if idle := len(frame.models) - len(rows) + 1:
        click.echo(f"{display.counted(idle, 'model')} neither loaded nor requested")
    for name, reason in frame.failures.items():
        click.echo(display.printable(f"{name} could not be loaded: {reason}"))


def _show_queues(queues: list[QueueInfo] | None) -> None:
    if queues is None:
        click.echo("\nthe gateway has no data about the queues")
        return
    rows = [("QUEUE", "PRIORITY", "QUEUED", "OLDEST")]
    for queue in queues:
        lane = f"{queue.pool}.{queue.machine_profile}.{queue.bundle}"
        rows.append((lane, queue.priority, f"{queue.messages:,}", _age([queue])))
    _show(rows)


def _age(queues: list[QueueInfo]) -> str:
    """Format the age of the oldest message in the queues."""
    return span(max(queue.oldest_s for queue in queues)) if any(queue.messages for queue in queues) else "-"


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    if len(rows) > 1:
        click.echo()
        display.table(rows)
