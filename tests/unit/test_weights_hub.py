"""Fetches from a hub with every kind of fault, and files in the local cache that SIE did not fetch."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fetching import END_S, REPOSITORY, obtain
from hub_stub import COMMIT, HubStub
from object_stores import Place

from sie_contracts.errors import LoraLoadFailed, ModelLoadFailed
from sie_contracts.models.entries import LoadOptions, ModelEntry, RunDefaults, Weights
from sie_runtime.process import configure_logging
from sie_store.cluster import ClusterCache
from sie_store.weights.cache import LocalCache
from sie_store.weights.download import DownloadLimits
from sie_store.weights.hub import commit_of, hub_fetch
from sie_store.weights.manifest import MANIFEST, FetchFailed, ManifestError, verify
from sie_store.weights.progress import FetchProgress
from sie_store.weights.selection import LORA_FILES, common, wanted_by
from sie_store.weights.sources import WeightSources

BIG = "model.safetensors"


@pytest.fixture
def pushed_lora(hub: HubStub, tmp_path: Path) -> str:
    """Return the name of a LoRA that the hub and the cache `pusher` have."""
    hub.repositories["org/lora"] = LORA
    WeightSources(tmp_path / "pusher", True).locate_lora(f"org/lora@{COMMIT}", entry(), None)
    hub.sent.clear()
    return f"org/lora@{COMMIT}"


def safetensors(size: int) -> bytes:
    """Return a complete file of this format with one tensor of `size` bytes."""
    header = msgspec.json.encode({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    return struct.pack("<Q", len(header)) + header + os.urandom(size)


FILES = {
    "config.json": b'{"a": 1}',
    BIG: safetensors(300_000),
    "1_Pooling/config.json": b"{}",
    "model.py": b"x = 1",
    "onnx/model.onnx": b"o",
}
WANTED = {"config.json", BIG, "1_Pooling/config.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub(repositories={REPOSITORY: dict(FILES)}).serving() as stub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stub.url)
        yield stub


def entry(**changes: object) -> ModelEntry:
    model_entry = ModelEntry(
        id="org/model",
        weights=Weights(hub=REPOSITORY, revision=COMMIT),
        family="text-encoder",
        outputs={"dense": 8},
        max_tokens=16,
    )
    return msgspec.structs.replace(model_entry, **changes)


def is_right(cache: Path) -> bool:
    local = LocalCache(cache)
    folder, manifest = local.find(REPOSITORY, COMMIT), local.manifest(REPOSITORY, COMMIT)
    return (
        folder is not None
        and manifest is not None
        and verify(folder, manifest) == []
        and manifest.files.keys() == WANTED
    )


def cuts(hub: HubStub) -> None:
    hub.cuts = {BIG: [70_000, 1, 100_000]}


def stumbles(hub: HubStub) -> None:
    hub.failures = Counter({BIG: 2, "config.json": 1})


def has_wrong_bytes_once(hub: HubStub) -> None:
    hub.wrong = Counter({BIG: 1, "config.json": 1})


def cuts_and_knows_no_ranges(hub: HubStub) -> None:
    hub.ignores_ranges, hub.cuts = True, {BIG: [70_000]}


@pytest.mark.parametrize(
    "fault", [cuts, stumbles, has_wrong_bytes_once, cuts_and_knows_no_ranges], ids=lambda fault: fault.__name__
)
def test_what_passes_is_got_over(fault: Callable[[HubStub], None], hub: HubStub, tmp_path: Path) -> None:
    fault(hub)
    obtain(hub, tmp_path)
    assert is_right(tmp_path)
    assert (LocalCache(tmp_path).place(REPOSITORY, COMMIT) / BIG).read_bytes() == FILES[BIG]


@contextlib.contextmanager
def logs() -> Iterator[None]:
    """Set up the logs as a process has them."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    configure_logging(json=False)
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)


def test_no_log_has_an_address_which_may_be_signed_or_hold_a_password(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The levels are those of every process. Some requests succeed, and some are repeated."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url.replace("://", "://user:canary@"))
    stumbles(hub)
    with logs():
        folder = WeightSources(tmp_path, True).folder(entry())
        hub.status = 503
        with pytest.raises(ModelLoadFailed) as raised:
            WeightSources(tmp_path / "other", True).folder(entry())
    assert (folder / BIG).read_bytes() == FILES[BIG]
    output = f"{capsys.readouterr().err}{raised.value.message}"
    assert f"{REPOSITORY}@{COMMIT} is requested again: status 503" in output
    assert f"{BIG} is requested again from byte 0: status 503" in output
    for secret in ("canary", "/cdn/", "/resolve/", "://"):
        assert secret not in output, output


def gated(hub: HubStub) -> None:
    hub.token, hub.gated = "right", True


def private(hub: HubStub) -> None:
    hub.token = "right"


def another_commit(hub: HubStub) -> None:
    hub.commit = "f" * 40


def down(hub: HubStub) -> None:
    hub.status = 503


def wrong_bytes_for_ever(hub: HubStub) -> None:
    hub.wrong = Counter({BIG: 99})


def refuses_the_token(hub: HubStub) -> None:
    hub.status = 403


def a_file_outside(hub: HubStub) -> None:
    hub.repositories[REPOSITORY]["x//config.json"] = b"{}"


def nothing_to_load(hub: HubStub) -> None:
    hub.repositories[REPOSITORY] = {"notes.md": b"none"}


@pytest.mark.parametrize(
    ("fault", "error_class", "says"),
    [
        (gated, "GATED", "HF_TOKEN"),
        (private, "NOT_FOUND", "HF_TOKEN"),
        (another_commit, "NOT_FOUND", COMMIT),
        (down, "NETWORK", "HF_ENDPOINT"),
        (wrong_bytes_for_ever, "NETWORK", BIG),
        (refuses_the_token, "GATED", "HF_TOKEN"),
        (a_file_outside, "INCOMPATIBLE", "x//config.json"),
        (nothing_to_load, "INCOMPATIBLE", "none of the files"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_pass_is_a_typed_refusal_that_leaves_nothing_to_load(
    fault: Callable[[HubStub], None], error_class: str, says: str, hub: HubStub, tmp_path: Path
) -> None:
    fault(hub)
    with pytest.raises(ModelLoadFailed) as raised:
        WeightSources(tmp_path, True).folder(entry())
    assert raised.value.extras["error_class"] == error_class
    assert says in raised.value.message
    assert not list(tmp_path.rglob("snapshots/*"))


def test_a_model_that_wants_more_of_a_snapshot_gets_the_rest(hub: HubStub, tmp_path: Path) -> None:
    """A snapshot is complete if it has what a model needs. Then it serves both models, and no file is fetched twice."""
    sources, with_code = WeightSources(tmp_path, True), entry(load=LoadOptions(trust_remote_code=True))
    folder = sources.folder(entry())
    assert not (folder / "model.py").exists()
    assert sources.folder(with_code) == folder
    assert (folder / "model.py").is_file()
    request_count = len(hub.asked)
    assert sources.folder(entry()) == sources.folder(with_code) == folder
    assert len(hub.asked) == request_count
    assert hub.sent == {name: len(FILES[name]) for name in (*WANTED, "model.py")}
    manifest = LocalCache(tmp_path).manifest(REPOSITORY, COMMIT)
    assert manifest is not None
    assert manifest.left_out == ("onnx/model.onnx",)


@pytest.mark.usefixtures("sample_families")
def test_a_family_that_names_its_files_has_no_other_fetched() -> None:
    """A repository may have other checkpoints in folders beside the files of the first."""
    is_needed = wanted_by(entry(family="sample-scales"))
    names = ("agent.json", BIG, "tokenizer/tokenizer.json", "encoder/config.json", "README.md")
    surplus_files = (f"multilingual/{BIG}", "multilingual/tokenizer/tokenizer.json", "encoder/.x", "config.json")
    assert [all(map(is_needed, names)), any(map(is_needed, surplus_files))] == [True, False]
    assert wanted_by(entry())(f"multilingual/{BIG}")


def by_hand(cache: Path) -> Path:
    """Write a snapshot without a manifest or a listing. Return its folder."""
    folder = LocalCache(cache).place(REPOSITORY, COMMIT)
    for name in WANTED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FILES[name])
    return folder


def test_a_copy_by_hand_is_checked_against_the_hub_and_never_fetched_again(hub: HubStub, tmp_path: Path) -> None:
    folder = by_hand(tmp_path)
    assert WeightSources(tmp_path, True).folder(entry()) == folder
    assert not hub.sent
    assert is_right(tmp_path)
    assert LocalCache(tmp_path).candidates() == []


def test_what_is_wrong_in_a_copy_by_hand_is_replaced_and_the_file_itself_stays_untouched(
    hub: HubStub, tmp_path: Path
) -> None:
    folder = by_hand(tmp_path)
    own = tmp_path / "own"
    wrong = FILES[BIG][:-1] + bytes([FILES[BIG][-1] ^ 1])
    own.write_bytes(wrong)
    (folder / BIG).unlink()
    (folder / BIG).hardlink_to(own)
    WeightSources(tmp_path, True).folder(entry())
    assert is_right(tmp_path)
    assert own.read_bytes() == wrong
    assert hub.sent == {BIG: len(FILES[BIG])}


def cut_off(folder: Path) -> None:
    (folder / BIG).write_bytes(FILES[BIG][:-1])


def no_json(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": ')


def points_nowhere(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("../../blobs/gone")


def lacks_a_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')


def lacks_a_module(folder: Path) -> None:
    modules = (
        b'[{"path": "", "type": "T"}, {"path": "2_Normalize", "type": "x.Normalize"}, {"path": "2_Dense", "type":'
        b' "x.Dense"}]'
    )
    (folder / "modules.json").write_bytes(modules)


def was_interrupted(folder: Path) -> None:
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    (blobs / "abc.123.incomplete").touch()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_off, BIG),
        (no_json, "config.json"),
        (points_nowhere, "tokenizer.json"),
        (lacks_a_shard, "00002-of-00002"),
        (lacks_a_module, "2_Dense"),
        (was_interrupted, "incomplete"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_copy_that_contradicts_itself_is_refused_while_nobody_can_be_asked(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    damage(by_hand(tmp_path))
    with pytest.raises(ModelLoadFailed) as raised:
        WeightSources(tmp_path, False).folder(entry())
    assert raised.value.extras["error_class"] == "NOT_FOUND"
    assert says in raised.value.message
    assert "is not complete" in raised.value.message


def test_a_snapshot_that_lacks_a_file_that_the_entry_has_a_digest_of_is_none(tmp_path: Path) -> None:
    by_hand(tmp_path)
    weights = Weights(hub=REPOSITORY, revision=COMMIT, digests={"tokenizer.json": "0" * 64})
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json, which weights\.digests names"):
        WeightSources(tmp_path, False).folder(entry(weights=weights))


@pytest.mark.parametrize("name", ["../../etc", "a/b/c", "a--b/c", "", "/a/b", "a/..", "a b/c"])
def test_names_that_would_leave_the_cache_are_refused(name: str, tmp_path: Path) -> None:
    for repository, revision in ((name, COMMIT), (REPOSITORY, name)):
        with pytest.raises(ManifestError):
            LocalCache(tmp_path).find(repository, revision)
        with pytest.raises(ManifestError):
            LocalCache(tmp_path).lease(repository, revision)


def test_a_lora_comes_by_commit_and_only_its_two_files(hub: HubStub, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": safetensors(100)}
    hub.repositories["org/lora"] = {**files, "big.safetensors": bytes(9)}
    sources = WeightSources(tmp_path, True)
    located = sources.locate_lora(f"org/lora@{COMMIT}", entry(), None)
    assert located.folder == LocalCache(tmp_path).place("org/lora", COMMIT)
    assert hub.sent.keys() == files.keys()
    request_count = len(hub.asked)
    assert sources.locate_lora("org/lora", entry(), None).folder == located.folder  # the cache has only this commit
    assert WeightSources(tmp_path, False).locate_lora("org/lora", entry(), None).folder == located.folder
    assert len(hub.asked) == request_count
    assert commit_of("org/lora") == COMMIT
    for lora_name in ("org/nothing", "no name", "../x", "org/lora@main/../.."):
        with pytest.raises(LoraLoadFailed):
            sources.locate_lora(lora_name, entry(), None)


@pytest.mark.parametrize("fault", ["", "damaged", "listed by name"])
def test_the_name_of_a_client_s_lora_is_in_no_log(
    hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """This holds for the fetch of the LoRA, its repetition and the removal. A LoRA of the entry is logged by name."""
    caplog.set_level(logging.WARNING, "httpx2")  # the level that processes set
    caplog.set_level(logging.INFO, "sie")
    for name in ("canary/lora", "org/of-the-entry"):
        hub.repositories[name] = {"adapter_config.json": b"{}", "adapter_model.safetensors": safetensors(100)}
    hub.wrong = Counter({"adapter_model.safetensors": 1} if fault == "damaged" else {})
    hub.lists_only_names = fault == "listed by name"
    sources = WeightSources(tmp_path, True)
    sources.locate_lora(f"canary/lora@{COMMIT}", entry(), None).lease.close()  # type: ignore[union-attr]
    with pytest.raises(LoraLoadFailed):
        sources.locate_lora("canary/nothing", entry(), None)
    cache = LocalCache(tmp_path)
    assert cache.log_name("canary/lora", COMMIT) == "a LoRA"
    (cache.place("canary/lora", COMMIT) / MANIFEST).write_bytes(b"no manifest")
    cache.manifest("canary/lora", COMMIT)
    assert "fetched a LoRA of a client (" in caplog.text
    assert "canary" not in caplog.text
    sources.locate_lora(f"org/of-the-entry@{COMMIT}", entry(run=RunDefaults(lora=f"org/of-the-entry@{COMMIT}")), None)
    assert "org/of-the-entry" in caplog.text


def in_bucket(place: Place, cache: Path, file_names: set[str], repository: str = REPOSITORY) -> ClusterCache:
    """Return a bucket with these files of a cache's snapshot. Its manifest says that the others are left out."""
    local, bucket = LocalCache(cache), ClusterCache(place.url, DownloadLimits(tries=2, pause_s=0.01))
    manifest = local.manifest(repository, COMMIT)
    assert manifest is not None
    left_out = tuple(sorted({*manifest.left_out, *manifest.files} - file_names))
    part = msgspec.structs.replace(
        manifest, files={name: manifest.files[name] for name in file_names}, left_out=left_out
    )
    bucket.push(local.place(repository, COMMIT), part, FetchProgress("it"))
    return bucket


LORA = {"adapter_config.json": b"{}", "adapter_model.safetensors": safetensors(100), "README.md": b"# It"}


def test_a_lora_of_the_bucket_has_a_limit_and_only_its_files_are_fetched(
    hub: HubStub, faulty: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/lora"] = {**LORA, "big.txt": bytes(9)}
    LocalCache(tmp_path / "pusher").obtain("org/lora", COMMIT, hub_fetch("org/lora", COMMIT, common), "it")
    bucket = in_bucket(faulty, tmp_path / "pusher", {*LORA, "big.txt"}, "org/lora")
    folder = WeightSources(tmp_path / "worker", False, bucket).locate_lora(f"org/lora@{COMMIT}", entry(), None).folder
    assert {path.name for path in folder.iterdir()} == {*LORA_FILES, MANIFEST}
    monkeypatch.setattr("sie_store.weights.selection.MAX_LORA_BYTES", 9)
    with pytest.raises(LoraLoadFailed, match="a LoRA has at most 9"):
        WeightSources(tmp_path / "small", False, bucket).locate_lora(f"org/lora@{COMMIT}", entry(), None)


def test_offline_means_that_the_hub_is_not_asked(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's own variable HF_HUB_OFFLINE has this effect, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

    close_session()  # the client reads the variable once
    try:
        with pytest.raises(ModelLoadFailed, match="HF_HUB_OFFLINE"):
            WeightSources(tmp_path, True).folder(entry())
    finally:
        monkeypatch.undo()
        close_session()
    assert hub.asked == []


def test_a_token_opens_what_is_gated(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated(hub)
    monkeypatch.setenv("HF_TOKEN", "right")
    WeightSources(tmp_path, True).folder(entry())
    assert is_right(tmp_path)


def test_an_incomplete_file_of_another_program_is_not_continued(hub: HubStub, tmp_path: Path) -> None:
    """Browsers give such a file the same suffix. They write to it until it is complete."""
    foreign = LocalCache(tmp_path).place(REPOSITORY, COMMIT) / f"{BIG}.part"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(FILES[BIG][:100])
    obtain(hub, tmp_path)
    assert is_right(tmp_path)
    assert foreign.read_bytes() == FILES[BIG][:100]


def test_a_hub_that_sends_nothing_more_is_asked_again(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    held, go = [], threading.Event()

    def hold(name: str, sent: int) -> None:
        if name == BIG and sent >= 100_000 and not held:
            held.append(sent)
            go.wait(END_S)

    hub.before_piece = hold
    obtain(hub, tmp_path)
    go.set()
    assert is_right(tmp_path)
    assert [request.start for request in hub.of("/cdn/")] == [0, *held]


def test_a_lora_comes_from_the_next_place_while_the_bucket_is_down(
    hub: HubStub, pushed_lora: str, faulty: Place, tmp_path: Path
) -> None:
    """The next place is the hub or a copy by hand. If neither has the LoRA, the failure is that of the bucket."""
    bucket = in_bucket(faulty, tmp_path / "pusher", {"adapter_config.json", "adapter_model.safetensors"}, "org/lora")
    faulty.server.faults.refuse = lambda _: ("503 Slow Down", "SlowDown")
    folder = WeightSources(tmp_path / "worker", True, bucket).locate_lora(pushed_lora, entry(), None).folder
    assert hub.sent.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    copy = LocalCache(tmp_path / "copied").place("org/lora", COMMIT)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(MANIFEST))
    assert WeightSources(tmp_path / "copied", False, bucket).locate_lora(pushed_lora, entry(), None).folder == copy
    with pytest.raises(LoraLoadFailed, match="the store did not reply properly"):
        WeightSources(tmp_path / "alone", False, bucket).locate_lora(pushed_lora, entry(), None)


def test_a_cache_that_may_not_be_written_to_serves_and_says_what_it_lacks(hub: HubStub, tmp_path: Path) -> None:
    """The weights may be part of an image."""
    obtain(hub, tmp_path)
    shutil.rmtree(tmp_path / "hub" / ".locks")
    unwritable = tmp_path / "hub" / ".locks"
    unwritable.write_bytes(b"")  # root may write to any folder, but not below a file
    with pytest.raises(FetchFailed, match="set SIE_LOCAL_CACHE to a folder") as raised:
        obtain(hub, tmp_path)
    assert raised.value.error_class == "UNKNOWN"


def test_what_the_hubs_own_client_completed_counts_by_its_listing(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client writes the listing first, which shows what is missing. SIE fetches only that."""
    from huggingface_hub import snapshot_download

    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    snapshot = Path(snapshot_download(REPOSITORY, revision=COMMIT, cache_dir=tmp_path / "hub", endpoint=hub.url))
    request_count = len(hub.asked)
    assert WeightSources(tmp_path, True).folder(entry()) == snapshot
    assert len(hub.asked) == request_count
    (snapshot / "config.json").unlink()
    hub.sent.clear()
    assert LocalCache(tmp_path).find(REPOSITORY, COMMIT) is None
    assert WeightSources(tmp_path, True).folder(entry()) == snapshot
    assert hub.sent == {"config.json": len(FILES["config.json"])}
    assert LocalCache(tmp_path).candidates() == []  # SIE did not fetch it


def test_a_partial_download_has_no_name_in_logs_since_a_client_may_have_chosen_it(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--canary--lora" / "partial" / COMMIT).mkdir(parents=True)
    cache = LocalCache(tmp_path)
    (candidate,) = cache.candidates()
    assert cache.log_name(candidate.repository, candidate.revision) == "an unfinished download"
