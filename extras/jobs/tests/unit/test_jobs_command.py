"""`sie jobs`: the requests, output and exit status of each command, against a server of jobs in this process."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from job_server import FILE, HANGING, JOB, JobServer

from sie_bulk_jobs.command.job import progress_lines
from sie_cli.main import main
from sie_client import jobs
from sie_client.jobs import JobInfo
from sie_contracts.api.jobs import JobChunkRule, JobInput, JobOutput, JobRequest

SIE = str(Path(sys.executable).with_name("sie"))
COUNTS = {"rows": 1_000_000, "done": 120_000, "failed": 3, "reused": 40}
FORECAST = {"done_at": 1790014400.0, "plus_minus_s": 1200.0, "rows_per_s": 1234.5, "workers": 2, "workers_needed": 4}
RUNNING = {"state": "running", "counts": COUNTS, "forecast": FORECAST, "errors": {"INVALID_INPUT": 2, "OTHER": 1}}
COMPLETED = {"state": "completed", "counts": {"rows": 3, "done": 3}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[JobServer]:
    monkeypatch.setattr(jobs, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("sie_cli.cluster.default_data_dir", lambda: tmp_path / "none")
    running = JobServer()
    yield running
    running.close()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"id": "a", "title": "one", "body": "two", "year": 1, "lang": "en"}\n')
    return path


def sie(server: JobServer, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["jobs", *map(str, arguments), "--url", server.url])


def info(**fields: Any) -> JobInfo:
    base = {
        "id": f"{JOB}0",
        "state": "queued",
        "created_at": 1.0,
        "updated_at": 1.0,
        "model": "m",
        "operation": "encode",
    }
    return msgspec.convert({**base, "counts": {}, "request": {}, **fields}, JobInfo)


# ---- submit


def test_a_file_goes_up_and_the_id_alone_is_printed(server: JobServer, docs: Path) -> None:
    result = sie(
        server,
        "submit",
        "org/m",
        docs,
        "--text",
        r"{title}\n{body}",
        "--id",
        "id",
        "--keep",
        "title, year",
        "--keep",
        "lang",
        "--format",
        "npy",
        "--param",
        "dimensions=128",
        "--param",
        "output_dtype=int8",
        "--param",
        'labels=["a","b"]',
        "--window",
        "22:00-06:00",
        "--tokens-per-s",
        5000,
        "--name",
        "docs",
        "--cache",
        "--deadline",
        "2100-01-31T06:00+01:00",
        "--metadata",
        "team=search",
        "--sink",
        "main",
        "--collection",
        "docs",
    )
    assert (result.exit_code, result.stdout) == (0, f"{JOB}0\n"), result.output
    assert server.files[f"{FILE}0"].filename == "docs.jsonl"
    assert server.bodies[f"{JOB}0"] == JobRequest(
        model="org/m",
        input=JobInput(file=f"{FILE}0", text="{title}\n{body}", id="id", keep=("title", "year", "lang")),
        output=JobOutput(format="npy", sink="main", collection="docs"),
        params={"dimensions": 128, "output_dtype": "int8", "labels": ["a", "b"]},
        name="docs",
        metadata={"team": "search"},
        windows=("22:00-06:00",),
        tokens_per_s=5000.0,
        deadline=4105054800.0,
        cache=True,
    )


@pytest.mark.parametrize(
    ("arguments", "chunks", "context"),
    [
        (["--chunks", "max_tokens=40,boundary=paragraph"], JobChunkRule(40, boundary="paragraph"), True),
        (["--chunks", "spans", "--no-context"], "spans", False),
    ],
)
def test_chunks_are_a_rule_or_a_column(
    server: JobServer, arguments: list[str], chunks: JobChunkRule | str, context: bool
) -> None:
    outcome = sie(server, "submit", "org/m", "s3://b/in/", "--text", "{t}", *arguments)
    assert outcome.exit_code == 0, outcome.output
    assert server.bodies[f"{JOB}0"].input == JobInput(url="s3://b/in/", text="{t}", chunks=chunks, context=context)


def test_submit_names_the_column_of_documents_and_their_parser(server: JobServer) -> None:
    arguments = ["--documents", "pdf", "--parser", "org/parser", "--chunks", "max_tokens=40"]
    assert sie(server, "submit", "org/m", "s3://b/in/", *arguments).exit_code == 0
    rule = JobChunkRule(40)
    assert server.bodies[f"{JOB}0"].input == JobInput(
        url="s3://b/in/", documents="pdf", parser="org/parser", chunks=rule
    )


def test_templates_of_a_query_make_it_a_score_between_addresses(server: JobServer) -> None:
    result = sie(
        server, "submit", "org/m", "s3://b/in/", "--query", "{q}", "--document", "{d}", "-o", "s3://b/out/", "--json"
    )
    assert json.loads(result.stdout)["state"] == "queued"
    job_request = server.bodies[f"{JOB}0"]
    assert (job_request.operation, job_request.input.url, job_request.output) == (
        "score",
        "s3://b/in/",
        JobOutput(url="s3://b/out/"),
    )
    assert len(server.asked("GET")) == 0


def test_an_output_that_is_a_folder_is_filled_at_the_end(server: JobServer, docs: Path, tmp_path: Path) -> None:
    server.script = [{"state": "planning"}, RUNNING, COMPLETED]
    server.parts = {"part-00000.parquet": b"x" * 2048}
    result = sie(server, "submit", "org/m", docs, "--text", "{title}", "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (0, f"{JOB}0\n"), result.output
    assert (tmp_path / "out" / "part-00000.parquet").read_bytes() == b"x" * 2048
    assert "planning" in result.stderr
    assert f"1 file, 2.0 KiB, in {tmp_path / 'out'}" in result.stderr
    again = sie(server, "submit", "org/m", docs, "-o", tmp_path / "out")
    assert (again.exit_code, "has the files of another job" in again.output) == (1, True)
    assert len(server.files) == 1, "nothing was sent for it"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.csv"], "none.csv: No such file or directory"),
        (["s3://b/", "--param", "dimensions"], "expected KEY=VALUE, such as dimensions=256"),
        (["s3://b/", "--deadline", "2001-01-01"], "is in the past"),
        (["s3://b/", "--metadata", "=a"], "expected KEY=TEXT"),
        (["s3://b/", "--window", "from 22 to 6 o'clock"], "windows"),
    ],
)
def test_what_cannot_be_submitted_is_refused(server: JobServer, arguments: list[str], why: str) -> None:
    result = sie(server, "submit", "org/m", *arguments)
    assert (result.exit_code in (1, 2), why in result.output, server.jobs) == (True, True, {}), result.output


def test_a_job_that_is_refused_or_fails_leaves_no_folder_and_takes_none(
    server: JobServer, docs: Path, tmp_path: Path
) -> None:
    server.refuses["POST /v1/jobs"] = 400, "INVALID_INPUT", "no column titel"
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        assert sie(server, "submit", "org/m", docs, "--text", "{title}", "-o", tmp_path / name).exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["there"]
    del server.refuses["POST /v1/jobs"]
    why = {"code": "INVALID_INPUT", "message": "input.text: no column titel", "param": "input.text"}
    server.script = [{"state": "failed", "error": why}]
    result = sie(server, "submit", "org/m", docs, "--text", "{title}", "-o", tmp_path / "new")
    assert (result.exit_code, result.output.count("input.text")) == (1, 1), result.output
    assert not (tmp_path / "new").exists()


def test_the_words_of_the_server_are_shown_and_obeyed_by_no_terminal(server: JobServer, docs: Path) -> None:
    server.refuses["POST /v1/jobs"] = 400, "INVALID_INPUT", "no column titel\x1b[2J; did you mean title?"
    result = sie(server, "submit", "org/m", docs, "--text", "{title}")
    assert result.exit_code == 1
    assert "no column titel?[2J; did you mean title?" in result.output
    server.refuses["POST /v1/jobs"] = 404, "MODEL_NOT_FOUND", "no model org/m"
    assert "`sie models list` shows all" in sie(server, "submit", "org/m", docs).output
    server.refuses["POST /v1/jobs"] = 401, "UNAUTHENTICATED", "no token"
    result = sie(server, "submit", "org/m", docs)
    assert (result.exit_code, "SIE_API_KEY to a token with the scope infer" in result.output) == (2, True)


# ---- list, show, watch


def test_jobs_are_listed(server: JobServer) -> None:
    assert sie(server, "list").output == "no jobs\n"
    server.add(**RUNNING, name="night\x1b")
    server.add(**COMPLETED)
    lines = sie(server, "list").output.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", f"{JOB}1", f"{JOB}0"]
    assert lines[2].split()[3:] == ["running", "1,000,000", "12", "%", "3", "org/m", "night?"]
    listing = json.loads(sie(server, "list", "--json", "--state", "running", "--limit", 1).output)
    assert [job["id"] for job in listing] == [f"{JOB}0"]
    assert sie(server, "list", "--limit", 1).output.splitlines()[-1] == "these are the newest 1; --limit shows more"
    assert sie(server, "list", "--state", "paused").output == "no jobs are paused\n"


def test_all_that_is_known_is_shown(server: JobServer) -> None:
    request = {"model": "org/m", "input": {"file": f"{FILE}0", "text": "{a}\n{b}"}, "deadline": 1790000000.0}
    server.add(**RUNNING, request=request, trouble={"code": "PROVISIONING", "message": "no worker"}, broken=["a.csv"])
    output = sie(server, "show", f"{JOB}0", "--failed").output
    for line in (
        r"rows: +120,000 of 1,000,000 rows, 3 with an error, 40 reused",
        r"errors: +INVALID_INPUT 2, OTHER 1",
        r"waits: +PROVISIONING: no worker",
        r"input\.text: +\{a\}\\n\{b\}",
        r"deadline: +2026-09-21 14:13 UTC",
        r"broken 1: +a\.csv",
        r"ROW  ERROR",
        r"7    INVALID_INPUT: empty",
    ):
        assert re.search(f"^{line}$", output, re.MULTILINE), (line, output)
    assert set(json.loads(sie(server, "show", f"{JOB}0", "--failed", "--json").output)) == {"job", "failed"}
    result = sie(server, "show", f"{JOB}9")
    assert (result.exit_code, "NOT_FOUND" in result.output) == (1, True)


def test_a_deadline_without_a_date_is_shown_in_words(server: JobServer) -> None:
    """The deadline is in milliseconds instead of seconds."""
    job = server.add(**RUNNING, request={"model": "org/m", "input": {"file": f"{FILE}0"}, "deadline": 1790000000000.0})
    shown = sie(server, "show", f"{JOB}0")
    assert shown.exit_code == 0
    assert re.search("^deadline: +after the year 9999 UTC$", shown.output, re.MULTILINE)
    line = progress_lines(msgspec.convert(job, JobInfo), FORECAST["done_at"])[1]
    assert line.endswith("before its deadline after the year 9999")


def test_a_parameter_that_is_not_utf_8_is_refused(server: JobServer, docs: Path) -> None:
    result = sie(server, "submit", "org/m", docs, "--param", "instruction=caf\udce9")
    assert result.exit_code == 2
    assert "instruction: expected a value in UTF-8" in result.output
    assert server.seen == []


def test_a_forecast_is_told_with_its_spread_and_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        now_s = FORECAST["done_at"] - 3600
        job_info = info(**RUNNING)
        assert progress_lines(job_info, now_s)[1] == "1,234 rows/s by 2 workers, done at 18:13 ± 20 min"
        assert "done at 2026-09-21 18:13 ± 20 min" in progress_lines(job_info, now_s - 86400)[1]
        late = info(**RUNNING, request={"deadline": FORECAST["done_at"] + 60})
        assert progress_lines(late, now_s)[1].endswith("perhaps after its deadline 18:14: 4 workers would meet it")
        early = info(**RUNNING, request={"deadline": FORECAST["done_at"] + 1201})
        assert progress_lines(early, now_s)[1].endswith("before its deadline 18:33")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("told_of_it", "status"),
    [
        (COMPLETED, 0),
        ({"state": "completed", "counts": {"rows": 3, "done": 3, "failed": 1}}, 3),
        ({**COMPLETED, "broken": ["a.csv"]}, 3),
        ({"state": "failed", "error": {"code": "MODEL_LOAD_FAILED", "message": "no weights"}}, 1),
        ({"state": "expired"}, 1),
        ({"state": "cancelled"}, 1),
    ],
)
def test_the_status_of_watch_is_the_outcome(server: JobServer, told_of_it: dict[str, Any], status: int) -> None:
    server.add()
    server.script = [told_of_it]
    result = sie(server, "watch", f"{JOB}0")
    assert result.exit_code == status, result.output
    assert str(told_of_it["state"]) in result.output
    assert ("--failed` says why" in result.output) is (status == 3 and "broken" not in told_of_it)
    if "error" in told_of_it:
        assert "MODEL_LOAD_FAILED: no weights" in result.output


def test_watching_ends_at_a_pause_that_only_people_can_end(server: JobServer) -> None:
    """Watching goes on during a pause without an error. A pause with an error could keep a script waiting for ever."""
    job = server.add()
    refused = {"state": "paused", "error": {"code": "SINK_REFUSED", "message": "the collection is 768 wide"}}
    server.script = [RUNNING, {"state": "paused"}, RUNNING, refused]
    result = sie(server, "watch", job["id"])
    assert (result.exit_code, "SINK_REFUSED: the collection is 768 wide" in result.output) == (1, True), result.output
    assert len(server.asked("GET", f"/v1/jobs/{job['id']}")) == 4


def test_a_pipe_gets_a_line_for_each_change(server: JobServer) -> None:
    server.add()
    waits = {**RUNNING, "trouble": {"code": "PROVISIONING", "message": "no worker"}}
    more = {**RUNNING, "trouble": None, "counts": {**COUNTS, "done": 120_001}}
    server.script = [{"state": "planning"}, {}, RUNNING, waits, waits, more, more, COMPLETED]
    lines = sie(server, "watch", f"{JOB}0").output.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"{JOB}0 {state}" for state in ("planning", *["running"] * 3)] + [
        f"{JOB}0 completed"
    ]
    assert "waits: PROVISIONING: no worker" in lines[2]
    server.script = [RUNNING, COMPLETED]
    changes = [json.loads(line) for line in sie(server, "watch", f"{JOB}0", "--json").output.splitlines()]
    assert [change["state"] for change in changes] == ["completed"]


def test_a_terminal_gets_a_bar_in_place_and_ctrl_c_leaves_the_job_running(server: JobServer) -> None:
    """Ctrl-C ends the command with status 130 and a hint. The command sends nothing that changes the job."""
    server.add()
    server.script = [RUNNING]
    leader, follower = pty.openpty()
    watching = subprocess.Popen(
        [SIE, "jobs", "watch", f"{JOB}0", "--url", server.url],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    shown, bar_event = bytearray(), threading.Event()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(leader, 4096))
            except OSError:  # every process has closed the terminal
                return
            if "━".encode() in shown and b"done at" in shown:
                bar_event.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert bar_event.wait(3 * HANGING), shown
        watching.send_signal(signal.SIGINT)
        assert watching.wait(HANGING) == 130
    finally:
        watching.kill()
        watching.wait()
        reader.join()
        os.close(leader)
    text = shown.decode()
    assert "errors: INVALID_INPUT 2, OTHER 1" in text
    assert f"{JOB}0 goes on: `sie jobs watch {JOB}0` shows it again" in text
    assert server.asked("POST") == []


# ---- control, fetch


def test_a_job_is_steered_by_commands(server: JobServer) -> None:
    server.add(state="running")
    for command, output in (
        ("pause", f"{JOB}0 is paused"),
        ("resume", f"{JOB}0 is running"),
        ("cancel", f"{JOB}0 is cancelled"),
        ("retry", f"{JOB}1"),
    ):
        assert sie(server, command, f"{JOB}0").output == f"{output}\n"
    job, server.is_late = server.add(state="running")["id"], True
    later = "and will be cancelled when the parts under way have stopped"
    assert sie(server, "cancel", job).output == f"{job} is running, {later}\n"
    del server.jobs[job]
    result = sie(server, "delete", f"{JOB}1", "--yes")
    assert (result.exit_code, "has not ended" in result.output) == (1, True)
    assert (sie(server, "delete", f"{JOB}0").exit_code, len(server.jobs)) == (1, 2), "nobody said yes"
    assert sie(server, "delete", f"{JOB}0", "--yes").output == f"{JOB}0 is deleted\n"
    assert list(server.jobs) == [f"{JOB}1"]


def test_the_result_is_fetched_once(server: JobServer, tmp_path: Path) -> None:
    server.add(**COMPLETED)
    server.parts = {f"part-0000{number}.parquet": b"x" * 100 for number in range(3)}
    for fetched in (3, 3):
        result = sie(server, "result", f"{JOB}0", tmp_path / "out")
        assert (result.exit_code, "3 files, 300 B, in" in result.stderr) == (0, True), result.output
        assert len(server.asked("GET", f"/v1/jobs/{JOB}0/part")) == fetched
    server.add(state="running")
    result = sie(server, "result", f"{JOB}1", tmp_path / "other")
    assert (result.exit_code, "is running: these are its files so far" in result.stderr) == (1, True)
    result = sie(server, "result", f"{JOB}1", tmp_path / "out")
    assert (result.exit_code, "has the files of" in result.output) == (1, True)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_column_that_a_file_of_this_machine_lacks_is_named_before_the_file_is_sent(
    server: JobServer, tmp_path: Path, suffix: str
) -> None:
    table = pyarrow.table({"id": ["1", "2"], "title": ["a", "b"], "price": ["3", "4"]})
    file = tmp_path / f"docs.{suffix}"
    if suffix == "csv":
        file.write_bytes(b"\xef\xbb\xbf" + b'id,"title",price\r\n1,"a\nb",3\r\n')
    elif suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    for options, param in ((["--text", "{titel}"], "text"), (["--text", "{title}", "--id", "titel"], "id")):
        result = sie(server, "submit", "org/m", file, *options)
        message = f"Error: input.{param}: docs.{suffix} has no column 'titel'; it has id, title, price"
        assert (result.exit_code, result.output.strip()) == (1, message)
    assert server.seen == [], "nothing was sent"
    (cut := tmp_path / "cut.parquet").write_bytes(b"PAR1 is no footer PAR1")
    assert sie(server, "submit", "org/m", cut, "--text", "{title}").exit_code == 0, "the server says what is wrong"
    assert sie(server, "submit", "org/m", file, "--text", "{title} {price}", "--keep", "id").exit_code == 0
