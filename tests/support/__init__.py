"""Fixtures that the tests of several folders share; a folder takes them in its conftest.py."""
