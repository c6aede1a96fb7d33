"""A migration of an alias: each step looks at the cluster, does what is missing, and tells it.

Asked ──► check ──► quality ──► embed ──► shadow ──► flip ──► report

Until the shadow is set nothing of the alias is changed. Each write is one revision, and only of the one that was read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from sie_cli import display
from sie_cli.display import printable
from sie_cli.jobs.job import (
    OutputPlace,
    errors_text,
    failures_table,
    fetch_output,
    follow,
    problem_text,
    rows_text,
    transfer_bar,
)
from sie_cli.migrating import embedding, quality, steps
from sie_cli.migrating.aliasing import Aliases, Present, before_flip, shadow_since_s
from sie_cli.migrating.corpus import Corpus
from sie_cli.migrating.embedding import Earlier
from sie_cli.migrating.quality import QuerySet
from sie_cli.migrating.steps import MigrationState, Step
from sie_cli.models.compare import MIN_TEXTS
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client import Job, SIEClient

PROBE = "A text that shows whether the model answers."
LOOK_S = 0.5  # between two looks at what the gateways measured
FOLLOW_S = 10.0  # until every gateway has a flip
FAILED_ROWS = 5  # that are shown


class _CopyFigures(Struct, frozen=True):
    copies: dict[str, int] = {}
    cosine: float | None = None
    rank: float | None = None
    served_ms: float | None = None
    shadow_ms: float | None = None


class _ShadowFields(Struct, frozen=True):
    model: str
    figures: _CopyFigures = _CopyFigures()


class _AliasFigures(Struct, frozen=True):
    shadow: _ShadowFields | None = None


class _ModelFields(Struct, frozen=True):
    dims: dict[str, int] = {}
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    alias: _AliasFigures | None = None


@dataclass(frozen=True)
class Shadowing:
    """Extent of the shadow step: a share of the requests, for `seconds` or until there were so many `copies`."""

    share: float
    seconds: float
    copies: int | None = None


@dataclass(frozen=True)
class MigrationPlan:
    """Request of a user for a migration. `accepts`: also a low agreement, and rows without an answer."""

    alias: str
    model: str
    corpus: Corpus
    place: OutputPlace
    sink: dict[str, str]
    sample: int
    min_agreement: float
    queries: QuerySet
    shadow: Shadowing
    accepts: bool
    until: Step

    @property
    def output(self) -> dict[str, str]:
        """Destination of the vectors, as a job states it."""
        return {**({"url": self.place.url} if self.place.url else {}), **self.sink}

    @property
    def options(self) -> dict[str, Any]:
        """Options of the job."""
        how = self.corpus.input
        columns = {"text": how.text, "id": how.id, "input_format": how.format, "output": self.output}
        return {name: value for name, value in columns.items() if value}


@dataclass
class GatewayGroup:
    """`client` is that of the first, `every` those of all; `url`: of the first."""

    client: SIEClient
    every: Sequence[SIEClient]
    url: str


@dataclass(frozen=True)
class ModelCheck:
    """Result of the check. `fingerprint`: of the new model."""

    alias: Present
    fingerprint: str
    key: str
    seed: str
    earlier: Earlier


@dataclass
class MigrationReport:
    """Report of the steps that were done, for a program; `say` prints it for a person."""

    say: Callable[[str], None]
    facts: dict[str, Any] = field(default_factory=dict)
    step: Step = "check"

    def begin(self, step: Step) -> None:
        self.step = step

    def report_step(self, text: str, **facts: Any) -> None:
        """A line of the present step."""
        self.facts.setdefault(self.step, {}).update(facts)
        self.say(f"{steps.STEPS.index(self.step) + 1}/{len(steps.STEPS)} {self.step}: {printable(text)}")


class Migration:
    """`err`: progress goes to standard error."""

    def __init__(
        self, gateways: GatewayGroup, aliases: Aliases, plan: MigrationPlan, report: MigrationReport, *, err: bool
    ) -> None:
        self._gateways = gateways
        self._client = gateways.client
        self._aliases = aliases
        self._plan = plan
        self._report = report
        self._err = err

    def run(self) -> None:
        """All steps that are left. Raises CommandRefused, and what the client raises."""
        plan, report = self._plan, self._report
        alias = self._aliases.read(plan.alias)
        if alias.target == plan.model:
            report.begin("flip")
            report.report_step(f"{plan.alias} names {plan.model} already", revision=alias.revision)
            return
        checked = self._check(alias)
        job = checked.earlier.job
        state = MigrationState(
            alias.target,
            alias.shadow,
            max(0.0, time.time() - shadow_since_s(alias.history)) if alias.shadow else 0.0,
            job is not None,
            job is not None and embedding.is_answered(job.info) and self._has_files(job),
        )
        left = steps.remaining_steps(state, plan.model, plan.until, plan.shadow.seconds)
        if "quality" in left:
            self._quality(checked)
        elif job is not None:
            report.begin("quality")
            report.report_step(f"was accepted when {job.id} was submitted", job=job.id)
        if "embed" in left:
            job = self._embed(checked)
        elif job is not None:
            report.begin("embed")
            report.report_step(f"{job.id} is completed, {rows_text(job.info)}", job=job.id, rows=job.counts.rows)
        if "shadow" in left:
            self._shadow(checked)
        elif state.shadow == plan.model:
            report.begin("shadow")
            self._tell_figures()
        if "flip" in left and job is not None:
            self._flip(checked, job)

    # check

    def _check(self, alias: Present) -> ModelCheck:
        """Everything that can be wrong, before anything is changed."""
        plan, report = self._plan, self._report
        report.begin("check")
        widths, prints = [], []
        for name in (alias.target, plan.model):
            info = self._model(name)
            if info.alias is not None:
                raise CommandRefused(f"{name} is an alias: name the model that it stands for")
            if "dense" not in info.dims or "text" not in info.inputs:
                raise CommandRefused(
                    f"{name} does not encode texts as dense vectors (it has {', '.join(info.outputs)}): without an "
                    "index there is nothing to migrate, and `sie models alias` flips at once"
                )
            width, fingerprint = self._probed(name)
            widths.append(width)
            prints.append(fingerprint)
        old, new = widths
        report.report_step(
            f"{plan.alias} names {alias.target} ({old} wide); {plan.model} is {new} wide and answers",
            alias=plan.alias,
            old=alias.target,
            new=plan.model,
            dims=widths,
            fingerprints=prints,
        )
        if prints[0] == prints[1]:
            raise CommandRefused(
                f"both have the fingerprint {prints[0]}, so the index fits: `sie models alias {plan.alias} "
                f"{plan.model}` flips at once"
            )
        if old != new:
            report.report_step("the widths differ: the new vectors need another collection than the present one")
        self._aliases.flip(alias, plan.model, dry_run=True)
        digest = asyncio.run(plan.corpus.digest()) if plan.sample or not plan.corpus.is_url else ""
        key = steps.key_of(plan.alias, plan.model, digest, {**plan.options, "source": self._named_source()})
        earlier = Earlier.load(self._client, key)
        embedding.check_output(earlier.others, plan.output, plan.model, prints[1])
        if earlier.job is None and plan.place.folder is not None:
            embedding.has_files(plan.place.folder, "")
        return ModelCheck(alias, prints[1], key, digest or key, earlier)

    def _model(self, name: str) -> _ModelFields:
        """A model or an alias, as the gateway describes it. Raises CommandRefused, and what the client raises."""
        return _described(self._client.get_model(name))

    def _probed(self, name: str) -> tuple[int, str]:
        """Width and fingerprint of a vector of this model. Raises CommandRefused, and what the client raises."""
        (result,) = self._client.encode(name, [PROBE], output_types=["dense"], on_item_error="fail")
        dense = result.get("dense")
        if dense is None or dense.ndim != 1 or not dense.size:
            raise CommandRefused(f"{name} answered without a dense vector")
        return dense.size, printable(str(result["fingerprint"]))

    def _named_source(self) -> str:
        """A file of this machine is its bytes, wherever it lies."""
        return self._plan.corpus.source if self._plan.corpus.is_url else ""

    def _has_files(self, job: Job) -> bool:
        folder = self._plan.place.folder
        return folder is None or embedding.has_files(folder, job.id)

    # quality

    def _quality(self, checked: ModelCheck) -> None:
        plan, report = self._plan, self._report
        report.begin("quality")
        if not plan.sample:
            report.report_step("not measured (--sample 0)")
            return
        sample = asyncio.run(plan.corpus.sample(plan.sample, checked.seed))
        texts = sample.texts
        if len(texts) < MIN_TEXTS:
            raise CommandRefused(
                f"a sample of the corpus has {len(texts)} different texts, at least {MIN_TEXTS} are needed"
                + (f"; {sample.trouble}" if sample.trouble else "")
            )
        if sample.trouble:
            report.report_step(sample.trouble)
        names = (checked.alias.target, plan.model)
        agreement = quality.measure(self._client, self._gateways.url, names, texts, plan.queries)
        report.report_step(f"{len(texts)} texts: {agreement.line()}", texts=len(texts), **agreement.figures())
        if agreement.overlap >= plan.min_agreement:
            return
        below = f"an agreement of {agreement.overlap:.3f} is below --min-agreement {plan.min_agreement:g}"
        if not plan.accepts:
            raise CommandRefused(
                f"{below}; nothing was changed. A search over the new index gives other results: --yes goes on, and so "
                f"does a lower bound, such as --min-agreement {int(agreement.overlap * 100) / 100:g}"
            )
        report.report_step(f"{below}, accepted by --yes")

    # embed

    def _embed(self, checked: ModelCheck) -> Job:
        plan, report = self._plan, self._report
        report.begin("embed")
        job = checked.earlier.job
        if job is None:
            with display.transfers() as bars:
                on_upload = transfer_bar(bars, Path(plan.corpus.source).name)
                options = {**plan.options, "on_upload": on_upload, "name": f"{plan.alias} to {plan.model}"[:128]}
                job = checked.earlier.submitted(self._client, checked.key, plan.model, plan.corpus.source, options)
            report.report_step(f"submitted {job.id}", job=job.id)
        else:
            report.report_step(f"goes on with {job.id}", job=job.id)
        follow(job, err=self._err, also="the same `sie migrate` goes on with it")
        info = job.info
        report.report_step(f"{job.id} is {info.state}, {rows_text(info)}", state=info.state, rows=info.counts.rows)
        if info.state == "paused" and info.error is not None:
            raise CommandRefused(
                f"{job.id} is paused by {problem_text(info.error)}\nmend it, then `sie jobs resume {job.id}` and the "
                f"same command go on; after `sie jobs cancel {job.id}` the same command submits another one"
            )
        if info.state != "completed":
            why = f": {problem_text(info.error)}" if info.error is not None else ""
            raise CommandRefused(f"{job.id} ended as {info.state}{why}; the same command submits another job")
        if plan.place.folder is not None:
            fetch_output(job, plan.place.folder)
        if not embedding.is_answered(info):
            self._unanswered(job)
        return job

    def _unanswered(self, job: Job) -> None:
        info = job.info
        errors = errors_text(info) or "parts that could not be read"
        self._report.report_step(
            f"rows without a vector: {errors}", failed=info.counts.failed, broken=list(info.broken)
        )
        for line in failures_table(job.rows(FAILED_ROWS, failed=True))[1:]:
            self._report.report_step("  ".join(line))
        if not self._plan.accepts:
            raise CommandRefused(
                f"the new index would lack {info.counts.failed:,} rows; `sie jobs show {job.id} --failed` has more of "
                f"them, `sie jobs retry {job.id}` and then the same command tries them again, --yes goes on without"
            )

    # shadow

    def _shadow(self, checked: ModelCheck) -> None:
        plan, report = self._plan, self._report
        report.begin("shadow")
        alias = self._unchanged(checked)
        since_s = time.time()
        if alias.shadow == plan.model:
            since_s = shadow_since_s(alias.history)
            report.report_step(f"{plan.model} gets copies of requests already", revision=alias.revision)
        else:
            revision = self._aliases.shadow(alias, plan.model, plan.shadow.share)
            report.report_step(
                f"{plan.model} gets copies of {plan.shadow.share:.0%} of the requests for {plan.alias}, for "
                f"{plan.shadow.seconds:g} s (revision {revision})",
                revision=revision,
            )
        self._watch(since_s)
        copies = self._tell_figures()["copies"]
        if copies.get("failed") and not copies.get("done"):
            raise CommandRefused(
                f"no copy succeeded: the gateway's log says why. {plan.alias} is as it was, but for the shadow, which "
                f"`sie models alias {plan.alias} {alias.target}` removes"
            )

    def _watch(self, since_s: float) -> None:
        """Watch the shadow until the time is over, or there were enough copies."""
        expected = self._plan.shadow
        while (left_s := since_s + expected.seconds - time.time()) > 0:
            if expected.copies is not None and self._measured()["copies"].get("done", 0) >= expected.copies:
                return
            time.sleep(min(LOOK_S, left_s))

    def _tell_figures(self) -> dict[str, Any]:
        figures = self._measured()
        self._report.report_step(shadow_line(figures), **figures)
        return figures

    def _measured(self) -> dict[str, Any]:
        return merged([self._figures(gateway) for gateway in self._gateways.every])

    def _figures(self, client: SIEClient) -> dict[str, Any]:
        """Empty of a gateway that has not heard of the shadow yet."""
        alias = _described(client.get_model(self._plan.alias)).alias
        shadow = alias.shadow if alias is not None else None
        return msgspec.to_builtins(shadow.figures) if shadow is not None and shadow.model == self._plan.model else {}

    # flip

    def _flip(self, checked: ModelCheck, job: Job) -> None:
        plan, report = self._plan, self._report
        report.begin("flip")
        alias = self._unchanged(checked)
        _, fingerprint = self._probed(plan.model)
        if job.info.fingerprint and fingerprint != job.info.fingerprint:
            raise CommandRefused(
                f"{plan.model} has changed since {job.id} ran: its vectors do not fit the new index. Pin its revision "
                f"({plan.model}@REVISION) and migrate again"
            )
        revision = self._aliases.flip(alias, plan.model)
        end_s = time.monotonic() + FOLLOW_S
        while (waiting := self._aliases.waiting(plan.alias)) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        where = f"; not yet at {', '.join(waiting)}" if waiting else ""
        report.report_step(
            f"{plan.alias} names {plan.model} since revision {revision}, before {alias.target}{where}",
            revision=revision,
            before=alias.target,
        )

    def _unchanged(self, checked: ModelCheck) -> Present:
        """The alias as it is now. Raises CommandRefused if somebody gave it another target meanwhile."""
        alias = self._aliases.read(self._plan.alias)
        if alias.target != checked.alias.target:
            raise CommandRefused(
                f"{alias.name} names {alias.target} now: somebody changed it meanwhile, so it is left alone"
            )
        return alias


def _described(info: dict[str, Any]) -> _ModelFields:
    """Convert the description of a model or an alias. Raises CommandRefused for one of another form."""
    try:
        return msgspec.convert(info, _ModelFields)
    except msgspec.ValidationError as error:
        raise CommandRefused(
            f"the gateway describes a model in a form that this version does not know: {error}"
        ) from error


def merged(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the measurements of a shadow by several gateways: counts are added, means are weighted by the copies."""
    copies = Counter[str]()
    for measured in figures:
        copies.update(measured.get("copies", {}))
    means: dict[str, Any] = {"copies": dict(copies)}
    for name in ("cosine", "rank", "served_ms", "shadow_ms"):
        weighted = [
            (figure[name], figure["copies"].get("done", 0)) for figure in figures if figure.get(name) is not None
        ]
        weight = sum(count for _, count in weighted)
        means[name] = sum(value * count for value, count in weighted) / weight if weight else None
    return means


def shadow_line(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    copies = figures["copies"]
    if not copies:
        return "no request came for the shadow: its behaviour under traffic is not known"
    parts = [", ".join(f"{count:,} {name}" for name, count in sorted(copies.items()))]
    if figures["cosine"] is not None:
        parts.append(f"mean cosine {figures['cosine']:.4f}")
    if figures["served_ms"] is not None:
        parts.append(f"{figures['served_ms']:.0f} ms served, {figures['shadow_ms']:.0f} ms shadow")
    return "copies: " + "; ".join(parts)


def back(aliases: Aliases, name: str, echo: Callable[[str], None]) -> dict[str, Any]:
    """Undo the last change of an alias' target. Raises CommandRefused."""
    alias = aliases.read(name)
    previous = before_flip(alias.history)
    revision = aliases.back(alias, previous)
    restored = aliases.read(name)
    echo(f"{name} names {restored.target} again: revision {revision} is as revision {previous} was")
    if restored.target != alias.target:
        echo(f"searches have to use the index of {restored.target} again")
    return {"alias": name, "names": restored.target, "revision": revision, "restored": previous}
