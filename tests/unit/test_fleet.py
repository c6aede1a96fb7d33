"""Live workers and the lane of a request: the indexes agree with a scan of all heartbeats, and cost the same in a fleet
of any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until

from sie_broker.memory import MemoryServer
from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Resolved
from sie_contracts.settings import load
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.records import ReservationSpec
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet

TIMEOUT_S = 15.0
SETTINGS = load(environ={}).settings


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def fleet_of(clock: Clock) -> Fleet:
    return Fleet(MemoryServer().connect("gateway"), SETTINGS, clock)


def resolved(residency: str, bundle: str = "default") -> Resolved:
    entry = SimpleNamespace(id="m", machine_profiles=())
    return SimpleNamespace(residency=residency, bundle=bundle, bundles=(bundle,), entry=entry)  # type: ignore[return-value]


STATES = ("loading", "unloading", "loaded", "failed", "available")
names = st.integers(0, 5).map("w{}".format)
models = st.integers(0, 3).map("m{}".format)


@st.composite
def beats(draw: st.DrawFn) -> Heartbeat:
    statuses = draw(
        st.dictionaries(models, st.tuples(st.sampled_from(STATES), st.sampled_from((0.0, 3.0))), max_size=4)
    )
    return Heartbeat(
        draw(names),
        draw(st.sampled_from(("_default", "team"))),
        draw(st.sampled_from(("cpu", "l4"))),
        "default",
        draw(st.booleans()),
        "",
        leaving=draw(st.booleans()),
        models=tuple(ModelStatus(model, state, load_s=load_s) for model, (state, load_s) in statuses.items()),  # type: ignore[arg-type]
    )


@dataclass
class Plain:
    """Results of a scan of all heartbeats."""

    seen: dict[str, tuple[float, Heartbeat]] = field(default_factory=dict)
    hearing_s: float = -math.inf

    def healthy(self, now_s: float) -> list[Heartbeat]:
        sightings = sorted(self.seen.items())
        return [beat for _, (at_s, beat) in sightings if now_s - at_s < TIMEOUT_S and beat.ready and not beat.leaving]

    def expire(self, now_s: float) -> None:
        heard_s = max((at_s for at_s, _ in self.seen.values()), default=now_s)
        if now_s - heard_s >= TIMEOUT_S:
            self.hearing_s = now_s
        self.seen = {
            name: sighting
            for name, sighting in self.seen.items()
            if now_s - max(sighting[0], self.hearing_s) < 10 * TIMEOUT_S
        }

    def starting(self, now_s: float) -> list[Heartbeat]:
        return [
            beat for at_s, beat in self.seen.values() if now_s - at_s < TIMEOUT_S and not (beat.ready or beat.leaving)
        ]

    def of_lane(self, lane: Lane, now_s: float) -> list[Heartbeat]:
        return [beat for beat in self.healthy(now_s) if beat.lane == lane]

    def hosts(self, lane: Lane, model: str, now_s: float) -> list[Heartbeat]:
        return [
            beat
            for beat in self.of_lane(lane, now_s)
            if any(status.model == model and status.state == "loaded" for status in beat.models)
        ]


def test_workers_that_are_silent_because_the_broker_was_away_stay_known() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    first, second = (Heartbeat(name, "_default", "cpu", "default", True, "") for name in ("w0", "w1"))
    fleet.note(first)
    fleet.note(second)
    clock.now_s += 20 * TIMEOUT_S
    fleet.note(first)
    assert ([*fleet.worker_names()], fleet.silent()) == (["w1", "w0"], {second.lane: [second]})
    for _ in range(20):
        clock.now_s += TIMEOUT_S / 2
        fleet.note(first)
    assert [*fleet.worker_names()] == ["w0"]


@given(st.lists(st.tuples(beats(), st.sampled_from((0.0, 1.0, 14.9, 15.0, 151.0))), max_size=20))
@settings(max_examples=60)
def test_the_indexes_say_what_a_look_at_every_heartbeat_says(events: list[tuple[Heartbeat, float]]) -> None:
    clock, plain = Clock(), Plain()
    fleet = fleet_of(clock)
    for beat, passed_s in events:
        fleet.note(beat)
        plain.expire(clock.now_s)
        plain.seen[beat.worker] = (clock.now_s, beat)
        clock.now_s += passed_s
        healthy = plain.healthy(clock.now_s)
        assert fleet.healthy() == healthy
        assert fleet.workers() == [
            (heartbeat, heartbeat in healthy) for _, (_, heartbeat) in sorted(plain.seen.items())
        ]
        for pool in ("_default", "team"):
            for model in ("m0", "m1"):
                serving = [heartbeat for heartbeat in healthy if heartbeat.pool == pool]
                hosts = [host for lane in lanes(pool) for host in plain.hosts(lane, model, clock.now_s)]
                loaded = [heartbeat for heartbeat in serving if heartbeat in hosts]
                expected = min((heartbeat.machine_profile for heartbeat in loaded or serving), default=SETTINGS.profile)
                lane = fleet.lane(resolved(model), pool=pool, machine_profile="", known_pools=("_default", "team"))
                assert lane == Lane(pool, expected, "default")
                assert fleet.of_lane(lane) == plain.of_lane(lane, clock.now_s)
                assert fleet.hosts(lane, model) == plain.hosts(lane, model, clock.now_s)
                beat_states = [(heartbeat, ("loading", "failed")) for heartbeat in plain.starting(clock.now_s)]
                beat_states = sorted(
                    [*beat_states, *((heartbeat, STATES) for heartbeat in healthy)], key=lambda pair: pair[0].worker
                )
                reports = [
                    (heartbeat, status)
                    for heartbeat, states in beat_states
                    for status in heartbeat.models
                    if status.model == model and status.state in states
                ]
                assert fleet.model(model)[1] == reports
                is_loading = any(
                    status.state == "unloading" or (status.model == model and status.state == "loading")
                    for heartbeat in plain.of_lane(lane, clock.now_s)
                    for status in heartbeat.models
                )
                assert (fleet.loading_left_s(lane, model) is not None) == is_loading


def lanes(pool: str) -> list[Lane]:
    return [Lane(pool, profile, "default") for profile in ("cpu", "l4")]


# the machine profile of a request that names none

CONFIGURED = "cpu,l4,a100-80gb"


def placed(
    live: dict[str, bool],
    *,
    entry: tuple[str, ...] = (),
    named: str = "",
    pool: str = "_default",
    bundle: str = "default",
    **environ: str,
) -> str:
    """The machine profile of a request. `live`: the kinds that have a worker, and whether it has the model loaded."""
    spec = ReservationSpec("team", {"h100": 1})
    fleet = Fleet(
        MemoryServer().connect("gateway"),
        load(environ={"SIE_GATEWAY_CONFIGURED_GPUS": CONFIGURED, **environ}).settings,
        spec=lambda name: spec if name == "team" else None,
    )
    for profile, is_loaded in live.items():
        statuses = (ModelStatus("m", "loaded"),) if is_loaded else ()
        fleet.note(Heartbeat(profile, pool, profile, bundle, True, "", models=statuses))
    resolved_model = resolved("m", bundle)
    resolved_model.entry.machine_profiles = entry  # type: ignore[misc]  # of the plain object that stands for an entry
    return fleet.lane(
        resolved_model, pool=pool, machine_profile=named, known_pools=("_default", "team")
    ).machine_profile


@pytest.mark.parametrize(
    ("live", "options", "expected"),
    [
        # without a default: a profile that has the model loaded, else one with a live worker, else the first one
        ({}, {}, "cpu"),
        ({"a100-80gb": False, "l4": False}, {}, "l4"),
        ({"a100-80gb": True, "l4": False}, {}, "a100-80gb"),
        ({"a100-80gb": True, "cpu": True}, {}, "cpu"),
        # the default gets every request that names no other profile, also without a live worker
        ({}, {"SIE_MACHINE_PROFILE": "l4"}, "l4"),
        ({"cpu": True, "a100-80gb": True}, {"SIE_MACHINE_PROFILE": "l4"}, "l4"),
        # the default does not count for another bundle, nor if the list lacks it
        ({"cpu": False}, {"SIE_MACHINE_PROFILE": "l4", "bundle": "docs"}, "cpu"),
        ({"cpu": False}, {"SIE_MACHINE_PROFILE": "other"}, "cpu"),
        # the profiles of the entry come before the default and before live workers
        ({"cpu": True, "l4": True}, {"SIE_MACHINE_PROFILE": "l4", "entry": ("a100-80gb",)}, "a100-80gb"),
        ({"cpu": False}, {"entry": ("a100-80gb", "l4")}, "a100-80gb"),
        ({"l4": False}, {"entry": ("a100-80gb", "l4")}, "l4"),
        ({"l4": False, "a100-80gb": False}, {"entry": ("a100-80gb", "l4")}, "a100-80gb"),
        ({"l4": True, "a100-80gb": False}, {"entry": ("a100-80gb", "l4")}, "l4"),
        # a spot profile stands for the same kind of node
        ({}, {"entry": ("l4",), "SIE_GATEWAY_CONFIGURED_GPUS": "cpu,L4-spot"}, "l4-spot"),
        ({"l4-spot": False}, {"entry": ("l4",), "SIE_GATEWAY_CONFIGURED_GPUS": "cpu,l4,l4-spot"}, "l4-spot"),
        ({}, {"entry": ("l4",), "named": "l4"}, "l4"),
        # a reservation has the profiles of its specification
        ({}, {"SIE_MACHINE_PROFILE": "l4", "pool": "team"}, "h100"),
        ({}, {"entry": ("h100",), "pool": "team"}, "h100"),
    ],
)
def test_a_request_goes_where_its_model_and_the_operator_want_it(
    live: dict[str, bool], options: dict[str, Any], expected: str
) -> None:
    assert placed(live, **options) == expected


@pytest.mark.parametrize(("own", "pool"), [("blue", "blue"), ("default", "_default"), ("_default", "_default")])
def test_a_request_that_names_no_pool_goes_to_that_of_the_installation(own: str, pool: str) -> None:
    fleet = Fleet(MemoryServer().connect("gateway"), load(environ={"SIE_POOL": own}).settings)
    for name in ("_default", "blue", "green"):
        fleet.note(Heartbeat(name, name, "cpu", "default", True, ""))
    lanes = [
        fleet.lane(resolved("m"), pool=named, machine_profile="", known_pools=("green",)) for named in ("", "green")
    ]
    assert lanes == [Lane(pool, "cpu", "default"), Lane("green", "cpu", "default")]


@pytest.mark.parametrize(
    ("options", "param", "names"),
    [
        ({"entry": ("l4",), "named": "cpu"}, "X-SIE-MACHINE-PROFILE", "not on cpu"),
        ({"entry": ("l4",), "pool": "team"}, "X-SIE-Pool", "this pool has h100"),
        ({"entry": ("h100",)}, "model", "this gateway has cpu, l4, a100-80gb"),
    ],
)
def test_what_the_entry_of_a_model_excludes_is_refused_by_the_field_that_asks_for_it(
    options: dict[str, Any], param: str, names: str
) -> None:
    with pytest.raises(InvalidInput, match="machine_profiles of its entry") as caught:
        placed({"cpu": False}, **options)
    assert (caught.value.reason, caught.value.param) == ("machine_profile_excluded", param)
    assert names in caught.value.message
    assert caught.value.extras["machine_profiles"] == list(options["entry"])


@pytest.mark.parametrize("field", ["worker", "machine_profile", "bundle"])
async def test_a_heartbeat_with_an_empty_name_is_ignored(field: str) -> None:
    """The name is a part of subjects and keys, which must not be empty: the tasks that build them would end."""
    server = MemoryServer()
    fleet = Fleet(server.connect("gateway"), SETTINGS)
    await fleet.start()
    beat = Heartbeat("w0", "_default", "cpu", "default", True, "")
    worker = server.connect("worker")
    for sent in (msgspec.structs.replace(beat, **{field: ""}), beat):
        await worker.send(topology.health_subject("w0"), messages.encode(sent))
    await until(fleet.workers, "a heartbeat")
    assert [seen for seen, _ in fleet.workers()] == [beat]
    assert fleet.version == 1, "the number of heartbeats"
