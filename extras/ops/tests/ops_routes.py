"""Rows of this extra in the tables of routes (`of_extras`)."""

DOCUMENTED = """
    admin  GET /v1/doctor
"""
SILENT = """
    GET    /v1/doctor
"""
