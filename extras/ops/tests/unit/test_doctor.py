"""The decisions of `sie doctor` that need no cluster: drift, skew, GPUs, settings, and the exit status."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import http.server
import json
import os
import threading
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from sie_cli.cluster import Cluster
from sie_contracts.settings import load
from sie_contracts.status import QueueInfo
from sie_contracts.wire.configs import ConfigEpoch
from sie_ops.doctor import command
from sie_ops.doctor.checks import config, drift, gateway, loads, queue, refusals, skew, versions
from sie_ops.doctor.command import BLIND, FINE, WRONG, faults_of, status_of
from sie_ops.doctor.machine import GpuDriver, TorchBuild, disk, gpu_faults, has_nvidia_card, sockets
from sie_ops.doctor.probe import CheckSkipped, ClusterProbe, Heartbeats, NotApplicable
from sie_ops.doctor.report import DoctorCheck
from sie_ops.doctor.report import DoctorFinding as Finding

EPOCH = ConfigEpoch("made:9", {"default": "made:5", "other": "made:9"})
DRIVER = GpuDriver("570.1", (12, 8))


@pytest.mark.parametrize(
    ("gateways", "workers", "behind"),
    [
        ({"g": "made:9"}, {"w": ("default", "made:9")}, []),
        ({"g": "made:9"}, {"w": ("default", "made:5")}, []),  # no later change concerned its bundle
        (
            {"g": "made:8"},
            {"w": ("default", "made:4"), "v": ("other", "made:8")},
            ["gateway g", "worker v", "worker w"],
        ),
        ({"g": "elsewhere:9"}, {"w": ("unheard", "made:8")}, ["gateway g", "worker w"]),
    ],
)
def test_who_is_behind_the_catalogue(
    gateways: dict[str, str], workers: dict[str, tuple[str, str]], behind: list[str]
) -> None:
    assert [finding.wrong.partition(" uses")[0] for finding in drift(EPOCH, gateways, workers)] == behind


def test_without_the_config_services_word_gateways_are_compared_with_each_other() -> None:
    findings = drift(None, {"a": "made:9", "b": "made:10"}, {"w": ("default", "made:1"), "v": ("default", "old:1")})
    assert [finding.wrong.partition(" uses")[0] for finding in findings] == ["gateway a", "worker v"]
    assert drift(None, {}, {"w": ("default", "made:1")}) == []
    old, new = "2026-11-01T00:00:00Z:100", "2026-11-28T00:00:00Z:2"  # the bucket was created again
    findings = drift(None, {"a": old, "b": new}, {"v": ("default", old), "w": ("default", new)})
    assert [finding.wrong.partition(" uses")[0] for finding in findings] == ["gateway a", "worker v"]


def test_everything_but_the_newest_version_is_named_and_numbers_are_compared_as_numbers() -> None:
    (finding,) = skew({"0.9.0": ["gateway a", "sidecar b"], "0.10.0": ["this `sie`"]})
    assert finding.wrong == "gateway a, sidecar b: version 0.9.0, the newest is 0.10.0"
    assert "sie-cluster==0.10.0" in finding.fix
    assert skew({"0.1.0": ["a", "b"]}) == []
    (finding,) = skew({"0.2.0rc1": ["gateway a"], "0.2.0": ["this `sie`"]})
    assert finding.wrong == "gateway a: version 0.2.0rc1, the newest is 0.2.0"
    assert {old.wrong.partition(":")[0] for old in skew({"0.2.0rc10": ["c"], "0.2.0b2": ["b"], "0.2.0rc9": ["a"]})} == {
        "a",
        "b",
    }


CPU_BUILD, BUILD, SEEN = (
    TorchBuild("2.13+cpu", "", False, 0),
    TorchBuild("2.13", "13.0", False, 0),
    TorchBuild("2.13", "12.8", True, 2),
)


@pytest.mark.parametrize(
    ("device", "torch", "driver", "wrong"),
    [
        ("cuda", CPU_BUILD, DRIVER, "built without CUDA, but SIE_DEVICE=cuda"),
        ("auto", CPU_BUILD, DRIVER, "built without CUDA"),
        ("cuda", BUILD, None, "no NVIDIA driver answers: not found"),
        ("auto", BUILD, DRIVER, "newer than driver 570.1 (CUDA 12.8)"),
        ("cuda:2", SEEN, DRIVER, "only cuda:0, cuda:1"),
    ],
)
def test_what_a_gpu_lacks(device: str, torch: TorchBuild, driver: GpuDriver | None, wrong: str) -> None:
    (finding,) = gpu_faults(device, torch, driver, "not found")
    assert wrong in finding.wrong


def test_a_card_is_seen_without_its_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (("0", "0x10de", "0x040300"), ("1", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert not has_nvidia_card(tmp_path), "sound of NVIDIA, and display of another vendor"
    (tmp_path / "1" / "vendor").write_text("0x10de\n")
    assert has_nvidia_card(tmp_path)
    assert not has_nvidia_card(tmp_path / "absent")


def test_faults_of_settings_leave_the_rest_readable() -> None:
    faults, flags, environ = faults_of(
        {"SIE_BUNDLE": "b"}, {"SIE_GPU_COUNT": "-1", "SIE_POOL": "p", "SIE_POOOL": "q", "PATH": "x"}
    )
    assert [(fault.wrong.partition(":")[0].partition(" ")[0]) for fault in faults] == ["SIE_GPU_COUNT", "SIE_POOOL"]
    assert faults[1].fix.startswith("did you mean SIE_POOL?")
    assert (flags, environ) == ({"SIE_BUNDLE": "b"}, {"SIE_POOL": "p", "SIE_POOOL": "q", "PATH": "x"})


def test_the_variables_of_clients_are_no_faults_of_settings() -> None:
    environ = {"SIE_API_KEY": "key", "SIE_BASE_URL": "http://gateway:1"}
    assert faults_of({}, environ) == ([], {}, environ)


def test_the_status_is_that_of_the_worst_report() -> None:
    fine, absent, blind, wrong = (DoctorCheck("c", state, "", []) for state in ("fine", "absent", "blind", "wrong"))  # type: ignore[arg-type]
    assert status_of([fine, absent]) == FINE
    assert status_of([fine, blind]) == BLIND
    assert status_of([blind, wrong, fine]) == WRONG


async def test_a_check_that_does_not_end_is_given_up_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def endless(probe: ClusterProbe) -> tuple[str, list[object]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def blind(probe: ClusterProbe) -> tuple[str, list[object]]:
        raise CheckSkipped("dark")

    async def absent(probe: ClusterProbe) -> tuple[str, list[object]]:
        raise NotApplicable("none")

    monkeypatch.setattr(command, "CHECK_S", 0.05)
    monkeypatch.setattr(command, "CHECKS", {"endless": endless, "blind": blind, "absent": absent})
    reports = await command.examined({"SIE_GATEWAY_URL": "http://127.0.0.1:9"}, {}, tmp_path)
    assert [(report.check, report.state) for report in reports[1:]] == [
        ("endless", "blind"),
        ("blind", "blind"),
        ("absent", "absent"),
    ]


async def test_what_another_user_hides_is_not_seen_and_ends_no_other_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden, user = tmp_path / "hidden", os.geteuid()
    hidden.mkdir(mode=0)
    environ = {"SIE_IPC_SOCKET_PATH": f"{hidden}/sie.sock", "SIE_LOCAL_CACHE": f"{hidden}/cache"}
    monkeypatch.setattr(command, "CHECKS", {"sockets": sockets, "versions": versions, "disk": disk})
    await asyncio.to_thread(int)  # imports what a thread needs
    try:
        if user == 0:
            os.seteuid(65534)  # root may read each folder
        reports = await command.examined({"SIE_GATEWAY_URL": "http://127.0.0.1:9"}, environ, Path("/nowhere"))
    finally:
        os.seteuid(user)
    says_by_check = {report.check: (report.state, report.says) for report in reports}
    assert says_by_check["sockets"][0] == says_by_check["disk"][0] == "blind"
    assert says_by_check["versions"] == ("blind", "no process of the cluster answers")
    assert says_by_check["sockets"][1].endswith("belongs to another user: run this as the worker's user")
    assert says_by_check["disk"][1].endswith(": Permission denied")


class Gateway(http.server.BaseHTTPRequestHandler):
    """A gateway with findings of its own."""

    findings = (
        {"check": "loads", "wrong": "worker w0 cannot load bad: CERTIFICATE", "fix": "`sie models set bad`"},
        {"check": "refusals", "wrong": "9 of 10 requests were answered with QUEUE_FULL", "fix": "add workers"},
        {"check": "queue", "wrong": "the queue of a.b.c has 7 messages", "fix": "add workers"},
    )

    def do_GET(self) -> None:
        queues = [QueueInfo("a", "b", "c", "bulk", 7, 61.0)]
        view = {"cluster": {"models_loaded": 1}, "queues": queues, "findings": self.findings}
        self.send_response(200)
        self.send_header("X-SIE-Version", "1.0")
        self.end_headers()
        self.wfile.write(msgspec.json.encode(view if self.path == "/v1/cluster" else {}))

    def log_message(self, *args: object) -> None:
        pass


async def test_findings_of_gateways_are_those_of_their_checks(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            settings = dataclasses.replace(load(environ={}).settings, gateway_url=f"{url},http://127.0.0.1:9")
            async with ClusterProbe(Cluster(settings, {"SIE_GATEWAY_URL": "flag"}, tmp_path)) as probe:
                reports = [await check(probe) for check in (loads, refusals, queue)]
        finally:
            server.shutdown()
            thread.join()
    expected = [[Finding(finding["wrong"], finding["fix"])] for finding in Gateway.findings]
    assert [findings for _, findings in reports] == expected
    assert reports[0][0] == "1 model loaded"
    async with ClusterProbe(Cluster(load(environ={}).settings, {}, tmp_path)) as probe:
        for check in (loads, refusals, queue):
            with pytest.raises(CheckSkipped):
                await check(probe)


class WithPassword(http.server.BaseHTTPRequestHandler):
    """A gateway that is not ready and a config service with a faulty model, behind a proxy with a password."""

    def do_GET(self) -> None:
        is_known = self.headers["authorization"] == f"Basic {base64.b64encode(b'user:secret').decode()}"
        self.send_response(401 if not is_known else 503 if self.path == "/readyz" else 200)
        if is_known:
            self.send_header("X-SIE-Version", "1.0")
        self.end_headers()
        models = [{"model_id": "org/a", "note": "revision 2 could not be loaded"}]
        bodies = {"/v1/configs/epoch": {"epoch": "made:1"}, "/v1/configs/models": {"models": models}}
        self.wfile.write(b"not ready" if self.path == "/readyz" else json.dumps(bodies.get(self.path, {})).encode())

    def log_message(self, *args: object) -> None:
        pass


async def test_a_password_in_an_address_is_used_by_all_requests_and_shown_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterProbe, "heartbeats", AsyncMock(return_value=Heartbeats()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithPassword) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://user:secret@127.0.0.1:{server.server_address[1]}"
            environ = {"SIE_GATEWAY_URL": url, "SIE_CONFIG_SERVICE_URL": url, "SIE_NATS_URL": "nats://127.0.0.1:1"}
            settings = load(environ=environ)
            async with ClusterProbe(Cluster(settings.settings, settings.sources, tmp_path)) as probe:
                findings = [*(await gateway(probe))[1], *(await config(probe))[1]]
        finally:
            server.shutdown()
    assert [finding.wrong.replace(url.replace("user:secret@", ""), "URL") for finding in findings] == [
        "the gateway at URL is not ready",
        "org/a: revision 2 could not be loaded",
    ]
