"""Announcements of workers and gateways about themselves over NATS. The rules of evolution in `messages` apply."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.wire.messages import Priority

ON_DISK = 500  # largest number of models on the disk in a heartbeat


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a download of weights. `total_bytes` is 0 while unknown. `bytes_per_s` counts only bytes that were
    downloaded, not bytes that were on the disk before.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class ServedPrecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """Precision in which a loaded model computes. `requested`: the precision of its entry or profile, or else the
    worker's default. `reason`: the reason why `served` differs; empty if both are equal.
    """

    served: str
    requested: str = ""
    reason: str = ""


class ServedEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Engine that computes the hidden states of a loaded model. `reason`: the reason why this engine was chosen."""

    served: str
    reason: str = ""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a model on a worker. `load_s`: duration of its last load. `oldest_s`: age of its oldest work in flight.
    `cost_rate`: tokens per second of the model that the worker accepted recently. `fetched`: progress while its weights
    are downloaded. `crossover_tokens`: the text length at which attention takes as long as everything else (see
    `costs`; 0: unknown). `image_tokens`: largest cost of an image; `image_vectors`: number of token vectors of an image
    (0: unknown, or none). `revision`: revision of the entry that has this state. `loaded_revision`: revision of the
    copy that was loaded last (0: no copy was loaded, or its revision is unknown).
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


class DeviceBeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one device of a worker. `ready` is false while its adapter does not answer. `queue_depth`: work items
    that it has or that wait for it. `models`: the models that are loaded there.
    """

    device: str
    ready: bool
    gpu: str = ""
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    queue_depth: int = 0
    models: tuple[str, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat/1"):
    """State of a worker, in its own announcement. `ready` is false while none of its adapters answers. `unready`: the
    reason while `ready` is false. `leaving`: the worker drains.

    Capacity: `slots` is the number of models of usual size that fit (0: unknown). `rate`: tokens per second while the
    device is busy (0: not measured yet). `held_cost`: tokens in flight. `credit_cost` and `credit_items`: upper bounds
    of tokens and messages in flight (0: not announced). `batch_cost`: upper bound of tokens in a batch. `pipeline`:
    upper bound of batches at the adapter.

    `pool` is the pool from which the worker pulls now. `own_pool` is its own pool, if it asks which pool to serve. If
    it is empty, the worker serves `pool` with any assignment. `clock_ahead_s`: its wall clock minus the broker's, as
    measured (None: unknown). `listens`: the worker subscribes to its subject of assignments. A subject without a
    subscriber then means that the worker is gone. `on_disk`: ids of models whose weights its machine has, at most
    ON_DISK. `device`: names of the devices, separated by commas. `devices`: the state of each one, if there are
    several; the memory and the capacity above are then sums.
    """

    worker: str
    pool: str
    machine_profile: str
    bundle: str
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


class LaneTraffic(msgspec.Struct, frozen=True, array_like=True):
    """Traffic of a gateway at one priority of a lane: recent messages and tokens (halved each minute), tokens per
    second, and tokens that wait for admission in the gateway.
    """

    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A promise to a client whose request was refused: in `due_s` seconds the client may send a request of `cost`
    tokens. `client` is a digest.
    """

    client: bytes
    due_s: float
    cost: float


class QueuedWork(msgspec.Struct, frozen=True, array_like=True):
    """Work of one model (`residency`) at one priority of a lane, at one gateway.

    `tokens`: tokens of this gateway in the queue. `rate`: tokens of this gateway that leave the queue per second (0:
    unknown). `turns`: turns that were promised since the last announcement. `claimed`: clients that have claimed their
    turn.
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


class GatewayBeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="gateway/1"):
    """State of a gateway, which it announces to all gateways each second.

    `traffic` is keyed by lane and priority: `pool.machine profile.bundle.priority`. `qps`: inference requests answered
    per second recently. `config_epoch`: epoch of the catalogue that the gateway serves. `queued`: its work in the
    queue. It is announced only while other gateways exist, five times per second.
    """

    gateway: str
    leaving: bool = False
    traffic: dict[str, LaneTraffic] = {}
    qps: float = 0.0
    config_epoch: str = ""
    queued: tuple[QueuedWork, ...] = ()


decode_gateway = msgspec.msgpack.Decoder(GatewayBeat).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
