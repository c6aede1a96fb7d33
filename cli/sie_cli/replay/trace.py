"""Traces of requests: arrival times and lengths of inputs, without text and names of clients.

A trace is JSON lines, in any order:

    {"at": 0.0184, "tokens": [12, 300], "model": "bge", "priority": "bulk", "lora": "org/x"}
        a request; only at and tokens are needed
    {"ran": {"tokens": 512, "attention": 40960, "seconds": 0.0123}}
        a measured batch
    {"settings": {"max_wait_ms": 5, "workers": 2}}
        the settings of the cluster

`at`: seconds from any origin. `tokens`: one number for each input. `attention`: sum of the squared lengths of the
batch's inputs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire.messages import Priority

MAX_TOKENS = 512  # largest number of tokens of a generated input; larger random numbers become this number
MAX_INPUTS = 10_000_000  # largest number of inputs of a generated trace; `generate` refuses to make more


class TraceError(ValueError):
    """Error in a trace, in the description of a trace to generate, or in the settings and durations of a replay."""


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Request of a trace. In a recorded trace, it is the part of a request that one message carried."""

    at: float
    tokens: tuple[int, ...]
    model: str = "model"
    priority: Priority = "interactive"
    lora: str = ""

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError("a request needs at least one input, and each input at least one token")


class Ran(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int
    attention: int
    seconds: float


class _RanLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ran: Ran


class _SettingsLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    settings: dict[str, float]


@dataclass(frozen=True)
class Trace:
    """Requests sorted by time in seconds; the first is at 0. `ran`: the measured batches. `settings`: the cluster's
    settings during the recording, with the names of `ReplayPlan`.
    """

    requests: tuple[TraceRequest, ...]
    ran: tuple[Ran, ...] = ()
    settings: dict[str, float] = field(default_factory=dict)


def read(lines: Iterable[bytes]) -> Trace:
    """Read a trace. Raises TraceError, with the number of a wrong line, counted over all `lines`."""
    requests: list[TraceRequest] = []
    ran: list[Ran] = []
    settings: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            if "ran" in keys:
                ran.append(msgspec.json.decode(line, type=_RanLine).ran)
            elif "settings" in keys:
                settings.update(msgspec.json.decode(line, type=_SettingsLine).settings)
            else:
                requests.append(msgspec.json.decode(line, type=TraceRequest))
        except UNDECODABLE as error:
            raise TraceError(f"line {number}: {error}") from error
    if not requests:
        raise TraceError("the trace has no requests")
    begin_s = min(request.at for request in requests)
    if not math.isfinite(max(request.at for request in requests) - begin_s):
        raise TraceError("the times of the trace are too far apart")
    moved = (msgspec.structs.replace(request, at=request.at - begin_s) for request in requests)
    return Trace(tuple(sorted(moved, key=lambda request: request.at)), tuple(ran), settings)


def write(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    return (msgspec.json.encode(request) + b"\n" for request in requests)


def numbers(text: str, names: Sequence[str]) -> dict[str, float]:
    """Parse `a=1,b=2.5` to numbers by name. Raises TraceError for unknown names and invalid numbers."""
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise TraceError(f"{name!r} is unknown, expected one of {', '.join(names)}")
        try:
            values[name] = float(value)
        except ValueError as error:
            raise TraceError(f"{part!r}: expected a number after the =") from error
        if not math.isfinite(values[name]):
            raise TraceError(f"{part!r}: expected a finite number after the =")
    return values


def generate(spec: str) -> list[TraceRequest]:
    """Generate requests from `poisson:rate=200,length=64,...`, the first at time 0. Raises TraceError.

    `rate`: requests per second, for `seconds` seconds. `burst`: requests that arrive together. `inputs`: inputs of each
    request. `length`: mean tokens of an input, log-normal with `spread` as its sigma (0: all equal), at most 512.
    `bulk`: share of requests with priority bulk. `models`: number of models. `seed`: seed of the random numbers.
    """
    kind, _, rest = spec.partition(":")
    if kind != "poisson":
        raise TraceError(f"{kind!r}: expected poisson:name=number,...")
    parameters = {
        "rate": 100.0,
        "length": 64.0,
        "seconds": 10.0,
        "burst": 1.0,
        "inputs": 1.0,
        "spread": 0.8,
        "bulk": 0.0,
        "models": 1.0,
        "seed": 1.0,
    }
    parameters.update(numbers(rest, tuple(parameters)))
    if (
        min(parameters["rate"], parameters["length"], parameters["seconds"]) <= 0
        or min(parameters["burst"], parameters["inputs"], parameters["models"]) < 1
    ):
        raise TraceError("rate, length and seconds must be above 0; burst, inputs and models at least 1")
    if max(parameters["rate"] * parameters["seconds"], parameters["burst"]) * parameters["inputs"] > MAX_INPUTS:
        raise TraceError(
            f"--generate would make more than {MAX_INPUTS:,} inputs: lower the rate, the seconds or the inputs"
        )
    chance, sigma = random.Random(int(parameters["seed"])), parameters["spread"]  # noqa: S311  arrivals, no secrets
    middle = np.log(parameters["length"]) - sigma * sigma / 2
    requests: list[TraceRequest] = []
    at_s = 0.0
    while at_s < parameters["seconds"]:
        for _ in range(int(parameters["burst"])):
            tokens = tuple(
                min(MAX_TOKENS, max(1, round(chance.lognormvariate(middle, sigma))))
                for _ in range(int(parameters["inputs"]))
            )
            priority: Priority = "bulk" if chance.random() < parameters["bulk"] else "interactive"
            requests.append(
                TraceRequest(round(at_s, 6), tokens, f"model-{chance.randrange(int(parameters['models']))}", priority)
            )
        at_s += chance.expovariate(parameters["rate"] / parameters["burst"])
    return requests


def fit(ran: Sequence[Ran]) -> tuple[float, float, float]:
    """Fit the seconds of a batch as a + b * tokens + c * attention, with the least squared relative error. Return a, b,
    c, which are not negative. Raises TraceError.

    Every subset of the three terms is fitted. If two terms grow together in the measured batches, their coefficients
    cannot be separated, and one may become negative. The best fit without a negative coefficient is used; terms outside
    its subset get the coefficient 0.
    """
    if len(ran) < 3:
        raise TraceError("the trace has fewer than three measured batches: describe the device with --device")
    rows = np.array([(1.0, batch.tokens, batch.attention) for batch in ran])
    seconds = np.array([batch.seconds for batch in ran])
    if (seconds <= 0).any():
        raise TraceError("a measured batch has a time of 0 or less")
    scaled = rows / seconds[:, None]
    best, best_error = (float(seconds.mean()), 0.0, 0.0), np.inf
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            solution = np.linalg.lstsq(scaled[:, chosen], np.ones(len(ran)), rcond=None)[0]
            coefficients = np.zeros(3)
            coefficients[list(chosen)] = solution
            error = float(np.sum((scaled @ coefficients - 1.0) ** 2))
            # the margin rejects an additional term that does not improve the fit
            if (coefficients >= 0).all() and error < best_error - 1e-9 * len(ran):
                best, best_error = (float(coefficients[0]), float(coefficients[1]), float(coefficients[2])), error
    return best
