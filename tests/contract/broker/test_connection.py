"""Errors of a connection to a broker that cannot be used name the cause."""

import asyncio
import json

import pytest

from sie_broker import BrokerUnavailable
from sie_broker.nats import NatsBroker

INFO = {
    "server_id": "a",
    "version": "2.11.0",
    "go": "go",
    "host": "127.0.0.1",
    "port": 1,
    "max_payload": 1024,
    "proto": 1,
    "headers": True,
}


async def test_an_attempt_that_the_deadline_cuts_short_does_not_hide_what_the_broker_said_before() -> None:
    """The broker refuses the credentials at the first attempt and does not answer the later ones."""
    attempts = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
            await reader.readline()  # CONNECT
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnavailable, match="Authorization Violation"):
            await NatsBroker("test").open(f"nats://127.0.0.1:{port}", 1.0)
        assert attempts > 1
