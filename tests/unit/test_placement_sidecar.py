"""Effects of the placement table and of its pool's assignment on a sidecar: the real gateway and sidecars before fake
adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from direct import ENTRY, Direct, reasons
from fake_adapter import toy_entry
from hypothesis import given
from hypothesis import strategies as st
from inprocess import InProcess, free_port, placing, until

from sie_broker import Write
from sie_broker.memory import MemoryServer
from sie_contracts.errors import PoolNotFound
from sie_contracts.models.entries import RunDefaults
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.records import Placement
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.assignments import assigned
from sie_sidecar import intake, process
from sie_sidecar.intake import AHEAD_AGAIN_S, OLD_S, HostAssignment, role
from sie_sidecar.pool_membership import CLOSED_AFTER_S, admitted

LANE = Lane("_default", "_default", "default")
ENTRIES = [toy_entry(f"toy/{number}") for number in range(12)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, *ENTRIES) as cluster:
        yield cluster


async def table(cluster: InProcess) -> Placement | None:
    bucket = await cluster.server.connect("reader").key_value(topology.PLACEMENT_BUCKET)
    entry = await bucket.get(topology.lane_key(LANE))
    return records.decode_placement(entry.value) if entry is not None and entry.value is not None else None


async def put(cluster: InProcess, hosts: dict[str, tuple[str, ...]], at_s: float = 1e12) -> None:
    """Write a table as a gateway does. With the default of `at_s` it is never old."""
    bucket = await cluster.server.connect("writer").key_value(topology.PLACEMENT_BUCKET)
    await bucket.write([Write(topology.lane_key(LANE), messages.encode(Placement(at_s, hosts)))])


# the role


@given(st.lists(st.sampled_from("abc"), unique=True).map(tuple), st.booleans(), st.booleans(), st.booleans())
def test_only_a_host_pulls_and_only_the_first_one_asks_for_work_before_it_has_the_model(
    hosts: tuple[str, ...], loaded: bool, held: bool, waits: bool
) -> None:
    assigned_role = role(hosts, "a", loaded=loaded, held=held, waits=waits)
    if "a" not in hosts:
        assert assigned_role == ("pull" if loaded and waits else "none")
    elif loaded:
        assert assigned_role == "pull"
    elif hosts[0] == "a":
        assert assigned_role == ("none" if held else "probe")
    else:
        assert assigned_role == "ahead"


class Host:
    """A HostAssignment with the facts that it reads."""

    def __init__(self, server: MemoryServer) -> None:
        self.now_s = 100.0
        self.loaded: set[str] = set()
        self.changes = 0
        self.is_up = True
        self.broker = server.connect("w1")
        self.assignment = HostAssignment(
            self.broker,
            LANE,
            "w1",
            lambda: self.now_s,
            self.loaded.__contains__,
            lambda model: False,
            self._on_change,
            lambda: self.is_up,
        )

    def _on_change(self) -> None:
        self.changes += 1

    def role(self, model: str) -> str:
        return self.assignment.role(topology.work_consumer(LANE, "interactive", model, 10.0).name)


async def test_the_first_table_is_waited_for_and_without_any_everything_is_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InProcess(tmp_path) as cluster:
        monkeypatch.setattr(intake, "FIRST_S", 0.05)
        host = Host(cluster.server)
        await host.assignment.start()
        assert host.role("a") == host.role("b") == "none"
        await until(lambda: host.changes, "the end of the wait")
        assert host.role("a") == host.role("b") == "pull"
        assert host.assignment.models() is None
        await put(cluster, {"a": ("w1",), "b": ("w2",), "c": ("w2", "w1")})
        await until(lambda: host.changes == 2, "the table")
        assert [host.role(model) for model in "abcd"] == ["probe", "none", "ahead", "none"]
        host.loaded |= {"a", "b", "c"}
        assert [host.role(model) for model in "abcd"] == ["pull", "none", "pull", "none"]
        assert host.assignment.models() == {"a", "c"}
        slot = topology.slot_consumer(LANE, "bulk", "a", 10.0).name
        assert host.assignment.role(slot) == "pull"
        await host.assignment.stop()


async def test_a_model_is_loaded_ahead_once_and_not_soon_again(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster:
        await put(cluster, {"a": ("w2", "w1"), "b": ("w1", "w2"), "c": ("w1",)})
        host = Host(cluster.server)
        await host.assignment.start()
        assert host.assignment.ahead() == ["a"]
        assert host.assignment.ahead() == []
        host.now_s += AHEAD_AGAIN_S
        assert host.assignment.ahead() == ["a"]
        host.now_s += AHEAD_AGAIN_S
        host.assignment.unloaded("a")  # as an operator asked
        host.now_s += AHEAD_AGAIN_S / 2
        assert host.assignment.ahead() == []
        host.now_s += AHEAD_AGAIN_S / 2
        assert host.assignment.ahead() == ["a"]
        host.now_s += AHEAD_AGAIN_S
        host.loaded.add("a")
        assert host.assignment.ahead() == []
        await host.assignment.stop()


async def test_with_an_old_table_a_worker_that_has_a_model_takes_work_of_it_that_waits(tmp_path: Path) -> None:
    """The table is older than 15 s and names another host. Work that waits at two looks is pulled. With a fresh table
    it is not.
    """
    async with InProcess(tmp_path) as cluster:
        await put(cluster, {"a": ("w2",), "b": ("w2",)}, at_s=100.0)
        host = Host(cluster.server)
        host.loaded |= {"a", "b"}
        await host.assignment.start()
        stream = topology.work_stream("_default", storage="memory", replicas=1, max_bytes=-1, max_age_s=0)
        await host.broker.ensure_stream(stream)
        await host.broker.publish(topology.work_subject(LANE, "bulk", "a"), b"", "1")
        for _ in range(2):
            await host.assignment.check_unassigned(host.loaded)
        assert host.role("a") == "none"
        host.now_s += OLD_S + 1
        await host.assignment.check_unassigned(host.loaded)
        assert host.role("a") == "none"
        await host.assignment.check_unassigned(host.loaded)
        assert (host.role("a"), host.role("b")) == ("pull", "none")
        await put(cluster, {"a": ("w2",), "b": ("w2",)}, at_s=host.now_s)
        await until(lambda: not host.assignment.is_old(), "a fresh table")
        for _ in range(2):
            await host.assignment.check_unassigned(host.loaded)
        assert host.role("a") == "none"
        await host.assignment.stop()


# gateways and sidecars together


@pytest.mark.parametrize("workers", [2, 4])
async def test_workers_of_a_new_installation_load_each_model_once(cluster: InProcess, workers: int) -> None:
    """Work of twelve models waits, and there never was a table. Workers start together. No model is loaded by two of
    them.
    """
    gateway = await cluster.gateway()
    sent = [
        asyncio.create_task(gateway.encode(str(number), model=entry.id)) for entry in ENTRIES for number in range(4)
    ]
    await until(lambda: cluster.server.streams["WORK__default"].state().messages == len(sent), "all of it waits")
    adapters = [await cluster.adapter(f"{number}.sock") for number in range(workers)]
    await asyncio.gather(*map(cluster.sidecar, adapters))
    assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
    assert sorted(load for adapter in adapters for load in adapter.loads) == sorted(entry.id for entry in ENTRIES)


async def test_a_load_on_one_worker_locks_no_work_away_from_another_that_has_the_model(cluster: InProcess) -> None:
    """The worker w1 has the model. w0 becomes a host as well and loads it for as long as the test lasts. All work is
    answered by w1; w0 holds none and no delivery is spent.
    """
    gateway = await cluster.gateway(SIE_ADOPT_AFTER_MS="600000")
    slow, quick = [await cluster.adapter(f"{name}.sock") for name in ("slow", "quick")]
    sidecars = [await cluster.sidecar(adapter) for adapter in (slow, quick)]
    model = ENTRIES[0].id
    await gateway.end()  # from here on only the test writes the table
    await put(cluster, {model: ("w1",)})
    gateway = await cluster.gateway(SIE_ADOPT_AFTER_MS="600000")
    assert (await gateway.encode("first", model=model)).headers["X-SIE-Worker"] == "w1"
    slow.hold_loads = True
    bucket = await cluster.server.connect("writer").key_value(topology.PLACEMENT_BUCKET)
    entry = await bucket.get(topology.lane_key(LANE))
    assert entry is not None
    assert entry.value is not None
    standing = records.decode_placement(entry.value)
    raised = msgspec.structs.replace(
        standing, hosts={**standing.hosts, model: ("w1", "w0")}, raised_s={model: standing.at_s}
    )
    await bucket.write([Write(topology.lane_key(LANE), messages.encode(raised))])
    await slow.until(lambda adapter: model in adapter.loads, "the second host loads ahead of any work")
    for number in range(20):
        answer = await gateway.encode(str(number), model=model)
        assert (answer.status_code, answer.headers["X-SIE-Worker"]) == (200, "w1")
    assert await sidecars[0].metric("sie_deliveries_total") == 0
    assert await sidecars[1].metric("sie_deliveries_total", redelivered="true") == 0
    slow.let_go()
    await until(
        lambda: any(b.worker == "w0" and any(s.state == "loaded" for s in b.models) for b in cluster.beats), "w0 has it"
    )
    workers = {(await gateway.encode(str(number), model=model)).headers["X-SIE-Worker"] for number in range(40)}
    assert workers == {"w0", "w1"}


async def test_a_host_that_loads_a_model_holds_one_message_of_it(cluster: InProcess) -> None:
    gateway, adapter = await cluster.gateway(), await cluster.adapter()
    sidecar = await cluster.sidecar(adapter)
    await placing(cluster)
    adapter.hold_loads = True
    model = ENTRIES[0].id
    sent = [asyncio.create_task(gateway.encode(str(number), model=model)) for number in range(20)]
    await adapter.until(lambda adapter: adapter.loads, "the load")
    second_task = asyncio.create_task(gateway.encode("x", model=ENTRIES[1].id))
    await adapter.until(lambda adapter: len(adapter.loads) == 2, "the load of another model beside it")
    assert await sidecar.metric("sie_deliveries_total") == 2
    adapter.let_go()
    assert {answer.status_code for answer in await asyncio.gather(*sent, second_task)} == {200}


async def test_work_of_a_model_that_moved_away_is_finished_where_it_was_pulled(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    adapters = [await cluster.adapter(f"{name}.sock") for name in "ab"]
    for adapter in adapters:
        await cluster.sidecar(adapter)
    await placing(cluster)
    model = ENTRIES[0].id
    host = int((await gateway.encode("first", model=model)).headers["X-SIE-Worker"][1:])
    adapters[host].hold_batches = True
    held = asyncio.create_task(gateway.encode("held", model=model))
    await adapters[host].until(lambda adapter: adapter.running, "a batch")
    await put(cluster, {model: (f"w{1 - host}",)})
    assert (await gateway.encode("next", model=model)).headers["X-SIE-Worker"] == f"w{1 - host}"
    adapters[host].let_go()
    assert (await held).headers["X-SIE-Worker"] == f"w{host}"


async def test_a_probe_that_brought_nothing_to_load_for_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only host pulls a message whose sender knows an older entry, and sends it back. It sends back the next two as
    well, and answers the message behind them without waiting for the look of once a second.
    """
    monkeypatch.setattr(process, "REFILL_S", 3600.0)
    async with Direct(tmp_path) as cluster:
        await put(cluster, {ENTRY.id: ("w0",)})
        cluster.source.put(msgspec.structs.replace(ENTRY, run=RunDefaults(pooling="cls")))
        await cluster.sidecar()
        items = [await cluster.publish(str(number), config_revision=1 if number < 3 else 2) for number in range(4)]
        outcomes = [reasons(await cluster.result(item)) for item in items]
    assert outcomes == [*[["NOT_READY config_changed"]] * 3, [""]]


# pools


def test_without_an_answer_the_default_pool_stays_open_and_another_closes() -> None:
    assert admitted("team", ("team",), CLOSED_AFTER_S) == "team"
    assert admitted("team", ("team",), CLOSED_AFTER_S + 0.1) is None
    assert admitted("_default", (), CLOSED_AFTER_S) is None
    assert admitted("_default", ("team",), CLOSED_AFTER_S) == "team"
    assert admitted("_default", ("team",), CLOSED_AFTER_S + 0.1) == "_default"


def test_a_worker_serves_the_reservation_that_has_it_else_its_own_pool() -> None:
    beats = [Heartbeat(name, "_default", "l4", "default", True, "") for name in ("w1", "w2")]
    assert assigned("w1", beats, {"w2": "team"}) == ("_default",)
    assert assigned("w2", beats, {"w2": "team"}) == ("team",)
    with pytest.raises(PoolNotFound):
        assigned("w3", beats, {})


class Assigner:
    """A gateway that answers whatever `pools` says, on a real port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.pools: list[str] | None = ["_default"]
        self.asked: list[str] = []

    async def __aenter__(self) -> Assigner:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        worker = head.split("worker=")[1].split(" ")[0]
        body = msgspec.json.encode({"worker": worker, "pools": self.pools or []})
        status = "200 OK" if self.pools is not None else "503 Service Unavailable"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


async def test_only_assigned_pools_are_served_and_the_read_token_is_shown(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """SIE_GATEWAY_URL names the gateway that assigns pools to the worker."""
    async with Assigner() as assigner:
        assigner.pools = ["team"]
        gateway = await cluster.gateway()
        sidecar = await cluster.sidecar(
            ready=False, SIE_GATEWAY_URL=f"http://127.0.0.1:{assigner.port}", SIE_CONFIG_READ_TOKEN="read-me"
        )
        await until(lambda: assigner.asked, "a question")
        assert "authorization: bearer read-me" in assigner.asked[0].lower()
        assert "/v1/pools/assignments?worker=w0" in assigner.asked[0]
        sent = asyncio.create_task(gateway.encode("x", model=ENTRIES[0].id))
        await until(lambda: cluster.server.streams["WORK__default"].state().messages, "work in the stream")
        await until(
            lambda: any("WORK_team" in record.message for record in caplog.records), "a look for the assigned stream"
        )
        assert await sidecar.metric("sie_deliveries_total") == 0
        assert "no pool is open" in (await sidecar.get("/readyz")).text
        assigner.pools = ["_default"]
        assert (await sent).status_code == 200


async def test_without_admission_nothing_is_asked(cluster: InProcess) -> None:
    """The worker asks no gateway with SIE_POOL_ADMISSION_ENABLED=false."""
    async with Assigner() as assigner:
        assigner.pools = []
        gateway = await cluster.gateway()
        await cluster.sidecar(SIE_POOL_ADMISSION_ENABLED="false", SIE_GATEWAY_URL=f"http://127.0.0.1:{assigner.port}")
        assert (await gateway.encode("x", model=ENTRIES[0].id)).status_code == 200
        assert assigner.asked == []
