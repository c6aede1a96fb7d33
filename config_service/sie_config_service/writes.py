"""Writes over the API. Each write is a compare-and-set on the model's current revision. If another writer was faster,
the write is repeated.

    request ──► known Idempotency-Key? its reply
            └─► current model ──► If-Match? ──► edited, checked ──► one batch ──► deltas
                   ▲                                                    │
                   └────────────── another writer was faster ◄──────────┘

Each attempt computes the new document from the current model, so that no write of another writer is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sie_broker.record import retry_conflicts
from sie_config_service.aliases import GuardedWrite, guard
from sie_config_service.documents import ParsedDocument, checked, difference, merged, narrowed
from sie_config_service.mirror import HeldModel, bundles_of
from sie_config_service.store import RESTORE, CatalogueChange, CatalogueStore, RecordedReply, digest_of, normalised
from sie_contracts.errors import (
    ContentConflict,
    IdempotencyMismatch,
    ModelNotFound,
    PayloadTooLarge,
    PermissionDenied,
    QueueUnavailable,
    ValidationFailed,
    faulty,
)
from sie_contracts.models.aliases import Alias, is_alias
from sie_contracts.models.bundles import BundleEntry, lacking, serving
from sie_contracts.models.entries import ModelEntry, is_id
from sie_contracts.models.public_models import is_public, translated
from sie_contracts.models.trust import Trust

# largest number of ids of models and aliases; removed ones count, because the bucket keeps their history. A write of a
# further id is refused
MAX_IDS = 50_000
MAX_ENTRY_BYTES = 256 << 10  # largest size of an entry in bytes; small, as the bucket keeps up to 100 revisions of each
WRITE_S = 10.0  # seconds after which an unfinished write fails, including its wait for earlier writes of this replica
# operations that can create a model or write a removed one; their If-Match is checked even if the model does not exist
_FROM_NOTHING = ("create", "rollback", RESTORE)
_logger = logging.getLogger("sie.config")

Edit = Callable[[HeldModel], Awaitable[dict[str, Any] | None]]
"""Function that returns the new entry for a stored model, None to remove the model."""


@dataclass(frozen=True)
class WriteRequest:
    """Write of a model. `request`: digest of the HTTP request, to recognise a repetition. `key`: the Idempotency-Key.
    `if_match`: the revision that the model must have.
    """

    operation: str
    model: str
    edit: Edit
    request: str = ""
    key: str = ""
    if_match: int | None = None
    dry_run: bool = False
    profiles: Collection[str] | None = None  # names of the profiles that the write changes; None: all
    force: bool = False  # write even if an alias then becomes invalid
    author: str = ""
    note: str = ""  # why the config service writes by itself; empty for a request over the API
    source: str = "api"
    warnings: tuple[str, ...] = ()  # warnings for the reply: ignored fields of the document, with reasons


@dataclass(frozen=True)
class WriteReply:
    """Reply to a write. `created`: the operation "create" added a model or profiles, or with `dry_run`, would have
    added them. `replayed`: this is the reply to an earlier write with the same Idempotency-Key.
    """

    body: dict[str, Any]
    created: bool = False
    replayed: bool = False


class CatalogueWriter:
    """Writer of one replica of the config service. It runs one write at a time. If two replicas write the same model,
    compare-and-set lets one write succeed.
    """

    def __init__(self, store: CatalogueStore, check: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """`check` raises ValidationFailed for an entry that no worker could load."""
        self._store = store
        self._check = check
        self._lock = asyncio.Lock()
        self.id = f"sie-config-{secrets.token_hex(4)}"

    async def write(self, request: WriteRequest) -> WriteReply:
        """Run one write and return its reply. Raises ModelNotFound, ContentConflict, ValidationFailed,
        PermissionDenied, PayloadTooLarge, IdempotencyMismatch, QueueUnavailable, NotReady, BrokerError.
        """
        try:
            async with asyncio.timeout(WRITE_S), self._lock:
                return await retry_conflicts(lambda: self._attempt(request), attempts=None)
        except TimeoutError:
            message = (
                f"the write was not done within {WRITE_S:g} s; retry it with the same Idempotency-Key, because it may "
                "have been stored"
            )
            raise QueueUnavailable(message) from None

    async def _attempt(self, request: WriteRequest) -> WriteReply:
        store = self._store
        key = digest_of(request.key.encode()) if request.key else ""
        slot = await store.slot(key) if key else None
        if slot is not None and (recorded := slot.find(key, time.time())) is not None:
            if recorded.request != request.request:
                message = "this Idempotency-Key was used for another request; a new write needs a new key"
                raise IdempotencyMismatch(message, param="Idempotency-Key")
            await store.copy_held(await store.held(request.model))
            return WriteReply(recorded.body, replayed=True)
        held = await store.held(request.model)
        if (
            request.if_match is not None
            and request.if_match != held.revision
            and (held.entry is not None or request.operation in _FROM_NOTHING)
        ):
            raise await self._stale(request.model, held, request.if_match)
        entry = await request.edit(held)
        changes = held.entry != entry
        if changes and entry is not None:
            await self._check_bounds(request.model, entry)
            await self._check(entry)
        guarded = await self._guarded(request, held, entry) if changes else GuardedWrite()
        body = self._body(request, held, entry, held.revision + changes, await store.bundles()) | guarded.reply_fields
        created = bool(body["created_profiles"]) and request.operation == "create"
        if request.dry_run:
            return WriteReply(body, created)
        reply = None if slot is None else slot.with_reply(RecordedReply(key, request.request, time.time(), body))
        if changes:
            sent, expected = await store.write(
                [
                    CatalogueChange(
                        request.model, held, entry, request.source, request.operation, request.author, request.note
                    )
                ],
                reply,
                guarded.index,
            )
            if sent < expected:
                body = {
                    **body,
                    "warnings": [*body["warnings"], "nats_publish_partial" if sent else "nats_publish_failed"],
                }
            _logger.info("%s of %s: revision %d", request.operation, request.model, held.revision + 1)
        else:
            await store.copy_held(held)  # the earlier write of this revision may have failed before it wrote the copy
            if reply is not None:
                await store.remember(reply)
        return WriteReply(body, created)

    async def _guarded(self, request: WriteRequest, held: HeldModel, entry: dict[str, Any] | None) -> GuardedWrite:
        index, read = await self._store.alias_index(), await self._store.snapshot()
        return await guard(index, read, self._store.catalogue, request.model, held, entry, force=request.force)

    async def _check_bounds(self, model: str, entry: dict[str, Any]) -> None:
        if (size := len(msgspec.json.encode(entry))) > MAX_ENTRY_BYTES:
            message = f"{model} has {size} bytes, the limit is {MAX_ENTRY_BYTES}: move profiles to another model"
            raise PayloadTooLarge(message, param="body", extras={"limit": MAX_ENTRY_BYTES})
        ids = (await self._store.snapshot()).held
        if model not in ids and len(ids) >= MAX_IDS:
            message = f"the catalogue has {len(ids)} ids, the limit is {MAX_IDS}: use the id of a removed model"
            raise ContentConflict(message, param="id", extras={"limit": MAX_IDS})

    def _body(
        self,
        request: WriteRequest,
        held: HeldModel,
        entry: dict[str, Any] | None,
        revision: int,
        bundles: Mapping[str, BundleEntry],
    ) -> dict[str, Any]:
        before, after = (profiles_of(entry_state) for entry_state in (held.entry, entry))
        named = after if request.profiles is None else request.profiles
        routable = [] if entry is None else list(bundles_of(bundles, entry))
        return {
            "model_id": request.model,
            "revision": revision,
            "created_profiles": [name for name in after if name not in before],
            "existing_profiles_skipped": [name for name in named if name in before and after[name] == before[name]],
            "warnings": list(request.warnings),
            "unchanged": held.entry == entry,
            "routable_bundles_by_profile": dict.fromkeys(after, routable),
            "router_id": self.id,
        }

    async def _stale(self, model: str, held: HeldModel, expected: int) -> ContentConflict:
        """Return the error for an outdated If-Match. Its `diff` has the changes since the revision in If-Match, and is
        empty if that revision is no longer stored.
        """
        base = await self._store.revision(model, expected)
        return ContentConflict(
            f"{model} is at revision {held.revision}, not {expected}; read it again and repeat the change",
            param="If-Match",
            extras={"revision": held.revision, "diff": [] if base is None else difference(base.entry, held.entry)},
        )


def profiles_of(entry: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of an entry by profile. Fields outside of `profiles` belong to the profile `default`."""
    if entry is None:
        return {}
    return {"default": {key: value for key, value in entry.items() if key != "profiles"}, **entry.get("profiles", {})}


class Edits:
    """Factory of edits: functions that compute a model's new document from its stored document.

    The edits accept only documents that pass `checked`. A model must also have a bundle that serves it, and its code
    and paths must be allowed.
    """

    def __init__(self, store: CatalogueStore, bundles: Mapping[str, BundleEntry], trust: Trust) -> None:
        self._store = store
        self._bundles = bundles
        self._trust = trust

    def entry(self, raw: Any, document: ParsedDocument) -> dict[str, Any]:
        """Check a document, and return it in its stored form. Raises ValidationFailed, PermissionDenied."""
        return normalised(self._allowed(self._routable(checked(raw, document), document)))

    def _allowed(self, entry: ModelEntry | Alias) -> ModelEntry | Alias:
        refused = self._trust.refused(entry, is_here=False) if isinstance(entry, ModelEntry) else None
        if refused is not None:
            raise PermissionDenied(refused.message, reason=refused.reason, param=refused.loc)
        return entry

    def _routable(self, entry: ModelEntry | Alias, document: ParsedDocument) -> ModelEntry | Alias:
        if isinstance(entry, ModelEntry) and not serving(self._bundles, entry.family, entry.bundle):
            loc, why = lacking(self._bundles, entry.family, entry.bundle)
            raise faulty(loc, why, document.line(loc))
        return entry

    def create(self, desired: dict[str, Any]) -> Edit:
        """Return an edit that adds a model, or adds profiles to an existing model. The edit raises ContentConflict if
        the model already has one of these profiles with different fields.
        """

        async def edit(held: HeldModel) -> dict[str, Any]:
            if held.entry is None:
                return desired
            before, added = profiles_of(held.entry), profiles_of(desired)
            differing = [name for name in added if name in before and added[name] != before[name]]
            if differing:
                present = {key: value for key, value in held.entry.items() if key != "profiles"}
                present["profiles"] = {name: before[name] for name in added if name != "default" and name in before}
                merged = {**desired, "profiles": desired.get("profiles", {})}
                raise ContentConflict(
                    f"{desired['id']} already has a different profile {', '.join(differing)}; POST only adds, "
                    "PUT replaces, PATCH changes",
                    extras={"revision": held.revision, "diff": difference(present, merged), "profiles": differing},
                )
            profiles = {**held.entry.get("profiles", {}), **desired.get("profiles", {})}
            return {**held.entry, "profiles": profiles} if profiles else held.entry

        return edit

    async def public(self, document: ParsedDocument, model: str = "") -> tuple[ParsedDocument, tuple[str, ...]]:
        """Translate a model file of the open-source SIE project into a document of this catalogue. Return the document,
        and the ignored fields with the reasons. `model`: id of the model if the file has no id. A document in another
        format is returned unchanged. Raises ValidationFailed.
        """
        if not is_public(document.value):
            return document, ()
        name = document.value.get("sie_id", model)
        present = (await self._store.held(name)).entry if isinstance(name, str) and is_id(name) else None
        return self._translated(document, model, present)

    @staticmethod
    def _translated(
        document: ParsedDocument, model: str, present: dict[str, Any] | None
    ) -> tuple[ParsedDocument, tuple[str, ...]]:
        own = None if present is None or is_alias(present) else present
        try:
            translation = translated(document.value, own)
        except ValidationFailed as error:
            (fault,) = error.extras["errors"]
            loc = narrowed(document.value, fault["loc"], lambda trial: translated(trial, own))
            raise faulty(loc, fault["message"], document.line(loc)) from None
        return ParsedDocument({"id": model, **translation.entry}, document.node), translation.ignored

    def put(self, model: str, document: ParsedDocument, sent: ParsedDocument) -> Edit:
        """Return an edit that replaces a model by `document`. If `sent`, the document of the request, is a model file
        of the open-source SIE project, the edit translates `sent` again, with the values that the stored model has at
        the time of the write.
        """

        def desired(document: ParsedDocument) -> dict[str, Any]:
            raw = {"id": model, **document.value} if isinstance(document.value, dict) else document.value
            return self._same(model, self.entry(raw, document), document)

        first = desired(document)

        async def edit(held: HeldModel) -> dict[str, Any]:
            present = await self._present(model, held)
            return desired(self._translated(sent, model, present)[0]) if is_public(sent.value) else first

        return edit

    def patch(self, model: str, document: ParsedDocument) -> Edit:
        if not isinstance(document.value, dict):
            raise faulty("$", f"expected a map, got {type(document.value).__name__}", document.line("$"))

        async def edit(held: HeldModel) -> dict[str, Any]:
            return self._same(
                model, self.entry(merged(await self._present(model, held), document.value), document), document
            )

        return edit

    def delete(self, model: str) -> Edit:
        async def edit(held: HeldModel) -> None:
            if held.stored is None:  # an error only if the model never existed; a second removal is no error
                raise await self._store.not_found(model)

        return edit

    def rollback(self, model: str, document: ParsedDocument) -> Edit:
        value = document.value
        target = value.get("revision") if isinstance(value, dict) else None
        if (
            not isinstance(value, dict)
            or value.keys() != {"revision"}
            or not isinstance(target, int)
            or isinstance(target, bool)
        ):
            message = "expected {revision: N} and nothing else, where N is the number of a revision that /history lists"
            raise faulty("$.revision", message, document.line("$"))

        async def edit(held: HeldModel) -> dict[str, Any]:
            if held.stored is None:
                raise await self._store.not_found(model)
            document = await self._store.revision(model, target)
            if document is None:
                revisions = [revision.revision for revision in await self._store.history(model)]
                raise ModelNotFound(
                    f"{model} has no revision {target}; the stored revisions are {', '.join(map(str, revisions[:20]))}",
                    reason="revision_not_found",
                    param="revision",
                    extras={"revisions": revisions},
                )
            if document.entry is None:
                raise faulty(
                    "$.revision",
                    f"revision {target} is a removal: DELETE the model, or roll back to an earlier revision",
                )
            return self.entry(document.entry, ParsedDocument(None))

        return edit

    @staticmethod
    def _same(model: str, entry: dict[str, Any], document: ParsedDocument) -> dict[str, Any]:
        if entry["id"] != model:
            raise faulty("$.id", f"expected {model!r}, the id in the path, got {entry['id']!r}", document.line("$.id"))
        return entry

    async def _present(self, model: str, held: HeldModel) -> dict[str, Any]:
        if held.entry is None:
            raise await self._store.not_found(model)
        return held.entry
