"""Values and memory of the cache of answers."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from sie_cache import memory as memories
from sie_cache.memory import ENTRY_BYTES, AnswerMemory, AnswerSpace, PeerErasures
from sie_cache.values import pack, unpack
from sie_contracts.wire.heartbeats import AnswerErasure, GatewayBeat
from sie_contracts.wire.messages import ArraySlice, Ok, WorkResult
from sie_gateway.inference.reply import array_of


def test_an_answer_is_given_back_bit_by_bit() -> None:
    vectors = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    scales = np.array([0.5, 2.0], np.float16)
    block = b"before" + vectors.tobytes() + scales.tobytes()
    outcome = Ok(
        {"multivector": ArraySlice("<f4", (2, 8), 6), "multivector.scale": ArraySlice("<f2", (2,), 6 + 64)},
        tokens=9,
        truncated=True,
        score=0.25,
        data={"entities": [{"text": "x", "start": 0}]},
        first_of_several=True,
        sound_s=1.5,
    )
    cached = unpack(pack(WorkResult("r", 0, "w", (outcome,), block), outcome), "f")
    (answer,) = cached.outcomes
    assert isinstance(answer, Ok)
    assert array_of(cached, answer, "multivector").tobytes() == vectors.tobytes()
    assert array_of(cached, answer, "multivector.scale").tobytes() == scales.tobytes()
    assert msgspec.structs.replace(answer, outputs=outcome.outputs) == outcome
    assert (cached.fingerprint, cached.worker, cached.chunk) == ("f", "", -1)


SPACE = AnswerSpace("00" * 16, "m", "k")
VALUE = bytes(1000)
SIZE = len(VALUE) + ENTRY_BYTES


def memory_of(answers: int, ttl_s: float = 60.0, clock: Any = lambda: 0.0) -> AnswerMemory:
    return AnswerMemory(answers * SIZE + memories.SPACE_BYTES, ttl_s, clock)


def key(number: int) -> bytes:
    return SPACE.key(number.to_bytes(16, "big"))


def test_the_least_recently_used_answer_leaves_first() -> None:
    memory = memory_of(10)
    for number in range(10):
        memory.keep(SPACE, key(number), VALUE)
    assert memory.find(key(0)) == VALUE
    memory.keep(SPACE, key(10), VALUE)
    assert (memory.find(key(1)), memory.find(key(0)), len(memory), memory.evictions) == (None, VALUE, 10, 1)


def test_answers_that_are_used_again_stay_beside_many_that_are_not() -> None:
    memory = memory_of(10)
    for number in (1, 2, 3):
        memory.keep(SPACE, key(number), VALUE)
        assert memory.find(key(number)) == VALUE
    for number in range(100, 200):
        memory.keep(SPACE, key(number), VALUE)
    assert [memory.find(key(number)) for number in (1, 2, 3)] == [VALUE] * 3
    assert len(memory) == 10


def test_an_answer_ends_after_its_time() -> None:
    now_s = [0.0]
    memory = memory_of(10, ttl_s=5.0, clock=lambda: now_s[0])
    memory.keep(SPACE, key(1), VALUE)
    now_s[0] = 4.9
    assert memory.find(key(1)) == VALUE
    now_s[0] = 5.0
    assert memory.find(key(1)) is None
    assert (len(memory), memory.held_bytes) == (0, 0)


def test_an_answer_that_would_take_much_of_the_memory_is_not_cached() -> None:
    memory = memory_of(8)
    memory.keep(SPACE, key(1), VALUE)
    memory.keep(SPACE, key(2), VALUE + bytes(100))
    assert (memory.find(key(1)), memory.find(key(2))) == (VALUE, None)


def test_an_answer_that_is_computed_again_replaces_the_first() -> None:
    memory = memory_of(10)
    memory.keep(SPACE, key(1), VALUE)
    memory.keep(SPACE, key(1), b"new")
    assert (memory.find(key(1)), len(memory), memory.held_bytes) == (b"new", 1, 3 + ENTRY_BYTES + memories.SPACE_BYTES)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_and_the_bytes_are_those_of_the_answers(seed: int) -> None:
    draw, now_s = random.Random(seed), [0.0]
    memory = memory_of(20, ttl_s=3.0, clock=lambda: now_s[0])
    for _ in range(3000):
        now_s[0] += draw.random() / 10
        number = draw.randrange(60)
        if draw.random() < 0.5:
            memory.find(key(number))
        else:
            memory.keep(AnswerSpace(f"{number % 7:032x}", "m", "k"), key(number), bytes(draw.randrange(2000)))
        assert memory.held_bytes <= memory.max_bytes
        assert memory._protected_bytes <= memories.PROTECTED_SHARE * memory.max_bytes
    held = [sum(answer.size for answer in part.values()) for part in (memory._first, memory._protected)]
    assert sum(held) + memories.SPACE_BYTES * len(memory._spaces) == memory.held_bytes
    assert held[1] == memory._protected_bytes
    assert sum(count for _, count in memory._spaces.values()) == len(memory)


def test_the_bytes_of_an_entry_are_counted_as_what_python_takes() -> None:
    """tracemalloc measures the entry, its key, the order and the table."""
    import tracemalloc

    memory, count = AnswerMemory(1 << 30, 60.0), 20_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        memory.keep(SPACE, key(number), number.to_bytes(64, "big"))
        if number % 2:
            memory.find(key(number))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    measured = (after - before) / count - 64
    assert 0.5 * memories.ENTRY_BYTES < measured <= memories.ENTRY_BYTES


async def test_answers_are_erased_by_model_key_and_digest() -> None:
    spaces = [
        AnswerSpace(f"{number:032x}", model, owner)
        for number, (model, owner) in enumerate([("a", "k"), ("a", "l"), ("b", "k")])
    ]
    digests = [bytes([number]) * 16 for number in range(3)]

    def filled() -> AnswerMemory:
        memory = memory_of(100)
        for space in spaces:
            for digest in digests:
                memory.keep(space, space.key(digest), VALUE)
        return memory

    for erasure, count in (
        (AnswerErasure(), 9),
        (AnswerErasure(model="a"), 6),
        (AnswerErasure(key="k"), 6),
        (AnswerErasure(digest=digests[1]), 3),
        (AnswerErasure(model="a", key="k"), 3),
        (AnswerErasure("a", "k", digests[2]), 1),
        (AnswerErasure(model="c"), 0),
    ):
        memory = filled()
        assert await memory.erase(erasure) == count
        assert len(memory) == 9 - count
        left = [(space, digest) for space in spaces for digest in digests if memory.find(space.key(digest)) is not None]
        assert all(
            (erasure.model or space.model, erasure.key or space.owner, erasure.digest or digest)
            != (space.model, space.owner, digest)
            for space, digest in left
        )
        assert sum(number for _, number in memory.counts()) == len(left)


def test_a_gateway_that_missed_an_erasure_erases_everything() -> None:
    erasures = PeerErasures()
    first_erasure, two = AnswerErasure(model="a"), AnswerErasure(model="b")
    for beat, due in (
        (GatewayBeat("g"), None),
        (GatewayBeat("g", erasure=first_erasure, erasures=1), first_erasure),
        (GatewayBeat("g", erasures=1), None),
        (GatewayBeat("h", erasure=two, erasures=1), two),
        (GatewayBeat("g", erasures=2), AnswerErasure()),  # the second one was missed
        (GatewayBeat("g", erasures=2), None),
        (GatewayBeat("g", erasure=two, erasures=4), AnswerErasure()),  # the third one was missed
        (GatewayBeat("g", erasure=first_erasure, erasures=5), first_erasure),
        (GatewayBeat("g", leaving=True, erasures=6), AnswerErasure()),
        (GatewayBeat("new", erasure=first_erasure, erasures=2), AnswerErasure()),
    ):
        assert erasures.due(beat) == due, beat


def test_erasures_of_many_gateways_take_no_more_memory() -> None:
    erasures = PeerErasures()
    for number in range(memories.MAX_PEERS + 1):
        erasures.due(GatewayBeat(f"g{number}", erasure=AnswerErasure(model="a"), erasures=1))
    assert len(erasures._counts) == memories.MAX_PEERS
    assert erasures.due(GatewayBeat("g0", erasures=1)) == AnswerErasure()
