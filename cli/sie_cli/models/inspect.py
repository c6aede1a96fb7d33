"""`sie models inspect`: print a catalogue entry for a model folder or a hub repository.

With --check, the model is also loaded and run on a sample.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sie_cli.display import transfers
from sie_cli.options import loaded
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.errors import SIEError
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, is_id, parse_entry
from sie_contracts.models.options import run_options
from sie_contracts.names import NameIndex
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import Input, Ok
from sie_runtime.feed import packaged_models
from sie_store.configured import weight_sources
from sie_store.weights.hub import commit_of, has_file
from sie_store.weights.manifest import FetchFailed
from sie_store.weights.progress import FetchProgress

if TYPE_CHECKING:
    from rich.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_FAMILY = "text-encoder"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[a-zA-Z0-9][\w.-]*/[\w.-]+")
SAMPLE, SECOND = "A short sentence of everyday words.", "Ada Lovelace wrote to Charles Babbage in London."
LABELS = ["person", "place"]


def source_arguments(command: F) -> F:
    """Add the arguments that `inspect` and `add` have in common."""
    for option in (
        click.option(
            "--revision",
            metavar="COMMIT",
            help=(
                "Commit of a hub repository. Default: its commit in the packaged catalogue, else its only commit in "
                "SIE_LOCAL_CACHE, else the current commit of its main branch."
            ),
        ),
        click.argument("source", metavar="ID_OR_FOLDER"),
    ):
        command = option(command)
    return command


@click.command()
@source_arguments
@click.option("--check", is_flag=True, help="Load the model on the CPU, and show its answer to a sample.")
def inspect(source: str, revision: str | None, check: bool) -> None:
    """Print the catalogue entry of ID_OR_FOLDER. Comments list the values that were assumed, as no file states them.

    ID_OR_FOLDER is a folder with the files of a model, or a hub repository such as
    BAAI/bge-small-en-v1.5, which is read from the local cache (SIE_LOCAL_CACHE) or downloaded (SIE_HF_FALLBACK). No
    weights are loaded without --check.
    """
    settings = loaded({}).settings
    text, entry = described(settings, source, "", revision)
    click.echo(text, nl=False)
    if check:
        click.echo()
        with refusing():
            for line in answers(entry, settings):
                click.echo(line)


def described(settings: Settings, source: str, name: str, revision: str | None) -> tuple[str, ModelEntry]:
    """Return the catalogue entry of a model, as text and parsed. Raises CommandRefused."""
    try:
        folder, weights, model = _located(settings, source, revision)
        model = name or model
        if not is_id(model):
            raise CommandRefused(f"{model!r} cannot be the id of a model: give another id with --id")
        # imported late, because the import of torch takes seconds
        from sie_adapter.loading.inspection import inspect as inspect_folder

        packaged = packaged_models().get(weights.get("hub", ""))
        report = inspect_folder(folder, model, weights, packaged)
        return _yaml(report.entry, report.findings, report.assumed), parse_entry(report.entry)
    except SIEError as error:
        # join the lines, because messages of libraries may have several paragraphs
        raise CommandRefused(" ".join(error.message.split())) from error


def _yaml(entry: dict[str, Any], detected: list[str], assumed: list[str]) -> str:
    import yaml

    notes = [*(f"# found: {line}" for line in detected), *(f"# assumed: {line}" for line in assumed)]
    return "\n".join((*notes, yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=130)))


def _located(settings: Settings, source: str, revision: str | None) -> tuple[Path, dict[str, Any], str]:
    """Return the model's local folder, the value of the entry's field `weights`, and the model's default name."""
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        if revision:
            raise CommandRefused(f"{source} is a folder: --revision is for repositories of the hub")
        return folder, {"path": str(folder.resolve())}, folder_name(folder)
    if not _HUB_ID.fullmatch(source):
        raise CommandRefused(
            f"there is no folder {source}, and it is no id of the hub: such an id has the form organisation/name"
            f"{_like(source)}"
        )
    commit = _commit(settings, source, revision)
    return _repository(settings, source, commit), {"hub": source, "revision": commit}, source


def folder_name(folder: Path) -> str:
    """Return the default id of a model in a folder: the folder's name, in which a hyphen replaces each run of invalid
    characters.
    """
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", folder.resolve().name).strip("-._")


def _like(name: str) -> str:
    near = NameIndex(packaged_models()).near(name)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _commit(settings: Settings, hub: str, revision: str | None) -> str:
    """Return the commit of `revision`. Without a revision, return the first of these that exists: the commit in the
    packaged catalogue, the only commit in the cache, the commit of the main branch. Raises CommandRefused.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    packaged = packaged_models().get(hub)
    if not revision and packaged is not None and packaged.weights.hub == hub and packaged.weights.revision:
        return packaged.weights.revision
    cached = sorted((settings.cache_folder / "hub" / f"models--{hub.replace('/', '--')}" / "snapshots").glob("*"))
    if not revision and len(cached) == 1:
        return cached[0].name
    if not settings.hf_fallback:
        raise CommandRefused(
            f"the commit of {hub} is not known here, and downloads are off (SIE_HF_FALLBACK): "
            f"{_without_hub(hub, revision)}{_like(hub)}"
        )
    try:
        return commit_of(hub, revision)
    except FetchFailed as error:
        if error.error_class == "NOT_FOUND" and not revision:
            raise CommandRefused(f"{error.message}{_like(hub) or '; is the name right?'}") from error
        instead = f"; or {_without_hub(hub, revision)}{'' if revision else _like(hub)}"
        raise CommandRefused(f"the commit of {hub} could not be looked up: {error.message}{instead}") from error


def _without_hub(hub: str, revision: str | None) -> str:
    if revision:
        return "give --revision the whole commit, 40 hex digits"
    return f"name its commit: `sie models add {hub} --revision COMMIT`"


def _repository(settings: Settings, hub: str, commit: str) -> Path:
    def sources(family: str, *, may_download: bool) -> Path:
        return weights_folder(dataclasses.replace(settings, hf_fallback=may_download), stub(hub, commit, family))

    # configuration file -> family whose models have this file, and other files than a text encoder
    rows = families.rows().items()
    own_files = {row.config_file: name for name, row in rows if row.names_backbones and row.described_by}
    for family in (*own_files.values(), DEFAULT_FAMILY):
        try:
            return sources(family, may_download=False)
        except SIEError as error:
            absent = error
    if not settings.hf_fallback:
        raise absent  # this error lists the folders and buckets that were searched
    try:
        family = next((name for file, name in own_files.items() if has_file(hub, commit, file)), DEFAULT_FAMILY)
    except FetchFailed as error:
        raise CommandRefused(error.message) from error
    return sources(family, may_download=True)


def stub(hub: str, commit: str, family: str = DEFAULT_FAMILY) -> ModelEntry:
    """Return an entry with which a hub repository can be fetched although the catalogue has no entry for it. `family`
    decides which files are fetched.
    """
    weights = {"hub": hub, "revision": commit}
    return parse_entry({"id": hub, "weights": weights, "family": family, "outputs": {}, "max_tokens": 1})


def weights_folder(settings: Settings, entry: ModelEntry) -> Path:
    """Return the folder of an entry's weights. Download missing weights, with a progress bar on a terminal. Raises
    ModelLoadFailed, SettingError.
    """
    with transfers() as bars:
        sources = dataclasses.replace(weight_sources(settings), begin=lambda title: shown_progress(bars, title))
        return sources.folder(entry)


def shown_progress(bars: Progress, title: str) -> FetchProgress:
    """Add a progress bar for a transfer to `bars`. Return the FetchProgress whose steps update this bar."""
    progress, task = FetchProgress(title), bars.add_task(title, total=None)
    progress.on_step = lambda state: bars.update(task, completed=state.done_bytes, total=state.total_bytes or None)
    return progress


def answers(entry: ModelEntry, settings: Settings) -> list[str]:
    """Load a model on the CPU, and run one sample for each of its tasks through the tokenizer and the engine of a
    worker. Return the results as lines of text. Raises ModelLoadFailed, and CommandRefused if a task fails.
    """
    from sie_adapter.engine.engine import AdapterEngine
    from sie_sidecar.prepare.rows import ModelTokenizer

    engine = AdapterEngine(dataclasses.replace(settings, device="cpu"))
    try:
        resident = engine.residency.ensure(entry.id, entry)
        weights = resident.weights
        tokenizer = ModelTokenizer(weights.tokenizer, min(entry.max_tokens, weights.max_tokens))
        why = ""
        if weights.precision_reason:
            why = f" instead of {weights.requested_precision} ({weights.precision_reason})"
        lines = [f"loaded in {resident.load_s:.1f} s, {weights.precision}{why}, attention {weights.attention}"]
        for task in entry.tasks:
            lines += _sample(engine, entry, task, tokenizer)
        return lines
    finally:
        engine.stop(10)


def _sample(engine: Any, entry: ModelEntry, task: Any, tokenizer: Any) -> list[str]:
    from sie_adapter.engine.device_threads import DeviceJob
    from sie_sidecar.prepare import layouts
    from sie_sidecar.prepare import rows as rowing

    outputs = [name for name in entry.outputs if name in ("dense", "sparse", "multivector")]
    parameters: dict[str, Any] = {"encode": {"output_types": outputs}, "extract": {"labels": LABELS}}.get(task, {})
    options = run_options(Catalogue({entry.id: entry}).resolve(entry.id), parameters, task)[1].run
    texts = [SECOND] if task != "encode" else [SAMPLE]
    work = rowing.WorkItemInput([Input(text) for text in texts], Input(SAMPLE) if task == "score" else None, options)
    with engine.residency.use(entry.id) as resident:
        layout = resident.weights.rows[task]
    (prepared,) = layouts.make(tokenizer, layout, [work])
    message = rowing.to_batch(
        "check", entry.id, task, layout.layout, [rowing.BatchPart(prepared.rows, work)], pooling=options.pooling
    )
    replies: list[Any] = []
    job = DeviceJob(message, replies.append)
    engine.device_threads.submit(job)
    job.finished.wait()
    reply = replies[-1]
    if not isinstance(reply, BatchDone):
        raise CommandRefused(f"{task} failed: {reply.error.code}: {reply.error.message}")
    outcome = reply.outcomes[0]
    if not isinstance(outcome, Ok):
        raise CommandRefused(f"{task} failed: {outcome.error.code}: {outcome.error.message}")
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
