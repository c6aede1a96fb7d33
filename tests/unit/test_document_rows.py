"""Documents from the item of a request to the adapter: refusals of inputs, and costs."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sie_adapter.engine.raw import run_raw
from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InternalFailure, InvalidInput
from sie_contracts.media import documents
from sie_contracts.media.documents import DocumentFile, DocumentLimits
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.wire.ipc import Group, Rows, RunBatch
from sie_contracts.wire.messages import Input, Ok, RunOptions
from sie_gateway.inference import body as bodies
from sie_gateway.inference.runner import ChunkLimits, plan
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import BatchPart, ModelTokenizer, WorkItemInput, to_batch

LAYOUT = Rows("raw", documents=DocumentLimits(1 << 20))
FILE = b"%PDF-1.7 a file"


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "river": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModelTokenizer(words.to_str().encode(), 16)


def work(*inputs: Input, query: Input | None = None) -> WorkItemInput:
    return WorkItemInput(inputs, query, RunOptions())


# the gateway


@pytest.mark.parametrize(
    ("form", "file_format"),
    [
        (FILE, ""),
        (base64.b64encode(FILE).decode(), ""),
        (f"data:application/pdf;base64,{base64.b64encode(FILE).decode()}", ""),
        ({"data": FILE, "format": ".PDF"}, "pdf"),
        ({"data": base64.b64encode(FILE).decode(), "format": None}, ""),
    ],
    ids=range(5),
)
def test_every_form_of_a_document_gives_the_same_bytes_and_what_the_client_says_of_them(
    form: Any, file_format: str
) -> None:
    (item,) = bodies.items({"items": [{"document": form}]}, limit=1)
    assert (item.document, item.modalities, item.is_empty) == (DocumentFile(FILE, file_format), ("document",), False)
    assert (item.size, item.file_bytes) == (len(FILE), len(FILE))


@pytest.mark.parametrize(
    ("form", "reason", "param"),
    [
        ("https://host/a.pdf", "invalid_media", "items[0].document"),
        ({"nd": True, "data": b"x"}, "schema", "items[0].document"),
        ([FILE], "schema", "items[0].document"),
        ({"data": FILE, "format": 7}, "schema", "items[0].document.format"),
    ],
    ids=range(4),
)
def test_a_value_that_is_no_document_fails_the_request_and_names_its_place(form: Any, reason: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.items({"items": [{"document": form}]}, limit=1)
    assert (caught.value.reason, caught.value.param) == (reason, param)
    assert not {"image", "sound"} & set(caught.value.message.split())


def test_documents_are_split_by_what_their_bytes_cost() -> None:
    entry = ModelEntry("org/parser", Weights(path="x"), "docling", {"data": 0}, 512, inputs=("document",))
    inputs = bodies.items({"items": [{"document": bytes(size)} for size in (100, 64_000, 640_000, 100)]}, limit=4)
    limits = ChunkLimits(2000, 8 << 20, 8 << 20)
    chunks, size = plan(inputs, None, "extract", entry, RunOptions(), limits)
    assert size == 704_200
    assert [(chunk.start, chunk.stop, chunk.cost) for chunk in chunks] == [
        (0, 2, documents.MIN_TOKENS + 1000 + 4),  # and the special tokens of two empty texts
        (2, 3, 10_002),
        (3, 4, documents.MIN_TOKENS + 2),
    ]


# the sidecar


def test_an_input_with_a_document_is_a_row_that_costs_its_bytes(tokenizer: ModelTokenizer) -> None:
    large, small = DocumentFile(bytes(64_000)), DocumentFile(b"a,b", "csv")
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [work(Input(document=large), Input(document=small), Input("river"))])
    assert [(row.cost, row.media_bytes, row.document) for row in work_rows.rows] == [
        (1000, 64_000, large),
        (documents.MIN_TOKENS, 3, small),
        (1, 0, None),
    ]


@pytest.mark.parametrize(
    ("layout", "refused_input", "reason", "says"),
    [
        (
            Rows("raw"),
            Input(document=DocumentFile(FILE)),
            "unsupported_modality",
            "document: the model accepts no documents here",
        ),
        (
            Rows(),
            Input(document=DocumentFile(FILE)),
            "unsupported_modality",
            "document: the model accepts no documents here",
        ),
        (LAYOUT, Input(document=DocumentFile(FILE), images=(b"x",)), "unsupported_modality", "beside images"),
        (LAYOUT, Input(document=DocumentFile(FILE), audio=b"x"), "unsupported_modality", "beside audio"),
        (
            LAYOUT,
            Input(document=DocumentFile(bytes((1 << 20) + 1))),
            "invalid_media",
            "document: too_large: the document has 1048577 bytes, at most 1048576 are read",
        ),
    ],
    ids=range(5),
)
def test_documents_that_cannot_be_run_are_refused_for_their_input_alone(
    tokenizer: ModelTokenizer, layout: Rows, refused_input: Input, reason: str, says: str
) -> None:
    (work_rows,) = layouts.make(tokenizer, layout, [work(refused_input, Input("river"))])
    assert list(work_rows.unfit) == [0]
    assert (work_rows.unfit[0].reason, work_rows.unfit[0].param) == (reason, "document")
    assert says in work_rows.unfit[0].message
    assert work_rows.rows[0].document is None


# the adapter


class Parser:
    """Model that returns the text of each input, and the size and format of its document."""

    rows: ClassVar[dict[str, Rows]] = {"extract": LAYOUT}

    def extract(
        self, texts: tuple[str, ...], options: list[ExtractOptions], files: list[DocumentFile | None]
    ) -> list[dict[str, Any]]:
        return [
            {
                "data": {
                    "text": text,
                    "bytes": len(document.data) if document else -1,
                    "format": document.format if document else "",
                }
            }
            for text, document in zip(texts, files, strict=True)
        ]


def test_the_files_of_a_batch_reach_the_model_in_their_places(tokenizer: ModelTokenizer) -> None:
    items = [
        work(Input(document=DocumentFile(b"a,b", "csv")), Input("river")),
        work(Input(document=DocumentFile(FILE))),
    ]
    row_sets = layouts.make(tokenizer, LAYOUT, items)
    parts = [BatchPart(work_rows.rows, item) for work_rows, item in zip(row_sets, items, strict=True)]
    message = to_batch("b", "org/parser", "extract", "raw", parts)
    outcomes = run_raw(Parser(), message).outcomes
    assert [outcome.data["data"] for outcome in outcomes if isinstance(outcome, Ok)] == [
        {"text": "", "bytes": 3, "format": "csv"},
        {"text": "river", "bytes": -1, "format": ""},
        {"text": "", "bytes": len(FILE), "format": ""},
    ]


def test_a_parsed_document_counts_as_tokens_by_its_bytes(tokenizer: ModelTokenizer) -> None:
    large = DocumentFile(FILE * 4000)
    item = work(Input(document=large), Input("river"), Input(document=DocumentFile(FILE)))
    (work_rows,) = layouts.make(tokenizer, LAYOUT, [item])
    message = to_batch("b", "org/parser", "extract", "raw", [BatchPart(work_rows.rows, item)])
    outcomes = run_raw(Parser(), message).outcomes
    tokens = [outcome.tokens for outcome in outcomes if isinstance(outcome, Ok)]
    assert tokens == [documents.cost(len(large.data)), 1, documents.MIN_TOKENS]


def test_a_batch_whose_documents_do_not_belong_to_its_rows_is_refused() -> None:
    message = RunBatch(
        "b", "org/parser", "extract", bytes(8), b"", (Group(0, 2),), texts=("", ""), documents=(DocumentFile(FILE),)
    )
    with pytest.raises(InternalFailure) as caught:
        run_raw(Parser(), message)
    assert caught.value.reason == "malformed_batch"
