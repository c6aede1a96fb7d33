"""SIE_MODELS_DIR: which files are read, which are refused, and how changes become writes while the service runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from inprocess import settings_of, until

from sie_broker.memory import MemoryServer
from sie_config_service import reload
from sie_config_service.overlay import Overlay
from sie_config_service.process import PreparedCatalogue, prepare
from sie_config_service.reload import Reload
from sie_config_service.store import CatalogueStore, normalised
from sie_config_service.workers import CatalogueReaders
from sie_contracts.errors import SIEError, ValidationFailed
from sie_contracts.models.aliases import Alias, Target
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import SettingError
from sie_contracts.wire.heartbeats import Heartbeat
from sie_runtime.feed import packaged_catalogue
from sie_runtime.process import Stop

ENTRY = "id: {}\nweights: {{package: x}}\nfamily: text-encoder\noutputs: {{dense: 4}}\nmax_tokens: {}\n"
BUNDLE = "id: eyes\npriority: 3\nfamilies: [eye]\nrequires: [pillow]\nimage: registry/eyes:1\n"


async def aliased(store: CatalogueStore, name: str, *models: str) -> None:
    """Write an alias as the API does."""
    alias = Alias(name, tuple(map(Target, models)))
    change = reload.CatalogueChange(name, await store.held(name), normalised(alias), "api", "create")
    await store.write([change], index=(await store.alias_index()).written({name: alias}))


def put(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def overlay(folder: Path, **environ: str) -> Overlay:
    return Overlay(settings_of(SIE_MODELS_DIR=str(folder), **environ))


def own(folder_overlay: Overlay) -> dict[str, int]:
    """The models of the overlay."""
    models = folder_overlay.folders().models
    return {
        name: entry.max_tokens
        for name, (entry, source) in models.items()
        if source == "overlay" and isinstance(entry, ModelEntry)
    }


def test_models_and_bundles_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    """A mounted ConfigMap has each file twice: behind a hidden folder, and as a link to that."""
    put(tmp_path, "..2026/a.yaml", ENTRY.format("org/a", 8))
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    put(tmp_path, "deep/er/b.yml", ENTRY.format("org/b", 9))
    put(tmp_path, ".c.yaml.partial", "half")
    put(tmp_path, "weights/config.json", "{}")
    put(tmp_path, "bundles/eyes.yaml", BUNDLE)
    folder_overlay = overlay(tmp_path)
    assert own(folder_overlay) == {"org/a": 8, "org/b": 9}
    folders = folder_overlay.folders()
    assert set(folders.bundles) == {*packaged_catalogue().bundles, "eyes"}
    assert (folders.bundles["eyes"].image, folders.bundles["eyes"].requires) == ("registry/eyes:1", ("pillow",))
    assert folders.files == {"org/a": "a.yaml", "org/b": "deep/er/b.yml"}
    assert set(folder_overlay.read_signature()) == {"a.yaml", "deep/er/b.yml", "bundles/eyes.yaml"}


X = ENTRY.format("org/x", 8)
EYES = {"bundles/e.yaml": BUNDLE}


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"x.yaml": ENTRY.format("org/x", "many")}, "x.yaml: $.max_tokens (line 5): "),
        ({"x.yaml": X + "poling: mean\n"}, "x.yaml: $.poling (line 6): unknown field; did you mean"),
        ({"x.yaml": "id: [\n"}, "x.yaml: $ (line 2): "),
        ({"x.yaml": ""}, "x.yaml: $: "),
        ({"x.yaml": f"id: x\nalias: [{{model: org/a, weight: 0x{'f' * 5000}}}]\n"}, "x.yaml: $ (line 2): "),
        ({"x.yaml": X, "y/x.yaml": ENTRY.format("org/x", 9)}, "y/x.yaml: $.id: org/x is in x.yaml too"),
        ({"x.yaml": X.replace("text-encoder", "eye")}, "x.yaml: $.family (line 3): "),
        ({"x.yaml": X + "bundle: ears\n"}, "x.yaml: $.bundle (line 6): there is no bundle 'ears'"),
        ({"x.yaml": X + "bundle: eyes\n", **EYES}, "x.yaml: $.bundle (line 6): bundle 'eyes' h"),
        ({**EYES, "bundles/f.yaml": BUNDLE}, "bundles/f.yaml: $.id: eyes is in bundles/e.yaml too"),
        ({"bundles/e.yaml": BUNDLE + "familys: [eye]\n"}, "bundles/e.yaml: $.familys (line 6): unknown field"),
        ({"bundles/e.yaml": BUNDLE.replace("id: eyes", "id: Eyes")}, "bundles/e.yaml: $.id (line 1): "),
        ({"bundles/e.yaml": BUNDLE.replace("[pillow]", "[a b]")}, "bundles/e.yaml: $.requires[0] (line 4): "),
        ({"x.yaml": "#" * (1 << 20) + "\n" + X}, "x.yaml: $: expected at most 1048576 bytes"),
    ],
    ids=range(14),
)
async def test_a_broken_folder_names_file_field_and_line(files: dict[str, str], place: str, tmp_path: Path) -> None:
    for name, text in files.items():
        put(tmp_path, name, text)
    with pytest.raises(ValidationFailed) as caught:
        overlay(tmp_path).folders()
    assert caught.value.message.startswith(place), caught.value.message
    with pytest.raises(SettingError, match=r"^SIE_MODELS_DIR: "):
        await prepare(settings_of(SIE_MODELS_DIR=str(tmp_path)), MemoryServer().connect("x"))


class Service:
    """The part of the config service that follows a folder, over a broker in memory."""

    def __init__(self, prepared: PreparedCatalogue, follows: Reload) -> None:
        self.store, self.reload = prepared.store, follows

    async def model(self, model: str) -> tuple[int, dict[str, Any] | None]:
        held = await self.store.held(model)
        return held.revision, held.entry


@asynccontextmanager
async def following(folder: Path, **environ: str) -> AsyncIterator[Service]:
    settings, stop = settings_of(SIE_MODELS_DIR=str(folder), **environ), Stop()
    prepared = await prepare(settings, MemoryServer().connect("sie-config"))
    follows = Reload(prepared.store, prepared.overlay, prepared.signature, CatalogueReaders(15.0))
    task = asyncio.create_task(follows.run(stop))
    try:
        yield Service(prepared, follows)
    finally:
        stop.request()
        await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    monkeypatch.setattr(reload, "WATCHED_S", 0.2)
    caplog.set_level(logging.INFO, "sie.config")


@pytest.mark.parametrize("model", ["org/a", "org__a", "a__/b__c"])
async def test_files_are_added_changed_and_removed(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the state that was read back."""
    async with following(tmp_path) as service:
        file = put(tmp_path, "new.yaml", ENTRY.format(model, 8))
        await until(lambda: f"{model} is at revision 1, as in new.yaml" in caplog.text, "the log")
        revision, entry = await service.model(model)
        assert (revision, entry and entry["max_tokens"]) == (1, 8)
        file.write_text(ENTRY.format(model, 16))
        await until(lambda: f"{model} is at revision 2, as in new.yaml" in caplog.text, "the log")
        file.unlink()
        await until(lambda: f"{model} is at revision 3, removed" in caplog.text, "the log")
        assert await service.model(model) == (3, None)
        assert [record.source for record in await service.store.history(model)] == ["overlay"] * 3


async def test_a_broken_file_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The valid file beside the broken one waits too."""
    put(tmp_path, "a.yaml", ENTRY.format("org/a", 8))
    async with following(tmp_path) as service:
        before = (await service.store.snapshot()).epoch
        put(tmp_path, "a.yaml", ENTRY.format("org/a", 16))
        broken = put(tmp_path, "b.yaml", ENTRY.format("org/b", "x"))
        await until(lambda: "b.yaml: $.max_tokens (line 5)" in caplog.text, "the log")
        await asyncio.sleep(0.1)  # several more looks
        assert caplog.text.count("so the catalogue is not changed: ") == 1
        assert (await service.store.snapshot()).epoch == before
        broken.unlink()
        await until(lambda: "org/a is at revision 2" in caplog.text, "the log")


async def test_a_file_that_cannot_be_read_yet_is_applied_once_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with mode 0600 is such a file: `chmod` changes neither its size nor its time. The test refuses the reads,
    because root may read such a file.
    """

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    async with following(tmp_path) as service:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", refused)
            put(tmp_path, "a.yaml", ENTRY.format("org/a", 8))
            await until(
                lambda: "a change of the folder of models could not be applied yet: [Errno 13]" in caplog.text,
                "the log",
            )
            await asyncio.sleep(0.1)  # several more looks
        assert caplog.text.count("models could not be applied yet") == 1
        await until(lambda: "org/a is at revision 1, as in a.yaml" in caplog.text, "the log")
        assert (await service.model("org/a"))[0] == 1


async def test_what_was_written_over_the_api_stays_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a.yaml", ENTRY.format("org/a", 8))
    async with following(tmp_path) as service:
        held = await service.store.held("org/a")
        assert held.entry is not None
        await service.store.write(
            [reload.CatalogueChange("org/a", held, {**held.entry, "max_tokens": 32}, "api", "patch")]
        )
        put(tmp_path, "a.yaml", ENTRY.format("org/a", 16))
        await until(lambda: "a.yaml is not applied, because org/a was written over the API" in caplog.text, "the log")
        revision, entry = await service.model("org/a")
        assert (revision, entry and entry["max_tokens"]) == (2, 32)


async def test_a_bundle_of_the_folder_moves_the_epoch_and_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path) as service:
        put(tmp_path, "bundles/eyes.yaml", BUNDLE)
        await until(lambda: "the bundles now match it" in caplog.text, "the log")
        put(tmp_path, "m.yaml", ENTRY.format("org/m", 8).replace("text-encoder", "eye"))
        await until(lambda: "org/m is at revision 1" in caplog.text, "the log")
        catalogue = await service.store.catalogue()
        assert catalogue.resolve("org/m").bundle == "eyes"
        with pytest.raises(SIEError) as caught:
            catalogue.resolve("default:/org/m")
        assert caught.value.extras == {"compatible_bundles": ["eyes"]}


async def test_who_has_a_change_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names a worker that lacks the change. The wait ends when the worker has it."""
    async with following(tmp_path) as service:
        workers = service.reload.workers
        assert workers is not None
        beat = Heartbeat(
            "w1", "_default", "cpu", "default", True, "1", config_epoch=(await service.store.snapshot()).epoch
        )
        workers.note(beat)
        put(tmp_path, "a.yaml", ENTRY.format("org/a", 8))
        await until(lambda: "as in a.yaml; after 0.2 s these processes do not have it: w1" in caplog.text, "the log")
        put(tmp_path, "a.yaml", ENTRY.format("org/a", 9))
        await until(lambda: "org/a is at revision 2, as in a.yaml" in caplog.text, "the log")
        epoch = (await service.store.snapshot()).epoch
        workers.note(Heartbeat("w1", "_default", "cpu", "default", True, "1", config_epoch=epoch))
        await until(
            lambda: (
                "org/a is at revision 2, as in a.yaml; all gateways and workers of its bundles have it" in caplog.text
            ),
            "the log",
        )


@pytest.mark.parametrize("at_start", [False, True], ids=["reload", "start"])
@pytest.mark.parametrize(
    ("now", "says"), [("", "no model named 'org/b'"), (ENTRY.format("org/b", 9), "the vectors of org/b differ from")]
)
async def test_an_alias_of_the_api_that_a_changed_folder_breaks_is_named(
    now: str, says: str, at_start: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Aliases of the API name models of files. A file is removed, or its model gives other vectors. The log names only
    the alias of that model.
    """
    for name in "abc":
        put(tmp_path, f"{name}.yaml", ENTRY.format(f"org/{name}", 8))
    settings, broker, stop = settings_of(SIE_MODELS_DIR=str(tmp_path)), MemoryServer().connect("sie-config"), Stop()
    prepared = await prepare(settings, broker)
    await aliased(prepared.store, "pair", "org/a", "ORG/b")
    await aliased(prepared.store, "other", "org/a", "org/c")
    assert "is invalid after a change" not in caplog.text
    if now:
        put(tmp_path, "b.yaml", now + "description: longer\n")
    else:
        (tmp_path / "b.yaml").unlink()
    if at_start:
        await prepare(settings, broker)
    else:
        task = asyncio.create_task(Reload(prepared.store, prepared.overlay, prepared.signature).run(stop))
        await until(lambda: "org/b is at revision 2" in caplog.text, "the log")
        stop.request()
        await task
    (record,) = (candidate for candidate in caplog.records if "is invalid after a change" in candidate.getMessage())
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the alias pair is invalid after a change")
    assert says.casefold() in record.getMessage().casefold()
