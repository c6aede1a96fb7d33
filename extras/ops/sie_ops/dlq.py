"""Command `sie dlq`: list and show dead letters (work that was given up), run their work again, or delete them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from sie_broker import Broker
from sie_broker.dead_letters import DeadLetterEntry, Letters, letter_stream
from sie_cli import display
from sie_cli.cluster import BROKER_URL, Cluster, cluster_options
from sie_cli.display import printable
from sie_cli.moments import moment
from sie_cli.options import AnyPosition
from sie_cli.refusal import CommandRefused
from sie_contracts.settings import Settings
from sie_contracts.wire.messages import Failed, WorkResult

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

T = TypeVar("T")
NOTE_S = 5.0  # seconds between two lines that say that `replay` is still waiting


def _letters(broker: Broker, pool: str) -> Letters:
    def on_unreadable(sequence: int, error: Exception) -> None:
        cause = printable(str(error))
        click.echo(f"letter {sequence} cannot be read by this version and is left out: {cause}", err=True)

    return Letters(broker, pool, on_unreadable)


async def _letter(letters: Letters, name: str) -> DeadLetterEntry:
    """Return the dead letter whose id begins with `name`. Raises CommandRefused if none or several match."""
    # an unset variable in "$ID" gives an empty name, and every id begins with an empty text
    if not name:
        raise CommandRefused("the ID is empty: `sie dlq list` shows the ids")
    letter = await letters.named(name)
    if not letter:
        raise CommandRefused(f"there is no dead letter {name}: `sie dlq list` shows the ids")
    if len(letter) > 1:
        raise CommandRefused(f"{len(letter)} dead letters have an id that begins with {name}")
    return letter[0]


def _at(letter: DeadLetterEntry) -> str:
    """Format the time at which the work of the letter was given up, in UTC."""
    return moment(letter.letter.at_s, "%Y-%m-%d %H:%M:%S")


_options = cluster_options(BROKER_URL, "SIE_POOL")


@click.group(cls=AnyPosition, short_help="Work that was given up: look at it, run it again.")
def dlq() -> None:
    """Work that was given up: inputs that crash adapters, unreadable messages, requests for deleted or changed models.

    \b
    sie dlq list               list the dead letters; each holds work that was given up
    sie dlq show ID            show one dead letter; --with-input shows the client's text too
    sie dlq replay ID          put its work into the queue again and wait for the answer
    sie dlq purge [ID]         delete one dead letter, or all
    """


@dlq.command("list")
@_options
def list_command(cluster: Cluster) -> None:
    """List the dead letters. DELIVERIES: how often workers got the work of the letter. DEATHS: how many adapters died
    from this work.
    """

    async def body(broker: Broker) -> list[DeadLetterEntry]:
        return [letter async for letter in _letters(broker, cluster.settings.pool).all()]

    rows = [("ID", "TIME (UTC)", "MODEL", "ERROR", "INPUTS", "DELIVERIES", "DEATHS")]
    for message in _on(cluster, body):
        letter, inputs = message.letter, "?" if message.inputs is None else str(message.inputs)
        counts = inputs, str(letter.deliveries), str(letter.deaths)
        rows.append((letter.id, _at(message), message.model, message.error, *counts))
    if len(rows) == 1:
        click.echo("no dead letters")
        return
    display.table(rows)


@dlq.command()
@click.argument("name", metavar="ID")
@click.option("--with-input", is_flag=True, help="Also show what the client sent: texts, query, options.")
@_options
def show(cluster: Cluster, name: str, with_input: bool) -> None:
    """Show all fields of one dead letter."""
    message = _on(cluster, lambda broker: _letter(_letters(broker, cluster.settings.pool), name))
    letter, item = message.letter, message.item
    lines = {
        "id": letter.id,
        "time": f"{_at(message)} UTC",
        "error": message.error,
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
            "inputs": message.inputs,
        }
    if with_input:
        lines |= {"item": msgspec.json.encode(item).decode() if item is not None else repr(letter.item)}
    for field, value in lines.items():
        click.echo(f"{field + ':':<12}{printable(str(value))}")


@dlq.command()
@click.argument("name", metavar="ID")
@click.option(
    "--timeout",
    "timeout_s",
    default=120.0,
    show_default=True,
    type=click.FloatRange(1, 600),
    help="Longest time in seconds to wait for the answer.",
)
@_options
def replay(cluster: Cluster, name: str, timeout_s: float) -> None:
    """Run the work of a dead letter again. The work is published, and the command waits for the answer. If an input
    fails, the letter is kept, and the status is 1. Otherwise the letter is removed.

    The command also runs an input that was given up because it crashed adapters. If the input still crashes adapters,
    two adapters die before it is given up again.
    """
    outcomes = _on(cluster, lambda broker: replayed(broker, cluster.settings, name, timeout_s)).outcomes
    failed = [outcome.error for outcome in outcomes if isinstance(outcome, Failed)]
    for error in failed:
        click.echo(printable(f"error: {error.code} {error.reason}: {error.message}"))
    remainder = "the dead letter is kept" if failed else "the dead letter is removed"
    click.echo(f"answered: {len(outcomes) - len(failed)} of {len(outcomes)} inputs have a value, {remainder}")
    sys.exit(1 if failed else 0)


async def replayed(broker: Broker, settings: Settings, name: str, timeout_s: float) -> WorkResult:
    """Run the work of a dead letter again and return its result. The letter is removed if every input has a value.
    Raises CommandRefused, BrokerError, and SIEError if the result cannot be stored.
    """
    from sie_gateway.metrics import Metrics
    from sie_gateway.operations.replay import Unreadable, open_replays

    letters = _letters(broker, settings.pool)
    letter = await _letter(letters, name)
    async with open_replays(broker, letters, Metrics(), float(settings.ack_wait_s)) as replays:
        try:
            return await _waiting(replays.run(letter, timeout_s), timeout_s)
        except Unreadable as error:
            raise CommandRefused(str(error)) from None


async def _waiting(answer: Awaitable[T], timeout_s: float) -> T:
    """Wait for the answer; print a line every NOTE_S seconds. Raises CommandRefused if `timeout_s` ends first."""
    task = asyncio.ensure_future(answer)
    passed_s = 0.0
    while not (await asyncio.wait({task}, timeout=NOTE_S))[0]:
        passed_s += NOTE_S
        click.echo(f"waiting for the answer, {passed_s:.0f} of {timeout_s:.0f} s", err=True)
    try:
        return await task
    except TimeoutError:
        raise CommandRefused(
            f"no answer within {timeout_s:.0f} s; the dead letter remains. Run the command again when a worker is ready"
        ) from None


@dlq.command()
@click.argument("name", metavar="[ID]", required=False)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_options
def purge(cluster: Cluster, name: str | None, yes: bool) -> None:
    """Delete one dead letter, or all dead letters of the pool. The work of a deleted letter is lost. Letters that this
    version of sie cannot read are not deleted.
    """
    pool = cluster.settings.pool

    async def chosen(broker: Broker) -> list[DeadLetterEntry]:
        letters = _letters(broker, pool)
        return [letter async for letter in letters.all()] if name is None else [await _letter(letters, name)]

    letters = _on(cluster, chosen)
    if letters and not yes:
        click.confirm(f"Remove {len(letters)} dead letters of pool {pool} for ever?", abort=True)

    async def removed(broker: Broker) -> None:
        store = Letters(broker, pool)
        for letter in letters:
            await store.remove(letter)

    _on(cluster, removed)
    click.echo(f"{len(letters)} removed")


def _on(cluster: Cluster, body: Callable[[Broker], Awaitable[T]]) -> T:
    """Run `body` with a connection to the broker. Raises CommandRefused if the pool has no stream of dead letters."""

    pool = cluster.settings.pool

    async def run(broker: NatsBroker) -> T:
        stream = letter_stream(pool)
        if await broker.stream_info(stream) is None:
            raise CommandRefused(
                f"this broker has no stream {stream}: check --pool; no gateway of pool {pool} has used this broker"
            )
        return await body(broker)

    return cluster.at_broker("sie-dlq", run)
