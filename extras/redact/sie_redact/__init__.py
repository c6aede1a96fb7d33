"""Redaction of texts: personal data is replaced, and the replacements can be undone.

    text ──┬─► entities of a model (redact.py) ──┐
           └─► patterns: kinds with a fixed form ─────────┴─► spans: without overlaps ──► replacements: text, map

No function here does I/O. No error contains a part of a text.
"""
