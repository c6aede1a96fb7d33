"""Names in the path of a URL, such as ids of models."""

from __future__ import annotations

import re
from urllib.parse import quote

# Characters that no name in a path may have, not even escaped, because a proxy may decode the escape: a decoded percent
# sign may begin a further escape, and a backslash may be treated as a slash.
_UNFIT = re.compile(r"[%\\?#\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def quoted(name: str, argument: str) -> str:
    """Return `name`, escaped for the path of a URL. Raises ValueError if `name` is not a string, or if a URL with
    `name` could lead to another route. The error message begins with `argument`.
    """
    if not isinstance(name, str) or _UNFIT.search(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(
            f"{argument}: expected a name without %, \\, ?, # and control characters, and without a part between "
            f"slashes that is empty, . or .., got {str(name)[:80]!a}"
        )
    return quote(name, safe="/:@")
