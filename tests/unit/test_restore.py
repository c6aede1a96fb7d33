"""Choice of the former revision that replaces one that workers cannot load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from inprocess import settings_of, until, until_told
from unit.test_models_folder import ENTRY, put

from sie_broker.memory import MemoryServer
from sie_config_service.process import prepare
from sie_config_service.restore import Restore, Unloadable, unloadable
from sie_config_service.store import RESTORE, CatalogueChange, CatalogueStore
from sie_config_service.workers import CatalogueReaders
from sie_config_service.writes import CatalogueWriter
from sie_contracts.errors import ContentConflict, ErrorInfo
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_runtime.process import Stop

MODEL = "org/a"


def failed(revision: int, loaded: int, *, permanent: bool = True, model: str = MODEL) -> ModelStatus:
    error = ErrorInfo("MODEL_LOAD_FAILED", "bad weights", extras={"permanent": permanent})
    return ModelStatus(model, "failed", error=error, revision=revision, loaded_revision=loaded)


def loaded(revision: int) -> ModelStatus:
    return ModelStatus(MODEL, "loaded", revision=revision, loaded_revision=revision)


@pytest.mark.parametrize(
    ("statuses", "former"),
    [
        ([failed(2, 1)], 1),
        ([failed(3, 1), failed(3, 2), failed(3, 0)], 2),  # the latest revision that any worker had loaded
        ([failed(2, 1, model=f"{MODEL}:small")], 1),
        ([failed(2, 1), loaded(1)], 1),  # a worker that has not seen the change
        ([failed(2, 1), loaded(2)], None),  # the fault is of one worker
        ([failed(2, 1, permanent=False)], None),
        ([failed(2, 0)], None),
        ([failed(2, 2)], None),  # the same revision was loaded: the machine changed, not the entry
    ],
)
def test_a_revision_that_failed_for_good_after_another_one_was_loaded(
    statuses: list[ModelStatus], former: int | None
) -> None:
    revision = statuses[0].revision
    assert unloadable(statuses) == ([] if former is None else [Unloadable(MODEL, revision, former, "bad weights")])


@dataclass
class Following:
    store: CatalogueStore
    workers: CatalogueReaders
    restore: Restore
    stop: Stop
    task: asyncio.Task[None]

    async def end(self) -> None:
        """End the task of Restore after what it has begun."""
        self.stop.request()
        await self.task

    async def write(self, max_tokens: int, operation: str = "seed") -> None:
        held = await self.store.held(MODEL)
        assert held.stored is not None
        assert held.entry is not None
        change = CatalogueChange(MODEL, held, {**held.entry, "max_tokens": max_tokens}, held.stored.source, operation)
        await self.store.write([change])

    def beat(self, *statuses: ModelStatus) -> None:
        self.workers.note(Heartbeat("w", "_default", "cpu", "default", True, "1", models=statuses))

    async def history(self) -> list[tuple[int, str, Any]]:
        revisions = await self.store.history(MODEL)
        return [
            (revision.revision, revision.operation, (revision.entry or {}).get("max_tokens")) for revision in revisions
        ]


@pytest.fixture
async def following(tmp_path: Any) -> AsyncIterator[Following]:
    put(tmp_path, "a.yaml", ENTRY.format(MODEL, 8))
    prepared = await prepare(settings_of(SIE_MODELS_DIR=str(tmp_path)), MemoryServer().connect("sie-config"))

    async def check(_entry: dict[str, Any]) -> None:
        pass

    workers, stop = CatalogueReaders(15.0), Stop()
    restore = Restore(workers, prepared.store, CatalogueWriter(prepared.store, check))
    following = Following(prepared.store, workers, restore, stop, asyncio.create_task(restore.run(stop)))
    yield following
    await following.end()


async def test_the_former_revision_is_written_again_with_its_source_and_the_reason(following: Following) -> None:
    await following.write(16)
    following.beat(failed(2, 1))

    async def is_restored() -> bool:
        return len(await following.history()) == 3

    await until_told(is_restored, "the revision")
    assert (await following.history())[0] == (3, "restore", 8)
    stored = (await following.store.held(MODEL)).stored
    assert stored is not None
    why = "revision 2 could not be loaded, so revision 1 was written again: bad weights"
    assert (stored.source, stored.author, stored.note) == ("overlay", "sie-config", why)


async def test_neither_a_restored_revision_nor_an_older_one_is_replaced(following: Following) -> None:
    await following.write(16)
    await following.write(32)
    await following.write(16, RESTORE)
    before = await following.history()
    for status in (failed(4, 1), failed(3, 1)):
        following.beat(status)
        await until(lambda: not following.workers.failed.is_set(), "the look at the heartbeat")
    await following.end()
    assert await following.history() == before


async def test_a_restored_model_is_seeded_again_only_after_its_file_changed(following: Following) -> None:
    await following.write(16)
    await following.write(8, RESTORE)

    async def seeds(max_tokens: int) -> list[str]:
        entry = parse_entry({**((await following.store.held(MODEL)).entry or {}), "max_tokens": max_tokens})
        changes = await following.store.to_seed({MODEL: (entry, "overlay")})
        return [change.operation for change in changes if change.model == MODEL]

    assert (await seeds(16), await seeds(8), await seeds(32)) == ([], [], ["seed"])


async def test_a_model_that_cannot_be_restored_is_logged_once(
    following: Following, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, for which there is nothing to do, is reported beside it in each heartbeat."""
    restored = following.restore._restore

    async def refused(status: Unloadable) -> None:
        if status.model == "org/refused":
            raise ContentConflict("an alias needs it")
        await restored(status)

    monkeypatch.setattr(following.restore, "_restore", refused)
    for _ in range(3):
        following.beat(failed(2, 1, model="org/refused"), failed(9, 8))
        await until(lambda: not following.workers.failed.is_set(), "the look at the heartbeat")
    await following.end()
    assert [record.getMessage() for record in caplog.records if "is not replaced" in record.getMessage()] == [
        "a revision that cannot be loaded is not replaced yet: an alias needs it"
    ]
