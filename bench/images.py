"""Cost of image requests to the cluster, compared with the library (transformers) in one process, measured in one run.

1. Images per second. The library decodes, prepares and computes in this process, in the better of two ways: a thread
   for each core, which does all steps for its images, or one thread with batches of 16, for which torch uses all cores.
   The cluster has 16 clients with one image a request, or 4 clients with 8. Library and cluster are measured in turn.
   The model has the size of CLIP ViT-B/32 and random weights.
2. Parts of the cost: processor time of each process for an image (image workers decode and resize); share of each stage
   in the time of a request; bytes that are copied between processes for an image.

`python bench/images.py` takes some 3 minutes on 2 cores. --seconds 3 --rounds 1 shows that it works.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path += map(str, Path(__file__).parents[1].glob("extras/*/tests"))

from client import request
from image_files import encoded, picture
from local_models import under
from overhead import Cluster
from parity.dual_checkpoints import CLIP_TOKENS, clip
from PIL import Image
from report import Report, cores, in_turn, machine, parser_of
from transformers import AutoConfig, AutoImageProcessor, CLIPConfig, CLIPModel

from sie_contracts.stages import STAGES

NAME, MODEL = "clip-b32", "test/clip-b32"
SIZE, PATCH, WIDTH = 224, 32, 512
BATCH = 16
GOAL = 0.9
LOADS = ((16, 1), (4, 8))  # (clients, images of a request)


def checkpoint(folder: Path) -> None:
    """Write a checkpoint with the towers of CLIP ViT-B/32 and a small vocabulary."""
    clip(folder)
    text = AutoConfig.from_pretrained(folder).text_config
    ids = {name: getattr(text, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {"image_size": SIZE, "patch_size": PATCH}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=ids, vision_config=vision, projection_dim=WIDTH)).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    sizes = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))


def photographs(count: int, width: int, height: int) -> list[bytes]:
    return [encoded(picture(width, height, seed), "JPEG", quality=85) for seed in range(count)]


class Library:
    """Transformers' `CLIPModel` and its image processor on Pillow, in the cluster's precision."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._model = CLIPModel.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
        self._dtype = getattr(torch, precision)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prepared(self, files: Sequence[bytes]) -> torch.Tensor:
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        pixels: torch.Tensor = self._processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels.to(self._dtype)

    @torch.inference_mode()
    def vectors(self, files: Sequence[bytes]) -> np.ndarray:
        features = self._model.get_image_features(pixel_values=self.prepared(files)).pooler_output.float()
        vectors: np.ndarray = torch.nn.functional.normalize(features, dim=1).numpy()
        return vectors

    def rate(self, files: Sequence[bytes], seconds: float, *, threads: int, batch: int) -> float:
        """Return the images per second with `threads` threads, which share the cores evenly."""
        torch.set_num_threads(max(1, cores() // threads))
        end_s, done, lock = time.perf_counter() + seconds, 0, threading.Lock()

        def run(number: int) -> None:
            nonlocal done
            torch.set_num_threads(max(1, cores() // threads))  # OpenMP stores this number per calling thread
            place = number * len(files) // threads
            while time.perf_counter() < end_s:
                self.vectors([files[(place + index) % len(files)] for index in range(batch)])
                place += batch
                with lock:
                    done += batch

        started_s = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))
        return done / (time.perf_counter() - started_s)

    def ways(self) -> dict[str, Callable[[Sequence[bytes], float], float]]:
        return {
            f"{cores()} threads, an image each": functools.partial(self.rate, threads=cores(), batch=1),
            f"batches of {BATCH}": functools.partial(self.rate, threads=1, batch=BATCH),
        }

    def parts_ms(self, files: Sequence[bytes]) -> tuple[float, float]:
        """Return the milliseconds of processor time to prepare one image, and for its forward pass, on one thread."""
        torch.set_num_threads(1)
        started_s = time.process_time()
        pixels = [self.prepared([file]) for file in files]
        between_s = time.process_time()
        with torch.inference_mode():
            for image in pixels:
                self._model.get_image_features(pixel_values=image)
        ended_s = time.process_time()
        return 1000 * (between_s - started_s) / len(files), 1000 * (ended_s - between_s) / len(files)


class Served:
    def __init__(self, cluster: Cluster, files: Sequence[bytes]) -> None:
        self.cluster = cluster
        self._bodies = {
            batch_size: [
                msgspec.msgpack.encode({"items": [{"images": [file]} for file in files[start : start + batch_size]]})
                for start in range(0, len(files) - batch_size + 1, batch_size)
            ]
            for _, batch_size in LOADS
        }
        self._requests = {
            batch_size: [request(f"/v1/encode/{MODEL}", body) for body in bodies]
            for batch_size, bodies in self._bodies.items()
        }

    def precision(self) -> str:
        description = httpx.get(f"{self._url}/v1/models/{MODEL}", timeout=10, trust_env=False).json()["precision"]
        return str(description["served"][0])

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.cluster.port}"

    def post(self, body: bytes) -> dict[str, Any]:
        headers = {"content-type": "application/msgpack", "accept": "application/json"}
        answer = httpx.post(
            f"{self._url}/v1/encode/{MODEL}", content=body, headers=headers, timeout=120, trust_env=False
        )
        answer.raise_for_status()
        reply: dict[str, Any] = answer.json()
        return reply

    def vectors(self) -> np.ndarray:
        """Return the cluster's vectors of the first images, float32 [images, width]."""
        body = self._bodies[LOADS[1][1]][0]
        return np.array([item["dense"]["values"] for item in self.post(body)["items"]], np.float32)

    def rate(self, clients: int, batch_size: int, seconds: float) -> float:
        return self.cluster.rate(self._requests[batch_size], clients, seconds, batch_size)

    def stages_ms(self, clients: int, batch_size: int, seconds: float) -> dict[str, float]:
        """Return the mean milliseconds of each stage of a request, with `clients` concurrent clients."""
        end_s, timings, lock = time.perf_counter() + seconds, list[dict[str, float]](), threading.Lock()

        def ask(number: int) -> None:
            bodies = self._bodies[batch_size]
            while time.perf_counter() < end_s:
                timing = self.post(bodies[number % len(bodies)])["timing"]
                number += 1
                with lock:
                    timings.append(timing)

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))
        return {name: statistics.fmean(timing[name] for timing in timings) for name in STAGES}


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=8.0, out="images.md")
    parser.add_argument("--size", default="1280x960", help="of the photographs, WIDTHxHEIGHT")
    parser.add_argument("--images", type=int, default=64, help="number of different photographs")
    parser.add_argument("serve", nargs="*", help="further arguments of `sie serve`, after --")
    arguments = parser.parse_args()
    say = Report()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder) / NAME)
        models = under(Path(folder) / "models")
        models.add(
            NAME,
            {
                "weights": {"path": str(Path(folder) / NAME)},
                "family": "dual-encoder",
                "inputs": ["text", "image"],
                "outputs": {"dense": WIDTH},
                "max_tokens": CLIP_TOKENS,
                "load": {},  # empty: the machine chooses the precision
            },
        )
        width, height = map(int, arguments.size.split("x"))
        files = photographs(arguments.images, width, height)
        with Cluster([*models.arguments, *arguments.serve], model=MODEL) as cluster:
            served = Served(cluster, files)
            measure(Library(Path(folder) / NAME, served.precision()), served, files, arguments, say)
    say.save(arguments.out)


def measure(
    library: Library, served: Served, files: Sequence[bytes], arguments: argparse.Namespace, say: Report
) -> None:
    mean_bytes = statistics.fmean(map(len, files))
    say(
        f"# Images through the cluster and in the library\n\n`python bench/images.py --size {arguments.size}`, Python "
        f"{platform.python_version()}, torch {torch.__version__}, {machine()}, of which {cores()} may be used. CLIP "
        f"ViT-B/32 with random weights in {served.precision()}. {len(files)} photographs of {arguments.size} pixels, "
        f"JPEG, {mean_bytes / 1000:.0f} kB each.\n"
    )
    vectors = served.vectors()
    expected = library.vectors(files[: len(vectors)])
    say(f"Least cosine between vectors of cluster and library: {(vectors * expected).sum(1).min():.6f}.\n")
    ways = library.ways()
    runs = {name: functools.partial(way, files, arguments.seconds) for name, way in ways.items()}
    for clients, image_count in LOADS:
        runs[f"cluster, {clients} x {image_count}"] = functools.partial(
            served.rate, clients, image_count, arguments.seconds
        )
    rates = in_turn(arguments.rounds, runs)
    best = max(ways, key=lambda name: statistics.median(rates[name]))
    say(f"Images per second, median of {arguments.rounds} rounds, each in turn. Goal of the ratio: {GOAL}.\n")
    say("| where | images/s | ratio to the library |\n|---|---|---|")
    for name, values in rates.items():
        ratio = statistics.median(value / best_value for value, best_value in zip(values, rates[best], strict=True))
        where = f"library, {name}" if name in ways else name
        say(f"| {where} | {statistics.median(values):.1f} | {ratio:.2f} |")
    prepared_ms, forward_ms = library.parts_ms(files[:BATCH])
    say(
        f"\nThe library takes {prepared_ms:.1f} ms of CPU to prepare an image and {forward_ms:.1f} ms for its forward "
        "pass, on one thread.\n"
    )
    say("Processor time of the cluster's processes, ms for an image:\n")
    for clients, batch_size in LOADS:
        say(f"* {clients} x {batch_size}: {processor_ms(served, clients, batch_size, arguments.seconds)}")
    say("\nThe image workers decode and resize. Stages of the mean request:\n")
    say("| clients x images | " + " | ".join(STAGES) + " |\n|---|" + "---|" * len(STAGES))
    for clients, batch_size in LOADS:
        stages = served.stages_ms(clients, batch_size, arguments.seconds)
        total = sum(stages.values())
        say(
            f"| {clients} x {batch_size} | "
            + " | ".join(f"{100 * stages[name] / total:.0f} %" for name in STAGES)
            + " |"
        )
    say("\n" + copied(served, mean_bytes, arguments.seconds))


def processor_ms(served: Served, clients: int, batch_size: int, seconds: float) -> str:
    before = served.cluster.cpu_s()
    own_before = psutil.Process().cpu_times()
    started_s = time.perf_counter()
    done = served.rate(clients, batch_size, seconds) * (time.perf_counter() - started_s)
    after, own = served.cluster.cpu_s(), psutil.Process().cpu_times()
    spent = {role: after[role] - before.get(role, 0.0) for role in after if role != "config"}
    spent["the clients of this benchmark"] = own.user + own.system - own_before.user - own_before.system
    return ", ".join(f"{role.removeprefix('sie_sidecar.')} {1000 * s / done:.2f}" for role, s in spent.items())


def copied(served: Served, mean_bytes: float, seconds: float) -> str:
    """Return a text with the bytes that go through sockets for one image. The bytes over TCP are those of the loopback
    interface, so no other program may use it. The bytes over Unix sockets are computed.
    """
    clients, batch_size = LOADS[1]
    pixels = 3 * SIZE * SIZE
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    started_s = time.perf_counter()
    done = served.rate(clients, batch_size, seconds) * (time.perf_counter() - started_s)
    tcp = (psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before) / done
    total = tcp + mean_bytes + 2 * pixels
    return (
        f"Bytes between processes for an image of {mean_bytes / 1000:.0f} kB: {total / 1000:.0f} kB. Over TCP "
        f"{tcp / 1000:.0f} kB ({tcp / mean_bytes:.2f} times the file: client to gateway, gateway to broker, broker to "
        f"sidecar), the file once more to an image worker, its {pixels / 1000:.0f} kB of pixels from there to the "
        "sidecar and from the sidecar to the adapter."
    )


if __name__ == "__main__":
    main()
