"""Jobs and files of both clients, over real sockets: what is sent, pages, waits, uploads and downloads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from job_server import FILE, JOB, JobServer

import sie_client
from sie_client import SIEAsyncClient, SIEClient, core, files, jobs
from sie_client.types import JobOptions
from sie_client.types import JobOutput as OutputOptions
from sie_contracts.api.jobs import JobInput, JobOutput, JobRequest

COMPLETED = {"state": "completed", "counts": {"rows": 3, "done": 3}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    monkeypatch.setattr(jobs, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(core, "CONNECTION_PAUSE_S", 0.01)
    running = JobServer()
    yield running
    running.close()


@pytest.fixture(params=["sync", "async"])
def using(request: pytest.FixtureRequest, server: JobServer) -> Callable[..., Any]:
    """Return `using(function)`, which returns the result of `function(client, do)`. `do` awaits or lists a result."""

    def sync(function: Callable[..., Any]) -> Any:
        with SIEClient(server.url) as client:
            return function(client, lambda result: list(result) if isinstance(result, Iterator) else result)

    def asynchronous(function: Callable[..., Any]) -> Any:
        with asyncio.Runner() as runner:

            async def opened() -> SIEAsyncClient:
                return SIEAsyncClient(server.url)

            async def done(result: Any) -> Any:
                return [entry async for entry in result] if hasattr(result, "__aiter__") else await result

            client = runner.run(opened())
            try:
                return function(client, lambda result: runner.run(done(result)))
            finally:
                runner.run(client.close())

    return sync if request.param == "sync" else asynchronous


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / 'docs "1".jsonl'
    path.write_text('{"id": 1, "title": "a"}\n' * 50_000)
    return path


# ---- submit


def test_a_local_file_is_sent_and_then_the_job(server: JobServer, using: Callable[..., Any], rows: Path) -> None:
    reports: list[sie_client.Progress] = []
    at = datetime(2030, 1, 31, 6, tzinfo=UTC)

    def submit(client: Any, do: Callable[[Any], Any]) -> Any:
        return do(
            client.jobs.submit(
                "org/m",
                rows,
                text="{title}",
                id="id",
                keep=["title"],
                output={"format": "npy"},
                params={"dimensions": 128},
                windows=["22:00-06:00"],
                deadline=at,
                cache=True,
                name=None,
                on_upload=reports.append,
            )
        )

    job = using(submit)
    (file,) = server.files.values()
    assert (file.bytes, file.filename, file.purpose) == (rows.stat().st_size, "docs %221%22.jsonl", "jobs")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert server.digests[file.id] == hashlib.sha256(rows.read_bytes()).hexdigest()
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert reports[-1] == sie_client.Progress(file.bytes, file.bytes)
    assert len(reports) > 3
    assert (job.id, job.state, job.has_ended) == (f"{JOB}0", "queued", False)
    assert server.bodies[job.id] == JobRequest(
        model="org/m",
        input=JobInput(file=file.id, text="{title}", id="id", keep=("title",)),
        output=JobOutput(format="npy"),
        params={"dimensions": 128},
        windows=("22:00-06:00",),
        deadline=at.timestamp(),
        cache=True,
    )


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("s3://bucket/docs/", JobInput(url="s3://bucket/docs/")),
        ("file:///data/docs.csv", JobInput(url="file:///data/docs.csv")),
        (f"{FILE}0", JobInput(file=f"{FILE}0")),
    ],
)
def test_an_address_and_a_file_that_was_sent_are_named(
    server: JobServer, using: Callable[..., Any], source: str, place: JobInput
) -> None:
    job = using(lambda client, do: do(client.jobs.submit("org/m", source, output="s3://bucket/out/")))
    assert server.bodies[job.id].input == place
    assert server.bodies[job.id].output == JobOutput(url="s3://bucket/out/")
    assert server.asked("POST", "/v1/files") == []


def test_a_submission_that_is_sent_again_is_one_job(server: JobServer, using: Callable[..., Any]) -> None:
    """Two calls with the caller's idempotency key are one job. Two calls without one are two jobs."""

    def submit(client: Any, do: Callable[[Any], Any]) -> Any:
        job_ids = [do(client.jobs.submit("org/m", f"{FILE}0", idempotency_key="mine")).id for _ in range(2)]
        return [*job_ids, *(do(client.jobs.submit("org/m", f"{FILE}0")).id for _ in range(2))]

    assert using(submit) == [f"{JOB}0", f"{JOB}0", f"{JOB}1", f"{JOB}2"]


def test_a_file_that_was_sent_for_a_refused_job_is_deleted(
    server: JobServer, using: Callable[..., Any], rows: Path
) -> None:
    server.refuses["POST /v1/jobs"] = 400, "INVALID_INPUT", "input.text: there is no column titel"
    with pytest.raises(sie_client.InvalidInputError, match="titel") as caught:
        using(lambda client, do: do(client.jobs.submit("org/m", rows, text="{titel}")))
    assert (caught.value.request_id, caught.value.status) == ("r", 400)
    assert server.files == {}


def test_what_is_no_input_is_refused_before_anything_is_sent(
    server: JobServer, using: Callable[..., Any], tmp_path: Path
) -> None:
    for source, why in ((tmp_path / "none.csv", "none.csv: No such file"), (tmp_path, "is a folder"), (7, "got int")):
        with pytest.raises(sie_client.InvalidInputError, match=why):
            using(lambda client, do, source=source: do(client.jobs.submit("org/m", source)))
    with pytest.raises(TypeError, match="'txt'; did you mean 'text'"):
        using(lambda client, do: do(client.jobs.submit("org/m", "s3://b/", txt="{title}")))
    assert server.seen == []


def test_a_file_that_grows_while_it_is_sent_is_refused(
    server: JobServer, using: Callable[..., Any], rows: Path
) -> None:
    def grow(progress: sie_client.Progress) -> None:
        with rows.open("a") as file:
            file.write("more\n")

    with pytest.raises(sie_client.InvalidInputError, match="the file was changed during the upload"):
        using(lambda client, do: do(client.files.upload(rows, on_progress=grow)))
    assert server.files == {}


@pytest.mark.parametrize("error", [ValueError, RuntimeError, httpx.ReadTimeout, BrokenPipeError])
def test_an_error_of_the_callback_of_a_transfer_is_the_callers_own(
    server: JobServer, using: Callable[..., Any], rows: Path, tmp_path: Path, error: type[Exception]
) -> None:
    """It is neither taken for a failure of the connection, which would be tried again, nor for one of the file."""
    calls = 0

    def fail(progress: sie_client.Progress) -> None:
        nonlocal calls
        calls += 1
        raise error("mine")

    def transfer(call: Callable[[Any], Any]) -> None:
        nonlocal calls
        calls = 0
        with pytest.raises(error, match="mine"):
            using(lambda client, do: do(call(client)))
        assert calls == 1

    transfer(lambda client: client.files.upload(rows, on_progress=fail))
    file = using(lambda client, do: do(client.files.upload(rows)))
    transfer(lambda client: client.files.save(file.id, tmp_path / "saved", on_progress=fail))
    assert sorted(path.name for path in tmp_path.iterdir()) == [rows.name]


UPLOAD = """
import asyncio, resource, sys
from sie_client import SIEAsyncClient, SIEClient

url, path, save, kind = sys.argv[1:]

async def run():
    async with SIEAsyncClient(url) as client:
        file = await client.files.upload(path)
        await client.files.save(file.id, save)

with SIEClient(url) as client:
    client.files.upload(__file__ if "__file__" in globals() else sys.executable)  # what imports and connections take
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "sync":
        file = client.files.upload(path)
        client.files.save(file.id, save)
    else:
        asyncio.run(run())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_large_file_is_never_in_memory(server: JobServer, tmp_path: Path, kind: str) -> None:
    """An upload and a download of 256 MiB take less than 48 MiB of memory."""
    path, saved = tmp_path / "large.jsonl", tmp_path / "saved"
    with path.open("wb") as file:
        file.truncate(256 << 20)
    done = subprocess.run(
        [sys.executable, "-c", UPLOAD, server.url, str(path), str(saved), kind],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert saved.stat().st_size == 256 << 20
    assert int(done.stdout) < 48


# ---- look, steer, wait


def test_all_pages_of_jobs_and_of_a_state(server: JobServer, using: Callable[..., Any]) -> None:
    for number in range(5):
        server.add(state="paused" if number % 2 else "running")

    def listed(client: Any, do: Callable[[Any], Any]) -> Any:
        return [job.id for job in do(client.jobs.list(page=2))], [job.id for job in do(client.jobs.list("paused"))]

    everything, paused = using(listed)
    assert everything == [f"{JOB}{number}" for number in (4, 3, 2, 1, 0)]
    assert paused == [f"{JOB}3", f"{JOB}1"]
    assert server.asked("GET", "/v1/jobs?")[1] == f"/v1/jobs?limit=2&after={JOB}3"


def test_a_job_is_steered(server: JobServer, using: Callable[..., Any]) -> None:
    server.add(state="running", request={"model": "org/m", "input": {"file": "f"}, "of_tomorrow": 1})

    def steer(client: Any, do: Callable[[Any], Any]) -> Any:
        job = do(client.jobs.get(f"{JOB}0"))
        states = [job.state, do(job.pause()).state, do(job.resume()).state, do(job.refresh()).state]
        with pytest.raises(sie_client.ContentConflictError):
            do(job.delete())
        states.append(do(job.cancel()).state)
        retried_job = do(job.retry())
        failed, fine = do(job.rows(failed=True)), do(job.rows(limit=5, failed=False))
        do(client.jobs.delete(job.id))
        with pytest.raises(sie_client.NotFoundError):
            do(job.refresh())
        return states, retried_job.id, failed[0]["error"]["code"], fine

    states, retry_id, code, fine = using(steer)
    assert states == ["running", "paused", "running", "running", "cancelled"]
    assert (retry_id, code, fine) == (f"{JOB}1", "INVALID_INPUT", [{"id": "8", "dims": 4}])


def test_what_an_attempt_without_an_answer_did_is_a_success(server: JobServer, using: Callable[..., Any]) -> None:
    """The server deletes and cancels, and its answer is lost. A job that was gone before is still not found."""
    server.add(**COMPLETED)
    server.add(state="running")
    server.add(**COMPLETED)
    server.losses |= {
        f"DELETE /v1/jobs/{JOB}0": 1,
        f"POST /v1/jobs/{JOB}1/cancel": 1,
        f"POST /v1/jobs/{JOB}2/cancel": 1,
    }

    def steer(client: Any, do: Callable[[Any], Any]) -> str:
        do(client.jobs.delete(f"{JOB}0"))
        with pytest.raises(sie_client.NotFoundError) as caught:
            do(client.jobs.delete(f"{JOB}0"))
        assert not caught.value.may_have_run
        with pytest.raises(sie_client.ContentConflictError):
            do(do(client.jobs.get(f"{JOB}2")).cancel())
        return str(do(do(client.jobs.get(f"{JOB}1")).cancel()).state)

    assert using(steer) == "cancelled"
    assert len(server.asked("DELETE")) == 3
    with pytest.raises(sie_client.ContentConflictError):
        using(lambda client, do: do(do(client.jobs.get(f"{JOB}1")).cancel()))


def test_an_upload_is_not_sent_again_once_its_last_byte_is_sent(
    server: JobServer, using: Callable[..., Any], rows: Path
) -> None:
    server.losses["POST /v1/files"] = 1
    with pytest.raises(sie_client.SIEConnectionError) as caught:
        using(lambda client, do: do(client.files.upload(rows)))
    assert caught.value.may_have_run
    assert list(server.files) == [f"{FILE}0"]


def test_a_job_is_waited_for(server: JobServer, using: Callable[..., Any]) -> None:
    server.add()
    server.script = [{"state": "planning"}, {"state": "running", "counts": {"rows": 3, "done": 1}}, COMPLETED]
    reports: list[tuple[str, int]] = []

    def wait(client: Any, do: Callable[[Any], Any]) -> Any:
        job = do(client.jobs.get(f"{JOB}0"))
        return do(job.wait(on_progress=lambda info: reports.append((info.state, info.counts.done))))

    job = using(wait)
    assert reports == [("running", 1), ("completed", 3)]
    assert repr(job).endswith(f"{JOB}0 completed, 3 of 3 rows>")


def test_a_job_that_ends_otherwise_raises_and_one_that_takes_too_long(
    server: JobServer, using: Callable[..., Any]
) -> None:
    server.add(state="running")
    with pytest.raises(sie_client.JobTimeoutError, match=r"not ended within 0\.05 s: its state is running") as late:
        using(lambda client, do: do(do(client.jobs.get(f"{JOB}0")).wait(timeout_s=0.05)))
    assert late.value.retryable
    server.script = [{"state": "failed", "error": {"code": "MODEL_LOAD_FAILED", "message": "no weights"}}]
    with pytest.raises(
        sie_client.JobFailedError, match="ended in the state failed: MODEL_LOAD_FAILED: no weights"
    ) as failed:
        using(lambda client, do: do(do(client.jobs.get(f"{JOB}0")).wait()))
    assert (failed.value.code, failed.value.details["state"]) == ("MODEL_LOAD_FAILED", "failed")


# ---- download


def finished(server: JobServer, count: int = 5) -> None:
    server.add(**COMPLETED)
    server.parts = {f"part-{number:05}.parquet": bytes([number]) * 300_000 for number in range(count)}


def download(folder: Path, **more: Any) -> Callable[[Any, Callable[[Any], Any]], Any]:
    return lambda client, do: do(do(client.jobs.get(f"{JOB}0")).download(folder, **more))


def test_all_parts_arrive_and_none_comes_twice(server: JobServer, using: Callable[..., Any], tmp_path: Path) -> None:
    """One part is cut off twice, and all parts arrive. A second call fetches only the part that was damaged."""
    finished(server)
    server.cuts["part-00003.parquet"] = 2
    reports: list[sie_client.Progress] = []
    folder = tmp_path / "a" / "out"
    paths = using(download(folder, on_progress=reports.append))
    assert [path.name for path in paths] == list(server.parts)
    assert [path.read_bytes() for path in paths] == list(server.parts.values())
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *server.parts]
    assert len(json.loads((folder / "manifest.json").read_text())["parts"]) == 5
    assert reports[-1] == sie_client.Progress(1_500_000, 1_500_000)
    assert len(server.asked("GET", f"/v1/jobs/{JOB}0/part")) == 7

    server.seen.clear()
    paths[1].write_bytes(b"\x09" * 300_000)
    using(download(folder))
    assert server.asked("GET", f"/v1/jobs/{JOB}0/part") == [f"/v1/jobs/{JOB}0/part?name=part-00001.parquet"]
    assert paths[1].read_bytes() == server.parts["part-00001.parquet"]


def test_a_download_that_began_later_to_the_same_file_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    """The thread of a call that was interrupted may still write when the call is repeated."""
    path, data = tmp_path / "part-0.jsonl", bytes(range(256)) * 1024
    digest = hashlib.sha256(data).hexdigest()
    earlier, later = (files.Arriving(path, len(data), digest, lambda _: None) for _ in range(2))
    earlier.begin()
    earlier.write(data[:100_000])
    later.begin()
    later.write(data[:10])
    earlier.write(data[100_000:])
    with pytest.raises(sie_client.InvalidInputError, match="another download"):
        earlier.finish()
    earlier.drop()
    later.write(data[10:])
    later.finish()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {path.name: data}


def test_a_part_with_another_digest_does_not_appear(
    server: JobServer, using: Callable[..., Any], tmp_path: Path
) -> None:
    finished(server, 1)
    server.announced["part-00000.parquet"] = "0" * 64
    with pytest.raises(
        sie_client.ServerError, match=r"part-00000\.parquet: the 300000 received bytes differ from the size or digest"
    ):
        using(download(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../part", "/etc/part", ".hidden", "manifest.json", "a/b", "", "part\n"])
def test_no_part_is_written_elsewhere(server: JobServer, tmp_path: Path, name: str) -> None:
    finished(server, 1)
    server.parts[name] = b"x"
    with pytest.raises(sie_client.ServerError, match="invalid or occur twice"), SIEClient(server.url) as client:
        client.jobs.get(f"{JOB}0").download(tmp_path / "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_the_folder_of_another_job_is_left_alone(server: JobServer, using: Callable[..., Any], tmp_path: Path) -> None:
    finished(server, 1)
    using(download(tmp_path))
    finished(server, 1)
    with pytest.raises(sie_client.InvalidInputError, match=f"has the files of {JOB}0: name another folder"):
        using(lambda client, do: do(do(client.jobs.get(f"{JOB}1")).download(tmp_path)))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(sie_client.InvalidInputError, match="not the manifest of a job"):
        using(download(tmp_path))


@pytest.mark.parametrize("broken", [b"[]", b"{}", b"no", b'{"id": 3}'])
def test_a_reply_that_is_none_is_an_error_of_the_server(broken: bytes) -> None:
    session = core.Session()
    for plan in (
        jobs.get("job-1", session),
        jobs.page(None, 1, None, session),
        jobs.steered("job-1", "pause", session),
        jobs.retried("job-1", session),
        jobs.deleted("job-1", session),
        jobs.rows("job-1", 1, None, session),
        jobs.manifest("job-1", session),
    ):
        next(plan)
        with pytest.raises(sie_client.ServerError, match="could not be read"):
            plan.send(core.Received(200, {}, broken))


# ---- shapes


def test_the_options_of_a_job_are_the_fields_of_its_request() -> None:
    own = {"on_upload", "idempotency_key"}
    of_input = {"input_format" if name == "format" else name for name in JobInput.__struct_fields__} - {"file", "url"}
    of_request = set(JobRequest.__struct_fields__) - {"model", "input"}
    assert set(JobOptions.__annotations__) == own | of_input | of_request
    assert set(OutputOptions.__annotations__) == set(JobOutput.__struct_fields__)
    for name, hint in typing.get_type_hints(OutputOptions).items():
        declared = typing.get_type_hints(JobOutput)[name]
        assert hint == declared, name
