"""Documents parsed by docling, without a model: only processes that parse import this, since the parsers read what
clients sent, in C and C++.

    format by content ──► docling's backend of it ──► DoclingDocument ──► text, Markdown, tree

Of a PDF the text that it has is read, a line after the other. A page that is an image has none.
"""

from __future__ import annotations

import io

import msgspec
from docling.datamodel.base_models import ConversionStatus, DocumentStream, InputFormat
from docling.datamodel.pipeline_options import NativePdfPipelineOptions
from docling.document_converter import DocumentConverter, NativePdfFormatOption

from sie_adapter.documents.document_formats import format_of
from sie_adapter.documents.parser_frames import Parsed, ParseJob
from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import fault

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
    """One converter, for one thread. It fetches nothing that a document names."""

    def __init__(self) -> None:
        """Raises ImportError without docling."""
        native = NativePdfPipelineOptions(parser_threads=1, generate_page_images=False, generate_picture_images=False)
        self._converter = DocumentConverter(
            allowed_formats=list(_INPUTS.values()),
            format_options={InputFormat.PDF: NativePdfFormatOption(pipeline_options=native)},
        )

    def parse(self, job: ParseJob) -> Parsed:
        """Raises InvalidInput, reason invalid_media, whose message begins with the cause."""
        kind = format_of(job.document)
        try:
            return self._parsed(job, kind)
        except InvalidInput:
            raise
        except MemoryError as error:
            raise fault("too_large", "parsing the document takes more memory than its process has") from error
        except Exception as error:  # parsers raise whatever a damaged file makes of their state
            raise fault("undecodable", f"the {kind} document is damaged or encrypted") from error

    def _parsed(self, job: ParseJob, kind: str) -> Parsed:
        # docling goes by the name first, and no file of a client has one here
        stream = DocumentStream(name=f"document.{kind}", stream=io.BytesIO(job.document.data))
        result = self._converter.convert(stream, raises_on_error=False, max_num_pages=MAX_PAGES)
        pages = result.input.page_count
        if pages > MAX_PAGES:
            raise fault("too_large", f"the document has {pages} pages, at most {MAX_PAGES} are read")
        if result.status not in _READ:  # its messages hold paths and digests
            raise fault("undecodable", f"the {kind} document is damaged or encrypted")
        document = result.document
        return Parsed(
            job.number,
            kind,
            document.export_to_text(),
            document.export_to_markdown(),
            msgspec.json.encode(document.export_to_dict()),
            len(document.pages),
            result.status is ConversionStatus.SUCCESS,
        )
