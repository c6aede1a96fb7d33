"""Documents of a job: requests to the parser, refused answers, and the number of documents in a shard."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sie_bulk_jobs.datasets.rows import InputRow
from sie_bulk_jobs.gateway import values
from sie_bulk_jobs.gateway.client import Halted, JobClient
from sie_bulk_jobs.gateway.values import SHARD_BYTES, DocumentTexts, document_bounds
from sie_contracts.api.jobs import JobChunkRule
from sie_contracts.errors import InvalidInput
from sie_contracts.media.documents import DocumentFile
from sie_contracts.wire.messages import Failed, Ok, WorkResult
from sie_gateway.inference import chunk_fields
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.results import InferRequest

REFUSED = InvalidInput("document: undecodable", reason="invalid_media").info()


class ParserClient:
    """Client whose parser repeats a file as its Markdown; `answers` has other answers, by the file."""

    def __init__(self, answers: Mapping[bytes, Any] | None = None) -> None:
        self.answers = answers or {}
        self.sent: list[tuple[DocumentFile | None, ...]] = []
        self.running = self.peak_running = 0

    async def outcomes(
        self, spec: str, operation: str, params: Mapping[str, Any], items: Sequence[RequestItem], query: None
    ) -> list[Any]:
        assert (spec, operation, params) == ("org/parser", "extract", {"tree": False})
        self.sent.append(tuple(item.document for item in items))
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return [(WorkResult("id", 0, "w", (), fingerprint="of-parser"), self._outcome(item)) for item in items]

    def _outcome(self, item: RequestItem) -> Ok | Failed:
        assert item.document is not None
        content = {"markdown": item.document.data.decode(), "page_starts": [[0, 1]]}
        answer = self.answers.get(item.document.data, {"data": content})
        return answer if isinstance(answer, Failed) else Ok({}, 0, data=answer)

    async def parsed(self, *files: Any) -> list[InputRow]:
        rows = [InputRow(str(number), file=file) for number, file in enumerate(files)]
        return await DocumentTexts(cast(JobClient, self), "org/parser", "").parsed(rows)


async def test_parsed_sends_equal_files_once_and_those_of_other_formats_apart() -> None:
    client = ParserClient()
    rows = await client.parsed(b"a", "YQ==", "data:text/csv;base64,YQ", {"data": b"a", "format": "csv"}, b"b")
    assert [(row.text, row.page_starts, row.file, row.fault) for row in rows] == [
        (text, [(0, 1)], None, None) for text in "aaaab"
    ]
    sent = [document for documents in client.sent for document in documents]
    assert sorted((document.data, document.format) for document in sent if document) == [
        (b"a", ""),
        (b"a", "csv"),
        (b"b", ""),
    ]


async def test_parsed_gives_each_row_the_fault_of_its_own_document() -> None:
    secret = "secret words"
    answers = {
        b"refused": Failed(REFUSED),
        b"empty": {"data": {"markdown": " \n"}},
        b"long": {"data": {"markdown": "x" * (chunk_fields.MAX_TEXT + 1)}},
        b"odd": {"data": {"text": secret}},
        b"none": None,
    }
    files = [*answers, "?", "https://host/a.pdf", 7, b"good"]
    *bad, good = await ParserClient(answers).parsed(*files)
    assert good.text == "good"
    assert [row.fault.reason if row.fault else "" for row in bad] == [
        "invalid_media",
        "no_text",
        "too_long",
        "",
        "",
        "invalid_media",
        "invalid_media",
        "schema",
    ]
    assert [row.fault.code for row in bad[3:5] if row.fault] == ["INTERNAL_ERROR"] * 2
    assert all(row.text is None and row.file is None for row in bad)
    assert secret not in str(bad)


async def test_parsed_halts_the_job_when_the_parser_is_another_one() -> None:
    row = InputRow("a", file=b"a")
    texts = DocumentTexts(cast(JobClient, ParserClient()), "org/parser", "")
    assert [parsed.text for parsed in await texts.parsed([row])] == ["a"]
    assert texts.fingerprint == "of-parser"
    with pytest.raises(Halted) as caught:
        await DocumentTexts(cast(JobClient, ParserClient()), "org/parser", "of-another").parsed([row])
    assert caught.value.info.code == "MODEL_CHANGED"
    assert caught.value.info.message.startswith("org/parser changed while the job ran: ")


async def test_parsed_has_so_many_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "DOCUMENTS_AT_ONCE", 2)
    client = ParserClient()
    await client.parsed(*(base64.b64encode(b"%d" % number).decode() for number in range(100)))
    assert (client.peak_running, len(client.sent) > 4) == (2, True)


@pytest.mark.parametrize(
    ("outputs", "rule", "rows"),
    [
        ({"dense": 384}, JobChunkRule(256), 256),
        ({"dense": 1024}, JobChunkRule(64), 32),
        ({"multivector": 128}, JobChunkRule(256), 7),
    ],
)
def test_a_shard_of_documents_has_room_for_the_longest_texts(
    outputs: dict[str, int], rule: JobChunkRule, rows: int
) -> None:
    run = SimpleNamespace(outputs=tuple(outputs), dtype="float32", muvera=None, dimensions=None)
    entry = SimpleNamespace(outputs=outputs, max_tokens=512)
    understood = SimpleNamespace(options=SimpleNamespace(run=run), resolved=SimpleNamespace(entry=entry))
    fit = document_bounds(cast(InferRequest, understood), chunk_fields.step_of(rule))
    assert (fit.rows, fit.text_bytes) == (rows, None)
    assert rows * chunk_fields.MAX_TEXT * 4 <= SHARD_BYTES
