"""Answers to public SDKs by the version of the SDK, and the versions at which the answers change."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from inprocess import InProcess, until, until_told

from sie_contracts.errors import AllItemsFailed, ErrorInfo, InvalidInput, ModelLoadFailed, SIEError, catalogue
from sie_contracts.sdk_versions import CONTRACT_VERSION, DIALECTS, SERVER_VERSION, dialect_of, server_version

VERSIONS = ("0.3.1", "0.6.4", "0.6.5", "0.8.0", "0.10.1")
# by version, the codes with status 503 that the SDK of this version repeats; None: all of them
REPEATED = {
    "0.3.1": None,
    "0.6.4": None,
    "0.6.5": {"PROVISIONING", "MODEL_LOADING", "LORA_LOADING", "RESOURCE_EXHAUSTED"},
    "0.8.0": {"PROVISIONING", "MODEL_LOADING", "LORA_LOADING", "RESOURCE_EXHAUSTED", "QUEUE_FULL"},
    "0.10.1": {
        "PROVISIONING",
        "MODEL_LOADING",
        "LORA_LOADING",
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        "QUEUE_UNAVAILABLE",
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_that_may_be_retried_has_a_code_that_the_sdk_repeats(version: str) -> None:
    dialect, repeated = dialect_of(version), REPEATED[version]
    errors = [leaf("message") for leaf in catalogue() if leaf.status == 503]
    errors.append(AllItemsFailed("message", failures=[errors[0], InvalidInput("message")]))
    for error in errors:
        spoken = dialect.spoken(error)
        if spoken.status == 202:
            assert (version in ("0.3.1", "0.6.4"), error.code) == (True, "PROVISIONING")
            continue
        assert repeated is None or spoken.code in repeated, error.code
        assert (spoken.status, spoken.retryable, spoken.message) == (503, True, "message")
        if spoken.code != error.code:
            assert spoken.reason == error.code.lower()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_that_may_not_be_retried_keeps_its_code(version: str) -> None:
    dialect = dialect_of(version)
    for leaf in catalogue():
        error = leaf("message")
        if not error.retryable:
            assert dialect.spoken(error).code == error.code
    mixed = AllItemsFailed("message", failures=[InvalidInput("message")])
    assert dialect.spoken(mixed) is mixed
    failed = SIEError.from_info(ErrorInfo("MODEL_LOAD_FAILED", "message", extras={"attempts": 3, "permanent": True}))
    spoken = dialect.spoken(failed)
    assert (spoken.status, spoken.extras, spoken.reason) == (502, {"attempts": 3, "permanent": True}, "")
    assert failed.status == 500  # other requests that wait for the same load get the error unchanged


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("0.1.7", (0, 0, 0)),
        ("0.6", (0, 0, 0)),
        ("0.6.4", (0, 0, 0)),
        ("0.6.5", (0, 6, 5)),
        ("0.6.30", (0, 6, 5)),
        ("0.7.3", (0, 7, 3)),
        ("0.8.3", (0, 7, 3)),
        ("0.9.0", (0, 9, 0)),
        ("0.10.1", (0, 9, 0)),
        ("2.0.0", (0, 9, 0)),
        ("unknown", (0, 9, 0)),
        ("", (0, 9, 0)),
    ],
)
def test_a_version_has_the_newest_dialect_that_is_not_newer(version: str, first: tuple[int, int, int]) -> None:
    assert dialect_of(version) is dict(DIALECTS)[first]


def test_the_contract_of_a_client_is_its_own_and_at_most_ours() -> None:
    ours = ".".join(map(str, CONTRACT_VERSION))
    contracts = {version: server_version(version) for version in ("0.3.1", "0.10.1", "7.0.0", "x")}
    assert contracts == {"0.3.1": "0.3", "0.10.1": ours, "7.0.0": ours, "x": ours}
    assert ours == SERVER_VERSION


# at a gateway


async def test_a_public_sdk_is_told_at_once_that_no_worker_is_there(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="20")
    async with asyncio.timeout(18):  # less than SIE_LOAD_HOLD_S
        for version, status in zip(VERSIONS, (202, 202, 503, 503, 503), strict=True):
            answer = await gateway.encode("x", X_SIE_SDK_Version=version)
            assert (answer.status_code, answer.headers["x-sie-error-code"]) == (status, "PROVISIONING")
            assert answer.headers["retry-after"] == "5"
            reply = answer.json() if status == 202 else answer.json()["error"]
            assert reply["status"] == "provisioning"


async def test_a_public_sdk_is_told_within_seconds_that_a_model_is_being_loaded(cluster: InProcess) -> None:
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="20")
    await cluster.sidecar(adapter)
    async with asyncio.timeout(18):  # less than SIE_LOAD_HOLD_S
        answer = await gateway.encode("x", X_SIE_SDK_Version="0.10.1")
    assert (answer.status_code, answer.json()["code"]) == (503, "MODEL_LOADING")
    adapter.let_go()

    async def loaded() -> bool:
        return (await gateway.encode("x", X_SIE_SDK_Version="0.10.1")).status_code == 200

    await until_told(loaded, "a loaded model")
    assert adapter.loads == ["toy/one"]


async def test_a_failed_input_fails_the_request_of_a_public_sdk_unless_it_wants_slots(cluster: InProcess) -> None:
    adapter, gateway = await cluster.adapter(), await cluster.gateway()
    await cluster.sidecar(adapter)
    adapter.failures = {"bad": ErrorInfo("INVALID_INPUT", "text: it cannot be read", reason="invalid_media")}
    assert (await gateway.encode("good", "bad", "bad")).status_code == 200
    failed = await gateway.encode("good", "bad", "bad", X_SIE_SDK_Version="0.10.1")
    assert (failed.status_code, failed.json()["code"]) == (400, "INVALID_INPUT")
    assert [error["index"] for error in failed.json()["errors"]] == [1, 2]
    slots = await gateway.encode("good", "bad", X_SIE_SDK_Version="0.10.1", X_SIE_On_Item_Error="slot")
    assert [("error" in slot) for slot in slots.json()["items"]] == [False, True]
    body = {"items": ["good", "bad"], "options": {"on_item_error": "slot"}}
    by_body = await gateway.client.post("/v1/encode/toy/one", json=body, headers={"X-SIE-SDK-Version": "0.10.1"})
    assert by_body.status_code == 200


async def test_a_load_that_failed_has_the_status_and_the_facts_that_a_public_sdk_reads(cluster: InProcess) -> None:
    adapter, gateway = await cluster.adapter(), await cluster.gateway()
    adapter.refusals = {"toy/one": ModelLoadFailed("no weights", extras={"error_class": "NOT_FOUND"})}
    await cluster.sidecar(adapter)

    async def failed(**headers: str) -> httpx.Response | None:
        answer = await gateway.encode("x", **headers)
        return None if answer.json().get("code") == "MODEL_LOADING" else answer

    public = await until_told(lambda: failed(X_SIE_SDK_Version="0.10.1"), "the end of the load")
    own = await until_told(failed, "the end of the load")
    assert (public.status_code, own.status_code, public.json()["code"]) == (502, 500, "MODEL_LOAD_FAILED")
    for answer in (public, own):
        facts = {name: answer.json()["error"][name] for name in ("error_class", "permanent", "attempts")}
        assert facts == {"error_class": "NOT_FOUND", "permanent": True, "attempts": 1}


async def test_only_a_client_that_forbids_other_servers_may_name_them(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    await cluster.sidecar(await cluster.adapter())
    assert (await gateway.encode("x", X_SIE_Remote="forbid")).status_code == 200
    for value in ("allow", "only", ""):
        refused = await gateway.encode("x", X_SIE_Remote=value)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-SIE-Remote")


async def test_a_public_sdk_is_told_of_a_drain_under_a_code_that_it_repeats(cluster: InProcess) -> None:
    adapter, gateway = await cluster.adapter(), await cluster.gateway()
    await cluster.sidecar(adapter)
    adapter.hold_batches = True
    occupant = asyncio.create_task(gateway.encode("occupant"))
    await until(lambda: adapter.running, "a batch runs")
    gateway.stop.request()
    own, public = await gateway.encode("x"), await gateway.encode("x", X_SIE_SDK_Version="0.10.1")
    assert (own.status_code, own.json()["code"], own.headers["x-sie-error-code"]) == (503, *2 * ("SHUTTING_DOWN",))
    assert (public.status_code, public.json()["code"]) == (503, "QUEUE_UNAVAILABLE")
    assert (public.headers["x-sie-error-code"], public.headers["retry-after"]) == ("QUEUE_UNAVAILABLE", "1")
    assert public.json()["error"]["reason"] == "shutting_down"
    adapter.let_go()
    assert (await occupant).status_code == 200
