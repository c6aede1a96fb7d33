"""Environment of each process of `sie serve`."""

from __future__ import annotations

from typing import Any

import pytest

from sie_cli.serve.environment import HUB, of_broker, of_components
from sie_contracts.settings import ROWS, Settings

CLOUD = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "key",
    "GOOGLE_APPLICATION_CREDENTIALS": "f",
    "AZURE_STORAGE_KEY": "key",
}
COMMON = {"PATH": "/bin", "HOME": "/home/me", "HTTPS_PROXY": "http://proxy:3128", "CUDA_VISIBLE_DEVICES": "0"}
SECRET = {row.name: "s" for row in ROWS if row.secret}
WHOLE = {**COMMON, **CLOUD, **dict.fromkeys(HUB, "hf"), **SECRET, "SIE_NATS_URL": "nats://me:password@host:4222"}


def got(*components: str, **settings: Any) -> set[str]:
    return of_components(components, WHOLE, Settings(**settings)).keys() - COMMON.keys()


@pytest.mark.parametrize("component", ["gateway", "config", "sidecar", "adapter"])
def test_secret_settings_reach_their_readers_alone(component: str) -> None:
    readers = {row.name for row in ROWS if component in row.components}
    names = got(component, payload_store_url="s3://b", models_dir="s3://b", cluster_cache="s3://b")
    assert names & SECRET.keys() == SECRET.keys() & readers
    assert ("SIE_NATS_URL" in names) == (component != "adapter"), "it may hold a password"


def test_the_hub_s_token_reaches_adapters_alone() -> None:
    assert "HF_TOKEN" in HUB
    assert got("adapter") & HUB == HUB
    for components in (("gateway",), ("config",), ("sidecar",), ("gateway", "config", "sidecar")):
        assert not got(*components) & HUB


@pytest.mark.parametrize(
    ("setting", "url", "readers"),
    [
        ("payload_store_url", "s3://payloads", {"gateway", "sidecar"}),
        ("payload_store_url", "/a/folder", set()),
        ("models_dir", "gs://models/x", {"config", "adapter"}),
        ("models_dir", "./models", set()),
        ("cluster_cache", "s3://weights", {"adapter"}),
        ("cluster_cache", None, set()),
    ],
)
def test_keys_of_a_cloud_reach_whoever_opens_the_bucket(setting: str, url: Any, readers: set[str]) -> None:
    keys_reach(readers, **{setting: url})


def keys_reach(readers: set[str], **settings: Any) -> None:
    for component in ("gateway", "config", "sidecar", "adapter"):
        names = got(component, **settings) & CLOUD.keys()
        assert names == (CLOUD.keys() if component in readers else set()), component
    of_standalone = got("gateway", "config", "sidecar", **settings) & CLOUD.keys()
    assert bool(of_standalone) == bool(readers - {"adapter"})


def test_everything_else_is_handed_on() -> None:
    for component in ("gateway", "config", "sidecar", "adapter"):
        assert of_components((component,), WHOLE, Settings()).items() >= COMMON.items()


def test_the_broker_gets_what_is_named_alone() -> None:
    broker = {"GOGC": "50", "PATH": "/bin", "HOME": "/home/me", "GATEWAY_PASSWORD": "x"}
    assert of_broker(WHOLE, {"GATEWAY_PASSWORD": "x"}) == broker
    assert of_broker({"GOGC": "100"}, {}) == {"GOGC": "100"}
