"""Compare a GLiNER and a GLiClass model in SIE with the same models in the libraries gliner and gliclass, on the same
texts, in one run.

    python bench/libraries.py [--rounds 5] [--seconds 5] [--layers 6] [--width 768] [--precision float32]

SIE and the library load the same checkpoint: random weights, a backbone of the size of DeBERTa-v3-small. The library
runs in this process, in float32 on all cores, with calls of 1 and of 64 texts. `sie serve` gets one text a request,
from 1 and from 64 clients. Texts (log-normal lengths, mean about 87 words), labels and threshold are equal. SIE and the
library are measured in turn. The rate at 64 clients is compared with the better of the library's two rates.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path += map(str, Path(__file__).parents[1].glob("extras/*/tests"))
sys.path.insert(0, str(Path(__file__).parent))

from client import request
from local_models import LocalModels
from oracle import WORDS
from overhead import Cluster
from parity.gliner_checkpoints import DEBERTA, gliclass_folder, gliner_folder
from report import Report, in_turn, machine, parser_of
from words import texts_of

LABELS = ["person", "city", "organization", "date", "product", "event"]
THRESHOLD = 0.9  # with random weights a lower threshold would find too many entities
BATCH = 64
Library = Callable[[list[str]], object]


def gliner(folder: Path, backbone: dict[str, Any]) -> tuple[Library, dict[str, Any]]:
    """Return the GLiNER library's model as a function of texts, and the catalogue entry of the same weights."""
    from gliner import GLiNER

    model = GLiNER.from_pretrained(str(gliner_folder(folder, backbone=backbone)), map_location="cpu")
    entry = {"family": "gliner", "outputs": {"entities": 0}, "max_tokens": 512}
    return lambda texts: model.inference(texts, LABELS, threshold=THRESHOLD, batch_size=BATCH), entry


def gliclass(folder: Path, backbone: dict[str, Any]) -> tuple[Library, dict[str, Any]]:
    """Return the GLiClass library's pipeline as a function of texts, and the catalogue entry of the same weights."""
    from gliclass import GLiClassModel, ZeroShotClassificationPipeline
    from transformers import AutoTokenizer

    width = {"hidden_size": backbone["hidden_size"]}
    gliclass_folder(folder, backbone=backbone, **width)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GLiClassModel.from_pretrained(folder)
    pipeline = ZeroShotClassificationPipeline(
        model, tokenizer, classification_type="multi-label", device="cpu", max_length=512, progress_bar=False
    )
    entry = {"family": "gliclass", "outputs": {"classifications": 0}, "max_tokens": 512}
    return lambda texts: pipeline(texts, LABELS, threshold=THRESHOLD, batch_size=BATCH), entry


KINDS = {"gliner": gliner, "gliclass": gliclass}


def library_rate(library: Library, texts: Iterator[str], size: int, seconds: float) -> float:
    """Return the library's texts a second, if each call has `size` texts."""
    began_s, count = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began_s) < seconds:
        library(list(itertools.islice(texts, size)))
        count += size
    return count / spent_s


def measure(kind: str, options: argparse.Namespace, say: Report) -> None:
    backbone = {
        **DEBERTA,
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
        "intermediate_size": 4 * options.width,
        "position_buckets": 256,
        "max_position_embeddings": 1024,
    }
    texts = [" ".join(WORDS[hash_of(word) % len(WORDS)] for word in text.split()) for text in texts_of("mix", 256)]
    with tempfile.TemporaryDirectory() as folder:
        models = LocalModels(Path(folder, "entries"), Path(folder, "weights"))
        models.folder.mkdir()
        library, entry = KINDS[kind](models.weights / kind, backbone)
        models.add(kind, {**entry, "load": {"precision": options.precision}})
        with Cluster(models.arguments, model=f"test/{kind}") as cluster:
            body = {"params": {"labels": LABELS, "threshold": THRESHOLD}}
            path = f"/v1/extract/test/{kind}"
            requests = [request(path, msgspec.msgpack.encode({**body, "items": [text]})) for text in texts]
            runs = {
                "library, one text": lambda: library_rate(library, itertools.cycle(texts), 1, options.seconds),
                "SIE, 1 client": lambda: cluster.rate(requests, 1, options.seconds),
                "library, 64 texts": lambda: library_rate(library, itertools.cycle(texts), BATCH, options.seconds),
                "SIE, 64 clients": lambda: cluster.rate(requests, BATCH, options.seconds),
            }
            rates = in_turn(options.rounds, runs)
    median = {name: statistics.median(values) for name, values in rates.items()}
    best = max(median["library, one text"], median["library, 64 texts"])
    alone, many = median["SIE, 1 client"] / median["library, one text"], median["SIE, 64 clients"] / best
    cells = [f"{median[name]:.1f}" for name in median]
    say(f"| {kind} | {' | '.join(cells)} | {alone:.2f} | {many:.2f} |")


def hash_of(word: str) -> int:
    return sum(map(ord, word))


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=5.0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--precision", default="float32", help="precision of SIE; the libraries compute in float32")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    say = Report()
    say("# A GLiNER and a GLiClass beside their libraries")
    say()
    say(
        f"Texts a second, medians of {options.rounds} rounds of {options.seconds:g} s. {machine()}. Backbone: "
        f"{options.layers} layers of {options.width}, SIE in {options.precision}, the libraries in float32."
    )
    say()
    say(
        "| model | library, one text a call | SIE, 1 client | library, 64 texts a call | SIE, 64 clients "
        "| SIE / library, 1 client | SIE / best of the library, 64 clients |"
    )
    say("|---|---|---|---|---|---|---|")
    for kind in [options.only] if options.only else KINDS:
        measure(kind, options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
