"""Who is refused, and whether it had to be: the rule of the gateway and the one before it, side by side in virtual time.

Every cell is one run of `tests/admission_simulation.py`: real Admission, a device that takes a + b x tokens for a batch of at most 64
requests of 8 tokens, clients that come again when they are told to. The clock is virtual, so the processor has no part in the figures.

* false: refused (at once or later) although it would have been answered a tenth of its budget and one batch early, behind all that was
  ahead of it and all that had been promised a turn; of all requests;
* late: accepted and not answered within the budget; of the accepted. Onset: from the start, a stall or a slow-down on, for twice the budget
  or ten batches; a stall of 6 s and the batches that run when the device slows down are in it, which no rule can foresee;
* served: let in and answered in time, of those who came again at their Retry-After;
* goodput: answers in time of what the device can do, after the onset, where requests come at ten times that.

    python bench/admission.py [--every 7] [--out bench/results/admission.md]
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from admission_simulation import SLOWER, Before, Case, Report, World
from report import Report as Lines

from sie_gateway.admission import Admission

BATCH_S = (0.001, 0.01, 0.1, 0.5)
TOKEN_S = (2e-6, 2e-5, 2e-4, 2e-3)
CLIENTS = (1, 10, 100, 500)
BUDGET_S = (1.0, 10.0, 60.0)
STARTS = ("cold", "tiny", "stall", "slow")
FIT = 4  # full batches within the budget, below which a request is late by the luck of its batch
MAX_OPEN = 20_000  # requests of a cell at ten times the capacity
RULES = (("before", Before), ("now", Admission))


def full_s(case: Case) -> float:
    """What a full batch takes, at its slowest."""
    return (case.batch_s + case.token_s * case.tokens * case.batch_items) * (SLOWER if case.start == "slow" else 1)


def closed() -> Iterator[Case]:
    for batch_s, token_s, clients, budget_s, start in itertools.product(BATCH_S, TOKEN_S, CLIENTS, BUDGET_S, STARTS):
        one_s = batch_s + token_s * 512
        seconds = max(40.0, 8 * budget_s, 100 * one_s)
        yield Case(batch_s, token_s, clients, budget_s, start, seconds=seconds, requests=3000)


def overload() -> Iterator[Case]:
    for batch_s, token_s, budget_s, items, workers, gateways in itertools.product(
        BATCH_S, TOKEN_S, BUDGET_S, (64, 8), (1, 3), (1, 2)
    ):  # fmt: skip
        one_s = batch_s + token_s * 8 * items
        seconds = 3 * max(2 * budget_s, 10 * one_s)
        requests = int(10 * seconds * workers * items / one_s)
        if requests <= MAX_OPEN:
            yield Case(
                batch_s, token_s, 0, budget_s, load="open", seconds=seconds, requests=2 * requests, batch_items=items, workers=workers,
                gateways=gateways,
            )  # fmt: skip


class Sum:
    def __init__(self) -> None:
        self.cases = self.tries = self.refused = self.shed = self.false = 0
        self.steady, self.onset, self.returns = [0, 0], [0, 0], [0, 0]
        self.goodput: list[float] = []

    def add(self, report: Report) -> None:
        self.cases += 1
        self.tries += len(report.tries)
        self.refused += len(report.of("refused"))
        self.shed += len(report.of("shed"))
        self.false += report.false
        found = (report.late(onset=False), report.late(onset=True), report.returns())
        for total, pair in zip((self.steady, self.onset, self.returns), found, strict=True):
            total[0] += pair[0]
            total[1] += pair[1]
        if report.case.load == "open":
            self.goodput.append(report.goodput())

    def row(self) -> str:
        goodput = f"{sum(self.goodput) / len(self.goodput):.0%}, least {min(self.goodput):.0%}" if self.goodput else ""
        refused, shed = self.refused / self.tries, self.shed / self.tries
        return (
            f"{self.cases} | {self.tries} | {refused:.1%} | {shed:.1%} | {self.false / self.tries:.2%} | {_share(self.steady)} | "
            f"{_share(self.onset)} | {_share(self.returns)} | {goodput} |"
        )


def _share(pair: list[int]) -> str:
    return f"{pair[0] / pair[1]:.2%} of {pair[1]}" if pair[1] else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only each N-th cell")
    parser.add_argument("--out", type=Path, help="write the report here as well")
    options = parser.parse_args()
    say = Lines()
    say("# Who is refused\n")
    say(f"`python bench/admission.py{f' --every {options.every}' if options.every > 1 else ''}`, virtual time; run on {_processor()}.")
    say(f"a {_ms(BATCH_S)} ms for each batch, b {_us(TOKEN_S)} us for each token, {CLIENTS} clients, budgets of {BUDGET_S} s; at ten times")
    say("the capacity 1 and 3 workers, 1 and 2 gateways. What the columns mean is said in the file itself.\n")
    groups: dict[tuple[str, str], dict[str, Sum]] = {}
    for number, case in enumerate([*closed(), *overload()]):
        if number % options.every:
            continue
        fits = "fits" if case.budget_s >= FIT * full_s(case) else "tight"
        kind = case.start if case.load == "closed" else f"10x, {case.gateways} gateway{'s' if case.gateways > 1 else ''}"
        for name, rule in RULES:
            groups.setdefault((fits, kind), {}).setdefault(name, Sum()).add(World(case, rule).run())
        print(f"{number} {case}", file=sys.stderr, flush=True)
    for fits, title in (("fits", "Budgets of at least four full batches"), ("tight", "Shorter budgets: when a batch is formed decides")):
        say(f"\n{title}\n")
        say("| load | rule | cells | requests | refused | later | false | late, steady | late, onset | served | goodput |")
        say("|---|---|---|---|---|---|---|---|---|---|---|")
        for (group, kind), sums in sorted(groups.items()):
            for name, found in sums.items() if group == fits else ():
                say(f"| {kind} | {name} | {found.row()}")
    say.save(options.out)


def _ms(values: tuple[float, ...]) -> str:
    return ", ".join(f"{1000 * value:g}" for value in values)


def _us(values: tuple[float, ...]) -> str:
    return ", ".join(f"{1e6 * value:g}" for value in values)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
