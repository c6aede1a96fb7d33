"""State that clients can make grow has a bound: each bucket and stream has a row in docs/security.md, whose numbers are
those of the code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from config_api import ADMIN, Api

from sie_broker.memory import MemoryServer
from sie_config_service import writes
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.wire import topology

TOY: dict[str, Any] = {
    "weights": {"path": "/toy"},
    "family": "toy",
    "bundle": "default",
    "outputs": {"dense": 8},
    "max_tokens": 512,
}


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
