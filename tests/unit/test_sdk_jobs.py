"""Jobs and files of both clients, over real sockets: what is sent, pages, waits, uploads and downloads."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from job_server import FILE, JOB, JobServer

import sie_client
from sie_client import SIEAsyncClient, SIEClient, core, jobs
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
