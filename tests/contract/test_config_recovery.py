"""Two replicas of the config service in this process, and a real nats-server that keeps the catalogue in memory and
restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from inprocess import settings_of
from nats_server import NatsServer

from sie_cli.serve.ports import free_port
from sie_config_service.process import run
from sie_runtime.process import Stop

WITHIN_S = 30.0
ADMIN = "admin-token-of-a-test"
MODELS = "/v1/configs/models"
ENTRY = """
id: {}
weights: {{package: x}}
family: text-encoder
outputs: {{dense: 4}}
max_tokens: {}
"""


class Site:
    """The broker, the folder of models, and a client for each replica."""

    def __init__(self, folder: Path, broker: NatsServer, clients: list[httpx.AsyncClient]) -> None:
        self.folder = folder
        self.broker = broker
        self.clients = clients

    def put(self, model: str, max_tokens: int) -> None:
        (self.folder / f"{model.replace('/', '-')}.yaml").write_text(ENTRY.format(model, max_tokens))

    async def restart(self) -> None:
        await asyncio.to_thread(self.broker.kill)
        await asyncio.to_thread(self.broker.start)

    async def catalogue(self, number: int) -> tuple[str, dict[str, int]] | None:
        """Return the epoch and the `max_tokens` of each model as a replica exports them, or None while it refuses."""
        answer = await self.clients[number].get("/v1/configs/export")
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 503:
            return None
        export = answer.json()
        return export["epoch"], {model["model_id"]: model["model_config"]["max_tokens"] for model in export["models"]}

    async def shows(self, models: dict[str, int], before: str = "") -> str:
        """Wait until both replicas export these models and the same epoch, of another bucket than the epoch `before`.

        Each export of the new bucket meanwhile must have all models. Return the epoch.
        """
        catalogues: Any = None
        async with asyncio.timeout(WITHIN_S):
            while True:
                catalogues = [await self.catalogue(number) for number in range(len(self.clients))]
                new = [answer for answer in catalogues if answer is not None and created(answer[0]) != created(before)]
                if len(new) == len(catalogues) and len(set(map(repr, new))) == 1 and new[0][1] == models:
                    return new[0][0]
                assert all(set(answer[1]) >= set(models) for answer in new), catalogues
                await asyncio.sleep(0.02)

    async def call(self, method: str, path: str, body: Any, number: int = 0) -> int:
        """Send a write and return the revision that it made."""
        answer = await self.clients[number].request(method, path, json=body)
        assert answer.status_code in (200, 201), answer.text
        revision: int = answer.json()["revision"]
        return revision


def created(epoch: str) -> str:
    return epoch.rpartition(":")[0]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    folder = tmp_path / "models"
    folder.mkdir()
    stop, ports = Stop(), [free_port(), free_port()]
    async with contextlib.AsyncExitStack() as stack:
        broker = stack.enter_context(NatsServer(tmp_path / "broker"))
        site = Site(folder, broker, [])
        site.put("org/a", 8)
        site.put("org/b", 8)
        settings = settings_of(
            SIE_NATS_URL=broker.url,
            SIE_STREAM_STORAGE="memory",
            SIE_MODELS_DIR=str(folder),
            SIE_MODEL_FILTER="org/a,org/b",
            SIE_ADMIN_TOKEN=ADMIN,
        )
        for port in ports:
            client = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {ADMIN}"},
                timeout=WITHIN_S,
                trust_env=False,
            )
            site.clients.append(await stack.enter_async_context(client))
        runs = [asyncio.create_task(run(settings, stop, host="127.0.0.1", port=port)) for port in ports]
        try:
            async with asyncio.timeout(WITHIN_S):
                await asyncio.gather(*map(ready, site.clients))
            yield site
        finally:
            stop.request()
            assert await asyncio.wait_for(asyncio.gather(*runs), WITHIN_S) == [0, 0]


async def ready(client: httpx.AsyncClient) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/readyz")).status_code == 200:
                return
        await asyncio.sleep(0.02)


async def test_a_catalogue_that_was_lost_with_its_broker_is_seeded_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice a model is changed over the API and the broker restarts. Both replicas then serve the folder's models
    again, log the loss, and take writes. No replica reverts a write that comes after the loss.
    """
    caplog.set_level(logging.INFO, "sie.config")
    epoch = await site.shows({"org/a": 8, "org/b": 8})
    for tokens in (16, 32):
        caplog.clear()
        assert await site.call("PATCH", f"{MODELS}/org/a", {"max_tokens": tokens}) == 2
        await site.shows({"org/a": tokens, "org/b": 8})
        await site.restart()
        epoch = await site.shows({"org/a": 8, "org/b": 8}, epoch)
        assert caplog.text.count("the broker lost the catalogue") == 2
        assert caplog.text.count("1 models that were written over the API were lost with the catalogue; ") == 2
    assert await site.call("PATCH", f"{MODELS}/org/a", {"max_tokens": 64}, number=1) == 2
    site.put("org/b", 9)
    await site.shows({"org/a": 64, "org/b": 9})


async def test_what_is_written_before_a_replica_has_seeded_again_stays(site: Site) -> None:
    """After a restart of the broker both replicas get the same write until each has taken it. The write stays."""
    epoch = await site.shows({"org/a": 8, "org/b": 8})
    await site.restart()

    async def write(client: httpx.AsyncClient) -> None:
        while True:
            if (await client.patch(f"{MODELS}/org/a", json={"max_tokens": 64})).status_code == 200:
                return
            await asyncio.sleep(0.005)

    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*map(write, site.clients))
    await site.shows({"org/a": 64, "org/b": 8}, epoch)


async def test_a_folder_that_is_broken_meanwhile_is_seeded_as_it_was(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A file breaks and the broker restarts. The last good models are served, and later the repaired file is
    applied.
    """
    epoch = await site.shows({"org/a": 8, "org/b": 8})
    (site.folder / "org-b.yaml").write_text("id: [\n")
    await site.restart()
    await site.shows({"org/a": 8, "org/b": 8}, epoch)
    assert "The catalogue gets the models of the last successful read" in caplog.text
    assert "org-b.yaml: $ (line 2): not YAML" in caplog.text
    site.put("org/b", 9)
    await site.shows({"org/a": 8, "org/b": 9})
