"""State that clients can make grow has a bound: each bucket and stream has a row in docs/security.md, whose numbers are
those of the code.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from config_api import ADMIN, Api

from sie_broker.memory import MemoryServer
from sie_cli.keys import MAX_KEYS
from sie_config_service import writes
from sie_config_service.handlers import MAX_BODY_BYTES
from sie_config_service.store import REVISIONS_KEPT
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.wire import topology
from sie_contracts.wire.topology import MAX_RESERVATIONS
from sie_gateway.fleet.pool_rules import MAX_RESERVATIONS_OF_A_KEY
from sie_gateway.operations.pools import MAX_SPEC_BYTES
from sie_sidecar.poison import MAX_MARKS

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## What may grow")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ")
][1:]
TOY: dict[str, Any] = {
    "weights": {"path": "/toy"},
    "family": "toy",
    "bundle": "default",
    "outputs": {"dense": 8},
    "max_tokens": 512,
}


def test_each_bucket_and_stream_has_a_row_with_a_bound() -> None:
    buckets = {value for name, value in vars(topology).items() if name.endswith("_BUCKET")}
    streams = {topology.stream_name("{pool}"), topology.dead_letter_stream("{pool}", replicas=1).name}
    named = {word for _, where, *_ in ROWS for word in re.findall(r"`([^`]+)`", where)}
    assert named == buckets | streams
    assert all(len(row) == 5 and all(row) for row in ROWS)


def test_the_numbers_are_those_of_the_code() -> None:
    bounds = {row[0]: row[3] for row in ROWS}
    for name, *numbers in (
        ("reservations", f"{MAX_RESERVATIONS} in all", f"{MAX_RESERVATIONS_OF_A_KEY} of a key"),
        ("reservations", f"{MAX_SPEC_BYTES >> 10} KiB"),
        ("models and aliases", f"{writes.MAX_IDS:,} ids", f"{writes.MAX_ENTRY_BYTES >> 10} KiB"),
        ("models and aliases", f"{MAX_BODY_BYTES >> 20} MiB"),
        ("history of the catalogue", f"last {REVISIONS_KEPT} revisions"),
        ("keys", f"{MAX_KEYS:,}"),
        ("marks of poison", f"{MAX_MARKS:,}"),
        ("dead letters", f"{topology.DEAD_LETTER_BYTES >> 20} MiB", f"{topology.DEAD_LETTER_AGE_S / 86400:.0f} days"),
    ):
        assert all(number in bounds[name] for number in numbers), (name, numbers)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    bundles, subject = {"default": BundleEntry("default")}, topology.config_subject("default")
    api = await Api(MemoryServer(), bundles, subject, SIE_ADMIN_TOKEN=ADMIN).start()
    yield api
    await api.client.aclose()
    await api.broker.close()


async def test_the_catalogue_has_a_bound_in_ids_and_in_bytes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MAX_IDS", 2)
    for name in ("org/one", "org/two"):
        await api.call("POST", "/v1/configs/models", {"id": name, **TOY}, 201)
    alias = {"id": "search", "alias": "org/one"}
    for more in ({"id": "org/three", **TOY}, alias):
        refusal = await api.call("POST", "/v1/configs/models", more, 409)
        assert "the limit is 2" in str(refusal)
    await api.call("DELETE", "/v1/configs/models/org/two")
    await api.call("POST", "/v1/configs/models", {"id": "org/two", **TOY}, 201)
    large = {"id": "org/two", **TOY, "description": "x" * writes.MAX_ENTRY_BYTES}
    refusal = await api.call("PUT", "/v1/configs/models/org/two", large, 413)
    assert str(writes.MAX_ENTRY_BYTES) in str(refusal)
