"""`sie dlq`: work that was given up, and its way back into the queue."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from sie_broker import Broker, Write
from sie_cli import display
from sie_cli.cluster import BROKER_URL, Cluster, cluster_options
from sie_cli.options import AnyPosition
from sie_cli.refusal import Refused
from sie_contracts import messages, topology
from sie_contracts.messages import DeadLetter, Failed, WorkItem, WorkResult
from sie_contracts.settings import Settings

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
NOTE_S = 5.0  # between notes that a replay still waits


@dataclass(frozen=True)
class Found:
    """A dead letter and its place in the stream. `item` is None for work that nobody can read."""

    sequence: int
    letter: DeadLetter
    item: WorkItem | None

    @property
    def model(self) -> str:
        return self.item.model if self.item else "?"

    @property
    def error(self) -> str:
        return f"{self.letter.error.code} {self.letter.error.reason}".strip()

    @property
    def at(self) -> str:
        return (
            datetime.fromtimestamp(self.letter.at_s, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
        )


class Letters:
    """The dead letters of a pool. Raises BrokerError."""

    def __init__(self, broker: Broker, pool: str) -> None:
        self._broker = broker
        self._stream = topology.dead_letter_stream(pool, storage="file", replicas=1).name

    async def all(self) -> AsyncIterator[Found]:
        """Every letter, oldest first."""
        sequence = 0
        while (stored := await self._broker.first_stored(self._stream, sequence)) is not None:
            sequence = stored.sequence + 1
            try:
                letter = messages.decode_dead_letter(stored.data)
            except msgspec.DecodeError as error:
                click.echo(
                    f"letter {stored.sequence} cannot be read by this version and is left out: {error}", err=True
                )
                continue
            try:
                item = messages.decode_work(letter.item)
            except (msgspec.DecodeError, UnicodeDecodeError):
                item = None
            yield Found(stored.sequence, letter, item)

    async def one(self, name: str) -> Found:
        """The letter whose id begins with `name`. Raises Refused unless it is exactly one."""
        found = [each async for each in self.all() if each.letter.id.startswith(name)]
        if len(found) != 1:
            raise Refused(
                f"{len(found)} dead letters have an id that begins with {name}"
                if found
                else f"there is no dead letter {name}"
            )
        return found[0]

    async def remove(self, found: Found) -> None:
        await self._broker.delete(self._stream, found.sequence)


_options = cluster_options(BROKER_URL, "SIE_POOL")


@click.group(cls=AnyPosition, short_help="Work that was given up: look at it, run it again.")
def dlq() -> None:
    """Work that was given up: inputs that end every adapter, messages that nobody can read, models that are gone.

    \b
    sie dlq list               what there is
    sie dlq show ID            one of them; --with-input shows the client's text
    sie dlq replay ID          put it into the queue again and wait for its answer
    sie dlq purge [ID]         forget one, or all
    """


@dlq.command("list")
@_options
def list_command(cluster: Cluster) -> None:
    """When, which model, why, and how often it was tried."""

    async def body(broker: Broker) -> list[Found]:
        return [found async for found in Letters(broker, cluster.settings.pool).all()]

    rows = [("ID", "TIME (UTC)", "MODEL", "ERROR", "INPUTS", "DELIVERIES", "DEATHS")]
    for found in _on(cluster, body):
        inputs = str(_count(found.item)) if found.item else "?"
        rows.append(
            (
                found.letter.id,
                found.at,
                found.model,
                found.error,
                inputs,
                str(found.letter.deliveries),
                str(found.letter.deaths),
            )
        )
    if len(rows) == 1:
        click.echo("no dead letters")
        return
    display.table(rows)


@dlq.command()
@click.argument("name", metavar="ID")
@click.option("--with-input", is_flag=True, help="Also what the client sent: texts, query, options.")
@_options
def show(cluster: Cluster, name: str, with_input: bool) -> None:
    """Everything that is known of one dead letter."""
    found = _on(cluster, lambda broker: Letters(broker, cluster.settings.pool).one(name))
    letter, item = found.letter, found.item
    lines = {
        "id": letter.id,
        "time": f"{found.at} UTC",
        "error": found.error,
        "message": letter.error.message,
        "workers": ", ".join(letter.workers),
        "deliveries": letter.deliveries,
        "deaths": letter.deaths,
        "subject": letter.subject,
        "bytes": len(letter.item),
    }
    if item is not None:
        lines |= {
            "request": item.request,
            "chunk": item.chunk,
            "attempt": item.attempt,
            "model": item.model,
            "profile": item.profile,
            "revision": item.revision,
            "operation": item.operation,
            "inputs": _count(item),
        }
    if with_input:
        lines |= {"item": msgspec.json.encode(item).decode() if item is not None else repr(letter.item)}
    for field, value in lines.items():
        click.echo(f"{field + ':':<12}{value}")


@dlq.command()
@click.argument("name", metavar="ID")
@click.option(
    "--timeout", "timeout_s", default=120.0, show_default=True, type=click.FloatRange(1, 600), help="Budget, seconds."
)
@_options
def replay(cluster: Cluster, name: str, timeout_s: float) -> None:
    """Publish the work again and wait. What was answered is removed; the status is 1 if an input failed.

    A content that is known as poison gets a new chance: if it still ends its adapter, that costs two deaths more.
    """
    outcomes = _on(cluster, lambda broker: replayed(broker, cluster.settings, name, timeout_s)).outcomes
    failed = [outcome.error for outcome in outcomes if isinstance(outcome, Failed)]
    for error in failed:
        click.echo(f"error: {error.code} {error.reason}: {error.message}")
    kept = "the dead letter is kept" if failed else "the dead letter is removed"
    click.echo(f"answered: {len(outcomes) - len(failed)} of {len(outcomes)} inputs have a value, {kept}")
    sys.exit(1 if failed else 0)


async def replayed(broker: Broker, settings: Settings, name: str, timeout_s: float) -> WorkResult:
    """The result of the work, run again; its letter is removed if every input has a value. Raises
    Refused, BrokerError.
    """
    from sie_gateway.inbox import Inbox
    from sie_gateway.metrics import Metrics
    from sie_sidecar.poison import content_keys

    letters = Letters(broker, settings.pool)
    found = await letters.one(name)
    if found.item is None:
        raise Refused(f"{found.letter.id} holds a message that nobody can read; nothing was published")
    marks = await broker.key_value(topology.POISON_BUCKET, max_age_s=topology.POISON_LIFETIME_S)
    for key in dict.fromkeys(content_keys(found.item)):
        if await marks.get(key) is not None:
            await marks.write([Write(key, None)])
    spec = topology.consumer_of(found.letter.subject, float(settings.ack_wait_s))
    if spec.name not in await broker.consumers(spec.stream):
        await broker.ensure_consumer(spec)
    inbox = Inbox(broker, Metrics())
    await inbox.start()
    request = f"{found.item.request}-{secrets.token_hex(4)}"
    collector = inbox.open(request, 1)
    try:
        item = msgspec.structs.replace(
            found.item,
            request=request,
            chunk=0,
            attempt=found.item.attempt + 1,
            reply=inbox.address(request),
            budget_ms=round(timeout_s * 1000),
        )
        await broker.publish(found.letter.subject, messages.encode(item), f"{request}.0.{item.attempt}")
        await _waiting(collector.wait(timeout_s), timeout_s)
        (result,) = collector.results
        assert result is not None
        if not any(isinstance(outcome, Failed) for outcome in result.outcomes):
            await letters.remove(found)
        return result
    finally:
        inbox.close(collector)
        await inbox.stop()


async def _waiting(answer: Awaitable[None], timeout_s: float) -> None:
    """Wait, with a note on the terminal each NOTE_S. Raises Refused when it takes too long."""
    task = asyncio.ensure_future(answer)
    passed_s = 0.0
    while not (await asyncio.wait({task}, timeout=NOTE_S))[0]:
        passed_s += NOTE_S
        click.echo(f"waiting for the answer, {passed_s:.0f} of {timeout_s:.0f} s", err=True)
    try:
        await task
    except TimeoutError:
        raise Refused(
            f"no answer within {timeout_s:.0f} s; the dead letter is kept, and the work runs if a worker comes in time"
        ) from None


@dlq.command()
@click.argument("name", metavar="[ID]", required=False)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_options
def purge(cluster: Cluster, name: str | None, yes: bool) -> None:
    """Forget one dead letter, or all of the pool. What it held is gone."""
    pool = cluster.settings.pool

    async def chosen(broker: Broker) -> list[Found]:
        letters = Letters(broker, pool)
        return [await letters.one(name)] if name else [found async for found in letters.all()]

    found = _on(cluster, chosen)
    if found and not yes:
        click.confirm(f"Remove {len(found)} dead letters of pool {pool} for ever?", abort=True)

    async def removed(broker: Broker) -> None:
        letters = Letters(broker, pool)
        for each in found:
            await letters.remove(each)

    _on(cluster, removed)
    click.echo(f"{len(found)} removed")


def _count(item: WorkItem) -> int:
    return item.count or len(item.inputs)


def _on(cluster: Cluster, body: Callable[[Broker], Awaitable[T]]) -> T:
    """Run against the broker, which must have dead letters of the pool. Raises Refused where it has not."""

    pool = cluster.settings.pool

    async def run(broker: NatsBroker) -> T:
        stream = topology.dead_letter_stream(pool, storage="file", replicas=1).name
        if all(info.config.get("name") != stream for info in await broker.stream_infos()):
            raise Refused(f"this broker has no stream {stream}: no gateway of pool {pool} was ever here")
        return await body(broker)

    return cluster.at_broker("sie-dlq", run)
