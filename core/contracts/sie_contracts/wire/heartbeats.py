"""Heartbeats that workers and gateways send over NATS. The rules for changes to the structs are in `wire.messages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.wire.messages import Priority
from sie_contracts.wire.topology import Lane

REPORTED_LORAS = 64  # maximum number of LoRAs per model in a heartbeat
Name = Annotated[str, msgspec.Meta(min_length=1)]  # an empty name cannot be part of a subject or a key
ON_DISK = 500  # maximum number of models that a heartbeat lists as being on the worker's disk


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a download of weights. `total_bytes` is 0 while unknown. `bytes_per_s` does not count bytes that were
    already on the disk.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class ServedPrecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """Precision in which a loaded model computes (`served`). `requested`: precision that the model's entry or profile
    sets, otherwise the worker's default. `reason`: why `served` differs from `requested`; empty if both are equal.
    """

    served: str
    requested: str = ""
    reason: str = ""


class ServedEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Engine that computes the hidden states of a loaded model (`served`). `reason`: why this engine was chosen."""

    served: str
    reason: str = ""


class ServedLora(msgspec.Struct, frozen=True, omit_defaults=True):
    """LoRA of a loaded model. `digest`: digest of the LoRA's files, which may change under the same name."""

    name: str
    digest: str


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a model on a worker. `queued`: number of the model's work items on the worker. `load_s`: seconds of the
    last load. `oldest_s`: age of the oldest work item in seconds. `cost_rate`: tokens per second that the worker
    recently accepted for the model. `fetched`: progress of the download of the weights. `crossover_tokens`: length of a
    text at which attention takes as long as the rest of the model (see `costs`; 0: unknown). `image_tokens`: largest
    cost of an image, in tokens; `image_vectors`: number of token vectors of an image (0: unknown, or none). `revision`:
    revision of the catalogue entry to which `state` belongs. `loaded_revision`: revision with which the model was
    last loaded (0: never loaded, or unknown). `loras`: the loaded LoRAs, at most REPORTED_LORAS.
    """

    model: str
    state: Literal["available", "loading", "loaded", "unloading", "failed"]
    memory_bytes: int = 0
    queued: int = 0
    fingerprint: str = ""
    error: ErrorInfo | None = None
    certificate: dict[str, Any] | None = None
    load_s: float = 0.0
    oldest_s: float = 0.0
    cost_rate: float = 0.0
    fetched: Fetched | None = None
    precision: ServedPrecision | None = None
    crossover_tokens: int = 0
    image_tokens: int = 0
    image_vectors: int = 0
    engine: ServedEngine | None = None
    revision: int = 0
    loaded_revision: int = 0
    loras: tuple[ServedLora, ...] = ()


class DeviceBeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one device of a worker. `ready` is false while the device's adapter process does not reply.
    `queue_depth`: number of work items that run on the device or wait for it. `models`: models loaded on the device.
    """

    device: str
    ready: bool
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    queue_depth: int = 0
    models: tuple[str, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat/1"):
    """State of a worker. The worker sends a heartbeat regularly and after each change. `ready`: the worker can take
    work; if not, `unready` is the reason. `leaving`: the worker finishes its work items and pulls no more messages.

    Capacity: `slots`: number of models of usual size that fit into its memory (0: unknown). `rate`: tokens per second
    while the device is busy (0: not measured yet). `held_cost`: cost of the work items on the worker, in tokens.
    `credit_cost` and `credit_items`: maximum cost and maximum number of the work items on the worker (0: not
    announced). `batch_cost`: largest number of tokens in a batch. `pipeline`: largest number of batches that run or
    wait at the adapter.

    `pool`: pool from which the worker takes work now. `own_pool`: pool to which the worker belongs, if gateways may
    assign the worker to another pool; empty if it always serves `pool`. `clock_ahead_s`: wall clock of the worker minus
    the broker's clock (None: unknown). `listens`: the worker subscribes to its assignment subject; if this subject has
    no subscriber, the worker is not connected. `on_disk`: ids of models whose weights are on its disk, at most ON_DISK.
    `device`: names of its devices, separated by commas. `devices`: state of each device; empty for one device. With
    several devices, the other fields about memory and capacity are sums.
    """

    worker: Name
    pool: str
    machine_profile: Name
    bundle: Name
    ready: bool
    version: str
    leaving: bool = False
    gpu_count: int = 1
    gpu: str = ""
    device: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    queue_depth: int = 0
    config_epoch: str = ""
    models: tuple[ModelStatus, ...] = ()
    slots: int = 0
    rate: float = 0.0
    held_cost: int = 0
    credit_cost: int = 0
    credit_items: int = 0
    batch_cost: int = 0
    pipeline: int = 0
    own_pool: str = ""
    clock_ahead_s: float | None = None
    listens: bool = False
    on_disk: tuple[str, ...] = ()
    unready: str = ""
    devices: tuple[DeviceBeat, ...] = ()

    @property
    def lane(self) -> Lane:
        """Return the lane (pool, machine profile and bundle) that the worker serves now."""
        return Lane(self.pool, self.machine_profile, self.bundle)


class LaneTraffic(msgspec.Struct, frozen=True, array_like=True):
    """Traffic that a gateway sends to one priority of a lane (pool, machine profile and bundle). `messages`, `tokens`:
    numbers of published messages and tokens; both are halved each minute, so that older traffic counts less. `rate`:
    tokens per second. `waiting`: tokens that wait in the gateway for admission to the queue.
    """

    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """Promise to a client whose request was refused: if the client repeats the request `due_s` seconds after this
    heartbeat, the queue has space for `cost` tokens. `client`: digest of the client's address, key and request.
    """

    client: bytes
    due_s: float
    cost: float


class QueuedWork(msgspec.Struct, frozen=True, array_like=True):
    """Work that one gateway sent for one model, at one priority of a lane (pool, machine profile and bundle).
    `residency`: the model's id, or `id:profile` if the profile has other load options.

    `tokens`: tokens of this gateway's messages in the queue. `rate`: tokens of these messages that workers take per
    second (0: unknown). `turns`: new promises to refused clients. `claimed`: clients that have used their promise.
    """

    pool: str
    machine_profile: str
    bundle: str
    priority: Priority
    residency: str
    tokens: int
    rate: float = 0.0
    turns: tuple[Turn, ...] = ()
    claimed: tuple[bytes, ...] = ()


class AnswerErasure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Selection of cached answers that every gateway erases. An answer is selected if it matches each field that is not
    empty. `key`: name of an API key in metrics. `digest`: digest of an input.
    """

    model: str = ""
    key: str = ""
    digest: bytes = b""


class GatewayBeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="gateway/1"):
    """State of a gateway. The gateway sends this state to all gateways every second, and five times per second while
    `queued` is not empty.

    `traffic`: traffic by `pool.machine profile.bundle.priority`. `qps`: recent number of answered inference requests
    per second. `config_epoch`: epoch (version) of the catalogue that the gateway uses. `queued`: work of this gateway
    that is in the queue; empty if there are no other gateways. `erasure`: cached answers that the receivers erase.
    `erasures`: number of erasures that the gateway has sent, including `erasure`.
    """

    gateway: str
    leaving: bool = False
    traffic: dict[str, LaneTraffic] = {}
    qps: float = 0.0
    config_epoch: str = ""
    queued: tuple[QueuedWork, ...] = ()
    erasure: AnswerErasure | None = None
    erasures: int = 0


decode_gateway = msgspec.msgpack.Decoder(GatewayBeat).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
