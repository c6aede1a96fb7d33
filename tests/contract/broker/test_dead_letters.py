"""Dead letters of both brokers, read in both directions across gaps of removed letters."""

from __future__ import annotations

import random

import pytest

from sie_broker import Broker
from sie_broker.dead_letters import SPAN, Letters
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter, Input, RunOptions, WorkItem

ITEM = WorkItem("r", 0, "toy/one", "", "encode", (Input("x"),), RunOptions(), "inbox", 1000)


async def write(broker: Broker, name: str, item: bytes = b"") -> None:
    error = ErrorInfo("INFERENCE_ERROR", "why", "poison")
    letter = DeadLetter(name, "sie.work._default.l4.default.interactive.m", item, error, ("w0",), 1, 2, 1.0)
    await broker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), name)


@pytest.fixture
async def letters(broker: Broker) -> Letters:
    await broker.ensure_stream(topology.dead_letter_stream("_default", replicas=1))
    return Letters(broker, "_default")


async def test_they_are_read_both_ways_whatever_was_removed(broker: Broker, letters: Letters) -> None:
    """Letters are removed at the start, in a long run, at random, at the end, and then all."""
    assert [entry async for entry in letters.newest()] == []
    count = 12 * SPAN
    for number in range(1, count + 1):
        await write(broker, f"{number:x}")
    numbers, survivors = random.Random(0), list(range(1, count + 1))
    removals = [range(1, 4), range(3 * SPAN, 10 * SPAN), numbers.sample(survivors, 20), [count], survivors]
    for sequences in removals:
        for sequence in sorted(set(sequences) & set(survivors)):
            letter = await letters.at(sequence)
            assert letter is not None
            assert await letters.remove(letter)
            assert not await letters.remove(letter)
            survivors.remove(sequence)
            assert await letters.at(sequence) is None
        assert [entry.sequence async for entry in letters.all()] == survivors
        assert [entry.sequence async for entry in letters.newest()] == survivors[::-1]
        for middle in (1, 5, 2 * SPAN, 11 * SPAN, count + 5):
            assert [entry.sequence async for entry in letters.newest(middle)] == [
                x for x in survivors[::-1] if x < middle
            ]
            assert [entry.sequence async for entry in letters.all(middle)] == [x for x in survivors if x > middle]


async def test_what_cannot_be_read_is_told_and_left_out(broker: Broker, letters: Letters) -> None:
    await broker.publish(topology.dead_letter_subject("_default"), b"\xc1", "of a version to come")
    await write(broker, "a", b"\xc1")
    await write(broker, "ab", messages.encode(ITEM))
    failures: list[int] = []
    reading = Letters(broker, "_default", lambda sequence, _error: failures.append(sequence))
    broken, whole = [letter async for letter in reading.all()]
    assert failures == [1]
    assert (broken.item, broken.inputs, broken.model) == (None, None, "?")
    assert (whole.item, whole.inputs, whole.model, whole.error) == (ITEM, 1, "toy/one", "INFERENCE_ERROR poison")
    assert [letter.letter.id for letter in await letters.named("a")] == ["a", "ab"]
    assert [letter.sequence async for letter in letters.newest()] == [3, 2]
