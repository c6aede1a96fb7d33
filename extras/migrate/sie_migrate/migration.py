"""Migration of an alias to another model, in steps. A repeated command skips the steps that are already done.

MigrationPlan ──► check ──► quality ──► embed ──► shadow ──► flip ──► report

The steps before `shadow` do not change the alias. The config service refuses a write if another user has changed the
alias since this command read the alias.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from sie_bulk_jobs.command.job import (
    OutputPlace,
    errors_text,
    failures_table,
    fetch_output,
    follow,
    problem_text,
    rows_text,
    transfer_bar,
)
from sie_cli import display
from sie_cli.display import printable
from sie_cli.gateway_client import described
from sie_cli.models.service import ConfigServiceClient, WriteOptions, path_of
from sie_cli.refusal import CommandRefused
from sie_client import Job, SIEClient
from sie_client.jobs import JobInfo
from sie_contracts.api.jobs import JobManifest
from sie_contracts.errors import UNDECODABLE
from sie_contracts.models.entries import VECTORS
from sie_migrate import quality
from sie_migrate.compare import MIN_TEXTS
from sie_migrate.corpus import Corpus
from sie_migrate.quality import QuerySet

PROBE = "A text that shows whether the model answers."
LOOK_S = 0.5  # seconds between two polls of the shadow model's measurements or of the gateways' revisions
FOLLOW_S = 10.0  # longest wait for all gateways to use a new revision of the alias
FAILED_ROWS = 5  # largest number of failed rows of a job that the step "embed" prints
_Number = Annotated[int, Meta(ge=0)]
_Moment = Annotated[datetime, Meta(tz=True)]


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
class MigrationPlan:
    """User's request for a migration. Before the flip, the gateway sends copies of a share of the alias's requests to
    the new model (the shadow) for `shadow_s` seconds, or until the new model has encoded `shadow_copies` copies.
    `accepts`: True to continue despite low agreement or rows that the job could not encode.
    """

    alias: str
    model: str
    corpus: Corpus
    place: OutputPlace
    sink: dict[str, str]
    sample: int
    min_agreement: float
    queries: QuerySet
    shadow_share: float
    shadow_s: float
    shadow_copies: int | None
    accepts: bool
    until: Step

    @property
    def output(self) -> dict[str, str]:
        """Return the destination of the vectors, as the field `output` of a job."""
        return {**({"url": self.place.url} if self.place.url else {}), **self.sink}

    @property
    def options(self) -> dict[str, Any]:
        how = self.corpus.input
        columns = {"text": how.text, "id": how.id, "input_format": how.format, "output": self.output}
        return {name: value for name, value in columns.items() if value}


@dataclass(frozen=True)
class ModelCheck:
    """Result of the step "check". `key`: id of this migration. `seed`: seed of the random sample of the corpus."""

    alias: Present
    key: str
    seed: str
    earlier: Earlier


@dataclass
class MigrationReport:
    """Report of the completed steps. `facts`: results by step, for --json. `say`: prints a line of text."""

    say: Callable[[str], None]
    steps: Sequence[str] = field(default_factory=lambda: STEPS)
    facts: dict[str, Any] = field(default_factory=dict)
    step: str = "check"

    def begin(self, step: str) -> None:
        self.step = step

    def report_step(self, text: str, **facts: Any) -> None:
        self.facts.setdefault(self.step, {}).update(facts)
        self.say(f"{self.steps.index(self.step) + 1}/{len(self.steps)} {self.step}: {printable(text)}")


@dataclass
class Migration:
    """Run of a migration. `_clients`: one client for each gateway, first the client of the gateway at `_url`. `_err`:
    True to print progress to standard error.
    """

    _clients: Sequence[SIEClient]
    _url: str
    _aliases: Aliases
    _plan: MigrationPlan
    _report: MigrationReport
    _err: bool

    @property
    def _client(self) -> SIEClient:
        return self._clients[0]

    def run(self) -> None:
        """Run the remaining steps up to the step `plan.until`. Raises CommandRefused and SIEError."""
        plan, report = self._plan, self._report
        alias = self._aliases.read(plan.alias)
        if alias.target == plan.model:
            report.begin("flip")
            report.report_step(f"{plan.alias} names {plan.model} already", revision=alias.revision)
            return
        checked = self._check(alias)
        job, folder = checked.earlier.job, plan.place.folder
        state = MigrationState(
            alias.shadow,
            max(0.0, time.time() - shadow_since_s(alias.history)) if alias.shadow else 0.0,
            job is not None,
            job is not None and is_answered(job.info) and (folder is None or has_files(folder, job.id)),
        )
        left = remaining_steps(state, plan.model, plan.until, plan.shadow_s)
        if "quality" in left:
            self._quality(checked)
        elif job is not None:
            report.begin("quality")
            report.report_step(f"the quality was accepted when {job.id} was submitted", job=job.id)
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

    # ---- step check

    def _check(self, alias: Present) -> ModelCheck:
        plan, report = self._plan, self._report
        report.begin("check")
        widths, prints = [], []
        for name in (alias.target, plan.model):
            check_encoder(self._client, name)
            width, fingerprint = probe(self._client, name)
            widths.append(width)
            prints.append(fingerprint)
        old, new = widths
        report.report_step(
            f"{plan.alias} names {alias.target} (width {old}); {plan.model} answers, with vectors of width {new}",
            alias=plan.alias,
            old=alias.target,
            new=plan.model,
            dims=widths,
            fingerprints=prints,
        )
        if prints[0] == prints[1]:
            raise CommandRefused(
                f"both models have the fingerprint {prints[0]}, so the index stays valid: instead of a migration, run "
                f"`sie models alias {plan.alias} {plan.model}`"
            )
        if old != new:
            report.report_step("the widths differ: the new vectors need another collection than the present one")
        self._aliases.flip(alias, plan.model, dry_run=True)
        digest = asyncio.run(plan.corpus.digest()) if plan.sample or not plan.corpus.is_url else ""
        # For a local file, the key contains the digest of the file but not its path, so that a user may move the file
        # between two commands.
        source = plan.corpus.source if plan.corpus.is_url else ""
        key = key_of(plan.alias, plan.model, digest, {**plan.options, "source": source})
        earlier = Earlier.load(self._client, key)
        check_output(earlier.other_jobs, plan.output, plan.model, prints[1])
        if earlier.job is None and plan.place.folder is not None:
            has_files(plan.place.folder, "")
        return ModelCheck(alias, key, digest or key, earlier)

    # ---- step quality

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
        agreement = quality.measure(self._client, self._url, names, texts, plan.queries)
        report.report_step(f"{len(texts)} texts: {agreement.line()}", texts=len(texts), **agreement.figures())
        if agreement.overlap >= plan.min_agreement:
            return
        below = f"an agreement of {agreement.overlap:.3f} is below --min-agreement {plan.min_agreement:g}"
        if not plan.accepts:
            raise CommandRefused(
                f"{below}; the alias was not changed. A search over the new index returns other results. To continue, "
                f"use --yes or a lower bound, such as --min-agreement {int(agreement.overlap * 100) / 100:g}"
            )
        report.report_step(f"{below}, accepted by --yes")

    # ---- step embed

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
                f"{job.id} is paused by {problem_text(info.error)}\nremove the cause, then run `sie jobs resume "
                f"{job.id}` and the same command. To start over, run `sie jobs cancel {job.id}` and then the same "
                "command"
            )
        if info.state != "completed":
            why = f": {problem_text(info.error)}" if info.error is not None else ""
            raise CommandRefused(
                f"{job.id} ended as {info.state}{why}; run the same command again to submit another job"
            )
        if plan.place.folder is not None:
            fetch_output(job, plan.place.folder)
        if not is_answered(info):
            self._unanswered(job)
        return job

    def _unanswered(self, job: Job) -> None:
        info = job.info
        errors = errors_text(info) or "the job could not read parts of the corpus"
        self._report.report_step(
            f"rows without a vector: {errors}", failed=info.counts.failed, broken=list(info.broken)
        )
        for line in failures_table(job.rows(FAILED_ROWS, failed=True))[1:]:
            self._report.report_step("  ".join(line))
        if not self._plan.accepts:
            raise CommandRefused(
                f"{info.counts.failed:,} rows would be missing in the new index. `sie jobs show {job.id} --failed` "
                f"lists more of them. To try them again, run `sie jobs retry {job.id}` and then the same command. To "
                "continue without them, use --yes"
            )

    # ---- step shadow

    def _shadow(self, checked: ModelCheck) -> None:
        plan, report = self._plan, self._report
        report.begin("shadow")
        alias = self._aliases.read_again(checked.alias)
        since_s = time.time()
        if alias.shadow == plan.model:
            since_s = shadow_since_s(alias.history)
            report.report_step(f"{plan.model} gets copies of requests already", revision=alias.revision)
        else:
            revision = self._aliases.shadow(alias, plan.model, plan.shadow_share)
            report.report_step(
                f"{plan.model} gets copies of {plan.shadow_share:.0%} of the requests for {plan.alias}, for "
                f"{plan.shadow_s:g} s (revision {revision})",
                revision=revision,
            )
        while (left_s := since_s + plan.shadow_s - time.time()) > 0:
            if plan.shadow_copies is not None and self._measured()["copies"].get("done", 0) >= plan.shadow_copies:
                break
            time.sleep(min(LOOK_S, left_s))
        copies = self._tell_figures()["copies"]
        if copies.get("failed") and not copies.get("done"):
            raise CommandRefused(
                f"no copy succeeded: the gateway's log has the reason. {plan.alias} is unchanged except for the "
                f"shadow, which `sie models alias {plan.alias} {alias.target}` removes"
            )

    def _tell_figures(self) -> dict[str, Any]:
        figures = self._measured()
        self._report.report_step(shadow_line(figures), **figures)
        return figures

    def _measured(self) -> dict[str, Any]:
        aliases = [described(client.get_model(self._plan.alias), _ModelFields).alias for client in self._clients]
        shadows = [alias.shadow for alias in aliases if alias is not None and alias.shadow is not None]
        return merged([msgspec.to_builtins(own.figures) for own in shadows if own.model == self._plan.model])

    # ---- step flip

    def _flip(self, checked: ModelCheck, job: Job) -> None:
        plan, report = self._plan, self._report
        report.begin("flip")
        alias = self._aliases.read_again(checked.alias)
        _, fingerprint = probe(self._client, plan.model)
        if job.info.fingerprint and fingerprint != job.info.fingerprint:
            raise CommandRefused(
                f"{plan.model} has changed since {job.id} ran: its vectors do not fit the new index. Pin its revision "
                f"({plan.model}@REVISION) and migrate again"
            )
        self._aliases.move(alias, plan.model, report)


def check_encoder(client: SIEClient, name: str) -> None:
    """Raise CommandRefused if a model does not encode texts as dense vectors. Raises SIEError."""
    if "dense" not in (widths := vector_widths(client, name)):
        raise CommandRefused(
            f"{name} does not encode texts as dense vectors (it has {', '.join(widths)}): a migration needs vectors "
            "for an index. `sie models alias` changes the alias without a migration"
        )


def vector_widths(client: SIEClient, name: str) -> dict[str, int]:
    """Return output name -> width of the vectors that a model makes of texts. Raises CommandRefused, SIEError."""
    info = described(client.get_model(name), _ModelFields)
    if info.alias is not None:
        raise CommandRefused(f"{name} is an alias: name a model instead (`sie models show {name}` shows its models)")
    widths = {output: info.dims[output] for output in VECTORS if output in info.dims}
    if not widths or "text" not in info.inputs:
        raise CommandRefused(
            f"{name} does not encode texts as vectors (it has {', '.join(info.outputs)}): a migration needs vectors "
            "for an index. `sie models alias` changes the alias without a migration"
        )
    return widths


def probe(client: SIEClient, name: str, output: str = "dense") -> tuple[int, str]:
    """Encode a test text. Return the width of its dense vector (0 for another output) and the model's fingerprint.
    Raises CommandRefused, SIEError.
    """
    (result,) = client.encode(name, [PROBE], output_types=[output], on_item_error="fail")
    if output != "dense":
        return 0, printable(str(result["fingerprint"]))
    dense = result.get("dense")
    if dense is None or dense.ndim != 1 or not dense.size:
        raise CommandRefused(
            f"{name} returned no dense vector, which a migration needs: name a model that encodes texts"
        )
    return dense.size, printable(str(result["fingerprint"]))


def merged(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the measurements of gateways: add the counts, and weight the means by the number of encoded copies."""
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
    """Return the merged measurements of the shadow as one line of text."""
    copies = figures["copies"]
    if not copies:
        return "no request came for the shadow: its behaviour under traffic is not known"
    parts = [", ".join(f"{count:,} {name}" for name, count in sorted(copies.items()))]
    if figures["cosine"] is not None:
        parts.append(f"mean cosine {figures['cosine']:.4f}")
    times = {name: figures[f"{name}_ms"] for name in ("served", "shadow")}
    if shown := [f"{time_ms:.0f} ms {name}" for name, time_ms in times.items() if time_ms is not None]:
        parts.append(", ".join(shown))
    return "copies: " + "; ".join(parts)


def back(aliases: Aliases, alias: Present, echo: Callable[[str], None]) -> dict[str, Any]:
    """Restore the target that the alias had before its last flip. Return the target and the revisions for --json.
    Raises CommandRefused.
    """
    name, previous = alias.name, before_flip(alias.history)
    revision = aliases.back(alias, previous)
    restored = aliases.read(name)
    echo(printable(f"{name} names {restored.target} again: revision {revision} repeats revision {previous}"))
    if restored.target != alias.target:
        echo(printable(f"searches have to use the index of {restored.target} again"))
    return {"alias": name, "names": restored.target, "revision": revision, "restored": previous}


Step = Literal["check", "quality", "embed", "shadow", "flip"]
STEPS: tuple[Step, ...] = ("check", "quality", "embed", "shadow", "flip")


@dataclass(frozen=True)
class MigrationState:
    """State of a migration in the cluster. `shadow`: the alias's shadow model, or empty. `shadow_s`: seconds since the
    shadow was set. `is_submitted`: the job over the corpus exists. `is_embedded`: this job encoded every row, and the
    output folder (if the user named a folder) has the job's files.
    """

    shadow: str = ""
    shadow_s: float = 0.0
    is_submitted: bool = False
    is_embedded: bool = False


def remaining_steps(state: MigrationState, model: str, until: Step, shadow_s: float) -> tuple[Step, ...]:
    """Return the remaining steps in order. `check` always remains, because an earlier check may be outdated."""
    done: set[Step] = set()
    if state.is_submitted:
        done.add("quality")
    if state.is_embedded:
        done.add("embed")
    if shadow_s <= 0 or (state.is_embedded and state.shadow == model and state.shadow_s >= shadow_s):
        done.add("shadow")
    return tuple(step for step in STEPS[: STEPS.index(until) + 1] if step not in done)


def key_of(alias: str, model: str, digest: str, request: dict[str, Any]) -> str:
    """Return the key of a migration: a digest of its arguments."""
    parts = msgspec.json.encode([alias, model, digest, request], order="sorted")
    return hashlib.sha256(parts).hexdigest()[:32]


KEY = "migration"  # name in the job's metadata; the value is the key of the migration
LOST = ("failed", "cancelled", "expired")


@dataclass(frozen=True)
class Earlier:
    """Jobs in the cluster. `jobs`: jobs of this migration, newest first. `other_jobs`: all other jobs."""

    jobs: Sequence[Job]
    other_jobs: Sequence[JobInfo]

    @classmethod
    def load(cls, client: SIEClient, key: str) -> Earlier:
        """Read all jobs, and separate those of this migration. `key`: id of the migration. Raises SIEError."""
        jobs = list(client.jobs.list())
        own = [job for job in jobs if job.info.request_map("metadata").get(KEY) == key]
        ids = {job.id for job in own}
        return cls(own, [job.info for job in jobs if job.id not in ids])

    @property
    def job(self) -> Job | None:
        """Return this migration's newest job that did not fail, did not expire and was not cancelled, or None."""
        return next((job for job in self.jobs if job.state not in LOST), None)

    def submitted(self, client: SIEClient, key: str, model: str, source: str, options: dict[str, Any]) -> Job:
        """Submit the job over the corpus. The idempotency key contains the id of this migration's newest job. Without
        this id, a repeated command would have the same key as before: the server would return the failed job and start
        no new job.
        """
        before = self.jobs[0].id if self.jobs else ""
        return client.jobs.submit(
            model, source, **options, metadata={KEY: key}, idempotency_key=f"{KEY}-{key}-{before}".rstrip("-")
        )


def is_answered(info: JobInfo) -> bool:
    """Return whether the job has ended and has encoded every row."""
    return info.state == "completed" and not info.counts.failed and not info.broken


def has_files(folder: Path, job: str) -> bool:
    """Return whether a folder has all files of a job. The manifest is the last file to be written, so check only the
    manifest. Raises CommandRefused if the folder has the files of another job.
    """
    try:
        job_id = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=JobManifest).job
    except FileNotFoundError:
        return False
    except (OSError, *UNDECODABLE) as error:
        raise CommandRefused(f"--output {folder}: its manifest.json cannot be read: name another folder") from error
    if job_id != job:
        raise CommandRefused(f"--output {folder} has the files of {printable(job_id)}: name another folder")
    return True


def check_output(jobs: Iterable[JobInfo], output: dict[str, str], model: str, fingerprint: str) -> None:
    """Raise CommandRefused if a job of another model wrote to `output`, because vectors of two models must not mix."""
    for info in jobs:
        theirs = info.request_map("output")
        is_same = (info.fingerprint or fingerprint) == fingerprint and (bool(info.fingerprint) or info.model == model)
        if is_same or (info.state in LOST and not info.counts.done):
            continue
        where = ""
        if output.get("sink") and all(theirs.get(name) == output.get(name) for name in ("sink", "collection")):
            where = f"the collection {output['collection']} of {output['sink']}"
        elif output.get("url") and str(theirs.get("url", "")).rstrip("/") == output["url"].rstrip("/"):
            where = output["url"]
        if where:
            raise CommandRefused(
                f"{where} has vectors of {printable(info.model)}, written by {info.id}: choose a new destination "
                "for the new vectors, and let searches use it after the flip"
            )


_TARGETS, _SHADOW = re.compile(r"\$\.alias\b"), re.compile(r"\$\.shadow\b")


class AliasChange(Struct, frozen=True):
    """Change of one field of an alias in a revision. `before`: the field's value in the previous revision."""

    path: str
    before: Any = None


class AliasRevision(Struct, frozen=True):
    """Revision of an alias, as listed by the config service."""

    revision: _Number
    created_at: _Moment
    operation: str = ""
    changes: tuple[AliasChange, ...] = ()


class _TargetFields(Struct, frozen=True):
    model: str


class _AliasFields(Struct, frozen=True):
    """Document of a model or an alias. `alias`: targets of the alias, or None for a model."""

    alias: tuple[_TargetFields | str, ...] | None = None
    shadow: _TargetFields | str | None = None


class _RevisionList(Struct, frozen=True):
    revisions: Annotated[tuple[AliasRevision, ...], Meta(min_length=1)]


class _GatewayAck(Struct, frozen=True):
    id: str
    acked: bool


class _AckList(Struct, frozen=True):
    gateways: tuple[_GatewayAck, ...] = ()


class _WrittenRevision(Struct, frozen=True):
    revision: _Number


@dataclass(frozen=True)
class Present:
    """Current state of an alias with exactly one target. `history`: revisions of the alias, newest first."""

    name: str
    target: str
    shadow: str
    revision: int
    history: Sequence[AliasRevision]


class Aliases:
    """Client of the config service for aliases. `write`: options for the writes."""

    def __init__(self, service: ConfigServiceClient, write: WriteOptions) -> None:
        self._service = service
        self._write = write

    def read(self, name: str) -> Present:
        """Read an alias. Raises CommandRefused for a model, or for an alias of several models."""
        # Read the history before the document: if the alias changes between the two reads, the revision from the
        # history is outdated, and the config service refuses a write based on this revision.
        history = self._service.read(path_of(name, "/history"), _RevisionList).body.revisions
        document: _AliasFields = self._service.read(path_of(name), _AliasFields).body
        if document.alias is None:
            raise CommandRefused(
                f"{name} is a model: clients have to ask for an alias. Create one with `sie models alias NAME {name}`"
            )
        targets = [_model_of(target) for target in document.alias]
        if len(targets) != 1:
            raise CommandRefused(
                f"{name} has {len(targets)} models: a migration needs an alias of one model; `sie models alias "
                f"{name} MODEL` sets it"
            )
        shadow = _model_of(document.shadow) if document.shadow is not None else ""
        return Present(name, targets[0], shadow, history[0].revision, history)

    def read_again(self, alias: Present) -> Present:
        """Read an alias again. Raises CommandRefused if the target of the alias has changed since the first read."""
        present = self.read(alias.name)
        if present.target != alias.target:
            raise CommandRefused(
                f"{alias.name} names {present.target} now: another user has changed the alias, so this command does "
                "not change it"
            )
        return present

    def shadow(self, alias: Present, model: str, share: float) -> int:
        """Set the shadow model: gateways send copies of `share` (0 to 1) of the requests to this model. Return the
        revision. Raises CommandRefused.
        """
        return self._written(alias, "PATCH", "", {"shadow": {"model": model, "share": share}})

    def flip(self, alias: Present, model: str, *, dry_run: bool = False) -> int:
        """Make a model the only target of an alias. Remove the shadow. Return the revision. Raises CommandRefused."""
        return self._written(alias, "PATCH", "", {"alias": [{"model": model}], "shadow": None}, dry_run=dry_run)

    def move(self, alias: Present, model: str, report: MigrationReport) -> None:
        """Flip the alias, wait until every gateway uses the new target, and report the flip. Raises CommandRefused."""
        revision = self.flip(alias, model)
        waiting = self.wait_for_gateways(alias.name)
        where = f"; gateways without this revision: {', '.join(waiting)}" if waiting else ""
        report.report_step(
            f"{alias.name} names {model} since revision {revision}, and named {alias.target} before{where}",
            revision=revision,
            before=alias.target,
        )

    def back(self, alias: Present, revision: int, *, dry_run: bool = False) -> int:
        """Write an earlier revision of the alias as its newest. Return the new revision. Raises CommandRefused."""
        return self._written(alias, "POST", "/rollback", {"revision": revision}, dry_run=dry_run)

    def _written(self, alias: Present, method: str, suffix: str, body: dict[str, Any], *, dry_run: bool = False) -> int:
        """Write a change and return the new revision. Raises CommandRefused, for example if `alias` is outdated."""
        how = dataclasses.replace(self._write, if_match=alias.revision, dry_run=dry_run)
        path, data = path_of(alias.name, suffix), msgspec.json.encode(body)
        written: _WrittenRevision = self._service.write(method, path, data, how=how, body_type=_WrittenRevision).body
        return written.revision

    def wait_for_gateways(self, name: str) -> list[str]:
        """Wait at most FOLLOW_S until every gateway has the newest revision. Return the ids of the gateways without
        this revision. Raises CommandRefused.
        """
        end_s = time.monotonic() + FOLLOW_S
        while True:
            status: _AckList = self._service.read(path_of(name, "/status"), _AckList).body
            waiting = [gateway.id for gateway in status.gateways if not gateway.acked]
            if not waiting or time.monotonic() >= end_s:
                return waiting
            time.sleep(LOOK_S)


def _model_of(target: _TargetFields | str) -> str:
    return target if isinstance(target, str) else target.model


def _touches(revision: AliasRevision, pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(change.path) for change in revision.changes)


def shadow_since_s(history: Sequence[AliasRevision]) -> float:
    """Return the Unix time (s) of the last revision that changed the shadow. If no stored revision changed the shadow,
    return the time of the oldest stored revision.
    """
    start = next((revision for revision in history if _touches(revision, _SHADOW)), history[-1])
    return start.created_at.timestamp()


def former_target(history: Sequence[AliasRevision]) -> str:
    """Return the alias's target before the last change of its target. Raises CommandRefused if unknown."""
    if (model := last_former_target(history)) is None:
        raise CommandRefused("the history of the alias does not say which model it named before")
    return model


def last_former_target(history: Sequence[AliasRevision]) -> str | None:
    """Return the alias's target before the last change of its target, or None if the history does not contain it."""
    for change in (change for revision in history for change in revision.changes):
        if _TARGETS.match(change.path):
            target = change.before[0] if isinstance(change.before, list) and change.before else change.before
            model = target.get("model") if isinstance(target, dict) else target
            if isinstance(model, str):
                return model
    return None


def before_flip(history: Sequence[AliasRevision]) -> int:
    """Return the revision to restore in order to undo the last change of the target. Skip revisions that changed only
    the shadow. Raises CommandRefused if the target was never changed, if its last change was a rollback, or if no
    revision before this change is stored.
    """
    flips = [place for place, revision in enumerate(history) if _touches(revision, _TARGETS)]
    if not flips:
        raise CommandRefused("the alias has always had its current target: there is no earlier target to go back to")
    flip = history[flips[0]]
    if flip.operation == "rollback":
        raise CommandRefused(
            f"revision {flip.revision} is already a rollback; `sie models history` lists the stored revisions, and "
            "`sie models rollback` restores any of them"
        )
    before = history[flips[0] + 1 :]
    if not before:
        raise CommandRefused(
            "the revisions before the alias's current target are no longer stored: set the target with `sie models "
            "alias`"
        )
    own = (revision for revision in before if _touches(revision, _TARGETS) or not _touches(revision, _SHADOW))
    return next(own, before[-1]).revision
