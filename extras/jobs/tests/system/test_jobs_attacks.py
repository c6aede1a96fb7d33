"""Hostile jobs: as many and as large records as are allowed, rows that are small in a file and large in memory, and a
row that ends gateways. Other tests end the gateway of sound jobs, and copy a data directory while a job runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import until
from job_client import ENDED, JobClient, jsonl
from stack import Device, Part, Plan, Stack

MODEL = "toy/one"
MIB = 1 << 20
WIDE = "\U0001f600"  # four bytes
METADATA = {f"{number:02}{WIDE * 62}": WIDE * 512 for number in range(16)}


def largest(file: str) -> dict[str, Any]:
    """Return a job whose record has nearly the largest size that is allowed."""
    return {"model": MODEL, "input": {"file": file, "text": "{text}" + "x" * 2000}, "metadata": METADATA}


@pytest.mark.parametrize(
    ("keys", "jobs"),
    [pytest.param(1, 300, id="one key"), pytest.param(20, 120, id="twenty keys", marks=pytest.mark.long)],
)
@pytest.mark.timeout(600)
def test_gateways_start_again_however_many_jobs_keys_have_sent(tmp_path: Path, keys: int, jobs: int) -> None:
    """Keys send jobs with the largest records, until they get 429. All gateways are killed at once, and each is ready
    after less than 10 s of processor time. The jobs are still there.
    """
    tokens = [f"token-{number}-of-a-test" for number in range(keys)]
    environ = {
        "SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads"),
        "SIE_AUTH_MODE": "static",
        "SIE_AUTH_TOKENS": ",".join(tokens),
    }
    with Stack(tmp_path / "stack", Plan(gateways=2, workers=(), environ=environ)) as stack:
        job_counts: dict[str, int] = {}
        for token in tokens:
            with JobClient(stack.urls[0], token) as client:
                body = largest(client.upload("a.jsonl", jsonl([{"text": "a"}])))
                job_counts[token] = 0
                for _ in range(jobs):
                    answer = client.http.post("/v1/jobs", json=body)
                    if answer.status_code == 201:
                        job_counts[token] += 1
                        continue
                    assert answer.status_code == 429, answer.text
                    assert "delete some that have ended" in answer.json()["error"]["message"]
                    break
        print("taken", list(job_counts.values()))
        record = 36 << 10
        assert all(count <= (4 * MIB) // record for count in job_counts.values())
        assert sum(job_counts.values()) * record > (min(keys * 4, 64) * MIB) * 0.9, "they came to the bound"
        for part in stack.gateways:
            part.kill()
        began_s = time.monotonic()
        for part in stack.gateways:
            part.start()
        for part in stack.gateways:
            part.wait_ready()
        took_s = time.monotonic() - began_s
        print(f"ready in {took_s:.1f} s, {[round(part.rss_bytes() / MIB) for part in stack.gateways]} MiB")
        assert max(part.cpu_s() for part in stack.gateways) < 10
        for url in stack.urls:
            with JobClient(url, tokens[0]) as client:
                assert len(client.ask("GET", "/v1/jobs", params={"limit": 1000})["data"]) == job_counts[tokens[0]]


@contextmanager
def peak_below(part: Part, most: int) -> Iterator[None]:
    """Check that the part takes less than `most` bytes more in the block than before."""

    def peak() -> int:
        lines = Path(f"/proc/{part.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10

    pid, before = part.pid, part.rss_bytes()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # this resets the peak
    yield
    assert part.pid == pid
    print(f"{part.name}: {before / MIB:.0f} MiB before, {peak() / MIB:.0f} MiB at the peak")
    assert peak() - before < most


@pytest.mark.parametrize(
    ("rows", "row_mib"), [pytest.param(3, 4, id="small"), pytest.param(20, 12, id="240 MiB", marks=pytest.mark.long)]
)
@pytest.mark.timeout(600)
def test_rows_of_many_values_fail_alone_and_take_little_memory(tmp_path: Path, rows: int, row_mib: int) -> None:
    """Rows of maps, `[{},{},…]`: each map takes 64 bytes where it is decoded, and three in the file. Jobs run one at a
    time: with the column of maps, without it, and with columns that no row has.
    """
    bomb = b"[" + b",".join([b"{}"] * (row_mib * MIB // 3)) + b"]"
    environ = {"SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads")}
    with (
        Stack(tmp_path / "stack", Plan(workers=(Device(),), environ=environ)) as stack,
        JobClient(stack.urls[0]) as client,
    ):
        client.done(
            client.submit(MODEL, {"file": client.upload("a.jsonl", jsonl([{"text": "a"}])), "text": "{text}"})["id"]
        )
        for keep, failed in ((("k",), rows), ((), 0)):
            file = client.upload("b.jsonl", b'{"text":"a","k":1}\n' + b'{"text":"a","k":%s}\n' % bomb * rows)
            with peak_below(stack.gateways[0], 400 * MIB):
                job = client.submit(MODEL, {"file": file, "text": "{text}", "keep": keep})
                outcome = client.done(job["id"], 300)
            assert (outcome["counts"]["done"], outcome["counts"]["failed"]) == (rows + 1, failed)
        names = [f"no{number}" for number in range(20_000)]
        file = client.upload("c.jsonl", jsonl([{"text": f"t{number}"} for number in range(10_000)]))
        refusal = client.refusal(MODEL, {"file": file, "text": "{text}", "keep": names})
        assert refusal["param"] == "input.keep"
        with peak_below(stack.gateways[0], 400 * MIB):
            job = client.submit(MODEL, {"file": file, "text": "{text}", "keep": names[:100]})
            assert client.done(job["id"], 300)["counts"]["failed"] == 0


def five_words(count: int, start: str = "row") -> list[dict[str, Any]]:
    return [{"text": f"{start} {number} has five words"} for number in range(count)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_jobs_that_lose_their_gateway_eight_times_fail_no_row(tmp_path: Path) -> None:
    """The gateway is killed eight times, at random moments after it leads the largest job. Beside this job run
    three others and a batch. Every row is answered once.
    """
    seed = int(os.environ.get("SIE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print("seed", seed)
    generator = random.Random(seed)
    environ = {"SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads"), "SIE_JOBS_AT_ONCE": "5"}
    with (
        Stack(tmp_path / "stack", Plan(workers=(Device(),), environ=environ)) as stack,
        JobClient(stack.urls[0]) as client,
    ):
        gateway = stack.gateways[0]
        counts = {"a.jsonl": 40_000, "b.jsonl": 6_000, "c.jsonl": 6_000, "d.jsonl": 6_000}
        jobs = {}
        for name, count in counts.items():
            source = {"file": client.upload(name, jsonl(five_words(count, name))), "text": "{text}"}
            jobs[name] = client.submit(MODEL, source, shard_rows=20_000, tokens_per_s=count / 3)["id"]
        lines = [
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": MODEL, "input": f"line {number} of a batch"},
            }
            for number in range(5000)
        ]
        file = client.upload("lines.jsonl", jsonl(lines))
        body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "1h"}
        batch = client.ask("POST", "/v1/batches", json=body, status=200)["id"]
        led_s, kills = 0.0, []
        for _ in range(8):

            def is_led() -> bool:
                record = client.show(jobs["a.jsonl"])
                return bool(record["state"] == "running" and record["updated_at"] > led_s)  # noqa: B023  called at once

            until(is_led, 60, "this gateway leads it")
            time.sleep(generator.uniform(0.0, 8.0))
            kills.append(client.show(jobs["a.jsonl"])["counts"]["done"])
            gateway.kill()
            led_s = time.time()
            gateway.start()
            gateway.wait_ready()
        print("rows done at the kills", kills)
        for name, job in jobs.items():
            outcome = client.done(job, 300)
            assert (outcome["counts"]["done"], outcome["counts"]["failed"]) == (counts[name], 0)
            assert [row["id"] for row in client.rows(job)] == [f"{name}#{number}" for number in range(counts[name])]

        def is_completed() -> bool:
            status = client.ask("GET", f"/v1/batches/{batch}", status=200)["status"]
            assert status in ("in_progress", "finalizing", "completed")
            return bool(status == "completed")

        until(is_completed, 300, "the batch is completed")
        finished = client.ask("GET", f"/v1/batches/{batch}", status=200)
        assert (finished["request_counts"], finished["error_file_id"]) == (
            {"total": 5000, "completed": 5000, "failed": 0},
            None,
        )
        output = client.http.get(f"/v1/files/{finished['output_file_id']}/content").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in output] == [f"c{number}" for number in range(5000)]
        assert kills[-1] < 40_000, "the job was too quick to be disturbed"


ENDS_AT_A_ROW = """
import importlib.abc, importlib.util, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sie_bulk_jobs.datasets.rows":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            decoded = module._json

            def ending(line, *more):
                if b"DEADLY" in line:
                    os.kill(os.getpid(), signal.SIGKILL)
                return decoded(line, *more)

            module._json = ending

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_row_that_ends_gateways_is_found_named_and_left_out(tmp_path: Path) -> None:
    """A gateway ends whenever it reads one row of 2000. It is started again until the job ends."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(ENDS_AT_A_ROW)
    environ = {
        "SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH")))),
    }
    with (
        Stack(tmp_path / "stack", Plan(workers=(Device(),), environ=environ)) as stack,
        JobClient(stack.urls[0]) as client,
    ):
        gateway, deaths = stack.gateways[0], 0
        rows = five_words(2000)
        rows[1234]["text"] = "DEADLY"
        source = {"file": client.upload("a.jsonl", jsonl(rows)), "text": "{text}"}
        job = client.submit(MODEL, source, shard_rows=1000)["id"]

        def has_stopped() -> bool:
            try:
                return client.show(job)["state"] in (*ENDED, "paused")
            except httpx.TransportError:
                return not gateway.alive

        while True:
            until(has_stopped, 60, "it ends, or the job does")
            if gateway.alive:
                break
            deaths += 1
            gateway.start()
            gateway.wait_ready()
        print("gateways that ended:", deaths)
        outcome = client.done(job)
        assert (outcome["counts"]["done"], outcome["counts"]["failed"]) == (2000, 1)
        assert outcome["errors"] == {"LEADERS_LOST": 1}
        failed = [row for row in client.rows(job) if row["error"] is not None]
        assert [(row["id"], row["error"]["code"]) for row in failed] == [("a.jsonl#1234", "LEADERS_LOST")]
        assert deaths <= 8


def test_a_job_goes_on_from_a_copy_of_the_data_directory(tmp_path: Path) -> None:
    """One job reads an uploaded file, another one a folder. In the middle all is copied, as by a snapshot of the disk,
    and killed. From the copy, whose files have other inodes, both complete, and each row is there once.
    """
    folder, copy = tmp_path / "stack", tmp_path / "copy"
    count = 600
    rows = [{"key": f"k{number}", "text": f"short {number}"} for number in range(count)]
    environ = {"SIE_PAYLOAD_STORE_URL": str(folder / "payloads"), "SIE_JOBS_URLS": f"file://{folder}/data"}
    slow: dict[str, Any] = {"shard_rows": 50, "tokens_per_s": 1250.0}
    with Stack(folder, Plan(workers=(Device(),), environ=environ)) as stack:
        (folder / "data").mkdir()
        (folder / "data" / "rows.jsonl").write_bytes(jsonl(rows))
        with JobClient(stack.urls[0]) as client:
            source = {"text": "{text}", "id": "key"}
            file = client.upload("rows.jsonl", jsonl(rows))
            jobs = [client.submit(MODEL, {"file": file, **source}, **slow)["id"]]
            jobs.append(client.submit(MODEL, {"url": f"file://{folder}/data/rows.jsonl", **source}, **slow)["id"])
            for job in jobs:
                until(lambda: client.show(job)["counts"]["done"] >= 100, 60, "it is in its middle")  # noqa: B023
                assert client.show(job)["state"] == "running"
        for part in stack.parts:
            part.pause()
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.sock"))
        for part in stack.parts:
            part.kill()
        shutil.rmtree(folder)
        copy.rename(folder)
        for part in stack.parts:
            part.start()
        for part in stack.parts:
            part.wait_ready()
        with JobClient(stack.urls[0]) as client:
            for job in jobs:
                outcome = client.done(job, 120)
                assert (outcome["counts"]["done"], outcome["counts"]["failed"], outcome["broken"]) == (count, 0, [])
                assert [row["id"] for row in client.rows(job)] == [row["key"] for row in rows]
