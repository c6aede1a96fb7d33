"""Pages whose commands are run as a reader would paste them.

    page ──► blocks ──► Reader, with a folder, a home and ports of its own: runs each, compares what it prints with the page

A comment before a block says what it needs: `<!-- server -->` is left running in a terminal of its own until the next such block;
`<!-- install -->`, `<!-- hub -->` (the network) and `<!-- kubernetes -->` are not run here. A `text` block behind one is what it prints:
any number stands for any other, and … for the rest of the line.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ADDRESS, WORKER = "http://127.0.0.1:8080", "127.0.0.1:9095"  # as pages have them
ELSEWHERE = ("install", "hub", "kubernetes")
BOUND_S = 120.0
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block that is not indented. `shown` is what the page says that it prints, None if it says nothing."""

    language: str
    code: str
    mark: str
    shown: str | None


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in their order."""
    found = [
        Block(match["language"], match["code"], match["mark"] or "", match["shown"]) for match in _BLOCK.finditer(page.read_text("utf-8"))
    ]
    return [block for block in found if block.language in languages]


def marks(page: Path) -> Counter[str]:
    """How many blocks of a shell or of Python a page has, by their marks."""
    return Counter(block.mark for block in blocks(page, "bash", "console", "python"))


def run(code: str, cluster: Cluster) -> list[str]:
    """The lines that a Python example prints, which speaks to the address of the pages."""
    script = code.replace(ADDRESS, cluster.url)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=BOUND_S, check=True).stdout.splitlines()


def differences(shown: str, printed: str) -> list[str]:
    """The lines that are not as shown."""
    expected, found = shown.splitlines(), printed.splitlines()
    told = [f"{len(found)} lines in place of {len(expected)}"] if len(expected) != len(found) else []
    for line, other in zip(expected, found, strict=False):
        start, rest, _ = line.partition("…")
        left, right = _NUMBER.sub("0", start), _NUMBER.sub("0", other)
        if not (right.startswith(left) if rest else right == left):
            told.append(f"{other!r} in place of {line!r}")
    return told


class Reader:
    """Somebody at a terminal, in a folder of their own. Use as a context manager; what was started is ended, and must end well."""

    def __init__(self, folder: Path) -> None:
        self.ran = 0
        self._folder = folder
        (folder / "home").mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIE_", "OTEL_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        self._environ = {**kept, "PATH": path, "HOME": str(folder / "home")}
        self._cluster = Cluster(folder / "data", environ=self._environ)  # one set of ports, since a script that was written has them
        self._argv = shlex.join(self._cluster.argv)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._cluster.process is not None:
            status = self._cluster.stop()
            assert status == 0, f"sie serve ended with status {status}"

    def _here(self, code: str) -> str:
        """The code with the ports of this reader's cluster."""
        return code.replace(ADDRESS, self._cluster.url).replace(WORKER, f"127.0.0.1:{self._cluster.worker_port}")

    def serve(self, block: Block) -> None:
        """In a terminal of its own, until the next one: Ctrl-C there."""
        self._leave()
        command = block.code.replace("sie serve", f"exec {self._argv}")
        assert command != block.code, block.code
        self._cluster.argv = ["bash", "-euc", f"cd {shlex.quote(str(self._folder))}\n{command}"]
        self._cluster.lines.clear()
        self._cluster.start(BOUND_S)

    def read(self, page: Path) -> None:
        """Do what a page says, from its top to its end. Raises AssertionError with the block that failed."""
        for block in blocks(page, "bash", "console", "python"):
            if block.mark in ELSEWHERE:
                continue
            if block.mark == "server":
                self.serve(block)
            else:
                self.paste(block)
            self.ran += 1

    def paste(self, block: Block) -> None:
        shell = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euc"]
        done = subprocess.run(
            [*shell, self._here(block.code)], cwd=self._folder, env=self._environ, capture_output=True, text=True, timeout=BOUND_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
        told = [] if block.shown is None else differences(self._here(block.shown), done.stdout)
        assert not told, "\n".join([block.code, *told])
