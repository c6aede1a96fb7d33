"""Sidecar to adapter, over a Unix socket: frames of `u32 big-endian length + msgpack`.

A batch connection carries one `RunBatch` at a time: the sidecar sends it, the adapter answers `BatchStarted` when the
device takes the batch and `BatchDone` (or `Refused`) at its end; or one `EnsureReady` or `EnsureLora`, which lasts as
long as the load; or a `Ping` that permits to unload models. The control connection carries the short questions, one
question and one answer at a time, so that a health check never queues behind a large frame or a load.

The sidecar decides which models may be unloaded, and in what order: `may_drop` of a request names them. The adapter
decides when, takes the first one first, and names in `dropped` of its reply those that were. It keeps neither list: a
model that no request names stays loaded.

Token ids, given vectors and results travel as one block of bytes each. `lengths` and `ids` are little-endian int32,
`types` is uint8.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.heartbeats import Fetched
from sie_contracts.messages import Operation, Outcome, RunOptions

MAX_FRAME_BYTES = 1 << 30
MAX_REQUEST_BYTES = 128 << 20  # what an adapter reads: 32 million token ids
FRAME_TIMEOUT_S = 30.0  # from the first byte of a frame to its last
PROTOCOL = 3

_HEADER = struct.Struct(">I")


class FrameError(Exception):
    """The peer closed inside a frame, stalled in one, or sent what is not a message of this protocol."""


class Ping(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Alive? Answered by Pong from the adapter's own account of its inference threads.

    `may_drop`: what may be unloaded now if memory is above the threshold.
    """

    may_drop: tuple[str, ...] = ()


class Describe(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What does the adapter hold? Answered by Description."""


class EnsureReady(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this model unless it is loaded. Answered by Ready, or Refused with MODEL_LOAD_FAILED. Runs beside inference.

    `entry` is the catalogue entry that the adapter must serve: it keeps no catalogue of its own. `may_drop`: what may
    be unloaded to make room for it.
    """

    model: str
    entry: dict[str, Any]
    profile: str = "default"
    may_drop: tuple[str, ...] = ()


class EnsureLora(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this LoRA of a loaded model unless it is there. Answered by Done, or Refused with LORA_LOAD_FAILED. Runs
    beside inference.

    `lora`: a folder, or a hub repository as `name` or `name@commit`.
    """

    model: str
    lora: str


class Release(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Unload. Answered by Done, also when it was not loaded."""

    model: str


Layout = Literal["text", "pair", "pieces", "sides", "hypotheses", "spans", "raw"]


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the token ids of a query or of a document look like. 0 of a number: the model's own.

    `marker` is inserted after the first special token. `limit` counts it and all special tokens. `expanded` is the
    number of tokens that a row is filled up to on the device, which is part of its cost. Without `special` there is
    nothing but the text's own tokens.
    """

    marker: int = -1
    limit: int = 0
    expanded: int = 0
    special: bool = True


class Rows(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the inputs of one operation become rows of token ids.

    text        prefix + text + suffix, a row for each input
    pair        (query, text) as the tokenizer's own template joins them; the text is cut
    pieces      the pieces of the template, tokenised one by one and joined; the one with the document is cut
    sides       a row for the query, then a row for each input: reduced against each other on the device
    hypotheses  a row (text, hypothesis) for each label of each input; the text is cut
    spans       as text, with the texts and the place of each token in its text
    raw         the texts go as they are, the ids only count their cost

    `tokens`: an input may be token ids. `pairs`: an input may be two texts, joined as a pair. `vectors`: the width of
    multivectors that may stand in the place of an input; 0: none may.
    """

    layout: Layout = "text"
    query: Side = Side()
    document: Side = Side()
    tokens: bool = False
    pairs: bool = False
    vectors: int = 0


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows `start` to `stop` of a batch: those of one work item, which are answered as its `options` say.

    Outputs never split a batch. `inputs` is the number of outcomes that are due for it, -1 one for each row.
    `traceparent` and `tracestate`: of the work item, where it is traced.
    """

    start: int
    stop: int
    options: RunOptions = RunOptions()
    inputs: int = -1
    traceparent: str = ""
    tracestate: str = ""

    @property
    def due(self) -> int:
        return self.stop - self.start if self.inputs < 0 else self.inputs


class RunBatch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One forward pass. `lengths`: int32 [rows], `ids`: int32 [sum of lengths], `types`: uint8 [sum of lengths] or
    empty, in row order.

    `texts` are set for the layouts raw and spans, one for each row; `offsets` for spans: int32 [sum of lengths, 2],
    first and end code point of each token, -1 for a special one. `given`: int32 [rows], how many vectors of `vectors`
    (float32, all of one width) stand in the place of a row, which then has no ids; -1 none; both empty if no row has
    any. `pooling` empty means the model's own. Two work items share a batch only if model, revision, operation, pooling
    and LoRA are equal. `fingerprint`: of the loaded copy that it was made for; a copy with another one refuses it as
    not loaded. Empty: any. `traceparent` and `tracestate`: of the batch. `may_drop`: what may be unloaded if memory
    runs out, or is above the threshold after the batch.
    """

    batch: str
    model: str
    operation: Operation
    lengths: bytes
    ids: bytes
    groups: tuple[Group, ...]
    types: bytes = b""
    texts: tuple[str, ...] = ()
    offsets: bytes = b""
    pooling: str = ""
    lora: str = ""
    traceparent: str = ""
    given: bytes = b""
    vectors: bytes = b""
    fingerprint: str = ""
    tracestate: str = ""
    may_drop: tuple[str, ...] = ()


class ApplyConfig(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The catalogue entry of a model changed, or it was removed (`entry` None). Answered by Done once the adapter
    serves the new one.
    """

    model: str
    entry: dict[str, Any] | None = None


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs and then exit with status 0. Answered by Done at once."""


class Pong(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`busy_s`: age of the batch that runs now, 0 when idle; a wedged device shows here.

    `dropped`: what was unloaded for it. `fetching`: how far the weights are that are on their way to this node, by the
    id of their entry.
    """

    pid: int
    busy_s: float = 0.0
    batches: int = 0
    dropped: tuple[str, ...] = ()
    fetching: dict[str, Fetched] = {}


class LoadedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A resident model, as resolved on this device. `idle_s` since its last use. `memory_bytes` of its weights,
    `peak_bytes` of its activations at most, as far as measured. `requested_precision`: what its entry asks for, else
    the default; `precision_reason`: why `precision` is another one, empty if it is not. `crossover_tokens`: the length
    at which attention takes as long as everything else (`costs`), 0: time grows with tokens alone, or it is not known.
    """

    model: str
    revision: str
    fingerprint: str
    precision: str
    attention: str
    memory_bytes: int = 0
    idle_s: float = 0.0
    peak_bytes: int = 0
    certificate: dict[str, Any] = {}
    requested_precision: str = ""
    precision_reason: str = ""
    crossover_tokens: int = 0


class Shortages(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often memory ran out for one model since the process started, and what was done about it."""

    model: str
    recoveries_attempted: int = 0
    recoveries_succeeded: int = 0
    terminal_failures: int = 0
    cache_clears: int = 0
    evictions_triggered: int = 0
    batch_splits: int = 0


class RanBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch that the adapter ran, in sizes and times alone.

    `number` counts the batches of this process, from 1. `ended` is wall time, seconds since the epoch. `rows` are what
    the device reads, of `inputs` of `items` work items; `tokens` is their cost without what a model fills them up with,
    `longest` that of one row, `attention` the sum of squared lengths. `wait_ms`: in this process, before a lane took
    it. `padding`, `inference_ms` and `postprocess_ms` as of BatchDone. `failed` inputs have an error as their outcome,
    all of them where the whole batch was refused. `memory_bytes` of the device are in use after it.
    """

    number: int
    ended: float
    model: str
    operation: Operation
    rows: int
    inputs: int
    items: int
    tokens: int
    longest: int
    attention: int
    wait_ms: float
    lora: bool = False
    failed: int = 0
    padding: int = 0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    memory_bytes: int = 0


class Description(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The process and its device. `utilization_percent`: how busy the device is, whoever uses it; None where nothing
    measures it.

    `threshold_percent` of its memory is where models begin to go. `batches` are the last ones, the newest at the end;
    None unless the adapter was told to keep them.
    """

    protocol: int
    pid: int
    device: str
    version: str
    lanes: int = 1
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    models: tuple[LoadedModel, ...] = ()
    utilization_percent: float | None = None
    threshold_percent: float = 0.0
    shortages: tuple[Shortages, ...] = ()
    batches: tuple[RanBatch, ...] | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The model is resident. `tokenizer` is the serialised fast tokenizer (tokenizer.json), so the sidecar needs no
    weights folder.

    `max_tokens` includes special tokens. `rows` has an entry for each operation that the model serves. `dropped`: what
    was unloaded to make room.
    """

    loaded: LoadedModel
    tokenizer: bytes
    max_tokens: int
    rows: dict[str, Rows] = {}
    load_s: float = 0.0
    dropped: tuple[str, ...] = ()


class BatchStarted(msgspec.Struct, frozen=True, tag=True):
    """The device has this batch now: if the adapter dies, these items are the suspects."""

    batch: str


class BatchDone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One outcome per input, group by group; slices point into `block`, and those of consecutive inputs are
    consecutive.

    `inference_ms` is the forward pass, `postprocess_ms` the epilogues and the copy to the host, `padding` the positions
    that were computed beside the tokens. `preprocess_ms`: tokenising in the adapter, of a family that does it itself.
    `dropped`: what was unloaded for it.
    """

    batch: str
    outcomes: tuple[Outcome, ...]
    block: bytes
    inference_ms: float
    postprocess_ms: float = 0.0
    padding: int = 0
    preprocess_ms: float = 0.0
    dropped: tuple[str, ...] = ()


class Done(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """It is so. `digest`: SHA-256, in hex, of the files of the LoRA that was asked for."""

    digest: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The whole request failed. `batch` is set when a batch did. `dropped`: what was unloaded for it nevertheless."""

    error: ErrorInfo
    batch: str = ""
    dropped: tuple[str, ...] = ()


Request = Ping | Describe | EnsureReady | EnsureLora | Release | RunBatch | ApplyConfig | Drain
Reply = Pong | Description | Ready | BatchStarted | BatchDone | Done | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply, cap: int = MAX_FRAME_BYTES) -> bytes:
    """The bytes of one frame. Raises FrameError if it would pass the cap."""
    body = _encode(message)
    if len(body) > cap:
        raise FrameError(f"a frame of {len(body)} bytes passes the limit of {cap}")
    return _HEADER.pack(len(body)) + body


def request(body: bytes) -> Request:
    """Decode what a sidecar sent. Raises FrameError."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a request of protocol {PROTOCOL}: {error}") from error


def reply(body: bytes) -> Reply:
    """Decode what an adapter sent. Raises FrameError."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a reply of protocol {PROTOCOL}: {error}") from error


def _length(header: bytes | bytearray, cap: int) -> int:
    (length,) = _HEADER.unpack(header)
    if length > cap:
        raise FrameError(f"a frame of {length} bytes passes the limit of {cap}")
    return int(length)


async def read_frame(reader: asyncio.StreamReader, cap: int = MAX_FRAME_BYTES) -> bytes:
    """The body of the next frame; waits for its first byte without bound, for the rest at most FRAME_TIMEOUT_S.

    Raises EOFError when the peer closed between frames, FrameError otherwise.
    """
    try:
        first = await reader.readexactly(1)
    except asyncio.IncompleteReadError as error:
        raise EOFError("the peer closed the connection") from error
    try:
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            length = _length(first + await reader.readexactly(3), cap)
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise FrameError("the peer closed inside a frame") from error
    except TimeoutError as error:
        raise FrameError(f"a frame was not complete after {FRAME_TIMEOUT_S} s") from error


def receive_frame(connection: socket.socket, cap: int = MAX_FRAME_BYTES) -> bytearray:
    """`read_frame` on a blocking socket. Memory grows with what arrives, never with what a header promises."""
    connection.settimeout(None)
    header = bytearray(connection.recv(4))
    if not header:
        raise EOFError("the peer closed the connection")
    connection.settimeout(FRAME_TIMEOUT_S)
    try:
        _receive_into(connection, header, 4)
        body = bytearray()
        _receive_into(connection, body, _length(header, cap))
    except TimeoutError as error:
        raise FrameError(f"a frame stalled for {FRAME_TIMEOUT_S} s") from error
    return body


def _receive_into(connection: socket.socket, buffer: bytearray, size: int) -> None:
    while len(buffer) < size:
        piece = connection.recv(min(size - len(buffer), 1 << 20))
        if not piece:
            raise FrameError("the peer closed inside a frame")
        buffer += piece
