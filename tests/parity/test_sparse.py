"""Learned sparse vectors equal SparseEncoder's on the same folder: SPLADE of every masked LM, inference-free queries,
in bounded memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import heads_checkpoints as checkpoints
from parity.checkpoints import MAX_TOKENS
from parity.device import SIXTEEN, require_precision
from parity.heads_engine import Array, HeadsEngine, HeadsModel, check
from parity.table import ParityTable
from selection import long_but
from sentence_transformers import SparseEncoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from sie_adapter.heads import States
from sie_adapter.heads.sparse import MaskedLanguageHead, TokenWeightHead
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.loading.precision import bfloat16_lacks
from sie_adapter.packed.packing import Items, PackedBatch, Positions, pack
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.wire.messages import RunOptions

ARCHITECTURES = ("bert", "distilbert", "roberta", "modernbert", "xlm-roberta", "electra", "gte", "mpnet", "deberta-v2")
LIMIT_BYTES = 64_000_000
Vectors = NDArray[np.float32]
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that makes a masked LM. `activation`: as SparseEncoder saves it. `routes`: with inference-free
    queries.
    """
    root = tmp_path_factory.mktemp("sparse")

    @functools.cache
    def built(architecture: str, activation: str = "", routes: str = "") -> Path:
        if not activation and not routes:
            return checkpoints.masked(root / architecture, architecture)
        source, target = built(architecture), root / f"{architecture}-{activation}{routes}"
        if activation:
            return checkpoints.splade(target, source, activation)
        return checkpoints.inference_free(target, source, beside=routes == "beside")

    return built


@pytest.fixture(scope="module")
def engine() -> Iterator[HeadsEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads = HeadsEngine()
    yield heads
    heads.stop()
    torch.set_num_threads(threads)


def vocabulary(folder: Path) -> int:
    return len(AutoTokenizer.from_pretrained(folder))


def load(
    engine: HeadsEngine, folder: Path, precision: str = "float32", tokenizer: Path | None = None, **head: Any
) -> HeadsModel:
    size = vocabulary(tokenizer or folder)
    model = engine.load(folder, {"sparse": size}, max_tokens=MAX_TOKENS, precision=precision, head=head)
    require_precision(model.encoder.precision, precision)
    return model


def full(rows: Sequence[dict[str, Array]], size: int) -> Vectors:
    """Return [texts, vocabulary]. Check that ids are ascending and distinct, and that weights are positive."""
    dense = np.zeros((len(rows), size), np.float32)
    for vector, row in zip(dense, rows, strict=True):
        ids, weights = row["sparse.indices"], row["sparse.values"]
        assert ids.dtype == np.int32
        assert weights.dtype == np.float32
        assert (np.diff(ids) > 0).all()
        assert (weights > 0).all()
        vector[ids] = weights
    return dense


def oracle(folder: Path, texts: Sequence[str], *, task: str = "document", precision: str = "float32") -> Vectors:
    """Return the vectors of SparseEncoder, one text at a time, so that no padding enters the numbers."""
    model = SparseEncoder(
        str(folder),
        device="cpu",
        local_files_only=True,
        model_kwargs={"dtype": precision, "attn_implementation": "eager"},
    )
    encode = model.encode_query if task == "query" else model.encode_document
    options = {"batch_size": 1, "convert_to_sparse_tensor": False, "show_progress_bar": False}
    return encode(list(texts), **options).float().numpy()  # type: ignore[no-any-return]


def assert_equal(
    model: HeadsModel, got: Vectors, expected: Vectors, table: ParityTable | None = None, name: str = ""
) -> None:
    assert (expected > 0).any(1).all()
    assert 0.005 < (expected > 0).mean() < 0.95  # neither dense nor empty
    check(table or ParityTable(), name, model, got, expected)


@pytest.mark.parametrize("architecture", long_but(ARCHITECTURES, ["bert", "modernbert"]))
def test_vectors_equal_the_oracle(architecture: str, folder: Folder, engine: HeadsEngine, table: ParityTable) -> None:
    """The folder is a bare masked LM. The batches have 64, 1, 2, 5 and 56 texts."""
    place, texts = folder(architecture), checkpoints.texts()
    model, expected = load(engine, place), oracle(place, texts)
    parts = [model.encode(texts[start:stop], "sparse") for start, stop in ((0, 1), (1, 3), (3, 8), (8, 64))]
    for rows in (model.encode(texts, "sparse"), [row for part in parts for row in part]):
        assert_equal(model, full(rows, expected.shape[1]), expected, table, f"sparse {architecture}")


@pytest.mark.parametrize("architecture", long_but(ARCHITECTURES, ["modernbert"]))
def test_bfloat16_is_as_near_as_the_oracle_in_bfloat16(
    architecture: str, folder: Folder, engine: HeadsEngine, table: ParityTable
) -> None:
    """Weights near 0 come and go with rounding, so vectors are compared, not ids."""
    place, texts = folder(architecture), checkpoints.texts()
    model = load(engine, place, SIXTEEN)
    expected, stock = oracle(place, texts), oracle(place, texts, precision=SIXTEEN)
    got = full(model.encode(texts, "sparse"), expected.shape[1])
    check(table, f"sparse {architecture}", model, got, expected, stock)


def test_two_threads_at_once_give_what_one_gives(folder: Folder, engine: HeadsEngine) -> None:
    model, texts = load(engine, folder("bert")), checkpoints.texts()
    batches = [texts[start : start + 8] for start in range(0, 64, 8)]
    for outputs, batch in zip(model.encode_at_once(batches, "sparse"), batches, strict=True):
        for row, expected in zip(outputs, model.encode(batch, "sparse"), strict=True):
            np.testing.assert_array_equal(row["sparse.indices"], expected["sparse.indices"])
            np.testing.assert_array_equal(row["sparse.values"], expected["sparse.values"])


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_stored_activation_is_followed(activation: str, folder: Folder, engine: HeadsEngine) -> None:
    place, texts = folder("distilbert", activation), checkpoints.texts(16)
    expected = oracle(place, texts)
    model = load(engine, place)
    assert_equal(model, full(model.encode(texts, "sparse"), expected.shape[1]), expected)


def test_the_entry_s_activation_wins(folder: Folder, engine: HeadsEngine) -> None:
    texts = checkpoints.texts(16)
    expected = oracle(folder("distilbert", "log1p_relu"), texts)
    model = load(engine, folder("distilbert", "relu"), sparse_activation="log1p_log1p_relu")
    assert_equal(model, full(model.encode(texts, "sparse"), expected.shape[1]), expected)


def test_special_tokens_get_no_weight_where_the_entry_says_so(folder: Folder, engine: HeadsEngine) -> None:
    place, texts = folder("bert"), checkpoints.texts(16)
    special = sorted(AutoTokenizer.from_pretrained(place).all_special_ids)
    expected = oracle(place, texts)
    assert expected[:, special].any()
    model = load(engine, place, sparse_special_tokens=False)
    got = full(model.encode(texts, "sparse"), expected.shape[1])
    assert not got[:, special].any()
    expected[:, special] = 0
    assert_equal(model, got, expected)


def test_a_vector_does_not_depend_on_its_mates(folder: Folder, engine: HeadsEngine) -> None:
    model, texts = load(engine, folder("modernbert")), checkpoints.texts(32)
    size = vocabulary(folder("modernbert"))
    together = full(model.encode(texts, "sparse"), size)
    alone = np.concatenate([full(model.encode([text], "sparse"), size) for text in texts])
    backwards = full(model.encode(texts[::-1], "sparse"), size)[::-1]
    for vectors in (alone, backwards):
        assert np.abs(vectors - together).max() <= 2e-6 * np.linalg.norm(together, axis=1).min()


@pytest.mark.parametrize("routes", ["folders", "beside"])
def test_queries_of_a_router_need_no_pass(
    routes: str, folder: Folder, engine: HeadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch has queries and documents. The vectors of queries, which are looked up, are exactly those of
    SparseStaticEmbedding.
    """
    place, texts = folder("distilbert", routes=routes), checkpoints.texts(24)
    model = load(engine, place, tokenizer=folder("distilbert"))
    queries, documents = oracle(place, texts, task="query"), oracle(place, texts)
    options = [RunOptions(outputs=("sparse",), is_query=is_query) for is_query in (True, False, True)]
    first, second, third = model.encode_items([(texts, options[0]), (texts, options[1]), (texts[:3], options[2])])
    size = queries.shape[1]
    np.testing.assert_array_equal(full(first, size), queries)
    np.testing.assert_array_equal(full(third, size), queries[:3])
    assert len(first[0]["sparse.indices"]) == 0  # the empty text
    assert_equal(model, full(second, size), documents)
    monkeypatch.setattr(model.encoder.backbone, "forward", None)
    assert len(model.encode(texts, "sparse", is_query=True)) == 24


def test_queries_are_looked_up_in_idf_json(folder: Folder, engine: HeadsEngine, tmp_path: Path) -> None:
    """Each distinct token counts once; tokens without a weight and special tokens do not."""
    place = checkpoints.idf(checkpoints.splade(tmp_path / "idf", folder("distilbert")))
    tokenizer = AutoTokenizer.from_pretrained(place)
    weights = json.loads((place / "idf.json").read_text())
    texts = [*checkpoints.texts(16), "river river river"]
    rows = load(engine, place, query_encoder="idf").encode(texts, "sparse", is_query=True)
    for text, row in zip(texts, rows, strict=True):
        ids = set(tokenizer(text, add_special_tokens=False, truncation=True)["input_ids"])
        weight_of_id = {
            number: weights[token] for number in ids if (token := tokenizer.convert_ids_to_tokens(number)) in weights
        }
        assert row["sparse.indices"].tolist() == sorted(weight_of_id)
        np.testing.assert_allclose(
            row["sparse.values"], [weight_of_id[number] for number in sorted(weight_of_id)], rtol=1e-6
        )
    model = load(engine, place)
    assert_equal(model, full(model.encode(texts, "sparse", is_query=True), len(tokenizer)), oracle(place, texts))


@pytest.mark.parametrize(
    "change",
    [
        {"structure": {"query": ["query_0_SparseStaticEmbedding"], "document": ["document_0_Transformer"]}},
        {
            "structure": {
                "query": ["document_0_Transformer", "document_1_SpladePooling"],
                "document": ["query_0_SparseStaticEmbedding"],
            }
        },
        {"parameters": {"route_mappings": {"('query', 'text')": "document"}}},
    ],
)
def test_any_other_router_is_refused(
    change: dict[str, Any], folder: Folder, engine: HeadsEngine, tmp_path: Path
) -> None:
    place = checkpoints.inference_free(tmp_path / "router", folder("distilbert"), beside=False)
    config = place / "router_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ModelLoadFailed, match="Router"):
        load(engine, place, tokenizer=folder("distilbert"))


@pytest.mark.parametrize("route", ["query", "document"])
def test_a_router_of_modules_outside_of_its_folder_is_refused(
    route: str, folder: Folder, engine: HeadsEngine, tmp_path: Path
) -> None:
    place = checkpoints.inference_free(tmp_path / "router", folder("distilbert"), beside=False)
    config = place / "router_config.json"
    router = json.loads(config.read_text())
    module = router["structure"][route][0]
    outside = f"../{module}"
    (place / module).rename(tmp_path / module)
    router["structure"][route][0] = outside
    router["types"][outside] = router["types"].pop(module)
    config.write_text(json.dumps(router))
    with pytest.raises(ModelLoadFailed, match=f"names the module {outside}, which is outside of its folder"):
        load(engine, place, tokenizer=folder("distilbert"))


def test_a_router_without_weights_of_queries_is_refused(folder: Folder, engine: HeadsEngine, tmp_path: Path) -> None:
    """With pickled weights alone, the error has the command that converts them."""
    place = checkpoints.inference_free(tmp_path / "router", folder("distilbert"), beside=False)
    (weights,) = place.glob("query_*/model.safetensors")
    weights.unlink()
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors with the weights of queries is missing$"):
        load(engine, place, tokenizer=folder("distilbert"))
    (weights.parent / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadFailed, match="is missing: convert it"):
        load(engine, place, tokenizer=folder("distilbert"))


class Largest(TorchDispatchMode):
    """Records the largest storage that any operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return output


# Without the instructions a pass in bfloat16 takes minutes, and the adapter serves no model in bfloat16.
needs_bfloat16 = pytest.mark.skipif(bool(bfloat16_lacks()), reason=bfloat16_lacks() or "never")


def sequences(lengths: Sequence[int], size: int) -> PackedBatch:
    counts = np.array(lengths, np.int64)
    ids = np.random.default_rng(0).integers(0, size, counts.sum(), dtype=np.int32)
    return pack(Items(counts, ids), np.arange(len(counts)), Positions())


@pytest.mark.parametrize(
    ("size", "longest", "dtype", "count"),
    [
        (250002, 6, torch.float32, 64),
        pytest.param(250002, 6, torch.float32, 512, marks=pytest.mark.long),
        pytest.param(30522, 130, torch.float32, 512, marks=pytest.mark.long),
        pytest.param(30522, 130, torch.bfloat16, 512, marks=[pytest.mark.long, needs_bfloat16]),
    ],
)
def test_the_masked_head_holds_no_large_tensor(size: int, longest: int, dtype: torch.dtype, count: int) -> None:
    """One of `count` sequences is long. Every logit is positive, so rows have as many entries as possible."""
    config = BertConfig(
        vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16
    )
    model = BertForMaskedLM(config).eval().requires_grad_(False).to(dtype)
    model.get_output_embeddings().bias.fill_(9.0)
    packed = sequences([*np.linspace(2, longest, count - 1).astype(int), 512], size)
    states = States(torch.randn(len(packed.ids), 16, dtype=dtype), packed, np.zeros(count, bool))
    head = MaskedLanguageHead(
        TransformersHead(model, in_float32=False), size, torch.device("cpu"), twice=False, dropped=frozenset({0})
    )
    with torch.inference_mode(), Largest() as largest:
        reduced = head.reduce(states, np.arange(count))
    assert [len(ids) for ids, _ in reduced.rows] == [size - 1] * count
    assert LIMIT_BYTES / 4 < largest.nbytes <= LIMIT_BYTES


def test_the_token_head_holds_no_large_tensor() -> None:
    """The sizes are those of BGE-M3: its vocabulary and width, 512 sequences in 16 bit."""
    packed = sequences([*np.linspace(2, 90, 511).astype(int), 512], 250002)
    states = States(torch.randn(len(packed.ids), 1024, dtype=torch.bfloat16), packed, np.zeros(512, bool))
    assert states.hidden.nbytes * 2 > LIMIT_BYTES  # in float32, all at once, it would be too large
    head = TokenWeightHead(torch.nn.Linear(1024, 1), 250002, frozenset({0, 1, 2, 3}))
    with torch.inference_mode(), Largest() as largest:
        reduced = head.reduce(states, np.arange(512))
    assert len(reduced.rows) == 512
    assert LIMIT_BYTES / 4 < largest.nbytes <= LIMIT_BYTES


@pytest.mark.parametrize("kind", ["masked", "token"])
def test_only_the_sequence_that_is_not_finite_is_not_usable(kind: str) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    packed = sequences([3, 4, 4, 700], 50)
    hidden = torch.randn(len(packed.ids), 16)
    hidden[8, 3] = torch.nan
    transformer = TransformersHead(BertForMaskedLM(config).eval(), in_float32=False)
    masked = MaskedLanguageHead(transformer, 50, torch.device("cpu"), twice=False, dropped=frozenset())
    head = masked if kind == "masked" else TokenWeightHead(torch.nn.Linear(16, 1), 50, frozenset())
    with torch.inference_mode():
        reduced = head.reduce(States(hidden, packed, np.zeros(4, bool)), np.array([0, 2, 3]))
    assert reduced.usable.tolist() == [True, False, True]
    assert len(reduced.rows) == 3


@pytest.mark.parametrize("max_entries", [0, 3])
@pytest.mark.parametrize("sums", [False, True], ids=["maximum", "sum"])
def test_the_parts_of_a_sequence_join_to_its_row(sums: bool, max_entries: int) -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    head = MaskedLanguageHead(
        TransformersHead(BertForMaskedLM(config).eval(), in_float32=False),
        50,
        torch.device("cpu"),
        twice=False,
        dropped=frozenset({0}),
        max_entries=max_entries,
        sums=sums,
    )
    hidden = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    sequence, two = (Items(np.array(lengths), np.zeros(12, np.int32)) for lengths in ([12], [5, 7]))
    with torch.inference_mode():
        whole = head.reduce(States(hidden, pack(sequence, np.arange(1), Positions()), np.zeros(1, bool)), np.arange(1))
        packed = pack(two, np.arange(2), Positions())
        parts = head.parts(States(hidden, packed, np.zeros(2, bool)), np.arange(2))
        joined = [head.join([own], [np.array([5, 7])[: len(own)]], "")[0] for own in (parts.rows, parts.rows[:1])]
        first = States(
            hidden[:5], pack(Items(np.array([5]), np.zeros(5, np.int32)), np.arange(1), Positions()), np.zeros(1, bool)
        )
        expected = [whole.rows[0], head.reduce(first, np.arange(1)).rows[0]]
    assert packed.order.tolist() == [0, 1]
    for (ids, weights), (expected_ids, values) in zip(joined, expected, strict=True):
        assert ids.tolist() == expected_ids.tolist()
        assert len(ids) == max_entries or not max_entries
        torch.testing.assert_close(weights, values)
