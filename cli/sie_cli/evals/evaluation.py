"""One evaluation from the first source to the stored result.

Asked ──► sources ──► quality or speed ──► targets ──► Report ──► results
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sie_cli.cluster import Cluster
from sie_cli.display import counted, items
from sie_cli.evals import opened, outputs, perf, quality, report, results, targets, tasks
from sie_cli.evals.kept import Kept
from sie_cli.evals.load import NOBODY
from sie_cli.evals.mteb_tasks import Mteb
from sie_cli.evals.opened import Opened
from sie_cli.evals.perf import Plan, Point
from sie_cli.evals.quality import Found
from sie_cli.evals.report import Kind, Report
from sie_cli.evals.sources import Sie, Source
from sie_cli.evals.steps import Step, Work
from sie_cli.evals.targets import Targets
from sie_cli.evals.tasks import Retrieval, Similarity, Task, Texts
from sie_cli.evals.utilisation import WorkerWatch
from sie_cli.refusal import Refused
from sie_contracts.loopback import is_local

UNFINISHED = "unfinished"  # in the folder of results
HERE = "local"  # in place of a machine profile, where no cluster is measured


@dataclass(frozen=True)
class Asked:
    """What a user asks for. `sources`: their names. `targets_file`: None for that of the catalogue. `rerankers`:
    models of the cluster that order the nearest documents again.
    """

    model: str
    task: str
    kind: Kind
    sources: Sequence[str]
    results: Path
    plan: Plan
    targets_file: Path | None = None
    outputs: Sequence[str] = ()
    rerankers: Sequence[str] = ()


@dataclass(frozen=True)
class Measured:
    """`about`: what the stored result says of where it was measured. `targets`: what the first source reached, by the
    name of the task in a file of targets.
    """

    report: Report
    about: Mapping[str, Any]
    targets: Mapping[str, Targets]


@dataclass(frozen=True)
class _Known:
    """What is known before anything is measured. `about`: what the stored result says of it."""

    asked: Asked
    task: Task
    sources: Sequence[Source]
    machine: str
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> Sie | None:
        return opened.first_cluster(self.sources)


def run(asked: Asked, cluster: Cluster) -> Measured:
    """Measure and compare. Raises Refused; what would make the result useless is told before anything is measured."""
    from sie_client.errors import SIEConnectionError, SIEError

    task = tasks.find(asked.task)
    if isinstance(task, Texts) and asked.kind == "quality":
        raise Refused(f"nobody judged the texts of {task.name}: --type perf measures how fast they are")
    results.check(asked.results)
    with contextlib.ExitStack() as held:
        try:
            sources = Opened(cluster, asked.model, held)
            for name in asked.sources:
                if name != "targets":
                    sources.open(name)
            known = _known(asked, task, sources.sources)
            return _speed(known) if asked.kind == "perf" else _quality(known, sources)
        except SIEConnectionError as error:
            raise Refused(f"{error}: the cluster went away; the same command goes on from there") from error
        except SIEError as error:
            raise Refused(str(error)) from error


def _known(asked: Asked, task: Task, sources: Sequence[Source]) -> _Known:
    first = opened.first_cluster(sources)
    if first is None:
        return _Known(asked, task, sources, HERE, results.about({}, HERE))
    machine = first.machine() or HERE
    served = {name: ", ".join(first.info[name]["served"]) for name in ("engine", "precision")}
    told = {"fingerprint": first.fingerprint, **served}
    return _Known(asked, task, sources, machine, results.about(told, machine))


def _quality(known: _Known, sources: Opened) -> Measured:
    asked, task = known.asked, known.task
    assert not isinstance(task, Texts)
    rerankers = [sources.of_cluster(name, "", name) for name in asked.rerankers]
    steps = list(_steps(known, rerankers))
    expected, told = _expected(known, task.name, "", is_speed=False)
    kept = Kept(asked.results / UNFINISHED)
    found: list[Found] = []
    with kept.until_done(), items() as bars:
        for step in steps:
            bar = bars.add_task(step.name, total=quality.count(task, step))
            found.append(quality.measure(task, step, Work(kept, functools.partial(bars.advance, bar))))
    first = found[0]
    missed = targets.missed(expected, first.scores, first.source)
    about = f"{counts(task)}{told}"
    if kept.found:
        about += f"; answers to {counted(kept.found, 'text')} are those of an interrupted evaluation"
    made = report.of_quality(asked.model, task.name, about, found, expected, missed)
    return Measured(made, known.about, {task.name: targets.expected(first.scores, is_speed=False)})


def _steps(known: _Known, rerankers: Sequence[Source]) -> Iterator[Step]:
    """Each source with dense vectors, then each other output of the cluster, then each reranker behind the first."""
    for source in known.sources:
        if isinstance(known.task, Mteb) and source.main != outputs.DENSE:
            raise Refused(f"{source.name} has {source.main.name} vectors: the library mteb compares dense ones")
        yield Step(source, source.main)
    main = known.cluster.main if known.cluster else outputs.DENSE
    asked = [outputs.find(name) for name in known.asked.outputs if name != main.name]
    if (asked or rerankers) and isinstance(known.task, Mteb):
        raise Refused("--outputs and --rerank need single queries, which the library mteb does not tell: use a folder")
    if (asked or rerankers) and known.cluster is None:
        raise Refused("--outputs and --rerank are of a cluster: name it with -s sie")
    if asked and known.cluster is not None and known.cluster.scores_pairs:
        raise Refused("--outputs: the model has scores and no vectors")
    for output in asked:
        assert known.cluster is not None
        yield Step(known.cluster, output)
    for reranker in rerankers:
        if isinstance(known.task, Similarity) or known.sources[0].scores_pairs:
            raise Refused(
                "--rerank orders the nearest documents again: it needs a task of retrieval and a model with vectors"
            )
        if not reranker.scores_pairs:
            raise Refused(f"--rerank {reranker.name}: the model has vectors and no scores")
        yield Step(known.sources[0], known.sources[0].main, reranker)


def _speed(known: _Known) -> Measured:
    asked, task, plan = known.asked, known.task, known.asked.plan
    names = [targets.speed_task(task.name, known.machine, str(level)) for level in plan.levels]
    expected: dict[str, Targets] = {}
    told = ""
    for level, name in zip(plan.levels, names, strict=True):
        expected[str(level)], told = _expected(known, name, str(level), is_speed=True)
    watches = {
        each.name: WorkerWatch(each.url, each.token, is_local=is_local(each.url))
        for each in known.sources
        if isinstance(each, Sie)
    }
    points: list[Point] = []
    missed: list[str] = []
    measured: dict[str, Targets] = {}
    seconds = plan.warm_up_s + plan.seconds
    with items() as bars:
        bar = bars.add_task("seconds", total=seconds * len(known.sources) * len(plan.levels))
        for found in perf.measure(task, known.sources, plan, watches, lambda: bars.advance(bar, seconds)):
            points += found
            at, first = str(found[0].level), found[0].source
            scores = targets.of_speed({each.source: each.scores for each in found}, first)
            missed += targets.missed(expected[at], scores, f"{first}, {at}")
            measured[targets.speed_task(task.name, known.machine, at)] = targets.expected(scores, is_speed=True)
    if not any(each.latencies_ms for each in points):
        codes = ", ".join(dict.fromkeys(code for each in points for code in each.errors)) or "none was sent"
        raise Refused(f"no request was answered: {codes}")
    lost = [each for each in points if each.lost_its_server]
    missed += [
        f"{each.source} went away at {each.level}: {counted(each.errors[NOBODY], 'request')} found nobody"
        for each in lost
    ]
    texts = f"{counted(plan.batch, 'text')} to a request, {plan.seconds:g} s after {plan.warm_up_s:g} s of warm-up"
    about = f"{counts(task)}, {texts}, on {known.about['processor']}, machine profile {known.machine}{told}"
    aims = {level: each for level, each in expected.items() if each}
    made = report.of_perf(asked.model, task.name, about, points, aims, missed)
    return Measured(made, known.about, measured)


def _expected(known: _Known, name: str, level: str, *, is_speed: bool) -> tuple[Targets, str]:
    """The targets of this name if they are asked for, and where they come from: the file that is named, that of the
    catalogue, or what was measured last. Raises Refused where there are none.
    """
    asked = known.asked
    if "targets" not in asked.sources:
        return {}, ""
    file = asked.targets_file or targets.packaged()
    if found := targets.of(file, asked.model, name):
        return found, f"; targets of {file.name}"
    first = known.sources[0].name
    if asked.targets_file is None and (
        stored := results.last(asked.results, asked.model, known.task.name, asked.kind, known.machine)
    ):
        rows = [row for row in stored.figures["rows"] if row.get("load", "") == level]
        scores = {row["source"]: {k: v for k, v in row["scores"].items() if v is not None} for row in rows}
        if first in scores:
            values = targets.of_speed(scores, first) if is_speed else scores[first]
            measured = {row.name for row in known.sources}
            values = {k: v for k, v in values.items() if "/" not in k or k.partition("/")[2] in measured}
            return targets.expected(values, is_speed=is_speed), f"; targets are what was measured at {stored.time}"
    raise Refused(
        f"{file} has no targets of {asked.model} for {name}, and no earlier result is stored: run it once without"
        " targets, or let --save-targets FILE write what is measured"
    )


def counts(task: Task) -> str:
    match task:
        case Similarity():
            return counted(len(task.gold), "pair")
        case Retrieval():
            return f"{counted(len(task.queries), 'query', 'queries')}, {counted(len(task.corpus), 'document')}"
        case Texts() | Mteb():
            return counted(len(task.texts), "text")
