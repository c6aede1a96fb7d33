"""Values that gateways and workers store in key-value buckets of NATS, and the request for a new bucket or stream.

The rules for changes to these structs are in `wire.messages`. `sie_broker.record` reads and writes the values.
"""

from __future__ import annotations

import msgspec

from sie_contracts.wire.topology import DUPLICATE_WINDOW_S


class StreamRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="stream-request/1"):
    """Request to the owner of streams (the one process that may create them): create this stream or bucket, or update
    it to `version`. The owner computes the subjects from the name, so that no process can request a stream that stores
    messages of another process.

    The limits mean the same as in `topology.StreamSpec`. `removed_age_s`: for a bucket, seconds after which the broker
    deletes the marker of a removed key.
    """

    name: str
    storage: str = "file"
    replicas: int = 1
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_per_subject: int = 0
    duplicate_window_s: float = DUPLICATE_WINDOW_S
    removed_age_s: float = 0.0
    version: int = 0


class Demand(msgspec.Struct, frozen=True, omit_defaults=True, tag="demand/1"):
    """Demand for a lane (pool, machine profile and bundle) that has no ready worker. The demand is valid for a minute
    (DEMAND_LIFE_S of the gateway) after `at_s`, a time of the broker's clock.
    """

    at_s: float


class Placement(msgspec.Struct, frozen=True, omit_defaults=True, tag="placement/1"):
    """Placement table of a lane (pool, machine profile and bundle). `hosts`: by model id, the workers that should load
    the model. `at_s`: time of the last planning step. `raised_s`: for each model, the time when its number of workers
    was last raised. Times are by the broker's clock.

    A large table is stored in several values, each a PlacementPart. Then `parts` has the `stamp` of each of these
    values, and `hosts` and `raised_s` are empty.
    """

    at_s: float
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}
    parts: tuple[int, ...] = ()


class PlacementPart(msgspec.Struct, frozen=True, omit_defaults=True, tag="placement-part/1"):
    """Rows of some models of a large placement table. `hosts` and `raised_s` are as in `Placement`; `stamp` is their
    digest, by which `Placement.parts` refers to this part.
    """

    stamp: int
    hosts: dict[str, tuple[str, ...]] = {}
    raised_s: dict[str, float] = {}


class ReservationSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request for a reservation (a pool for its owner alone): number of GPUs by machine profile (`gpus`), and minimum
    number of workers in total (`minimum_worker_count`). If `bundle` is set, only workers of this bundle count. The
    lease lasts `ttl_seconds`. `gpu_caps` is stored and shown, but has no effect.
    """

    name: str
    gpus: dict[str, int]
    bundle: str = ""
    minimum_worker_count: int = 0
    ttl_seconds: int = 1200
    gpu_caps: dict[str, int] = {}
    pinned_models: tuple[str, ...] = ()  # models that the reservation's workers load before the first request


class Reservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reservation and its lease. Times are by the broker's clock. `takes_last`: the reservation may take the last
    worker of a bundle away from the default pool. `owner`: `Grant.key` of the credential that created it.
    """

    spec: ReservationSpec
    created_s: float
    renewed_s: float
    takes_last: bool = False
    owner: str = ""

    @property
    def expires_s(self) -> float:
        return self.renewed_s + self.spec.ttl_seconds


class Reservations(msgspec.Struct, frozen=True, omit_defaults=True, tag="reservations/1"):
    """Reservations by name. `ended`: by name, the end times of reservations whose streams still exist."""

    pools: dict[str, Reservation] = {}
    ended: dict[str, float] = {}


class Assigned(msgspec.Struct, frozen=True, omit_defaults=True, tag="assigned/1"):
    """Assignment of workers to reservations. `workers`: worker id -> pool of the reservation."""

    workers: dict[str, str] = {}


decode_stream_request = msgspec.msgpack.Decoder(StreamRequest).decode
decode_demand = msgspec.msgpack.Decoder(Demand).decode
decode_placement = msgspec.msgpack.Decoder(Placement).decode
decode_placement_part = msgspec.msgpack.Decoder(PlacementPart).decode
decode_reservations = msgspec.msgpack.Decoder(Reservations).decode
decode_assigned = msgspec.msgpack.Decoder(Assigned).decode
