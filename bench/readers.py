"""Rates and latencies of a document reader (a model that generates the text of a page), alone and beside text encoding.

1. Pages per second of the reader, 16 pages at once compared with one by one: through the cluster, and in this process.
2. Latency of one text every 100 ms, without pages and while the reader is saturated with pages: p50, p99, errors. A
   text waits for at most one step of the reader, so the bound of the p99 is twice the p99 without pages plus one step.
3. Pages per second without texts, and during texts that keep every lane (device thread) busy: passages, then short
   queries.
4. Processor time of each process while the texts of 3 are sent. The report lists the reader's thread separately.

The reader has random weights, 512 wide and 6 layers deep. It never generates an end token, so each page ends at a limit
of tokens: --tokens in measurement 1, a third of --tokens in 2 to 4, so that more pages end during a measurement. MiniLM
encodes the texts. The measurements of 1 alternate for --rounds rounds, and so do those of 2 and 3.

`python bench/readers.py` takes some 4 minutes on 2 idle cores; --seconds 1 --rounds 1 shows that it works. --part pages
runs only 1, --part texts only 2 to 4. `-- --name value` passes a setting to `sie serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import psutil
import torch
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path += map(str, Path(__file__).parents[1].glob("extras/*/tests"))

from client import Answer, Clients, open_loop, percentile, request, statuses
from image_files import encoded, picture
from local_models import under
from overhead import Cluster
from parity.reader_checkpoints import OCR_TOKENS, lighton
from report import Report, cores, in_turn, machine, parser_of
from words import WORDS

from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.packed.packing import Shown
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import Settings
from sie_sidecar.prepare import images

READER, TEXTS = "test/reader", "test/texts"
HEAD, HEADS, LAYERS = 64, 8, 6
SIDE = 140  # pixels of a page's height; small, so that the steps take most of the time
ROWS = 16  # number of pages that the reader reads at once
WAITING = 8  # number of clients beyond ROWS, so that at least one page always waits for the reader
EACH_S = 0.1
PASSAGE_WORDS, PASSAGES = 60, 16
LOADS = {f"passages, 8 x {PASSAGES}": (8, PASSAGES, PASSAGE_WORDS), "queries, 64 x 1": (64, 1, 6)}
BUDGET_MS = "120000"
GOAL_AT_ONCE, GOAL_SHARE = 3.0, 0.2


def checkpoint(folder: Path) -> None:
    """Save a LightOnOCR model whose weights exceed the processor cache, so that each step reads them from memory."""
    from transformers import AutoConfig, AutoTokenizer, LightOnOcrConfig, LightOnOcrForConditionalGeneration

    lighton(folder)
    config = AutoConfig.from_pretrained(folder).to_dict()
    config["text_config"] |= {
        "hidden_size": HEAD * HEADS,
        "intermediate_size": 4 * HEAD * HEADS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "layer_types": None,
    }
    torch.manual_seed(0)
    model = LightOnOcrForConditionalGeneration(LightOnOcrConfig(**config))
    with torch.no_grad():
        model.get_output_embeddings().weight[model.config.text_config.eos_token_id] = 0  # no page ends early
    model.generation_config.pad_token_id = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|endoftext|>")
    model.save_pretrained(folder)


def entry_of(folder: Path) -> dict[str, Any]:
    return {
        "weights": {"path": str(folder)},
        "family": "document-reader",
        "inputs": ["image"],
        "outputs": {"entities": 0, "data": 0},
        "max_tokens": OCR_TOKENS,
        "load": {},  # empty: the machine chooses the precision
    }


def pages() -> list[bytes]:
    """Return ROWS pages as PNG. Their sizes differ, so that their generated texts begin at different positions."""
    return [encoded(picture(SIDE - 2 * number, SIDE, number), "PNG") for number in range(ROWS)]


class Alone:
    """The reader in this process, on the same kind of thread as in the adapter."""

    def __init__(self, folder: Path, files: Sequence[bytes], tokens: int) -> None:
        prepare_process()
        self.engine = AdapterEngine(Settings())
        entry = parse_entry({"id": READER, **entry_of(folder)})
        weights: Any = self.engine.residency.ensure(READER, entry).weights
        self.precision = weights.precision
        self._reading = weights.reading(self.engine.readings.read, lambda: False)
        self._options = ExtractOptions((), parameters={"max_new_tokens": tokens})
        self._tokens = tokens
        prepared_images = [images.prepare(file, weights.rows["extract"].images) for file in files]
        self._pages = [
            Shown(np.frombuffer(image.pixels, np.uint8).reshape(*image.size, 3), *image.upright)
            for image in prepared_images
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(5)

    def rate(self, clients: int, seconds: float) -> float:
        """Return pages per second of `clients` callers, each with one page at a time."""
        end_s = time.perf_counter() + seconds

        def ask(number: int) -> int:
            done = 0
            while time.perf_counter() < end_s:
                (extraction,) = self._reading.extract([""], [self._options], [[self._pages[number % len(self._pages)]]])
                check(extraction["data"], self._tokens)
                done, number = done + 1, number + clients
            return done

        started_s = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            done = sum(pool.map(ask, range(clients)))
        return done / (time.perf_counter() - started_s)


def check(data: Mapping[str, Any], tokens: int) -> None:
    """Raise RuntimeError if a page ended before `tokens` tokens, because the loads would then differ."""
    if (data["finish_reason"], data["completion_tokens"]) != ("length", tokens):
        raise RuntimeError(f"a page did not end after {tokens} tokens: {data}")


class Served:
    def __init__(self, cluster: Cluster, files: Sequence[bytes], tokens: int) -> None:
        self.cluster = cluster
        self._tokens = tokens
        self._pages = [
            self._request(
                f"/v1/extract/{READER}",
                {"items": [{"images": [file]}], "params": {"max_new_tokens": tokens}},
            )
            for file in files
        ]
        rng = np.random.default_rng(7)
        self._texts = {
            name: [
                self._request(
                    f"/v1/encode/{TEXTS}", {"items": [" ".join(rng.choice(WORDS, words)) for _ in range(text_count)]}
                )
                for _ in range(32)
            ]
            for name, (_, text_count, words) in LOADS.items()
        }
        self._query = self._request(f"/v1/encode/{TEXTS}", {"items": ["What is deep learning?"]})

    @staticmethod
    def _request(path: str, body: dict[str, Any]) -> bytes:
        return request(path, msgspec.msgpack.encode(body), x_sie_timeout_ms=BUDGET_MS)

    def _clients(self, requests: Sequence[bytes], count: int) -> Clients:
        return Clients("127.0.0.1", self.cluster.port, itertools.cycle(requests), count=count)

    def reading(self, clients: int = ROWS + WAITING) -> Clients:
        return self._clients(self._pages, clients)

    def saturating(self, load: str) -> Clients:
        return self._clients(self._texts[load], LOADS[load][0])

    async def texts(self, seconds: float) -> list[Answer]:
        """Send one text every EACH_S seconds and return the answers."""
        return await open_loop("127.0.0.1", self.cluster.port, self._query, each_s=EACH_S, seconds=seconds)

    async def warm(self) -> None:
        """Run every load for a second before the measurements, so that the measurements exclude start-up costs."""
        for name in LOADS:
            clients = self.saturating(name)
            await asyncio.sleep(1)
            failures(await clients.stop())
        reading = self.reading()
        await asyncio.sleep(1)
        failures(await reading.stop())

    async def rate(self, clients: int, seconds: float) -> float:
        """Return the pages per second of `clients` clients, each of which has one page in flight. After `seconds`
        seconds they send no more pages; the measured time ends with the last answer.
        """
        started_s = time.perf_counter()
        reading = self.reading(clients)
        await asyncio.sleep(seconds)
        answers = await reading.stop()
        failures(answers)
        for answer in answers:
            check(msgspec.msgpack.decode(answer.body)["items"][0]["data"], self._tokens)
        return len(answers) / (time.perf_counter() - started_s)

    def rate_now(self, clients: int, seconds: float) -> float:
        return uvloop.run(self.rate(clients, seconds))


def failures(answers: Sequence[Answer]) -> None:
    """Raise RuntimeError if an answer has another status than 200."""
    if failed := [answer for answer in answers if answer.status != 200]:
        raise RuntimeError(f"{statuses(failed)}: {failed[0].body[:300]!r}")


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def at_once(alone: Alone, served: Served, seconds: float, rounds: int, say: Report) -> None:
    ways: dict[tuple[str, int], Callable[[], float]] = {}
    for clients in (1, ROWS):
        ways["in this process", clients] = functools.partial(alone.rate, clients, seconds)
        ways["cluster", clients] = functools.partial(served.rate_now, clients, seconds)
    rates = in_turn(rounds, ways)
    say(f"\n## {ROWS} pages at once\n\nPages per second, median of {rounds} rounds, each in turn.\n")
    say(f"| where | one by one | {ROWS} at once | ratio | goal | |\n|---|---|---|---|---|---|")
    for where in ("in this process", "cluster"):
        single_rates, many = rates[where, 1], rates[where, ROWS]
        ratio = statistics.median(b / a for a, b in zip(single_rates, many, strict=True))
        say(
            f"| {where} | {statistics.median(single_rates):.2f} | {statistics.median(many):.2f} | {ratio:.1f} "
            f"| >= {GOAL_AT_ONCE:.0f} | {verdict(ratio >= GOAL_AT_ONCE)} |"
        )


class Interval:
    """Measurement of answers and processor time, from the construction of the object until `end`."""

    def __init__(self, cluster: Cluster, **clients: Clients) -> None:
        self._cluster, self._clients = cluster, clients
        self._before = usage(cluster)
        self._began_s = time.perf_counter()

    def end(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (clients' name -> requests per second, process role -> mean number of used cores)."""
        now_s = time.perf_counter()
        seconds = now_s - self._began_s
        rates = {
            name: sum(answer.status == 200 and self._began_s <= answer.ended_s < now_s for answer in clients.answers)
            / seconds
            for name, clients in self._clients.items()
        }
        now = usage(self._cluster)
        return rates, {role: (value - self._before.get(role, 0.0)) / seconds for role, value in now.items()}


def usage(cluster: Cluster) -> dict[str, float]:
    """Return role -> processor seconds so far. The adapter's threads that read pages have an entry of their own."""
    cpu_s = dict(cluster.cpu_s())
    own = psutil.Process().cpu_times()
    cpu_s["this benchmark"] = own.user + own.system
    reading = sum(map(stepped_back_s, adapters()))
    if "adapter" in cpu_s and reading:
        cpu_s["adapter"] -= reading
        cpu_s["adapter, reading"] = reading
    return cpu_s


def adapters() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "adapter" in process.cmdline()[1:4]]


def stepped_back_s(process: psutil.Process) -> float:
    """Return the processor seconds of a process's threads that have a lower priority than the process. 0 without
    Linux's /proc, and if the process itself has the lowest priority.
    """
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        return 0.0
    base, ticks = process.nice(), 0
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            # the fields of proc_pid_stat(5) from the third on
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            if int(fields[16]) > base:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Beside:
    """Results of rounds. Each round measures texts alone, pages alone, texts beside pages, pages beside many texts."""

    def __init__(self, served: Served, seconds: float) -> None:
        self._served, self._seconds = served, seconds
        self.texts: dict[str, list[Answer]] = {"without pages": [], "beside pages": []}
        self.pages: dict[str, list[float]] = {}
        self.answered: dict[str, list[float]] = {}
        self.cores: dict[str, list[dict[str, float]]] = {}

    async def round(self) -> None:
        served, seconds = self._served, self._seconds
        self.texts["without pages"] += await served.texts(seconds)
        reading = served.reading()
        await self._measure("no text", reading, None)
        interval = Interval(served.cluster, pages=reading)
        self.texts["beside pages"] += await served.texts(seconds)
        self._keep("a text each 100 ms", interval)
        for load in LOADS:
            texts = served.saturating(load)
            await self._measure(load, reading, texts)
            failures(await texts.stop())
        failures(await reading.stop())

    async def _measure(self, name: str, reading: Clients, texts: Clients | None) -> None:
        """Wait until ROWS pages that may have begun under another load have ended. Then measure an interval."""
        began = len(reading.answers)
        for _ in range(40):
            await asyncio.sleep(self._seconds / 20)
            if len(reading.answers) >= began + ROWS:
                break
        interval = Interval(self._served.cluster, pages=reading, **({"texts": texts} if texts else {}))
        await asyncio.sleep(self._seconds)
        self._keep(name, interval)

    def _keep(self, name: str, interval: Interval) -> None:
        rates, used = interval.end()
        self.pages.setdefault(name, []).append(rates["pages"])
        if "texts" in rates:
            self.answered.setdefault(name, []).append(rates["texts"] * LOADS[name][1])
        self.cores.setdefault(name, []).append(used)


async def beside(served: Served, seconds: float, rounds: int, tokens: int, say: Report) -> None:
    await served.warm()
    result = Beside(served, seconds)
    for _ in range(rounds):
        await result.round()
    solo = statistics.median(result.pages["no text"])
    if not all(map(min, result.pages.values())):
        raise RuntimeError(f"no page was read within {seconds:g} s: increase --seconds or decrease --tokens")
    step_ms = 1000 * ROWS / (solo * tokens)
    say(
        f"\n## Texts beside pages\n\n{ROWS + WAITING} clients each send one page of {tokens} tokens at a time. Without "
        f"texts the reader reads {solo:.2f} pages/s, so a step of {ROWS} pages takes {step_ms:.1f} ms.\n"
    )
    say("| a text each 100 ms | p50 ms | p99 ms | answers | errors | bound of p99 | |\n|---|---|---|---|---|---|---|")
    bound_ms = 0.0
    for name, answers in result.texts.items():
        times_ms = [1000 * answer.taken_s for answer in answers if answer.status == 200]
        failed = [answer for answer in answers if answer.status != 200]
        p99_ms = percentile(times_ms, 0.99)
        p50_ms = percentile(times_ms, 0.5)
        row = f"| {name} | {p50_ms:.1f} | {p99_ms:.1f} | {len(answers)} | {statuses(failed) or 'none'} |"
        if bound_ms:
            say(f"{row} {bound_ms:.0f} ms | {verdict(not failed and p99_ms <= bound_ms)} |")
        else:
            bound_ms = 2 * p99_ms + step_ms
            say(f"{row} | |")
    say("\n## Pages beside texts\n")
    say("| beside | pages/s | relative to no text | goal | | texts/s |\n|---|---|---|---|---|---|")
    for name, rates in result.pages.items():
        shares = [rate / own for rate, own in zip(rates, result.pages["no text"], strict=True)]
        share = statistics.median(shares)
        goal = f">= {GOAL_SHARE:.0%} | {verdict(share >= GOAL_SHARE)}" if name in LOADS else " | "
        texts = f"{statistics.median(result.answered[name]):.0f}" if name in LOADS else ""
        say(f"| {name} | {statistics.median(rates):.2f} | {share:.0%} | {goal} | {texts} |")
    say(f"\nCores that each process took, of {cores()}:\n")
    roles = sorted({role for rounds in result.cores.values() for used in rounds for role in used})
    names = [role.removeprefix("sie_sidecar.") for role in roles]
    say(f"| beside | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, core_s in result.cores.items():
        say(
            f"| {name} | " + " | ".join(f"{statistics.median(u.get(r, 0.0) for u in core_s):.2f}" for r in roles) + " |"
        )


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=4.0, out="readers.md")
    parser.add_argument("--tokens", type=int, default=48, help="written for each page")
    parser.add_argument(
        "--part", choices=("both", "pages", "texts"), default="both", help="pages: only 1; texts: only 2 to 4"
    )
    parser.add_argument("serve", nargs="*", help="further arguments of `sie serve`, after --")
    arguments = parser.parse_args()
    say = Report()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "reader"
        checkpoint(weights)
        models = under(Path(folder) / "models")
        models.add("reader", entry_of(weights))
        models.build("texts", "mini")
        files = pages()
        extra = [*models.arguments, "--preload", f"{READER},{TEXTS}", *arguments.serve]
        with Cluster(extra, model=READER) as cluster, Alone(weights, files, arguments.tokens) as alone:
            command = " ".join(["python bench/readers.py", *sys.argv[1:]])
            say(
                f"# Pages that are read, and texts beside them\n\n`{command}`, Python {platform.python_version()}, "
                f"torch {torch.__version__}, {machine()}, of which {cores()} may be used. A reader of {LAYERS} layers, "
                f"{HEAD * HEADS} wide, random weights in {alone.precision}, {arguments.tokens} tokens a page; texts by "
                "MiniLM."
            )
            if arguments.part != "texts":
                at_once(alone, Served(cluster, files, arguments.tokens), arguments.seconds, arguments.rounds, say)
            if arguments.part != "pages":
                short = max(2, arguments.tokens // 3)
                served = Served(cluster, files, short)
                uvloop.run(beside(served, 2 * arguments.seconds, arguments.rounds, short, say))
    say.save(arguments.out)


if __name__ == "__main__":
    main()
