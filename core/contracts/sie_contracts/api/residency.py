"""Replies of the routes by which an operator loads or unloads models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from sie_contracts.api.shapes import MINI

ResidencyState = Literal["loaded", "loading", "provisioning", "unloading", "available"]


class WorkerResidency(Struct, kw_only=True):
    """A worker that should load or unload the model. `state`: state of the model in the worker's last heartbeat."""

    worker: str
    state: Literal["available", "loading", "loaded", "unloading", "failed"]
    in_flight: Annotated[int, Meta(ge=0, description="Work items of the model on the worker at its last heartbeat.")]


class LaneResidency(Struct, kw_only=True):
    """State of a model in one lane (pool, machine profile and bundle). In state `provisioning`, the lane has no worker
    yet.
    """

    model: str
    lane: Annotated[str, Meta(description="pool.machine_profile.bundle")]
    state: ResidencyState
    workers: list[WorkerResidency]


class ModelResidency(Struct, kw_only=True):
    """Progress of a load or unload of a model, or of each model of an alias. Later progress is in `GET
    /v1/models/{model}`. `state`: state of the lane that is farthest from the goal.
    """

    EXAMPLE: ClassVar[Any] = {
        "name": MINI,
        "state": "loading",
        "lanes": [
            {
                "model": MINI,
                "lane": "_default.cpu.default",
                "state": "loading",
                "workers": [{"worker": "w0", "state": "available", "in_flight": 0}],
            }
        ],
    }

    name: str
    state: ResidencyState
    lanes: list[LaneResidency]
