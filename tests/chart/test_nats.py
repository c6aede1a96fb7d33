"""The broker with the rendered configuration: the processes do their work as its users, and the broker refuses each
user the subjects of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from fake_adapter import FakeAdapter, toy_entry
from helm import CHOSEN, HelmError, container, objects, of_kind, rendered, template, upgraded
from inprocess import settings_of
from nats_server import NatsServer, binary

from sie_broker import Broker, Write
from sie_broker.nats import connect
from sie_cli.serve.embedded import MAX_PAYLOAD_BYTES
from sie_cli.serve.ports import free_port
from sie_config_service.process import run as run_config
from sie_contracts.errors import ErrorInfo
from sie_contracts.media.contents import content_keys
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter, Input, RunOptions, WorkItem
from sie_gateway.process import serve as serve_gateway
from sie_runtime import keys as records
from sie_runtime.feed import config_source
from sie_runtime.process import Stop
from sie_sidecar.poison import POISON_DEATHS, Mark
from sie_sidecar.process import serve as serve_sidecar

# Passwords that a configuration without quotes, or a URL without percent-encoding, would read as another value.
PASSWORDS = {
    "gateway": "1e10",
    "config": "true",
    "worker": "007",
    "streams": "0x1F",
    "operator": "p@/w:%41#? d",
    "route": "1@/:%41#? é",
}
# the packaged bundle serves the family of this entry
ENTRY = toy_entry(family="text-encoder", run={"pooling": "mean"})


def environ_of(manifests: Any, number: int = 0) -> dict[str, str]:
    """Return the environment of the server's container as a kubelet makes it: with the values of secrets, and with
    $(NAME) replaced by an earlier value.
    """
    environ: dict[str, str] = {}
    for variable in container(manifests, "sie-nats", "nats")["env"]:
        if "value" in variable:
            environ[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], variable["value"])
        elif "fieldRef" in variable["valueFrom"]:
            environ[variable["name"]] = f"sie-nats-{number}"
        else:
            environ[variable["name"]] = PASSWORDS[variable["valueFrom"]["secretKeyRef"]["key"].removeprefix("nats-")]
    return environ


def config_of(manifests: Any, folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    """Write the rendered files to a folder, with paths inside the folder and with other changes."""
    data = of_kind("ConfigMap", manifests)["sie-nats"]["data"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "users.conf").write_text(data["users.conf"])
    text = data["nats.conf"].replace("/data", str(folder / "data")).replace("/tmp/", f"{folder}/")
    for before, after in (changes or {}).items():
        assert before in text
        text = text.replace(before, after)
    (folder / "nats.conf").write_text(text)
    if "start.sh" in data:
        (folder / "start.sh").write_text(data["start.sh"])
    return folder / "nats.conf"


def command_of(manifests: Any, config: Path) -> list[str]:
    """Return the rendered command with paths of this machine. A script beside the configuration is rewritten too."""
    script = config.with_name("start.sh")
    if script.exists():
        script.write_text(
            script.read_text().replace("nats-server -c", f"{binary()} -c").replace("/etc/nats", str(config.parent))
        )
    words = container(manifests, "sie-nats", "nats")["command"]
    return [binary() if word == "nats-server" else word.replace("/etc/nats", str(config.parent)) for word in words]


@pytest.mark.parametrize("file", ["values-kind.yaml", "values-gke.yaml", "values-ha.yaml", "everything.yaml"])
def test_the_server_takes_its_configuration(file: str, tmp_path: Path) -> None:
    manifests = rendered(file)
    config = config_of(manifests, tmp_path)
    environ = {"PATH": os.environ["PATH"], **environ_of(manifests)}
    done = subprocess.run(
        [*command_of(manifests, config), "-t"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", ["values-kind.yaml", "values-ha.yaml"])
def test_a_store_is_larger_than_what_is_written_to_it(file: str) -> None:
    def binary_bytes(text: str) -> int:
        return int(text[:-2]) << {"Mi": 20, "Gi": 30}[text[-2:]]

    manifests = rendered(file)
    text = of_kind("ConfigMap", manifests)["sie-nats"]["data"]["nats.conf"]
    most = {name: binary_bytes(size) for name, size in re.findall(r"(max_\w+_store): (\w+)B", text)}
    (claim,) = of_kind("StatefulSet", manifests)["sie-nats"]["spec"]["volumeClaimTemplates"]
    assert most["max_file_store"] < binary_bytes(claim["spec"]["resources"]["requests"]["storage"])
    memory = container(manifests, "sie-nats", "nats")["resources"]["limits"]["memory"]
    assert most["max_memory_store"] < binary_bytes(memory)
    # gateways reserve at their start the space of the work stream, its dead letters and the buckets
    assert most["max_file_store"] > settings_of().queue_max_bytes * 5 // 4


THREE, LARGER, FAST = {"replicas": 3}, {"storage": {"size": "30Gi"}}, {"storage": {"storageClass": "fast"}}


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        ({}, THREE, r"nats\.replicas: .*sie backup"),
        (THREE, {}, r"nats\.replicas: .*sie backup"),
        ({}, LARGER, r"nats\.storage\.size: .*which have 20Gi.*data-sie-nats-N.*--cascade=orphan"),
        (LARGER, {}, r"nats\.storage\.size: .*which have 30Gi"),
        ({}, FAST, r'nats\.storage\.storageClass: .*which have "".*sie backup'),
        (FAST, {}, r'nats\.storage\.storageClass: .*which have "fast"'),
        ({}, {}, ""),
        ({"storage": {"size": "1Ti"}}, {"storage": {"size": "1024Gi"}}, ""),
        (FAST, {**FAST, "maxPayloadBytes": 1 << 20}, ""),
        (THREE, {"replicas": 5}, ""),
        ({"replicas": 5}, THREE, r"nats\.replicas: 3 would leave the volumes of 2 servers"),
    ],
)
def test_an_upgrade_that_the_broker_cannot_follow_is_refused(
    before: dict[str, Any], after: dict[str, Any], refusal: str
) -> None:
    """A server that becomes one of several deletes the streams that it has stored alone. Kubernetes changes no claims
    of a StatefulSet.
    """
    live = objects(template(values={**CHOSEN, "nats": before}))
    with pytest.raises(HelmError, match=refusal) if refusal else contextlib.nullcontext():
        upgraded(live, {**CHOSEN, "nats": after})


# users


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("broker")
    manifests = rendered("values-kind.yaml")
    (folder / "users.conf").write_text(of_kind("ConfigMap", manifests)["sie-nats"]["data"]["users.conf"])
    running = NatsServer(folder, max_payload=MAX_PAYLOAD_BYTES, extra='include "users.conf"')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ_of(manifests).items():
            patch.setenv(name, value)
        running.start()
    yield running
    running.kill()


def url_of(server: NatsServer, user: str) -> str:
    return server.url.replace("//", f"//{user}:{quote(PASSWORDS[user], safe='')}@")


@contextlib.asynccontextmanager
async def connected(server: NatsServer, user: str) -> AsyncIterator[Broker]:
    broker = await connect(url_of(server, user), name=f"test-{user}", timeout_s=30)
    try:
        yield broker
    finally:
        await broker.close()


def violations(server: NatsServer) -> list[str]:
    return [line for line in server.log if "Violation" in line]


async def test_the_processes_do_all_their_work_as_their_users(server: NatsServer, tmp_path: Path) -> None:
    """The server refuses nothing of catalogue, deltas, work, results, placement, demand, reservations, dead letters and
    keys. With SIE_NATS_STREAMS_PASSWORD the config service makes the streams and buckets of all processes.
    """
    before = len(violations(server))
    tokens = {"SIE_CONFIG_READ_TOKEN": "reader", "SIE_ADMIN_TOKEN": "admin"}
    shared = {
        "SIE_MACHINE_PROFILE": "cpu",
        "SIE_GATEWAY_CONFIGURED_GPUS": "cpu,l4",
        "SIE_QUEUE_MAX_BYTES": str(1 << 24),
        **tokens,
    }
    stops, tasks = [Stop() for _ in range(3)], []
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "toy.yaml").write_bytes(msgspec.yaml.encode(msgspec.to_builtins(ENTRY)))
    adapter = await FakeAdapter(tmp_path / "a.sock").start()
    async with contextlib.AsyncExitStack() as stack:
        brokers = {user: await stack.enter_async_context(connected(server, user)) for user in ("gateway", "worker")}
        keys = await records.bucket_of(await stack.enter_async_context(connected(server, "operator")), 1).open()
        key, token = records.create("first", ("infer", "read", "pools", "admin"), now_s=time.time())
        await keys.write([Write(key.id, records.encode(key), 0)])
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        config = settings_of(
            SIE_NATS_URL=url_of(server, "config"),
            SIE_NATS_STREAMS_PASSWORD=PASSWORDS["streams"],
            SIE_MODELS_DIR=str(folder),
            SIE_MODEL_FILTER="toy/one",
            **tokens,
        )
        tasks.append(
            asyncio.create_task(
                run_config(config, stops[0], host="127.0.0.1", port=0, on_listening=listening.set_result)
            )
        )
        url = f"http://127.0.0.1:{await listening}"
        async with httpx.AsyncClient(trust_env=False) as probe, asyncio.timeout(60):
            while (await probe.get(f"{url}/readyz")).status_code != 200:  # noqa: ASYNC110  another process's state
                await asyncio.sleep(0.02)
        side = free_port(2)
        gateway = settings_of(**shared, SIE_GATEWAY_METRICS_PORT=str(side), SIE_AUTH_MODE="token")
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        source = config_source(url, gateway.config_read_token)
        serving = serve_gateway(
            gateway, brokers["gateway"], source, stops[1], host="127.0.0.1", port=0, on_listening=ready.set_result
        )
        tasks.append(asyncio.create_task(serving))
        port = await asyncio.wait_for(ready, 60)
        own = {
            "SIE_IPC_SOCKET_PATH": adapter.path,
            "SIE_WORKER_METRICS_PORT": str(side + 1),
            "SIE_WORKER_ID": "w0",
            "SIE_GATEWAY_URL": f"http://127.0.0.1:{port}",
            "SIE_CONFIG_READ_TOKEN": "reader",
            "SIE_MACHINE_PROFILE": "cpu",
        }
        sidecar = settings_of(**own)
        reading = config_source(url, sidecar.config_read_token)
        tasks.append(
            asyncio.create_task(serve_sidecar(sidecar, brokers["worker"], reading, stops[2], host="127.0.0.1"))
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )
        plain = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60))
        bearer = {"Authorization": f"Bearer {token}"}

        async def ask(model: str = "toy/one", **headers: str) -> int:
            answer = await client.post(f"/v1/encode/{model}", json={"items": ["x"]}, headers={**bearer, **headers})
            return answer.status_code

        async def eventually(check: Callable[[], Awaitable[bool]], goal: str) -> None:
            end_s = time.monotonic() + 60
            while not await check():
                for task in tasks:
                    assert not task.done(), f"{goal}: a process ended with {task.exception()!r}\n" + "\n".join(
                        violations(server)
                    )
                assert time.monotonic() < end_s, f"not within 60 s: {goal}\n" + "\n".join(violations(server))
                await asyncio.sleep(0.05)

        try:

            async def worker_is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await plain.get(f"http://127.0.0.1:{side + 1}/readyz")).status_code == 200
                return False

            async def answered() -> bool:
                return await ask() == 200

            await eventually(worker_is_ready, "the worker is ready")
            await eventually(answered, "an answer")
            assert await ask(**{"X-SIE-Machine-Profile": "l4", "X-SIE-Timeout-Ms": "300"}) == 503

            async def demanded() -> bool:
                return (await plain.get(f"http://127.0.0.1:{side}/v1/scaling/_default.l4.default")).json()[
                    "demand"
                ] == 1

            await eventually(demanded, "a record of demand")
            response = await client.post("/v1/pools", json={"name": "team", "gpus": {"cpu": 1}}, headers=bearer)
            assert response.status_code == 201

            async def served_from_the_reservation() -> bool:
                return await ask(**{"X-SIE-Pool": "team"}) == 200

            await eventually(served_from_the_reservation, "an answer from the reservation")
            assert (await client.delete("/v1/pools/team", headers=bearer)).status_code < 300
            epoch = (await plain.get(f"{url}/v1/configs/epoch", headers={"Authorization": "Bearer reader"})).json()
            document = msgspec.json.encode(msgspec.to_builtins(msgspec.structs.replace(ENTRY, id="toy/two")))
            headers = {"Authorization": "Bearer admin", "Content-Type": "application/json", "Idempotency-Key": "one"}
            written = await plain.post(f"{url}/v1/configs/models", content=document, headers=headers)
            assert written.status_code == 201, written.text
            assert (
                await plain.get(f"{url}/v1/configs/epoch", headers={"Authorization": "Bearer reader"})
            ).json() != epoch

            async def known() -> bool:
                return await ask("toy/two") == 200

            await eventually(known, "the delta")
            letter = await brokers["worker"].publish(topology.dead_letter_subject("_default"), b"{}", "letter")
            assert letter.sequence == 1
            await given_up(brokers["worker"])
            listing = (await client.get("/v1/dead-letters", headers=bearer)).json()
            assert ([entry["id"] for entry in listing["letters"]], listing["total"]) == (["abc"], 2)

            async def replayed() -> bool:  # the worker may not have heard yet that the mark is gone
                return (await client.post("/v1/dead-letters/abc/replay", headers=bearer)).json()["removed"] is True

            await eventually(replayed, "the answer of work that was given up")
            purged = await client.delete("/v1/dead-letters", params={"all": "true"}, headers=bearer)
            assert purged.json()["complete"] is True
            await keys.write([Write(key.id, None)])

            async def refused() -> bool:
                return await ask() == 401

            await eventually(refused, "the end of the key")
        finally:
            for stop in (stops[2], stops[1], stops[0]):
                stop.request()
            statuses = await asyncio.gather(*tasks, return_exceptions=True)
            await adapter.stop()
        assert statuses == [0, 0, 0]
    assert violations(server)[before:] == []


LANE = topology.Lane("_default", "cpu", "default")


async def given_up(worker: Broker) -> None:
    """Write a dead letter with the id abc and the mark of its content, as a worker writes them."""
    item = WorkItem("r", 0, ENTRY.id, ENTRY.revision, "encode", (Input("x"),), RunOptions(), "inbox", 1000)
    marks = await worker.key_value(topology.POISON_BUCKET, max_age_s=topology.POISON_LIFETIME_S)
    mark = msgspec.msgpack.encode(Mark(ENTRY.id, POISON_DEATHS, time.time()))
    await marks.write([Write(content_keys(item)[0], mark)])
    subject = topology.work_subject(LANE, "interactive", ENTRY.id)
    error = ErrorInfo("INFERENCE_ERROR", "why", "poison")
    letter = DeadLetter("abc", subject, messages.encode(item), error, ("w0",), 1, 2, time.time())
    await worker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), "abc")
