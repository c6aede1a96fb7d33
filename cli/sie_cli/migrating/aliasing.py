"""The alias of a migration at the config service: what it is, what it was, and its writes, each for one revision.

document and history ──► Present ──► shadow | flip | back ──► only if nobody wrote meanwhile
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from sie_cli.models.service import Answer, Service, Write, path_of
from sie_cli.refusal import Refused

_TARGETS, _SHADOW = re.compile(r"\$\.alias\b"), re.compile(r"\$\.shadow\b")


@dataclass(frozen=True)
class Present:
    """An alias with one target. `history`: its revisions, the newest first."""

    name: str
    target: str
    shadow: str
    revision: int
    history: Sequence[dict[str, Any]]


class Aliases:
    """`write`: how writes are done, at which cluster."""

    def __init__(self, service: Service, write: Write) -> None:
        self._service = service
        self._write = write

    def read(self, name: str) -> Present:
        """Raises Refused for what is no alias, or one of several models."""
        answer = self._service.read(path_of(name))
        body = answer.body
        if "alias" not in body:
            raise Refused(
                f"{name} is a model: clients have to ask for an alias, which `sie models alias NAME {name}` makes"
            )
        targets = [each["model"] if isinstance(each, dict) else each for each in body["alias"]]
        if len(targets) != 1:
            raise Refused(
                f"{name} stands for {len(targets)} models: a migration is from one model, which `sie models alias "
                f"{name} MODEL` chooses"
            )
        shadow = body.get("shadow") or {}
        history = self._service.read(path_of(name, "/history")).body["revisions"]
        return Present(name, targets[0], shadow.get("model", ""), history[0]["revision"], history)

    def shadow(self, alias: Present, model: str, share: float, *, dry_run: bool = False) -> int:
        """Let a model get copies of a share of the requests. Returns the revision. Raises Refused."""
        return self._patch(alias, {"shadow": {"model": model, "share": share}}, dry_run=dry_run)

    def flip(self, alias: Present, model: str, *, dry_run: bool = False) -> int:
        """Let a model answer, without a shadow. Returns the revision. Raises Refused."""
        return self._patch(alias, {"alias": [{"model": model}], "shadow": None}, dry_run=dry_run)

    def back(self, alias: Present, revision: int) -> int:
        """Make an earlier revision the newest again. Returns its new number. Raises Refused."""
        body = msgspec.json.encode({"revision": revision})
        answer = self._service.write("POST", path_of(alias.name, "/rollback"), body, asked=self._asked(alias))
        return _revision(answer)

    def _patch(self, alias: Present, change: dict[str, Any], *, dry_run: bool) -> int:
        asked = dataclasses.replace(self._asked(alias), dry_run=dry_run)
        return _revision(self._service.write("PATCH", path_of(alias.name), msgspec.json.encode(change), asked=asked))

    def _asked(self, alias: Present) -> Write:
        return dataclasses.replace(self._write, if_match=alias.revision)

    def waiting(self, name: str) -> list[str]:
        """The gateways that do not have the newest revision yet. Raises Refused."""
        gateways = self._service.read(path_of(name, "/status")).body.get("gateways", [])
        return [str(each["id"]) for each in gateways if not each["acked"]]


def _revision(answer: Answer) -> int:
    return int(answer.body["revision"])


def _touches(revision: dict[str, Any], what: re.Pattern[str]) -> bool:
    return any(what.match(change["path"]) for change in revision.get("changes", ()))


def shadow_since_s(history: Sequence[dict[str, Any]]) -> float:
    """When the present shadow was set, seconds since 1970: by the newest revision that changed it, else the first."""
    found = next((each for each in history if _touches(each, _SHADOW)), history[-1])
    return datetime.fromisoformat(found["created_at"]).timestamp()


def before_flip(history: Sequence[dict[str, Any]]) -> int:
    """The revision that an alias had before its target was changed last, and before a shadow was set for that. Raises
    Refused where there is none, and where that change was a rollback itself.
    """
    flips = [place for place, each in enumerate(history) if _touches(each, _TARGETS)]
    if not flips:
        raise Refused("its target was never changed: there is nothing to go back to")
    flip = history[flips[0]]
    if flip["operation"] == "rollback":
        raise Refused(
            f"revision {flip['revision']} went back already; `sie models history` has all revisions, and "
            "`sie models rollback` makes any of them the newest"
        )
    before = history[flips[0] + 1 :]
    if not before:
        raise Refused("the revisions before its present target are not kept any more")
    return int(next((each for each in before if not _only_shadow(each)), before[-1])["revision"])


def _only_shadow(revision: dict[str, Any]) -> bool:
    return _touches(revision, _SHADOW) and not _touches(revision, _TARGETS)
