"""Parsing of documents by docling, without a model. Only parser processes import this module: docling's C and C++ code
reads files of clients, and a crash of this code must not end the adapter.

    format by content ──► docling's backend for the format ──► DoclingDocument ──► text, Markdown, tree

The text of a PDF is the text in the file, read line by line. A page that is only an image has no text.
"""

from __future__ import annotations

import io
import re
import secrets
from typing import Any

import msgspec
from docling.datamodel.base_models import ConversionStatus, DocumentStream, InputFormat
from docling.datamodel.pipeline_options import NativePdfPipelineOptions
from docling.document_converter import DocumentConverter, NativePdfFormatOption
from docling_core.transforms.serializer.base import SerializationResult
from docling_core.transforms.serializer.markdown import MarkdownDocSerializer
from docling_core.types.doc import DocItem, NodeItem, TableItem

from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import fault
from sie_models_readers.documents.document_formats import format_of
from sie_models_readers.documents.parser_frames import Parsed, ParseJob

MAX_PAGES = 1000
_INPUTS = {
    "pdf": InputFormat.PDF,
    "docx": InputFormat.DOCX,
    "pptx": InputFormat.PPTX,
    "xlsx": InputFormat.XLSX,
    "odt": InputFormat.ODT,
    "ods": InputFormat.ODS,
    "odp": InputFormat.ODP,
    "html": InputFormat.HTML,
    "md": InputFormat.MD,
    "csv": InputFormat.CSV,
}
_READ = (ConversionStatus.SUCCESS, ConversionStatus.PARTIAL_SUCCESS)


class DoclingParser:
    """Parser of documents, for use by one thread. The parser never fetches a resource that a document links to."""

    def __init__(self) -> None:
        native = NativePdfPipelineOptions(parser_threads=1, generate_page_images=False, generate_picture_images=False)
        self._converter = DocumentConverter(
            allowed_formats=list(_INPUTS.values()),
            format_options={InputFormat.PDF: NativePdfFormatOption(pipeline_options=native)},
        )

    def parse(self, job: ParseJob) -> Parsed:
        """Return the content of one document. Raises InvalidInput with the reason `invalid_media` for a document that
        cannot be parsed; the error's message begins with the cause.
        """
        kind = format_of(job.document)
        try:
            return self._parsed(job, kind)
        except InvalidInput:
            raise
        except MemoryError as error:
            raise fault("too_large", "parsing the document needs more memory than a parser process may use") from error
        except Exception as error:  # docling reads untrusted files: a damaged file can make it raise any exception
            raise fault("undecodable", f"the {kind} document is damaged or encrypted") from error

    def _parsed(self, job: ParseJob, kind: str) -> Parsed:
        # docling reads the format from the name of a file; this name is built from the format, never from the client's
        # text
        stream = DocumentStream(name=f"document.{kind}", stream=io.BytesIO(job.document.data))
        result = self._converter.convert(stream, raises_on_error=False, max_num_pages=MAX_PAGES)
        pages = result.input.page_count
        if pages > MAX_PAGES:
            raise fault("too_large", f"the document has {pages} pages, at most {MAX_PAGES} are read")
        if result.status not in _READ:  # docling's messages are not passed on, because they contain paths and digests
            raise fault("undecodable", f"the {kind} document is damaged or encrypted")
        document = result.document
        markdown = document.export_to_markdown()
        return Parsed(
            job.number,
            kind,
            document.export_to_text(),
            markdown,
            msgspec.json.encode(document.export_to_dict()) if job.has_tree else b"",
            len(document.pages),
            result.status is ConversionStatus.SUCCESS,
            _PageMarker(doc=document).page_starts(markdown),
        )


class _PageMarker(MarkdownDocSerializer):  # type: ignore[misc]  # the type checker skips docling
    """Serializer that writes `_mark`, the number of the page and a full stop before the first text of each page."""

    _mark: str = secrets.token_hex(16)
    _page: int = 0
    _is_in_table: bool = False

    def serialize(self, *, item: NodeItem | None = None, **options: Any) -> SerializationResult:
        page = item.prov[0].page_no if isinstance(item, DocItem) and item.prov and not self._is_in_table else 0
        begins_page = page > self._page
        if begins_page:
            self._page = page
        was_in_table, self._is_in_table = self._is_in_table, self._is_in_table or isinstance(item, TableItem)
        result = super().serialize(item=item, **options)
        self._is_in_table = was_in_table
        if not begins_page:
            return result
        return result.model_copy(update={"text": f"{self._mark}{page}.{result.text}"})

    def page_starts(self, markdown: str) -> tuple[tuple[int, int], ...]:
        """Return for each page with text the index of its first code point in `markdown`, and the page's number. Return
        an empty tuple if the serialised text without the marks differs from `markdown`: the indices would be wrong.
        """
        first, *pages = re.split(rf"{self._mark}(\d+)\.", self.serialize().text)
        text, starts = first, []
        for number, page in zip(pages[::2], pages[1::2], strict=True):
            starts.append((len(text), int(number)))
            text += page
        return tuple(starts) if text == markdown else ()
