"""Cost of each format of replies at the gateway: JSON, base64, msgpack, raw bytes, Arrow, with an adapter that takes no
time.

Each format is compared with a gateway that does the same work, but sends, in place of its reply, as many prepared bytes
as the vectors have: the difference is the cost of serialisation. The formats are measured in turn, and the report shows
the round with the median rate. Other load of the machine changes rates, but hardly processor time.

    python bench/gateway.py [--seconds 4] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import wrk
from report import Report, parser_of
from request_cost import TEXT, Sample, measured, middle
from stack import Device, Plan, Stack

MODEL = "toy/one"
GOAL = 0.10
OTHERS = ("sidecar", "broker", "adapter")
PREPARED = "BENCH_REPLY_BYTES"
# sitecustomize.py of the gateway processes. If the environment variable PREPARED is set, it is a number of bytes, and
# each reply has that many zero bytes in place of its content
PREPARE = f"""
import os
if os.environ.get("{PREPARED}"):
    from sie_gateway.inference.call import EncodedReply
    from sie_gateway.dialects import native
    body = bytes(int(os.environ["{PREPARED}"]))
    def prepared(call, finished, **_):
        finished.check()
        return EncodedReply(body, "application/octet-stream", finished.headers(call.received_s, timed=True))
    native._answer = prepared
"""


@dataclass(frozen=True)
class Format:
    name: str
    path: str = f"/v1/encode/{MODEL}"
    accept: str = "application/json"
    prepared: bool = False

    def body(self, texts: int) -> str:
        if self.path == "/v1/embeddings":
            return json.dumps({"model": MODEL, "input": [TEXT] * texts, "encoding_format": "base64"})
        return json.dumps({"items": [TEXT] * texts})


FORMATS = (
    Format("prepared bytes", prepared=True),
    Format("raw bytes", accept="application/octet-stream"),
    Format("msgpack", accept="application/msgpack"),
    Format("Arrow", accept="application/vnd.apache.arrow.stream"),
    Format("OpenAI base64", path="/v1/embeddings"),
    Format("JSON"),
)


def size_of(stack: Stack, body_format: Format, texts: int) -> int:
    """Return the number of bytes of a reply. Raise RuntimeError if its status is not 200."""
    answer = httpx.post(
        stack.urls[0] + body_format.path,
        content=body_format.body(texts),
        timeout=30,
        trust_env=False,
        headers={"content-type": "application/json", "accept": body_format.accept},
    )
    if answer.status_code != 200:
        raise RuntimeError(f"{body_format.name}: {answer.status_code} {answer.text[:300]}")
    return len(answer.content)


def sample(stack: Stack, body_format: Format, texts: int, options: argparse.Namespace) -> Sample:
    requests, headers = [(body_format.path, body_format.body(texts))], {"accept": body_format.accept}
    return measured(stack, requests, clients=options.clients, seconds=options.seconds, headers=headers)


def measure(texts: int, width: int, options: argparse.Namespace, say: Report) -> None:
    """Measure all formats for `texts` texts with vectors of this width, and report one table."""
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder, "patch")
        patch.mkdir()
        (patch / "sitecustomize.py").write_text(PREPARE)
        python_path = os.pathsep.join([str(patch), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])])
        workers = [Device(lanes=2, width=width)]
        bare = Plan(
            workers=workers, code=options.code, environ={PREPARED: str(4 * texts * width), "PYTHONPATH": python_path}
        )
        rounds: dict[str, list[Sample]] = {wire_format.name: [] for wire_format in FORMATS}
        sizes: dict[str, int] = {}
        with (
            Stack(Path(folder, "real"), Plan(workers=workers, code=options.code)) as real,
            Stack(Path(folder, "bare"), bare) as fixed,
        ):
            for turn in range(options.rounds + 1):
                for body_format in FORMATS:
                    stack = fixed if body_format.prepared else real
                    sizes[body_format.name] = size_of(stack, body_format, texts)
                    measurement = sample(stack, body_format, texts, options)
                    if turn:  # the first round warms up
                        rounds[body_format.name].append(measurement)
    base = middle(rounds[FORMATS[0].name])
    say(f"\n## {texts} x {width}\n")
    say("| reply | bytes | requests/s | p50 ms | gateway us | serialisation us | share of the gateway | others us |")
    say("|---|---|---|---|---|---|---|---|")
    for body_format in FORMATS:
        measurement = middle(rounds[body_format.name])
        own = measurement.cpu_us["gateway"] - base.cpu_us["gateway"]
        others_us = sum(measurement.cpu_us[role] for role in OTHERS)
        load, gateway_us = measurement.load, measurement.cpu_us["gateway"]
        figures = (
            f"{sizes[body_format.name]} | {load.rate:.0f} | {load.p50_ms:.1f} | {gateway_us:.0f} | {own:+.0f} | "
            f"{own / gateway_us:+.0%}"
        )
        say(f"| {body_format.name} | {figures} | {others_us:.0f} |")
    for name in ("raw bytes", "msgpack"):
        ratio = middle(rounds[name]).cpu_us["gateway"] / base.cpu_us["gateway"] - 1
        say(
            f"\n{name} relative to a reply of prepared bytes: {ratio:+.0%} gateway processor time "
            f"(goal: within {GOAL:.0%}), "
            f"{middle(rounds[name]).load.rate / base.load.rate - 1:+.0%} requests/s."
        )


def main() -> None:
    parser = parser_of(__doc__, rounds=3, seconds=4.0, has_code=True)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--shapes", nargs="*", default=["1x384", "32x1024"], help="texts x width")
    options = parser.parse_args()
    if not wrk.installed():
        parser.error("wrk is not installed (Debian: apt-get install wrk)")
    say = Report()
    say(
        f"`python bench/gateway.py`, {os.cpu_count()} cores, {options.clients} clients, {options.rounds} rounds of "
        f"{options.seconds:g} s."
    )
    for shape in options.shapes:
        texts, _, width = shape.partition("x")
        measure(int(texts), int(width), options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
