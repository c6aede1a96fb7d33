"""The files of the console that the gateway serves are those that its sources make."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "gateway" / "sie_gateway" / "console"
MAX_BYTES = 300_000  # compressed


def test_the_console_was_built_from_its_sources() -> None:
    """The digest is that of `console/build.mjs`, which needs Node."""
    folder = ROOT / "console"
    digest = hashlib.sha256()
    sources = ("src", "../sdk-ts/src")  # the client is bundled from its sources
    names = [name for part in sources for name in sorted(f"{part}/{path.name}" for path in (folder / part).iterdir())]
    for name in ("package-lock.json", *names):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    assert (BUILT / "sources.sha256").read_text().strip() == digest.hexdigest(), "run `npm run build` in console/"
    assert (BUILT / "index.html").read_bytes() == (folder / "src" / "index.html").read_bytes()


def test_the_client_in_the_console_has_the_packages_that_it_is_tested_with() -> None:
    client, console = (json.loads((ROOT / part / "package.json").read_text()) for part in ("sdk-ts", "console"))
    assert client["dependencies"].items() <= console["dependencies"].items()


def test_the_console_is_small_and_names_no_other_host() -> None:
    files = [path for path in BUILT.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= MAX_BYTES
    page = (BUILT / "index.html").read_text()
    assert "//" not in page
    assert "<script>" not in page
    assert "<style" not in page
