"""The catalogue feed of a reader, over the broker in memory: the deltas that it applies or refuses, its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from inprocess import until

from sie_broker.memory import MemoryServer
from sie_contracts.errors import ValidationFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire import messages, topology
from sie_contracts.wire.configs import ConfigDelta, ConfigEpoch, ConfigExport, ConfigModel
from sie_runtime import feed
from sie_runtime.feed import CatalogueFeed, ConfigUnavailable, snapshot
from sie_runtime.process import Stop

BUNDLES = ({"id": "default"}, {"id": "vision"})


def entry(model: str, tokens: int = 16, bundle: str = "default") -> dict[str, Any]:
    return {
        "id": model,
        "weights": {"package": "x"},
        "family": "toy",
        "outputs": {"dense": 4},
        "max_tokens": tokens,
        "bundle": bundle,
    }


class Config:
    """A config service whose answers a test delays and changes. Its export at epoch `a:number` has a/one with `number`
    tokens.
    """

    def __init__(self) -> None:
        self.number = 1
        self.concerned: dict[str, str] = {}
        self.models: tuple[ConfigModel, ...] | None = None  # exported instead of a/one
        self.down = False
        self.open = asyncio.Event()
        self.open.set()
        self.exports = self.polls = 0

    @property
    def at(self) -> str:
        return f"a:{self.number}"

    async def export(self) -> ConfigExport:
        self.exports += 1
        if self.down:
            raise ConfigUnavailable("down")
        models = (ConfigModel("a/one", entry("a/one", self.number), self.number, written=self.number),)
        config_export = ConfigExport(self.at, models if self.models is None else self.models, BUNDLES)
        await self.open.wait()
        return config_export

    async def epoch(self) -> ConfigEpoch:
        self.polls += 1
        if self.down:
            raise ConfigUnavailable("down")
        return ConfigEpoch(self.at, self.concerned)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Reader:
    """A running feed, and the epochs that it has served."""

    def __init__(self, server: MemoryServer, config: Config, **options: Any) -> None:
        self.server, self.config, self.stop = server, config, Stop()
        self.broker = server.connect("reader")
        settings = {"trusted": ("sie-config",), "poll_s": 3600.0, "full_export_s": 0.0, **options}
        self.feed = CatalogueFeed(self.broker, config, **settings)
        self.served: list[str] = []
        self.feed.on_change(lambda: self.served.append(self.feed.catalogue.epoch))
        self.task = asyncio.create_task(self.feed.run(self.stop))

    @property
    def now(self) -> Catalogue:
        return self.feed.catalogue

    async def send(
        self, previous: int, number: int, model: str = "a/one", *, bundle: str = "default", **changes: Any
    ) -> None:
        """Send a delta from one epoch number to another."""
        of = {"revision": number, "entry": entry(model, number), "producer": "sie-config", **changes}
        delta = ConfigDelta(previous=f"a:{previous}", epoch=f"a:{number}", model=model, **of)
        await self.server.connect("writer").send(topology.config_subject(bundle), messages.encode(delta))

    async def counted(self, kind: str, result: str, times: int = 1) -> None:
        await until(lambda: self.feed.deltas[kind, result] == times, f"{times} {kind} that is {result}")


Follow = Callable[..., Any]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    """Return a function that starts a reader and waits for its first snapshot."""
    readers: list[Reader] = []

    async def start(config: Config | None = None, **options: Any) -> Reader:
        reader = Reader(MemoryServer(), config or Config(), **options)
        readers.append(reader)
        await until(lambda: reader.feed.first.is_set(), "the first snapshot")
        return reader

    yield start
    for reader in readers:
        reader.stop.request()
        await asyncio.wait_for(reader.task, 10)


async def test_deltas_chain_and_a_gap_is_read_again(follow: Follow) -> None:
    reader = await follow()
    await reader.send(1, 2)
    await reader.send(2, 3, "a/two")
    await reader.counted("put", "applied", 2)
    assert (set(reader.now.entries), reader.now.since("a/one"), reader.now.since("a/two")) == (
        {"a/one", "a/two"},
        "a:2",
        "a:3",
    )
    assert reader.config.exports == 1
    reader.config.number = 9
    await reader.send(8, 9)
    await reader.counted("put", "gap")
    await until(lambda: reader.now.epoch == "a:9", "the export")
    assert (reader.now.entries["a/one"].max_tokens, set(reader.now.entries), reader.config.exports) == (9, {"a/one"}, 2)


def test_each_gap_is_read_again_with_the_event_loop_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop returns no TimerHandle for a pause that rounds to 0 ms."""
    monkeypatch.setattr(feed.secrets, "randbelow", lambda limit: 0)

    async def gaps() -> None:
        reader = Reader(MemoryServer(), Config())
        await until(lambda: reader.feed.first.is_set(), "the first snapshot")
        for number in (5, 9):
            reader.config.number = number
            await reader.send(number - 1, number)
            await until(lambda: reader.now.epoch == reader.config.at, f"the export after the gap before {number}")
        assert reader.feed.deltas["put", "gap"] == 2
        reader.stop.request()
        await asyncio.wait_for(reader.task, 10)

    uvloop.run(gaps())


async def test_a_delta_before_the_first_snapshot_is_a_gap() -> None:
    config = Config()
    config.open.clear()
    reader = Reader(MemoryServer(), config)
    await until(lambda: config.exports == 1, "the export is being answered")
    document = entry("a/two")
    delta = ConfigDelta("sie-config", previous="", epoch="a:2", model="a/two", revision=1, entry=document)
    await reader.server.connect("writer").send(topology.config_subject("default"), messages.encode(delta))
    await reader.counted("put", "gap")
    config.open.set()
    await until(lambda: reader.feed.first.is_set(), "the first snapshot")
    assert (set(reader.now.entries), reader.now.epoch) == ({"a/one"}, "a:1")
    reader.stop.request()
    await asyncio.wait_for(reader.task, 10)


async def test_deltas_of_two_writers_that_arrive_in_the_other_order_cost_one_look(follow: Follow) -> None:
    reader = await follow()
    reader.config.number = 5
    await reader.send(3, 5)
    await until(lambda: reader.now.epoch == "a:5", "the export")
    await reader.send(1, 3)
    await reader.counted("put", "stale")
    assert (reader.now.epoch, reader.config.exports) == ("a:5", 2)


async def test_an_export_that_is_older_than_a_delta_replaces_nothing(follow: Follow) -> None:
    """The export is requested before a write and answered after the delta of the write was applied."""
    reader = await follow(full_export_s=0.05, poll_s=0.02)
    reader.config.open.clear()
    await until(lambda: reader.config.exports == 2, "the full export")
    await reader.send(1, 2)
    await reader.counted("put", "applied")
    reader.config.number = 2
    exports = reader.config.exports
    reader.config.open.set()
    await until(lambda: reader.config.exports > exports + 1, "two further exports")
    assert reader.served == sorted(reader.served)
    assert (reader.now.epoch, reader.now.entries["a/one"].max_tokens, reader.feed.is_behind) == ("a:2", 2, False)


async def test_a_store_that_lost_writes_takes_nothing_back(follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    """The reader keeps the newer revision, logs the fault once, and is behind until the store has caught up."""
    reader = await follow(poll_s=0.01)
    await reader.send(1, 7)
    await reader.counted("put", "applied")
    polls = reader.config.polls
    await until(lambda: reader.config.polls > polls + 1 and reader.feed.is_behind, "looks at the older store")
    assert (reader.now.epoch, reader.now.revisions["a/one"]) == ("a:7", 7)
    assert caplog.text.count("restored from an older copy") == 1
    reader.config.number = 8
    await until(lambda: reader.now.epoch == "a:8", "the store that has caught up")
    assert not reader.feed.is_behind


async def test_a_new_bucket_is_taken_over(follow: Follow) -> None:
    """A new bucket begins a new series of epochs, which cannot be compared with those of the old bucket."""
    reader = await follow(poll_s=0.01)
    await reader.send(1, 7)
    await reader.counted("put", "applied")
    reader.config.__class__ = type("Other", (Config,), {"at": property(lambda self: f"b:{self.number}")})
    await until(lambda: reader.now.epoch == "b:1", "the catalogue of the new bucket")


@pytest.mark.parametrize(
    "models", [(), (ConfigModel("a/one", entry("a/one", 3)), ConfigModel("a/two", entry("a/two", 0)))]
)
async def test_neither_an_empty_export_nor_one_with_a_broken_model_replaces_anything(
    follow: Follow, models: tuple[ConfigModel, ...], caplog: pytest.LogCaptureFixture
) -> None:
    reader = await follow(poll_s=0.01)
    reader.config.models, reader.config.number = models, 2
    await until(lambda: reader.config.exports > 2, "looks")
    assert (reader.now.epoch, reader.now.entries["a/one"].max_tokens) == ("a:1", 1)
    assert ("a/two: $.max_tokens" if models else "has no model") in caplog.text
    reader.config.models = None
    await until(lambda: reader.now.epoch == "a:2", "the mended export")


async def test_an_empty_catalogue_is_no_first_snapshot() -> None:
    config = Config()
    config.models = ()
    reader = Reader(MemoryServer(), config)
    await until(lambda: config.exports > 1, "two tries")
    assert not reader.feed.first.is_set()
    config.models = None
    await until(lambda: reader.feed.first.is_set(), "the first snapshot")
    reader.stop.request()
    await reader.task


async def test_a_look_that_failed_is_tried_again_before_the_next_poll(follow: Follow) -> None:
    reader = await follow()
    reader.config.down, reader.config.number = True, 5
    await reader.send(4, 5)
    await until(lambda: reader.feed.is_behind, "a failed look")
    reader.config.down = False
    await until(lambda: reader.now.epoch == "a:5", "the export")


async def test_a_reconnect_compares_epochs_at_once_and_reads_nothing_that_is_known(follow: Follow) -> None:
    """Deltas that were sent during the disconnection are lost."""
    reader = await follow()
    reader.server.disconnect()
    reader.server.reconnect()
    await until(lambda: reader.config.polls == 1, "a look")
    assert reader.config.exports == 1
    reader.config.number = 2
    reader.server.disconnect()
    reader.server.reconnect()
    await until(lambda: reader.now.epoch == "a:2", "the export")


async def test_nothing_of_a_stranger_is_applied_or_asked_about(follow: Follow) -> None:
    """An untrusted delta is rejected as such even if its entry is invalid."""
    reader = await follow()
    await reader.send(1, 2, producer="somebody")
    await reader.send(1, 2, producer="somebody", entry={"id": "no entry"})
    await reader.counted("put", "untrusted", 2)
    await reader.send(1, 2, entry={"id": "no entry"})
    await reader.counted("unknown", "invalid")
    assert (reader.now.epoch, reader.config.polls, reader.config.exports) == ("a:1", 0, 1)


async def test_who_follows_one_bundle_needs_no_export_after_writes_of_others(follow: Follow) -> None:
    """A delta and the answer with the epoch both name the last change that concerned the bundle."""
    reader = await follow(bundle="default")
    await reader.send(5, 6, since="a:1")
    await reader.counted("put", "applied")
    await reader.send(8, 9, since="a:7")  # a delta of this bundle was lost
    await reader.counted("put", "gap")
    reader.config.number, reader.config.concerned = 9, {"default": "a:9"}
    await until(lambda: reader.now.epoch == "a:9", "the export")
    reader.config.number, reader.config.concerned = 12, {"default": "a:9", "vision": "a:12"}
    await reader.feed._on_reconnect()
    await until(lambda: reader.now.epoch == "a:12", "the epoch")
    assert reader.config.exports == 2
    assert reader.now.since("a/one") == "a:9"


async def test_who_follows_all_bundles_takes_no_shortcut(follow: Follow) -> None:
    reader = await follow()
    await reader.send(5, 6, since="a:1")
    await reader.counted("put", "gap")


async def test_a_model_that_leaves_a_bundle_is_known_to_have_left_by_one_delta(follow: Follow) -> None:
    reader = await follow(bundle="default")
    await reader.send(1, 2, entry=entry("a/one", bundle="vision"))
    await reader.counted("put", "applied")
    assert reader.now.bundles_of(reader.now.entries["a/one"]) == ("vision",)


async def test_a_broken_model_of_an_export_is_named() -> None:
    with pytest.raises(ValidationFailed, match=r"^a/two: \$\.max_tokens"):
        await snapshot(
            ConfigExport("a:1", (ConfigModel("a/one", entry("a/one")), ConfigModel("a/two", entry("a/two", 0))))
        )
