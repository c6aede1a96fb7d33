"""`sie weights`: list, check and remove weights in this node's cache and in the bucket, and fill the bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from sie_cli import display
from sie_cli.models.inspect import shown_progress, stub
from sie_cli.options import loaded, named_options, refuse
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import SettingError, Settings
from sie_store.cluster import ClusterCache
from sie_store.configured import weight_sources
from sie_store.weights.bucket import CommitState
from sie_store.weights.cache import LocalCache
from sie_store.weights.locks import Lock
from sie_store.weights.manifest import FetchFailed, Manifest, ManifestError, check_names, describe, encode, verify
from sie_store.weights.progress import FetchProgress
from sie_store.weights.push import PushRefused
from sie_store.weights.selection import wanted_by

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


_options = named_options("SIE_CLUSTER_CACHE", "SIE_LOCAL_CACHE", "SIE_MODELS_DIR", "SIE_HF_FALLBACK")


@click.group(short_help="Weights on this disk and in the bucket.")
def weights() -> None:
    """Manage the weights of models on this node's disk, and in the bucket that all nodes share (SIE_CLUSTER_CACHE).

    \b
    sie weights list                             list the weights, and where they are
    sie weights push BAAI/bge-m3                 copy to the bucket, from this node's cache, else from the hub
    sie weights push ./my-model --as my/model    copy a folder to the bucket
    sie weights verify                           read the whole bucket and compare it with its checksums
    sie weights rm BAAI/bge-m3@COMMIT            remove from the bucket

    A worker looks for weights on its disk, then in the bucket, then asks the hub (SIE_HF_FALLBACK). The bucket is
    s3://bucket/prefix or gs://bucket/prefix; credentials and endpoint come from the usual variables, AWS_ACCESS_KEY_ID,
    AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT and similar, or from the machine's role. Workers only read the bucket; this
    command writes to it.
    """


@weights.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, for programs.")
@_options
def list_command(as_json: bool, **values: Any) -> None:
    """List all snapshots of weights. The columns are repository, commit, size, and whether the snapshot is on this
    node's disk and in the bucket.
    """
    settings = loaded(values).settings
    with _refusing(settings):
        local = {(stored.repository, stored.revision): stored for stored in _stored_here(settings)}
        in_bucket = _cluster(settings).listed() if settings.cluster_cache else []
        shared = {(stored.repository, stored.revision): stored for stored in in_bucket}
    rows: list[dict[str, Any]] = []
    for repository, revision in sorted({*local, *shared}):
        here, there = local.get((repository, revision)), shared.get((repository, revision))
        wrong = [*there.wrong.values()] if there else []
        rows.append(
            {
                "repository": repository,
                "revision": revision,
                "bytes": there.bytes if there else local[repository, revision].bytes,
                "local": None if here is None else not here.wrong,
                "cluster": None if there is None else not there.wrong,
                "wrong": [*wrong, *(f"on this node's disk {line}" for line in (here.wrong.values() if here else ()))],
            }
        )
    if as_json:
        click.echo(display.document(rows))
        return
    states = {None: "-", True: "complete", False: "broken"}
    shown: list[tuple[str, ...]] = [("REPOSITORY", "COMMIT", "SIZE", "DISK", "BUCKET")]
    for row in rows:
        places = states[row["local"]], states[row["cluster"]]
        shown.append((row["repository"], row["revision"], display.size(row["bytes"]), *places))
    if rows:
        display.table(shown)
    else:
        click.echo(
            "there are no weights: a worker fetches them when it loads a model, `sie weights push` fills the bucket",
            err=True,
        )
    for row in rows:
        for line in row["wrong"]:
            click.echo(f"{row['repository']}@{row['revision']}: {line}", err=True)
    if not settings.cluster_cache:
        click.echo("no bucket is set: name one with --cluster-cache or SIE_CLUSTER_CACHE", err=True)


@weights.command()
@click.argument("names", nargs=-1, required=True, metavar="MODEL_OR_FOLDER...")
@click.option("--as", "name", metavar="NAME", help="Name of a folder's weights in the bucket: organisation/name.")
@click.option(
    "--revision",
    metavar="COMMIT",
    help="Commit of a repository, or the commit under which a folder is stored.  [default: a digest of the folder]",
)
@click.option(
    "--force", is_flag=True, help="Write every file again. Replace an existing snapshot even if its content differs."
)
@_options
def push(names: tuple[str, ...], name: str | None, revision: str | None, force: bool, **values: Any) -> None:
    """Copy the weights of MODEL_OR_FOLDER to the bucket. All workers can load them from there.

    A model of the catalogue or an id of the hub is read from this node's cache, or downloaded first
    (SIE_HF_FALLBACK). The files are checked and written. The manifest with their checksums is written last: from then
    on, workers see the files. Existing files are not written again, so an interrupted push can be repeated, and several
    pushes may run at the same time.

    \b
    A folder needs a name, and its entry in the catalogue must have this name and the revision:
        sie weights push ./my-model --as my/model
        weights: {hub: my/model, revision: ...}
    """
    settings = loaded(values).settings
    if len(names) > 1 and (name or revision):
        raise click.UsageError("--as and --revision are for one model: push the models one by one")
    with _refusing(settings):
        cluster = _cluster(settings)
        for model in names:
            source = _weights_source(settings, model, name, revision)
            with source.lease, _bar(f"push {source.label}") as progress:
                pushed = cluster.push(source.folder, source.manifest, progress, force=force)
            done = (
                f"{display.counted(pushed.written, 'file')} written ({display.size(pushed.bytes)}), {pushed.present} "
                "there already"
            )
            click.echo(f"{source.label} is in {cluster.url}: {done}")
            if Path(model).is_dir():
                click.echo(f"weights: {{hub: {source.manifest.repository}, revision: {source.manifest.revision}}}")


@weights.command("verify")
@click.argument("names", nargs=-1, metavar="[NAME[@COMMIT]]...")
@click.option("--local", is_flag=True, help="Check this node's cache instead of the bucket.")
@click.option("--quick", is_flag=True, help="Compare only names and sizes, without reading the files.")
@_options
def verify_command(names: tuple[str, ...], local: bool, quick: bool, **values: Any) -> None:
    """Compare weights in the bucket with their checksums. Without a NAME, all weights are read.

    Status 1 if a file is missing or differs; `sie weights push --force` repairs it.
    """
    settings = loaded(values).settings
    checked = broken = 0
    with _refusing(settings):
        for stored in _named(_stored(settings, local), names):
            label = f"{stored.repository}@{stored.revision}"
            if local and stored.manifest is None:
                click.echo(
                    f"{label}: another program fetched it, and there are no checksums to compare it with", err=True
                )
                continue
            if quick:
                wrong = list(stored.wrong.values())
            else:
                with _bar(f"verify {label}") as progress:
                    wrong = (
                        _checked_here(settings, stored, progress)
                        if local
                        else _cluster(settings).verify(stored, progress)
                    )
            for line in wrong:
                click.echo(f"{label}: {line}")
            if not wrong:
                click.echo(
                    f"{label}: {display.counted(len(stored.sizes), 'file')}, {display.size(stored.bytes)}, right"
                )
            checked += 1
            broken += bool(wrong)
    if broken:
        fix = (
            "`sie weights rm --local` removes a snapshot, and the next load fetches it again"
            if local
            else "`sie weights push --force` writes a snapshot again"
        )
        raise CommandRefused(
            f"{broken} of {display.counted(checked, 'snapshot')} {'is' if broken == 1 else 'are'} "
            f"incomplete or damaged: {fix}"
        )
    if not checked:
        click.echo("there is nothing to verify", err=True)


@weights.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME[@COMMIT]...")
@click.option("--local", is_flag=True, help="Remove the weights from this node's cache, not from the bucket.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_options
def rm(names: tuple[str, ...], local: bool, yes: bool, **values: Any) -> None:
    """Remove weights from the bucket: one commit, or all of NAME.

    Workers that have the weights on their disk continue. With --local, the weights are removed from this node's disk
    instead, except weights that a process of this node uses.
    """
    settings = loaded(values).settings
    with _refusing(settings):
        stored = list(_named(_stored(settings, local), names))
        for snapshot in stored:
            click.echo(f"{snapshot.repository}@{snapshot.revision}  {display.size(snapshot.bytes)}")
        where = str(settings.cache_folder) if local else _cluster(settings).url
        if not yes:
            click.confirm(f"Remove {'this' if len(stored) == 1 else 'these'} from {where}?", abort=True)
        removed, in_use = [], []
        for snapshot in stored:
            if not local:
                _cluster(settings).remove(snapshot.repository, snapshot.revision)
            elif not _cache(settings).remove(snapshot.repository, snapshot.revision):
                in_use.append(f"{snapshot.repository}@{snapshot.revision}")
                continue
            removed.append(snapshot)
        click.echo(
            f"removed from {where}: {display.counted(len(removed), 'snapshot')}, "
            f"{display.size(sum(copy.bytes for copy in removed))}"
        )
        if in_use:
            raise CommandRefused(
                f"not removed, because a process of this node uses them: {', '.join(in_use)}; unload their models first"
            )


@dataclass(frozen=True)
class _WeightsSource:
    """Folder of weights, with its manifest. The local cache does not evict the folder until `lease` is closed."""

    folder: Path
    manifest: Manifest
    lease: Lock

    @property
    def label(self) -> str:
        return f"{self.manifest.repository}@{self.manifest.revision}"


def _weights_source(settings: Settings, reference: str, name: str | None, revision: str | None) -> _WeightsSource:
    folder = Path(os.path.expanduser(reference))
    if folder.is_dir():
        if not name:
            raise click.UsageError(f"{reference} is a folder: name it in the bucket with --as ORGANISATION/NAME")
        return _WeightsSource(folder, _of_folder(folder, name, revision), Lock(None))
    if name:
        raise click.UsageError(f"--as gives a name to a folder, but {reference} is no folder")
    model, _, commit = reference.partition("@")
    entry = _entry(settings, model, revision or commit)
    # Do not search the bucket, because it is the destination.
    located = weight_sources(dataclasses.replace(settings, cluster_cache=None)).locate(entry)
    hub, commit = entry.weights.hub, entry.weights.revision
    manifest = _cache(settings).manifest(hub, commit) if located.folder == _cache(settings).place(hub, commit) else None
    if manifest is None:
        with _bar(f"read {hub}@{commit}") as progress:
            progress.expect(sum(path.stat().st_size for path in located.folder.rglob("*") if path.is_file()))
            manifest = describe(located.folder, hub, commit, select=wanted_by(entry), read=progress.add)
    return _WeightsSource(located.folder, manifest, located.lease)


def _of_folder(folder: Path, name: str, revision: str | None) -> Manifest:
    with _bar(f"read {folder}") as progress:
        progress.expect(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        manifest = describe(folder, name, revision or "content", read=progress.add)
    if revision:
        return manifest
    content = hashlib.sha256(encode(manifest)).hexdigest()[:40]
    return msgspec.structs.replace(manifest, revision=content)


def _entry(settings: Settings, model: str, commit: str) -> ModelEntry:
    """Return an entry whose weights have a hub id and a commit. `stub` makes it if the catalogue lacks the model."""
    from sie_config_service.overlay import Overlay

    entry = Overlay(settings).folders().models.get(model, (None, ""))[0]
    if not isinstance(entry, ModelEntry):
        if not _NAME.fullmatch(model):
            raise CommandRefused(
                f"there is no folder {model[:200]}, and it is no id of the hub: such an id has the form "
                "organisation/name"
            )
        return stub(model, commit or _only_commit(settings, model))
    own = entry.weights
    if not own.hub:
        where = f"the folder {own.path}" if own.path else f"the package {own.package}"
        raise CommandRefused(
            f"the weights of {model} are in {where}, from where workers read them. To copy them to the bucket, run sie "
            f"weights push FOLDER --as {model}, then add the printed `weights` to the entry"
        )
    pinned = commit or own.revision or _only_commit(settings, own.hub)
    replaced = msgspec.structs.replace(own, path="", unpinned=False, revision=pinned)
    return msgspec.structs.replace(entry, weights=replaced)


def _only_commit(settings: Settings, hub: str) -> str:
    check_names(hub, "any")
    commits = sorted(path.name for path in _cache(settings).place(hub, "any").parent.glob("*") if path.is_dir())
    if len(commits) != 1:
        there = f"the cache has {', '.join(commits)}" if commits else "neither the catalogue nor the cache has one"
        raise CommandRefused(f"the commit of {hub} is not known here: name it as {hub}@COMMIT; {there}")
    return commits[0]


def _cache(settings: Settings) -> LocalCache:
    return LocalCache(settings.cache_folder)


def _cluster(settings: Settings) -> ClusterCache:
    if settings.cluster_cache is None:
        raise SettingError(
            "SIE_CLUSTER_CACHE", "which bucket? Give --cluster-cache s3://bucket/prefix (or gs://), or set the variable"
        )
    return ClusterCache(settings.cluster_cache)


def _stored(settings: Settings, local: bool) -> list[CommitState]:
    return _stored_here(settings) if local else _cluster(settings).listed()


def _stored_here(settings: Settings) -> list[CommitState]:
    """Return the snapshots in the local cache, each with the differences in names and sizes between its files and its
    manifest. Snapshots that other programs wrote have no manifest. They are omitted if they lack files that workers
    need.
    """
    cache, copies = _cache(settings), []
    for folder in sorted(cache.hub.glob("models--*/snapshots/*")):
        repository, revision = folder.parents[1].name.removeprefix("models--").replace("--", "/"), folder.name
        with contextlib.suppress(ManifestError):  # skip folders that are not named after a repository and a commit
            manifest = cache.manifest(repository, revision)
            if manifest is not None or cache.find(repository, revision) is not None:
                files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
                sizes = {
                    name: path.stat().st_size
                    for name, path in files.items()
                    if manifest is None or name in manifest.files
                }
                wrong = verify(folder, manifest, digests=False) if manifest is not None else []
                copies.append(CommitState(repository, revision, manifest, sizes, {line: line for line in wrong}))
    return copies


def _checked_here(settings: Settings, stored: CommitState, progress: FetchProgress) -> list[str]:
    assert stored.manifest is not None
    progress.expect(stored.manifest.bytes)
    return verify(_cache(settings).place(stored.repository, stored.revision), stored.manifest, read=progress.add)


def _named(stored: list[CommitState], names: tuple[str, ...]) -> Iterator[CommitState]:
    """Yield the snapshots that `names` selects, without repetition, or all snapshots if `names` is empty. A name is
    REPOSITORY or REPOSITORY@COMMIT; the commit may be shortened.
    """
    if not names:
        yield from stored
        return
    selected: dict[tuple[str, str], CommitState] = {}
    for name in names:
        repository, at, commit = name.partition("@")
        if at and not commit:  # `NAME@$COMMIT` with an unset variable: do not select all commits
            raise click.UsageError(
                f"{name[:200]!r} has no commit after the @: write "
                f"{repository[:200]}@COMMIT, or {repository[:200]} for all commits"
            )
        matches = [copy for copy in stored if copy.repository == repository and copy.revision.startswith(commit)]
        if not matches:
            there = sorted({copy.repository for copy in stored})
            have = f"the snapshots are of {', '.join(there[:20])}" if there else "there are no snapshots"
            raise CommandRefused(f"there is no snapshot of {name[:200]}; {have}")
        if commit and len(matches) > 1:
            raise CommandRefused(
                f"{name} fits several commits, {', '.join(copy.revision for copy in matches)}: write more digits"
            )
        selected |= {(copy.repository, copy.revision): copy for copy in matches}
    yield from selected.values()


@contextlib.contextmanager
def _refusing(settings: Settings) -> Iterator[None]:
    try:
        with refusing():
            yield
    except SettingError as error:
        refuse(error)
    except FetchFailed as error:
        raise CommandRefused(f"{settings.cluster_cache or 'weights'}: {error.message}") from error
    except (ManifestError, PushRefused) as error:
        raise CommandRefused(str(error)) from error


@contextlib.contextmanager
def _bar(label: str) -> Iterator[FetchProgress]:
    with display.transfers() as bars:
        progress = shown_progress(bars, label)
        yield progress
        progress.on_step(progress.state())
