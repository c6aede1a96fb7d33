"""Heartbeats of workers and announcements of gateways. They show which processes are alive, and which epoch (state) of
the catalogue each process has reached.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TypeVar

from sie_broker import BrokerError, Bus, CoreMessage
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import heartbeats, topology
from sie_contracts.wire.heartbeats import GatewayBeat, Heartbeat, ModelStatus
from sie_runtime.process import Stop, retry

_logger = logging.getLogger("sie.config")
B = TypeVar("B", Heartbeat, GatewayBeat)


class CatalogueReaders:
    """Last heartbeat of each worker and last announcement of each gateway, if at most `timeout_s` seconds old."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[str, tuple[float, Heartbeat]] = {}
        self._gateways: dict[str, tuple[float, GatewayBeat]] = {}
        self.failed = asyncio.Event()  # set when a heartbeat reports a failed load of a model

    async def follow(self, bus: Bus, stop: Stop) -> None:
        """Subscribe to heartbeats and announcements. Retry each until the broker accepts it, or until `stop`."""
        for subject, handler in (
            (topology.HEALTH_SUBJECT, self._on_heartbeat),
            (topology.GATEWAY_SUBJECT, self._on_gateway),
        ):
            await retry(
                functools.partial(bus.subscribe, f"{subject}.*", handler),
                errors=(BrokerError,),
                stop=stop,
                logger=_logger,
                task=f"listening to {subject}",
            )

    async def _on_heartbeat(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_heartbeat(message.data)
        except UNDECODABLE as error:
            _logger.warning("a worker's heartbeat cannot be decoded and is ignored: %s", error)
        else:
            self.note(beat)

    async def _on_gateway(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_gateway(message.data)
        except UNDECODABLE as error:
            _logger.warning("a gateway's announcement cannot be decoded and is ignored: %s", error)
        else:
            self.note_gateway(beat)

    def note(self, beat: Heartbeat) -> None:
        self._seen = self._fresh(self._seen)
        self._seen[beat.worker] = (time.monotonic(), beat)
        if any(status.state == "failed" for status in beat.models):
            self.failed.set()

    def note_gateway(self, beat: GatewayBeat) -> None:
        self._gateways = self._fresh(self._gateways)
        self._gateways.pop(beat.gateway, None)
        if not beat.leaving:
            self._gateways[beat.gateway] = (time.monotonic(), beat)

    def _fresh(self, sightings: dict[str, tuple[float, B]]) -> dict[str, tuple[float, B]]:
        now_s = time.monotonic()
        return {name: sighting for name, sighting in sightings.items() if now_s - sighting[0] < self._timeout_s}

    def statuses(self) -> list[ModelStatus]:
        return [status for _, beat in self._fresh(self._seen).values() for status in beat.models]

    def of_bundle(self, bundle: str) -> list[Heartbeat]:
        """Return the last heartbeat of each worker that serves `bundle` and accepts work."""
        beats = (beat for _, beat in self._fresh(self._seen).values())
        return [beat for beat in beats if beat.bundle == bundle and beat.ready and not beat.leaving]

    def gateways(self) -> dict[str, str]:
        """Return the epoch of the catalogue that each gateway has, by the gateway's name."""
        return {name: beat.config_epoch for name, (_, beat) in self._fresh(self._gateways).items()}
