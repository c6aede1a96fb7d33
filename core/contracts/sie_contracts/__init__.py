"""Contracts between the processes of SIE: wire types, names, settings and errors."""

__version__ = "0.1.0"
