"""API keys in the broker: their records, the keys that gateways know, and the loss of the broker or of the bucket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from inprocess import POLL_S, InProcess, clock_at, until
from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sie_broker import Broker, KeyValue, Write, WrongRevision
from sie_broker.memory import MemoryServer
from sie_cli.access import Access, published
from sie_cli.cluster import Cluster
from sie_cli.main import main
from sie_contracts.wire import topology
from sie_runtime import keys as records
from sie_runtime.keys import Key, KeyBuckets, KeyLimits, Keys
from sie_runtime.process import Stop

REVOKED_WITHIN_S = 1.0


@dataclass
class Followed:
    """The keys of a gateway that follows a bucket, and the bucket at the connection of an operator."""

    server: MemoryServer
    keys: Keys
    bucket: KeyValue

    async def put(self, key: Key) -> None:
        await self.bucket.write([Write(key.id, records.encode(key))])

    async def made(self, *scopes: str) -> tuple[Key, str]:
        """Create a key and wait until the gateway knows it. Return the key and its token."""
        key, token = records.create("a test", scopes or ("infer",), now_s=time.time())
        await self.put(key)
        await until(lambda: self.keys.find(token), "the key is known")
        return key, token


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(records, "CHECK_S", 0.02)
    monkeypatch.setattr(records, "RETRY_S", 0.02)
    server = MemoryServer()
    keys, stop = Keys(server.connect("gateway"), 1, clock_at()), Stop()
    following = asyncio.create_task(keys.run(stop))
    await until(lambda: keys.loaded, "the keys are read")
    yield Followed(server, keys, await records.bucket_of(server.connect("operator"), 1).open())
    stop.request()
    await following


def test_no_part_of_a_token_is_stored() -> None:
    """A record has no eight consecutive characters of its token. A token has 256 random bits."""
    keys = [records.create(f"name {number}", ("infer",), now_s=1.0) for number in range(50)]
    stored = b"".join(records.encode(key) for key, _ in keys).decode()
    for _, token in keys:
        secret = token.removeprefix("sie_")
        assert len(secret) == 43, "32 bytes in base 64"
        assert not any(secret[start : start + 8] in stored for start in range(len(secret) - 7))
    assert len({token for _, token in keys}) == len({key.id for key, _ in keys}) == 50


async def test_a_key_is_found_by_its_token_alone(followed: Followed) -> None:
    key, token = await followed.made()
    assert followed.keys.find(token) == key
    for text in ("", token[:-1], token + "x", token.upper(), key.id, key.digest):
        assert followed.keys.find(text) is None


async def test_a_revocation_is_known_within_a_second(followed: Followed) -> None:
    key, token = await followed.made()
    assert key.ended(time.time()) == ""
    await followed.put(replace(key, revoked_s=time.time()))
    looks = 0  # instead of a clock, which goes on while the machine pauses

    def is_known() -> bool:
        nonlocal looks
        looks += 1
        record = followed.keys.find(token)
        return record is not None and record.ended(time.time()) == "was revoked"

    await until(is_known, "the revocation is known")
    assert looks * POLL_S < REVOKED_WITHIN_S
    await followed.bucket.write([Write(key.id, None)])
    await until(lambda: followed.keys.find(token) is None, "the key is forgotten")


def test_a_key_ends_at_its_time() -> None:
    key, _ = records.create("a test", ("infer",), now_s=100.0, expires_s=200.0)
    assert [key.ended(now_s) for now_s in (199.9, 200.0, 1e12)] == ["", "has expired", "has expired"]
    assert replace(key, expires_s=0.0).ended(1e12) == ""
    assert replace(key, revoked_s=150.0).ended(100.0) == "was revoked", "whatever the clock says"


FOREIGN = b'{"id":"other","name":"","digest":"","scopes":[],"created_s":0}'


@pytest.mark.parametrize("damage", [b"", b'{"id": "x"}', b"\xff", FOREIGN])
async def test_a_record_that_cannot_be_read_is_nobodys_key(
    followed: Followed, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged record is no key, even if it was good before. Other keys stay valid."""
    (key, token), (_, good_token) = await followed.made(), await followed.made()
    await followed.bucket.write([Write(key.id, damage)])
    await until(lambda: followed.keys.find(token) is None, "the damaged key is dropped")
    assert followed.keys.find(good_token) is not None
    assert f"key {key.id} cannot be decoded" in caplog.text


async def test_a_field_of_a_newer_version_does_no_harm(followed: Followed) -> None:
    key, token = records.create("a test", ("infer",), now_s=1.0)
    newer = {**json.loads(records.encode(key)), "colour": "red"}
    await followed.bucket.write([Write(key.id, json.dumps(newer).encode())])
    assert await until(lambda: followed.keys.find(token), "the key is known") == key


async def test_while_the_broker_is_away_the_last_keys_stay_and_strangers_stay_out(followed: Followed) -> None:
    """Without the broker, known keys stay valid and unknown tokens stay invalid. A revocation arrives after the
    reconnection.
    """
    key, token = await followed.made()
    gateway = followed.keys._records[0].bucket.broker
    gateway.disconnect()  # type: ignore[attr-defined]
    await asyncio.sleep(0.1)  # several attempts without a broker
    assert followed.keys.find(token) == key
    assert followed.keys.find("sie_stranger") is None
    await followed.put(replace(key, revoked_s=time.time()))
    assert followed.keys.find(token) == key
    gateway.reconnect()  # type: ignore[attr-defined]
    await until(lambda: (record := followed.keys.find(token)) and record.revoked_s, "the revocation is known")


# at a gateway


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as running:
        yield running


async def limited(cluster: InProcess, **limits: int) -> str:
    """Create a key with these limits and return its token."""
    key, token = records.create("a test", ("infer", "read"), now_s=time.time(), limits=KeyLimits(**limits))
    bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
    await bucket.write([Write(key.id, records.encode(key))])
    return token


async def test_a_key_may_send_what_its_limits_say_and_another_key_more(cluster: InProcess) -> None:
    """A request beyond the limits of a key gets the errors of the general limits. No answer contains a token."""
    narrow, wide = await limited(cluster, body_bytes=200, items=2), await limited(cluster)
    gateway = await cluster.gateway(SIE_AUTH_MODE="token")
    await cluster.sidecar()

    async def sent(token: str, *texts: str, path: str = "/v1/encode/toy/one") -> tuple[int, str, str]:
        field = "items" if "encode" in path else "input"
        answer = await gateway.client.post(
            path, json={field: list(texts), "model": "toy/one"}, headers={"authorization": token}
        )
        error = answer.json().get("error", {})
        assert token not in answer.text
        return answer.status_code, str(error.get("code", "")).upper(), error.get("reason", "")

    for path in ("/v1/encode/toy/one", "/v1/embeddings"):
        assert await sent(narrow, "a", "b", path=path) == (200, "", "")
        assert await sent(narrow, "a", "b", "c", path=path) == (400, "INVALID_INPUT", "too_many_items")
        assert await sent(narrow, "a" * 200, path=path) == (413, "PAYLOAD_TOO_LARGE", "")
        assert await sent(wide, "a" * 100, "b" * 100, "c" * 100, path=path) == (200, "", "")
    chunked = gateway.client.post(
        "/v1/encode/toy/one", content=_pieces(b"x" * 100, 3), headers={"authorization": narrow}
    )
    assert (await chunked).status_code == 413


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


async def test_a_key_over_its_tokens_per_minute_is_told_when_to_come_again(cluster: InProcess) -> None:
    """After 60 of 100 tokens, about 50 more are refused with 429, and 30 more pass. Another key is not affected. More
    than 100 tokens at once are refused with 413.
    """
    token, second_key = await limited(cluster, tokens_per_minute=100), await limited(cluster, tokens_per_minute=1000)
    gateway = await cluster.gateway(SIE_AUTH_MODE="token")
    await cluster.sidecar()

    async def sent(characters: int, token: str = token) -> httpx.Response:
        return await gateway.encode("x" * characters, Authorization=f"Bearer {token}")

    used = await sent(58)
    assert (used.status_code, used.json()["usage"]["total_tokens"]) == (200, 60)
    refused = await sent(180)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"], error["retryable"]) == (
        429,
        "RATE_LIMITED",
        "rate_limit_error",
        True,
    )
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-should-retry"] == "true"
    assert (await sent(28)).status_code == 200
    assert (await sent(180, second_key)).status_code == 200
    assert ((huge := await sent(500)).status_code, huge.json()["error"]["limit"]) == (413, 100)
    body, headers = {"model": "toy/one", "input": "x" * 500}, {"Authorization": f"Bearer {token}"}
    embedded = await gateway.client.post("/v1/embeddings", json=body, headers=headers)
    assert (embedded.status_code, embedded.json()["error"]["param"]) == (413, "input")


async def test_a_text_costs_a_key_at_least_its_bytes_divided_by_16(cluster: InProcess) -> None:
    """The model reads 512 tokens of a text of 16,000 bytes, which costs 1,000. A text that the worker refuses costs as
    much.
    """
    token = await limited(cluster, tokens_per_minute=2500)
    gateway = await cluster.gateway(SIE_AUTH_MODE="token")
    await cluster.sidecar()

    async def sent(**params: str) -> httpx.Response:
        body = {"items": [{"text": "x" * 16_000}], "params": params}
        return await gateway.client.post("/v1/encode/toy/one", json=body, headers={"authorization": token})

    used = await sent()
    assert (used.status_code, used.json()["usage"]["total_tokens"]) == (200, 512)
    refused = await sent(truncate="NONE")
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "input_too_long")
    over = await sent()
    assert (over.status_code, over.json()["error"]["code"]) == (429, "RATE_LIMITED")


async def test_what_a_gateway_could_not_do_costs_no_quota(cluster: InProcess) -> None:
    """A lane without workers answers 503, or 202 to old SDKs, and the quota stays whole."""
    token = await limited(cluster, tokens_per_minute=20)
    gateway = await cluster.gateway(SIE_AUTH_MODE="token", SIE_LOAD_HOLD_S="0.01")
    for _ in range(5):
        assert (await gateway.encode("x" * 40, Authorization=token)).json()["code"] == "PROVISIONING"
        assert (await gateway.encode("x" * 40, Authorization=token, X_SIE_SDK_Version="0.3.1")).status_code == 202


async def socket_frames(socket: ClientConnection) -> AsyncIterator[str | bytes]:
    """Yield the frames until the socket is closed."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            yield await socket.recv()


async def test_a_websocket_ends_with_its_key(cluster: InProcess) -> None:
    """After a revocation the socket is closed with a reason, and a new handshake is refused."""
    key, token = records.create("a test", ("read",), now_s=time.time())
    bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
    await bucket.write([Write(key.id, records.encode(key))])
    gateway = await cluster.gateway(SIE_AUTH_MODE="token")
    url, headers = gateway.url.replace("http", "ws") + "/ws/cluster-status", {"authorization": token}
    async with asyncio.timeout(20), connect(url, additional_headers=headers) as socket:
        await socket.recv()
        await bucket.write([Write(key.id, records.encode(replace(key, revoked_s=time.time())))])
        frames = [frame async for frame in socket_frames(socket)]
        assert len(frames) < 5
        assert (socket.close_code, socket.close_reason) == (1008, "UNAUTHENTICATED")
        with pytest.raises(InvalidStatus):
            await connect(url, additional_headers=headers)


async def test_what_the_bucket_loses_its_copy_has_and_no_revocation_is_undone(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket loses one key, and the revocation of another. The gateway takes both from the copy, and the log names
    them. A key without a copy, as a writer leaves that dies between bucket and copy, is not lost.
    """
    buckets = await KeyBuckets.open(followed.server.connect("operator"), 1)
    (active_key, kept_token), (ended, ended_token), (young, young_token) = (
        records.create(name, ("infer",), now_s=time.time()) for name in ("kept", "ended", "young")
    )
    for key in (active_key, ended):
        await buckets.write(key, 0)
    revoked = replace(ended, revoked_s=1.0)
    await buckets.write(revoked, next(revision for key, revision in await buckets.read() if key.id == ended.id))
    await until(lambda: followed.keys.find(ended_token) == revoked, "the key is revoked")
    await buckets.bucket.write([Write(active_key.id, None), Write(ended.id, records.encode(ended))])
    await until(lambda: f"it lost 2 keys, which the copy {topology.KEYS_COPY_BUCKET} has" in caplog.text, "the log")
    assert f"{active_key.id} kept, {ended.id} ended" in caplog.text
    assert followed.keys.find(kept_token) == active_key
    assert followed.keys.find(ended_token) == revoked
    await buckets.bucket.write([Write(young.id, records.encode(young), 0)])
    await until(lambda: followed.keys.find(young_token), "the young key")
    assert {key.id for key in followed.keys.lost()} == {active_key.id, ended.id}
    await buckets.remove(young, next(revision for key, revision in await buckets.read() if key.id == young.id))
    await until(lambda: followed.keys.find(young_token) is None, "the young key is forgotten")


@pytest.mark.parametrize("is_lost", [False, True])
async def test_remove_with_an_outdated_revision_leaves_both_records(is_lost: bool) -> None:
    """A writer changes the key between the read and the removal. `is_lost`: at the read, only the copy has the key."""
    buckets = await KeyBuckets.open(MemoryServer().connect("operator"), 1)
    key, _ = records.create("a test", ("infer",), now_s=1.0)
    await buckets.write(key, 0)
    if is_lost:
        await buckets.bucket.write([Write(key.id, None)])
    ((_, outdated),) = await buckets.read()
    changed = replace(key, name="changed")
    await buckets.write(changed, outdated)
    with pytest.raises(WrongRevision):
        await buckets.remove(replace(key, revoked_s=2.0), outdated)
    for bucket in (buckets.bucket, buckets.copy):
        assert [stored for stored, _ in records.readable(await bucket.entries())] == [changed]
    ((_, revision),) = await buckets.read()
    await buckets.remove(replace(changed, revoked_s=2.0), revision)
    assert await buckets.read() == []


# `sie keys`


def asked(data_dir: Path) -> Result:
    return CliRunner().invoke(main, ["keys", "admin", "--data-dir", str(data_dir)])


def test_the_token_of_the_server_that_runs_is_printed_alone(tmp_path: Path) -> None:
    with published(tmp_path, Access(gateway_url="http://127.0.0.1:1", admin_token="of-this-start")):
        assert (asked(tmp_path).exit_code, asked(tmp_path).stdout) == (0, "of-this-start\n")


def test_a_name_that_two_keys_have_revokes_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored backup, or two commands at the same moment, can give a name to two keys."""
    server = MemoryServer()

    async def opened(broker: Broker, cluster: Cluster) -> tuple[KeyBuckets, float]:
        buckets = await KeyBuckets.open(broker, 1)
        if not await buckets.read():
            for key in twins:
                await buckets.write(key, 0)
        return buckets, 2.0  # the memory broker has no time of a bucket

    async def open_broker(cluster: Cluster, name: str, url: str = "") -> Broker:
        return server.connect(name)

    twins = [records.create("team", ("infer",), now_s=1.0)[0] for _ in range(2)]
    monkeypatch.setattr(Cluster, "open_broker", open_broker)
    monkeypatch.setattr("sie_cli.keys._opened", opened)

    def revoked(name: str) -> Result:
        return CliRunner().invoke(main, ["keys", "revoke", name, "--url", "nats://127.0.0.1:1"])

    refused = revoked("team")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert all(key.id in refused.stderr for key in twins)
    assert [revoked(name).stdout for name in (twins[1].id, "team")] == [
        f"key {key.id} team is revoked\n" for key in reversed(twins)
    ]
