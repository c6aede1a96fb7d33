"""SIE_LOG_JSON: the log lines of every process, which never quote an input or a token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from inprocess import InProcess
from zygote import Forked

from sie_runtime.process import configure_logging

SIE = str(Path(sys.executable).with_name("sie"))
CANARY = "canary-5c1e"
END_S = 30.0
KEYS = {"timestamp", "level", "logger", "message", "model", "request_id", "trace_id", "latency_ms", "worker", "key"}
PLAIN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) sie(\.\w+)+: .+|warning: .+")

# standalone runs everything but the adapter in one process
PROCESSES = {
    "standalone": [
        "--port",
        "0",
        "--gateway-metrics-port",
        "0",
        "--worker-metrics-port",
        "0",
        "--data-dir",
        "{folder}",
    ],
    "adapter": ["--device", "cpu", "--ipc-socket-path", "{folder}/a.sock"],
}
LAST = {"standalone": "gateway listening", "adapter": "adapter ready"}


def lines_of(process: str, folder: Path, **environ: str) -> list[str]:
    """Return all lines of a process that gets a SIGTERM when it is up."""
    arguments = [argument.format(folder=folder) for argument in PROCESSES[process]]
    (folder / "run").mkdir(parents=True)
    environ = {"PATH": os.environ["PATH"], "SIE_TYPO": "1", **environ}
    started = Forked("engine" if process == "adapter" else "sie", [SIE, process, *arguments], environ)
    lines = []
    try:
        with started.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                if LAST[process] in line:
                    started.send_signal(signal.SIGTERM)
        assert started.wait(END_S) == 0, lines
    finally:
        started.kill()
    return lines


async def test_each_process_writes_json_lines_or_plain_ones(tmp_path: Path) -> None:
    """SIE_LOG_JSON: with it, every line is one JSON object with the documented keys. Without it, no line is."""
    plain, *json = await asyncio.gather(
        asyncio.to_thread(lines_of, "standalone", tmp_path / "plain"),
        *(asyncio.to_thread(lines_of, name, tmp_path / name, SIE_LOG_JSON="true") for name in PROCESSES),
    )
    for lines in json:
        entries = [msgspec.json.decode(line) for line in lines]
        assert all(set(entry) == KEYS for entry in entries)
        assert entries[0]["message"] == "SIE_TYPO is set, but no such setting exists"
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["timestamp"]) for entry in entries)
    loggers = {msgspec.json.decode(line)["logger"].split(".")[1] for lines in json for line in lines}
    assert {"config", "gateway", "sidecar", "adapter"} <= loggers
    assert [line for line in plain if not PLAIN.fullmatch(line)] == []


async def test_what_python_itself_writes_is_a_line_too_and_quotes_nobody() -> None:
    """SIE_LOG_JSON: warnings, uncaught exceptions and names with lone surrogates are lines too."""
    code = f"""
import logging, threading, warnings
from sie_runtime.process import own_stderr
own_stderr(json=True)
warnings.warn("something is old")
logging.getLogger("sie.x").info("the file %s", "a" + chr(0xdc80))
thread = threading.Thread(target=int, args=("{CANARY}",), name="lane-0")
thread.start()
thread.join()
int("{CANARY}")
"""
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(done.communicate(), 60)
    entries = [msgspec.json.decode(line) for line in stderr.splitlines()]
    assert (done.returncode, [entry["level"] for entry in entries]) == (1, ["WARNING", "INFO", "CRITICAL", "CRITICAL"])
    assert all(set(entry) == KEYS for entry in entries)
    assert "something is old" in entries[0]["message"]
    assert entries[2]["message"].startswith("thread lane-0 ended because of an uncaught exception")
    assert CANARY.encode() not in stderr


@contextlib.contextmanager
def json_logs() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    configure_logging(json=True)
    try:
        yield
    finally:
        root.handlers[0].flush()
        root.handlers = before
        root.setLevel(level)


async def test_a_request_is_one_line_with_its_id_model_and_latency_and_no_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIE_LOG_JSON: successes and failures are logged. Inputs, ids, metadata, tokens and bad bodies have the canary."""
    with json_logs():
        async with InProcess(tmp_path) as cluster:
            gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN=f"{CANARY}-token")
            await cluster.sidecar()
            headers = {"authorization": f"Bearer {CANARY}-token"}
            item = {"id": CANARY, "text": CANARY, "metadata": {"note": CANARY}}
            odd = {"items": [item], "params": {"truncate": CANARY}}
            for body in ({"items": [item]}, odd, {"items": [{"text": [CANARY]}]}, {CANARY: CANARY}):
                answer = await gateway.client.post("/v1/encode/toy/one", json=body, headers=headers)
                assert answer.status_code in (200, 400)
            await gateway.client.post("/v1/encode/toy/one", content=f'{{"items": ["{CANARY}'.encode(), headers=headers)
            await gateway.encode("x", Authorization=f"Bearer {CANARY}")
            fourth = answer.headers["x-sie-request-id"]
    lines = capsys.readouterr().err.splitlines()
    entries = [msgspec.json.decode(line) for line in lines]
    requests = [
        entry for entry in entries if entry["logger"] == "sie.gateway" and entry["message"].startswith("encode ")
    ]
    assert len(requests) == 6
    assert requests[0]["model"] == "toy/one"
    assert requests[0]["latency_ms"] > 0
    assert requests[3]["request_id"] == fourth
    assert not [line for line in lines if CANARY in line]
