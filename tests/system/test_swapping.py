"""Two models under a hard limit on the memory of every process: with room for one they take turns, with room for both
neither is evicted.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import local_models
import numpy as np
import psutil
import pytest
import torch
from cluster import Cluster, until
from local_models import LocalModels
from transformers import AutoModel, AutoTokenizer
from unit.adapter import toys

WIDTH, LAYERS, CLIENTS = 768, 8, 16
MODELS = ("test/left", "test/right")
TEXTS = [" ".join(f"w{(3 * start + step) % 119}" for step in range(4 + start)) for start in range(8)]
_BOTH = 6 << 30


@dataclass
class Traffic:
    """Observations of the clients."""

    answers: int = 0
    longest_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    wrong: float = 0.0  # the largest difference of a value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """Two random BERT models of 230 MB in float32."""
    toy_models = local_models.under(tmp_path_factory.mktemp("swapping"))
    for seed, model in enumerate(MODELS):
        name = model.removeprefix("test/")
        toys.save(
            toy_models.weights / name,
            "bert",
            seed=seed,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=12,
            initializer_range=0.04,
        )
        toy_models.add(
            name, {"family": "text-encoder", "outputs": {"dense": WIDTH}, "max_tokens": 64, "run": {"pooling": "mean"}}
        )
    return toy_models


@pytest.fixture(scope="module")
def expected(models: LocalModels) -> dict[str, np.ndarray]:
    """The normalised mean of transformers' states, one text at a time: float32 [texts, width] of each model."""
    vectors = {}
    for name in MODELS:
        folder = models.weights / name.removeprefix("test/")
        tokenizer, model = (
            AutoTokenizer.from_pretrained(folder),
            AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        )
        with torch.inference_mode():
            means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in TEXTS]
        vectors[name] = torch.nn.functional.normalize(torch.stack(means), dim=-1).numpy()
    return vectors


def served(models: LocalModels, data_dir: Path, limit_bytes: int) -> Cluster:
    """Return a cluster whose processes may each hold `limit_bytes` of data (RLIMIT_DATA). They have one arena: memory
    that is free in another one counts as held.
    """
    environ = {
        "SIE_HF_FALLBACK": "false",
        "SIE_LOCAL_CACHE": str(data_dir),
        "MALLOC_ARENA_MAX": "1",
        "SIE_LOAD_HOLD_S": "29",  # on a busy machine a turn and two loads take longer than the default
    }
    cluster = Cluster(data_dir, "--no-spare", *models.arguments, environ=environ)
    cluster.argv = ["prlimit", f"--data={limit_bytes}", *cluster.argv]
    return cluster


def ask(client: httpx.Client, model: str, start: int) -> np.ndarray:
    body = {"items": [{"text": text} for text in TEXTS[start:]]}
    answer = client.post(f"/v1/encode/{model}", json=body)
    assert answer.status_code == 200, answer.text[:300]
    slots = answer.json()["items"]
    assert all("dense" in slot for slot in slots), answer.text[-300:]
    return np.array([slot["dense"]["values"] for slot in slots], np.float32)


def alternate(cluster: Cluster, expected: dict[str, np.ndarray], seconds: float) -> Traffic:
    """Run 16 clients, each with one request after the other, to the one model and then to the other."""
    traffic, lock, end_s = Traffic(), threading.Lock(), time.monotonic() + seconds

    def client(number: int) -> None:
        with httpx.Client(base_url=cluster.url, timeout=120) as session:
            for turn in itertools.count(number):
                asked_s = time.monotonic()
                if asked_s > end_s:
                    return
                model, start = MODELS[turn % 2], (7 * turn) % len(TEXTS)
                try:
                    got, error = ask(session, model, start), ""
                    wrong = float(np.abs(got - expected[model][start:]).max())
                except (AssertionError, httpx.HTTPError, ValueError) as failure:
                    wrong, error = 0.0, f"{type(failure).__name__}: {failure}"
                with lock:
                    traffic.answers += 1
                    traffic.longest_s = max(traffic.longest_s, time.monotonic() - asked_s)
                    traffic.wrong = max(traffic.wrong, wrong)
                    traffic.errors += [error] if error else []

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return traffic


def data_bytes(cluster: Cluster) -> int:
    """Return the bytes of the adapter that RLIMIT_DATA limits."""
    (adapter,) = cluster.pids("adapter")
    return int(psutil.Process(adapter).memory_info().data)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_models_on_a_budget_for_one_take_turns_for_a_minute(
    models: LocalModels, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """With room for both models, each is loaded once. With room for one, by what the first run held, they take turns
    and nothing fails.
    """
    cluster = served(models, tmp_path / "both", _BOTH)
    try:
        cluster.start()
        with httpx.Client(base_url=cluster.url, timeout=120) as client:
            ask(client, MODELS[0], 0)
            one_bytes = data_bytes(cluster)
        traffic = alternate(cluster, expected, 15)
        assert traffic.errors == []
        assert traffic.wrong < 1e-4
        loads, swaps = cluster.metric("sie_model_loads_total"), cluster.metric("sie_model_swaps_total")
        assert (loads, swaps) == (2, 0)
        weights_bytes = cluster.metric("sie_model_memory_bytes") / 2
        print(f"\nroom for both: {traffic.answers} answers, longest {traffic.longest_s:.2f} s, {loads:.0f} loads")
    finally:
        cluster.stop()
    cluster = served(models, tmp_path / "one", int(one_bytes + 0.4 * weights_bytes))
    try:
        cluster.start()
        traffic = alternate(cluster, expected, 60)
        loads, swaps = cluster.metric("sie_model_loads_total"), cluster.metric("sie_model_swaps_total")
        print(
            f"room for one: {traffic.answers} answers, longest {traffic.longest_s:.2f} s, {loads:.0f} loads, "
            f"{swaps:.0f} of a busy model"
        )
        assert traffic.errors == [], cluster.log(4000)
        assert traffic.wrong < 1e-4
        assert traffic.answers >= CLIENTS
        assert loads >= 2  # only one of them is loaded in the end: the other one was evicted
        assert cluster.metric("sie_adapter_deaths_total") == 0
        until(lambda: cluster.metric("sie_queue_depth") == 0, 60, "nothing held")
        assert sum(1 for name in MODELS if cluster.metric("sie_model_loaded", model=name)) == 1
    finally:
        cluster.stop()
