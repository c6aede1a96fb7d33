"""`sie jobs`: the requests, output and exit status of each command, against a server of jobs in this process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from job_server import FILE, JOB, JobServer

from sie_cli.main import main
from sie_client import jobs
from sie_contracts.api.jobs import JobInput, JobOutput, JobRequest

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


# ---- submit


def test_a_file_goes_up_and_the_id_alone_is_printed(server: JobServer, docs: Path) -> None:
    options = shlex.split(
        r"--text '{title}\n{body}' --id id --keep 'title, year' --keep lang --format npy --param dimensions=128"
        r""" --param output_dtype=int8 --param 'labels=["a","b"]' --window 22:00-06:00 --tokens-per-s 5000"""
        " --name docs --cache --deadline 2100-01-31T06:00+01:00 --metadata team=search --sink main --collection docs"
    )
    result = sie(server, "submit", "org/m", docs, *options)
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


# ---- list, show, watch


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
