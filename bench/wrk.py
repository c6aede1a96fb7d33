"""Run the load generator `wrk` (Debian package), which takes little processor time, because requests are prebuilt."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_SCRIPT = """
local bodies = { %s }
local turn = 0
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
%s
function init(args)
  for number, each in ipairs(bodies) do bodies[number] = wrk.format(nil, each[1], nil, each[2]) end
end
function request()
  turn = turn %% #bodies + 1
  return bodies[turn]
end
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format("RESULT %%d %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """Results of a run of wrk. `refused`: replies that are not 2xx or 3xx. `failed`: errors of connections, and
    timeouts. `cpu_s`: processor time of wrk.
    """

    answered: int
    seconds: float
    p50_ms: float
    p99_ms: float
    refused: int
    failed: int
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.answered / self.seconds


def installed() -> bool:
    return shutil.which("wrk") is not None


def closed_loop(
    url: str,
    requests: Sequence[tuple[str, str]],
    *,
    clients: int,
    seconds: float,
    folder: Path,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Load:
    """Run `clients` connections for `seconds`, rounded up to whole seconds. Each sends its next request, a (path, JSON
    body), when its last one is answered. Raise RuntimeError if wrk fails.
    """
    script = folder / "requests.lua"
    bodies = ", ".join(f"{{ {_quoted(path)}, {_quoted(body)} }}" for path, body in requests)
    script.write_text(
        _SCRIPT
        % (bodies, "\n".join(f"wrk.headers[{_quoted(name)}] = {_quoted(value)}" for name, value in headers.items()))
    )
    pieces = urlsplit(url)
    argv = [
        "wrk",
        "-t1",
        f"-c{clients}",
        f"-d{math.ceil(seconds)}s",
        "--timeout",
        "30s",
        "-s",
        str(script),
        f"{pieces.scheme}://{pieces.netloc}",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        text = output.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    match = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)", text)
    if match is None:
        raise RuntimeError(f"wrk reported no result, exit status {process.returncode}:\n{text}")
    answered, micros, p50, p99, refused, failed = map(int, match.groups())
    return Load(answered, micros / 1e6, p50 / 1000, p99 / 1000, refused, failed, usage.ru_utime + usage.ru_stime)


def _quoted(text: str) -> str:
    """Return the text as a Lua string."""
    return (
        '"'
        + "".join(
            f"\\{byte:03d}" if byte < 32 or byte > 126 or chr(byte) in '"\\' else chr(byte) for byte in text.encode()
        )
        + '"'
    )
