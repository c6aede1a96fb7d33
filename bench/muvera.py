"""Time of MUVERA's fixed dimensional encodings, in milliseconds for each item: the product's batched code, compared
with numpy code that runs the steps item by item.

    python bench/muvera.py [--rounds 9] [--block-mib 2]

Items have 128 tokens of width 128, batches 32 items. Both forms run on one thread, cache their matrices and alternate.
Column `one item`: the product's code with one item in each call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import muvera_naive

from sie_adapter.epilogues import muvera
from sie_contracts.models.muvera import Muvera

ITEMS, TOKENS, DIM = 32, 128, 128
CASES = {
    "query": (Muvera(), True),
    "document": (Muvera(), False),
    "document, fill": (Muvera(fill_empty_partitions=True), False),
    "document, inner width 16": (Muvera(projection_dim=16, final_projection_dim=None), False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block-mib", type=int, default=muvera.CPU_BLOCK_BYTES >> 20)
    options = parser.parse_args()
    rounds, muvera.CPU_BLOCK_BYTES = options.rounds, options.block_mib << 20
    torch.set_num_threads(1)
    tokens = np.random.default_rng(0).normal(size=(ITEMS, TOKENS, DIM)).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=2, keepdims=True)
    rows = list(torch.from_numpy(tokens))
    print(f"{'case':26} {'naive':>9} {'batched':>9} {'ratio':>7}   one item    worst difference")
    for name, (parameters, is_query) in CASES.items():

        def naive(parameters: Muvera = parameters, is_query: bool = is_query) -> np.ndarray:
            return np.stack([muvera_naive.encode(item, parameters, is_query=is_query) for item in tokens])

        def batched(parameters: Muvera = parameters, is_query: bool = is_query) -> torch.Tensor:
            with torch.inference_mode():
                return muvera.encode(rows, parameters, is_query=is_query)

        def alone(parameters: Muvera = parameters, is_query: bool = is_query) -> None:
            with torch.inference_mode():
                for item in rows:
                    muvera.encode([item], parameters, is_query=is_query)

        worst = float(np.abs(naive() - batched().numpy()).max())
        alone()
        spent: dict[str, list[float]] = {"naive": [], "batched": [], "alone": []}
        for _ in range(rounds):
            for form, run in (("naive", naive), ("batched", batched), ("alone", alone)):
                started = time.perf_counter()
                run()
                spent[form].append(1e3 * (time.perf_counter() - started) / ITEMS)
        middle = {form: statistics.median(values) for form, values in spent.items()}
        ratio = middle["naive"] / middle["batched"]
        print(
            f"{name:26} {middle['naive']:6.2f} ms {middle['batched']:6.2f} ms {ratio:6.1f}x   {middle['alone']:6.2f} ms"
            f"   {worst:.1e}"
        )


if __name__ == "__main__":
    main()
