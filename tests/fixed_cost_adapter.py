"""An adapter process whose device is a clock. It speaks real frames on a real Unix socket, and a batch takes a fixed
time but no processor time.

    RunBatch ──► the lane that is free first ──► BatchStarted ──(batch_ms + token_us x tokens)──► BatchDone

Vectors are those of `fake_adapter.vector_of`, so a client knows the answer of its text. The next batch of a lane begins
when the one before ended, not when the timer fired, so a late wake-up on a busy machine is no device time.

    python tests/fixed_cost_adapter.py --socket /run/a.sock --lanes 2 --batch-ms 5 --token-us 20 --load-s 0.5 --deadly
    "the end"
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import uvloop
from fake_adapter import TOKENIZER, WIDTH, ids_of

import sie_contracts
from sie_contracts.errors import ModelLoadFailed, ModelLoading
from sie_contracts.models.catalogue import Catalogue, fingerprint
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import ArraySlice, Ok

MEMORY_USED = 0.85  # part of the memory that a sidecar uses; without an import, it runs beside any version
BESIDE_BYTES = 64 << 20  # memory of the device beside models
POISONED = 86  # exit status after the deadly text


class Device:
    """Lanes, as the times at which each is free. The class is pure: callers pass the time."""

    def __init__(self, lanes: int, batch_s: float, token_s: float) -> None:
        self.begun_s = [0.0] * lanes
        self.free_s = [0.0] * lanes
        self.batch_s = batch_s
        self.token_s = token_s

    def take(self, tokens: int, now_s: float) -> tuple[float, float]:
        """Return when a batch that arrives now begins and ends."""
        lane = min(range(len(self.free_s)), key=self.free_s.__getitem__)
        begin_s = self.begun_s[lane] = max(now_s, self.free_s[lane])
        end_s = self.free_s[lane] = begin_s + self.batch_s + self.token_s * tokens
        return begin_s, end_s

    def busy_for_s(self, now_s: float) -> float:
        """Return the age of the oldest running batch, or 0 if all lanes are free."""
        running = [
            now_s - begun_s
            for begun_s, free_s in zip(self.begun_s, self.free_s, strict=True)
            if begun_s <= now_s < free_s
        ]
        return max(running, default=0.0)


def answer(batch: ipc.RunBatch, inference_ms: float, width: int = WIDTH) -> ipc.BatchDone:
    """Return the vectors of a batch: `fake_adapter.vector_of` of each row, repeated up to `width`, of length 1."""
    lengths = np.frombuffer(batch.lengths, "<i4").tolist()
    lora, ids = batch.lora.encode(), batch.ids
    digests, outcomes, end = [], [], 0
    for number, length in enumerate(lengths):
        start, end = end, end + 4 * length
        digests.append(hashlib.sha256(ids[start:end] + lora).digest()[:WIDTH])
        outcomes.append(Ok({"dense": ArraySlice("<f4", (width,), 4 * width * number)}, length))
    raw = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, WIDTH).astype(np.float32) - 127.5
    vectors = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    if width != WIDTH:
        vectors = np.tile(vectors, width // WIDTH) * np.float32((WIDTH / width) ** 0.5)
    return ipc.BatchDone(batch.batch, tuple(outcomes), vectors.astype("<f4").tobytes(), inference_ms)


class Adapter:
    """The state that all connections share. `deadly`: a batch with this text ends the process after the device took it.
    `slots`: the number of models that fit, of which the least recently used is dropped first; 0 is no limit.
    `load_s_of`: load times by model in place of `load_s`.
    """

    def __init__(
        self,
        device: Device,
        *,
        load_s: float,
        deadly: str,
        slots: int = 0,
        load_s_of: Mapping[str, float] = MappingProxyType({}),
        width: int = WIDTH,
        devices: int = 1,
    ) -> None:
        self.device = device
        self.devices = devices  # the number of devices of its worker
        self._load_s = load_s
        self._load_s_of = load_s_of
        self.slots = slots
        self.width = width
        # each model takes 1 MiB
        self.total_bytes = int((slots * (1 << 20) + BESIDE_BYTES) / MEMORY_USED) + 1 if slots else 1 << 30
        self.loaded: dict[str, ipc.LoadedModel] = {}  # in the order of their last run
        self.batches = 0
        self._deadly = ids_of(deadly)[1:-1].astype("<i4").tobytes() if deadly else b""

    def load_s(self, model: str) -> float:
        return self._load_s_of.get(model, self._load_s)

    def is_deadly(self, ids: bytes) -> bool:
        at = ids.find(self._deadly) if self._deadly else -1
        while at % 4 and at >= 0:
            at = ids.find(self._deadly, at + 1)
        return at >= 0

    def load(self, request: ipc.EnsureReady) -> ipc.Ready | ipc.Refused:
        evicted = []
        while self.slots and request.model not in self.loaded and len(self.loaded) >= self.slots:
            victim = next((model for model in self.loaded if model in request.may_drop), None)
            if victim is None:
                error = ModelLoadFailed("no room", extras={"error_class": "OOM"})
                return ipc.Refused(error.info())
            del self.loaded[victim]
            evicted.append(victim)
        entry = parse_entry(request.entry)
        resolved = Catalogue.resolve_profile(entry, request.profile, request.model)
        precision = resolved.load.precision or "float32"
        loaded = ipc.LoadedModel(
            request.model, entry.revision, fingerprint(entry, resolved.load, precision), precision, "none", 1 << 20
        )
        self.loaded[request.model] = loaded
        return ipc.Ready(
            loaded, TOKENIZER, entry.max_tokens, {"encode": ipc.Rows()}, self.load_s(request.model), tuple(evicted)
        )

    def at_once(self, request: ipc.Request) -> ipc.Reply:
        """Return the answer to a request that takes no time."""
        match request:
            case ipc.Ping():
                return ipc.Pong(os.getpid(), self.device.busy_for_s(time.monotonic()), self.batches)
            case ipc.Describe():
                models = tuple(self.loaded.values())
                used = BESIDE_BYTES + sum(model.memory_bytes for model in models)
                lanes = len(self.device.free_s)
                version = sie_contracts.__version__
                return ipc.Description(
                    ipc.PROTOCOL,
                    os.getpid(),
                    "clock",
                    version,
                    lanes,
                    "",
                    used,
                    self.total_bytes,
                    models,
                    devices=self.devices,
                )
            case ipc.Release(model):
                self.loaded.pop(model, None)
            case ipc.Drain():
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return ipc.Done()


class Connection(asyncio.Protocol):
    """One connection of the sidecar. Replies are sent in the order of the requests, each when its time has come."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._timers: deque[asyncio.TimerHandle] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            end = 4 + int.from_bytes(buffer[:4], "big")
            if len(buffer) < end:
                return
            body = bytes(memoryview(buffer)[4:end])
            del buffer[:end]
            self._attend(ipc.request(body))

    def _attend(self, request: ipc.Request) -> None:
        match request:
            case ipc.RunBatch():
                self._run(request)
            case ipc.EnsureReady() if request.model not in self._adapter.loaded:
                self._later(self._adapter.load_s(request.model), lambda: self._send(self._adapter.load(request)))
            case ipc.EnsureReady():
                self._send(self._adapter.load(request))
            case _:
                self._send(self._adapter.at_once(request))

    def _run(self, batch: ipc.RunBatch) -> None:
        adapter = self._adapter
        if batch.model not in adapter.loaded:
            self._send(ipc.Refused(ModelLoading(f"{batch.model} is not loaded").info(), batch.batch))
            return
        adapter.loaded[batch.model] = adapter.loaded.pop(batch.model)
        now_s = time.monotonic()
        begin_s, end_s = adapter.device.take(len(batch.ids) // 4, now_s)
        adapter.batches += 1
        deadly = adapter.is_deadly(batch.ids)
        started = ipc.BatchStarted(batch.batch)
        if end_s <= now_s and not deadly:
            self._send(started, answer(batch, 0.0, adapter.width))
            return
        self._later(begin_s - now_s, lambda: self._start(started, deadly))
        if not deadly:
            self._later(end_s - now_s, lambda: self._send(answer(batch, (end_s - begin_s) * 1000, adapter.width)))

    def _start(self, started: ipc.BatchStarted, deadly: bool) -> None:
        self._send(started)
        if deadly:
            self._loop.call_soon(os._exit, POISONED)  # in the next turn, because uvloop writes at the end of a turn

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        while self._timers and self._timers[0].when() <= self._loop.time():
            self._timers.popleft()
        if round(delay_s * 1000) <= 0:  # uvloop counts in milliseconds, and its handle for a delay of 0 has no `when`
            action()
        else:
            self._timers.append(self._loop.call_later(delay_s, action))

    def _send(self, *replies: ipc.Reply) -> None:
        self._transport.write(b"".join(map(ipc.frame, replies)))


async def serve(path: str, adapter: Adapter) -> None:
    """Listen until SIGTERM or SIGINT. Replace a socket that a killed process left."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _remove(path)
    server = await loop.create_unix_server(lambda: Connection(adapter), path)
    print(f"listening on {path}", file=sys.stderr, flush=True)
    await stop.wait()
    server.close()
    _remove(path)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--batch-ms", type=float, default=0.0, help="of every batch")
    parser.add_argument("--token-us", type=float, default=0.0, help="of every token in it")
    parser.add_argument("--load-s", type=float, default=0.0, help="of every load")
    parser.add_argument(
        "--load-s-of", action="append", default=[], metavar="MODEL=SECONDS", help="of the loads of one model"
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="of a vector, a multiple of the default")
    parser.add_argument("--slots", type=int, default=0, help="models that fit, 0: any number")
    parser.add_argument("--devices", type=int, default=1, help="of the worker; each has a process of this kind")
    parser.add_argument("--deadly", default="", help="a text that ends the process when the device takes it")
    options = parser.parse_args()
    device = Device(options.lanes, options.batch_ms / 1000, options.token_us / 1e6)
    load_s_of = {model: float(load_s) for model, _, load_s in (pair.rpartition("=") for pair in options.load_s_of)}
    adapter = Adapter(
        device,
        load_s=options.load_s,
        deadly=options.deadly,
        slots=options.slots,
        load_s_of=load_s_of,
        width=options.width,
        devices=options.devices,
    )
    os.umask(0o177)  # the socket has mode 0600
    uvloop.run(serve(options.socket, adapter))


if __name__ == "__main__":
    main()
