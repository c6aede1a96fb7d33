"""Load of the devices behind a source while it is measured.

gateway, /ws/status ──► frames of a worker ──► Device
NVML, where the gateway is on this machine ──► energy
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sie_contracts.settings import Secret

EVERY_S = 1.0
FRAME_S = 5.0  # for a frame to come


@dataclass(frozen=True)
class DeviceUsage:
    """Means over the window of a worker's devices; None where nothing tells them. `busy_percent`: on a GPU as NVML
    counts it, on a CPU the use of all its cores by any process. `joules`: energy of the GPUs of this machine.
    """

    name: str = ""
    busy_percent: float | None = None
    memory_bytes: int | None = None
    joules: float | None = None


class UsageWatch(Protocol):
    async def run(self, start_s: float, end_s: float) -> DeviceUsage:
        """Look from `start_s` to `end_s`, times of `time.perf_counter`."""


class WorkerWatch:
    """The devices of the worker whose frames the gateway at `url` shows."""

    def __init__(self, url: str, token: Secret | None, *, is_local: bool) -> None:
        self._url, self._token, self._is_local = url, token, is_local

    async def run(self, start_s: float, end_s: float) -> DeviceUsage:
        from sie_client import SIEAsyncClient
        from sie_client.errors import SIEError

        frames: list[dict[str, Any]] = []
        energy = Energy() if self._is_local else None
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        before = energy.joules() if energy else None
        token = self._token.reveal() if self._token else None
        async with SIEAsyncClient(self._url, api_key=token, wait_for_capacity=False) as client:
            while (now_s := time.perf_counter()) < end_s:
                # a connection for each frame: five a second with all models of a catalogue would be load of their own
                try:
                    async with asyncio.timeout(FRAME_S), contextlib.aclosing(client.watch("/ws/status")) as messages:
                        frames.append(await anext(messages))
                except (SIEError, TimeoutError):
                    break  # a gateway that shows no worker: nothing is known
                await asyncio.sleep(max(0.0, min(now_s + EVERY_S, end_s) - time.perf_counter()))
        await asyncio.sleep(max(0.0, end_s - time.perf_counter()))
        after = energy.joules() if energy else None
        used = after - before if after is not None and before is not None else None
        return _mean([device for frame in frames for device in frame["gpus"]], used)


class Energy:
    """Energy that the GPUs of this machine used since their driver was loaded, by NVML."""

    def __init__(self) -> None:
        self._handles: Sequence[Any] = ()
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):  # no driver
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]

    def joules(self) -> float | None:
        """None where no GPU counts its energy, as before the generation Volta."""
        try:
            counted = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
        return sum(counted) / 1e3 if counted else None


def _mean(devices: Sequence[dict[str, Any]], joules: float | None) -> DeviceUsage:
    busy = [device["utilization_pct"] for device in devices if device["utilization_pct"] is not None]
    memory = [device["memory_used_bytes"] for device in devices if device["memory_used_bytes"]]
    return DeviceUsage(
        " ".join(dict.fromkeys(device["gpu_type"] for device in devices)),
        sum(busy) / len(busy) if busy else None,
        round(sum(memory) / len(memory)) if memory else None,
        joules,
    )
