"""Cost of an open console in a cluster of many models and workers, for the gateway, the network and the browser.

The gateway, the broker, the config service and one worker are real; heartbeats simulate all other workers, as in
fleet.py. A real browser opens each view of the console for a while. The processor time of the gateway without a view is
measured in turn and subtracted. The browser is Debian's chromium.

    python bench/console.py [--models 10000 --workers 1000 --rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import browser
import fleet
import httpx
import stack
from report import Report, machine, parser_of
from websockets.sync.client import connect

VIEWS = {"playground": "#run", "models": "#catalogue", "cluster": "#workers tr"}
GOALS = "goals: at most 1 % of a core, 1 MB a minute, 100 ms a frame"
# JavaScript that records the longest time between two frames and the longest task of the page, in ms
WATCH = """(() => {
  window.worst = 0; window.task = 0;
  let last = performance.now();
  const tick = now => { window.worst = Math.max(window.worst, now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  const noted = list => list.getEntries().forEach(each => { window.task = Math.max(window.task, each.duration); });
  new PerformanceObserver(noted).observe({type: 'longtask', buffered: true});
})()"""
TYPING = """(() => {
  const field = document.querySelector('#filter, #model-filter');
  if (!field) return;
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, field.value ? '' : 'a');
  field.dispatchEvent(new Event('input', {bubbles: true}));
})()"""


class Counting(browser.Page):
    """A browser page. `received`: bytes that it has received."""

    received = 0

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.loadingFinished":
            self.received += int(params["encodedDataLength"])
        super()._note(event, params)


def cpu_share(part: stack.Part, seconds: float, meanwhile: Any = None) -> float:
    """Return the mean number of cores that a process uses during `seconds`. `meanwhile` is called about every 2 s."""
    before_s, at_s = part.cpu_s(), time.perf_counter()
    while time.perf_counter() - at_s < seconds:
        time.sleep(min(2.0, seconds))
        if meanwhile is not None:
            meanwhile()
    return (part.cpu_s() - before_s) / (time.perf_counter() - at_s)


def main() -> None:
    parser = parser_of(__doc__, seconds=15.0, has_code=True)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds of each view, with and without the view open; medians",
    )
    parser.add_argument("--clients", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    say = Report()
    say("# What an open console costs\n")
    say(f"`python bench/console.py`, {machine()}, Python {platform.python_version()}, {options.models:,} models, ")
    say(f"{options.workers:,} workers, {options.rounds} rounds of {options.seconds:g} s of each view; {GOALS}.\n")
    stack.START_S = 240.0
    with contextlib.ExitStack() as stacked:
        case = fleet.Case(options.models, options.workers, options, stacked)
        gateway, url = case.stack.gateways[0], case.stack.urls[0]
        folder = Path(stacked.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        devtools = stacked.enter_context(browser.browsing(folder))
        time.sleep(fleet.SETTLE_S)
        say("| view | ms until shown | gateway, share of a core | kB a minute | longest frame, ms | longest task, ms |")
        say("|---" * 6 + "|")
        target = httpx.put(f"http://{devtools}/json/new?about:blank", timeout=20).json()
        page = Counting(stacked.enter_context(connect(target["webSocketDebuggerUrl"], proxy=None, max_size=64 << 20)))
        for view, shown in VIEWS.items():
            costs, per_minute, first_ms = [], [], []
            for _ in range(options.rounds):
                page.open("about:blank")
                idle = cpu_share(gateway, options.seconds)
                at_s = time.perf_counter()
                page.open(f"{url}/#{view}")
                page.wait(f"Boolean(document.querySelector('{shown}'))", bool, timeout_s=30)
                first_ms.append(1000 * (time.perf_counter() - at_s))
                page.received = 0
                costs.append(cpu_share(gateway, options.seconds, lambda: page.evaluate("0")) - idle)
                per_minute.append(page.received / 1000 * 60 / options.seconds)
            page.evaluate(WATCH)
            cpu_share(gateway, options.seconds, lambda: page.evaluate(TYPING))
            worst, task = page.evaluate("window.worst"), page.evaluate("window.task")
            say(
                f"| {view} | {statistics.median(first_ms):.0f} | {statistics.median(costs):.2%} | "
                f"{statistics.median(per_minute):.0f} | {worst:.0f} | {task:.0f} |"
            )
    say("\nThe last two columns are measured while a character is typed into the page's filter every two seconds.")
    say.save(options.out)


if __name__ == "__main__":
    main()
