"""Dense vectors of every text architecture equal sentence-transformers' on the same folder, packed and padded, in any
company.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import WORDS
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, ORIGINAL_TOKENS, add_modules, build, modules_of
from parity.device import SIXTEEN
from parity.engine import Ids, ParityEngine, Served
from parity.reference import Reference
from parity.table import Agreement, ParityTable, path_of
from safetensors.numpy import load_file
from selection import BACKBONES, long_but
from support.parity import Folders, References, Serve

from sie_contracts.errors import ModelLoadFailed

PRECISIONS = ("float32", SIXTEEN)
MAX_DIFFERENCE = {"float32": 1e-5, SIXTEEN: 0.05}  # of a component, in units of the vector's norm
MIN_COSINE = {"float32": 0.9999, SIXTEEN: 0.999}
# The worst of 64 random texts is noise, their mean is not: one text moves by a factor of 2 when nothing but the order
# of a sum changes.
MAX_MEAN_OF_STOCK = 1.5
MAX_WORST_OF_STOCK = 3.0

_EDGES = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129, 130, 255, 500)
_ODD = (
    "",
    "Zürich, 東京 and 😀",
    "שלום עולם, مرحبا",
    "tab\tline\nthe end",
    "UPPER naïve it's (a) 3.14",
    "unsearchable" * 9,
    "one " * MAX_TOKENS + "past the limit",
    "  spaces around \n",
    "a\u0000b \u200bc",
    "<pad>[PAD]<|endoftext|> <pad> river",
    "a </s> [SEP] <eos>",
)


PACKED = [name for name, architecture in ARCHITECTURES.items() if architecture.attention == "sdpa"]
ALL = [(name, precision) for name in ARCHITECTURES for precision in PRECISIONS]
# beside the backbones: an architecture that scales its embeddings, and one with code of its own
USUAL = (*BACKBONES, "gemma3 bidirectional", "nomic_bert")
OF_BACKBONES = [(name, precision) for name in BACKBONES for precision in PRECISIONS]


def ragged(served: Served) -> list[str]:
    """Return 64 texts in mixed order: the shortest possible ones, both sides of every window, equal lengths, odd
    texts.
    """
    special, limit = len(served.tokens([""])[0]), served.tokenizer.max_tokens
    rng = random.Random(0)
    lengths = [*range(special, special + 10), *(edge for edge in _EDGES if edge < limit), limit]
    lengths += [
        int(min(limit - 8, 200, rng.lognormvariate(3.2, 1.0))) + special for _ in range(64 - len(lengths) - len(_ODD))
    ]
    texts = [" ".join(rng.choices(WORDS, k=length - special)) for length in lengths]
    assert [len(ids) for ids in served.tokens(texts)] == lengths
    texts += _ODD
    rng.shuffle(texts)
    return texts


def check(
    name: str, precision: str, served: Served, references: References, table: ParityTable, path: str = ""
) -> None:
    """Compare a batch of 64 in the pooling of the folder, one of 20 in each other pooling, and batches of 1, 2, 5 and
    20 with the float32 reference.
    """
    texts, poolings = ragged(served), ARCHITECTURES[name].poolings
    assert len(texts) == 64
    expected = references(name, "float32").pooled(texts, poolings)
    own = references(name, precision).pooled(texts, poolings)
    outputs = [(poolings[0], served.encode(texts))]
    outputs += [(pooling, served.encode(texts[:20], pooling=pooling)) for pooling in poolings[1:]]
    parts = [served.encode(texts[start:stop]) for start, stop in ((0, 1), (1, 3), (3, 8), (8, 28))]
    for pooling, vectors in [*outputs, (poolings[0], np.concatenate(parts))]:
        first = slice(len(vectors))
        stock, ours = (Agreement.of(side, expected[pooling][first]) for side in (own[pooling][first], vectors))
        table.record(f"dense {name}", "stock", precision, stock)
        table.record(f"dense {name}", path or path_of(served.attention), precision, ours)
        assert ours.difference <= MAX_DIFFERENCE[precision]
        if ours.cosine < MIN_COSINE[precision]:
            assert 1 - ours.cosine <= MAX_WORST_OF_STOCK * (1 - stock.cosine)
        if precision != "float32":
            assert ours.mean_distance <= MAX_MEAN_OF_STOCK * stock.mean_distance


@pytest.mark.parametrize(("name", "precision"), long_but(ALL, OF_BACKBONES))
def test_vectors_equal_the_reference(
    name: str, precision: str, serve: Serve, references: References, table: ParityTable
) -> None:
    """In float32 `test_a_folder_is_served_as_its_own_files_say` compares more architectures by default."""
    check(name, precision, serve(name, precision), references, table)


@pytest.mark.parametrize(
    ("name", "precision"),
    long_but([case for case in ALL if case[0] in PACKED], [(name, "float32") for name in BACKBONES if name in PACKED]),
)
def test_padded_vectors_equal_the_reference(
    name: str, precision: str, serve: Serve, references: References, table: ParityTable
) -> None:
    """The path to which any architecture may fall back is right too."""
    served = serve(name, precision, padded=True)
    assert served.attention.endswith("padded")
    check(name, precision, served, references, table)


@pytest.mark.parametrize(
    ("name", "precision"), long_but(ALL, [*((name, "float32") for name in USUAL), *OF_BACKBONES[1::2]])
)
def test_each_architecture_runs_the_attention_it_should(name: str, precision: str, serve: Serve) -> None:
    assert serve(name, precision).attention == ARCHITECTURES[name].attention


@pytest.mark.parametrize("name", long_but(ARCHITECTURES, USUAL))
def test_a_folder_is_served_as_its_own_files_say(name: str, serve: Serve, references: References) -> None:
    """The files decide on tokens, pooling, Dense modules and normalisation, without an option in the request."""
    served, reference = serve(name, "float32"), references(name, "float32")
    texts = ragged(served)
    assert [ids.tolist() for ids in served.tokens(texts)] == reference.ids(texts)
    agreement = Agreement.of(served.encode(texts[:8], normalize=True), reference.encode(texts[:8]))
    assert agreement.cosine >= MIN_COSINE["float32"]
    assert agreement.difference <= MAX_DIFFERENCE["float32"]


@pytest.mark.parametrize(("name", "precision"), long_but(ALL, [("modernbert", "float32"), ("deberta-v2", "float32")]))
def test_a_text_is_the_same_alone_and_with_mates(name: str, precision: str, serve: Serve) -> None:
    """Vectors are equal up to rounding. In bfloat16 another kernel may round differently, within the bound."""
    served = serve(name, precision)
    texts = ragged(served)
    together = served.encode(texts)
    alone = np.concatenate([served.encode([text]) for text in texts[:12]])
    backwards = served.encode(texts[::-1])[::-1]
    for vectors in (alone, backwards):
        agreement = Agreement.of(vectors, together[: len(vectors)])
        assert agreement.cosine >= (1 - 1e-9 if precision == "float32" else MIN_COSINE[precision])
        assert agreement.difference <= (2e-6 if precision == "float32" else MAX_DIFFERENCE[precision])


@pytest.mark.parametrize(
    ("name", "precision"), long_but(ALL, [("bert", "float32"), ("modernbert", "float32"), ("llama dynamic", "float32")])
)
def test_two_lanes_at_once_give_what_one_gives(name: str, precision: str, serve: Serve) -> None:
    served = serve(name, precision)
    texts = ragged(served)
    batches = [texts[start : start + 8] for start in range(0, 40, 8)]
    one_by_one = [served.encode(batch) for batch in batches]
    for got, expected in zip(served.encode_at_once(batches, lanes=2), one_by_one, strict=True):
        np.testing.assert_array_equal(got, expected)


def _differing_in_the_last(served: Served) -> list[Ids]:
    ids = served.tokens([" ".join(WORDS[:16])])[0]
    changed = ids.copy()
    changed[-1] = ids[-2]
    assert changed[-1] != ids[-1]
    return [ids, changed]


@pytest.mark.parametrize("name", long_but(ARCHITECTURES, USUAL))
def test_the_first_token_sees_the_last_unless_the_model_is_causal(name: str, serve: Serve) -> None:
    served = serve(name, "float32")
    before, after = served.encode_ids(_differing_in_the_last(served), pooling="cls")
    moved = float(np.abs(after - before).max() / np.linalg.norm(before))
    assert moved <= 1e-6 if ARCHITECTURES[name].causal else moved >= 1e-3


@pytest.mark.parametrize(
    ("name", "causal"),
    long_but(
        [
            ("qwen2 causal", False),
            ("qwen2 bidirectional", True),
            ("qwen3 causal", False),
            ("qwen3 bidirectional", True),
            ("llama causal", False),
            ("llama bidirectional", True),
            ("mistral causal", False),
            ("mistral bidirectional sliding", True),
            ("gemma2", False),
            ("gemma3 causal", False),
        ],
        [("qwen2 causal", False), ("mistral bidirectional sliding", True), ("gemma3 causal", False)],
    ),
)
def test_an_entry_may_turn_the_direction(name: str, causal: bool, serve: Serve, tmp_path: Path) -> None:
    """The entry acts as if the folder had its value."""
    texts, architecture = ragged(serve(name, "float32"))[:16], ARCHITECTURES[name]
    turned = serve(name, "float32", causal=causal).encode(texts, pooling="mean")
    as_if = Reference(build(tmp_path / "other", architecture, is_causal=causal), "float32")
    assert (
        Agreement.of(turned, as_if.pooled(texts, architecture.poolings)["mean"]).difference <= MAX_DIFFERENCE["float32"]
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3 bidirectional", "load.causal is true, but the model computes the opposite"),
        ("deberta-v2", "load.causal is true, but the model computes the opposite"),
        ("bert", "of a text that runs alone, but not in a batch with a longer text"),
        ("modernbert", "of a text that runs alone, but not in a batch with a longer text"),
    ],
)
def test_a_direction_that_the_class_does_not_take_is_refused(name: str, message: str, serve: Serve) -> None:
    with pytest.raises(ModelLoadFailed, match=message) as refused:
        serve(name, "float32", causal=True)
    assert refused.value.extras["error_class"] == "CERTIFICATE"


def test_a_folder_whose_texts_would_depend_on_their_mates_is_refused(tmp_path: Path) -> None:
    """The config.json of an encoder says is_causal, and the entry says nothing. Stock sdpa follows that only where
    nothing is padded.
    """
    architecture, engine = ARCHITECTURES["bert"], ParityEngine()
    folder = add_modules(build(tmp_path / "causal", architecture, is_causal=True), modules_of(architecture))
    with pytest.raises(ModelLoadFailed, match="of a text that runs alone, but not in a batch with a longer text"):
        engine.load(folder, "float32", width=architecture.width, max_tokens=MAX_TOKENS)
    engine.stop()


@pytest.mark.parametrize("name", ["gemma3 bidirectional", "gemma3 causal", "bert", "gemma2"])
def test_a_direction_that_the_class_has_anyway_may_be_said(name: str, serve: Serve) -> None:
    assert serve(name, "float32", causal=ARCHITECTURES[name].causal).attention == ARCHITECTURES[name].attention


@pytest.mark.parametrize("name", ["llama longrope", "llama dynamic"])
def test_a_rotary_embedding_that_changes_with_the_longest_text_is_refused(name: str, serve: Serve) -> None:
    """The limit is one token past the original length. At the original length the tests above cover the model."""
    with pytest.raises(ModelLoadFailed, match=f"changes past {ORIGINAL_TOKENS} tokens") as refused:
        serve(name, "float32", max_tokens=ORIGINAL_TOKENS + 1)
    assert refused.value.extras["error_class"] == "INCOMPATIBLE"


@pytest.mark.parametrize(
    ("name", "change"),
    long_but(
        [
            ("modernbert", {"local_attention": 130}),
            ("modernbert", {"local_rope_theta": 160000.0}),
            ("modernbert narrow", {"global_rope_theta": 5000.0}),
            ("modernbert narrow", {"global_attn_every_n_layers": 3}),
            ("nomic_bert", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
            ("gte", {"rope_parameters": {"rope_type": "default", "rope_theta": 160000.0}}),
            ("gemma3 bidirectional", {"sliding_window": 66}),
            ("gemma3 bidirectional", {"use_bidirectional_attention": False, "sliding_window": 33}),
            ("gemma3 causal", {"rope_local_base_freq": 1e6}),
            ("gemma2", {"attn_logit_softcapping": None}),
            ("gemma2", {"sliding_window": 65}),
            ("qwen2 causal", {"is_causal": False}),
            ("qwen2 sliding", {"sliding_window": 49}),
            ("qwen3 bidirectional", {"is_causal": True}),
            ("mistral causal", {"sliding_window": 65}),
            ("mistral bidirectional sliding", {"sliding_window": None}),
            ("mistral bidirectional sliding", {"sliding_window": 63}),
            ("llama bidirectional", {"is_causal": True}),
            ("deberta-v2", {"position_buckets": 64}),
        ],
        [
            ("modernbert", {"local_attention": 130}),
            ("gemma3 bidirectional", {"sliding_window": 66}),
            ("gemma2", {"attn_logit_softcapping": None}),
            ("qwen2 causal", {"is_causal": False}),
            ("qwen2 sliding", {"sliding_window": 49}),
            ("deberta-v2", {"position_buckets": 64}),
        ],
    ),
)
def test_a_setting_that_is_ignored_would_show(
    name: str, change: dict[str, Any], serve: Serve, references: References, tmp_path: Path
) -> None:
    """With the setting changed, the same weights are further from the reference than 10 times the bound, so the tests
    above notice a setting that is ignored.
    """
    architecture = ARCHITECTURES[name]
    texts = [" ".join(random.Random(seed).choices(WORDS, k=length)) for seed, length in enumerate((40, 80, 150, 500))]
    variant = Reference(build(tmp_path / "other", architecture, **change), "float32").pooled(
        texts, architecture.poolings
    )
    same = references(name, "float32").pooled(texts, architecture.poolings)
    assert (
        max(Agreement.of(variant[pooling], same[pooling]).difference for pooling in architecture.poolings)
        > 10 * MAX_DIFFERENCE["float32"]
    )


@pytest.mark.parametrize("name", long_but(ARCHITECTURES, USUAL))
def test_no_bias_and_no_norm_of_a_checkpoint_is_neutral(name: str, folders: Folders) -> None:
    tensors = load_file(folders(name) / "model.safetensors")
    vectors = {key: tensor for key, tensor in tensors.items() if tensor.ndim == 1}
    assert vectors
    assert [key for key, tensor in tensors.items() if tensor.std() < 0.01] == []
    assert ARCHITECTURES[name].tokenizer.ids()["pad_token_id"] != 0
