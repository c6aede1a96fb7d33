"""The config service's API over the broker in memory: the reply to each call, and the catalogue after it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import config_api
import httpx
import msgspec
import pytest
import yaml
from config_api import ADMIN
from inprocess import clock_at, settings_of, until

from sie_broker import BrokerUnavailable, Write
from sie_broker.memory import MemoryServer
from sie_config_service import access
from sie_config_service.handlers import MAX_BODY_BYTES
from sie_config_service.process import has_pool
from sie_config_service.state import ConfigService
from sie_config_service.store import (
    REPLIES_PER_SLOT,
    REPLY_KEPT_S,
    REVISIONS_KEPT,
    RecordedReply,
    ReplySlot,
    digest_of,
    model_key,
    normalised,
)
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire import messages, topology
from sie_contracts.wire.records import Reservation, Reservations, ReservationSpec
from sie_runtime import keys as records
from sie_runtime.failpoints import arm
from sie_runtime.http.config_routes import CONFIG_ROUTES
from sie_runtime.process import Stop

READER = "reader-token-of-a-test"
TOKENS = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_CONFIG_READ_TOKEN": READER}
ENTRY = {
    "id": "org/one",
    "weights": {"package": "x"},
    "family": "toy",
    "outputs": {"dense": 4},
    "max_tokens": 16,
    "run": {"pooling": "mean"},
    "profiles": {"plain": {"run": {"normalize": False}}},
}
ONE = "/v1/configs/models/org/one"
BUNDLES = {
    "default": BundleEntry("default", families=("toy",)),
    "late": BundleEntry("late", priority=9, families=("toy", "other")),
    "eyes": BundleEntry("eyes", priority=1, families=("eye",)),
}


class Api(config_api.Api):
    """API with BUNDLES, and the deltas of the bundle `default`."""

    def __init__(self, server: MemoryServer, **environ: str) -> None:
        super().__init__(server, BUNDLES, topology.config_subject("default"), **environ)

    async def revisions(self) -> list[tuple[int, str]]:
        """Return the revisions of org/one, oldest first."""
        history = (await self.call("GET", f"{ONE}/history"))["revisions"]
        assert all(
            set(revision) == {"revision", "created_at", "operation", "author", "note", "changes"}
            for revision in history
        )
        return [(revision["revision"], revision["operation"]) for revision in reversed(history)]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = await Api(MemoryServer(), **TOKENS).start()
    yield api
    await api.client.aclose()


async def test_a_model_is_created_replaced_patched_rolled_back_and_removed(api: Api) -> None:
    reply = await api.call("POST", "/v1/configs/models", ENTRY, 201)
    assert reply.pop("router_id").startswith("sie-config-")
    assert reply == {
        "model_id": "org/one",
        "revision": 1,
        "unchanged": False,
        "created_profiles": ["default", "plain"],
        "existing_profiles_skipped": [],
        "warnings": [],
        "routable_bundles_by_profile": {"default": ["default", "late"], "plain": ["default", "late"]},
    }
    put = await api.call("PUT", ONE, {**ENTRY, "profiles": {}, "max_tokens": 32})
    assert (put["revision"], put["created_profiles"]) == (2, [])
    patched = await api.call("PATCH", ONE, {"run": {"pooling": None, "normalize": True}})
    assert patched["revision"] == 3
    assert (await api.call("GET", ONE))["run"] == {"normalize": True}
    assert (await api.call("POST", f"{ONE}/rollback", {"revision": 1}))["revision"] == 4
    assert await api.call("GET", ONE) == normalised(parse_entry(ENTRY))
    removal = await api.call("DELETE", ONE)
    assert (removal["revision"], removal["routable_bundles_by_profile"], removal["unchanged"]) == (5, {}, False)
    again = await api.call("DELETE", ONE)
    assert (again["revision"], again["unchanged"]) == (5, True)
    assert (await api.call("DELETE", "/v1/configs/models/org/two", status=404))["detail"]["error"] == "model_not_found"
    assert (await api.call("GET", ONE, status=404))["detail"]["error"] == "model_not_found"
    assert await api.call("GET", "/v1/configs/models") == {"models": []}
    assert (await api.call("POST", f"{ONE}/rollback", {"revision": 3}))["created_profiles"] == ["default"]
    assert await api.revisions() == list(enumerate(("create", "put", "patch", "rollback", "delete", "rollback"), 1))
    refused = await api.call("POST", f"{ONE}/rollback", {"revision": 9}, 404)
    assert (refused["error"]["reason"], refused["error"]["revisions"]) == ("revision_not_found", [6, 5, 4, 3, 2, 1])
    assert (await api.call("POST", f"{ONE}/rollback", {"revision": 5}, 422))["errors"][0]["loc"] == "$.revision"


PUBLIC = f"""
sie_id: org/public
hf_id: org/public
hf_revision: {"ab" * 20}
tasks: {{encode: {{dense: {{dim: 4}}}}}}
max_sequence_length: 16
profiles:
  default:
    max_batch_tokens: 8192
    adapter_path: sie_server.adapters.bert_flash:BertFlashAdapter
    adapter_options: {{runtime: {{pooling: mean, normalize: true}}}}
  raw:
    extends: default
    adapter_options: {{runtime: {{pooling: mean, normalize: false}}}}
"""
PUBLIC_MODEL = "/v1/configs/models/org/public"


@pytest.fixture
async def catalogue() -> AsyncIterator[Api]:
    """API with a bundle of a family that public model files have."""
    api = Api(MemoryServer(), **TOKENS)
    api._bundles = {"default": BundleEntry("default", families=("text-encoder",))}
    await api.start()
    yield api
    await api.client.aclose()


async def sent(api: Api, method: str, path: str, text: str, **headers: str) -> httpx.Response:
    return await api.client.request(
        method, path, content=text, headers={"Content-Type": "application/x-yaml", **headers}
    )


async def test_a_model_file_of_the_public_server_becomes_an_entry(catalogue: Api) -> None:
    answer = await sent(catalogue, "POST", "/v1/configs/models", PUBLIC)
    assert (answer.status_code, answer.json()["created_profiles"]) == (201, ["default", "raw"])
    assert answer.json()["warnings"] == [
        "profiles.default.max_batch_tokens: ignored, because SIE_MAX_BATCH_COST limits a batch"
    ]
    stored = await catalogue.call("GET", PUBLIC_MODEL)
    assert stored == {
        "id": "org/public",
        "weights": {"hub": "org/public", "revision": "ab" * 20},
        "family": "text-encoder",
        "outputs": {"dense": 4},
        "max_tokens": 16,
        "run": {"pooling": "mean"},
        "profiles": {"raw": {"run": {"normalize": False}}},
    }
    again = (await sent(catalogue, "POST", "/v1/configs/models", PUBLIC)).json()
    assert (again["unchanged"], again["existing_profiles_skipped"]) == (True, ["default", "raw"])
    conflict = await sent(catalogue, "POST", "/v1/configs/models", PUBLIC.replace("dim: 4", "dim: 8"))
    assert (conflict.status_code, conflict.json()["detail"]["error"]) == (409, "content_conflict")
    assert conflict.json()["error"]["diff"] == [{"path": "$.outputs.dense", "before": 4, "after": 8}]
    put = await sent(catalogue, "PUT", PUBLIC_MODEL, PUBLIC.replace("sie_id: org/public\n", "").replace("16", "8"))
    assert put.status_code == 200
    assert (await catalogue.call("GET", PUBLIC_MODEL))["max_tokens"] == 8
    model_file = await catalogue.client.get(PUBLIC_MODEL, headers={"Accept": "application/x-yaml"})
    assert (model_file.headers["content-type"], yaml.safe_load(model_file.text)["id"]) == (
        "application/x-yaml",
        "org/public",
    )


async def test_an_export_has_the_hash_of_each_bundle(api: Api) -> None:
    before = await api.call("GET", "/v1/configs/export")
    assert (before["snapshot_version"], set(before["bundle_config_hashes"])) == (1, set(BUNDLES))
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    after = (await api.call("GET", "/v1/configs/export"))["bundle_config_hashes"]
    changed = {name for name in BUNDLES if after[name] != before["bundle_config_hashes"][name]}
    assert changed == {"default", "late"}
    status = await api.call("GET", f"{ONE}/status")
    assert {bundle["bundle_id"]: bundle["expected_bundle_config_hash"] for bundle in status["bundles"]} == {
        name: after[name] for name in ("default", "late")
    }


async def test_what_get_returns_is_accepted_by_post_in_both_languages(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    shown = await api.client.get(ONE)
    assert (shown.headers["content-type"], shown.headers["etag"]) == ("application/json", '"1"')
    await api.call("POST", "/v1/configs/models", {**shown.json(), "id": "org/two"}, 201)
    written = await api.client.get(ONE, headers={"Accept": "application/json;q=0.5, application/x-yaml"})
    assert written.headers["content-type"] == "application/x-yaml"
    assert yaml.safe_load(written.text) == shown.json()
    body = written.text.replace("org/one", "org/three").encode()
    await api.call("POST", "/v1/configs/models", body, 201, Content_Type="application/x-yaml")
    three = await api.call("GET", "/v1/configs/models/org/three")
    assert {**three, "id": "org/one"} == shown.json()
    listed = await api.call("GET", "/v1/configs/models")
    assert listed["models"][0] == {
        "model_id": "org/one",
        "profiles": ["default", "plain"],
        "source": "api",
        "tasks": ["encode"],
        "languages": [],
    }
    assert [model["model_id"] for model in listed["models"]] == ["org/one", "org/three", "org/two"]


async def test_post_only_adds(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    same = await api.call("POST", "/v1/configs/models", ENTRY)
    assert (same["created_profiles"], same["existing_profiles_skipped"], same["revision"]) == (
        [],
        ["default", "plain"],
        1,
    )
    more = await api.call(
        "POST", "/v1/configs/models", {**ENTRY, "profiles": {"short": {"run": {"dimensions": [2]}}}}, 201
    )
    assert (more["created_profiles"], more["existing_profiles_skipped"], more["revision"]) == (
        ["short"],
        ["default"],
        2,
    )
    assert set((await api.call("GET", ONE))["profiles"]) == {"plain", "short"}
    refusal = await api.call(
        "POST", "/v1/configs/models", {**ENTRY, "profiles": {"plain": {"run": {"normalize": True}}}}, 409
    )
    assert (refusal["code"], refusal["error"]["revision"], refusal["error"]["profiles"]) == (
        "CONTENT_CONFLICT",
        2,
        ["plain"],
    )
    assert refusal["error"]["diff"] == [{"path": "$.profiles.plain.run.normalize", "before": False, "after": True}]
    assert await api.revisions() == [(1, "create"), (2, "create")]


async def test_if_match_takes_the_present_revision_and_no_other(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201, If_Match="0")
    await api.call("PATCH", ONE, {"max_tokens": 8}, If_Match='"1"')
    for method, path, body in (
        ("PATCH", ONE, {"max_tokens": 9}),
        ("PUT", ONE, ENTRY),
        ("DELETE", ONE, None),
        ("POST", f"{ONE}/rollback", {"revision": 1}),
        ("POST", "/v1/configs/models", ENTRY),
    ):
        answer = await api.client.request(method, path, json=body, headers={"If-Match": '"1"'})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        assert answer.json()["error"]["revision"] == 2
        assert answer.json()["error"]["diff"] == [{"path": "$.max_tokens", "before": 16, "after": 8}]
    assert (await api.call("PATCH", ONE, {}, 409, If_Match="77"))["error"]["diff"] == []
    assert (await api.call("PATCH", ONE, {}, 400, If_Match="one"))["error"]["param"] == "If-Match"
    assert await api.revisions() == [(1, "create"), (2, "patch")]


async def test_a_dry_run_checks_all_and_stores_nothing(api: Api) -> None:
    epoch = await api.store.epoch()
    dry = await api.call("POST", "/v1/configs/models?dry_run=true", ENTRY, 201, Idempotency_Key="a")
    assert await api.store.epoch() == epoch
    assert await api.call("POST", "/v1/configs/models", ENTRY, 201, Idempotency_Key="a") == dry
    for call, status in (
        (("PATCH", f"{ONE}?dry_run=true", {"max_tokens": 8}), 200),
        (("PATCH", f"{ONE}?dry_run=true", {"max_tokens": 0}), 422),
        (("DELETE", f"{ONE}?dry_run=true"), 200),
        (("PATCH", f"{ONE}?dry_run=yes", {}), 400),
    ):
        await api.call(*call, status=status)
    assert (await api.call("PATCH", f"{ONE}?dry_run=true", {}, 409, If_Match="3"))["code"] == "CONTENT_CONFLICT"
    assert await api.revisions() == [(1, "create")]
    assert len(api.deltas) == 1


async def test_the_same_idempotency_key_gives_the_first_answer_and_never_another_write(api: Api) -> None:
    key = {"Idempotency_Key": "k1"}
    first = await api.call("POST", "/v1/configs/models", ENTRY, 201, **key)
    second = await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k2")
    assert await api.call("POST", "/v1/configs/models", ENTRY, 200, **key) == first
    assert await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k2", If_Match="1") == second
    unchanged = await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k3")
    await api.call("PATCH", ONE, {"max_tokens": 9})
    assert await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k3") == unchanged
    for method, path, body in (("PATCH", ONE, {"max_tokens": 7}), ("PUT", ONE, ENTRY), ("DELETE", ONE, None)):
        refused = await api.call(method, path, body, 422, Idempotency_Key="k2")
        assert refused["code"] == "IDEMPOTENCY_MISMATCH"
    assert await api.revisions() == [(1, "create"), (2, "patch"), (3, "patch")]
    assert (await api.call("DELETE", ONE, None, 400, Idempotency_Key="x" * 256))["error"]["param"] == "Idempotency-Key"


async def test_stored_replies_that_cannot_be_decoded_hold_up_no_write(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    number = (await api.store.slot(digest_of(b"k1"))).number
    await (await api.broker.key_value(topology.CATALOGUE_BUCKET)).write([Write(f"replies.{number}", b"{]")])
    first = await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k1")
    await api.call("PATCH", ONE, {"max_tokens": 9})
    assert await api.call("PATCH", ONE, {"max_tokens": 8}, Idempotency_Key="k1") == first


def test_replies_are_kept_for_a_day_and_so_many_in_a_place() -> None:
    slot = ReplySlot(
        3, tuple(RecordedReply(str(number), "", 1000.0 + number, {}) for number in range(REPLIES_PER_SLOT)), 7
    )

    def kept(at_s: float) -> list[str]:
        write = slot.with_reply(RecordedReply("new", "", at_s, {}))
        assert (write.key, write.expected) == ("replies.3", 7)
        assert write.value is not None
        return [reply.key for reply in msgspec.json.decode(write.value, type=list[RecordedReply])]

    assert kept(2000.0) == [*map(str, range(1, REPLIES_PER_SLOT)), "new"]
    assert kept(1010.0 + REPLY_KEPT_S) == [*map(str, range(11, REPLIES_PER_SLOT)), "new"]
    assert kept(9e9) == ["new"]
    assert slot.find("3", 1003.0 + REPLY_KEPT_S - 1) == slot.replies[3]
    assert slot.find("3", 1003.0 + REPLY_KEPT_S) is None


async def test_two_replicas_and_writers_without_a_revision_lose_no_update(api: Api) -> None:
    """Each patch changes another field. All changes are there at the end."""
    replica = await Api(api.server, **TOKENS).start()
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    calls = [
        (api, replica)[number % 2].call("PATCH", ONE, {"digests": None, "prompts": {f"p{number}": "x {{text}}"}})
        for number in range(40)
    ]
    answers = await asyncio.gather(*calls)
    assert sorted(answer["revision"] for answer in answers) == list(range(2, 42))
    assert set((await replica.call("GET", ONE))["prompts"]) == {f"p{number}" for number in range(40)}
    await replica.client.aclose()


async def test_history_keeps_the_last_revisions(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    for number in range(REVISIONS_KEPT + 5):
        await api.call("PATCH", ONE, {"max_tokens": 100 + number})
    revisions = await api.revisions()
    assert [number for number, _ in revisions] == list(range(7, REVISIONS_KEPT + 7))
    await api.call("POST", f"{ONE}/rollback", {"revision": 6}, 404)
    await api.call("POST", f"{ONE}/rollback", {"revision": 7})
    assert (await api.call("GET", ONE))["max_tokens"] == 105


BAD: list[tuple[str, str, Any, str]] = [
    ("POST", "/v1/configs/models", {**ENTRY, "bundle": "none"}, "$.bundle"),
    ("POST", "/v1/configs/models", {**ENTRY, "bundle": "eyes"}, "$.bundle"),
    ("POST", "/v1/configs/models", {**ENTRY, "family": "none"}, "$.family"),
    ("POST", "/v1/configs/models", {**ENTRY, "weights": {"hub": "a/b", "revision": "main"}}, "$.weights.revision"),
    ("POST", "/v1/configs/models", {**ENTRY, "id": "org/one/status"}, "$.id"),
    ("POST", "/v1/configs/models", {**ENTRY, "id": "a..b"}, "$.id"),
    ("POST", "/v1/configs/models", {**ENTRY, "max_token": 3}, "$.max_token"),
    ("PUT", ONE, {**ENTRY, "id": "org/two"}, "$.id"),
    ("PUT", ONE, [], "$"),
    ("PATCH", ONE, {"id": "org/two"}, "$.id"),
    ("PATCH", ONE, {"outputs": None}, "$.outputs"),
    ("PATCH", ONE, {"run": {"output_dtype": "float8"}}, "$.run.output_dtype"),
    ("PATCH", ONE, [], "$"),
    ("PATCH", ONE, {"profiles": {"plain": {"run": {"pooling": "no"}}}}, "$.profiles.plain.run.pooling"),
    ("POST", f"{ONE}/rollback", {"revision": True}, "$.revision"),
    ("POST", f"{ONE}/rollback", {"revision": 1, "x": 1}, "$.revision"),
]


async def test_a_bad_config_is_refused_with_its_field_and_nothing_is_stored(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    epoch = await api.store.epoch()
    for method, path, body, loc in BAD:
        refused = await api.call(method, path, body, 422)
        assert (refused["code"], refused["detail"]["error"]) == ("VALIDATION_ERROR", "validation_error")
        assert [error["loc"] for error in refused["errors"]] == [loc] == [refused["error"]["param"]]
    assert await api.store.epoch() == epoch


async def test_writes_to_what_is_not_there_and_bodies_without_bounds_are_refused(api: Api) -> None:
    rollback = ("POST", f"{ONE}/rollback", {"revision": 1})
    for method, path, body in (("PUT", ONE, ENTRY), ("PATCH", ONE, {}), ("DELETE", ONE, None), rollback):
        assert (await api.call(method, path, body, 404))["code"] == "MODEL_NOT_FOUND"
    for path in (f"{ONE}/history", f"{ONE}/status"):
        await api.call("GET", path, status=404)
    assert (await api.call("POST", "/v1/configs/models", b" " * (MAX_BODY_BYTES + 1), 413))["error"][
        "limit"
    ] == MAX_BODY_BYTES
    for path in ("/v1/configs/none", "/v1/configs"):
        await api.call("GET", path, status=404)
    answer = await api.client.put("/v1/configs/models", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST, HEAD, OPTIONS")
    answer = await api.client.options("/v1/configs/models")
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, "GET, POST, HEAD, OPTIONS", b"")
    head, get = await api.client.head("/v1/configs/models"), await api.client.get("/v1/configs/models")
    assert (head.status_code, head.headers["content-type"], head.content) == (200, get.headers["content-type"], b"")


async def test_names_bundles_and_the_export_are_told(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    resolve = "/v1/configs/resolve"
    assert await api.call("POST", resolve, {"model": "ORG/one:plain", "bundle": "default"}) == {
        "model": "org/one",
        "profile": "plain",
        "resolved_bundle": "default",
        "compatible_bundles": ["default", "late"],
        "profiles": ["default", "plain"],
    }
    refused = await api.call("POST", resolve, {"model": "org/one", "bundle": "eyes"}, 409)
    assert refused["error"]["compatible_bundles"] == ["default", "late"]
    assert (await api.call("POST", resolve, {"model": "late:/org/one"}))["resolved_bundle"] == "late"
    await api.call("POST", resolve, {"model": "org/none"}, 404)
    for body in (
        {},
        {"model": 1},
        {"model": "org/one", "bundle": 1},
        {"model": "a:/org/one", "bundle": "b"},
        {"model": "a", "x": 1},
        [],
    ):
        await api.call("POST", resolve, body, 400)
    assert [bundle["bundle_id"] for bundle in (await api.call("GET", "/v1/configs/bundles"))["bundles"]] == [
        "default",
        "eyes",
        "late",
    ]
    shown = await api.client.get("/v1/configs/bundles/default")
    assert (shown.headers["content-type"], yaml.safe_load(shown.text)["id"]) == ("application/x-yaml", "default")
    await api.call("GET", "/v1/configs/bundles/none", status=404)
    before = await api.call("GET", "/v1/configs/epoch")
    exported = await api.call("GET", "/v1/configs/export")
    assert exported["epoch"] == before["epoch"]
    (model,) = exported["models"]
    assert set(exported) >= {"snapshot_version", "epoch", "generated_at", "models"}
    assert (model["model_id"], model["affected_bundles"]) == ("org/one", ["default", "late"])
    assert yaml.safe_load(model["raw_yaml"]) == model["model_config"] == await api.call("GET", ONE)
    await api.call("PATCH", ONE, {"max_tokens": 8})
    after = await api.call("GET", "/v1/configs/epoch")
    assert after["bundles_hash"] == before["bundles_hash"]
    assert after["bundle_config_hashes_hash"] != before["bundle_config_hashes_hash"]


async def test_seeding_leaves_what_the_api_wrote_or_removed(api: Api) -> None:
    seeded = {name: (parse_entry({**ENTRY, "id": name}), "packaged") for name in ("org/one", "org/two", "org/three")}
    assert len(await api.store.seed(seeded)) == 3
    await api.call("PATCH", ONE, {"max_tokens": 8})
    await api.call("DELETE", "/v1/configs/models/org/two")
    assert await api.store.seed(seeded) == []
    assert [(change.model, change.entry) for change in await api.store.seed({})] == [("org/three", None)]
    assert len(await api.store.seed(seeded)) == 1
    assert sorted((await api.store.snapshot()).live) == ["org/one", "org/three"]
    assert await api.revisions() == [(1, "seed"), (2, "patch")]
    await api.call("POST", f"{ONE}/rollback", {"revision": 1})
    assert (await api.call("GET", ONE))["max_tokens"] == 16


async def test_a_delta_that_is_not_sent_is_a_warning(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BrokerUnavailable("gone")

    monkeypatch.setattr(api.broker, "send", refused)
    assert (await api.call("POST", "/v1/configs/models", ENTRY, 201))["warnings"] == ["nats_publish_failed"]
    assert len((await api.call("GET", "/v1/configs/models"))["models"]) == 1


async def test_a_write_that_fails_before_it_is_stored_is_done_by_its_retry(api: Api) -> None:
    arm("config.before_write=error")
    key = {"Idempotency_Key": "k"}
    try:
        await api.call("POST", "/v1/configs/models", ENTRY, 500, **key)
    finally:
        arm("")
    assert await api.call("GET", "/v1/configs/models") == {"models": []}
    reply = await api.call("POST", "/v1/configs/models", ENTRY, 201, **key)
    assert reply["revision"] == 1
    assert await api.call("POST", "/v1/configs/models", ENTRY, 200, **key) == reply


@pytest.mark.parametrize("headers", [{"idempotency_key": "k"}, {}], ids=["with a key", "without a key"])
async def test_a_write_whose_acknowledgement_is_lost_is_copied_by_its_retry(
    api: Api, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = api.store._bucket.write

    async def lost(writes: list[Write]) -> int:
        await write(writes)
        raise BrokerUnavailable("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(api.store._bucket, "write", lost)
        await api.call("POST", "/v1/configs/models", ENTRY, 503, **headers)
    await api.call("POST", "/v1/configs/models", ENTRY, 200, **headers)
    copies = await api.broker.key_value(topology.CATALOGUE_COPY_BUCKET)
    assert [stored.key for stored in await copies.entries()] == [model_key("org/one")]


async def test_without_a_broker_writes_are_refused_and_may_be_tried_again() -> None:
    api = Api(MemoryServer(), **TOKENS)
    answer = await api.client.post("/v1/configs/models", json=ENTRY)
    assert (answer.status_code, answer.json()["code"], answer.headers["x-should-retry"]) == (
        503,
        "QUEUE_UNAVAILABLE",
        "true",
    )
    assert int(answer.headers["retry-after"]) >= 1
    await api.client.aclose()


def calls() -> list[tuple[str, str, bool]]:
    """Return every method and path, and whether the read token is enough."""
    return [
        (row.method, row.path.replace("{id:path}", "org/one"), row.reader or row.scope == "read")
        for row in CONFIG_ROUTES
    ]


async def test_every_route_needs_its_token() -> None:
    """Without any token in the settings every request is refused."""
    every = {"": (401, 401), "wrong": (401, 401), READER: (0, 403), ADMIN: (0, 0)}
    no_admin = {"": (401, 403), "wrong": (401, 403), READER: (0, 403), ADMIN: (401, 403)}
    refusals = dict.fromkeys(("", "wrong", READER, ADMIN), (403, 403))
    for environ, expected in ((TOKENS, every), ({"SIE_CONFIG_READ_TOKEN": READER}, no_admin), ({}, refusals)):
        api = Api(MemoryServer(), **environ)
        for (method, path, reads), (token, statuses) in itertools.product(calls(), expected.items()):
            answer = await api.client.request(method, path, headers={"Authorization": f"Bearer {token}"})
            status = statuses[not reads]
            assert answer.status_code == status if status else answer.status_code not in (401, 403), (path, token)
        await api.client.aclose()


@pytest.mark.parametrize(
    ("scopes", "reads", "writes", "exports"),
    [(("read",), 200, 403, 403), (("config", "read"), 200, 201, 200), (("infer",), 403, 403, 403)],
)
async def test_a_key_does_what_its_scopes_say_until_it_ends(
    scopes: tuple[str, ...], reads: int, writes: int, exports: int
) -> None:
    """With SIE_AUTH_MODE=token the config service checks keys as a gateway does. A key ends by the clock of the broker,
    which is decades behind that of this machine.
    """
    now_s, server = 1000.0, MemoryServer()
    api = await Api(server, SIE_AUTH_MODE="token", **TOKENS).start()
    gate = api.service.gate = access.ConfigGate(settings_of(SIE_AUTH_MODE="token", **TOKENS))
    key, token = records.create("ops", scopes, now_s=now_s, expires_s=now_s + 60)
    calls = (
        ("GET", "/v1/configs/models", reads),
        ("POST", "/v1/configs/models", writes),
        ("GET", "/v1/configs/export", exports),
    )
    await api.call("GET", "/v1/configs/models", None, 503, Authorization=token)
    await (await records.bucket_of(api.broker, 1).open()).write([Write(key.id, records.encode(key), 0)])
    keys, stop = records.Keys(api.broker, 1, clock_at(lambda: now_s)), Stop()
    gate.go_by(keys)
    following = asyncio.create_task(keys.run(stop))
    await until(lambda: keys.loaded, "the keys")
    for method, path, status in calls:
        answer = await api.call(
            method, path, ENTRY if method == "POST" else None, status, Authorization=f"Bearer {token}"
        )
        assert status != 403 or answer["code"] == "PERMISSION_DENIED"
    now_s += 61
    for ended in (token, "sie_other"):
        await api.call("GET", "/v1/configs/models", None, 401, Authorization=ended)
    await api.call("GET", "/v1/configs/models", None, 200, Authorization=READER)
    stop.request()
    await following
    await api.client.aclose()


async def test_a_name_may_be_encoded_and_end_in_a_slash(api: Api) -> None:
    await api.call("POST", "/v1/configs/models", ENTRY, 201)
    for path in ("org%2Fone", "org/one/", "org/one/history/", "org%2Fone/status"):
        await api.call("GET", f"/v1/configs/models/{path}")
    await api.call("PATCH", "/v1/configs/models/org%2Fone/", {"max_tokens": 8}, If_Match='W/"1"')
    assert await api.revisions() == [(1, "create"), (2, "patch")]


async def test_a_queue_is_made_for_the_pool_of_the_installation_and_for_reservations_up_to_their_limit() -> None:
    settings, server = settings_of(SIE_POOL="blue"), MemoryServer()
    service = ConfigService(settings)
    with pytest.raises(BrokerUnavailable):
        await has_pool(service, settings, "r0")
    service.broker = server.connect("config")

    async def exist() -> list[bool]:
        return [await has_pool(service, settings, name) for name in ("blue", "_default", "r0", "green")]

    assert await exist() == [True, True, False, False]
    bucket = await service.broker.key_value(topology.POOLS_BUCKET)
    for count, is_pool in ((topology.MAX_RESERVATIONS, True), (topology.MAX_RESERVATIONS + 1, False)):
        pools = {f"r{n}": Reservation(ReservationSpec(f"r{n}", {"l4": 1}), 1.0, 1.0) for n in range(count)}
        await bucket.write([Write(topology.RESERVATIONS_KEY, messages.encode(Reservations(pools)))])
        assert await exist() == [True, True, is_pool, False]
