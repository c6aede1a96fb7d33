"""A gateway or a config service ends behind a balancer of connections, such as a Kubernetes Service: no client sees an
error.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path

import httpx
from cluster import until
from stack import Device, Plan, Stack
from tcp_proxy import TcpProxy
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

LAME_DUCK_S = 4.0
LEARNS_S = 1.0  # until the balancer knows of the end
WITHIN_S = 60.0
PATH = "/v1/encode/toy/one"
TEXTS = {"items": ["hello"]}
WIDTH = 4096
MANY = {"items": ["hello"] * 300}  # its answer is larger than the buffers of sockets


class Client:
    """Sends requests over a connection that it keeps. `errors` has every failure and every status other than 200."""

    def __init__(self, url: str, pause_s: float) -> None:
        self.errors: list[str] = []
        self.answered = 0
        self.stopping = False
        self._url = url
        self._pause_s = pause_s

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=30) as http:
            while not self.stopping:
                try:
                    answer = await http.post(PATH, json=TEXTS)
                    if answer.status_code != 200:
                        self.errors.append(
                            f"{time.monotonic():.2f} {answer.status_code} {answer.json()['error']['code']}"
                        )
                except httpx.TransportError as error:
                    self.errors.append(f"{time.monotonic():.2f} {type(error).__name__}: {error}")
                self.answered += 1
                await asyncio.sleep(self._pause_s)


async def slowly(url: str, begun: asyncio.Event, seconds: float) -> int:
    """Read a large answer for at least `seconds`, then use its connection again. Return the bytes of the answer."""
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=30, limits=httpx.Limits(max_connections=1)
    ) as http:
        size, started_s = 0, time.monotonic()
        async with http.stream(
            "POST", PATH, json=MANY, headers={"accept": "application/vnd.apache.arrow.stream"}
        ) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes(1 << 17):
                size += len(piece)
                begun.set()
                if time.monotonic() - started_s < seconds:
                    await asyncio.sleep(0.2)
        again = await http.post(PATH, json=TEXTS)
        assert again.status_code == 200, again.text
        return size


async def frames_until_closed(socket: ClientConnection) -> tuple[int, int]:
    """Return how many frames came, and the code of the close that ended them."""
    count = 0
    try:
        while True:
            await socket.recv()
            count += 1
    except ConnectionClosed as closed:
        return count, closed.rcvd.code if closed.rcvd is not None else 0


async def test_a_gateway_that_ends_costs_no_client_an_error(tmp_path: Path) -> None:
    """Clients keep connections to both gateways, busy and slow ones, and read long answers. One gateway gets SIGTERM,
    and the balancer learns of it a second later. The gateway is unready and serves on, and its next answer on each
    connection says that it is the last. Then the gateway ends with 0. Every request of every client was answered.
    """
    with Stack(tmp_path, Plan(gateways=2, workers=(Device(width=WIDTH),))) as stack:
        ending = stack.gateways[0]
        ending.stop()
        ending.start("--lame-duck-s", str(LAME_DUCK_S))
        ending.wait_ready()
        ports = [int(url.rpartition(":")[2]) for url in stack.urls]
        turns = itertools.count()
        async with TcpProxy(lambda: ports[next(turns) % len(ports)]) as balancer:
            url = f"http://127.0.0.1:{balancer.port}"
            clients = [Client(url, pause_s) for pause_s in (0.05, 0.05, 0.05, 0.05, 1.5, 1.5)]
            running = [asyncio.create_task(client.run()) for client in clients]
            lasting_s = (1.0, 1.0, LAME_DUCK_S + 2, LAME_DUCK_S + 2)  # some end while the gateway serves on, some later
            begun = [asyncio.Event() for _ in lasting_s]
            streams = [asyncio.create_task(slowly(url, *pair)) for pair in zip(begun, lasting_s, strict=True)]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), WITHIN_S)
            async with (
                connect(f"{stack.urls[0].replace('http', 'ws')}/ws/cluster-status") as socket,
                httpx.AsyncClient(base_url=stack.urls[0], trust_env=False, timeout=30) as direct,
                httpx.AsyncClient(base_url=stack.urls[0], trust_env=False, timeout=30) as idle,
            ):
                watching = asyncio.create_task(frames_until_closed(socket))
                assert "connection" not in (await direct.post(PATH, json=TEXTS)).headers
                assert (await idle.post(PATH, json=TEXTS)).status_code == 200
                os.kill(ending.pid, signal.SIGTERM)
                await asyncio.to_thread(
                    until,
                    lambda: httpx.get(f"{stack.urls[0]}/readyz", timeout=60).status_code == 503,
                    WITHIN_S,
                    "unready",
                )
                answer = await direct.post(PATH, json=TEXTS)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
                for base in (stack.urls[0], stack.metrics_urls[0]):
                    probe = await direct.get(f"{base}/healthz")
                    assert (probe.status_code, probe.headers["connection"]) == (200, "close")
                await asyncio.sleep(LEARNS_S)
                ports[:] = ports[1:]
                frames, code = await watching
                assert (frames > 1, code) == (True, 1001)
            sizes = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
            assert len(set(sizes)) == 1
            await asyncio.to_thread(until, lambda: not ending.alive, WITHIN_S, "the end of the gateway")
            for client in clients:
                client.stopping = True
            await asyncio.gather(*running)
        assert ending.status == 0, "\n".join(ending.log)
    assert all(client.answered > 1 for client in clients)
    assert [client.errors for client in clients] == [[]] * len(clients)
