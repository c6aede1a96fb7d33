"""The most expensive places of a collapsed profile (`py-spy record --format raw`): microseconds of a request, by
function.

    python bench/collapsed.py FILE --cpu-us 346 [--top 15] [--lines]

A function that stands twice in a stack is counted once. `--cpu-us` is the processor time of a request in that process.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

WAITS = {"futures/thread.py _worker"}  # an idle thread of a pool, which py-spy takes for a busy one
_PLACE = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")


def places(stack: str, *, lines: bool) -> list[str]:
    """The frames of a stack from the outermost, as `package/file.py function`."""
    found = []
    for frame in stack.split(";"):
        match = _PLACE.match(frame)
        if match is None:
            continue
        file = "/".join(Path(match["file"]).parts[-2:])
        found.append(f"{file}{':' + match['line'] if lines and match['line'] else ''} {match['function']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cpu-us", type=float, default=100.0)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--lines", action="store_true", help="by line instead of by function")
    options = parser.parse_args()
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    total = 0
    for line in options.file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        found = places(stack, lines=options.lines)
        if found and re.sub(r":\d+ ", " ", found[-1]) not in WAITS:
            total += int(count)
            own[found[-1]] += int(count)
            for place in set(found):
                below[place] += int(count)
    for title, counts in (("self", own), ("with all it calls", below)):
        print(f"| us, {title} | place |\n|---|---|")
        for place, count in counts.most_common(options.top):
            print(f"| {count / total * options.cpu_us:.1f} | {place} |")
        print()


if __name__ == "__main__":
    main()
