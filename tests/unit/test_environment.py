"""Environment of each process of `sie serve`, and the variables of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sie_cli.cluster import GATEWAY_URL, Cluster
from sie_cli.serve.environment import HUB, of_broker, of_components
from sie_contracts.settings import ROWS, Settings, load

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


# variables of clients


CLIENT = {"SIE_BASE_URL": "http://gateway:1", "SIE_API_KEY": "own"}


def cluster(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    for name in ("SIE_BASE_URL", "SIE_API_KEY", "SIE_AUTH_TOKEN", "SIE_GATEWAY_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"XDG_DATA_HOME": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    return Cluster.locate(load(environ=environ))


def test_no_server_warns_of_the_variables_of_clients() -> None:
    assert load(environ=CLIENT).warnings == load(environ={}).warnings
    assert load(environ={"SIE_API_KEYS": "x"}).warnings == ("SIE_API_KEYS is set, but no such setting exists",)


@pytest.mark.parametrize(
    ("environ", "url", "token"),
    [
        (CLIENT, "http://gateway:1", "own"),
        ({**CLIENT, "SIE_GATEWAY_URL": "http://named:2"}, "http://named:2", "own"),
        ({"SIE_AUTH_TOKEN": "alias"}, "http://127.0.0.1:8080", "alias"),
        ({**CLIENT, "SIE_AUTH_TOKEN": "alias"}, "http://gateway:1", "own"),
        ({}, "http://127.0.0.1:8080", None),
    ],
)
def test_commands_ask_the_gateway_and_send_the_key_of_the_environment(
    environ: dict[str, str], url: str, token: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = cluster(environ, monkeypatch, tmp_path)
    secret = target.gateway_token
    assert (target.gateway_urls, secret.reveal() if secret else None) == ([url], token)
    assert target.is_given(GATEWAY_URL) == ("SIE_BASE_URL" in environ or "SIE_GATEWAY_URL" in environ)
