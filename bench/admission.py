"""Refusals by the gateway's admission rule and by a simpler rule, in virtual time, and the share of needless refusals.

Every cell is one run of `tests/admission_simulation.py`: the real Admission class, a device that takes a + b x tokens
seconds for a batch, and clients that repeat a refused request after its Retry-After at any gateway. The figures do not
depend on the processor. Columns:

* refused, later: share of all requests that were refused at once, and after they had been accepted;
* false: share of all requests that were refused needlessly, at once or later. Their answers, after all work ahead of
  them and all repeats that were promised an earlier turn, would have come before the deadline. The margin before the
  deadline is a tenth of the budget and one batch;
* late: share of accepted requests that were not answered within the budget. The onset lasts twice the budget or ten
  batches from the start, from a stall, or from a slow-down; `steady` is the rest of the time;
* struck: share of all requests whose outcome a gateway could not predict. `late` and `false` omit them. Some were
  accepted at most one usual batch after the begin of a stall or slow-down, and were late. The others were refused after
  the device had stood still for their whole budget, but the stall ended early enough for an answer in time;
* served: share of the repeated requests that was accepted and answered in time;
* told before: share, accepted and answered in time, of the repeated requests that `served` omits. A stall or slow-down
  affected them, and the gateway sent their Retry-After before it could detect this event (one usual batch after a stall
  began, two slow batches after the device became slow);
* goodput: answers in time after the onset, as a share of the capacity, while requests come at ten times the capacity.

The capacity under a budget is x / (a + b x) for the largest batch of x tokens with 2 (a + b x) <= budget, at most a
full batch: a request that comes when a batch begins waits for this batch and for its own. If a batch of one request
exceeds this limit, a device under load cannot answer. Such cells are listed, but no average contains them.

    python bench/admission.py [--set tuned|held-out] [--every 7] [--jobs 2] [--out bench/results/admission.md]
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from admission_simulation import Before, Case, World
from report import Report as Lines
from report import machine, parser_of

from sie_gateway.admission.admission import Admission

CLIENTS = (1, 10, 100, 500)
STARTS = ("cold", "tiny", "stall", "slow")
MAX_OPEN = 12_000  # cells of `overload` in which more requests than this number are expected are omitted
MAX_CLOSED = 2_000
RULES = {"before": Before, "now": Admission}


class Matrix(NamedTuple):
    """Values whose combinations are the cells (runs). `tokens`: tokens of each request; if 16 or more, the median of a
    lognormal distribution with sigma 0.6.
    """

    batch_s: tuple[float, ...]
    token_s: tuple[float, ...]
    clients: tuple[int, ...]
    budget_s: tuple[float, ...]
    tokens: int
    items: tuple[int, ...]  # numbers of requests of a full batch
    workers: tuple[int, ...]
    seed: int


MATRICES = {
    "tuned": Matrix(
        (0.001, 0.01, 0.1, 0.5), (2e-6, 2e-5, 2e-4, 2e-3), CLIENTS, (1.0, 10.0, 60.0), 8, (64, 8), (1, 3), 1
    ),
    "held-out": Matrix((0.003, 0.04, 0.2), (5e-6, 7e-5, 7e-4), (3, 30, 250), (1.5, 4.0, 30.0), 24, (32, 12), (2,), 77),
}


def closed(of: Matrix) -> Iterator[Case]:
    for batch_s, token_s, clients, budget_s, start in itertools.product(
        of.batch_s, of.token_s, of.clients, of.budget_s, STARTS
    ):
        one_s = batch_s + token_s * of.tokens * of.items[0]
        seconds = max(40.0, 8 * budget_s, 100 * one_s)
        yield Case(
            batch_s,
            token_s,
            clients,
            budget_s,
            start,
            tokens=of.tokens,
            batch_items=of.items[0],
            seconds=seconds,
            requests=MAX_CLOSED,
            seed=of.seed,
        )


def overload(of: Matrix) -> Iterator[Case]:
    for batch_s, token_s, budget_s, items, workers, gateways in itertools.product(
        of.batch_s, of.token_s, of.budget_s, of.items, of.workers, (1, 2)
    ):
        case = Case(
            batch_s,
            token_s,
            0,
            budget_s,
            load="open",
            tokens=of.tokens,
            batch_items=items,
            workers=workers,
            gateways=gateways,
            seed=of.seed,
        )
        seconds = 3 * max(2 * budget_s, 10 * case.full_s())
        requests = int(10 * seconds * case.capacity())
        if requests <= MAX_OPEN:
            yield replace(case, seconds=seconds, requests=2 * requests)


class Cell(NamedTuple):
    """Results of a run: numbers of requests, and shares as pairs (number, total)."""

    tries: int
    refused: int
    shed: int
    false: int
    struck: int
    steady: tuple[int, int]
    onset: tuple[int, int]
    served: tuple[int, int]
    unforeseen: tuple[int, int]
    goodput: float | None


def run(case: Case, rule: str) -> Cell:
    report = World(case, RULES[rule]).run()
    return Cell(
        len(report.tries),
        len(report.of("refused")),
        len(report.of("shed")),
        report.false,
        report.lost(),
        report.late(onset=False),
        report.late(onset=True),
        report.returns(),
        report.returns(foreseen=False),
        report.goodput() if case.load == "open" else None,
    )


def _row(cells: list[Cell]) -> str:
    tries = sum(cell.tries for cell in cells)
    shares = [sum(cell.refused for cell in cells), sum(cell.shed for cell in cells), sum(cell.struck for cell in cells)]
    refused, shed, struck = (f"{share / tries:.1%}" for share in shares)
    goodput = [cell.goodput for cell in cells if cell.goodput is not None]
    good = f"{sum(goodput) / len(goodput):.0%}, least {min(goodput):.0%}" if goodput else ""
    return (
        f"{len(cells)} | {tries} | {refused} | {shed} | {sum(cell.false for cell in cells) / tries:.2%} | "
        f"{_share([cell.steady for cell in cells])} | {_share([cell.onset for cell in cells])} | {struck} | "
        f"{_share([cell.served for cell in cells])} | {_share([cell.unforeseen for cell in cells])} | {good} |"
    )


def _share(pairs: list[tuple[int, int]]) -> str:
    some, of = (sum(column) for column in zip(*pairs, strict=True))
    return f"{some / of:.2%} of {of}" if of else ""


def _kind(case: Case) -> str:
    return case.start if case.load == "closed" else f"10x, {case.gateways} gateway{'s' if case.gateways > 1 else ''}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--set",
        choices=MATRICES,
        default="tuned",
        help="cells to run; held-out has other costs, budgets, sizes and seeds than tuned",
    )
    parser.add_argument("--every", type=int, default=1, help="run only each N-th cell")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cells")
    parser.add_argument("--rule", choices=RULES, action="append", help="run only this rule; may be repeated")
    parser.add_argument("--cells", action="store_true", help="print every cell on the standard error output")
    options = parser.parse_args()
    matrix = MATRICES[options.set]
    cases = [*closed(matrix), *overload(matrix)]
    random.Random(matrix.seed).shuffle(cases)  # in the original order, every N-th case would cover few budgets
    cases = cases[:: options.every]
    possible = [case for case in cases if case.is_possible]
    tasks = list(itertools.product(possible, options.rule or RULES))
    groups: dict[tuple[str, str], list[Cell]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for (case, rule), cell in zip(tasks, pool.map(run, *zip(*tasks, strict=True), chunksize=4), strict=True):
            groups.setdefault((_kind(case), rule), []).append(cell)
            if options.cells:
                print(rule, _row([cell]), case, file=sys.stderr, flush=True)
    say = Lines()
    say("# Who is refused\n")
    chosen = f" --set {options.set}" if options.set != "tuned" else ""
    chosen += f" --every {options.every}" if options.every > 1 else ""
    say(f"`python bench/admission.py{chosen}`, virtual time; run on {machine()}.")
    say(
        f"`a`: {_ms(matrix.batch_s)} ms for a batch, `b`: {_us(matrix.token_s)} us for a token, {matrix.clients} "
        "clients, budgets of"
    )
    say(
        f"{matrix.budget_s} s, {matrix.tokens} tokens{' (lognormal, sigma 0.6)' if matrix.tokens >= 16 else ''}. At ten"
        " times the capacity (10x):"
    )
    say(f"{matrix.workers} workers, 1 and 2 gateways. The docstring of the script explains the columns.\n")
    measures = (
        "requests | refused | later | false | late, steady | late, onset | struck | served | told before | goodput"
    )
    say(f"| load | rule | cells | {measures} |")
    say("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for (kind, rule), cells in sorted(groups.items()):
        say(f"| {kind} | {rule} | {_row(cells)}")
    _say_impossible(say, [case for case in cases if not case.is_possible])
    say.save(options.out)


def _say_impossible(say: Lines, cases: list[Case]) -> None:
    limits = sorted({(case.budget_s, case.batch_s * case.slowest, case.token_s * case.slowest) for case in cases})
    listing = ", ".join(
        f"{budget_s:g} s with {_ms((batch_s,))} ms and {_us((token_s,))} us" for budget_s, batch_s, token_s in limits
    )
    say(
        f"\nThe rows leave out {len(cases)} cells, because two batches of one request take longer than their budget. "
        f"Their budgets, with `a` and `b`: {listing}.\n"
    )


def _ms(values: tuple[float, ...]) -> str:
    return ", ".join(f"{1000 * value:g}" for value in values)


def _us(values: tuple[float, ...]) -> str:
    return ", ".join(f"{1e6 * value:g}" for value in values)


if __name__ == "__main__":
    main()
