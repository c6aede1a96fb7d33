"""`sie models add`: add an entry to the catalogue, in a folder or at a config service."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path

import click

from sie_cli.cluster import CONFIG_URL, Cluster
from sie_cli.models.catalogue import document, report_write
from sie_cli.models.inspect import described, source_arguments
from sie_cli.models.service import YAML, WriteOptions, write_options
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.models.aliases import Alias
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.trust import USUAL, is_bucket
from sie_contracts.settings import Settings
from sie_runtime.feed import packaged_models
from sie_store import durable
from sie_store.weights.sources import WeightSources


@click.command()
@source_arguments
@click.option(
    "--id",
    "name",
    default="",
    metavar="NAME",
    help="Name of the model in requests. Default: the hub id or the folder's name.",
)
@click.option(
    "--models-dir",
    metavar="DIR",
    help="Write the entry to a file in this folder. Default without a config service: SIE_MODELS_DIR, else ./models.",
)
@write_options("Replace an existing model.", looks_around=False)
def add(write: WriteOptions, source: str, revision: str | None, name: str, models_dir: str | None) -> None:
    """Add ID_OR_FOLDER to the catalogue. This is the catalogue of a config service if --url, --data-dir or
    SIE_CONFIG_SERVICE_URL names one, else a local folder.

    The entry pins the commit of a hub repository, and the SHA-256 of every file that affects the vectors or scores. You
    may edit the entry: lines after `# assumed` have values that no file of the model states. If the packaged catalogue
    has the model, the new entry has the options of the packaged entry. ID_OR_FOLDER may also be an entry, as `inspect`
    and `show` print it: a .yaml or .json file, or - for standard input. Weights of the entry that are on this machine
    are checked first; others are checked when a worker loads them.

    \b
    in a folder          DIR/NAME.yaml, which a running `sie serve` picks up within seconds
    at a config service  added at once, for all gateways and workers; a folder does not override this entry
    """
    cluster, settings = write.cluster, write.cluster.settings
    if models_dir is not None and cluster.sources[CONFIG_URL] == "flag":
        raise click.UsageError(
            "--models-dir writes a file, --url sends the entry to a config service: use only one of them"
        )
    if models_dir is None and settings.config_service_url:
        _post(write, *_entry_of(settings, source, name, revision))
        return
    if write.if_match is not None or write.output is not None:
        raise click.UsageError(
            "--if-match and -o need a config service: name a config service with --url or SIE_CONFIG_SERVICE_URL"
        )
    folder = models_dir or settings.models_dir or USUAL
    if is_bucket(folder):
        raise CommandRefused(
            f"{folder} is not a local folder: name a local folder with --models-dir, or a config service with --url"
        )
    text, entry = _entry_of(settings, source, name, revision)
    with refusing():
        _write(write, text, entry, Path(folder).expanduser())
    if not write.dry_run:
        click.echo(who_reads(Path(folder).expanduser().absolute(), cluster))


def who_reads(folder: Path, cluster: Cluster) -> str:
    """Return a line that says whether the running `sie serve` reads `folder`, or else how to serve the model."""
    running, models_dir = cluster.local(), cluster.settings.models_dir
    setting = f"SIE_MODELS_DIR={shlex.quote(str(folder))}"
    if running is None:
        usual = folder == Path(models_dir or USUAL).expanduser().absolute()
        here = "in the current folder" if models_dir is None else "with this SIE_MODELS_DIR"
        how = f"`sie serve`, started {here}, reads it" if usual else f"serve it with {setting} sie serve"
        return (
            f"only a file was written: no `sie serve` runs with the data directory {cluster.data_dir}. If a "
            "`sie serve` with another --data-dir reads this folder of models, it serves the model within seconds. "
            f"Otherwise {how}"
        )
    own = running.models_dir
    if own and not is_bucket(own) and Path(own).resolve() == folder.resolve():
        return "the running `sie serve` reads this folder: it serves the model within seconds"
    return (
        f"only a file was written: the running `sie serve` does not read this folder, it reads {own or 'no folder'}. "
        f"Either repeat this command with --models-dir and a local folder that it reads, or with --data-dir "
        f"{shlex.quote(str(cluster.data_dir))} to add the model to its catalogue; or restart `sie serve` with {setting}"
    )


def _entry_of(settings: Settings, source: str, name: str, revision: str | None) -> tuple[str, ModelEntry | Alias]:
    """Return an entry as text and in parsed form. If `source` is a file or `-`, read the entry from it. Otherwise make
    an entry for the model that `source` names.
    """
    if source != "-" and not (Path(source).suffix in (".yaml", ".yml", ".json") and Path(source).is_file()):
        return described(settings, source, name, revision)
    if name or revision:
        raise click.UsageError("--id and --revision are for a model; an entry already has both")
    from sie_config_service.documents import checked, read

    body, kind = document(Path(source))
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise CommandRefused(f"{source} is not UTF-8: save it with this encoding") from error
    try:
        parsed = read(body, kind)
        entry = checked(parsed.value, parsed)
        if isinstance(entry, ModelEntry):
            _check_weights(entry, settings)
        return text, entry
    except SIEError as error:
        raise CommandRefused(f"{source}: {error.message}") from error


def _check_weights(entry: ModelEntry, settings: Settings) -> None:
    """Check the entry's weights if this machine has them. Print what stays unchecked. Raises ModelLoadFailed."""
    from sie_adapter.loading.certificate import check_files
    from sie_adapter.loading.comparison import compare_files

    try:
        located = WeightSources(settings.cache_folder, may_download=False).locate(entry)
    except ModelLoadFailed as absent:
        click.echo(
            f"note: the weights were not checked here; a worker checks them when it loads the model: {absent.message}",
            err=True,
        )
        return
    for unchecked in compare_files(located.folder, entry):
        click.echo(f"note: not checked in {located.folder}: {unchecked}", err=True)
    check_files(located.folder, entry, entry.load)
    click.echo(f"checked the files in {located.folder}", err=True)


def _post(write: WriteOptions, text: str, entry: ModelEntry | Alias) -> None:
    with write.service() as service:
        report_write(write, service.add(entry.id, text.encode(), YAML, write=write))
    if isinstance(entry, ModelEntry) and entry.weights.path:
        click.echo(f"note: each worker needs the weights at {entry.weights.path}", err=True)


def _write(write: WriteOptions, text: str, entry: ModelEntry | Alias, folder: Path) -> None:
    if entry.id.startswith("bundles/"):
        raise CommandRefused(f"{entry.id}: the folder bundles/ is for bundles; give the model another name with --id")
    file = _file(entry.id, folder)
    if file.exists() and not write.force:
        raise CommandRefused(f"{file} exists: --force replaces it")
    if _is_other_packaged(entry) and not write.force:
        raise CommandRefused(
            f"{entry.id} is a model of the packaged catalogue: --force replaces it, --id gives another name"
        )
    if write.dry_run:
        click.echo(f"dry run, nothing is written: {file} would be\n{text}", nl=False)
        return
    click.echo(f"wrote {write_entry(text, entry.id, folder)}")


def write_entry(text: str, model: str, folder: Path) -> Path:
    """Write an entry atomically to a folder of models. Return the path of its file. Raises OSError."""
    file = _file(model, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The partial file is hidden (a dot begins its name), because readers of the folder skip hidden files. Its name is
    # random, because several commands may write the same entry.
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    durable.write_through(partial, file, text.encode())
    return file


def _file(model: str, folder: Path) -> Path:
    return folder / f"{model}.yaml"


def _is_other_packaged(entry: ModelEntry | Alias) -> bool:
    packaged = packaged_models().get(entry.id)
    return packaged is not None and (not isinstance(entry, ModelEntry) or _weights_of(packaged) != _weights_of(entry))


def _weights_of(entry: ModelEntry) -> tuple[str, str, str]:
    return entry.weights.hub, entry.weights.package, entry.weights.path
