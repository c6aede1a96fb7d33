"""Checks that a loaded model computes correct numbers, before it serves requests. If a check fails, the load fails. The
results of the checks are the model's certificate.

    digests   SHA-256 of the model's files against the catalogue entry
    files     max_tokens, pooling and prompts of the entry against the model's files; only max_tokens if
              load.accept_unproven is set
    tokenizer its ids are within the table of embeddings, it adds the special tokens that the model needs, and it can
              read at least one of several sample texts
    direction the measured direction of attention (causal or not) against load.causal
    packed    each output of the packed path, except token states, against the same output of the reference path, the
              unchanged transformers model
    golden    dense vectors against vectors of a public implementation, which are in the file that the entry names;
              skipped if load.accept_unproven is set

Lower bounds: cosine 0.9999 in float32, 0.999 in 16 bit; for scores also Kendall's tau 0.98. With weights in 8 bits:
cosine 0.99, and Kendall's tau 0.95 over the similarities of all pairs of vectors, or over scores.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.heads import Row, States
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.loading.tokenizer import TokenNeeds, fault
from sie_adapter.packed.packing import Items
from sie_contracts.models.catalogue import Resolved, packaged_folder
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.models.options import TOKEN_STATES
from sie_store import entry_faults
from sie_store.folder_files import read_json

COSINE = {torch.float32: 0.9999}
COSINE_16 = 0.999
COSINE_8 = 0.99
TAU, TAU_8 = 0.98, 0.95


class LoadCertificate(msgspec.Struct, frozen=True):
    """Results of the checks of a load. `digests`: names of the files whose digests match. `packed`: for each output,
    the lowest cosine between the packed path and the reference path. `golden`: the lowest cosine between a vector and
    its golden vector; None if no golden vectors were compared.
    """

    digests: tuple[str, ...]
    packed: dict[str, float]
    golden: float | None
    seconds: float


def decoded(stored: bytes | None) -> LoadCertificate | None:
    """Return the certificate that an earlier load has stored; None if it stored none, or one of another form."""
    try:
        return None if stored is None else msgspec.json.decode(stored, type=LoadCertificate)
    except msgspec.DecodeError:
        return None


def certify(model: Any, folder: Path, resolved: Resolved, compute: Compute) -> LoadCertificate:
    """Check a model that was just loaded. Raises ModelLoadFailed CERTIFICATE, which names the failed check."""
    started = time.perf_counter()
    entry = resolved.entry
    digests = check_files(folder, entry, resolved.load)
    _check_tokenizer(model, entry)
    with torch.inference_mode():
        packed = {}
        if hasattr(model, "backbone"):
            _check_direction(model, resolved)
            packed = _check_packed(model, entry, compute)
        is_compared = entry.golden and not resolved.load.accept_unproven
        golden = _check_golden(model, entry, compute) if is_compared else None
    return LoadCertificate(digests, packed, golden, round(time.perf_counter() - started, 3))


def _refuse(entry: ModelEntry, cause: str) -> Exception:
    return load_failed("CERTIFICATE", f"{entry.id}: {cause}")


def check_files(folder: Path, entry: ModelEntry, load: LoadOptions) -> tuple[str, ...]:
    """Return the names of the files whose digests match the entry. Raises ModelLoadFailed CERTIFICATE for a file with
    another digest, or an entry that contradicts a file.
    """
    digests = _check_digests(folder, entry)
    if (mismatch := entry_faults.fault(folder, entry, load)) is not None:
        raise _refuse(entry, mismatch.message)
    return digests


def _check_digests(folder: Path, entry: ModelEntry) -> tuple[str, ...]:
    for name, digest in entry.weights.digests.items():
        path = folder / name
        if not path.is_file():
            raise _refuse(entry, f"weights.digests names {name}, which the model folder lacks")
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest.lower():
            cause = (
                f"{name} has the SHA-256 {actual[:16]}.., weights.digests says {digest[:16]}..: the file was changed, "
                "or is of another revision"
            )
            raise _refuse(entry, cause)
    return tuple(entry.weights.digests)


def _check_tokenizer(model: Any, entry: ModelEntry) -> None:
    """Check that the tokenizer can be parsed, and fits the model if the model has the attribute `vocabulary`."""
    try:
        tokenizer = Tokenizer.from_buffer(model.tokenizer)
    except ValueError as error:
        raise _refuse(entry, f"its tokenizer is no valid tokenizer.json: {error}") from error
    if (table := getattr(model, "vocabulary", None)) is None:
        return
    if cause := fault(tokenizer, table, getattr(model, "needs", TokenNeeds())):
        raise _refuse(entry, cause)


def _check_direction(model: Any, resolved: Resolved) -> None:
    """Refuse a model whose attention does not have the direction of load.causal. Refuse also a model whose direction
    depends on other texts of the batch: some classes of transformers apply is_causal only if no text is padded.
    """
    declared, measured = resolved.load.causal, model.backbone.is_causal()
    if measured is None:
        cause = (
            "is_causal changes the attention of a text that runs alone, but not in a batch with a longer text: remove "
            "is_causal from config.json, and causal from load"
        )
        raise _refuse(resolved.entry, cause)
    if declared is not None and measured != declared:
        cause = f"load.causal is {str(declared).lower()}, but the model computes the opposite: it ignores is_causal"
        raise _refuse(resolved.entry, cause)


def _check_packed(model: Any, entry: ModelEntry, compute: Compute) -> dict[str, float]:
    """Run test sequences on the packed path. Compare each output except token states with the output of the unchanged
    transformers model, which ran the same sequences with padding during the load. Return the lowest cosine of each
    output.
    """
    packed, reference = model.backbone.take_trial()
    states = model.backbone.forward(packed)
    sequences = np.arange(len(packed.order))
    queries = np.zeros(len(sequences), bool)
    worst = {}
    for name, head in model.heads.items():
        # Token states are not compared. No entry lists token states as an output, and in 16 bit single tokens of a
        # correct model may deviate.
        if name == TOKEN_STATES:
            continue
        # token vectors are compared before token pooling, because rounding can change which vectors are merged
        reduce = head.parts if isinstance(head, MultivectorHead) else head.reduce
        expected = reduce(States(reference, packed, queries), sequences).rows
        packed_rows = reduce(States(states, packed, queries), sequences).rows
        worst[name] = _agree(entry, f"the packed path of output {name}", expected, packed_rows, compute)
    return worst


def _bound(compute: Compute) -> float:
    return COSINE_8 if compute.int8 else COSINE.get(compute.dtype, COSINE_16)


def _agree(entry: ModelEntry, subject: str, expected: Sequence[Row], actual: Sequence[Row], compute: Compute) -> float:
    bound, tau_bound = _bound(compute), TAU_8 if compute.int8 else TAU
    is_vector = isinstance(expected[0], Tensor) and expected[0].ndim == 1
    tau = 1.0
    if is_vector and len(expected[0]) <= 2:
        cosine = _cosine(torch.cat(list(expected)), torch.cat(list(actual)))
        tau = _tau(_scores(expected), _scores(actual), compute.dtype)
    else:
        cosine = min(_cosine(*_dense(left, right)) for left, right in zip(expected, actual, strict=True))
        if compute.int8 and is_vector:
            tau = _tau(_similarities(expected), _similarities(actual), compute.dtype)
    if not tau >= tau_bound:
        cause = f"{subject} ranks differently from the reference path: Kendall's tau {tau:.4f}, bound {tau_bound}"
        raise _refuse(entry, cause)
    if not cosine >= bound:
        raise _refuse(entry, f"{subject} has cosine {cosine:.6f} with the reference path, bound {bound}")
    return round(cosine, 7)


def _dense(left: Row, right: Row) -> tuple[Tensor, Tensor]:
    """Return two sparse rows as dense vectors of equal width. Other rows are returned unchanged."""
    if not isinstance(left, tuple):
        return left, right
    width = 1 + max((int(ids.max()) for ids, _ in (left, right) if len(ids)), default=0)
    vectors = []
    for ids, weights in (left, right):
        vector = torch.zeros(width, device=weights.device)
        vector[ids.long()] = weights
        vectors.append(vector)
    return vectors[0], vectors[1]


def _cosine(left: Tensor, right: Tensor) -> float:
    """Return the cosine of two vectors; 1 for two zero vectors. For matrices with a vector per token, return the mean
    over the tokens, since in 16 bit single tokens of a correct model may deviate.
    """
    left, right = left.cpu().double(), right.cpu().double()
    if left.ndim > 1:
        return float(F.cosine_similarity(left, right, dim=-1).mean()) if len(left) else 1.0
    if not left.any() and not right.any():
        return 1.0
    return float(F.cosine_similarity(left, right, dim=0))


def _scores(rows: Sequence[Row]) -> Tensor:
    """Return the score of each row of logits: the logit, or with two logits the last minus the first."""
    return torch.stack([row[-1] - row[0] if len(row) > 1 else row[0] for row in rows]).cpu().double()


def _similarities(rows: Sequence[Row]) -> Tensor:
    vectors = F.normalize(torch.stack(list(rows)).cpu().double())
    left, right = torch.triu_indices(len(vectors), len(vectors), 1)
    return (vectors @ vectors.T)[left, right]


def _tau(left: Tensor, right: Tensor, dtype: torch.dtype) -> float:
    """Return Kendall's tau of two lists of scores. A pair of items counts only if its scores in `left` differ by more
    than the rounding errors of `dtype`.
    """
    left_gaps, right_gaps = left[:, None] - left[None], right[:, None] - right[None]
    resolution = float(left.abs().max()) * torch.finfo(dtype).eps * 4
    counted = left_gaps.abs() > resolution
    if not counted.any():
        return 1.0
    return float((torch.sign(left_gaps) * torch.sign(right_gaps))[counted].mean())


def golden_file(entry: ModelEntry) -> Path:
    """Return the path of the entry's golden vectors. A relative path begins at the folder of the packaged catalogue."""
    return packaged_folder() / entry.golden


def _check_golden(model: Any, entry: ModelEntry, compute: Compute) -> float:
    """Compare dense vectors of texts with the entry's golden vectors, and return the lowest cosine."""
    cases = read_json(golden_file(entry)).get("dense")
    if not cases or "dense" not in getattr(model, "heads", ()):
        raise _refuse(
            entry,
            f"its golden vectors {entry.golden} are missing, empty, or for an output that the model does not have",
        )
    vectors = _encoded(model, entry, [_prompted(entry, case) for case in cases])
    expected = np.array([case["vector"] for case in cases], np.float64)
    if vectors.shape != expected.shape:
        raise _refuse(
            entry, f"golden vectors in {entry.golden} are {expected.shape[1]} wide, the model's are {vectors.shape[1]}"
        )
    cosines = (vectors * expected).sum(1) / np.maximum(
        np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1), 1e-12
    )
    bound = _bound(compute)
    worst = int(cosines.argmin())
    if not cosines[worst] >= bound:
        cause = (
            f"golden vector {worst} of {entry.golden} has cosine {cosines[worst]:.6f} with the model's vector, "
            f"expected at least {bound}"
        )
        raise _refuse(entry, cause)
    return round(float(cosines[worst]), 7)


def _prompted(entry: ModelEntry, case: dict[str, Any]) -> str:
    """Return the text of a golden case, inserted into the query or document prompt if the case has `is_query`."""
    if "is_query" not in case:
        return str(case["text"])
    template = entry.prompts.get("query" if case["is_query"] else "document", "{text}")
    return template.replace("{instruction}", entry.prompts.get("default_instruction", "")).replace(
        "{text}", case["text"]
    )


def _encoded(model: Any, entry: ModelEntry, texts: Sequence[str]) -> np.ndarray:
    tokenizer = Tokenizer.from_buffer(model.tokenizer)
    tokenizer.enable_truncation(entry.max_tokens)
    ids = [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch_fast(list(texts))]
    batch = Items(np.array([len(row) for row in ids], np.int64), np.concatenate(ids))
    packed = model.pack(batch, np.arange(len(ids)))
    reduced = model.heads["dense"].reduce(
        States(model.forward(packed), packed, np.zeros(len(ids), bool)), np.arange(len(ids))
    )
    vectors = torch.stack(list(reduced.rows)).cpu().double().numpy()
    return np.asarray(vectors[np.argsort(packed.order)])
