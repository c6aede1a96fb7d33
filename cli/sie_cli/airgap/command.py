"""`sie airgap`: models for a site without a network, in one file that is checked completely before it is used."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import click

import sie_contracts
from sie_cli import display
from sie_cli.airgap import placing
from sie_cli.airgap.archive import INDEX, ArchiveIndex, ArchiveReader, ByteProgress, digest, write
from sie_cli.options import loaded, named_options
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.settings import BY_NAME, SettingError
from sie_store import durable

FOLDER = "airgap"
_FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(short_help="Models for a site without a network.")
def airgap() -> None:
    """Models for a site without a network: one archive with weights, tokenizers, entries, licences, checksums and a
    bill of materials.

    \b
    sie airgap create --models BAAI/bge-m3,my/model -o models.tar     where there is a network
    sie airgap verify models.tar                                      check every byte, change nothing
    sie airgap load models.tar                                        at the site: unpack to ./airgap
    sie airgap serve --port 8080                                      at the site: serve the models of ./airgap

    The software is not in the archive. Its bill of materials lists the packages and versions that `sie serve` needs.
    """


@airgap.command()
@click.option(
    "--models", "names", required=True, multiple=True, metavar="A,B", help="Models of the catalogue, joined by commas."
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="Only these profiles of the models. Default: all of them.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="Archive to write, a tar file; - is standard output.",
)
@click.option("--force", is_flag=True, help="Replace an existing FILE.")
@named_options("SIE_MODELS_DIR", "SIE_LOCAL_CACHE", "SIE_CLUSTER_CACHE", "SIE_HF_FALLBACK")
def create(names: tuple[str, ...], profiles: tuple[str, ...], output: Path, force: bool, **values: Any) -> None:
    """Write models, and all files that are needed to serve them, to FILE.

    Weights are taken from the first place that a worker would use: the entry's path, the caches, an installed
    package, else a download. Digests that an entry has are checked. Equal models and equal installed packages result in
    an equal FILE. The fingerprint of a model does not change, so vectors that were computed here can be used at the
    site.
    """
    from sie_cli.airgap.contents import FileGathering, choose, contents, with_profiles
    from sie_config_service.aliases import seeded
    from sie_config_service.overlay import Overlay
    from sie_store.configured import weight_sources

    with _refusing():
        settings = loaded(values).settings
        models = [part.strip() for text in names for part in text.split(",") if part.strip()]
        chosen = choose(Overlay(settings).folders(), models)
        entries = with_profiles(chosen.entries, profiles) if profiles else chosen.entries
        seeded({**{entry.id: entry for entry in entries}, **{alias.id: alias for alias in chosen.aliases}})
        # show the log lines of level INFO, which report the progress of a download every few seconds
        downloads = logging.getLogger("sie.store")
        downloads.setLevel(logging.INFO)
        downloads.addHandler(logging.StreamHandler())
        gathering = FileGathering(weight_sources(settings), settings.models_dir)
        with _written(output, force=force) as file:
            placed = [gathering.model(entry) for entry in entries]
            _check_room(output, gathering.bytes)
            with _bar("reading", gathering.unread_bytes) as progress:
                archive = contents(replace(chosen, entries=placed), gathering, sie_contracts.__version__, progress)
            placing.check(archive.index)
            with _bar("writing", archive.index.bytes) as progress:
                name = write(file, archive.index, archive.open, progress)
        rows: list[tuple[str, ...]] = [("MODEL", "REVISION", "LICENCE", "SIZE")]
        for entry in placed:
            own = sum(
                fact.bytes for path, fact in archive.index.files.items() if path.startswith(f"{entry.weights.path}/")
            )
            rows.append((entry.id, entry.revision[:12], entry.license or "not stated", display.size(own)))
        display.table(rows, err=True)
        to = "standard output" if str(output) == "-" else str(output)
        click.echo(
            f"wrote {to}: {display.counted(len(placed), 'model')}, {display.size(archive.index.bytes)}", err=True
        )
        click.echo(f"index {name}; `sie airgap load --index` refuses any other index", err=True)


_index = click.option(
    "--index",
    "expected",
    metavar="HEX",
    help="SHA-256 of the index, which `create` printed. Another index is refused.",
)


@airgap.command("load")
@click.argument("file", type=_FILE, metavar="FILE")
@click.option(
    "--folder",
    default=FOLDER,
    show_default=True,
    type=_FOLDER,
    help="Folder to create. It may exist if it is empty, or if the same FILE was loaded into it.",
)
@click.option(
    "--at",
    type=_FOLDER,
    metavar="PATH",
    help="Path at which workers see the folder, if it differs: for example, the mount point in a container.",
)
@_index
def load_command(file: Path, folder: Path, at: Path | None, expected: str | None) -> None:
    """Check FILE (- is standard input) and unpack it to a folder that `sie airgap serve` serves.

    The folder is created only after every byte was checked. A damaged, truncated or hostile archive creates no folder,
    and neither does a command that is interrupted. Repeat the command after a failure. The folder has entries
    (models/), weights/, licences/, sbom.cdx.json, SHA256SUMS for `sha256sum -c`, and serve.env.
    """
    from sie_store.weights.selection import runs_code

    folder = folder.absolute()
    place = (at or folder).absolute()
    with _refusing(), click.open_file(str(file), "rb") as stream:
        reader = ArchiveReader(stream)
        _check_index(reader.digest, expected)
        if folder.is_dir() and any(folder.iterdir()):
            _again(reader, folder, place)
        else:
            with _bar("loading", reader.index.bytes) as progress:
                placing.load(reader, folder, place, progress)
        models, _ = placing.documents(reader.index)
        rows = [(entry.id, entry.revision[:12], entry.license or "not stated") for entry in models]
        display.table([("MODEL", "REVISION", "LICENCE"), *rows], err=True)
        foreign = [entry.id for entry in models if runs_code(entry)]
        if foreign:
            click.echo(
                f"warning: loading {', '.join(foreign)} runs code that is in the archive (load.trust_remote_code)",
                err=True,
            )
    where = "" if folder == Path(FOLDER).absolute() else f" --folder {shlex.quote(str(folder))}"
    click.echo(f"loaded {folder}, index {reader.digest}")
    click.echo(f"serve it here: sie airgap serve{where}")
    click.echo(f"or anywhere: give each process the settings of {folder / placing.ENVIRONMENT}")


def _again(reader: ArchiveReader, folder: Path, at: Path) -> None:
    """Write the entries again into a folder to which this archive was loaded before. Raises CommandRefused if the
    folder has other contents, or was changed.
    """
    if not (folder / INDEX).is_file():
        raise CommandRefused(f"{folder} has other contents: name another --folder")
    index, raw = placing.loaded(folder)
    if raw != reader.raw:
        raise CommandRefused(
            f"{folder} has another archive, with index {digest(raw)[:16]}..: name another --folder for this archive"
        )
    _place_again(folder, index, at)


def _place_again(folder: Path, index: ArchiveIndex, at: Path) -> None:
    if wrong := placing.wrong(folder, index, digests=False):
        raise CommandRefused(
            f"{folder} was changed after it was loaded: {wrong[0]}; remove it, then load the archive again"
        )
    placing.place(folder, index, at)


@airgap.command()
@click.argument("path", type=click.Path(path_type=Path, exists=False, allow_dash=True), metavar="FILE_OR_FOLDER")
@_index
def verify(path: Path, expected: str | None) -> None:
    """Check every byte of an archive against its index. For a folder with a loaded archive, check every file that the
    index names. The command changes nothing.
    """
    with _refusing():
        if path.is_dir():
            index, raw = placing.loaded(path)
            _check_index(digest(raw), expected)
            with _bar("checking", index.bytes) as progress:
                wrong = placing.wrong(path, index, progress=progress)
            for line in wrong:
                click.echo(line)
            if wrong:
                many = f"{len(wrong)} of {len(index.files)} files"
                raise CommandRefused(
                    f"{path}: {many} differ from the archive: remove the folder, then load the archive again"
                )
            name = digest(raw)
        else:
            with click.open_file(str(path), "rb") as stream:
                reader = ArchiveReader(stream)
                _check_index(reader.digest, expected)
                placing.check(reader.index)
                with _bar("checking", reader.index.bytes) as progress:
                    reader.extract(lambda _: Path(os.devnull).open("wb"), progress)  # noqa: SIM115  the reader closes it
                index, name = reader.index, reader.digest
    counted = (
        f"{display.counted(len(index.entries), 'model')}, {display.counted(len(index.files), 'file')}, "
        f"{display.size(index.bytes)}"
    )
    click.echo(f"{path} is whole: {counted}, index {name}")


@airgap.command("serve", context_settings={"ignore_unknown_options": True})
@click.option(
    "--folder", default=FOLDER, show_default=True, type=_FOLDER, help="Folder that `sie airgap load` created."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS_OF_SIE_SERVE]...")
def serve_command(folder: Path, arguments: tuple[str, ...]) -> None:
    """Run `sie serve` with the models of a loaded folder, without other models and without any download.

    \b
    sie airgap serve
    sie airgap serve --folder /srv/models --port 8080 --preload BAAI/bge-m3

    Options of `sie serve` may follow; they replace the settings in serve.env. Environment variables do not replace
    these settings.
    """
    from sie_cli.serve.command import serve
    from sie_cli.serve.processes import flag

    folder = folder.absolute()
    with _refusing():
        index, _ = placing.loaded(folder)
        # the folder may have been moved after its load, so the paths in its files are written again
        _place_again(folder, index, folder)
        flags = [word for name, value in placing.settings(index, folder).items() for word in flag(BY_NAME[name], value)]
    serve.main([*flags, *arguments], prog_name="sie serve")


def _check_index(actual: str, expected: str | None) -> None:
    if expected is not None and expected.strip().lower() != actual:
        raise CommandRefused(
            f"the index of the archive has the SHA-256 {actual}, --index is {expected[:64]}: this is another archive"
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Report a fault of a model, a file or a setting in one line, and end the command with status 1."""
    try:
        with refusing():
            yield
    except SettingError as error:
        raise CommandRefused(str(error)) from error


def _check_room(output: Path, size: int) -> None:
    if str(output) != "-" and (free := shutil.disk_usage(output.parent).free) < size:
        need = display.size(size)
        raise CommandRefused(
            f"{output.parent} has {display.size(free)} free, the archive needs {need}: free space, or name another FILE"
        )


@contextmanager
def _written(output: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file for an archive, or standard output if `output` is `-`. At the end of the context, rename the
    complete file to `output`. `force`: replace an existing file. Raises CommandRefused, OSError.
    """
    if str(output) == "-":
        if sys.stdout.isatty():
            raise CommandRefused("an archive cannot be written to a terminal: name a file with -o FILE")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if not output.parent.is_dir():
        raise CommandRefused(f"there is no folder {output.parent}")
    growing = output.with_name(f".{output.name}.part")
    with open(os.open(growing, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb") as file:
        placing.claim(growing, file.fileno())
        file.truncate(0)  # remove the bytes that a killed command left in the file
        try:
            # check only now, under the lock: until then, another command may have written the archive
            if output.exists() and not force:
                raise CommandRefused(f"{output} exists: --force replaces it")
            yield file
            file.flush()
            os.fsync(file.fileno())
            durable.replace(growing, output)
        except BaseException:
            # the `try` ends with the rename, because after it the next command may have created its own file `growing`
            growing.unlink(missing_ok=True)
            raise
    durable.sync(output.parent)


@contextmanager
def _bar(label: str, size: int) -> Iterator[ByteProgress]:
    with display.transfers() as bars:
        task = bars.add_task(label, total=size)
        yield lambda count: bars.update(task, advance=count)
