"""Proof that a remote server computes the vectors of a model: probe texts, their reference vectors, the comparison.

    golden vectors of the entry  ──┐
                                   ├──► Reference ── compared with the vectors of the remote server ──► Proof
    vectors of a worker, stored  ──┘                                                        └ too different: Deviates

The cosine and the relative difference both have a bound. The cosine alone is not enough: it does not depend on the
lengths of the vectors, and it changes little with small errors.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sie_contracts.errors import SIEError
from sie_contracts.models.catalogue import Resolved, packaged_folder
from sie_contracts.models.entries import ModelEntry, templates
from sie_contracts.models.options import run_options
from sie_contracts.models.parity import COSINE_8, COSINE_16, COSINE_32
from sie_contracts.wire.messages import RunOptions
from sie_contracts.wire.records import RemoteReference
from sie_gateway.remotes.client import Vectors

# Texts of several scripts, with digits, an emoji, ligatures, code and white space of all kinds. If a remote server has
# another tokenizer, text normalisation or pooling, at least one text gets another vector. Each kind of white space has
# a separate text, because a server may change only one kind.
PROBES = (
    "The harbour master signed the papers before noon.",
    "Übergrößenträger fahren im Dezember nach Zürich.",
    "Москва и Санкт-Петербург соединены железной дорогой.",
    "東京の天気は晴れ、最高気温は二十三度です。",
    "ﬁrst ligature, 3.1415 rounded, and a rocket 🚀",
    "def area(radius): return 3.14 * radius ** 2",
    "First line,\nsecond line.\r\n\r\nNew paragraph.",
    "name\tprice\tplace",
    "  two  spaces   or more ",
)
MAX_PROMPTS = 4  # largest number of prompts that a proof covers; requests with other prompts stay in this cluster
MAX_LONG_TOKENS = 8192  # a model with a larger `max_tokens` has no long probe text, because a probe would cost too much
SPECIAL_TOKENS = 8  # largest number of special tokens that a tokenizer adds to a text
MAX_GOLDEN_BYTES = 64 << 20


class ParityBound(NamedTuple):
    """Smallest accepted cosine of a vector and its reference vector, and largest accepted difference: the norm of
    (vector - reference vector), divided by the norm of the reference vector.
    """

    cosine: float
    difference: float


# precision of the reference vectors -> bound. For 16 and 8 bits, `difference` is the distance of two unit vectors whose
# cosine is `cosine`. For float32, `difference` is smaller than this distance, because float32 servers agree better.
BOUNDS: Mapping[str, ParityBound] = {
    "float32": ParityBound(COSINE_32, 5e-4),
    "float16": ParityBound(COSINE_16, 0.045),
    "bfloat16": ParityBound(COSINE_16, 0.045),
    "int8": ParityBound(COSINE_8, 0.142),
}


class Prompt(NamedTuple):
    """Prompt around a text. `is_query`: the model encodes the text as a query, else as a document."""

    prefix: str
    suffix: str
    is_query: bool

    @classmethod
    def from_options(cls, run: RunOptions) -> Prompt:
        return cls(run.prefix, run.suffix, run.is_query)

    def around(self, text: str) -> str:
        return self.prefix + text + self.suffix


class ProbeAgreement(NamedTuple):
    """Agreement of a vector with its reference vector. `difference`: norm of (vector - reference vector), divided by
    the norm of the reference vector. `probe`: index of the probe text.
    """

    cosine: float
    difference: float
    probe: int


class Deviates(Exception):
    """Raised if the vectors of a remote server differ too much from the reference vectors."""

    def __init__(self, agreement: ProbeAgreement, bound: ParityBound) -> None:
        super().__init__(
            f"probe {agreement.probe} has cosine {agreement.cosine:.7f} (bound {bound.cosine}) and relative difference "
            f"{agreement.difference:.2e} (bound {bound.difference:g}) to the vector of this model"
        )
        self.agreement = agreement


@dataclass(frozen=True)
class Reference:
    """Probe texts, and the vectors that a remote server must return for them. `long`: index of the text that the model
    truncates (see `long_text`); None if there is no such text.
    """

    texts: tuple[str, ...]
    vectors: Vectors
    prompts: frozenset[Prompt]
    precision: str
    fingerprint: str = ""
    long: int | None = None


@dataclass(frozen=True)
class Proof:
    """Proof that a remote server's vectors of the probe texts agree with the vectors of this cluster. The proof holds
    for the catalogue entry `entry` and for requests with one of `prompts`.

    `any_length`: the proof covers texts that the model truncates, because the vectors of the long probe text agree.
    `any_spaces`: the proof covers texts with white space other than single spaces between words. `unit_length`: all
    reference vectors have the length 1. `cosine`, `difference`: lowest cosine and largest difference over all probe
    texts except the long text. `models`: the models that the server reported, see `RemoteAnswer`.
    """

    entry: ModelEntry
    run: RunOptions
    prompts: frozenset[Prompt]
    any_length: bool
    any_spaces: bool
    unit_length: bool
    fingerprint: str
    cosine: float
    difference: float
    width: int
    models: frozenset[str] = frozenset()

    def covers(self, entry: ModelEntry, run: RunOptions, texts: Sequence[str]) -> bool:
        """Return True if the proof holds for these options and texts. `texts`: texts with the prompt around them."""
        prompt = Prompt.from_options(run)
        if entry != self.entry or prompt not in self.prompts or without_prompt(run) != self.run:
            return False
        if not self.any_spaces and not all(map(has_plain_spaces, texts)):
            return False
        # if the prompt has a suffix, no text may be truncated: this cluster adds the suffix after the truncation, but a
        # remote server would cut the suffix off as well
        return (self.any_length and not prompt.suffix) or all(fits(text, entry.max_tokens) for text in texts)

    def accepts(self, vectors: Vectors) -> bool:
        """Return False if all reference vectors have the length 1, but a vector in `vectors` does not (within 0.01)."""
        return not self.unit_length or bool(np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 0.01)


def without_prompt(run: RunOptions) -> RunOptions:
    """Return the options without the fields of `Prompt`. `Proof.covers` compares prompts separately."""
    return msgspec.structs.replace(run, prefix="", suffix="", is_query=False)


def fits(text: str, max_tokens: int) -> bool:
    """Return True if a text surely has at most `max_tokens` tokens, special tokens included: each token of the text
    stands for at least one byte of the normalised text.
    """
    most = max_tokens - SPECIAL_TOKENS
    # check the length first, which is cheaper: normalisation never reduces the number of characters
    return len(text) <= most and len(unicodedata.normalize("NFKD", text).encode()) <= most


def has_plain_spaces(text: str) -> bool:
    """Return True if single spaces between words are the only white space of a text."""
    return " ".join(text.split()) == text


def source_of(entry: ModelEntry) -> str:
    """Return a digest of the entry and the probe texts. Stored reference vectors with another digest are outdated."""
    return hashlib.sha256(msgspec.json.encode([entry, PROBES], order="sorted")).hexdigest()[:32]


def long_text(entry: ModelEntry) -> str:
    """Return a probe text that the model truncates; empty if the model's limit is above MAX_LONG_TOKENS."""
    return " ".join(map(str, range(entry.max_tokens + 1))) if entry.max_tokens <= MAX_LONG_TOKENS else ""


def plain_run(resolved: Resolved) -> RunOptions:
    """Return the options of a request for dense vectors without a prompt. Raises InvalidInput."""
    return run_options(resolved, {"output_types": ["dense"], "prompt_name": None}, "encode")[1].run


def prompts_of(resolved: Resolved) -> dict[Prompt, Mapping[str, Any]]:
    """Return at most MAX_PROMPTS prompts of the entry, each with request parameters that select the prompt."""
    chosen: dict[Prompt, Mapping[str, Any]] = {}
    names: list[Mapping[str, Any]] = [{"prompt_name": name} for name in (None, *templates(resolved.entry))]
    for parameters in (names[0], {"is_query": False}, {"is_query": True}, *names[1:]):
        try:
            run = run_options(resolved, {"output_types": ["dense"], **parameters}, "encode")[1].run
        except SIEError:  # the model does not distinguish queries from documents
            continue
        if len(chosen) < MAX_PROMPTS:
            chosen.setdefault(Prompt.from_options(run), parameters)
    return chosen


def golden_reference(entry: ModelEntry, run: RunOptions) -> Reference | None:
    """Return the golden vectors (reference vectors that SIE ships) of texts without a prompt, from the file that the
    entry names. Return None if the file is missing, exceeds MAX_GOLDEN_BYTES, or has no such vectors, or if the entry
    accepts unproven answers.
    """
    path = packaged_folder() / entry.golden
    if not entry.golden or entry.load.accept_unproven or not path.is_file() or path.stat().st_size > MAX_GOLDEN_BYTES:
        return None
    cases = [case for case in msgspec.json.decode(path.read_bytes()).get("dense", ()) if "is_query" not in case]
    if not cases:
        return None
    vectors = np.array([case["vector"] for case in cases], np.float32)
    # golden vectors are float32, so use the bound of float32, whatever the precision of this cluster's workers is
    return Reference(tuple(case["text"] for case in cases), vectors, frozenset({Prompt.from_options(run)}), "float32")


def stored_reference(stored: RemoteReference, entry: ModelEntry) -> Reference | None:
    """Return the reference vectors that a worker computed and a gateway stored. Return None if they belong to another
    entry, to other probe texts or to a precision without a bound, or if their number is wrong.
    """
    if stored.source != source_of(entry) or stored.precision not in BOUNDS:
        return None
    prompts = [Prompt(*prompt) for prompt in stored.prompts]
    texts = [prompt.around(text) for prompt in prompts for text in PROBES]
    long = len(texts) if stored.has_long else None
    vectors = np.frombuffer(stored.vectors, "<f4").reshape(-1, stored.width)
    texts += [long_text(entry)] if stored.has_long else []
    if len(vectors) != len(texts):
        return None
    return Reference(tuple(texts), vectors, frozenset(prompts), stored.precision, stored.fingerprint, long)


def measure(expected: Vectors, actual: Vectors) -> Iterator[ProbeAgreement]:
    """Yield the agreement of each row of `actual` with the same row of `expected`."""
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1), np.linalg.norm(right, axis=1)
    cosines = (left * right).sum(1) / np.maximum(lengths[0] * lengths[1], 1e-12)
    differences = np.linalg.norm(left - right, axis=1) / np.maximum(lengths[0], 1e-12)
    for probe, (cosine, difference) in enumerate(zip(cosines, differences, strict=True)):
        yield ProbeAgreement(float(cosine), float(difference), probe)


def prove(entry: ModelEntry, run: RunOptions, reference: Reference, actual: Vectors) -> Proof:
    """Compare the vectors of a remote server with the reference vectors, and return the proof. If only the vector of
    the text `reference.long` deviates, `any_length` of the proof is False. Raises Deviates if another vector deviates.
    """
    bound = BOUNDS[reference.precision]
    agreements = list(measure(reference.vectors, actual))
    long = agreements.pop(reference.long) if reference.long is not None else None
    if deviating := [agreement for agreement in agreements if not _within(agreement, bound)]:
        raise Deviates(max(deviating, key=lambda agreement: agreement.difference), bound)
    lengths = np.linalg.norm(reference.vectors, axis=1)
    return Proof(
        entry,
        without_prompt(run),
        reference.prompts,
        long is not None and _within(long, bound),
        not all(map(has_plain_spaces, reference.texts)),
        bool(np.abs(lengths - 1).max() < 1e-3),
        reference.fingerprint,
        min(agreement.cosine for agreement in agreements),
        max(agreement.difference for agreement in agreements),
        reference.vectors.shape[1],
    )


def _within(agreement: ProbeAgreement, bound: ParityBound) -> bool:
    return agreement.cosine >= bound.cosine and agreement.difference <= bound.difference
