"""Time that a worker saves if it caches the output of a model's vision tower for a page.

A reranker with the layers of Qwen3-VL 2B, a quarter of its widths and random weights scores ten questions about a page,
one after the other. Two cases alternate: in batches without an asker (name of the client's key), the tower runs for
each question; in batches of one asker, only for the first. Each round has a new page. Times are processor times.

`python bench/towers.py` takes some 3 minutes of one core; --rounds 1 --edge 256 shows that it works.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path += map(str, Path(__file__).parents[1].glob("extras/*/tests"))

from parity import qwen_checkpoints
from parity.page_engine import Served
from parity.qwen_checkpoints import BLOCK_3
from parity.toys import image
from PIL import Image
from report import Report, machine, parser_of

from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings
from sie_sidecar.prepare.rows import ModelTokenizer

QUESTIONS = (
    "what is the total",
    "who signed it",
    "when was it paid",
    "where is the river",
    "how many lines has the table",
    "which engine",
    "the name of the town",
    "is there a seal",
    "what does the second paragraph say",
    "who is it for",
)
LANGUAGE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TOWER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "depth": 24,
    "num_heads": 4,
    "out_hidden_size": 512,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}


def load(engine: AdapterEngine, folder: Path, pixels: int) -> Served:
    qwen_checkpoints.qwen3_vl(folder, axes=(12, 10, 10), language=LANGUAGE, tower=TOWER)
    entry = parse_entry(
        {
            "id": "bench/reranker",
            "weights": {"path": str(folder)},
            "family": "multimodal-reranker",
            "inputs": ["text", "image"],
            "outputs": {"score": 0},
            "max_tokens": 4096,
            "pair": ("Judge the document.\n", "<Query>:{query}\n<Document>:{document}", "\n"),
            "head": {"yes_token": "y", "no_token": "n"},
            "load": {"min_pixels": 4 * BLOCK_3**2, "max_pixels": pixels},
        }
    )
    weights = engine.residency.ensure(entry.id, entry).weights
    return Served(engine, entry, weights, ModelTokenizer(weights.tokenizer, weights.max_tokens))


def ask(served: Served, page: Image.Image, questions: Sequence[str] = QUESTIONS) -> tuple[list[float], bytes]:
    """Return the processor milliseconds of each question, and the bytes of all scores."""
    took_ms, scores = [], []
    for question in questions:
        batch = served.asked("score", [page], question)
        began_s = time.process_time()
        scores += served.answers(batch)
        took_ms.append(1e3 * (time.process_time() - began_s))
    return took_ms, np.array(scores).tobytes()


def main() -> None:
    parser = parser_of(__doc__, rounds=5, out="towers.md")
    parser.add_argument("--edge", type=int, default=512, help="edge of the square pages, in pixels")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    say = Report()
    prepare_process()
    engine = AdapterEngine(Settings(device=arguments.device))
    kept_bytes, uncached_ms, first, later, ratios = 0, [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        served = load(engine, Path(folder) / "reranker", arguments.edge**2)
        ask(served, image(arguments.edge, arguments.edge, 0), QUESTIONS[:1])  # warms up for this image size
        for number in range(1, arguments.rounds + 1):
            page = image(arguments.edge, arguments.edge, number)
            alone_ms, expected = ask(served, page)
            before_bytes = engine.outputs.use().held_bytes
            known_ms, scores = ask(replace(served, asker="bench"), page)
            assert scores == expected or arguments.device != "cpu", "the scores differ"
            print(f"round {number}: {sum(alone_ms):.0f} ms, {sum(known_ms):.0f} ms", file=sys.stderr, flush=True)
            kept_bytes = max(kept_bytes, engine.outputs.use().held_bytes - before_bytes)
            uncached_ms += alone_ms
            first.append(known_ms[0])
            later += known_ms[1:]
            ratios.append(sum(alone_ms) / sum(known_ms))
    assert engine.stop(10)
    blocks = (arguments.edge // BLOCK_3) ** 2
    say("# Pages that are asked about again")
    say()
    say(f"`python bench/towers.py`, {machine()}, one thread, {served.weights.precision}.")
    say(
        f"{arguments.rounds} rounds of ten questions to a page of {blocks} blocks of {BLOCK_3} x {BLOCK_3} pixels. The"
        " scores are equal bit for bit."
    )
    say()
    say("| | processor time of a question |")
    say("|---|--:|")
    say(f"| the tower runs for each question | {statistics.median(uncached_ms):.0f} ms |")
    say(f"| first question: the tower runs | {statistics.median(first):.0f} ms |")
    say(f"| later questions: the output of the tower is cached | {statistics.median(later):.0f} ms |")
    say()
    say(
        f"With the cache, ten questions to a page take 1/{statistics.median(ratios):.2f} of the time"
        f" ({min(ratios):.2f} to {max(ratios):.2f}). The outputs of a page take {kept_bytes / 2**20:.1f} MiB."
    )
    say.save(arguments.out)


if __name__ == "__main__":
    main()
