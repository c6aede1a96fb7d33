"""Split a row of CSV (RFC 4180) into its fields. Python's csv module is not suitable: its limit of 128 KiB for a field
can only be changed for the whole process, and it accepts quotes that do not match.
"""

from __future__ import annotations

import re

# Possessive repetitions (*+) do not backtrack, so they need no memory for each quote.
_FIELD = re.compile(r'(?:"([^"]*+(?:""[^"]*+)*+)"|([^"\r\n,]*+))(,|$)')


def fields(row: bytes, most: int | None = None) -> tuple[str, ...] | None:
    """Return the fields of a row; None if the row is not UTF-8, or if a quote or a carriage return is misplaced. If the
    row has more than `most` fields, return `most` + 1 fields; the last field may be the whole rest of the row.
    """
    try:
        text = row.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if '"' not in text:
        return None if "\r" in text else tuple(text.split(",", -1 if most is None else most))
    fields, at = [], 0
    while (match := _FIELD.match(text, at)) is not None:
        quoted, bare, comma = match.groups()
        fields.append(bare if quoted is None else quoted.replace('""', '"'))
        at = match.end()
        if most is not None and len(fields) > most:
            return tuple(fields)
        if not comma:
            return tuple(fields) if at == len(text) else None
    return None
