"""The first start of `sie serve`: no sign of trouble on a healthy machine, and one line for what a machine lacks."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import SIE, Cluster, free_ports

BOUND_S = 60.0
_TROUBLE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|\b[Ww]arning:|Traceback|\[(WRN|ERR|FTL)\]")


@contextlib.contextmanager
def held(*ports: int) -> Iterator[None]:
    """Listen on these ports; skip a port that is already taken."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def plain(data_dir: Path, *args: str) -> Cluster:
    """`sie serve` with nothing but an API port and a data directory."""
    cluster = Cluster(data_dir)
    cluster.argv = [SIE, "serve", "--port", str(cluster.port), "--data-dir", str(data_dir), *args]
    return cluster


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "mode",
    [pytest.param((), id="queue"), pytest.param(("--standalone",), id="standalone", marks=pytest.mark.long)],
)
def test_a_start_tells_each_warning_once_and_nothing_else_and_takes_no_port_that_others_use(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """Several processes read the settings. One line warns of the unknown setting, and with --standalone one more of the
    setting without effect. No other line is a sign of trouble.
    """
    cluster = plain(tmp_path / "data", *mode)
    cluster.environ |= {"SIE_POOOL": "x", "SIE_BATCHER_COALESCE_MS": "6"}
    with held(9090, 9095):
        try:
            cluster.start(BOUND_S)
            assert cluster.encode(["Hello"]).status_code == 200
            (metrics_line,) = [line for line in cluster.lines if line.startswith("[serve] metrics ")]
            gateway, worker = re.findall(r"http://\S+?/metrics", metrics_line)
            assert "sie_" in httpx.get(gateway, timeout=10).text
            assert "sie_" in httpx.get(worker, timeout=10).text
        finally:
            assert cluster.stop() == 0
    warned = [line for line in cluster.lines if "warning: " in line]
    expected = ["SIE_BATCHER_COALESCE_MS"] if mode else []
    assert sorted(line.split()[1] for line in warned) == [*expected, "SIE_POOOL"]
    trouble = [line for line in cluster.lines if _TROUBLE.search(line) and line not in warned]
    assert trouble == [], "\n".join(cluster.lines)


# what a machine lacks: the options, the command that runs ours under a limit, and what the only line names
LACKS: dict[str, tuple[list[str], list[str], str]] = {
    "a port": ([], [], r"--port: .*127\.0\.0\.1:\d+.* such as --port \d+$"),
    "an address": (["--host", "192.0.2.1"], [], "--host 127.0.0.1"),
    "room for the streams": (["--queue-max-bytes", str(1 << 60)], [], r"/data/nats.*--queue-max-bytes \d+$"),
    "open files": ([], ["prlimit", "--nofile=356"], r"ulimit -n: .*--max-concurrent-requests 100$"),
    "memory to map": ([], ["prlimit", f"--as={1000 << 20}"], f"ulimit -v {(3 << 30) // 1024}"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_machine_lacks_is_told_before_a_process_starts(tmp_path: Path, lack: str) -> None:
    own, under, pattern = LACKS[lack]
    (port,) = free_ports(1)
    argv = [*under, SIE, "serve", "--data-dir", str(tmp_path / "data"), "--port", str(port), *own]
    with held(*([port] if lack == "a port" else [])):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.search(pattern, line), line
    assert not (tmp_path / "data" / "nats").exists(), "the broker was started"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_process_that_cannot_start_ends_the_command_instead_of_being_started_for_ever(tmp_path: Path) -> None:
    """The broker ends at once, however often it is started: its folder is a file."""
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    (data_dir / "nats").mkdir()
    (data_dir / "nats" / "jetstream").write_text("a file")
    argv = [SIE, "serve", "--data-dir", str(data_dir), "--port", str(free_ports(1)[0])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "nats-server ended with status 1, 5 times in a row" in done.stderr
