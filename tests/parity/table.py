"""The worst value of each kind of model, path and precision, as the page docs/parity.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from oracle import cosines

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
_COLUMNS = [(path, precision) for path in ("packed", "padded", "graph") for precision in _PRECISIONS] + [
    ("stock", "bfloat16")
]
_JOURNAL = os.environ.get("PARITY_CELLS")  # the file to which each measurement is appended at once
_PACKAGES = ("torch", "transformers", "sentence-transformers", "gliner", "gliner2", "gliclass", "peft")

# the oracle of each kind, by the first word of the kind
ORACLES = {
    "dense": "sentence-transformers, SentenceTransformer",
    "projected": "sentence-transformers, SentenceTransformer",
    "sparse": "sentence-transformers, SparseEncoder",
    "multivector": "sentence-transformers, MultiVectorEncoder",
    "bge-m3": "FlagEmbedding 1.3.5, BGEM3FlagModel, by a stored file",
    "cross-encoder": "sentence-transformers, CrossEncoder",
    "decoder-reranker": "the code of its model card, transformers",
    "zero-shot": "transformers, pipeline",
    "text-classifier": "transformers, pipeline",
    "token-classifier": "transformers, pipeline",
    "static-embedding": "sentence-transformers, SentenceTransformer of a StaticEmbedding",
    "dual-encoder": "transformers, CLIPModel and SiglipModel with their processors; open_clip 3.3.0 by a stored file",
    "sound-encoder": "transformers, ClapModel with its feature extractor",
    "sound-reader": "transformers, WhisperForConditionalGeneration and ParakeetForTDT, `generate` greedily, with their"
    " feature extractors",
    "vision-language": "transformers, ColPaliForRetrieval with its processor; Qwen2_5_VLModel, Qwen3VLModel and"
    " Idefics3Model with a projection",
    "multimodal-encoder": "transformers, Qwen3VLModel, read as its vendor reads it",
    "multimodal-reranker": "transformers, Qwen3VLForConditionalGeneration, read as its vendor reads it",
    "gliner": "gliner, GLiNER",
    "gliner-relations": "gliner, model of UniEncoderSpanRelexGLiNER",
    "gliner2": "gliner2, GLiNER2",
    "glirel": "glirel 1.2.1, GLiREL",
    "laya": "laya 0.4.15, Agent, which rounds to four digits",
    "gliclass": "gliclass, ZeroShotClassificationPipeline",
    "detector": "transformers, GroundingDinoForObjectDetection and Owlv2ForObjectDetection with their processors",
    "document-reader": "transformers, `generate` greedily, by the class and the image processor of each model",
    "pruner": "transformers, AutoModelForSequenceClassification",
    "lora": "peft, PeftModel",
}


class Worst(Protocol):
    """A measurement of which the table keeps the worst."""

    def worst(self, peer: Any) -> Self:
        """Return the worse value of each number."""
        ...


@dataclass(frozen=True)
class Agreement:
    """The distance of vectors from the reference: the lowest cosine, the largest difference of a component in units of
    the reference vector's norm, and the mean of 1 - cosine.
    """

    cosine: float
    difference: float
    mean_distance: float

    @classmethod
    def of(cls, got: NDArray[Any], expected: NDArray[Any]) -> Self:
        """Compare vectors [.., width] of equal shape."""
        assert got.shape == expected.shape
        cosine = cosines(got, expected)
        norms = np.linalg.norm(expected, axis=-1, keepdims=True)
        return cls(float(cosine.min()), float((np.abs(got - expected) / norms).max()), float((1 - cosine).mean()))

    def worst(self, peer: Agreement) -> Agreement:
        """Return the worse value of each number."""
        return Agreement(
            min(self.cosine, peer.cosine),
            max(self.difference, peer.difference),
            max(self.mean_distance, peer.mean_distance),
        )

    def __str__(self) -> str:
        return f"cos {self.cosine:.7f}, Δ {self.difference:.0e}"


@dataclass(frozen=True)
class Scores:
    """The distance of scores from the reference: the largest difference, and Kendall's tau where they were ranked."""

    difference: float
    tau: float | None = None

    def worst(self, peer: Scores) -> Scores:
        """Return the worse value of each number."""
        taus = [tau for tau in (self.tau, peer.tau) if tau is not None]
        return Scores(max(self.difference, peer.difference), min(taus, default=None))

    def __str__(self) -> str:
        return f"Δ {self.difference:.0e}" + ("" if self.tau is None else f", tau {self.tau:.3f}")


@dataclass(frozen=True)
class Texts:
    """The distance of generated texts from the reference: the number of texts with other ids, and the distance of the
    scores of their first tokens.
    """

    other: int
    texts: int
    first: Agreement

    @classmethod
    def of(cls, ids: Sequence[list[int]], first: Sequence[NDArray[Any]], expected: Sequence[Any]) -> Self:
        """`first`: scores [vocabulary] of the first token of each text. `expected` has `ids` and `first` of each."""
        pairs = list(zip(ids, expected, strict=True))
        scores = Agreement.of(np.stack(list(first)), np.stack([reference.first for reference in expected]))
        return cls(sum(own != reference.ids for own, reference in pairs), len(pairs), scores)

    def worst(self, peer: Texts) -> Texts:
        """Return the sums of the counts and the worse scores."""
        return Texts(self.other + peer.other, self.texts + peer.texts, self.first.worst(peer.first))

    def __str__(self) -> str:
        return f"{self.texts - self.other} of {self.texts} texts, {self.first}"


def path_of(attention: str) -> str:
    """Return `packed` or `padded` for the attention backend in force."""
    return "padded" if attention.endswith("padded") else "packed"


@dataclass
class ParityTable:
    """Collects measurements, keeps the worst of each cell."""

    cells: dict[tuple[str, str, str], Worst] = field(default_factory=dict)

    def record(self, kind: str, path: str, precision: str, measure: Worst) -> None:
        """Add a measurement. `kind`: one of ORACLES and a name. `path`: packed, padded, graph, or stock, which is the
        oracle itself in that precision.
        """
        self._add((kind, path, precision), measure)
        if _JOURNAL:
            line = msgspec.json.encode([kind, path, precision, type(measure).__name__, measure], enc_hook=float)
            with Path(_JOURNAL).open("ab") as file:
                file.write(line + b"\n")

    @classmethod
    def read(cls, journal: Path) -> Self:
        """The measurements that processes have appended to their journal so far."""
        table, classes = cls(), {kind.__name__: kind for kind in (Agreement, Scores, Texts)}
        for line in journal.read_bytes().splitlines() if journal.exists() else ():
            *key, name, values = msgspec.json.decode(line)
            table._add(tuple(key), msgspec.convert(values, classes[name]))
        return table

    def _add(self, key: tuple[str, str, str], measure: Worst) -> None:
        self.cells[key] = self.cells[key].worst(measure) if key in self.cells else measure

    def markdown(self, unproven: Mapping[str, str]) -> str:
        """The page: a row for each kind, a dash where nothing was measured, and the catalogue entries that have a
        reason to be unproven.
        """
        rows = [
            "| kind | " + " | ".join(f"{path} {_PRECISIONS[precision]}" for path, precision in _COLUMNS) + " | oracle |"
        ]
        rows.append("|---" * (len(_COLUMNS) + 2) + "|")
        groups = list(ORACLES)
        for kind in sorted(
            dict.fromkeys(kind for kind, *_ in self.cells), key=lambda kind: groups.index(kind.split()[0])
        ):
            values = [str(self.cells.get((kind, *column), "-")) for column in _COLUMNS]
            rows.append(f"| {kind} | " + " | ".join(values) + f" | {ORACLES[kind.split()[0]]} |")
        reasons = [f"| {model} | {reason} |" for model, reason in sorted(unproven.items())]
        return "\n".join([_introduction(), *rows, "", _UNPROVEN, *reasons, ""])


_UNPROVEN = """## Unproven

Entries of the catalogue whose numbers could not be compared with their oracle. They are refused unless
`load.accept_unproven` is set.

| model | reason |
|---|---|"""


def _introduction() -> str:
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
    return f"""# Parity

Each cell is the worst value over ragged batches of 1 to 64 texts (up to 560 tokens, longer than every attention
window), in every pooling, output and parameter that is tested for the kind. It compares with the oracle of the row,
which runs the same folder in float32, as a rule one text at a time. `stock bf16` is that oracle itself in bfloat16.
`cos`: the lowest cosine. `Δ`: the largest difference, of one component in units of the vector's norm, or of a score
(in units of the largest score where that is above 1). `tau`: Kendall's tau over 50 documents. Spans and labels are
equal wherever scores are compared. `texts`: how many of the texts that a reader writes are the oracle's, token for
token; `cos` and `Δ` are then those of the scores of their first token. Florence-2 as published is compared with its
converted copy, in bfloat16 too. Of a pruner its score alone is compared. The family docling gives no
numbers: the text, the Markdown and the tree of a document are docling's own, character for character.

The models are small, random and adversarial (`tests/parity/*checkpoints.py`). The bounds are 0.9999 in float32 and
0.999 in bfloat16. In bfloat16, untrained weights lose more than that in any implementation. So a cell below 0.999 is
compared with stock bfloat16: at most 1.5 times its mean distance, and for dense vectors at most 3 times its worst
distance. Scores differ by at most 1e-5 in float32. In bfloat16 their ranking has a tau of at least 0.98, or of that of
the oracle in bfloat16 less 0.01. The bound of BGE-M3 in bfloat16 is 0.995. A kind without a packed value runs padded.
`graph` is the engine openvino, which a kind without a value does not run on; all else is torch.

    python -m pytest tests/parity extras/*/tests/parity --parity-table docs/parity.md

{_processor()}; {versions}.
"""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
