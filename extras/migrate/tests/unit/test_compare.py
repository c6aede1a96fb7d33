"""`sie models compare`: the figures, the samples, and the command against a cluster in this process."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_adapter import toy_entry
from inprocess import InProcess

from sie_cli.cluster import GATEWAY
from sie_client.errors import SIEError
from sie_migrate import compare as comparing
from sie_migrate.compare import MAX_TEXTS, ComparisonSample, agreement_at, compare, nearest, read, similarities

TEXTS = [f"text number {number}" for number in range(30)]


def naive(first: Any, two: Any, k: int, *, own: bool) -> float:
    """Return recall@k, computed by a plain sort."""
    shares = []
    for number in range(len(first[0])):
        near = []
        for asking, rows in (first, two):
            candidates = [row for row in range(len(rows)) if not (own and row == number)]
            near.append(set(sorted(candidates, key=lambda row: -float(asking[number] @ rows[row]))[:k]))
        shares.append(len(near[0] & near[1]) / k)
    return float(np.mean(shares))


@pytest.mark.parametrize("own", [True, False])
def test_recall_is_that_of_a_plain_sort(own: bool) -> None:
    random = np.random.default_rng(5)
    rows = [random.normal(size=(24, width)).astype(np.float32) for width in (8, 12)]
    asking = rows if own else [random.normal(size=(9, width)).astype(np.float32) for width in (8, 12)]
    near = [nearest(similarities(ask, documents, own=own), 20) for ask, documents in zip(asking, rows, strict=True)]
    recalls = agreement_at(*near)
    for k in range(1, 21):
        assert recalls[k - 1] == pytest.approx(naive((asking[0], rows[0]), (asking[1], rows[1]), k, own=own))
    assert agreement_at(near[0], near[0]) == pytest.approx([1.0] * 20)


def test_a_sample_is_lines_or_json_lines_each_text_once(tmp_path: Path) -> None:
    file = tmp_path / "sample"
    file.write_text(
        'one\n\n two \none\n{"text": "three"}\n{not json}\n{"query": "q", "documents": ["a", "b", "a"]}\n', "utf-8"
    )
    assert read(file, MAX_TEXTS) == ComparisonSample(
        ("one", "two", "three", "{not json}", "a", "b"),
        (("q", ("a", "b")),),
        ("one", "two", "three", "{not json}", "q"),
    )
    assert read(file, 2).texts == ("one", "two")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read(file, 2).texts == ("one", "two"), "a byte order mark belongs to no line"
    (lines := tmp_path / "sample.jsonl").write_text('{"text": "one"}\n{"text": "tw', "utf-8")
    with pytest.raises(click.ClickException, match=r"sample.jsonl, line 2: not a JSON object"):
        read(lines, 3)
    for wrong in (b'{"txt": "x"}', b'{"query": "q"}', b'{"query": "q", "documents": [1]}'):
        file.write_bytes(b"fine\n" + wrong)
        with pytest.raises(click.ClickException, match=r"sample, line 2: expected \{\"text\""):
            read(file, 3)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(click.ClickException, match="expected a text file in UTF-8"):
        read(file, 3)
    file.write_bytes(b'{"query": "q", "documents": ["a", "b", "c", "d"]}')
    with pytest.raises(click.ClickException, match="line 1: 4 documents, expected at most 3"):
        read(file, 3)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS), "utf-8")
    return file


async def asked(gateway_url: str, *arguments: str | Path) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, compare, [*map(str, arguments), "--url", gateway_url])


async def test_two_models_of_a_gateway_are_compared(tmp_path: Path, sample: Path) -> None:
    """The vectors of the toy model are a hash of its tokens: equal without a prompt, and different with one."""
    queries, plot = tmp_path / "queries.jsonl", tmp_path / "plot.svg"
    queries.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:4]), "utf-8")
    entries = toy_entry("toy/one"), toy_entry("toy/same"), toy_entry("toy/two", prompts={"document": "passage: {text}"})
    async with InProcess(tmp_path, *entries) as cluster:
        url = (await cluster.gateway()).url
        await cluster.sidecar()
        same = await asked(url, "toy/one", "toy/same", "--sample", sample, "--json")
        assert same.exit_code == 0, same.output
        report = json.loads(same.stdout)
        assert report["cosine"]["min"] == pytest.approx(1.0, abs=1e-6)
        assert set(report["recall"].values()) == {1.0}
        assert report["rank_correlation"]["min"] == pytest.approx(1.0)
        assert report["rank_correlation"]["count"] == len(TEXTS)
        assert len(report["recall"]) == len(TEXTS) - 1
        assert "must not be in one index" in report["notes"][0]
        comparison = await asked(url, "toy/one", "toy/two", "--sample", sample, "--queries", queries, "--plot", plot)
        assert comparison.exit_code == 0, comparison.output
        assert "cosine of 30: mean" in comparison.stdout
        assert "recall@10: " in comparison.stdout
        assert "rank correlation of 4: mean" in comparison.stdout
        ET.parse(plot)
        for arguments, status, message in (
            (("toy/one", "toy/gone", "--sample", sample), 1, "no model named 'toy/gone'"),
            (
                ("toy/one", "toy/two", "--sample", sample, "--queries", tmp_path / "texts.txt", "--plot", tmp_path),
                2,
                "is a directory",
            ),
        ):
            failed = await asked(url, *arguments)
            assert failed.exit_code == status
            assert message in failed.output.replace("\n", " ")


def test_the_administrators_token_goes_to_no_address_of_the_command_line(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The administrator's token goes only to the gateway that the same environment names. A client's token goes to any
    gateway that is called.
    """
    calls: list[tuple[str, str | None]] = []

    def noted(url: str, *, api_key: str | None, connection_budget_s: float) -> None:
        calls.append((url, api_key))
        raise SIEError("enough")

    monkeypatch.setattr("sie_client.SIEClient", noted)
    here, there = "http://here:1", "http://there:1"
    admin, auth, named = {"SIE_ADMIN_TOKEN": "admin"}, {"SIE_AUTH_TOKEN": "auth"}, {"SIE_GATEWAY_URL": here}
    for environ, arguments in (
        (admin | named, ()),
        (admin | named, ("--url", there)),
        (admin, ()),
        (admin | auth, ("--url", there)),
        (admin | auth, ()),
    ):
        CliRunner().invoke(compare, ["a", "b", "--sample", str(sample), *arguments], env=environ)
    assert calls == [(here, "admin"), (there, None), (GATEWAY, None), (there, "auth"), (GATEWAY, "auth")]


class Client:
    """Client whose models have the outputs and the scoring rules that a test sets."""

    def __init__(self, outputs: dict[str, list[str]], rules: dict[str, Any] | None = None) -> None:
        self.outputs, self.rules = outputs, rules or {}
        self.calls: list[tuple[str, str, int]] = []

    def get_model(self, name: str) -> dict[str, Any]:
        outputs = self.outputs[name]
        tasks = ["score"] if "score" in outputs else ["encode"]
        return {"name": name, "outputs": outputs, "tasks": tasks, "inputs": ["text"], "dims": {}, "loaded": True}

    def score(self, model: str, query: str, documents: list[str], **options: Any) -> dict[str, Any]:
        assert options == {"on_item_error": "fail", "priority": "bulk"}
        self.calls.append((model, query, len(documents)))
        scores = [
            {"item_id": f"item-{number}", "score": self.rules[model](text)} for number, text in enumerate(documents)
        ]
        return {"scores": sorted(scores, key=lambda row: -row["score"]), "fingerprint": model}


def test_rerankers_are_compared_by_rank() -> None:
    client = Client({"a": ["score"], "b": ["score"]}, {"a": len, "b": lambda text: -len(text)})
    sample = ComparisonSample(("x", "xx", "xxx", "xxxx"))
    agreement = comparing._compared(client, ("a", "b"), sample, ())  # type: ignore[arg-type]
    assert agreement.ranks == pytest.approx([-1.0] * 4)  # each text is a query, and the others are its documents
    assert {count for *_, count in client.calls} == {3}
    own = ComparisonSample((), (("q", ("x", "xx", "xxx")), ("few", ("x",))))
    assert comparing._compared(client, ("a", "a"), own, ()).ranks == pytest.approx([1.0])  # type: ignore[arg-type]
    client.rules["b"] = lambda text: 0.0
    with pytest.raises(click.ClickException, match="the same score"):
        comparing._compared(client, ("a", "b"), own, ())  # type: ignore[arg-type]


def test_what_cannot_be_compared_says_what_can() -> None:
    client = Client({"a": ["score"], "b": ["sparse"]})
    with pytest.raises(click.ClickException, match="nothing to compare: a has score; b has sparse"):
        comparing._compared(client, ("a", "b"), ComparisonSample(("x",)), ())  # type: ignore[arg-type]
    with pytest.raises(click.ClickException, match="no query with at least 3 documents"):
        comparing._compared(client, ("a", "a"), ComparisonSample(("x",)), ())  # type: ignore[arg-type]
