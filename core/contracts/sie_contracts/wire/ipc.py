"""Protocol between sidecar and adapter, over a Unix socket: frames of `u32 big-endian length + msgpack`.

A batch connection transports one request at a time. The sidecar sends a `RunBatch`. The adapter answers `BatchStarted`
when the device starts the batch and `BatchDone` (or `Refused`) at its end. Other requests on this connection are
`EnsureReady` and `EnsureLora`, which last as long as the load, and a `Ping` that permits unloading models. The control
connection transports the short requests, one request and one answer at a time, so that a health check never queues
behind a large frame or a load.

The sidecar decides which models may be unloaded, and in what order: `may_drop` of a request names them. The adapter
decides when. It unloads the first model first, and names the unloaded models in `dropped` of its reply. The adapter
stores neither list: a model that no request names stays loaded.

Token ids, vectors of inputs, pixels, features and results are one block of bytes each. `lengths` and `ids` are
little-endian int32, `features` are float32, `types` and `pixels` are uint8.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.media.documents import DocumentFile, DocumentLimits
from sie_contracts.media.images import ImageTokens, Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.device_reports import RanBatch, Shortages, TowerUse
from sie_contracts.wire.heartbeats import Fetched
from sie_contracts.wire.messages import Mention, Operation, Outcome, RunOptions

MAX_FRAME_BYTES = 1 << 30
MAX_REQUEST_BYTES = 128 << 20  # largest frame that an adapter reads: 32 million token ids
FRAME_TIMEOUT_S = 30.0  # time limit for the rest of a frame after its first byte, in seconds
PROTOCOL = 3
IMAGE_KEY_BYTES = 16

_HEADER = struct.Struct(">I")


def device_socket(path: str, number: int) -> str:
    """Return the socket of the adapter of a worker's device: `path` itself for the first device, number 0."""
    return f"{path}.{number}" if number else path


class FrameError(Exception):
    """Error of a peer that closed the connection inside a frame, stalled inside a frame, or sent a message of another
    protocol.
    """


class Ping(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Health check. Answered by Pong, from the adapter's record of its inference threads.

    `may_drop`: models that may be unloaded now if memory is above the threshold.
    """

    may_drop: tuple[str, ...] = ()


class Describe(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Request for the state of the process, its device and its models. Answered by Description."""


class EnsureReady(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this model unless it is loaded, and serve `entry` from then on. If the loaded weights fit a changed entry as
    well, they stay; otherwise the model is loaded again. Answered by Ready, or by Refused with MODEL_LOAD_FAILED. Loads
    run in parallel to inference.

    `entry` is the catalogue entry that the adapter must serve: the adapter has no catalogue. `may_drop`: models that
    may be unloaded to free memory.
    """

    model: str
    entry: dict[str, Any]
    profile: str = "default"
    may_drop: tuple[str, ...] = ()


class EnsureLora(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load this LoRA of a loaded model unless it is loaded. Answered by Done, or by Refused with LORA_LOAD_FAILED.
    Loads run in parallel to inference.

    `lora`: a folder, or a hub repository as `name` or `name@commit`.
    """

    model: str
    lora: str


class Release(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Unload this model. Answered by Done, also if the model was not loaded."""

    model: str


Layout = Literal["text", "pair", "pieces", "sides", "hypotheses", "spans", "passages", "raw"]


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """Form of the token ids of a query or of a document. A `limit` of 0 means the model's own limit.

    `marker` is inserted after the first special token. `limit` counts tokens, including the marker and all special
    tokens. `expanded` is the number of tokens to which the device pads a row; it is part of the row's cost. If
    `special` is false, a row has no special tokens.
    """

    marker: int = -1
    limit: int = 0
    expanded: int = 0
    special: bool = True


class Rows(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conversion of the inputs of one operation to rows of token ids, by layout.

        text        prefix + text + suffix, a row for each input
        pair        (query, text) as the tokenizer's own template joins them; the text is cut
        pieces      the pieces of the template, tokenised one by one and joined; the piece with the document is cut
        sides       a row for the query, then a row for each input: the device scores each input against the query
        hypotheses  a row (text, hypothesis) for each label of each input; the text is cut
        spans       like text, with the texts and the offsets of each token in its text
        passages    a row (instruction, text) for each input, with offsets like spans; the text is cut
        raw         the texts are sent unchanged; the ids only count their cost

    `tokens`: an input may be token ids. `pairs`: an input may be two texts, joined as a pair. `vectors`: width of the
    multivectors that an input may have instead of a text; 0: an input may have none. `images`: recipe for the images of
    an input; None: an input may have none. `image_tokens`: the ids of an image; None: a row with an image has no ids,
    and an input may have several images. `writes`: the answer is generated in parallel to the batches of other models,
    token by token or by processes of the model. A batch may take minutes, occupies no lane of the device, and ends when
    no client waits for it. `empty`: text for an input without a text and images. `sounds`: recipe for the sound of an
    input; None: an input may have none. `documents`: limits of the document of an input with layout raw; its file goes
    to the adapter unchanged; None: an input may have none. `chunks`: a text may have chunks. `pooling`: how dense
    vectors are pooled; empty if a text has no chunks or the model has no dense vectors.
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


class ChunkedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one input of a group in which texts have chunks.

    `rows`: the number of its rows. `spans`: int32 [chunks, 3], first and end code point and tokens of each chunk; empty
    for an input without chunks. `segments`: int32 [segments, 4], chunk, row within the input, first and end token of
    the row; in the order of the chunks. A chunk is pooled from its segments. If `segments` is empty, each chunk is a
    row.
    """

    rows: int = 1
    spans: bytes = b""
    segments: bytes = b""


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows `start` to `stop` of a batch. They belong to one work item, and its `options` determine the form of the
    answers.

    Work items with different outputs may be in one batch. `inputs` is the number of outcomes of the group; -1: one for
    each row. `traceparent` and `tracestate` are values of the work item, if it is traced. `chunked`: the rows of
    each input, if a text has chunks; empty: all inputs have the same number of rows.
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
        return self.stop - self.start if self.inputs < 0 else self.inputs


class RunBatch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A forward pass. `lengths`: int32 [rows]. `ids`: int32 [sum of lengths]. `types`: uint8 [sum of lengths] or empty.
    All are in the order of the rows.

    `texts` are set for the layouts raw, spans and passages, one for each row. `offsets` are set for spans and passages:
    int32 [sum of lengths, 2], first and end code point of each token, -1 for special tokens and for tokens of the
    instruction. `given`: int32 [rows]. A row with vectors of its own has no ids, and `given` is the number of its
    vectors in `vectors` (float32, all of one width); `given` is -1 for other rows. Both are empty if no row has
    vectors. `images`: int32 [images, 5], in the order of the rows: row of the image, height and width of its pixels,
    height and width of the submitted image, upright. `pixels`: RGB, uint8 [height, width, 3] of each image. `mentions`:
    the mentions of each row, for the layout raw; empty if no row has any. `sounds`: int32 [sounds, 4]: row of the
    sound, and the shape of its features. `features`: float32 [views, frames, bins] of each sound. `documents`: the
    document of each row, for the layout raw; empty if no row has any. `image_keys`: IMAGE_KEY_BYTES for each image.
    Images of one client with equal pixels have equal keys, and an output for one of them is used for the others. The
    output for an image whose key is zeros is used for no other image. If `image_keys` is empty, all keys are zeros.

    An empty `pooling` means the model's own pooling. Two work items share a batch only if model, revision, operation,
    pooling and LoRA are equal. `fingerprint` is the fingerprint of the loaded copy for which the batch was built. A
    copy with another fingerprint refuses the batch as not loaded; empty: any copy. `traceparent` and `tracestate` are
    values of the batch. `may_drop`: models that may be unloaded if memory runs out, or if it is above the threshold
    after the batch.
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
    """Notice that no client waits any more for the batch that was sent on this connection. There is no answer to this
    notice. The batch itself has its reply as always, a refusal if the notice arrived in time. Only a model that
    `writes` is interrupted.
    """


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish the running batches and exit with status 0. The adapter answers at once with Done."""


class Pong(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer to a Ping. `busy_s`: age of the running batch, 0 when idle; it grows while the device hangs.

    `dropped`: models that were unloaded. `fetching`: progress of the downloads of weights to this node, by the id of
    their entry.
    """

    pid: int
    busy_s: float = 0.0
    batches: int = 0
    dropped: tuple[str, ...] = ()
    fetching: dict[str, Fetched] = {}


class LoadedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A resident model, with the values resolved on this device. `idle_s`: seconds since its last use. `memory_bytes`:
    bytes of its weights. `peak_bytes`: the largest measured memory of its activations.

    `requested_precision`: the precision in its entry, or else the default. `precision_reason`: the reason why
    `precision` differs; empty if both are equal. `crossover_tokens`: the text length at which attention takes as long
    as everything else (see `costs`); 0: time is proportional to tokens, or the length is unknown. `engine` computes its
    hidden states; `engine_reason` is the reason for this engine.
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
    """Answer to Describe: the process and its device. `utilization_percent`: load of the device by all processes; None
    if it cannot be measured.

    `threshold_percent`: memory use above which models are evicted. `batches`: the last batches, the newest last; None
    unless the adapter was started with the option that stores them. `devices`: number of devices of this worker, each
    with an adapter and a socket of its own (`device_socket`).
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
    """Answer to EnsureReady: the model is resident. `tokenizer` is the serialised fast tokenizer (tokenizer.json), so
    the sidecar needs no weights folder.

    `max_tokens` includes special tokens. `rows` has an entry for each operation that the model serves. `dropped`:
    models that were unloaded to free memory.
    """

    loaded: LoadedModel
    tokenizer: bytes
    max_tokens: int
    rows: dict[str, Rows] = {}
    load_s: float = 0.0
    dropped: tuple[str, ...] = ()


class BatchStarted(msgspec.Struct, frozen=True, tag=True):
    """Notice that the device starts this batch now. If the adapter dies, an input of the batch may be the cause."""

    batch: str


class BatchDone(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Outcomes of a batch, one for each input, group by group. Slices point into `block`; the slices of consecutive
    inputs are consecutive.

    `inference_ms`: time of the forward pass. `postprocess_ms`: time of the epilogues and of the copy to the host.
    `padding`: positions that were computed in addition to the tokens. `preprocess_ms`: time of tokenising, for a family
    that tokenises in the adapter. `dropped`: models that were unloaded. `engine` computed the hidden states.
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
    """Answer to a request that succeeded. `digest`: SHA-256, in hex, of the files of the requested LoRA."""

    digest: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answer to a request that failed as a whole. `batch` is set if the request was a batch. `dropped`: models that
    were unloaded nevertheless.
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
    """Return the bytes of one frame. Raises FrameError if they are more than `cap`."""
    body = _encode(message)
    if len(body) > cap:
        raise FrameError(f"a frame of {len(body)} bytes exceeds the limit of {cap}")
    return _HEADER.pack(len(body)) + body


def request(body: bytes) -> Request:
    """Decode a request of a sidecar. Raises FrameError."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a request of protocol {PROTOCOL}: {error}") from error


def reply(body: bytes) -> Reply:
    """Decode a reply of an adapter. Raises FrameError."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a reply of protocol {PROTOCOL}: {error}") from error


def _length(header: bytes | bytearray, cap: int) -> int:
    (length,) = _HEADER.unpack(header)
    if length > cap:
        raise FrameError(f"a frame of {length} bytes exceeds the limit of {cap}")
    return int(length)


async def read_frame(reader: asyncio.StreamReader, cap: int = MAX_FRAME_BYTES) -> bytes:
    """Return the body of the next frame. The wait for its first byte has no limit; the remaining bytes must arrive
    within FRAME_TIMEOUT_S.

    Raises EOFError if the peer closed the connection between frames, FrameError otherwise.
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
    """Read a frame from a blocking socket, like `read_frame`. Memory grows with the bytes that arrive, never with the
    length in a header.
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
        raise FrameError(f"a frame stalled for {FRAME_TIMEOUT_S} s") from error
    return body


def _receive_into(connection: socket.socket, buffer: bytearray, size: int) -> None:
    while len(buffer) < size:
        piece = connection.recv(min(size - len(buffer), 1 << 20))
        if not piece:
            raise FrameError("the peer closed inside a frame")
        buffer += piece
