"""A replica of the config service over the broker in memory: its copy of the bucket, its deltas, and the revision that
each process serves.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from inprocess import settings_of, until

from sie_broker import BrokerError, CoreMessage, KeyValue, Write
from sie_broker.memory import MemoryServer
from sie_broker.record import RecordBucket
from sie_config_service.mirror import HeldModel, Mirror, StoredModel, bundle_key
from sie_config_service.state import ConfigService
from sie_config_service.store import CatalogueChange, RecordedReply, model_key, open_store
from sie_contracts.errors import NotReady
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.wire import configs, topology
from sie_contracts.wire.configs import ConfigDelta
from sie_contracts.wire.heartbeats import GatewayBeat, Heartbeat

T = TypeVar("T")
GOLDEN, GOLDEN_OF_ALL = "6c8092142aed7873", "028e4de7345bb2f4"
BUNDLES = {name: BundleEntry(name) for name in ("default", "vision")}


def entry(model: str, bundle: str = "default", tokens: int = 16) -> dict[str, Any]:
    return {
        "id": model,
        "weights": {"package": "x"},
        "family": "toy",
        "outputs": {"dense": 4},
        "max_tokens": tokens,
        "bundle": bundle,
    }


class Replica:
    """Store over a bucket that other replicas write to as well."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.deltas: list[tuple[str, ConfigDelta]] = []

    async def start(self) -> Replica:
        self.broker = self.server.connect("config")
        self.store = await open_store(self.broker, settings_of())
        await self.store.seed_bundles(BUNDLES)

        async def heard(message: CoreMessage) -> None:
            self.deltas.append((message.subject.rpartition(".")[2], configs.decode_delta(message.data)))

        await self.server.connect("listener").subscribe(f"{topology.CONFIG_SUBJECT}.*", heard)
        return self

    async def put(self, model: str, value: dict[str, Any] | None) -> HeldModel:
        await self.store.write([CatalogueChange(model, await self.store.held(model), value, "api", "put")])
        return await self.store.held(model)

    async def keep_reply(self) -> None:
        slot = await self.store.slot("0" * 64)
        await self.store.remember(slot.with_reply(RecordedReply("0" * 64, "", time.time(), {})))


@pytest.fixture
async def replica() -> Replica:
    return await Replica(MemoryServer()).start()


async def test_only_writes_of_the_catalogue_move_its_epoch_and_every_delta_follows_on_the_last(
    replica: Replica,
) -> None:
    """Two replicas write in turns, and record replies between the writes. The deltas of all bundles have no gap."""
    peer = await Replica(replica.server).start()
    start = await replica.store.epoch()
    for number in range(6):
        await (replica, peer)[number % 2].put(f"a/{number % 3}", entry(f"a/{number % 3}", tokens=number + 1))
        before = await replica.store.epoch()
        await replica.keep_reply()
        assert await replica.store.epoch() == await peer.store.epoch() == before
    await until(lambda: len(replica.deltas) == 6, "the deltas")
    deltas = [delta for _, delta in replica.deltas]
    assert [delta.previous for delta in deltas] == [start, *(delta.epoch for delta in deltas[:-1])]
    assert deltas[-1].epoch == await peer.store.epoch()


async def test_what_a_replica_read_since_is_what_one_reads_that_starts(replica: Replica) -> None:
    peer = await Replica(replica.server).start()
    await peer.store.snapshot()
    held = await replica.put("a/one", entry("a/one"))
    await replica.put("a/two", entry("a/two", "vision"))
    await replica.put("a/two", None)
    for number in range(3):
        await replica.put("a/one", entry("a/one", tokens=number + 2))
    await replica.store.seed_bundles({"default": BundleEntry("default", priority=5)})
    fresh = await (await Replica(replica.server).start()).store.snapshot()
    followed = await peer.store.snapshot()
    assert set(followed.bundles) == {"default", "vision"}  # the replica that started wrote them again
    assert (followed.epoch, followed.held, followed.bundles) == (fresh.epoch, fresh.held, fresh.bundles)
    assert (followed.held["a/two"].revision, followed.held["a/two"].entry, list(followed.live)) == (2, None, ["a/one"])
    assert followed.held["a/one"].sequence > held.sequence


async def test_a_write_after_a_reconnect_is_stored_and_the_next_read_has_it(replica: Replica) -> None:
    mirror = Mirror(RecordBucket(replica.broker, topology.CATALOGUE_BUCKET))
    await mirror.snapshot()
    await mirror.invalidate()
    stored = msgspec.json.encode(StoredModel(entry("a/one"), "api", 1, "put", model="a/one"))
    before, last = await mirror.write([Write(model_key("a/one"), stored, 0), Write("history.a_2fone.1", stored)])
    read = await mirror.snapshot()
    assert (before, read.held["a/one"].written, read.held["a/one"].revision) == (None, last, 1)


async def test_a_write_during_the_first_read_concerns_every_bundle(replica: Replica) -> None:
    """Another replica writes a model after the epoch and before the models were read."""
    await replica.put("a/one", entry("a/one"))

    class RacedBucket(RecordBucket):
        reads = 0

        async def use(self, call: Callable[[KeyValue], Awaitable[T]]) -> T:
            result = await super().use(call)
            self.reads += 1
            if self.reads == 1:
                await replica.put("a/one", entry("a/one", tokens=32))
            return result

    mirror = Mirror(RacedBucket(replica.broker, topology.CATALOGUE_BUCKET))
    await mirror.snapshot()
    read = await mirror.snapshot()
    assert (read.held["a/one"].revision, read.epoch) == (2, await replica.store.epoch())
    assert configs.has_seen(read.since("default"), (await replica.store.snapshot()).since("default"))


async def test_a_delta_says_since_when_nothing_concerned_its_bundle(replica: Replica) -> None:
    """A model that changes its bundle concerns both bundles. A write that a replica did not see concerns all bundles
    for it.
    """
    await replica.store.snapshot()
    await replica.put("a/one", entry("a/one"))
    first = await replica.store.epoch()
    for number in range(3):
        await replica.put("v/one", entry("v/one", "vision", number + 1))
    vision = await replica.store.epoch()
    assert (await replica.store.catalogue_epoch()).bundles == {"default": first, "vision": vision}
    await replica.put("a/one", entry("a/one", tokens=9))
    default = await replica.store.epoch()
    await replica.put("a/one", entry("a/one", "vision"))
    await until(lambda: len(replica.deltas) == 7, "the deltas")
    subjects = [(subject, delta.since, delta.previous) for subject, delta in replica.deltas[-3:]]
    assert subjects == [("default", first, vision), ("default", default, default), ("vision", vision, default)]
    both = await replica.store.epoch()
    assert (await replica.store.catalogue_epoch()).bundles == {"default": both, "vision": both}
    late = await Replica(replica.server).start()
    assert set((await late.store.catalogue_epoch()).bundles.values()) >= {await late.store.epoch()}


async def test_a_record_that_cannot_be_read_changes_nothing_and_is_named(replica: Replica) -> None:
    await replica.put("a/one", entry("a/one"))
    before = await replica.store.snapshot()
    bucket = await replica.broker.key_value(topology.CATALOGUE_BUCKET)
    good = await bucket.get(bundle_key("vision"))
    assert good is not None
    await bucket.write([Write(bundle_key("vision"), b"{")])
    with pytest.raises(
        NotReady, match=rf"record {bundle_key('vision')} cannot be read .* run `sie repair KV_sie_catalogue`"
    ):
        await replica.store.snapshot()
    await bucket.write([Write(bundle_key("vision"), good.value)])
    after = await replica.store.snapshot()
    assert (after.held, after.bundles) == (before.held, before.bundles)
    await bucket.write([Write(model_key("a/one"), b"{")])
    with pytest.raises(NotReady, match=model_key("a/one")):
        await (await open_store(replica.broker, settings_of())).snapshot()
    with pytest.raises(NotReady, match=model_key("a/one")):
        await replica.store.held("a/one")
    (revision,) = await replica.store.history("a/one")
    key = f"history.{topology.token('a/one')}.{revision.revision}"
    await bucket.write([Write(key, b"{")])
    with pytest.raises(NotReady, match=key):
        await replica.store.history("a/one")
    with pytest.raises(NotReady, match=key):
        await replica.store.revision("a/one", revision.revision)


async def test_the_status_says_which_gateways_and_workers_serve_which_revision(replica: Replica) -> None:
    nothing = await replica.store.epoch()
    epochs = []
    for number in range(3):
        await replica.put("a/one", entry("a/one", tokens=number + 1))
        epochs.append(await replica.store.epoch())
    await replica.put("a/two", entry("a/two"))
    now = await replica.store.epoch()
    service = ConfigService(settings_of())
    service.workers.note(Heartbeat("w0", "_default", "cpu", "default", True, "1", config_epoch=epochs[2]))
    service.workers.note(Heartbeat("w1", "_default", "cpu", "default", True, "1", config_epoch=epochs[1]))
    for name, epoch in (("g0", now), ("g1", epochs[0]), ("g2", nothing), ("g3", "another:9"), ("g4", "")):
        service.workers.note_gateway(GatewayBeat(name, config_epoch=epoch))
    service.workers.note_gateway(GatewayBeat("g5", config_epoch=now, leaving=True))
    held, revision_at = await replica.store.held("a/one"), await replica.store.revisions_at("a/one")
    status = configs.model_status(
        "a/one",
        held.revision,
        now,
        f"{now.rpartition(':')[0]}:{held.written}",
        {"default": ("hash", service.workers.of_bundle("default"))},
        service.workers.gateways(),
        revision_at,
        "api",
    )
    assert status["revision"] == 3
    revisions = {
        member["id"]: (member["revision"], member["acked"]) for member in status["gateways"] + status["workers"]
    }
    assert revisions == {
        "g0": (3, True),
        "g1": (1, False),
        "g2": (0, False),
        "g3": (None, False),
        "g4": (None, False),
        "w0": (3, True),
        "w1": (2, False),
    }
    (bundle,) = status["bundles"]
    assert (bundle["acked_workers"], bundle["pending_workers"], status["all_bundles_acked"]) == (["w0"], ["w1"], False)
    assert {(worker["bundle"], worker["state"], worker["fingerprint"]) for worker in status["workers"]} == {
        ("default", "available", "")
    }


def test_the_hashes_of_the_catalogue_are_the_same_wherever_they_are_made() -> None:
    """The values are recorded. The hash of a bundle changes with the revision of a model."""
    assert configs.digest({"a/one": 1, "a/two": 2}) == configs.digest({"a/two": 2, "a/one": 1}) == GOLDEN
    assert configs.digest({"a/one": 1, "a/two": 3}) != GOLDEN
    assert configs.digest({"default": GOLDEN}) == GOLDEN_OF_ALL


async def test_a_write_that_cannot_be_read_back_is_copied(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker refuses the reader of the bucket, for example above its limit of consumers."""
    held = await replica.store.held("a/one")
    await replica.store.snapshot()
    use = replica.store._bucket.use

    async def limited(operation: Callable[[KeyValue], Awaitable[T]]) -> T:
        if operation.__qualname__.startswith("Mirror._since"):
            raise BrokerError("maximum consumers limit reached")
        return await use(operation)

    with monkeypatch.context() as patched:
        patched.setattr(replica.store._bucket, "use", limited)
        with pytest.raises(BrokerError, match="maximum consumers"):  # for the delta, which readers find at their poll
            await replica.store.write([CatalogueChange("a/one", held, entry("a/one"), "api", "put")])
    copies = await replica.broker.key_value(topology.CATALOGUE_COPY_BUCKET)
    assert [stored.key for stored in await copies.entries()] == [model_key("a/one")]
