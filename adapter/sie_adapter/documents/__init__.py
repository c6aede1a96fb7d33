"""Parsing of documents, by Docling in separate processes."""
