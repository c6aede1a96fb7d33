"""Each input of a batch gets one outcome at its own position, whatever fails beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sie_adapter.engine import engine as engines_of_batches
from sie_adapter.engine import item_results
from sie_adapter.engine.engine import BatchRun
from sie_adapter.engine.engines import TORCH
from sie_adapter.engine.item_results import ItemResults
from sie_adapter.heads import Head, Reduced, Row, States
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.heads.pooling import DenseHead
from sie_adapter.heads.sparse import TokenTable, TokenWeightHead
from sie_adapter.memory.batch_limits import RECORDED_TOKENS, DeviceLimits, PassRecord, PassRecords
from sie_adapter.memory.device_errors import GraphLost
from sie_adapter.memory.oom import Relief
from sie_adapter.packed.packing import Int64, Items, PackedBatch, Positions, expanded, pack
from sie_contracts.errors import InternalFailure, InvalidInput, LoraLoading, SIEError
from sie_contracts.models.muvera import Muvera
from sie_contracts.wire.ipc import BatchDone, Group, Layout, Rows, RunBatch
from sie_contracts.wire.messages import Failed, Ok, Operation, RunOptions

POISON, HEAVY, FILLER = 90, 91, 92
CPU = torch.device("cpu")
RAW = RunOptions(normalize=False)
TABLE = torch.arange(100, dtype=torch.float32) / 10


def weight_layer() -> torch.nn.Linear:
    """The weight of a token is a tenth of its id, and 0.05 for id 0."""
    layer = torch.nn.Linear(4, 1)
    layer.weight, layer.bias = (
        torch.nn.Parameter(torch.tensor([[0.1, 0, 0, 0]])),
        torch.nn.Parameter(torch.tensor([0.05])),
    )
    return layer.requires_grad_(False)


def heads() -> dict[str, Head]:
    return {
        "dense": DenseHead("mean", None, CPU),
        "sparse": TokenWeightHead(weight_layer(), 100, frozenset({1})),
        "multivector": MultivectorHead(None, CPU, skipped=frozenset({1})),
    }


@dataclass
class FakeLoras:
    """LoRAs of which those in `kept` are loaded. `acted` lists the LoRAs that passes ran with."""

    kept: tuple[str, ...] = ()
    acted: list[str] = field(default_factory=list)
    now: str | None = None

    @contextlib.contextmanager
    def acting(self, name: str) -> Iterator[None]:
        if name not in self.kept:
            raise LoraLoading(f"the LoRA {name} is not loaded")
        self.acted.append(name)
        self.now = name
        yield
        self.now = None


@dataclass
class FakeEncoder:
    """An encoder whose state of a token is (id, 1, 2, 3). The state of POISON is infinite. A pass with HEAVY, or with
    more than `limit` tokens, runs out of memory.

    With `idf`, sparse queries are looked up in TABLE. With `query_length`, queries are filled up with FILLER, to which
    no token attends.
    """

    engine_choice = TORCH
    limit: int = 1 << 30
    max_tokens: int = 40
    vocabulary: int = 100
    width: int = 4
    error: type[Exception] = torch.OutOfMemoryError
    layouts: dict[str, Layout] = field(
        default_factory=lambda: {"encode": "text", "score": "sides", "extract": "hypotheses"}
    )
    heads: Mapping[str, Head] = field(default_factory=heads)
    idf: bool = False
    query_length: int = 0
    precision: str = "float32"
    loras_of_passes: list[str | None] = field(default_factory=list)
    loras: FakeLoras = field(default_factory=FakeLoras)
    passes: list[int] = field(default_factory=list)
    seen: list[PackedBatch] = field(default_factory=list)

    @property
    def rows(self) -> dict[str, Rows]:
        return {operation: Rows(layout, vectors=4) for operation, layout in self.layouts.items()}

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        return ("multivector",) if options.muvera else options.outputs

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        return (
            expanded(batch, np.where(queries, self.query_length, 0), FILLER, attended=False)
            if self.query_length
            else batch
        )

    @property
    def query_tables(self) -> Mapping[str, TokenTable]:
        return {"sparse": TokenTable(TABLE)} if self.idf else {}

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        return pack(batch, chosen, Positions())

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        self.passes.append(len(packed.order))
        self.seen.append(packed)
        self.loras_of_passes.append(self.loras.now)
        if len(packed.ids) > self.limit or HEAVY in packed.ids:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        states = torch.tensor([[float(token), 1.0, 2.0, 3.0] for token in packed.ids.tolist()])
        states[torch.from_numpy(packed.ids == POISON)] = torch.inf
        return states

    def answer(
        self,
        message: RunBatch,
        group: Group,
        query: Mapping[str, Row],
        rows: Mapping[str, Sequence[Row]],
        places: list[int],
    ) -> ItemResults:
        if message.operation == "score":
            return item_results.side_scores(group.options, query, rows, per_row=False)
        if message.operation == "extract":
            return item_results.zero_shot(group.options, rows["dense"], 0, 1)
        return item_results.vectors(group.options, rows)


def message(sequences: list[list[int]], **changes: Any) -> RunBatch:
    fields: dict[str, Any] = {
        "batch": "b",
        "model": "m",
        "operation": "encode",
        "lengths": np.array([len(ids) for ids in sequences], "<i4").tobytes(),
        "ids": np.array([token for ids in sequences for token in ids], "<i4").tobytes(),
        "groups": (Group(0, len(sequences), RAW),),
        "pooling": "mean",
    }
    return RunBatch(**{**fields, **changes})


def run(
    sequences: list[list[int]],
    encoder: FakeEncoder | None = None,
    make_room: Callable[[], Relief | None] = lambda: None,
    **changes: Any,
) -> BatchDone:
    with torch.inference_mode():
        return BatchRun(encoder or FakeEncoder(), CPU, message(sequences, **changes), make_room).run()


def results(done: BatchDone) -> list[list[float] | str]:
    """Return the vector of each item, or the reason of its error. Check that the vectors lie side by side in the
    block.
    """
    out: list[list[float] | str] = []
    offset = 0
    for outcome in done.outcomes:
        if isinstance(outcome, Failed):
            out.append(outcome.error.reason)
            continue
        array = outcome.outputs["dense"]
        assert array.offset == offset
        out.append(np.frombuffer(done.block, array.dtype, array.shape[0], array.offset).tolist())
        offset += 4 * array.shape[0]
    assert offset == len(done.block)
    return out


def arrays(done: BatchDone) -> list[dict[str, np.ndarray]]:
    """Return all arrays of each input by name, {} for an error. Check that they lie side by side in the block."""
    outputs, offset = [], 0
    for outcome in done.outcomes:
        mine = {}
        for name, piece in outcome.outputs.items() if isinstance(outcome, Ok) else ():
            assert piece.offset == offset
            mine[name] = np.frombuffer(done.block, piece.dtype, int(np.prod(piece.shape)), offset).reshape(piece.shape)
            offset += mine[name].nbytes
        outputs.append(mine)
    assert offset == len(done.block)
    return outputs


def reasons(done: BatchDone) -> list[str]:
    return [outcome.error.reason if isinstance(outcome, Failed) else "" for outcome in done.outcomes]


def tokens(done: BatchDone) -> list[int]:
    return [outcome.tokens for outcome in done.outcomes if isinstance(outcome, Ok)]


@given(st.lists(st.lists(st.integers(0, 89), min_size=1, max_size=9), min_size=1, max_size=30))
def test_each_item_gets_its_own_mean(sequences: list[list[int]]) -> None:
    got = results(run(sequences))
    np.testing.assert_allclose(got, [[np.mean(ids), 1, 2, 3] for ids in sequences], rtol=1e-6)


# groups


def test_groups_have_their_own_options_and_never_split_the_pass() -> None:
    encoder = FakeEncoder()
    groups = (Group(0, 1, RAW), Group(1, 3, RunOptions(dimensions=2)), Group(3, 3))
    done = run([[7], [3, 5], [8]], encoder, groups=groups)
    assert encoder.passes == [3]
    got = results(done)
    assert got[0] == [7, 1, 2, 3]
    np.testing.assert_allclose(got[1], np.array([4, 1]) / np.sqrt(17), rtol=1e-6)
    assert tokens(done) == [1, 2, 1]


def test_groups_with_different_outputs_share_one_pass() -> None:
    encoder = FakeEncoder()
    groups = (
        Group(0, 1, RAW),
        Group(1, 2, RunOptions(outputs=("sparse",))),
        Group(2, 3, RunOptions(outputs=("multivector", "dense"), normalize=False)),
        Group(3, 4, RunOptions(outputs=("dense",), dtype="int8")),
        Group(4, 5, RunOptions(outputs=("dense",), muvera=Muvera(2, 1, None, None))),
    )
    done = run([[7], [5, 0, 1, 5], [4, 1], [8], [6, 9]], encoder, groups=groups)
    assert encoder.passes == [5]
    got = arrays(done)
    assert [list(outputs) for outputs in got] == [
        ["dense"],
        ["sparse.indices", "sparse.values"],
        ["multivector", "dense"],
        ["dense", "dense.scale"],
        ["dense"],
    ]
    assert got[1]["sparse.indices"].tolist() == [0, 5]  # id 1 is special
    np.testing.assert_allclose(got[1]["sparse.values"], [0.05, 0.55], rtol=1e-6)
    assert got[2]["multivector"].tolist() == [[4, 1, 2, 3]]  # the row of id 1 of a document is dropped
    assert got[2]["dense"].tolist() == [2.5, 1, 2, 3]
    vector = np.array([8, 1, 2, 3]) / np.sqrt(78)
    np.testing.assert_allclose(got[3]["dense"] * got[3]["dense.scale"], vector, atol=vector.max() / 250)
    assert got[4]["dense"].shape == (2 * 2 * 4,)


def test_a_multivector_query_keeps_the_rows_that_a_document_drops() -> None:
    groups = tuple(
        Group(row, row + 1, RunOptions(outputs=("multivector",), normalize=False, is_query=row == 0))
        for row in range(2)
    )
    got = arrays(run([[4, 1], [4, 1]], groups=groups))
    assert [outputs["multivector"][:, 0].tolist() for outputs in got] == [[4, 1], [4]]


def test_queries_are_filled_up_and_the_filling_is_not_visible() -> None:
    encoder = FakeEncoder(query_length=4)
    groups = (Group(0, 1, RunOptions(outputs=("multivector",), normalize=False, is_query=True)), Group(1, 2, RAW))
    done = run([[4, 5], [6]], encoder, groups=groups)
    assert arrays(done)[0]["multivector"][:, 0].tolist() == [4, 5, FILLER, FILLER]
    assert tokens(done) == [2, 1]  # the tokens of the request, without the filling
    assert [(length, visible) for _, _, length, visible in encoder.seen[0].groups.tolist()] == [(1, 1), (4, 2)]


# inputs without a pass


def test_idf_queries_need_no_pass_beside_documents_that_do() -> None:
    encoder = FakeEncoder(idf=True)
    query, document = RunOptions(outputs=("sparse",), is_query=True), RunOptions(outputs=("sparse",))
    done = run(
        [[5, 3, 5], [5, 3, 5], []], encoder, groups=(Group(0, 1, query), Group(1, 2, document), Group(2, 3, query))
    )
    assert encoder.passes == [1]
    got = arrays(done)
    assert [outputs["sparse.indices"].tolist() for outputs in got] == [[3, 5], [3, 5], []]
    np.testing.assert_allclose(got[0]["sparse.values"], [0.3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(got[1]["sparse.values"], [0.35, 0.55], rtol=1e-6)


def test_idf_queries_alone_make_no_pass_at_all() -> None:
    encoder = FakeEncoder(idf=True)
    run([[5], [3]], encoder, groups=(Group(0, 2, RunOptions(outputs=("sparse",), is_query=True)),))
    assert encoder.passes == []


@pytest.mark.parametrize("mates", [0, 3])
def test_an_idf_query_keeps_its_weights_when_another_output_needs_the_pass(mates: int) -> None:
    query = RunOptions(outputs=("sparse", "dense"), normalize=False, is_query=True)
    encoder = FakeEncoder(idf=True)
    done = run([[5], *[[8, 9]] * mates], encoder, groups=(Group(0, 1, query), Group(1, 1 + mates, RAW)))
    assert encoder.passes == [1 + mates]
    got = arrays(done)[0]
    np.testing.assert_allclose(got["sparse.values"], [0.5], rtol=1e-6)
    assert got["dense"].tolist() == [5, 1, 2, 3]


# rows that belong together: a query with its documents, an input with its labels


def cosine(first: list[float], second: list[float]) -> float:
    return float(np.dot(first, second) / np.linalg.norm(first) / np.linalg.norm(second))


def test_the_documents_of_a_group_are_scored_against_its_first_row() -> None:
    encoder = FakeEncoder()
    done = run([[7], [3], [5], [9, 9], [2]], encoder, operation="score", groups=(Group(0, 3), Group(3, 5), Group(5, 5)))
    assert encoder.passes == [5]
    scores = [outcome.score for outcome in done.outcomes if isinstance(outcome, Ok)]
    expected = [cosine([first, 1, 2, 3], [second, 1, 2, 3]) for first, second in ((7, 3), (7, 5), (9, 2))]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert tokens(done) == [2, 1, 3], "the query counts once, for the first document"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [([100], "token_out_of_range"), ([], "no_tokens"), ([POISON], "non_finite"), ([HEAVY], "out_of_memory")],
)
def test_a_bad_query_fails_all_documents_of_its_group_and_no_others(bad: list[int], reason: str) -> None:
    done = run([bad, [3], [5], [9], [2]], operation="score", groups=(Group(0, 3), Group(3, 5)))
    assert reasons(done) == [reason, reason, ""]


def test_a_bad_document_fails_alone() -> None:
    done = run([[7], [3], [POISON], [5]], operation="score", groups=(Group(0, 4),))
    assert reasons(done) == ["", "non_finite", ""]
    good = run([[7], [3], [5]], operation="score", groups=(Group(0, 3),))
    assert [outcome for outcome in done.outcomes if isinstance(outcome, Ok)] == list(good.outcomes)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [(("sparse",), 0.35 * 0.35 + 0.05 * 0.05), (("multivector",), 2.0)],
)
def test_other_outputs_score_too(outputs: tuple[str, ...], expected: float) -> None:
    """The sparse sides share the ids 0 and 3. The document has both rows of the query, so MaxSim is 2."""
    done = run([[3, 0], [3, 0, 1, 1]], operation="score", groups=(Group(0, 2, RunOptions(outputs=outputs)),))
    (outcome,) = done.outcomes
    assert isinstance(outcome, Ok)
    assert outcome.score == pytest.approx(expected, rel=1e-6)


def test_a_hybrid_score_is_the_weighted_mean_of_its_parts() -> None:
    parts = [
        run([[3, 0], [5, 0]], operation="score", groups=(Group(0, 2, RunOptions(outputs=(name,))),)) for name in heads()
    ]
    alone = [outcome.score for done in parts for outcome in done.outcomes if isinstance(outcome, Ok)]
    for weights, share in ((None, (0.4, 0.2, 0.4)), ({"dense": 1.0, "colbert": 3.0}, (0.25, 0.0, 0.75))):
        options = RunOptions(outputs=tuple(heads()), parameters={"score_weights": weights} if weights else {})
        (outcome,) = run([[3, 0], [5, 0]], operation="score", groups=(Group(0, 2, options),)).outcomes
        assert isinstance(outcome, Ok)
        assert outcome.score == pytest.approx(np.dot(alone, share), rel=1e-5)


LABELS = RunOptions(labels=("a", "b", "c"))


def test_an_input_has_as_many_rows_as_it_has_labels() -> None:
    """An input fails if one of its rows fails. Its tokens are those of all its rows."""
    rows = [[2], [9, 9], [4], [1], [2], [3], [5], [POISON], [6]]
    done = run(rows, operation="extract", groups=(Group(0, 6, LABELS, inputs=2), Group(6, 9, LABELS, inputs=1)))
    assert reasons(done) == ["", "", "non_finite"]
    classifications = [
        outcome.data["classifications"] for outcome in done.outcomes if isinstance(outcome, Ok) and outcome.data
    ]
    assert [[part["label"] for part in row] for row in classifications] == [["b", "c", "a"], ["c", "b", "a"]]
    shares = np.exp([9.0, 4.0, 2.0])
    np.testing.assert_allclose([part["score"] for part in classifications[0]], shares / shares.sum(), rtol=1e-6)
    assert tokens(done) == [4, 3]


@pytest.mark.parametrize(
    ("rows", "group"),
    [(5, Group(0, 5, LABELS, inputs=2)), (3, Group(0, 3, LABELS, inputs=0)), (0, Group(0, 0, LABELS, inputs=2))],
)
def test_rows_that_do_not_divide_among_their_inputs_are_refused(rows: int, group: Group) -> None:
    with pytest.raises(InternalFailure) as caught:
        run([[1]] * rows, operation="extract", groups=(group,))
    assert caught.value.reason == "malformed_batch"


def test_pieces_and_pairs_have_a_row_for_each_input() -> None:
    encoder = FakeEncoder(layouts={"score": "pieces", "encode": "text"})
    encoder.answer = lambda message, group, query, rows, places: item_results.answer_scores(
        group.options, rows["dense"], difference=True
    )  # type: ignore[method-assign]
    done = run([[7], [POISON], [5, 3]], encoder, operation="score", groups=(Group(0, 3),))
    assert reasons(done) == ["", "non_finite", ""]
    assert [outcome.score for outcome in done.outcomes if isinstance(outcome, Ok)] == [1 - 7, 1 - 4]
    assert tokens(done) == [1, 2]


def test_a_family_that_answers_an_input_less_fails_the_batch_and_never_shifts() -> None:
    encoder = FakeEncoder()
    encoder.answer = lambda message, group, query, rows, places: item_results.vectors(group.options, rows)[1:]  # type: ignore[method-assign]
    with pytest.raises(InternalFailure, match="1 answers for 2 inputs"):
        run([[1], [2]], encoder)


def test_a_typed_error_in_the_place_of_an_answer_is_that_input_s() -> None:
    encoder = FakeEncoder()
    places: list[list[int]] = []

    def answer(message: RunBatch, group: Group, query: Any, rows: Any, chosen: list[int]) -> ItemResults:
        places.append(chosen)
        answers: list[Any] = item_results.vectors(group.options, rows)
        error: SIEError = InvalidInput("no", reason="mine")
        return [answers[0], error]

    encoder.answer = answer  # type: ignore[method-assign]
    assert results(run([[1], [100], [2]], encoder)) == [[1, 1, 2, 3], "token_out_of_range", "mine"]
    assert places == [[0, 2]], "rows that failed before are not handed out"


# overflows


def test_an_overflow_is_tried_alone_and_then_is_an_error_of_that_item_only() -> None:
    encoder = FakeEncoder()
    got = results(run([[7], [8, POISON], [9]], encoder))
    assert got == [[7, 1, 2, 3], "non_finite", [9, 1, 2, 3]]
    assert encoder.passes == [3, 1]


def test_a_batch_of_few_tokens_runs_on_one_torch_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small: list[bool] = []
    monkeypatch.setattr(engines_of_batches, "set_torch_threads", lambda *, is_small: small.append(is_small))
    for lengths in ((32,), (16, 16), (33,), (16, 17)):
        run([[1] * length for length in lengths])
    assert small == [True, True, False, False]


def test_what_overflows_with_mates_and_not_alone_is_right() -> None:
    class Touchy(FakeEncoder):
        def forward(self, packed: PackedBatch) -> torch.Tensor:
            states = super().forward(packed)
            if len(packed.order) > 1:
                states[int(packed.bounds[-2]) :] = torch.nan  # of the longest
            return states

    encoder = Touchy()
    assert results(run([[7], [8, 8], [9]], encoder)) == [[7, 1, 2, 3], [8, 1, 2, 3], [9, 1, 2, 3]]
    assert encoder.passes == [3, 1]


def test_a_vector_that_is_zero_or_too_large_to_normalise_never_leaves() -> None:
    class Zero(FakeEncoder):
        def forward(self, packed: PackedBatch) -> torch.Tensor:
            ids = torch.from_numpy(packed.ids)
            states = super().forward(packed)
            states[ids == 0] = 0.0
            states[ids == 2] = 3e38
            return states

    assert results(run([[7], [0], [2], [9]], Zero())) == [[7, 1, 2, 3], "non_finite", "non_finite", [9, 1, 2, 3]]


def test_items_that_must_not_reach_the_device_are_errors_of_their_own() -> None:
    encoder = FakeEncoder()
    got = results(run([[7], [], [1] * 41, [100], [-1], [9]], encoder))
    assert got == [[7, 1, 2, 3], "no_tokens", "too_long", "token_out_of_range", "token_out_of_range", [9, 1, 2, 3]]
    assert encoder.passes == [2]


# batches that are too large


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_out_of_memory_splits_by_cost_until_it_fits(error: type[Exception]) -> None:
    """The first split separates a long item from the short ones."""
    encoder = FakeEncoder(limit=40, error=error)
    got = results(run([[5] * 40, [1], [2], [3], [4]], encoder))
    assert got == [[value, 1, 2, 3] for value in (5, 1, 2, 3, 4)]
    assert encoder.passes == [5, 4, 1]


def test_room_is_made_before_a_batch_is_split() -> None:
    """The batch fits after an idle model is evicted, so it is not split."""
    encoder = FakeEncoder(limit=1)
    calls: list[int] = []

    def make_room() -> Relief:
        calls.append(len(encoder.passes))
        encoder.limit = 3
        return "evictions_triggered"

    assert results(run([[1], [2], [3]], encoder, make_room)) == [[value, 1, 2, 3] for value in (1, 2, 3)]
    assert encoder.passes == [3, 3]
    assert calls == [1]


def test_once_there_is_no_room_to_make_the_batch_is_split() -> None:
    rooms: list[Relief | None] = ["cache_clears", "evictions_triggered", None, None]
    encoder = FakeEncoder(limit=1)
    assert results(run([[1], [2]], encoder, lambda: rooms.pop(0))) == [[1, 1, 2, 3], [2, 1, 2, 3]]
    assert encoder.passes == [2, 2, 2, 1, 1]
    assert rooms == [None]


def test_what_ran_out_of_memory_once_is_parted_before_the_next_pass(tmp_path: Path) -> None:
    """The device holds 4 tokens. The next batch of the same model starts in parts of 4. A batch of another model is
    tried whole.
    """
    batch_limits = DeviceLimits(tmp_path / "frontier", lambda: 0.0)
    batch = message([[number] for number in range(8)])
    for key, expected in (("a", [8, 4, 4]), ("a", [4, 4]), ("b", [8, 4, 4])):
        encoder = FakeEncoder(limit=4)
        with torch.inference_mode():
            done = BatchRun(encoder, CPU, batch, lambda: None, batch_limits, key).run()
        assert results(done) == [[number, 1, 2, 3] for number in range(8)]
        assert encoder.passes == expected


@pytest.mark.parametrize("tokens", [RECORDED_TOKENS - 1, RECORDED_TOKENS])
def test_only_a_pass_of_many_tokens_has_a_record_on_disk(tmp_path: Path, tokens: int) -> None:
    records, limits = PassRecords(tmp_path / "passes"), DeviceLimits(tmp_path / "frontier")
    recorded: list[list[PassRecord]] = []
    encoder = FakeEncoder(max_tokens=tokens)
    forward = encoder.forward

    def recorded_forward(packed: PackedBatch) -> torch.Tensor:
        recorded.append(PassRecords(tmp_path / "passes").left())
        return forward(packed)

    encoder.forward = recorded_forward  # type: ignore[method-assign]
    with torch.inference_mode():
        batch = message([[7] * tokens])
        BatchRun(encoder, CPU, batch, batch_limits=limits, key="a", pass_records=records).run()
    assert recorded == [[PassRecord("a", tokens, 0)] if tokens == RECORDED_TOKENS else []]


@pytest.mark.parametrize("tokens", [8, RECORDED_TOKENS])
def test_a_pass_that_a_graph_had_no_memory_for_lowers_the_limit(tmp_path: Path, tokens: int) -> None:
    """The error ends the process, so the limit is lowered before, also for a pass that has no record on disk."""
    records, limits = PassRecords(tmp_path / "passes"), DeviceLimits(tmp_path / "frontier")
    encoder = FakeEncoder(max_tokens=tokens)

    def fail(packed: PackedBatch) -> torch.Tensor:
        raise GraphLost

    encoder.forward = fail  # type: ignore[method-assign]
    batch_run = BatchRun(encoder, CPU, message([[7] * tokens]), batch_limits=limits, key="a", pass_records=records)
    with torch.inference_mode(), pytest.raises(GraphLost):
        batch_run.run()
    assert (limits.limit("a") or tokens) < tokens


def test_every_pass_runs_with_the_lora_of_the_batch() -> None:
    """The second pass of an item that is tried alone has the LoRA too."""
    encoder = FakeEncoder(loras=FakeLoras(("a",)))
    assert results(run([[1], [POISON]], encoder, lora="a")) == [[1, 1, 2, 3], "non_finite"]
    assert encoder.loras.acted == ["a", "a"]
    assert set(encoder.loras_of_passes) == {"a"}
    with pytest.raises(LoraLoading):
        run([[1]], encoder, lora="b")


def test_filling_counts_when_a_batch_is_split() -> None:
    encoder = FakeEncoder(limit=8, query_length=8)
    groups = (Group(0, 1, RunOptions(outputs=("multivector",), is_query=True)), Group(1, 3, RAW))
    run([[4], [5, 5], [6, 6]], encoder, groups=groups)
    assert encoder.passes == [3, 2, 1], "the short query is the long item"


def test_an_item_that_does_not_fit_alone_fails_and_its_mates_are_right() -> None:
    done = run([[1], [HEAVY, 2], [3]])
    assert results(done) == [[1, 1, 2, 3], "out_of_memory", [3, 1, 2, 3]]
    failed = done.outcomes[1]
    assert isinstance(failed, Failed)
    assert failed.error.code == "RESOURCE_EXHAUSTED"


def test_other_errors_of_the_device_are_not_swallowed() -> None:
    encoder = FakeEncoder(limit=0, error=ValueError)
    with pytest.raises(ValueError, match="memory"):
        run([[1]], encoder)


# faults of a family or of a batch


def test_a_family_that_returns_a_state_less_fails_the_batch_and_never_shifts() -> None:
    class Short(FakeEncoder):
        def forward(self, packed: PackedBatch) -> torch.Tensor:
            return super().forward(packed)[:-1]

    with pytest.raises(InternalFailure, match="1 states for 2 tokens"):
        run([[1], [2]], Short())


def test_a_head_that_returns_a_row_less_fails_the_batch_and_never_shifts() -> None:
    class Short(DenseHead):
        def reduce(self, states: States, sequences: Int64) -> Reduced:
            reduced = super().reduce(states, sequences)
            return Reduced(reduced.rows[1:], reduced.usable[1:])

    with pytest.raises(InternalFailure, match="head dense gave 2 rows for 3"):
        run([[1], [2], [3]], FakeEncoder(heads={"dense": Short("mean", None, CPU)}))


def test_an_output_or_a_width_that_is_not_there_is_an_error_of_those_items() -> None:
    groups = (Group(0, 1, RunOptions(outputs=("colours",))), Group(1, 2, RunOptions(dimensions=5)), Group(2, 3, RAW))
    encoder = FakeEncoder()
    assert results(run([[1], [2], [3]], encoder, groups=groups)) == [
        "unsupported_output",
        "bad_dimensions",
        [3, 1, 2, 3],
    ]
    assert encoder.passes == [2]


@pytest.mark.parametrize("changes", [{"operation": "score"}, {"pooling": "median"}])
def test_what_this_model_does_not_serve_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        run([[1]], FakeEncoder(layouts={"encode": "text"}), **changes)


@pytest.mark.parametrize(("pooling", "first"), [("", 2.0), ("cls", 1.0), ("last", 3.0), ("weighted", 14 / 6)])
def test_the_batch_s_pooling_or_the_model_s(pooling: str, first: float) -> None:
    assert results(run([[1, 2, 3]], pooling=pooling)) == [[pytest.approx(first), 1, 2, 3]]


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": b""},
        {"groups": ()},
        {"groups": (Group(0, 2),)},
        {"groups": (Group(1, 1),)},
        {"groups": (Group(0, 1), Group(0, 1))},
        {"groups": (Group(0, 1), Group(1, 0), Group(0, 1))},
        {"types": b"\0\0"},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InternalFailure):
        run([[1]], **changes)


def test_an_empty_batch_is_answered() -> None:
    done = run([], groups=())
    assert done.outcomes == ()


# vectors from clients

MAXSIM = RunOptions(outputs=("multivector",))
UNIT = np.eye(4, dtype="<f4")


def given_vectors(*rows: np.ndarray | None) -> dict[str, bytes]:
    counts = np.array([-1 if row is None else len(row) for row in rows], "<i4")
    return {
        "given": counts.tobytes(),
        "vectors": b"".join(row.astype("<f4").tobytes() for row in rows if row is not None),
    }


def scores(done: BatchDone) -> list[float | str | None]:
    return [outcome.error.reason if isinstance(outcome, Failed) else outcome.score for outcome in done.outcomes]


def test_given_vectors_run_no_pass_and_their_mates_one() -> None:
    encoder = FakeEncoder()
    alone = given_vectors(UNIT[:2], 2 * UNIT, UNIT[2:], UNIT[:0])
    done = run([[], [], [], []], encoder, operation="score", groups=(Group(0, 4, MAXSIM),), **alone)
    assert scores(done) == [4.0, 0.0, 0.0]
    assert tokens(done) == [0, 0, 0]
    assert encoder.passes == []
    state = np.array([7.0, 1.0, 2.0, 3.0])
    groups = (Group(0, 2, MAXSIM), Group(2, 4, MAXSIM))
    mixed = run(
        [[], [7], [7], []], encoder, operation="score", groups=groups, **given_vectors(UNIT[:1], None, None, UNIT[:1])
    )
    assert scores(mixed) == pytest.approx([state[0] / np.linalg.norm(state)] * 2, rel=1e-6)
    assert encoder.passes == [2]


def test_given_vectors_are_for_maxsim_alone_and_finite() -> None:
    """The adapter checks the vectors itself. A faulty vector fails its own item only."""
    groups = (Group(0, 2, RAW), Group(2, 4, MAXSIM))
    both = given_vectors(UNIT, None, UNIT, np.full((1, 4), np.inf))
    assert reasons(run([[], [7], [], []], groups=groups, **both)) == ["unsupported_modality", "", "", "schema"]
    hurt = run([[], [7]], operation="score", groups=(Group(0, 2, RunOptions(("dense",))),), **given_vectors(UNIT, None))
    assert reasons(hurt) == ["unsupported_modality"]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "binary"])
def test_given_vectors_whose_encoding_is_infinite_are_refused_and_their_mates_are_not(
    dtype: str, normalize: bool
) -> None:
    options = RunOptions(muvera=Muvera(2, 1, None, None, normalize=normalize), is_query=True, dtype=dtype)
    sent = given_vectors(UNIT[:1], np.full((2, 4), 3e38), None)
    done = run([[], [], [7]], groups=(Group(0, 3, options),), **sent)
    assert [reason != "" for reason in reasons(done)] == [False, True, False]


def test_given_vectors_stay_while_a_batch_is_split() -> None:
    encoder = FakeEncoder(limit=3)
    done = run([[7], [], [8, 9], [4]], encoder, groups=(Group(0, 4, MAXSIM),), **given_vectors(None, UNIT, None, None))
    assert reasons(done) == [""] * 4
    np.testing.assert_array_equal(arrays(done)[1]["multivector"], UNIT)
    assert max(encoder.passes[1:]) < 3


@pytest.mark.parametrize(
    "sent",
    [
        {**given_vectors(UNIT, None), "vectors": UNIT.tobytes()[:-4]},
        {**given_vectors(UNIT, None), "vectors": b""},
        given_vectors(UNIT),
        given_vectors(UNIT, UNIT),
        {"given": np.array([-1, -1], "<i4").tobytes(), "vectors": UNIT.tobytes()},
        given_vectors(np.ones((4, 3)), None),
    ],
)
def test_vectors_that_do_not_belong_to_the_rows_are_refused(sent: dict[str, bytes]) -> None:
    with pytest.raises(InternalFailure) as caught:
        run([[], [7]], groups=(Group(0, 2, MAXSIM),), **sent)
    assert caught.value.reason == "malformed_batch"


@pytest.mark.parametrize("lengths", [(3, 0, 5, 1), (0, 0), (4,)])
def test_one_product_for_all_documents_gives_the_scores_of_each(lengths: tuple[int, ...]) -> None:
    """The tested function runs on CUDA. The documents are not normalised; some are vectors from clients."""
    generator = torch.Generator().manual_seed(0)
    query = torch.nn.functional.normalize(torch.randn(3, 4, generator=generator), dim=1)
    documents = [torch.randn(length, 4, generator=generator) for length in lengths]
    for mixed in (
        documents,
        [item_results.ClientVectors(rows) if index % 2 else rows for index, rows in enumerate(documents)],
    ):
        expected = item_results._late_scores(item_results.ClientVectors(query), mixed)
        torch.testing.assert_close(item_results._late_scores_at_once(query, mixed), expected)


def test_a_relevance_is_at_most_1_where_the_cosine_of_float32_is_above_it() -> None:
    torch.manual_seed(0)
    options = RunOptions(outputs=("dense",), parameters={"relevance": True})
    result_lists = [
        item_results.side_scores(options, {"dense": row}, {"dense": [row, -row]}, per_row=True)
        for row in torch.randn(256, 32)
    ]
    scores = [answer.score for pair in result_lists for answer in pair if isinstance(answer, item_results.ItemResult)]
    assert len(scores) == 512
    assert all(score is not None and 0 <= score <= 1 for score in scores)
