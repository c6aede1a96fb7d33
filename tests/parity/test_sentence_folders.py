"""Random folders of sentence-transformers: the adapter's vectors are those of the library, or the folder is refused
when it is added.

    seed ──► stack of modules, settings, file names ──► folder ──► library's vectors
                                                               └──► entry by inspection ──► adapter's vectors
"""

from __future__ import annotations

import inspect as introspection
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspected_models import inspected, run
from msgspec.structs import replace
from parity.checkpoints import ARCHITECTURES, WIDTH, build
from parity.checkpoints import dense as dense_module
from parity.device import new_engine
from parity.heads_checkpoints import masked, pylate, with_markers
from parity.score_checkpoints import build_head, build_reranker
from parity.test_t5 import build as build_t5
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base import modules as base_modules
from sentence_transformers.base.modules import Dense, InputModule, Normalize, Router, Transformer
from sentence_transformers.cross_encoder import modules as cross_encoder_modules
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder import modules as multi_vector_modules
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer import modules as dense_modules
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    LSTM,
    Dropout,
    LayerNorm,
    Pooling,
    StaticEmbedding,
    WeightedLayerPooling,
    WordWeights,
)
from sentence_transformers.sparse_encoder import modules as sparse_modules
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding, SpladePooling
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.modules import FIELDS
from sie_contracts.errors import ModelLoadFailed, ValidationFailed
from sie_contracts.models.entries import ModelEntry
from sie_store.folder_files import TRANSFORMER_FILES

HEADED = ("bert", "xlm-roberta", "distilbert", "mpnet", "modernbert")
BACKBONES = (*HEADED, "roberta", "electra", "qwen3 causal", "gemma3 bidirectional", "t5")
TEXTS = [
    "The river runs north.",
    "The RIVER of Paris",
    "Zürich, 東京 and 😀: (a) 3.14...",
    "Ein Fluss fließt. " * 30,
]
TOLERANCE = 1e-4  # a share of the length of a vector
QUICK, LONG = 24, 500
FLAGS = {  # pooling -> its flag in older files, in the order in which the library joins their vectors
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
POOLINGS = tuple(FLAGS)
ACTIVATIONS = (
    *(nn.Identity, nn.Identity, nn.Tanh, nn.Tanh, nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid),
    *(nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU),
    *(nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanhshrink),
)
REFUSED_ACTIVATIONS = (nn.PReLU, nn.RReLU, nn.Softmax, nn.Softmin, nn.LogSoftmax)
PROMPTS: tuple[dict[str, str], ...] = (
    *({}, {}, {}, {"query": "q: ", "document": "d: "}, {"query": "q: "}, {"retrieval": "represent: "}),
    *({"query": "q: ", "passage": "p: "}, {"corpus": "c: "}, {"document": "", "retrieval": "represent: "}),
    *({"query": "Instruct: Find it.\nQuery: "}, {"query": "{q} %s: ", "document": "{d}: "}),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine(default_compute_precision="float32")
    yield engine
    assert engine.stop(10)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds a random checkpoint of an architecture once."""
    root = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        return folder if folder.exists() else base_folder(folder, name)

    return base


def base_folder(folder: Path, name: str) -> Path:
    if name == "t5":
        build_t5(folder, "T5EncoderModel")
        return folder
    return build(folder, ARCHITECTURES[name])


def edit(path: Path, **changes: Any) -> None:
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**stored, **changes}))


def random_dense(rng: random.Random, width: int, feature: str) -> Dense:
    output = rng.choice((width, 24, 40))
    activation = rng.choice(ACTIVATIONS if rng.random() < 0.97 else REFUSED_ACTIVATIONS)()
    has_bias = rng.random() < 0.7
    torch.manual_seed(rng.randrange(1 << 30))
    return Dense(width, output, has_bias, activation, module_input_name=feature, use_residual=rng.random() < 0.2)


def random_norm(rng: random.Random, width: int) -> LayerNorm:
    torch.manual_seed(rng.randrange(1 << 30))
    layer = LayerNorm(width)
    with torch.no_grad():
        layer.norm.weight.add_(0.3 * torch.randn(width))
        layer.norm.bias.add_(0.3 * torch.randn(width))
    return layer


def random_options(rng: random.Random) -> dict[str, Any]:
    """Return random settings of a Transformer module."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["max_seq_length"] = rng.choice((12, 24, 700))
    if rng.random() < 0.2:
        options["do_lower_case"] = True
    if rng.random() < 0.03:
        options["query_length"] = 8
    if rng.random() < 0.03:
        options["document_length"] = 16
    return options


def save(rng: random.Random, library_class: Any, modules: Sequence[nn.Module], folder: Path, **options: Any) -> None:
    prompts = rng.choice(PROMPTS) if rng.random() < 0.97 else {"query": "{text}: "}
    names = [name for name in prompts if name not in ("query", "document")]
    model = library_class(
        modules=list(modules),
        prompts=prompts,
        default_prompt_name=rng.choice(names) if names and rng.random() < 0.7 else None,
        device="cpu",
        **options,
    )
    if rng.random() < 0.3:
        model.similarity_fn_name = rng.choice(library_class.SUPPORTED_SIMILARITY_FN_NAMES)
    model.save_pretrained(str(folder), create_model_card=False)


def sentence_layers(rng: random.Random, width: int) -> list[nn.Module]:
    """Return random layers that change the vector of a text."""
    widths = Widths(WIDTH, width)
    layers = []
    while rng.random() < 0.55:
        layers.append(random_module(rng, widths, ("Dense", *PLAIN)))
    return layers


def sentence_folder(rng: random.Random, base: Path, folder: Path) -> Path:
    """Save a dense encoder by the library, then change it as published folders differ."""
    options = random_options(rng)
    modules: list[nn.Module] = [Transformer(str(base), **options)]
    width = WIDTH
    while rng.random() < 0.15:
        layer = random_dense(rng, width, "token_embeddings") if rng.random() < 0.7 else Normalize("token_embeddings")
        width = getattr(layer, "out_features", width)
        modules.append(layer)
    mode: Any = rng.choice(POOLINGS)
    if rng.random() < 0.2:
        mode = tuple(rng.sample(POOLINGS, rng.choice((2, 3, 6))))
    pooling = Pooling(width, mode, include_prompt=rng.random() < 0.95)
    modules += [pooling, *sentence_layers(rng, pooling.pooling_output_dimension)]
    save(rng, SentenceTransformer, modules, folder, truncate_dim=rng.choice((None, None, None, 16, 999)))
    return changed(rng, folder, options)


def changed(rng: random.Random, folder: Path, options: dict[str, Any]) -> Path:
    """Give the folder settings and file names that older versions and other tools write."""
    settings = folder / TRANSFORMER_FILES[0]
    if rng.random() < 0.5:  # version 2 and older wrote the length, and not the task
        as_version_2(rng, folder, options)
    chance = rng.random()
    if chance < 0.1:
        edit(folder / "tokenizer_config.json", truncation_side="left")
    elif chance < 0.15:
        edit(folder / "tokenizer_config.json", model_max_length=16)
    elif chance < 0.2:
        edit(settings, tokenizer_args={"model_max_length": 10})
    elif chance < 0.24:
        edit(settings, processing_kwargs={"text": {"add_special_tokens": False}})
    elif chance < 0.28:
        edit(settings, config_kwargs={"num_hidden_layers": 1})
    elif chance < 0.32:
        listed = json.loads((folder / "modules.json").read_text())
        listed[rng.randrange(len(listed))]["type"] = "custom_st.Transformer"
        (folder / "modules.json").write_text(json.dumps(listed))
    elif chance < 0.36:
        shutil.rmtree(next(iter(folder.glob("*Pooling"))))
    elif chance < 0.4 and (dense := next(iter(folder.glob("*_Dense")), None)) is not None:
        edit(dense / "config.json", module_output_name="token_embeddings")
    elif chance < 0.5:  # the transformer in a folder of its own
        place = folder / "0_Transformer"
        place.mkdir()
        names = ("modules.json", "config_sentence_transformers.json")
        for file in [path for path in folder.iterdir() if path.is_file() and path.name not in names]:
            file.rename(place / file.name)
        listed = json.loads((folder / "modules.json").read_text())
        listed[0]["path"] = place.name
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def as_version_2(rng: random.Random, folder: Path, options: dict[str, Any]) -> None:
    (folder / TRANSFORMER_FILES[0]).unlink()
    legacy = {name: options[name] for name in ("max_seq_length", "do_lower_case") if name in options}
    if legacy:
        (folder / rng.choice(TRANSFORMER_FILES)).write_text(json.dumps(legacy))
    listed = json.loads((folder / "modules.json").read_text())
    for module in listed:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(listed))
    for place in folder.glob("*_Pooling"):
        config = json.loads((place / "config.json").read_text())
        modes = config.pop("pooling_mode")
        if isinstance(modes, str) or modes == sorted(modes, key=list(FLAGS).index):
            width = config.pop("embedding_dimension")
            flags = {flag: mode in ([modes] if isinstance(modes, str) else modes) for mode, flag in FLAGS.items()}
            (place / "config.json").write_text(json.dumps({**config, **flags, "word_embedding_dimension": width}))


def loaded(folder: Path) -> ModelEntry | str:
    """Return the entry of the folder, or the reason why it is refused."""
    try:
        entry = inspected(folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    return replace(entry, load=replace(entry.load, precision="float32"))  # T5 and Gemma have bfloat16


def vectors_of(answer: dict[str, np.ndarray], width: int) -> np.ndarray:
    """Return the only output of an encoder in the form of the library."""
    if "sparse.indices" not in answer:
        (vectors,) = answer.values()
        return vectors
    row = np.zeros(width, np.float32)
    row[answer["sparse.indices"]] = answer["sparse.values"]
    return row


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the small files of a folder, for the message of a fault."""
    files = sorted(path for path in folder.rglob("*.json") if path.stat().st_size < 800)
    return {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in files}


def compare_encoder(library_class: Any, folder: Path, engine: AdapterEngine, tolerance: float = TOLERANCE) -> str:
    """Compare the vectors of queries and of documents, in direction and length."""
    try:
        library = library_class(str(folder), device="cpu")
        options = {"convert_to_sparse_tensor": False} if library_class is SparseEncoder else {}
        expected = {
            is_query: [np.asarray(row) for row in encode(TEXTS, **options)]
            for is_query, encode in ((True, library.encode_query), (False, library.encode_document))
        }
    except Exception as error:  # noqa: BLE001  after any error of the library there is no reference
        expected, broken = {}, str(error)
    entry = loaded(folder)
    if isinstance(entry, str):
        return entry
    assert expected, f"accepted, and the library fails: {broken}"
    if any("dense" in entry.outputs and not row.any() for rows in expected.values() for row in rows):
        return "refused: a vector of zeros"  # the adapter fails such an item
    for is_query, rows in expected.items():
        for answer, row in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), rows, strict=True):
            vectors = vectors_of(answer, row.shape[-1])
            length = max(float(np.linalg.norm(row, axis=-1).max(initial=0)), 1e-3)
            assert vectors.shape == row.shape, (is_query, vectors.shape, settings_of(folder))
            difference = float(np.abs(vectors - row).max(initial=0))
            assert difference <= tolerance * length, (is_query, difference, settings_of(folder))
    return "equal"


def compare_dense(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    return compare_encoder(SentenceTransformer, sentence_folder(rng, base, folder), engine)


def compare_static(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare a table of vectors as the library saves it, or as model2vec saves it for the library."""
    words = Tokenizer.from_file(str(base / "tokenizer.json"))
    if rng.random() < 0.1:
        words.enable_truncation(8)
    torch.manual_seed(rng.randrange(1 << 30))
    width = rng.choice((WIDTH, 40))
    table = torch.randn(words.get_vocab_size(), width).to(rng.choice((torch.float32, torch.float32, torch.float16)))
    modules: list[nn.Module] = [StaticEmbedding(words, embedding_weights=table.float())]
    modules += sentence_layers(rng, width)
    save(rng, SentenceTransformer, modules, folder, truncate_dim=rng.choice((None, None, 16)))
    if rng.random() < 0.4:  # as model2vec stores it: fewer vectors than tokens, and a weight for each token
        rows = rng.randrange(5, len(table))
        mapping = torch.randint(rows, (len(table),))
        weights = {"embeddings": table[:rows].contiguous(), "mapping": mapping, "weights": torch.rand(len(table))}
        save_file(weights if rng.random() < 0.5 else {"embeddings": table}, next(folder.rglob("model.safetensors")))
    # the library adds the vectors of such a table in float16, this adapter in float32
    return compare_encoder(SentenceTransformer, folder, engine, 5e-3 if table.dtype == torch.float16 else TOLERANCE)


def compare_sparse(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    source = masked(folder.with_name(f"{folder.name}-masked"), rng.choice(("bert", "distilbert", "xlm-roberta")))
    options = random_options(rng)
    modules = [
        Transformer(str(source), transformer_task="fill-mask", **options),
        SpladePooling(rng.choice(("max", "max", "max", "sum")), rng.choice(("relu", "log1p_relu"))),
    ]
    if rng.random() < 0.2:
        modules.insert(rng.choice((1, 2)), random_module(rng, Widths(len(modules[0].tokenizer)), PLAIN))
    save(rng, SparseEncoder, modules, folder, max_active_dims=rng.choice((None, None, 16, 200)))
    if rng.random() < 0.3:
        changed(rng, folder, options)
    return compare_encoder(SparseEncoder, folder, engine)


def compare_router(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare a Router with a table for queries and a masked LM for documents, or check that another Router is
    refused.
    """
    if rng.random() < 0.4:
        sides = [[Transformer(str(base)), Pooling(WIDTH, "mean")] for _ in range(2)]
        if rng.random() < 0.5:
            router = Router.for_query_document(query_modules=sides[0], document_modules=sides[1])
        else:
            router = Router({"text": sides[0], "other": sides[1]}, route_mappings={(None, "text"): "text"})
        save(rng, SentenceTransformer, [router, *sentence_layers(rng, WIDTH)], folder)
        entry = loaded(folder)
        assert isinstance(entry, str)
        assert re.search(r"modules\.json (lists a Router of (query|text)|begins with Router)", entry)
        return entry
    source = masked(folder.with_name(f"{folder.name}-masked"), "bert")
    transformer = Transformer(str(source), transformer_task="fill-mask", do_lower_case=rng.random() < 0.2)
    torch.manual_seed(rng.randrange(1 << 30))
    words = transformer.tokenizer
    if rng.random() < 0.3:  # a tokenizer of its own
        options: dict[str, Any] = rng.choice(({}, {"model_max_length": 9}))
        words = AutoTokenizer.from_pretrained(str(source), **options)
        if not options:
            words.add_tokens(["river runs"])
    weight = torch.rand(len(words)) * (torch.rand(len(words)) < 0.9)
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(tokenizer=words, weight=weight, frozen=rng.random() < 0.5)],
        document_modules=[transformer, SpladePooling(rng.choice(("max", "sum")))],
        default_route=rng.choice((None, "document")),
    )
    save(rng, SparseEncoder, [router], folder, max_active_dims=rng.choice((None, 4, 50)))
    return compare_encoder(SparseEncoder, folder, engine)


def compare_score(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare scores of pairs. A model of several labels gives no score, and its entry has no score."""
    labels = rng.choice((1, 1, 1, 2, 3))
    source = build_head(
        folder.with_name(f"{folder.name}-base"),
        rng.choice(HEADED),
        AutoModelForSequenceClassification,
        labels,
    )
    options = {"max_length": 72} if rng.random() < 0.3 else {}
    activation = rng.choice((nn.Sigmoid(), nn.Identity(), nn.Tanh(), nn.ReLU(), nn.Softplus(), None))
    prompts = rng.choice(({}, {}, {"query": "q: "}))
    CrossEncoder(
        str(source),
        device="cpu",
        activation_fn=activation,
        prompts=prompts,
        default_prompt_name="query" if prompts and rng.random() < 0.5 else None,
        **options,
    ).save_pretrained(str(folder), create_model_card=False)
    if rng.random() < 0.3:
        edit(folder / TRANSFORMER_FILES[0], max_seq_length=64)
    return compare_scores(folder, engine, TEXTS, has_score=labels == 1)


def compare_scores(folder: Path, engine: AdapterEngine, texts: list[str], *, has_score: bool = True) -> str:
    query = "Where does the river run?"
    expected = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in texts])
    entry = loaded(folder)
    if isinstance(entry, str):
        return entry
    assert ("score" in entry.outputs) == has_score, entry
    if not has_score:
        return "refused: no score of a pair"
    assert np.abs(np.array(run(engine, entry, "score", texts, query)) - expected).max() <= 2e-5, entry
    return "equal"


def compare_multivector(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    config: dict[str, Any] = {"query_length": rng.choice((16, 48)), "document_length": rng.choice((32, 180))}
    if rng.random() < 0.5:
        config["attend_to_expansion_tokens"] = rng.random() < 0.5
    if rng.random() < 0.3:
        config["do_query_expansion"] = False
    if rng.random() < 0.3:
        config["skiplist_words"] = [".", "river"]
    if rng.random() < 0.2:
        config["prompts"] = rng.choice(PROMPTS)
    source = folder.with_name(f"{folder.name}-pylate")
    pylate(source, with_markers("bert"), [dense_module(WIDTH, 24)], config)
    if rng.random() < 0.5:  # as sentence-transformers saves it
        MultiVectorEncoder(str(source), device="cpu").save_pretrained(str(folder), create_model_card=False)
    else:
        shutil.copytree(source, folder)
    return compare_encoder(MultiVectorEncoder, folder, engine)


def compare_modules_of_rows(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare a stack of late interaction that is made of modules, with token pooling or without."""
    modules: list[nn.Module] = [Transformer(str(base), query_length=32, document_length=64)]
    width = WIDTH
    for _ in range(rng.choice((0, 1, 2))):
        layer = random_dense(rng, width, "token_embeddings")
        width = layer.out_features
        modules.append(layer)
    tail: list[nn.Module] = [MultiVectorMask(rng.choice(([], [".", "river"])))] if rng.random() < 0.9 else []
    if rng.random() < 0.8:
        tail.append(Normalize("token_embeddings"))
    rng.shuffle(tail)
    if rng.random() < 0.7:
        tail.insert(len(tail) if rng.random() < 0.8 else rng.randrange(len(tail) + 1), random_token_pooling(rng))
    if rng.random() < 0.2:
        tail.append(Normalize("token_embeddings"))
    save(rng, MultiVectorEncoder, [*modules, *tail], folder)
    return compare_encoder(MultiVectorEncoder, folder, engine)


def random_token_pooling(rng: random.Random) -> HierarchicalTokenPooling:
    return HierarchicalTokenPooling(
        rng.choice((1.0, 1.5, 2.0, 4.0)),
        num_protected_tokens=rng.choice((0, 1, 3)),
        normalize_embeddings=rng.random() < 0.7,
        tasks=rng.choice((None, ["document"], ["query", "document"])),
    )


@dataclass
class Widths:
    """Widths of the features that the modules of a stack have written. `tokens`: the rows of a text. `vector`: the
    vector of a text, 0 until a module has pooled.
    """

    tokens: int
    vector: int = 0


def random_module(rng: random.Random, widths: Widths, kinds: Sequence[str]) -> nn.Module:
    """Return a module of one of the kinds. It reads a feature of the right width, which seldom does not exist."""
    kind = rng.choice(kinds)
    is_pooled = bool(widths.vector) != (rng.random() < 0.05)
    feature, width = ("sentence_embedding", widths.vector) if is_pooled else ("token_embeddings", widths.tokens)
    width = width or WIDTH
    if kind == "Dense":
        layer = random_dense(rng, width, feature)
        setattr(widths, "vector" if is_pooled else "tokens", layer.out_features)
        return layer
    if kind == "Normalize":
        return Normalize(feature)
    if kind == "Dropout":
        return Dropout(0.3)
    if kind == "LayerNorm":
        return random_norm(rng, width)
    if kind == "Pooling":
        pooling = Pooling(widths.tokens, rng.choice(POOLINGS))
        widths.vector = pooling.pooling_output_dimension
        return pooling
    if kind == "SpladePooling":
        widths.vector = widths.tokens
        return SpladePooling()
    if kind == "SparseAutoEncoder":
        widths.vector = 128
        return SparseAutoEncoder(width, hidden_dim=128, k=8, k_aux=16)
    if kind == "MultiVectorMask":
        return MultiVectorMask(
            rng.choice(([], [".", "river"])),
            skiplist_tasks=rng.choice((None, ["query", "document"])),
            keep_only_token_ids=rng.choice((None, None, [5, 6, 7, 8, 9])),
        )
    if kind == "HierarchicalTokenPooling":
        return random_token_pooling(rng)
    if kind == "CNN":
        layer = CNN(widths.tokens, 16, [1, 3])
        widths.tokens = 32
        return layer
    if kind == "LSTM":
        widths.tokens = 32
        return LSTM(width, 16)
    if kind == "WordWeights":
        return WordWeights(["river", "the"], {"river": 2.0})
    assert kind == "WeightedLayerPooling"
    return WeightedLayerPooling(widths.tokens, num_hidden_layers=3, layer_start=1)


PLAIN = ("Dense", "Normalize", "Dropout", "LayerNorm")
OF_TOKENS = ("MultiVectorMask", "HierarchicalTokenPooling", "CNN", "LSTM", "WordWeights", "WeightedLayerPooling")


def compare_stack(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare modules of all kinds in any order, saved and loaded by any class of the library."""
    library_class = rng.choice((SentenceTransformer, SparseEncoder, MultiVectorEncoder))
    widths = Widths(WIDTH)
    if library_class is SparseEncoder and rng.random() < 0.7:
        base = masked(folder.with_name(f"{folder.name}-masked"), "bert")
        modules: list[nn.Module] = [Transformer(str(base), transformer_task="fill-mask", **random_options(rng))]
        widths = Widths(len(modules[0].tokenizer))
    else:
        modules = [Transformer(str(base), **random_options(rng))]
    while rng.random() < 0.3:
        modules.append(random_module(rng, widths, (*PLAIN, *OF_TOKENS)))
    if library_class is not MultiVectorEncoder or rng.random() < 0.1:
        pooling = "SpladePooling" if widths.tokens > 2 * WIDTH else "Pooling"
        modules.append(random_module(rng, widths, (pooling,)))
    while rng.random() < 0.6:
        modules.append(random_module(rng, widths, (*PLAIN, *PLAIN, *OF_TOKENS, "Pooling", "SparseAutoEncoder")))
    limits: dict[str, Any] = {SentenceTransformer: {"truncate_dim": 16}, SparseEncoder: {"max_active_dims": 7}}
    save(rng, library_class, modules, folder, **(limits.get(library_class, {}) if rng.random() < 0.3 else {}))
    return compare_encoder(library_class, folder, engine)


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
STRIPPED = CHAT.replace("message.content", "message.content | trim")


def compare_chat(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """Compare a decoder that reads a pair by a chat template. It scores by the logits of two tokens, or by a head."""
    source = folder.with_name(f"{folder.name}-chat")
    template = CHAT if rng.random() < 0.8 else STRIPPED
    prompts = {"web": "Judge the document."} if rng.random() < 0.5 else {}
    if rng.random() < 0.7:
        build_reranker(source, "qwen3 causal")
        (source / "chat_template.jinja").write_text(template)
        tokenizer = AutoTokenizer.from_pretrained(source)
        yes, no = (tokenizer(word)["input_ids"][0] for word in ("yes", "no"))
        options = {"processing_kwargs": {"chat_template": {"add_generation_prompt": rng.random() < 0.7}}}
        modules = [
            Transformer(str(source), transformer_task="text-generation", **options),
            LogitScore(yes, no if rng.random() < 0.7 else None),
        ]
        model = CrossEncoder(
            modules=modules,
            device="cpu",
            activation_fn=rng.choice((nn.Sigmoid(), nn.Identity())),
            prompts=prompts,
            default_prompt_name="web" if prompts else None,
        )
        model.save_pretrained(str(folder), create_model_card=False)
    else:
        build_reranker(folder, "qwen3 causal", head=AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
        (folder / "chat_template.jinja").write_text(template)
    return compare_scores(folder, engine, TEXTS[:3])


COMPARISONS = (
    *([compare_dense] * 6),
    *(
        compare_router,
        compare_static,
        compare_sparse,
        compare_score,
        compare_chat,
        compare_multivector,
        compare_modules_of_rows,
        compare_stack,
    ),
)


def compare(seed: int, base_of: Callable[[str], Path], folder: Path, engine: AdapterEngine) -> str:
    rng = random.Random(seed)
    comparison = COMPARISONS[seed % len(COMPARISONS)]
    return comparison(rng, base_of(rng.choice(BACKBONES)), folder, engine)


def test_random_folders_are_served_as_the_library_serves_them_or_refused(
    bases: Callable[[str], Path], tmp_path: Path, engine: AdapterEngine
) -> None:
    outcomes = check(range(QUICK), bases, tmp_path, engine)
    assert outcomes["equal"] >= QUICK // 2


@pytest.mark.long
def test_500_random_folders_are_served_as_the_library_serves_them_or_refused(
    bases: Callable[[str], Path], tmp_path: Path, engine: AdapterEngine
) -> None:
    outcomes = check(range(QUICK, QUICK + LONG), bases, tmp_path, engine)
    print(dict(outcomes))
    assert outcomes["equal"] >= LONG // 2


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([Dense(40, 24)], f"a Dense of the model reads vectors of 40 numbers, but gets {WIDTH} numbers"),
        (
            [Dense(WIDTH, 24), LayerNorm(WIDTH)],
            f"a LayerNorm of the model reads vectors of {WIDTH} numbers, but gets 24",
        ),
        ([Dense(WIDTH, 24), Dense(WIDTH, 24)], f"a Dense of the model reads vectors of {WIDTH} numbers, but gets 24"),
    ],
    ids=["first layer", "norm after a layer", "layer after a layer"],
)
def test_a_folder_whose_layers_do_not_fit_each_other_is_refused(
    layers: list[nn.Module], fault: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    modules = [Transformer(str(bases("bert"))), Pooling(WIDTH, "mean"), *layers]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path), create_model_card=False)
    refusal = loaded(tmp_path)
    assert isinstance(refusal, str)
    assert fault in refusal


def test_a_model_whose_config_has_minus_1_positions_has_no_limit_of_them(tmp_path: Path, engine: AdapterEngine) -> None:
    sizes = {"d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 96, "initializer_range": 0.15}
    base = build(tmp_path / "base", dataclass_replace(ARCHITECTURES["bert"], model_type="xlnet", config=sizes))
    model = SentenceTransformer(modules=[Transformer(str(base)), Pooling(WIDTH, "mean")], device="cpu")
    model.save_pretrained(str(tmp_path / "folder"), create_model_card=False)
    assert compare_encoder(SentenceTransformer, tmp_path / "folder", engine) == "equal"


@pytest.mark.parametrize("layers", [[], [Dense(24, 16)]], ids=["pooled", "dense"])
def test_states_that_the_transformer_projects_to_another_width_are_pooled(
    layers: list[nn.Module], tmp_path: Path, engine: AdapterEngine
) -> None:
    sizes = {
        "hidden_size": WIDTH,
        "word_embed_proj_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "init_std": 0.15,
    }
    base = build(tmp_path / "base", dataclass_replace(ARCHITECTURES["bert"], model_type="opt", config=sizes))
    modules = [Transformer(str(base)), Pooling(24, "mean"), *layers]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save_pretrained(str(tmp_path / "folder"), create_model_card=False)
    assert compare_encoder(SentenceTransformer, tmp_path / "folder", engine) == "equal"


def check(seeds: range, bases: Callable[[str], Path], tmp_path: Path, engine: AdapterEngine) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        folder = tmp_path / f"folder-{seed}"
        try:
            outcomes[compare(seed, bases, folder, engine)] += 1
        except AssertionError as error:
            faults.append(f"seed {seed}: {str(error)[:400]}")
        for place in tmp_path.glob(f"folder-{seed}*"):
            shutil.rmtree(place)
    assert not faults, "\n".join(faults)
    return outcomes


def modules_of_the_library() -> list[type[nn.Module]]:
    """The classes that modules.json may list, of all kinds of models."""
    packages = (base_modules, cross_encoder_modules, dense_modules, multi_vector_modules, sparse_modules)
    named = {name: getattr(package, name) for package in packages for name in package.__all__}
    return [kind for kind in named.values() if not introspection.isabstract(kind)]


@pytest.mark.parametrize("module", modules_of_the_library(), ids=lambda kind: kind.__name__)
def test_each_module_of_the_installed_library_is_read_or_refused_by_name(module: Any, tmp_path: Path) -> None:
    """A module of a newer library that is not refused by name, or a setting that FIELDS lacks, fails this test."""
    if module.__name__ in FIELDS:
        own = {"self", "model_name_or_path", "backend", "init_weight", "init_bias"}  # arguments that no file has
        arguments = set(introspection.signature(module.__init__).parameters) - own - {"args", "kwargs"}
        assert (arguments | set(module.config_keys)) <= FIELDS[module.__name__]
        return
    if module.__name__ in ("StaticEmbedding", "Router", "MLMTransformer"):
        return  # see compare_static and compare_router; the third is a Transformer for fill-mask
    folder = build(tmp_path / "folder", ARCHITECTURES["bert"])
    is_first = issubclass(module, InputModule)
    listed = [Transformer] if is_first else [Transformer, Pooling]
    listed.insert(0 if is_first else 1, module)
    rows = [{"path": "", "type": f"{kind.__module__}.{kind.__name__}"} for kind in listed]
    (folder / "modules.json").write_text(json.dumps(rows))
    with pytest.raises(ModelLoadFailed, match=rf"modules\.json (begins with|lists a) {module.__name__}\b"):
        inspected(folder)
