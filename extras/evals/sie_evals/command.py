"""Commands of `sie eval`.

arguments ──► EvalSpec ──► evaluation.run ──► table, pages, exit code
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sie_cli.cluster import GATEWAY_URL, Cluster, cluster_options
from sie_cli.data_dir import default_data_dir
from sie_cli.display import document, table
from sie_cli.refusal import CommandRefused
from sie_evals import evaluation, opened, outputs, targets, tasks
from sie_evals import results as _results
from sie_evals.evaluation import EvalOutcome, EvalSpec
from sie_evals.load import LoadLevel
from sie_evals.opened import EvalGateway
from sie_evals.perf import LoadPlan
from sie_evals.report import KINDS, EvalReport
from sie_evals.results import StoredReport

F = TypeVar("F", bound=Callable[..., Any])
EXIT_MISSED = 1
FOLDER = "evals"  # name of the results folder in the data directory
CLIENTS, MAX_CLIENTS = 16, 4096
_FILE = click.Path(path_type=Path, dir_okay=False)


class _Evals(click.Group):
    """Group with the default command `run`: `sie eval MODEL` runs `sie eval run MODEL`."""

    default = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [self.default, *args])


def _results_option(command: F) -> F:
    return click.option(
        "--results",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Folder in which results are stored.  [default: ~/.local/share/sie/evals]",
    )(command)


@click.group(name="eval", cls=_Evals, short_help="Measure how good and fast a model is; compare it with others.")
def evals() -> None:
    """Measure how good and how fast a model is. Commands: `run`, whose name may be left out, `list` and `compare`."""


@evals.command(name="run", short_help="Measure models.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "-t",
    "--task",
    required=True,
    metavar="TASK",
    help=f"Task: {', '.join(tasks.SHIPPED)}, mteb/NAME, texts/FILE, or a folder in BEIR's format: {tasks.FILES}.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice(KINDS),
    default="quality",
    show_default=True,
    help="What to measure. quality: how good the answers are. perf: how fast they come.",
)
@click.option(
    "-s",
    "--sources",
    default="sie",
    show_default=True,
    metavar="SOURCE,...",
    help="What to measure and compare: sie, st, patterns, targets, sie:URL, openai:URL, tei:URL, infinity:URL.",
)
@click.option(
    "--outputs",
    "kinds",
    default="",
    metavar="OUTPUT,...",
    help=f"Other outputs of the model to measure as well: {', '.join(outputs.NAMES)}.",
)
@click.option(
    "--rerank",
    multiple=True,
    metavar="MODEL",
    help="Also measure the nearest documents after this reranker has sorted them.",
)
@click.option(
    "--clients",
    type=click.IntRange(1, MAX_CLIENTS),
    help=f"Number of clients. Each sends a request when its last one is answered.  [default: {CLIENTS}]",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests to send per second, without waiting for the answers to earlier ones.",
)
@click.option(
    "--sweep",
    metavar="clients=N,N or rate=R,R",
    help="Levels of load, measured one after the other, such as clients=1,4,16,64.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=10.0,
    show_default=True,
    help="Seconds for which each level of load is measured.",
)
@click.option(
    "--warm-up",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    help="Seconds of load before the measurement of each level.",
)
@click.option(
    "--batch", type=click.IntRange(1, 2048), default=1, show_default=True, help="Number of texts in a request."
)
@click.option(
    "--targets",
    "targets_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with targets.  [default: the targets of the catalogue, else the values of the last stored result]",
)
@click.option("--save-targets", type=_FILE, help="Write the values of the first source into this file, as targets.")
@click.option("--markdown", type=_FILE, help="Write the report to this file, as Markdown.")
@click.option("--html", type=_FILE, help="Write the report to this file, as an HTML page with plots.")
@_results_option
@cluster_options(GATEWAY_URL)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def run(
    cluster: Cluster,
    models: tuple[str, ...],
    task: str,
    kind: Any,
    sources: str,
    kinds: str,
    rerank: tuple[str, ...],
    targets_file: Path | None,
    save_targets: Path | None,
    markdown: Path | None,
    html: Path | None,
    results: Path | None,
    as_json: bool,
    **load: Any,
) -> None:
    """Measure each MODEL on a task, from several sources. Every further MODEL is compared with the first.

    \b
    Sources, separated by commas; every further source is compared with the first:
      sie            the cluster that --url names or that runs on this machine; without one a cluster is started
      sie:URL        another cluster
      st             sentence-transformers in this process, in float32
      patterns       the patterns of a redaction, without a model
      openai:URL, infinity:URL, tei:URL   a server that is not SIE
      targets        a file of targets, or the last measured values: exit code 1 if the first source is worse

    \b
    Tasks:
      stsb             how alike two sentences are (Spearman's rank correlation)
      stsb-retrieval   find the sentence that says the same (NDCG@10, MAP, recall)
      redaction        replace personal data (precision, recall, leak of each kind); also redaction-forms
      entities         find names and places (precision, recall, F1); also entities-ja, relations, topics
      FOLDER           your own documents, queries and judgements
      mteb/NAME        a task of the library mteb; without the hub, a folder mteb/NAME or NAME
      texts/FILE       a file with one text per line, for --type perf

    \b
    sie eval sentence-transformers/all-MiniLM-L6-v2 -t stsb -s sie,st
    sie eval BAAI/bge-m3 intfloat/e5-base-v2 -t my-documents
    sie eval BAAI/bge-m3 -t my-documents --outputs int8,binary+rescore,sparse,multivector
    sie eval BAAI/bge-m3 -t mteb/NFCorpus --type perf -s sie --sweep clients=1,4,16,64 --html speed.html
    sie eval BAAI/bge-m3 -t mteb/NFCorpus --type perf -s sie,targets
    sie eval list
    sie eval compare OLD.json NEW.json
    """
    if len(set(models)) != len(models):
        raise CommandRefused("MODEL: name each model only once")
    if len(models) > 1 and (save_targets or markdown or html):
        raise CommandRefused("--save-targets, --markdown and --html work with one MODEL only")
    if save_targets is not None:
        targets.check(save_targets)
    if kind == "perf" and (kinds or rerank):
        raise CommandRefused("--outputs and --rerank need --type quality")
    folder = results or cluster.data_dir / FOLDER
    spec = EvalSpec(
        models[0],
        task,
        kind,
        opened.names(sources),
        folder,
        _plan(**load),
        targets_file,
        [kind.strip() for kind in kinds.split(",") if kind.strip()],
        rerank,
    )
    outcomes: list[EvalOutcome] = []
    files: list[Path] = []
    refusal: CommandRefused | None = None
    try:
        with contextlib.ExitStack() as held:
            gateway = EvalGateway(cluster, held)
            for model in models:
                outcomes.append(evaluation.run(dataclasses.replace(spec, model=model), gateway))
                # stored before the next model is measured, so that Ctrl-C or a closed output pipe loses no result
                files.append(_results.store(folder, outcomes[-1].report, outcomes[-1].about))
                click.echo(f"stored as {files[-1]}", err=True)
    except CommandRefused as error:
        if not outcomes:
            raise
        refusal = error  # raised below, after the results of the earlier models are shown
    reports = [measured.report for measured in outcomes]
    if as_json:
        figures = [report.figures(with_values=False) for report in reports]
        click.echo(document(figures if len(models) > 1 else figures[0]))
    else:
        for report in reports:
            _show(report)
        stored = [_results.read(file) for file in files]
        for compared in stored[1:]:
            click.echo()
            _show_changes(stored[0], compared)
    if refusal is not None:
        raise refusal
    (measured, *_), (report, *_) = outcomes, reports
    if save_targets is not None:
        targets.save(save_targets, models[0], measured.targets)
    for name, file, page in (("markdown", markdown, report.markdown), ("html", html, report.html)):
        if file is not None:
            try:
                file.write_text(page(), "utf-8")
            except OSError as error:
                raise CommandRefused(f"--{name} {file}: the file cannot be written: {error.strerror}") from error
    if any(report.missed for report in reports):
        raise SystemExit(EXIT_MISSED)


def _show(report: EvalReport) -> None:
    click.echo(f"{report.title}: {report.about}")
    table(report.table)
    for line in (*report.missed, *report.notes):
        click.echo(line)


def _show_changes(old: StoredReport, new: StoredReport) -> None:
    rows, notes = _results.compared(old, new)
    table(rows)
    for note in notes:
        click.echo(note)


@evals.command(name="list", short_help="Results that are stored.")
@_results_option
def list_(results: Path | None) -> None:
    """Show the results that are stored, oldest first."""
    folder = results or default_data_dir() / FOLDER
    reports = list(_results.readable(_results.every(folder)))
    if not reports:
        click.echo(f"no result is stored in {folder}")
        return
    rows = [["time", "model", "task", "type", "machine", "file"]]
    for file, stored in reports:
        subject = [stored.figures[name] for name in ("model", "task", "kind")]
        rows.append([stored.time, *subject, str(stored.about.get("machine")), str(file)])
    table(rows)


@evals.command(short_help="What changed from one result to another.")
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
def compare(old: Path, new: Path) -> None:
    """Show what changed from the result in file OLD to the result in file NEW: the metrics, the version, commit,
    machine, engine and precision, and the model's fingerprint. A metric has a confidence interval if both files have
    the same queries and the metric's value for each query.

    `sie eval list` shows the files.
    """
    _show_changes(_results.read(old), _results.read(new))


def _plan(
    clients: int | None, rate: float | None, sweep: str | None, seconds: float, warm_up: float, batch: int
) -> LoadPlan:
    """Build the plan of the load from the options. Raises CommandRefused if options contradict each other, or if a
    level is not a finite number above 0.
    """
    if sum(option is not None for option in (clients, rate, sweep)) > 1:
        raise CommandRefused("give only one of --clients, --rate and --sweep")
    if not math.isfinite(seconds + warm_up):
        raise CommandRefused("--seconds and --warm-up: expected finite numbers")
    if sweep is None:
        sweep = f"clients={clients or CLIENTS}" if rate is None else f"rate={rate}"
    return LoadPlan(_levels(sweep), seconds, warm_up, batch)


def _levels(sweep: str) -> list[LoadLevel]:
    name, _, values = sweep.partition("=")
    try:
        if name == "clients":
            levels = [LoadLevel(clients=int(value)) for value in values.split(",")]
        elif name == "rate":
            levels = [LoadLevel(rate=float(value)) for value in values.split(",")]
        else:
            raise ValueError(name)
        if not all(0 < value.clients + value.rate < math.inf and value.clients <= MAX_CLIENTS for value in levels):
            raise ValueError(values)
        if len({*levels}) < len(levels):
            raise ValueError(values)
    except ValueError as error:
        raise CommandRefused(
            f"the load {sweep[:200]}: expected clients=1,4,16 or rate=10,20, each number once, finite and above 0, at "
            f"most {MAX_CLIENTS} clients"
        ) from error
    return levels
