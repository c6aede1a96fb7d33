"""LoRAs through the adapter against PEFT on the same base: random matrices, saved by `save_pretrained`.

build ──► base folder ──► get_peft_model, random A and B ──► LoRA folder ──► Engine.ensure_lora, RunBatch(lora=)
                                                                     └────► PeftModel.from_pretrained, one text at a
                                                                     time
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import cosines, ragged_texts
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, WIDTH, build
from parity.device import SIXTEEN, new_engine
from parity.table import Agreement, ParityTable, Scores, path_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from selection import long_but
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.linear import BlockedLinear
from sie_contracts.errors import ErrorInfo, LoraLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.ipc import BatchDone, Refused, Reply, RunBatch
from sie_contracts.wire.messages import Input, Ok, RunOptions
from sie_sidecar.prepare import layouts, rows
from sie_sidecar.prepare.rows import ModelTokenizer, WorkItemInput

# the linear layers of attention and of the MLP, by architecture
LAYERS = {
    "bert": (["query", "key", "value", "attention.output.dense"], ["intermediate.dense", "output.dense"]),
    "modernbert": (["Wqkv", "Wo"], ["Wi"]),
    "qwen3 causal": (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]),
    "mpnet": (["attn.q", "attn.k", "attn.v", "attn.o"], ["intermediate.dense", "output.dense"]),
}
PARTS = ("attention", "mlp", "both")
TEXTS = [*ragged_texts(11, seed=5, longest=200), "", "Zürich, 東京 and 😀"]
MAX_DIFFERENCE = 1e-5
BFLOAT16_COSINE = 0.999
KEPT = 5

# PEFT reads this attribute of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Folders = Callable[..., Path]


def every_layer(kind: str) -> list[str]:
    attention, mlp = LAYERS[kind]
    return attention + mlp


@dataclass(frozen=True)
class Served:
    """A base model in the engine, and its answers for TEXTS, or for pairs of the first text with each text."""

    engine: AdapterEngine
    entry: ModelEntry

    @property
    def weights(self) -> Any:
        with self.engine.residency.use(self.entry.id) as resident:
            return resident.weights

    def load(self, folder: Path | str) -> str:
        """Load a LoRA and return its name."""
        self.engine.ensure_lora(self.entry.id, str(folder))
        return str(folder)

    def message(self, lora: str = "", texts: Sequence[str] = TEXTS) -> RunBatch:
        tokenizer = ModelTokenizer(self.weights.tokenizer, MAX_TOKENS)
        operation = self.entry.tasks[0]
        options = RunOptions(outputs=() if operation == "score" else ("dense",), normalize=False)
        query = Input(TEXTS[0]) if operation == "score" else None
        work, layout = WorkItemInput([Input(text) for text in texts], query, options), self.weights.rows[operation]
        (work_rows,) = layouts.make(tokenizer, layout, [work])
        return rows.to_batch(
            "lora", self.entry.id, operation, layout.layout, [rows.BatchPart(work_rows.rows, work)], lora=lora
        )

    def answers(self, lora: str = "", texts: Sequence[str] = TEXTS) -> np.ndarray:
        """Return float32 [texts, width], or scores float64 [texts]."""
        with torch.inference_mode():
            return self.read(self.engine.execute(self.message(lora, texts)))

    @staticmethod
    def read(reply: Reply) -> np.ndarray:
        assert isinstance(reply, BatchDone), reply
        good = [outcome for outcome in reply.outcomes if isinstance(outcome, Ok)]
        assert len(good) == len(reply.outcomes)
        if good[0].score is not None:
            return np.array([outcome.score for outcome in good])
        return np.frombuffer(reply.block, "<f4").reshape(len(good), -1).copy()

    def refusal(self, lora: str) -> ErrorInfo:
        with torch.inference_mode():
            reply = self.engine.execute(self.message(lora))
        assert isinstance(reply, Refused)
        return reply.error


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def base(root: Path) -> Folders:
    @functools.cache
    def folder(kind: str, auto: Any = AutoModel) -> Path:
        labels = {} if auto is AutoModel else {"num_labels": 1}
        return build(root / f"{kind.replace(' ', '-')}-{auto.__name__}", ARCHITECTURES[kind], head=auto, **labels)

    return folder


@pytest.fixture(scope="module")
def engine(root: Path) -> Iterator[AdapterEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = new_engine(models_dir=str(root), max_loras_per_model=KEPT)
    yield engine
    assert engine.stop(10)
    torch.set_num_threads(threads)


def serve(engine: AdapterEngine, folder: Path, precision: str = "float32", **changes: Any) -> Served:
    fields: dict[str, Any] = {
        "family": "text-encoder",
        "outputs": {"dense": WIDTH},
        "run": {"pooling": "mean"},
        **changes,
    }
    entry = parse_entry(
        {
            "id": f"lora/{folder.name}-{precision}",
            "weights": {"path": str(folder)},
            "max_tokens": MAX_TOKENS,
            "load": {"precision": precision},
            **fields,
        }
    )
    engine.residency.ensure(entry.id, entry)
    return Served(engine, entry)


def trained(
    folder: Path, target: Path, targets: list[str], *, seed: int = 0, auto: Any = AutoModel, **config: Any
) -> Path:
    """Save a LoRA of the model in `folder` with random matrices, by PEFT."""
    model = get_peft_model(
        auto.from_pretrained(folder), LoraConfig(target_modules=targets, **{"r": 4, "lora_alpha": 8, **config})
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                spread = parameter.shape[1] ** -0.5 if ".lora_A." in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(target)
    return target


def expected(folder: Path, lora: Path, auto: Any = AutoModel) -> np.ndarray:
    """Return the numbers of PEFT on the stock model in float32, one text at a time: the mean of the last states, or the
    sigmoid of the logit.
    """
    from transformers import AutoTokenizer

    model: PreTrainedModel = PeftModel.from_pretrained(auto.from_pretrained(folder), str(lora)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = []
    for text in TEXTS:
        arguments = ([text],) if auto is AutoModel else ([TEXTS[0]], [text])
        cut = True if auto is AutoModel else "only_second"
        ids = tokenizer(*arguments, truncation=cut, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            output = model(**ids)
        values.append(output[0][0].mean(0).numpy() if auto is AutoModel else float(torch.sigmoid(output.logits[0, 0])))
    return np.array(values)


@pytest.mark.parametrize(
    ("kind", "part"),
    long_but(
        [(kind, part) for kind in LAYERS for part in PARTS],
        [("bert", "both"), ("qwen3 causal", "both"), ("modernbert", "attention"), ("modernbert", "mlp")],
    ),
)
def test_a_lora_gives_what_peft_gives_and_leaves_the_base_alone(
    kind: str, part: str, engine: AdapterEngine, base: Folders, root: Path, table: ParityTable
) -> None:
    """In modernbert query, key and value are one layer, and mpnet runs padded. The bytes of the base's vectors never
    change.
    """
    attention, mlp = LAYERS[kind]
    targets = {"attention": attention, "mlp": mlp, "both": attention + mlp}[part]
    folder = base(kind)
    served = serve(engine, folder)
    before = served.answers()
    lora = trained(folder, root / f"{folder.name}-{part}", targets)
    name = served.load(lora)
    assert served.answers().tobytes() == before.tobytes()
    got, reference = served.answers(name), expected(folder, lora)
    table.record(f"lora of {kind}", path_of(served.weights.attention), "float32", Agreement.of(got, reference))
    assert np.abs(got - reference).max() <= MAX_DIFFERENCE * max(1.0, np.abs(reference).max())
    assert cosines(before, reference).max() < 0.999, "the LoRA must matter"
    assert served.answers().tobytes() == before.tobytes()
    assert np.abs(served.answers(name, TEXTS[:1]) - got[:1]).max() <= MAX_DIFFERENCE, "independent of its batch mates"


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 2},
        {"lora_alpha": 32},
        {"r": 9},
        {"use_rslora": True},
        {"rank_pattern": {"query": 7}},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_scaling_rank_and_layers_are_those_of_its_configuration(
    config: dict[str, Any], engine: AdapterEngine, base: Folders, root: Path
) -> None:
    folder = base("bert")
    served = serve(engine, folder)
    lora = trained(
        folder, root / f"scaled-{'-'.join(config)}-{random.Random(str(config)).random()}", LAYERS["bert"][0], **config
    )
    got, reference = served.answers(served.load(lora)), expected(folder, lora)
    assert np.abs(got - reference).max() <= MAX_DIFFERENCE * max(1.0, np.abs(reference).max())


@pytest.mark.parametrize("kind", long_but(["bert", "modernbert", "qwen3 causal"], ["modernbert"]))
def test_in_bfloat16_a_lora_is_near_peft_in_float32(
    kind: str, engine: AdapterEngine, base: Folders, root: Path, table: ParityTable
) -> None:
    folder = base(kind)
    served = serve(engine, folder, SIXTEEN)
    if served.weights.precision != SIXTEEN:
        pytest.skip("this CPU has no bfloat16")
    lora = trained(folder, root / f"{folder.name}-bfloat16", every_layer(kind))
    agreement = Agreement.of(served.answers(served.load(lora)), expected(folder, lora))
    table.record(f"lora of {kind}", path_of(served.weights.attention), SIXTEEN, agreement)
    assert agreement.cosine >= BFLOAT16_COSINE


@pytest.mark.parametrize("kind", long_but(["bert", "modernbert", "qwen3 causal"], ["modernbert"]))
def test_a_lora_of_a_cross_encoder(
    kind: str, engine: AdapterEngine, base: Folders, root: Path, table: ParityTable
) -> None:
    """The keys of the LoRA have the name of the backbone within the classifier."""
    auto = AutoModelForSequenceClassification
    folder = base(kind, auto)
    served = serve(engine, folder, family="cross-encoder", outputs={"score": 0}, run={})
    before = served.answers()
    lora = trained(folder, root / f"{folder.name}-cross", every_layer(kind), auto=auto)
    assert "base_model.model." in next(iter(load_file(lora / "adapter_model.safetensors")))
    got, reference = served.answers(served.load(lora)), expected(folder, lora, auto)
    row = f"lora of {kind}, cross-encoder"
    table.record(row, path_of(served.weights.attention), "float32", Scores(float(np.abs(got - reference).max())))
    assert np.abs(got - reference).max() <= MAX_DIFFERENCE
    assert np.abs(before - reference).max() > 1e-3
    assert served.answers().tobytes() == before.tobytes()


def test_blocked_layers_take_a_lora(engine: AdapterEngine, base: Folders, root: Path) -> None:
    """On a CPU the adapter reorders the weights of these layers."""
    folder = base("bert")
    served = serve(engine, shutil.copytree(folder, root / "blocked"))
    lora = trained(folder, root / "blocked-lora", every_layer("bert"))
    name = served.load(lora)
    layers = [module for module in served.weights.loras._adapted().modules() if isinstance(module, BlockedLinear)]
    assert len(layers) >= 18
    assert np.abs(served.answers(name) - expected(folder, lora)).max() <= 3e-5


@pytest.mark.long
def test_base_and_loras_on_two_lanes_while_others_load(engine: AdapterEngine, base: Folders, root: Path) -> None:
    """Each answer has the bytes of its own LoRA alone, whatever runs beside it and whatever is
    loaded meanwhile.
    """
    folder = base("bert")
    served = serve(engine, shutil.copytree(folder, root / "shared"))
    loras = [trained(folder, root / f"shared-{seed}", LAYERS["bert"][seed % 2], seed=seed) for seed in range(5)]
    names = ["", *(served.load(lora) for lora in loras[:3])]
    golden = {name: served.answers(name).tobytes() for name in names}
    assert len(set(golden.values())) == 4
    chooser = random.Random(0)
    messages = [served.message(chooser.choice(names)) for _ in range(120)]
    replies: list[list[Reply]] = [[] for _ in messages]
    jobs = [DeviceJob(message, answers.append) for message, answers in zip(messages, replies, strict=True)]
    loading = threading.Thread(target=lambda: [served.load(lora) for lora in loras[3:]])
    lanes = DeviceThreads(2, engine.execute)
    for number, job in enumerate(jobs):
        lanes.submit(job)
        if number == 20:
            loading.start()
    for job in jobs:
        assert job.finished.wait(60)
    loading.join(60)
    assert lanes.stop(10)
    for message, answers in zip(messages, replies, strict=True):
        assert Served.read(answers[-1]).tobytes() == golden[message.lora]
    assert set(served.weights.loras.names()) == {str(lora) for lora in loras}
    for name, encoded in golden.items():
        assert served.answers(name).tobytes() == encoded


def test_the_digest_of_a_lora_is_that_of_its_configuration_and_its_matrices(
    engine: AdapterEngine, base: Folders, root: Path
) -> None:
    """The digest depends on the content alone, not on the name of the folder."""
    served = serve(engine, base("bert"))
    lora = trained(base("bert"), root / "digest", ["query"])
    twice = edited(
        lora, root / "digest-scaled", lambda config, tensors: config.update(lora_alpha=2 * config["lora_alpha"])
    )
    changed_lora = edited(
        lora, root / "digest-other", lambda config, tensors: tensors[_first(tensors, "lora_B")].mul_(2)
    )
    same = shutil.copytree(lora, root / "digest-same")
    digests = [engine.ensure_lora(served.entry.id, str(folder)) for folder in (lora, lora, same, twice, changed_lora)]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 3
    assert all(len(digest) == 64 for digest in digests)


def test_the_least_recently_used_goes_and_a_batch_that_waits_for_it_is_told(
    engine: AdapterEngine, base: Folders, root: Path
) -> None:
    folder = base("bert")
    served = serve(engine, shutil.copytree(folder, root / "crowded"))
    loras = [trained(folder, root / f"crowded-{seed}", ["query"], seed=seed) for seed in range(KEPT + 1)]
    for lora in loras[:KEPT]:
        served.load(lora)
    vectors = served.answers(str(loras[0]))
    served.load(loras[KEPT])
    assert served.weights.loras.names() == (*map(str, loras[2:KEPT]), str(loras[0]), str(loras[KEPT]))
    error = served.refusal(str(loras[1]))
    assert (error.code, error.extras["lora_id"]) == ("LORA_LOADING", str(loras[1]))
    served.load(loras[1])
    served.answers(str(loras[1]))
    assert served.answers(str(loras[0])).tobytes() == vectors.tobytes()


# refusals


def edited(lora: Path, target: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a LoRA with another configuration, or other tensors."""
    shutil.copytree(lora, target)
    config, tensors = (
        json.loads((target / "adapter_config.json").read_text()),
        load_file(target / "adapter_model.safetensors"),
    )
    change(config, tensors)
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def _first(tensors: dict[str, torch.Tensor], half: str) -> str:
    return next(name for name in sorted(tensors) if half in name)


def _zero(config: Any, tensors: Any) -> None:
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def _nan(config: Any, tensors: Any) -> None:
    tensors[_first(tensors, "lora_A")][0, 0] = torch.nan


def _huge(config: Any, tensors: Any) -> None:
    for name in tensors:
        tensors[name].fill_(1e30)


def _half(config: Any, tensors: Any) -> None:
    del tensors[_first(tensors, "lora_B")]


def _layer(config: Any, tensors: Any) -> None:
    name = _first(tensors, "lora_A")
    tensors[name.replace("query", "absent")] = tensors.pop(name)


def _shape(config: Any, tensors: Any) -> None:
    name = _first(tensors, "lora_A")
    tensors[name] = tensors[name][:, :-1].contiguous()


def _rank(config: Any, tensors: Any) -> None:
    config["r"] = 6


def _saved(config: Any, tensors: Any) -> None:
    config["modules_to_save"] = ["pooler"]


def _initialised(config: Any, tensors: Any) -> None:
    config["init_lora_weights"] = "pissa"


def _newer(config: Any, tensors: Any) -> None:
    config["an_option_of_tomorrow"] = {"strength": 2}


REFUSED = {
    "no effect": (_zero, "does not change the output"),
    "NaN": (_nan, "are not finite"),
    "overflow": (_huge, "output is not finite"),
    "half": (_half, "only one of its two matrices"),
    "unknown layer": (_layer, "absent.*belongs to no linear layer"),
    "shape": (_shape, "maps 64 to 64 numbers"),
    "rank": (_rank, "the rank 4, adapter_config.json says 6"),
    "modules_to_save": (_saved, "modules_to_save"),
    "initialisation": (_initialised, "pissa"),
    "an option that is not known": (_newer, "an_option_of_tomorrow"),
}


@pytest.fixture(scope="module")
def plain(base: Folders, root: Path) -> Path:
    return trained(base("bert"), root / "plain", ["query"])


@pytest.mark.parametrize("fault", REFUSED)
def test_a_lora_that_would_be_wrong_is_refused(
    fault: str, engine: AdapterEngine, base: Folders, plain: Path, root: Path
) -> None:
    """The message names the fault, no part of the LoRA is kept, and the base answers as before."""
    change, text = REFUSED[fault]
    served = serve(engine, base("bert"))
    before, lora_names = served.answers(), served.weights.loras.names()
    lora = edited(plain, root / f"refused-{fault.replace(' ', '-')}", change)
    with pytest.raises(LoraLoadFailed, match=text) as raised:
        served.load(lora)
    assert raised.value.extras == {"lora_id": str(lora)}
    assert served.weights.loras.names() == lora_names
    assert served.answers().tobytes() == before.tobytes()
    assert served.refusal(str(lora)).code == "LORA_LOADING"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "sets bias"),
        ({"alpha_pattern": {"query": 3}}, "alpha_pattern"),
        ({"modules_to_save": ["embeddings"]}, "modules_to_save"),
        ({"target_modules": ["word_embeddings"]}, "belongs to no linear layer"),
        ({"target_modules": ["pooler.dense"]}, "does not change the output"),
    ],
    ids=str,
)
def test_kinds_of_lora_that_are_more_than_two_matrices(
    config: dict[str, Any], text: str, engine: AdapterEngine, base: Folders, root: Path
) -> None:
    """The files are those that PEFT itself saves."""
    folder = base("bert")
    served = serve(engine, folder)
    targets = config.pop("target_modules", ["query"])
    lora = trained(
        folder, root / f"kind-{random.Random(text + str(config) + str(targets)).random()}", targets, **config
    )
    with pytest.raises(LoraLoadFailed, match=text):
        served.load(lora)


def test_files_that_are_not_a_lora(engine: AdapterEngine, base: Folders, root: Path) -> None:
    """Pickled weights are not read; a broken file is a failed load, not a failed process."""
    folder = base("bert")
    served = serve(engine, folder)
    lora = trained(folder, root / "whole", ["query"])
    pickled = shutil.copytree(lora, root / "pickled")
    torch.save(load_file(pickled / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    with pytest.raises(LoraLoadFailed, match=r"adapter_model\.safetensors"):
        served.load(pickled)
    broken = shutil.copytree(lora, root / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(LoraLoadFailed, match="Safetensor"):
        served.load(broken)
    with pytest.raises(LoraLoadFailed, match=r"adapter_config\.json"):
        served.load(root / "nowhere")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/etc", "SIE_MODELS_DIR"),
        ("{root}/../outside", "SIE_MODELS_DIR"),
        ("./{base}", "SIE_MODELS_DIR"),
        ("{root}/link", "SIE_MODELS_DIR"),
        ("../../etc", "SIE_MODELS_DIR"),
        ("~/lora", "hub repository"),
        ("a/b/c", "hub repository"),
        ("org/none", "SIE_HF_FALLBACK"),
        ("{root}/\0", "character NUL"),
    ],
)
def test_names_of_clients_reach_nothing_outside_the_models_folder(
    name: str, text: str, base: Folders, root: Path, tmp_path: Path
) -> None:
    folder = base("bert")
    (tmp_path / "models").mkdir()
    trained(folder, tmp_path / "outside", ["query"])
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside")
    engine = new_engine(models_dir=str(tmp_path / "models"), local_cache=str(tmp_path), hf_fallback=False)
    served = serve(engine, folder)
    with pytest.raises(LoraLoadFailed, match=text):
        served.load(name.format(root=tmp_path / "models", base=folder.name))
    assert engine.stop(5)


def test_a_path_that_the_entry_names_may_lie_anywhere(base: Folders, tmp_path: Path) -> None:
    folder = base("bert")
    lora = trained(folder, tmp_path / "outside", ["query"])
    engine = new_engine(hf_fallback=False)
    served = serve(engine, folder, profiles={"tuned": {"run": {"lora": str(lora)}}})
    assert np.abs(served.answers(served.load(lora)) - expected(folder, lora)).max() <= MAX_DIFFERENCE
    assert engine.stop(5)
