"""Names in the path of a URL, such as ids of models."""

from __future__ import annotations

import re
from urllib.parse import quote

# characters that no name may have: a proxy may decode a percent sign again, and treat a backslash as a slash
_UNFIT = re.compile(r"[%\\?#\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def quoted(name: str, argument: str) -> str:
    """Return `name`, escaped for the path of a URL. Raises ValueError if `name` is no text or if a URL with it could
    belong to another route. The error message begins with `argument`.
    """
    if not isinstance(name, str) or _UNFIT.search(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(
            f"{argument}: expected a name without empty parts, . and .. between slashes, and without %, \\, ?, # and "
            f"control characters, got {str(name)[:80]!a}"
        )
    return quote(name, safe="/:@")
