"""An adapter in this event loop with toy models. It speaks `sie_contracts.wire.ipc` in real frames on a real Unix
socket.

A model's tokenizer makes one token of each UTF-8 byte and adds two special ones. A vector depends only on its token ids
and its LoRA (`vector_of`), so tests know every answer. Output options are not applied. Each fault of an adapter is a
switch: hold, refuse, freeze, die.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from sie_contracts.errors import ErrorInfo, InternalFailure, LoraLoading, ModelLoading, SIEError
from sie_contracts.media.images import Recipe
from sie_contracts.models.catalogue import Catalogue, fingerprint
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire import device_reports, ipc
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Outcome

WIDTH = 8
SPECIAL = 2


def toy_entry(model: str = "toy/one", *, bundle: str = "default", max_tokens: int = 512, **more: object) -> ModelEntry:
    """Return a catalogue entry that this adapter serves."""
    return parse_entry(
        {
            "id": model,
            "bundle": bundle,
            "weights": {"path": "/toy"},
            "family": "toy",
            "outputs": {"dense": WIDTH},
            "max_tokens": max_tokens,
            **more,
        }
    )


def toy_tokenizer() -> bytes:
    """Return a serialised fast tokenizer over bytes, with a first and a last special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["[CLS]", "[SEP]", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer.to_str().encode()


TOKENIZER = toy_tokenizer()
IMAGES = Recipe("crop", height=16, width=16, shorter=16, tokens=9)  # the recipe of models that take images


def ids_of(text: str) -> NDArray[np.int32]:
    """Return the ids of a text by the toy tokenizer."""
    return np.array(Tokenizer.from_buffer(TOKENIZER).encode(text).ids, np.int32)


def vector_of(ids: Sequence[int] | NDArray[np.int32], lora: str = "") -> NDArray[np.float32]:
    """Return the vector of token ids, with a LoRA or without: float32 [WIDTH], of length 1."""
    digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes() + lora.encode()).digest()
    raw = np.frombuffer(digest[:WIDTH], np.uint8).astype(np.float32) - 127.5
    return np.asarray(raw / np.linalg.norm(raw), np.float32)


class FakeAdapter:
    """An adapter that listens on `path` between `start` and `stop`.

    `hold_batches` and `hold_loads` keep batches and loads running until `let_go`. `refusals` has errors for loads of
    models or LoRAs, `failures` errors for inputs by text. The adapter keeps the last `most_loras` of a model.
    """

    def __init__(
        self, path: Path | str, *, device: str = "fake", gpu: str = "", lanes: int = 1, devices: int = 1
    ) -> None:
        self.path = str(path)
        self.devices = devices  # the number of devices of its worker
        self.memory_bytes = 1 << 20, 1 << 30  # used, total
        self.device = device
        self.gpu = gpu
        self.lanes = lanes
        self.hold_batches = False
        self.hold_loads = False
        self.hold_relief = False
        self.refusals: dict[str, SIEError] = {}
        self.failures: dict[str, ErrorInfo] = {}
        self.writes: set[str] = set()  # models whose answers are written beside the lanes
        self.cancels: list[str] = []  # batches that were cancelled while they ran
        self.loaded: dict[str, ipc.LoadedModel] = {}
        self.loads: list[str] = []
        self.may_drop: list[tuple[str, ...]] = []  # by load: the models that it might drop
        self.dropped: tuple[str, ...] = ()  # models that every reply names as unloaded
        self.most_loras = 10
        self.loras: dict[str, list[str]] = {}
        self.lora_loads: list[str] = []
        self.digests: dict[str, str] = {}  # by LoRA: the digest of its files
        self.releases: list[str] = []
        self.batches: list[ipc.RunBatch] = []
        self.described: tuple[device_reports.RanBatch, ...] | None = None  # batches reported under SIE_INSTRUMENTATION
        self.pings: list[float] = []
        self.connections = 0  # accepted since the start
        self.running = 0
        self.peak_running = 0
        self._frozen = False
        self._held: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._attending: set[asyncio.Task[None]] = set()
        self._readers: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}

    async def start(self) -> FakeAdapter:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def stop(self) -> None:
        """Close the socket and all connections, as at the end of an adapter."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._attending):
            task.cancel()
        await asyncio.gather(*self._attending, return_exceptions=True)
        self.loaded.clear()
        self.loras.clear()
        self._unlink()

    def _unlink(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    async def die(self) -> None:
        """Close every connection at once and unload all models. The next process listens at once."""
        await self.stop()
        self.running = 0
        await self.start()

    def freeze(self) -> None:
        """Keep all connections, but answer no further request."""
        self._frozen = True

    def let_go(self, count: int | None = None) -> None:
        """Let `count` held batches or loads go on, or with None all of them and all later ones."""
        if count is None:
            self.hold_batches = self.hold_loads = False
        for _ in range(len(self._held) if count is None else count):
            self._held.popleft().set_result(None)

    async def until(self, condition: Callable[[FakeAdapter], object], goal: str, timeout_s: float = 30.0) -> None:
        """Wait for a state of this adapter. Raise AssertionError with the goal at the time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s: {goal}") from None

    def _note(self) -> None:
        self._changed.set()

    async def _hold(self) -> None:
        until = asyncio.get_running_loop().create_future()
        self._held.append(until)
        try:
            await until
        finally:
            if until in self._held:
                self._held.remove(until)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._attend(reader, writer), name="fake adapter connection")
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)
        self._note()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = ipc.request(await ipc.read_frame(reader))
                if self._frozen:
                    continue
                if isinstance(request, ipc.RunBatch):
                    self._readers[writer] = reader
                    await self._run(request, writer)
                elif isinstance(request, ipc.Cancel):
                    continue  # the cancelled batch has ended
                elif isinstance(request, ipc.EnsureReady):
                    await self._send(writer, await self._load(request))
                elif isinstance(request, ipc.EnsureLora):
                    await self._send(writer, await self._load_lora(request))
                else:
                    if self.hold_relief and isinstance(request, ipc.Ping) and request.may_drop:
                        await self._hold()
                    await self._send(writer, self._at_once(request))
        except (EOFError, OSError, ipc.FrameError):
            pass  # the sidecar went away
        finally:
            writer.close()

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, reply: ipc.Reply) -> None:
        writer.write(ipc.frame(reply))
        await writer.drain()

    def _at_once(self, request: ipc.Request) -> ipc.Reply:
        match request:
            case ipc.Ping():
                self.pings.append(asyncio.get_running_loop().time())
                self._note()
                return ipc.Pong(os.getpid(), batches=len(self.batches), dropped=self.dropped)
            case ipc.Describe():
                return ipc.Description(
                    ipc.PROTOCOL,
                    os.getpid(),
                    self.device,
                    "fake",
                    self.lanes,
                    self.gpu,
                    *self.memory_bytes,
                    tuple(self.loaded.values()),
                    batches=self.described,
                    devices=self.devices,
                )
            case ipc.Release(model):
                self.loaded.pop(model, None)
                self.loras.pop(model, None)
                self.releases.append(model)
                self._note()
        return ipc.Done()

    async def _load(self, request: ipc.EnsureReady) -> ipc.Reply:
        self.loads.append(request.model)
        self.may_drop.append(request.may_drop)
        self._note()
        if self.hold_loads:
            await self._hold()
        refusal = self.refusals.get(request.model)
        if refusal is not None:
            return ipc.Refused(refusal.info(), dropped=self.dropped)
        entry = parse_entry(request.entry)
        resolved = Catalogue.resolve_profile(entry, request.profile, request.model)
        precision = resolved.load.precision or "float32"
        loaded = ipc.LoadedModel(
            request.model, entry.revision, fingerprint(entry, resolved.load, precision), precision, "toy", 1 << 20
        )
        self.loaded[request.model] = loaded
        images = IMAGES if "image" in entry.inputs else None
        rows = ipc.Rows(tokens=True, writes=request.model in self.writes, images=images)
        return ipc.Ready(loaded, TOKENIZER, entry.max_tokens, {"encode": rows})

    async def _load_lora(self, request: ipc.EnsureLora) -> ipc.Reply:
        self.lora_loads.append(request.lora)
        self._note()
        if self.hold_loads:
            await self._hold()
        if request.model not in self.loaded:
            return ipc.Refused(ModelLoading(f"{request.model} is not loaded").info())
        if (refusal := self.refusals.get(request.lora)) is not None:
            return ipc.Refused(refusal.info())
        lora_names = self.loras.setdefault(request.model, [])
        lora_names[:] = [*(name for name in lora_names if name != request.lora), request.lora][-self.most_loras :]
        return ipc.Done(self.digests.get(request.lora, ""))

    async def _run(self, batch: ipc.RunBatch, writer: asyncio.StreamWriter) -> None:
        if batch.model not in self.loaded:
            await self._send(writer, ipc.Refused(ModelLoading(f"{batch.model} is not loaded").info(), batch.batch))
            return
        if batch.lora and batch.lora not in self.loras.get(batch.model, ()):
            await self._send(writer, ipc.Refused(LoraLoading(f"{batch.lora} is not loaded").info(), batch.batch))
            return
        self.batches.append(batch)
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        self._note()
        try:
            await self._send(writer, ipc.BatchStarted(batch.batch))
            if self.hold_batches and batch.model in self.writes:
                if await self._held_or_cancelled(self._readers[writer]):
                    self.cancels.append(batch.batch)
                    await self._send(writer, ipc.Refused(InternalFailure("cancelled").info(), batch.batch))
                    return
            elif self.hold_batches:
                await self._hold()
            done = msgspec.structs.replace(_computed(batch, self.failures), dropped=self.dropped)
        finally:
            self.running -= 1
            self._note()
        await self._send(writer, done)

    async def _held_or_cancelled(self, reader: asyncio.StreamReader) -> bool:
        """Hold a batch. Return True if a Cancel came before it was let go."""
        held = asyncio.ensure_future(self._hold())
        cancellation = asyncio.ensure_future(ipc.read_frame(reader))
        try:
            await asyncio.wait([held, cancellation], return_when=asyncio.FIRST_COMPLETED)
            if not cancellation.done():
                return False
            assert isinstance(ipc.request(cancellation.result()), ipc.Cancel)
            return True
        finally:
            held.cancel()
            cancellation.cancel()
            await asyncio.gather(held, cancellation, return_exceptions=True)


def _computed(batch: ipc.RunBatch, failures: Mapping[str, ErrorInfo]) -> ipc.BatchDone:
    lengths, ids = np.frombuffer(batch.lengths, "<i4"), np.frombuffer(batch.ids, "<i4")
    ends = np.cumsum(lengths)
    vectors = [vector_of(ids[end - length : end], batch.lora) for end, length in zip(ends, lengths, strict=True)]
    outcomes: list[Outcome] = [
        Ok({"dense": ArraySlice("<f4", (WIDTH,), 4 * WIDTH * number)}, int(length))
        for number, length in enumerate(lengths)
    ]
    if failures:
        outcomes = [
            Failed(failures[text]) if text in failures else ok
            for text, ok in zip(texts_of(batch), outcomes, strict=True)
        ]
    return ipc.BatchDone(batch.batch, tuple(outcomes), b"".join(vector.tobytes() for vector in vectors), 0.1)


def texts_of(batch: ipc.RunBatch) -> list[str]:
    """Return the texts of a batch, decoded from its token ids."""
    lengths, ids = np.frombuffer(batch.lengths, "<i4"), np.frombuffer(batch.ids, "<i4")
    tokenizer = Tokenizer.from_buffer(TOKENIZER)
    ends = np.cumsum(lengths)
    return [
        tokenizer.decode(ids[end - length + 1 : end - 1].tolist()) for end, length in zip(ends, lengths, strict=True)
    ]
