"""Aliases through the API of the config service: writes, rollbacks, and changes of the models that they name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import config_api
import pytest
from config_api import ADMIN
from inprocess import settings_of, until

from sie_broker import Write
from sie_broker.memory import MemoryServer
from sie_config_service.aliases import ALIAS_BROKEN, INDEX_KEY, VECTORS_CHANGED
from sie_config_service.store import CatalogueChange, open_store
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.entries import parse_document
from sie_contracts.wire import topology
from sie_runtime.feed import snapshot

MODELS = "/v1/configs/models"
SEARCH = f"{MODELS}/search"


class Api(config_api.Api):
    """API with one bundle of every family, and the deltas of all bundles."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(
            server, {"default": BundleEntry("default")}, f"{topology.CONFIG_SUBJECT}.*", SIE_ADMIN_TOKEN=ADMIN
        )


def entry(name: str, package: str = "x", **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "weights": {"package": package},
        "family": "toy",
        "outputs": {"dense": 4},
        "max_tokens": 16,
        **more,
    }


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = await Api(MemoryServer()).start()
    for document in (
        entry("org/one"),
        entry("org/two", "y"),
        entry("org/same"),
        entry("org/rank", outputs={"score": 0}),
    ):
        await api.call("POST", MODELS, document, 201)
    yield api
    await api.client.aclose()


async def served(api: Api, name: str = "search") -> str:
    """Return the model that a gateway resolves the name to."""
    return (await snapshot(await api.store.export())).resolve(name).canonical


async def test_an_alias_is_written_flipped_and_rolled_back_like_a_model(api: Api) -> None:
    receipt = await api.call(
        "POST", MODELS, {"id": "search", "alias": "org/one", "description": "what the site uses"}, 201
    )
    assert (receipt["revision"], receipt["warnings"], receipt["routable_bundles_by_profile"]) == (
        1,
        [],
        {"default": ["default"]},
    )
    assert await served(api) == "org/one"
    flipped = await api.call("PATCH", SEARCH, {"alias": "org/two"}, If_Match='"1"')
    assert (flipped["revision"], flipped["warnings"]) == (2, [VECTORS_CHANGED])
    assert await served(api) == "org/two"
    stale = (await api.call("PATCH", SEARCH, {"alias": "org/one"}, 409, If_Match='"1"'))["error"]
    assert (stale["code"], stale["revision"]) == ("CONTENT_CONFLICT", 2)
    assert stale["diff"] == [{"path": "$.alias", "before": [{"model": "org/one"}], "after": [{"model": "org/two"}]}]
    assert (await api.call("POST", f"{SEARCH}/rollback", {"revision": 1}))["revision"] == 3
    assert await served(api) == "org/one"
    revisions = (await api.call("GET", f"{SEARCH}/history"))["revisions"]
    assert [revision["operation"] for revision in revisions] == ["rollback", "patch", "create"]
    assert (await api.call("DELETE", SEARCH))["revision"] == 4
    assert (await api.call("GET", SEARCH, status=404))["error"]["code"] == "MODEL_NOT_FOUND"


async def test_a_write_of_an_alias_is_one_delta_that_follows_the_one_before(api: Api) -> None:
    """A reader that applies the deltas has the catalogue of a new export."""
    before = await snapshot(await api.store.export())
    api.deltas.clear()
    await api.call("POST", MODELS, {"id": "search", "alias": "org/one"}, 201)
    await api.call("PATCH", SEARCH, {"alias": "org/two"}, Idempotency_Key="flip")
    await api.call("PATCH", f"{MODELS}/org/two", {"description": "as it was"})
    await api.call("DELETE", SEARCH)
    await api.call("DELETE", f"{MODELS}/org/two")
    await until(lambda: len(api.deltas) == 5, "all deltas")
    catalogue = before
    for delta in api.deltas:
        assert delta.previous == catalogue.epoch
        catalogue = catalogue.with_model(
            delta.model, None if delta.entry is None else parse_document(delta.entry), delta.revision, delta.epoch
        )
    now = await snapshot(await api.store.export())
    assert (catalogue.epoch, catalogue.entries, catalogue.aliases) == (now.epoch, now.entries, now.aliases)


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", MODELS, {"id": "Org/One", "alias": "org/two"}, "$.id"),
    ("PUT", f"{MODELS}/org/one", {"alias": "org/two"}, "$.id"),
    ("PATCH", f"{MODELS}/taken", {"weights": {"package": "x"}}, "$.alias"),
    ("PATCH", f"{MODELS}/org/one", {"alias": "org/two"}, "$.alias"),
    ("PUT", f"{MODELS}/taken", entry("taken"), "$.id"),
    ("POST", MODELS, entry("Taken"), "$.id"),
    ("POST", MODELS, {"id": "find", "alias": "taken"}, "$.alias[0].model"),
]


async def test_what_an_alias_may_not_be_is_refused_and_nothing_is_stored(api: Api) -> None:
    await api.call("POST", MODELS, {"id": "taken", "alias": "org/one"}, 201)
    epoch = await api.call("GET", "/v1/configs/epoch")
    for method, path, body, loc in REFUSED:
        reply = await api.call(method, path, body, 422)
        (fault,) = reply["error"].get("errors") or reply["errors"]
        assert (reply["error"]["code"], fault["loc"]) == ("VALIDATION_ERROR", loc), (method, path, body)
    assert await api.call("GET", "/v1/configs/epoch") == epoch


NEEDED = [
    ("DELETE", "org/one", None, ["only", "pair", "pinned", "shadowed"]),
    ("PATCH", "org/one", {"weights": {"package": "z"}}, ["pair", "pinned"]),
    ("PATCH", "org/one", {"run": {"pooling": "cls"}}, ["pair"]),
    ("PATCH", "org/same", {"max_tokens": 8}, ["pair"]),
    ("PATCH", "org/one", {"outputs": {"dense": None, "score": 0}}, ["pair", "shadowed"]),
    ("POST", "org/two/rollback", {"revision": 1}, ["pair2"]),
]


@pytest.mark.parametrize(
    ("method", "model", "body", "named"), NEEDED, ids=[f"{case[0]} {case[1]} {case[2]}" for case in NEEDED]
)
async def test_a_model_that_aliases_need_stays_as_they_need_it(
    api: Api, method: str, model: str, body: dict[str, Any] | None, named: list[str]
) -> None:
    """A removal or a change that would break an alias is refused with 409 and the names of all such aliases. With
    `force` it is done, with a warning.
    """
    await api.call("PATCH", f"{MODELS}/org/two", {"weights": {"package": "x"}, "max_tokens": 12})
    await api.call("POST", MODELS, entry("org/three", max_tokens=12), 201)
    for document in (
        {"id": "only", "alias": "org/one"},
        {"id": "pair", "alias": ["org/one", "org/same"]},
        {"id": "pinned", "alias": "org/one@pypi:x"},
        {"id": "shadowed", "alias": "org/two", "shadow": "ORG/one"},
        {"id": "pair2", "alias": ["org/two", "org/three"]},
    ):
        await api.call("POST", MODELS, document, 201)
    path = f"{MODELS}/{model}"
    error = (await api.call(method, path, body, 409))["error"]
    assert (error["code"], error["reason"], error["aliases"], error["retryable"]) == (
        "CONTENT_CONFLICT",
        "aliased",
        named,
        False,
    )
    assert (await api.call(method, f"{path}?force=true", body))["warnings"] == [ALIAS_BROKEN]
    assert await api.call("GET", f"{MODELS}/pair")  # aliases stay: another write of the model mends them
    if method == "DELETE":
        for alias in ("only", "pair"):
            await api.call("PATCH", f"{MODELS}/{alias}", {"alias": "org/two"})
        await api.call("POST", f"{path}/rollback", {"revision": 1})


async def test_between_replicas_no_alias_of_what_is_gone_comes_about(api: Api) -> None:
    """In each round an alias of a model is written at one replica while another replica removes that model. One of the
    two writes is refused.
    """
    second_api = await Api(api.server).start()
    outcomes = set()
    for number in range(12):
        model, alias = f"org/m{number}", f"alias-{number}"
        await api.call("POST", MODELS, entry(model), 201)
        writes = [
            api.client.post(MODELS, json={"id": alias, "alias": model}),
            second_api.client.delete(f"{MODELS}/{model}"),
        ]
        creation, removed = await asyncio.gather(*(writes if number % 2 else reversed(writes)))
        if not number % 2:
            creation, removed = removed, creation
        outcomes.add((creation.status_code, removed.status_code))
        catalogue = await snapshot(await api.store.export())
        assert (alias in catalogue.aliases) is (model in catalogue.entries), (creation.text, removed.text)
    assert outcomes <= {(201, 409), (422, 200)}
    await second_api.client.aclose()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PATCH", f"{MODELS}/org/one", {"profiles": {"plain": None}}), ("POST", MODELS, entry("Search"))],
    ids=["the profile that it names is removed", "a model gets its name in other case"],
)
async def test_an_alias_that_is_written_while_a_replica_checks_a_model_stays_valid(
    api: Api, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: dict[str, Any]
) -> None:
    await api.call("PATCH", f"{MODELS}/org/one", {"profiles": {"plain": {"run": {"normalize": False}}}})
    second_api = await Api(api.server).start()
    write, is_first = second_api.store.write, True

    async def late(*arguments: Any) -> tuple[int, int]:
        nonlocal is_first
        if is_first:
            is_first = False
            await api.call("POST", MODELS, {"id": "search", "alias": "org/one:plain"}, 201)
        return await write(*arguments)

    monkeypatch.setattr(second_api.store, "write", late)
    answer = await second_api.client.request(method, path, json=body)
    assert answer.status_code in (409, 422), answer.text
    assert await served(api) == "org/one:plain"
    await second_api.client.aclose()


async def test_an_index_that_cannot_be_decoded_is_made_anew_by_the_next_start(api: Api) -> None:
    await api.call("POST", MODELS, {"id": "search", "alias": "org/one"}, 201)
    await (await api.broker.key_value(topology.CATALOGUE_BUCKET)).write([Write(INDEX_KEY, b"{]")])
    refused = await api.call("DELETE", f"{MODELS}/org/one", status=503)
    assert f"record {INDEX_KEY} cannot be read" in refused["error"]["message"]
    await (await open_store(api.server.connect("sie-config"), settings_of())).recover()
    assert (await api.call("DELETE", f"{MODELS}/org/one", status=409))["error"]["aliases"] == ["search"]


MENDS: list[tuple[str, str, Any]] = [
    ("DELETE", "", None),
    ("PUT", "", {}),
    ("PATCH", "", {"colour": None}),
    ("POST", "/rollback", {"revision": 1}),
]


@pytest.mark.parametrize("model", ["org/one", "search"])
@pytest.mark.parametrize(("method", "path", "body"), MENDS, ids=[f"{method}{path}" for method, path, _ in MENDS])
async def test_a_stored_document_that_the_schema_refuses_now_is_mended_or_removed(
    api: Api, model: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """A stored model or alias has a field that only an older schema knew. A write without that field replaces it."""
    documents = {"org/one": entry("org/one"), "search": {"id": "search", "alias": [{"model": "org/one"}]}}
    await api.call("POST", MODELS, documents["search"], 201)
    old = {**documents[model], "colour": "red"}
    await api.store.write([CatalogueChange(model, await api.store.held(model), old, "api", "put")])
    await api.call("PATCH", f"{MODELS}/{model}", {"description": "red"}, 422)  # the patch would keep the field
    done = await api.call(method, f"{MODELS}/{model}{path}", documents[model] if method == "PUT" else body)
    unknown = model == "search" and method != "DELETE"  # the alias may have led to other vectors
    assert (done["revision"], done["warnings"]) == (3, [VECTORS_CHANGED] if unknown else [])
    held = await api.store.held(model)
    assert held.entry is None if method == "DELETE" else held.entry == documents[model]
    assert (await api.store.alias_index()).naming("org/one") == (
        [] if (model, method) == ("search", "DELETE") else ["search"]
    )
