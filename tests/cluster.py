"""A real `sie serve` under test, with its own data directory, free ports, its log and its processes. It ends only
processes that it started, by process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
from zygote import Forked, end_with_parent

from sie_cli import access
from sie_cli.access import Access, as_operator
from sie_cli.serve.ports import free_port

SIE = str(Path(sys.executable).with_name("sie"))
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
FORKED_WITH = ("SIE_", "OTEL_", "HF_TOKEN", "HF_ENDPOINT", "AWS_")  # settings that a forked process still obeys


def free_ports(count: int) -> list[int]:
    """Return consecutive loopback ports that are free now."""
    first = free_port(count)
    return list(range(first, first + count))


def until(
    condition: Callable[[], object], timeout_s: float, goal: str, context: Callable[[], object] = lambda: ""
) -> object:
    """Poll a condition until it is true, and return its value. Raise AssertionError with both texts at the time-out."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {goal} {context()}"
        time.sleep(0.02)


class Cluster:
    """One run of `sie serve`."""

    def __init__(
        self,
        data_dir: Path,
        *args: str,
        environ: dict[str, str] | None = None,
        gateways: int = 1,
        workers: int = 1,
        forked: bool = True,
    ) -> None:
        """`forked`: start it as a fork of the zygote if the environment allows it."""
        self.data_dir = data_dir
        self.port, *_ = free_ports(gateways)
        self.worker_port, *_ = free_ports(workers)
        self.url = f"http://127.0.0.1:{self.port}"
        self.urls = [f"http://127.0.0.1:{self.port + number}" for number in range(gateways)]
        self.argv = [
            SIE,
            "serve",
            "--port",
            str(self.port),
            "--data-dir",
            str(data_dir),
            "--gateway-metrics-port",
            "0",
            "--worker-metrics-port",
            str(self.worker_port),
            "--gateways",
            str(gateways),
            "--workers",
            str(workers),
            *args,
        ]
        self.environ = {**os.environ, **(environ or {})}
        self.lines: list[str] = []
        self.process: Forked | subprocess.Popen[str] | None = None
        # a variable that an import reads has no effect on a fork, so `sie serve` itself is started then
        self._is_forked = forked and all(name.startswith(FORKED_WITH) for name in environ or {})

    def start(self, timeout_s: float = 120.0) -> Cluster:
        if self._is_forked and self.argv[:2] == [SIE, "serve"]:
            self.process = Forked("engine", self.argv, self.environ)
        else:
            self.process = subprocess.Popen(
                self.argv,
                env=self.environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=end_with_parent,
            )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        last = "try     curl "  # the last line of the greeting, which follows `ready in`
        until(lambda: self.said(last) or self.process.poll() is not None, timeout_s, "ready", self.log)
        assert self.process.poll() is None, self.log()
        return self

    def _read(self, process: Forked | subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def log(self, count: int = 60) -> str:
        return "\n".join(self.lines[-count:])

    def pids(self, role: str) -> list[int]:
        """Return the processes of a role (`gateway`, `sidecar`, `adapter`, `config`, `nats-server`), oldest first."""
        assert self.process is not None
        children = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                argv = child.cmdline()
                named = role == "nats-server" and argv and argv[0].endswith("nats-server")
                if named or (len(argv) > 2 and argv[1].endswith("sie") and argv[2] == role):
                    children.append((child.create_time(), child.pid))
        return [pid for _, pid in sorted(children)]

    def sidecar(self, worker: str) -> int:
        """Return the process of the sidecar with that worker id."""
        (pid,) = (pid for pid in self.pids("sidecar") if worker in psutil.Process(pid).cmdline())
        return pid

    def signal(self, pid: int, number: int) -> None:
        os.kill(pid, number)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM, wait, and return the status. Assert that all its processes have ended."""
        assert self.process is not None
        if self.process.poll() is not None:
            return self.process.returncode
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
            raise
        self._reader.join(30)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"still alive: {alive}\n{self.log()}"
        return status

    def health(self) -> dict[str, object]:
        return httpx.get(f"{self.url}/health", timeout=30).json()

    def access(self) -> Access:
        """Return the access file that the commands of its user read."""
        credentials = access.read(self.data_dir)
        assert credentials is not None, f"{self.data_dir} has no {access.FILE}"
        return credentials

    def broker_url(self) -> str:
        """Return the URL of the broker with the user and password of the operator."""
        credentials = self.access()
        return as_operator(credentials.broker_url).replace("@", f":{credentials.operator_password}@")

    def encode(
        self, texts: list[str], *, url: str = "", client: httpx.Client | None = None, **headers: str
    ) -> httpx.Response:
        post = client.post if client else httpx.post
        body = json.dumps({"items": [{"text": text} for text in texts]})
        return post(f"{url or self.url}/v1/encode/{MODEL}", content=body, headers=headers, timeout=180)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric of the first sidecar whose labels match."""
        return sum(scraped(f"http://127.0.0.1:{port}/metrics", name, **labels) for port in [self.worker_port])

    def gateway_metric(self, name: str, number: int = 0, **labels: str) -> float:
        pattern = re.compile(r"gateway listening on \S+:(\d+), metrics on (\d+)")
        ports = [match.groups() for line in self.lines if (match := pattern.search(line))]
        gateway_port = str(self.port + number)
        metrics_port = [metrics for port, metrics in ports if port == gateway_port][-1]
        return scraped(f"http://127.0.0.1:{metrics_port}/metrics", name, **labels)


def scraped(url: str, name: str, **labels: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(url, timeout=30).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    )


@contextlib.contextmanager
def running(data_dir: Path, *args: str, **options: object) -> Iterator[Cluster]:
    cluster = Cluster(data_dir, *args, **options)  # type: ignore[arg-type]
    try:
        yield cluster.start()
    finally:
        if cluster.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(cluster.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess, PermissionError):
                        os.kill(child.pid, signal.SIGCONT)
            cluster.stop()
