"""`sie top`: its picture in terminals of many sizes, with a real terminal, a pipe and a gateway that goes away."""

from __future__ import annotations

import contextlib
import fcntl
import http
import io
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner
from cluster import until
from rich.console import Console
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from sie_cli.main import main
from sie_cli.serve.ports import free_port
from sie_cli.top.picture import (
    MAX_REASONS,
    TREND,
    HistoryTrend,
    Queued,
    StatusFrame,
    TrendStep,
    View,
    lanes_of,
    of_past,
    picture,
)
from sie_contracts.api.operations import DeviceInfo, ModelSummary, WorkerInfo

SIE = str(Path(sys.executable).with_name("sie"))
SHOWN, HIDDEN, LEFT, HOME = "\x1b[?1049h", "\x1b[?25l", "\x1b[?1049l", "\x1b[H"


def frame(workers: int = 2, models: int = 3, queued: int = 0) -> dict[str, Any]:
    """Return a frame of a gateway. If there are several workers, the last one is not healthy."""
    rows = [
        {
            "name": f"worker-{number}",
            "url": None,
            "gpu": "l4",
            "gpu_count": 1,
            "pool": "_default",
            "bundle": "default",
            "loaded_models": ["m"],
            "queue_depth": queued,
            "memory_used_bytes": 8 << 30,
            "memory_total_bytes": 24 << 30,
            "healthy": number + 1 < workers or workers == 1,
            "bundle_config_hash": "e:1",
            "device": "cuda:0",
        }
        for number in range(workers)
    ]
    names = [
        {
            "name": f"organisation/model-{number}",
            "state": "loaded" if number % 2 else "available",
            "worker_count": number % 2,
            "gpu_types": ["l4"],
            "total_queue_depth": number,
        }
        for number in range(models)
    ]
    lane = {"pool": "_default", "machine_profile": "l4", "bundle": "default"}
    queues: list[dict[str, Any]] = [
        {**lane, "priority": priority, "messages": messages, "oldest_s": 3.25 if messages else 0.0}
        for priority, messages in (("interactive", queued * workers), ("bulk", queued))
    ]
    model_queues = [
        {**queues[0], "messages": number, "model": model["name"]} for number, model in enumerate(names) if number
    ]
    sums = {
        "worker_count": max(1, workers - 1),
        "gpu_count": workers,
        "models_loaded": models // 2,
        "total_qps": 12.345,
    }
    return {
        "timestamp": time.time(),
        "version": "0.1.0",
        "cluster": sums,
        "workers": rows,
        "models": names,
        "queues": queues,
        "model_queues": model_queues,
    }


def drawn(
    width: int,
    height: int,
    cluster_frame: dict[str, Any] | None,
    *,
    age_s: float = 0.0,
    colours: bool = False,
    past: HistoryTrend | None = None,
) -> list[str]:
    view = View("http://gateway:8080", past=past)
    if cluster_frame is not None:
        view.add_frame(msgspec.convert(cluster_frame, StatusFrame), 100.0)
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=colours, legacy_windows=False, highlight=False
    )
    console.print(picture(view, width, height, 100.0 + age_s))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [20, 30, 40, 69, 70, 99, 100, 120, 250])
@pytest.mark.parametrize("height", [5, 24, 60])
def test_no_line_is_wider_than_the_terminal_and_all_parts_are_there(width: int, height: int) -> None:
    lines = drawn(width, height, frame(workers=40, models=300, queued=7))
    assert all(len(line) <= width for line in lines), lines
    assert len(lines) <= max(height, 20) or width < 30, len(lines)  # a smaller terminal shows the upper part
    text = "\n".join(lines)
    assert all(title in text for title in ("LANE", "WORKER", "MODEL", "STATE"))
    if width >= 30:
        rest = (r" +3\.2 s +7", r" +3\.2 s") if width >= 70 else ("", "")
        assert re.search(rf"_defau\S* +39 of 40 +287{rest[0]}\n", text), "no number is cut"
        assert re.search(rf"organ\S* +loaded +299{rest[1]}\b", text)


def test_the_figures_of_a_frame_are_shown() -> None:
    text = "\n".join(drawn(120, 40, frame(models=5, queued=3)))
    assert "1 of 2 workers  1 GPU  2 of 5 models loaded  9 queued  oldest 3.2 s  12.3 req/s" in text
    assert re.search(r"_default\.l4\.default +1 of 2 +9 +3\.2 s +3\n", text)
    first, second = (line for line in text.splitlines() if line.startswith("worker-"))
    assert first.startswith("worker-1"), "what is not well comes first"
    assert "not ready" in first
    assert re.search(r"worker-0 +ready +3 +1 +cuda:0 +███░░░░░░░ +33% of 24.0 GiB", second)
    shown = re.findall(r"organisation/model-\d", text)
    assert shown == [f"organisation/model-{number}" for number in (4, 3, 2, 1)], (
        "by queue; one that nobody asks for is only counted"
    )
    assert text.endswith("  1 other model")


def test_what_does_not_fit_is_counted() -> None:
    lines = drawn(100, 24, frame(workers=40, models=300))
    rests = [
        int(match[1].replace(",", "")) for line in lines if (match := re.match(r"  ([\d,]+) (more|other models)", line))
    ]
    shown = sum(line.startswith("worker-") for line in lines), sum(line.startswith("organisation/") for line in lines)
    assert (shown[0] + rests[0], shown[1] + rests[1]) == (40, 300)
    assert min(shown) > 0


@pytest.mark.parametrize(("age_s", "state"), [(0.0, "live"), (2.0, "live"), (10.0, "no answer for 10 s, trying again")])
def test_an_old_picture_says_that_it_is_old(age_s: float, state: str) -> None:
    assert drawn(100, 24, frame(), age_s=age_s)[0] == f"sie top  {state}  http://gateway:8080  version 0.1.0"


def test_without_a_frame_it_is_connecting() -> None:
    assert drawn(100, 24, None) == ["sie top  connecting  http://gateway:8080"]


def test_names_are_no_markup_and_no_control_of_the_terminal() -> None:
    cluster_frame = frame(workers=1, models=0)
    cluster_frame["workers"][0]["name"] = "[red]a\x1b[2Jb"
    lines = drawn(100, 24, cluster_frame, colours=True)
    assert any("[red]a?[2Jb" in line for line in lines), lines
    assert not any("\x1b[2J" in line for line in lines)


def told(**more: Any) -> StatusFrame:
    return msgspec.convert({**frame(workers=0, models=0), "queues": [], "model_queues": [], **more}, StatusFrame)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_reason_of_a_failed_model_stands_below_the_models(width: int) -> None:
    models = [
        {"name": f"m{number}", "state": "failed", "worker_count": 0, "gpu_types": ["l4"], "total_queue_depth": 0}
        for number in range(5)
    ]
    why = {f"m{number}": "no such\n\x1b[31mfile" for number in range(5)}
    lines = drawn(width, 40, {**frame(), "models": models, "failures": why})
    assert [line for line in lines if "failed:" in line] == [
        f"  m{number} failed: no such [31mfile" for number in range(MAX_REASONS)
    ]
    short = drawn(width, 24, {**frame(), "models": models, "failures": why})
    assert len(short) <= 24


def queue(profile: str, messages: int, oldest_s: float = 1.0, priority: str = "interactive") -> dict[str, Any]:
    return {
        "pool": "p",
        "machine_profile": profile,
        "bundle": "b",
        "priority": priority,
        "messages": messages,
        "oldest_s": oldest_s,
    }


def worker_row(name: str, **more: Any) -> WorkerInfo:
    figures = {"gpu_count": 1, "queue_depth": 0, "memory_used_bytes": 0, "memory_total_bytes": 0, "loaded_models": []}
    place = {"url": None, "gpu": "l4", "pool": "p", "bundle": "b", "bundle_config_hash": "", "device": ""}
    return WorkerInfo(**{"name": name, "healthy": True, **figures, **place, **more})


def test_lanes_are_sums_over_their_workers() -> None:
    rows = [
        worker_row("a"),
        worker_row("c", healthy=False),
        worker_row("d", gpu="a100"),
        worker_row("http://w", gpu="", pool="", bundle="", healthy=False),
    ]
    lanes = lanes_of(told(workers=rows, queues=[queue("l4", 2, 5.0), queue("l4", 3, 7.0, "bulk"), queue("t4", 0)]))
    assert [(lane.name, lane.healthy, lane.workers) for lane in lanes] == [
        ("(not known)", 0, 1),
        ("p.l4.b", 1, 2),
        ("p.a100.b", 1, 1),
    ]
    assert [lane.queued for lane in lanes] == [Queued(), Queued(5, 3, 7.0), Queued()]


def test_work_that_has_no_worker_is_shown_first() -> None:
    """No worker reports this work. The frame has it from the broker."""
    rows = [worker_row("a", device="cpu")]
    models = [ModelSummary(name, "available", 0, [], 0) for name in ("m/waits", "m/rests")]
    waiting = queue("a100", 12, 75.0)
    view = told(workers=rows, models=models, queues=[waiting], model_queues=[{**waiting, "model": "m/waits"}])
    text = "\n".join(drawn(80, 24, msgspec.to_builtins(view)))
    assert re.search(r"LANE.*\np\.a100\.b +0 +12 +75 s +0\np\.l4\.b +1 +0 +0\n", text)
    assert re.search(r"MODEL.*\nm/waits +available +12 +75 s +0\n  1 other model$", text)
    assert "12 queued  oldest 75 s" in text
    assert "GPU" not in text, "a CPU is none"


def test_each_device_of_a_worker_has_a_row_if_there_is_room() -> None:
    devices = [
        DeviceInfo("cuda:0", True, "l4", 6 << 30, 24 << 30, 3, ["m/a", "m/b"]),
        DeviceInfo("cuda:1", False, "l4", 0, 0, 0, []),
    ]
    worker = worker_row(
        "w",
        device="cuda:0,cuda:1",
        gpu_count=2,
        queue_depth=3,
        memory_used_bytes=6 << 30,
        memory_total_bytes=48 << 30,
        loaded_models=["m/a", "m/b"],
        devices=devices,
    )
    view = msgspec.to_builtins(told(workers=[worker]))
    text = "\n".join(drawn(100, 24, view))
    assert re.search(r"\nw +ready +3 +2 +2 devices .*12% of 48", text)
    assert re.search(r"\n +cuda:0 +ready +3 +2 +cuda:0 .*25% of 24", text)
    assert re.search(r"\n +cuda:1 +not ready +0 +0 +cuda:1 +-\n", text)
    assert "2 GPUs" in text
    many = [worker_row(f"w{number}", devices=devices) for number in range(20)]
    assert "cuda:1" not in "\n".join(drawn(100, 24, msgspec.to_builtins(told(workers=many))))


def test_what_is_not_known_is_not_zero() -> None:
    """One gateway gets no data from the broker, and one is of an older version."""
    for view in (told(queues=None, model_queues=None), told()):
        old = {name: value for name, value in msgspec.to_builtins(view).items() if value is not None}
        text = "\n".join(drawn(80, 24, {**old, "workers": [worker_row("a")]}))
        assert ("queue not known" in text) is (view.queues is None)
        assert re.search(r"p\.l4\.b +1 +-" if view.queues is None else r"p\.l4\.b +1 +0 ", text)


def test_an_empty_cluster_says_so() -> None:
    text = "\n".join(drawn(80, 24, msgspec.to_builtins(told())))
    assert "0 workers  0 of 0 models loaded  0 queued" in text
    assert text.count("  none") == 3


def trend_line(width: int, figures: list[tuple[float, int | None]]) -> str:
    """Return the trend line of a picture after these frames; empty if there is none."""
    view = View("http://gateway:8080")
    for rate, messages in figures:
        sums = {"worker_count": 0, "gpu_count": 0, "models_loaded": 0, "total_qps": rate}
        view.add_frame(told(cluster=sums, queues=None if messages is None else [queue("l4", messages)]), 100.0)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(picture(view, width, 24, 100.0))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= width for line in lines)
    return next((line.rstrip() for line in lines if line.startswith("req/s")), "")


def test_a_trend_goes_from_nothing_to_the_largest() -> None:
    rates = [0.0, 0.1, 5.0, 10.0]
    assert (
        trend_line(80, list(zip(rates, [3, 0, 0, 300_000], strict=True)))
        == "req/s ▁▂▅█ max 10.0  queued ▂▁▁█ max 300,000"
    )
    assert trend_line(80, [(0.0, 0), (0.0, 0)]) == "req/s ▁▁ max 0.0  queued ▁▁ max 0"


def test_latency_and_errors_of_the_last_hour_are_shown() -> None:
    stages = ["queue_time", "total_time"]
    steps = [
        TrendStep(1_790_000_040, 3, {"QUEUE_FULL": 2}, [1.0, 20.0], [2.0, 4000.0]),
        TrendStep(1_790_000_160, 9, {"QUEUE_FULL": 1, "INFERENCE_ERROR\x1b": 1}, [1.0, 5.25], [2.0, 38.0]),
    ]
    text = "\n".join(drawn(120, 40, frame(), past=HistoryTrend(1_790_000_170.0, 60, stages, steps)))
    assert "latency p50 5.2 ms  p99 38 ms  4 errors in an hour: QUEUE_FULL 3, INFERENCE_ERROR? 1" in text
    assert "p99 █ ▂ max 4.0 s" in text
    assert "latency" not in "\n".join(drawn(120, 40, frame()))
    refused = HistoryTrend(1_790_000_050.0, 60, stages, [TrendStep(1_790_000_040, 2, {"QUEUE_FULL": 2})])
    text = "\n".join(drawn(120, 40, frame(), past=refused))
    assert "2 errors in an hour: QUEUE_FULL 2" in text
    assert "latency" not in text
    partial = HistoryTrend(1_790_000_050.0, 60, stages, [TrendStep(1_790_000_040, 2, p99_ms=[1.0, 2.0])])
    assert [line.plain for line in of_past(partial, 80)] == ["0 errors in an hour"]
    for idle in (HistoryTrend(1_790_000_050.0, 60, stages, []), HistoryTrend(1_790_000_050.0, 60, [], steps)):
        assert [line.plain for line in of_past(idle, 80)] == [""]
    for width in (20, 40, 70):
        assert all(
            len(line) <= width
            for line in drawn(width, 40, frame(), past=HistoryTrend(1_790_003_600.0, 60, stages, steps))
        )


def test_a_trend_is_of_the_last_frames_and_as_long_as_the_width_allows() -> None:
    figures: list[tuple[float, int | None]] = [(1000.0, 9), *((number / 10, number) for number in range(TREND))]
    wide = trend_line(200, figures)
    assert len(re.findall("[▁-█]", wide)) == 2 * TREND
    assert "█ max 5.9  queued ▁▂" in wide, "what came before 60 frames is gone"
    narrow = trend_line(60, figures)
    assert narrow.startswith("req/s ▇▇"), "the newest are shown"
    assert narrow.endswith("█ max 59")
    assert trend_line(40, figures) == "", "no room"


def test_a_trend_leaves_blank_what_was_not_known() -> None:
    assert trend_line(80, [(1.0, None), (1.0, 4), (1.0, 8)]) == "req/s ███ max 1.0  queued  ▅█ max 8"
    assert trend_line(80, [(1.0, None), (1.0, None)]) == "req/s ██ max 1.0", "nothing is known of the queue"
    assert trend_line(80, [(1.0, 4)]) == "", "one frame has no trend"


# ---- with a gateway, of which only its websocket is there


@contextlib.contextmanager
def gateway(port: int, cluster_frame: dict[str, Any]) -> Iterator[Server]:
    """Run a websocket that sends a frame at once and then ten each second, until it is shut down."""
    over = threading.Event()

    def show(connection: ServerConnection) -> None:
        with contextlib.suppress(Exception):  # the client disconnected
            while True:
                connection.send(json.dumps(cluster_frame))
                if over.wait(0.1):
                    return

    with serve(show, "127.0.0.1", port) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            over.set()
            server.shutdown()
            serving.join(30)


class Terminal:
    """`sie top` in a pseudo terminal of 24 lines of 80 columns."""

    def __init__(self, *args: str, is_job: bool = False, has_keyboard: bool = True) -> None:
        """Start the command. With `is_job` it is a job of a shell, which Ctrl-Z stops; else it leads its session."""
        self.parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.parent)
        # readline, which a module of the tests may have imported, sets them: they would outweigh the terminal's size
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [SIE, "top", *args],
            stdin=child if has_keyboard else subprocess.DEVNULL,
            stdout=child,
            stderr=child,
            env={**environ, "TERM": "xterm-256color"},
            process_group=0 if is_job else None,
            start_new_session=not is_job,
            preexec_fn=None if is_job else lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        os.close(child)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the other side has ended
            while data := os.read(self.parent, 65536):
                self.said += data.decode(errors="replace")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        """Lines of the last whole picture, without colours."""
        text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.said.split(HOME)[-2])
        return [line.rstrip() for line in text.splitlines()]

    def type(self, keys: bytes) -> None:
        os.write(self.parent, keys)

    @property
    def reads_single_keys(self) -> bool:
        return not termios.tcgetattr(self.parent)[3] & (termios.ICANON | termios.ECHO)

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.parent) == self.before

    def end(self, number: signal.Signals | None = None) -> int:
        """Send signal `number` if there is one, and wait for the end of the command. Return its exit status."""
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join(30)
            self.was_left_as_before = self.is_as_before
            os.close(self.parent)


def test_a_terminal_shows_it_in_place_through_a_restart_and_is_left_clean() -> None:
    port = free_port()
    with gateway(port, frame()):
        terminal = Terminal("--url", f"http://127.0.0.1:{port}")
        try:
            until(lambda: "live" in terminal.said and "worker-1" in terminal.said, 30, "a picture")
        except AssertionError:
            terminal.end(signal.SIGKILL)
            raise
    try:
        until(lambda: "trying again" in terminal.said, 30, "it says that the gateway is away")
        with gateway(port, frame(models=9)):
            until(lambda: "4 of 9 models" in terminal.said, 30, "the gateway's next picture")
            assert max(map(len, terminal.lines)) > 50
            terminal.resize(50)
            until(lambda: 0 < max(map(len, terminal.lines)) <= 50, 30, "a picture of the new width")
            assert any("models" in line for line in terminal.lines)
    finally:
        status = terminal.end(signal.SIGINT)
    assert status == 0
    assert terminal.said.startswith(SHOWN) or SHOWN in terminal.said
    after = terminal.said[terminal.said.rindex(LEFT) :]
    assert HIDDEN in terminal.said
    assert "\x1b[?25h" in terminal.said[terminal.said.rindex(HIDDEN) :], "the cursor is shown again"
    assert "worker-" not in after
    assert "Traceback" not in terminal.said
    assert "next attempt" not in terminal.said, "nothing else writes into the picture"


@contextlib.contextmanager
def live(**how: bool) -> Iterator[Terminal]:
    """Yield a terminal with a picture in it. Kill the command at an error."""
    port = free_port()
    with gateway(port, frame()):
        terminal = Terminal("--url", f"http://127.0.0.1:{port}", **how)
        try:
            until(lambda: "worker-1" in terminal.said, 30, "a picture", lambda: terminal.said)
            yield terminal
        except BaseException:
            terminal.end(signal.SIGKILL)
            raise


@pytest.mark.parametrize("way", ["q", "Q", "xyzq", "\x03", signal.SIGINT, signal.SIGTERM])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(way: str | signal.Signals) -> None:
    """Ctrl-C, as a key of a terminal that controls the command, and signals do so, too."""
    with live() as terminal:
        until(lambda: terminal.reads_single_keys, 30, "it reads single keys")
        assert "q ends it" in terminal.said
        if isinstance(way, str):
            terminal.type(way.encode())
        status = terminal.end(None if isinstance(way, str) else way)
    assert status == 0
    assert terminal.was_left_as_before
    assert LEFT in terminal.said
    assert "Traceback" not in terminal.said


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    terminal = Terminal("--url", f"http://127.0.0.1:{free_port()}")
    assert terminal.end() == 2
    assert terminal.was_left_as_before
    assert "no gateway answers" in terminal.said[terminal.said.rindex(LEFT) :]


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on() -> None:
    with live(is_job=True) as terminal:
        until(lambda: terminal.reads_single_keys, 30, "it reads single keys")
        process = psutil.Process(terminal.process.pid)
        for round in (1, 2):
            terminal.process.send_signal(signal.SIGTSTP)
            until(lambda: process.status() == psutil.STATUS_STOPPED, 30, "it is stopped")
            assert terminal.is_as_before
            until(lambda round=round: terminal.said.count(LEFT) == round, 30, "its picture is gone")
            terminal.process.send_signal(signal.SIGCONT)
            until(lambda: terminal.reads_single_keys, 30, "it reads single keys again")
            shown = terminal.said.rindex(LEFT)
            until(lambda shown=shown: "worker-1" in terminal.said[shown:], 30, "a picture again")
        terminal.type(b"q")
        assert terminal.end() == 0
    assert terminal.was_left_as_before


def test_without_a_keyboard_no_key_is_read() -> None:
    with live(has_keyboard=False) as terminal:
        assert "q ends it" not in terminal.said
        assert terminal.is_as_before
        assert terminal.end(signal.SIGINT) == 0


def test_the_terminal_of_a_pipe_is_left_to_its_reader() -> None:
    """The reader is as in `sie top | less`, which reads the keys."""
    port = free_port()
    parent, child = pty.openpty()
    try:
        before = termios.tcgetattr(parent)
        with gateway(port, frame()):
            process = subprocess.Popen(
                [SIE, "top", "--url", f"http://127.0.0.1:{port}"], stdin=child, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            with process.stdout:
                os.write(parent, b"q\n")
                heads = 0
                while heads < 3:
                    line = process.stdout.readline()
                    assert line, "the key is not for it"
                    heads += line.startswith(b"sie top")
                assert termios.tcgetattr(parent) == before
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
    finally:
        os.close(parent)
        os.close(child)


def test_a_pipe_gets_one_picture_after_the_other_and_may_close() -> None:
    port = free_port()
    with gateway(port, frame()):
        process = subprocess.Popen(
            [SIE, "top", "--url", f"http://127.0.0.1:{port}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            heads = 0
            while heads < 2:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                heads += line.startswith(b"sie top")
                assert b"\x1b" not in line
            process.stdout.close()
            assert process.wait(60) == 0
            assert process.stderr.read() == b""


def test_once_is_one_picture() -> None:
    port = free_port()
    with gateway(port, frame()):
        level = logging.getLogger("sie_client").level
        invocation = CliRunner().invoke(main, ["top", "--once", "--url", f"http://127.0.0.1:{port}"])
        assert logging.getLogger("sie_client").level == level, "who calls it goes on to log"
    assert invocation.exit_code == 0, invocation.output
    assert invocation.stdout.count("sie top") == 1
    assert "\x1b" not in invocation.stdout


def test_no_gateway_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_cli.cluster.FIRST_S", 0.2)
    port = free_port()
    invocation = CliRunner().invoke(main, ["top", "--once", "--url", f"http://127.0.0.1:{port}"])
    assert invocation.exit_code == 2
    assert invocation.stderr.startswith(f"error: no gateway answers at http://127.0.0.1:{port}: ")
    assert invocation.stderr.count("\n") == 1, "attempts are not told of one by one"


def test_a_refusal_says_what_to_set() -> None:
    def refuse(connection: ServerConnection, _request: Request) -> Response:
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "")

    with serve(lambda _: None, "127.0.0.1", 0, process_request=refuse) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            port = server.socket.getsockname()[1]
            invocation = CliRunner().invoke(main, ["top", "--once", "--url", f"http://127.0.0.1:{port}"])
        finally:
            server.shutdown()
            serving.join(30)
    assert invocation.exit_code == 2
    assert invocation.stderr.endswith(": set SIE_API_KEY to a token with the scope read\n")
