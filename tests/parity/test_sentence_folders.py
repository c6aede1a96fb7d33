"""Random folders of sentence-transformers: our vectors are those of the library, or the folder is refused when it is
added.

    seed ──► stack of modules, settings, file names ──► folder ──► library's vectors
                                                               └──► entry by inspection ──► our vectors
"""

from __future__ import annotations

import inspect as introspection
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from inspected_models import inspected, run
from parity.checkpoints import ARCHITECTURES, WIDTH, build
from parity.checkpoints import dense as dense_module
from parity.device import new_engine
from parity.heads_checkpoints import masked, pylate, with_markers
from parity.score_checkpoints import build_head, build_reranker
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.modules import FIELDS
from sie_contracts.errors import ModelLoadFailed, ValidationFailed
from sie_contracts.models.entries import ModelEntry
from sie_store.folder_files import TRANSFORMER_FILES

BACKBONES = ("bert", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen3 causal")
TEXTS = [
    "The river runs north.",
    "The RIVER of Paris",
    "Zürich, 東京 and 😀: (a) 3.14...",
    "Ein Fluss fließt. " * 30,
]
COSINE = 0.99999
QUICK, LONG = 26, 500
POOLINGS = ("cls", "mean", "lasttoken", "weightedmean", "max", "mean_sqrt_len_tokens")


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine(default_compute_precision="float32")
    yield engine
    assert engine.stop(10)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random checkpoint of an architecture, built once."""
    root = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        return folder if folder.exists() else build(folder, ARCHITECTURES[name])

    return base


def edit(path: Path, **changes: Any) -> None:
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**stored, **changes}))


def random_dense(rng: random.Random, width: int, feature: str) -> Dense:
    output = rng.choice((width, 24, 40))
    activation = rng.choice((nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Mish, nn.Softplus, nn.PReLU))()
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


def sentence_folder(rng: random.Random, base: Path, folder: Path) -> Path:
    """A dense encoder as the library saves it, then changed as published folders differ."""
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["max_seq_length"] = rng.choice((12, 24, 700))
    if rng.random() < 0.2:
        options["do_lower_case"] = True
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
    modules.append(pooling)
    width = pooling.pooling_output_dimension
    while rng.random() < 0.55:
        kind = rng.random()
        if kind < 0.5:
            layer = random_dense(rng, width, "sentence_embedding")
            width = layer.out_features
            modules.append(layer)
        else:
            modules.append(Normalize() if kind < 0.8 else Dropout(0.3) if kind < 0.9 else random_norm(rng, width))
    prompts = rng.choice(({}, {}, {"query": "q: ", "document": "d: "}, {"query": "q: "}, {"retrieval": "represent: "}))
    default = "retrieval" if "retrieval" in prompts and rng.random() < 0.7 else None
    model = SentenceTransformer(
        modules=modules,
        prompts=prompts,
        default_prompt_name=default,
        truncate_dim=rng.choice((None, None, None, 16, 999)),
        device="cpu",
    )
    model.save_pretrained(str(folder), create_model_card=False)
    return changed(rng, folder, options)


def changed(rng: random.Random, folder: Path, options: dict[str, Any]) -> Path:
    """The folder with settings and file names that older versions and other tools write."""
    settings = folder / TRANSFORMER_FILES[0]
    if rng.random() < 0.5:  # as version 2 and older wrote it: the length is there, the task is not
        settings.unlink()
        legacy = {name: options[name] for name in ("max_seq_length", "do_lower_case") if name in options}
        if legacy:
            (folder / rng.choice(TRANSFORMER_FILES)).write_text(json.dumps(legacy))
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
    return folder


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    lengths = np.linalg.norm(left) * np.linalg.norm(right)
    return 1.0 if lengths == 0 and not left.any() and not right.any() else float(left @ right / max(lengths, 1e-30))


def added(rng: random.Random, folder: Path) -> ModelEntry:
    """The entry of a folder. Four of five run on torch, since compiling a graph is nine tenths of a load."""
    entry = inspected(folder)
    if rng.random() < 0.2:
        return entry
    return msgspec.structs.replace(entry, load=msgspec.structs.replace(entry.load, engine="torch"))


def compare_dense(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    sentence_folder(rng, base, folder)
    try:
        library = SentenceTransformer(str(folder), device="cpu")
        has_document = bool(library.prompts.get("document"))
        expected = {
            False: library.encode(TEXTS, prompt_name="document" if has_document else None),
            True: library.encode_query(TEXTS),
        }
    except Exception as error:  # noqa: BLE001  whatever the library raises: then there is no reference
        expected, broken = {}, str(error)
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    assert expected, f"accepted, and the library fails: {broken}"
    for is_query, vectors in expected.items():
        for answer, vector in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), vectors, strict=True):
            assert answer["dense"].shape == vector.shape
            assert cosine(answer["dense"], vector) >= COSINE, (is_query, entry)
    return "equal"


def compare_static(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """A table of vectors as the library saves it, or as model2vec saves it for the library."""
    words = Tokenizer.from_file(str(base / "tokenizer.json"))
    torch.manual_seed(rng.randrange(1 << 30))
    width = rng.choice((WIDTH, 40))
    table = torch.randn(words.get_vocab_size(), width).to(rng.choice((torch.float32, torch.float32, torch.float16)))
    modules: list[nn.Module] = [StaticEmbedding(words, embedding_weights=table.float())]
    while rng.random() < 0.5:
        kind = rng.random()
        layer = (
            random_dense(rng, width, "sentence_embedding")
            if kind < 0.4
            else (Normalize() if kind < 0.7 else Dropout(0.3) if kind < 0.8 else random_norm(rng, width))
        )
        width = getattr(layer, "out_features", width)
        modules.append(layer)
    prompts = rng.choice(({}, {}, {"query": "q: ", "document": "d: "}))
    model = SentenceTransformer(
        modules=modules, prompts=prompts, truncate_dim=rng.choice((None, None, 16)), device="cpu"
    )
    model.save_pretrained(str(folder), create_model_card=False)
    if rng.random() < 0.4:  # as model2vec stores it: fewer vectors than tokens, and a weight for each token
        rows = rng.randrange(5, len(table))
        mapping = torch.randint(rows, (len(table),))
        weights = {"embeddings": table[:rows].contiguous(), "mapping": mapping, "weights": torch.rand(len(table))}
        save_file(weights if rng.random() < 0.5 else {"embeddings": table}, next(folder.rglob("model.safetensors")))
    library = SentenceTransformer(str(folder), device="cpu")
    expected = {
        False: library.encode(TEXTS, prompt_name="document" if prompts else None),
        True: library.encode_query(TEXTS),
    }
    try:
        entry = inspected(folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    for is_query, vectors in expected.items():
        for answer, vector in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), vectors, strict=True):
            assert answer["dense"].shape == vector.shape
            assert cosine(answer["dense"], vector) >= COSINE, (is_query, entry)
            assert np.linalg.norm(answer["dense"]) == pytest.approx(np.linalg.norm(vector), rel=1e-3)
    return "equal"


def compare_sparse(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    source = masked(folder.with_name(f"{folder.name}-masked"), rng.choice(("bert", "distilbert")))
    transformer = Transformer(str(source), transformer_task="fill-mask")
    pooling = SpladePooling(rng.choice(("max", "max", "max", "sum")), rng.choice(("relu", "log1p_relu")))
    most = rng.choice((None, None, 16, 200))
    SparseEncoder(modules=[transformer, pooling], max_active_dims=most, device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )
    if rng.random() < 0.3:
        changed(rng, folder, {})
    try:
        library = SparseEncoder(str(folder), device="cpu")
        vectors = library.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    except Exception:  # noqa: BLE001
        vectors = None
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    assert vectors is not None
    for answer, row in zip(run(engine, entry, "encode", TEXTS), vectors, strict=True):
        vector = np.zeros_like(row)
        vector[answer["sparse.indices"]] = answer["sparse.values"]
        assert cosine(vector, row) >= COSINE
    return "equal"


def compare_score(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    source = build_head(
        folder.with_name(f"{folder.name}-base"), rng.choice(BACKBONES[:5]), AutoModelForSequenceClassification
    )
    options = {"max_length": 72} if rng.random() < 0.3 else {}
    activation = rng.choice((nn.Sigmoid(), nn.Identity(), nn.Tanh()))
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
    query = "Where does the river run?"
    expected = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in TEXTS])
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    assert np.abs(np.array(run(engine, entry, "score", TEXTS, query)) - expected).max() <= 1e-5, entry
    return "equal"


def compare_multivector(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    config: dict[str, Any] = {"query_length": rng.choice((16, 48)), "document_length": rng.choice((32, 180))}
    if rng.random() < 0.5:
        config["attend_to_expansion_tokens"] = rng.random() < 0.5
    if rng.random() < 0.3:
        config["do_query_expansion"] = False
    if rng.random() < 0.3:
        config["skiplist_words"] = [".", "river"]
    source = folder.with_name(f"{folder.name}-pylate")
    pylate(source, with_markers("bert"), [dense_module(WIDTH, 24)], config)
    if rng.random() < 0.5:  # as sentence-transformers saves it
        MultiVectorEncoder(str(source), device="cpu").save_pretrained(str(folder), create_model_card=False)
    else:
        shutil.copytree(source, folder)
    library = MultiVectorEncoder(str(folder), device="cpu")
    expected = {True: library.encode_query(TEXTS), False: library.encode_document(TEXTS)}
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    for is_query, rows in expected.items():
        for answer, vectors in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), rows, strict=True):
            assert answer["multivector"].shape == tuple(vectors.shape), (is_query, config)
            assert np.abs(answer["multivector"] - np.asarray(vectors)).max() <= 2e-5
    return "equal"


def compare_modules_of_rows(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """A stack of late interaction that is made of modules, with token pooling or without."""
    modules: list[nn.Module] = [Transformer(str(base), query_length=32, document_length=64)]
    width = WIDTH
    for _ in range(rng.choice((0, 1, 2))):
        layer = random_dense(rng, width, "token_embeddings")
        width = layer.out_features
        modules.append(layer)
    tail: list[nn.Module] = [MultiVectorMask(rng.choice(([], [".", "river"])))]
    if rng.random() < 0.8:
        tail.append(Normalize("token_embeddings"))
    rng.shuffle(tail)
    if rng.random() < 0.7:
        tasks = rng.choice((None, ["document"], ["query", "document"]))
        pooling = HierarchicalTokenPooling(
            rng.choice((1.0, 1.5, 2.0, 4.0)),
            num_protected_tokens=rng.choice((0, 1, 3)),
            normalize_embeddings=rng.random() < 0.7,
            tasks=tasks,
        )
        tail.insert(len(tail) if rng.random() < 0.8 else rng.randrange(len(tail)), pooling)
    if rng.random() < 0.2:
        tail.append(Normalize("token_embeddings"))
    model = MultiVectorEncoder(modules=[*modules, *tail], device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    library = MultiVectorEncoder(str(folder), device="cpu")
    expected = {True: library.encode_query(TEXTS), False: library.encode_document(TEXTS)}
    for is_query, rows in expected.items():
        for answer, vectors in zip(run(engine, entry, "encode", TEXTS, is_query=is_query), rows, strict=True):
            assert answer["multivector"].shape == tuple(vectors.shape), (is_query, model)
            assert np.abs(answer["multivector"] - np.asarray(vectors)).max() <= 2e-5, (is_query, model)
    return "equal"


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
STRIPPED = CHAT.replace("message.content", "message.content | trim")


def compare_chat(rng: random.Random, base: Path, folder: Path, engine: AdapterEngine) -> str:
    """A decoder that scores by the logits of two tokens, or by a head, and reads a pair through a chat template."""
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
            LogitScore(yes, no if rng.random() < 0.85 else None),
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
    query = "Where does the river run?"
    expected = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in TEXTS[:3]])
    try:
        entry = added(rng, folder)
    except (ModelLoadFailed, ValidationFailed) as error:
        return f"refused: {error}"
    assert np.abs(np.array(run(engine, entry, "score", TEXTS[:3], query)) - expected).max() <= 2e-5, entry
    return "equal"


COMPARISONS = (
    *([compare_dense] * 6),
    *(compare_static, compare_sparse, compare_score, compare_chat, compare_multivector, compare_modules_of_rows),
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


@pytest.mark.parametrize(
    "module",
    [
        Transformer,
        Pooling,
        Dense,
        Normalize,
        Dropout,
        LayerNorm,
        SpladePooling,
        MultiVectorMask,
        HierarchicalTokenPooling,
        LogitScore,
    ],
)
def test_each_setting_of_the_installed_library_is_read_or_refused(module: Any) -> None:
    """A setting of a newer library that is in no list fails here, so that somebody decides what it means."""
    own = {"self", "model_name_or_path", "backend", "init_weight", "init_bias"}  # arguments that no file has
    arguments = set(introspection.signature(module.__init__).parameters) - own - {"args", "kwargs"}
    assert (arguments | set(module.config_keys)) <= FIELDS[module.__name__]
