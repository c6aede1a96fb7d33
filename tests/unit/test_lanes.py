"""The lanes of tests: a lane with a marker collects only the files that contain this marker."""

from __future__ import annotations

from pathlib import Path

import lanes
import pytest

TESTS = Path(__file__).parents[1]
MARKED = [lane for lane in lanes.LANES if lane.marker]


@pytest.mark.parametrize("lane", MARKED, ids=lambda lane: lane.name)
def test_a_marker_is_given_in_the_file_of_its_tests(lane: lanes.Lane) -> None:
    """The lane would not find tests that get the marker from another file."""
    own = Path(__file__)
    elsewhere = [
        path.name
        for path in TESTS.rglob("*.py")
        if path != own and not path.name.startswith("test_") and f"mark.{lane.marker}" in path.read_text("utf-8")
    ]
    assert elsewhere == []
    assert len(lane.files()) > 1


def test_no_marker_is_added_while_tests_are_collected() -> None:
    """Tests of GPUs, which no lane has, are skipped by their folder."""
    own = Path(__file__)
    files = [path for path in TESTS.rglob("*.py") if path != own and not path.is_relative_to(TESTS / "gpu")]
    assert [path.name for path in files if "add_marker" in path.read_text("utf-8")] == []


def test_what_is_asked_for_takes_the_place_of_the_files() -> None:
    (lane, *_) = MARKED
    assert lanes.command(lane, ["-k", "name"])[-2:] == ["-k", "name"]
    assert lanes.command(lane, [])[-1] == lane.files()[-1]


def test_a_long_test_is_in_one_of_the_long_lanes_and_told_by_its_name() -> None:
    """The long lanes collect all folders of tests."""
    commands = [lanes.command(lane, []) for lane in lanes.LONG]
    assert [argv[argv.index("-m", 3) + 1] for argv in commands] == [
        "(long or hypothesis) and not serial",
        "(long or hypothesis) and serial",
    ]
    for argv in commands:
        assert {"-v", "--hypothesis-profile=long"} <= set(argv)
        assert argv[-2:] == ["tests", "extras"]


def test_a_group_is_in_the_id_by_which_processes_are_given_tests(request: pytest.FixtureRequest) -> None:
    """Without the group, several processes may get tests of one file, and each would start the cluster of the file."""
    assert request.node.nodeid.endswith("@test_lanes") == getattr(request.config.option, "loadgroup", False)
