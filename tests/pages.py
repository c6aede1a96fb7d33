"""Pages whose commands are run as a reader would paste them.

    page ──► blocks ──► Reader, with a folder, a home and ports of its own, runs each block and compares its output with
    the page

A comment before a block marks it. A block with `<!-- server -->` runs in a terminal of its own until the next such
block. Marks in ELSEWHERE are the reasons for which a block is not run. A `text` block after a block is its output:
numbers are rounded as on the page, and … stands for the rest of the line. `<!-- measured -->` before it says that its
numbers are of another machine, so any number matches.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import SIE, Cluster

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"


# Pages of docs/ and the catalogue are of the distribution. A tree from which an extra was removed has less.
WHOLE = pytest.mark.skipif(
    not all(
        (ROOT / "extras" / extra).is_dir()
        for extra in re.findall(r"\(\.\./extras/([\w-]+)/", (DOCS / "index.md").read_text("utf-8"))
    ),
    reason="an extra was removed from this tree",
)


# addresses in pages; the PORT of a worker is printed at each start
ADDRESS, WORKER = "http://127.0.0.1:8080", "http://127.0.0.1:PORT/metrics"
ELSEWHERE = {
    "install": "changes what is installed",
    "hub": "asks the network",
    "kubernetes": "needs a cluster, or an image",
    "machine": "needs another machine, or another server",
    "vision": "needs a model of images or documents",
    "file": "is a file, which another test serves",
}
RUN = ("bash", "python")
# languages of blocks that are not run: diagrams and answers without a language, and files
SHOWN = ("", "text", "json", "yaml", "toml")
PLAIN = "sie serve"
BOUND_S = 120.0
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$"
    r"(?:\n+(?P<measured><!-- measured -->\n)?^```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_SERVE = re.compile(r"\bsie serve\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block that is not indented. `shown` is its output on the page, or None if the page has none. `measured`:
    the output has numbers of another machine.
    """

    language: str
    code: str
    mark: str
    shown: str | None
    measured: bool = False


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in these languages, or all blocks, in their order."""
    code_blocks = [
        Block(match["language"], match["code"], match["mark"] or "", match["shown"], match["measured"] is not None)
        for match in _BLOCK.finditer(page.read_text("utf-8"))
    ]
    return [block for block in code_blocks if not languages or block.language in languages]


def marks(page: Path) -> Counter[str]:
    """Return how many blocks of a shell or of Python a page has, by mark."""
    return Counter(block.mark for block in blocks(page, *RUN))


def runs(page: Path) -> int:
    """Return how many blocks of a page a Reader runs."""
    return sum(count for mark, count in marks(page).items() if mark not in ELSEWHERE)


def run(code: str, cluster: Cluster) -> list[str]:
    """Run a Python example of a page at this cluster, and return the lines that it prints."""
    script = code.replace(ADDRESS, cluster.url)
    environ = {**os.environ, "SIE_BASE_URL": cluster.url}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=BOUND_S, check=True, env=environ
    ).stdout.splitlines()


def differences(shown: str, printed: str, *, measured: bool = False) -> list[str]:
    """Return the lines that are not as shown. With `measured`, numbers may differ."""
    expected, printed_lines = shown.splitlines(), printed.splitlines()
    mismatches = (
        [f"{len(printed_lines)} lines in place of {len(expected)}"] if len(expected) != len(printed_lines) else []
    )
    for line, printed_line in zip(expected, printed_lines, strict=False):
        if not _is_shown(line, printed_line, measured=measured):
            mismatches.append(f"{printed_line!r} in place of {line!r}")
    return mismatches


def _is_shown(shown: str, printed: str, *, measured: bool) -> bool:
    """Return True if a line has the words of the page, and its numbers at their places."""
    start, is_cut, _ = shown.partition("…")
    words, printed_words = _NUMBER.split(start), _NUMBER.split(printed)
    numbers, printed_numbers = _NUMBER.findall(start), _NUMBER.findall(printed)
    if len(printed_numbers) < len(numbers) or (not is_cut and len(printed_numbers) > len(numbers)):
        return False
    last = printed_words[len(numbers)]
    ends = last.startswith(words[-1]) if is_cut else last == words[-1]
    return (
        ends
        and words[:-1] == printed_words[: len(numbers)]
        and (measured or all(map(_is_rounded, numbers, printed_numbers)))
    )


def _is_rounded(shown: str, printed: str) -> bool:
    """Return True if a number is the shown one. The last place of a fraction may differ by one, because devices round
    differently.
    """
    places = len(shown.lower().partition("e")[0].partition(".")[2])
    return abs(float(shown) - float(printed)) <= (1.001 * 10**-places if places else 0)


class Reader:
    """A reader at a terminal, in a folder of its own. At the end of the context manager its `sie serve` must end with
    status 0.

    `environ` has further variables of its machine, such as the address of a hub or a bucket.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self.ran = 0
        self._folder = folder
        home = folder / "home"
        home.mkdir(parents=True)
        (home / ".curlrc").write_text("fail\n")  # curl fails on an HTTP error
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(home), "XDG_DATA_HOME": ""}
        self._environ = {**os.environ, **own, **(environ or {})}
        # one set of ports, because a script that a page writes has them; ports for two workers, which a page may start
        self._cluster = Cluster(home / ".local/share/sie", "--workers", "1", workers=2)
        self._cluster.environ = self._environ
        self._options = shlex.join(self._cluster.argv[2:])
        self._serves = ""
        self._terminal = self._environ

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._cluster.process is not None:
            status = self._cluster.stop()
            assert status == 0, f"{self._serves} ended with status {status}"

    def _here(self, code: str) -> str:
        """Return the code with the ports of this reader's cluster."""
        here = {ADDRESS: self._cluster.url, WORKER: f"http://127.0.0.1:{self._cluster.worker_port}/metrics"}
        for address, replacement in here.items():
            code = code.replace(address, replacement)
        return code

    def serve(self, command: str) -> None:
        """Run a server in a terminal of its own, after the end of the one before."""
        self._leave()
        self._serves = command
        argv = _SERVE.sub(f"exec {SIE} serve {self._options}", command)
        assert argv != command, command
        self._cluster.argv = ["bash", "-euc", f"cd {shlex.quote(str(self._folder))}\n{argv}"]
        self._cluster.lines.clear()
        self._cluster.start(BOUND_S)

    def read(self, page: Path) -> None:
        """Run the blocks of a page from top to end. Raise AssertionError with the block that failed."""
        # some commands use the default address
        self._terminal = {
            **self._environ,
            "SIE_GATEWAY_URL": self._cluster.url,
        }
        for block in blocks(page, *RUN):
            if block.mark in ELSEWHERE:
                continue
            if block.mark == "server":
                self.serve(block.code)
            else:
                self.paste(block)
            self.ran += 1

    def read_beside(self, page: Path) -> None:
        """Run the blocks of a page, beside a plain `sie serve` if the page starts no server."""
        if not marks(page)["server"] and self._serves != PLAIN:
            self.serve(PLAIN)
        self.read(page)

    def paste(self, block: Block) -> None:
        """Run a block in the terminal, which keeps exported variables."""
        exported = self._folder / "exported"
        code = self._here(block.code)
        then = f"env -0 > {shlex.quote(str(exported))}"
        argv = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euc", f"{code}\n{then}"]
        done = subprocess.run(
            argv, cwd=self._folder, env=self._terminal, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
        if block.language == "bash":
            self._terminal = dict(line.split("=", 1) for line in exported.read_text().split("\0") if line)
        mismatches = (
            [] if block.shown is None else differences(self._here(block.shown), done.stdout, measured=block.measured)
        )
        assert not mismatches, "\n".join([block.code, *mismatches])
