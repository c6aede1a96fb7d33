"""The content of a document decides its format. The format hint of the client counts only for text."""

from __future__ import annotations

import io
import zipfile

import pytest

from sie_contracts.errors import InvalidInput
from sie_contracts.media.documents import DocumentFile
from sie_models_readers.documents import document_formats
from sie_models_readers.documents.document_formats import format_of

ODT = b"application/vnd.oasis.opendocument.text"


def archive(**members: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, data in members.items():
            writer.writestr(name, data)
    return sink.getvalue()


DEFLATED = archive(mimetype=ODT)
DATA = zipfile.sizeFileHeader + len("mimetype")  # the offset of the compressed bytes
BROKEN = DEFLATED[:DATA] + b"\xff" * 6 + DEFLATED[DATA + 6 :]


@pytest.mark.parametrize(
    ("data", "format_hint", "expected"),
    [
        (b"%PDF-1.7 ...", "", "pdf"),
        (b"%PDF-1.7 ...", "docx", "pdf"),
        (b"\r\n junk before %PDF-1.4", "pdf", "pdf"),
        (b"junk before %PDF-1.4", "", "pdf"),
        (b"junk before %PDF-1.4\xe2\xe3", "txt", "pdf"),
        (b"\xef\xbb\xbf %PDF-1.4", "txt", "pdf"),
        (b"A PDF begins with `%PDF-1.7`.", "md", "md"),
        (b"mark,format\n%PDF-,pdf\n", "csv", "csv"),
        (b"<html><p>A PDF begins with %PDF-1.7</p></html>", "", "html"),
        (archive(**{"word/document.xml": b"<w/>"}), "pdf", "docx"),
        (archive(**{"ppt/presentation.xml": b"<p/>"}), "", "pptx"),
        (archive(**{"xl/workbook.xml": b"<x/>"}), "csv", "xlsx"),
        (archive(mimetype=ODT), "", "odt"),
        (b"<html><body>x</body></html>", "", "html"),
        (b"\xef\xbb\xbf  <!DOCTYPE html>\n<p>x", "md", "html"),
        (b"<?xml version='1.0'?><!-- a --><html/>", "txt", "html"),
        (b"<p>a part of a page</p>", "html", "html"),
        (b"<p>caf\xe9</p>", "html", "html"),
        (b"a,b\n1,2\n", "csv", "csv"),
        (b"a,b\n1,2\n", "", "md"),
        ("# Über\n".encode(), "markdown", "md"),
        (b"plain words", "txt", "md"),
        (b"<!-- a --> words --> <html>", "", "md"),
        (b"<!---->" * 146 + b"words", "", "md"),
    ],
    ids=range(24),
)
def test_the_format_of_a_document(data: bytes, format_hint: str, expected: str) -> None:
    assert format_of(DocumentFile(data, format_hint)) == expected


@pytest.mark.parametrize(
    ("data", "format_hint", "says"),
    [
        (b"", "", "undecodable: the document is empty"),
        (b"PK\x03\x04nonsense", "docx", "undecodable: the document is damaged"),
        (archive(**{"a.txt": b"x"}), "docx", "undecodable: the archive has no supported format, supported: pdf, docx"),
        (BROKEN, "odt", "undecodable: the document is damaged"),
        (archive(mimetype=b"application/epub+zip"), "", "undecodable: the archive has no supported format"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1...", "doc", "undecodable: the document's format is Office before 2007"),
        (b"{\\rtf1 x}", "rtf", "undecodable: the document's format is RTF"),
        (b"<html></html>", "pdf", "undecodable: the request names the format pdf, but the content has another"),
        (b"words", "../../etc", "undecodable: the format that the request names is not supported"),
        (b"\x89PNG\r\n\x1a\n", "", "undecodable: the content has no supported format and is not UTF-8 text"),
        (b"a\0b", "csv", "undecodable: the content has no supported format and is not UTF-8 text"),
    ],
    ids=range(11),
)
def test_what_is_no_document_is_refused(data: bytes, format_hint: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        format_of(DocumentFile(data, format_hint))
    assert caught.value.reason == "invalid_media"
    assert caught.value.message.startswith(says)
    assert len(caught.value.message) < 400


def test_an_archive_that_unpacks_to_too_much_is_refused_unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = archive(**{"word/document.xml": bytes(1 << 20)})
    assert len(bomb) < 4096
    assert format_of(DocumentFile(bomb)) == "docx"
    monkeypatch.setattr(document_formats, "MAX_UNPACKED_BYTES", (1 << 20) - 1)
    with pytest.raises(InvalidInput, match="too_large: the document unpacks to 1048576 bytes, the limit is 1048575"):
        format_of(DocumentFile(bomb))
    monkeypatch.setattr(document_formats, "MAX_MEMBERS", 0)
    with pytest.raises(InvalidInput, match="too_large: the document has 1 parts, at most 0 are read"):
        format_of(DocumentFile(bomb))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_parts_of_one_name_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        for _ in range(3):
            written.writestr("word/document.xml", b"x" * 10)
    monkeypatch.setattr(document_formats, "MAX_UNPACKED_BYTES", 29)
    with pytest.raises(InvalidInput, match="unpacks to 30 bytes"):
        format_of(DocumentFile(buffer.getvalue()))
    monkeypatch.setattr(document_formats, "MAX_MEMBERS", 2)
    with pytest.raises(InvalidInput, match="has 3 parts, at most 2"):
        format_of(DocumentFile(buffer.getvalue()))
