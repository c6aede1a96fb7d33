"""Names at the broker: injective, legal, and disjoint between lanes."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_broker.memory import matches, overlap
from sie_contracts.wire import topology
from sie_contracts.wire.topology import (
    Lane,
    config_subject,
    health_subject,
    pool_name,
    token,
    work_consumer,
    work_stream,
)

# any Unicode that UTF-8 can hold, and names that are likely to collide
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.text("aA/_-.:~ é*>2f", min_size=1, max_size=12),
    st.sampled_from(["a/b", "a__b", "a_2fb", "a.b", "a b", "A/b", "a//b", "_", "__", "a_", "_a"]),
)
POOLS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=63).map(pool_name)
LANES = st.builds(Lane, POOLS, NAMES, NAMES)
PRIORITIES = st.sampled_from(["interactive", "bulk"])


def untoken(text: str) -> str:
    """Return the name of a token. Nothing in the product needs this inverse."""
    pieces = re.findall(r"(?:_[0-9a-f]{2})+|[^_]+", text)
    return "".join(bytes.fromhex(piece.replace("_", "")).decode() if piece[0] == "_" else piece for piece in pieces)


@given(NAMES)
def test_a_token_keeps_its_name(name: str) -> None:
    """An encoding that can be read back is injective: different names have different tokens."""
    assert untoken(token(name)) == name


@given(NAMES)
def test_a_token_is_one_legal_word_in_a_subject_and_in_a_name(name: str) -> None:
    """A token has no dot, space, wildcard or slash, and no double underscore, which separates tokens."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+", token(name))
    assert "__" not in token(name)
    assert not token(name).endswith("_")


@given(LANES, PRIORITIES, NAMES, LANES, PRIORITIES, NAMES)
def test_consumers_of_different_work_never_share_a_name_or_a_message(
    lane: Lane, priority: str, model: str, other_lane: Lane, other_priority: str, other_model: str
) -> None:
    """Filters are disjoint by construction."""
    consumer, other_consumer = (
        work_consumer(lane, priority, model, 10),
        work_consumer(other_lane, other_priority, other_model, 10),
    )
    same = (lane, priority, model) == (other_lane, other_priority, other_model)
    assert ((consumer.stream, consumer.name) == (other_consumer.stream, other_consumer.name)) == same
    assert (consumer.subject == other_consumer.subject) == same
    assert overlap(consumer.subject, other_consumer.subject) == same


@given(LANES, LANES, PRIORITIES, NAMES)
def test_the_prefix_of_a_lane_begins_the_names_of_its_consumers_and_of_no_others(
    lane: Lane, second_lane: Lane, priority: str, model: str
) -> None:
    name = work_consumer(second_lane, priority, model, 10).name
    assert name.startswith(lane.consumer_prefix()) == (
        (lane.machine_profile, lane.bundle) == (second_lane.machine_profile, second_lane.bundle)
    )


@given(LANES, PRIORITIES, NAMES)
def test_names_and_subjects_are_legal_at_the_broker(lane: Lane, priority: str, model: str) -> None:
    consumer = work_consumer(lane, priority, model, 10)
    stream = work_stream(lane.pool, storage="file", replicas=1, max_bytes=-1, max_age_s=0)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", consumer.name)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", stream.name)
    assert consumer.stream == stream.name
    for subject in (consumer.subject, config_subject(lane.bundle), health_subject(lane.machine_profile)):
        assert all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in subject.split("."))
    assert matches(stream.subjects[0], consumer.subject)


@given(LANES, PRIORITIES, NAMES)
def test_names_are_short_enough_for_a_folder_at_the_broker(lane: Lane, priority: str, model: str) -> None:
    assert len(work_consumer(lane, priority, model, 10).name) <= 180


@given(LANES, PRIORITIES, NAMES, LANES, PRIORITIES, NAMES)
def test_a_slot_takes_its_models_and_nothing_of_any_other_consumer(
    lane: Lane, priority: str, model: str, other_lane: Lane, other_priority: str, other_model: str
) -> None:
    """The slot and the own consumer of a model may hold messages at once, so their filters must be disjoint."""
    slot, own = (
        topology.slot_consumer(lane, priority, model, 10),
        work_consumer(other_lane, other_priority, other_model, 10),
    )
    assert not overlap(slot.subject, own.subject)
    assert (slot.stream, slot.name) != (own.stream, own.name)
    assert slot.name.startswith(lane.consumer_prefix())
    assert topology.is_slot(slot.name)
    assert not topology.is_slot(own.name)
    assert matches(slot.subject, topology.slot_subject(lane, priority, model))
    assert matches(f"sie.work.{lane.pool}.>", slot.subject)
    second = topology.slot_consumer(other_lane, other_priority, other_model, 10)
    assert (
        (slot.subject == second.subject)
        == ((slot.stream, slot.name) == (second.stream, second.name))
        == overlap(slot.subject, second.subject)
    )


@given(LANES, PRIORITIES, st.one_of(NAMES, st.text("ab/é", min_size=60, max_size=300)))
def test_a_subject_says_which_consumer_serves_it(lane: Lane, priority: str, model: str) -> None:
    """This includes long names, which are cut once in the subject and once more in the name."""
    head = f"{lane.consumer_prefix()}{priority}__"
    whole = topology._bounded(token(model), 180 - len(head))
    assert topology.consumer_of(topology.work_subject(lane, priority, model), 10).name == head + whole
    slot = topology.consumer_of(topology.slot_subject(lane, priority, model), 10)
    assert slot == topology.slot_consumer(lane, priority, model, 10)
    assert slot.name.startswith(f"{head}_s")


@pytest.mark.parametrize(
    "subject",
    ["sie.work.p.m.b.bulk", "sie.work.p.m.b.bulk.a.b", "sie.work.p.m.b.bulk._s1", "sie.other.p.m.b.bulk.a", "a"],
)
def test_a_subject_of_another_form_has_no_consumer(subject: str) -> None:
    with pytest.raises(ValueError, match="is not a subject of work"):
        topology.consumer_of(subject, 10)


def test_slots_are_filled_evenly() -> None:
    lane = Lane("_default", "l4", "default")
    slots = [topology.slot_subject(lane, "bulk", f"org/model-{number}").split(".")[6] for number in range(3200)]
    counts = [slots.count(slot) for slot in set(slots)]
    assert len(counts) == topology.SLOTS
    assert min(counts) > 140
    assert max(counts) < 260


@pytest.mark.parametrize("size", [33, 48, 49, 100, 180, 255])
def test_long_names_are_cut_and_stay_different(size: int) -> None:
    """A cut name ends in a digest of the whole name."""
    long = [f"{'m' * (size - 1)}{end}" for end in "ab"]
    lanes = [Lane("_default", profile, bundle) for profile in long for bundle in long]
    assert len({lane.consumer_prefix() for lane in lanes}) == 4
    consumers = [work_consumer(lane, "bulk", model, 10) for lane in lanes for model in long]
    assert len({consumer.name for consumer in consumers}) == len({consumer.subject for consumer in consumers}) == 8


def test_pools_are_lower_case_and_default_is_an_alias() -> None:
    assert [pool_name(name) for name in ("default", "_default", "Default", "GPU-a_1")] == [
        "_default",
        "_default",
        "_default",
        "gpu-a_1",
    ]


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a/b", "a>", "*", "é", "x" * 64, "a\n"])
def test_a_pool_that_no_subject_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 63 letters"):
        pool_name(name)
