"""Jobs while every process is killed, over a real S3 API."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
from fake_adapter import ids_of, vector_of
from job_client import ENDED, Job, JobClient, Rows, parquet_file
from object_stores import Place, s3_server
from pyarrow import parquet
from stack import Device, Part, Plan, Stack

MODEL = "toy/one"
ROWS_OF_GROUP = 10_000


def texts_of(count: int, first: int = 0) -> Rows:
    return [{"key": f"k{number:07}", "text": f"short {number}"} for number in range(first, first + count)]


@dataclass
class Killer:
    """Kills a random part every `every_s`, and starts again what has ended. Once, when half of the rows are done, it
    stops the whole cluster.
    """

    stack: Stack
    every_s: float
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0

    def until_ended(self, job: str, timeout_s: float) -> Job:
        generator = random.Random(self.seed)
        turn: list[Part] = []  # each part has its turn, in a random order
        end_s = time.monotonic() + timeout_s
        next_s = time.monotonic() + self.every_s
        while True:
            record = self._look(job)
            if record is not None and record["state"] in (*ENDED, "paused"):
                return record
            assert time.monotonic() < end_s, f"seed {self.seed}: {record} after {dict(self.kills)}\n{self.stack.log()}"
            if time.monotonic() >= next_s:
                if not turn:
                    turn = generator.sample(self.stack.parts, len(self.stack.parts))
                part = turn.pop()
                part.kill()
                self.kills[part.role] += 1
                next_s = time.monotonic() + self.every_s
            if (
                record is not None
                and not self.restarts
                and record["counts"]["done"] >= (record["counts"]["rows"] or 1) / 2
            ):
                self.stack.stop()
                self.restarts = 1
                next_s = time.monotonic() + self.every_s
            self._again()
            time.sleep(0.1)

    def finish(self) -> None:
        """Start what has ended, and wait until all parts are ready."""
        self._again()
        for part in self.stack.parts:
            part.wait_ready()

    def _again(self) -> None:
        for part in self.stack.parts:
            if not part.alive:
                part.start()

    def _look(self, job: str) -> Job | None:
        """Return the job from the first gateway that answers."""
        for url in self.stack.urls:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{url}/v1/jobs/{job}", trust_env=False, timeout=5)
                if answer.status_code == 200:
                    record: Job = answer.json()
                    return record
        return None


def check_whole(place: Place, manifest: dict[str, Any], count: int, failed: int = 0) -> None:
    """Check that each id is there once and in order, that every digest is right, and that the vectors are those of
    their texts. `failed` inputs were refused as the cause of a crash.
    """
    assert (manifest["rows"], manifest["failed"], manifest["broken"]) == (count, failed, [])
    tables = []
    for part in manifest["parts"]:
        data = place.get(f"out/{part['name']}")
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part["bytes"], part["sha256"]), part
        tables.append(parquet.read_table(io.BytesIO(data), columns=["id", "dense", "error"]))
    assert {name.removeprefix("out/") for name in place.names() if name.startswith("out/")} == {
        *(part["name"] for part in manifest["parts"]),
        ".sie-job",
        "manifest.json",
    }
    whole = pa.concat_tables(tables)
    assert whole.num_rows == count
    errors = whole.column("error").drop_null().to_pylist()
    assert len(errors) == failed
    assert all("ended twice while this input ran alone" in error["message"] for error in errors)
    expected = pa.array([f"k{number:07}" for number in range(count)])
    assert pa.compute.all(pa.compute.equal(whole.column("id").combine_chunks(), expected)).as_py()
    for number in range(0, count, max(1, count // 200)):
        if (dense := whole.column("dense")[number].as_py()) is None:
            assert whole.column("error")[number].is_valid
            continue
        vector = np.array(dense, np.float32)
        assert np.allclose(vector, vector_of(ids_of(f"short {number}")), atol=1e-6), number


@pytest.mark.parametrize(
    ("count", "every_s", "shard_rows"),
    [
        pytest.param(20_000, 1.5, 1000, id="20 thousand"),
        pytest.param(1_000_000, 10.0, 10_000, id="a million", marks=pytest.mark.long),  # it takes ten minutes
    ],
)
@pytest.mark.timeout(1800)
def test_while_all_is_killed_each_row_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, every_s: float, shard_rows: int
) -> None:
    """A job over Parquet in an object store. Every few seconds a broker, a gateway, the config service, a sidecar or an
    adapter is killed; once the whole cluster ends. The output is whole. An input that was run alone by two adapters
    that were killed is refused as the cause: it looks like an input that crashes adapters.
    """
    seed = int(os.environ.get("SIE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print("seed", seed)
    for name in ("s3", "stack"):
        (tmp_path / name).mkdir()
    with s3_server(tmp_path / "s3") as server:
        place = Place.at(server, monkeypatch)
        per_file = max(1, count // 4)
        for number in range(4):
            rows = texts_of(per_file, number * per_file)
            place.put(f"in/{number}.parquet", parquet_file(rows, ROWS_OF_GROUP))
        environ = {**server.environ, "SIE_JOBS_URLS": place.url, "SIE_PAYLOAD_STORE_URL": f"{place.url}/payloads"}
        device = Device(batch_ms=5.0, token_us=20.0)
        with Stack(tmp_path / "stack", Plan(gateways=2, workers=(device,), environ=environ)) as stack:
            with JobClient(stack.urls[0]) as jobs:
                source = {"url": f"{place.url}/in/", "text": "{text}", "id": "key"}
                job = jobs.submit(MODEL, source, output={"url": f"{place.url}/out/"}, shard_rows=shard_rows)["id"]
            killer, began_s = Killer(stack, every_s, seed), time.monotonic()
            ended = killer.until_ended(job, 1500.0)
            took_s = time.monotonic() - began_s
            killer.finish()
            print(f"{count} rows in {took_s:.1f} s, {count / took_s:.0f} a second, kills {dict(killer.kills)}")
            assert ended["state"] == "completed", f"seed {seed}: {ended}\n{stack.log()}"
            failed = ended["counts"]["failed"]
            assert ended["counts"]["done"] == count
            assert failed <= max(0, killer.kills["adapter"] + killer.restarts - 2), ended
            assert sum(killer.kills.values()) >= 2, "the job was too quick to be disturbed"
            assert killer.restarts == 1
            manifest = json.loads(place.get("out/manifest.json"))
            with JobClient(stack.urls[1]) as jobs:
                assert jobs.manifest(job)["parts"] == manifest["parts"]
            check_whole(place, manifest, count, failed)
