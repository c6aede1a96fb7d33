"""Token ids, vectors from clients and token states through rows and engine, against the results of their texts, a naive
MaxSim, and transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import muvera_naive
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import heads_checkpoints
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, WIDTH, add_modules, build, dense, modules_of
from parity.device import new_engine
from parity.score_checkpoints import ragged_documents
from selection import long_but
from transformers import AutoModel, AutoTokenizer

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.text_encoder import TextEncoder
from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.options import TOKEN_STATES, run_options, unpooled
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import Failed, Input, Ok, Operation, RunOptions, Vectors
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare import rows as rowing
from sie_sidecar.prepare.rows import BatchPart, ModelTokenizer, WorkItemInput

OUT = 24
CLOSE = 2e-5
DENSE = ("bert", "xlm-roberta", "qwen3 causal", "modernbert")
STATES = ("bert", "bert with dense", "xlm-roberta", "modernbert", "qwen3 causal", "gemma3 bidirectional", "mpnet")
Array = NDArray[Any]


@dataclass(frozen=True)
class Loaded:
    """A resident model."""

    engine: AdapterEngine
    entry: ModelEntry
    encoder: TextEncoder
    tokenizer: ModelTokenizer

    def run(self, operation: Operation, *works: WorkItemInput) -> list[Any]:
        """Return the arrays, score or error of each input. All inputs are one batch."""
        layout = self.encoder.rows[operation]
        prepared_works = layouts.make(self.tokenizer, layout, works)
        assert all(prepared_work.error is None and not prepared_work.unfit for prepared_work in prepared_works), (
            prepared_works
        )
        parts = [BatchPart(prepared_work.rows, work) for prepared_work, work in zip(prepared_works, works, strict=True)]
        with torch.inference_mode():
            reply = self.engine.execute(rowing.to_batch("b", self.entry.id, operation, layout.layout, parts))
        assert isinstance(reply, BatchDone), reply
        return [self._value(reply, outcome) for outcome in reply.outcomes]

    @staticmethod
    def _value(reply: BatchDone, outcome: object) -> Any:
        if isinstance(outcome, Failed):
            return outcome.error
        assert isinstance(outcome, Ok)
        if outcome.score is not None:
            return outcome.score
        return {
            name: np.frombuffer(reply.block, part.dtype, int(np.prod(part.shape)), part.offset).reshape(part.shape)
            for name, part in outcome.outputs.items()
        }

    def encode(self, inputs: Sequence[Input], *outputs: str, **options: Any) -> list[Any]:
        return self.run("encode", WorkItemInput(inputs, None, RunOptions(outputs, **options)))

    def rows(self, texts: Sequence[str], **options: Any) -> list[Array]:
        """Token vectors of texts."""
        return [
            output["multivector"] for output in self.encode([Input(text) for text in texts], "multivector", **options)
        ]

    def score(self, query: Input, inputs: Sequence[Input], *outputs: str) -> Array:
        return np.array(self.run("score", WorkItemInput(inputs, query, RunOptions(outputs or ("multivector",)))))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Loaded]]:
    """Return a function that loads a model by name: architectures with a dense output, and three with token vectors."""
    root, threads = tmp_path_factory.mktemp("inputs"), torch.get_num_threads()
    torch.set_num_threads(1)
    engine = new_engine()

    def late(folder: Path) -> dict[str, Any]:
        config = {"query_length": 16, "document_length": 180, "attend_to_expansion_tokens": False}
        heads_checkpoints.pylate(folder, heads_checkpoints.with_markers("bert"), [dense(WIDTH, OUT)], config)
        return {"outputs": {"multivector": OUT}, "head": {"query_marker": "[Q] ", "document_marker": "[D] "}}

    def stanford(folder: Path) -> dict[str, Any]:
        heads_checkpoints.stanford(folder, OUT, {"query_maxlen": 24, "doc_maxlen": 90})
        return {"outputs": {"multivector": OUT}}

    def m3(folder: Path) -> dict[str, Any]:
        heads_checkpoints.bge_m3(folder)
        width, vocabulary = heads_checkpoints.M3_WIDTH, len(AutoTokenizer.from_pretrained(folder))
        outputs = {"dense": width, "sparse": vocabulary, "multivector": width, "score": 0}
        return {"outputs": outputs, "max_tokens": heads_checkpoints.M3_TOKENS}

    def of_architecture(folder: Path) -> dict[str, Any]:
        architecture = ARCHITECTURES[folder.name]
        add_modules(build(folder, architecture), modules_of(architecture))
        return {"outputs": {"dense": architecture.width}}

    @functools.cache
    def loaded(name: str) -> Loaded:
        settings = {"late": late, "stanford": stanford, "m3": m3}.get(name, of_architecture)(root / name)
        entry = parse_entry(
            {
                "id": f"test/{name.replace(' ', '-')}",
                "weights": {"path": str(root / name)},
                "family": "text-encoder",
                "max_tokens": MAX_TOKENS,
                "load": {"precision": "float32"},
                **settings,
            }
        )
        resident = engine.residency.ensure(entry.id, entry)
        return Loaded(engine, entry, resident.weights, ModelTokenizer(resident.weights.tokenizer, entry.max_tokens))

    yield loaded
    assert engine.stop(10)
    torch.set_num_threads(threads)


def folder_of(model: Loaded) -> str:
    return model.entry.weights.path


# token ids


@pytest.mark.parametrize("name", long_but(DENSE, ["bert", "qwen3 causal"]))
@pytest.mark.parametrize("truncate", ["END", "START"])
def test_the_ids_of_texts_give_the_bits_of_their_vectors(
    name: str, truncate: str, load: Callable[[str], Loaded]
) -> None:
    """The ids are those of transformers' tokenizer, with and without special tokens. Texts are ragged, one is empty,
    and one is longer than the model reads.
    """
    model = load(name)
    library = AutoTokenizer.from_pretrained(folder_of(model))
    texts = [*ragged_documents(16), "river mountain " * 400]
    expected = model.encode([Input(text) for text in texts], "dense", truncate=truncate)
    for special in (True, False):
        ids = [tuple(library(text, add_special_tokens=special)["input_ids"]) for text in texts]
        outputs = model.encode([Input(tokens=tokens) for tokens in ids], "dense", truncate=truncate)
        assert [output["dense"].tobytes() for output in outputs] == [output["dense"].tobytes() for output in expected]


def test_ids_of_a_query_have_its_marker_and_its_filling(load: Callable[[str], Loaded]) -> None:
    model, text = load("late"), "search paper of the river"
    ids = tuple(AutoTokenizer.from_pretrained(folder_of(model))(text)["input_ids"])
    for is_query in (True, False):
        by_text, by_ids = (
            model.encode([source], "multivector", is_query=is_query)[0] for source in (Input(text), Input(tokens=ids))
        )
        np.testing.assert_array_equal(by_ids["multivector"], by_text["multivector"])


# vectors from clients


def maxsim(query: Array, document: Array) -> float:
    """Return MaxSim in float64, one pair of vectors after the other."""
    return sum(
        max((float(np.dot(q, d)) for d in document.astype(np.float64)), default=0.0) for q in query.astype(np.float64)
    )


def given(rows: Array) -> Input:
    return Input(vectors=Vectors.from_array(rows))


@pytest.mark.parametrize("name", ["late", "stanford", "m3"])
def test_either_side_may_be_what_encode_gave(name: str, load: Callable[[str], Loaded]) -> None:
    """Vectors for one side, for both, or for some documents give the scores of the texts."""
    model, query = load(name), "which river is a paper of physics"
    texts = ragged_documents(12)
    (query_rows,), document_rows = model.rows([query], is_query=True), model.rows(texts)
    shares = len(query_rows) if name == "m3" else 1
    expected = np.array([maxsim(query_rows, rows) for rows in document_rows]) / shares
    mixed = [
        given(rows) if index % 3 else Input(text)
        for index, (text, rows) in enumerate(zip(texts, document_rows, strict=True))
    ]
    as_texts, as_vectors = [Input(text) for text in texts], [given(rows) for rows in document_rows]
    for query_input in (Input(query), given(query_rows)):
        for documents in (as_texts, as_vectors, mixed):
            np.testing.assert_allclose(model.score(query_input, documents), expected, rtol=CLOSE, atol=CLOSE)


def test_what_is_given_needs_no_pass_and_is_used_as_it_is(
    load: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors from a client are not normalised, and a text beside them is not read. A side without vectors scores 0."""
    model, rng = load("late"), np.random.default_rng(5)
    query = (3 * rng.normal(size=(4, OUT))).astype(np.float32)
    documents = [rng.normal(size=(count, OUT)).astype(np.float32) for count in (1, 7, 0, 300)]
    expected = [maxsim(query, rows) for rows in documents]
    with monkeypatch.context() as patched:
        patched.setattr(model.encoder, "forward", lambda packed: pytest.fail("a pass ran"))
        scores = model.score(given(query), [Input("river", vectors=Vectors.from_array(rows)) for rows in documents])
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert scores[2] == 0
    assert model.score(given(query[:0]), [given(documents[0]), Input("river")]).tolist() == [0, 0]


def test_given_rows_are_the_same_beside_other_work(load: Callable[[str], Loaded]) -> None:
    model, texts = load("late"), ragged_documents(6)
    rows = model.rows(texts)
    works = [
        WorkItemInput([Input(text) for text in texts], given(rows[0]), RunOptions(("multivector",))),
        WorkItemInput([given(matrix) for matrix in rows], Input("search"), RunOptions(("multivector",))),
        WorkItemInput([Input(texts[1]), given(rows[2])], Input("paper"), RunOptions(("multivector",))),
    ]
    together = model.run("score", *works)
    alone = [score for work in works for score in model.run("score", work)]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_query", [True, False])
@pytest.mark.parametrize(
    "parameters",
    [
        Muvera(4, 3, None, None),
        Muvera(4, 3, 8, 96, 7, True, True),
    ],
)
def test_a_given_matrix_has_the_encoding_of_its_text(
    is_query: bool, parameters: Muvera, load: Callable[[str], Loaded]
) -> None:
    """The encoding equals that of the naive form too, for rows of any norm."""
    model, texts = load("late"), ragged_documents(8)
    options = {"is_query": is_query, "muvera": parameters}
    rows = model.rows(texts, is_query=is_query)
    by_text = model.encode([Input(text) for text in texts], "dense", **options)
    mixed = [
        given(token_rows) if index % 2 else Input(text)
        for index, (text, token_rows) in enumerate(zip(texts, rows, strict=True))
    ]
    for inputs in ([given(token_rows) for token_rows in rows], mixed):
        for output, expected, matrix in zip(model.encode(inputs, "dense", **options), by_text, rows, strict=True):
            np.testing.assert_allclose(output["dense"], expected["dense"], atol=CLOSE)
            np.testing.assert_allclose(
                output["dense"], muvera_naive.encode(matrix, parameters, is_query=is_query), atol=CLOSE
            )
    long = [5 * np.random.default_rng(3).normal(size=(count, OUT)).astype(np.float32) for count in (9, 0)]
    for output, matrix in zip(
        model.encode([given(long_matrix) for long_matrix in long], "dense", **options), long, strict=True
    ):
        np.testing.assert_allclose(
            output["dense"], muvera_naive.encode(matrix, parameters, is_query=is_query), rtol=1e-4, atol=1e-4
        )


def test_a_given_matrix_comes_back_beside_its_encoding_and_is_cut_as_a_text(load: Callable[[str], Loaded]) -> None:
    model = load("late")
    (rows,) = model.rows(["river mountain paper"])
    options: dict[str, Any] = {"muvera": Muvera(4, 3, None, None), "dimensions": 8}
    by_text, by_rows = (
        model.encode([source], "dense", "multivector", **options)[0]
        for source in (Input("river mountain paper"), given(rows))
    )
    for name in ("dense", "multivector"):
        assert by_rows[name].shape == by_text[name].shape
        np.testing.assert_allclose(by_rows[name], by_text[name], atol=CLOSE)


def test_numbers_that_are_not_finite_are_an_error_of_their_own_input(load: Callable[[str], Loaded]) -> None:
    bad = np.full((2, OUT), np.nan, np.float32)
    good = np.ones((2, OUT), np.float32)
    outcomes = load("late").run(
        "score", WorkItemInput([given(good), given(bad), Input("a")], given(good), RunOptions(("multivector",)))
    )
    assert [isinstance(outcome, float) for outcome in outcomes] == [True, False, True]
    assert (outcomes[1].code, outcomes[1].param) == ("INVALID_INPUT", "multivector")


# token states


@pytest.mark.parametrize("name", long_but(STATES, ["bert with dense", "modernbert", "qwen3 causal"]))
def test_token_states_are_the_last_hidden_states(name: str, load: Callable[[str], Loaded]) -> None:
    """Each token has a row, special tokens too. The layers behind the pooling are not applied. The batch has dense
    vectors too.
    """
    model = load(name)
    texts = [*ragged_documents(12), "river mountain " * 400]
    library = AutoTokenizer.from_pretrained(folder_of(model))
    stock = AutoModel.from_pretrained(folder_of(model), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [
            stock(**library(text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS))
            .last_hidden_state[0]
            .numpy()
            for text in texts
        ]
    resolved = Catalogue({model.entry.id: model.entry}).resolve(model.entry.id)
    options = unpooled(model.entry, run_options(resolved, {})[1].run)
    pooled = WorkItemInput([Input(text) for text in texts[:3]], None, RunOptions())
    hidden_states = model.run("encode", pooled, WorkItemInput([Input(text) for text in texts], None, options))[3:]
    for states, stock_states in zip(hidden_states, expected, strict=True):
        assert list(states) == [TOKEN_STATES]
        assert (states[TOKEN_STATES].dtype, states[TOKEN_STATES].shape) == (np.float32, stock_states.shape)
        np.testing.assert_allclose(
            states[TOKEN_STATES], stock_states, rtol=0, atol=2e-5 * max(1.0, np.abs(stock_states).max())
        )


def test_no_request_names_token_states_and_only_dense_encoders_have_them(load: Callable[[str], Loaded]) -> None:
    entry = load("bert").entry
    with pytest.raises(InvalidInput, match="it has dense") as refused:
        run_options(Catalogue({entry.id: entry}).resolve(entry.id), {"output_types": [TOKEN_STATES]})
    assert refused.value.reason == "unsupported_output"
    with pytest.raises(InvalidInput) as refused:
        unpooled(load("late").entry, RunOptions())
    assert refused.value.reason == "unsupported_output"
    assert TOKEN_STATES not in load("bert").encoder.certificate["packed"]
