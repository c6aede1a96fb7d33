"""`sie models load` and `unload` with `--wait`, with a gateway of several lanes and a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self, TypeVar

import msgspec
import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.models import residency

T = TypeVar("T")


@pytest.mark.parametrize(("timeout_s", "last_s"), [(10, 8.0), (10, 11.0), (20, 15.0)])
def test_the_timeout_is_that_of_all_lanes_together(
    monkeypatch: pytest.MonkeyPatch, timeout_s: int, last_s: float
) -> None:
    """The worker of the first lane unloads the model after 7 s, that of the second after `last_s`."""
    ends_s, now_s = {"w1": 7.0, "w2": last_s}, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Gateway:
        url = "http://gateway"

        def __init__(self, cluster: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def first(self, method: str, path: str, body_type: type[T], **content: Any) -> T:
            lane = {"model": "m", "state": "loaded", "lane": "l"}
            lanes = [lane | {"workers": [{"worker": name, "state": "loaded", "in_flight": 0}]} for name in ends_s]
            return msgspec.convert({"name": "m", "lanes": lanes, "state": "loaded"}, body_type)

        def request(self, method: str, path: str, body_type: type[T]) -> T:
            workers = [name for name, end_s in ends_s.items() if now_s < end_s]
            return msgspec.convert({"state": "loaded", "loaded": True, "workers": workers}, body_type)

    monkeypatch.setattr(residency, "AdminClient", Gateway)
    monkeypatch.setattr(residency, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    ran = CliRunner().invoke(main, ["models", "unload", "m", "--wait", "--timeout", str(timeout_s)])
    assert ran.exit_code == (last_s > timeout_s), ran.output
    assert now_s <= timeout_s
    assert ("m: unloaded by w2" in ran.stdout) == (last_s <= timeout_s)
