"""What a credential is let in with."""

from __future__ import annotations

from dataclasses import dataclass

from sie_runtime.keys import NO_LIMITS, Limits


@dataclass(frozen=True)
class Grant:
    """`key` names a credential among others: whose turn, whose quota; empty for all who need none.

    `name` says in metrics who it is: nothing of a token, nor what one could be guessed by.
    """

    key: str = ""
    scopes: frozenset[str] = frozenset()
    limits: Limits = NO_LIMITS
    name: str = "anonymous"


ANYBODY = Grant()
