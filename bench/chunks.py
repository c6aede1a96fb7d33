"""Tokens a second of documents with chunks, compared with the same tokens as plain texts, measured alternately.

1. The engine alone on tokenised rows, on all its lanes (device threads), with batches within the token budget.
2. `sie serve` with 8 clients and some documents a request.

Texts have the longest length of the model. Documents are these texts with chunks of `--chunk` tokens, or are five times
as long, so that the model reads them in windows. The vector of a chunk is pooled from the forward pass over its
document; for comparison, chunks are also encoded without context, as separate texts.

    python bench/chunks.py [--rounds 5 --seconds 5 --chunk 64] [--out bench/results/chunks.md]
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics

import httpx
import msgspec
import numpy as np
import torch
from client import request
from overhead import MODEL, Alone, Cluster
from report import Report, in_turn, machine, parser_of
from words import WORDS

from sie_contracts.wire import ipc
from sie_contracts.wire.messages import ChunkRule, Input, RunOptions, TextChunks
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import WorkItemInput

GOAL = 0.95
CLIENTS = 8
WINDOWS = 5
TEXTS = 40


def texts_of(alone: Alone, tokens: int, count: int, seed: int = 5) -> list[str]:
    """Return `count` texts of sentences, each cut to at most `tokens` tokens."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        words = [f"{word}." if place % 12 == 11 else word for place, word in enumerate(rng.choice(WORDS, tokens))]
        (encoding,) = alone.tokenizer.whole([" ".join(words)], special=False)
        texts.append(" ".join(words)[: encoding.offsets[tokens - 1][1]])
    return texts


def batches_of(alone: Alone, inputs: list[Input]) -> tuple[list[ipc.RunBatch], float]:
    """Return batches of these inputs within the token budget, and the mean tokens of a row (text, chunk or window)."""
    run = RunOptions(("dense",))
    parts: list[list[Input]] = [[]]
    used = 0
    for source in inputs:
        (work_rows,) = layouts.make(alone.tokenizer, alone.layout, [WorkItemInput([source], None, run)])
        own = sum(len(row.ids) for row in work_rows.rows)
        if parts[-1] and used + own > alone.budget:
            parts.append([])
            used = 0
        parts[-1].append(source)
        used += own
    batches, all_lengths = [], []
    for part in parts:
        (work_rows,) = layouts.make(alone.tokenizer, alone.layout, [WorkItemInput(part, None, run)])
        group = ipc.Group(
            0, len(work_rows.rows), run, len(part) if work_rows.chunked else -1, chunked=work_rows.chunked
        )
        lengths = np.array([len(row.ids) for row in work_rows.rows], "<i4")
        ids = np.concatenate([row.ids for row in work_rows.rows]).astype("<i4")
        batches.append(ipc.RunBatch("b", MODEL, "encode", lengths.tobytes(), ids.tobytes(), (group,)))
        all_lengths.append(lengths)
    return batches, float(np.concatenate(all_lengths).mean())


def requests_of(url: str, items: list[dict[str, object]], size: int) -> tuple[list[bytes], float]:
    """Return requests with `size` items, and the mean number of computed tokens of an item."""
    parts = [items[start : start + size] for start in range(0, len(items) - size + 1, size)]
    answer = httpx.post(f"{url}/v1/encode/{MODEL}", json={"items": parts[0]}, timeout=120, trust_env=False)
    # the first request stands for all, because all items have equally many tokens
    tokens = answer.raise_for_status().json()["usage"]["total_tokens"]
    bodies = [request(f"/v1/encode/{MODEL}", msgspec.msgpack.encode({"items": part})) for part in parts]
    return bodies, tokens / size


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=5.0)
    parser.add_argument("--chunk", type=int, default=64, help="maximum tokens of a chunk")
    options = parser.parse_args()
    say = Report()
    with torch.inference_mode(), Alone() as alone, Cluster(()) as cluster:
        measure(alone, cluster, options, say)
    say.save(options.out)


def measure(alone: Alone, cluster: Cluster, options: argparse.Namespace, say: Report) -> None:
    room = alone.tokenizer.max_tokens - 2
    texts = texts_of(alone, room, TEXTS)
    long = [" ".join(texts[start : start + WINDOWS]) for start in range(0, len(texts), WINDOWS)]
    rule = {"max_tokens": options.chunk}
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    say(
        f"# Chunks\n\n`python bench/chunks.py`, {machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, MiniLM-L6 in {alone.precision}, load average {load} at the start; texts of {room} "
        f"tokens, chunks of at most {options.chunk}, {options.rounds} rounds; goal: {GOAL} of the rate of texts.\n"
    )
    kinds = {
        "texts": (texts, None, 10),
        "documents of one window": (texts, True, 10),
        f"documents of {WINDOWS} windows": (long, True, 2),
        "chunks without context": (texts, False, 10),
    }
    engine, clients = {}, {}
    for kind, (sources, context, size) in kinds.items():
        chunks = None if context is None else TextChunks(ChunkRule(options.chunk), context=context)
        engine[kind] = batches_of(alone, [Input(text, chunks=chunks) for text in sources])
        fields = {} if context is None else {"chunks": rule, "context": context}
        url = f"http://127.0.0.1:{cluster.port}"
        clients[kind] = (*requests_of(url, [{"text": text, **fields} for text in sources], size), size)

    def rate(kind: str) -> tuple[float, float]:
        batches, row_tokens = engine[kind]
        bodies, item_tokens, size = clients[kind]
        own = alone.rate(batches, options.seconds) * row_tokens
        return own, cluster.rate(bodies, CLIENTS, options.seconds, size) * item_tokens

    rates = in_turn(options.rounds, {kind: functools.partial(rate, kind) for kind in kinds})
    say("| tokens/s | engine | relative to texts | `sie serve` | relative to texts |\n|---|--:|--:|--:|--:|")
    for kind, own in rates.items():
        cells = []
        for place in range(2):
            ratio = statistics.median(
                sample[place] / text[place] for sample, text in zip(own, rates["texts"], strict=True)
            )
            cells += [f"{statistics.median(sample[place] for sample in own):,.0f}", f"{ratio:.2f}"]
        say(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
