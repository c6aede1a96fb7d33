"""Processes that parse documents: a file that breaks its process fails alone, and no process outlives its pool."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sie_contracts.errors import InternalFailure, InvalidInput, ResourceExhausted, SIEError
from sie_contracts.media.documents import DocumentFile
from sie_contracts.wire.child_frames import Unusable
from sie_models_readers.documents import parser_frames
from sie_models_readers.documents.parser_frames import Parsed, ParseJob
from sie_models_readers.documents.parsers import ParserNotStarted, Parsers, _ParserProcess

DEADLINE_S = 60.0
MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def parsers() -> Iterator[Parsers]:
    pool = Parsers(2, deadline_s=DEADLINE_S, memory_bytes=MEMORY_BYTES, module="fake_parser")
    yield pool
    pool.close()
    assert pool.pids == ()


def parsed(parsers: Parsers, *texts: str) -> list[Parsed | SIEError]:
    return parsers.parse([ParseJob(0, DocumentFile(text.encode())) for text in texts])


def told(parsers: Parsers, text: str) -> str:
    (document,) = parsed(parsers, text)
    assert isinstance(document, Parsed)
    return document.text


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        (f"signal {signal.SIGSEGV:d}", InvalidInput, "undecodable: the parser of the document crashed"),
        ("exit", InvalidInput, "undecodable: the parser of the document crashed"),
        ("answer 99", InvalidInput, "undecodable: the parser of the document crashed"),
        (f"signal {signal.SIGKILL:d}", ResourceExhausted, "for lack of memory"),
        ("refuse", InvalidInput, "undecodable: the document is damaged"),
        (f"allocate {2 * MEMORY_BYTES}", InvalidInput, "too_large: it takes more memory"),
    ],
)
def test_a_document_that_breaks_its_process_fails_alone(
    parsers: Parsers, command: str, error: type[SIEError], says: str
) -> None:
    before, bad, after = parsed(parsers, "first", command, "last")
    assert [document.text for document in (before, after) if isinstance(document, Parsed)] == ["first", "last"]
    assert isinstance(bad, error)
    assert says in bad.message
    assert "library" not in bad.message
    assert told(parsers, "next") == "next"
    assert len(parsers.pids) <= 2


def test_a_document_that_takes_too_long_costs_its_process() -> None:
    own = Parsers(1, deadline_s=0.2, memory_bytes=MEMORY_BYTES, module="fake_parser")
    before = own.pids
    (error,) = parsed(own, "sleep 60")
    assert isinstance(error, InvalidInput)
    assert error.message == "timeout: parsing the document took longer than 0.2 s"
    assert own.pids == ()
    assert not Path(f"/proc/{before[0]}").exists()
    own.close()


def test_who_leaves_ends_what_is_parsed_for_him_and_for_nobody_else(parsers: Parsers, tmp_path: Path) -> None:
    """Each of two calls has one of the two processes. Only the process of the call whose client leaves is killed."""
    with ThreadPoolExecutor() as callers:
        stays = callers.submit(parsed, parsers, f"meet {tmp_path}")
        leaves = callers.submit(
            parsers.parse, [ParseJob(0, DocumentFile(text)) for text in (b"sleep 60", b"later")], stays.running
        )
        with pytest.raises(InternalFailure) as raised:
            leaves.result(DEADLINE_S / 2)
        assert raised.value.reason == "cancelled"
        (tmp_path / "the other one").touch()
        (document,) = stays.result(DEADLINE_S / 2)
    assert isinstance(document, Parsed)
    assert told(parsers, "next") == "next"


def test_documents_are_parsed_side_by_side_and_answered_in_their_order(parsers: Parsers, tmp_path: Path) -> None:
    documents = parsed(parsers, f"meet {tmp_path}", f"meet {tmp_path}")  # the two documents wait for each other
    assert [document.text for document in documents if isinstance(document, Parsed)] == [f"meet {tmp_path}"] * 2
    texts = [f"text {number}" for number in range(20)]
    assert [document.text for document in parsed(parsers, *texts) if isinstance(document, Parsed)] == texts


def test_an_answer_beyond_the_limit_is_refused_and_the_process_stays(parsers: Parsers) -> None:
    (error,) = parsed(parsers, f"long {parser_frames.MAX_ANSWER_BYTES // 2}")
    assert isinstance(error, InvalidInput)
    assert error.message.startswith("too_large: the content of the file takes")


def test_a_process_has_no_secrets_of_its_adapter(parsers: Parsers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIE_SECRET_OF_A_TEST", "hidden")
    parsed(parsers, "exit", "exit")  # The next processes start with the new environment.
    _, environment = json.loads(told(parsers, "environment"))
    assert "SIE_SECRET_OF_A_TEST" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_process_that_ended_while_it_had_nothing_to_do_is_replaced(parsers: Parsers) -> None:
    pid, _ = json.loads(told(parsers, "environment"))
    os.kill(pid, signal.SIGKILL)
    while pid in parsers.pids:  # until the pool sees the end
        time.sleep(0.001)
    assert [document.text for document in parsed(parsers, "a", "b") if isinstance(document, Parsed)] == ["a", "b"]


def test_a_process_that_keeps_the_memory_of_a_document_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sie_models_readers.documents.parsers.KEPT_BYTES", 300 << 20)
    pool = Parsers(1, memory_bytes=MEMORY_BYTES, module="fake_parser")
    first = pool.pids
    assert told(pool, "small") == "small"
    assert pool.pids == first
    assert told(pool, f"keep {400 << 20}") == f"keep {400 << 20}"
    assert told(pool, "next") == "next"
    assert len(pool.pids) == 1
    assert pool.pids != first
    pool.close()


def test_processes_end_with_their_pool() -> None:
    own = Parsers(1, deadline_s=60, memory_bytes=MEMORY_BYTES, module="fake_parser")
    (pid,) = own.pids
    own.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_parser_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_parser.py").write_text("import a_package_that_nobody_has\n")
    with pytest.raises(ParserNotStarted, match="ended with status 1"):
        Parsers(1, module="broken_parser")


def test_a_process_that_is_killed_after_its_answer_gets_no_other_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while the answer is on its way; the document of another client is next."""
    own = Parsers(1, deadline_s=DEADLINE_S, memory_bytes=MEMORY_BYTES, module="fake_parser")
    answered, left = threading.Event(), threading.Event()
    run = _ParserProcess.run

    def late(process: _ParserProcess, job: ParseJob, deadline_s: float) -> Parsed | Unusable:
        answer = run(process, job, deadline_s)
        if job.document.data == b"first":
            answered.set()
            left.wait(DEADLINE_S)
        return answer

    monkeypatch.setattr(_ParserProcess, "run", late)
    monkeypatch.setattr(_ParserProcess, "runs", True)  # as before the kernel has ended the process
    with ThreadPoolExecutor() as callers:
        leaves = callers.submit(own.parse, [ParseJob(0, DocumentFile(b"first"))], answered.is_set)
        answered.wait(DEADLINE_S)
        stays = callers.submit(parsed, own, "second")
        with pytest.raises(InternalFailure):
            leaves.result(DEADLINE_S)
        left.set()
        (document,) = stays.result(DEADLINE_S)
    assert isinstance(document, Parsed)
    own.close()
