"""Models, capacity and pools of the client without I/O: its requests, and its errors for unreadable replies."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from PIL import Image

import sie_client
from sie_client import cluster
from sie_client.core import BlockingWork, Plan, Received, Send, Session

TOLD = {
    "model": "m",
    "timing": {},
    "usage": {"prompt_tokens": 1, "total_tokens": 1, "truncated_items": []},
    "fingerprint": "f",
}
LOADING = Received(503, {"x-sie-error-code": "MODEL_LOADING", "x-should-retry": "true"}, b"{}")


def replied(plan: Plan[Any], *replies: Any) -> tuple[list[Send], Any]:
    """Return the requests of a plan, answered with `replies`, and its result. Pauses take no time."""
    bodies, sent, reply = iter(replies), [], None
    while True:
        try:
            step = plan.send(reply)
        except StopIteration as end:
            return sent, end.value
        reply = None
        if isinstance(step, Send):
            sent.append(step)
            body = next(bodies)
            is_msgpack = "msgpack" in step.headers["accept"]
            reply = (
                body
                if isinstance(body, Received)
                else Received(
                    200, {}, msgspec.msgpack.encode({**TOLD, **body}) if is_msgpack else json.dumps(body).encode()
                )
            )
        elif isinstance(step, BlockingWork):
            reply = step.function()


@pytest.mark.parametrize(
    ("inputs", "tasks", "path", "answer"),
    [
        (["text", "image"], ["encode", "score"], "/v1/encode/org/m", {"items": [{}]}),
        (["text"], ["score"], "/v1/score/org/m", {"scores": [{"item_id": "item-0", "score": 0.5, "rank": 0}]}),
        (["text"], ["extract"], "/v1/extract/org/m", {"items": [{}]}),
        (["image"], ["extract"], "/v1/extract/org/m", {"items": [{}]}),
    ],
)
def test_waiting_for_capacity_sends_the_smallest_thing_that_the_model_takes(
    inputs: list[str], tasks: list[str], path: str, answer: dict[str, Any]
) -> None:
    """Only demand makes a worker start; a look at the catalogue does not. The call waits, even if others do not."""
    info = {"name": "org/m", "inputs": inputs, "tasks": tasks, "state": "available"}
    session = Session(wait_for_capacity=False)
    sent, final_info = replied(
        cluster.warmed("org/m", {"gpu": "l4"}, session), info, LOADING, answer, {**info, "state": "loaded"}
    )
    assert [step.path for step in sent] == ["/v1/models/org/m", path, path, "/v1/models/org/m"]
    assert sent[1].headers["x-sie-machine-profile"] == "l4"
    (item,) = msgspec.msgpack.decode(sent[1].body)["items"]
    if "text" in inputs:
        assert item == {"text": "."}
    else:
        (image,) = item["images"]
        assert (Image.open(io.BytesIO(image["data"])).convert("RGB").size, image["format"]) == ((1, 1), "png")
    assert final_info["state"] == "loaded"


SESSION = Session()
PLANS = {
    "list_models": lambda: cluster.list_models({}, SESSION),
    "get_model": lambda: cluster.get_model("m", SESSION),
    "health": lambda: cluster.health(SESSION),
    "whoami": lambda: cluster.whoami({}, SESSION),
    "capacity": lambda: cluster.capacity("l4", SESSION),
    "scaling": lambda: cluster.scaling("a.b.c", SESSION),
    "warmed": lambda: cluster.warmed("m", {}, SESSION),
    "create_pool": lambda: cluster.create_pool("p", {"l4": 1}, {}, SESSION),
    "list_pools": lambda: cluster.list_pools(SESSION),
    "get_pool": lambda: cluster.get_pool("p", SESSION),
    "renew_pool": lambda: cluster.renew_pool("p", SESSION),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "reply", [None, [], 3, "text", {}, {"workers": [3]}, {"pools": [{}]}, {"expires_at": "soon"}], ids=str
)
def test_a_reply_that_is_none_is_an_error_of_the_server(name: str, reply: Any) -> None:
    with pytest.raises(sie_client.ServerError, match="could not be read"):
        replied(PLANS[name](), reply)
