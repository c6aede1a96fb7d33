"""Everything that crosses a process boundary of SIE: wire types, names, settings, errors, and the broker they travel
on.
"""

__version__ = "0.1.0"
