"""Detection of a document's format from its content. A text file that is not recognised as HTML has the text format
that the client names (default: Markdown). Parser processes use this module before any other code reads the file.
"""

from __future__ import annotations

import io
import re
import zipfile

from sie_contracts.errors import InvalidInput
from sie_contracts.media.documents import DocumentFile
from sie_contracts.media.media import fault

FORMATS = ("pdf", "docx", "pptx", "xlsx", "odt", "ods", "odp", "html", "md", "csv")
# largest sum, in bytes, of the unpacked sizes that an archive's directory states; `format_of` refuses a larger archive
MAX_UNPACKED_BYTES = 512 << 20
MAX_MEMBERS = 10_000
_TEXTS = {
    "html": "html",
    "htm": "html",
    "xhtml": "html",
    "md": "md",
    "markdown": "md",
    "txt": "md",
    "text": "md",
    "csv": "csv",
}
_PDF = b"%PDF-"
_HEAD = 1024  # bytes at the start of a file that must contain the mark `%PDF-`, or the root element of an HTML page
# The group `(?>` matches an HTML comment. It is atomic, so a comment ends at its first "-->". Otherwise the time to
# match many comments would be exponential.
_HTML = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(?><!--.*?-->\s*)*+<(!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_UNREAD = ((b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Office before 2007"), (b"{\\rtf", "RTF"))
_MARKS = (b"\xef\xbb\xbf",)  # byte order mark of UTF-8
_OFFICE = {"word/document.xml": "docx", "ppt/presentation.xml": "pptx", "xl/workbook.xml": "xlsx"}
_OPEN = {
    b"application/vnd.oasis.opendocument.text": "odt",
    b"application/vnd.oasis.opendocument.spreadsheet": "ods",
    b"application/vnd.oasis.opendocument.presentation": "odp",
}
_READ = ", ".join(FORMATS)


def format_of(document: DocumentFile) -> str:
    """Return the format of a document, one of FORMATS. Raises InvalidInput with the reason `invalid_media` for an empty
    file, for an archive that is damaged or too large, and for a file in another format.
    """
    data, format_name = document.data, document.format
    head = data[:_HEAD]
    if not data:
        raise fault("undecodable", "the document is empty")
    if _PDF in head and not _only_mentions_pdf(document):
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return _of_archive(data)
    for magic, name in _UNREAD:
        if head.startswith(magic):
            raise fault("undecodable", f"the document's format is {name}, which is not supported; supported: {_READ}")
    if format_name in ("", *_TEXTS) and _HTML.match(head.removeprefix(_MARKS[0])):
        return "html"
    if format_name not in ("", *_TEXTS):
        named = f"the request names the format {format_name}, but the content has another format"
        cause = named if format_name in FORMATS else "the format that the request names is not supported"
        raise fault("undecodable", f"{cause}; supported: {_READ}")
    text_format = _TEXTS.get(format_name, "md")
    if text_format != "html" and not _is_text(data):  # HTML need not be UTF-8: a page may declare another encoding
        raise fault("undecodable", f"the content has no supported format and is not UTF-8 text, supported: {_READ}")
    return text_format


def _only_mentions_pdf(document: DocumentFile) -> bool:
    """Return True if a file that has the mark of a PDF is an HTML page, or a text whose format the request names.
    Without a named format, every other file with the mark is a PDF, because a PDF may have other bytes before its mark.
    """
    head = document.data[:_HEAD].removeprefix(_MARKS[0]).lstrip()
    if head.startswith(_PDF) or document.format not in ("", *_TEXTS):
        return False
    return _HTML.match(head) is not None or (document.format in _TEXTS and _is_text(document.data))


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _of_archive(data: bytes) -> str:
    """Return the format of a zip archive, by the names in its directory and the content of its member `mimetype`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = archive.infolist()  # parts with equal names all count, because a parser may read each part
            if len(parts) > MAX_MEMBERS:
                raise fault("too_large", f"the document has {len(parts)} parts, at most {MAX_MEMBERS} are read")
            members = {member.filename: member for member in parts}
            unpacked = sum(member.file_size for member in parts)
            if unpacked > MAX_UNPACKED_BYTES:
                raise fault("too_large", f"the document unpacks to {unpacked} bytes, the limit is {MAX_UNPACKED_BYTES}")
            for name, kind in _OFFICE.items():
                if name in members:
                    return kind
            mimetype = members.get("mimetype")
            if mimetype is not None and mimetype.file_size <= max(map(len, _OPEN)):
                open_format = _OPEN.get(archive.read(mimetype))
                if open_format:
                    return open_format
    except InvalidInput:
        raise
    except Exception as error:  # zipfile also raises the exceptions of each compression library
        raise fault("undecodable", "the document is damaged: it begins like a zip archive but is not one") from error
    raise fault("undecodable", f"the archive has no supported format, supported: {_READ}")
