"""Write as JSON what the product and docling itself extract from the same files. The Python needs the extra
`documents`.

python extras/models-readers/tests/documents_oracle.py OUT
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from sie_adapter.engine.raw import run_raw
from sie_adapter.loading import certificate
from sie_adapter.loading.loading import Loader
from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import Group, RunBatch
from sie_contracts.wire.messages import Ok, RunOptions
from sie_runtime.feed import read_folder
from sie_store.weights.sources import WeightSources

PAGES = (("Invoice number 17", "Total 12.50"), ("Thank you",))


def pdf(pages: tuple[tuple[str, ...], ...]) -> bytes:
    """Return a PDF with a page for each list of lines, in Helvetica."""
    numbers = [4 + 2 * place for place in range(len(pages))]
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, lines in zip(numbers, pages, strict=True):
        drawn = "BT /F1 14 Tf 72 740 Td 20 TL " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
        resources = "<</Font<</F1 3 0 R>>>>"
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {number + 1} 0 R/Resources{resources}>>"
        )
        objects.append(f"<</Length {len(drawn)}>>stream\n{drawn}\nendstream")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj{body}endobj\n".encode()
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    head = b"xref\n0 %d\n0000000000 65535 f \n" % size
    return out + head + table + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, len(out))


def docx() -> bytes:
    import docx as library

    document = library.Document()
    document.add_heading("Invoice", 1)
    document.add_paragraph("Total 12.50 for Zürich 東京")
    table = document.add_table(2, 2)
    for row, values in enumerate((("item", "price"), ("cat", "3"))):
        for column, value in enumerate(values):
            table.cell(row, column).text = value
    sink = io.BytesIO()
    document.save(sink)
    return sink.getvalue()


def xlsx() -> bytes:
    import openpyxl

    workbook = openpyxl.Workbook()
    for row in (("item", "price"), ("cat", 3)):
        workbook.active.append(row)
    sink = io.BytesIO()
    workbook.save(sink)
    return sink.getvalue()


def pptx() -> bytes:
    import pptx as library

    presentation = library.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[0])
    slide.shapes.title.text = "Quarter"
    sink = io.BytesIO()
    presentation.save(sink)
    return sink.getvalue()


def files() -> dict[str, bytes]:
    """Return the files by name. docling chooses the format by the suffix."""
    return {
        "a.pdf": pdf(PAGES),
        "a.docx": docx(),
        "a.xlsx": xlsx(),
        "a.pptx": pptx(),
        "a.html": b"<html><h1>Invoice</h1><p>Total</p><table><tr><th>a</th></tr><tr><td>1</td></tr></table></html>",
        "a.md": "# Rechnung\n\n- Zürich\n- 東京\n".encode(),
        "a.csv": CSV,
    }


CSV = b"item,price\ncat,3\n"
BROKEN = {
    "broken.pdf": b"%PDF-1.4 nonsense",
    "broken.docx": b"PK\x03\x04nonsense",
    "secret.pdf": b"<html><body>a page</body></html>",
}


def by_docling(contents: dict[str, bytes]) -> dict[str, Any]:
    from docling.datamodel.base_models import DocumentStream, InputFormat
    from docling.datamodel.pipeline_options import NativePdfPipelineOptions
    from docling.document_converter import DocumentConverter, NativePdfFormatOption

    without_images = NativePdfPipelineOptions(generate_page_images=False)
    pdf_option = NativePdfFormatOption(pipeline_options=without_images)
    converter = DocumentConverter(format_options={InputFormat.PDF: pdf_option})
    conversions = {}
    for name, data in contents.items():
        # the tree that docling returns has the name of the file
        result = converter.convert(DocumentStream(name=f"document{Path(name).suffix}", stream=io.BytesIO(data)))
        document = result.document
        conversions[name] = {
            "text": document.export_to_text(),
            "markdown": document.export_to_markdown(),
            "document": document.export_to_dict(),
        }
    return conversions


def by_the_product(contents: dict[str, bytes], folder: Path) -> tuple[list[Any], list[Any]]:
    """Return the results in order, and the ids of the processes that made them."""
    entry = read_folder(packaged_folder() / "models")["docling"]
    loader = Loader(torch.device("cpu"), WeightSources(folder, False), Settings())
    model = loader.load(Catalogue.resolve_profile(entry, "default", entry.id))
    assert isinstance(model.certificate, dict)
    assert certificate.check_files(loader.sources.folder(entry), entry, entry.load) == ()
    documents = [DocumentFile(data, Path(name).suffix[1:]) for name, data in contents.items()]
    rows = len(documents) + 1
    groups = (Group(0, len(documents), RunOptions()), Group(len(documents), rows, RunOptions(parameters={"ocr": True})))
    message = RunBatch(
        "b", entry.id, "extract", bytes(4 * rows), b"", groups, texts=("",) * rows, documents=(*documents, documents[0])
    )
    readings = [
        outcome.data if isinstance(outcome, Ok) else [outcome.error.reason, outcome.error.message]
        for outcome in run_raw(model.reading(None, lambda: False), message).outcomes
    ]
    return readings, list(model.pids)


if __name__ == "__main__":
    out, given = Path(sys.argv[1]), files()
    ours, pids = by_the_product({**given, **BROKEN}, out.parent)
    assert os.getpid() not in pids
    theirs = by_docling(given)
    out.write_text(json.dumps({"ours": ours, "theirs": theirs, "names": [*given, *BROKEN], "pids": len(pids)}))
