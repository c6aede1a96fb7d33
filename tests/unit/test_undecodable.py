"""Bytes from outside that no decoder accepts: each reader of messages, records, files, bodies and sockets gives its
usual answer to them, whether they are cut off, not UTF-8, or nested too deeply.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import msgspec
import pytest
from undecodable import FAULTS, MARK, check, damages_of, json, msgpack, of_file

from sie_broker import BrokerError, CoreMessage, Entry, StreamMessage
from sie_broker.dead_letters import Letters
from sie_broker.nats.client import JetStream, publish_ack
from sie_broker.owner import own
from sie_broker.record import Record, UnreadableRecord
from sie_broker.tables import read_lane
from sie_cli import access
from sie_cli.gateway_client import AdminClient
from sie_cli.models import service
from sie_cli.refusal import CommandRefused
from sie_client import core as client_core
from sie_client import jobs as client_jobs
from sie_client.errors import InvalidInputError, ServerError
from sie_config_service import aliases, mirror, store, workers
from sie_contracts.errors import InternalFailure, NotReady, ValidationFailed
from sie_contracts.settings import SettingError
from sie_contracts.wire import ipc, records
from sie_gateway.admission.admission import Peers
from sie_gateway.fleet import lag
from sie_gateway.fleet import workers as sockets
from sie_gateway.fleet.demand import DemandRecords
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.fragments import Damaged, put_together
from sie_gateway.inference.results import ResultInbox
from sie_runtime import feed, keys
from sie_sidecar.in_flight import Loading
from sie_sidecar.intake import WorkIntake
from sie_sidecar.pool_membership import PoolMembership
from sie_sidecar.prepare import fetching
from sie_sidecar.settle import ResultDelivery
from sie_store.weights import listing, manifest

pytestmark = pytest.mark.xdist_group("sources")

Reader = Callable[[bytes], Any]


def of_handler(handler: Any) -> Reader:
    """Return a reader of messages: the handler of an object whose other methods do nothing."""
    return lambda data: handler(MagicMock(), CoreMessage("subject", data, "reply"))


async def of_inbox(data: bytes) -> None:
    bus = MagicMock(send=AsyncMock())
    await ResultInbox(bus, MagicMock())._on_result(CoreMessage("subject", data, "reply"))
    bus.send.assert_awaited_once()


def of_owner(data: bytes) -> Any:
    bus = MagicMock(subscribe=AsyncMock(), send=AsyncMock())

    async def answer() -> None:
        await own(bus, AsyncMock(return_value=True))
        await bus.subscribe.call_args.args[1](CoreMessage("subject", data, "reply"))
        bus.send.assert_awaited_once()

    return answer()


def of_watch(data: bytes) -> None:
    Record(MagicMock(), lambda entry: records.decode_demand(entry.value or b""), MagicMock()).apply(Entry("k", data, 1))


def of_change(data: bytes) -> Any:
    bucket = MagicMock(get=AsyncMock(return_value=Entry("k", data, 1)))
    record: Record[Any] = Record(bucket, lambda entry: records.decode_demand(entry.value or b""), MagicMock())
    return record.change("k", lambda before: before)


def bucket_of(data: bytes) -> Any:
    """Return an object whose bucket has these bytes under any key."""
    entry = Entry("model.x", data, 1)
    return MagicMock(_bucket=MagicMock(get=AsyncMock(return_value=entry)), get=AsyncMock(return_value=entry))


def connection_of(data: bytes) -> Any:
    """Return an object whose requests over NATS and HTTP are answered with these bytes."""
    message = SimpleNamespace(data=data, headers=None)
    answer = SimpleNamespace(status_code=200, content=data, is_success=True, headers={}, raise_for_status=lambda: None)
    return MagicMock(
        roundtrip=AsyncMock(return_value=message),
        _bus=MagicMock(request=AsyncMock(return_value=data)),
        _client=MagicMock(get=AsyncMock(return_value=answer)),
        _exchange=MagicMock(return_value=answer),
        get=AsyncMock(return_value=answer),
        url="http://x",
        leases=MagicMock(left_s=lambda _: 1.0),
    )


def config_source_of(data: bytes) -> feed.HttpConfigSource:
    source = feed.HttpConfigSource("http://config", None)
    source._client = connection_of(data)._client
    return source


# name -> message that is valid up to a field that it lacks, its encoding, the reader, and the error that the reader
# raises; None: it logs the fault, or returns that there is nothing
READERS: dict[str, tuple[dict[str, Any], Callable[[Any], bytes], Any, type[Exception] | None]] = {
    # messages
    "heartbeat, config": (
        {"type": "heartbeat/1", "worker": MARK},
        msgpack,
        of_handler(workers.CatalogueReaders._on_heartbeat),
        None,
    ),
    "gateway, config": (
        {"type": "gateway/1", "gateway": MARK},
        msgpack,
        of_handler(workers.CatalogueReaders._on_gateway),
        None,
    ),
    "heartbeat, gateway": ({"type": "heartbeat/1", "worker": MARK}, msgpack, of_handler(Fleet._on_heartbeat), None),
    "gateway, gateway": ({"type": "gateway/1", "gateway": MARK}, msgpack, of_handler(Peers._on_beat), None),
    "result": ({"type": "result/1", "request": MARK}, msgpack, of_inbox, None),
    "parts of a result": (
        {"type": "result/1", "request": MARK},
        msgpack,
        lambda data: put_together([data], hashlib.sha256(data).hexdigest()),
        Damaged,
    ),
    "work": (
        {"type": "work/1", "request": MARK},
        msgpack,
        lambda data: WorkIntake.accept(MagicMock(), MagicMock(data=data, delivered=1)),
        None,
    ),
    "work in a stream": (
        {"type": "work/1", "request": MARK},
        msgpack,
        lambda data: lag._model_of(StreamMessage(1, "s", data, 0.0)),
        None,
    ),
    "cancelled requests": ({"type": "cancel/1", "requests": [MARK]}, msgpack, of_handler(WorkIntake.on_cancel), None),
    "residency": ({"type": "residency/1", "model": MARK}, msgpack, of_handler(Loading.on_residency), None),
    "payload": (
        {"type": "payload/1", "inputs": [{"text": MARK}]},
        msgpack,
        lambda data: fetching._whole(MagicMock(), data),
        InternalFailure,
    ),
    "confirmation": (
        {"type": "confirm/1", "verdict": MARK},
        msgpack,
        lambda data: ResultDelivery._deliver(connection_of(data), MagicMock(), b"", 1.0, MagicMock()),
        None,
    ),
    "dead letter": (
        {"type": "dead/1", "id": MARK},
        msgpack,
        lambda data: Letters(MagicMock(), "p")._read(StreamMessage(1, "s", data, 0.0)),
        None,
    ),
    "delta": ({"type": "delta/1", "producer": MARK}, msgpack, of_handler(feed.CatalogueFeed._on_delta), None),
    "request for a stream": ({"name": MARK}, msgpack, of_owner, None),
    "acknowledgement": (
        {"error": {"description": MARK}},
        json,
        lambda data: publish_ack("s", SimpleNamespace(data=data, headers=None)),
        BrokerError,
    ),
    "answer of the broker": (
        {"error": {"description": MARK}},
        json,
        lambda data: JetStream.api(connection_of(data), "V", {}, dict),
        BrokerError,
    ),
    # records
    "record": ({"at_s": MARK}, msgpack, of_watch, None),
    "record to change": ({"at_s": MARK}, msgpack, of_change, UnreadableRecord),
    "table": ({"type": MARK, "parts": [MARK]}, msgpack, lambda data: read_lane(bucket_of(data), "lane"), None),
    "demand": ({"at_s": MARK}, msgpack, lambda data: DemandRecords.is_wanted(bucket_of(data), MagicMock()), None),
    "key": ({"id": MARK}, json, lambda data: keys.readable([Entry("k", data, 1)]), None),
    "model": ({"source": MARK}, json, lambda data: mirror.decoded(store._stored, Entry("model.x", data, 1)), NotReady),
    "copy of a model": ({"source": MARK}, json, lambda data: store._copied(Entry("model.x", data, 1)), None),
    "index of aliases": ({"alias": [MARK]}, json, lambda data: aliases.AliasIndex.read(data, 1), NotReady),
    "replies": (
        {"key": MARK},
        json,
        lambda data: store.CatalogueStore.slot(bucket_of(b"[" + data + b"]"), "0" * 8),
        None,
    ),
    # bodies and sockets
    "frame of a sidecar": ({"type": MARK}, msgpack, ipc.request, ipc.FrameError),
    "frame of an adapter": ({"type": MARK}, msgpack, ipc.reply, ipc.FrameError),
    "status of a worker": (
        {"name": MARK},
        json,
        lambda data: sockets.WorkerSocket.status.fget(MagicMock(frame=data)),
        None,
    ),  # type: ignore[attr-defined]
    "export": ({"epoch": MARK}, json, lambda data: config_source_of(data).export(), feed.ConfigUnavailable),
    "entry in an export": (
        {"id": MARK},
        json,
        lambda data: feed._document(feed.RawModel("m", msgspec.Raw(data))),
        ValidationFailed,
    ),
    "epoch": ({"epoch": MARK}, json, lambda data: config_source_of(data).epoch(), feed.ConfigUnavailable),
    "pools of a worker": (
        {"worker": MARK},
        json,
        lambda data: PoolMembership._request_pool(connection_of(data), "u"),
        None,
    ),
    "answer of a gateway": (
        {"id": MARK},
        json,
        lambda data: AdminClient.request(connection_of(data), "GET", "/", dict),
        CommandRefused,
    ),
    "answer of the config service": (
        {"id": MARK},
        json,
        lambda data: service.ConfigServiceClient._accepted(
            connection_of(data), "GET", httpx.Response(200, content=data), Any
        ),
        CommandRefused,
    ),
    "refusal of the config service": (
        {"error": {"message": "m"}, "x": MARK},
        json,
        lambda data: service._refusal_of(httpx.Response(422, content=data)),
        None,
    ),
    "refusal, client": (
        {"error": MARK},
        json,
        lambda data: client_core.failure_of(client_core.Received(500, {}, data)),
        None,
    ),
}

FILES: dict[
    str, tuple[dict[str, Any], Callable[[Any], bytes], Callable[[bytes, Path], Any], type[Exception] | None]
] = {
    "access": (
        {"url": MARK, "gateway_url": MARK},
        json,
        of_file(lambda file: access.read(file.parent), access.FILE),
        SettingError,
    ),
    "manifest of a job, client": (
        {"job": MARK},
        json,
        of_file(lambda file: client_jobs._claimed(file.parent, "j"), client_jobs.MANIFEST),
        InvalidInputError,
    ),
    "manifest of weights": ({"repository": MARK}, json, lambda data, _: manifest.decode(data), manifest.ManifestError),
    "header of weights": ({MARK: {}}, json, of_file(listing._wrong_with, "a.safetensors"), None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_message_that_cannot_be_decoded_gets_the_usual_answer(reader: str, fault: str) -> None:
    sample, encode, read, error = READERS[reader]
    check(functools.partial(read, damages_of(sample, encode)[fault]), error)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", FILES)
def test_a_file_that_cannot_be_decoded_gets_the_usual_answer(reader: str, fault: str, tmp_path: Path) -> None:
    sample, encode, read, error = FILES[reader]
    check(functools.partial(read, damages_of(sample, encode)[fault], tmp_path), error)


def test_a_reply_that_cannot_be_decoded_is_an_error_of_the_client() -> None:
    for body in damages_of({"id": MARK}, json).values():
        with pytest.raises(ServerError), client_core.reading({}):
            msgspec.json.decode(body)
