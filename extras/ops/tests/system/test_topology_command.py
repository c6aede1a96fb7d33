"""`sie topology` against a real broker: what it shows, what it finds, and that its changes lose no message."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner, Result
from consumer_race import LANE, item, work_queue
from inprocess import settings_of
from nats_server import NatsServer

from sie_broker.nats import NatsBroker
from sie_broker.nats.api import ConsumerInfo, StreamInfo, consumer_config, stream_config
from sie_cli.main import main
from sie_contracts.wire import topology
from sie_contracts.wire.topology import ConsumerSpec, StreamSpec
from sie_gateway.streams.publish import work_spec

T = TypeVar("T")
WANTED = work_spec(settings_of(), LANE.pool)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as nats_server:
        yield nats_server


def at(server: NatsServer, work: Callable[[NatsBroker], Awaitable[T]]) -> T:
    async def run() -> T:
        broker = NatsBroker("test")
        await broker.open(server.url, 5.0)
        try:
            return await work(broker)
        finally:
            await broker.close()

    return asyncio.run(run())


def sie(server: NatsServer, *args: str) -> Result:
    return CliRunner().invoke(main, ["topology", *args, "--nats-url", server.url], env={"SIE_NATS_URL": None})


def make(server: NatsServer, spec: StreamSpec, *consumers: ConsumerSpec, messages: int = 0) -> None:
    """Create the stream as another version would have made it, with messages of one model."""

    async def work(broker: NatsBroker) -> None:
        await broker.api(f"STREAM.CREATE.{spec.name}", stream_config(spec), StreamInfo)
        for consumer in consumers:
            body = {"stream_name": spec.name, "action": "create", "config": consumer_config(consumer)}
            await broker.api(f"CONSUMER.CREATE.{spec.name}.{consumer.name}.{consumer.subject}", body, ConsumerInfo)
        subject = topology.work_subject(LANE, "interactive", "toy/a")
        await asyncio.gather(*(broker.publish(subject, b"x", str(number)) for number in range(messages)))

    at(server, work)


def stored(server: NatsServer) -> int:
    async def work(broker: NatsBroker) -> int:
        return (await broker.stream_state(WANTED.name)).messages

    return at(server, work)


def test_what_a_gateway_made_is_shown_and_found_to_be_right(server: NatsServer) -> None:
    async def work(broker: NatsBroker) -> None:
        queue = work_queue(broker)
        await queue.ensure_pool(LANE.pool)
        await queue.publish(LANE, [item("toy/a", str(number)) for number in range(3)], time.perf_counter() + 10.0)
        await broker.ensure_consumer(topology.slot_consumer(LANE, "bulk", "toy/b", 10.0))

    at(server, work)
    shown = json.loads(sie(server, "show", "--json").stdout)
    stream = next(entry for entry in shown if entry["name"] == "WORK__default")
    assert (stream["messages"], stream["storage"], stream["replicas"], stream["version"]) == (
        3,
        "file",
        1,
        topology.TOPOLOGY_VERSION,
    )
    (lane,) = stream["lanes"]
    assert (lane["lane"], lane["own"], lane["shared"], lane["waiting"]) == ("_default.cpu.default", 1, 1, 3)
    text = sie(server, "show", "--consumers").stdout
    assert f"WORK__default  file, 1 copy, topology {topology.TOPOLOGY_VERSION}, 3 messages" in text
    assert "toy_2fa" in text
    checked = sie(server, "check")
    assert (checked.exit_code, checked.stdout.strip()) == (
        0,
        f"the broker has topology {topology.TOPOLOGY_VERSION} with these settings: nothing differs",
    )
    assert sie(server, "migrate", "--yes").stdout.strip() == "nothing to do"


def test_an_older_topology_is_shown_field_by_field_and_migrated_without_loss(server: NatsServer) -> None:
    """`check` says what differs. `migrate` shows the same and changes nothing. `--yes` makes the changes, and a gateway
    accepts them.
    """
    older = dataclasses.replace(WANTED, max_per_subject=0, version=1)
    consumer = dataclasses.replace(topology.work_consumer(LANE, "interactive", "toy/a", 10.0), version=1)
    make(server, older, consumer, messages=500)

    checked = sie(server, "check")
    assert checked.exit_code == 1
    assert "update stream WORK__default" in checked.stdout
    assert "  max_msgs_per_subject: -1 -> 16384\n" in checked.stdout
    assert "  discard_new_per_subject: (unset) -> True\n" in checked.stdout
    assert f"update consumer {consumer.name}\n  topology version: 1 -> {topology.TOPOLOGY_VERSION}\n" in checked.stdout
    planned = sie(server, "migrate")
    assert planned.exit_code == 1
    assert planned.stdout.startswith(checked.stdout)
    assert "nothing was changed" in planned.stdout
    assert sie(server, "check").stdout == checked.stdout

    done = sie(server, "migrate", "--yes")
    assert done.exit_code == 0, done.output
    assert "create stream DEAD__default" in done.stdout, (
        "where the older version kept what was given up is of no use to this one"
    )
    assert "3 of 3 done" in done.stdout
    assert stored(server) == 500
    assert sie(server, "check").exit_code == 0
    at(server, lambda broker: broker.ensure_stream(WANTED))
    at(server, lambda broker: broker.ensure_consumer(dataclasses.replace(consumer, version=topology.TOPOLOGY_VERSION)))


def test_a_changed_setting_is_applied_in_place(server: NatsServer) -> None:
    make(server, WANTED, messages=50)
    args = ("--queue-max-bytes", str(2 << 30))
    steps = json.loads(sie(server, "check", "--json", *args).stdout)
    changed = {change["field"]: change["wanted"] for step in steps for change in step["changes"]}
    assert changed == {"max_bytes": 2 << 30, "max_msgs_per_subject": 32768}
    missing = [step for step in steps if step["action"] == "create"]
    assert [(step["kind"], step["reason"]) for step in missing] == [
        ("consumer", "its subject holds messages"),
        ("stream", ""),
    ]
    assert missing[1]["name"] == "DEAD__default"
    assert sie(server, "migrate", "--yes", *args).exit_code == 0
    assert sie(server, "check", *args).exit_code == 0
    assert stored(server) == 50


def test_what_would_cost_messages_is_refused_with_what_helps(server: NatsServer) -> None:
    """The cases: another storage, a limit below what is stored, and a shorter age."""
    make(server, dataclasses.replace(WANTED, max_per_subject=0, version=1), messages=3000)

    def refusal(*args: str) -> str:
        done = sie(server, "migrate", "--yes", *args)
        assert done.exit_code == 1
        return next(line for line in done.stdout.splitlines() if line.startswith("refuse stream"))

    assert "the storage of a stream cannot be changed in place" in refusal("--stream-storage", "memory")
    assert "has 3000 messages, more than half of the new limit 4096" in refusal("--queue-max-bytes", str(1 << 20))
    assert "a shorter age would drop messages" in refusal("--gateway-request-timeout", "60")
    assert stored(server) == 3000


def test_a_lower_limit_than_the_stored_dead_letters_is_refused(server: NatsServer) -> None:
    """The broker would drop the oldest letters. A work queue refuses new messages instead: its limit may be lowered."""
    letters = topology.dead_letter_stream(LANE.pool, replicas=1, queue_bytes=4 << 20)
    at(server, lambda broker: broker.ensure_stream(letters))

    async def store(broker: NatsBroker) -> None:
        for number in range(60):
            await broker.publish(letters.subjects[0], b"x" * 10_000, f"letter-{number}")

    at(server, store)
    done = sie(server, "migrate", "--yes", "--queue-max-bytes", str(1 << 20))
    assert done.exit_code == 1
    refused = next(line for line in done.stdout.splitlines() if line.startswith("refuse stream"))
    assert "more than the new limit 262144" in refused
    assert "sie dlq" in refused
    assert at(server, lambda broker: broker.stream_state(letters.name)).messages == 60


def test_a_newer_topology_is_left_alone(server: NatsServer) -> None:
    make(server, dataclasses.replace(WANTED, version=topology.TOPOLOGY_VERSION + 1))
    done = sie(server, "migrate", "--yes")
    assert done.exit_code == 1
    assert "is newer than this version's" in done.stdout
