"""`sie models`: what a model folder or a repository of the hub is, an entry of the catalogue for it, and the catalogue
itself.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from sie_cli.aliases import alias
from sie_cli.cluster import CONFIG_URL, Cluster
from sie_cli.compare import compare
from sie_cli.models_commands import COMMANDS, document, tell
from sie_cli.models_service import MODELS, YAML, Refused, path_of, service_of, write_options
from sie_cli.options import AnyPosition, loaded
from sie_contracts.aliases import Alias
from sie_contracts.catalogue import MODEL_ID, Catalogue, ModelEntry, packaged_folder, parse_entry
from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.settings import Settings
from sie_contracts.trust import USUAL
from sie_runtime.feed import read_folder

F = TypeVar("F", bound=Callable[..., Any])

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[a-zA-Z0-9][\w.-]*/[\w.-]+")
SAMPLE, SECOND = "A short sentence of everyday words.", "Ada Lovelace wrote to Charles Babbage in London."
LABELS = ["person", "place"]


@click.group(cls=AnyPosition, short_help="Look at models, add and change them.")
def models() -> None:
    """Look at models, add them to the catalogue and change them there, while it serves.

    \b
    sie models inspect ./my-model              what the folder is, as a catalogue entry
    sie models inspect ./my-model --check      load it too and show what it answers
    sie models inspect BAAI/bge-small-en-v1.5  the same for a repository of the hub
    sie models add ./my-model --id my/model    write the entry where `sie serve` reads it, or give it to a config
                                               service

    \b
    With a config service (--url, SIE_CONFIG_SERVICE_URL) and its SIE_ADMIN_TOKEN:
    sie models list                            what there is
    sie models show my/model                   the configuration, which `add` and `set -f` take back
    sie models set my/model run.pooling=mean   change it; --dry-run only checks, --if-match N refuses if it is not at
                                               revision N
    sie models history my/model                what it was; `rollback my/model 3` makes that the newest again, `rm`
                                               removes it
    sie models status my/model                 which gateways and workers serve which revision
    sie models alias search my/model           requests for `search` go to my/model; `compare A B` says what another one
                                               would change
    """


for _command in (*COMMANDS, alias, compare):
    models.add_command(_command)


def _source(command: F) -> F:
    """The arguments that both commands share."""
    for option in (
        click.option(
            "--revision",
            metavar="COMMIT",
            help="Commit of a hub repository. Without one: what its main branch is now, pinned.",
        ),
        click.argument("source", metavar="ID_OR_FOLDER"),
    ):
        command = option(command)
    return command


@models.command()
@_source
@click.option("--check", is_flag=True, help="Load the model on the CPU and show what it gives for a sample.")
def inspect(source: str, revision: str | None, check: bool) -> None:
    """Print the catalogue entry of ID_OR_FOLDER, what its files say and what was assumed because none does.

    ID_OR_FOLDER is a folder with a config.json, modules.json or gliner_config.json, or a hub repository such as
    BAAI/bge-small-en-v1.5. That is taken from the local cache (SIE_LOCAL_CACHE), else downloaded (SIE_HF_FALLBACK). No
    weights are loaded without --check.
    """
    settings = loaded({}).settings
    text, entry = _inspected(settings, source, "", revision)
    click.echo(text, nl=False)
    if check:
        click.echo()
        try:
            for line in answers(entry, settings):
                click.echo(line)
        except SIEError as error:
            raise Refused(error.message) from error


@models.command()
@_source
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
    help="Write a file there. Default without a config service: SIE_MODELS_DIR, else ./models.",
)
@click.option("--force", is_flag=True, help="Replace a model that is there.")
@functools.partial(write_options, looks_around=False)
def add(
    cluster: Cluster,
    source: str,
    revision: str | None,
    name: str,
    models_dir: str | None,
    force: bool,
    dry_run: bool,
    if_match: int | None,
    output: str | None,
) -> None:
    """Add ID_OR_FOLDER to the catalogue: of a config service, where --url, --data-dir or SIE_CONFIG_SERVICE_URL names
    one; else of a local folder.

    The entry pins the commit of a hub repository and the SHA-256 of every file that decides a number. Edit it as you
    like: lines that begin with `# assumed` are those that no file of the model says. A model that the packaged
    catalogue knows keeps its options. ID_OR_FOLDER may be an entry itself, as `inspect` and `show` print it: a .yaml or
    .json file, or - for standard input. Weights that it names and this machine has are checked before it is added;
    others are checked when a worker loads them.

    \b
    in a folder          DIR/NAME.yaml, which a running `sie serve` picks up within seconds
    at a config service  added at once, for all gateways and workers; what is written there no folder overrides
    """
    settings = cluster.settings
    if models_dir is not None and cluster.sources[CONFIG_URL] == "flag":
        raise click.UsageError("--models-dir writes a file, --url asks a config service: give one of them")
    if models_dir is None and settings.config_service_url:
        text, entry = _entry_of(settings, source, name, revision)
        _post(text, entry, cluster, output, force=force, dry_run=dry_run, if_match=if_match)
        return
    if if_match is not None or output is not None:
        raise click.UsageError(
            "--if-match and -o are for a config service: name it with --url or SIE_CONFIG_SERVICE_URL"
        )
    folder = models_dir or settings.models_dir or USUAL
    if folder.startswith(("s3://", "gs://")):
        raise Refused(f"{folder} is not a local folder: name one with --models-dir, or a config service with --url")
    _write(*_entry_of(settings, source, name, revision), Path(folder).expanduser(), force=force, dry_run=dry_run)
    if not dry_run:
        click.echo(_who_reads(Path(folder).expanduser().absolute(), cluster))


def _who_reads(folder: Path, cluster: Cluster) -> str:
    """Whether the `sie serve` that runs here serves the models of a folder, and if not which one would."""
    running, models_dir = cluster.local(), cluster.settings.models_dir
    if running is None:
        usual = folder == Path(models_dir or USUAL).expanduser().absolute()
        here = "in this folder" if models_dir is None else "with this SIE_MODELS_DIR"
        how = f"`sie serve`, started {here}, reads it" if usual else f"serve it with SIE_MODELS_DIR={folder} sie serve"
        return (
            f"a file only: no `sie serve` runs with the data directory {cluster.data_dir}, so none was told; one that"
            f" was started with another --data-dir and this folder of models serves it within seconds; else {how}"
        )
    if (
        running.models_dir
        and "://" not in running.models_dir
        and Path(running.models_dir).resolve() == folder.resolve()
    ):
        return "the `sie serve` that runs reads this folder: it serves the model within seconds"
    reads = running.models_dir or "no folder"
    return (
        f"a file only: the `sie serve` that runs does not read this folder, it reads {reads}; "
        f"give that as --models-dir, add the model to its catalogue with --data-dir {cluster.data_dir}, "
        f"or start it with SIE_MODELS_DIR={folder}"
    )


def _entry_of(settings: Settings, source: str, name: str, revision: str | None) -> tuple[str, ModelEntry | Alias]:
    """The text of an entry and what it says: of a document as it is, of a model as its files say. Raises Refused,
    UsageError.
    """
    if source != "-" and not (Path(source).suffix in (".yaml", ".yml", ".json") and Path(source).is_file()):
        return _inspected(settings, source, name, revision)
    if name or revision:
        raise click.UsageError("--id and --revision are for a model; an entry says both itself")
    from sie_config.documents import checked, read

    body, kind = document(Path(source))
    try:
        given = read(body, kind)
        entry = checked(given.value, given)
        if isinstance(entry, ModelEntry):
            _check_weights(entry, settings)
        return body.decode(), entry
    except SIEError as error:
        raise Refused(f"{source}: {error.message}") from error


def _check_weights(entry: ModelEntry, settings: Settings) -> None:
    """Check the files that an entry names where this machine has them, as a load looks for them, and say what was not
    checked.

    Nothing is fetched. Raises ModelLoadFailed.
    """
    import dataclasses

    from sie_adapter.certificate import check_files
    from sie_adapter.comparison import compare_files
    from sie_store.sources import WeightSources

    here = WeightSources.of(dataclasses.replace(settings, hf_fallback=False, cluster_cache=None))
    try:
        found = here.locate(entry)
    except ModelLoadFailed as absent:
        click.echo(
            f"note: its weights were not checked, a worker checks them when it loads the model: {absent.message}",
            err=True,
        )
        return
    for unchecked in compare_files(found.folder, entry):
        click.echo(f"note: not checked in {found.folder}: {unchecked}", err=True)
    check_files(found.folder, entry)
    click.echo(f"checked the files in {found.folder}", err=True)


def _post(
    text: str,
    entry: ModelEntry | Alias,
    cluster: Cluster,
    output: str | None,
    *,
    force: bool,
    dry_run: bool,
    if_match: int | None,
) -> None:
    """Add the entry at the config service, or with `force` replace the one that is there."""
    with service_of(cluster, writes=True) as service:
        is_there = force and any(each["model_id"] == entry.id for each in service.read(MODELS).body["models"])
        method, path = ("PUT", path_of(entry.id)) if is_there else ("POST", MODELS)
        answer = service.write(method, path, text.encode(), YAML, dry_run=dry_run, if_match=if_match, force=force)
        tell(answer, output, dry_run=dry_run)
    if isinstance(entry, ModelEntry) and entry.weights.path:
        click.echo(f"note: each worker needs the weights at {entry.weights.path}", err=True)


def _write(text: str, entry: ModelEntry | Alias, folder: Path, *, force: bool, dry_run: bool) -> None:
    """Write the entry where `sie serve` reads it."""
    if entry.id.startswith("bundles/"):
        raise Refused(f"{entry.id}: the folder bundles/ is for bundles; name the model otherwise with --id")
    file = folder / f"{entry.id}.yaml"
    if file.exists() and not force:
        raise Refused(f"{file} exists: --force replaces it")
    if _is_other_packaged(entry) and not force:
        raise Refused(f"{entry.id} is a model of the packaged catalogue: --force replaces it, --id gives another name")
    if dry_run:
        click.echo(f"dry run, nothing is written: {file} would be\n{text}", nl=False)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")  # hidden: nobody reads half of it
    partial.write_text(text, "utf-8")
    partial.replace(file)
    click.echo(f"wrote {file}")


def _is_other_packaged(entry: ModelEntry | Alias) -> bool:
    """Whether the packaged catalogue has this name for other weights."""
    known = read_folder(packaged_folder() / "models").get(entry.id)
    return known is not None and (not isinstance(entry, ModelEntry) or _weights_of(known) != _weights_of(entry))


def _weights_of(entry: ModelEntry) -> tuple[str, str, str]:
    return entry.weights.hub, entry.weights.package, entry.weights.path


def _inspected(settings: Settings, source: str, name: str, revision: str | None) -> tuple[str, ModelEntry]:
    """The text of an entry's file, and the entry. Raises Refused."""
    from sie_adapter.inspection import inspect as inspect_folder

    try:
        folder, weights, model = _located(settings, source, revision)
        model = name or model
        if not MODEL_ID.fullmatch(model):
            raise Refused(f"{model!r} cannot be the id of a model: name one with --id")
        known = read_folder(packaged_folder() / "models").get(weights.get("hub", ""))
        report = inspect_folder(folder, model, weights, known)
        return _yaml(report.entry, report.found, report.assumed), parse_entry(report.entry)
    except SIEError as error:
        raise Refused(error.message) from error


def _yaml(entry: dict[str, Any], found: list[str], assumed: list[str]) -> str:
    import yaml

    notes = [*(f"# found: {line}" for line in found), *(f"# assumed: {line}" for line in assumed)]
    return "\n".join((*notes, yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=130)))


def _located(settings: Settings, source: str, revision: str | None) -> tuple[Path, dict[str, Any], str]:
    """The local folder, the `weights` of an entry, and a name. Raises Refused, ModelLoadFailed."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision:
            raise Refused(f"{source} is a folder: --revision is for repositories of the hub")
        return (
            folder,
            {"path": str(folder.resolve())},
            re.sub(r"[^a-zA-Z0-9._-]+", "-", folder.resolve().name).strip("-._"),
        )
    if not _HUB_ID.fullmatch(source):
        raise Refused(f"there is no folder {source}, and it is no id of the hub, which has the form organisation/name")
    commit = _commit(settings, source, revision)
    return _repository(settings, source, commit), {"hub": source, "revision": commit}, source


def _commit(settings: Settings, hub: str, revision: str | None) -> str:
    """The full commit of `revision`; of none: that of the packaged catalogue, else the only one in the cache, else the
    main branch now.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    known = read_folder(packaged_folder() / "models").get(hub)
    if not revision and known is not None and known.weights.hub == hub and known.weights.revision:
        return known.weights.revision
    cached = sorted((settings.cache_folder / "hub" / f"models--{hub.replace('/', '--')}" / "snapshots").glob("*"))
    if not revision and len(cached) == 1:
        return cached[0].name
    if not settings.hf_fallback:
        raise Refused(f"which commit of {hub}? give --revision COMMIT: downloads are off (SIE_HF_FALLBACK)")
    from huggingface_hub import HfApi

    instead = "give --revision the whole commit, 40 hex digits" if revision else "give --revision COMMIT"
    with _hub(f"the commit of {hub}", instead):
        commit = HfApi().model_info(hub, revision=revision).sha
    if commit is None:
        raise Refused(f"the hub names no commit of {hub}: give --revision COMMIT")
    return commit


@contextlib.contextmanager
def _hub(what: str, instead: str) -> Iterator[None]:
    """What the hub's client raises becomes Refused, with what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    any_error: type[Exception] = HfHubHTTPError.__bases__[0]  # of the library that the client is built on
    try:
        yield
    except GatedRepoError as error:
        raise Refused(f"{what}: the repository is gated; accept its licence on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        fix = "is the name right, and HF_TOKEN set if it is private?"
        raise Refused(f"{what}: the hub has no such repository or revision; {fix}") from error
    except (any_error, ConnectionError, TimeoutError) as error:
        raise Refused(
            f"{what}: the hub did not tell ({type(error).__name__}); make it reachable (HF_ENDPOINT), or {instead}"
        ) from error


def _repository(settings: Settings, hub: str, commit: str) -> Path:
    """The snapshot of a commit: from the caches, else downloaded. The kind of model decides which of its files are
    fetched.
    """
    import dataclasses

    from sie_store.sources import WeightSources

    def sources(family: str, *, may_download: bool) -> Path:
        stub = parse_entry(
            {"id": hub, "weights": {"hub": hub, "revision": commit}, "family": family, "outputs": {}, "max_tokens": 1}
        )
        return WeightSources.of(dataclasses.replace(settings, hf_fallback=may_download)).folder(stub)

    for family in ("gliner", "text-encoder"):
        try:
            return sources(family, may_download=False)
        except SIEError:
            continue
    if not settings.hf_fallback:
        return sources("text-encoder", may_download=False)  # the error says where it was looked for
    from huggingface_hub import file_exists

    with _hub(f"{hub}@{commit}", "put it into SIE_LOCAL_CACHE, or name a folder that holds it"):
        is_gliner = file_exists(hub, "gliner_config.json", revision=commit)
    return sources("gliner" if is_gliner else "text-encoder", may_download=True)


def answers(entry: ModelEntry, settings: Settings) -> list[str]:
    """Load `entry` on the CPU and run a sample of each of its tasks, as a worker does: a line for each output. Raises
    ModelLoadFailed.
    """
    import dataclasses

    from sie_adapter.engine import Engine
    from sie_sidecar.tokens import ModelTokenizer

    engine = Engine(dataclasses.replace(settings, device="cpu"))
    try:
        resident, _ = engine.residency.ensure(entry.id, entry, "default", ())
        weights = resident.weights
        tokenizer = ModelTokenizer(weights.tokenizer, min(entry.max_tokens, weights.max_tokens))
        why = (
            f" instead of {weights.requested_precision} ({weights.precision_reason})"
            if weights.precision_reason
            else ""
        )
        lines = [f"loaded in {resident.load_s:.1f} s, {weights.precision}{why}, attention {weights.attention}"]
        for task in entry.tasks:
            lines += _sample(engine, entry, task, tokenizer)
        return lines
    finally:
        engine.stop(10)


def _sample(engine: Any, entry: ModelEntry, task: Any, tokenizer: Any) -> list[str]:
    from sie_adapter.lanes import Job
    from sie_contracts.ipc import BatchDone
    from sie_contracts.messages import Input, Ok
    from sie_contracts.options import run_options
    from sie_sidecar import rows as rowing

    outputs = [name for name in entry.outputs if name in ("dense", "sparse", "multivector")]
    parameters: dict[str, Any] = {"encode": {"output_types": outputs}, "extract": {"labels": LABELS}}.get(task, {})
    options = run_options(Catalogue({entry.id: entry}).resolve(entry.id), parameters, task)[1].run
    texts = [SECOND] if task != "encode" else [SAMPLE]
    work = rowing.Work([Input(text) for text in texts], Input(SAMPLE) if task == "score" else None, options)
    with engine.residency.use(entry.id) as resident:
        layout = resident.weights.rows[task]
    (made,) = rowing.make(tokenizer, layout, [work])
    message = rowing.to_batch(
        "check", entry.id, task, layout.layout, [rowing.Part(made.rows, work)], pooling=options.pooling
    )
    replies: list[Any] = []
    job = Job(message, replies.append)
    engine.lanes.submit(job)
    job.finished.wait()
    reply = replies[-1]
    if not isinstance(reply, BatchDone):
        raise Refused(f"{task} failed: {reply.error.code}: {reply.error.message}")
    outcome = reply.outcomes[0]
    if not isinstance(outcome, Ok):
        raise Refused(f"{task} failed: {outcome.error.code}: {outcome.error.message}")
    return _shown(task, texts[0], outcome, reply.block)


def _shown(task: str, text: str, outcome: Any, block: bytes) -> list[str]:
    import numpy as np

    if task == "score":
        return [f"score({SAMPLE!r}, {text!r}): {outcome.score:.6f}"]
    if task == "extract":
        return [f"extract({text!r}): {outcome.data}"]
    lines = []
    for name, array in outcome.outputs.items():
        values = np.frombuffer(block, array.dtype, int(np.prod(array.shape)), array.offset).reshape(array.shape)
        first = values if values.ndim == 1 else values[0]
        norm = float(np.linalg.norm(first.astype(np.float64)))
        lines.append(
            f"{name} {list(array.shape)}: norm {norm:.6f}, first values "
            f"{' '.join(f'{value:.6f}' for value in first[:3])}"
        )
    return [f"encode({text!r}), {outcome.tokens} tokens", *lines]
