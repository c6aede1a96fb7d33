"""`sie migrate`: the remaining steps, the way back, how an earlier job is found again, samples, and figures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from job_server import JobServer

from sie_bulk_jobs.datasets.templates import Template
from sie_bulk_jobs.sinks.live import LiveRow, LiveState, ScannedPage, Side
from sie_bulk_jobs.sinks.sink import Output
from sie_cli.main import main
from sie_cli.models.service import ServiceReply, WriteOptions
from sie_cli.refusal import CommandRefused
from sie_client import SIEClient
from sie_client.jobs import JobInfo
from sie_migrate import live
from sie_migrate.corpus import OBJECTS, SPAN_ROWS, SPANS, Corpus
from sie_migrate.live import LiveMigration, LiveModel, LivePlan, LiveUntil
from sie_migrate.migration import (
    KEY,
    STEPS,
    Aliases,
    AliasRevision,
    Earlier,
    MigrationReport,
    MigrationState,
    before_flip,
    check_output,
    former_target,
    has_files,
    is_answered,
    key_of,
    merged,
    remaining_steps,
    shadow_line,
)
from sie_migrate.quality import QuerySet

# ---- the remaining steps


@pytest.mark.parametrize(
    ("state", "until", "shadow_s", "steps"),
    [
        (MigrationState(), "flip", 60, STEPS),
        (MigrationState(), "quality", 60, ("check", "quality")),
        (MigrationState(), "flip", 0, ("check", "quality", "embed", "flip")),
        (MigrationState(is_submitted=True), "flip", 60, ("check", "embed", "shadow", "flip")),
        (MigrationState(is_submitted=True, is_embedded=True), "embed", 60, ("check",)),
        (MigrationState("new", 10, True, True), "flip", 60, ("check", "shadow", "flip")),
        (MigrationState("new", 60, True, True), "flip", 60, ("check", "flip")),
        (MigrationState("other", 60, True, True), "flip", 60, ("check", "shadow", "flip")),
        (MigrationState("new", 60), "flip", 60, STEPS),
    ],
)
def test_what_the_cluster_has_is_not_done_again(
    state: MigrationState, until: Any, shadow_s: float, steps: tuple[str, ...]
) -> None:
    assert remaining_steps(state, "new", until, shadow_s) == steps


def test_a_key_differs_by_all_that_makes_another_job() -> None:
    base = ("search", "new", "digest", {"text": "{a}", "output": {"sink": "s", "collection": "c"}})
    same = key_of("search", "new", "digest", {"output": {"collection": "c", "sink": "s"}, "text": "{a}"})
    keys = [
        key_of(*(replacement if place == at else value for at, value in enumerate(base)))
        for place, replacement in enumerate(("other", "other", "other", {"text": "{b}"}))
    ]
    assert key_of(*base) == same
    assert len({same, *keys}) == 5


# ---- the alias


def revision(number: int, *paths: str, operation: str = "patch") -> AliasRevision:
    fields = {
        "revision": number,
        "operation": operation,
        "created_at": f"2030-01-01T00:00:{number:02}Z",
        "changes": [{"path": path, "before": "x", "after": "y"} for path in paths],
    }
    return msgspec.convert(fields, AliasRevision)


def test_the_way_back_passes_over_the_shadow_of_the_migration() -> None:
    create, shadow, flip = revision(1, operation="create"), revision(2, "$.shadow"), revision(3, "$.alias", "$.shadow")
    assert before_flip([flip, shadow, create]) == 1
    assert before_flip([revision(4, "$.description"), flip, shadow, create]) == 1
    assert before_flip([revision(5, "$.alias[0].model"), revision(4, "$.description"), flip, shadow, create]) == 4
    assert before_flip([flip, revision(2, "$.alias"), create]) == 2
    with pytest.raises(click.ClickException, match="no earlier target to go back to"):
        before_flip([shadow, create])
    with pytest.raises(click.ClickException, match="is already a rollback"):
        before_flip([revision(4, "$.alias", operation="rollback"), flip, shadow, create])
    with pytest.raises(click.ClickException, match="no longer stored"):
        before_flip([flip])


@pytest.mark.parametrize("before", ["old/m", ["old/m"], [{"model": "old/m"}], [{"model": "old/m", "weight": 3}]])
def test_the_former_target_is_that_before_the_last_flip(before: Any) -> None:
    flip = msgspec.convert(
        {
            "revision": 3,
            "created_at": "2030-01-01T00:00:00Z",
            "changes": [{"path": "$.shadow", "before": "shadow/m"}, {"path": "$.alias", "before": before}],
        },
        AliasRevision,
    )
    assert former_target([revision(4, "$.shadow"), flip, revision(2, "$.alias")]) == "old/m"


# ---- the job


@pytest.fixture
def server() -> Iterator[JobServer]:
    running = JobServer()
    yield running
    running.close()


def test_a_job_is_found_again_and_a_lost_one_is_replaced(server: JobServer, tmp_path: Path) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text('{"a": "b"}\n')
    with SIEClient(server.url) as client:
        first = Earlier.load(client, "k").submitted(client, "k", "org/m", str(docs), {"text": "{a}"})
        again = Earlier.load(client, "k")
        assert again.job is not None
        assert again.job.id == first.id
        assert Earlier.load(client, "other").job is None
        first.cancel()
        lost = Earlier.load(client, "k")
        assert lost.job is None
        second = lost.submitted(client, "k", "org/m", str(docs), {"text": "{a}"})
        assert second.id != first.id
        server.jobs[second.id] |= {"state": "completed"}
        retry = second.retry()
        assert Earlier.load(client, "k").job.id == retry.id  # type: ignore[union-attr]
        retry.cancel()
        assert Earlier.load(client, "k").job.id == second.id  # type: ignore[union-attr]
    assert {body.metadata[KEY] for body in server.bodies.values()} == {"k"}


def info(**fields: Any) -> JobInfo:
    base = {"id": "job-1", "state": "completed", "created_at": 1.0, "updated_at": 1.0, "operation": "encode"}
    return msgspec.convert({**base, "model": "old", "counts": {}, "request": {}, **fields}, JobInfo)


def test_only_a_job_with_an_answer_for_each_row_is_done() -> None:
    assert is_answered(info())
    assert not is_answered(info(counts={"failed": 1}))
    assert not is_answered(info(broken=["a"]))
    assert not is_answered(info(state="running"))


def test_vectors_of_another_model_are_not_written_over() -> None:
    sink, url = {"sink": "main", "collection": "c"}, {"url": "s3://b/out/"}
    theirs = info(request={"output": sink}, fingerprint="f-old")
    with pytest.raises(click.ClickException, match="the collection c of main has vectors of old"):
        check_output([theirs], sink, "new", "f-new")
    with pytest.raises(click.ClickException, match="s3://b/out/ has vectors of old"):
        check_output([info(request={"output": {"url": "s3://b/out"}}, fingerprint="f-old")], url, "new", "f-new")
    with pytest.raises(click.ClickException, match="has vectors of old"):
        check_output([info(request={"output": sink}, state="running")], sink, "new", "f-new")
    check_output([theirs], {**sink, "collection": "d"}, "new", "f-new")
    check_output([theirs], {}, "new", "f-new")
    check_output([info(request={"output": sink}, fingerprint="f-new")], sink, "new", "f-new")
    check_output([info(request={"output": sink}, state="failed")], sink, "new", "f-new")
    check_output([info(request={"output": sink}, model="new", state="running")], sink, "new", "f-new")


def test_a_folder_has_the_files_of_one_job(tmp_path: Path) -> None:
    assert not has_files(tmp_path, "job-1")
    manifest = {"job": "job-1", "state": "completed", "url": "", "format": "parquet", "model": "m", "fingerprint": "f"}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "rows": 0, "failed": 0, "parts": []}))
    assert has_files(tmp_path, "job-1")
    with pytest.raises(click.ClickException, match="has the files of job-1"):
        has_files(tmp_path, "job-2")
    for wrong in (b"{", b'{"job": "\xff"}', b'{"x": ' + b"[" * 100_000):
        (tmp_path / "manifest.json").write_bytes(wrong)
        with pytest.raises(click.ClickException, match="cannot be read"):
            has_files(tmp_path, "job-1")


# ---- the corpus


def sampled(corpus: Corpus, count: int, seed: str = "s") -> Any:
    return asyncio.run(corpus.sample(count, seed))


def test_a_sample_is_drawn_from_the_whole_corpus_and_is_the_same_again(tmp_path: Path) -> None:
    docs = tmp_path / "my docs #1.jsonl"
    rows = 3 * SPAN_ROWS
    docs.write_text("\n".join(json.dumps({"a": f"text {number % (rows - 100)}"}) for number in range(rows)))
    corpus = Corpus.from_source(str(docs), "{a}", "", None)
    sample = sampled(corpus, 300)
    assert len(sample.texts) == len(set(sample.texts)) == 300
    assert (sample.rows, sample.trouble) == (rows, "")
    numbers = [int(text.split()[1]) for text in sample.texts]
    assert min(numbers) < SPAN_ROWS
    assert max(numbers) > 2 * SPAN_ROWS
    assert sampled(corpus, 300) == sample != sampled(corpus, 300, "other")
    assert len(sampled(corpus, 2000).texts) == rows - 100
    before = asyncio.run(corpus.digest())
    docs.write_text(docs.read_text() + "\n")
    assert asyncio.run(corpus.digest()) != before


def test_a_sample_of_a_folder_reads_some_of_its_objects(tmp_path: Path) -> None:
    for number in range(OBJECTS + 5):
        (tmp_path / f"{number:02}.jsonl").write_text(
            "\n".join(json.dumps({"a": f"{number} {row}"}) for row in range(SPAN_ROWS * 4))
        )
    corpus = Corpus.from_source(f"file://{tmp_path}/", "{a}", "", None)
    sample = sampled(corpus, 2000)
    assert sample.rows == SPANS * SPAN_ROWS
    assert 1 < len({text.split()[0] for text in sample.texts}) <= OBJECTS
    before = asyncio.run(corpus.digest())
    (tmp_path / "00.jsonl").write_text("")
    assert asyncio.run(corpus.digest()) != before


# ---- what is measured


def test_queries_are_lines_or_a_folder_with_judgements(tmp_path: Path) -> None:
    assert QuerySet.read(None) == QuerySet()
    (tmp_path / "q.txt").write_text("one\ntwo\n")
    assert QuerySet.read(tmp_path / "q.txt").texts == ("one", "two")
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "t"}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "what"}\n')
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    judged = QuerySet.read(tmp_path)
    assert judged.texts == ("what",)
    assert judged.judged is not None
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(click.ClickException, match="a query in each line"):
        QuerySet.read(tmp_path / "empty")


def test_figures_of_gateways_are_added() -> None:
    first_figures = {
        "copies": {"done": 3, "busy": 1},
        "cosine": 0.5,
        "rank": None,
        "served_ms": 10.0,
        "shadow_ms": 20.0,
    }
    two = {"copies": {"done": 1}, "cosine": 0.9, "rank": None, "served_ms": 30.0, "shadow_ms": 40.0}
    total = merged([first_figures, {}, two])
    assert total == {
        "copies": {"done": 4, "busy": 1},
        "cosine": pytest.approx(0.6),
        "rank": None,
        "served_ms": 15.0,
        "shadow_ms": 25.0,
    }
    assert shadow_line(total) == "copies: 1 busy, 4 done; mean cosine 0.6000; 15 ms served, 25 ms shadow"
    assert "no request came" in shadow_line(merged([{}]))


# ---- options


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["search"], "NEW_MODEL, --text, and --corpus or --sink are needed"),
        (["search", "m", "--corpus", "s3://b/"], "NEW_MODEL, --text, and --corpus or --sink are needed"),
        (["search", "m", "--sink", "x", "--collection", "c"], "NEW_MODEL and --text are needed"),
        (["search", "--sink", "x", "--collection", "c", "--step", "back"], "NEW_MODEL and --text are needed"),
        (["search", "m", "--sink", "x", "--collection", "c", "--text", "{a}"], "SIE_JOBS_SINKS has no database"),
        (["search", "m", "--corpus", "s3://b/", "--text", "{a}", "--vector", "v"], "--vector is only for --sink"),
        (
            ["search", "m", "--sink", "x", "--collection", "c", "--text", "{a}", "--shadow-s", "3"],
            "--shadow-s: only a migration with --corpus",
        ),
        (["search", "--step", "clean-up"], "--step clean-up: old vectors"),
        (["search", "m", "--corpus", "s3://b/", "--text", "{a}", "--sink", "x"], "need each other"),
        (["search", "m", "--min-agreement", "2"], "is not in the range"),
        (["search", "m", "--step", "quality"], "is not one of"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(main, ["migrate", *arguments])
    assert (result.exit_code, why in result.output) == (2, True), result.output


# ---- an index in use


class RefusingEncoder:
    """A model that takes no empty text. `counts`: how many texts each call had."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.counts: list[int] = []

    async def encode(self, model: str, texts: list[str], **_: Any) -> list[dict[str, Any]]:
        self.counts.append(len(texts))
        vector = np.ones((1, 2) if self.output == "multivector" else 2, np.float32)
        return [
            {self.output: vector, "fingerprint": model} if text else {"error": {"code": "INVALID_INPUT"}}
            for text in texts
        ]


class RecordedWrites:
    """A collection whose rows are always pending. It records the ids of writes."""

    def __init__(self, texts: list[str | None]) -> None:
        self.rows = [LiveRow(str(number), {"body": text}) for number, text in enumerate(texts)]
        self.vectors: set[str] = set()
        self.removed: set[str] = set()

    async def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        yield ScannedPage(len(self.rows), self.rows)

    async def write(self, side: Side, rows: list[LiveRow], vectors: Any) -> None:
        (self.removed if vectors is None else self.vectors).update(row.id for row in rows)

    async def nearest(self, side: Side, vector: Any, count: int) -> list[str]:
        return ["a", "b"]


def live_steps(
    texts: list[str | None], *, accepts: bool = False, output: Output = "dense", queries: Sequence[str] = ("good", "")
) -> tuple[Any, RecordedWrites, MigrationReport]:
    template = Template.parsed("{body}", "--text")
    plan = LivePlan("a", "new", "main", "", "docs", template, "", "", 0, 0.0, queries, accepts, "flip")
    models: dict[Side, LiveModel] = {
        "old": LiveModel("old", {output: 2}, "old"),
        "new": LiveModel("new", {output: 2}, "new"),
    }
    store, report = RecordedWrites(texts), MigrationReport(lambda _: None, live.LIVE_STEPS)
    state = LiveState(len(texts), 2, "old", True, output)
    encoder: Any = RefusingEncoder(output)
    collection: Any = store
    return live._LiveSteps(encoder, collection, state, models, plan, report, lambda _: None), store, report


@pytest.mark.parametrize("side", ["old", "new"])
def test_refused_and_missing_texts_lose_their_vector_are_reported_by_id_and_stop_the_switch(side: Side) -> None:
    steps, store, _ = live_steps(["a", "", None, "b"])
    asyncio.run(steps.catch_up(side))
    assert store.vectors == {"0", "3"}
    assert store.removed == {"1", "2"}
    with pytest.raises(CommandRefused, match=f"2 rows without the {side} vector.*--yes"):
        asyncio.run(steps.catch_up(side, is_last=True))
    accepting, _, _ = live_steps(["a", "", None, "b"], accepts=True)
    asyncio.run(accepting.catch_up(side, is_last=True))


@pytest.mark.parametrize(("output", "counts"), [("dense", [70]), ("multivector", [32, 32, 6])])
def test_few_multivectors_are_in_memory_at_a_time(output: Output, counts: list[int]) -> None:
    texts = [f"text {number}" for number in range(70)]
    steps, store, _ = live_steps([*texts], output=output, queries=texts)
    asyncio.run(steps._scan("new"))
    assert steps._encoder.counts == counts
    assert len(store.vectors) == 70
    asyncio.run(steps.compare())
    assert steps._encoder.counts == counts * 3


class AliasService:
    """A config service with one alias. `events`: writes in their order, shared with the collection. `refuses_trials`:
    a dry run is refused.
    """

    def __init__(self, events: list[str], target: str) -> None:
        self.events = events
        self.targets = ["old", "new"] if target == "new" else ["old"]
        self.refuses_trials = False

    def set_target(self, target: str) -> None:
        self.targets.append(target)

    def read(self, path: str, body_type: Any = Any) -> ServiceReply:
        if path.endswith("/history"):
            pairs = enumerate(zip(["", *self.targets], self.targets, strict=False), 1)
            revisions = [
                {
                    "revision": number,
                    "created_at": "2026-01-01T00:00:00+00:00",
                    "changes": [{"path": "$.alias", "before": [{"model": before}]}] if before != after else [],
                }
                for number, (before, after) in pairs
            ]
            return ServiceReply(msgspec.convert({"revisions": revisions[::-1]}, body_type))
        return ServiceReply(msgspec.convert({"alias": [{"model": self.targets[-1]}]}, body_type))

    def write(self, method: str, path: str, body: bytes, *, how: WriteOptions, body_type: Any = Any) -> ServiceReply:
        change = json.loads(body)
        target = self.targets[change["revision"] - 1] if "revision" in change else change["alias"][0]["model"]
        self.events.append(f"{'try ' if how.dry_run else ''}alias {target}")
        if how.dry_run and self.refuses_trials:
            raise CommandRefused("the key may not write configs")
        if how.if_match != len(self.targets):
            raise CommandRefused("the alias has another revision")
        if not how.dry_run:
            self.set_target(target)
        return ServiceReply(msgspec.convert({"revision": len(self.targets)}, body_type))


class SwitchedCollection:
    """A collection without pending rows. `on_scan`: called in each scan. `on_switch`: called after the switch.
    `scans`: sides of the scans.
    """

    def __init__(self, events: list[str], state: LiveState) -> None:
        self.events, self.state = events, state
        self.scans: list[Side] = []
        self.on_scan: Callable[[], None] = lambda: None
        self.on_switch: Callable[[], None] = lambda: None

    async def open(self) -> LiveState:
        return self.state

    async def close(self) -> None:
        pass

    async def begin(self, dims: int) -> None:
        self.events.append("begin")

    async def build_indexes(self) -> None:
        pass

    async def pending(self, side: Side) -> AsyncIterator[ScannedPage]:
        self.scans.append(side)
        self.on_scan()
        yield ScannedPage(1, [])

    async def switch(self, side: Side) -> None:
        self.events.append(f"index {side}")
        self.on_switch()


class LiveRun:
    """A live migration of the alias `a` from the model `old` (2 wide) to `new` (3 wide)."""

    def __init__(self, target: str, state: LiveState) -> None:
        self.events: list[str] = []
        self.service = AliasService(self.events, target)
        self.collection = SwitchedCollection(self.events, state)
        self.lines: list[str] = []

    def run(self, monkeypatch: pytest.MonkeyPatch, until: LiveUntil = "flip") -> None:
        widths = {"old": 2, "new": 3}
        monkeypatch.setattr(live, "opened_live", lambda *_: self.collection)
        monkeypatch.setattr(live, "vector_widths", lambda _, name: {"dense": widths[name]})
        monkeypatch.setattr(live, "probe", lambda _, name, output: (widths[name], name))
        monkeypatch.setattr(live, "DRAIN_S", 0.0)
        template = Template.parsed("{body}", "--text")
        plan = LivePlan("a", "new", "main", "", "docs", template, "", "", 0, 0.0, [], False, until)
        service: Any = self.service
        cluster: Any = None
        client: Any = None
        aliases = Aliases(service, WriteOptions(cluster))
        report = MigrationReport(self.lines.append, live.LIVE_STEPS)
        LiveMigration(client, contextlib.nullcontext, aliases, plan, report, self.lines.append).run()  # type: ignore[arg-type]


BEFORE, AFTER = LiveState(1, 2, "old", True), LiveState(1, 3, "new", True)


@pytest.mark.parametrize(
    ("until", "target", "state", "events"),
    [
        ("flip", "old", BEFORE, ["try alias new", "begin", "try alias new", "index new", "alias new"]),
        ("back", "new", AFTER, ["try alias old", "try alias old", "index old", "alias old"]),
        ("flip", "old", AFTER, ["try alias new", "try alias new", "alias new"]),
        ("back", "new", BEFORE, ["try alias old", "try alias old", "alias old"]),
        ("check", "old", BEFORE, ["try alias new"]),
    ],
    ids=["flip", "back", "flip after a kill", "back after a kill", "check"],
)
def test_the_change_of_the_alias_is_tried_before_the_index_is_switched(
    monkeypatch: pytest.MonkeyPatch, until: LiveUntil, target: str, state: LiveState, events: list[str]
) -> None:
    run = LiveRun(target, state)
    run.run(monkeypatch, until)
    assert run.events == events


def test_the_way_back_that_was_killed_after_the_alias_moved_runs_its_last_scans_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = LiveRun("new", BEFORE)
    run.service.set_target("old")  # as the killed run left it
    run.run(monkeypatch, "back")
    assert run.collection.scans == ["old", "old"]
    assert run.events == []


@pytest.mark.parametrize("state", [BEFORE, dataclasses.replace(BEFORE, is_begun=False)], ids=["begun", "cleaned up"])
def test_a_way_back_without_an_earlier_switch_is_refused(monkeypatch: pytest.MonkeyPatch, state: LiveState) -> None:
    run = LiveRun("old", state)
    if not state.is_begun:
        run.service.targets = ["old", "new", "old"]
    with pytest.raises(CommandRefused, match="nothing to go back from"):
        run.run(monkeypatch, "back")
    assert run.collection.scans == []


def test_an_alias_that_changes_while_it_is_read_has_the_earlier_revision_so_a_write_is_refused() -> None:
    service = AliasService([], "old")
    read = service.read

    def read_and_change(path: str, body_type: Any = Any) -> ServiceReply:
        reply = read(path, body_type)
        if len(service.targets) == 1:
            service.set_target("third")
        return reply

    service.read = read_and_change  # type: ignore[method-assign]
    client: Any = service
    cluster: Any = None
    aliases = Aliases(client, WriteOptions(cluster))
    alias = aliases.read("a")
    assert (alias.target, alias.revision) == ("third", 1)
    with pytest.raises(CommandRefused, match="another revision"):
        aliases.flip(alias, "new")


@pytest.mark.parametrize(("until", "target", "state"), [("flip", "old", BEFORE), ("back", "new", AFTER)])
def test_an_alias_that_another_user_edits_during_the_scans_follows_the_index(
    monkeypatch: pytest.MonkeyPatch, until: LiveUntil, target: str, state: LiveState
) -> None:
    run = LiveRun(target, state)
    run.collection.on_scan = lambda: run.service.set_target(run.service.targets[-1])  # a revision without a new target
    run.run(monkeypatch, until)
    assert run.service.targets[-1] == ("new" if until == "flip" else "old")


@pytest.mark.parametrize(("until", "target", "state"), [("flip", "old", BEFORE), ("back", "new", AFTER)])
@pytest.mark.parametrize("cause", ["moved", "refused"])
def test_the_index_is_not_switched_if_the_alias_cannot_follow(
    monkeypatch: pytest.MonkeyPatch, until: LiveUntil, target: str, state: LiveState, cause: str
) -> None:
    run = LiveRun(target, state)

    def interfere() -> None:
        if cause == "moved":
            run.service.set_target("third")
        else:
            run.service.refuses_trials = True

    run.collection.on_scan = interfere
    with pytest.raises(CommandRefused, match="a names third now" if cause == "moved" else "may not write configs"):
        run.run(monkeypatch, until)
    assert not [event for event in run.events if event.startswith(("index", "alias"))]


@pytest.mark.parametrize("until", ["check", "flip", "back", "clean-up"])
def test_an_alias_that_was_moved_without_a_migration_is_refused_by_the_width_of_the_index(
    monkeypatch: pytest.MonkeyPatch, until: LiveUntil
) -> None:
    run = LiveRun("new", LiveState(1, 2, "old", False))
    with pytest.raises(CommandRefused, match="a names new, which makes 3 dimensions, but the vectors of docs have 2"):
        run.run(monkeypatch, until)
    migrated = LiveRun("new", LiveState(1, 3, "old", False))
    if until in ("check", "flip"):
        migrated.run(monkeypatch, until)
        assert migrated.lines == ["1/4 check: a names new already, and no migration of docs runs"]
