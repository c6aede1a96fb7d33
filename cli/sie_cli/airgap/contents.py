"""Contents of an air-gap archive: the entries of its models, and every file that a worker reads to load them.

    entry ─► WeightSources ─► weights/TOKEN/..   its files, and configurations and tokenizers of its backbones
          ─► LoRAs of the hub ─► cache/hub/..    in the same form as in the local cache
          ─► golden vectors ─► golden/..
          ─► the entry itself: only weights.path and golden change, and a missing licence is added

An entry keeps its hub id, revision and package. So its fingerprint does not change, and vectors that the model computed
on another machine stay valid.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from sie_cli.airgap import sbom
from sie_cli.airgap.archive import BILL, ArchiveIndex, ByteProgress, digest
from sie_cli.refusal import CommandRefused
from sie_config_service.overlay import PLUG_INS, Folders
from sie_contracts.models import families
from sie_contracts.models.aliases import Alias
from sie_contracts.models.bundles import BundleEntry, serving
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire.topology import token
from sie_runtime.feed import read_bundles
from sie_store.folder_files import read_json, stated_licence
from sie_store.weights.locks import Lock
from sie_store.weights.manifest import MANIFEST, FileFact, Manifest, ManifestError, decode, encode
from sie_store.weights.manifest import digest as digest_of_file
from sie_store.weights.selection import LORA_FILES, wanted_by
from sie_store.weights.sources import WeightSources

# configuration and tokenizer of a backbone, which is the encoder that a model such as GLiNER names by repository
_BACKBONE_FILES = ("*.json", "*.model", "*.txt")


@dataclass(frozen=True)
class ArchiveContents:
    """Index of an archive, and the content of each of its files: bytes, or the path of a local file."""

    index: ArchiveIndex
    files: Mapping[str, Path | bytes]

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        source = self.files[name]
        return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


@dataclass(frozen=True)
class ArchiveSelection:
    """Models, aliases and bundles selected for an archive. Each list is sorted by id."""

    entries: list[ModelEntry]
    aliases: list[Alias]
    bundles: list[BundleEntry]


class FileGathering:
    """Collector of model files for an archive. `files`: name in the archive -> content. Its methods raise
    CommandRefused, ModelLoadFailed, LoraLoadFailed, OSError.
    """

    def __init__(self, sources: WeightSources, models_dir: str | None) -> None:
        self.files: dict[str, Path | bytes] = {}
        # name in the archive -> size and digest that are already known, so that `facts` does not read the file
        self._known: dict[str, FileFact] = {}
        # locks on the files of models, so that no other process removes these files to free space
        self._leases: list[Lock] = []
        self._sources = sources
        self._models_dir = models_dir

    @property
    def bytes(self) -> int:
        return sum(source.stat().st_size if isinstance(source, Path) else len(source) for source in self.files.values())

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that `facts` has to read: the sizes of all files whose digest is not yet known."""
        return sum(
            source.stat().st_size
            for name, source in self.files.items()
            if isinstance(source, Path) and name not in self._known
        )

    def facts(self, progress: ByteProgress) -> dict[str, FileFact]:
        """Return the size and digest of every file. Call `progress` with the size of each piece that is read."""
        return {name: self._known.get(name) or _fact(source, progress) for name, source in self.files.items()}

    def model(self, entry: ModelEntry) -> ModelEntry:
        """Add all files that a load of `entry` reads to `files`. Return a copy of the entry with their paths in the
        archive.
        """
        located = self._sources.locate(entry)
        self._leases.append(located.lease)
        folder = located.folder
        place = f"weights/{token(entry.id)}"
        wanted_files = wanted_by(entry)
        manifest = _manifest(folder)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() and path.is_dir() and wanted_files(f"{name}/config.json"):
                raise CommandRefused(
                    f"{entry.id}: {path} is a link to a folder, which is not followed: replace the link by the folder"
                )
            if path.is_file() and (name in manifest or name == MANIFEST or wanted_files(name) or sbom.is_licence(name)):
                self.files[f"{place}/{name}"] = path
                if name in manifest:
                    self._known[f"{place}/{name}"] = manifest[name]
        if families.row(entry.family).names_backbones:
            self._backbones(folder, place, entry)
        for lora in sorted(
            {entry.run.lora, *(profile.run.lora for profile in entry.profiles.values())} - {None, ""}, key=str
        ):
            self._lora(str(lora), entry)
        return msgspec.structs.replace(
            entry,
            weights=msgspec.structs.replace(entry.weights, path=place),
            golden=self._golden(entry),
            license=entry.license or stated_licence(folder),
        )

    def _backbones(self, folder: Path, place: str, entry: ModelEntry) -> None:
        """Add the configuration and tokenizer of each backbone that a model such as GLiNER names by repository. In the
        archive, these files are below the model's folder.
        """
        file = folder / families.row(entry.family).config_file
        raw = read_json(file)
        is_described = raw.get("encoder_config") is not None and (folder / "tokenizer_config.json").is_file()
        for name in ([] if is_described else [raw.get("model_name")]) + [
            name for name in (raw.get("labels_encoder"),) if name
        ]:
            if not isinstance(name, str) or not name:
                raise CommandRefused(
                    f"{entry.id}: {file} does not name its backbone: model_name must be a repository or a folder"
                )
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CommandRefused(
                    f"{entry.id}: its configuration names its backbone by the path {name}, which another machine does "
                    "not have"
                )
            if (folder / name).is_dir():
                continue  # the backbone is in the model's folder, so `model` has added its files
            backbone = self._backbone(name, folder, entry)
            for path in sorted(name for pattern in _BACKBONE_FILES for name in backbone.glob(pattern)):
                self.files[f"{place}/{name}/{path.name}"] = path

    def _backbone(self, name: str, folder: Path, entry: ModelEntry) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        own = [folder.parents[2]] if folder.parent.name == "snapshots" else [None, self._sources.cache_folder / "hub"]
        for cache, is_local in [
            *((name, True) for name in own),
            *(((own[-1], False),) if self._sources.may_download else ()),
        ]:
            try:
                patterns = None if is_local else list(_BACKBONE_FILES)
                return Path(
                    snapshot_download(name, cache_dir=cache, local_files_only=is_local, allow_patterns=patterns)
                )
            except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
                continue
        fix = f"`hf download {name} --include '*.json' '*.model' '*.txt'` fetches its configuration and tokenizer"
        raise CommandRefused(
            f"{entry.id}: its backbone {name} is neither in the hub cache nor in a folder of this name; {fix}"
        )

    def _lora(self, name: str, entry: ModelEntry) -> None:
        """Add a LoRA of the hub to the cache folder in the archive. Raises CommandRefused if `name` is a path of this
        machine or of the models folder: the site without a network lacks this path, and a new path would change the
        model's fingerprint.
        """
        is_path = Path(name).is_absolute() or name.startswith((".", "~"))
        located = None if is_path else self._sources.locate_lora(name, entry, self._models_dir)
        if located is None or self._sources.cache.hub not in located.folder.parents:
            fix = "select other profiles with --profile, or take the LoRA from the hub"
            raise CommandRefused(
                f"{entry.id} names the LoRA {name} by a path of this machine or of SIE_MODELS_DIR, and its fingerprint "
                f"contains that path: {fix}"
            )
        self._leases.append(located.lease)
        folder, (repository, _, revision) = located.folder, name.partition("@")
        place = f"cache/hub/models--{repository.replace('/', '--')}"
        facts = {file: _fact(folder / file, lambda _: None) for file in LORA_FILES}
        for file, fact in facts.items():
            self.files[f"{place}/snapshots/{folder.name}/{file}"] = folder / file
            self._known[f"{place}/snapshots/{folder.name}/{file}"] = fact
        self.files[f"{place}/snapshots/{folder.name}/{MANIFEST}"] = encode(
            Manifest(repository, folder.name, facts, origin="found")
        )
        if revision != folder.name:
            self.files[f"{place}/refs/{revision or 'main'}"] = folder.name.encode()

    def _golden(self, entry: ModelEntry) -> str:
        if not entry.golden:
            return ""
        file = packaged_folder() / entry.golden
        if not file.is_file():
            raise CommandRefused(
                f"{entry.id}: its golden vectors {entry.golden} are missing, and workers refuse to load it without them"
            )
        name = f"golden/{token(entry.id)}.json"
        self.files[name] = file
        return name


def contents(
    chosen: ArchiveSelection, gathering: FileGathering, made_by: str, progress: ByteProgress
) -> ArchiveContents:
    """Return the contents of an archive with the `chosen` models, whose files `gathering` has collected. Compute the
    digests that no manifest has. Raises OSError, and CommandRefused for a file that is missing or has another digest
    than its entry says.
    """
    entries = chosen.entries
    facts = gathering.facts(progress)
    files = dict(gathering.files)
    models = []
    for entry in entries:
        place = f"{entry.weights.path}/"
        for name, expected in entry.weights.digests.items():
            actual = facts.get(place + name)
            if actual is None or actual.sha256 != expected.lower():
                got = f"has the SHA-256 {actual.sha256[:16]}.., " if actual else "is missing, "
                raise CommandRefused(
                    f"{entry.id}: {name} {got}weights.digests says {expected[:16]}..: workers would refuse to load it"
                )
        own = {name: fact for name, fact in facts.items() if name.startswith(place)}
        models.append((entry, own))
        files[f"licences/models/{token(entry.id)}.txt"] = _licence_page(
            entry, {name[len(place) :]: files[name] for name in own}
        )
    families = {entry.family for entry in entries}
    plug_ins = {
        point.dist.name for point in entry_points(group=PLUG_INS) if point.dist is not None and point.name in families
    }
    packages = sbom.software(sbom.SOFTWARE, *sorted({entry.weights.package for entry in entries} - {""} | plug_ins))
    files["licences/software.txt"] = b"\n".join(package.licence_page() for package in packages.values())
    files[BILL] = sbom.bill(models, packages, made_by)
    facts |= {name: _fact(source, progress) for name, source in files.items() if name not in facts}
    documents, aliases = ([msgspec.to_builtins(document) for document in some] for some in (entries, chosen.aliases))
    return ArchiveContents(ArchiveIndex(made_by, facts, documents, aliases, list(chosen.bundles)), files)


def choose(folders: Folders, names: Iterable[str]) -> ArchiveSelection:
    """Return the named models, the named aliases and their models, and the operator's bundles that can serve one of
    these models. Raises BadParameter, ValidationFailed.
    """
    documents = {name: document for name, (document, _) in folders.models.items()}
    catalogue = Catalogue.from_documents(documents, {}, folders.bundles, "")
    entries: dict[str, ModelEntry] = {}
    aliases: dict[str, Alias] = {}
    for name in names:
        if (alias := catalogue.find_alias(name)) is not None:
            aliases[alias.id] = alias
            entries |= {entry.id: entry for entry in (catalogue.resolve(model).entry for model in alias.models)}
        elif (entry := catalogue.find(name)) is not None:
            entries[entry.id] = entry
        else:
            near = ", ".join(catalogue.near(name)) or "another name"
            raise click.BadParameter(
                f"no model named {name[:200]!r} in the catalogue; did you mean {near}?", param_hint="--models"
            )
    if not entries:
        raise click.BadParameter("names no model", param_hint="--models")
    able = {name for entry in entries.values() for name in serving(folders.bundles, entry.family, entry.bundle)}
    own = [bundle for name, bundle in sorted(folders.bundles.items()) if name in able and not _is_packaged(bundle)]
    return ArchiveSelection(
        [entries[name] for name in sorted(entries)], [aliases[name] for name in sorted(aliases)], own
    )


def _is_packaged(bundle: BundleEntry) -> bool:
    """Return whether every installation has this bundle. Families that plug-ins added to the bundle are ignored."""
    packaged = read_bundles(packaged_folder() / "bundles").get(bundle.id)
    return packaged is not None and msgspec.structs.replace(bundle, families=packaged.families) == packaged


def with_profiles(entries: Sequence[ModelEntry], names: Sequence[str]) -> list[ModelEntry]:
    """Return the entries with only the named profiles and the profiles that these extend, directly or indirectly.
    Raises BadParameter for a profile that no entry has.
    """
    there = {name for entry in entries for name in entry.profiles}
    if unknown := [name for name in names if name not in there]:
        message = (
            f"no profile {', '.join(unknown)[:200]} of these models; there are: {', '.join(sorted(there)) or 'none'}"
        )
        raise click.BadParameter(message, param_hint="--profile")
    chosen = []
    for entry in entries:
        own = {name for name in names if name in entry.profiles}
        while more := {entry.profiles[name].extends for name in own} - own - {""}:
            own |= more
        profiles = {name: profile for name, profile in entry.profiles.items() if name in own}
        chosen.append(msgspec.structs.replace(entry, profiles=profiles))
    return chosen


def _fact(source: Path | bytes, progress: ByteProgress) -> FileFact:
    if isinstance(source, bytes):
        return FileFact(len(source), digest(source))
    return FileFact(source.stat().st_size, digest_of_file(source, progress))


def _manifest(folder: Path) -> Mapping[str, FileFact]:
    """Return size and digest of each file from the manifest of a folder, or {} without a valid manifest."""
    try:
        return decode((folder / MANIFEST).read_bytes()).files
    except (FileNotFoundError, ManifestError):
        return {}


def _licence_page(entry: ModelEntry, files: Mapping[str, Path | bytes]) -> bytes:
    """Return a page with a model's id, licence and source, and the licence texts among the model's files."""
    weights = entry.weights
    source = f"package {weights.package}" if weights.package else "a folder"
    if weights.hub:
        source = f"https://huggingface.co/{weights.hub}"
    licence = sbom.spdx(entry.license) if entry.license else "not stated"
    page = f"{entry.id}\nlicence: {licence}\nsource: {source}\n\n".encode()
    texts = {name: path for name, path in files.items() if sbom.is_licence(name) and isinstance(path, Path)}
    return page + b"\n".join(sbom.titled(name, texts[name].read_bytes()) for name in sorted(texts))
