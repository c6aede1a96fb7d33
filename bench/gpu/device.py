"""The engine compared with sentence-transformers and with padded batches: encoders with random weights on one device.

    engine                  token ids in batches of at most SIE_MAX_BATCH_COST tokens. The batches wait for the engine's
                            lanes (device threads), as the batches of a sidecar do
    padded                  token ids in the same order, in padded batches of at most SIE_MAX_BATCH_COST tokens, padding
                            included, as in servers that pad. Transformers with SDPA, mean pooling
    sentence-transformers   encode(), which also tokenises the texts. `default`: float32, batches of 32 texts; `same
                            precision`: the kit's precision, batches of 32 and of 256 texts

Loads: texts of one length, and `mix` (log-normal lengths, mean about 87 tokens). Columns:

* utilisation: the engine's operations a second in linear layers and attention (2 for each multiplication), divided by
  the dense 16-bit peak of the data sheet, or by the measured rate of a matrix product if PEAKS lacks the card;
* busy: mean of NVML's utilisation while the engine runs;
* cosine: lowest cosine between the vectors of the engine and of `default`;
* pass: the forward pass alone, on a full batch of texts of the first length. Its inputs are already on the device. In
  brackets: its utilisation;
* compiled layers: the same with layers that torch has compiled.

device-profile.md has the kernels of the first model for texts of the longest length.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit
import numpy as np
import torch
from kit import DEVICE, LONGEST, PRECISION, REHEARSAL
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, PreTrainedConfig, XLMRobertaConfig

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import Reply

_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
SIZES: dict[str, PreTrainedConfig] = {
    "bert-large": BertConfig(**_LARGE),
    "xlm-r-large": XLMRobertaConfig(
        **_LARGE, vocab_size=250_002, max_position_embeddings=LONGEST + 2, type_vocab_size=1
    ),
}
TINY: dict[str, PreTrainedConfig] = {"tiny": BertConfig(**kit.TINY, vocab_size=len(kit.TOKENS))}
TOKENS = 512 if REHEARSAL else 131_072  # total tokens of the texts of a load
# Dense 16-bit operations a second, without sparsity, from the vendor's data sheets.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "T4": 65e12,
}
COLUMNS = (
    *("model", "tokens", "attention", "engine, texts/s", "engine, tokens/s", "padded, texts/s", "default, texts/s"),
    *("same precision, 32", "same precision, 256", "engine / padded", "engine / better of same precision"),
    *("utilisation", "busy", "cosine", "pass, tokens/s", "compiled layers, tokens/s"),
)

Run = Callable[[], np.ndarray]  # vectors, float32 [texts, width]


@dataclass(frozen=True)
class Load:
    """Texts of a load. `ids`: for each text its token ids, int32 [tokens]."""

    name: str
    ids: list[np.ndarray]

    @classmethod
    def from_name(cls, name: str, tokens: int) -> Load:
        """Make a load of about `tokens` tokens. `name`: `mix`, or the length of every text in tokens."""
        lengths = kit.mixed_lengths(tokens // 87) if name == "mix" else [int(name)] * (tokens // int(name))
        return cls(name, kit.random_ids(lengths))

    @property
    def texts(self) -> list[str]:
        return [*map(kit.text_of, self.ids)]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def batches(self, most: int, *, padded: bool) -> list[list[np.ndarray]]:
        """Return batches of the texts in order, each of at most `most` tokens. `padded`: padding counts as tokens."""
        batches: list[list[np.ndarray]] = [[]]
        for row in self.ids:
            together = [*batches[-1], row]
            cost = len(together) * max(map(len, together)) if padded else sum(map(len, together))
            if batches[-1] and cost > most:
                batches.append([row])
            else:
                batches[-1] = together
        return batches


def engine_run(engine: AdapterEngine, model: str, load: Load, batch_tokens: int) -> Run:
    messages = [kit.batch(model, part, number) for number, part in enumerate(load.batches(batch_tokens, padded=False))]

    def run() -> np.ndarray:
        replies: list[list[Reply]] = [[] for _ in messages]
        jobs = [DeviceJob(message, answers.append) for message, answers in zip(messages, replies, strict=True)]
        for job in jobs:
            engine.device_threads.submit(job)
        for job in jobs:
            job.finished.wait()
        return np.concatenate([kit.vectors(answers[-1]) for answers in replies])

    return run


def padded_run(folder: Path, load: Load, batch_tokens: int) -> Run:
    model = AutoModel.from_pretrained(folder, dtype=PRECISION, attn_implementation="sdpa").eval().to(DEVICE)
    batches = []
    for part in load.batches(batch_tokens, padded=True):
        ids = np.zeros((len(part), max(map(len, part))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(part):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        batches.append((torch.from_numpy(ids), torch.from_numpy(mask)))

    def run() -> np.ndarray:
        parts = []
        with torch.inference_mode():
            for ids, mask in batches:
                on_device = mask.to(DEVICE)
                states = model(input_ids=ids.to(DEVICE), attention_mask=on_device)[0]
                summed = (states * on_device[..., None]).sum(1) / on_device.sum(1, keepdim=True)
                parts.append(torch.nn.functional.normalize(summed.float(), dim=1).cpu().numpy())
        return np.concatenate(parts)

    return run


def stock_run(model: SentenceTransformer, texts: list[str], size: int) -> Run:
    return lambda: np.asarray(
        model.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False), np.float32
    )


def stock(folder: Path, precision: str) -> SentenceTransformer:
    model = SentenceTransformer(
        str(folder), device=str(DEVICE), local_files_only=True, model_kwargs={"dtype": precision}
    )
    model.max_seq_length = LONGEST
    return model


def operations(config: Any, length: int) -> float:
    """Return the floating-point operations of a text: linear layers plus the two matrix products of attention."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return float(config.num_hidden_layers * length * (2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * length * hidden))


def peak() -> tuple[float, str]:
    """Return the device's peak operations a second, and the source of this figure."""
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else ""
    listed = next((peak for part, peak in PEAKS.items() if part in name), None)
    if listed is not None:
        return listed, "data sheet"
    return product(512), "measured product"


def product(size: int) -> float:
    """Measure the operations a second of a product of two [size, size] matrices in the kit's precision."""
    left = torch.randn(size, size, device=DEVICE).to(getattr(torch, PRECISION))
    torch.mm(left, left)
    return 2 * size**3 / kit.seconds_of(lambda: torch.mm(left, left), least=10, budget_s=0.2)


def measure(size: str, config: PreTrainedConfig, engine: AdapterEngine, table: kit.Table, batch_tokens: int) -> None:
    """Measure one model with all loads and write a row for each load."""
    ceiling, source = peak()
    with tempfile.TemporaryDirectory() as root:
        folder = kit.save(Path(root), config)
        loaded = engine.residency.ensure(size, kit.entry_of(size, folder, config.hidden_size)).describe(0.0)
        if loaded.precision != PRECISION:
            raise kit.CheckFailed(f"this device computes in {loaded.precision}, not in {PRECISION}")
        default, same = stock(folder, "float32"), stock(folder, PRECISION)
        names = ("512", "128", "50", "mix") if size == "bert-large" else ("512",)
        for name in ("16",) if REHEARSAL else names:
            load = Load.from_name(name, TOKENS)
            texts = load.texts
            runs: dict[str, Run] = {
                "engine": engine_run(engine, size, load, batch_tokens),
                "padded": padded_run(folder, load, batch_tokens),
                "default": stock_run(default, texts, 32),
                "same 32": stock_run(same, texts, 32),
                "same 256": stock_run(same, texts, 256),
            }
            rates, busy, first, rows = {}, 0.0, np.empty(0), np.empty(0)
            for kind, run in runs.items():
                rows = run()  # warms up
                if kind == "engine":
                    first = rows
                elif kind == "default":
                    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(rows, axis=1)
                    cosine = float(((first * rows).sum(1) / norms).min())
                with kit.utilisation() as samples:
                    taken_s = kit.seconds_of(run, least=1, budget_s=2.0 if kind == "engine" else 1.0)
                rates[kind] = len(load.ids) / taken_s
                if kind == "engine":
                    busy = statistics.mean(samples or [0.0])
            per_text = sum(operations(config, len(row)) for row in load.ids) / len(load.ids)
            done = per_text * rates["engine"]
            alone: list[str] = ["", ""]
            if name == names[0] or REHEARSAL:
                alone = passes(engine, size, int(name), batch_tokens, per_text / ceiling)
            table.row(
                *(size, name, loaded.attention, rates["engine"], rates["engine"] * load.tokens / len(load.ids)),
                *(rates["padded"], rates["default"], rates["same 32"], rates["same 256"]),
                rates["engine"] / rates["padded"],
                rates["engine"] / max(rates["same 32"], rates["same 256"]),
                f"{100 * done / ceiling:.0f} % of {ceiling / 1e12:.1f} T ({source})",
                f"{busy:.0f} %",
                f"{cosine:.6f}",
                *alone,
            )
    engine.residency.release(size)


def passes(engine: AdapterEngine, size: str, length: int, batch_tokens: int, share: float) -> list[str]:
    """Measure the forward pass alone, then with compiled layers. Return a cell with tokens a second and utilisation for
    each. `share`: part of the device's peak that one text a second needs. The layers stay compiled.
    """
    cells = []
    texts = 1 if REHEARSAL else batch_tokens // length
    with torch.inference_mode(), engine.residency.use(size) as resident:
        backbone: Any = resident.weights.backbone
        for is_compiled in (False, True):
            if is_compiled:
                kit.compile_layers(backbone)
            run = kit.forward_of(backbone, [length] * texts)
            run()
            rate = texts / kit.seconds_of(run, least=5, budget_s=1.0)
            cells.append(f"{rate * length:.0f} ({100 * rate * share:.0f} %)")
    return cells


def profile(size: str, config: PreTrainedConfig, engine: AdapterEngine, batch_tokens: int) -> None:
    """Profile a few full batches of the longest texts. Write their kernels and the rate of the matrix products."""
    length = 16 if REHEARSAL else LONGEST
    texts = 4 * max(1, batch_tokens // length) if not REHEARSAL else 4
    with tempfile.TemporaryDirectory() as root, torch.inference_mode():
        folder = kit.save(Path(root), config)
        engine.residency.ensure(size, kit.entry_of(size, folder, config.hidden_size))
        load = Load(str(length), kit.random_ids([length] * texts))
        messages = [kit.batch(size, part) for part in load.batches(batch_tokens, padded=False)]

        def run() -> None:
            for message in messages:
                kit.vectors(engine.execute(message))

        run()
        taken_s = kit.seconds_of(run)
        kernels = kit.profiled(run)
    table = kit.Table(
        "device-profile", f"Kernels of {size}, {texts} texts of {length} tokens", ("us", "%", "calls", "kernel")
    )
    for kernel, calls, us in kernels.rows[:15]:
        table.row(f"{us:.0f}", f"{100 * us / kernels.span_us:.1f}", calls, kernel[:160])
    rest = kernels.rows[15:]
    table.row(f"{sum(us for *_, us in rest):.0f}", "", sum(calls for _, calls, _ in rest), f"{len(rest)} more")
    done = operations(config, length) * texts
    table.text(
        f"No kernel runs in {100 * kernels.idle_share:.1f} % of {kernels.span_us / 1e3:.2f} ms. {done / 1e12:.2f} T"
        f" operations in {1e3 * taken_s:.2f} ms: {done / taken_s / 1e12:.0f} T a second. A product of square matrices"
        f" {512 if REHEARSAL else 8192} wide reaches {product(512 if REHEARSAL else 8192) / 1e12:.0f} T a second."
    )
    engine.residency.release(size)


def main() -> None:
    """Write the profile first, because it takes little time, then the rows of all models."""
    sizes = TINY if REHEARSAL else SIZES
    batch_tokens = Settings().max_batch_cost
    with kit.new_engine() as engine:
        name, config = next(iter(sizes.items()))
        profile(name, config, engine, batch_tokens)
        table = kit.Table(
            "device",
            f"The engine beside sentence-transformers, {PRECISION}, batches of {batch_tokens} tokens",
            COLUMNS,
        )
        for name, config in sizes.items():
            measure(name, config, engine, table, batch_tokens)


if __name__ == "__main__":
    main()
