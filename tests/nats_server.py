"""A real nats-server for tests: on free loopback ports, with JetStream in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from zygote import end_with_parent

from sie_cli.serve.ports import free_port

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


def binary() -> str:
    """Return the server of this environment, or else that of the machine."""
    beside = Path(sys.executable).with_name("nats-server")
    path = str(beside) if beside.exists() else shutil.which("nats-server")
    if path is None:
        raise FileNotFoundError("nats-server is neither beside python nor on PATH")
    return path


class NatsServer:
    """One server process. It keeps its port and store over `kill` and `start`, so clients see a restart.

    `extra` is text for the end of its configuration file, such as accounts. `log` has its last lines. Calls block until
    the process is ready or gone, at most for START_TIMEOUT_S and STOP_TIMEOUT_S.
    """

    def __init__(
        self, folder: Path, *, max_payload: int = 1 << 20, sync_interval: str = "100ms", extra: str = ""
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.monitor_port = free_port()
        self.log: deque[str] = deque(maxlen=200)
        self._max_payload = max_payload
        self._config = f'jetstream {{ store_dir: "{folder / "store"}", sync_interval: "{sync_interval}" }}\n{extra}\n'
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    def set_max_payload(self, max_payload: int) -> None:
        """Set the limit of the next start."""
        self._max_payload = max_payload

    def start(self) -> NatsServer:
        assert self._process is None, "it runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        ports = f'listen: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.monitor_port}"\n'
        config.write_text(f"{ports}max_payload: {self._max_payload}\n{self._config}")
        self._process = subprocess.Popen(
            [binary(), "-c", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, ready), daemon=True)
        self._reader.start()
        if not ready.wait(START_TIMEOUT_S) or self._process.poll() is not None:
            self.kill()
            raise RuntimeError("nats-server did not start:\n" + "\n".join(self.log))
        return self

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip())
                if "Server is ready" in line:
                    ready.set()
        process.wait()
        ready.set()

    def stop(self) -> None:
        """End the server with SIGTERM, as an orchestrator does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL. Unlike after a power cut, the page cache stays."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop answering without closing a connection."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.wait(STOP_TIMEOUT_S)
        if self._reader is not None:
            self._reader.join(STOP_TIMEOUT_S)

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
