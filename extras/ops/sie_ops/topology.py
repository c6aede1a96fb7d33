"""`sie topology`: show the broker's streams and consumers, compare them with this version's, and migrate them."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from sie_cli import display
from sie_cli.cluster import BROKER_URL, Cluster, cluster_options
from sie_cli.display import printable, size
from sie_cli.options import AnyPosition
from sie_contracts.settings import Settings
from sie_contracts.wire import topology as names

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker
    from sie_broker.nats.api import ConsumerInfo, StreamInfo
    from sie_broker.nats.operator import Step

_WORK = "WORK_"
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for programs.")
_SETTINGS = (
    "SIE_POOL",
    "SIE_STREAM_STORAGE",
    "SIE_STREAM_REPLICAS",
    "SIE_QUEUE_MAX_BYTES",
    "SIE_GATEWAY_REQUEST_TIMEOUT",
    "SIE_ACK_WAIT_S",
)
_options = cluster_options(BROKER_URL, *_SETTINGS)


@click.group(cls=AnyPosition, short_help="Streams and consumers at the broker.")
def topology() -> None:
    """Show the streams and consumers at the broker, compare them with those of this version, and migrate them.

    \b
    sie topology show       streams with settings and backlog; consumers by lane (pool, machine profile, bundle)
    sie topology check      differences from the topology of this version and these settings; status 1 if any
    sie topology migrate    the steps that remove the differences; --yes runs them

    The broker of this user's `sie serve` is found automatically (or with --data-dir), any other broker is given with
    --url or SIE_NATS_URL, and SIE_NATS_PASSWORD. Give the same settings as for the gateways.
    """


@topology.command()
@_options
@_json
@click.option("--consumers", "with_consumers", is_flag=True, help="Show each consumer, not only the sums of each lane.")
def show(cluster: Cluster, as_json: bool, with_consumers: bool) -> None:
    """Print streams and consumers with their backlog. The consumers are summed by lane (pool, machine profile, bundle).

    An `own` consumer serves one model, a `shared` consumer several. Each message is waiting, or leased to a worker.
    """
    present = cluster.at_broker("sie-topology", _shown)
    if as_json:
        click.echo(display.document(present))
        return
    for stream in present:
        limits = f"of {size(stream['max_bytes'])}" if stream["max_bytes"] > 0 else "without a limit"
        click.secho(stream["name"], bold=True, nl=False)
        click.echo(
            f"  {stream['storage']}, {stream['replicas']} {'copies' if stream['replicas'] > 1 else 'copy'}, "
            f"topology {stream['version'] or '-'}, {stream['messages']:,} messages, {size(stream['bytes'])} {limits}"
        )
        for lane in stream["lanes"]:
            counts = f"{lane['own']:>4} own  {lane['shared']:>3} shared"
            waiting = f"{lane['waiting']:>8,} waiting  {lane['leased']:>6,} leased"
            click.echo(f"  {printable(lane['lane']):<40}  {counts}  {waiting}")
            for consumer in lane["consumers"] if with_consumers else ():
                waiting = f"{consumer['waiting']:>8,} waiting  {consumer['leased']:>6,} leased"
                click.echo(f"    {printable(consumer['subject']):<70}  {waiting}")


@topology.command()
@_options
@_json
def check(cluster: Cluster, as_json: bool) -> None:
    """Compare the streams for work and for dead letters, and their consumers, with the topology of this version.

    Status 0: equal. 1: there are differences, or messages that no consumer delivers. 2: the broker could not be
    reached.
    """
    steps = cluster.at_broker("sie-topology", lambda broker: steps_at(broker, cluster.settings))
    _print(steps, as_json)
    if not steps and not as_json:
        click.echo(f"the broker has topology {names.TOPOLOGY_VERSION} with these settings: nothing differs")
    sys.exit(1 if steps else 0)


@topology.command()
@_options
@_json
@click.option("--yes", is_flag=True, help="Run the steps. Without this option they are only shown.")
def migrate(cluster: Cluster, as_json: bool, yes: bool) -> None:
    """Migrate the broker to the topology of this version. Without --yes, the steps are only shown.

    No step loses a message: a change that is impossible in place, or with the present content of the queue, is refused
    with its reason and a remedy. A starting gateway of this version runs the same steps for streams of an older
    version. Gateways of the older version keep running. Status 0: no step remains. 1: steps remain, or were only
    shown. 2: the broker could not be reached.
    """
    steps = cluster.at_broker("sie-topology", lambda broker: steps_at(broker, cluster.settings))
    _print(steps, as_json)
    if not steps:
        if not as_json:
            click.echo("nothing to do")
        return
    if not yes:
        if not as_json:
            click.echo("nothing was changed: --yes runs the steps")
        sys.exit(1)
    left = cluster.at_broker("sie-topology", lambda broker: _apply(broker, cluster.settings, steps))
    if not as_json:
        click.echo(f"{len(steps) - len(left)} of {len(steps)} done" + (f", {len(left)} left" if left else ""))
    sys.exit(1 if left else 0)


async def steps_at(broker: NatsBroker, settings: Settings) -> list[Step]:
    """Return the steps to this version's topology. They cover the streams of work and dead letters of these pools: the
    default pool, the pool in SIE_POOL, and all pools that have a stream of work at the broker. Raises BrokerError.
    """
    from sie_broker.nats.operator import plan, read_facts, streams
    from sie_gateway.streams.publish import work_spec

    present = {str(info.config["name"]) for info in await streams(broker)}
    own = {names.pool_name("default"), settings.pool}
    steps: list[Step] = []
    for pool in sorted({name.removeprefix(_WORK) for name in present if name.startswith(_WORK)} | own):
        # a pool that a client reserved over the API has no stream of its own for dead letters
        reserved = pool not in own and f"DEAD_{pool}" not in present
        facts = await read_facts(broker, names.stream_name(pool))
        steps += plan(facts, work_spec(settings, pool, reserved=reserved), float(settings.ack_wait_s))
        if reserved:
            continue
        dead = names.dead_letter_stream(pool, replicas=settings.stream_replicas, queue_bytes=settings.queue_max_bytes)
        steps += plan(await read_facts(broker, dead.name), dead, float(settings.ack_wait_s))
    return steps


async def _apply(broker: NatsBroker, settings: Settings, steps: list[Step]) -> list[Step]:
    from sie_broker.nats.operator import apply

    for step in steps:
        if step.action != "refuse":
            await apply(broker, step)
    return await steps_at(broker, settings)


def _print(steps: list[Step], as_json: bool) -> None:
    if as_json:
        click.echo(display.document([_plain(step) for step in steps]))
        return
    for step in steps:
        click.secho(f"{step.action} {step.kind} {step.name}", bold=True, nl=False)
        click.echo(f": {step.reason}" if step.reason else "")
        for change in step.changes:
            click.echo(f"  {change.field}: {_value(change.actual)} -> {_value(change.expected)}")


def _plain(step: Step) -> dict[str, Any]:
    changes = [{"field": change.field, "found": change.actual, "wanted": change.expected} for change in step.changes]
    return {
        "action": step.action,
        "kind": step.kind,
        "name": step.name,
        "stream": step.stream,
        "reason": step.reason,
        "changes": changes,
    }


async def _shown(broker: NatsBroker) -> list[dict[str, Any]]:
    from sie_broker.nats.operator import streams

    shown = []
    for info in await streams(broker):
        name = str(info.config["name"])
        consumers = await broker.consumer_infos(name) if name.startswith(_WORK) else []
        shown.append(_stream(name, info, consumers))
    return shown


def _stream(name: str, info: StreamInfo, consumers: list[ConsumerInfo]) -> dict[str, Any]:
    from sie_broker.nats.api import consumer_state_of, version_of

    by_lane: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for consumer in consumers:
        state = consumer_state_of(consumer)
        lane = ".".join(state.subject.split(".")[2:5])
        by_lane[lane].append(
            {
                "name": state.name,
                "subject": state.subject,
                "version": state.version,
                "ack_wait_s": state.ack_wait_s,
                "delivered": state.delivered,
                "waiting": state.waiting,
                "leased": state.leased,
                "shared": names.is_slot(state.name),
            }
        )
    config = info.config
    return {
        "name": name,
        "subjects": config.get("subjects", []),
        "storage": config.get("storage", ""),
        "replicas": config.get("num_replicas", 1),
        "version": version_of(config),
        "created": info.created,
        "messages": info.state.messages,
        "bytes": info.state.bytes,
        "max_bytes": config.get("max_bytes", -1),
        "max_age_s": config.get("max_age", 0) / 1e9,
        "max_per_subject": config.get("max_msgs_per_subject", -1),
        "lanes": [
            {
                "lane": lane,
                "own": sum(not member["shared"] for member in members),
                "shared": sum(member["shared"] for member in members),
                "waiting": sum(member["waiting"] for member in members),
                "leased": sum(member["leased"] for member in members),
                "consumers": sorted(members, key=lambda consumer: str(consumer["subject"])),
            }
            for lane, members in sorted(by_lane.items())
        ],
    }


def _value(value: Any) -> str:
    return "(unset)" if value is None else str(value)
