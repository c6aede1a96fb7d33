"""Chaos: steady load on 2 gateways, 2 workers and 3 brokers, while a random part is killed or frozen every few seconds.

Two workers with the fixed-cost adapter share a bundle; MiniLM has a worker of its own. Streams have three copies on
disk. Every answer is checked; the run fails when an accepted request was not answered by its deadline, an answer was
wrong or came twice, or a client of the SDK's patience gave up. Availability is stated with and without leader
elections.

    python tests/chaos/run.py [--duration 300] [--every 10] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import MODEL as MINILM
from stack import Device, Plan, Stack

from chaos.clients import Crowd, Expected
from chaos.faults import Leaders, Monkey
from chaos.report import Report, judged, plot, table

ROOT = Path(__file__).parents[2]
TOY = "toy/one"
BUDGET_S = 30.0
CALM_S = 3.0  # before the first fault and after the last repair


def _minilm() -> Expected:
    import oracle

    texts = oracle.ragged_texts(64, seed=11, longest=60)
    return Expected(MINILM, texts, list(oracle.encode(texts)))


def plan(*, minilm: bool, code: Path | None = None, devices: int = 1) -> Plan:
    """Return the plan of the cluster. With several `devices` there is one worker with the fixed-cost adapter, not
    two.
    """
    device = Device(batch_ms=5, token_us=50, devices=devices)
    workers = [*([device, device] if devices == 1 else [device]), *([None] if minilm else [])]
    environ = {"OMP_NUM_THREADS": "1"}
    return Plan([TOY], gateways=2, workers=workers, brokers=3, toy_bundle="toy", environ=environ, code=code)


async def chaos(stack: Stack, *, duration_s: float, every_s: float, seed: int, minilm: bool) -> Report:
    """Run load and faults on a cluster that is ready."""
    expected = await asyncio.to_thread(_minilm) if minilm else None
    crowds = [Crowd(stack.urls, Expected.toy(TOY), clients=24, pace_s=0.3, items=6, budget_s=BUDGET_S)]
    if expected is not None:
        crowds.append(Crowd(stack.urls, expected, clients=4, pace_s=1.0, items=1, budget_s=BUDGET_S))
    leaders, monkey = Leaders(stack), Monkey(stack, every_s=every_s, seed=seed)
    watching = asyncio.create_task(leaders.run())
    begin_s = time.monotonic()
    await asyncio.sleep(CALM_S)
    await monkey.run(duration_s)
    await asyncio.sleep(CALM_S)
    await asyncio.gather(*(crowd.stop() for crowd in crowds))
    end_s = time.monotonic()
    watching.cancel()
    await asyncio.wait([watching])  # the task closes its connections
    leaders.end()
    outcomes = sorted(
        (outcome for crowd in crowds for outcome in crowd.outcomes), key=lambda outcome: outcome.started_s
    )
    return judged(begin_s, end_s, outcomes, monkey.faults, leaders.without, sum(crowd.unasked for crowd in crowds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of faults")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--devices", type=int, default=1, help="one worker with so many devices in place of two workers with one each"
    )
    parser.add_argument("--no-minilm", action="store_true")
    parser.add_argument("--code", type=Path, help="another checkout whose processes are to be run")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "chaos.md", help="report; the plot lies beside it"
    )
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(
            Path(folder, "stack"), plan(minilm=not options.no_minilm, code=options.code, devices=options.devices)
        )
        with stack:
            run = chaos(
                stack, duration_s=options.duration, every_s=options.every, seed=seed, minilm=not options.no_minilm
            )
            report = uvloop.run(run)
            log = stack.log(200)
    several = options.devices > 1
    workers = (
        f"one worker with {options.devices} fixed-cost adapters" if several else "2 workers with the fixed-cost adapter"
    )
    text = (
        f"# Chaos\n\n`python tests/chaos/run.py --duration {options.duration:g} --every {options.every:g} --seed "
        f"{seed}{f' --devices {options.devices}' if several else ''}`, {os.cpu_count()} cores: 2 gateways, {workers}, "
        f"{'' if options.no_minilm else 'one with MiniLM, '}3 brokers with 3 copies on "
        f"disk.\n\n{table(report)}\n\n![answers over time]({options.out.with_suffix('.svg').name})\n"
    )
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    options.out.with_suffix(".svg").write_text(plot(report))
    if not report.holds:
        options.out.with_suffix(".log").write_text(log)
        sys.exit(f"the promise did not hold; logs of all parts: {options.out.with_suffix('.log')}")


if __name__ == "__main__":
    main()
