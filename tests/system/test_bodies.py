"""Bodies that would decode into many objects, sent to a real gateway: the memory that they take, and the latency of
other requests.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from body_bombs import BOMBS, MIB, Bomb
from stack import Plan, Stack

PATH = "/v1/encode/toy/one"
SENT = ("json maps in", "json maps of one in", "json texts of marks in", "json keys", "json depth", "msgpack")
WIDE = [bomb for bomb in BOMBS if bomb.name.startswith(SENT)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("bodies"), Plan()) as stack:
        yield stack


class Requests:
    """Sends short requests one after another: a given number, or as long as a context lasts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seconds: list[float] = []
        self.refused: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._send, args=(ended.is_set,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def send(self, count: int) -> None:
        end = len(self.seconds) + count
        self._send(lambda: len(self.seconds) >= end)

    def _send(self, has_ended: Callable[[], bool]) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not has_ended():
                began_s = time.perf_counter()
                answer = client.post(PATH, json={"items": ["What is deep learning?"]})
                self.seconds.append(time.perf_counter() - began_s)
                if answer.status_code != 200:
                    self.refused.append(answer.text)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.seconds, 99))


ORDINARY = Bomb("one text", is_msgpack=False, body=lambda size: b'{"items":[],"x":"' + b"a" * size + b'"}')


# runs in a process of its own: sending would keep the short requests waiting
THROWER = """
import http.client, pathlib, sys
host, path, kind, body, times = sys.argv[1:]
data, connection = pathlib.Path(body).read_bytes(), http.client.HTTPConnection(host)
for _ in range(int(times)):
    connection.request("POST", path, data, {"content-type": kind})
    answer = connection.getresponse()
    print(answer.status, answer.read()[:200])
"""


def throw(stack: Stack, bomb: Bomb, times: int) -> None:
    """Send a bomb `times` times, one after another, and check that each is refused."""
    file = stack.folder / "bomb"
    file.write_bytes(bomb.body(20 * MIB))
    host, kind = stack.urls[0].removeprefix("http://"), bomb.headers["content-type"]
    argv = [sys.executable, "-c", THROWER, host, PATH, kind, str(file), str(times)]
    answers = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=900).stdout.splitlines()
    assert [answer[:3] for answer in answers] == ["400"] * times, f"{bomb.name}: {answers[-1]}"


def test_bodies_of_many_values_leave_no_memory_behind(stack: Stack) -> None:
    gateway, growth = stack.gateways[0], {}
    throw(stack, BOMBS[0], 1)  # the first body makes the gateway allocate what it keeps: buffers, threads
    before = gateway.rss_bytes()
    for bomb in BOMBS[:: len(BOMBS) // 12]:
        throw(stack, bomb, 2)
        growth[bomb.name] = gateway.rss_bytes() - before
    assert growth[bomb.name] < 100 * MIB, growth


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_a_hundred_of_each_leave_no_memory_behind_and_keep_nobody_waiting(stack: Stack) -> None:
    quiet, beside, among = (Requests(stack.urls[0]) for _ in range(3))
    quiet.send(200)
    before, growth = stack.gateways[0].rss_bytes(), {}
    with beside.running():
        throw(stack, ORDINARY, 100)
    for bomb in WIDE:
        quiet.send(200)  # between the bombs: the machine may be slower than it was at the start
        with among.running():
            throw(stack, bomb, 100)
        growth[bomb.name] = (stack.gateways[0].rss_bytes() - before) // MIB
    p99s_ms = {
        name: round(1e3 * requests.p99_s, 1)
        for name, requests in (("quiet", quiet), ("beside", beside), ("among", among))
    }
    print(f"MiB after each: {growth}; p99 in ms: {p99s_ms}")
    assert not among.refused
    assert growth[bomb.name] < 200
    assert among.p99_s < 3 * quiet.p99_s, p99s_ms
    # bombs delay other requests at most twice as long as ordinary bodies of 20 MiB
    assert among.p99_s < 2 * beside.p99_s, p99s_ms
