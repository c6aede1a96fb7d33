"""Permissions of the users of a broker: a table of every subject of the JetStream API, and the ways in which a user who
may create streams could publish in the name of others or read their messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broker_harness import WAIT_S, Box
from inprocess import until, until_told
from nats.aio.client import Client
from nats_server import NatsServer

from sie_broker import BrokerUnavailable, CoreMessage, NotPermitted, TopologyMismatch, Write
from sie_broker.limits import API_TIMEOUT_S
from sie_broker.nats import NatsBroker, connect
from sie_broker.nats.api import bucket_config
from sie_broker.nats.client import OWNER_WITHIN_S
from sie_broker.nats.transport import inbox_prefix
from sie_broker.owner import own
from sie_broker.record import RecordBucket
from sie_cli.serve.embedded import USERS, users
from sie_contracts.settings import Secret
from sie_contracts.wire import messages, topology
from sie_contracts.wire.records import StreamRequest
from sie_runtime.keys import create, is_foreign, remove_foreign
from sie_runtime.keys import decode as decode_key
from sie_runtime.keys import encode as encode_key

PASSWORD = "sesame"
COMPONENTS = ("gateway", "config", "worker")
BUCKETS = frozenset(f"KV_{bucket}" for bucket in topology.BUCKETS)
CATALOGUE = frozenset({f"KV_{topology.CATALOGUE_BUCKET}", f"KV_{topology.CATALOGUE_COPY_BUCKET}"})
KEYS = f"KV_{topology.KEYS_BUCKET}"
POOLS = f"KV_{topology.POOLS_BUCKET}"
OF_CONFIG = CATALOGUE | {KEYS, f"KV_{topology.KEYS_COPY_BUCKET}"}
OWN_READ = frozenset({f"KV_{topology.PLACEMENT_BUCKET}", f"KV_{topology.POISON_BUCKET}"})  # buckets that workers read
QUEUES = frozenset({"WORK__default", "WORK_team", "DEAD__default", "evil"})
STREAMS = BUCKETS | QUEUES
OF_WORK = "CONSUMER.CREATE.{}.c.sie.work._default.cpu.default.interactive.m"
# one subject for each operation of the API; {} is the stream
OF_STREAMS = (
    *(f"STREAM.{verb}.{{}}" for verb in ("CREATE", "UPDATE", "DELETE", "INFO", "PURGE", "SNAPSHOT", "RESTORE")),
    *(f"STREAM.{verb}.{{}}" for verb in ("MSG.GET", "MSG.DELETE", "PEER.REMOVE", "LEADER.STEPDOWN")),
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.$KV.sie_keys.x",
    "CONSUMER.CREATE.{}",
    "CONSUMER.CREATE.{}.c",
    "CONSUMER.CREATE.{}.c.$KV.sie_keys.x",
    OF_WORK,
    "CONSUMER.DURABLE.CREATE.{}.c",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
    *(f"CONSUMER.{verb}.{{}}.c" for verb in ("INFO", "DELETE", "MSG.NEXT", "PAUSE", "UNPIN", "RESET")),
    "CONSUMER.LEADER.STEPDOWN.{}.c",
)
OF_ALL = (
    *("INFO", "STREAM.NAMES", "STREAM.LIST", "ACCOUNT.INFO", "ACCOUNT.PURGE.$G", "ACCOUNT.STREAM.MOVE.$G.evil"),
    *("META.LEADER.STEPDOWN", "SERVER.REMOVE", "STREAM.TEMPLATE.CREATE.t", "STREAM.TEMPLATE.NAMES"),
)
BESIDES_THE_API = (
    *("$JS.FC.{}.c.x", "$JS.ACK.{}.c.1.1.1.1.0", "$JS.ACK.domain.account.{}.c.1.1.1.1.0.token"),
    *("$JS.EVENT.ADVISORY.CONSUMER.CREATED.{}.c", "$JS.EVENT.METRIC.CONSUMER.ACK.{}.c", "$JS.SNAPSHOT.RESTORE.{}.x"),
    *("$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.JSZ", "$SYS.REQ.USER.INFO", "$SRV.PING"),
)
ALLOWED: dict[str, dict[str, frozenset[str]]] = {
    "gateway": {
        "STREAM.INFO.{}": STREAMS - CATALOGUE,
        "STREAM.MSG.GET.{}": STREAMS - CATALOGUE,
        "STREAM.DELETE.{}": QUEUES,
        "STREAM.MSG.DELETE.{}": QUEUES,
        "STREAM.PURGE.{}": frozenset({f"KV_{topology.SHARDS_BUCKET}"}),
        "CONSUMER.CREATE.{}.c": BUCKETS - CATALOGUE,
        OF_WORK: STREAMS - CATALOGUE,
        "CONSUMER.INFO.{}.c": STREAMS - CATALOGUE,
        "CONSUMER.DELETE.{}.c": STREAMS - CATALOGUE,
        "CONSUMER.NAMES.{}": STREAMS - CATALOGUE,
        "CONSUMER.LIST.{}": STREAMS - CATALOGUE,
        "CONSUMER.MSG.NEXT.{}.c": BUCKETS - CATALOGUE,
    },
    "config": {
        "STREAM.INFO.{}": OF_CONFIG | {POOLS},
        "STREAM.MSG.GET.{}": OF_CONFIG | {POOLS},
        "CONSUMER.CREATE.{}.c": OF_CONFIG,
        "CONSUMER.DELETE.{}.c": OF_CONFIG,
        "CONSUMER.MSG.NEXT.{}.c": OF_CONFIG,
    },
    "worker": {
        "STREAM.INFO.{}": QUEUES | OWN_READ,
        "STREAM.MSG.GET.{}": OWN_READ,
        "CONSUMER.CREATE.{}.c": OWN_READ,
        "CONSUMER.DELETE.{}.c": OWN_READ,
        "CONSUMER.NAMES.{}": QUEUES | OWN_READ,
        "CONSUMER.MSG.NEXT.{}.c": QUEUES | OWN_READ,
        "$JS.ACK.{}.c.1.1.1.1.0": QUEUES | OWN_READ,
        "$JS.ACK.domain.account.{}.c.1.1.1.1.0.token": QUEUES | OWN_READ,
    },
    "streams": {
        "STREAM.CREATE.{}": STREAMS,
        "STREAM.UPDATE.{}": STREAMS,
        "STREAM.INFO.{}": STREAMS,
        "STREAM.PURGE.{}": frozenset({KEYS, f"KV_{topology.KEYS_COPY_BUCKET}"}),
    },
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    for user in USERS:
        monkeypatch.setenv(f"{user.upper()}_PASSWORD", f'"{PASSWORD}"')
    with NatsServer(tmp_path / "nats", extra=users()) as running:
        yield running


@contextlib.asynccontextmanager
async def connected(server: NatsServer, user: str) -> AsyncIterator[NatsBroker]:
    broker = await connect(server.url, name=f"test-{user}", password=Secret(PASSWORD), user=user)
    assert isinstance(broker, NatsBroker)
    try:
        yield broker
    finally:
        await broker.close()


async def is_pool(name: str) -> bool:
    return name in ("_default", "team")


@pytest.fixture(params=["empty", "running"])
async def state(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[str]:
    """A broker without a stream, or with all streams and their owner."""
    async with connected(server, "streams") as streams, connected(server, "operator") as operator:
        if request.param == "running":
            await own(streams, is_pool)
            for bucket in sorted(topology.BUCKETS):
                await operator.key_value(bucket)
            for name in ("WORK__default", "DEAD__default"):
                assert await operator.ask_owner(StreamRequest(name, max_bytes=topology.MIN_QUEUE_BYTES))
        yield str(request.param)


def test_the_owner_of_streams_knows_every_bucket() -> None:
    assert {value for name, value in vars(topology).items() if name.endswith("_BUCKET")} == topology.BUCKETS


async def test_a_bucket_is_requested_again_until_the_owner_of_streams_is_connected(server: NatsServer) -> None:
    """All processes of `sie serve` start together."""
    async with connected(server, "streams") as streams, connected(server, "gateway") as gateway:
        opening = asyncio.create_task(gateway.key_value(topology.PLACEMENT_BUCKET))
        roundtrip = gateway.roundtrip
        first_request = asyncio.Event()

        async def observe(*arguments: Any) -> Any:
            answer = await roundtrip(*arguments)
            if arguments[0].startswith(topology.STREAMS_SUBJECT):
                first_request.set()
            return answer

        gateway.roundtrip = observe  # type: ignore[method-assign]
        await asyncio.wait_for(first_request.wait(), WAIT_S)
        await own(streams, is_pool)
        await opening
        assert await streams.stream_info(f"KV_{topology.PLACEMENT_BUCKET}") is not None


@pytest.mark.parametrize(
    ("authorization", "login", "waits"), [('user: "u", password: "p"', "u:p", 1), ('token: "t"', "t", 0)]
)
async def test_on_a_broker_without_an_owner_of_streams_a_process_waits_for_it_at_most_once(
    authorization: str, login: str, waits: int, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats", extra=f"authorization {{ {authorization} }}") as server:
        broker = await connect(server.url.replace("//", f"//{login}@"), name="alone")
        begin_s = time.monotonic()
        for bucket in (topology.PLACEMENT_BUCKET, topology.JOBS_BUCKET, topology.POISON_BUCKET):
            await broker.key_value(bucket)
        assert time.monotonic() - begin_s < (waits + 1) * OWNER_WITHIN_S
        await broker.close()


def test_a_stranger_is_refused(server: NatsServer) -> None:
    with pytest.raises(BrokerUnavailable, match=r"(?i)authorization"):
        asyncio.run(connect(server.url, name="stranger", timeout_s=1.2))


def subjects(user: str) -> dict[str, bool]:
    """Return for each subject whether this user may publish to it."""
    permissions = {f"$JS.API.{operation}": False for operation in OF_ALL}
    rules = ALLOWED[user]
    for operation in (*OF_STREAMS, *BESIDES_THE_API):
        prefix = "" if operation.startswith("$") else "$JS.API."
        for stream in sorted(STREAMS):
            permissions[prefix + operation.format(stream)] = stream in rules.get(operation, frozenset())
    return permissions


@pytest.mark.parametrize("user", ALLOWED)
async def test_every_operation_of_the_api_is_allowed_or_refused_as_the_table_says(
    server: NatsServer, user: str
) -> None:
    refused: set[str] = set()

    async def on_error(error: Exception) -> None:
        refused.add(str(error).lower())

    client = Client()
    prefix = inbox_prefix({"user": user})
    await client.connect(server.url, user=user, password=PASSWORD, error_cb=on_error, inbox_prefix=prefix)
    table = subjects(user)
    for subject in table:
        await client.publish(subject, b"{}", reply=f"{prefix}.nobody.1")
    expected = {subject for subject, is_allowed in table.items() if not is_allowed}
    await client.flush(WAIT_S)
    await until(lambda: len(refused) >= len(expected), "the refusals", WAIT_S)
    await client.close()
    assert {subject for subject in table if any(f'"{subject.lower()}"' in error for error in refused)} == expected


# by user: the users whose inboxes it may publish to, which are itself and those whose requests it answers
ANSWERS = {
    "gateway": {"gateway", "worker"},
    "config": {"config"},
    "worker": {"worker"},
    "streams": {"gateway", "config", "worker", "operator", "streams"},
}
WIDE = ("_INBOX.>", "_INBOX.*", "_INBOX.*.*", "_INBOX.*.*.*", "_INBOX.*.>", "*.>", "*.*.*.*", ">")


@pytest.mark.parametrize("user", ANSWERS)
async def test_nobody_hears_an_inbox_of_another_user_and_no_more_than_answers_is_said_there(
    server: NatsServer, state: str, user: str
) -> None:
    """The rule covers acknowledgements and flow control of consumers too. Each inbox has the subject of a process, with
    the token of a request.
    """
    publications, arrivals = Box[str](), Box[str]()
    victims = sorted(ANSWERS["streams"])
    inboxes = {victim: f"{inbox_prefix({'user': victim})}.process.{{}}" for victim in victims}
    beside = [
        pattern.format(stream) for pattern in ("$JS.ACK.{}.>", "$JS.FC.{}.>") for stream in (KEYS, "WORK__default")
    ]

    async def say(message: CoreMessage) -> None:
        await publications.take(message.subject)

    async def hear(message: CoreMessage) -> None:
        await arrivals.take(message.subject)

    async with connected(server, "operator") as operator, connected(server, user) as broker:
        for pattern in (*WIDE, *(inbox.format("*") for inbox in inboxes.values()), *beside, "$JS.ACK.>", "$JS.FC.>"):
            with contextlib.suppress(NotPermitted):
                await broker.subscribe(pattern, hear)
        for victim, inbox in inboxes.items():
            await operator.subscribe(inbox.format("*"), say)
            for subject in (inbox.format("heard"), f"{inbox_prefix({'user': victim})}.short"):
                await operator.send(subject, b"an answer")
        for subject in beside:
            await operator.send(subject.replace(">", "c.1.1.1.1.0"), b"+ACK")
        await operator.send(inboxes[user].format("last"), b"")
        await until(lambda: inboxes[user].format("last") in arrivals.items, "its own inbox", WAIT_S)
        for inbox in inboxes.values():
            await broker.send(inbox.format("said"), b"forged")
        await broker.send(inboxes[user].format("end"), b"")
        await until(lambda: inboxes[user].format("end") in publications.items, "what it may say", WAIT_S)
    assert [subject for subject in arrivals.items if not subject.startswith(inbox_prefix({"user": user}))] == []
    assert {subject for subject in publications.items if subject.endswith(".said")} == {
        inboxes[victim].format("said") for victim in ANSWERS[user]
    }


def hostile(name: str) -> dict[str, dict[str, Any]]:
    """Return stream settings by which the creator would publish to or read subjects of others, by their effect."""
    own_subject = f"own.{name}.>"
    base = {"name": name, "storage": "memory"}
    keys = topology.KEYS_BUCKET
    transform = [{"src": f"$KV.{topology.JOBS_BUCKET}.>", "dest": f"$KV.{keys}.>"}]
    return {
        "mint by republishing": {
            **base,
            "subjects": [own_subject],
            "republish": {"src": own_subject, "dest": f"$KV.{keys}.>"},
        },
        "mint by a source": {
            **base,
            "subjects": [f"$KV.{keys}.>"],
            "sources": [{"name": f"KV_{topology.JOBS_BUCKET}", "subject_transforms": transform}],
        },
        "mint by a transform": {
            **base,
            "subjects": [own_subject],
            "subject_transform": {"src": own_subject, "dest": f"$KV.{keys}.>"},
        },
        "hear by a mirror": {**base, "mirror": {"name": KEYS}},
        "hear inboxes": {**base, "subjects": ["_INBOX.config.>", "_INBOX.operator.>", "_INBOX.worker.>"]},
        "hear keys": {**base, "subjects": [f"$KV.{keys}.>"]},
        "hear all": {**base, "subjects": [">"], "no_ack": True},
    }


@pytest.mark.parametrize("user", COMPONENTS)
async def test_no_component_makes_or_changes_a_stream(server: NatsServer, state: str, user: str) -> None:
    """A broker with and without streams refuses each of the hostile settings under each name."""
    async with connected(server, "operator") as operator, connected(server, user) as broker:
        before = await operator.stream_infos()
        assert len(before) == (len(BUCKETS) + 2 if state == "running" else 0)
        for name in sorted(STREAMS):
            for variant, config in hostile(name).items():
                for action in ("CREATE", "UPDATE"):
                    answer = broker.api(f"STREAM.{action}.{name}", config, dict)
                    outcome = (await asyncio.gather(answer, return_exceptions=True))[0]
                    assert isinstance(outcome, NotPermitted), f"{variant}: {user} may {action} {name}: {outcome}"
        after = await operator.stream_infos()
        assert [info.config for info in after] == [info.config for info in before]
        assert [info.state for info in after] == [info.state for info in before]


NOT_OURS = (
    *("evil", "WORK_a.b", "WORK_>", "WORK_*", "WORK_", "DEAD_A", "KV_other", "KV_", "sie_keys", "KV_KV_sie_keys"),
    *("KV_sie_keys.x", "$KV.sie_keys.>"),
)


@pytest.mark.parametrize("user", COMPONENTS)
async def test_the_owner_of_streams_goes_by_the_name_alone(server: NatsServer, user: str) -> None:
    """On an empty broker, settings in a request have no effect, and a name that is not SIE's makes no stream."""
    queues = {"WORK_team": ["sie.work.team.>"], "DEAD_team": ["sie.dead.team"]} if user == "gateway" else {}
    buckets = {f"KV_{bucket}": [f"$KV.{bucket}.>"] for bucket in topology.BUCKETS}
    async with (
        connected(server, "streams") as streams,
        connected(server, "operator") as operator,
        connected(server, user) as broker,
    ):
        await own(streams, is_pool)

        async def ask(subject: str, request: StreamRequest, **settings: Any) -> bytes:
            fields = {**msgspec.msgpack.decode(messages.encode(request)), **settings}
            return await broker.request(subject, msgspec.msgpack.encode(fields), WAIT_S)

        bucket, queue = topology.streams_subject("KV_"), topology.streams_subject("WORK_team")
        for subject in (bucket, queue) if user == "gateway" else (bucket,):
            for name in NOT_OURS:
                assert await ask(subject, StreamRequest(name)), f"{name} is refused on {subject}"
        for request in (
            StreamRequest(f"KV_{topology.JOBS_BUCKET}", storage="elsewhere"),
            StreamRequest(f"KV_{topology.JOBS_BUCKET}", version=topology.TOPOLOGY_VERSION + 1),
            StreamRequest("WORK_team", max_bytes=topology.MIN_QUEUE_BYTES),
        ):
            assert await ask(bucket, request)
        for request in (
            StreamRequest("WORK_newpool", max_bytes=topology.MIN_QUEUE_BYTES),
            StreamRequest("DEAD_newpool", max_bytes=topology.MIN_QUEUE_BYTES),
            StreamRequest("WORK_team"),
            StreamRequest("DEAD_team"),
            StreamRequest("WORK_team", max_bytes=topology.MIN_QUEUE_BYTES - 1),
            StreamRequest("WORK_team", max_bytes=0),
        ):
            if user == "gateway":
                assert await ask(queue, request), request
        assert await ask(bucket, StreamRequest(f"KV_{topology.JOBS_BUCKET}"), name=7)
        if user != "gateway":
            with pytest.raises(NotPermitted):
                await ask(queue, StreamRequest("WORK_team"))
        assert await operator.stream_infos() == []

        for name in (*queues, *buckets):
            request = StreamRequest(name, storage="memory", max_age_s=1.0, max_bytes=topology.MIN_QUEUE_BYTES)
            settings = hostile(name)["mint by republishing"] | {"sources": [{"name": KEYS}], "mirror": {"name": KEYS}}
            assert await ask(topology.streams_subject(name), request, **settings) == b""
        infos = {str(info.config["name"]): info.config for info in await operator.stream_infos()}
        assert {name: config["subjects"] for name, config in infos.items()} == queues | buckets
        for config in infos.values():
            assert not {"republish", "mirror", "sources", "subject_transform"} & config.keys()
        assert infos[KEYS]["storage"] == "file"
        assert {infos[name]["max_age"] for name in OF_CONFIG} == {0}


async def test_a_stream_that_says_elsewhere_what_it_takes_is_not_used(server: NatsServer) -> None:
    """A bucket whose stream republishes its messages to another subject is refused, whoever created it."""
    name, dest = f"KV_{topology.JOBS_BUCKET}", f"$KV.{topology.KEYS_BUCKET}.>"
    source = f"$KV.{topology.JOBS_BUCKET}.>"
    async with connected(server, "operator") as operator, connected(server, "gateway") as gateway:
        stream_config = {**bucket_config(name, topology.JOBS_BUCKET), "republish": {"src": source, "dest": dest}}
        await operator.api(f"STREAM.CREATE.{name}", stream_config, dict)
        with pytest.raises(TopologyMismatch, match="republish"):
            await gateway.key_value(topology.JOBS_BUCKET)


async def test_a_process_waits_for_the_owner_and_says_so(server: NatsServer) -> None:
    """The error comes before a request times out. A bucket that exists is read without the owner of streams."""
    async with connected(server, "gateway") as gateway:
        async with connected(server, "streams") as streams:
            bucket = RecordBucket(gateway, topology.JOBS_BUCKET)
            with pytest.raises(BrokerUnavailable, match="the config service, which creates streams, does not reply"):
                await asyncio.wait_for(bucket.open(), 0.9 * API_TIMEOUT_S)
            assert "which creates streams" in gateway.troubles[topology.JOBS_BUCKET]
            await own(streams, is_pool)
            await bucket.write([Write("a", b"1")])
            assert gateway.troubles == {}
        entry = await RecordBucket(gateway, topology.JOBS_BUCKET).get("a")
        assert entry is not None


@pytest.mark.parametrize("state", ["running"], indirect=True)
@pytest.mark.parametrize(("user", "bucket"), [("gateway", topology.JOBS_BUCKET), ("worker", topology.POISON_BUCKET)])
async def test_deliveries_say_nothing_in_the_name_of_others(
    server: NatsServer, state: str, user: str, bucket: str
) -> None:
    """A consumer can deliver to any subject. Such a delivery creates no key, and no delta of the catalogue arrives."""
    subjects_of_others = (f"$KV.{topology.KEYS_BUCKET}.forged", topology.config_subject("default"))
    arrivals: Box[CoreMessage] = Box()
    async with connected(server, "config") as config, connected(server, user) as broker:
        await config.subscribe(f"{topology.CONFIG_SUBJECT}.>", arrivals.take)
        own_bucket = await broker.key_value(bucket)
        for number, subject in enumerate(subjects_of_others):
            await own_bucket.write([Write(f"k{number}", b"forged")])
            for kind, delivered in (("push", {"deliver_subject": subject}), ("pull", {})):
                name = f"{kind}{number}"
                consumer_config = {"name": name, "ack_policy": "none", "mem_storage": True, **delivered}
                body = {"stream_name": f"KV_{bucket}", "action": "create", "config": consumer_config}
                await broker.api(f"CONSUMER.CREATE.KV_{bucket}.{name}", body, dict)
                if kind == "pull":
                    await broker.post(f"$JS.API.CONSUMER.MSG.NEXT.KV_{bucket}.{name}", b'{"batch":9}', subject)
                    await broker.flush(WAIT_S)
        async with connected(server, "operator") as operator:
            await operator.send(topology.config_subject("default"), b"of the operator")
            await arrivals.fill(1)
            keys = await operator.key_value(topology.KEYS_BUCKET)
            assert await keys.entries() == []
            assert await keys.get("forged") is None
    assert [message.data for message in arrivals.items] == [b"of the operator"]


@pytest.mark.parametrize("state", ["running"], indirect=True)
async def test_no_answer_of_the_broker_is_a_key(server: NatsServer, state: str) -> None:
    """The broker does not check the reply subject of a request. An entry that an answer writes in the bucket of keys
    cannot be decoded as a key.
    """
    jobs, poison = topology.JOBS_BUCKET, topology.POISON_BUCKET
    answered = {
        "gateway": (
            *(f"$KV.{jobs}.a", f"$JS.API.STREAM.INFO.KV_{jobs}", f"$JS.API.STREAM.MSG.GET.KV_{jobs}"),
            *(f"$JS.API.CONSUMER.INFO.KV_{jobs}.c", f"$JS.API.CONSUMER.NAMES.KV_{jobs}"),
        ),
        "worker": (f"$KV.{poison}.a", f"$JS.API.STREAM.INFO.KV_{poison}", "$JS.API.CONSUMER.NAMES.WORK__default"),
        "config": (f"$KV.{topology.CATALOGUE_BUCKET}.a",),
    }
    async with connected(server, "operator") as operator:
        keys = await operator.key_value(topology.KEYS_BUCKET)
        for user, user_subjects in answered.items():
            async with connected(server, user) as broker:
                for number, subject in enumerate(user_subjects):
                    await broker.post(subject, b"{}", f"$KV.{topology.KEYS_BUCKET}.{user}{number}")
                await broker.flush(WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while len(entries := await keys.entries()) < sum(map(len, answered.values())):
                await operator.flush(WAIT_S)
        for entry in entries:
            with pytest.raises(ValueError, match=r"type|missing|field|id"):
                decode_key(entry)


@pytest.mark.parametrize("bucket_name", [topology.KEYS_BUCKET, topology.KEYS_COPY_BUCKET])
async def test_what_is_no_key_is_removed_from_the_buckets_of_keys(server: NatsServer, bucket_name: str) -> None:
    """Acknowledgements are stored under new names and over a key. Keys, also of later versions, stay."""
    key, _ = create("a key", ("infer",), now_s=1.0)
    later = b'{"id": "later", "digest": {"sha512": "x"}, "form": 2}'
    async with (
        connected(server, "streams") as streams,
        connected(server, "operator") as operator,
        connected(server, "gateway") as gateway,
        connected(server, "config") as config,
    ):
        await own(streams, is_pool)
        buckets = {name: await operator.key_value(name) for name in sorted(topology.BUCKETS)}
        keys = buckets[bucket_name]
        await keys.write([Write(key.id, encode_key(key)), Write("later", later), Write("harmed", encode_key(key))])
        for number, name in enumerate(("new", "new.name", "harmed")):
            await gateway.send(f"$KV.{topology.DEMAND_BUCKET}.x{number}", b"", f"$KV.{bucket_name}.{name}")
        await gateway.send(f"$JS.API.STREAM.INFO.{POOLS}", b"", f"$KV.{bucket_name}.answer")
        foreign = ["answer", "harmed", "new", "new.name"]

        async def are_stored() -> bool:
            return [entry.key for entry in await keys.entries() if is_foreign(entry)] == foreign

        await until_told(are_stored, "the acknowledgements are stored as keys")
        assert await remove_foreign(config, streams, 1) == len(foreign)
        assert [entry.key for entry in await keys.entries()] == sorted((key.id, "later"))
        assert await remove_foreign(config, streams, 1) == 0
