"""The loop of models that generate text: rows join and leave between two steps and change no other row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cluster import until
from selection import long_but
from torch import Tensor
from transformers import GenerationConfig

from sie_adapter.generation import reading
from sie_adapter.generation.greedy import Rules, ends_of
from sie_adapter.generation.reading import GeneratedText, Readings, _GenerationCall, _GenerationRow, _Loop
from sie_adapter.generation.slots import DecoderSlots, RowStart
from sie_contracts.errors import InferenceFailed, InternalFailure, ShuttingDown, SIEError

CPU = torch.device("cpu")
WORDS, END = 97, 0
TIMEOUT_S = 20


@dataclass(frozen=True)
class Asked:
    ids: tuple[int, ...]
    rules: Rules
    then: Asked | None = None

    def following(self, written: GeneratedText) -> Asked | None:
        """Return `then` with the written ids behind its own."""
        return self.then and asked(*self.then.ids, *written.ids, most=self.then.rules.most)


def asked(*ids: int, most: int = 40, ends: frozenset[int] = frozenset({END})) -> Asked:
    return Asked(ids, Rules(ids, most, ends))


def _next(ids: Sequence[int]) -> int:
    """Return a token that depends on all tokens before it and on their number."""
    return (sum((place + 1) * number for place, number in enumerate(ids)) * 7 + len(ids)) % WORDS


def expected(prompt: Asked) -> GeneratedText:
    """Return the text of `Sums` for one row alone."""
    ids, written = list(prompt.ids), list[int]()
    while (finish := prompt.rules.finish(written)) is None:
        written.append(_next(ids))
        ids.append(written[-1])
    return GeneratedText(written, finish)


@dataclass
class Sums:
    """A model whose scores come from the keys and values in the slots. The keys are tokens, the values their places.

    `fails` is called with the number of rows of each step.
    """

    together: int = 1
    shift: int = 3
    fails: Callable[[int], None] = lambda rows: None
    rows: list[int] = field(default_factory=list)  # the number of rows of each step

    def begin(self, prompts: Sequence[Asked]) -> list[RowStart]:
        starts = []
        for prompt in prompts:
            keys = torch.tensor(prompt.ids, dtype=torch.float64).view(1, 1, -1, 1)
            values = torch.arange(1.0, len(prompt.ids) + 1, dtype=torch.float64).view(1, 1, -1, 1)
            starts.append(RowStart([(keys, values)], _scores([_next(prompt.ids)])[0], shift=self.shift))
        return starts

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        self.rows.append(len(ids))
        self.fails(len(ids))
        places = slots.positions - self.shift + 1
        keys, values = slots.cache().update(ids[:, None, :, None].double(), places[:, None, :, None].double(), 0)
        mask = slots.mask[:, 0, 0, :, None]
        sums = torch.where(mask, keys[:, 0] * values[:, 0], 0.0).sum((1, 2)).long()
        return _scores(((sums * 7 + places[:, 0]) % WORDS).tolist())


def _scores(best: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), WORDS).float()


SIZES = [(1, 3, 40), (5, 70, 9), (2, 1, 64), (30, 7, 1), (11, 12, 25), (3, 64, 40), (8, 2, 33), (40, 5, 17)]
PROMPTS = [asked(*range(first, first + length), most=most) for first, length, most in SIZES]


@pytest.fixture
def readings() -> Readings:
    return Readings(CPU)


def row(prompt: Asked, is_gone: Callable[[], bool] = lambda: False) -> _GenerationRow:
    return _GenerationRow(_GenerationCall(is_gone, 1), prompt)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_row_that_joins_between_steps_changes_no_row(every: int) -> None:
    loop, rows = _Loop(Sums(), CPU), [row(prompt) for prompt in PROMPTS]
    left = list(rows)
    turns = 0
    while left or not loop.is_idle:
        if left and turns % every == 0:
            loop.waiting.append(left.pop(0))
        loop.turn()
        turns += 1
    assert [GeneratedText(generation.ids, generation.finish) for generation in rows if generation.finish] == [
        expected(prompt) for prompt in PROMPTS
    ]
    assert {generation.finish for generation in rows} == {"stop", "length"}


def test_all_rows_of_all_calls_share_a_step(readings: Readings) -> None:
    model = Sums(together=4)
    answers: dict[int, list[GeneratedText]] = {}
    threads = [
        threading.Thread(target=lambda part=part: answers.update({part: readings.read(model, PROMPTS[part::2])}))
        for part in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert answers == {part: [expected(prompt) for prompt in PROMPTS[part::2]] for part in range(2)}
    assert max(model.rows) >= 4
    assert readings.stop(TIMEOUT_S)


def test_a_row_for_which_nobody_waits_leaves_within_a_step() -> None:
    model, departure = Sums(together=8), threading.Event()
    loop = _Loop(model, CPU)
    leaves, stays = row(PROMPTS[0], departure.is_set), row(PROMPTS[5])
    loop.waiting.extend([leaves, stays])
    loop.turn()
    loop.turn()
    departure.set()
    loop.turn()
    assert model.rows == [2, 2, 1]
    assert isinstance(leaves.call.error, InternalFailure)
    assert leaves.call.error.reason == "cancelled"
    while not loop.is_idle:
        loop.turn()
    assert GeneratedText(stays.ids, stays.finish or "stop") == expected(PROMPTS[5])


def test_rows_that_do_not_fit_together_begin_anew_with_fewer_mates(readings: Readings) -> None:
    def fails(rows: int) -> None:
        if rows > 2:
            raise torch.OutOfMemoryError("too many")

    model = Sums(together=8, fails=fails)
    assert readings.read(model, PROMPTS) == [expected(prompt) for prompt in PROMPTS]
    assert max(model.rows) > 2


def test_a_row_that_does_not_fit_alone_is_its_callers_matter(readings: Readings) -> None:
    def fails(rows: int) -> None:
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError):
        readings.read(Sums(fails=fails), PROMPTS[:1])
    assert readings.read(Sums(), PROMPTS[:1]) == [expected(PROMPTS[0])]


LONG = [asked(*range(1, 6 + number), most=90 + 10 * number, ends=frozenset()) for number in range(8)]


class Device:
    """Device with a bound on the keys and values of a loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.model = Sums(together=2)
        self.loop = _Loop(self.model, CPU, lambda more: self.held_bytes() + more <= self.limit_bytes)

    def held_bytes(self) -> int:
        return sum(side.nbytes for layer in self.loop._slots._own._layers for side in layer)

    def read(self, prompts: Sequence[Asked]) -> tuple[list[GeneratedText], int]:
        """Return the texts, and the most bytes that several rows held."""
        rows, most = [row(prompt) for prompt in prompts], 0
        self.loop.waiting.extend(rows)
        while not self.loop.is_idle:
            self.loop.turn()
            if len(self.loop._rows) > 1:
                most = max(most, self.held_bytes())
        assert [generation.call.error for generation in rows] == [None] * len(rows)
        return [GeneratedText(generation.ids, generation.finish) for generation in rows if generation.finish], most


POSITION_BYTES = 2 * 8  # a key and a value of Sums


@pytest.mark.parametrize("slots", long_but([1, 3, 5], [3]))
def test_rows_together_take_no_more_than_the_device_has_for_them(slots: int) -> None:
    """The device has room for `slots` rows of 128 positions. Rows grow, so some wait and the youngest begin anew."""
    limit_bytes = slots * 128 * POSITION_BYTES
    device = Device(limit_bytes)
    texts, most = device.read(LONG)
    assert texts == [expected(prompt) for prompt in LONG]
    assert most <= limit_bytes
    assert max(device.model.rows) >= min(slots, 2)


def test_an_error_of_the_model_is_that_of_the_calls_it_met(readings: Readings) -> None:
    def fails(rows: int) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        readings.read(Sums(fails=fails), PROMPTS)
    assert readings.read(Sums(), PROMPTS) == [expected(prompt) for prompt in PROMPTS]


def test_scores_that_are_not_finite_end_one_row(readings: Readings) -> None:
    """The other rows of the call get their texts."""

    class Odd(Sums):
        def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
            scores = super().step(ids, slots)
            if len(self.rows) == 3:
                scores[0] = torch.nan
            return scores

    bad, good = readings.read(Odd(together=2), [PROMPTS[0], PROMPTS[6]])
    assert isinstance(bad, InferenceFailed)
    assert good == expected(PROMPTS[6])


def test_models_take_turns(readings: Readings) -> None:
    """The short row joins during the first step of the long row."""
    order: list[str] = []
    begun = threading.Event()

    def step_long(rows: int) -> None:
        if not order:
            begun.set()
            until(lambda: readings._joining, TIMEOUT_S, "the short row waits")
        order.append("long")

    endless = asked(1, 2, 3, most=40, ends=frozenset())
    thread = threading.Thread(target=readings.read, args=(Sums(fails=step_long), [endless]))
    thread.start()
    assert begun.wait(TIMEOUT_S)
    readings.read(Sums(fails=lambda rows: order.append("short")), [asked(4, 5, most=5, ends=frozenset())])
    thread.join(TIMEOUT_S)
    assert order == ["long", *["long", "short"] * 4, *["long"] * 34]
    assert order[-1] == "long"


def test_a_stop_refuses_what_is_not_written_in_time(readings: Readings) -> None:
    begun = threading.Event()
    errors: list[SIEError] = []

    def read() -> None:
        try:
            readings.read(Sums(fails=lambda rows: begun.set()), [asked(1, 2, most=1 << 30, ends=frozenset())])
        except SIEError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    assert not readings.stop(0.05)
    thread.join(TIMEOUT_S)
    assert [type(error) for error in errors] == [ShuttingDown]
    with pytest.raises(ShuttingDown):
        readings.read(Sums(), PROMPTS)


@pytest.mark.parametrize("first", [1, 7], ids=["ends as it begins", "is written"])
def test_a_row_goes_on_with_the_prompt_that_follows_behind_those_that_wait(first: int, readings: Readings) -> None:
    """The row gets the text of its last prompt. The other rows get their own texts."""
    going = replace(asked(5, 6, most=first), then=asked(8, 9, most=6))
    last = going.following(expected(going))
    assert last is not None
    prompts = [going, *PROMPTS]
    assert readings.read(Sums(), prompts) == [expected(last), *map(expected, PROMPTS)]


def test_a_row_that_repeats_itself_ends() -> None:
    rules = Rules((), 10_000, frozenset({END}), stops_loops=True)
    block = [1 + number % 13 for number in range(64)]
    assert rules.finish(block * 3) == "repetition"
    assert rules.finish([5] * 191) is None
    assert rules.finish([*block, 50, *block[1:], *block]) is None
    assert Rules((), 10_000, frozenset({END})).finish(block * 3) is None


@pytest.mark.parametrize(("ids", "ends"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_a_text_may_end_with_one_token_of_several(ids: Any, ends: set[int]) -> None:
    assert ends_of(GenerationConfig(eos_token_id=ids)) == ends


def test_a_row_with_longer_encoder_states_than_expected_is_begun_again_only_after_another_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`has_room` estimates the length of its encoder states from the present rows."""
    monkeypatch.setattr(reading, "_CLOSED_S", 60.0)
    begun: list[int] = []

    class Encoding(Sums):
        def begin(self, prompts: Sequence[Asked]) -> list[RowStart]:
            begun.append(prompts[0].ids[0])
            states = torch.zeros(1, 1, 4096 * prompts[0].ids[0], 1)
            return [start._replace(encoder_states=[(states, states)]) for start in super().begin(prompts)]

        def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
            return _scores([1] * len(ids))

    loop = _Loop(Encoding(), CPU, lambda more_bytes: more_bytes < 1 << 18)
    rows = [row(asked(first, most=40, ends=frozenset())) for first in (1, 9)]
    loop.waiting.extend(rows)
    while not loop.is_idle:
        loop.turn()
    assert [len(generation.ids) for generation in rows] == [40, 40]
    assert begun == [1, 9, 9]


@pytest.mark.parametrize("error", [InferenceFailed("cannot be read"), RuntimeError("no blocks")])
def test_prompts_that_cannot_begin_end_only_their_calls(error: Exception) -> None:
    class Refusing(Sums):
        def begin(self, prompts: Sequence[Asked]) -> list[RowStart]:
            if prompts[0] is PROMPTS[1]:
                raise error
            return super().begin(prompts)

    loop = _Loop(Refusing(), CPU)
    rows = [row(PROMPTS[0]), row(PROMPTS[1]), row(PROMPTS[2])]
    loop.waiting.extend(rows)
    while not loop.is_idle:
        loop.turn()
    assert rows[1].call.error is error
    assert [GeneratedText(rows[at].ids, rows[at].finish or "stop") for at in (0, 2)] == [
        expected(PROMPTS[at]) for at in (0, 2)
    ]
