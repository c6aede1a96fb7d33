"""Rows of this extra in the tables of routes (`of_extras`)."""

DOCUMENTED = """
    infer  POST /v1/redact/org/name
"""
SILENT = """
    POST   /v1/redact/{model:path}
"""
