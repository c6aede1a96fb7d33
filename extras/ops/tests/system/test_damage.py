"""Files of the broker's streams are damaged, each in turn: the system serves, or says what is damaged, and the command
that it prints mends it. No key is lost silently, and no revoked key is valid again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cluster import until
from damage import DAMAGES, folder_of, streams_of
from diagnosis import ADMIN, BEATS, READ, Examined, commands, ran
from job_client import JobClient
from stack import Device, Plan, Stack

from sie_cli.serve.readiness import unread_stream

BOUND_S, SELF_S = 60.0, 5.0
MODEL, API_MODEL, ALIAS = "toy/one", "toy/of-the-api", "toy-alias"
STREAMS = (
    "DEAD__default",
    "KV_sie_catalogue",
    "KV_sie_catalogue_copy",
    "KV_sie_jobs",
    "KV_sie_keys",
    "KV_sie_keys_copy",
    "KV_sie_leases",
    "KV_sie_placement",
    "KV_sie_poison",
    "KV_sie_pools",
    "KV_sie_shards",
    "WORK__default",
)
SOON = {
    ("KV_sie_catalogue", "cut"),
    ("KV_sie_keys", "no-block"),
    ("KV_sie_jobs", "flipped"),
    ("KV_sie_jobs", "removed"),
}
ENTRY = {"bundle": "default", "weights": {"path": "/toy"}, "family": "toy", "outputs": {"dense": 8}, "max_tokens": 512}


@dataclass(frozen=True)
class Saved:
    """A cluster that was stopped: its folder, its backup, and what its clients have."""

    folder: Path
    backup: Path
    tokens: dict[str, int]  # with the status that each gets
    job: str
    file: str


def plan(folder: Path) -> Plan:
    """Return the plan of a cluster. Clusters of one folder share the payload store."""
    environ = {
        "SIE_AUTH_MODE": "token",
        "SIE_ADMIN_TOKEN": ADMIN,
        "SIE_HF_FALLBACK": "false",
        "SIE_PAYLOAD_STORE_URL": str(folder.parent / "payloads"),
        **BEATS,
    }
    return Plan(workers=(Device(batch_ms=1.0),), environ=environ)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A stopped cluster with three keys, one of them revoked; a model and an alias of the API; a file, and a completed
    job.
    """
    folder = tmp_path_factory.mktemp("damage") / "source"
    backup = folder.parent / "backup"
    with Stack(folder, plan(folder)) as stack:
        url = f" --url {stack.broker_urls}"
        tokens = {ran(f"sie keys create {name} --scopes read{url}").strip(): 200 for name in ("a", "b", "c")}
        ran(f"sie keys revoke c{url}")
        tokens[list(tokens)[-1]] = 401
        for body in (ENTRY | {"id": API_MODEL}, {"id": ALIAS, "alias": API_MODEL}):
            answer = httpx.post(
                f"{stack.config_url}/v1/configs/models",
                json=body,
                headers={"authorization": f"Bearer {ADMIN}"},
                timeout=30,
            )
            assert answer.status_code == 201, answer.text
        with JobClient(stack.urls[0], ADMIN) as client:
            file = client.upload("rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n')
            job = client.done(client.submit(MODEL, {"file": file, "text": "{text}"})["id"])["id"]
        ran(f"sie backup {backup}{url}")
    assert set(STREAMS) <= set(streams_of(folder / "broker-0"))
    return Saved(folder, backup, tokens, job, file)


def status(url: str, token: str = ADMIN) -> int:
    return httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=10, trust_env=False).status_code


def lacks(stack: Stack, saved: Saved) -> list[str]:
    """Return the models and answers that a client misses."""
    if not (stack.config.is_ready() and stack.gateways[0].is_ready()):
        return ["the cluster is not ready"]
    url = stack.urls[0]
    with JobClient(url, ADMIN) as client:
        answer = client.http.post(f"/v1/encode/{MODEL}", json={"items": [{"text": "a"}]})
    wrong = [] if answer.status_code == 200 else [f"encode answers {answer.status_code}"]
    for token, expected in saved.tokens.items():
        if (got := status(f"{url}/v1/whoami", token)) != expected:
            wrong.append(f"a key is answered with {got}, not {expected}")
    wrong += [path for path in (f"models/{API_MODEL}", f"models/{ALIAS}") if status(f"{url}/v1/{path}") != 200]
    return wrong


def lacks_jobs(stack: Stack, saved: Saved) -> list[str]:
    return [
        path for path in (f"jobs/{saved.job}", f"files/{saved.file}") if status(f"{stack.urls[0]}/v1/{path}") != 200
    ]


def mended(stack: Stack, saved: Saved, tmp_path: Path) -> list[str]:
    """Run the commands that doctor prints for damage, and return its findings."""
    environ = {"SIE_NATS_URL": stack.broker_urls, "SIE_GATEWAY_URL": stack.urls[0], "SIE_AUTH_TOKEN": ADMIN}
    report = Examined(tmp_path, {**environ, "SIE_CONFIG_READ_TOKEN": READ})
    assert report.states["damage"] in ("fine", "wrong"), report.output
    for finding in report.findings["damage"]:
        for command in commands(finding["fix"]):
            ran(command.replace("FILE", str(saved.backup)), SIE_NATS_URL=stack.broker_urls)
    return [finding["wrong"] for finding in report.findings["damage"]]


def start(stack: Stack, folder: Path, stream: str) -> list[str]:
    """Start all processes, and return the output of commands that this took. If the broker hangs in the files of the
    stream, stop it and run the documented command.
    """
    broker, *parts = stack.parts
    broker.start()
    try:
        broker.wait_ready(10.0)
        outputs = []
    except AssertionError:
        assert unread_stream(broker.log) == stream, broker.log
        broker.kill()
        data_dir = folder / "data-dir"
        data_dir.mkdir()
        (data_dir / "nats").symlink_to(folder / "broker-0")
        outputs = [ran(f"sie repair {stream} --data-dir {data_dir}")]
        broker.start()
        broker.wait_ready()
    for part in parts:
        part.start()
    return outputs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stream", "damage"),
    [
        pytest.param(stream, damage, marks=[] if (stream, damage) in SOON else pytest.mark.long)
        for stream in STREAMS
        for damage in DAMAGES
    ],
)
def test_a_damaged_stream_is_named_and_mended(saved: Saved, tmp_path: Path, stream: str, damage: str) -> None:
    folder = tmp_path / "stack"
    shutil.copytree(saved.folder / "broker-0", folder / "broker-0")
    DAMAGES[damage](folder_of(folder / "broker-0", stream))
    stack = Stack(folder, plan(saved.folder))
    try:
        messages = start(stack, folder, stream)
        with contextlib.suppress(AssertionError):  # what a process mends itself needs no command
            until(lambda: not lacks(stack, saved), SELF_S, "all to be mended without a command")
        end_s = time.monotonic() + BOUND_S
        while True:
            fresh = mended(stack, saved, tmp_path)
            messages += fresh
            missing = lacks(stack, saved)
            if not missing and not fresh and stack.workers[0].sidecar.is_ready():
                break
            assert time.monotonic() < end_s, f"{missing} {messages} {stack.log(25)}"
        assert all(stream in text for text in messages), messages
        losses = lacks_jobs(stack, saved)
        assert not losses or stream == "KV_sie_jobs", losses
        ran(f"sie restore {saved.backup}", SIE_NATS_URL=stack.broker_urls)
        until(lambda: not lacks_jobs(stack, saved), BOUND_S, "the job and the file to be there", stack.log)
        print(f"{stream} {damage}: {'; '.join(messages) or 'served'}{f', lost {losses}' if losses else ''}")
    finally:
        stack.stop()


def test_a_backup_fills_an_empty_cluster_and_replaces_nothing_that_is_newer(saved: Saved, tmp_path: Path) -> None:
    """The backup is restored into an empty cluster, and again after a key was revoked and the model changed."""
    folder = tmp_path / "stack"
    assert saved.backup.stat().st_mode & 0o777 == 0o600
    with Stack(folder, plan(saved.folder)) as stack:
        ran(f"sie restore {saved.backup}", SIE_NATS_URL=stack.broker_urls)
        until(lambda: not lacks(stack, saved) and not lacks_jobs(stack, saved), BOUND_S, "all to be there", stack.log)
        with JobClient(stack.urls[0], ADMIN) as client:
            assert client.show(saved.job)["state"] == "completed"
        headers = {"authorization": f"Bearer {ADMIN}"}
        entry_url = f"{stack.config_url}/v1/configs/models/{API_MODEL}"
        history = httpx.get(f"{entry_url}/history", headers=headers, timeout=30)
        assert [revision["revision"] for revision in history.json()["revisions"]] == [1], history.text
        changed = httpx.patch(entry_url, json={"max_tokens": 256}, headers=headers, timeout=30)
        assert changed.status_code == 200, changed.text
        ran("sie keys revoke a", SIE_NATS_URL=stack.broker_urls)
        again = ran(f"sie restore {saved.backup}", SIE_NATS_URL=stack.broker_urls)
        assert "keys: 0 written" in again
        assert "models and aliases: 0 written" in again
        revoked = next(iter(saved.tokens))
        until(lambda: status(f"{stack.urls[0]}/v1/whoami", revoked) == 401, BOUND_S, "the key to be refused")
        stands = httpx.get(entry_url, headers=headers, timeout=30)
        assert "256" in stands.text, stands.text


def test_a_backup_is_not_replaced_and_a_damaged_one_is_refused(saved: Saved, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    content = bytearray(saved.backup.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    for command, message in (
        (f"sie backup {saved.backup}", "exists"),
        (f"sie restore {copy}", "is damaged"),
        (f"sie restore {__file__}", "no backup"),
    ):
        with pytest.raises(AssertionError, match=message):
            ran(command, SIE_NATS_URL="nats://127.0.0.1:9")
