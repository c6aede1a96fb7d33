"""Models that a request to the adapter may drop, the state of dropped ones, and the cool-down of failed loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_adapter import TOKENIZER, toy_entry
from tokenizers import Tokenizer, models, pre_tokenizers

from sie_contracts.errors import InternalFailure, ModelLoadFailed, SIEError
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire import ipc
from sie_sidecar import models as sidecar_models
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.models import Hosting, ModelState


class Link:
    """A link to an adapter that loads at once, or raises `failure`. `questions`: requests on the control connection."""

    describe: Any = AdapterLink.describe

    def __init__(self) -> None:
        self.listeners: list[Callable[[bool], None]] = []
        self.description: ipc.Description | None = None
        self.questions: list[ipc.Request] = []
        self.loads: list[ipc.EnsureReady] = []
        self.failure: SIEError | None = None
        self.tokenizers: dict[str, bytes] = {}  # by model; every other model has TOKENIZER
        self.dropped: Callable[[tuple[str, ...]], None] = lambda names: None
        self.reliefs: list[tuple[str, ...]] = []
        self.memory_bytes = 0  # of each model
        self.gone = False
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Event()

    def attach(self, may_drop: Callable[[], tuple[str, ...]], dropped: Callable[[tuple[str, ...]], None]) -> None:
        self.may_drop, self.dropped = may_drop, dropped

    async def relieve(self, may_drop: tuple[str, ...]) -> None:
        self.reliefs.append(may_drop)
        self.asked.set()
        if self.gone:
            raise AdapterGone("gone")

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        self.loads.append(question)
        if self.failure is not None:
            raise self.failure
        self.loading.set()
        await self.may_load.wait()
        return ipc.Ready(
            self.loaded(question.model), self.tokenizers.get(question.model, TOKENIZER), 512, {"encode": ipc.Rows()}
        )

    def loaded(self, model: str) -> ipc.LoadedModel:
        return ipc.LoadedModel(model, "local", "f", "float32", "toy", self.memory_bytes)

    async def request(self, question: ipc.Request) -> ipc.Reply:
        self.questions.append(question)
        self.asked.set()
        await self.answers.wait()
        if self.gone:
            raise AdapterGone("gone")
        return ipc.Done()


class Sidecar:
    """A hosting with the models a, b and c on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.link = Link()
        link: Any = self.link
        self.hosting = Hosting(link, lambda: self.now_s, lambda: None)
        entries = {name: toy_entry(name) for name in ("toy/a", "toy/b", "toy/c")}
        catalogue = Catalogue(entries)
        self.a, self.b, self.c = (self.hosting.obtain(catalogue.resolve(name)) for name in entries)

    async def load(self, *models: ModelState) -> None:
        for hosted in models:
            await self.hosting.ensure(hosted)


async def test_a_batch_may_drop_the_models_that_are_idle() -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a, sidecar.b)
    assert sidecar.link.may_drop() == ()
    sidecar.now_s += 5
    sidecar.hosting.add_items(sidecar.b)
    assert sidecar.link.may_drop() == ("toy/a",)


async def test_memory_is_relieved_only_while_a_model_may_go() -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a)
    await sidecar.hosting.relieve()
    assert sidecar.link.reliefs == []
    sidecar.now_s += 5
    await sidecar.hosting.relieve()
    sidecar.hosting.add_items(sidecar.a)
    await sidecar.hosting.relieve()
    assert sidecar.link.reliefs == [("toy/a",)]


async def test_what_the_adapter_unloaded_is_loaded_again_for_its_next_work() -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a, sidecar.b)
    sidecar.link.dropped(("toy/a", "unknown"))
    assert (sidecar.a.state, sidecar.b.state) == ("available", "loaded")
    await sidecar.load(sidecar.a)
    assert [question.model for question in sidecar.link.loads] == ["toy/a", "toy/b", "toy/a"]


async def test_work_that_comes_while_its_model_is_released_waits_and_loads_it_again() -> None:
    """The load must not overtake the release on another connection: it would find the old copy."""
    sidecar = Sidecar()
    await sidecar.load(sidecar.a)
    sidecar.link.answers.clear()
    releasing = asyncio.create_task(sidecar.hosting.release(sidecar.a))
    await sidecar.link.asked.wait()
    loading = asyncio.create_task(sidecar.hosting.ensure(sidecar.a))
    await asyncio.sleep(0)
    assert len(sidecar.link.loads) == 1
    sidecar.link.answers.set()
    await asyncio.gather(releasing, loading)
    assert len(sidecar.link.loads) == 2
    assert sidecar.a.state == "loaded"


async def test_an_adapter_that_is_gone_ends_neither_the_loop_nor_what_was_known() -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a)
    sidecar.now_s += 5
    sidecar.link.gone = True
    running = asyncio.create_task(sidecar.hosting.run(1))
    async with asyncio.timeout(30):
        while not (sidecar.link.reliefs and sidecar.link.questions):
            sidecar.link.asked.clear()
            await sidecar.link.asked.wait()
    assert not running.done()
    assert sidecar.a.state == "available"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("error_class", "cool_down_s", "attempts"), [("OOM", 60, None), ("NETWORK", 30, None), ("UNKNOWN", 30, 3)]
)
async def test_a_failure_that_may_pass_is_tried_again_after_its_cool_down(
    error_class: str, cool_down_s: int, attempts: int | None
) -> None:
    sidecar = Sidecar()
    sidecar.link.failure = ModelLoadFailed("no", extras={"error_class": error_class})
    for number in range(1, 6):
        with pytest.raises(ModelLoadFailed) as raised:
            await sidecar.load(sidecar.a)
        permanent = attempts is not None and number >= attempts
        assert raised.value.extras == {"error_class": error_class, "attempts": number, "permanent": permanent}
        sidecar.now_s += cool_down_s - 1
        with pytest.raises(ModelLoadFailed):
            await sidecar.load(sidecar.a)
        assert len(sidecar.link.loads) == number
        sidecar.now_s += 1.5
        if permanent:
            break
    sidecar.link.failure = None
    if attempts is None:
        await sidecar.load(sidecar.a)
    else:
        with pytest.raises(ModelLoadFailed):
            await sidecar.load(sidecar.a)


@pytest.mark.parametrize("error_class", ["GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE"])
async def test_a_failure_that_stays_is_not_tried_again(error_class: str) -> None:
    sidecar = Sidecar()
    sidecar.link.failure = ModelLoadFailed("no", extras={"error_class": error_class})
    for _ in range(2):
        with pytest.raises(ModelLoadFailed) as raised:
            await sidecar.load(sidecar.a)
        assert raised.value.extras == {"error_class": error_class, "attempts": 1, "permanent": True}
        sidecar.now_s += 1000
    assert len(sidecar.link.loads) == 1


async def test_so_many_models_fit_as_there_is_room_for_beside_what_else_the_device_holds() -> None:
    sidecar, total_bytes = Sidecar(), 2000
    sidecar.link.memory_bytes = 100

    def slots(used_bytes: int, *models: str, threshold_percent: float = 80.0) -> int:
        held = tuple(sidecar.link.loaded(model) for model in models)
        return sidecar.hosting.slots(
            ipc.Description(
                ipc.PROTOCOL,
                1,
                "cpu",
                "0",
                memory_used_bytes=used_bytes,
                memory_total_bytes=total_bytes,
                models=held,
                threshold_percent=threshold_percent,
            )
        )

    assert slots(600) == 0  # the size of a model is not known yet
    await sidecar.load(sidecar.a, sidecar.b)
    assert slots(800, "toy/a", "toy/b") == (1600 - 600) // 100
    assert slots(800, "toy/a", "toy/b", threshold_percent=70) == (1400 - 600) // 100
    assert slots(800, "toy/a", "toy/b", threshold_percent=0) == (1700 - 600) // 100  # an adapter without a threshold
    assert slots(700, "toy/a") == slots(600) == (1600 - 600) // 100  # an unloaded model leaves its room free
    sidecar.link.may_load.clear()
    sidecar.link.loading.clear()
    load = asyncio.create_task(sidecar.load(sidecar.c))
    await sidecar.link.loading.wait()
    assert slots(880, "toy/a", "toy/b") == (1600 - 600) // 100  # the 80 bytes belong to the model that is being loaded
    total_bytes = 20_000  # a load keeps the figures from before it
    assert slots(15_000, "toy/a", "toy/b") == (1600 - 600) // 100
    total_bytes = 2000
    sidecar.link.may_load.set()
    await load
    assert slots(980, "toy/a", "toy/b", "toy/c") == (1600 - 680) // 100
    assert slots(1990, "toy/a") == 1  # 0 means unknown


async def test_a_load_that_fails_for_the_entry_of_before_says_nothing_of_the_present_one() -> None:
    """The entry changes while it is being loaded, and work waits for the new entry. The load fails permanently, and the
    new entry loads.
    """
    sidecar = Sidecar()
    fails = asyncio.Event()
    ready = sidecar.link.ensure_ready

    async def failing(question: ipc.EnsureReady) -> ipc.Ready:
        if question.entry["max_tokens"] != 7:
            sidecar.link.loading.set()
            await fails.wait()
            raise ModelLoadFailed("gone", extras={"error_class": "NOT_FOUND"})
        return await ready(question)

    sidecar.link.ensure_ready = failing  # type: ignore[method-assign]
    first = asyncio.create_task(sidecar.hosting.ensure(sidecar.a))
    await sidecar.link.loading.wait()
    hosted = sidecar.hosting.obtain(Catalogue({"toy/a": toy_entry("toy/a", max_tokens=7)}).resolve("toy/a"))
    assert hosted is sidecar.a
    second = asyncio.create_task(sidecar.hosting.ensure(hosted))
    await asyncio.sleep(0)
    fails.set()
    async with asyncio.timeout(30):
        await asyncio.gather(first, second)
    assert (hosted.state, hosted.error, hosted.attempts) == ("loaded", None, 0)


def letters_only(letters: str) -> bytes:
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("serialised", [letters_only("ACGT"), b"{}"], ids=["without a token for x", "no tokenizer"])
async def test_a_model_whose_tokenizer_the_sidecar_cannot_use_fails_its_load_for_good(serialised: bytes) -> None:
    sidecar = Sidecar()
    sidecar.link.tokenizers["toy/a"] = serialised
    for _ in range(2):
        with pytest.raises(ModelLoadFailed, match=r"its tokenizer cannot be used .*: take tokenizer.json") as raised:
            await sidecar.load(sidecar.a)
        assert raised.value.extras == {"error_class": "INCOMPATIBLE", "attempts": 1, "permanent": True}
        sidecar.now_s += 1000
    assert (sidecar.a.state, len(sidecar.link.loads)) == ("failed", 1)


async def test_models_with_equal_tokenizers_share_one_and_a_reload_creates_none() -> None:
    sidecar = Sidecar()
    sidecar.link.tokenizers["toy/c"] = letters_only("xyz")
    await sidecar.load(sidecar.a, sidecar.b, sidecar.c)
    first = sidecar.a.tokenizer
    sidecar.link.dropped(("toy/a",))
    await sidecar.load(sidecar.a)
    assert sidecar.a.tokenizer is sidecar.b.tokenizer is first
    assert sidecar.c.tokenizer is not first


async def test_tokenizers_of_unloaded_models_stay_up_to_a_bound_and_the_least_recently_used_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sidecar = Sidecar()
    states = [sidecar.a, sidecar.b, sidecar.c]
    for hosted, letters in zip(states, ("xa", "xb", "xc"), strict=True):
        sidecar.now_s += 1
        sidecar.link.tokenizers[hosted.name] = letters_only(letters)
        await sidecar.load(hosted)
    assert sidecar.a.tokenizer is not None
    monkeypatch.setattr(sidecar_models, "SPARE_TOKENIZER_BYTES", sidecar.a.tokenizer.memory_bytes)
    sidecar.link.dropped(("toy/a", "toy/b"))
    more = sidecar.hosting.obtain(Catalogue({"toy/d": toy_entry("toy/d")}).resolve("toy/d"))
    await sidecar.load(more)
    assert [hosted.tokenizer is not None for hosted in (*states, more)] == [False, True, True, True]


async def test_a_model_that_gets_work_while_another_is_evicted_for_idleness_stays() -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a, sidecar.b, sidecar.c)
    sidecar.now_s += 100
    sidecar.link.answers.clear()

    async def until_asked(times: int) -> None:
        async with asyncio.timeout(60):
            while len(sidecar.link.questions) < times:
                sidecar.link.asked.clear()
                await sidecar.link.asked.wait()

    running = asyncio.create_task(sidecar.hosting.run(60))
    await until_asked(1)
    sidecar.hosting.add_items(sidecar.b)
    sidecar.link.answers.set()
    await until_asked(2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sidecar.link.questions == [ipc.Release("toy/a"), ipc.Release("toy/c")]


async def test_memory_that_cannot_be_freed_is_logged_once_until_it_can_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = Sidecar()
    await sidecar.load(sidecar.a)
    sidecar.now_s += 5
    refusal = InternalFailure("out of order")
    monkeypatch.setattr(sidecar.link, "relieve", AsyncMock(side_effect=[refusal, refusal, None, refusal]))
    for warnings in (1, 1, 1, 2):
        await sidecar.hosting.relieve()
        assert len([record for record in caplog.records if "out of order" in record.getMessage()]) == warnings
