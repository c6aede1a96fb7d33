"""Rates and latencies of `sie serve` on the device. All clients run in one process; each sends its next request when
its last one is answered.

The requests are OpenAI's, for texts of the mix (log-normal lengths, mean about 87 tokens) of random letters. `busy`:
the mean of NVML's utilisation by all processes. `cores`: processor seconds of the cluster's processes for each second.
Without nats-server the queue is in the gateway's process (`--standalone`); the title of the table says this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kit
import numpy as np
import psutil
import uvloop
from kit import DEVICE, PRECISION, REHEARSAL
from transformers import BertConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from client import closed_loop, percentile, request

from sie_cli.serve.ports import free_port

LOADS = ((1, 1), (4, 2)) if REHEARSAL else ((1, 1), (64, 1), (256, 1), (64, 32), (256, 32))  # clients, texts a request
SECONDS = 0.5 if REHEARSAL else 4.0
MODELS: dict[str, Any] = {"tiny": kit.TINY} if REHEARSAL else {"bert-base": {}}
BUNDLE = "any-version"
COLUMNS = (
    *("model", "clients", "texts a request", "texts/s", "tokens/s", "p50, ms", "p99, ms", "busy", "cores"),
    "texts a batch",
)


class Cluster:
    """`sie serve` with one loaded model of a models folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self.port, self._worker_port = free_port(), free_port()
        self._log = (kit.RESULTS / "serve-cluster.log").open("w")
        # run the module, because SIE is not installed and has no script `sie` here
        command = [sys.executable, "-m", "sie_cli", "serve", model, "--port", str(self.port), "--no-spare"]
        command += ["--data-dir", str(folder / "data"), "--models-dir", str(folder / "models"), "--device", DEVICE.type]
        command += ["--gateway-metrics-port", "0", "--worker-metrics-port", str(self._worker_port)]
        command += ["--default-compute-precision", PRECISION]
        command += [] if shutil.which("nats-server") else ["--standalone"]
        environ = os.environ | {"SIE_BUNDLE": BUNDLE}
        self._process = subprocess.Popen(
            command, env=environ, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        end_s = time.monotonic() + 240
        while not self._is_ready():
            if time.monotonic() > end_s or self._process.poll() is not None:
                self.stop()
                raise kit.CheckFailed(f"`sie serve` did not start: its log {self._log.name} has the reason")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            models = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=2, trust_env=False).json()["data"]
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        self.models = [model["id"] for model in models if model["loaded"]]
        return bool(self.models)

    def counted(self) -> tuple[float, float, float]:
        """Return the numbers of texts and batches of the worker, and the processor seconds of all processes."""
        text = httpx.get(f"http://127.0.0.1:{self._worker_port}/metrics", timeout=5, trust_env=False).text
        sums = dict.fromkeys(("sie_batch_size_sum", "sie_batch_size_count"), 0.0)
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in sums:
                sums[name] += float(line.split()[-1])
        root, taken_s = psutil.Process(self._process.pid), 0.0
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                taken_s += times.user + times.system
        return (*sums.values(), taken_s)  # type: ignore[return-value]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running(name: str, config: BertConfig) -> Iterator[Cluster]:
    """Start a cluster with this model and yield it."""
    with tempfile.TemporaryDirectory() as root:
        folder = kit.save(Path(root, "models", name), config)
        (folder / "modules.json").write_text(
            json.dumps(
                [
                    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                ]
            )
        )
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True})
        )
        # Serve from a new bundle without version requirements, because this machine may lack the versions of the bundle
        # `default`.
        bundles = Path(root, "models", "bundles")
        bundles.mkdir()
        (bundles / f"{BUNDLE}.yaml").write_text(f"id: {BUNDLE}\npriority: -1\nfamilies: [built-in]\n")
        cluster = Cluster(Path(root), str(folder))
        try:
            yield cluster
        finally:
            cluster.stop()


def main() -> None:
    broker = "nats-server" if shutil.which("nats-server") else "no nats-server is here, so --standalone"
    table = kit.Table("serve", f"`sie serve` on one device, {PRECISION}, {broker}", COLUMNS)
    ids = kit.random_ids(kit.mixed_lengths(2048))
    texts = [*map(kit.text_of, ids)]
    tokens = float(np.mean([len(row) for row in ids]))
    for name, sizes in MODELS.items():
        with running(name, BertConfig(**sizes)) as cluster:
            for clients, batch_size in LOADS:
                bodies = [
                    json.dumps({"model": cluster.models[0], "input": texts[start : start + batch_size]}).encode()
                    for start in range(0, len(texts) - batch_size + 1, batch_size)
                ]
                requests = [request("/v1/embeddings", body, "application/json") for body in bodies]

                def load(seconds: float, clients: int = clients, requests: list[bytes] = requests) -> Any:
                    loop = closed_loop("127.0.0.1", cluster.port, requests, clients=clients, seconds=seconds)
                    return uvloop.run(loop)

                load(SECONDS / 4)  # warms up
                before = cluster.counted()
                with kit.utilisation() as samples:
                    answered, taken_s, latencies = load(SECONDS)
                done, batches, cpu_s = (now - then for now, then in zip(cluster.counted(), before, strict=True))
                rate = answered * batch_size / taken_s
                quantiles = (f"{1e3 * percentile(latencies, share):.1f}" for share in (0.5, 0.99))
                busy = f"{statistics.mean(samples or [0.0]):.0f} %"
                table.row(
                    *(name, clients, batch_size, rate, rate * tokens, *quantiles, busy, cpu_s / taken_s),
                    done / max(1.0, batches),
                )


if __name__ == "__main__":
    main()
