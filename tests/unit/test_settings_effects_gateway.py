"""Effects of the gateway's settings: whole clusters in this event loop, and single objects on virtual clocks."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from body_times import body_times
from fake_adapter import ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, settings_of, until
from msgspec.structs import replace

from sie_broker.memory import MemoryServer
from sie_contracts.errors import InvalidInput, NotFound
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import SettingError
from sie_contracts.wire import messages, topology
from sie_contracts.wire.configs import ConfigDelta
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_gateway.fleet.lanes import Fleet

STREAM = "WORK__default"


# requests


async def test_a_request_is_cut_into_messages_of_about_the_chunk_cost_with_equal_results(cluster: InProcess) -> None:
    """SIE_CHUNK_COST: 40 texts have an estimated 26 tokens each."""
    await cluster.sidecar(ready=False)
    texts = [f"{number:098d}" for number in range(40)]
    vectors = []
    for cost, chunks in (("260", 4), ("1040", 1)):
        gateway = await cluster.gateway(SIE_CHUNK_COST=cost)
        answer = await gateway.encode(*texts, X_SIE_Explain="1")
        assert answer.status_code == 200
        assert len(answer.json()["explain"]) == chunks
        vectors.append([slot["dense"]["values"] for slot in answer.json()["items"]])
    assert vectors[0] == vectors[1]
    assert vectors[0][7] == pytest.approx(vector_of(ids_of(texts[7])))


@pytest.mark.parametrize(("variable", "limit"), [({}, 2048), ({"SIE_MAX_ITEMS_PER_REQUEST": "100"}, 100)])
async def test_a_request_may_have_this_many_items_and_not_one_more(
    cluster: InProcess, variable: dict[str, str], limit: int
) -> None:
    """SIE_MAX_ITEMS_PER_REQUEST: one more is refused before anything is queued."""
    gateway = await cluster.gateway(**variable)
    refused = await gateway.encode(*["x"] * (limit + 1))
    assert refused.status_code == 400
    assert refused.json()["error"]["reason"] == "too_many_items"
    assert refused.json()["error"]["limit"] == limit
    assert cluster.server.streams[STREAM].last_sequence == 0
    await cluster.sidecar()
    answer = await gateway.encode(*["x"] * limit)
    assert answer.status_code == 200
    assert len(answer.json()["items"]) == limit


async def test_a_body_may_have_this_many_bytes_and_not_one_more(cluster: InProcess) -> None:
    """SIE_MAX_BODY_BYTES."""
    most = 1 << 20
    gateway = await cluster.gateway(SIE_MAX_BODY_BYTES=str(most))
    await cluster.sidecar()
    body = b'{"items": ["a"]' + b" " * (most - 16) + b"}"
    for content, status in ((body, 200), (body + b" ", 413)):
        answer = await gateway.client.post("/v1/encode/toy/one", content=content)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["limit"] == most


async def must_come_at_the_least_rate(
    gateway: GatewayProcess, path: str, kind: str, piece: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send a body of this content type slowly, in pieces of two bytes. `status` of the refusal; 0: there is none."""
    times = body_times(monkeypatch)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {kind}", "content-length: 1000", "", "")
    writer.write("\r\n".join(head).encode())
    answered = asyncio.create_task(reader.read(12))
    for number in range(1 if status else 4):
        await until(lambda: len(times) == number + 1, "the rate is measured")  # noqa: B023  awaited at once
        writer.write(5 * piece)
        await until(lambda: times[-1].read_bytes == 10, "what was sent is read")
        times[-1].end()
    if status:
        assert await answered == b"HTTP/1.1 %d" % status
    else:
        await until(lambda: len(times) == 5, "the rate is measured further on")
        assert not answered.done()
    answered.cancel()
    writer.close()


@pytest.mark.parametrize("path", ["/v1/encode/toy/one", "/v1/pools"])
@pytest.mark.parametrize(("rate", "status"), [("4096", 504), ("10", 0)])
async def test_a_body_must_come_at_the_least_rate(
    cluster: InProcess, path: str, rate: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_MIN_BODY_RATE: on all kinds of routes, a slower body is refused before it ends."""
    gateway = await cluster.gateway(SIE_MIN_BODY_RATE=rate)
    await must_come_at_the_least_rate(gateway, path, "application/json", b"  ", status, monkeypatch)


async def test_each_gateway_refuses_what_is_beyond_its_concurrent_requests(cluster: InProcess) -> None:
    """SIE_MAX_CONCURRENT_REQUESTS: 20 requests at each of two gateways wait for the held device. Only the other three
    of each are refused.
    """
    gateways = [await cluster.gateway(SIE_MAX_CONCURRENT_REQUESTS="20") for _ in range(2)]
    adapter = await cluster.adapter()
    adapter.hold_batches = True
    await cluster.sidecar(adapter)
    sent = [[asyncio.create_task(gateway.encode(f"{number}")) for number in range(23)] for gateway in gateways]
    for gateway, tasks in zip(gateways, sent, strict=True):
        done = await until(
            lambda tasks=tasks: len(done := [task for task in tasks if task.done()]) == 3 and done, "three refusals"
        )
        for task in done:
            refusal = task.result()
            assert (refusal.status_code, refusal.json()["code"]) == (503, "QUEUE_FULL")
            assert int(refusal.headers["retry-after"]) >= 1
        assert await gateway.metric("sie_gateway_requests_in_progress") == 20
        assert await gateway.metric("sie_gateway_rejected_requests_total", reason="concurrency") == 3
    adapter.let_go()
    answers = await asyncio.gather(*(task for tasks in sent for task in tasks))
    assert sorted(answer.status_code for answer in answers) == [200] * 40 + [503] * 6


async def test_the_budget_of_a_request_ends_it_and_what_was_queued_never_runs(cluster: InProcess) -> None:
    """SIE_GATEWAY_REQUEST_TIMEOUT: a smaller X-SIE-Timeout-Ms wins, a larger one does not. The work is removed from
    the queue.
    """
    gateway = await cluster.gateway(SIE_GATEWAY_REQUEST_TIMEOUT="2")
    idle = Heartbeat("idle", "_default", "other", "default", True, "0", models=(ModelStatus("toy/one", "loaded"),))
    await cluster.send(topology.health_subject("idle"), messages.encode(idle))  # a worker that takes no work
    cases = [({}, "2"), ({"X_SIE_Timeout_Ms": "1500"}, "1.5"), ({"X_SIE_Timeout_Ms": "60000"}, "2")]
    answers = await asyncio.gather(*(gateway.encode("nobody answers", **headers) for headers, _ in cases))
    for (_, budget), answer in zip(cases, answers, strict=True):
        assert (answer.status_code, answer.json()["code"]) == (504, "GATEWAY_TIMEOUT")
        assert f"budget of {budget} s" in answer.json()["error"]["message"]
    stream = cluster.server.streams[STREAM]
    assert (stream.last_sequence, len(stream.messages)) == (3, 0)
    await cluster.send(topology.health_subject("idle"), messages.encode(replace(idle, leaving=True)))
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    assert (await gateway.encode("somebody answers")).status_code == 200
    assert len(adapter.batches) == 1


async def test_the_budget_of_a_request_begins_with_its_first_byte_also_for_the_body(cluster: InProcess) -> None:
    """The head takes most of the budget, and the body never ends."""
    gateway = await cluster.gateway()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    began_s = time.perf_counter()
    writer.write(b"POST /v1/encode/toy/one HTTP/1.1\r\nhost: localhost\r\nx-sie-timeout-ms: 1000\r\n")
    await asyncio.sleep(0.9)
    writer.write(b"content-length: 100\r\n\r\n{")
    assert b" 504 " in await reader.readuntil(b"\r\n")
    assert time.perf_counter() - began_s < 1.7
    writer.close()


@pytest.mark.parametrize(
    ("gateways", "variable", "messages_each"),
    [
        (1, {"SIE_KEY_WINDOW_TOKENS": "800"}, 3),
        (2, {"SIE_KEY_WINDOW_TOKENS": "1600"}, 3),
        (1, {"SIE_KEY_WINDOW_TOKENS": "3200"}, 12),
        (1, {}, 20),
    ],
)
async def test_a_key_has_so_many_tokens_in_the_queue_at_each_priority_and_gateways_share_them(
    cluster: InProcess, gateways: int, variable: dict[str, str], messages_each: int
) -> None:
    """SIE_KEY_WINDOW_TOKENS: each request has 20 messages of 260 tokens. The worker takes no work and has no bound of
    its own.
    """
    idle = Heartbeat("idle", "_default", "_default", "default", True, "0", models=(ModelStatus("toy/one", "loaded"),))
    auth = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": "key-a,key-b"}
    started = [
        await cluster.gateway(SIE_CHUNK_COST="260", SIE_GATEWAY_REQUEST_TIMEOUT="20", **auth, **variable)
        for _ in range(gateways)
    ]
    await cluster.send(topology.health_subject("idle"), messages.encode(idle))
    for gateway in started:
        async with asyncio.timeout(30):
            while await gateway.metric("sie_gateway_gateways") != gateways:  # until it knows the other gateway
                pass
    requests = [
        asyncio.create_task(gateway.encode(*["x" * 98] * 200, Authorization=f"Bearer {key}", X_SIE_Priority=priority))
        for gateway in started
        for key in ("key-a", "key-b")
        for priority in ("interactive", "bulk")
    ]
    stream = cluster.server.streams[STREAM]
    expected = messages_each * len(requests)
    await until(lambda: len(stream.messages) >= expected, f"{expected} messages")
    for gateway in started:
        assert await gateway.metric("sie_gateway_permits_held_messages") == 4 * messages_each
    assert len(stream.messages) == expected
    await cluster.sidecar(SIE_WORKER_ID="idle")
    assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}


async def test_text_over_the_inline_limit_is_refused_with_the_limit(tmp_path: Path) -> None:
    """SIE_INLINE_PAYLOAD_BYTES: the default is the payload limit of the broker less 16 KiB. More ends the start."""
    async with InProcess(tmp_path, toy_entry(max_tokens=1 << 17), max_payload=1 << 16) as cluster:
        await cluster.sidecar(ready=False)
        default, small = await cluster.gateway(), await cluster.gateway(SIE_INLINE_PAYLOAD_BYTES="4096")
        for gateway, fits, limit in ((default, 49_152, 49_152), (small, 4096, 4096)):
            assert (await gateway.encode("x" * fits)).status_code == 200
            refused = await gateway.encode("x" * (fits + 1))
            assert (refused.status_code, refused.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
            assert refused.json()["error"]["limit"] == limit
        with pytest.raises(SettingError, match=r"^SIE_INLINE_PAYLOAD_BYTES: got 49153"):
            await cluster.gateway(SIE_INLINE_PAYLOAD_BYTES="49153")


async def test_a_full_work_stream_refuses_the_newest_and_answers_all_it_accepted(tmp_path: Path) -> None:
    """SIE_QUEUE_MAX_BYTES: the smallest value, 1 MiB, holds five texts of 200 kB."""
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_QUEUE_MAX_BYTES=str(1 << 20))
        accepted = [asyncio.create_task(gateway.encode("x" * 200_000)) for _ in range(5)]
        await until(lambda: len(cluster.server.streams[STREAM].messages) == 5, "five messages in the stream")
        refused = await gateway.encode("x" * 200_000)
        assert (refused.status_code, refused.json()["code"]) == (503, "QUEUE_FULL")
        assert int(refused.headers["retry-after"]) >= 1
        await cluster.sidecar()
        assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200] * 5
        assert (await gateway.encode("x" * 200_000)).status_code == 200


async def test_a_root_path_is_stripped_and_named_in_the_document(cluster: InProcess) -> None:
    """SIE_ROOT_PATH: no redirect is ever sent."""
    gateway = await cluster.gateway(SIE_ROOT_PATH="/sie")
    for path in ("/sie/v1/models", "/v1/models"):
        answer = await gateway.client.get(path)
        assert answer.status_code == 200
        assert [model["id"] for model in answer.json()["data"]] == ["toy/one"]
    document = (await gateway.client.get("/sie/openapi.json")).json()
    assert document["servers"] == [{"url": "/sie"}]
    assert (await gateway.client.get("/sie/healthz")).status_code == 200
    assert (await gateway.client.get("/other/v1/models")).status_code == 404
    assert (await gateway.client.get("/sie/v1/models/")).status_code not in range(300, 400)
    assert 'url: "/sie/openapi.json"' in (await gateway.client.get("/sie/docs")).text.replace("'", '"')
    plain = await cluster.gateway()
    assert (await plain.client.get("/sie/v1/models")).status_code == 404
    assert "servers" not in (await plain.client.get("/openapi.json")).json()
    awkward = await cluster.gateway(SIE_ROOT_PATH="/v1")
    assert (await awkward.client.get("/v1/v1/models")).status_code == 200


# ports


async def test_metrics_have_a_port_of_their_own_that_is_never_behind_a_token(cluster: InProcess) -> None:
    """SIE_GATEWAY_METRICS_PORT: probes answer on both ports, data on the main one, metrics on this one."""
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN="good")
    assert str(gateway.settings.gateway_metrics_port) in gateway.side_url
    assert "sie_gateway_requests_in_progress 0.0" in (await gateway.get("/metrics")).text
    for path in ("/healthz", "/readyz"):
        assert (await gateway.get(path)).status_code == (await gateway.client.get(path)).status_code == 200
    assert (await gateway.get("/v1/models")).status_code == 404
    assert (await gateway.client.get("/v1/models")).status_code == 401
    assert (await gateway.client.get("/metrics", headers={"authorization": "Bearer good"})).status_code == 403


async def test_metrics_are_on_the_api_port_too_where_that_is_wanted_and_the_token_has_their_scope(
    cluster: InProcess,
) -> None:
    """SIE_GATEWAY_API_METRICS: without authentication no token is needed, else one with the scope metrics."""
    tokens = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "good", "SIE_ADMIN_TOKEN": "root"}
    gateway = await cluster.gateway(SIE_GATEWAY_API_METRICS="true", **tokens)
    answers = [await gateway.client.get("/metrics", headers={"authorization": token}) for token in ("", "good", "root")]
    assert [answer.status_code for answer in answers] == [401, 403, 200]
    assert "sie_gateway_requests_in_progress 0.0" in answers[2].text
    assert answers[2].headers["content-type"].startswith("text/plain")
    assert (await gateway.client.post("/metrics", headers={"authorization": "root"})).status_code == 405
    anybody = await cluster.gateway(SIE_GATEWAY_API_METRICS="true", SIE_ROOT_PATH="/sie")
    assert [(await anybody.client.get(path)).status_code for path in ("/metrics", "/sie/metrics", "/metrics/x")] == [
        200,
        200,
        404,
    ]
    off = await (await cluster.gateway()).client.get("/metrics")
    assert (off.status_code, "SIE_GATEWAY_API_METRICS" in off.json()["error"]["message"]) == (404, True)


# routing

ENTRY = toy_entry()
RESOLVED = Catalogue({ENTRY.id: ENTRY}).resolve(ENTRY.id)


def beat(worker: str, machine_profile: str = "l4") -> Heartbeat:
    return Heartbeat(worker, "_default", machine_profile, "default", True, "0")


def lane(fleet: Fleet, machine_profile: str = "") -> str:
    return fleet.lane(
        RESOLVED, pool="_default", machine_profile=machine_profile, known_pools={"_default"}
    ).machine_profile


async def test_only_configured_machine_profiles_may_be_asked_for_also_without_a_worker() -> None:
    """SIE_GATEWAY_CONFIGURED_GPUS: names have any case, and l4 means l4-spot too. Without the setting the profiles of
    the workers may be asked for.
    """
    fleet = Fleet(MemoryServer().connect("gateway"), settings_of(SIE_GATEWAY_CONFIGURED_GPUS=" L4-spot , a100"))
    assert lane(fleet) == "l4-spot"
    assert lane(fleet, "a100") == "a100"
    assert lane(fleet, "l4") == "l4-spot"
    with pytest.raises(InvalidInput) as caught:
        lane(fleet, "h100")
    assert caught.value.reason == "gpu_not_configured"
    assert caught.value.extras["configured_gpu_types"] == ["L4-spot", "a100"]
    fleet = Fleet(MemoryServer().connect("gateway"), settings_of())
    fleet.note(beat("w1", "cpu"))
    assert lane(fleet, "cpu") == "cpu"
    with pytest.raises(NotFound):
        lane(fleet, "h100")


@pytest.mark.parametrize(
    ("variable", "timeout_s"),
    [({}, 15.0), ({"SIE_HEARTBEAT_TIMEOUT_MS": "3000", "SIE_HEALTH_PUBLISH_INTERVAL_MS": "500"}, 3.0)],
)
async def test_a_silent_worker_counts_until_its_heartbeats_are_overdue(
    variable: dict[str, str], timeout_s: float
) -> None:
    """SIE_HEARTBEAT_TIMEOUT_MS: one missed heartbeat changes nothing."""
    now_s = 100.0
    settings = settings_of(**variable)
    fleet = Fleet(MemoryServer().connect("gateway"), settings, lambda: now_s)
    interval_s = settings.health_publish_interval_ms / 1000
    fleet.note(beat("w1"))
    now_s += 2 * interval_s
    assert [heartbeat.worker for heartbeat in fleet.healthy()] == ["w1"]
    now_s = 100.0 + timeout_s - 0.001
    assert [heartbeat.worker for heartbeat in fleet.healthy()] == ["w1"]
    now_s = 100.0 + timeout_s
    assert fleet.healthy() == []
    assert [(heartbeat.worker, healthy) for heartbeat, healthy in fleet.workers()] == [("w1", False)], (
        "still shown, as unhealthy"
    )
    fleet.note(beat("w1"))
    assert [heartbeat.worker for heartbeat in fleet.healthy()] == ["w1"]


# leases


async def test_the_work_stream_is_made_with_storage_and_replicas_and_never_changed_behind_the_operator(
    cluster: InProcess,
) -> None:
    """SIE_STREAM_STORAGE, SIE_STREAM_REPLICAS: if the stream at the broker differs, the start is refused with the
    name of the variable.
    """
    await cluster.gateway(SIE_STREAM_STORAGE="memory", SIE_STREAM_REPLICAS="3")
    spec = cluster.server.streams[STREAM].spec
    assert (spec.storage, spec.replicas) == ("memory", 3)
    with pytest.raises(SettingError, match=r"^SIE_STREAM_STORAGE: WORK__default: storage is 'memory' at the broker"):
        await cluster.gateway(SIE_STREAM_STORAGE="file", SIE_STREAM_REPLICAS="3")
    with pytest.raises(SettingError, match=r"^SIE_STREAM_REPLICAS: "):
        await cluster.gateway(SIE_STREAM_STORAGE="memory")


# authorisation


# default models


async def test_the_default_models_answer_what_names_none(cluster: InProcess) -> None:
    """SIE_DEFAULT_MODELS: the setting chooses one of two models. A name in the request wins over it. Without both the
    request is refused.
    """
    cluster.source.put(toy_entry("toy/two"))
    plain, configured = await cluster.gateway(), await cluster.gateway(SIE_DEFAULT_MODELS="embed=toy/two")
    await cluster.sidecar()
    path, body = "/v1/embeddings", {"input": "x"}
    assert "model_required" in (await plain.client.post(path, json=body)).text
    answer = await configured.client.post(path, json=body)
    assert (answer.status_code, answer.headers["x-sie-model"], answer.json()["model"]) == (200, "toy/two", "toy/two")
    named = await configured.client.post(path, json={**body, "model": "toy/one"})
    assert named.headers["x-sie-model"] == "toy/one"


# config deltas


async def test_deltas_are_taken_from_trusted_producers_alone(cluster: InProcess) -> None:
    """SIE_NATS_CONFIG_TRUSTED_PRODUCERS: deltas of others are counted and ignored."""
    plain = await cluster.gateway()
    trusting = await cluster.gateway(SIE_NATS_CONFIG_TRUSTED_PRODUCERS="sie-config, release-two")
    entry = {"id": "toy/two", "weights": {"path": "/toy"}, "family": "toy", "outputs": {"dense": 8}, "max_tokens": 8}
    delta = ConfigDelta("release-two", cluster.source.present_epoch, "test:2", "toy/two", 2, entry)
    await cluster.send(topology.config_subject("default"), messages.encode(delta))

    async def counted(gateway: GatewayProcess) -> tuple[float, float, int]:
        applied = await gateway.metric("sie_gateway_config_deltas_total", result="applied")
        untrusted = await gateway.metric("sie_gateway_config_deltas_total", result="untrusted")
        return applied, untrusted, (await gateway.client.get("/v1/models/toy/two")).status_code

    assert await counted(plain) == (0, 1, 404)
    assert await counted(trusting) == (1, 0, 200)


async def test_the_gateway_makes_consumers_with_the_ack_wait(cluster: InProcess) -> None:
    """SIE_ACK_WAIT_S: test_sidecar.py has what a worker does when it is over."""
    gateway = await cluster.gateway(SIE_ACK_WAIT_S="7", SIE_GATEWAY_REQUEST_TIMEOUT="1")
    await gateway.encode("x")
    (consumer,) = cluster.server.streams[STREAM].consumers.values()
    assert consumer.spec.ack_wait_s == 7.0


async def test_readiness_is_told_in_json_to_whoever_asks_for_it(cluster: InProcess) -> None:
    """Both ports answer alike. The JSON counts the healthy workers. curl, whose Accept is a wildcard, gets text."""
    gateway = await cluster.gateway()

    async def told(accept: str) -> tuple[str, str]:
        answers = [
            await gateway.client.get(f"{url}/readyz", headers={"accept": accept})
            for url in (gateway.url, gateway.side_url)
        ]
        assert answers[0].content == answers[1].content
        return answers[0].headers["content-type"], answers[0].text

    assert await told("application/json") == ("application/json", '{"status":"ready","healthy_workers":0}')
    await cluster.sidecar()
    assert (await gateway.encode("a text")).status_code == 200  # after this the gateway knows the worker
    assert await told("text/html, application/json;q=0.9") == (
        "application/json",
        '{"status":"ready","healthy_workers":1}',
    )
    for accept in ("*/*", "text/plain", "application/json;q=0"):
        assert await told(accept) == ("text/plain; charset=utf-8", "ok")


async def test_a_taken_metrics_port_ends_the_start_with_the_name_of_the_variable(cluster: InProcess) -> None:
    """SIE_GATEWAY_METRICS_PORT."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(SettingError, match=r"^SIE_GATEWAY_METRICS_PORT: cannot listen"):
            await cluster.gateway(SIE_GATEWAY_METRICS_PORT=str(holder.getsockname()[1]))
