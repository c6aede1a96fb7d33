"""Migration of a live collection. The database has the texts, the vectors of both models, and the progress.

check ──► embed ──► quality ──► flip (database, then alias) ──► embed the rows that were written during the flip
                                 └──► back (undo the flip), clean-up (remove the vectors that are not in use)

A scan embeds the rows that have no vector of their present text. Clients may write rows during a scan, so the command
repeats the scan until a scan embeds only few rows. A side (`old` or `new`) is one of the two models with its vectors.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sie_bulk_jobs.datasets.templates import ColumnFault, Template
from sie_bulk_jobs.sinks.live import SIDES, LiveCollection, LiveRow, LiveSource, LiveState, Side, Vector, opposite
from sie_bulk_jobs.sinks.opening import opened_live
from sie_bulk_jobs.sinks.sink import PATIENCE, Output, SparseRow
from sie_cli.display import counted, printable
from sie_cli.refusal import CommandRefused
from sie_client import SIEAsyncClient, SIEClient
from sie_contracts.settings import SettingError
from sie_migrate.migration import (
    Aliases,
    MigrationReport,
    Present,
    back,
    before_flip,
    former_target,
    last_former_target,
    probe,
    vector_widths,
)
from sie_store.object_stores import RetryPolicy, StoreError

LiveUntil = Literal["check", "embed", "flip", "back", "clean-up"]
LIVE_STEPS = ("check", "embed", "quality", "flip")
SINKS = "SIE_JOBS_SINKS"
IMPATIENCE = RetryPolicy(stall_s=30.0, tries=2)  # for the first connection: few attempts, because the URL may be wrong
# Number of rows per encode request and per write to the database. If a user restarts a killed command, the command
# encodes at most this number of rows again. 32 multivectors of 512 tokens with 1,024 numbers are 64 MiB.
EMBED_ROWS: dict[Output, int] = {"dense": 1_000, "sparse": 1_000, "multivector": 32}
NEIGHBOURS = 10
SEARCHES = 8  # largest number of concurrent searches in the database
# `catch_up` repeats its scan until a scan embeds at most 100 rows, or at most 0.1 % of all rows if these are more
FEW_ROWS, FEW_SHARE = 100, 0.001
MAX_SCANS = 20
GAP_IDS, GAP_ID_CHARS = 20, 100  # a report lists at most 20 ids of rows without a vector, each cut to 100 characters
PROGRESS_S = 10.0
# seconds that `settle` waits after the switch, because clients may still write vectors that they computed before it
DRAIN_S = 5.0


@dataclass(frozen=True)
class LivePlan:
    """User's request to migrate a live collection. `sink`, `url`: name and URL of the database. `accepts`: True to
    continue despite low agreement or rows without a vector.
    """

    alias: str
    model: str
    sink: str
    url: str = field(repr=False)
    collection: str
    text: Template
    vector: str
    id_column: str
    sample: int
    min_agreement: float
    queries: Sequence[str]
    accepts: bool
    until: LiveUntil


@dataclass(frozen=True)
class LiveModel:
    """Old or new model of the migration, with its fingerprint. `widths`: output name -> width of the vectors."""

    name: str
    widths: Mapping[str, int]
    fingerprint: str

    def dims(self, output: str) -> int:
        """Return the width of an output. Raises CommandRefused if the model does not have this output."""
        if output not in self.widths:
            raise CommandRefused(
                f"{self.name} makes no {output} vectors, which the index has. The model makes {', '.join(self.widths)}"
            )
        return self.widths[output]


@dataclass
class Scan:
    """Result of a scan. `scanned`: rows that were read. `embedded`: rows that got a vector. `gaps`: reason -> number of
    rows that could not get a vector. `gap_ids`: ids of the first GAP_IDS of these rows.
    """

    scanned: int = 0
    embedded: int = 0
    gaps: Counter[str] = field(default_factory=Counter)
    gap_ids: list[str] = field(default_factory=list)

    def add_gap(self, row_id: str, reason: str) -> None:
        self.gaps[reason] += 1
        if len(self.gap_ids) < GAP_IDS:
            self.gap_ids.append(printable(row_id[:GAP_ID_CHARS]))

    def add_embedded(self, count: int) -> None:
        self.embedded += count

    @property
    def gaps_text(self) -> str:
        """Text with the number of rows without a vector by reason, and the first GAP_IDS ids of these rows."""
        reasons = "; ".join(f"{counted(count, 'row')}: {reason}" for reason, count in self.gaps.most_common())
        more = ", …" if self.gaps.total() > len(self.gap_ids) else ""
        return f"{reasons} (ids {', '.join(self.gap_ids)}{more})"


class ScanProgress:
    """Printer of the progress of a scan. It prints a line at most every PROGRESS_S."""

    def __init__(self, total: int, echo: Callable[[str], None]) -> None:
        self._total = total
        self._echo = echo
        self._start_s = self._last_s = time.monotonic()

    def show(self, scan: Scan) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < PROGRESS_S:
            return
        self._last_s = now_s
        self._echo(progress_line(scan, self._total, now_s - self._start_s))


def progress_line(scan: Scan, total: int, elapsed_s: float) -> str:
    """Return a line of text with the rows of a scan, its rows per second, and the remaining minutes and seconds."""
    rate = scan.scanned / elapsed_s if elapsed_s else 0.0
    left_s = max(0, total - scan.scanned) / rate if rate else 0.0
    return (
        f"  {scan.scanned:,} of {total:,} rows, {scan.embedded:,} embedded, {rate:,.0f} rows/s, "
        f"{int(left_s // 60)}:{int(left_s % 60):02} left"
    )


@dataclass
class LiveMigration:
    """Migration of a live collection. `_encoder` opens a client for encoding rows. `_echo` prints progress."""

    _client: SIEClient
    _encoder: Callable[[], SIEAsyncClient]
    _aliases: Aliases
    _plan: LivePlan
    _report: MigrationReport
    _echo: Callable[[str], None]

    def run(self) -> None:
        """Run the remaining steps of the migration, up to `until` of the plan. Raises CommandRefused, and SIEError."""
        try:
            asyncio.run(self._run())
        except StoreError as error:
            raise CommandRefused(f"{self._plan.sink}: {error}") from None
        except SettingError as error:
            raise CommandRefused(str(error)) from None

    async def _run(self) -> None:
        plan, report = self._plan, self._report
        alias = self._aliases.read(plan.alias)
        report.begin("check")
        old = alias.target if alias.target != plan.model else former_target(alias.history)
        models = {side: self._model(name) for side, name in zip(SIDES, (old, plan.model), strict=True)}
        fingerprints = {side: model.fingerprint for side, model in models.items()}
        if fingerprints["old"] == fingerprints["new"]:
            raise CommandRefused(
                f"{old} and {plan.model} have the same fingerprint, so the index stays valid: run `sie models alias "
                f"{plan.alias} {plan.model}` instead"
            )
        source = LiveSource(plan.collection, plan.text, fingerprints, plan.vector, plan.id_column)
        async with contextlib.AsyncExitStack() as stack:
            first = opened_live(plan.url, SINKS, source, IMPATIENCE)
            stack.push_async_callback(first.close)
            await first.open()
            live = opened_live(plan.url, SINKS, source, PATIENCE)
            stack.push_async_callback(live.close)
            state = await live.open()
            if alias.target == plan.model and not state.is_begun:
                self._check_done(models, state)
                return
            model = models[state.in_use]
            dims = [models[side].dims(state.output) for side in SIDES]
            if state.dims and state.dims != model.dims(state.output):
                raise CommandRefused(
                    f"the vectors of {plan.collection} have {state.dims} dimensions, but those of {model.name} have "
                    f"{model.dims(state.output)}: is this the index of {plan.alias}, and is --vector its vector?"
                )
            report.report_step(
                f"{plan.alias} names {alias.target}; {plan.collection} of {plan.sink} has {state.rows:,} rows, and its "
                f"searches use the {state.output} vectors of {model.name} ({model.dims(state.output)} wide)",
                old=old,
                new=plan.model,
                dims=dims,
                rows=state.rows,
                in_use=state.in_use,
            )
            self._try_change(alias)
            async with self._encoder() as encoder:
                steps = _LiveSteps(encoder, live, state, models, plan, report, self._echo)
                await self._steps(steps, alias, state)

    def _check_done(self, models: Mapping[Side, LiveModel], state: LiveState) -> None:
        """Report that nothing is left to do: the alias names the new model, and no migration of the index is stored.
        Raises CommandRefused for --step back and clean-up, and if the index and the new model differ in width.
        """
        plan, old, new = self._plan, models["old"], models["new"]
        if state.dims and state.dims != new.dims(state.output):
            raise CommandRefused(
                f"{plan.alias} names {new.name}, which makes {new.dims(state.output)} dimensions, but the vectors of "
                f"{plan.collection} have {state.dims}: the alias was changed without a migration of the index. Run "
                f"`sie models alias {plan.alias} {old.name}`, then the same command"
            )
        if plan.until in ("back", "clean-up"):
            raise CommandRefused(
                f"{plan.collection} has no vectors of {old.name}: they were removed, or never migrated. A migration to "
                f"{old.name} writes them"
            )
        self._report.report_step(f"{plan.alias} names {plan.model} already, and no migration of {plan.collection} runs")

    def _model(self, name: str) -> LiveModel:
        widths = vector_widths(self._client, name)
        first = next(iter(widths))
        width, fingerprint = probe(self._client, name, first)
        return LiveModel(name, widths | ({first: width} if width else {}), fingerprint)

    async def _steps(self, steps: _LiveSteps, alias: Present, state: LiveState) -> None:
        plan = self._plan
        if plan.until == "back":
            await self._back(steps, alias, state)
        elif plan.until == "clean-up":
            await self._clean_up(steps, alias, state)
        elif plan.until != "check":
            if state.in_use == "old":
                await steps.embed()
                await steps.compare()
            if plan.until == "flip":
                await self._flip(steps, alias, state)

    def _try_change(self, alias: Present) -> None:
        """Send the change of the alias to the config service as a dry run. Raises CommandRefused if that fails."""
        plan = self._plan
        if plan.until == "back" and alias.target == plan.model:
            self._aliases.back(alias, before_flip(alias.history), dry_run=True)
        elif plan.until not in ("back", "clean-up") and alias.target != plan.model:
            self._aliases.flip(alias, plan.model, dry_run=True)

    async def _switch(self, steps: _LiveSteps, alias: Present, state: LiveState, side: Side) -> Present:
        """Let searches use the vectors of the old or the new model (`side`). Return the current alias. Raises
        CommandRefused before the switch if `catch_up` fails or the config service would refuse to change the alias.
        """
        if state.in_use != side:
            await steps.catch_up(side, is_last=True)
        alias = self._aliases.read_again(alias)
        self._try_change(alias)
        if state.in_use != side:
            await steps.switch(side)
        return alias

    @contextlib.contextmanager
    def _alias_follows(self, model: str) -> Iterator[None]:
        """If the change of the alias fails, add to its error that searches already use the vectors of `model`."""
        plan = self._plan
        try:
            yield
        except CommandRefused as refused:
            raise CommandRefused(
                f"{refused}\nsearches of {plan.collection} already use the vectors of {model}: run the same command "
                f"again at once, so that {plan.alias} also names {model}"
            ) from refused

    async def _flip(self, steps: _LiveSteps, alias: Present, state: LiveState) -> None:
        plan, report = self._plan, self._report
        report.begin("flip")
        alias = await self._switch(steps, alias, state, "new")
        if alias.target != plan.model:
            with self._alias_follows(plan.model):
                self._aliases.move(alias, plan.model, report)
        await steps.settle("new")

    async def _back(self, steps: _LiveSteps, alias: Present, state: LiveState) -> None:
        plan, report = self._plan, self._report
        report.begin("flip")
        is_back = state.in_use == "old" and alias.target != plan.model
        # If the last change of the alias replaced the new model by the old one, an earlier `--step back` may have been
        # killed after this change and before its last scans. So this command then repeats the scans.
        if is_back and not (state.is_begun and last_former_target(alias.history) == plan.model):
            raise CommandRefused(
                f"{plan.alias} names {alias.target} and {plan.collection} uses the vectors of that model: there is "
                "nothing to go back from"
            )
        alias = await self._switch(steps, alias, state, "old")
        if alias.target == plan.model:
            with self._alias_follows(former_target(alias.history)):
                report.facts["back"] = back(self._aliases, alias, self._echo)
            self._aliases.wait_for_gateways(plan.alias)
        if state.is_begun:
            await steps.settle("old")

    async def _clean_up(self, steps: _LiveSteps, alias: Present, state: LiveState) -> None:
        plan, report = self._plan, self._report
        report.begin("flip")
        if (alias.target == plan.model) != (state.in_use == "new"):
            raise CommandRefused(
                f"the alias and the collection use different models: {plan.alias} names {alias.target}. Run the "
                "same command with --step flip or --step back first"
            )
        await steps.clean_up()


@dataclass
class _LiveSteps:
    """Steps of a migration of the live collection `_live`. `_models`: the models of the sides "old" and "new"."""

    _encoder: SIEAsyncClient
    _live: LiveCollection
    _state: LiveState
    _models: Mapping[Side, LiveModel]
    _plan: LivePlan
    _report: MigrationReport
    _echo: Callable[[str], None]

    async def embed(self) -> None:
        """Write the vectors of the new model beside the present vectors, and build the indexes of the new vectors."""
        self._report.begin("embed")
        await self._live.begin(self._models["new"].dims(self._state.output))
        await self.catch_up("new")
        self._echo("  the database builds the indexes of the new vectors, if the old vectors have indexes")
        await self._live.build_indexes()

    async def catch_up(self, side: Side, *, is_last: bool = False) -> None:
        """Repeat the scan until a scan embeds only few rows. Raises CommandRefused after MAX_SCANS scans. If `is_last`,
        also raises CommandRefused if rows have no vector and the plan does not accept gaps.
        """
        start_s, embedded, name = time.monotonic(), 0, self._models[side].name
        few = max(FEW_ROWS, int(self._state.rows * FEW_SHARE))
        for _ in range(MAX_SCANS):
            scan = await self._scan(side)
            embedded += scan.embedded
            if scan.embedded <= few:
                break
        else:
            raise CommandRefused(
                f"the last of {MAX_SCANS} scans still found {scan.embedded:,} rows without a vector: writers change "
                f"rows faster than {name} encodes them. Add workers, or run the command when there are fewer writes"
            )
        seconds = time.monotonic() - start_s
        self._report.report_step(
            f"{embedded:,} rows were embedded by {name} in {seconds:.0f} s; all {scan.scanned:,} rows are up to date"
            + (f", except {scan.gaps_text}" if scan.gaps else ""),
            rows=scan.scanned,
            embedded=embedded,
            seconds=round(seconds, 3),
            gaps=dict(scan.gaps),
            gap_ids=scan.gap_ids,
        )
        if is_last and scan.gaps and not self._plan.accepts:
            raise CommandRefused(
                f"{counted(scan.gaps.total(), 'row')} without the {side} vector: searches would not find them; nothing "
                "was switched. Give these rows a text or remove them, then run the same command. To switch without "
                "them, use --yes"
            )

    async def settle(self, side: Side) -> None:
        """Embed the rows that clients wrote while this command switched the index and the alias."""
        embedded = (await self._scan(side)).embedded
        await asyncio.sleep(DRAIN_S)
        scan = await self._scan(side)
        embedded += scan.embedded
        self._report.report_step(
            f"{embedded:,} rows that were written during the switch were embedded again"
            + (f"; rows without a vector of their present text: {scan.gaps_text}" if scan.gaps else ""),
            settled=embedded,
            gaps=dict(scan.gaps),
            gap_ids=scan.gap_ids,
        )

    async def switch(self, side: Side) -> None:
        """Let searches use the vectors of the old or the new model (`side`)."""
        await self._live.switch(side)
        self._report.report_step(
            f"searches of {self._plan.collection} use the vectors of {self._models[side].name}", in_use=side
        )

    async def clean_up(self) -> None:
        """Remove the vectors of the model that searches do not use: the old or the new model."""
        await self._live.clean_up()
        away = opposite(self._state.in_use)
        self._report.report_step(
            f"the vectors of {self._models[away].name} are removed from {self._plan.collection}: there is no way back",
            removed=self._models[away].name,
        )

    async def compare(self) -> None:
        """Search each query with the old and with the new vectors, and compare the results. Raises CommandRefused if
        too few rows have a text, or if the recall is below `min_agreement` and the plan does not accept this.
        """
        plan, report = self._plan, self._report
        report.begin("quality")
        if not plan.sample and not plan.queries:
            report.report_step("not measured (--sample 0)")
            return
        texts, ids = await self._queries()
        if not texts:
            raise CommandRefused("no row of the sample has a text: check --text, or use --sample 0")
        near_old, near_new = [await self._neighbours(side, texts, ids) for side in SIDES]
        shares = [
            len(set(old) & set(new)) / len(old)
            for old, new in zip(near_old, near_new, strict=True)
            if old and new is not None
        ]
        if not shares:
            raise CommandRefused("the collection has too few rows to compare: use --sample 0")
        recall = float(np.mean(shares))
        report.report_step(
            f"{len(shares)} queries: the new vectors find {recall:.3f} of the old neighbours (recall@{NEIGHBOURS})",
            queries=len(shares),
            neighbours=NEIGHBOURS,
            recall=recall,
        )
        if recall >= plan.min_agreement:
            return
        below = f"a recall of {recall:.3f} is below --min-agreement {plan.min_agreement:g}"
        if not plan.accepts:
            raise CommandRefused(
                f"{below}; nothing was switched. A search with the new vectors returns other results. To continue, "
                f"use --yes or a lower bound, such as --min-agreement {int(recall * 100) / 100:g}"
            )
        report.report_step(f"{below}, accepted by --yes")

    async def _queries(self) -> tuple[list[str], list[str]]:
        """Return the query texts, and the id of each text's row. An id is empty if the user wrote the query."""
        if self._plan.queries:
            return list(self._plan.queries), [""] * len(self._plan.queries)
        texts: dict[str, str] = {}
        for row in await self._live.sample(self._plan.sample):
            with contextlib.suppress(ColumnFault):
                texts[self._plan.text.text(row.columns)] = row.id
        return list(texts), list(texts.values())

    async def _neighbours(self, side: Side, texts: list[str], ids: list[str]) -> list[list[str] | None]:
        """Return the ids of the nearest rows of each text, or None if the model refuses the text. `ids`: id of the row
        of each text, or empty for a query of the user. The result of a text does not contain its own row.
        """
        bound = asyncio.Semaphore(SEARCHES)

        async def search(vector: Any, own: str) -> list[str] | None:
            if vector is None:
                return None
            async with bound:
                near = await self._live.nearest(side, vector, NEIGHBOURS + 1)
            return [row_id for row_id in near if row_id != own][:NEIGHBOURS]

        near: list[list[str] | None] = []
        group = EMBED_ROWS[self._state.output]
        for first in range(0, len(texts), group):
            results = await self._encoded(side, texts[first : first + group], is_query=bool(self._plan.queries))
            vectors = [self._vector(result) for result in results]
            searches = (search(vector, own) for vector, own in zip(vectors, ids[first : first + group], strict=True))
            near += await asyncio.gather(*searches)
        return near

    async def _scan(self, side: Side) -> Scan:
        """Embed all rows that have no vector of their present text."""
        scan, progress = Scan(), ScanProgress(self._state.rows, self._echo)
        group = EMBED_ROWS[self._state.output]
        waiting: list[tuple[LiveRow, str]] = []
        async for page in self._live.pending(side):
            faults = []
            for row in page.rows:
                try:
                    waiting.append((row, self._plan.text.text(row.columns)))
                except ColumnFault as fault:
                    faults.append((row, str(fault)))
            await self._leave_out(side, faults, scan)
            while len(waiting) >= group:
                await self._embed(side, waiting[:group], scan)
                del waiting[:group]
                progress.show(scan)
            scan.scanned += page.scanned
            progress.show(scan)
        if waiting:
            await self._embed(side, waiting, scan)
        return scan

    async def _leave_out(self, side: Side, rows: Sequence[tuple[LiveRow, str]], scan: Scan) -> None:
        """Count rows that get no vector, by reason. Remove the rows' vectors of `side` if searches do not use them."""
        for row, reason in rows:
            scan.add_gap(row.id, reason)
        if rows:
            await self._live.write(side, [row for row, _ in rows], None)

    async def _embed(self, side: Side, rows: Sequence[tuple[LiveRow, str]], scan: Scan) -> None:
        """Encode the texts of rows and write their vectors. If the model refuses a text, count its row as a gap."""
        model = self._models[side]
        results = await self._encoded(side, [text for _, text in rows])
        done, vectors, refused = [], [], []
        for (row, _), result in zip(rows, results, strict=True):
            vector = self._vector(result)
            if vector is None:
                error = result.get("error") or {}
                reason = printable(f"{model.name} refuses the text ({error.get('code') or 'no vector'})")
                refused.append((row, reason))
            else:
                done.append(row)
                vectors.append(vector)
        await self._leave_out(side, refused, scan)
        if done:
            await self._live.write(side, done, vectors)
            scan.add_embedded(len(done))

    def _vector(self, result: Any) -> Vector | None:
        """Return the vector of a result, or None if the model refused the text."""
        vector: Vector | dict[str, Any] | None = result.get(self._state.output)
        return SparseRow.from_arrays(vector["indices"], vector["values"]) if isinstance(vector, dict) else vector

    async def _encoded(self, side: Side, texts: list[str], *, is_query: bool = False) -> Sequence[Any]:
        """Encode texts with the old or the new model (`side`). Raises CommandRefused if the model's fingerprint has
        changed since the check: vectors of two fingerprints are not comparable.
        """
        model = self._models[side]
        results = await self._encoder.encode(
            model.name,
            texts,
            is_query=is_query,
            output_types=[self._state.output],
            output_dtype="float32",
            on_item_error="slot",
            priority="bulk",
        )
        if any(self._vector(result) is not None and result["fingerprint"] != model.fingerprint for result in results):
            raise CommandRefused(
                f"{model.name} has changed since the command began. Pin its revision ({model.name}@REVISION), or run "
                "the command again, which embeds all rows again"
            )
        return results
