"""Health of the worker: heartbeats, sent regularly and after each change, and the reason why it is not ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

import sie_contracts
from sie_broker import BrokerError, Bus, CoreMessage
from sie_contracts.errors import SIEError
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc, messages, topology
from sie_contracts.wire.heartbeats import ON_DISK, DeviceBeat, Heartbeat
from sie_contracts.wire.topology import Lane
from sie_runtime.connection import because
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Trouble, wait_set
from sie_sidecar.link import AdapterGone, AdapterLink, AdapterLinks
from sie_sidecar.metrics import AdapterCounts, oom_counts, tower_counts
from sie_sidecar.worker import Worker
from sie_store.weights.cache import LocalCache
from sie_store.weights.sources import on_disk

_DISK_EVERY_S = 30.0
_logger = logging.getLogger("sie.sidecar.health")


class WorkerHealth:
    """Heartbeats and readiness of one worker. `changed` sends a heartbeat at once, so gateways know that a model is
    loaded before they receive its first results. `catalogue_changed` sends one after the disk was read again: changes
    that arrive in the meantime share it, because a bulk write of models changes the catalogue many times a second.
    """

    def __init__(
        self, settings: Settings, bus: Bus, lane: Lane, worker_id: str, links: AdapterLinks, feed: CatalogueFeed
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._lane = lane
        self._id = worker_id
        self.links = links
        self.feed = feed
        self.remedies, self.towers = AdapterCounts(oom_counts), AdapterCounts(tower_counts)
        self._trouble = Trouble(_logger, "heartbeats cannot be sent")
        # `run` waits for the first, `observe` for the second: each clears its own
        self._change, self._unread = asyncio.Event(), asyncio.Event()
        self.worker: Worker | None = None
        self.leaving = False
        self.asks = False  # true if the worker requests its pool from gateways
        self.preloading = ""
        self._listens = False
        self._on_disk: tuple[str, ...] = ()
        # time of the last check of the disk, and epoch (version) of the catalogue at that time
        self._examined: tuple[float, str] | None = None

    def changed(self) -> None:
        self._change.set()
        self._unread.set()

    def catalogue_changed(self) -> None:
        self._unread.set()

    def not_ready(self) -> str | None:
        if self.leaving:
            return "draining"
        if not self.links.connected:
            # only the log names the socket: every client of the metrics port can read this text
            return "no adapter is connected"
        if not self.links.is_fresh():
            return "the adapter does not answer"
        if not self._bus.connected:
            return "no connection to the broker"
        if not self.feed.first.is_set():
            return "the catalogue is not loaded"
        if self.worker is None:
            return because("starting", self._bus)
        if self.worker.source.pool is None:
            return because("no pool is open to this worker", self._bus)
        return f"preloading {self.preloading}" if self.preloading else None

    @property
    def descriptions(self) -> dict[int, ipc.Description]:
        """Return the description of each connected adapter, by number of its device."""
        return {link.number: link.description for link in self.links if link.connected and link.description is not None}

    def device_name(self, link: AdapterLink) -> str:
        """Return the device name that the link's adapter reported last; empty before its first report. If several
        devices have the same name, add the number of the device.
        """
        names = [described.device for adapter in self.links if (described := adapter.description) is not None]
        name = link.description.device if link.description else ""
        return f"{name}:{link.number}" if names.count(name) > 1 else name

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs: 0 on a CPU, the number of devices if there are several, and otherwise the setting
        SIE_GPU_COUNT.
        """
        first = self.links[0].description
        if first is not None and first.device == "cpu":
            return 0
        return len(self.links) if len(self.links) > 1 else self._settings.gpu_count

    def memory(self) -> tuple[int, int]:
        """Return the used and total bytes of memory of the connected devices. CPU devices share the memory of the
        machine, so this memory counts once.
        """
        shown = list(self.descriptions.values())
        if any(description.device == "cpu" for description in shown):
            shown = shown[:1]
        return sum(device.memory_used_bytes for device in shown), sum(device.memory_total_bytes for device in shown)

    def devices(self) -> tuple[DeviceBeat, ...]:
        """Return the state of each device. Empty for one device: other fields of the heartbeat describe this device."""
        if len(self.links) == 1:
            return ()
        states = []
        for link in self.links:
            description = self.descriptions.get(link.number)
            models = self.worker.models.devices[link.number].all() if self.worker else []
            states.append(
                DeviceBeat(
                    self.device_name(link),
                    ready=description is not None and link.is_fresh(),
                    gpu=description.gpu if description else "",
                    memory_used_bytes=description.memory_used_bytes if description else 0,
                    memory_total_bytes=description.memory_total_bytes if description else 0,
                    queue_depth=sum(hosted.held for hosted in models),
                    models=tuple(hosted.name for hosted in models if hosted.state == "loaded"),
                )
            )
        return tuple(states)

    def heartbeat(self) -> Heartbeat:
        descriptions = self.descriptions
        first = next(iter(descriptions.values()), None)
        memory_used_bytes, memory_total_bytes = self.memory()
        worker = self.worker
        held_cost, oldest_s = worker.inventory.ages() if worker else (0, {})
        statuses = (
            tuple(
                msgspec.structs.replace(status, oldest_s=oldest_s.get(status.model, 0.0))
                for status in worker.models.statuses()
            )
            if worker
            else ()
        )
        credit_cost, credit_items = worker.queues.capacity() if worker else (0, 0)
        ahead_s = worker.broker_clock.ahead_s() if worker else None
        reason = self.not_ready()
        return Heartbeat(
            worker=self._id,
            pool=worker.source.lane.pool if worker else self._lane.pool,
            own_pool=self._lane.pool if self.asks else "",
            machine_profile=self._lane.machine_profile,
            bundle=self._lane.bundle,
            ready=reason is None,
            unready=reason or "",
            version=sie_contracts.__version__,
            leaving=self.leaving,
            gpu_count=self.gpu_count,
            gpu=self._settings.gpu_type or (first.gpu if first else ""),
            device=",".join(self.device_name(self.links[number]) for number in descriptions),
            memory_used_bytes=memory_used_bytes,
            memory_total_bytes=memory_total_bytes,
            queue_depth=worker.depth if worker else 0,
            config_epoch=self.feed.catalogue.epoch,
            models=statuses,
            slots=worker.models.slots() if worker else 0,
            rate=worker.queues.tokens_per_s if worker else 0.0,
            held_cost=held_cost,
            credit_cost=credit_cost,
            credit_items=credit_items,
            batch_cost=worker.queues.limits.cost if worker else 0,
            pipeline=worker.queues.depth if worker else 0,
            clock_ahead_s=None if ahead_s is None else round(ahead_s, 3),
            listens=self._listens,
            on_disk=self._on_disk,
            devices=self.devices(),
        )

    async def listen(self) -> None:
        """Subscribe to the subject at which gateways check whether this worker is connected, and send a heartbeat after
        each reconnect. Raises BrokerError.
        """
        await self._bus.subscribe(topology.assigned_subject(self._id), self._on_asked)
        self._bus.on_reconnect(self._on_reconnect)
        self._listens = True

    async def _on_reconnect(self) -> None:
        self.changed()

    async def _on_asked(self, message: CoreMessage) -> None:
        """Ignore the message: a gateway only checks that the subject has a subscriber."""

    async def publish(self) -> None:
        with self._trouble.logged(BrokerError):
            await self._bus.send(topology.health_subject(self._id), messages.encode(self.heartbeat()))

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._change.clear()
            await self.publish()
            await wait_set(self._change, self._settings.health_publish_interval_ms / 1000)

    async def observe(self) -> None:
        """Read the memory of adapters and the models on disk for the next heartbeat, until cancelled. `run` does not
        read them, because a slow adapter or disk must not delay a heartbeat.
        """
        while True:
            self._unread.clear()
            await self.refresh()
            await self._examine_disk()
            await wait_set(self._unread, self._settings.health_publish_interval_ms / 1000)

    async def _examine_disk(self) -> None:
        """Find out which models are in the disk cache, every _DISK_EVERY_S seconds and after catalogue changes."""
        now_s, catalogue = time.monotonic(), self.feed.catalogue
        if self._examined is not None:
            examined_s, epoch = self._examined
            if epoch == catalogue.epoch and now_s - examined_s < _DISK_EVERY_S:
                return
        self._examined = (now_s, catalogue.epoch)
        entries = list(catalogue.entries.values())
        models = await asyncio.to_thread(on_disk, entries, LocalCache(self._settings.cache_folder))
        self._on_disk = models[:ON_DISK]
        self._change.set()

    async def refresh(self) -> None:
        """Read the description of each connected adapter, with its used memory. A failed read changes nothing."""
        connected = [link for link in self.links if link.connected]
        if len(connected) > 1:  # read concurrently: an adapter that hangs must not delay the others
            await asyncio.gather(*(self._refresh(link) for link in connected))
            return
        for link in connected:
            await self._refresh(link)

    async def _refresh(self, link: AdapterLink) -> None:
        with contextlib.suppress(AdapterGone, SIEError):
            if (description := await link.describe()) is not None:
                self.remedies.update(description, link.number)
                self.towers.update(description, link.number)
