"""Evaluation of one model: open the sources, measure them, and compare the first source with its targets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sie_cli.display import counted, items
from sie_cli.refusal import CommandRefused
from sie_client.errors import SIEConnectionError, SIEError
from sie_contracts.loopback import is_local
from sie_evals import opened, outputs, packages, perf, quality, report, results, targets, tasks
from sie_evals.labelled import FactTask
from sie_evals.load import NOBODY, WorkerWatch
from sie_evals.mteb_tasks import Mteb
from sie_evals.opened import EvalGateway, OpenSources
from sie_evals.perf import LoadPlan, LoadPoint
from sie_evals.quality import Measurement
from sie_evals.report import EvalReport, Kind
from sie_evals.sources import EvalSource, FactSource, Sie
from sie_evals.steps import EvalStep, EvalWork, ResultCache
from sie_evals.targets import Targets
from sie_evals.tasks import Retrieval, Similarity, Task, Texts

UNFINISHED = "unfinished"  # subfolder of the results folder, with the cached answers of unfinished evaluations
HERE = "local"  # machine name in results if no cluster is measured, or the cluster has no workers


@dataclass(frozen=True)
class EvalSpec:
    """Options of an evaluation. `sources`: names of the sources. `targets_file`: None for the catalogue's targets, or
    the last stored result. `rerankers`: models of the cluster that sort the nearest documents of each query by score.
    """

    model: str
    task: str
    kind: Kind
    sources: Sequence[str]
    results: Path
    plan: LoadPlan
    targets_file: Path | None = None
    outputs: Sequence[str] = ()
    rerankers: Sequence[str] = ()


@dataclass(frozen=True)
class EvalOutcome:
    """Outcome of an evaluation. `about`: description of the machine and the software, for the stored result. `targets`:
    name of the task in a file of targets -> the first source's scores as targets. --save-targets writes them.
    """

    report: EvalReport
    about: Mapping[str, Any]
    targets: Mapping[str, Targets]


@dataclass(frozen=True)
class _EvalContext:
    """Checked input of one evaluation. `machine`: the machine profile. `about`: description of the machine and the
    software, for the stored result.
    """

    spec: EvalSpec
    task: Task
    sources: Sequence[EvalSource]
    machine: str
    about: Mapping[str, Any]

    @property
    def cluster(self) -> Sie | None:
        return opened.first_cluster(self.sources)


def run(spec: EvalSpec, gateway: EvalGateway) -> EvalOutcome:
    """Measure a model, compare it with its targets, and return the outcome. Check packages, task, results folder and
    sources before the measurement begins. Raises CommandRefused.
    """
    packages.check(spec.task, spec.sources)
    task = tasks.find(spec.task)
    if isinstance(task, Texts) and spec.kind == "quality":
        raise CommandRefused(f"the texts of {task.name} have no judgements: use --type perf, which measures speed")
    results.check(spec.results)
    with contextlib.ExitStack() as held:
        try:
            sources = OpenSources(gateway, spec.model, held)
            for name in spec.sources:
                if name != "targets":
                    sources.open(name)
            _check_sources(task, sources.sources, spec.kind)
            context = _context(spec, task, sources.sources)
            return _speed(context) if spec.kind == "perf" else _quality(context, sources)
        except SIEConnectionError as error:
            raise CommandRefused(
                f"{error}: the cluster stopped answering; run the same command again: the next run uses the answers "
                "that this run has cached"
            ) from error
        except SIEError as error:
            raise CommandRefused(str(error)) from error


def _check_sources(task: Task, sources: Sequence[EvalSource], kind: Kind) -> None:
    is_labelled = isinstance(task, FactTask) and kind == "quality"
    for source in sources:
        if is_labelled and not isinstance(source, FactSource):
            raise CommandRefused(f"-s {source.name} has only vectors and scores: use -s sie for the task {task.name}")
        if not is_labelled and isinstance(source, Sie) and source.only_extracts:
            raise CommandRefused(
                f"{source.model} has neither vectors nor scores: the tasks redaction, entities, relations and topics"
                " measure the quality of such a model"
            )


def _context(spec: EvalSpec, task: Task, sources: Sequence[EvalSource]) -> _EvalContext:
    first = opened.first_cluster(sources)
    if first is None:
        return _EvalContext(spec, task, sources, HERE, results.about({}, HERE))
    machine = first.machine() or HERE
    served = {"engine": ", ".join(first.info.engine.served), "precision": ", ".join(first.info.precision.served)}
    serving = {"fingerprint": first.fingerprint, **served}
    return _EvalContext(spec, task, sources, machine, results.about(serving, machine))


def _quality(context: _EvalContext, sources: OpenSources) -> EvalOutcome:
    spec, task = context.spec, context.task
    assert not isinstance(task, Texts)
    rerankers = [sources.of_cluster(name, "", name) for name in spec.rerankers]
    steps = list(_steps(context, rerankers))
    expected, note = _expected(context, task.name, "", is_speed=False)
    cache = ResultCache(spec.results / UNFINISHED)
    scores: list[Measurement] = []
    with cache.until_done(), items() as bars:
        for step in steps:
            bar = bars.add_task(step.name, total=quality.count(task, step))
            scores.append(quality.measure(task, step, EvalWork(cache, functools.partial(bars.advance, bar))))
    first = scores[0]
    missed = targets.missed(expected, first.scores, first.source)
    about = f"{counts(task)}{note}"
    if cache.reused_texts:
        about += f"; answers to {counted(cache.reused_texts, 'text')} are from an interrupted evaluation"
    names = task.queries if isinstance(task, Retrieval) else {}
    document = report.of_quality(spec.model, task.name, about, scores, expected, missed, names)
    return EvalOutcome(document, context.about, {task.name: targets.expected(first.scores, is_speed=False)})


def _steps(context: _EvalContext, rerankers: Sequence[EvalSource]) -> Iterator[EvalStep]:
    """Yield the steps of a measurement: each source with its main vectors, then the cluster with each further output,
    then the first source with each reranker. Raises CommandRefused if an option does not fit the task or the models.
    """
    for source in context.sources:
        if isinstance(context.task, Mteb) and source.main != outputs.DENSE:
            raise CommandRefused(
                f"{source.name} has {source.main.name} vectors: the library mteb compares only dense vectors"
            )
        yield EvalStep(source, source.main)
    main = context.cluster.main if context.cluster else outputs.DENSE
    compared = [outputs.find(name) for name in context.spec.outputs if name != main.name]
    if (compared or rerankers) and isinstance(context.task, Mteb | FactTask):
        raise CommandRefused(
            "--outputs and --rerank need the vectors of single queries: use -t stsb-retrieval, scipy-docs or FOLDER"
        )
    if (compared or rerankers) and context.cluster is None:
        raise CommandRefused("--outputs and --rerank need a cluster as a source: add sie to -s")
    if compared and context.cluster is not None and context.cluster.scores_pairs:
        raise CommandRefused("--outputs: the model returns scores; only a model that returns vectors has other outputs")
    for output in compared:
        assert context.cluster is not None
        yield EvalStep(context.cluster, output)
    for reranker in rerankers:
        if isinstance(context.task, Similarity) or context.sources[0].scores_pairs:
            raise CommandRefused(
                "--rerank sorts the nearest documents of a query: it needs a retrieval task and a model with vectors"
            )
        if not reranker.scores_pairs:
            raise CommandRefused(
                f"--rerank {reranker.name}: the model returns vectors; name a model that returns scores"
            )
        yield EvalStep(context.sources[0], context.sources[0].main, reranker)


def _speed(context: _EvalContext) -> EvalOutcome:
    spec, task, plan = context.spec, context.task, context.spec.plan
    names = [targets.speed_task(task.name, context.machine, str(level)) for level in plan.levels]
    expected: dict[str, Targets] = {}
    note = ""
    for level, name in zip(plan.levels, names, strict=True):
        expected[str(level)], note = _expected(context, name, str(level), is_speed=True)
    watches = {
        source.name: WorkerWatch(source.url, source.token, is_local=is_local(source.url))
        for source in context.sources
        if isinstance(source, Sie)
    }
    points: list[LoadPoint] = []
    missed: list[str] = []
    measured: dict[str, Targets] = {}
    seconds = plan.warm_up_s + plan.seconds
    with items() as bars:
        bar = bars.add_task("seconds", total=seconds * len(context.sources) * len(plan.levels))
        for measured_points in perf.measure(task, context.sources, plan, watches, lambda: bars.advance(bar, seconds)):
            points += measured_points
            at, first = str(measured_points[0].level), measured_points[0].source
            scores = targets.of_speed({point.source: point.scores for point in measured_points}, first)
            missed += targets.missed(expected[at], scores, f"{first}, {at}")
            measured[targets.speed_task(task.name, context.machine, at)] = targets.expected(scores, is_speed=True)
    if not any(point.latencies_ms for point in points):
        codes = ", ".join(dict.fromkeys(code for point in points for code in point.errors)) or "none was sent"
        raise CommandRefused(f"no request was answered, so there is no speed to report. Error codes: {codes}")
    lost = [point for point in points if point.lost_its_server]
    missed += [
        f"{point.source} stopped answering at {point.level}: {counted(point.errors[NOBODY], 'request')} cannot connect"
        for point in lost
    ]
    texts = f"{counted(plan.batch, 'text')} to a request, over {plan.seconds:g} s after {plan.warm_up_s:g} s of warm-up"
    about = f"{counts(task)}, {texts}, on {context.about['processor']}, machine profile {context.machine}{note}"
    aims = {level: goals for level, goals in expected.items() if goals}
    document = report.of_perf(spec.model, task.name, about, points, aims, missed)
    return EvalOutcome(document, {**context.about, "batch": plan.batch}, measured)


def _expected(context: _EvalContext, name: str, level: str, *, is_speed: bool) -> tuple[Targets, str]:
    """Return targets, and a note about their origin: the file that the user named, the catalogue's file, or the last
    stored result. `name`: name of the task in a file of targets. `level`: level of load in a stored result, empty for
    quality. Targets and note are empty if the user did not name the source `targets`. Raises CommandRefused if neither
    a file nor a stored result has targets.
    """
    spec = context.spec
    if "targets" not in spec.sources:
        return {}, ""
    file = spec.targets_file or targets.packaged()
    if loaded := targets.load(file, spec.model, name):
        return loaded, f"; targets of {file.name}"
    first = context.sources[0].name
    if spec.targets_file is None and (
        stored := results.last(
            spec.results,
            spec.model,
            context.task.name,
            spec.kind,
            context.machine,
            spec.plan.batch if is_speed else 1,
        )
    ):
        rows = [row for row in stored.figures["rows"] if row.get("load", "") == level]
        scores = {row["source"]: {k: v for k, v in row["scores"].items() if v is not None} for row in rows}
        if first in scores:
            values = targets.of_speed(scores, first) if is_speed else scores[first]
            measured = {row.name for row in context.sources}
            values = {k: v for k, v in values.items() if "/" not in k or k.partition("/")[2] in measured}
            return targets.expected(values, is_speed=is_speed), f"; targets are the values measured at {stored.time}"
    raise CommandRefused(
        f"{file} has no targets of {spec.model} for {name}, and no earlier result is stored: run this command once"
        " without `targets` in --sources, or write the measured values with --save-targets FILE"
    )


def counts(task: Task) -> str:
    match task:
        case Similarity():
            return counted(len(task.gold), "pair")
        case Retrieval():
            return f"{counted(len(task.queries), 'query', 'queries')}, {counted(len(task.corpus), 'document')}"
        case FactTask():
            facts = sum(len(text.facts) for text in task.texts)
            return f"{counted(len(task.texts), 'text')}, {counted(facts, 'fact')}"
        case Texts() | Mteb():
            return counted(len(task.texts), "text")
