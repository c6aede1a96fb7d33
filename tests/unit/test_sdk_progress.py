"""Progress of a call that a user sees: log, bar, callback."""

from __future__ import annotations

import io
import logging

import pytest

from sie_client import Progress
from sie_client.core import HttpAnswer, Pause, Session
from sie_client.progress import Meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_wait_and_one_each_minute_are_logged_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    meter = Meter(Session(), clock=clock)
    for second in range(0, 130, 5):
        clock.now_s = second
        meter.update(Pause(5.0, "MODEL_LOADING", 900.0 - second))
    meter.update(Pause(60.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for MODEL_LOADING: next attempt in 5.0 s, the call waits at most {left} s more"
        for left in (900, 840, 780)
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_callback_is_told_of_each_part_and_each_wait() -> None:
    reports: list[Progress] = []
    meter = Meter(Session(on_progress=reports.append), 10)
    for step in (HttpAnswer(4), Pause(1.0, "connection", 118.0), HttpAnswer(6)):
        meter.update(step)
    assert reports == [Progress(4, 10), Progress(4, 10, "connection", 118.0), Progress(10, 10)]


def bar(stream: io.StringIO, session: Session, last_s: float = 3.0) -> str:
    clock = Clock()
    with Meter(session, 1000, stream=stream, clock=clock) as meter:
        for done, now_s in ((200, 0.5), (300, 2.0), (1, 2.01), (499, last_s)):
            clock.now_s = now_s
            meter.update(HttpAnswer(done))
    return stream.getvalue()


def test_a_terminal_gets_a_bar_once_a_call_takes_long() -> None:
    written = bar(Terminal(), Session())
    lines = written.split("\r")
    assert lines[0] == ""
    assert [line.split(" ")[0] for line in lines[1:]] == ["500/1,000", "1,000/1,000", "1,000/1,000"], (
        "after a second, and not too often"
    )
    assert "250/s, 2 s left" in lines[1]
    assert lines[1].count("#") == lines[1].count(".")
    assert "." not in lines[-1]
    assert written.endswith("\n")


def test_no_bar_in_a_pipe_nor_without_a_stream_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar(io.StringIO(), Session()) == ""
    assert bar(Terminal(), Session(progress=False)) == ""
    assert "1,000/1,000" in bar(io.StringIO(), Session(progress=True))
    closed = Terminal()
    closed.close()
    Meter(Session(), 5, stream=closed).update(HttpAnswer(5))
    monkeypatch.setattr("sys.stderr", None)
    Meter(Session(), 5).update(HttpAnswer(5))


def test_a_terminal_that_goes_away_does_not_end_the_call() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError("gone")

    bar(Gone(), Session())
