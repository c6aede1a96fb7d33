"""Rows of this extra in the tables of routes (`of_extras`)."""

DOCUMENTED = """
    admin  GET /v1/cache
    admin  POST /v1/cache/erase
"""
SILENT = """
    GET    /v1/cache
    POST   /v1/cache/erase
"""
