"""The cluster beside a simple server around sentence-transformers, for the same clients, in one run.

    python bench/servers.py [--rounds 5] [--seconds 5] [--out bench/results/servers.md]

The other server is LitServe with the usual few lines (`litserve_server.py`): sentence-transformers in float32 on all
cores, up to 32 requests that wait together at once. Both get OpenAI's request for one text of the mix (log-normal
lengths, mean about 87 tokens) as JSON and answer with the vector as JSON. Loads: 1, 8 and 64 clients, each sending its
next request when the last was answered; the servers take turns. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import uvloop
from client import closed_loop, percentile, request
from overhead import MODEL, Cluster, texts_of
from report import Report, machine

from sie_cli.serve.ports import free_port

CLIENTS = (1, 8, 64)


class Simple:
    """That server as a process."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("litserve_server.py")), str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end_s = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > end_s or self._process.poll() is not None:
                raise RuntimeError("LitServe did not start; run bench/litserve_server.py 8899 to see why")
            time.sleep(0.1)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its children outlive it otherwise
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the report here as well")
    options = parser.parse_args()
    bodies = [json.dumps({"model": MODEL, "input": text}).encode() for text in texts_of("mix", 512)]
    requests = [request("/v1/embeddings", body, "application/json") for body in bodies]
    cluster, simple = Cluster([]), Simple()
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    try:
        for round_ in range(options.rounds + 1):
            for clients in CLIENTS:
                for name, port in (("cluster", cluster.port), ("LitServe", simple.port)):
                    loop = closed_loop("127.0.0.1", port, requests, clients=clients, seconds=options.seconds)
                    answered, taken_s, latencies = uvloop.run(loop)
                    if round_:  # the first one warms up
                        quantiles = (1e3 * percentile(latencies, share) for share in (0.5, 0.99))
                        found.setdefault((name, clients), []).append((answered / taken_s, *quantiles))
    finally:
        cluster.stop()
        simple.stop()
    say = Report()
    say("# The cluster beside a simple server\n")
    say(f"`python bench/servers.py --rounds {options.rounds} --seconds {options.seconds:g}`, {machine()}. MiniLM-L6,")
    say("one text of the mix a request; medians of the rounds.\n")
    say("| clients | server | texts/s | p50, ms | p99, ms | cluster / LitServe |")
    say("|---|---|---|---|---|---|")
    for clients in CLIENTS:
        rates = {}
        for name in ("cluster", "LitServe"):
            rate, p50, p99 = (statistics.median(each) for each in zip(*found[name, clients], strict=True))
            rates[name] = rate
            ratio = f"{rates['cluster'] / rate:.2f}" if name == "LitServe" else ""
            say(f"| {clients} | {name} | {rate:.0f} | {p50:.1f} | {p99:.1f} | {ratio} |")
    say.save(options.out)


if __name__ == "__main__":
    main()
