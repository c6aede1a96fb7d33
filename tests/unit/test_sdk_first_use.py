"""First use of the client: no server, a misspelt name, a slow server."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import msgspec
import pytest

import sie_client
from sie_client import SIEAsyncClient, SIEClient, verbs
from sie_client.core import CONNECTION_BUDGET_S, NOBODY_BUDGET_S, Pause, Received, Send, Session, TransportFailed

NOBODY = "http://127.0.0.1:9"
BOUND_S = 3 * NOBODY_BUDGET_S


def check_refused(error: sie_client.SIEConnectionError, log: str, began_s: float) -> None:
    assert str(error).startswith(f"no server at {NOBODY}: the connection is refused; `sie serve` starts one (attempt ")
    assert re.search(f"waiting for connection at {NOBODY} \\(ConnectError: .+\\): next attempt in", log)
    assert time.monotonic() - began_s < BOUND_S


async def test_the_async_client_tells_the_same(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.monotonic()
    async with SIEAsyncClient("http://user:secret@127.0.0.1:9") as client:
        with pytest.raises(sie_client.SIEConnectionError) as caught:
            await client.encode("org/one", "a")
    check_refused(caught.value, caplog.text, began_s)
    assert "secret" not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    ("options", "is_nobody", "patience_s"),
    [({}, True, NOBODY_BUDGET_S), ({}, False, CONNECTION_BUDGET_S), ({"connection_budget_s": 60.0}, True, 60.0)],
)
def test_how_long_a_refused_connection_is_waited_for(
    options: dict[str, Any], is_nobody: bool, patience_s: float
) -> None:
    """A server that has answered before may be restarting. A budget of the caller holds in any case."""
    steps = verbs.encode("org/one", ["a"], options, Session())
    assert isinstance(next(steps), Send)
    pause = steps.send(TransportFailed(ConnectionRefusedError("no"), address=NOBODY, is_nobody=is_nobody))
    assert isinstance(pause, Pause)
    assert pause.seconds + pause.remaining_s == pytest.approx(patience_s)


@pytest.mark.parametrize(
    ("verb", "params", "says"),
    [
        ("encode", {"outptu": 1}, "unexpected parameter 'outptu'; did you mean output_"),
        ("encode", {"dimension": 1}, "did you mean dimensions?"),
        ("extract", {"label": ["a"]}, "did you mean labels?"),
        ("score", {"zzz": 1}, "in options={...}"),
    ],
)
def test_a_parameter_that_no_model_takes_is_an_error(verb: str, params: dict[str, Any], says: str) -> None:
    """The client raises the error before it sends anything: no server runs here."""
    with SIEClient(NOBODY) as client, pytest.raises(TypeError) as caught:
        getattr(client, verb)("org/one", *(("q",) if verb == "score" else ()), ["a"], **params)
    assert f"{verb}() got an " in str(caught.value)
    assert says in str(caught.value)


def test_a_warning_of_the_server_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    body = {
        "model": "org/one",
        "scores": [{"item_id": "item-0", "score": 1.0, "rank": 0}],
        "timing": {},
        "usage": {},
        "fingerprint": "",
        "warnings": ["options.pooling: not used by this model"],
    }
    for _ in range(3):
        steps = verbs.score("org/one", "q", ["a"], {}, session)
        next(steps)
        steps.send(Received(200, {}, msgspec.msgpack.encode(body)))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["the server warns: options.pooling: not used by this model"]
