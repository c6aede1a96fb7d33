"""Commands find the `sie serve` of their user, and send its credentials to its own addresses alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie_broker.nats import NatsBroker
from sie_cli import access
from sie_cli.access import Access, published, read, write_private
from sie_cli.cluster import SOURCE, Cluster
from sie_contracts.settings import Secret, SettingError, load

HERE = Access(
    gateway_url="http://127.0.0.1:8080,http://127.0.0.1:8081",
    config_url="http://127.0.0.1:9001",
    broker_url="nats://127.0.0.1:9002",
    broker_monitor_url="http://127.0.0.1:9003/x",
    operator_password="pw",
    admin_token="adm",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Publish the access file of a running `sie serve` in the default data directory, and return that directory."""
    monkeypatch.setattr("sie_cli.cluster.default_data_dir", lambda: tmp_path)
    with published(tmp_path, HERE):
        yield tmp_path


def found(
    *, flags: dict[str, str] | None = None, environ: dict[str, str] | None = None, named: Path | None = None
) -> Cluster:
    return Cluster.locate(load(flags=flags or {}, environ=environ or {}), named)


def test_without_any_address_all_are_those_of_the_local_one(home: Path) -> None:
    cluster = found()
    settings = cluster.settings
    assert (settings.nats_url, settings.nats_password) == ("nats://operator@127.0.0.1:9002", Secret("pw"))
    assert (settings.config_service_url, settings.admin_token) == ("http://127.0.0.1:9001", Secret("adm"))
    assert settings.gateway_url == HERE.gateway_url
    assert cluster.gateway_token == Secret("adm")
    assert cluster.sources["SIE_NATS_URL"] == SOURCE


@pytest.mark.parametrize("where", ["flags", "environ"])
def test_credentials_go_to_their_own_address_alone(home: Path, where: str) -> None:
    """An address that only resembles one of the local server gets no credentials. The other addresses are then not
    those of the local server either.
    """
    for name, field, value in (
        ("SIE_NATS_URL", "nats_url", "nats://127.0.0.1:902"),
        ("SIE_NATS_URL", "nats_url", "nats://other:9002"),
        ("SIE_CONFIG_SERVICE_URL", "config_service_url", "http://127.0.0.1.evil.com:9001"),
        ("SIE_GATEWAY_URL", "gateway_url", "http://127.0.0.1:808"),
    ):
        cluster = found(**{where: {name: value}})
        settings = cluster.settings
        assert getattr(settings, field) == value
        assert (settings.nats_password, settings.admin_token, cluster.gateway_token) == (None, None, None), value
        assert [
            setting for setting in ("nats_url", "config_service_url", "gateway_url") if getattr(settings, setting)
        ] == [field]


def test_an_address_of_the_local_one_gets_its_credentials(home: Path) -> None:
    """The address may be one that `sie serve` or /health of a gateway reports."""
    for flags in (
        {"SIE_NATS_URL": HERE.broker_url},
        {"SIE_CONFIG_SERVICE_URL": "http://127.0.0.1:9001/"},
        {"SIE_GATEWAY_URL": "http://127.0.0.1:8081"},
    ):
        settings = found(flags=flags).settings
        assert (settings.nats_url, settings.nats_password) == ("nats://operator@127.0.0.1:9002", Secret("pw"))
        assert settings.admin_token == Secret("adm")
    assert settings.gateway_url == "http://127.0.0.1:8081", "the one of two that was named"


def test_a_named_data_directory_comes_before_the_environment_and_after_flags(home: Path) -> None:
    elsewhere = {"SIE_NATS_URL": "nats://other:4222", "SIE_NATS_PASSWORD": "theirs"}
    assert found(environ=elsewhere).settings.nats_password == Secret("theirs")
    assert found(environ=elsewhere, named=home).settings.nats_url == "nats://operator@127.0.0.1:9002"
    settings = found(flags={"SIE_NATS_URL": "nats://third:4222"}, environ=elsewhere, named=home).settings
    assert (settings.nats_url, settings.config_service_url) == ("nats://third:4222", "http://127.0.0.1:9001")


def test_the_token_of_a_named_sie_serve_goes_to_no_other_gateway(home: Path) -> None:
    foreign = {"SIE_GATEWAY_URL": "https://other"}
    assert found(flags=foreign, named=home).gateway_admin_token is None
    mine = {"SIE_ADMIN_TOKEN": "mine"}
    assert found(flags=foreign, environ=mine, named=home).gateway_admin_token == Secret("mine")
    assert found(environ=mine, named=home).gateway_admin_token == Secret("adm")


async def test_the_password_of_the_broker_goes_to_its_own_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passwords: dict[str, Secret | None] = {}

    async def opened(broker: NatsBroker, url: str, timeout_s: float, password: Secret | None) -> None:
        passwords[url] = password

    monkeypatch.setattr(NatsBroker, "open", opened)
    own = {"SIE_NATS_URL": "nats://own:4222", "SIE_NATS_PASSWORD": "pw"}
    for url in ("", "nats://of-a-gateway:4222"):
        await found(environ=own).open_broker("test", url)
    assert passwords == {"nats://own:4222": Secret("pw"), "nats://of-a-gateway:4222": None}


def test_where_none_runs_nothing_is_found_and_a_named_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no `sie serve` runs with .*: it has no access\.json of a running server"):
        found(named=tmp_path)
    assert Cluster.locate(load(environ={}), tmp_path, required=False).settings.nats_url is None
    (tmp_path / access.FILE).write_text("{}")
    with pytest.raises(SettingError, match=r"written by this version .*: restart `sie serve`, or use the `sie` that"):
        found(named=tmp_path)


def test_the_file_is_private_whole_and_gone_in_the_end(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with published(tmp_path, HERE):
            assert (tmp_path / access.FILE).stat().st_mode & 0o777 == 0o600
            assert read(tmp_path) == HERE
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_somebody_put_there_is_replaced_not_followed(tmp_path: Path) -> None:
    target, file = tmp_path / "precious", tmp_path / "file"
    target.write_text("mine")
    file.symlink_to(target)
    write_private(file, b"secret")
    assert (file.read_text(), target.read_text(), file.is_symlink()) == ("secret", "mine", False)
