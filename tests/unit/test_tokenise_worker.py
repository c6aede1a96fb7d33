"""A running sidecar with the broker in memory: it answers tokenize and decode by itself, and takes ids beside texts."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from direct import ENTRY, Direct, is_right, reasons, vector
from fake_adapter import TOKENIZER, WIDTH, ids_of, texts_of, toy_entry, vector_of

from sie_contracts.errors import ModelLoadFailed, ResourceExhausted
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.options import counting, decoding, tokenizing
from sie_contracts.wire.messages import Input, Ok, RunOptions, Vectors, WorkItem, WorkResult
from sie_sidecar.intake import Prepare, WorkIntake
from sie_sidecar.models import Hosting
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import ModelTokenizer, WorkItemInput

TELL = tokenizing()
COUNT = counting(RunOptions())
LONG = "a long text " * 2000  # tokenised in a thread


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path) as cluster:
        yield cluster


def data(result: WorkResult) -> list[object]:
    assert all(isinstance(outcome, Ok) for outcome in result.outcomes), result.outcomes
    return [outcome.data for outcome in result.outcomes if isinstance(outcome, Ok)]


async def test_the_tokenizer_answers_without_a_batch(cluster: Direct) -> None:
    """Results are delivered and messages acknowledged as for other work, even while the device is busy."""
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    adapter.hold_batches = True
    held = await cluster.publish("on the device")
    await adapter.until(lambda state: state.running == 1, "a batch on the device")
    tokens = await cluster.result(await cluster.publish("é!", operation="tokenize", options=TELL))
    ids = ids_of("é!").tolist()
    assert data(tokens) == [
        {
            "ids": ids,
            "texts": ["[CLS]", "é", "é", "!", "[SEP]"],
            "special": [True, False, False, False, True],
            "starts": [None, 0, 0, 2, None],
            "stops": [None, 2, 2, 3, None],
        }
    ]
    read = await cluster.result(
        await cluster.publish(Input(tokens=tuple(ids[1:-1])), operation="decode", options=decoding())
    )
    assert data(read) == [{"text": "é!"}]
    counts = await cluster.result(
        await cluster.publish("é!", LONG, Input(tokens=(5, 6)), operation="tokenize", options=COUNT)
    )
    assert [outcome.tokens for outcome in counts.outcomes if isinstance(outcome, Ok)] == [5, len(LONG) + 2, 4]
    for result in (tokens, read, counts):
        assert result.stages.worker_ms > 0
        assert result.stages.inference_ms == result.stages.batch_wait_ms == 0
        assert result.fingerprint
    assert len(adapter.batches) == 1
    await cluster.left(1)
    adapter.let_go()
    assert is_right(await cluster.result(held), held, 0)
    await cluster.left(0)


class _NoLink:
    """Link of a hosting that loads nothing."""

    description = None

    def __init__(self) -> None:
        self.listeners: list[object] = []

    def attach(self, may_drop: object, dropped: object) -> None:
        """Do nothing: no model is dropped."""


def test_a_changed_entry_is_another_tokenizer() -> None:
    hosting = Hosting(_NoLink(), lambda: 0.0, lambda: None)  # type: ignore[arg-type]
    hosted = hosting.obtain(Catalogue.resolve_profile(ENTRY, "default", ENTRY.id))
    hosted.tokenizer = ModelTokenizer(TOKENIZER, ENTRY.max_tokens)
    hosted.mark_unloaded()
    assert hosting.obtain(Catalogue.resolve_profile(ENTRY, "default", ENTRY.id)).tokenizer is not None
    assert hosting.obtain(Catalogue.resolve_profile(toy_entry(max_tokens=9), "default", ENTRY.id)).tokenizer is None


async def test_a_load_that_fails_and_a_budget_that_is_over_are_told(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    adapter.hold_loads = True
    late = await cluster.publish("a", operation="tokenize", options=COUNT, budget_ms=300)
    assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
    adapter.refusals[ENTRY.id] = ModelLoadFailed(
        "no such weights", extras={"error_class": "NOT_FOUND", "permanent": True}
    )
    failing = await cluster.publish(Input(tokens=(7,)), Input(tokens=(8,)), operation="decode", options=decoding())
    adapter.let_go()
    failure = await cluster.result(failing)
    assert reasons(failure) == ["MODEL_LOAD_FAILED"] * 2
    await cluster.left(0)


async def test_ids_run_beside_texts_and_a_wrong_one_fails_alone(cluster: Direct) -> None:
    """This holds if no input may be cut, too. Then an input that is too long fails alone."""
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    ids = (7, 8, 9)
    vectors = Vectors(1, WIDTH, bytes(4 * WIDTH))
    inputs = (
        Input("text"),
        Input(tokens=(7, 1 << 30)),
        Input(tokens=ids),
        Input(vectors=vectors),
        Input(tokens=(5,) * 600),
    )
    for truncate, last in (("END", ""), ("NONE", "INVALID_INPUT input_too_long")):
        item = await cluster.publish(*inputs, options=RunOptions(truncate=truncate))  # type: ignore[arg-type]
        result = await cluster.result(item)
        assert reasons(result) == ["", "INVALID_INPUT bad_token_id", "", "INVALID_INPUT unsupported_modality", last]
        assert is_right(result, item, 0)
        np.testing.assert_array_equal(vector(result, 2), vector_of([0, *ids, 1]))
        if not last:
            assert isinstance(result.outcomes[4], Ok)
            assert (result.outcomes[4].tokens, result.outcomes[4].truncated) == (512, True)
    assert [len(texts_of(batch)) for batch in adapter.batches] == [3, 2]
    invalid_work = await cluster.publish(inputs[1], inputs[3])
    assert reasons(await cluster.result(invalid_work)) == [
        "INVALID_INPUT bad_token_id",
        "INVALID_INPUT unsupported_modality",
    ]
    assert len(adapter.batches) == 2
    await cluster.left(0)


@pytest.mark.parametrize("stage", ["files", "rows"])
async def test_a_work_item_that_cannot_be_prepared_fails_alone_in_its_group(
    cluster: Direct, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The other work items of its group may be of other clients."""
    make, images = layouts.make, Prepare._images
    groups: list[int] = []

    def make_or_fail(tokenizer: Any, layout: Any, items: Sequence[WorkItemInput]) -> Any:
        groups.append(len(items))
        if stage == "rows" and any(source.text == "bad" for item in items for source in item.inputs):
            raise RuntimeError("the tokenizer ended with PanicException")
        return make(tokenizer, layout, items)

    async def images_or_fail(self: Prepare, item: WorkItem, recipe: Any) -> Any:
        if item.inputs[0].images:
            raise ResourceExhausted("a media worker was killed")
        return await images(self, item, recipe)

    monkeypatch.setattr(layouts, "make", make_or_fail)
    monkeypatch.setattr(Prepare, "_images", images_or_fail)
    monkeypatch.setattr(WorkIntake, "_is_more_coming", lambda self, *_: len(self.arrived) < 3)
    adapter = await cluster.adapter()
    files = (b"a file",) if stage == "files" else ()
    inputs = Input("good"), Input("bad", images=files), Input("fine")
    items = [await cluster.publish(source) for source in inputs]
    await cluster.sidecar(adapter, SIE_ADAPTIVE_MIN_QUANTUM_MS="60000", SIE_ADAPTIVE_MAX_QUANTUM_MS="60000")
    item_reasons = [reasons(await cluster.result(item)) for item in items]
    assert item_reasons == [[""], ["RESOURCE_EXHAUSTED" if stage == "files" else "INTERNAL_ERROR"], [""]]
    assert groups == ([2] if stage == "files" else [3, 1, 1, 1])


@pytest.mark.parametrize(("count", "on_loop"), [(1, True), (64, False)])
async def test_what_is_gathered_together_leaves_the_loop_though_each_of_it_is_short(
    cluster: Direct, monkeypatch: pytest.MonkeyPatch, count: int, on_loop: bool
) -> None:
    """Work that differs in its options is tokenised group by group: 64 texts of 200 characters are 64 groups, each
    short by itself.
    """
    threads: list[str] = []
    make = layouts.make

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make(*args)

    monkeypatch.setattr(layouts, "make", noted)
    adapter = await cluster.adapter()
    published = [
        await cluster.publish("short text " * 18, options=RunOptions(max_tokens=100 + number))
        for number in range(count)
    ]
    await cluster.sidecar(adapter)
    for publication in published:
        assert [type(outcome) for outcome in (await cluster.result(publication)).outcomes] == [Ok]
    assert len(threads) == count
    # the first delivery may come by itself, and is then short enough
    assert (
        threads.count(threading.main_thread().name) == 1
        if on_loop
        else threads.count(threading.main_thread().name) < count / 2
    )
