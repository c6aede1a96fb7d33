"""Reservations: which workers they get, which specs are valid, and their whole life with gateways and sidecars in one
process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_adapter import toy_entry
from hypothesis import given
from hypothesis import strategies as st
from inprocess import GatewayProcess, InProcess, SidecarProcess, Source, unchanged_inference_of, until, until_told

from sie_broker import Write
from sie_contracts.errors import InvalidInput, ModelNotFound, PoolOperationForbidden, SIEError
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_contracts.wire.records import Reservation, ReservationSpec
from sie_contracts.wire.topology import MAX_RESERVATIONS
from sie_gateway.fleet import pool_reconciler
from sie_gateway.fleet.assignments import AssignableWorker, assign, is_held_back, is_met, lacking, requested_workers
from sie_gateway.fleet.placement import Placer
from sie_gateway.fleet.pool_reconciler import PoolReconciler
from sie_gateway.fleet.pool_rules import HELD_BACK, TOO_FEW
from sie_gateway.operations.pools import parse_spec
from sie_gateway.streams.publish import work_spec
from sie_sidecar import process

# who gets which worker

PROFILES = ("l4", "a100")
LOOK_PASSES, SCALING_PASSES = 3 * 5, 3 * 8


def keepers() -> list[PoolReconciler]:
    """Return what reconciles the reservations in each gateway of this process, by their tasks."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "pools"]
    return [task.get_coro().cr_frame.f_locals["self"] for task in tasks]  # type: ignore[union-attr]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Reservation], dict[str, AssignableWorker], dict[str, str]]:
    profile, bundle = st.sampled_from(PROFILES), st.sampled_from(("", "default", "other"))
    reservations = [
        Reservation(
            ReservationSpec(
                f"r{number}",
                draw(st.dictionaries(profile, st.integers(1, 4), min_size=1)),
                draw(bundle),
                draw(st.integers(0, 4)),
            ),
            draw(st.integers(0, 3)),
            0.0,
            takes_last=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    candidate = st.builds(
        AssignableWorker,
        profile,
        st.sampled_from(("default", "other")),
        st.integers(1, 4),
        st.frozensets(st.sampled_from("mn")),
        st.integers(0, 3),
    )
    workers = draw(st.dictionaries(st.sampled_from([f"w{number}" for number in range(9)]), candidate))
    pools = st.sampled_from([f"r{number}" for number in range(6)])
    return reservations, workers, draw(st.dictionaries(st.sampled_from([f"w{number}" for number in range(12)]), pools))


@given(cases())
def test_each_worker_has_one_reservation_that_it_fits_and_nobody_moves_without_need(
    case: tuple[list[Reservation], dict[str, AssignableWorker], dict[str, str]],
) -> None:
    reservations, workers, before = case
    specs = {reservation.spec.name: reservation.spec for reservation in reservations}
    assignment = assign(reservations, workers, before)
    for worker, pool in assignment.items():
        assert workers[worker].fits(specs[pool])
    for worker, pool in before.items():
        if worker in workers and pool in specs and workers[worker].fits(specs[pool]):
            held = [workers[name] for name, holder in assignment.items() if holder == pool]
            is_needed = lacking(specs[pool], held) != lacking(specs[pool], [*held, workers[worker]])
            assert assignment.get(worker) == pool or not is_needed  # what fits and is needed stays
    for spec in specs.values():
        held = [workers[name] for name, holder in assignment.items() if holder == spec.name]
        for number in range(len(held)):
            assert lacking(spec, held[:number] + held[number + 1 :]) != lacking(spec, held), "each of them is needed"
    assert assign(reservations, workers, assignment) == assignment
    # the order of reservations and workers does not matter
    assert assign(reversed(reservations), dict(reversed(workers.items())), before) == assignment


@given(cases())
def test_a_reservation_is_met_or_takes_nothing_new_and_the_older_comes_first(
    case: tuple[list[Reservation], dict[str, AssignableWorker], dict[str, str]],
) -> None:
    reservations, workers, before = case
    assignment = assign(reservations, workers, before)
    order = sorted(reservations, key=lambda entry: (entry.created_s, entry.spec.name))
    free = set(workers) - set(assignment)
    for place, reservation in enumerate(order):
        name = reservation.spec.name
        held = {worker for worker, pool in assignment.items() if pool == name}
        if is_met(reservation.spec, [workers[worker] for worker in held]):
            continue
        assert held <= {worker for worker, pool in before.items() if pool == name}
        if not reservation.takes_last:
            continue  # a free worker may have been the last of its bundle
        # the workers that were free before, and are free now or at younger reservations, would not meet it
        younger = {successor.spec.name for successor in order[place + 1 :]}
        moved_workers = {
            worker for worker, pool in assignment.items() if pool in younger and before.get(worker) != pool
        }
        former = {worker for worker, pool in before.items() if pool in {entry.spec.name for entry in order}}
        names = held | ((free | moved_workers) - former)
        enough = [workers[worker] for worker in names if workers[worker].fits(reservation.spec)]
        assert not is_met(reservation.spec, enough)


@given(cases())
def test_of_each_bundle_one_worker_stays_for_everybody(
    case: tuple[list[Reservation], dict[str, AssignableWorker], dict[str, str]],
) -> None:
    """The exceptions: no worker was left before, or a reservation that may take the last one took it."""
    reservations, workers, before = case
    assignment = assign(reservations, workers, before)
    may = {entry.spec.name for entry in reservations if entry.takes_last}
    for bundle in ("default", "other"):
        names = {name for name, worker in workers.items() if worker.bundle == bundle}
        moved_workers = {name for name in names if name in assignment and assignment[name] != before.get(name)}
        if moved_workers and all(assignment[name] not in may for name in moved_workers):
            assert names - assignment.keys(), bundle
    for reservation in reservations:
        if is_held_back(reservation, workers, assignment):
            with_last = [
                msgspec.structs.replace(entry, takes_last=True) if entry is reservation else entry
                for entry in reservations
            ]
            assert assign(with_last, workers, assignment) != assignment, "what it waits for is there"


@given(cases())
def test_what_is_asked_for_would_meet_a_reservation(
    case: tuple[list[Reservation], dict[str, AssignableWorker], dict[str, str]],
) -> None:
    """The cases include clusters without any worker."""
    reservations, workers, _ = case
    for reservation in reservations:
        held = [worker for worker in workers.values() if worker.fits(reservation.spec)]
        worker_counts = requested_workers(reservation.spec, held, {})
        short, count = lacking(reservation.spec, held)
        assert sum(worker_counts.values()) - len(held) == max(count, sum(short.values()))
        more = [
            AssignableWorker(profile, bundle)
            for (profile, bundle), number in worker_counts.items()
            for _ in range(number)
        ]
        assert is_met(reservation.spec, [*held, *more])


def test_a_worker_that_has_the_models_and_little_to_do_is_taken_first() -> None:
    spec = ReservationSpec("r", {"l4": 1}, pinned_models=("m",))
    workers = {
        "busy": AssignableWorker("l4", "default", models=frozenset("m"), busy=9),
        "idle": AssignableWorker("l4", "default", models=frozenset("m")),
        "a": AssignableWorker("l4", "default"),
    }
    assert assign([Reservation(spec, 0.0, 0.0)], workers, {}) == {"idle": "r"}
    assert assign([Reservation(spec, 0.0, 0.0)], {"idle": workers["idle"]}, {}) == {}
    assert assign([Reservation(spec, 0.0, 0.0, takes_last=True)], {"idle": workers["idle"]}, {}) == {"idle": "r"}
    assert assign([Reservation(spec, 0.0, 0.0)], workers, {"a": "r"}) == {"a": "r"}


def test_workers_that_a_smaller_spec_does_not_need_are_given_back() -> None:
    workers = {f"w{number}": AssignableWorker("l4", "default", busy=number) for number in range(4)}
    before = dict.fromkeys(workers, "r")
    smaller = Reservation(ReservationSpec("r", {"l4": 1}, minimum_worker_count=2), 0.0, 0.0)
    assert assign([smaller], workers, before) == {"w0": "r", "w1": "r"}
    unheard = {**workers, "w0": AssignableWorker("l4", "default", is_heard=False)}
    assert assign([smaller], unheard, before) == before


def test_a_reservation_gets_no_worker_while_the_gpus_of_one_are_unknown() -> None:
    """After the start of a gateway, a worker that it has not heard may have all GPUs that the reservation needs."""
    reservation = Reservation(ReservationSpec("r", {"l4": 4}), 0.0, 0.0, takes_last=True)
    unheard, free = AssignableWorker("l4", "default", is_heard=False), AssignableWorker("l4", "default", 4)
    assert assign([reservation], {"held": unheard, "free": free}, {"held": "r"}) == {"held": "r"}
    assert assign([reservation], {"free": free}, {}) == {"free": "r"}


# what a spec may be

CATALOGUE = Catalogue({"toy/one": toy_entry()}, {}, "")


@pytest.mark.parametrize(
    ("body", "param", "kind"),
    [
        ([], "body", InvalidInput),
        ({}, "name", InvalidInput),
        ({"name": 7}, "name", InvalidInput),
        ({"name": "a b"}, "name", InvalidInput),
        ({"name": "x" * 64}, "name", InvalidInput),
        ({"name": "assignments"}, "name", InvalidInput),
        ({"name": "Assignments"}, "name", InvalidInput),
        ({"gpus": None}, "gpus", InvalidInput),
        ({"gpus": {}}, "gpus", InvalidInput),
        ({"gpus": ["l4"]}, "gpus", InvalidInput),
        ({"gpus": {"h100": 1}}, "gpus.h100", InvalidInput),
        ({"gpus": {"l4": 0}}, "gpus.l4", InvalidInput),
        ({"gpus": {"l4": True}}, "gpus.l4", InvalidInput),
        ({"gpus": {"l4": 1.5}}, "gpus.l4", InvalidInput),
        ({"gpus": {"l4": 1, " L4 ": 2}}, "gpus. L4 ", InvalidInput),
        ({"bundle": 3}, "bundle", InvalidInput),
        ({"bundle": "nope"}, "bundle", InvalidInput),
        ({"gpu_caps": {"l4": 1}, "gpus": {"l4": 2}}, "gpu_caps.l4", InvalidInput),
        ({"minimum_worker_count": -1}, "minimum_worker_count", InvalidInput),
        ({"ttl_seconds": 0}, "ttl_seconds", InvalidInput),
        ({"queue_pool": "batch"}, "queue_pool", InvalidInput),
        ({"ttl_seconds": "60"}, "ttl_seconds", InvalidInput),
        ({"pinned_models": "toy/one"}, "pinned_models", InvalidInput),
        ({"minimum_workers": 1}, "minimum_workers", InvalidInput),
        ({"minimum_worker_count": 5}, "minimum_worker_count", PoolOperationForbidden),
        ({"ttl_seconds": 3601}, "ttl_seconds", PoolOperationForbidden),
        ({"pinned_models": ["toy/two"]}, "model", ModelNotFound),
    ],
)
def test_a_bad_spec_is_refused_with_its_field(body: Any, param: str, kind: type[SIEError]) -> None:
    good = {"name": "team", "gpus": {"l4": 1}}
    given_body = {**good, **body} if isinstance(body, dict) and body else body
    with pytest.raises(kind) as caught:
        parse_spec(given_body, {"l4", "a100-spot"}, CATALOGUE)
    assert caught.value.param == param or kind is ModelNotFound


def test_a_spec_is_written_one_way_with_its_defaults() -> None:
    spec = parse_spec(
        {"name": "Team", "gpus": {" L4": 2, "A100": 1}, "queue_pool": "default"}, {"l4", "a100-spot"}, CATALOGUE
    )
    assert spec == ReservationSpec("team", {"a100-spot": 1, "l4": 2}, "", 0, 1200)
    full = {
        "name": "t",
        "gpus": {"l4": 1},
        "bundle": "default",
        "minimum_worker_count": 4,
        "ttl_seconds": 3600,
        "gpu_caps": {"l4": 3},
        "pinned_models": ["TOY/one", "toy/one"],
    }
    assert parse_spec(full, {"l4"}, CATALOGUE) == ReservationSpec(
        "t", {"l4": 1}, "default", 4, 3600, {"l4": 3}, ("toy/one",)
    )


def test_the_queue_of_a_reservation_is_a_part_of_what_a_pool_may_hold() -> None:
    """All 64 reservations together reserve four times as much at the broker as one pool of an installation."""
    settings = Settings()
    own, reserved = work_spec(settings, "_default").max_bytes, work_spec(settings, "team", reserved=True).max_bytes
    assert MAX_RESERVATIONS * reserved == 4 * own


# their life

SPEC = {"name": "team", "gpus": {"l4": 1}}
L4 = {"SIE_GATEWAY_CONFIGURED_GPUS": "l4,h100"}
# the time-out is long, so that a worker is not lost when the machine stands still
FAST = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "100", "SIE_HEARTBEAT_TIMEOUT_MS": "10000"}


async def eventually(gateway: GatewayProcess, path: str, condition: Callable[[Any], bool]) -> Any:
    """Return the answer of a gateway once the condition holds."""
    async with asyncio.timeout(30):
        while not condition(reply := (await gateway.client.get(path)).json()):  # noqa: ASYNC110  a state of another process
            await asyncio.sleep(0.02)
    return reply


class Town(InProcess):
    """Two gateways before a broker, and workers that ask both for their pools."""

    gateways: tuple[GatewayProcess, GatewayProcess]

    async def gateway(self, source: Source | None = None, *, ready: bool = True, **environ: str) -> GatewayProcess:
        """Start a gateway whose client is an administrator: its reservations may take the last worker."""
        gateway = await super().gateway(source, ready=ready, SIE_ADMIN_TOKEN="admin", **environ)
        gateway.client.headers["authorization"] = "Bearer admin"
        return gateway

    async def worker(self, **environ: str) -> SidecarProcess:
        urls = ",".join(gateway.url for gateway in self.gateways)
        return await self.sidecar(SIE_MACHINE_PROFILE="l4", SIE_GATEWAY_URL=urls, **FAST, **environ)

    async def serves(self, worker: str, pool: str) -> None:
        def told() -> bool:
            beat = self.last_beat(worker, ready=True)
            return beat is not None and beat.pool == pool

        def known(health: dict[str, Any]) -> bool:
            return {info["name"]: info["pool"] for info in health["workers"]}.get(worker) == pool

        await until(told, f"{worker} serves {pool}")
        for gateway in self.gateways:  # a gateway may hear of it later
            await eventually(gateway, "/health", known)

    async def state(self, expected: str, name: str = "team") -> dict[str, Any]:
        """Return the Pool object at both gateways once it has this state."""

        async def agreed() -> dict[str, Any]:
            pools = [(await gateway.client.get(f"/v1/pools/{name}")).json() for gateway in self.gateways]
            is_there = pools[0].get("status", {}).get("state") == expected and pools[0] == pools[1]
            return pools[0] if is_there else {}

        pool: dict[str, Any] = await until_told(agreed, f"the pool {name} is {expected} at both gateways")
        return pool

    async def events(self, event: str) -> float:
        """Return how often both gateways together counted the event."""
        return sum([await gateway.metric("sie_gateway_pool_events_total", event=event) for gateway in self.gateways])

    async def counted(self, event: str) -> None:
        """Wait until the event is counted. The leader counts a change at its next look, which may be after the Pool
        object shows it.
        """
        async with asyncio.timeout(30):
            while not await self.events(event):  # noqa: ASYNC110  a state of another process
                await asyncio.sleep(0.02)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with Town(tmp_path, toy_entry(), toy_entry("toy/big", bundle="other")) as town:
        town.gateways = await town.gateway(**FAST, **L4), await town.gateway(**FAST, **L4)
        yield town


def placers() -> list[Placer]:
    """Return the placers of the gateways of this process, by their tasks."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "placement"]
    return [task.get_coro().cr_frame.f_locals["self"] for task in tasks]  # type: ignore[union-attr]


def code(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    assert body["detail"]["message"] == body["error"]["message"]  # the Python client reads the message there
    return answer.status_code, body["code"]


async def test_a_reservation_takes_a_worker_serves_its_requests_and_gives_it_back(town: Town) -> None:
    """Both workers serve the default pool. One is reserved over one gateway, and works for the pool alone. Both
    gateways route to it, by header and by `pool/gpu`. It is deleted over the other gateway, and both workers are back.
    """
    first_gateway, two = town.gateways
    await town.worker()
    await town.worker()
    reply = await first_gateway.client.post("/v1/pools", json={**SPEC, "ttl_seconds": 600})
    assert reply.status_code == 201
    assert '"ttl_seconds":600,' in reply.text  # a whole number in JSON too
    pool = await town.state("active")
    assert pool["spec"] == {
        "name": "team",
        "bundle": None,
        "gpus": {"l4": 1},
        "ttl_seconds": 600,
        "minimum_worker_count": 0,
        "gpu_caps": {},
        "pinned_models": [],
    }
    [worker] = pool["status"]["assigned_workers"]
    assert worker == {"name": worker["name"], "url": None, "gpu": "l4"}
    assert pool["status"]["expires_at"] == pool["status"]["last_renewed"] + 600
    mine, free_worker = worker["name"], "w1" if worker["name"] == "w0" else "w0"
    for gateway in town.gateways:
        assignments = await gateway.client.get("/v1/pools/assignments", params={"worker": mine})
        assert assignments.json() == {"worker": mine, "pools": ["team"]}
        assert (await gateway.client.get("/v1/pools/assignments", params={"worker": free_worker})).json()["pools"] == [
            "_default"
        ]
    for gateway, named in ((first_gateway, {"X_SIE_Pool": "Team"}), (two, {"X_SIE_MACHINE_PROFILE": "team/l4"})):
        for _ in range(4):
            assert (await gateway.encode("x", **named)).headers["x-sie-worker"] == mine
            assert (await gateway.encode("x", X_SIE_Pool="default")).headers["x-sie-worker"] == free_worker
    health = (await two.client.get("/health")).json()
    assert {info["name"]: info["pool"] for info in health["workers"]} == {mine: "team", free_worker: "_default"}
    assert await first_gateway.metric("sie_gateway_active_lease_gpus") == 1
    await town.counted("active")
    assert (await two.client.delete("/v1/pools/team")).json() == {"message": "Pool deleted"}
    await town.serves(mine, "_default")
    assert code(await first_gateway.client.get("/v1/pools/team")) == (404, "POOL_NOT_FOUND")
    assert code(await first_gateway.encode("x", X_SIE_Pool="team")) == (404, "POOL_NOT_FOUND")
    assert "WORK_team" not in town.server.streams
    events = {event: await town.events(event) for event in ("created", "active", "assigned", "released", "deleted")}
    assert set(events.values()) == {1}, events
    reply = await first_gateway.client.post("/v1/pools", json=SPEC)  # the name is free at once
    assert reply.status_code == 201


async def test_a_post_of_the_owner_renews_a_reservation_and_may_change_its_spec(town: Town) -> None:
    first_gateway, two = town.gateways
    first = (await first_gateway.client.post("/v1/pools", json=SPEC)).json()
    assert first["status"]["state"] == "pending"
    again = await two.client.post("/v1/pools", json={**SPEC, "name": "TEAM", "bundle": None})
    assert again.status_code == 201
    assert again.json()["status"]["created_at"] == first["status"]["created_at"]
    assert again.json()["status"]["expires_at"] > first["status"]["expires_at"]
    changed_reply = await two.client.post("/v1/pools", json={**SPEC, "minimum_worker_count": 1})
    assert changed_reply.status_code == 201
    assert changed_reply.json()["spec"] == {**first["spec"], "minimum_worker_count": 1}
    assert changed_reply.json()["status"]["created_at"] == first["status"]["created_at"]
    minimum = (await first_gateway.client.get("/v1/pools/team")).json()["spec"]["minimum_worker_count"]
    assert (minimum, await town.events("created"), await town.events("renewed")) == (1, 1, 2)
    renewed = (await first_gateway.client.post("/v1/pools/team/renew")).json()
    assert renewed == {"message": "Pool renewed", "expires_at": renewed["expires_at"]}
    assert renewed["expires_at"] > changed_reply.json()["status"]["expires_at"]


async def test_the_default_pool_is_always_there_and_no_reservation(town: Town) -> None:
    client = town.gateways[0].client
    for name in ("default", "_default", "DEFAULT"):
        pool = (await client.get(f"/v1/pools/{name}")).json()
        assert (pool["name"], pool["spec"]["name"], pool["status"]["state"]) == ("default", "default", "active")
        assert pool["status"]["expires_at"] is None
        assert code(await client.delete(f"/v1/pools/{name}")) == (403, "POOL_OPERATION_FORBIDDEN")
        assert (await client.post(f"/v1/pools/{name}/renew")).json() == {"message": "Pool renewed", "expires_at": None}
        refused = await client.post("/v1/pools", json={**SPEC, "name": name})
        assert (*code(refused), refused.headers["x-should-retry"]) == (409, "POOL_CONFLICT", "false")
    assert [pool["name"] for pool in (await client.get("/v1/pools")).json()["pools"]] == ["default"]
    unknown = (
        ("GET", "/v1/pools/none"),
        ("DELETE", "/v1/pools/none"),
        ("POST", "/v1/pools/none/renew"),
        ("GET", "/v1/pools/a.b"),
    )
    for method, path in unknown:
        assert code(await client.request(method, path)) == (404, "POOL_NOT_FOUND")
    assert code(await client.post("/v1/pools", content=b"{")) == (400, "INVALID_INPUT")
    assert code(await client.post("/v1/pools", content=b" " * 70_000)) == (413, "PAYLOAD_TOO_LARGE")


async def test_at_most_so_many_reservations_also_when_all_gateways_make_them_at_once(town: Town) -> None:
    specs = [{"name": f"r{number}", "gpus": {"l4": 1}} for number in range(MAX_RESERVATIONS + 6)]
    answers: list[httpx.Response] = []
    for start in range(0, len(specs), 7):
        tasks = [
            town.gateways[number % 2].client.post("/v1/pools", json=body)
            for number, body in enumerate(specs[start : start + 7])
        ]
        answers += await asyncio.gather(*tasks)
    assert sorted(answer.status_code for answer in answers) == [201] * MAX_RESERVATIONS + [403] * 6
    assert {code(answer) for answer in answers if answer.status_code == 403} == {(403, "POOL_OPERATION_FORBIDDEN")}
    for gateway in town.gateways:
        await eventually(gateway, "/v1/pools", lambda listing: len(listing["pools"]) == MAX_RESERVATIONS + 1)


async def test_a_reservation_without_workers_is_a_cold_lane_and_asks_for_them(town: Town) -> None:
    """Two workers are reserved while there is none: the reservation is pending, and two workers are wanted. Requests
    are told to come again. The first worker stays in the default pool. With the second one the reservation is active.
    """
    first_gateway, two = town.gateways
    assert (await first_gateway.client.post("/v1/pools", json={**SPEC, "gpus": {"l4": 2}})).status_code == 201
    figures = {name: (await two.client.get(f"/v1/scaling/{name}.l4.default")).json() for name in ("team", "_default")}
    for lane_figures in figures.values():
        assert (
            lane_figures["reserved"],
            lane_figures["wanted_replicas"],
            lane_figures["demand"],
            lane_figures["ready_workers"],
        ) == (2, 2, 1, 0)
    answer = await first_gateway.encode("x", X_SIE_Pool="team", X_SIE_Timeout_Ms="300", X_SIE_SDK_Version="0.6.4")
    assert (answer.status_code, answer.json()["gpu"]) == (202, "l4")
    refused = (await first_gateway.encode("x", X_SIE_Pool="team", X_SIE_Timeout_Ms="300")).json()["error"]
    assert (refused["code"], refused["message"].rpartition("; ")[2]) == (
        "PROVISIONING",
        f"the pool 'team' is pending: {TOO_FEW}",
    )
    assert (await town.state("pending"))["status"]["reason"] == TOO_FEW
    await town.worker()
    assert (await first_gateway.encode("x")).headers["x-sie-worker"] == "w0"
    assert (await town.state("pending"))["status"]["assigned_workers"] == []
    await town.worker()
    await town.state("active")
    assert (await two.encode("x", X_SIE_Pool="team")).status_code == 200
    lane_figures = (await two.client.get("/v1/scaling/_default.l4.default")).json()
    assert (lane_figures["reserved"], lane_figures["ready_workers"]) == (2, 0)
    assert lane_figures["wanted_replicas"] >= 2


async def test_an_end_fails_what_waits_and_leaves_nothing_behind(town: Town) -> None:
    """Requests wait in the queue of a reservation without workers. When its lease is over they fail at once, with the
    reason.
    """
    first_gateway, two = town.gateways
    await first_gateway.client.post("/v1/pools", json={"name": "team", "gpus": {"l4": 1}, "ttl_seconds": 2})
    waiting = [asyncio.create_task(gateway.encode("x", X_SIE_Pool="team")) for gateway in town.gateways]
    await until(lambda: town.server.streams["WORK_team"].state().messages == 2, "work in the stream")
    for answer in await asyncio.gather(*waiting):
        assert code(answer) == (404, "POOL_NOT_FOUND")
    await until(lambda: "WORK_team" not in town.server.streams, "the stream is removed")
    for gateway in town.gateways:
        assert code(await gateway.client.post("/v1/pools/team/renew")) == (404, "POOL_NOT_FOUND")
        assert (await gateway.client.get("/v1/scaling/team.l4.default")).status_code == 404
    assert (
        sum([await gateway.metric("sie_gateway_pool_events_total", event="expired") for gateway in town.gateways]) == 1
    )
    tables = town.server.buckets[topology.PLACEMENT_BUCKET].entries.values()
    assert not [entry.key for entry in tables if entry.value and entry.key.startswith("team.")]
    lane_names = [placer._waiting.__self__._names for placer in placers()]  # type: ignore[attr-defined]  # of `Ages.waiting_of`
    assert len(lane_names) == 2, "two gateways"
    await until(
        lambda: not any(lane.pool == "team" for names in lane_names for lane in names), "its lanes are forgotten"
    )
    assert (await two.client.post("/v1/pools", json={"name": "team", "gpus": {"l4": 1}})).status_code == 201


async def test_the_last_worker_that_serves_everybody_stays_for_everybody(town: Town) -> None:
    """A caller without the scope admin reserves the only worker. The pool is pending and says why, and one worker more
    is wanted. With a second worker the pool is active, and one worker still serves everybody. The reservation of an
    administrator takes that one too.
    """
    first_gateway, two = town.gateways
    await town.worker()
    answer = await first_gateway.client.post("/v1/pools", json=SPEC, headers={"authorization": ""})
    assert answer.status_code == 201
    assert (await town.state("pending"))["status"]["reason"] == HELD_BACK
    refused = await two.encode("x", X_SIE_Pool="team", X_SIE_Timeout_Ms="300")
    assert code(refused) == (503, "PROVISIONING")
    assert refused.json()["error"]["message"].endswith(f"; the pool 'team' is pending: {HELD_BACK}")
    scaling = await eventually(two, "/v1/scaling/_default.l4.default", lambda reply: reply["reserved"] == 2)
    assert scaling["wanted_replicas"] >= 2
    assert (await two.encode("x")).status_code == 200
    await town.worker()
    status = (await town.state("active"))["status"]
    assert "reason" not in status
    assert (await two.encode("x")).status_code == 200
    await two.client.post("/v1/pools", json={**SPEC, "name": "all"})
    await town.state("active", "all")


async def test_a_worker_that_dies_is_replaced_and_its_reservation_pending_until_then(town: Town) -> None:
    workers = {process.worker: process for process in (await town.worker(), await town.worker())}
    await town.gateways[0].client.post("/v1/pools", json=SPEC)
    [first] = (await town.state("active"))["status"]["assigned_workers"]
    lost_worker = workers.pop(first["name"])
    await lost_worker.end()
    pool = await town.state("active")
    [left] = workers
    while [worker["name"] for worker in pool["status"]["assigned_workers"]] != [left]:
        pool = await town.state("active")
    assert (await town.gateways[1].encode("x", X_SIE_Pool="team")).headers["x-sie-worker"] == left
    await workers[left].end()
    while (await town.state("pending"))["status"]["assigned_workers"]:
        pass


async def test_a_pinned_model_that_was_unloaded_is_loaded_again(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "AHEAD_AGAIN_S", 0.1)
    await town.worker()
    [adapter] = town.adapters
    await town.gateways[0].client.post("/v1/pools", json={**SPEC, "pinned_models": ["toy/one"]})
    await until(lambda: adapter.loads == ["toy/one"], "the pinned model is loaded")
    await adapter.die()
    await until(lambda: adapter.loads == ["toy/one"] * 2, "it is loaded again, though no work needs it")


async def test_work_in_hand_is_finished_while_the_next_pool_is_served(town: Town) -> None:
    """The streams of both pools count from 1. The worker holds the first message of each at once, and answers and
    removes both.
    """
    first_gateway, two = town.gateways
    await town.worker()
    [adapter] = town.adapters
    assert (await first_gateway.encode("warm")).status_code == 200
    adapter.hold_batches = True
    old = [asyncio.create_task(first_gateway.encode("old")), asyncio.create_task(two.encode("older"))]
    await until(lambda: len(adapter.batches) >= 2, "work of the default pool at the adapter")
    await first_gateway.client.post("/v1/pools", json=SPEC)
    await town.state("active")
    new = [asyncio.create_task(gateway.encode("new", X_SIE_Pool="team")) for gateway in town.gateways * 2]
    stream = town.server.streams["WORK_team"]
    await until(
        lambda: sum(consumer.state().leased for consumer in stream.consumers.values()) == 4,
        "work of the reservation in hand",
    )
    adapter.let_go()
    for answer in await asyncio.gather(*old, *new):
        assert answer.status_code == 200
        assert answer.headers["x-sie-worker"] == "w0"
    for name in ("WORK_team", "WORK__default"):
        await until(lambda name=name: not town.server.streams[name].state().messages, f"{name} is empty")


async def test_a_gateway_that_starts_again_knows_all_reservations_and_moves_nobody(town: Town) -> None:
    first_gateway, two = town.gateways
    await town.worker()
    await first_gateway.client.post("/v1/pools", json=SPEC)
    before = await town.state("active")
    await asyncio.gather(first_gateway.end(), two.end())
    beats = len(town.beats)
    town.gateways = await town.gateway(**FAST, **L4), await town.gateway(**FAST, **L4)
    after = (await town.gateways[0].client.get("/v1/pools/team")).json()
    assert after["spec"] == before["spec"]
    assert after["status"]["expires_at"] == before["status"]["expires_at"]
    assert await town.state("active") == before
    await until(lambda: len(town.beats) > beats + 1, "two heartbeats")
    assert {beat.pool for beat in town.beats[beats:]} == {"team"}
    released = [await gateway.metric("sie_gateway_pool_events_total", event="released") for gateway in town.gateways]
    assert released == [0, 0]


async def test_a_reservation_has_what_it_asks_for_and_nothing_else(town: Town) -> None:
    """A request for what its workers never have is refused instead of waiting for ever."""
    client = town.gateways[0].client
    await client.post("/v1/pools", json={"name": "team", "gpus": {"l4": 1}})
    answer = await town.gateways[0].encode("x", X_SIE_Pool="team", X_SIE_MACHINE_PROFILE="h100")
    assert (code(answer), answer.json()["error"]["reason"]) == ((400, "INVALID_INPUT"), "gpu_not_configured")
    assert answer.json()["error"]["configured_gpu_types"] == ["l4"]
    await client.post("/v1/pools", json={"name": "others", "gpus": {"l4": 1}, "bundle": "other"})
    assert code(await town.gateways[0].encode("x", X_SIE_Pool="others")) == (409, "BUNDLE_CONFLICT")


async def test_reservations_that_are_lost_with_their_broker_are_gone_and_their_workers_come_back(town: Town) -> None:
    """SIE_STREAM_STORAGE=memory: the bucket is made anew, and its revisions begin again."""
    await town.worker()
    for number in range(3):  # the revisions of before are then higher than those after
        await town.gateways[0].client.post("/v1/pools", json={**SPEC, "name": f"other{number}"})
        await town.gateways[0].client.delete(f"/v1/pools/other{number}")
    await town.gateways[0].client.post("/v1/pools", json=SPEC)
    await town.state("active")
    town.server.disconnect()
    del town.server.buckets[topology.POOLS_BUCKET]
    town.server.lose_stream("WORK_team")
    town.server.reconnect()
    for gateway in town.gateways:
        await eventually(gateway, "/v1/pools/team", lambda reply: reply.get("code") == "POOL_NOT_FOUND")
    await town.serves("w0", "_default")
    assert (await town.gateways[1].encode("x")).status_code == 200
    assert (await town.gateways[1].client.post("/v1/pools", json=SPEC)).status_code == 201
    await town.state("active")
    assert (await town.gateways[0].encode("x", X_SIE_Pool="team")).status_code == 200


async def test_reservations_that_cannot_be_read_are_left_as_they_are_until_somebody_repairs_them(town: Town) -> None:
    """The record of a reservation is damaged. The last known one stays, and no change is written over the damage. After
    the record is removed, reservations can be made again.
    """
    client = town.gateways[0].client
    assert (await client.post("/v1/pools", json=SPEC)).status_code == 201
    bucket = await town.server.connect("operator").key_value(topology.POOLS_BUCKET)
    await bucket.write([Write("reservations", b"\xc1")])
    assert code(await client.post("/v1/pools", json={**SPEC, "name": "more"})) == (503, "QUEUE_UNAVAILABLE")
    assert (await client.get("/v1/pools/team")).status_code == 200
    entry = await bucket.get("reservations")
    assert entry is not None
    assert entry.value == b"\xc1"
    await bucket.write([Write("reservations", None)])
    assert (await client.post("/v1/pools", json={**SPEC, "name": "more"})).status_code == 201


async def test_after_a_loss_of_the_broker_reserved_workers_have_the_time_to_send_heartbeats(town: Town) -> None:
    """The gateways connect again before the worker does, when its last heartbeat is too old already."""
    worker = await town.worker()
    await town.gateways[0].client.post("/v1/pools", json=SPEC)
    await town.state("active")
    looks: set[PoolReconciler] = set()  # those with a step that began with a connection, and ended

    def watched(keeper: PoolReconciler) -> Callable[[], Coroutine[Any, Any, None]]:
        step = keeper.step

        async def counted_step() -> None:
            is_connected = keeper._broker.connected
            try:
                await step()
            finally:
                if is_connected:
                    looks.add(keeper)

        return counted_step

    town.server.disconnect()
    for keeper in keepers():
        keeper._fleet._clock = lambda: time.monotonic() + 11.0  # above SIE_HEARTBEAT_TIMEOUT_MS
    await until(lambda: all(keeper._since_s is None for keeper in keepers()), "each knows that the broker is lost")
    for keeper in keepers():
        keeper.step = watched(keeper)  # type: ignore[method-assign]
    for gateway in town.gateways:
        gateway.broker.reconnect()
    await until(lambda: set(keepers()) <= looks, "each looks with the broker")
    assert not any(keeper._fleet.healthy() for keeper in keepers())
    worker.broker.reconnect()
    town._observer.reconnect()
    await town.state("active")
    assert await town.events("released") == 0


async def test_a_reservation_that_ends_before_a_gateway_looks_at_it_is_forgotten_there(town: Town) -> None:
    await town.gateways[0].client.post("/v1/pools", json={**SPEC, "name": "first"})
    await until(lambda: [keeper for keeper in keepers() if keeper._is_leader], "a leader")
    (follower,) = (keeper for keeper in keepers() if not keeper._is_leader)
    (gateway,) = (g for g in town.gateways if unchanged_inference_of(g)._pools is follower._record)
    stands, looks, step = asyncio.Event(), asyncio.Event(), follower.step

    async def late() -> None:
        stands.set()
        await looks.wait()
        await step()

    follower.step = late  # type: ignore[method-assign]
    await stands.wait()
    assert (await gateway.client.post("/v1/pools", json=SPEC)).status_code == 201
    await until(lambda: "team" in follower._queue.consumers.streams, "the follower has its record")
    assert (await gateway.client.delete("/v1/pools/team")).status_code == 200
    looks.set()
    await until(lambda: "team" not in follower._queue.consumers.streams, "it is forgotten")
    assert "first" in follower._queue.consumers.streams


async def test_a_worker_that_is_not_ready_keeps_its_reservation_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter of such a worker may be back within seconds."""
    monkeypatch.setattr(pool_reconciler, "UNREADY_S", 2.0)
    patient = {**FAST, **L4, "SIE_HEARTBEAT_TIMEOUT_MS": "30000"}
    async with Town(tmp_path, toy_entry()) as town:
        town.gateways = await town.gateway(**patient), await town.gateway(**patient)
        names = [(await town.worker()).worker for _ in range(2)]
        await town.gateways[0].client.post("/v1/pools", json=SPEC)
        [first] = (await town.state("active"))["status"]["assigned_workers"]
        number = names.index(first["name"])
        await town.adapters[number].stop()
        await until(lambda: town.last_beat(first["name"], ready=False), "a heartbeat that says not ready")
        since_s = asyncio.get_running_loop().time()

        async def is_replaced() -> bool:
            pool = await town.state("active")
            return bool(pool["status"]["assigned_workers"][0]["name"] != first["name"])

        await until_told(is_replaced, "another worker")
        assert asyncio.get_running_loop().time() - since_s >= 1.5
