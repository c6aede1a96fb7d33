"""The first start of `sie serve`: no sign of trouble on a healthy machine, and one line for what a machine lacks."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from cluster import SIE, Cluster, free_ports

from sie_cli.serve.preflight import MachineNeeds, faults
from sie_contracts.settings import Settings, load

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


def refused(data_dir: Path, *args: str, under: Sequence[str] = ()) -> list[str]:
    """Return the lines with which `sie serve` ends before it starts a process."""
    argv = [*under, SIE, "serve", "--data-dir", str(data_dir), *args]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (data_dir / "nats").exists(), "the broker was started"
    return done.stderr.splitlines()


def test_a_port_that_is_taken_is_named_with_one_that_is_free(tmp_path: Path) -> None:
    api, metrics, *_ = free_ports(4)
    with held(api, metrics):
        lines = refused(tmp_path / "data", "--port", str(api), "--worker-metrics-port", str(metrics))
    assert [line.partition(" 127.0.0.1:")[0] for line in lines] == [
        "error: --port: cannot listen on",
        "error: --worker-metrics-port: cannot listen on",
    ]
    assert f"'sport = :{api}'" in lines[0]
    suggested = re.search(r"such as --port (\d+)$", lines[0])
    assert suggested is not None
    with socket.create_server(("127.0.0.1", int(suggested[1]))):
        pass


def test_an_address_of_another_machine_is_no_host(tmp_path: Path) -> None:
    (line,) = refused(tmp_path / "data", "--host", "192.0.2.1", "--port", str(free_ports(1)[0]))
    assert line.endswith("that is no address of this machine; choose --host 127.0.0.1, or 0.0.0.0 for all addresses")


def test_a_disk_without_room_for_the_streams_is_told_with_folder_and_bytes_and_a_queue_that_fits(
    tmp_path: Path,
) -> None:
    more = 1 << 60
    port = str(free_ports(1)[0])
    (line,) = refused(tmp_path / "data", "--port", port, "--queue-max-bytes", str(more))
    assert f"({more + (256 << 20)} bytes) in {tmp_path / 'data' / 'nats'}" in line
    fitting = re.search(r"--queue-max-bytes (\d+)$", line)
    assert fitting is not None
    settings = load(
        flags={"SIE_QUEUE_MAX_BYTES": str(int(fitting[1]) * 9 // 10)}, environ={}
    ).settings  # others write on that disk too
    assert faults(needs(tmp_path, settings)) == []


def needs(data_dir: Path, settings: Settings) -> MachineNeeds:
    return MachineNeeds((), data_dir, has_broker=True, gateways=1, workers=1, settings=settings)


@pytest.mark.long
def test_few_open_files_are_told_and_a_lower_soft_limit_is_raised(tmp_path: Path) -> None:
    port = ("--port", str(free_ports(1)[0]))
    (line,) = refused(tmp_path / "data", *port, under=["prlimit", "--nofile=256"])
    assert line.startswith(
        "error: ulimit -n: a process may open 256 files, and a gateway of 512 concurrent requests needs 768"
    )
    (line,) = refused(tmp_path / "data", *port, under=["prlimit", "--nofile=356"])
    assert line.endswith("--max-concurrent-requests 100")
    code = (
        "import sys, resource; from pathlib import Path; from sie_cli.serve.preflight import MachineNeeds, faults\n"
        "from sie_contracts.settings import load\n"
        "lines = faults(MachineNeeds((), Path(sys.argv[1]), True, 1, 1, load(environ={}).settings))\n"
        "print(lines, resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    argv = ["prlimit", "--nofile=256:2048", sys.executable, "-c", code, str(tmp_path)]
    assert (
        subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=True).stdout == "[] (2048, 2048)\n"
    )


def test_little_memory_to_map_is_told(tmp_path: Path) -> None:
    (line,) = refused(tmp_path / "data", "--port", str(free_ports(1)[0]), under=["prlimit", f"--as={1000 << 20}"])
    assert line.startswith("error: ulimit -v: a process may map 1000.0 MiB (1024000 KiB) of memory")
    assert f"`ulimit -v {(3 << 30) // 1024}`" in line
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "the limit was that of the child alone"


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
    assert (
        "nats-server ended with status 1, 5 times in a row before all processes were ready: its last lines above "
        "say why" in done.stderr
    )
