"""What workers and gateways announce about themselves over NATS. The rules of evolution are those of `messages`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sie_contracts.errors import ErrorInfo
from sie_contracts.messages import Priority


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a fetch of weights is. `total_bytes` is 0 until it is known; `bytes_per_s` counts what arrived, not what
    was there before.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class ServedPrecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """In which precision a loaded model computes. `requested`: what its entry or profile asks for, else the worker's
    default. `reason`: why `served` is another one, empty if it is not.
    """

    served: str
    requested: str = ""
    reason: str = ""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model on one worker. `load_s` is what its last load took, `oldest_s` the age of the oldest work that is held
    for it, `cost_rate` the tokens a second that were taken in for it lately, `fetched` how far its weights are while
    they come to the worker's disk. `crossover_tokens`: the length of a text at which attention takes as long as
    everything else (`costs`; 0: not known).
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


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat/1"):
    """A worker's own account of itself. `ready` is false while its adapter does not answer; `leaving` says that it
    drains.

    `slots` is how many models of the usual size fit (0: not known), `rate` the tokens a second that its device runs
    while it is busy (0: not measured yet), `held_cost` the tokens that it has taken in and not answered, `credit_cost`
    and `credit_items` how many of them and how many messages it takes in at most (0: not told). A batch has
    `batch_cost` tokens at most, and at the adapter are `pipeline` batches at most. `pool` is the one that it pulls from
    now; `own_pool` its own, of a worker that asks which pool to serve (empty: it serves `pool` whatever is assigned).
    `clock_ahead_s`: its wall clock less the broker's, as it measured that (None: not yet, or not told). `reads_parts`:
    whether it reads a placement table that is in parts.
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
    reads_parts: bool = False


class LaneTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway puts into the queue at one priority of a lane: messages and their tokens lately (halved each
    minute), tokens a second, and the tokens that wait in the gateway for their turn.
    """

    messages: float
    tokens: float
    rate: float = 0.0
    waiting: int = 0


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A client that was refused comes again in `due_s` seconds, with a request of `cost` tokens. `client`: a digest."""

    client: bytes
    due_s: float
    cost: float


class QueuedWork(msgspec.Struct, frozen=True, array_like=True):
    """One model (`residency`) at one priority of a lane, as a gateway sees it: the tokens that it has in the queue, the
    tokens of its own that leave the queue per second (0: not known), the turns that it promised since its last
    announcement, and the clients whose turn it was.
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
    """A gateway's account of itself, each second, to all gateways. `traffic` by lane and priority: `pool.machine
    profile.bundle.priority`. `qps`: inference requests that it answered per second lately. `config_epoch`: of the
    catalogue that it serves by. `queued`: work in the queue, told only while there are other gateways, and then five
    times a second.
    """

    gateway: str
    leaving: bool = False
    traffic: dict[str, LaneTraffic] = {}
    qps: float = 0.0
    config_epoch: str = ""
    queued: tuple[QueuedWork, ...] = ()


decode_gateway = msgspec.msgpack.Decoder(GatewayBeat).decode
decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode
