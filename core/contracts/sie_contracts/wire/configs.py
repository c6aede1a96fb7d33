"""Messages and HTTP replies that carry the catalogue from the config service to its readers.

    config service            ──ConfigDelta, over NATS───────────────► gateways, sidecars
    config service            ──ConfigExport, ConfigEpoch, over HTTP─► gateways, sidecars
    config service, gateways  ──replies of /v1/configs───────────────► clients

An epoch is the version of the whole catalogue: `created:number`, the creation time of the catalogue's bucket and the
number of the last write. The rules for changes to the structs are in `wire.messages`. The config service and the
gateways use the functions of this module for replies to reads of `/v1/configs`, so their replies are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from sie_contracts import plain
from sie_contracts.errors import InvalidInput, NotFound, SIEError, envelope
from sie_contracts.models import bundles as bundling
from sie_contracts.models.aliases import is_alias
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import tasks_of
from sie_contracts.names import did_you_mean
from sie_contracts.wire.heartbeats import Heartbeat


class ConfigDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag="delta/1"):
    """Write to the catalogue. The config service stores the write, then sends a delta to the readers of each bundle
    that the write changed. `entry` is None if the write removed the model.

    A gateway or sidecar applies the delta if its catalogue has the epoch `previous`. `since`: epoch of the last earlier
    write that changed the bundle; empty means `previous`. A reader of only this bundle may also apply the delta at any
    epoch from `since` to `previous`, because no write between them changed the bundle.
    """

    producer: str
    previous: str
    epoch: str
    model: str
    revision: int
    entry: dict[str, Any] | None = None
    since: str = ""


class ConfigModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model in an export of the catalogue. `written`: number of the write that created this revision; 0: unknown."""

    model_id: str
    model_config: dict[str, Any]
    revision: int = 0
    affected_bundles: tuple[str, ...] = ()
    raw_yaml: str = ""
    written: int = 0


class ConfigEpoch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The present epoch of the catalogue. `bundles`: by bundle, the epoch of the last write of its models, if known."""

    epoch: str
    bundles: dict[str, str] = {}
    bundles_hash: str = ""
    bundle_config_hashes_hash: str = ""


class ConfigExport(msgspec.Struct, frozen=True, omit_defaults=False):
    """The whole catalogue at one epoch. `bundle_config_hashes`: for each bundle, a hash of its models."""

    epoch: str
    models: tuple[ConfigModel, ...]
    bundles: tuple[dict[str, Any], ...] = ()
    snapshot_version: int = 1
    generated_at: str = ""
    bundle_config_hashes: dict[str, str] = {}


decode_delta = msgspec.msgpack.Decoder(ConfigDelta).decode


def listed(model: str, document: Mapping[str, Any], source: str, note: str = "") -> dict[str, Any]:
    """Return one row for the list of models. The row of an alias has targets instead of tasks and languages. `note`:
    the reason why the model has this revision, if a program wrote the revision.
    """
    row: dict[str, Any] = {"model_id": model, "profiles": ["default", *document.get("profiles", ())], "source": source}
    if is_alias(document):
        row["alias"] = document["alias"]
    else:
        row["tasks"] = list(tasks_of(document.get("outputs", ())))
        row["languages"] = list(document.get("languages", ()))
    if size := document.get("download_bytes"):
        row["download_bytes"] = size
    return {**row, "note": note} if note else row


def bundle_of(bundles: Mapping[str, BundleEntry], name: str) -> dict[str, Any]:
    """Return the body of the reply with the bundle `name`. Raises NotFound."""
    if name not in bundles:
        raise NotFound(f"no bundle named {name[:100]!r}; there are {', '.join(sorted(bundles))}", param="id")
    return msgspec.structs.asdict(bundles[name])


def bundle_list(bundles: Mapping[str, BundleEntry]) -> dict[str, Any]:
    """Return the body of the reply with all bundles, the preferred bundle first."""
    rows = map(msgspec.structs.asdict, bundling.ordered(bundles))
    return {"bundles": [{"bundle_id": row.pop("id"), **row} for row in rows]}


def resolution(catalogue: Catalogue, raw: bytes) -> dict[str, Any]:
    """Return the model, the profile and the bundles to which a model name resolves. `raw`: the request's JSON body.
    Raises InvalidInput, ModelNotFound, BundleConflict.
    """
    try:
        body = plain.from_json(raw)
    except plain.Malformed as error:
        raise InvalidInput.at("body", str(error), reason="malformed") from None
    if not isinstance(body, dict):
        raise InvalidInput.at("body", f"expected an object, got {type(body).__name__}")
    if unknown_fields := sorted(body.keys() - {"model", "bundle"}):
        field = unknown_fields[0][:60]
        if suggestion := did_you_mean(field, ("model", "bundle")):
            raise InvalidInput.at(field, f"no such field{suggestion}")
        # the name of an unknown field may be a client's text, which must not appear in an error
        raise InvalidInput.at("body", "expected only model and bundle, got another field")
    model, bundle = body.get("model"), body.get("bundle")
    if not isinstance(model, str) or not model:
        raise InvalidInput.at("model", f"expected a name, got {type(model).__name__}")
    if bundle is not None and not isinstance(bundle, str):
        raise InvalidInput.at("bundle", f"expected a string or null, got {type(bundle).__name__}")
    named, separator, _ = model.partition(":/")
    if bundle and separator and named != bundle:
        raise InvalidInput.at("bundle", "expected the same bundle as in the field model, got another bundle")
    resolved = catalogue.resolve(f"{bundle}:/{model}" if bundle and not separator else model)
    entry = resolved.entry
    return {
        "model": entry.id,
        "profile": resolved.profile,
        "resolved_bundle": resolved.bundle,
        "compatible_bundles": list(catalogue.bundles_of(entry)),
        "profiles": ["default", *entry.profiles],
        **({"alias": resolved.alias} if resolved.alias else {}),
    }


def digest(facts: Any) -> str:
    """Return a hash of data that JSON can encode, as 16 hex digits. Equal data have equal hashes."""
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]


def has_seen(epoch: str, required: str) -> bool:
    """Return whether a reader at `epoch` has all writes up to the epoch `required`; False for epochs of different
    buckets, because they cannot be compared.
    """
    created, _, last = epoch.rpartition(":")
    required_created, _, required_last = required.rpartition(":")
    if not (last.isdigit() and required_last.isdigit()):
        return epoch == required
    return created == required_created and int(last) >= int(required_last)


def model_status(
    model: str,
    revision: int,
    epoch: str,
    since: str,
    bundles: Mapping[str, tuple[str, Iterable[Heartbeat]]] | None,
    gateways: Mapping[str, str],
    revision_at: Callable[[str], int | None],
    source: str,
) -> dict[str, Any]:
    """Return which gateways and workers have the present revision of a model. `gateways`: epoch of each gateway, by id.
    `since`: epoch of the write that created this revision.

    `bundles`: for each bundle that can serve the model, its hash and its workers; None for an alias, because workers do
    not know aliases. A bundle without workers counts as up to date, because a worker that starts reads the present
    catalogue. `revision_at` returns the model's revision at an epoch; None if this process does not know the revision.
    """

    def reader(name: str, reader_epoch: str) -> dict[str, Any]:
        return {
            "id": name,
            "epoch": reader_epoch,
            "revision": revision_at(reader_epoch),
            "acked": has_seen(reader_epoch, since),
        }

    bundle_states, serving = [], []
    for bundle, (expected_hash, beats) in (bundles or {}).items():
        workers = [
            reader(beat.worker, beat.config_epoch) | _copy(beat, model)
            for beat in sorted(beats, key=lambda beat: beat.worker)
        ]
        acked, pending = (
            [worker["id"] for worker in workers if worker["acked"] is is_acked] for is_acked in (True, False)
        )
        bundle_states.append(
            {
                "bundle_id": bundle,
                "expected_bundle_config_hash": expected_hash,
                "total_eligible_workers": len(workers),
                "acked_workers": acked,
                "pending_workers": pending,
                "acked": not pending,
            }
        )
        serving += workers
    return {
        "model_id": model,
        "config_epoch": epoch,
        "all_bundles_acked": all(bundle_state["acked"] for bundle_state in bundle_states),
        "no_bundles": bundles is not None and not bundle_states,
        "bundles": bundle_states,
        "source": source,
        "revision": revision,
        "gateways": [reader(*gateway) for gateway in sorted(gateways.items())],
        "workers": serving,
    }


def _copy(beat: Heartbeat, model: str) -> dict[str, str]:
    """Return bundle, state and fingerprint of a model on a worker. The loaded weights may be of an earlier revision."""
    copy = next((status for status in beat.models if status.model == model), None)
    return {
        "bundle": beat.bundle,
        "state": copy.state if copy else "available",
        "fingerprint": copy.fingerprint if copy else "",
    }


def config_shape(error: SIEError, request_id: str, errors: list[dict[str, Any]] | None) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of an error reply. `detail.error` is for older clients of `/v1/configs`."""
    body = envelope(error, request_id, error.extras.get("errors", errors))
    return error.status, {**body, "detail": {**body["detail"], "error": error.code.lower()}}
