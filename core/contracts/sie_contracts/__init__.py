"""Contracts between the processes of SIE: wire types, names, settings, errors, and the catalogue of models with its
resolution. No module opens a socket.
"""

__version__ = "0.1.0"
