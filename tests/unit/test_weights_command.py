"""`sie weights` as an operator uses it: a bucket is filled, looked at, checked and emptied, and every mistake says what
to do next.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hub_stub import COMMIT, HubStub
from object_stores import Place

from sie_cli.main import main
from sie_store.cluster import ClusterCache
from sie_store.weights.cache import LocalCache
from sie_store.weights.manifest import MANIFEST, describe, encode

HEADER = b'{"x":{"dtype":"U8","shape":[100000],"data_offsets":[0,100000]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + os.urandom(100_000)
FILES = {"config.json": b"{}", "model.safetensors": SAFETENSORS, "README.md": b"what it is"}
ENTRY = "id: {id}\nweights: {weights}\nfamily: text-encoder\noutputs: {{dense: 4}}\nmax_tokens: 8\n"


class Node:
    """One machine: its cache, its models, and the command."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.cache, self.models, self.place = folder / "cache", folder / "models", place
        self.models.mkdir(parents=True)
        self.environ = {
            "SIE_LOCAL_CACHE": str(self.cache),
            "SIE_MODELS_DIR": str(self.models),
            "SIE_CLUSTER_CACHE": place.url,
            "SIE_HF_FALLBACK": "false",
        }

    def run(self, *arguments: str, expected: int = 0, stdin: str = "", **environ: str | None) -> Result:
        """Run the command, and check its exit status."""
        result = CliRunner().invoke(
            main, ["weights", *arguments], env={**self.environ, **environ}, input=stdin, prog_name="sie"
        )
        assert result.exit_code == expected, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def snapshot(self, repository: str = "org/model", commit: str = COMMIT) -> Path:
        folder = self.cache / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
        fill(folder)
        (folder / MANIFEST).write_bytes(encode(describe(folder, repository, commit, origin="hub")))
        return folder

    def entry(self, name: str, weights: str) -> None:
        (self.models / f"{name.replace('/', '-')}.yaml").write_text(ENTRY.format(id=name, weights=weights))


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def node(tmp_path: Path, faulty: Place) -> Node:
    return Node(tmp_path, faulty)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub().serving() as stub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stub.url)
        yield stub


def written(node: Node) -> list[str]:
    return [name.rpartition("/")[2] for name in node.place.names()]


def test_a_model_of_the_catalogue_goes_from_the_local_cache_into_the_bucket(node: Node) -> None:
    """The list then has the model on disk and in the bucket. A second push writes nothing. Another node fetches it."""
    node.snapshot()
    node.entry("my/model", f"{{hub: org/model, revision: {COMMIT}}}")
    stdout = node.run("push", "my/model").stdout
    assert stdout == f"org/model@{COMMIT} is in {node.place.url}: 3 files written (97.7 KiB), 0 there already\n"
    assert "0 files written (0 B), 3 there already" in node.run("push", "org/model").stdout
    (row,) = json.loads(node.run("list", "--json").stdout)
    assert row == {
        "repository": "org/model",
        "revision": COMMIT,
        "bytes": sum(map(len, FILES.values())),
        "local": True,
        "cluster": True,
        "wrong": [],
    }
    table = node.run("list").stdout.splitlines()
    assert [line.split() for line in table] == [
        ["REPOSITORY", "COMMIT", "SIZE", "DISK", "BUCKET"],
        ["org/model", COMMIT, "97.7", "KiB", "complete", "complete"],
    ]
    shutil.rmtree(node.cache)
    assert node.run("list").stdout.splitlines()[1].split()[-2:] == ["-", "complete"]
    fetch = ClusterCache(node.place.url).fetch("org/model", COMMIT)
    assert fetch is not None
    folder = LocalCache(node.cache).obtain("org/model", COMMIT, fetch, "it")
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_a_folder_gets_a_name_and_prints_what_its_entry_says(node: Node, tmp_path: Path) -> None:
    """The revision depends on the content. A second push has the same one, a changed folder another one beside it."""
    folder = fill(tmp_path / "mine")
    lines = node.run("push", str(folder), "--as", "my/model").stdout.splitlines()
    assert lines[1].startswith("weights: {hub: my/model, revision: ")
    assert node.run("push", str(folder), "--as", "my/model").stdout.splitlines()[1] == lines[1]
    (folder / "config.json").write_text("[]")
    assert node.run("push", str(folder), "--as", "my/model").stdout.splitlines()[1] != lines[1]
    assert len(json.loads(node.run("list", "--json").stdout)) == 2
    named = node.run("push", str(folder), "--as", "my/model", "--revision", "v1").stdout.splitlines()[1]
    assert named == "weights: {hub: my/model, revision: v1}"
    (folder / "config.json").write_text("{}")
    refused = node.run("push", str(folder), "--as", "my/model", "--revision", "v1", expected=1)
    assert "the files of a commit never differ" in refused.stderr
    node.run("push", str(folder), "--as", "my/model", "--revision", "v1", "--force")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["push"], 2, "Missing argument"),
        (["push", "{folder}"], 2, "--as ORGANISATION/NAME"),
        (["push", "org/model", "--as", "my/model"], 2, "org/model is no folder"),
        (["push", "a/b", "c/d", "--revision", "x"], 2, "one by one"),
        (["push", "{folder}", "--as", "../up"], 1, "'../up' is not the name of a repository"),
        (["push", "{folder}", "--as", "my/model", "--revision", "../up"], 1, "'../up' is not a revision"),
        (["push", "/no/such/folder"], 1, "there is no folder /no/such/folder"),
        (["push", "org/none"], 1, "org/none@COMMIT"),
        (["push", f"org/none@{COMMIT}"], 1, "SIE_HF_FALLBACK"),
        (["push", "my/packaged"], 1, "are in the package x"),
        (["push", "my/folder"], 1, "are in the folder /somewhere"),
        (["verify", "org/none"], 1, "there is no snapshot of org/none"),
        (["rm", "org/none", "--yes"], 1, "there is no snapshot of org/none"),
        (["rm"], 2, "Missing argument"),
        (["list", "--cluster-cache", "/a/folder"], 2, "SIE_CLUSTER_CACHE: got '/a/folder'"),
        (["verify", "--cluster-cache", "s3://no-such-bucket"], 1, "there is no bucket no-such-bucket"),
        (["rm", "--yes", "org/model@"], 2, "org/model@COMMIT"),  # of an unset variable in a script
        (["verify", "--local", "org/model@"], 2, "org/model@COMMIT"),
    ],
)
def test_a_mistake_says_what_is_wrong(
    node: Node, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    """The exit status is 2 for a wrong command line, and 1 for a request that cannot be done."""
    folder = fill(tmp_path / "mine")
    node.entry("my/packaged", "{package: x}")
    node.entry("my/folder", "{path: /somewhere}")
    invocation = node.run(*(argument.format(folder=folder) for argument in arguments), expected=status)
    assert message in " ".join(invocation.stderr.split())
    assert node.place.names() == []


def test_what_is_damaged_is_found_and_repaired(node: Node) -> None:
    """`verify --quick` finds a wrong size, `verify` a wrong byte. The exit status is 1. `push --force` repairs both."""
    folder = node.snapshot()
    node.run("push", "org/model")
    assert node.run("verify").stdout == f"org/model@{COMMIT}: 3 files, 97.7 KiB, right\n"
    key = f"models--org--model/{COMMIT}/model.safetensors"
    node.place.put(key, bytes(len(FILES["model.safetensors"])))
    node.run("verify", "--quick", "org/model")
    invocation = node.run("verify", f"org/model@{COMMIT[:8]}", expected=1)
    assert f"org/model@{COMMIT}: model.safetensors has the SHA-256 " in invocation.stdout
    assert "1 of 1 snapshot is incomplete or damaged: `sie weights push --force` writes a" in invocation.stderr
    node.place.put(key, b"")
    assert "model.safetensors has 0 bytes, the manifest says 100071" in node.run("verify", "--quick", expected=1).stdout
    assert node.run("list").stdout.splitlines()[1].split()[-1] == "broken"
    node.run("push", "org/model", "--force")
    node.run("verify")
    node.place.delete(f"models--org--model/{COMMIT}/{MANIFEST}")
    assert "the snapshot has no manifest: a push still runs, or did not finish" in node.run("verify", expected=1).stdout
    assert "the snapshot has no manifest" in node.run("list").stderr
    (folder / "config.json").write_text("[]")
    assert "config.json has the SHA-256" in node.run("verify", "--local", expected=1).stdout
    refused = node.run("push", "org/model", "--force", expected=1)
    assert "config.json differs from its manifest" in refused.stderr


def test_what_is_removed_is_asked_about_and_what_is_used_stays(node: Node) -> None:
    node.snapshot()
    node.run("push", "org/model")
    assert node.run("rm", "org/model", stdin="n\n", expected=1).stdout.startswith(f"org/model@{COMMIT}  97.7 KiB\n")
    assert written(node) != []
    assert f"removed from {node.place.url}: 1 snapshot, 97.7 KiB" in node.run("rm", "org/model", stdin="y\n").stdout
    assert node.place.names() == []
    node.run("push", "org/model")
    twice = node.run("rm", "org/model", f"org/model@{COMMIT}", "--yes").stdout
    assert twice.splitlines() == [
        f"org/model@{COMMIT}  97.7 KiB",
        f"removed from {node.place.url}: 1 snapshot, 97.7 KiB",
    ]
    with LocalCache(node.cache).lease("org/model", COMMIT):
        stays = node.run("rm", "org/model", "--local", "--yes", expected=1)
    assert f"not removed, because a process of this node uses them: org/model@{COMMIT}; unload" in stays.stderr
    assert f"removed from {node.cache}: 0 snapshots" in stays.stdout
    assert f"removed from {node.cache}: 1 snapshot" in node.run("rm", "org/model", "--local", "--yes").stdout
    assert json.loads(node.run("list", "--json").stdout) == []
