"""The end of `sie serve`, with real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import MODEL, SIE, Cluster, free_ports, running, until
from load import Load, answered
from namespaces import CLONE_NEWPID, namespace
from stack import Plan, Stack

GONE_S = 60.0  # bound on a busy machine; the kernel ends processes at once
STOPPED_S = 15.0  # the promise
PAUSE_S = 0.05  # of a client after an answer
CLIENTS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("shutdown"), "--preload", MODEL) as cluster:
        yield cluster


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


def test_each_signal_to_end_is_taken_and_a_hangup_that_is_ignored_stays_ignored() -> None:
    """nohup ignores SIGHUP for its command."""
    code = "import signal; from sie_runtime.process import end_signals; print(*(each.name for each in end_signals()))"

    def names(handler: str) -> set[str]:
        before = f"import signal; signal.signal(signal.SIGHUP, signal.{handler}); "
        argv = [sys.executable, "-c", before + code]
        return set(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split())

    assert names("SIG_DFL") == {"SIGTERM", "SIGINT", "SIGHUP"}
    assert names("SIG_IGN") == {"SIGTERM", "SIGINT"}


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
    stack = Stack(tmp_path, Plan(environ={"SIE_HEALTH_PUBLISH_INTERVAL_MS": "250"}))
    late = stack.workers.pop().sidecar
    with stack:
        late.start()
        try:
            health = f"{stack.urls[0]}/health"
            until(lambda: httpx.get(health, timeout=30).json()["unhealthy_workers"], GONE_S, "its heartbeat")
        finally:
            late.stop()
        assert late.status == 0, list(late.log)


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
