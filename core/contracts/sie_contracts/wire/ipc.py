"""Protocol between sidecar and adapter, over a Unix socket: frames of `u32 big-endian length + msgpack`.

A batch connection carries one request at a time. The sidecar sends a `RunBatch`. The adapter sends `BatchStarted` when
it begins with the inputs, and `BatchDone` or `Refused` at the end. The sidecar uses the same connection for
`EnsureReady` and `EnsureLora`, whose replies come after the load, and for a `Ping` that lets the adapter evict models.
The control connection carries the short requests, one at a time. So a health check never waits for a large frame or a
load.

The sidecar decides which models may be evicted (unloaded to free memory), and in what order: `may_drop` of a request
lists these models. The adapter decides when to evict. It evicts the first listed model first, and lists the evicted
models in `dropped` of its reply. `may_drop` is valid for one request: a model that the present request does not list
stays loaded.

Token ids, vectors of inputs, pixels, features and results are one block of bytes each. `lengths` and `ids` are
little-endian int32, `features` are float32, `types` and `pixels` are uint8.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import msgspec

from sie_contracts.errors import UNDECODABLE, ErrorInfo
from sie_contracts.media.documents import DocumentFile, DocumentLimits
from sie_contracts.media.images import ImageTokens, Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.device_reports import RanBatch, Shortages, TowerUse
from sie_contracts.wire.heartbeats import Fetched
from sie_contracts.wire.messages import Mention, Operation, Outcome, RunOptions

MAX_FRAME_BYTES = 1 << 30  # maximum size of a message in a frame, in bytes
MAX_REQUEST_BYTES = 128 << 20  # maximum size of a message to an adapter, in bytes: enough for 32 million token ids
# Time limit in seconds: `read_frame` applies it to the rest of a frame after the first byte, `receive_frame` to each
# single read.
FRAME_TIMEOUT_S = 30.0
PROTOCOL = 3
IMAGE_KEY_BYTES = 16

_HEADER = struct.Struct(">I")


def device_socket(path: str, number: int) -> str:
    """Return the socket path of the adapter for device `number` of a worker; for device 0, return `path` itself."""
    return f"{path}.{number}" if number else path


class FrameError(Exception):
    """Error for a frame that is too large, for a frame whose bytes do not arrive in time, for a peer that closes the
    connection in the middle of a frame, and for a message that is not of this protocol.
    """


class Ping(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Health check. The reply is a Pong; its `busy_s` shows whether the device hangs.

    `may_drop`: models that the adapter may evict now if memory use is above `Description.threshold_percent`.
    """

    may_drop: tuple[str, ...] = ()


class Describe(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Request for the state of the process, its device and its models. The reply is a Description."""


class EnsureReady(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this model if it is not loaded, and use `entry` for the model from now on. If the loaded weights do not fit
    the new entry, the adapter loads the model again. The reply is Ready, or Refused. A load runs in parallel to
    inference.

    `entry`: the model's entry in the catalogue, which the sidecar sends because the adapter has no catalogue.
    `may_drop`: models that the adapter may evict to make room.
    """

    model: str
    entry: dict[str, Any]
    profile: str = "default"
    may_drop: tuple[str, ...] = ()


class EnsureLora(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this LoRA for a loaded model, if the LoRA is not loaded yet. The reply is Done or Refused. If the model is
    not loaded, Refused has the code MODEL_LOADING. A load runs in parallel to inference.

    `lora`: a folder, or a hub repository as `name` or `name@commit`.
    """

    model: str
    lora: str


class Release(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Unload this model. The reply is Done, also if the model was not loaded."""

    model: str


Layout = Literal["text", "pair", "pieces", "sides", "hypotheses", "spans", "passages", "raw"]


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """Form of the rows of token ids that are built from queries, or of the rows that are built from documents.

    `marker`: token id that is inserted after the first special token (-1: none). `limit`: largest number of tokens of a
    row, including the marker and all special tokens (0: the model's own limit). `expanded`: number of tokens to which
    the device pads a row (0: no padding); the padding counts as cost. `special`: whether a row has special tokens.
    """

    marker: int = -1
    limit: int = 0
    expanded: int = 0
    special: bool = True


class Rows(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conversion of the inputs of one operation to rows of token ids. The layouts of rows are:

        text        prefix + text + suffix, a row for each input
        pair        (query, text) as the tokenizer's own template joins them; the text is truncated first
        pieces      `RunOptions.pieces`, tokenised one by one and joined; the document is truncated first
        sides       a row for the query, then a row for each input: the device scores each input against the query
        hypotheses  a row (text, hypothesis) for each label of each input; the text is truncated first
        spans       like `text`, with the texts and the offsets of each token in its text
        passages    a row (instruction, text) for each input, with offsets like `spans`; the text is truncated first
        raw         the texts are sent unchanged and without ids; the lengths of the rows only show the texts' cost

    The other part of a row (query, hypothesis or instruction) is truncated only if it fills more than 3/4 of the row.
    `tokens`: an input may be token ids. `pairs`: an input may be two texts, joined as a pair. `vectors`: width of the
    multivectors that an input may have instead of a text; 0: not allowed. `images`: recipe for the images of an input;
    None: not allowed. `image_tokens`: token ids that represent an image; None: images need no ids, and an input may
    have several images. `writes`: the model generates an answer, token by token or in separate processes, in parallel
    to batches of other models. Such a batch may take minutes, occupies no thread of the device, and ends when no client
    waits for it. `empty`: text for an input that has neither a text nor images. `sounds`: recipe for the sound of an
    input; None: not allowed. `documents`: limits for the document file of an input with layout `raw`; the sidecar sends
    the file unchanged; None: not allowed. `chunks`: a text may have chunks. `pooling`: how dense vectors are pooled;
    empty if texts have no chunks or the model has no dense vectors. `questions`: if above 0, the model (with layout
    `raw`) reads each text once for each question of the request (`questions_of`), and adds this number of tokens to
    text and question.
    """

    layout: Layout = "text"
    query: Side = Side()
    document: Side = Side()
    tokens: bool = False
    pairs: bool = False
    vectors: int = 0
    images: Recipe | None = None
    image_tokens: ImageTokens | None = None
    writes: bool = False
    empty: str = ""
    sounds: SoundRecipe | None = None
    documents: DocumentLimits | None = None
    chunks: bool = False
    pooling: str = ""
    questions: int = 0


class ChunkedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one input, in a `Group` whose texts have chunks.

    `rows`: number of rows of the input. `spans`: int32 [chunks, 3]: first code point, end code point and number of
    tokens of each chunk; empty if the input has no chunks. `segments`: int32 [segments, 4]: number of the chunk,
    number of the row within the input, first and end token in the row; ordered by chunk. The vector of a chunk is
    pooled from its segments. If `segments` is empty, each chunk is a row.
    """

    rows: int = 1
    spans: bytes = b""
    segments: bytes = b""


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of one work item in a batch: from row `start` up to row `stop` - 1. `options` determine the form of the
    results.

    A batch may have work items with different outputs. `inputs`: number of inputs, each with one result; -1: each row
    is an input. `traceparent` and `tracestate`: trace context of the work item, if it is traced. `chunked`: rows of
    each input; empty if no text has chunks, because all inputs then have the same number of rows.
    """

    start: int
    stop: int
    options: RunOptions = RunOptions()
    inputs: int = -1
    traceparent: str = ""
    tracestate: str = ""
    chunked: tuple[ChunkedRows, ...] = ()

    @property
    def due(self) -> int:
        """Return the number of results of the group."""
        return self.stop - self.start if self.inputs < 0 else self.inputs


class RunBatch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A forward pass. `lengths`: number of tokens of each row, int32 [rows]. `ids`: token ids, int32 [sum of lengths],
    empty for the layout `raw`. `types`: token types, uint8 [sum of lengths], or empty. All three arrays are in the
    order of the rows.

    Texts, one per row: `texts`, only for the layouts `raw`, `spans` and `passages`. `offsets`, only for `spans` and
    `passages`: int32 [sum of lengths, 2], first and end code point of each token; -1 for special tokens and for tokens
    of the instruction.

    Vectors instead of texts: `given`: int32 [rows], number of vectors of a row in `vectors` (float32, all of one
    width); -1 for a row that has token ids. `given` and `vectors` are empty if no row has vectors.

    Images: `images`: int32 [images, 5], in the order of the rows: row of the image, height and width of its pixels,
    height and width of the submitted image after it is turned upright. `pixels`: RGB, uint8 [height, width, 3] of each
    image. `image_keys`: IMAGE_KEY_BYTES for each image. Equal images of one client have equal keys, so that the device
    computes their output once. The output of an image with a key of zeros is not reused; an empty `image_keys` means
    that all keys are zeros.

    Sounds: `sounds`: int32 [sounds, 4]: row of the sound, and the shape of its features. `features`: float32 [views,
    frames, bins] of each sound.

    Only for the layout `raw`: `mentions` and `documents` of each row; each field is empty if no row has any.

    An empty `pooling` means the model's own pooling. Work items are in one batch only if model, revision, operation,
    pooling and LoRA are equal. `fingerprint`: fingerprint of the loaded model for which the batch was built; empty: no
    check. If the loaded model has another fingerprint, the adapter refuses the batch with the same error as for a model
    that is not loaded. `traceparent` and `tracestate`: trace context of the batch. `may_drop`: models that the adapter
    may evict if memory runs out, or if memory use is above `Description.threshold_percent` after the batch.
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
    images: bytes = b""
    pixels: bytes = b""
    mentions: tuple[tuple[Mention, ...], ...] = ()
    sounds: bytes = b""
    features: bytes = b""
    documents: tuple[DocumentFile | None, ...] = ()
    image_keys: bytes = b""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Message without a reply: no client waits for the batch on this connection any more. If the model has
    `Rows.writes` and the batch has not ended, the adapter interrupts the batch, and the reply to the batch is Refused.
    Batches of other models are not interrupted.
    """


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish the running batches, then exit with status 0. The adapter replies with Done before the batches end."""


class Pong(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply to a Ping. `busy_s`: age of the running batch in seconds, 0 if no batch runs. If the device hangs, `busy_s`
    keeps growing.

    `batches`: number of batches that the device has run. `dropped`: models that the adapter evicted for this Ping.
    `fetching`: progress of weight downloads to this node, by model id.
    """

    pid: int
    busy_s: float = 0.0
    batches: int = 0
    dropped: tuple[str, ...] = ()
    fetching: dict[str, Fetched] = {}


class LoadedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that is loaded on this device. `idle_s`: seconds since its last use. `memory_bytes`: size of the weights.
    `peak_bytes`: largest measured size of the activations.

    `requested_precision`: precision that the model's entry or profile sets, otherwise the default. `precision_reason`:
    why `precision` differs from `requested_precision`; empty if both are equal. `crossover_tokens`: length of a text at
    which attention takes as long as the rest of the model (see `costs`); 0 if the time is proportional to the tokens,
    or if the length is unknown. `engine`: engine that computes hidden states; `engine_reason`: reason of this choice.
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
    engine: str = "torch"
    engine_reason: str = ""


class Description(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply to Describe: state of the process and its device. `lanes`: number of batches that the device runs at once.
    `utilization_percent`: use of the device by all processes; None if it cannot be measured.

    `threshold_percent`: memory use above which models are evicted. `batches`: the last batches, newest last; None if
    SIE_INSTRUMENTATION is off. `devices`: number of devices of this worker; each device has its own adapter process and
    socket (`device_socket`).
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
    towers: TowerUse = TowerUse()
    batches: tuple[RanBatch, ...] | None = None
    devices: int = 1


class Ready(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply to EnsureReady: the model is loaded. `tokenizer`: its fast tokenizer in serialised form (tokenizer.json),
    so that the sidecar needs no files of the model.

    `max_tokens`: largest number of tokens of an input, including special tokens. `rows`: how inputs become rows, by
    operation of the model. `dropped`: models that the adapter evicted for this request.
    """

    loaded: LoadedModel
    tokenizer: bytes
    max_tokens: int
    rows: dict[str, Rows] = {}
    load_s: float = 0.0
    dropped: tuple[str, ...] = ()


class BatchStarted(msgspec.Struct, frozen=True, tag=True):
    """Message that the adapter sends before the reply, when it begins to read the inputs of the batch: a device thread
    takes the batch, an extraction family tokenises the texts, or a model begins to generate text. If the adapter dies
    after this message, an input of the batch may be the cause.
    """

    batch: str


class BatchDone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Results of a batch, one for each input of each of its groups, in order. The arrays in `outcomes` are slices of
    `block`; consecutive inputs have consecutive slices.

    `inference_ms`: time of the forward pass. `postprocess_ms`: time of the computations after the forward pass and of
    the copy to the host. `padding`: number of computed padding tokens. `preprocess_ms`: time of tokenising, if the
    model's family tokenises in the adapter; otherwise 0. `dropped`: models that the adapter evicted for this batch.
    `engine`: engine that computed the hidden states.
    """

    batch: str
    outcomes: tuple[Outcome, ...]
    block: bytes
    inference_ms: float
    postprocess_ms: float = 0.0
    padding: int = 0
    preprocess_ms: float = 0.0
    dropped: tuple[str, ...] = ()
    engine: str = "torch"


class Done(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply to a request that succeeded. `digest`: SHA-256, in hex, of the files of the requested LoRA."""

    digest: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Reply to a request that failed as a whole. `batch`: id of the batch, if the request was a RunBatch. `dropped`:
    models that the adapter evicted for this request before it failed.
    """

    error: ErrorInfo
    batch: str = ""
    dropped: tuple[str, ...] = ()


Request = Ping | Describe | EnsureReady | EnsureLora | Release | RunBatch | Cancel | Drain
Reply = Pong | Description | Ready | BatchStarted | BatchDone | Done | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply, cap: int = MAX_FRAME_BYTES) -> bytes:
    """Return a message as the bytes of one frame. Raises FrameError if the body has more than `cap` bytes."""
    body = _encode(message)
    if len(body) > cap:
        raise FrameError(f"a frame of {len(body)} bytes exceeds the limit of {cap}")
    return _HEADER.pack(len(body)) + body


def request(body: bytes) -> Request:
    """Decode a request of a sidecar. Raises FrameError."""
    try:
        return _requests.decode(body)
    except UNDECODABLE as error:
        raise FrameError(f"not a request of protocol {PROTOCOL}: {error}") from error


def reply(body: bytes) -> Reply:
    """Decode a reply of an adapter. Raises FrameError."""
    try:
        return _replies.decode(body)
    except UNDECODABLE as error:
        raise FrameError(f"not a reply of protocol {PROTOCOL}: {error}") from error


def _length(header: bytes | bytearray, cap: int) -> int:
    (length,) = _HEADER.unpack(header)
    if length > cap:
        raise FrameError(f"a frame of {length} bytes exceeds the limit of {cap}")
    return int(length)


async def read_frame(reader: asyncio.StreamReader, cap: int = MAX_FRAME_BYTES) -> bytes:
    """Return the body of the next frame. The wait for the first byte has no time limit; all other bytes must arrive
    within FRAME_TIMEOUT_S after it. Raises EOFError if the peer closed the connection between frames; FrameError for an
    incomplete frame and for a body of more than `cap` bytes.
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
        raise FrameError("the peer closed the connection in the middle of a frame") from error
    except TimeoutError as error:
        raise FrameError(f"a frame was not complete after {FRAME_TIMEOUT_S} s") from error


def receive_frame(connection: socket.socket, cap: int = MAX_FRAME_BYTES) -> bytearray:
    """Return the body of the next frame from a blocking socket, like `read_frame`, but FRAME_TIMEOUT_S limits each read
    after the first byte. The buffer grows with the bytes that arrive. It is not allocated in advance with the length
    that the header names, because this length may be wrong.
    """
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
        raise FrameError(f"no byte of an incomplete frame arrived for {FRAME_TIMEOUT_S} s") from error
    return body


def _receive_into(connection: socket.socket, buffer: bytearray, size: int) -> None:
    while len(buffer) < size:
        piece = connection.recv(min(size - len(buffer), 1 << 20))
        if not piece:
            raise FrameError("the peer closed the connection in the middle of a frame")
        buffer += piece
