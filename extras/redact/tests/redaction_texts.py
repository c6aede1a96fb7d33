"""Random texts for redaction: emoji, combining marks, right-to-left parts, characters beyond 16 bits and values that
patterns find, in any order and without spaces between them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sie_contracts.wire.messages import Ok
from sie_redact import redact
from sie_redact.redact import RedactionRules

CARD, IBAN, EMAIL, IPV4, IPV6, PHONE = (
    "4111 1111 1111 1111",
    "GB82 WEST 1234 5698 7654 32",
    "ada@example.org",
    "203.0.113.7",
    "2001:db8::1:7",
    "+44 20 8366 1177",
)
VALUES = {"card_number": CARD, "iban": IBAN, "email": EMAIL, "ip_address": IPV4, "phone_number": PHONE}
_PIECES = (
    *VALUES.values(),
    IPV6,
    "Ada",
    "Zoë",
    "e\u0301",
    "\u0301\u0308",
    "क\u094dषि",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
    "\ufe0f",
    "𝔄𝔡𝔞",
    "\u202eשלום\u202c",
    "مرحبا ٠١٢٣",
    "[PERSON_1]",
    "*****",
    "\r\n",
    "\x00",
    "\t",
    " ",
    ".",
    "@",
    "+",
    "1",
    "\ufeff",
    "中文",
)


def random_text(chance: random.Random) -> str:
    return "".join(chance.choices(_PIECES, k=chance.randrange(1, 12)))


def random_entities(chance: random.Random, text: str) -> list[dict[str, Any]]:
    """Return entities as a model extracts them, with any spans: nested, overlapping, equal and empty ones too."""
    entities = []
    for _ in range(chance.randrange(6)):
        start, end = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
        label = chance.choice(("person", "Place", "E-Mail", "שם"))
        entities.append({"label": label, "score": chance.random(), "start": start, "end": end, "text": text[start:end]})
    return entities


def redacted_slot(text: str, entities: Sequence[dict[str, Any]], rules: RedactionRules) -> dict[str, Any]:
    """Return the redacted slot of a text in which the model found these entities."""
    return redact._redacted(text, [Ok({}, data={"entities": list(entities)})], "items[0]", rules)
