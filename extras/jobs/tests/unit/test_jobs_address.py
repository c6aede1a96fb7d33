"""Where `sie jobs` looks for a cluster, and what `sie serve` hands on to the gateway for the jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.test_command_options import says_how_to_start
from unit.test_environment import keys_reach


def test_without_a_server_the_command_says_that_none_runs_and_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says_how_to_start("jobs list", tmp_path, monkeypatch)


@pytest.mark.parametrize(("urls", "readers"), [(("/a/folder", "gs://rows/x"), {"gateway"}), (("/a/folder",), set())])
def test_keys_of_a_cloud_reach_the_gateway_that_opens_the_bucket(urls: tuple[str, ...], readers: set[str]) -> None:
    keys_reach(readers, jobs_urls=urls)
