"""Owner of streams: the only component that may create and update streams and buckets on a broker with users.

    gateway, worker ──StreamRequest──► sie.streams.* ──► own: a pool that exists? a size? ──► broker

NATS permissions apply to subjects, not to the settings of a stream. But these settings can make a stream copy messages
from any subject and publish them on any other subject. So a user that may create streams could read and publish
everything. The owner therefore writes the settings itself. From a request it takes only storage, replicas, ages,
limits, duplicate window, topology version, and the name, which it checks. A queue must belong to a pool that exists,
and must have a size, so that no user can fill the broker with queues.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from sie_broker import Broker, BrokerError, CoreMessage, Subscription
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import records, topology
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import StreamSpec

_logger = logging.getLogger("sie.broker")
# For these buckets, `make` overrides values of the request: buckets in _KEYS are stored on disk, buckets in _LASTING do
# not expire.
_KEYS = (topology.KEYS_BUCKET, topology.KEYS_COPY_BUCKET)
_LASTING = (*_KEYS, topology.CATALOGUE_BUCKET, topology.CATALOGUE_COPY_BUCKET)


def spec_of(request: StreamRequest) -> StreamSpec:
    """Return the settings of the requested stream for work or dead letters. Raises ValueError for any other name, and
    for a stream without a size.
    """
    kind, _, pool = request.name.partition("_")
    if kind not in ("WORK", "DEAD") or topology.pool_name(pool) != pool:
        raise ValueError(f"{request.name[:70]!r} is no name of a stream for work or dead letters")
    if request.max_bytes < (topology.MIN_QUEUE_BYTES if kind == "WORK" else 1):
        raise ValueError(f"max_bytes {request.max_bytes}: a stream for work or dead letters must have a size")
    return StreamSpec(
        request.name,
        (f"sie.work.{pool}.>" if kind == "WORK" else topology.dead_letter_subject(pool),),
        request.storage,
        request.replicas,
        request.max_age_s,
        request.max_bytes,
        request.max_per_subject,
        request.duplicate_window_s,
        retention="workqueue" if kind == "WORK" else "limits",
        version=request.version,
    )


async def make(broker: Broker, request: StreamRequest, is_pool: Callable[[str], Awaitable[bool]]) -> None:
    """Create or update the requested stream or bucket. Raises BrokerError, and ValueError for an invalid request."""
    if request.storage not in ("file", "memory"):
        raise ValueError(f"storage {request.storage[:70]!r}: expected file or memory")
    if request.version > topology.TOPOLOGY_VERSION:
        raise ValueError(f"topology {request.version} is newer than this config service knows: upgrade the service")
    if not request.name.startswith("KV_"):
        spec, pool = spec_of(request), request.name.partition("_")[2]
        if not await is_pool(pool):
            raise ValueError(
                f"{pool!r} is neither the pool of this installation (SIE_POOL of the config service) nor a reservation"
            )
        await broker.ensure_stream(spec)
        return
    bucket = request.name.removeprefix("KV_")
    if bucket not in topology.BUCKETS:
        raise ValueError(f"{request.name[:70]!r} is no name of a bucket of SIE")
    storage, max_age_s, removed_age_s = request.storage, request.max_age_s, request.removed_age_s
    if bucket in _LASTING:
        max_age_s = removed_age_s = 0.0
        storage = "file" if bucket in _KEYS else storage
    await broker.key_value(
        bucket, storage=storage, replicas=request.replicas, max_age_s=max_age_s, removed_age_s=removed_age_s
    )


async def own(broker: Broker, is_pool: Callable[[str], Awaitable[bool]]) -> Subscription:
    """Subscribe to requests for streams, and reply to each request with an error text, or with an empty text when the
    stream exists. `broker` must be connected as a user that may create streams. `is_pool` returns whether a pool
    exists, or raises BrokerError. If several processes are owners, NATS passes each request to one of them. Raises
    BrokerError.
    """

    async def answer(message: CoreMessage) -> None:
        try:
            request = records.decode_stream_request(message.data)
            if message.subject != topology.streams_subject(request.name):
                raise ValueError(f"{request.name[:70]!r} must not be requested on {message.subject}")
            await make(broker, request, is_pool)
        except (*UNDECODABLE, BrokerError) as error:
            _logger.warning("a stream or bucket that a process requested was not created or updated: %s", error)
            await broker.send(message.reply, str(error).encode()[:1000])
        else:
            await broker.send(message.reply, b"")

    broker.owns_streams = True
    return await broker.subscribe(f"{topology.STREAMS_SUBJECT}.*", answer, queue="owner")
