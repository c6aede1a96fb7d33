"""The page: its built files are those that its sources make, and a gateway serves them."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from inprocess import InProcess

from sie_console.routes import BUILT, CONSOLE_FILES

PAGE = Path(__file__).parents[2] / "page"
MAX_BYTES = 300_000  # compressed


def test_the_console_was_built_from_its_sources() -> None:
    """The digest is that of `page/build.mjs`, which needs Node."""
    digest = hashlib.sha256()
    sources = ("src", "../../../sdk-ts/src")  # the client is bundled from its sources
    names = [name for part in sources for name in sorted(f"{part}/{path.name}" for path in (PAGE / part).iterdir())]
    for name in ("package-lock.json", *names):
        digest.update(name.encode() + b"\0" + (PAGE / name).read_bytes() + b"\0")
    assert (BUILT / "sources.sha256").read_text().strip() == digest.hexdigest(), (
        "run `npm run build` in extras/console/page"
    )
    assert (BUILT / "index.html").read_bytes() == (PAGE / "src" / "index.html").read_bytes()


def test_the_console_is_small_and_names_no_other_host() -> None:
    files = [path for path in BUILT.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= MAX_BYTES
    page = (BUILT / "index.html").read_text()
    assert "//" not in page
    assert "<script>" not in page
    assert "<style" not in page


async def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_ROOT_PATH="/sie")
        answer = await gateway.client.get("/sie/")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        plain = (BUILT / "index.html").read_text("utf-8")
        assert answer.text == plain.replace('"console/', '"/sie/console/')
        assert (await gateway.client.get("/sie")).text == answer.text
        head = await gateway.client.head("/sie/")
        assert (head.status_code, head.headers["content-type"]) == (200, answer.headers["content-type"])
        assert head.content == b""
        assert (await (await cluster.gateway()).client.get("/")).text == plain
        assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", answer.text), "no code in the page itself"
        named = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
        assert {name for name in named if not name.startswith("data:")} == {
            f"/sie/console/{name}" for name in CONSOLE_FILES if name != "index.html"
        }, "found below the prefix, whether or not the page is asked for with a final slash"
        for name, kind in CONSOLE_FILES.items():
            path = "/sie/" if name == "index.html" else f"/sie/console/{name}"
            answer = await gateway.client.get(path)
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
            assert not re.search(r"@import|url\((?!data:)|\beval\(|new Function", answer.text), name
        for source in (PAGE / "src").iterdir():
            assert "innerHTML" not in source.read_text("utf-8"), (
                f"{source}: markup in names and texts would take effect"
            )
