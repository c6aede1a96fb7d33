"""Cost of a large catalogue: start times, time to resolve a model name, delay of a change until a gateway and a worker
have it, memory, and processor time without requests.

A broker, config service, gateway and worker run while the models are added. Then all but broker and adapter restart.

    python bench/config.py [--models 10000] [--idle 60]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import large_catalogue
from cluster import until
from report import Report, parser_of
from stack import Part, Plan, Stack

from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import Secret
from sie_runtime.feed import HttpConfigSource, snapshot
from sie_runtime.process import GC_THRESHOLDS

ADMIN, READ = "admin", "read"
WRITES = 20
MIB = 1 << 20


def restarted_s(part: Part) -> float:
    """Restart a process and return the seconds until it is ready."""
    part.stop()
    begun_s = time.perf_counter()
    part.start()
    part.wait_ready(120)
    return time.perf_counter() - begun_s


def written_ms(stack: Stack, model: str) -> tuple[list[float], list[float]]:
    """Write changes of one model. Return the milliseconds of each write until its answer, and from the answer until the
    gateway serves the change.
    """
    answered, delays_ms = [], []
    path = f"/v1/configs/models/{model}"
    with httpx.Client(timeout=30, trust_env=False, headers={"Authorization": f"Bearer {ADMIN}"}) as client:
        for number in range(WRITES):
            begun_s = time.perf_counter()
            change = client.patch(stack.config_url + path, json={"description": f"change {number}"})
            answered_s = time.perf_counter()
            change.raise_for_status()
            while client.get(stack.urls[0] + path).headers["etag"] != change.headers["etag"]:
                pass
            answered.append((answered_s - begun_s) * 1000)
            delays_ms.append((time.perf_counter() - answered_s) * 1000)
    return answered, delays_ms


async def read_s(stack: Stack) -> tuple[float, float, Catalogue]:
    """Read the export into a catalogue. Return the processor seconds, the longest block of the event loop in seconds,
    and the catalogue.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # the gateway sets the same thresholds
    source = HttpConfigSource(stack.config_url, Secret(READ))
    export = await source.export()
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    begun = time.process_time()
    catalogue = await snapshot(export)
    took = time.process_time() - begun
    watching.cancel()
    await source.close()
    return took, longest, catalogue


def measure(stack: Stack, options: argparse.Namespace, say: Report) -> None:
    begun_s = time.perf_counter()
    asyncio.run(large_catalogue.fill(stack.broker_urls, options.models))
    say(f"{options.models} models were written in {time.perf_counter() - begun_s:.1f} s.")
    parts = {"config service": stack.config, "gateway": stack.gateways[0], "worker's sidecar": stack.workers[0].sidecar}
    starts = {name: restarted_s(part) for name, part in parts.items()}
    path = "/v1/configs/models"
    served = httpx.get(stack.urls[0] + path, timeout=30, trust_env=False).json()["models"]
    if len(served) < options.models:
        raise RuntimeError(f"the gateway serves {len(served)} of {options.models} models")
    answered, delays_ms = written_ms(stack, served[len(served) // 2]["model_id"])
    acked = f"{stack.config_url}{path}/{served[len(served) // 2]['model_id']}/status"
    headers = {"Authorization": f"Bearer {READ}"}
    until(
        lambda: httpx.get(acked, headers=headers, trust_env=False).json()["all_bundles_acked"],
        30,
        "the worker's acknowledgement",
    )
    took_s, longest_s, catalogue = asyncio.run(read_s(stack))
    before = {name: part.cpu_s() for name, part in parts.items()}
    time.sleep(options.idle)
    idle = {name: (part.cpu_s() - before[name]) / options.idle for name, part in parts.items()}
    say()
    say("| process | start, s | memory, MiB | idle, % of a core |")
    say("|---|---|---|---|")
    for name, part in parts.items():
        say(f"| {name} | {starts[name]:.2f} | {part.rss_bytes() / MIB:.0f} | {idle[name] * 100:.2f} |")
    say()
    resolved = ", ".join(f"{how} {took_us:.1f}" for how, took_us in large_catalogue.resolving(catalogue).items())
    say(
        f"Processor time to resolve a name, us: {resolved}; an unknown name, with suggestions: "
        f"{large_catalogue.unknown_us(catalogue):.0f}."
    )
    say()
    applied_ms = large_catalogue.applying_us(catalogue) / 1000
    say(f"Processor time to apply a delta (change of one model) and resolve its name: {applied_ms:.2f} ms.")
    say(
        f"A write is answered after {statistics.median(answered):.1f} ms (at most {max(answered):.1f}); "
        f"{statistics.median(delays_ms):.1f} ms later (at most {max(delays_ms):.1f}) the gateway serves the change."
    )
    say()
    say(
        f"A gateway builds its catalogue from the whole export in {took_s:.2f} s of processor time, every 300 s and "
        f"after a missed delta. The event loop is blocked for at most {longest_s * 1000:.1f} ms at a time."
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without any request")
    options = parser.parse_args()
    say = Report()
    say("# A large catalogue")
    say()
    say(f"`python bench/config.py`, Python {platform.python_version()}, {os.cpu_count()} cores.")
    say()
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(models=(), preload=False, environ={"SIE_ADMIN_TOKEN": ADMIN, "SIE_CONFIG_READ_TOKEN": READ})
        with Stack(Path(folder), plan) as stack:
            measure(stack, options, say)
    say()
    say("Goals: gateway start <= 5 s, resolution <= 50 us, memory <= 200 MB, a delta <= 50 ms, idle < 1 % of a core.")
    say.save(options.out)


if __name__ == "__main__":
    main()
