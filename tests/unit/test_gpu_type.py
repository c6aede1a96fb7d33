"""The type of a GPU by its product name, and the lane of a request that names a type."""

from __future__ import annotations

import pytest
from fake_adapter import toy_entry
from inprocess import settings_of

from sie_broker.memory import MemoryServer
from sie_contracts.errors import NotFound, NotProvisioned
from sie_contracts.gpu_type import gpu_type
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_gateway.fleet.lanes import Fleet

ENTRY = toy_entry()
RESOLVED = Catalogue({ENTRY.id: ENTRY}).resolve(ENTRY.id)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-mig-1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb-mig-1g.5gb"),
        ("Apple arm", "arm"),
        ("", ""),
    ],
)
def test_a_product_name_is_a_type_and_a_type_stays_one(name: str, expected: str) -> None:
    assert gpu_type(name) == expected
    assert gpu_type(expected) == expected


class Lanes:
    """Lanes that a fleet without SIE_GATEWAY_CONFIGURED_GPUS chooses."""

    def __init__(self, **environ: str) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(MemoryServer().connect("gateway"), settings_of(**environ), lambda: self.now_s)

    def beat(
        self, worker: str, machine_profile: str = "_default", *, gpu: str = "", device: str = "cuda:0", **fields: object
    ) -> None:
        beat_fields = {"gpu": gpu, "device": device, "ready": True, "version": "0", **fields}
        self.fleet.note(Heartbeat(worker, "_default", machine_profile, "default", **beat_fields))  # type: ignore[arg-type]  # fields by name

    def named(self, name: str) -> str:
        return self.fleet.lane(
            RESOLVED, pool="_default", machine_profile=name, known_pools={"_default"}
        ).machine_profile


def test_the_detected_type_routes_where_nobody_named_a_machine_profile() -> None:
    lanes = Lanes()
    lanes.beat("w1", gpu="NVIDIA H100 80GB HBM3")
    assert lanes.named("h100") == "_default"
    lanes.beat("w2", "spare", gpu="NVIDIA L4")
    assert lanes.named("l4") == "spare"
    lanes.beat("w3", "laptop", device="cpu")
    assert lanes.named("cpu") == "laptop"
    lanes.beat("w4", "second", gpu="NVIDIA L4", models=(ModelStatus(RESOLVED.residency, "loaded"),))
    assert lanes.named("l4") == "second", "of two lanes the one that has the model"


def test_a_type_that_no_worker_is_is_refused_with_those_that_there_are() -> None:
    """The request goes to no worker of another type."""
    lanes = Lanes()
    lanes.beat("w1", "cpu", device="cpu")
    lanes.beat("w2", gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(NotFound, match="no worker matches 'l4'; profiles and GPU types: _default, cpu, h100") as caught:
        lanes.named("l4")
    assert (caught.value.status, caught.value.reason) == (404, "gpu_not_found")
    assert caught.value.extras == {
        "status": "gpu_not_configured",
        "gpu": "l4",
        "configured_gpu_types": ["_default", "cpu", "h100"],
    }


def test_a_lane_of_several_types_does_not_serve_one_of_them() -> None:
    lanes = Lanes()
    lanes.beat("w1", gpu="NVIDIA H100 80GB HBM3")
    lanes.beat("w2", gpu="NVIDIA L4")
    with pytest.raises(NotFound, match="the workers of _default have several GPU types: give each type a separate"):
        lanes.named("l4")
    lanes.beat("w1", gpu="NVIDIA H100 80GB HBM3", leaving=True)
    assert lanes.named("l4") == "_default"


def test_a_type_waits_for_workers_that_were_there_and_is_not_found_once_they_are_forgotten() -> None:
    lanes = Lanes(SIE_HEARTBEAT_TIMEOUT_MS="15000")
    lanes.beat("w1", "spare", gpu="NVIDIA L4")
    lanes.now_s = 20.0
    lanes.beat("w2", "cpu", device="cpu")
    assert lanes.named("l4") == "spare"
    for now_s in range(25, 201, 5):  # without any heartbeat in between, no worker would be forgotten
        lanes.now_s = float(now_s)
        lanes.beat("w2", "cpu", device="cpu")
    with pytest.raises(NotFound):
        lanes.named("l4")


def test_before_any_worker_is_ready_only_the_own_machine_profile_is_waited_for() -> None:
    lanes = Lanes(SIE_GPU_TYPE="l4")
    assert lanes.named("l4") == "l4"
    with pytest.raises(NotProvisioned) as caught:
        lanes.named("h100")
    assert caught.value.status == 503
    assert caught.value.extras["configured_gpu_types"] == []
