"""Accuracy of `sie bench replay`: its predictions for changed settings, compared with runs of real processes (gateway,
broker, sidecar) on a simulated device of fixed cost.

1. Requests arrive at the cluster at random times, and the sidecar records a trace.
2. The replay fits its device model to the recorded batches.
3. For each changed setting, the cluster runs again, and the replay predicts this run. The prediction uses the times at
   which the requests of this run arrived at the broker, because the client's delays on a busy machine differ between
   runs.

Run `python bench/replay.py`. The device only waits, so busy cores delay the processes but not the device.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import stack

from sie_cli.replay import trace as traces
from sie_cli.replay.bench import HOST, HOST_DEFAULT, PLAN
from sie_cli.replay.curve import percentile
from sie_cli.replay.replay import Machine, Replay, plan_of
from sie_contracts.settings import load

SPECIAL = 2  # number of special tokens that the toy tokenizer adds to a text; each byte of a text is one token
TRIED: dict[str, dict[str, str]] = {
    "as it was": {},
    "lanes=2": {},
    "max_batch_requests=3": {"SIE_BATCHER_MAX_BATCH_REQUESTS": "3"},
    "max_wait_ms=60": {"SIE_BATCHER_COALESCE_MS": "60"},
    "pipeline_depth=1": {"SIE_RUST_PIPELINE_DEPTH": "1"},
}


@dataclass(frozen=True)
class Seen:
    """Result of a run. `latency_s`: latencies by the gateway's clock, in order of arrival. `lone_s`: median latency of
    requests that were sent one by one.
    """

    latency_s: list[float]
    lone_s: float
    trace: traces.Trace


async def sent(url: str, requests: Sequence[traces.TraceRequest]) -> tuple[list[float], float]:
    """Send twenty requests one by one, then each of `requests` at its arrival time without waiting for earlier answers.
    Return the latencies of `requests`, and the median latency of the twenty, in seconds.
    """
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as client:

        async def one(tokens: int) -> float:
            answer = await client.post("/v1/encode/toy/one", json={"items": ["x" * max(1, tokens - SPECIAL)]})
            assert answer.status_code == 200, answer.text
            # Use the gateway's time, because the client itself waits for a core on a busy machine.
            return float(answer.json()["timing"]["total_ms"]) / 1000

        lone = sorted([await one(64) for _ in range(20)])
        start_s = time.perf_counter()

        async def at(request: traces.TraceRequest) -> float:
            await asyncio.sleep(start_s + request.at - time.perf_counter())
            return await one(request.tokens[0])

        return list(await asyncio.gather(*map(at, requests))), lone[10]


def measured(requests: Sequence[traces.TraceRequest], environ: dict[str, str], device: stack.Device) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        cluster, file = (
            stack.Stack(Path(folder), stack.Plan(workers=[device], environ=environ)),
            Path(folder) / "trace.jsonl",
        )
        cluster.workers[0].sidecar.argv += ["--record-trace", str(file)]
        with cluster:
            latency_s, lone_s = asyncio.run(sent(cluster.urls[0], requests))
        return Seen(latency_s, lone_s, traces.read(file.read_bytes().splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", default="poisson:rate=60,length=100,seconds=15,seed=5")
    parser.add_argument("--batch-ms", type=float, default=10.0)
    parser.add_argument("--token-us", type=float, default=100.0)
    options = parser.parse_args()
    device = stack.Device(options.batch_ms, options.token_us)
    requests = traces.generate(options.arrivals)
    host = traces.numbers(HOST_DEFAULT, tuple(HOST))
    was: Seen | None = None
    print(f"{options.arrivals}, a batch takes {options.batch_ms:g} ms + {options.token_us:g} us a token\n")
    names = [
        heading
        for name in ("p50, ms", "p99, ms", "device, s", "batches")
        for heading in (f"{name} measured", "predicted")
    ]
    print(f"| | {' | '.join(names)} | a lone request, ms |\n|{'---|' * 10}")
    for name, environ in TRIED.items():
        changes = traces.numbers(name, PLAN) if "=" in name else {}
        measurement = measured(requests, environ, replace(device, lanes=int(changes.get("lanes", 1))))
        was = was or measurement
        machine = Machine(*traces.fit(was.trace.ran), *(host[key] / unit for key, unit in HOST.items()))
        settings = load(environ={"SIE_MACHINE_PROFILE": "cpu"}).settings
        plan = replace(plan_of(settings), **{**was.trace.settings, **changes})
        prediction = Replay(measurement.trace.requests[20:], plan, machine).run()
        # The replay does not model HTTP and the broker. Their time is the latency of a lone request minus its forward
        # pass.
        beyond_s = measurement.lone_s - machine.batch_s(64, 64**2)
        cells = [name]
        for percent in (50, 99):
            cells.append(f"{percentile(sorted(measurement.latency_s), percent) * 1e3:.1f}")
            cells.append(f"{(percentile(sorted(prediction.latency_s), percent) + beyond_s) * 1e3:.1f}")
        ran = measurement.trace.ran[20:]
        cells += [
            f"{sum(batch.seconds for batch in ran):.2f}",
            f"{prediction.device_s:.2f}",
            f"{len(ran)}",
            f"{prediction.batches}",
        ]
        cells.append(f"{measurement.lone_s * 1e3:.1f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
