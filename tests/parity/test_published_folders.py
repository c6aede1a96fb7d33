"""Folders as people publish them, which other servers have served wrongly: their numbers are those of the library, or
they are refused by name when they are added.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspected_models import inspected, run
from parity.checkpoints import ARCHITECTURES, NORMALIZE, WIDTH, Module, add_modules, build, dense, modules_of, pooling
from parity.device import new_engine
from parity.heads_checkpoints import masked
from parity.score_checkpoints import build_reranker
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BartConfig, BartModel

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed

TEXTS = ["The river runs north.", "The RIVER of Paris", "", "Ein Fluss fließt nach Norden. " * 12]
QUERY = "Where does the river run?"
BACKBONES = ("bert", "xlm-roberta", "qwen3 causal")  # a tokenizer of each kind
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine(default_compute_precision="float32")
    yield engine
    assert engine.stop(10)


def edit(path: Path, **changes: Any) -> None:
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**stored, **changes}))


def encoder(folder: Path, backbone: str, *modules: Module) -> Path:
    architecture = ARCHITECTURES[backbone]
    return add_modules(build(folder, architecture), modules or modules_of(architecture))


# folders that are served as the library serves them


def normalised_before_a_dense(folder: Path, backbone: str) -> None:
    encoder(folder, backbone, pooling("mean"), NORMALIZE, dense(WIDTH, 24, bias=True, activation=nn.Tanh))


def normalised_twice(folder: Path, backbone: str) -> None:
    encoder(folder, backbone, pooling("mean"), NORMALIZE, dense(WIDTH, 24, bias=True, activation=nn.Tanh), NORMALIZE)


def limit_in_a_file_of_another_name(folder: Path, backbone: str) -> None:
    encoder(folder, backbone)
    (folder / "sentence_bert_config.json").unlink()
    edit(folder / "sentence_xlm-roberta_config.json", max_seq_length=24)


def lowercased(folder: Path, backbone: str) -> None:
    edit(encoder(folder, backbone) / "sentence_bert_config.json", do_lower_case=True)


def cut_on_the_left(folder: Path, backbone: str) -> None:
    encoder(folder, backbone)
    edit(folder / "tokenizer_config.json", truncation_side="left")
    edit(folder / "sentence_bert_config.json", max_seq_length=16)


def fewer_numbers(folder: Path, backbone: str) -> None:
    edit(encoder(folder, backbone) / "config_sentence_transformers.json", truncate_dim=16)


def dropped_out(folder: Path, backbone: str) -> None:
    encoder(folder, backbone, pooling("mean"), Module("Dropout", {"dropout": 0.3}), NORMALIZE)


@pytest.mark.parametrize(
    ("make", "backbone"),
    [
        *(
            (make, backbone)
            for make in (limit_in_a_file_of_another_name, lowercased, cut_on_the_left)
            for backbone in BACKBONES
        ),
        *((make, "bert") for make in (normalised_before_a_dense, normalised_twice, fewer_numbers, dropped_out)),
    ],
)
def test_vectors_are_those_of_the_library(
    make: Callable[[Path, str], None], backbone: str, tmp_path: Path, engine: AdapterEngine
) -> None:
    """The vectors are equal alone and in a batch of texts of all lengths."""
    folder = tmp_path / "folder"
    make(folder, backbone)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    entry = inspected(folder)
    for vector, answer in zip(expected, run(engine, entry, "encode", TEXTS), strict=True):
        np.testing.assert_allclose(answer["dense"], vector, atol=2e-5)
    for text, vector in zip(TEXTS, expected, strict=True):
        np.testing.assert_allclose(run(engine, entry, "encode", [text])[0]["dense"], vector, atol=2e-5)


@pytest.mark.parametrize("most", [16, 100_000])
def test_the_largest_entries_of_a_sparse_vector_are_those_of_the_library(
    most: int, tmp_path: Path, engine: AdapterEngine
) -> None:
    folder = tmp_path / "folder"
    transformer = Transformer(str(masked(tmp_path / "masked", "bert")), transformer_task="fill-mask")
    SparseEncoder(modules=[transformer, SpladePooling("max")], max_active_dims=most, device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )
    expected = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    for answer, row in zip(run(engine, inspected(folder), "encode", TEXTS), expected, strict=True):
        vector = np.zeros_like(row)
        vector[answer["sparse.indices"]] = answer["sparse.values"]
        assert np.count_nonzero(vector) <= most
        np.testing.assert_allclose(vector, row, atol=2e-5)


def classifier_with_a_chat_template(folder: Path) -> None:
    build_reranker(folder, "qwen3 causal", head=AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    (folder / "chat_template.jinja").write_text(CHAT)


def score_of_two_tokens(folder: Path) -> None:
    source = folder.with_name("source")
    build_reranker(source, "qwen3 causal")
    (source / "chat_template.jinja").write_text(CHAT)
    tokenizer = AutoTokenizer.from_pretrained(source)
    yes, no = (tokenizer(word)["input_ids"][0] for word in ("yes", "no"))
    transformer = Transformer(
        str(source),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    CrossEncoder(modules=[transformer, LogitScore(yes, no)], device="cpu").save_pretrained(
        str(folder), create_model_card=False
    )


@pytest.mark.parametrize("make", [classifier_with_a_chat_template, score_of_two_tokens])
def test_scores_of_pairs_in_a_chat_template_are_those_of_the_library(
    make: Callable[[Path], None], tmp_path: Path, engine: AdapterEngine
) -> None:
    folder = tmp_path / "folder"
    make(folder)
    texts = [text for text in TEXTS if text]
    expected = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in texts])
    scores = run(engine, inspected(folder), "score", texts, QUERY)
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert list(np.argsort(scores)) == list(np.argsort(expected))


# folders that are refused


def without_the_folder_of_its_pooling(folder: Path) -> None:
    shutil.rmtree(encoder(folder, "bert") / "1_Pooling")


def pickled(folder: Path) -> None:
    encoder(folder, "bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_dense(folder: Path) -> None:
    encoder(folder, "bert", pooling("mean"), dense(WIDTH, 24))
    torch.save(load_file(folder / "2_Dense/model.safetensors"), folder / "2_Dense/pytorch_model.bin")
    (folder / "2_Dense/model.safetensors").unlink()


def static(folder: Path) -> None:
    folder.mkdir()
    kind = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    save_file({"embedding.weight": torch.zeros(8, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def distilled(folder: Path) -> None:
    """Write the folder as model2vec does."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "model2vec", "architectures": ["StaticModel"]}')
    save_file({"embeddings": torch.zeros(8, 4)}, folder / "model.safetensors")


def encoder_with_a_decoder(folder: Path) -> None:
    size = {"d_model": WIDTH, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 600}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    encoder(folder, "bert")
    BartModel(BartConfig(**size, **layers)).save_pretrained(folder)


def pooled_by(**config: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        encoder(folder, "bert")
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **config}))

    return make


def quantised_by(**config: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        edit(encoder(folder, "bert") / "config.json", quantization_config=config)

    return make


def matrices_in(precision: torch.dtype) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        file = encoder(folder, "bert") / "model.safetensors"
        tensors = {
            name: tensor.to(precision) if ".query.weight" in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})

    return make


def adapter_beside_its_base(folder: Path) -> None:
    edit(encoder(folder, "bert") / "adapter_config.json", peft_type="LORA", base_model_name_or_path="org/base")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(without_the_folder_of_its_pooling, "1_Pooling, which has no config.json", id="pooling lost"),
        pytest.param(pickled, "no \\*.safetensors: convert it with python", id="pickled"),
        pytest.param(pickled_dense, "2_Dense has pytorch_model.bin.*convert it with python", id="pickled dense"),
        pytest.param(static, "has no tokenizer.json", id="static"),
        pytest.param(distilled, "has no tokenizer.json", id="model2vec"),
        pytest.param(encoder_with_a_decoder, "bart is an encoder-decoder model", id="bart"),
        pytest.param(pooled_by(pooling_mode=["mean"] * 7), "at most 6 of them joined", id="seven poolings"),
        pytest.param(pooled_by(pooling_mode=["mean", "median"]), "is mean\\+median, expected one of", id="median"),
        pytest.param(
            pooled_by(pooling_mode_mean_tokens=True, include_prompt=False), "include_prompt", id="without its prompt"
        ),
        pytest.param(
            quantised_by(quant_method="compressed-tensors", format="pack-quantized", config_groups={}),
            "its weights are quantised by compressed-tensors",
            id="compressed-tensors",
        ),
        pytest.param(quantised_by(quant_method="gptq", bits=4), "its weights are quantised by gptq", id="gptq"),
        pytest.param(
            quantised_by(quant_method="bitsandbytes", load_in_4bit=True),
            "its weights are quantised by bitsandbytes",
            id="bitsandbytes",
        ),
        pytest.param(matrices_in(torch.int8), "query.weight in int8, and config.json has no quant", id="int8"),
        pytest.param(matrices_in(torch.float8_e4m3fn), "query.weight in float8_e4m3fn", id="float8"),
        pytest.param(adapter_beside_its_base, "adapter_config.json beside config.json", id="adapter beside its base"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(make: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    make(folder)
    with pytest.raises(ModelLoadFailed, match=text) as refused:
        inspected(folder)
    assert refused.value.extras["error_class"] in ("INCOMPATIBLE", "NOT_FOUND")
