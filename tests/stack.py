"""The processes of a cluster, which a test starts, kills, freezes and measures separately. Workers have the fixed-cost
adapter or the real one.

    brokers (1 or 3) ─► config service ─► gateways ─► workers, each a sidecar and its adapter

Unlike in `cluster.Cluster` there is no `sie serve`: no process restarts by itself, and every process keeps its ports.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx
import psutil
from cluster import MODEL, SIE, until
from fake_adapter import WIDTH
from nats_server import binary
from zygote import Forked, Kind, end_with_parent, reads_at_start

from sie_cli.serve.ports import free_port
from sie_contracts.wire.ipc import device_socket

Role = Literal["broker", "config", "gateway", "sidecar", "adapter"]
START_S = 120.0
STOP_S = 60.0
_KINDS: Mapping[str, Kind] = {"config": "sie", "gateway": "sie", "sidecar": "sie", "adapter": "engine"}
ADAPTER = Path(__file__).with_name("fixed_cost_adapter.py")


class Part:
    """One process. A restart keeps its command line, and so its ports, sockets and folders."""

    def __init__(
        self, role: Role, name: str, argv: Sequence[str], environ: Mapping[str, str], ready: Callable[[], object]
    ) -> None:
        self.role = role
        self.name = name
        self.log: deque[str] = deque(maxlen=400)
        self.lines = 0  # the number of lines of its output so far
        self.starts = 0
        self.paused = False
        self.argv = list(argv)
        self.environ = dict(environ)  # the environment of its next start
        self._ready = ready
        self._process: Forked | subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Return the exit status of the process, or None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self, *once: str) -> None:
        """Start without waiting, with the further arguments `once` for this start only. `log` gets the output."""
        assert not self.alive, f"{self.name} runs already"
        if self._process is not None:
            self.log.append(f"--- status {self._process.returncode}, started again")
        self.starts += 1
        self.paused = False
        self._process = self._spawn([*self.argv, *once])
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _spawn(self, argv: Sequence[str]) -> Forked | subprocess.Popen[str]:
        if (kind := _forked_as(argv, self.environ)) is not None:
            return Forked(kind, argv[argv[0] == sys.executable :], self.environ)
        return subprocess.Popen(
            argv,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=end_with_parent,
        )

    def _read(self, process: Forked | subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                self.lines += 1

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the process is ready. Raise AssertionError with its log if it ended or is not ready in time."""
        try:
            until(
                lambda: self._ready() or not self.alive,
                START_S if timeout_s is None else timeout_s,
                f"{self.name} ready",
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(self.log)) from None
        assert self.alive, f"{self.name} ended\n" + "\n".join(self.log)

    def is_ready(self) -> bool:
        return self.alive and bool(self._ready())

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def _end(self, number: signal.Signals) -> None:
        if self._process is None or not self.alive:
            return
        if self.paused and number != signal.SIGKILL:
            self.resume()
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
            raise AssertionError(f"{self.name} did not end in {STOP_S} s\n" + "\n".join(list(self.log)[-20:])) from None
        finally:
            if self._reader is not None:
                self._reader.join(STOP_S)

    def cpu_s(self) -> float:
        """Return the processor time of the present process so far in seconds, user and system."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@dataclass
class Worker:
    """A worker. `url` is that of the sidecar's probes and metrics. `more_adapters` are those of its other devices."""

    sidecar: Part
    adapter: Part
    url: str
    more_adapters: Sequence[Part] = ()

    @property
    def parts(self) -> list[Part]:
        return [self.sidecar, self.adapter, *self.more_adapters]


@dataclass(frozen=True)
class Device:
    """The device of a fixed-cost adapter: its cost per batch and per token, its lanes, the time of a load, load times
    by model, the number of models that fit (0: any number). `devices`: the number of such devices at a worker.
    """

    batch_ms: float = 0.0
    token_us: float = 0.0
    lanes: int = 1
    load_s: float = 0.0
    load_s_of: Mapping[str, float] = field(default_factory=dict)
    deadly: str = ""
    slots: int = 0
    width: int = WIDTH  # the width of a vector
    devices: int = 1
    pool: str = ""  # the worker's own pool, if it is not that of the plan's environment

    def argv(self, path: Path) -> list[str]:
        own_loads = (word for model, load_s in self.load_s_of.items() for word in ("--load-s-of", f"{model}={load_s}"))
        return [
            sys.executable,
            str(ADAPTER),
            "--socket",
            str(path),
            "--lanes",
            str(self.lanes),
            "--batch-ms",
            str(self.batch_ms),
            "--token-us",
            str(self.token_us),
            "--load-s",
            str(self.load_s),
            "--deadly",
            self.deadly,
            "--slots",
            str(self.slots),
            "--width",
            str(self.width),
            "--devices",
            str(self.devices),
            *own_loads,
        ]


@dataclass
class Plan:
    """The plan of a stack. `workers` has a Device for each worker, or None for a real adapter."""

    models: Sequence[str] = ("toy/one",)
    gateways: int = 1
    workers: Sequence[Device | None] = (Device(),)
    brokers: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)
    preload: bool = True
    toy_bundle: str = "default"
    code: Path | None = None  # another checkout whose processes are to run
    start_s: float = START_S


class Stack:
    """One cluster in a folder of its own. It runs within a context manager."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.brokers: list[Part] = []
        self.gateways: list[Part] = []
        self.workers: list[Worker] = []
        self.urls: list[str] = []
        self.metrics_urls: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._models = self._write_models()
        self.broker_urls = self._add_brokers()
        self.config = self._add_config()
        for number in range(plan.gateways):
            self._add_gateway(number)
        for number, device in enumerate(plan.workers):
            self._add_worker(number, device)

    def __enter__(self) -> Stack:
        try:
            for group in ([*self.brokers], [self.config], [*self.gateways]):
                for part in group:
                    part.start()
                for part in group:
                    part.wait_ready(self.plan.start_s)
            parts = [part for worker in self.workers for part in (*worker.parts[1:], worker.sidecar)]
            for part in parts:
                part.start()
            for part in parts:
                part.wait_ready(self.plan.start_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def parts(self) -> list[Part]:
        workers = [part for worker in self.workers for part in worker.parts]
        return [*self.brokers, self.config, *self.gateways, *workers]

    def stop(self) -> None:
        """End all processes in the order of a drain. Kill and report a process that does not end by SIGTERM."""
        failures = []
        workers = [part for worker in self.workers for part in worker.parts]
        for part in [*self.gateways, *workers, self.config, *self.brokers]:
            try:
                part.stop()
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)

    def consumers(self) -> list[dict[str, Any]]:
        """Return the durable consumers of all work streams from the first broker's monitor."""
        answer = httpx.get(f"{self.monitor_urls[0]}/jsz?consumers=true&config=true", timeout=30).json()
        streams = [
            stream for account in answer.get("account_details", []) for stream in account.get("stream_detail", [])
        ]
        work = (stream for stream in streams if stream["name"].startswith("WORK_"))
        return [consumer for stream in work for consumer in stream.get("consumer_detail") or []]

    def held(self) -> int:
        """Return the number of deliveries in the ledgers of the workers."""
        return sum(file.read_bytes().count(b"$JS.ACK") for file in self.folder.glob("*.leases"))

    def log(self, lines: int = 40) -> str:
        return "\n".join(f"== {part.name}\n" + "\n".join(list(part.log)[-lines:]) for part in self.parts)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time so far in seconds, by role."""
        seconds: dict[str, float] = {}
        for part in self.parts:
            seconds[part.role] = seconds.get(part.role, 0.0) + part.cpu_s()
        return seconds

    def rss_bytes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for part in self.parts:
            sizes[part.role] = sizes.get(part.role, 0) + part.rss_bytes()
        return sizes

    def _write_models(self) -> Path:
        folder = self.folder / "models"
        widths = [device.width for device in self.plan.workers if device is not None]
        folder.mkdir(exist_ok=True)
        for number, model in enumerate(self.plan.models):
            entry = {
                "id": model,
                "bundle": self.plan.toy_bundle,
                "weights": {"path": "/toy"},
                "family": "toy",
                "outputs": {"dense": max(widths, default=WIDTH)},
                "max_tokens": 512,
            }
            (folder / f"{number}.yaml").write_text(json.dumps(entry))  # JSON is YAML
        bundles = folder / "bundles"
        bundles.mkdir(exist_ok=True)
        # a bundle without a list of families has every family
        (bundles / f"{self.plan.toy_bundle}.yaml").write_text(json.dumps({"id": self.plan.toy_bundle}))
        return folder

    def _environ(self, **own: str) -> dict[str, str]:
        environ = {
            **os.environ,
            "SIE_CONFIG_READ_TOKEN": "read",
            "SIE_MACHINE_PROFILE": "cpu",
            **own,
            **self.plan.environ,
        }
        if self.plan.code is not None:
            folders = {
                package.parent for pattern in ("*/sie_*", "core/*/sie_*") for package in self.plan.code.glob(pattern)
            }
            environ["PYTHONPATH"] = os.pathsep.join(map(str, sorted(folders)))
        return environ

    def _add_brokers(self) -> str:
        count = self.plan.brokers
        clients, monitors, routes = (free_port(count) for _ in range(3))
        for number in range(count):
            folder = self.folder / f"broker-{number}"
            folder.mkdir(exist_ok=True)
            lines = [
                f'server_name: "b{number}"',
                f'listen: "127.0.0.1:{clients + number}"',
                f'http: "127.0.0.1:{monitors + number}"',
                f'jetstream {{ store_dir: "{folder}", sync_interval: "100ms" }}',
                "max_payload: 8388608",
            ]
            if count > 1:
                peers = ", ".join(f'"nats://127.0.0.1:{routes + peer}"' for peer in range(count))
                lines.append(f'cluster {{ name: "sie", listen: "127.0.0.1:{routes + number}", routes: [{peers}] }}')
            file = folder / "server.conf"
            file.write_text("\n".join(lines) + "\n")
            # a node of a cluster answers 200 once it knows a leader and has caught up
            ready = answers(f"http://127.0.0.1:{monitors + number}/healthz")
            self.brokers.append(Part("broker", f"broker {number}", [binary(), "-c", str(file)], os.environ, ready))
        self.monitor_urls = [f"http://127.0.0.1:{monitors + number}" for number in range(count)]
        return ",".join(f"nats://127.0.0.1:{clients + number}" for number in range(count))

    def _sie(self, role: Role, *arguments: str) -> list[str]:
        return [sys.executable, SIE, role, *arguments]

    def _add_config(self) -> Part:
        port = free_port()
        self.config_url = f"http://127.0.0.1:{port}"
        environ = self._environ(
            SIE_NATS_URL=self.broker_urls, SIE_MODELS_DIR=str(self._models), SIE_STREAM_REPLICAS=self._replicas
        )
        argv = self._sie("config", "--port", str(port))
        return Part("config", "config", argv, environ, answers(f"{self.config_url}/readyz"))

    @property
    def _replicas(self) -> str:
        return "3" if self.plan.brokers >= 3 else "1"

    def _add_gateway(self, number: int) -> None:
        port, metrics = free_port(), free_port()
        environ = self._environ(
            SIE_NATS_URL=self.broker_urls,
            SIE_CONFIG_SERVICE_URL=self.config_url,
            SIE_STREAM_REPLICAS=self._replicas,
            SIE_GATEWAY_METRICS_PORT=str(metrics),
            SIE_GATEWAY_HEALTH_MODE="nats",
        )
        ready = answers(f"http://127.0.0.1:{metrics}/readyz")
        self.urls.append(f"http://127.0.0.1:{port}")
        self.metrics_urls.append(f"http://127.0.0.1:{metrics}")
        self.gateways.append(
            Part("gateway", f"gateway {number}", self._sie("gateway", "--port", str(port)), environ, ready)
        )

    def _add_worker(self, number: int, device: Device | None) -> None:
        plan, metrics, path = self.plan, free_port(), self.folder / f"w{number}.sock"
        bundle = "default" if device is None else plan.toy_bundle
        preload = ",".join([MODEL] if device is None else plan.models)
        own = {
            "SIE_NATS_URL": self.broker_urls,
            "SIE_CONFIG_SERVICE_URL": self.config_url,
            "SIE_WORKER_METRICS_PORT": str(metrics),
            "SIE_IPC_SOCKET_PATH": str(path),
            "SIE_WORKER_ID": f"w{number}",
            "SIE_BUNDLE": bundle,
            "SIE_GATEWAY_URL": ",".join(self.urls),
            **({"SIE_PRELOAD_MODELS": preload} if plan.preload else {}),
        }
        sidecar_ready = answers(f"http://127.0.0.1:{metrics}/readyz")
        sidecar = Part(
            "sidecar",
            f"sidecar {number}",
            self._sie("sidecar", "--host", "127.0.0.1"),
            self._environ(**own) | ({"SIE_POOL": device.pool} if device and device.pool else {}),
            sidecar_ready,
        )
        if device is None:
            argv, environ = self._sie("adapter", "--no-spare"), self._environ(SIE_IPC_SOCKET_PATH=str(path))
        else:
            argv, environ = device.argv(path), self._environ()
        adapter = Part("adapter", f"adapter {number}", argv, environ, functools.partial(listens, path))
        more = []
        for place in range(1, device.devices if device else 1):
            own_path = Path(device_socket(str(path), place))
            more.append(
                Part(
                    "adapter",
                    f"adapter {number}.{place}",
                    device.argv(own_path) if device else [],
                    environ,
                    functools.partial(listens, own_path),
                )
            )
        self.workers.append(Worker(sidecar, adapter, f"http://127.0.0.1:{metrics}", more))


def _forked_as(argv: Sequence[str], environ: Mapping[str, str]) -> Kind | None:
    """Return the kind of zygote that forks this command, or None if the command itself is started: outside of pytest,
    for another checkout, and with a setting that only a start reads.
    """
    if "PYTEST_VERSION" not in os.environ or environ.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        return None
    if reads_at_start(environ):
        return None
    script, *arguments = argv[argv[0] == sys.executable :]
    if script == str(ADAPTER):
        return "fixed_cost_adapter"
    return _KINDS.get(arguments[0]) if script == SIE else None


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def answers(url: str) -> Callable[[], bool]:
    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url, timeout=2, trust_env=False).status_code == 200
        return False

    return ready
