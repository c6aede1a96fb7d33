"""SIE_MODELS_DIR in a bucket: which objects are read, and the errors when that fails."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from inprocess import settings_of, until
from object_stores import S3, Place, aws_environ
from overlays import wanted_models

from sie_broker.memory import MemoryServer
from sie_config_service import reload
from sie_config_service.overlay import Overlay
from sie_config_service.process import prepare
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import SettingError
from sie_runtime.process import Stop
from sie_store.models_bucket import BucketFolder
from sie_store.models_folder import SUFFIXES
from sie_store.object_stores import RetryPolicy

ENTRY = "id: {}\nweights: {{package: x}}\nfamily: text-encoder\noutputs: {{dense: 4}}\nmax_tokens: {}\n"
QUICK = RetryPolicy(stall_s=0.3, tries=2, pause_s=0.01)


def put(place: Place, name: str, text: str) -> None:
    place.put(name, text.encode())


def own(bucket_overlay: Overlay) -> dict[str, int]:
    """Return the models of the overlay without the packaged ones, which take a second to read."""
    return {
        entry.id: entry.max_tokens for entry in bucket_overlay._documents().values() if isinstance(entry, ModelEntry)
    }


def overlay(place: Place) -> Overlay:
    return Overlay(settings_of(SIE_MODELS_DIR=place.url))


def test_models_of_a_bucket_are_laid_over_the_packaged_catalogue(place: Place) -> None:
    """SIE_MODELS_DIR may be s3:// or gs://. Folders below the prefix are read too. Hidden files and files that are not
    YAML are ignored.
    """
    put(place, "a.yaml", ENTRY.format("org/a", 8))
    put(place, "deep/er/b.yml", ENTRY.format("org/b", 9))
    put(place, ".hidden/c.yaml", "half")
    put(place, "readme.txt", "half")
    assert own(overlay(place)) == {"org/a": 8, "org/b": 9}
    models = wanted_models(settings_of(SIE_MODELS_DIR=place.url, SIE_MODEL_FILTER="org/a"))
    assert {name: source for name, (_, source) in models.items()} == {"org/a": "overlay"}


def test_only_what_changed_is_read_again(faulty: Place) -> None:
    """A second look reads no object again that is unchanged. It notices changed, new and removed objects."""
    for name in "abc":
        put(faulty, f"{name}.yaml", ENTRY.format(f"org/{name}", 8))
    bucket_overlay = overlay(faulty)
    assert set(own(bucket_overlay)) == {"org/a", "org/b", "org/c"}
    before = bucket_overlay.read_signature()
    assert bucket_overlay.read_signature() == before
    faulty.server.faults.requests.clear()
    own(bucket_overlay)
    assert [request.path for request in faulty.server.faults.requests if request.path.endswith(".yaml")] == []
    put(faulty, "a.yaml", ENTRY.format("org/a", 9))
    faulty.delete("b.yaml")
    put(faulty, "d.yaml", ENTRY.format("org/d", 7))
    assert bucket_overlay.read_signature() != before
    faulty.server.faults.requests.clear()
    assert own(bucket_overlay) == {"org/a": 9, "org/c": 8, "org/d": 7}
    names = [request.path.rpartition("/")[2] for request in faulty.server.faults.requests]
    assert sorted(name for name in names if name.endswith(".yaml")) == ["a.yaml", "d.yaml"]


def test_an_object_that_was_replaced_since_the_list_is_read_whole_and_bounded(place: Place) -> None:
    """The first bytes of a longer object would often be valid YAML. An object that was empty may have any length now,
    and any object may be empty now.
    """
    short, longer = ENTRY.format("org/a", 1), ENTRY.format("org/a", 123456)
    for name, text in (("a", short), ("empty", ""), ("filled", ""), ("huge", short), ("emptied", short)):
        put(place, f"{name}.yaml", text)
    folder = BucketFolder(place.url, SUFFIXES)
    names = list(folder.list_files())
    for name, text in (("a", longer), ("filled", longer), ("huge", "#" * 5000), ("emptied", "")):
        put(place, f"{name}.yaml", text)
    expected = {"a.yaml": longer, "empty.yaml": "", "filled.yaml": longer, "huge.yaml": "#" * 4000, "emptied.yaml": ""}
    contents = folder.read(names, 4000)
    assert contents == {name: text.encode() for name, text in expected.items()}


def folder_at(url: str) -> BucketFolder:
    return BucketFolder(url, SUFFIXES, QUICK)


def test_a_store_that_stands_still_or_is_down_is_a_typed_error(seaweed: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes within a bounded time, for the list and for the bodies. When the store is back, the same folder
    object reads again.
    """
    place = Place.at(seaweed, monkeypatch)
    put(place, "a.yaml", "x")
    folder = folder_at(place.url)
    calls: list[Callable[[], object]] = [folder.list_files, lambda: folder.read({"a.yaml": 1}, 10)]
    seaweed.pause()
    try:
        began_s = time.monotonic()
        for call in calls:
            with pytest.raises(
                SettingError,
                match=r"did not reply properly \(no answer within 0\.3 s\): check that AWS_ENDPOINT_URL is right",
            ):
                call()
        assert time.monotonic() - began_s < 30
    finally:
        seaweed.resume()
    assert folder.read({"a.yaml": 1}, 10) == {"a.yaml": b"x"}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for name, value in aws_environ(f"http://127.0.0.1:{unused.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingError, match=r"^SIE_MODELS_DIR: s3://bucket/x: the store did not reply properly"):
            folder_at("s3://bucket/x").list_files()


async def test_a_bucket_is_followed_and_stays_as_it_was_while_it_cannot_be_read(
    faulty: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change becomes a write. A broken file or a store that refuses changes nothing. Later changes are followed
    again.
    """
    monkeypatch.setattr(reload, "BUCKET_LOOK_S", 0.05)
    monkeypatch.setattr(reload, "IDLE_SHARE", 1.0)
    put(faulty, "a.yaml", ENTRY.format("org/a", 8))
    stop = Stop()
    prepared = await prepare(
        settings_of(SIE_MODELS_DIR=faulty.url, SIE_MODEL_FILTER="org/a"), MemoryServer().connect("sie-config")
    )
    follows = asyncio.create_task(reload.Reload(prepared.store, prepared.overlay, prepared.signature).run(stop))

    async def has(tokens: int) -> None:
        for _ in range(600):
            if ((await prepared.store.held("org/a")).entry or {}).get("max_tokens") == tokens:
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"org/a did not come to {tokens} tokens")

    async def looks() -> None:
        request_count = len(faulty.server.faults.requests)
        await until(lambda: len(faulty.server.faults.requests) >= request_count + 6, "looks")

    try:
        await has(8)
        await asyncio.to_thread(put, faulty, "a.yaml", ENTRY.format("org/a", 9))
        await has(9)
        await asyncio.to_thread(put, faulty, "a.yaml", "id: org/a\n")
        await looks()
        faulty.server.faults.refuse = lambda _: ("403 Forbidden", "AccessDenied")
        await looks()
        await has(9)
        faulty.server.faults.refuse = lambda _: None
        await asyncio.to_thread(put, faulty, "a.yaml", ENTRY.format("org/a", 10))
        await has(10)
        # the store answers lists and refuses bodies
        faulty.server.faults.refuse = lambda request: (
            ("403 Forbidden", "AccessDenied") if request.method == "GET" and request.path.endswith(".yaml") else None
        )
        await asyncio.to_thread(put, faulty, "a.yaml", ENTRY.format("org/a", 11))
        await until(
            lambda: "a change of the folder of models could not be applied yet: SIE_MODELS_DIR" in caplog.text,
            "the log",
        )
        await has(10)
        faulty.server.faults.refuse = lambda _: None
        await has(11)
    finally:
        stop.request()
        await follows


def test_an_object_that_goes_while_the_others_are_read_is_left_out(faulty: Place) -> None:
    put(faulty, "a.yaml", ENTRY.format("org/a", 8))
    put(faulty, "b.yaml", ENTRY.format("org/b", 8))
    faulty.server.faults.refuse = lambda request: (
        ("404 Not Found", "NoSuchKey") if request.path.endswith("b.yaml") else None
    )
    assert own(overlay(faulty)) == {"org/a": 8}


@pytest.mark.parametrize("name", ["a//b.yaml", "a/./b.yaml", "a/../b.yaml", "a\x1bb.yaml"])
def test_an_object_whose_name_no_call_can_use_is_named(faulty: Place, name: str) -> None:
    """Other programs write such objects. Another attempt does not help."""
    put(faulty, "a.yaml", ENTRY.format("org/a", 8))
    key = f"{faulty.url.removeprefix('s3://')}/{name}".replace(".", "%2E").replace("\x1b", "%1B")
    httpx.put(f"{faulty.server.url}/{key}", content=b"x", trust_env=False).raise_for_status()
    faulty.server.faults.requests.clear()
    with pytest.raises(SettingError, match="rename or remove it") as caught:
        BucketFolder(faulty.url, SUFFIXES, QUICK).list_files()
    assert repr(name)[1:-1] in str(caught.value)
    assert len(faulty.server.faults.requests) == 1
