"""Write the tables of docs/errors.md, from the error tree, the shape of TEI's errors, the classes of our client and
the fields of each family.

python tests/errors_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from sie_client.errors import codes
from sie_contracts.errors import (
    FAMILIES,
    ErrorFormat,
    SIEError,
    catalogue,
    each_error,
    envelope,
)
from sie_gateway.http.routes import ROUTES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
# Errors of writes of configurations, which only the config service serves.
CONFIG_ONLY = ("VALIDATION_ERROR",)


# of the core, then of plug-ins
FORMATS = FAMILIES | {
    shape.name: shape for route in ROUTES for shape in (route.shape, *route.shapes) if isinstance(shape, ErrorFormat)
}


def _row(error: SIEError) -> str:
    status, body = FORMATS["tei"](error, "", None)
    retry = f"{error.retry_after_s}" if error.retryable else "–"
    kind = envelope(error, "")["error"]["type"]
    when = " ".join((type(error).__doc__ or "").partition("\n\n")[0].split())
    when = f"{when} Only from the config service." if error.code in CONFIG_ONLY else when
    tei_cell = f"{status} `{body['error_type']}`"
    return (
        f"| `{error.code}` | {error.status} | {retry} | `{kind}` | {tei_cell} | `{codes()[error.code].__name__}` | "
        f"{when} |"
    )


def table() -> str:
    """Return the table of the codes: one row for each status, in the order of the classes."""
    head = "| code | status | `Retry-After` | type | at TEI routes | raised by our client | when |"
    examples = {(error.code, error.status): error for error in each_error()}
    order = [leaf.code for leaf in catalogue()]
    rows = sorted(examples.values(), key=lambda error: (order.index(error.code), error.status))
    return "\n".join([head, "|---" * 7 + "|", *map(_row, rows)])


SERVED = {
    "native": "all that are not named below, and where no route is known",
    "openai": "`/v1/embeddings`, `/embeddings`",
    "jina": "`/v1/rerank`",
    "cohere": "`/v1/embed`, `/v2/embed`, `/v2/rerank`",
    "voyage": "`/v1/contextualizedembeddings`, and `/v1/embeddings` and the reranks, where the body has `truncation`",
    "infinity": "`/rerank`, `/classify`",
    "tei": "those of Text Embeddings Inference, `/tei/...`, and `/rerank` with `texts`",
    "ollama": "those of Ollama, `/api/...`",
}
OWN_NAME = "TEI's name of the error"
HOLDS = {
    "all": "everything, as a map",
    "code and message": "code and message, as a map",
    "message": "the message",
    "code": "the code",
    "request id": "the id of the request",
}


def families() -> str:
    """Return the table of the fields of an error's body at the routes of each family, and of their readers."""
    rows = [
        f"| {f'{family.name}: {SERVED[family.name]}' if not number else ''} | `{member.name}` | "
        f"{OWN_NAME if callable(member.holds) else HOLDS[member.holds]} | {member.reader} |"
        for family in FORMATS.values()
        for number, member in enumerate(family.members)
    ]
    return "\n".join(["| routes | member | holds | read by |", "|---" * 4 + "|", *rows])


def reasons() -> dict[str, set[str]]:
    """Return every reason in the source code, with the codes of the errors that have it."""
    names = {leaf.__name__: leaf.code for leaf in catalogue()}
    call = rf"\b(?:{'|'.join(names)})(?:\.at)?\("
    pattern = re.compile(rf'({call})(?:(?!\braise |\breturn |{call}).){{0,500}}?reason="([a-z_]+)"', re.DOTALL)
    codes_by_reason: dict[str, set[str]] = {}
    own = [ROOT / folder for folder in ("core", "gateway", "sidecar", "adapter")]
    for folder in (*own, *ROOT.glob("extras/*/sie_*")):
        for file in folder.rglob("*.py"):
            for name, reason in pattern.findall(file.read_text("utf-8")):
                codes_by_reason.setdefault(reason, set()).add(names[re.split(r"\W", name)[0]])
    return codes_by_reason


def page(old: str) -> str:
    """Return the page with tables from the present code."""
    for name, content in (("codes", table()), ("families", families())):
        before, start, rest = old.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- /{name} -->")
        old = f"{before}{start}{content}{end}{after}"
    return old


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
