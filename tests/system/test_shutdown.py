"""The end of `sie serve`, with real signals."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import MODEL, SIE, Cluster, free_ports, running, until
from load import Load, answered
from namespaces import CLONE_NEWPID, namespace
from stack import Device, Plan, Stack

GONE_S = 60.0  # bound on a busy machine; the kernel ends processes at once
STOPPED_S = 15.0  # the promise
PAUSE_S = 0.05  # of a client after an answer
CLIENTS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("shutdown"), "--preload", MODEL) as cluster:
        yield cluster


def test_two_serves_do_not_share_a_data_directory(cluster: Cluster) -> None:
    second = subprocess.run(
        [SIE, "serve", "--data-dir", str(cluster.data_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 2
    assert f"a `sie serve` runs at {cluster.url} with " in second.stderr
    assert "`sie pull MODEL` add a model to it; a second server needs another --data-dir" in second.stderr


def test_a_taken_port_ends_the_start_and_names_the_setting(cluster: Cluster, tmp_path: Path) -> None:
    second_cluster = Cluster(tmp_path, "--no-spare")
    argv = [*second_cluster.argv[:2], "--port", str(cluster.port), *second_cluster.argv[4:]]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"--port: cannot listen on 127.0.0.1:{cluster.port}" in second.stderr


async def ended_under_load(process: subprocess.Popen[str], url: str, number: int) -> None:
    """Check an end under load: accepted requests are answered, later ones refused or not connected; status 0 in time;
    no process is left.
    """
    load = Load([url], pause_s=PAUSE_S, expected=answered(url))
    tasks = load.start(CLIENTS)
    await load.successes_after(time.monotonic(), 40, GONE_S)
    load.pause_s = 0.0
    await load.busy(CLIENTS // 2, GONE_S)
    children = psutil.Process(process.pid).children(recursive=True)
    signalled_s = time.monotonic()
    process.send_signal(number)
    status = await asyncio.to_thread(process.wait, GONE_S)
    ended_s = time.monotonic()
    await load.stop(tasks)
    assert status == 0
    assert ended_s - signalled_s <= STOPPED_S
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []
    assert not load.wrong()
    under_way = [outcome for outcome in load.outcomes if outcome.sent_s < signalled_s < outcome.ended_s]
    assert [outcome for outcome in under_way if outcome.status == 200], "nothing was in progress at the signal"
    # a request that was under way but not read yet is refused like any later one; none breaks off or fails otherwise
    assert {outcome.code or outcome.failure for outcome in under_way if outcome.status != 200} <= {"SHUTTING_DOWN"}
    assert {outcome.status for outcome in under_way} <= {200, 503}
    later = [outcome for outcome in load.outcomes if outcome.sent_s >= signalled_s and outcome.status not in (0, 200)]
    assert {outcome.code for outcome in later} <= {"SHUTTING_DOWN"}
    assert {outcome.status for outcome in load.outcomes if outcome.ended_s <= signalled_s} == {200}


async def test_sigterm_under_load_drains_and_exits_with_0(cluster: Cluster) -> None:
    """This is the last test of this cluster."""
    assert cluster.process is not None
    await ended_under_load(cluster.process, cluster.url, signal.SIGTERM)


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sie serve --standalone 2>&1 | head`, whose reader has ended: the process and its URL."""
    cluster = Cluster(tmp_path, "--standalone", "--no-spare", "--preload", MODEL)
    with subprocess.Popen(
        cluster.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while "ready in" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        try:
            yield process, cluster.url
        finally:
            process.kill()


@pytest.mark.long
async def test_ctrl_c_drains_a_standalone_serve_that_outlived_the_reader_of_its_output(
    unread: tuple[subprocess.Popen[str], str],
) -> None:
    """The pipe is broken. SIGINT drains as SIGTERM does."""
    await ended_under_load(*unread, signal.SIGINT)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_each_signal_to_end_is_taken_and_a_hangup_that_is_ignored_stays_ignored(number: str) -> None:
    """nohup ignores SIGHUP for its command."""
    code = "import signal; from sie_runtime.process import end_signals; print(*(each.name for each in end_signals()))"

    def names(ignored: bool) -> list[str]:
        before = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if ignored else 'DFL'}); "
        return subprocess.run(
            [sys.executable, "-c", before + code], check=True, capture_output=True, text=True
        ).stdout.split()

    assert number in names(ignored=False)
    assert (number in names(ignored=True)) == (number != "SIGHUP")


def _of_a_terminal() -> None:
    """Restore the signals as a shell does before a command; the runner of the tests may ignore the hangup, which
    children inherit.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.long
def test_a_terminal_that_closes_stops_everything(tmp_path: Path) -> None:
    """SIGHUP drains as SIGTERM does, although nothing can be printed any more."""
    port, worker_port = free_ports(2)
    command = [
        SIE,
        "serve",
        "--standalone",
        "--no-spare",
        "--port",
        str(port),
        "--data-dir",
        str(tmp_path),
        "--gateway-metrics-port",
        "0",
        "--worker-metrics-port",
        str(worker_port),
    ]
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=_of_a_terminal,
    ) as process:
        os.close(inside)
        shown = b""
        while b"ready in" not in shown:
            shown += os.read(terminal, 1 << 16)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.close(terminal)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


@pytest.mark.long
def test_exit_with_parent_ends_serve_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    """`make serve` is killed with -9: serve ends, and with it everything that it started."""
    port, worker_port = free_ports(2)
    command = [
        SIE,
        "serve",
        "--exit-with-parent",
        "--standalone",
        "--no-spare",
        "--port",
        str(port),
        "--data-dir",
        str(tmp_path / "data"),
        "--gateway-metrics-port",
        "0",
        "--worker-metrics-port",
        str(worker_port),
    ]
    log = tmp_path / "log"
    code = (
        f"import subprocess, sys; subprocess.run({command!r}, stdout=open({str(log)!r}, 'w'), stderr=subprocess.STDOUT)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        until(lambda: log.exists() and "ready in" in log.read_text(), 60, "ready")
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) >= 3
        os.kill(parent.pid, signal.SIGKILL)
        assert psutil.wait_procs(family, timeout=GONE_S)[1] == []


def test_a_sidecar_that_waits_to_preload_ends_at_sigterm(tmp_path: Path) -> None:
    """No adapter ever answers at its socket."""
    stack = Stack(tmp_path, Plan())
    late = stack.workers.pop().sidecar
    with stack:
        late.start()
        try:
            until(lambda: any("waiting for the adapter" in line for line in late.log), GONE_S, "that it waits")
            health = f"{stack.urls[0]}/health"
            until(lambda: httpx.get(health, timeout=30).json()["unhealthy_workers"], GONE_S, "its heartbeat")
        finally:
            late.stop()
        assert late.status == 0, list(late.log)


async def _in_progress(metrics_url: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        text = (await client.get(f"{metrics_url}/metrics")).text
    match = re.search(r"^sie_gateway_requests_in_progress(?:{.*})? (\S+)$", text, re.MULTILINE)
    return int(float(match[1])) if match else 0


@pytest.mark.long
@pytest.mark.parametrize(("once", "code"), [((), None), (("--drain-s", "1"), "SHUTTING_DOWN")])
async def test_a_gateway_drains_as_long_as_a_request_may_take(
    tmp_path: Path, once: tuple[str, ...], code: str | None
) -> None:
    """SIGTERM comes during a request whose batch takes 12 s. The request is answered, and then the gateway ends with 0.
    With a shorter drain the request is refused with SHUTTING_DOWN.
    """
    with Stack(tmp_path, Plan(workers=(Device(batch_ms=12_000),))) as stack:
        (gateway,), (url,) = stack.gateways, stack.urls
        if once:
            gateway.stop()
            gateway.start(*once)
            gateway.wait_ready()
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/encode/toy/one", json={"items": ["hello"]}))
            while not await _in_progress(stack.metrics_urls[0]):
                assert not asking.done(), asking.result().text
            os.kill(gateway.pid, signal.SIGTERM)
            answer = await asking
            if code is None:
                assert answer.status_code == 200, answer.text
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        await asyncio.to_thread(until, lambda: gateway.status is not None, 60, "the end of the gateway")
        assert gateway.status == 0


@pytest.mark.debian
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_process_of_a_container_ends_by_a_signal_that_comes_during_its_imports(number: int) -> None:
    """The kernel drops signals that process 1 has no handler for: a pod would take its whole grace period to end."""
    script = """
import signal, sys, time, types
from sie_cli.entry import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which whoever started the tests may ignore, as nohup does

def imports():
    print("importing", flush=True)
    while True:  # Python runs a signal's handler between two calls, and not in one that blocks from just before it
        time.sleep(0.01)

sys.modules["sie_cli.main"] = types.SimpleNamespace(main=imports)
main()
"""
    with namespace(CLONE_NEWPID, "pid_for_children"):
        first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        with first.stdout:
            assert first.stdout.readline() == "importing\n"
            first.send_signal(number)
            assert first.wait(GONE_S) == 128 + number
    finally:
        first.kill()
        first.wait(GONE_S)
