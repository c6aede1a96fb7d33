"""Compare the cluster with other embedding servers in one run: with their default settings, and in equal precision.

    python bench/servers.py [--rounds 5] [--seconds 5] [--others FOLDER] [--only NAME ...] [--out FILE]

All servers run all-MiniLM-L6-v2. A request is OpenAI's /v1/embeddings for one text of the mix (log-normal lengths, mean
about 87 tokens), with a JSON reply. Loads: 1, 8 and 64 clients; each sends its next request when its last one is
answered. The servers are measured in turn. All others are stopped meanwhile (SIGSTOP), since an idle server takes up to
15 % of a core.

    cluster       `sie serve`, which chooses bfloat16 where the processor has it
    LitServe      a server of a few lines (`litserve_server.py`): sentence-transformers on all cores, batches of up to
                  32 waiting requests
    Infinity      `infinity_emb v2`
    sie-server    the public server of that name, without its gateway; it computes on half of the cores, or on
                  SIE_TORCH_NUM_THREADS of them

Each other server needs a virtual environment in the folder --others, since it requires other versions of packages than
the product. A server without an environment is skipped. The commands that create the environments:

    python3 -m venv FOLDER/litserve && FOLDER/litserve/bin/pip install litserve==0.2.19 sentence-transformers==6.2.0
    python3 -m venv FOLDER/infinity && FOLDER/infinity/bin/pip install 'infinity-emb[torch,server]==0.0.78'
    python3.12 -m venv FOLDER/sie-server && FOLDER/sie-server/bin/pip install sie-server==0.10.1

sie-server 0.10.1 needs Python 3.12: Python 3.11 does not parse it, and Python 3.13 has no wheels of blake3 below 1.
With Python 3.13, install its dependencies with blake3 1 and --ignore-requires-python.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop
import yaml
from client import closed_loop, percentile, request
from engine import model_folder
from overhead import MODEL, Cluster
from report import Report, cores, machine, parser_of
from words import texts_of

from sie_cli.serve.ports import free_port

CLIENTS = (1, 8, 64)
START_S = 600  # seconds for a server to start, enough on a busy machine
ENDING = threading.Event()  # set by SIGTERM; `ServerProcess` then stops waiting for a server that is starting


@dataclass(frozen=True)
class OtherServer:
    """A server that is compared with the cluster. `environment`: folder of its virtual environment, below --others.
    `program`: file in that environment. `command(port, folder)` returns the arguments of `program`; the server may
    write its files to `folder`.
    """

    environment: str
    program: str
    command: Callable[[int, Path], list[str]]
    environ: Mapping[str, str] = field(default_factory=dict)

    def path(self, environments: Path) -> Path:
        return environments / self.environment / "bin" / self.program


def litserve(precision: str) -> OtherServer:
    script = str(Path(__file__).with_name("litserve_server.py"))
    return OtherServer("litserve", "python", lambda port, _: [script, str(model_folder()), str(port), precision])


def infinity(precision: str) -> OtherServer:
    def command(port: int, _: Path) -> list[str]:
        fixed = ["v2", "--model-id", str(model_folder()), "--served-model-name", MODEL, "--url-prefix", "/v1"]
        fixed += ["--engine", "torch", "--no-bettertransformer", "--device", "cpu", "--dtype", precision]
        return [*fixed, "--host", "127.0.0.1", "--port", str(port)]

    return OtherServer(
        "infinity", "infinity_emb", command, {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    )


def sie_server(precision: str, threads: int | None) -> OtherServer:
    def command(port: int, folder: Path) -> list[str]:
        profile = {
            "adapter_path": "sie_server.adapters.sentence_transformer:SentenceTransformerDenseAdapter",
            "max_batch_tokens": 16384,
            "compute_precision": precision,
            "adapter_options": {"runtime": {"pooling": "mean", "normalize": True}},
        }
        entry = {
            "sie_id": MODEL,
            "weights_path": str(model_folder()),
            "inputs": {"text": True},
            "tasks": {"encode": {"dense": {"dim": 384}}},
            "max_sequence_length": 256,
            "profiles": {"default": profile},
        }
        (folder / "model.yaml").write_text(yaml.safe_dump(entry))
        fixed = ["serve", "--models-dir", str(folder), "--preload", MODEL, "--device", "cpu"]
        return [*fixed, "--host", "127.0.0.1", "--port", str(port)]

    environ = {"SIE_TELEMETRY_DISABLED": "1", "HF_HUB_OFFLINE": "1"}
    if threads:
        environ["SIE_TORCH_NUM_THREADS"] = str(threads)
    return OtherServer("sie-server", "sie-server", command, environ)


OTHERS: Mapping[str, OtherServer] = {
    "LitServe float32": litserve("float32"),
    "LitServe bfloat16": litserve("bfloat16"),
    "Infinity float32": infinity("float32"),
    "Infinity bfloat16": infinity("bfloat16"),
    "sie-server float32, default threads": sie_server("float32", None),
    "sie-server float32, all cores": sie_server("float32", cores()),
    "sie-server bfloat16, all cores": sie_server("bfloat16", cores()),
}
CLUSTERS = ("cluster float32", "cluster bfloat16")


class ServerProcess:
    """Process of another server. The constructor returns when the server answers; otherwise it raises RuntimeError."""

    def __init__(self, name: str, environments: Path) -> None:
        rival = OTHERS[name]
        self.port, self._folder = free_port(), tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        argv = [str(rival.path(environments)), *rival.command(self.port, folder)]
        self._log = (folder / "log").open("w")  # closed by `stop`
        self._process = subprocess.Popen(
            argv,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **rival.environ},
        )
        try:
            self._wait(name)
        except BaseException:
            self.stop()
            raise

    def _wait(self, name: str) -> None:
        end_s = time.monotonic() + START_S
        url, body = f"http://127.0.0.1:{self.port}/v1/embeddings", {"model": MODEL, "input": "one text"}
        # one client for all attempts, since each new client creates a TLS context
        client = httpx.Client(timeout=30, trust_env=False)
        while True:
            try:
                answer = client.post(url, json=body)
                if answer.status_code == 200 and len(answer.json()["data"][0]["embedding"]) == 384:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > end_s or self._process.poll() is not None or ENDING.is_set():
                raise RuntimeError(f"{name} did not start: {Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGKILL)  # to the process group, because children of the server would outlive it
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


def end(*_: object) -> None:
    """Handle a signal: end this process and all servers, also those that are still starting."""
    ENDING.set()
    sys.exit("ended")


def started(name: str, environments: Path) -> Cluster | ServerProcess:
    if name in CLUSTERS:
        return Cluster([], environ={"SIE_DEFAULT_COMPUTE_PRECISION": name.split()[1]})
    return ServerProcess(name, environments)


def main() -> None:
    parser = parser_of(__doc__, rounds=5, seconds=5.0)
    parser.add_argument(
        "--others", type=Path, default=Path("others"), help="folder with a Python environment for each other server"
    )
    parser.add_argument("--only", nargs="*", choices=[*CLUSTERS, *OTHERS], help="measure only these servers")
    options = parser.parse_args()
    there = [name for name, rival in OTHERS.items() if rival.path(options.others).exists()]
    names = options.only or [*CLUSTERS, *there]
    bodies = [json.dumps({"model": MODEL, "input": text}).encode() for text in texts_of("mix", 512)]
    requests = [request("/v1/embeddings", body, "application/json") for body in bodies]
    servers: dict[str, Cluster | ServerProcess] = {}
    signal.signal(signal.SIGTERM, end)
    measured: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    try:
        with ThreadPoolExecutor() as pool:  # parallel, because a start mostly waits
            starts = {name: pool.submit(started, name, options.others) for name in names}
            wait(starts.values())
        servers = {name: start.result() for name, start in starts.items() if start.exception() is None}
        for start in starts.values():
            start.result()
        for round_ in range(options.rounds + 1):
            for clients in CLIENTS:
                for name, server in servers.items():
                    for candidate in servers.values():
                        if isinstance(candidate, ServerProcess):
                            candidate.signal(signal.SIGCONT if candidate is server else signal.SIGSTOP)
                    loop = closed_loop("127.0.0.1", server.port, requests, clients=clients, seconds=options.seconds)
                    answered, taken_s, latencies = uvloop.run(loop)
                    p50, p99 = (1e3 * percentile(latencies, share) for share in (0.5, 0.99))
                    values = answered / taken_s, p50, p99
                    print(round_, clients, name, *(f"{value:.1f}" for value in values), file=sys.stderr, flush=True)
                    if round_:  # the first round warms up
                        measured.setdefault((name, clients), []).append(values)
    finally:
        for server in servers.values():
            server.stop()
    say = Report()
    say("# The cluster beside other servers\n")
    say(f"`python bench/servers.py --rounds {options.rounds} --seconds {options.seconds:g}`, {machine()}. MiniLM-L6,")
    say("one text of the mix a request; medians of the rounds. The last columns: texts/s of the cluster over those of")
    say("the server.\n")
    clusters = [name for name in CLUSTERS if name in names]
    say("| clients | server | texts/s | p50, ms | p99, ms | " + " | ".join(f"{name} /" for name in clusters) + " |")
    say("|---" * (5 + len(clusters)) + "|")
    for clients in CLIENTS:
        middles = {
            name: [statistics.median(own) for own in zip(*measured[name, clients], strict=True)] for name in names
        }
        for name, (rate, p50, p99) in middles.items():
            ratios = [f"{middles[cluster][0] / rate:.2f}" for cluster in clusters]
            say(f"| {clients} | {name} | {rate:.0f} | {p50:.1f} | {p99:.1f} | {' | '.join(ratios)} |")
    say.save(options.out)


if __name__ == "__main__":
    main()
