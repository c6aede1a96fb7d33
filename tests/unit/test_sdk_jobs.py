"""Jobs and files of both clients, over real sockets: what is sent, pages, waits, uploads and downloads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from job_server import FILE, JOB, JobServer

import sie_client
from sie_client import SIEAsyncClient, SIEClient, core, files, jobs
from sie_contracts.api.jobs import JobInput, JobOutput, JobRequest

COMPLETED = {"state": "completed", "counts": {"rows": 3, "done": 3}}


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


def test_a_submission_that_is_sent_again_is_one_job(server: JobServer, using: Callable[..., Any]) -> None:
    """Two calls with the caller's idempotency key are one job. Two calls without one are two jobs."""

    def submit(client: Any, do: Callable[[Any], Any]) -> Any:
        job_ids = [do(client.jobs.submit("org/m", f"{FILE}0", idempotency_key="mine")).id for _ in range(2)]
        return [*job_ids, *(do(client.jobs.submit("org/m", f"{FILE}0")).id for _ in range(2))]

    assert using(submit) == [f"{JOB}0", f"{JOB}0", f"{JOB}1", f"{JOB}2"]


# ---- look, steer, wait


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


# ---- shapes


@pytest.mark.parametrize(
    "failed", [core.TransportFailed(ConnectionResetError("reset")), core.Received(504, {}, b"<html>of a proxy</html>")]
)
def test_an_upload_that_breaks_before_its_last_byte_is_sent_again(
    rows: Path, failed: core.TransportFailed | core.Received
) -> None:
    plan = files.uploaded(rows, "jobs", None, core.Session())
    size = next(plan)
    assert isinstance(size, core.BlockingWork)
    request = plan.send(size.function())
    assert isinstance(request, core.Send)
    assert isinstance(request.body, core.UploadStream)
    pieces = request.body.pieces()
    next(pieces)
    assert isinstance(plan.send(failed), core.Pause)
    assert next(plan) == request
    *_, last = request.body.pieces()
    assert last.endswith(b"--\r\n")
    with pytest.raises(sie_client.SIEError) as caught:
        plan.send(failed)
    assert caught.value.may_have_run


def test_an_upload_is_not_sent_again_once_its_last_byte_is_sent(
    server: JobServer, using: Callable[..., Any], rows: Path
) -> None:
    server.losses["POST /v1/files"] = 1
    with pytest.raises(sie_client.SIEConnectionError) as caught:
        using(lambda client, do: do(client.files.upload(rows)))
    assert caught.value.may_have_run
    assert list(server.files) == [f"{FILE}0"]


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


def test_an_incomplete_download_is_deleted_before_its_error_is_raised(
    server: JobServer, using: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(server, 1)
    begin = files.Arriving.begin

    def begin_on_a_full_disk(arriving: files.Arriving) -> None:
        begin(arriving)
        with files.on_disk(tmp_path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Arriving, "begin", begin_on_a_full_disk)
    with pytest.raises(sie_client.InvalidInputError, match="No space left") as caught:
        using(download(tmp_path))
    # `caught` holds the frames of the call, so no garbage collection deleted the file
    assert list(tmp_path.iterdir()) == []
    assert caught.value.__traceback__ is not None


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
