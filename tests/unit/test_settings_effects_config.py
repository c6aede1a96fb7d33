"""Effects of the settings of the catalogue: its models, and its readers."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from config_api import listened
from fake_adapter import toy_entry
from inprocess import settings_of
from overlays import wanted_models

from sie_config_service import access
from sie_config_service.app import create_app
from sie_config_service.routes import TABLE
from sie_config_service.state import ConfigService
from sie_contracts.errors import PermissionDenied, SIEError, Unauthenticated
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import SettingError
from sie_gateway.http.app import Gate
from sie_runtime.feed import packaged_models

PACKAGED = set(packaged_models())


def toy(model: str = "toy/one") -> ModelEntry:
    """An entry of a family that the packaged bundle serves."""
    return toy_entry(model, family="text-encoder")


def put(folder: Path, *entries: ModelEntry) -> Path:
    folder.mkdir(exist_ok=True)
    for entry in entries:
        # JSON is YAML
        (folder / f"{entry.id.replace('/', '--')}.yaml").write_bytes(msgspec.json.encode(msgspec.to_builtins(entry)))
    return folder


def test_the_models_folder_is_laid_over_the_packaged_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIE_MODELS_DIR: the default is ./models, which need not exist."""
    monkeypatch.chdir(tmp_path)
    assert {name: source for name, (_, source) in wanted_models(settings_of()).items()} == dict.fromkeys(
        PACKAGED, "packaged"
    )
    named = put(tmp_path / "elsewhere", toy())
    models = wanted_models(settings_of(SIE_MODELS_DIR=str(named)))
    assert set(models) == {*PACKAGED, "toy/one"}
    assert models["toy/one"] == (toy(), "overlay")
    replaced = toy(min(PACKAGED))
    put(tmp_path / "models", replaced, toy("toy/two"))
    models = wanted_models(settings_of())
    assert set(models) == {*PACKAGED, "toy/two"}
    assert models[replaced.id] == (replaced, "overlay")


def test_a_named_models_folder_that_cannot_be_read_ends_the_start() -> None:
    """SIE_MODELS_DIR: test_models_bucket has the same for buckets."""
    with pytest.raises(SettingError, match=r"^SIE_MODELS_DIR: "):
        wanted_models(settings_of(SIE_MODELS_DIR="/is/not/there"))


def test_the_filter_leaves_the_named_models_alone_and_an_unknown_name_ends_the_start(tmp_path: Path) -> None:
    """SIE_MODEL_FILTER."""
    folder = {"SIE_MODELS_DIR": str(put(tmp_path / "m", toy(), toy("toy/two")))}
    assert set(wanted_models(settings_of(**folder))) == {*PACKAGED, "toy/one", "toy/two"}
    assert set(wanted_models(settings_of(SIE_MODEL_FILTER=" toy/two , toy/one", **folder))) == {"toy/one", "toy/two"}
    assert set(wanted_models(settings_of(SIE_MODEL_FILTER="toy/two", **folder))) == {"toy/two"}
    with pytest.raises(SettingError, match=r"^SIE_MODEL_FILTER: .* has toy/none; did you mean toy/one or toy/two"):
        wanted_models(settings_of(SIE_MODEL_FILTER="toy/two,toy/none", **folder))


def reads(token: str, **environ: str) -> bool | type[SIEError]:
    """Return True if the config service lets this token read the export, else the class of the error."""
    try:
        access.ConfigGate(settings_of(**environ)).check(
            "GET", TABLE.match("/v1/configs/export"), f"Bearer {token}" if token else ""
        )
    except SIEError as error:
        return type(error)
    return True


def test_the_export_is_read_with_the_read_token_or_the_admin_token_and_nothing_else() -> None:
    """SIE_CONFIG_READ_TOKEN: if neither token is configured, reads are refused. The read token allows no write."""
    tokens = {"SIE_CONFIG_READ_TOKEN": "reader", "SIE_ADMIN_TOKEN": "root", "SIE_AUTH_TOKEN": "user"}
    assert [reads(token, **tokens) for token in ("reader", "root", "user", "")] == [
        True,
        True,
        Unauthenticated,
        Unauthenticated,
    ]
    assert reads("root", SIE_CONFIG_READ_TOKEN="reader") is Unauthenticated
    assert reads("", SIE_AUTH_TOKEN="user") is PermissionDenied
    gate = Gate(settings_of(**tokens))
    with pytest.raises(Unauthenticated):
        gate.check("POST", "/v1/configs/models", "Bearer reader")


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/docs/", "/docs/oauth2-redirect", "/v1/configs/models"])
async def test_the_pages_that_describe_the_service_need_what_its_other_pages_need(path: str) -> None:
    """The pages need the scope `read`, which the read token has."""
    service = ConfigService(settings_of(SIE_CONFIG_READ_TOKEN="reader", SIE_ADMIN_TOKEN="root"))
    transport = httpx.ASGITransport(listened(create_app(service)))
    async with httpx.AsyncClient(transport=transport, base_url="http://config") as client:
        for token, status in (("", 401), ("wrong", 401), ("reader", 503 if path.startswith("/v1/") else 200)):
            answer = await client.get(path, headers={"authorization": f"Bearer {token}"} if token else {})
            assert answer.status_code == status, (token, answer.text)
        assert (await client.post(path, headers={"authorization": "Bearer reader"})).status_code in (401, 403, 405)
        assert (await client.get("/healthz")).status_code == 200, "probes stay open"
