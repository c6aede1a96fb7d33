"""Where `sie jobs` looks for a cluster, and what `sie serve` hands on to the gateway for the jobs."""

from __future__ import annotations

import pytest
from unit.test_environment import keys_reach


@pytest.mark.parametrize(("urls", "readers"), [(("/a/folder", "gs://rows/x"), {"gateway"}), (("/a/folder",), set())])
def test_keys_of_a_cloud_reach_the_gateway_that_opens_the_bucket(urls: tuple[str, ...], readers: set[str]) -> None:
    keys_reach(readers, jobs_urls=urls)
