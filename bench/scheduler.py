"""Cost of the sidecar's scheduler: microseconds to add a job and to form its batch, with many models and many waiting
jobs.

Run `python bench/scheduler.py`. It uses one thread and no device. After each formed batch, as many new jobs are added.
"""

from __future__ import annotations

import argparse
import random
import time

from sie_sidecar.batch import Batch, BatchKey, BatchLimits, DeviceLoad, Queued, Waiting, next_batch

DEVICE = DeviceLoad(sent=1, lanes=1, depth=2, more_expected=True)


def measured(models: int, depth: int, requests: int, rounds: int) -> tuple[float, float]:
    """Return the microseconds to add a job and form its batch: per job, and per batch. `depth`: number of waiting jobs,
    which stays constant.
    """
    chance = random.Random(1)
    keys = [BatchKey(f"m{number}", "1", "encode", "", "") for number in range(models)]
    limits = BatchLimits(16384, requests, wait_s=0.0)
    waiting: Waiting[Queued] = Waiting()
    now_s, batches, jobs = 0.0, 0, 0

    def arrive(count: int) -> None:
        nonlocal now_s
        for _ in range(count):
            now_s += 1e-6
            key, cost, bulk = chance.choice(keys), chance.randint(8, 256), chance.random() < 0.3
            waiting.add(Queued(key=key, cost=cost, arrived_s=now_s, bulk=bulk))

    arrive(depth)
    now_s += 1.0
    spent_s = 0.0
    while batches < rounds:
        began_s = time.perf_counter()
        batch = next_batch(waiting, now_s, limits, DEVICE)
        spent_s += time.perf_counter() - began_s
        assert isinstance(batch, Batch)
        batches, jobs = batches + 1, jobs + len(batch.entries)
        began_s = time.perf_counter()
        arrive(len(batch.entries))
        spent_s += time.perf_counter() - began_s
    return spent_s / jobs * 1e6, spent_s / batches * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    rounds = parser.parse_args().rounds
    print("| models | waiting | requests a batch | us a job | us a batch |\n|---|---|---|---|---|")
    for models, depth in ((1, 100), (1, 10_000), (200, 100), (200, 10_000), (200, 100_000)):
        for requests in (12, 64):
            job_us, batch_us = measured(models, depth, requests, rounds)
            print(f"| {models} | {depth} | {requests} | {job_us:.1f} | {batch_us:.1f} |")


if __name__ == "__main__":
    main()
