"""The wall clocks of gateway, config service and `sie keys` are two days off, and keys end by the clock of the broker.

sitecustomize.py on a process's PYTHONPATH ──► its time.time and time.time_ns are off, before it imports anything of
ours
"""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cluster import SIE, until
from stack import Part, Plan, Stack

DAY_S = 86_400
# datetime.now is left as it is: neither process reads it
SITE = """
import time

def _shift(offset_s, now_s=time.time, now_ns=time.time_ns):
    time.time = lambda: now_s() + offset_s
    time.time_ns = lambda: now_ns() + offset_s * 1_000_000_000

_shift({offset_s})
"""


def put_off(part: Part, offset_s: int, folder: Path) -> None:
    """Have the process start with a wall clock that is `offset_s` ahead."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(offset_s=offset_s))
    part.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), part.environ.get("PYTHONPATH"))))


@pytest.mark.parametrize(
    "offset_s",
    # the clock that is behind would let keys live longer, the other one ends them too early
    [-2 * DAY_S, pytest.param(2 * DAY_S, marks=pytest.mark.long)],
    ids=["behind", "ahead"],
)
def test_a_key_ends_by_the_clock_of_the_broker_at_gateway_and_config_service(tmp_path: Path, offset_s: int) -> None:
    """The clocks of a gateway, the config service and `sie keys` are two days off. A key of an hour is valid at both
    services. A key of some seconds is refused by both after its end.
    """
    stack = Stack(tmp_path / "stack", Plan(workers=(), environ={"SIE_AUTH_MODE": "token"}))
    for part in (stack.config, *stack.gateways):
        put_off(part, offset_s, tmp_path / part.name.replace(" ", "-"))
    urls = (f"{stack.urls[0]}/v1/models", f"{stack.config_url}/v1/configs/models")

    def made(name: str, until_when: str) -> str:
        environ = {**os.environ, "PYTHONPATH": stack.config.environ["PYTHONPATH"], "SIE_NATS_URL": stack.broker_urls}
        line = [SIE, "keys", "create", name, "--expires", until_when]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def statuses(token: str) -> list[int]:
        headers = {"authorization": f"Bearer {token}"}
        return [httpx.get(url, headers=headers, timeout=10, trust_env=False).status_code for url in urls]

    with stack:
        began_s = time.monotonic()
        lasting = made("lasting", "1h")
        command_s = time.monotonic() - began_s
        until(lambda: statuses(lasting) == [200, 200], 60, "both services have the key")
        brief_s = 4 * command_s + 3  # life of a key that ends while the test waits
        end = datetime.now(UTC) + timedelta(seconds=brief_s)
        ending = made("ending", end.isoformat())
        until(lambda: statuses(ending) == [401, 401], brief_s + 60, "it has ended at both")
        assert datetime.now(UTC) >= end
        assert statuses(lasting) == [200, 200]
