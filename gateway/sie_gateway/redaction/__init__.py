"""Redaction of texts: personal data is replaced, and the replacements can be undone.

    text ──┬─► entities of a model (dialects/redact.py) ──┐
           └─► patterns: forms with a check ──────────────┴─► spans: one rule for overlaps ──► replacements: text, map

All files here are pure. No value of a text is part of an error.
"""
