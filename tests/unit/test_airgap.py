"""`sie airgap`: models of any source are archived, and loaded where nothing but the archive is available."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from cluster import SIE, until
from safetensors.numpy import save

from sie_cli.airgap import command, contents, placing
from sie_cli.airgap.archive import ByteProgress
from sie_cli.airgap.command import airgap
from sie_cli.refusal import CommandRefused
from sie_config_service.overlay import Overlay
from sie_contracts.models.catalogue import fingerprint, profile_fingerprint
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Settings, load
from sie_store import durable
from sie_store.configured import weight_sources
from sie_store.weights.manifest import MANIFEST, FileFact, Manifest, digest, encode

COMMIT, LORA_COMMIT = "1" * 40, "2" * 40
CARD = "---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n"
ENCODER: dict[str, Any] = {"family": "text-encoder", "outputs": {"dense": 8}, "max_tokens": 16}
WEIGHTS = save({"weight": np.arange(4096, dtype=np.float32)})


def model_files(folder: Path, **more: str | bytes) -> Path:
    """Return a folder with the files that every load reads, and files that none reads."""
    files: dict[str, str | bytes] = {
        "config.json": "{}",
        "model.safetensors": WEIGHTS,
        "tokenizer.json": "{}",
        "README.md": CARD,
        "1_Pooling/config.json": "{}",
        "pytorch_model.bin": b"never",
        "onnx/model.json": "{}",
        ".cache/x.json": "{}",
        "LICENSE": "Do what you like.\n",
        **more,
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


@dataclass(frozen=True)
class Site:
    """Site where an archive is created or loaded: its variables, and the folder in which commands run."""

    folder: Path
    environ: dict[str, str]

    @property
    def settings(self) -> Settings:
        return load(environ=self.environ).settings

    def sie(self, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(
            airgap, list(arguments), env=dict.fromkeys(os.environ) | self.environ, prog_name="sie airgap"
        )
        assert result.exit_code == status, result.output
        return result

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environ = {"PATH": os.environ["PATH"], **self.environ}
        return subprocess.Popen(
            [SIE, "airgap", *arguments],
            env=environ,
            cwd=self.folder,
            stderr=subprocess.PIPE,
            preexec_fn=_heed_ctrl_c,
            **options,
        )

    def entries(self) -> dict[str, ModelEntry]:
        return {
            name: entry
            for name, (entry, _) in Overlay(self.settings).folders().models.items()
            if isinstance(entry, ModelEntry)
        }

    def add(self, name: str, **fields: Any) -> None:
        (self.folder / "models").mkdir(exist_ok=True)
        (self.folder / "models" / f"{name}.yaml").write_text(yaml.safe_dump({"id": f"my/{name}", **ENCODER, **fields}))


def _heed_ctrl_c() -> None:
    """Restore the default action of SIGINT in the child. A shell makes its background jobs and all that they start
    ignore SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begun(folder: Path) -> Site:
    """Return a site with one model, whose weights are in a folder. Downloads are off."""
    site = Site(
        folder, {"HF_HOME": str(folder / "cache"), "SIE_HF_FALLBACK": "false", "SIE_MODELS_DIR": str(folder / "models")}
    )
    folder.mkdir()
    site.add("path", weights={"path": str(model_files(folder / "weights" / "path"))})
    return site


@dataclass(frozen=True)
class Archive:
    """Archive of my/path, and the index that `create` printed."""

    path: Path
    index: str

    def __str__(self) -> str:
        return str(self.path)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = tmp_path_factory.mktemp("archive")
    printed = begun(folder / "office").sie("create", "--models", "my/path", "-o", str(folder / "models.tar")).output
    return Archive(folder / "models.tar", printed.split("index ")[1].split(";")[0])


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Site with everything: a model of a folder, one of the hub's cache, one of a package."""
    folder = tmp_path / "office"
    site = begun(folder)
    model_files(folder / "cache" / "hub" / "models--my--hub" / "snapshots" / COMMIT)
    site.add("hub", weights={"hub": "my/hub", "revision": COMMIT}, license="mit")
    about = folder / "site" / "tiny_weights-1.5.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: tiny-weights\nVersion: 1.5\nLicense-Expression: MIT\n"
    )
    (about / "LICENSE").write_text("MIT text\n")
    packaged = model_files(folder / "site" / "tiny_weights")
    names = [*sorted(packaged.rglob("*")), *sorted(about.iterdir()), about / "RECORD"]
    (about / "RECORD").write_text(
        "".join(f"{path.relative_to(folder / 'site')},,\n" for path in names if not path.is_dir())
    )
    site.add("package", weights={"package": "tiny-weights"})
    monkeypatch.syspath_prepend(folder / "site")
    importlib.invalidate_caches()
    return site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Site without anything."""
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder, {"HF_HOME": str(folder / "nothing")})


def served(folder: Path) -> Site:
    """Return a site with the settings in `serve.env` of a loaded folder."""
    return Site(folder, dict(line.split("=", 1) for line in (folder / "serve.env").read_text().splitlines()))


def gone(office: Site) -> None:
    """Remove everything of the site where the archive was created."""
    shutil.rmtree(office.folder)
    importlib.invalidate_caches()


def test_what_was_loaded_is_what_was_archived_wherever_it_came_from(office: Site, site: Site) -> None:
    """Fingerprints, revisions and bytes are equal. Weights are found without the cache, the package, the hub and the
    folder that they were archived from.
    """
    before = office.entries()
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    office.sie("create", "--models", "my/path,my/hub", "--models", "my/package", "-o", str(archive))
    gone(office)
    site.sie("load", str(archive), "--folder", str(folder))
    there = served(folder)
    assert not there.settings.hf_fallback
    after = there.entries()
    assert set(after) == {"my/path", "my/hub", "my/package"}
    for name, entry in after.items():
        assert fingerprint(entry, entry.load, "float32") == fingerprint(before[name], before[name].load, "float32")
        assert entry.revision == before[name].revision
        weights_folder = weight_sources(there.settings).folder(entry)
        assert weights_folder.is_relative_to(folder)
        names = {path.relative_to(weights_folder).as_posix() for path in weights_folder.rglob("*") if path.is_file()}
        assert names == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "README.md",
            "1_Pooling/config.json",
            "LICENSE",
        }
        assert (weights_folder / "model.safetensors").read_bytes() == WEIGHTS
    site.sie("verify", str(folder))


@pytest.mark.long
def test_equal_models_are_equal_archives(office: Site, tmp_path: Path) -> None:
    """Neither the dates of files nor the order of the names matters."""
    first_path, two = tmp_path / "1.tar", tmp_path / "2.tar"
    first = office.sie("create", "--models", "my/path,my/hub", "-o", str(first_path))
    for path in (office.folder / "weights").rglob("*"):
        os.utime(path, (0, 0))
    second = office.sie("create", "--models", "my/hub,my/path", "-o", str(two))
    assert first_path.read_bytes() == two.read_bytes()
    assert first.output.split("index ")[1].split(";")[0] == second.output.split("index ")[1].split(";")[0]


def test_licences_and_the_bill_of_materials_come_along(office: Site, site: Site) -> None:
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    printed = office.sie("create", "--models", "my/path,my/hub,my/package", "-o", str(archive)).output
    assert "my/path     local         apache-2.0" in printed
    site.sie("load", str(archive), "--folder", str(folder))
    page = (folder / "licences" / "models" / "my_2fpath.txt").read_text()
    assert page.startswith("my/path\nlicence: Apache-2.0\n")
    assert "Do what you like." in page
    texts = (folder / "licences" / "software.txt").read_text()
    assert "######## tiny-weights 1.5, licence: MIT ########\n\n==== LICENSE ====\n\nMIT text\n" in texts
    assert "Permission is hereby granted" in texts.split("######## pyyaml")[1].split("########")[1]
    components = {
        component["bom-ref"]: component
        for component in json.loads((folder / "sbom.cdx.json").read_text())["components"]
    }
    assert components["model:my/hub"]["purl"] == f"pkg:huggingface/my/hub@{COMMIT}"
    assert components["model:my/hub"]["licenses"] == [{"license": {"id": "MIT"}}]
    file = components["model:my/path"]["components"][-2]
    assert file["name"] == "weights/my_2fpath/model.safetensors"
    assert file["hashes"] == [{"alg": "SHA-256", "content": digest(folder / file["name"])}]
    assert components["pkg:pypi/tiny-weights@1.5"]["licenses"] == [{"license": {"id": "MIT"}}]


@pytest.mark.long
def test_a_manifest_saves_a_reading_and_is_not_believed(
    office: Site, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that differs from the manifest of its snapshot is refused while it is written into the archive."""
    folder = office.folder / "cache" / "hub" / "models--my--hub" / "snapshots" / COMMIT
    names = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    facts = {name: FileFact((folder / name).stat().st_size, digest(folder / name)) for name in names}
    (folder / MANIFEST).write_bytes(encode(Manifest("my/hub", COMMIT, facts)))
    files: set[str] = set()

    def digest_of_file(path: Path, progress: ByteProgress) -> str:
        files.add(path.relative_to(folder).as_posix())
        return digest(path, progress)

    monkeypatch.setattr(contents, "digest_of_file", digest_of_file)
    archive = site.folder / "models.tar"
    office.sie("create", "--models", "my/hub", "-o", str(archive))
    assert files == {MANIFEST, "1_Pooling/config.json", "LICENSE"}
    site.sie("load", str(archive), "--folder", str(site.folder / "airgap"))
    assert (site.folder / "airgap" / "weights" / "my_2fhub" / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
    (folder / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))
    refused = office.sie("create", "--models", "my/hub", "-o", str(archive), "--force", status=1)
    assert "weights/my_2fhub/model.safetensors does not match its checksum" in refused.output
    assert list(site.folder.glob(".models*")) == []
    site.sie("verify", str(archive))  # the old archive is still there


def test_the_progress_of_digests_ends_at_the_bytes_that_no_manifest_has(office: Site) -> None:
    folder = office.folder / "weights" / "path"
    manifest = Manifest(
        "my/path", COMMIT, {"model.safetensors": FileFact(len(WEIGHTS), digest(folder / "model.safetensors"))}
    )
    (folder / MANIFEST).write_bytes(encode(manifest))
    gathering = contents.FileGathering(weight_sources(office.settings), None)
    gathering.model(office.entries()["my/path"])
    sizes: list[int] = []
    gathering.facts(sizes.append)
    assert 0 < sum(sizes) == gathering.unread_bytes == gathering.bytes - len(WEIGHTS)


def test_weights_that_differ_from_their_entry_are_refused_where_they_can_be_repaired(
    office: Site, tmp_path: Path
) -> None:
    office.add(
        "path", weights={"path": str(office.folder / "weights" / "path"), "digests": {"model.safetensors": "0" * 64}}
    )
    refused = office.sie("create", "--models", "my/path", "-o", str(tmp_path / "models.tar"), status=1)
    assert "my/path: model.safetensors has the SHA-256" in refused.output
    assert list(tmp_path.glob("*.tar")) == []


@pytest.mark.long
def test_loras_of_the_hub_come_along_and_those_of_a_path_are_refused(office: Site, site: Site) -> None:
    """A LoRA's name is a part of the fingerprint of its profile, so it stays."""
    lora = office.folder / "cache" / "hub" / "models--my--lora"
    (lora / "snapshots" / LORA_COMMIT).mkdir(parents=True)
    (lora / "snapshots" / LORA_COMMIT / "adapter_config.json").write_text("{}")
    (lora / "snapshots" / LORA_COMMIT / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (lora / "refs").mkdir()
    (lora / "refs" / "main").write_text(LORA_COMMIT)
    weights = {"path": str(office.folder / "weights" / "path")}
    loras = {"tuned": "my/lora", "pinned": f"my/lora@{LORA_COMMIT}", "mine": "./x"}
    office.add("tuned", weights=weights, profiles={profile: {"run": {"lora": lora}} for profile, lora in loras.items()})
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    refused = office.sie("create", "--models", "my/tuned", "-o", str(archive), status=1)
    assert "my/tuned names the LoRA ./x by a path" in refused.output
    before = office.entries()["my/tuned"]
    office.sie("create", "--models", "my/tuned", "--profile", "tuned", "--profile", "pinned", "-o", str(archive))
    gone(office)
    site.sie("load", str(archive), "--folder", str(folder))
    there = served(folder)
    entry = there.entries()["my/tuned"]
    assert set(entry.profiles) == {"tuned", "pinned"}
    for profile in entry.profiles.values():
        located = weight_sources(there.settings).locate_lora(str(profile.run.lora), entry, None)
        assert (located.folder / "adapter_config.json").read_text() == "{}"
    for profile in entry.profiles:
        assert profile_fingerprint("x", entry, profile) == profile_fingerprint("x", before, profile)


def test_a_profile_comes_along_with_all_profiles_above_it_unchanged(office: Site, site: Site) -> None:
    """A profile inherits nothing from the parent of its parent, but its parent names it."""
    profiles: dict[str, Any] = {name: {"run": {"instruction": name}} for name in ("a", "b", "c", "d")}
    profiles["a"]["extends"], profiles["b"]["extends"] = "b", "c"
    office.add("layered", weights={"path": str(office.folder / "weights" / "path")}, profiles=profiles)
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    before = office.entries()["my/layered"]
    office.sie("create", "--models", "my/layered", "--profile", "a", "-o", str(archive))
    site.sie("load", str(archive), "--folder", str(folder))
    entry = served(folder).entries()["my/layered"]
    assert entry.profiles == {name: before.profiles[name] for name in ("a", "b", "c")}


def test_a_licence_does_not_control_the_terminal(office: Site) -> None:
    card = '---\nlicense: "\\e[2J\\nmit"\n---\n'
    folder = model_files(office.folder / "weights" / "own", **{"README.md": card})
    office.add("own", weights={"path": str(folder)})
    archive = office.folder / "models.tar"
    created = office.sie("create", "--models", "my/own", "-o", str(archive))
    loaded_output = office.sie("load", str(archive), "--folder", str(office.folder / "airgap")).output
    assert all("?[2J mit" in output and "\x1b" not in output for output in (created.output, loaded_output))


def test_a_profile_that_an_alias_names_is_not_left_out(office: Site) -> None:
    """The site could not serve such an alias, and nothing beside it."""
    profiles: dict[str, Any] = {"short": {"run": {"instruction": "x"}}, "long": {}}
    office.add("own", weights={"path": str(office.folder / "weights" / "path")}, profiles=profiles)
    (office.folder / "models" / "alias.yaml").write_text(yaml.safe_dump({"id": "search", "alias": "my/own:long"}))
    archive = office.folder / "models.tar"
    refused = office.sie("create", "--models", "search", "--profile", "short", "-o", str(archive), status=1)
    assert "the alias search" in refused.output
    assert not archive.exists()
    office.sie("create", "--models", "search", "--profile", "long", "-o", str(archive))


@pytest.mark.parametrize("config", ["{}", "[]", "{", '{"model_name": 5}'])
def test_a_model_that_does_not_name_its_backbone_is_refused(office: Site, config: str) -> None:
    folder = model_files(office.folder / "weights" / "gliner", **{"gliner_config.json": config})
    office.add("gliner", weights={"path": str(folder)}, family="gliner", outputs={"entities": 0})
    refused = office.sie("create", "--models", "my/gliner", "-o", str(office.folder / "models.tar"), status=1)
    assert isinstance(refused.exception, SystemExit)
    assert "gliner_config.json" in refused.output


@pytest.mark.parametrize(
    "fields", [{"load": {"trust_remote_code": True}}, {"profiles": {"own": {"load": {"trust_remote_code": True}}}}]
)
def test_code_of_a_model_comes_along_and_is_told_of_wherever_its_entry_allows_it(
    office: Site, site: Site, fields: dict[str, Any]
) -> None:
    """A profile has load options of its own."""
    weights = {"path": str(model_files(office.folder / "weights" / "code", **{"modeling.py": "x = 1"}))}
    office.add("code", weights=weights, **fields)
    office.add("plain", weights=weights, profiles={"own": {"load": {"precision": "float32"}}, "other": {}})
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    office.sie("create", "--models", "my/code,my/plain", "-o", str(archive))
    output = site.sie("load", str(archive), "--folder", str(folder)).output
    assert "warning: loading my/code runs code that is in the archive" in output
    assert (folder / "weights" / "my_2fcode" / "modeling.py").read_text() == "x = 1"
    assert not (folder / "weights" / "my_2fplain" / "modeling.py").exists()


@pytest.mark.long
def test_backbones_that_a_gliner_only_names_come_along(office: Site, site: Site) -> None:
    """The backbone is below the folder of the model, where a load looks first."""
    backbone = office.folder / "cache" / "hub" / "models--org--backbone"
    model_files(backbone / "snapshots" / COMMIT)
    (backbone / "refs").mkdir()
    (backbone / "refs" / "main").write_text(COMMIT)
    gliner = model_files(
        office.folder / "weights" / "gliner", **{"gliner_config.json": json.dumps({"model_name": "org/backbone"})}
    )
    office.add("gliner", weights={"path": str(gliner)}, family="gliner", outputs={"entities": 0})
    archive = site.folder / "models.tar"
    office.sie("create", "--models", "my/gliner", "-o", str(archive))
    site.sie("load", str(archive), "--folder", str(site.folder / "airgap"))
    inside = site.folder / "airgap" / "weights" / "my_2fgliner" / "org" / "backbone"
    assert sorted(path.name for path in inside.iterdir()) == ["config.json", "tokenizer.json"]
    shutil.rmtree(backbone)
    refused = office.sie("create", "--models", "my/gliner", "-o", str(archive), "--force", status=1)
    assert "hf download org/backbone" in refused.output


def test_golden_vectors_aliases_and_bundles_of_an_operator_come_along(office: Site, site: Site) -> None:
    (office.folder / "golden.json").write_text('{"dense": []}')
    weights = {"path": str(office.folder / "weights" / "path")}
    office.add("golden", weights=weights, golden=str(office.folder / "golden.json"), bundle="special")
    (office.folder / "models" / "alias.yaml").write_text("id: search\nalias: my/golden\n")
    (office.folder / "models" / "bundles").mkdir()
    for bundle, family in (("special", "text-encoder"), ("unused", "detector")):
        (office.folder / "models" / "bundles" / f"{bundle}.yaml").write_text(f"id: {bundle}\nfamilies: [{family}]\n")
    archive, folder = site.folder / "models.tar", site.folder / "airgap"
    office.sie("create", "--models", "search", "-o", str(archive))
    gone(office)
    site.sie("load", str(archive), "--folder", str(folder))
    folders = Overlay(served(folder).settings).folders()
    assert set(folders.models) == {"search", "my/golden"}
    assert folders.bundles["special"].families == ("text-encoder",)
    assert [path.stem for path in (folder / "models" / "bundles").iterdir()] == ["special"]
    entry = served(folder).entries()["my/golden"]
    assert Path(entry.golden).read_text() == '{"dense": []}'


@pytest.mark.long
def test_a_load_that_is_repeated_changes_nothing_and_another_archive_is_refused(
    archive: Archive, office: Site, site: Site
) -> None:
    first, second, folder = archive.path, site.folder / "2.tar", site.folder / "airgap"
    office.sie("create", "--models", "my/hub", "-o", str(second))
    site.sie("load", str(first), "--folder", str(folder))
    inode = folder.stat().st_ino
    again = site.sie("load", str(first), "--folder", str(folder))
    assert f"loaded {folder}" in again.output
    assert folder.stat().st_ino == inode
    assert "has another archive" in site.sie("load", str(second), "--folder", str(folder), status=1).output
    assert (
        "has other contents: name another --folder"
        in site.sie("load", str(second), "--folder", str(site.folder), status=1).output
    )
    (folder / "weights" / "my_2fpath" / "config.json").write_text("[]x")
    assert "config.json has 3 bytes" in site.sie("load", str(first), "--folder", str(folder), status=1).output


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_an_empty_or_missing_folder_is_loaded_into(archive: Archive, site: Site, exists: bool) -> None:
    volume, link = site.folder / "volume", site.folder / "airgap"
    if exists:
        volume.mkdir()
    link.symlink_to(volume)
    site.sie("load", str(archive.path), "--folder", str(link))
    assert link.is_symlink()
    assert "is whole" in site.sie("verify", str(volume)).output


def test_a_mount_point_is_refused_before_anything_is_unpacked(
    archive: Archive, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to rename a folder to a mount point."""
    volume = site.folder / "volume"
    volume.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    refused = site.sie("load", str(archive.path), "--folder", str(volume), status=1)
    assert f"{volume} is a mount point, which a load cannot replace: use --folder {volume}/airgap" in refused.output
    site.sie("load", str(archive.path), "--folder", str(volume / "airgap"))


def test_the_index_that_create_printed_can_be_asked_for(archive: Archive, site: Site) -> None:
    """The index gives a chain of custody without signatures: one line that is carried apart from the file."""
    folder, index = site.folder / "airgap", archive.index
    assert "--index is" in site.sie("load", str(archive), "--index", "0" * 64, "--folder", str(folder), status=1).output
    assert not folder.exists()
    site.sie("load", str(archive), "--index", index.upper(), "--folder", str(folder))
    assert index in site.sie("verify", str(folder), "--index", index).output


def test_verify_names_every_file_that_changed(archive: Archive, site: Site) -> None:
    folder = site.folder / "airgap"
    site.sie("load", str(archive), "--folder", str(folder))
    assert "is whole: 1 model, " in site.sie("verify", str(archive)).output
    weights = folder / "weights" / "my_2fpath"
    (weights / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))
    (weights / "config.json").unlink()
    printed = site.sie("verify", str(folder), status=1).output
    assert "weights/my_2fpath/model.safetensors has the SHA-256" in printed
    assert "weights/my_2fpath/config.json is missing" in printed
    assert "2 of " in printed


def test_a_folder_that_was_moved_says_where_it_is_once_it_is_served(archive: Archive, site: Site) -> None:
    folder, moved = site.folder / "airgap", site.folder / "moved"
    site.sie("load", str(archive), "--folder", str(folder), "--at", "/mnt/models")
    assert "SIE_MODELS_DIR=/mnt/models/models\n" in (folder / "serve.env").read_text()
    folder.rename(moved)
    index, _ = placing.loaded(moved)
    placing.place(moved, index, moved)
    there = served(moved)
    assert weight_sources(there.settings).folder(there.entries()["my/path"]) == moved / "weights" / "my_2fpath"


def test_serve_refuses_a_folder_that_is_not_whole(archive: Archive, site: Site) -> None:
    folder = site.folder / "airgap"
    assert "was not created by `sie airgap load`" in site.sie("serve", "--folder", str(folder), status=1).output
    site.sie("load", str(archive), "--folder", str(folder))
    (folder / "weights" / "my_2fpath" / "config.json").unlink()
    assert "weights/my_2fpath/config.json is missing" in site.sie("serve", "--folder", str(folder), status=1).output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--models", "my/pth"], 2, "no model named 'my/pth' in the catalogue; did you mean my/path"),
        (["--models", " , "], 2, "names no model"),
        (["--models", "my/path", "--profile", "fast"], 2, "no profile fast of these models; there are: none"),
        (["--models", "my/absent"], 1, "is not in the local cache"),
        (["--models", "my/linked"], 1, "2_Dense is a link to a folder, which is not followed"),
        (
            ["--models", "my/foreign"],
            1,
            "names its backbone by the path /weights/deberta, which another machine does not have",
        ),
        (["--models", "my/unproven"], 1, "golden vectors absent.json are missing"),
        (["--models", "my/tuned"], 1, "my/tuned names the LoRA mine by a path of this machine or of SIE_MODELS_DIR"),
        (["--models", "my/path", "-o", "/proc/absent/m.tar"], 1, "there is no folder /proc/absent"),
    ],
)
def test_what_cannot_be_archived_is_said_in_one_line(
    office: Site, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    office.add("absent", weights={"hub": "my/absent", "revision": COMMIT})
    office.add("linked", weights={"path": str(model_files(office.folder / "linked"))})
    (office.folder / "linked" / "2_Dense").symlink_to(office.folder / "weights" / "path")
    foreign = model_files(office.folder / "foreign", **{"gliner_config.json": '{"model_name": "/weights/deberta"}'})
    office.add("foreign", weights={"path": str(foreign)}, family="gliner", outputs={"entities": 0})
    office.add("unproven", weights={"path": str(office.folder / "weights" / "path")}, golden="absent.json")
    office.add("tuned", weights={"path": str(office.folder / "weights" / "path")}, run={"lora": "mine"})
    model_files(office.folder / "models" / "mine", **{"adapter_config.json": "{}", "adapter_model.safetensors": "x"})
    output = [] if "-o" in arguments else ["-o", str(tmp_path / "models.tar")]
    result = office.sie("create", *arguments, *output, status=status)
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert list(tmp_path.glob("*.tar*")) == []


def test_what_is_in_the_way_and_what_the_disk_cannot_hold_is_refused_before_anything_is_read(
    office: Site, tmp_path: Path
) -> None:
    archive = tmp_path / "models.tar"
    archive.write_bytes(b"precious")
    assert (
        "exists: --force replaces it"
        in office.sie("create", "--models", "my/path", "-o", str(archive), status=1).output
    )
    os.truncate(office.folder / "weights" / "path" / "model.safetensors", 8 << 40)  # reading so much would take an hour
    refused = office.sie("create", "--models", "my/path", "-o", str(archive), "--force", status=1)
    assert "8.0 TiB: free space" in refused.output
    assert archive.read_bytes() == b"precious"


def test_of_two_creates_of_one_file_the_second_never_replaces_or_removes_what_the_first_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, sync = tmp_path / "models.tar", durable.sync
    with command._written(archive, force=False) as first:
        with pytest.raises(CommandRefused, match="another `sie airgap` writes"):
            command._written(archive, force=True).__enter__()
        first.write(b"first")
    with pytest.raises(CommandRefused, match="exists: --force replaces it"):
        command._written(archive, force=False).__enter__()
    assert list(tmp_path.iterdir()) == [archive]

    with ExitStack() as later:

        def begin_next(path: Path) -> None:
            """Begin the third archive when the second has its final name, and its writer has not ended yet."""
            monkeypatch.setattr(durable, "sync", sync)
            later.enter_context(command._written(archive, force=True)).write(b"third")

        monkeypatch.setattr(durable, "sync", begin_next)
        with command._written(archive, force=True) as second:
            second.write(b"second")
        assert archive.read_bytes() == b"second"
    assert archive.read_bytes() == b"third"


def test_a_load_that_ends_leaves_the_files_of_the_next_load(tmp_path: Path) -> None:
    folder = tmp_path / "airgap"
    with ExitStack() as later:
        with placing._loading(folder) as partial:
            partial.rename(folder)
            (later.enter_context(placing._loading(folder)) / "file").touch()
        assert (partial / "file").exists()


@pytest.mark.long
def test_from_pipe_to_pipe(office: Site, site: Site) -> None:
    """`sie airgap create -o - | ssh site sie airgap load -` needs no file in between."""
    environ = {"PYTHONPATH": str(office.folder / "site"), **office.environ}
    create = Site(office.folder, environ).start(
        "create", "--models", "my/path,my/package", "-o", "-", stdout=subprocess.PIPE
    )
    loading = site.start("load", "-", stdin=create.stdout, stdout=subprocess.PIPE)
    assert create.stdout is not None
    create.stdout.close()
    printed, errors = loading.communicate(timeout=60)
    assert create.stderr is not None
    errors += create.stderr.read()
    create.stderr.close()
    assert (create.wait(60), loading.returncode) == (0, 0), errors
    assert f"loaded {site.folder / 'airgap'}" in printed.decode()
    assert (site.folder / "airgap" / "weights" / "my_2fpackage" / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_load_that_is_ended_in_the_middle_leaves_no_folder_and_is_repeated(
    archive: Archive, site: Site, number: int
) -> None:
    """Ctrl-C leaves nothing. SIGKILL leaves a partial folder, which the next load removes."""
    folder, data = site.folder / "airgap", archive.path.read_bytes()
    loading = site.start("load", "-", stdin=subprocess.PIPE)
    assert loading.stdin is not None
    loading.stdin.write(data[:-8192])  # the archive ends there for now
    loading.stdin.flush()
    partial = site.folder / ".airgap.loading"
    until(lambda: (partial / "sbom.cdx.json").exists(), 60, "the load is under way")
    loading.send_signal(number)
    _, errors = loading.communicate(timeout=60)
    assert loading.returncode == (130 if number == signal.SIGINT else -number), errors
    assert not folder.exists()
    assert partial.exists() == (number == signal.SIGKILL)
    site.sie("load", str(archive), "--folder", str(folder))
    assert [path.name for path in site.folder.iterdir()] == ["airgap"]
    site.sie("verify", str(folder))


@pytest.mark.long
def test_a_create_that_is_ended_leaves_no_archive(office: Site, tmp_path: Path) -> None:
    """Ctrl-C comes while 8 GiB of weights are read. Before that, a second `create` of the same archive is refused."""
    weights = office.folder / "weights" / "path" / "model.safetensors"
    os.truncate(weights, 8 << 30)
    growing = tmp_path / ".models.tar.part"
    left = growing.write_bytes(b"of one that was killed")
    creating = office.start("create", "--models", "my/path", "-o", str(tmp_path / "models.tar"))
    until(lambda: creating.poll() is not None or growing.stat().st_size != left, 60, "the archive is being written")
    second = office.sie("create", "--models", "my/path", "-o", str(tmp_path / "models.tar"), status=1)
    assert "another `sie airgap` writes" in second.output
    creating.send_signal(signal.SIGINT)
    _, errors = creating.communicate(timeout=60)
    assert creating.returncode == 130, errors
    assert [path for path in tmp_path.iterdir() if path != office.folder] == []


@pytest.mark.long
def test_an_archive_has_only_plain_files(office: Site, tmp_path: Path) -> None:
    """`create` follows the links in the cache of the hub and archives their targets."""
    snapshot = office.folder / "cache" / "hub" / "models--my--hub" / "snapshots" / COMMIT
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    office.sie("create", "--models", "my/hub", "-o", str(tmp_path / "models.tar"))
    with tarfile.open(tmp_path / "models.tar") as tar:
        assert all(member.isreg() for member in tar)
        file = tar.extractfile("weights/my_2fhub/model.safetensors")
        assert file is not None
        assert file.read() == WEIGHTS
