"""The alias of a migration at the config service: what it is, what it was, and its writes, each for one revision.

document and history ──► Present ──► shadow | flip | back ──► only if nobody wrote meanwhile
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sie_cli.models.service import ConfigServiceClient, WriteOptions, path_of
from sie_cli.refusal import CommandRefused

_Number = Annotated[int, Meta(ge=0)]
_Moment = Annotated[datetime, Meta(tz=True)]
_TARGETS, _SHADOW = re.compile(r"\$\.alias\b"), re.compile(r"\$\.shadow\b")


class AliasChange(Struct, frozen=True):
    """A field that a revision changed."""

    path: str


class AliasRevision(Struct, frozen=True):
    """A revision of an alias, as the config service lists it."""

    revision: _Number
    created_at: _Moment
    operation: str = ""
    changes: tuple[AliasChange, ...] = ()


class _TargetFields(Struct, frozen=True):
    model: str


class _AliasFields(Struct, frozen=True):
    """Document of a model or an alias. `alias` is None of a model."""

    alias: tuple[_TargetFields | str, ...] | None = None
    shadow: _TargetFields | str | None = None


class _RevisionList(Struct, frozen=True):
    revisions: Annotated[tuple[AliasRevision, ...], Meta(min_length=1)]


class _GatewayAck(Struct, frozen=True):
    id: str
    acked: bool


class _AckList(Struct, frozen=True):
    gateways: tuple[_GatewayAck, ...] = ()


class _WrittenRevision(Struct, frozen=True):
    revision: _Number


@dataclass(frozen=True)
class Present:
    """An alias with one target. `history`: its revisions, the newest first."""

    name: str
    target: str
    shadow: str
    revision: int
    history: Sequence[AliasRevision]


class Aliases:
    """`write`: how writes are done, at which cluster."""

    def __init__(self, service: ConfigServiceClient, write: WriteOptions) -> None:
        self._service = service
        self._write = write

    def read(self, name: str) -> Present:
        """Raises CommandRefused for what is no alias, or one of several models."""
        document: _AliasFields = self._service.read(path_of(name), _AliasFields).body
        if document.alias is None:
            raise CommandRefused(
                f"{name} is a model: clients have to ask for an alias, which `sie models alias NAME {name}` makes"
            )
        targets = [_model_of(target) for target in document.alias]
        if len(targets) != 1:
            raise CommandRefused(
                f"{name} stands for {len(targets)} models: a migration is from one model, which `sie models alias "
                f"{name} MODEL` chooses"
            )
        shadow = _model_of(document.shadow) if document.shadow is not None else ""
        history = self._service.read(path_of(name, "/history"), _RevisionList).body.revisions
        return Present(name, targets[0], shadow, history[0].revision, history)

    def shadow(self, alias: Present, model: str, share: float, *, dry_run: bool = False) -> int:
        """Let a model get copies of a share of the requests. Returns the revision. Raises CommandRefused."""
        return self._patch(alias, {"shadow": {"model": model, "share": share}}, dry_run=dry_run)

    def flip(self, alias: Present, model: str, *, dry_run: bool = False) -> int:
        """Let a model answer, without a shadow. Returns the revision. Raises CommandRefused."""
        return self._patch(alias, {"alias": [{"model": model}], "shadow": None}, dry_run=dry_run)

    def back(self, alias: Present, revision: int) -> int:
        """Make an earlier revision the newest again. Returns its new number. Raises CommandRefused."""
        body = msgspec.json.encode({"revision": revision})
        return self._written("POST", path_of(alias.name, "/rollback"), body, self._write_options(alias))

    def _patch(self, alias: Present, change: dict[str, Any], *, dry_run: bool) -> int:
        write = dataclasses.replace(self._write_options(alias), dry_run=dry_run)
        return self._written("PATCH", path_of(alias.name), msgspec.json.encode(change), write)

    def _written(self, method: str, path: str, body: bytes, write: WriteOptions) -> int:
        """Return the revision of a write. Raises CommandRefused."""
        written: _WrittenRevision = self._service.write(method, path, body, how=write, body_type=_WrittenRevision).body
        return written.revision

    def _write_options(self, alias: Present) -> WriteOptions:
        return dataclasses.replace(self._write, if_match=alias.revision)

    def waiting(self, name: str) -> list[str]:
        """The gateways that do not have the newest revision yet. Raises CommandRefused."""
        status: _AckList = self._service.read(path_of(name, "/status"), _AckList).body
        return [gateway.id for gateway in status.gateways if not gateway.acked]


def _model_of(target: _TargetFields | str) -> str:
    return target if isinstance(target, str) else target.model


def _touches(revision: AliasRevision, pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(change.path) for change in revision.changes)


def shadow_since_s(history: Sequence[AliasRevision]) -> float:
    """Return when the present shadow was set, seconds since 1970: by the newest revision that changed it, else the
    first.
    """
    start = next((revision for revision in history if _touches(revision, _SHADOW)), history[-1])
    return start.created_at.timestamp()


def before_flip(history: Sequence[AliasRevision]) -> int:
    """The revision that an alias had before its target was changed last, and before a shadow was set for that. Raises
    Refused where there is none, and where that change was a rollback itself.
    """
    flips = [place for place, revision in enumerate(history) if _touches(revision, _TARGETS)]
    if not flips:
        raise CommandRefused("its target was never changed: there is nothing to go back to")
    flip = history[flips[0]]
    if flip.operation == "rollback":
        raise CommandRefused(
            f"revision {flip.revision} went back already; `sie models history` has all revisions, and "
            "`sie models rollback` makes any of them the newest"
        )
    before = history[flips[0] + 1 :]
    if not before:
        raise CommandRefused("the revisions before its present target are not kept any more")
    return next((revision for revision in before if not _only_shadow(revision)), before[-1]).revision


def _only_shadow(revision: AliasRevision) -> bool:
    return _touches(revision, _SHADOW) and not _touches(revision, _TARGETS)
